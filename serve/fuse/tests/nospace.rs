//! A full disk makes the file slow, and breaks nothing; nor does a pause.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, SeekFrom, StatxFlags};
use vdkit_block::Error;
use vdkit_fuse::{Ending, Server, ServerOptions};
use vdkit_serve::{Change, Claim, Client, Export, ExportOptions};
use vdkit_storage::MemoryStorage;
use vdkit_testkit::disks::{MIB, qcow2};
use vdkit_testkit::{FaultyStorage, Watched, eventually, in_child, require_fuse};

struct Mounted {
    faulty: Arc<FaultyStorage>,
    export: Arc<Export>,
    server: Server,
    file: PathBuf,
    _folder: tempfile::TempDir,
}

impl Mounted {
    fn new() -> Self {
        Self::with(1 << 30, &ServerOptions::default())
    }

    fn with(bytes: u64, options: &ServerOptions) -> Self {
        let faulty = FaultyStorage::new(Arc::new(MemoryStorage::new("image")));
        let export =
            Export::new(qcow2(faulty.clone(), bytes, "cluster_size=4K"), ExportOptions::default());
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("disk");
        let server = Server::start(export.clone(), &file, options).unwrap();
        Self { faulty, export, server, file, _folder: folder }
    }

    fn open(&self) -> File {
        OpenOptions::new().read(true).write(true).open(&self.file).unwrap()
    }

    fn fill(&self) {
        self.faulty.fill();
    }

    fn wait_for(&self, requests: u64) {
        eventually("parked", || self.export.parked().requests == requests);
    }

    /// Waits until a write found no space.
    fn until_refused(&self) {
        eventually("a call finds no space", || self.faulty.fired() > 0);
    }

    /// Another program's write, which finds no space.
    fn write_in_vain(&self, at: u64) -> JoinHandle<std::io::Result<()>> {
        let file = self.open();
        std::thread::spawn(move || file.write_all_at(&[5; 4096], at))
    }

    /// Fills the kept bytes with a change of `client`, so that the next change to keep blocks its
    /// thread.
    fn brim(&self, client: &Arc<Client>) {
        let error = Error::NoSpace { file: "image".to_owned(), what: "for a test".to_owned() };
        // Untouched pages.
        let kept = Change::Write(vec![0; 256 << 20]);
        let claim = Claim::of(client);
        self.export.keep_claimed(kept, 512 * MIB, false, error, claim, Box::new(|_| {}));
    }

    fn unmount_by_force(&self) {
        let unmount = Command::new("umount").args(["--force", "--lazy"]).arg(&self.file).status();
        assert!(unmount.unwrap().success());
    }

    fn end(self) {
        self.faulty.heal();
        self.export.end_waiting();
        self.server.stop(Duration::from_secs(60)).unwrap();
        self.export.close().unwrap();
    }
}

#[test]
fn a_sync_waits_for_space() {
    if !require_fuse() {
        return;
    }
    let mounted = Mounted::new();
    let file = mounted.open();
    file.write_all_at(&[1; 65536], MIB).unwrap();
    mounted.fill();
    let syncing = std::thread::spawn(move || file.sync_data());
    mounted.wait_for(1);
    assert!(!syncing.is_finished());
    let mut found = [0; 512];
    mounted.open().read_exact_at(&mut found, MIB).unwrap();
    assert_eq!(found, [1; 512]);
    mounted.faulty.heal();
    mounted.export.resume();
    syncing.join().unwrap().unwrap();
    mounted.end();
}

/// Growing a file needs space as a write does: for the bytes and for larger tables.
#[test]
fn a_growth_waits_for_space() {
    if !require_fuse() {
        return;
    }
    let mut options = ServerOptions::default();
    options.growable = true;
    let mounted = Mounted::with(MIB, &options);
    mounted.fill();
    let appending = mounted.write_in_vain(MIB + 4096);
    mounted.wait_for(1);
    assert!(!appending.is_finished());
    // Reads continue.
    mounted.open().read_exact_at(&mut [0; 512], 0).unwrap();
    mounted.faulty.heal();
    mounted.export.resume();
    appending.join().unwrap().unwrap();
    assert_eq!(mounted.export.size(), MIB + 8192);
    mounted.fill();
    // The L1 table for 1 TiB does not fit into its cluster any more.
    let file = mounted.open();
    let truncating = std::thread::spawn(move || file.set_len(1 << 40));
    mounted.wait_for(1);
    assert!(!truncating.is_finished() && mounted.export.size() == MIB + 8192);
    mounted.faulty.heal();
    mounted.export.resume();
    truncating.join().unwrap().unwrap();
    assert_eq!(mounted.open().metadata().unwrap().len(), 1 << 40);
    let mut found = [0; 4096];
    mounted.open().read_exact_at(&mut found, MIB + 4096).unwrap();
    assert_eq!(found, [5; 4096]);
    mounted.end();
}

