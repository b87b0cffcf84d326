//! `vdkit amend`.

mod common;

use std::time::Duration;

use common::chains::{self, Link, flatten, same, sound};
use common::{Scratch, peer};
use serde_json::Value;
use vdkit_testkit::Rng;

const M: u64 = 1 << 20;

/// What QEMU says of the image's format.
fn specific(scratch: &Scratch) -> Value {
    let output = peer(&scratch.path(""), "qemu-img", &["info", "--output", "json", "image"]);
    let info: Value = serde_json::from_slice(&output.stdout).unwrap();
    info["format-specific"]["data"].clone()
}

fn images() -> Vec<Vec<Link>> {
    let image = |options| Link::qcow2("image", options, 4 * M);
    let base = || Link::qcow2("base", "", 3 * M);
    vec![
        vec![image("").compressed(65536)],
        vec![image(",cluster_size=512").compressed(512)],
        vec![image(",cluster_size=2M")],
        vec![base(), image(",cluster_size=4096").compressed(4096)],
        vec![Link::raw("base", 4 * M), image("")],
        vec![base(), image(",lazy_refcounts=on")],
    ]
}

#[test]
fn versions_down_and_up_again() {
    let mut rng = Rng::from_env(50);
    for chain in images() {
        let scratch = Scratch::new();
        chains::make(&scratch, &chain, &mut rng);
        flatten(&scratch, "image", "before");
        let json = scratch.json_of("amend", 0, &["image", "-o", "compat=0.10"]);
        assert!(json["changed"].to_string().contains("compat"), "{json}");
        assert_eq!(specific(&scratch)["compat"], "0.10");
        same(&scratch, ("image", "qcow2"), ("before", "raw"));
        sound(&scratch, "image", false);
        let json = scratch.json_of("amend", 0, &["image", "-o", "compat=0.10"]);
        assert_eq!(json["changed"], serde_json::json!([]));
        // QEMU writes on, and takes it up and down itself.
        chains::fill(
            &scratch.path(""),
            &Link { compressed: None, ..chain[chain.len() - 1].clone() },
            &mut rng,
        );
        flatten(&scratch, "image", "before");
        scratch.ok(&["amend", "image", "-o", "compat=1.1,lazy_refcounts=on"]);
        let now = specific(&scratch);
        assert_eq!((&now["compat"], &now["lazy-refcounts"]), (&"1.1".into(), &true.into()));
        same(&scratch, ("image", "qcow2"), ("before", "raw"));
        sound(&scratch, "image", false);
        peer(&scratch.path(""), "qemu-img", &["amend", "-o", "compat=0.10", "image"]);
        peer(&scratch.path(""), "qemu-img", &["amend", "-o", "compat=1.1", "image"]);
        same(&scratch, ("image", "qcow2"), ("before", "raw"));
    }
}

#[test]
fn refcounts_of_every_width() {
    let mut rng = Rng::from_env(51);
    for options in
        [",cluster_size=512", ",cluster_size=4096", "", ",extended_l2=on", ",compat=0.10"]
    {
        let scratch = Scratch::new();
        let chain = [Link::qcow2("image", options, 4 * M)];
        chains::make(&scratch, &chain, &mut rng);
        flatten(&scratch, "image", "before");
        for bits in [1, 64, 2, 32, 4, 8, 16] {
            let option = format!("refcount_bits={bits}");
            let compat = if options.contains("0.10") { "compat=1.1," } else { "" };
            scratch.ok(&["amend", "image", "-o", &format!("{compat}{option}")]);
            assert_eq!(specific(&scratch)["refcount-bits"], bits, "{options}");
            same(&scratch, ("image", "qcow2"), ("before", "raw"));
            sound(&scratch, "image", false);
            let writes = Link { compressed: None, ..chain[0].clone() };
            chains::fill(&scratch.path(""), &writes, &mut rng);
            flatten(&scratch, "image", "before");
            scratch.ok(&["write", "image", "1M", "64K", "--pattern", "3"]);
            flatten(&scratch, "image", "before");
            sound(&scratch, "image", false);
        }
    }
}

