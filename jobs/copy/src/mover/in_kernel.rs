//! Copies between files in the kernel, for bytes that need no examination.

use std::ops::Range;
use std::sync::atomic::Ordering;

use vdkit_block::{CopyMethod, CopyOp, HostOffset, Reservation, Result, Storage};
use vdkit_chain::Disk;

use super::{Buffers, Mover, Placed, add};
use crate::share::share;

impl Mover<'_> {
    /// Copies a chunk in the kernel, after reserving its space in turn. The rest is read and
    /// written.
    pub(super) fn copy_in_kernel(
        &self,
        buffers: &mut Buffers,
        number: u64,
        guest: Range<u64>,
        from: &dyn Storage,
        offset: HostOffset,
    ) -> Result<()> {
        let (at, len) = (guest.start, guest.end - guest.start);
        let target = match self.target {
            Some(target) if !self.kernel_refuses.load(Ordering::Relaxed) => target,
            _ => return self.copy(buffers, number, at, len),
        };
        // If every byte is or may be allocated, nothing is reserved.
        if self.options.over || target.top().caps().fill_bytes == 1 {
            self.in_turn(number, || Ok(()))?;
            let copied = share(CopyMethod::CopyFileRange, target, guest, from, offset)?;
            add(&self.moved.kernel_copied, copied.bytes);
            self.kernel_refuses.fetch_or(copied.refused, Ordering::Relaxed);
            return self.copy_parts(buffers, &copied.left);
        }
        let mut placed = Vec::new();
        self.in_turn(number, || self.place_plain(target, at, 0, len as usize, &mut placed))?;
        for part in placed {
            match part {
                Placed::Plain { space, from: first } => {
                    self.fill_in_kernel(target, buffers, space, from, offset + first as u64)?;
                }
                Placed::Mapped { from: first, to } => {
                    let part = at + first as u64..at + to as u64;
                    self.copy_parts(buffers, std::slice::from_ref(&part))?;
                }
                Placed::Compressed { .. } => {}
            }
        }
        Ok(())
    }

    /// Copies the bytes of `from` at `offset` into reserved space, and publishes it.
    fn fill_in_kernel(
        &self,
        target: &Disk,
        buffers: &mut Buffers,
        space: Reservation<'_>,
        from: &dyn Storage,
        offset: HostOffset,
    ) -> Result<()> {
        let written = self.copy_into(target, buffers, &space, from, offset);
        written.inspect_err(|error| target.empty_reserved(&space, error))?;
        space.publish()
    }

    fn copy_into(
        &self,
        target: &Disk,
        buffers: &mut Buffers,
        space: &Reservation<'_>,
        from: &dyn Storage,
        offset: HostOffset,
    ) -> Result<()> {
        let Range { start, end } = space.write.clone();
        let copied = target.top().file(space.file).copy_from(&CopyOp {
            to: space.host_of(start),
            source: from,
            from: offset,
            len: end - start,
            method: CopyMethod::CopyFileRange,
        })?;
        add(&self.moved.kernel_copied, copied);
        if copied < end - start {
            self.kernel_refuses.store(true, Ordering::Relaxed);
            let rest = start + copied;
            self.read(buffers, rest, end - rest)?;
            add(&self.moved.written, end - rest);
            target.write_reserved(space, &buffers.bytes, rest)?;
        }
        Ok(())
    }
}
