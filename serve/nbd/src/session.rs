//! Transmission phase: requests in, replies out.
//!
//! # Threads
//! A connection has one *leader* at a time, the thread that holds the receiving side. The leader
//! takes requests from its buffer, runs those on the non-blocking path itself and gathers the
//! replies. So a queue of small requests costs one receive, one system call each, and one send.
//! Before it blocks, it sends the gathered replies and passes the lead to another thread; the slow
//! request then runs beside that thread's. Threads are created as needed, up to [`THREADS_MAX`] per
//! connection; if all are blocked, nothing more is received. See [`crate::lead`].
//!
//! The leader also runs small durable writes. Their replies wait for a flush, and one flush serves
//! many of them: see [`crate::commit`].

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::Scope;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rustix::net::Shutdown;
use vdkit_block::Error;
use vdkit_chain::Ready;
use vdkit_serve::{Client, Export, OpKind, SlowWriteBackoff, Written};

use crate::buffer::{Buffer, Buffers};
use crate::changing::{Changing, MayChange};
use crate::channel::Channel;
use crate::commit::{Batch, COMMITTERS, GATHERED_MAX, Unanswered};
use crate::gathered::Gathered;
use crate::handshake::Agreed;
use crate::kept::LateReplies;
use crate::lead::Lead;
use crate::receiver::Receiver;
use crate::reply::{Outbox, Replier};
use crate::status;
use crate::wire::{self, Request, command, errno, request_flag};

/// Maximum threads per connection.
const THREADS_MAX: usize = 16;
/// Payloads up to this size are used in the receive buffer.
const INLINE_PAYLOAD_MAX: usize = 64 << 10;
/// The leader may run reads up to this size; larger ones are worth another thread.
pub const INLINE_READ_MAX: u64 = 128 << 10;
/// If the last blocking request of the same kind took at most this long, the leader runs the
/// request itself: passing the lead costs about as much. (Examples: a flush of a file in memory, a
/// durable write to a disk with a persistent cache.)
const SHORT_REQUEST: Duration = Duration::from_micros(100);
/// A connection runs at most one request with more than this many bytes in memory.
pub const ALONE_BYTES: u64 = 1 << 20;

/// Result of the non-blocking path.
#[derive(PartialEq)]
enum Fast {
    /// Done and answered.
    Answered,
    /// Done; answered after a flush.
    Gathered,
    /// Not done: the request may block.
    Declined,
    /// Not done: gathered replies must be sent first, and the client does not read.
    Unsent,
}

/// Result of a request whose reply has no data.
enum Performed {
    Done(vdkit_block::Result<()>),
    /// Not tried, with errno and reason.
    Refused(u32, &'static str),
    /// It found no space, and is answered later.
    Kept,
}

/// A connection in the transmission phase.
pub struct Session {
    pub(crate) channel: Arc<dyn Channel>,
    pub(crate) export: Arc<Export>,
    pub(crate) agreed: Agreed,
    lead: Lead<Receiver>,
    pub(crate) replier: Arc<Replier>,
    /// Done requests that are answered after a flush.
    pub(crate) gathered: Gathered<Unanswered>,
    backoff: SlowWriteBackoff,
    /// Nanoseconds that the last blocking request of each kind took.
    pub(crate) took: [AtomicU64; command::KINDS],
    /// The client of all requests.
    pub(crate) client: Arc<Client>,
    /// See [`crate::changing`].
    pub(crate) changing: Arc<Changing>,
    /// A leader may take further requests.
    leads: Mutex<Option<MayChange>>,
    /// Answers requests that waited for space.
    pub(crate) late: Arc<LateReplies>,
    buffers: Buffers,
    /// Locked for a payload of more than [`ALONE_BYTES`], and for a reply of that size: one of each
    /// at a time bounds a connection's memory. The holder of the first must not wait for the
    /// client, since a leader waits for the lock.
    large_payloads: Mutex<()>,
    pub(crate) large_reads: Mutex<()>,
}

/// Ends the connection if its thread panics: the client would wait for ever for the reply.
struct EndOnPanic<'s>(&'s Session);

