//! Jobs in a child of `fork` on disks of its parent: they read, and change nothing.

use std::path::Path;

use vdkit_block::{ErrorKind, FormatDriver, GuestOffset, Monitor, NewBitmap, Repair, Result};
use vdkit_chain::{Disk, OpenOptions, Registry};
use vdkit_copy::{
    CommitOptions, CreateOptions, NewBacking, bitmaps, commit_disks, create, merge_bitmap,
    take_over,
};
use vdkit_image::{SnapshotAction, check, snapshot, snapshots};
use vdkit_qcow2::Qcow2Driver;
use vdkit_raw::RawDriver;
use vdkit_testbase::in_child;

const MIB: usize = 1 << 20;

fn registry() -> Registry {
    let drivers: [&'static dyn FormatDriver; 2] = [&Qcow2Driver, &RawDriver];
    Registry::new(drivers)
}

fn new(path: &Path, backing: Option<&str>) -> Disk {
    let backing = backing.map(|name| NewBacking::new(name, Some("qcow2".to_owned())));
    let new = CreateOptions::new(path, &Qcow2Driver).guest_bytes(4 << 20).backing(backing);
    create(&registry(), &new, &Monitor::default()).unwrap();
    let opening = OpenOptions::read_write().format("qcow2");
    Disk::open(&registry(), path, &opening).unwrap()
}

fn refused<T>(done: Result<T>) -> bool {
    done.is_err_and(|error| {
        error.kind() == ErrorKind::Usage && error.to_string().contains("the parent of this process")
    })
}

fn assert_sound(path: &Path) {
    let options = OpenOptions::read_only();
    let found = check(&registry(), path, &options, Repair::Nothing, &Monitor::default()).unwrap();
    assert_eq!((found.report.corruptions, found.report.leaks), (0, 0), "{found:?}");
}

/// The child would hand out clusters that its parent hands out too.
#[test]
fn a_child_changes_no_snapshots_and_bitmaps_of_its_parents_disk() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let (disk, quiet) = (new(&path, None), Monitor::default());
    let bitmap = |name| NewBitmap { name, granularity: None, enabled: true };
    disk.write_at(&[1; MIB], GuestOffset(0)).unwrap();
    snapshot(&disk, &SnapshotAction::Create("kept".to_owned()), &quiet).unwrap();
    bitmaps(&disk).unwrap().add(&bitmap("marks")).unwrap();
    let changes = || {
        let [kept, other] = ["kept", "other"].map(str::to_owned);
        let actions = [
            SnapshotAction::Create(other.clone()),
            SnapshotAction::Apply(kept.clone()),
            SnapshotAction::Delete(kept.clone()),
            SnapshotAction::Rename { which: kept, name: other },
        ];
        let all = bitmaps(&disk).unwrap();
        actions.iter().all(|action| refused(snapshot(&disk, action, &quiet)))
            && refused(all.add(&bitmap("other")))
            && refused(all.remove("marks"))
            && refused(all.clear("marks"))
            && refused(all.set_enabled("marks", false))
            && refused(all.mark_all_dirty())
            && refused(merge_bitmap(&disk, "marks", &disk, "marks"))
            && snapshots(&disk).unwrap().len() == 1
            && all.list().unwrap().len() == 1
            && all.for_each_dirty("marks", &mut |_| Ok(())).is_ok()
    };
    let in_parent = || disk.write_at(&[2; MIB], GuestOffset(0)).unwrap();
    assert!(in_child(in_parent, changes));
    disk.close().unwrap();
    drop(disk);
    assert_sound(&path);
}

#[test]
fn a_child_moves_no_data_into_its_parents_disk() {
    let folder = tempfile::tempdir().unwrap();
    let [base, top] = ["base", "top"].map(|name| folder.path().join(name));
    new(&base, None).close().unwrap();
    let over = new(&top, Some("base"));
    over.write_at(&[2; MIB], GuestOffset(0)).unwrap();
    over.close().unwrap();
    drop(over);
    let alone = OpenOptions::read_only().format("qcow2");
    let writable = OpenOptions::read_write().format("qcow2").lock(false);
    let below = Disk::open(&registry(), &base, &writable).unwrap();
    below.write_at(&[1; MIB], GuestOffset(0)).unwrap();
    let disk = Disk::open(&registry(), &top, &writable).unwrap();
    let quiet = Monitor::default();
    let moves = || {
        let own = Disk::open(&registry(), &top, &alone.clone().lock(false)).unwrap();
        refused(commit_disks(own, &below, false, &CommitOptions::default(), &quiet))
            && refused(take_over(&disk, None, None, &quiet))
    };
    assert!(in_child(|| (), moves));
    let mut found = [0];
    below.read_at(&mut found, GuestOffset(0)).unwrap();
    assert_eq!(found, [1], "the child wrote to its parent's disk");
    disk.close().unwrap();
    below.close().unwrap();
    drop((disk, below));
    [base, top].iter().for_each(|path| assert_sound(path));
}
