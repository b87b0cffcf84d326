//! The header. Offsets: `docs/formats/vdi.md`.

use uuid::Uuid;
use vdkit_block::bytes::{array, le32, le64};

use vdkit_block::{Error, HostOffset, Result, Storage};
use vdkit_blockmap::{ByteOrder, Geometry};

/// The magic number, at byte 64.
pub(crate) const MAGIC: u32 = 0xbeda_107f;
/// Version 1.1, which vdkit writes.
pub(crate) const VERSION: u32 = 0x0001_0001;
/// Bytes of the header that are read; all fields that change are in the first 512.
pub(crate) const HEADER_BYTES: usize = 512;
/// Entry of a block that reads as zero.
pub(crate) const ZERO: u32 = 0xffff_fffe;
/// Bytes of the header from its size field on, in images of version 1.0.
const SIZE_MIN: u32 = 0x180;
/// Accepted block sizes; no program has written others.
const BLOCK_BYTES: std::ops::RangeInclusive<u32> = 4096..=1 << 30;

/// Offsets of fields.
pub(crate) mod field {
    pub const MAGIC: usize = 64;
    pub const VERSION: usize = 68;
    pub const SIZE: usize = 72;
    pub const TYPE: usize = 76;
    pub const TABLE: usize = 0x154;
    pub const DATA: usize = 0x158;
    pub const SECTOR_BYTES: usize = 0x168;
    pub const DISK_BYTES: usize = 0x170;
    pub const BLOCK_BYTES: usize = 0x178;
    pub const BLOCK_EXTRA: usize = 0x17c;
    pub const ENTRIES: usize = 0x180;
    pub const ALLOCATED: usize = 0x184;
    pub const UUID: usize = 0x188;
    pub const UUID_MODIFY: usize = 0x198;
    pub const UUID_LINK: usize = 0x1a8;
    pub const UUID_PARENT: usize = 0x1b8;
}

/// Offsets of fields in version 0, whose table begins at byte 420 and is followed by the blocks.
mod field_0 {
    pub const TYPE: usize = 72;
    pub const DISK_BYTES: usize = 0x160;
    pub const BLOCK_BYTES: usize = 0x168;
    pub const ENTRIES: usize = 0x16c;
    pub const ALLOCATED: usize = 0x170;
    pub const UUID: usize = 0x174;
    pub const UUID_MODIFY: usize = 0x184;
    pub const UUID_LINK: usize = 0x194;
    pub const END: u32 = 0x1a4;
}

/// What kind of image it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageType {
    /// Blocks are allocated when they are written.
    Dynamic,
    /// All blocks are in the file.
    Static,
    /// As dynamic, with a parent (types 3, undo, and 4, differencing).
    Differencing,
}

impl ImageType {
    fn of(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::Dynamic),
            2 => Some(Self::Static),
            3 | 4 => Some(Self::Differencing),
            _ => None,
        }
    }

    /// The name for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dynamic => "dynamic",
            Self::Static => "static",
            Self::Differencing => "differencing",
        }
    }
}

/// A validated header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Major and minor version.
    pub version: (u16, u16),
    /// What kind of image it is.
    pub image_type: ImageType,
    /// Host offset of the table of blocks.
    pub table_at: u32,
    /// Host offset of the first block.
    pub data_at: u32,
    /// Bytes of the guest disk, in whole sectors.
    pub disk_bytes: u64,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Bytes before each block's data.
    pub block_extra: u32,
    /// Entries of the table.
    pub entries: u32,
    /// Blocks in the file, by the header's own count.
    pub allocated: u32,
    /// UUID of this image.
    pub uuid: Uuid,
    /// UUID of this image's last change.
    pub uuid_modify: Uuid,
    /// UUID of the parent; nil without one.
    pub uuid_link: Uuid,
    /// UUID of the parent's last change when this image was created.
    pub uuid_parent: Uuid,
}

/// Whether this is the start of a VDI image.
pub(crate) fn is_vdi(head: &[u8]) -> bool {
    head.len() >= HEADER_BYTES && le32(head, field::MAGIC) == MAGIC
}

impl Header {
    /// Reads and validates a header, with one read.
    ///
    /// # Errors
    /// [`Error::Corrupt`] and [`Error::Unsupported`]; those of the storage.
    pub fn read(storage: &dyn Storage) -> Result<Self> {
        let mut bytes = [0; HEADER_BYTES];
        let got = storage.read_up_to(&mut bytes, HostOffset(0))?;
        Self::judge(storage.name(), &bytes[..got], storage.len()?)
    }

