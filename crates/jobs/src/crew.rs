//! Several threads that take pieces of work from one plan.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use vdkit_block::{Monitor, Result};

/// Work for one thread only: starting others would take longer than this takes.
const ALONE_BYTES: u64 = 4 << 20;

/// How many threads a job uses where its caller does not say.
pub(crate) fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Where the threads get their pieces from.
pub(crate) trait Plan: Send {
    /// A piece of work.
    type Piece: Send;

    /// The next piece, or nothing at the end. Called by one thread at a time.
    fn next_piece(&mut self) -> Result<Option<Self::Piece>>;
}

/// Does all pieces of a plan, on up to `threads` threads. `work` does one and says how many bytes
/// it was; each thread has a buffer of its own, empty at first. The first error ends all threads.
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
            // Of several errors, one that is not the interruption says more.
            result = match (result, theirs) {
                (Ok(()), theirs) => theirs,
                (Err(vdkit_block::Error::Interrupted), Err(error)) => Err(error),
                (result, _) => result,
            };
        }
        result
    })
}
