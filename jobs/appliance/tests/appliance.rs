//! Disks of an appliance are converted in parallel.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vdkit_appliance::{Extraction, extract, open_packaged};
use vdkit_block::{Error, HostOffset, Monitor, Progress, Result, Storage, StorageCaps};
use vdkit_chain::{OpenOptions, Registry};
use vdkit_copy::{ConvertOptions, Destination, NewImage, Source};
use vdkit_ova::{Package, PackageLimits};
use vdkit_raw::RawDriver;
use vdkit_testbase::appliance::{ovf, tar};
use vdkit_testbase::{run_threadless, threadless_argument};

/// In-memory bytes. Once armed, a read of one half returns only when the other half is read too.
#[derive(Debug)]
struct Meeting {
    bytes: Vec<u8>,
    armed: AtomicBool,
    seen: [AtomicBool; 2],
}

impl Meeting {
    fn wait(&self, offset: u64) -> Result<()> {
        let half = usize::from(offset as usize >= self.bytes.len() / 2);
        self.seen[half].store(true, Ordering::SeqCst);
        let started = Instant::now();
        while !self.seen[1 - half].load(Ordering::SeqCst) {
            if started.elapsed() > Duration::from_secs(120) {
                return Err(Error::invalid("nobody reads the other disk"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

impl Storage for Meeting {
    fn name(&self) -> &str {
        "a.ova"
    }

    fn caps(&self) -> StorageCaps {
        StorageCaps { block_bytes: 512, ..StorageCaps::default() }
    }

    fn len(&self) -> Result<u64> {
        Ok(self.bytes.len() as u64)
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        if self.armed.load(Ordering::SeqCst) {
            self.wait(offset.0)?;
        }
        let there = self.bytes.get(offset.0 as usize..).unwrap_or_default();
        let got = there.len().min(buf.len());
        buf[..got].copy_from_slice(&there[..got]);
        Ok(got)
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }
}

/// The first two disks, to be read and written nowhere.
fn both_to_nothing(package: &Package) -> (Registry, Vec<Extraction>) {
    let registry = Registry::new([&RawDriver as &'static dyn vdkit_block::FormatDriver]);
    let part = |disk| {
        let (options, folder) = (OpenOptions::read_only(), std::path::Path::new("."));
        let monitor = Monitor::default();
        let opened = open_packaged(&registry, package, disk, &options, folder, &monitor).unwrap();
        let source = Source::new(vec![opened]);
        Extraction::new(disk, source, ConvertOptions::new(Destination::Null))
    };
    let parts = vec![part(0), part(1)];
    (registry, parts)
}

#[test]
fn two_disks_are_read_at_once() {
    let text = ovf(&[("ovf:href=\"one\"", ""), ("ovf:href=\"two\"", "")]);
    let disk = vec![7; 1 << 20];
    let bytes = tar(&[("a.ovf", text.as_bytes()), ("one", &disk), ("two", &disk)]);
    let (armed, seen) = (AtomicBool::new(false), Default::default());
    let storage = Arc::new(Meeting { bytes, armed, seen });
    let package = Package::open(storage.clone(), &PackageLimits::default()).unwrap();
    let (registry, parts) = both_to_nothing(&package);
    storage.armed.store(true, Ordering::SeqCst);
    let report = extract(&registry, &package, parts, Some(2), &Monitor::default()).unwrap();
    assert_eq!(report.disks.len(), 2);
    assert!(report.disks.iter().all(|disk| disk.report.moved.read == 1 << 20), "{report:?}");
}

/// Takes a target name when all disks are converted and none is renamed yet, as another program
/// may.
struct Taking {
    folder: PathBuf,
    name: &'static str,
}

impl Progress for Taking {
    fn update(&self, done: u64, total: u64) {
        // Earlier, the other disk might not have started, and its open would fail.
        if done == total {
            let _ = std::fs::create_dir(self.folder.join(self.name));
        }
    }

    fn message(&self, _text: &str) {}
}

#[test]
fn a_target_that_cannot_get_its_name_takes_the_others_with_it() {
    let text = ovf(&[("ovf:href=\"one\"", ""), ("ovf:href=\"two\"", "")]);
    let disk = vec![7; 1 << 20];
    let bytes = tar(&[("a.ovf", text.as_bytes()), ("one", &disk), ("two", &disk)]);
    let storage = Arc::new(Meeting { bytes, armed: false.into(), seen: Default::default() });
    let package = Package::open(storage, &PackageLimits::default()).unwrap();
    let registry = Registry::new([&RawDriver as &'static dyn vdkit_block::FormatDriver]);
    let folder = tempfile::tempdir().unwrap();
    let part = |disk: usize, name: &str| {
        let options = OpenOptions::read_only();
        let monitor = Monitor::default();
        let opened =
            open_packaged(&registry, &package, disk, &options, folder.path(), &monitor).unwrap();
        let new = NewImage::new(folder.path().join(name), "raw");
        let options = ConvertOptions::new(Destination::New(new));
        Extraction::new(disk, Source::new(vec![opened]), options)
    };
    let names = || {
        let entries = std::fs::read_dir(folder.path()).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let taking = Taking { folder: folder.path().to_owned(), name: "two.raw" };
    let monitor = Monitor::new(&taking);
    let parts = vec![part(0, "one.raw"), part(1, "two.raw")];
    let error = extract(&registry, &package, parts, Some(2), &monitor).unwrap_err();
    assert!(error.to_string().contains("two.raw"), "{error}");
    assert_eq!(names(), ["two.raw"]);
    // A target that replaced a file stays, since the old file is gone.
    std::fs::write(folder.path().join("one.raw"), b"before").unwrap();
    std::fs::remove_dir(folder.path().join("two.raw")).unwrap();
    let parts = vec![part(0, "one.raw"), part(1, "two.raw")];
    extract(&registry, &package, parts, Some(2), &monitor).unwrap_err();
    assert_eq!(names(), ["one.raw", "two.raw"]);
    assert_eq!(std::fs::read(folder.path().join("one.raw")).unwrap(), disk);
}

#[test]
fn disks_are_extracted_where_no_thread_can_be_started() {
    if threadless_argument().is_none() {
        return run_threadless("disks_are_extracted_where_no_thread_can_be_started", "");
    }
    // Of the descriptor below, and of 1 MiB of zeroes.
    let described = "9f15e19a8235a79da0bc824a0c532abb6cdf87d6403f360409c5b1bbc8050a40";
    let hash = "30e14955ebf1352266dc2ff8067e68104607e750abb9d3b36582b8af909fcb58";
    let manifest =
        format!("SHA256(a.ovf)= {described}\nSHA256(one)= {hash}\nSHA256(two)= {hash}\n");
    let text = ovf(&[("ovf:href=\"one\"", ""), ("ovf:href=\"two\"", "")]);
    let disk = vec![0; 1 << 20];
    let files: [(&str, &[u8]); 4] =
        [("a.ovf", text.as_bytes()), ("a.mf", manifest.as_bytes()), ("one", &disk), ("two", &disk)];
    let bytes = tar(&files);
    let storage = Arc::new(Meeting { bytes, armed: false.into(), seen: Default::default() });
    let package = Package::open(storage, &PackageLimits::default()).unwrap();
    let (registry, parts) = both_to_nothing(&package);
    let report = extract(&registry, &package, parts, Some(4), &Monitor::default()).unwrap();
    assert_eq!((report.disks.len(), report.manifest), (2, "verified"));
}
