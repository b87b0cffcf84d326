//! NBD: serves an export as a network block device.
//!
//! Source: the NBD project's `doc/proto.md`. Supported: fixed newstyle negotiation with NBD_OPT_GO,
//! INFO and LIST; simple, structured and extended replies; block status for `base:allocation`,
//! `qemu:allocation-depth` and `qemu:dirty-bitmap:NAME`; FUA, trim, write zeroes (fast zero, no
//! hole), cache; many connections to one export, whose flushes cover each other.
//!
//! ```text
//!  server     listening sockets, connections
//!  handshake  chooses export, kind of replies, contexts
//!  session    requests: the leader runs those that need not wait, other threads the rest
//!  lead       which thread leads
//!  commit, gathered   one flush for many replies
//!  kept, late   requests that wait for space, and their replies
//!  changing   what a lost connection may still change, which its successor waits for
//!  read       reads that may block
//!  receiver, buffer   receive buffer, and reusable buffers
//!  reply      sends replies, together
//!  channel, tls, admission   the byte stream
//!  poll       whether to poll for bytes before sleeping
//!  status, contexts   block status
//!  wire       constants and structures
//! ```

mod admission;
mod buffer;
mod changing;
mod channel;
mod commit;
mod contexts;
mod dirty;
mod exports;
mod gathered;
mod handshake;
mod kept;
mod late;
mod lead;
mod poll;
mod read;
mod receiver;
mod reply;
mod server;
mod session;
mod status;
mod sync;
#[cfg(feature = "tls")]
mod tls;
#[cfg(not(feature = "tls"))]
#[path = "without_tls.rs"]
mod tls;
#[allow(missing_docs, reason = "the names are the protocol's own")]
mod wire;

pub use admission::Admission;
pub use exports::Exports;
pub use server::{Address, Listener, Server, ServerOptions};
pub use tls::Tls;
