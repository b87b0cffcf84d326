//! Guarantees of an export to every server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use vdkit_block::{Error, ErrorKind, GuestOffset, HostOffset, NewBitmap, Storage};
use vdkit_serve::{Change, ChangeMap, Claim, Client, Export, ExportOptions, Served};
use vdkit_storage::MemoryStorage;
use vdkit_testkit::disks::{MIB, qcow2, reopen};
use vdkit_testkit::{CountingStorage, CrashStorage, FaultKind, FaultPlan, FaultyStorage, Watched};

use crate::{KEPT_BYTES_MAX, PATIENCE, no_space};

/// Keeps a write and returns the receiver of its result.
fn keep(export: &Arc<Export>, data: Vec<u8>, at: u64) -> Receiver<vdkit_block::Result<()>> {
    let (tell, told) = channel();
    let done = Box::new(move |done| tell.send(done).unwrap());
    export.keep(Change::Write(data), at, true, no_space(), done);
    told
}

#[test]
fn a_read_only_export_of_a_writable_disk_takes_no_change_in_any_lane() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    let disk = qcow2(storage, MIB, "");
    disk.write_at(&[7; 4096], GuestOffset(0)).unwrap();
    let mut options = ExportOptions::default();
    options.read_only = true;
    let export = Export::new(disk, options);
    assert!(export.read_only());
    // In place, which the non-blocking path would serve at once.
    assert!(export.write_ready(&[1; 512], 0).is_none());
    let tried = [
        export.write(&[1; 512], 0, false),
        export.zero(0, 512, true, false),
        export.discard(0, MIB, false),
        export.grow(2 * MIB),
    ];
    for done in tried {
        assert!(matches!(done, Err(Error::ReadOnly { .. })), "{done:?}");
    }
    let mut found = [0; 4096];
    export.read(&mut found, 0).unwrap();
    assert_eq!(found, [7; 4096]);
    assert_eq!(export.size(), MIB);
}

#[test]
fn a_durable_change_that_was_kept_is_durable_when_it_is_done() {
    let crash = CrashStorage::new();
    let faulty = FaultyStorage::new(crash.clone());
    let export = Export::new(qcow2(faulty.clone(), 4 * MIB, ""), ExportOptions::default());
    export.write(&[1; 65536], 0, true).unwrap();
    faulty.fill();
    for at in [0, MIB] {
        assert_eq!(export.write(&[2; 4096], at, true).unwrap_err().kind(), ErrorKind::NoSpace);
        let told = keep(&export, vec![2; 4096], at);
        assert!(told.recv_timeout(Duration::from_millis(300)).is_err(), "there is no space yet");
        faulty.heal();
        told.recv_timeout(PATIENCE).unwrap().unwrap();
        let survivor = reopen(Arc::new(crash.crash_now().only_durable()), false);
        let mut found = [0; 4096];
        survivor.read_at(&mut found, GuestOffset(at)).unwrap();
        assert_eq!(found, [2; 4096], "at {at}");
        faulty.fill();
    }
    faulty.heal();
    export.close().unwrap();
}

#[test]
fn what_is_tried_again_waits_all_the_time() {
    let faulty = FaultyStorage::new(Arc::new(MemoryStorage::new("image")));
    let export = Export::new(qcow2(faulty.clone(), 4 * MIB, ""), ExportOptions::default());
    faulty.fill();
    let told = keep(&export, vec![2; 4096], 0);
    let attempts = faulty.fired() + 2000;
    while faulty.fired() < attempts {
        export.resume();
        assert_eq!(export.parked().requests, 1, "whoever looks takes this for space");
        std::thread::yield_now();
    }
    faulty.heal();
    told.recv_timeout(PATIENCE).unwrap().unwrap();
    assert_eq!(export.parked().requests, 0);
    export.close().unwrap();
}

