//! Images made by vdkit and read by QEMU and libvmdk, and the reverse.

use std::path::Path;

use vdkit::jobs::{CreateOptions, create};
use vdkit::{Disk, GuestOffset, Monitor, OpenOptions, Options};
use vdkit_testkit::{Rng, cases, python, qemu, require_peer};

/// The tested disks: subformat and other options, bytes.
pub const KINDS: &[(&str, u64)] = &[
    ("subformat=monolithicSparse", (70 << 20) + 512),
    ("subformat=monolithicSparse,zeroed_grain=on,adapter_type=lsilogic", 40 << 20),
    ("subformat=monolithicFlat,adapter_type=buslogic,hwversion=7", (5 << 20) + 512),
    ("subformat=twoGbMaxExtentSparse,compat6=on", (4 << 30) + (1 << 20)),
    ("subformat=twoGbMaxExtentSparse,zeroed_grain=on,toolsversion=10", (2 << 30) + 512),
    ("subformat=twoGbMaxExtentFlat,adapter_type=legacyESX", (4 << 30) + 512),
];

pub fn make(path: &Path, bytes: u64, options: &str) {
    let driver = vdkit::format("vmdk").unwrap();
    let options = CreateOptions::new(path, driver)
        .guest_bytes(bytes)
        .options(Options::parse("vmdk", driver.options(), [options]).unwrap());
    create(&vdkit::registry(), &options, &Monitor::default()).unwrap();
}

pub fn open(path: &Path, writable: bool) -> Disk {
    let options = if writable { OpenOptions::read_write() } else { OpenOptions::read_only() };
    Disk::open(&vdkit::registry(), path, &options).unwrap_or_else(|e| panic!("{path:?}: {e}"))
}

/// Some ranges of the disk, mostly at edges: of grains, tables, extents, and the end.
fn places(bytes: u64, rng: &mut Rng) -> Vec<(u64, u64)> {
    let mut places = Vec::new();
    for edge in [0, 65536, 32 << 20, 2 << 30, 4 << 30, bytes] {
        let edge = edge.min(bytes);
        let before = (rng.below(300) * 512).min(edge);
        places.push((edge - before, (before + rng.below(300) * 512).min(bytes - edge + before)));
    }
    for _ in 0..6 {
        let at = rng.below(bytes / 512) * 512;
        places.push((at, (rng.below(600) * 512).min(bytes - at)));
    }
    places.retain(|&(_, len)| len > 0);
    places
}

/// A sparse file with the same bytes.
struct Model {
    path: std::path::PathBuf,
}

impl Model {
    fn new(folder: &Path, bytes: u64) -> Self {
        let path = folder.join("model.raw");
        std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        Self { path }
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::options().write(true).open(&self.path).unwrap();
        file.write_all_at(bytes, at).unwrap();
    }

    fn equals(&self, image: &Path, what: &str) {
        let same = qemu::same((&self.path, "raw"), (image, "vmdk"));
        assert!(same, "{what}: QEMU reads something else");
        let disk = open(image, false);
        let model =
            Disk::open(&vdkit::registry(), &self.path, &OpenOptions::read_only().format("raw"))
                .unwrap();
        let bytes = disk.guest_bytes();
        assert_eq!(bytes, model.guest_bytes(), "{what}");
        let mut at = 0;
        let (mut ours, mut theirs) = (vec![0; 1 << 20], vec![0; 1 << 20]);
        while at < bytes {
            let run = disk.extent_at(GuestOffset(at), bytes - at).unwrap();
            let same = model.extent_at(GuestOffset(at), bytes - at).unwrap();
            let zero = |place: &vdkit::DiskPlace<'_>| place.reads_zero();
            if zero(&run.place) && zero(&same.place) {
                at += run.len.min(same.len);
                continue;
            }
            let len = (1 << 20).min(bytes - at);
            disk.read_at(&mut ours[..len as usize], GuestOffset(at)).unwrap();
            model.read_at(&mut theirs[..len as usize], GuestOffset(at)).unwrap();
            assert!(ours == theirs, "{what}: near {at:#x}");
            at += len;
        }
    }
}

fn write_here(image: &Path, model: &Model, rng: &mut Rng) {
    let disk = open(image, true);
    for (at, len) in places(disk.guest_bytes(), rng) {
        let mut bytes = vec![0; len as usize];
        if rng.chance(3, 4) {
            rng.fill(&mut bytes);
            disk.write_at(&bytes, GuestOffset(at)).unwrap();
        } else {
            disk.write_zeroes(GuestOffset(at), len, true).unwrap();
        }
        model.write(at, &bytes);
    }
    disk.close().unwrap();
}

fn write_there(image: &Path, model: &Model, bytes: u64, rng: &mut Rng) {
    let mut commands = Vec::new();
    for (at, len) in places(bytes, rng) {
        let value = rng.below(255) as u8 + 1;
        commands.push(format!("write -q -P {value} {at} {len}"));
        model.write(at, &vec![value; len as usize]);
    }
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    qemu::io(image, "vmdk", &commands);
}

