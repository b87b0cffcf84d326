//! `vdkit lab report` and `vdkit lab compare`: runs as files become a page and a comparison.

mod common;

use std::path::Path;

use common::Scratch;
use vdkit_lab::model::{Axes, Cell, Outcome, PlanSummary, Run, Sample};
use vdkit_lab::store::Store;

/// A run of two layouts with these values, three rounds each.
fn run_file(path: &Path, id: &str, values: [(&str, f64); 2]) {
    let axes = |layout: &str| -> Axes { vec![("layout".to_owned(), layout.to_owned())] };
    let plan = PlanSummary {
        name: "layouts".to_owned(),
        title: "Layouts <&> more".to_owned(),
        question: "Which layout?".to_owned(),
        axes: vec!["layout".to_owned()],
        metric: "iops".to_owned(),
        baseline: Some(axes("qcow2")),
        ..PlanSummary::default()
    };
    let cell = |(layout, _): &(&str, f64)| Cell {
        key: format!("layout={layout}"),
        axes: axes(layout),
        ..Cell::default()
    };
    let mut run = Run { id: id.to_owned(), plan, ..Run::default() };
    run.cells = values.iter().map(cell).collect();
    let mut store = Store::create(path, &run, &serde_json::json!({})).unwrap();
    for (cell, (_, value)) in run.cells.iter_mut().zip(values) {
        for (round, part) in (0u32..).zip([0.99, 1.0, 1.01]) {
            let values = [("iops".to_owned(), value * part)].into();
            store.add_sample(cell, &Sample { round, values, ..Sample::default() }).unwrap();
        }
        cell.outcome = Outcome::Measured;
        store.set_outcome(cell).unwrap();
    }
    store.end(1).unwrap();
}

#[test]
fn a_run_becomes_a_page() {
    let scratch = Scratch::new();
    run_file(&scratch.path("a.sqlite"), "a", [("qcow2", 100.0), ("raw", 200.0)]);
    let answer = scratch.ok(&["lab", "report", "a.sqlite"]);
    assert_eq!(answer.stdout, "a.html\n");
    let page = std::fs::read_to_string(scratch.path("a.html")).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("Layouts &lt;&amp;&gt; more"));
    assert!(page.contains("Use raw: 2.00 times as good as qcow2, the default"), "{page}");
    // The same again: an older report is replaced, and the run is as it was.
    scratch.ok(&["lab", "report", "a.sqlite"]);
    let printed = scratch.ok(&["lab", "report", "a.sqlite", "-o", "-"]).stdout;
    assert!(printed == page);
    assert_eq!(scratch.names(), ["a.html", "a.sqlite"]);
}

#[test]
fn programs_have_the_verdict_too() {
    let scratch = Scratch::new();
    run_file(&scratch.path("a.sqlite"), "a", [("qcow2", 100.0), ("raw", 200.0)]);
    let told = scratch.json_of("lab-report", 0, &["a.sqlite"]);
    assert!(told["sentence"].as_str().unwrap().starts_with("Use raw: 2.00 times as good as qcow2"));
    assert_eq!(
        (told["advice"].as_str(), told["not-measured"].as_array().unwrap().len()),
        (Some("use"), 0)
    );
    assert_eq!(told["best"]["layout"], "raw");
    assert_eq!(told["baseline"]["layout"], "qcow2");
    assert_eq!(told["gain"]["verdict"], "better");
    assert!((told["gain"]["ratio"].as_f64().unwrap() - 2.0).abs() < 0.01);
    assert!(told["libvirt-xml"].as_str().unwrap().contains("type='raw'"), "{told}");
    assert_eq!(scratch.names(), ["a.sqlite"]);
    // Nothing measured is an answer, too.
    run_file(&scratch.path("b.sqlite"), "b", [("qcow2", 0.0), ("raw", 0.0)]);
    assert!(scratch.json_of("lab-report", 0, &["b.sqlite"]).get("gain").is_none());
    scratch.fails(2, "cannot be used with", &["lab", "report", "a.sqlite", "--json", "-o", "-"]);
}

