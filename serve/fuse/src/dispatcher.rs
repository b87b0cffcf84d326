//! Runs reads, writes and other requests inline, or on a thread that may block.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use fuser::{Errno, ReplyData, ReplyEmpty, ReplyWrite};
use vdkit_block::{Error, Result};
use vdkit_chain::Ready;
use vdkit_serve::{Change, Claim, Client, Export, OpKind, Pool, SlowWriteBackoff};

use crate::attributes::Attributes;
use crate::buffer;
use crate::errno::errno_of;
use crate::holes;

/// State shared by the threads of a mount.
#[derive(Debug)]
pub struct Dispatcher {
    pub export: Arc<Export>,
    /// The client of all requests, while mounted.
    client: Arc<Client>,
    pub pool: Pool,
    pub attributes: Attributes,
    /// Writing past the end grows the disk.
    pub growable: bool,
    /// The mount has ended: later requests fail.
    pub ended: AtomicBool,
    backoff: SlowWriteBackoff,
}

/// Reply to a change.
pub trait ChangeReply: Send + 'static {
    fn done(self, len: u64);
    fn failed(self, errno: Errno);
}

impl ChangeReply for ReplyWrite {
    fn done(self, len: u64) {
        // A request is always shorter than 4 GiB.
        self.written(len as u32);
    }
    fn failed(self, errno: Errno) {
        self.error(errno);
    }
}

impl ChangeReply for ReplyEmpty {
    fn done(self, _len: u64) {
        self.ok();
    }
    fn failed(self, errno: Errno) {
        self.error(errno);
    }
}

impl Dispatcher {
    pub fn new(
        export: Arc<Export>,
        client: Arc<Client>,
        attributes: Attributes,
        growable: bool,
    ) -> Self {
        Self {
            export,
            client,
            pool: Pool::default(),
            attributes,
            growable,
            ended: AtomicBool::new(false),
            backoff: SlowWriteBackoff::default(),
        }
    }

    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    /// Bytes of a range that lie on the disk.
    fn within(&self, at: u64, len: u64) -> u64 {
        self.export.size().saturating_sub(at).min(len)
    }

    fn count(&self, kind: OpKind, len: u64, began: Instant, ok: bool) {
        self.export.counters().done(kind, len, began.elapsed(), ok);
    }

    /// Logs an error and returns its errno.
    fn failure(&self, error: &Error) -> Errno {
        tracing::warn!(export = self.export.name(), "{error}");
        errno_of(error)
    }

    /// Reads; returns nothing past the end.
    pub fn read(self: &Arc<Self>, at: u64, len: u64, reply: ReplyData) {
        let began = Instant::now();
        let len = self.within(at, len);
        if len == 0 {
            return reply.data(&[]);
        }
        let declined = buffer::lend(len as usize, |bytes| {
            match self.export.read_ready(bytes, at) {
                Some(Ok(Ready::Bytes)) => {}
                Some(Ok(Ready::Zero)) => bytes.fill(0),
                // The blocking path reports the error.
                Some(Err(_)) | None => return Some(reply),
            }
            self.export.counters().lane(true);
            self.count(OpKind::Read, len, began, true);
            reply.data(bytes);
            None
        });
        if let Some(reply) = declined {
            let dispatcher = Arc::clone(self);
            self.export.counters().lane(false);
            self.pool.run(0, move || dispatcher.read_slowly(at, len, began, reply));
        }
    }

    fn read_slowly(&self, at: u64, len: u64, began: Instant, reply: ReplyData) {
        buffer::lend(len as usize, |bytes| {
            let done = self.export.requests(&self.client).read(bytes, at);
            self.count(OpKind::Read, len, began, done.is_ok());
            match done {
                Ok(()) => reply.data(bytes),
                Err(error) => reply.error(self.failure(&error)),
            }
        });
    }

    /// The first offset at or after `at` of a hole, or of data.
    pub fn seek(&self, at: u64, hole: bool) -> std::result::Result<u64, Errno> {
        let requests = self.export.requests(&self.client);
        let found = holes::seek(|| requests.hold(), at, hole);
        found.map_err(|error| self.failure(&error))?.ok_or(Errno::ENXIO)
    }

