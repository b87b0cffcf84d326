//! What a test needs from the machine, and what happens where it is not there.

use std::path::PathBuf;

/// Where a program is found, if it is installed.
fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    // Not all users have the administrator's folders in their path.
    let more = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(more)
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
}

/// The Debian package that has a program.
fn package_of(program: &str) -> &str {
    match program {
        "qemu-img" | "qemu-io" | "qemu-nbd" => "qemu-utils",
        "mkfs.xfs" => "xfsprogs",
        "mkfs.btrfs" => "btrfs-progs",
        "mkfs.ext4" | "mke2fs" | "e2fsck" | "debugfs" => "e2fsprogs",
        "qemu-system-x86_64" => "qemu-system-x86",
        "xz" => "xz-utils",
        "ldd" => "libc-bin",
        "losetup" | "mount" | "umount" => "mount",
        "setpriv" => "util-linux",
        "virt-xml-validate" => "libvirt-clients",
        "xmllint" => "libxml2-utils",
        other => other,
    }
}

/// Whether what is missing is an error: in CI, and with `VDKIT_REQUIRE_PEERS=1`.
fn required() -> bool {
    let set = |name| std::env::var_os(name).is_some_and(|v| !v.is_empty() && v != "0");
    set("CI") || set("VDKIT_REQUIRE_PEERS")
}

/// Ends a test with a reason, or fails it where nothing may be missing.
pub(crate) fn missing(what: &str, remedy: &str) -> bool {
    assert!(!required(), "{what}; {remedy}");
    eprintln!("*** SKIPPED: {what}; {remedy}");
    false
}

/// Whether another program that this test stands on is installed. Where it is not, prints a line
/// and gives `false`, upon which the test shall return.
///
/// # Panics
/// Where it is missing although nothing may be: in CI (environment variable `CI`), or with
/// `VDKIT_REQUIRE_PEERS=1`.
pub fn require_peer(program: &str) -> bool {
    if find(program).is_some() {
        return true;
    }
    let package = package_of(program);
    missing(&format!("{program} is not installed"), &format!("apt-get install {package}"))
}

/// As [`require_peer`], for a module of Python 3, and the package on PyPI that brings it.
pub fn require_python(module: &str, package: &str) -> bool {
    let test = format!("import {module}");
    let found = std::process::Command::new("python3").args(["-c", &test]).output();
    if found.is_ok_and(|output| output.status.success()) {
        return true;
    }
    let what = format!("Python has no module {module}");
    missing(&what, &format!("python3 -m pip install {package}"))
}

/// As [`require_peer`], for the right to mount file systems and to attach loop devices.
///
/// # Panics
/// As [`require_peer`].
pub fn require_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if root && std::path::Path::new("/dev/loop-control").exists() {
        return true;
    }
    missing("this test mounts file systems or attaches loop devices", "run it as root")
}

/// As [`require_root`], for FUSE too.
///
/// # Panics
/// As [`require_peer`].
pub fn require_fuse() -> bool {
    if !require_root() {
        return false;
    }
    std::path::Path::new("/dev/fuse").exists()
        || missing("this test mounts over FUSE, and there is no /dev/fuse", "modprobe fuse")
}
