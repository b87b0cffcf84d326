//! loom's locks and atomics with the shapes of `parking_lot` and `std`: model checking of protocols.
//!
//! A model is an ordinary integration test. It includes the source file of the protocol itself and
//! gives it this module in the place of the crate's own `sync`, so that no second build of the crate
//! is needed:
//!
//! ```text
//! mod sync {
//!     pub use vdkit_testbase::loom_sync::*;
//! }
//! #[path = "../../src/lead.rs"]
//! mod lead; // says `use crate::sync::{AtomicUsize, Mutex, Ordering};`
//!
//! #[test]
//! fn a_property() {
//!     vdkit_testbase::loom_sync::check(2, || { /* threads by `thread::spawn`, assertions */ });
//! }
//! ```
//!
//! loom runs the closure once for every order of the threads' steps that the bound allows, and for
//! every value that a load may see. It finds deadlocks by itself. It runs at most five threads, the
//! closure's own included.
//!
//! loom treats a `SeqCst` access as an acquire-release one. The atomics here put a `SeqCst` fence
//! before and after each `SeqCst` access instead. That is at least as strong as the language's
//! `SeqCst`; it is stronger where such an access shall order weaker accesses around it, so protocols
//! should not mix the two.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use loom::sync as model;
pub use loom::sync::Arc;
pub use loom::sync::atomic::Ordering;
use loom::sync::atomic::fence;
pub use loom::thread;
pub use loom::thread_local;

/// Runs a model in every order of steps with at most `preemptions` preemptions.
///
/// # Panics
/// With what the model panics with; on deadlocks.
pub fn check(preemptions: usize, body: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(body);
}

const SOUND: &str = "a model ends at its first panic";

/// `parking_lot::Mutex`.
#[derive(Debug)]
pub struct Mutex<T>(model::Mutex<T>);

/// `parking_lot::MutexGuard`.
pub struct MutexGuard<'a, T>(Option<model::MutexGuard<'a, T>>);

impl<T> Mutex<T> {
    /// An unlocked one.
    pub fn new(value: T) -> Self {
        Self(model::Mutex::new(value))
    }

    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(Some(self.0.lock().expect(SOUND)))
    }
}

impl<T: Default> Default for Mutex<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.0.as_ref().expect("taken only while its thread waits")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("taken only while its thread waits")
    }
}

impl<T: fmt::Debug> fmt::Debug for MutexGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// `parking_lot::Condvar`. No wait times out, since loom has no time.
#[derive(Debug)]
pub struct Condvar(model::Condvar);

impl Condvar {
    /// One without waiting threads.
    pub fn new() -> Self {
        Self(model::Condvar::new())
    }

    /// Gives the lock back, waits, and takes it again.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let held = guard.0.take().expect("one thread has the guard");
        guard.0 = Some(self.0.wait(held).expect(SOUND));
    }

    /// As [`Condvar::wait`]: a thread that relies on the time limit waits for ever.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _limit: Duration) {
        self.wait(guard);
    }

    /// Gives the lock back and waits for as long as `condition` holds.
    pub fn wait_while<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        mut condition: impl FnMut(&mut T) -> bool,
    ) {
        while condition(guard) {
            self.wait(guard);
        }
    }

    /// Wakes all threads.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

impl Default for Condvar {
    fn default() -> Self {
        Self::new()
    }
}

/// `parking_lot::RwLock`.
#[derive(Debug)]
pub struct RwLock<T>(model::RwLock<T>);

impl<T> RwLock<T> {
    /// An unlocked one.
    pub fn new(value: T) -> Self {
        Self(model::RwLock::new(value))
    }

    /// Waits for writers.
    pub fn read(&self) -> model::RwLockReadGuard<'_, T> {
        self.0.read().expect(SOUND)
    }

    /// Waits for readers and writers.
    pub fn write(&self) -> model::RwLockWriteGuard<'_, T> {
        self.0.write().expect(SOUND)
    }
}

impl<T: Default> Default for RwLock<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

/// Runs an access between two fences where it is sequentially consistent.
fn fenced<R>(order: Ordering, access: impl FnOnce() -> R) -> R {
    if order != Ordering::SeqCst {
        return access();
    }
    fence(Ordering::SeqCst);
    let result = access();
    fence(Ordering::SeqCst);
    result
}

