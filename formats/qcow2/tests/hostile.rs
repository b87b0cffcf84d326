//! Untrusted headers: whatever they contain, parsing ends quickly and in bounded memory.

mod common;

use std::sync::{Arc, OnceLock};

use common::{image, options};
use proptest::prelude::*;
use vdkit_block::{
    AmendRequest, Amendment, CreateRequest, Creation, Error, ErrorKind, Format, FormatDriver,
    GuestOffset, HostOffset, ImageInfo, KeyedImages, Limits, Monitor, NewSnapshot, OfflineImage,
    OpenRequest, Repair, Result, Secret, Storage,
};
use vdkit_qcow2::Qcow2Driver;
use vdkit_qcow2::header::Header;
use vdkit_qcow2::layout::extension;
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{CountingStorage, qemu, require_peer};

/// An image of 1 GiB in clusters of 4 KiB.
fn valid() -> Vec<u8> {
    image(1 << 30, "cluster_size=4K")
}

/// Describes bytes, and asserts the promised bounds.
fn describe(bytes: &[u8]) -> Result<ImageInfo> {
    let storage = CountingStorage::new(Arc::new(MemoryStorage::from_bytes("image", bytes)));
    let shared: Arc<dyn Storage> = storage.clone();
    let described = Qcow2Driver.describe(&shared, &Limits::default());
    let counts = storage.counts();
    assert!(counts.reads <= 5, "{counts:?}");
    // Memory is proportional to the bytes read, not to the sizes that the header claims.
    assert!(counts.bytes_read <= (64 << 10) * 2 + 3 * bytes.len() as u64, "{counts:?}");
    assert_eq!(counts.writes + counts.syncs + counts.set_lens, 0);
    if let Err(error) = &described {
        let kind = error.kind();
        let fair = matches!(kind, ErrorKind::Corrupt | ErrorKind::Limit | ErrorKind::Unsupported);
        assert!(fair, "{error:?}");
        assert!(!error.to_string().is_empty());
    }
    described
}

/// Opens, reads parts of the map, and checks: all may fail, nothing may panic.
fn use_all(bytes: &[u8]) {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::from_bytes("image", bytes));
    let mut limits = Limits::default();
    limits.check_bytes_max = 16 << 20;
    for writable in [false, true] {
        let request = OpenRequest { storage: storage.clone(), files: Vec::new(), writable, limits };
        let Ok(image) = Qcow2Driver.open(request) else { continue };
        let size = image.guest_bytes();
        for at in [0, 4096, size / 2, size.saturating_sub(1)] {
            if at < size {
                let _ = image.resolve(GuestOffset(at), size - at);
            }
        }
    }
    let image = OfflineImage { limits, ..OfflineImage::new(&storage) };
    let _ = Qcow2Driver.check(&image, Repair::Nothing);
}

fn with(bytes: &[u8], at: usize, value: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at..at + value.len()].copy_from_slice(value);
    bytes
}

/// Fields of the header: offset, bytes, name.
const FIELDS: [(usize, usize, &str); 18] = [
    (0, 4, "magic"),
    (4, 4, "version"),
    (8, 8, "backing_file_offset"),
    (16, 4, "backing_file_size"),
    (20, 4, "cluster_bits"),
    (24, 8, "size"),
    (32, 4, "crypt_method"),
    (36, 4, "l1_size"),
    (40, 8, "l1_table_offset"),
    (48, 8, "refcount_table_offset"),
    (56, 4, "refcount_table_clusters"),
    (60, 4, "nb_snapshots"),
    (64, 8, "snapshots_offset"),
    (72, 8, "incompatible_features"),
    (80, 8, "compatible_features"),
    (88, 8, "autoclear_features"),
    (96, 4, "refcount_order"),
    (100, 4, "header_length"),
];

#[test]
fn each_field_at_each_bad_value_has_an_answer() {
    let image = valid();
    let len = image.len() as u64;
    let bad = [
        0,
        1,
        7,
        8,
        72,
        104,
        511,
        512,
        2048,
        4095,
        4096,
        4097,
        len - 1,
        len,
        len + 4096,
        u64::from(u32::MAX),
        1 << 55,
        1 << 56,
        (1 << 63) - 4096,
        1 << 63,
        u64::MAX - 4095,
        u64::MAX,
    ];
    let mut refused = 0;
    for (at, width, name) in FIELDS {
        for value in bad {
            let value = &value.to_be_bytes()[8 - width..];
            let bytes = with(&image, at, value);
            match describe(&bytes) {
                Ok(_) => {}
                Err(Error::Corrupt(fault)) => {
                    refused += 1;
                    assert!(fault.offset < len, "{name}: {fault}");
                }
                Err(_) => refused += 1,
            }
            use_all(&bytes);
        }
    }
    assert!(refused > 150, "{refused}");
}