impl Drop for EndOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.hang_up();
        }
    }
}

/// End of a leader's turn.
pub(crate) enum Turn<'s> {
    /// This request may block; its payload is in the buffer. The guard is for
    /// [`Session::large_payloads`] if the payload is large.
    Slow(Request, Instant, Buffer, Option<MutexGuard<'s, ()>>),
    /// Commit the thread's batch.
    Commit,
    /// Send replies to a client that does not read.
    Send,
    /// The connection is over.
    End,
}

impl Session {
    /// Takes over a connection after its handshake. `leads` is of `changing`.
    pub fn new(
        channel: Arc<dyn Channel>,
        agreed: Agreed,
        changing: Arc<Changing>,
        leads: MayChange,
    ) -> Self {
        let replier = Arc::new(Replier::new(channel.clone(), agreed.structured, agreed.extended));
        let watched = channel.clone();
        Self {
            client: Arc::new(Client::new(move || watched.has_left())),
            changing,
            leads: Mutex::new(Some(leads)),
            late: LateReplies::new(replier.clone(), channel.clone()),
            channel,
            export: agreed.export.clone(),
            agreed,
            lead: Lead::new(Receiver::new(), THREADS_MAX),
            replier,
            gathered: Gathered::new(GATHERED_MAX, COMMITTERS),
            backoff: SlowWriteBackoff::default(),
            took: std::array::from_fn(|_| AtomicU64::new(u64::MAX)),
            buffers: Buffers::default(),
            large_payloads: Mutex::new(()),
            large_reads: Mutex::new(()),
        }
    }

    /// Serves until the client leaves. On return, every started request has ended; those waiting
    /// for space are dropped.
    pub fn run(self) {
        // The panic hook has reported a panic of a request. The rest of the connection must end all
        // the same before another one takes its place.
        let work = || std::thread::scope(|scope| self.work(scope));
        let _ = catch_unwind(AssertUnwindSafe(work));
        // A client that reconnects repeats unanswered requests and continues: its old requests must
        // not run later.
        self.export.forget(&self.client);
        self.late.wait();
        self.replier.close();
        self.channel.shutdown(Shutdown::Both);
    }

