//! Resizes the guest disk.

use std::ops::Range;
use std::sync::atomic::Ordering;

use vdkit_block::{Error, GuestOffset, HostOffset, Result, ZeroMode, align_down};
use vdkit_meta::MutexGuard;

use crate::entry::{L2Entry, State};
use crate::flush::freed;
use crate::image::{Lead, Meta, Qcow2};
use crate::layout::{L1_BYTES_MAX, OFFSET_MASK, SUBCLUSTERS};
use crate::pool::Space;
use crate::structures::{encode_words, header_offset};

/// Bytes of zeroes that are written at a time.
const ZERO_STEP: u64 = 8 << 20;

impl Qcow2 {
    /// As [`vdkit_block::Overlay::resize_over`].
    pub(crate) fn resize_to(&self, new: u64, beneath: u64) -> Result<()> {
        let limit = i64::MAX as u64 - self.geometry.cluster_bytes();
        let new = new
            .checked_next_multiple_of(512)
            .filter(|bytes| *bytes <= limit)
            .ok_or_else(|| Error::limit(self.storage.name(), "size", new, limit))?;
        let l1_bytes = self.geometry.l1_entries_for(new) * 8;
        if l1_bytes > L1_BYTES_MAX {
            return Err(Error::invalid_for(
                &self.storage.name(),
                format!(
                    "a disk of {new} bytes needs an L1 table of {l1_bytes} bytes with this cluster \
                     size, more than {L1_BYTES_MAX}; convert to an image with a larger cluster_size"
                ),
            ));
        }
        if self.header.version() < 3 && self.meta.lock().snapshots.count > 0 {
            return Err(Error::unsupported(
                self.storage.name(),
                "not supported: resizing a version 2 image with snapshots",
                "their size is not recorded; delete the snapshots or convert to compat=1.1",
            ));
        }
        let _admin = self.bitmaps.admin.lock();
        let mut lead = self.lead_while_open();
        let old = self.guest_len();
        if old == new {
            return Ok(());
        }
        // Also fails while a failed header write is not undone: the header may name space that
        // would be overwritten.
        self.before_change(&mut self.meta.lock())?;
        let resizing = self.bitmaps_before_resize(old, new)?;
        let resized = match new > old {
            true => {
                // Stored before `hide_tail` waits for the reservations made without it.
                self.growing_to.store(new, Ordering::Release);
                let grown = self.enlarge(&mut lead, old, new, beneath);
                self.growing_to.store(0, Ordering::Release);
                grown
            }
            false => self.shrink(&mut lead, old, new),
        };
        resized.and(self.bitmaps_after_resize(&mut lead, &resizing))
    }

    fn enlarge(&self, lead: &mut Lead<'_>, old: u64, new: u64, beneath: u64) -> Result<()> {
        self.hide_tail(old, new)?;
        // Clears what an interrupted shrink left there.
        self.clear(lead, old, new, |entry| entry != L2Entry::default())?;
        self.hide_beneath(lead, old, new.min(beneath))?;
        // Durable before the header exposes this range.
        self.meta.flush_led(self, lead)?;
        self.enlarge_data_file(old, new)?;
        let mut meta = self.meta.lock();
        if !self.enlarge_l1(&mut meta, self.geometry.l1_entries_for(new), new)? {
            self.switch_header(&mut meta, header_offset!(size), &new.to_be_bytes())?;
        }
        self.guest_bytes.store(new, Ordering::Release);
        Ok(())
    }

    /// Gives the data file the disk's size. One that is raw is the disk itself: what is in it behind
    /// the disk's end, as on a device or after an interrupted shrink, must read as zero before the
    /// header exposes it.
    fn enlarge_data_file(&self, old: u64, new: u64) -> Result<()> {
        if !self.has_data_file() {
            return Ok(());
        }
        let there = self.data.len()?;
        let shown = new.min(there);
        if self.header.data_file_raw() && old < shown {
            self.data.write_zeroes(HostOffset(old), shown - old, ZeroMode::MayUnmap)?;
            self.data.sync()?;
        }
        if self.data.caps().growable && there < new {
            self.data.set_len(new)?;
        }
        Ok(())
    }

    /// Enlarges the L1 table if it has fewer than `entries`, and writes `size` to the header in the
    /// same write. Returns whether it did.
    fn enlarge_l1(&self, meta: &mut MutexGuard<'_, Meta>, entries: u64, size: u64) -> Result<bool> {
        let present = self.l1.read().len() as u64;
        if entries > present {
            self.before_change(meta)?;
            self.replace_l1(meta, entries, size)?;
        }
        Ok(entries > present)
    }

