//! One sparse extent: its directory, and the decoding of its table entries.

use std::ops::Range;

use parking_lot::RwLock;
use vdkit_block::{Error, FileIndex, Result};

use crate::header::SECTOR;

/// seSparse: required upper bits of a directory entry.
const SE_TABLE: u64 = 1 << 60;

/// Encoding of tables and grains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Flavor {
    /// Hosted, with plain grains.
    Hosted {
        /// An entry of 1 is a grain of zeroes.
        zero_grain: bool,
    },
    /// Hosted, with compressed grains.
    Stream {
        /// An entry of 1 is a grain of zeroes.
        zero_grain: bool,
        /// A marker with the compressed length precedes each grain.
        markers: bool,
    },
    /// COWD (vmfsSparse).
    Cowd,
    /// seSparse.
    Se {
        /// First sector of the grain tables.
        tables: u64,
        /// First sector of the grains.
        grains: u64,
    },
}

/// A decoded table entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// Not in this image.
    Hole,
    Zero,
    /// Host offset in bytes of the grain, or of its marker.
    At(u64),
}

#[derive(Debug)]
pub(crate) struct Sparse {
    pub(crate) flavor: Flavor,
    pub(crate) file: FileIndex,
    pub(crate) grain_bytes: u64,
    pub(crate) table_entries: u64,
    pub(crate) directory_at: u64,
    /// First sector of each table, or 0.
    pub(crate) directory: RwLock<Vec<u32>>,
    /// Host offset of the redundant directory, if it is maintained.
    pub(crate) redundant_at: Option<u64>,
    /// First sectors of the redundant tables, or 0; empty without redundant tables.
    pub(crate) redundant: RwLock<Vec<u32>>,
    /// First sectors of all tables and other metadata, sorted; empty when read-only.
    pub(crate) metadata: RwLock<Vec<u32>>,
    /// Bytes of the header, the descriptor and the directories at the front.
    pub(crate) front: Vec<Range<u64>>,
    pub(crate) entry_bytes: u64,
}

impl Sparse {
    pub(crate) fn table_bytes(&self) -> u64 {
        self.table_entries * self.entry_bytes
    }

    /// Guest bytes that one table maps.
    pub(crate) fn table_span(&self) -> u64 {
        self.table_entries * self.grain_bytes
    }

    pub(crate) fn is_compressed(&self) -> bool {
        matches!(self.flavor, Flavor::Stream { .. })
    }

    /// Whether a grain of zeroes has an entry of its own.
    pub(crate) fn has_zero_grains(&self) -> bool {
        match self.flavor {
            Flavor::Hosted { zero_grain } | Flavor::Stream { zero_grain, .. } => zero_grain,
            Flavor::Cowd => false,
            Flavor::Se { .. } => true,
        }
    }

    /// Sector of a table, if it exists.
    pub(crate) fn table(&self, index: u64) -> Option<u64> {
        let sector = self.directory.read().get(index as usize).copied().unwrap_or(0);
        (sector != 0).then_some(u64::from(sector))
    }

    /// Sector of a redundant table.
    pub(crate) fn redundant_table(&self, index: u64) -> Option<u64> {
        let sector = self.redundant.read().get(index as usize).copied().unwrap_or(0);
        (sector != 0).then_some(u64::from(sector))
    }

    /// Decodes a table entry; `limit` is the end of the file. `None` if it is invalid.
    pub(crate) fn entry(&self, word: u64, limit: u64) -> Option<Entry> {
        let sector = match self.flavor {
            Flavor::Se { grains, .. } => match word >> 60 {
                0 if word == 0 => return Some(Entry::Hole),
                // Unmapped by the guest, or zero: both hide the parent's data.
                1 | 2 => return Some(Entry::Zero),
                3 => {
                    let index =
                        (word & 0x0fff_0000_0000_0000) >> 48 | (word & 0xffff_ffff_ffff) << 12;
                    let grain = self.grain_bytes / SECTOR;
                    index.checked_mul(grain)?.checked_add(grains)?
                }
                _ => return None,
            },
            _ if word == 0 => return Some(Entry::Hole),
            Flavor::Hosted { zero_grain } | Flavor::Stream { zero_grain, .. }
                if zero_grain && word == 1 =>
            {
                return Some(Entry::Zero);
            }
            _ => word,
        };
        let host = sector.checked_mul(SECTOR)?;
        // A grain cannot be in the header's sector.
        (sector > 0 && self.fits(host, limit)).then_some(Entry::At(host))
    }

    /// Whether a grain at a host offset is within a file that ends at `limit`. The end may cut off
    /// a grain that is aligned to its size, as QEMU leaves it, since new grains are allocated after
    /// it.
    pub(crate) fn fits(&self, host: u64, limit: u64) -> bool {
        let cut =
            !matches!(self.flavor, Flavor::Hosted { .. }) || host.is_multiple_of(self.grain_bytes);
        host < limit && (cut || host.checked_add(self.grain_bytes).is_some_and(|end| end <= limit))
    }

