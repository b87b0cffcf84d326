//! Files: lengths, holes, sharing, cache modes, threads.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::Mode;
use vdkit_block::{
    AccessExchange, CacheMode, CopyMethod, CopyOp, Error, ErrorKind, HostOffset, IoAction,
    KernelCopy, ReadOp, ReadPaths, SpaceMap, Storage, StorageExt, ZeroMode,
};
use vdkit_storage::{
    AlignedBuf, CreateMode, FileKind, FileOptions, FileStorage, LockMode, MemoryStorage,
};
use vdkit_testbase::{Rng, fs, impossible_here, in_child, require_peer};

fn new(folder: &Path, name: &str, mode: CacheMode) -> FileStorage {
    FileStorage::create(folder.join(name), &FileOptions::read_write().cache(mode)).unwrap()
}

fn op(to: u64, source: &dyn Storage, from: u64, len: u64, method: CopyMethod) -> CopyOp<'_> {
    CopyOp { to: HostOffset(to), source, from: HostOffset(from), len, method }
}

#[test]
fn what_is_missing_or_there_already_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    let missing = FileStorage::open(&path, &FileOptions::read_only()).unwrap_err();
    assert!(missing.to_string().contains("No such file"), "{missing}");
    let file = FileStorage::create(&path, &FileOptions::default()).unwrap();
    assert_eq!(file.kind(), FileKind::Regular);
    assert!(file.caps().writable && file.caps().growable);
    drop(file);
    let again = FileStorage::create(&path, &FileOptions::default()).unwrap_err();
    assert!(again.to_string().contains("exists"), "{again}");
    assert!(path.exists());
    let read_only = FileStorage::open(&path, &FileOptions::read_only()).unwrap();
    for refused in [
        read_only.write_at(&[1], HostOffset(0)),
        read_only.write_zeroes(HostOffset(0), 1, ZeroMode::MayUnmap),
        read_only.discard(HostOffset(0), 1),
        read_only.allocate(HostOffset(0), 1),
        read_only.set_len(1),
    ] {
        assert!(matches!(refused, Err(Error::ReadOnly { .. })));
    }
    assert_eq!(read_only.len().unwrap(), 0);
}

#[test]
fn offsets_beyond_what_files_have_are_errors_and_not_wraps() {
    let dir = tempfile::tempdir().unwrap();
    for mode in [CacheMode::Writeback, CacheMode::None] {
        let file = new(dir.path(), &mode.to_string(), mode);
        file.write_at(b"x", HostOffset(0)).unwrap();
        for offset in [i64::MAX as u64 - 300, i64::MAX as u64, u64::MAX - 1, u64::MAX] {
            let offset = HostOffset(offset);
            assert!(file.write_at(&[1; 600], offset).is_err());
            assert!(file.write_zeroes(offset, 600, ZeroMode::MayUnmap).is_err());
            assert!(file.allocate(offset, 600).is_err());
            assert_eq!(file.read_up_to(&mut [0; 600], offset).unwrap(), 0);
            assert!(!file.extent_at(offset, u64::MAX).unwrap().data);
            file.discard(offset, u64::MAX).unwrap();
        }
        assert!(file.set_len(u64::MAX).is_err());
        assert_eq!(file.len().unwrap(), 1);
    }
}

#[test]
fn a_read_past_the_end_says_how_far_it_came() {
    let dir = tempfile::tempdir().unwrap();
    let file = new(dir.path(), "f", CacheMode::Writeback);
    file.write_at(&[7; 100], HostOffset(0)).unwrap();
    let error = file.read_at(&mut [0; 50], HostOffset(80)).unwrap_err();
    assert!(matches!(error, Error::Io { action: IoAction::Read, offset: 80, len: 50, .. }));
    assert!(error.to_string().contains("after 20 of them"), "{error}");
    let mut buf = [1; 50];
    file.read_padded(&mut buf, HostOffset(80)).unwrap();
    assert!(buf[..20].iter().all(|b| *b == 7) && buf[20..].iter().all(|b| *b == 0));
}