    /// The entry of the cluster in which the disk ends, and whether it has data at `end` that must
    /// be overwritten with zeroes.
    ///
    /// # Errors
    /// I/O, or [`Error::Corrupt`] if that data is where other data or metadata is.
    fn tail(&self, end: u64) -> Result<(L2Entry, bool)> {
        let (cluster, unit) = (self.geometry.cluster_bytes(), self.geometry.subcluster_bytes());
        let start = align_down(end, cluster);
        let entry = self.entry_at(GuestOffset(end))?;
        let state =
            entry.state(((end - start) / unit) as u32, &self.geometry, self.has_data_file());
        let cut = !end.is_multiple_of(unit) && state == State::Data;
        if cut && self.is_written_in_place(entry) {
            self.guard_space(GuestOffset(start), entry.host(), cluster)?;
        }
        Ok((entry, cut))
    }

    /// In a data file a cluster has one place.
    fn is_written_in_place(&self, entry: L2Entry) -> bool {
        entry.is_copied() || self.has_data_file()
    }

    /// Makes the last cluster read as zero beyond the end of the disk, since a disk that ends at
    /// `upto` would expose that part. Must be flushed before the header's size changes.
    fn hide_tail(&self, end: u64, upto: u64) -> Result<()> {
        let (cluster, unit) = (self.geometry.cluster_bytes(), self.geometry.subcluster_bytes());
        if end.is_multiple_of(cluster) {
            return Ok(());
        }
        let start = align_down(end, cluster);
        let inside = end - start;
        let mut meta = self.meta.lock();
        let whole = start..start + cluster;
        self.meta.wait_until(&mut meta, |meta| !meta.tickets.overlap(&whole));
        let (entry, cut) = self.tail(end)?;
        if entry.is_compressed() || (cut && !self.is_written_in_place(entry)) {
            self.copy_head(&mut meta, start, inside)?;
        } else if cut {
            self.regain(&mut meta, entry.host(), cluster)?;
            let from = entry.host() + inside;
            let mut tail = cluster - inside;
            if self.has_data_file() {
                // The data file ends with the disk; beyond that it reads as zero, which decrypts to
                // noise.
                let upto = if self.encryption.is_some() { upto } else { self.data.len()? };
                tail = tail.min(upto.saturating_sub(from.0));
            }
            if tail > 0 {
                self.write_data_zeroes(GuestOffset(end), from, tail)?;
            }
        }
        let behind = inside.div_ceil(unit);
        if self.geometry.extended && behind < u64::from(SUBCLUSTERS) {
            let bits = u32::MAX << behind;
            self.change_range(&mut meta, start..start + cluster, false, |_, old| {
                if old.is_compressed() { old } else { self.zeroed(old, bits, false) }
            })?;
        }
        Ok(())
    }

    /// Copies the cluster at guest offset `start` to a host cluster of its own, with zeroes from
    /// `inside` on.
    fn copy_head(&self, meta: &mut MutexGuard<'_, Meta>, start: u64, inside: u64) -> Result<()> {
        let (geometry, cluster) = (self.geometry, self.geometry.cluster_bytes());
        let entry = self.entry_at(GuestOffset(start))?;
        let mut bytes = vec![0; cluster as usize];
        if entry.is_compressed() {
            let place = entry.compressed_place(&geometry);
            let mut compressed = vec![0; place.bytes as usize];
            self.data.read_padded(&mut compressed, place.offset)?;
            self.unpack_cluster(place.offset, &compressed, &mut bytes)?;
        } else {
            self.read_data(GuestOffset(start), entry.host(), &mut bytes)?;
        }
        bytes[inside as usize..].fill(0);
        let space = self.allocate_whole(meta, 1)?;
        let host = HostOffset(space.first << geometry.cluster_bits);
        let written = self.write_data(GuestOffset(start), host, bytes);
        self.link(meta, start..start + cluster, space, written, |_, old| L2Entry {
            bitmap: if old.is_compressed() {
                L2Entry::data(host, &geometry).bitmap
            } else {
                old.bitmap
            },
            ..L2Entry::data(host, &geometry)
        })
    }