#[test]
fn a_growth_that_waits_for_a_job_keeps_no_write_waiting() {
    let disk = qcow2(Arc::new(MemoryStorage::new("image")), 4 * MIB, "");
    let export = Export::new(disk, ExportOptions::default());
    let job = export.begin_job("commit").unwrap();
    let (tell, grown) = channel();
    let done = Box::new(move |done| tell.send(done).unwrap());
    export.keep(Change::Grow, 8 * MIB, false, no_space(), done);
    let written = keep(&export, vec![2; 4096], 0);
    export.resume();
    written.recv_timeout(PATIENCE).unwrap().unwrap();
    assert!(grown.try_recv().is_err(), "the disk has grown under the job");
    drop(job);
    grown.recv_timeout(PATIENCE).unwrap().unwrap();
    assert_eq!(export.size(), 8 * MIB);
    export.close().unwrap();
}

/// Memory that has no space for large writes.
#[derive(Debug)]
struct Narrow {
    inner: MemoryStorage,
    is_wide: AtomicBool,
}

impl vdkit_block::StorageLayer for Narrow {
    const INTERCEPTS: bool = true;

    fn inner(&self) -> &dyn Storage {
        &self.inner
    }

    fn write_at(&self, buf: &[u8], offset: HostOffset) -> vdkit_block::Result<()> {
        if buf.len() > 256 << 10 && !self.is_wide.load(Ordering::SeqCst) {
            return Err(no_space());
        }
        self.inner.write_at(buf, offset)
    }
}

#[test]
fn a_change_that_needs_more_space_than_there_is_keeps_no_other_waiting() {
    let inner = MemoryStorage::new("image");
    let narrow = Arc::new(Narrow { inner, is_wide: AtomicBool::new(false) });
    let export = Export::new(qcow2(narrow.clone(), 16 * MIB, ""), ExportOptions::default());
    let large = keep(&export, vec![2; MIB as usize], 0);
    let others: Vec<_> = (4..16).map(|i| keep(&export, vec![3; 4096], i * MIB)).collect();
    for other in others {
        other.recv_timeout(PATIENCE).unwrap().unwrap();
    }
    assert_eq!(export.parked().requests, 1);
    assert!(large.try_recv().is_err(), "there was no space for it");
    narrow.is_wide.store(true, Ordering::SeqCst);
    large.recv_timeout(PATIENCE).unwrap().unwrap();
    export.close().unwrap();
}

#[test]
fn what_is_kept_holds_a_bounded_amount_of_memory() {
    const PIECE: usize = KEPT_BYTES_MAX / 8;
    let faulty = FaultyStorage::new(Arc::new(MemoryStorage::new("image")));
    let export = Export::new(qcow2(faulty.clone(), 1 << 30, ""), ExportOptions::default());
    faulty.fill();
    // Untouched pages.
    let kept: Vec<_> = (0..8).map(|i| keep(&export, vec![0; PIECE], i * PIECE as u64)).collect();
    assert_eq!(export.parked().bytes, 8 * PIECE as u64);
    let watched = Watched::default();
    std::thread::scope(|scope| {
        let ninth = scope.spawn(|| {
            watched.is_me();
            keep(&export, vec![0; PIECE], 8 * PIECE as u64)
        });
        watched.until_it_waits();
        assert!(!ninth.is_finished(), "whoever has more to keep waits");
        assert_eq!(export.parked().bytes, 8 * PIECE as u64);
        // The end of the service releases all of them.
        export.end_waiting();
        let ninth = ninth.join().unwrap();
        for told in kept.iter().chain([&ninth]) {
            let done = told.recv_timeout(PATIENCE).unwrap();
            assert!(done.is_err());
        }
    });
    assert_eq!(export.parked().bytes, 0);
    faulty.heal();
    export.close().unwrap();
}

/// A client that reports to have left after `after` checks.
fn leaving(after: u32) -> (Client, Arc<AtomicU32>) {
    let asked = Arc::new(AtomicU32::new(0));
    let counted = asked.clone();
    (Client::new(move || counted.fetch_add(1, Ordering::SeqCst) >= after), asked)
}

