//! Host space that is reserved for a write but not yet visible to the guest.

use std::ops::Range;

use crate::error::Result;
use crate::extent::FileIndex;
use crate::units::HostOffset;

/// What the caller must write around its own bytes before it publishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Nothing: the bytes already read correctly.
    Ready,
    /// Zeroes.
    Zero,
    /// The current guest-visible bytes, read through the whole chain (before publishing).
    Copy,
}

/// A format's private handle of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(pub u64);

/// The format's side of a reservation.
pub trait Reserver {
    /// Makes a reservation visible to the guest. Ends the reservation, also on an error:
    /// [`Reserver::release`] is not called for it any more.
    fn publish(&self, ticket: Ticket) -> Result<()>;
    /// Frees a reservation's space.
    fn release(&self, ticket: Ticket);
}

/// Reserved host space. The caller fills it and then publishes it.
///
/// `guest` is the caller's range widened to the format's granularity. The caller writes `head` to
/// `guest.start..write.start`, its bytes to `write`, and `tail` to `write.end..guest.end`. Dropping
/// the reservation frees the space and leaves the guest's data unchanged.
#[must_use = "dropping a reservation gives its space back"]
pub struct Reservation<'a> {
    owner: &'a dyn Reserver,
    ticket: Ticket,
    /// The widened guest range, in bytes.
    pub guest: Range<u64>,
    /// The requested part of `guest`; it may end before the requested end.
    pub write: Range<u64>,
    /// The storage that holds the space.
    pub file: FileIndex,
    /// Host offset of `guest.start`; the space is contiguous.
    pub host: HostOffset,
    /// Fill before `write`.
    pub head: Fill,
    /// Fill after `write`.
    pub tail: Fill,
    /// The space reads as zero, so zeroes among the caller's bytes need not be written.
    pub zeroed: bool,
    /// The space was never written (in an encrypted image it does not read as zero).
    pub untouched: bool,
    published: bool,
}

impl<'a> Reservation<'a> {
    /// For formats only.
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

    /// Sets [`Reservation::untouched`].
    pub fn untouched(mut self, untouched: bool) -> Self {
        self.untouched = untouched;
        self
    }

    /// Sets [`Reservation::zeroed`].
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
    ///
    /// # Errors
    /// Those of the format. The guest then sees its old bytes, in some of the clusters perhaps the new
    /// ones.
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

/// Framing of each compressed unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressedFrame {
    /// Bytes before the unit, filled in by [`CompressedWriter::frame_compressed`](crate::CompressedWriter::frame_compressed).
    pub head_bytes: u32,
    /// Zeroes pad the framed unit to a multiple of this; never 0.
    pub align: u32,
}

impl Default for CompressedFrame {
    /// No frame.
    fn default() -> Self {
        Self { head_bytes: 0, align: 1 }
    }
}

/// Host space for several consecutive compressed units, back to back.
///
/// The caller writes all units, frames included, in one piece at `host` and publishes.
#[must_use = "dropping a reservation gives its space back"]
pub struct CompressedReservation<'a> {
    owner: &'a dyn Reserver,
    ticket: Ticket,
    /// The storage that holds the space.
    pub file: FileIndex,
    /// Host offset of the first unit; not aligned.
    pub host: HostOffset,
    /// How many of the offered units fit; at least 1. Offer the rest again.
    pub units: usize,
    published: bool,
}

impl<'a> CompressedReservation<'a> {
    /// For formats only.
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
    ///
    /// # Errors
    /// As [`Reservation::publish`].
    pub fn publish(mut self) -> Result<()> {
        self.published = true;
        self.owner.publish(self.ticket)
    }
}

impl Drop for CompressedReservation<'_> {
    fn drop(&mut self) {
        if !self.published {
            self.owner.release(self.ticket);
        }
    }
}
