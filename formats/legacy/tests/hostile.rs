//! Damaged images, refused operations, and messages.

mod support;

use support::{
    ALL, Fork, bochs, cloop, content, dmg, dmg_with, found, memory, registry, survive, xz,
};
use vdkit_block::{FormatDriver, GuestOffset, Limits, OpenRequest, Probe, Result};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_legacy::{CLOOP, DMG, PARALLELS, QCOW, QED};
use vdkit_testbase::{Rng, qemu, require_peer};

/// One small image of each format, in the order of the drivers.
fn images() -> Vec<Vec<u8>> {
    let disk = content(200 << 10, 3);
    let mut images = vec![Vec::new(), Vec::new(), Vec::new()];
    if require_peer("qemu-img") && require_peer("qemu-io") {
        let dir = tempfile::tempdir().unwrap();
        for (n, format) in ["qcow", "qed", "parallels"].into_iter().enumerate() {
            let path = dir.path().join(format);
            qemu::create(&path, format, 3 << 20, &[], None);
            qemu::io(&path, format, &["write -P 1 0 100k", "write -P 2 2M 64k"]);
            images[n] = std::fs::read(&path).unwrap();
        }
    }
    images.push(dmg(&disk, Fork::PropertyList));
    images.push(cloop(&disk, 16 << 10));
    images.push(bochs(&disk, 0x2_0000));
    images
}

#[test]
fn every_word_of_the_headers_may_lie() {
    for (driver, image) in ALL.into_iter().zip(images()) {
        let end = image.len();
        let words = (0..200).step_by(4).chain((end.saturating_sub(512)..end).step_by(4));
        for at in words.filter(|at| at + 4 <= end) {
            for word in [0, 1, 0x0100_0000, 0x7fff_ffff, 0x8000_0000, u32::MAX] {
                let mut bytes = image.clone();
                bytes[at..at + 4].copy_from_slice(&word.to_be_bytes());
                survive(driver, &bytes, &format!("{} {word:#x} at {at}", driver.name()));
            }
        }
    }
}

#[test]
fn damage_at_random() {
    let mut rng = Rng::new(77);
    for (driver, image) in ALL.into_iter().zip(images()) {
        for round in 0..150 {
            let mut bytes = image.clone();
            for _ in 0..1 + rng.below(20) {
                let span = (bytes.len() as u64).min([600, 70_000, u64::MAX][rng.below(3) as usize]);
                if span > 0 {
                    let at = rng.below(span) as usize;
                    bytes[at] = rng.below(256) as u8;
                }
            }
            if rng.chance(1, 8) {
                bytes.truncate(rng.below(bytes.len() as u64 + 1) as usize);
            }
            survive(driver, &bytes, &format!("{} round {round}", driver.name()));
        }
    }
}

#[test]
fn each_is_known_by_its_own_mark_alone() {
    for (n, image) in images().iter().enumerate().filter(|(_, image)| !image.is_empty()) {
        let head = &image[..image.len().min(64 << 10)];
        let tail = &image[image.len().saturating_sub(512)..];
        for (m, driver) in ALL.into_iter().enumerate() {
            let wanted = if n == m { Probe::Yes } else { Probe::No };
            assert_eq!(driver.probe(head, tail, image.len() as u64), wanted, "{n} {m}");
        }
    }
}

fn open(driver: &dyn FormatDriver, bytes: &[u8], writable: bool) -> Result<()> {
    let (storage, limits) = (memory(bytes), Limits::default());
    driver.open(OpenRequest { storage, files: Vec::new(), writable, limits }).map(drop)
}

#[test]
fn nothing_is_written() {
    for (driver, image) in ALL.into_iter().zip(images()).filter(|(_, image)| !image.is_empty()) {
        assert!(open(driver, &image, false).is_ok(), "{}", driver.name());
        let error = open(driver, &image, true).unwrap_err().to_string();
        assert!(error.contains("only read"), "{error}");
        assert!(driver.creation().is_none());
    }
}

#[test]
fn what_was_not_closed_cleanly_is_told() {
    let images = images();
    if images[0].is_empty() {
        return;
    }
    for (driver, image, at, word) in
        [(QED, &images[1], 16, 2_u32), (PARALLELS, &images[2], 44, 0x746f_6e59)]
    {
        let mut bytes = image.clone();
        bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        assert!(driver.describe(&memory(&bytes), &Limits::default()).unwrap().dirty);
        let limits = Limits::default();
        let request =
            OpenRequest { storage: memory(&bytes), files: Vec::new(), writable: false, limits };
        assert_eq!(driver.open(request).unwrap().warnings().len(), 1, "{}", driver.name());
        assert_eq!(found(driver, &bytes), (0, 1), "{}", driver.name());
    }
}

