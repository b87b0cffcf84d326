//! The borders of decisions.

use super::*;

/// Once the default behind one front was advised, although the same default behind another front
/// had the larger value.
#[test]
fn of_several_defaults_the_best_stays() {
    let of = |layout, front, by: f64, turn: usize| {
        let mut values = [0.9, 1.0, 1.1, 1.02, 0.94, 1.05].map(|part| part * by);
        values.rotate_left(turn);
        cell(&[("layout", layout), ("front", front)], "iops", &values)
    };
    let cells = vec![
        of("raw", "guest-scsi", 243.0, 0),
        of("qcow2", "guest-virtio", 235.0, 1),
        of("raw", "guest-virtio", 227.0, 2),
        of("qcow2", "guest-scsi", 222.0, 3),
    ];
    let run = run("iops", &["layout", "front"], Some(&[("layout", "qcow2")]), cells);
    let found = verdict(&run);
    assert_eq!(found.best, Some(axes(&[("layout", "qcow2"), ("front", "guest-virtio")])));
    assert_eq!((found.advice, &found.gain, &found.baseline), (Advice::Stay, &None, &None));
    assert!(found.hidden.is_some_and(|most| most > 1.03), "{found:?}");
    assert_eq!(found.ties.len(), 3);
}

/// One configuration with two rounds is no evidence, whatever the others have.
#[test]
fn each_configuration_needs_three_rounds() {
    let of = |layout, samples: &[f64]| cell(&[("layout", layout)], "iops", samples);
    let cells = vec![of("raw", &around(200.0)), of("qcow2", &[100.0, 101.0])];
    let found = verdict(&run("iops", &["layout"], Some(&[("layout", "qcow2")]), cells));
    assert_eq!((found.advice, found.confidence.level), (Advice::Untold, Level::Hint));
    assert!(found.sentence.contains("not every configuration has three rounds"), "{found:?}");
}

#[test]
fn what_is_certainly_worse_hides_no_gain() {
    let found = verdict(&layouts(&[("qcow2", 100.0), ("raw", 50.0)]));
    assert_eq!((found.advice, found.hidden), (Advice::Stay, None));
    assert_eq!(
        found.sentence,
        "Stay with qcow2, the default: nothing measured here is better in requests per second."
    );
}

/// Confidence in a comparison is that in its noisier side.
#[test]
fn a_noisy_default_lowers_the_confidence() {
    let of = |layout, samples: &[f64]| cell(&[("layout", layout)], "iops", samples);
    let noisy = [80.0, 120.0, 100.0, 70.0, 130.0];
    let cells = vec![of("raw", &around(1000.0)), of("qcow2", &noisy)];
    let found = verdict(&run("iops", &["layout"], Some(&[("layout", "qcow2")]), cells));
    assert_eq!((found.advice, found.confidence.level), (Advice::Use, Level::Low), "{found:?}");
}

#[test]
fn many_rounds_of_survival_are_fairly_certain() {
    let of = |front, samples: &[f64]| cell(&[("front", front)], "survived", samples);
    let cells = vec![of("nbd", &[1.0; 20]), of("fuse", &[0.0; 20])];
    let found = verdict(&run("survived", &["front"], None, cells));
    assert_eq!((found.advice, found.confidence.level), (Advice::Use, Level::Fair));
}

/// Two values that were only not measured together block no advice.
#[test]
fn a_missing_pair_is_named_and_blocks_nothing() {
    let of = |layout, cache, samples: &[f64]| {
        cell(&[("layout", layout), ("cache", cache)], "iops", samples)
    };
    let mut cells = vec![
        of("qcow2", "none", &around(100.0)),
        of("qcow2", "writeback", &around(200.0)),
        of("raw", "none", &around(100.0)),
        of("raw", "writeback", &[]),
    ];
    cells[3].outcome = Outcome::Failed("no".to_owned());
    let default: &[(&str, &str)] = &[("layout", "qcow2"), ("cache", "none")];
    let found = verdict(&run("iops", &["layout", "cache"], Some(default), cells));
    assert_eq!(found.advice, Advice::Use, "{}", found.sentence);
    let [missing] = &found.missing[..] else { panic!("{:?}", found.missing) };
    assert_eq!((missing.state, missing.blocks), ("failed", false));
    assert_eq!(missing.what, axes(&[("layout", "raw"), ("cache", "writeback")]));
}

