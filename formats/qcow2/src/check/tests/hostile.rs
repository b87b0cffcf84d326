//! Hostile images: bounded memory, bounded reads, a clear error.

use std::sync::Arc;

use vdkit_block::{CancelToken, Error, HostOffset, Limits, Monitor, Progress, Repair, Storage};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::CountingStorage;

use crate::check;
use crate::layout::COPIED;

const CLUSTER: u64 = 65536;

/// A header of version 3 with these fields; refcount table at cluster 1, L1 table at cluster 2.
fn image(size: u64, l1_entries: u32, refcount_order: u32) -> Arc<MemoryStorage> {
    let mut header = vec![0u8; 112];
    header[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    header[20..24].copy_from_slice(&16u32.to_be_bytes());
    header[24..32].copy_from_slice(&size.to_be_bytes());
    header[36..40].copy_from_slice(&l1_entries.to_be_bytes());
    header[40..48].copy_from_slice(&(2 * CLUSTER).to_be_bytes());
    header[48..56].copy_from_slice(&CLUSTER.to_be_bytes());
    header[56..60].copy_from_slice(&1u32.to_be_bytes());
    header[96..100].copy_from_slice(&refcount_order.to_be_bytes());
    header[100..104].copy_from_slice(&112u32.to_be_bytes());
    Arc::new(MemoryStorage::from_bytes("hostile", &header))
}

fn put(storage: &MemoryStorage, offset: u64, words: impl IntoIterator<Item = u64>) {
    let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_be_bytes).collect();
    storage.write_at(&bytes, HostOffset(offset)).unwrap();
}

fn run(
    storage: &Arc<MemoryStorage>,
    repair: Repair,
) -> (vdkit_block::Result<vdkit_block::CheckReport>, u64) {
    let counting = CountingStorage::new(Arc::clone(storage) as Arc<dyn Storage>);
    let mut limits = Limits::default();
    limits.check_bytes_max = 48 << 20;
    let storage: Arc<dyn Storage> = Arc::clone(&counting) as Arc<dyn Storage>;
    let result = check::check(&storage, None, repair, &limits, &Monitor::default());
    (result, counting.counts().bytes_read)
}

#[test]
fn references_all_over_a_sparse_file_end_at_the_limit() {
    // A file of 2^55 bytes, and one L2 table whose entries are far apart.
    let storage = image(1 << 30, 2, 4);
    put(&storage, 2 * CLUSTER, [(3 * CLUSTER) | COPIED, (4 * CLUSTER) | COPIED]);
    let far = |i: u64| (5 * CLUSTER + (i << 38)) | COPIED;
    put(&storage, 3 * CLUSTER, (0..8192).map(far));
    storage.set_len(1 << 55).unwrap();
    let (result, read) = run(&storage, Repair::Nothing);
    assert!(matches!(result, Err(Error::Limit { .. })), "{result:?}");
    assert!(read < 4 << 20, "{read}");
    // A few entries are accepted, wherever they point.
    put(&storage, 3 * CLUSTER, (0..8192).map(|i| if i < 100 { far(i) } else { 0 }));
    let (result, _) = run(&storage, Repair::Nothing);
    assert!(result.unwrap().corruptions > 100);
    // No refcount table that QEMU accepts can reach there.
    let (result, _) = run(&storage, Repair::All);
    assert!(matches!(result, Err(Error::Limit { .. })), "{result:?}");
}

#[test]
fn one_refcount_block_for_everything_is_read_once() {
    let storage = image(1 << 30, 2, 4);
    put(&storage, CLUSTER, std::iter::repeat_n(3 * CLUSTER, 8192));
    storage.write_at(&[0xff; 65536], HostOffset(3 * CLUSTER)).unwrap();
    storage.set_len(1 << 50).unwrap();
    let (result, read) = run(&storage, Repair::Nothing);
    assert!(result.unwrap().corruptions > 8000);
    assert!(read < 4 << 20, "{read}");
}

