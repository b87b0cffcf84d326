//! A format: a map from guest bytes to host bytes.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::bitmaps::Bitmaps;
use crate::codec::Codec;
use crate::encryption::Encryption;
use crate::error::{Error, Result};
use crate::extent::{Compressed, Extent, FileIndex};
use crate::gate::Gate;
use crate::in_flight::InFlight;
use crate::reservation::{CompressedFrame, CompressedReservation, Reservation};
use crate::snapshots::Snapshots;
use crate::storage::Storage;
use crate::units::GuestOffset;

/// A backing reference from image metadata. The name is untrusted: check it against the policy
/// before opening it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingRef {
    /// The name as stored, relative to the image's folder or absolute.
    pub name: String,
    /// The format that the image records.
    pub format: Option<String>,
    /// The backing image's [`ImageInfo::identity`](crate::ImageInfo::identity) when the overlay was
    /// created, in formats that record it.
    pub identity: Option<String>,
    /// Its modification time in seconds since 1970, in formats that record it.
    pub modified: Option<u64>,
}

impl BackingRef {
    /// A reference without an identity and a time.
    pub fn new(name: impl Into<String>, format: Option<String>) -> Self {
        Self { name: name.into(), format, identity: None, modified: None }
    }
}

/// Capabilities of an open image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormatCaps {
    /// The image was opened for writing.
    pub writable: bool,
    /// Unit of allocation in bytes: a cluster.
    pub cluster_bytes: u64,
    /// The smallest aligned unit that a write can allocate without a fill: the subcluster if the
    /// image has them, else the cluster; 1 if every byte is already allocated.
    pub fill_bytes: u64,
    /// Codec of compressed writes, if supported.
    pub compressed: Option<Codec>,
    /// The image is written once, front to back. The only operations are
    /// [`CompressedWriter::reserve_compressed`], for units in guest order, each at most once, and
    /// [`Format::close`]. [`FormatCaps::compressed`] names the codec; units that do not shrink are
    /// compressed nevertheless.
    pub one_pass: bool,
    /// `zero` only changes metadata.
    pub cheap_zeroes: bool,
    /// Guest clusters are aligned to the cluster size in the host file, so movers may share blocks
    /// (reflink).
    pub host_aligned: bool,
}

/// Size and hit counts of a format's map cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MapCacheStats {
    /// Cache hits. A request makes one or several lookups.
    pub hits: u64,
    /// Cache misses, each of which read from the image.
    pub misses: u64,
    /// Bytes of the map in the cache now.
    pub used_bytes: u64,
    /// Capacity in bytes; dirty entries are never evicted and may exceed it.
    pub capacity_bytes: u64,
    /// Bytes of the map of a fully allocated disk. A cache of this size reads each entry once.
    pub map_bytes: u64,
}

impl MapCacheStats {
    /// Sums two caches, such as those of a chain.
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

/// Methods of [`Format`] that return the image's field of the same name.
#[macro_export]
macro_rules! accessors {
    ($($field:ident),+) => {
        $($crate::accessors!(@ $field);)+
    };
    (@ backing) => {
        fn backing(&self) -> Option<&$crate::BackingRef> {
            self.backing.as_ref()
        }
    };
    (@ warnings) => {
        fn warnings(&self) -> &[String] {
            &self.warnings
        }
    };
    (@ storage) => {
        fn storage(&self) -> &std::sync::Arc<dyn $crate::Storage> {
            &self.storage
        }
    };
    (@ in_flight) => {
        fn in_flight(&self) -> &$crate::InFlight {
            &self.in_flight
        }
    };
}

/// A disk format: resolves, reserves, and orders its metadata writes. See the crate's documentation
/// for the life of a request.
///
/// Ranges passed in must lie within [`Format::guest_bytes`]; `len` is never 0. Offsets and lengths are
/// in bytes.
///
/// # Errors
/// Unless a method says more: those of the storages, and [`Error::Corrupt`] for damaged metadata. A
/// method that changes the image returns [`Error::ReadOnly`] if it was opened for reading, and an error
/// of the kind [`NoSpace`](crate::ErrorKind::NoSpace) if the file cannot grow.
pub trait Format: Send + Sync + fmt::Debug {
    /// The format's name, such as `qcow2`.
    fn name(&self) -> &'static str;

