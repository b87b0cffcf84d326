//! vhost-user-blk: serves an export as a virtio disk. Requests are in memory that the virtual
//! machine shares with this process.
//!
//! # The life of a request
//! The guest puts a chain of descriptors into a ring and kicks. The ring's thread (`queue`) takes
//! all available requests, runs those on the non-blocking path itself, puts them back and notifies
//! the guest once. Requests that may block go to a bounded pool of threads ([`vdkit_serve::Pool`]), each of which
//! puts back its own. A change that finds no space is kept by the export and holds no thread.
//!
//! ```text
//!   virtual machine ── socket ── session     memory, rings, features
//!        │                          │ starts and stops
//!   shared memory ──── rings ──── queue ──┬─ non-blocking ─── Export
//!                                         └─ pool ── blocking ── Export
//! ```
//!
//! # Trust
//! The guest is untrusted. Each index, address and length in shared memory is copied out first and
//! then checked. Guest memory is only copied from and to (`memory`, through vm-memory's volatile
//! slices), never borrowed. An invalid request is answered with an error; an invalid ring is
//! stopped. The virtual machine monitor is trusted with respect to the shared memory: if it
//! truncated the memory's file, this process would be killed (SIGBUS), as with any vhost-user
//! server.
//!
//! # Recovery
//! Requests in flight are recorded in memory that the monitor keeps (`inflight`). If this process
//! dies, its successor repeats the unanswered requests.
//!
//! The layouts come from QEMU's "Vhost-user Protocol" and from "Virtual I/O Device (VIRTIO) Version
//! 1.3", sections 2.7 (split virtqueues) and 5.2 (block device).

mod channel;
mod device;
mod inflight;
mod memory;
mod perform;
mod queue;
mod request;
mod rings;
mod server;
mod session;
mod wire;

pub use server::{Listener, Server, ServerOptions};
