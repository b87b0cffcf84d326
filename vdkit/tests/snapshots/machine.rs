//! VM state saved by QEMU's `savevm`: kept, listed, preserved and deleted; QEMU resumes from it
//! after vdkit's changes.

use std::path::{Path, PathBuf};

use tempfile::TempDir;
use vdkit_block::{GuestOffset, Monitor, NewSnapshot, SnapshotInfo, Snapshots};
use vdkit_chain::Disk;
use vdkit_testkit::{Machine, qemu, read_all, require_peer};

use super::interop::{assert_clean, open};
use super::support;
use super::world::snapshots;

const GUEST_BYTES: u64 = 4 << 20;
/// Minimum state of an idle VM with 64 MiB of memory.
const STATE_BYTES_MIN: u64 = 128 << 10;

struct Saved {
    scratch: TempDir,
    path: PathBuf,
    /// Registers and memory of the VM.
    state: String,
    /// The disk's content when it was saved.
    bytes: Vec<u8>,
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn at_work(path: &Path, work: impl FnOnce(&Disk, &dyn Snapshots)) {
    let disk = open(path, true);
    work(&disk, snapshots(&disk));
    disk.close().unwrap();
    drop(disk);
    assert_clean(path);
}

fn create(all: &dyn Snapshots, name: &str) {
    let new = NewSnapshot { name: name.into(), ..NewSnapshot::default() };
    all.create(&new, &Monitor::default()).unwrap();
}

/// An image with a snapshot 'plain' by vdkit and 'machine' by QEMU.
fn save(options: &str) -> Saved {
    let scratch = support::qemu::scratch();
    let path = scratch.path().join("image.qcow2");
    qemu::create(&path, "qcow2", GUEST_BYTES, &[options], None);
    qemu::io(&path, "qcow2", &["write -P 1 0 1M"]);
    at_work(&path, |_, all| create(all, "plain"));
    qemu::io(&path, "qcow2", &["write -P 2 512k 1M", "write -z 3M 512k"]);
    let bytes = read_all(&open(&path, false));
    let mut machine = Machine::start(&path, &[]);
    machine.run_firmware();
    let state = machine.state();
    machine.tell("savevm machine");
    machine.quit();
    assert_clean(&path);
    Saved { scratch, path, state, bytes }
}

impl Saved {
    /// The snapshot as listed by vdkit, which must match QEMU's listing.
    fn listed(&self) -> SnapshotInfo {
        let disk = open(&self.path, false);
        let list = snapshots(&disk).list().unwrap();
        let found = list.into_iter().find(|info| info.name == "machine").expect("the machine");
        let theirs = qemu::info(&self.path, "qcow2");
        let theirs = theirs["snapshots"].as_array().unwrap();
        let theirs = theirs.iter().find(|info| info["name"] == "machine").unwrap();
        let number = |key: &str| theirs[key].as_u64().unwrap();
        assert_eq!(found.vm_state_bytes, number("vm-state-size"));
        let clock = number("vm-clock-sec") * 1_000_000_000 + number("vm-clock-nsec");
        assert_eq!(found.vm_clock_nanoseconds, clock);
        assert_eq!(u64::from(found.date_seconds), number("date-sec"));
        assert!(found.vm_state_bytes > STATE_BYTES_MIN && clock > 0, "{found:?}");
        assert_eq!(found.disk_bytes, Some(GUEST_BYTES));
        found
    }

    /// QEMU resumes the VM, on a copy of the image.
    fn goes_on(&self) {
        let copy = self.scratch.path().join("copy.qcow2");
        std::fs::copy(&self.path, &copy).unwrap();
        let mut machine = Machine::start(&copy, &["-S", "-loadvm", "machine"]);
        assert_eq!(machine.state(), self.state, "another machine");
        machine.tell("cont");
        machine.quit();
        assert_clean(&copy);
        assert!(read_all(&open(&copy, false)) == self.bytes, "another disk");
    }
}

fn life(options: &str) {
    let saved = save(options);
    let monitor = Monitor::default();
    let first = saved.listed();
    at_work(&saved.path, |disk, all| {
        disk.write_at(&[3; 100_000], GuestOffset(2 << 20)).unwrap();
        create(all, "later");
        all.rename("plain", "simple").unwrap();
        all.apply("simple", &monitor).unwrap();
        all.delete("later", &monitor).unwrap();
        disk.write_at(&[4; 200_000], GuestOffset(100)).unwrap();
    });
    assert_eq!(saved.listed(), first);
    saved.goes_on();

    at_work(&saved.path, |disk, all| {
        all.apply("machine", &monitor).unwrap();
        assert!(read_all(disk) == saved.bytes);
        // A snapshot of a VM's disk alone has no VM state.
        create(all, "disk alone");
        disk.write_at(&[5; 300_000], GuestOffset(1 << 20)).unwrap();
    });
    assert_eq!(saved.listed(), first);
    let disk = open(&saved.path, false);
    let alone = snapshots(&disk).list().unwrap().pop().unwrap();
    assert_eq!((&*alone.name, alone.vm_state_bytes), ("disk alone", 0));
    drop(disk);
    saved.goes_on();

    // QEMU saves a second one; vdkit applies one of them and deletes the other.
    let mut machine = Machine::start(&saved.path, &["-S", "-loadvm", "machine"]);
    machine.tell("savevm second");
    machine.quit();
    assert_clean(&saved.path);
    at_work(&saved.path, |_, all| {
        all.apply("second", &monitor).unwrap();
        all.delete("second", &monitor).unwrap();
        all.apply("simple", &monitor).unwrap();
    });
    saved.goes_on();

    let before = std::fs::metadata(&saved.path).unwrap().len();
    at_work(&saved.path, |_, all| {
        all.delete("machine", &monitor).unwrap();
    });
    let names = |path: &Path| -> Vec<String> {
        snapshots(&open(path, false)).list().unwrap().into_iter().map(|info| info.name).collect()
    };
    assert_eq!(names(&saved.path), ["simple", "disk alone"]);
    // Its space is reused: new writes need none at the file's end.
    let size = first.vm_state_bytes.min(1 << 20);
    at_work(&saved.path, |disk, _| {
        disk.write_at(&vec![6; size as usize], GuestOffset(2 << 20)).unwrap();
    });
    let after = std::fs::metadata(&saved.path).unwrap().len();
    assert!(after <= before, "{after} bytes, {before} before the machine was deleted");
    let left = qemu::img(["snapshot", "-l", text(&saved.path)]).ok();
    assert!(!left.contains("machine") && left.contains("disk alone"), "{left}");
}

fn peers() -> bool {
    require_peer("qemu-system-x86_64") && require_peer("qemu-img") && require_peer("qemu-io")
}

#[test]
fn a_machine_lives_through_all_that_is_done() {
    if peers() {
        life("cluster_size=65536");
    }
}

#[test]
fn a_machine_in_small_clusters_lives_through_all_that_is_done() {
    if peers() {
        // An L2 table of 4 KiB maps 2 MiB: disk and VM state take several.
        life("cluster_size=4096,refcount_bits=32");
    }
}

#[test]
fn a_machine_in_an_old_image_lives_through_all_that_is_done() {
    if peers() {
        life("compat=0.10");
    }
}