    /// Hides the backing image's data from the end of the disk up to `upto`: with zero flags, or in
    /// version 2, which has none, with clusters of zeroes. Must be flushed before the header
    /// exposes the range.
    fn hide_beneath(&self, lead: &mut Lead<'_>, end: u64, upto: u64) -> Result<()> {
        let from = end.next_multiple_of(self.geometry.cluster_bytes());
        if !self.has_backing() || from >= upto {
            return Ok(());
        }
        let mut meta = self.meta.lock();
        self.enlarge_l1(&mut meta, self.geometry.l1_entries_for(upto), end)?;
        drop(meta);
        if self.header.version() >= 3 {
            return self.for_tables(lead, from, upto, |meta, clusters| {
                self.change_range(meta, clusters, false, |_, old| self.zeroed(old, u32::MAX, true))
            });
        }
        let hidden = self.write_zero_clusters(lead, from, upto);
        if hidden.is_err() {
            // Frees the clusters written so far. The first error is returned, an error of the
            // cleanup ignored.
            let _ = self.clear(lead, from, upto, |entry| entry != L2Entry::default());
        }
        hidden
    }

    /// Allocates host clusters of zeroes for the guest range from `at` to `upto`, beyond the end of
    /// the disk.
    fn write_zero_clusters(&self, lead: &mut Lead<'_>, mut at: u64, upto: u64) -> Result<()> {
        let (cluster, span) = (self.geometry.cluster_bytes(), self.geometry.l2_span());
        let end = upto.next_multiple_of(cluster);
        while at < end {
            let next = ((at / span + 1) * span).min(end).min(at + cluster.max(ZERO_STEP));
            let mut meta = self.meta.lock();
            self.meta.wait_until(&mut meta, |meta| !meta.tickets.overlap(&(at..next)));
            self.before_change(&mut meta)?;
            let Some(space) = self.allocate(&mut meta, (next - at) / cluster, None)? else {
                continue;
            };
            let host = HostOffset(space.first << self.geometry.cluster_bits);
            let len = space.count * cluster;
            drop(meta);
            let written = self.write_data_zeroes(GuestOffset(at), host, len);
            let mut meta = self.meta.lock();
            self.link(&mut meta, at..at + len, space, written, |guest, _| {
                L2Entry::data(host + (guest - at), &self.geometry)
            })?;
            let much = meta.dirty.slices.len() > self.slices.capacity() / 2;
            drop(meta);
            if much {
                self.meta.flush_led(self, lead)?;
            }
            at += len;
        }
        Ok(())
    }

