//! The dynamic header: the offset of the block table, and the parent. Offsets:
//! `docs/formats/vpc.md`.

use vdkit_block::{Error, HostOffset, Remedy, Result, Storage};
use vdkit_blockmap::{ByteOrder, Geometry};

use crate::footer::{NO_OFFSET, SECTOR, checksum};
use uuid::Uuid;
use vdkit_block::bytes::{array, be32, be64};

/// Bytes of the dynamic header.
pub(crate) const HEADER_BYTES: usize = 1024;
pub(crate) const COOKIE: &[u8; 8] = b"cxsparse";
/// Most bytes of a locator's path.
const LOCATOR_BYTES_MAX: u32 = 64 << 10;

/// Offsets of fields.
pub(crate) mod field {
    pub const DATA_OFFSET: usize = 8;
    pub const TABLE: usize = 16;
    pub const VERSION: usize = 24;
    pub const ENTRIES: usize = 28;
    pub const BLOCK_BYTES: usize = 32;
    pub const CHECKSUM: usize = 36;
    pub const PARENT_UUID: usize = 40;
    pub const PARENT_TIME: usize = 56;
    pub const PARENT_NAME: usize = 64;
    pub const PARENT_NAME_END: usize = 576;
    pub const LOCATORS: usize = 576;
}

/// Place and platform of a stored name of the parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Locator {
    pub(crate) platform: [u8; 4],
    pub(crate) len: u32,
    pub(crate) at: u64,
}

/// A validated dynamic header. Keeps the raw bytes, so unknown fields are preserved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DynamicHeader {
    bytes: [u8; HEADER_BYTES],
    /// Host offset of this header.
    pub(crate) at: u64,
    /// Its checksum is correct.
    pub(crate) sound: bool,
    /// Bytes of the file when the header was read.
    file_bytes: u64,
}

impl DynamicHeader {
    /// Reads the header at the offset in the footer.
    ///
    /// # Errors
    /// [`Error::Corrupt`], but not for only a wrong checksum; [`Error::Unsupported`]; those of the
    /// storage.
    pub(crate) fn read(storage: &dyn Storage, at: u64) -> Result<Self> {
        let file = storage.name();
        let host_bytes = storage.len()?;
        let corrupt = |offset: usize, what, found: String, expected: &str| {
            Err(Error::corrupt(file, at.saturating_add(offset as u64), what, found, expected))
        };
        if at.checked_add(HEADER_BYTES as u64).is_none_or(|end| end > host_bytes) {
            let found = format!("an offset of {at:#x}");
            return corrupt(0, "dynamic header", found, "a header within the file");
        }
        let mut bytes = [0; HEADER_BYTES];
        storage.read_at(&mut bytes, HostOffset(at))?;
        if !bytes.starts_with(COOKIE) {
            let found = "another cookie".to_owned();
            return corrupt(0, "dynamic header", found, "'cxsparse'");
        }
        let sound = be32(&bytes, field::CHECKSUM) == checksum(&bytes, field::CHECKSUM);
        let header = Self { bytes, at, sound, file_bytes: host_bytes };
        let block_bytes = header.block_bytes();
        if !block_bytes.is_power_of_two() || block_bytes < SECTOR {
            let found = format!("{block_bytes} bytes");
            return corrupt(field::BLOCK_BYTES, "block size", found, "a power of two from 512 on");
        }
        let end = header.table_at().checked_add(header.entries() * 4);
        if header.table_at() < SECTOR || end.is_none_or(|end| end > host_bytes) {
            let found = format!("{} entries at {:#x}", header.entries(), header.table_at());
            return corrupt(field::TABLE, "block allocation table", found, "a table in the file");
        }
        Ok(header)
    }

    /// [`Error::Corrupt`] if the checksum is wrong.
    pub(crate) fn judge_sum(&self, file: &str) -> Result<()> {
        if self.sound {
            return Ok(());
        }
        let at = self.at + field::CHECKSUM as u64;
        let found = format!("{:#x}", be32(&self.bytes, field::CHECKSUM));
        let expected = "the sum of the dynamic header";
        Err(Error::corrupt(file, at, "checksum", found, expected).with_remedy(Remedy::REPAIR))
    }

    /// The header of a new image, at byte 512.
    pub(crate) fn new(table_at: u64, entries: u32, block_bytes: u32) -> Self {
        let (bytes, file_bytes) = ([0; HEADER_BYTES], u64::MAX);
        let mut header = Self { bytes, at: SECTOR, sound: true, file_bytes };
        header.put(0, COOKIE);
        header.put(field::DATA_OFFSET, &NO_OFFSET.to_be_bytes());
        header.put(field::VERSION, &0x0001_0000_u32.to_be_bytes());
        header.put(field::BLOCK_BYTES, &block_bytes.to_be_bytes());
        header.with_table(table_at, entries)
    }

    /// The same header with another table.
    pub(crate) fn with_table(mut self, table_at: u64, entries: u32) -> Self {
        self.put(field::TABLE, &table_at.to_be_bytes());
        self.put(field::ENTRIES, &entries.to_be_bytes());
        self.summed()
    }

