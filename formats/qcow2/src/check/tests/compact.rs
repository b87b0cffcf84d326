//! Compaction: the same disk in a smaller file, also after an interruption.

use std::sync::{Arc, LazyLock};

use vdkit_block::bytes::be32;
use vdkit_block::{CompactOptions, CompactReport, Limits, Monitor, Repair, Result, Storage};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{CrashStorage, FaultKind, FaultPlan, FaultyStorage, Rng, qemu};

use super::support::{
    Heard, Image, KINDS, Kind, all_views, assert_clean, check_storage, kind, must, open, peers,
    qemu_check, same_guest,
};
use crate::check;

fn all() -> CompactOptions {
    CompactOptions::default().zero_scan(true)
}

fn compact(storage: &Arc<dyn Storage>) -> Result<CompactReport> {
    check::compact(storage, None, all(), &Limits::default(), &Monitor::default())
}

/// Writes zeroes, discards and new data at random places, as in an aged disk.
fn wear(image: &Image, seed: u64) {
    let mut rng = Rng::new(seed);
    let header = image.header();
    let unit = header.geometry.cluster_bytes().max(4096);
    let units = header.guest_bytes / unit;
    let mut commands = Vec::new();
    for _ in 0..20 {
        let count = 1 + rng.below(units / 8);
        let at = rng.below(units - count) * unit;
        let bytes = count * unit;
        let verb = match rng.below(5) {
            0 | 1 => "discard".to_owned(),
            2 => "write -P 0".to_owned(),
            _ => format!("write -P {}", 1 + rng.below(250)),
        };
        commands.extend(["-c".to_owned(), format!("{verb} {at} {bytes}")]);
    }
    let mut args = vec!["-f", "qcow2", "-d", "unmap"];
    args.extend(commands.iter().map(String::as_str));
    args.push(image.path.to_str().unwrap());
    must("qemu-io", &args);
}

fn worn(kind: &Kind, seed: u64) -> Image {
    let image = Image::make(kind);
    wear(&image, seed);
    image
}

/// Clusters in use, and clusters of the file.
fn density(image: &Image) -> (u64, u64) {
    let header = image.header();
    let clusters = image.len().div_ceil(header.geometry.cluster_bytes());
    let used = (0..clusters)
        .filter(|&cluster| {
            let host = cluster << header.geometry.cluster_bits;
            image.refcount(host).0 != 0 && image.get_refcount(host) > 0
        })
        .count() as u64;
    (used, clusters)
}

fn bitmaps(image: &Image) -> serde_json::Value {
    qemu::info(&image.path, "qcow2")["format-specific"]["data"]["bitmaps"].clone()
}

#[test]
fn the_same_disk_in_a_smaller_file() {
    if !peers() {
        return;
    }
    for kind in KINDS {
        let image = worn(kind, 11);
        let (before, views) = (image.copy(), all_views(&open(&image.path)));
        let report = compact(&open(&image.path)).unwrap();
        let name = kind.name;
        assert_eq!(qemu_check(&image.path).exit, 0, "{name}: {report:?}");
        assert_clean(&open(&image.path), name);
        assert!(same_guest(&before.path, &image.path), "{name}");
        assert!(views == all_views(&open(&image.path)), "{name}");
        assert_eq!(bitmaps(&before), bitmaps(&image), "{name}");
        assert_eq!(report.length_after, image.len(), "{name}");
        let (used, clusters) = density(&image);
        println!(
            "{name}: {} to {} bytes, {used} of {clusters} in use: {report:?}",
            before.len(),
            image.len()
        );
        if !kind.compressed {
            assert!(clusters <= used + 3, "{name}: {used} of {clusters}: {report:?}");
            assert_eq!(report.left_alone, [], "{name}");
        }
        // A second run finds nothing to do and changes no byte.
        let bytes = std::fs::read(&image.path).unwrap();
        let again = compact(&open(&image.path)).unwrap();
        assert_eq!((again.moved_clusters, again.zero_clusters), (0, 0), "{name}: {again:?}");
        assert!(bytes == std::fs::read(&image.path).unwrap(), "{name}");
        // The image is still writable.
        must("qemu-io", &["-f", "qcow2", "-c", "write 0 64k", image.path.to_str().unwrap()]);
        assert_eq!(qemu_check(&image.path).exit, 0, "{name} after a write");
    }
}

