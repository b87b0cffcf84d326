//! Durability of metadata, shared by the writable formats: group commit by sequence numbers.
//!
//! # The life of a durable write
//!
//! ```text
//!   client        disk (chain)             format                engine              storage
//!     │ write ──────►│ reserve ─────────────►│ space, ticket ─────► [Tickets]             │
//!     │              │ data ────────────────────────────────────────────────────────────►│
//!     │              │ publish ─────────────►│ entry changes in memory                   │
//!     │              │                       │ old space ──────────► [Reclaim]: unlinked │
//!     │              │ flush ────────────────────────────────────► [Commit]: draw n      │
//!     │              │                       │                     lead, or wait for n   │
//!     │              │                       │◄── take: copies of dirty pages            │
//!     │              │                       │◄── write: group, barrier, group ─────────►│ sync
//!     │              │                       │◄── end_write: pages are clean             │
//!     │              │                       │                     unlinked → released   │
//!     │              │                       │◄── recycle: frees unused space            │
//!     │◄─ completed ─│◄──────────────────────────── all up to n is durable               │
//! ```
//!
//! A [`Metadata`] format supplies its dirty pages and their barriers. [`Engine`] does the rest for
//! all formats. [`PageCache`] keeps the pages of a map, dirty ones until a flush has ended.
//! [`Syncs`] groups the syncs of a file in the same way (`vdkit-storage`).
//!
//! The protocols are model-checked: see `tests/models`.

mod commit;
mod engine;
mod pages;
mod reclaim;
mod sync;
mod syncs;
mod tickets;

pub use commit::{Commit, Lead};
pub use engine::{Engine, Metadata, State};
pub use pages::PageCache;
pub use reclaim::{Freed, Reclaim, Stamped};
pub use sync::MutexGuard;
pub use syncs::{LANES_MAX, SyncError, Syncs};
pub use tickets::Tickets;
