//! Locks, atomics and threads of [`crate::parking`], [`crate::pause`], [`crate::client`] and
//! [`crate::changes`]. Their models (`tests/model`) use loom's instead.

pub use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
pub use std::thread;

pub use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};
