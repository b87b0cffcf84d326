mod browser;
mod devtools;
pub(in crate::report) mod fixture;

use super::*;
use crate::model::{Cell, Outcome, Warning};

fn page() -> String {
    html(&fixture::run())
}

/// Every value of an attribute in the page.
fn values<'a>(page: &'a str, attribute: &str) -> Vec<&'a str> {
    let marker = format!(" {attribute}=\"");
    page.split(&marker).skip(1).map(|part| part.split('"').next().unwrap()).collect()
}

#[test]
fn nothing_is_loaded_from_elsewhere() {
    let page = page();
    for attribute in
        ["src", "href", "xlink:href", "action", "data", "poster", "srcset", "background", "ping"]
    {
        for value in values(&page, attribute) {
            assert!(attribute == "href" && value.starts_with('#'), "{attribute}={value}");
        }
    }
    for word in [
        "url(",
        "@import",
        "<link",
        "<iframe",
        "<img",
        "<object",
        "<embed",
        "<base",
        "fetch(",
        "XMLHttpRequest",
        "import(",
    ] {
        assert!(!page.contains(word), "{word}");
    }
    assert!(page.contains("default-src 'none'"));
    // Addresses of published sources are text and never links.
    for scheme in ["http://", "https://"] {
        for (at, _) in page.match_indices(scheme) {
            let before = &page[..at];
            assert!(before.rfind('<') < before.rfind('>'), "{}", &page[at..at + 40]);
        }
    }
}

#[test]
fn strings_cannot_become_markup() {
    let hostile = "\"'><img src=x onerror=alert(1)></script><script>alert(2)</script>&";
    let mut run = fixture::run();
    let text = || hostile.to_owned();
    run.id = text();
    run.vdkit_version = text();
    run.plan.title = text();
    run.plan.question = text();
    run.plan.name = text();
    run.environment.cpu = text();
    run.environment.kernel = text();
    run.environment.virtualization = Some(text());
    for place in &mut run.environment.places {
        place.path = text();
        place.mount_options = Some(text());
    }
    for section in &mut run.environment.sections {
        section.title = text();
        section.entries.push((text(), text()));
    }
    for (i, cell) in run.cells.iter_mut().enumerate() {
        cell.key = format!("{hostile}{i}");
        for (_, value) in &mut cell.axes {
            value.push_str(hostile);
        }
        cell.commands.push(text());
        cell.notes.push(text());
    }
    for published in &mut run.published {
        published.source = text();
    }
    run.cells.push(Cell { outcome: Outcome::Failed(text()), ..Cell::default() });
    run.warnings.push(Warning { text: text(), ..Warning::default() });
    if let Some(baseline) = &mut run.plan.baseline {
        for (_, value) in baseline {
            value.push_str(hostile);
        }
    }
    let page = html(&run);
    assert!(!page.contains("<img"), "an element was made");
    assert!(page.contains("&lt;img src=x"));
    // The page's script, and the data.
    assert_eq!(page.matches("<script").count(), 2);
    assert_eq!(page.matches("</script").count(), 2);
    assert!(!page.contains("alert(2)</script"));
}

#[test]
fn axes_with_hostile_names_are_harmless() {
    let mut run = fixture::run();
    for cell in &mut run.cells {
        for (axis, _) in &mut cell.axes {
            *axis = format!("{axis}\"><i>");
        }
    }
    for axis in &mut run.plan.axes {
        *axis = format!("{axis}\"><i>");
    }
    let page = html(&run);
    assert!(!page.contains("\"><i>") && page.contains("&quot;&gt;&lt;i&gt;"));
}

#[test]
fn the_script_is_known_by_its_hash() {
    let page = page();
    let policy = values(&page, "content").into_iter().find(|value| value.contains("sha256-"));
    let script = page.rsplit("<script>").next().unwrap().split("</script>").next().unwrap();
    let hash = BASE64_STANDARD.encode(&Sha256::digest(script.as_bytes())[..]);
    assert!(policy.unwrap().contains(&format!("sha256-{hash}")));
}

