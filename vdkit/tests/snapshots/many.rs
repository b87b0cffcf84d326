//! As many snapshots as QEMU opens, and tables of the maximum size.

use std::path::Path;
use std::sync::Arc;

use vdkit_block::{GuestOffset, Limits, Monitor, NewSnapshot, Repair, Storage};
use vdkit_storage::{FileOptions, FileStorage};
use vdkit_testkit::{qemu, read_all, require_peer};

use super::interop::{assert_clean, open};
use super::support;
use super::world::snapshots;

const MOST: u32 = 65536;
const GUEST_BYTES: u64 = 64 << 10;
const CLUSTER: usize = 512;

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// A snapshot entry, derived from the first one.
fn entry(first: &[u8], l1: usize, number: u32, more: usize) -> Vec<u8> {
    let (id, name) = (number.to_string(), format!("name {number}"));
    let mut entry = first[..40 + 24].to_vec();
    entry[..8].copy_from_slice(&(l1 as u64).to_be_bytes());
    entry[12..14].copy_from_slice(&(id.len() as u16).to_be_bytes());
    entry[14..16].copy_from_slice(&(name.len() as u16).to_be_bytes());
    entry[36..40].copy_from_slice(&(24 + more as u32).to_be_bytes());
    entry.resize(entry.len() + more, b'x');
    entry.extend_from_slice(id.as_bytes());
    entry.extend_from_slice(name.as_bytes());
    entry.resize(entry.len().next_multiple_of(8), 0);
    entry
}

/// An image with `count` snapshots of the same disk, with `more` bytes of unknown extra data. A
/// repair counts the references.
fn craft(path: &Path, count: u32, more: usize) {
    qemu::create(path, "qcow2", GUEST_BYTES, &["cluster_size=512,refcount_bits=32"], None);
    let disk = open(path, true);
    disk.write_at(&[1; 5000], GuestOffset(1000)).unwrap();
    let new = NewSnapshot { name: "name 1".into(), ..NewSnapshot::default() };
    snapshots(&disk).create(&new, &Monitor::default()).unwrap();
    disk.write_at(&[2; 5000], GuestOffset(4000)).unwrap();
    disk.close().unwrap();
    drop(disk);
    let mut bytes = std::fs::read(path).unwrap();
    let list = be64(&bytes, 64) as usize;
    let first = bytes[list..list + 64].to_vec();
    let l1 = be64(&first, 0) as usize;
    let l1 = bytes[l1..l1 + CLUSTER].to_vec();
    bytes.resize(bytes.len().next_multiple_of(CLUSTER), 0);
    let mut table = entry(&first, be64(&first, 0) as usize, 1, more);
    for number in 2..=count {
        table.extend(entry(&first, bytes.len(), number, more));
        bytes.extend_from_slice(&l1);
    }
    bytes[60..64].copy_from_slice(&count.to_be_bytes());
    let at = bytes.len() as u64;
    bytes[64..72].copy_from_slice(&at.to_be_bytes());
    bytes.extend_from_slice(&table);
    bytes.resize(bytes.len().next_multiple_of(CLUSTER), 0);
    std::fs::write(path, bytes).unwrap();
    let storage: Arc<dyn Storage> =
        Arc::new(FileStorage::open(path, &FileOptions::read_write()).unwrap());
    let (limits, monitor) = (Limits::default(), Monitor::default());
    let report = vdkit_qcow2::check::check(&storage, None, Repair::All, &limits, &monitor).unwrap();
    assert!(report.corruptions > u64::from(count) - 2, "{report:?}");
    assert_eq!((report.corruptions_left(), report.leaks_left()), (0, 0), "{report:?}");
}

/// QEMU takes ten seconds to check so many, so most checks are ours.
fn assert_sound(path: &Path) {
    let storage: Arc<dyn Storage> =
        Arc::new(FileStorage::open(path, &FileOptions::read_only()).unwrap());
    let (limits, monitor) = (Limits::default(), Monitor::default());
    let report =
        vdkit_qcow2::check::check(&storage, None, Repair::Nothing, &limits, &monitor).unwrap();
    assert_eq!((report.corruptions, report.leaks), (0, 0), "{:#?}", report.findings);
}

#[test]
fn sixty_five_thousand_snapshots_and_not_one_more() {
    if !require_peer("qemu-img") {
        return;
    }
    let scratch = support::qemu::scratch();
    let path = scratch.path().join("image.qcow2");
    craft(&path, MOST, 0);
    assert_sound(&path);
    let before = std::fs::read(&path).unwrap();

    let disk = open(&path, true);
    let all = snapshots(&disk);
    let infos = all.list().unwrap();
    assert_eq!(infos.len(), MOST as usize);
    assert_eq!(infos[MOST as usize - 1].name, format!("name {MOST}"));
    let now = read_all(&disk);
    let new = NewSnapshot { name: "one more".into(), ..NewSnapshot::default() };
    let error = all.create(&new, &Monitor::default()).unwrap_err().to_string();
    assert!(error.contains("65537 snapshots") && error.contains("65536"), "{error}");
    disk.close().unwrap();
    drop(disk);
    assert!(std::fs::read(&path).unwrap() == before, "a refused snapshot changes nothing");

    let disk = open(&path, true);
    let all = snapshots(&disk);
    all.apply("name 65536", &Monitor::default()).unwrap();
    let mut then = vec![0; GUEST_BYTES as usize];
    then[1000..6000].fill(1);
    assert!(read_all(&disk) == then && now != then);
    all.delete("name 30000", &Monitor::default()).unwrap();
    let info = all.create(&new, &Monitor::default()).unwrap();
    assert_eq!(info.id, "65537");
    disk.write_at(&[3; 5000], GuestOffset(1000)).unwrap();
    disk.close().unwrap();
    drop(disk);
    assert_sound(&path);

    qemu::img(["snapshot", "-a", "one more", path.to_str().unwrap()]).ok();
    assert_clean(&path);
    let disk = open(&path, false);
    assert!(read_all(&disk) == then, "what QEMU applied");
    let infos = snapshots(&disk).list().unwrap();
    assert_eq!((infos.len(), &*infos[MOST as usize - 1].name), (MOST as usize, "one more"));
}

#[test]
fn tables_as_large_as_qemu_reads_are_read_and_written() {
    if !require_peer("qemu-img") {
        return;
    }
    let scratch = support::qemu::scratch();
    let path = scratch.path().join("image.qcow2");
    // Entries of nearly 1 KiB: the table exceeds 32 MiB. QEMU's limit is 64 MiB.
    let count = 34_000;
    craft(&path, count, 940);
    let disk = open(&path, true);
    let all = snapshots(&disk);
    assert_eq!(all.list().unwrap().len(), count as usize);
    all.rename("name 33999", "another name").unwrap();
    all.delete("name 2", &Monitor::default()).unwrap();
    disk.close().unwrap();
    drop(disk);
    assert_clean(&path);
    let infos = snapshots(&open(&path, false)).list().unwrap();
    assert_eq!(infos.len(), count as usize - 1);
    assert_eq!(infos[count as usize - 3].name, "another name");
}