    /// Capabilities of this image.
    fn caps(&self) -> FormatCaps;

    /// Bytes of the guest disk.
    fn guest_bytes(&self) -> u64;

    /// The backing reference in the metadata.
    fn backing(&self) -> Option<&BackingRef> {
        None
    }

    /// Warnings from opening the image.
    fn warnings(&self) -> &[String] {
        &[]
    }

    /// Encryption of all [`Place::Data`](crate::Place::Data) extents. With encryption, extents and
    /// reservations are whole sectors ([`crate::CIPHER_SECTOR_BYTES`]), both for the guest and on
    /// the host. Space that was never written does not read as zero, and the format must not claim
    /// that it does.
    fn encryption(&self) -> Option<&Encryption> {
        None
    }

    /// Whether a new image reads as zero everywhere.
    fn new_reads_zero(&self) -> bool {
        true
    }

    /// The storage with the metadata.
    fn storage(&self) -> &Arc<dyn Storage>;

    /// A storage that extents point into; by default, [`Format::storage`] has everything.
    fn file(&self, index: FileIndex) -> &Arc<dyn Storage> {
        let _ = index;
        self.storage()
    }

    /// Number of valid indexes for [`Format::file`].
    fn file_count(&self) -> u16 {
        1
    }

    /// The in-flight counter: enter before resolving, leave after the I/O on the extents.
    fn in_flight(&self) -> &InFlight;

    /// The gate of a format that moves blocks or tables when it is resized or closed. It closes the
    /// gate itself meanwhile. Each request enters it once, before it resolves or reserves, and
    /// leaves it after its I/O and its publications. `None` if requests may run at any time.
    fn gate(&self) -> Option<&Gate> {
        None
    }

    /// The extent at `at`: the longest run that is cheap to find, at most `len`.
    fn resolve(&self, at: GuestOffset, len: u64) -> Result<Extent>;

    /// [`Format::resolve`] for a request about to do I/O. A format that allocates every byte (raw)
    /// returns exclusive [`Place::Data`](crate::Place::Data) for the whole range: querying the host
    /// file system for holes would cost more than it saves, and holes of a raw image are written in
    /// place. All other formats answer as `resolve`.
    fn resolve_for_io(&self, at: GuestOffset, len: u64) -> Result<Extent> {
        self.resolve(at, len)
    }

    /// [`Format::resolve_for_io`] without I/O; `None` if it would need I/O. The extent may be
    /// shorter.
    fn resolve_cached(&self, at: GuestOffset, len: u64) -> Option<Extent>;

    /// Records a coming write in place in the dirty bitmaps. Call it after
    /// [`Format::resolve_for_io`] and before the write. The format itself records reservations,
    /// zeroing and discards. Nearly free if no bitmap records.
    fn note_write(&self, at: GuestOffset, len: u64) -> Result<()> {
        let _ = (at, len);
        Ok(())
    }

    /// Reserves host space for a write of `len` bytes at `at`. Returns `None` if the map changed
    /// meanwhile and the bytes can be written in place: resolve again. The reservation may cover
    /// less than requested. Waits for an overlapping reservation of another thread.
    fn reserve(&self, at: GuestOffset, len: u64) -> Result<Option<Reservation<'_>>>;

    /// Zeroes whole units ([`FormatCaps::fill_bytes`], or up to the end of the disk) by metadata
    /// alone. Returns the guest range that it zeroed, which may be empty; the caller writes zeroes to
    /// the rest. `may_unmap` allows freeing the space.
    fn zero(&self, at: GuestOffset, len: u64, may_unmap: bool) -> Result<std::ops::Range<u64>>;

