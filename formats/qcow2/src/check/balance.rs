//! Refcount minus references of each host cluster, in two bytes per cluster.
//!
//! A walk over the metadata needs both numbers of a cluster only at the end, and then only their
//! difference. So one word per cluster holds
//!
//! ```text
//!   bit  15     the refcount in the image is exactly 1 (must equal the COPIED flag)
//!   bit  14     the cluster holds metadata
//!   bits 0-13   refcount minus references, signed; -8192: too large, see `large`
//! ```
//!
//! Words are in chunks that are allocated on first touch, so an image that names cluster 2^47 costs
//! one more chunk, and the total is bounded by what the image's structures actually name.

use rustc_hash::FxHashMap;
use vdkit_block::{Error, Result};
use zerocopy::big_endian::U16;

use crate::refcounts::get_refcount;
use crate::structures::entries;

const CHUNK_BITS: u32 = 12;
const CHUNK: usize = 1 << CHUNK_BITS;
/// Chunks that are found by index rather than by hash: a 4 MiB index for 2^32 clusters.
const NEAR_CHUNKS_MAX: u64 = 1 << 20;
/// What exceeds the limit of a check.
pub(super) const CHECK_MEMORY: &str = "the memory for a check in bytes";

/// The refcount in the image is exactly 1.
pub(super) const SINGLE: u16 = 1 << 15;
/// This cluster holds metadata.
pub(super) const METADATA: u16 = 1 << 14;
const BALANCE_MASK: u16 = METADATA - 1;
/// The balance is in the map `large`.
const LARGE: i32 = -8192;

fn balance_of(word: u16) -> i32 {
    i32::from((word << 2) as i16 >> 2)
}

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct Balance {
    near: Vec<u32>,
    far: FxHashMap<u64, u32>,
    chunks: Vec<Box<[u16; CHUNK]>>,
    large: FxHashMap<u64, i128>,
    bytes_max: u64,
    exhausted: bool,
    /// The number of clusters of the file.
    clusters: u64,
    /// One more than the highest cluster with a reference, or within the file with a refcount.
    end: u64,
}

impl Balance {
    /// For a file of `clusters` host clusters, in at most `bytes_max` bytes.
    pub(super) fn new(clusters: u64, bytes_max: u64) -> Self {
        let near = ((clusters >> CHUNK_BITS) + 2).min(NEAR_CHUNKS_MAX);
        Self { near: vec![0; near as usize], bytes_max, clusters, ..Self::default() }
    }

    /// One more than the highest cluster with a reference, or within the file with a refcount.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// [`Error::Limit`] once the table would have exceeded its memory limit; later counts are lost.
    pub(super) fn check_limit(&self, file: &str) -> Result<()> {
        if self.exhausted {
            let found = self.bytes() + (CHUNK * 2) as u64;
            return Err(Error::limit(file, CHECK_MEMORY, found, self.bytes_max));
        }
        Ok(())
    }

    fn bytes(&self) -> u64 {
        (self.chunks.len() * (CHUNK * 2 + 8)
            + self.near.len() * 4
            + self.far.capacity() * 17
            + self.large.capacity() * 33) as u64
    }

    #[inline]
    fn slot(&self, cluster: u64) -> Option<usize> {
        let chunk = cluster >> CHUNK_BITS;
        let slot = match self.near.get(chunk as usize) {
            Some(&slot) => slot,
            None => self.far.get(&chunk).copied().unwrap_or(0),
        };
        (slot != 0).then(|| slot as usize - 1)
    }

    #[inline]
    fn slot_or_new(&mut self, cluster: u64) -> Option<usize> {
        match self.slot(cluster) {
            Some(slot) => Some(slot),
            None => self.add_chunk(cluster >> CHUNK_BITS),
        }
    }