#[test]
fn charts_are_named_and_have_tables() {
    let page = page();
    let charts = page.matches("<svg class=\"chart").count();
    assert!(charts >= 12, "{charts}");
    for ids in values(&page, "aria-labelledby") {
        for id in ids.split(' ') {
            assert_eq!(page.matches(&format!(" id=\"{id}\"")).count(), 1, "{id}");
        }
    }
    let bars = page.matches("<svg class=\"bar ").count();
    assert!(bars > 10 && values(&page, "aria-label").len() >= bars);
    for id in [
        "verdict",
        "answers",
        "results",
        "map",
        "depth",
        "latency",
        "time",
        "published",
        "peers",
        "missing",
        "commands",
        "samples",
        "machine",
        "method",
    ] {
        assert!(page.contains(&format!("<section id=\"{id}\"")), "{id}");
    }
    for id in values(&page, "href") {
        assert!(page.contains(&format!(" id=\"{}\"", &id[1..])), "{id}");
    }
    assert!(!page.contains("NaN") && !page.contains("Infinity"));
}

#[test]
fn the_verdict_comes_first_and_is_whole() {
    let page = page();
    let at = |words: &str| page.find(words).unwrap_or_else(|| panic!("{words}"));
    assert!(at("id=\"verdict\"") < at("id=\"results\""));
    assert!(page.contains("vdkit create -f qcow2 -o cluster_size=8K"));
    assert!(page.contains("&lt;disk type='file' device='disk'&gt;"));
    assert!(page.contains("ignores the guest's flushes"));
}

#[test]
fn a_run_without_anything_is_a_page_too() {
    for run in [Run::default(), Run { cells: fixture::run().cells, ..Run::default() }] {
        let page = html(&run);
        assert!(page.contains("nothing is advised") && page.ends_with("</html>"));
    }
    let mut one = fixture::run();
    one.cells.truncate(1);
    one.cells[0].samples.truncate(1);
    assert!(html(&one).contains("nothing to compare it with"));
    let mut zero = fixture::run();
    for sample in zero.cells.iter_mut().flat_map(|cell| &mut cell.samples) {
        sample.values.values_mut().for_each(|value| *value = 0.0);
    }
    assert!(!html(&zero).contains("NaN"));
}

#[test]
fn guests_have_tables_of_their_own() {
    let mut run = fixture::run();
    assert!(!html(&run).contains("in a guest"));
    run.plan.axes.push("front".to_owned());
    for (i, cell) in run.cells.iter_mut().enumerate() {
        let front = if i % 2 == 0 { "nbd" } else { "guest-virtio" };
        cell.axes.push(("front".to_owned(), front.to_owned()));
    }
    let page = html(&run);
    for words in ["in a guest</caption>", "from the host</caption>", "What the names mean"] {
        assert!(page.contains(words), "{words}");
    }
}

#[test]
fn few_rounds_are_told_by_a_sign() {
    let mut run = fixture::run();
    assert!(!html(&run).contains('≈'));
    for cell in &mut run.cells {
        cell.samples.truncate(1);
    }
    let page = html(&run);
    assert!(page.contains("≈: one or two rounds") && !page.contains("class=\"up\""));
    // The heading is only as strong as the evidence.
    assert!(page.contains(">Undecided<") && page.contains("Too little evidence"));
    assert!(!page.contains("Use here") && !page.contains("<disk type"));
    assert!(!page.contains(">advised</span>"), "a way is marked as advised");
}

