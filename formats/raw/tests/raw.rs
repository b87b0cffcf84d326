//! Raw images in memory and in real files.

use std::sync::Arc;

use vdkit_block::{
    CreateRequest, Creation, Error, ErrorKind, FileIndex, Format, FormatDriver, GuestOffset,
    HostOffset, Limits, OfflineImage, Options, Place, Probe, Repair, Storage, StorageCaps,
};
use vdkit_raw::{RawDriver, RawFormat};
use vdkit_storage::{FileOptions, FileStorage, MemoryStorage};
use vdkit_testbase::CountingStorage;

const MIB: u64 = 1 << 20;

fn open(storage: MemoryStorage) -> RawFormat {
    RawFormat::new(Arc::new(storage), true).unwrap()
}

#[derive(Debug)]
struct WithCaps(MemoryStorage, StorageCaps);

impl vdkit_block::StorageLayer for WithCaps {
    const INTERCEPTS: bool = false;

    fn inner(&self) -> &dyn Storage {
        &self.0
    }

    fn caps(&self) -> StorageCaps {
        self.1
    }
}

#[test]
fn zeroes_are_cheap_where_none_is_written() {
    let memory = MemoryStorage::new("image").caps();
    let cheap = |caps| {
        let storage = WithCaps(MemoryStorage::new("image"), caps);
        RawFormat::new(Arc::new(storage), true).unwrap().caps().cheap_zeroes
    };
    assert!(cheap(memory));
    assert!(!cheap(StorageCaps { device: true, ..memory }));
    assert!(!cheap(StorageCaps { remote: true, ..memory }));
}

fn runs(format: &RawFormat, step: u64) -> Vec<(u64, u64, bool)> {
    let mut runs: Vec<(u64, u64, bool)> = Vec::new();
    let mut at = 0;
    while at < format.guest_bytes() {
        let run = format.resolve(GuestOffset(at), step.min(format.guest_bytes() - at)).unwrap();
        let data = match run.place {
            Place::Data { file, offset, exclusive } => {
                assert_eq!((file, offset.0, exclusive), (FileIndex(0), at, true));
                true
            }
            Place::Zero { allocated: false } => false,
            other => panic!("{other:?}"),
        };
        match runs.last_mut() {
            Some(last) if last.2 == data => last.1 += run.len,
            _ => runs.push((at, run.len, data)),
        }
        at += run.len;
    }
    runs
}

#[test]
fn the_map_shows_holes_and_requests_do_not_ask_for_them() {
    let memory = MemoryStorage::with_len("m", 8 * MIB);
    memory.write_at(&[1; 8192], HostOffset(MIB)).unwrap();
    memory.write_at(&[1; 4096], HostOffset(5 * MIB)).unwrap();
    let counting = CountingStorage::new(Arc::new(memory));
    let format = RawFormat::new(counting.clone(), true).unwrap();
    let wanted = vec![
        (0, MIB, false),
        (MIB, 8192, true),
        (MIB + 8192, 4 * MIB - 8192, false),
        (5 * MIB, 4096, true),
        (5 * MIB + 4096, 3 * MIB - 4096, false),
    ];
    assert_eq!(runs(&format, u64::MAX), wanted);
    assert_eq!(runs(&format, 4096), wanted);

    counting.reset();
    let whole = format.resolve_for_io(GuestOffset(0), 8 * MIB).unwrap();
    let place = Place::Data { file: FileIndex(0), offset: HostOffset(0), exclusive: true };
    assert_eq!((whole.len, whole.place), (8 * MIB, place));
    assert_eq!(counting.counts(), Default::default(), "the storage was asked");
}

