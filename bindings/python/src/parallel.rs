//! Long reads of compressed images, by several threads.

use std::sync::LazyLock;
use std::thread::{Builder, ScopedJoinHandle, scope};

use vdkit::{Disk, DiskPlace, Error, GuestOffset, IoAction, Result, jobs};

/// What a thread reads at least: to start one takes as long as to decompress a fraction of this. Most
/// clusters are as long, and lie in one share then.
const SHARE: usize = 64 << 10;

/// Asked once: the answer comes from files of the system, and takes longer than a read.
static THREADS: LazyLock<usize> = LazyLock::new(jobs::default_threads);

/// Reads; what is compressed, on as many threads as there are processors.
pub(crate) fn read(disk: &Disk, buf: &mut [u8], offset: u64) -> Result<()> {
    let shares = buf.len() / SHARE;
    let threads = if shares < 2 { 1 } else { shares.min(*THREADS) };
    if threads < 2 || !begins_compressed(disk, offset, buf.len())? {
        return disk.read_at(buf, GuestOffset(offset));
    }
    let share = buf.len().div_ceil(threads).next_multiple_of(SHARE);
    // The first share ends where others begin: at a multiple of SHARE.
    let first = share - (offset % SHARE as u64) as usize;
    scope(|scope| {
        let (first, mut rest) = buf.split_at_mut(first.min(buf.len()));
        let mut at = offset + first.len() as u64;
        let mut others = Vec::new();
        while !rest.is_empty() {
            let (piece, behind) = rest.split_at_mut(share.min(rest.len()));
            let from = GuestOffset(at);
            at += piece.len() as u64;
            rest = behind;
            let other = Builder::new().spawn_scoped(scope, move || disk.read_at(piece, from));
            others.push(other.map_err(|source| {
                let file = disk.name().to_owned();
                Error::File { file, action: IoAction::Read, source }
            })?);
        }
        let done = disk.read_at(first, GuestOffset(offset));
        others.into_iter().map(join).fold(done, Result::and)
    })
}

/// A panic of the thread becomes one of the caller.
fn join(thread: ScopedJoinHandle<'_, Result<()>>) -> Result<()> {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Whether the first data of a range is compressed: then most of it is.
fn begins_compressed(disk: &Disk, offset: u64, len: usize) -> Result<bool> {
    for extent in disk.extents(GuestOffset(offset), len as u64)?.take(2) {
        match extent?.place {
            DiskPlace::Compressed { .. } => return Ok(true),
            DiskPlace::Data { .. } => return Ok(false),
            DiskPlace::Zero { .. } | DiskPlace::Hole => {}
        }
    }
    Ok(false)
}
