//! The header, validated.

use std::mem::offset_of;

use uuid::Uuid;
use vdkit_block::{Error, HostOffset, Result, Storage};
use vdkit_blockmap::{ByteOrder, Geometry};
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, transmute_ref};

use crate::on_disk::{RawHeader, RawHeader0};

/// The magic number, at byte 64.
pub(crate) const MAGIC: u32 = 0xbeda_107f;
/// Version 1.1, which vdkit writes.
pub(crate) const VERSION: u32 = 0x0001_0001;
/// Bytes of the header that are read.
pub(crate) const HEADER_BYTES: usize = size_of::<RawHeader>();
/// Entry of a block that reads as zero.
pub(crate) const ZERO: u32 = 0xffff_fffe;
/// Bytes of the header from its size field on, in images of version 1.0.
const SIZE_MIN: u32 = 0x180;
/// Host offset of the table in version 0.
const TABLE_0_AT: u32 = offset_of!(RawHeader0, table) as u32;
/// Offsets of the disk's size, in versions 1 and 0.
const SIZE_AT: usize = offset_of!(RawHeader, disk_bytes);
const SIZE_0_AT: usize = offset_of!(RawHeader0, disk_bytes);
/// Accepted block sizes; no program has written others.
const BLOCK_BYTES: std::ops::RangeInclusive<u32> = 4096..=1 << 30;

/// What kind of image it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ImageType {
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

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Dynamic => "dynamic",
            Self::Static => "static",
            Self::Differencing => "differencing",
        }
    }
}

/// A validated header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Major and minor version.
    pub(crate) version: (u16, u16),
    pub(crate) image_type: ImageType,
    /// Host offset of the table of blocks.
    pub(crate) table_at: u32,
    /// Host offset of the first block.
    pub(crate) data_at: u32,
    /// Bytes of the guest disk, in whole sectors.
    pub(crate) disk_bytes: u64,
    pub(crate) block_bytes: u32,
    /// Bytes before each block's data.
    pub(crate) block_extra: u32,
    pub(crate) entries: u32,
    /// Blocks in the file, by the header's own count.
    pub(crate) allocated: u32,
    pub(crate) uuid: Uuid,
    /// UUID of this image's last change.
    pub(crate) uuid_modify: Uuid,
    /// UUID of the parent; nil without one.
    pub(crate) uuid_link: Uuid,
    /// UUID of the parent's last change when this image was created.
    pub(crate) uuid_parent: Uuid,
}

/// Whether this is the start of a VDI image.
pub(crate) fn is_vdi(head: &[u8]) -> bool {
    RawHeader::ref_from_prefix(head).is_ok_and(|(header, _)| header.magic == MAGIC)
}

impl Header {
    /// Reads and validates a header, with one read.
    ///
    /// # Errors
    /// [`Error::Corrupt`] and [`Error::Unsupported`]; those of the storage.
    pub(crate) fn read(storage: &dyn Storage) -> Result<Self> {
        let mut bytes = [0; HEADER_BYTES];
        let got = storage.read_up_to(&mut bytes, HostOffset(0))?;
        Self::judge(storage.name(), &bytes[..got], storage.len()?)
    }

    fn judge(file: &str, bytes: &[u8], host_bytes: u64) -> Result<Self> {
        let corrupt = |at: usize, what, found: String, expected: &str| {
            Err(Error::corrupt(file, at as u64, what, found, expected))
        };
        let Ok((stored, _)) = RawHeader::ref_from_prefix(bytes) else {
            return corrupt(0, "header", format!("{} bytes", bytes.len()), "at least 512");
        };
        if stored.magic != MAGIC {
            let found = format!("{:#x}", stored.magic);
            return corrupt(offset_of!(RawHeader, magic), "magic number", found, "0xbeda107f");
        }
        let version = stored.version.get();
        let header = match version >> 16 {
            0 => Self::parse_0(file, transmute_ref!(stored))?,
            1 => Self::parse_1(file, stored)?,
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
            let at = offset_of!(RawHeader, block_extra);
            return corrupt(at, "block extra", found, "at most a block");
        }
        let capacity = u64::from(header.entries) * u64::from(header.block_bytes);
        let old = header.version.0 == 0;
        if header.disk_bytes > capacity {
            let found = format!("{} bytes in {} blocks", header.disk_bytes, header.entries);
            let at = if old { SIZE_0_AT } else { SIZE_AT };
            return corrupt(at, "disk size", found, "what the blocks can hold");
        }
        let table_end = u64::from(header.table_at) + u64::from(header.entries) * 4;
        if header.table_at < header.end() || table_end > host_bytes {
            let field = offset_of!(RawHeader, table_offset);
            let at = if old { offset_of!(RawHeader0, blocks) } else { field };
            let found = format!("{} entries at {:#x}", header.entries, header.table_at);
            let expected = "a table behind the header and within the file";
            return corrupt(at, "block table", found, expected);
        }
        if header.data_at < header.end() {
            let found = format!("{:#x}", header.data_at);
            let at = offset_of!(RawHeader, data_offset);
            return corrupt(at, "offset of the blocks", found, "one behind the header");
        }
        Ok(header)
    }