    fn work<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        let _ends = EndOnPanic(self);
        let (mut out, mut batch) = (Outbox::default(), Batch::new());
        while let Some(mut receiver) = self.lead.take() {
            match self.lead(&mut receiver, &mut out, &mut batch) {
                Ok(Turn::Slow(request, began, buffer, large)) => {
                    // From before another thread may find that the client has left.
                    let _change = request.is_change().then(|| self.changing.begin());
                    self.pass_lead(receiver, scope, &mut batch, &mut out);
                    self.slow(&request, began, buffer, large, &mut out);
                }
                Ok(Turn::Send) => {
                    self.pass_lead(receiver, scope, &mut batch, &mut out);
                    if self.replier.send_all(&mut out).is_err() {
                        self.hang_up();
                    }
                }
                Ok(Turn::Commit) => {
                    self.lead.pass(receiver, || self.start_thread(scope));
                    self.commit_beside(&mut batch, &mut out);
                }
                Ok(Turn::End) => {
                    self.end_lead(receiver);
                    if self.gathered.begin(&mut batch) {
                        self.commit_beside(&mut batch, &mut out);
                    }
                }
                // The client is gone.
                Err(_) => {
                    self.client.leave();
                    self.end_lead(receiver);
                }
            }
        }
    }

    /// Passes the lead. The next leader commits the gathered requests; without one, this thread
    /// does.
    fn pass_lead<'scope>(
        &'scope self,
        receiver: MutexGuard<'_, Receiver>,
        scope: &'scope Scope<'scope, '_>,
        batch: &mut Batch,
        out: &mut Outbox,
    ) {
        let led = self.lead.pass(receiver, || self.start_thread(scope));
        if !led && self.gathered.begin(batch) {
            self.commit_beside(batch, out);
        }
    }

    /// Ends the last leader's turn. No request is taken any more.
    fn end_lead(&self, receiver: MutexGuard<'_, Receiver>) {
        self.lead.close();
        drop(receiver);
        *self.leads.lock() = None;
        if self.client.has_left() {
            // Nobody waits for these, while a client that connects again waits for their end.
            self.export.forget(&self.client);
        }
    }

    fn start_thread<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) -> bool {
        let builder = std::thread::Builder::new().name("nbd".to_owned());
        builder.spawn_scoped(scope, || self.work(scope)).is_ok()
    }

    /// Ends the connection of a disconnected client. The leader's receive ends too.
    pub(crate) fn hang_up(&self) {
        self.client.leave();
        self.lead.close();
        self.channel.shutdown(Shutdown::Both);
    }

    /// Runs requests until one may block, a batch must be committed or the connection ends.
    fn lead(
        &self,
        receiver: &mut Receiver,
        out: &mut Outbox,
        batch: &mut Batch,
    ) -> io::Result<Turn<'_>> {
        let extended = self.agreed.extended;
        let head = if extended { wire::EXTENDED_REQUEST_BYTES } else { wire::REQUEST_BYTES };
        let mut now = Instant::now();
        let mut gathered = self.gathered.len();
        loop {
            if receiver.available() < head || gathered >= GATHERED_MAX {
                if let Some(turn) = self.settle_gathered(receiver, Some(head), batch, out)? {
                    return Ok(turn);
                }
                if !receiver.fill(&*self.channel, head)? {
                    return Ok(Turn::End);
                }
                gathered = self.gathered.len();
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
            let whole = head + payload;
            let inline = payload <= INLINE_PAYLOAD_MAX;
            receiver.expect_large(!inline);
            if !inline || receiver.available() < whole {
                // The next leader finds the request in the receive buffer.
                let needed = inline.then_some(whole);
                if let Some(turn) = self.settle_gathered(receiver, needed, batch, out)? {
                    return Ok(turn);
                }
            }
            let (buffer, large) = if inline {
                if !receiver.fill(&*self.channel, whole)? {
                    return Ok(Turn::End);
                }
                let bytes = &receiver.bytes()[head..whole];
                let done = self.try_here(&request, now, bytes, out)?;
                if done == Fast::Unsent {
                    return Ok(Turn::Send);
                }
                if done != Fast::Declined {
                    gathered += usize::from(done == Fast::Gathered);
                    now = Instant::now();
                    receiver.consume(whole);
                    continue;
                }
                let mut buffer = self.buffers.take();
                buffer.room(payload).copy_from_slice(bytes);
                receiver.consume(whole);
                (buffer, None)
            } else {
                receiver.consume(head);
                self.take_payload(receiver, payload)?
            };
            // The rest is sent after the lead is passed.
            self.replier.send_all_ready(out)?;
            self.export.counters().lane(false);
            return Ok(Turn::Slow(request, now, buffer, large));
        }
    }

    /// Receives a payload into its own buffer. The guard is for [`Session::large_payloads`].
    fn take_payload(
        &self,
        receiver: &mut Receiver,
        payload: usize,
    ) -> io::Result<(Buffer, Option<MutexGuard<'_, ()>>)> {
        let large = (payload as u64 > ALONE_BYTES).then(|| self.large_payloads.lock());
        let mut buffer = self.buffers.take();
        receiver.take_payload(&*self.channel, &mut buffer, payload)?;
        Ok((buffer, large))
    }

    /// Runs a request on the leader's thread if it need not wait or is likely to be brief.
    fn try_here(
        &self,
        request: &Request,
        began: Instant,
        payload: &[u8],
        out: &mut Outbox,
    ) -> io::Result<Fast> {
        let fast = self.fast(request, began, payload, out)?;
        match fast {
            Fast::Answered => self.count(request, began.elapsed(), true),
            Fast::Gathered => {}
            Fast::Unsent => return Ok(fast),
            Fast::Declined => {
                return self.try_on_leader(request, began, payload, out);
            }
        }
        self.export.counters().lane(request.command != command::FLUSH);
        Ok(fast)
    }

    /// Runs a blocking request on the leader's thread if it is likely to be brief. If it turns out
    /// long, no other request may depend on it: other threads commit gathered requests and keep
    /// changes without space.
    fn try_on_leader(
        &self,
        request: &Request,
        began: Instant,
        payload: &[u8],
        out: &mut Outbox,
    ) -> io::Result<Fast> {
        let short = self.is_likely_short(request.command) && self.fault(request).is_none();
        if !short || self.gathered.len() > 0 || !self.replier.send_all_ready(out)? {
            return Ok(Fast::Declined);
        }
        let start = Instant::now();
        if !matches!(self.change(request, payload), Performed::Done(Ok(()))) {
            // The blocking path reports the error, or keeps the request.
            self.note_took(request.command, 2 * SHORT_REQUEST);
            return Ok(Fast::Declined);
        }
        self.note_took(request.command, start.elapsed());
        self.count(request, began.elapsed(), true);
        self.replier.put_ok(out, request);
        self.export.counters().lane(false);
        Ok(Fast::Answered)
    }

    pub(crate) fn count(&self, request: &Request, took: Duration, ok: bool) {
        Self::count_on(&self.export, request, took, ok);
    }

    pub(crate) fn count_on(export: &Export, request: &Request, took: Duration, ok: bool) {
        let kind = match request.command {
            command::READ => OpKind::Read,
            command::WRITE => OpKind::Write,
            command::WRITE_ZEROES => OpKind::Zero,
            command::TRIM => OpKind::Discard,
            command::FLUSH => OpKind::Flush,
            _ => return,
        };
        export.counters().done(kind, request.len, took, ok);
    }

    /// The non-blocking path: requests that need no disk wait.
    fn fast(
        &self,
        request: &Request,
        began: Instant,
        payload: &[u8],
        out: &mut Outbox,
    ) -> io::Result<Fast> {
        match request.command {
            command::READ if request.len > 0 && request.len <= INLINE_READ_MAX => {
                if self.fault(request).is_some() {
                    return Ok(Fast::Declined);
                }
                let len = request.len as usize;
                if !self.replier.make_room_ready(out, len)? {
                    return Ok(Fast::Unsent);
                }
                let data = out.data_room(self.replier.head(), len);
                match self.export.read_ready(data, request.offset) {
                    Some(Ok(Ready::Bytes)) => self.replier.put_data(out, request, len),
                    Some(Ok(Ready::Zero)) => self.replier.put_zero(out, request),
                    // The blocking path reports the error.
                    Some(Err(_)) | None => return Ok(Fast::Declined),
                }
                Ok(Fast::Answered)
            }
            command::WRITE if !payload.is_empty() => {
                if self.fault(request).is_some() || self.backoff.applies() {
                    return Ok(Fast::Declined);
                }
                let start = Instant::now();
                let fua = request.has(request_flag::FUA);
                let Some(Ok(written)) =
                    self.export.write_unsettled_ready(payload, request.offset, fua)
                else {
                    return Ok(Fast::Declined);
                };
                self.backoff.record(start.elapsed(), payload.len());
                if written == Written::NeedsFlush {
                    return Ok(self.gather(request, began));
                }
                self.replier.put_ok(out, request);
                Ok(Fast::Answered)
            }
            command::FLUSH if self.fault(request).is_none() => Ok(self.gather(request, began)),
            _ => Ok(Fast::Declined),
        }
    }

    fn gather(&self, request: &Request, began: Instant) -> Fast {
        self.gathered.add(Unanswered { request: *request, began });
        Fast::Gathered
    }

    /// Whether a blocking request of this kind is likely to be brief.
    pub(crate) fn is_likely_short(&self, command: u16) -> bool {
        let changes = [command::WRITE, command::FLUSH, command::TRIM, command::WRITE_ZEROES];
        changes.contains(&command)
            && self.took[usize::from(command)].load(Ordering::Relaxed)
                <= SHORT_REQUEST.as_nanos() as u64
    }

    /// The error of an invalid request.
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
        let changes = request.is_change();
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

    /// The blocking path. First sends what the leader left unsent.
    fn slow(
        &self,
        request: &Request,
        began: Instant,
        mut buffer: Buffer,
        large: Option<MutexGuard<'_, ()>>,
        out: &mut Outbox,
    ) {
        let done = match request.command {
            // A leader may wait for this guard. Drop it before waiting for the client, which may
            // not read before it has sent more.
            _ if large.is_some() => {
                let done = self.perform(request, began, buffer.bytes());
                self.buffers.give_back(std::mem::take(&mut buffer));
                drop(large);
                self.replier.send_all(out).and_then(|()| self.conclude(request, began, done))
            }
            command::READ | command::BLOCK_STATUS => self
                .replier
                .send_all(out)
                .and_then(|()| self.answer_with_data(request, began, &mut buffer, out)),
            _ => self.replier.send_all(out).and_then(|()| {
                let done = self.perform(request, began, buffer.bytes());
                self.conclude(request, began, done)
            }),
        };
        self.buffers.give_back(buffer);
        if done.is_err() {
            self.hang_up();
        }
    }

    /// Runs a request whose reply has data.
    fn answer_with_data(
        &self,
        request: &Request,
        began: Instant,
        buffer: &mut Buffer,
        out: &mut Outbox,
    ) -> io::Result<()> {
        match self.fault(request) {
            Some((errno, text)) => self.replier.error(request, errno, text),
            None if request.command == command::READ => self.read(request, began, buffer, out),
            None => status::answer(self, request, buffer.bytes()),
        }
    }

    /// Runs a request whose reply has no data.
    fn perform(&self, request: &Request, began: Instant, payload: &[u8]) -> Performed {
        if let Some((errno, text)) = self.fault(request) {
            return Performed::Refused(errno, text);
        }
        let start = Instant::now();
        match self.change(request, payload) {
            Performed::Done(Err(error)) if self.is_to_be_kept(request, &error) => {
                self.keep(request, error, payload, began);
                Performed::Kept
            }
            performed => {
                self.note_took(request.command, start.elapsed());
                performed
            }
        }
    }

    /// Tries a change once.
    fn change(&self, request: &Request, payload: &[u8]) -> Performed {
        let (at, len) = (request.offset, request.len);
        let fua = request.has(request_flag::FUA);
        let requests = self.export.requests(&self.client);
        Performed::Done(match request.command {
            command::WRITE => requests.write(payload, at, fua),
            command::WRITE_ZEROES => {
                let may_unmap = !request.has(request_flag::NO_HOLE);
                if request.has(request_flag::FAST_ZERO) && !self.zeroes_fast(at, len) {
                    return Performed::Refused(errno::NOTSUP, "no faster than a write");
                }
                requests.zero(at, len, may_unmap, fua)
            }
            command::TRIM => requests.discard(at, len, fua),
            command::CACHE => requests.prefetch(at, len),
            _ => return Performed::Refused(errno::INVAL, "unknown request"),
        })
    }

    /// Answers a finished request.
    fn conclude(&self, request: &Request, began: Instant, performed: Performed) -> io::Result<()> {
        let done = match performed {
            Performed::Kept => return Ok(()),
            Performed::Refused(errno, text) => return self.replier.error(request, errno, text),
            Performed::Done(done) => done,
        };
        self.count(request, began.elapsed(), done.is_ok());
        match done {
            Ok(()) => self.replier.ok(request),
            Err(error) => self.fail(request, &error),
        }
    }

    pub(crate) fn warn(&self, error: &Error) {
        tracing::warn!(export = self.export.name(), "{error}");
    }

    pub(crate) fn fail(&self, request: &Request, error: &Error) -> io::Result<()> {
        self.warn(error);
        self.replier.error(request, errno_of(error), &error.to_string())
    }

    /// Whether zeroing here only changes metadata.
    fn zeroes_fast(&self, at: u64, len: u64) -> bool {
        let disk = self.export.disk();
        let caps = disk.top().caps();
        let unit = caps.fill_bytes.max(1);
        let end = at + len;
        caps.cheap_zeroes
            && at.is_multiple_of(unit)
            && (end.is_multiple_of(unit) || end == disk.guest_bytes())
    }
}

/// The protocol's errno for an error.
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
