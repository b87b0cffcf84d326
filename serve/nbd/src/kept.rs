//! Requests that found no space: the export keeps them, and they are answered later.

use std::sync::Arc;
use std::time::Instant;

use rustix::net::Shutdown;
use vdkit_block::Error;
use vdkit_serve::{Change, Claim};

use crate::channel::Channel;
use crate::commit::{Batch, Unanswered};
use crate::late::Late;
use crate::reply::{Outbox, Replier};
use crate::session::{Session, errno_of};
use crate::wire::{Request, command, request_flag};

/// A reply: the request and its error.
struct LateReply {
    request: Request,
    error: Option<Arc<(u32, String)>>,
}

/// Answers requests that waited for space; see [`crate::late`].
pub(crate) struct LateReplies {
    late: Late<LateReply>,
    replier: Arc<Replier>,
    channel: Arc<dyn Channel>,
}

impl LateReplies {
    pub(crate) fn new(replier: Arc<Replier>, channel: Arc<dyn Channel>) -> Arc<Self> {
        Arc::new(Self { late: Late::new(), replier, channel })
    }

    /// Answers requests, from another thread.
    fn answer(self: &Arc<Self>, requests: Batch, done: &vdkit_block::Result<()>) {
        let failed = |error: &Error| Arc::new((errno_of(error), error.to_string()));
        let error = done.as_ref().err().map(failed);
        let reply = |Unanswered { request, .. }| LateReply { request, error: error.clone() };
        if !self.late.add(requests.into_iter().map(reply)) {
            return;
        }
        let own = self.clone();
        let spawned = std::thread::Builder::new().name("nbd-late".to_owned());
        if let Err(error) = spawned.spawn(move || own.send()) {
            tracing::warn!(
                "cannot start a thread for late replies, so the connection ends: {error}"
            );
            // An unanswered client would wait for ever. After the shutdown no send blocks, so this
            // thread may send.
            self.channel.shutdown(Shutdown::Both);
            self.send();
        }
    }

    fn send(&self) {
        let (mut batch, mut out) = (Vec::new(), Outbox::default());
        while self.late.take(&mut batch) {
            for LateReply { request, error } in batch.drain(..) {
                match error {
                    None => self.replier.put_ok(&mut out, &request),
                    Some(error) => self.replier.put_error(&mut out, &request, error.0, &error.1),
                }
            }
            // Replies to a disconnected client are lost.
            let _ = self.replier.send_all(&mut out);
        }
    }

    /// Waits until all replies have been sent, or cannot be.
    pub(crate) fn wait(&self) {
        self.late.wait();
    }
}

impl Session {
    /// Whether the export keeps a request that failed with `error`.
    pub(crate) fn is_to_be_kept(&self, request: &Request, error: &Error) -> bool {
        request.is_change() && self.export.keeps(error)
    }

    /// Keeps a change that found no space.
    pub(crate) fn keep(&self, request: &Request, error: Error, payload: &[u8], began: Instant) {
        let change = match request.command {
            command::WRITE => Change::Write(payload.to_vec()),
            command::WRITE_ZEROES => {
                let may_unmap = !request.has(request_flag::NO_HOLE);
                Change::Zero { len: request.len, may_unmap }
            }
            // Trimming is a hint: only its flush can run out of space.
            _ => Change::Flush { requests: 1 },
        };
        let batch = vec![Unanswered { request: *request, began }];
        self.keep_change(change, error, batch);
    }

    /// Keeps a flush that found no space, for all requests that wait for it.
    pub(crate) fn keep_batch(&self, batch: Batch, error: Error) {
        self.keep_change(Change::Flush { requests: batch.len() as u64 }, error, batch);
    }

    fn keep_change(&self, change: Change, error: Error, batch: Batch) {
        let first = batch.first().map(|first| first.request);
        let at = first.map_or(0, |first| first.offset);
        let durable = first.is_some_and(|first| first.has(request_flag::FUA));
        let (late, export) = (self.late.clone(), self.export.clone());
        let counted = self.changing.begin();
        let done = Box::new(move |done: vdkit_block::Result<()>| {
            drop(counted);
            for Unanswered { request, began } in &batch {
                Self::count_on(&export, request, began.elapsed(), done.is_ok());
            }
            late.answer(batch, &done);
        });
        let claim = Claim::of(&self.client);
        self.export.keep_claimed(change, at, durable, error, claim, done);
    }
}
