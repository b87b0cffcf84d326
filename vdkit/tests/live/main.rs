//! Image chain changes under writing guests, compared with the guests' expected content.

mod guests;
mod power_cut;

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use guests::{Guests, let_work};
use vdkit::jobs::{CreateOptions, create};
use vdkit::live::LiveImages;
use vdkit::serve::{Export, ExportOptions, Images};
use vdkit::{Disk, GuestOffset, Monitor, OpenOptions, Options, Place, RefPolicy};
use vdkit_testkit::Rng;

/// Not a multiple of any cluster size.
const DISK_BYTES: u64 = (6 << 20) + 512 * 3;

struct Stage {
    folder: tempfile::TempDir,
    options: OpenOptions,
    live: LiveImages,
}

impl Stage {
    fn new(cache: &str) -> Self {
        let options = OpenOptions::read_write().cache(cache.parse().unwrap());
        let live = LiveImages::new(vdkit::registry(), options.clone());
        Self { folder: tempfile::tempdir().unwrap(), options, live }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn create(&self, name: &str, format: &str, options: &str) -> PathBuf {
        let path = self.path(name);
        let driver = vdkit::format(format).unwrap();
        let wanted = CreateOptions::new(&path, driver).guest_bytes(DISK_BYTES).options(
            Options::parse(format, driver.options(), options.split(',').filter(|o| !o.is_empty()))
                .unwrap(),
        );
        create(&vdkit::registry(), &wanted, &Monitor::default()).unwrap();
        path
    }

    fn serve(&self, path: &Path, format: &str) -> Arc<Export> {
        let options = self.options.clone().format(format);
        let disk = Disk::open(&vdkit::registry(), path, &options).unwrap();
        Export::new(disk, ExportOptions::default())
    }
}

fn content_of(path: &Path, format: &str) -> Vec<u8> {
    let options = OpenOptions::read_only().format(format);
    let disk = Disk::open(&vdkit::registry(), path, &options).unwrap();
    let mut bytes = vec![0; disk.guest_bytes() as usize];
    disk.read_at(&mut bytes, GuestOffset(0)).unwrap();
    bytes
}

fn assert_same(a: &[u8], b: &[u8], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    if let Some(at) = a.iter().zip(b).position(|(a, b)| a != b) {
        panic!("{what}: {:#x} instead of {:#x} at {at:#x}", a[at], b[at]);
    }
}

fn assert_sound(path: &Path) {
    let registry = vdkit::registry();
    let options = OpenOptions::read_only();
    let monitor = Monitor::default();
    let checked =
        vdkit::jobs::check(&registry, path, &options, vdkit::Repair::Nothing, &monitor).unwrap();
    assert!(checked.report.findings.is_empty(), "{}: {:?}", path.display(), checked.report);
}

/// Base images: format and options.
const BASES: [(&str, &str); 5] = [
    ("qcow2", "cluster_size=4K"),
    ("qcow2", ""),
    ("qcow2", "cluster_size=128K,extended_l2=on"),
    ("qcow2", "lazy_refcounts=on,cluster_size=16K"),
    ("raw", ""),
];

#[test]
fn overlays_are_put_under_writing_guests() {
    for (number, (format, options)) in BASES.into_iter().enumerate() {
        let mut rng = Rng::from_env(number as u64);
        println!("{format} {options}: seed {}", rng.seed());
        let stage = Stage::new("writeback");
        let first = stage.create("0", format, options);
        let export = stage.serve(&first, format);
        let mut guests = Guests::new(3, &vec![0; DISK_BYTES as usize], &mut rng);
        let mut frozen: Vec<(PathBuf, Vec<u8>)> = Vec::new();
        guests.work_while(&export, |steps| {
            let_work(steps, 300);
            for layer in 1..6 {
                let beneath = stage.path(&(layer - 1).to_string());
                let path = stage.path(&layer.to_string());
                let chain = stage.live.snapshot_external(&export, &path).unwrap();
                assert_eq!(chain.chain.len(), layer + 1);
                assert_eq!(chain.filename, path.display().to_string());
                // Other readers find a closed image.
                let format = if layer == 1 { format } else { "qcow2" };
                frozen.push((beneath.clone(), content_of(&beneath, format)));
                if format == "qcow2" {
                    assert_sound(&beneath);
                }
                let_work(steps, 200);
            }
        });
        export.close().unwrap();
        drop(export);
        for (layer, (path, before)) in frozen.iter().enumerate() {
            let format = if layer == 0 { format } else { "qcow2" };
            assert_same(&content_of(path, format), before, "an image that was frozen");
        }
        assert_same(&content_of(&stage.path("5"), "qcow2"), &guests.content(), "the disk");
        assert_sound(&stage.path("5"));
    }
}

#[test]
fn an_overlay_that_cannot_be_made_changes_nothing() {
    let stage = Stage::new("writeback");
    let export = stage.serve(&stage.create("a", "qcow2", ""), "qcow2");
    export.write(&[1; 4096], 0, false).unwrap();
    std::fs::write(stage.path("empty"), b"").unwrap();
    std::os::unix::fs::symlink(stage.path("nowhere"), stage.path("dangling")).unwrap();
    for name in ["a", "empty", "dangling", "none/b", "b/.."] {
        let error = stage.live.snapshot_external(&export, &stage.path(name)).unwrap_err();
        println!("{name}: {error}");
        assert_eq!(export.chain().chain.len(), 1);
    }
    let mut names: Vec<_> =
        stage.folder.path().read_dir().unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["a", "dangling", "empty"]);
    // Nor if the served image was moved away.
    std::fs::rename(stage.path("a"), stage.path("moved")).unwrap();
    let error = stage.live.snapshot_external(&export, &stage.path("b")).unwrap_err();
    assert!(matches!(error, vdkit::Error::File { .. } | vdkit::Error::Invalid { .. }), "{error}");
    std::fs::rename(stage.path("moved"), stage.path("a")).unwrap();
    stage.live.snapshot_external(&export, &stage.path("b")).unwrap();
    export.write(&[2; 4096], 4096, false).unwrap();
    export.close().unwrap();
    drop(export);
    let bytes = content_of(&stage.path("b"), "qcow2");
    assert!(bytes[..4096] == [1; 4096] && bytes[4096..8192] == [2; 4096]);
}

