//! Describes devices, and decides whether the lab may overwrite one.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::error::{Context, Result};
use rustix::fs::{Mode, OFlags, SeekFrom, seek};
use vdkit_block::CancelToken;
use vdkit_storage::mounts;

use crate::environment::block;
use crate::model::{PlaceInfo, PlaceKind};
use crate::peers::find;
use crate::process::Line;

/// Why a device is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Refusal {
    /// What was found.
    pub reason: String,
    /// What the user may do.
    pub hint: String,
}

fn refuse<T>(device: &Path, reason: impl std::fmt::Display, hint: &str) -> Result<T> {
    Err(Refusal { reason: format!("{}: {reason}", device.display()), hint: hint.to_owned() }.into())
}

/// Describes a device without opening it for writing.
pub fn describe(path: &Path) -> Result<PlaceInfo> {
    let found = fs::metadata(path).with_context(|| path.display().to_string())?;
    if !found.file_type().is_block_device() {
        return refuse(path, "not a block device", "name a folder with --on");
    }
    let mut info = block::device(found.rdev(), path);
    info.kind = PlaceKind::Device;
    let file = File::open(path).with_context(|| path.display().to_string())?;
    info.total_bytes = seek(&file, SeekFrom::End(0)).context("size of the device")?;
    info.free_bytes = info.total_bytes;
    Ok(info)
}

/// Asks the user to type a device's name. The arguments say what will happen, and to which device.
/// Returns whether the user typed the name.
pub type Ask<'a> = &'a dyn Fn(&str, &Path) -> Result<bool>;

/// Requires the user's consent to overwrite a device, even if nothing was found on it: the device
/// is among `erase`, or the user types its name when `ask` asks for it.
///
/// # Errors
/// [`Refusal`] without consent.
pub fn confirm(
    path: &Path,
    erase: &[PathBuf],
    ask: Option<Ask<'_>>,
    cancel: &CancelToken,
) -> Result<()> {
    if erase.iter().any(|named| named == path) {
        return Ok(());
    }
    let found = content(path, cancel)?;
    let found = match &found {
        Some(what) => format!("contains {what}"),
        None => "no data was found on it, but its name was not confirmed".to_owned(),
    };
    if let Some(ask) = ask {
        let info = describe(path)?;
        let what = info.beneath.first().map_or("", String::as_str);
        let told = format!(
            "{} ({what}, {} MiB): {found}; the whole device will be overwritten",
            path.display(),
            info.total_bytes >> 20
        );
        if ask(&told, path)? {
            return Ok(());
        }
    }
    let hint =
        format!("the run overwrites the whole device; to confirm, add: --erase {}", path.display());
    refuse(path, found, &hint)
}

/// Requires that a device is unused: not mounted, no swap space, not part of another device.
///
/// # Errors
/// [`Refusal`].
pub fn check_unused(path: &Path) -> Result<()> {
    let number = fs::metadata(path).with_context(|| path.display().to_string())?.rdev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let mounts = mounts::all();
    let whole = Path::new("/sys/dev/block").join(format!("{major}:{minor}"));
    let numbers = with_partitions(&whole, (major, minor));
    if let Some(mount) = mounts.iter().find(|mount| numbers.contains(&mount.device)) {
        let at = mount.point.display();
        return refuse(path, format!("mounted at {at}"), "unmount it, or name another device");
    }
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    for line in swaps.lines().skip(1) {
        let name = line.split_whitespace().next().unwrap_or_default();
        let same = |found: fs::Metadata| {
            numbers.contains(&(rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev())))
        };
        if fs::metadata(name).is_ok_and(same) {
            return refuse(path, "in use as swap space", "run swapoff, or name another device");
        }
    }
    if let Ok(mut holders) = fs::read_dir(whole.join("holders"))
        && let Some(Ok(holder)) = holders.next()
    {
        let name = holder.file_name().to_string_lossy().into_owned();
        return refuse(path, format!("in use by {name}"), "name another device");
    }
    // Ask the kernel itself: an exclusive open fails if a file system, a volume manager or another
    // program has claimed the device.
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(_) => {}
        Err(rustix::io::Errno::BUSY) => {
            return refuse(path, "in use (it cannot be opened exclusively)", "name another device");
        }
        Err(error) => return Err(error).with_context(|| path.display().to_string()),
    }
    let read_only = fs::read_to_string(whole.join("ro")).unwrap_or_default();
    if read_only.trim() == "1" {
        return refuse(path, "read-only", "name another device");
    }
    Ok(())
}

/// The device numbers of a device and of its partitions.
fn with_partitions(whole: &Path, own: (u32, u32)) -> Vec<(u32, u32)> {
    let mut all = vec![own];
    for entry in fs::read_dir(whole).into_iter().flatten().filter_map(std::result::Result::ok) {
        if entry.path().join("partition").exists()
            && let Ok(text) = fs::read_to_string(entry.path().join("dev"))
        {
            all.extend(mounts::device_number(text.trim()));
        }
    }
    all
}

/// Bytes at a device's start that are searched for data.
const SEARCHED_BYTES: u64 = 1 << 20;

/// What a device contains, if anything: a known signature, or bytes that are not zero.
fn content(path: &Path, cancel: &CancelToken) -> Result<Option<String>> {
    if let Some(wipefs) = find("wipefs") {
        let line = Line::new(wipefs).args(["--no-act", "--output", "TYPE", "--noheadings"]);
        let ended = line.arg(path).run(cancel)?;
        let found: Vec<&str> = ended.stdout.split_whitespace().collect();
        if !found.is_empty() {
            return Ok(Some(format!("a signature ({})", found.join(", "))));
        }
    }
    // wipefs does not know some content, such as a disk image or a database on the device.
    let file = File::open(path).with_context(|| path.display().to_string())?;
    let mut bytes = Vec::new();
    let read = file.take(SEARCHED_BYTES).read_to_end(&mut bytes);
    read.with_context(|| path.display().to_string())?;
    let found = bytes.iter().position(|byte| *byte != 0);
    Ok(found.map(|at| format!("data (a byte that is not zero at {at})")))
}
