//! Bytes that come or go in order: pipes, compressed files, HTTP.
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
//! A [`ByteStream`] is read once. [`InPipe`] makes it a storage for readers that come in any order
//! of threads but ask for every byte once: each waits until those before it have theirs. Only
//! formats that must be read here and there need a [`spool`].

mod checksum;
mod http;
mod in_pipe;
mod out_pipe;
mod spool;
mod stdin;
mod unpack;

pub use checksum::{Checked, Checksum, HashMethod, Hasher};
pub use http::{HttpStorage, Remote, is_url, open_url};
pub use in_pipe::InPipe;
pub use out_pipe::OutPipe;
pub use spool::spool;
pub use stdin::Stdin;
pub use unpack::{ByteStream, Packing, StorageReader};
