//! Releases clusters of zeroes, and L2 tables that map nothing.

use rustc_hash::FxHashMap;
use vdkit_block::{CompactReport, HostOffset, ReadOp, Result, is_zero};

use super::space::Space;
use super::tables;
use crate::check::image::Image;
use crate::check::mapping::{L2Table, entry_at};
use crate::entry::L2Entry;
use crate::header::Encryption;
use crate::layout::{SUBCLUSTERS, ZERO};
use crate::structures::words_mut;

/// Bytes of data examined together.
const READ_BYTES: u64 = 4 << 20;

/// Releases clusters whose data is zero (data is read only with `scan`), and empty tables.
pub(super) fn drop_zeroes(
    space: &mut Space<'_>,
    scan: bool,
    report: &mut CompactReport,
) -> Result<()> {
    let tables = space.survey.tables.clone();
    // Zeroes on disk are not zeroes to the guest of an encrypted disk.
    let scan = scan && space.image.header.encryption == Encryption::None;
    let mut freed: Vec<(u64, u64)> = Vec::new();
    let mut empty: FxHashMap<u64, u64> = FxHashMap::default();
    for (done, table) in tables.iter().enumerate() {
        space.monitor.cancel.check()?;
        space.monitor.progress.update(done as u64, tables.len() as u64);
        let old = space.image.read_cluster(table.offset)?;
        let mut new = old.clone();
        if !space.image.header.has_data_file() {
            Zeroes { space, table, scan }.free(&mut new, &mut freed, report)?;
        }
        if is_empty(&space.image, &new) {
            empty.insert(table.offset, 0);
        }
        space.image.write_changed(table.offset, &old, &new)?;
        space.release_many(&mut freed)?;
    }
    if !freed.is_empty() {
        space.release(freed)?;
    }
    if !empty.is_empty() {
        // Unlinking needs no space, so all empty tables are unlinked at once.
        tables::point_l1s(space, &empty)?;
        let bits = space.image.geometry().cluster_bits;
        let gone = tables.iter().filter(|table| empty.contains_key(&table.offset));
        report.empty_tables += gone.clone().count() as u64;
        space.release(gone.map(|table| (table.offset >> bits, table.references())))?;
    }
    Ok(())
}

/// Whether the disk reads the same without this table.
fn is_empty(image: &Image, table: &[u8]) -> bool {
    if is_zero(table) {
        return true;
    }
    // Without a backing file, a zero cluster equals a hole. With a data file, only the entry's flag
    // may record that a cluster has space there.
    if image.header.backing_name.is_some() || image.header.has_data_file() {
        return false;
    }
    L2Entry::all(table, image.geometry())
        .all(|entry| entry.word & !ZERO == 0 && entry.bitmap as u32 == 0)
}

/// Number of candidates from the first on that are consecutive in the file.
fn neighbors(candidates: &[(u64, usize)]) -> usize {
    1 + candidates.windows(2).take_while(|pair| pair[0].0 + 1 == pair[1].0).count()
}

/// One table whose clusters are examined.
struct Zeroes<'a, 'b> {
    space: &'a Space<'b>,
    table: &'a L2Table,
    scan: bool,
}

impl Zeroes<'_, '_> {
    /// Changes the entries of clusters that hold zeroes; adds released clusters to `freed`.
    fn free(
        &self,
        bytes: &mut [u8],
        freed: &mut Vec<(u64, u64)>,
        report: &mut CompactReport,
    ) -> Result<()> {
        let image = &self.space.image;
        let (extended, words) = (image.geometry().extended, image.geometry().l2_entry_words());
        if image.header.version < 3 && image.header.backing_name.is_some() {
            // Nothing could hide the backing file.
            return Ok(());
        }
        let mut candidates: Vec<(u64, usize)> = Vec::new();
        for (index, entry) in L2Entry::all(bytes, image.geometry()).enumerate() {
            if entry.is_compressed() || !entry.has_space(false) {
                continue;
            }
            let host = image.geometry().host_cluster(entry.host());
            // A reference from another table would keep the cluster.
            let sole = self.space.references(host) == self.table.references();
            if sole && !self.space.is_metadata(host) {
                candidates.push((host, index));
            }
        }
        candidates.sort_unstable();
        let step = (READ_BYTES / image.cluster_bytes()).max(1) as usize;
        let mut at = 0;
        while at < candidates.len() {
            let group = &candidates[at..(at + self.holes_or(step, &candidates[at..])?)];
            let masks = self.zero_masks(group, bytes)?;
            for (&(host, index), mask) in group.iter().zip(masks) {
                let old = entry_at(bytes, index, extended);
                let new = self.without(old, mask);
                if new == old {
                    continue;
                }
                new.encode(&mut words_mut(bytes)[index * words..][..words]);
                if !new.has_space(false) {
                    freed.push((host, self.table.references()));
                    report.zero_clusters += 1;
                }
            }
            at += group.len();
        }
        Ok(())
    }

