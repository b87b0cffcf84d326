//! `vdkit bitmap`.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{self, Scratch, peer};
use serde_json::Value;
use vdkit_testkit::Killed;

/// The dirty extents of a bitmap as QEMU reads them from an image: first byte and length.
fn qemu_dirty(scratch: &Scratch, image: &str, name: &str) -> Vec<(u64, u64)> {
    let socket = scratch.path("nbd");
    let _ = std::fs::remove_file(&socket);
    let child = Command::new("qemu-nbd")
        .args(["-r", "-t", "-f", "qcow2", "-B", name, "-k"])
        .args([socket.as_os_str(), image.as_ref()])
        .current_dir(scratch.path(""))
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let _served = Killed(child);
    common::wait_until_connected(&socket);
    let options = format!(
        "driver=nbd,server.type=unix,server.path={},x-dirty-bitmap=qemu:dirty-bitmap:{name}",
        socket.display()
    );
    let map = ["map", "--output=json", "--image-opts", &options];
    let output = peer(Path::new("/"), "qemu-img", &map);
    let extents: Value = serde_json::from_slice(&output.stdout).unwrap();
    // In this map "no data" stands for dirty.
    let dirty = extents.as_array().unwrap().iter().filter(|extent| extent["data"] == false);
    joined(dirty.map(|e| (e["start"].as_u64().unwrap(), e["length"].as_u64().unwrap())))
}

fn joined(extents: impl Iterator<Item = (u64, u64)>) -> Vec<(u64, u64)> {
    let mut all: Vec<(u64, u64)> = Vec::new();
    for (start, length) in extents {
        match all.last_mut() {
            Some((first, last)) if *first + *last == start => *last += length,
            _ => all.push((start, length)),
        }
    }
    all
}

/// The same as vdkit reads them.
fn our_dirty(scratch: &Scratch, image: &str, name: &str) -> Vec<(u64, u64)> {
    let json = scratch.json_of("bitmap", 0, &["dirty", image, name]);
    let extents = json.as_array().unwrap().iter();
    joined(extents.map(|e| (e["start"].as_u64().unwrap(), e["length"].as_u64().unwrap())))
}

fn assert_alike(scratch: &Scratch, image: &str, name: &str) -> Vec<(u64, u64)> {
    let ours = our_dirty(scratch, image, name);
    assert_eq!(ours, qemu_dirty(scratch, image, name), "{image} {name}");
    ours
}