/// A value whose cells failed and were skipped has failed.
#[test]
fn the_worst_state_is_named() {
    let of = |layout, profile, samples: &[f64]| {
        cell(&[("layout", layout), ("profile", profile)], "iops", samples)
    };
    let mut cells = vec![
        of("raw", "seq", &[]),
        of("raw", "rnd", &[]),
        of("raw", "mix", &[]),
        of("qcow2", "seq", &around(100.0)),
        of("qcow2", "rnd", &around(100.0)),
        of("qcow2", "mix", &around(100.0)),
    ];
    cells[0].outcome = Outcome::Pending;
    cells[1].outcome = Outcome::Skipped("no fio".to_owned());
    cells[2].outcome = Outcome::Failed("broken".to_owned());
    let found = verdict(&run("iops", &["layout", "profile"], None, cells));
    let lines = found.lines();
    assert_eq!(lines[0], "not measured: raw: 3 cells failed (broken)", "{lines:#?}");
}

/// A load that one way lacks a round of has no mean in that round.
#[test]
fn a_round_counts_only_if_all_loads_have_it() {
    let of = |profile, samples: &[f64]| {
        cell(&[("layout", "raw"), ("profile", profile)], "iops", samples)
    };
    let cells = vec![of("seq", &[100.0, 100.0, 100.0]), of("rnd", &[1.0, 1.0])];
    let run = run("iops", &["layout", "profile"], None, cells);
    let pick = &Matrix::new(&run).unwrap().picks()[0];
    assert_eq!(pick.summary.count, 2);
    assert!((pick.summary.median - 10.0).abs() < 1e-9, "{pick:?}");
}

/// A default that did nothing has no ratio, so nothing speaks for it.
#[test]
fn a_default_of_zero_does_not_stay() {
    let of = |layout, samples: &[f64]| cell(&[("layout", layout)], "iops", samples);
    let cells = vec![of("raw", &around(100.0)), of("qcow2", &[0.0; 5])];
    let found = verdict(&run("iops", &["layout"], Some(&[("layout", "qcow2")]), cells));
    assert_eq!((found.advice, found.best), (Advice::Untold, None));
}

#[test]
fn without_a_default_the_best_within_the_noise_is_not_advised() {
    let of = |layout, samples: &[f64]| cell(&[("layout", layout)], "iops", samples);
    let cells =
        vec![of("raw", &[100.0, 150.0, 90.0, 120.0]), of("qcow2", &[120.0, 80.0, 130.0, 100.0])];
    let found = verdict(&run("iops", &["layout"], None, cells));
    assert_eq!((found.advice, found.best), (Advice::Untold, None));
    assert!(found.sentence.contains("is not significantly better"), "{}", found.sentence);
}

#[test]
fn what_loses_data_and_is_slower_is_not_listed() {
    let of = |cache, value| cell(&[("cache", cache)], "iops", &around(value));
    let default: &[(&str, &str)] = &[("cache", "none")];
    for (by, listed) in [(50.0, 0), (100.0, 0), (200.0, 1)] {
        let cells = vec![of("none", 100.0), of("unsafe", by)];
        let found = verdict(&run("iops", &["cache"], Some(default), cells));
        assert_eq!(found.set_aside.len(), listed, "{by}");
    }
}

/// Guests are not compared with the host, which is no gap of the run.
#[test]
fn the_other_position_is_no_gap() {
    let of = |layout, front, value| {
        cell(&[("layout", layout), ("front", front)], "iops", &around(value))
    };
    let cells = vec![
        of("raw", "nbd", 100.0),
        of("qcow2", "nbd", 100.0),
        of("raw", "fuse", 100.0),
        of("qcow2", "fuse", 100.0),
        of("raw", "guest-virtio", 10.0),
        of("qcow2", "guest-virtio", 10.0),
    ];
    let found = verdict(&run("iops", &["layout", "front"], Some(&[("layout", "qcow2")]), cells));
    assert_eq!((found.compared, found.left_out), (4, Vec::new()));
}

fn survivors(baseline: Option<&[(&str, &str)]>, ways: &[(&str, &str, f64)]) -> Verdict {
    let of = |(layout, front, survived): &(&str, &str, f64)| {
        cell(&[("layout", layout), ("front", front)], "survived", &[*survived; 3])
    };
    verdict(&run("survived", &["layout", "front"], baseline, ways.iter().map(of).collect()))
}

