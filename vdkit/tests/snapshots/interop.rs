//! QEMU lists, applies and deletes snapshots made by vdkit, and the reverse. After each step both
//! programs find the image clean, without leaks.

use std::path::Path;
use std::sync::Arc;

use vdkit_block::{Format, GuestOffset, Limits, Monitor, NewSnapshot, OpenRequest, Storage};
use vdkit_chain::Disk;
use vdkit_qcow2::Qcow2;
use vdkit_storage::{FileOptions, FileStorage};
use vdkit_testkit::{Rng, qemu, read_all, require_peer};

use super::support::{self, guest::pattern, rig};
use super::world::snapshots;

const GUEST_BYTES: u64 = (4 << 20) + 512;

pub fn open(path: &Path, writable: bool) -> Disk {
    let options = if writable { FileOptions::read_write() } else { FileOptions::read_only() };
    let storage: Arc<dyn Storage> = Arc::new(FileStorage::open(path, &options).unwrap());
    let limits = Limits::default();
    let format: Arc<dyn Format> =
        Qcow2::open(OpenRequest { storage, files: Vec::new(), writable, limits }).unwrap();
    rig::disk(format, writable)
}

/// Expected content of a snapshot.
#[derive(Clone)]
struct Held {
    id: String,
    name: String,
    bytes: Vec<u8>,
}

struct Image<'a> {
    path: &'a Path,
    bytes: Vec<u8>,
    held: Vec<Held>,
    taken: u64,
}

impl Image<'_> {
    fn write(&mut self, ours: bool, rng: &mut Rng) {
        let at = rng.below(GUEST_BYTES / 512) * 512;
        let len = (1 + rng.below(200)) * 512;
        let len = len.min(GUEST_BYTES - at);
        if ours {
            let bytes = pattern(rng.below(1 << 20), at, len);
            let disk = open(self.path, true);
            disk.write_at(&bytes, GuestOffset(at)).unwrap();
            disk.close().unwrap();
            self.put(at, &bytes);
        } else {
            let byte = 1 + rng.below(255) as u8;
            let command = match rng.below(5) {
                0 => format!("write -z {at} {len}"),
                1 => format!("write -z -u {at} {len}"),
                _ => format!("write -P {byte} {at} {len}"),
            };
            qemu::io(self.path, "qcow2", &[&command]);
            let byte = if command.contains("-z") { 0 } else { byte };
            self.put(at, &vec![byte; len as usize]);
        }
    }

    fn put(&mut self, at: u64, bytes: &[u8]) {
        self.bytes[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }

    fn create(&mut self, ours: bool) {
        self.taken += 1;
        let name = format!("snapshot {}", self.taken);
        let id = self.held.iter().filter_map(|h| h.id.parse::<u64>().ok()).max().unwrap_or(0) + 1;
        if ours {
            let disk = open(self.path, true);
            let new = NewSnapshot { name: name.clone(), ..NewSnapshot::default() };
            snapshots(&disk).create(&new, &Monitor::default()).unwrap();
            disk.close().unwrap();
        } else {
            let path = self.path.to_str().unwrap();
            qemu::img(["snapshot", "-c", &name, path]).ok();
        }
        self.held.push(Held { id: id.to_string(), name, bytes: self.bytes.clone() });
    }

    fn apply(&mut self, ours: bool, index: usize) {
        let held = self.held[index].clone();
        if ours {
            let disk = open(self.path, true);
            snapshots(&disk).apply(&held.id, &Monitor::default()).unwrap();
            disk.close().unwrap();
        } else {
            qemu::img(["snapshot", "-a", &held.name, self.path.to_str().unwrap()]).ok();
        }
        self.bytes = held.bytes;
    }

    fn delete(&mut self, ours: bool, index: usize) {
        let held = self.held.remove(index);
        if ours {
            let disk = open(self.path, true);
            snapshots(&disk).delete(&held.name, &Monitor::default()).unwrap();
            disk.close().unwrap();
        } else {
            qemu::img(["snapshot", "-d", &held.name, self.path.to_str().unwrap()]).ok();
        }
    }

    /// Both programs must agree and find no errors.
    fn verify(&self, what: &str) {
        let checked = qemu::check(self.path, "qcow2", None);
        assert!(checked.clean(), "{what}: {}", checked.text);
        let disk = open(self.path, false);
        let report = vdkit_qcow2::check::check(
            disk.top().storage(),
            None,
            vdkit::Repair::Nothing,
            &Limits::default(),
            &Monitor::default(),
        )
        .unwrap();
        assert_eq!((report.corruptions, report.leaks), (0, 0), "{what}: {:#?}", report.findings);
        let theirs = qemu::info(self.path, "qcow2");
        let theirs = theirs["snapshots"].as_array().cloned().unwrap_or_default();
        let ours = snapshots(&disk).list().unwrap();
        assert_eq!((theirs.len(), ours.len()), (self.held.len(), self.held.len()), "{what}");
        for ((theirs, ours), held) in theirs.iter().zip(&ours).zip(&self.held) {
            assert_eq!((&ours.id, &ours.name), (&held.id, &held.name), "{what}");
            assert_eq!(theirs["id"], held.id.as_str(), "{what}");
            assert_eq!(theirs["name"], held.name.as_str(), "{what}");
            let view = rig::disk(snapshots(&disk).view(&held.id).unwrap(), false);
            assert!(read_all(&view) == held.bytes, "{what}: snapshot {}", held.name);
        }
        assert!(read_all(&disk) == self.bytes, "{what}: the disk");
    }

    /// QEMU reads the expected content from the disk and each snapshot.
    fn ask_qemu(&self, dir: &Path) {
        let raw = dir.join("view.raw");
        let (path, view) = (self.path.to_str().unwrap(), raw.to_str().unwrap());
        let convert = |more: &[&str]| {
            let mut args = vec!["convert", "-f", "qcow2", "-O", "raw"];
            args.extend(more);
            qemu::img(args.into_iter().chain([path, view])).ok();
            std::fs::read(&raw).unwrap()
        };
        assert!(convert(&[]) == self.bytes, "the disk as QEMU sees it");
        for held in &self.held {
            assert!(convert(&["-l", &held.name]) == held.bytes, "{} as QEMU sees it", held.name);
        }
    }
}

