//! Entries that name clusters of others: no write destroys what these hold.

mod common;

use std::sync::Arc;

use common::{first_l2, image, open, options, write_cluster};
use vdkit_block::{
    AmendRequest, Amendment, CreateRequest, Creation, Error, FileIndex, Format, FormatDriver,
    GuestOffset, HostOffset, Limits, Monitor, NewSnapshot, OfflineImage, OpenRequest, Place,
    Remedy, Repair, Result, Storage,
};
use vdkit_qcow2::Qcow2Driver;
use vdkit_qcow2::layout::{COPIED, OFFSET_MASK, ZERO};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::create_image;

/// A new image, and its data file.
fn with_data_file(guest_bytes: u64) -> (Arc<dyn Storage>, Arc<MemoryStorage>) {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    let memory = Arc::new(MemoryStorage::new("data"));
    let request = CreateRequest {
        storage: storage.clone(),
        files: vec![memory.clone()],
        guest_bytes,
        options: options("data_file=data"),
        backing: None,
        backing_bytes: None,
    };
    Qcow2Driver.create(&request).unwrap();
    (storage, memory)
}

/// Opens an image with a data file for writing.
fn open_with(storage: &Arc<dyn Storage>, files: &[Arc<dyn Storage>]) -> Arc<dyn Format> {
    let (storage, files, limits) = (storage.clone(), files.to_vec(), Limits::default());
    Qcow2Driver.open(OpenRequest { storage, files, writable: true, limits }).unwrap()
}

/// An entry that names another offset in the data file names the place of other guest bytes: a write
/// of these would change it. A raw data file would show its data elsewhere, and what becomes zero in
/// the data file could destroy it.
#[test]
fn data_at_another_offset_in_the_data_file_is_refused() {
    const CLUSTER: u64 = 64 << 10;
    let (storage, memory) = with_data_file(1 << 20);
    let files: Vec<Arc<dyn Storage>> = vec![memory.clone()];
    let open = || open_with(&storage, &files);
    let image = open();
    (1..3).for_each(|cluster| write_cluster(&*image, cluster * CLUSTER, 7).unwrap());
    image.close().unwrap();
    // The entry of the third cluster names the place of the first one, which the disk does not have.
    let entry = first_l2(&*storage) + 16;
    storage.write_at(&COPIED.to_be_bytes(), HostOffset(entry)).unwrap();
    memory.write_at(&[9; CLUSTER as usize], HostOffset(0)).unwrap();
    let before = memory.to_vec();
    let refused = |result: Result<()>| match result {
        Err(Error::Corrupt(fault)) => assert_eq!(fault.offset, entry, "{fault}"),
        other => panic!("{other:?}"),
    };
    let image = open();
    refused(image.resolve(GuestOffset(2 * CLUSTER), 512).map(drop));
    assert_eq!(image.resolve(GuestOffset(CLUSTER), 2 * CLUSTER).unwrap().len, CLUSTER);
    assert!(image.resolve_cached(GuestOffset(2 * CLUSTER), 512).is_none());
    image.close().unwrap();
    // A cluster that reads as zeroes and keeps its space is written in place.
    storage.write_at(&(COPIED | ZERO).to_be_bytes(), HostOffset(entry)).unwrap();
    let image = open();
    refused(write_cluster(&*image, 2 * CLUSTER, 8));
    image.close().unwrap();
    storage.write_at(&COPIED.to_be_bytes(), HostOffset(entry)).unwrap();
    let request = AmendRequest {
        storage: storage.clone(),
        files: files.clone(),
        backing: None,
        options: options("data_file_raw=on"),
        limits: Limits::default(),
    };
    refused(Qcow2Driver.amend(&request, &Monitor::default()).map(drop));
    assert!(before == memory.to_vec());
}

