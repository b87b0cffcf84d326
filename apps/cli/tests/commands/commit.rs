//! `vdkit commit`.

use crate::common::chains::{self, Link, copy, flatten, same, sound};
use crate::common::{self, Scratch, peer};
use vdkit_testkit::Rng;

const M: u64 = 1 << 20;

/// Pairs of overlay and base: clusters, subclusters, versions, data files, sizes.
fn pairs() -> Vec<[Link; 2]> {
    let plain = |name, options| Link::qcow2(name, options, 4 * M);
    vec![
        [plain("base", ""), plain("top", "").compressed(65536)],
        [plain("base", ",cluster_size=512"), plain("top", ",cluster_size=512").compressed(512)],
        [plain("base", ",cluster_size=2M"), plain("top", ",cluster_size=4096").compressed(4096)],
        [plain("base", ",cluster_size=4096").compressed(4096), plain("top", ",cluster_size=2M")],
        [plain("base", ",extended_l2=on"), plain("top", ",extended_l2=on").compressed(65536)],
        [plain("base", ",extended_l2=on"), plain("top", ",cluster_size=512")],
        [plain("base", ",compat=0.10"), plain("top", "")],
        [plain("base", ""), plain("top", ",compat=0.10").compressed(65536)],
        [plain("base", ",data_file=base.data"), plain("top", "")],
        [plain("base", ""), plain("top", ",data_file=top.data")],
        [plain("base", ",lazy_refcounts=on"), plain("top", ",lazy_refcounts=on")],
        [Link::raw("base", 4 * M), plain("top", "").compressed(65536)],
        [Link::raw("base", M + 512), plain("top", ",cluster_size=4096")],
        [Link::qcow2("base", "", M + 512), plain("top", "").compressed(65536)],
        [Link::qcow2("base", ",compat=0.10", M + 512), plain("top", ",extended_l2=on")],
        [Link::qcow2("base", ",cluster_size=2M", 6 * M), plain("top", "")],
    ]
}

#[test]
fn the_same_as_qemu_img_makes_of_it() {
    let mut rng = Rng::from_env(20);
    for chain in pairs() {
        let scratch = Scratch::new();
        chains::make(&scratch, &chain, &mut rng);
        flatten(&scratch, "top", "before");
        let theirs = copy(&scratch);
        peer(&theirs.path(""), "qemu-img", &["commit", "-q", "-f", "qcow2", "top"]);
        let json = scratch.json_of("commit", 0, &["top"]);
        assert_eq!(json["emptied"], true, "{chain:?}");
        let format = chain[0].format;
        let other = theirs.path("base").display().to_string();
        same(&scratch, ("base", format), (&other, format));
        same(&scratch, ("top", "qcow2"), ("before", "raw"));
        sound(&scratch, "top", false);
        if format == "qcow2" {
            sound(&scratch, "base", false);
        }
        // Nothing is left in the overlay.
        let map = scratch.json_of("map", 0, &["top"]);
        let rows = map.as_array().unwrap();
        assert!(rows.iter().all(|row| row["depth"] != 0 || row["data"] == false), "{map}");
    }
}

#[test]
fn qemu_img_goes_on_with_what_was_committed() {
    let mut rng = Rng::from_env(21);
    for chain in pairs().into_iter().take(6) {
        let scratch = Scratch::new();
        chains::make(&scratch, &chain, &mut rng);
        scratch.ok(&["commit", "top"]);
        chains::fill(&scratch.path(""), &chain[1], &mut rng);
        flatten(&scratch, "top", "before");
        peer(&scratch.path(""), "qemu-img", &["commit", "-q", "-f", "qcow2", "top"]);
        same(&scratch, ("top", "qcow2"), ("before", "raw"));
        chains::fill(&scratch.path(""), &chain[1], &mut rng);
        flatten(&scratch, "top", "before");
        scratch.ok(&["commit", "top"]);
        same(&scratch, ("top", "qcow2"), ("before", "raw"));
        sound(&scratch, "base", false);
    }
}