#[test]
fn snapshots_stay_and_set_limits() {
    let mut rng = Rng::from_env(52);
    let scratch = Scratch::new();
    let chain = [Link::qcow2("image", "", 4 * M)];
    scratch.ok(&["create", "-f", "qcow2", "image", "4M"]);
    scratch.ok(&["write", "image", "0", "3M", "--pattern", "1"]);
    for name in ["one", "two", "three"] {
        peer(&scratch.path(""), "qemu-img", &["snapshot", "-c", name, "image"]);
    }
    scratch.fails(2, "referred to 4 times", &["amend", "image", "-o", "refcount_bits=1"]);
    scratch.ok(&["amend", "image", "-o", "refcount_bits=4"]);
    scratch.ok(&["amend", "image", "-o", "refcount_bits=16,compat=0.10"]);
    sound(&scratch, "image", false);
    scratch.ok(&["amend", "image", "-o", "compat=1.1"]);
    sound(&scratch, "image", false);
    chains::fill(&scratch.path(""), &chain[0], &mut rng);
    let snapshots = peer(&scratch.path(""), "qemu-img", &["snapshot", "-l", "image"]);
    assert!(String::from_utf8_lossy(&snapshots.stdout).contains("three"));
    peer(&scratch.path(""), "qemu-img", &["snapshot", "-a", "one", "image"]);
    assert!(scratch.ok(&["read", "image", "0", "3M"]).bytes == vec![1; 3 << 20]);
    // A zero cluster in a snapshot is none that version 2 could hold.
    peer(&scratch.path(""), "qemu-io", &["-c", "write -z 0 128k", "image"]);
    peer(&scratch.path(""), "qemu-img", &["snapshot", "-c", "zeroes", "image"]);
    scratch.fails(1, "'zeroes'", &["amend", "image", "-o", "compat=0.10"]);
    sound(&scratch, "image", false);
}

#[test]
fn names_and_sizes() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "base.qcow2", "1M"]);
    scratch.ok(&["create", "-f", "qcow2", "image", "1M", "-o", "data_file=image.data"]);
    scratch.ok(&["write", "image", "0", "1M", "--pattern", "6"]);
    std::fs::rename(scratch.path("image.data"), scratch.path("moved.data")).unwrap();
    std::fs::hard_link(scratch.path("moved.data"), scratch.path("image.data")).unwrap();
    scratch.ok(&["amend", "image", "-o", "data_file=moved.data"]);
    std::fs::remove_file(scratch.path("image.data")).unwrap();
    assert!(scratch.ok(&["read", "image", "0"]).bytes == vec![6; 1 << 20]);
    scratch.fails(1, "data_file_raw", &["amend", "image", "-o", "data_file_raw=on"]);
    scratch.ok(&[
        "create",
        "-f",
        "qcow2",
        "rawdata",
        "1M",
        "-o",
        "data_file=r.data,data_file_raw=on",
    ]);
    let json = scratch.json_of("amend", 0, &["rawdata", "-o", "data_file_raw=off"]);
    assert_eq!(json["changed"], serde_json::json!(["data_file_raw"]));
    peer(&scratch.path(""), "qemu-img", &["check", "-q", "rawdata"]);

    scratch.ok(&["create", "-f", "qcow2", "plain", "1M"]);
    let json = scratch.json_of("amend", 0, &["plain", "-o", "backing_file=base.qcow2"]);
    assert_eq!(json["changed"], serde_json::json!(["backing_file", "backing_fmt"]));
    scratch.fails(2, "stands on it", &["amend", "base.qcow2", "-o", "backing_file=plain"]);
    scratch.ok(&["amend", "plain", "-o", "backing_file="]);
    scratch.fails(2, "backing_fmt", &["amend", "plain", "-o", "backing_fmt=raw"]);
    let json = scratch.json_of("amend", 0, &["plain", "-o", "size=3M,lazy_refcounts=on"]);
    assert_eq!(json["changed"], serde_json::json!(["lazy_refcounts", "size"]));
    assert_eq!(scratch.json_of("info", 0, &["plain"])["virtual-size"], 3 << 20);
    scratch.fails(2, "resize --shrink", &["amend", "plain", "-o", "size=1M"]);
    scratch.ok(&["amend", "plain", "-o", "compression_type=zstd"]);
    peer(&scratch.path(""), "qemu-io", &["-c", "write -c -P 3 0 64k", "plain"]);
    sound(&scratch, "plain", false);
    scratch.fails(1, "zstd", &["amend", "plain", "-o", "compression_type=zlib"]);
}