fn sound(image: &Path, what: &str) {
    let checked = qemu::check(image, "vmdk", None);
    assert!(checked.clean(), "{what}: {}", checked.text);
    let registry = vdkit::registry();
    let options = OpenOptions::read_only();
    let found = vdkit_chain::open_image(&registry, image, &options).unwrap();
    let image = found.offline(options.limits, &Monitor::default());
    let report = found.driver.check(&image, vdkit::Repair::Nothing).unwrap();
    assert_eq!((report.corruptions, report.leaks), (0, 0), "{what}: {:#?}", report.findings);
}

#[test]
fn both_write_to_images_of_both() {
    if !require_peer("qemu-img") {
        return;
    }
    let seed = Rng::from_env(1).seed();
    for case in 0..cases(1) {
        for (options, bytes) in KINDS {
            for ours in [true, false] {
                let what = format!("VDKIT_SEED={} {options}, ours: {ours}", seed + case);
                let mut rng = Rng::new(seed + case);
                let folder = tempfile::tempdir().unwrap();
                let image = folder.path().join("disk.vmdk");
                if ours {
                    make(&image, *bytes, options);
                } else {
                    qemu::create(&image, "vmdk", *bytes, &[options], None);
                }
                let model = Model::new(folder.path(), *bytes);
                model.equals(&image, &format!("{what}, new"));
                write_here(&image, &model, &mut rng);
                model.equals(&image, &format!("{what}, written here"));
                sound(&image, &what);
                write_there(&image, &model, *bytes, &mut rng);
                model.equals(&image, &format!("{what}, written there"));
                sound(&image, &what);
                write_here(&image, &model, &mut rng);
                model.equals(&image, &format!("{what}, written again"));
                sound(&image, &what);
            }
        }
    }
}

/// The descriptor's fields match what QEMU would write.
#[test]
fn descriptors_say_what_qemu_would_say() {
    if !require_peer("qemu-img") {
        return;
    }
    for (options, bytes) in KINDS {
        let folder = tempfile::tempdir().unwrap();
        let (ours, theirs) = (folder.path().join("a/disk.vmdk"), folder.path().join("b/disk.vmdk"));
        for path in [&ours, &theirs] {
            std::fs::create_dir(path.parent().unwrap()).unwrap();
        }
        make(&ours, *bytes, options);
        qemu::create(&theirs, "vmdk", *bytes, &[options], None);
        let lines = |path: &Path| -> Vec<String> {
            let raw = std::fs::read(path).unwrap();
            let start = raw.windows(6).position(|w| w == b"# Disk").unwrap();
            let text: Vec<u8> = raw[start..].iter().copied().take_while(|&b| b != 0).collect();
            let text = String::from_utf8(text).unwrap();
            let fields = text.lines().filter(|l| !l.is_empty() && !l.starts_with("CID="));
            // QEMU stores the file name as given, and more cylinders than IDE supports.
            fields.filter(|l| !l.contains("cylinders")).map(str::to_owned).collect()
        };
        assert_eq!(lines(&ours), lines(&theirs), "{options}");
        let (a, b) = (qemu::info(&ours, "vmdk"), qemu::info(&theirs, "vmdk"));
        for key in ["virtual-size", "cluster-size"] {
            assert_eq!(a[key], b[key], "{options}: {key}");
        }
        let kind =
            |info: &serde_json::Value| info["format-specific"]["data"]["create-type"].clone();
        assert_eq!(kind(&a), kind(&b), "{options}");
    }
}

const READER: &str = r#"
import hashlib, pyvmdk, sys
handle = pyvmdk.handle()
handle.open(sys.argv[1])
handle.open_extent_data_files()
digest, left = hashlib.sha256(), handle.get_media_size()
while left > 0:
    data = handle.read_buffer(min(left, 1 << 20))
    if not data:
        sys.exit("short")
    digest.update(data)
    left -= len(data)
print(handle.get_media_size(), digest.hexdigest())
"#;

const DIGEST: &str = r"
import hashlib, sys
digest, size = hashlib.sha256(), 0
with open(sys.argv[1], 'rb') as file:
    while data := file.read(1 << 20):
        digest.update(data)
        size += len(data)
print(size, digest.hexdigest())
";

/// Size and digest that a script prints. Nothing where libvmdk is not installed.
fn digest(script: &str, path: &Path) -> Option<String> {
    let output = python("pyvmdk")?.args(["-c", script]).arg(path).output().unwrap();
    assert!(output.status.success(), "{path:?}: {}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}

/// A reader that shares no code with QEMU.
#[test]
fn libvmdk_reads_what_was_written() {
    for (options, bytes) in [
        ("subformat=monolithicSparse", (70 << 20) + 512),
        ("subformat=monolithicFlat", (5 << 20) + 512),
        ("subformat=twoGbMaxExtentSparse", (2 << 30) + (1 << 20)),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("disk.vmdk");
        make(&image, bytes, options);
        let model = Model::new(folder.path(), bytes);
        write_here(&image, &model, &mut Rng::new(3));
        assert_eq!(digest(READER, &image), digest(DIGEST, &model.path), "{options}");
    }
}

/// Reads our stream with the same reader.
pub fn libvmdk_equals(image: &Path, raw: &Path) {
    assert_eq!(digest(READER, image), digest(DIGEST, raw), "{image:?}");
}