#[test]
fn a_full_file_system_is_no_space() {
    let Some(fs) = fs::mounted("tmpfs", 1 << 20) else { return };
    let file = new(fs.path(), "f", CacheMode::Writeback);
    let error = file.write_at(&vec![1; 2 << 20], HostOffset(0)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    let error = file.allocate(HostOffset(0), 2 << 20).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
}

#[test]
fn holes_are_found_and_made() {
    for kind in ["tmpfs", "xfs", "ext4", "btrfs"] {
        let Some(fs) = fs::mounted(kind, 320 << 20) else { continue };
        let file = new(fs.path(), "f", CacheMode::Writeback);
        file.set_len(4 << 20).unwrap();
        assert!(file.may_have_holes().unwrap());
        file.write_at(&vec![1; 1 << 20], HostOffset(1 << 20)).unwrap();
        file.sync().unwrap();
        let at = |offset: u64| {
            let extent = file.extent_at(HostOffset(offset), 1 << 40).unwrap();
            (extent.data, extent.len)
        };
        assert_eq!(at(0), (false, 1 << 20), "{kind}");
        assert_eq!(at(1 << 20), (true, 1 << 20), "{kind}");
        assert_eq!(at(5000), (false, (1 << 20) - 5000), "{kind}");
        assert_eq!(at(2 << 20), (false, 1 << 40), "{kind}");
        assert_eq!(at(9 << 20), (false, 1 << 40), "{kind}");
        let data = file.allocated_bytes().unwrap();
        assert!((1 << 20..2 << 20).contains(&data), "{kind}: {data}");

        // Allocating fills the holes, zeroing keeps them allocated, discarding punches them.
        file.allocate(HostOffset(0), 4 << 20).unwrap();
        assert!(!file.may_have_holes().unwrap(), "{kind}");
        file.write_zeroes(HostOffset(1 << 20), 1 << 20, ZeroMode::KeepAllocated).unwrap();
        assert!(!file.may_have_holes().unwrap(), "{kind}");
        let mut buf = vec![1; 1 << 20];
        file.read_at(&mut buf, HostOffset(1 << 20)).unwrap();
        assert!(buf.iter().all(|b| *b == 0));
        file.write_zeroes(HostOffset(0), 2 << 20, ZeroMode::MayUnmap).unwrap();
        file.discard(HostOffset(2 << 20), u64::MAX).unwrap();
        file.sync().unwrap();
        assert_eq!(file.len().unwrap(), 4 << 20);
        assert!(file.allocated_bytes().unwrap() < 64 << 10, "{kind}");
    }
}

#[test]
fn a_discard_touches_whole_blocks_only() {
    let dir = tempfile::tempdir().unwrap();
    for mode in [CacheMode::Writeback, CacheMode::None] {
        let file = new(dir.path(), &mode.to_string(), mode);
        let block = u64::from(file.caps().block_bytes) as usize;
        file.write_at(&vec![7; 4 * block + 100], HostOffset(0)).unwrap();
        file.discard(HostOffset(1), 2 * block as u64).unwrap();
        // The last block ends with the file, so it is punched too.
        file.discard(HostOffset(3 * block as u64 + 1), u64::MAX).unwrap();
        let mut bytes = vec![1; 4 * block + 100];
        file.read_at(&mut bytes, HostOffset(0)).unwrap();
        assert!(bytes[..block].iter().all(|b| *b == 7));
        assert!(bytes[block..2 * block].iter().all(|b| *b == 0));
        assert!(bytes[2 * block..4 * block].iter().all(|b| *b == 7));
        assert!(bytes[4 * block..].iter().all(|b| *b == 0));
        assert_eq!(file.len().unwrap(), 4 * block as u64 + 100);
    }
}

#[test]
fn blocks_are_shared_where_the_file_system_can() {
    for kind in ["xfs", "btrfs", "ext4", "tmpfs"] {
        let Some(fs) = fs::mounted(kind, 320 << 20) else { continue };
        let source = new(fs.path(), "source", CacheMode::Writeback);
        let bytes: Vec<u8> = (0..(1 << 20) + 100u32).map(|i| (i / 4096 + 1) as u8).collect();
        source.write_at(&bytes, HostOffset(0)).unwrap();
        source.sync().unwrap();
        let len = bytes.len() as u64;
        let target = new(fs.path(), "target", CacheMode::Writeback);
        let clone =
            |to, from, len| target.copy_from(&op(to, &source, from, len, CopyMethod::Reflink));
        let shares = matches!(kind, "xfs" | "btrfs");
        let expect = |n| if shares { n } else { 0 };
        // With the unaligned end of the source.
        assert_eq!(clone(0, 0, len).unwrap(), expect(len), "{kind}");
        assert_eq!(target.len().unwrap(), expect(len));
        // Only whole blocks are shared; nothing if offsets are unaligned.
        assert_eq!(clone(4 << 20, 4096, 10_000).unwrap(), expect(8192), "{kind}");
        assert_eq!(clone(100, 0, 8192).unwrap(), 0);
        assert_eq!(clone(0, 100, 8192).unwrap(), 0);
        assert_eq!(clone(0, 0, 0).unwrap(), 0);
        if shares {
            let mut copy = vec![0; bytes.len()];
            target.read_at(&mut copy, HostOffset(0)).unwrap();
            assert!(copy == bytes);
            target.read_at(&mut copy[..8192], HostOffset(4 << 20)).unwrap();
            assert!(copy[..8192] == bytes[4096..4096 + 8192]);
            // The unaligned end of the source cannot be shared into the middle of the target: the
            // caller copies the rest.
            target.set_len(8 << 20).unwrap();
            assert_eq!(clone(0, 0, len).unwrap(), 1 << 20, "{kind}");
        }
    }
}

#[test]
fn the_kernel_copies_what_it_can() {
    for kind in ["xfs", "ext4", "tmpfs"] {
        let Some(fs) = fs::mounted(kind, 320 << 20) else { continue };
        let source = new(fs.path(), "source", CacheMode::Writeback);
        let bytes: Vec<u8> = (0..300_001u32).map(|i| (i / 100) as u8).collect();
        source.write_at(&bytes, HostOffset(0)).unwrap();
        let target = new(fs.path(), "target", CacheMode::Writeback);
        let copy = |to, from, len, source: &dyn Storage| {
            target.copy_from(&op(to, source, from, len, CopyMethod::CopyFileRange)).unwrap()
        };
        assert_eq!(copy(11, 7, 299_994, &source), 299_994, "{kind}");
        let mut got = vec![0; 299_994];
        target.read_at(&mut got, HostOffset(11)).unwrap();
        assert!(got == bytes[7..]);
        // It stops at the end of the source; storages without a descriptor are left to the caller.
        assert_eq!(copy(0, 300_000, 100, &source), 1);
        assert_eq!(copy(0, 0, 100, &MemoryStorage::from_bytes("m", &bytes)), 0);
        // The kernel refuses overlapping ranges of one file.
        assert_eq!(copy(0, 10, 1000, &target), 0);
    }
}

#[test]
fn files_of_two_file_systems_share_nothing() {
    let (Some(a), Some(b)) = (fs::mounted("xfs", 320 << 20), fs::mounted("tmpfs", 1 << 20)) else {
        return;
    };
    let source = new(a.path(), "source", CacheMode::Writeback);
    source.write_at(&[1; 8192], HostOffset(0)).unwrap();
    let target = new(b.path(), "target", CacheMode::Writeback);
    let shared = target.copy_from(&op(0, &source, 0, 8192, CopyMethod::Reflink));
    assert_eq!(shared.unwrap(), 0);
}

#[test]
fn two_writers_of_one_block_lose_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = new(dir.path(), "f", CacheMode::None);
    assert!(file.caps().alignment >= 512);
    const THREADS: u64 = 8;
    const PIECE: u64 = 100;
    for round in 1..40u8 {
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let file = &file;
                scope.spawn(move || {
                    // Interleaved pieces, so that each block has bytes of all threads.
                    for piece in 0..8 {
                        let at = (piece * THREADS + thread) * PIECE;
                        file.write_at(&[round + thread as u8; PIECE as usize], HostOffset(at))
                            .unwrap();
                    }
                });
            }
        });
        let mut bytes = vec![0; (THREADS * PIECE * 8) as usize];
        assert_eq!(file.len().unwrap(), bytes.len() as u64);
        file.read_at(&mut bytes, HostOffset(0)).unwrap();
        for (index, byte) in bytes.iter().enumerate() {
            let thread = index as u64 / PIECE % THREADS;
            assert_eq!(*byte, round + thread as u8, "byte {index}");
        }
    }
}

