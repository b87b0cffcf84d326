//! Threads that take pieces of work from one plan.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use vdkit_block::{Monitor, Result};

/// Below this, starting further threads would take longer than the work.
const ALONE_BYTES: u64 = 4 << 20;

/// The default number of threads.
pub fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A source of work pieces.
pub(crate) trait Plan: Send {
    /// A piece of work.
    type Piece: Send;

    /// The next piece; `None` at the end. Called by one thread at a time.
    fn next_piece(&mut self) -> Result<Option<Self::Piece>>;
}

/// Runs all pieces of a plan on up to `threads` threads. `work` runs one piece and returns its
/// bytes; each thread has its own buffer, empty at first. The first error stops all threads.
pub(crate) fn work_off<P: Plan>(
    plan: P,
    threads: usize,
    monitor: &Monitor<'_>,
    work: impl Fn(P::Piece, &mut Vec<u8>) -> Result<u64> + Sync,
) -> Result<()> {
    let plan = Mutex::new(plan);
    let failed = AtomicBool::new(false);
    let step = |buffer: &mut Vec<u8>| -> Result<Option<u64>> {
        monitor.cancel.check()?;
        if failed.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let piece = plan.lock().next_piece()?;
        piece.map(|piece| work(piece, buffer)).transpose()
    };
    let all = |buffer: &mut Vec<u8>| -> Result<()> {
        loop {
            match step(buffer) {
                Ok(Some(_)) => {}
                Ok(None) => return Ok(()),
                Err(error) => {
                    failed.store(true, Ordering::Relaxed);
                    return Err(error);
                }
            }
        }
    };

    let mut buffer = Vec::new();
    let mut done = 0;
    while threads <= 1 || done < ALONE_BYTES {
        match step(&mut buffer)? {
            Some(bytes) => done += bytes,
            None => return Ok(()),
        }
    }
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(|| all(&mut Vec::new()))).collect();
        let mut result = all(&mut buffer);
        for other in others {
            let theirs = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            // Prefer an error over an interruption.
            result = match (result, theirs) {
                (Ok(()), theirs) => theirs,
                (Err(vdkit_block::Error::Interrupted), Err(error)) => Err(error),
                (result, _) => result,
            };
        }
        result
    })
}
