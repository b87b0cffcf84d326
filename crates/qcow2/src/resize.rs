//! Changing the size of the guest disk.

use std::sync::atomic::Ordering;

use parking_lot::MutexGuard;
use vdkit_block::{Error, GuestOffset, HostOffset, Place, Result, ZeroMode, align_down};

use crate::entry::L2Entry;
use crate::header::field;
use crate::image::{Freed, Meta, Qcow2};
use crate::layout::{L1_BYTES_MAX, OFFSET_MASK};
use crate::pool::Space;

impl Qcow2 {
    /// As [`vdkit_block::Format::resize`].
    pub(crate) fn resize_to(&self, new: u64) -> Result<()> {
        let new = new.checked_next_multiple_of(512).unwrap_or(u64::MAX);
        if new > i64::MAX as u64 - self.geometry.cluster_bytes() {
            return Err(Error::Invalid(format!("{new} bytes is more than a disk can have")));
        }
        if self.header.snapshot_count > 0 && self.header.version < 3 {
            return Err(Error::unsupported(
                self.storage.name(),
                "resizing a version 2 image with snapshots",
                "their size is not recorded; delete the snapshots or convert to compat=1.1",
            ));
        }
        let _flushing = self.flushing.lock();
        let old = self.guest_len();
        match new.cmp(&old) {
            std::cmp::Ordering::Equal => Ok(()),
            std::cmp::Ordering::Greater => self.enlarge(old, new),
            std::cmp::Ordering::Less => self.shrink(old, new),
        }
    }

    fn enlarge(&self, old: u64, new: u64) -> Result<()> {
        let entries = self.geometry.l1_entries_for(new);
        if entries * 8 > L1_BYTES_MAX {
            return Err(Error::Invalid(format!(
                "{}: a disk of {new} bytes needs an L1 table of {} bytes with this cluster size, \
                 more than {L1_BYTES_MAX}; convert to an image with a larger cluster_size",
                self.storage.name(),
                entries * 8
            )));
        }
        self.zero_last_cluster(old)?;
        if self.has_data_file() && self.data.caps().growable && self.data.len()? < new {
            self.data.set_len(new)?;
        }
        let mut meta = self.meta.lock();
        let present = self.l1.read().len() as u64;
        if entries > present {
            self.before_change(&mut meta)?;
            self.replace_l1(&mut meta, entries, new)?;
        } else {
            self.storage.write_at(&new.to_be_bytes(), HostOffset(field::SIZE))?;
            self.storage.sync()?;
        }
        self.guest_bytes.store(new, Ordering::Release);
        Ok(())
    }

    /// What lies in the last cluster behind the end of the disk becomes visible: make it zeroes,
    /// durably, before the header says so.
    fn zero_last_cluster(&self, old: u64) -> Result<()> {
        let cluster = self.geometry.cluster_bytes();
        if old.is_multiple_of(cluster) {
            return Ok(());
        }
        let start = align_down(old, cluster);
        let last = self.map_loading(GuestOffset(old - 1), 1)?;
        if let Place::Data { offset, exclusive: true, .. } = last.place {
            let tail = start + cluster - old;
            self.data.write_zeroes(offset + 1, tail, ZeroMode::KeepAllocated)?;
            self.data.sync()?;
        }
        Ok(())
    }

    /// Writes a larger L1 table and switches to it, and to the new size, by one header write.
    fn replace_l1(&self, meta: &mut MutexGuard<'_, Meta>, entries: u64, new: u64) -> Result<()> {
        let bits = self.geometry.cluster_bits;
        let count = (entries * 8).div_ceil(self.geometry.cluster_bytes());
        let space = self.allocate_whole(meta, count)?;
        let mut raw: Vec<u8> = self.l1.read().iter().flat_map(|w| w.to_be_bytes()).collect();
        let old_bytes = raw.len() as u64;
        raw.resize((count << bits) as usize, 0);
        let offset = HostOffset(space.first << bits);
        let taken = meta.refcounts.take_dirty();
        let written = taken
            .writes
            .iter()
            .try_for_each(|(at, bytes)| self.storage.write_at(bytes, HostOffset(*at)))
            .and_then(|()| self.storage.write_at(&raw, offset))
            .and_then(|()| self.data.sync())
            .and_then(|()| self.storage.sync())
            .and_then(|()| self.write_size_and_l1(new, entries, offset));
        if let Err(error) = written {
            // Whether the header was written is not known: the space stays reserved, as a leak.
            meta.refcounts.restore_dirty(taken);
            return Err(error);
        }
        meta.refcounts.written(taken);
        let old = meta.l1_offset;
        meta.l1_offset = offset;
        meta.dirty_l1.clear();
        self.l1.write().resize(entries as usize, 0);
        let mut metadata = self.metadata.write();
        metadata.extend(space.first..space.first + count);
        if old_bytes > 0 {
            let (first, last) = (old.0 >> bits, (old.0 + old_bytes - 1) >> bits);
            for cluster in first..=last {
                metadata.remove(&cluster);
            }
            let stamp = self.in_flight.stamp();
            meta.released.push(Freed { first, count: last - first + 1, stamp, punch: false });
        }
        Ok(())
    }

