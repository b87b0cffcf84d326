//! Transmission: requests in, replies out.
//!
//! # Who does the work
//! A connection has one *leader* at a time, the thread that holds the receiving side. It takes
//! requests from its buffer and does those of the fast lane where it stands, gathering replies, so
//! that a queue of small requests costs one receive, one system call each, and one send. Before it
//! does anything that may block, it sends what it has gathered and gives the lead to another
//! thread; the slow request then runs beside what that one does. Threads are made when they are
//! needed, up to [`THREADS_MAX`] a connection; with that many blocked, nothing more is received.
//! No request is ever handed from one thread to another.

use std::io;
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::Scope;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use vdkit_block::Error;
use vdkit_chain::Ready;
use vdkit_export::{Change, Claim, Export, OpKind};

use crate::buffer::{Buffer, Buffers};
use crate::channel::Channel;
use crate::handshake::Agreed;
use crate::receiver::Receiver;
use crate::reply::{Outbox, Replier};
use crate::status;
use crate::wire::{self, Request, command, errno, request_flag};

/// Threads of one connection.
const THREADS_MAX: usize = 16;
/// Payloads up to this size are used where they were received.
const INLINE_PAYLOAD_MAX: usize = 64 << 10;
/// Reads up to this size may be done by the leader; a larger one is worth another thread.
pub const INLINE_READ_MAX: u64 = 128 << 10;
/// A leader's write that took longer than this was one that waited: those that follow go to the
/// slow lane for a while.
const PROMPT: Duration = Duration::from_millis(2);
/// For so many writes.
const WARY_WRITES: u32 = 32;
/// A request of the slow lane whose kind took at most so long the last time is done by the leader
/// all the same: giving the lead away and coming back costs about as much. (A flush of a file in
/// memory, a durable write to a disk with a cache that keeps what it has.)
const BRIEF: Duration = Duration::from_micros(100);
/// The list of kept changes is searched for those that are done when it is so long.
const KEPT_LIST_MAX: usize = 4096;
/// A request with more than so many bytes in memory at once is the only such one of its connection.
pub const ALONE_BYTES: u64 = 1 << 20;

/// A connection in transmission.
pub struct Session {
    channel: Arc<dyn Channel>,
    pub(crate) export: Arc<Export>,
    pub(crate) agreed: Agreed,
    receiver: Mutex<Receiver>,
    pub(crate) replier: Arc<Replier>,
    /// Threads that wait for the lead.
    waiting: AtomicUsize,
    threads: AtomicUsize,
    closed: AtomicBool,
    wary: AtomicU32,
    /// How long the last request of a kind took in the slow lane, in nanoseconds.
    took: [AtomicU64; command::KINDS],
    /// Changes that wait for space.
    kept: Mutex<Vec<Weak<Claim>>>,
    buffers: Buffers,
    /// Held for a request that has more than [`ALONE_BYTES`] in memory at once: one at a time, so that a
    /// connection's memory is bounded.
    pub(crate) large: Mutex<()>,
}

/// How a leader's turn ended.
enum Turn<'s> {
    /// This request may block; its payload is in the buffer. The guard is that of
    /// [`Session::large`], where it counts as such.
    Slow(Request, Instant, Buffer, Option<MutexGuard<'s, ()>>),
    /// The connection is over.
    End,
}

impl Session {
    /// Takes over a connection after its handshake.
    pub fn new(channel: Arc<dyn Channel>, agreed: Agreed) -> Self {
        let replier = Arc::new(Replier::new(channel.clone(), agreed.structured, agreed.extended));
        Self {
            channel,
            export: agreed.export.clone(),
            agreed,
            receiver: Mutex::new(Receiver::new()),
            replier,
            waiting: AtomicUsize::new(0),
            threads: AtomicUsize::new(1),
            closed: AtomicBool::new(false),
            wary: AtomicU32::new(0),
            took: std::array::from_fn(|_| AtomicU64::new(u64::MAX)),
            kept: Mutex::default(),
            buffers: Buffers::default(),
            large: Mutex::new(()),
        }
    }

