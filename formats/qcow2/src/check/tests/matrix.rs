//! Every kind of damage on every kind of image: the check reports it, the repair fixes it, vdkit
//! and qemu-img find the result clean, and all data that was readable stays so. The same holds for
//! a repair that a power cut interrupts.

use std::sync::Arc;

use vdkit_block::{Repair, Storage};
use vdkit_testbase::{CrashStorage, Rng};

use super::support::{Image, all_views, assert_clean, check_storage, guest_view, kind, peers};
use crate::layout::{COMPRESSED, COPIED, OFFSET_MASK};

/// Option sets: versions, cluster sizes, refcount widths, extended entries, snapshots, bitmaps,
/// compressed data, lazy refcounts.
const IMAGES: &[&str] = &[
    "v2",
    "plain",
    "cluster-512",
    "refcounts-1",
    "refcounts-64",
    "extended-16k",
    "snapshots",
    "bitmap",
    "compressed",
    "lazy",
];

/// A damage; the function returns whether it applies to this image.
type Damage = (&'static str, fn(&Image) -> bool);

const LEAKS: &[Damage] = &[
    ("a leak at the end", |image| {
        image.append_cluster(1, 7);
        true
    }),
    ("a leak in the middle", |image| {
        let at = image.l2_entry(0);
        let host = image.word(at);
        image.put_word(at, 0);
        if image.header().geometry.extended {
            image.put_word(at + 8, 0);
        }
        // If it is shared, one reference less leaks too.
        host & OFFSET_MASK != 0 && host & COMPRESSED == 0
    }),
    ("a refcount too high", |image| {
        let refcount = image.get_refcount(data(image));
        let wide = image.header().geometry.refcount_bits() > 1;
        if wide {
            image.set_refcount(data(image), refcount + 2);
        }
        // With COPIED set, that is more than a leak.
        wide && refcount > 1
    }),
];

const CORRUPTIONS: &[Damage] = &[
    ("refcount of data 0", |image| no_refcount(image, data(image))),
    ("refcount of the L2 table 0", |image| no_refcount(image, image.l2(0))),
    ("refcount of the header 0", |image| no_refcount(image, 0)),
    ("refcount of the L1 table 0", |image| no_refcount(image, image.l1())),
    ("refcount of the refcount table 0", |image| no_refcount(image, table(image))),
    ("refcount of the refcount block 0", |image| no_refcount(image, image.refcount(0).0)),
    ("refcount of the snapshot table 0", |image| {
        with(snapshots(image), |at| no_refcount(image, at))
    }),
    ("refcount of a snapshot's L1 table 0", |image| {
        with(snapshots(image), |at| no_refcount(image, image.word(at)))
    }),
    ("refcount of the bitmap directory 0", |image| {
        with(directory(image), |at| no_refcount(image, at))
    }),
    ("COPIED changed in the L2 table", |image| flip(image, image.l2_entry(0), COPIED)),
    ("COPIED changed in the L1 table", |image| flip(image, image.l1(), COPIED)),
    ("L1 entry unaligned", |image| {
        image.header().geometry.cluster_bytes() > 512 && flip(image, image.l1(), 512)
    }),
    ("L1 entry beyond the end", |image| flip(image, image.l1(), 1 << 46)),
    ("L1 entry with reserved bits", |image| flip(image, image.l1(), 1 << 60 | 2)),
    ("L1 entry of flags alone", |image| put(image, image.l1(), COPIED)),
    ("L2 entry unaligned", |image| {
        image.header().geometry.cluster_bytes() > 512 && flip(image, image.l2_entry(0), 512)
    }),
    ("L2 entry beyond the end", |image| flip(image, image.l2_entry(0), 1 << 46)),
    ("L2 entry with reserved bits", |image| flip(image, image.l2_entry(0), 1 << 58 | 8)),
    ("L2 entry compressed, in the header", |image| put(image, image.l2_entry(0), COMPRESSED | 512)),
    ("L2 entry compressed, beyond the end", |image| {
        put(image, image.l2_entry(0), COMPRESSED | 1 << 44)
    }),
    ("data in the header", |image| put(image, image.l2_entry(0), 1 << 63 | 512)),
    ("data in the L1 table", |image| point(image, image.l2_entry(0), image.l1())),
    ("data in the L2 table", |image| point(image, image.l2_entry(0), image.l2(0))),
    ("data in the refcount table", |image| point(image, image.l2_entry(0), table(image))),
    ("data in a refcount block", |image| point(image, image.l2_entry(0), image.refcount(0).0)),
    ("data in the snapshot table", |image| {
        with(snapshots(image), |at| point(image, image.l2_entry(0), at))
    }),
    ("data in a snapshot's L1 table", |image| {
        with(snapshots(image), |at| point(image, image.l2_entry(0), image.word(at)))
    }),
    ("data in the bitmap directory", |image| {
        with(directory(image), |at| point(image, image.l2_entry(0), at))
    }),
    ("L2 table in the header", |image| put(image, image.l1(), COPIED | 512)),
    ("L2 table in the L1 table", |image| point(image, image.l1(), image.l1())),
    ("L2 table in the refcount table", |image| point(image, image.l1(), table(image))),
    ("L2 table in a refcount block", |image| point(image, image.l1(), image.refcount(0).0)),
    ("L2 table in data", |image| point(image, image.l1(), data(image))),
    ("L2 table in the snapshot table", |image| {
        with(snapshots(image), |at| point(image, image.l1(), at))
    }),
    ("L2 table in the bitmap directory", |image| {
        with(directory(image), |at| point(image, image.l1(), at))
    }),
    ("active L1 table is data", |image| put(image, 40, data(image))),
    ("refcount block is the L2 table", |image| put(image, table(image), image.l2(0))),
    ("refcount block is data", |image| put(image, table(image), data(image))),
    ("refcount block is the table", |image| put(image, table(image), table(image))),
    ("refcount block unaligned", |image| put(image, table(image), image.refcount(0).0 + 8)),
    ("refcount block beyond the end", |image| put(image, table(image), 1 << 46)),
    ("refcount block named twice", |image| put(image, table(image) + 8, image.refcount(0).0)),
    ("no refcount block", |image| put(image, table(image), 0)),
    ("refcount block of zeroes", |image| wipe(image, image.refcount(0).0, 0)),
    ("refcount block of ones", |image| {
        // With one bit each, they are leaks.
        image.header().geometry.refcount_bits() > 1 && wipe(image, image.refcount(0).0, 0xff)
    }),
    ("refcount table of zeroes", |image| wipe(image, table(image), 0)),
    ("refcount table of ones", |image| wipe(image, table(image), 0xff)),
    ("refcount table at 0", |image| put(image, 48, 0)),
    ("refcount table unaligned", |image| put(image, 48, table(image) + 8)),
    ("refcount table beyond the end", |image| put(image, 48, 1 << 46)),
    ("refcount table is the L1 table", |image| put(image, 48, image.l1())),
    ("refcount table of no clusters", |image| {
        image.put(56, &[0; 4]);
        true
    }),
    ("refcount table of too many clusters", |image| {
        image.put(56, &[0xff; 4]);
        true
    }),
    ("snapshot table unaligned", |image| with(snapshots(image), |at| put(image, 64, at + 8))),
    ("snapshot table beyond the end", |image| with(snapshots(image), |_| put(image, 64, 1 << 46))),
    ("snapshot's L1 table unaligned", |image| with(snapshots(image), |at| flip(image, at, 8))),
    ("snapshot's L1 table beyond the end", |image| {
        with(snapshots(image), |at| flip(image, at, 1 << 46))
    }),
    ("snapshot's L1 table too large", |image| {
        with(snapshots(image), |at| {
            image.put(at + 8, &[0x7f; 4]);
            true
        })
    }),
    ("more snapshots than there are", |image| {
        with(snapshots(image), |_| {
            image.put(60, &[0, 0, 1, 0]);
            true
        })
    }),
    ("a snapshot's L1 entry beyond the end", |image| {
        with(snapshots(image), |at| flip(image, image.word(at), 1 << 46))
    }),
    ("bitmap directory unaligned", |image| with(extension(image), |at| flip(image, at + 16, 8))),
    ("bitmap directory beyond the end", |image| {
        with(extension(image), |at| flip(image, at + 16, 1 << 46))
    }),
    ("bitmap directory of no bytes", |image| with(extension(image), |at| put(image, at + 8, 0))),
    ("no bitmaps, says the extension", |image| {
        with(extension(image), |at| {
            image.put(at, &[0; 4]);
            true
        })
    }),
    ("bitmap table unaligned", |image| with(directory(image), |at| flip(image, at, 8))),
    ("bitmap table beyond the end", |image| with(directory(image), |at| flip(image, at, 1 << 46))),
    ("bitmap table is the L1 table", |image| {
        with(directory(image), |at| put(image, at, image.l1()))
    }),
    ("bitmap table entry with reserved bits", |image| {
        with(directory(image), |at| flip(image, image.word(at), 1 << 60))
    }),
    ("bitmap table entry beyond the end", |image| {
        with(directory(image), |at| put(image, image.word(at), 1 << 46))
    }),
    ("marked corrupt", |image| image.header().version >= 3 && flip(image, 72, 2)),
    ("the file cut in the middle", |image| {
        truncate(image, image.len() / 2);
        true
    }),
];

/// Damages that a repair refuses because most of the mapping is invalid: the header is more likely
/// wrong than the mapping.
const REFUSED: &[&str] = &["active L1 table is data"];

/// Number of [`LOSING`] damages that lose a table in each image without snapshots.
const LOSING_FOR_SURE: usize = 3;

/// Damages that lose the reference to an L2 table, so that a repair needs force to free the table
/// and its data. A snapshot may hold another reference.
const LOSING: &[&str] = &[
    "L1 entry unaligned",
    "L1 entry beyond the end",
    "L1 entry of flags alone",
    "L2 table in the header",
    "L2 table in data",
    "L2 table in the L1 table",
    "L2 table in the refcount table",
    "L2 table in a refcount block",
    "L2 table in the snapshot table",
    "L2 table in the bitmap directory",
    "snapshot table unaligned",
    "snapshot table beyond the end",
    "snapshot's L1 table unaligned",
    "snapshot's L1 table beyond the end",
    "snapshot's L1 table too large",
    "the file cut in the middle",
    "a snapshot's L1 entry beyond the end",
    "active L1 table is data",
];

fn data(image: &Image) -> u64 {
    image.word(image.l2_entry(0)) & OFFSET_MASK
}

fn table(image: &Image) -> u64 {
    image.header().refcount_table_offset.0
}

fn snapshots(image: &Image) -> Option<u64> {
    let header = image.header();
    (header.snapshot_count > 0).then_some(header.snapshots_offset.0)
}

fn directory(image: &Image) -> Option<u64> {
    image.header().bitmaps().map(|bitmaps| bitmaps.directory_offset.0)
}

fn extension(image: &Image) -> Option<u64> {
    image.header().extension(crate::layout::extension::BITMAPS).map(|found| found.offset)
}

fn with(at: Option<u64>, damage: impl FnOnce(u64) -> bool) -> bool {
    at.is_some_and(damage)
}

fn no_refcount(image: &Image, host: u64) -> bool {
    image.set_refcount(host, 0);
    true
}

fn put(image: &Image, at: u64, word: u64) -> bool {
    image.put_word(at, word);
    true
}

fn flip(image: &Image, at: u64, bits: u64) -> bool {
    put(image, at, image.word(at) ^ bits)
}

fn point(image: &Image, at: u64, host: u64) -> bool {
    put(image, at, host | COPIED)
}

fn wipe(image: &Image, host: u64, byte: u8) -> bool {
    image.put(host, &vec![byte; image.header().geometry.cluster_bytes() as usize]);
    true
}

fn truncate(image: &Image, len: u64) {
    std::fs::File::options().write(true).open(&image.path).unwrap().set_len(len).unwrap();
}

/// Asserts that intact clusters stay intact, and that nothing else appears that was never there.
fn assert_no_worse(
    sound: &[Option<u64>],
    damaged: &[Option<u64>],
    after: &[Option<u64>],
    what: &str,
) {
    assert_eq!(sound.len(), after.len(), "{what}");
    for (i, now) in after.iter().enumerate() {
        let was = damaged.get(i).copied().flatten();
        let fine = *now == sound[i] || *now == Some(0) || (was.is_some() && *now == was);
        assert!(fine, "{what}: guest cluster {i} is {now:?}, was {was:?}, once {:?}", sound[i]);
        if was.is_some() && was == sound[i] {
            assert_eq!(*now, sound[i], "{what}: guest cluster {i} was fine");
        }
    }
}

fn assert_clean_for_both(storage: &Arc<dyn Storage>, image: &Image, what: &str) {
    assert_clean(storage, what);
    image.assert_sound_for_qemu(&**storage, what);
}

/// Asserts that a check finds the damage, and that a repair of leaks alone does not hide it.
fn assert_found(storage: &Arc<dyn Storage>, leaks_only: bool, what: &str) {
    let found = check_storage(storage, Repair::Nothing).unwrap_or_else(|e| panic!("{what}: {e}"));
    assert_eq!(found.corruptions > 0, !leaks_only, "{what}: {:#?}", found.findings);
    assert!(found.corruptions + found.leaks > 0, "{what}");
    if !leaks_only {
        // An apparent leak may be what a damaged entry pointed to.
        let leaks = check_storage(storage, Repair::Leaks).unwrap();
        assert!(leaks.corruptions_left() > 0 || leaks.corruptions_fixed > 0, "{what}");
    }
}

/// Repairs the image, with force where it must be; asserts that a repair is refused only where it
/// may be, and then changes nothing. Returns the mode that repaired it, or nothing if none does.
fn repair_or_refuse(
    crash: &Arc<CrashStorage>,
    kind_name: &str,
    name: &str,
    leaks_only: bool,
) -> Option<Repair> {
    let what = format!("{name} ({kind_name})");
    let storage = Arc::clone(crash) as Arc<dyn Storage>;
    let mut repair = if leaks_only { Repair::Leaks } else { Repair::All };
    let mut repaired = check_storage(&storage, repair);
    let lost = |error: &vdkit_block::Error| error.to_string().contains("looks like L2 tables");
    let refused = repaired.as_ref().is_err_and(lost);
    assert!(!refused || LOSING.contains(&name), "{what}: {:?}", repaired.as_ref().err());
    let alone = !kind(kind_name).snapshots;
    assert!(
        refused || !alone || !LOSING[..LOSING_FOR_SURE].contains(&name),
        "{what}: {:?}",
        repaired.as_ref().err()
    );
    if refused {
        assert_eq!(crash.ops(), 0, "{what}: refused, and changed");
        repair = Repair::AllForced;
        repaired = check_storage(&storage, repair);
    }
    let report = match repaired {
        Ok(report) => report,
        Err(error) => {
            assert!(REFUSED.contains(&name), "{what}: {error}");
            assert!(error.to_string().contains("header"), "{what}: {error}");
            assert_eq!(crash.ops(), 0, "{what}");
            return None;
        }
    };
    assert_eq!(
        (report.corruptions_left(), report.leaks_left()),
        (0, 0),
        "{what}: {:#?}",
        report.findings
    );
    Some(repair)
}

/// Checks, repairs and checks again; then repeats it with power cuts. Returns whether the damage
/// applied.
fn one(kind_name: &str, (name, damage): &Damage, leaks_only: bool, rng: &mut Rng) -> bool {
    let image = Image::make(kind(kind_name));
    let sound = image.memory();
    let sound_view = guest_view(&sound);
    if !damage(&image) {
        return false;
    }
    let what = format!("{name} ({kind_name})");
    let damaged = image.memory();
    let before = guest_view(&damaged);
    let storage: Arc<dyn Storage> = Arc::new(damaged.clone());
    assert_found(&storage, leaks_only, &what);
    let crash = CrashStorage::holding(&damaged);
    let Some(repair) = repair_or_refuse(&crash, kind_name, name, leaks_only) else { return true };
    let storage: Arc<dyn Storage> = crash.clone();
    let after = guest_view(&*storage);
    assert_no_worse(&sound_view, &before, &after, &what);
    assert_clean_for_both(&storage, &image, &what);
    let mended_views = all_views(&storage);
    for _ in 0..3 {
        let ops = rng.below(crash.ops() as u64 + 1) as usize;
        let survivor = crash.crash_at(ops).survivor(rng);
        let what = format!("{what}, cut after {ops} of {} changes", crash.ops());
        let now = guest_view(&survivor);
        for (i, now) in now.iter().enumerate() {
            let fine =
                *now == after[i] || before.get(i).is_none_or(|was| was == now || was.is_none());
            assert!(fine, "{what}: guest cluster {i} is {now:?}, was {:?}", before.get(i));
        }
        let survivor: Arc<dyn Storage> = Arc::new(survivor);
        let report =
            check_storage(&survivor, repair).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!((report.corruptions_left(), report.leaks_left()), (0, 0), "{what}");
        assert!(all_views(&survivor) == mended_views, "{what}: another disk");
        assert_clean_for_both(&survivor, &image, &what);
    }
    true
}

fn all(images: &[&str]) {
    if !peers() {
        return;
    }
    let mut rng = Rng::from_env(17);
    println!("seed {}", rng.seed());
    for kind_name in images {
        let mut applied = 0;
        for damage in LEAKS {
            applied += usize::from(one(kind_name, damage, true, &mut rng));
        }
        for damage in CORRUPTIONS {
            applied += usize::from(one(kind_name, damage, false, &mut rng));
        }
        println!("{kind_name}: {applied} damages");
        assert!(applied > 40, "{kind_name}: {applied}");
    }
}

#[test]
fn every_damage_to_plain_images_is_mended() {
    all(&IMAGES[..5]);
}

#[test]
fn every_damage_to_images_with_more_in_them_is_mended() {
    all(&IMAGES[5..]);
}
