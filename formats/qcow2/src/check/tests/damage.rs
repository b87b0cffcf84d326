//! One damage at a time: the reports of vdkit and qemu-img, the repair, and what the guest reads
//! afterwards.

use std::ops::Range;

use vdkit_block::Repair;

use super::support::{Image, kind, must, our_check, peers, qemu_check, same_guest, verdict_of};
use crate::layout::{COMPRESSED, COPIED, OFFSET_MASK, ZERO};

/// Guest range that may read differently after the repair.
enum Guest {
    Same,
    Except(Range<u64>),
}
use Guest::{Except, Same};

/// What qemu-img reports for the damaged image.
enum Qemu {
    /// The same exit class.
    Agrees,
    /// The same exit class and the same numbers.
    AgreesInNumbers,
    /// Less than vdkit: this exit class.
    Says(i32),
}
use Qemu::{Agrees, AgreesInNumbers, Says};

fn raw(image: &Image) -> Vec<u8> {
    let out = image.path.with_extension("raw");
    let (from, to) = (image.path.to_str().unwrap(), out.to_str().unwrap());
    // A truncated compressed cluster stays unreadable.
    must("qemu-img", &["convert", "--salvage", "-f", "qcow2", "-O", "raw", from, to]);
    std::fs::read(out).unwrap()
}

fn assert_guest(sound: &Image, corrected: &Image, guest: &Guest, name: &str) {
    let Except(range) = guest else {
        assert!(same_guest(&sound.path, &corrected.path), "{name}");
        return;
    };
    let (before, after) = (raw(sound), raw(corrected));
    assert_eq!(before.len(), after.len(), "{name}");
    let outside = (0..before.len())
        .step_by(512)
        .filter(|at| !range.contains(&(*at as u64)))
        .find(|&at| before[at..][..512] != after[at..][..512]);
    assert!(outside.is_none(), "{name}: differs at {outside:#x?}");
}

/// Repairs everything, even if that frees unreferenced tables.
fn mend(image: &Image) -> vdkit_block::CheckReport {
    our_check(&image.path, Repair::All)
        .or_else(|_| our_check(&image.path, Repair::AllForced))
        .unwrap()
}

fn try_damage(name: &str, kind_name: &str, qemu: Qemu, guest: Guest, damage: impl FnOnce(&Image)) {
    let image = Image::make(kind(kind_name));
    let sound = image.copy();
    damage(&image);
    let name = format!("{name} ({kind_name})");
    let report = our_check(&image.path, Repair::Nothing).unwrap();
    let (ours, theirs) = (verdict_of(&report), qemu_check(&image.path));
    match qemu {
        // qemu-img gives up (1) if it cannot read on; that is damage too.
        Agrees if theirs.exit == 1 => assert_eq!(ours.exit, 2, "{name}: {ours:?} {theirs:?}"),
        Agrees => assert_eq!(ours.exit, theirs.exit, "{name}: {ours:?} {theirs:?}"),
        AgreesInNumbers => assert_eq!(
            (ours.exit, ours.corruptions, ours.leaks),
            (theirs.exit, theirs.corruptions, theirs.leaks),
            "{name}: {:#?}",
            report.findings
        ),
        Says(exit) => {
            assert_eq!(theirs.exit, exit, "{name}: {theirs:?}");
            assert_eq!(ours.exit, 2, "{name}: {ours:?}");
        }
    }
    assert!(report.findings.iter().all(|finding| !finding.repaired));

    let report = mend(&image);
    assert_eq!(
        (report.corruptions_left(), report.leaks_left()),
        (0, 0),
        "{name}: {:#?}\nthen {:#?}",
        report.findings,
        our_check(&image.path, Repair::Nothing).unwrap().findings
    );
    assert!(report.findings.iter().all(|finding| finding.repaired), "{name}");
    let again = our_check(&image.path, Repair::Nothing).unwrap();
    assert_eq!((again.corruptions, again.leaks), (0, 0), "{name}: {:#?}", again.findings);
    let theirs = qemu_check(&image.path);
    assert_eq!(theirs.exit, 0, "{name}: {theirs:?}");
    assert_guest(&sound, &image, &guest, &name);
    // The image is still writable.
    must("qemu-io", &["-f", "qcow2", "-c", "write 0 64k", image.path.to_str().unwrap()]);
    assert_eq!(qemu_check(&image.path).exit, 0, "{name} after a write");
}