    /// Serves until the client leaves. Every request that was begun has ended when this returns;
    /// those that wait for space are given up.
    pub fn run(self) {
        std::thread::scope(|scope| self.work(scope));
        self.replier.close();
        // A client that comes again sends again what it was not answered, and goes on from there:
        // what it sent before must not be done later.
        for claim in self.kept.lock().drain(..).filter_map(|claim| claim.upgrade()) {
            claim.withdraw();
        }
        self.channel.shutdown(Shutdown::Both);
    }

    fn work<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        let mut out = Outbox::default();
        loop {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            let mut receiver = self.receiver.lock();
            self.waiting.fetch_sub(1, Ordering::SeqCst);
            if self.closed.load(Ordering::SeqCst) {
                return;
            }
            match self.lead(&mut receiver, &mut out) {
                Ok(Turn::Slow(request, began, mut buffer, large)) => {
                    drop(receiver);
                    self.need_follower(scope);
                    self.slow(&request, began, &mut buffer, &mut out);
                    self.buffers.give_back(buffer);
                    drop(large);
                }
                Ok(Turn::End) | Err(_) => {
                    self.closed.store(true, Ordering::SeqCst);
                    return;
                }
            }
        }
    }

    /// Makes sure that somebody leads while this thread is away.
    fn need_follower<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            return;
        }
        if self.threads.fetch_add(1, Ordering::SeqCst) >= THREADS_MAX {
            self.threads.fetch_sub(1, Ordering::SeqCst);
            return;
        }
        let builder = std::thread::Builder::new().name("nbd".to_owned());
        if builder.spawn_scoped(scope, || self.work(scope)).is_err() {
            // Then this thread leads again when it comes back.
            self.threads.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Does requests until one may block or the connection ends.
    fn lead(&self, receiver: &mut Receiver, out: &mut Outbox) -> io::Result<Turn<'_>> {
        let extended = self.agreed.extended;
        let head = if extended { wire::EXTENDED_REQUEST_BYTES } else { wire::REQUEST_BYTES };
        let mut now = Instant::now();
        loop {
            if receiver.available() < head {
                self.replier.send_all(out)?;
                if !receiver.fill(&*self.channel, head)? {
                    return Ok(Turn::End);
                }
                now = Instant::now();
            }
            let Some(request) = Request::parse(receiver.bytes(), extended) else {
                tracing::debug!("a request without its magic number: the connection ends");
                return Ok(Turn::End);
            };
            let payload = request.payload(extended);
            if payload > u64::from(wire::PAYLOAD_MAX) || request.command == command::DISC {
                self.replier.send_all(out)?;
                return Ok(Turn::End);
            }
            let payload = payload as usize;
            receiver.expect_large(payload > INLINE_PAYLOAD_MAX);
            let (buffer, large) = if payload <= INLINE_PAYLOAD_MAX {
                let whole = head + payload;
                if receiver.available() < whole {
                    self.replier.send_all(out)?;
                    if !receiver.fill(&*self.channel, whole)? {
                        return Ok(Turn::End);
                    }
                }
                let began = now;
                let bytes = &receiver.bytes()[head..whole];
                if self.fast(&request, bytes, out)? {
                    now = Instant::now();
                    self.count(&request, now - began, true);
                    self.export.counters().lane(true);
                    receiver.consume(whole);
                    continue;
                }
                if self.is_brief(&request) && self.fault(&request).is_none() {
                    self.perform(&request, began, bytes)?;
                    self.export.counters().lane(false);
                    receiver.consume(whole);
                    now = Instant::now();
                    continue;
                }
                let mut buffer = self.buffers.take();
                buffer.room(payload).copy_from_slice(bytes);
                receiver.consume(whole);
                (buffer, None)
            } else {
                receiver.consume(head);
                self.replier.send_all(out)?;
                let large = (payload as u64 > ALONE_BYTES).then(|| self.large.lock());
                let mut buffer = self.buffers.take();
                receiver.take_payload(&*self.channel, &mut buffer, payload)?;
                (buffer, large)
            };
            self.replier.send_all(out)?;
            self.export.counters().lane(false);
            return Ok(Turn::Slow(request, now, buffer, large));
        }
    }

    pub(crate) fn count(&self, request: &Request, took: Duration, ok: bool) {
        let kind = match request.command {
            command::READ => OpKind::Read,
            command::WRITE => OpKind::Write,
            command::WRITE_ZEROES => OpKind::Zero,
            command::TRIM => OpKind::Discard,
            command::FLUSH => OpKind::Flush,
            _ => return,
        };
        self.export.counters().done(kind, request.len, took, ok);
    }

    /// The fast lane: done and answered, or `false` with nothing changed.
    fn fast(&self, request: &Request, payload: &[u8], out: &mut Outbox) -> io::Result<bool> {
        match request.command {
            command::READ if request.len > 0 && request.len <= INLINE_READ_MAX => {
                if self.fault(request).is_some() {
                    return Ok(false);
                }
                let len = request.len as usize;
                self.replier.make_room(out, len)?;
                let data = out.data_room(self.replier.head(), len);
                match self.export.read_ready(data, request.offset) {
                    Some(Ok(Ready::Bytes)) => self.replier.put_data(out, request, len),
                    Some(Ok(Ready::Zero)) => self.replier.put_zero(out, request),
                    // The slow lane tells what is wrong.
                    Some(Err(_)) | None => return Ok(false),
                }
                Ok(true)
            }
            command::WRITE if !payload.is_empty() && !request.has(request_flag::FUA) => {
                if self.fault(request).is_some() || self.is_wary() {
                    return Ok(false);
                }
                let began = Instant::now();
                let Some(Ok(())) = self.export.write_ready(payload, request.offset) else {
                    return Ok(false);
                };
                if began.elapsed() > PROMPT {
                    self.wary.store(WARY_WRITES, Ordering::Relaxed);
                }
                self.replier.make_room(out, 0)?;
                self.replier.put_ok(out, request);
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Whether writes waited lately.
    fn is_wary(&self) -> bool {
        let wary = self.wary.load(Ordering::Relaxed);
        if wary > 0 {
            self.wary.store(wary - 1, Ordering::Relaxed);
        }
        wary > 0
    }

    /// Whether a request of the slow lane is likely to be short.
    fn is_brief(&self, request: &Request) -> bool {
        let changes = [command::WRITE, command::FLUSH, command::TRIM, command::WRITE_ZEROES];
        changes.contains(&request.command)
            && self.took[usize::from(request.command)].load(Ordering::Relaxed)
                <= BRIEF.as_nanos() as u64
    }

    /// What is wrong with a request before it is tried.
    fn fault(&self, request: &Request) -> Option<(u32, &'static str)> {
        let allowed = request_flag::FUA
            | match request.command {
                command::READ if self.agreed.structured => request_flag::DF,
                command::WRITE if self.agreed.extended => request_flag::PAYLOAD_LEN,
                command::WRITE_ZEROES => request_flag::NO_HOLE | request_flag::FAST_ZERO,
                command::BLOCK_STATUS if self.agreed.extended => {
                    request_flag::REQ_ONE | request_flag::PAYLOAD_LEN
                }
                command::BLOCK_STATUS => request_flag::REQ_ONE,
                _ => 0,
            };
        if request.flags & !allowed != 0 {
            return Some((errno::INVAL, "a flag that this request does not have"));
        }
        let changes =
            matches!(request.command, command::WRITE | command::TRIM | command::WRITE_ZEROES);
        if changes && self.export.read_only() {
            return Some((errno::PERM, "the export is read-only"));
        }
        let ranged = changes || matches!(request.command, command::READ | command::CACHE);
        let inside =
            request.offset.checked_add(request.len).is_some_and(|end| end <= self.export.size());
        if ranged && !inside {
            let errno = match request.command {
                command::WRITE | command::WRITE_ZEROES => errno::NOSPC,
                _ => errno::INVAL,
            };
            return Some((errno, "past the end of the disk"));
        }
        None
    }

    /// The slow lane: may block.
    fn slow(&self, request: &Request, began: Instant, buffer: &mut Buffer, out: &mut Outbox) {
        let done = match self.fault(request) {
            Some((errno, text)) => self.replier.error(request, errno, text),
            None if request.command == command::READ => self.read(request, began, buffer, out),
            None => self.perform(request, began, buffer.bytes()),
        };
        if done.is_err() {
            // The client is gone: the leader shall hear of it.
            self.closed.store(true, Ordering::SeqCst);
            self.channel.shutdown(Shutdown::Both);
        }
    }

    /// Does a request that may block, and answers it.
    fn perform(&self, request: &Request, began: Instant, payload: &[u8]) -> io::Result<()> {
        let start = Instant::now();
        let (at, len) = (request.offset, request.len);
        let fua = request.has(request_flag::FUA);
        let export = &self.export;
        let done = match request.command {
            command::BLOCK_STATUS => {
                return status::answer(&self.replier, &self.agreed, request, payload);
            }
            command::WRITE => export.write(payload, at, fua),
            command::WRITE_ZEROES => {
                let may_unmap = !request.has(request_flag::NO_HOLE);
                if request.has(request_flag::FAST_ZERO) && !self.zeroes_fast(at, len) {
                    return self.replier.error(request, errno::NOTSUP, "no faster than a write");
                }
                export.zero(at, len, may_unmap, fua)
            }
            command::TRIM => export.discard(at, len, fua),
            command::FLUSH => export.flush(),
            command::CACHE => export.prefetch(at, len),
            _ => return self.replier.error(request, errno::INVAL, "unknown request"),
        };
        match done {
            Err(error) if export.keeps(&error) && self.keepable(request) => {
                self.keep(request, error, payload, began);
                Ok(())
            }
            done => {
                if let Some(took) = self.took.get(usize::from(request.command)) {
                    took.store(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
                }
                self.count(request, began.elapsed(), done.is_ok());
                match done {
                    Ok(()) => self.replier.ok(request),
                    Err(error) => self.fail(request, &error),
                }
            }
        }
    }

    fn keepable(&self, request: &Request) -> bool {
        matches!(request.command, command::WRITE | command::WRITE_ZEROES)
    }

    /// Keeps a change that found no space; see `vdkit_export`.
    fn keep(&self, request: &Request, error: Error, payload: &[u8], began: Instant) {
        let change = match request.command {
            command::WRITE => Change::Write(payload.to_vec()),
            _ => Change::Zero { len: request.len, may_unmap: !request.has(request_flag::NO_HOLE) },
        };
        let (replier, request, export) = (self.replier.clone(), *request, self.export.clone());
        let fua = request.has(request_flag::FUA);
        let kind = match request.command {
            command::WRITE => OpKind::Write,
            _ => OpKind::Zero,
        };
        let counted = export.clone();
        let done = Box::new(move |done: vdkit_block::Result<()>| {
            counted.counters().done(kind, request.len, began.elapsed(), done.is_ok());
            // A client that is gone hears nothing.
            let _ = match done {
                Ok(()) => replier.ok(&request),
                Err(error) => replier.error(&request, errno_of(&error), &error.to_string()),
            };
        });
        let claim = Arc::new(Claim::default());
        {
            let mut kept = self.kept.lock();
            if kept.len() >= KEPT_LIST_MAX {
                kept.retain(|claim| claim.strong_count() > 0);
            }
            kept.push(Arc::downgrade(&claim));
        }
        export.keep_claimed(change, request.offset, fua, error, claim, done);
    }

    pub(crate) fn warn(&self, error: &Error) {
        tracing::warn!(export = self.export.name(), "{error}");
    }

    pub(crate) fn fail(&self, request: &Request, error: &Error) -> io::Result<()> {
        self.warn(error);
        self.replier.error(request, errno_of(error), &error.to_string())
    }

    /// Whether zeroes here cost metadata only.
    fn zeroes_fast(&self, at: u64, len: u64) -> bool {
        let disk = self.export.hold();
        let caps = disk.top().caps();
        let unit = caps.fill_bytes.max(1);
        let end = at + len;
        caps.cheap_zeroes
            && at.is_multiple_of(unit)
            && (end.is_multiple_of(unit) || end == disk.guest_bytes())
    }
}

/// The protocol's number for an error.
pub fn errno_of(error: &Error) -> u32 {
    use vdkit_block::ErrorKind;
    match error.kind() {
        ErrorKind::NoSpace => errno::NOSPC,
        ErrorKind::Interrupted => errno::SHUTDOWN,
        ErrorKind::Usage => errno::INVAL,
        _ if matches!(error, Error::ReadOnly { .. }) => errno::PERM,
        _ => errno::IO,
    }
}