#[test]
fn bitmaps_of_qemu_record_what_vdkit_writes() {
    let scratch = Scratch::new();
    let dir = scratch.path("");
    for options in [
        "cluster_size=64k",
        "cluster_size=4k,lazy_refcounts=on",
        "cluster_size=16k,extended_l2=on",
        "data_file=data.raw,data_file_raw=on",
        "cluster_size=2M,refcount_bits=64",
    ] {
        let _ = std::fs::remove_file(scratch.path("a.qcow2"));
        let _ = std::fs::remove_file(scratch.path("data.raw"));
        peer(&dir, "qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, "a.qcow2", "96M"]);
        peer(&dir, "qemu-io", &["-c", "write -P 1 0 8M", "-f", "qcow2", "a.qcow2"]);
        peer(&dir, "qemu-img", &["bitmap", "--add", "-g", "64k", "a.qcow2", "coarse"]);
        peer(&dir, "qemu-img", &["bitmap", "--add", "-g", "512", "a.qcow2", "fine"]);
        peer(&dir, "qemu-img", &["bitmap", "--add", "--disable", "a.qcow2", "still"]);
        peer(&dir, "qemu-io", &["-c", "write -P 2 1M 4k", "-f", "qcow2", "a.qcow2"]);
        // In place, over a boundary, into a hole, up to the end; zeroes and a discard.
        let writes: [&[&str]; 4] = [
            &["write", "a.qcow2", "2M", "1000", "--pattern", "3"],
            &["write", "a.qcow2", "3145000", "2000", "--pattern", "4"],
            &["write", "a.qcow2", "40M", "1M", "--pattern", "5"],
            &["write", "a.qcow2", "100662784", "512", "--pattern", "6"],
        ];
        for write in writes {
            let answer = scratch.ok(write);
            assert!(!answer.stderr.contains("warning"), "{answer:?}");
        }
        scratch.ok(&["write", "a.qcow2", "5M", "128K", "--zero"]);
        let fine = assert_alike(&scratch, "a.qcow2", "fine");
        let wanted = [
            (1 << 20, 4096),
            (2 << 20, 1024),
            (3_144_704, 2560),
            (5 << 20, 128 << 10),
            (40 << 20, 1 << 20),
            ((96 << 20) - 512, 512),
        ];
        assert_eq!(fine, wanted, "{options}");
        assert_eq!(assert_alike(&scratch, "a.qcow2", "coarse").len(), 6, "{options}");
        assert!(assert_alike(&scratch, "a.qcow2", "still").is_empty());
        scratch.sound("a.qcow2");
        // And QEMU goes on with them.
        peer(&dir, "qemu-io", &["-c", "write -P 2 60M 4k", "-f", "qcow2", "a.qcow2"]);
        assert!(assert_alike(&scratch, "a.qcow2", "fine").contains(&(60 << 20, 4096)));
    }
}

#[test]
fn what_is_changed_here_is_what_qemu_sees() {
    let scratch = Scratch::new();
    let dir = scratch.path("");
    for options in [&["cluster_size=64K"][..], &["cluster_size=1K"], &["data_file=d.raw"]] {
        scratch.ok(&[&["create", "--force", "a.qcow2", "32M", "-o"], options].concat());
        scratch.ok(&["bitmap", "add", "-g", "4K", "a.qcow2", "one"]);
        scratch.ok(&["bitmap", "add", "--disabled", "-g", "64K", "a.qcow2", "two"]);
        scratch.ok(&["write", "a.qcow2", "1M", "4K", "--pattern", "1"]);
        let info = scratch.json_of("info", 0, &["a.qcow2"]);
        assert_eq!(info["bitmaps"][1]["name"], "two");
        assert_eq!(assert_alike(&scratch, "a.qcow2", "one"), [(1 << 20, 4096)]);
        let json = scratch.json_of("bitmap", 0, &["merge", "a.qcow2", "two", "one"]);
        assert_eq!(json["bitmaps"][1]["dirty-bytes"], 64 << 10);
        assert_eq!(json["bitmaps"][1]["enabled"], false);
        assert_eq!(assert_alike(&scratch, "a.qcow2", "two"), [(1 << 20, 64 << 10)]);
        scratch.ok(&["bitmap", "clear", "a.qcow2", "one"]);
        assert!(assert_alike(&scratch, "a.qcow2", "one").is_empty());
        scratch.ok(&["bitmap", "disable", "a.qcow2", "one"]);
        scratch.ok(&["bitmap", "enable", "a.qcow2", "two"]);
        scratch.ok(&["write", "a.qcow2", "9M", "4K", "--pattern", "2"]);
        assert!(assert_alike(&scratch, "a.qcow2", "one").is_empty());
        assert_eq!(assert_alike(&scratch, "a.qcow2", "two").len(), 2);
        scratch.sound("a.qcow2");
        peer(&dir, "qemu-img", &["bitmap", "--clear", "--enable", "a.qcow2", "one"]);
        scratch.ok(&["write", "a.qcow2", "0", "1K", "--pattern", "3"]);
        assert_eq!(assert_alike(&scratch, "a.qcow2", "one"), [(0, 4096)]);
        scratch.ok(&["bitmap", "remove", "a.qcow2", "one"]);
        peer(&dir, "qemu-img", &["bitmap", "--remove", "a.qcow2", "two"]);
        assert_eq!(
            scratch.json_of("bitmap", 0, &["list", "a.qcow2"])["bitmaps"],
            serde_json::json!([])
        );
        // The place in the header is used again.
        scratch.ok(&["bitmap", "add", "a.qcow2", "three"]);
        scratch.ok(&["bitmap", "remove", "a.qcow2", "three"]);
        scratch.ok(&["bitmap", "add", "a.qcow2", "three"]);
        assert!(assert_alike(&scratch, "a.qcow2", "three").is_empty());
        scratch.sound("a.qcow2");
    }
}

#[test]
fn marks_are_merged_from_another_image() {
    let scratch = Scratch::new();
    let dir = scratch.path("");
    scratch.ok(&["create", "a.qcow2", "8M"]);
    peer(&dir, "qemu-img", &["create", "-q", "-f", "qcow2", "b.qcow2", "8M"]);
    peer(&dir, "qemu-img", &["bitmap", "--add", "-g", "512", "b.qcow2", "theirs"]);
    peer(&dir, "qemu-io", &["-c", "write 1M 512", "-c", "write 7M 1M", "-f", "qcow2", "b.qcow2"]);
    scratch.ok(&["bitmap", "add", "-g", "4K", "a.qcow2", "mine"]);
    scratch.ok(&["bitmap", "merge", "-b", "b.qcow2", "-F", "qcow2", "a.qcow2", "mine", "theirs"]);
    let wanted = [(1 << 20, 4096), (7 << 20, 1 << 20)];
    assert_eq!(assert_alike(&scratch, "a.qcow2", "mine"), wanted);
    // The target by its option: within one image, and from another.
    scratch.ok(&["bitmap", "add", "-g", "4K", "a.qcow2", "all"]);
    scratch.ok(&["bitmap", "merge", "a.qcow2", "mine", "--into", "all"]);
    assert_eq!(assert_alike(&scratch, "a.qcow2", "all"), wanted);
    scratch.ok(&["bitmap", "clear", "a.qcow2", "all"]);
    scratch.ok(&["bitmap", "merge", "--into", "all", "-b", "b.qcow2", "a.qcow2", "theirs"]);
    assert_eq!(assert_alike(&scratch, "a.qcow2", "all"), wanted);
    scratch.ok(&["resize", "a.qcow2", "9M"]);
    let merge = ["bitmap", "merge", "-b", "b.qcow2", "a.qcow2", "mine", "theirs"];
    scratch.fails(2, "says nothing of the other", &merge);
}

#[test]
fn bitmaps_follow_the_size_of_the_disk() {
    let scratch = Scratch::new();
    // 512 bytes a mark and 512 bytes a cluster: the table grows with the disk.
    for (cluster, granularity) in [("4K", "512"), ("64K", "64K")] {
        scratch.ok(&[
            "create",
            "--force",
            "a.qcow2",
            "30M",
            "-o",
            &format!("cluster_size={cluster}"),
        ]);
        scratch.ok(&["bitmap", "add", "-g", granularity, "a.qcow2", "one"]);
        scratch.ok(&["bitmap", "add", "--disabled", "-g", granularity, "a.qcow2", "still"]);
        scratch.ok(&["write", "a.qcow2", "64K", "64K", "--pattern", "1"]);
        scratch.ok(&["write", "a.qcow2", "28M", "64K", "--pattern", "1"]);
        scratch.ok(&["resize", "--shrink", "a.qcow2", "10M"]);
        assert_eq!(assert_alike(&scratch, "a.qcow2", "one"), [(64 << 10, 64 << 10)]);
        scratch.ok(&["resize", "a.qcow2", "60M"]);
        let wanted = [(64 << 10, 64 << 10), (10 << 20, 50 << 20)];
        assert_eq!(assert_alike(&scratch, "a.qcow2", "one"), wanted);
        assert!(assert_alike(&scratch, "a.qcow2", "still").is_empty());
        scratch.sound("a.qcow2");
    }
}

#[test]
fn bitmaps_that_others_left_behind_are_not_believed() {
    let scratch = Scratch::new();
    let dir = scratch.path("");
    scratch.ok(&["create", "a.qcow2", "8M"]);
    scratch.ok(&["bitmap", "add", "a.qcow2", "one"]);
    // A QEMU that is killed leaves them marked as in use.
    let child = Command::new("qemu-io")
        .args(["-f", "qcow2", "a.qcow2", "-c", "write 0 64k", "-c", "flush", "-c", "sleep 90000"])
        .current_dir(&dir)
        .stdout(Stdio::null())
        .spawn();
    let child = Killed(child.unwrap());
    let in_use = || {
        let info = scratch.json_of("info", 0, &["-U", "a.qcow2"]);
        info["bitmaps"][0]["in-use"] == true
    };
    common::wait_until(in_use);
    drop(child);
    scratch.ok(&["write", "a.qcow2", "1M", "4K", "--pattern", "1"]);
    assert!(in_use());
    let list = scratch.json_of("bitmap", 0, &["list", "a.qcow2"]);
    assert!(list["bitmaps"][0].get("dirty-bytes").is_none(), "{list}");
    for action in ["dirty", "clear", "enable", "disable"] {
        scratch.fails(2, "cannot be trusted", &["bitmap", action, "a.qcow2", "one"]);
    }
    scratch.ok(&["bitmap", "remove", "a.qcow2", "one"]);
    scratch.ok(&["check", "--repair", "leaks", "a.qcow2"]);
    scratch.sound("a.qcow2");
}

#[test]
fn mistakes_are_told() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "1M"]);
    scratch.ok(&["create", "old.qcow2", "1M", "-o", "compat=0.10"]);
    scratch.ok(&["create", "a.raw", "1M"]);
    scratch.ok(&["bitmap", "add", "a.qcow2", "one"]);
    scratch.fails(2, "named 'one' already", &["bitmap", "add", "a.qcow2", "one"]);
    scratch.fails(2, "no bitmap is named", &["bitmap", "clear", "a.qcow2", "two"]);
    scratch.fails(2, "no bitmap is named", &["bitmap", "dirty", "a.qcow2", "two"]);
    scratch.fails(2, "power of two", &["bitmap", "add", "-g", "1000", "a.qcow2", "two"]);
    scratch.fails(2, "power of two", &["bitmap", "add", "-g", "256", "a.qcow2", "two"]);
    scratch.fails(2, "1 to 1023", &["bitmap", "add", "a.qcow2", &"n".repeat(1024)]);
    scratch.fails(1, "version 2", &["bitmap", "add", "old.qcow2", "one"]);
    scratch.fails(1, "raw image", &["bitmap", "list", "-f", "raw", "a.raw"]);
    scratch.fails(2, "NAME", &["bitmap", "add", "a.qcow2"]);
    scratch.fails(2, "SOURCE", &["bitmap", "merge", "a.qcow2", "one"]);
    scratch.fails(2, "too many names", &["bitmap", "list", "a.qcow2", "one"]);
    let merge = ["bitmap", "merge", "--into", "one", "a.qcow2", "one", "two"];
    scratch.fails(2, "too many names", &merge);
    scratch.fails(2, "for merge", &["bitmap", "clear", "--into", "one", "a.qcow2", "one"]);
    scratch.fails(2, "for add", &["bitmap", "clear", "-g", "4K", "a.qcow2", "one"]);
    scratch.fails(2, "for merge", &["bitmap", "clear", "-b", "a.qcow2", "a.qcow2", "one"]);
    scratch.fails(2, "force-share", &["bitmap", "clear", "-U", "a.qcow2", "one"]);
    let text = scratch.ok(&["bitmap", "list", "a.qcow2"]).stdout;
    assert!(text.contains("one") && text.contains("enabled"), "{text}");
    let text = scratch.ok(&["bitmap", "dirty", "a.qcow2", "one"]).stdout;
    assert_eq!(text.lines().count(), 1, "{text}");
}

