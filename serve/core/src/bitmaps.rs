//! Dirty bitmaps of a served disk: changed between two requests, and offered to later clients.

use serde::Serialize;
use vdkit_block::{BitmapStatus, Bitmaps, Result};

use crate::export::Export;

/// The image's bitmaps after a command.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct BitmapList {
    /// In the image's order.
    pub bitmaps: Vec<BitmapStatus>,
}

impl Export {
    /// The bitmaps of the image.
    ///
    /// # Errors
    /// [`vdkit_block::Error::Unsupported`] for a format without bitmaps; as [`Bitmaps::list`].
    pub(crate) fn list_bitmaps(&self) -> Result<BitmapList> {
        // Not held as a request: a paused service answers too.
        self.alone(|disk| Ok(BitmapList { bitmaps: disk.top().require_bitmaps()?.list()? }))
    }

    /// Changes bitmaps between two requests. A bitmap that starts to record covers the requests
    /// after the change, not those answered before.
    ///
    /// # Errors
    /// [`vdkit_block::Error::ReadOnly`]; errors of `act`; as [`Export::list_bitmaps`].
    pub(crate) fn change_bitmaps(
        &self,
        act: impl FnOnce(&dyn Bitmaps) -> Result<()>,
    ) -> Result<BitmapList> {
        self.check_writable()?;
        self.alone(|disk| {
            self.refuse_during_job(disk.name())?;
            act(disk)?;
            Ok(BitmapList { bitmaps: disk.list()? })
        })
    }

    /// Lets later clients read a bitmap.
    pub(crate) fn offer_bitmap(&self, name: &str) {
        let mut offered = self.offered.lock();
        if !offered.iter().any(|known| known == name) {
            offered.push(name.to_owned());
        }
    }

    /// The bitmaps that a client may read: those named at the start or added since that the image
    /// still has and that are consistent. Any client may query them, so no client's requests wait
    /// for this.
    pub fn offered_bitmaps(&self) -> Vec<String> {
        let mut offered = self.offered.lock().clone();
        if offered.is_empty() {
            return offered;
        }
        let disk = self.disk();
        match disk.top().require_bitmaps().and_then(Bitmaps::list) {
            Ok(bitmaps) => offered.retain(|name| {
                let here = |status: &&BitmapStatus| status.info.name == *name;
                bitmaps.iter().find(here).is_some_and(|status| status.dirty_bytes.is_some())
            }),
            Err(error) => {
                tracing::warn!(export = self.name(), "no bitmaps are offered: {error}");
                offered.clear();
            }
        }
        offered
    }
}
