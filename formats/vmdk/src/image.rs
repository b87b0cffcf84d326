//! An open image.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vdkit_block::{
    BackingRef, DataRuns, Error, Extent, FileIndex, Format, FormatCaps, GuestOffset, InFlight,
    MapCache, MapCacheStats, Overlay, Reservation, Result, Storage, require_writable,
};
use vdkit_meta::{Engine, PageCache, Reclaim, State, Tickets};

use crate::cid::ContentId;
use crate::flush::Dirty;
use crate::map::{Chunk, Key};
use crate::sparse::Sparse;
use crate::write::Pending;
use crate::zero::Goal;

/// A VMDK image: the map of its extents, the allocation of grains, the order of its writes.
///
/// Lock order: the lead of flushes, `meta`, then the locks of the table cache, of an extent's
/// directories, or of the content id. Guest data never moves under any of them.
#[derive(Debug)]
pub struct Vmdk {
    /// The descriptor's file, or the single extent.
    pub(crate) storage: Arc<dyn Storage>,
    /// Files of the extents; `storage` itself if it is the single extent.
    pub(crate) files: Vec<Arc<dyn Storage>>,
    /// Whether each file was written since opening; each sync checks it.
    pub(crate) touched: Vec<AtomicBool>,
    /// Extents in disk order, without gaps.
    pub(crate) extents: Vec<Piece>,
    pub(crate) guest_bytes: u64,
    pub(crate) writable: bool,
    pub(crate) backing: Option<BackingRef>,
    pub(crate) warnings: Vec<String>,
    pub(crate) tables: PageCache<Key, Chunk>,
    pub(crate) in_flight: InFlight,
    pub(crate) meta: Engine<Meta, ()>,
    pub(crate) cid: ContentId,
    /// Largest grain; the file system's block size without grains.
    pub(crate) cluster_bytes: u64,
}

/// One extent within the disk.
#[derive(Debug)]
pub(crate) struct Piece {
    /// First guest byte.
    pub(crate) start: u64,
    /// Guest bytes.
    pub(crate) len: u64,
    /// It may be written (`RW`, and of a writable kind).
    pub(crate) writable: bool,
    pub(crate) kind: Kind,
    /// End of a sparse extent's file, including reserved grains.
    pub(crate) limit: AtomicU64,
}

#[derive(Debug)]
pub(crate) enum Kind {
    Flat(Flat),
    Zero,
    Sparse(Sparse),
}

/// Plain bytes in a file.
#[derive(Debug)]
pub(crate) struct Flat {
    pub(crate) file: FileIndex,
    /// Host offset of the first byte.
    pub(crate) at: u64,
    pub(crate) runs: DataRuns,
}

impl Piece {
    pub(crate) fn end(&self) -> u64 {
        self.start + self.len
    }

    pub(crate) fn sparse(&self) -> Option<&Sparse> {
        match &self.kind {
            Kind::Sparse(sparse) => Some(sparse),
            _ => None,
        }
    }
}

/// A sparse extent and its place on the disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grains<'a> {
    pub(crate) index: u32,
    pub(crate) piece: &'a Piece,
    pub(crate) sparse: &'a Sparse,
}

/// State that writers change, under one lock.
#[derive(Debug, Default)]
pub struct Meta {
    /// Space by extent.
    pub(crate) space: Vec<crate::space::Space>,
    pub(crate) tickets: Tickets<Pending>,
    /// Grains that lost their entry: by extent, in bytes of its file.
    pub(crate) reclaim: Reclaim,
    pub(crate) dirty: Dirty,
}

impl State for Meta {
    fn reclaim(&mut self) -> &mut Reclaim {
        &mut self.reclaim
    }

    fn idle(&self) -> bool {
        self.tickets.is_empty()
    }
}

impl Vmdk {
    /// The extent that holds a guest offset, which must be on the disk.
    pub(crate) fn extent_of(&self, at: u64) -> (u32, &Piece) {
        let index = self.extents.partition_point(|piece| piece.end() <= at);
        (index as u32, &self.extents[index])
    }

    pub(crate) fn piece(&self, index: u32) -> &Piece {
        &self.extents[index as usize]
    }

    /// An extent that has tables.
    pub(crate) fn grains(&self, index: u32) -> Grains<'_> {
        let piece = self.piece(index);
        let Some(sparse) = piece.sparse() else { unreachable!("only sparse extents have tables") };
        Grains { index, piece, sparse }
    }

    pub(crate) fn file_of(&self, index: FileIndex) -> &Arc<dyn Storage> {
        self.files.get(usize::from(index.0)).unwrap_or(&self.storage)
    }

    pub(crate) fn touch(&self, index: FileIndex) {
        if let Some(touched) = self.touched.get(usize::from(index.0)) {
            touched.store(true, Ordering::Release);
        }
    }

    pub(crate) fn need_writable(&self) -> Result<()> {
        require_writable(self.writable, self.storage.name())
    }

    pub(crate) fn in_range(&self, at: GuestOffset, len: u64) -> Result<()> {
        match at.0.checked_add(len) {
            Some(end) if end <= self.guest_bytes && len > 0 => Ok(()),
            _ => Err(Error::invalid_for(
                &self.storage.name(),
                format!("{len} bytes at {at} are not on the disk of {} bytes", self.guest_bytes),
            )),
        }
    }

    /// The error for a write to a read-only extent.
    pub(crate) fn refuse(&self, piece: &Piece) -> Error {
        let what = match &piece.kind {
            Kind::Zero => "writing to an extent of type ZERO",
            Kind::Sparse(sparse) if sparse.is_compressed() => {
                "writing to a stream-optimized extent"
            }
            Kind::Sparse(_) => "writing to an extent of this kind",
            Kind::Flat(_) => "writing to an extent that is not RW",
        };
        let hint = "convert the image to monolithicSparse or qcow2 and write there";
        Error::unsupported(self.storage.name(), what, hint)
    }
}

