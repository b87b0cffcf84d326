//! What every server of a disk shares.
//!
//! An [`Export`] is one disk that is being served: by NBD, vhost-user or FUSE, or several of them
//! at once. It knows nothing of any protocol.
//!
//! # Two lanes
//! A front asks first for the *fast lane* ([`Export::read_ready`], [`Export::write_ready`]): the
//! request is done at once where it waits for no disk. Whatever it declines goes to the *slow lane*
//! ([`Export::read`], [`Requests::write`] …), which may block, on a thread of a bounded number.
//!
//! A front that commits many durable writes with one flush does them by
//! [`Export::write_unsettled_ready`], calls [`Export::flush`], and answers all of them then.
//!
//! # A full disk
//! With [`OnNoSpace::Pause`] a change that found no space is kept ([`Export::keep`]):
//! it owns its bytes and what to call when it is done, holds no thread, and is tried again when
//! space may have returned. The guest sees a slow disk. See `parking`.
//!
//! # A client that leaves
//! What waits or takes long is done for a [`Client`], and given up when that one leaves: a client
//! that comes again must not find its own new writes overwritten by old ones. See `client`.
//!
//! # Changing the disk under the clients
//! Each request holds the export's disk for as long as it runs. [`Export::alone`] waits for those
//! under way and keeps new ones waiting: for snapshots, bitmaps, and for another size.
//!
//! [`Export::exchange`] puts another disk in its place: an overlay on top, or the image beneath once
//! it holds what the top one does. Who copies the disk while clients write to it lets changes be
//! marked in a [`ChangeMap`]. What opens images for that stands above ([`Images`]); one such job
//! runs at a time ([`Export::begin_job`]).

mod bitmaps;
mod changes;
mod client;
mod control;
mod counters;
mod export;
mod images;
mod job;
mod metrics;
mod parking;
mod requests;
mod scrape;
mod socket;

pub use bitmaps::BitmapList;
pub use changes::ChangeMap;
pub use client::Client;
pub use control::{Answer, Command, Control, Controller, Status, ask};
pub use counters::{Counters, Histogram, LatencyBucket, OpKind, OpStats, Stats, quantile};
pub use export::{Change, Done, Export, ExportOptions, Held, OnNoSpace, Served, Written};
pub use images::{Committed, ImageChain, Images};
pub use job::{Job, JobStatus};
pub use parking::{Claim, ParkedInfo};
pub use requests::Requests;
pub use scrape::{Scrape, ScrapeAddress};
pub use socket::{ACCEPT_PAUSE, Access, UnixSocket, Wake};
