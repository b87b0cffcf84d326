//! An export over several connections, and what happens when they are lost.
//!
//! ```text
//!   run ─► the connection with the fewest requests in flight ─► call ─► done
//!            │ all are busy: more are opened, by another thread       │ lost
//!            │                                                        ▼
//!            └──────────────── connected again, within a time limit ◄─ all connections end together
//! ```
//!
//! # Lost connections
//! All connections of a client are of one *generation*. If one is lost, all end, and a new
//! generation begins with the first connection that can be made within the time limit. Requests
//! that were not answered are sent again: a read changes nothing, and a write, a trim or zeroes
//! done twice leave the same bytes. If the server only stopped answering, or broke the protocol,
//! nothing is sent again: the old request could still run, at a time that nobody knows.
//!
//! # The old copy of a request
//! A server that is alive may still have what was sent on a lost connection. If it executes an old
//! write after it has answered the repeated one, it overwrites what was written since. The protocol
//! says nothing about the order of requests on two connections, and no client can ask. This one does
//! its part: a lost TCP connection is reset before another one is made, so the kernel sends
//! nothing of it later, and the server learns of the end. vdkit's server then executes what it has
//! before a new connection reaches the export. What remains: other servers, and a server that the
//! reset did not reach and that has not yet executed what it received. `reconnect=0` sends nothing
//! again.
//!
//! # The rule of the flush
//! See [`crate::durability`]: a generation that ends with answered, unflushed writes makes each later
//! flush fail. An answer that arrives after its generation has ended does not count: the request is
//! sent again.
//!
//! # A child of `fork`
//! The sockets are its parent's too, and so are the cookies of requests and the state of TLS. So a child
//! sends nothing, and ends nothing: it closes its descriptors, and its requests fail.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use vdkit_block::OwnerProcess;

use crate::channel::Socket;
use crate::connection::{Connection, Request};
use crate::durability::Durability;
use crate::failure::{Broken, Failure};
use crate::handshake::{Agreed, DescribedExport, ExportInfo, Handshake, ListedExport};
use crate::reply::Expected;
use crate::tls::Tls;
use crate::uri::NbdUri;
use crate::wire::{command, errno, flag, option, request_flag};

/// Time limit for connecting and negotiating, of the first connection.
const CONNECT: Duration = Duration::from_secs(30);
/// The same for each further connection. Some servers accept a limited number of clients and let further
/// ones wait.
const CONNECT_FURTHER: Duration = Duration::from_secs(5);
/// Pause after a further connection could not be made.
const FURTHER_PAUSE: Duration = Duration::from_secs(60);
/// A server that neither sends nor takes a byte for this long, while a request waits, is considered
/// dead. Servers may let writes wait for a full file system, and flush for long.
const SILENCE: Duration = Duration::from_secs(600);
/// Longest wait for the threads of a lost connection to let go of it, and how often they are looked at.
const RESET: Duration = Duration::from_secs(2);
const RESET_STEP: Duration = Duration::from_millis(5);
/// Pauses between attempts to connect; each doubles the one before.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Time limits; tests shorten them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) connect: Duration,
    pub(crate) silence: Duration,
    pub(crate) further_pause: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connect: CONNECT, silence: SILENCE, further_pause: FURTHER_PAUSE }
    }
}

/// What is needed to connect.
#[derive(Debug)]
struct Target {
    uri: NbdUri,
    tls: Option<Tls>,
    contexts: Vec<String>,
    limits: Limits,
}

impl Target {
    fn new(uri: NbdUri, contexts: Vec<String>, limits: Limits) -> std::io::Result<Self> {
        let tls = match &uri.tls {
            Some(names) => Some(Tls::new(names, &uri.place)?),
            None => None,
        };
        Ok(Self { uri, tls, contexts, limits })
    }

    fn begin(&self, until: Instant) -> std::io::Result<Handshake> {
        let socket = Socket::connect(&self.uri.place, until)?;
        Handshake::begin(socket, self.tls.as_ref(), until)
    }

    fn connect(&self, most: Duration) -> std::io::Result<Connection> {
        let until = Instant::now() + most;
        let (channel, agreed) = self.begin(until)?.go(&self.uri.export, &self.contexts)?;
        Connection::new(channel, agreed, self.limits.silence)
    }
}