#[test]
fn a_zero_cluster_hides_what_is_beneath_as_before() {
    if !peers() {
        return;
    }
    for (options, zeroes) in
        [("compat=1.1", 16), ("compat=0.10", 0), ("extended_l2=on,cluster_size=64k", 17)]
    {
        let (base, image) = (Image::empty(), Image::empty());
        let (base_file, file) = (base.path.to_str().unwrap(), image.path.to_str().unwrap());
        must("qemu-img", &["create", "-q", "-f", "qcow2", base_file, "8M"]);
        must("qemu-io", &["-f", "qcow2", "-c", "write -P 7 0 8M", base_file]);
        let create =
            ["create", "-q", "-f", "qcow2", "-o", options, "-b", base_file, "-F", "qcow2", file];
        must("qemu-img", &create);
        let writes = ["-c", "write -P 1 0 2M", "-c", "write -P 0 1M 1M", "-c", "write -P 0 5M 2k"];
        must("qemu-io", &[&["-f", "qcow2"], &writes[..], &[file]].concat());
        let before = image.copy();
        let report = compact(&open(&image.path)).unwrap();
        assert_eq!(report.zero_clusters, zeroes, "{options}: {report:?}");
        assert!(same_guest(&before.path, &image.path), "{options}");
        assert_eq!(qemu_check(&image.path).exit, 0, "{options}");
    }
}

#[test]
fn without_a_scan_no_data_is_read_and_none_is_dropped() {
    if !peers() {
        return;
    }
    let image = Image::make(kind("cluster-512"));
    must("qemu-io", &["-f", "qcow2", "-c", "write -P 0 0 64k", image.path.to_str().unwrap()]);
    let options = CompactOptions::default().zero_scan(false);
    let limits = Limits::default();
    let report =
        check::compact(&open(&image.path), None, options, &limits, &Monitor::default()).unwrap();
    assert_eq!(report.zero_clusters, 0, "{report:?}");
    let report = compact(&open(&image.path)).unwrap();
    assert_eq!(report.zero_clusters, 128, "{report:?}");
}

#[test]
fn a_damaged_image_is_refused_and_left_as_it_is() {
    if !peers() {
        return;
    }
    let image = Image::make(kind("plain"));
    image.put_word(image.l2_entry(0), 1 << 44);
    let before = std::fs::read(&image.path).unwrap();
    let error = compact(&open(&image.path)).unwrap_err();
    assert_eq!(error.remedy(), Some(vdkit_block::Remedy::REPAIR), "{error}");
    assert!(before == std::fs::read(&image.path).unwrap());
}

#[test]
fn encrypted_data_stays_where_it_is() {
    if !peers() {
        return;
    }
    for format in ["luks,encrypt.iter-time=10", "aes"] {
        let image = Image::empty();
        let file = image.path.to_str().unwrap();
        let secret = ["--object", "secret,id=s,data=x"];
        let options = format!("encrypt.key-secret=s,encrypt.format={format}");
        let create = ["create", "-q", "-f", "qcow2", "-o", &options, file, "16M"];
        must("qemu-img", &[&create[..1], &secret[..], &create[1..]].concat());
        let spec = format!("driver=qcow2,encrypt.key-secret=s,file.filename={file}");
        let io = |commands: &[&str]| {
            let commands = commands.iter().flat_map(|command| ["-c", *command]);
            let fixed = [&secret[..], &["-d", "unmap", "--image-opts", &spec]].concat();
            must("qemu-io", &fixed.into_iter().chain(commands).collect::<Vec<_>>());
        };
        io(&["write -P 1 0 4M", "write -P 2 4M 1M", "discard 1M 2M", "write -P 0 4M 64k"]);
        // Zeroes on disk are noise to the guest, so they must not be dropped.
        let zeroed = image.word(image.l2_entry(0)) & crate::layout::OFFSET_MASK;
        image.put(zeroed, &vec![0; 65536]);
        let views = || {
            let out = image.path.with_extension("raw");
            let to = out.to_str().unwrap();
            let convert = ["convert", "--image-opts", &spec, "-O", "raw", to];
            must("qemu-img", &[&convert[..1], &secret[..], &convert[1..]].concat());
            std::fs::read(out).unwrap()
        };
        let before = views();
        assert!(before[..65536].iter().any(|&byte| byte != 0));
        let report = compact(&open(&image.path)).unwrap();
        assert!(before == views(), "{format}: {report:?}");
        assert_eq!(report.zero_clusters, 0, "{format}: {report:?}");
        assert_eq!(report.left_alone.is_empty(), format == "aes", "{report:?}");
        io(&["read -P 1 64k 960k", "read -P 2 4160k 960k", "read -P 0 4M 64k"]);
    }
}

