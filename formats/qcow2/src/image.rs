//! An open image.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::RwLock;
use rustc_hash::FxHashSet;
use vdkit_block::{
    BackingRef, Compressed, CompressedReservation, CompressedUnits, CompressedWriter, Error,
    Extent, FileIndex, Format, FormatCaps, GuestOffset, HostOffset, InFlight, IoAction, Limits,
    MapCache, MapCacheStats, Monitor, OpenRequest, Overlay, Remedy, Reservation, Result, Secret,
    Storage, require_writable,
};
use vdkit_meta::{Engine, Reclaim, State, Tickets};

use crate::allocator::HostSpace;
use crate::bitmaps::state::State as BitmapState;
use crate::check;
use crate::codec;
use crate::encrypted;
use crate::flush::Dirty;
use crate::header::{DiskTables, Encryption, Header, LastingHeader, write_features};
use crate::l1::{Cut, read_l1};
use crate::layout::{COPIED, Geometry, OFFSET_MASK, autoclear, incompatible};
use crate::metadata::Metadata;
use crate::refcounts::Refcounts;
use crate::slices::SliceCache;
use crate::snapshots::{SnapshotTable, TablePlace};
use crate::structures::header_offset;
use crate::write::Pending;

/// A qcow2 image: the map, the allocator and the order of its metadata writes.
///
/// Lock order: `bitmaps.admin`, the lead of flushes, `meta`, then `l1`, `metadata` or a shard of
/// `slices` (never two of these at once), or the locks of `bitmaps`. No guest request moves data
/// while it holds any of them; a resize moves the data of the disk's last cluster under `meta`.
#[derive(Debug)]
pub struct Qcow2 {
    pub(crate) header: LastingHeader,
    pub(crate) geometry: Geometry,
    pub(crate) storage: Arc<dyn Storage>,
    /// Where guest data lives: `storage` again, or the data file.
    pub(crate) data: Arc<dyn Storage>,
    pub(crate) writable: bool,
    pub(crate) guest_bytes: AtomicU64,
    /// Size to which the disk grows just now; 0 otherwise.
    pub(crate) growing_to: AtomicU64,
    backing: Option<BackingRef>,
    pub(crate) l1: RwLock<Vec<u64>>,
    /// Host offset of the active L1 table; changed under `meta`.
    l1_offset: AtomicU64,
    /// See [`Qcow2::frontier`]; changed under `meta`.
    frontier: AtomicU64,
    /// Set if the file of a read-only image ends before some L2 tables.
    pub(crate) cut: Option<Cut>,
    pub(crate) slices: SliceCache,
    /// See [`MapCache::expect_one_pass`].
    pub(crate) one_pass: AtomicBool,
    pub(crate) metadata: RwLock<Metadata>,
    pub(crate) in_flight: InFlight,
    pub(crate) meta: Engine<Meta, ()>,
    pub(crate) bitmaps: BitmapState,
    warnings: Vec<String>,
    pub(crate) limits: Limits,
    pub(crate) encryption: Option<vdkit_block::Encryption>,
}

/// The lead of flushes: no other thread can begin a flush while it is held.
pub(crate) type Lead<'a> = vdkit_meta::Lead<'a, ()>;

/// State that writers change, under one lock.
#[derive(Debug)]
pub struct Meta {
    pub(crate) space: HostSpace,
    pub(crate) dirty: Dirty,
    pub(crate) tickets: Tickets<Pending>,
    /// Host clusters, each of which lost one reference.
    pub(crate) reclaim: Reclaim,
    pub(crate) header: HeaderState,
    pub(crate) snapshots: SnapshotList,
    /// A running flush holds copies of dirty metadata.
    pub(crate) flush_running: bool,
    /// An exclusive operation runs, and new reservations wait until it has ended; see
    /// [`Qcow2::exclusively`].
    pub(crate) exclusive: bool,
}

/// State of the header on disk.
#[derive(Debug, Default)]
pub(crate) struct HeaderState {
    /// The dirty bit of lazy refcounts is set on disk.
    pub(crate) lazy_dirty: bool,
    /// A header write failed and could not be undone; see [`Meta::check_header`].
    pub(crate) unknown: bool,
    /// Offset of that write, and the bytes to restore there.
    pub(crate) before: (u64, Vec<u8>),
}

