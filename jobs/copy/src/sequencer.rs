//! Orders the results of parallel work.

use parking_lot::{Condvar, Mutex};

/// Lets holders of consecutive numbers proceed in order.
#[derive(Debug, Default)]
pub(crate) struct Sequencer {
    state: Mutex<State>,
    moved: Condvar,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    aborted: bool,
}

impl Sequencer {
    /// Waits for the turn of `number`; `false` if the work was aborted.
    pub(crate) fn wait(&self, number: u64) -> bool {
        let mut state = self.state.lock();
        while state.next != number && !state.aborted {
            self.moved.wait(&mut state);
        }
        !state.aborted
    }

    /// Ends the turn of `number`.
    pub(crate) fn done(&self, number: u64) {
        let mut state = self.state.lock();
        debug_assert!(state.next == number || state.aborted);
        state.next = number + 1;
        drop(state);
        self.moved.notify_all();
    }

    /// Aborts the work and wakes all waiters.
    pub(crate) fn abort(&self) {
        self.state.lock().aborted = true;
        self.moved.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_in_order_from_any_threads() {
        let turns = Sequencer::default();
        let seen = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for first in 0..4u64 {
                let (turns, seen) = (&turns, &seen);
                scope.spawn(move || {
                    for number in (first..64).step_by(4) {
                        assert!(turns.wait(number));
                        seen.lock().push(number);
                        turns.done(number);
                    }
                });
            }
        });
        assert_eq!(*seen.lock(), (0..64).collect::<Vec<_>>());
    }

    #[test]
    fn giving_up_wakes_who_waits() {
        let turns = Sequencer::default();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| turns.wait(5));
            turns.abort();
            assert!(!waiter.join().unwrap());
        });
    }
}
