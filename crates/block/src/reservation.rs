//! Host space that is promised to a write but not yet visible to the guest.

use std::ops::Range;

use crate::error::Result;
use crate::extent::FileIndex;
use crate::units::HostOffset;

/// What the caller must put around its own bytes before it publishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Nothing: the bytes there already read as they must.
    Ready,
    /// Zeroes.
    Zero,
    /// What the guest reads there now, through the whole chain (read it before publishing).
    Copy,
}

/// A format's private handle of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(pub u64);

/// The format's side of a reservation.
pub trait Reserver {
    /// Makes a reservation visible to the guest.
    fn publish(&self, ticket: Ticket) -> Result<()>;
    /// Gives a reservation's space back.
    fn release(&self, ticket: Ticket);
}

/// Host space for a write, to be filled by the caller and then published.
///
/// `guest` is widened from the caller's bytes to the format's granularity. The caller writes
/// `head` to `guest.start..write.start`, its bytes to `write`, `tail` to `write.end..guest.end`
/// and publishes. Dropping the reservation instead gives the space back and changes nothing for
/// the guest.
#[must_use = "dropping a reservation gives its space back"]
pub struct Reservation<'a> {
    owner: &'a dyn Reserver,
    ticket: Ticket,
    /// The widened guest range, in bytes.
    pub guest: Range<u64>,
    /// The part of it that the caller asked for; it may end before what was asked.
    pub write: Range<u64>,
    /// The storage that holds the space.
    pub file: FileIndex,
    /// Host offset of `guest.start`; the space is contiguous.
    pub host: HostOffset,
    /// What goes before `write`.
    pub head: Fill,
    /// What goes after `write`.
    pub tail: Fill,
    /// The space reads as zero: zeroes among the caller's own bytes need not be written.
    pub zeroed: bool,
    /// Nothing was ever written to the space (which in an encrypted image does not read as zero).
    pub untouched: bool,
    published: bool,
}

impl<'a> Reservation<'a> {
    /// Made by formats only.
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        owner: &'a dyn Reserver,
        ticket: Ticket,
        guest: Range<u64>,
        write: Range<u64>,
        file: FileIndex,
        host: HostOffset,
        head: Fill,
        tail: Fill,
    ) -> Self {
        debug_assert!(guest.start <= write.start && write.end <= guest.end);
        Self {
            owner,
            ticket,
            guest,
            write,
            file,
            host,
            head,
            tail,
            zeroed: false,
            untouched: false,
            published: false,
        }
    }

    /// This reservation, whose space is known to have been written never.
    pub fn untouched(mut self, untouched: bool) -> Self {
        self.untouched = untouched;
        self
    }

    /// This reservation, whose space is known to read as zero.
    pub fn zeroed(mut self, zeroed: bool) -> Self {
        self.zeroed = zeroed;
        self
    }

    /// Host offset of a guest offset within `guest`.
    pub fn host_of(&self, guest: u64) -> HostOffset {
        debug_assert!(self.guest.contains(&guest));
        self.host + (guest - self.guest.start)
    }

    /// Makes the new bytes visible to the guest. They are durable after the format's next flush.
    pub fn publish(mut self) -> Result<()> {
        self.published = true;
        self.owner.publish(self.ticket)
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if !self.published {
            self.owner.release(self.ticket);
        }
    }
}

impl std::fmt::Debug for Reservation<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reservation")
            .field("guest", &self.guest)
            .field("write", &self.write)
            .field("host", &self.host)
            .field("head", &self.head)
            .field("tail", &self.tail)
            .finish_non_exhaustive()
    }
}

/// What a format wants around each compressed unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedFrame {
    /// Bytes before it, which [`Format::frame_packed`](crate::Format::frame_packed) fills in.
    pub head_bytes: u32,
    /// Zeroes follow it until the whole has a length that is a multiple of this; never 0.
    pub align: u32,
}

impl Default for PackedFrame {
    /// Nothing.
    fn default() -> Self {
        Self { head_bytes: 0, align: 1 }
    }
}

/// Host space for several consecutive compressed units, back to back.
///
/// The caller writes all units, frames included, in one piece at `host` and publishes.
#[must_use = "dropping a reservation gives its space back"]
pub struct PackedReservation<'a> {
    owner: &'a dyn Reserver,
    ticket: Ticket,
    /// The storage that holds the space.
    pub file: FileIndex,
    /// Where the first payload begins; any byte.
    pub host: HostOffset,
    /// How many of the offered units fit in this piece; at least 1. Offer the rest again.
    pub units: usize,
    published: bool,
}

impl<'a> PackedReservation<'a> {
    /// Made by formats only.
    pub fn new(
        owner: &'a dyn Reserver,
        ticket: Ticket,
        file: FileIndex,
        host: HostOffset,
        units: usize,
    ) -> Self {
        Self { owner, ticket, file, host, units, published: false }
    }

    /// Makes the units visible to the guest.
    pub fn publish(mut self) -> Result<()> {
        self.published = true;
        self.owner.publish(self.ticket)
    }
}

impl Drop for PackedReservation<'_> {
    fn drop(&mut self) {
        if !self.published {
            self.owner.release(self.ticket);
        }
    }
}
