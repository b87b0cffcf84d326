//! Intercepts another program's system calls; for tests and benchmarks only.
//!
//! The kernel stops a thread of the program at a selected system call, passes the call to its
//! *supervisor* and waits for an answer (seccomp user notification, `seccomp_unotify(2)`). This
//! works with any program, such as `vdkit` or `qemu-nbd`, on any file system, and needs no
//! privileges.
//!
//! ```text
//!  program ── fdatasync ─► kernel ─► Listener::receive ─► Listener::proceed │ answer
//!            pwritev2                    (this process)
//!
//!  filter      selects calls to pass on or refuse
//!  listener    receives and answers calls
//!  spawn       starts a program under a filter
//!  slow_syncs  delays syncs as a slow device does
//! ```
//!
//! # Why not a FUSE file system
//!
//! The kernel holds a file's lock while a FUSE server answers a sync of that file (`fuse_fsync` in
//! `fs/fuse/file.c`). So on FUSE the syncs of one file run one after the other, and no write to the
//! file runs during a sync. On a device they do, which a group commit depends on. Each write to
//! FUSE also costs a round trip to the server, which would distort measurements. A supervised
//! program holds no lock while it waits for the supervisor, and calls that are not passed on have
//! no overhead.

mod filter;
mod listener;
mod slow_syncs;
mod spawn;

pub use filter::{Filter, SYNC_FLAGS};
pub use listener::{Call, Listener, Ready};
pub use slow_syncs::{SlowSyncs, Supervised};
pub use spawn::spawn;