#[test]
fn bitmaps_all_over_a_sparse_file_end_at_the_limit() {
    let storage = image(1 << 30, 2, 4);
    let count = 100u32;
    let mut extension = vec![0x23, 0x85, 0x28, 0x75, 0, 0, 0, 24];
    extension.extend([count.to_be_bytes(), [0; 4]].concat());
    extension.extend((u64::from(count) * 32).to_be_bytes());
    extension.extend((8 * CLUSTER).to_be_bytes());
    storage.write_at(&extension, HostOffset(112)).unwrap();
    storage.write_at(&[1], HostOffset(95)).unwrap();
    for i in 0..u64::from(count) {
        let mut entry = [0u8; 32];
        entry[..8].copy_from_slice(&((16 + i) * CLUSTER).to_be_bytes());
        entry[8..12].copy_from_slice(&8192u32.to_be_bytes());
        // In use, of the only type, 64 KiB, a name of one byte.
        (entry[15], entry[16], entry[17], entry[19], entry[24]) = (1, 1, 16, 1, b'b');
        storage.write_at(&entry, HostOffset(8 * CLUSTER + i * 32)).unwrap();
        put(&storage, (16 + i) * CLUSTER, (1..=8192).map(|j| (i * 8192 + j) << 33));
    }
    storage.set_len(1 << 56).unwrap();
    let (result, read) = run(&storage, Repair::Nothing);
    assert!(matches!(result, Err(Error::Limit { .. })), "{result:?}");
    assert!(read < 1 << 20, "{read}");
}

#[test]
fn narrow_refcounts_do_not_blow_up() {
    // 64 KiB hold 2^19 refcounts of one bit, which take 1 MiB each here; there are 60 blocks.
    let storage = image(1 << 30, 2, 0);
    put(&storage, CLUSTER, (0..60).map(|i| (3 + i) * CLUSTER));
    storage.write_at(&vec![0xff; 60 * CLUSTER as usize], HostOffset(3 * CLUSTER)).unwrap();
    storage.set_len(1 << 50).unwrap();
    let (result, _) = run(&storage, Repair::Nothing);
    assert!(matches!(result, Err(Error::Limit { .. })), "{result:?}");
}

#[test]
fn tables_that_are_their_own_tables_end() {
    // L1, L2, refcount table and block all in one cluster.
    let storage = image(1 << 30, 2, 4);
    put(&storage, CLUSTER, [CLUSTER, CLUSTER | COPIED]);
    storage.write_at(&CLUSTER.to_be_bytes(), HostOffset(40)).unwrap();
    storage.set_len(4 * CLUSTER).unwrap();
    let (result, read) = run(&storage, Repair::Nothing);
    assert!(result.unwrap().corruptions > 3);
    assert!(read < 4 << 20, "{read}");
    let (result, _) = run(&storage, Repair::All);
    let report = result.unwrap();
    assert_eq!(report.corruptions_left(), 0, "{report:#?}");
    let (result, _) = run(&storage, Repair::Nothing);
    assert_eq!(result.unwrap().corruptions, 0);
}

#[test]
fn thousands_of_snapshots_of_one_l1_table_are_refused() {
    let storage = image(1 << 30, 2, 4);
    let mut entry = [0u8; 72];
    entry[..8].copy_from_slice(&(4u64 << 20).to_be_bytes());
    entry[8..12].copy_from_slice(&(4u32 << 20).to_be_bytes());
    entry[13] = 1;
    entry[39] = 16;
    entry[56] = b'1';
    let count = 10_000u32;
    storage.write_at(&count.to_be_bytes(), HostOffset(60)).unwrap();
    storage.write_at(&(8 * CLUSTER).to_be_bytes(), HostOffset(64)).unwrap();
    for i in 0..u64::from(count) {
        storage.write_at(&entry[..64], HostOffset(8 * CLUSTER + i * 64)).unwrap();
    }
    storage.set_len(64 << 20).unwrap();
    let (result, read) = run(&storage, Repair::Nothing);
    assert!(matches!(result, Err(Error::Limit { .. })), "{result:?}");
    assert!(read < 4 << 20, "{read}");
}

