//! `vdkit amend`.

use crate::common::chains::{self, Link, flatten, same, sound};
use crate::common::{self, Scratch, peer};
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
    // Version 2 has one size for all snapshots.
    scratch.ok(&["resize", "image", "5M"]);
    scratch.fails(1, "'one' is of a disk", &["amend", "image", "-o", "compat=0.10"]);
    sound(&scratch, "image", false);
}

/// What the disk and each snapshot hold, to raw files of this name and a number.
fn views(scratch: &Scratch, to: &str, snapshots: usize) {
    flatten(scratch, "image", &format!("{to}0"));
    for id in 1..=snapshots {
        let (id, to) = (id.to_string(), format!("{to}{id}"));
        peer(
            &scratch.path(""),
            "qemu-img",
            &["convert", "-O", "raw", "-l", &format!("snapshot.id={id}"), "image", &to],
        );
    }
}

#[test]
fn zero_clusters_of_snapshots_are_none_in_version_2() {
    let mut rng = Rng::from_env(54);
    for chain in images() {
        let scratch = Scratch::new();
        chains::make(&scratch, &chain, &mut rng);
        let image = Link { compressed: None, ..chain[chain.len() - 1].clone() };
        let dir = scratch.path("");
        for name in ["one", "two", "three"] {
            peer(&dir, "qemu-io", &["-c", "write -z 1M 300k", "image"]);
            peer(&dir, "qemu-img", &["snapshot", "-c", name, "image"]);
            chains::fill(&dir, &image, &mut rng);
        }
        // A cluster that keeps its space under the flag, in the disk and in a snapshot.
        peer(&dir, "qemu-io", &["-c", "write -P 9 0 2M", "-c", "write -z 0 2M", "image"]);
        peer(&dir, "qemu-img", &["snapshot", "-c", "four", "image"]);
        views(&scratch, "before", 4);
        scratch.ok(&["amend", "image", "-o", "compat=0.10"]);
        assert_eq!(specific(&scratch)["compat"], "0.10");
        sound(&scratch, "image", false);
        views(&scratch, "after", 4);
        for id in 0..=4 {
            let (a, b) = (format!("before{id}"), format!("after{id}"));
            let read = |name: &str| std::fs::read(scratch.path(name)).unwrap();
            assert!(read(&a) == read(&b), "{chain:?}: snapshot {id}");
        }
        // QEMU writes on, takes another one, and goes back.
        chains::fill(&dir, &image, &mut rng);
        peer(&dir, "qemu-img", &["snapshot", "-c", "five", "image"]);
        peer(&dir, "qemu-img", &["snapshot", "-a", "two", "image"]);
        flatten(&scratch, "image", "again");
        let read = |name: &str| std::fs::read(scratch.path(name)).unwrap();
        assert!(read("again") == read("before2"), "{chain:?}");
        for name in ["one", "two", "three", "four", "five"] {
            scratch.ok(&["snapshot", "delete", "image", name]);
        }
        sound(&scratch, "image", false);
    }
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
    // It has zeroes where the image alone knew of them, and no more than the disk.
    scratch.ok(&["write", "image", "64K", "128K", "--zero"]);
    scratch.ok(&["resize", "image", "--shrink", "512K"]);
    scratch.ok(&["resize", "image", "768K"]);
    let both = "data_file_raw=on,data_file=other.data";
    scratch.fails(2, "one after the other", &["amend", "image", "-o", both]);
    let json = scratch.json_of("amend", 0, &["image", "-o", "data_file_raw=on"]);
    assert_eq!(json["changed"], serde_json::json!(["data_file_raw"]));
    let mut disk = vec![6; 512 << 10];
    disk[64 << 10..192 << 10].fill(0);
    disk.resize(768 << 10, 0);
    assert!(std::fs::read(scratch.path("moved.data")).unwrap() == disk);
    assert!(scratch.ok(&["read", "image", "0"]).bytes == disk);
    scratch.ok(&["write", "image", "600K", "10K", "--pattern", "3"]);
    peer(&scratch.path(""), "qemu-img", &["check", "-q", "image"]);
    peer(
        &scratch.path(""),
        "qemu-img",
        &["compare", "-f", "qcow2", "-F", "raw", "image", "moved.data"],
    );
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
    let answer = scratch.fails(2, "a smaller size", &["amend", "plain", "-o", "size=1M"]);
    assert!(answer.stderr.contains("resize --shrink plain"), "{answer:?}");
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
        ("color=blue", "unknown option"),
        ("compat=2.0", "one of"),
    ] {
        scratch.fails(2, words, &["amend", "image", "-o", option]);
    }
    scratch.fails(2, "nothing to change", &["amend", "image"]);
    scratch.fails(1, "no-such", &["amend", "no-such", "-o", "compat=1.1"]);
    scratch.ok(&["amend", "image", "-o", "cluster_size=64K,extended_l2=on"]);
    scratch.write("raw.img", &[0; 4096]);
    scratch.fails(2, "format was not detected", &["amend", "raw.img", "-o", "size=1M"]);
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
        let unchanged = Scratch::new();
        let base = Link::qcow2("base", "", 16 * M);
        let made = format!("{made},cluster_size=512");
        let made: &'static str = Box::leak(made.into_boxed_str());
        chains::make(&unchanged, &[base, Link::qcow2("image", made, 16 * M)], &mut rng);
        flatten(&unchanged, "image", "before");
        let args = ["amend", "image", "-o", options];
        let scratch = chains::killed_until_done(&unchanged, &args, |scratch| {
            same(scratch, ("image", "qcow2"), ("before", "raw"));
            sound(scratch, "image", true);
        });
        let json = scratch.json_of("amend", 0, &["image", "-o", options]);
        assert_eq!(json["changed"], serde_json::json!([]), "{options}");
        // What the kills left of clusters that were reserved ahead are leaks, no more.
        scratch.run(&["check", "--repair", "leaks", "image"]);
        sound(&scratch, "image", false);
    }
}
