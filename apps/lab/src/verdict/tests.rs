mod edges;

use super::*;
use crate::model::tests::{measured as cell, run_of as run};
use crate::model::{PlaceInfo, Published, axes_of as axes};

/// Five rounds within 2 % of a value.
fn around(value: f64) -> Vec<f64> {
    [0.99, 1.0, 1.01, 1.005, 0.995].map(|part| part * value).into()
}

fn layouts(values: &[(&str, f64)]) -> Run {
    let cells = values.iter().map(|(l, v)| cell(&[("layout", l)], "iops", &around(*v))).collect();
    run("iops", &["layout"], Some(&[("layout", "qcow2")]), cells)
}

#[test]
fn a_terminal_is_told_what_to_use_and_how_to_have_it() {
    let run = layouts(&[("qcow2", 100.0), ("qcow2-8k", 200.0)]);
    let lines = verdict(&run).lines();
    assert!(lines[0].starts_with("Use qcow2-8k: 2.00 times as good as qcow2"), "{lines:#?}");
    assert!(lines[1].starts_with("against the default (qcow2): 2.00x; "), "{lines:#?}");
    assert!(lines[2].starts_with("confidence: "), "{lines:#?}");
    assert!(lines.iter().any(|line| line.starts_with("  <disk ")), "{lines:#?}");
    // The default, because nothing is better, and every way that ties with it.
    let run = layouts(&[("qcow2", 100.0), ("raw", 100.0), ("qcow2-8k", 100.0)]);
    let lines = verdict(&run).lines();
    assert!(lines.iter().any(|l| l.starts_with("not significantly different: raw")), "{lines:#?}");
    assert!(!lines.iter().any(|l| l.starts_with("against")), "{lines:#?}");
    // Without measurements there is nothing to set up.
    assert!(!super::verdict(&Run::default()).lines().iter().any(|l| l.contains("<disk")));
}

#[test]
fn the_best_is_advised_with_its_gain() {
    let found = verdict(&layouts(&[("qcow2", 100.0), ("qcow2-8k", 200.0), ("raw", 199.0)]));
    assert_eq!(found.best, Some(axes(&[("layout", "qcow2-8k")])));
    assert_eq!(found.baseline, Some(axes(&[("layout", "qcow2")])));
    let gain = found.gain.unwrap();
    assert!((gain.ratio - 2.0).abs() < 0.02 && gain.interval.holds(2.0));
    assert_eq!(found.ties, [axes(&[("layout", "raw")])]);
    assert_eq!(found.confidence.level, Level::High);
    assert_eq!(
        found.sentence,
        "Use qcow2-8k: 2.00 times as good as qcow2, the default, in requests per second (1.97 to 2.03)."
    );
    assert!(found.setup.unwrap().commands[0].contains("cluster_size=8K"));
}

#[test]
fn a_tie_leaves_the_default() {
    let found = verdict(&layouts(&[("qcow2", 100.0), ("qcow2-8k", 100.5), ("raw", 50.0)]));
    assert_eq!(found.best, Some(axes(&[("layout", "qcow2")])));
    assert_eq!((&found.gain, &found.baseline), (&None, &None));
    assert_eq!(found.ties, [axes(&[("layout", "qcow2-8k")])]);
    assert!(
        found.sentence.starts_with("Stay with qcow2, the default: nothing measured here is better")
    );
    assert!(found.hidden.is_some_and(|most| most < 1.1), "{found:?}");
    // If the noise may hide a factor of two, the sentence begins with that.
    let noisy = |name, by: f64| {
        let values = [1.0, 1.5, 0.7, 1.2].map(|part| part * by);
        cell(&[("layout", name)], "iops", &values)
    };
    let (one, mut two) = (noisy("qcow2", 100.0), noisy("raw", 100.0));
    two.samples.rotate_left(1);
    two.samples.iter_mut().zip(0..).for_each(|(sample, round)| sample.round = round);
    let found = verdict(&run("iops", &["layout"], Some(&[("layout", "qcow2")]), vec![one, two]));
    assert!(found.hidden.is_some_and(|most| most > 1.25), "{found:?}");
    assert!(found.sentence.contains("noise may hide a gain of up to"));
}

#[test]
fn less_is_better_where_time_is_measured() {
    let of = |name, value| cell(&[("layout", name)], "elapsed_seconds", &around(value));
    let cells = vec![of("qcow2", 10.0), of("raw", 5.0)];
    let found = verdict(&run("elapsed_seconds", &["layout"], Some(&[("layout", "qcow2")]), cells));
    assert_eq!(found.best, Some(axes(&[("layout", "raw")])));
    assert!((found.gain.unwrap().ratio - 2.0).abs() < 0.05);
}

