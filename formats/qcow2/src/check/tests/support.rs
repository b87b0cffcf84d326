//! Creates images with qemu-img, damages them, and runs both programs' checks.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex, PoisonError};

use vdkit_block::bytes::be64;
use vdkit_block::{CheckReport, HostOffset, Limits, Monitor, Progress, Repair, Result, Storage};
use vdkit_storage::{FileOptions, FileStorage, MemoryStorage};
use vdkit_testbase::qemu;

use crate::check;
use crate::check::mapping::entry_at;
use crate::check::snapshots::SnapshotTable;
use crate::entry::State;
use crate::header::Header;
use crate::layout::OFFSET_MASK;

/// Records all updates.
#[derive(Debug, Default)]
pub(in crate::check) struct Heard(pub(in crate::check) parking_lot::Mutex<Vec<(u64, u64)>>);

impl Progress for Heard {
    fn update(&self, done: u64, total: u64) {
        self.0.lock().push((done, total));
    }

    fn message(&self, _text: &str) {}
}

/// Opens an image file for writing.
pub(super) fn open(path: &Path) -> Arc<dyn Storage> {
    Arc::new(FileStorage::open(path, &FileOptions::read_write()).unwrap())
}

/// Whether QEMU's programs are installed; without them, a test has no reference.
pub(super) fn peers() -> bool {
    vdkit_testbase::require_peer("qemu-img") && vdkit_testbase::require_peer("qemu-io")
}

fn run(program: &str, args: &[&str]) -> Output {
    Command::new(program).args(args).output().unwrap_or_else(|e| panic!("{program}: {e}"))
}

/// Runs a program that must succeed.
pub(super) fn must(program: &str, args: &[&str]) {
    // No test needs QEMU's syncs, of which small clusters take thousands.
    let cache: &[&str] = if program == "qemu-io" { &["-t", "unsafe"] } else { &[] };
    let output = run(program, &[cache, args].concat());
    assert!(
        output.status.success(),
        "{program} {args:?}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Exit class and numbers of `qemu-img check`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Verdict {
    /// 0 clean, 1 refused, 2 corrupt, 3 leaks.
    pub(super) exit: i32,
    pub(super) corruptions: u64,
    pub(super) leaks: u64,
    pub(super) total: u64,
    pub(super) allocated: u64,
    pub(super) fragmented: u64,
    pub(super) compressed: u64,
    pub(super) end: u64,
}

/// The result of `qemu-img check`.
pub(super) fn qemu_check(path: &Path) -> Verdict {
    let output =
        run("qemu-img", &["check", "-f", "qcow2", "--output=json", path.to_str().unwrap()]);
    let exit = output.status.code().expect("qemu-img ended by itself");
    let json: serde_json::Value =
        serde_json::from_slice(&output.stdout).unwrap_or(serde_json::Value::Null);
    let number = |key: &str| json[key].as_u64().unwrap_or(0);
    Verdict {
        exit,
        corruptions: number("corruptions"),
        leaks: number("leaks"),
        total: number("total-clusters"),
        allocated: number("allocated-clusters"),
        fragmented: number("fragmented-clusters"),
        compressed: number("compressed-clusters"),
        end: number("image-end-offset"),
    }
}

/// vdkit's report in the same form.
pub(super) fn verdict_of(report: &CheckReport) -> Verdict {
    Verdict {
        exit: match (report.corruptions_left(), report.leaks_left()) {
            (0, 0) => 0,
            (0, _) => 3,
            _ => 2,
        },
        corruptions: report.corruptions_left(),
        leaks: report.leaks_left(),
        total: report.total_clusters,
        allocated: report.allocated_clusters,
        fragmented: report.fragmented_clusters,
        compressed: report.compressed_clusters,
        end: report.image_end_offset,
    }
}

/// vdkit's check.
pub(super) fn our_check(path: &Path, repair: Repair) -> Result<CheckReport> {
    check_storage(&open(path), repair)
}

/// As [`our_check`], in any storage.
pub(super) fn check_storage(storage: &Arc<dyn Storage>, repair: Repair) -> Result<CheckReport> {
    // A repair only requires that a data file is present, not its content.
    let limits = Limits::default();
    let header = Header::read_tolerant(&**storage, &limits, &mut Vec::new())?;
    let data_file = header.has_data_file().then_some(storage);
    check::check(storage, data_file, repair, &limits, &Monitor::default())
}

/// Asserts that vdkit's check finds nothing.
#[track_caller]
pub(super) fn assert_clean(storage: &Arc<dyn Storage>, what: &str) {
    let found = check_storage(storage, Repair::Nothing).unwrap();
    assert_eq!((found.corruptions, found.leaks), (0, 0), "{what}: {:#?}", found.findings);
}

/// Whether the guest reads the same from both.
pub(super) fn same_guest(a: &Path, b: &Path) -> bool {
    qemu::same((a, "qcow2"), (b, "qcow2"))
}

/// A kind of test image.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    pub(super) name: &'static str,
    pub(super) options: &'static str,
    pub(super) size: &'static str,
    /// qemu-io commands.
    pub(super) writes: &'static [&'static str],
    pub(super) snapshots: bool,
    pub(super) bitmap: bool,
    pub(super) compressed: bool,
}

