//! Untrusted headers and descriptors: whatever they contain, the result comes at once.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use vdkit_block::{
    Error, ErrorKind, FormatDriver, GuestOffset, HostOffset, Limits, OfflineImage, OpenRequest,
    Repair, Storage, StorageExt,
};
use vdkit_chain::Disk;
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{CountingStorage, processor_time};
use vdkit_vmdk::VmdkDriver;

use super::{SHAPES, Shape};

/// Describes, opens, maps, reads and checks: all may fail, none may panic or take long.
fn use_all(bytes: &[u8], files: &[Arc<dyn Storage>]) -> Option<Error> {
    let started = processor_time();
    let driver = VmdkDriver;
    let mut limits = Limits::default();
    limits.check_bytes_max = 16 << 20;
    let counting = CountingStorage::new(Arc::new(MemoryStorage::from_bytes("image", bytes)));
    let storage: Arc<dyn Storage> = counting.clone();
    let described = driver.describe(&storage, &limits);
    let counts = counting.counts();
    assert!(counts.reads <= 4 && counts.bytes_read <= 3 << 20, "{counts:?}");
    assert_eq!(counts.writes + counts.syncs + counts.set_lens, 0);
    let error = described.err();
    if let Some(error) = &error {
        let kind = error.kind();
        let fair = matches!(kind, ErrorKind::Corrupt | ErrorKind::Limit | ErrorKind::Unsupported);
        assert!(fair, "{error:?}");
    }
    for writable in [false, true] {
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::from_bytes("image", bytes));
        let request =
            OpenRequest { storage: storage.clone(), files: files.to_vec(), writable, limits };
        let Ok(format) = driver.open(request) else { continue };
        let size = format.guest_bytes();
        for at in [0, 4096, size / 2, size.saturating_sub(1)] {
            if at < size {
                let _ = format.resolve(GuestOffset(at), (size - at).min(1 << 40));
                let _ = format.resolve_cached(GuestOffset(at), 1);
            }
        }
        if writable && size > 0 {
            if let Ok(Some(space)) = format.reserve(GuestOffset(0), size.min(4096)) {
                let _ = space.publish();
            }
            let _ = format.close();
        }
    }
    for repair in [Repair::Nothing, Repair::All] {
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::from_bytes("image", bytes));
        let image = OfflineImage { files, limits, ..OfflineImage::new(&storage) };
        let _ = driver.check(&image, repair);
    }
    let took = processor_time() - started;
    assert!(took < Duration::from_secs(5), "{took:?}");
    error
}

fn with(bytes: &[u8], at: usize, value: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at..at + value.len()].copy_from_slice(value);
    bytes
}

/// Fields of the header: offset and bytes.
const FIELDS: [(usize, usize); 13] = [
    (0, 4),
    (4, 4),
    (8, 4),
    (12, 8),
    (20, 8),
    (28, 8),
    (36, 8),
    (44, 4),
    (48, 8),
    (56, 8),
    (64, 8),
    (72, 1),
    (77, 2),
];

const BAD: [u64; 18] = [
    0,
    1,
    2,
    3,
    5,
    7,
    8,
    20,
    127,
    511,
    512,
    513,
    1 << 20,
    u32::MAX as u64,
    1 << 44,
    1 << 54,
    1 << 63,
    u64::MAX,
];

#[test]
fn each_field_at_each_bad_value_has_an_answer() {
    let mut refused = 0;
    for shape in [&SHAPES[0], &SHAPES[3]] {
        let image = shape.image().to_vec();
        assert!(use_all(&image, &[]).is_none());
        for (at, width) in FIELDS {
            for value in BAD {
                let bytes = with(&image, at, &value.to_le_bytes()[..width]);
                refused += u32::from(use_all(&bytes, &[]).is_some());
            }
        }
    }
    assert!(refused > 60, "{refused}");
}

#[test]
fn each_short_file_has_an_answer() {
    let image = SHAPES[0].image().to_vec();
    for len in (0..image.len()).step_by(97).take(60) {
        use_all(&image[..len], &[]);
    }
}

const HEAD: &str =
    "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType=\"x\"\n";

/// Extents may together have more sectors than any number holds.
#[test]
fn extents_whose_sum_overflows_have_an_answer() {
    let line = format!("RW {} FLAT \"a\" 0\n", i64::MAX as u64 / 512);
    let file: Arc<dyn Storage> = Arc::new(MemoryStorage::new("a"));
    assert!(use_all(format!("{HEAD}{}", line.repeat(1100)).as_bytes(), &[file]).is_some());
}

/// Each further line of a sparse extent would repeat the check of all its tables.
#[test]
fn a_sparse_extent_in_many_lines_has_an_answer() {
    let sectors = 1_u64 << 32;
    let extent = with(&SHAPES[0].image().to_vec(), 12, &sectors.to_le_bytes());
    let file: Arc<dyn Storage> = Arc::new(MemoryStorage::from_bytes("a", &extent));
    let line = format!("RW {sectors} SPARSE \"a\"\n");
    use_all(format!("{HEAD}{}", line.repeat(4000)).as_bytes(), &[file]);
}

