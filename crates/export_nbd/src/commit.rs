//! One flush for many replies.
//!
//! The leader does a small write that must be durable as any other: into the page cache. It answers
//! later, together with other such writes and with FLUSH requests. See [`crate::gathered`].

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use vdkit_block::Error;
use vdkit_export::{Change, Claim};

use crate::receiver::Receiver;
use crate::reply::{Outbox, Replier};
use crate::session::{Session, errno_of};
use crate::wire::{Request, command};

/// A list of so many requests is committed at once.
pub(crate) const GATHERED_MAX: usize = 256;

/// So many threads of a connection commit side by side. Disks do several syncs in little more time
/// than one, and each thread has less to wait for.
pub(crate) const COMMITTERS: usize = 4;

/// A request that is done and that is answered after a flush.
#[derive(Clone, Copy)]
pub(crate) struct Unanswered {
    pub(crate) request: Request,
    pub(crate) began: Instant,
}

/// Requests that one thread commits together. The memory is used again.
pub(crate) type Batch = Vec<Unanswered>;

impl Session {
    /// Called by the leader before it waits for the client: sends the replies in `out` and commits
    /// what is gathered, unless the `needed` bytes are there after all. Where the commit is likely to
    /// take long, it returns `true` and the batch: the caller gives the lead away and calls
    /// [`Self::commit_all`].
    pub(crate) fn settle_gathered(
        &self,
        receiver: &mut Receiver,
        needed: Option<usize>,
        batch: &mut Batch,
        out: &mut Outbox,
    ) -> io::Result<bool> {
        let gathered = self.gathered.len();
        if gathered == 0 {
            self.replier.send_all(out)?;
            return Ok(false);
        }
        let brief = self.is_brief(command::FLUSH);
        // A client with one request under way sends nothing before the reply.
        let alone = gathered == 1 && brief;
        let tries = gathered < GATHERED_MAX && !alone;
        if let Some(needed) = needed.filter(|_| tries)
            && receiver.fill_ready(&*self.channel, needed)
        {
            return Ok(false);
        }
        if !brief {
            self.replier.send_all(out)?;
        }
        if !self.gathered.begin(batch) {
            self.replier.send_all(out)?;
            return Ok(false);
        }
        if !brief {
            return Ok(true);
        }
        self.commit_all(batch, out).map(|()| false)
    }

    /// Commits a batch that [`Gathered::begin`](crate::gathered::Gathered::begin) gave, and then
    /// what other threads have gathered meanwhile.
    pub(crate) fn commit_all(&self, batch: &mut Batch, out: &mut Outbox) -> io::Result<()> {
        loop {
            self.commit(batch, out)?;
            self.replier.send_all(out)?;
            if !self.gathered.next(batch) {
                return Ok(());
            }
        }
    }

    /// As [`Self::commit_all`], for a thread that does not lead.
    pub(crate) fn commit_beside(&self, batch: &mut Batch, out: &mut Outbox) {
        if self.commit_all(batch, out).is_err() {
            self.hang_up();
        }
    }

    /// Makes the requests of a batch durable and answers them, with the error where that fails.
    fn commit(&self, batch: &mut Batch, out: &mut Outbox) -> io::Result<()> {
        let start = Instant::now();
        let done = self.export.flush();
        self.note_took(command::FLUSH, start.elapsed());
        match done {
            Ok(()) => {
                for Unanswered { request, began } in batch.drain(..) {
                    self.count(&request, began.elapsed(), true);
                    self.replier.make_room(out, 0)?;
                    self.replier.put_ok(out, &request);
                }
                Ok(())
            }
            Err(error) if self.export.keeps(&error) => {
                self.keep_batch(std::mem::take(batch), error);
                Ok(())
            }
            Err(error) => {
                self.warn(&error);
                for Unanswered { request, began } in batch.drain(..) {
                    self.count(&request, began.elapsed(), false);
                    self.replier.error(&request, errno_of(&error), &error.to_string())?;
                }
                Ok(())
            }
        }
    }

    /// Keeps a flush that found no space, for all requests that wait for it.
    fn keep_batch(&self, batch: Batch, error: Error) {
        let change = Change::Flush { requests: batch.len() as u64 };
        let (replier, export) = (self.replier.clone(), self.export.clone());
        let done = move |done: vdkit_block::Result<()>| {
            for Unanswered { request, began } in batch {
                Self::count_on(&export, &request, began.elapsed(), done.is_ok());
                answer_kept(&replier, &request, &done);
            }
        };
        self.export.keep_claimed(change, 0, false, error, self.new_claim(), Box::new(done));
    }

    /// A claim that is withdrawn when the client leaves.
    pub(crate) fn new_claim(&self) -> Arc<Claim> {
        let claim = Arc::new(Claim::default());
        self.kept.lock().add(&claim);
        claim
    }

    /// Notes how long a request took in a thread that may block.
    pub(crate) fn note_took(&self, command: u16, took: Duration) {
        if let Some(cell) = self.took.get(usize::from(command)) {
            cell.store(took.as_nanos() as u64, Ordering::Relaxed);
        }
    }
}

/// The claims of a connection's changes that wait for space, and of some that do not any more.
#[derive(Debug, Default)]
pub(crate) struct Kept(Vec<Weak<Claim>>);

impl Kept {
    /// Adds one. Says how many were looked at, to find those that are done: as that happens only when
    /// the list has grown to twice what it was afterwards, few for each that is added.
    fn add(&mut self, claim: &Arc<Claim>) -> usize {
        /// Searching a shorter list would save nothing.
        const SEARCH_MIN: usize = 4096;
        let mut looked_at = 0;
        if self.0.len() == self.0.capacity() {
            looked_at = self.0.len();
            self.0.retain(|claim| claim.strong_count() > 0);
            self.0.reserve_exact(self.0.len().max(SEARCH_MIN));
        }
        self.0.push(Arc::downgrade(claim));
        looked_at
    }

    /// Gives all of them up.
    pub(crate) fn withdraw(&mut self) {
        for claim in self.0.drain(..).filter_map(|claim| claim.upgrade()) {
            claim.withdraw();
        }
    }
}

/// Answers a request that waited for space.
pub(crate) fn answer_kept(replier: &Replier, request: &Request, done: &vdkit_block::Result<()>) {
    // The reply of a client that is gone is lost.
    let _ = match done {
        Ok(()) => replier.ok(request),
        Err(error) => replier.error(request, errno_of(error), &error.to_string()),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_parked_changes_is_not_searched_for_each_of_them() {
        let mut kept = Kept::default();
        let claims: Vec<_> = (0..100_000).map(|_| Arc::new(Claim::default())).collect();
        let looked_at: usize = claims.iter().map(|claim| kept.add(claim)).sum();
        assert!(looked_at <= 2 * claims.len(), "{looked_at}");
        assert_eq!(kept.0.len(), claims.len());
        // Those that are done leave it.
        let (mut kept, mut longest) = (Kept::default(), 0);
        for _ in 0..100_000 {
            kept.add(&Arc::new(Claim::default()));
            longest = longest.max(kept.0.len());
        }
        assert!(longest <= 2 * 4096, "{longest}");
    }
}
