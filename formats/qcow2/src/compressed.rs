//! Space for compressed clusters, which are stored back to back and share host clusters.

use std::ops::Range;

use vdkit_block::{CompressedReservation, Error, FileIndex, GuestOffset, HostOffset, Result};
use vdkit_meta::MutexGuard;

use crate::entry::L2Entry;
use crate::image::{Meta, Qcow2};
use crate::pool::Space;
use crate::write::Pending;

/// Host offset and bytes of the compressed form of each of several clusters.
pub(crate) type Units = Vec<(HostOffset, u32)>;

/// A contiguous stretch of host bytes for compressed clusters.
struct Region {
    start: HostOffset,
    end: HostOffset,
    /// Clusters from here on were just taken: their refcount of 1 counts their first unit.
    untouched: u64,
    taken: Option<Space>,
}

impl Qcow2 {
    /// As [`vdkit_block::CompressedWriter::reserve_compressed`].
    pub(crate) fn reserve_compressed(
        &self,
        at: GuestOffset,
        lens: &[u32],
    ) -> Result<CompressedReservation<'_>> {
        let cluster = self.geometry.cluster_bytes();
        self.check_compressed(at, lens)?;
        self.relieve_cache()?;
        let mut meta = self.meta.lock();
        let units = loop {
            let end = self.claim(&mut meta, at, at.0 + lens.len() as u64 * cluster);
            self.check_compressed(at, lens)?;
            let lens = &lens[..((end - at.0) / cluster) as usize];
            self.before_change(&mut meta)?;
            if self.writable_l2(&mut meta, self.geometry.l1_index(at))?.is_none() {
                continue;
            }
            match self.place_compressed(&mut meta, lens)? {
                None => {}
                Some(units) if !units.is_empty() => break units,
                // The partly filled cluster has reached the largest refcount.
                Some(_) => meta.space.compressed_at = None,
            }
        };
        let host = units[0].0;
        let count = units.len();
        let clusters = at.0..at.0 + count as u64 * cluster;
        let ticket = meta.tickets.open(clusters, Pending::Compressed(units));
        Ok(CompressedReservation::new(self, ticket, FileIndex(0), host, count))
    }

    fn check_compressed(&self, at: GuestOffset, lens: &[u32]) -> Result<()> {
        let cluster = self.geometry.cluster_bytes();
        let file = self.storage.name();
        if self.has_data_file() {
            return Err(Error::unsupported(
                file,
                "not supported: compressed clusters in an image with a data file",
                "leave out the compression or the data file",
            ));
        }
        if self.encryption.is_some() {
            return Err(Error::unsupported(
                file,
                "not supported: compressed clusters in an encrypted image",
                "leave out the compression or the encryption",
            ));
        }
        let end = at.0.checked_add((lens.len() as u64).saturating_mul(cluster));
        let fits = self.geometry.in_cluster(at) == 0
            && !lens.is_empty()
            && lens.iter().all(|&len| len > 0 && u64::from(len) < cluster)
            && end.is_some_and(|end| end <= self.guest_len().next_multiple_of(cluster));
        if fits {
            return Ok(());
        }
        Err(Error::invalid_for(
            &file,
            format!(
                "compressed clusters at guest offset {at} must be whole, smaller than \
             {cluster} bytes and within the disk"
            ),
        ))
    }

    /// Places the first units and counts their references. Places no unit if the refcount of the
    /// partly filled cluster is at its maximum. `None`: as for [`Qcow2::allocate`].
    fn place_compressed(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        lens: &[u32],
    ) -> Result<Option<Units>> {
        let total = lens.iter().map(|&l| u64::from(l)).sum();
        let Some(mut region) = self.compressed_region(meta, total, lens[0].into())? else {
            return Ok(None);
        };
        let mut units = Vec::with_capacity(lens.len());
        let counted = self.count_compressed(meta, &mut region, lens, &mut units);
        if let Some(space) = region.taken {
            let end = space.first + space.count;
            let first = region.untouched.clamp(space.first, end);
            if first < end {
                meta.space.pool.add(Space { first, count: end - first, ..space });
            }
        }
        match counted {
            Ok(full) if !units.is_empty() => {
                let room = !full && self.geometry.in_cluster(GuestOffset(region.start.0)) != 0;
                meta.space.compressed_at = room.then_some(region.start);
            }
            Ok(_) => {}
            Err(error) => {
                self.unreserve_compressed(meta, &units);
                return Err(error);
            }
        }
        Ok(Some(units))
    }

    /// Counts the references of as many units as fit, appends them to `units`, and advances the
    /// region's start. Returns whether a cluster has reached the largest refcount.
    fn count_compressed(
        &self,
        meta: &mut Meta,
        region: &mut Region,
        lens: &[u32],
        units: &mut Units,
    ) -> Result<bool> {
        let refcounts = &mut meta.space.refcounts;
        for &len in lens {
            let offset = region.start;
            if offset.0 + u64::from(len) > region.end.0 {
                break;
            }
            let (first, last) = self.touched(offset, len);
            // A unit is smaller than a cluster, so only the first cluster that it touches can hold
            // other units.
            if first < region.untouched {
                let count = refcounts.get(first, &*self.storage)?;
                if count >= self.geometry.refcount_max() {
                    return Ok(true);
                }
                refcounts.set(first, count + 1, &*self.storage)?;
            }
            region.untouched = region.untouched.max(last + 1);
            units.push((offset, len));
            region.start = offset + u64::from(len);
        }
        Ok(false)
    }

    /// First and last host cluster of a unit's sectors.
    fn touched(&self, offset: HostOffset, len: u32) -> (u64, u64) {
        let bits = self.geometry.cluster_bits;
        (offset.0 >> bits, (offset.0 + u64::from(len) - 1) >> bits)
    }

    /// A region of at least `least` and at best `total` bytes, directly after the last unit if
    /// possible. `None`: as for [`Qcow2::allocate`].
    fn compressed_region(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        total: u64,
        least: u64,
    ) -> Result<Option<Region>> {
        let bits = self.geometry.cluster_bits;
        let cluster = self.geometry.cluster_bytes();
        // Largest offset that a compressed cluster's entry can hold.
        let limit = 1 << self.geometry.compressed_offset_bits();
        if let Some(start) = meta.space.compressed_at {
            let next = (start.0 >> bits) + 1;
            let room = (next << bits) - start.0;
            let more = total.saturating_sub(room).div_ceil(cluster);
            let mut taken = meta.space.pool.take_at(next, more);
            if taken.is_none() && more > 0 && next == self.frontier() {
                match self.allocate(meta, more, None)? {
                    Some(space) => meta.space.pool.add(space),
                    None => return Ok(None),
                }
                if meta.space.compressed_at != Some(start) {
                    // Its cluster was freed and may have another owner now.
                    return Ok(None);
                }
                taken = meta.space.pool.take_at(next, more);
            }
            let end = ((next + taken.map_or(0, |s| s.count)) << bits).min(limit);
            if end - start.0 >= least {
                return Ok(Some(Region { start, end: HostOffset(end), untouched: next, taken }));
            }
            if let Some(space) = taken {
                meta.space.pool.add(space);
            }
        }
        let Some(space) = self.allocate(meta, total.div_ceil(cluster), None)? else {
            return Ok(None);
        };
        let start = HostOffset(space.first << bits);
        let end = start + (space.count << bits);
        if end.0 > limit {
            meta.space.pool.add(space);
            let what = "an entry of a compressed cluster cannot name so large a host offset";
            return Err(Error::no_space(self.storage.name(), what));
        }
        Ok(Some(Region { start, end, untouched: space.first, taken: Some(space) }))
    }

    /// Drops the references of unpublished units.
    pub(crate) fn unreserve_compressed(&self, meta: &mut Meta, units: &[(HostOffset, u32)]) {
        for &(offset, len) in units {
            let (first, last) = self.touched(offset, len);
            for cluster in first..=last {
                // A failure leaves a leak.
                if let Ok(true) = self.drop_reference(meta, cluster) {
                    // Its refcount may not be durable yet.
                    let sequence = meta.space.flush_sequence;
                    let space = Space { first: cluster, count: 1, fresh: false, sequence };
                    meta.space.pool.add(space);
                }
            }
        }
    }

    pub(crate) fn link_compressed(
        &self,
        meta: &mut Meta,
        clusters: &Range<u64>,
        units: &[(HostOffset, u32)],
    ) -> Result<()> {
        let (geometry, start) = (self.geometry, clusters.start);
        // Shared host clusters gained references, and the data may be in reused space.
        meta.dirty.refcounts_first = true;
        meta.dirty.data_first = true;
        self.change_entries(meta, clusters, false, |at, _old| {
            let (offset, len) = units[((at - start) >> geometry.cluster_bits) as usize];
            L2Entry::compressed(offset, len.into(), &geometry)
        })
    }
}
