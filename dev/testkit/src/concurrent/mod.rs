//! Several clients use one disk at once, and the power fails, or calls of its storages do.
//!
//! ```text
//!   clients 2..16        administrator             what is recorded
//!   write, zero,         snapshots, bitmaps,       each call: when it began and ended, what it
//!   discard, flush       other sizes               was answered, the storages' changes by then
//!        └────────┬───────────┘
//!               Disk, in a cache mode
//!                 │
//!          FaultyStorage ─ CrashStorage            each change, of all files in one order
//! ```
//!
//! Afterwards [`Run::cut`] chooses moments of the record. What may survive each of them is opened,
//! checked, and compared with the history: a sector holds the last write that was acknowledged as
//! durable, or one that began after that one or beside it.

pub mod admin;
pub mod clients;
mod cut;
pub mod endurance;
pub mod history;
pub mod shape;

pub use cut::{CACHES, Plan, Recording, Run, Survival, Verdict, go_on};
