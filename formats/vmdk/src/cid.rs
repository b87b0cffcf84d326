//! The content id: another one from the first change after opening on.
//!
//! A child names the id that its parent had; a parent that was changed meanwhile must be known by
//! another one. So the new id is durable before anything of the disk may change.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use vdkit_block::{HostOffset, Result, Storage};

use crate::descriptor::{Descriptor, new_cid};

/// The content id of an open image.
#[derive(Debug, Default)]
pub(crate) struct ContentId {
    /// Where its digits stand, and how many; nothing where there is no descriptor.
    place: Option<(u64, usize)>,
    written: Mutex<bool>,
    durable: AtomicBool,
}

impl ContentId {
    /// That of a descriptor whose text begins at `at`.
    pub(crate) fn of(descriptor: &Descriptor, at: u64) -> Self {
        let place = descriptor.cid_digits().map(|r| (at + r.start as u64, r.len()));
        Self { place, ..Self::default() }
    }

    /// Writes another id, once. Whoever calls this makes it durable. Whether it wrote.
    pub(crate) fn change(&self, storage: &dyn Storage) -> Result<bool> {
        if self.durable.load(Ordering::Acquire) {
            return Ok(false);
        }
        let mut written = self.written.lock();
        if *written {
            return Ok(!self.durable.load(Ordering::Acquire));
        }
        if let Some((at, digits)) = self.place {
            let text = format!("{:0digits$x}", new_cid(digits, storage.name())?);
            storage.write_at(text.as_bytes(), HostOffset(at))?;
        }
        *written = true;
        if self.place.is_none() {
            self.durable.store(true, Ordering::Release);
        }
        Ok(self.place.is_some())
    }

    /// Whether another id was written that is not known to be durable. A sync that begins after this
    /// answer makes it so.
    pub(crate) fn is_written(&self) -> bool {
        *self.written.lock() && !self.durable.load(Ordering::Acquire)
    }

    /// A sync has ended that began after the id was written.
    pub(crate) fn settled(&self) {
        self.durable.store(true, Ordering::Release);
    }

    /// Writes another id and makes it durable, once.
    pub(crate) fn change_durably(&self, storage: &dyn Storage) -> Result<()> {
        if self.durable.load(Ordering::Acquire) {
            return Ok(());
        }
        if self.change(storage)? {
            storage.sync()?;
            self.settled();
        }
        Ok(())
    }
}
