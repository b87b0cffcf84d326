//! Accepts monitors, one at a time: two would be two guests writing one disk.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use vdkit_serve::{ACCEPT_PAUSE, Access, Export, UnixSocket, Wake, Worker};

use crate::device::QUEUES_MAX;
use crate::session::Session;

/// A socket that monitors connect to.
#[derive(Debug)]
pub struct Listener(UnixSocket);

impl Listener {
    /// Listens at a path; see [`UnixSocket::bind`].
    ///
    /// # Errors
    /// As there.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let socket = UnixSocket::bind(path, Access::Usual)?;
        socket.set_nonblocking(true)?;
        Ok(Self(socket))
    }

    /// Its address as one word: `vhost-user:PATH`.
    pub fn uri(&self) -> String {
        let path = std::path::absolute(self.0.path());
        format!("vhost-user:{}", path.as_deref().unwrap_or(self.0.path()).display())
    }
}

/// Options of a server.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerOptions {
    /// Maximum queues of the disk, 1 to 64. The guest decides how many it uses; each has a thread.
    pub queues_max: u16,
    /// Maximum threads for requests that may wait for a disk, besides those of the queues. Without any,
    /// the queues' own threads wait.
    pub threads_max: usize,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self { queues_max: QUEUES_MAX, threads_max: 16 }
    }
}

/// Connection counts.
#[derive(Debug, Default)]
struct Visits {
    served: AtomicU64,
    connected: AtomicBool,
}

/// A disk served to monitors until [`Server::stop`]. Dropping it ends the service too, and waits
/// until the requests already taken are done: they use the guest's memory. Resume a paused export first.
/// In a child of `fork`, dropping it ends nothing: thread and guest are the parent's.
#[derive(Debug)]
#[must_use = "dropping it ends the service"]
pub struct Server {
    visits: Arc<Visits>,
    worker: Worker,
    ended: Receiver<()>,
}

impl Server {
    /// Starts serving.
    ///
    /// # Errors
    /// If no thread can be created.
    pub fn start(
        export: Arc<Export>,
        listener: Listener,
        options: ServerOptions,
    ) -> io::Result<Self> {
        let (tell, ended) = channel();
        let visits = Arc::new(Visits::default());
        let counted = visits.clone();
        let worker = Worker::start("vhost-user", move |woken| {
            serve(&export, &listener, &options, woken, &counted);
            drop(listener);
            // The receiver may be gone.
            let _ = tell.send(());
        })?;
        Ok(Self { visits, worker, ended })
    }

    /// Number of monitors so far.
    pub fn served(&self) -> u64 {
        self.visits.served.load(Ordering::SeqCst)
    }

    /// Whether a monitor is connected.
    pub fn connected(&self) -> bool {
        self.visits.connected.load(Ordering::SeqCst)
    }

    /// Ends the service. Requests already taken are done and put back; others stay in their rings.
    /// Returns whether all were done within `drain`. If not, the thread that does them goes on, in the
    /// guest's memory too, until they are done. In a child of `fork`, ends nothing and returns `false`.
    pub fn stop(self, drain: Duration) -> bool {
        self.worker.stop(|| self.ended.recv_timeout(drain).is_ok())
    }
}

fn serve(
    export: &Arc<Export>,
    listener: &Listener,
    options: &ServerOptions,
    wake: &Wake,
    visits: &Visits,
) {
    // On, which is the initial state.
    let writeback = Arc::new(AtomicBool::new(true));
    let socket = &listener.0;
    while let Some((monitor, _)) = wake.accept("vhost-user", socket, || socket.accept()) {
        let session = Session::new(monitor, export.clone(), writeback.clone(), options);
        match session {
            Ok(session) => {
                visits.connected.store(true, Ordering::SeqCst);
                // Not whoever only looks whether somebody listens.
                session.run(wake, || {
                    visits.served.fetch_add(1, Ordering::SeqCst);
                });
                visits.connected.store(false, Ordering::SeqCst);
            }
            Err(error) => {
                tracing::warn!("vhost-user: {error}");
                wake.pause(ACCEPT_PAUSE);
            }
        }
    }
}