#[test]
fn a_frozen_image_can_be_read_by_others_and_written_by_none() {
    let stage = Stage::new("writeback");
    let base = stage.create("a", "qcow2", "");
    let export = stage.serve(&base, "qcow2");
    let open = |writable| {
        let options = OpenOptions::read_only().writable(writable).format("qcow2");
        Disk::open(&vdkit::registry(), &base, &options).map(drop)
    };
    assert!(matches!(open(false), Err(vdkit::Error::Locked { .. })));
    stage.live.snapshot_external(&export, &stage.path("b")).unwrap();
    open(false).unwrap();
    assert!(matches!(open(true), Err(vdkit::Error::Locked { .. })));
    export.close().unwrap();
    drop(export);
    open(true).unwrap();
}

/// The content of the overlay with its chain.
fn content_of_chain(path: &Path) -> Vec<u8> {
    content_of(path, "qcow2")
}

#[test]
fn overlays_are_committed_under_writing_guests() {
    for (number, (format, options)) in BASES.into_iter().enumerate() {
        let mut rng = Rng::from_env(100 + number as u64);
        println!("{format} {options}: seed {}", rng.seed());
        let stage = Stage::new("writeback");
        let base = stage.create("base", format, options);
        let export = stage.serve(&base, format);
        let mut guests = Guests::new(3, &vec![0; DISK_BYTES as usize], &mut rng);
        let rounds = 8;
        guests.work_while(&export, |steps| {
            for round in 0..rounds {
                let_work(steps, 150);
                let path = stage.path(&round.to_string());
                stage.live.snapshot_external(&export, &path).unwrap();
                let_work(steps, 150);
                // Forced, since the empty overlays of earlier rounds depend on the base too.
                let done = stage.live.commit(&export, true).unwrap();
                assert_eq!(done.now.chain, [base.display().to_string()]);
                assert_eq!(done.overlay, path.display().to_string());
            }
            let_work(steps, 150);
        });
        export.close().unwrap();
        drop(export);
        let content = content_of(&base, format);
        assert_same(&content, &guests.content(), "the base");
        if format == "qcow2" {
            assert_sound(&base);
        }
        for round in 0..rounds {
            let path = stage.path(&round.to_string());
            assert_sound(&path);
            assert_same(&content_of_chain(&path), &content, "an overlay that was committed");
        }
    }
}