/// Images with small clusters, for many moves in few bytes.
const CRASHED: &[&str] = &["cluster-512", "refcounts-1", "refcounts-4", "zstd", "bitmap"];

struct Case {
    name: &'static str,
    image: Image,
    memory: MemoryStorage,
    views: Vec<Vec<Option<u64>>>,
    /// Bytes of the file after an undisturbed compaction.
    length: u64,
}

impl Case {
    fn new(name: &'static str) -> Self {
        let image = worn(kind(name), 5);
        let memory = image.memory();
        let views = all_views(&(Arc::new(memory.clone()) as Arc<dyn Storage>));
        let calm: Arc<dyn Storage> = Arc::new(memory.clone());
        compact(&calm).unwrap();
        let length = calm.len().unwrap();
        assert!(length < memory.len().unwrap(), "{name}");
        Self { name, image, memory, views, length }
    }

    /// Asserts that the disk is unchanged, that there are only leaks, and that another run
    /// succeeds.
    fn assert_survived(&self, storage: &Arc<dyn Storage>, what: &str) {
        let what = format!("{}: {what}", self.name);
        let found = check_storage(storage, Repair::Nothing).unwrap();
        assert_eq!(found.corruptions, 0, "{what}: {:#?}", found.findings);
        assert!(self.views == all_views(storage), "{what}");
        let report = compact(storage).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(self.views == all_views(storage), "{what}, then again");
        assert_clean(storage, &what);
        // A cluster of several tables, of which only some entries were moved, is now two clusters.
        let slack = self.length / 8 + 65536;
        assert!(storage.len().unwrap() <= self.length + slack, "{what}: {report:?}");
    }
}

#[test]
fn a_power_cut_at_any_point_leaves_the_same_disk() {
    if !peers() {
        return;
    }
    let mut rng = Rng::from_env(9);
    for name in CRASHED {
        let case = Case::new(name);
        let crash = CrashStorage::holding(&case.memory);
        compact(&(Arc::clone(&crash) as Arc<dyn Storage>)).unwrap();
        println!("{name}: {} changes, seed {}", crash.ops(), rng.seed());
        let every = (crash.ops() / 200).max(1);
        crash.for_each_crash(|ops, moment| {
            if ops % every != 0 {
                return;
            }
            let survivors = [
                moment.only_durable(),
                moment.everything(),
                moment.survivor(&mut rng),
                moment.survivor(&mut rng),
            ];
            for (i, survivor) in survivors.into_iter().enumerate() {
                let what = format!("after {ops} changes, survivor {i}");
                let survivor: Arc<dyn Storage> = Arc::new(survivor);
                case.assert_survived(&survivor, &what);
                if ops % (every * 20) == 0 {
                    case.image.assert_sound_for_qemu(&*survivor, &format!("{name}: {what}"));
                }
            }
        });
    }
}

#[test]
fn an_error_at_any_point_leaves_the_same_disk() {
    if !peers() {
        return;
    }
    const KINDS: [FaultKind; 5] =
        [FaultKind::Read, FaultKind::Write, FaultKind::Zero, FaultKind::Sync, FaultKind::SetLen];
    for name in CRASHED {
        let case = Case::new(name);
        let mut nth = 0;
        loop {
            let memory = Arc::new(case.memory.clone());
            let faulty = FaultyStorage::new(Arc::clone(&memory) as Arc<dyn Storage>);
            let plan = FaultPlan::nth(&KINDS, nth);
            faulty.arm(if nth % 2 == 0 { plan } else { plan.no_space().lasting().torn(3) });
            let result = compact(&(Arc::clone(&faulty) as Arc<dyn Storage>));
            if faulty.fired() == 0 {
                assert!(result.is_ok(), "{name}");
                break;
            }
            assert!(result.is_err(), "{name}: fault {nth}");
            case.assert_survived(&(memory as Arc<dyn Storage>), &format!("fault {nth}"));
            // Every early fault, then a sample.
            nth += if nth < 60 { 1 } else { 7 };
        }
    }
}

/// A field of the header.
fn field(image: &Image, at: u64) -> u32 {
    be32(&image.bytes(at, 4), 0)
}

