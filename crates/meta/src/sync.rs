//! The locks and atomics of this crate, in one place: the models in `tests/models` put loom's here.

pub use std::sync::atomic::{AtomicU64, Ordering};

pub use parking_lot::{Mutex, MutexGuard};