fn data_cluster(image: &Image, guest: u64) -> u64 {
    image.word(image.l2_entry(guest)) & OFFSET_MASK
}

#[test]
fn refcounts_too_low_are_raised() {
    if !peers() {
        return;
    }
    for kind in ["plain", "v2", "cluster-512", "refcounts-1", "refcounts-4", "extended"] {
        try_damage("data", kind, AgreesInNumbers, Same, |image| {
            image.set_refcount(data_cluster(image, 0), 0);
        });
        try_damage("L2 table", kind, AgreesInNumbers, Same, |image| {
            image.set_refcount(image.l2(0), 0);
        });
        try_damage("header", kind, AgreesInNumbers, Same, |image| image.set_refcount(0, 0));
    }
    try_damage("shared data", "snapshots", AgreesInNumbers, Same, |image| {
        image.set_refcount(data_cluster(image, 0), 1);
    });
    try_damage("snapshot L1", "snapshots", AgreesInNumbers, Same, |image| {
        let table = image.header().snapshots_offset.0;
        image.set_refcount(image.word(table), 0);
    });
    try_damage("snapshot table", "refcounts-64", AgreesInNumbers, Same, |image| {
        image.set_refcount(image.header().snapshots_offset.0, 0);
    });
    try_damage("compressed", "compressed", AgreesInNumbers, Same, |image| {
        let word = image.word(image.l2_entry(11 << 20));
        assert!(word & COMPRESSED != 0);
        image.set_refcount(word & 0xff_ffff, 1);
    });
}

#[test]
fn copied_flags_follow_the_refcounts() {
    if !peers() {
        return;
    }
    for kind in ["plain", "extended", "cluster-512"] {
        try_damage("L2 without", kind, AgreesInNumbers, Same, |image| {
            let at = image.l2_entry(0);
            image.put_word(at, image.word(at) & !COPIED);
        });
        try_damage("L1 without", kind, AgreesInNumbers, Same, |image| {
            image.put_word(image.l1(), image.word(image.l1()) & !COPIED);
        });
    }
    try_damage("L2 with", "snapshots", AgreesInNumbers, Same, |image| {
        let at = image.l2_entry(0);
        assert!(image.word(at) & COPIED == 0);
        image.put_word(at, image.word(at) | COPIED);
    });
    try_damage("compressed with", "compressed", AgreesInNumbers, Same, |image| {
        let at = image.l2_entry(11 << 20);
        image.put_word(at, image.word(at) | COPIED);
    });
}

#[test]
fn l1_entries_that_cannot_be_are_let_go() {
    if !peers() {
        return;
    }
    for kind in ["plain", "v2", "refcounts-1", "snapshots", "extended-16k"] {
        let span = Image::make(super::support::kind(kind)).header().geometry.l2_span();
        for (name, word) in
            [("unaligned", 0x200 | COPIED), ("beyond", 0x40_0000_0000 | COPIED), ("flag", COPIED)]
        {
            try_damage(name, kind, Agrees, Except(0..span), |image| {
                let keep = if name == "unaligned" { image.l2(0) } else { 0 };
                image.put_word(image.l1(), word | keep);
            });
        }
        try_damage("reserved bits", kind, AgreesInNumbers, Same, |image| {
            image.put_word(image.l1(), image.word(image.l1()) | 1 << 60 | 4);
        });
    }
}

