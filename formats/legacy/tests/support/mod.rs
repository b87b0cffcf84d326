//! Makes images of the read-only formats.

// Each test uses some of it.
#![allow(dead_code)]

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use base64::prelude::{BASE64_STANDARD, Engine};
use vdkit_block::{FormatDriver, GuestOffset, Limits, OfflineImage, OpenRequest, Repair, Storage};
use vdkit_chain::{Disk, OpenOptions, Registry};
use vdkit_legacy::{BOCHS, CLOOP, DMG, PARALLELS, QCOW, QED};
use vdkit_raw::RawDriver;
use vdkit_storage::MemoryStorage;
use vdkit_testbase::Rng;

pub static ALL: [&dyn FormatDriver; 6] = [QCOW, QED, PARALLELS, DMG, CLOOP, BOCHS];

pub type Shared = Arc<dyn Storage>;

pub fn registry() -> Registry {
    let raw: &'static dyn FormatDriver = &RawDriver;
    Registry::new(ALL.into_iter().chain([raw]))
}

/// Content of an image with its backing chain, read by vdkit with a probed format.
pub fn dump(path: &Path) -> Vec<u8> {
    let disk = Disk::open(&registry(), path, &OpenOptions::read_only()).expect("opening");
    let mut bytes = vec![0xee; disk.guest_bytes() as usize];
    // In odd pieces, so that units are split.
    let mut at = 0;
    for len in [700, 3, 65_000, 4096, 1 << 20].into_iter().cycle() {
        if at == bytes.len() {
            break;
        }
        let end = (at + len).min(bytes.len());
        disk.read_at(&mut bytes[at..end], GuestOffset(at as u64)).expect("reading");
        at = end;
    }
    bytes
}

/// Content of an image read by QEMU.
pub fn theirs(path: &Path, format: &str) -> Vec<u8> {
    let raw = path.with_extension("theirs");
    vdkit_testbase::qemu::convert((path, format), (&raw, "raw"), &[]);
    std::fs::read(raw).expect("a file")
}

pub fn memory(bytes: &[u8]) -> Shared {
    Arc::new(MemoryStorage::from_bytes("image", bytes))
}

/// Damage and leaks that a check finds.
pub fn found(driver: &dyn FormatDriver, bytes: &[u8]) -> (u64, u64) {
    let report =
        driver.check(&OfflineImage::new(&memory(bytes)), Repair::Nothing).expect("checking");
    (report.corruptions, report.leaks)
}

/// Runs every operation on an image: none may panic or take long.
pub fn survive(driver: &dyn FormatDriver, bytes: &[u8], what: &str) {
    let start = vdkit_testbase::processor_time();
    let storage = memory(bytes);
    let limits = Limits::default();
    let _ = driver.describe(&storage, &limits);
    let request =
        OpenRequest { storage: storage.clone(), files: Vec::new(), writable: false, limits };
    if let Ok(format) = driver.open(request) {
        let size = format.guest_bytes();
        let info = vdkit_block::ImageInfo::new(driver.name(), size);
        let disk = Disk::from_format(format, info, &OpenOptions::read_only());
        for at in [0, 511, size / 3, size / 2, size.saturating_sub(5000)] {
            let len = 5000.min(size.saturating_sub(at)) as usize;
            let _ = disk.read_at(&mut vec![0; len], GuestOffset(at));
        }
        let _ = disk.extents(GuestOffset(0), size).map(|runs| runs.take(2000).count());
    }
    let took = vdkit_testbase::processor_time() - start;
    assert!(took.as_secs() < 5, "{what} took {took:?}");
}

/// Some runs of data, of zeroes and of noise.
pub fn content(len: usize, seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let mut bytes = vec![0; len];
    for _ in 0..12 {
        let at = rng.below(len as u64) as usize;
        let end = (at + 1 + rng.below(len as u64 / 6) as usize).min(len);
        match rng.below(3) {
            0 => bytes[at..end].fill(rng.below(255) as u8 + 1),
            1 => rng.fill(&mut bytes[at..end]),
            _ => bytes[at..end].iter_mut().enumerate().for_each(|(n, b)| *b = (n / 7) as u8),
        }
    }
    bytes
}

