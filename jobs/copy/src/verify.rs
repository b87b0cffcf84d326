//! Verifies a result by reading it back.

use std::ops::Range;

use parking_lot::Mutex;
use vdkit_block::{Error, GuestOffset, Monitor, Result};
use vdkit_chain::Disk;

use crate::compare::Side;
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
    let state = Mutex::new(State { chunks: Chunks::new(source, target)?, failed: None });
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|| verify_chunks(source, target, &state, monitor));
        }
        verify_chunks(source, target, &state, monitor);
    });
    match state.into_inner().failed {
        Some(error) => Err(error),
        None => Ok(bytes),
    }
}

/// Shared state of the threads.
struct State<'a> {
    chunks: Chunks<'a>,
    failed: Option<Error>,
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

    /// The next part; `None` at the end.
    fn next(&mut self) -> Result<Option<Range<u64>>> {
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

fn verify_chunks(source: &Source, target: &Disk, state: &Mutex<State<'_>>, monitor: &Monitor<'_>) {
    let (mut want, mut got) = (Vec::new(), Vec::new());
    let bytes = source.bytes();
    loop {
        let chunk = {
            let mut state = state.lock();
            if state.failed.is_some() {
                return;
            }
            match state.chunks.next() {
                Ok(Some(chunk)) => chunk,
                Ok(None) => return,
                Err(error) => {
                    state.failed = Some(error);
                    return;
                }
            }
        };
        let (at, len) = (chunk.start, (chunk.end - chunk.start) as usize);
        want.resize(len, 0);
        got.resize(len, 0);
        let same = monitor
            .cancel
            .check()
            .and_then(|()| source.read_at(&mut want, at))
            .and_then(|()| target.read_at(&mut got, GuestOffset(at)))
            .and_then(|()| match want.iter().zip(&got).position(|(a, b)| a != b) {
                None => Ok(()),
                Some(differs) => Err(Error::corrupt(
                    target.name(),
                    at + differs as u64,
                    "guest byte",
                    format!("{:#04x}", got[differs]),
                    format!("{:#04x}, as in the source", want[differs]),
                )),
            });
        if let Err(error) = same {
            state.lock().failed.get_or_insert(error);
            return;
        }
        monitor.progress.update(at + len as u64, bytes);
    }
}
