//! Refcounts of host clusters: the table in memory, blocks in slices of up to 4 KiB.
//!
//! All operations run under the image's metadata lock.

use std::collections::BTreeSet;
use std::ops::Range;

use rustc_hash::FxHashMap;
use vdkit_block::{Error, HostOffset, Remedy, Result, Storage, is_zero};
use zerocopy::big_endian::{U16, U32, U64};

use crate::flush::{PIECE_BYTES, Writes, copy_runs, runs, write_pieces};
use crate::header::Header;
use crate::layout::{Geometry, HOST_OFFSET_END};
use crate::structures::{self, entries, entries_mut};

const SLICE_BYTES: u64 = 4096;
/// Clean slices beyond this number are dropped: 4 MiB.
const SLICES_MAX: usize = 1024;

/// Refcount table and cached blocks.
#[derive(Debug)]
pub(crate) struct Refcounts {
    geometry: Geometry,
    pub(crate) table_offset: HostOffset,
    /// Host offsets of the refcount blocks; 0 for none.
    pub(crate) table: Vec<u64>,
    slices: FxHashMap<u64, Vec<u8>>,
    dirty: BTreeSet<u64>,
    /// Slices whose copies are being written, which must not be reread from disk meanwhile.
    writing: BTreeSet<u64>,
    /// Indexes of changed table entries.
    dirty_table: BTreeSet<usize>,
    /// From this cluster on, every refcount that is not cached is 0, whatever the file holds.
    zero_from: u64,
}

/// The place of one refcount: the host offset of its slice and its index there.
struct Place {
    slice: u64,
    index: u64,
    /// The first cluster that the slice describes.
    first: u64,
}

impl Refcounts {
    pub(crate) fn read(header: &Header, storage: &dyn Storage) -> Result<Self> {
        let geometry = header.geometry;
        let bytes = u64::from(header.refcount_table_clusters) << geometry.cluster_bits;
        // One read of any size, into the stack if it fits.
        let (mut small, mut large);
        let raw: &mut [u8] = if bytes <= PIECE_BYTES as u64 {
            small = [0; PIECE_BYTES];
            &mut small[..bytes as usize]
        } else {
            large = vec![0; bytes as usize];
            &mut large
        };
        storage.read_padded(raw, header.refcount_table_offset)?;
        // A table has room for far more blocks than most images have. Zero pages of it are left
        // untouched after the zeroed allocation, so that they use no memory.
        let mut table = vec![0; raw.len() / 8];
        for (words, piece) in table.chunks_mut(512).zip(raw.chunks(4096)) {
            if is_zero(piece) {
                continue;
            }
            for (word, entry) in words.iter_mut().zip(structures::words(piece)) {
                *word = entry.get();
            }
        }
        // A block beyond the end of the file would read as zeroes, and the clusters that it
        // describes would be allocated again.
        let end = storage.len()?.min(HOST_OFFSET_END);
        for (index, &entry) in table.iter().enumerate() {
            if entry & (geometry.cluster_bytes() - 1) != 0 || entry >= end {
                return Err(Error::corrupt(
                    storage.name(),
                    header.refcount_table_offset.0 + index as u64 * 8,
                    "refcount table entry",
                    format!("{entry:#x}"),
                    format!("a host offset at a cluster boundary, within the file of {end} bytes"),
                )
                .with_remedy(Remedy::REPAIR));
            }
        }
        Ok(Self::new(geometry, header.refcount_table_offset, table))
    }

    fn new(geometry: Geometry, table_offset: HostOffset, table: Vec<u64>) -> Self {
        Self {
            geometry,
            table_offset,
            table,
            slices: FxHashMap::default(),
            dirty: BTreeSet::new(),
            writing: BTreeSet::new(),
            dirty_table: BTreeSet::new(),
            zero_from: u64::MAX,
        }
    }

    /// Refcounts of a read-only image.
    pub(crate) fn empty(header: &Header) -> Self {
        Self::new(header.geometry, header.refcount_table_offset, Vec::new())
    }