#[test]
fn what_only_a_new_image_can_have() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "-f", "qcow2", "image", "1M", "-o", "extended_l2=on"]);
    let before = std::fs::read(scratch.path("image")).unwrap();
    for (option, words) in [
        ("cluster_size=4K", "cluster_size cannot be changed"),
        ("extended_l2=off", "extended_l2 cannot be changed"),
        ("preallocation=full", "preallocation cannot be changed"),
        ("data_file=x", "data file"),
    ] {
        let answer = scratch.fails(1, words, &["amend", "image", "-o", option]);
        assert!(answer.stderr.contains("vdkit convert"), "{answer:?}");
    }
    for (option, words) in [
        ("compat=0.10", "extended L2"),
        ("refcount_bits=3", "expected 1, 2, 4"),
        ("colour=blue", "unknown option"),
        ("compat=2.0", "one of"),
    ] {
        scratch.fails(2, words, &["amend", "image", "-o", option]);
    }
    scratch.fails(2, "nothing to change", &["amend", "image"]);
    scratch.fails(1, "no-such", &["amend", "no-such", "-o", "compat=1.1"]);
    scratch.ok(&["amend", "image", "-o", "cluster_size=64K,extended_l2=on"]);
    scratch.write("raw.img", &[0; 4096]);
    scratch.fails(2, "-f raw", &["amend", "raw.img", "-o", "size=1M"]);
    let writer = common::Writer::start(&scratch.path(""), "image");
    drop(writer);
    assert!(std::fs::read(scratch.path("image")).unwrap() == before);
    // With bitmaps there is no way down.
    scratch.ok(&["create", "-f", "qcow2", "marked", "1M"]);
    peer(&scratch.path(""), "qemu-img", &["bitmap", "--add", "marked", "b"]);
    scratch.fails(2, "bitmap", &["amend", "marked", "-o", "compat=0.10"]);
    scratch.ok(&["amend", "marked", "-o", "refcount_bits=8,lazy_refcounts=on"]);
    sound(&scratch, "marked", false);
    let output = peer(&scratch.path(""), "qemu-img", &["info", "marked"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("name: b") && !text.contains("in-use"), "{text}");
}

#[test]
fn killed_at_any_moment_and_run_again() {
    let mut rng = Rng::from_env(53);
    for (made, options) in [
        ("", "refcount_bits=1"),
        ("", "compat=0.10"),
        (",compat=0.10", "compat=1.1,refcount_bits=64"),
    ] {
        let scratch = Scratch::new();
        let base = Link::qcow2("base", "", 16 * M);
        let made = format!("{made},cluster_size=512");
        let made: &'static str = Box::leak(made.into_boxed_str());
        chains::make(&scratch, &[base, Link::qcow2("image", made, 16 * M)], &mut rng);
        flatten(&scratch, "image", "before");
        let mut delay = Duration::from_millis(1);
        loop {
            let mut command = scratch.command(&["amend", "image", "-o", options]);
            let mut child = command.stdout(std::process::Stdio::null()).spawn().unwrap();
            std::thread::sleep(delay);
            child.kill().unwrap();
            let status = child.wait().unwrap();
            same(&scratch, ("image", "qcow2"), ("before", "raw"));
            sound(&scratch, "image", true);
            if status.success() {
                break;
            }
            delay = delay * 4 / 3;
        }
        assert!(delay > Duration::from_millis(1));
        let json = scratch.json_of("amend", 0, &["image", "-o", options]);
        assert_eq!(json["changed"], serde_json::json!([]), "{options}");
        // What the kills left of clusters that were reserved ahead are leaks, no more.
        scratch.run(&["check", "--repair", "leaks", "image"]);
        sound(&scratch, "image", false);
    }
}