/// The values that all survivors have are advised alone only if no other way failed with them.
#[test]
fn a_value_that_failed_elsewhere_is_not_advised_alone() {
    let default: &[(&str, &str)] = &[("layout", "qcow2"), ("front", "nbd-qemu-nbd")];
    let ways = [
        ("raw", "guest-virtio", 1.0),
        ("qcow2", "guest-virtio", 1.0),
        ("qcow2-8k", "guest-virtio", 0.0),
        ("qcow2", "nbd-qemu-nbd", 0.0),
    ];
    let found = survivors(Some(default), &ways);
    assert_eq!(found.best, Some(axes(&[("layout", "qcow2"), ("front", "guest-virtio")])));
    // Nothing is common to these, so one of them is advised as a whole.
    let found = survivors(None, &[("raw", "guest-virtio", 1.0), ("qcow2", "guest-scsi", 1.0)]);
    assert_eq!((found.advice, found.best.map(|best| best.len())), (Advice::Use, Some(2)));
    let found = survivors(None, &[("raw", "guest-virtio", 1.0)]);
    assert_eq!(found.advice, Advice::Stay);
    assert!(found.sentence.starts_with("Only raw · guest-virtio was measured"), "{found:?}");
}

/// A way that failed once was counted among the others that did as well.
#[test]
fn only_survivors_did_as_well() {
    let default: &[(&str, &str)] = &[("layout", "qcow2"), ("front", "nbd")];
    let ways = [("qcow2", "nbd", 1.0), ("raw", "nbd", 1.0), ("raw", "fuse", 0.0)];
    let found = survivors(Some(default), &ways);
    assert!(found.sentence.ends_with("; one other configuration did as well."), "{found:?}");
}

/// A guest's kernel may complete what it has reported as an error.
#[test]
fn an_error_that_was_seen_is_no_survival() {
    let mut seen = cell(&[("front", "guest-virtio")], "survived", &[1.0; 3]);
    assert_eq!(asked::survived(&seen), Some(true));
    seen.samples[1].values.insert("io_errors".to_owned(), 1.0);
    assert_eq!(asked::survived(&seen), Some(false));
}

/// What the advice could not have chosen does not block it: fronts in guests beside those on the
/// host, other programs, loads, and what a place cannot have.
#[test]
fn what_could_not_be_advised_blocks_nothing() {
    let of = |layout, front, value: f64| {
        cell(&[("layout", layout), ("front", front)], "iops", &around(value))
    };
    let default: &[(&str, &str)] = &[("layout", "qcow2")];
    for front in ["guest-virtio", "nbd-qemu-nbd"] {
        let mut cells = vec![
            of("qcow2", "nbd", 100.0),
            of("raw", "nbd", 200.0),
            of("qcow2", "fuse", 100.0),
            of("raw", "fuse", 150.0),
            of("qcow2", front, 1.0),
            of("raw", front, 1.0),
        ];
        for cell in &mut cells[4..] {
            cell.samples.clear();
            cell.outcome = Outcome::Failed("no".to_owned());
        }
        let found = verdict(&run("iops", &["layout", "front"], Some(default), cells));
        assert_eq!((found.advice, found.missing.len()), (Advice::Use, 1), "{front}: {found:?}");
    }
    let of = |layout, profile, value| {
        cell(&[("layout", layout), ("profile", profile)], "iops", &around(value))
    };
    let names = ["database", "rnd4k-q1-write"];
    let ways = [("qcow2", 100.0), ("raw", 200.0)];
    let all = names.iter().flat_map(|load| ways.map(|(layout, value)| of(layout, load, value)));
    let mut run = run("iops", &["layout", "profile"], Some(default), all.collect());
    let mut failed = run.clone();
    for cell in &mut failed.cells[2..] {
        cell.samples.clear();
        cell.outcome = Outcome::Failed("no".to_owned());
    }
    let missing = verdict(&failed).missing;
    assert!(missing.len() == 1 && !missing[0].blocks, "a load that failed for all: {missing:?}");
    // A preallocated file on a device.
    let axes = axes(&[("backend", "loop"), ("layout", "raw-falloc"), ("profile", "database")]);
    let outcome = Outcome::Skipped("not on a device".to_owned());
    run.cells.push(Cell { key: "falloc".to_owned(), axes, outcome, ..Cell::default() });
    assert_eq!(verdict(&run).advice, Advice::None, "it might have been possible");
    let effort = crate::model::Effort { rounds: 5, seconds: 1.0, disk: 1 << 20, bytes: 1 << 20 };
    run.plan.effort = Some(effort);
    run.environment.places.push(PlaceInfo {
        name: "loop".to_owned(),
        kind: crate::model::PlaceKind::Device,
        total_bytes: 1 << 30,
        ..PlaceInfo::default()
    });
    assert_eq!(verdict(&run).advice, Advice::Use, "it is impossible");
}