    /// One past the last cluster that a block describes.
    pub(crate) fn covered_end(&self) -> u64 {
        let blocks = self.table.iter().rposition(|&e| e != 0).map_or(0, |i| i as u64 + 1);
        blocks << self.geometry.refcount_block_bits()
    }

    /// Shortens the table in memory after a failed attempt to extend it.
    pub(crate) fn truncate_table(&mut self, len: usize) {
        self.table.truncate(len);
        self.dirty_table.split_off(&len);
    }

    fn slice_bytes(&self) -> u64 {
        SLICE_BYTES.min(self.geometry.cluster_bytes())
    }

    fn slice_entries(&self) -> u64 {
        self.slice_bytes() * 8 / u64::from(self.geometry.refcount_bits())
    }

    /// The first cluster that the table cannot describe.
    pub(crate) fn table_end(&self) -> u64 {
        (self.table.len() as u64) << self.geometry.refcount_block_bits()
    }

    pub(crate) fn block_index(&self, cluster: u64) -> usize {
        (cluster >> self.geometry.refcount_block_bits()) as usize
    }

    /// Whether a block describes this cluster.
    pub(crate) fn covered(&self, cluster: u64) -> bool {
        self.table.get(self.block_index(cluster)).is_some_and(|&offset| offset != 0)
    }

    /// Sets a table entry; written with the next flush.
    pub(crate) fn set_block(&mut self, index: usize, offset: HostOffset) {
        self.table[index] = offset.0;
        self.dirty_table.insert(index);
    }

    fn place(&self, cluster: u64) -> Option<Place> {
        let block = *self.table.get(self.block_index(cluster))?;
        if block == 0 {
            return None;
        }
        let in_block = cluster & (self.geometry.refcount_block_entries() - 1);
        let entries = self.slice_entries();
        Some(Place {
            slice: block + in_block / entries * self.slice_bytes(),
            index: in_block % entries,
            first: cluster - in_block % entries,
        })
    }

    /// Whether no two table entries name the same block.
    pub(crate) fn blocks_differ(&self) -> bool {
        let mut blocks: Vec<u64> = self.table.iter().copied().filter(|&entry| entry != 0).collect();
        blocks.sort_unstable();
        blocks.windows(2).all(|pair| pair[0] != pair[1])
    }

    /// Treats all refcounts from `cluster` on as 0 without reading them: nothing in the image
    /// refers to these clusters, so nonzero refcounts in the file are leaks. Must precede the first
    /// lookup.
    pub(crate) fn zero_from(&mut self, cluster: u64) {
        debug_assert!(self.slices.is_empty());
        self.zero_from = cluster;
    }

    /// Loads a slice. If it must be read, reads up to `count` consecutive slices of the block with
    /// it.
    fn load_run(
        &mut self,
        place: &Place,
        count: u64,
        storage: &dyn Storage,
    ) -> Result<&mut Vec<u8>> {
        let slice = place.slice;
        if !self.slices.contains_key(&slice) {
            if self.slices.len() >= SLICES_MAX {
                let (dirty, writing) = (&self.dirty, &self.writing);
                self.slices.retain(|key, _| dirty.contains(key) || writing.contains(key));
            }
            let step = self.slice_bytes();
            let unknown = self.zero_from.saturating_sub(place.first).div_ceil(self.slice_entries());
            if unknown == 0 {
                // The slice may be written, dropped and read again, so the file is authoritative up
                // to its end.
                self.zero_from = place.first + self.slice_entries();
                return Ok(self.slices.entry(slice).or_insert_with(|| vec![0; step as usize]));
            }
            let count = count.min(unknown).min(PIECE_BYTES as u64 / step);
            let wanted = slice..slice + count * step;
            let absent = |key: &u64| !self.slices.contains_key(key);
            let count = wanted.step_by(step as usize).take_while(absent).count();
            let mut bytes = [0; PIECE_BYTES];
            let bytes = &mut bytes[..count * step as usize];
            storage.read_padded(bytes, HostOffset(slice))?;
            for (key, bytes) in (slice..).step_by(step as usize).zip(bytes.chunks(step as usize)) {
                self.slices.insert(key, bytes.to_vec());
            }
        }
        Ok(self.slices.entry(slice).or_default())
    }