#[test]
fn files_of_others_are_kept() {
    let scratch = Scratch::new();
    run_file(&scratch.path("a.sqlite"), "a", [("qcow2", 100.0), ("raw", 200.0)]);
    scratch.write("mine.html", b"<p>mine</p>");
    scratch.fails(1, "is not a report", &["lab", "report", "a.sqlite", "-o", "mine.html"]);
    assert_eq!(std::fs::read(scratch.path("mine.html")).unwrap(), b"<p>mine</p>");
    scratch.fails(1, "is not a report", &["lab", "report", "a.sqlite", "-o", "a.sqlite"]);
    scratch.fails(1, "none.sqlite", &["lab", "report", "none.sqlite"]);
    scratch.fails(1, "mine.html", &["lab", "report", "mine.html"]);
    scratch.fails(1, "no/such", &["lab", "report", "a.sqlite", "-o", "no/such/file.html"]);
    assert_eq!(scratch.names(), ["a.sqlite", "mine.html"]);
}

#[test]
fn regressions_are_told_first() {
    let scratch = Scratch::new();
    for (i, by) in [1.0, 1.01, 0.99].into_iter().enumerate() {
        let values = |qcow2: f64, raw: f64| [("qcow2", qcow2 * by), ("raw", raw * by)];
        run_file(&scratch.path(&format!("old{i}.sqlite")), "old", values(100.0, 200.0));
        run_file(&scratch.path(&format!("new{i}.sqlite")), "new", values(160.0, 100.0));
    }
    let all = [
        "old0.sqlite",
        "new0.sqlite",
        "--before",
        "old1.sqlite",
        "old2.sqlite",
        "--after",
        "new1.sqlite",
        "new2.sqlite",
    ];
    let text = scratch.ok(&[&["lab", "compare"], &all[..]].concat()).stdout;
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("worse   0.50x (0.4"), "{text}");
    assert!(lines[0].ends_with(")  200 IOPS -> 100 IOPS  layout=raw"), "{text}");
    assert!(lines[1].starts_with("better  1.60x"), "{text}");
    assert_eq!(lines[2], "1 worse, 1 better, 0 not significant; metric: iops");
    let value = scratch.json_of("lab-compare", 0, &all);
    assert_eq!((&value["worse"], &value["cells"][0]["key"]), (&1.into(), &"layout=raw".into()));
    assert_eq!(
        (value["learnt"].as_bool(), value["before"].as_array().unwrap().len()),
        (Some(true), 3)
    );
    // One run each does not show how far runs lie apart.
    let two = scratch.ok(&["lab", "compare", "old0.sqlite", "new0.sqlite"]).stdout;
    assert!(two.contains("add those runs with --before and --after"), "{two}");
    assert!(two.ends_with("0 worse, 0 better, 2 not significant; metric: iops\n"), "{two}");
    scratch.fails(1, "none.sqlite", &["lab", "compare", "old0.sqlite", "none.sqlite"]);
}

#[test]
fn runs_of_the_same_are_counted() {
    let scratch = Scratch::new();
    let names: Vec<String> = (0..4).map(|i| format!("{i}.sqlite")).collect();
    for (name, by) in names.iter().zip([1.0, 1.02, 0.97, 1.01]) {
        run_file(&scratch.path(name), name, [("qcow2", 100.0 * by), ("raw", 200.0 * by)]);
    }
    let all: Vec<&str> = names.iter().map(String::as_str).collect();
    let text = scratch.ok(&[&["lab", "calibrate"], &all[..]].concat()).stdout;
    assert!(text.contains("one run against another                   6 tested, 0 wrong"), "{text}");
    let value = scratch.json_of("lab-calibrate", 0, &all);
    assert_eq!((&value["runs"], &value["pairs"]["judged"]), (&4.into(), &6.into()));
    assert_eq!(value["turns"]["judged"], 1);
    scratch.fails(2, "required", &["lab", "calibrate"]);
}