#[test]
fn l2_entries_that_cannot_be_are_let_go() {
    if !peers() {
        return;
    }
    for kind in ["plain", "v2", "cluster-2M", "snapshots", "extended"] {
        let cluster = Image::make(super::support::kind(kind)).header().geometry.cluster_bytes();
        for (name, change) in [("unaligned", 0x200u64), ("beyond", 0x40_0000_0000)] {
            try_damage(name, kind, Agrees, Except(0..cluster), |image| {
                let at = image.l2_entry(0);
                image.put_word(at, image.word(at) ^ change);
            });
        }
        try_damage("reserved bits", kind, AgreesInNumbers, Same, |image| {
            let at = image.l2_entry(0);
            image.put_word(at, image.word(at) | 1 << 60 | 1 << 5);
        });
    }
    try_damage("compressed beyond", "compressed", Agrees, Except(11 << 20..12 << 20), |image| {
        let at = image.l2_entry(11 << 20);
        image.put_word(at, image.word(at) | 1 << 40);
    });
    try_damage("compressed in header", "compressed", Agrees, Except(11 << 20..12 << 20), |image| {
        let at = image.l2_entry(11 << 20);
        image.put_word(at, COMPRESSED | 0x400);
    });
    let v2_zero = |image: &Image| {
        let at = image.l2_entry(0);
        image.put_word(at, image.word(at) | ZERO);
    };
    try_damage("zero flag", "v2", Says(0), Same, v2_zero);
}

#[test]
fn subclusters_make_sense_again() {
    if !peers() {
        return;
    }
    try_damage("both", "extended", AgreesInNumbers, Same, |image| {
        let at = image.l2_entry(0) + 8;
        image.put_word(at, image.word(at) | 5 << 32);
    });
    try_damage("no host cluster", "extended", AgreesInNumbers, Same, |image| {
        image.put_word(image.l2_entry(13 << 20) + 8, 0b110);
    });
    try_damage("zero flag", "extended", Says(0), Same, |image| {
        let at = image.l2_entry(0);
        image.put_word(at, image.word(at) | ZERO);
    });
    try_damage("compressed", "extended-16k", Agrees, Same, |image| {
        let at = image.l2_entry(11 << 20);
        assert!(image.word(at) & COMPRESSED != 0);
        image.put_word(at + 8, 1);
    });
}

#[test]
fn clusters_with_two_owners_get_one_each() {
    if !peers() {
        return;
    }
    for kind in ["plain", "refcounts-1", "refcounts-64", "extended-16k", "bitmap"] {
        let cluster = Image::make(super::support::kind(kind)).header().geometry.cluster_bytes();
        let span = Image::make(super::support::kind(kind)).header().geometry.l2_span();
        let first = || Except(0..cluster);
        let point_data_to = |image: &Image, host: u64| {
            image.put_word(image.l2_entry(0), host | COPIED);
        };
        try_damage("data in L2 table", kind, Agrees, first(), |image| {
            point_data_to(image, image.l2(0));
        });
        try_damage("data in L1 table", kind, Agrees, first(), |image| {
            point_data_to(image, image.l1());
        });
        try_damage("data in refcount block", kind, Agrees, first(), |image| {
            point_data_to(image, image.refcount(0).0);
        });
        try_damage("data in refcount table", kind, Agrees, first(), |image| {
            point_data_to(image, image.header().refcount_table_offset.0);
        });
        let point_l1_to = |image: &Image, host: u64| image.put_word(image.l1(), host | COPIED);
        try_damage("L2 in L1 table", kind, Agrees, Except(0..span), |image| {
            point_l1_to(image, image.l1());
        });
        try_damage("L2 in refcount block", kind, Agrees, Except(0..span), |image| {
            point_l1_to(image, image.refcount(0).0);
        });
        try_damage("L2 in refcount table", kind, Agrees, Except(0..span), |image| {
            point_l1_to(image, image.header().refcount_table_offset.0);
        });
        // Found if the other owner of the data is in another L2 table or does not exist.
        try_damage("L2 in data", kind, Agrees, Except(0..span), |image| {
            point_l1_to(image, data_cluster(image, 0));
        });
    }
    try_damage("data in snapshot table", "snapshots", Agrees, Except(0..16384), |image| {
        let at = image.l2_entry(0);
        image.put_word(at, image.header().snapshots_offset.0);
    });
    try_damage("data in snapshot L1", "snapshots", Agrees, Except(0..16384), |image| {
        let at = image.l2_entry(0);
        image.put_word(at, image.word(image.header().snapshots_offset.0));
    });
}

