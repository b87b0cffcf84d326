//! Stream-optimized images: written in one pass, read in any order.

use std::path::Path;
use std::sync::Arc;

use vdkit::jobs::{ConvertOptions, Destination, NewImage, Source, convert};
use vdkit::storage::MemoryStorage;
use vdkit::{
    CreateRequest, Disk, Error, GuestOffset, Limits, Monitor, OpenOptions, Options, Storage,
};
use vdkit_testkit::{Rng, qemu, require_peer};

use super::oracle::{libvmdk_equals, open};

fn options(text: &str) -> Options {
    Options::parse("vmdk", vdkit::format("vmdk").unwrap().options(), [text]).unwrap()
}

/// A raw disk with scattered data, partly compressible.
fn source(path: &Path, bytes: u64) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(path).unwrap();
    file.set_len(bytes).unwrap();
    let mut rng = Rng::new(11);
    for number in 0..60 {
        let len = (1 + rng.below(300)) * 512;
        let at = rng.below((bytes - len) / 512) * 512;
        let mut piece = vec![number as u8; len as usize];
        if number % 2 == 0 {
            rng.fill(&mut piece);
        }
        file.write_all_at(&piece, at).unwrap();
    }
    file.write_all_at(&[0x5a; 512], bytes - 512).unwrap();
}

fn stream(from: &Path, to: &Path, threads: usize) {
    let registry = vdkit::registry();
    let raw = OpenOptions::read_only().format("raw");
    let disk = Disk::open(&registry, from, &raw).unwrap();
    let new = NewImage::new(to, "vmdk")
        .options(options("subformat=streamOptimized,adapter_type=lsilogic"));
    let mut wanted = ConvertOptions::new(Destination::New(new));
    wanted.threads = Some(threads);
    wanted.verify = true;
    convert(&registry, &Source::new(vec![disk]), &wanted, &Monitor::default()).unwrap();
}

#[test]
fn streams_of_ours_are_read_by_all() {
    for bytes in [(100 << 20) + 512, 65536, 64 << 20, 512] {
        let folder = tempfile::tempdir().unwrap();
        let (raw, image) = (folder.path().join("raw"), folder.path().join("disk.vmdk"));
        source(&raw, bytes.max(1 << 20));
        std::fs::File::options().write(true).open(&raw).unwrap().set_len(bytes).unwrap();
        for threads in [1, 3] {
            stream(&raw, &image, threads);
            let storage: Arc<dyn Storage> =
                Arc::new(MemoryStorage::from_bytes("x", &std::fs::read(&image).unwrap()));
            super::audit(&storage, &format!("{bytes}"));
        }
        if require_peer("qemu-img") {
            assert!(qemu::same((&raw, "raw"), (&image, "vmdk")), "{bytes}");
            assert!(qemu::check(&image, "vmdk", None).clean(), "{bytes}");
        }
        libvmdk_equals(&image, &raw);
        random_reads(&raw, &image, bytes);
    }
}

/// QEMU's streams have their directory in front, and no footer.
#[test]
fn streams_of_qemu_are_read_in_any_order() {
    if !require_peer("qemu-img") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (raw, image) = (folder.path().join("raw"), folder.path().join("disk.vmdk"));
    let bytes = (70 << 20) + 1024;
    source(&raw, bytes);
    qemu::convert((&raw, "raw"), (&image, "vmdk"), &["-o", "subformat=streamOptimized"]);
    random_reads(&raw, &image, bytes);
    let storage: Arc<dyn Storage> =
        Arc::new(MemoryStorage::from_bytes("x", &std::fs::read(&image).unwrap()));
    super::audit(&storage, "QEMU's");
}

fn random_reads(raw: &Path, image: &Path, bytes: u64) {
    use std::os::unix::fs::FileExt;
    let (disk, file) = (open(image, false), std::fs::File::open(raw).unwrap());
    let mut rng = Rng::new(5);
    for _ in 0..200 {
        let len = (1 + rng.below(400) * 512).min(bytes);
        let at = rng.below(bytes - len + 1);
        let (mut ours, mut theirs) = (vec![1; len as usize], vec![2; len as usize]);
        disk.read_at(&mut ours, GuestOffset(at)).unwrap();
        file.read_exact_at(&mut theirs, at).unwrap();
        assert!(ours == theirs, "{len} bytes at {at:#x}");
    }
}