/// A cluster that names an L2 table as its space could destroy it by a write: also one that reads as
/// zeroes and keeps its space.
#[test]
fn a_write_over_the_images_own_metadata_is_refused() {
    const CLUSTER: u64 = 64 << 10;
    for (flags, options) in [(COPIED, ""), (COPIED | ZERO, ""), (COPIED, "extended_l2=on")] {
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
        create_image(&Qcow2Driver, storage.clone(), 1 << 20, options);
        let open = || {
            let (storage, limits) = (storage.clone(), Limits::default());
            Qcow2Driver.open(OpenRequest { storage, files: Vec::new(), writable: true, limits })
        };
        let image = open().unwrap();
        write_cluster(&*image, 0, 7).unwrap();
        image.close().unwrap();
        // The second entry. In an extended one, no subcluster is allocated: all are holes.
        let table = first_l2(&*storage);
        let entry = table + if options.is_empty() { 8 } else { 16 };
        storage.write_at(&(table | flags).to_be_bytes(), HostOffset(entry)).unwrap();
        let image = open().unwrap();
        let written = image.resolve(GuestOffset(CLUSTER), CLUSTER).and_then(|extent| {
            assert!(!matches!(extent.place, Place::Data { .. }), "{extent:?}");
            write_cluster(&*image, CLUSTER, 8)
        });
        match written {
            Err(Error::Corrupt(fault)) => assert_eq!(fault.offset, table, "{options} {fault}"),
            other => panic!("{options} {other:?}"),
        }
        assert_eq!(open().unwrap().resolve(GuestOffset(0), 512).unwrap().len, 512);
    }
}

/// On a device, clusters without a refcount block count as free. If the end of the refcount table is
/// wiped, new data could go over L2 tables and data there.
#[test]
fn a_device_whose_tables_have_no_refcount_blocks_is_repaired_before_it_is_written() {
    const CLUSTER: u64 = 512;
    const WRITTEN: u64 = 300;
    let memory = MemoryStorage::from_bytes("device", &vec![0; 1 << 20]).fixed_len();
    let storage: Arc<dyn Storage> = Arc::new(memory);
    create_image(&Qcow2Driver, storage.clone(), 1 << 20, "cluster_size=512");
    let open = |writable| {
        let (storage, limits) = (storage.clone(), Limits::default());
        Qcow2Driver.open(OpenRequest { storage, files: Vec::new(), writable, limits })
    };
    let holds = |image: &dyn Format, cluster: u64| {
        let extent = image.resolve(GuestOffset(cluster * CLUSTER), CLUSTER).unwrap();
        let Place::Data { offset, .. } = extent.place else { panic!("{cluster}: {extent:?}") };
        let mut bytes = [0; CLUSTER as usize];
        storage.read_at(&mut bytes, offset).unwrap();
        bytes[0]
    };
    let image = open(true).unwrap();
    (0..WRITTEN).for_each(|cluster| write_cluster(&*image, cluster * CLUSTER, 1).unwrap());
    image.close().unwrap();

    // One block describes 256 clusters. The header's bytes 48 to 55 name the table.
    let mut offset = [0; 8];
    storage.read_at(&mut offset, HostOffset(48)).unwrap();
    storage.write_at(&[0; 504], HostOffset(u64::from_be_bytes(offset) + 8)).unwrap();
    let error = open(true).unwrap_err();
    assert_eq!(error.remedy(), Some(Remedy::REPAIR), "{error}");
    assert!(error.to_string().contains("no refcount block"), "{error}");
    let image = open(false).unwrap();
    assert!((0..WRITTEN).all(|cluster| holds(&*image, cluster) == 1));

    let report = Qcow2Driver.check(&OfflineImage::new(&storage), Repair::All).unwrap();
    assert_eq!((report.corruptions_left(), report.leaks_left()), (0, 0), "{report:?}");
    let image = open(true).unwrap();
    for cluster in WRITTEN + 100..1300 {
        write_cluster(&*image, cluster * CLUSTER, 2).unwrap();
    }
    image.close().unwrap();
    let image = open(false).unwrap();
    assert!((0..WRITTEN).all(|cluster| holds(&*image, cluster) == 1));
}

