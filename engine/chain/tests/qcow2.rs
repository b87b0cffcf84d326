//! The flat disk over real qcow2 images, compared with QEMU's tools.

mod support;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use support::map;
use vdkit_block::{
    CacheMode, Error, ErrorKind, Format, FormatDriver, GuestOffset, Limits, NewBitmap, OpenRequest,
    Storage,
};
use vdkit_chain::{Disk, OpenOptions, Registry};
use vdkit_qcow2::{Qcow2, Qcow2Driver};
use vdkit_raw::RawDriver;
use vdkit_storage::{FileOptions, FileStorage, MemoryStorage};
use vdkit_testbase::{
    CountingStorage, FaultKind, FaultPlan, FaultyStorage, Rng, assert_sound, create_image, disk_on,
    in_child,
};

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// What QEMU reads from an image.
fn read_by_qemu(image: &Path) -> Vec<u8> {
    let raw = image.with_extension("oracle");
    run("qemu-img", &["convert", "-O", "raw", text(image), text(&raw)]);
    fs::read(raw).unwrap()
}

fn open_layer(path: &Path, format: &str, writable: bool, cache: CacheMode) -> Disk {
    let options = FileOptions::default().writable(writable);
    let storage = match FileStorage::open(path, &options.cache(cache)) {
        // This file system has no direct I/O.
        Err(Error::Unsupported { .. }) if cache.direct() => FileStorage::open(path, &options),
        other => other,
    };
    let storage: Arc<dyn Storage> = Arc::new(storage.unwrap());
    if format == "raw" {
        return support::raw_disk(storage, writable);
    }
    let limits = Limits::default();
    let image = Qcow2::open(OpenRequest { storage, files: Vec::new(), writable, limits }).unwrap();
    let info = map::info(image.guest_bytes(), None, None);
    Disk::from_format(image, info, &OpenOptions::default().writable(writable).cache(cache))
}

/// The flags of `qemu-img create -o` for each shape of image.
const SHAPES: &[(u64, &str)] = &[
    (512, "cluster_size=512"),
    (4096, "cluster_size=4096,refcount_bits=1"),
    (4096, "cluster_size=4096,compat=0.10"),
    (65536, "cluster_size=65536"),
    (65536, "cluster_size=65536,lazy_refcounts=on,refcount_bits=64"),
    (16384, "cluster_size=16384,extended_l2=on"),
    (65536, "cluster_size=65536,extended_l2=on,compression_type=zstd"),
    (2 << 20, "cluster_size=2M"),
];

const CACHES: &[CacheMode] = &[
    CacheMode::Writeback,
    CacheMode::None,
    CacheMode::Writethrough,
    CacheMode::DirectSync,
    CacheMode::Unsafe,
];
const CACHE: CacheMode = CacheMode::Writeback;

/// Bytes that compress, and differ from one another.
fn content(len: usize, seed: u64) -> Vec<u8> {
    let mut random = Rng::new(seed);
    let mut bytes = vec![0; len];
    for piece in bytes.chunks_mut(3000) {
        match random.below(3) {
            0 => {}
            1 => piece.fill(random.next_u64() as u8),
            _ => piece.iter_mut().enumerate().for_each(|(i, b)| *b = (i as u64 ^ seed) as u8),
        }
    }
    bytes
}

#[derive(Clone, Debug)]
enum Op {
    Write { at: u64, len: u64, byte: u8 },
    Zero { at: u64, len: u64, may_unmap: bool },
    Discard { at: u64, len: u64 },
    Read { at: u64, len: u64 },
    Flush,
    Resize { size: u64 },
    Reopen,
}

/// Offsets and lengths are in 2^-16 of the disk, so that they scale with its size.
fn op() -> impl Strategy<Value = Op> {
    let range = || prop_oneof![(0..1u64 << 16, 0..2u64), (0..1u64 << 16, 0..1u64 << 13)];
    prop_oneof![
        6 => (range(), 1..=255u8).prop_map(|((at, len), byte)| Op::Write { at, len, byte }),
        2 => (range(), any::<bool>())
            .prop_map(|((at, len), may_unmap)| Op::Zero { at, len, may_unmap }),
        1 => range().prop_map(|(at, len)| Op::Discard { at, len }),
        3 => range().prop_map(|(at, len)| Op::Read { at, len }),
        1 => Just(Op::Flush),
        1 => (1..1u64 << 16).prop_map(|size| Op::Resize { size }),
        1 => Just(Op::Reopen),
    ]
}