    /// Number of slices of one block that hold the refcounts of `clusters` clusters from `place`.
    fn slices_to(&self, place: &Place, clusters: u64) -> u64 {
        (place.index + clusters).div_ceil(self.slice_entries()).max(1)
    }

    /// The refcount of a cluster; 0 if no block describes it.
    pub(crate) fn get(&mut self, cluster: u64, storage: &dyn Storage) -> Result<u64> {
        let Some(place) = self.place(cluster) else { return Ok(0) };
        let order = self.geometry.refcount_order;
        let bytes = self.load_run(&place, 1, storage)?;
        Ok(get_refcount(bytes, place.index, order))
    }

    /// Sets the refcount of a cluster that a block describes.
    pub(crate) fn set(&mut self, cluster: u64, value: u64, storage: &dyn Storage) -> Result<()> {
        let place = self.place(cluster).expect("a block was made before its refcounts are set");
        let order = self.geometry.refcount_order;
        set_refcount(self.load_run(&place, 1, storage)?, place.index, order, value);
        self.dirty.insert(place.slice);
        Ok(())
    }

    /// Sets the refcounts of a run of clusters that blocks describe. Returns how many from the
    /// front were set; after a storage error the others are unchanged.
    pub(crate) fn set_run(
        &mut self,
        first: u64,
        count: u64,
        value: u64,
        storage: &dyn Storage,
    ) -> (u64, Result<()>) {
        let (order, entries) = (self.geometry.refcount_order, self.slice_entries());
        let block_entries = self.geometry.refcount_block_entries();
        let mut at = first;
        while at < first + count {
            let place = self.place(at).expect("a block was made before its refcounts are set");
            let in_block = (first + count).min((at / block_entries + 1) * block_entries);
            let upto = in_block.min(at + (entries - place.index));
            let slices = self.slices_to(&place, in_block - at);
            let bytes = match self.load_run(&place, slices, storage) {
                Ok(bytes) => bytes,
                Err(error) => return (at - first, Err(error)),
            };
            set_refcounts(bytes, place.index..place.index + (upto - at), order, value);
            self.dirty.insert(place.slice);
            at = upto;
        }
        (count, Ok(()))
    }

    /// Runs of clusters with refcount 0 within `range`, whose first cluster a block describes;
    /// calls `found(first, count)` for each and stops at the end of the range or of the block.
    /// Returns the cluster where it stopped.
    pub(crate) fn free_runs(
        &mut self,
        range: Range<u64>,
        storage: &dyn Storage,
        mut found: impl FnMut(u64, u64),
    ) -> Result<u64> {
        let block_entries = self.geometry.refcount_block_entries();
        let end = range.end.min((range.start / block_entries + 1) * block_entries);
        let order = self.geometry.refcount_order;
        let entries = self.slice_entries();
        let mut at = range.start;
        let mut run = 0;
        while at < end {
            let Some(place) = self.place(at) else { break };
            let upto = end.min(at + (entries - place.index));
            let bytes = self.load_run(&place, self.slices_to(&place, end - at), storage)?;
            if all_zero(bytes, place.index..place.index + (upto - at), order) {
                run += upto - at;
                at = upto;
                continue;
            }
            for cluster in at..upto {
                if get_refcount(bytes, place.index + (cluster - at), order) == 0 {
                    run += 1;
                } else if run > 0 {
                    found(cluster - run, run);
                    run = 0;
                }
            }
            at = upto;
        }
        if run > 0 {
            found(at - run, run);
        }
        Ok(end)
    }

    /// Takes everything dirty, to be written from copies or directly from the cache.
    pub(crate) fn take_dirty(&mut self) -> DirtyRefcounts {
        self.writing.clone_from(&self.dirty);
        DirtyRefcounts {
            slices: std::mem::take(&mut self.dirty),
            table: std::mem::take(&mut self.dirty_table),
        }
    }

