//! A program whose changes of one file are recorded, with syncs that take a while.
//!
//! The program runs under a supervisor ([`vdkit_supervisor`]), which does the program's writes to
//! the file itself, one after the other, and answers its syncs after a given time. So the record's
//! order is the order in which the changes were applied, and what was durable at a moment is known:
//! see [`crate::crash`]. A sync covers the changes that were answered before the call came in. Reads
//! go to the file as always.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use vdkit_block::{HostOffset, Storage, StorageExt};
use vdkit_storage::MemoryStorage;
use vdkit_supervisor::{Call, Filter, Listener, Ready, SYNC_FLAGS, spawn};

use crate::crash::{CrashStorage, Step};

/// Bytes that are compared, or skipped if they are zero, at a time.
const PIECE_BYTES: usize = 64 << 10;

/// A program under supervision; killed when this is dropped.
#[derive(Debug)]
pub struct Recorded {
    /// The program.
    pub child: Child,
    /// What it did to the file.
    pub record: Arc<CrashStorage>,
    path: PathBuf,
    supervisor: Option<JoinHandle<io::Result<()>>>,
}

impl Recorded {
    /// Starts a program that will open this file, whose syncs and durable writes take so long. What
    /// the file holds now is durable.
    ///
    /// # Errors
    /// If the file cannot be read, or the program cannot be started.
    pub fn spawn(command: Command, path: &Path, sync_takes: Duration) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(path)?;
        let record = CrashStorage::holding(&contents(&file)?);
        // Sharing blocks and io_uring would go unseen; programs do without. A mapping that can be
        // written is refused below.
        let filter = Filter::new()
            .pass(libc::SYS_fsync)
            .pass(libc::SYS_fdatasync)
            .pass(libc::SYS_pwrite64)
            .pass(libc::SYS_pwritev)
            .pass(libc::SYS_pwritev2)
            .pass(libc::SYS_ftruncate)
            .pass(libc::SYS_fallocate)
            .pass_if(libc::SYS_mmap, 3, libc::MAP_SHARED as u32)
            .refuse(libc::SYS_copy_file_range, libc::EOPNOTSUPP)
            .refuse(libc::SYS_io_uring_setup, libc::ENOSYS)
            .refuse(libc::SYS_io_setup, libc::ENOSYS);
        let (child, listener) = spawn(command, &filter)?;
        let metadata = file.metadata()?;
        let supervisor = Supervisor {
            listener,
            identity: (metadata.dev(), metadata.ino()),
            file,
            sync_takes,
            record: record.clone(),
            came: VecDeque::new(),
            applied: Vec::new(),
            under_way: VecDeque::new(),
        };
        let supervisor = std::thread::Builder::new()
            .name("supervisor".to_owned())
            .spawn(move || supervisor.run())?;
        Ok(Self { child, record, path: path.to_owned(), supervisor: Some(supervisor) })
    }

    /// Waits for the program's end, and compares the record with the file: all that was changed
    /// was seen. Gives the record and the exit code.
    ///
    /// # Panics
    /// If the supervisor failed, or the file holds something else.
    pub fn end(mut self) -> (Arc<CrashStorage>, Option<i32>) {
        let status = self.child.wait().expect("the program");
        let supervisor = self.supervisor.take().expect("a supervisor");
        supervisor.join().expect("the supervisor's thread").expect("the supervisor");
        let file = File::open(&self.path).expect("the file");
        let len = file.metadata().expect("its length").len();
        assert_eq!(self.record.len().expect("memory"), len, "a length that nobody saw");
        let (mut live, mut recorded) = (vec![0; PIECE_BYTES], vec![0; PIECE_BYTES]);
        for at in (0..len).step_by(PIECE_BYTES) {
            let n = PIECE_BYTES.min((len - at) as usize);
            file.read_exact_at(&mut live[..n], at).expect("a read");
            self.record.read_padded(&mut recorded[..n], HostOffset(at)).expect("memory");
            if let Some(first) = (0..n).find(|i| live[*i] != recorded[*i]) {
                let at = at + first as u64;
                let (is, seen) = (live[first], recorded[first]);
                panic!("byte {at} is {is:#x} and was seen as {seen:#x}: a change went unseen");
            }
        }
        (self.record.clone(), status.code())
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(supervisor) = self.supervisor.take() {
            let _ = supervisor.join();
        }
    }
}

