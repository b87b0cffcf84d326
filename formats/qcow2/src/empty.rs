//! Empties an image: afterwards its disk is that of its backing file.

use vdkit_block::{Error, HostOffset, Result};

use crate::image::Qcow2;

impl Qcow2 {
    /// As [`vdkit_block::Overlay::empty`].
    ///
    /// Entries and L2 tables are dropped as in a shrink: clusters lose their refcounts only once no
    /// entry on disk refers to them. If the caller has first committed the image's content to its
    /// backing file, readers see the same bytes at each moment, also after a crash.
    pub(crate) fn empty_map(&self) -> Result<()> {
        self.need_writable()?;
        if self.header.data_file_raw() {
            return Err(Error::invalid_for(
                &self.storage.name(),
                "its data file is a raw image of the disk, which cannot be emptied",
            ));
        }
        let mut lead = self.meta.lead();
        let end = self.guest_len();
        self.clear(&mut lead, 0, end, |_| true)?;
        self.meta.flush_led(self, &mut lead)?;
        if self.has_data_file() && self.meta.lock().snapshots.count == 0 {
            // No entry on disk refers to the data file any more. An error is ignored: the discard
            // is a hint.
            let _ = self.data.discard(HostOffset(0), end);
        }
        Ok(())
    }
}
