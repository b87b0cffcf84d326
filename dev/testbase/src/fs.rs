//! Scratch file systems and loop devices.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::peers::{require_peer, require_root};

/// Runs a command and gives what it printed.
///
/// # Panics
/// If it fails.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// A mounted file system of its own, unmounted and removed when dropped.
#[derive(Debug)]
pub struct Mounted {
    at: PathBuf,
    _folder: TempDir,
}

impl Mounted {
    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.at
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let unmount = |lazy: &[&str]| {
            Command::new("umount").args(lazy).arg(&self.at).status().is_ok_and(|s| s.success())
        };
        // A file that a failed test left open must not keep the image for ever.
        if !unmount(&[]) {
            unmount(&["--lazy"]);
        }
    }
}

/// Makes and mounts a file system of `bytes` bytes: `xfs`, `ext4`, `btrfs` or `tmpfs`. XFS wants
/// at least 300 MiB, btrfs 110 MiB; the image is sparse. Nothing where that is not possible here
/// (see [`require_root`] for when that is an error).
///
/// # Panics
/// If making or mounting fails.
pub fn mounted(kind: &str, bytes: u64) -> Option<Mounted> {
    mounted_with(kind, bytes, "")
}

/// As [`mounted`], with further mount options such as `data=journal`.
///
/// # Panics
/// As [`mounted`].
pub fn mounted_with(kind: &str, bytes: u64, options: &str) -> Option<Mounted> {
    let mkfs = format!("mkfs.{kind}");
    if !require_root() || (kind != "tmpfs" && !require_peer(&mkfs)) {
        return None;
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let at = folder.path().join("mounted");
    std::fs::create_dir(&at).expect("a mount point");
    let mut mount = Command::new("mount");
    if !options.is_empty() {
        mount.args(["-o", options]);
    }
    if kind == "tmpfs" {
        mount.args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"]);
    } else {
        let image = folder.path().join("image");
        File::create(&image).and_then(|file| file.set_len(bytes)).expect("a scratch image");
        let quiet: &[&str] = if kind == "ext4" { &["-q", "-F"] } else { &["-q"] };
        run(Command::new(mkfs).args(quiet).arg(&image));
        mount.args(["-o", "loop"]).arg(&image);
    }
    run(mount.arg(&at));
    Some(Mounted { at, _folder: folder })
}

/// A loop device over a scratch file, detached and removed when dropped.
#[derive(Debug)]
pub struct LoopDevice {
    device: PathBuf,
    file: PathBuf,
    _folder: TempDir,
}

impl LoopDevice {
    /// The device, such as `/dev/loop3`.
    pub fn path(&self) -> &Path {
        &self.device
    }

    /// The file beneath it.
    pub fn file(&self) -> &Path {
        &self.file
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // A test's read-only flag would stay with the device's number for its next user.
        let _ = Command::new("blockdev").arg("--setrw").arg(&self.device).status();
        let _ = Command::new("losetup").arg("--detach").arg(&self.device).status();
    }
}

/// A loop device of `bytes` zero bytes with sectors of `sector_bytes` (512 or 4096). Nothing
/// where that is not possible here, as for [`mounted`].
///
/// # Panics
/// If attaching fails.
pub fn loop_device(bytes: u64, sector_bytes: u32) -> Option<LoopDevice> {
    if !require_root() || !require_peer("losetup") {
        return None;
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = folder.path().join("image");
    File::create(&file).and_then(|file| file.set_len(bytes)).expect("a scratch image");
    let device = run(Command::new("losetup")
        .args(["--find", "--show", "--sector-size", &sector_bytes.to_string()])
        .arg(&file));
    Some(LoopDevice { device: device.into(), file, _folder: folder })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_mounted_goes_away_again() {
        for kind in ["tmpfs", "ext4", "xfs", "btrfs"] {
            let Some(mounted) = mounted(kind, 320 << 20) else { continue };
            let path = mounted.path().to_owned();
            std::fs::write(path.join("file"), b"x").unwrap();
            let table = || std::fs::read_to_string("/proc/self/mounts").unwrap();
            let line =
                table().lines().find(|l| l.contains(path.to_str().unwrap())).map(str::to_owned);
            assert!(line.is_some_and(|l| l.contains(kind)));
            drop(mounted);
            assert!(!table().contains(path.to_str().unwrap()));
        }
    }

    #[test]
    fn a_loop_device_shows_its_file() {
        let Some(device) = loop_device(1 << 20, 4096) else { return };
        let bytes = std::fs::read(device.path()).unwrap();
        assert_eq!(bytes.len(), 1 << 20);
        let name = device.path().file_name().unwrap().to_str().unwrap().to_owned();
        let size = format!("/sys/block/{name}/queue/logical_block_size");
        assert_eq!(std::fs::read_to_string(size).unwrap().trim(), "4096");
        drop(device);
    }
}