const PLAIN: Kind = Kind {
    name: "plain",
    options: "compat=1.1",
    size: "16M",
    writes: &[
        "write -P 1 0 1M",
        "write -P 2 5M 300k",
        "write -P 3 15M 1M",
        "write -z 9M 1M",
        "write -P 4 7M 64k",
        "write -z 7M 64k",
    ],
    snapshots: false,
    bitmap: false,
    compressed: false,
};

const SMALL_WRITES: &[&str] =
    &["write -P 1 0 100k", "write -P 2 1M 77k", "write -P 3 3900k 100k", "write -z 2M 64k"];

/// All image kinds; they differ in their metadata.
pub(super) const KINDS: &[Kind] = &[
    PLAIN,
    Kind { name: "v2", options: "compat=0.10", writes: &["write -P 1 0 3M"], ..PLAIN },
    Kind {
        name: "cluster-512",
        options: "cluster_size=512",
        size: "4M",
        writes: SMALL_WRITES,
        ..PLAIN
    },
    Kind {
        name: "refcounts-1",
        options: "cluster_size=4k,refcount_bits=1",
        size: "4M",
        writes: SMALL_WRITES,
        ..PLAIN
    },
    Kind {
        name: "refcounts-2",
        options: "cluster_size=4k,refcount_bits=2",
        size: "4M",
        writes: SMALL_WRITES,
        snapshots: true,
        ..PLAIN
    },
    Kind {
        name: "refcounts-4",
        options: "cluster_size=1k,refcount_bits=4",
        size: "4M",
        writes: SMALL_WRITES,
        snapshots: true,
        ..PLAIN
    },
    Kind { name: "refcounts-8", options: "refcount_bits=8", snapshots: true, ..PLAIN },
    Kind { name: "refcounts-32", options: "refcount_bits=32", snapshots: true, ..PLAIN },
    Kind { name: "refcounts-64", options: "refcount_bits=64", snapshots: true, ..PLAIN },
    Kind { name: "cluster-2M", options: "cluster_size=2M", ..PLAIN },
    Kind { name: "extended", options: "extended_l2=on,cluster_size=64k", ..PLAIN },
    Kind {
        name: "extended-16k",
        options: "extended_l2=on,cluster_size=16k",
        snapshots: true,
        compressed: true,
        ..PLAIN
    },
    Kind { name: "snapshots", options: "cluster_size=16k", snapshots: true, ..PLAIN },
    Kind { name: "bitmap", options: "cluster_size=64k", bitmap: true, snapshots: true, ..PLAIN },
    Kind { name: "compressed", options: "cluster_size=64k", compressed: true, ..PLAIN },
    Kind {
        name: "zstd",
        options: "cluster_size=4k,compression_type=zstd",
        size: "4M",
        writes: SMALL_WRITES,
        compressed: true,
        ..PLAIN
    },
    Kind { name: "lazy", options: "lazy_refcounts=on", ..PLAIN },
    Kind { name: "preallocated", options: "preallocation=metadata", ..PLAIN },
];

pub(super) fn kind(name: &str) -> &'static Kind {
    KINDS.iter().find(|kind| kind.name == name).unwrap()
}

/// An image in a directory of its own.
pub(super) struct Image {
    pub(super) path: PathBuf,
    _directory: tempfile::TempDir,
}

impl Image {
    /// Creates an image, or copies a cached one.
    pub(super) fn make(kind: &Kind) -> Self {
        static MADE: Mutex<BTreeMap<&str, Vec<u8>>> = Mutex::new(BTreeMap::new());
        let image = Self::empty();
        let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
        match made.get(kind.name) {
            Some(bytes) => std::fs::write(&image.path, bytes).unwrap(),
            None => {
                image.fill(kind);
                made.insert(kind.name, std::fs::read(&image.path).unwrap());
            }
        }
        image
    }