/// A file's bytes, in memory.
fn contents(file: &File) -> io::Result<MemoryStorage> {
    let len = file.metadata()?.len();
    let memory = MemoryStorage::with_len("before", len);
    let mut piece = vec![0; PIECE_BYTES];
    for at in (0..len).step_by(PIECE_BYTES) {
        let n = PIECE_BYTES.min((len - at) as usize);
        file.read_exact_at(&mut piece[..n], at)?;
        if piece[..n].iter().any(|byte| *byte != 0) {
            memory.write_at(&piece[..n], HostOffset(at)).map_err(io::Error::other)?;
        }
    }
    Ok(memory)
}

/// What ends after a while.
enum Ending {
    Sync(u64),
    DurableWrite { change: u64, bytes: i64 },
}

struct Supervisor {
    listener: Listener,
    file: File,
    /// Device and inode of the file.
    identity: (u64, u64),
    sync_takes: Duration,
    record: Arc<CrashStorage>,
    /// Changes that came in and are not applied yet.
    came: VecDeque<Call>,
    /// Changes that are applied and not answered yet: the call, the change, and what it returns.
    applied: Vec<(u64, u64, i64)>,
    /// Syncs and durable writes; all take equally long, so the first is due first.
    under_way: VecDeque<(Instant, u64, Ending)>,
}

impl Supervisor {
    fn run(mut self) -> io::Result<()> {
        // Otherwise timers ring up to 50 µs late.
        rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1))?;
        loop {
            if !self.take_all()? {
                return Ok(());
            }
            // Syncs that came in before these answers have begun by now, and do not cover them.
            for (call, change, value) in std::mem::take(&mut self.applied) {
                self.record.end(change);
                self.listener.answer(call, Ok(value))?;
            }
            self.end_what_is_due()?;
            while let Some(call) = self.came.pop_front() {
                self.change(&call)?;
            }
        }
    }

    /// Takes in every call that waits; where there is nothing to do, waits for one. Whether
    /// somebody is left who could call.
    fn take_all(&mut self) -> io::Result<bool> {
        let mut timeout = if self.applied.is_empty() {
            let due = self.under_way.front().map(|(due, ..)| *due);
            due.map(|due| due.saturating_duration_since(Instant::now()))
        } else {
            Some(Duration::ZERO)
        };
        loop {
            match self.listener.wait(timeout)? {
                Ready::Ended => return Ok(false),
                Ready::TimedOut => return Ok(true),
                Ready::Call => {}
            }
            if let Some(call) = self.listener.receive()? {
                self.take(call)?;
            }
            timeout = Some(Duration::ZERO);
        }
    }

    fn take(&mut self, call: Call) -> io::Result<()> {
        let descriptor = if call.number == libc::SYS_mmap { 4 } else { 0 };
        if !self.is_the_file(&call, call.arguments[descriptor] as i32) {
            return self.listener.proceed(call.id);
        }
        match call.number {
            libc::SYS_fsync | libc::SYS_fdatasync => {
                let sync = self.record.begin_sync();
                self.end_later(call.id, Ending::Sync(sync));
                Ok(())
            }
            libc::SYS_mmap if call.arguments[2] & libc::PROT_WRITE as u64 != 0 => {
                self.listener.answer(call.id, Err(Errno::ACCESS))
            }
            libc::SYS_mmap => self.listener.proceed(call.id),
            _ => {
                self.came.push_back(call);
                Ok(())
            }
        }
    }

    fn is_the_file(&self, call: &Call, descriptor: i32) -> bool {
        let link = format!("/proc/{}/fd/{descriptor}", call.thread);
        std::fs::metadata(link).is_ok_and(|found| (found.dev(), found.ino()) == self.identity)
    }

    fn end_later(&mut self, call: u64, ending: Ending) {
        self.under_way.push_back((Instant::now() + self.sync_takes, call, ending));
    }

    fn end_what_is_due(&mut self) -> io::Result<()> {
        let now = Instant::now();
        while let Some((_, call, ending)) = self.under_way.pop_front_if(|(due, ..)| *due <= now) {
            let value = match ending {
                Ending::Sync(sync) => {
                    self.record.end_sync(sync);
                    0
                }
                Ending::DurableWrite { change, bytes } => {
                    self.record.end_durably(change);
                    bytes
                }
            };
            self.listener.answer(call, Ok(value))?;
        }
        Ok(())
    }

    /// Applies a change and records it; its answer comes later.
    fn change(&mut self, call: &Call) -> io::Result<()> {
        match self.apply(call) {
            Ok((change, value)) => self.applied.push((call.id, change, value)),
            Err(Fate::Later(ending)) => self.end_later(call.id, ending),
            Err(Fate::Failed(errno)) => self.listener.answer(call.id, Err(errno))?,
        }
        Ok(())
    }

    fn apply(&self, call: &Call) -> Result<(u64, i64), Fate> {
        let [_, first, second, third, ..] = call.arguments;
        match call.number {
            libc::SYS_pwrite64 => self.write(third, &bytes_of(call, &[(first, second)])?, false),
            libc::SYS_pwritev | libc::SYS_pwritev2 => {
                let flags = if call.number == libc::SYS_pwritev { 0 } else { call.arguments[5] };
                if flags & !u64::from(SYNC_FLAGS) != 0 {
                    return Err(Fate::Failed(Errno::OPNOTSUPP));
                }
                let bytes = bytes_of(call, &pieces_of(call, first, second)?)?;
                self.write(third, &bytes, flags != 0)
            }
            libc::SYS_ftruncate => {
                rustix::fs::ftruncate(&self.file, first)?;
                Ok((self.record.begin(Step::SetLen(first)), 0))
            }
            libc::SYS_fallocate => self.allocate(first as u32, second, third),
            _ => Err(Fate::Failed(Errno::NOSYS)),
        }
    }

    fn write(&self, at: u64, bytes: &[u8], durable: bool) -> Result<(u64, i64), Fate> {
        self.file.write_all_at(bytes, at)?;
        let count = bytes.len() as i64;
        if durable {
            let change = self.record.begin(Step::WriteDurably { at, bytes });
            return Err(Fate::Later(Ending::DurableWrite { change, bytes: count }));
        }
        Ok((self.record.begin(Step::Write { at, bytes }), count))
    }

    fn allocate(&self, mode: u32, at: u64, len: u64) -> Result<(u64, i64), Fate> {
        let mode = FallocateFlags::from_bits_retain(mode);
        let zeroes = FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE;
        if !(zeroes | FallocateFlags::KEEP_SIZE).contains(mode) {
            return Err(Fate::Failed(Errno::OPNOTSUPP));
        }
        rustix::fs::fallocate(&self.file, mode, at, len)?;
        if mode.intersects(zeroes) {
            let change = self.record.begin(Step::Zero { at, len });
            if mode.contains(FallocateFlags::KEEP_SIZE) {
                return Ok((change, 0));
            }
            self.record.end(change);
        } else if mode.contains(FallocateFlags::KEEP_SIZE) {
            return Ok((self.record.begin(Step::Zero { at, len: 0 }), 0));
        }
        Ok((self.record.begin(Step::Grow(at + len)), 0))
    }
}

