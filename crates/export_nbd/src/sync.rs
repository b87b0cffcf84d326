//! Locks and atomics of [`crate::lead`], [`crate::gathered`] and [`crate::late`]. The models of these
//! modules (`tests/model`) put loom's in their place.

pub use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

pub use parking_lot::{Condvar, Mutex, MutexGuard};
