//! Verifies a result by reading it back.

use std::ops::Range;

use vdkit_block::{Error, GuestOffset, Monitor, Result};
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
    work_off(Chunks::new(source, target)?, Some(threads), monitor, |chunk, buffers| {
        verify_chunk(source, target, &chunk, buffers)?;
        monitor.progress.update(chunk.end, bytes);
        Ok(chunk.end - chunk.start)
    })?;
    Ok(bytes)
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
    type Piece = Range<u64>;

    fn next_piece(&mut self) -> Result<Option<Range<u64>>> {
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
            return Ok(Some(at..self.at));
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
