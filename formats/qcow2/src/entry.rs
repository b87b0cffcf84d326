//! Encoding of L1 and L2 entries.

use vdkit_block::HostOffset;
use zerocopy::big_endian::U64;

use crate::layout::{self, COMPRESSED, COPIED, Geometry, OFFSET_MASK, SUBCLUSTERS, ZERO};
use crate::structures::words;

/// An L2 entry in memory: the first word, and the subcluster bitmap (0 in a standard entry).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct L2Entry {
    /// Descriptor of the cluster.
    pub word: u64,
    /// Low half: subcluster is allocated. High half: subcluster reads as zero.
    pub bitmap: u64,
}

/// State of one cluster (or subcluster) according to its L2 entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Not in this image.
    Hole,
    /// Reads as zero; no host space.
    ZeroPlain,
    /// Reads as zero; host space is kept.
    ZeroAllocated,
    /// Plain data.
    Data,
    /// Space is kept, but reads come from the backing image (subclusters only).
    HoleAllocated,
    /// Compressed.
    Compressed,
}

/// Host bytes of a compressed cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressedPlace {
    /// Host offset of the first byte.
    pub offset: HostOffset,
    /// Bytes up to the end of the last sector; the stream may end earlier.
    pub bytes: u64,
}

impl L2Entry {
    /// The entries of a table as on disk.
    pub fn all(table: &[u8], geometry: &Geometry) -> impl Iterator<Item = Self> {
        words(table).chunks_exact(geometry.l2_entry_words()).map(Self::decode)
    }

    /// An entry of one word, or of two in an image with subclusters.
    pub(crate) fn decode(words: &[U64]) -> Self {
        Self { word: words[0].get(), bitmap: words.get(1).map_or(0, |bitmap| bitmap.get()) }
    }

    /// The reverse of [`L2Entry::decode`].
    pub(crate) fn encode(self, words: &mut [U64]) {
        words[0].set(self.word);
        if let Some(bitmap) = words.get_mut(1) {
            bitmap.set(self.bitmap);
        }
    }

    /// Plain data at `host`, referred to once.
    pub fn data(host: HostOffset, geometry: &Geometry) -> Self {
        Self {
            word: host.0 | COPIED,
            bitmap: if geometry.extended { u64::from(u32::MAX) } else { 0 },
        }
    }

    /// Reads as zero, no host space.
    pub fn zero_plain(geometry: &Geometry) -> Self {
        if geometry.extended {
            Self { word: 0, bitmap: u64::from(u32::MAX) << 32 }
        } else {
            Self { word: ZERO, bitmap: 0 }
        }
    }

    /// The entry of a compressed cluster of `bytes` bytes at `offset`.
    pub fn compressed(offset: HostOffset, bytes: u64, geometry: &Geometry) -> Self {
        debug_assert!(bytes > 0);
        let sectors =
            (((offset.0 & 511) + bytes - 1) >> 9) & ((1 << (geometry.cluster_bits - 8)) - 1);
        Self {
            word: COMPRESSED | (sectors << geometry.compressed_offset_bits()) | offset.0,
            bitmap: 0,
        }
    }

    /// Whether the cluster is compressed. Must be tested before the zero flag, whose bit is part of
    /// the offset in a compressed entry.
    pub fn is_compressed(self) -> bool {
        self.word & COMPRESSED != 0
    }

    /// Whether the cluster is referred to once.
    pub fn is_copied(self) -> bool {
        self.word & COPIED != 0
    }

    /// Host offset of a plain cluster's space; 0 if it has none. In a data file, 0 is a valid
    /// offset: COPIED distinguishes the two.
    pub fn host(self) -> HostOffset {
        HostOffset(self.word & OFFSET_MASK)
    }

    /// Host bytes of the compressed data.
    pub fn compressed_place(self, geometry: &Geometry) -> CompressedPlace {
        let bits = geometry.compressed_offset_bits();
        let offset = self.word & ((1 << bits) - 1);
        let sectors = ((self.word & !(COMPRESSED | COPIED)) >> bits) + 1;
        CompressedPlace { offset: HostOffset(offset), bytes: sectors * 512 - (offset & 511) }
    }

    /// Host offset and length of the bytes that an entry with space refers to.
    pub fn named_bytes(self, geometry: &Geometry) -> (HostOffset, u64) {
        if self.is_compressed() {
            let place = self.compressed_place(geometry);
            return (place.offset, place.bytes);
        }
        (self.host(), geometry.cluster_bytes())
    }

    /// Whether a plain entry has host space. In a data file, guest offset 0 is at host offset 0, so
    /// an entry has space if COPIED is set.
    pub fn has_space(self, data_file: bool) -> bool {
        !self.is_compressed() && (self.word & OFFSET_MASK != 0 || (data_file && self.is_copied()))
    }