#[test]
fn a_full_file_is_one_run_and_a_scan_in_steps_asks_once_a_run() {
    let full = CountingStorage::new(Arc::new(MemoryStorage::from_bytes("m", &vec![1; 1 << 20])));
    let format = RawFormat::new(full.clone(), false).unwrap();
    assert_eq!(runs(&format, u64::MAX), [(0, MIB, true)]);
    let rest = MIB - 4096;
    assert_eq!(format.resolve_cached(GuestOffset(4096), rest).map(|run| run.len), Some(rest));
    assert_eq!(full.counts().extents, 0);

    let memory = MemoryStorage::with_len("m", 2 * MIB);
    memory.write_at(&vec![1; 1 << 20], HostOffset(0)).unwrap();
    let half = CountingStorage::new(Arc::new(memory));
    let format = RawFormat::new(half.clone(), false).unwrap();
    for at in (0..MIB).step_by(512) {
        assert_eq!(format.resolve(GuestOffset(at), 512).unwrap().len, 512);
    }
    assert_eq!(half.counts().extents, 1);
}

#[test]
fn what_becomes_a_hole_is_forgotten_as_data() {
    let format = open(MemoryStorage::from_bytes("m", &vec![1; 1 << 20]));
    assert_eq!(runs(&format, 4096), [(0, MIB, true)]);
    let done = format.zero(GuestOffset(4096), 8192, true).unwrap();
    assert_eq!(done, 4096..12288);
    assert_eq!(runs(&format, 4096)[..2], [(0, 4096, true), (4096, 8192, false)]);
    format.discard(GuestOffset(0), 4096).unwrap();
    assert_eq!(runs(&format, 4096)[0], (0, 12288, false));
    // A written hole is data at once: holes are not cached.
    format.storage().write_at(&[1], HostOffset(5000)).unwrap();
    assert_eq!(runs(&format, 4096)[..2], [(0, 4096, false), (4096, 4096, true)]);
}

#[test]
fn a_ragged_length_is_rounded_up_to_sectors() {
    let format = open(MemoryStorage::from_bytes("m", &[7; 1000]));
    assert_eq!(format.guest_bytes(), 1024);
    let info = RawDriver.describe(format.storage(), &Limits::default()).unwrap();
    assert_eq!(info.virtual_size, 1024);
    let mut bytes = [9; 1024];
    format.storage().read_padded(&mut bytes, HostOffset(0)).unwrap();
    assert!(bytes[..1000] == [7; 1000] && bytes[1000..] == [0; 24]);
    format.zero(GuestOffset(512), 512, false).unwrap();
    assert_eq!(format.storage().len().unwrap(), 1024);

    for len in [1 << 63, u64::MAX - 5] {
        // A length that rounding up would push beyond the file limit.
        let huge = MemoryStorage::with_len("m", len);
        let shown = RawFormat::new(Arc::new(huge), false).map(|format| format.guest_bytes());
        assert!(matches!(shown, Err(Error::Limit { .. })), "{shown:?}");
    }
}

#[test]
fn reading_is_all_that_a_read_only_image_allows() {
    let format =
        RawFormat::new(Arc::new(MemoryStorage::from_bytes("m", &[1; 512])), false).unwrap();
    assert!(!format.caps().writable);
    let is_read_only = |error: Error| matches!(error, Error::ReadOnly { .. });
    assert!(is_read_only(format.zero(GuestOffset(0), 512, true).unwrap_err()));
    assert!(is_read_only(format.discard(GuestOffset(0), 512).unwrap_err()));
    assert!(is_read_only(format.resize(1024).unwrap_err()));
    assert!(is_read_only(format.reserve(GuestOffset(0), 512).unwrap_err()));
    let storage = Arc::new(MemoryStorage::from_bytes("m", &[1; 512]).read_only());
    assert!(is_read_only(RawFormat::new(storage, true).unwrap_err()));
}

