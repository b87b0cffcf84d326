//! Jobs compared with QEMU's tools, across the options of qcow2.

use std::path::{Path, PathBuf};

use vdkit_block::{
    CancelToken, Codec, CompressionSpec, Creation, Error, FormatDriver, GuestOffset, Monitor,
    Options, Progress,
};
use vdkit_chain::{Disk, OpenOptions, Registry};
use vdkit_copy::{
    CompareOptions, ConvertOptions, Destination, NewBacking, NewImage, RebaseOptions, Source,
    compare, convert, rebase,
};
use vdkit_image::{map, measure};
use vdkit_qcow2::Qcow2Driver;
use vdkit_raw::RawDriver;
use vdkit_testbase::{Rng, qemu, require_peer};
use vdkit_tree::{ReferenceStatus, TreeOptions, tree};

const MIB: u64 = 1 << 20;
/// Not a multiple of any cluster size.
const SIZE: u64 = 24 * MIB + 3 * 512;

/// qcow2 options that change the layout.
const LAYOUTS: &[&str] = &[
    "cluster_size=64k",
    "cluster_size=512",
    "cluster_size=2M",
    "compat=0.10",
    "cluster_size=32k,extended_l2=on",
    "refcount_bits=1",
    "refcount_bits=64,lazy_refcounts=on",
    "preallocation=metadata",
    "compression_type=zstd",
];

fn registry() -> Registry {
    let drivers: [&'static dyn FormatDriver; 2] = [&Qcow2Driver, &RawDriver];
    Registry::new(drivers)
}

fn open(path: &Path, format: &str) -> Disk {
    Disk::open(&registry(), path, &OpenOptions::read_only().format(format)).unwrap()
}

fn new_image(path: &Path, format: &str, options: &str) -> NewImage {
    let driver = registry().driver(format).unwrap();
    NewImage::new(path, format)
        .options(Options::parse(format, driver.options(), [options]).unwrap())
}

/// A raw disk with text, noise, written zeroes and holes.
fn make_raw(path: &Path, seed: u64) {
    let mut rng = Rng::new(seed);
    let mut bytes = vec![0; SIZE as usize];
    for _ in 0..40 {
        let at = rng.below(SIZE / 512) * 512;
        let len = (512 << rng.below(10)).min(SIZE - at) as usize;
        let part = &mut bytes[at as usize..at as usize + len];
        match rng.below(3) {
            0 => rng.fill(part),
            1 => part.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i / 5 % 61) as u8 + 1),
            _ => part.fill(0),
        }
    }
    // Data at both ends.
    bytes[0] = 1;
    *bytes.last_mut().unwrap() = 2;
    std::fs::write(path, &bytes).unwrap();
    qemu::img(
        ["convert", "-f", "raw", "-O", "raw"]
            .iter()
            .map(PathBuf::from)
            .chain([path.to_owned(), path.with_extension("sparse")]),
    )
    .ok();
    std::fs::rename(path.with_extension("sparse"), path).unwrap();
}

struct Case {
    _dir: tempfile::TempDir,
    dir: PathBuf,
    raw: PathBuf,
}

