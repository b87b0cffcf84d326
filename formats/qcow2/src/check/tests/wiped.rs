//! Wiped L1 tables, with and without refcounts that still show what was in use: a repair keeps
//! apparent L2 tables, and what these map, so that the L1 table can still be restored.

use std::ops::Range;
use std::sync::Arc;

use vdkit_block::bytes::be64;
use vdkit_block::{CheckReport, Limits, Monitor, Remedy, Repair, Severity, Storage};
use vdkit_testbase::{CrashStorage, Rng};

use super::support::{
    Image, all_views, check_storage, guest_view, kind, must, open, our_check, peers, qemu_check,
    same_guest,
};
use crate::check;

const BY_FORCE: Remedy = Remedy::Repair { repair: Repair::All, force: true };

/// Cluster sizes from 512 bytes to 2 MiB, both versions, subclusters, compressed data, all refcount
/// layouts, lazy refcounts, and data in few or many tables.
const IMAGES: &[&str] = &[
    "plain",
    "v2",
    "cluster-512",
    "cluster-2M",
    "refcounts-1",
    "extended",
    "compressed",
    "zstd",
    "lazy",
    "preallocated",
];

/// Offset and bytes of a wiped range, to restore it.
struct Wiped(u64, Vec<u8>);

impl Wiped {
    fn put_back(&self, image: &Image) {
        image.put(self.0, &self.1);
    }
}

/// Zeroes a range of the entries of the active L1 table.
fn wipe_l1(image: &Image, entries: Range<u64>) -> Wiped {
    let at = image.l1() + entries.start * 8;
    let bytes = image.bytes(at, (entries.end - entries.start) as usize * 8);
    assert!(bytes.iter().any(|&b| b != 0), "nothing is lost with it");
    image.put(at, &vec![0; bytes.len()]);
    Wiped(at, bytes)
}

fn l1_entries(image: &Image) -> u64 {
    u64::from(image.header().l1_entries)
}

/// Ranges to wipe: all entries, the first half, one entry.
fn ways(image: &Image) -> Vec<Range<u64>> {
    let all = l1_entries(image);
    let mut ways = vec![0..all, 0..all.div_ceil(2), 0..1];
    ways.dedup();
    ways
}

/// Asserts that only kept leaks are left, and that the report names their tables and the way to
/// free them.
fn assert_kept(report: &CheckReport, tables: &[u64], what: &str) {
    assert_eq!(report.corruptions_left(), 0, "{what}: {:#?}", report.findings);
    assert!(report.leaks_left() > 0, "{what}: nothing was kept");
    assert_eq!(report.leaks_left(), report.leaks_kept, "{what}: {:#?}", report.findings);
    for table in tables {
        let named = report.findings.iter().any(|finding| {
            finding.offset == *table
                && finding.severity == Severity::Leak
                && !finding.repaired
                && finding.message.contains("repair by force")
        });
        assert!(named, "{what}: {table:#x} is not among {:#?}", report.findings);
    }
}

/// The L2 tables of these entries that map data.
fn tables_of(image: &Image, entries: &Range<u64>) -> Vec<u64> {
    let mut tables: Vec<u64> = entries.clone().map(|i| image.l2(i)).collect();
    tables.retain(|&table| table != 0 && maps_data(image, table));
    tables
}

fn maps_data(image: &Image, table: u64) -> bool {
    let geometry = image.header().geometry;
    let bytes = image.bytes(table, geometry.cluster_bytes() as usize);
    let entry = geometry.l2_entry_bytes() as usize;
    bytes.chunks_exact(entry).any(|entry| entry[1..7] != [0; 6])
}

/// Restores the wiped range, and asserts that nothing is missing.
fn assert_nothing_lost(sound: &Image, image: &Image, wiped: &Wiped, what: &str) {
    wiped.put_back(image);
    // Refcounts of shared compressed clusters were unknown to the first repair.
    let report = our_check(&image.path, Repair::All).unwrap();
    assert_eq!((report.corruptions_left(), report.leaks_left()), (0, 0), "{what}");
    assert_eq!(qemu_check(&image.path).exit, 0, "{what}");
    assert!(same_guest(&sound.path, &image.path), "{what}: not the same disk");
}