    /// Number of candidates to examine together: a whole run of holes, or `step`.
    fn holes_or(&self, step: usize, candidates: &[(u64, usize)]) -> Result<usize> {
        let step = step.min(candidates.len());
        let run = neighbors(candidates);
        if !self.scan || run <= step {
            return Ok(step);
        }
        let (hole, clusters) = self.look(candidates[0].0, run as u64)?;
        Ok(if hole { clusters as usize } else { step })
    }

    /// Whether the clusters from `first` on are holes, and for how many of `count` (at least one)
    /// that holds.
    fn look(&self, first: u64, count: u64) -> Result<(bool, u64)> {
        let storage = &*self.space.image.storage;
        if !storage.may_have_holes()? {
            return Ok((false, count));
        }
        let offset = HostOffset(self.space.offset(first));
        let extent = storage.extent_at(offset, self.space.offset(count))?;
        let cluster = self.space.image.cluster_bytes();
        let hole = !extent.data && extent.len >= cluster;
        let clusters = if hole { extent.len / cluster } else { extent.len.div_ceil(cluster) };
        Ok((hole, clusters.clamp(1, count)))
    }

    /// The zero parts of each candidate: one bit per subcluster, or the lowest bit.
    fn zero_masks(&self, group: &[(u64, usize)], table: &[u8]) -> Result<Vec<u32>> {
        let image = &self.space.image;
        let geometry = image.geometry();
        let unread = |index: usize| {
            let entry = entry_at(table, index, geometry.extended);
            let known = !geometry.extended && entry.word & ZERO != 0;
            // No allocated subcluster, so there is no data to read.
            known || (geometry.extended && entry.bitmap as u32 == 0)
        };
        let mut masks: Vec<u32> =
            group.iter().map(|&(_, index)| if unread(index) { u32::MAX } else { 0 }).collect();
        if !self.scan {
            return Ok(masks);
        }
        let mut at = 0;
        let mut wanted = Vec::new();
        while at < group.len() {
            let run = neighbors(&group[at..]) as u64;
            let (hole, clusters) = self.look(group[at].0, run)?;
            let next = at + clusters as usize;
            if hole {
                masks[at..next].fill(u32::MAX);
            } else {
                wanted.extend((at..next).filter(|&i| masks[i] == 0));
            }
            at = next;
        }
        let cluster = image.cluster_bytes() as usize;
        let mut bytes = vec![0; wanted.len() * cluster];
        let mut ops: Vec<ReadOp<'_>> = Vec::new();
        let mut rest = &mut bytes[..];
        let mut next = 0;
        while next < wanted.len() {
            let first = wanted[next];
            let hosts = wanted[next..].iter().map(|&i| group[i].0);
            let run = hosts.zip(group[first].0..).take_while(|(host, next)| host == next).count();
            let (buf, others) = rest.split_at_mut(run * cluster);
            ops.push(ReadOp { offset: HostOffset(self.space.offset(group[first].0)), buf });
            rest = others;
            next += run;
        }
        image.storage.read_batch(&mut ops)?;
        let part = if geometry.extended { cluster / SUBCLUSTERS as usize } else { cluster };
        for (&i, data) in wanted.iter().zip(bytes.chunks_exact(cluster)) {
            let parts = data.chunks_exact(part).map(is_zero).enumerate();
            masks[i] = parts.fold(0, |mask, (bit, zero)| mask | u32::from(zero) << bit);
        }
        Ok(masks)
    }

    /// The new entry if the parts in `mask` hold zeroes.
    fn without(&self, old: L2Entry, mask: u32) -> L2Entry {
        let image = &self.space.image;
        if !image.geometry().extended {
            return match mask {
                0 => old,
                _ if image.header.version >= 3 => L2Entry { word: ZERO, bitmap: 0 },
                _ => L2Entry::default(),
            };
        }
        let zero = u64::from(old.bitmap as u32 & mask);
        let bitmap = old.bitmap & !zero | zero << 32;
        let word = if bitmap as u32 == 0 { 0 } else { old.word };
        L2Entry { word, bitmap }
    }
}
