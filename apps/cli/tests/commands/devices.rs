//! Images on block devices that cannot do what files can.

use std::path::Path;

use crate::common::{Scratch, peer};
use vdkit_testkit::fs::{LoopDevice, loop_device};

/// Runs a command on a device whose only way to give space back is BLKDISCARD, after which no device
/// promises what it reads as. Returns how often it was asked for that.
fn discards(scratch: &Scratch, arguments: &[&str]) -> usize {
    let log = scratch.path("calls");
    let output = std::process::Command::new("strace")
        .args([
            "-f",
            "-qq",
            "-e",
            "trace=ioctl,fallocate",
            "-e",
            "inject=fallocate:error=EOPNOTSUPP",
        ])
        .arg("-o")
        .arg(&log)
        .arg(env!("CARGO_BIN_EXE_vdkit"))
        .args(arguments)
        .current_dir(scratch.path(""))
        .output()
        .expect("strace; `make peers` installs it");
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    let calls = std::fs::read_to_string(log).unwrap();
    calls.lines().filter(|line| line.contains("BLKDISCARD")).count()
}

const MIB: usize = 1 << 20;

/// Data and zeroes in turns, of whole MiB.
fn bytes(first: u8) -> Vec<u8> {
    (0..8 * MIB).map(|at| if (at / MIB).is_multiple_of(2) { first } else { 0 }).collect()
}

fn name(device: &LoopDevice) -> String {
    device.path().display().to_string()
}

/// Compaction, copies, commits and zeroing count on zeroes where they give space back. Only a guest
/// that says that it does not need its bytes gets whatever the device makes of it.
#[test]
fn no_command_relies_on_a_discard_with_an_undefined_result() {
    let scratch = Scratch::new();
    let Some(device) = loop_device(8 << 20, 512) else { return };
    let on = name(&device);
    let whole = |what: &str, wanted: &[u8], format: &str| {
        let found = scratch.ok(&["read", "-f", format, &on, "0", "8M"]).bytes;
        assert!(found == wanted, "{what}");
    };
    let put = |path: &Path, bytes: &[u8]| std::fs::write(path, bytes).unwrap();
    put(&scratch.path("a.raw"), &bytes(7));
    let run = |arguments: &[&str]| assert_eq!(discards(&scratch, arguments), 0, "{arguments:?}");

    run(&["convert", "-f", "raw", "a.raw", &on, "-O", "raw"]);
    whole("convert", &bytes(7), "raw");
    run(&["compact", "-f", "raw", &on]);
    whole("compact", &bytes(7), "raw");
    run(&["convert", "-f", "raw", "a.raw", "--into", &on, "-O", "raw"]);
    whole("convert --into", &bytes(7), "raw");
    run(&["write", "-f", "raw", &on, "2M", "1M", "--zero"]);
    let mut wanted = bytes(7);
    wanted[2 * MIB..3 * MIB].fill(0);
    whole("write --zero", &wanted, "raw");

    scratch.ok(&[
        "create",
        "over.qcow2",
        "--backing",
        &on,
        "--backing-format",
        "raw",
        "--allow-ref",
        "/dev",
    ]);
    scratch.ok(&["write", "over.qcow2", "4M", "1M", "--zero", "--allow-ref", "/dev"]);
    run(&["commit", "over.qcow2", "--allow-ref", "/dev"]);
    wanted[4 * MIB..5 * MIB].fill(0);
    whole("commit", &wanted, "raw");

    run(&["convert", "-f", "raw", "a.raw", &on, "-O", "qcow2"]);
    whole("convert to qcow2", &bytes(7), "qcow2");
    run(&["write", &on, "0", "4M", "--discard"]);
    run(&["compact", &on]);
    run(&["check", "--repair", "all", &on]);
    wanted = bytes(7);
    wanted[..4 * MIB].fill(0);
    whole("compact of qcow2", &wanted, "qcow2");

    assert!(discards(&scratch, &["write", "-f", "raw", &on, "0", "1M", "--discard"]) > 0);
}

/// What a device holds is a stream too.
#[test]
fn a_checksum_holds_for_a_device() {
    let scratch = Scratch::new();
    let Some(device) = loop_device(8 << 20, 512) else { return };
    let on = name(&device);
    scratch.write("a.raw", &bytes(7));
    scratch.ok(&["convert", "-f", "raw", "a.raw", &on, "-O", "raw"]);
    let wrong = format!("sha256:{}", "0".repeat(64));
    scratch.fails(1, "the checksum is", &["convert", &on, "b.qcow2", "--checksum", &wrong]);
    assert_eq!(scratch.names(), ["a.raw"]);
    let sum = peer(&scratch.folder(), "sha256sum", &["a.raw"]).stdout;
    let right = format!("sha256:{}", std::str::from_utf8(&sum[..64]).unwrap());
    scratch.ok(&["convert", &on, "b.qcow2", "--checksum", &right]);
    scratch.same("a.raw", "b.qcow2");
}
