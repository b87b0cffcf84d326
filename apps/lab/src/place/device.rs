//! Describes devices, and decides whether the lab may overwrite one.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{Context, Result};
use rustix::fs::{Mode, OFlags, SeekFrom, seek};
use vdkit_block::CancelToken;
use vdkit_storage::{FileOptions, FileStorage, LockMode, mounts};

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

/// Requires that a device is unused: not mounted, no swap space, not part of another device, not a
/// disk of a running program.
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
    check_exclusive(path)?;
    check_unlocked(path)?;
    check_unopened(path, &whole, &numbers)?;
    let read_only = fs::read_to_string(whole.join("ro")).unwrap_or_default();
    if read_only.trim() == "1" {
        return refuse(path, "read-only", "name another device");
    }
    Ok(())
}

/// Asks the kernel itself: an exclusive open fails if a file system, a volume manager or another
/// program has claimed the device.
///
/// # Errors
/// [`Refusal`].
pub fn check_exclusive(path: &Path) -> Result<()> {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(_) => Ok(()),
        Err(rustix::io::Errno::BUSY) => {
            refuse(path, "in use (it cannot be opened exclusively)", "name another device")
        }
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

/// Requires that no program has locked the device for writing. QEMU and vdkit open a disk without
/// O_EXCL, but with locks. This takes no lock, which could make a program that starts now fail.
fn check_unlocked(path: &Path) -> Result<()> {
    let options = FileOptions::default().lock(LockMode::Off);
    let asked = FileStorage::open(path, &options).and_then(|file| file.ask_for_writers());
    or_refuse(path, asked)
}

/// Requires that no other process has the device, one of its partitions or its whole disk open for
/// writing. Some programs, such as databases, use neither O_EXCL nor locks.
fn check_unopened(path: &Path, folder: &Path, numbers: &[(u32, u32)]) -> Result<()> {
    let mut numbers = numbers.to_vec();
    if folder.join("partition").exists()
        && let Ok(text) = fs::read_to_string(folder.join("../dev"))
    {
        numbers.extend(mounts::device_number(text.trim()));
    }
    let is_device = |open: &Path| {
        // Only devices are asked for more: a file of a server that is down would block.
        let in_dev = fs::read_link(open).is_ok_and(|name| name.starts_with("/dev"));
        in_dev
            && fs::metadata(open).is_ok_and(|found| {
                let number = found.rdev();
                numbers.contains(&(rustix::fs::major(number), rustix::fs::minor(number)))
            })
    };
    let mut found = writer(is_device);
    // `losetup --find` and others open devices for a moment to ask them something.
    for _ in 0..10 {
        if found.is_some() {
            std::thread::sleep(Duration::from_millis(50));
            found = writer(is_device);
        }
    }
    found.map_or(Ok(()), |who| in_use(path, &who))
}

fn in_use<T>(path: &Path, who: &str) -> Result<T> {
    refuse(path, format!("in use by {who}"), "end that program, or name another device")
}

/// The first other process that has a file open for writing which `wanted` accepts, given its path
/// in `/proc/PID/fd`. Only finds processes that this user may inspect.
fn writer(wanted: impl Fn(&Path) -> bool) -> Option<String> {
    let own = std::process::id();
    for process in fs::read_dir("/proc").ok()?.flatten() {
        let pid = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
        let Some(pid) = pid.filter(|pid| *pid != own) else { continue };
        for open in fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten() {
            let info = process.path().join("fdinfo").join(open.file_name());
            if wanted(&open.path()) && fs::read_to_string(info).is_ok_and(|text| writes(&text)) {
                let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
                return Some(format!("process {pid} ({})", name.trim_end()));
            }
        }
    }
    None
}

/// Whether a text of `/proc/PID/fdinfo` (proc_pid_fdinfo(5)) is of a file that is open for writing.
fn writes(info: &str) -> bool {
    let mut lines = info.lines().filter_map(|line| line.strip_prefix("flags:"));
    let flags = lines.next().and_then(|text| u32::from_str_radix(text.trim(), 8).ok());
    flags.is_some_and(|flags| OFlags::from_bits_retain(flags) & OFlags::ACCMODE != OFlags::RDONLY)
}

/// Turns the error of a locked device into a refusal.
fn or_refuse<T>(path: &Path, opened: vdkit_block::Result<T>) -> Result<T> {
    match opened {
        Err(vdkit_block::Error::Locked { holder: Some(holder), .. }) => {
            in_use(path, &format!("process {} ({})", holder.pid, holder.command))
        }
        Err(vdkit_block::Error::Locked { .. }) => in_use(path, "another program"),
        other => Ok(other?),
    }
}

/// Opens a device to overwrite it, if it is still unused: a program may have opened it since the run
/// began. While the result exists, programs that lock their disks cannot use the device.
///
/// # Errors
/// [`Refusal`].
pub fn claim(path: &Path) -> Result<FileStorage> {
    check_unused(path)?;
    lock(path)
}

/// Opens a device with a writer's locks, and without O_EXCL, which `blkdiscard` uses meanwhile.
fn lock(path: &Path) -> Result<FileStorage> {
    let name = path.display().to_string();
    let file = File::options().read(true).write(true).open(path).with_context(|| &name)?;
    or_refuse(path, FileStorage::from_file(file, name, &FileOptions::read_write()))
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

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn refusal(result: Result<impl std::fmt::Debug>) -> String {
        result.unwrap_err().refusal().expect("a refusal").reason.clone()
    }

    /// QEMU locks its disk and does not open it exclusively. The lab once emptied such a device.
    #[test]
    fn a_disk_that_a_program_has_locked_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path();
        check_unlocked(path).unwrap();
        let guest = FileStorage::open(path, &FileOptions::read_write()).unwrap();
        let own = format!("in use by process {}", std::process::id());
        for found in [refusal(check_unlocked(path)), refusal(lock(path))] {
            assert!(found.contains(&own), "{found}");
        }
        drop(guest);
        // The question takes no lock, but a device that is being emptied has one.
        let claimed = lock(path).unwrap();
        assert!(FileStorage::open(path, &FileOptions::read_write()).is_err());
        drop(claimed);
        FileStorage::open(path, &FileOptions::read_write()).unwrap();
        // A program that only reads shares its disk with nobody who writes.
        let _reader = FileStorage::open(path, &FileOptions::default()).unwrap();
        assert!(refusal(lock(path)).contains(&own));
    }

    #[test]
    fn a_program_without_locks_is_found_by_its_open_files() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let inode = file.as_file().metadata().unwrap().ino();
        let is_file = |open: &Path| fs::metadata(open).is_ok_and(|found| found.ino() == inode);
        let with = |open: &std::fs::OpenOptions| {
            let stdin = Stdio::from(open.open(file.path()).unwrap());
            let mut child = Command::new("sleep").arg("60").stdin(stdin).spawn().unwrap();
            let found = writer(is_file);
            child.kill().unwrap();
            child.wait().unwrap();
            (child.id(), found)
        };
        assert_eq!(with(File::options().read(true)).1, None);
        let (pid, found) = with(File::options().read(true).write(true));
        assert!(found.unwrap().starts_with(&format!("process {pid} (")));
        // This process has it open too, and is no other program.
        assert_eq!(writer(is_file), None);
        let info = "pos:\t0\nflags:\t0100002\nmnt_id:\t5\n";
        assert!(writes(info) && !writes(&info.replace("100002", "100000")) && !writes(""));
    }

    #[test]
    fn a_device_is_claimed_only_while_nothing_writes_to_it() {
        let Some(device) = vdkit_testkit::fs::loop_device(4 << 20, 512) else { return };
        let path = device.path();
        let stdin = Stdio::from(File::options().write(true).open(path).unwrap());
        let mut child = Command::new("sleep").arg("60").stdin(stdin).spawn().unwrap();
        let found = refusal(claim(path));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(found.contains(&format!("in use by process {} (", child.id())), "{found}");
        let claimed = claim(path).unwrap();
        assert!(refusal(check_unused(path)).contains("in use by process"));
        // What is claimed can be emptied, also by a program that opens it exclusively.
        if let Some(blkdiscard) = find("blkdiscard") {
            Line::new(blkdiscard).arg(path).run(&CancelToken::default()).unwrap();
        }
        crate::layout::clear_ends(&claimed, 4 << 20).unwrap();
        drop(claimed);
        check_unused(path).unwrap();
    }
}
