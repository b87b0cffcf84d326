//! Place of the table, and the meaning of its entries.

use vdkit_block::{Error, Remedy, Result};

/// The table entry of a block that is not in the image.
pub(crate) const HOLE: u32 = u32::MAX;

/// Byte order of table entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByteOrder {
    /// Least significant byte first.
    Little,
    /// Most significant byte first.
    Big,
}

impl ByteOrder {
    /// Converts an entry from the order in the file to that of this machine, or back.
    pub(crate) fn converted(self, word: u32) -> u32 {
        match self {
            Self::Little => word.to_le(),
            Self::Big => word.to_be(),
        }
    }
}

/// A decoded entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// The block is not in this image.
    Hole,
    /// The block reads as zero.
    Zero,
    /// The host block begins at this offset.
    At(u64),
}

/// The table and the blocks of an image. All offsets and lengths in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Byte order of the table's entries.
    pub order: ByteOrder,
    /// Host offset of the table.
    pub table_at: u64,
    /// Entries of the table.
    pub entries: u64,
    /// The host offset of entry value 0.
    pub base: u64,
    /// The unit of entries: value *n* is the host offset `base + n * unit`.
    pub unit: u64,
    /// Bytes of a host block before its guest bytes: VHD's sector bitmap.
    pub skip: u64,
    /// Guest bytes of a block, a power of two.
    pub block_bytes: u64,
    /// No host block begins below this offset.
    pub floor: u64,
    /// Offset of the first host block in a compact file.
    pub first_block: u64,
    /// No new block begins, and no file ends, below this offset: before it are headers and the
    /// names of a parent.
    pub kept_end: u64,
    /// The entry of a block that reads as zero, if the format has one.
    pub zero: Option<u32>,
}

impl Geometry {
    /// Bytes of a host block.
    pub fn stride(&self) -> u64 {
        self.skip + self.block_bytes
    }

    /// Bytes of the table.
    pub fn table_bytes(&self) -> u64 {
        self.entries * 4
    }

    /// End of the table.
    pub fn table_end(&self) -> u64 {
        self.table_at + self.table_bytes()
    }

    /// The first place for a block from `start` on (itself a valid place) that overlaps neither the
    /// table nor the range up to `kept_end`.
    pub fn place(&self, start: u64) -> u64 {
        let start = start.max(self.kept_end);
        if start >= self.table_end() || start + self.stride() <= self.table_at {
            return start;
        }
        let steps = self.table_end().saturating_sub(self.base).div_ceil(self.unit);
        self.base + steps * self.unit
    }

    /// End of a file whose blocks end at `end`.
    pub fn file_end(&self, end: u64) -> u64 {
        end.max(self.table_end()).max(self.kept_end)
    }

    /// Decodes an entry, without validating the offset.
    pub fn slot(&self, word: u32) -> Slot {
        match word {
            HOLE => Slot::Hole,
            _ if Some(word) == self.zero => Slot::Zero,
            // At most 2^32 steps of 2^31 bytes from a base below 2^33.
            _ => Slot::At(self.base + u64::from(word) * self.unit),
        }
    }

    /// The entry of a host block at this offset, if the format can encode it.
    pub fn word(&self, start: u64) -> Option<u32> {
        let steps = start.checked_sub(self.base)?;
        if !steps.is_multiple_of(self.unit) {
            return None;
        }
        let word = u32::try_from(steps / self.unit).ok()?;
        (word != HOLE && Some(word) != self.zero).then_some(word)
    }

    /// Host offset of a table entry.
    pub fn entry_at(&self, index: u64) -> u64 {
        self.table_at + index * 4
    }

    /// If a host block cannot be at `start` in a file of `host_bytes`: what was expected.
    pub fn fault(&self, start: u64, host_bytes: u64) -> Option<&'static str> {
        let table = self.table_at..self.table_end();
        if start < self.floor {
            Some("a block behind the headers")
        } else if start < table.end && table.start < start + self.stride() {
            Some("a block that does not reach into the table")
        } else if start + self.skip >= host_bytes {
            Some("a block within the file")
        } else {
            None
        }
    }

    /// [`Geometry::fault`] as an error.
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    pub fn judge(&self, file: &str, index: u64, start: u64, host_bytes: u64) -> Result<()> {
        match self.fault(start, host_bytes) {
            None => Ok(()),
            Some(expected) => Err(Error::corrupt(
                file,
                self.entry_at(index),
                "block table entry",
                format!("a block at {start:#x} of a file of {host_bytes:#x} bytes"),
                expected,
            )
            .with_remedy(Remedy::REPAIR)),
        }
    }
}