#[track_caller]
pub fn assert_clean(path: &Path) {
    let found = qemu::check(path, "qcow2", None);
    assert!(found.clean(), "{}", found.text);
}

const OPTIONS: &[&str] = &[
    "cluster_size=65536",
    "cluster_size=512",
    "compat=0.10,cluster_size=4096",
    "extended_l2=on,cluster_size=16384",
    "refcount_bits=64,cluster_size=4096",
    "refcount_bits=32,cluster_size=65536",
    "lazy_refcounts=on,cluster_size=4096",
    "compression_type=zstd,cluster_size=4096",
];

#[test]
fn vdkit_and_qemu_in_turn() {
    if !require_peer("qemu-img") || !require_peer("qemu-io") {
        return;
    }
    support::for_seeds(OPTIONS.len() as u64, |seed| {
        let mut rng = Rng::new(seed);
        let options = OPTIONS[rng.below(OPTIONS.len() as u64) as usize];
        let scratch = support::qemu::scratch();
        let path = scratch.path().join("image.qcow2");
        let source = scratch.path().join("first.raw");
        // Some of the clusters are compressed.
        let first = support::guest::soft_pattern(1, 0, GUEST_BYTES, 4096);
        std::fs::write(&source, &first).unwrap();
        qemu::convert((&source, "raw"), (&path, "qcow2"), &["-c", "-o", options]);
        let mut image = Image { path: &path, bytes: first, held: Vec::new(), taken: 0 };
        for step in 0..16 {
            let ours = rng.chance(1, 2);
            let n = image.held.len() as u64;
            let kind = rng.below(10);
            match kind {
                4..=6 => image.create(ours),
                7 if n > 0 => image.apply(ours, rng.below(n) as usize),
                8 | 9 if n > 0 => image.delete(ours, rng.below(n) as usize),
                _ => image.write(ours, &mut rng),
            }
            image.verify(&format!("{options}: step {step}, kind {kind}, ours: {ours}"));
        }
        image.ask_qemu(scratch.path());
    });
}