#[test]
fn loads_count_by_ratios() {
    // "b" wins the load with large numbers by a little, and loses the other one by far.
    let of = |layout, profile, value| {
        cell(&[("layout", layout), ("profile", profile)], "iops", &around(value))
    };
    let cells = vec![
        of("a", "seq", 10_000.0),
        of("b", "seq", 11_000.0),
        of("a", "rnd", 100.0),
        of("b", "rnd", 40.0),
        // Not measured under all loads, so it is not compared.
        of("c", "rnd", 900.0),
    ];
    let found = verdict(&run("iops", &["layout", "profile"], None, cells));
    assert_eq!(found.best, Some(axes(&[("layout", "a")])));
    assert_eq!(found.cells, [0, 2]);
    let said = |question: &str| {
        let answer = found.answers.iter().find(|answer| answer.question == question);
        answer.unwrap_or_else(|| panic!("{question}: {:?}", found.answers)).sentence.clone()
    };
    assert!(said("Which is best under seq?").starts_with("11k IOPS: b"));
    assert!(said("Which is best under rnd?").starts_with("900 IOPS: c"));
    assert!(said("Which layout is best?").starts_with("1.51 times as good ("));
}

#[test]
fn what_loses_data_is_not_advised() {
    let of = |cache, value| cell(&[("cache", cache)], "iops", &around(value));
    let cells = vec![of("none", 100.0), of("unsafe", 500.0), of("writeback", 150.0)];
    let found = verdict(&run("iops", &["cache"], Some(&[("cache", "none")]), cells));
    assert_eq!(found.best, Some(axes(&[("cache", "writeback")])));
    assert_eq!(found.set_aside.len(), 1);
    assert_eq!(found.set_aside[0].axes, axes(&[("cache", "unsafe")]));
    assert!(found.set_aside[0].reason.contains("flushes"));

    let of = |place, value| cell(&[("backend", place)], "iops", &around(value));
    let mut memory = run("iops", &["backend"], None, vec![of("fast", 900.0), of("ext4", 100.0)]);
    memory.environment.places.push(PlaceInfo {
        name: "fast".to_owned(),
        file_system: Some("tmpfs".to_owned()),
        ..PlaceInfo::default()
    });
    assert_eq!(verdict(&memory).best, Some(axes(&[("backend", "ext4")])));
    // If no other way exists, it is used in spite of the reason.
    memory.cells.truncate(1);
    let found = verdict(&memory);
    assert_eq!(found.best, Some(axes(&[("backend", "fast")])));
    // Not "nothing can be advised" beside "use this".
    let caution = &found.cautions[0];
    assert!(caution.starts_with("This is only the best of what was measured"), "{caution}");
    assert!(caution.contains("lost in a power failure"), "{caution}");
    assert!(found.set_aside.is_empty());
}

#[test]
fn tools_are_shown_and_not_advised() {
    let of =
        |layout, tool, value| cell(&[("layout", layout), ("tool", tool)], "iops", &around(value));
    let cells = vec![
        of("raw", "vdkit", 100.0),
        of("raw", "qemu-img", 300.0),
        of("qcow2", "vdkit", 120.0),
        of("qcow2", "qemu-img", 60.0),
    ];
    let found = verdict(&run("iops", &["layout", "tool"], None, cells));
    assert_eq!(found.best, Some(axes(&[("layout", "qcow2")])));
    assert_eq!(found.peers.len(), 2);
    let gain = |row: usize| found.peers[row].gains[0].1.ratio;
    assert!((gain(0) - 1.0 / 3.0).abs() < 0.01 && (gain(1) - 2.0).abs() < 0.05);
    assert!(!found.sentence.contains("vdkit"));
}

#[test]
fn confidence_follows_rounds_and_noise() {
    let level = |samples: &[f64]| {
        let of = |name, by: f64| {
            let samples: Vec<f64> = samples.iter().map(|value| value * by).collect();
            cell(&[("layout", name)], "iops", &samples)
        };
        let cells = vec![of("qcow2", 1.0), of("raw", 3.0)];
        verdict(&run("iops", &["layout"], Some(&[("layout", "qcow2")]), cells)).confidence
    };
    assert_eq!(level(&[100.0]).level, Level::Hint);
    assert!(level(&[100.0]).words.contains("does not show how much"));
    assert_eq!(level(&[100.0, 101.0, 102.0]).level, Level::Fair);
    assert_eq!(level(&[100.0, 150.0, 60.0]).level, Level::Low);
    assert_eq!(level(&around(100.0)).level, Level::High);
    let mut disturbed = layouts(&[("qcow2", 100.0), ("raw", 200.0)]);
    disturbed.environment.virtualization = Some("KVM".to_owned());
    let found = verdict(&disturbed);
    assert_eq!(found.confidence.level, Level::Fair);
    assert_eq!(found.cautions.len(), 1);
}

