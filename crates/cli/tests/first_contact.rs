//! What a newcomer tries first: names, empty files, things that are no images.

mod common;

use common::Scratch;

/// An image whose header was wiped, an empty file, and a text: with names that promise an image.
#[test]
fn what_is_not_the_image_that_its_name_says_is_told_by_every_command() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "x.qcow2", "64M"]);
    let mut bytes = std::fs::read(scratch.path("x.qcow2")).unwrap();
    bytes[..512].fill(0);
    std::fs::write(scratch.path("x.qcow2"), &bytes).unwrap();
    scratch.write("z.qcow2", b"");
    scratch.write("passwd.vmdk", b"root:x:0:0:root:/root:/bin/bash\n");
    for (name, format) in [("x.qcow2", "qcow2"), ("z.qcow2", "qcow2"), ("passwd.vmdk", "vmdk")] {
        let said = format!("its name says that it is a {format} image");
        for command in [
            &["check", name][..],
            &["info", name],
            &["map", name],
            &["read", name, "0"],
            &["convert", name, "y.raw"],
            &["compare", name, name],
            &["serve", name, "--nbd", "unix:socket"],
            &["serve", "--read-only", name, "--nbd", "unix:socket"],
            &["mount", "--read-only", name, "file"],
        ] {
            scratch.fails(1, &said, command);
        }
        let doctor = scratch.run(&["doctor", name]);
        assert!(doctor.stdout.contains(&said), "doctor {name}: {doctor:?}");
        assert_ne!(doctor.code, Some(0), "doctor {name}");
        let inspect = scratch.run(&["inspect", name]);
        assert!(!inspect.stdout.contains("accept"), "inspect {name}: {inspect:?}");
        assert_ne!(inspect.code, Some(0), "inspect {name}");
    }
    assert_eq!(scratch.names(), ["passwd.vmdk", "x.qcow2", "z.qcow2"]);
    // Who says what it is, is believed.
    scratch.ok(&["convert", "-f", "raw", "x.qcow2", "y.raw"]);
    assert!(std::fs::read(scratch.path("y.raw")).unwrap() == bytes);
}

#[test]
fn a_check_of_a_raw_disk_says_that_there_is_nothing_to_check() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.raw", "1M"]);
    let said = scratch.ok(&["check", "a.raw"]).stdout;
    assert!(said.contains("nothing to check") && !said.contains("sound"), "{said}");
}

/// `ssh badhost cat disk | vdkit convert - disk.qcow2`.
#[test]
fn an_empty_stream_replaces_no_image() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "1M"]);
    scratch.ok(&["write", "disk.qcow2", "0", "1M", "--pattern", "1"]);
    scratch.write("empty.raw", b"");
    let before = std::fs::read(scratch.path("disk.qcow2")).unwrap();
    for source in
        [&["convert", "-", "disk.qcow2"][..], &["convert", "-f", "raw", "-", "disk.qcow2"]]
    {
        let answer = scratch.run_with_input(source, b"");
        assert_eq!(answer.code, Some(1), "{answer:?}");
        assert!(answer.stderr.contains("standard input: is empty"), "{answer:?}");
        assert!(answer.stderr.contains("--allow-empty"), "{answer:?}");
    }
    scratch.fails(1, "is empty", &["convert", "empty.raw", "disk.qcow2"]);
    assert!(before == std::fs::read(scratch.path("disk.qcow2")).unwrap());
    let answer = scratch.run_with_input(&["convert", "--allow-empty", "-", "new.qcow2"], b"");
    assert_eq!(answer.code, Some(0), "{answer:?}");
    scratch.ok(&["convert", "--allow-empty", "empty.raw", "also.qcow2"]);
}

#[test]
fn a_stream_that_ends_within_a_sector_is_told() {
    let scratch = Scratch::new();
    let answer = scratch.run_with_input(&["convert", "-", "new.qcow2"], &[7; 1000]);
    assert_eq!(answer.code, Some(0), "{answer:?}");
    assert!(answer.stderr.contains("ends within a sector, after 1000 bytes"), "{answer:?}");
    let answer = scratch.run_with_input(&["convert", "-", "new.qcow2"], &[7; 1024]);
    assert!(!answer.stderr.contains("sector"), "{answer:?}");
}

/// What is made is what the name says, or is told.
#[test]
fn a_target_is_never_raw_under_another_formats_name() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "1M"]);
    for name in ["x.dmg", "z.iso", "x.qed", "x.qcow", "x.hdd", "X.DMG"] {
        scratch.fails(1, "does not write", &["convert", "a.qcow2", name]);
        scratch.fails(1, "does not write", &["create", name, "1M"]);
        assert!(!scratch.path(name).exists());
    }
    scratch.ok(&["convert", "-O", "raw", "a.qcow2", "z.iso"]);
    let told = "is the name of no format";
    for command in [&["convert", "a.qcow2", "y.qcow2.bak"][..], &["create", "x.qcow3", "1M"]] {
        let answer = scratch.run(command);
        assert_eq!(answer.code, Some(0), "{answer:?}");
        assert!(answer.stderr.contains(told), "{answer:?}");
    }
    for name in ["disk", "disk.raw", "disk.img", "disk.bin"] {
        let answer = scratch.run(&["convert", "a.qcow2", name]);
        assert!(answer.code == Some(0) && !answer.stderr.contains(told), "{answer:?}");
    }
    let answer = scratch.run(&["convert", "-O", "raw", "a.qcow2", "y.bak"]);
    assert!(!answer.stderr.contains(told), "{answer:?}");
}

#[test]
fn a_backing_name_that_would_be_a_protocol_is_refused() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a:b.qcow2", "1M"]);
    scratch.fails(2, "./a:b.qcow2", &["create", "ov.qcow2", "-b", "a:b.qcow2"]);
    scratch.ok(&["create", "alone.qcow2", "1M"]);
    scratch.fails(2, "./a:b.qcow2", &["rebase", "alone.qcow2", "-b", "a:b.qcow2"]);
    assert!(!scratch.path("ov.qcow2").exists());
    scratch.ok(&["create", "ov.qcow2", "-b", "./a:b.qcow2"]);
    scratch.ok(&["read", "ov.qcow2", "0", "512"]);
}

/// A disk of 200 GiB with nothing in it is verified by its holes.
#[test]
fn verifying_reads_no_holes() {
    let scratch = Scratch::new();
    std::fs::File::create(scratch.path("empty.raw")).unwrap().set_len(200 << 30).unwrap();
    scratch.ok(&["write", "-f", "raw", "empty.raw", "100G", "1M", "--pattern", "1"]);
    let output = std::process::Command::new("strace")
        .args(["-f", "-qq", "-e", "trace=pread64,preadv,preadv2,read"])
        .args([env!("CARGO_BIN_EXE_vdkit"), "convert", "--verify", "empty.raw", "again.raw"])
        .current_dir(scratch.path(""))
        .output()
        .expect("strace; `make peers` installs it");
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{log}");
    let reads = log.lines().filter(|line| line.contains("read")).count();
    assert!(reads < 1000, "{reads} reads");
}
