//! `vdkit read`.

use crate::common::{Scratch, peer};

#[test]
fn prints_the_bytes_as_they_are() {
    let scratch = Scratch::new();
    let bytes: Vec<u8> = (0..65536u32).map(|i| (i % 251) as u8).collect();
    scratch.write("disk.raw", &bytes);
    assert_eq!(scratch.ok(&["read", "disk.raw", "0", "64K"]).bytes, bytes);
    assert_eq!(scratch.ok(&["read", "disk.raw", "1000", "7"]).bytes, bytes[1000..1007]);
    assert_eq!(scratch.ok(&["read", "disk.raw", "65000"]).bytes, bytes[65000..]);
    assert_eq!(scratch.ok(&["read", "disk.raw", "64K"]).bytes, b"");
    assert_eq!(
        scratch.ok(&["read", "--cache", "none", "disk.raw", "1", "513"]).bytes,
        bytes[1..514]
    );
}

#[test]
fn prints_a_hex_dump() {
    let scratch = Scratch::new();
    let mut bytes = vec![0; 512];
    bytes[510] = 0x55;
    bytes[511] = 0xaa;
    scratch.write("disk.raw", &bytes);
    let zeroes = "00 00 00 00 00 00 00 00";
    assert_eq!(
        scratch.ok(&["read", "--hex", "disk.raw", "0"]).stdout,
        format!(
            "00000000  {zeroes}  {zeroes}  |................|\n*\n\
             000001f0  {zeroes}  00 00 00 00 00 00 55 aa  |..............U.|\n00000200\n"
        )
    );
}

#[test]
fn reads_through_a_chain_and_what_is_compressed() {
    let scratch = Scratch::new();
    let dir = scratch.path("");
    scratch.write("plain.raw", &[0x5a; 1 << 20]);
    peer(&dir, "qemu-img", &["convert", "-c", "-O", "qcow2", "plain.raw", "base.qcow2"]);
    peer(
        &dir,
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "top.qcow2", "2M"],
    );
    peer(&dir, "qemu-io", &["-c", "write -P 0x11 64k 64k", "top.qcow2"]);
    let bytes = scratch.ok(&["read", "top.qcow2", "0"]).bytes;
    let mut expected = vec![0x5a; 1 << 20];
    expected[65536..131_072].fill(0x11);
    expected.resize(2 << 20, 0);
    assert!(bytes == expected);
}

#[test]
fn a_range_past_the_end_is_refused_and_nothing_printed() {
    let scratch = Scratch::new();
    scratch.write("disk.raw", &[1; 512]);
    scratch.fails(2, "past the end", &["read", "disk.raw", "0", "513"]);
    scratch.fails(2, "past the end", &["read", "disk.raw", "513"]);
    scratch.fails(2, "past the end", &["read", "disk.raw", "8191P", "8191P"]);
    scratch.fails(2, "not a size", &["read", "disk.raw", "0x10"]);
}

#[test]
fn a_reader_that_wants_no_more_is_no_error() {
    let scratch = Scratch::new();
    std::fs::File::create(scratch.path("disk.raw")).unwrap().set_len(64 << 20).unwrap();
    let line = format!("{} read disk.raw 0 | head -c 10 | wc -c", env!("CARGO_BIN_EXE_vdkit"));
    let output = std::process::Command::new("bash")
        .args(["-c", &format!("set -o pipefail; {line}")])
        .current_dir(scratch.path(""))
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "10", "{output:?}");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

#[test]
fn hostile_input_is_a_clear_error() {
    let scratch = Scratch::new();
    scratch.fails(1, "no-such.raw", &["read", "no-such.raw", "0"]);
    scratch.fails(1, ".", &["read", ".", "0"]);
    scratch.write("magic.qcow2", b"QFI\xfb\0\0\0\x03");
    scratch.fails(4, "magic.qcow2", &["read", "magic.qcow2", "0"]);
}

/// A table that is cut off reads as zero where it is missing: each command that reads warns of it.
#[test]
fn warnings_of_opening_are_printed() {
    let scratch = Scratch::new();
    let dir = scratch.path("");
    peer(&dir, "qemu-img", &["create", "-q", "-f", "qcow2", "cut.qcow2", "1M"]);
    peer(&dir, "qemu-io", &["-f", "qcow2", "-c", "write -z 0 64k", "cut.qcow2"]);
    // The L2 table is the last cluster.
    let file = std::fs::OpenOptions::new().write(true).open(scratch.path("cut.qcow2")).unwrap();
    file.set_len(file.metadata().unwrap().len() - 60 * 1024).unwrap();
    scratch.write("zero.raw", &[0; 1 << 20]);
    for arguments in [
        &["convert", "cut.qcow2", "out.raw"][..],
        &["read", "cut.qcow2", "0"],
        &["map", "cut.qcow2"],
        &["compare", "zero.raw", "cut.qcow2"],
        &["measure", "cut.qcow2"],
        &["dd", "if=cut.qcow2", "of=part.raw"],
    ] {
        let answer = scratch.ok(arguments);
        assert!(answer.stderr.contains("within an L2 table"), "{arguments:?}: {answer:?}");
    }
}
