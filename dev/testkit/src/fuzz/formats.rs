//! Any bytes as an image of one of the formats: refused with an error, or read, checked, repaired and
//! written as an image must be.

use std::sync::Arc;

use vdkit_block::{
    CheckReport, FormatDriver, GuestOffset, ImageInfo, OfflineImage, OpenRequest, Repair, Result,
    Storage,
};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_legacy::{BOCHS, CLOOP, DMG, PARALLELS, QCOW, QED};
use vdkit_storage::MemoryStorage;
use vdkit_vdi::VdiDriver;
use vdkit_vhd::VhdDriver;
use vdkit_vmdk::VmdkDriver;

use super::LIMITS;
use super::hostile::read_edges;
use crate::CountingStorage;

/// The formats, by the input's first byte without its highest bit.
const DRIVERS: &[&dyn FormatDriver] =
    &[&VdiDriver, &VhdDriver, &VmdkDriver, QCOW, QED, PARALLELS, DMG, CLOOP, BOCHS];
/// The first byte behind the formats: a VMDK's descriptor and what its extents hold.
const SPLIT: u8 = DRIVERS.len() as u8;
/// The first byte's highest bit: checksums are put right.
const SEALED: u8 = 0x80;
/// Extents of a descriptor are at least so long.
const EXTENT_BYTES: u64 = 1 << 20;
/// The next two bytes are the length of the file in these units; 0 is that of the input.
const LEN_UNIT: u64 = 64 << 10;
/// A repair does not make files longer than by so much: by holes, for the rest of a block that the
/// file ends in and a copy of it. The largest blocks have 1 GiB, and as much before their data (VDI).
const GROWTH_MAX: u64 = 4 << 30;

/// The bytes of an image: its file, and those that it names.
pub(super) struct Bytes {
    pub(super) image: MemoryStorage,
    /// What each of the other files holds.
    pub(super) others: Option<MemoryStorage>,
}

/// Storages of an image.
struct Files {
    image: Arc<dyn Storage>,
    others: Vec<Arc<dyn Storage>>,
}

impl Files {
    /// `bytes`, with as many other files as the image says.
    fn of(bytes: Bytes, driver: &dyn FormatDriver, writable: bool) -> Self {
        let storage = |memory: MemoryStorage| -> Arc<dyn Storage> {
            Arc::new(if writable { memory } else { memory.read_only() })
        };
        let image = storage(bytes.image);
        let others = bytes.others.map_or_else(Vec::new, |other| {
            let info = driver.describe(&image, &LIMITS);
            let count = info.map_or(0, |info| info.files.len().min(LIMITS.files_max));
            (0..count).map(|_| storage(other.clone())).collect()
        });
        Self { image, others }
    }

    fn open(&self, driver: &dyn FormatDriver, writable: bool) -> Result<Disk> {
        let request = OpenRequest {
            storage: self.image.clone(),
            files: self.others.clone(),
            writable,
            limits: LIMITS,
        };
        let format = driver.open(request)?;
        let options = OpenOptions::default().writable(writable).limits(LIMITS);
        Ok(Disk::from_format(format, ImageInfo::new(driver.name(), 0), &options))
    }

    fn check(&self, driver: &dyn FormatDriver, repair: Repair) -> Result<CheckReport> {
        let (files, limits) = (&*self.others, LIMITS);
        driver.check(&OfflineImage { files, limits, ..OfflineImage::new(&self.image) }, repair)
    }

    /// Bytes of all files.
    fn len(&self) -> u64 {
        let all = self.others.iter().chain([&self.image]);
        all.map(|storage| storage.len().expect("memory")).sum()
    }
}

