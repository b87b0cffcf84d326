//! A ring: takes requests and puts them back.
//!
//! Its thread takes a batch under the ring's lock, runs it unlocked, and puts back under the lock
//! what the non-blocking path served, with at most one notification. Other threads put back their
//! results in the same way.
//!
//! A guest can write anything into the ring at any time. So every index is checked, and no head is
//! taken again before it was put back (which bounds the requests in flight). An invalid ring is
//! *broken*: nothing more is taken from it until it is restarted.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use vdkit_serve::{Claim, Pool, SlowWriteBackoff, Wake};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};

use crate::device::{Device, QUEUE_SIZE_MAX};
use crate::inflight::Tracker;
use crate::memory::Mem;
use crate::perform::{self, Finished, Full, Slow, Status};
use crate::request::{InvalidChain, Request, Table};

/// Maximum requests per batch.
const BATCH: usize = 64;

thread_local! {
    /// The bounce buffer of a thread that may block: at most a piece.
    static BOUNCE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Location and start position of a ring.
#[derive(Clone, Copy, Debug, Default)]
pub struct Setup {
    pub size: u16,
    /// Guest addresses.
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
    /// The available index to start from.
    pub base: u16,
    pub event_idx: bool,
}

/// Data under the lock.
#[derive(Default)]
struct Core {
    queue: Queue,
    mem: Arc<Mem>,
    call: Option<File>,
    err: Option<File>,
    tracker: Option<Tracker>,
    /// Sequence number of taken requests.
    counter: u64,
    /// By head: taken and not put back.
    busy: Vec<bool>,
    /// Number of busy heads.
    outstanding: usize,
    /// Requests waiting for space.
    kept: HashMap<u16, Kept>,
    running: bool,
    broken: bool,
}

/// A request waiting for space.
struct Kept {
    claim: Arc<Claim>,
    mem: Arc<Mem>,
    status: GuestAddress,
}

/// One of a disk's rings.
pub struct Ring {
    index: u16,
    device: Arc<Device>,
    pool: Arc<Pool>,
    core: Mutex<Core>,
    /// A request was put back, or waits for space.
    changed: Condvar,
    backoff: SlowWriteBackoff,
}

/// A request that may block.
pub struct Job {
    ring: Arc<Ring>,
    request: Request,
    mem: Arc<Mem>,
    began: Instant,
    /// Progress of the request.
    progress: u64,
}

/// Reusable memory of the ring's thread.
#[derive(Default)]
struct Own {
    batch: Vec<Request>,
    done: Vec<(u16, u32)>,
    bounce: Vec<u8>,
    /// Reusable segment lists.
    spare: Vec<Vec<crate::memory::Segment>>,
}

/// Runs a request; `failed` is the result of a panic, which the panic hook has reported. The guest
/// and a thread that stops the ring wait for every request.
fn surviving<R>(run: impl FnOnce() -> R, failed: R) -> R {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or(failed)
}

impl Job {
    /// Runs the request on a thread that may block.
    fn submit(self) {
        let pool = self.ring.pool.clone();
        pool.run(0, move || self.run());
    }

    /// Runs the request, and puts it back unless it must wait for space.
    fn run(self) {
        let device = self.ring.device.clone();
        let mut bounce = BOUNCE.take();
        let slow = || perform::slow(&device, &self.mem, &self.request, self.progress, &mut bounce);
        let done = surviving(slow, Slow::Finished(Status::IoError.into()));
        BOUNCE.set(bounce);
        match done {
            Slow::Finished(finished) => self.end(finished),
            Slow::Full(full) => self.keep(full),
            Slow::GivenUp => {
                self.ring.core.lock().give_up(self.request.head, &self.mem, self.request.status);
                self.ring.changed.notify_all();
            }
        }
    }

    fn end(self, finished: Finished) {
        let ring = self.ring;
        ring.count(&self.request, finished, self.began.elapsed());
        let done = ring.answer(&self.mem, &self.request, finished);
        ring.put_back(&[done]);
    }

    /// Lets the export retry a change, and continues the request afterwards.
    fn keep(mut self, full: Full) {
        let claim = Claim::of(&self.ring.device.client);
        let ring = self.ring.clone();
        let head = self.request.head;
        self.progress = full.progress;
        let (mem, status) = (self.mem.clone(), self.request.status);
        ring.core.lock().kept.insert(head, Kept { claim: claim.clone(), mem, status });
        ring.changed.notify_all();
        let again = ring.clone();
        let done = Box::new(move |done: vdkit_block::Result<()>| {
            again.core.lock().kept.remove(&head);
            match done {
                Ok(()) => self.submit(),
                Err(error) => {
                    tracing::warn!(export = again.device.export.name(), "{error}");
                    self.end(Status::IoError.into());
                }
            }
        });
        let export = &ring.device.export;
        export.keep_claimed(full.change, full.at, full.durable, full.error, claim, done);
    }
}

impl Ring {
    pub fn new(index: u16, device: Arc<Device>, pool: Arc<Pool>) -> Arc<Self> {
        let (core, changed, backoff) = Default::default();
        Arc::new(Self { index, device, pool, core, changed, backoff })
    }

    pub fn set_mem(&self, mem: Arc<Mem>) {
        self.core.lock().mem = mem;
    }

    /// Sets the notification descriptor. Notifies at once, since requests may have been put back
    /// without a descriptor.
    pub fn set_call(&self, file: Option<File>) {
        let mut core = self.core.lock();
        core.call = file;
        if core.running {
            core.call();
        }
    }

    pub fn set_err(&self, file: Option<File>) {
        self.core.lock().err = file;
    }

    /// Prepares the ring to run. Returns the heads to repeat.
    ///
    /// # Errors
    /// A description of an invalid setup.
    pub fn prepare(
        &self,
        setup: Setup,
        tracker: Option<Tracker>,
    ) -> Result<Vec<u16>, InvalidChain> {
        let mut core = self.core.lock();
        let mem = core.mem.clone();
        let mut queue = Queue::new(QUEUE_SIZE_MAX).map_err(|_| "a queue of no size")?;
        queue.try_set_size(setup.size).map_err(|_| "a queue of a size that cannot be")?;
        let address = |at: u64| GuestAddress(at);
        let misplaced = |_| "a queue that is not aligned";
        queue.try_set_desc_table_address(address(setup.descriptors)).map_err(misplaced)?;
        queue.try_set_avail_ring_address(address(setup.available)).map_err(misplaced)?;
        queue.try_set_used_ring_address(address(setup.used)).map_err(misplaced)?;
        queue.set_event_idx(setup.event_idx);
        queue.set_next_avail(setup.base);
        queue.set_ready(true);
        if !queue.is_valid(&*mem) {
            return Err("a queue outside of memory");
        }
        let used = queue.used_idx(&*mem, Ordering::Acquire).map_err(|_| "no used index")?.0;
        queue.set_next_used(used);
        let mut heads = Vec::new();
        let tracker = tracker.filter(|notes| notes.fits(setup.size));
        if let Some(notes) = &tracker {
            let recovered = notes.recover(setup.size, used).unwrap_or_else(|| {
                tracing::warn!(queue = self.index, "the in-flight records are invalid");
                notes.reset(setup.size, used);
                Default::default()
            });
            if !recovered.fresh {
                // All unanswered requests were recorded as taken, whatever index the monitor has.
                queue.set_next_avail(used.wrapping_add(recovered.heads.len() as u16));
            }
            heads = recovered.heads;
        }
        core.busy = vec![false; usize::from(setup.size)];
        core.outstanding = 0;
        core.counter = 0;
        core.queue = queue;
        core.tracker = tracker;
        core.broken = false;
        core.running = true;
        // Requests may have been put back before, by a server that ended before it could notify.
        core.call();
        Ok(heads)
    }

    /// The ring's thread: runs until `stop` is set.
    pub fn run(self: &Arc<Self>, kick: &OwnedFd, stop: &Wake, recovered: &[u16]) {
        let mut own = Own::default();
        self.redo(recovered);
        // Requests from before this thread may have been kicked already.
        self.process(&mut own);
        loop {
            match stop.wait_at(kick) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    tracing::error!(queue = self.index, "cannot wait for the guest: {error}");
                    return;
                }
            }
            match rustix::io::read(kick, &mut [0_u8; 8]) {
                Ok(8) => self.process(&mut own),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                Ok(_) | Err(_) => {
                    self.core.lock().break_down(self.index, "its kicks cannot be read");
                    return;
                }
            }
        }
    }

    /// Repeats the requests that the previous process left unanswered.
    fn redo(self: &Arc<Self>, heads: &[u16]) {
        let mut requests = Vec::new();
        let mem = {
            let mut core = self.core.lock();
            let mem = core.mem.clone();
            for head in heads {
                if let Err(nonsense) = core.take(&mem, *head, &mut requests, Vec::new()) {
                    core.break_down(self.index, nonsense);
                    break;
                }
            }
            mem
        };
        if !requests.is_empty() {
            tracing::info!(queue = self.index, requests = requests.len(), "requests done again");
        }
        for request in requests {
            self.submit(request, &mem, Instant::now());
        }
    }

    fn submit(self: &Arc<Self>, request: Request, mem: &Arc<Mem>, began: Instant) {
        let ring = self.clone();
        Job { ring, request, mem: mem.clone(), began, progress: 0 }.submit();
    }

    /// Runs all available requests.
    fn process(self: &Arc<Self>, own: &mut Own) {
        while let Some(mem) = self.take_batch(own) {
            let mut now = Instant::now();
            let mut batch = std::mem::take(&mut own.batch);
            for request in batch.drain(..) {
                let fast =
                    || perform::fast(&self.device, &self.backoff, &mem, &request, &mut own.bounce);
                let finished = surviving(fast, Some(Status::IoError.into()));
                self.device.export.counters().lane(finished.is_some());
                let Some(finished) = finished else {
                    self.submit(request, &mem, now);
                    continue;
                };
                own.done.push(self.answer(&mem, &request, finished));
                let began = std::mem::replace(&mut now, Instant::now());
                self.count(&request, finished, now - began);
                own.spare.push(request.data);
            }
            own.batch = batch;
            if !own.done.is_empty() {
                self.put_back(&own.done);
                own.done.clear();
            }
        }
    }

    /// Takes requests; `None` if there are none and the guest will kick.
    fn take_batch(&self, own: &mut Own) -> Option<Arc<Mem>> {
        let mut core = self.core.lock();
        let mem = core.mem.clone();
        // Try again: a request may arrive before notifications are enabled.
        for _ in 0..3 {
            if core.broken || !core.running {
                return None;
            }
            if let Err(nonsense) = core.take_available(&mem, own) {
                core.break_down(self.index, nonsense);
            }
            if !own.batch.is_empty() {
                return Some(mem);
            }
            if !core.broken {
                match core.queue.enable_notification(&*mem) {
                    Ok(false) => return None,
                    Ok(true) => {}
                    Err(_) => core.break_down(self.index, "its rings left the memory"),
                }
            }
        }
        core.break_down(self.index, "an available index that comes and goes");
        None
    }

    /// Writes a request's status to the guest; returns the used ring entry.
    fn answer(&self, mem: &Mem, request: &Request, finished: Finished) -> (u16, u32) {
        if mem.write_obj(finished.status as u8, request.status).is_err() {
            self.core.lock().break_down(self.index, "a status that left the memory");
        }
        (request.head, u32::try_from(finished.data + 1).unwrap_or(u32::MAX))
    }

    fn put_back(&self, done: &[(u16, u32)]) {
        let mut core = self.core.lock();
        for (head, len) in done {
            if let Err(nonsense) = core.put_back(*head, *len) {
                core.break_down(self.index, nonsense);
            }
        }
        core.notify();
        drop(core);
        self.changed.notify_all();
    }

    fn count(&self, request: &Request, finished: Finished, took: std::time::Duration) {
        let Some(kind) = perform::op_kind(request.kind) else { return };
        let ok = finished.status == Status::Ok;
        self.device.export.counters().done(kind, request.bytes, took, ok);
    }

    /// Takes nothing more.
    pub fn halt(&self) {
        self.core.lock().running = false;
    }

    /// Waits until no request of the ring is running; its thread has ended. Requests waiting for
    /// space are withdrawn: they stay recorded as in flight and are repeated when the ring is
    /// restarted, or fail without in-flight records. Returns the available index to resume from.
    pub fn drain(&self) -> u16 {
        let mut core = self.core.lock();
        while core.outstanding > 0 {
            if core.kept.is_empty() || core.outstanding > core.kept.len() {
                self.changed.wait(&mut core);
                continue;
            }
            let kept = std::mem::take(&mut core.kept);
            drop(core);
            // Each withdrawal waits for a running attempt.
            let given_up: Vec<(u16, Kept)> =
                kept.into_iter().filter(|(_, kept)| kept.claim.withdraw()).collect();
            core = self.core.lock();
            for (head, kept) in given_up {
                core.give_up(head, &kept.mem, kept.status);
            }
        }
        core.notify();
        let next = core.queue.next_avail();
        core.tracker = None;
        next
    }
}

