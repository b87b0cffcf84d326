//! VHDX images through the command: every way to and from them, and their parents.

use crate::common::{Scratch, peer};

fn content(scratch: &Scratch, name: &str, bytes: u64) {
    std::fs::File::create(scratch.path(name)).unwrap().set_len(bytes).unwrap();
    for (offset, len, pattern) in [("0", "64K", "1"), ("1M", "100000", "0x5a"), ("9M", "7", "9")] {
        scratch.ok(&["write", "-f", "raw", name, offset, len, "--pattern", pattern]);
    }
}

#[test]
fn images_go_both_ways() {
    let scratch = Scratch::new();
    content(&scratch, "disk.raw", (20 << 20) + 4096);
    for (source, target, options) in [
        ("disk.raw", "a.vhdx", "subformat=dynamic"),
        ("a.vhdx", "b.qcow2", "cluster_size=64K"),
        ("b.qcow2", "c.vhdx", "subformat=fixed"),
        ("c.vhdx", "d.raw", "preallocation=off"),
        ("c.vhdx", "e.vhdx", "block_size=1M,log_size=2M,block_state_zero=off"),
    ] {
        scratch.ok(&["convert", "--verify", "-o", options, source, target]);
        peer(&scratch.path(""), "qemu-img", &["compare", "-q", "disk.raw", target]);
        scratch.ok(&["check", target]);
    }
    scratch.ok(&["convert", "--verify", "-o", "logical_sector_size=4096", "a.vhdx", "f.vhdx"]);
    let same = ["compare", "a.vhdx", "f.vhdx"];
    scratch.ok(&same);
    for image in ["a.vhdx", "c.vhdx", "e.vhdx"] {
        peer(&scratch.path(""), "qemu-img", &["check", "-q", image]);
    }
    let measured = scratch.json_of("measure", 0, &["disk.raw", "-O", "vhdx"]);
    let length = std::fs::metadata(scratch.path("a.vhdx")).unwrap().len();
    assert_eq!(measured["required"], length, "{measured}");
    scratch.ok(&["resize", "a.vhdx", "+44M"]);
    scratch.ok(&["write", "a.vhdx", "60M", "1M", "--pattern", "3"]);
    scratch.ok(&["write", "a.vhdx", "0", "16M", "--pattern", "0"]);
    let before = scratch.ok(&["read", "a.vhdx", "0"]).bytes;
    let report = scratch.json_of("compact", 0, &["a.vhdx"]);
    assert!(report["length-after"].as_u64() < report["length-before"].as_u64(), "{report}");
    assert!(scratch.ok(&["read", "a.vhdx", "0"]).bytes == before);
    scratch.ok(&["check", "a.vhdx"]);
    peer(&scratch.path(""), "qemu-img", &["check", "-q", "a.vhdx"]);
}

#[test]
fn a_child_is_tied_to_its_parent() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "base.vhdx", "12M"]);
    scratch.ok(&["write", "base.vhdx", "0", "4M", "--pattern", "0x11"]);
    scratch.ok(&["create", "child.vhdx", "--backing", "base.vhdx"]);
    let info = scratch.json_of("info", 0, &["child.vhdx"]).to_string();
    assert!(info.contains("differencing") && info.contains("base.vhdx"), "{info}");
    scratch.ok(&["write", "child.vhdx", "1000", "100", "--pattern", "0x22"]);
    let read = |image: &str| scratch.ok(&["read", image, "0", "4M"]).bytes;
    let mut wanted = vec![0x11; 4 << 20];
    wanted[1000..1100].fill(0x22);
    assert!(read("child.vhdx") == wanted);
    scratch.ok(&["convert", "--verify", "child.vhdx", "flat.vhdx"]);
    assert!(read("flat.vhdx") == wanted);
    peer(&scratch.path(""), "qemu-img", &["check", "-q", "flat.vhdx"]);
    scratch.ok(&["check", "child.vhdx"]);

    // Committed, and then on its own.
    scratch.ok(&["commit", "child.vhdx"]);
    assert!(read("base.vhdx") == wanted && read("child.vhdx") == wanted);
    scratch.ok(&["write", "child.vhdx", "2M", "10", "--pattern", "0x33"]);
    wanted[2 << 20..(2 << 20) + 10].fill(0x33);
    scratch.ok(&["rebase", "child.vhdx", "--no-backing"]);
    std::fs::rename(scratch.path("base.vhdx"), scratch.path("gone.vhdx")).unwrap();
    assert!(read("child.vhdx") == wanted);
    peer(&scratch.path(""), "qemu-img", &["check", "-q", "child.vhdx"]);
    scratch.ok(&["check", "child.vhdx"]);

    // A parent that was written since is not taken.
    scratch.ok(&["create", "second.vhdx", "--backing", "gone.vhdx"]);
    scratch.ok(&["write", "--force", "gone.vhdx", "0", "512", "--pattern", "0x44"]);
    scratch.fails(4, "identity", &["read", "second.vhdx", "0", "4M"]);
    scratch.ok(&["rebase", "--unsafe", "second.vhdx", "--backing", "gone.vhdx"]);
    scratch.ok(&["read", "second.vhdx", "0", "4M"]);
    let raw = ["create", "x.vhdx", "--backing", "disk.raw", "--backing-format", "raw"];
    content(&scratch, "disk.raw", 10 << 20);
    scratch.fails(1, "on a raw image", &raw);
}

/// A guest sees one size of sectors, whichever image of the chain holds them.
#[test]
fn a_child_has_the_sectors_of_its_parent() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "base.vhdx", "16M", "-o", "logical_sector_size=4096"]);
    let sector = |image: &str| {
        let info = scratch.json_of("info", 0, &[image]);
        info.to_string().contains("\"4096\"")
    };
    assert!(sector("base.vhdx"));
    scratch.ok(&["create", "child.vhdx", "--backing", "base.vhdx"]);
    assert!(sector("child.vhdx"));
    let given = ["create", "x.vhdx", "--backing", "base.vhdx", "-o", "logical_sector_size=512"];
    scratch.fails(2, "leave the option out", &given);
    scratch.ok(&["convert", "child.vhdx", "--backing", "base.vhdx", "other.vhdx"]);
    assert!(sector("other.vhdx"));
    scratch.ok(&["write", "child.vhdx", "1M", "8K", "--pattern", "7"]);
    scratch.ok(&["check", "child.vhdx"]);
}
