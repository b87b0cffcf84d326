//! The end of an export, and its pauses.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

use vdkit_block::{CancelToken, Error, GuestOffset, HostOffset, Result, Storage};
use vdkit_serve::{Change, Claim, Client, Command, Controller, Export, ExportOptions};
use vdkit_storage::MemoryStorage;
use vdkit_testkit::disks::{MIB, qcow2, reopen};
use vdkit_testkit::{FaultKind, FaultyStorage, GatedStorage, Watched, in_child};

use crate::{KEPT_BYTES_MAX, PATIENCE, no_space};

fn export_of(storage: &Arc<dyn Storage>) -> Arc<Export> {
    Export::new(qcow2(storage.clone(), 4 * MIB, ""), ExportOptions::default())
}

fn memory() -> Arc<dyn Storage> {
    Arc::new(MemoryStorage::new("image"))
}

/// Keeps a write of a client and returns the receiver of its result.
fn keep(export: &Arc<Export>, client: &Arc<Client>, at: u64) -> Receiver<Result<()>> {
    let (tell, told) = channel();
    keep_with(export, client, at, move |done| tell.send(done).unwrap());
    told
}

fn keep_with(
    export: &Arc<Export>,
    client: &Arc<Client>,
    at: u64,
    done: impl FnOnce(Result<()>) + Send + 'static,
) {
    let change = Change::Write(vec![2; 4096]);
    export.keep_claimed(change, at, true, no_space(), Claim::of(client), Box::new(done));
}

#[test]
fn a_close_waits_for_the_attempt() {
    let storage = memory();
    let export = export_of(&storage);
    let armed = Arc::new(AtomicBool::new(false));
    let (enter, entered) = channel();
    let (go, goes) = channel::<()>();
    let (probed, goes) = (armed.clone(), Mutex::new(goes));
    // An attempt begins with this question, before it locks the disk.
    let client = Arc::new(Client::new(move || {
        if probed.swap(false, Ordering::SeqCst) {
            enter.send(()).unwrap();
            goes.lock().unwrap().recv().unwrap();
        }
        false
    }));
    let told = keep(&export, &client, 0);
    armed.store(true, Ordering::SeqCst);
    export.resume();
    entered.recv_timeout(PATIENCE).unwrap();
    let watched = Watched::default();
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| {
            watched.is_me();
            export.close()
        });
        watched.until_it_waits();
        let waits = !closing.is_finished();
        // Nobody would resume: it must keep neither the attempt nor the close.
        export.pause();
        go.send(()).unwrap();
        closing.join().unwrap().unwrap();
        assert!(waits, "the disk was closed during an attempt");
    });
    told.try_recv().expect("answered before the close has returned").unwrap();
    let mut found = [0; 4096];
    reopen(storage, false).read_at(&mut found, GuestOffset(0)).unwrap();
    assert_eq!(found, [2; 4096]);
}

#[test]
fn a_closed_export_is_the_callers_alone() {
    let export = export_of(&memory());
    let told = keep(&export, &Arc::default(), 0);
    export.close().unwrap();
    assert_eq!(Arc::strong_count(&export), 1, "the image stays locked for a while");
    told.try_recv().expect("answered before the close has returned").unwrap_err();
    // The thread may also have ended by itself.
    let export = export_of(&memory());
    let told = keep(&export, &Arc::default(), 0);
    export.resume();
    told.recv_timeout(PATIENCE).unwrap().unwrap();
    export.close().unwrap();
    assert_eq!(Arc::strong_count(&export), 1, "the image stays locked for a while");
}

#[test]
fn an_answer_may_close_the_export() {
    let export = export_of(&memory());
    let (own, (tell, told)) = (export.clone(), channel());
    let closes = move |done: Result<()>| tell.send(done.and(own.close())).unwrap();
    keep_with(&export, &Arc::default(), 0, closes);
    export.resume();
    told.recv_timeout(PATIENCE).unwrap().unwrap();
}

/// The thread that would have to end is the parent's.
#[test]
fn a_child_of_fork_closes_no_export() {
    let faulty = FaultyStorage::new(memory());
    let storage: Arc<dyn Storage> = faulty.clone();
    let export = export_of(&storage);
    faulty.fill();
    let told = keep(&export, &Arc::default(), 0);
    let leaves_it = || {
        export.end_waiting();
        matches!(export.close(), Err(Error::Invalid { .. }))
    };
    assert!(in_child(|| (), leaves_it));
    faulty.heal();
    export.resume();
    told.recv_timeout(PATIENCE).unwrap().unwrap();
    export.close().unwrap();
}

/// As a request in several steps does if its server has no thread for the next step.
#[test]
fn an_answer_may_keep_a_change_even_if_too_much_is_kept() {
    let export = export_of(&memory());
    let (own, (tell, told)) = (export.clone(), channel());
    let next = move |_| keep_with(&own, &Arc::default(), MIB, move |done| tell.send(done).unwrap());
    keep_with(&export, &Arc::default(), 0, next);
    // Untouched pages; it fails when it is tried, since it reaches past the disk's end.
    let large = Change::Write(vec![0; KEPT_BYTES_MAX]);
    export.keep(large, 0, false, no_space(), Box::new(|_| {}));
    export.resume();
    told.recv_timeout(PATIENCE).unwrap().unwrap();
    export.close().unwrap();
}