#[test]
fn growing_by_zeroes_cuts_off_no_writer() {
    let dir = tempfile::tempdir().unwrap();
    for mode in [CacheMode::Writeback, CacheMode::None] {
        for round in 0..100u64 {
            let file = new(dir.path(), &format!("{mode}{round}"), mode);
            std::thread::scope(|scope| {
                let file = &file;
                scope.spawn(move || {
                    file.write_zeroes(HostOffset(0), 100 + round, ZeroMode::MayUnmap).unwrap();
                });
                scope.spawn(move || file.write_at(&[7; 300], HostOffset(300)).unwrap());
                scope.spawn(move || file.write_at(&[8; 700], HostOffset(9000)).unwrap());
            });
            assert_eq!(file.len().unwrap(), 9700);
            let mut bytes = [0; 9700];
            file.read_at(&mut bytes, HostOffset(0)).unwrap();
            assert!(bytes[300..600].iter().all(|b| *b == 7));
            assert!(bytes[9000..].iter().all(|b| *b == 8));
        }
    }
}

#[test]
fn an_open_descriptor_is_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    let file = File::options().append(true).read(true).create(true).open(&path).unwrap();
    let storage = FileStorage::from_file(file, "the file", &FileOptions::read_write()).unwrap();
    storage.write_at(b"abc", HostOffset(0)).unwrap();
    storage.write_at(b"x", HostOffset(1)).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"axc");
    assert_eq!(storage.name(), "the file");
    drop(storage);
    let file = File::open(&path).unwrap();
    let refused = FileStorage::from_file(file, "f", &FileOptions::read_write());
    assert!(matches!(refused, Err(Error::Invalid { .. })));
    let write_only = File::options().write(true).open(&path).unwrap();
    assert!(FileStorage::from_file(write_only, "f", &FileOptions::read_only()).is_err());
}