#[test]
fn leaks_that_look_like_tables_are_kept_where_the_l1_table_was_wiped() {
    if !peers() {
        return;
    }
    for name in IMAGES {
        for repair in [Repair::Leaks, Repair::All] {
            for way in ways(&Image::make(kind(name))) {
                let image = Image::make(kind(name));
                let sound = image.copy();
                let what = format!("{name}, {repair:?}, L1 entries {way:?}");
                let tables = tables_of(&image, &way);
                let wiped = wipe_l1(&image, way);
                let leak = image.append_cluster(1, 7);
                let report = our_check(&image.path, repair).unwrap();
                assert_kept(&report, &tables, &what);
                // A cluster that is neither a table nor mapped by one is freed.
                assert!(report.leaks_fixed > 0, "{what}: {:#?}", report.findings);
                let own = |finding: &&vdkit_block::Finding| finding.offset == leak;
                let own = report.findings.iter().find(own).is_none_or(|finding| finding.repaired);
                assert!(own, "{what}: {:#?}", report.findings);
                let theirs = qemu_check(&image.path);
                assert_eq!((theirs.exit, theirs.leaks), (3, report.leaks_left()), "{what}");
                let again = our_check(&image.path, repair).unwrap();
                assert_eq!(again.leaks_left(), report.leaks_left(), "{what}: another time");
                let forced = image.copy();
                assert_nothing_lost(&sound, &image, &wiped, &what);
                // Forced repair, without that data.
                let report = our_check(&forced.path, Repair::AllForced).unwrap();
                assert_eq!((report.leaks_left(), report.leaks_kept), (0, 0), "{what}");
                assert_eq!(qemu_check(&forced.path).exit, 0, "{what}");
            }
        }
    }
}