    fn parse_1(file: &str, stored: &RawHeader) -> Result<Self> {
        if stored.header_bytes.get() < SIZE_MIN {
            let at = offset_of!(RawHeader, header_bytes) as u64;
            let found = stored.header_bytes.to_string();
            return Err(Error::corrupt(file, at, "header size", found, "at least 384"));
        }
        Ok(Self {
            version: version(stored.version),
            image_type: image_type(file, offset_of!(RawHeader, image_type), stored.image_type)?,
            table_at: stored.table_offset.get(),
            data_at: stored.data_offset.get(),
            disk_bytes: disk_bytes(file, SIZE_AT, stored.disk_bytes.get())?,
            block_bytes: stored.block_bytes.get(),
            block_extra: stored.block_extra.get(),
            entries: stored.blocks.get(),
            allocated: stored.blocks_allocated.get(),
            uuid: Uuid::from_bytes_le(stored.uuid),
            uuid_modify: Uuid::from_bytes_le(stored.uuid_modify),
            uuid_link: Uuid::from_bytes_le(stored.uuid_link),
            uuid_parent: Uuid::from_bytes_le(stored.uuid_parent),
        })
    }

    fn parse_0(file: &str, stored: &RawHeader0) -> Result<Self> {
        let entries = stored.blocks.get();
        let data_at = entries.checked_mul(4).and_then(|bytes| bytes.checked_add(TABLE_0_AT));
        let Some(data_at) = data_at else {
            let at = offset_of!(RawHeader0, blocks) as u64;
            let (what, found) = ("block table", format!("{entries} entries"));
            return Err(Error::corrupt(file, at, what, found, "a table that ends below 4 GiB"));
        };
        Ok(Self {
            version: version(stored.version),
            image_type: image_type(file, offset_of!(RawHeader0, image_type), stored.image_type)?,
            table_at: TABLE_0_AT,
            data_at,
            disk_bytes: disk_bytes(file, SIZE_0_AT, stored.disk_bytes.get())?,
            block_bytes: stored.block_bytes.get(),
            block_extra: 0,
            entries,
            allocated: stored.blocks_allocated.get(),
            uuid: Uuid::from_bytes_le(stored.uuid),
            uuid_modify: Uuid::from_bytes_le(stored.uuid_modify),
            uuid_link: Uuid::from_bytes_le(stored.uuid_link),
            uuid_parent: Uuid::nil(),
        })
    }

    /// End of the header; no table or block may begin before it.
    fn end(&self) -> u32 {
        let size_at = offset_of!(RawHeader, header_bytes) as u32;
        if self.version.0 == 0 { TABLE_0_AT } else { size_at + SIZE_MIN }
    }

    /// Fails for an image of version 0, which is only read.
    pub(crate) fn refuse_version_0(&self, file: &str, action: &str, hint: &str) -> Result<()> {
        if self.version.0 > 0 {
            return Ok(());
        }
        let what = format!("not supported: {action} a VDI image of version 0");
        Err(Error::unsupported(file, what, hint))
    }

    pub(crate) fn has_parent(&self) -> bool {
        self.image_type == ImageType::Differencing || !self.uuid_link.is_nil()
    }

    pub(crate) fn geometry(&self) -> Geometry {
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

fn version(number: U32) -> (u16, u16) {
    let number = number.get();
    ((number >> 16) as u16, number as u16)
}

fn image_type(file: &str, at: usize, number: U32) -> Result<ImageType> {
    ImageType::of(number.get()).ok_or_else(|| {
        let expected = "1 (dynamic), 2 (static), 3 (undo) or 4 (differencing)";
        Error::corrupt(file, at as u64, "image type", number.to_string(), expected)
    })
}

/// Rounds up to whole sectors, as QEMU does: VirtualBox has created images of unaligned sizes.
fn disk_bytes(file: &str, at: usize, bytes: u64) -> Result<u64> {
    vdkit_block::align_up(bytes, 512).filter(|bytes| *bytes <= i64::MAX as u64).ok_or_else(|| {
        let (found, expected) = (format!("{bytes:#x}"), "less than 2^63 bytes");
        Error::corrupt(file, at as u64, "disk size", found, expected)
    })
}
