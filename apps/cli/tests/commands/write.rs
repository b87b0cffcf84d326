//! `vdkit write`.

use crate::common::{self, Scratch, peer};

fn raw(scratch: &Scratch, bytes: u64) {
    std::fs::File::create(scratch.path("disk.raw")).unwrap().set_len(bytes).unwrap();
}

#[test]
fn writes_patterns_zeroes_and_input() {
    let scratch = Scratch::new();
    raw(&scratch, 1 << 20);
    scratch.ok(&["write", "-f", "raw", "disk.raw", "4096", "8K", "--pattern", "0xaa"]);
    scratch.ok(&["write", "-f", "raw", "disk.raw", "5000", "100", "--zero"]);
    let told = scratch.run_with_input(&["write", "-f", "raw", "disk.raw", "1048570"], b"hello!");
    assert_eq!(told.code, Some(0), "{told:?}");
    assert!(told.stdout.contains("6 bytes"), "{told:?}");
    scratch.write("input", b"0123456789");
    let json =
        scratch.json_of("write", 0, &["-f", "raw", "disk.raw", "100", "3", "--input", "input"]);
    assert_eq!((&json["offset"], &json["length"]), (&100.into(), &3.into()));
    let mut expected = vec![0; 1 << 20];
    expected[4096..12288].fill(0xaa);
    expected[5000..5100].fill(0);
    expected[1_048_570..].copy_from_slice(b"hello!");
    expected[100..103].copy_from_slice(b"012");
    assert!(std::fs::read(scratch.path("disk.raw")).unwrap() == expected);
}

