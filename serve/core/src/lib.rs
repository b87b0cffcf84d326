//! The common part of all servers of a disk.
//!
//! An [`Export`] is one served disk: over NBD, vhost-user or FUSE, or several of them at once. It
//! is independent of any protocol.
//!
//! # Two paths
//! A server first tries the *non-blocking path* ([`Export::read_ready`], [`Export::write_ready`]):
//! the request is served at once if it need not wait for a disk. Otherwise it goes to the *blocking
//! path* ([`Export::read`], [`Requests::write`] …), which may block, on a thread of a bounded pool.
//!
//! A server that commits many durable writes with one flush writes them by
//! [`Export::write_unsettled_ready`], calls [`Export::flush`], and then answers all of them.
//!
//! # A full disk
//! With [`OnNoSpace::Pause`] a change that found no space is kept ([`Export::keep`]): it owns its
//! bytes and its completion callback, holds no thread, and is retried when space may be available.
//! The guest sees a slow disk. See `parking`.
//!
//! # A client that leaves
//! Waiting or long requests belong to a [`Client`] and are dropped when it leaves: old writes must
//! not overwrite the new writes of a client that reconnects. See `client`.
//!
//! # Changing the disk under the clients
//! Each request locks the export's disk while it runs. [`Export::alone`] waits for running requests
//! and blocks new ones: for snapshots, bitmaps, and resizing.
//!
//! [`Export::exchange`] replaces the disk: by an overlay on top, or by the backing image once it
//! holds the top image's data. A job that copies the disk while clients write tracks changes in a
//! [`ChangeMap`]. The layer above opens images ([`Images`]); one such job runs at a time
//! ([`Export::begin_job`]).

mod backoff;
mod bitmaps;
mod change;
mod changes;
#[cfg(test)]
mod changes_tests;
mod client;
mod control;
mod counters;
mod descriptors;
mod export;
mod images;
mod job;
mod metrics;
mod parking;
mod pause;
mod pool;
mod requests;
mod scrape;
mod socket;
mod sync;

pub use backoff::SlowWriteBackoff;
pub use bitmaps::BitmapList;
pub use change::{Change, Done};
pub use changes::ChangeMap;
pub use client::Client;
pub use control::{Answer, Command, Control, Controller, Status, ask};
pub use counters::{Counters, Histogram, LatencyBucket, OpKind, OpStats, Stats, quantile};
pub use descriptors::raise_descriptor_limit;
pub use export::{Export, ExportOptions, Held, OnNoSpace, Served, Written};
pub use images::{Committed, ImageChain, Images};
pub use job::{Job, JobStatus};
pub use parking::{Claim, ParkedInfo};
pub use pool::Pool;
pub use requests::Requests;
pub use scrape::{Scrape, ScrapeAddress};
pub use socket::{ACCEPT_PAUSE, Access, UnixSocket, Wake, Worker, peer_has_left};