#[test]
fn flushes_survival_and_published_numbers_are_answered() {
    let mut run = layouts(&[("qcow2", 100.0), ("raw", 200.0)]);
    for (cell, (flushes, survived)) in run.cells.iter_mut().zip([(0.0, 0.0), (4.0, 1.0)]) {
        for sample in &mut cell.samples {
            sample.values.insert("flushes".to_owned(), flushes);
            sample.values.insert("final_fsync_seconds".to_owned(), 0.5);
            sample.values.insert("survived".to_owned(), survived);
        }
    }
    for (layout, value) in [("qcow2", 10.0), ("raw", 5.0)] {
        run.published.push(Published {
            axes: axes(&[("layout", layout)]),
            metric: "iops".to_owned(),
            value,
            source: "a paper".to_owned(),
        });
    }
    let answers = verdict(&run).answers;
    let said = |words: &str| answers.iter().any(|answer| answer.sentence.contains(words));
    assert!(said("In 1 of 2 cells the device completed flushes"), "{answers:?}");
    assert!(said("the longest final fsync took 500 ms"), "{answers:?}");
    assert!(said("1 of 2 survived without an error: raw. Failed: qcow2."), "{answers:?}");
    assert!(said("0 of 1 pairs that differ in both have the published order"), "{answers:?}");
}

#[test]
fn nothing_measured_is_said() {
    let mut run = layouts(&[("qcow2", 100.0), ("raw", 200.0)]);
    run.cells.iter_mut().for_each(|cell| cell.samples.clear());
    let found = verdict(&run);
    assert!(found.best.is_none() && found.sentence.contains("No configuration was measured"));
    let unknown = super::verdict(&Run::default());
    assert!(unknown.best.is_none() && unknown.sentence.contains("metric"));
}

#[test]
fn a_way_to_measure_is_not_advised_and_what_all_share_is_compared() {
    let of = |layout, front, value| {
        cell(&[("layout", layout), ("front", front)], "iops", &around(value))
    };
    // Only raw can be measured as a file, and with any other front qcow2 is as good.
    let cells = vec![
        of("raw", "file", 1000.0),
        of("raw", "fuse", 100.0),
        of("raw", "guest-virtio", 50.0),
        of("qcow2", "fuse", 100.0),
        of("qcow2", "guest-virtio", 50.0),
        of("qcow2-8k", "fuse", 200.0),
        of("qcow2-8k", "guest-virtio", 100.0),
    ];
    let mut run = run("iops", &["layout", "front"], Some(&[("layout", "qcow2")]), cells);
    run.plan.conditions = vec!["front".to_owned()];
    let found = verdict(&run);
    assert_eq!(found.best, Some(axes(&[("layout", "qcow2-8k")])));
    assert!((found.gain.unwrap().ratio - 2.0).abs() < 0.02);
    assert!(found.setup.unwrap().commands.iter().all(|line| !line.contains("mount")));
    // A way that failed where others were measured is left out, and its condition stays.
    run.cells[6].outcome = Outcome::Failed("no".to_owned());
    run.cells[6].samples.clear();
    let found = verdict(&run);
    assert_eq!(found.best, Some(axes(&[("layout", "qcow2")])));
    // If the front is a choice, all ways are compared as they are.
    run.plan.conditions.clear();
    assert_eq!(verdict(&run).best, Some(axes(&[("layout", "raw"), ("front", "file")])));
}

#[test]
fn guests_compare_with_guests() {
    let of =
        |front, cache, value| cell(&[("cache", cache), ("front", front)], "iops", &around(value));
    let cells = vec![
        of("nbd", "none", 100.0),
        of("nbd", "writeback", 90.0),
        of("guest-virtio", "writeback", 20.0),
        of("guest-ide", "writeback", 10.0),
    ];
    let baseline: &[(&str, &str)] = &[("cache", "writeback")];
    let mut run = run("iops", &["cache", "front"], Some(baseline), cells);
    run.cells[2].notes.push("the guest's processor was emulated (TCG)".to_owned());
    let found = verdict(&run);
    assert_eq!(found.best, Some(axes(&[("cache", "none"), ("front", "nbd")])));
    assert!(found.cautions[0].starts_with("Guests ran on an emulated processor"));
    let said = |question: &str| {
        found.answers.iter().find(|a| a.question == question).map(|a| a.sentence.as_str())
    };
    assert_eq!(said("Which front is best?"), None);
    let bus = said("Which front is best in a guest?").unwrap();
    assert!(
        bus.starts_with("2.00 times as good (") && bus.contains("guest-virtio against guest-ide")
    );
    let best = said("Which is best from the host?").unwrap();
    assert_eq!(best, "100 IOPS: none · nbd; the default, writeback · nbd, has 90 IOPS.");
    assert!(
        said("Which is best in a guest?").unwrap().starts_with("20 IOPS: writeback · guest-virtio")
    );
}

