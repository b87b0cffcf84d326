//! What arrives for one request: checked, and put where the caller wants it.

use vdkit_block::bytes::{be16, be32, be64};

use crate::failure::{Broken, Failure, message_of};
use crate::wire::{STRING_MAX, chunk};

/// Maximum bytes of a chunk that reports an error: number, length, message, offset.
const ERROR_BYTES_MAX: u32 = 4 + 2 + STRING_MAX as u32 + 8;
/// Maximum bytes of a chunk of block status: as many runs as QEMU and libnbd take.
const STATUS_BYTES_MAX: u32 = 4 + 8 * (128 << 10);
/// Maximum separate pieces of a reply to a read at any time.
const PIECES_MAX: usize = 4096;
/// Maximum chunks that bring no data, of one reply.
const EMPTY_CHUNKS_MAX: u32 = 1024;

/// A run of block status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StatusRun {
    /// Bytes; never 0.
    pub bytes: u64,
    /// Flags; their meaning depends on the metadata context.
    pub flags: u32,
}

/// What the caller of a request expects.
#[derive(Debug)]
pub(crate) enum Expected<'a> {
    /// Success or an error.
    Nothing,
    /// Bytes of the export.
    Bytes(&'a mut [u8]),
    /// Runs of the metadata context with this id. Those of others are dropped.
    Status(u32, &'a mut Vec<StatusRun>),
}

impl Expected<'_> {
    /// The same for another attempt.
    pub(crate) fn again(&mut self) -> Expected<'_> {
        match self {
            Self::Nothing => Expected::Nothing,
            Self::Bytes(bytes) => Expected::Bytes(bytes),
            Self::Status(id, runs) => Expected::Status(*id, runs),
        }
    }
}

/// A reply's or chunk's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Head {
    /// A simple reply.
    Simple {
        /// Error number; 0 for success.
        error: u32,
        /// The request's cookie.
        cookie: u64,
    },
    /// A chunk.
    Chunk {
        /// Flags of the chunk.
        flags: u16,
        /// Type of the chunk.
        kind: u16,
        /// The request's cookie.
        cookie: u64,
        /// Bytes of the payload.
        len: u32,
    },
}

impl Head {
    /// The request's cookie.
    pub(crate) fn cookie(&self) -> u64 {
        match self {
            Self::Simple { cookie, .. } | Self::Chunk { cookie, .. } => *cookie,
        }
    }
}

/// The received bytes of a connection.
pub(crate) trait Source {
    /// Fills `buf`.
    fn fill(&mut self, buf: &mut [u8]) -> Result<(), Broken>;
}

/// Which bytes of a read have arrived.
#[derive(Debug, Default)]
struct Arrived {
    /// Disjoint ranges in ascending order that do not touch.
    pieces: Vec<(u32, u32)>,
}

impl Arrived {
    /// Adds a range; `false` if a byte of it is there already, or there are too many pieces.
    fn add(&mut self, start: u32, end: u32) -> bool {
        let at = self.pieces.partition_point(|piece| piece.0 < start);
        let before = at.checked_sub(1).map(|before| self.pieces[before]);
        let after = self.pieces.get(at).copied();
        if before.is_some_and(|piece| piece.1 > start) || after.is_some_and(|piece| piece.0 < end) {
            return false;
        }
        let joins_before = before.is_some_and(|piece| piece.1 == start);
        let joins_after = after.is_some_and(|piece| piece.0 == end);
        match (joins_before, joins_after) {
            (true, true) => {
                self.pieces[at - 1].1 = self.pieces[at].1;
                self.pieces.remove(at);
            }
            (true, false) => self.pieces[at - 1].1 = end,
            (false, true) => self.pieces[at].0 = start,
            (false, false) => self.pieces.insert(at, (start, end)),
        }
        self.pieces.len() <= PIECES_MAX
    }

    fn is_all(&self, len: u32) -> bool {
        matches!(self.pieces[..], [(0, end)] if end == len)
    }
}