#[test]
fn what_must_be_refused_names_its_field() {
    let image = valid();
    let len = image.len() as u64;
    let word = |value: u64| value.to_be_bytes().to_vec();
    let half = |value: u32| value.to_be_bytes().to_vec();
    for (at, value, wanted) in [
        (0, half(0x514649fa), "magic"),
        (4, half(0), "version 0"),
        (4, half(4), "version 4"),
        (8, word(len + 4096), "backing file name"),
        (16, half(1024), "backing file name"),
        (16, half(u32::MAX), "backing file name"),
        (20, half(8), "cluster_bits"),
        (20, half(22), "cluster_bits"),
        (20, half(u32::MAX), "cluster_bits"),
        (24, word(1 << 63), "size"),
        (24, word(u64::MAX), "size"),
        (24, word(2 << 30), "l1_size"),
        (24, word(1 << 60), "L1 table"),
        (32, half(3), "encryption method 3"),
        (36, half(0), "l1_size"),
        (36, half(u32::MAX), "L1 table"),
        (40, word(0), "L1 table"),
        (40, word(100), "L1 table"),
        (40, word(len), "L1 table"),
        (40, word(!4095), "L1 table"),
        (48, word(0), "refcount table"),
        (48, word(4095), "refcount table"),
        (48, word(len), "refcount table"),
        (56, half(0), "refcount_table_clusters"),
        (56, half(u32::MAX), "refcount table"),
        (60, half(1), "snapshot table"),
        (60, half(65537), "snapshots"),
        (60, half(u32::MAX), "snapshots"),
        (72, word(1 << 5), "incompatible"),
        (72, word(1 << 63), "bit 63"),
        (72, word(1 << 4), "cluster_bits"), // subclusters in clusters of 4 KiB
        (72, word(1 << 3), "compression_type"),
        (96, half(7), "refcount_order"),
        (96, half(u32::MAX), "refcount_order"),
        (100, half(0), "header_length"),
        (100, half(103), "header_length"),
        (100, half(105), "header_length"),
        (100, half(4097), "header_length"),
        (100, half(u32::MAX), "header_length"),
    ] {
        let error = describe(&with(&image, at, &value)).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(wanted), "{at} {value:02x?}: {error}");
    }
}

#[test]
fn short_files_are_refused() {
    let image = valid();
    for len in [0, 1, 3, 4, 8, 71, 72, 103, 104, 105, 112, 511, 512, 1024, 4096, image.len() - 1] {
        describe(&image[..len]).unwrap_err();
        use_all(&image[..len]);
    }
}