impl Format for Vmdk {
    fn name(&self) -> &'static str {
        "vmdk"
    }

    fn caps(&self) -> FormatCaps {
        let flat = self.extents.iter().all(|piece| matches!(piece.kind, Kind::Flat(_)));
        let aligned = self.extents.iter().all(|piece| match &piece.kind {
            Kind::Sparse(sparse) => {
                !sparse.is_compressed() && piece.start.is_multiple_of(sparse.grain_bytes)
            }
            _ => true,
        });
        let cheap = |piece: &Piece| match &piece.kind {
            Kind::Sparse(sparse) => self.backing.is_none() || sparse.has_zero_grains(),
            _ => true,
        };
        FormatCaps {
            writable: self.writable,
            cluster_bytes: self.cluster_bytes,
            fill_bytes: if flat { 1 } else { self.cluster_bytes },
            compressed: None,
            one_pass: false,
            cheap_zeroes: self.extents.iter().all(cheap),
            host_aligned: aligned,
        }
    }

    fn guest_bytes(&self) -> u64 {
        self.guest_bytes
    }

    vdkit_block::accessors!(backing, warnings, storage, in_flight);

    fn file(&self, index: FileIndex) -> &Arc<dyn Storage> {
        self.file_of(index)
    }

    fn file_count(&self) -> u16 {
        self.files.len() as u16
    }

    fn resolve(&self, at: GuestOffset, len: u64) -> Result<Extent> {
        self.in_range(at, len)?;
        self.map(at, len, true)
    }

    fn resolve_for_io(&self, at: GuestOffset, len: u64) -> Result<Extent> {
        self.in_range(at, len)?;
        self.map(at, len, false)
    }

    fn resolve_cached(&self, at: GuestOffset, len: u64) -> Option<Extent> {
        self.in_range(at, len).ok()?;
        self.map_cached(at, len)
    }

    fn note_write(&self, at: GuestOffset, len: u64) -> Result<()> {
        let _ = len;
        let (_, piece) = self.extent_of(at.0);
        match &piece.kind {
            Kind::Flat(flat) => self.touch(flat.file),
            Kind::Sparse(sparse) => self.touch(sparse.file),
            Kind::Zero => {}
        }
        // Durable before the bytes change: a child must never accept a changed parent.
        self.cid.change_durably(&*self.storage)
    }

    fn reserve(&self, at: GuestOffset, len: u64) -> Result<Option<Reservation<'_>>> {
        self.need_writable()?;
        self.in_range(at, len)?;
        self.reserve_grains(at, len)
    }

    fn zero(&self, at: GuestOffset, len: u64, may_unmap: bool) -> Result<Range<u64>> {
        self.need_writable()?;
        self.in_range(at, len)?;
        let _guard = self.in_flight.enter();
        self.over_extents(at.0..at.0 + len, Goal::Zero { may_unmap })
    }

    fn discard(&self, at: GuestOffset, len: u64) -> Result<()> {
        self.need_writable()?;
        self.in_range(at, len)?;
        let _guard = self.in_flight.enter();
        self.discard_range(at.0..at.0 + len)
    }

    fn flush(&self) -> Result<()> {
        if self.writable { self.meta.flush(self) } else { Ok(()) }
    }

    fn close(&self) -> Result<()> {
        if self.writable { self.meta.close(self) } else { Ok(()) }
    }

    fn resize(&self, guest_bytes: u64) -> Result<()> {
        self.need_writable()?;
        if guest_bytes == self.guest_bytes {
            return Ok(());
        }
        Err(Error::unsupported(
            self.storage.name(),
            "not supported: changing the size of a VMDK image in place",
            "convert it to qcow2 or raw, resize that, and convert it back",
        ))
    }

    fn map_cache(&self) -> Option<&dyn MapCache> {
        let sparse = self.extents.iter().any(|extent| extent.sparse().is_some());
        sparse.then_some(self as &dyn MapCache)
    }

    vdkit_block::capabilities!(compressed_units: CompressedUnits, overlay: Overlay);
}

impl MapCache for Vmdk {
    fn stats(&self) -> MapCacheStats {
        let of = |piece: &Piece| {
            piece.sparse().map_or(0, |s| piece.len.div_ceil(s.grain_bytes).saturating_mul(8))
        };
        let map_bytes = self.extents.iter().fold(0u64, |sum, piece| sum.saturating_add(of(piece)));
        self.tables.stats(map_bytes)
    }
}

impl Overlay for Vmdk {
    fn zero_persistent(&self, at: GuestOffset, len: u64) -> Result<Range<u64>> {
        self.need_writable()?;
        self.in_range(at, len)?;
        let _guard = self.in_flight.enter();
        self.over_extents(at.0..at.0 + len, Goal::ZeroForGood)
    }

    fn empty(&self) -> Result<()> {
        self.need_writable()?;
        self.empty_map()
    }
}