#[test]
fn qemu_reads_what_was_written_to_qcow2() {
    let scratch = Scratch::new();
    let dir = scratch.path("");
    peer(&dir, "qemu-img", &["create", "-q", "-f", "qcow2", "disk.qcow2", "10M"]);
    scratch.ok(&["write", "disk.qcow2", "1000000", "200000", "--pattern", "119"]);
    scratch.ok(&["write", "disk.qcow2", "1100000", "1000", "--zero"]);
    scratch.ok(&["write", "disk.qcow2", "9M", "1M", "--pattern", "1"]);
    scratch.ok(&["write", "disk.qcow2", "9M", "1M", "--discard"]);
    for command in [
        "read -P 119 1000000 100000",
        "read -P 0 1100000 1000",
        "read -P 119 1101000 99000",
        "read -P 0 1200000 512",
        "read -P 0 9M 1M",
    ] {
        let output = peer(&dir, "qemu-io", &["-c", command, "disk.qcow2"]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(!text.contains("failed"), "{command}: {text}");
    }
    peer(&dir, "qemu-img", &["check", "-q", "disk.qcow2"]);
}

#[test]
fn an_image_probed_as_raw_is_not_written_to() {
    let scratch = Scratch::new();
    raw(&scratch, 4096);
    let answer = scratch.fails(
        2,
        "format was not detected",
        &["write", "disk.raw", "0", "1", "--pattern", "1"],
    );
    assert!(answer.stderr.contains("disk.raw"), "{answer:?}");
    assert!(std::fs::read(scratch.path("disk.raw")).unwrap().iter().all(|&byte| byte == 0));
}

#[test]
fn nothing_is_written_past_the_end() {
    let scratch = Scratch::new();
    raw(&scratch, 4096);
    let command = ["write", "-f", "raw", "disk.raw"];
    scratch.fails(2, "past the end", &[&command[..], &["4000", "97", "--zero"]].concat());
    let answer = scratch.run_with_input(&[&command[..], &["4000"]].concat(), &[1; 97]);
    assert_eq!(answer.code, Some(2), "{answer:?}");
    assert_eq!(std::fs::metadata(scratch.path("disk.raw")).unwrap().len(), 4096);
}

#[test]
fn an_input_shorter_than_asked_is_an_error() {
    let scratch = Scratch::new();
    raw(&scratch, 4096);
    let answer = scratch.run_with_input(&["write", "-f", "raw", "disk.raw", "0", "10"], b"12345");
    assert_eq!(answer.code, Some(1), "{answer:?}");
    assert!(answer.stderr.contains("after 5 bytes of 10"), "{answer:?}");
}

#[test]
fn the_command_line_is_checked() {
    let scratch = Scratch::new();
    raw(&scratch, 4096);
    let command = ["write", "-f", "raw", "disk.raw", "0"];
    for (words, more) in [
        ("LENGTH", &["--zero"][..]),
        ("cannot be used with", &["1", "--zero", "--discard"]),
        ("cannot be used with", &["1", "--zero", "--input", "x"]),
        ("not a byte", &["1", "--pattern", "256"]),
        ("cache", &["1", "--zero", "--cache", "fast"]),
    ] {
        let answer = scratch.run(&[&command[..], more].concat());
        assert_eq!(answer.code, Some(2), "{answer:?}");
        assert!(answer.stderr.contains(words), "{words}: {answer:?}");
    }
}

#[test]
fn a_writer_elsewhere_locks_it() {
    let scratch = Scratch::new();
    raw(&scratch, 4096);
    let writer = common::Writer::start(&scratch.path(""), "disk.raw");
    let answer =
        scratch.fails(6, "in use", &["write", "-f", "raw", "disk.raw", "0", "1", "--zero"]);
    assert!(answer.stderr.contains(&writer.pid().to_string()), "{answer:?}");
}

#[test]
fn a_signal_ends_the_wait_for_input() {
    let scratch = Scratch::new();
    raw(&scratch, 1 << 20);
    let mut child = scratch
        .command(&["write", "-f", "raw", "disk.raw", "0"])
        .stdin(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    common::wait_until_signals_are_handled(child.id());
    // (A wait would close what it still holds.)
    let held = child.stdin.take();
    common::signal(child.id(), "INT");
    let status = child.wait().unwrap();
    drop(held);
    assert_eq!(status.code(), Some(130), "{status:?}");
}

#[test]
fn a_base_is_not_changed_under_its_overlays() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "base.qcow2", "1M"]);
    scratch.ok(&["create", "base.raw", "1M"]);
    scratch.ok(&["create", "on-qcow2.qcow2", "--backing", "base.qcow2"]);
    scratch.ok(&["create", "on-raw.qcow2", "--backing", "./base.raw", "--backing-format", "raw"]);
    scratch.ok(&["create", "source.raw", "1M"]);
    let write = ["write", "base.qcow2", "0", "4K", "--pattern", "1"];
    let raw = ["write", "-f", "raw", "base.raw", "0", "4K", "--pattern", "1"];
    for (overlay, command) in [
        ("on-qcow2.qcow2", &write[..]),
        ("on-raw.qcow2", &raw[..]),
        ("on-qcow2.qcow2", &["resize", "--shrink", "base.qcow2", "64K"]),
        ("on-qcow2.qcow2", &["convert", "--into", "source.raw", "base.qcow2"]),
        ("on-qcow2.qcow2", &["dd", "if=source.raw", "of=base.qcow2"]),
    ] {
        let answer = scratch.fails(5, overlay, command);
        assert!(answer.stderr.contains("vdkit rebase") && answer.stderr.contains("--force"));
    }
    // A link to it is the same file.
    std::os::unix::fs::symlink("base.qcow2", scratch.path("link.qcow2")).unwrap();
    scratch.fails(5, "on-qcow2.qcow2", &["write", "link.qcow2", "0", "4K", "--zero"]);
    // Growing harms nobody, and neither does writing to an overlay.
    scratch.ok(&["resize", "base.qcow2", "2M"]);
    scratch.ok(&["write", "on-qcow2.qcow2", "0", "4K", "--pattern", "1"]);
    scratch.ok(&[&write[..], &["--force"]].concat());
    scratch.ok(&["resize", "--shrink", "base.qcow2", "1M", "--force"]);
    scratch.ok(&["convert", "--into", "source.raw", "base.qcow2", "--force"]);
    scratch.ok(&["dd", "if=source.raw", "of=base.qcow2", "--force"]);
}

#[test]
fn an_input_that_is_too_long_says_what_was_written() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "1M"]);
    let answer = scratch.run_with_input(&["write", "a.qcow2", "0"], &vec![7; (1 << 20) + 1]);
    assert_eq!(answer.code, Some(2), "{answer:?}");
    assert!(answer.stderr.contains("its first 1048576 bytes were written"), "{answer:?}");
}
