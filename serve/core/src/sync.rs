//! Locks, atomics and threads of [`crate::parking`], [`crate::pause`] and [`crate::client`]. Their
//! models (`tests/model`) use loom's instead.

pub use std::sync::atomic::{AtomicBool, Ordering};
pub use std::thread;

pub use parking_lot::{Condvar, Mutex, MutexGuard};