#[test]
fn a_file_that_was_there_stays_when_it_cannot_be_used() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    let file = FileStorage::create(&path, &FileOptions::default()).unwrap();
    let taken = FileStorage::open(&path, &FileOptions::read_write()).unwrap_err();
    assert_eq!(taken.kind(), ErrorKind::Locked);
    assert!(path.exists());
    drop(file);
    let none = FileOptions::read_write().create(CreateMode::None);
    assert!(FileStorage::open(&path, &none).is_ok());
}

/// Runs a test of this file under strace with more arguments and returns the system calls.
fn trace(test: &str, calls: &str, more: &[&str]) -> Option<Vec<String>> {
    if !require_peer("strace") {
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let status = Command::new("strace")
        .args(["-f", "-e", &format!("trace={calls}")])
        .args(more)
        .arg("-o")
        .arg(&log)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env("VDKIT_TRACED", dir.path())
        .output()
        .unwrap();
    assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stdout));
    let text = std::fs::read_to_string(&log).unwrap();
    Some(text.lines().map(str::to_owned).collect())
}

/// Whether this line is that system call or its start: strace splits a call that is interrupted by
/// another thread's in two lines.
fn begins(line: &str, word: &str) -> bool {
    line.contains(word) && !line.contains("resumed>")
}

#[test]
#[ignore = "run by a_write_takes_one_call_and_what_makes_it_durable_is_a_sync"]
fn traced_writes() {
    let dir = std::path::PathBuf::from(std::env::var_os("VDKIT_TRACED").unwrap());
    for mode in ["writeback", "none", "writethrough", "directsync", "unsafe"] {
        let file = new(&dir, mode, mode.parse().unwrap());
        for block in 0..3 {
            file.write_at(&[1; 4096], HostOffset(block * 4096)).unwrap();
        }
        file.sync().unwrap();
    }
}

#[test]
fn a_write_takes_one_call_and_what_makes_it_durable_is_a_sync() {
    let syscalls = "open,openat,pwritev2,pwrite64,pwritev,fdatasync,fsync";
    let Some(calls) = trace("traced_writes", syscalls, &[]) else { return };
    for (mode, syncs) in
        [("writeback", 1), ("none", 1), ("writethrough", 1), ("directsync", 1), ("unsafe", 0)]
    {
        let begin = calls.iter().position(|c| c.contains(&format!("/{mode}\""))).unwrap();
        let end = calls[begin + 1..].iter().position(|c| c.contains("open"));
        let own = &calls[begin + 1..end.map_or(calls.len(), |end| begin + 1 + end)];
        let count = |word: &str| own.iter().filter(|c| begins(c, word)).count();
        assert_eq!(count("pwrite"), 3, "{mode}: {own:#?}");
        // A write that waits for itself could not share its sync.
        assert_eq!(count("RWF_DSYNC"), 0, "{mode}: {own:#?}");
        assert_eq!(count("sync("), syncs, "{mode}: {own:#?}");
    }
}

