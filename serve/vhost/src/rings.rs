//! A ring's setup by the monitor, step by step, and its thread.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use vdkit_serve::Wake;

use crate::inflight::Tracker;
use crate::queue::{Ring, Setup};
use crate::wire::invalid;

/// A ring's thread.
struct Worker {
    thread: JoinHandle<()>,
    stop: Arc<Wake>,
}

/// A ring and its setup.
pub struct Slot {
    pub ring: Arc<Ring>,
    pub setup: Setup,
    /// The addresses are set.
    pub placed: bool,
    pub enabled: bool,
    kick: Option<Arc<OwnedFd>>,
    worker: Option<Worker>,
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

    pub fn set_kick(&mut self, fd: Option<OwnedFd>) {
        self.stop();
        self.kick = fd.map(Arc::new);
    }

    pub fn running(&self) -> bool {
        self.worker.is_some()
    }

    /// Starts the ring if its setup is complete and it is enabled.
    pub fn start(&mut self, tracker: Option<Tracker>) -> io::Result<()> {
        let Some(kick) = self.kick.clone() else { return Ok(()) };
        if self.running() || !self.enabled || !self.placed {
            return Ok(());
        }
        let stop = Arc::new(Wake::new()?);
        let heads = self.ring.prepare(self.setup, tracker).map_err(invalid)?;
        let (ring, stopped) = (self.ring.clone(), stop.clone());
        let thread = std::thread::Builder::new()
            .name("vring".to_owned())
            .spawn(move || ring.run(&kick, &stopped, &heads))?;
        self.worker = Some(Worker { thread, stop });
        Ok(())
    }

    /// Stops the ring and waits for its requests. Keeps the position to resume from.
    pub fn stop(&mut self) {
        let Some(worker) = self.worker.take() else { return };
        self.ring.halt();
        worker.stop.wake();
        if worker.thread.join().is_err() {
            tracing::error!("the thread of a queue has panicked");
        }
        self.setup.base = self.ring.drain();
    }

    /// Removes the ring for the monitor. Returns the available index to resume from.
    pub fn take_away(&mut self) -> u16 {
        self.stop();
        self.kick = None;
        self.ring.set_call(None);
        self.setup.base
    }
}
