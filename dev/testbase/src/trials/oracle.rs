//! QEMU's programs on the images of a trial.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use vdkit_block::{GuestOffset, Repair, Storage};
use vdkit_chain::Disk;
use vdkit_storage::{CreateMode, FileOptions, FileStorage};

use super::{Trial, pattern};
use crate::{Rng, qemu};

/// A kind of images that QEMU knows too.
#[derive(Clone, Copy, Debug)]
pub struct Oracle {
    /// The images.
    pub trial: Trial,
    /// QEMU's name of the format.
    pub format: &'static str,
    /// QEMU's options for the same kind.
    pub options: &'static [&'static str],
    /// `qemu-img check` knows the format.
    pub checks: bool,
}

impl Oracle {
    fn open(&self, path: &Path, writable: bool) -> (Arc<dyn Storage>, Disk) {
        let options = if writable { FileOptions::read_write() } else { FileOptions::default() };
        let storage: Arc<dyn Storage> =
            Arc::new(FileStorage::open(path, &options).expect("a file"));
        let disk = self.trial.open(&storage, writable).expect("opening");
        (storage, disk)
    }

    fn create(&self, path: &Path) {
        let options = FileOptions::read_write().create(CreateMode::New);
        let storage = FileStorage::open(path, &options).expect("a new file");
        self.trial.create(&(Arc::new(storage) as Arc<dyn Storage>));
    }

    fn create_by_qemu(&self, path: &Path) {
        qemu::create(path, self.format, self.trial.guest_bytes, self.options, None);
    }

    /// Random writes by us, which the raw file gets too.
    fn write(&self, image: &Path, raw: &Path, rng: &mut Rng) {
        let (_, disk) = self.open(image, true);
        let raw = std::fs::OpenOptions::new().write(true).open(raw).expect("a file");
        for op in 0..12 {
            let at = rng.below(disk.guest_bytes());
            let len = (1 + rng.below([700, 70_000, 3 << 20][op as usize % 3]))
                .min(disk.guest_bytes() - at);
            let bytes = pattern(op, at, len);
            disk.write_at(&bytes, GuestOffset(at)).expect("writing");
            raw.write_all_at(&bytes, at).expect("writing");
        }
        let len = (96 << 10).min(disk.guest_bytes());
        disk.write_zeroes(GuestOffset(0), len, true).expect("zeroing");
        raw.write_all_at(&vec![0; len as usize], 0).expect("writing");
        disk.close().expect("closing");
    }

    /// Random writes by QEMU.
    fn write_by_qemu(&self, image: &Path, raw: &Path, rng: &mut Rng) {
        let sectors = self.trial.guest_bytes / 512;
        let commands: Vec<String> = (0..8)
            .map(|n| {
                let at = rng.below(sectors);
                let len = (1 + rng.below(3000)).min(sectors - at);
                format!("write -P {:#x} {} {}", 0x21 + n, at * 512, len * 512)
            })
            .collect();
        let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
        qemu::io(image, self.format, &commands);
        qemu::io(raw, "raw", &commands);
    }

    /// We and QEMU read the same from the image, and it is sound for both.
    fn judge(&self, image: &Path, raw: &Path, what: &str) {
        assert!(
            qemu::same((image, self.format), (raw, "raw")),
            "{what}: QEMU reads something else"
        );
        if self.checks {
            let checked = qemu::check(image, self.format, None);
            assert!(checked.clean(), "{what}: {}", checked.text);
        }
        let (storage, disk) = self.open(image, false);
        let report = self.trial.check(&storage, Repair::Nothing);
        let found = (report.corruptions, report.leaks);
        assert_eq!(found, (0, 0), "{what}: {:#?}", report.findings);
        let raw = std::fs::File::open(raw).expect("a file");
        assert_eq!(disk.guest_bytes(), raw.metadata().expect("a length").len(), "{what}: size");
        let mut at = 0;
        while at < disk.guest_bytes() {
            let len = (1 << 20).min(disk.guest_bytes() - at) as usize;
            let (mut found, mut wanted) = (vec![1; len], vec![2; len]);
            disk.read_at(&mut found, GuestOffset(at)).expect("reading");
            raw.read_exact_at(&mut wanted, at).expect("reading");
            assert!(found == wanted, "{what}: other bytes after {at:#x}");
            at += len as u64;
        }
    }

    /// Images made here and by QEMU, written by both in turn, must always be the same to both.
    pub fn by_turns(&self, rounds: u64) {
        for ours in [true, false] {
            let dir = tempfile::tempdir().expect("a folder");
            let (image, raw) = (dir.path().join("image"), dir.path().join("raw"));
            if ours {
                self.create(&image);
            } else {
                self.create_by_qemu(&image);
            }
            let (_, disk) = self.open(&image, false);
            let file = std::fs::File::create(&raw).expect("a file");
            file.set_len(disk.guest_bytes()).expect("a length");
            drop(disk);
            self.judge(&image, &raw, "new");
            let mut rng = Rng::new(5 + u64::from(ours));
            for round in 0..rounds {
                self.write(&image, &raw, &mut rng);
                self.judge(&image, &raw, &format!("ours {ours}, round {round}, after our writes"));
                self.write_by_qemu(&image, &raw, &mut rng);
                self.judge(&image, &raw, &format!("ours {ours}, round {round}, after QEMU's"));
            }
        }
    }

    /// Sizes that are changed here are what QEMU sees.
    pub fn resized(&self, sizes: &[u64]) {
        let dir = tempfile::tempdir().expect("a folder");
        let (image, raw) = (dir.path().join("image"), dir.path().join("raw"));
        self.create_by_qemu(&image);
        std::fs::File::create(&raw)
            .expect("a file")
            .set_len(self.open(&image, false).1.guest_bytes())
            .expect("a length");
        let mut rng = Rng::new(3);
        for size in sizes {
            self.write(&image, &raw, &mut rng);
            let (_, disk) = self.open(&image, true);
            disk.top().resize(*size).expect("resizing");
            let now = disk.guest_bytes();
            disk.close().expect("closing");
            // QEMU respects our lock.
            drop(disk);
            let file = std::fs::OpenOptions::new().write(true).open(&raw).expect("a file");
            file.set_len(now).expect("a length");
            self.judge(&image, &raw, &format!("resized to {size}"));
        }
    }
}
