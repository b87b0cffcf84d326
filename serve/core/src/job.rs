//! Long jobs on a served disk: one at a time, with progress and cancellation.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex, MutexGuard};
use serde::Serialize;
use vdkit_block::{CancelToken, Error, Result};

use crate::export::Export;

/// The running job, if any.
#[derive(Debug, Default)]
pub(crate) struct Jobs {
    state: Mutex<State>,
    ended: Condvar,
}

impl Jobs {
    /// Waits until a job has ended.
    fn wait_for(&self, mut state: MutexGuard<'_, State>, job: &Arc<Running>) {
        while state.running.as_ref().is_some_and(|running| Arc::ptr_eq(running, job)) {
            self.ended.wait(&mut state);
        }
    }
}

#[derive(Debug, Default)]
struct State {
    running: Option<Arc<Running>>,
    /// The service is ending.
    closed: bool,
}

#[derive(Debug, Default)]
struct Running {
    kind: &'static str,
    cancel: CancelToken,
    follows_growth: AtomicBool,
    /// It was done before a cancellation was seen.
    completed: AtomicBool,
    done: AtomicU64,
    left: AtomicU64,
}

/// Progress of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct JobStatus {
    /// Kind of job.
    pub kind: &'static str,
    /// Bytes moved.
    pub bytes_done: u64,
    /// Known bytes left; clients may write more.
    pub bytes_left: u64,
}

/// The exclusive right to change the image chain of an export, until dropped.
#[derive(Debug)]
pub struct Job<'a> {
    jobs: &'a Jobs,
    running: Arc<Running>,
}

impl Job<'_> {
    /// The job's cancellation.
    pub fn cancel(&self) -> &CancelToken {
        &self.running.cancel
    }

    /// Allows the disk to grow from now on: this job supports it.
    pub fn follows_growth(&self) {
        self.running.follows_growth.store(true, Ordering::SeqCst);
    }

    /// Notes that the job has done its work: whoever cancels it from now on is told so.
    pub fn completed(&self) {
        self.running.completed.store(true, Ordering::SeqCst);
    }

    /// Reports progress: bytes moved and bytes left.
    pub fn moved(&self, done: u64, left: u64) {
        self.running.done.store(done, Ordering::Relaxed);
        self.running.left.store(left, Ordering::Relaxed);
    }
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        self.jobs.state.lock().running = None;
        self.jobs.ended.notify_all();
    }
}

fn busy(file: &str, kind: &str) -> Error {
    let what = format!("a {kind} is running; the status of the service shows how far it is");
    Error::Busy { file: file.to_owned(), what }
}

impl Export {
    /// Begins a job that changes the image chain. Until it ends, other jobs, resizing (but see
    /// [`Job::follows_growth`]) and changes of snapshots or bitmaps are refused.
    ///
    /// # Errors
    /// [`Error::Busy`] while another job runs; [`Error::Interrupted`] at the end of the service.
    pub fn begin_job(&self, kind: &'static str) -> Result<Job<'_>> {
        let mut state = self.jobs.state.lock();
        if state.closed {
            return Err(Error::Interrupted);
        }
        if let Some(running) = &state.running {
            let kind = running.kind;
            drop(state);
            return Err(busy(&self.filename(), kind));
        }
        let running = Arc::new(Running { kind, ..Running::default() });
        state.running = Some(Arc::clone(&running));
        Ok(Job { jobs: &self.jobs, running })
    }

    /// The running job and its progress.
    pub fn job(&self) -> Option<JobStatus> {
        let running = self.jobs.state.lock().running.clone()?;
        Some(JobStatus {
            kind: running.kind,
            bytes_done: running.done.load(Ordering::Relaxed),
            bytes_left: running.left.load(Ordering::Relaxed),
        })
    }

    /// Cancels the job of this kind and waits until it has ended.
    ///
    /// # Errors
    /// [`Error::Invalid`] if none runs, or if it was completed all the same.
    pub fn cancel_job(&self, kind: &str) -> Result<()> {
        let state = self.jobs.state.lock();
        let Some(job) = state.running.clone().filter(|running| running.kind == kind) else {
            return Err(Error::invalid(format!("no {kind} is running")));
        };
        job.cancel.cancel();
        self.jobs.wait_for(state, &job);
        match job.completed.load(Ordering::SeqCst) {
            true => {
                Err(Error::invalid(format!("the {kind} was complete before it could be stopped")))
            }
            false => Ok(()),
        }
    }

    /// Cancels the running job, if any.
    pub(crate) fn cancel_any_job(&self) {
        if let Some(running) = &self.jobs.state.lock().running {
            running.cancel.cancel();
        }
    }

    /// Cancels the running job, waits until it has ended, and refuses new jobs.
    pub(crate) fn end_jobs(&self) {
        let mut state = self.jobs.state.lock();
        state.closed = true;
        if let Some(job) = state.running.clone() {
            job.cancel.cancel();
            self.jobs.wait_for(state, &job);
        }
    }

    /// Waits until the running job has ended; `false` if none runs.
    pub fn wait_for_job(&self) -> bool {
        let state = self.jobs.state.lock();
        let Some(job) = state.running.clone() else { return false };
        self.jobs.wait_for(state, &job);
        true
    }

    /// Refuses growth during a job that does not support it. Call it with the disk locked
    /// exclusively.
    pub(crate) fn refuse_growth_during_job(&self, name: &str) -> Result<()> {
        self.refuse_during(name, |job| !job.follows_growth.load(Ordering::SeqCst))
    }

    /// Refuses an operation during a job. Call it with the disk locked exclusively.
    pub(crate) fn refuse_during_job(&self, name: &str) -> Result<()> {
        self.refuse_during(name, |_| true)
    }

    fn refuse_during(&self, name: &str, refuses: impl Fn(&Running) -> bool) -> Result<()> {
        match &self.jobs.state.lock().running {
            Some(job) if refuses(job) => Err(busy(name, job.kind)),
            _ => Ok(()),
        }
    }
}
