//! Sound images, and leaks.

use std::sync::Arc;

use vdkit_block::{Limits, Monitor, Repair, Storage};
use vdkit_testbase::CountingStorage;

use super::support::{
    Image, KINDS, must, open, our_check, peers, qemu_check, same_guest, verdict_of,
};
use crate::check;

#[test]
fn every_kind_of_image_is_clean_with_the_numbers_of_qemu() {
    if !peers() {
        return;
    }
    for kind in KINDS {
        let image = Image::make(kind);
        let report = our_check(&image.path, Repair::Nothing).unwrap();
        assert_eq!(verdict_of(&report), qemu_check(&image.path), "{}", kind.name);
        assert_eq!(report.findings.len(), 0, "{}: {:?}", kind.name, report.findings);
        // A repair of a sound image writes nothing.
        let before = std::fs::read(&image.path).unwrap();
        for repair in [Repair::Leaks, Repair::All] {
            our_check(&image.path, repair).unwrap();
        }
        assert!(before == std::fs::read(&image.path).unwrap(), "{}", kind.name);
    }
}

#[test]
fn data_files_and_encryption_headers_are_known() {
    if !peers() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    for raw in ["on", "off"] {
        let (file, data) = (path("d.qcow2"), path("data"));
        let options = format!("data_file={data},data_file_raw={raw}");
        must("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &options, &file, "64M"]);
        must("qemu-io", &["-f", "qcow2", "-c", "write 0 1M", "-c", "write 40M 64k", &file]);
        must("qemu-io", &["-f", "qcow2", "-c", "write -z 64k 64k", &file]);
        let report = our_check(file.as_ref(), Repair::Nothing).unwrap();
        assert_eq!(verdict_of(&report), qemu_check(file.as_ref()), "{report:?}");
        assert_eq!(report.corruptions, 0);
    }
    let file = path("luks.qcow2");
    must(
        "qemu-img",
        &[
            "create",
            "-q",
            "-f",
            "qcow2",
            "--object",
            "secret,id=s,data=x",
            "-o",
            "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10",
            &file,
            "64M",
        ],
    );
    let report = our_check(file.as_ref(), Repair::Nothing).unwrap();
    assert_eq!((report.corruptions, report.leaks), (0, 0), "{:?}", report.findings);
}

#[test]
fn leaks_are_found_and_given_back() {
    if !peers() {
        return;
    }
    for kind in KINDS {
        let image = Image::make(kind);
        let sound = image.copy();
        let max = image.header().geometry.refcount_max();
        image.append_cluster(1, 7);
        image.append_cluster(max.min(5), 7);
        let verdict = qemu_check(&image.path);
        assert_eq!(verdict.exit, 3, "{}", kind.name);
        let report = our_check(&image.path, Repair::Nothing).unwrap();
        assert_eq!(verdict_of(&report), verdict, "{}", kind.name);

        let report = our_check(&image.path, Repair::Leaks).unwrap();
        assert_eq!((report.leaks, report.leaks_fixed), (2, 2), "{}", kind.name);
        assert!(report.findings.iter().all(|finding| finding.repaired));
        assert_eq!(qemu_check(&image.path).exit, 0, "{}", kind.name);
        assert!(same_guest(&image.path, &sound.path), "{}", kind.name);
    }
}

#[test]
fn a_refcount_too_high_of_a_cluster_in_use_is_lowered_with_its_copied_flag() {
    if !peers() {
        return;
    }
    let image = Image::make(super::support::kind("plain"));
    let sound = image.copy();
    let host = image.word(image.l2_entry(0)) & crate::layout::OFFSET_MASK;
    for (refcount, copied) in [(2, false), (2, true), (7, true)] {
        image.set_refcount(host, refcount);
        let entry = host | if copied { crate::layout::COPIED } else { 0 };
        image.put_word(image.l2_entry(0), entry);
        let report = our_check(&image.path, Repair::Nothing).unwrap();
        assert_eq!(verdict_of(&report), qemu_check(&image.path));
        let report = our_check(&image.path, Repair::Leaks).unwrap();
        assert_eq!((report.leaks_left(), report.corruptions_left()), (0, 0), "{report:?}");
        assert_eq!(qemu_check(&image.path).exit, 0);
        assert_eq!(image.get_refcount(host), 1);
        assert!(same_guest(&image.path, &sound.path));
    }
}

#[test]
fn metadata_is_read_in_large_pieces_many_at_once() {
    if !peers() {
        return;
    }
    let image = Image::empty();
    let file = image.path.to_str().unwrap();
    let create = ["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata", file, "16G"];
    must("qemu-img", &create);
    let counting = CountingStorage::new(open(&image.path));
    let storage: Arc<dyn Storage> = Arc::clone(&counting) as Arc<dyn Storage>;
    let (limits, monitor) = (Limits::default(), Monitor::default());
    let report = check::check(&storage, None, Repair::Nothing, &limits, &monitor).unwrap();
    assert_eq!((report.corruptions, report.leaks), (0, 0));
    assert_eq!(report.allocated_clusters, 16 << 14);
    let counts = counting.counts();
    // Header, tables, and each of the 32 L2 tables and 9 refcount blocks once, one batch per kind.
    assert!(counts.reads <= 45, "{counts:?}");
    assert!(counts.read_batches <= 2, "{counts:?}");
    assert!(counts.bytes_read / counts.reads >= 60 << 10, "{counts:?}");
}
