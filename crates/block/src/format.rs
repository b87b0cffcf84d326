//! A format: a map from guest bytes to host bytes.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::bitmaps::Bitmaps;
use crate::codec::Codec;
use crate::encryption::Encryption;
use crate::error::{Error, Result};
use crate::extent::{Extent, FileIndex, Packed};
use crate::in_flight::InFlight;
use crate::reservation::{PackedFrame, PackedReservation, Reservation};
use crate::snapshots::Snapshots;
use crate::storage::Storage;
use crate::units::GuestOffset;

/// What an image says of the image beneath it. A name from a stranger: never open it without the
/// policy's word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingRef {
    /// The name as stored, relative to the image's folder or absolute.
    pub name: String,
    /// The format that the image says it has.
    pub format: Option<String>,
    /// The identity that it had when the image was put on it
    /// ([`ImageInfo::identity`](crate::ImageInfo::identity)), in formats that note it.
    pub identity: Option<String>,
    /// When its file was last changed, in seconds since 1970, in formats that note it.
    pub modified: Option<u64>,
}

impl BackingRef {
    /// A reference without an identity and a time.
    pub fn new(name: impl Into<String>, format: Option<String>) -> Self {
        Self { name: name.into(), format, identity: None, modified: None }
    }
}

/// What a format (with this image's options) can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormatCaps {
    /// The image was opened for writing.
    pub writable: bool,
    /// Unit of allocation in bytes: a cluster.
    pub cluster_bytes: u64,
    /// The smallest aligned unit that a write can cover without a fill: a subcluster where the
    /// image has them, else the cluster; 1 where every byte has its place already.
    pub fill_bytes: u64,
    /// Compressed units can be written.
    pub packed: Option<Codec>,
    /// The image is written once, from its start to its end: by [`Format::reserve_packed`] alone,
    /// for units in the order of the disk, each at most once, and [`Format::close`].
    /// [`FormatCaps::packed`] says how; a unit that does not become smaller is packed all the same.
    pub one_pass: bool,
    /// `zero` costs metadata only.
    pub cheap_zeroes: bool,
    /// Host space may be handed to movers that share blocks: guest clusters are aligned to the
    /// cluster size in the host file.
    pub host_aligned: bool,
}

/// What the cache of a format's map holds, and how well it serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MapCacheStats {
    /// Look-ups that found what they needed. A request makes one or several.
    pub hits: u64,
    /// Look-ups that had to read from the image first.
    pub misses: u64,
    /// Bytes of the map that the cache holds now.
    pub used_bytes: u64,
    /// Bytes that it may hold; changed pieces are never dropped and may exceed it.
    pub capacity_bytes: u64,
    /// Bytes of the map were all of the disk allocated: a cache of so many never reads twice.
    pub map_bytes: u64,
}

impl MapCacheStats {
    /// The counts of two caches together, such as those of a chain.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            hits: self.hits.saturating_add(other.hits),
            misses: self.misses.saturating_add(other.misses),
            used_bytes: self.used_bytes.saturating_add(other.used_bytes),
            capacity_bytes: self.capacity_bytes.saturating_add(other.capacity_bytes),
            map_bytes: self.map_bytes.saturating_add(other.map_bytes),
        }
    }
}

/// A disk format: resolves, reserves, and keeps its metadata in order. See the crate's
/// documentation for the life of a request.
///
/// Ranges passed in must lie within [`Format::guest_bytes`]; `len` is never 0.
pub trait Format: Send + Sync + fmt::Debug {
    /// The format's name, such as `qcow2`.
    fn name(&self) -> &'static str;

    /// What this image can do.
    fn caps(&self) -> FormatCaps;

    /// Bytes of the guest disk.
    fn guest_bytes(&self) -> u64;

    /// What the image stands on, as its metadata names it.
    fn backing(&self) -> Option<&BackingRef> {
        None
    }

    /// What the user should know about what opening the image did or found.
    fn warnings(&self) -> &[String] {
        &[]
    }

