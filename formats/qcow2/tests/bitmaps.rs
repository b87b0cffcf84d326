//! Bitmaps of an empty disk, with extra data, and beside a header write that failed.

mod common;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use common::{open, options};
use vdkit_block::{
    BackingRef, Bitmaps, CreateRequest, Creation, Format, FormatDriver, GuestOffset, HostOffset,
    Limits, Monitor, NewBitmap, NewSnapshot, OfflineImage, Repair, Storage,
};
use vdkit_qcow2::Qcow2Driver;
use vdkit_qcow2::header::Header;
use vdkit_qcow2::layout::extension;
use vdkit_storage::MemoryStorage;
use vdkit_testbase::units::MIB;
use vdkit_testbase::{
    CountingStorage, CrashStorage, FaultKind, FaultPlan, FaultyStorage, GatedStorage, LoggedOp,
    assert_sound, create_image,
};

fn image(guest_bytes: u64) -> Arc<dyn Storage> {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    create_image(&Qcow2Driver, storage.clone(), guest_bytes, "");
    storage
}

fn add(image: &dyn Format, name: &str) {
    let new = NewBitmap { name, granularity: None, enabled: true };
    image.bitmaps().unwrap().add(&new).unwrap();
}

fn dirty(bitmaps: &dyn Bitmaps, name: &str) -> Vec<Range<u64>> {
    let mut runs = Vec::new();
    let mut add = |run| {
        runs.push(run);
        Ok(())
    };
    bitmaps.for_each_dirty(name, &mut add).unwrap();
    runs
}

#[test]
fn a_bitmap_of_an_empty_disk_is_kept_and_grows_with_it() {
    let storage = image(0);
    let empty = open(&storage);
    add(&*empty, "b");
    empty.close().unwrap();
    assert_sound(&Qcow2Driver, &storage, false, "empty");
    let again = open(&storage);
    assert_eq!(again.warnings(), [""; 0]);
    again.resize(MIB).unwrap();
    assert_eq!(dirty(again.bitmaps().unwrap(), "b"), std::slice::from_ref(&(0..MIB)));
    again.resize(0).unwrap();
    again.close().unwrap();
    assert_sound(&Qcow2Driver, &storage, false, "empty again");
}

/// A resize that changes the length of a bitmap's table writes another one, while requests go on.
#[test]
fn a_bitmap_records_what_is_written_while_its_table_changes() {
    const HELD: Range<u64> = MIB..MIB + 512;
    for new in [24 * MIB, 5 * MIB] {
        let mut held = 0;
        for nth in 0.. {
            let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
            create_image(&Qcow2Driver, storage.clone(), 8 * MIB, "cluster_size=512");
            let gate = GatedStorage::new(storage.clone());
            let gated: Arc<dyn Storage> = gate.clone();
            let image = open(&gated);
            let bitmap = NewBitmap { name: "b", granularity: Some(512), enabled: true };
            image.bitmaps().unwrap().add(&bitmap).unwrap();
            // Its page has a cluster, and those of others have none.
            image.note_write(GuestOffset(0), 512).unwrap();
            image.flush().unwrap();
            let seen = AtomicU64::new(0);
            gate.hold(move |call| {
                let changes = matches!(call.kind, FaultKind::Write | FaultKind::Sync);
                changes && !call.done && seen.fetch_add(1, SeqCst) == nth
            });
            let reached = std::thread::scope(|scope| {
                let resized = scope.spawn(|| image.resize(new));
                while !gate.is_held() && !resized.is_finished() {
                    std::thread::yield_now();
                }
                let reached = gate.is_held();
                for at in [HELD.start, 3 * MIB] {
                    image.note_write(GuestOffset(at), 512).unwrap();
                }
                gate.release();
                resized.join().unwrap().unwrap();
                reached
            });
            held += u64::from(reached);
            image.close().unwrap();
            let image = open(&storage);
            assert_eq!(image.warnings(), [""; 0], "{nth}");
            let found = dirty(image.bitmaps().unwrap(), "b");
            let mut expected = vec![0..512, HELD, 3 * MIB..3 * MIB + 512];
            if new > 8 * MIB {
                expected.push(8 * MIB..new);
            }
            assert_eq!(found, expected, "call {nth} of the resize to {new}");
            assert_sound(&Qcow2Driver, &storage, false, &format!("call {nth}"));
            if !reached {
                break;
            }
        }
        assert!(held > 8, "{held}");
    }
}

/// The specification lets software keep using a bitmap with extra data that it does not know, if the
/// bitmap says so. The image opens with it, so a check must not find it damaged, nor a repair drop it.
#[test]
fn a_bitmap_with_compatible_extra_data_is_sound() {
    let storage = image(MIB);
    let first = open(&storage);
    add(&*first, "b");
    first.close().unwrap();
    let header = Header::read(&*storage, &Limits::default()).unwrap();
    let at = header.bitmaps().unwrap().directory_offset;
    // Its flags are at byte 12, the number of bytes of extra data at 20; the extra data follows, then
    // the name.
    storage.write_at(&[0, 0, 0, 0b110], at + 12).unwrap();
    storage.write_at(&[0, 0, 0, 8], at + 20).unwrap();
    storage.write_at(b"extra...b", at + 24).unwrap();
    let bytes = header.extension(extension::BITMAPS).unwrap().offset + 8;
    storage.write_at(&40u64.to_be_bytes(), HostOffset(bytes)).unwrap();
    for repair in [Repair::Nothing, Repair::All] {
        let report = Qcow2Driver.check(&OfflineImage::new(&storage), repair).unwrap();
        assert!(report.findings.is_empty(), "{report:?}");
    }
    let image = open(&storage);
    assert_eq!(image.warnings(), [""; 0]);
    assert!(!image.bitmaps().unwrap().list().unwrap()[0].info.in_use);
    image.close().unwrap();
}

