//! Constants of the format, and the arithmetic of the block allocation table.

use uuid::Uuid;

/// Alignment of all structures and blocks.
pub(crate) const MIB: u64 = 1 << 20;
/// Bytes of log sectors, and of pages of tables and bitmaps.
pub(crate) const PAGE_BYTES: u64 = 4096;
pub(crate) const PAGE: usize = PAGE_BYTES as usize;
pub(crate) type Page = Box<[u8; PAGE]>;
/// Largest end of any structure: room for the largest disk twice.
pub(crate) const FILE_BYTES_MAX: u64 = 1 << 47;
/// The largest disk [2.6.2.2].
pub(crate) const GUEST_BYTES_MAX: u64 = 64 << 40;
/// The smallest and the largest block [2.6.2.1].
pub(crate) const BLOCK_BYTES_MIN: u64 = MIB;
pub(crate) const BLOCK_BYTES_MAX: u64 = 256 * MIB;
/// Bytes of a sector bitmap block [2.4].
pub(crate) const BITMAP_BYTES: u64 = MIB;

/// The file type identifier [2.2.1].
pub(crate) const FILE_SIGNATURE: &[u8; 8] = b"vhdxfile";
/// Offsets of the two headers [2.2.2].
pub(crate) const HEADER_OFFSETS: [u64; 2] = [64 << 10, 128 << 10];
/// Offsets of the two region tables [2.2.3].
pub(crate) const REGION_OFFSETS: [u64; 2] = [192 << 10, 256 << 10];
/// Bytes of a region table, and of the table at the head of the metadata region.
pub(crate) const TABLE_BYTES: u64 = 64 << 10;

/// Regions [2.2.3.2].
pub(crate) const BAT_REGION: Uuid = Uuid::from_u128(0x2dc27766_f623_4200_9d64_115e9bfd4a08);
pub(crate) const METADATA_REGION: Uuid = Uuid::from_u128(0x8b7ca206_4790_4b9a_b8fe_575f050f886e);

/// Layout of a disk in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// log2 of the bytes of a payload block.
    pub(crate) block_bits: u32,
    /// log2 of the bytes of a logical sector.
    pub(crate) sector_bits: u32,
    pub(crate) has_parent: bool,
}

impl Geometry {
    pub(crate) fn block_bytes(&self) -> u64 {
        1 << self.block_bits
    }

    pub(crate) fn sector_bytes(&self) -> u64 {
        1 << self.sector_bits
    }

    /// log2 of the payload blocks of a chunk, which share a sector bitmap block of 2^23 bits [2.4].
    pub(crate) fn chunk_bits(&self) -> u32 {
        23 + self.sector_bits - self.block_bits
    }

    /// Payload blocks of a disk.
    pub(crate) fn blocks(&self, guest_bytes: u64) -> u64 {
        guest_bytes.div_ceil(self.block_bytes())
    }

    /// The block that holds a guest byte.
    pub(crate) fn block_of(&self, at: u64) -> u64 {
        at >> self.block_bits
    }

    /// Table index of a payload block [2.5]: each chunk's entries are followed by one for its
    /// sector bitmap.
    pub(crate) fn payload_index(&self, block: u64) -> u64 {
        block + (block >> self.chunk_bits())
    }

    /// Table index of the sector bitmap of a block's chunk.
    pub(crate) fn bitmap_index(&self, block: u64) -> u64 {
        let chunk = block >> self.chunk_bits();
        ((chunk + 1) << self.chunk_bits()) + chunk
    }

    /// Table entries of a disk [2.5].
    pub(crate) fn bat_entries(&self, guest_bytes: u64) -> u64 {
        let blocks = self.blocks(guest_bytes);
        if blocks == 0 {
            0
        } else if self.has_parent {
            self.bitmap_index(blocks - 1) + 1
        } else {
            self.payload_index(blocks - 1) + 1
        }
    }

    /// Bytes of the region for the table of a disk.
    pub(crate) fn bat_region_bytes(&self, guest_bytes: u64) -> u64 {
        (self.bat_entries(guest_bytes) * 8).next_multiple_of(MIB).max(MIB)
    }

