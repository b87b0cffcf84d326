//! docs/library.md: its recipes, compiled and run in the page's order, and its table of features.

#![allow(clippy::items_after_statements, reason = "each recipe stands for itself")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vdkit::{Disk, GuestOffset, Monitor, OpenOptions, Options};

const PAGE: &str = include_str!("../../docs/library.md");

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// Creates an image; returns it opened for reading.
#[rustfmt::skip]
fn disks(folder: &Path) -> Outcome<(vdkit::Registry, PathBuf, Disk)> {
    let registry = vdkit::registry(); // the formats that can be opened
    let path = folder.join("disk.qcow2");

    use vdkit::jobs::{CreateOptions, create};

    let driver = vdkit::format("qcow2")?;
    let options = Options::parse("qcow2", driver.options(), ["cluster_size=64K"])?;
    let new = CreateOptions::new(&path, driver).guest_bytes(64 << 20).options(options);
    create(&registry, &new, &Monitor::default())?;

    let disk = Disk::open(&registry, &path, &OpenOptions::read_write())?;
    disk.write_at(b"hello", GuestOffset(1 << 20))?;
    disk.flush()?;
    disk.close()?;
    drop(disk); // unlocks the file

    let disk = Disk::open(&registry, &path, &OpenOptions::read_only())?;
    let mut bytes = [0; 5];
    disk.read_at(&mut bytes, GuestOffset(1 << 20))?;
    assert_eq!(&bytes, b"hello");

    use std::io::{Read, Seek, SeekFrom};

    let mut stream = disk.stream();
    stream.seek(SeekFrom::Start(1 << 20))?;
    let mut text = String::new();
    stream.by_ref().take(5).read_to_string(&mut text)?;
    assert_eq!(text, "hello");

    let extents = disk.extents(GuestOffset(0), disk.guest_bytes())?;
    let data: u64 = extents
        .filter_map(|extent| extent.map(|e| (!e.place.reads_zero()).then_some(e.len)).transpose())
        .sum::<vdkit::Result<u64>>()?;
    assert_eq!(data, 64 << 10);

    Ok((registry, path, disk))
}

#[rustfmt::skip]
fn queue(registry: vdkit::Registry, path: PathBuf) -> Outcome {
    use vdkit::{Queue, Request};

    let shared = Arc::new(Disk::open(&registry, &path, &OpenOptions::read_only())?);
    let queue: Queue = Queue::new(shared, 4)?; // four threads
    for i in 0..64 {
        let buffer = vec![0; 64 << 10];
        queue.submit(i, Request::Read { at: GuestOffset(i << 16), buffer });
    }
    let mut found = None;
    while queue.outstanding() > 0 {
        for mut done in queue.reap(8, None) {
            let (cookie, buffer) = (done.cookie, done.buffer.take());
            done.result()?;
            if buffer.is_some_and(|bytes| bytes.starts_with(b"hello")) {
                found = Some(cookie);
            }
        }
    }
    assert_eq!(found, Some(16));
    drop(queue); // waits for requests in flight

    Ok(())
}

#[rustfmt::skip]
fn jobs(registry: vdkit::Registry, folder: &Path, path: PathBuf, disk: Disk) -> Outcome {
    use vdkit::jobs::{ConvertOptions, Destination, NewImage, Source, convert};
    use vdkit::{CancelToken, Progress};

    struct Percent;
    impl Progress for Percent {
        fn update(&self, done: u64, total: u64) {
            eprint!("\r{} %", done * 100 / total.max(1));
        }
        fn message(&self, _text: &str) {}
    }

    let cancel = CancelToken::default(); // cancel.cancel(), from any thread, ends the job
    let monitor = Monitor::new(&Percent).cancelled_by(cancel.clone());
    let target = folder.join("disk.vmdk");
    let options = ConvertOptions::new(Destination::New(NewImage::new(&target, "vmdk")));
    convert(&registry, &Source::new(vec![disk]), &options, &monitor)?;

    use vdkit::jobs::{CompareOptions, compare};

    let a = Disk::open(&registry, &path, &OpenOptions::read_only())?;
    let b = Disk::open(&registry, &target, &OpenOptions::read_only())?;
    assert!(compare(&a, &b, &CompareOptions::default(), &Monitor::default())?.identical);
    drop((a, b)); // the next recipe writes

    use vdkit::Repair;
    use vdkit::jobs::check;

    let options = OpenOptions::read_only();
    let checked = check(&registry, &path, &options, Repair::Leaks, &Monitor::default())?;
    assert_eq!((checked.report.corruptions, checked.report.leaks), (0, 0));

    use vdkit::jobs::inspect::{InspectOptions, Verdict, inspect};
    use vdkit::storage::FileOptions;

    let storage = registry.open_storage(&path, &FileOptions::read_only())?;
    assert_eq!(inspect(storage, &InspectOptions::default())?.verdict, Verdict::Accept);
    Ok(())
}

#[rustfmt::skip]
fn storages(registry: vdkit::Registry, path: PathBuf) -> Outcome {
    use vdkit::storage::MemoryStorage;

    let bytes = std::fs::read(&path)?;
    let memory = Arc::new(MemoryStorage::from_bytes("disk in memory", &bytes));
    let disk = Disk::open_storage(&registry, memory, &OpenOptions::read_only())?;
    assert_eq!(disk.guest_bytes(), 64 << 20);

    use vdkit::ErrorKind;

    let damaged = MemoryStorage::from_bytes("damaged.qcow2", &bytes[..70_000]);
    let disk = Disk::open_storage(&registry, Arc::new(damaged), &OpenOptions::read_only());
    let error = disk.and_then(|disk| disk.read_at(&mut [0; 5], GuestOffset(1 << 20))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert_eq!(error.file(), Some("damaged.qcow2"));

    Ok(())
}

#[test]
fn the_recipes_work() {
    let folder = tempfile::tempdir().unwrap();
    let (registry, path, disk) = disks(folder.path()).unwrap();
    queue(registry.clone(), path.clone()).unwrap();
    jobs(registry.clone(), folder.path(), path.clone(), disk).unwrap();
    storages(registry, path).unwrap();
}

#[test]
fn the_page_shows_what_is_run() {
    let mut source = include_str!("library.rs");
    for block in PAGE.split("```rust\n").skip(1) {
        let block = block.split_once("```").expect("a fence ends").0;
        for line in block.lines().filter(|line| !line.trim().is_empty()) {
            let at = source.find(line);
            let at = at.unwrap_or_else(|| panic!("only the page has, or has it elsewhere: {line}"));
            source = &source[at + line.len()..];
        }
    }
}

#[test]
fn the_page_names_each_feature_and_the_oldest_compiler() {
    let manifest = include_str!("../Cargo.toml");
    let features = manifest.split_once("[features]\n").expect("features").1;
    let features = features.split_once("\n[").expect("a next table").0;
    for line in features.lines().filter(|line| line.contains(" = [") && !line.starts_with('#')) {
        let name = line.split_once(" =").expect("a name").0;
        assert!(name == "default" || PAGE.contains(&format!("`{name}`")), "{name}");
    }
    let oldest = env!("CARGO_PKG_RUST_VERSION");
    assert!(PAGE.contains(&format!("Rust {oldest}")), "the page does not name Rust {oldest}");
}