/// A reply that is being received.
#[derive(Debug)]
pub(crate) struct Reply<'a> {
    /// First byte of the request.
    offset: u64,
    /// Bytes of the request.
    len: u32,
    expected: Expected<'a>,
    /// Whether structured replies were agreed on.
    structured: bool,
    arrived: Arrived,
    failed: Option<Failure>,
    empty_chunks: u32,
}

impl<'a> Reply<'a> {
    pub(crate) fn new(offset: u64, len: u32, structured: bool, expected: Expected<'a>) -> Self {
        let (arrived, failed) = (Arrived::default(), None);
        Self { offset, len, expected, structured, arrived, failed, empty_chunks: 0 }
    }

    /// Receives what follows a header; whether the reply is complete.
    pub(crate) fn receive(&mut self, head: Head, source: &mut dyn Source) -> Result<bool, Broken> {
        match head {
            Head::Simple { error: 0, .. } => {
                match &mut self.expected {
                    Expected::Nothing => {}
                    Expected::Bytes(_) if self.structured => {
                        return Err(Broken::protocol("a simple reply to a read"));
                    }
                    Expected::Bytes(bytes) => source.fill(bytes)?,
                    Expected::Status(..) => {
                        return Err(Broken::protocol("a simple reply to block status"));
                    }
                }
                Ok(true)
            }
            Head::Simple { error, .. } => {
                self.fail(error, None);
                Ok(true)
            }
            Head::Chunk { .. } if !self.structured => {
                Err(Broken::protocol("a structured reply that was not agreed on"))
            }
            Head::Chunk { flags, kind, len, .. } => {
                self.chunk(kind, len, source)?;
                let done = flags & chunk::DONE != 0;
                if done && self.failed.is_none() {
                    self.check_complete()?;
                }
                Ok(done)
            }
        }
    }

    fn check_complete(&self) -> Result<(), Broken> {
        match &self.expected {
            Expected::Bytes(_) if !self.arrived.is_all(self.len) => {
                Err(Broken::protocol("a read's reply without all of its bytes"))
            }
            Expected::Status(_, runs) if runs.is_empty() => {
                Err(Broken::protocol("a reply to block status without any"))
            }
            _ => Ok(()),
        }
    }

    fn chunk(&mut self, kind: u16, len: u32, source: &mut dyn Source) -> Result<(), Broken> {
        match (kind, &mut self.expected) {
            (chunk::OFFSET_DATA, Expected::Bytes(_)) => self.data(len, source),
            (chunk::OFFSET_HOLE, Expected::Bytes(_)) => self.hole(len, source),
            (chunk::BLOCK_STATUS, Expected::Status(..)) => {
                self.count_empty()?;
                self.status(len, source)
            }
            (chunk::NONE, _) if len == 0 => self.count_empty(),
            (kind, _) if kind & chunk::ERROR_BIT != 0 => {
                self.count_empty()?;
                self.error(kind, len, source)
            }
            (kind, _) => Err(Broken::protocol(format!("a chunk of type {kind} with {len} bytes"))),
        }
    }

    /// Counts a chunk without data, so that no reply is endless.
    fn count_empty(&mut self) -> Result<(), Broken> {
        self.empty_chunks += 1;
        if self.empty_chunks > EMPTY_CHUNKS_MAX {
            return Err(Broken::protocol("an endless reply"));
        }
        Ok(())
    }

    /// The range within the request, and notes that it arrived.
    fn place(&mut self, offset: u64, len: u32) -> Result<std::ops::Range<usize>, Broken> {
        let wrong = || {
            Broken::protocol(format!(
                "{len} bytes at {offset:#x} for a read of {} bytes at {:#x}, or twice",
                self.len, self.offset
            ))
        };
        let start = offset.checked_sub(self.offset).and_then(|start| u32::try_from(start).ok());
        let range = start.and_then(|start| Some(start..start.checked_add(len)?));
        let range = range.filter(|range| len > 0 && range.end <= self.len).ok_or_else(wrong)?;
        if !self.arrived.add(range.start, range.end) {
            return Err(wrong());
        }
        Ok(range.start as usize..range.end as usize)
    }