#[test]
fn a_commit_that_is_cancelled_changes_nothing_and_can_be_run_again() {
    for (number, (format, options)) in BASES.into_iter().enumerate() {
        let mut rng = Rng::from_env(200 + number as u64);
        println!("{format} {options}: seed {}", rng.seed());
        let stage = Stage::new("writeback");
        let base = stage.create("base", format, options);
        let export = stage.serve(&base, format);
        let mut guests = Guests::new(2, &vec![0; DISK_BYTES as usize], &mut rng);
        let mut cancelled = 0;
        guests.work_while(&export, |steps| {
            for round in 0..12 {
                if export.chain().chain.len() == 1 {
                    stage.live.snapshot_external(&export, &stage.path(&round.to_string())).unwrap();
                }
                let_work(steps, 100);
                std::thread::scope(|scope| {
                    let commit = scope.spawn(|| stage.live.commit(&export, true));
                    let mut stopped = false;
                    while !commit.is_finished() && !stopped {
                        stopped = export.cancel_job("commit").is_ok();
                        std::hint::spin_loop();
                    }
                    match commit.join().unwrap() {
                        Ok(_) => assert_eq!((export.chain().chain.len(), stopped), (1, false)),
                        Err(vdkit::Error::Interrupted) => {
                            cancelled += 1;
                            assert_eq!(export.chain().chain.len(), 2);
                            // Closed, and readable.
                            content_of(&base, format);
                        }
                        Err(error) => panic!("{error}"),
                    }
                });
            }
        });
        println!("{cancelled} of 12 were cancelled");
        if export.chain().chain.len() == 2 {
            stage.live.commit(&export, true).unwrap();
        }
        export.close().unwrap();
        drop(export);
        assert_same(&content_of(&base, format), &guests.content(), "the base");
    }
}

