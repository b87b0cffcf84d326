//! Reserves host space for a write and publishes it.

use std::ops::Range;
use std::sync::atomic::Ordering;

use vdkit_block::{
    FileIndex, Fill, GuestOffset, HostOffset, IoAction, Reservation, Reserver, Result, Ticket,
    align_down,
};
use vdkit_meta::{Freed, MutexGuard};

use crate::compressed::Units;
use crate::entry::{L2Entry, State};
use crate::flush::freed;
use crate::image::{Meta, Qcow2};
use crate::layout::{COMPRESSED, COPIED, SUBCLUSTERS};
use crate::pool::Space;

/// A reservation that is neither published nor released.
#[derive(Debug)]
pub(crate) enum Pending {
    Plain(PlainPending),
    Compressed(Units),
}

#[derive(Debug)]
pub(crate) struct PlainPending {
    /// Guest bytes that become data, aligned to subclusters (or the end of the disk).
    guest: Range<u64>,
    /// Host offset of the first cluster.
    host: HostOffset,
    /// New host clusters; `None` if the guest clusters have space already.
    space: Option<Space>,
    /// The data must be durable before the entry that exposes it.
    data_first: bool,
}

/// Result of [`Qcow2::plan`] for the clusters of a write.
struct Plan {
    /// Guest range in bytes, cluster-aligned.
    clusters: Range<u64>,
    /// End of the caller's bytes that can be served.
    write_end: u64,
    /// Host offset, if the clusters have space already.
    in_place: Option<HostOffset>,
    /// Entry of the first and of the last cluster.
    first: L2Entry,
    last: L2Entry,
    /// The guest may currently read data other than zeroes there.
    covers_data: bool,
}