    /// The size, the L1 table's entries and its offset lie side by side in the first sector.
    fn write_size_and_l1(&self, size: u64, entries: u64, offset: HostOffset) -> Result<()> {
        let mut fields = [0; 24];
        self.storage.read_at(&mut fields, HostOffset(field::SIZE))?;
        fields[..8].copy_from_slice(&size.to_be_bytes());
        fields[12..16].copy_from_slice(&(entries as u32).to_be_bytes());
        fields[16..].copy_from_slice(&offset.0.to_be_bytes());
        self.storage.write_at(&fields, HostOffset(field::SIZE))?;
        self.storage.sync()
    }

    /// Exactly `count` contiguous clusters.
    fn allocate_whole(&self, meta: &mut MutexGuard<'_, Meta>, count: u64) -> Result<Space> {
        for _ in 0..3 {
            let space = self.allocate(meta, count, None)?;
            if space.count == count {
                return Ok(space);
            }
            meta.pool.add(space);
            self.extend(meta, count)?;
        }
        Err(Error::NoSpace {
            file: self.storage.name().to_owned(),
            what: format!("no {count} contiguous clusters for a larger L1 table"),
        })
    }

    fn shrink(&self, old: u64, new: u64) -> Result<()> {
        // The smaller size first: what lies behind it is not needed from then on.
        self.storage.write_at(&new.to_be_bytes(), HostOffset(field::SIZE))?;
        self.storage.sync()?;
        self.guest_bytes.store(new, Ordering::Release);
        let (cluster, span) = (self.geometry.cluster_bytes(), self.geometry.l2_span());
        let mut at = new.next_multiple_of(cluster);
        while at < old {
            let next = ((at / span + 1) * span).min(old.next_multiple_of(cluster));
            let l1_index = self.geometry.l1_index(GuestOffset(at));
            let mut meta = self.meta.lock();
            let clusters = at..next;
            self.wait_free(&mut meta, &clusters);
            if self.l2_table(l1_index)?.is_some() {
                self.before_change(&mut meta)?;
                self.writable_l2(&mut meta, l1_index)?;
                self.load_entries(&clusters)?;
                self.change_entries(&mut meta, &clusters, true, |_, _| L2Entry::default())?;
                if at.is_multiple_of(span) {
                    self.drop_l2(&mut meta, l1_index);
                }
            }
            drop(meta);
            at = next;
        }
        self.flush_once()?;
        if self.header.data_file_raw() && self.data.caps().growable {
            self.data.set_len(new)?;
        }
        Ok(())
    }

    /// Unlinks an L2 table whose entries are all empty.
    fn drop_l2(&self, meta: &mut Meta, l1_index: u64) {
        let word = std::mem::take(&mut self.l1.write()[l1_index as usize]);
        let table = HostOffset(word & OFFSET_MASK);
        let cluster = self.geometry.cluster_bytes();
        self.slices.forget(table, cluster);
        for key in (table.0..table.0 + cluster).step_by(self.slices.slice_bytes() as usize) {
            meta.dirty_slices.remove(&key);
        }
        meta.dirty_l1.insert(l1_index / 64);
        let first = self.geometry.host_cluster(table);
        self.metadata.write().remove(&first);
        let stamp = self.in_flight.stamp();
        meta.unlink([Freed { first, count: 1, stamp, punch: false }]);
    }
}
