//! Structures around the blocks: the footer after them, its copy and the dynamic header before
//! them, and a sector bitmap before each block.

use std::sync::Arc;

use parking_lot::Mutex;
use rustc_hash::FxHashSet;
use vdkit_block::{Error, ErrorKind, HostOffset, Result, Storage};
use vdkit_blockmap::{Envelope, Geometry, copy_entries};

use crate::check::judge_capacity;
use crate::footer::{DiskType, FOOTER_BYTES, Footer, SECTOR, size_of};
use crate::header::DynamicHeader;
use crate::locate::{Footers, footer_at};

/// Most blocks with full bitmaps to cache.
const FULL_MAX: usize = 1 << 20;

/// Footer and dynamic header of an open image.
#[derive(Debug)]
pub(crate) struct VhdEnvelope {
    storage: Arc<dyn Storage>,
    parts: Mutex<Parts>,
    /// With a parent, new blocks start without present sectors.
    over_parent: bool,
    bitmap_bytes: usize,
    /// Blocks whose bitmaps are full.
    full: Mutex<FxHashSet<u64>>,
}

/// The metadata of an image with a table.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) footer: Footer,
    pub(crate) header: DynamicHeader,
}

impl Parts {
    /// The valid one of these footers, and the dynamic header that it names.
    ///
    /// # Errors
    /// [`Error::Corrupt`]; those of the storage.
    pub(crate) fn read(storage: &dyn Storage, footers: &Footers) -> Result<Self> {
        let file = storage.name();
        let footer = footers.best(file)?.clone();
        let header = DynamicHeader::read(storage, footer.data_offset())?;
        header.judge_sum(file)?;
        judge_capacity(file, &footer, &header)?;
        Ok(Self { footer, header })
    }
}

impl VhdEnvelope {
    pub(crate) fn new(storage: Arc<dyn Storage>, parts: Parts) -> Self {
        Self {
            storage,
            bitmap_bytes: parts.header.bitmap_bytes() as usize,
            over_parent: parts.footer.disk_type == DiskType::Differencing,
            parts: Mutex::new(parts),
            full: Mutex::default(),
        }
    }

    fn footer(&self) -> Footer {
        self.parts.lock().footer.clone()
    }

    /// Makes room up to `end` for a table, with the footer after it.
    fn lengthen(&self, end: u64, entries: u64) -> Result<()> {
        let storage = &*self.storage;
        if storage.caps().growable {
            storage.set_len(end + FOOTER_BYTES as u64)?;
        } else if end + FOOTER_BYTES as u64 > storage.len()? {
            let what = format!("a table of {entries} entries on a device");
            return Err(Error::no_space(storage.name(), what));
        }
        self.grown(end)
    }
}