    /// How the bytes of [`Place::Data`](crate::Place::Data) extents are encrypted, of all of them.
    /// Where they are, every place of data and every reservation is made of whole sectors
    /// ([`crate::CIPHER_SECTOR_BYTES`]), for the guest and on the host, and space that was never
    /// written does not read as zero: the format never says so.
    fn encryption(&self) -> Option<&Encryption> {
        None
    }

    /// Whether each byte of a new image reads as zero until it is written.
    fn new_reads_zero(&self) -> bool {
        true
    }

    /// The storage with the metadata.
    fn storage(&self) -> &Arc<dyn Storage>;

    /// A storage that extents point into.
    fn file(&self, index: FileIndex) -> &Arc<dyn Storage>;

    /// How many indexes [`Format::file`] knows.
    fn file_count(&self) -> u16 {
        1
    }

    /// The storages beside [`Format::storage`], each once: those that the image was opened with
    /// ([`OpenRequest::files`](crate::OpenRequest::files)), in that order. The indexes of a format
    /// keep to it.
    fn other_files(&self) -> Vec<Arc<dyn Storage>> {
        let mut others: Vec<Arc<dyn Storage>> = Vec::new();
        for index in 0..self.file_count() {
            let file = self.file(FileIndex(index));
            if !Arc::ptr_eq(file, self.storage()) && !others.iter().any(|o| Arc::ptr_eq(o, file)) {
                others.push(file.clone());
            }
        }
        others
    }

    /// Requests in flight: enter before resolving, leave after the I/O on what was resolved.
    fn in_flight(&self) -> &InFlight;

    /// Where the bytes from `at` are; the longest run that is cheap to find, at most `len`.
    fn resolve(&self, at: GuestOffset, len: u64) -> Result<Extent>;

    /// [`Format::resolve`] for a request that is about to move these bytes. A format whose every
    /// byte has its place already (raw) answers [`Place::Data`](crate::Place::Data), exclusive,
    /// for all of it here: asking the host's file system for holes would cost a read more than
    /// it saves, and a hole of a raw image is written in place. All others answer as `resolve`.
    fn resolve_for_io(&self, at: GuestOffset, len: u64) -> Result<Extent> {
        self.resolve(at, len)
    }

    /// The answer of [`Format::resolve_for_io`] without I/O, or nothing where that would need some.
    /// May be shorter.
    fn resolve_cached(&self, at: GuestOffset, len: u64) -> Option<Extent>;

    /// From now on maps of this image are drawn once, from front to back: what one has passed need
    /// not be kept for the next. Requests find what they use all the same.
    fn expect_one_pass(&self) {}

    /// How the cache of the map does; nothing for formats that need none.
    fn map_cache(&self) -> Option<MapCacheStats> {
        None
    }

    /// The caller is about to write these bytes where [`Format::resolve_for_io`] said that they
    /// are: formats that record what changes (dirty bitmaps) note it. To be called after the bytes
    /// were resolved and before they are written; what is reserved, zeroed or discarded is noted
    /// by the format itself. Costs next to nothing where nothing records.
    fn note_write(&self, at: GuestOffset, len: u64) -> Result<()> {
        let _ = (at, len);
        Ok(())
    }

    /// The image's persistent dirty bitmaps; nothing for formats that have none.
    fn bitmaps(&self) -> Option<&dyn Bitmaps> {
        None
    }

    /// Unpacks a compressed unit whose bytes were read from its place: `packed_bytes` are
    /// [`Packed::len`] bytes, `out` is the whole unit.
    fn unpack(&self, packed: &Packed, packed_bytes: &[u8], out: &mut [u8]) -> Result<()> {
        let _ = (packed_bytes, out);
        Err(Error::unsupported(
            self.storage().name(),
            format!("not supported: {} data in a {} image", packed.codec, self.name()),
            "this format has no compressed data",
        ))
    }