#[test]
#[ignore = "run by batches_go_through_io_uring"]
fn traced_batch() {
    let dir = std::path::PathBuf::from(std::env::var_os("VDKIT_TRACED").unwrap());
    let file = new(&dir, "batch", CacheMode::None);
    let mut bytes = vec![0; 64 * 4096];
    Rng::new(1).fill(&mut bytes);
    file.write_at(&bytes, HostOffset(0)).unwrap();
    let mut bufs: Vec<_> = (0..64).map(|_| AlignedBuf::new(4096, 4096)).collect();
    let mut ops: Vec<_> = bufs
        .iter_mut()
        .enumerate()
        .map(|(i, buf)| ReadOp { offset: HostOffset(i as u64 * 4096), buf })
        .collect();
    file.read_batch(&mut ops).unwrap();
    for (index, buf) in bufs.iter().enumerate() {
        assert!(buf[..] == bytes[index * 4096..][..4096], "{index}");
    }
}

#[test]
fn batches_go_through_io_uring() {
    let syscalls = "io_uring_setup,io_uring_enter,pread64";
    let Some(calls) = trace("traced_batch", syscalls, &[]) else { return };
    let count = |calls: &[String], word: &str| calls.iter().filter(|c| begins(c, word)).count();
    // The loader reads parts of the libraries with the same call.
    let reads = |calls: &[String]| {
        calls.iter().filter(|c| c.contains("pread64") && c.contains(", 4096, ")).count()
    };
    if calls.iter().any(|c| c.contains("io_uring_setup") && c.contains("= -1")) {
        impossible_here("io_uring is not permitted here");
    } else {
        // One, and some more if the wait is interrupted.
        assert!(count(&calls, "io_uring_enter") <= 16, "{calls:#?}");
        assert_eq!(reads(&calls), 0);
    }
    // If io_uring is not permitted, it is tried once and everything works.
    let refused = ["-e", "inject=io_uring_setup:error=EPERM"];
    let calls = trace("traced_batch", syscalls, &refused).unwrap_or_default();
    assert_eq!(count(&calls, "io_uring_setup"), 1);
    assert_eq!(reads(&calls), 64);
    // A ring that fails half-way loses nothing.
    let broken = ["-e", "inject=io_uring_enter:error=EFAULT"];
    let calls = trace("traced_batch", syscalls, &broken).unwrap_or_default();
    assert_eq!(reads(&calls), 64);
}

#[test]
fn a_batch_reads_what_single_reads_read() {
    let mut rng = Rng::from_env(0xba7c);
    let dir = tempfile::tempdir().unwrap();
    for mode in [CacheMode::Writeback, CacheMode::None] {
        let file = new(dir.path(), &mode.to_string(), mode);
        let mut bytes = vec![0; 3_000_001];
        rng.fill(&mut bytes);
        file.write_at(&bytes, HostOffset(0)).unwrap();
        for round in 0..20 {
            // More reads than the ring holds, of all lengths and alignments, some past the end;
            // some from the disk in buffered mode too.
            if round % 4 == 0 {
                file.sync().unwrap();
                let fd = file.as_fd().unwrap();
                rustix::fs::fadvise(fd, 0, None, rustix::fs::Advice::DontNeed).unwrap();
            }
            let mut bufs: Vec<_> = (0..rng.below(200))
                .map(|_| {
                    let aligned = rng.chance(2, 3);
                    let longest = if rng.chance(1, 20) { 1 << 20 } else { 9000 };
                    let len = rng.below(longest) as usize;
                    let offset = rng.below(3_100_000);
                    let unit = if aligned { 4096 } else { 1 };
                    (
                        offset / unit * unit,
                        AlignedBuf::new(len / unit as usize * unit as usize, 4096),
                    )
                })
                .collect();
            bufs.iter_mut().for_each(|(_, buf)| buf.fill(0xee));
            let mut ops: Vec<_> = bufs
                .iter_mut()
                .map(|(offset, buf)| ReadOp { offset: HostOffset(*offset), buf })
                .collect();
            file.read_batch(&mut ops).unwrap();
            for (offset, buf) in &bufs {
                let there = bytes.get(*offset as usize..).unwrap_or(&[]);
                let n = there.len().min(buf.len());
                assert!(buf[..n] == there[..n], "{mode} {offset} seed {:#x}", rng.seed());
                assert!(buf[n..].iter().all(|b| *b == 0), "{mode} {offset}: not padded");
            }
        }
    }
}