/// Writing a table would destroy another one in the same cluster.
#[test]
fn an_image_with_two_tables_in_one_cluster_is_repaired_before_it_is_written() {
    let word = |storage: &dyn Storage, at: u64| {
        let mut bytes = [0; 8];
        storage.read_at(&mut bytes, HostOffset(at)).unwrap();
        u64::from_be_bytes(bytes) & OFFSET_MASK
    };
    // The header names the L1 table at byte 40 and the refcount table at byte 48.
    type Damage = (&'static str, fn(u64, u64, u64) -> (u64, u64));
    let damages: [Damage; 4] = [
        ("L2 table in a refcount block", |l1, _, block| (l1, block | COPIED)),
        ("L2 table in the L1 table", |l1, _, _| (l1, l1 | COPIED)),
        ("refcount block in the L1 table", |l1, table, _| (table, l1)),
        ("L1 table in the refcount table", |_, table, _| (40, table)),
    ];
    for (name, damage) in damages {
        let storage: Arc<dyn Storage> =
            Arc::new(MemoryStorage::from_bytes("image", &image(1 << 20, "")));
        let first = open(&storage);
        write_cluster(&*first, 0, 1).unwrap();
        first.close().unwrap();
        let (l1, table) = (word(&*storage, 40), word(&*storage, 48));
        let (at, value) = damage(l1, table, word(&*storage, table));
        storage.write_at(&value.to_be_bytes(), HostOffset(at)).unwrap();
        let open = |writable| {
            let (storage, limits) = (storage.clone(), Limits::default());
            Qcow2Driver.open(OpenRequest { storage, files: Vec::new(), writable, limits })
        };
        let error = open(true).map(drop).expect_err(name);
        assert_eq!(error.remedy(), Some(Remedy::REPAIR), "{name}: {error}");
        open(false).unwrap_or_else(|error| panic!("{name}: {error}"));
        let image = OfflineImage::new(&storage);
        let report = Qcow2Driver.check(&image, Repair::AllForced).unwrap();
        assert_eq!(report.corruptions_left(), 0, "{name}: {report:?}");
        open(true).unwrap_or_else(|error| panic!("{name}: {error}")).close().unwrap();
    }
}

/// A write through one L1 entry would change what the other one shows, or free the table under it.
#[test]
fn an_l2_table_of_two_l1_entries_has_no_owner_and_two_references() {
    const CLUSTER: u64 = 512;
    const REACH: u64 = CLUSTER * CLUSTER / 8;
    for (copied, references, sound) in [(true, 2, false), (false, 1, false), (false, 2, true)] {
        let storage: Arc<dyn Storage> =
            Arc::new(MemoryStorage::from_bytes("image", &image(1 << 20, "cluster_size=512")));
        let first = open(&storage);
        write_cluster(&*first, 0, 1).unwrap();
        first.close().unwrap();
        let word = |at: u64| {
            let mut bytes = [0; 8];
            storage.read_at(&mut bytes, HostOffset(at)).unwrap();
            u64::from_be_bytes(bytes)
        };
        // The header names the L1 table at byte 40 and the refcount table at byte 48.
        let (l1, table, block) = (word(40), first_l2(&*storage), word(word(48)));
        let set = |at: u64, bytes: &[u8]| storage.write_at(bytes, HostOffset(at)).unwrap();
        let entry = (table | if copied { COPIED } else { 0 }).to_be_bytes();
        set(l1, &entry);
        set(l1 + 8, &entry);
        // Data of a shared table is shared too.
        let data = word(table) & OFFSET_MASK;
        set(table, &data.to_be_bytes());
        for cluster in [table, data] {
            set(block + cluster / CLUSTER * 2, &(references as u16).to_be_bytes());
        }
        let (storage, limits) = (storage.clone(), Limits::default());
        let request =
            OpenRequest { storage: storage.clone(), files: Vec::new(), writable: true, limits };
        match Qcow2Driver.open(request) {
            Ok(image) => {
                assert!(sound, "copied {copied}, references {references}");
                write_cluster(&*image, REACH, 2).unwrap();
                let holds = |at: u64| {
                    let extent = image.resolve(GuestOffset(at), CLUSTER).unwrap();
                    let Place::Data { offset, .. } = extent.place else { panic!("{extent:?}") };
                    let mut bytes = [0; CLUSTER as usize];
                    storage.read_at(&mut bytes, offset).unwrap();
                    bytes[0]
                };
                assert_eq!((holds(0), holds(REACH)), (1, 2));
                image.close().unwrap();
                // What is left has one owner now, whose flag is not set.
                let checked = OfflineImage::new(&storage);
                let report = Qcow2Driver.check(&checked, Repair::All).unwrap();
                assert_eq!(report.corruptions_left(), 0, "{report:?}");
            }
            Err(error) => {
                assert!(!sound, "{error}");
                assert_eq!(error.remedy(), Some(Remedy::REPAIR), "{error}");
                assert!(error.to_string().contains("2 L1 entries"), "{error}");
                let damaged = OfflineImage::new(&storage);
                let report = Qcow2Driver.check(&damaged, Repair::AllForced).unwrap();
                assert_eq!(report.corruptions_left(), 0, "{report:?}");
                open(&storage).close().unwrap();
            }
        }
    }
}

/// A reference within a cluster is damage: the cluster that it names is another one's, so to discard
/// it frees nothing.
#[test]
fn a_reference_that_is_not_aligned_frees_nothing() {
    const CLUSTER: u64 = 64 << 10;
    for zero in [false, true] {
        let storage: Arc<dyn Storage> =
            Arc::new(MemoryStorage::from_bytes("image", &image(1 << 20, "")));
        let written = open(&storage);
        (0..3).for_each(|n| write_cluster(&*written, n * CLUSTER, 0x10 + n as u8).unwrap());
        written.close().unwrap();
        let l2 = first_l2(&*storage);
        let mut first = [0; 8];
        storage.read_at(&mut first, HostOffset(l2)).unwrap();
        let first = u64::from_be_bytes(first);
        storage.write_at(&(first + 512).to_be_bytes(), HostOffset(l2 + 16)).unwrap();
        let damaged = open(&storage);
        // The first entry is sound, so that the range can be changed.
        let _ = match zero {
            true => damaged.zero(GuestOffset(CLUSTER), 2 * CLUSTER, true).map(drop),
            false => damaged.discard(GuestOffset(CLUSTER), 2 * CLUSTER),
        };
        damaged.flush().unwrap();
        for n in 3..8 {
            write_cluster(&*damaged, n * CLUSTER, 0x77).unwrap();
        }
        damaged.close().unwrap();
        let mut bytes = vec![0; CLUSTER as usize];
        storage.read_at(&mut bytes, HostOffset(first & OFFSET_MASK)).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 0x10), "another cluster was freed");
    }
}

