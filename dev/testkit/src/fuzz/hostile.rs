//! Any bytes as an image: refused with an error, or read and written as an image must be.

use std::sync::Arc;

use vdkit_block::{FormatDriver, GuestOffset, Repair, Severity, Storage};
use vdkit_chain::Disk;
use vdkit_qcow2::Qcow2Driver;
use vdkit_storage::MemoryStorage;

use super::{LIMITS, open, run_check};
use crate::CountingStorage;

/// Runs looked at in one image; a map of lies can have millions.
const RUNS_MAX: usize = 512;
/// Bytes read at each edge of a run.
const EDGE_BYTES: u64 = 1500;

/// Opens the bytes as a qcow2 image, reads them by several ways that must agree, checks and repairs
/// them, and writes to them where the check found them sound.
///
/// # Panics
/// If a promise is broken: reads by different ways differ, a repair that says it is done left
/// damage, or writing to a sound image made damage or lost bytes.
pub fn qcow2_open_read(image: &[u8]) {
    let fresh = || -> Arc<dyn Storage> { Arc::new(MemoryStorage::from_bytes("image", image)) };
    let read_only: Arc<dyn Storage> =
        Arc::new(MemoryStorage::from_bytes("image", image).read_only());
    if let Ok(disk) = open(&read_only, Some(&data_file()), false) {
        read_edges(&disk);
    }
    describe(&read_only);
    let report = run_check(&read_only, None, Repair::Nothing);
    repair(&fresh());
    if let Ok(report) = report
        && report.corruptions == 0
    {
        write_to_sound(&fresh());
    }
}

/// Describing an image costs five reads at most, whatever it claims; one more for a LUKS header.
fn describe(storage: &Arc<dyn Storage>) {
    let counting = CountingStorage::new(storage.clone());
    let counted: Arc<dyn Storage> = counting.clone();
    let info = Qcow2Driver.describe(&counted, &LIMITS);
    let reads = counting.counts().reads;
    let luks = info.as_ref().is_ok_and(|info| info.encryption.as_deref() == Some("luks"));
    assert!(reads <= 5 + u64::from(luks), "{reads} reads for {info:?}");
}

fn data_file() -> Arc<dyn Storage> {
    Arc::new(MemoryStorage::from_bytes("data", &[0x5a; 40 << 10]))
}

/// Reads around each end of each run, in one piece and in two: both fail or both agree.
pub(super) fn read_edges(disk: &Disk) {
    let size = disk.guest_bytes();
    let Ok(runs) = disk.extents(GuestOffset(0), size) else { return };
    let mut at = 0;
    for run in runs.take(RUNS_MAX) {
        // Damage: reading goes on elsewhere all the same.
        let Ok(run) = run else { break };
        assert_eq!(run.at.0, at, "runs follow each other");
        assert!(run.len > 0 && run.len <= size - at, "a run lies within the disk");
        at += run.len;
        read_twice(disk, at.saturating_sub(EDGE_BYTES), (at + EDGE_BYTES).min(size));
    }
    read_twice(disk, 0, EDGE_BYTES.min(size));
    read_twice(disk, size.saturating_sub(EDGE_BYTES), size);
}

fn read_twice(disk: &Disk, start: u64, end: u64) {
    let mut whole = vec![1; (end - start) as usize];
    let mut halves = vec![2; whole.len()];
    let middle = whole.len() / 2;
    let one = disk.read_at(&mut whole, GuestOffset(start));
    let (left, right) = halves.split_at_mut(middle);
    let two = disk
        .read_at(left, GuestOffset(start))
        .and_then(|()| disk.read_at(right, GuestOffset(start + middle as u64)));
    assert_eq!(one.is_ok(), two.is_ok(), "{one:?} in one piece, {two:?} in two");
    if one.is_ok() {
        assert!(whole == halves, "bytes {start}..{end} depend on how they are read");
    }
}

/// A repair that reports nothing left has left nothing.
fn repair(storage: &Arc<dyn Storage>) {
    // What looks like lost tables is given free only where that is asked for.
    let repaired = run_check(storage, None, Repair::All)
        .or_else(|_| run_check(storage, None, Repair::AllForced));
    let Ok(report) = repaired else { return };
    let again = match run_check(storage, None, Repair::Nothing) {
        Ok(again) => again,
        Err(error) => panic!("a repaired image cannot be checked: {error}"),
    };
    if report.corruptions_left() == 0 {
        assert_eq!(again.corruptions, 0, "left after a repair: {:?}", again.findings.first());
        if report.leaks_left() == 0 {
            assert_eq!(again.leaks, 0, "left after a repair: {:?}", again.findings.first());
        }
        write_to_sound(storage);
    }
}

/// Writes a few pieces to a sound image: it stays sound, the pieces are there, and their
/// neighbors are what they were.
fn write_to_sound(storage: &Arc<dyn Storage>) {
    let data = data_file();
    // Refused for reasons of its own: encryption, the corrupt bit, a broken L1 entry.
    let Ok(disk) = open(storage, Some(&data), true) else { return };
    let size = disk.guest_bytes();
    let mut written: Vec<(u64, Vec<u8>)> = Vec::new();
    for (number, start) in [size / 2, 0, size.saturating_sub(700)].into_iter().enumerate() {
        let from = start.saturating_sub(EDGE_BYTES);
        let to = (start + 700 + EDGE_BYTES).min(size);
        let mut bytes = vec![0; (to - from) as usize];
        if disk.read_at(&mut bytes, GuestOffset(from)).is_err() {
            continue; // what is there cannot be unpacked
        }
        let len = 700.min(size - start) as usize;
        let piece = vec![0xc0 + number as u8; len];
        if disk.write_at(&piece, GuestOffset(start)).is_err() {
            continue; // no room below a limit of the format
        }
        let skip = (start - from) as usize;
        bytes[skip..skip + len].copy_from_slice(&piece);
        for (old_from, old) in &mut written {
            patch(old, *old_from, &piece, start);
        }
        written.push((from, bytes));
    }
    if disk.close().is_err() {
        return;
    }
    drop(disk);
    let report = match run_check(storage, None, Repair::Nothing) {
        Ok(report) => report,
        Err(error) => panic!("after writing, the image cannot be checked: {error}"),
    };
    // An image may refer to a cluster twice and be sound. When a write leaves one reference, the
    // other entry, wherever it is, could have COPIED again and has not: nothing is lost by that.
    let damage = report.findings.iter().find(|finding| {
        finding.severity == Severity::Corruption && !finding.message.contains("without COPIED flag")
    });
    assert!(damage.is_none(), "after writing: {damage:?}");
    let disk = match open(storage, Some(&data), false) {
        Ok(disk) => disk,
        Err(error) => panic!("after writing, the image cannot be opened: {error}"),
    };
    for (from, bytes) in written {
        let mut got = vec![0; bytes.len()];
        let read = disk.read_at(&mut got, GuestOffset(from));
        assert!(read.is_ok(), "what was written cannot be read: {read:?}");
        assert!(got == bytes, "bytes from {from} on are not what was written");
    }
}

/// Puts a later piece over remembered bytes where they overlap.
fn patch(bytes: &mut [u8], from: u64, piece: &[u8], start: u64) {
    for (i, byte) in bytes.iter_mut().enumerate() {
        let at = from + i as u64;
        if at >= start && at - start < piece.len() as u64 {
            *byte = piece[(at - start) as usize];
        }
    }
}
