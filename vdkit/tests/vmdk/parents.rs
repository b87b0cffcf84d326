//! Disks with parents: content ids, names, and permitted changes.

use std::path::Path;

use vdkit::jobs::{CreateOptions, NewBacking, create};
use vdkit::{Disk, Error, GuestOffset, Monitor, OpenOptions, Options, RefPolicy, describe_chain};
use vdkit_testkit::{qemu, require_peer};

use super::oracle::{make, open};

fn overlay(path: &Path, base: &str, options: &str) -> vdkit::Result<()> {
    let driver = vdkit::format("vmdk").unwrap();
    let options = CreateOptions::new(path, driver)
        .options(Options::parse("vmdk", driver.options(), [options]).unwrap())
        .backing(NewBacking::new(base, None));
    create(&vdkit::registry(), &options, &Monitor::default()).map(|_| ())
}

fn cid(path: &Path) -> String {
    let chain = describe_chain(&vdkit::registry(), path, &OpenOptions::read_only()).unwrap();
    chain.links[0].info.identity.clone().unwrap()
}

fn write(path: &Path, at: u64, byte: u8) {
    let disk = open(path, true);
    disk.write_at(&[byte; 3000], GuestOffset(at)).unwrap();
    disk.close().unwrap();
}

#[test]
fn an_overlay_stands_on_the_content_that_it_was_put_on() {
    let folder = tempfile::tempdir().unwrap();
    let (base, top) = (folder.path().join("base.vmdk"), folder.path().join("top.vmdk"));
    make(&base, 5 << 20, "");
    let new = cid(&base);
    write(&base, 100_000, 1);
    let written = cid(&base);
    assert_ne!(new, written);
    overlay(&top, "base.vmdk", "").unwrap();
    write(&top, 101_000, 2);
    assert_eq!(cid(&base), written, "reading changes nothing");
    let mut bytes = [0; 4000];
    open(&top, false).read_at(&mut bytes, GuestOffset(100_000)).unwrap();
    assert!(bytes[..1000] == [1; 1000] && bytes[1000..] == [2; 3000]);
    if require_peer("qemu-img") {
        let flat = folder.path().join("flat.raw");
        qemu::convert((&top, "vmdk"), (&flat, "raw"), &[]);
        let all = std::fs::read(&flat).unwrap();
        assert!(all[100_000..104_000] == bytes, "QEMU reads the chain");
    }
    // The base changed without the overlay: its content would be inconsistent.
    write(&base, 0, 9);
    let error = Disk::open(&vdkit::registry(), &top, &OpenOptions::read_only()).unwrap_err();
    assert!(matches!(error, Error::Parent { .. }), "{error}");
    if require_peer("qemu-img") {
        let read = qemu::try_io(&top, "vmdk", &["read 0 512"]);
        assert!(read.code != 0 || read.stdout.contains("failed"), "QEMU refuses it too: {read:?}");
    }
}

/// Each kind of change updates the content id, once per open, durably before the data.
#[test]
fn each_kind_of_change_is_another_content() {
    for options in [
        "",
        "zeroed_grain=on",
        "subformat=monolithicFlat",
        "subformat=twoGbMaxExtentSparse",
        "subformat=twoGbMaxExtentFlat",
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.vmdk");
        make(&path, 5 << 20, options);
        write(&path, 0, 1);
        let changes: [fn(&Disk); 4] = [
            |disk| disk.write_at(&[2; 512], GuestOffset(0)).unwrap(),
            |disk| disk.write_at(&[2; 512], GuestOffset(3 << 20)).unwrap(),
            |disk| disk.write_zeroes(GuestOffset(0), 65536, true).unwrap(),
            |disk| disk.discard(GuestOffset(3 << 20), 65536).unwrap(),
        ];
        for (number, change) in changes.iter().enumerate() {
            let before = cid(&path);
            let disk = open(&path, true);
            assert_eq!(cid_while_open(&path), before);
            change(&disk);
            disk.flush().unwrap();
            let during = cid_while_open(&path);
            assert_ne!(before, during, "{options}: change {number}");
            change(&disk);
            disk.close().unwrap();
            drop(disk);
            assert_eq!(cid(&path), during, "{options}: once an opening");
        }
        let before = cid(&path);
        open(&path, true).close().unwrap();
        assert_eq!(cid(&path), before, "{options}: opening changes nothing");
    }
}