struct Bench {
    folder: tempfile::TempDir,
    disk: Option<Disk>,
    model: Vec<u8>,
    unit: u64,
    cache: CacheMode,
}

impl Bench {
    /// An overlay with compressed clusters over a raw image of another length.
    fn new(shape: usize, base_parts: u64, cache: CacheMode) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (cluster, options) = SHAPES[shape];
        let size = cluster.max(4096) * 12 + 1024;
        let base = content((size * base_parts / 16) as usize, 1);
        fs::write(folder.path().join("base.raw"), &base).unwrap();
        // Its first third is compressed; the rest shows the base.
        let mut own = content(size as usize, 2);
        let third = own.len() / 3 / cluster as usize * cluster as usize;
        let shown = base.len().min(own.len());
        own[third..].fill(0);
        if shown > third {
            own[third..shown].copy_from_slice(&base[third..shown]);
        }
        let input = folder.path().join("own.raw");
        fs::write(&input, &own).unwrap();
        let base_path = folder.path().join("base.raw");
        let image = folder.path().join("top.qcow2");
        run(
            "qemu-img",
            &[
                "convert",
                "-c",
                "-f",
                "raw",
                "-O",
                "qcow2",
                "-o",
                options,
                "-B",
                text(&base_path),
                "-F",
                "raw",
                text(&input),
                text(&image),
            ],
        );
        let mut bench = Self { folder, disk: None, model: own, unit: size >> 16 | 1, cache };
        bench.reopen();
        bench
    }

    fn disk(&self) -> &Disk {
        self.disk.as_ref().unwrap()
    }

    fn reopen(&mut self) {
        if let Some(disk) = self.disk.take() {
            disk.close().unwrap();
        }
        let base = open_layer(&self.folder.path().join("base.raw"), "raw", false, self.cache);
        let top = open_layer(&self.folder.path().join("top.qcow2"), "qcow2", true, self.cache);
        self.disk = Some(top.over(base));
        assert_eq!(self.disk().guest_bytes(), self.model.len() as u64);
    }

    fn clip(&self, at: u64, len: u64) -> Option<(u64, usize)> {
        let size = self.model.len() as u64;
        let (at, len) = (at * self.unit, len * self.unit + 1);
        (at < size).then(|| (at, len.min(size - at) as usize))
    }

    fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0xEE; len];
        self.disk().read_at(&mut bytes, GuestOffset(at)).unwrap();
        bytes
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Write { at, len, byte } => {
                let Some((at, len)) = self.clip(at, len) else { return };
                let bytes: Vec<u8> = (0..len).map(|i| byte ^ (i / 512) as u8).collect();
                self.disk().write_at(&bytes, GuestOffset(at)).unwrap();
                self.model[at as usize..][..len].copy_from_slice(&bytes);
            }
            Op::Zero { at, len, may_unmap } => {
                let Some((at, len)) = self.clip(at, len) else { return };
                self.disk().write_zeroes(GuestOffset(at), len as u64, may_unmap).unwrap();
                self.model[at as usize..][..len].fill(0);
            }
            Op::Discard { at, len } => {
                let Some((at, len)) = self.clip(at, len) else { return };
                self.disk().discard(GuestOffset(at), len as u64).unwrap();
                let now = self.read(at, len);
                for (new, old) in now.iter().zip(&mut self.model[at as usize..][..len]) {
                    assert!(*new == 0 || new == old, "a discard invented a byte");
                    *old = *new;
                }
            }
            Op::Read { at, len } => {
                let Some((at, len)) = self.clip(at, len) else { return };
                assert!(self.read(at, len) == self.model[at as usize..][..len]);
            }
            Op::Flush => self.disk().flush().unwrap(),
            Op::Resize { size } => {
                let size = (size * self.unit).next_multiple_of(512);
                self.disk().resize(size).unwrap();
                self.model.resize(size as usize, 0);
            }
            Op::Reopen => self.reopen(),
        }
    }

    fn check(mut self) {
        assert!(self.read(0, self.model.len()) == self.model, "a full read differs");
        self.reopen();
        assert!(self.read(0, self.model.len()) == self.model, "it reads otherwise reopened");
        self.disk.take().unwrap().close().unwrap();
        let image = self.folder.path().join("top.qcow2");
        run("qemu-img", &["check", text(&image)]);
        assert!(read_by_qemu(&image) == self.model, "QEMU reads something else");
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 48,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn an_overlay_is_a_flat_buffer(
        shape in 0..SHAPES.len(),
        base_parts in 0..24u64,
        cache in 0..CACHES.len(),
        ops in proptest::collection::vec(op(), 1..40),
    ) {
        let mut bench = Bench::new(shape, base_parts, CACHES[cache]);
        for op in &ops {
            bench.apply(op);
        }
        bench.check();
    }
}

