//! Files that cannot punch, zero or allocate.

use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use vdkit_block::{CacheMode, GuestDiscard, HostOffset, SpaceMap, Storage, StorageExt, ZeroMode};
use vdkit_testbase::{Rng, Watched};

use super::try_once;
use crate::{CreateMode, FileOptions, FileStorage, MemoryStorage};

/// A file without the operations in `bits`, as if the kernel had refused them.
fn lacking(folder: &std::path::Path, mode: CacheMode, bits: u32) -> FileStorage {
    let path = folder.join(format!("{mode}-{bits}"));
    let file = FileStorage::create(path, &FileOptions::read_write().cache(mode)).unwrap();
    file.lacks.punch.store(bits & 1 != 0, Ordering::Relaxed);
    file.lacks.zero_range.store(bits & 2 != 0, Ordering::Relaxed);
    file.lacks.fallocate.store(bits & 4 != 0, Ordering::Relaxed);
    file
}

#[test]
fn every_fallback_leaves_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    for mode in [CacheMode::Writeback, CacheMode::None] {
        for bits in 0..8 {
            let file = lacking(dir.path(), mode, bits);
            let memory = MemoryStorage::new("m");
            let mut rng = Rng::from_env(0xfa11 + u64::from(bits));
            for step in 0..60 {
                let (offset, len) = (HostOffset(rng.below(300_000)), rng.below(150_000));
                let what = rng.below(5);
                for each in [&file as &dyn Storage, &memory] {
                    match what {
                        0 => each.write_at(&vec![step as u8 + 1; len as usize], offset).unwrap(),
                        1 => each.write_zeroes(offset, len, ZeroMode::MayUnmap).unwrap(),
                        2 => each.write_zeroes(offset, len, ZeroMode::KeepAllocated).unwrap(),
                        3 => each.allocate(offset, len).unwrap(),
                        _ => each.set_len(offset.0).unwrap(),
                    }
                }
                let seed = rng.seed();
                let len = memory.len().unwrap();
                assert_eq!(file.len().unwrap(), len, "{mode} {bits} seed {seed:#x} step {step}");
                let mut bytes = vec![1; len as usize];
                file.read_at(&mut bytes, HostOffset(0)).unwrap();
                assert!(bytes == memory.to_vec(), "{mode} {bits} seed {seed:#x} step {step}");
            }
        }
    }
}

#[test]
fn allocating_without_fallocate_fills_holes_and_keeps_data() {
    let dir = tempfile::tempdir().unwrap();
    for mode in [CacheMode::Writeback, CacheMode::None] {
        let file = lacking(dir.path(), mode, 7);
        file.set_len(1 << 20).unwrap();
        file.write_at(&[7; 5000], HostOffset(100_000)).unwrap();
        assert!(file.may_have_holes().unwrap());
        // Unaligned start and end, past the end of the file.
        file.allocate(HostOffset(10), (1 << 20) + 1234).unwrap();
        assert_eq!(file.len().unwrap(), (1 << 20) + 1244);
        file.sync().unwrap();
        assert!(!file.may_have_holes().unwrap(), "{mode}");
        let mut bytes = vec![1; (1 << 20) + 1244];
        file.read_at(&mut bytes, HostOffset(0)).unwrap();
        for (index, byte) in bytes.iter().enumerate() {
            assert_eq!(*byte, if (100_000..105_000).contains(&index) { 7 } else { 0 });
        }
    }
}

#[test]
fn what_a_file_system_cannot_do_is_asked_once() {
    let lack = AtomicBool::new(false);
    let mut asked = 0;
    let mut ask = |answer: Result<(), Errno>| {
        try_once(&lack, || {
            asked += 1;
            answer
        })
    };
    assert_eq!(ask(Ok(())), Ok(true));
    assert_eq!(ask(Err(Errno::NOSPC)), Err(Errno::NOSPC));
    assert_eq!(ask(Err(Errno::OPNOTSUPP)), Ok(false));
    assert_eq!(ask(Ok(())), Ok(false));
    assert_eq!(asked, 3);
}

#[test]
fn zeroes_on_tmpfs_keep_or_give_back_their_space() {
    // tmpfs punches and allocates, but (as of Linux 6.18) cannot zero a range in one step.
    let Some(fs) = vdkit_testbase::fs::mounted("tmpfs", 8 << 20) else { return };
    let path = fs.path().join("f");
    let file = FileStorage::create(path, &FileOptions::read_write()).unwrap();
    file.write_at(&[7; 8192], HostOffset(0)).unwrap();
    file.write_zeroes(HostOffset(0), 4096, ZeroMode::KeepAllocated).unwrap();
    assert_eq!(file.allocated_bytes().unwrap(), 8192);
    file.write_zeroes(HostOffset(4096), 4096, ZeroMode::MayUnmap).unwrap();
    assert_eq!(file.allocated_bytes().unwrap(), 4096);
    let mut bytes = [1; 8192];
    file.read_at(&mut bytes, HostOffset(0)).unwrap();
    assert_eq!(bytes, [0; 8192]);
}