#[test]
fn a_ranking_each_for_reads_writes_and_both() {
    let mut run = fixture::run();
    for (i, cell) in run.cells.iter_mut().enumerate() {
        let (read, write) = (1e6 * (i + 1) as f64, 2e8 - 1e6 * i as f64);
        for sample in &mut cell.samples {
            for (key, value) in [
                ("read_bytes_per_second", read),
                ("write_bytes_per_second", write),
                ("score", (read + write) / 2e6),
            ] {
                sample.values.insert(key.to_owned(), value);
            }
        }
    }
    let page = html(&run);
    let scores = page.split("id=\"scores\"").nth(1).unwrap().split("</section>").next().unwrap();
    for title in ["Weighted read", "Weighted write", "Weighted mean of both"] {
        assert!(scores.contains(&format!("<caption>{title}: the best five of ")), "{title}");
    }
    // Each ranking is in its own order.
    assert!(page.contains("by weighted read?</dt><dd>117 MB/s"), "{}", &scores[..2000]);
    assert!(page.contains("by weighted write?</dt><dd>200 MB/s"));
}

/// Rankings of scores once showed `unsafe` among the best five without a mark.
#[test]
fn what_may_lose_data_is_marked_wherever_it_is_named() {
    let mut run = fixture::run();
    for sample in run.cells.iter_mut().flat_map(|cell| &mut cell.samples) {
        let score = sample.values["iops"];
        for key in ["read_bytes_per_second", "write_bytes_per_second", "score"] {
            sample.values.insert(key.to_owned(), score);
        }
    }
    let page = html(&run);
    let (evidence, _) = page.split_once("id=\"words\"").unwrap();
    let section = |id: &str| evidence.split(&format!("<section id=\"{id}\"")).nth(1).unwrap();
    for part in evidence.split("<section id=").skip(1) {
        // Texts between tags, and the data of the map.
        let texts = part.split('<').filter_map(|tag| tag.split_once('>')).map(|(_, text)| text);
        for text in texts {
            let (named, marked) =
                (text.matches("unsafe").count(), text.matches("unsafe (may lose data)").count());
            assert_eq!(named, marked + text.matches("ache=unsafe").count(), "{text}");
        }
    }
    for id in ["answers", "results", "map", "depth", "latency", "scores"] {
        let part = section(id).split("</section>").next().unwrap();
        assert!(part.contains("unsafe (may lose data)"), "{id}");
    }
    for id in ["results", "scores"] {
        assert!(section(id).contains("a power failure may damage the guest"), "{id}");
    }
    for cell in &mut run.cells {
        cell.axes.retain(|(axis, _)| axis != "cache");
    }
    assert!(!html(&run).contains("may lose data"));
}

/// Raw was not measured: the page says so first and advises nothing.
#[test]
fn what_was_not_measured_comes_before_the_headline() {
    let mut run = fixture::run();
    for cell in &mut run.cells {
        if cell.axis("layout") == Some("raw-sparse") {
            cell.samples.clear();
            cell.outcome = Outcome::Failed("mount a b is not ready after 60 s".to_owned());
        }
    }
    let page = html(&run);
    let section = page.split("id=\"verdict\"").nth(1).unwrap().split("</section>").next().unwrap();
    let at = |words: &str| section.find(words).unwrap_or_else(|| panic!("{words}"));
    assert!(at("<li>raw-sparse: 27 cells failed (mount a b") < at("<h2"));
    assert!(at("No advice") < at("Not measured: raw-sparse"));
    assert!(!section.contains("Stay with") && !section.contains("Use here"));
    assert!(!section.contains("&lt;disk"), "an element is offered");
}

#[test]
fn a_color_means_one_way_in_all_charts() {
    let page = page();
    let mut names: std::collections::BTreeMap<String, std::collections::BTreeSet<String>> =
        Default::default();
    for item in page.split("class=\"swatch\"><line class=\"line ").skip(1) {
        let color = item.split('"').next().unwrap().to_owned();
        let name = item.split("</svg>").nth(1).unwrap().split('<').next().unwrap().to_owned();
        names.entry(color).or_default().insert(name);
    }
    assert!(names.len() > 2, "{names:?}");
    // Names of a chart's lines contain only axes in which the ways differ.
    for (color, names) in &names {
        let longest = names.iter().max_by_key(|name| name.len()).unwrap();
        let parts = |name: &String| name.split(" · ").map(str::to_owned).collect::<Vec<_>>();
        let all = parts(longest);
        assert!(
            names.iter().all(|name| parts(name).iter().all(|p| all.contains(p))),
            "{color}: {names:?}"
        );
    }
    assert!(!page.contains("steady by SNIA"), "loads of 30 s have a steady state");
}