/// State of the connections.
#[derive(Debug, Default)]
enum Phase {
    /// There are connections.
    #[default]
    Connected,
    /// A thread connects again.
    Reconnecting,
    /// There are none.
    Down,
}

#[derive(Debug, Default)]
struct Shared {
    phase: Phase,
    /// The generation of the connections, and the writes that are not known to be durable.
    durability: Durability,
    connections: Vec<Arc<Connection>>,
    /// Connections of the last generation, which threads may still have.
    ended: Vec<Weak<Connection>>,
    /// A thread opens further connections.
    opening: bool,
    /// No further connection is opened before: the last one of this generation could not be made.
    further_after: Option<Instant>,
    /// When the last generation ended, and why.
    lost: Option<(Instant, Broken)>,
    closed: bool,
}

/// An export on a server. Shared by threads.
#[derive(Debug)]
pub(crate) struct Client {
    target: Arc<Target>,
    /// As of the first connection. Later ones must agree on the same.
    agreed: Agreed,
    shared: Arc<Mutex<Shared>>,
    /// The phase changed.
    changed: Condvar,
    owner: OwnerProcess,
}

impl Client {
    /// Connects to an export.
    ///
    /// # Errors
    /// Errors of the system, of TLS and of the negotiation.
    pub(crate) fn connect(
        uri: NbdUri,
        contexts: Vec<String>,
        limits: Limits,
    ) -> std::io::Result<Self> {
        let target = Target::new(uri, contexts, limits)?;
        let connection = target.connect(target.limits.connect)?;
        let agreed = connection.agreed().clone();
        let shared = Shared { connections: vec![Arc::new(connection)], ..Shared::default() };
        let shared = Arc::new(Mutex::new(shared));
        let (changed, owner) = (Condvar::new(), OwnerProcess::current());
        Ok(Self { target: Arc::new(target), agreed, shared, changed, owner })
    }

    /// The parsed name.
    pub(crate) fn uri(&self) -> &NbdUri {
        &self.target.uri
    }

    /// What was negotiated.
    pub(crate) fn agreed(&self) -> &Agreed {
        &self.agreed
    }

    /// Refuses what would use a parent's connections, before any lock: a thread that the child does not
    /// have may hold it.
    fn check_process(&self) -> Result<(), Broken> {
        if self.owner.is_current() {
            return Ok(());
        }
        let why = "the parent of this process opened it: open it after the fork";
        Err(Broken { why: why.into(), lost: false })
    }