    /// The same header with a parent; `name` is a file name, and the caller stores the names of the
    /// locators.
    pub(crate) fn over(mut self, uuid: Uuid, time: u32, name: &str, locators: &[Locator]) -> Self {
        self.put(field::PARENT_UUID, uuid.as_bytes());
        self.put(field::PARENT_TIME, &time.to_be_bytes());
        let room = (field::PARENT_NAME_END - field::PARENT_NAME) / 2;
        for (n, unit) in name.encode_utf16().take(room).enumerate() {
            self.put(field::PARENT_NAME + n * 2, &unit.to_be_bytes());
        }
        for (n, locator) in locators.iter().take(8).enumerate() {
            let at = field::LOCATORS + n * 24;
            self.put(at, &locator.platform);
            // In bytes, as in Windows; the specification says sectors.
            self.put(at + 4, &locator.len.next_multiple_of(512).to_be_bytes());
            self.put(at + 8, &locator.len.to_be_bytes());
            self.put(at + 16, &locator.at.to_be_bytes());
        }
        self.summed()
    }

    /// The same header with another time stamp of the parent.
    pub(crate) fn with_parent_time(mut self, time: u32) -> Self {
        self.put(field::PARENT_TIME, &time.to_be_bytes());
        self.summed()
    }

    /// The same header with a correct checksum.
    pub(crate) fn summed(mut self) -> Self {
        let sum = checksum(&self.bytes, field::CHECKSUM);
        self.put(field::CHECKSUM, &sum.to_be_bytes());
        self.sound = true;
        self
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// The raw bytes.
    pub(crate) fn bytes(&self) -> &[u8; HEADER_BYTES] {
        &self.bytes
    }

    /// Host offset of the table.
    pub(crate) fn table_at(&self) -> u64 {
        be64(&self.bytes, field::TABLE)
    }

    pub(crate) fn entries(&self) -> u64 {
        be32(&self.bytes, field::ENTRIES).into()
    }

    /// Guest bytes of a block.
    pub(crate) fn block_bytes(&self) -> u64 {
        be32(&self.bytes, field::BLOCK_BYTES).into()
    }

    /// Bytes of the sector bitmap before each block: whole sectors.
    pub(crate) fn bitmap_bytes(&self) -> u64 {
        (self.block_bytes() / SECTOR).div_ceil(8).next_multiple_of(SECTOR)
    }

    /// The unique ID of the parent.
    pub(crate) fn parent_uuid(&self) -> Uuid {
        Uuid::from_bytes(array(&self.bytes, field::PARENT_UUID))
    }

    /// Last change of the parent before this image was created, in seconds since 2000.
    pub(crate) fn parent_time(&self) -> u32 {
        be32(&self.bytes, field::PARENT_TIME)
    }

    /// The parent's name, in most images without a path.
    pub(crate) fn parent_name(&self) -> String {
        let bytes = &self.bytes[field::PARENT_NAME..field::PARENT_NAME_END];
        let units = bytes.as_chunks::<2>().0.iter().map(|pair| u16::from_be_bytes(*pair));
        let units: Vec<u16> = units.take_while(|unit| *unit != 0).collect();
        String::from_utf16_lossy(&units)
    }

    /// Places of the stored names of the parent.
    pub(crate) fn locators(&self) -> Vec<Locator> {
        let entries = self.bytes[field::LOCATORS..field::LOCATORS + 8 * 24].chunks_exact(24);
        entries
            .filter(|entry| entry[..4] != [0; 4])
            .map(|entry| {
                let mut platform = [0; 4];
                platform.copy_from_slice(&entry[..4]);
                Locator { platform, len: be32(entry, 8), at: be64(entry, 16) }
            })
            .filter(|locator| locator.len <= LOCATOR_BYTES_MAX)
            .collect()
    }

    /// The table and the blocks.
    pub(crate) fn geometry(&self) -> Geometry {
        let table_end = self.table_at() + self.entries() * 4;
        let headers_end = (self.at + HEADER_BYTES as u64).max(2 * SECTOR);
        // In images with a parent, the locators' data is in between.
        let kept_end = self.data_end().next_multiple_of(SECTOR);
        Geometry {
            order: ByteOrder::Big,
            table_at: self.table_at(),
            entries: self.entries(),
            base: 0,
            unit: SECTOR,
            skip: self.bitmap_bytes(),
            block_bytes: self.block_bytes(),
            floor: headers_end,
            first_block: kept_end.max(table_end).next_multiple_of(SECTOR),
            kept_end,
            zero: None,
        }
    }

    /// End of the headers and of the names of the parent. After the table of a disk of 511 GiB or
    /// more, a name is beyond 1 MiB. Ignores names beyond the end of the file.
    fn data_end(&self) -> u64 {
        let names = self.locators();
        let end = |name: &Locator| name.at.checked_add(name.len.into());
        let ends = names.iter().filter_map(end).filter(|end| *end <= self.file_bytes);
        ends.max().unwrap_or(0).max(self.at + HEADER_BYTES as u64)
    }
}