/// Additional damage to the refcounts.
type Damage = (&'static str, fn(&Image));

fn refcount_table(image: &Image) -> u64 {
    image.header().refcount_table_offset.0
}

/// Host offsets of all refcount blocks.
fn refcount_blocks(image: &Image) -> Vec<u64> {
    let header = image.header();
    let entries = u64::from(header.refcount_table_clusters) * header.geometry.cluster_bytes() / 8;
    let table = image.bytes(refcount_table(image), entries as usize * 8);
    (0..entries as usize).map(|i| be64(&table, i * 8)).filter(|&block| block != 0).collect()
}

fn wipe_cluster(image: &Image, offset: u64) {
    image.put(offset, &vec![0; image.header().geometry.cluster_bytes() as usize]);
}

const LOST_REFCOUNTS: &[Damage] = &[
    ("a table beyond the end", |image| image.put_word(48, 1 << 46)),
    ("an unaligned table", |image| image.put_word(48, refcount_table(image) + 8)),
    ("a table of no clusters", |image| image.put(56, &[0; 4])),
    ("a table that is the L1 table", |image| image.put_word(48, image.l1())),
    ("a table of zeroes", |image| wipe_cluster(image, refcount_table(image))),
    ("a table entry of ones", |image| image.put_word(refcount_table(image), u64::MAX)),
    ("no first block", |image| image.put_word(refcount_table(image), 0)),
    ("blocks of zeroes", |image| {
        for block in refcount_blocks(image) {
            wipe_cluster(image, block);
        }
    }),
    ("a sector of zeroes", |image| image.put(image.refcount(0).0, &[0; 512])),
];

#[test]
fn a_rebuild_of_refcounts_keeps_what_looks_like_tables() {
    if !peers() {
        return;
    }
    for name in IMAGES {
        for (damage_name, damage) in LOST_REFCOUNTS {
            for way in ways(&Image::make(kind(name))) {
                let image = Image::make(kind(name));
                let sound = image.copy();
                let what = format!("{name}, {damage_name}, L1 entries {way:?}");
                let tables = tables_of(&image, &way);
                let wiped = wipe_l1(&image, way);
                damage(&image);
                let report = our_check(&image.path, Repair::All)
                    .unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_kept(&report, &tables, &what);
                assert_eq!(qemu_check(&image.path).exit, 3, "{what}");
                // The image stays in use.
                must(
                    "qemu-io",
                    &[
                        "-f",
                        "qcow2",
                        "-c",
                        "write -z 0 512",
                        "-c",
                        "write -P 99 1M 300k",
                        image.copy().path.to_str().unwrap(),
                    ],
                );
                assert_nothing_lost(&sound, &image, &wiped, &what);
            }
        }
    }
}

#[test]
fn writes_after_a_repair_do_not_touch_what_was_kept() {
    if !peers() {
        return;
    }
    for (damage_name, damage) in LOST_REFCOUNTS {
        let image = Image::make(kind("refcounts-4"));
        let plain = Image::make(kind("cluster-512"));
        for image in [image, plain] {
            // The last table of the disk is lost; the first is written to.
            let last = (0..l1_entries(&image))
                .rev()
                .find(|&i| image.l2(i) != 0 && maps_data(&image, image.l2(i)))
                .unwrap();
            let sound = image.copy();
            let wiped = wipe_l1(&image, last..last + 1);
            damage(&image);
            let report = our_check(&image.path, Repair::All).unwrap();
            assert_eq!(report.corruptions_left(), 0, "{damage_name}");
            let writes = ["-c", "write -P 9 1M 77k", "-c", "write -P 8 400k 30k"];
            for image in [&image, &sound] {
                let file = image.path.to_str().unwrap();
                must("qemu-io", &[&["-f", "qcow2"], &writes[..], &[file]].concat());
            }
            wiped.put_back(&image);
            our_check(&image.path, Repair::All).unwrap();
            assert_eq!(qemu_check(&image.path).exit, 0, "{damage_name}");
            assert!(same_guest(&sound.path, &image.path), "{damage_name}");
        }
    }
}

#[test]
fn a_damaged_l1_entry_is_not_mended_unasked_where_the_refcounts_are_lost() {
    if !peers() {
        return;
    }
    for name in IMAGES {
        for (damage_name, damage) in LOST_REFCOUNTS {
            let image = Image::make(kind(name));
            let (at, word, table) = (image.l1(), image.word(image.l1()), image.l2(0));
            let sound = image.copy();
            image.put_word(at, word ^ 1 << 46);
            damage(&image);
            let before = std::fs::read(&image.path).unwrap();
            let what = format!("{name}, {damage_name}");
            let told = our_check(&image.path, Repair::All).map(|report| report.findings);
            let error = told.expect_err(&what);
            assert!(error.to_string().contains(&format!("{table:#x}")), "{what}: {error}");
            assert_eq!(error.remedy(), Some(BY_FORCE), "{what}");
            assert!(before == std::fs::read(&image.path).unwrap(), "{what}: changed");
            image.put_word(at, word);
            let report = our_check(&image.path, Repair::All).unwrap();
            assert_eq!((report.corruptions_left(), report.leaks_left()), (0, 0), "{what}");
            assert!(same_guest(&sound.path, &image.path), "{what}");
        }
    }
}

#[test]
fn tables_of_a_snapshot_alone_are_kept() {
    if !peers() {
        return;
    }
    for name in ["snapshots", "refcounts-2", "refcounts-8", "extended-16k"] {
        for lost in [None, Some(LOST_REFCOUNTS[0].1), Some(LOST_REFCOUNTS[7].1)] {
            let image = Image::make(kind(name));
            let views = all_views(&open(&image.path));
            let list = image.header().snapshots_offset.0;
            let (l1, entries) = (image.word(list), image.bytes(list + 8, 4));
            let entries = u32::from_be_bytes(entries.try_into().unwrap());
            let wiped = Wiped(l1, image.bytes(l1, entries as usize * 8));
            image.put(l1, &vec![0; wiped.1.len()]);
            if let Some(damage) = lost {
                damage(&image);
            }
            let what =
                format!("{name}, refcounts {}", if lost.is_some() { "lost" } else { "kept" });
            let report = our_check(&image.path, Repair::All).unwrap();
            assert_kept(&report, &[], &what);
            wiped.put_back(&image);
            let report = our_check(&image.path, Repair::All).unwrap();
            assert_eq!((report.corruptions_left(), report.leaks_left()), (0, 0), "{what}");
            assert_eq!(qemu_check(&image.path).exit, 0, "{what}");
            assert!(all_views(&open(&image.path)) == views, "{what}");
        }
    }
}

#[test]
fn leaks_that_are_no_tables_are_given_back_whatever_is_missing() {
    if !peers() {
        return;
    }
    for name in ["plain", "cluster-512", "extended-16k", "snapshots", "bitmap", "zstd"] {
        let image = Image::make(kind(name));
        for fill in [0, 7, 0x80] {
            image.append_cluster(1, fill);
        }
        // A copy of an existing table, as an interrupted repair leaves it.
        let cluster = image.header().geometry.cluster_bytes();
        let table = image.bytes(image.l2(0), cluster as usize);
        let copy = image.append_cluster(1, 0);
        image.put(copy, &table);
        let report = our_check(&image.path, Repair::Leaks).unwrap();
        assert_eq!((report.leaks_fixed, report.leaks_left()), (4, 0), "{name}");
        // A copy without a refcount is not kept either.
        let copy = image.append_cluster(0, 0);
        image.put(copy, &table);
        image.put_word(48, 1 << 46);
        let report = our_check(&image.path, Repair::All).unwrap();
        assert_eq!((report.corruptions_left(), report.leaks_left()), (0, 0), "{name}: {report:#?}");
        assert_eq!(qemu_check(&image.path).exit, 0, "{name}");
    }
}

#[test]
fn an_image_that_was_not_closed_is_opened_and_loses_no_table() {
    if !peers() {
        return;
    }
    for name in ["lazy", "cluster-512", "extended"] {
        for way in ways(&Image::make(kind(name))) {
            let image = Image::make(kind(name));
            let sound = image.copy();
            let wiped = wipe_l1(&image, way.clone());
            image.put(79, &[image.bytes(79, 1)[0] | 1]);
            let storage = open(&image.path);
            check::rebuild_refcounts(&storage, &Limits::default(), &Monitor::default()).unwrap();
            drop(storage);
            let what = format!("{name}, {way:?}");
            assert_eq!(image.bytes(79, 1)[0] & 1, 0, "{what}: still dirty");
            assert_nothing_lost(&sound, &image, &wiped, &what);
        }
    }
}

#[test]
fn a_compaction_gives_no_table_away() {
    if !peers() {
        return;
    }
    let image = Image::make(kind("cluster-512"));
    wipe_l1(&image, 0..4);
    let before = std::fs::read(&image.path).unwrap();
    let options = vdkit_block::CompactOptions::default().zero_scan(true);
    let (limits, monitor) = (Limits::default(), Monitor::default());
    let error = check::compact(&open(&image.path), None, options, &limits, &monitor).unwrap_err();
    assert_eq!(error.remedy(), Some(BY_FORCE), "{error}");
    assert!(before == std::fs::read(&image.path).unwrap());
}

#[test]
fn a_power_cut_in_a_repair_that_keeps_tables_loses_none() {
    if !peers() {
        return;
    }
    let mut rng = Rng::from_env(5);
    for (kind_name, damage) in [
        ("cluster-512", LOST_REFCOUNTS[0]),
        ("refcounts-1", LOST_REFCOUNTS[7]),
        ("zstd", LOST_REFCOUNTS[4]),
        ("v2", ("refcounts that are sound", |_| {})),
    ] {
        let image = Image::make(kind(kind_name));
        let whole = guest_view(&*open(&image.path));
        let wiped = wipe_l1(&image, 0..l1_entries(&image));
        damage.1(&image);
        // A file that another program has extended.
        image.put(image.len().next_multiple_of(512), &[3; 700]);
        let memory = image.memory();
        let crash = CrashStorage::holding(&memory);
        let repair = |storage: &Arc<dyn Storage>| check_storage(storage, Repair::All);
        repair(&(Arc::clone(&crash) as Arc<dyn Storage>)).unwrap();
        println!("{kind_name}, {}: {} changes, seed {}", damage.0, crash.ops(), rng.seed());
        crash.for_each_crash(|ops, moment| {
            let survivors = [
                moment.only_durable(),
                moment.everything(),
                moment.survivor(&mut rng),
                moment.survivor(&mut rng),
            ];
            for (i, survivor) in survivors.into_iter().enumerate() {
                let what = format!("{kind_name}, {}, {ops} changes, survivor {i}", damage.0);
                let storage: Arc<dyn Storage> = Arc::new(survivor);
                let report = repair(&storage).unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_kept(&report, &[], &what);
                storage.write_at(&wiped.1, vdkit_block::HostOffset(wiped.0)).unwrap();
                assert!(guest_view(&*storage) == whole, "{what}: not the same disk");
                let report = repair(&storage).unwrap_or_else(|error| panic!("{what}: {error}"));
                let left = (report.corruptions_left(), report.leaks_left());
                assert_eq!(left, (0, 0), "{what}: {:#?}", report.findings);
                assert!(guest_view(&*storage) == whole, "{what}: repaired, not the same disk");
            }
        });
    }
}
