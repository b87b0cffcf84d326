//! Listening sockets, connections, and shutdown.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::io::Errno;
use rustix::net::Shutdown;
use vdkit_block::OwnerProcess;
use vdkit_serve::{Access, Export, UnixSocket, Wake};

use crate::changing::Changing;
use crate::channel::{Channel, Socket};
use crate::exports::Exports;
use crate::handshake::{Agreed, HANDSHAKE_TIME, Handshake, Outcome, TlsState};
use crate::poll::POLL_MAX;
use crate::session::Session;
use crate::tls::Tls;
use crate::wire::{keep_alive, percent};

/// How long threads of connections whose clients have left may wait for those clients.
const FAREWELL: Duration = Duration::from_secs(1);

/// Address of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket.
    Unix(PathBuf),
    /// `HOST:PORT`; port 0 picks a free one.
    Tcp(String),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

impl std::str::FromStr for Address {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("unix", path)) if !path.is_empty() => Ok(Self::Unix(path.into())),
            Some(("tcp", rest)) => {
                let port = rest.rsplit_once(':').map(|(_, port)| (port, port.parse::<u16>()));
                match port {
                    Some((_, Ok(_))) => Ok(Self::Tcp(rest.to_owned())),
                    Some((port, _)) if !port.is_empty() && !port.ends_with(']') => {
                        Err(format!("'{port}' is no port: ports are numbers from 0 to 65535"))
                    }
                    _ => Err(format!("'{text}' has no port: write tcp:HOST:PORT")),
                }
            }
            _ => Err(format!("'{text}' is no address: write unix:PATH or tcp:HOST:PORT")),
        }
    }
}

/// A listening socket.
#[derive(Debug)]
pub enum Listener {
    /// A Unix socket of our own.
    Unix(UnixSocket),
    /// A Unix socket passed in by another process.
    Handed(UnixListener),
    /// A TCP socket.
    Tcp(TcpListener),
}

impl Listener {
    /// Listens. Replaces a Unix socket without a listener.
    ///
    /// # Errors
    /// Errors of the system; `AddrInUse` if another process listens.
    pub fn bind(address: &Address) -> io::Result<Self> {
        match address {
            Address::Tcp(address) => TcpListener::bind(address.as_str()).map(Self::Tcp),
            Address::Unix(path) => UnixSocket::bind(path, Access::Usual).map(Self::Unix),
        }
    }

    /// The address of a TCP socket.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        match self {
            Self::Unix(_) | Self::Handed(_) => None,
            Self::Tcp(listener) => listener.local_addr().ok(),
        }
    }

    /// The URI of an export. Source: the NBD project's `doc/uri.md`.
    pub fn uri(&self, name: &str, tls: bool) -> String {
        let scheme = if tls { "nbds" } else { "nbd" };
        let name = percent(name);
        let unix = |path: &Path| {
            let path = percent(path.as_os_str().as_encoded_bytes());
            format!("{scheme}+unix:///{name}?socket={path}")
        };
        match self {
            Self::Unix(socket) => unix(socket.path()),
            Self::Handed(listener) => {
                let address = listener.local_addr().ok();
                unix(
                    address.as_ref().and_then(|bound| bound.as_pathname()).unwrap_or(Path::new("")),
                )
            }
            Self::Tcp(listener) => {
                let address = listener.local_addr().map(|address| address.to_string());
                format!("{scheme}://{}/{name}", address.unwrap_or_default())
            }
        }
    }

    fn accept(&self, poll_max: Duration) -> io::Result<Socket> {
        let (socket, _) = match self {
            Self::Unix(listener) => listener.accept()?,
            Self::Handed(listener) => listener.accept()?,
            Self::Tcp(listener) => {
                let (socket, _) = listener.accept()?;
                // Replies are sent whole, so delaying them gains nothing.
                socket.set_nodelay(true)?;
                // A client whose host died must not have a kept change made much later.
                keep_alive(&socket)?;
                return Ok(Socket::new(socket, poll_max));
            }
        };
        Ok(Socket::new(socket, poll_max))
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(socket) => socket.as_fd(),
            Self::Handed(socket) => socket.as_fd(),
            Self::Tcp(socket) => socket.as_fd(),
        }
    }
}