#[test]
fn shared_metadata_is_damage_even_where_refcounts_allow_for_it() {
    if !peers() {
        return;
    }
    // The result of `qemu-img check -r all` on such an image.
    try_damage("L1 and data", "plain", Says(0), Except(0..65536), |image| {
        let old = data_cluster(image, 0);
        image.put_word(image.l2_entry(0), image.l1());
        image.set_refcount(image.l1(), 2);
        image.set_refcount(old, 0);
    });
}

#[test]
fn refcount_structures_are_made_anew() {
    if !peers() {
        return;
    }
    for kind in ["plain", "v2", "cluster-512", "refcounts-1", "refcounts-64", "snapshots"] {
        let entry = |image: &Image| image.header().refcount_table_offset.0;
        for word in [0x200u64, 0x40_0000_0000, 1 << 60] {
            try_damage("table entry", kind, Agrees, Same, |image| {
                image.put_word(entry(image), word);
            });
        }
        try_damage("no block", kind, Agrees, Same, |image| image.put_word(entry(image), 0));
        try_damage("reserved bits", kind, Agrees, Same, |image| {
            image.put_word(entry(image), image.word(entry(image)) | 3);
        });
        try_damage("block named twice", kind, Agrees, Same, |image| {
            image.put_word(entry(image) + 8, image.word(entry(image)));
        });
        try_damage("block is an L2 table", kind, Agrees, Same, |image| {
            image.put_word(entry(image), image.l2(0));
        });
        try_damage("block is an L2 table, with an entry beyond", kind, Agrees, Same, |image| {
            let end = image.len().next_multiple_of(image.header().geometry.cluster_bytes());
            for i in 0..3 {
                let guest = (3300 << 10) + i * (200 << 10);
                if image.l2_entry(guest) > 4096 {
                    image.put_word(image.l2_entry(guest), end + (i << 21));
                }
            }
            image.put_word(entry(image), image.l2(0));
        });
        try_damage("block is data", kind, Agrees, Same, |image| {
            image.put_word(entry(image), data_cluster(image, 0));
        });
        try_damage("block is the table", kind, Agrees, Same, |image| {
            image.put_word(entry(image), entry(image));
        });
        try_damage("garbage", kind, Agrees, Same, |image| {
            let bytes: Vec<u8> = (0..512u32).map(|i| (i * 7 % 251) as u8).collect();
            image.put(image.refcount(0).0, &bytes);
        });
        try_damage("table beyond the end", kind, Agrees, Same, |image| {
            image.put_word(48, image.len().next_multiple_of(1 << 21) + (8 << 21));
        });
        try_damage("empty table", kind, Agrees, Same, |image| image.put(56, &[0; 4]));
    }
    try_damage("unaligned table", "plain", Says(1), Same, |image| image.put_word(48, 0x10200));
    try_damage("giant table", "plain", Says(1), Same, |image| image.put(56, &[0xff; 4]));
}

#[test]
fn a_truncated_file_loses_what_was_cut_off() {
    if !peers() {
        return;
    }
    for kind in ["plain", "v2", "cluster-512", "refcounts-1", "snapshots", "compressed", "bitmap"] {
        let full = Image::make(super::support::kind(kind));
        let cluster = full.header().geometry.cluster_bytes();
        for cut in [1, 3, 20] {
            try_damage("cut", kind, Agrees, Except(0..u64::MAX), |image| {
                let len = image.len() - cut * cluster;
                std::fs::File::options()
                    .write(true)
                    .open(&image.path)
                    .unwrap()
                    .set_len(len)
                    .unwrap();
            });
        }
    }
}

