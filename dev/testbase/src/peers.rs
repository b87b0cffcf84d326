//! What a test needs from the machine, and what happens where it is not there.

use std::path::{Path, PathBuf};
use std::process::Command;

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
        "libvirtd" => "libvirt-daemon",
        "virsh" => "libvirt-clients",
        "cloud-localds" => "cloud-image-utils",
        "virt-sparsify" => "guestfs-tools",
        "depmod" => "kmod",
        "virt-xml-validate" => "libvirt-clients",
        "xmllint" => "libxml2-utils",
        "dpkg-deb" => "dpkg",
        "dpkg-shlibdeps" => "dpkg-dev",
        "systemd-analyze" => "systemd",
        "systemd-nspawn" => "systemd-container",
        other => other,
    }
}

/// Whether what a person can install or allow may be missing: not with `VDKIT_REQUIRE_PEERS=1`, which
/// `.ci/run` sets.
fn required() -> bool {
    std::env::var_os("VDKIT_REQUIRE_PEERS").is_some_and(|value| !value.is_empty() && value != "0")
}

/// Says that a test is left out, and gives `false`. What a person could install or allow goes through here.
///
/// # Panics
/// With `VDKIT_REQUIRE_PEERS=1`.
pub fn missing(what: &str, remedy: &str) -> bool {
    assert!(!required(), "{what}; {remedy}");
    eprintln!("*** SKIPPED: {what}; {remedy}");
    false
}

/// Says that a test is left out because this kernel, processor or sandbox cannot do what it needs:
/// nobody could install that. CONTRIBUTING.md lists these cases.
pub fn impossible_here(what: &str) {
    eprintln!("*** SKIPPED: {what}");
}

/// Whether another program that this test needs is installed. Where it is not, prints a line
/// and gives `false`, upon which the test shall return.
///
/// # Panics
/// If it is missing although nothing may be: with `VDKIT_REQUIRE_PEERS=1`.
pub fn require_peer(program: &str) -> bool {
    if find(program).is_some() {
        return true;
    }
    let package = package_of(program);
    missing(&format!("{program} is not installed"), &format!("apt-get install {package}"))
}

/// A Python that has this module, of those that `scripts/install-peers` puts beneath `target`. Where
/// there is none, as for [`require_peer`].
///
/// # Panics
/// As [`require_peer`].
pub fn python(module: &str) -> Option<Command> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let python = || Command::new(root.join("target/peers/python/bin/python3"));
    let found = python().args(["-c", &format!("import {module}")]).output();
    if found.is_ok_and(|output| output.status.success()) {
        return Some(python());
    }
    missing(&format!("Python has no module {module}"), "run scripts/install-peers");
    None
}

/// Whether libvhdi, by its Python module, reads the content of a raw file from a VHD or VHDX image,
/// followed by its parents.
const LIBVHDI: &str = "
import sys, pyvhdi
files = []
for path in sys.argv[2:]:
    file = pyvhdi.file(); file.open(path); files.append(file)
for child, parent in zip(files, files[1:]):
    assert child.get_disk_type() == 4, child.get_disk_type()
    child.set_parent(parent)
disk, wanted = files[0], open(sys.argv[1], 'rb').read()
assert disk.get_media_size() == len(wanted), (disk.get_media_size(), len(wanted))
at = 0
while at < len(wanted):
    got = disk.read_buffer_at_offset(min(1 << 20, len(wanted) - at), at)
    assert got and got == wanted[at:at + len(got)], hex(at)
    at += len(got)
";

/// Asserts that libvhdi reads this content from an image, given with its parents after it. Does nothing
/// where it is missing, as [`require_peer`] says.
///
/// # Panics
/// As [`require_peer`], and if libvhdi reads something else.
pub fn libvhdi_reads(raw: &Path, images: &[&Path], what: &str) {
    let Some(mut python) = python("pyvhdi") else { return };
    let out = python.args(["-c", LIBVHDI]).arg(raw).args(images).output().expect("python3");
    assert!(out.status.success(), "{what}: {}", String::from_utf8_lossy(&out.stderr));
}

/// As [`require_peer`], for the right to mount file systems and to attach loop devices.
///
/// # Panics
/// As [`require_peer`].
pub fn require_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if root && Path::new("/dev/loop-control").exists() {
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
    Path::new("/dev/fuse").exists()
        || missing("this test mounts over FUSE, and there is no /dev/fuse", "modprobe fuse")
}
