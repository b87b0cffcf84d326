//! The atomics of [`crate::InFlight`], in one place: its model (`vdkit-meta`, `tests/models`) puts
//! loom's here.

pub use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
