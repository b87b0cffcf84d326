//! VMDK guarantees: crashes, failures, threads, untrusted headers, the cost of a flush. What needs jobs
//! or other formats is in `vdkit/tests/vmdk`.
//!
//! Each run prints its seed on failure; `VDKIT_SEED` replays it and `VDKIT_CASES` multiplies
//! the number of cases.

mod costs;
mod faults;
mod hostile;
mod model;
mod power_cut;
mod repair;
mod threads;

use std::sync::Arc;

use vdkit_block::{
    CheckReport, FormatDriver, HostOffset, Limits, OfflineImage, OpenRequest, Repair, Storage,
};
use vdkit_chain::Disk;
use vdkit_raw::RawDriver;
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{assert_sound, backing_image, content_over, open_image, read_all};
use vdkit_vmdk::VmdkDriver;
use vdkit_vmdk::header::{SparseHeader, flag};

/// Bytes of the guest disks; the last grain is partial.
pub const GUEST_BYTES: u64 = (3 << 20) + 1536;

/// One kind of hosted sparse image.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Bytes of a grain.
    pub grain: u64,
    /// Entries of a table.
    pub entries: u32,
    /// Zero grains have entries.
    pub zeroed: bool,
    /// There is a redundant directory.
    pub redundant: bool,
    /// The tables are not allocated yet.
    pub bare: bool,
    /// Bytes of the backing image.
    pub backing: Option<u64>,
}

/// As made by VMware and QEMU.
pub const USUAL: Shape = Shape {
    grain: 64 << 10,
    entries: 512,
    zeroed: false,
    redundant: true,
    bare: false,
    backing: None,
};

/// The tested shapes.
pub const SHAPES: &[Shape] = &[
    USUAL,
    Shape { grain: 4096, zeroed: true, ..USUAL },
    Shape { grain: 4096, entries: 512, backing: Some(2 << 20), ..USUAL },
    Shape { grain: 4096, entries: 128, bare: true, zeroed: true, backing: Some(4 << 20), ..USUAL },
    Shape { grain: 8192, entries: 16, redundant: false, bare: true, ..USUAL },
    Shape { grain: 512, entries: 200, backing: Some(1 << 20), ..USUAL },
];

impl Shape {
    fn descriptor(&self) -> String {
        let parent = match self.backing {
            Some(_) => "parentCID=12345678\nparentFileNameHint=\"base\"\n",
            None => "parentCID=ffffffff\n",
        };
        format!(
            "# Disk DescriptorFile\nversion=1\nCID=0badcafe\ncreateType=\"monolithicSparse\"\n\
             {parent}RW {} SPARSE \"image\"\nddb.adapterType = \"ide\"\n",
            GUEST_BYTES / 512
        )
    }

    /// The header; directories follow the descriptor, tables follow them.
    pub fn header(&self) -> SparseHeader {
        let on = |wanted, flag| if wanted { flag } else { 0 };
        let mut header = SparseHeader {
            version: 2,
            flags: flag::LINE_ENDS
                | on(self.redundant, flag::REDUNDANT)
                | on(self.zeroed, flag::ZERO_GRAIN),
            capacity: GUEST_BYTES / 512,
            grain_sectors: self.grain / 512,
            descriptor: 1,
            descriptor_sectors: 4,
            table_entries: self.entries,
            redundant_directory: 5,
            directory: 0,
            overhead: 0,
            unclean: false,
            compression: 0,
        };
        let directory = header.directory_bytes().div_ceil(512);
        header.directory = 5 + directory;
        let tables = if self.bare { 0 } else { 2 * header.directory_entries() * self.table() };
        header.overhead = 5 + 2 * directory + tables;
        header
    }

    /// Sectors of a table.
    pub fn table(&self) -> u64 {
        (u64::from(self.entries) * 4).div_ceil(512)
    }

    /// A fresh image.
    pub fn image(&self) -> Arc<MemoryStorage> {
        let header = self.header();
        let memory = MemoryStorage::with_len("image", header.overhead * 512);
        let put = |at: u64, bytes: &[u8]| memory.write_at(bytes, HostOffset(at)).unwrap();
        put(0, &header.encode());
        put(512, self.descriptor().as_bytes());
        if !self.bare {
            let first = header.directory + header.directory_bytes().div_ceil(512);
            for index in 0..header.directory_entries() {
                let at = first + 2 * index * self.table();
                put(header.directory * 512 + index * 4, &(at as u32).to_le_bytes());
                let copy = (at + self.table()) as u32;
                put(header.redundant_directory * 512 + index * 4, &copy.to_le_bytes());
            }
        }
        Arc::new(memory)
    }

    /// The backing image, without a zero sector.
    pub fn base(&self) -> Option<Arc<dyn Storage>> {
        self.backing.map(backing_image)
    }

    /// The initial guest content.
    pub fn first_content(&self) -> Vec<u8> {
        content_over(self.base(), GUEST_BYTES)
    }

    /// Opens an image of this shape for writing.
    pub fn open(&self, storage: Arc<dyn Storage>) -> vdkit_block::Result<Disk> {
        // Small, so that chunks of tables are evicted.
        let mut limits = Limits::default();
        limits.cache_bytes = 64 << 10;
        let top = open(&VmdkDriver, storage, &[], true, limits)?;
        Ok(match self.base() {
            Some(base) => top.over(open(&RawDriver, base, &[], false, limits)?),
            None => top,
        })
    }
}

/// Opens one image.
pub fn open(
    driver: &dyn FormatDriver,
    storage: Arc<dyn Storage>,
    files: &[Arc<dyn Storage>],
    writable: bool,
    limits: Limits,
) -> vdkit_block::Result<Disk> {
    open_image(driver, OpenRequest { storage, files: files.to_vec(), writable, limits })
}

/// Checks an image, and repairs it as `repair` allows.
pub fn check(storage: &Arc<dyn Storage>, repair: Repair) -> vdkit_block::Result<CheckReport> {
    VmdkDriver.check(&OfflineImage::new(storage), repair)
}

/// Checks an image: it must not be corrupt, and must have no leaks if `clean`.
pub fn audit(storage: &Arc<dyn Storage>, clean: bool, what: &str) {
    assert_sound(&VmdkDriver, storage, !clean, what);
}