#[test]
fn marks_in_the_header_are_cleared() {
    if !peers() {
        return;
    }
    let mark = |bit: u8| move |image: &Image| image.put(79, &[image.bytes(79, 1)[0] | bit]);
    try_damage("corrupt", "plain", Says(0), Same, mark(2));
    let image = Image::make(kind("lazy"));
    mark(1)(&image);
    image.set_refcount(data_cluster(&image, 0), 0);
    let report = our_check(&image.path, Repair::Nothing).unwrap();
    assert_eq!(verdict_of(&report), qemu_check(&image.path));
    our_check(&image.path, Repair::All).unwrap();
    assert_eq!(image.bytes(79, 1)[0] & 1, 0);
    // A repair clears a sound image's dirty bit too; a plain check does not.
    mark(1)(&image);
    our_check(&image.path, Repair::Nothing).unwrap();
    assert_eq!(image.bytes(79, 1)[0] & 1, 1);
    our_check(&image.path, Repair::Leaks).unwrap();
    assert_eq!(image.bytes(79, 1)[0] & 1, 0);
}

#[test]
fn snapshots_are_mended_or_lost_one_by_one() {
    if !peers() {
        return;
    }
    let table = |image: &Image| image.header().snapshots_offset.0;
    for kind in ["snapshots", "refcounts-2", "bitmap"] {
        try_damage("L1 unaligned", kind, Agrees, Same, |image| {
            image.put_word(table(image), image.word(table(image)) + 512);
        });
        try_damage("L1 beyond", kind, Agrees, Same, |image| {
            image.put_word(table(image), 1 << 44);
        });
        try_damage("L1 too large", kind, Agrees, Same, |image| {
            image.put(table(image) + 8, &[0x7f, 0, 0, 0]);
        });
        try_damage("too many", kind, Agrees, Same, |image| {
            image.put(60, &[0, 0, 200, 0]);
        });
        try_damage("far too many", kind, Agrees, Same, |image| {
            image.put(60, &[0xff; 4]);
        });
        try_damage("table unaligned", kind, Agrees, Same, |image| {
            image.put_word(64, table(image) + 512);
        });
        try_damage("L1 of another", kind, Agrees, Same, |image| {
            // The second entry follows 40 bytes, 24 bytes of extra data, id and name.
            let second = table(image) + (40 + 24 + 1 + 5u64).next_multiple_of(8);
            image.put_word(second, image.word(table(image)));
        });
        try_damage("L1 is the active one", kind, Agrees, Same, |image| {
            image.put_word(table(image), image.l1());
        });
        try_damage("L1 entry beyond", kind, Agrees, Same, |image| {
            image.put_word(image.word(table(image)), 1 << 40);
        });
        try_damage("L1 is the snapshot table", kind, Agrees, Same, |image| {
            image.put_word(table(image), table(image));
        });
    }
}

#[test]
fn a_wrong_number_of_snapshots_loses_none() {
    if !peers() {
        return;
    }
    for count in [[0, 0, 200, 0], [0xff; 4]] {
        let image = Image::make(kind("snapshots"));
        image.put(60, &count);
        let report = our_check(&image.path, Repair::All).unwrap();
        assert_eq!(image.header().snapshot_count, 2, "{:#?}", report.findings);
        for name in ["first", "second"] {
            must("qemu-img", &["snapshot", "-a", name, image.path.to_str().unwrap()]);
        }
        assert_eq!(qemu_check(&image.path).exit, 0);
    }
}

#[test]
fn extra_data_of_snapshots_is_completed_and_cut() {
    if !peers() {
        return;
    }
    let image = Image::make(kind("snapshots"));
    let table = image.header().snapshots_offset.0;
    // Id and name move forward over the extra data.
    let names = image.bytes(table + 64, 6);
    image.put(table + 36, &8u32.to_be_bytes());
    image.put(table + 48, &names);
    image.put(60, &1u32.to_be_bytes()); // the second entry would begin earlier now
    let report = our_check(&image.path, Repair::Nothing).unwrap();
    let theirs = qemu_check(&image.path);
    assert_eq!((theirs.exit, theirs.corruptions), (2, 1));
    assert_eq!(report.corruptions, 1, "{:?}", report.findings);
    our_check(&image.path, Repair::All).unwrap();
    assert_eq!(qemu_check(&image.path).exit, 0);
    let table = image.header().snapshots_offset.0;
    assert_eq!(image.bytes(table + 36, 4), 24u32.to_be_bytes());
    assert_eq!(image.word(table + 48), 16 << 20); // the disk's size
    assert_eq!(image.word(table + 56), u64::MAX); // no count of instructions
    assert_eq!(image.bytes(table + 64, 6), names);
}

