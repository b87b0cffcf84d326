//! `vdkit convert` where something is there already: a target that exists, an image that the new one
//! stands on.

use crate::common::{self, Scratch};
use serde_json::Value;

const MIB: usize = 1 << 20;

/// Bytes that compress well, and no two clusters of them are the same.
fn text(bytes: usize) -> Vec<u8> {
    let lines = (0..).flat_map(|line: u64| format!("line {line:08} of a text\n").into_bytes());
    lines.take(bytes).collect()
}

fn converted(scratch: &Scratch, arguments: &[&str]) -> Value {
    scratch.json_of("convert", 0, arguments)
}

fn compressed(answer: &Value) -> u64 {
    answer["moved"]["clusters-compressed"].as_u64().unwrap()
}

fn file_bytes(scratch: &Scratch, name: &str) -> usize {
    scratch.path(name).metadata().unwrap().len() as usize
}

#[test]
fn compress_is_not_ignored_into_a_target_that_exists() {
    let scratch = Scratch::new();
    scratch.write("text.raw", &text(8 * MIB));
    scratch.ok(&["create", "new.qcow2", "8M"]);
    let answer = converted(&scratch, &["-c", "--into", "text.raw", "new.qcow2"]);
    assert_eq!(compressed(&answer), 128);
    assert!(file_bytes(&scratch, "new.qcow2") < 3 * MIB);
    scratch.same("text.raw", "new.qcow2");
    // Over what it holds, with zeroes between, and with an end inside a cluster: what lies behind
    // that stays.
    let mut source = text(3 * MIB + 512);
    source[MIB..2 * MIB].fill(0);
    scratch.write("part.raw", &source);
    scratch.ok(&["write", "new.qcow2", "0", "8M", "--pattern", "7"]);
    let answer = converted(&scratch, &["-c", "--into", "part.raw", "new.qcow2"]);
    assert_eq!(compressed(&answer), 32);
    let mut wanted = vec![7; 8 * MIB];
    wanted[..source.len()].copy_from_slice(&source);
    scratch.write("wanted.raw", &wanted);
    scratch.same("wanted.raw", "new.qcow2");
    scratch.ok(&["check", "new.qcow2"]);
    // From a stream too.
    let stream = ["convert", "-c", "--into", "-", "new.qcow2"];
    let told = scratch.run_with_input(&stream, &text(8 * MIB));
    assert_eq!(told.code, Some(0), "{}", told.stderr);
    scratch.same("text.raw", "new.qcow2");
    scratch.ok(&["check", "new.qcow2"]);
}

#[test]
fn compress_is_not_ignored_above_a_backing_image() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "base.qcow2", "8M"]);
    scratch.ok(&["write", "base.qcow2", "0", "8M", "--pattern", "7"]);
    scratch.ok(&["create", "over.qcow2", "--backing", "base.qcow2"]);
    let text = text(5 * MIB);
    scratch.write("text", &text);
    scratch.ok(&["write", "over.qcow2", "1M", "--input", "text"]);
    scratch.ok(&["write", "over.qcow2", "2M", "1M", "--zero"]);
    let answer = converted(&scratch, &["-c", "--backing", "base.qcow2", "over.qcow2", "new.qcow2"]);
    assert_eq!(compressed(&answer), 64);
    assert!(file_bytes(&scratch, "new.qcow2") < 2 * MIB);
    scratch.same("over.qcow2", "new.qcow2");
    scratch.ok(&["check", "new.qcow2"]);
}

#[test]
fn compress_is_not_ignored_on_a_device() {
    let scratch = Scratch::new();
    let Some(device) = vdkit_testkit::fs::loop_device(3 << 20, 512) else { return };
    scratch.write("text.raw", &text(8 * MIB));
    let name = device.path().to_str().unwrap();
    let answer = converted(&scratch, &["-c", "-O", "qcow2", "text.raw", name]);
    assert_eq!(compressed(&answer), 128);
    scratch.same("text.raw", name);
}

/// What lets the source's chain be read lets the image be read that the new one stands on.
#[test]
fn the_image_to_stand_on_is_opened_as_the_source_is() {
    let scratch = Scratch::new();
    std::fs::create_dir_all(scratch.path("far")).unwrap();
    std::fs::create_dir_all(scratch.path("near")).unwrap();
    scratch.ok(&["create", "far/bottom.qcow2", "1M"]);
    scratch.ok(&["write", "far/bottom.qcow2", "0", "1M", "--pattern", "1"]);
    let allow = ["--allow-ref", "far"];
    let stand = ["--backing", "../far/bottom.qcow2", "near/base.qcow2"];
    scratch.ok(&[&["create"][..], &allow, &stand].concat());
    scratch.ok(&["create", "--allow-ref", "far", "--backing", "base.qcow2", "near/over.qcow2"]);
    scratch.ok(&["write", "--allow-ref", "far", "near/over.qcow2", "0", "64K", "--pattern", "2"]);
    let convert = ["--backing", "base.qcow2", "near/over.qcow2", "near/new.qcow2"];
    scratch.fails(5, "outside the image's own folder", &[&["convert"][..], &convert].concat());
    scratch.ok(&[&["convert", "--verify"][..], &allow, &convert].concat());
    // While somebody writes to it, with -U.
    std::fs::remove_file(scratch.path("near/new.qcow2")).unwrap();
    let writer = common::Writer::start(&scratch.path("near"), "base.qcow2");
    scratch.fails(6, "base.qcow2", &[&["convert"][..], &allow, &convert].concat());
    scratch.ok(&[&["convert", "-U"][..], &allow, &convert].concat());
    drop(writer);
}

#[test]
fn bitmaps_that_cannot_be_copied_are_told_before_anything_is_written() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "source.qcow2", "1M"]);
    scratch.ok(&["write", "source.qcow2", "0", "1M", "--pattern", "1"]);
    scratch.ok(&["bitmap", "add", "source.qcow2", "b"]);
    scratch.ok(&["create", "larger.qcow2", "2M"]);
    scratch.ok(&["create", "named.qcow2", "1M"]);
    scratch.ok(&["bitmap", "add", "named.qcow2", "b"]);
    scratch.ok(&["create", "old.qcow2", "-o", "compat=0.10", "1M"]);
    for (target, code, words) in [
        ("larger.qcow2", 2, "1048576"),
        ("named.qcow2", 2, "already"),
        ("old.qcow2", 1, "version 2"),
    ] {
        let before = std::fs::read(scratch.path(target)).unwrap();
        let convert = ["convert", "--bitmaps", "--into", "source.qcow2", target];
        scratch.fails(code, words, &convert);
        let list = scratch.ok(&["bitmap", "list", target]).stdout;
        assert_eq!(list.contains('b'), target == "named.qcow2", "{list}");
        let read = scratch.ok(&["read", target, "0", "64K"]).bytes;
        assert!(read.iter().all(|byte| *byte == 0), "{target} was written to");
        assert_eq!(before.len(), file_bytes(&scratch, target));
    }
}
