//! Models of a connection's thread protocols: loom runs the server's own source files in every
//! order of their steps, within a bound on preemptions. See `vdkit_testkit::loom_sync`.

mod sync {
    pub use vdkit_testkit::loom_sync::{
        AtomicBool, AtomicUsize, Condvar, Mutex, MutexGuard, Ordering,
    };
}

#[path = "../../src/gathered.rs"]
mod gathered;
#[path = "../../src/late.rs"]
mod late;
#[path = "../../src/lead.rs"]
mod lead;

mod committing;
mod leading;
mod replying;