/// Writes kept for the mount must not overwrite later data, whether they were kept or still waited
/// to be kept.
#[test]
fn a_mount_that_ends_by_force_takes_its_writes_along() {
    if !require_fuse() {
        return;
    }
    for brim in [false, true] {
        let mounted = Mounted::new();
        mounted.open().write_all_at(&[1; 4096], 0).unwrap();
        mounted.fill();
        let other = Arc::default();
        if brim {
            mounted.brim(&other);
        }
        // More than the threads.
        let writing: Vec<_> = (1..40).map(|at| mounted.write_in_vain(at * MIB)).collect();
        if brim {
            mounted.until_refused();
        } else {
            mounted.wait_for(writing.len() as u64);
        }
        mounted.unmount_by_force();
        for write in writing {
            write.join().unwrap().unwrap_err();
        }
        eventually("the mount ends", || mounted.server.finished());
        mounted.export.forget(&other);
        mounted.faulty.heal();
        for at in 1..40 {
            mounted.export.write(&[6; 4096], at * MIB, false).unwrap();
        }
        mounted.export.flush().unwrap();
        mounted.export.resume();
        mounted.wait_for(0);
        for at in 1..40 {
            let mut found = [0; 4096];
            mounted.export.read(&mut found, at * MIB).unwrap();
            assert_eq!(found, [6; 4096], "{at} MiB");
        }
        mounted.end();
    }
}

/// A thread that waited for the end of the pause would read no other request.
#[test]
fn a_pause_keeps_reads_waiting_until_the_mount_ends_and_no_statfs() {
    if !require_fuse() {
        return;
    }
    let mounted = Mounted::new();
    let file = mounted.open();
    mounted.export.pause();
    let reading = std::thread::spawn(move || file.read_at(&mut [0; 512], 0));
    eventually("the read waits", || mounted.export.stats().slow_lane > 0);
    let (tell, told) = channel();
    let path = mounted.file.clone();
    std::thread::spawn(move || tell.send(rustix::fs::statvfs(&path)).unwrap());
    let found = told.recv_timeout(Duration::from_secs(60)).expect("an answer during the pause");
    assert_eq!(found.unwrap().f_blocks, (1 << 30) / 4096);
    assert!(!reading.is_finished());
    mounted.unmount_by_force();
    reading.join().unwrap().unwrap_err();
    let ending = mounted.server.stop(Duration::from_secs(60)).unwrap();
    assert_eq!(ending, Ending::Clean);
    mounted.export.close().unwrap();
}

/// The attributes, asked of the server and not of the kernel's cache.
fn size_of(file: &Path) -> rustix::io::Result<u64> {
    let (flags, mask) = (AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS);
    rustix::fs::statx(CWD, file, flags, mask).map(|found| found.stx_size)
}

#[test]
fn a_pause_keeps_seeks_waiting_and_no_stat() {
    if !require_fuse() {
        return;
    }
    let mounted = Mounted::new();
    let file = mounted.open();
    file.write_all_at(&[1; 4096], MIB).unwrap();
    mounted.export.pause();
    let watched = Watched::default();
    std::thread::scope(|scope| {
        let seeking = scope.spawn(|| {
            watched.is_me();
            rustix::fs::seek(&file, SeekFrom::Data(0))
        });
        watched.until_it_waits();
        let (tell, told) = channel();
        let path = mounted.file.clone();
        std::thread::spawn(move || tell.send(size_of(&path)).unwrap());
        let found = told.recv_timeout(Duration::from_secs(60));
        let early = seeking.is_finished();
        mounted.export.resume();
        assert_eq!(seeking.join().unwrap(), Ok(MIB));
        assert_eq!(found.expect("an answer during the pause"), Ok(1 << 30));
        assert!(!early, "answered during the pause");
    });
    drop(file);
    mounted.end();
}

#[test]
fn a_child_of_fork_ends_no_mount() {
    if !require_fuse() {
        return;
    }
    for stops in [false, true] {
        let Mounted { export, server, file, _folder, .. } = Mounted::new();
        let mut inherited = Some(server);
        let leaves_it = || match inherited.take() {
            Some(server) if stops => server.stop(Duration::MAX).is_err(),
            server => server.is_some(),
        };
        assert!(in_child(|| (), leaves_it), "stops: {stops}");
        assert_eq!(size_of(&file), Ok(1 << 30));
        inherited.unwrap().stop(Duration::from_secs(60)).unwrap();
        assert!(!file.exists());
        export.close().unwrap();
    }
}