/// The table of internal snapshots.
#[derive(Debug)]
pub(crate) struct SnapshotList {
    pub(crate) count: u32,
    pub(crate) offset: HostOffset,
    /// Bytes of their table; 0 when read-only.
    pub(crate) bytes: u64,
}

impl State for Meta {
    fn reclaim(&mut self) -> &mut Reclaim {
        &mut self.reclaim
    }

    fn idle(&self) -> bool {
        self.tickets.is_empty()
    }
}

impl Qcow2 {
    /// Opens an image: reads the header, the L1 table and, for writing, the refcount table.
    ///
    /// # Errors
    /// As [`Header::read`]; [`Error::Key`] for an encrypted image; [`Error::Corrupt`] when opening
    /// an image for writing that is marked corrupt.
    pub fn open(request: OpenRequest) -> Result<Arc<Self>> {
        Self::open_with_keys(request, &[])
    }

    /// As [`Qcow2::open`], with keys for an image that may be encrypted.
    ///
    /// # Errors
    /// As [`Qcow2::open`]; [`Error::Key`] if none of the keys fits.
    pub fn open_with_keys(request: OpenRequest, keys: &[Secret]) -> Result<Arc<Self>> {
        Self::open_unlocked(request, Some(keys))
    }

    /// As [`Qcow2::open`], for metadata changes only: a LUKS image stays locked, so its guest data
    /// must be neither read nor written.
    pub(crate) fn open_for_metadata(request: OpenRequest) -> Result<Arc<Self>> {
        Self::open_unlocked(request, None)
    }

    /// Opens an image with keys, or for metadata changes only.
    fn open_unlocked(request: OpenRequest, keys: Option<&[Secret]>) -> Result<Arc<Self>> {
        let OpenRequest { storage, files, writable, limits } = request;
        let mut header = Header::read(&*storage, &limits)?;
        if writable {
            header.refuse_corrupt(storage.name())?;
        }
        let encryption = match keys {
            None if header.encryption == Encryption::Luks => {
                encrypted::luks_place(&header, &*storage)?;
                None
            }
            _ => {
                let keys = keys.unwrap_or_default();
                encrypted::unlock(&header, &storage, writable, &limits, keys)?
            }
        };
        let data = Self::data_storage(&header, &storage, files)?;
        let mut warnings = Vec::new();
        if writable && header.has(incompatible::DIRTY) {
            header = Self::rebuild_refcounts(&storage, &limits, &mut warnings)?;
        }
        let l1 = read_l1(&header, &*storage)?;
        let cut = Cut::find(&l1, header.geometry, &*storage, &mut warnings)?;
        if let (true, Some(cut)) = (writable, cut) {
            // The next allocations would overlap the missing tables.
            cut.refuse(&l1, header.l1_offset, &*storage)?;
        }
        let geometry = header.geometry;
        let mut meta = Self::meta(&header, &*storage, writable)?;
        let mut metadata = Metadata::default();
        let mut bitmaps = BitmapState::unread(&limits);
        if writable {
            let refcounts = &mut meta.space.refcounts;
            let snapshots = SnapshotTable::read(&*storage, TablePlace::of(&header), &limits)?;
            meta.snapshots.bytes = snapshots.bytes;
            let live = metadata_clusters(&header, snapshots.bytes, refcounts, &l1, &*storage)?;
            metadata = Metadata::new(live);
            snapshots.l1_clusters(geometry).for_each(|table| metadata.insert_snapshot_l1(table));
            refuse_owners(&l1, geometry, refcounts, &*storage)?;
            Self::clear_autoclear(&mut header, &*storage, &mut warnings)?;
            bitmaps =
                BitmapState::open(&mut header, &*storage, &mut metadata, &limits, &mut warnings)?;
            if !storage.caps().growable {
                refuse_uncounted(metadata.live(), &meta.space.refcounts, geometry, &*storage)?;
            } else if is_blank(&header, &l1, &meta.space.refcounts) {
                zero_after(metadata.live(), &mut meta.space);
            }
        }
        Ok(Arc::new(Self {
            writable,
            metadata: RwLock::new(metadata),
            bitmaps,
            warnings,
            encryption,
            ..Self::for_reading(header, storage, data, (l1, cut), meta, limits)
        }))
    }

