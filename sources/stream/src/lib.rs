//! Sequential byte streams: pipes, compressed files, HTTP (feature `http`).
//!
//! ```text
//!   stdin ───────────────────────────────┐
//!   file.gz, .xz, .zst ─► [checksum] ─► unpack ─► ByteStream ─┬─► InPipe (raw: read once, in order)
//!   http(s), no ranges ──────────────────┘                    └─► spool (an unnamed file: any format)
//!   http(s), ranges ─► HttpStorage: blocks by several connections, resumed ─► any format in place
//!
//!   raw, formats written in one pass ─► OutPipe ─► stdout
//! ```
//!
//! A [`ByteStream`] is read once. [`InPipe`] makes it a storage for threads that together read
//! every byte once, in any order: each waits for the bytes before its own. Only formats that need
//! random access need a [`spool`].

mod checksum;
#[cfg(feature = "http")]
mod http;
mod in_pipe;
mod out_pipe;
mod spool;
mod stdin;
mod stdout;
mod unpack;

pub use checksum::{Checked, Checksum, HashMethod, Hasher};
#[cfg(feature = "http")]
pub use http::{HttpStorage, Remote, is_url, open_url};
pub use in_pipe::InPipe;
pub use out_pipe::OutPipe;
pub use spool::spool;
pub use stdin::Stdin;
pub use stdout::Stdout;
pub use unpack::{ByteStream, Packing, StorageReader};