    #[cold]
    fn add_chunk(&mut self, chunk: u64) -> Option<usize> {
        if self.exhausted || self.bytes() + (CHUNK * 2) as u64 > self.bytes_max {
            self.exhausted = true;
            return None;
        }
        self.chunks.push(Box::new([0; CHUNK]));
        let slot = self.chunks.len() as u32;
        match self.near.get_mut(chunk as usize) {
            Some(near) => *near = slot,
            None => {
                self.far.insert(chunk, slot);
            }
        }
        Some(slot as usize - 1)
    }

    #[inline]
    pub(super) fn word(&self, cluster: u64) -> u16 {
        match self.slot(cluster) {
            Some(slot) => self.chunks[slot][cluster as usize & (CHUNK - 1)],
            None => 0,
        }
    }

    /// Adds `times` references to a cluster (negative: removes them). Returns the old word.
    #[inline]
    pub(super) fn refer(&mut self, cluster: u64, times: i32) -> u16 {
        let Some(slot) = self.slot_or_new(cluster) else { return 0 };
        self.end = self.end.max(cluster + 1);
        let word = &mut self.chunks[slot][cluster as usize & (CHUNK - 1)];
        let old = *word;
        let balance = balance_of(old);
        let new = balance.wrapping_sub(times);
        if balance != LARGE && new > LARGE && new < -LARGE {
            *word = old & !BALANCE_MASK | new as u16 & BALANCE_MASK;
        } else {
            self.refer_large(cluster, times);
        }
        old
    }

    /// Adds one reference to each of `count` clusters, if each has a refcount of 1, no reference
    /// yet and no metadata. Returns whether it did.
    #[inline]
    pub(super) fn refer_singles(&mut self, first: u64, count: usize) -> bool {
        let offset = first as usize & (CHUNK - 1);
        let Some(slot) = self.slot(first).filter(|_| offset + count <= CHUNK) else {
            return false;
        };
        let words = &mut self.chunks[slot][offset..offset + count];
        let fresh = words.iter().all(|&word| word == SINGLE | 1);
        if fresh {
            words.fill(SINGLE);
            self.end = self.end.max(first + count as u64);
        }
        fresh
    }

    #[cold]
    fn refer_large(&mut self, cluster: u64, times: i32) {
        let balance = self.balance(cluster) - i128::from(times);
        self.set_large(cluster, balance);
    }

    fn set_large(&mut self, cluster: u64, balance: i128) {
        let Some(slot) = self.slot_or_new(cluster) else { return };
        if self.large.len() == self.large.capacity()
            && self.bytes() + self.large.capacity() as u64 * 33 > self.bytes_max
        {
            self.exhausted = true;
            return;
        }
        self.large.insert(cluster, balance);
        let word = &mut self.chunks[slot][cluster as usize & (CHUNK - 1)];
        *word = *word & !BALANCE_MASK | LARGE as u16 & BALANCE_MASK;
    }

    /// Marks a cluster as metadata. Returns the old word.
    pub(super) fn mark_metadata(&mut self, cluster: u64) -> u16 {
        let Some(slot) = self.slot_or_new(cluster) else { return 0 };
        let word = &mut self.chunks[slot][cluster as usize & (CHUNK - 1)];
        let old = *word;
        *word |= METADATA;
        old
    }

    /// Refcount minus references.
    pub(super) fn balance(&self, cluster: u64) -> i128 {
        match balance_of(self.word(cluster)) {
            LARGE => self.large.get(&cluster).copied().unwrap_or(0),
            balance => balance.into(),
        }
    }

    /// Adds the refcounts of a block that begins with cluster `first`. Each cluster's refcount is
    /// added at most once, and before any reference to it.
    pub(super) fn add_refcounts(&mut self, first: u64, block: &[u8], order: u32) {
        let end = first.saturating_add(((block.len() * 8) >> order) as u64);
        let mut at = first;
        while at < end {
            let next = end.min((at | (CHUNK as u64 - 1)) + 1);
            // A piece never begins within a byte, since no block is smaller than a byte.
            let bytes = (((at - first) << order) / 8) as usize
                ..(((next - first) << order).div_ceil(8)) as usize;
            if block[bytes].iter().any(|&b| b != 0) {
                self.add_piece(at, next, first, block, order);
            }
            at = next;
        }
    }

