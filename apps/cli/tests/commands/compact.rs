//! `vdkit compact`.

use std::os::unix::fs::MetadataExt;
use std::process::Stdio;

use crate::common::{self, Scratch, peer, signal};

/// A disk with data behind free and zero space, and a copy of it.
fn loose(scratch: &Scratch, mib: u64) {
    let io = |commands: &[&str]| {
        let mut arguments = vec!["-f", "qcow2", "-d", "unmap"];
        for command in commands {
            arguments.extend(["-c", command]);
        }
        arguments.push("disk.qcow2");
        peer(&scratch.path(""), "qemu-io", &arguments);
    };
    scratch.ok(&["create", "disk.qcow2", &format!("{mib}M")]);
    let third = mib / 3;
    io(&[
        &format!("write -P 1 0 {}M", 2 * third),
        &format!("write -P 0 {third}M 1M"),
        &format!("write -P 2 {}M {third}M", 2 * third),
        &format!("discard 0 {third}M"),
    ]);
    std::fs::copy(scratch.path("disk.qcow2"), scratch.path("before.qcow2")).unwrap();
}

fn assert_same_disk(scratch: &Scratch) {
    peer(&scratch.path(""), "qemu-img", &["compare", "-q", "before.qcow2", "disk.qcow2"]);
    peer(&scratch.path(""), "qemu-img", &["check", "-q", "disk.qcow2"]);
}

#[test]
fn a_smaller_file_with_the_same_disk() {
    let scratch = Scratch::new();
    loose(&scratch, 12);
    let before = std::fs::metadata(scratch.path("disk.qcow2")).unwrap();
    let json = scratch.json_of("compact", 0, &["disk.qcow2"]);
    let after = std::fs::metadata(scratch.path("disk.qcow2")).unwrap();
    assert_eq!(
        (&json["length-before"], &json["length-after"]),
        (&before.len().into(), &after.len().into())
    );
    assert_eq!(json["zero-clusters"], 16, "{json:#}");
    assert_eq!(json["left-alone"], serde_json::json!([]));
    // Seven MiB of data, header, L1 and L2 table, refcount table and block.
    assert_eq!(after.len(), (7 << 20) + 5 * 65536, "{json:#}");
    assert!(after.blocks() < before.blocks() && json["gained"].as_u64() > Some(0), "{json:#}");
    assert_same_disk(&scratch);
    let answer = scratch.ok(&["compact", "disk.qcow2"]);
    assert!(answer.stdout.starts_with("disk.qcow2: 0 B gained"), "{answer:?}");
}

#[test]
fn data_is_left_alone_where_it_shall_not_be_read() {
    let scratch = Scratch::new();
    loose(&scratch, 12);
    let json = scratch.json_of("compact", 0, &["--no-zero-scan", "disk.qcow2"]);
    assert_eq!(json["zero-clusters"], 0, "{json:#}");
    assert!(json["length-after"].as_u64() < json["length-before"].as_u64(), "{json:#}");
    assert_same_disk(&scratch);
}

#[test]
fn blocks_of_zeroes_in_a_raw_image_become_holes() {
    let scratch = Scratch::new();
    let mut bytes = vec![0; 1 << 20];
    bytes[..5000].fill(1);
    bytes[900_000] = 2;
    scratch.write("disk.raw", &bytes);
    scratch.fails(2, "raw", &["compact", "disk.raw"]);
    let json = scratch.json_of("compact", 0, &["-f", "raw", "disk.raw"]);
    // Three blocks of 4 KiB hold data.
    assert_eq!(json["punched-bytes"], (1 << 20) - 3 * 4096, "{json:#}");
    assert!(std::fs::read(scratch.path("disk.raw")).unwrap() == bytes);
    let used = std::fs::metadata(scratch.path("disk.raw")).unwrap().blocks() * 512;
    assert!(used < 1 << 19, "{used}");
}