#[test]
fn a_kilobyte_that_claims_an_exabyte_is_refused_at_once() {
    for text in ["", "cluster_size=2M", "cluster_size=512", "extended_l2=on"] {
        let mut bytes = image(1 << 30, text);
        bytes.truncate(1024);
        bytes = with(&bytes, 24, &(1u64 << 60).to_be_bytes());
        let error = describe(&bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        // With an L1 table that is large enough.
        let bytes = with(&bytes, 36, &(1u32 << 22).to_be_bytes());
        assert_eq!(describe(&bytes).unwrap_err().kind(), ErrorKind::Corrupt);
        use_all(&bytes);
    }
}

#[test]
fn huge_tables_in_a_huge_sparse_file_stay_within_the_limits() {
    let storage = CountingStorage::new(Arc::new(MemoryStorage::with_len("image", 1 << 61)));
    let shared: Arc<dyn Storage> = storage.clone();
    let header = image(1 << 30, "cluster_size=2M");
    shared.write_at(&header[..4096], HostOffset(0)).unwrap();
    // 65536 empty snapshots.
    shared.write_at(&65536u32.to_be_bytes(), HostOffset(60)).unwrap();
    shared.write_at(&(1u64 << 40).to_be_bytes(), HostOffset(64)).unwrap();
    let info = Qcow2Driver.describe(&shared, &Limits::default()).unwrap();
    assert_eq!(info.snapshots.len(), 65536);
    assert!(storage.counts().bytes_read <= 17 << 20);
    // One snapshot more.
    shared.write_at(&65537u32.to_be_bytes(), HostOffset(60)).unwrap();
    Qcow2Driver.describe(&shared, &Limits::default()).unwrap_err();
    // Entries that claim large sizes: extra data, then names.
    shared.write_at(&65536u32.to_be_bytes(), HostOffset(60)).unwrap();
    shared.write_at(&u32::MAX.to_be_bytes(), HostOffset((1 << 40) + 36)).unwrap();
    let error = Qcow2Driver.describe(&shared, &Limits::default()).unwrap_err().to_string();
    assert!(error.contains("extra data"), "{error}");
    let mut entry = [0; 40];
    entry[12..16].copy_from_slice(&[0xff; 4]);
    let entry_bytes = (40u64 + 2 * 65535).next_multiple_of(8);
    for index in 0..600 {
        shared.write_at(&entry, HostOffset((1 << 40) + index * entry_bytes)).unwrap();
    }
    storage.reset();
    let described = Qcow2Driver.describe(&shared, &Limits::default());
    let error = described.map(drop).unwrap_err().to_string();
    assert!(error.contains("within the file and the limits"), "{error}");
    assert!(storage.counts().bytes_read <= 65 << 20);
}

#[test]
fn extension_lists_end() {
    let image = valid();
    let list = 112; // where the extensions begin
    let name_at = u64::from_be_bytes(image[8..16].try_into().unwrap());
    let extension = |kind: u32, len: u32| {
        let mut bytes = kind.to_be_bytes().to_vec();
        bytes.extend_from_slice(&len.to_be_bytes());
        bytes
    };
    // Longer than the cluster, the file or the address space.
    for len in [4096, 65536, u32::MAX - 7, u32::MAX] {
        let error = describe(&with(&image, list, &extension(0x1234, len))).unwrap_err();
        assert!(error.to_string().contains("header extension"), "{error}");
    }
    // Into the backing name.
    let reach = name_at as u32 - list as u32 - 8;
    describe(&with(&image, list, &extension(0x1234, reach))).unwrap();
    describe(&with(&image, list, &extension(0x1234, reach + 1))).unwrap_err();
    // No end mark: empty extensions up to the name, or without a name up to the end of the cluster.
    let mut endless = image.clone();
    for at in (list..4096).step_by(8) {
        endless[at..at + 8].copy_from_slice(&extension(0x1234, 0));
    }
    endless[8..20].fill(0);
    let info = describe(&endless).unwrap();
    let unknown = common::property(&info, "unknown-extensions").unwrap();
    assert!(unknown.contains("and 482 more") && unknown.len() < 1000, "{unknown}");
    use_all(&endless);
    // The file ends within the list.
    describe(&endless[..2048]).unwrap_err();
    // A list of more than 64 KiB is read completely; a list that the end of the file cuts off is
    // rejected.
    let mut long = super_long(0x1234);
    describe(&long).unwrap();
    long.truncate(70000);
    describe(&long).unwrap_err();
    // Known extensions that are too short.
    for kind in [0x2385_2875u32, 0x0537_be77, 0xe279_2aca, 0x4441_5441, 0x6803_f857] {
        for len in [0, 1, 8, 15, 23] {
            let mut bytes = with(&image, list, &extension(kind, len));
            bytes[95] = 1; // bitmaps are valid
            let _ = describe(&bytes);
            use_all(&bytes);
        }
    }
}

/// 100 KiB of extensions in a cluster of 2 MiB.
fn super_long(kind: u32) -> Vec<u8> {
    let mut bytes = image(1 << 30, "cluster_size=2M");
    bytes[8..20].fill(0);
    bytes[112..100 << 10].fill(0);
    for at in (112..100 << 10).step_by(1024) {
        bytes[at..at + 4].copy_from_slice(&kind.to_be_bytes());
        bytes[at + 4..at + 8].copy_from_slice(&(1024u32 - 8).to_be_bytes());
    }
    bytes
}

/// A file of exactly 4 KiB, the size of the first read, has no more bytes, whatever its cluster
/// size.
#[test]
fn a_file_that_ends_with_the_first_read_is_said_to_end_there() {
    let mut bytes = image(1 << 20, "cluster_size=64K");
    bytes.truncate(4096);
    bytes[8..20].fill(0);
    // Nothing beyond the header: no L1 table, no refcount table.
    bytes[24..32].fill(0);
    bytes[36..60].fill(0);
    let check = |bytes: &[u8]| {
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::from_bytes("image", bytes));
        Qcow2Driver.check(&OfflineImage::new(&storage), Repair::Nothing)
    };
    let extension = |len: u32| [0x1234_u32.to_be_bytes(), len.to_be_bytes()].concat();
    let error = check(&with(&bytes, 112, &extension(8000))).unwrap_err().to_string();
    assert!(error.contains("an end before that of the file, which has 0x1000 bytes"), "{error}");
    // A list without an end mark ends with the file.
    let list = with(&bytes, 112, &extension(4096 - 120));
    assert!(check(&list).unwrap().corruptions > 0);
    let named = [&4090_u64.to_be_bytes()[..], &10_u32.to_be_bytes()].concat();
    let error = check(&with(&bytes, 8, &named)).unwrap_err().to_string();
    assert!(error.contains("before that of the file, which has 0x1000 bytes"), "{error}");
    for len in [4095, 4096, 4097] {
        let mut list = list.clone();
        list.resize(len, 0);
        let _ = describe(&list);
        use_all(&list);
    }
}

