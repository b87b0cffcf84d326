//! One flush for many replies.
//!
//! The leader runs a small durable write like any other: into the page cache. It answers later,
//! together with other such writes and with FLUSH requests. See [`crate::gathered`].

use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vdkit_block::Error;

use crate::receiver::Receiver;
use crate::reply::Outbox;
use crate::session::{Session, Turn, errno_of};
use crate::wire::{Request, command};

/// Maximum list length; a full list is committed at once.
pub(crate) const GATHERED_MAX: usize = 256;

/// Concurrent committing threads per connection. Disks do several syncs in little more time than
/// one, and each thread waits less.
pub(crate) const COMMITTERS: usize = 4;

/// A finished request that is answered after a flush.
#[derive(Clone, Copy)]
pub(crate) struct Unanswered {
    pub(crate) request: Request,
    pub(crate) began: Instant,
}

/// Requests that one thread commits together. The memory is reused.
pub(crate) type Batch = Vec<Unanswered>;

impl Session {
    /// Runs before the leader waits for the client: sends the replies in `out` and commits the
    /// gathered requests, unless the `needed` bytes have arrived by then. If the rest may take
    /// long, returns a [`Turn`] that the caller finishes after passing the lead.
    pub(crate) fn settle_gathered(
        &self,
        receiver: &mut Receiver,
        needed: Option<usize>,
        batch: &mut Batch,
        out: &mut Outbox,
    ) -> io::Result<Option<Turn<'_>>> {
        let gathered = self.gathered.len();
        if gathered == 0 {
            return self.settle_sending(out);
        }
        let short = self.is_likely_short(command::FLUSH);
        // A client with a single outstanding request sends nothing before the reply.
        let alone = gathered == 1 && short;
        let tries = gathered < GATHERED_MAX && !alone;
        if let Some(needed) = needed.filter(|_| tries)
            && receiver.fill_ready(&*self.channel, needed)
        {
            return Ok(None);
        }
        if !self.gathered.begin(batch) {
            return self.settle_sending(out);
        }
        if !short {
            self.replier.send_all_ready(out)?;
            return Ok(Some(Turn::Commit));
        }
        while self.commit(batch, out).is_none() {
            if !self.gathered.next(batch) {
                return self.settle_sending(out);
            }
        }
        // No space: a thread that may wait keeps the batch.
        Ok(Some(Turn::Commit))
    }

    fn settle_sending(&self, out: &mut Outbox) -> io::Result<Option<Turn<'_>>> {
        let sent = self.replier.send_all_ready(out)?;
        Ok((!sent).then_some(Turn::Send))
    }

    /// Commits a batch from [`Gathered::begin`](crate::gathered::Gathered::begin), and then what
    /// other threads gathered meanwhile. Not for the leader.
    pub(crate) fn commit_beside(&self, batch: &mut Batch, out: &mut Outbox) {
        let mut commit_all = || -> io::Result<()> {
            self.replier.send_all(out)?;
            loop {
                if let Some(error) = self.commit(batch, out) {
                    self.keep_batch(std::mem::take(batch), error);
                }
                self.replier.send_all(out)?;
                if !self.gathered.next(batch) {
                    return Ok(());
                }
            }
        };
        if commit_all().is_err() {
            self.hang_up();
        }
    }

    /// Flushes a batch and gathers its replies, with the error on failure. If the flush found no
    /// space, gathers none and returns the error.
    fn commit(&self, batch: &mut Batch, out: &mut Outbox) -> Option<Error> {
        let start = Instant::now();
        let done = self.export.requests(&self.client).flush();
        self.note_took(command::FLUSH, start.elapsed());
        match done {
            Ok(()) => {}
            Err(error) if self.export.keeps(&error) => {
                self.note_took(command::FLUSH, Duration::from_secs(1));
                return Some(error);
            }
            Err(error) => {
                self.warn(&error);
                let (errno, text) = (errno_of(&error), error.to_string());
                for Unanswered { request, began } in batch.drain(..) {
                    self.count(&request, began.elapsed(), false);
                    self.replier.put_error(out, &request, errno, &text);
                }
            }
        }
        for Unanswered { request, began } in batch.drain(..) {
            self.count(&request, began.elapsed(), true);
            self.replier.put_ok(out, &request);
        }
        None
    }

    /// Records how long a request took on a thread that may block.
    pub(crate) fn note_took(&self, command: u16, took: Duration) {
        if let Some(cell) = self.took.get(usize::from(command)) {
            cell.store(took.as_nanos() as u64, Ordering::Relaxed);
        }
    }
}
