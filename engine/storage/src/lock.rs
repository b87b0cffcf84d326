//! QEMU's image locks, which exclude incompatible uses of an image.
//!
//! Each opener has permissions that it *uses* and permissions that it *shares* with others. A
//! permission is a byte of the file: the opener holds a shared lock on byte 100 + p for each
//! permission p that it uses, and on byte 200 + p for each that it does not share. Shared locks
//! never collide, so taking them always succeeds. Conflicts are found by *testing* whether an
//! exclusive lock is possible on 200 + p (does anyone deny what we use?) and on 100 + p (does
//! anyone use what we deny?). Locks are taken before the test: two simultaneous openers see each
//! other, and at worst both are refused.
//!
//! | byte | permission | reader | writer |
//! |---|---|---|---|
//! | 0 | consistent read | uses, shares | uses, shares |
//! | 1 | write | denies | uses, denies |
//! | 2 | write unchanged | shares | shares |
//! | 3 | resize | denies | uses, denies |
//!
//! QEMU takes the same locks on the file of a qcow2 image. They are OFD locks: they belong to the
//! open file and end with it, also when the process is killed.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use vdkit_block::{Error, IoAction, LockHolder, OwnerProcess, Result, plain};

use crate::sys::{self, Conflict, OfdLock};

/// Byte of the first used permission.
const USED_BASE: u64 = 100;
/// Byte of the first denied permission.
const DENIED_BASE: u64 = 200;

const CONSISTENT_READ: u64 = 0;
const WRITE: u64 = 1;
const RESIZE: u64 = 3;

/// Characters of a command line in a message.
const COMMAND_CHARS_MAX: usize = 80;

/// Whether to lock an image against incompatible uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LockMode {
    /// Readers exclude writers, a writer excludes everyone; as in QEMU.
    #[default]
    Auto,
    /// No locks, for inspecting an image that a guest is using. The image may change meanwhile.
    Off,
}

/// Permissions that a reader uses.
const READER: &[u64] = &[CONSISTENT_READ];
/// Permissions that a writer uses.
const WRITER: &[u64] = &[CONSISTENT_READ, WRITE, RESIZE];
/// Permissions that both deny to others.
const DENIED: &[u64] = &[WRITE, RESIZE];

/// The locks of one open file.
#[derive(Debug)]
pub struct ImageLock {
    used: &'static [u64],
    denied: &'static [u64],
    /// The process that took them. A child shares them by the descriptors that it inherits.
    owner: OwnerProcess,
}

impl ImageLock {
    /// Takes a reader's or a writer's locks.
    pub fn take(name: &str, file: &File, writable: bool) -> Result<Self> {
        let lock = Self { used: if writable { WRITER } else { READER }, ..Self::of_writer() };
        let taken = lock.take_and_test(name, file).inspect_err(|_| lock.release(file));
        taken.map(|()| lock)
    }

    /// Fails as [`ImageLock::take`] for a reader would, but takes no locks: whoever opens the image
    /// meanwhile is not refused because of this question.
    pub fn ask_as_reader(name: &str, file: &File) -> Result<()> {
        let reader = Self { used: READER, ..Self::of_writer() };
        reader.explain(name, file, reader.test(file))
    }

    /// Takes a writer's locks without testing for conflicts: for a file that this process holds
    /// locked as a writer through another descriptor, which the test would report.
    pub fn take_beside(name: &str, file: &File) -> Result<Self> {
        let lock = Self::of_writer();
        lock.set(file, OfdLock::Shared).map_err(|source| {
            lock.release(file);
            Error::file_io(name, IoAction::Lock, source)
        })?;
        Ok(lock)
    }

    /// Upgrades a reader's locks to a writer's; on failure they are unchanged. No other process can
    /// become a writer meanwhile, since the reader's locks stay.
    pub fn become_writer(&mut self, name: &str, file: &File) -> Result<()> {
        let writer = Self::of_writer();
        writer.take_and_test(name, file).inspect_err(|_| {
            // Report the first error.
            let _ = self.become_reader(name, file);
        })?;
        *self = writer;
        Ok(())
    }

    /// Downgrades a writer's locks to a reader's.
    pub fn become_reader(&mut self, name: &str, file: &File) -> Result<()> {
        for permission in WRITER.iter().filter(|p| !READER.contains(p)) {
            sys::ofd_set(file.as_fd(), OfdLock::None, USED_BASE + permission, 1)
                .map_err(|source| Error::file_io(name, IoAction::Lock, source))?;
        }
        self.used = READER;
        Ok(())
    }

    fn take_and_test(&self, name: &str, file: &File) -> Result<()> {
        let found = self.set(file, OfdLock::Shared).and_then(|()| self.test(file));
        self.explain(name, file, found)
    }

