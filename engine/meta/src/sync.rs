//! The locks and atomics of this crate, in one place, and the grace periods that it stands on: the
//! models in `tests/models` put loom's here.

pub use std::sync::atomic::{AtomicU64, Ordering};

pub use parking_lot::{Condvar, Mutex, MutexGuard};
pub use vdkit_block::{InFlight, Stamp};