#[test]
fn a_full_pool_has_its_own_words() {
    let mut of = [("nbd", 1.0, 0.0), ("guest-virtio", 1.0, 1.0), ("nbd-qemu-nbd", 0.0, 0.0)].map(
        |(front, survived, stops)| {
            let mut cell = cell(&[("front", front)], "survived", &[survived]);
            cell.samples[0].values.insert("machine_stops".to_owned(), stops);
            cell
        },
    );
    let found = verdict(&run("survived", &["front"], None, of.to_vec()));
    // No daemon is advised if the guest survived without one.
    assert!(found.sentence.starts_with("Use guest-virtio: it survived in the one round without"));
    assert_eq!(found.setup.unwrap().commands.len(), 1);
    let last = &found.answers.last().unwrap().sentence;
    assert!(last.contains("nbd and guest-virtio (QEMU stopped the whole guest"), "{last}");
    assert!(last.ends_with("Failed: nbd-qemu-nbd."), "{last}");
    of[1].samples[0].values.insert("survived".to_owned(), 0.0);
    let found = verdict(&run("survived", &["front"], None, of.to_vec()));
    assert!(found.sentence.starts_with("Use nbd: the client waits"), "{}", found.sentence);
    of.iter_mut().for_each(|cell| {
        cell.samples[0].values.insert("survived".to_owned(), 0.0);
    });
    let none = verdict(&run("survived", &["front"], None, of.to_vec()));
    assert!(none.sentence.starts_with("Nothing survived here"), "{}", none.sentence);
}

/// Layouts in fronts of a full pool. A cell survived if its front did, except for `broken`.
fn pool(fronts: &[(&str, f64)], broken: &str) -> Run {
    let of = |layout: &str, front: &str, survived: f64| {
        let survived = if format!("{layout} {front}") == broken { 0.0 } else { survived };
        let mut cell = cell(&[("layout", layout), ("front", front)], "survived", &[survived; 3]);
        let stops = f64::from(u8::from(front == "guest-virtio"));
        for sample in &mut cell.samples {
            sample.values.insert("machine_stops".to_owned(), stops);
            // How long it took is no reason to choose.
            let seconds = if layout == "raw" { 5.0 } else { 9.0 };
            sample.values.insert("elapsed_seconds".to_owned(), seconds);
        }
        cell
    };
    let mut cells = Vec::new();
    for layout in ["raw", "qcow2"] {
        cells.extend(fronts.iter().map(|(front, part)| of(layout, front, *part)));
    }
    let baseline: &[(&str, &str)] = &[("layout", "qcow2"), ("front", "nbd-qemu-nbd")];
    run("survived", &["layout", "front"], Some(baseline), cells)
}

/// `nospace` once said "Use raw", although qcow2 in the same guest survived as well.
#[test]
fn survivors_are_equals() {
    let fronts = [("nbd", 1.0), ("nbd-qemu-nbd", 0.0), ("guest-virtio", 1.0)];
    let found = verdict(&pool(&fronts, ""));
    assert_eq!(found.advice, Advice::Use);
    let front = axes(&[("front", "guest-virtio")]);
    assert_eq!((found.best.as_ref(), found.leading.as_ref()), (Some(&front), Some(&front)));
    assert_eq!(
        found.sentence,
        "Use guest-virtio: it survived in all 3 rounds without a server besides QEMU, which stops \
         the whole guest while there is no space, until it is resumed, with raw and qcow2 alike. \
         The default, qcow2 · nbd-qemu-nbd, did not survive."
    );
    // Both cells are advised; the commands create the default's layout.
    assert_eq!(found.cells, [2, 5]);
    assert!(found.setup.as_ref().unwrap().commands[0].contains("-f qcow2"));
    assert_eq!(found.ties.len(), 2, "{:?}", found.ties);
    assert!(found.gain.is_none() && found.hidden.is_none() && found.exceptions.is_empty());
    assert_eq!(found.confidence.level, Level::Fair);
    assert!(found.lines().iter().any(|line| line.starts_with("survived as well: raw · nbd and")));
    // Here the layout makes a difference.
    let found = verdict(&pool(&fronts, "raw guest-virtio"));
    assert_eq!(found.best, Some(axes(&[("layout", "qcow2"), ("front", "guest-virtio")])));
    assert!(!found.sentence.contains("alike"), "{}", found.sentence);
}

#[test]
fn a_default_that_survived_stays() {
    let fronts = [("nbd", 1.0), ("nbd-qemu-nbd", 1.0), ("guest-virtio", 1.0)];
    let found = verdict(&pool(&fronts, ""));
    assert_eq!(found.advice, Advice::Stay);
    assert_eq!(found.best, Some(axes(&[("layout", "qcow2"), ("front", "nbd-qemu-nbd")])));
    assert_eq!(
        found.sentence,
        "Stay with qcow2 · nbd-qemu-nbd, the default: it survived in all 3 rounds; 4 other \
         configurations did as well."
    );
    assert_eq!(found.setup, None, "vdkit's command would start another program");
}