    /// The bit of a guest byte's sector within its sector bitmap.
    pub(crate) fn bitmap_bit(&self, at: u64) -> u64 {
        (at >> self.sector_bits) & ((1 << 23) - 1)
    }
}

/// State of a payload block [2.5.1.1].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    NotPresent,
    Undefined,
    Zero,
    Unmapped,
    FullyPresent,
    PartiallyPresent,
}

impl State {
    /// Whether a block without data may keep its space [2.5.1.1], which no other may use then.
    pub(crate) fn keeps_space(self) -> bool {
        matches!(self, Self::Undefined | Self::Unmapped)
    }
}

/// One entry of the block allocation table [2.5.1].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BatEntry(pub(crate) u64);

/// Bits that must be zero.
const RESERVED: u64 = 0xf_fff8;
/// State of a present sector bitmap block, equal to that of a fully present payload block
/// [2.5.1.2].
pub(crate) const PRESENT: u64 = 6;

impl BatEntry {
    pub(crate) const NOT_PRESENT: Self = Self(0);
    pub(crate) const ZERO: Self = Self(2);
    pub(crate) const UNMAPPED: Self = Self(3);

    /// A fully present block, at a multiple of 1 MiB.
    pub(crate) fn present(host: u64) -> Self {
        debug_assert!(host >= MIB && host.is_multiple_of(MIB));
        Self(host | PRESENT)
    }

    /// A partially present block.
    pub(crate) fn partial(host: u64) -> Self {
        debug_assert!(host >= MIB && host.is_multiple_of(MIB));
        Self(host | 7)
    }

    /// The state's number.
    pub(crate) fn state_bits(self) -> u64 {
        self.0 & 7
    }

    /// The state of a payload block, if valid.
    pub(crate) fn state(self) -> Option<State> {
        Some(match self.state_bits() {
            0 => State::NotPresent,
            1 => State::Undefined,
            2 => State::Zero,
            3 => State::Unmapped,
            6 => State::FullyPresent,
            7 => State::PartiallyPresent,
            _ => return None,
        })
    }

    /// Host offset of the block, if it has one.
    pub(crate) fn host(self) -> u64 {
        self.0 & !(MIB - 1)
    }

    /// Reserved bits that are set.
    pub(crate) fn reserved(self) -> u64 {
        self.0 & RESERVED
    }

    /// Whether a sector bitmap lists the present sectors of the block.
    pub(crate) fn is_partial(self) -> bool {
        self.state_bits() == 7
    }

    /// Whether the block has guest data in the file.
    pub(crate) fn has_data(self) -> bool {
        matches!(self.state_bits(), 6 | 7)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_interleaves_bitmaps() {
        let geometry = Geometry { block_bits: 25, sector_bits: 9, has_parent: false };
        assert_eq!(geometry.chunk_bits(), 7);
        assert_eq!(geometry.payload_index(127), 127);
        assert_eq!(geometry.bitmap_index(127), 128);
        assert_eq!(geometry.payload_index(128), 129);
        assert_eq!(geometry.bitmap_index(128), 257);
        assert_eq!(geometry.bat_entries(1), 1);
        assert_eq!(geometry.bat_entries(128 << 25), 128);
        assert_eq!(geometry.bat_entries((128 << 25) + 1), 130);
        let child = Geometry { has_parent: true, ..geometry };
        assert_eq!(child.bat_entries(1), 129);
        assert_eq!(child.bat_entries(128 << 25), 129);
        assert_eq!(child.bat_entries((128 << 25) + 1), 258);
        assert_eq!(geometry.bat_entries(0), 0);
        // The extremes: 16 and 32768 blocks per chunk.
        let large = Geometry { block_bits: 28, ..geometry };
        assert_eq!(large.chunk_bits(), 4);
        let small = Geometry { block_bits: 20, sector_bits: 12, ..geometry };
        assert_eq!(small.chunk_bits(), 15);
    }
}
