//! Another chain for a disk that is in use: an image put on top, the top image taken off.
//!
//! ```text
//!   put_on_top            open_beneath + share_beneath      take_off_top
//!
//!              new        top                               (top)  handed back, alone
//!   top   ─►   top        base  one map, read through the   base
//!   base       base             top and written beside it
//! ```
//!
//! Nothing here waits for requests: whoever exchanges images is alone with the disk.

use std::sync::Arc;

use vdkit_block::{Error, Format, FormatDriver, OpenRequest, Result, Storage};

use crate::disk::{Disk, Layer};
use crate::options::OpenOptions;
use crate::registry::Registry;

impl Layer {
    /// Its files, each once.
    fn storages(&self) -> Vec<Arc<dyn Storage>> {
        let mut all = vec![self.format().storage().clone()];
        all.extend(self.format().other_files());
        all
    }

    /// Lets others read an image that will be written no more; none may write it, at no moment.
    ///
    /// # Errors
    /// What the system says; others are then kept away as before.
    pub fn let_others_read(&self) -> Result<()> {
        self.storages().into_iter().try_for_each(|storage| storage.let_others_read())
    }

    /// Opens its map a second time, for writing. On success its own files keep everyone else away.
    fn open_for_writing(
        &self,
        driver: &dyn FormatDriver,
        limits: vdkit_block::Limits,
    ) -> Result<Arc<dyn Format>> {
        let storage = self.format().storage().reopen_for_writing()?;
        let mut files = Vec::new();
        for file in self.format().other_files() {
            files.push(file.reopen_for_writing()?);
        }
        driver.open(OpenRequest { storage, files, writable: true, limits })
    }
}

impl Disk {
    /// Puts an overlay, opened alone for writing, on top. What was the top image before should
    /// have been closed and is only read from now on.
    pub fn put_on_top(&mut self, overlay: Self) {
        let beneath = std::mem::replace(self, overlay);
        self.layers.extend(beneath.layers);
    }

    /// The image beneath the top one as a disk of its own, for writing, on what it stands on. This
    /// disk is to share it ([`Disk::share_beneath`]) before it is written: it reads through a
    /// second map of the same file. No other process can take the image for writing meanwhile.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the top image stands on nothing, or on one that was recognised
    /// only as raw; [`Error::Locked`] where another process reads the image; what opening it
    /// returns. It is locked as before then.
    pub fn open_beneath(&self, registry: &Registry) -> Result<Self> {
        let Some(layer) = self.layers.get(1) else {
            return Err(Error::Invalid(format!(
                "{}: stands on no other image, so there is nothing to commit to",
                self.name()
            )));
        };
        if layer.probed() && layer.info().format == "raw" {
            return Err(Error::Invalid(format!(
                "{}: no header says which format it has, and its overlay names none; if it is raw, end \
                 the service and have the overlay say so: 'vdkit rebase --unsafe {} --backing {} \
                 --backing-format raw'",
                layer.path().display(),
                self.name(),
                layer.path().display()
            )));
        }
        let driver = registry.driver(layer.info().format)?;
        let format = match layer.open_for_writing(driver, self.limits) {
            Ok(format) => format,
            Err(error) => {
                // The first error is the one that tells.
                let _ = layer.let_others_read();
                return Err(error);
            }
        };
        let mut layers = self.layers[1..].to_vec();
        layers[0] = layer.with_format(format);
        let options =
            OpenOptions { cache: self.cache(), limits: self.limits, ..OpenOptions::read_write() };
        Ok(Self::from_layers(layers, &options))
    }

    /// Reads from now on through the map by which `base` (from [`Disk::open_beneath`]) writes.
    pub fn share_beneath(&mut self, base: &Self) {
        self.layers.truncate(1);
        self.layers.extend(base.layers.iter().cloned());
        self.beneath_changes = true;
    }

    /// The image beneath will be written no more: others may read it.
    ///
    /// # Errors
    /// As [`Layer::let_others_read`].
    pub fn end_sharing_beneath(&mut self) -> Result<()> {
        self.beneath_changes = false;
        self.layers.get(1).map_or(Ok(()), Layer::let_others_read)
    }

    /// Goes on without the top image, with `base` as the disk; hands the former one back.
    pub fn take_off_top(&mut self, base: Self) -> Self {
        std::mem::replace(self, base)
    }
}
