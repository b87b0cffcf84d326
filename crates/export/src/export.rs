//! One disk that is being served.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex, RwLock, RwLockReadGuard};
use vdkit_block::{
    Error, ErrorKind, GuestOffset, IoAction, MapCacheStats, Result, SnapshotInfo, Snapshots,
};
use vdkit_chain::{Disk, Ready};

use crate::changes::ChangeMap;
use crate::client::{ASK_EVERY, Client};
use crate::control::Answer;
use crate::counters::{Counters, Stats};
use crate::images::ImageChain;
use crate::job::Jobs;
use crate::parking::{Claim, ParkedInfo, Parking};

/// What happens to a change that finds no space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnNoSpace {
    /// It is kept and tried again; the client waits.
    #[default]
    Pause,
    /// The client gets the error.
    Report,
}

/// How an export is made.
#[derive(Clone, Debug, Default)]
pub struct ExportOptions {
    /// The name that clients ask for.
    pub name: String,
    /// A word for humans.
    pub description: String,
    /// No changes, even where the disk could take them.
    pub read_only: bool,
    /// What happens on a full disk.
    pub on_nospace: OnNoSpace,
    /// Dirty bitmaps that clients may read, besides those that are added meanwhile.
    pub bitmaps: Vec<String>,
}

/// A change that owns what it needs.
#[derive(Debug)]
pub enum Change {
    /// Bytes.
    Write(Vec<u8>),
    /// Bytes, and a disk that is large enough for them.
    Append(Vec<u8>),
    /// A disk that is at least so large as the offset says.
    Grow,
    /// So many zeroes.
    Zero {
        /// Bytes.
        len: u64,
        /// Their space may be given back.
        may_unmap: bool,
    },
    /// A flush.
    Flush {
        /// How many requests are answered after it.
        requests: u64,
    },
}

/// How durable a write of the fast lane is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// As durable as was asked for.
    Settled,
    /// Durable after the next [`Export::flush`]: the client must not be answered before.
    NeedsFlush,
}

/// What a request takes that waits for a flush, about.
const WAITING_BYTES: u64 = 64;

impl Change {
    /// Bytes of memory that it holds.
    pub(crate) fn held_bytes(&self) -> u64 {
        match self {
            Self::Write(data) | Self::Append(data) => data.len() as u64,
            Self::Zero { .. } | Self::Grow => 0,
            Self::Flush { requests } => requests * WAITING_BYTES,
        }
    }

    /// Requests that wait for it.
    pub(crate) fn requests(&self) -> u64 {
        match self {
            Self::Write(_) | Self::Append(_) | Self::Zero { .. } | Self::Grow => 1,
            Self::Flush { requests } => *requests,
        }
    }
}

/// Called once when a change that was kept has been done, or will never be. Changes of all clients
/// wait for its return, so it must not wait for a client.
pub type Done = Box<dyn FnOnce(Result<()>) + Send>;

/// The disk of an export, and who watches it.
#[derive(Debug)]
pub struct Served {
    /// The disk.
    pub disk: Disk,
    /// Where changes are marked, while somebody copies the disk.
    pub changes: Option<Arc<ChangeMap>>,
}

/// A disk that is being served; see the [crate's documentation](crate).
#[derive(Debug)]
pub struct Export {
    options: ExportOptions,
    /// Requests hold it for reading, once each: a second hold within the first would wait for a
    /// writer that waits for the first. Whoever must be alone holds it for writing.
    disk: RwLock<Served>,
    paused: AtomicBool,
    pause: (Mutex<()>, Condvar),
    pub(crate) parking: Parking,
    pub(crate) jobs: Jobs,
    /// Names of bitmaps that clients may read, where the image has them.
    pub(crate) offered: Mutex<Vec<String>>,
    counters: Counters,
    seen: Mutex<Seen>,
}

/// What is told of a disk that changes while it is served.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) guest_bytes: u64,
    pub(crate) map_cache: Option<MapCacheStats>,
}