#[test]
fn a_header_with_a_backing_name_makes_room() {
    let scratch = Scratch::new();
    let dir = scratch.path("");
    for length in [1, 20, 60, 200] {
        let base = format!("{}.qcow2", "b".repeat(length));
        scratch.ok(&["create", &base, "4M"]);
        peer(
            &dir,
            "qemu-img",
            &["create", "-q", "-f", "qcow2", "-b", &base, "-F", "qcow2", "theirs.qcow2"],
        );
        scratch.ok(&["create", "--force", "ours.qcow2", "--backing", &base]);
        for image in ["theirs.qcow2", "ours.qcow2"] {
            scratch.ok(&["bitmap", "add", image, "one"]);
            scratch.ok(&["write", image, "0", "64K", "--pattern", "1"]);
            assert_eq!(assert_alike(&scratch, image, "one"), [(0, 64 << 10)]);
            assert_eq!(scratch.json_of("info", 0, &[image])["backing-filename"], base.as_str());
            scratch.ok(&["bitmap", "remove", image, "one"]);
            assert_eq!(scratch.json_of("info", 0, &[image])["backing-filename"], base.as_str());
            scratch.sound(image);
        }
    }
}

#[test]
fn a_conversion_takes_bitmaps_along() {
    let scratch = Scratch::new();
    let dir = scratch.path("");
    scratch.ok(&["create", "a.qcow2", "8M"]);
    scratch.ok(&["bitmap", "add", "-g", "4K", "a.qcow2", "one"]);
    scratch.ok(&["bitmap", "add", "--disabled", "a.qcow2", "two"]);
    scratch.ok(&["write", "a.qcow2", "1M", "10K", "--pattern", "1"]);
    scratch.ok(&["convert", "a.qcow2", "plain.qcow2"]);
    let plain = scratch.json_of("bitmap", 0, &["list", "plain.qcow2"]);
    assert_eq!(plain["bitmaps"], serde_json::json!([]));
    scratch.ok(&[
        "convert",
        "--bitmaps",
        "--verify",
        "a.qcow2",
        "b.qcow2",
        "-o",
        "cluster_size=4K",
    ]);
    assert_eq!(assert_alike(&scratch, "b.qcow2", "one"), [(1 << 20, 12 << 10)]);
    assert!(assert_alike(&scratch, "b.qcow2", "two").is_empty());
    let list = |image| scratch.json_of("bitmap", 0, &["list", image])["bitmaps"].clone();
    assert_eq!(list("a.qcow2"), list("b.qcow2"));
    scratch.sound("b.qcow2");
    // One that QEMU has left in use.
    peer(&dir, "qemu-img", &["bitmap", "--add", "b.qcow2", "three"]);
    let info = scratch.json_of("info", 0, &["b.qcow2"]);
    assert_eq!(info["bitmaps"][2]["name"], "three");
    let mut bytes = std::fs::read(scratch.path("b.qcow2")).unwrap();
    let name = bytes.windows(5).position(|window| window == b"three").unwrap();
    bytes[name - 24 + 15] |= 1;
    std::fs::write(scratch.path("b.qcow2"), bytes).unwrap();
    scratch.fails(2, "cannot be trusted", &["convert", "--bitmaps", "b.qcow2", "c.qcow2"]);
    assert!(!scratch.path("c.qcow2").exists());
    let skip = ["convert", "--bitmaps", "--skip-broken-bitmaps", "b.qcow2", "c.qcow2"];
    let answer = scratch.ok(&skip);
    assert!(answer.stderr.contains("'three'"), "{answer:?}");
    assert_eq!(list("a.qcow2"), list("c.qcow2"));
    scratch.fails(1, "raw image", &["convert", "--bitmaps", "a.qcow2", "d.raw"]);
    assert!(!scratch.path("d.raw").exists());
}