#[test]
fn what_takes_long_ends_when_its_client_leaves() {
    const DATA: u64 = 64 * MIB;
    let counting = CountingStorage::new(Arc::new(MemoryStorage::new("image")));
    let disk = qcow2(counting.clone(), 1 << 50, "cluster_size=2M");
    disk.write_at(&vec![1; DATA as usize], GuestOffset(0)).unwrap();
    let export = Export::new(disk, ExportOptions::default());
    let before = counting.counts().bytes_read;
    let (client, _) = leaving(4);
    let done = export.requests(&client).prefetch(0, 1 << 50);
    assert!(matches!(done, Err(Error::Interrupted)), "{done:?}");
    let read = counting.counts().bytes_read - before;
    assert!((MIB..DATA / 2).contains(&read), "{read} bytes");
    // Half a PiB in steps.
    for discards in [false, true] {
        let (client, asked) = leaving(10);
        let requests = export.requests(&client);
        let done = if discards {
            requests.discard(DATA, 1 << 49, true)
        } else {
            requests.zero(DATA, 1 << 49, true, false)
        };
        assert!(matches!(done, Err(Error::Interrupted)), "{done:?}");
        assert_eq!(asked.load(Ordering::SeqCst), 11);
    }
    export.close().unwrap();
}

#[test]
fn a_cache_keeps_no_more_than_a_gigabyte_of_one_request() {
    let counting = CountingStorage::new(Arc::new(MemoryStorage::new("image")));
    let disk = qcow2(counting.clone(), 1 << 40, "");
    disk.write_at(&[1; 4096], GuestOffset(1 << 39)).unwrap();
    let export = Export::new(disk, ExportOptions::default());
    let client = Client::default();
    // Holes do not count.
    let before = counting.counts().bytes_read;
    export.requests(&client).prefetch(0, 1 << 40).unwrap();
    let read = counting.counts().bytes_read - before;
    assert!((4096..16 * MIB).contains(&read), "{read} bytes");
    export.close().unwrap();
}

#[test]
fn a_change_is_not_tried_again_for_a_client_that_has_left() {
    let faulty = FaultyStorage::new(Arc::new(MemoryStorage::new("image")));
    let export = Export::new(qcow2(faulty.clone(), 4 * MIB, ""), ExportOptions::default());
    faulty.fill();
    let gone = Arc::new(AtomicBool::new(false));
    let left = gone.clone();
    let client = Arc::new(Client::new(move || left.load(Ordering::SeqCst)));
    let (tell, told) = channel::<()>();
    let done = Box::new(move |_| tell.send(()).unwrap());
    let change = Change::Write(vec![5; 4096]);
    export.keep_claimed(change, 0, false, no_space(), Claim::of(&client), done);
    // The client left unnoticed; then space becomes available, and another client writes.
    gone.store(true, Ordering::SeqCst);
    faulty.heal();
    export.write(&[6; 4096], 0, true).unwrap();
    // The callback is dropped.
    assert_eq!(told.recv_timeout(PATIENCE), Err(std::sync::mpsc::RecvTimeoutError::Disconnected));
    let mut found = [0; 4096];
    export.read(&mut found, 0).unwrap();
    assert_eq!(found, [6; 4096]);
    assert_eq!((export.parked().requests, export.parked().bytes), (0, 0));
    export.close().unwrap();
}

#[test]
fn a_client_that_is_forgotten_leaves_nothing_and_others_stay() {
    let faulty = FaultyStorage::new(Arc::new(MemoryStorage::new("image")));
    let export = Export::new(qcow2(faulty.clone(), 4 * MIB, ""), ExportOptions::default());
    faulty.fill();
    let stays = keep(&export, vec![1; 4096], 0);
    let client = Arc::new(Client::default());
    for at in 1..4 {
        let change = Change::Write(vec![5; 4096]);
        let done = Box::new(|_| panic!("nobody is there to be answered"));
        export.keep_claimed(change, at * MIB, false, no_space(), Claim::of(&client), done);
    }
    assert_eq!(export.parked().requests, 4);
    export.forget(&client);
    assert_eq!((export.parked().requests, export.parked().bytes), (1, 4096));
    faulty.heal();
    export.resume();
    stays.recv_timeout(PATIENCE).unwrap().unwrap();
    let mut found = [9; 1];
    export.read(&mut found, MIB).unwrap();
    assert_eq!(found, [0]);
    export.close().unwrap();
}