    /// An image that is only read, without warnings and not encrypted.
    fn for_reading(
        header: Header,
        storage: Arc<dyn Storage>,
        data: Arc<dyn Storage>,
        (l1, cut): (Vec<u64>, Option<Cut>),
        meta: Meta,
        limits: Limits,
    ) -> Self {
        let backing =
            header.backing_name.clone().map(|name| BackingRef::new(name, header.backing_format()));
        Self {
            geometry: header.geometry,
            storage,
            data,
            writable: false,
            guest_bytes: AtomicU64::new(header.guest_bytes),
            growing_to: AtomicU64::new(0),
            backing,
            l1: RwLock::new(l1),
            l1_offset: AtomicU64::new(header.l1_offset.0),
            frontier: AtomicU64::new(meta.space.scan_end),
            cut,
            slices: SliceCache::new(header.geometry.cluster_bytes(), limits.cache_bytes),
            one_pass: AtomicBool::new(false),
            metadata: RwLock::default(),
            in_flight: InFlight::default(),
            meta: Engine::new(meta, ()),
            bitmaps: BitmapState::unread(&limits),
            warnings: Vec::new(),
            limits,
            encryption: None,
            header: LastingHeader::new(header),
        }
    }

    /// Rebuilds the refcounts of an image that was not closed; returns the new header.
    fn rebuild_refcounts(
        storage: &Arc<dyn Storage>,
        limits: &Limits,
        warnings: &mut Vec<String>,
    ) -> Result<Header> {
        let file = storage.name();
        warnings.push(format!("{file}: was not closed cleanly; its refcounts are rebuilt"));
        let monitor = Monitor::default();
        check::rebuild_refcounts(storage, limits, &monitor)?;
        Header::read(&**storage, limits)
    }

    /// The storage of guest data: the image itself, or its data file.
    fn data_storage(
        header: &Header,
        storage: &Arc<dyn Storage>,
        files: Vec<Arc<dyn Storage>>,
    ) -> Result<Arc<dyn Storage>> {
        if !header.has_data_file() {
            return Ok(storage.clone());
        }
        files.into_iter().next().ok_or_else(|| {
            Error::invalid_for(
                &storage.name(),
                format!(
                    "its guest data is in another file ({}), which was not opened",
                    header.data_file_name().unwrap_or_else(|| "without a name".into())
                ),
            )
        })
    }

    /// Opens the same file read-only with other tables.
    pub(crate) fn reading(&self, disk: DiskTables) -> Result<Arc<Self>> {
        let header = self.header.with_disk(disk);
        let l1 = read_l1(&header, &*self.storage)?;
        let mut warnings = Vec::new();
        let cut = Cut::find(&l1, self.geometry, &*self.storage, &mut warnings)?;
        let meta = Self::meta(&header, &*self.storage, false)?;
        let (storage, data) = (Arc::clone(&self.storage), Arc::clone(&self.data));
        Ok(Arc::new(Self {
            warnings,
            encryption: self.encryption.clone(),
            ..Self::for_reading(header, storage, data, (l1, cut), meta, self.limits)
        }))
    }

    /// Clears the autoclear bits that vdkit does not maintain, and warns about the consequences.
    fn clear_autoclear(
        header: &mut Header,
        storage: &dyn Storage,
        warnings: &mut Vec<String>,
    ) -> Result<()> {
        let unknown = header.autoclear & !autoclear::KNOWN;
        if unknown == 0 {
            return Ok(());
        }
        warnings.push(format!(
            "{}: unknown autoclear features {unknown:#x} are cleared, as the format asks of a \
             writer that does not know them",
            storage.name()
        ));
        // Durable before the first write that would make the bits wrong.
        header.autoclear &= autoclear::KNOWN;
        write_features(storage, header_offset!(autoclear_features), header.autoclear)
    }

    fn meta(header: &Header, storage: &dyn Storage, writable: bool) -> Result<Meta> {
        let refcounts =
            if writable { Refcounts::read(header, storage)? } else { Refcounts::empty(header) };
        let len = storage.len()?;
        let cluster = header.geometry.cluster_bytes();
        let file_clusters = len.div_ceil(cluster);
        // A device cannot grow. Any cluster that its refcount blocks describe may be in use, so all
        // of them are scanned.
        let frontier = if storage.caps().growable {
            file_clusters
        } else {
            refcounts.covered_end().min(len / cluster)
        };
        Ok(Meta {
            space: HostSpace::new(refcounts, frontier, header),
            dirty: Dirty::default(),
            tickets: Tickets::default(),
            reclaim: Reclaim::default(),
            header: HeaderState::default(),
            snapshots: SnapshotList {
                count: header.snapshot_count,
                offset: header.snapshots_offset,
                bytes: 0,
            },
            flush_running: false,
            exclusive: false,
        })
    }