/// Directories and tables that refer to each other, the header, or one grain repeatedly.
#[test]
fn entries_that_lead_in_circles_have_an_answer() {
    for shape in SHAPES {
        let header = shape.header();
        let memory = shape.image();
        {
            let disk = shape.open(memory.clone()).unwrap();
            disk.write_at(&[1; 100_000], GuestOffset(0)).unwrap();
            disk.close().unwrap();
        }
        let image = memory.to_vec();
        for value in [1, 2, 5, 6, header.directory as u32, header.overhead as u32, u32::MAX] {
            let directory = header.directory as usize * 512;
            use_all(&with(&image, directory, &value.to_le_bytes()), &[]);
            let table = u32::from_le_bytes(image[directory..directory + 4].try_into().unwrap());
            let table = table as usize * 512;
            for slot in 0..4 {
                use_all(&with(&image, table + 4 * slot, &value.to_le_bytes()), &[]);
            }
        }
    }
}

/// Writes through a table that refers to metadata are refused.
#[test]
fn nobody_writes_over_metadata() {
    let shape = Shape { grain: 512, ..SHAPES[0] };
    let memory = shape.image();
    let header = shape.header();
    let mut word = [0; 4];
    memory.read_at(&mut word, HostOffset(header.directory * 512)).unwrap();
    let table = u64::from(u32::from_le_bytes(word));
    for sector in [1, 4, header.directory, header.redundant_directory, table, table + 3] {
        memory.write_at(&(sector as u32).to_le_bytes(), HostOffset(table * 512)).unwrap();
        let disk = shape.open(memory.clone()).unwrap();
        let before = memory.to_vec();
        let error = disk.write_at(&[9; 512], GuestOffset(0)).unwrap_err();
        assert!(matches!(error, Error::Corrupt(_)), "sector {sector}: {error}");
        assert_eq!(memory.to_vec(), before, "sector {sector}");
    }
}

/// Sector of the first table.
fn first_table(memory: &MemoryStorage, shape: Shape) -> u64 {
    let mut word = [0; 4];
    memory.read_at(&mut word, HostOffset(shape.header().directory * 512)).unwrap();
    u32::from_le_bytes(word).into()
}

fn refused(result: vdkit_block::Result<()>, expected: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.remedy(), Some(vdkit_block::Remedy::REPAIR), "{error}");
    assert!(error.to_string().contains(expected), "{error}");
}

fn first_bytes(disk: &Disk, grain: u64) -> Vec<u8> {
    let byte = |at| {
        let mut byte = [0];
        disk.read_at(&mut byte, GuestOffset(at * grain)).unwrap();
        byte[0]
    };
    (0..4).map(byte).collect()
}

/// An image whose first four grains hold 1, 2, 3, 4.
fn four_grains(shape: Shape) -> Arc<MemoryStorage> {
    let memory = shape.image();
    let disk = shape.open(memory.clone()).unwrap();
    for at in 0..4 {
        let bytes = vec![at as u8 + 1; shape.grain as usize];
        disk.write_at(&bytes, GuestOffset(at * shape.grain)).unwrap();
    }
    disk.close().unwrap();
    memory
}

/// If the file of a truncated image grew, the lost entries would be valid again, and name the space
/// of new grains.
#[test]
fn a_truncated_image_gets_no_new_grains_before_a_repair() {
    let shape = SHAPES[0];
    let memory = four_grains(shape);
    let end = memory.len().unwrap() - shape.grain;
    memory.set_len(end).unwrap();
    let disk = shape.open(memory.clone()).unwrap();
    let expected = "the sector of a grain within the file";
    refused(disk.write_at(&[9; 512], GuestOffset(8 * shape.grain)), expected);
    refused(disk.discard(GuestOffset(0), shape.grain), expected);
    refused(disk.write_zeroes(GuestOffset(0), shape.grain, true), expected);
    disk.write_at(&[9; 512], GuestOffset(shape.grain)).unwrap();
    disk.write_zeroes(GuestOffset(2 * shape.grain), shape.grain, false).unwrap();
    disk.close().unwrap();
    assert_eq!(memory.len().unwrap(), end);
    let storage: Arc<dyn Storage> = memory.clone();
    super::check(&storage, Repair::All).unwrap();
    let disk = shape.open(memory).unwrap();
    disk.write_at(&[8; 512], GuestOffset(8 * shape.grain)).unwrap();
    disk.discard(GuestOffset(3 * shape.grain), shape.grain).unwrap();
    assert_eq!(first_bytes(&disk, shape.grain), [1, 9, 0, 0]);
}