#[test]
fn a_failed_sync_stays_failed() {
    // A device that takes writes into the page cache and loses them: a loop device on a full file
    // system.
    let Some(fs) = fs::mounted("tmpfs", 8 << 20) else { return };
    let image = fs.path().join("image");
    File::create(&image).unwrap().set_len(4 << 20).unwrap();
    let attach = Command::new("losetup").args(["--find", "--show"]).arg(&image).output().unwrap();
    let device = String::from_utf8(attach.stdout).unwrap().trim().to_owned();
    let storage = FileStorage::open(&device, &FileOptions::read_write()).unwrap();
    std::fs::write(fs.path().join("filler"), vec![1; 7 << 20]).unwrap();
    let outcome = (|| {
        storage.write_at(&vec![1; 3 << 20], HostOffset(0))?;
        storage.sync()
    })();
    std::fs::remove_file(fs.path().join("filler")).unwrap();
    let first = outcome.unwrap_err();
    // There is space now, so the kernel would report success.
    let second = storage.sync().unwrap_err();
    drop(storage);
    Command::new("losetup").args(["--detach", &device]).status().unwrap();
    assert!(matches!(first, Error::File { action: IoAction::Sync, .. }), "{first}");
    assert!(second.to_string().contains("an earlier one failed"), "{second}");
}

#[test]
fn direct_io_that_is_not_to_be_had_names_another_mode() {
    // ext4 with data journaling has no direct I/O.
    let Some(fs) = fs::mounted_with("ext4", 64 << 20, "data=journal") else { return };
    let path = fs.path().join("f");
    File::create(&path).unwrap();
    for (mode, instead) in [(CacheMode::None, "writeback"), (CacheMode::DirectSync, "writethrough")]
    {
        let error = FileStorage::open(&path, &FileOptions::read_write().cache(mode)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(&format!("cache mode {mode} needs direct I/O")), "{text}");
        assert!(text.contains(&format!("use cache mode {instead}")), "{text}");
        let new = fs.path().join("new");
        assert!(FileStorage::create(&new, &FileOptions::read_write().cache(mode)).is_err());
        assert!(!new.exists(), "a new file that cannot be used stays");
    }
    FileStorage::open(&path, &FileOptions::read_write()).unwrap();
}

#[test]
fn modes_of_new_files_follow_the_mask() {
    let dir = tempfile::tempdir().unwrap();
    let file = new(dir.path(), "f", CacheMode::Writeback);
    drop(file);
    let plain = dir.path().join("plain");
    File::create(&plain).unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().mode();
    assert_eq!(mode(&dir.path().join("f")), mode(&plain));
    // A mask that forbids nothing lets nobody else write.
    let path = dir.path().join("unmasked");
    let made = in_child(
        || (),
        || {
            rustix::process::umask(Mode::empty());
            FileStorage::create(&path, &FileOptions::read_write()).is_ok()
        },
    );
    assert!(made && mode(&path) & 0o777 == 0o644, "{:o}", mode(&path));
}

#[test]
fn a_mounted_device_is_not_opened_for_writing() {
    let Some(device) = fs::loop_device(16 << 20, 512) else { return };
    if !require_peer("mkfs.ext4") {
        return;
    }
    let ran = |command: &mut Command| assert!(command.status().unwrap().success());
    ran(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(device.path()));
    let dir = tempfile::tempdir().unwrap();
    ran(Command::new("mount").arg(device.path()).arg(dir.path()));
    let refused = FileStorage::open(device.path(), &FileOptions::read_write());
    let off = FileOptions::read_write().lock(LockMode::Off);
    let forced = FileStorage::open(device.path(), &off).map(drop);
    let reader = FileStorage::open(device.path(), &FileOptions::read_only()).map(drop);
    ran(Command::new("umount").arg(dir.path()));
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Locked);
    assert!(error.to_string().contains(dir.path().to_str().unwrap()), "{error}");
    forced.unwrap();
    reader.unwrap();
    FileStorage::open(device.path(), &FileOptions::read_write()).unwrap();
}