#[test]
fn further_down_goes_what_lies_above() {
    let mut rng = Rng::from_env(22);
    for middle in [M, 3 * M + 512, 6 * M] {
        let chain = [
            Link::qcow2("low", "", 5 * M),
            Link::qcow2("base", ",cluster_size=4096", 4 * M),
            Link::qcow2("middle", ",cluster_size=512", middle),
            Link::qcow2("top", "", 4 * M).compressed(65536),
        ];
        let scratch = Scratch::new();
        chains::make(&scratch, &chain, &mut rng);
        flatten(&scratch, "top", "before");
        let theirs = copy(&scratch);
        peer(&theirs.path(""), "qemu-img", &["commit", "-q", "-b", "base", "top"]);
        scratch.fails(2, "emptied", &["commit", "--empty", "--to", "base", "top"]);
        let json = scratch.json_of("commit", 0, &["--to", "base", "top"]);
        assert_eq!(json["emptied"], false);
        assert_eq!(json["invalidated"], serde_json::json!(["middle"]));
        let other = theirs.path("base").display().to_string();
        same(&scratch, ("base", "qcow2"), (&other, "qcow2"));
        same(&scratch, ("top", "qcow2"), ("before", "raw"));
        // What stands on the base directly now sees all of it.
        peer(&scratch.path(""), "qemu-img", &["compare", "base", "before"]);
        sound(&scratch, "base", false);
        let kept = scratch.ok(&["commit", "--to", "base", "top"]);
        assert!(kept.stderr.contains("middle: shows a mixture"), "{kept:?}");
    }
}

#[test]
fn kept_or_emptied() {
    let scratch = Scratch::new();
    let chain = [Link::qcow2("base", "", M), Link::qcow2("top", "", M)];
    chains::make(&scratch, &chain, &mut Rng::from_env(23));
    let before = std::fs::read(scratch.path("top")).unwrap();
    assert_eq!(scratch.json_of("commit", 0, &["--keep", "top"])["emptied"], false);
    assert!(std::fs::read(scratch.path("top")).unwrap() == before);
    same(&scratch, ("top", "qcow2"), ("base", "qcow2"));
    assert_eq!(scratch.json_of("commit", 0, &["--empty", "top"])["emptied"], true);
    let len = scratch.path("top").metadata().unwrap().len();
    assert!(len < before.len() as u64 && len <= 4 * 65536, "{len}");
    same(&scratch, ("top", "qcow2"), ("base", "qcow2"));
}

#[test]
fn others_that_stand_on_it_are_not_damaged() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "base.qcow2", "1M"]);
    for name in ["a.qcow2", "b.qcow2", "c.qcow2"] {
        scratch.ok(&["create", name, "--backing", "base.qcow2"]);
        scratch.ok(&["write", name, "0", "4K", "--pattern", "7"]);
    }
    let before = std::fs::read(scratch.path("base.qcow2")).unwrap();
    let answer = scratch.fails(5, "b.qcow2, c.qcow2", &["commit", "a.qcow2"]);
    assert!(answer.stderr.contains("--force"), "{answer:?}");
    assert!(std::fs::read(scratch.path("base.qcow2")).unwrap() == before);
    for name in ["b.qcow2", "c.qcow2"] {
        std::fs::remove_file(scratch.path(name)).unwrap();
    }
    scratch.ok(&["commit", "a.qcow2"]);
    // Nor those in between, nor snapshots of the overlay.
    scratch.ok(&["create", "leaf.qcow2", "--backing", "a.qcow2"]);
    scratch.ok(&["create", "side.qcow2", "--backing", "a.qcow2"]);
    scratch.fails(5, "side.qcow2", &["commit", "leaf.qcow2", "--to", "base.qcow2"]);
    scratch.ok(&["commit", "leaf.qcow2", "--to", "base.qcow2", "--force"]);
    peer(&scratch.path(""), "qemu-img", &["snapshot", "-c", "tonight", "a.qcow2"]);
    scratch.fails(5, "tonight", &["commit", "a.qcow2"]);
    scratch.ok(&["commit", "a.qcow2", "--force"]);
    sound(&scratch, "a.qcow2", false);
}

#[test]
fn killed_at_any_moment_and_run_again() {
    let mut rng = Rng::from_env(24);
    for (base, top) in [(",cluster_size=4096", ",cluster_size=512"), ("", ",extended_l2=on")] {
        let made = Scratch::new();
        let chain = [Link::qcow2("base", base, 32 * M), Link::qcow2("top", top, 48 * M)];
        chains::make(&made, &chain, &mut rng);
        flatten(&made, "top", "before");
        let scratch = chains::killed_until_done(&made, &["commit", "top"], |scratch| {
            same(scratch, ("top", "qcow2"), ("before", "raw"));
            sound(scratch, "top", true);
            sound(scratch, "base", true);
        });
        same(&scratch, ("base", "qcow2"), ("before", "raw"));
    }
}

