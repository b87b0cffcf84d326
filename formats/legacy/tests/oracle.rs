//! Compares reads with QEMU's.

mod support;

use std::path::{Path, PathBuf};

use support::{Fork, bochs, cloop, content, dmg, dump, found, theirs};
use vdkit_legacy::{BOCHS, CLOOP, DMG, PARALLELS, QCOW, QED};
use vdkit_testbase::{Rng, qemu, require_peer};

fn peers() -> bool {
    require_peer("qemu-img") && require_peer("qemu-io")
}

fn write(path: &Path, format: &str, size: u64, seed: u64) {
    let mut rng = Rng::new(seed);
    let commands: Vec<String> = (0..20)
        .map(|n| {
            let at = rng.below(size / 512);
            let len = (1 + rng.below([8, 300, 2000][n % 3])).min(size / 512 - at);
            let zero = if format == "qed" && n % 5 == 4 {
                "write -z".to_owned()
            } else {
                format!("write -P {:#x}", 0x31 + n)
            };
            format!("{zero} {} {}", at * 512, len * 512)
        })
        .collect();
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    qemu::io(path, format, &commands);
}

fn same(path: &Path, format: &str) {
    assert!(dump(path) == theirs(path, format), "{}", path.display());
}

fn raw_file(dir: &Path, bytes: &[u8]) -> PathBuf {
    let path = dir.join("disk.raw");
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn what_qemu_writes() {
    if !peers() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let size = (9 << 20) + 512;
    for (format, options, driver) in [
        ("qcow", &[][..], QCOW),
        ("qed", &[], QED),
        ("qed", &["cluster_size=4096,table_size=2"], QED),
        ("qed", &["cluster_size=1M,table_size=4"], QED),
        ("parallels", &[], PARALLELS),
        ("parallels", &["cluster_size=64K"], PARALLELS),
    ] {
        let path = dir.path().join("image");
        qemu::create(&path, format, size, options, None);
        same(&path, format);
        for seed in 1..4 {
            write(&path, format, size, seed);
            same(&path, format);
        }
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(found(driver, &bytes), (0, 0), "{format} {options:?}");
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn compressed_clusters_of_qcow() {
    if !peers() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = content(3 << 20, 5);
    let path = dir.path().join("image");
    qemu::create(&path, "qcow", 3 << 20, &[], None);
    // (qemu-img convert -c to qcow fails in QEMU 10.)
    for (n, piece) in disk.chunks(4096).enumerate().filter(|(n, _)| n % 7 != 3) {
        let name = dir.path().join("piece");
        std::fs::write(&name, piece).unwrap();
        let command = format!("write -c -s {} {} 4096", name.display(), n * 4096);
        // Incompressible data is written uncompressed.
        qemu::io(&path, "qcow", &[&command]);
        if n > 120 {
            break;
        }
    }
    same(&path, "qcow");
    assert!(dump(&path)[..3 * 4096] == disk[..3 * 4096]);
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(found(QCOW, &bytes), (0, 0));
    // Some clusters are overwritten, and are then uncompressed.
    write(&path, "qcow", 3 << 20, 8);
    same(&path, "qcow");
}

#[test]
fn images_over_others() {
    if !peers() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let size = 4 << 20;
    raw_file(dir.path(), &content(size - (1 << 20), 7));
    for format in ["qcow", "qed"] {
        let path = dir.path().join(format);
        qemu::create(&path, format, size as u64, &[], Some(("disk.raw", "raw")));
        same(&path, format);
        write(&path, format, size as u64, 3);
        same(&path, format);
    }
}

/// Parallels' older magic number: entries count sectors.
#[test]
fn parallels_with_entries_in_sectors() {
    if !peers() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    qemu::create(&path, "parallels", 5 << 20, &[], None);
    write(&path, "parallels", 5 << 20, 4);
    let before = dump(&path);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[..16].copy_from_slice(b"WithoutFreeSpace");
    let word = |bytes: &[u8], at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let (sectors, entries) = (word(&bytes, 28), word(&bytes, 32) as usize);
    for at in (0..entries).map(|n| 64 + n * 4) {
        let entry = word(&bytes, at) * sectors;
        bytes[at..at + 4].copy_from_slice(&entry.to_le_bytes());
    }
    std::fs::write(&path, &bytes).unwrap();
    same(&path, "parallels");
    assert!(dump(&path) == before);
}

#[test]
fn cloop_blocks_of_all_sizes() {
    if !peers() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for (len, block) in [(1 << 20, 64 << 10), (1 << 20, 1024 * 3), (300_000, 4096), (0, 512)] {
        let path = dir.path().join("image");
        let disk = if len == 0 { Vec::new() } else { content(len, 9) };
        let bytes = cloop(&disk, block);
        std::fs::write(&path, &bytes).unwrap();
        assert!(dump(&path).starts_with(&disk), "{block}");
        if len > 0 {
            same(&path, "cloop");
        }
        assert_eq!(found(CLOOP, &bytes), (0, 0), "{block}");
    }
}

#[test]
fn bochs_of_both_versions() {
    if !peers() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = content(1 << 20, 13);
    for version in [0x1_0000, 0x2_0000] {
        let path = dir.path().join("image");
        let bytes = bochs(&disk, version);
        std::fs::write(&path, &bytes).unwrap();
        assert!(dump(&path) == disk, "{version:#x}");
        same(&path, "bochs");
        assert_eq!(found(BOCHS, &bytes), (0, 0));
    }
}

#[test]
fn dmg_chunks_of_all_kinds() {
    if !peers() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = content((1 << 20) + 512 * 7, 17);
    for fork in [Fork::PropertyList, Fork::Resources] {
        let path = dir.path().join("image.dmg");
        let bytes = dmg(&disk, fork);
        std::fs::write(&path, &bytes).unwrap();
        assert!(dump(&path) == disk, "{fork:?}");
        assert_eq!(found(DMG, &bytes), (0, 0));
        // QEMU's packages leave bzip2 to a module that may be missing.
        let help = qemu::try_io(&path, "dmg", &["read 0 1M"]);
        if help.code == 0 && !help.stderr.contains("Could not open") {
            same(&path, "dmg");
        }
    }
}