    pub(crate) fn l1_offset(&self) -> HostOffset {
        HostOffset(self.l1_offset.load(Ordering::Acquire))
    }

    /// Records that the header now names another L1 table, under `meta`. Returns the offset of the
    /// old one.
    pub(crate) fn l1_moved(&self, new: HostOffset) -> HostOffset {
        HostOffset(self.l1_offset.swap(new.0, Ordering::AcqRel))
    }

    /// The host cluster at which the file grows. From here on no cluster is allocated, but a
    /// truncated image may refer to some.
    pub(crate) fn frontier(&self) -> u64 {
        self.frontier.load(Ordering::Acquire)
    }

    pub(crate) fn set_frontier(&self, _under: &mut Meta, cluster: u64) {
        self.frontier.store(cluster, Ordering::Release);
    }

    pub(crate) fn has_data_file(&self) -> bool {
        self.header.has_data_file()
    }

    pub(crate) fn guest_len(&self) -> u64 {
        self.guest_bytes.load(Ordering::Acquire)
    }

    pub(crate) fn has_backing(&self) -> bool {
        self.backing.is_some()
    }

    pub(crate) fn need_writable(&self) -> Result<()> {
        require_writable(self.writable, self.storage.name())
    }

    pub(crate) fn in_range(&self, at: GuestOffset, len: u64, action: IoAction) -> Result<()> {
        let size = self.guest_len();
        if at.0.checked_add(len).is_some_and(|end| end <= size) {
            return Ok(());
        }
        Err(Error::invalid_for(
            &self.storage.name(),
            format!("cannot {action} {len} bytes at guest offset {at}: the disk has {size} bytes"),
        ))
    }

    /// Decompresses a cluster whose bytes were read from `offset`.
    pub(crate) fn unpack_cluster(
        &self,
        offset: HostOffset,
        compressed: &[u8],
        out: &mut [u8],
    ) -> Result<()> {
        let codec = self.header.codec();
        codec::unpack(codec, compressed, out).map_err(|fault| {
            Error::corrupt(
                self.storage.name(),
                offset.0,
                "compressed cluster",
                fault.to_string(),
                format!("{} bytes of {codec} data", out.len()),
            )
        })
    }

    /// The error for an invalid L2 entry, at `index` of `table`.
    pub(crate) fn entry_fault(
        &self,
        table: HostOffset,
        index: u64,
        word: u64,
        expected: &str,
    ) -> Error {
        Error::corrupt(
            self.storage.name(),
            table.0 + index * self.geometry.l2_entry_bytes(),
            "L2 entry",
            format!("{word:#018x}"),
            expected,
        )
        .with_remedy(Remedy::Check)
    }
}

/// Fails if a metadata cluster has no refcount block. On a device, clusters without one count as
/// free, and allocations would overwrite the metadata there, and the data around it.
fn refuse_uncounted(
    metadata: &FxHashSet<u64>,
    refcounts: &Refcounts,
    geometry: Geometry,
    storage: &dyn Storage,
) -> Result<()> {
    let Some(&cluster) = metadata.iter().filter(|&&cluster| !refcounts.covered(cluster)).min()
    else {
        return Ok(());
    };
    Err(Error::corrupt(
        storage.name(),
        cluster << geometry.cluster_bits,
        "host cluster",
        "metadata that no refcount block describes",
        "a refcount block for each cluster of metadata",
    )
    .with_remedy(Remedy::REPAIR))
}

/// An image without L2 tables, snapshots and bitmaps, such as a new one, refers to no cluster beyond
/// its metadata and the end of its file. Refcounts there are zero and need not be read.
fn zero_after(metadata: &FxHashSet<u64>, space: &mut HostSpace) {
    let end = metadata.iter().max().map_or(0, |&last| last + 1);
    space.refcounts.zero_from(end.max(space.scan_end));
}

