//! Zeroes and discards by changing only metadata.

use std::ops::Range;

use vdkit_block::{GuestOffset, HostOffset, Result, align_down};

use crate::entry::{L2Entry, State};
use crate::image::Qcow2;
use crate::layout::ZERO;

impl Qcow2 {
    /// The part of a range that consists of whole units, on a disk that ends at `disk_end`; the last
    /// unit of the disk may be short.
    fn whole_units(at: GuestOffset, len: u64, unit: u64, disk_end: u64) -> Range<u64> {
        let start = at.0.next_multiple_of(unit);
        let end = at.0 + len;
        let end = if end == disk_end { end } else { align_down(end, unit) };
        start..end.max(start)
    }

    /// Runs `change` over the clusters of a range, one L2 table at a time. Skips missing tables
    /// unless `make_tables`. If the disk no longer ends at `disk_end`, stops before a cluster that
    /// the range only touches, since what was beyond the end may have data now.
    ///
    /// Returns the end of the part that was done.
    fn for_clusters(
        &self,
        range: &Range<u64>,
        disk_end: u64,
        make_tables: bool,
        mut change: impl FnMut(u64, L2Entry) -> L2Entry,
    ) -> Result<u64> {
        let (cluster, span) = (self.geometry.cluster_bytes(), self.geometry.l2_span());
        let mut at = align_down(range.start, cluster);
        let mut end = range.end.next_multiple_of(cluster);
        while at < end {
            self.relieve_cache()?;
            let mut meta = self.meta.lock();
            let clusters = at..((at / span + 1) * span).min(end);
            self.meta.wait_until(&mut meta, |meta| !meta.tickets.overlap(&clusters));
            let disk = self.guest_len();
            if disk != disk_end {
                end = end.min(align_down(range.end.min(disk), cluster));
            }
            let next = clusters.end.min(end);
            if at >= next {
                break;
            }
            let (clusters, l1_index) = (at..next, self.geometry.l1_index(GuestOffset(at)));
            if make_tables || self.l2_table(l1_index)?.is_some() {
                self.before_change(&mut meta)?;
                if self.writable_l2(&mut meta, l1_index)?.is_none() {
                    continue;
                }
                self.load_entries(&clusters)?;
                self.change_entries(&mut meta, &clusters, true, &mut change)?;
            }
            at = next;
        }
        Ok(range.end.min(at).max(range.start))
    }

    /// As [`vdkit_block::Format::zero`]; with `persistent`, as
    /// [`vdkit_block::Overlay::zero_persistent`]: clusters without an entry get a zero entry.
    pub(crate) fn zero_range(
        &self,
        at: GuestOffset,
        len: u64,
        may_unmap: bool,
        persistent: bool,
    ) -> Result<Range<u64>> {
        let (nothing, disk_end) = (at.0..at.0, self.guest_len());
        if self.header.data_file_raw() {
            // The data file must read as the guest disk, so it must contain the zeroes.
            return Ok(nothing);
        }
        if self.header.version() < 3 {
            // No zero flag: only a hole without a backing image, also none added later, reads as
            // zero.
            if self.has_backing() || !may_unmap || persistent {
                return Ok(nothing);
            }
            let range = Self::whole_units(at, len, self.geometry.cluster_bytes(), disk_end);
            if range.is_empty() {
                return Ok(nothing);
            }
            let end = self.for_clusters(&range, disk_end, false, |_, _| L2Entry::default())?;
            return Ok(range.start..end);
        }
        let unit = self.geometry.subcluster_bytes();
        let mut range = Self::whole_units(at, len, unit, disk_end);
        self.leave_compressed_edges(&mut range, disk_end)?;
        if range.is_empty() {
            return Ok(nothing);
        }
        let cluster = self.geometry.cluster_bytes();
        // Includes the part of the last cluster beyond the end of the disk: a compressed cluster is
        // zeroed as a whole or not at all.
        let end =
            if range.end == disk_end { range.end.next_multiple_of(cluster) } else { range.end };
        let make_tables = persistent || self.has_backing();
        let done = self.for_clusters(&range, disk_end, make_tables, |at, old| {
            let from = range.start.max(at) - at;
            let to = end.min(at + cluster) - at;
            let bits =
                (((1u128 << to.div_ceil(unit)) - 1) >> (from / unit) << (from / unit)) as u32;
            let bits = if self.geometry.extended { bits } else { u32::MAX };
            if persistent && old == L2Entry::default() {
                self.zero_mark(bits)
            } else {
                self.zeroed(old, bits, may_unmap)
            }
        })?;
        Ok(range.start..done)
    }

    /// Excludes partial compressed clusters at the edges: their single subclusters cannot be
    /// zeroed.
    fn leave_compressed_edges(&self, range: &mut Range<u64>, disk_end: u64) -> Result<()> {
        let cluster = self.geometry.cluster_bytes();
        if range.is_empty() || !self.geometry.extended {
            return Ok(());
        }
        if !range.start.is_multiple_of(cluster)
            && self.entry_at(GuestOffset(range.start))?.is_compressed()
        {
            range.start = range.start.next_multiple_of(cluster);
        }
        let partial = !range.end.is_multiple_of(cluster) && range.end != disk_end;
        if range.start < range.end
            && partial
            && self.entry_at(GuestOffset(range.end - 1))?.is_compressed()
        {
            range.end = align_down(range.end, cluster);
        }
        range.end = range.end.max(range.start);
        Ok(())
    }