impl Envelope for VhdEnvelope {
    fn name(&self) -> &'static str {
        "vpc"
    }

    fn over_parent(&self) -> bool {
        self.over_parent
    }

    fn tail_bytes(&self) -> u64 {
        FOOTER_BYTES as u64
    }

    /// The copy at the start is not changed, so a crash leaves at least that one.
    fn grown(&self, end: u64) -> Result<()> {
        self.storage.write_at(self.footer().bytes(), footer_at(&*self.storage, end)?)
    }

    fn new_block(&self, start: u64) -> Result<()> {
        let byte = if self.over_parent { 0 } else { 0xff };
        self.storage.write_at(&vec![byte; self.bitmap_bytes], HostOffset(start))?;
        self.full.lock().insert(start);
        Ok(())
    }

    /// Programs that honor the bitmaps of dynamic images read zeroes from sectors whose bit is
    /// clear.
    fn before_write(&self, start: u64) -> Result<()> {
        if self.full.lock().contains(&start) {
            return Ok(());
        }
        let mut bitmap = vec![0; self.bitmap_bytes];
        self.storage.read_at(&mut bitmap, HostOffset(start))?;
        if bitmap.iter().any(|byte| *byte != 0xff) {
            bitmap.fill(0xff);
            self.storage.write_at(&bitmap, HostOffset(start))?;
        }
        let mut full = self.full.lock();
        if full.len() >= FULL_MAX {
            full.clear();
        }
        full.insert(start);
        Ok(())
    }

    fn finish(&self, geometry: &Geometry, end: u64) -> Result<()> {
        let storage = &*self.storage;
        self.full.lock().clear();
        let end = geometry.file_end(end).next_multiple_of(SECTOR);
        let len = end + FOOTER_BYTES as u64;
        if let Err(error) = self.grown(end) {
            if error.kind() != ErrorKind::NoSpace || storage.len()? <= len {
                return Err(error);
            }
            // A full file system: the end of the file gives back what the footer needs. Meanwhile only
            // the copy at the start says what the disk is.
            storage.set_len(len)?;
            storage.sync()?;
            self.grown(end)?;
        }
        if storage.caps().growable && storage.len()? != len {
            // The footer at the new end must be durable before the truncation.
            storage.sync()?;
            storage.set_len(len)?;
        }
        Ok(())
    }

    fn judge_size(&self, _: &Geometry, guest_bytes: u64) -> Result<u64> {
        let exact = !self.footer().sized_by_geometry();
        Ok(size_of(self.storage.name(), guest_bytes, exact)?.0)
    }

    /// Grows the table in place if nothing directly follows it. Otherwise moves it after the last
    /// block: before an already moved table if there is room, else after it.
    fn room_for(&self, geometry: &Geometry, entries: u64, end: u64) -> Result<(Geometry, u64)> {
        let header_at = self.parts.lock().header.at;
        let sector_end = geometry.table_end().next_multiple_of(SECTOR);
        // In images of other programs, the header may begin in the table's last sector.
        let begins_there = (geometry.table_end()..sector_end).contains(&header_at);
        let room_end = if begins_there { header_at } else { sector_end };
        if entries * 4 <= room_end - geometry.table_at {
            return Ok((*geometry, end));
        }
        let bytes = (entries * 4).next_multiple_of(SECTOR);
        let behind_blocks = end.max(geometry.kept_end).next_multiple_of(SECTOR);
        let after = if behind_blocks + bytes <= geometry.table_at {
            Geometry { table_at: behind_blocks, ..*geometry }
        } else {
            let table_at = geometry.file_end(end).next_multiple_of(SECTOR);
            self.lengthen(table_at + bytes, entries)?;
            Geometry { table_at, ..*geometry }
        };
        copy_entries(&*self.storage, geometry, &after, |_, _| Ok(true))?;
        // New blocks continue after the last one, and skip the table.
        Ok((after, end))
    }

    /// The table must always have an entry for each block of the disk, so it grows before the disk
    /// and shrinks after it.
    fn resized(&self, geometry: &Geometry, guest_bytes: u64, end: u64) -> Result<()> {
        let (storage, file) = (&*self.storage, self.storage.name());
        let mut parts = self.parts.lock();
        let (bytes, chs) = size_of(file, guest_bytes, !parts.footer.sized_by_geometry())?;
        let footer = parts.footer.clone().sized(bytes, chs);
        let entries = u32::try_from(geometry.entries)
            .map_err(|_| Error::no_space(file, "a VHD table has at most 2^32 entries"))?;
        let header = parts.header.clone().with_table(geometry.table_at, entries);
        let grows = header.entries() >= parts.header.entries();
        if grows {
            storage.write_at(header.bytes(), HostOffset(header.at))?;
            storage.sync()?;
        }
        let end = geometry.file_end(end).next_multiple_of(SECTOR);
        storage.write_at(footer.bytes(), footer_at(storage, end)?)?;
        storage.sync()?;
        storage.write_at(footer.bytes(), HostOffset(0))?;
        storage.sync()?;
        if !grows {
            storage.write_at(header.bytes(), HostOffset(header.at))?;
            storage.sync()?;
        }
        *parts = Parts { footer, header };
        Ok(())
    }

    fn stored(&self) -> Result<(Geometry, u64)> {
        let parts = Parts::read(&*self.storage, &Footers::read(&*self.storage)?)?;
        let stored = (parts.header.geometry(), parts.footer.disk_bytes());
        *self.parts.lock() = parts;
        Ok(stored)
    }
}