/// The rest of the last cluster is zeroed in place, which could destroy a table.
#[test]
fn a_resize_over_the_images_own_metadata_is_refused() {
    const CLUSTER: u64 = 64 << 10;
    for (from, to) in [(2 * CLUSTER, CLUSTER + 512), (CLUSTER + 512, 2 * CLUSTER)] {
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
        create_image(&Qcow2Driver, storage.clone(), from, "");
        let image = open(&storage);
        write_cluster(&*image, 0, 7).unwrap();
        image.close().unwrap();
        let table = first_l2(&*storage);
        storage.write_at(&(table | COPIED).to_be_bytes(), HostOffset(table + 8)).unwrap();
        let before = storage_bytes(&*storage);
        let image = open(&storage);
        let overlay = image.overlay().expect("a size that can change");
        match overlay.resize_over(to, 0) {
            Err(Error::Corrupt(fault)) => assert_eq!(fault.offset, table, "{fault}"),
            other => panic!("{from} to {to}: {other:?}"),
        }
        image.close().unwrap();
        assert!(storage_bytes(&*storage) == before, "{from} to {to}");
    }
}

fn storage_bytes(storage: &dyn Storage) -> Vec<u8> {
    let mut bytes = vec![0; storage.len().unwrap() as usize];
    storage.read_at(&mut bytes, HostOffset(0)).unwrap();
    bytes
}

/// Whatever flags its entry has, guest bytes have one place in the data file.
#[test]
fn a_resize_writes_at_its_place_in_the_data_file() {
    const CLUSTER: u64 = 64 << 10;
    for (copied, host, to) in [
        (0, 2 * CLUSTER, 2 * CLUSTER + 512),
        (0, 2 * CLUSTER, 4 * CLUSTER),
        (COPIED, CLUSTER, 2 * CLUSTER + 512),
    ] {
        let (storage, memory) = with_data_file(2 * CLUSTER + 4096);
        let files: Vec<Arc<dyn Storage>> = vec![memory.clone()];
        let open = || open_with(&storage, &files);
        let image = open();
        for cluster in 0..3 {
            let at = cluster * CLUSTER;
            let place = image.reserve(GuestOffset(at), 4096).unwrap().unwrap();
            place.publish().unwrap();
            let len = if cluster < 2 { CLUSTER } else { 4096 };
            memory.write_at(&vec![7 + cluster as u8; len as usize], HostOffset(at)).unwrap();
        }
        image.close().unwrap();
        let entry = first_l2(&*storage) + 16;
        storage.write_at(&(host | copied).to_be_bytes(), HostOffset(entry)).unwrap();
        let before = memory.to_vec();
        let image = open();
        let resized = image.overlay().unwrap().resize_over(to, 0);
        image.close().unwrap();
        let after = memory.to_vec();
        if host == 2 * CLUSTER {
            resized.unwrap();
            let kept = before.len().min(to as usize);
            assert!(after[..kept] == before[..kept]);
            assert!(after[kept..].iter().all(|&byte| byte == 0));
        } else {
            assert!(matches!(resized, Err(Error::Corrupt(_))), "{resized:?}");
            assert!(after == before);
        }
    }
}