#[test]
fn offered_bitmaps_are_told_while_requests_run() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    let disk = qcow2(storage, MIB, "");
    let new = NewBitmap { name: "b", granularity: None, enabled: true };
    disk.top().bitmaps().unwrap().add(&new).unwrap();
    let mut options = ExportOptions::default();
    options.bitmaps = vec!["b".to_owned(), "none".to_owned()];
    let export = Export::new(disk, options);
    let (tell, told) = channel();
    std::thread::scope(|scope| {
        let request = export.disk();
        scope.spawn(|| tell.send(export.offered_bitmaps()).unwrap());
        let offered = told.recv_timeout(PATIENCE);
        drop(request);
        assert_eq!(offered.unwrap(), ["b"]);
    });
}

/// A resize that fails after the disk has its new size (as when dirty bitmaps cannot grow). A job
/// that copies the disk must still track writes to the new part.
#[test]
fn changes_in_the_new_part_of_a_disk_are_marked_after_a_growth_that_failed() {
    let mut larger = 0;
    for nth in 0.. {
        let faulty = FaultyStorage::new(Arc::new(MemoryStorage::new("image")));
        let disk = qcow2(faulty.clone(), MIB, "cluster_size=4K");
        let bitmap = NewBitmap { name: "fine", granularity: Some(512), enabled: true };
        disk.top().bitmaps().unwrap().add(&bitmap).unwrap();
        let export = Export::new(disk, ExportOptions::default());
        let changes = Arc::new(ChangeMap::new(MIB));
        let watch = |served: &mut Served| {
            served.changes = Some(changes.clone());
            Ok(())
        };
        export.exchange(watch).unwrap();
        faulty.arm(FaultPlan::nth(&[FaultKind::Write, FaultKind::Sync], nth));
        let grown = export.grow(40 * MIB);
        faulty.heal();
        let size = export.size();
        export.write(&[1; 512], size - 512, false).unwrap();
        assert!(changes.marked_bytes() > 0, "call {nth} failed, {size} bytes: nothing is marked");
        larger += u32::from(grown.is_err() && size > MIB);
        if grown.is_ok() {
            assert!(larger > 0, "no growth failed late");
            return;
        }
    }
}

/// As above, for a client's growth: that the disk has the size by then does not make it a success.
#[test]
fn a_growth_that_failed_late_is_reported() {
    let mut late = 0;
    for nth in 0.. {
        let [grown, wanted] = [true, false].map(|by_client| {
            let faulty = FaultyStorage::new(Arc::new(MemoryStorage::new("image")));
            let disk = qcow2(faulty.clone(), MIB, "cluster_size=4K");
            let bitmap = NewBitmap { name: "fine", granularity: Some(512), enabled: true };
            disk.top().bitmaps().unwrap().add(&bitmap).unwrap();
            let export = Export::new(disk, ExportOptions::default());
            faulty.arm(FaultPlan::nth(&[FaultKind::Write, FaultKind::Sync], nth));
            let grown = if by_client {
                export.apply(&Client::default(), &Change::Grow, 40 * MIB, false)
            } else {
                export.grow(40 * MIB)
            };
            faulty.heal();
            (grown.is_ok(), export.size())
        });
        assert_eq!(grown, wanted, "call {nth} failed");
        late += u32::from(grown == (false, 40 * MIB));
        if grown.0 {
            assert!(late > 0, "no growth failed late");
            return;
        }
    }
}