#[test]
fn what_cannot_be_is_told() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "alone.qcow2", "1M"]);
    scratch.ok(&["create", "other.qcow2", "1M"]);
    scratch.ok(&["create", "top.qcow2", "--backing", "alone.qcow2"]);
    scratch.fails(2, "nothing to commit to", &["commit", "alone.qcow2"]);
    scratch.fails(2, "backing chain", &["commit", "top.qcow2", "--to", "other.qcow2"]);
    scratch.fails(1, "no-such", &["commit", "no-such"]);
    scratch.fails(2, "cannot be used with", &["commit", "top.qcow2", "--keep", "--empty"]);
    let writer = common::Writer::start(&scratch.path(""), "alone.qcow2");
    scratch.fails(6, "in use", &["commit", "top.qcow2"]);
    drop(writer);
    // A base whose format nobody names may be anything.
    scratch.write("plain", &[0; 1 << 20]);
    scratch.ok(&["create", "on-plain.qcow2", "--backing", "plain", "--backing-format", "raw"]);
    let unnamed = ["rebase", "-u", "-b", "plain", "-F", "raw", "on-plain.qcow2"];
    peer(&scratch.path(""), "qemu-img", &unnamed);
    scratch.ok(&["commit", "on-plain.qcow2"]);
}

#[test]
fn what_fills_no_cluster_is_copied_and_the_rest_shared() {
    let Some(disk) = vdkit_testkit::fs::mounted("btrfs", 256 << 20) else { return };
    let scratch = Scratch::new();
    let path = |name: &str| disk.path().join(name).display().to_string();
    let (base, top) = (path("base.qcow2"), path("top.qcow2"));
    scratch.ok(&["create", &base, "32M"]);
    scratch.ok(&["write", &base, "0", "32M", "--pattern", "1"]);
    // Space of its own for what comes.
    scratch.ok(&["snapshot", "create", &base, "s"]);
    scratch.ok(&["create", &top, "--backing", &base, "-o", "cluster_size=4K", "--force"]);
    // Pieces of base clusters before, between and behind whole ones.
    let writes = [("4K", "4K", 2), ("1020K", "4M", 3), ("9M", "12K", 4), ("16M", "8M", 5)];
    for (at, len, byte) in writes {
        scratch.ok(&["write", &top, at, len, "--pattern", &byte.to_string()]);
    }
    let before = scratch.ok(&["read", &top, "0"]).bytes;
    let moved = &scratch.json_of("commit", 0, &["--force", &top])["moved"];
    let shared = moved["reflinked"].as_u64().unwrap();
    assert!(shared >= (11 << 20), "{moved}");
    assert!(moved["written"].as_u64().unwrap() < 1 << 20, "{moved}");
    assert!(scratch.ok(&["read", &base, "0"]).bytes == before);
    assert!(scratch.ok(&["read", &top, "0"]).bytes == before);
    let old = scratch.ok(&["read", &base, "0", "--snapshot", "s"]).bytes;
    assert!(old == vec![1; 32 << 20], "the snapshot keeps what it has");
    for image in [&base, &top] {
        peer(disk.path(), "qemu-img", &["check", "-q", image]);
    }
}

#[test]
fn blocks_are_shared_where_the_file_system_can() {
    let Some(disk) = vdkit_testkit::fs::mounted("btrfs", 256 << 20) else { return };
    let scratch = Scratch::new();
    let path = |name: &str| disk.path().join(name).display().to_string();
    for (base, format) in [("base.qcow2", "qcow2"), ("base.raw", "raw")] {
        let (base, top) = (path(base), path("top.qcow2"));
        scratch.ok(&["create", &base, "16M"]);
        let backing = ["--backing", base.as_str(), "--backing-format", format, "--force"];
        scratch.ok(&[&["create", &top][..], &backing].concat());
        scratch.ok(&["write", &top, "1M", "8M", "--pattern", "9"]);
        scratch.ok(&["write", &top, "12M", "10K", "--pattern", "8"]);
        let moved = &scratch.json_of("commit", 0, &["--keep", &top])["moved"];
        assert!(moved["reflinked"].as_u64().unwrap() >= 8 << 20, "{format}: {moved}");
        assert!(scratch.ok(&["read", "-f", format, &base, "1M", "8M"]).bytes == vec![9; 8 << 20]);
        // Shared blocks are copied when either is written: the base keeps its own.
        scratch.ok(&["write", &top, "1M", "8M", "--pattern", "7"]);
        assert!(scratch.ok(&["read", "-f", format, &base, "1M", "8M"]).bytes == vec![9; 8 << 20]);
        scratch.ok(&["commit", &top]);
        assert!(scratch.ok(&["read", &top, "1M", "8M"]).bytes == vec![7; 8 << 20]);
        peer(disk.path(), "qemu-img", &["check", "-q", &top]);
    }
}