/// Options of a server.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerOptions {
    /// Maximum connections. A further one replaces the one that has been negotiating longest. It is
    /// rejected if all have reached an export.
    pub connections_max: usize,
    /// Instead, a further connection waits until another one has ended.
    pub wait_when_full: bool,
    /// Time limit of the negotiation, TLS included.
    pub handshake_time: Duration,
    /// Require TLS with this configuration.
    pub tls: Option<Tls>,
    /// Maximum time to poll a connection before its thread sleeps; zero for never. Polling answers
    /// sooner and costs processor time.
    pub poll_max: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            connections_max: 1024,
            wait_when_full: false,
            handshake_time: HANDSHAKE_TIME,
            tls: None,
            poll_max: POLL_MAX,
        }
    }
}

struct Shared {
    exports: Exports,
    options: ServerOptions,
    /// Stops waiting for clients.
    wake: Wake,
    clients: Arc<Clients>,
    next: AtomicU64,
    served: AtomicU64,
}

/// The connected clients. Separate from [`Shared`], so that a thread can leave this list last, when
/// it no longer holds an export.
#[derive(Default)]
struct Clients {
    roll: Mutex<Roll>,
    gone: Condvar,
}

#[derive(Default)]
struct Roll {
    connections: Vec<Connection>,
    /// Threads of these connections, and of those that were replaced and have not ended yet.
    threads: usize,
    /// The service ends: nothing waits for room any more.
    ending: bool,
}

impl Roll {
    /// Closes the connection that has been negotiating longest; `false` if all have reached an export.
    fn close_a_stranger(&mut self) -> bool {
        // New connections are appended, so this is the oldest. An honest client negotiates
        // within milliseconds, so it is rarely the one to close.
        let oldest = self.connections.iter().position(|other| other.export.is_none());
        if let Some(oldest) = oldest {
            tracing::debug!("a connection that was still negotiating makes room for another");
            self.connections.remove(oldest).channel.shutdown(Shutdown::Both);
        }
        oldest.is_some()
    }
}

/// A counted connection.
struct Connection {
    id: u64,
    channel: Arc<dyn Channel>,
    changing: Arc<Changing>,
    /// The name of the export that it has reached. Before that it may be replaced by another
    /// connection.
    export: Option<String>,
}

/// A server: threads that listen and serve until [`Server::stop`]. Dropping it is a stop without
/// time to drain; as there, resume a paused export first, or end its waiting. In a child of `fork`,
/// neither ends anything: the threads and clients are the parent's.
#[must_use = "dropping it ends the service"]
pub struct Server {
    shared: Arc<Shared>,
    listeners: Vec<JoinHandle<()>>,
    owner: OwnerProcess,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("connections", &self.connections()).finish_non_exhaustive()
    }
}