/// Takes the input for a format, the length of a file and how it begins; or for a VMDK's descriptor,
/// whose length is given instead, and what its extents begin with.
///
/// # Panics
/// If a promise is broken: reads by different ways differ, describing costs more than a few reads,
/// a repair that says it is done left damage, or a sound image loses what is written to it.
pub fn format_open(input: &[u8]) {
    let Some((&[which, high, low], rest)) = input.split_first_chunk::<3>() else { return };
    let number = u16::from_be_bytes([high, low]);
    let kind = (which & !SEALED) % (SPLIT + 1);
    if kind == SPLIT {
        let (text, extent) = rest.split_at(usize::from(number).min(rest.len()));
        let fresh = || {
            let other = MemoryStorage::from_bytes("extent", extent);
            other.set_len(EXTENT_BYTES.max(extent.len() as u64)).expect("memory");
            Bytes { image: MemoryStorage::from_bytes("image", text), others: Some(other) }
        };
        return judge(&VmdkDriver, 8, fresh);
    }
    let driver = DRIVERS[usize::from(kind)];
    let len = u64::from(number) * LEN_UNIT;
    let mut rest = rest.to_vec();
    if which & SEALED != 0 && driver.name() == VhdDriver.info().name {
        seal(&mut rest);
    }
    judge(driver, 8, || {
        let image = MemoryStorage::from_bytes("image", &rest);
        image.set_len(if len == 0 { rest.len() as u64 } else { len }).expect("memory");
        Bytes { image, others: None }
    });
}

/// Puts the checksums of a VHD's footers and of its header right, where they seem to be.
fn seal(bytes: &mut [u8]) {
    let front = bytes.get(16..24).and_then(|at| at.try_into().ok()).map(u64::from_be_bytes);
    let back = bytes.len().saturating_sub(512);
    let header = front.and_then(|at| usize::try_from(at).ok()).unwrap_or(usize::MAX);
    for (at, len, sum_at) in [(0, 512, 64), (header, 1024, 36), (back, 512, 64)] {
        let part = at.checked_add(len).and_then(|end| bytes.get_mut(at..end));
        let Some(part) = part.filter(|part| part.starts_with(b"c")) else { continue };
        part[sum_at..sum_at + 4].fill(0);
        let sum: u32 = part.iter().map(|&byte| u32::from(byte)).sum();
        part[sum_at..sum_at + 4].copy_from_slice(&(!sum).to_be_bytes());
    }
}

/// Tries all that can be done with an image, which `fresh` makes, and which is described by at most
/// so many reads.
pub(super) fn judge(driver: &dyn FormatDriver, reads_max: u64, fresh: impl Fn() -> Bytes) {
    let counting = CountingStorage::new(Arc::new(fresh().image.read_only()));
    let counted: Arc<dyn Storage> = counting.clone();
    let described = driver.describe(&counted, &LIMITS);
    let reads = counting.counts().reads;
    assert!(reads <= reads_max, "{reads} reads for {described:?}");
    let read_only = Files::of(fresh(), driver, false);
    if let Ok(disk) = read_only.open(driver, false) {
        read_edges(&disk);
    }
    let Ok(report) = read_only.check(driver, Repair::Nothing) else { return };
    if driver.creation().is_none() {
        return;
    }
    if report.corruptions == 0 {
        write_and_read(driver, &Files::of(fresh(), driver, true));
    }
    let mended = Files::of(fresh(), driver, true);
    if let Ok(report) = mended.check(driver, Repair::All)
        && report.corruptions_left() == 0
    {
        let again = mended.check(driver, Repair::Nothing).expect("a mended image");
        assert_eq!((again.corruptions, again.leaks), (0, 0), "{:#?}", again.findings);
    }
    let (len, grown) = (read_only.len(), mended.len().saturating_sub(read_only.len()));
    assert!(grown <= GROWTH_MAX.max(len), "a repair made the file {grown} bytes longer");
}

/// What a check found sound takes writes and keeps them.
fn write_and_read(driver: &dyn FormatDriver, files: &Files) {
    let Ok(disk) = files.open(driver, true) else { return };
    let size = disk.guest_bytes();
    let places = [0, size / 2, size.saturating_sub(600)];
    let mut written = Vec::new();
    for (n, at) in places.into_iter().enumerate() {
        let bytes = vec![0x31 + n as u8; 600.min(size.saturating_sub(at)) as usize];
        if disk.write_at(&bytes, GuestOffset(at)).is_ok() {
            written.retain(|(other, _): &(u64, Vec<u8>)| other.abs_diff(at) >= 600);
            written.push((at, bytes));
        }
    }
    disk.close().expect("closing a sound image");
    let disk = files.open(driver, false).expect("opening it again");
    for (at, bytes) in written {
        let mut found = vec![0; bytes.len()];
        disk.read_at(&mut found, GuestOffset(at)).expect("reading what was written");
        assert!(found == bytes, "what was written at {at:#x} is not there");
    }
    let report = files.check(driver, Repair::Nothing).expect("a sound image");
    assert_eq!(report.corruptions, 0, "{:#?}", report.findings);
}
