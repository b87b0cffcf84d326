//! Locks and atomics of [`crate::lead`] and [`crate::gathered`]. The models of these two modules
//! (`tests/model`) put loom's in their place.

pub use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

pub use parking_lot::{Mutex, MutexGuard};