    /// What [`ImageLock::test`] found, as an error.
    fn explain(
        &self,
        name: &str,
        file: &File,
        found: io::Result<Option<(u64, Conflict)>>,
    ) -> Result<()> {
        let error = match found {
            Ok(None) => return Ok(()),
            Ok(Some((byte, conflict))) => {
                let (file_name, holder) = (name.to_owned(), find_holder(file, byte, conflict));
                Error::Locked { file: file_name, holder, writing: self.used.contains(&WRITE) }
            }
            Err(source) if matches!(source.raw_os_error(), Some(libc::ENOLCK | libc::ENOSYS)) => {
                Error::file_io(
                    name,
                    IoAction::Lock,
                    io::Error::new(
                        source.kind(),
                        format!("{} (its file system may have no locks)", plain(&source)),
                    ),
                )
            }
            Err(source) => Error::file_io(name, IoAction::Lock, source),
        };
        Err(error)
    }

    fn of_writer() -> Self {
        Self { used: WRITER, denied: DENIED, owner: OwnerProcess::current() }
    }

    /// Releases the locks, but not from a child that inherited them: its parent still relies on them.
    pub fn release(&self, file: &File) {
        if !self.owner.is_current() {
            return;
        }
        // Unlocking fails only if the file is gone, and its locks with it.
        let _ = self.set(file, OfdLock::None);
    }

    fn set(&self, file: &File, lock: OfdLock) -> io::Result<()> {
        for byte in self.bytes() {
            sys::ofd_set(file.as_fd(), lock, byte, 1)?;
        }
        Ok(())
    }

    fn bytes(&self) -> impl Iterator<Item = u64> {
        let used = self.used.iter().map(|p| USED_BASE + p);
        used.chain(self.denied.iter().map(|p| DENIED_BASE + p))
    }

    /// The first byte with a conflict.
    fn test(&self, file: &File) -> io::Result<Option<(u64, Conflict)>> {
        let denied_by_others = self.used.iter().map(|p| DENIED_BASE + p);
        let used_by_others = self.denied.iter().map(|p| USED_BASE + p);
        for byte in denied_by_others.chain(used_by_others) {
            if let Some(conflict) = sys::ofd_test(file.as_fd(), byte, 1)? {
                return Ok(Some((byte, conflict)));
            }
        }
        Ok(None)
    }
}

/// The process that holds a lock on a byte of this file, as far as /proc shows it.
fn find_holder(file: &File, byte: u64, conflict: Conflict) -> Option<LockHolder> {
    let pid = match conflict.pid {
        Some(pid) => pid,
        None => search_processes(file, byte)?,
    };
    Some(LockHolder { pid, command: command_of(pid) })
}

/// The kernel does not report the owner of an OFD lock, but each process lists the locks of its
/// open files.
fn search_processes(file: &File, byte: u64) -> Option<u32> {
    let ours = rustix::fs::fstat(file).ok()?;
    let own_pid = std::process::id();
    for process in std::fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(infos) = std::fs::read_dir(process.path().join("fdinfo")) else { continue };
        for info in infos.flatten() {
            if pid == own_pid && info.file_name().to_str() == Some(&file.as_raw_fd().to_string()) {
                continue;
            }
            // Compare the descriptor's file, not the device in the lock's line: on btrfs the two
            // differ.
            let descriptor = process.path().join("fd").join(info.file_name());
            let same = rustix::fs::stat(&descriptor)
                .is_ok_and(|s| (s.st_dev, s.st_ino) == (ours.st_dev, ours.st_ino));
            if same && holds(&info.path(), byte) {
                return Some(pid);
            }
        }
    }
    None
}

/// Whether a fdinfo file lists a lock on a byte.
fn holds(fdinfo: &Path, byte: u64) -> bool {
    std::fs::read_to_string(fdinfo).is_ok_and(|text| text.lines().any(|l| covers(l, byte)))
}

/// Whether a line such as `lock: 1: OFDLCK ADVISORY  READ -1 fe:00:1234 100 101` covers a byte.
fn covers(line: &str, byte: u64) -> bool {
    let Some(lock) = line.strip_prefix("lock:") else { return false };
    let mut fields = lock.split_whitespace().rev();
    let (Some(last), Some(first)) = (fields.next(), fields.next()) else { return false };
    let last = if last == "EOF" { Some(u64::MAX) } else { last.parse().ok() };
    matches!((first.parse::<u64>(), last), (Ok(first), Some(last)) if (first..=last).contains(&byte))
}

/// A process's command line on one line, shortened.
fn command_of(pid: u32) -> String {
    let raw = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let text = String::from_utf8_lossy(&raw);
    let mut command = String::new();
    for (count, c) in text.trim_end_matches('\0').chars().enumerate() {
        if count == COMMAND_CHARS_MAX {
            command.push('…');
            break;
        }
        // A process chooses its own command line: remove control characters.
        command.push(if c == '\0' || c.is_control() { ' ' } else { c });
    }
    if command.is_empty() {
        // Kernel threads and exiting processes have no command line.
        command = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        command.truncate(command.trim_end().len());
    }
    command
}