    pub(super) fn empty() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self { path: directory.path().join("image.qcow2"), _directory: directory }
    }

    fn fill(&self, kind: &Kind) {
        let file = self.path.to_str().unwrap();
        must("qemu-img", &["create", "-q", "-f", "qcow2", "-o", kind.options, file, kind.size]);
        let io = |commands: &[String]| {
            let mut args = vec!["-f", "qcow2", file];
            for command in commands {
                args.extend(["-c", command]);
            }
            must("qemu-io", &args);
        };
        let mut commands: Vec<String> = kind.writes.iter().map(ToString::to_string).collect();
        if kind.compressed {
            let cluster = self.header().geometry.cluster_bytes();
            let base = if kind.size == "4M" { 2560 << 10 } else { 11 << 20 };
            commands.extend(
                (0..40)
                    .map(|i| format!("write -c -P {} {} {cluster}", i + 100, base + i * cluster)),
            );
        }
        io(&commands);
        if kind.bitmap {
            must("qemu-img", &["bitmap", "--add", file, "b0"]);
            must("qemu-img", &["bitmap", "--add", "-g", "512", file, "b1"]);
            io(&["write -P 9 1M 200k".to_owned()]);
        }
        if kind.snapshots {
            must("qemu-img", &["snapshot", "-c", "first", file]);
            io(&["write -P 5 64k 200k".to_owned()]);
            must("qemu-img", &["snapshot", "-c", "second", file]);
            io(&["write -P 6 128k 70k".to_owned()]);
        }
    }

    /// Its bytes in memory.
    pub(super) fn memory(&self) -> MemoryStorage {
        MemoryStorage::from_bytes("image", &std::fs::read(&self.path).unwrap())
    }

    /// Replaces the file by these bytes, and asserts that QEMU finds nothing wrong with them.
    pub(super) fn assert_sound_for_qemu(&self, storage: &dyn Storage, what: &str) {
        let mut bytes = vec![0; storage.len().unwrap() as usize];
        storage.read_at(&mut bytes, HostOffset(0)).unwrap();
        std::fs::write(&self.path, bytes).unwrap();
        let theirs = qemu_check(&self.path);
        assert_eq!(theirs.exit, 0, "{what}: {theirs:?}");
    }

    pub(super) fn copy(&self) -> Self {
        let copy = Self::empty();
        std::fs::copy(&self.path, &copy.path).unwrap();
        copy
    }

    pub(super) fn header(&self) -> Header {
        Header::read(&*open(&self.path), &Limits::default()).unwrap()
    }

    pub(super) fn bytes(&self, offset: u64, len: usize) -> Vec<u8> {
        // Not by a storage: opening one asks much of the system, and tests read many words.
        let mut bytes = Vec::with_capacity(len);
        let mut file = File::open(&self.path).unwrap();
        file.seek(SeekFrom::Start(offset)).unwrap();
        file.take(len as u64).read_to_end(&mut bytes).unwrap();
        bytes.resize(len, 0);
        bytes
    }

    pub(super) fn word(&self, offset: u64) -> u64 {
        u64::from_be_bytes(self.bytes(offset, 8).try_into().unwrap())
    }

    pub(super) fn put(&self, offset: u64, bytes: &[u8]) {
        let file = File::options().write(true).open(&self.path).unwrap();
        file.write_all_at(bytes, offset).unwrap();
    }

    pub(super) fn put_word(&self, offset: u64, word: u64) {
        self.put(offset, &word.to_be_bytes());
    }

    /// Host offset of the first L1 entry.
    pub(super) fn l1(&self) -> u64 {
        self.header().l1_offset.0
    }

    /// Host offset of the L2 table of an L1 entry.
    pub(super) fn l2(&self, index: u64) -> u64 {
        self.word(self.l1() + index * 8) & crate::layout::OFFSET_MASK
    }

    /// Host offset of the L2 entry of a guest offset.
    pub(super) fn l2_entry(&self, guest: u64) -> u64 {
        let geometry = self.header().geometry;
        let at = vdkit_block::GuestOffset(guest);
        self.l2(geometry.l1_index(at)) + geometry.l2_index(at) * geometry.l2_entry_bytes()
    }

    /// Host offset of the refcount block of a host offset, and the index in it.
    pub(super) fn refcount(&self, host: u64) -> (u64, u64) {
        let header = self.header();
        let cluster = host >> header.geometry.cluster_bits;
        let entries = header.geometry.refcount_block_entries();
        let block = self.word(header.refcount_table_offset.0 + cluster / entries * 8);
        (block, cluster % entries)
    }

    pub(super) fn set_refcount(&self, host: u64, value: u64) {
        let (block, index) = self.refcount(host);
        let geometry = self.header().geometry;
        let mut bytes = self.bytes(block, geometry.cluster_bytes() as usize);
        crate::refcounts::set_refcount(&mut bytes, index, geometry.refcount_order, value);
        self.put(block, &bytes);
    }

    pub(super) fn get_refcount(&self, host: u64) -> u64 {
        let (block, index) = self.refcount(host);
        let geometry = self.header().geometry;
        let bytes = self.bytes(block, geometry.cluster_bytes() as usize);
        crate::refcounts::get_refcount(&bytes, index, geometry.refcount_order)
    }

    pub(super) fn len(&self) -> u64 {
        std::fs::metadata(&self.path).unwrap().len()
    }

    /// Appends a cluster with this refcount at the end of the file, filled with one byte.
    pub(super) fn append_cluster(&self, refcount: u64, fill: u8) -> u64 {
        let cluster = self.header().geometry.cluster_bytes();
        let at = self.len().next_multiple_of(cluster);
        self.put(at, &vec![fill; cluster as usize]);
        self.set_refcount(at, refcount);
        at
    }
}

