//! The other programs that a run needs: their paths, versions and packages.

use std::path::{Path, PathBuf};

use crate::error::Result;
use vdkit_block::CancelToken;

use crate::process::Line;

/// Why a cell is not measured here. This is not a failure.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Skip(pub String);

/// Returns a [`Skip`] as an error.
pub fn skip<T>(reason: impl Into<String>) -> Result<T> {
    Err(Skip(reason.into()).into())
}

/// The path of an installed program. Also searches administrators' folders.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let more = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    let mut folders = std::env::split_paths(&path).chain(more);
    folders.find_map(|folder| Some(folder.join(program)).filter(|file| file.is_file()))
}

/// The Debian package that contains a program.
fn package(program: &str) -> &str {
    match program {
        "qemu-img" | "qemu-io" | "qemu-nbd" | "qemu-storage-daemon" => "qemu-utils",
        "qemu-system-x86_64" => "qemu-system-x86",
        "mkfs.ext4" | "mke2fs" => "e2fsprogs",
        "losetup" | "mount" | "umount" => "mount",
        "ldd" => "libc-bin",
        "busybox" => "busybox-static",
        other => other,
    }
}

/// The path of a required program.
///
/// # Errors
/// [`Skip`] if the program is not installed, with the package to install.
pub fn need(program: &str) -> Result<PathBuf> {
    match find(program) {
        Some(path) => Ok(path),
        None => skip(format!("{program} is not installed: apt-get install {}", package(program))),
    }
}

/// Requires the right to mount and to attach loop devices.
///
/// # Errors
/// [`Skip`] for users without it.
pub fn need_root(what: &str) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return skip(format!("{what} needs root: run the plan with sudo"));
    }
    if !Path::new("/dev/loop-control").exists() {
        return skip(format!("{what} needs loop devices: modprobe loop"));
    }
    Ok(())
}

/// Requires FUSE mounts.
///
/// # Errors
/// [`Skip`] if FUSE is not available.
pub fn need_fuse() -> Result<()> {
    if !Path::new("/dev/fuse").exists() {
        return skip("there is no /dev/fuse: modprobe fuse");
    }
    if !rustix::process::geteuid().is_root() {
        need("fusermount3")?;
    }
    Ok(())
}

/// Programs whose versions are recorded with the results.
const PEERS: &[&str] = &[
    "fio",
    "qemu-img",
    "qemu-nbd",
    "qemu-storage-daemon",
    "qemu-system-x86_64",
    "nbdkit",
    "mkfs.ext4",
];

/// Names and versions of these programs; "not installed" for a missing one.
pub fn versions(cancel: &CancelToken) -> Vec<(String, String)> {
    let version = |name: &str| {
        let path = find(name)?;
        let flag = if name == "mkfs.ext4" { "-V" } else { "--version" };
        let ended = Line::new(path).arg(flag).run_any(cancel).ok()?;
        let text = if ended.stdout.trim().is_empty() { ended.stderr } else { ended.stdout };
        Some(text.lines().next()?.trim().to_owned())
    };
    let told = |name: &&str| {
        ((*name).to_owned(), version(name).unwrap_or_else(|| "not installed".to_owned()))
    };
    PEERS.iter().map(told).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_can_be_installed() {
        assert!(find("sh").is_some());
        let error = need("no-such-program").unwrap_err();
        let Some(Skip(reason)) = error.skipped() else { panic!("{error}") };
        assert!(reason.contains("apt-get install no-such-program"), "{reason}");
        assert_eq!(package("qemu-nbd"), "qemu-utils");
    }

    #[test]
    fn versions_are_told_of_all() {
        let versions = versions(&CancelToken::default());
        assert_eq!(versions.len(), PEERS.len());
        assert!(versions.iter().all(|(_, version)| !version.is_empty()), "{versions:?}");
    }
}