impl Server {
    /// Serves these exports on these sockets.
    ///
    /// # Errors
    /// If a thread cannot be created.
    pub fn start(
        exports: Exports,
        listeners: Vec<Listener>,
        options: ServerOptions,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            exports,
            options,
            wake: Wake::new()?,
            clients: Arc::default(),
            next: AtomicU64::new(0),
            served: AtomicU64::new(0),
        });
        // An error drops this, which ends the threads that have been started.
        let mut server = Self { shared, listeners: Vec::new(), owner: OwnerProcess::current() };
        for listener in listeners {
            // A connection may close between poll and accept.
            rustix::io::ioctl_fionbio(&listener, true)?;
            let shared = server.shared.clone();
            let thread = std::thread::Builder::new()
                .name("nbd-accept".to_owned())
                .spawn(move || accept(&shared, &listener))?;
            server.listeners.push(thread);
        }
        Ok(server)
    }

    /// Current connections.
    pub fn connections(&self) -> usize {
        self.shared.clients.roll.lock().connections.len()
    }

    /// Finished connections that had reached an export.
    pub fn served(&self) -> u64 {
        self.shared.served.load(Ordering::Relaxed)
    }

    /// Ends the service. Accepts no new connections, and stops receiving: requests that a client has
    /// sent by then are done and answered, for at most `drain`. Then closes all connections; a change
    /// that waits for space is dropped with its connection. On return no thread of the server holds an
    /// export, so it also waits for requests inside the disk, however long those take; those of a
    /// paused export until [`vdkit_serve::Export::resume`]. In a child of `fork`, ends nothing.
    pub fn stop(mut self, drain: Duration) {
        self.end(drain);
    }

    /// See [`Server::stop`]. A second call finds nothing to end.
    fn end(&mut self, drain: Duration) {
        if !self.owner.is_current() {
            // A thread of the parent cannot be joined here.
            return self.listeners.drain(..).for_each(std::mem::forget);
        }
        self.shared.wake.wake();
        self.shared.clients.roll.lock().ending = true;
        self.shared.clients.gone.notify_all();
        for thread in self.listeners.drain(..) {
            let _ = thread.join();
        }
        // `None`: later than any time of the clock.
        let until = Instant::now().checked_add(drain);
        let Clients { roll, gone } = &*self.shared.clients;
        let mut roll = roll.lock();
        for Connection { channel, .. } in &roll.connections {
            channel.shutdown(Shutdown::Read);
        }
        let mut cut = false;
        while roll.threads > 0 {
            let Some(until) = until.filter(|_| !cut) else {
                gone.wait(&mut roll);
                continue;
            };
            if gone.wait_until(&mut roll, until).timed_out() {
                cut = true;
                for Connection { channel, .. } in &roll.connections {
                    channel.shutdown(Shutdown::Both);
                }
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end(Duration::ZERO);
    }
}

fn accept(shared: &Arc<Shared>, listener: &Listener) {
    let poll_max = shared.options.poll_max;
    let accept = || {
        listener.accept(poll_max).inspect_err(|error| {
            let full = [Errno::MFILE, Errno::NFILE].map(|errno| Some(errno.raw_os_error()));
            if full.contains(&error.raw_os_error()) {
                shared.clients.roll.lock().close_a_stranger();
            }
        })
    };
    while let Some(socket) = shared.wake.accept("nbd", listener, accept) {
        let channel: Arc<dyn Channel> = Arc::new(socket);
        let id = shared.next.fetch_add(1, Ordering::Relaxed);
        let Some(place) = shared.admit(id, &channel) else { continue };
        let own = shared.clone();
        let spawned = std::thread::Builder::new().name("nbd".to_owned()).spawn(move || {
            serve(&own, channel, &place);
            drop(own);
            drop(place);
        });
        if let Err(error) = spawned {
            tracing::warn!("cannot start a thread for a connection: {error}");
        }
        // Clients that there is no room for wait in the listener's queue.
        drop(shared.wait_for_room());
    }
}

impl Shared {
    /// With [`ServerOptions::wait_when_full`], waits until there is room for a connection, or until the
    /// server ends.
    fn wait_for_room(&self) -> MutexGuard<'_, Roll> {
        let ServerOptions { connections_max, wait_when_full, .. } = self.options;
        let Clients { roll, gone } = &*self.clients;
        let mut roll = roll.lock();
        while wait_when_full && roll.connections.len() >= connections_max && !roll.ending {
            gone.wait(&mut roll);
        }
        roll
    }

    /// Adds a new connection to the list; `None` if it is rejected.
    fn admit(&self, id: u64, channel: &Arc<dyn Channel>) -> Option<Place> {
        // Another listener may have filled the server meanwhile.
        let mut roll = self.wait_for_room();
        if roll.ending && self.options.wait_when_full {
            return None;
        }
        let count = roll.connections.len();
        if count >= self.options.connections_max && !roll.close_a_stranger() {
            tracing::warn!("a connection was turned away: there are {count}");
            return None;
        }
        let (channel, changing) = (channel.clone(), Arc::<Changing>::default());
        let place = Place { clients: self.clients.clone(), id, changing: changing.clone() };
        roll.connections.push(Connection { id, channel, changing, export: None });
        roll.threads += 1;
        Some(place)
    }
}