#[test]
fn sizes_differ_between_snapshots() {
    if !require_peer("qemu-img") {
        return;
    }
    let scratch = support::qemu::scratch();
    let path = scratch.path().join("image.qcow2");
    qemu::create(&path, "qcow2", 1 << 20, &["cluster_size=4096"], None);
    qemu::io(&path, "qcow2", &["write -P 1 0 1M"]);
    let text = path.to_str().unwrap();
    qemu::img(["snapshot", "-c", "small", text]).ok();
    let disk = open(&path, true);
    // Beyond the old L1 table.
    disk.resize(9 << 20).unwrap();
    disk.write_at(&[2; 4096], GuestOffset(8 << 20)).unwrap();
    let new = NewSnapshot { name: "large".into(), ..NewSnapshot::default() };
    snapshots(&disk).create(&new, &Monitor::default()).unwrap();
    snapshots(&disk).apply("small", &Monitor::default()).unwrap();
    assert_eq!(disk.guest_bytes(), 1 << 20);
    disk.close().unwrap();
    drop(disk);
    assert_clean(&path);
    assert_eq!(qemu::info(&path, "qcow2")["virtual-size"], 1 << 20);
    qemu::img(["snapshot", "-a", "large", text]).ok();
    assert_eq!(qemu::info(&path, "qcow2")["virtual-size"], 9 << 20);
    qemu::io(&path, "qcow2", &["read -P 2 8M 4096", "read -P 1 0 1M", "read -P 0 1M 7M"]);
    let disk = open(&path, true);
    for (name, size) in [("small", 1 << 20), ("large", 9 << 20)] {
        let view = rig::disk(snapshots(&disk).view(name).unwrap(), false);
        assert_eq!(view.guest_bytes(), size, "{name}");
        snapshots(&disk).delete(name, &Monitor::default()).unwrap();
    }
    disk.close().unwrap();
    drop(disk);
    assert_clean(&path);
}

/// Host offset of an L1 entry's L2 table, by the header in the file.
fn l2_table_of(path: &Path, index: u64) -> u64 {
    let bytes = std::fs::read(path).unwrap();
    let word =
        |at: u64| u64::from_be_bytes(bytes[at as usize..at as usize + 8].try_into().unwrap());
    let entries = u64::from(u32::from_be_bytes(bytes[36..40].try_into().unwrap()));
    if index < entries { word(word(40) + index * 8) & 0x00ff_ffff_ffff_fe00 } else { 0 }
}

fn patch(path: &Path, at: u64, new: &[u8]) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(new, at).unwrap();
}

/// VM state is stored beyond the end of the disk, as by `savevm`.
#[test]
fn saved_machine_state_is_carried_and_removed() {
    if !require_peer("qemu-img") {
        return;
    }
    let scratch = support::qemu::scratch();
    let path = scratch.path().join("image.qcow2");
    let text = path.to_str().unwrap();
    // With 4096-byte clusters, an L2 table maps 2 MiB.
    const DISK: u64 = 2 << 20;
    qemu::create(&path, "qcow2", 2 * DISK, &["cluster_size=4096"], None);
    qemu::io(&path, "qcow2", &["write -P 1 0 1M", "write -P 7 2M 40k"]);
    qemu::img(["snapshot", "-c", "machine", text]).ok();
    patch(&path, 24, &DISK.to_be_bytes());
    let file = std::fs::read(&path).unwrap();
    let list = u64::from_be_bytes(file[64..72].try_into().unwrap());
    patch(&path, list + 32, &40960u32.to_be_bytes());
    patch(&path, list + 40, &40960u64.to_be_bytes());
    patch(&path, list + 48, &DISK.to_be_bytes());
    assert_clean(&path);

    let disk = open(&path, true);
    let monitor = Monitor::default();
    let found = snapshots(&disk).list().unwrap();
    assert_eq!((found[0].vm_state_bytes, found[0].disk_bytes), (40960, Some(DISK)));
    let new = NewSnapshot { name: "plain".into(), ..NewSnapshot::default() };
    snapshots(&disk).create(&new, &monitor).unwrap();
    snapshots(&disk).apply("plain", &monitor).unwrap();
    disk.close().unwrap();
    drop(disk);
    assert_eq!(l2_table_of(&path, 1), 0, "a snapshot without machine state has none");
    assert_clean(&path);

    let disk = open(&path, true);
    snapshots(&disk).apply("machine", &monitor).unwrap();
    disk.close().unwrap();
    drop(disk);
    let table = l2_table_of(&path, 1);
    assert_ne!(table, 0, "applying carries the machine state along");
    let file = std::fs::read(&path).unwrap();
    let entry = u64::from_be_bytes(file[table as usize..][..8].try_into().unwrap());
    let data = (entry & 0x00ff_ffff_ffff_fe00) as usize;
    assert!(file[data..data + 4096].iter().all(|byte| *byte == 7));
    assert_clean(&path);
    let theirs = qemu::info(&path, "qcow2");
    assert_eq!(theirs["snapshots"][0]["vm-state-size"], 40960);

    let before = qemu::check(&path, "qcow2", None);
    let disk = open(&path, true);
    snapshots(&disk).apply("plain", &monitor).unwrap();
    snapshots(&disk).delete("machine", &monitor).unwrap();
    disk.close().unwrap();
    drop(disk);
    assert!(before.clean());
    assert_clean(&path);
    let file = std::fs::read(&path).unwrap();
    assert!(!file.chunks(4096).any(|c| c.iter().all(|b| *b == 7)), "the state is gone");
}

