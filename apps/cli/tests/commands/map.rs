//! `vdkit map`.

use crate::common::{Scratch, peer};

#[test]
fn says_what_qemu_says() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "base.qcow2", "10M"]);
    scratch.ok(&["write", "base.qcow2", "1M", "192K", "--pattern", "1"]);
    scratch.ok(&["create", "top.qcow2", "12M", "--backing", "base.qcow2"]);
    scratch.ok(&["write", "top.qcow2", "4M", "64K", "--pattern", "2"]);
    scratch.ok(&["write", "top.qcow2", "5M", "1M", "--zero"]);
    let ours = scratch.json_of("map", 0, &["top.qcow2"]);
    let output = peer(&scratch.path(""), "qemu-img", &["map", "--output", "json", "top.qcow2"]);
    let theirs: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    // What is absent they may split by the layer that they asked last; bytes with data are told
    // alike.
    let data = |map: &serde_json::Value| -> Vec<_> {
        let rows = map.as_array().unwrap().iter().filter(|row| row["data"] == true);
        rows.map(|row| ["start", "length", "depth", "offset"].map(|key| row[key].clone())).collect()
    };
    assert_eq!(data(&ours), data(&theirs));
    assert_eq!(data(&ours).len(), 2);
    let mut at = 0;
    for row in ours.as_array().unwrap() {
        assert_eq!(row["start"], at);
        at += row["length"].as_u64().unwrap();
    }
    assert_eq!(at, 12 << 20);
}

#[test]
fn people_see_data_or_all() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "10M"]);
    scratch.ok(&["write", "disk.qcow2", "1M", "64K", "--pattern", "1"]);
    let text = scratch.ok(&["map", "disk.qcow2"]).stdout;
    assert_eq!(text.lines().count(), 2, "{text}");
    assert!(text.lines().nth(1).unwrap().starts_with("0x100000 "), "{text}");
    let text = scratch.ok(&["map", "--all", "disk.qcow2"]).stdout;
    assert_eq!(text.lines().count(), 4, "{text}");
    assert!(text.contains("nowhere"), "{text}");
}

#[test]
fn a_part_of_the_disk() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "10M"]);
    scratch.ok(&["write", "disk.qcow2", "1M", "64K", "--pattern", "1"]);
    let json = scratch.json_of("map", 0, &["--start", "1056768", "-l", "4K", "disk.qcow2"]);
    assert_eq!(json.as_array().unwrap().len(), 1);
    assert_eq!((&json[0]["start"], &json[0]["length"]), (&1_056_768.into(), &4096.into()));
    assert_eq!(scratch.json_of("map", 0, &["-s", "10M", "disk.qcow2"]), serde_json::json!([]));
    scratch.fails(2, "past the end", &["map", "--start", "11M", "disk.qcow2"]);
}

#[test]
fn compressed_runs_are_marked() {
    let scratch = Scratch::new();
    scratch.write("disk.raw", &vec![3; 1 << 20]);
    scratch.ok(&["convert", "-c", "disk.raw", "disk.qcow2"]);
    let json = scratch.json_of("map", 0, &["disk.qcow2"]);
    assert_eq!(json.as_array().unwrap().len(), 1, "{json}");
    assert_eq!((&json[0]["compressed"], &json[0]["data"]), (&true.into(), &true.into()));
    assert!(scratch.ok(&["map", "disk.qcow2"]).stdout.contains("compressed"));
}

#[test]
fn hostile_input_is_a_clear_error() {
    let scratch = Scratch::new();
    scratch.fails(1, "no-such.qcow2", &["map", "no-such.qcow2"]);
    scratch.fails(1, ".", &["map", "."]);
}