    fn judge(file: &str, bytes: &[u8], host_bytes: u64) -> Result<Self> {
        let corrupt = |at: usize, what, found: String, expected: &str| {
            Err(Error::corrupt(file, at as u64, what, found, expected))
        };
        if bytes.len() < HEADER_BYTES {
            return corrupt(0, "header", format!("{} bytes", bytes.len()), "at least 512");
        }
        if le32(bytes, field::MAGIC) != MAGIC {
            let found = format!("{:#x}", le32(bytes, field::MAGIC));
            return corrupt(field::MAGIC, "magic number", found, "0xbeda107f");
        }
        let version = le32(bytes, field::VERSION);
        let header = match version >> 16 {
            0 => Self::parse_0(file, bytes)?,
            1 => Self::parse_1(file, bytes)?,
            major => {
                return Err(Error::unsupported(
                    file,
                    format!("not supported: VDI version {major}.{}", version & 0xffff),
                    "versions 0 and 1 are known; VBoxManage clonemedium makes 1.1 of it",
                ));
            }
        };
        if !header.block_bytes.is_power_of_two() || !BLOCK_BYTES.contains(&header.block_bytes) {
            return Err(Error::unsupported(
                file,
                format!("not supported: blocks of {} bytes", header.block_bytes),
                "powers of two from 4 KiB to 1 GiB are known",
            ));
        }
        if header.block_extra > header.block_bytes {
            let found = format!("{} bytes", header.block_extra);
            return corrupt(field::BLOCK_EXTRA, "block extra", found, "at most a block");
        }
        let capacity = u64::from(header.entries) * u64::from(header.block_bytes);
        if header.disk_bytes > capacity {
            let found = format!("{} bytes in {} blocks", header.disk_bytes, header.entries);
            return corrupt(field::DISK_BYTES, "disk size", found, "what the blocks can hold");
        }
        let table_end = u64::from(header.table_at) + u64::from(header.entries) * 4;
        if header.table_at < header.end() || table_end > host_bytes {
            return corrupt(
                field::TABLE,
                "block table",
                format!("{} entries at {:#x}", header.entries, header.table_at),
                "a table behind the header and within the file",
            );
        }
        if header.data_at < header.end() {
            let found = format!("{:#x}", header.data_at);
            return corrupt(field::DATA, "offset of the blocks", found, "one behind the header");
        }
        Ok(header)
    }

    fn parse_1(file: &str, bytes: &[u8]) -> Result<Self> {
        let size = le32(bytes, field::SIZE);
        if size < SIZE_MIN {
            let found = format!("{size}");
            let what = "header size";
            return Err(Error::corrupt(file, field::SIZE as u64, what, found, "at least 384"));
        }
        let at = |at| le32(bytes, at);
        Ok(Self {
            version: version(at(field::VERSION)),
            image_type: image_type(file, field::TYPE, at(field::TYPE))?,
            table_at: at(field::TABLE),
            data_at: at(field::DATA),
            disk_bytes: disk_bytes(file, le64(bytes, field::DISK_BYTES))?,
            block_bytes: at(field::BLOCK_BYTES),
            block_extra: at(field::BLOCK_EXTRA),
            entries: at(field::ENTRIES),
            allocated: at(field::ALLOCATED),
            uuid: Uuid::from_bytes_le(array(bytes, field::UUID)),
            uuid_modify: Uuid::from_bytes_le(array(bytes, field::UUID_MODIFY)),
            uuid_link: Uuid::from_bytes_le(array(bytes, field::UUID_LINK)),
            uuid_parent: Uuid::from_bytes_le(array(bytes, field::UUID_PARENT)),
        })
    }

    fn parse_0(file: &str, bytes: &[u8]) -> Result<Self> {
        let at = |at| le32(bytes, at);
        let entries = at(field_0::ENTRIES);
        let data_at = entries.checked_mul(4).and_then(|bytes| bytes.checked_add(field_0::END));
        let Some(data_at) = data_at else {
            let (what, found) = ("block table", format!("{entries} entries"));
            let expected = "a table that ends below 4 GiB";
            return Err(Error::corrupt(file, field_0::ENTRIES as u64, what, found, expected));
        };
        Ok(Self {
            version: version(at(field::VERSION)),
            image_type: image_type(file, field_0::TYPE, at(field_0::TYPE))?,
            table_at: field_0::END,
            data_at,
            disk_bytes: disk_bytes(file, le64(bytes, field_0::DISK_BYTES))?,
            block_bytes: at(field_0::BLOCK_BYTES),
            block_extra: 0,
            entries,
            allocated: at(field_0::ALLOCATED),
            uuid: Uuid::from_bytes_le(array(bytes, field_0::UUID)),
            uuid_modify: Uuid::from_bytes_le(array(bytes, field_0::UUID_MODIFY)),
            uuid_link: Uuid::from_bytes_le(array(bytes, field_0::UUID_LINK)),
            uuid_parent: Uuid::nil(),
        })
    }

    /// End of the header; no table or block may begin before it.
    fn end(&self) -> u32 {
        if self.version.0 == 0 { field_0::END } else { field::SIZE as u32 + SIZE_MIN }
    }

    /// Whether the image has a parent.
    pub fn has_parent(&self) -> bool {
        self.image_type == ImageType::Differencing || !self.uuid_link.is_nil()
    }

    /// The table and the blocks.
    pub fn geometry(&self) -> Geometry {
        let (block_bytes, skip) = (u64::from(self.block_bytes), u64::from(self.block_extra));
        Geometry {
            order: ByteOrder::Little,
            table_at: self.table_at.into(),
            entries: self.entries.into(),
            base: self.data_at.into(),
            unit: block_bytes + skip,
            skip,
            block_bytes,
            floor: self.data_at.into(),
            first_block: self.data_at.into(),
            kept_end: self.data_at.into(),
            zero: Some(ZERO),
        }
    }
}

fn version(number: u32) -> (u16, u16) {
    ((number >> 16) as u16, number as u16)
}

fn image_type(file: &str, at: usize, number: u32) -> Result<ImageType> {
    ImageType::of(number).ok_or_else(|| {
        let expected = "1 (dynamic), 2 (static), 3 (undo) or 4 (differencing)";
        Error::corrupt(file, at as u64, "image type", number.to_string(), expected)
    })
}

/// Rounds up to whole sectors, as QEMU does: VirtualBox has created images of unaligned sizes.
fn disk_bytes(file: &str, bytes: u64) -> Result<u64> {
    vdkit_block::align_up(bytes, 512).filter(|bytes| *bytes <= i64::MAX as u64).ok_or_else(|| {
        let (at, what) = (field::DISK_BYTES as u64, "disk size");
        Error::corrupt(file, at, what, format!("{bytes:#x}"), "less than 2^63 bytes")
    })
}