impl Seen {
    fn of(disk: &Disk) -> Self {
        Self { guest_bytes: disk.guest_bytes(), map_cache: disk.map_cache() }
    }
}

/// The export's disk, held for one request.
#[derive(Debug)]
pub struct Held<'a>(RwLockReadGuard<'a, Served>);

impl Deref for Held<'_> {
    type Target = Disk;
    fn deref(&self) -> &Disk {
        &self.0.disk
    }
}

impl Held<'_> {
    /// A range was changed, or that was tried and failed. Never to be called before: see
    /// [`ChangeMap`].
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
            seen: Mutex::new(Seen::of(&disk)),
            disk: RwLock::new(Served { disk, changes: None }),
            paused: AtomicBool::new(false),
            pause: (Mutex::new(()), Condvar::new()),
            parking: Parking::default(),
            jobs: Jobs::default(),
            counters: Counters::default(),
        })
    }

    /// How it was made.
    pub fn options(&self) -> &ExportOptions {
        &self.options
    }

    /// The name that clients ask for.
    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// The image's name.
    pub fn filename(&self) -> String {
        self.disk().name().to_owned()
    }

    /// What the disk is made of.
    pub fn chain(&self) -> ImageChain {
        let disk = self.disk();
        let names = disk.layers().iter().map(|layer| layer.path().display().to_string());
        ImageChain { filename: disk.name().to_owned(), chain: names.collect() }
    }

    /// Bytes of the disk, which may change while it is served.
    pub fn size(&self) -> u64 {
        self.disk().guest_bytes()
    }

    /// The unit in which the image finds space for writes and gives it back, in bytes.
    pub fn fill_bytes(&self) -> u64 {
        self.disk().top().caps().fill_bytes
    }

    /// Whether changes are refused.
    pub fn read_only(&self) -> bool {
        self.options.read_only || !self.disk().writable()
    }

    /// The counts.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The counts, with those of the map's cache.
    pub fn stats(&self) -> Stats {
        Stats { map_cache: self.look().map_cache, ..self.counters.stats() }
    }

    /// What can be seen of the disk without waiting: while somebody is alone with it, what was
    /// seen last.
    pub(crate) fn look(&self) -> Seen {
        let mut seen = self.seen.lock();
        if let Some(disk) = self.disk.try_read() {
            *seen = Seen::of(&disk.disk);
        }
        *seen
    }

    /// The disk for one request. Waits while the export is paused, or somebody is
    /// alone with the disk.
    pub fn hold(&self) -> Held<'_> {
        if self.paused() {
            let mut guard = self.pause.0.lock();
            while self.paused() {
                self.pause.1.wait(&mut guard);
            }
        }
        self.disk()
    }

    /// As [`Export::hold`], for a request of a client that may leave while it waits.
    ///
    /// # Errors
    /// [`Error::Interrupted`] where it has left.
    pub(crate) fn hold_for(&self, client: &Client) -> Result<Held<'_>> {
        if let Some(held) = self.hold_ready() {
            return Ok(held);
        }
        if self.paused() {
            let mut guard = self.pause.0.lock();
            while self.paused() && !client.has_left() {
                self.pause.1.wait_for(&mut guard, ASK_EVERY);
            }
        }
        if client.has_left() {
            return Err(Error::Interrupted);
        }
        let held = self.disk();
        // Asked again, as somebody may have been alone with the disk for long.
        if client.has_left() { Err(Error::Interrupted) } else { Ok(held) }
    }

    /// The disk for one who is no client: waits for nobody but those who are alone with it.
    pub fn disk(&self) -> Held<'_> {
        Held(self.disk.read())
    }

    /// The disk where nobody has to be waited for.
    fn hold_ready(&self) -> Option<Held<'_>> {
        if self.paused.load(Ordering::Acquire) { None } else { self.disk.try_read().map(Held) }
    }

    /// Keeps requests waiting from now on, those of the fast lane too; what is under way ends.
    pub fn pause(&self) {
        let _guard = self.pause.0.lock();
        self.paused.store(true, Ordering::Release);
    }

    /// Lets requests go on, and tries again what is kept for want of space.
    pub fn resume(&self) {
        {
            let _guard = self.pause.0.lock();
            self.paused.store(false, Ordering::Release);
            self.pause.1.notify_all();
        }
        self.parking.retry_now();
    }

    /// Whether requests are kept waiting by [`Export::pause`].
    pub fn paused(&self) -> bool {
        self.paused.load(Ordering::Acquire)
    }

    /// The fast lane for a read; see [`Disk::read_ready`].
    pub fn read_ready(&self, buf: &mut [u8], at: u64) -> Option<Result<Ready>> {
        self.hold_ready()?.read_ready(buf, GuestOffset(at))
    }

    /// The fast lane for a write: done at once, or nothing where it may have to wait. What found
    /// no space is declined too: the slow lane keeps it. Declined in the cache modes where each
    /// write is durable when it returns, as a sync waits; see [`Export::write_unsettled_ready`].
    pub fn write_ready(&self, data: &[u8], at: u64) -> Option<Result<()>> {
        let disk = self.hold_ready()?;
        if disk.cache().write_durable() {
            return None;
        }
        self.write_unsettled_on(&disk, data, at)
    }

    /// As [`Export::write_ready`], in every cache mode and for writes that must be `durable`, for a
    /// caller that commits several of them with one flush. The answer says whether this one needs it.
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

    /// Reads.
    ///
    /// # Errors
    /// As [`Disk::read_at`].
    pub fn read(&self, buf: &mut [u8], at: u64) -> Result<()> {
        self.hold().read_at(buf, GuestOffset(at))
    }

    /// Makes everything durable whose request had ended before, by whatever front it came.
    ///
    /// # Errors
    /// As [`Disk::flush`].
    pub fn flush(&self) -> Result<()> {
        self.hold().flush()
    }

    /// Makes a change durable where that was asked for.
    pub(crate) fn settle(&self, disk: &Disk, durable: bool) -> Result<()> {
        if durable && !disk.cache().write_durable() { disk.flush() } else { Ok(()) }
    }

    /// Refuses changes where the export was made read-only.
    ///
    /// # Errors
    /// [`Error::ReadOnly`].
    pub fn check_writable(&self) -> Result<()> {
        if self.options.read_only {
            return Err(Error::ReadOnly { file: self.options.name.clone() });
        }
        Ok(())
    }

    /// Whether a change or a flush that failed so is kept instead of reported. A sync that found no
    /// space has lost bytes, which no later attempt brings back: that is reported.
    pub fn keeps(&self, error: &Error) -> bool {
        self.options.on_nospace == OnNoSpace::Pause && Self::is_for_want_of_space(error)
    }

    /// Whether something failed for want of space, with nothing lost.
    pub(crate) fn is_for_want_of_space(error: &Error) -> bool {
        let lost = matches!(
            error,
            Error::File { action: IoAction::Sync, .. } | Error::Io { action: IoAction::Sync, .. }
        );
        error.kind() == ErrorKind::NoSpace && !lost
    }

    /// Whether a change that failed so is made in a moment: a job that is about to end would not notice
    /// that the disk grows.
    pub(crate) fn is_for_a_moment(change: &Change, error: &Error) -> bool {
        matches!(change, Change::Append(_) | Change::Grow) && matches!(error, Error::Busy { .. })
    }

    /// Does a change for a client.
    ///
    /// # Errors
    /// [`Error::Interrupted`] where the client has left; [`Error::Busy`] where the disk cannot grow under
    /// a job; as the requests of these names.
    pub fn apply(&self, client: &Client, change: &Change, at: u64, durable: bool) -> Result<()> {
        if client.has_left() {
            return Err(Error::Interrupted);
        }
        let requests = self.requests(client);
        match change {
            Change::Write(data) => requests.write(data, at, durable),
            Change::Append(data) => {
                self.grow_to(at.saturating_add(data.len() as u64))?;
                requests.write(data, at, durable)
            }
            Change::Grow => self.grow_to(at),
            Change::Zero { len, may_unmap } => requests.zero(at, *len, *may_unmap, durable),
            Change::Flush { .. } => self.hold_for(client)?.flush(),
        }
    }

    /// Keeps a change that found no space, and does it when there is some. `done` is called with
    /// what became of it, from another thread. Waits where too much is kept already.
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

    /// As [`Export::keep`], for a client that may leave (then `done` is dropped) or lose interest: see
    /// [`Claim::withdraw`].
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

    /// Gives up what is kept for a client that has left. None of it is done any more when this
    /// returns.
    pub fn forget(&self, client: &Client) {
        self.parking.forget(client);
    }

    /// What is kept for want of space.
    pub fn parked(&self) -> ParkedInfo {
        self.parking.info()
    }

    /// Makes the disk larger. Clients learn of it in their protocol's way, if it has one. A disk
    /// in use is not made smaller: the guest has something there. A commit that runs goes on, and has
    /// the image beneath grow too.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a smaller size; [`Error::Busy`] while a job runs that does not follow
    /// changes; as [`Disk::resize`].
    pub fn grow(&self, guest_bytes: u64) -> Result<()> {
        self.check_writable()?;
        self.exchange(|served| {
            let disk = &served.disk;
            self.refuse_growth_during_job(disk.name())?;
            let now = disk.guest_bytes();
            if guest_bytes < now {
                return Err(Error::Invalid(format!(
                    "{}: {guest_bytes} bytes are fewer than its {now}; a disk in use is not made \
                     smaller: end the service, then: vdkit resize --shrink",
                    disk.name()
                )));
            }
            disk.resize(guest_bytes)?;
            if let Some(changes) = &served.changes {
                changes.grow(guest_bytes);
            }
            disk.flush()
        })
    }

    /// Makes the disk at least so large.
    fn grow_to(&self, bytes: u64) -> Result<()> {
        if bytes <= self.size() {
            return Ok(());
        }
        match self.grow(bytes) {
            // Somebody else was faster.
            Err(_) if self.size() >= bytes => Ok(()),
            done => done,
        }
    }

    /// Does something with the snapshots inside the image, while no request runs.
    pub(crate) fn with_snapshots(
        &self,
        act: impl FnOnce(&dyn Snapshots) -> Result<SnapshotInfo>,
    ) -> Result<Answer> {
        self.check_writable()?;
        self.alone(|disk| {
            self.refuse_during_job(disk.name())?;
            let side = disk.top().snapshots().ok_or_else(|| {
                let what = format!("snapshots inside a {} image", disk.top().name());
                let hint = "take an overlay instead: vdkit create --backing";
                Error::unsupported(disk.name(), what, hint)
            })?;
            act(side).map(Answer::Snapshot)
        })
    }

    /// Does something with the disk while no request runs: waits for those under way, and keeps
    /// new ones waiting.
    ///
    /// # Errors
    /// What `act` returns.
    pub fn alone<T>(&self, act: impl FnOnce(&Disk) -> Result<T>) -> Result<T> {
        act(&self.disk.write().disk)
    }

    /// As [`Export::alone`], for one who puts another disk in its place, which must read as this
    /// one does, or begins or ends to watch it.
    ///
    /// # Errors
    /// What `act` returns.
    pub fn exchange<T>(&self, act: impl FnOnce(&mut Served) -> Result<T>) -> Result<T> {
        act(&mut self.disk.write())
    }

    /// Lets go of everything that waits, for space or to be resumed: what is kept fails, and what
    /// finds no space from now on fails at once.
    pub fn end_waiting(&self) {
        self.resume();
        self.parking.close();
    }

    /// Ends the service: a job is stopped, what is kept fails, and the disk is flushed and closed. The export must
    /// not be used afterwards.
    ///
    /// # Errors
    /// As [`Disk::close`].
    pub fn close(&self) -> Result<()> {
        self.end_jobs();
        self.end_waiting();
        self.disk.write().disk.close()
    }
}