/// Whether only the header and its empty tables refer to clusters, and no two refcount table
/// entries name the same block.
fn is_blank(header: &Header, l1: &[u64], refcounts: &Refcounts) -> bool {
    header.snapshot_count == 0
        && header.bitmaps().is_none()
        && l1.iter().all(|&word| word == 0)
        && refcounts.blocks_differ()
}

/// Host clusters of the header, the tables and the refcount blocks.
///
/// # Errors
/// [`Error::Corrupt`] if two of these share a cluster, since a write of one would destroy the other.
/// Only several L1 entries may name one L2 table, which is then copied before it changes.
fn metadata_clusters(
    header: &Header,
    snapshots_bytes: u64,
    refcounts: &Refcounts,
    l1: &[u64],
    storage: &dyn Storage,
) -> Result<FxHashSet<u64>> {
    let bits = header.geometry.cluster_bits;
    let (mut set, mut shared) = (FxHashSet::default(), None);
    let mut range = |offset: HostOffset, bytes: u64| {
        // The offset of an empty table may be anything.
        let clusters = offset.0 >> bits..(offset.0 + bytes).div_ceil(1 << bits);
        for cluster in clusters.filter(|_| bytes > 0) {
            if !set.insert(cluster) {
                shared = Some(cluster);
            }
        }
    };
    range(HostOffset(0), 1);
    range(header.l1_offset, l1.len() as u64 * 8);
    range(header.refcount_table_offset, u64::from(header.refcount_table_clusters) << bits);
    range(header.snapshots_offset, snapshots_bytes);
    // Validated when the image was opened; meaningless without encryption.
    if let (Encryption::Luks, Some((offset, bytes))) =
        (header.encryption, header.encryption_header())
    {
        range(offset, bytes);
    }
    for &entry in refcounts.table.iter().filter(|&&e| e != 0) {
        range(HostOffset(entry), 1);
    }
    let tables = l1.iter().map(|word| (word & OFFSET_MASK) >> bits).filter(|&cluster| cluster != 0);
    if let Some(cluster) = shared.or_else(|| tables.clone().find(|table| set.contains(table))) {
        return Err(Error::corrupt(
            storage.name(),
            cluster << bits,
            "host cluster",
            "metadata of two kinds",
            "a cluster for each table",
        )
        .with_remedy(Remedy::REPAIR));
    }
    set.extend(tables);
    Ok(set)
}

/// Refuses an L2 table that several L1 entries name, if one of them has the COPIED flag, or if the
/// refcount is smaller than their number: a write through one entry would change what another one
/// shows, or free the table.
///
/// # Errors
/// [`Error::Corrupt`]. Those of reading refcounts, which only such tables need.
fn refuse_owners(
    l1: &[u64],
    geometry: Geometry,
    refcounts: &mut Refcounts,
    storage: &dyn Storage,
) -> Result<()> {
    let bits = geometry.cluster_bits;
    let mut tables: Vec<u64> = l1.iter().copied().filter(|word| word & OFFSET_MASK != 0).collect();
    tables.sort_unstable_by_key(|word| word & OFFSET_MASK);
    for entries in tables.chunk_by(|a, b| (a ^ b) & OFFSET_MASK == 0).filter(|run| run.len() > 1) {
        let table = entries[0] & OFFSET_MASK;
        let owners = entries.iter().filter(|&word| word & COPIED != 0).count();
        let counted = refcounts.get(table >> bits, storage)?;
        if owners > 0 || counted < entries.len() as u64 {
            let count = entries.len();
            return Err(Error::corrupt(
                storage.name(),
                table,
                "L2 table",
                format!(
                    "{count} L1 entries, {owners} with COPIED flag, and a refcount of {counted}"
                ),
                "a reference for each entry, and no COPIED flag if there are several",
            )
            .with_remedy(Remedy::REPAIR));
        }
    }
    Ok(())
}