impl Core {
    fn call(&mut self) {
        if let Some(call) = &mut self.call {
            // EAGAIN means that earlier notifications are still unread.
            let _ = call.write(&1_u64.to_ne_bytes());
        }
    }

    fn notify(&mut self) {
        if !self.broken && matches!(self.queue.needs_notification(&*self.mem), Ok(true)) {
            self.call();
        }
    }

    fn break_down(&mut self, index: u16, nonsense: InvalidChain) {
        if self.broken {
            return;
        }
        self.broken = true;
        tracing::warn!(queue = index, "the guest's queue is stopped: {nonsense}");
        if let Some(err) = &mut self.err {
            let _ = err.write(&1_u64.to_ne_bytes());
        }
    }

    fn take_available(&mut self, mem: &Mem, own: &mut Own) -> Result<(), InvalidChain> {
        if !self.queue.event_idx_enabled() {
            self.queue.disable_notification(mem).map_err(|_| "its rings left the memory")?;
        }
        while own.batch.len() < BATCH {
            let mut available =
                self.queue.iter(mem).map_err(|_| "an available index beyond the queue")?;
            let Some(chain) = available.next() else { break };
            let segments = own.spare.pop().unwrap_or_default();
            self.take(mem, chain.head_index(), &mut own.batch, segments)?;
        }
        own.spare.truncate(BATCH);
        Ok(())
    }

