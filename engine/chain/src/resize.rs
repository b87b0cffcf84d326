//! Resizing a disk. Other threads see a new part only when it is ready: an earlier write to it would be
//! zeroed.

use vdkit_block::{Error, GuestOffset, Monitor, Result};

use crate::disk::Disk;

/// Bytes of new space written between two checks of the cancel token.
const ZERO_STEP: u64 = 8 << 20;

/// The bytes that a disk gained, while nobody else can read or write them.
#[derive(Debug)]
pub struct NewPart<'a> {
    disk: &'a Disk,
    start: u64,
    end: u64,
}

impl NewPart<'_> {
    /// The first byte.
    pub fn start(&self) -> GuestOffset {
        GuestOffset(self.start)
    }

    /// Number of bytes. A format may round the disk's size up, to its sectors.
    pub fn len(&self) -> u64 {
        self.end - self.start
    }

    /// Whether the disk did not grow.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// As [`Disk::write_unsettled`], within the new part.
    ///
    /// # Errors
    /// [`Error::Invalid`] outside of it; as [`Disk::write_at`].
    pub fn write_at(&self, buf: &[u8], at: GuestOffset) -> Result<()> {
        let inside = at.0 >= self.start && at.0.saturating_add(buf.len() as u64) <= self.end;
        if !inside {
            let name = self.disk.name();
            return Err(Error::invalid_for(&name, format!("{at} is not in the new part")));
        }
        let _begun = self.disk.begin();
        self.disk.write_unchecked(buf, at)
    }
}

impl Disk {
    /// Resizes the disk. New bytes read as zero, even if a longer backing image holds data there,
    /// or the last cluster still holds data that an earlier shrink cut off. Until it returns, other
    /// threads see the old size. They may use the disk meanwhile: if the format moves blocks or
    /// tables (VDI, VHD, VHDX), the resize waits for their requests, and new ones wait for it. A
    /// request that reaches beyond a smaller size fails.
    ///
    /// If new space does not read as zero (raw LUKS), zeroes are written; a power cut can then
    /// leave the disk larger, with noise in the new part.
    ///
    /// # Errors
    /// [`Error::ReadOnly`]; [`Error::Invalid`] for a size that the format cannot have, and in those
    /// formats within a request of the same thread ([`Disk::enter`]); other errors of the format. A
    /// disk that was to grow then shows its old size. (But if only the sync at the end failed, in a
    /// cache mode with durable writes, it has grown.)
    pub fn resize(&self, guest_bytes: u64) -> Result<()> {
        self.resize_with(guest_bytes, &Monitor::default(), |_| Ok(()), |_| Ok(()))
    }

    /// As [`Disk::resize`], with progress and cancellation of the zero writes. No other resize runs
    /// meanwhile: `allow` is asked with the size before, and `prepare` gets the new part (to
    /// allocate it, say) before others see it.
    ///
    /// # Errors
    /// As [`Disk::resize`]; [`Error::Interrupted`]; those of `allow` and `prepare`.
    pub fn resize_with(
        &self,
        guest_bytes: u64,
        monitor: &Monitor<'_>,
        allow: impl FnOnce(u64) -> Result<()>,
        prepare: impl FnOnce(&NewPart<'_>) -> Result<()>,
    ) -> Result<()> {
        self.check_writable()?;
        self.refuse_within_request()?;
        let _one = self.resizing.lock();
        let before = self.guest_bytes();
        allow(before)?;
        self.shown.hide_beyond(before);
        let resized = self.resize_unseen(before, guest_bytes, monitor, prepare);
        if resized.is_err() && self.top().guest_bytes() > before {
            // Neither noise nor backing data may become part of the disk. What cannot be taken back
            // stays hidden. Report the first error.
            if self.top().resize(before).is_err() {
                return resized;
            }
        }
        self.shown.show();
        resized?;
        self.flush_if_write_durable()
    }

    /// The resize, while others see the disk as it was `before`.
    fn resize_unseen(
        &self,
        before: u64,
        guest_bytes: u64,
        monitor: &Monitor<'_>,
        prepare: impl FnOnce(&NewPart<'_>) -> Result<()>,
    ) -> Result<()> {
        let beneath = self.layers.get(1).map_or(0, |layer| layer.format().guest_bytes());
        if before > 0 && before < guest_bytes.min(beneath) {
            // If the backing image holds the last unit, the rest of that unit would show: copy it
            // to the top.
            self.own_byte(before - 1)?;
        }
        // A size beyond the format's limit is the caller's mistake, and no damage.
        let hidden = self.top().resize_over(guest_bytes, beneath).map_err(|error| match error {
            Error::Limit { .. } => Error::invalid(error.to_string()),
            other => other,
        })?;
        let part = NewPart { disk: self, start: before, end: self.top().guest_bytes().max(before) };
        let beneath = if hidden { 0 } else { beneath };
        self.zero_part(&part, beneath, monitor)?;
        prepare(&part)
    }

    /// Zeroes what an earlier shrink left in the old last cluster, the backing data (for formats
    /// that cannot hide it before they grow), or all if new space does not read as zero.
    fn zero_part(&self, part: &NewPart<'_>, beneath: u64, monitor: &Monitor<'_>) -> Result<()> {
        let _begun = self.begin();
        if !self.top().new_reads_zero() {
            return self.zero_in_steps(part, monitor);
        }
        let cluster_bytes = self.top().caps().cluster_bytes.max(1);
        let last = part.start.checked_next_multiple_of(cluster_bytes).unwrap_or(part.start);
        let end = part.end.min(beneath.max(last));
        self.zero_unchecked(part.start(), end.saturating_sub(part.start), true)
    }

    fn zero_in_steps(&self, part: &NewPart<'_>, monitor: &Monitor<'_>) -> Result<()> {
        let mut at = part.start;
        while at < part.end {
            monitor.cancel.check()?;
            monitor.progress.update(at - part.start, part.len());
            let step = ZERO_STEP.min(part.end - at);
            self.zero_unchecked(GuestOffset(at), step, true)?;
            at += step;
        }
        if !part.is_empty() {
            monitor.progress.update(part.len(), part.len());
        }
        Ok(())
    }
}
