//! One served disk.

use std::ops::Deref;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use vdkit_block::{
    Error, ErrorKind, GuestOffset, IoAction, MapCacheStats, OwnerProcess, Result, SnapshotInfo,
    Snapshots,
};
use vdkit_chain::{Disk, Ready};

use crate::change::{Change, Done};
use crate::changes::ChangeMap;
use crate::client::{Client, STAYS};
use crate::control::Answer;
use crate::counters::{Counters, Stats};
use crate::images::ImageChain;
use crate::job::Jobs;
use crate::parking::{Claim, ParkedInfo, Parking};
use crate::pause::Pause;

/// Handling of a change that finds no space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnNoSpace {
    /// Keep it and retry; the client waits.
    #[default]
    Pause,
    /// Return the error to the client.
    Report,
}

/// Options of an export.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ExportOptions {
    /// The name that clients request.
    pub name: String,
    /// A description for humans.
    pub description: String,
    /// Refuse changes, even if the disk is writable.
    pub read_only: bool,
    /// Handling of a full disk.
    pub on_nospace: OnNoSpace,
    /// Dirty bitmaps that clients may read, besides those added later.
    pub bitmaps: Vec<String>,
}

/// Durability of a write on the non-blocking path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// As durable as requested.
    Settled,
    /// Durable after the next [`Export::flush`]: do not answer the client before.
    NeedsFlush,
}

/// An export's disk and its change tracking.
#[derive(Debug)]
pub struct Served {
    /// The disk.
    pub disk: Disk,
    /// Records changes while a job copies the disk.
    pub changes: Option<Arc<ChangeMap>>,
    /// [`Export::close`] was called.
    closed: bool,
}

/// A served disk; see the [crate's documentation](crate).
#[derive(Debug)]
pub struct Export {
    options: ExportOptions,
    /// Each request locks it once for reading: a nested read lock could deadlock behind a waiting
    /// writer. Exclusive operations lock it for writing.
    disk: RwLock<Served>,
    pause: Pause,
    pub(crate) parking: Parking,
    pub(crate) jobs: Jobs,
    /// Names of bitmaps that clients may read, if the image has them.
    pub(crate) offered: Mutex<Vec<String>>,
    counters: Counters,
    seen: Mutex<DiskView>,
    owner: OwnerProcess,
}

/// A cached view of the served disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskView {
    pub(crate) guest_bytes: u64,
    pub(crate) map_cache: Option<MapCacheStats>,
}

impl DiskView {
    fn of(disk: &Disk) -> Self {
        Self { guest_bytes: disk.guest_bytes(), map_cache: disk.map_cache() }
    }
}

/// The export's disk, locked for one request.
#[derive(Debug)]
pub struct Held<'a>(RwLockReadGuard<'a, Served>);

impl Deref for Held<'_> {
    type Target = Disk;
    fn deref(&self) -> &Disk {
        &self.0.disk
    }
}

impl Held<'_> {
    /// The disk, unless it is closed: for whatever may change it.
    fn unless_closed(self) -> Result<Self> {
        if self.0.closed { Err(Error::Interrupted) } else { Ok(self) }
    }

    /// Marks a range after a change or a failed attempt. Never call it before: see [`ChangeMap`].
    pub(crate) fn changed(&self, at: u64, len: u64) {
        if let Some(changes) = &self.0.changes {
            changes.mark(at, len);
        }
    }
}

impl Export {
    /// Serves a disk.
    pub fn new(disk: Disk, options: ExportOptions) -> Arc<Self> {
        Arc::new(Self {
            offered: Mutex::new(options.bitmaps.clone()),
            options,
            seen: Mutex::new(DiskView::of(&disk)),
            disk: RwLock::new(Served { disk, changes: None, closed: false }),
            pause: Pause::default(),
            parking: Parking::default(),
            jobs: Jobs::default(),
            counters: Counters::default(),
            owner: OwnerProcess::current(),
        })
    }

    /// Its options.
    pub fn options(&self) -> &ExportOptions {
        &self.options
    }

    /// The name that clients request.
    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// The image's name.
    pub fn filename(&self) -> String {
        self.disk().name().to_owned()
    }

    /// The image and its backing chain.
    pub fn chain(&self) -> ImageChain {
        let disk = self.disk();
        let names = disk.layers().iter().map(|layer| layer.path().display().to_string());
        ImageChain { filename: disk.name().to_owned(), chain: names.collect() }
    }

