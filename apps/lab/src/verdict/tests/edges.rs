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