    /// Takes the request at `head`.
    fn take(
        &mut self,
        mem: &Mem,
        head: u16,
        batch: &mut Vec<Request>,
        segments: Vec<crate::memory::Segment>,
    ) -> Result<(), InvalidChain> {
        match self.busy.get_mut(usize::from(head)) {
            None => return Err("a head beyond the queue"),
            Some(true) => return Err("a head that is in flight already"),
            Some(busy) => *busy = true,
        }
        if let Some(tracker) = &self.tracker {
            tracker.begin(head, self.counter);
        }
        self.counter += 1;
        let table =
            Table { address: GuestAddress(self.queue.desc_table()), size: self.queue.size() };
        batch.push(Request::parse(mem, table, head, segments)?);
        self.outstanding += 1;
        Ok(())
    }

    fn put_back(&mut self, head: u16, len: u32) -> Result<(), InvalidChain> {
        self.outstanding -= 1;
        self.busy[usize::from(head)] = false;
        if self.broken {
            return Ok(());
        }
        if let Some(tracker) = &self.tracker {
            tracker.ending(head);
        }
        let mem = self.mem.clone();
        self.queue.add_used(&*mem, head, len).map_err(|_| "its rings left the memory")?;
        if let Some(tracker) = &self.tracker {
            tracker.ended(head, self.queue.next_used());
        }
        Ok(())
    }

    /// Withdraws a request that waited for space or for the export.
    fn give_up(&mut self, head: u16, mem: &Mem, status: GuestAddress) {
        if self.tracker.is_some() {
            self.outstanding -= 1;
            return;
        }
        // No one will repeat it, so report an error to the guest. If the status address is no
        // longer mapped, the guest cannot use it either.
        let _ = mem.write_obj(Status::IoError as u8, status);
        let _ = self.put_back(head, 1);
    }
}
