//! Random requests to a file and to plain memory must leave the same bytes, in each cache mode, on
//! each file system, and on devices.

use std::path::Path;

use vdkit_block::{CacheMode, Error, HostOffset, Storage, StorageExt, ZeroMode};
use vdkit_storage::{AlignedBuf, FileOptions, FileStorage, MemoryStorage};
use vdkit_testbase::{Rng, fs};

const MODES: [CacheMode; 5] = [
    CacheMode::Writeback,
    CacheMode::None,
    CacheMode::Writethrough,
    CacheMode::DirectSync,
    CacheMode::Unsafe,
];

/// Offsets and lengths around blocks and pages, and anything between.
fn number(rng: &mut Rng, below: u64) -> u64 {
    let unit = [1, 512, 4096, 65536][rng.below(4) as usize];
    let near = rng.below(below / unit + 1) * unit;
    let off = [0, 0, 0, 1, 511][rng.below(5) as usize];
    (if rng.chance(1, 2) { near + off } else { near.saturating_sub(off) }).min(below)
}

/// One random change of both; lengths stay below `most`.
fn change(rng: &mut Rng, a: &dyn Storage, b: &dyn Storage, most: u64, grow: bool) {
    let longest = if rng.chance(1, 8) { most / 2 } else { 20_000.min(most / 2) };
    let len = number(rng, longest);
    let there = b.len().unwrap();
    let most = if grow { most } else { there };
    let offset = HostOffset(number(rng, most - len));
    let mode = if rng.chance(1, 2) { ZeroMode::MayUnmap } else { ZeroMode::KeepAllocated };
    let what = rng.below(10);
    // Memory at any address, sometimes aligned.
    let shift = if rng.chance(1, 2) { 0 } else { rng.below(4096) as usize };
    let mut memory = AlignedBuf::new(len as usize + shift, 4096);
    rng.fill(&mut memory);
    for each in [a, b] {
        match what {
            0..=4 => each.write_at(&memory[shift..], offset).unwrap(),
            5 | 6 => each.write_zeroes(offset, len, mode).unwrap(),
            7 if grow => each.set_len(offset.0).unwrap(),
            8 => each.allocate(offset, len).unwrap(),
            9 => each.sync().unwrap(),
            _ => {}
        }
    }
}

fn compare(rng: &mut Rng, a: &dyn Storage, b: &dyn Storage) {
    let len = b.len().unwrap();
    assert_eq!(a.len().unwrap(), len);
    let expected = {
        let mut bytes = vec![0; len as usize];
        b.read_at(&mut bytes, HostOffset(0)).unwrap();
        bytes
    };
    let mut bytes = vec![1; len as usize + 5];
    assert_eq!(a.read_up_to(&mut bytes, HostOffset(0)).unwrap() as u64, len);
    assert!(bytes[..len as usize] == expected, "the bytes differ");
    // A partial read into memory at any address.
    let (from, n) = (number(rng, len + 5000), number(rng, 9000) as usize);
    let shift = rng.below(600) as usize;
    let mut part = AlignedBuf::new(n + shift, 4096);
    let there = len.saturating_sub(from).min(n as u64) as usize;
    assert_eq!(a.read_up_to(&mut part[shift..], HostOffset(from)).unwrap(), there);
    if there > 0 {
        assert!(part[shift..shift + there] == expected[from as usize..from as usize + there]);
    }
    // Holes are zero, and extents cover all.
    let mut at = 0;
    while at < len {
        let extent = a.extent_at(HostOffset(at), len - at).unwrap();
        assert!(extent.len > 0);
        let end = (at + extent.len).min(len);
        assert!(extent.data || expected[at as usize..end as usize].iter().all(|b| *b == 0));
        at = end;
    }
}

fn run(folder: &Path, rounds: u64, modes: &[CacheMode]) {
    for (index, mode) in modes.iter().enumerate() {
        let mut rng = Rng::from_env(0xf11e + index as u64);
        let path = folder.join(format!("{mode}.img"));
        let options = FileOptions::read_write().cache(*mode);
        let file = match FileStorage::create(&path, &options) {
            Err(Error::Unsupported { .. }) if mode.direct() => continue,
            other => other.unwrap(),
        };
        let memory = MemoryStorage::new("m");
        eprintln!("{} {mode}: seed {:#x}", folder.display(), rng.seed());
        for _ in 0..rounds {
            for _ in 0..5 {
                change(&mut rng, &file, &memory, 600_000, true);
            }
            compare(&mut rng, &file, &memory);
        }
        drop(file);
        // Other programs see the exact length, and the bytes.
        assert!(std::fs::read(&path).unwrap() == memory.to_vec());
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn files_in_the_scratch_folder() {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path(), 100, &MODES);
}

#[test]
fn files_on_tmpfs() {
    let Some(fs) = fs::mounted("tmpfs", 64 << 20) else { return };
    run(fs.path(), 100, &MODES);
}

#[test]
fn files_on_xfs() {
    let Some(fs) = fs::mounted("xfs", 320 << 20) else { return };
    run(fs.path(), 60, &MODES);
}

#[test]
fn files_on_ext4() {
    let Some(fs) = fs::mounted("ext4", 64 << 20) else { return };
    run(fs.path(), 60, &MODES);
}

#[test]
fn files_on_btrfs() {
    let Some(fs) = fs::mounted("btrfs", 320 << 20) else { return };
    run(fs.path(), 30, &MODES);
}

#[test]
fn devices() {
    for sector in [512, 4096] {
        let Some(device) = fs::loop_device(600_000 / 4096 * 4096, sector) else { return };
        for mode in MODES {
            let mut rng = Rng::from_env(0xde5 + u64::from(sector));
            let options = FileOptions::read_write().cache(mode);
            let storage = FileStorage::open(device.path(), &options).unwrap();
            let len = storage.len().unwrap();
            assert!(storage.caps().device && !storage.caps().growable);
            assert_eq!(storage.caps().block_bytes, sector);
            if mode.direct() {
                assert_eq!(storage.caps().alignment, sector);
            }
            let mut before = vec![0; len as usize];
            storage.read_at(&mut before, HostOffset(0)).unwrap();
            let memory = MemoryStorage::from_bytes("m", &before);
            eprintln!("{sector} {mode}: seed {:#x}", rng.seed());
            for _ in 0..25 {
                for _ in 0..4 {
                    change(&mut rng, &storage, &memory, len, false);
                }
                compare(&mut rng, &storage, &memory);
            }
            storage.sync().unwrap();
        }
    }
}
