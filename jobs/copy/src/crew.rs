//! The threads of a job.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use vdkit_block::{Error, Monitor, Result};

/// Below this, starting further threads would take longer than the work.
const ALONE_BYTES: u64 = 4 << 20;

/// The default number of threads: one per core.
pub fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Calls `step` until it returns `false`: on the calling thread, and from the first moment that `enough` returns `true`
/// on `threads - 1` others, or as many as can be started. Each thread has its own `B`. The first error stops all threads; then `abort` wakes those
/// that wait for one another. Returns the number of threads.
///
/// # Errors
/// The first error of a step. Threads that `abort` wakes return [`Error::Interrupted`], so that is reported only if no
/// step returned another error.
pub(crate) fn run<B: Default>(
    threads: Option<usize>,
    enough: impl Fn() -> bool,
    abort: impl Fn() + Sync,
    step: impl Fn(&mut B) -> Result<bool> + Sync,
) -> Result<usize> {
    let failed: Mutex<Option<Error>> = Mutex::new(None);
    let stop = AtomicBool::new(false);
    let fail = |error| {
        stop.store(true, Ordering::Relaxed);
        let mut failed = failed.lock();
        if matches!(*failed, None | Some(Error::Interrupted)) {
            *failed = Some(error);
        }
        drop(failed);
        abort();
    };
    let work = |after_each: &mut dyn FnMut()| {
        let mut buffers = B::default();
        while !stop.load(Ordering::Relaxed) {
            match step(&mut buffers) {
                Ok(true) => after_each(),
                Ok(false) => return,
                Err(error) => return fail(error),
            }
        }
    };
    let running = AtomicUsize::new(1);
    let mut alone = true;
    std::thread::scope(|scope| {
        work(&mut || {
            if !alone || !enough() {
                return;
            }
            // Tried once: where no thread can be started, the next piece does not try again.
            alone = false;
            for _ in 1..threads.unwrap_or_else(default_threads) {
                let builder = std::thread::Builder::new();
                if builder.spawn_scoped(scope, || work(&mut || ())).is_err() {
                    break;
                }
                running.fetch_add(1, Ordering::Relaxed);
            }
        });
    });
    failed.into_inner().map_or(Ok(running.into_inner()), Err)
}

/// A source of work pieces.
pub(crate) trait Plan: Send {
    /// A piece of work.
    type Piece: Send;

    /// The next piece; `None` at the end. Called by one thread at a time.
    fn next_piece(&mut self) -> Result<Option<Self::Piece>>;
}

/// [`run`]s all pieces of a plan. `work` does one piece and returns its bytes.
pub(crate) fn work_off<P: Plan, B: Default>(
    plan: P,
    threads: Option<usize>,
    monitor: &Monitor<'_>,
    work: impl Fn(P::Piece, &mut B) -> Result<u64> + Sync,
) -> Result<()> {
    let plan = Mutex::new(plan);
    let done = AtomicU64::new(0);
    let enough = || done.load(Ordering::Relaxed) >= ALONE_BYTES;
    run(
        threads,
        enough,
        || (),
        |buffers| {
            monitor.cancel.check()?;
            let Some(piece) = plan.lock().next_piece()? else { return Ok(false) };
            done.fetch_add(work(piece, buffers)?, Ordering::Relaxed);
            Ok(true)
        },
    )
    .map(drop)
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Barrier;
    use std::time::{Duration, Instant};

    use vdkit_testbase::{run_threadless, threadless_argument};

    use super::*;

    /// Three threads: `errors` are what the second and third step return, in this order. The other steps wait for the
    /// abort, as those that take turns do.
    fn failing_with(errors: [Error; 2]) -> Result<usize> {
        let (together, aborted) = (Barrier::new(3), AtomicBool::new(false));
        let (first, errors) = (AtomicBool::new(true), Mutex::new(VecDeque::from(errors)));
        let abort = || aborted.store(true, Ordering::SeqCst);
        run(
            Some(3),
            || true,
            abort,
            |_: &mut ()| {
                if first.swap(false, Ordering::SeqCst) {
                    return Ok(true);
                }
                together.wait();
                if let Some(error) = errors.lock().pop_front() {
                    return Err(error);
                }
                let deadline = Instant::now() + Duration::from_secs(20);
                while !aborted.load(Ordering::SeqCst) {
                    assert!(Instant::now() < deadline, "nothing woke this thread");
                    std::thread::yield_now();
                }
                Err(Error::Interrupted)
            },
        )
    }

    #[test]
    fn an_error_is_reported_instead_of_interruptions_before_and_after_it() {
        let broken = || Error::invalid("broken");
        for errors in [[broken(), Error::Interrupted], [Error::Interrupted, broken()]] {
            let result = failing_with(errors);
            assert!(
                matches!(&result, Err(Error::Invalid { what, .. }) if what == "broken"),
                "{result:?}"
            );
        }
        let result = failing_with([Error::Interrupted, Error::Interrupted]);
        assert!(matches!(result, Err(Error::Interrupted)), "{result:?}");
    }

    #[test]
    fn little_work_is_done_alone() {
        let steps = AtomicU64::new(0);
        let step = |_: &mut ()| Ok(steps.fetch_add(1, Ordering::Relaxed) < 9);
        assert_eq!(run(Some(4), || false, || (), step).unwrap(), 1);
        assert_eq!(run(Some(4), || true, || (), step).unwrap(), 1, "nothing was left to do");
    }

    #[test]
    fn where_no_thread_can_be_started_the_caller_works_alone() {
        let name = "crew::tests::where_no_thread_can_be_started_the_caller_works_alone";
        if threadless_argument().is_none() {
            return run_threadless(name, "");
        }
        let steps = AtomicU64::new(0);
        let step = |_: &mut ()| Ok(steps.fetch_add(1, Ordering::Relaxed) < 9);
        assert_eq!(run(Some(4), || true, || (), step).unwrap(), 1);
        assert_eq!(steps.into_inner(), 10);
    }
}