    fn add_piece(&mut self, from: u64, to: u64, first: u64, block: &[u8], order: u32) {
        let Some(slot) = self.slot_or_new(from) else { return };
        let offset = from as usize & (CHUNK - 1);
        let words = &mut self.chunks[slot][offset..offset + (to - from) as usize];
        let index = (from - first) as usize;
        let pack = |value: u16| value | u16::from(value == 1) << 15;
        let mut large = false;
        if order == 4 {
            for (word, refcount) in words.iter_mut().zip(&entries::<U16>(block)[index..]) {
                let value = refcount.get();
                large |= value > BALANCE_MASK >> 1;
                *word = pack(value & BALANCE_MASK >> 1);
            }
        } else {
            for (i, word) in words.iter_mut().enumerate() {
                let value = get_refcount(block, (index + i) as u64, order);
                large |= value > u64::from(BALANCE_MASK >> 1);
                *word = pack(value as u16 & BALANCE_MASK >> 1);
            }
        }
        let within = self.clusters.saturating_sub(from).min(to - from) as usize;
        if let Some(last) = words[..within].iter().rposition(|&w| w != 0) {
            self.end = self.end.max(from + last as u64 + 1);
        }
        if large {
            for cluster in from..to {
                let value = get_refcount(block, cluster - first, order);
                if value > u64::from(BALANCE_MASK >> 1) {
                    if cluster < self.clusters {
                        self.end = self.end.max(cluster + 1);
                    }
                    self.chunks[slot][cluster as usize & (CHUNK - 1)] = 0;
                    self.set_large(cluster, value.into());
                }
            }
        }
    }

    /// Chunks in cluster order: first cluster and words.
    fn chunks(&self) -> impl Iterator<Item = (u64, &[u16; CHUNK])> {
        let mut far: Vec<_> = self.far.iter().map(|(&chunk, &slot)| (chunk, slot)).collect();
        far.sort_unstable();
        let near = self.near.iter().enumerate().map(|(chunk, &slot)| (chunk as u64, slot));
        near.chain(far)
            .filter(|&(_, slot)| slot != 0)
            .map(|(chunk, slot)| (chunk << CHUNK_BITS, &*self.chunks[slot as usize - 1]))
    }

    /// Clusters whose refcount and references differ, with the difference, in cluster order.
    pub(super) fn unbalanced(&self) -> impl Iterator<Item = (u64, i128)> {
        self.chunks()
            .filter(|(_, words)| words.iter().any(|&w| w & BALANCE_MASK != 0))
            .flat_map(|(first, words)| {
                words.iter().zip(first..).filter(|(w, _)| **w & BALANCE_MASK != 0)
            })
            .map(|(_, cluster)| (cluster, self.balance(cluster)))
            .filter(|&(_, balance)| balance != 0)
    }