#[test]
fn one_failure_is_no_survival() {
    let mut run = pool(&[("nbd", 1.0), ("guest-virtio", 1.0)], "");
    for cell in &mut run.cells {
        cell.samples[1].values.insert("survived".to_owned(), 0.0);
    }
    let found = verdict(&run);
    assert_eq!((found.advice, found.best), (Advice::Untold, None));
    assert_eq!(found.sentence, "Nothing survived here in every round.");
    let last = &found.answers.last().unwrap().sentence;
    assert!(last.contains("raw · nbd (completed 2 of 3 rounds)"), "{last}");
    // The kernel of a guest logged an error, and fio did not.
    let mut run = pool(&[("guest-virtio", 1.0)], "");
    run.cells[0].samples[0].values.insert("io_errors".to_owned(), 1.0);
    assert_eq!(verdict(&run).best, Some(axes(&[("layout", "qcow2")])));
}

/// A round in which a load did nothing once had an arithmetic mean, beside geometric means.
#[test]
fn a_load_that_did_nothing_is_not_made_up_for() {
    let of = |profile, samples: &[f64]| {
        cell(&[("layout", "raw"), ("profile", profile)], "iops", samples)
    };
    let cells = vec![of("seq", &[900.0; 3]), of("rnd", &[100.0, 0.0, 100.0])];
    let run = run("iops", &["layout", "profile"], None, cells);
    let pick = Matrix::new(&run).unwrap().picks().remove(0);
    let values: Vec<f64> = pick.samples.iter().map(|(_, value)| value.round()).collect();
    assert_eq!(values, [300.0, 0.0, 300.0]);
}

/// The default once was better than "nothing measured here", with `unsafe` five times as fast in
/// the same run.
#[test]
fn what_may_not_be_advised_is_not_passed_over() {
    let of = |cache, value| cell(&[("cache", cache)], "iops", &around(value));
    let default: &[(&str, &str)] = &[("cache", "none")];
    let cells = vec![of("none", 100.0), of("writeback", 100.0), of("unsafe", 500.0)];
    let mut run = run("iops", &["cache"], Some(default), cells);
    let sentence = verdict(&run).sentence;
    assert!(
        sentence.starts_with(
            "Stay with none, the default: nothing measured here that can be advised is better"
        ),
        "{sentence}"
    );
    run.cells.remove(1);
    let found = verdict(&run);
    assert!(found.sentence.starts_with("Of what was measured, only none can be advised"));
    assert_eq!((found.compared, found.ties.len()), (1, 0));
}

#[test]
fn without_a_default_the_best_of_all_is_better_than_all() {
    let said = |values: &[f64]| {
        let cells = values
            .iter()
            .enumerate()
            .map(|(i, value)| cell(&[("layout", ["a", "b", "c"][i])], "iops", &around(*value)));
        verdict(&run("iops", &["layout"], None, cells.collect())).sentence
    };
    assert_eq!(said(&[300.0, 200.0, 100.0]), "Use a: the best of 3 in requests per second.");
    assert_eq!(
        said(&[200.5, 200.0, 100.0]),
        "Use a: significantly better in requests per second than 1 of the 2 others."
    );
}

#[test]
fn a_speed_of_zero_gives_no_confidence() {
    let cells = ["qcow2", "raw"].map(|name| cell(&[("layout", name)], "iops", &[0.0; 5]));
    let found = verdict(&run("iops", &["layout"], None, cells.to_vec())).confidence;
    assert_eq!((found.level, found.words.as_str()), (Level::Low, "5 rounds with a mean of 0"));
}

#[test]
fn the_second_time_and_reads_are_told() {
    let mut run = run(
        "elapsed_seconds",
        &["layout"],
        Some(&[("layout", "qcow2")]),
        [("qcow2", 2.0), ("raw", 1.9)]
            .map(|(layout, time)| {
                let axes = [("layout", layout), ("profile", "open"), ("images", "1")];
                cell(&axes, "elapsed_seconds", &[time])
            })
            .to_vec(),
    );
    for (cell, (second, reads)) in run.cells.iter_mut().zip([(0.5, 3.0), (1.0, 1.0)]) {
        cell.samples[0].values.insert("second_pass_seconds".to_owned(), second);
        cell.samples[0].values.insert("reads".to_owned(), reads);
        let device = if reads > 1.0 { 72.0 } else { 9.0 };
        cell.samples[0].values.insert("device_reads".to_owned(), device);
    }
    let answers = verdict(&run).answers;
    let said = |words: &str| answers.iter().any(|answer| answer.sentence.starts_with(words));
    assert!(
        said("500 ms with qcow2 (first pass: 2 s) and 1 s with raw (first pass: 1.90 s)."),
        "{answers:?}"
    );
    // The two numbers are reported separately, because they count different reads.
    assert!(said("1 (9 at the device) with raw and 3 (72 at the device) with qcow2: to open one"));
}