#[test]
fn a_commit_that_would_damage_something_is_refused() {
    let stage = Stage::new("writeback");
    let base = stage.create("base", "qcow2", "");
    let export = stage.serve(&base, "qcow2");
    let refused = |words: &str, force| {
        let error = stage.live.commit(&export, force).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    refused("has no backing image", false);
    stage.live.snapshot_external(&export, &stage.path("a")).unwrap();
    export.write(&[1; 4096], 4096, false).unwrap();

    // Another process reads the base.
    let options = OpenOptions::read_only().format("qcow2");
    let reader = Disk::open(&vdkit::registry(), &base, &options).unwrap();
    refused("is in use", true);
    drop(reader);
    // Another job runs.
    let job = export.begin_job("test").unwrap();
    refused("a test is running", true);
    assert!(export.grow(DISK_BYTES * 2).unwrap_err().to_string().contains("a test is running"));
    drop(job);
    // Another overlay depends on the base.
    let backing = Some(vdkit::jobs::NewBacking::new("base", Some("qcow2".to_owned())).open(false));
    let driver = vdkit::format("qcow2").unwrap();
    let path = stage.path("other");
    let other = CreateOptions::new(&path, driver).guest_bytes(DISK_BYTES).backing(backing);
    create(&vdkit::registry(), &other, &Monitor::default()).unwrap();
    refused("other", false);
    std::fs::remove_file(&path).unwrap();
    // A bitmap would be lost.
    let new = vdkit::NewBitmap { name: "b0", granularity: None, enabled: true };
    export.alone(|disk| disk.top().bitmaps().unwrap().add(&new)).unwrap();
    refused("b0", false);
    assert_eq!(export.chain().chain.len(), 2);

    stage.live.commit(&export, true).unwrap();
    assert_eq!(export.chain().chain, [base.display().to_string()]);
    std::fs::remove_file(stage.path("a")).unwrap();
    // A larger overlay grows its base.
    stage.live.snapshot_external(&export, &stage.path("b")).unwrap();
    export.grow(DISK_BYTES * 2).unwrap();
    export.write(&[2; 512], DISK_BYTES * 2 - 512, false).unwrap();
    stage.live.commit(&export, false).unwrap();
    assert_eq!(export.size(), DISK_BYTES * 2);
    export.close().unwrap();
    drop(export);
    let bytes = content_of(&base, "qcow2");
    assert!(bytes[4096..8192] == [1; 4096] && bytes.ends_with(&[2; 512]));
    assert_eq!(bytes.iter().filter(|b| **b != 0).count(), 4096 + 512);
}

/// Data missing from a truncated overlay must not be zeroed in the base.
#[test]
fn an_overlay_that_was_cut_is_not_committed() {
    let stage = Stage::new("writeback");
    let base = stage.create("base", "qcow2", "");
    let export = stage.serve(&base, "qcow2");
    export.write(&[1; 1 << 20], 0, false).unwrap();
    let overlay = stage.path("overlay");
    stage.live.snapshot_external(&export, &overlay).unwrap();
    export.write(&[2; 1 << 20], 0, false).unwrap();
    export.flush().unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&overlay).unwrap();
    let len = file.metadata().unwrap().len();
    assert!(len > 1 << 20);
    file.set_len(768 << 10).unwrap();
    let error = stage.live.commit(&export, false).unwrap_err().to_string();
    assert!(error.contains("the file was truncated"), "{error}");
    assert_eq!(export.chain().chain.len(), 2);
    assert!(content_of(&base, "qcow2")[..1 << 20] == [1; 1 << 20]);
    file.set_len(len).unwrap();
    stage.live.commit(&export, false).unwrap();
    assert_eq!(export.chain().chain.len(), 1);
}

#[test]
fn a_commit_that_finds_no_space_leaves_the_disk_and_can_be_run_again() {
    let Some(small) = vdkit_testkit::fs::mounted("tmpfs", 16 << 20) else { return };
    for (format, options) in [("qcow2", "cluster_size=4K"), ("raw", "")] {
        let mut rng = Rng::from_env(300);
        let stage = Stage::new("writeback");
        let made = stage.create("base", format, options);
        let base = small.path().join(format);
        match format {
            // A copy would have no holes.
            "raw" => std::fs::File::create(&base).and_then(|file| file.set_len(DISK_BYTES)),
            _ => std::fs::copy(&made, &base).map(drop),
        }
        .unwrap();
        let export = stage.serve(&base, format);
        let overlay = stage.path("a");
        stage.live.snapshot_external(&export, &overlay).unwrap();
        let ballast = small.path().join("ballast");
        std::fs::write(&ballast, vec![1; 13 << 20]).unwrap();
        // More than there is space for, whichever guest writes.
        let mut known = vec![0; DISK_BYTES as usize];
        rng.fill(&mut known);
        export.write(&known, 0, false).unwrap();
        let mut guests = Guests::new(2, &known, &mut rng);
        guests.work_while(&export, |steps| {
            let_work(steps, 300);
            let error = stage.live.commit(&export, false).unwrap_err();
            assert_eq!(error.kind(), vdkit::ErrorKind::NoSpace, "{error}");
            assert_eq!(export.chain().chain.len(), 2);
            let_work(steps, 300);
            std::fs::remove_file(&ballast).unwrap();
            stage.live.commit(&export, false).unwrap();
            assert_eq!(export.chain().chain.len(), 1);
        });
        export.close().unwrap();
        drop(export);
        let content = content_of(&base, format);
        assert_same(&content, &guests.content(), "the base");
        let trusted =
            OpenOptions::read_only().refs(RefPolicy::Folders(vec![small.path().to_owned()]));
        let disk = Disk::open(&vdkit::registry(), &overlay, &trusted).unwrap();
        let mut bytes = vec![0; content.len()];
        disk.read_at(&mut bytes, GuestOffset(0)).unwrap();
        assert_same(&bytes, &content, "the overlay");
        drop(disk);
        std::fs::remove_file(&base).unwrap();
    }
}

