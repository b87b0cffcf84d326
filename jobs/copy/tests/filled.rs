//! Conversions that fill their target, conversions onto a backing image that the source's chain
//! does not have, conversions into an existing image that fail, and their progress.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use vdkit_block::{
    BackingRef, CancelToken, Error, FormatDriver, GuestOffset, Monitor, NewBitmap, Progress, Repair,
};
use vdkit_chain::{Disk, OpenOptions, Registry};
use vdkit_copy::{
    Backing, BrokenBitmaps, ConvertOptions, CreateOptions, Destination, ExistingImage, NewImage,
    Source, bitmaps, convert, create,
};
use vdkit_image::check;
use vdkit_qcow2::Qcow2Driver;
use vdkit_raw::RawDriver;

const MIB: usize = 1 << 20;

fn registry() -> Registry {
    let drivers: [&'static dyn FormatDriver; 2] = [&Qcow2Driver, &RawDriver];
    Registry::new(drivers)
}

fn raw(path: &Path) -> Disk {
    Disk::open(&registry(), path, &OpenOptions::read_only().format("raw")).unwrap()
}

fn new_image(path: &Path, format: &str, backing: Option<BackingRef>) -> Destination {
    Destination::New(NewImage::new(path, format).backing(backing))
}

#[test]
fn a_filled_target_has_all_its_space() {
    let folder = tempfile::tempdir().unwrap();
    let from = folder.path().join("from");
    let mut bytes = vec![0; 4 * MIB];
    bytes[MIB..MIB + 5000].fill(7);
    std::fs::write(&from, &bytes).unwrap();
    File::options().write(true).open(&from).unwrap().set_len(6 << 20).unwrap();
    bytes.resize(6 * MIB, 0);
    for format in ["raw", "qcow2"] {
        let to = folder.path().join(format);
        let mut options = ConvertOptions::new(new_image(&to, format, None));
        options.fill = true;
        let source = Source::new(vec![raw(&from)]);
        convert(&registry(), &source, &options, &Monitor::default()).unwrap();
        assert!(to.metadata().unwrap().blocks() * 512 >= 6 << 20, "{format}");
        let made = Disk::open(&registry(), &to, &OpenOptions::read_only().format(format)).unwrap();
        let mut found = vec![1; 6 * MIB];
        made.read_at(&mut found, GuestOffset(0)).unwrap();
        assert!(found == bytes, "{format}");
    }
}

#[test]
fn a_backing_image_outside_the_chain_must_be_trusted() {
    let folder = tempfile::tempdir().unwrap();
    let [from, base, to] = ["from", "base", "to"].map(|name| folder.path().join(name));
    std::fs::write(&from, vec![5; MIB]).unwrap();
    std::fs::write(&base, vec![5; MIB]).unwrap();
    let reference = BackingRef {
        name: "base".to_owned(),
        format: Some("raw".to_owned()),
        identity: None,
        modified: None,
    };
    for trusted in [false, true] {
        let mut options = ConvertOptions::new(new_image(&to, "qcow2", Some(reference.clone())));
        let opening = OpenOptions::read_only().format("raw");
        options.backing = Some(Backing::new(base.clone(), opening).trusted(trusted));
        let source = Source::new(vec![raw(&from)]);
        let done = convert(&registry(), &source, &options, &Monitor::default());
        assert_eq!(done.is_ok(), trusted, "{done:?}");
    }
}

/// Truncates the source by the cluster of its bitmap's marks, once the disk is copied.
struct Truncating(PathBuf);

impl Progress for Truncating {
    fn update(&self, done: u64, total: u64) {
        let file = File::options().write(true).open(&self.0).unwrap();
        let len = file.metadata().unwrap().len();
        if done == total {
            file.set_len(len - 65536).unwrap();
        }
    }

    fn message(&self, _text: &str) {}
}

#[test]
fn an_existing_target_is_closed_when_bitmaps_cannot_be_copied() {
    let folder = tempfile::tempdir().unwrap();
    let [from, to] = ["from", "to"].map(|name| folder.path().join(name));
    let writable = |path: &Path| {
        Disk::open(&registry(), path, &OpenOptions::read_write().format("qcow2")).unwrap()
    };
    for path in [&from, &to] {
        let new = CreateOptions::new(path, &Qcow2Driver).guest_bytes(4 << 20);
        create(&registry(), &new, &Monitor::default()).unwrap();
    }
    let disk = writable(&from);
    disk.write_at(&vec![7; MIB], GuestOffset(0)).unwrap();
    disk.close().unwrap();
    drop(disk);
    let disk = writable(&from);
    let bitmap = NewBitmap { name: "changed", granularity: None, enabled: true };
    bitmaps(&disk).unwrap().add(&bitmap).unwrap();
    disk.write_at(&vec![8; MIB], GuestOffset(0)).unwrap();
    disk.close().unwrap();
    drop(disk);
    let options = OpenOptions::read_only().format("qcow2");
    let source = Source::new(vec![Disk::open(&registry(), &from, &options).unwrap()]);
    let existing = ExistingImage::new(&to).format(Some("qcow2".to_owned()));
    let mut options = ConvertOptions::new(Destination::Into(existing));
    options.bitmaps = Some(BrokenBitmaps::Refuse);
    let truncating = Truncating(from);
    let error = convert(&registry(), &source, &options, &Monitor::new(&truncating)).unwrap_err();
    let options = OpenOptions::read_only();
    let checked = check(&registry(), &to, &options, Repair::Nothing, &Monitor::default()).unwrap();
    assert_eq!((checked.report.leaks, checked.report.corruptions), (0, 0), "{error}");
    let mut found = [0];
    writable(&to).read_at(&mut found, GuestOffset(0)).unwrap();
    assert_eq!(found, [8], "{error}");
}

/// Notes all figures, and ends the job when it is so far.
struct Figures {
    noted: Mutex<Vec<(u64, u64)>>,
    cancel: CancelToken,
    until: u64,
}

impl Progress for Figures {
    fn update(&self, done: u64, total: u64) {
        self.noted.lock().unwrap().push((done, total));
        if done > self.until {
            self.cancel.cancel();
        }
    }

    fn message(&self, _text: &str) {}
}

/// The bar stood at its end while the copy was read back.
#[test]
fn verifying_goes_on_counting_where_copying_ended() {
    let folder = tempfile::tempdir().unwrap();
    let [from, to] = ["from", "to"].map(|name| folder.path().join(name));
    // With holes between and behind the data.
    let file = File::create(&from).unwrap();
    file.set_len(8 << 20).unwrap();
    for at in [0, 4 << 20] {
        file.write_all_at(&[7; MIB], at).unwrap();
    }
    let bytes = 8 << 20;
    for until in [u64::MAX, bytes] {
        let (noted, cancel) = (Mutex::default(), CancelToken::default());
        let figures = Figures { noted, cancel: cancel.clone(), until };
        let mut options = ConvertOptions::new(new_image(&to, "qcow2", None));
        (options.verify, options.threads) = (true, Some(1));
        let source = Source::new(vec![raw(&from)]);
        let monitor = Monitor::new(&figures).cancelled_by(cancel);
        let done = convert(&registry(), &source, &options, &monitor);
        let noted = figures.noted.into_inner().unwrap();
        assert!(noted.is_sorted(), "{noted:?}");
        assert!(noted.iter().all(|(_, total)| *total == 2 * bytes), "{noted:?}");
        if until == bytes {
            assert!(matches!(done, Err(Error::Interrupted)), "{done:?}");
        } else {
            assert_eq!(done.unwrap().verified, Some(bytes));
            assert_eq!(noted.last(), Some(&(2 * bytes, 2 * bytes)));
            std::fs::remove_file(&to).unwrap();
        }
    }
}