#[test]
fn formats_of_others_are_read_and_not_advised() {
    let found = verdict(&layouts(&[("qcow2", 100.0), ("vmdk", 300.0), ("raw", 101.0)]));
    assert_eq!(found.best, Some(axes(&[("layout", "qcow2")])));
    assert_eq!(found.set_aside.len(), 1);
    assert!(found.set_aside[0].reason.contains("exchange"));
}

#[test]
fn what_images_become_is_not_advised() {
    let found = verdict(&layouts(&[("qcow2", 100.0), ("qcow2-aged", 300.0), ("raw", 101.0)]));
    assert_eq!(found.best, Some(axes(&[("layout", "qcow2")])));
    assert!(found.set_aside[0].reason.contains("nobody would choose it"));
}

/// Layouts through two fronts of the same kind: vdkit's and QEMU's.
fn served(condition: bool) -> Run {
    let of = |layout, front, value| {
        cell(&[("layout", layout), ("front", front)], "iops", &around(value))
    };
    let cells = vec![
        of("qcow2", "fuse", 100.0),
        of("raw", "fuse", 150.0),
        of("qcow2", "fuse-qsd", 90.0),
        of("raw", "fuse-qsd", 30.0),
    ];
    let mut run = run("iops", &["layout", "front"], Some(&[("layout", "qcow2")]), cells);
    run.plan.conditions.extend(condition.then(|| "front".to_owned()));
    run
}

#[test]
fn what_is_advised_is_good_by_any_program() {
    // vdkit's cells alone would favor raw, but QEMU will serve the disk.
    let found = verdict(&served(true));
    assert_eq!(found.best, Some(axes(&[("layout", "qcow2")])));
    assert_eq!(found.cells, [0, 2]);
    assert_eq!(found.exceptions.len(), 1);
    let exception = &found.exceptions[0];
    assert_eq!(exception.load, axes(&[("front", "fuse")]));
    assert_eq!(exception.axes, axes(&[("layout", "raw"), ("front", "fuse")][..1]));
    assert!((exception.gain.ratio - 1.5).abs() < 0.05);
    // If the front is a choice, the programs are shown side by side.
    let found = verdict(&served(false));
    assert_eq!(found.best, Some(axes(&[("layout", "raw"), ("front", "fuse")])));
    assert!(found.exceptions.is_empty());
}

#[test]
fn what_was_not_measured_everywhere_is_named() {
    let of =
        |layout, profile| cell(&[("layout", layout), ("profile", profile)], "iops", &around(100.0));
    let cells =
        vec![of("a", "seq"), of("b", "seq"), of("a", "rnd"), of("b", "rnd"), of("c", "rnd")];
    let found = verdict(&run("iops", &["layout", "profile"], None, cells));
    assert_eq!(found.left_out, [axes(&[("layout", "c")])]);
}

/// `cold-open` once advised raw by a factor of 1.44 from one round.
#[test]
fn one_round_advises_nothing() {
    let best = |raw: f64, rounds: usize| {
        let of = |name, value: f64| cell(&[("layout", name)], "iops", &around(value)[..rounds]);
        let cells = vec![of("qcow2", 100.0), of("raw", raw)];
        verdict(&run("iops", &["layout"], Some(&[("layout", "qcow2")]), cells))
    };
    for (raw, rounds) in [(144.0, 1), (5000.0, 1), (200.0, 2)] {
        let found = best(raw, rounds);
        assert_eq!((found.advice, &found.best, &found.setup), (Advice::Untold, &None, &None));
        assert_eq!(found.leading, Some(axes(&[("layout", "raw")])));
        assert!(found.sentence.starts_with("Nothing is advised: "), "{}", found.sentence);
        assert_eq!(found.confidence.level, Level::Hint);
    }
    assert_eq!(
        best(144.0, 1).sentence,
        "Nothing is advised: one round does not show how much results vary; \
        raw was 1.44 times as good as qcow2, the default."
    );
    assert_eq!(best(200.0, 3).advice, Advice::Use);
}