/// A list of extensions may end with the backing file name instead of an end mark. Without the name
/// there, whatever remains of it would continue the list.
#[test]
fn a_list_of_extensions_without_an_end_mark_is_not_made_longer() {
    let memory = Arc::new(MemoryStorage::new("image"));
    let request = CreateRequest {
        storage: memory.clone(),
        files: Vec::new(),
        guest_bytes: MIB,
        options: options(""),
        backing: Some(BackingRef::new("base.qcow2", Some("qcow2".into()))),
        backing_bytes: None,
    };
    Qcow2Driver.create(&request).unwrap();
    let read = |storage: &dyn Storage| Header::read(storage, &Limits::default());
    let last = read(&*memory).unwrap().extensions.pop().unwrap();
    let end = last.offset + (last.data.len() as u64).next_multiple_of(8);
    memory.write_at(b"base.qcow2\0\0\0\0\0\0\0\0", HostOffset(end)).unwrap();
    memory.write_at(&end.to_be_bytes(), HostOffset(8)).unwrap();
    let before = read(&*memory).unwrap();
    assert_eq!(before.backing_name.as_deref(), Some("base.qcow2"));
    let crash = CrashStorage::holding(&*memory);
    let storage: Arc<dyn Storage> = crash.clone();
    let image = open(&storage);
    let new = NewBitmap { name: "b", granularity: None, enabled: true };
    let added = image.bitmaps().unwrap().add(&new);
    crash.for_each_crash(|ops, moment| {
        let found = read(&moment.only_durable()).unwrap_or_else(|error| panic!("{ops}: {error}"));
        assert_eq!(found.backing_name, before.backing_name, "{ops}");
    });
    let error = added.unwrap_err().to_string();
    assert!(error.contains("end mark"), "{error}");
    image.close().unwrap();
    assert_sound(&Qcow2Driver, &storage, false, "after a refused bitmap");
}

/// A growth makes bitmaps of another length invalid while it runs. One that cannot be must not begin.
#[test]
fn a_growth_that_no_l1_table_can_hold_changes_nothing() {
    let counting = CountingStorage::new(Arc::new(MemoryStorage::new("image")));
    let storage: Arc<dyn Storage> = counting.clone();
    create_image(&Qcow2Driver, storage.clone(), MIB, "cluster_size=512");
    let image = open(&storage);
    add(&*image, "b");
    counting.reset();
    let error = image.resize(256 << 30).unwrap_err().to_string();
    assert!(error.contains("larger cluster_size"), "{error}");
    assert_eq!((counting.counts().writes, counting.counts().syncs), (0, 0));
    image.close().unwrap();
}

/// If a header write fails and cannot be undone, the header on disk may name the new tables, whose
/// clusters the image takes for free. So the next operation restores the header before it writes to
/// any of them.
#[test]
fn a_header_write_that_failed_is_undone_before_anything_else_is_written() {
    let new = |name: &str| NewSnapshot { name: name.to_owned(), ..NewSnapshot::default() };
    let of_header = |op: &LoggedOp| matches!(op, LoggedOp::Write(at, _) if *at < 512);
    let mut unknown = 0;
    for nth in 0.. {
        // A device has no space that reads as zero, so new clusters of a bitmap are zeroed.
        let device = MemoryStorage::from_bytes("device", &vec![0; 4 << 20]).fixed_len();
        let counting = CountingStorage::new(Arc::new(device));
        let faulty = FaultyStorage::new(counting.clone());
        let storage: Arc<dyn Storage> = faulty.clone();
        create_image(&Qcow2Driver, storage.clone(), MIB, "");
        let image = open(&storage);
        add(&*image, "b");
        let snapshots = image.snapshots().unwrap();
        counting.log_calls(true);
        faulty.arm(FaultPlan::nth(&[FaultKind::Sync], nth).lasting());
        let created = snapshots.create(&new("first"), &Monitor::default());
        faulty.heal();
        if created.is_ok() {
            break;
        }
        let switched = counting.take_log().iter().any(of_header);
        image.note_write(GuestOffset(0), 512).unwrap();
        snapshots.create(&new("second"), &Monitor::default()).unwrap();
        let changes = counting.take_log();
        let first =
            changes.iter().find(|op| !matches!(op, LoggedOp::Read(..) | LoggedOp::Sync)).unwrap();
        if switched {
            unknown += 1;
            assert!(of_header(first), "sync {nth}: {first:?}");
        }
        image.close().unwrap();
        assert_sound(&Qcow2Driver, &storage, false, "after a failed header write");
    }
    assert_eq!(unknown, 1);
}