/// What becomes of a call that is not answered in the next turn.
enum Fate {
    Later(Ending),
    Failed(Errno),
}

impl From<Errno> for Fate {
    fn from(errno: Errno) -> Self {
        Self::Failed(errno)
    }
}

impl From<io::Error> for Fate {
    fn from(error: io::Error) -> Self {
        Self::Failed(Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }
}

/// Address and length of each buffer of a `pwritev`.
fn pieces_of(call: &Call, at: u64, count: u64) -> io::Result<Vec<(u64, u64)>> {
    let table = bytes_of(call, &[(at, count * 16)])?;
    let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
    Ok(table.chunks_exact(16).map(|piece| (word(&piece[..8]), word(&piece[8..]))).collect())
}

/// Bytes of the program's memory.
fn bytes_of(call: &Call, pieces: &[(u64, u64)]) -> io::Result<Vec<u8>> {
    let memory = File::open(format!("/proc/{}/mem", call.thread))?;
    let mut bytes = Vec::new();
    for (at, len) in pieces {
        let start = bytes.len();
        bytes.resize(start + *len as usize, 0);
        memory.read_exact_at(&mut bytes[start..], *at)?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_program_does_is_recorded_and_durable_when_it_says() {
        if !crate::require_peer("qemu-io") {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.raw");
        std::fs::write(&path, vec![1; 1 << 20]).unwrap();
        let mut command = Command::new("qemu-io");
        command.args(["-f", "raw", "-t", "writeback"]).arg(&path);
        for step in ["write -P 2 4k 4k", "flush", "write -P 3 8k 4k", "write -z 64k 4k"] {
            command.args(["-c", step]);
        }
        let run = Recorded::spawn(command, &path, Duration::from_millis(1)).unwrap();
        let (record, code) = run.end();
        assert_eq!(code, Some(0));
        // Whatever was durable first, the second write was not there before the first one.
        let mut seen = Vec::new();
        for moment in 0..=record.moment() {
            let mut bytes = vec![0; 12 << 10];
            let durable = record.crash_at_moment(moment).only_durable();
            durable.read_padded(&mut bytes, HostOffset(0)).unwrap();
            seen.push((bytes[4096], bytes[8192]));
        }
        seen.dedup();
        assert_eq!(seen, [(1, 1), (2, 1), (2, 3)]);
    }
}