    pub(crate) fn overlaps_metadata(&self, bytes: &Range<u64>) -> bool {
        if self.front.iter().any(|r| r.start < bytes.end && bytes.start < r.end) {
            return true;
        }
        let metadata = self.metadata.read();
        let table = self.table_bytes().div_ceil(SECTOR);
        let first = (bytes.start / SECTOR + 1).saturating_sub(table);
        let at = metadata.partition_point(|&s| u64::from(s) < first);
        metadata.get(at).is_some_and(|&s| u64::from(s) * SECTOR < bytes.end)
    }

    /// First sector of the table that a nonzero directory entry names; `None` if no table can be
    /// there, in a file of `len` bytes.
    pub(crate) fn table_sector(&self, word: u64, len: u64) -> Option<u64> {
        let sector = match self.flavor {
            Flavor::Se { .. } if word >> 32 != SE_TABLE >> 32 => return None,
            Flavor::Se { tables, .. } => {
                (word & 0xffff_ffff) * (self.table_bytes() / SECTOR) + tables
            }
            // Zeroed tables are not known.
            _ if word == 1 && self.has_zero_grains() => return None,
            _ => word,
        };
        let end = sector.checked_mul(SECTOR)?.checked_add(self.table_bytes())?;
        (sector <= u64::from(u32::MAX) && end <= len).then_some(sector)
    }

    /// Decodes the entries of the directory at `at`, and checks that each table is within the file
    /// of `len` bytes.
    pub(crate) fn check_directory(
        &self,
        words: &[u64],
        at: u64,
        len: u64,
        file: &str,
    ) -> Result<Vec<u32>> {
        let sector = |(index, &word): (u64, &u64)| {
            if word == 0 {
                return Ok(0);
            }
            self.table_sector(word, len).map(|sector| sector as u32).ok_or_else(|| {
                let expected = match self.flavor {
                    Flavor::Se { .. } => "0, or a grain table and 0x10000000 in the upper half",
                    _ if word == 1 => "a grain table (zeroed tables are not known)",
                    _ => "a grain table within the file",
                };
                let (at, found) = (at + index * self.entry_bytes, format!("{word:#x}"));
                Error::corrupt(file, at, "grain directory entry", found, expected)
            })
        };
        (0..).zip(words).map(sector).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sparse(flavor: Flavor) -> Sparse {
        Sparse {
            flavor,
            file: FileIndex(0),
            grain_bytes: 4096,
            table_entries: 512,
            directory_at: 512,
            directory: RwLock::default(),
            redundant_at: None,
            redundant: RwLock::default(),
            metadata: RwLock::new(vec![10, 14, 30]),
            front: vec![0..1024, 0..0],
            entry_bytes: 4,
        }
    }

    #[test]
    fn words_mean_what_the_flavor_says() {
        let hosted = sparse(Flavor::Hosted { zero_grain: false });
        assert_eq!(hosted.entry(0, 1 << 20), Some(Entry::Hole));
        assert_eq!(hosted.entry(2048, 1 << 20), None);
        // Cut off by the end of the file: valid only if new grains cannot overlap it.
        assert_eq!(hosted.entry(2047, 1 << 20), None);
        assert_eq!(hosted.entry(2040, 1 << 20), Some(Entry::At(2040 * 512)));
        assert_eq!(hosted.entry(2040, (1 << 20) - 512), Some(Entry::At(2040 * 512)));
        assert_eq!(hosted.entry(2039, 1 << 20), Some(Entry::At(2039 * 512)));
        assert_eq!(hosted.entry(1, 1 << 20), Some(Entry::At(512)));
        let zeroing = sparse(Flavor::Hosted { zero_grain: true });
        assert_eq!(zeroing.entry(1, 1 << 20), Some(Entry::Zero));
        let se = sparse(Flavor::Se { tables: 8, grains: 16 });
        assert_eq!(se.entry(1, 1 << 20), None);
        assert_eq!(se.entry(1 << 60, 1 << 20), Some(Entry::Zero));
        assert_eq!(se.entry(2 << 60, 1 << 20), Some(Entry::Zero));
        // The low bits of the index are stored above its high ones.
        assert_eq!(se.entry(3 << 60 | 2 << 48, 1 << 20), Some(Entry::At((16 + 16) * 512)));
        assert_eq!(se.entry(3 << 60 | 1, u64::MAX), Some(Entry::At((16 + (8 << 12)) * 512)));
        assert_eq!(se.entry(4 << 60, 1 << 20), None);
    }

    #[test]
    fn metadata_is_found_from_both_sides() {
        let s = sparse(Flavor::Hosted { zero_grain: false });
        let at =
            |sectors: Range<u64>| s.overlaps_metadata(&(sectors.start * 512..sectors.end * 512));
        assert!(at(1..2) && at(13..14) && at(17..18) && at(10..11) && at(5..40) && at(33..34));
        assert!(!at(2..10) && !at(18..30) && !at(34..100));
    }
}