#[test]
fn a_snapshot_whose_l1_table_is_lost_is_named() {
    let storage = image(1 << 30, 2, 4);
    let mut entry = [0u8; 64];
    entry[..8].copy_from_slice(&100u64.to_be_bytes());
    (entry[11], entry[13], entry[15], entry[39]) = (1, 1, 5, 16);
    entry[56..62].copy_from_slice(b"1first");
    storage.write_at(&entry, HostOffset(8 * CLUSTER)).unwrap();
    storage.write_at(&1u32.to_be_bytes(), HostOffset(60)).unwrap();
    storage.write_at(&(8 * CLUSTER).to_be_bytes(), HostOffset(64)).unwrap();
    storage.set_len(16 * CLUSTER).unwrap();
    let report = run(&storage, Repair::Nothing).0.unwrap();
    let named = |message: &str| message.starts_with("snapshot 'first': found an L1 table");
    assert!(report.findings.iter().any(|finding| named(&finding.message)), "{report:#?}");
}

#[test]
fn a_snapshot_table_ends_at_its_largest_size() {
    let storage = image(1 << 30, 2, 4);
    storage.write_at(&2u32.to_be_bytes(), HostOffset(60)).unwrap();
    storage.write_at(&(8 * CLUSTER).to_be_bytes(), HostOffset(64)).unwrap();
    let entry = |extra: u32| {
        let mut entry = [0u8; 40];
        entry[13] = 1;
        entry[36..].copy_from_slice(&extra.to_be_bytes());
        entry
    };
    // The first entry fills the largest table but for its own fixed part, and a second one follows
    // that has 4 GiB of extra data.
    let extra = crate::snapshots::TABLE_BYTES_MAX as u32 - 8;
    let second = 8 * CLUSTER + (40 + u64::from(extra) + 1).next_multiple_of(8);
    storage.write_at(&entry(extra), HostOffset(8 * CLUSTER)).unwrap();
    storage.write_at(&entry(u32::MAX), HostOffset(second)).unwrap();
    storage.set_len(8 << 30).unwrap();
    let (result, read) = run(&storage, Repair::Nothing);
    let report = result.unwrap();
    let lost = |message: &str| message.contains("2 snapshots from here on are lost");
    assert!(report.findings.iter().any(|finding| lost(&finding.message)), "{report:#?}");
    assert!(read < 4 << 20, "{read}");
}

#[test]
fn a_tiny_file_that_claims_much_is_refused() {
    for size in [1u64 << 60, i64::MAX as u64, u64::MAX] {
        let storage = image(size, 1, 4);
        let (result, read) = run(&storage, Repair::All);
        assert!(result.is_err());
        assert!(read < 1 << 20);
    }
}

#[test]
fn a_check_can_be_stopped_and_tells_how_far_it_is() {
    struct Stop(CancelToken, std::sync::Mutex<Vec<(u64, u64)>>);
    impl Progress for Stop {
        fn update(&self, done: u64, total: u64) {
            self.1.lock().unwrap().push((done, total));
            self.0.cancel();
        }
        fn message(&self, _text: &str) {}
    }
    let storage = image(1 << 40, 2048, 4);
    put(&storage, 2 * CLUSTER, (0..2048).map(|i| (3 + i) * CLUSTER));
    storage.set_len(3000 * CLUSTER).unwrap();
    let storage: Arc<dyn Storage> = storage;
    let cancel = CancelToken::default();
    let stop = Stop(cancel.clone(), std::sync::Mutex::default());
    let monitor = Monitor::new(&stop).cancelled_by(cancel);
    let result = check::check(&storage, None, Repair::Nothing, &Limits::default(), &monitor);
    assert!(matches!(result, Err(Error::Interrupted)));
    // Canceled in the first batch, not at the end.
    let seen = stop.1.lock().unwrap().clone();
    assert_eq!(seen.len(), 1, "{seen:?}");

    let monitor = Monitor::default();
    let counting = CountingStorage::new(storage);
    let storage: Arc<dyn Storage> = Arc::clone(&counting) as Arc<dyn Storage>;
    check::check(&storage, None, Repair::Nothing, &Limits::default(), &monitor).unwrap();
    // 2048 tables in batches of 64, not one by one.
    assert!(counting.counts().read_batches <= 33, "{:?}", counting.counts());
}
