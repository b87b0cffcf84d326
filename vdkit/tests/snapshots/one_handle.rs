//! Consecutive operations on one open image: each uses the result of earlier ones, not the file's
//! state when it was opened.

use std::sync::Arc;

use vdkit_block::{
    Error, Format, GuestOffset, HostOffset, Limits, Monitor, NewSnapshot, OpenRequest, Overlay,
    Snapshots, Storage,
};
use vdkit_qcow2::Qcow2;
use vdkit_storage::MemoryStorage;
use vdkit_testkit::{assert_sound, create_image};

use super::support::rig;

const GUEST_BYTES: u64 = 2 << 20;
/// The offset in an entry of an L1 or L2 table.
const OFFSET: u64 = (1 << 56) - 512;

fn create(text: &str) -> Arc<dyn Storage> {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    create_image(vdkit::format("qcow2").unwrap(), storage.clone(), GUEST_BYTES, text);
    storage
}

fn open(storage: &Arc<dyn Storage>) -> Arc<Qcow2> {
    let (storage, limits) = (storage.clone(), Limits::default());
    Qcow2::open(OpenRequest { storage, files: Vec::new(), writable: true, limits }).unwrap()
}

fn word(storage: &dyn Storage, at: u64) -> u64 {
    let mut bytes = [0; 8];
    storage.read_at(&mut bytes, HostOffset(at)).unwrap();
    u64::from_be_bytes(bytes)
}

fn assert_clean(storage: &Arc<dyn Storage>) {
    assert_sound(vdkit::format("qcow2").unwrap(), storage, false, "the image");
}

#[test]
fn a_damaged_entry_is_named_where_the_table_is_now() {
    let storage = create("cluster_size=4096");
    let disk = rig::disk(open(&storage), true);
    disk.write_at(&[1; 4096], GuestOffset(0)).unwrap();
    disk.close().unwrap();
    drop(disk);
    // Not at a cluster boundary, and in a cluster of data: that of another table is refused when the
    // image is opened.
    let before = word(&*storage, 40);
    let data = word(&*storage, word(&*storage, before) & OFFSET) & OFFSET;
    storage.write_at(&(data + 0x200).to_be_bytes(), HostOffset(before)).unwrap();
    let image = open(&storage);
    image.resize(4 * GUEST_BYTES).unwrap();
    let now = word(&*storage, 40);
    assert_ne!(now, before, "the table has moved");
    match image.resolve(GuestOffset(0), 4096) {
        Err(Error::Corrupt(fault)) => assert_eq!(fault.offset, now, "{fault:?}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_disk_is_emptied_whose_snapshot_was_made_meanwhile() {
    for options in ["cluster_size=4096", "cluster_size=512,compat=0.10", "cluster_size=65536"] {
        let storage = create(options);
        let image = open(&storage);
        let disk = rig::disk(image.clone(), true);
        let bytes: Vec<u8> = (0..GUEST_BYTES / 4).map(|i| (i / 512 % 251) as u8 + 1).collect();
        disk.write_at(&bytes, GuestOffset(512)).unwrap();
        let name = NewSnapshot { name: "s".into(), ..NewSnapshot::default() };
        Snapshots::create(&*image, &name, &Monitor::default()).unwrap();
        image.empty().unwrap();
        let read = |format: Arc<dyn Format>| {
            let mut buf = vec![0xee; bytes.len()];
            rig::disk(format, false).read_at(&mut buf, GuestOffset(512)).unwrap();
            buf
        };
        assert!(read(image.view("s").unwrap()) == bytes, "{options}: the snapshot");
        assert!(read(image.clone()) == vec![0; bytes.len()], "{options}: the disk");
        Snapshots::apply(&*image, "s", &Monitor::default()).unwrap();
        assert!(read(image.clone()) == bytes, "{options}: the disk again");
        image.empty().unwrap();
        Snapshots::delete(&*image, "s", &Monitor::default()).unwrap();
        image.close().unwrap();
        assert_clean(&storage);
    }
}

#[test]
fn a_view_has_no_snapshots_of_its_own() {
    let storage = create("cluster_size=4096");
    let image = open(&storage);
    for name in ["one", "two"] {
        let new = NewSnapshot { name: name.into(), ..NewSnapshot::default() };
        Snapshots::create(&*image, &new, &Monitor::default()).unwrap();
    }
    let view = image.view("one").unwrap();
    Snapshots::delete(&*image, "two", &Monitor::default()).unwrap();
    // The table that existed when the view was made may be overwritten now.
    assert_eq!(view.snapshots().unwrap().list().unwrap().len(), 0);
}