    /// Discards guest bytes. Whole clusters are freed and then read as zero, never as the backing
    /// image. The rest stays unchanged. (Raw images on block devices: see
    /// [`crate::GuestDiscard::forget`].)
    fn discard(&self, at: GuestOffset, len: u64) -> Result<()>;

    /// Makes everything that was written in place, published, zeroed or discarded before this call
    /// durable, in an order that keeps the image consistent at every moment. One flush serves all
    /// callers that asked before it began.
    fn flush(&self) -> Result<()>;

    /// Flushes, frees unused reserved space and marks the image as cleanly closed. Dropping a
    /// format without `close` leaves the state of a crash: consistent, perhaps with leaks. After an
    /// error the image is as after a crash, and closing can be retried.
    fn close(&self) -> Result<()>;

    /// Resizes the guest disk. Shrinking frees the space beyond the end. Requests may run meanwhile,
    /// if they enter [`Format::gate`]. The calling thread must not be within one.
    ///
    /// # Errors
    /// [`Error::Limit`] for a size beyond the format's limit; [`Error::Unsupported`] if the image cannot
    /// be resized.
    fn resize(&self, guest_bytes: u64) -> Result<()>;

    crate::capabilities::queries! {
        /// The cache of the map; `None` for formats without one.
        map_cache: MapCache,
        /// Reading compressed units, for formats with [`Place::Compressed`](crate::Place::Compressed).
        compressed_units: CompressedUnits,
        /// Writing compressed units. [`FormatCaps::compressed`] says whether this image takes them.
        compressed_writer: CompressedWriter,
        /// What formats with backing images can do besides.
        overlay: Overlay,
        /// The persistent dirty bitmaps; `None` for formats without them.
        bitmaps: Bitmaps,
        /// The internal snapshots; `None` for formats without them.
        snapshots: Snapshots,
    }
}

/// The cache of a map; see [`Format::map_cache`].
pub trait MapCache {
    /// Size and hit counts.
    fn stats(&self) -> MapCacheStats;

    /// Announces that map scans from now on run once, front to back. The cache need not keep what a
    /// scan has passed. Guest requests are cached as before.
    fn expect_one_pass(&self) {}
}

/// Reading compressed units; see [`Format::compressed_units`].
pub trait CompressedUnits {
    /// Decompresses a unit. `compressed_bytes` are the [`Compressed::len`] bytes read from its
    /// location; `out` is the whole unit, of [`Compressed::unpacked_len`] bytes.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the bytes do not decompress to a whole unit.
    fn unpack(&self, unit: &Compressed, compressed_bytes: &[u8], out: &mut [u8]) -> Result<()>;
}

/// Writing compressed units; see [`Format::compressed_writer`].
pub trait CompressedWriter {
    /// Framing of compressed units; empty in most formats.
    fn compressed_frame(&self) -> CompressedFrame {
        CompressedFrame::default()
    }

    /// Fills in the frame of a compressed unit at guest offset `at`, before
    /// [`CompressedWriter::reserve_compressed`]. `framed` is [`CompressedFrame::head_bytes`]
    /// zeroes, `payload_bytes` of compressed bytes, and zeroes up to [`CompressedFrame::align`].
    /// Called in any order by any thread.
    fn frame_compressed(&self, at: GuestOffset, framed: &mut [u8], payload_bytes: u32) {
        let _ = (at, framed, payload_bytes);
    }

    /// Reserves host space for compressed units of these byte lengths, including frames, for
    /// consecutive clusters from `at`.
    ///
    /// # Errors
    /// Those of [`Format::reserve`]; [`Error::Invalid`] for clusters past the end of the disk.
    fn reserve_compressed(
        &self,
        at: GuestOffset,
        lens: &[u32],
    ) -> Result<CompressedReservation<'_>>;
}

/// What an image on a backing image can do; see [`Format::overlay`].
pub trait Overlay: Format {
    /// As [`Format::zero`], but the bytes stay zero whatever the backing image holds, now or after
    /// a later rebase.
    fn zero_persistent(&self, at: GuestOffset, len: u64) -> Result<std::ops::Range<u64>>;