    /// Copies the taken slices and table entries.
    pub(crate) fn copies(&self, taken: &DirtyRefcounts) -> Writes {
        let runs = runs(&taken.slices, self.slice_bytes());
        let mut writes = copy_runs(runs, |at, out| self.copy_run(at, out));
        writes.extend(self.table_words(taken).map(|(at, word)| (at, word.to_vec())));
        writes
    }

    /// Writes the taken slices and table entries in pieces; the caller's lock prevents changes
    /// meanwhile.
    pub(crate) fn write(&self, taken: &DirtyRefcounts, storage: &dyn Storage) -> Result<()> {
        let runs = runs(&taken.slices, self.slice_bytes());
        write_pieces(storage, runs, |at, piece| self.copy_run(at, piece))?;
        self.table_words(taken).try_for_each(|(at, word)| storage.write_at(&word, HostOffset(at)))
    }

    /// Copies consecutive slices.
    fn copy_run(&self, first: u64, out: &mut [u8]) {
        let step = self.slice_bytes() as usize;
        for (key, out) in (first..).step_by(step).zip(out.chunks_mut(step)) {
            out.copy_from_slice(&self.slices[&key]);
        }
    }

    /// Host offsets and bytes of changed table entries.
    fn table_words(&self, taken: &DirtyRefcounts) -> impl Iterator<Item = (u64, [u8; 8])> {
        let place = |index: &usize| self.table_offset.0 + *index as u64 * 8;
        taken.table.iter().map(move |index| (place(index), self.table[*index].to_be_bytes()))
    }

    /// The taken changes reached the storage.
    pub(crate) fn written(&mut self, _taken: DirtyRefcounts) {
        self.writing.clear();
    }

    /// Marks the taken changes dirty again after a failed write.
    pub(crate) fn restore_dirty(&mut self, taken: DirtyRefcounts) {
        self.writing.clear();
        self.dirty.extend(taken.slices);
        self.dirty_table.extend(taken.table);
    }

    /// Drops cached slices of a block that was changed on disk without the cache.
    pub(crate) fn forget_block(&mut self, block: HostOffset) {
        self.zero_from = u64::MAX;
        let end = block.0 + self.geometry.cluster_bytes();
        for key in (block.0..end).step_by(self.slice_bytes() as usize) {
            self.slices.remove(&key);
            self.dirty.remove(&key);
        }
    }
}

/// Whether all refcounts of a range are 0. Returns true only for ranges of whole bytes.
fn all_zero(block: &[u8], range: Range<u64>, order: u32) -> bool {
    let bits = range.start << order..range.end << order;
    bits.start % 8 == 0
        && bits.end % 8 == 0
        && is_zero(&block[(bits.start / 8) as usize..(bits.end / 8) as usize])
}

/// Dirty refcounts from [`Refcounts::take_dirty`].
#[derive(Debug)]
pub(crate) struct DirtyRefcounts {
    slices: BTreeSet<u64>,
    table: BTreeSet<usize>,
}

impl DirtyRefcounts {
    pub(crate) fn is_empty(&self) -> bool {
        self.slices.is_empty() && self.table.is_empty()
    }
}

/// Reads refcount `index` of a block or slice; below 8 bits, the first refcount is in the lowest
/// bits of a byte (qcow2 specification, "Host cluster management").
pub(crate) fn get_refcount(block: &[u8], index: u64, order: u32) -> u64 {
    let i = index as usize;
    match order {
        0..=2 => {
            let (at, shift, mask) = within_byte(i, order);
            u64::from(block[at] >> shift & mask)
        }
        3 => u64::from(block[i]),
        4 => entries::<U16>(block)[i].into(),
        5 => entries::<U32>(block)[i].into(),
        _ => entries::<U64>(block)[i].into(),
    }
}

/// Writes refcount `index` of a block; see [`get_refcount`]. The value must fit.
pub(crate) fn set_refcount(block: &mut [u8], index: u64, order: u32, value: u64) {
    let i = index as usize;
    match order {
        0..=2 => {
            let (at, shift, mask) = within_byte(i, order);
            block[at] = block[at] & !(mask << shift) | (value as u8 & mask) << shift;
        }
        3 => block[i] = value as u8,
        4 => entries_mut::<U16>(block)[i].set(value as u16),
        5 => entries_mut::<U32>(block)[i].set(value as u32),
        _ => entries_mut::<U64>(block)[i].set(value),
    }
}

