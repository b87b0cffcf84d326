//! Any bytes as an image of one of the formats: refused with an error, or read, checked, mended and
//! written as an image must be.

use std::sync::Arc;

use vdkit_block::{
    FormatDriver, GuestOffset, ImageInfo, Monitor, OpenRequest, Repair, Result, Storage,
};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_legacy::{BochsDriver, CloopDriver, DmgDriver, ParallelsDriver, QcowDriver, QedDriver};
use vdkit_storage::MemoryStorage;
use vdkit_vdi::VdiDriver;
use vdkit_vhd::VhdDriver;
use vdkit_vmdk::VmdkDriver;

use super::LIMITS;
use crate::CountingStorage;

/// The formats, by the input's first byte.
const DRIVERS: &[&dyn FormatDriver] = &[
    &VdiDriver,
    &VhdDriver,
    &VmdkDriver,
    &QcowDriver,
    &QedDriver,
    &ParallelsDriver,
    &DmgDriver,
    &CloopDriver,
    &BochsDriver,
];
/// The next two bytes are the length of the file in these units; 0 is that of the input.
const LEN_UNIT: u64 = 64 << 10;
/// Runs looked at in one image.
const RUNS_MAX: usize = 256;
/// Bytes read at each edge of a run.
const EDGE_BYTES: u64 = 700;
/// A repair does not make files longer than by so much: by holes, for the rest of a block that the
/// file ends in and a copy of it. The largest blocks have 1 GiB, and as much before their data (VDI).
const GROWTH_MAX: u64 = 4 << 30;

/// Takes the input for a format, the length of a file and how it begins.
///
/// # Panics
/// Where a promise is broken: reads by different ways differ, describing costs more than a few reads,
/// a repair that says it is done left damage, or a sound image loses what is written to it.
pub fn format_open(input: &[u8]) {
    let Some((&[which, high, low], rest)) = input.split_first_chunk::<3>() else { return };
    let driver = DRIVERS[usize::from(which) % DRIVERS.len()];
    let len = u64::from(u16::from_be_bytes([high, low])) * LEN_UNIT;
    let fresh = || {
        let memory = MemoryStorage::from_bytes("image", rest);
        memory.set_len(if len == 0 { rest.len() as u64 } else { len }).expect("memory");
        memory
    };
    judge(driver, 8, fresh);
}

/// Tries all that can be done with an image, which `fresh` makes, and which is described by at most
/// so many reads.
pub(super) fn judge(driver: &dyn FormatDriver, reads_max: u64, fresh: impl Fn() -> MemoryStorage) {
    let len = fresh().len().expect("memory");
    let counting = CountingStorage::new(Arc::new(fresh().read_only()));
    let read_only: Arc<dyn Storage> = counting.clone();
    let described = driver.describe(&read_only, &LIMITS);
    let reads = counting.counts().reads;
    assert!(reads <= reads_max, "{reads} reads for {described:?}");
    if let Ok(disk) = open(driver, &read_only, false) {
        read_edges(&disk);
    }
    let check = |storage: &Arc<dyn Storage>, repair| {
        driver.check(storage, &[], repair, &LIMITS, &Monitor::default())
    };
    let Ok(report) = check(&read_only, Repair::Nothing) else { return };
    if !driver.writes() {
        return;
    }
    if report.corruptions == 0 {
        write_and_read(driver, &(Arc::new(fresh()) as _));
    }
    let mended: Arc<dyn Storage> = Arc::new(fresh());
    if let Ok(report) = check(&mended, Repair::All)
        && report.corruptions_left() == 0
    {
        let again = check(&mended, Repair::Nothing).expect("a mended image");
        assert_eq!((again.corruptions, again.leaks), (0, 0), "{:#?}", again.findings);
    }
    let grown = mended.len().expect("memory").saturating_sub(len);
    assert!(grown <= GROWTH_MAX.max(len), "a repair made the file {grown} bytes longer");
}

fn open(driver: &dyn FormatDriver, storage: &Arc<dyn Storage>, writable: bool) -> Result<Disk> {
    let request =
        OpenRequest { storage: storage.clone(), files: Vec::new(), writable, limits: LIMITS };
    let format = driver.open(request)?;
    let options = OpenOptions { writable, limits: LIMITS, ..OpenOptions::default() };
    Ok(Disk::from_format(format, ImageInfo::new(driver.name(), 0), &options))
}

/// Around each end of each run, in one piece and in two: both fail or both agree.
fn read_edges(disk: &Disk) {
    let size = disk.guest_bytes();
    let Ok(runs) = disk.extents(GuestOffset(0), size) else { return };
    let mut at = 0;
    for run in runs.take(RUNS_MAX) {
        let Ok(run) = run else { break };
        assert_eq!(run.at.0, at, "runs follow each other");
        assert!(run.len > 0 && run.len <= size - at, "a run lies within the disk");
        at += run.len;
        let (start, end) = (at.saturating_sub(EDGE_BYTES), (at + EDGE_BYTES).min(size));
        let (mut whole, mut halves) =
            (vec![1; (end - start) as usize], vec![2; (end - start) as usize]);
        let middle = whole.len() / 2;
        let one = disk.read_at(&mut whole, GuestOffset(start));
        let (left, right) = halves.split_at_mut(middle);
        let two = disk
            .read_at(left, GuestOffset(start))
            .and_then(|()| disk.read_at(right, GuestOffset(start + middle as u64)));
        assert_eq!(one.is_ok(), two.is_ok(), "{one:?} in one piece, {two:?} in two");
        assert!(one.is_err() || whole == halves, "{start:#x} reads in two ways");
    }
}

/// What a check found sound takes writes and keeps them.
fn write_and_read(driver: &dyn FormatDriver, storage: &Arc<dyn Storage>) {
    let Ok(disk) = open(driver, storage, true) else { return };
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
    let disk = open(driver, storage, false).expect("opening it again");
    for (at, bytes) in written {
        let mut found = vec![0; bytes.len()];
        disk.read_at(&mut found, GuestOffset(at)).expect("reading what was written");
        assert!(found == bytes, "what was written at {at:#x} is not there");
    }
    let report = driver.check(storage, &[], Repair::Nothing, &LIMITS, &Monitor::default());
    let report = report.expect("a sound image");
    assert_eq!(report.corruptions, 0, "{:#?}", report.findings);
}
