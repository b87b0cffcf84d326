//! Replaces tables that the header points to, in one atomic step.
//!
//! | step | state after a crash |
//! |---|---|
//! | clusters for the new tables are reserved durably | leaks |
//! | the new tables are written; barrier | leaks |
//! | the header points to them: one write within one sector; barrier | the old or the new image |
//! | the old tables' clusters are released | leaks |
//!
//! The caller holds the lead of flushes and the metadata lock from the first step to the last, so
//! that no flush writes older copies of the replaced tables.

use std::ops::Range;
use std::time::Duration;

use vdkit_block::{HostOffset, Result, Storage};
use vdkit_meta::{Metadata, MutexGuard, State};
use zerocopy::IntoBytes;

use crate::flush::freed;
use crate::image::{Lead, Meta, Qcow2};
use crate::layout::{SECTOR, V2_HEADER_BYTES};
use crate::pool::Space;
use crate::structures::{FixedHeader, header_offset};

/// Interval between polls of the in-flight requests.
const DRAIN_STEP: Duration = Duration::from_micros(50);

impl Qcow2 {
    /// Runs `act` while memory and disk agree and no reservation is open; only `act` changes
    /// metadata meanwhile. New reservations block until every request has ended that resolved
    /// before `act` was done: such a request may write in place to clusters that are now shared,
    /// and they must not be copied meanwhile.
    ///
    /// The caller must not be in a request ([`vdkit_block::InFlight`]) nor hold a reservation, and
    /// no thread may reserve within a request.
    pub(crate) fn exclusively<R>(
        &self,
        act: impl FnOnce(&mut MutexGuard<'_, Meta>) -> Result<R>,
    ) -> Result<R> {
        self.exclusively_between(|_| Ok(()), act, |_, ()| Ok(()))
    }

    /// [`Qcow2::exclusively`] with steps before and after it under the lead of flushes, but without
    /// the metadata lock. `after` runs even if `act` fails.
    pub(crate) fn exclusively_between<B, R>(
        &self,
        before: impl FnOnce(&mut Lead<'_>) -> Result<B>,
        act: impl FnOnce(&mut MutexGuard<'_, Meta>) -> Result<R>,
        after: impl FnOnce(&mut Lead<'_>, B) -> Result<()>,
    ) -> Result<R> {
        self.need_writable()?;
        {
            let mut meta = self.meta.lock();
            self.meta.wait_until(&mut meta, |meta| !meta.exclusive);
            meta.exclusive = true;
            self.meta.wait_until(&mut meta, State::idle);
        }
        let mut lead = self.meta.lead();
        let result = before(&mut lead).and_then(|prepared| {
            let done = {
                let mut meta = self.meta.lock();
                self.flush_and_reclaim(&mut meta).and_then(|()| act(&mut meta))
            };
            let after = after(&mut lead, prepared);
            done.and_then(|done| after.map(|()| done))
        });
        drop(lead);
        self.drain();
        self.meta.lock().exclusive = false;
        self.meta.ended();
        let recycled = self.recycle();
        result.and_then(|done| recycled.map(|()| done))
    }

    /// Waits until all requests have ended that are in flight now. The caller holds no lock, since
    /// a request may need one to end.
    pub(crate) fn drain(&self) {
        let stamp = self.in_flight.stamp();
        while !self.in_flight.passed(stamp) {
            std::thread::sleep(DRAIN_STEP);
        }
    }

    /// Takes the lead of flushes while new reservations are not blocked; see
    /// [`Qcow2::exclusively`].
    pub(crate) fn lead_while_open(&self) -> Lead<'_> {
        loop {
            let lead = self.meta.lead();
            let mut meta = self.meta.lock();
            if !meta.exclusive {
                return lead;
            }
            drop(lead);
            self.meta.wait(&mut meta);
        }
    }

    /// Makes everything durable, and frees clusters that no request can read any more.
    fn flush_and_reclaim(&self, meta: &mut MutexGuard<'_, Meta>) -> Result<()> {
        // After a failed header write, the header may name clusters of the pool.
        meta.check_header(&*self.storage)?;
        self.place_bitmaps(meta)?;
        self.flush_locked(meta)?;
        let (runs, result) = self.drop_expired_references(meta);
        self.punch(&runs);
        meta.add_reclaimed(runs);
        result?;
        self.flush_locked(meta)
    }

    /// Reserves contiguous clusters for a table of `bytes` bytes (at least one cluster).
    /// [`Qcow2::flush_locked`] must make them durable before anything refers to them.
    pub(crate) fn reserve_table(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        bytes: u64,
    ) -> Result<Space> {
        self.allocate_whole(meta, bytes.div_ceil(self.geometry.cluster_bytes()).max(1))
    }

    /// Writes a table to its reserved clusters, padded with zeroes.
    pub(crate) fn write_table(&self, space: &Space, bytes: &[u8]) -> Result<HostOffset> {
        let offset = HostOffset(space.first << self.geometry.cluster_bits);
        let mut whole = bytes.to_vec();
        whole.resize((space.count << self.geometry.cluster_bits) as usize, 0);
        self.storage.write_at(&whole, offset)?;
        Ok(offset)
    }

    /// Returns unused reserved clusters, which may have been written, to the pool.
    pub(crate) fn unreserve(meta: &mut Meta, spaces: impl IntoIterator<Item = Space>) {
        for space in spaces {
            meta.space.pool.add(Space { fresh: false, ..space });
        }
    }

    /// Changes bytes of the header within one sector, between two barriers: after a crash the
    /// header holds the old or the new bytes, and everything written before this call is durable.
    ///
    /// # Errors
    /// I/O. The old bytes are then restored; if restoring fails too, every later change of the
    /// image fails until it succeeds.
    pub(crate) fn switch_header(&self, meta: &mut Meta, at: u64, bytes: &[u8]) -> Result<()> {
        assert!(within_sector(at, bytes.len() as u64), "a switch must be one sector's");
        meta.check_header(&*self.storage)?;
        let mut old = vec![0; bytes.len()];
        self.storage.read_at(&mut old, HostOffset(at))?;
        self.storage.sync()?;
        let put = |bytes: &[u8]| {
            self.storage.write_at(bytes, HostOffset(at)).and_then(|()| self.storage.sync())
        };
        let Err(error) = put(bytes) else { return Ok(()) };
        // All or part of the write may still have reached the disk.
        meta.header.unknown = put(&old).is_err();
        meta.header.before = (at, old);
        Err(error)
    }

    /// Changes size, tables and snapshots in the header; see [`Qcow2::switch_header`].
    pub(crate) fn switch_tables(
        &self,
        meta: &mut Meta,
        change: impl FnOnce(&mut FixedHeader),
    ) -> Result<()> {
        meta.check_header(&*self.storage)?;
        let mut header = FixedHeader::read(&*self.storage)?;
        change(&mut header);
        let at = header_offset!(size);
        let bytes = &header.as_bytes()[at as usize..V2_HEADER_BYTES as usize];
        self.switch_header(meta, at, bytes)
    }

    /// Releases clusters of tables that nothing points to any more, also on disk.
    pub(crate) fn retire(&self, meta: &mut Meta, clusters: Range<u64>) {
        if clusters.is_empty() {
            return;
        }
        let mut metadata = self.metadata.write();
        for cluster in clusters.clone() {
            metadata.remove(cluster);
        }
        drop(metadata);
        let count = clusters.end - clusters.start;
        let run = freed(clusters.start, count, true);
        meta.reclaim.release(&self.in_flight, [run]);
    }

    /// Range of a table's host clusters; empty for an empty table.
    pub(crate) fn clusters_of(&self, offset: HostOffset, bytes: u64) -> Range<u64> {
        let first = self.geometry.host_cluster(offset);
        first..first + bytes.div_ceil(self.geometry.cluster_bytes())
    }
}

/// Whether a range of bytes is within one sector, so that one write changes all of it or nothing.
pub(crate) fn within_sector(at: u64, bytes: u64) -> bool {
    at / SECTOR as u64 == (at + bytes - 1) / SECTOR as u64
}

impl Meta {
    /// Undoes a failed header write if that has not succeeded yet.
    ///
    /// # Errors
    /// I/O: the content of the header on disk is still unknown, and nothing may be changed.
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
