//! Raw deflate with a window of 4 KiB, for the units of qcow2 and other formats with small windows.
//!
//! QEMU inflates compressed clusters with a 4 KiB window, so distances never exceed 4095 here. A
//! window of 4 KiB at this speed exists nowhere else: libdeflate and ISA-L know only 32 KiB, and
//! zlib-rs is slower for the same size. Tables for so small a window fit into the L1 cache.
//!
//! ```text
//!   unit ──► matcher ──► sequences + a histogram per piece ──► splitter ──► blocks ──► bits
//!            (hash chains)        (a piece: 4 KiB of input)   (neighbors that compress
//!                                                             alike become one block)
//! ```
//!
//! Source: RFC 1951.

mod bits;
mod block;
mod huffman;
mod matcher;

use block::{BlockWriter, Piece};
use matcher::{Matcher, RING, Sequence};

/// Input bytes per histogram.
const PIECE: usize = 4 << 10;

/// The levels of [`Deflater::new`]. 1 and 2 examine fewer candidates; 4 and above also try a longer
/// match at the next byte. Levels above 4 gain nothing in so small a window.
pub const LEVELS: std::ops::RangeInclusive<i32> = 1..=9;
/// The default level.
pub const DEFAULT_LEVEL: i32 = 3;

/// A reusable encoder; its tables (about 300 KiB) are allocated once.
#[derive(Debug)]
pub struct Deflater {
    matcher: Matcher,
    sequences: Vec<Sequence>,
    pieces: Vec<Piece>,
    writer: BlockWriter,
}

impl Deflater {
    /// An encoder of one of the [`LEVELS`]; other values are clamped.
    pub fn new(level: i32) -> Self {
        let level = level.clamp(*LEVELS.start(), *LEVELS.end());
        Self {
            matcher: Matcher::new(level),
            sequences: Vec::with_capacity(RING / 4),
            pieces: Vec::with_capacity(RING / PIECE + 1),
            writer: BlockWriter::default(),
        }
    }

    /// Appends `unit` as one complete deflate stream to `out` and returns its bytes. Returns `None`
    /// and leaves `out` unchanged if the stream would not be smaller than `unit`.
    pub fn compress(&mut self, unit: &[u8], out: &mut Vec<u8>) -> Option<usize> {
        let start = out.len();
        let limit = start + unit.len();
        self.matcher.reset();
        self.writer.begin();
        // Longer units are split into segments. So memory does not grow with the cluster size, and
        // the window behind a segment is still in the ring.
        let segment_bytes = if unit.len() <= RING { RING } else { RING / 2 };
        let mut at = 0;
        while at < unit.len() {
            let segment = at..unit.len().min(at + segment_bytes);
            at = segment.end;
            let last = at == unit.len();
            let (sequences, pieces) = (&mut self.sequences, &mut self.pieces);
            sequences.clear();
            self.matcher.scan(unit, segment.clone(), PIECE, sequences, pieces);
            self.writer.write_segment(&unit[segment], sequences, pieces, last, out);
            if out.len() >= limit {
                break;
            }
        }
        self.writer.finish(out);
        if unit.is_empty() || out.len() >= limit {
            out.truncate(start);
            return None;
        }
        Some(out.len() - start)
    }
}

/// Appends `unit` as a deflate stream of stored blocks (RFC 1951, 3.2.4), which is longer than the
/// unit.
pub fn store(unit: &[u8], out: &mut Vec<u8>) {
    let mut rest = unit;
    loop {
        let (block, behind) = rest.split_at(rest.len().min(usize::from(u16::MAX)));
        let len = block.len() as u16;
        out.push(u8::from(behind.is_empty()));
        out.extend(len.to_le_bytes());
        out.extend((!len).to_le_bytes());
        out.extend(block);
        rest = behind;
        if rest.is_empty() {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