/// The parts are in the order that VMware's tools expect.
#[test]
fn a_stream_is_laid_out_as_the_specification_says() {
    let folder = tempfile::tempdir().unwrap();
    let (raw, image) = (folder.path().join("raw"), folder.path().join("disk.vmdk"));
    source(&raw, 100 << 20);
    stream(&raw, &image, 2);
    let bytes = std::fs::read(&image).unwrap();
    let le32 = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let le64 = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    assert_eq!((le32(4), le32(8), le64(56)), (3, 0x3_0001, u64::MAX));
    let mut at = le64(64) as usize * 512;
    let (mut last, mut tables, mut kinds) = (None, Vec::new(), Vec::new());
    loop {
        let (value, size, kind) = (le64(at), le32(at + 8) as usize, le32(at + 12));
        if size > 0 {
            assert!(last.is_none_or(|last| last < value), "grains ascend: {last:?}, {value}");
            assert_eq!(value % 128, 0);
            last = Some(value);
            at += (12 + size).next_multiple_of(512);
            continue;
        }
        kinds.push(kind);
        if kind == 1 {
            tables.push((at + 512) / 512);
        }
        at += 512 + value as usize * 512;
        if kind == 0 {
            break;
        }
    }
    assert_eq!(at, bytes.len());
    assert_eq!(kinds, [1, 1, 1, 1, 2, 3, 0]);
    let footer = bytes.len() - 1024;
    assert_eq!(bytes[footer..footer + 56], bytes[..56]);
    let directory = le64(footer + 56) as usize * 512;
    let named: Vec<usize> = (0..4).map(|i| le32(directory + 4 * i) as usize).collect();
    assert_eq!(named, tables);
}

#[test]
fn a_stream_goes_forward_only_and_must_be_whole() {
    let driver = vdkit::format("vmdk").unwrap();
    let begin = |memory: &Arc<MemoryStorage>| {
        let request = CreateRequest {
            storage: memory.clone(),
            files: Vec::new(),
            guest_bytes: 1 << 20,
            options: options("subformat=streamOptimized"),
            backing: None,
            backing_bytes: None,
        };
        driver
            .require_creation("stream")
            .unwrap()
            .create_open(&request, &Limits::default())
            .unwrap()
    };
    let memory = Arc::new(MemoryStorage::new("image"));
    let format = begin(&memory);
    let place = format
        .writes_compressed()
        .unwrap()
        .reserve_compressed(GuestOffset(131_072), &[512])
        .unwrap();
    let mut framed = vec![0; 512];
    format.writes_compressed().unwrap().frame_compressed(GuestOffset(131_072), &mut framed, 20);
    assert_eq!((framed[0], framed[1], framed[8]), (0, 1, 20));
    format.file(place.file).write_at(&framed, place.host).unwrap();
    place.publish().unwrap();
    for at in [0, 131_072] {
        assert!(matches!(
            format.writes_compressed().unwrap().reserve_compressed(GuestOffset(at), &[512]),
            Err(Error::Unsupported { .. })
        ));
        assert!(format.resolve(GuestOffset(at), 1).is_err());
    }
    for (at, len) in [(200_000, 512), (196_608, 100), (196_608, 0), (1 << 20, 512)] {
        assert!(matches!(
            format.writes_compressed().unwrap().reserve_compressed(GuestOffset(at), &[len]),
            Err(Error::Invalid { .. })
        ));
    }
    assert!(format.reserve(GuestOffset(196_608), 65536).is_err());
    // A grain that was reserved and dropped cannot be left out.
    drop(
        format
            .writes_compressed()
            .unwrap()
            .reserve_compressed(GuestOffset(196_608), &[512])
            .unwrap(),
    );
    assert!(format.close().is_err());
    // A truncated stream is detected at any length.
    let memory = Arc::new(MemoryStorage::new("image"));
    begin(&memory).close().unwrap();
    let whole = memory.to_vec();
    let describe = |bytes: &[u8]| {
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::from_bytes("image", bytes));
        driver.describe(&storage, &Limits::default())
    };
    describe(&whole).unwrap();
    for cut in (512..whole.len()).step_by(512) {
        let error = describe(&whole[..cut]).unwrap_err().to_string();
        assert!(error.contains("cut off"), "{error}");
    }
}

/// A marker with a wrong position, and a stream that cannot be decompressed.
#[test]
fn damaged_grains_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let (raw, image) = (folder.path().join("raw"), folder.path().join("disk.vmdk"));
    source(&raw, 10 << 20);
    stream(&raw, &image, 1);
    let bytes = std::fs::read(&image).unwrap();
    let first = u64::from_le_bytes(bytes[64..72].try_into().unwrap()) * 512;
    for (skip, what) in [(0, "marker"), (11, "marker"), (20, "")] {
        let mut damaged = bytes.clone();
        damaged[first as usize + skip] ^= 0x80;
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::from_bytes("image", &damaged));
        let report = super::check(&storage);
        let found = report.findings.iter().any(|f| f.structure.contains("marker"));
        assert_eq!(found, !what.is_empty(), "{skip}: {:#?}", report.findings);
        if skip != 0 {
            std::fs::write(&image, &damaged).unwrap();
            let disk = open(&image, false);
            let mut all = vec![0; disk.guest_bytes() as usize];
            let error = disk.read_at(&mut all, GuestOffset(0)).unwrap_err();
            assert!(matches!(error, Error::Corrupt(_)), "{error}");
        }
    }
}
