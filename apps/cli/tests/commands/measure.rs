//! `vdkit measure`.

use crate::common::{Scratch, peer};

#[test]
fn an_image_is_no_larger_than_measured() {
    let scratch = Scratch::new();
    let mut bytes = vec![0; 8 << 20];
    bytes[1 << 20..3 << 20].fill(5);
    scratch.write("a.raw", &bytes);
    std::fs::File::create(scratch.path("holes.raw")).unwrap().set_len(8 << 20).unwrap();
    scratch.ok(&[
        "dd",
        "if=a.raw",
        "of=holes.raw",
        "bs=1M",
        "skip=1",
        "seek=1",
        "count=2",
        "-O",
        "raw",
    ]);
    for options in ["cluster_size=64K", "cluster_size=4K,refcount_bits=64", "cluster_size=2M"] {
        let measured = scratch.json_of("measure", 0, &["holes.raw", "-O", "qcow2", "-o", options]);
        let required = measured["required"].as_u64().unwrap();
        scratch.ok(&["convert", "holes.raw", "a.qcow2", "-o", options]);
        let used = scratch.json_of("info", 0, &["a.qcow2"])["actual-size"].as_u64().unwrap();
        assert!((2 << 20..=required).contains(&used), "{options}: {used} of {measured}");
        assert!(measured["fully-allocated"].as_u64() >= Some(8 << 20), "{measured}");
    }
}

#[test]
fn agrees_with_qemu_on_an_empty_disk() {
    let scratch = Scratch::new();
    for options in ["cluster_size=64K", "cluster_size=512", "cluster_size=2M,extended_l2=on"] {
        let arguments = ["--size", "10G", "-O", "qcow2", "-o", options];
        let ours = scratch.json_of("measure", 0, &arguments);
        let theirs = peer(
            &scratch.path(""),
            "qemu-img",
            &[&["measure", "--output", "json"][..], &arguments].concat(),
        );
        let theirs: serde_json::Value = serde_json::from_slice(&theirs.stdout).unwrap();
        assert_eq!(ours["fully-allocated"], theirs["fully-allocated"], "{options}");
        assert_eq!(ours["required"], theirs["required"], "{options}");
    }
}

#[test]
fn people_get_two_lines() {
    let scratch = Scratch::new();
    let text = scratch.ok(&["measure", "--size", "1G"]).stdout;
    assert_eq!(text.lines().count(), 2, "{text}");
    assert!(text.contains("1 GiB (1073741824 bytes)"), "{text}");
}

#[test]
fn the_command_line_is_checked() {
    let scratch = Scratch::new();
    scratch.write("a.raw", &[0; 512]);
    scratch.fails(2, "required", &["measure", "-O", "qcow2"]);
    scratch.fails(2, "cannot be used", &["measure", "--size", "1G", "a.raw"]);
    scratch.fails(2, "'zip'", &["measure", "--size", "1G", "-O", "zip"]);
    scratch.fails(1, "writing a qed image", &["measure", "--size", "1G", "-O", "qed"]);
    scratch.fails(2, "'x'", &["measure", "--size", "1G", "-O", "qcow2", "-o", "x=1"]);
    scratch.fails(1, "no-such", &["measure", "no-such"]);
}