#[test]
fn an_encrypted_qcow_is_refused_and_described() {
    let mut bytes = images()[0].clone();
    if bytes.is_empty() {
        return;
    }
    bytes[39] = 1;
    let info = QCOW.describe(&memory(&bytes), &Limits::default()).unwrap();
    assert_eq!(info.encryption.as_deref(), Some("aes"));
    assert!(open(QCOW, &bytes, false).unwrap_err().to_string().contains("encrypted"));
}

#[test]
fn unknown_feature_bits_of_qed_are_refused() {
    let mut bytes = images()[1].clone();
    if bytes.is_empty() {
        return;
    }
    bytes[17] = 1;
    let error = open(QED, &bytes, false).unwrap_err().to_string();
    assert!(error.contains("0x100"), "{error}");
}

#[test]
fn large_units_are_refused() {
    let mut bytes = cloop(&content(4096, 1), 4096);
    bytes[128..132].copy_from_slice(&(64_u32 << 20).to_be_bytes());
    let error = open(CLOOP, &bytes, false).unwrap_err().to_string();
    assert!(error.contains("limit"), "{error}");
}

/// LZMA chunks of `hdiutil` are xz streams; QEMU does not read them.
#[test]
fn lzma_chunks_of_dmg_are_read() {
    let disk_of = |bytes: &[u8]| {
        let options = OpenOptions::read_only();
        Disk::open_storage(&registry(), memory(bytes), &options).unwrap()
    };
    let disk = content(1 << 20, 5);
    for fork in [Fork::PropertyList, Fork::Resources] {
        let bytes = dmg_with(&disk, fork, 0x8000_0008, xz);
        let image = disk_of(&bytes);
        let mut read = vec![0; disk.len()];
        image.read_at(&mut read, GuestOffset(0)).unwrap();
        assert!(read == disk, "{fork:?}");
    }
    // Damaged, truncated or other streams cause an error and nothing else.
    let sound = dmg_with(&disk, Fork::Resources, 0x8000_0008, xz);
    let magic = b"\xfd7zXZ\0";
    let at = sound.windows(6).position(|window| window == magic).unwrap();
    for (offset, byte) in [(0, 0), (7, 0xff), (12, 0xff), (40, 0xaa)] {
        let mut damaged = sound.clone();
        damaged[at + offset] = byte;
        let image = disk_of(&damaged);
        let mut read = vec![0; disk.len()];
        let error = image.read_at(&mut read, GuestOffset(0)).unwrap_err().to_string();
        assert!(error.contains("xz data of 32768 bytes"), "{offset}: {error}");
    }
}

/// A chunk with an unknown method is reported when it is read, not before.
#[test]
fn unknown_chunks_of_dmg_are_named() {
    let disk = vec![7; 64 << 10];
    let bytes = dmg(&disk, Fork::Resources);
    let at = bytes.windows(4).position(|word| word == 0x8000_0005_u32.to_be_bytes()).unwrap();
    for (number, name) in [(7, "lzfse"), (9, "unknown")] {
        let mut bytes = bytes.clone();
        bytes[at + 3] = number;
        let request = OpenRequest {
            storage: memory(&bytes),
            files: Vec::new(),
            writable: false,
            limits: Limits::default(),
        };
        let format = DMG.open(request).unwrap();
        let first = format.resolve(GuestOffset(0), 512);
        let second = format.resolve(GuestOffset(32 << 10), 512);
        let error = first.and(second).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("hdiutil"), "{error}");
    }
}

/// One damaged chunk of a huge disk is one finding, not one for each of its sectors.
#[test]
fn a_huge_chunk_of_dmg_outside_of_the_file_is_one_finding() {
    let mut bytes = dmg(&vec![7; 64 << 10], Fork::Resources);
    let at = bytes.windows(4).rposition(|word| word == 0x8000_0006_u32.to_be_bytes()).unwrap();
    let sectors = bytes.len() - 512 + 492;
    bytes[at..at + 4].copy_from_slice(&1_u32.to_be_bytes());
    bytes[at + 16..at + 24].copy_from_slice(&(1_u64 << 50).to_be_bytes());
    bytes[at + 24..at + 32].copy_from_slice(&(1_u64 << 60).to_be_bytes());
    bytes[sectors..sectors + 8].copy_from_slice(&(1_u64 << 51).to_be_bytes());
    assert_eq!(found(DMG, &bytes), (1, 0));
}