impl Case {
    fn new(seed: u64) -> Option<Self> {
        if !require_peer("qemu-img") || !require_peer("qemu-io") {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_owned();
        let raw = path.join("disk.raw");
        make_raw(&raw, seed);
        Some(Self { _dir: dir, dir: path, raw })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn source(&self, path: &Path, format: &str) -> Source {
        Source::new(vec![open(path, format)])
    }

    /// Converts with our job; QEMU checks and compares the result.
    fn convert(
        &self,
        from: (&Path, &str),
        to: (&str, &str),
        options: &str,
        change: Change,
    ) -> PathBuf {
        let path = self.path(to.0);
        let destination = Destination::New(new_image(&path, to.1, options));
        let mut how = ConvertOptions::new(destination);
        change(&mut how);
        let source = self.source(from.0, from.1);
        convert(&registry(), &source, &how, &Monitor::default())
            .unwrap_or_else(|error| panic!("{options}: {error}"));
        assert!(qemu::same((&self.raw, "raw"), (&path, to.1)), "{options}");
        if to.1 == "qcow2" {
            let checked = qemu::check(&path, "qcow2", None);
            assert!(checked.clean(), "{options}: {}", checked.text);
        }
        path
    }
}

type Change = fn(&mut ConvertOptions);

#[test]
fn every_layout_is_converted_to_and_from_and_measured() {
    let Some(case) = Case::new(1) else { return };
    for (index, layout) in LAYOUTS.iter().enumerate() {
        let theirs = case.path("theirs.qcow2");
        qemu::convert((&case.raw, "raw"), (&theirs, "qcow2"), &["-o", layout]);
        let next = LAYOUTS[(index + 1) % LAYOUTS.len()];
        let verify: Change = |how| how.verify = true;
        let ours = case.convert((&case.raw, "raw"), ("ours.qcow2", "qcow2"), layout, verify);
        case.convert((&theirs, "qcow2"), ("back.raw", "raw"), "", |_| ());
        let again = case.convert((&ours, "qcow2"), ("again.qcow2", "qcow2"), next, verify);
        let parsed = Options::parse("qcow2", Qcow2Driver.options(), [*layout]).unwrap();
        let measured =
            measure(&[open(&again, "qcow2")], &Qcow2Driver, &parsed, &Monitor::default()).unwrap();
        // The measured size suffices for the created image; preallocated images have other lengths.
        let made = case.convert((&again, "qcow2"), ("made.qcow2", "qcow2"), layout, |_| ());
        let len = std::fs::metadata(&made).unwrap().len();
        let preallocated = layout.starts_with("preallocation");
        assert!(
            preallocated || len <= measured.required,
            "{layout}: {len} > {}",
            measured.required
        );

        let report = compare(
            &open(&ours, "qcow2"),
            &open(&theirs, "qcow2"),
            &{
                let mut new = CompareOptions::default();
                new.strict = true;
                new.threads = Some(2);
                new
            },
            &Monitor::default(),
        );
        assert!(report.unwrap().identical, "{layout}");
        for path in [&case.raw, &theirs] {
            let format = if path == &theirs { "qcow2" } else { "raw" };
            same_measure(path, format, next);
        }
    }
}

/// Measures as QEMU does. QEMU mostly counts qcow2 source clusters in holes of the file as data;
/// our result is then smaller.
fn same_measure(path: &Path, format: &str, options: &str) {
    let parsed = Options::parse("qcow2", Qcow2Driver.options(), [options]).unwrap();
    let disks = [open(path, format)];
    let ours = measure(&disks, &Qcow2Driver, &parsed, &Monitor::default()).unwrap();
    let path = path.display().to_string();
    let args = ["measure", "--output=json", "-f", format, "-O", "qcow2", "-o", options, &path];
    let theirs: serde_json::Value = serde_json::from_str(&qemu::img(args).ok()).unwrap();
    let required = theirs["required"].as_u64().unwrap();
    if format == "raw" {
        assert_eq!(ours.required, required, "{options}");
    } else {
        assert!(ours.required <= required, "{options}: {} > {required}", ours.required);
    }
    assert_eq!(theirs["fully-allocated"], ours.fully_allocated, "{options} from {format}");
}

#[test]
fn compressed_images_are_written_and_read_whatever_the_threads() {
    let Some(case) = Case::new(2) else { return };
    for (layout, codec) in [
        ("cluster_size=64k", Codec::Deflate),
        ("cluster_size=4k", Codec::Deflate),
        ("cluster_size=2M", Codec::Deflate),
        ("compression_type=zstd", Codec::Zstd),
        ("cluster_size=64k,extended_l2=on", Codec::Deflate),
    ] {
        let mut files = Vec::new();
        for threads in [1, 2, 7] {
            let path = case.path("compressed.qcow2");
            let image = new_image(&path, "qcow2", layout);
            let mut how = ConvertOptions::new(Destination::New(image));
            how.compress = Some(CompressionSpec { codec, level: None });
            how.threads = Some(threads);
            let source = case.source(&case.raw, "raw");
            let report = convert(&registry(), &source, &how, &Monitor::default()).unwrap();
            assert!(report.moved.clusters_compressed > 0, "{layout}");
            assert_eq!(report.threads, threads);
            files.push(std::fs::read(&path).unwrap());
        }
        let path = case.path("compressed.qcow2");
        // The same input gives the same output to the byte.
        assert!(files.iter().all(|file| *file == files[0]), "{layout}");
        assert!(qemu::same((&case.raw, "raw"), (&path, "qcow2")), "{layout}");
        assert!(qemu::check(&path, "qcow2", None).clean(), "{layout}");
        case.convert((&path, "qcow2"), ("unpacked.raw", "raw"), "", |_| ());
        // An image compressed by QEMU is read back.
        let theirs = case.path("theirs.qcow2");
        qemu::convert((&case.raw, "raw"), (&theirs, "qcow2"), &["-c", "-o", layout]);
        case.convert((&theirs, "qcow2"), ("unpacked.raw", "raw"), "", |_| ());
    }
}

/// Cancels once some work is done.
struct CancelAfter(CancelToken);

impl Progress for CancelAfter {
    fn update(&self, done: u64, _total: u64) {
        if done > MIB {
            self.0.cancel();
        }
    }

    fn message(&self, _text: &str) {}
}

#[test]
fn a_cancelled_conversion_leaves_what_was_there() {
    let Some(case) = Case::new(3) else { return };
    let old = case.path("old.qcow2");
    std::fs::write(&old, b"what was there").unwrap();
    for name in ["old.qcow2", "new.qcow2"] {
        let before: Vec<_> = listing(&case.dir);
        let token = CancelToken::default();
        let progress = CancelAfter(token.clone());
        let monitor = Monitor::new(&progress).cancelled_by(token);
        let image = new_image(&case.path(name), "qcow2", "cluster_size=64k");
        let mut how = ConvertOptions::new(Destination::New(image));
        how.compress = Some(CompressionSpec { codec: Codec::Deflate, level: None });
        let source = case.source(&case.raw, "raw");
        let result = convert(&registry(), &source, &how, &monitor);
        assert!(matches!(result, Err(Error::Interrupted)), "{result:?}");
        assert_eq!(listing(&case.dir), before);
    }
    assert_eq!(std::fs::read(&old).unwrap(), b"what was there");
}

fn listing(dir: &Path) -> Vec<PathBuf> {
    let mut names: Vec<_> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.sort();
    names
}

#[test]
fn maps_say_what_qemu_says() {
    let Some(case) = Case::new(4) else { return };
    let base = case.path("base.qcow2");
    qemu::convert((&case.raw, "raw"), (&base, "qcow2"), &["-c"]);
    let top = case.path("top.qcow2");
    qemu::create(&top, "qcow2", SIZE, &[], Some(("base.qcow2", "qcow2")));
    qemu::io(
        &top,
        "qcow2",
        &["write -P 7 1M 100k", "write -z 3M 1M", "write -P 9 10M 192k", "discard 2M 64k"],
    );
    for (path, format) in [(&case.raw, "raw"), (&base, "qcow2"), (&top, "qcow2")] {
        let disk = open(path, format);
        // Data runs and their offsets; the end of a raw file's last block may differ.
        let ours: Vec<_> = map(&disk, 0, disk.guest_bytes())
            .unwrap()
            .map(Result::unwrap)
            .filter(|row| row.data)
            .map(|row| (row.start, row.length, row.depth as u64, row.compressed, row.offset))
            .collect();
        let theirs: Vec<_> = qemu::map(path, format)
            .iter()
            .filter(|row| row["data"] == true)
            .map(|row| {
                let number = |key: &str| row[key].as_u64();
                let compressed = row["compressed"].as_bool().unwrap_or(false);
                let place = number("offset").filter(|_| !compressed);
                let [start, length, depth] = ["start", "length", "depth"].map(number);
                (start.unwrap(), length.unwrap(), depth.unwrap(), compressed, place)
            })
            .collect();
        assert_eq!(joined(ours), joined(theirs), "{}", path.display());
    }
}

type Row = (u64, u64, u64, bool, Option<u64>);

/// Merges rows of compressed clusters, which each program splits differently.
fn joined(rows: Vec<Row>) -> Vec<Row> {
    let mut all: Vec<Row> = Vec::new();
    for row in rows {
        match all.last_mut() {
            Some(last) if row.3 && last.3 && last.2 == row.2 && last.0 + last.1 == row.0 => {
                last.1 += row.1;
            }
            _ => all.push(row),
        }
    }
    all
}

#[test]
fn a_tree_names_overlays_orphans_and_what_a_deletion_costs() {
    let Some(case) = Case::new(5) else { return };
    let [base, mid, left, right, lost, far] =
        ["base.qcow2", "mid.qcow2", "left.qcow2", "right.qcow2", "lost.qcow2", "far.qcow2"]
            .map(|name| case.path(name).canonicalize().unwrap_or_else(|_| case.path(name)));
    qemu::create(&base, "qcow2", MIB, &[], Some(("disk.raw", "raw")));
    qemu::create(&mid, "qcow2", MIB, &[], Some(("base.qcow2", "qcow2")));
    qemu::create(&left, "qcow2", MIB, &[], Some(("./mid.qcow2", "qcow2")));
    qemu::create(&right, "qcow2", MIB, &[], Some(("mid.qcow2", "qcow2")));
    for (path, name) in [(&lost, "gone.qcow2"), (&far, "/etc/hostname")] {
        qemu::img(
            ["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", name]
                .iter()
                .map(PathBuf::from)
                .chain([path.clone(), PathBuf::from("1M")]),
        )
        .ok();
    }
    std::fs::write(case.path("notes.txt"), "no image").unwrap();

    let registry = registry();
    let look =
        |path: &Path| tree(&registry, path, &TreeOptions::default(), &Monitor::default()).unwrap();
    let report = look(&case.dir);
    let names = |paths: &[PathBuf]| -> Vec<String> {
        paths.iter().map(|p| p.file_name().unwrap().to_string_lossy().into_owned()).collect()
    };
    let image = |name: &str| {
        report
            .images
            .iter()
            .find(|image| image.path.ends_with(name))
            .unwrap_or_else(|| panic!("{name} is not in {report:?}"))
    };
    assert_eq!(names(&image("mid.qcow2").overlays), ["left.qcow2", "right.qcow2"]);
    assert_eq!(
        names(&image("disk.raw").deleting_orphans),
        ["base.qcow2", "left.qcow2", "mid.qcow2", "right.qcow2"]
    );
    assert_eq!(names(&report.orphans), ["lost.qcow2"]);
    let standing = |name: &str| image(name).backing.as_ref().unwrap().standing;
    assert_eq!(standing("left.qcow2"), ReferenceStatus::Listed);
    assert_eq!(standing("lost.qcow2"), ReferenceStatus::Missing);
    // Not beneath the image's own folder.
    assert_eq!(standing("far.qcow2"), ReferenceStatus::Refused);
    assert!(report.images.iter().all(|image| !image.path.ends_with("notes.txt")));
    assert!(report.faults.is_empty(), "{report:?}");

    // For one image: only its relatives.
    let report = look(&left);
    let family: Vec<_> = report.images.iter().map(|image| image.path.clone()).collect();
    assert_eq!(names(&family), ["base.qcow2", "disk.raw", "left.qcow2", "mid.qcow2"]);
}

/// Behind the end of the new backing image there may be a cluster in which data and a hole meet.
#[test]
fn a_rebase_to_a_shorter_backing_image_keeps_the_disk() {
    if !require_peer("qemu-img") {
        return;
    }
    for compress in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let mut bytes = vec![0; 2 << 20];
        bytes[1_600_000] = b'x';
        let old = std::fs::File::create(path("base.raw")).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&old, b"x", 1_600_000).unwrap();
        old.set_len(2 << 20).unwrap();
        let made = |args: &[&str]| {
            let done =
                std::process::Command::new("qemu-img").args(args).current_dir(&folder).output();
            assert!(done.unwrap().status.success(), "{args:?}");
        };
        made(&["create", "-q", "-f", "qcow2", "short.qcow2", "1M"]);
        made(&["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "top.qcow2"]);
        let mut options = RebaseOptions::default();
        options.backing = Some(NewBacking::new("short.qcow2", Some("qcow2".to_owned())));
        options.compress = compress;
        let opening = OpenOptions::read_write();
        rebase(&registry(), &path("top.qcow2"), &opening, &options, &Monitor::default()).unwrap();
        let mut found = vec![1; 2 << 20];
        open(&path("top.qcow2"), "qcow2").read_at(&mut found, GuestOffset(0)).unwrap();
        assert!(found == bytes, "compress: {compress}");
    }
}
