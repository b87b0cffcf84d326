//! Changes the chain of a disk in use: puts an image on top, or takes the top image off.
//!
//! ```text
//!   put_on_top            open_beneath + share_beneath      take_off_top
//!
//!              new        top                               (top)  returned, alone
//!   top   ─►   top        base  one map, shared by reads    base
//!   base       base             of top and writes to base
//! ```
//!
//! Nothing here waits for requests: the caller must have none in flight.

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

    /// Lets other processes read an image that will not be written any more. No other process can
    /// lock it for writing in between.
    ///
    /// # Errors
    /// Errors of the system; the locks are then unchanged.
    pub fn downgrade_lock(&self) -> Result<()> {
        self.storages().into_iter().try_for_each(|storage| storage.downgrade_lock())
    }

    /// Opens its map a second time, for writing. On success, its files are locked exclusively.
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
    /// Puts an overlay, opened alone for writing, on top. The caller should have closed the former
    /// top image, which is only read from now on.
    pub fn put_on_top(&mut self, overlay: Self) {
        let beneath = std::mem::replace(self, overlay);
        self.layers.extend(beneath.layers);
    }

    /// Opens the backing image, with its own chain, as a writable disk. Call
    /// [`Disk::share_beneath`] before writing to it: this disk still reads through a second map of
    /// the same file. No other process can lock the image for writing meanwhile.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the top image has no backing image, or one that was only probed as
    /// raw; [`Error::Locked`] if another process reads the image; errors of opening it. The locks
    /// are then unchanged.
    pub fn open_beneath(&self, registry: &Registry) -> Result<Self> {
        let Some(layer) = self.layers.get(1) else { return Err(Error::no_backing(self.name())) };
        if layer.probed() && layer.info().format == "raw" {
            return Err(Error::Unnamed {
                file: layer.path().display().to_string(),
                overlay: self.name().to_owned(),
            });
        }
        let driver = registry.driver(layer.info().format)?;
        let format = match layer.open_for_writing(driver, self.limits) {
            Ok(format) => format,
            Err(error) => {
                // Report the first error.
                let _ = layer.downgrade_lock();
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

    /// Ends writing to the backing image: other processes may read it.
    ///
    /// # Errors
    /// As [`Layer::downgrade_lock`].
    pub fn end_sharing_beneath(&mut self) -> Result<()> {
        self.beneath_changes = false;
        self.layers.get(1).map_or(Ok(()), Layer::downgrade_lock)
    }

    /// Replaces this disk by `base`, without the top image. Returns the former disk.
    pub fn take_off_top(&mut self, base: Self) -> Self {
        std::mem::replace(self, base)
    }
}
