//! What `make install`, `make install-lib` and `make install-qemu-names` do to a folder that has files already.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output};

use vdkit_testbase::require_peer;

/// Runs `make`, under a umask that keeps others out, for targets that are not built anew.
fn make(folder: &Path, arguments: &str) -> Output {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let script = format!("umask 077 && make -s DESTDIR={} {arguments}", folder.display());
    Command::new("sh").args(["-c", &script]).current_dir(root).output().unwrap()
}

/// A library as `make lib` leaves it, beside that of an older version.
fn built(folder: &Path, version: &str, content: &str) {
    fs::create_dir_all(folder).unwrap();
    for name in ["libvdkit.a", "vdkit.pc", &format!("libvdkit.so.{version}")] {
        fs::write(folder.join(name), content).unwrap();
    }
    let _ = fs::remove_file(folder.join("libvdkit.so.0"));
    symlink(format!("libvdkit.so.{version}"), folder.join("libvdkit.so.0")).unwrap();
}

#[test]
fn a_library_in_use_is_replaced_and_not_written_over() {
    if !require_peer("make") || !require_peer("python3") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (made, lib) = (folder.path().join("made"), folder.path().join("usr/local/lib"));
    let install = || {
        let arguments = format!("-o lib install-lib LIBRARY={}", made.display());
        let done = make(folder.path(), &arguments);
        assert!(done.status.success(), "{done:?}");
    };
    built(&made, "0.0.1", "older");
    built(&made, "0.0.2", "first");
    install();
    let mut running = fs::File::open(lib.join("libvdkit.so.0.0.2")).unwrap();
    built(&made, "0.0.2", "second");
    install();
    let mut seen = String::new();
    running.read_to_string(&mut seen).unwrap();
    assert_eq!(seen, "first", "a running program's library changed");
    assert_eq!(fs::read_to_string(lib.join("libvdkit.so")).unwrap(), "second");
    let mode = lib.join("libvdkit.so.0.0.2").metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o755);
    assert_eq!(fs::read_link(lib.join("libvdkit.so")).unwrap(), Path::new("libvdkit.so.0"));
    assert!(!lib.join("libvdkit.so.0.0.1").exists(), "an older version's file is installed");
}

#[test]
fn what_cargo_built_elsewhere_is_installed() {
    if !require_peer("make") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let release = folder.path().join("elsewhere/release");
    fs::create_dir_all(&release).unwrap();
    let program = release.join("vdkit");
    fs::write(&program, "#!/bin/sh\necho built elsewhere\n").unwrap();
    fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    let arguments =
        format!("-o build install CARGO_TARGET_DIR={}/elsewhere", folder.path().display());
    let done = make(folder.path(), &arguments);
    assert!(done.status.success(), "{done:?}");
    let installed = fs::read(folder.path().join("usr/local/bin/vdkit")).unwrap();
    assert_eq!(installed, fs::read(&program).unwrap());
    let page = folder.path().join("usr/local/share/bash-completion/completions/vdkit");
    assert_eq!(fs::read_to_string(page).unwrap(), "built elsewhere\n");
}

#[test]
fn no_link_is_made_inside_a_folder_with_a_name_of_qemus() {
    let folder = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/install-qemu-names");
    fs::write(folder.path().join("vdkit"), "").unwrap();
    fs::set_permissions(folder.path().join("vdkit"), PermissionsExt::from_mode(0o755)).unwrap();
    fs::create_dir(folder.path().join("qemu-nbd")).unwrap();
    let done = Command::new(script).arg(folder.path()).arg("--replace").output().unwrap();
    assert!(!done.status.success(), "{done:?}");
    assert!(String::from_utf8_lossy(&done.stderr).contains("qemu-nbd is a folder"), "{done:?}");
    assert_eq!(fs::read_dir(folder.path().join("qemu-nbd")).unwrap().count(), 0);
    assert!(!folder.path().join("qemu-img").exists());
}
