//! Threads for requests that may block, shared by FUSE and vhost-user.
//!
//! They are created as needed, up to a bound, and end when idle. The bytes of queued requests are
//! bounded too: beyond the bound, the submitting thread runs its request itself. It then reads no
//! further requests, so the client has to wait.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Default of the maximum number of threads.
const THREADS_MAX: usize = 16;
/// Idle time after which a thread ends.
const IDLE: Duration = Duration::from_secs(10);
/// Maximum bytes of queued writes.
const WAITING_BYTES_MAX: usize = 64 << 20;

type Work = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    queue: VecDeque<(usize, Work)>,
    /// Bytes in the queue.
    bytes: usize,
    threads: usize,
    /// Idle threads.
    idle: usize,
    closed: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// There is work, or the pool is closed.
    work: Condvar,
    /// A thread ended.
    ended: Condvar,
}

/// The threads and their queue.
pub struct Pool {
    threads_max: usize,
    shared: Arc<Shared>,
}

impl Default for Pool {
    fn default() -> Self {
        Self::new(THREADS_MAX)
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.shared.state.lock().threads).finish()
    }
}

impl Pool {
    /// A pool of at most `threads_max` threads. Without any, submitting threads run their requests
    /// themselves.
    pub fn new(threads_max: usize) -> Self {
        Self { threads_max, shared: Arc::default() }
    }

    /// Runs `work` on another thread, or on this one if too much is queued. `bytes` is the memory
    /// that it holds.
    pub fn run(&self, bytes: usize, work: impl FnOnce() + Send + 'static) {
        let mut state = self.shared.state.lock();
        let full = state.bytes > 0 && state.bytes + bytes > WAITING_BYTES_MAX;
        if state.closed || self.threads_max == 0 || full {
            drop(state);
            return work();
        }
        if state.idle <= state.queue.len() && state.threads < self.threads_max {
            let shared = Arc::clone(&self.shared);
            let builder = std::thread::Builder::new().name("slow".to_owned());
            match builder.spawn(move || shared.serve()) {
                Ok(_) => state.threads += 1,
                Err(error) if state.threads == 0 => {
                    drop(state);
                    tracing::warn!("cannot start a thread for a request that may block: {error}");
                    return work();
                }
                Err(_) => {}
            }
        }
        state.bytes += bytes;
        state.queue.push_back((bytes, Box::new(work)));
        drop(state);
        self.shared.work.notify_one();
    }

    /// Takes no more work, and waits at most `patience` for queued work. Returns whether all was
    /// done.
    pub fn close(&self, patience: Duration) -> bool {
        let mut state = self.shared.state.lock();
        state.closed = true;
        self.shared.work.notify_all();
        self.shared.ended.wait_while_for(&mut state, |state| state.threads > 0, patience);
        state.threads == 0
    }
}

impl Shared {
    fn serve(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some((bytes, work)) = state.queue.pop_front() {
                state.bytes -= bytes;
                drop(state);
                // The panic hook has reported a panic. Without this thread, later requests could wait
                // for ever.
                let _ = catch_unwind(AssertUnwindSafe(work));
                state = self.state.lock();
                continue;
            }
            if state.closed {
                break;
            }
            state.idle += 1;
            let waited = self.work.wait_for(&mut state, IDLE);
            state.idle -= 1;
            if waited.timed_out() && state.queue.is_empty() {
                break;
            }
        }
        state.threads -= 1;
        drop(state);
        self.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn many_run_beside_each_other_and_the_end_waits_for_all() {
        let pool = Pool::default();
        let done = Arc::new(AtomicUsize::new(0));
        let (here, there) = mpsc::sync_channel::<()>(0);
        let there = Arc::new(Mutex::new(there));
        // The barrier needs all threads at once.
        let gate = Arc::new(std::sync::Barrier::new(THREADS_MAX));
        for _ in 0..THREADS_MAX {
            let (gate, done) = (gate.clone(), done.clone());
            pool.run(1, move || {
                gate.wait();
                done.fetch_add(1, Ordering::SeqCst);
            });
        }
        {
            let (there, done) = (there.clone(), done.clone());
            pool.run(1, move || {
                let _ = there.lock().recv();
                done.fetch_add(1, Ordering::SeqCst);
            });
        }
        assert!(!pool.close(Duration::from_millis(20)), "one is not done");
        drop(here);
        assert!(pool.close(Duration::from_secs(60)));
        assert_eq!(done.load(Ordering::SeqCst), THREADS_MAX + 1);
        // After closing, the submitting thread runs the work itself.
        let me = std::thread::current().id();
        let (tell, hear) = mpsc::channel();
        pool.run(0, move || tell.send(std::thread::current().id()).unwrap());
        assert_eq!(hear.try_recv(), Ok(me));
    }

    #[test]
    fn without_threads_the_caller_works() {
        let (tell, hear) = mpsc::channel();
        Pool::new(0).run(1, move || tell.send(std::thread::current().id()).unwrap());
        assert_eq!(hear.try_recv(), Ok(std::thread::current().id()));
    }

    #[test]
    fn a_panic_takes_no_thread_away() {
        let pool = Pool::default();
        for _ in 0..=THREADS_MAX {
            pool.run(1, || panic!("for a test"));
        }
        let (tell, hear) = mpsc::channel();
        pool.run(1, move || tell.send(()).unwrap());
        assert_eq!(hear.recv_timeout(Duration::from_secs(60)), Ok(()));
        assert!(pool.close(Duration::from_secs(60)));
    }

    #[test]
    fn what_waits_is_bounded_in_bytes() {
        let pool = Pool::default();
        let gate = Arc::new(Mutex::new(()));
        let held = gate.lock();
        for _ in 0..THREADS_MAX {
            let gate = gate.clone();
            pool.run(0, move || drop(gate.lock()));
        }
        let idle = || pool.shared.state.lock().queue.is_empty();
        while !idle() {
            std::thread::yield_now();
        }
        pool.run(WAITING_BYTES_MAX, || {});
        let me = std::thread::current().id();
        let (tell, hear) = mpsc::channel();
        pool.run(1, move || tell.send(std::thread::current().id()).unwrap());
        assert_eq!(hear.try_recv(), Ok(me), "it was done where it came from");
        drop(held);
        assert!(pool.close(Duration::from_secs(60)));
    }
}