    fn data(&mut self, len: u32, source: &mut dyn Source) -> Result<(), Broken> {
        let mut offset = [0; 8];
        let Some(bytes) = len.checked_sub(8).filter(|bytes| *bytes <= self.len) else {
            return Err(Broken::protocol(format!("{len} bytes of data for {}", self.len)));
        };
        source.fill(&mut offset)?;
        let range = self.place(be64(&offset, 0), bytes)?;
        match &mut self.expected {
            Expected::Bytes(buf) => source.fill(&mut buf[range]),
            _ => Ok(()),
        }
    }

    fn hole(&mut self, len: u32, source: &mut dyn Source) -> Result<(), Broken> {
        let mut hole = [0; 12];
        if len as usize != hole.len() {
            return Err(Broken::protocol(format!("a hole described by {len} bytes")));
        }
        source.fill(&mut hole)?;
        let range = self.place(be64(&hole, 0), be32(&hole, 8))?;
        if let Expected::Bytes(buf) = &mut self.expected {
            buf[range].fill(0);
        }
        Ok(())
    }

    fn status(&mut self, len: u32, source: &mut dyn Source) -> Result<(), Broken> {
        if len < 12 || !(len - 4).is_multiple_of(8) || len > STATUS_BYTES_MAX {
            return Err(Broken::protocol(format!("block status of {len} bytes")));
        }
        let mut bytes = vec![0; len as usize];
        source.fill(&mut bytes)?;
        let (id, runs) = bytes.split_at(4);
        let runs = runs
            .chunks_exact(8)
            .map(|run| StatusRun { bytes: be32(run, 0).into(), flags: be32(run, 4) });
        if runs.clone().any(|run| run.bytes == 0) {
            return Err(Broken::protocol("block status of no bytes"));
        }
        let Expected::Status(wanted, known) = &mut self.expected else { return Ok(()) };
        if be32(id, 0) != *wanted {
            return Ok(());
        }
        if !known.is_empty() {
            return Err(Broken::protocol("block status of one context twice"));
        }
        known.extend(runs);
        Ok(())
    }

    fn error(&mut self, kind: u16, len: u32, source: &mut dyn Source) -> Result<(), Broken> {
        if !(4..=ERROR_BYTES_MAX).contains(&len) {
            return Err(Broken::protocol(format!("an error of {len} bytes")));
        }
        let mut bytes = vec![0; len as usize];
        source.fill(&mut bytes)?;
        let message = be16(&bytes, 4) as usize;
        let text = bytes.get(6..6 + message).and_then(message_of);
        let offset = bytes.get(6 + message..).filter(|rest| rest.len() == 8);
        let text = match (kind, offset) {
            (chunk::ERROR_OFFSET, Some(offset)) => {
                let at = format!("at offset {:#x}", be64(offset, 0));
                Some(text.map_or(at.clone(), |text| format!("{text}, {at}")))
            }
            _ => text,
        };
        match be32(&bytes, 0) {
            0 => Err(Broken::protocol("an error with the number of success")),
            errno => {
                self.fail(errno, text);
                Ok(())
            }
        }
    }

    /// Notes the first error; later chunks are still received.
    fn fail(&mut self, errno: u32, message: Option<String>) {
        self.failed.get_or_insert(Failure::Refused { errno, message });
    }

    /// The result of the complete reply.
    pub(crate) fn result(self) -> Result<(), Failure> {
        self.failed.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_arrive_once_each_in_any_order() {
        let mut arrived = Arrived::default();
        for (start, end, fits) in
            [(4, 8, true), (0, 2, true), (2, 5, false), (2, 4, true), (7, 9, false), (8, 16, true)]
        {
            assert_eq!(arrived.add(start, end), fits, "{start}..{end}");
        }
        assert!(arrived.is_all(16) && !arrived.is_all(17));
        assert!(!arrived.add(0, 16) && !arrived.add(15, 16));
    }
}
