//! Images that are small and name much: more references than refcounts count, tables in holes, one
//! cluster for a whole disk.

use std::sync::Arc;

use vdkit_block::{CompactOptions, Limits, Monitor, Repair, Storage};
use vdkit_testbase::CountingStorage;

use super::support::{Image, check_storage, must, open, our_check, peers, qemu_check, same_guest};
use crate::check;
use crate::layout::{COPIED, OFFSET_MASK, incompatible};

/// An image with these options and `bytes` of data at its start.
fn image(options: &str, size: &str, bytes: &str) -> Image {
    let image = Image::empty();
    let file = image.path.to_str().unwrap();
    must("qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, file, size]);
    must("qemu-io", &["-f", "qcow2", "-c", &format!("write -P 3 0 {bytes}"), file]);
    image
}

#[test]
fn more_references_than_a_refcount_counts_make_an_image_that_is_only_read() {
    if !peers() {
        return;
    }
    for (bits, references) in [(1, 2), (2, 5), (4, 17)] {
        let image = image(&format!("cluster_size=4K,refcount_bits={bits}"), "8M", "128K");
        let first = image.l2_entry(0);
        let shared = image.word(first) & !COPIED;
        (0..references).for_each(|entry| image.put_word(first + entry * 8, shared));
        let before = image.copy();
        let what = format!("{bits} bits");
        for _ in 0..2 {
            let report = our_check(&image.path, Repair::AllForced).unwrap();
            assert!(report.corruptions_left() > 0, "{what}: {:?}", report.findings);
            assert!(report.findings.iter().any(|finding| finding.message.contains("convert it")));
            assert!(image.header().has(incompatible::CORRUPT), "{what}");
        }
        let entries = (0..references).map(|entry| image.word(first + entry * 8));
        assert!(entries.into_iter().all(|entry| entry == shared), "{what}: written in place");
        // Neither program writes to it, and both can convert it.
        let file = image.path.to_str().unwrap();
        let write = ["-f", "qcow2", "-c", "write 0 4k", file];
        let written = std::process::Command::new("qemu-io").args(write).output().unwrap();
        assert!(!written.status.success(), "{what}");
        assert!(same_guest(&before.path, &image.path), "{what}");
    }
}

/// All tables of a hole are in conflict, as data is where they are. Each is empty.
#[test]
fn a_repair_writes_no_table_that_maps_nothing() {
    const TABLES: u64 = 200;
    if !peers() {
        return;
    }
    let image = image("cluster_size=64K", "200G", "64k");
    let (l1, entry) = (image.l1(), image.l2_entry(0));
    let hole = image.len().next_multiple_of(1 << 16);
    for i in 1..=TABLES {
        let table = hole + (i << 16);
        image.put_word(l1 + i * 8, table | COPIED);
        image.put_word(entry + i * 8, table | COPIED);
    }
    let memory = image.memory();
    memory.set_len(hole + ((TABLES + 1) << 16)).unwrap();
    let counting = CountingStorage::new(Arc::new(memory));
    let storage: Arc<dyn Storage> = counting.clone();
    let report = check_storage(&storage, Repair::AllForced).unwrap();
    assert_eq!(report.corruptions_left(), 0, "{:?}", report.findings);
    let written = counting.counts().bytes_written;
    assert!(written < TABLES << 14, "{written} bytes");
    image.assert_sound_for_qemu(&*storage, "after the repair");
}

/// Compaction keeps a list of the references to what it moves.
#[test]
fn a_cluster_with_very_many_references_stays_where_it_is() {
    if !peers() {
        return;
    }
    let image = image("cluster_size=512,refcount_bits=32", "8M", "32K");
    let first = image.l2_entry(0);
    let far = image.append_cluster(0, 5);
    let far = (0..20).fold(far, |_, _| image.append_cluster(0, 5));
    (0..64).for_each(|entry| image.put_word(first + entry * 8, far));
    // Both L1 entries name the table.
    let l1 = image.l1();
    let table = image.word(l1) & OFFSET_MASK;
    (0..2).for_each(|entry| image.put_word(l1 + entry * 8, table));
    our_check(&image.path, Repair::AllForced).unwrap();
    assert_eq!((image.get_refcount(table), image.get_refcount(far)), (2, 128));
    let before = image.copy();
    let (limits, monitor) = (Limits::default(), Monitor::default());
    let report =
        check::compact(&open(&image.path), None, CompactOptions::default(), &limits, &monitor)
            .unwrap();
    let left: Vec<_> = report.left_alone.iter().map(|left| (left.what, left.clusters)).collect();
    assert_eq!(left, [("data that too many entries refer to", 1)]);
    assert_eq!(qemu_check(&image.path).exit, 0);
    assert!(same_guest(&before.path, &image.path));
}

/// A data file has one place for the clusters of one table.
#[test]
fn a_table_of_two_guest_ranges_is_damage_in_an_image_with_a_data_file() {
    if !peers() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let options = format!("cluster_size=512,data_file={}/data", folder.path().display());
    let image = image(&options, "8M", "32k");
    let sound = image.copy();
    let (l1, table) = (image.l1(), image.l2(0));
    image.put_word(l1, table);
    image.put_word(l1 + 8, table);
    image.set_refcount(table, 2);
    let report = our_check(&image.path, Repair::Nothing).unwrap();
    let found = report.findings.iter().find(|finding| finding.offset == l1 + 8);
    assert!(found.is_some_and(|found| found.message.contains("no entry of another index names")));
    let report = our_check(&image.path, Repair::All).unwrap();
    assert_eq!((report.corruptions_left(), report.leaks_left()), (0, 0), "{:?}", report.findings);
    assert_eq!((image.word(l1), image.word(l1 + 8)), (table | COPIED, 0));
    assert_eq!(qemu_check(&image.path).exit, 0);
    assert!(same_guest(&sound.path, &image.path));
}

#[test]
fn an_end_mark_whose_length_no_list_has_is_mended() {
    if !peers() {
        return;
    }
    let image = image("cluster_size=64K", "8M", "64K");
    let sound = image.copy();
    let header = image.header();
    let last = header.extensions.last().unwrap();
    let mark = last.offset + (last.data.len() as u64).next_multiple_of(8);
    assert_eq!(image.word(mark), 0);
    image.put_word(mark, 0x1_e400);
    assert_eq!(qemu_check(&image.path).exit, 1, "QEMU opens it now; is this still damage?");
    let report = our_check(&image.path, Repair::Nothing).unwrap();
    assert_eq!((report.corruptions, report.findings[0].offset), (1, mark));
    assert_eq!(our_check(&image.path, Repair::All).unwrap().corruptions_left(), 0);
    assert_eq!(image.word(mark), 0);
    assert_eq!(qemu_check(&image.path).exit, 0);
    assert!(same_guest(&sound.path, &image.path));
}
