//! Emptying an image: afterwards its disk is what it stands on.

use vdkit_block::{Error, HostOffset, Result};

use crate::image::Qcow2;

impl Qcow2 {
    /// As [`vdkit_block::Format::empty`].
    ///
    /// Entries and L2 tables go like those behind the end of a disk that becomes smaller: clusters
    /// lose their refcounts only once no entry on disk refers to them. Whoever has put the image's
    /// content beneath it before reads the same bytes at each moment, also after a crash.
    pub(crate) fn empty_map(&self) -> Result<()> {
        self.need_writable()?;
        if self.header.data_file_raw() {
            return Err(Error::Invalid(format!(
                "{}: its data file is the disk by itself and cannot hold nothing",
                self.storage.name()
            )));
        }
        let mut lead = self.meta.lead();
        let end = self.guest_len();
        self.clear(&mut lead, 0, end, |_| true)?;
        self.meta.flush_led(self, &mut lead)?;
        if self.has_data_file() && self.meta.lock().snapshots.count == 0 {
            // No entry on disk refers to it any more. Only a hint: the space is not counted.
            let _ = self.data.discard(HostOffset(0), end);
        }
        Ok(())
    }
}