/// A connection's entry in the list, and its thread; dropping it removes both.
struct Place {
    clients: Arc<Clients>,
    id: u64,
    changing: Arc<Changing>,
}

impl Place {
    /// Waits for changes of lost connections to the same export; see [`crate::changing`]. Then marks
    /// the connection as having reached it.
    ///
    /// # Errors
    /// If such a change still runs at the deadline; if this connection was replaced.
    fn reach(&self, export: &Export, until: Instant) -> io::Result<()> {
        // One deadline for all: a new client must not pay for each that does not read.
        let farewell = until.min(Instant::now() + FAREWELL);
        for (channel, changing) in self.others_of(export.name()) {
            if !channel.has_left() || changing.ends_by(farewell) {
                continue;
            }
            channel.shutdown(Shutdown::Both);
            if !changing.ends_by(until) {
                tracing::warn!(
                    export = export.name(),
                    "a client was turned away: a change of a lost connection still runs"
                );
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        let mut roll = self.clients.roll.lock();
        let own = roll.connections.iter_mut().find(|connection| connection.id == self.id);
        let own =
            own.ok_or_else(|| io::Error::other("this connection has made room for another"))?;
        own.export = Some(export.name().to_owned());
        Ok(())
    }

    /// Other connections that have reached an export.
    fn others_of(&self, export: &str) -> Vec<(Arc<dyn Channel>, Arc<Changing>)> {
        let roll = self.clients.roll.lock();
        let others = roll.connections.iter().filter(|one| one.export.as_deref() == Some(export));
        others.map(|one| (one.channel.clone(), one.changing.clone())).collect()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut roll = self.clients.roll.lock();
        roll.connections.retain(|connection| connection.id != self.id);
        roll.threads -= 1;
        self.clients.gone.notify_all();
    }
}

/// Negotiates, within TLS if required. `None` if the connection ended.
fn negotiate(
    shared: &Shared,
    channel: &mut Arc<dyn Channel>,
    place: &Place,
) -> io::Result<Option<Box<Agreed>>> {
    let until = Instant::now() + shared.options.handshake_time;
    let (exports, reach) = (&shared.exports, |export: &Export| place.reach(export, until));
    let tls = shared.options.tls.as_ref();
    let state = if tls.is_some() { TlsState::Required } else { TlsState::None };
    let alone = shared.options.connections_max == 1;
    let outcome =
        Handshake::new(&**channel, exports, state, until, &reach).alone(alone).run(None)?;
    let (&Outcome::StartTls(greeted), Some(tls)) = (&outcome, tls) else {
        return Ok(outcome.agreed());
    };
    *channel = tls.accept(channel.clone(), until)?;
    let outcome = Handshake::new(&**channel, exports, TlsState::Active, until, &reach)
        .alone(alone)
        .run(Some(greeted))?;
    Ok(outcome.agreed())
}

fn serve(shared: &Shared, mut channel: Arc<dyn Channel>, place: &Place) {
    // From before the client may send requests.
    let leads = place.changing.begin();
    let agreed = negotiate(shared, &mut channel, place).unwrap_or_else(|error| {
        tracing::debug!("a handshake failed: {error}");
        None
    });
    match agreed {
        Some(agreed) if channel.set_timeout(None).is_ok() => {
            tracing::debug!(export = agreed.export.name(), "a client begins");
            Session::new(channel, *agreed, place.changing.clone(), leads).run();
            shared.served.fetch_add(1, Ordering::Relaxed);
        }
        _ => channel.shutdown(Shutdown::Both),
    }
}