impl Format for Qcow2 {
    fn name(&self) -> &'static str {
        "qcow2"
    }

    fn caps(&self) -> FormatCaps {
        FormatCaps {
            writable: self.writable,
            cluster_bytes: self.geometry.cluster_bytes(),
            fill_bytes: self.geometry.subcluster_bytes(),
            one_pass: false,
            compressed: (!self.has_data_file() && self.encryption.is_none())
                .then_some(self.header.codec()),
            cheap_zeroes: self.header.version() >= 3 && !self.header.data_file_raw(),
            host_aligned: true,
        }
    }

    fn guest_bytes(&self) -> u64 {
        self.guest_len()
    }

    vdkit_block::accessors!(backing, warnings, storage, in_flight);

    fn encryption(&self) -> Option<&vdkit_block::Encryption> {
        self.encryption.as_ref()
    }

    fn file(&self, _index: FileIndex) -> &Arc<dyn Storage> {
        &self.data
    }

    fn resolve(&self, at: GuestOffset, len: u64) -> Result<Extent> {
        self.in_range(at, len, IoAction::Map)?;
        self.map_loading(at, len)
    }

    fn resolve_cached(&self, at: GuestOffset, len: u64) -> Option<Extent> {
        self.map_cached(at, len)
    }

    fn note_write(&self, at: GuestOffset, len: u64) -> Result<()> {
        self.note(at.0..at.0.saturating_add(len))
    }

    fn reserve(&self, at: GuestOffset, len: u64) -> Result<Option<Reservation<'_>>> {
        self.need_writable()?;
        self.in_range(at, len, IoAction::Write)?;
        let reserved = self.reserve_plain(at, len)?;
        if let Some(space) = &reserved {
            self.note(space.write.clone())?;
        }
        Ok(reserved)
    }

    fn zero(&self, at: GuestOffset, len: u64, may_unmap: bool) -> Result<std::ops::Range<u64>> {
        self.need_writable()?;
        self.in_range(at, len, IoAction::WriteZeroes)?;
        let _guard = self.in_flight.enter();
        self.note(at.0..at.0 + len)?;
        self.zero_range(at, len, may_unmap, false)
    }

    fn discard(&self, at: GuestOffset, len: u64) -> Result<()> {
        self.need_writable()?;
        self.in_range(at, len, IoAction::Discard)?;
        let _guard = self.in_flight.enter();
        self.note(at.0..at.0 + len)?;
        self.discard_range(at, len)
    }

    fn flush(&self) -> Result<()> {
        if self.writable { self.meta.flush(self) } else { Ok(()) }
    }

    fn close(&self) -> Result<()> {
        if self.writable { self.meta.close(self) } else { Ok(()) }
    }

    fn resize(&self, guest_bytes: u64) -> Result<()> {
        self.resize_over(guest_bytes, 0).map(drop)
    }

    vdkit_block::capabilities! {
        bitmaps: Bitmaps, snapshots: Snapshots, map_cache: MapCache, overlay: Overlay,
        compressed_units: CompressedUnits, compressed_writer: CompressedWriter
    }
}

impl MapCache for Qcow2 {
    fn stats(&self) -> MapCacheStats {
        let clusters = self.guest_len().div_ceil(self.geometry.cluster_bytes());
        let map_bytes = clusters.saturating_mul(self.geometry.l2_entry_bytes());
        MapCacheStats { map_bytes, ..self.slices.stats() }
    }

    fn expect_one_pass(&self) {
        self.one_pass.store(true, Ordering::Relaxed);
    }
}

impl CompressedUnits for Qcow2 {
    fn unpack(
        &self,
        compressed: &Compressed,
        compressed_bytes: &[u8],
        out: &mut [u8],
    ) -> Result<()> {
        self.unpack_cluster(compressed.offset, compressed_bytes, out)
    }
}

impl CompressedWriter for Qcow2 {
    fn reserve_compressed(
        &self,
        at: GuestOffset,
        lens: &[u32],
    ) -> Result<CompressedReservation<'_>> {
        self.need_writable()?;
        let reserved = self.reserve_compressed(at, lens)?;
        let bytes = reserved.units as u64 * self.geometry.cluster_bytes();
        self.note(at.0..(at.0 + bytes).min(self.guest_len()))?;
        Ok(reserved)
    }
}

impl Overlay for Qcow2 {
    fn zero_persistent(&self, at: GuestOffset, len: u64) -> Result<std::ops::Range<u64>> {
        self.need_writable()?;
        self.in_range(at, len, IoAction::WriteZeroes)?;
        let _guard = self.in_flight.enter();
        self.note(at.0..at.0 + len)?;
        self.zero_range(at, len, true, true)
    }

    fn empty(&self) -> Result<()> {
        self.empty_map()
    }

    fn resize_over(&self, guest_bytes: u64, beneath: u64) -> Result<bool> {
        self.need_writable()?;
        self.resize_to(guest_bytes, beneath)?;
        Ok(true)
    }
}