#[test]
fn a_read_only_device_is_refused_when_opened() {
    let Some(device) = fs::loop_device(1 << 20, 512) else { return };
    let set = |flag| Command::new("blockdev").arg(flag).arg(device.path()).status().unwrap();
    assert!(set("--setro").success());
    let error = FileStorage::open(device.path(), &FileOptions::read_write()).unwrap_err();
    assert!(matches!(error, Error::File { action: IoAction::Open, .. }), "{error}");
    assert!(FileStorage::open(device.path(), &FileOptions::read_only()).is_ok());
}

#[test]
fn a_device_keeps_its_length() {
    let Some(device) = fs::loop_device(1 << 20, 512) else { return };
    let storage = FileStorage::open(device.path(), &FileOptions::read_write()).unwrap();
    assert_eq!(storage.len().unwrap(), 1 << 20);
    assert_eq!(storage.kind(), FileKind::BlockDevice);
    storage.set_len(1 << 20).unwrap();
    assert!(matches!(storage.set_len(2 << 20), Err(Error::Unsupported { .. })));
    storage.allocate(HostOffset(0), 1 << 20).unwrap();
    let past = HostOffset((1 << 20) - 10);
    for refused in [
        storage.allocate(past, 11),
        storage.write_at(&[1; 11], past),
        storage.write_zeroes(past, 11, ZeroMode::MayUnmap),
    ] {
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::NoSpace);
    }
    assert!(!storage.may_have_holes().unwrap());
    assert!(storage.extent_at(HostOffset(0), 4096).unwrap().data);
    // Discards reach the underlying file.
    storage.write_at(&vec![1; 1 << 20], HostOffset(0)).unwrap();
    storage.sync().unwrap();
    let used = || std::fs::metadata(device.file()).unwrap().blocks() * 512;
    assert!(used() >= 1 << 20);
    storage.discard(HostOffset(4096), 512 << 10).unwrap();
    storage.sync().unwrap();
    assert!(used() < 600 << 10, "{}", used());
}

/// The last block of a file whose length is no multiple of the alignment, while the file grows: such a
/// read ends early, but not at the file's end.
#[test]
fn a_direct_read_at_the_end_of_a_file_that_grows_does_not_fail() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    let options = FileOptions::read_write().cache(CacheMode::None);
    let Ok(file) = FileStorage::create(&path, &options) else {
        return impossible_here("no direct I/O in the temporary folder");
    };
    let align = u64::from(file.caps().alignment);
    file.write_at(&vec![7; (2 * align) as usize + 100], HostOffset(0)).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                file.set_len(4 * align).unwrap();
                file.set_len(2 * align + 100).unwrap();
            }
        });
        let mut buf = [0; 100];
        for _ in 0..5000 {
            let read = file.read_at(&mut buf, HostOffset(2 * align));
            done.store(read.is_err(), Ordering::Relaxed);
            read.expect("healthy bytes");
            assert_eq!(buf, [7; 100]);
        }
        done.store(true, Ordering::Relaxed);
    });
}

/// A live commit downgrades the disk on a device and writes to it again later. Nobody else may take the
/// device meanwhile.
#[test]
fn a_device_is_opened_for_writing_again_by_who_has_it() {
    let Some(device) = fs::loop_device(1 << 20, 512) else { return };
    let open = |options| FileStorage::open(device.path(), &options);
    let first = open(FileOptions::read_write()).unwrap();
    first.downgrade_lock().unwrap();
    let second = first.reopen_for_writing().unwrap();
    drop(first);
    second.write_at(&[5; 512], HostOffset(0)).unwrap();
    let foreign = || open(FileOptions::read_write().lock(LockMode::Off));
    let exclusive = || {
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::EXCL;
        rustix::fs::open(device.path(), flags, rustix::fs::Mode::empty())
    };
    assert_eq!(exclusive().err(), Some(rustix::io::Errno::BUSY));
    drop(second);
    foreign().unwrap();
    exclusive().unwrap();
}
