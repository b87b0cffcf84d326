//! `vdkit compare`.

use crate::common::{self, Scratch};

fn pair(scratch: &Scratch) {
    std::fs::File::create(scratch.path("a.raw")).unwrap().set_len(4 << 20).unwrap();
    scratch.ok(&["write", "-f", "raw", "a.raw", "1M", "70000", "--pattern", "5"]);
    scratch.ok(&["convert", "a.raw", "b.qcow2"]);
}

#[test]
fn the_same_in_another_format_is_the_same() {
    let scratch = Scratch::new();
    pair(&scratch);
    assert_eq!(scratch.ok(&["compare", "a.raw", "b.qcow2"]).stdout, "identical\n");
    let json = scratch.json_of("compare", 0, &["a.raw", "b.qcow2"]);
    assert_eq!(
        (&json["identical"], &json["first-difference"]),
        (&true.into(), &serde_json::Value::Null)
    );
    // Nearly all of it is known to be zero without reading.
    assert!(json["read-bytes"].as_u64() < Some(1 << 20), "{json}");
}

#[test]
fn the_first_difference_is_told() {
    let scratch = Scratch::new();
    pair(&scratch);
    for offset in [3_000_001u64, 1_100_000] {
        scratch.ok(&["write", "b.qcow2", &offset.to_string(), "1", "--pattern", "6"]);
        let answer = scratch.run(&["compare", "a.raw", "b.qcow2"]);
        assert_eq!(answer.code, Some(3), "{answer:?}");
        assert!(answer.stdout.contains(&format!("at offset {offset} ")), "{answer:?}");
        assert_eq!(
            scratch.json_of("compare", 3, &["a.raw", "b.qcow2"])["first-difference"],
            offset
        );
    }
}

#[test]
fn a_longer_disk_must_be_zero_there_or_equal_in_size_when_strict() {
    let scratch = Scratch::new();
    pair(&scratch);
    scratch.ok(&["resize", "b.qcow2", "+1M"]);
    assert!(scratch.ok(&["compare", "a.raw", "b.qcow2"]).stdout.contains("sizes"));
    let answer = scratch.run(&["compare", "--strict", "a.raw", "b.qcow2"]);
    assert_eq!(answer.code, Some(3), "{answer:?}");
    assert_eq!(scratch.json_of("compare", 3, &["-s", "a.raw", "b.qcow2"])["sizes-differ"], true);
    scratch.ok(&["write", "b.qcow2", "4500000", "1", "--pattern", "1"]);
    assert_eq!(scratch.run(&["compare", "a.raw", "b.qcow2"]).code, Some(3));
}

#[test]
fn formats_may_be_told() {
    let scratch = Scratch::new();
    pair(&scratch);
    scratch.ok(&["compare", "-f", "raw", "-F", "qcow2", "a.raw", "b.qcow2"]);
    assert_eq!(scratch.run(&["compare", "-F", "raw", "a.raw", "b.qcow2"]).code, Some(3));
}

#[test]
fn hostile_input_is_a_clear_error() {
    let scratch = Scratch::new();
    pair(&scratch);
    scratch.fails(1, "no-such", &["compare", "a.raw", "no-such"]);
    scratch.fails(4, "a.raw", &["compare", "-f", "qcow2", "a.raw", "b.qcow2"]);
    let _writer = common::Writer::start(&scratch.path(""), "b.qcow2");
    scratch.fails(6, "b.qcow2", &["compare", "a.raw", "b.qcow2"]);
    scratch.ok(&["compare", "-U", "a.raw", "b.qcow2"]);
}
