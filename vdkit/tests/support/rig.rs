//! An image on simulated disks, opened by vdkit, with its expected content.

use std::sync::Arc;

use vdkit_block::{
    CheckReport, Format, ImageInfo, Limits, Monitor, OpenRequest, Repair, Result, Storage,
};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_qcow2::Qcow2;
use vdkit_raw::RawFormat;
use vdkit_storage::MemoryStorage;
use vdkit_testkit::{CrashClock, save_sparse};

use super::disks::SimDisk;
use super::guest::{Guest, assert_same};
use super::qemu::{self, Verdict};
use super::shape::{KEY, Prepared, Shape};

/// An image with all its files.
#[derive(Debug)]
pub struct Rig {
    pub shape: Shape,
    /// The image, and its data file, if any.
    pub disks: Vec<SimDisk>,
    pub base: Option<MemoryStorage>,
    pub limits: Limits,
}

/// A disk over one open format.
pub fn disk(format: Arc<dyn Format>, writable: bool) -> Disk {
    let info = ImageInfo::new(format.name(), format.guest_bytes());
    Disk::from_format(format, info, &OpenOptions::default().writable(writable))
}

impl Rig {
    /// A fresh image of this shape on its own disks.
    pub fn new(shape: &Shape) -> (Self, Guest) {
        Self::make(shape, SimDisk::new)
    }

    /// The same on disks that record all changes.
    pub fn recording(shape: &Shape, clock: &CrashClock) -> (Self, Guest) {
        Self::make(shape, |content| SimDisk::recording(&content, clock))
    }

    fn make(shape: &Shape, disk: impl FnMut(MemoryStorage) -> SimDisk) -> (Self, Guest) {
        let prepared = shape.prepare();
        let Prepared { image, data, base, guest } = &*prepared;
        let disks = std::iter::once(image).chain(data).cloned().map(disk).collect();
        // Small, to cause eviction.
        let mut limits = Limits::default();
        limits.cache_bytes = 64 << 10;
        let (shape, base) = (shape.clone(), base.clone());
        (Self { shape, disks, base, limits }, guest.clone())
    }

    /// The same image with other content of its disks.
    pub fn with_content(&self, content: Vec<MemoryStorage>) -> Self {
        Self {
            shape: self.shape.clone(),
            disks: content.into_iter().map(SimDisk::new).collect(),
            base: self.base.clone(),
            limits: self.limits,
        }
    }

    /// The image's disk.
    pub fn image(&self) -> &SimDisk {
        &self.disks[0]
    }

    /// The disk with the guest's data.
    pub fn data(&self) -> &SimDisk {
        &self.disks[self.disks.len() - 1]
    }

    /// Opens the image alone.
    pub fn format(&self, writable: bool) -> Result<Arc<Qcow2>> {
        let request = OpenRequest {
            storage: self.image().storage(),
            files: self.disks.get(1).map(SimDisk::storage).into_iter().collect(),
            writable,
            limits: self.limits,
        };
        Qcow2::open_with_keys(request, &self.shape.keys())
    }

    /// Opens the disk with its base.
    pub fn open(&self, writable: bool) -> Result<Disk> {
        Ok(self.over_base(self.format(writable)?, writable))
    }

    /// A format of this image (such as a snapshot) as a disk with its base.
    pub fn over_base(&self, format: Arc<dyn Format>, writable: bool) -> Disk {
        let top = disk(format, writable);
        match self.base() {
            None => top,
            Some(base) => top.over(base),
        }
    }

    fn base(&self) -> Option<Disk> {
        let storage: Arc<dyn Storage> = Arc::new(self.base.clone()?.read_only());
        let format: Arc<dyn Format> = if self.shape.base_qcow2 {
            Qcow2::open(OpenRequest {
                storage,
                files: Vec::new(),
                writable: false,
                limits: Limits::default(),
            })
            .expect("the base image")
        } else {
            Arc::new(RawFormat::new(storage, false).expect("the base image"))
        };
        Some(disk(format, false))
    }

    /// The disk must have the expected content in all windows.
    pub fn compare(&self, disk: &Disk, guest: &Guest, what: &str) {
        assert_eq!(disk.guest_bytes(), guest.len(), "{what}: size");
        for window in self.shape.windows(guest.len()) {
            let mut at = window.start;
            while at < window.end {
                let len = (window.end - at).min(1 << 20);
                let mut buf = vec![0xee; len as usize];
                disk.read_at(&mut buf, at.into_guest()).expect("reading back");
                assert_same(what, at, &buf, &guest.read(at, len));
                at += len;
            }
        }
    }

    /// Result of vdkit's check.
    pub fn check(&self) -> CheckReport {
        let monitor = Monitor::default();
        let storage = self.image().storage();
        vdkit_qcow2::check::check(&storage, None, Repair::Nothing, &Limits::default(), &monitor)
            .expect("checking a readable image")
    }

    /// The image must be consistent, without leaks unless `leaks_allowed`.
    pub fn audit(&self, leaks_allowed: bool, what: &str) {
        let report = self.check();
        assert!(report.corruptions == 0, "{what}: {:#?}", report.findings);
        assert!(leaks_allowed || report.leaks == 0, "{what}: {:#?}", report.findings);
    }

    /// Writes all files to a directory for QEMU.
    pub fn save(&self, dir: &std::path::Path) {
        for (disk, name) in self.disks.iter().zip(["image.qcow2", "data.raw"]) {
            save_sparse(&disk.content(), &dir.join(name));
        }
        if let Some(base) = &self.base {
            save_sparse(base, &dir.join(self.shape.base_name()));
        }
        if self.shape.encryption.is_some() {
            std::fs::write(dir.join("key"), KEY).expect("a scratch file");
        }
    }

    /// QEMU must find the image consistent, with the expected content.
    pub fn ask_qemu(&self, guest: Option<&Guest>, leaks_allowed: bool, what: &str) {
        let scratch = qemu::scratch();
        let dir = scratch.path();
        self.save(dir);
        let encrypted = self.shape.encryption.is_some();
        let (verdict, said) = qemu::check(dir, encrypted);
        let fine = match verdict {
            Verdict::Clean => true,
            Verdict::Leaks => leaks_allowed,
            Verdict::Corrupt => false,
        };
        assert!(fine, "{what}: qemu-img check: {said}");
        if let Some(guest) = guest {
            save_sparse(&guest.0, &dir.join("guest.raw"));
            qemu::on_image(dir, encrypted, &["compare"], &["driver=raw,file.filename=guest.raw"]);
        }
    }
}

/// Converts a number to a guest offset, for tests that count in bytes.
pub trait IntoGuest {
    fn into_guest(self) -> vdkit_block::GuestOffset;
}

impl IntoGuest for u64 {
    fn into_guest(self) -> vdkit_block::GuestOffset {
        vdkit_block::GuestOffset(self)
    }
}
