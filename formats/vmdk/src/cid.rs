//! The content id: replaced at the first change after opening.
//!
//! A child names the content id of its parent, so a parent that has changed must get a new id. The
//! new id is durable before any change of the disk.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use vdkit_block::{HostOffset, Result, Storage};

use crate::descriptor::{Descriptor, new_cid};

/// The content id of an open image.
#[derive(Debug, Default)]
pub(crate) struct ContentId {
    /// Offset and number of its digits; `None` without a descriptor.
    place: Option<(u64, usize)>,
    /// The id when the image was opened.
    old: u32,
    written: Mutex<bool>,
    durable: AtomicBool,
}

impl ContentId {
    /// The content id of a descriptor whose text begins at `at`.
    pub(crate) fn of(descriptor: &Descriptor, at: u64) -> Self {
        let place = descriptor.cid_digits().map(|r| (at + r.start as u64, r.len()));
        Self { place, old: descriptor.cid, ..Self::default() }
    }

    /// Writes a new id, once. The caller must make it durable. Returns whether an id was written
    /// that is not durable yet.
    pub(crate) fn change(&self, storage: &dyn Storage) -> Result<bool> {
        if self.durable.load(Ordering::Acquire) {
            return Ok(false);
        }
        let mut written = self.written.lock();
        if *written {
            return Ok(!self.durable.load(Ordering::Acquire));
        }
        if let Some((at, digits)) = self.place {
            let text = format!("{:0digits$x}", new_cid(digits, self.old)?);
            storage.write_at(text.as_bytes(), HostOffset(at))?;
        }
        *written = true;
        if self.place.is_none() {
            self.durable.store(true, Ordering::Release);
        }
        Ok(self.place.is_some())
    }

    /// Whether a new id was written and may not be durable. A sync that begins after this call
    /// makes it durable.
    pub(crate) fn is_written(&self) -> bool {
        *self.written.lock() && !self.durable.load(Ordering::Acquire)
    }

    /// Must be called after a sync that began after the id was written.
    pub(crate) fn settled(&self) {
        self.durable.store(true, Ordering::Release);
    }

    /// Writes a new id and makes it durable, once.
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