/// `zvol-vs-qcow2 --device` once said "Stay with qcow2" although every raw cell had failed.
#[test]
fn no_advice_stands_without_what_was_asked_for() {
    let of = |layout, front, samples: &[f64]| {
        cell(&[("layout", layout), ("front", front)], "iops", samples)
    };
    let mut cells = vec![
        of("raw", "fuse", &[]),
        of("raw", "fuse-qsd", &[]),
        of("qcow2", "fuse", &around(100.0)),
        of("qcow2", "fuse-qsd", &around(100.0)),
        of("qcow2-8k", "fuse", &around(101.0)),
        of("qcow2-8k", "fuse-qsd", &around(99.0)),
    ];
    for cell in &mut cells[..2] {
        cell.outcome = Outcome::Failed("mount x is not ready after 60 s\nmore".to_owned());
    }
    let mut run = run("iops", &["layout", "front"], Some(&[("layout", "qcow2")]), cells);
    run.plan.conditions = vec!["front".to_owned()];
    let found = verdict(&run);
    assert_eq!((found.advice, found.best.clone()), (Advice::None, None));
    let lines = found.lines();
    assert_eq!(lines[0], "not measured: raw: 2 cells failed (mount x is not ready after 60 s)");
    assert!(
        lines[1].starts_with("Nothing is advised, because raw was not measured."),
        "{lines:#?}"
    );
    assert!(!lines.iter().any(|line| line.contains("Stay with")), "{lines:#?}");
    assert!(!lines.iter().any(|line| line.contains("<disk")), "{lines:#?}");
    let told = serde_json::to_string(&found).unwrap();
    assert!(told.starts_with(r#"{"not-measured":[{"what":{"layout":"raw"},"state":"failed","#));
    assert!(told.contains(r#""advice":"none""#) && !told.contains(r#""best""#), "{told}");
    // Cells that were skipped because a program is missing are not measured either.
    for cell in &mut run.cells[..2] {
        cell.outcome = Outcome::Skipped("qemu-storage-daemon is not installed".to_owned());
    }
    let found = verdict(&run);
    assert!(found.lines()[0].starts_with("not measured: raw: 2 cells skipped ("));
    assert_eq!(found.advice, Advice::None);
}

#[test]
fn what_failed_once_is_named_and_the_rest_is_advised() {
    let of = |layout, profile, value| {
        cell(&[("layout", layout), ("profile", profile)], "iops", &around(value))
    };
    let mut cells = vec![
        of("qcow2", "seq", 100.0),
        of("qcow2", "rnd", 100.0),
        of("qcow2-8k", "seq", 200.0),
        of("qcow2-8k", "rnd", 200.0),
        of("raw", "seq", 300.0),
        of("raw", "rnd", 300.0),
    ];
    cells[5].outcome = Outcome::Failed("fio: exit code 1".to_owned());
    let mut run = run("iops", &["layout", "profile"], Some(&[("layout", "qcow2")]), cells);
    // It failed in its sixth round. Such a configuration was once advised.
    let found = verdict(&run);
    assert_eq!(found.best, Some(axes(&[("layout", "qcow2-8k")])));
    let [aside] = &found.set_aside[..] else { panic!("{:?}", found.set_aside) };
    assert_eq!(aside.axes, axes(&[("layout", "raw")]));
    assert_eq!(aside.reason, "it failed after 5 rounds (fio: exit code 1)");
    assert!(
        found.lines()[0].starts_with("not measured: raw · rnd: failed after 5 rounds (fio"),
        "{:?}",
        found.lines()
    );
    run.cells[5].samples.clear();
    let found = verdict(&run);
    assert_eq!(
        (found.advice, found.best.clone()),
        (Advice::Use, Some(axes(&[("layout", "qcow2-8k")])))
    );
    assert!(found.lines()[0].starts_with("not measured: raw · rnd: 1 cell failed (fio"));
    // A load that failed for all ways.
    for cell in &mut run.cells {
        if cell.axis("profile") == Some("rnd") {
            cell.samples.clear();
            cell.outcome = Outcome::Failed("no".to_owned());
        }
    }
    assert!(verdict(&run).lines()[0].starts_with("not measured: rnd: 3 cells failed (no)"));
}

#[test]
fn nothing_is_advised_if_all_failed_later() {
    let mut run = layouts(&[("qcow2", 100.0), ("raw", 200.0)]);
    for cell in &mut run.cells {
        cell.outcome = Outcome::Failed("no".to_owned());
    }
    let found = verdict(&run);
    assert_eq!((found.advice, found.best, found.setup), (Advice::None, None, None));
    assert!(found.sentence.starts_with("Every configuration failed"), "{}", found.sentence);
}

/// The set-up once started `vdkit serve` for a disk that another program had served.
#[test]
fn what_another_program_served_has_no_commands_of_vdkit() {
    let of = |front, value| cell(&[("front", front)], "iops", &around(value));
    for front in ["nbd-qsd-native", "nbd-qsd-uring", "nbd-qemu-nbd"] {
        let found =
            verdict(&run("iops", &["front"], None, vec![of("fuse", 100.0), of(front, 200.0)]));
        assert_eq!(found.best, Some(axes(&[("front", front)])));
        assert_eq!(found.setup, None, "{front}");
        // With vdkit's own server in the run, the advice only concerns that one.
        let all = vec![of("fuse", 100.0), of("nbd", 150.0), of(front, 200.0)];
        let found = verdict(&run("iops", &["front"], None, all));
        assert_eq!(found.best, Some(axes(&[("front", "nbd")])), "{front}");
        assert!(found.setup.is_some());
    }
}

/// On a partition every count was once 0, and the answer was that the device completed none.
#[test]
fn flushes_that_nobody_counts_are_not_said_to_be_lost() {
    let mut run = layouts(&[("qcow2", 100.0), ("raw", 100.0)]);
    for sample in run.cells.iter_mut().flat_map(|cell| &mut cell.samples) {
        sample.values.insert("flushes".to_owned(), 0.0);
    }
    let answers = verdict(&run).answers;
    let found = answers.iter().find(|answer| answer.question.contains("flushes")).unwrap();
    assert!(found.sentence.starts_with("Not counted here: "), "{}", found.sentence);
    assert!(!found.sentence.contains("none with"), "{}", found.sentence);
}

/// The reports of `cold-open` and `convert-table` once showed "9.56× against default" under "stay
/// with the default", because the table compared the way with another program.
#[test]
fn there_is_one_default() {
    let of =
        |layout, tool, value| cell(&[("layout", layout), ("tool", tool)], "iops", &around(value));
    let cells = vec![
        of("qcow2", "qemu-img", 10.0),
        of("raw", "qemu-img", 10.0),
        of("qcow2", "vdkit", 95.6),
        of("raw", "vdkit", 95.5),
    ];
    let default: &[(&str, &str)] = &[("layout", "qcow2"), ("tool", "qemu-img")];
    let run = run("iops", &["layout", "tool"], Some(default), cells);
    let found = verdict(&run);
    assert_eq!(
        (found.advice, found.best.clone()),
        (Advice::Stay, Some(axes(&[("layout", "qcow2")])))
    );
    let matrix = Matrix::new(&run).unwrap();
    assert!(matrix.gain(&run.cells[2]).is_none(), "the advised default has a gain");
    let raw = matrix.gain(&run.cells[3]).unwrap();
    assert!((raw.ratio - 1.0).abs() < 0.01, "{raw:?}");
}

#[test]
fn space_beforehand_is_a_question_of_its_own() {
    let of = |layout, profile, value| {
        cell(&[("layout", layout), ("profile", profile)], "iops", &around(value))
    };
    let cells = vec![
        of("raw", "first-write", 100.0),
        of("raw-falloc", "first-write", 150.0),
        of("raw", "rewrite", 100.0),
        of("raw-falloc", "rewrite", 100.2),
    ];
    let answers = verdict(&run("iops", &["layout", "profile"], None, cells)).answers;
    let said = |question: &str| {
        let found = answers.iter().find(|answer| answer.question.ends_with(question));
        found.unwrap_or_else(|| panic!("{question}: {answers:?}")).sentence.clone()
    };
    let first = said("for the first write?");
    assert!(
        first.starts_with("1.50 times as good (") && first.contains("raw-falloc against raw"),
        "{first}"
    );
    assert!(said("for later writes?").contains("no significant difference"));
    // The same as a separate axis.
    let of = |prepared, value| {
        cell(&[("layout", "qcow2"), ("preallocation", prepared)], "iops", &around(value))
    };
    let cells = vec![of("off", 100.0), of("full", 200.0)];
    let answers = verdict(&run("iops", &["layout", "preallocation"], None, cells)).answers;
    let own = answers
        .iter()
        .find(|answer| answer.question.starts_with("Does preallocation pay"))
        .unwrap();
    assert!(own.sentence.starts_with("2.00 times as good ("), "{}", own.sentence);
    assert!(own.sentence.contains("qcow2 · full against off"), "{}", own.sentence);
}

#[test]
fn a_run_is_settled_once_more_rounds_would_tell_nothing() {
    let of = |values: &[(&str, &[f64])]| {
        let cells = values.iter().map(|(l, v)| cell(&[("layout", l)], "iops", v)).collect();
        run("iops", &["layout"], Some(&[("layout", "qcow2")]), cells)
    };
    let noisy: &[f64] = &[100.0, 160.0, 90.0];
    assert!(!is_settled(&of(&[("qcow2", noisy), ("raw", &[130.0, 110.0, 95.0])])));
    assert!(!is_settled(&of(&[("qcow2", &[100.0]), ("raw", &[200.0])])));
    assert!(is_settled(&of(&[("qcow2", &around(100.0)), ("raw", &around(200.0))])));
    assert!(is_settled(&of(&[("qcow2", &around(100.0)), ("raw", &around(100.0))])));
    assert!(is_settled(&of(&[("qcow2", &around(100.0))])));
    assert!(is_settled(&Run::default()));
}
