//! Verifies a result by reading it back.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use vdkit_block::{Error, GuestOffset, Monitor, Progress, Result};
use vdkit_chain::Disk;

use crate::compare::Side;
use crate::crew::{Plan, work_off};
use crate::source::Source;

const CHUNK_BYTES: u64 = 1 << 20;

/// Reads and compares both, except where both are holes by their maps and files (the target's are
/// read anew).
///
/// # Errors
/// [`Error::Corrupt`] at the first chunk that differs.
pub fn verify(
    source: &Source,
    target: &Disk,
    threads: usize,
    monitor: &Monitor<'_>,
) -> Result<u64> {
    let bytes = source.bytes();
    let verified = AtomicU64::new(0);
    work_off(Chunks::new(source, target)?, Some(threads), monitor, |chunk, buffers| {
        let Chunk { holes, data } = chunk;
        verify_chunk(source, target, &data, buffers)?;
        // A count: chunks are finished in any order.
        let len = data.end - data.start;
        let before = verified.fetch_add(holes + len, Ordering::Relaxed);
        monitor.progress.update(before + holes + len, bytes);
        Ok(len)
    })?;
    // Holes at the end are in front of no chunk.
    monitor.progress.update(bytes, bytes);
    Ok(bytes)
}

/// Progress of one phase of a job that reports all its phases as one count.
pub(crate) struct Phase<'a> {
    pub(crate) inner: &'a dyn Progress,
    /// Bytes of the phases before this one.
    pub(crate) before: u64,
    /// Bytes of the phases that follow.
    pub(crate) after: u64,
}

impl Progress for Phase<'_> {
    fn update(&self, done: u64, total: u64) {
        self.inner.update(self.before + done, self.before + total + self.after);
    }

    fn message(&self, text: &str) {
        self.inner.message(text);
    }

    fn unreadable(&self, offset: u64, error: &Error) {
        self.inner.unreadable(offset, error);
    }
}

/// A part of the disk to read, and how many bytes of holes are skipped in front of it.
struct Chunk {
    holes: u64,
    data: Range<u64>,
}

/// The parts of the disk to read, in order.
struct Chunks<'a> {
    target: Side<'a>,
    /// The source's pieces, each with its start offset.
    pieces: Vec<(u64, Side<'a>)>,
    at: u64,
    bytes: u64,
}

impl<'a> Chunks<'a> {
    fn new(source: &'a Source, target: &'a Disk) -> Result<Self> {
        let pieces = source.pieces().map(|(start, disk)| Ok((start, Side::new(disk)?)));
        let pieces = pieces.collect::<Result<_>>()?;
        Ok(Self { target: Side::new(target)?, pieces, at: 0, bytes: source.bytes() })
    }
}

impl Plan for Chunks<'_> {
    type Piece = Chunk;

    fn next_piece(&mut self) -> Result<Option<Chunk>> {
        let from = self.at;
        while self.at < self.bytes {
            let at = self.at;
            let piece = self.pieces.partition_point(|(start, _)| *start <= at) - 1;
            let end = self.pieces.get(piece + 1).map_or(self.bytes, |(start, _)| *start);
            let (start, source) = &mut self.pieces[piece];
            let wanted = source.run_at(at - *start, end - *start)?;
            let found = self.target.run_at(at, self.bytes)?;
            if wanted.is_zero() && found.is_zero() {
                self.at += wanted.len.min(found.len);
                continue;
            }
            self.at = ((at / CHUNK_BYTES + 1) * CHUNK_BYTES).min(self.bytes);
            return Ok(Some(Chunk { holes: at - from, data: at..self.at }));
        }
        Ok(None)
    }
}

fn verify_chunk(
    source: &Source,
    target: &Disk,
    chunk: &Range<u64>,
    (want, got): &mut (Vec<u8>, Vec<u8>),
) -> Result<()> {
    let (at, len) = (chunk.start, (chunk.end - chunk.start) as usize);
    want.resize(len, 0);
    got.resize(len, 0);
    source.read_at(want, at)?;
    target.read_at(got, GuestOffset(at))?;
    match want.iter().zip(&*got).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(differs) => Err(Error::corrupt(
            target.name(),
            at + differs as u64,
            "guest byte",
            format!("{:#04x}", got[differs]),
            format!("{:#04x}, as in the source", want[differs]),
        )),
    }
}