    /// Refcount blocks of `1 << block_bits` refcounts that contain a difference.
    pub(super) fn unbalanced_blocks(&self, block_bits: u32) -> Vec<u64> {
        let mut blocks: Vec<u64> = Vec::new();
        for (cluster, _) in self.unbalanced() {
            let block = cluster >> block_bits;
            if blocks.last() != Some(&block) {
                blocks.push(block);
            }
        }
        blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unbalanced(balance: &Balance) -> Vec<(u64, i128)> {
        balance.unbalanced().collect()
    }

    #[test]
    fn references_use_refcounts_up() {
        let mut balance = Balance::new(100, 1 << 20);
        let block: Vec<u8> = [0u16, 1, 2, 1, 0, 9].iter().flat_map(|v| v.to_be_bytes()).collect();
        balance.add_refcounts(10, &block, 4);
        assert_eq!(balance.end(), 16);
        assert_eq!(balance.refer(11, 1) & SINGLE, SINGLE);
        assert_eq!(balance.refer(12, 2) & SINGLE, 0);
        balance.refer(14, 1);
        assert_eq!(unbalanced(&balance), [(13, 1), (14, -1), (15, 9)]);
        balance.refer(14, -1);
        assert_eq!(balance.mark_metadata(13) & METADATA, 0);
        assert_eq!(balance.refer(13, 1), METADATA | SINGLE | 1);
        assert_eq!(unbalanced(&balance), [(15, 9)]);
        assert_eq!(balance.unbalanced_blocks(3), [1]);
    }

    #[test]
    fn singles_are_taken_all_or_none() {
        let mut balance = Balance::new(8192, 1 << 20);
        let block: Vec<u8> = std::iter::repeat_n([0, 1], 8192).flatten().collect();
        balance.add_refcounts(0, &block, 4);
        assert!(balance.refer_singles(10, 5));
        assert!(!balance.refer_singles(14, 5)); // 14 has a reference already
        balance.mark_metadata(20);
        assert!(!balance.refer_singles(16, 5));
        assert!(!balance.refer_singles(4095, 2)); // two chunks
        assert!(balance.refer_singles(4094, 2));
        let taken: Vec<u64> = (0..8192).filter(|&c| balance.balance(c) == 0).collect();
        assert_eq!(taken, [10, 11, 12, 13, 14, 4094, 4095]);
    }

    #[test]
    fn large_numbers_of_either_sign_are_kept() {
        let mut balance = Balance::new(0, 1 << 20);
        let block: Vec<u8> =
            [u64::MAX, 8191, 8192, 0].iter().flat_map(|v| v.to_be_bytes()).collect();
        balance.add_refcounts(0, &block, 6);
        for _ in 0..3 {
            balance.refer(3, 8000);
            balance.refer(0, 1);
        }
        balance.refer(1, 1);
        assert_eq!(
            unbalanced(&balance),
            [(0, i128::from(u64::MAX) - 3), (1, 8190), (2, 8192), (3, -24000)]
        );
        balance.refer(3, -24000);
        balance.refer(2, 8192);
        assert_eq!(unbalanced(&balance).len(), 2);
    }

    #[test]
    fn far_clusters_cost_a_chunk_and_stay_in_order() {
        let mut balance = Balance::new(u64::MAX >> 9, 5 << 20);
        for cluster in [1 << 47, 5, (1 << 47) + 1, 1 << 33] {
            balance.refer(cluster, 1);
        }
        let clusters: Vec<u64> = balance.unbalanced().map(|(c, _)| c).collect();
        assert_eq!(clusters, [5, 1 << 33, 1 << 47, (1 << 47) + 1]);
        assert_eq!(balance.chunks.len(), 3);
        assert!(balance.check_limit("x").is_ok());
    }

    #[test]
    fn the_limit_holds_for_chunks_and_for_large_numbers() {
        let mut balance = Balance::new(100, 100 << 10);
        for i in 0..1000u64 {
            balance.refer(i << 20, 1);
        }
        assert!(matches!(balance.check_limit("x"), Err(Error::Limit { .. })));
        assert!(balance.bytes() <= 100 << 10);

        let mut balance = Balance::new(100, 100 << 10);
        balance.add_refcounts(0, &[0xff; 8192], 4);
        assert!(matches!(balance.check_limit("x"), Err(Error::Limit { .. })));
        assert!(balance.bytes() <= 100 << 10, "{}", balance.bytes());
    }

    #[test]
    fn narrow_refcounts_cross_chunks() {
        let mut balance = Balance::new(100, 1 << 20);
        balance.add_refcounts(0, &[0xff; 2048], 0); // 16384 refcounts of one bit
        assert_eq!(balance.chunks.len(), 4);
        assert_eq!(unbalanced(&balance).len(), 16384);
        assert_eq!(balance.end(), 100); // clusters beyond the file do not count
    }
}