    /// Host space for a write of `len` bytes at `at`, or nothing where the map changed meanwhile
    /// so that the bytes can be written in place: resolve again. The reservation may cover less
    /// than asked. Waits for an overlapping reservation of another thread.
    fn reserve(&self, at: GuestOffset, len: u64) -> Result<Option<Reservation<'_>>>;

    /// What stands around each compressed unit; nothing in most formats.
    fn packed_frame(&self) -> PackedFrame {
        PackedFrame::default()
    }

    /// Completes a unit for [`Format::reserve_packed`] whose place on the disk is known: the unit
    /// of the guest bytes from `at`. `framed` is [`PackedFrame::head_bytes`] that are zero, then
    /// `payload_bytes` of compressed bytes, then zeroes up to [`PackedFrame::align`]. Called in any
    /// order by any thread.
    fn frame_packed(&self, at: GuestOffset, framed: &mut [u8], payload_bytes: u32) {
        let _ = (at, framed, payload_bytes);
    }

    /// Host space for compressed units of these byte lengths, frames included, for consecutive
    /// clusters from `at`.
    fn reserve_packed(&self, at: GuestOffset, lens: &[u32]) -> Result<PackedReservation<'_>> {
        let _ = (at, lens);
        Err(Error::unsupported(
            self.storage().name(),
            format!("not supported: writing compressed data to a {} image", self.name()),
            "convert to qcow2 instead",
        ))
    }

    /// Makes bytes read as zero by metadata alone. Only the part made of whole units
    /// ([`FormatCaps::fill_bytes`], or the end of the disk) is done; the answer is that part,
    /// relative to the disk, and the caller writes zeroes to the rest. `may_unmap` lets the
    /// space go.
    fn zero(&self, at: GuestOffset, len: u64, may_unmap: bool) -> Result<std::ops::Range<u64>>;

    /// As [`Format::zero`], for good: the bytes stay zero whatever image is put beneath this one
    /// later, or is there and holds zeroes now. A format without such a mark (the default) does
    /// nothing.
    fn zero_for_good(&self, at: GuestOffset, len: u64) -> Result<std::ops::Range<u64>> {
        let _ = len;
        Ok(at.0..at.0)
    }

    /// Makes the image hold nothing: all of its disk is what it stands on, or zero. Durable when it
    /// returns. A crash in the middle leaves some of it emptied.
    fn empty(&self) -> Result<()> {
        Err(Error::unsupported(
            self.storage().name(),
            format!("not supported: emptying a {} image", self.name()),
            "only an image that can stand on another one can hold nothing",
        ))
    }

    /// The guest does not need the bytes any more. Whole clusters are given back; afterwards they
    /// read as zero, never as what a backing image has there. Whatever cannot be given back stays
    /// as it is. (Raw images on block devices: see [`crate::Storage::forget`].)
    fn discard(&self, at: GuestOffset, len: u64) -> Result<()>;

    /// Makes everything that was written in place, published, zeroed or discarded before this
    /// call durable, in the order that keeps the image consistent at each moment. One flush serves
    /// all who asked before it began.
    fn flush(&self) -> Result<()>;

    /// Flushes, gives reserved space back and marks the image as cleanly closed. Dropping a
    /// format without this leaves what a crash would leave: consistent, perhaps with leaks.
    fn close(&self) -> Result<()>;

    /// Changes the size of the guest disk. Shrinking gives the space beyond the end back.
    fn resize(&self, guest_bytes: u64) -> Result<()>;

    /// [`Format::resize`] of an image that stands on a disk of `beneath` bytes. Where that one
    /// reaches into what is new, it must not show, not even after a crash in the middle. Returns
    /// whether the format hid it; by default it leaves that to the caller.
    fn resize_over(&self, guest_bytes: u64, beneath: u64) -> Result<bool> {
        let _ = beneath;
        self.resize(guest_bytes)?;
        Ok(false)
    }

    /// The image's internal snapshots, where the format has such.
    fn snapshots(&self) -> Option<&dyn Snapshots> {
        None
    }
}