/// What each load of an atomic passes first. loom compares a write with only the last access to its
/// location: had the writer loaded it itself, the loads of other threads before that were forgotten, and
/// their order with the write was never changed. A gate makes loom change the order of loads, too. It
/// orders no memory.
#[derive(Debug, Default)]
struct Gate(model::atomic::AtomicUsize);

impl Gate {
    fn pass(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

macro_rules! atomic {
    ($name:ident, $value:ty, $($operation:ident),*) => {
        /// The atomic of this name in `std`.
        #[derive(Debug)]
        pub struct $name(model::atomic::$name, Gate);

        impl $name {
            /// One with this value.
            pub fn new(value: $value) -> Self {
                Self(model::atomic::$name::new(value), Gate::default())
            }

            /// The value.
            pub fn load(&self, order: Ordering) -> $value {
                self.1.pass();
                fenced(order, || self.0.load(order))
            }

            /// Another value.
            pub fn store(&self, value: $value, order: Ordering) {
                fenced(order, || self.0.store(value, order));
            }

            /// Another value where it is `current`.
            ///
            /// # Errors
            /// The value where it is not.
            pub fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                fenced(success, || self.0.compare_exchange(current, new, success, failure))
            }

            $(
                /// Returns the former value.
                pub fn $operation(&self, value: $value, order: Ordering) -> $value {
                    fenced(order, || self.0.$operation(value, order))
                }
            )*
        }

        impl Default for $name {
            fn default() -> Self {
                Self::new(<$value>::default())
            }
        }
    };
}

atomic!(AtomicBool, bool, swap, fetch_and, fetch_or);
atomic!(AtomicI64, i64, swap, fetch_add, fetch_sub, fetch_and, fetch_or);
atomic!(AtomicU64, u64, swap, fetch_add, fetch_sub, fetch_min, fetch_and, fetch_or);
atomic!(AtomicUsize, usize, swap, fetch_add, fetch_sub, fetch_and, fetch_or);

#[cfg(test)]
mod tests {
    use super::*;

    /// Each of two threads stores to its own flag and reads the other's: sequential consistency
    /// forbids that both read the old value, acquire and release allow it.
    fn both_may_read_old_values(order: Ordering) {
        let [store, load] = match order {
            Ordering::SeqCst => [Ordering::SeqCst; 2],
            _ => [Ordering::Release, Ordering::Acquire],
        };
        check(2, move || {
            let flags = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
            let other = flags.clone();
            let thread = thread::spawn(move || {
                other[0].store(true, store);
                other[1].load(load)
            });
            flags[1].store(true, store);
            let here = flags[0].load(load);
            assert!(thread.join().unwrap() || here, "both read the old value");
        });
    }

    #[test]
    fn sequential_consistency_is_modelled() {
        both_may_read_old_values(Ordering::SeqCst);
    }

    #[test]
    #[should_panic(expected = "both read the old value")]
    fn less_than_that_is_seen_to_be_less() {
        both_may_read_old_values(Ordering::Relaxed);
    }

    #[test]
    #[should_panic(expected = "a write came between")]
    fn a_write_by_who_has_read_before_is_seen() {
        check(2, || {
            let flags = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
            let other = flags.clone();
            let thread = thread::spawn(move || {
                assert!(!other[0].load(Ordering::Acquire) && !other[1].load(Ordering::Acquire));
                other[0].store(true, Ordering::Release);
                other[1].store(true, Ordering::Release);
            });
            let [first, second] = [0, 1].map(|at| flags[at].load(Ordering::Acquire));
            assert!(first || !second, "a write came between");
            thread.join().unwrap();
        });
    }

    #[test]
    fn a_wait_gives_the_lock_back() {
        check(3, || {
            let pair = Arc::new((Mutex::new(0), Condvar::new()));
            let other = pair.clone();
            let thread = thread::spawn(move || {
                *other.0.lock() += 1;
                other.1.notify_all();
            });
            let mut value = pair.0.lock();
            pair.1.wait_while(&mut value, |value| *value == 0);
            assert_eq!(*value, 1);
            drop(value);
            thread.join().unwrap();
        });
    }

    #[test]
    #[should_panic(expected = "deadlock")]
    fn a_wait_without_a_wake_up_is_a_deadlock() {
        check(3, || {
            let pair = Arc::new((Mutex::new(0), Condvar::new()));
            let other = pair.clone();
            thread::spawn(move || *other.0.lock() += 1);
            let mut value = pair.0.lock();
            pair.1.wait_while(&mut value, |value| *value == 0);
        });
    }
}
