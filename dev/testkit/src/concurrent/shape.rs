//! The kinds of images that clients share, each small and with a window around a place where two
//! units of the format meet.

use std::ops::Range;
use std::sync::Arc;

use vdkit_block::{
    BackingRef, CacheMode, CheckReport, CreateRequest, Format, FormatDriver, GuestOffset,
    ImageInfo, Limits, OfflineImage, OpenRequest, Options, Repair, Result, Secret, Storage,
};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_luks::LuksDriver;
use vdkit_qcow2::Qcow2Driver;
use vdkit_raw::{RawDriver, RawFormat};
use vdkit_storage::MemoryStorage;
use vdkit_vdi::VdiDriver;
use vdkit_vhd::VhdDriver;
use vdkit_vhdx::VhdxDriver;
use vdkit_vmdk::VmdkDriver;

use super::history::{SECTOR, WRITES, stamps};
use crate::units::{GIB, KIB, MIB};

const KEY: &[u8] = b"a key of the tests";

/// Small, so that pieces of the map are evicted.
fn limits() -> Limits {
    let mut limits = Limits::default();
    limits.cache_bytes = 64 << 10;
    limits
}

/// One kind of image.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// How tests and the command line call it.
    pub name: &'static str,
    /// The format.
    pub driver: &'static dyn FormatDriver,
    /// Its options, as for `-o`.
    pub options: &'static str,
    /// Bytes of the guest disk.
    pub guest_bytes: u64,
    /// Where clients work: the first byte of the first window.
    pub window: u64,
    /// So many windows, in this many units one after the other.
    pub windows: u64,
    /// The unit of allocation, or what clients shall take for one, in bytes.
    pub unit: u64,
    /// It can be resized.
    pub resizes: bool,
    /// The caller of a resize sees to it that no request is in flight.
    pub resizes_alone: bool,
    /// A power cut in a resize may leave it larger, with noise in what is new.
    pub noisy: bool,
    /// It has snapshots and bitmaps.
    pub keeps: bool,
    /// It has a raw backing image that holds data everywhere.
    pub backed: bool,
    /// It has dirty metadata after a crash, which opening it for writing repairs.
    pub lazy: bool,
}

/// Bytes of all windows.
const WINDOW: u64 = 256 * KIB;

const QCOW2: Shape = Shape {
    name: "qcow2-64k",
    driver: &Qcow2Driver,
    options: "",
    guest_bytes: 2 * MIB,
    window: 0,
    windows: 1,
    unit: 64 * KIB,
    resizes: true,
    resizes_alone: false,
    noisy: false,
    keeps: true,
    backed: false,
    lazy: false,
};

const VMDK: Shape =
    Shape { name: "vmdk-sparse", driver: &VmdkDriver, resizes: false, keeps: false, ..QCOW2 };

const VDI: Shape = Shape {
    name: "vdi",
    driver: &VdiDriver,
    guest_bytes: 9 * MIB,
    window: MIB - WINDOW / 16,
    windows: 8,
    unit: MIB,
    resizes_alone: true,
    keeps: false,
    ..QCOW2
};

const VHD: Shape = Shape {
    name: "vhd",
    driver: &VhdDriver,
    options: "force_size=on",
    guest_bytes: 18 * MIB,
    window: 2 * MIB - WINDOW / 16,
    unit: 2 * MIB,
    ..VDI
};

const VHDX: Shape = Shape { name: "vhdx", driver: &VhdxDriver, options: "block_size=1M", ..VDI };

