//! The runner sees what a broken candidate does: QEMU's own program behind a script that spoils one
//! thing.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use vdkit_differential::twins::{Twins, What};
use vdkit_differential::{cases, images, run_on};
use vdkit_testbase::require_peer;

fn reference() -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|folder| folder.join("qemu-img"))
        .find(|program| program.exists())
        .expect("require_peer found it")
}

/// A program in `folder` that is this script.
fn program(folder: &Path, script: &str) -> PathBuf {
    let reference = reference();
    let candidate = folder.join("qemu-img");
    let script = script.replace("QEMU", &reference.display().to_string());
    // By a process of its own: a program that somebody has open for writing cannot be started.
    let text = folder.join("script");
    std::fs::write(&text, format!("#!/bin/sh\n{script}\n")).unwrap();
    let copied = std::process::Command::new("cp").arg(&text).arg(&candidate).status().unwrap();
    assert!(copied.success());
    std::fs::set_permissions(&candidate, PermissionsExt::from_mode(0o755)).unwrap();
    candidate
}

/// Number of the cases with this text that differ, if the candidate is this script.
fn differing(images: &Path, script: &str, filter: &str) -> usize {
    let folder = tempfile::tempdir().unwrap();
    let candidate = program(folder.path(), script);
    let mut cases = cases::all();
    cases.retain(|case| case.line() == filter);
    assert_eq!(cases.len(), 1, "{filter}");
    run_on(images, &reference(), &candidate, &cases, 1).differing.len()
}

#[test]
fn each_kind_of_fault_is_seen() {
    if !require_peer("qemu-img") || !require_peer("qemu-io") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    images::make(&reference(), folder.path());
    let differing = |script: &str, case: &str| differing(folder.path(), script, case);
    let copy = "qemu-img convert -O qcow2 a.qcow2 new";
    for (fault, script, case) in [
        ("an exit code", "QEMU \"$@\"; exit 3", "qemu-img info a.qcow2"),
        ("a line", "QEMU \"$@\" | sed 's/qcow2/qcow3/'", "qemu-img info a.qcow2"),
        ("no message", "QEMU \"$@\" 2>/dev/null", "qemu-img info missing"),
        ("no target", "QEMU \"$@\"; rm -f new", copy),
        (
            "guest data",
            "QEMU \"$@\"; if [ -e new ]; then qemu-io -c 'write -P 9 128k 512' new >/dev/null; fi",
            copy,
        ),
        (
            "guest data behind a message that may differ",
            "QEMU \"$@\"; qemu-io -c 'write -P 9 128k 512' a.qcow2 >/dev/null; echo qemu-img: x >&2",
            "qemu-img resize a.qcow2 8M",
        ),
    ] {
        assert_eq!(differing("exec QEMU \"$@\"", case), 0, "{case}");
        assert_eq!(differing(script, case), 1, "{fault}");
    }
    no_end_is_seen(folder.path());
}

/// The same of a program that does not end.
fn no_end_is_seen(images: &Path) {
    let folder = tempfile::tempdir().unwrap();
    let (reference, candidate) = (reference(), program(folder.path(), "sleep 1000"));
    let twins = Twins::new(&reference, &candidate, images).with_limit(2);
    let case = cases::all().into_iter().find(|case| case.line() == "qemu-img info a.qcow2");
    let found = twins.run(&case.expect("such a case"));
    assert!(
        found.iter().any(|one| one.what == What::Code && one.ours.contains("no end")),
        "{found:?}"
    );
}