/// A reader through the overlay keeps the space that it resolved while the base is written.
#[test]
fn a_cluster_freed_in_the_base_is_not_used_again_under_a_reader() {
    const CLUSTER: u64 = 65_536;
    let stage = Stage::new("writeback");
    let path = stage.create("base.qcow2", "qcow2", "cluster_size=64k");
    let export = stage.serve(&path, "qcow2");
    export.write(&[0x11; CLUSTER as usize], 0, true).unwrap();
    stage.live.snapshot_external(&export, &stage.path("top.qcow2")).unwrap();
    export.close().unwrap();
    drop(export);

    let registry = vdkit::registry();
    let options = stage.options.clone().format("qcow2");
    let mut disk = Disk::open(&registry, stage.path("top.qcow2"), &options).unwrap();
    let base = disk.open_beneath(&registry).unwrap();
    disk.share_beneath(&base);
    let guard = disk.enter();
    let extent = disk.layers()[1].format().resolve(GuestOffset(0), CLUSTER).unwrap();
    let Place::Data { offset, .. } = extent.place else { panic!("{extent:?}") };
    base.discard(GuestOffset(0), CLUSTER).unwrap();
    // Everything that could reuse the cluster: flushes, and more writes than are reserved.
    for i in 1..60 {
        base.write_at(&[0x22; CLUSTER as usize], GuestOffset(i * CLUSTER)).unwrap();
        base.flush().unwrap();
    }
    let mut found = vec![0; CLUSTER as usize];
    let file = std::fs::File::open(&path).unwrap();
    file.read_exact_at(&mut found, offset.0).unwrap();
    assert!(found.iter().all(|byte| *byte == 0x11), "the reader's cluster changed under it");
    drop(guard);
    disk.end_sharing_beneath().unwrap();
    base.close().unwrap();
}

/// A disk grows during a commit, as by appending to its file: at any moment, and with writes to the
/// new part.
#[test]
fn a_disk_grows_while_a_commit_runs() {
    for (number, (format, options)) in BASES.into_iter().enumerate() {
        let mut rng = Rng::from_env(400 + number as u64);
        println!("{format} {options}: seed {}", rng.seed());
        let stage = Stage::new("writeback");
        let base = stage.create("base", format, options);
        let export = stage.serve(&base, format);
        let mut known = vec![0; DISK_BYTES as usize];
        rng.fill(&mut known);
        let mut grown = 0;
        for round in 0..10 {
            stage.live.snapshot_external(&export, &stage.path(&round.to_string())).unwrap();
            export.write(&known, 0, false).unwrap();
            std::thread::scope(|scope| {
                let commit = scope.spawn(|| stage.live.commit(&export, true));
                while export.job().is_none() && !commit.is_finished() {
                    std::hint::spin_loop();
                }
                while !commit.is_finished() && known.len() < 3 * DISK_BYTES as usize {
                    let (at, len) = (known.len(), 512 * (1 + rng.below(300) as usize));
                    known.resize(at + len + 512 * rng.below(200) as usize, 0);
                    export.grow(known.len() as u64).unwrap();
                    rng.fill(&mut known[at..at + len]);
                    export.write(&known[at..at + len], at as u64, false).unwrap();
                    grown += 1;
                }
                commit.join().unwrap().unwrap();
            });
            assert_eq!(export.chain().chain.len(), 1);
            assert_eq!(export.size(), known.len() as u64);
        }
        assert!(grown > 0, "nothing ran beside anything");
        export.close().unwrap();
        drop(export);
        assert_same(&content_of(&base, format), &known, "the base");
        if format == "qcow2" {
            assert_sound(&base);
        }
    }
}
