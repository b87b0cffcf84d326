//! A ring as the monitor sets it up, piece by piece, and its thread.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::event::EventfdFlags;
use rustix::fs::OFlags;

use crate::inflight::Tracker;
use crate::queue::{Ring, Setup};

/// A ring's thread.
struct Worker {
    thread: JoinHandle<()>,
    stop: Arc<OwnedFd>,
}

/// A ring and what is known of it.
pub struct Slot {
    pub ring: Arc<Ring>,
    pub setup: Setup,
    /// The addresses have been named.
    pub placed: bool,
    pub enabled: bool,
    kick: Option<Arc<OwnedFd>>,
    worker: Option<Worker>,
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

/// No event counter may keep a thread waiting, whoever else reads it or fills it.
fn never_blocking(fd: &OwnedFd) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    Ok(rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK)?)
}

impl Slot {
    pub fn new(ring: Arc<Ring>) -> Self {
        Self {
            ring,
            setup: Setup::default(),
            placed: false,
            enabled: false,
            kick: None,
            worker: None,
        }
    }

    pub fn set_kick(&mut self, fd: Option<OwnedFd>) -> io::Result<()> {
        if let Some(fd) = &fd {
            never_blocking(fd)?;
        }
        self.stop();
        self.kick = fd.map(Arc::new);
        Ok(())
    }

    pub fn set_call(&self, fd: Option<OwnedFd>) -> io::Result<()> {
        if let Some(fd) = &fd {
            never_blocking(fd)?;
        }
        self.ring.set_call(fd.map(File::from));
        Ok(())
    }

    pub fn set_err(&self, fd: Option<OwnedFd>) -> io::Result<()> {
        if let Some(fd) = &fd {
            never_blocking(fd)?;
        }
        self.ring.set_err(fd.map(File::from));
        Ok(())
    }

    pub fn running(&self) -> bool {
        self.worker.is_some()
    }

    /// Starts it where all is known that it takes, and it is enabled.
    pub fn start(&mut self, tracker: Option<Tracker>) -> io::Result<()> {
        let Some(kick) = self.kick.clone() else { return Ok(()) };
        if self.running() || !self.enabled || !self.placed {
            return Ok(());
        }
        let stop = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?);
        let heads = self.ring.prepare(self.setup, tracker).map_err(invalid)?;
        let (ring, stopped) = (self.ring.clone(), stop.clone());
        let thread = std::thread::Builder::new()
            .name("vring".to_owned())
            .spawn(move || ring.run(&kick, &stopped, &heads))?;
        self.worker = Some(Worker { thread, stop });
        Ok(())
    }

    /// Stops it; nothing of it is under way afterwards. Where it goes on later is kept.
    pub fn stop(&mut self) {
        let Some(worker) = self.worker.take() else { return };
        self.ring.halt();
        // An eventfd that counts from zero takes this.
        let _ = rustix::io::write(&*worker.stop, &1_u64.to_ne_bytes());
        if worker.thread.join().is_err() {
            tracing::error!("the thread of a queue has panicked");
        }
        self.setup.base = self.ring.drain();
    }

    /// The monitor takes the ring away. Gives the available index from which to go on.
    pub fn take_away(&mut self) -> u16 {
        self.stop();
        self.kick = None;
        self.ring.set_call(None);
        self.setup.base
    }
}
