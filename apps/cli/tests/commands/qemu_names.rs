//! The names qemu-img and qemu-nbd: as links, as `vdkit qemu-img`, and installed.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

use vdkit_testkit::require_peer;

use crate::common::Scratch;

const VDKIT: &str = env!("CARGO_BIN_EXE_vdkit");

fn install(folder: &Path, arguments: &[&str]) -> Output {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/install-qemu-names");
    Command::new(script).arg(folder).args(arguments).output().unwrap()
}

#[test]
fn links_are_made_and_programs_of_qemu_stay() {
    let scratch = Scratch::new();
    let bin = scratch.path("");
    let done = install(&bin, &[]);
    assert!(!done.status.success(), "without vdkit there: {done:?}");

    symlink(VDKIT, scratch.path("vdkit")).unwrap();
    for _ in 0..2 {
        let done = install(&bin, &[]);
        assert!(done.status.success(), "{done:?}");
    }
    let done = Command::new(scratch.path("qemu-img")).arg("--version").output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(said.starts_with("qemu-img version 10.0") && said.contains("vdkit"), "{said}");

    // Nothing is changed if one of the names is somebody else's.
    std::fs::remove_file(scratch.path("qemu-img")).unwrap();
    std::fs::remove_file(scratch.path("qemu-nbd")).unwrap();
    std::fs::write(scratch.path("qemu-nbd"), "QEMU's").unwrap();
    let done = install(&bin, &[]);
    assert!(!done.status.success(), "{done:?}");
    assert!(String::from_utf8_lossy(&done.stderr).contains("REPLACE=1"), "{done:?}");
    assert_eq!(std::fs::read(scratch.path("qemu-nbd")).unwrap(), b"QEMU's");
    assert!(!scratch.path("qemu-img").exists());

    let done = install(&bin, &["--replace"]);
    assert!(done.status.success(), "{done:?}");
    assert_eq!(std::fs::read_link(scratch.path("qemu-nbd")).unwrap(), Path::new("vdkit"));
}

#[test]
fn the_name_may_follow_vdkit() {
    let scratch = Scratch::new();
    scratch.ok(&["qemu-img", "create", "-q", "-fqcow2", "a.qcow2", "1M"]);
    let told = scratch.ok(&["qemu-img", "info", "a.qcow2"]);
    assert!(told.stdout.starts_with("image: a.qcow2\nfile format: qcow2\n"), "{told:?}");
    let told = scratch.run(&["qemu-img", "info", "nothing"]);
    assert_eq!(told.code, Some(1));
    assert_eq!(
        told.stderr,
        "qemu-img: Could not open 'nothing': Could not open 'nothing': No such file or directory\n"
    );
}

#[test]
fn results_that_cannot_be_printed_are_an_error() {
    let scratch = Scratch::new();
    for arguments in [
        &["qemu-img", "create", "-f", "qcow2", "a.qcow2", "1M"][..],
        &["qemu-img", "info", "a.qcow2"],
        &["qemu-nbd", "--version"],
    ] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let done = scratch.command(arguments).stdout(full).output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{arguments:?}: {said}");
        let words = format!("{}: stdout: No space left on device\n", arguments[0]);
        assert_eq!(said, words, "{arguments:?}");
    }
    // What the command is for was done.
    scratch.ok(&["qemu-img", "check", "a.qcow2"]);
}

#[test]
fn references_are_followed_anywhere_unless_the_environment_says_strict() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("far")).unwrap();
    std::fs::create_dir(scratch.path("near")).unwrap();
    scratch.ok(&["create", "far/base.qcow2", "1M"]);
    let base = scratch.path("far/base.qcow2").display().to_string();
    let create =
        ["qemu-img", "create", "-q", "-f", "qcow2", "-b", &base, "-F", "qcow2", "near/top.qcow2"];
    scratch.ok(&create);
    scratch.ok(&["qemu-img", "map", "near/top.qcow2"]);
    let mut strict = scratch.command(&["qemu-img", "map", "near/top.qcow2"]);
    let done = strict.env("VDKIT_REFS", "strict").output().unwrap();
    assert_eq!(done.status.code(), Some(1), "{done:?}");
    assert!(String::from_utf8_lossy(&done.stderr).contains("refused"), "{done:?}");
}

#[test]
fn a_base_that_changed_is_refused_whatever_it_is_called() {
    if !require_peer("qemu-img") || !require_peer("qemu-io") {
        return;
    }
    let scratch = Scratch::new();
    let run = |program: &str, arguments: &[&str]| {
        let done = Command::new(program).args(arguments).current_dir(scratch.folder()).output();
        let done = done.unwrap();
        assert!(done.status.success(), "{arguments:?}: {done:?}");
    };
    run("qemu-img", &["create", "-q", "-f", "vmdk", "base.vmdk", "1M"]);
    run("qemu-io", &["-f", "vmdk", "-c", "write 0 64k", "base.vmdk"]);
    let names = ["base.vmdk", "file:base.vmdk"];
    for (name, top) in names.iter().zip(["a.vmdk", "b.vmdk"]) {
        run("qemu-img", &["create", "-q", "-f", "vmdk", "-b", name, "-F", "vmdk", top]);
        scratch.ok(&["qemu-img", "convert", "-O", "raw", top, "out"]);
    }
    run("qemu-io", &["-f", "vmdk", "-c", "write -P 7 0 64k", "base.vmdk"]);
    for top in ["a.vmdk", "b.vmdk"] {
        let told = scratch.run(&["qemu-img", "convert", "-O", "raw", top, "out"]);
        assert_eq!(told.code, Some(1), "{top}: {told:?}");
    }
}
