//! Locks, atomics and grace periods of this crate; the models in `tests/models` replace this module
//! with loom's.

pub use std::sync::atomic::{AtomicU64, Ordering};

pub use parking_lot::{Condvar, Mutex, MutexGuard};
pub use vdkit_block::{InFlight, Stamp};