    /// Drops all data of the image, so that the disk reads as the backing image or zero. Durable on
    /// return. A crash leaves the image partly emptied.
    fn empty(&self) -> Result<()>;

    /// [`Format::resize`] of an overlay whose backing disk has `beneath` bytes. Backing data must
    /// not show in the added range, not even after a crash. Returns whether the format hid that
    /// data; by default the caller must.
    fn resize_over(&self, guest_bytes: u64, beneath: u64) -> Result<bool> {
        let _ = beneath;
        self.resize(guest_bytes)?;
        Ok(false)
    }
}

/// The error for a capability that a format lacks; `what` precedes "a … image".
fn lacking(format: &dyn Format, what: impl fmt::Display, hint: &str) -> Error {
    let what = format!("not supported: {what} a {} image", format.name());
    Error::unsupported(format.storage().name(), what, hint)
}

/// What callers need beyond the contract: helpers, and each capability with its fallback or its
/// error.
impl dyn Format + '_ {
    /// The storages other than [`Format::storage`], each once, in the order of
    /// [`OpenRequest::files`](crate::OpenRequest::files). The format's file indexes follow this
    /// order.
    pub fn other_files(&self) -> Vec<Arc<dyn Storage>> {
        let mut others: Vec<Arc<dyn Storage>> = Vec::new();
        for index in 0..self.file_count() {
            let file = self.file(FileIndex(index));
            if !Arc::ptr_eq(file, self.storage()) && !others.iter().any(|o| Arc::ptr_eq(o, file)) {
                others.push(file.clone());
            }
        }
        others
    }

    /// See [`CompressedUnits::unpack`].
    ///
    /// # Errors
    /// As [`CompressedUnits::unpack`]; [`Error::Unsupported`] for formats without compressed units.
    pub fn unpack(&self, unit: &Compressed, compressed_bytes: &[u8], out: &mut [u8]) -> Result<()> {
        match self.compressed_units() {
            Some(units) => units.unpack(unit, compressed_bytes, out),
            None => {
                let what = format!("{} data in", unit.codec);
                Err(lacking(self, what, "this format has no compressed data"))
            }
        }
    }

    /// The format's [`CompressedWriter`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] for formats without one.
    pub fn writes_compressed(&self) -> Result<&dyn CompressedWriter> {
        self.compressed_writer()
            .ok_or_else(|| lacking(self, "writing compressed data to", "convert to qcow2 instead"))
    }

    /// The internal snapshots. `hint` is for users whose format has none.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for formats without them.
    pub fn require_snapshots(&self, hint: &str) -> Result<&dyn Snapshots> {
        self.snapshots().ok_or_else(|| lacking(self, "snapshots inside", hint))
    }

    /// The persistent dirty bitmaps.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for formats without them.
    pub fn require_bitmaps(&self) -> Result<&dyn Bitmaps> {
        self.bitmaps().ok_or_else(|| lacking(self, "dirty bitmaps in", "convert to qcow2"))
    }

    /// See [`Overlay::zero_persistent`]; the empty range for formats without backing images.
    pub fn zero_persistent(&self, at: GuestOffset, len: u64) -> Result<std::ops::Range<u64>> {
        self.overlay().map_or(Ok(at.0..at.0), |overlay| overlay.zero_persistent(at, len))
    }

    /// See [`Overlay::empty`].
    ///
    /// # Errors
    /// As [`Format`]; [`Error::Unsupported`] for formats without backing images.
    pub fn empty(&self) -> Result<()> {
        match self.overlay() {
            Some(overlay) => overlay.empty(),
            None => {
                Err(lacking(self, "emptying", "only a format with backing images can be emptied"))
            }
        }
    }

    /// See [`Overlay::resize_over`].
    pub fn resize_over(&self, guest_bytes: u64, beneath: u64) -> Result<bool> {
        match self.overlay() {
            Some(overlay) => overlay.resize_over(guest_bytes, beneath),
            None => self.resize(guest_bytes).map(|()| false),
        }
    }
}