    /// Calls `change` for the part of each L2 table in a range, once it has no open reservation.
    /// Flushes if much is dirty.
    fn for_tables(
        &self,
        lead: &mut Lead<'_>,
        from: u64,
        upto: u64,
        mut change: impl FnMut(&mut MutexGuard<'_, Meta>, Range<u64>) -> Result<()>,
    ) -> Result<()> {
        let (cluster, span) = (self.geometry.cluster_bytes(), self.geometry.l2_span());
        let (mut at, end) = (from, upto.next_multiple_of(cluster));
        while at < end {
            let next = ((at / span + 1) * span).min(end);
            let mut meta = self.meta.lock();
            self.meta.wait_until(&mut meta, |meta| !meta.tickets.overlap(&(at..next)));
            change(&mut meta, at..next)?;
            let much = meta.dirty.slices.len() > self.slices.capacity() / 2;
            drop(meta);
            if much {
                self.meta.flush_led(self, lead)?;
            }
            at = next;
        }
        Ok(())
    }

    /// Changes entries of one L2 table, which is created if missing. The caller holds the lead.
    fn change_range(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        clusters: Range<u64>,
        punch: bool,
        change: impl FnMut(u64, L2Entry) -> L2Entry,
    ) -> Result<()> {
        self.make_changeable(meta, &clusters)?;
        self.change_entries(meta, &clusters, punch, change)
    }

    /// Ensures that entries of one L2 table can be changed: makes the table, and caches its slices.
    fn make_changeable(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        clusters: &Range<u64>,
    ) -> Result<()> {
        self.before_change(meta)?;
        let l1_index = self.geometry.l1_index(GuestOffset(clusters.start));
        while self.writable_l2(meta, l1_index)?.is_none() {}
        self.load_entries(clusters)
    }

    /// As [`Qcow2::change_range`], for entries that will name `space`, whose bytes were `written`.
    /// Returns the space to the pool if nothing can refer to it.
    fn link(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        clusters: Range<u64>,
        space: Space,
        written: Result<()>,
        change: impl FnMut(u64, L2Entry) -> L2Entry,
    ) -> Result<()> {
        if let Err(error) = written.and_then(|()| self.make_changeable(meta, &clusters)) {
            Self::unreserve(meta, [space]);
            return Err(error);
        }
        meta.dirty.data_first = true;
        meta.dirty.refcounts_first |= !meta.space.is_durable(&space);
        // From here on, a failure may leave some entries linked, so the space stays reserved.
        self.change_entries(meta, &clusters, false, change)
    }

    /// Writes a larger L1 table, then switches to it and to the new size with one header write. The
    /// caller holds the lead.
    fn replace_l1(&self, meta: &mut MutexGuard<'_, Meta>, entries: u64, new: u64) -> Result<()> {
        let space = self.reserve_table(meta, entries * 8)?;
        let mut raw = encode_words(&self.l1.read());
        let old_bytes = raw.len() as u64;
        raw.resize((entries * 8) as usize, 0);
        let switched = self
            .flush_locked(meta)
            .and_then(|()| self.write_table(&space, &raw))
            .and_then(|offset| {
                self.switch_tables(meta, |header| {
                    header.size.set(new);
                    header.l1_size.set(entries as u32);
                    header.l1_table_offset.set(offset.0);
                })
            });
        if let Err(error) = switched {
            Self::unreserve(meta, [space]);
            return Err(error);
        }
        let old = self.l1_moved(HostOffset(space.first << self.geometry.cluster_bits));
        self.l1.write().resize(entries as usize, 0);
        self.metadata.write().extend(space.first..space.first + space.count);
        self.retire(meta, self.clusters_of(old, old_bytes));
        Ok(())
    }

    /// Allocates exactly `count` contiguous clusters.
    pub(crate) fn allocate_whole(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        count: u64,
    ) -> Result<Space> {
        for _ in 0..3 {
            let Some(space) = self.allocate(meta, count, None)? else { continue };
            if space.count == count {
                return Ok(space);
            }
            meta.space.pool.add(space);
            self.extend(meta, count)?;
        }
        let what = format!("no {count} contiguous clusters for a table");
        Err(Error::no_space(self.storage.name(), what))
    }

    fn shrink(&self, lead: &mut Lead<'_>, old: u64, new: u64) -> Result<()> {
        // Refused before anything is changed.
        self.tail(new)?;
        // The smaller size first: from then on the data beyond it is not needed.
        self.switch_header(&mut self.meta.lock(), header_offset!(size), &new.to_be_bytes())?;
        self.guest_bytes.store(new, Ordering::Release);
        // Also for other programs, which do not clear this part when they enlarge a disk.
        self.hide_tail(new, old)?;
        self.clear(lead, new, old, |_| true)?;
        self.meta.flush_led(self, lead)?;
        if self.header.data_file_raw() && self.data.caps().growable {
            self.data.set_len(new)?;
        }
        Ok(())
    }

    /// Clears the whole clusters beyond the end of the disk up to the end of the L2 table that
    /// contains `upto`, in tables that have an entry for which `asked` is true. Must be flushed.
    pub(crate) fn clear(
        &self,
        lead: &mut Lead<'_>,
        end: u64,
        upto: u64,
        asked: impl Fn(L2Entry) -> bool,
    ) -> Result<()> {
        let (cluster, span) = (self.geometry.cluster_bytes(), self.geometry.l2_span());
        let (from, upto) = (end.next_multiple_of(cluster), upto.next_multiple_of(span));
        self.for_tables(lead, from, upto, |meta, clusters| {
            let l1_index = self.geometry.l1_index(GuestOffset(clusters.start));
            if self.l2_table(l1_index)?.is_none() {
                return Ok(());
            }
            let mut ask = false;
            for at in clusters.clone().step_by(cluster as usize) {
                ask = ask || asked(self.entry_at(GuestOffset(at))?);
            }
            if !ask {
                return Ok(());
            }
            let whole = clusters.start.is_multiple_of(span);
            self.change_range(meta, clusters, true, |_, _| L2Entry::default())?;
            if whole { self.drop_l2(meta, l1_index) } else { Ok(()) }
        })
    }

    /// Unlinks an L2 table without entries. The table is zeroed on disk before its L1 entry:
    /// otherwise, after a power cut, a check could mistake its content for a table that lost its L1
    /// entry, and keep all that it maps. Must be flushed.
    fn drop_l2(&self, meta: &mut Meta, l1_index: u64) -> Result<()> {
        let table = HostOffset(self.l1.read()[l1_index as usize] & OFFSET_MASK);
        let cluster = self.geometry.cluster_bytes();
        meta.dirty.tables_first = true;
        self.storage.write_zeroes(table, cluster, ZeroMode::MayUnmap)?;
        self.l1.write()[l1_index as usize] = 0;
        self.slices.forget(table, cluster);
        for key in (table.0..table.0 + cluster).step_by(self.slices.slice_bytes() as usize) {
            meta.dirty.slices.remove(&key);
        }
        meta.dirty.l1.insert(l1_index / 64);
        let first = self.geometry.host_cluster(table);
        self.metadata.write().remove(first);
        meta.reclaim.unlink(&self.in_flight, [freed(first, 1, false)]);
        Ok(())
    }
}