impl Qcow2 {
    /// As [`vdkit_block::Format::reserve`].
    pub(crate) fn reserve_plain(
        &self,
        at: GuestOffset,
        len: u64,
    ) -> Result<Option<Reservation<'_>>> {
        self.relieve_cache()?;
        let mut meta = self.meta.lock();
        loop {
            let end = self.claim(&mut meta, at, at.0 + len);
            // The disk may have shrunk while this thread waited.
            self.in_range(at, len, IoAction::Write)?;
            let Some(plan) = self.plan(&mut meta, at, end)? else { return Ok(None) };
            if let Some(host) = plan.in_place {
                let len = plan.clusters.end - plan.clusters.start;
                self.guard_space(GuestOffset(plan.clusters.start), host, len)?;
                self.regain(&mut meta, host, len)?;
            }
            self.before_change(&mut meta)?;
            if self.writable_l2(&mut meta, self.geometry.l1_index(at))?.is_some()
                && let Some(pending) = self.place(&mut meta, at, &plan)?
            {
                return Ok(Some(self.hand_out(&mut meta, at, &plan, pending)));
            }
        }
    }

    /// Waits until no other reservation holds the first cluster; returns the end of the following
    /// clusters that none holds, within one L2 table.
    pub(crate) fn claim(&self, meta: &mut MutexGuard<'_, Meta>, at: GuestOffset, end: u64) -> u64 {
        let cluster = self.geometry.cluster_bytes();
        let start = align_down(at.0, cluster);
        let span = self.geometry.l2_span();
        let end = end.min((at.0 / span + 1) * span);
        loop {
            self.meta.wait_until(meta, |meta| !meta.exclusive);
            match meta.tickets.find(&(start..end), at.0, |_| true) {
                Some(end) => return end,
                None => self.meta.wait(meta),
            }
        }
    }

    /// The L2 entry of a guest offset.
    ///
    /// # Errors
    /// I/O, or an entry that violates the specification.
    pub(crate) fn entry_at(&self, at: GuestOffset) -> Result<L2Entry> {
        let mut found = L2Entry::default();
        let end = GuestOffset(at.0 + 1);
        self.look_at_entries(at, end, |entry, _| {
            found = entry;
            false
        })?;
        Ok(found)
    }

    /// Calls `look` for each L2 entry from `at` to `end`, within one L2 table, until it returns
    /// false. Takes one cache lookup per slice. Consecutive zero entries, as in a new table, are
    /// one call with their number.
    ///
    /// # Errors
    /// As [`Qcow2::entry_at`].
    fn look_at_entries(
        &self,
        at: GuestOffset,
        end: GuestOffset,
        mut look: impl FnMut(L2Entry, u64) -> bool,
    ) -> Result<()> {
        let geometry = &self.geometry;
        let table = self.l2_table(geometry.l1_index(at))?.map(|(table, _)| table);
        let (version, data_file) = (self.header.version(), self.has_data_file());
        let entries = self.slice_entries() as u64;
        let mut index = geometry.l2_index(at);
        let last = index + ((end.0 - 1) >> geometry.cluster_bits) - (at.0 >> geometry.cluster_bits);
        let Some(table) = table else {
            look(L2Entry::default(), last - index + 1);
            return Ok(());
        };
        while index <= last {
            let slice_end = (index / entries + 1) * entries;
            let key = table.0 + index / entries * self.slices.slice_bytes();
            let looked = self.slices.with(key, |words| {
                let end = slice_end.min(last + 1);
                while index < end {
                    let empty =
                        self.empty_entries(words, index % entries..end - index / entries * entries);
                    if empty > 0 {
                        if !look(L2Entry::default(), empty) {
                            return Ok(false);
                        }
                        index += empty;
                        continue;
                    }
                    let entry = self.entry_in(words, (index % entries) as usize);
                    if let Some(expected) = entry.fault(geometry, version, data_file) {
                        return Err((entry.word, expected));
                    }
                    if !look(entry, 1) {
                        return Ok(false);
                    }
                    index += 1;
                }
                Ok(true)
            });
            match looked {
                None => self.slices.load(key, &*self.storage)?,
                Some(Ok(true)) => {}
                Some(Ok(false)) => return Ok(()),
                Some(Err((word, expected))) => {
                    return Err(self.entry_fault(table, index, word, expected));
                }
            }
        }
        Ok(())
    }

    /// Number of zero entries at the start of `range`, within one slice.
    fn empty_entries(&self, words: &[u64], range: Range<u64>) -> u64 {
        let words_each = if self.geometry.extended { 2 } else { 1 };
        let words = &words[range.start as usize * words_each..range.end as usize * words_each];
        (words.iter().take_while(|&&word| word == 0).count() / words_each) as u64
    }

    fn subcluster(&self, at: u64) -> u32 {
        (self.geometry.in_cluster(GuestOffset(at)) / self.geometry.subcluster_bytes()) as u32
    }

    /// Whether the guest may read data other than zeroes from a cluster with this entry.
    fn shows_data(&self, entry: L2Entry) -> bool {
        let subclusters = if self.geometry.extended { SUBCLUSTERS } else { 1 };
        let data_file = self.has_data_file();
        (0..subclusters).any(|i| match entry.state(i, &self.geometry, data_file) {
            State::Data | State::Compressed => true,
            State::Hole | State::HoleAllocated => self.has_backing(),
            State::ZeroPlain | State::ZeroAllocated => false,
        })
    }

    /// Finds the run of clusters from `at` that one reservation can cover. `None` if the first
    /// bytes can be written in place.
    fn plan(&self, meta: &mut Meta, at: GuestOffset, end: u64) -> Result<Option<Plan>> {
        let cluster = self.geometry.cluster_bytes();
        let data_file = self.has_data_file();
        let start = align_down(at.0, cluster);
        let first = self.entry_at(at)?;
        let owned = |e: L2Entry| e.has_space(data_file) && e.is_copied();
        if owned(first)
            && first.state(self.subcluster(at.0), &self.geometry, data_file) == State::Data
        {
            self.regain(meta, first.host(), cluster)?;
            return Ok(None);
        }
        let mut plan = Plan {
            clusters: start..start + cluster,
            write_end: end.min(start + cluster),
            in_place: owned(first).then(|| first.host()),
            first,
            last: first,
            covers_data: self.shows_data(first),
        };
        if plan.in_place.is_some() && self.geometry.extended {
            // Ends at the next subcluster that holds data already.
            let step = self.geometry.subcluster_bytes();
            let mut index = self.subcluster(at.0);
            while index < SUBCLUSTERS
                && first.state(index, &self.geometry, data_file) != State::Data
            {
                index += 1;
            }
            plan.write_end = plan.write_end.min(start + u64::from(index) * step);
            return Ok(Some(plan));
        }
        if plan.clusters.end >= end {
            return Ok(Some(plan));
        }
        self.look_at_entries(GuestOffset(plan.clusters.end), GuestOffset(end), |next, count| {
            let follows = match plan.in_place {
                None => !owned(next),
                Some(host) => {
                    owned(next)
                        && next.state(0, &self.geometry, data_file) != State::Data
                        && next.host() == host + (plan.clusters.end - start)
                }
            };
            if follows {
                plan.covers_data |= self.shows_data(next);
                plan.last = next;
                plan.clusters.end += count * cluster;
                plan.write_end = end.min(plan.clusters.end);
            }
            follows
        })?;
        Ok(Some(plan))
    }

    /// Allocates host space for a plan. `None`: as for [`Qcow2::allocate`].
    fn place(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        at: GuestOffset,
        plan: &Plan,
    ) -> Result<Option<(Range<u64>, PlainPending)>> {
        let cluster = self.geometry.cluster_bytes();
        let count = (plan.clusters.end - plan.clusters.start) / cluster;
        let (host, space) = match plan.in_place {
            Some(host) => (host, None),
            None if self.has_data_file() => (HostOffset(plan.clusters.start), None),
            None => {
                let hint = self.host_after_previous(at);
                let Some(space) = self.allocate(meta, count, hint)? else { return Ok(None) };
                (HostOffset(space.first << self.geometry.cluster_bits), Some(space))
            }
        };
        let got = space.map_or(count, |s| s.count);
        let clusters = plan.clusters.start..plan.clusters.start + got * cluster;
        let data_first = plan.covers_data || !self.reads_zero(space);
        Ok(Some((clusters, PlainPending { guest: 0..0, host, space, data_first })))
    }

    /// Whether the guest would read zeroes from new, unwritten host clusters. In an encrypted
    /// image, zeroes in the file decrypt to noise.
    fn reads_zero(&self, space: Option<Space>) -> bool {
        space.is_some_and(|space| space.fresh) && self.encryption.is_none()
    }

    /// The host cluster after that of the guest cluster before `at`: using it keeps the disk
    /// contiguous.
    fn host_after_previous(&self, at: GuestOffset) -> Option<u64> {
        let before = GuestOffset(at.0.checked_sub(self.geometry.cluster_bytes())?);
        let entry = self.entry_at(before).ok()?;
        entry.has_space(false).then(|| self.geometry.host_cluster(entry.host()) + 1)
    }

    /// Turns a plan with space into a reservation.
    fn hand_out(
        &self,
        meta: &mut Meta,
        at: GuestOffset,
        plan: &Plan,
        (clusters, mut pending): (Range<u64>, PlainPending),
    ) -> Reservation<'_> {
        let write_end = plan.write_end.min(clusters.end);
        let last = if clusters.end == plan.clusters.end {
            plan.last
        } else {
            // Fewer clusters than planned, so the last one is written whole.
            L2Entry::default()
        };
        let unit = |entry: L2Entry| self.fill_unit(entry, plan.in_place.is_some());
        let guest_start = align_down(at.0, unit(plan.first));
        let mut guest_end = write_end.next_multiple_of(unit(last));
        if self.has_data_file() {
            // The data file may be a raw image, so it must end with the disk. A growth that has
            // hidden the old bytes behind the end does not look at this cluster again.
            let disk_end = self.guest_len().max(self.growing_to.load(Ordering::Acquire));
            guest_end = guest_end.min(disk_end).max(write_end);
        }
        // In an image file, the rest of the cluster beyond the end of the disk is zeroed too: other
        // programs rely on that when they enlarge a disk.
        pending.guest = guest_start..guest_end;
        let untouched = pending.space.is_some_and(|space| space.fresh);
        let fresh = self.reads_zero(pending.space);
        let head = if at.0 == guest_start {
            Fill::Ready
        } else {
            self.fill(plan.first, at.0 - 1, fresh, plan.in_place.is_some())
        };
        let tail = if write_end >= pending.guest.end {
            Fill::Ready
        } else {
            self.fill(last, write_end, fresh, plan.in_place.is_some())
        };
        pending.data_first |= head == Fill::Copy || tail == Fill::Copy;
        let host = pending.host + (guest_start - clusters.start);
        let guest = pending.guest.clone();
        let ticket = meta.tickets.open(clusters, Pending::Plain(pending));
        Reservation::new(self, ticket, guest, at.0..write_end, FileIndex(0), host, head, tail)
            .zeroed(fresh)
            .untouched(untouched)
    }

    /// Unit to which a write to a cluster with this entry must be filled: a subcluster, or the
    /// whole cluster if data of its other subclusters moves with it.
    fn fill_unit(&self, entry: L2Entry, in_place: bool) -> u64 {
        let data_file = self.has_data_file();
        let holds_data = |i| {
            matches!(entry.state(i, &self.geometry, data_file), State::Data | State::Compressed)
        };
        if self.geometry.extended && (in_place || !(0..SUBCLUSTERS).any(holds_data)) {
            self.geometry.subcluster_bytes()
        } else {
            self.geometry.cluster_bytes()
        }
    }

    fn fill(&self, entry: L2Entry, at: u64, fresh: bool, in_place: bool) -> Fill {
        let unit_is_cluster = self.fill_unit(entry, in_place) == self.geometry.cluster_bytes();
        let state = if self.geometry.extended && unit_is_cluster && !entry.is_compressed() {
            State::Data // a mixture: read it whole
        } else {
            entry.state(self.subcluster(at), &self.geometry, self.has_data_file())
        };
        match state {
            State::Data | State::Compressed => Fill::Copy,
            State::Hole | State::HoleAllocated if self.has_backing() => Fill::Copy,
            _ if fresh => Fill::Ready,
            _ => Fill::Zero,
        }
    }

    fn drop_pending(&self, meta: &mut Meta, ticket: Ticket) {
        match meta.tickets.close(ticket).1 {
            Pending::Plain(p) => {
                if let Some(space) = p.space {
                    // The caller may have written there.
                    meta.space.pool.add(Space { fresh: false, ..space });
                }
            }
            Pending::Compressed(p) => self.unreserve_compressed(meta, &p),
        }
    }

    /// Loads all slices of a cluster-aligned guest range within one L2 table into the cache, so
    /// that changing them cannot fail halfway.
    pub(crate) fn load_entries(&self, clusters: &Range<u64>) -> Result<()> {
        let step = self.slice_entries() as u64 * self.geometry.cluster_bytes();
        let mut at = clusters.start;
        while at < clusters.end {
            self.entry_at(GuestOffset(at))?;
            at = (at / step + 1) * step;
        }
        Ok(())
    }

    /// Changes the entries of a cluster-aligned guest range within one L2 table. Its slices must
    /// have been loaded under the same hold of the metadata lock. `new` maps a guest offset and old
    /// entry to the new entry. With `punch`, space that lost its reference is later discarded in
    /// the file system.
    pub(crate) fn change_entries(
        &self,
        meta: &mut Meta,
        clusters: &Range<u64>,
        punch: bool,
        mut new: impl FnMut(u64, L2Entry) -> L2Entry,
    ) -> Result<()> {
        let cluster = self.geometry.cluster_bytes();
        self.change_slices(meta, clusters, |words, entries, first, list| {
            for (index, at) in entries.zip((first..).step_by(cluster as usize)) {
                let old = self.entry_in(words, index);
                let entry = new(at, old);
                self.put_entry(words, index, entry);
                let lost = freed(0, 0, punch);
                self.lost_reference(old, entry, lost, list);
            }
        })
    }

    /// As [`Qcow2::change_entries`], slice by slice. `change` gets a slice, the indexes of its
    /// entries within the range, the guest offset of the first of them, and a list for clusters
    /// that lose a reference.
    fn change_slices(
        &self,
        meta: &mut Meta,
        clusters: &Range<u64>,
        mut change: impl FnMut(&mut [u64], Range<usize>, u64, &mut Vec<Freed>),
    ) -> Result<()> {
        let bits = self.geometry.cluster_bits;
        let entries = self.slice_entries();
        let table = self.l2_table(self.geometry.l1_index(GuestOffset(clusters.start)))?;
        let Some((table, _)) = table else { unreachable!("made when the range was reserved") };
        let mut at = clusters.start;
        while at < clusters.end {
            let key = self.slice_of(table, GuestOffset(at));
            let first = self.geometry.l2_index(GuestOffset(at)) as usize & (entries - 1);
            let count = (entries - first).min(((clusters.end - at) >> bits) as usize);
            let mut freed = Vec::new();
            let mut apply = |words: &mut [u64]| change(words, first..first + count, at, &mut freed);
            while self.slices.change(key, &mut apply).is_none() {
                // A concurrent reader has evicted the slice since it was loaded.
                self.slices.load(key, &*self.storage)?;
            }
            meta.dirty.slices.insert(key);
            meta.reclaim.unlink(&self.in_flight, freed);
            at += (count as u64) << bits;
        }
        Ok(())
    }

    fn put_entry(&self, words: &mut [u64], index: usize, entry: L2Entry) {
        if self.geometry.extended {
            words[2 * index] = entry.word;
            words[2 * index + 1] = entry.bitmap;
        } else {
            words[index] = entry.word;
        }
    }

    /// Adds the host clusters that `old` referred to and `new` does not to `list`. A damaged entry
    /// frees nothing: the cluster that it names is another one's.
    fn lost_reference(&self, old: L2Entry, new: L2Entry, freed: Freed, list: &mut Vec<Freed>) {
        if old.word == 0 {
            return;
        }
        let data_file = self.has_data_file();
        if old.fault(&self.geometry, self.header.version(), data_file).is_some() {
            return;
        }
        let lost = match old.is_compressed() {
            true => old.word != new.word,
            false => {
                old.has_space(data_file)
                    && !data_file
                    && (new.word & COMPRESSED != 0 || old.host() != new.host())
            }
        };
        if lost {
            let (offset, bytes) = old.named_bytes(&self.geometry);
            let first = self.geometry.host_cluster(offset);
            let last = self.geometry.host_cluster(offset + (bytes - 1));
            list.push(Freed { first, count: last - first + 1, ..freed });
        }
    }

    fn link_data(
        &self,
        meta: &mut Meta,
        clusters: &Range<u64>,
        pending: &PlainPending,
    ) -> Result<()> {
        let PlainPending { guest, host, .. } = pending;
        let geometry = self.geometry;
        let (cluster, step) = (geometry.cluster_bytes(), geometry.subcluster_bytes());
        let new_space = pending.space.is_some();
        meta.dirty.data_first |= pending.data_first;
        meta.dirty.refcounts_first |= pending.space.is_some_and(|s| !meta.space.is_durable(&s));
        if !geometry.extended {
            return self.link_whole(meta, clusters, *host);
        }
        self.change_entries(meta, clusters, false, |at, old| {
            let word = (host.0 + (at - clusters.start)) | COPIED;
            let from = guest.start.max(at) - at;
            let to = guest.end.min(at + cluster) - at;
            let count = to.div_ceil(step) - from / step;
            let bits = (((1u128 << count) - 1) << (from / step)) as u64;
            let kept = if old.is_compressed() {
                0
            } else if new_space {
                // Moved data was copied whole; zeroes and holes stay as they were.
                old.bitmap & !u64::from(u32::MAX)
            } else {
                old.bitmap
            };
            L2Entry { word, bitmap: (kept & !(bits << 32)) | bits }
        })
    }

    /// Points standard entries at consecutive host clusters from `host`. If all were empty before,
    /// as in an image that is being filled, this is one pass without branches.
    fn link_whole(&self, meta: &mut Meta, clusters: &Range<u64>, host: HostOffset) -> Result<()> {
        let cluster = self.geometry.cluster_bytes();
        let lost = freed(0, 0, false);
        self.change_slices(meta, clusters, |words, entries, first, list| {
            let words = &mut words[entries];
            let new = (host.0 + (first - clusters.start)) | COPIED;
            if words.iter().fold(0, |all, word| all | word) == 0 {
                for (i, word) in (0..).zip(words) {
                    *word = new + i * cluster;
                }
                return;
            }
            for (i, word) in (0..).zip(words) {
                let old = L2Entry { word: *word, bitmap: 0 };
                *word = new + i * cluster;
                self.lost_reference(old, L2Entry { word: *word, bitmap: 0 }, lost, list);
            }
        })
    }
}

impl Reserver for Qcow2 {
    fn publish(&self, ticket: Ticket) -> Result<()> {
        let mut meta = self.meta.lock();
        let result = self.load_entries(&meta.tickets.get(ticket).0);
        let result = match result {
            // From here on, a failure may leave some entries linked, so the space stays reserved.
            Ok(()) => match meta.tickets.close(ticket) {
                (clusters, Pending::Plain(p)) => self.link_data(&mut meta, &clusters, &p),
                (clusters, Pending::Compressed(p)) => {
                    self.link_compressed(&mut meta, &clusters, &p)
                }
            },
            Err(error) => {
                self.drop_pending(&mut meta, ticket);
                Err(error)
            }
        };
        drop(meta);
        self.meta.ended();
        result
    }

    fn release(&self, ticket: Ticket) {
        let mut meta = self.meta.lock();
        self.drop_pending(&mut meta, ticket);
        drop(meta);
        self.meta.ended();
    }
}
