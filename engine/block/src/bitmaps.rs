//! Persistent dirty bitmaps: which guest bytes were written since some moment.

use std::ops::Range;

use serde::Serialize;

use crate::driver::BitmapInfo;
use crate::error::Result;

/// A bitmap and its dirty byte count.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct BitmapStatus {
    /// Name, granularity and flags.
    #[serde(flatten)]
    pub info: BitmapInfo,
    /// Guest bytes covered by set bits, at most the disk size; `None` if the bitmap is inconsistent
    /// ([`BitmapInfo::in_use`]).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty_bytes: Option<u64>,
}

/// A new bitmap.
#[derive(Clone, Copy, Debug)]
pub struct NewBitmap<'a> {
    /// Its name: 1 to 1023 bytes.
    pub name: &'a str,
    /// Bytes per bit, a power of two; `None` for the format's default.
    pub granularity: Option<u64>,
    /// Records writes from now on.
    pub enabled: bool,
}

/// The persistent dirty bitmaps of an image; see [`crate::Format::bitmaps`].
///
/// An enabled bitmap records each write, discard and zeroing while the image is open. After a
/// flush, its bits on disk cover everything that was flushed. Unless a method says otherwise, its
/// changes are durable when it returns, and a power cut leaves the old or the new state.
///
/// A bitmap that a call adds, enables or clears may or may not record writes that run during the
/// call. Those writes have ended when the call returns.
pub trait Bitmaps {
    /// All bitmaps, in the image's order.
    ///
    /// # Errors
    /// [`crate::Error::Corrupt`] for a damaged directory or table; I/O.
    fn list(&self) -> Result<Vec<BitmapStatus>>;

    /// Calls `found` for each run of dirty guest bytes within the disk, in order.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] if there is no such bitmap or it is inconsistent; errors of
    /// `found`; as [`Bitmaps::list`].
    fn for_each_dirty(
        &self,
        name: &str,
        found: &mut dyn FnMut(Range<u64>) -> Result<()>,
    ) -> Result<()>;

    /// Runs the checks of [`Bitmaps::add`], except for a taken name. Changes nothing.
    ///
    /// # Errors
    /// As [`Bitmaps::add`].
    fn check_new(&self, new: &NewBitmap<'_>) -> Result<()>;

    /// Adds a bitmap without set bits.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] for a name that is taken or too long, or an invalid granularity;
    /// [`crate::Error::Unsupported`] if the image cannot have bitmaps; [`crate::Error::ReadOnly`];
    /// I/O.
    fn add(&self, new: &NewBitmap<'_>) -> Result<()>;

    /// Removes a bitmap, also an inconsistent one.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] if there is no such bitmap; I/O.
    fn remove(&self, name: &str) -> Result<()>;

    /// Clears all bits of a bitmap.
    ///
    /// # Errors
    /// As [`Bitmaps::for_each_dirty`].
    fn clear(&self, name: &str) -> Result<()>;

    /// Enables or disables recording.
    ///
    /// # Errors
    /// As [`Bitmaps::for_each_dirty`].
    fn set_enabled(&self, name: &str, enabled: bool) -> Result<()>;

    /// Sets the bits in `name` that are set in `source_name` of `source`, which may be this image.
    /// A power cut may leave only some of them set; repeat the call to complete the merge.
    ///
    /// # Errors
    /// As [`Bitmaps::for_each_dirty`], for both.
    fn merge(&self, name: &str, source: &dyn Bitmaps, source_name: &str) -> Result<()>;

    /// Sets all bits of all enabled bitmaps. Call it before guest data changes by other means than
    /// writes.
    ///
    /// # Errors
    /// I/O.
    fn mark_all_dirty(&self) -> Result<()>;
}