/// Entries of other writers are kept byte for byte: unknown extra data, unusual ids.
#[test]
fn other_entries_are_kept_as_they_are() {
    if !require_peer("qemu-img") {
        return;
    }
    let scratch = support::qemu::scratch();
    let path = scratch.path().join("image.qcow2");
    qemu::create(&path, "qcow2", 1 << 20, &["cluster_size=4096"], None);
    qemu::io(&path, "qcow2", &["write -P 1 0 64k"]);
    qemu::img(["snapshot", "-c", "theirs", path.to_str().unwrap()]).ok();
    let file = std::fs::read(&path).unwrap();
    let list = u64::from_be_bytes(file[64..72].try_into().unwrap()) as usize;
    let fixed = file[list..list + 40].to_vec();
    // 24 bytes of extra data become 36, and the id a word.
    let mut entry = fixed.clone();
    entry[12..14].copy_from_slice(&4u16.to_be_bytes());
    entry[36..40].copy_from_slice(&36u32.to_be_bytes());
    entry.extend_from_slice(&file[list + 40..list + 64]);
    entry.extend_from_slice(b"unknown-data");
    entry.extend_from_slice(b"2word"[..4].as_ref());
    entry.extend_from_slice(b"theirs");
    patch(&path, list as u64, &entry);
    let disk = open(&path, true);
    let new = NewSnapshot { name: "ours".into(), ..NewSnapshot::default() };
    let info = snapshots(&disk).create(&new, &Monitor::default()).unwrap();
    assert_eq!(info.id, "3", "above the number that the other id begins with");
    disk.close().unwrap();
    drop(disk);
    let file = std::fs::read(&path).unwrap();
    let list = u64::from_be_bytes(file[64..72].try_into().unwrap()) as usize;
    assert_eq!(file[list..list + entry.len()], entry);
    assert_clean(&path);
    assert_eq!(qemu::info(&path, "qcow2")["snapshots"].as_array().unwrap().len(), 2);
}

/// The check accounts for shared clusters: it repairs wrong COPIED flags and nothing else.
#[test]
fn wrong_copied_flags_are_mended() {
    if !require_peer("qemu-img") {
        return;
    }
    let scratch = support::qemu::scratch();
    let path = scratch.path().join("image.qcow2");
    qemu::create(&path, "qcow2", 1 << 20, &["cluster_size=4096"], None);
    qemu::io(&path, "qcow2", &["write -P 1 0 64k"]);
    let disk = open(&path, true);
    let new = NewSnapshot { name: "s".into(), ..NewSnapshot::default() };
    snapshots(&disk).create(&new, &Monitor::default()).unwrap();
    disk.write_at(&[2; 8192], GuestOffset(0)).unwrap();
    disk.close().unwrap();
    drop(disk);
    assert_clean(&path);
    // The first clusters are exclusive, the later ones shared.
    let table = l2_table_of(&path, 0);
    for index in [0, 5] {
        let mut byte = [0];
        let at = table + index * 8;
        byte[0] = std::fs::read(&path).unwrap()[at as usize] ^ 0x80;
        patch(&path, at, &byte);
    }
    assert_eq!(qemu::check(&path, "qcow2", None).corruptions, 2);
    let storage: Arc<dyn Storage> =
        Arc::new(FileStorage::open(&path, &FileOptions::read_write()).unwrap());
    let report = vdkit_qcow2::check::check(
        &storage,
        None,
        vdkit::Repair::All,
        &Limits::default(),
        &Monitor::default(),
    )
    .unwrap();
    assert_eq!((report.corruptions, report.corruptions_fixed), (2, 2), "{:#?}", report.findings);
    drop(storage);
    assert_clean(&path);
    let disk = open(&path, false);
    let view = rig::disk(snapshots(&disk).view("s").unwrap(), false);
    assert!(read_all(&view)[..65536] == vec![1; 65536]);
    assert!(read_all(&disk)[..65536] == [vec![2; 8192], vec![1; 57344]].concat());
}
