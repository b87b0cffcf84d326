//! Storages of vdkit: host files, devices and memory.
//!
//! Everything here implements [`vdkit_block::Storage`]:
//!
//! - [`FileStorage`]: regular files and block devices, buffered or direct, with the cache modes
//!   of [`vdkit_block::CacheMode`] and QEMU's image locks ([`LockMode`]).
//! - [`MemoryStorage`]: sparse memory.
//!
//! [`PendingFile`] is a file that gets its name only when it is finished.
//!
//! # The life of a write to a file
//!
//! ```text
//!   write_at ──► buffered? ──► pwrite
//!                   │ no (O_DIRECT)
//!                   ├─ offset, length and memory aligned ──► pwrite
//!                   └─ else: range lock ─► read the blocks at the edges into a bounce buffer
//!                            ─► overlay the bytes ─► pwrite ─► truncate the file to
//!                            the exact length if the last block passed its end
//! ```
//!
//! # Invariants
//!
//! | what | where |
//! |---|---|
//! | no two processes write one image | `lock` |
//! | two unaligned direct writes to one block both survive | `range_lock` |
//! | growing by `ftruncate` never cuts off a write that grew the file further | `FileStorage::growth` |
//! | a failed `fdatasync` stays failed, for all its waiters | `FileStorage::syncs` |
//!
//! `unsafe` is confined to `sys` (ioctls, locks and mappings without a safe wrapper) and `ring`
//! (io_uring).

mod access;
mod batch;
mod buffer;
mod cache_overflow;
mod copy;
mod direct;
mod file;
mod held;
mod in_place;
mod initial_write;
mod links;
mod lock;
mod memory;
pub mod mounts;
mod open;
mod pending;
mod placement;
mod range_lock;
mod read_discard;
mod removal;
mod ring;
mod space;
mod sys;

pub use buffer::AlignedBuf;
pub use file::{FileStorage, open_current};
pub use links::folder_of;
pub use lock::LockMode;
pub use memory::MemoryStorage;
pub use open::{CacheShare, CreateMode, FileKind, FileOptions, classify};
pub use pending::{CommitOptions, PendingFile, is_abandoned, unfinished_name};
pub use placement::Placement;
pub use removal::PendingRemoval;