/// All kinds.
pub const SHAPES: &[Shape] = &[
    QCOW2,
    Shape { name: "qcow2-512", options: "cluster_size=512", guest_bytes: MIB, unit: 512, ..QCOW2 },
    Shape { name: "qcow2-4k", options: "cluster_size=4K", unit: 4 * KIB, ..QCOW2 },
    Shape {
        name: "qcow2-2m",
        options: "cluster_size=2M",
        guest_bytes: 6 * MIB,
        window: 2 * MIB - WINDOW / 2,
        unit: 2 * MIB,
        ..QCOW2
    },
    Shape { name: "qcow2-extended", options: "extended_l2=on", unit: 2 * KIB, ..QCOW2 },
    Shape {
        name: "qcow2-lazy",
        options: "cluster_size=4K,lazy_refcounts=on",
        unit: 4 * KIB,
        lazy: true,
        ..QCOW2
    },
    Shape {
        name: "qcow2-backed",
        options: "cluster_size=16K",
        unit: 16 * KIB,
        backed: true,
        ..QCOW2
    },
    Shape { name: "qcow2-data-file", options: "data_file=data.raw", keeps: false, ..QCOW2 },
    Shape { name: "qcow2-luks", options: "encrypt.format=luks,encrypt.iter-time=0", ..QCOW2 },
    VMDK,
    Shape { name: "vmdk-zeroed", options: "zeroed_grain=on", ..VMDK },
    Shape {
        name: "vmdk-split",
        options: "subformat=twoGbMaxExtentSparse",
        guest_bytes: 2 * GIB + MIB,
        window: 2 * GIB - WINDOW / 2,
        ..VMDK
    },
    Shape {
        name: "vmdk-flat",
        options: "subformat=twoGbMaxExtentFlat",
        guest_bytes: 2 * GIB + MIB,
        window: 2 * GIB - WINDOW / 2,
        unit: 4 * KIB,
        ..VMDK
    },
    VDI,
    VHD,
    Shape {
        name: "vhd-fixed",
        options: "force_size=on,subformat=fixed",
        guest_bytes: MIB,
        window: 0,
        windows: 1,
        unit: 4 * KIB,
        // Its one footer stands behind the disk: no order of writes keeps an image that grows whole at
        // each moment (docs/formats/vpc.md).
        resizes: false,
        ..VHD
    },
    VHDX,
    Shape { name: "vhdx-fixed", options: "block_size=1M,subformat=fixed", ..VHDX },
    Shape {
        name: "raw",
        driver: &RawDriver,
        guest_bytes: MIB,
        window: 0,
        windows: 1,
        unit: 4 * KIB,
        ..VDI
    },
    Shape {
        name: "luks",
        driver: &LuksDriver,
        options: "iter-time=0",
        guest_bytes: MIB,
        window: 0,
        windows: 1,
        unit: 4 * KIB,
        noisy: true,
        ..VDI
    },
];

/// What opening, checking and reading a kind of image is about: its storages, the image first.
pub type Files = Vec<Arc<dyn Storage>>;

impl Shape {
    /// The shape of this name.
    pub fn named(name: &str) -> Option<Self> {
        SHAPES.iter().find(|shape| shape.name == name).copied()
    }

    /// The sectors that clients work on.
    pub fn windows(&self) -> Vec<Range<u64>> {
        let count = WINDOW / self.windows / SECTOR;
        let window = |number: u64| {
            let first = (self.window + number * self.unit) / SECTOR;
            first..first + count
        };
        (0..self.windows).map(window).collect()
    }

    fn keys(&self) -> Vec<Secret> {
        let encrypted = self.options.contains("iter-time");
        encrypted.then(|| Secret::new(KEY.to_vec())).into_iter().collect()
    }

