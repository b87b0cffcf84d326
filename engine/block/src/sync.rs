//! The atomics of [`crate::InFlight`]; its loom model (`vdkit-meta`, `tests/models`) replaces them.

pub use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
