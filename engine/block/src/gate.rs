//! Lets a change of an image run alone: it waits until all requests have ended, and new ones wait for it.
//!
//! Some formats move blocks and tables when they are resized or closed. A request holds what it
//! resolved or reserved before, so it must not be under way then. It enters the gate once, before it
//! asks the format anything, and leaves it after its last I/O. The format closes the gate before it
//! takes a lock of its own.
//!
//! No wait is circular. A request that is inside never waits at this gate: a thread that is inside
//! enters again at once, also while a change waits. The change waits for the requests inside, and
//! holds no lock of the format meanwhile.
//!
//! The bit that closes the gate and the count of requests are one atomic number. So either the
//! request sees the bit, or the change sees the request.

use std::cell::RefCell;
use std::marker::PhantomData;

use crate::sync::{AtomicUsize, Condvar, Mutex, Ordering, thread_local};

/// In [`Gate::state`]: a change is alone, or waits for that. The other bits count guards.
const CLOSED: usize = 1 << (usize::BITS - 1);

thread_local! {
    /// Addresses of the gates that this thread is inside of, once for each guard.
    static HERE: RefCell<Vec<usize>> = RefCell::default();
}

/// The gate of an image; see the module's documentation.
#[derive(Debug, Default)]
pub struct Gate {
    state: AtomicUsize,
    /// Held while the gate is closed or opened and while a thread decides to wait, so that no
    /// wake-up is lost. Never held by a request or a change that runs.
    changing: Mutex<()>,
    /// The last request has left, or the gate was opened.
    changed: Condvar,
}

/// Proof that a request is inside a gate; dropping it ends the request. It stays on its thread.
#[derive(Debug)]
#[must_use = "the request ends when the guard is dropped"]
pub struct Inside<'a> {
    gate: &'a Gate,
    /// Not `Send`: the thread is noted.
    _here: PhantomData<*const ()>,
}

/// Proof that no request is inside a gate; dropping it lets requests in again.
#[derive(Debug)]
#[must_use = "requests run again when the guard is dropped"]
pub struct Alone<'a> {
    gate: &'a Gate,
}

impl Gate {
    /// Begins a request. Waits while a change is alone or waits for that, unless this thread is
    /// inside already.
    pub fn enter(&self) -> Inside<'_> {
        loop {
            if let Some(inside) = self.try_enter() {
                return inside;
            }
            self.changed.wait_while(&mut self.changing.lock(), |_| self.is_closed());
        }
    }

    /// [`Gate::enter`] without waiting; `None` if it would wait.
    pub fn try_enter(&self) -> Option<Inside<'_>> {
        let again = self.is_inside();
        // Acquires what the last change did.
        if self.state.fetch_add(1, Ordering::AcqRel) & CLOSED != 0 && !again {
            self.leave();
            return None;
        }
        // Without its note (while the thread ends), a request inside this one counts as a new one.
        let _ = HERE.try_with(|gates| gates.borrow_mut().push(self.address()));
        Some(Inside { gate: self, _here: PhantomData })
    }

    /// Whether this thread is inside.
    pub fn is_inside(&self) -> bool {
        HERE.try_with(|gates| gates.borrow().contains(&self.address())).unwrap_or(false)
    }

    /// Waits until no request and no other change is inside; new requests wait until the guard is
    /// dropped. The calling thread must not be inside, nor hold what a request may wait for.
    pub fn close(&self) -> Alone<'_> {
        debug_assert!(!self.is_inside(), "this thread would wait for itself");
        let mut changing = self.changing.lock();
        self.changed.wait_while(&mut changing, |_| self.is_closed());
        self.state.fetch_or(CLOSED, Ordering::AcqRel);
        // Acquires what each request did before it left.
        self.changed.wait_while(&mut changing, |_| self.state.load(Ordering::Acquire) != CLOSED);
        Alone { gate: self }
    }

    fn is_closed(&self) -> bool {
        self.state.load(Ordering::Acquire) & CLOSED != 0
    }

    fn leave(&self) {
        if self.state.fetch_sub(1, Ordering::AcqRel) == CLOSED + 1 {
            // The change has either not decided to wait yet, or waits: see `changing`.
            drop(self.changing.lock());
            self.changed.notify_all();
        }
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let _ = HERE.try_with(|gates| {
            let mut gates = gates.borrow_mut();
            if let Some(place) = gates.iter().rposition(|gate| *gate == self.gate.address()) {
                gates.swap_remove(place);
            }
        });
        self.gate.leave();
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        let changing = self.gate.changing.lock();
        self.gate.state.fetch_and(!CLOSED, Ordering::AcqRel);
        drop(changing);
        self.gate.changed.notify_all();
    }
}
