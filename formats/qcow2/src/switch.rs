//! Replacing tables that the header points to, as one step.
//!
//! | step | what a crash after it leaves |
//! |---|---|
//! | clusters for the new tables are reserved, and that made durable | leaks |
//! | the new tables are written; barrier | leaks |
//! | the header points to them: one write within one sector; barrier | the old or the new image |
//! | the old tables' clusters are released | leaks |
//!
//! The caller holds the lead of flushes and the metadata lock from the first step to the last, so that no
//! flush writes older copies of what is replaced.

use std::ops::Range;
use std::time::Duration;

use vdkit_block::{HostOffset, Result, Storage};
use vdkit_meta::{Metadata, MutexGuard, State};

use crate::flush::freed;
use crate::image::{Lead, Meta, Qcow2};
use crate::pool::Space;

/// What a disk writes whole or not at all.
const SECTOR_BYTES: u64 = 512;
/// Between two looks at the requests in flight.
const DRAIN_STEP: Duration = Duration::from_micros(50);

impl Qcow2 {
    /// Runs `act` on an image of which memory and disk say the same, and on which no reservation is
    /// open. No metadata changes meanwhile but by `act`. New reservations wait until every request
    /// has ended that resolved before `act` was done: what such a request writes in place may be
    /// shared now, and must not be copied from under it.
    ///
    /// The caller must not be in a request ([`vdkit_block::InFlight`]) nor hold a reservation, and
    /// nobody may ask for a reservation within a request.
    pub(crate) fn exclusively<R>(
        &self,
        act: impl FnOnce(&mut MutexGuard<'_, Meta>) -> Result<R>,
    ) -> Result<R> {
        self.exclusively_between(|_| Ok(()), act, |_, ()| Ok(()))
    }

    /// [`Qcow2::exclusively`] with something to be done before and after it under the lock of
    /// flushes, but without that of the metadata. What comes after is done whatever became of
    /// `act`.
    pub(crate) fn exclusively_between<B, R>(
        &self,
        before: impl FnOnce(&mut Lead<'_>) -> Result<B>,
        act: impl FnOnce(&mut MutexGuard<'_, Meta>) -> Result<R>,
        after: impl FnOnce(&mut Lead<'_>, B) -> Result<()>,
    ) -> Result<R> {
        self.need_writable()?;
        {
            let mut meta = self.meta.lock();
            self.meta.wait_until(&mut meta, |meta| !meta.closed);
            meta.closed = true;
            self.meta.wait_until(&mut meta, State::idle);
        }
        let mut lead = self.meta.lead();
        let result = before(&mut lead).and_then(|prepared| {
            let done = {
                let mut meta = self.meta.lock();
                self.settle(&mut meta).and_then(|()| act(&mut meta))
            };
            let after = after(&mut lead, prepared);
            done.and_then(|done| after.map(|()| done))
        });
        drop(lead);
        // Without any lock: requests may need one to end.
        let stamp = self.in_flight.stamp();
        while !self.in_flight.passed(stamp) {
            std::thread::sleep(DRAIN_STEP);
        }
        self.meta.lock().closed = false;
        self.meta.ended();
        let recycled = self.recycle();
        result.and_then(|done| recycled.map(|()| done))
    }

    /// Takes the lead of flushes while new reservations do not wait; see [`Qcow2::exclusively`].
    pub(crate) fn lead_while_open(&self) -> Lead<'_> {
        loop {
            let lead = self.meta.lead();
            let mut meta = self.meta.lock();
            if !meta.closed {
                return lead;
            }
            drop(lead);
            self.meta.wait(&mut meta);
        }
    }

    /// Makes all durable, and lets go what nobody can be reading any more.
    fn settle(&self, meta: &mut MutexGuard<'_, Meta>) -> Result<()> {
        self.place_bitmaps(meta)?;
        self.flush_locked(meta)?;
        let (runs, result) = self.take_released(meta);
        self.punch(&runs);
        for run in runs {
            meta.add_reclaimed(run);
        }
        result?;
        self.flush_locked(meta)
    }

    /// Reserves contiguous clusters for a table of so many bytes (at least one cluster). To be
    /// made durable by [`Qcow2::flush_locked`] before anything refers to them.
    pub(crate) fn reserve_table(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        bytes: u64,
    ) -> Result<Space> {
        self.allocate_whole(meta, bytes.div_ceil(self.geometry.cluster_bytes()).max(1))
    }

    /// Writes a table to its reserved clusters, filled up with zeroes.
    pub(crate) fn write_table(&self, space: &Space, bytes: &[u8]) -> Result<HostOffset> {
        let offset = HostOffset(space.first << self.geometry.cluster_bits);
        let mut whole = bytes.to_vec();
        whole.resize((space.count << self.geometry.cluster_bits) as usize, 0);
        self.storage.write_at(&whole, offset)?;
        Ok(offset)
    }

    /// Puts reserved clusters back into the pool that were perhaps written and are not used.
    pub(crate) fn unreserve(meta: &mut Meta, spaces: impl IntoIterator<Item = Space>) {
        for space in spaces {
            meta.space.pool.add(Space { fresh: false, ..space });
        }
    }

    /// Changes bytes of the header within one sector, behind a barrier and before another: after a
    /// crash the header holds the old bytes or the new ones, and what was written before this call
    /// is there.
    ///
    /// # Errors
    /// I/O. The old bytes stand again then; where not even that is sure, every later change of the
    /// image is refused until they do.
    pub(crate) fn switch_header(&self, meta: &mut Meta, at: u64, bytes: &[u8]) -> Result<()> {
        let end = at + bytes.len() as u64;
        assert!(at / SECTOR_BYTES == (end - 1) / SECTOR_BYTES, "a switch must be one sector's");
        meta.check_header(&*self.storage)?;
        let mut old = vec![0; bytes.len()];
        self.storage.read_at(&mut old, HostOffset(at))?;
        self.storage.sync()?;
        let put = |bytes: &[u8]| {
            self.storage.write_at(bytes, HostOffset(at)).and_then(|()| self.storage.sync())
        };
        let Err(error) = put(bytes) else { return Ok(()) };
        // The write, or a part of it, may have reached the disk all the same.
        meta.header.unknown = put(&old).is_err();
        meta.header.before = (at, old);
        Err(error)
    }

    /// Lets clusters of tables go that nothing points to any more, on disk too.
    pub(crate) fn retire(&self, meta: &mut Meta, clusters: Range<u64>) {
        if clusters.is_empty() {
            return;
        }
        let mut metadata = self.metadata.write();
        for cluster in clusters.clone() {
            metadata.remove(&cluster);
        }
        drop(metadata);
        let count = clusters.end - clusters.start;
        let run = freed(clusters.start, count, true);
        meta.reclaim.release(&self.in_flight, [run]);
    }

    /// Host clusters of a table, first and behind the last; none for an empty one.
    pub(crate) fn clusters_of(&self, offset: HostOffset, bytes: u64) -> Range<u64> {
        let first = self.geometry.host_cluster(offset);
        first..first + bytes.div_ceil(self.geometry.cluster_bytes())
    }
}

impl Meta {
    /// Takes a header write back that failed, where that has not worked yet.
    ///
    /// # Errors
    /// I/O: it is still not known what the header on disk says, and nothing may be changed.
    pub(crate) fn check_header(&mut self, storage: &dyn Storage) -> Result<()> {
        if !self.header.unknown {
            return Ok(());
        }
        let (at, old) = &self.header.before;
        storage.write_at(old, HostOffset(*at))?;
        storage.sync()?;
        self.header.unknown = false;
        Ok(())
    }
}
