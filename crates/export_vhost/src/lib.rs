//! vhost-user-blk: an export as a virtio disk, whose requests lie in memory that the virtual
//! machine shares with this process.
//!
//! # The life of a request
//! The guest puts a chain of descriptors into a ring and kicks. The ring's thread (`queue`) takes
//! all that are there, does those of the fast lane where it stands, puts them back and notifies
//! the guest once. What may block goes to a bounded pool of threads (`pool`), each of which puts
//! back what it has done. A change that finds no space is kept by the export and holds no thread.
//!
//! ```text
//!   virtual machine ── socket ── session     what memory, which rings, which features
//!        │                          │ starts and stops
//!   shared memory ──── rings ──── queue ──┬─ fast lane ── Export
//!                                         └─ pool ── slow lane ── Export
//! ```
//!
//! # Whom we trust
//! Nobody within the guest: each index, address and length in shared memory is checked where it is
//! used, after it was copied out of it, and guest memory is only ever copied from and to
//! (`memory`, through vm-memory's volatile slices), never borrowed. A request that makes no sense
//! is answered with an error; a ring that makes no sense is stopped. The virtual machine monitor
//! at the socket is trusted as far as it hands over memory: were it to shorten the memory's file,
//! this process would be killed (SIGBUS), as with any vhost-user server.
//!
//! # What a monitor finds again
//! Requests in flight are noted in memory that the monitor keeps (`inflight`). When this process
//! dies and another takes its place, the requests that were not answered are done again.
//!
//! The layouts come from QEMU's "Vhost-user Protocol" and from "Virtual I/O Device (VIRTIO)
//! Version 1.3", sections 2.7 (split virtqueues) and 5.2 (block device).

mod channel;
mod device;
mod inflight;
mod memory;
mod perform;
mod pool;
mod queue;
mod request;
mod rings;
mod server;
mod session;
mod wire;

pub use server::{Listener, Server};
