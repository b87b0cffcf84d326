//! Zeroes and discards by changing only metadata.

use std::ops::Range;

use vdkit_block::{GuestOffset, HostOffset, Result, align_down};

use crate::entry::{L2Entry, State};
use crate::image::Qcow2;
use crate::layout::ZERO;

impl Qcow2 {
    /// The part of a range that consists of whole units; the last unit of the disk may be short.
    fn whole_units(&self, at: GuestOffset, len: u64, unit: u64) -> Range<u64> {
        let start = at.0.next_multiple_of(unit);
        let end = at.0 + len;
        let end = if end == self.guest_len() { end } else { align_down(end, unit) };
        start..end.max(start)
    }

    /// Runs `change` over the clusters of a range, one L2 table at a time. Skips missing tables
    /// unless `make_tables`.
    fn for_clusters(
        &self,
        range: &Range<u64>,
        make_tables: bool,
        mut change: impl FnMut(u64, L2Entry) -> L2Entry,
    ) -> Result<()> {
        let (cluster, span) = (self.geometry.cluster_bytes(), self.geometry.l2_span());
        let mut at = align_down(range.start, cluster);
        let end = range.end.next_multiple_of(cluster);
        while at < end {
            let next = ((at / span + 1) * span).min(end);
            let l1_index = self.geometry.l1_index(GuestOffset(at));
            self.relieve_cache()?;
            let mut meta = self.meta.lock();
            let clusters = at..next;
            self.meta.wait_until(&mut meta, |meta| !meta.tickets.overlap(&clusters));
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
        Ok(())
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
        let nothing = at.0..at.0;
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
            let range = self.whole_units(at, len, self.geometry.cluster_bytes());
            if range.is_empty() {
                return Ok(nothing);
            }
            self.for_clusters(&range, false, |_, _| L2Entry::default())?;
            return Ok(range);
        }
        let unit = self.geometry.subcluster_bytes();
        let mut range = self.whole_units(at, len, unit);
        self.leave_compressed_edges(&mut range)?;
        if range.is_empty() {
            return Ok(nothing);
        }
        let cluster = self.geometry.cluster_bytes();
        // Includes the part of the last cluster beyond the end of the disk: a compressed cluster is
        // zeroed as a whole or not at all.
        let end = if range.end == self.guest_len() {
            range.end.next_multiple_of(cluster)
        } else {
            range.end
        };
        self.for_clusters(&range, persistent || self.has_backing(), |at, old| {
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
        Ok(range)
    }

    /// Excludes partial compressed clusters at the edges: their single subclusters cannot be
    /// zeroed.
    fn leave_compressed_edges(&self, range: &mut Range<u64>) -> Result<()> {
        let cluster = self.geometry.cluster_bytes();
        if range.is_empty() || !self.geometry.extended {
            return Ok(());
        }
        if !range.start.is_multiple_of(cluster)
            && self.entry_at(GuestOffset(range.start))?.is_compressed()
        {
            range.start = range.start.next_multiple_of(cluster);
        }
        let partial = !range.end.is_multiple_of(cluster) && range.end != self.guest_len();
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
        let range = self.whole_units(at, len, self.geometry.cluster_bytes());
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
        self.for_clusters(&range, false, |_, old| {
            let used = old.is_compressed() || old.has_space(data_file);
            match (used, v3) {
                (false, _) => old,
                (true, true) => L2Entry::zero_plain(&geometry),
                (true, false) => L2Entry::default(),
            }
        })
    }
}
