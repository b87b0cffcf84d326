//! Locks and atomics of [`crate::lead`], [`crate::gathered`] and [`crate::late`]. Their models
//! (`tests/model`) use loom's instead.

pub use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

pub use parking_lot::{Condvar, Mutex, MutexGuard};