#[test]
fn a_long_header_with_long_snapshots_and_bitmaps_costs_five_reads() {
    let mut bytes = super_long(0x1234);
    let end = bytes.len();
    let cluster = 2 << 20;
    assert_eq!(end % cluster, 0);
    bytes.resize(end + 2 * cluster, 0);
    // Two snapshots with names of 60000 bytes.
    for index in 0..2 {
        let at = end + index * 60040;
        bytes[at + 14..at + 16].copy_from_slice(&60000u16.to_be_bytes());
    }
    bytes[60..64].copy_from_slice(&2u32.to_be_bytes());
    bytes[64..72].copy_from_slice(&(end as u64).to_be_bytes());
    // One bitmap, in the last extension.
    let at = 112 + 99 * 1024;
    bytes[at..at + 8].copy_from_slice(&[0x23, 0x85, 0x28, 0x75, 0, 0, 0, 24]);
    bytes[at + 8..at + 12].copy_from_slice(&1u32.to_be_bytes());
    bytes[at + 16..at + 24].copy_from_slice(&32u64.to_be_bytes());
    bytes[at + 24..at + 32].copy_from_slice(&((end + cluster) as u64).to_be_bytes());
    bytes[95] = 1;
    let entry = end + cluster;
    bytes[entry + 16..entry + 20].copy_from_slice(&[1, 16, 0, 1]);
    bytes[entry + 24] = b'b';
    let info = describe(&bytes).unwrap();
    assert_eq!((info.snapshots.len(), info.bitmaps.len()), (2, 1));
}

/// Images of QEMU with everything that `describe` reads.
fn seeds() -> &'static [Vec<u8>] {
    static SEEDS: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    SEEDS.get_or_init(|| {
        let mut seeds = vec![valid(), image(1 << 20, "compat=0.10"), super_long(0x77)];
        if !require_peer("qemu-img") {
            return seeds;
        }
        let dir = tempfile::tempdir().unwrap();
        for (i, options) in
            ["cluster_size=4K", "cluster_size=16K,extended_l2=on"].iter().enumerate()
        {
            let path = dir.path().join(i.to_string());
            let file = path.to_str().unwrap();
            qemu::create(&path, "qcow2", 1 << 20, &[options], None);
            qemu::io(&path, "qcow2", &["write 0 64k", "write -c 128k 16k"]);
            qemu::img(["snapshot", "-c", "one", file]).ok();
            qemu::img(["snapshot", "-c", "two", file]).ok();
            qemu::img(["bitmap", "--add", file, "b0"]).ok();
            qemu::img(["bitmap", "--add", file, "b1"]).ok();
            seeds.push(std::fs::read(&path).unwrap());
        }
        seeds
    })
}