#[test]
fn resize_changes_the_file_and_new_bytes_are_zero() {
    let format = open(MemoryStorage::from_bytes("m", &[7; 4096]));
    format.resize(1024).unwrap();
    format.resize(8192).unwrap();
    assert_eq!(format.guest_bytes(), 8192);
    let mut bytes = vec![9; 8192];
    format.storage().read_at(&mut bytes, HostOffset(0)).unwrap();
    assert!(bytes[..1024] == [7; 1024] && bytes[1024..].iter().all(|byte| *byte == 0));
    format.resize(1000).unwrap();
    assert_eq!((format.guest_bytes(), format.storage().len().unwrap()), (1024, 1000));

    let device = open(MemoryStorage::from_bytes("m", &[7; 4096]).fixed_len());
    assert_eq!(device.resize(8192).unwrap_err().kind(), ErrorKind::Usage);
    device.resize(2048).unwrap();
    assert_eq!((device.guest_bytes(), device.storage().len().unwrap()), (2048, 4096));
    assert!(matches!(format.resize(u64::MAX).unwrap_err(), Error::Invalid { .. }));
}

fn create(storage: Arc<dyn Storage>, bytes: u64, options: &[&str]) -> vdkit_block::Result<()> {
    let options = Options::parse("raw", RawDriver.options(), options.iter().copied())?;
    RawDriver.create(&CreateRequest::new(storage, bytes, options))
}

#[test]
fn preallocation_takes_the_space_that_it_says() {
    let folder = tempfile::tempdir().unwrap();
    for (name, allocated) in
        [("off", 0..MIB), ("falloc", 4 * MIB..6 * MIB), ("full", 4 * MIB..6 * MIB)]
    {
        let path = folder.path().join(name);
        let file = FileStorage::create(&path, &FileOptions::default()).unwrap();
        let file: Arc<dyn Storage> = Arc::new(file);
        create(file.clone(), 4 * MIB - 100, &[&format!("preallocation={name}")]).unwrap();
        file.sync().unwrap();
        assert_eq!(file.len().unwrap(), 4 * MIB);
        let got = file.allocated_bytes().unwrap();
        assert!(allocated.contains(&got), "{name}: {got}");
        assert!(std::fs::read(&path).unwrap().iter().all(|byte| *byte == 0));
    }
    assert!(create(Arc::new(MemoryStorage::new("m")), 1, &["preallocation=metadata"]).is_err());
    create(Arc::new(MemoryStorage::new("m")), 0, &["preallocation=full"]).unwrap();
    create(Arc::new(MemoryStorage::new("m")), 0, &["preallocation=falloc"]).unwrap();
}

#[test]
fn a_new_image_on_a_device_reads_as_zero_and_must_fit() {
    let device = Arc::new(MemoryStorage::from_bytes("m", &[7; 8192]).fixed_len());
    create(device.clone(), 4096, &[]).unwrap();
    let bytes = device.to_vec();
    assert!(bytes[..4096] == [0; 4096] && bytes[4096..] == [7; 4096]);
    assert_eq!(create(device, 8193, &[]).unwrap_err().kind(), ErrorKind::NoSpace);
}

#[test]
fn raw_has_no_place_for_a_backing_file() {
    let storage = Arc::new(MemoryStorage::new("m"));
    let backing = Some(vdkit_block::BackingRef::new("b", None));
    let request = CreateRequest { backing, ..CreateRequest::new(storage, 512, Options::default()) };
    let error = RawDriver.create(&request).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
}

#[test]
fn the_driver_answers() {
    assert_eq!(RawDriver.probe(b"QFI\xfb", &[], 4), Probe::Fallback);
    let options = Options::default();
    let measured = RawDriver.measure(1000, &options, 1).unwrap();
    assert_eq!((measured.required, measured.fully_allocated), (1024, 1024));
    assert!(RawDriver.measure(u64::MAX, &options, 0).is_err());
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::from_bytes("m", &[7; 1000]));
    let report = RawDriver.check(&OfflineImage::new(&storage), Repair::All).unwrap();
    assert_eq!((report.corruptions, report.leaks, report.image_end_offset), (0, 0, 1000));
}
