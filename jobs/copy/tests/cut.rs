//! Truncated images: a job copies the whole disk, or fails.

use std::fs::OpenOptions as Files;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use vdkit_block::{Creation, Error, FormatDriver, GuestOffset, Monitor, Options, Repair};
use vdkit_chain::{Disk, OpenOptions, Registry, TruncationCheck};
use vdkit_copy::{CompareOptions, ConvertOptions, Destination, NewImage, Source, compare, convert};
use vdkit_image::{check, measure};
use vdkit_qcow2::Qcow2Driver;
use vdkit_raw::RawDriver;
use vdkit_testbase::{Rng, qemu, require_peer};

const MIB: usize = 1 << 20;

fn registry() -> Registry {
    let drivers: [&'static dyn FormatDriver; 2] = [&Qcow2Driver, &RawDriver];
    Registry::new(drivers)
}

fn open(path: &Path) -> Result<Disk, Error> {
    Disk::open(&registry(), path, &OpenOptions::read_only().format("qcow2"))
}

/// Noise in pieces all over 6 MiB, and compressible text.
fn disk() -> Vec<u8> {
    let mut rng = Rng::new(7);
    let mut bytes = vec![0; 6 * MIB];
    for _ in 0..24 {
        let at = rng.below(6 * MIB as u64 - 65536) as usize;
        let len = rng.below(65536) as usize;
        match rng.below(2) {
            0 => rng.fill(&mut bytes[at..at + len]),
            _ => bytes[at..at + len].iter_mut().enumerate().for_each(|(i, b)| *b = (i % 61) as u8),
        }
    }
    bytes
}

struct Case {
    _dir: tempfile::TempDir,
    raw: PathBuf,
    image: PathBuf,
    bytes: Vec<u8>,
}

impl Case {
    fn new(options: &str, flags: &[&str]) -> Option<Self> {
        if !require_peer("qemu-img") {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let (raw, image) = (dir.path().join("disk.raw"), dir.path().join("disk.qcow2"));
        let bytes = disk();
        std::fs::write(&raw, &bytes).unwrap();
        let flags = [&["-o", options], flags].concat();
        qemu::convert((&raw, "raw"), (&image, "qcow2"), &flags);
        Some(Self { _dir: dir, raw, image, bytes })
    }

    fn cut(&self, len: u64) -> PathBuf {
        let cut = self.image.with_extension("cut");
        std::fs::copy(&self.image, &cut).unwrap();
        Files::new().write(true).open(&cut).unwrap().set_len(len).unwrap();
        cut
    }

    /// Converts a truncated image.
    fn converted(&self, from: &Path, to: &str) -> Result<Vec<u8>, Error> {
        let target = self.raw.with_extension("out");
        let _ = std::fs::remove_file(&target);
        let driver = registry().driver(to).unwrap();
        let new = NewImage::new(target.clone(), to)
            .options(Options::parse(to, driver.options(), [""; 0]).unwrap());
        let options = ConvertOptions::new(Destination::New(new));
        let source = Source::new(vec![open(from)?]);
        let done = convert(&registry(), &source, &options, &monitor());
        assert_eq!(target.exists(), done.is_ok(), "nothing half-made is left");
        done?;
        if to == "raw" {
            return Ok(std::fs::read(&target).unwrap());
        }
        let mut bytes = vec![0; self.bytes.len()];
        open(&target).unwrap().read_at(&mut bytes, GuestOffset(0)).unwrap();
        Ok(bytes)
    }
}

fn monitor() -> Monitor<'static> {
    Monitor::default()
}

fn is_cut(error: &Error) -> bool {
    matches!(error, Error::Corrupt(fault) if fault.expected.contains("truncated"))
}

const LAYOUTS: &[(&str, &[&str])] = &[
    ("cluster_size=64k", &[]),
    ("cluster_size=4k", &[]),
    ("cluster_size=512", &[]),
    ("cluster_size=32k,extended_l2=on", &[]),
    ("cluster_size=64k,compression_type=zlib", &["-c"]),
    ("cluster_size=4k,compression_type=zstd", &["-c"]),
    ("cluster_size=64k,preallocation=metadata", &[]),
];

/// An image truncated at a cluster boundary lacks whole clusters: either the disk needs none of
/// them, or the conversion fails.
#[test]
fn a_cut_image_converts_to_its_disk_or_not_at_all() {
    for (options, flags) in LAYOUTS {
        let Some(case) = Case::new(options, flags) else { return };
        let cluster = match options.split(['=', ',']).nth(1).unwrap() {
            "512" => 512,
            size => size.trim_end_matches('k').parse::<u64>().unwrap() << 10,
        };
        let len = std::fs::metadata(&case.image).unwrap().len();
        let mut refused = 0;
        // At least 40 offsets, and all of the first few, where the tables are.
        let step = (len / cluster / 40).max(1);
        let cuts = (1..8).chain((8..=len / cluster).step_by(step as usize)).map(|i| i * cluster);
        for at in cuts.filter(|&at| at <= len) {
            let cut = case.cut(at);
            for to in ["raw", "qcow2"] {
                match case.converted(&cut, to) {
                    Ok(bytes) => assert!(bytes == case.bytes, "{options}: cut at {at}: lost"),
                    Err(error) => {
                        assert!(at < len, "{options}: {error}");
                        assert!(matches!(error, Error::Corrupt(_) | Error::Io { .. }), "{error}");
                        refused += 1;
                    }
                }
            }
        }
        assert!(refused > 10, "{options}: {refused}");
    }
}

/// Wherever the cut is, at most one cluster's content is lost silently: the file may have ended
/// within it before.
#[test]
fn a_cut_within_a_cluster_costs_no_other() {
    let Some(case) = Case::new("cluster_size=4k", &[]) else { return };
    let len = std::fs::metadata(&case.image).unwrap().len();
    let mut rng = Rng::new(11);
    let mut passed = 0;
    for at in (0..60).map(|_| rng.below(len)).chain((1..30).map(|i| len - i * 300)) {
        let cut = case.cut(at);
        let Ok(bytes) = case.converted(&cut, "raw") else { continue };
        // Except for a table in which the file ends: that is reported.
        let said = open(&cut).unwrap().warnings().any(|text| text.contains("within an L2 table"));
        passed += 1;
        let differ: Vec<_> = (0..bytes.len() / 4096)
            .filter(|i| bytes[i * 4096..][..4096] != case.bytes[i * 4096..][..4096])
            .collect();
        assert!(differ.len() <= 1 || said, "cut at {at} of {len}: {differ:?}");
    }
    assert!(passed > 0);
}

/// The error names the file, the offset, both lengths and a remedy, and the remedy works.
#[test]
fn the_error_names_what_is_missing_and_what_mends_it() {
    let Some(case) = Case::new("cluster_size=64k", &[]) else { return };
    let cut = case.cut(1 << 20);
    let error = case.converted(&cut, "raw").unwrap_err();
    let Error::Corrupt(fault) = &error else { panic!("{error}") };
    assert_eq!((fault.file.as_str(), fault.structure), (cut.to_str().unwrap(), "guest data"));
    assert_eq!(fault.offset, 1 << 20);
    assert!(fault.found.contains("1048576 bytes"), "{fault}");
    let guest = fault.expected.split("guest offset ").nth(1).unwrap();
    let guest = guest.split(':').next().unwrap().trim_start_matches("0x");
    let guest = u64::from_str_radix(guest, 16).unwrap();
    let part = open(&cut).unwrap();
    let found = part.extents(GuestOffset(guest), 65536).unwrap();
    let found = found.flatten().next().unwrap();
    assert!(
        matches!(found.place, vdkit_chain::DiskPlace::Data { offset, .. } if offset.0 == 1 << 20),
        "{found:?}"
    );
    // Jobs that scan the whole map report the same.
    let same = CompareOptions::default();
    let whole = open(&case.image).unwrap();
    assert!(is_cut(&compare(&whole, &part, &same, &monitor()).unwrap_err()));
    drop(whole);
    let options = Options::parse("raw", RawDriver.options(), [""; 0]).unwrap();
    assert!(is_cut(&measure(&[part], &RawDriver, &options, &monitor()).unwrap_err()));
    check(&registry(), &cut, &OpenOptions::read_only(), Repair::All, &monitor()).unwrap();
    let mended = case.converted(&cut, "raw").unwrap();
    for (i, (now, was)) in mended.chunks(65536).zip(case.bytes.chunks(65536)).enumerate() {
        assert!(now == was || now.iter().all(|&byte| byte == 0), "cluster {i}");
    }
}

/// Without its L2 tables an image can be neither read there nor written at all.
#[test]
fn missing_tables_are_no_empty_tables() {
    let Some(case) = Case::new("cluster_size=64k", &[]) else { return };
    // Header, refcount table, refcount block, L1 table.
    let cut = case.cut(4 << 16);
    let mut byte = [0];
    let disk = open(&cut).unwrap();
    let error = disk.read_at(&mut byte, GuestOffset(0)).unwrap_err();
    assert!(is_cut(&error) && error.to_string().contains("L1 entry at offset 0x30000"), "{error}");
    drop(disk);
    let before = std::fs::read(&cut).unwrap();
    let writable = OpenOptions::read_write().format("qcow2");
    let error = Disk::open(&registry(), &cut, &writable).unwrap_err();
    assert!(is_cut(&error), "{error}");
    assert!(std::fs::read(&cut).unwrap() == before, "not even the header is touched");
    check(&registry(), &cut, &OpenOptions::read_only(), Repair::All, &monitor()).unwrap();
    open(&cut).unwrap().read_at(&mut byte, GuestOffset(0)).unwrap();
    assert_eq!(byte, [0]);
}

/// Another program's file grows before its map does.
#[test]
fn a_file_that_has_grown_meanwhile_was_not_cut() {
    let Some(case) = Case::new("cluster_size=64k", &[]) else { return };
    let cut = case.cut(1 << 20);
    let disk = open(&cut).unwrap();
    let extents: Vec<_> =
        disk.extents(GuestOffset(0), disk.guest_bytes()).unwrap().map(Result::unwrap).collect();
    let mut missing = TruncationCheck::default();
    assert!(extents.iter().any(|extent| missing.refuse(&disk, extent).is_err()));
    let whole = std::fs::metadata(&case.image).unwrap().len();
    Files::new().write(true).open(&cut).unwrap().set_len(whole).unwrap();
    assert!(extents.iter().all(|extent| missing.refuse(&disk, extent).is_ok()));
}

/// No check covers a data file; restoring its length repairs it.
#[test]
fn a_data_file_that_was_cut_is_made_as_long_as_it_was() {
    let Some(case) = Case::new("cluster_size=64k", &[]) else { return };
    let (image, data) = (case.raw.with_extension("external"), case.raw.with_extension("data"));
    let options = format!("data_file={}", data.display());
    qemu::convert((&case.raw, "raw"), (&image, "qcow2"), &["-o", &options]);
    assert!(case.converted(&image, "raw").unwrap() == case.bytes);
    let data = Files::new().write(true).open(&data).unwrap();
    data.set_len(1 << 20).unwrap();
    let error = case.converted(&image, "raw").unwrap_err();
    let remedy = error.remedy().unwrap().to_string();
    assert!(is_cut(&error) && remedy.contains("truncate -s"), "{error}; {remedy}");
    data.set_len(6 << 20).unwrap();
    let bytes = case.converted(&image, "raw").unwrap();
    assert!(bytes[..1 << 20] == case.bytes[..1 << 20] && bytes[1 << 20..].iter().all(|b| *b == 0));
}

/// A power cut under QEMU can leave entries of clusters beyond the end of the file, and a guest writes
/// there again.
#[test]
fn what_is_written_to_a_cut_image_stays() {
    let writable = OpenOptions::read_write().format("qcow2");
    let mut passed = 0;
    for (options, flags) in LAYOUTS {
        let Some(case) = Case::new(options, flags) else { return };
        let len = std::fs::metadata(&case.image).unwrap().len();
        for cut in [len - 512, len - (len / 8), len - (len / 3), len / 2].map(|at| case.cut(at)) {
            let mut rng = Rng::new(len);
            let read = || {
                let mut bytes = vec![0; case.bytes.len()];
                open(&cut).unwrap().read_at(&mut bytes, GuestOffset(0)).map(|()| bytes)
            };
            // Compressed clusters beyond the end cannot be read.
            let Ok(mut bytes) = read() else { continue };
            let Ok(disk) = Disk::open(&registry(), &cut, &writable) else { continue };
            for _ in 0..80 {
                let at = rng.below(bytes.len() as u64 - 65536) as usize;
                let piece = &mut bytes[at..][..rng.below(65536) as usize + 1];
                let guest = GuestOffset(at as u64);
                match rng.below(4) {
                    0 => {
                        piece.fill(0);
                        disk.write_zeroes(guest, piece.len() as u64, rng.below(2) == 0).unwrap();
                    }
                    1 => disk.discard(guest, piece.len() as u64).unwrap(),
                    _ => {
                        rng.fill(piece);
                        disk.write_at(piece, guest).unwrap();
                    }
                }
                // A discard zeroes what clusters it may.
                disk.read_at(piece, guest).unwrap();
                if rng.below(8) == 0 {
                    disk.flush().unwrap();
                }
            }
            let mut now = vec![0; bytes.len()];
            disk.read_at(&mut now, GuestOffset(0)).unwrap();
            assert!(now == bytes, "{options}");
            disk.close().unwrap();
            drop(disk);
            assert!(read().unwrap() == bytes, "{options}: lost at closing");
            let report = check(&registry(), &cut, &writable, Repair::All, &monitor()).unwrap();
            assert!(read().unwrap() == bytes, "{options}: {:?}", report.report.findings);
            passed += 1;
        }
    }
    assert!(passed >= 10, "{passed}");
}

/// Clusters counted in a lost refcount block would be allocated again.
#[test]
fn without_a_refcount_block_nothing_is_written() {
    let Some(case) = Case::new("cluster_size=64k", &[]) else { return };
    let cut = case.cut(1 << 20);
    let writable = OpenOptions::read_write().format("qcow2");
    drop(Disk::open(&registry(), &cut, &writable).unwrap());
    let mut file = Files::new().write(true).open(&cut).unwrap();
    // The second entry of the refcount table, in cluster 1.
    file.seek(SeekFrom::Start(65536 + 8)).unwrap();
    file.write_all(&(2u64 << 20).to_be_bytes()).unwrap();
    let error = Disk::open(&registry(), &cut, &writable).unwrap_err();
    let Error::Corrupt(fault) = &error else { panic!("{error}") };
    assert_eq!((fault.structure, fault.offset), ("refcount table entry", 65544));
    open(&cut).unwrap();
}

#[test]
fn an_end_within_a_table_is_told() {
    let Some(case) = Case::new("cluster_size=64k", &[]) else { return };
    let told = |at| {
        let disk = open(&case.cut(at)).unwrap();
        disk.warnings().map(str::to_owned).collect::<Vec<_>>()
    };
    let [text] = &told((4 << 16) + 4096)[..] else { panic!("one warning") };
    assert!(text.contains("266240 bytes, within an L2 table at offset 0x40000"), "{text}");
    assert_eq!(told(5 << 16), [""; 0]);
}

/// The file of an image may end within its last cluster.
#[test]
fn a_last_cluster_that_is_not_full_is_no_cut() {
    let Some(case) = Case::new("cluster_size=64k", &[]) else { return };
    let len = std::fs::metadata(&case.image).unwrap().len();
    let cut = case.cut(len - 65536 + 512);
    assert_eq!(std::fs::metadata(&cut).unwrap().len() % 65536, 512);
    assert_eq!(case.converted(&cut, "raw").unwrap().len(), case.bytes.len());
}
