//! An export of an NBD server as a [`Storage`](vdkit_block::Storage).
//!
//! ```text
//!   nbd://host/export ─► uri ─► client ─► connection ─► [tls] ─► socket
//!                                │ several     │ many requests in flight, each reply
//!                                │             │ straight into its caller's buffer
//!                                └─ lost: connected again, and sent again
//! ```
//!
//! | what | where |
//! |---|---|
//! | names: NBD URIs, and QEMU's old style | `uri` |
//! | negotiation: TLS, structured replies, metadata contexts, block sizes, list of exports | `handshake` |
//! | requests in flight on one connection; which thread reads | `connection` |
//! | replies: each length, offset and type is checked | `reply` |
//! | several connections; reconnection | `client` |
//! | what a flush promises after a connection was lost | `durability` |
//! | the storage: alignment, zeroes, holes by block status | `storage` |
//!
//! # The server is untrusted
//! It cannot make the client allocate more than 8 MiB, write outside of a caller's buffer, or wait for ever:
//! a negotiation has a deadline, and a connection on which nothing moves for ten minutes while a
//! request waits is closed. What a server sends against the protocol ends the connection, with an
//! error that names the export.
//!
//! # What is missing
//! Extended headers (requests above 4 GiB), FAST_ZERO (no caller asks for it), NBD_CMD_CACHE, and
//! resizing, which the protocol lacks.

mod channel;
mod client;
mod connection;
mod durability;
mod failure;
mod handshake;
mod reply;
mod storage;
#[cfg(test)]
mod tests;
#[cfg(feature = "tls")]
mod tls;
#[cfg(not(feature = "tls"))]
#[path = "without_tls.rs"]
mod tls;
mod uri;

pub use client::open_simple;
pub use handshake::{DescribedExport, ExportInfo, ListedExport};
pub use reply::StatusRun;
pub use storage::{BASE_ALLOCATION, NBD, NbdOptions, NbdStorage, describe_exports};
use vdkit_nbd_wire as wire;
/// Transmission flags of an export.
pub use wire::flag;
pub use wire::percent;

pub use uri::{NbdUri, Place, SCHEMES, TlsNames};
