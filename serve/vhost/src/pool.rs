//! Threads for requests that may block: created as needed, bounded, shared by all rings.
//!
//! The queue is bounded too: a ring takes no more requests than it has entries.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

use crate::queue::Job;

/// Maximum size of a thread's idle buffer.
const BOUNCE_KEPT: usize = 1 << 20;

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    idle: usize,
    threads: Vec<JoinHandle<()>>,
    closed: bool,
}

/// The threads and their queue.
#[derive(Default)]
pub struct Pool {
    threads_max: usize,
    state: Mutex<State>,
    wake: Condvar,
}

impl Pool {
    pub fn new(threads_max: usize) -> Arc<Self> {
        Arc::new(Self { threads_max, ..Self::default() })
    }

    /// Runs a request on another thread, or on this one if none can be created.
    pub fn submit(self: &Arc<Self>, job: Job) {
        let alone = {
            let mut state = self.state.lock();
            state.jobs.push_back(job);
            if state.idle < state.jobs.len() && state.threads.len() < self.threads_max {
                let pool = self.clone();
                let builder = std::thread::Builder::new().name("vhost".to_owned());
                if let Ok(thread) = builder.spawn(move || pool.work()) {
                    state.threads.push(thread);
                }
            }
            if state.threads.is_empty() { state.jobs.pop_back() } else { None }
        };
        match alone {
            Some(job) => job.run(&mut Vec::new()),
            None => {
                self.wake.notify_one();
            }
        }
    }

    fn work(&self) {
        let mut bounce = Vec::new();
        loop {
            let job = {
                let mut state = self.state.lock();
                loop {
                    if let Some(job) = state.jobs.pop_front() {
                        break job;
                    }
                    if state.closed {
                        return;
                    }
                    state.idle += 1;
                    self.wake.wait(&mut state);
                    state.idle -= 1;
                }
            };
            job.run(&mut bounce);
            if bounce.len() > BOUNCE_KEPT {
                bounce = Vec::new();
            }
        }
    }

    /// Ends the threads after their pending work.
    pub fn close(&self) {
        let threads = {
            let mut state = self.state.lock();
            state.closed = true;
            std::mem::take(&mut state.threads)
        };
        self.wake.notify_all();
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a thread of the blocking path has panicked");
            }
        }
    }
}
