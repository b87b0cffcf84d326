//! Lost references to L2 tables: a repair does not free the tables without force.

use vdkit_block::{CheckReport, Error, Repair, Result};

use super::support::{Image, kind, must, our_check, peers, qemu_check, same_guest};
use crate::layout::COPIED;

fn refused(result: Result<CheckReport>, what: &str) -> String {
    match result {
        Err(Error::Corrupt(fault)) => format!("{fault}; {}", fault.remedy.as_ref().unwrap()),
        Err(other) => panic!("{what}: {other}"),
        Ok(_) => panic!("{what}: not refused"),
    }
}

#[test]
fn a_table_that_nothing_leads_to_is_not_given_free_unasked() {
    if !peers() {
        return;
    }
    for name in ["plain", "v2", "cluster-512", "extended", "compressed", "refcounts-1", "lazy"] {
        for damage in [1 << 46, 0x200 << 8, COPIED] {
            let image = Image::make(kind(name));
            let sound = image.copy();
            let (at, word, table) = (image.l1(), image.word(image.l1()), image.l2(0));
            // The entry points beyond the end of the file, to another cluster or to none.
            image.put_word(at, if damage == COPIED { COPIED } else { word ^ damage });
            let before = std::fs::read(&image.path).unwrap();
            let what = format!("{name}, {damage:#x}");
            let told = refused(our_check(&image.path, Repair::All), &what);
            assert!(told.contains(&format!("{table:#x}")), "{what}: {told}");
            assert!(told.contains("repair the image by force"), "{what}: {told}");
            assert!(before == std::fs::read(&image.path).unwrap(), "{what}: changed");
            // Restored by hand.
            let repaired = image.copy();
            repaired.put_word(at, word);
            assert_eq!(qemu_check(&repaired.path).exit, 0, "{what}");
            assert!(same_guest(&sound.path, &repaired.path), "{what}");
            // Forced repair, without that data.
            let report = our_check(&image.path, Repair::AllForced).unwrap();
            assert_eq!((report.corruptions_left(), report.leaks_left()), (0, 0), "{what}");
            assert_eq!(qemu_check(&image.path).exit, 0, "{what}");
            assert!(!same_guest(&sound.path, &image.path), "{what}");
        }
    }
}

#[test]
fn an_entry_that_led_nowhere_is_mended_without_a_question() {
    if !peers() {
        return;
    }
    let image = Image::empty();
    let file = image.path.to_str().unwrap();
    must("qemu-img", &["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", file, "16M"]);
    must("qemu-io", &["-f", "qcow2", "-c", "write -P 1 0 1M", file]);
    let sound = image.copy();
    // The second L2 table never existed, and the leak is not a table.
    image.put_word(image.l1() + 8, COPIED | 1 << 46);
    image.append_cluster(1, 7);
    let report = our_check(&image.path, Repair::All).unwrap();
    assert_eq!((report.corruptions_left(), report.leaks_left()), (0, 0), "{report:?}");
    assert!(same_guest(&sound.path, &image.path));
}

#[test]
fn a_lost_snapshot_is_not_given_free_unasked() {
    if !peers() {
        return;
    }
    let image = Image::make(kind("snapshots"));
    let list = image.header().snapshots_offset.0;
    let l1 = image.word(list);
    image.put_word(list, l1 + 8);
    let told = refused(our_check(&image.path, Repair::All), "a snapshot");
    assert!(told.contains("repair the image by force"), "{told}");
    let by_hand = image.copy();
    by_hand.put_word(list, l1);
    assert_eq!(qemu_check(&by_hand.path).exit, 0);
    let report = our_check(&image.path, Repair::AllForced).unwrap();
    assert_eq!((report.corruptions_left(), report.leaks_left()), (0, 0), "{report:?}");
    assert_eq!(image.header().snapshot_count, 1);
    assert_eq!(qemu_check(&image.path).exit, 0);
}