#[test]
fn what_came_through_has_no_bars() {
    let mut run = fixture::run();
    run.plan.metric = "survived".to_owned();
    run.published.clear();
    for (i, cell) in run.cells.iter_mut().enumerate() {
        cell.notes.push("paused, and went on when there was room".to_owned());
        for sample in &mut cell.samples {
            sample.values.insert("survived".to_owned(), f64::from(u8::from(i % 2 == 0)));
        }
    }
    let page = html(&run);
    assert!(page.contains("What happened") && page.contains("Paused, and went on when"));
    assert!(!page.contains("longer bars are better") && !page.contains("<svg class=\"bar "));
}

/// One round of a full pool was once as loud as many.
#[test]
fn one_round_is_a_first_hint() {
    let survived = |rounds: usize| {
        let mut run = fixture::run();
        run.plan.metric = "survived".to_owned();
        for cell in &mut run.cells {
            cell.samples.truncate(rounds);
            let survives = cell.axis("layout") != Some("qcow2");
            for sample in &mut cell.samples {
                sample.values.insert("survived".to_owned(), f64::from(u8::from(survives)));
            }
        }
        html(&run)
    };
    let one = survived(1);
    assert!(one.contains("<p class=\"kicker\">A first hint</p>") && !one.contains("Use here"));
    assert!(survived(3).contains("<p class=\"kicker loud\">Use here</p>"));
}

/// All 108 cells were once said to be measured, below a list of one that was not.
#[test]
fn a_cell_that_failed_later_is_not_counted_as_measured() {
    let mut run = fixture::run();
    let all = run.cells.len();
    run.cells[3].outcome = Outcome::Failed("the guest does not shut down\nits console:".to_owned());
    let page = html(&run);
    // Another cell of the fixture never worked.
    assert!(page.contains(&format!("<span>{} of {all} cells measured", all - 2)), "the facts");
    assert!(page.contains("failed after 5 rounds (the guest does not shut down)"));
    // A page once had a quarter of an hour of a guest's console in one field.
    let console = format!("it failed\n{}", "eta 01m:01s ".repeat(1000));
    run.cells[3].outcome = Outcome::Failed(console);
    assert!((1..60).contains(&html(&run).matches("eta 01m:01s").count()));
}

#[test]
fn published_numbers_say_what_differs() {
    let mut run = fixture::run();
    run.plan.differs = "Theirs: <other> disks.".to_owned();
    let page = html(&run);
    assert!(page.contains("What differs. ") && page.contains("Theirs: &lt;other&gt; disks."));
    // Each number combines three file systems, two cache modes and three loads.
    assert!(page.contains("median of 27 cells: "), "the reader is not told of how many");
    run.plan.differs.clear();
    assert!(!html(&run).contains("What differs. "));
}

#[test]
fn scores_of_guests_stand_apart() {
    let mut run = fixture::run();
    run.plan.axes.push("front".to_owned());
    for (i, cell) in run.cells.iter_mut().enumerate() {
        let front = if i % 2 == 0 { "nbd" } else { "guest-virtio" };
        cell.axes.push(("front".to_owned(), front.to_owned()));
        for sample in &mut cell.samples {
            sample.values.insert("score".to_owned(), 1234.0);
        }
    }
    let page = html(&run);
    for words in [
        "Weighted mean of both, from the host: the best five of ",
        "Weighted mean of both, in a guest: the best five of ",
        "1.23 GB/s",
        "Which are the best five by weighted mean of both, in a guest?",
    ] {
        assert!(page.contains(words), "{words}");
    }
}