/// Loads whose rate is uneven give no high confidence, however little the rounds vary.
#[test]
fn uneven_loads_are_not_certain() {
    let mut run = layouts(&[("qcow2", 100.0), ("raw", 200.0)]);
    assert_eq!(verdict(&run).confidence.level, Level::High);
    let uneven = crate::model::Steady { reached: false, ..Default::default() };
    run.cells[1].samples[0].steady = Some(uneven);
    assert_eq!(verdict(&run).confidence.level, Level::Fair);
}

/// A value that was only measured behind the faster front is not better because of that.
#[test]
fn values_of_an_axis_are_compared_all_else_equal() {
    let of = |layout, front, value| {
        cell(&[("layout", layout), ("front", front)], "iops", &around(value))
    };
    let cells = vec![of("raw", "nbd", 100.0), of("qcow2", "nbd", 100.0), of("raw", "fuse", 1000.0)];
    let answers = verdict(&run("iops", &["layout", "front"], None, cells)).answers;
    let found = answers.iter().find(|answer| answer.question == "Which layout is best?").unwrap();
    assert!(found.sentence.contains("no significant difference"), "{found:?}");
}

#[test]
fn one_way_with_few_rounds_leaves_a_load_undecided() {
    let of = |layout, samples: &[f64]| {
        let axes = [("layout", layout), ("profile", "seq")];
        [cell(&axes, "iops", samples), cell(&[axes[0], ("profile", "rnd")], "iops", samples)]
    };
    let cells = [of("raw", &around(200.0)), of("qcow2", &[100.0, 101.0])].concat();
    let default: &[(&str, &str)] = &[("layout", "qcow2")];
    let answers = verdict(&run("iops", &["layout", "profile"], Some(default), cells)).answers;
    let found = answers.iter().find(|answer| answer.question.ends_with("under seq?")).unwrap();
    assert!(found.sentence.ends_with("too few rounds to decide."), "{found:?}");
}

#[test]
fn a_published_order_needs_a_difference_here() {
    let mut run = layouts(&[("qcow2", 100.0), ("raw", 100.0)]);
    for (layout, value) in [("qcow2", 10.0), ("raw", 5.0)] {
        let axes = axes(&[("layout", layout)]);
        let (metric, source) = ("iops".to_owned(), String::new());
        run.published.push(Published { axes, metric, value, source });
    }
    let answers = verdict(&run).answers;
    let found = answers.iter().find(|answer| answer.question.contains("published")).unwrap();
    assert!(
        found.sentence.starts_with("1 of 1 pairs that differed there do not differ"),
        "{found:?}"
    );
}

/// A run goes on while anything is open against its best, although all is settled against the
/// default, whose comparisons are sharper.
#[test]
fn a_run_is_open_while_its_best_is() {
    let noisy = |noise: f64| -> Run {
        let of = |i: usize| {
            let mut parts = [1.0, 1.0 + noise, 1.0 / (1.0 + noise), 1.0];
            parts.rotate_left(i % 4);
            let by = if i == 0 { 99.9 } else { 100.0 };
            let layout = format!("l{i}");
            cell(&[("layout", layout.as_str())], "iops", &parts.map(|part| part * by))
        };
        run("iops", &["layout"], Some(&[("layout", "l0")]), (0..12).map(of).collect())
    };
    let between = (1..200).map(|noise| noisy(f64::from(noise) / 1000.0)).find(|run| {
        let matrix = Matrix::new(run).unwrap();
        let open = |other: usize| {
            let cells = run.cells.iter().filter(|cell| cell.key != run.cells[other].key);
            cells
                .filter_map(|cell| matrix.between(cell, &run.cells[other]))
                .any(|g| !g.is_settled())
        };
        !open(0) && open(1)
    });
    assert!(!is_settled(&between.expect("some noise is between")));
}

/// Preallocation is judged by vdkit's results, as the advice is.
#[test]
fn other_programs_do_not_decide_whether_preallocation_pays() {
    let of = |layout, front, value| {
        cell(&[("layout", layout), ("front", front)], "iops", &around(value))
    };
    let cells = vec![
        of("raw", "nbd", 100.0),
        of("raw-falloc", "nbd", 100.0),
        of("raw", "nbd-qemu-nbd", 100.0),
        of("raw-falloc", "nbd-qemu-nbd", 1000.0),
    ];
    let answers = verdict(&run("iops", &["layout", "front"], None, cells)).answers;
    let found = answers.iter().find(|answer| answer.question == "Does preallocation pay?").unwrap();
    assert!(found.sentence.contains("no significant difference"), "{found:?}");
}
