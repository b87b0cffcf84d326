//! Writes many pieces of metadata, adjacent ones in one request.

use vdkit_block::{HostOffset, Result, Storage};

/// Adjacent pieces are merged up to this size.
const JOIN_BYTES: usize = 1 << 20;

/// Merges writes of adjacent pieces. The last ones are written by [`Joined::finish`].
pub(crate) struct Joined<'a> {
    storage: &'a dyn Storage,
    at: u64,
    bytes: Vec<u8>,
}

impl<'a> Joined<'a> {
    pub(crate) fn new(storage: &'a dyn Storage) -> Self {
        Self { storage, at: 0, bytes: Vec::new() }
    }

    pub(crate) fn write(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        if self.at + self.bytes.len() as u64 != at || self.bytes.len() >= JOIN_BYTES {
            self.finish()?;
            self.at = at;
        }
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    pub(crate) fn finish(&mut self) -> Result<()> {
        if !self.bytes.is_empty() {
            self.storage.write_at(&self.bytes, HostOffset(self.at))?;
            self.bytes.clear();
        }
        Ok(())
    }
}