/// A grain is neither freed nor handed out while a second entry names it, or a part of it.
#[test]
fn grains_with_two_owners_are_not_freed() {
    let shape = SHAPES[0];
    let table = first_table(&four_grains(shape), shape) * 512;
    for (slot, moved) in [(5, 0), (5, 1), (9, u32::MAX)] {
        let memory = four_grains(shape);
        let mut word = [0; 4];
        memory.read_at(&mut word, HostOffset(table + 8)).unwrap();
        let shared = u32::from_le_bytes(word).wrapping_add(moved);
        memory.write_at(&shared.to_le_bytes(), HostOffset(table + slot * 4)).unwrap();
        let disk = shape.open(memory).unwrap();
        let expected = "expected a grain of its own";
        refused(disk.discard(GuestOffset(2 * shape.grain), shape.grain), expected);
        refused(disk.discard(GuestOffset(slot * shape.grain), shape.grain), expected);
        refused(disk.write_at(&[9; 512], GuestOffset(20 * shape.grain)), expected);
        disk.flush().unwrap();
        assert_eq!(first_bytes(&disk, shape.grain), [1, 2, 3, 4]);
    }
}

const TEXT: &str = "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=ffffffff\n\
    createType=\"custom\"\nRW 8 FLAT \"a\" 0\nRW 6144 SPARSE \"b\"\nRW 16 ZERO\nRDONLY 8 FLAT \"a\" 8\n";

fn files() -> Vec<Arc<dyn Storage>> {
    let bytes: Vec<u8> = (0..8192u32).map(|i| (i / 512 + 1) as u8).collect();
    vec![Arc::new(MemoryStorage::from_bytes("a", &bytes)), SHAPES[0].image()]
}

/// Extents of several kinds and files form one disk, of which a part is writable.
#[test]
fn extents_of_all_kinds_make_one_disk() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::from_bytes("image", TEXT.as_bytes()));
    let disk = super::open(&VmdkDriver, storage, &files(), true, Limits::default()).unwrap();
    assert_eq!(disk.guest_bytes(), (8 + 6144 + 16 + 8) * 512);
    let end = disk.guest_bytes() - 8 * 512;
    disk.write_at(&[0x77; 8192], GuestOffset(2048)).unwrap();
    let mut bytes = vec![0; 12288];
    disk.read_at(&mut bytes, GuestOffset(0)).unwrap();
    assert!(bytes[..2048] == super::read_all(&disk)[..2048] && bytes[0] == 1 && bytes[2047] == 4);
    assert!(bytes[2048..10240] == [0x77; 8192] && bytes[10240..] == [0; 2048]);
    let mut last = [0; 513];
    disk.read_at(&mut last, GuestOffset(end - 1)).unwrap();
    assert_eq!((last[0], last[1], last[512]), (0, 9, 9));
    // A ZERO extent is zero already.
    disk.write_zeroes(GuestOffset(end - 1024), 1024, false).unwrap();
    assert!(disk.write_zeroes(GuestOffset(end), 512, true).is_err());
    for at in [end - 512, end] {
        let error = disk.write_at(&[1; 512], GuestOffset(at)).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{at}: {error}");
    }
    disk.close().unwrap();
}

/// Two extents that allocate in one file would overwrite each other.
#[test]
fn a_sparse_extent_has_its_file_to_itself() {
    for line in ["RW 6144 SPARSE \"b\"", "RW 8 FLAT \"b\" 0"] {
        for text in [format!("{TEXT}{line}\n"), TEXT.replace("RW 8 FLAT \"a\" 0", line)] {
            let storage: Arc<dyn Storage> =
                Arc::new(MemoryStorage::from_bytes("image", text.as_bytes()));
            let limits = Limits::default();
            let names = VmdkDriver.describe(&storage, &limits).unwrap().files;
            let by_name = |name: &String| files()[usize::from(name == "b")].clone();
            let files: Vec<Arc<dyn Storage>> = names.iter().map(by_name).collect();
            let image = OfflineImage { files: &files, ..OfflineImage::new(&storage) };
            let report = VmdkDriver.check(&image, Repair::Nothing).unwrap();
            let twice = report.findings.iter().find(|finding| finding.structure == "extent line");
            assert!(twice.is_some_and(|finding| finding.message.contains("'b' once more")));
            let request = OpenRequest { storage, files, writable: false, limits };
            let error = VmdkDriver.open(request).map(|_| ()).unwrap_err();
            assert!(matches!(error, Error::Corrupt(_)), "{error}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn any_change_of_a_descriptor_has_an_answer(
        at in 0..TEXT.len(),
        bytes in proptest::collection::vec(any::<u8>(), 1..12),
    ) {
        let mut text = TEXT.as_bytes().to_vec();
        for (i, byte) in bytes.iter().enumerate() {
            if let Some(place) = text.get_mut(at + i) {
                *place = *byte;
            }
        }
        use_all(&text, &files());
    }

    #[test]
    fn any_change_of_an_image_has_an_answer(
        shape in 0..SHAPES.len(),
        changes in proptest::collection::vec((0usize..8192, any::<u8>()), 1..6),
    ) {
        let mut image = SHAPES[shape].image().to_vec();
        for (at, byte) in changes {
            if let Some(place) = image.get_mut(at) {
                *place = byte;
            }
        }
        use_all(&image, &[]);
    }
}
