//! Structures around the blocks: the header with its block count.

use std::mem::offset_of;
use std::sync::Arc;

use parking_lot::Mutex;
use vdkit_block::{Error, HostOffset, Result, Storage, align_up, random_uuid};
use vdkit_blockmap::{Envelope, Geometry, Slot, compact, copy_entries};
use zerocopy::little_endian::U32;
use zerocopy::{FromZeros, IntoBytes};

use crate::header::{Header, ImageType};
use crate::on_disk::RawHeader;

/// Most blocks that QEMU opens: their table is smaller than 4 GiB.
pub(crate) const ENTRIES_MAX: u64 = 0x3fff_ffff;

/// The header of an open image.
#[derive(Debug)]
pub(crate) struct VdiEnvelope {
    storage: Arc<dyn Storage>,
    image_type: ImageType,
    /// The block count on disk.
    allocated: Mutex<u64>,
}

impl VdiEnvelope {
    pub(crate) fn new(storage: Arc<dyn Storage>, header: &Header) -> Self {
        let allocated = Mutex::new(header.allocated.into());
        Self { storage, image_type: header.image_type, allocated }
    }

    /// A number in the header's encoding.
    fn number(&self, what: &str, value: u64) -> Result<U32> {
        U32::try_from(value).map_err(|_| {
            let what = format!("a VDI header has 32 bits for {what}, which would be {value:#x}");
            Error::no_space(self.storage.name(), what)
        })
    }
}

/// Number of blocks up to `end`.
pub(crate) fn blocks_to(geometry: &Geometry, end: u64) -> u64 {
    end.saturating_sub(geometry.base).div_ceil(geometry.stride())
}

impl Envelope for VdiEnvelope {
    fn name(&self) -> &'static str {
        "vdi"
    }

    fn all_allocated(&self) -> bool {
        self.image_type == ImageType::Static
    }

    /// Other programs append a new block after the counted ones, so the count must be durable
    /// first.
    fn before_map(&self, geometry: &Geometry, end: u64) -> Result<()> {
        let count = blocks_to(geometry, end);
        let mut allocated = self.allocated.lock();
        if *allocated == count {
            return Ok(());
        }
        let stored = self.number("the number of blocks", count)?;
        let at = offset_of!(RawHeader, blocks_allocated) as u64;
        self.storage.write_at(stored.as_bytes(), HostOffset(at))?;
        *allocated = count;
        Ok(())
    }

    fn finish(&self, geometry: &Geometry, end: u64) -> Result<()> {
        self.before_map(geometry, end)?;
        let end = geometry.file_end(end);
        if self.storage.caps().growable && self.storage.len()? != end {
            // The smaller count must be durable before the truncation.
            self.storage.sync()?;
            self.storage.set_len(end)?;
        }
        Ok(())
    }

    fn judge_size(&self, geometry: &Geometry, guest_bytes: u64) -> Result<u64> {
        // The limit of QEMU, whose blocks have 1 MiB; the table of smaller blocks ends earlier.
        let limit = ENTRIES_MAX * geometry.block_bytes.min(1 << 20);
        let size = align_up(guest_bytes, 512).filter(|bytes| *bytes <= limit);
        size.ok_or_else(|| Error::limit(self.storage.name(), "size", guest_bytes, limit))
    }

    /// Grows the table in place up to the first block. Beyond that, moves the first blocks to the
    /// end and writes the new table over their old places; a header whose first-block offset is
    /// after that table switches to it.
    fn room_for(&self, geometry: &Geometry, entries: u64, end: u64) -> Result<(Geometry, u64)> {
        let storage = &*self.storage;
        let bytes = entries * 4;
        self.number("the number of blocks", entries)?;
        if geometry.table_at < geometry.base && geometry.table_at + bytes <= geometry.base {
            return Ok((*geometry, end));
        }
        let stride = geometry.stride();
        let places = bytes.div_ceil(stride);
        let base = geometry.base + places * stride;
        self.number("the offset of the blocks", base)?;
        let start = end.max(base);
        let away = compact::blocks_below(storage, geometry, base)?;
        self.before_map(geometry, start + away * stride)?;
        let end = compact::move_away(storage, geometry, base, start)?;
        let after = Geometry {
            table_at: geometry.base,
            base,
            floor: base,
            first_block: base,
            kept_end: base,
            ..*geometry
        };
        copy_entries(storage, geometry, &after, |first, words| {
            for (index, word) in (first..).zip(words) {
                let Slot::At(start) = geometry.slot(*word) else { continue };
                *word = after.word(start).ok_or_else(|| {
                    let (at, found) = (geometry.entry_at(index), format!("{start:#x}"));
                    let expected = "a block behind the new table";
                    Error::corrupt(storage.name(), at, "block table entry", found, expected)
                })?;
            }
            Ok(true)
        })?;
        Ok((after, end))
    }

    fn resized(&self, geometry: &Geometry, guest_bytes: u64, end: u64) -> Result<()> {
        let storage = &*self.storage;
        let mut header = RawHeader::new_zeroed();
        storage.read_at(header.as_mut_bytes(), HostOffset(0))?;
        let count = blocks_to(geometry, end);
        header.table_offset = self.number("the offset of the table", geometry.table_at)?;
        header.data_offset = self.number("the offset of the blocks", geometry.base)?;
        header.disk_bytes = guest_bytes.into();
        header.blocks = self.number("the number of blocks", geometry.entries)?;
        header.blocks_allocated = self.number("the number of blocks", count)?;
        storage.write_at(header.as_bytes(), HostOffset(0))?;
        storage.sync()?;
        *self.allocated.lock() = count;
        Ok(())
    }

    fn stored(&self) -> Result<(Geometry, u64)> {
        let header = Header::read(&*self.storage)?;
        *self.allocated.lock() = header.allocated.into();
        Ok((header.geometry(), header.disk_bytes))
    }

    /// Children identify their parent by this UUID, which changes with the parent's data.
    fn modified(&self) -> Result<()> {
        let uuid = random_uuid()?.to_bytes_le();
        self.storage.write_at(&uuid, HostOffset(offset_of!(RawHeader, uuid_modify) as u64))
    }
}