    /// A new image, as its files hold it, durably; `filled` puts something into parts of the window.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn make(&self, filled: bool) -> Vec<MemoryStorage> {
        let mut options = Options::parse(self.driver.name(), self.driver.options(), [self.options])
            .expect("good options");
        options.set_key(self.keys().pop());
        let names = self
            .driver
            .require_creation("image")
            .expect("writable")
            .new_files("image", self.guest_bytes, &options)
            .expect("names");
        let new = |name: &str| Arc::new(MemoryStorage::new(name));
        let made: Vec<Arc<MemoryStorage>> =
            std::iter::once("image").chain(names.iter().map(String::as_str)).map(new).collect();
        let files: Files = made.iter().map(|file| file.clone() as Arc<dyn Storage>).collect();
        self.driver
            .create(&CreateRequest {
                storage: files[0].clone(),
                files: files[1..].to_vec(),
                guest_bytes: self.guest_bytes,
                options,
                backing: self.backed.then(|| BackingRef::new("base", Some("raw".to_owned()))),
                backing_bytes: None,
            })
            .expect("a new image");
        if filled {
            let disk = self.open(&files, true, CacheMode::Writeback).expect("a new image opens");
            self.fill(&disk);
            disk.close().expect("closing");
        }
        made.iter().map(|file| MemoryStorage::clone(file)).collect()
    }

    /// Data in every other stretch of the window, with a zero here and there.
    fn fill(&self, disk: &Disk) {
        // A window that begins with nothing leaves its first unit to be allocated.
        let skipped = if self.windows > 1 { 2 } else { 1 };
        let windows = self.windows().into_iter().step_by(skipped);
        for (number, first) in windows.flat_map(|window| window.step_by(24)).enumerate() {
            let count = 12;
            let at = GuestOffset(first * SECTOR);
            let bytes = stamps(first, count, WRITES + (u64::from(u32::MAX) << 24));
            match number % 5 {
                4 => disk.write_zeroes(at, count * SECTOR, true).expect("zeroing"),
                _ => disk.write_at(&bytes, at).expect("writing"),
            }
        }
    }

    /// Its backing image ends within the window.
    fn base(&self) -> Option<Disk> {
        if !self.backed {
            return None;
        }
        let bytes = stamps(0, WINDOW / SECTOR / 4 * 3, u64::from(u32::MAX) << 24);
        let storage = MemoryStorage::from_bytes("base", &bytes).read_only();
        let format = RawFormat::new(Arc::new(storage), false).expect("a raw base");
        let info = ImageInfo::new("raw", format.guest_bytes());
        Some(Disk::from_format(Arc::new(format), info, &OpenOptions::default()))
    }

    /// Opens an image in a cache mode of the disk; what its storages do is their own affair.
    ///
    /// # Errors
    /// What the driver returns.
    pub fn open(&self, files: &Files, writable: bool, cache: CacheMode) -> Result<Disk> {
        let request = OpenRequest {
            storage: files[0].clone(),
            files: files[1..].to_vec(),
            writable,
            limits: limits(),
        };
        let format = self.driver.open_with_keys(request, &self.keys())?;
        let info = ImageInfo::new(self.driver.name(), format.guest_bytes());
        let options = OpenOptions::default().writable(writable).cache(cache);
        let disk = Disk::from_format(format, info, &options);
        Ok(match self.base() {
            Some(base) => disk.over(base),
            None => disk,
        })
    }

    /// What the check says.
    ///
    /// # Errors
    /// What the driver returns.
    pub fn check(&self, files: &Files, repair: Repair) -> Result<CheckReport> {
        let (storage, files, limits) = (&files[0], &files[1..], limits());
        self.driver.check(&OfflineImage { files, limits, ..OfflineImage::new(storage) }, repair)
    }

    /// The check must find no damage, and no leak unless `leaks_allowed`.
    ///
    /// # Errors
    /// What it found.
    pub fn audit(&self, files: &Files, leaks_allowed: bool) -> Result<(), String> {
        let report = self.check(files, Repair::Nothing).map_err(|error| error.to_string())?;
        if report.corruptions > 0 || (report.leaks > 0 && !leaks_allowed) {
            return Err(format!("the check found {:#?}", report.findings));
        }
        Ok(())
    }

    /// Reads as much of the windows as the disk has, a sector at a time: its number and its bytes.
    ///
    /// # Errors
    /// What the disk returns.
    pub fn read_windows(&self, disk: &Disk) -> Result<Vec<(u64, Vec<u8>)>> {
        let mut all = Vec::new();
        for window in self.windows() {
            let end = disk.guest_bytes().min(window.end * SECTOR);
            let start = window.start * SECTOR;
            let mut bytes = vec![0xee; end.saturating_sub(start) as usize];
            disk.read_at(&mut bytes, GuestOffset(start.min(end)))?;
            let sectors = bytes.chunks(SECTOR as usize).map(<[u8]>::to_vec);
            all.extend(window.zip(sectors));
        }
        Ok(all)
    }

    /// A format's view (a snapshot) over the backing image.
    pub fn view(&self, format: Arc<dyn Format>) -> Disk {
        let info = ImageInfo::new(self.driver.name(), format.guest_bytes());
        let disk = Disk::from_format(format, info, &OpenOptions::default());
        match self.base() {
            Some(base) => disk.over(base),
            None => disk,
        }
    }
}
