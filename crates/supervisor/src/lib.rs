//! Another program's system calls, answered by this one: for tests and benchmarks only.
//!
//! The kernel stops a thread of the program at a chosen system call, passes the call to its
//! *supervisor* and waits for an answer (seccomp user notification, `seccomp_unotify(2)`). The
//! program may be any: `vdkit`, which is linked statically, or `qemu-nbd`. It needs no rights but
//! those of an ordinary user, and it works on any file system.
//!
//! ```text
//!  program ── fdatasync ─► kernel ─► Listener::receive ─► Listener::proceed │ answer
//!            pwritev2                    (this process)
//!
//!  filter      which calls are passed on, which are refused
//!  listener    one call after the other
//!  spawn       starts a program under a filter
//!  slow_syncs  syncs that take as long as on a slow device
//! ```
//!
//! # Why not a FUSE file system
//!
//! The kernel holds a file's lock while a FUSE server answers a sync of that file (`fuse_fsync` in
//! `fs/fuse/file.c`). So on FUSE the syncs of one file run one after the other, and no write to the
//! file runs beside a sync. On a device they do, and a group commit stands on that. Each write to
//! FUSE also costs a round trip to the server, which would hide what is measured. A supervised
//! program keeps no lock while it waits for the supervisor, and calls that are not passed on cost
//! what they always cost.

mod filter;
mod listener;
mod slow_syncs;
mod spawn;

pub use filter::{Filter, SYNC_FLAGS};
pub use listener::{Call, Listener, Ready};
pub use slow_syncs::{SlowSyncs, Supervised};
pub use spawn::spawn;