pub fn zlib(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).expect("memory");
    encoder.finish().expect("memory")
}

pub fn bzip2(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
    encoder.write_all(bytes).expect("memory");
    encoder.finish().expect("memory")
}

pub fn cloop(disk: &[u8], block: usize) -> Vec<u8> {
    let mut image = b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop file=$0 && mount -r -t iso9660 \
        /dev/cloop $1\n"
        .to_vec();
    image.resize(128, 0);
    let blocks: Vec<Vec<u8>> = disk
        .chunks(block)
        .map(|piece| {
            let mut whole = piece.to_vec();
            whole.resize(block, 0);
            zlib(&whole)
        })
        .collect();
    image.extend((block as u32).to_be_bytes());
    image.extend((blocks.len() as u32).to_be_bytes());
    let mut at = 136 + (blocks.len() as u64 + 1) * 8;
    for compressed in &blocks {
        image.extend(at.to_be_bytes());
        at += compressed.len() as u64;
    }
    image.extend(at.to_be_bytes());
    image.extend(blocks.concat());
    image
}

pub fn bochs(disk: &[u8], version: u32) -> Vec<u8> {
    let extent = 64 << 10;
    let extents: Vec<&[u8]> = disk.chunks(extent).collect();
    let mut image = vec![0; 512];
    image[..22].copy_from_slice(b"Bochs Virtual HD Image");
    image[32..39].copy_from_slice(b"Redolog");
    image[48..55].copy_from_slice(b"Growing");
    let mut put = |at: usize, word: u32| image[at..at + 4].copy_from_slice(&word.to_le_bytes());
    put(64, version);
    put(68, 512);
    put(72, extents.len() as u32);
    put(76, 16);
    put(80, extent as u32);
    let size_at = if version == 0x1_0000 { 84 } else { 88 };
    put(size_at, disk.len() as u32);
    let (mut catalog, mut data) = (Vec::new(), Vec::new());
    // The last extent comes first, so that the catalog's order matters.
    let mut place = extents.len() as u32;
    for piece in &extents {
        if piece.iter().all(|byte| *byte == 0) {
            catalog.extend(u32::MAX.to_le_bytes());
            continue;
        }
        place -= 1;
        catalog.extend(place.to_le_bytes());
        let mut bitmap = vec![0; 512];
        let mut sectors = vec![0xdd; extent];
        for (n, sector) in piece.chunks(512).enumerate() {
            if sector.iter().any(|byte| *byte != 0) {
                bitmap[n / 8] |= 1 << (n % 8);
                sectors[n * 512..n * 512 + sector.len()].copy_from_slice(sector);
            }
        }
        data.push((place, [bitmap, sectors].concat()));
    }
    data.sort();
    image.extend(catalog);
    let first = image.len();
    for (place, bytes) in data {
        image.resize(first + place as usize * (512 + extent), 0);
        image.extend(bytes);
    }
    image
}

/// How a test's DMG stores its tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fork {
    PropertyList,
    Resources,
}

/// A DMG with chunks of 32 KiB of all kinds in turn, in two tables.
pub fn dmg(disk: &[u8], fork: Fork) -> Vec<u8> {
    dmg_with(disk, fork, 0x8000_0006, bzip2)
}

pub fn xz(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = liblzma::write::XzEncoder::new(Vec::new(), 3);
    encoder.write_all(bytes).expect("memory");
    encoder.finish().expect("memory")
}

/// [`dmg`] with another kind of chunks instead of bzip2.
pub fn dmg_with(disk: &[u8], fork: Fork, other: u32, pack: fn(&[u8]) -> Vec<u8>) -> Vec<u8> {
    assert_eq!(disk.len() % 512, 0);
    let mut image = Vec::new();
    let half = disk.len() / 2 / DMG_CHUNK * DMG_CHUNK;
    let mut tables = Vec::new();
    let mut turn = 0;
    for (first, part) in [(0, &disk[..half]), (half, &disk[half..])] {
        let packed = part.chunks(DMG_CHUNK).map(|piece| {
            turn += 1;
            match turn % 3 {
                _ if piece.iter().all(|byte| *byte == 0) => (turn % 2 * 2, Vec::new()),
                0 => (1, piece.to_vec()),
                1 => (0x8000_0005, zlib(piece)),
                _ => (other, pack(piece)),
            }
        });
        tables.push(dmg_table(&mut image, first, part, packed));
    }
    let at = image.len() as u64;
    image.extend(match fork {
        Fork::PropertyList => property_list(&tables),
        Fork::Resources => resource_fork(&tables),
    });
    let len = image.len() as u64 - at;
    image.extend(dmg_trailer(disk, fork, at, len));
    image
}

