//! Long work on a disk that is being served: one at a time, with progress, and an end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex};
use serde::Serialize;
use vdkit_block::{CancelToken, Error, Result};

use crate::export::Export;

/// The job that runs, if any.
#[derive(Debug, Default)]
pub(crate) struct Jobs {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    running: Option<Arc<Running>>,
    /// The service ends.
    closed: bool,
}

#[derive(Debug)]
struct Running {
    kind: &'static str,
    cancel: CancelToken,
    follows_growth: AtomicBool,
    done: AtomicU64,
    left: AtomicU64,
}

/// How far a job is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct JobStatus {
    /// What it does.
    pub kind: &'static str,
    /// Bytes that were moved.
    pub bytes_done: u64,
    /// Bytes that are still to be moved, as far as is known: clients may write more.
    pub bytes_left: u64,
}

/// The right to exchange the images of an export, until it is dropped.
#[derive(Debug)]
pub struct Job<'a> {
    jobs: &'a Jobs,
    running: Arc<Running>,
}

impl Job<'_> {
    /// Told to stop here.
    pub fn cancel(&self) -> &CancelToken {
        &self.running.cancel
    }

    /// The disk may grow from now on: this job learns of it.
    pub fn follows_growth(&self) {
        self.running.follows_growth.store(true, Ordering::SeqCst);
    }

    /// So many bytes were moved, and so many are left.
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
    let what = format!("a {kind} is running; 'vdkit ctl SOCKET status' shows how far it is");
    Error::Busy { file: file.to_owned(), what }
}

impl Export {
    /// Begins work that exchanges images; nobody else does so, resizes (but see
    /// [`Job::follows_growth`]), or changes snapshots or bitmaps meanwhile.
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
        let running = Arc::new(Running {
            kind,
            cancel: CancelToken::default(),
            follows_growth: AtomicBool::new(false),
            done: AtomicU64::new(0),
            left: AtomicU64::new(0),
        });
        state.running = Some(Arc::clone(&running));
        Ok(Job { jobs: &self.jobs, running })
    }

    /// What runs, and how far it is.
    pub fn job(&self) -> Option<JobStatus> {
        let running = self.jobs.state.lock().running.clone()?;
        Some(JobStatus {
            kind: running.kind,
            bytes_done: running.done.load(Ordering::Relaxed),
            bytes_left: running.left.load(Ordering::Relaxed),
        })
    }

    /// Asks the job of this kind to stop, and waits until it has.
    ///
    /// # Errors
    /// [`Error::Invalid`] where none runs.
    pub fn cancel_job(&self, kind: &str) -> Result<()> {
        let mut state = self.jobs.state.lock();
        let Some(job) = state.running.clone().filter(|running| running.kind == kind) else {
            return Err(Error::Invalid(format!("no {kind} is running")));
        };
        job.cancel.cancel();
        while state.running.as_ref().is_some_and(|running| Arc::ptr_eq(running, &job)) {
            self.jobs.ended.wait(&mut state);
        }
        Ok(())
    }

    /// Stops what runs, waits until it has stopped, and lets nothing begin any more.
    pub(crate) fn end_jobs(&self) {
        let mut state = self.jobs.state.lock();
        state.closed = true;
        if let Some(running) = &state.running {
            running.cancel.cancel();
        }
        while state.running.is_some() {
            self.jobs.ended.wait(&mut state);
        }
    }

    /// Waits until the job that runs has ended; `false` where none runs.
    pub fn wait_for_job(&self) -> bool {
        let mut state = self.jobs.state.lock();
        let Some(job) = state.running.clone() else { return false };
        while state.running.as_ref().is_some_and(|running| Arc::ptr_eq(running, &job)) {
            self.jobs.ended.wait(&mut state);
        }
        true
    }

    /// Refuses to make the disk larger under a job that would not notice. To be asked by whoever is
    /// alone with the disk.
    pub(crate) fn refuse_growth_during_job(&self, name: &str) -> Result<()> {
        let running = self.jobs.state.lock().running.clone();
        match running.filter(|running| !running.follows_growth.load(Ordering::SeqCst)) {
            None => Ok(()),
            Some(running) => Err(busy(name, running.kind)),
        }
    }

    /// Refuses what a job that runs does not expect. To be asked by whoever is alone with the disk.
    pub(crate) fn refuse_during_job(&self, name: &str) -> Result<()> {
        let kind = self.jobs.state.lock().running.as_ref().map(|running| running.kind);
        match kind {
            None => Ok(()),
            Some(kind) => Err(busy(name, kind)),
        }
    }
}