/// Eight threads, each with every eighth sector, over shared, compressed and absent clusters;
/// clusters are freed and reused all the time.
#[test]
fn threads_that_share_clusters_keep_their_own_sectors() {
    for shape in 0..SHAPES.len() {
        let bench = Bench::new(shape, 9, CACHES[shape % CACHES.len()]);
        let sectors = bench.model.len() as u64 / 512;
        let model = &bench.model;
        let disk = bench.disk();
        let results: Vec<Vec<Option<u8>>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|thread| {
                    scope.spawn(move || {
                        let mut random = Rng::new(thread);
                        let mut mine = vec![None; sectors as usize];
                        for _ in 0..400 {
                            let sector = random.below(sectors / 8) * 8 + thread;
                            let at = GuestOffset(sector * 512);
                            let known = &mut mine[sector as usize];
                            match random.below(8) {
                                0..4 => {
                                    let byte = random.next_u64() as u8;
                                    disk.write_at(&[byte; 512], at).unwrap();
                                    *known = Some(byte);
                                }
                                4 => {
                                    disk.write_zeroes(at, 512, true).unwrap();
                                    *known = Some(0);
                                }
                                5 if random.below(10) == 0 => disk.flush().unwrap(),
                                _ => {
                                    let mut bytes = [0; 512];
                                    disk.read_at(&mut bytes, at).unwrap();
                                    match known {
                                        Some(byte) => assert!(bytes == [*byte; 512]),
                                        None => assert!(bytes == model[at.0 as usize..][..512]),
                                    }
                                }
                            }
                        }
                        mine
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let mut bench = bench;
        for mine in results {
            for (sector, byte) in mine.into_iter().enumerate() {
                if let Some(byte) = byte {
                    bench.model[sector * 512..][..512].fill(byte);
                }
            }
        }
        bench.check();
    }
}

/// Images made by QEMU, three deep, of different sizes.
#[test]
fn chains_that_qemu_made_read_as_qemu_reads_them() {
    for (index, (cluster, options)) in SHAPES.iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let size = cluster * 20 + 512 * index as u64;
        fs::write(path("0"), content(size as usize, 5)).unwrap();
        let mut below = ("0".to_owned(), "raw");
        let sizes = [size * 2, size / 2 / 512 * 512, size * 3];
        for (layer, bytes) in sizes.iter().enumerate() {
            let name = (layer + 1).to_string();
            let (bytes_text, image) = (bytes.to_string(), path(&name));
            let base = path(&below.0);
            run(
                "qemu-img",
                &[
                    "create",
                    "-q",
                    "-f",
                    "qcow2",
                    "-o",
                    options,
                    "-b",
                    text(&base),
                    "-F",
                    below.1,
                    text(&image),
                    &bytes_text,
                ],
            );
            let mut random = Rng::new(layer as u64);
            let mut arguments = vec!["-f".to_owned(), "qcow2".to_owned()];
            for _ in 0..12 {
                let len = random.below(2 * cluster) / 512 * 512 + 512;
                let at = random.below(bytes.saturating_sub(len).max(1)) / 512 * 512;
                let len = len.min(bytes - at);
                arguments.push("-c".to_owned());
                arguments.push(match random.below(4) {
                    0 => format!("write -z {at} {len}"),
                    1 => format!("write -z -u {at} {len}"),
                    _ => format!("write -P {} {at} {len}", random.below(255) + 1),
                });
            }
            arguments.push(text(&image).to_owned());
            run("qemu-io", &arguments.iter().map(String::as_str).collect::<Vec<_>>());
            below = (name, "qcow2");
        }
        let drivers: [&'static dyn FormatDriver; 2] = [&Qcow2Driver, &RawDriver];
        let registry = Registry::new(drivers);
        let disk = Disk::open(&registry, path("3"), &OpenOptions::default()).unwrap();
        assert_eq!(disk.layers().len(), 4);
        let wanted = read_by_qemu(&path("3"));
        assert_eq!(disk.guest_bytes(), wanted.len() as u64);
        let mut bytes = vec![0xEE; wanted.len()];
        disk.read_at(&mut bytes, GuestOffset(0)).unwrap();
        assert!(bytes == wanted, "{options}");
        // In small and uneven steps too.
        for (step, piece) in bytes.chunks_mut(3001).enumerate() {
            piece.fill(0xEE);
            disk.read_at(piece, GuestOffset(step as u64 * 3001)).unwrap();
        }
        assert!(bytes == wanted, "{options}");
    }
}

/// The disk is shrunk to within a cluster that cannot be zeroed in place (compressed, or the
/// backing image's), and grows again.
#[test]
fn what_a_shrink_cut_off_does_not_come_back() {
    for shape in 0..SHAPES.len() {
        for base_parts in [0, 24] {
            for part in [1, 1 << 15] {
                let mut bench = Bench::new(shape, base_parts, CACHE);
                bench.apply(&Op::Resize { size: part });
                bench.apply(&Op::Resize { size: 1 << 16 });
                bench.check();
            }
        }
    }
}

/// The last cluster of the disk is short, compressed, and has subclusters; zeroing its
/// guest-visible part must not leave the compressed data.
#[test]
fn zeroes_reach_a_short_compressed_cluster_with_subclusters() {
    for may_unmap in [false, true] {
        let mut bench = Bench::new(6, 0, CACHE);
        let end = 3 * 65536 + 512;
        bench.disk().resize(end).unwrap();
        bench.model.truncate(end as usize);
        bench
            .disk()
            .write_zeroes(GuestOffset(2 * 65536 + 700), 65536 - 700 + 512, may_unmap)
            .unwrap();
        bench.model[2 * 65536 + 700..].fill(0);
        bench.check();
    }
}

/// Whichever call to the storage fails, a disk that did not grow shows its old size: what the format
/// made larger is taken back, or stays hidden where that fails too.
#[test]
fn a_disk_that_could_not_grow_shows_its_old_size() {
    for lasting in [false, true] {
        let mut hidden = 0;
        for nth in 0.. {
            let faulty = FaultyStorage::new(Arc::new(MemoryStorage::new("image")));
            create_image(&Qcow2Driver, faulty.clone(), 1 << 20, "cluster_size=4K");
            let disk = disk_on(&Qcow2Driver, faulty.clone());
            let bitmap = NewBitmap { name: "fine", granularity: Some(512), enabled: true };
            disk.top().bitmaps().unwrap().add(&bitmap).unwrap();
            let kinds = [FaultKind::Write, FaultKind::Sync];
            let plan = FaultPlan::nth(&kinds, nth);
            faulty.arm(if lasting { plan.lasting() } else { plan });
            let grown = disk.resize(40 << 20);
            faulty.heal();
            let large = disk.top().guest_bytes() > 1 << 20;
            if grown.is_ok() {
                assert_eq!(disk.guest_bytes(), 40 << 20);
                break;
            }
            assert_eq!(disk.guest_bytes(), 1 << 20, "call {nth}: {grown:?}");
            hidden += u32::from(large);
            if large {
                // The close is the last try. An image that keeps the size is not closed well.
                faulty.arm(FaultPlan::nth(&[FaultKind::Write], 0));
                disk.close().expect_err("the size was not taken back");
                faulty.heal();
                disk.close().expect("the next one takes it back");
                assert_eq!(disk.top().guest_bytes(), 1 << 20);
            }
        }
        assert!(!lasting || hidden > 0, "no size was hidden");
    }
}

/// Written in an order of its own, and discarded in that of the disk: what was freed is one hole.
#[test]
fn clusters_that_are_neighbors_in_the_file_are_discarded_together() {
    const CLUSTER: u64 = 64 << 10;
    const CLUSTERS: u64 = 256;
    let counting = CountingStorage::new(Arc::new(MemoryStorage::new("image")));
    create_image(&Qcow2Driver, counting.clone(), CLUSTERS * CLUSTER, "");
    let disk = disk_on(&Qcow2Driver, counting.clone());
    for i in 0..CLUSTERS {
        disk.write_at(&[1; CLUSTER as usize], GuestOffset(i * 77 % CLUSTERS * CLUSTER)).unwrap();
    }
    disk.flush().unwrap();
    let before = counting.counts().discards;
    disk.discard(GuestOffset(0), CLUSTERS * CLUSTER).unwrap();
    disk.flush().unwrap();
    assert_eq!(counting.counts().discards - before, 1);
}

/// The child's copy of the map does not have what the parent has allocated since: a close by it would cut
/// that off the file.
#[test]
fn a_child_of_fork_that_closes_a_disk_leaves_the_image_to_its_parent() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let new = FileStorage::create(&path, &FileOptions::read_write()).unwrap();
    create_image(&Qcow2Driver, Arc::new(new), 64 << 20, "");
    let disk = open_layer(&path, "qcow2", true, CacheMode::Writeback);
    disk.write_at(&[1; 4096], GuestOffset(0)).unwrap();
    let piece = vec![2; 4 << 20];
    let in_parent = || {
        disk.write_at(&piece, GuestOffset(8 << 20)).unwrap();
        disk.flush().unwrap();
    };
    let refused = || {
        let new = GuestOffset(16 << 20);
        disk.write_at(&[3; 4096], new).is_err()
            && disk.write_at(&[3; 4096], GuestOffset(0)).is_err()
            && disk.write_zeroes(GuestOffset(0), 1 << 20, true).is_err()
            && disk.write_zeroes_persistent(GuestOffset(0), 1 << 20).is_err()
            && disk.discard(GuestOffset(0), 1 << 20).is_err()
            && disk.resize(128 << 20).is_err()
            && disk.empty().is_err()
            && disk.flush().is_err()
            && disk.close().is_err()
    };
    assert!(in_child(in_parent, refused));
    let mut found = vec![0; piece.len()];
    disk.read_at(&mut found, GuestOffset(8 << 20)).unwrap();
    assert!(found == piece, "an acknowledged write is lost");
    disk.close().unwrap();
    drop(disk);
    let image: Arc<dyn Storage> =
        Arc::new(FileStorage::open(&path, &FileOptions::read_only()).unwrap());
    assert_sound(&Qcow2Driver, &image, false, "after the parent's close");
}

/// The caller names the data file of an image that does not name it. An image without a data file refuses one.
#[test]
fn a_data_file_may_be_named_only_where_the_image_has_one() {
    let folder = tempfile::tempdir().unwrap();
    let [image, data] = ["image.qcow2", "image.data"].map(|name| folder.path().join(name));
    let made = format!("data_file={}", text(&data));
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &made, text(&image), "1M"]);
    let mut header = fs::read(&image).unwrap();
    let name = header.windows(4).position(|kind| kind == b"DATA").unwrap();
    // An extension of an unknown type.
    header[name..name + 4].copy_from_slice(b"ATAD");
    fs::write(&image, &header).unwrap();
    let drivers: [&'static dyn FormatDriver; 2] = [&Qcow2Driver, &RawDriver];
    let registry = Registry::new(drivers);
    let options = OpenOptions::read_write().format("qcow2");
    let error = Disk::open(&registry, &image, &options).unwrap_err();
    assert!(error.to_string().contains("without a name"), "{error}");
    let named = options.clone().data_file(Some(data));
    let disk = Disk::open(&registry, &image, &named).unwrap();
    disk.write_at(&[7; 512], GuestOffset(0)).unwrap();
    disk.close().unwrap();
    drop(disk);
    run("qemu-img", &["create", "-q", "-f", "qcow2", text(&image), "1M"]);
    Disk::open(&registry, &image, &options).unwrap();
    let error = Disk::open(&registry, &image, &named).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
}