/// An image whose L1 table was made for a larger disk, and its refcount table for a longer file.
fn once_larger() -> Image {
    // Made once: QEMU discards the clusters one by one.
    static MADE: LazyLock<Vec<u8>> = LazyLock::new(|| {
        let image = Image::empty();
        let file = image.path.to_str().unwrap();
        let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", file, "1G"];
        must("qemu-img", &create);
        let writes =
            ["-c", "write -P 1 0 300k", "-c", "write -P 2 40M 17M", "-c", "write -P 3 1M 64k"];
        must("qemu-io", &[&["-f", "qcow2"], &writes[..], &[file]].concat());
        let no_syncs = "driver=qcow2,cache.no-flush=on,file.driver=file,file.cache.no-flush=on";
        let opened = format!("{no_syncs},file.filename={file}");
        must("qemu-img", &["resize", "-q", "--image-opts", "--shrink", &opened, "2M"]);
        std::fs::read(&image.path).unwrap()
    });
    let image = Image::empty();
    std::fs::write(&image.path, &*MADE).unwrap();
    image
}

#[test]
fn tables_become_as_short_as_the_disk_and_the_file() {
    if !peers() {
        return;
    }
    let image = once_larger();
    let (l1, clusters) = (field(&image, 36), field(&image, 56));
    assert!(l1 == 32768 && clusters > 2, "{l1} entries, {clusters} clusters");
    let before = image.copy();
    let report = compact(&open(&image.path)).unwrap();
    assert_eq!(qemu_check(&image.path).exit, 0, "{report:?}");
    assert!(same_guest(&before.path, &image.path));
    // 2 MiB of disk: 64 L2 tables. 364 KiB of file: 3 blocks.
    assert_eq!((field(&image, 36), field(&image, 56)), (64, 1), "{report:?}");
    assert!(report.table_clusters >= 511 + u64::from(clusters) - 1, "{report:?}");
    assert!(image.len() < 450 << 10, "{} bytes: {report:?}", image.len());
    let again = compact(&open(&image.path)).unwrap();
    assert_eq!((again.table_clusters, again.moved_clusters), (0, 0), "{again:?}");
    // QEMU enlarges both again.
    let file = image.path.to_str().unwrap();
    must("qemu-img", &["resize", "-q", "-f", "qcow2", file, "1G"]);
    must("qemu-io", &["-f", "qcow2", "-c", "write -P 4 900M 20M", file]);
    assert_eq!(qemu_check(&image.path).exit, 0);
    must("qemu-io", &["-f", "qcow2", "-c", "read -P 1 0 300k", "-c", "read -P 3 1M 64k", file]);
}

#[test]
fn a_power_cut_while_tables_become_shorter_leaves_the_same_disk() {
    if !peers() {
        return;
    }
    let image = once_larger();
    let memory = image.memory();
    let views = all_views(&(Arc::new(memory.clone()) as Arc<dyn Storage>));
    let crash = CrashStorage::holding(&memory);
    compact(&(Arc::clone(&crash) as Arc<dyn Storage>)).unwrap();
    let mut rng = Rng::from_env(12);
    println!("{} changes, seed {}", crash.ops(), rng.seed());
    let every = (crash.ops() / 60).max(1);
    crash.for_each_crash(|ops, moment| {
        // Tables are shortened at the beginning and the end of a compaction.
        if ops > 20 && ops + 20 < crash.ops() && ops % every != 0 {
            return;
        }
        for survivor in [moment.only_durable(), moment.survivor(&mut rng)] {
            let survivor: Arc<dyn Storage> = Arc::new(survivor);
            let found = check_storage(&survivor, Repair::Nothing).unwrap();
            assert_eq!(found.corruptions, 0, "after {ops}: {:#?}", found.findings);
            assert!(views == all_views(&survivor), "after {ops}");
            compact(&survivor).unwrap();
            assert!(views == all_views(&survivor), "after {ops}, then again");
            assert!(survivor.len().unwrap() < 450 << 10, "after {ops}");
        }
    });
}

#[test]
fn progress_is_one_bar_that_never_goes_back() {
    if !peers() {
        return;
    }
    let image = worn(kind("cluster-512"), 6);
    let heard = Heard::default();
    let monitor = Monitor::new(&heard);
    let report =
        check::compact(&open(&image.path), None, all(), &Limits::default(), &monitor).unwrap();
    assert!(report.zero_clusters > 0 && report.moved_clusters > 0, "{report:?}");
    let heard = heard.0.into_inner();
    assert!(heard.len() > 10 && heard.is_sorted_by_key(|(done, _)| *done), "{heard:?}");
    let total = report.length_before;
    assert!(heard.iter().all(|(done, of)| *of == total && done <= of), "{heard:?}");
    assert_eq!(heard.last(), Some(&(total, total)));
}