    /// Bytes of the disk, which may grow while it is served.
    pub fn size(&self) -> u64 {
        self.disk().guest_bytes()
    }

    /// The image's unit of allocation in bytes.
    pub fn fill_bytes(&self) -> u64 {
        self.disk().top().caps().fill_bytes
    }

    /// Whether changes are refused.
    pub fn read_only(&self) -> bool {
        self.options.read_only || !self.disk().writable()
    }

    /// The counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The counters, and the statistics of the map cache.
    pub fn stats(&self) -> Stats {
        Stats { map_cache: self.look().map_cache, ..self.counters.stats() }
    }

    /// A view of the disk without waiting: while the disk is locked exclusively, the last view.
    pub(crate) fn look(&self) -> DiskView {
        let mut seen = self.seen.lock();
        if let Some(disk) = self.disk.try_read() {
            *seen = DiskView::of(&disk.disk);
        }
        *seen
    }

    /// Locks the disk for a request that changes nothing. Waits while the export is paused or the
    /// disk is locked exclusively.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if the client has left.
    pub(crate) fn hold_to_read(&self, client: &Client) -> Result<Held<'_>> {
        let held = self.disk();
        // With the disk locked: see `pause`.
        if !self.paused() {
            return Ok(held);
        }
        drop(held);
        self.pause.lock_outside(|| client.has_left(), || self.disk()).ok_or(Error::Interrupted)
    }

    /// As [`Export::hold_to_read`], for a request that may change the disk.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if the client has left or the export is closed.
    pub(crate) fn hold_for(&self, client: &Client) -> Result<Held<'_>> {
        if let Some(held) = self.hold_ready() {
            return Ok(held);
        }
        let held = self.pause.lock_outside(|| client.has_left(), || self.disk());
        // Asked again: an exclusive operation may have held the disk for long.
        match held.filter(|_| !client.has_left()) {
            Some(held) => held.unless_closed(),
            None => Err(Error::Interrupted),
        }
    }

    /// Locks the disk outside a client request: waits only for exclusive operations, not for a
    /// pause.
    pub fn disk(&self) -> Held<'_> {
        Held(self.disk.read())
    }

    /// Locks the disk if that needs no waiting and it is open.
    fn hold_ready(&self) -> Option<Held<'_>> {
        let held = Held(self.disk.try_read()?).unless_closed().ok()?;
        // With the disk locked: see `pause`.
        if self.paused() { None } else { Some(held) }
    }

    /// Blocks new requests, also on the non-blocking path, and waits for running ones: on return
    /// none runs. (A request over a large range runs in steps, and waits between two of them.) Do
    /// not call it while holding the disk.
    pub fn pause(&self) {
        if self.pause.begin() {
            // Requests that have locked the disk end first; later ones see the pause once they have
            // locked it.
            drop(self.disk.write());
        }
    }

    /// Unblocks requests, and retries changes that wait for space.
    pub fn resume(&self) {
        self.pause.end();
        self.parking.retry_now();
    }

    /// Whether [`Export::pause`] blocks requests.
    pub fn paused(&self) -> bool {
        self.pause.is_on()
    }

    /// Non-blocking read; see [`Disk::read_ready`].
    pub fn read_ready(&self, buf: &mut [u8], at: u64) -> Option<Result<Ready>> {
        self.hold_ready()?.read_ready(buf, GuestOffset(at))
    }

    /// Non-blocking write; `None` if it may have to wait. Also `None` if it found no space, which
    /// the blocking path handles, and in cache modes with durable writes, as a sync waits; see
    /// [`Export::write_unsettled_ready`].
    pub fn write_ready(&self, data: &[u8], at: u64) -> Option<Result<()>> {
        let disk = self.hold_ready()?;
        if disk.cache().write_durable() {
            return None;
        }
        self.write_unsettled_on(&disk, data, at)
    }

    /// As [`Export::write_ready`], in every cache mode and for `durable` writes. The caller commits
    /// several writes with one flush; the result says whether this one needs it.
    pub fn write_unsettled_ready(
        &self,
        data: &[u8],
        at: u64,
        durable: bool,
    ) -> Option<Result<Written>> {
        let disk = self.hold_ready()?;
        let written = if durable || disk.cache().write_durable() {
            Written::NeedsFlush
        } else {
            Written::Settled
        };
        self.write_unsettled_on(&disk, data, at).map(|done| done.map(|()| written))
    }

    fn write_unsettled_on(&self, disk: &Held<'_>, data: &[u8], at: u64) -> Option<Result<()>> {
        if self.options.read_only || !disk.write_ready(GuestOffset(at), data.len() as u64) {
            return None;
        }
        let done = disk.write_unsettled(data, GuestOffset(at));
        disk.changed(at, data.len() as u64);
        match done {
            Err(error) if self.keeps(&error) => None,
            done => Some(done),
        }
    }

    /// As [`Requests::read`](crate::Requests::read), for this process.
    ///
    /// # Errors
    /// As [`Disk::read_at`].
    pub fn read(&self, buf: &mut [u8], at: u64) -> Result<()> {
        self.requests(&STAYS).read(buf, at)
    }

    /// Makes everything durable whose request had ended before, from any server.
    ///
    /// # Errors
    /// As [`Disk::flush`]; [`Error::Interrupted`] if the export is closed.
    pub fn flush(&self) -> Result<()> {
        self.requests(&STAYS).flush()
    }

    /// As [`Export::flush`], also while the export is paused.
    pub(crate) fn flush_despite_pause(&self) -> Result<()> {
        self.disk().unless_closed()?.flush()
    }

    /// Flushes a change if it must be durable.
    pub(crate) fn flush_if_write_durable(&self, disk: &Disk, durable: bool) -> Result<()> {
        if durable && !disk.cache().write_durable() { disk.flush() } else { Ok(()) }
    }

    /// Refuses changes if the export is read-only.
    ///
    /// # Errors
    /// [`Error::ReadOnly`].
    pub fn check_writable(&self) -> Result<()> {
        if self.options.read_only {
            return Err(Error::ReadOnly { file: self.title().to_owned() });
        }
        Ok(())
    }

    /// The export's name for messages, without a lock.
    fn title(&self) -> &str {
        if self.options.name.is_empty() { "the served disk" } else { &self.options.name }
    }

    /// Whether to keep a failed change or flush instead of reporting the error. A sync that failed
    /// for lack of space has lost bytes for good: it is reported.
    pub fn keeps(&self, error: &Error) -> bool {
        self.options.on_nospace == OnNoSpace::Pause && Self::is_for_want_of_space(error)
    }

    /// Whether an operation failed for lack of space without losing data.
    pub(crate) fn is_for_want_of_space(error: &Error) -> bool {
        let lost = matches!(
            error,
            Error::File { action: IoAction::Sync, .. } | Error::Io { action: IoAction::Sync, .. }
        );
        error.kind() == ErrorKind::NoSpace && !lost
    }

    /// Whether a failed growth is temporary: a running job blocks it, and the change is retried
    /// when the job has ended.
    pub(crate) fn is_for_a_moment(change: &Change, error: &Error) -> bool {
        matches!(change, Change::Append(_) | Change::Grow) && matches!(error, Error::Busy { .. })
    }

    /// Runs a change for a client.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if the client has left; [`Error::Busy`] if the disk cannot grow under
    /// a job; as the requests of these names.
    pub fn apply(&self, client: &Client, change: &Change, at: u64, durable: bool) -> Result<()> {
        if client.has_left() {
            return Err(Error::Interrupted);
        }
        let requests = self.requests(client);
        match change {
            Change::Write(data) => requests.write(data, at, durable),
            Change::Append(data) => {
                self.grow_to(client, at.saturating_add(data.len() as u64))?;
                requests.write(data, at, durable)
            }
            Change::Grow => self.grow_to(client, at),
            Change::Zero { len, may_unmap } => requests.zero(at, *len, *may_unmap, durable),
            Change::Flush { .. } => requests.flush(),
        }
    }

    /// Keeps a change that found no space and retries it. `done` is called with the result, from
    /// another thread. Blocks while too much is kept already.
    pub fn keep(
        self: &Arc<Self>,
        change: Change,
        at: u64,
        durable: bool,
        error: Error,
        done: Done,
    ) {
        self.keep_claimed(change, at, durable, error, Arc::default(), done);
    }

    /// As [`Export::keep`], for a client that may leave (then `done` is dropped) or withdraw the
    /// change: see [`Claim::withdraw`].
    pub fn keep_claimed(
        self: &Arc<Self>,
        change: Change,
        at: u64,
        durable: bool,
        error: Error,
        claim: Arc<Claim>,
        done: Done,
    ) {
        Parking::keep(self, change, at, durable, error, claim, done);
    }

    /// Drops the kept changes of a client that has left. On return none of them will run any more.
    pub fn forget(&self, client: &Client) {
        self.parking.forget(client);
    }

    /// The changes kept for lack of space.
    pub fn parked(&self) -> ParkedInfo {
        self.parking.info()
    }

    /// Grows the disk; clients are notified if their protocol supports that. A disk in use is never
    /// shrunk, since the guest uses it. A running commit continues and grows the backing image too.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a smaller size; [`Error::Busy`] while a job runs that does not
    /// support growth; as [`Disk::resize`].
    pub fn grow(&self, guest_bytes: u64) -> Result<()> {
        self.exchange(|served| self.grow_alone(served, guest_bytes))
    }

    /// See [`Export::grow`].
    fn grow_alone(&self, served: &Served, guest_bytes: u64) -> Result<()> {
        self.check_writable()?;
        let disk = &served.disk;
        self.refuse_growth_during_job(disk.name())?;
        let now = disk.guest_bytes();
        if guest_bytes < now {
            return Err(Error::invalid_for(
                &disk.name(),
                format!(
                    "a served disk is not shrunk, from {now} to {guest_bytes} bytes: end the \
                     service, and shrink it then"
                ),
            ));
        }
        let resized = disk.resize(guest_bytes);
        // Also after an error: the disk may have grown, and clients then write to the new part.
        if let Some(changes) = &served.changes {
            changes.grow(disk.guest_bytes());
        }
        resized?;
        disk.flush()
    }

    /// Grows the disk at least to `bytes`, for a client's request.
    fn grow_to(&self, client: &Client, bytes: u64) -> Result<()> {
        loop {
            // This waits while the export is paused.
            if bytes <= self.hold_for(client)?.guest_bytes() {
                return Ok(());
            }
            let tried = self.exchange(|served| {
                if client.has_left() {
                    return Err(Error::Interrupted);
                }
                if self.paused() {
                    return Ok(false);
                }
                // Another request may have grown the disk since.
                if served.disk.guest_bytes() < bytes {
                    self.grow_alone(served, bytes)?;
                }
                Ok(true)
            })?;
            if tried {
                return Ok(());
            }
        }
    }

    /// Runs `act` on the internal snapshots, while no request runs.
    pub(crate) fn with_snapshots(
        &self,
        act: impl FnOnce(&dyn Snapshots) -> Result<SnapshotInfo>,
    ) -> Result<Answer> {
        self.check_writable()?;
        self.alone(|disk| {
            self.refuse_during_job(disk.name())?;
            disk.refuse_in_child("change the snapshots of")?;
            act(disk.top().require_snapshots("take an overlay instead")?).map(Answer::Snapshot)
        })
    }

    /// Runs `act` on the disk while no request runs: waits for running requests and blocks new
    /// ones.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if the export is closed; errors of `act`.
    pub fn alone<T>(&self, act: impl FnOnce(&Disk) -> Result<T>) -> Result<T> {
        self.exchange(|served| act(&served.disk))
    }

    /// As [`Export::alone`], to replace the disk by one with the same data, or to start or stop
    /// tracking changes.
    ///
    /// # Errors
    /// As there.
    pub fn exchange<T>(&self, act: impl FnOnce(&mut Served) -> Result<T>) -> Result<T> {
        let mut served = self.disk.write();
        if served.closed { Err(Error::Interrupted) } else { act(&mut served) }
    }

    /// Whether this is a child of `fork` that inherited the export. It can end neither the export nor its
    /// servers: their threads are the parent's.
    pub fn is_inherited(&self) -> bool {
        !self.owner.is_current()
    }

    /// Ends all waiting, for space or for a resume: kept changes fail, and later changes that find
    /// no space fail at once. On return no kept change is being tried. A later pause does nothing.
    /// In a child of `fork`, it does nothing: what waits are the parent's threads.
    pub fn end_waiting(&self) {
        if self.is_inherited() {
            return;
        }
        self.pause.end_for_good();
        self.parking.close();
    }

    /// Ends the service: stops a job, fails kept changes, flushes and closes the disk. Later
    /// changes and flushes fail with [`Error::Interrupted`].
    ///
    /// # Errors
    /// As [`Disk::close`]: in a child of `fork`, [`Error::Invalid`] at once.
    pub fn close(&self) -> Result<()> {
        if self.is_inherited() {
            let what = "the parent of this process serves it, and only the parent can close it";
            return Err(Error::invalid_for(&self.title(), what));
        }
        self.end_jobs();
        self.end_waiting();
        let mut served = self.disk.write();
        served.closed = true;
        served.disk.close()
    }
}
