//! Persistent dirty bitmaps: which guest bytes were written since some moment.

use std::ops::Range;

use serde::Serialize;

use crate::driver::BitmapInfo;
use crate::error::Result;

/// A bitmap with what it holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct BitmapStatus {
    /// Name, granularity and flags.
    #[serde(flatten)]
    pub info: BitmapInfo,
    /// Guest bytes that its set bits stand for, at most the disk's; nothing where it cannot be
    /// trusted ([`BitmapInfo::in_use`]).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty_bytes: Option<u64>,
}

/// A new bitmap.
#[derive(Clone, Copy, Debug)]
pub struct NewBitmap<'a> {
    /// Its name: 1 to 1023 bytes.
    pub name: &'a str,
    /// Bytes that a bit stands for, a power of two; nothing for the format's choice.
    pub granularity: Option<u64>,
    /// It records writes from now on.
    pub enabled: bool,
}

/// The persistent dirty bitmaps of an image; see [`crate::Format::bitmaps`].
///
/// A bitmap that is enabled records each write, discard and zeroing that is done while the image is
/// open: after a flush its bits on disk cover everything that was flushed. Changes made here are
/// durable when the method returns, and a power cut leaves the old or the new state, unless a
/// method says otherwise.
///
/// Writes that are under way during a call may be recorded or not in a bitmap that the call adds,
/// enables or clears; they have ended when it returns.
pub trait Bitmaps {
    /// All of them, in the image's order.
    ///
    /// # Errors
    /// [`crate::Error::Corrupt`] for a damaged directory or table; I/O.
    fn list(&self) -> Result<Vec<BitmapStatus>>;

    /// Calls `found` for each run of dirty guest bytes within the disk, in order.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] where there is no such bitmap, or it cannot be trusted; what
    /// `found` returns; as [`Bitmaps::list`].
    fn for_each_dirty(
        &self,
        name: &str,
        found: &mut dyn FnMut(Range<u64>) -> Result<()>,
    ) -> Result<()>;

    /// Refuses what [`Bitmaps::add`] would refuse, but for a name that is taken, and changes nothing.
    ///
    /// # Errors
    /// As [`Bitmaps::add`].
    fn check_new(&self, new: &NewBitmap<'_>) -> Result<()>;

    /// Adds a bitmap without set bits.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] for a name that is taken or too long, or a granularity that is
    /// not possible; [`crate::Error::Unsupported`] where the image cannot have bitmaps;
    /// [`crate::Error::ReadOnly`]; I/O.
    fn add(&self, new: &NewBitmap<'_>) -> Result<()>;

    /// Removes a bitmap, also one that cannot be trusted.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] where there is no such bitmap; I/O.
    fn remove(&self, name: &str) -> Result<()>;

    /// Clears all bits of a bitmap.
    ///
    /// # Errors
    /// As [`Bitmaps::for_each_dirty`].
    fn clear(&self, name: &str) -> Result<()>;

    /// Lets a bitmap record writes from now on, or not any more.
    ///
    /// # Errors
    /// As [`Bitmaps::for_each_dirty`].
    fn set_enabled(&self, name: &str, enabled: bool) -> Result<()>;

    /// Sets the bits in `name` that are set in `source_name` of `source`, which may be this image.
    /// A power cut may leave a part of them set: doing it again completes it.
    ///
    /// # Errors
    /// As [`Bitmaps::for_each_dirty`], for both.
    fn merge(&self, name: &str, source: &dyn Bitmaps, source_name: &str) -> Result<()>;

    /// Sets all bits of all bitmaps that are enabled: for whoever is about to change what the
    /// guest reads by another way than writes.
    ///
    /// # Errors
    /// I/O.
    fn mark_all_dirty(&self) -> Result<()>;
}