    /// State of subcluster `index` (0 for standard entries).
    pub fn state(self, index: u32, geometry: &Geometry, data_file: bool) -> State {
        if self.is_compressed() {
            return State::Compressed;
        }
        let space = self.has_space(data_file);
        let (allocated, zero) = if geometry.extended {
            (self.bitmap >> index & 1 != 0, self.bitmap >> (32 + index) & 1 != 0)
        } else {
            (space, self.word & ZERO != 0)
        };
        match (zero, allocated && space, space) {
            (true, _, true) => State::ZeroAllocated,
            (true, _, false) => State::ZeroPlain,
            (false, true, _) => State::Data,
            (false, false, true) => State::HoleAllocated,
            (false, false, false) => State::Hole,
        }
    }

    /// If this entry by itself violates the specification: what was expected.
    pub fn fault(self, geometry: &Geometry, version: u32, data_file: bool) -> Option<&'static str> {
        if self.is_compressed() {
            if data_file {
                return Some("no compressed cluster in an image with a data file");
            }
            if self.is_copied() {
                return Some("no COPIED flag on a compressed cluster");
            }
            if geometry.extended && self.bitmap != 0 {
                return Some("an empty subcluster bitmap on a compressed cluster");
            }
            return None;
        }
        if self.host().0 & (geometry.cluster_bytes() - 1) != 0 {
            return Some("a host offset at a cluster boundary");
        }
        if geometry.extended {
            let allocated = self.bitmap as u32;
            let zero = (self.bitmap >> 32) as u32;
            if allocated & zero != 0 {
                return Some("no subcluster both allocated and zero");
            }
            if allocated != 0 && !self.has_space(data_file) {
                return Some("no allocated subcluster in a cluster without host space");
            }
        } else if version < 3 && self.word & ZERO != 0 {
            return Some("no zero flag in a version 2 image");
        }
        None
    }

    /// Reserved bits that are set (kept as they are; check reports them).
    pub fn reserved_bits(self, geometry: &Geometry) -> u64 {
        if self.is_compressed() {
            0
        } else if geometry.extended {
            self.word & (layout::L2_RESERVED | ZERO)
        } else {
            self.word & layout::L2_RESERVED
        }
    }

    /// Number of subclusters from `first` that have the same state, in an entry that has them.
    pub fn run(self, first: u32) -> u32 {
        let allocated = (self.bitmap as u32) >> first;
        let zero = ((self.bitmap >> 32) as u32) >> first;
        let same =
            |bits: u32| if bits & 1 != 0 { bits.trailing_ones() } else { bits.trailing_zeros() };
        same(allocated).min(same(zero)).min(SUBCLUSTERS - first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STANDARD: Geometry = Geometry { cluster_bits: 16, extended: false, refcount_order: 4 };
    const EXTENDED: Geometry = Geometry { cluster_bits: 16, extended: true, refcount_order: 4 };

    #[test]
    fn compressed_entries_round_trip_at_each_cluster_size() {
        for cluster_bits in 9..=21 {
            let geometry = Geometry { cluster_bits, extended: false, refcount_order: 4 };
            for offset in [512u64, 513, 70001, (1 << 40) + 511] {
                for bytes in [1u64, 100, 511, 512, 513, (1 << cluster_bits) - 1] {
                    let entry = L2Entry::compressed(HostOffset(offset), bytes, &geometry);
                    let place = entry.compressed_place(&geometry);
                    assert!(entry.is_compressed() && !entry.is_copied());
                    assert_eq!(place.offset.0, offset);
                    assert!(place.bytes >= bytes && place.bytes < bytes + 512, "{bytes} {place:?}");
                    assert_eq!((offset + place.bytes) % 512, 0);
                }
            }
        }
    }

    #[test]
    fn the_zero_flag_is_not_looked_for_in_a_compressed_entry() {
        // The lowest bit of the offset is the bit of the zero flag.
        let entry = L2Entry::compressed(HostOffset(0x10001), 100, &STANDARD);
        assert_eq!(entry.state(0, &STANDARD, false), State::Compressed);
    }

    #[test]
    fn runs_of_subclusters() {
        let entry = L2Entry { word: 0x10000 | COPIED, bitmap: (0b1100 << 32) | 0b0011 };
        assert_eq!(entry.state(0, &EXTENDED, false), State::Data);
        assert_eq!(entry.run(0), 2);
        assert_eq!(entry.state(2, &EXTENDED, false), State::ZeroAllocated);
        assert_eq!(entry.run(2), 2);
        assert_eq!(entry.state(4, &EXTENDED, false), State::HoleAllocated);
        assert_eq!(entry.run(4), 28);
        assert_eq!(L2Entry::data(HostOffset(0x10000), &EXTENDED).run(0), 32);
        assert_eq!(L2Entry::default().run(31), 1);
    }

    #[test]
    fn a_data_file_may_hold_data_at_offset_zero() {
        let entry = L2Entry { word: COPIED, bitmap: 0 };
        assert_eq!(entry.state(0, &STANDARD, true), State::Data);
        assert_eq!(entry.state(0, &STANDARD, false), State::Hole);
    }
}
