//! Detects what uses a block device, or a file behind a loop device.
//!
//! Image locks do not cover these: the kernel takes none. A write to the file behind a mounted loop
//! device changes a file system under its driver. Replacing the file leaves the loop device on an
//! unlinked file.
//!
//! Sources: the kernel's Documentation/ABI (`/sys/block/<disk>/holders`), drivers/block/loop.c
//! (`loop/backing_file`), proc(5) (`mountinfo`, `swaps`).

use std::fs::File;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Errno;
use vdkit_block::{Error, Result};

use crate::mounts::{self, Mount};

/// Planned change of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Writing to it.
    Write,
    /// Replacing or removing it.
    Replace,
}

/// Refuses a change of a file behind a loop device. Writing is allowed if nothing uses the loop
/// device.
///
/// # Errors
/// [`Error::Busy`], naming the device.
pub(crate) fn refuse_attached(name: &str, file: &File, change: Change) -> Result<()> {
    let Ok(own) = file.metadata() else { return Ok(()) };
    if !own.is_file() {
        return Ok(());
    }
    let Ok(disks) = std::fs::read_dir("/sys/block") else { return Ok(()) };
    for disk in disks.flatten() {
        let loops = disk.file_name();
        let Some(device) = loops.to_str().filter(|name| name.starts_with("loop")) else { continue };
        let folder = disk.path();
        let Ok(path) = std::fs::read_to_string(folder.join("loop/backing_file")) else { continue };
        let same = std::fs::metadata(path.trim_end_matches('\n'))
            .is_ok_and(|found| (found.dev(), found.ino()) == (own.dev(), own.ino()));
        if !same {
            continue;
        }
        let by = holder(&folder, device);
        if by.is_some() || change == Change::Replace {
            let by = by.map(|by| format!(", which is {by}")).unwrap_or_default();
            return Err(Error::Busy {
                file: name.to_owned(),
                what: format!("attached to /dev/{device}{by}"),
            });
        }
    }
    Ok(())
}

/// The user of a loop device or one of its partitions.
fn holder(folder: &Path, device: &str) -> Option<String> {
    let parts = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
    let parts = parts.filter(|part| {
        part.file_name().is_some_and(|name| name.to_string_lossy().starts_with(device))
    });
    let named = [folder.to_owned()].into_iter().chain(parts).find_map(|part| {
        let number = std::fs::read_to_string(part.join("dev")).ok()?;
        let (major, minor) = mounts::device_number(number.trim_end())?;
        by_whom(rustix::fs::makedev(major, minor))
    });
    named.or_else(|| {
        // Ask the kernel: not every user is visible in /proc or /sys.
        let opened = File::options()
            .read(true)
            .custom_flags(OFlags::EXCL.bits() as i32)
            .open(Path::new("/dev").join(device));
        let busy = opened.err().and_then(|error| error.raw_os_error());
        (busy == Some(Errno::BUSY.raw_os_error())).then(|| "in use".to_owned())
    })
}

/// The user of a block device, for messages.
pub(crate) fn by_whom(device: u64) -> Option<String> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    // File systems on several devices (btrfs) have device numbers of their own, and name one of
    // their devices as the source.
    let is_on = |mount: &Mount| {
        mount.device == (major, minor)
            || mount.source.starts_with("/dev/") && is_device(Path::new(&mount.source), device)
    };
    if let Some(mount) = mounts::all().into_iter().find(is_on) {
        return Some(format!("mounted at {}", mount.point.display()));
    }
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    let names = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    if names.map(Path::new).any(|name| is_device(name, device)) {
        return Some("used as swap space".to_owned());
    }
    let holders = PathBuf::from(format!("/sys/dev/block/{major}:{minor}/holders"));
    let holder = holders.read_dir().ok()?.flatten().next()?.file_name();
    Some(format!("part of /dev/{}", holder.to_string_lossy()))
}

fn is_device(path: &Path, device: u64) -> bool {
    use std::os::unix::fs::FileTypeExt;
    path.metadata().is_ok_and(|found| found.file_type().is_block_device() && found.rdev() == device)
}
