//! Locks and atomics of [`crate::InFlight`] and [`crate::Gate`]; their loom models (`vdkit-meta`,
//! `tests/models`) replace them.

pub use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
pub use std::thread_local;

pub use parking_lot::{Condvar, Mutex};