/// Places to mutate: the header, the snapshot table, the bitmap directory.
fn places(bytes: &[u8]) -> [usize; 3] {
    let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let directory = bytes[..4096]
        .windows(8)
        .position(|w| w == [0x23, 0x85, 0x28, 0x75, 0, 0, 0, 24])
        .map_or(0, |at| word(at + 24));
    [0, word(64), directory].map(|at| if at < bytes.len() { at } else { 0 })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn mutated_images_never_panic(
        seed in any::<prop::sample::Index>(),
        changes in proptest::collection::vec(
            (0usize..3, 0usize..160, prop_oneof![
                Just(0u8), Just(0xffu8), Just(1u8), Just(0x80u8), any::<u8>(),
            ]),
            1..6,
        ),
        cut in prop_oneof![4 => Just(None), 1 => any::<prop::sample::Index>().prop_map(Some)],
    ) {
        let seeds = seeds();
        let mut bytes = seed.get(seeds).clone();
        let places = places(&bytes);
        for (place, offset, value) in changes {
            let at = places[place] + offset;
            if at < bytes.len() {
                bytes[at] = value;
            }
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let _ = describe(&bytes);
        use_all(&bytes);
    }
}

/// An encrypted image of 1 MiB with a snapshot, its key, and the offset of its snapshot table.
fn encrypted_with_snapshot(more: &str) -> (Arc<dyn Storage>, Secret, u64) {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    let key = Secret::new(b"s".to_vec());
    let mut options = options(&format!("encrypt.format=luks,encrypt.iter-time=0{more}"));
    options.set_key(Some(key.clone()));
    let request = CreateRequest {
        storage: storage.clone(),
        files: Vec::new(),
        guest_bytes: 1 << 20,
        options,
        backing: None,
        backing_bytes: None,
    };
    Qcow2Driver.create(&request).unwrap();
    let image = open_encrypted(&storage, &key);
    let new = NewSnapshot { name: "small".to_owned(), ..NewSnapshot::default() };
    image.snapshots().unwrap().create(&new, &Monitor::default()).unwrap();
    image.close().unwrap();
    // The header's bytes 64 to 71 name the table.
    let mut table = [0; 8];
    storage.read_at(&mut table, HostOffset(64)).unwrap();
    (storage, key, u64::from_be_bytes(table))
}

fn open_encrypted(storage: &Arc<dyn Storage>, key: &Secret) -> Arc<dyn Format> {
    let (storage, limits) = (storage.clone(), Limits::default());
    let request = OpenRequest { storage, files: Vec::new(), writable: true, limits };
    Qcow2Driver.open_with_keys(request, std::slice::from_ref(key)).unwrap()
}

/// The size that a snapshot records becomes that of the disk, so the same is asked of it.
#[test]
fn an_encrypted_disk_gets_no_size_that_ends_within_a_sector() {
    let (storage, key, table) = encrypted_with_snapshot("");
    // The second word of the extra data.
    storage.write_at(&((1u64 << 20) - 1).to_be_bytes(), HostOffset(table + 48)).unwrap();
    let image = open_encrypted(&storage, &key);
    let snapshots = image.snapshots().unwrap();
    let applied = snapshots.apply("small", &Monitor::default()).map(drop);
    for error in [applied.unwrap_err(), snapshots.view("small").map(drop).unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    }
    assert_eq!(image.guest_bytes(), 1 << 20);
}

/// Metadata is changed without a key, so nothing is unlocked. All the clusters that the encryption
/// header says it has are held in memory nevertheless.
#[test]
fn an_encryption_header_of_any_length_is_refused_without_a_key_too() {
    let (storage, _, table) = encrypted_with_snapshot(",compat=0.10");
    // Without extra data, which version 3 needs: the amendment opens the image and adds it.
    storage.write_at(&[0; 4], HostOffset(table + 36)).unwrap();
    let header = Header::read(&*storage, &Limits::default()).unwrap();
    let place = header.extension(extension::ENCRYPTION).unwrap().offset;
    storage.write_at(&(1u64 << 62).to_be_bytes(), HostOffset(place + 8)).unwrap();
    let request = AmendRequest {
        storage,
        files: Vec::new(),
        backing: None,
        options: options("compat=1.1"),
        limits: Limits::default(),
    };
    match Qcow2Driver.amend(&request, &Monitor::default()) {
        Err(Error::Corrupt(fault)) => assert_eq!(fault.offset, place, "{fault}"),
        other => panic!("{other:?}"),
    }
}

/// Counting references takes memory by the clusters that entries name, and a file may be sparse.
#[test]
fn a_snapshot_of_entries_all_over_the_file_ends_at_the_limit() {
    const CLUSTER: u64 = 65536;
    let bytes = image(1 << 29, "cluster_size=64K");
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::from_bytes("image", &bytes));
    // The header's bytes 40 to 47 name the L1 table.
    let mut l1 = [0; 8];
    storage.read_at(&mut l1, HostOffset(40)).unwrap();
    let table = storage.len().unwrap().next_multiple_of(CLUSTER);
    let copied = |offset: u64| (offset | 1 << 63).to_be_bytes();
    storage.write_at(&copied(table), HostOffset(u64::from_be_bytes(l1))).unwrap();
    let entries: Vec<u8> = (1..=8192).flat_map(|i: u64| copied(table + (i << 24))).collect();
    storage.write_at(&entries, HostOffset(table)).unwrap();
    storage.set_len(1 << 40).unwrap();
    let mut limits = Limits::default();
    limits.check_bytes_max = 1 << 20;
    let request = OpenRequest { storage, files: Vec::new(), writable: true, limits };
    let image = Qcow2Driver.open(request).unwrap();
    let new = NewSnapshot { name: "far".to_owned(), ..NewSnapshot::default() };
    let error = image.snapshots().unwrap().create(&new, &Monitor::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Limit, "{error}");
}
