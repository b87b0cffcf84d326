//! Models of what the threads of one connection agree on: the server's own source files, run by loom
//! in every order of their steps that a bound on preemptions allows. See `vdkit_testkit::loom_sync`.

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
