//! QEMU as a second reader and writer.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use vdkit_block::{FormatDriver, Limits, Storage};
use vdkit_storage::{CreateMode, FileOptions, FileStorage, MemoryStorage};
use vdkit_testbase::trials::{Oracle, Trial};
use vdkit_testbase::{qemu, require_peer};
use vdkit_vhd::VhdDriver;

const DYNAMIC: Oracle = Oracle {
    trial: Trial::new(&VhdDriver, "", (23 << 20) + 512 * 3),
    format: "vpc",
    options: &[],
    checks: false,
};

fn with(options: &'static str, qemus: &'static [&'static str]) -> Oracle {
    Oracle { trial: Trial { options, ..DYNAMIC.trial }, options: qemus, ..DYNAMIC }
}

fn peers() -> bool {
    require_peer("qemu-img") && require_peer("qemu-io")
}

#[test]
fn qemu_and_we_write_to_the_same_images_in_turn() {
    if !peers() {
        return;
    }
    DYNAMIC.by_turns(2);
    with("force_size=on", &["force_size=on"]).by_turns(2);
    with("subformat=fixed", &["subformat=fixed"]).by_turns(2);
    with("subformat=fixed,force_size=on", &["subformat=fixed,force_size=on"]).by_turns(1);
}

/// QEMU's tables end directly before the blocks, so growing moves them.
#[test]
fn qemu_reads_what_was_resized_here() {
    if !peers() {
        return;
    }
    DYNAMIC.resized(&[650 << 20, 20 << 20, 900 << 20, 1 << 20, 3 << 20]);
    with("force_size=on", &["force_size=on"]).resized(&[700 << 20, 25 << 20]);
    with("subformat=fixed", &["subformat=fixed"]).resized(&[30 << 20, 100 << 20, 5 << 20]);
    with("subformat=fixed,force_size=on", &["subformat=fixed,force_size=on"])
        .resized(&[30 << 20, 5 << 20]);
}

/// vdkit and QEMU round to the same cylinders, and a forced size is exact.
#[test]
fn sizes_are_qemus() {
    if !peers() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for bytes in [512, 1 << 20, (1 << 20) + 512, 127 << 30, 128 << 30, 1 << 40, 2040 << 30] {
        for options in ["force_size=off", "force_size=on"] {
            let (ours, theirs) = (dir.path().join("ours"), dir.path().join("theirs"));
            let new = FileOptions::read_write().create(CreateMode::New);
            let file = FileStorage::open(&ours, &new).unwrap();
            Trial { guest_bytes: bytes, options, ..DYNAMIC.trial }.create(&(Arc::new(file) as _));
            qemu::create(&theirs, "vpc", bytes, &[options], None);
            let size = |path: &std::path::Path| qemu::info(path, "vpc")["virtual-size"].clone();
            assert_eq!(size(&ours), size(&theirs), "{bytes} {options}");
            let storage: Arc<dyn Storage> =
                Arc::new(FileStorage::open(&ours, &FileOptions::default()).unwrap());
            let info = VhdDriver.describe(&storage, &Limits::default()).unwrap();
            assert_eq!(size(&ours), info.virtual_size, "{bytes} {options}");
            std::fs::remove_file(&ours).unwrap();
            std::fs::remove_file(&theirs).unwrap();
        }
    }
}

/// The creator of an image defines its size; vdkit and QEMU agree on it.
#[test]
fn the_size_is_the_creators() {
    if !peers() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let apps: [&[u8; 4]; 11] = [
        b"qemu", b"qem2", b"vpc ", b"vs  ", b"win ", b"d2v ", b"tap\0", b"CTXS", b"wa\0\0",
        b"vbox", b"vdk ",
    ];
    for app in apps {
        for chs in [(10, 4, 17), (65535, 16, 255)] {
            let bytes = fixed(app, 1 << 20, chs);
            let file = std::fs::File::create(&path).unwrap();
            file.write_all_at(&bytes, 0).unwrap();
            let theirs = qemu::info(&path, "vpc")["virtual-size"].as_u64().unwrap();
            let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::from_bytes("image", &bytes));
            let ours = VhdDriver.describe(&storage, &Limits::default()).unwrap().virtual_size;
            assert_eq!(ours, theirs, "{} {chs:?}", String::from_utf8_lossy(app));
        }
    }
}

/// A fixed image of 1 MiB with this footer.
fn fixed(app: &[u8; 4], size: u64, (cylinders, heads, sectors): (u16, u8, u8)) -> Vec<u8> {
    let mut footer = [0; 512];
    footer[..8].copy_from_slice(b"conectix");
    footer[11] = 2;
    footer[13] = 1;
    footer[16..24].fill(0xff);
    footer[28..32].copy_from_slice(app);
    footer[40..48].copy_from_slice(&size.to_be_bytes());
    footer[48..56].copy_from_slice(&size.to_be_bytes());
    footer[56..58].copy_from_slice(&cylinders.to_be_bytes());
    footer[58..60].copy_from_slice(&[heads, sectors]);
    footer[63] = 2;
    let sum = !footer.iter().map(|byte| u32::from(*byte)).sum::<u32>();
    footer[64..68].copy_from_slice(&sum.to_be_bytes());
    let mut bytes = vec![0x61; 1 << 20];
    bytes.extend(footer);
    bytes
}