/// Hash of each guest cluster; `None` if it cannot be read. Compressed clusters are hashed in
/// compressed form.
pub(super) fn guest_view(storage: &dyn Storage) -> Vec<Option<u64>> {
    let header = Header::read_tolerant(storage, &Limits::default(), &mut Vec::new()).unwrap();
    view_of(storage, &header, (header.l1_offset.0, header.l1_entries))
}

/// The same for the active disk and each snapshot of a sound image.
pub(super) fn all_views(storage: &Arc<dyn Storage>) -> Vec<Vec<Option<u64>>> {
    let image = crate::check::image::Image::open(storage, &Limits::default()).unwrap();
    let table = SnapshotTable::read(&image, &mut CheckReport::default()).unwrap();
    let active = (image.header.l1_offset.0, image.header.l1_entries);
    let others = table.snapshots.iter().map(|s| (s.entry.l1_offset.0, s.entry.l1_entries));
    std::iter::once(active).chain(others).map(|l1| view_of(&**storage, &image.header, l1)).collect()
}

fn view_of(storage: &dyn Storage, header: &Header, l1: (u64, u32)) -> Vec<Option<u64>> {
    let geometry = header.geometry;
    let len = storage.len().unwrap();
    let cluster = geometry.cluster_bytes();
    let read = |offset: u64, bytes: u64| {
        let mut buffer = vec![0; bytes as usize];
        storage.read_padded(&mut buffer, HostOffset(offset)).unwrap();
        buffer
    };
    let hash = |bytes: &[u8]| {
        if vdkit_block::is_zero(bytes) {
            return Some(0);
        }
        let mut hasher = rustc_hash::FxHasher::default();
        std::hash::Hasher::write(&mut hasher, bytes);
        Some(std::hash::Hasher::finish(&hasher) | 1)
    };
    let aligned = |offset: u64| offset & (cluster - 1) == 0;
    let l1 = read(l1.0, u64::from(l1.1) * 8);
    let mut view = Vec::new();
    for index in 0..header.guest_bytes.div_ceil(geometry.l2_span()) as usize {
        let offset = be64(&l1, index * 8) & OFFSET_MASK;
        let there = offset != 0 && aligned(offset);
        let l2 = there.then(|| read(offset, cluster));
        for i in 0..geometry.l2_entries() as usize {
            let Some(l2) = &l2 else {
                view.push((offset == 0).then_some(0));
                continue;
            };
            let entry = entry_at(l2, i, geometry.extended);
            if entry.is_compressed() {
                let place = entry.compressed_place(&geometry);
                view.push(if place.offset.0 + place.bytes < len + cluster {
                    hash(&read(place.offset.0, place.bytes))
                } else {
                    None
                });
                continue;
            }
            let fault = entry.fault(&geometry, header.version, header.has_data_file());
            if fault.is_some() {
                view.push(None);
                continue;
            }
            if entry.host().0 == 0 {
                view.push(Some(0));
                continue;
            }
            let mut data = vec![0; cluster as usize];
            let part = geometry.subcluster_bytes() as usize;
            for (s, piece) in data.chunks_exact_mut(part).enumerate() {
                if entry.state(s as u32, &geometry, false) == State::Data {
                    let at = entry.host().0 + (s * part) as u64;
                    storage.read_padded(piece, HostOffset(at)).unwrap();
                }
            }
            view.push(hash(&data));
        }
    }
    view
}
