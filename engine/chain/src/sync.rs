//! Atomics of [`crate::shown_size`]; its model (`tests/model_size`) replaces this module with loom's.

pub use std::sync::atomic::{AtomicU64, Ordering};