/// Byte of a refcount of less than a byte, its lowest bit there, and the mask of its bits.
fn within_byte(index: usize, order: u32) -> (usize, u32, u8) {
    let bits = 1u32 << order;
    let per_byte = 8 / bits as usize;
    (index / per_byte, (index % per_byte) as u32 * bits, (1 << bits) - 1)
}

/// Sets a range of refcounts to one value; see [`set_refcount`].
fn set_refcounts(block: &mut [u8], range: Range<u64>, order: u32, value: u64) {
    let bytes = (range.start as usize) << order >> 3..(range.end as usize) << order >> 3;
    match order {
        0..=2 => range.for_each(|index| set_refcount(block, index, order, value)),
        3 => block[bytes].fill(value as u8),
        4 => entries_mut(&mut block[bytes]).fill(U16::new(value as u16)),
        5 => entries_mut(&mut block[bytes]).fill(U32::new(value as u32)),
        _ => entries_mut(&mut block[bytes]).fill(U64::new(value)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vdkit_block::Limits;
    use vdkit_storage::MemoryStorage;
    use vdkit_testbase::{CountingStorage, create_image};

    use super::*;
    use crate::Qcow2Driver;

    #[test]
    fn a_run_is_read_at_once_and_one_cluster_by_its_slice() {
        let storage = CountingStorage::new(Arc::new(MemoryStorage::new("image")));
        create_image(&Qcow2Driver, storage.clone(), 1 << 40, "");
        let header = Header::read(&*storage, &Limits::default()).unwrap();
        let cost = |work: &dyn Fn(&mut Refcounts)| {
            let mut refcounts = Refcounts::read(&header, &*storage).unwrap();
            storage.reset();
            work(&mut refcounts);
            (storage.counts().reads, storage.counts().bytes_read)
        };
        assert_eq!(cost(&|r| assert_eq!(r.get(0, &*storage).unwrap(), 1)), (1, 4096));
        let found = |r: &mut Refcounts| {
            let mut runs = Vec::new();
            r.free_runs(0..1 << 15, &*storage, |first, count| runs.push((first, count))).unwrap();
            let used = runs[0].0;
            assert_eq!(runs, [(used, (1 << 15) - used)]);
        };
        assert_eq!(cost(&found), (1, 65536));
        assert_eq!(cost(&|r| r.set_run(4, (1 << 15) - 4, 1, &*storage).1.unwrap()), (1, 65536));
        // Cached slices are not reread, nor are the slices after them.
        let thrice = |r: &mut Refcounts| {
            r.set(2048 * 3, 7, &*storage).unwrap();
            r.set_run(2000, 2048 * 6, 1, &*storage).1.unwrap();
            assert_eq!(r.get(2048 * 3, &*storage).unwrap(), 1);
        };
        assert_eq!(cost(&thrice), (3, 4096 * 7));
        // Slices beyond the used clusters are not read either.
        let beyond = |r: &mut Refcounts| {
            r.zero_from(2048 * 2 + 1);
            r.set_run(2000, 2048 * 6, 1, &*storage).1.unwrap();
            assert_eq!(r.get(2048 * 8, &*storage).unwrap(), 0);
        };
        assert_eq!(cost(&beyond), (1, 4096 * 3));
    }

    /// Refcounts of `blocks` blocks, with leaks all over the file.
    fn leaking(storage: &MemoryStorage, cluster_bits: u32, blocks: u64) -> Refcounts {
        let geometry = Geometry { cluster_bits, refcount_order: 4, extended: false };
        let table: Vec<u64> = (1..=blocks).map(|block| block << 21).collect();
        for &block in &table {
            storage.write_at(&vec![0xff; 1 << cluster_bits], HostOffset(block)).unwrap();
        }
        Refcounts::new(geometry, HostOffset(0), table)
    }

    fn flush(refcounts: &mut Refcounts, storage: &MemoryStorage) {
        let taken = refcounts.take_dirty();
        refcounts.write(&taken, storage).unwrap();
        refcounts.written(taken);
    }

    #[test]
    fn what_was_written_behind_the_end_is_read_again() {
        let storage = MemoryStorage::new("image");
        let blocks = SLICES_MAX as u64 * 2;
        let mut refcounts = leaking(&storage, 9, blocks);
        let per_block = refcounts.geometry.refcount_block_entries();
        assert!(refcounts.blocks_differ());
        refcounts.zero_from(per_block * 3 / 2);
        let end = per_block * (blocks - 1);
        refcounts.set_run(0, end, 7, &storage).1.unwrap();
        flush(&mut refcounts, &storage);
        // One more slice drops the clean ones.
        refcounts.set(end, 8, &storage).unwrap();
        assert_eq!(refcounts.slices.len(), 1);
        let mut get = |cluster| refcounts.get(cluster, &storage).unwrap();
        assert!((0..end).all(|cluster| get(cluster) == 7));
        assert_eq!((get(end), get(end + 1)), (8, 0));
        refcounts.table[7] = refcounts.table[900];
        assert!(!refcounts.blocks_differ());
    }

    #[test]
    fn a_run_across_the_end_is_read_up_to_it() {
        for within in [0, 1, 2047] {
            let storage = MemoryStorage::new("image");
            let mut refcounts = leaking(&storage, 16, 2);
            refcounts.zero_from(2048 * 3 + within);
            refcounts.set_run(100, 2048 * 7, 7, &storage).1.unwrap();
            for again in 0..2 {
                let mut get = |cluster| refcounts.get(cluster, &storage).unwrap();
                assert_eq!((get(99), get(100)), (0xffff, 7), "{within} {again}");
                assert_eq!((get(2048 * 7 + 99), get(2048 * 7 + 100)), (7, 0), "{within} {again}");
                flush(&mut refcounts, &storage);
                refcounts.slices.clear();
            }
            // After `forget_block`, refcounts are read from the file.
            assert_eq!(refcounts.get(2048 * 8, &storage).unwrap(), 0);
            refcounts.forget_block(HostOffset(1 << 21));
            assert_eq!(refcounts.get(2048 * 8, &storage).unwrap(), 0xffff);
            assert_eq!(refcounts.get(2048 * 9, &storage).unwrap(), 0xffff);
        }
    }

    #[test]
    fn runs_of_refcounts_are_set_as_one_by_one() {
        for order in 0..=6 {
            let entries = (64 * 8) >> order;
            let max = if order == 6 { u64::MAX } else { (1 << (1 << order)) - 1 };
            for (first, end) in [(0, entries), (1, entries - 1), (3, 3), (entries - 1, entries)] {
                let mut one_by_one = [0x5a; 64];
                let mut at_once = one_by_one;
                for index in first..end {
                    set_refcount(&mut one_by_one, index, order, max - 1);
                }
                set_refcounts(&mut at_once, first..end, order, max - 1);
                assert_eq!(at_once, one_by_one, "order {order}, {first}..{end}");
            }
        }
    }

    #[test]
    fn refcounts_of_each_width_keep_their_neighbors() {
        for order in 0..=6 {
            let bits = 1u32 << order;
            let max = if order == 6 { u64::MAX } else { (1 << bits) - 1 };
            let mut block = [0u8; 64];
            let entries = 64 * 8 / u64::from(bits);
            for i in 0..entries {
                set_refcount(&mut block, i, order, max.min(i + 1));
            }
            set_refcount(&mut block, 1, order, 0);
            for i in 0..entries {
                let want = if i == 1 { 0 } else { max.min(i + 1) };
                assert_eq!(get_refcount(&block, i, order), want, "order {order} index {i}");
            }
        }
        // Specification: the first refcount is in the lowest bits of a byte.
        let mut byte = [0u8];
        set_refcount(&mut byte, 0, 1, 3);
        assert_eq!(byte, [0b11]);
    }
}