    /// The entry of a cluster without space whose subclusters in `bits` read as zero.
    fn zero_mark(&self, bits: u32) -> L2Entry {
        if self.geometry.extended {
            L2Entry { word: 0, bitmap: u64::from(bits) << 32 }
        } else {
            L2Entry::zero_plain(&self.geometry)
        }
    }

    /// An entry whose subclusters in `bits` read as zero (all of them in a standard entry).
    pub(crate) fn zeroed(&self, old: L2Entry, bits: u32, may_unmap: bool) -> L2Entry {
        let geometry = &self.geometry;
        let data_file = self.has_data_file();
        let space = old.has_space(data_file);
        if old == L2Entry::default() && !self.has_backing() {
            return old;
        }
        let keep = space && old.is_copied() && !may_unmap;
        if !geometry.extended {
            return match old.state(0, geometry, data_file) {
                State::ZeroPlain => old,
                _ if keep => L2Entry { word: old.word | ZERO, bitmap: 0 },
                _ => L2Entry::zero_plain(geometry),
            };
        }
        if old.is_compressed() {
            // Edges were excluded, so the whole cluster is zeroed. If a compressed write raced with
            // a partial range, its newer data is kept.
            return if bits == u32::MAX { L2Entry::zero_plain(geometry) } else { old };
        }
        let bitmap = (old.bitmap & !u64::from(bits)) | (u64::from(bits) << 32);
        let nothing_left = bitmap as u32 == 0 && (bitmap >> 32) as u32 == u32::MAX;
        if nothing_left && !keep {
            L2Entry::zero_plain(geometry)
        } else {
            L2Entry { word: old.word, bitmap }
        }
    }

    /// As [`vdkit_block::Format::discard`].
    pub(crate) fn discard_range(&self, at: GuestOffset, len: u64) -> Result<()> {
        let disk_end = self.guest_len();
        let range = Self::whole_units(at, len, self.geometry.cluster_bytes(), disk_end);
        if range.is_empty() {
            return Ok(());
        }
        if self.header.data_file_raw() {
            return self.data.discard(HostOffset(range.start), range.end - range.start);
        }
        let v3 = self.header.version() >= 3;
        if !v3 && self.has_backing() {
            return Ok(()); // nothing in a version 2 image could hide the backing data
        }
        let (geometry, data_file) = (self.geometry, self.has_data_file());
        self.for_clusters(&range, disk_end, false, |_, old| {
            let used = old.is_compressed() || old.has_space(data_file);
            match (used, v3) {
                (false, _) => old,
                (true, true) => L2Entry::zero_plain(&geometry),
                (true, false) => L2Entry::default(),
            }
        })
        .map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vdkit_block::{Format, Limits, Monitor, NewSnapshot, OpenRequest, Snapshots, Storage};
    use vdkit_storage::MemoryStorage;
    use vdkit_testbase::create_image;

    use super::*;
    use crate::Qcow2Driver;

    const CLUSTER: u64 = 4096;
    const SPAN: u64 = CLUSTER * CLUSTER / 8;

    fn image(guest_bytes: u64) -> Arc<Qcow2> {
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
        create_image(&Qcow2Driver, storage.clone(), guest_bytes, "cluster_size=4K");
        let limits = Limits::default();
        Qcow2::open(OpenRequest { storage, files: Vec::new(), writable: true, limits }).unwrap()
    }

    fn write(image: &Qcow2, at: u64) {
        image.reserve(GuestOffset(at), 512).unwrap().unwrap().publish().unwrap();
    }

    fn has_data(image: &Qcow2, at: u64) -> bool {
        image.entry_at(GuestOffset(at)).unwrap().has_space(false)
    }

    /// A request that has waited for another one, while the disk grew and was written behind its old
    /// end.
    #[test]
    fn what_was_to_the_end_of_a_smaller_disk_leaves_what_is_behind_it() {
        let end = SPAN + CLUSTER + 512;
        for grown in [end + 512, 3 * SPAN] {
            let image = image(end);
            [0, SPAN, SPAN + CLUSTER].into_iter().for_each(|at| write(&image, at));
            image.resize(grown).unwrap();
            let done = image.for_clusters(&(0..end), end, false, |_, _| L2Entry::default());
            assert_eq!(done.unwrap(), SPAN + CLUSTER);
            assert!(!has_data(&image, 0) && !has_data(&image, SPAN));
            assert!(has_data(&image, SPAN + CLUSTER));
            // Of a disk that has not changed, it is the last one.
            let (range, all) = (0..grown, |_: u64, _: L2Entry| L2Entry::default());
            assert_eq!(image.for_clusters(&range, grown, false, all).unwrap(), grown);
            assert!(!has_data(&image, SPAN + CLUSTER));
        }
    }

    #[test]
    fn what_was_to_the_end_of_a_larger_disk_ends_where_the_disk_does() {
        let image = image(SPAN);
        let new = NewSnapshot { name: "small".into(), ..NewSnapshot::default() };
        image.create(&new, &Monitor::default()).unwrap();
        let large = 4000 * SPAN;
        image.resize(large).unwrap();
        Snapshots::apply(&*image, "small", &Monitor::default()).unwrap();
        let range = SPAN - CLUSTER..large;
        let done = image.for_clusters(&range, large, true, |_, _| image.zero_mark(u32::MAX));
        assert_eq!(done.unwrap(), SPAN);
        let beyond = 3000 * SPAN..large;
        let done = image.for_clusters(&beyond, large, true, |_, _| image.zero_mark(u32::MAX));
        assert_eq!(done.unwrap(), beyond.start);
    }
}