#[test]
fn a_data_file_gets_holes_too() {
    let scratch = Scratch::new();
    peer(
        &scratch.path(""),
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "-o", "data_file=disk.data", "disk.qcow2", "4M"],
    );
    let writes = ["-f", "qcow2", "-c", "write -P 3 0 1M", "-c", "write -P 0 1M 1M", "disk.qcow2"];
    peer(&scratch.path(""), "qemu-io", &writes);
    let disk = scratch.ok(&["read", "disk.qcow2", "0"]).bytes;
    let json = scratch.json_of("compact", 0, &["disk.qcow2"]);
    assert_eq!(json["punched-bytes"], 1 << 20, "{json:#}");
    assert!(scratch.ok(&["read", "disk.qcow2", "0"]).bytes == disk);
    peer(&scratch.path(""), "qemu-img", &["check", "-q", "disk.qcow2"]);
}

#[test]
fn what_is_damaged_or_in_use_is_refused() {
    let scratch = Scratch::new();
    loose(&scratch, 6);
    let writer = common::Writer::start(&scratch.path(""), "disk.qcow2");
    scratch.fails(6, "disk.qcow2", &["compact", "disk.qcow2"]);
    drop(writer);
    let mut bytes = std::fs::read(scratch.path("disk.qcow2")).unwrap();
    bytes[79] |= 2; // marked corrupt
    scratch.write("disk.qcow2", &bytes);
    let answer = scratch.fails(4, "disk.qcow2", &["compact", "disk.qcow2"]);
    assert!(answer.stderr.contains("--repair all"), "{answer:?}");
    assert!(std::fs::read(scratch.path("disk.qcow2")).unwrap() == bytes);

    bytes[79] &= !2;
    // The first L2 table is the refcount table.
    let l1 = u64::from_be_bytes(bytes[40..48].try_into().unwrap()) as usize;
    bytes.copy_within(48..56, l1);
    scratch.write("disk.qcow2", &bytes);
    let finding = "found damage (index 0: found 0x10000 without COPIED flag";
    let answer = scratch.fails(4, finding, &["compact", "disk.qcow2"]);
    assert!(answer.stderr.contains("--repair all"), "{answer:?}");
    assert!(std::fs::read(scratch.path("disk.qcow2")).unwrap() == bytes);
}

#[test]
fn killed_at_any_moment_it_goes_on_when_it_is_run_again() {
    let scratch = Scratch::new();
    loose(&scratch, 150);
    let worn = scratch.path("worn.qcow2");
    std::fs::copy(scratch.path("disk.qcow2"), &worn).unwrap();
    let modified = || {
        let metadata = std::fs::metadata(scratch.path("disk.qcow2")).unwrap();
        (metadata.mtime(), metadata.mtime_nsec())
    };
    let mut cut_short = 0;
    for round in 0..12u64 {
        if round % 4 == 0 {
            std::fs::copy(&worn, scratch.path("disk.qcow2")).unwrap();
        }
        let mut child = scratch
            .command(&["compact", "disk.qcow2"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Later each round: after so many changes of the file that this process comes to see.
        for _ in 0..=round {
            let before = modified();
            common::wait_until(|| modified() != before || child.try_wait().unwrap().is_some());
        }
        if child.try_wait().unwrap().is_none() {
            signal(child.id(), "KILL");
            cut_short += 1;
        }
        child.wait().unwrap();
        // Leaks at most.
        let code = scratch.run(&["check", "disk.qcow2"]).code;
        assert!(matches!(code, Some(0 | 3)), "round {round}: {code:?}");
        peer(&scratch.path(""), "qemu-img", &["compare", "-q", "before.qcow2", "disk.qcow2"]);
    }
    assert!(cut_short > 0);
    let json = scratch.json_of("compact", 0, &["disk.qcow2"]);
    assert_eq!(json["length-after"], (99 << 20) + 5 * 65536, "{json:#}");
    assert_same_disk(&scratch);
}