/// Runs `work` while the length is locked; it must wait for the lock.
fn waits_for_the_length(file: &FileStorage, work: impl Fn() + Sync) {
    let before = file.raw_len().unwrap();
    std::thread::scope(|scope| {
        let alone = file.growth.write();
        scope.spawn(&work);
        for _ in 0..2000 {
            std::thread::yield_now();
            assert_eq!(file.raw_len().unwrap(), before);
        }
        drop(alone);
    });
    assert!(file.raw_len().unwrap() > before);
}

#[test]
fn whatever_grows_a_file_waits_for_a_resize_under_way() {
    let dir = tempfile::tempdir().unwrap();
    for mode in [CacheMode::Writeback, CacheMode::None] {
        let file = lacking(dir.path(), mode, 0);
        let end = || HostOffset(file.raw_len().unwrap());
        waits_for_the_length(&file, || file.write_at(&[1; 4096], end()).unwrap());
        waits_for_the_length(&file, || file.write_at(&[1; 100], end()).unwrap());
        waits_for_the_length(&file, || file.allocate(end(), 4096).unwrap());
        for zero in [ZeroMode::MayUnmap, ZeroMode::KeepAllocated] {
            waits_for_the_length(&file, || file.write_zeroes(end(), 4096, zero).unwrap());
        }
        waits_for_the_length(&file, || file.set_len(1 << 20).unwrap());
    }
}

/// An unaligned direct write makes the file longer for a moment, with the length locked.
#[test]
fn zeroes_do_not_rely_on_a_length_for_a_moment() {
    let dir = tempfile::tempdir().unwrap();
    let file = lacking(dir.path(), CacheMode::None, 0);
    let watched = Watched::default();
    std::thread::scope(|scope| {
        let alone = file.growth.write();
        rustix::fs::ftruncate(file.file(), 8192).unwrap();
        let zeroing = scope.spawn(|| {
            watched.is_me();
            file.write_zeroes(HostOffset(4096), 4096, ZeroMode::MayUnmap).unwrap();
        });
        watched.until_it_waits();
        rustix::fs::ftruncate(file.file(), 100).unwrap();
        drop(alone);
        zeroing.join().unwrap();
    });
    assert_eq!(file.len().unwrap(), 8192);
}

/// Cached hole positions must never hide a change: extra data is allowed, an extra hole never.
#[test]
fn a_walk_over_holes_sees_what_changed_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let options = FileOptions { create: CreateMode::New, ..FileOptions::read_write() };
    let file = FileStorage::open(dir.path().join("f"), &options).unwrap();
    let (block, step) = (vec![1; 64 << 10], 1u64 << 20);
    let run = |at: u64| {
        let found = file.find_extent(HostOffset(at), 16 * step - at);
        (found.data, found.len)
    };
    file.set_len(16 * step).unwrap();
    for piece in [4, 8] {
        file.write_at(&block, HostOffset(piece * step)).unwrap();
    }
    file.sync().unwrap();
    for _ in 0..2 {
        assert_eq!(run(0), (false, 4 * step));
        assert_eq!(run(4 * step), (true, 64 << 10));
        assert_eq!(run(4 * step + (64 << 10)), (false, 4 * step - (64 << 10)));
    }
    // The data that ended the last hole is removed before it is looked up.
    file.write_zeroes(HostOffset(8 * step), 64 << 10, ZeroMode::MayUnmap).unwrap();
    assert_eq!(run(8 * step), (false, 8 * step));
    // A known hole is written to.
    assert_eq!(run(0), (false, 4 * step));
    file.write_at(&block, HostOffset(2 * step)).unwrap();
    assert_eq!(run(0), (false, 2 * step));
    assert_eq!(run(2 * step), (true, 64 << 10));
}

/// After BLKDISCARD the bytes are undefined, possibly old data. Callers of discard rely on zeroes
/// or unchanged data.
#[test]
fn a_device_that_cannot_punch_is_not_asked_for_a_discard_with_an_undefined_result() {
    let Some(device) = vdkit_testbase::fs::loop_device(4 << 20, 512) else { return };
    let file = FileStorage::open(device.path(), &FileOptions::read_write()).unwrap();
    file.lacks.punch.store(true, Ordering::Relaxed);
    file.write_at(&[7; 1 << 20], HostOffset(0)).unwrap();
    file.sync().unwrap();
    let used = || {
        let stat = rustix::fs::stat(device.file()).unwrap();
        stat.st_blocks
    };
    let before = used();
    file.discard(HostOffset(0), 1 << 20).unwrap();
    let mut bytes = vec![0; 1 << 20];
    file.read_at(&mut bytes, HostOffset(0)).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 7), "the device was asked all the same");
    assert_eq!(used(), before);
    // A guest discard may use what the device supports.
    file.forget(HostOffset(0), 1 << 20).unwrap();
    assert!(used() < before);
}
