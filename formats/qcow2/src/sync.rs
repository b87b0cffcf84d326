//! Locks and atomics of [`crate::slices`] and of the bits of bitmaps; their models (`tests/model`)
//! replace this module with loom's.

pub use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub use parking_lot::RwLock;