#[test]
fn broken_bitmaps_are_forgotten_and_their_space_is_given_back() {
    if !peers() {
        return;
    }
    let directory = |image: &Image| image.header().bitmaps().unwrap().directory_offset.0;
    for (at, byte) in [(0, 0xff), (7, 1), (8, 0xff), (16, 9), (17, 60), (18, 0xff), (15, 8)] {
        try_damage("directory", "bitmap", Agrees, Same, |image| {
            image.put(directory(image) + at, &[byte]);
        });
    }
    for entry in [1u64 << 60, 0x200, 1 << 44, 0x10001] {
        try_damage("table entry", "bitmap", Agrees, Same, |image| {
            image.put_word(image.word(directory(image)), entry);
        });
    }
    try_damage("data of the L1 table", "bitmap", Agrees, Same, |image| {
        image.put_word(image.word(directory(image)), image.l1());
    });
    let image = Image::make(kind("bitmap"));
    let extension = image.header().extension(crate::layout::extension::BITMAPS).unwrap().offset;
    image.put(extension, &0u32.to_be_bytes());
    assert!(our_check(&image.path, Repair::Nothing).unwrap().corruptions > 0);
    let report = our_check(&image.path, Repair::All).unwrap();
    assert_eq!((report.corruptions_left(), report.leaks_left()), (0, 0));
}

#[test]
fn a_broken_bitmap_goes_and_the_others_stay() {
    if !peers() {
        return;
    }
    let directory = |image: &Image| image.header().bitmaps().unwrap().directory_offset.0;
    // Bytes of the first entry of the directory, or words of its table.
    let bytes = [(0, 0xffu8), (7, 1), (8, 0xff), (16, 9), (17, 60), (15, 8)].map(Ok);
    let words = [1u64 << 60, 0x200, 1 << 44, 0x10001].map(Err);
    for (i, damage) in bytes.into_iter().chain(words).enumerate() {
        let image = Image::make(kind("bitmap"));
        match damage {
            Ok((at, byte)) => image.put(directory(&image) + at, &[byte]),
            Err(word) => image.put_word(image.word(directory(&image)), word),
        }
        let report = our_check(&image.path, Repair::All).unwrap();
        assert_eq!((report.corruptions_left(), report.leaks_left()), (0, 0), "{i}");
        let said = report.findings.iter().any(|f| f.message.contains("a repair drops it"));
        assert!(said, "{i}: {:?}", report.findings);
        let info =
            crate::describe::describe(&*super::support::open(&image.path), &Default::default())
                .unwrap();
        let names: Vec<&str> = info.bitmaps.iter().map(|b| b.name.as_str()).collect();
        assert_eq!(names, ["b1"], "{i}");
        assert_eq!(qemu_check(&image.path).exit, 0, "{i}");
    }
}

#[test]
fn stale_bitmaps_are_leaks() {
    if !peers() {
        return;
    }
    let image = Image::make(kind("bitmap"));
    image.put(95, &[0]);
    let report = our_check(&image.path, Repair::Nothing).unwrap();
    assert_eq!(verdict_of(&report), qemu_check(&image.path));
    assert!(report.leaks > 0 && report.corruptions == 0);
}

#[test]
fn lost_guest_data_makes_bitmaps_untrustworthy() {
    if !peers() {
        return;
    }
    let image = Image::make(kind("bitmap"));
    let at = image.l2_entry(0);
    image.put_word(at, image.word(at) | 1 << 44);
    our_check(&image.path, Repair::All).unwrap();
    assert_eq!(image.bytes(95, 1), [0]);
    // A wrong refcount alone does not.
    let image = Image::make(kind("bitmap"));
    image.set_refcount(0, 0);
    our_check(&image.path, Repair::All).unwrap();
    assert_eq!(image.bytes(95, 1), [1]);
}