    /// Writes. With `durable`, a power cut after the answer loses nothing of it.
    pub fn write(self: &Arc<Self>, at: u64, data: &[u8], durable: bool, reply: ReplyWrite) {
        let began = Instant::now();
        if self.export.read_only() {
            return reply.error(Errno::EROFS);
        }
        let whole = data.len() as u64;
        let within = self.within(at, whole);
        if within < whole && !self.growable {
            // As on a block device: the part on the disk is written; with no such part, ENOSPC.
            if within == 0 {
                return reply.error(Errno::ENOSPC);
            }
        } else if within == whole && !durable && !self.backoff.applies() {
            let done = self.export.write_ready(data, at);
            if let Some(done) = done {
                let took = began.elapsed();
                self.backoff.record(took, data.len());
                self.export.counters().lane(true);
                self.export.counters().done(OpKind::Write, whole, took, done.is_ok());
                self.attributes.touch();
                return match done {
                    Ok(()) => reply.written(data.len() as u32),
                    Err(error) => reply.error(self.failure(&error)),
                };
            }
        }
        let change = match self.growable && within < whole {
            true => Change::Append(data.to_vec()),
            false => Change::Write(data[..within as usize].to_vec()),
        };
        let dispatcher = Arc::clone(self);
        self.export.counters().lane(false);
        self.pool.run(data.len(), move || dispatcher.change(at, change, durable, began, reply));
    }

    /// Writes zeroes, except past the end.
    pub fn zero(self: &Arc<Self>, at: u64, len: u64, may_unmap: bool, reply: ReplyEmpty) {
        let began = Instant::now();
        let dispatcher = Arc::clone(self);
        self.export.counters().lane(false);
        self.pool.run(0, move || {
            let len = dispatcher.within(at, len);
            if len == 0 {
                return reply.ok();
            }
            dispatcher.change(at, Change::Zero { len, may_unmap }, false, began, reply);
        });
    }

    /// Runs a change on this thread. A change that finds no space is kept and answered later.
    fn change(
        self: &Arc<Self>,
        at: u64,
        change: Change,
        durable: bool,
        began: Instant,
        reply: impl ChangeReply,
    ) {
        let (kind, len) = match &change {
            Change::Write(data) | Change::Append(data) => (Some(OpKind::Write), data.len() as u64),
            Change::Zero { len, .. } => (Some(OpKind::Zero), *len),
            Change::Flush { .. } => (Some(OpKind::Flush), 0),
            Change::Grow => (None, 0),
        };
        let dispatcher = Arc::clone(self);
        let answer = move |done: Result<()>| {
            if let Some(kind) = kind {
                dispatcher.count(kind, len, began, done.is_ok());
            }
            if kind != Some(OpKind::Flush) {
                dispatcher.attributes.touch();
            }
            match done {
                Ok(()) => reply.done(len),
                Err(error) => reply.failed(dispatcher.failure(&error)),
            }
        };
        // It may have waited for a thread while the mount was ended by force.
        let apply = || self.export.apply(&self.client, &change, at, durable);
        let mut done = apply();
        // A short job under which the disk cannot grow.
        while matches!(done, Err(Error::Busy { .. })) && self.export.wait_for_job() {
            done = apply();
        }
        match done {
            Err(error) if self.export.keeps(&error) => {
                let claim = Claim::of(&self.client);
                self.export.keep_claimed(change, at, durable, error, claim, Box::new(answer));
            }
            done => answer(done),
        }
    }

    /// Flushes.
    pub fn flush(self: &Arc<Self>, reply: ReplyEmpty) {
        let began = Instant::now();
        let dispatcher = Arc::clone(self);
        self.export.counters().lane(false);
        self.pool.run(0, move || {
            dispatcher.change(0, Change::Flush { requests: 1 }, true, began, reply);
        });
    }

    /// Grows the disk to `bytes`.
    pub fn grow(self: &Arc<Self>, bytes: u64, reply: impl ChangeReply) {
        let (began, dispatcher) = (Instant::now(), Arc::clone(self));
        self.pool.run(0, move || dispatcher.change(bytes, Change::Grow, false, began, reply));
    }
}
