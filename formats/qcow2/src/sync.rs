//! The locks and atomics of [`crate::slices`], in one place: its model (`tests/model`) puts loom's
//! here.

pub use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub use parking_lot::RwLock;
