//! Comparison with other programs: QEMU reads and writes images of vdkit, and vdkit those of QEMU;
//! libvhdi reads both.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use common::{MIB, Op, apply, check, create, for_seeds, open_format, random_op, same, sound};
use tempfile::TempDir;
use vdkit_block::{FormatDriver, Limits, Repair, Storage};
use vdkit_chain::Disk;
use vdkit_storage::{FileOptions, FileStorage};
use vdkit_testbase::{Rng, libvhdi_reads, qemu, require_peer};
use vdkit_vhdx::VhdxDriver;

struct Scratch {
    folder: TempDir,
}

impl Scratch {
    fn new() -> Option<Self> {
        let there = require_peer("qemu-img") && require_peer("qemu-io");
        there.then(|| Self { folder: tempfile::tempdir().expect("a scratch folder") })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Asserts that QEMU finds no errors, and that QEMU and libvhdi read the guest's content.
    fn all_agree(&self, image: &Path, guest: &[u8], what: &str) {
        let raw = self.path("guest.raw");
        std::fs::write(&raw, guest).expect("a scratch file");
        // QEMU rejects sectors of 4 KiB.
        if !what.starts_with(LARGE_SECTORS) {
            let checked = qemu::check(image, "vhdx", None);
            assert!(checked.clean(), "{what}: {}", checked.text);
            let same = qemu::same((image, "vhdx"), (&raw, "raw"));
            assert!(same, "{what}: QEMU reads something else");
        }
        libvhdi_reads(&raw, &[image], what);
    }
}

fn file(path: &Path, writable: bool) -> Arc<dyn Storage> {
    let options = if writable { FileOptions::read_write() } else { FileOptions::default() };
    Arc::new(FileStorage::open(path, &options).expect("opening a file"))
}

fn new_file(path: &Path, size: u64, options: &str) {
    std::fs::File::create(path).expect("a scratch file");
    create(&file(path, true), size, options, None);
}

fn open(path: &Path, writable: bool) -> Disk {
    common::disk_of(open_format(&file(path, writable), writable).expect("opening"), writable)
}

/// Operations of vdkit, with reopens in between.
fn write_here(path: &Path, guest: &mut Vec<u8>, rng: &mut Rng, resizes: bool) {
    let mut disk = open(path, true);
    for id in 0..25 {
        let op = random_op(rng, guest.len() as u64, resizes);
        match op {
            Op::Reopen | Op::Abandon => {
                if op == Op::Reopen { disk.close() } else { disk.flush() }.expect("flushing");
                drop(disk);
                disk = open(path, true);
            }
            op => {
                apply(&disk, guest, op, id + 1).unwrap_or_else(|error| panic!("{op:?}: {error}"));
            }
        }
    }
    disk.close().expect("closing");
}

/// Writes with qemu-io.
fn write_there(path: &Path, guest: &mut [u8], rng: &mut Rng) {
    let mut commands = Vec::new();
    for i in 0..6 {
        // QEMU writes VHDX images in whole sectors.
        let at = rng.below(guest.len() as u64) / 4096 * 4096;
        let len = (4096 * (1 + rng.below(300))).min(guest.len() as u64 - at) / 4096 * 4096;
        if len == 0 {
            continue;
        }
        commands.push(format!("write -P {} {at} {len}", 100 + i));
        guest[at as usize..(at + len) as usize].fill(100 + i);
    }
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    qemu::io(path, "vhdx", &commands);
}

const LARGE_SECTORS: &str = "logical_sector_size=4096";

const OPTIONS: [&str; 9] = [
    "",
    "subformat=fixed",
    "block_size=1M",
    "block_size=1M,subformat=fixed",
    "block_size=2M,log_size=3M",
    "block_size=256M",
    "block_size=4M,block_state_zero=off",
    "logical_sector_size=4096,block_size=1M",
    "logical_sector_size=4096,subformat=fixed",
];

#[test]
fn what_is_made_and_written_here_is_read_elsewhere() {
    let Some(scratch) = Scratch::new() else { return };
    for_seeds(1, |seed| {
        for (index, options) in OPTIONS.iter().enumerate() {
            let mut rng = Rng::new(seed + index as u64);
            let path = scratch.path("ours.vhdx");
            let size = 5 * MIB + 4096 * (1 + rng.below(500));
            new_file(&path, size, options);
            let mut guest = vec![0; size as usize];
            scratch.all_agree(&path, &guest, &format!("{options}: new"));
            write_here(&path, &mut guest, &mut rng, true);
            scratch.all_agree(&path, &guest, &format!("{options}: written here"));
            if !options.starts_with(LARGE_SECTORS) {
                let end = guest.len() / 4096 * 4096;
                write_there(&path, &mut guest[..end], &mut rng);
                same(&open(&path, false), &guest, &format!("{options}: then written by QEMU"));
                sound(&file(&path, false), false, "written by QEMU");
            }
            write_here(&path, &mut guest, &mut rng, false);
            scratch.all_agree(&path, &guest, &format!("{options}: then here again"));
        }
    });
}

#[test]
fn what_qemu_makes_and_writes_is_read_and_written_here() {
    let Some(scratch) = Scratch::new() else { return };
    for_seeds(1, |seed| {
        for (index, options) in OPTIONS.iter().enumerate() {
            if options.starts_with(LARGE_SECTORS) {
                continue; // not an option of QEMU's
            }
            let mut rng = Rng::new(seed + index as u64);
            let path = scratch.path("theirs.vhdx");
            let size = 5 * MIB + 512 * (1 + rng.below(4000));
            let list: Vec<&str> = Some(*options).filter(|o| !o.is_empty()).into_iter().collect();
            qemu::create(&path, "vhdx", size, &list, None);
            let mut guest = vec![0; size as usize];
            same(&open(&path, false), &guest, &format!("{options}: new"));
            sound(&file(&path, false), false, &format!("{options}: new"));
            write_there(&path, &mut guest, &mut rng);
            same(&open(&path, false), &guest, &format!("{options}: written by QEMU"));
            sound(&file(&path, false), false, &format!("{options}: written by QEMU"));
            write_here(&path, &mut guest, &mut rng, true);
            scratch.all_agree(&path, &guest, &format!("{options}: then here"));
        }
    });
}

/// QEMU writes an entry to its log, and then fails to write it in place.
#[test]
fn a_log_that_qemu_left_is_replayed_here_as_it_is_there() {
    let Some(scratch) = Scratch::new() else { return };
    for (options, at) in [("block_size=1M", 3 * MIB), ("block_size=2M,block_state_zero=off", 0)] {
        let (path, theirs) = (scratch.path("cut.vhdx"), scratch.path("theirs.vhdx"));
        qemu::create(&path, "vhdx", 16 * MIB, &[options], None);
        qemu::io(&path, "vhdx", &["write -P 9 10M 100k"]);
        let mut guest = vec![0; 16 << 20];
        guest[10 << 20..(10 << 20) + (100 << 10)].fill(9);
        // The block allocation table follows the log of 1 MiB.
        let table = 2 * MIB / 512;
        let image = format!(
            "driver=vhdx,file.driver=blkdebug,file.image.driver=file,file.image.filename={},\
             file.inject-error.0.event=none,file.inject-error.0.iotype=write,\
             file.inject-error.0.sector={table},file.inject-error.0.errno=5",
            path.display()
        );
        let write = format!("write -P 7 {at} 64k");
        let out = Command::new("qemu-io").args(["--image-opts", &image, "-c", &write]).output();
        assert!(!out.expect("qemu-io").status.success(), "the table cannot be written");
        std::fs::copy(&path, &theirs).expect("a copy");
        let at = at as usize;
        guest[at..at + (64 << 10)].fill(7);
        let info = VhdxDriver.describe(&file(&path, false), &Limits::default());
        assert!(info.expect("describing").dirty, "there is a log to replay");
        same(&open(&path, false), &guest, "read through QEMU's log");
        sound(&file(&path, false), true, "read through QEMU's log");
        let disk = open(&path, true);
        same(&disk, &guest, "replayed");
        disk.close().expect("closing");
        drop(disk);
        scratch.all_agree(&path, &guest, "replayed here");
        assert_eq!(qemu::check(&theirs, "vhdx", Some("all")).code, 0);
        scratch.all_agree(&theirs, &guest, "replayed there");
    }
}

#[test]
fn what_is_abandoned_here_is_replayed_by_qemu() {
    let Some(scratch) = Scratch::new() else { return };
    for (options, flushes) in [("block_size=1M", 1), ("block_size=1M", 200), ("log_size=2M", 9)] {
        let path = scratch.path("abandoned.vhdx");
        let size = 400 * MIB;
        new_file(&path, size, options);
        let disk = open(&path, true);
        let mut guest = vec![0; size as usize];
        for flush in 0..flushes {
            // One entry per flush: 200 of them empty the log in between.
            let at = flush * 2 * MIB % size + 4096;
            let op = Op::Write { at, len: 1000 };
            apply(&disk, &mut guest, op, flush + 1).expect("writing");
            disk.flush().expect("flushing");
        }
        drop(disk);
        let refused = qemu::img(
            ["compare", "-f", "vhdx", "-F", "vhdx"]
                .map(std::ffi::OsStr::new)
                .into_iter()
                .chain([path.as_os_str(), path.as_os_str()]),
        );
        assert_ne!(refused.code, 0, "QEMU sees that there is a log to replay");
        let repaired = qemu::check(&path, "vhdx", Some("all"));
        assert_eq!(repaired.code, 0, "{}", repaired.text);
        scratch.all_agree(&path, &guest, "replayed by QEMU");
        same(&open(&path, false), &guest, "replayed by QEMU");
        sound(&file(&path, false), true, "replayed by QEMU");
        // QEMU's repair leaves the same tables as vdkit's.
        let ours = scratch.path("ours.vhdx");
        new_file(&ours, size, options);
        assert_eq!(check(&file(&ours, true), Repair::All).expect("checking").corruptions, 0);
    }
}

/// libvhdi reads a differencing image with its parent.
#[test]
fn a_child_is_read_by_libvhdi() {
    let Some(scratch) = Scratch::new() else { return };
    let (parent, child) = (scratch.path("parent.vhdx"), scratch.path("child.vhdx"));
    let size = 5 * MIB;
    new_file(&parent, size, "block_size=1M");
    let mut guest = vec![0; size as usize];
    let mut rng = Rng::new(5);
    write_here(&parent, &mut guest, &mut rng, false);
    let info = VhdxDriver.describe(&file(&parent, false), &Limits::default()).expect("describing");
    std::fs::File::create(&child).expect("a scratch file");
    let backing = vdkit_block::BackingRef {
        identity: info.identity,
        ..vdkit_block::BackingRef::new("parent.vhdx", Some("vhdx".to_owned()))
    };
    create(&file(&child, true), size, "block_size=1M", Some(backing));
    let disk = open(&child, true).over(open(&parent, false));
    for id in 0..30 {
        let op = random_op(&mut rng, size, false);
        if matches!(op, Op::Write { .. }) {
            apply(&disk, &mut guest, op, 500 + id).expect("writing");
        }
    }
    disk.close().expect("closing");
    drop(disk);
    sound(&file(&child, false), false, "the child");
    let raw = scratch.path("guest.raw");
    std::fs::write(&raw, &guest).expect("a scratch file");
    libvhdi_reads(&raw, &[&child, &parent], "a child");
}
