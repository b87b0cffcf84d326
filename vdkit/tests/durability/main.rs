//! qcow2 guarantees under crashes, failures and threads, and the cost of a flush.
//!
//! Each run prints its seed on failure; `VDKIT_SEED` replays it and `VDKIT_CASES` multiplies
//! the number of cases.

mod barriers;
mod beyond_end;
mod costs;
mod faults;
mod power_cut;
mod threads;

use std::sync::Arc;

use vdkit::storage::MemoryStorage;
use vdkit::{
    BackingRef, CompactOptions, CreateRequest, Disk, Limits, OfflineImage, OpenRequest, Options,
    Storage,
};
use vdkit_testkit::{assert_sound, backing_image, content_over, open_image, read_all};

/// Bytes of the guest disks.
pub const GUEST_BYTES: u64 = 3 << 20;

/// One kind of image.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Options of `create`.
    pub options: &'static str,
    /// Bytes of the backing image.
    pub backing: Option<u64>,
}

/// The tested shapes.
pub const SHAPES: &[Shape] = &[
    Shape { options: "", backing: None },
    Shape { options: "cluster_size=512", backing: None },
    Shape { options: "cluster_size=4K,refcount_bits=1", backing: Some(1 << 20) },
    Shape { options: "compat=0.10", backing: Some(GUEST_BYTES) },
    Shape { options: "cluster_size=16K,extended_l2=on", backing: Some(2 << 20) },
    Shape { options: "cluster_size=4K,lazy_refcounts=on", backing: None },
    Shape { options: "cluster_size=64K,refcount_bits=64", backing: Some(4 << 20) },
];

impl Shape {
    /// Creates an image on `storage`.
    pub fn create(&self, storage: &Arc<dyn Storage>) {
        self.create_of(storage, GUEST_BYTES);
    }

    fn create_of(&self, storage: &Arc<dyn Storage>, guest_bytes: u64) {
        let driver = vdkit::format("qcow2").unwrap();
        let options = Options::parse("qcow2", driver.options(), [self.options]).unwrap();
        driver
            .create(&CreateRequest {
                storage: storage.clone(),
                files: Vec::new(),
                guest_bytes,
                options,
                backing: self.backing.map(|_| BackingRef::new("base", Some("raw".into()))),
                backing_bytes: None,
            })
            .unwrap();
    }

    /// A fresh image in memory.
    pub fn image(&self) -> Arc<MemoryStorage> {
        let memory = Arc::new(MemoryStorage::new("image"));
        self.create(&(memory.clone() as Arc<dyn Storage>));
        memory
    }

    /// An image created for a disk of `guest_bytes` and then grown: its refcount blocks cover only
    /// the original size.
    pub fn grown_image(&self, guest_bytes: u64) -> Arc<MemoryStorage> {
        let memory = Arc::new(MemoryStorage::new("image"));
        let storage: Arc<dyn Storage> = memory.clone();
        self.create_of(&storage, guest_bytes);
        let disk = self.open(storage).unwrap();
        disk.resize(GUEST_BYTES).unwrap();
        disk.close().unwrap();
        memory
    }

    /// An image with minimal refcount blocks.
    pub fn small_image(&self) -> Arc<MemoryStorage> {
        let memory = self.image();
        let storage: Arc<dyn Storage> = memory.clone();
        compact(&storage);
        memory
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
    pub fn open(&self, storage: Arc<dyn Storage>) -> vdkit::Result<Disk> {
        let mut limits = Limits::default();
        limits.cache_bytes = 1 << 20;
        let open = |name: &str, storage, writable| {
            let request = OpenRequest { storage, files: Vec::new(), writable, limits };
            open_image(vdkit::format(name)?, request)
        };
        let top = open("qcow2", storage, true)?;
        Ok(match self.base() {
            Some(base) => top.over(open("raw", base, false)?),
            None => top,
        })
    }
}

/// Compacts an image, including unused refcount blocks.
pub fn compact(storage: &Arc<dyn Storage>) {
    let driver = vdkit::format("qcow2").unwrap();
    let how = CompactOptions::default().zero_scan(false);
    driver.compact(&OfflineImage::new(storage), how).unwrap();
}

/// Checks an image: it must not be corrupt, and must have no leaks if `clean`.
pub fn audit(storage: &Arc<dyn Storage>, clean: bool, what: &str) {
    assert_sound(vdkit::format("qcow2").unwrap(), storage, !clean, what);
}