    /// Sends a request and waits for its reply, through lost connections if need be.
    ///
    /// # Errors
    /// The server's error; why the connection is unusable.
    pub(crate) fn run(
        &self,
        request: &Request<'_>,
        mut expected: Expected<'_>,
    ) -> Result<(), Failure> {
        self.check_process()?;
        let mut first_lost = None;
        let mut pause = PAUSE_MIN;
        loop {
            let (generation, connection) = self.connection()?;
            let covers = self.shared.lock().durability.written();
            if let Expected::Status(_, runs) = &mut expected {
                runs.clear();
            }
            let broken = match connection.call(request, expected.again()) {
                Ok(()) if self.count(request, generation, covers) => return Ok(()),
                // The generation ended meanwhile.
                Ok(()) => continue,
                Err(Failure::Refused { errno: errno::SHUTDOWN, .. }) => {
                    Broken::lost("the server is shutting down")
                }
                Err(refused @ Failure::Refused { .. }) => return Err(refused),
                Err(Failure::Broken(broken)) => broken,
            };
            self.end_generation(generation, &broken);
            // It is reset when all threads have dropped it.
            drop(connection);
            self.changed.notify_all();
            if !broken.lost {
                return Err(broken.into());
            }
            // A server that ends each connection at this request is given up on too.
            let first = *first_lost.get_or_insert_with(Instant::now);
            if first.elapsed() + pause > self.target.uri.reconnect {
                return Err(broken.into());
            }
            if first.elapsed() > PAUSE_MIN {
                std::thread::sleep(pause);
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
    }

    /// Counts an answered request; `false` if the answer is of a generation that has ended.
    fn count(&self, request: &Request<'_>, generation: u64, covers: u64) -> bool {
        let writes =
            matches!(request.command, command::WRITE | command::WRITE_ZEROES | command::TRIM);
        let flushes = request.command == command::FLUSH;
        if !writes && !flushes {
            return true;
        }
        let durability = &mut self.shared.lock().durability;
        match flushes {
            true => durability.count_flush(generation, covers),
            false => durability.count_write(generation, request.flags & request_flag::FUA != 0),
        }
    }

    /// Makes all writes durable that were answered before this call.
    ///
    /// # Errors
    /// As [`Client::run`]; and if a lost connection leaves the fate of an answered write unknown.
    pub(crate) fn flush(&self) -> Result<(), Failure> {
        self.check_process()?;
        let flush = Request { command: command::FLUSH, flags: 0, offset: 0, len: 0, payload: &[] };
        let flushed = match self.agreed.has(flag::SEND_FLUSH) {
            true => self.run(&flush, Expected::Nothing),
            false => Ok(()),
        };
        let durability = &mut self.shared.lock().durability;
        match &flushed {
            // The end of the generation judged already whether answered writes may be lost.
            Err(Failure::Broken(_)) => {}
            // As after a failed fdatasync: what was lost stays lost.
            Err(Failure::Refused { .. }) => durability.doubt("an earlier flush failed"),
            Ok(()) => {
                if let Some(why) = durability.doubtful() {
                    return Err(Broken { why, lost: false }.into());
                }
            }
        }
        flushed
    }

    /// Ends a generation, unless another thread has ended it.
    fn end_generation(&self, generation: u64, broken: &Broken) {
        let mut shared = self.shared.lock();
        if !shared.durability.end_generation(generation, &broken.why) {
            return;
        }
        shared.phase = Phase::Down;
        shared.lost = Some((Instant::now(), broken.clone()));
        shared.further_after = None;
        let connections = std::mem::take(&mut shared.connections);
        // Before another thread can see that they are lost, and connect again.
        for one in &connections {
            one.break_off(broken.clone());
        }
        shared.ended.extend(connections.iter().map(Arc::downgrade));
        drop(shared);
        self.changed.notify_all();
    }

    /// Waits until the connections of the last generation are closed, and so reset: the threads that
    /// still have them are about to drop them. No server can be asked, so there is a time limit.
    fn wait_for_the_reset(&self, shared: &mut MutexGuard<'_, Shared>) {
        let until = Instant::now() + RESET;
        while shared.ended.iter().any(|one| one.strong_count() > 0) && Instant::now() < until {
            self.changed.wait_for(shared, RESET_STEP);
        }
        shared.ended.clear();
    }

    /// A connection, and its generation.
    fn connection(&self) -> Result<(u64, Arc<Connection>), Failure> {
        let mut shared = self.shared.lock();
        loop {
            match shared.phase {
                Phase::Connected => {
                    let best = shared.connections.iter().min_by_key(|one| one.busy()).cloned();
                    if let Some(best) = best {
                        let generation = shared.durability.generation();
                        if best.busy() > 0 {
                            self.open_further(&mut shared);
                        }
                        return Ok((generation, best));
                    }
                    shared.phase = Phase::Down;
                }
                Phase::Reconnecting => self.changed.wait(&mut shared),
                Phase::Down => {
                    shared.phase = Phase::Reconnecting;
                    self.wait_for_the_reset(&mut shared);
                    let lost = shared.lost.clone();
                    drop(shared);
                    let connected = self.reconnect(lost.as_ref());
                    shared = self.shared.lock();
                    self.changed.notify_all();
                    match connected {
                        Ok(connection) => {
                            shared.connections = vec![Arc::new(connection)];
                            shared.phase = Phase::Connected;
                        }
                        Err(broken) => {
                            shared.phase = Phase::Down;
                            return Err(broken.into());
                        }
                    }
                }
            }
        }
    }

    /// Connects again until the time limit after the loss. After that there is one attempt.
    fn reconnect(&self, lost: Option<&(Instant, Broken)>) -> Result<Connection, Broken> {
        let limit = self.target.uri.reconnect;
        let (since, why) = match lost {
            Some((since, broken)) => (*since, broken.why.clone()),
            None => (Instant::now(), "it was never there".into()),
        };
        if limit.is_zero() {
            return Err(Broken::lost(why));
        }
        let mut pause = PAUSE_MIN;
        loop {
            let left = limit.saturating_sub(since.elapsed()).max(PAUSE_MIN * 10);
            let failed = match self.target.connect(left.min(self.target.limits.connect)) {
                Ok(connection) if connection.agreed() == &self.agreed => return Ok(connection),
                Ok(connection) => {
                    connection.end();
                    let why = "after the connection was lost the server has another export there";
                    return Err(Broken { why: why.into(), lost: false });
                }
                Err(error) => vdkit_block::plain(&error),
            };
            if since.elapsed() + pause > limit {
                let seconds = limit.as_secs();
                let why = format!("{why}, and there was no new one in {seconds} s: {failed}");
                return Err(Broken { why: why.into(), lost: false });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Maximum connections.
    fn connections_max(&self) -> usize {
        if self.agreed.has(flag::CAN_MULTI_CONN) { self.target.uri.connections } else { 1 }
    }

    /// Opens further connections in the background, if the server allows several.
    fn open_further(&self, shared: &mut Shared) {
        let most = self.connections_max();
        let pauses = shared.further_after.is_some_and(|after| Instant::now() < after);
        if shared.opening || pauses || shared.connections.len() >= most {
            return;
        }
        shared.opening = true;
        let (target, state) = (self.target.clone(), self.shared.clone());
        let (generation, agreed) = (shared.durability.generation(), self.agreed.clone());
        let pause = self.target.limits.further_pause;
        let open = move || {
            loop {
                let connected = target.connect(CONNECT_FURTHER);
                let mut shared = state.lock();
                let connected = connected.ok().filter(|one| one.agreed() == &agreed);
                if shared.durability.generation() != generation || shared.closed {
                    shared.opening = false;
                    drop(shared);
                    return connected.iter().for_each(Connection::end);
                }
                let Some(connection) = connected else {
                    // As many as the server accepts now.
                    shared.further_after = Some(Instant::now() + pause);
                    break shared.opening = false;
                };
                shared.connections.push(Arc::new(connection));
                if shared.connections.len() >= most {
                    break shared.opening = false;
                }
            }
        };
        let name = "nbd connections".to_owned();
        if std::thread::Builder::new().name(name).spawn(open).is_err() {
            // One connection is enough to work.
            shared.further_after = Some(Instant::now() + pause);
            shared.opening = false;
        }
    }

    /// Number of connections; for tests.
    #[cfg(test)]
    pub(crate) fn connections(&self) -> usize {
        self.shared.lock().connections.len()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if !self.owner.is_current() {
            return;
        }
        let mut shared = self.shared.lock();
        shared.closed = true;
        let connections = std::mem::take(&mut shared.connections);
        drop(shared);
        connections.iter().for_each(|connection| connection.end());
    }
}

/// The exports that a server lists, each described.
///
/// # Errors
/// Errors of the system, of TLS and of the negotiation; `PermissionDenied` if the server does not
/// list its exports.
pub(crate) fn described(uri: &NbdUri) -> std::io::Result<Vec<DescribedExport>> {
    let target = Target::new(uri.clone(), Vec::new(), Limits::default())?;
    let handshake = target.begin(Instant::now() + target.limits.connect)?;
    let extended = handshake.has(option::EXTENDED_HEADERS)?;
    let structured = extended || handshake.has(option::STRUCTURED_REPLY)?;
    let describe = |(name, listed): (Vec<u8>, ListedExport)| {
        let info = handshake.info(&name)?;
        let contexts = match structured {
            true => handshake.contexts(option::LIST_META_CONTEXT, &name, &[])?,
            false => Vec::new(),
        };
        let contexts = contexts.into_iter().map(|(name, _)| name).collect();
        Ok(DescribedExport { listed, info, extended, contexts })
    };
    let described = handshake.exports()?.into_iter().map(describe).collect();
    handshake.abort();
    described
}

/// Opens an export over a connected socket, for a caller that sends simple requests: without TLS, and
/// without time limits afterwards.
///
/// # Errors
/// Errors of the system and of the negotiation.
pub fn open_simple(socket: impl Into<OwnedFd>, export: &str) -> std::io::Result<ExportInfo> {
    let until = Instant::now() + CONNECT;
    Handshake::begin(Socket::over(socket), None, until)?.go_simple(export)
}