#[test]
fn a_panic_leaves_the_other_kept_changes_retried() {
    let export = export_of(&memory());
    let armed = Arc::new(AtomicBool::new(false));
    let probed = armed.clone();
    let client = Arc::new(Client::new(move || {
        assert!(!probed.load(Ordering::SeqCst), "for a test");
        false
    }));
    let first = keep(&export, &client, 0);
    keep_with(&export, &Arc::default(), MIB, |_| panic!("for a test"));
    let last = keep(&export, &Arc::default(), 2 * MIB);
    armed.store(true, Ordering::SeqCst);
    export.resume();
    let failed = first.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(failed, Err(Error::Io { .. })), "{failed:?}");
    last.recv_timeout(PATIENCE).unwrap().unwrap();
    assert_eq!((export.parked().requests, export.parked().bytes), (0, 0));
    export.forget(&client);
    // The thread has ended or goes on: either way a new change is tried.
    keep(&export, &Arc::default(), 0).recv_timeout(PATIENCE).unwrap().unwrap();
    export.close().unwrap();
}

fn bytes_of(storage: &dyn Storage) -> Vec<u8> {
    let mut bytes = vec![0; storage.len().unwrap() as usize];
    assert_eq!(storage.read_up_to(&mut bytes, HostOffset(0)).unwrap(), bytes.len());
    bytes
}

#[test]
fn nothing_changes_a_closed_export() {
    let storage = memory();
    let export = export_of(&storage);
    export.write(&[1; 4096], 0, true).unwrap();
    let controller = Controller::new(export.clone(), CancelToken::default());
    export.close().unwrap();
    let before = bytes_of(&*storage);
    assert!(export.write_ready(&[2; 512], 0).is_none());
    let snapshot = Command::Snapshot { name: "late".to_owned() };
    let bitmap = Command::BitmapAdd { name: "late".to_owned(), granularity: None, disabled: false };
    let tried = [
        export.write(&[2; 512], 0, true),
        export.zero(0, 512, true, true),
        export.discard(0, MIB, true),
        export.flush(),
        export.alone(|_| Ok(())),
        export.exchange(|_| Ok(())),
        export.apply(&Client::default(), &Change::Grow, 8 * MIB, true),
        controller.run(&snapshot).map(drop),
        controller.run(&bitmap).map(drop),
        controller.run(&Command::Resize { size: 8 * MIB }).map(drop),
        controller.run(&Command::Flush).map(drop),
    ];
    for (number, done) in tried.into_iter().enumerate() {
        assert!(matches!(done, Err(Error::Interrupted)), "{number}: {done:?}");
    }
    assert!(bytes_of(&*storage) == before);
    let mut found = [0; 4096];
    export.read(&mut found, 0).unwrap();
    assert_eq!(found, [1; 4096]);
}

#[test]
fn a_pause_returns_when_the_running_write_has_ended() {
    let gated = GatedStorage::new(memory());
    let storage: Arc<dyn Storage> = gated.clone();
    let export = export_of(&storage);
    let (paused, watched) = (AtomicBool::new(false), Watched::default());
    gated.hold(|call| call.kind == FaultKind::Write && !call.done);
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| export.write(&[1; 4096], 0, false));
        gated.reached();
        let pausing = scope.spawn(|| {
            watched.is_me();
            export.pause();
            paused.store(true, Ordering::SeqCst);
        });
        watched.until_it_waits();
        let early = paused.load(Ordering::SeqCst);
        gated.release();
        pausing.join().unwrap();
        assert!(!early, "a write was running");
        writing.join().unwrap().unwrap();
    });
    export.resume();
    export.close().unwrap();
}

/// A request that was let in before the pause, and waited for the disk meanwhile.
#[test]
fn no_request_begins_after_a_pause() {
    let export = export_of(&memory());
    let (write, pause) = (Watched::default(), Watched::default());
    let (enter, entered) = channel();
    let (go, goes) = channel::<()>();
    let written = AtomicBool::new(false);
    let held = export.clone();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let until_told = held.alone(|_| {
                enter.send(()).unwrap();
                goes.recv().unwrap();
                Ok(())
            });
            until_told.unwrap();
        });
        entered.recv_timeout(PATIENCE).unwrap();
        let writing = scope.spawn(|| {
            write.is_me();
            let done = export.write(&[1; 4096], 0, false);
            written.store(true, Ordering::SeqCst);
            done
        });
        write.until_it_waits();
        let pausing = scope.spawn(|| {
            pause.is_me();
            export.pause();
        });
        pause.until_it_waits();
        go.send(()).unwrap();
        pausing.join().unwrap();
        write.until_it_waits();
        let early = written.load(Ordering::SeqCst);
        export.resume();
        writing.join().unwrap().unwrap();
        assert!(!early, "written during the pause");
    });
    export.close().unwrap();
}

#[test]
fn a_pause_also_stops_growth_by_a_client() {
    let export = export_of(&memory());
    export.pause();
    let (watched, grown) = (Watched::default(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let growing = scope.spawn(|| {
            watched.is_me();
            let done = export.apply(&Client::default(), &Change::Grow, 8 * MIB, false);
            grown.store(true, Ordering::SeqCst);
            done
        });
        watched.until_it_waits();
        let early = grown.load(Ordering::SeqCst);
        export.resume();
        growing.join().unwrap().unwrap();
        assert!(!early, "grown during the pause");
    });
    assert_eq!(export.size(), 8 * MIB);
    export.close().unwrap();
}

#[test]
fn a_pause_after_the_end_keeps_nobody() {
    let export = export_of(&memory());
    export.close().unwrap();
    export.pause();
    let (tell, told) = channel();
    let own = export.clone();
    std::thread::spawn(move || tell.send([own.write(&[1; 512], 0, false), own.flush()]).unwrap());
    let ends = told.recv_timeout(PATIENCE).unwrap();
    assert!(ends.iter().all(|end| matches!(end, Err(Error::Interrupted))), "{ends:?}");
}
