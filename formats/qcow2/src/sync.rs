//! Locks and atomics of [`crate::slices`]; its model (`tests/model`) replaces this module with
//! loom's.

pub use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub use parking_lot::RwLock;