#[test]
fn entries_of_a_data_file_go_home() {
    if !peers() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    for raw in ["on", "off"] {
        let image = Image::empty();
        let data = path(raw);
        let options = format!("data_file={data},data_file_raw={raw}");
        let file = image.path.to_str().unwrap();
        must("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &options, file, "64M"]);
        must("qemu-io", &["-f", "qcow2", "-c", "write -P 3 0 1M", file]);
        let before = self::raw(&image);
        let entry = image.l2_entry(0);
        image.put_word(entry, image.word(entry) & !COPIED);
        image.put_word(entry + 8, image.word(entry + 8) + (3 << 16));
        image.put_word(entry + 16, image.word(entry + 16) + 512);
        image.put_word(entry + 24, image.word(entry + 24) | COMPRESSED);
        let report = our_check(&image.path, Repair::Nothing).unwrap();
        assert!(report.corruptions >= 4, "{:?}", report.findings);
        let report = our_check(&image.path, Repair::All).unwrap();
        assert_eq!(report.corruptions_left(), 0, "{:?}", report.findings);
        assert_eq!(qemu_check(&image.path).exit, 0);
        // The first entry had lost every sign of its data.
        assert!(self::raw(&image)[65536..] == before[65536..]);
    }
}

#[test]
fn repair_of_leaks_keeps_its_hands_off_a_damaged_image() {
    if !peers() {
        return;
    }
    let image = Image::make(kind("plain"));
    image.append_cluster(1, 7);
    image.put_word(image.l1(), image.word(image.l1()) | 512);
    let before = std::fs::read(&image.path).unwrap();
    let report = our_check(&image.path, Repair::Leaks).unwrap();
    assert!(report.leaks > 0 && report.leaks_fixed == 0 && report.corruptions_fixed == 0);
    assert!(before == std::fs::read(&image.path).unwrap());
}

#[test]
fn unknown_autoclear_bits_go_with_the_first_write_only() {
    if !peers() {
        return;
    }
    let image = Image::make(kind("plain"));
    image.put(88, &[0x80]);
    our_check(&image.path, Repair::All).unwrap();
    assert_eq!(image.bytes(88, 1), [0x80]);
    image.set_refcount(0, 0);
    our_check(&image.path, Repair::All).unwrap();
    assert_eq!(image.bytes(88, 1), [0]);
}

#[test]
fn a_flipped_bit_in_the_header_does_not_cost_the_mapping() {
    if !peers() {
        return;
    }
    for (kind_name, at, bit) in [
        ("cluster-512", 79, 0b100), // a data file
        ("compressed", 79, 0b100),
        ("plain", 79, 0b1_0000),    // extended L2 entries
        ("extended", 79, 0b1_0000), // none
    ] {
        let image = Image::make(kind(kind_name));
        image.put(at, &[image.bytes(at, 1)[0] ^ bit]);
        let before = std::fs::read(&image.path).unwrap();
        let storage = super::support::open(&image.path);
        let (limits, monitor) = (Default::default(), Default::default());
        let result = crate::check::check(&storage, None, Repair::All, &limits, &monitor);
        assert!(result.is_err(), "{kind_name}: {result:#?}");
        if bit == 0b100 {
            let result =
                crate::check::check(&storage, Some(&storage), Repair::All, &limits, &monitor);
            assert!(result.is_err(), "{kind_name}: {result:#?}");
        }
        drop(storage);
        assert!(before == std::fs::read(&image.path).unwrap(), "{kind_name}");
    }
    let image = Image::empty();
    let data = image.path.with_extension("data");
    let options = format!("data_file={}", data.display());
    let file = image.path.to_str().unwrap();
    must("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &options, file, "16M"]);
    must("qemu-io", &["-f", "qcow2", "-c", "write -P 3 0 1M", file]);
    image.put(79, &[0]);
    let before = std::fs::read(&image.path).unwrap();
    assert!(our_check(&image.path, Repair::Nothing).unwrap().corruptions > 0);
    assert!(our_check(&image.path, Repair::All).is_err());
    assert!(before == std::fs::read(&image.path).unwrap());
}