fn cid_while_open(path: &Path) -> String {
    let options = OpenOptions::read_only().lock(false);
    let chain = describe_chain(&vdkit::registry(), path, &options).unwrap();
    chain.links[0].info.identity.clone().unwrap()
}

#[test]
fn only_sparse_disks_stand_on_vmdks_alone() {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().join("base.vmdk");
    make(&base, 5 << 20, "");
    let qcow2 = folder.path().join("base.qcow2");
    let driver = vdkit::format("qcow2").unwrap();
    let options = CreateOptions::new(&qcow2, driver).guest_bytes(5 << 20);
    create(&vdkit::registry(), &options, &Monitor::default()).unwrap();
    let top = folder.path().join("top.vmdk");
    for (name, options) in [
        ("base.vmdk", "subformat=monolithicFlat"),
        ("base.vmdk", "subformat=twoGbMaxExtentFlat"),
        ("base.vmdk", "subformat=streamOptimized"),
        ("base.qcow2", ""),
    ] {
        let error = overlay(&top, name, options).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{name} {options}: {error}");
        assert!(!top.exists(), "nothing half-made");
    }
    overlay(&top, "base.vmdk", "subformat=twoGbMaxExtentSparse,zeroed_grain=on").unwrap();
}

/// Extents elsewhere are opened only within the policy.
#[test]
fn extents_lead_nowhere_else() {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("inner");
    std::fs::create_dir(&inner).unwrap();
    let path = inner.join("disk.vmdk");
    make(&path, 1 << 20, "subformat=monolithicFlat");
    std::fs::rename(inner.join("disk-flat.vmdk"), folder.path().join("elsewhere")).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    for name in ["../elsewhere", &folder.path().join("elsewhere").display().to_string()] {
        std::fs::write(&path, text.replace("disk-flat.vmdk", name)).unwrap();
        let registry = vdkit::registry();
        let error = Disk::open(&registry, &path, &OpenOptions::read_only()).unwrap_err();
        assert!(matches!(error, Error::Refused(_)), "{error}");
        let refs = RefPolicy::Folders(vec![folder.path().to_owned()]);
        let allowed = OpenOptions::read_only().refs(refs);
        Disk::open(&registry, &path, &allowed).unwrap();
        let never = OpenOptions::read_only().refs(RefPolicy::Nothing);
        assert!(Disk::open(&registry, &path, &never).is_err());
    }
}

#[test]
fn fields_of_the_descriptor_change_in_place() {
    for options in ["", "subformat=monolithicFlat", "subformat=twoGbMaxExtentSparse"] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.vmdk");
        make(&path, 5 << 20, options);
        write(&path, 0, 7);
        let registry = vdkit::registry();
        let driver = vdkit::format("vmdk").unwrap();
        let amend = |text: &str| {
            let found =
                vdkit_chain::open_image(&registry, &path, &OpenOptions::read_write()).unwrap();
            driver.amend(
                &vdkit::AmendRequest {
                    storage: found.storage,
                    files: found.files,
                    backing: None,
                    options: Options::parse("vmdk", driver.options(), [text]).unwrap(),
                    limits: vdkit::Limits::default(),
                },
                &Monitor::default(),
            )
        };
        let changed = amend("adapter_type=lsilogic,hwversion=14").unwrap();
        assert_eq!(changed, ["adapter_type", "hwversion"]);
        assert!(amend("adapter_type=lsilogic").unwrap().is_empty());
        assert!(matches!(amend("zeroed_grain=on"), Err(Error::Unsupported { .. })));
        let chain = describe_chain(&registry, &path, &OpenOptions::read_only()).unwrap();
        let property = |key: &str| {
            let found = chain.links[0].info.properties.iter().find(|(k, _)| k == key);
            found.map(|(_, value)| value.clone()).unwrap_or_default()
        };
        assert_eq!(
            (property("adapter-type"), property("hwversion")),
            ("lsilogic".into(), "14".into())
        );
        let mut bytes = [0; 3000];
        open(&path, false).read_at(&mut bytes, GuestOffset(0)).unwrap();
        assert_eq!(bytes, [7; 3000]);
        if require_peer("qemu-img") {
            assert!(qemu::check(&path, "vmdk", None).clean());
        }
    }
}