/// What a snapshot needs cannot be made again from the active disk.
#[test]
fn a_write_over_the_tables_of_snapshots_is_refused() {
    type Damage = fn(&dyn Storage, Tables);
    #[derive(Clone, Copy)]
    struct Tables {
        l2: u64,
        snapshots: u64,
        snapshot_l1: u64,
        block: u64,
    }
    let entry: Damage = |storage, tables| {
        let word = (tables.snapshot_l1 | COPIED).to_be_bytes();
        storage.write_at(&word, HostOffset(tables.l2 + 8)).unwrap();
    };
    let count: Damage = |storage, tables| {
        let counted = tables.block + tables.snapshot_l1 / 512 * 2;
        storage.write_at(&[0; 2], HostOffset(counted)).unwrap();
    };
    let second: Damage = |storage, tables| {
        let word = ((tables.snapshots + 512) | COPIED).to_be_bytes();
        storage.write_at(&word, HostOffset(tables.l2 + 8)).unwrap();
    };
    for (what, damage) in [("L1 table", entry), ("refcount", count), ("snapshot table", second)] {
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
        create_image(&Qcow2Driver, storage.clone(), 64 << 10, "cluster_size=512");
        let image = open(&storage);
        write_cluster(&*image, 0, 7).unwrap();
        for n in 0..8 {
            let new = NewSnapshot { name: format!("a snapshot {n}"), ..NewSnapshot::default() };
            image.snapshots().unwrap().create(&new, &Monitor::default()).unwrap();
        }
        write_cluster(&*image, 0, 8).unwrap();
        image.close().unwrap();
        let word = |at: u64| {
            let mut bytes = [0; 8];
            storage.read_at(&mut bytes, HostOffset(at)).unwrap();
            u64::from_be_bytes(bytes) & OFFSET_MASK
        };
        // The header's bytes 48 to 55 name the refcount table, 64 to 71 the snapshot table.
        let snapshots = word(64);
        let tables = Tables {
            l2: first_l2(&*storage),
            snapshots,
            snapshot_l1: word(snapshots),
            block: word(word(48)),
        };
        damage(&*storage, tables);
        let image = open(&storage);
        // All free clusters are handed out before the file grows.
        let refused = (1..100).find_map(|cluster| write_cluster_anew(&*image, cluster * 512).err());
        assert!(matches!(refused, Some(Error::Corrupt(_))), "{what}: {refused:?}");
        let _ = image.discard(GuestOffset(512), 512).and_then(|()| image.flush());
        let _ = image.close();
        let request = OpenRequest {
            storage: storage.clone(),
            files: Vec::new(),
            writable: false,
            limits: Limits::default(),
        };
        let image = Qcow2Driver.open(request).unwrap();
        let snapshots = image.snapshots().unwrap();
        assert_eq!(snapshots.list().unwrap().len(), 8, "{what}");
        let view = snapshots.view("1").unwrap();
        let extent = view.resolve(GuestOffset(0), 512).unwrap();
        let Place::Data { offset, .. } = extent.place else { panic!("{what}: {extent:?}") };
        let mut byte = [0];
        storage.read_at(&mut byte, offset).unwrap();
        assert_eq!(byte, [7], "{what}");
    }
}

/// Writes in place if the map says so.
fn write_cluster_anew(image: &dyn Format, at: u64) -> Result<()> {
    match image.resolve(GuestOffset(at), 512)?.place {
        Place::Data { offset, exclusive: true, .. } => {
            image.file(FileIndex(0)).write_at(&[9; 512], offset)
        }
        _ => write_cluster(image, at, 9),
    }
}
