//! Reservations that are neither published nor released, and the guest ranges that they hold.
//!
//! Two reservations never hold the same unit of the guest disk, unless the format allows it (see
//! [`Tickets::find`]). A thread that needs a held range waits for [`crate::Engine::ended`].

use std::ops::Range;

use rustc_hash::FxHashMap;
use vdkit_block::Ticket;

/// The open reservations of an image; `P` is the format's data of each.
#[derive(Debug)]
pub struct Tickets<P> {
    open: FxHashMap<Ticket, (Range<u64>, P)>,
    next: u64,
}

impl<P> Default for Tickets<P> {
    fn default() -> Self {
        Self { open: FxHashMap::default(), next: 0 }
    }
}

impl<P> Tickets<P> {
    /// Opens a reservation that holds a range.
    pub fn open(&mut self, held: Range<u64>, pending: P) -> Ticket {
        let ticket = Ticket(self.next);
        self.next += 1;
        self.open.insert(ticket, (held, pending));
        ticket
    }

    /// The range and the data of an open reservation.
    ///
    /// # Panics
    /// If it was closed before: a ticket is published or released once.
    pub fn get(&self, ticket: Ticket) -> &(Range<u64>, P) {
        self.open.get(&ticket).expect("a ticket lives until it is published or released")
    }

    /// Ends a reservation. The caller then calls [`crate::Engine::ended`].
    ///
    /// # Panics
    /// As [`Tickets::get`].
    pub fn close(&mut self, ticket: Ticket) -> (Range<u64>, P) {
        self.open.remove(&ticket).expect("a ticket lives until it is published or released")
    }

    /// Whether no reservation is open.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// All open reservations.
    pub fn iter(&self) -> impl Iterator<Item = &(Range<u64>, P)> {
        self.open.values()
    }

    /// Whether a reservation holds a part of a range.
    pub fn overlap(&self, range: &Range<u64>) -> bool {
        self.iter().any(|(held, _)| held.start < range.end && range.start < held.end)
    }

    /// The end of the part of `range` that no reservation holds; `None` if its first unit, which
    /// contains `at`, is held. Considers only reservations for which `counts` is true.
    pub fn find(&self, range: &Range<u64>, at: u64, counts: impl Fn(&P) -> bool) -> Option<u64> {
        let held = self.iter().filter(|(_, pending)| counts(pending)).map(|(held, _)| held);
        let nearest = held
            .filter(|held| held.end > range.start && held.start < range.end)
            .map(|held| held.start)
            .min();
        match nearest {
            None => Some(range.end),
            Some(other) if other > at => Some(range.end.min(other)),
            Some(_) => None,
        }
    }

    /// The current moment, for [`Tickets::all_ended_before`].
    pub fn moment(&self) -> u64 {
        self.next
    }

    /// Whether all reservations that were open at a moment have ended.
    pub fn all_ended_before(&self, moment: u64) -> bool {
        self.open.keys().all(|ticket| ticket.0 >= moment)
    }
}