/// Bytes of the chunks of a DMG.
const DMG_CHUNK: usize = 32 << 10;

/// Adds the chunks of a part of a disk (kinds and packed bytes) to the image; returns their table.
fn dmg_table(
    image: &mut Vec<u8>,
    first: usize,
    part: &[u8],
    packed: impl Iterator<Item = (u32, Vec<u8>)>,
) -> Vec<u8> {
    let mut table = vec![0; 204];
    table[..4].copy_from_slice(b"mish");
    table[8..16].copy_from_slice(&(first as u64 / 512).to_be_bytes());
    table[16..24].copy_from_slice(&(part.len() as u64 / 512).to_be_bytes());
    let mut entry = |kind: u32, sector: u64, sectors: u64, at: u64, len: u64| {
        table.extend(kind.to_be_bytes());
        table.extend([0; 4]);
        [sector, sectors, at, len].iter().for_each(|word| table.extend(word.to_be_bytes()));
    };
    for (n, (piece, (kind, bytes))) in part.chunks(DMG_CHUNK).zip(packed).enumerate() {
        let (sector, sectors) = ((n * DMG_CHUNK / 512) as u64, (piece.len() / 512) as u64);
        entry(kind, sector, sectors, image.len() as u64, bytes.len() as u64);
        image.extend(bytes);
        if n == 1 {
            entry(0x7fff_fffe, 0, 0, 0, 0);
        }
    }
    entry(u32::MAX, (part.len() / 512) as u64, 0, image.len() as u64, 0);
    let count = (table.len() as u32 - 204) / 40;
    table[200..204].copy_from_slice(&count.to_be_bytes());
    table
}

fn property_list(tables: &[Vec<u8>]) -> Vec<u8> {
    let mut list =
        b"<?xml version=\"1.0\"?><plist version=\"1.0\"><dict><key>resource-fork</key>".to_vec();
    list.extend(b"<dict><key>blkx</key><array>");
    for table in tables {
        list.extend(b"<dict><key>Data</key><data>\n");
        list.extend(BASE64_STANDARD.encode(table).bytes());
        list.extend(b"\n</data></dict>");
    }
    list.extend(b"</array></dict></dict></plist>");
    list
}

fn resource_fork(tables: &[Vec<u8>]) -> Vec<u8> {
    let data: Vec<u8> = tables
        .iter()
        .flat_map(|table| [&(table.len() as u32).to_be_bytes()[..], table].concat())
        .collect();
    let mut fork = Vec::new();
    fork.extend(256_u32.to_be_bytes());
    fork.extend((256 + data.len() as u32).to_be_bytes());
    fork.extend((data.len() as u32).to_be_bytes());
    fork.resize(256, 0);
    fork.extend(data);
    fork
}

/// The last sector of a DMG whose tables are in `len` bytes at `at`.
fn dmg_trailer(disk: &[u8], fork: Fork, at: u64, len: u64) -> [u8; 512] {
    let mut koly = [0; 512];
    koly[..4].copy_from_slice(b"koly");
    koly[4..8].copy_from_slice(&4_u32.to_be_bytes());
    koly[8..12].copy_from_slice(&512_u32.to_be_bytes());
    koly[32..40].copy_from_slice(&at.to_be_bytes());
    let place = if fork == Fork::Resources { 40 } else { 216 };
    koly[place..place + 8].copy_from_slice(&at.to_be_bytes());
    koly[place + 8..place + 16].copy_from_slice(&len.to_be_bytes());
    koly[492..500].copy_from_slice(&(disk.len() as u64 / 512).to_be_bytes());
    koly
}
