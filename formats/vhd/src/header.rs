//! The dynamic header: the offset of the block table, and the parent.

use std::mem::offset_of;

use uuid::Uuid;
use vdkit_block::{Error, HostOffset, Remedy, Result, Storage};
use vdkit_blockmap::{ByteOrder, Geometry};
use zerocopy::big_endian::{U32, U64};
use zerocopy::{FromZeros, IntoBytes};

use crate::footer::{NO_OFFSET, SECTOR};
use crate::on_disk::{ParentLocator, RawHeader, checksum};

pub(crate) const HEADER_BYTES: usize = size_of::<RawHeader>();
pub(crate) const COOKIE: &[u8; 8] = b"cxsparse";
/// Most bytes of a locator's path.
const LOCATOR_BYTES_MAX: u32 = 64 << 10;

/// A validated dynamic header. Unknown fields are preserved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DynamicHeader {
    raw: RawHeader,
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
        let mut raw = RawHeader::new_zeroed();
        storage.read_at(raw.as_mut_bytes(), HostOffset(at))?;
        if raw.cookie != *COOKIE {
            let found = "another cookie".to_owned();
            return corrupt(0, "dynamic header", found, "'cxsparse'");
        }
        let sound = raw.checksum == checksum(raw.as_bytes(), raw.checksum);
        let header = Self { raw, at, sound, file_bytes: host_bytes };
        let block_bytes = header.block_bytes();
        if !block_bytes.is_power_of_two() || block_bytes < SECTOR {
            let found = format!("{block_bytes} bytes");
            let at = offset_of!(RawHeader, block_size);
            return corrupt(at, "block size", found, "a power of two from 512 on");
        }
        let end = header.table_at().checked_add(header.entries() * 4);
        if header.table_at() < SECTOR || end.is_none_or(|end| end > host_bytes) {
            let found = format!("{} entries at {:#x}", header.entries(), header.table_at());
            let at = offset_of!(RawHeader, table_offset);
            return corrupt(at, "block allocation table", found, "a table in the file");
        }
        Ok(header)
    }

    /// [`Error::Corrupt`] if the checksum is wrong.
    pub(crate) fn judge_sum(&self, file: &str) -> Result<()> {
        if self.sound {
            return Ok(());
        }
        let at = self.at + offset_of!(RawHeader, checksum) as u64;
        let found = format!("{:#x}", self.raw.checksum);
        let expected = "the sum of the dynamic header";
        Err(Error::corrupt(file, at, "checksum", found, expected).with_remedy(Remedy::REPAIR))
    }

    /// The header of a new image, at byte 512.
    pub(crate) fn new(table_at: u64, entries: u32, block_bytes: u32) -> Self {
        let raw = RawHeader {
            cookie: *COOKIE,
            data_offset: U64::new(NO_OFFSET),
            header_version: U32::new(0x0001_0000),
            block_size: block_bytes.into(),
            ..FromZeros::new_zeroed()
        };
        let header = Self { raw, at: SECTOR, sound: true, file_bytes: u64::MAX };
        header.with_table(table_at, entries)
    }

    /// The same header with another table.
    pub(crate) fn with_table(mut self, table_at: u64, entries: u32) -> Self {
        self.raw.table_offset = table_at.into();
        self.raw.max_table_entries = entries.into();
        self.summed()
    }

    /// The same header with a parent; `name` is a file name, and the caller stores the name of the
    /// locator.
    pub(crate) fn over(mut self, id: Uuid, time: u32, name: &str, locator: ParentLocator) -> Self {
        self.raw.parent_unique_id = id.into_bytes();
        self.raw.parent_time_stamp = time.into();
        for (stored, unit) in self.raw.parent_unicode_name.iter_mut().zip(name.encode_utf16()) {
            *stored = unit.into();
        }
        self.raw.parent_locators[0] = locator;
        self.summed()
    }

    /// The same header with another time stamp of the parent.
    pub(crate) fn with_parent_time(mut self, time: u32) -> Self {
        self.raw.parent_time_stamp = time.into();
        self.summed()
    }

    /// The same header with a correct checksum.
    pub(crate) fn summed(mut self) -> Self {
        self.raw.checksum = checksum(self.bytes(), self.raw.checksum).into();
        self.sound = true;
        self
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.raw.as_bytes()
    }

    /// Host offset of the table.
    pub(crate) fn table_at(&self) -> u64 {
        self.raw.table_offset.get()
    }

    pub(crate) fn entries(&self) -> u64 {
        self.raw.max_table_entries.into()
    }

    pub(crate) fn block_bytes(&self) -> u64 {
        self.raw.block_size.into()
    }

    /// Bytes of the sector bitmap before each block: whole sectors.
    pub(crate) fn bitmap_bytes(&self) -> u64 {
        (self.block_bytes() / SECTOR).div_ceil(8).next_multiple_of(SECTOR)
    }

    /// The unique ID of the parent.
    pub(crate) fn parent_uuid(&self) -> Uuid {
        Uuid::from_bytes(self.raw.parent_unique_id)
    }

    /// Last change of the parent before this image was created, in seconds since 2000.
    pub(crate) fn parent_time(&self) -> u32 {
        self.raw.parent_time_stamp.get()
    }

    /// The parent's name, in most images without a path.
    pub(crate) fn parent_name(&self) -> String {
        let units = self.raw.parent_unicode_name.iter().map(|unit| unit.get());
        let units: Vec<u16> = units.take_while(|unit| *unit != 0).collect();
        String::from_utf16_lossy(&units)
    }

    /// Places of the stored names of the parent.
    pub(crate) fn locators(&self) -> impl Iterator<Item = &ParentLocator> {
        self.raw.parent_locators.iter().filter(|locator| {
            locator.platform_code != [0; 4]
                && locator.platform_data_length.get() <= LOCATOR_BYTES_MAX
        })
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
        let end = |name: &ParentLocator| {
            name.platform_data_offset.get().checked_add(name.platform_data_length.into())
        };
        let ends = self.locators().filter_map(end).filter(|end| *end <= self.file_bytes);
        ends.max().unwrap_or(0).max(self.at + HEADER_BYTES as u64)
    }
}
