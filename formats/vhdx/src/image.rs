//! An open image.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::RwLock;
use rustc_hash::FxHashMap;
use uuid::Uuid;
use vdkit_block::{
    BackingRef, Error, Extent, Fault, Format, FormatCaps, Gate, GuestOffset, InFlight, IoAction,
    Limits, MapCache, MapCacheStats, OpenRequest, Overlay, Place, Reservation, Result, Storage,
    random_uuid, require_writable,
};
use vdkit_meta::{Engine, PageCache, Reclaim, State, Tickets};

use crate::header::{Header, Headers};
use crate::layout::{FILE_BYTES_MAX, Geometry, PAGE_BYTES, Page};
use crate::log::entry::LoggedPage;
use crate::log::{self, LogWriter, Replayed};
use crate::map::Lookup;
use crate::metadata::{self, Metadata};
use crate::regions::{Region, Regions};
use crate::space::Space;
use crate::write::{Pending, PendingBlock};

/// Cluster size that is reported to callers, such as the unit of sharing. Any power of two up to 1
/// MiB is valid, since blocks are aligned to 1 MiB.
const UNIT_BYTES: u64 = 64 << 10;
/// Least capacity of the page cache: with fewer pages, each request would read.
const PAGES_MIN: usize = 64;

/// The structures before the block allocation table, with the log replayed.
#[derive(Debug)]
pub(crate) struct Parts {
    /// The file as after a replay of the log.
    pub(crate) storage: Arc<dyn Storage>,
    pub(crate) headers: Headers,
    pub(crate) regions: Regions,
    pub(crate) metadata: Metadata,
    /// Log entries that were replayed, in the file or in memory.
    pub(crate) log_entries: usize,
}

impl Parts {
    /// Reads headers, log, region tables and metadata. `writable` replays the log to the file;
    /// otherwise it is replayed in memory.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::Unsupported`], [`Error::Limit`]; I/O.
    pub(crate) fn read(
        storage: &Arc<dyn Storage>,
        writable: bool,
        limits: &Limits,
    ) -> Result<Self> {
        let mut headers = Headers::read(&**storage, limits)?;
        let mut replayed = storage.clone();
        let mut log_entries = 0;
        if let Some(sequence) = log::find(&**storage, &headers.current)? {
            log_entries = sequence.len();
            if writable {
                // Before any other change [2.2.2.1].
                let next = Header { file_write: random_uuid()?, ..headers.current };
                headers.update(&**storage, next)?;
                sequence.replay(&**storage)?;
                headers.synced();
                // Only after the replay, so that an interrupted replay is repeated.
                headers.update(&**storage, Header { log: Uuid::nil(), ..headers.current })?;
            } else {
                replayed = Arc::new(Replayed::new(storage.clone(), &sequence)?);
            }
        }
        let regions = Regions::read(&*replayed, &headers.current)?;
        let metadata = metadata::read(&*replayed, &regions.metadata)?;
        let (entries, room) =
            (metadata.geometry.bat_entries(metadata.guest_bytes), regions.bat.bytes / 8);
        if entries > room {
            return Err(Error::corrupt(
                storage.name(),
                regions.bat.offset,
                "block allocation table",
                format!("room for {room} entries"),
                format!("{entries} for {} bytes of disk [2.5]", metadata.guest_bytes),
            ));
        }
        let (end, file_bytes) = (regions.bat.offset + entries * 8, replayed.len()?);
        if end > file_bytes {
            return Err(Error::corrupt(
                storage.name(),
                regions.bat.offset,
                "block allocation table",
                format!("ends at {end:#x}, behind the file's end at {file_bytes:#x}"),
                "a table within the file [2.1]",
            ));
        }
        Ok(Self { storage: replayed, headers, regions, metadata, log_entries })
    }

    /// The parent that the metadata names.
    pub(crate) fn backing(&self) -> Result<Option<BackingRef>> {
        let Some(parent) = &self.metadata.parent else { return Ok(None) };
        let Some(name) = parent.name() else {
            return Err(Error::corrupt(
                self.storage.name(),
                self.metadata.locator_offset().unwrap_or(self.regions.metadata.offset),
                "parent locator",
                "no path",
                "relative_path, volume_path or absolute_win32_path [2.6.2.6.3]",
            ));
        };
        let identity = parent.identity();
        Ok(Some(BackingRef { identity, ..BackingRef::new(name, Some("vhdx".to_owned())) }))
    }
}

/// A VHDX image: the map, the allocator, and the order of its metadata writes.
///
/// Lock order: `gate`, the lead of flushes, `meta`, then the lock of `pages`. Guest data never moves
/// under any of them, but space that must be zeroed before its allocation is zeroed under `meta`.
#[derive(Debug)]
pub struct Vhdx {
    pub(crate) storage: Arc<dyn Storage>,
    pub(crate) geometry: Geometry,
    pub(crate) fixed: bool,
    pub(crate) writable: bool,
    pub(crate) guest_bytes: AtomicU64,
    pub(crate) metadata: Metadata,
    backing: Option<BackingRef>,
    /// The block allocation table and sector bitmaps, by their offset in the file.
    pub(crate) pages: PageCache<u64, Page>,
    /// Offset of the block allocation table; only a resize moves it.
    pub(crate) bat_offset: AtomicU64,
    /// Ranges that no payload block may overlap, as start and end: the first 1 MiB, the log,
    /// regions.
    pub(crate) taken: RwLock<Vec<(u64, u64)>>,
    /// Length of the file that blocks may use.
    pub(crate) file_bytes: AtomicU64,
    pub(crate) in_flight: InFlight,
    /// Closed while a resize moves the block allocation table.
    pub(crate) gate: Gate,
    pub(crate) meta: Engine<Meta, Log>,
    /// The headers have this session's GUIDs.
    pub(crate) session: AtomicBool,
    warnings: Vec<String>,
}

/// State that writers change, under one lock.
#[derive(Debug, Default)]
pub struct Meta {
    pub(crate) space: Option<Space>,
    /// Damage for which no space may be handed out or freed while the image is open.
    pub(crate) damage: Option<Box<Fault>>,
    pub(crate) tickets: Tickets<Pending>,
    /// Guest blocks with new space that at least one reservation holds.
    pub(crate) blocks: FxHashMap<u64, PendingBlock>,
    /// Guest data must be durable before the map that exposes it.
    pub(crate) data_first: bool,
    /// Space of freed blocks, in bytes of the file.
    pub(crate) reclaim: Reclaim,
    /// Space that reservations report as zero could not be zeroed.
    pub(crate) spoiled: bool,
}

impl State for Meta {
    fn reclaim(&mut self) -> &mut Reclaim {
        &mut self.reclaim
    }

    fn idle(&self) -> bool {
        self.tickets.is_empty()
    }
}

/// The lead of flushes: no other thread can begin a flush while it is held.
pub(crate) type Lead<'a> = vdkit_meta::Lead<'a, Log>;

/// The headers and the log, written by one flush at a time.
#[derive(Debug)]
pub struct Log {
    pub(crate) headers: Headers,
    pub(crate) log: LogWriter,
    pub(crate) regions: Vec<Region>,
    /// Pages that are durable in the log but may not be written in place yet.
    pub(crate) unapplied: Vec<LoggedPage>,
    /// The durable length of the file.
    pub(crate) durable_bytes: u64,
}

impl Vhdx {
    /// Opens an image. For writing, the log is replayed first.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::Unsupported`] and [`Error::Limit`] for invalid images;
    /// [`Error::ReadOnly`]; I/O.
    pub fn open(request: OpenRequest) -> Result<Arc<Self>> {
        let OpenRequest { storage, writable, limits, .. } = request;
        require_writable(!writable || storage.caps().writable, storage.name())?;
        let parts = Parts::read(&storage, writable, &limits)?;
        let mut warnings = Vec::new();
        if writable && parts.log_entries > 0 {
            warnings.push(format!(
                "{}: was not closed cleanly; {} entries of its log were replayed",
                storage.name(),
                parts.log_entries
            ));
        }
        if writable && parts.headers.current.log_bytes == 0 {
            return Err(Error::unsupported(
                storage.name(),
                "not supported: writing to an image without a log [2.2.2]",
                "convert it to a new image",
            ));
        }
        let backing = parts.backing()?;
        let Parts { storage, headers, regions, metadata, .. } = parts;
        let header = headers.current;
        let mut taken =
            vec![(0, 1 << 20), (header.log_offset, header.log_offset + header.log_bytes)];
        taken.extend(regions.all.iter().map(|region| (region.offset, region.end())));
        taken.sort_unstable();
        let file_bytes = storage.len()?.min(FILE_BYTES_MAX);
        let bat_offset = regions.bat.offset;
        let log = Log {
            headers,
            log: LogWriter::closed(),
            regions: regions.all,
            unapplied: Vec::new(),
            durable_bytes: 0,
        };
        Ok(Arc::new(Self {
            geometry: metadata.geometry,
            fixed: metadata.fixed,
            writable,
            guest_bytes: AtomicU64::new(metadata.guest_bytes),
            metadata,
            backing,
            pages: PageCache::new(limits.cache_bytes, PAGE_BYTES, PAGES_MIN),
            bat_offset: AtomicU64::new(bat_offset),
            taken: RwLock::new(taken),
            file_bytes: AtomicU64::new(file_bytes),
            in_flight: InFlight::default(),
            gate: Gate::default(),
            meta: Engine::new(Meta::default(), log),
            session: AtomicBool::new(false),
            warnings,
            storage,
        }))
    }

    /// Opens an image for a change of its own.
    pub(crate) fn open_writable(storage: &Arc<dyn Storage>, limits: &Limits) -> Result<Arc<Self>> {
        let (storage, files, limits) = (storage.clone(), Vec::new(), *limits);
        Self::open(OpenRequest { storage, files, writable: true, limits })
    }

    pub(crate) fn guest_len(&self) -> u64 {
        self.guest_bytes.load(Ordering::Acquire)
    }

    pub(crate) fn need_writable(&self) -> Result<()> {
        require_writable(self.writable, self.storage.name())
    }

    pub(crate) fn in_range(&self, at: u64, len: u64, action: IoAction) -> Result<()> {
        if at.checked_add(len).is_some_and(|end| end <= self.guest_len()) {
            return Ok(());
        }
        let source = std::io::Error::other("past the end of the disk");
        Err(Error::io(self.storage.name(), action, at, len, source))
    }
}

impl Format for Vhdx {
    fn name(&self) -> &'static str {
        "vhdx"
    }

    fn caps(&self) -> FormatCaps {
        FormatCaps {
            writable: self.writable,
            cluster_bytes: UNIT_BYTES,
            // A new block reads as zero, so a write need not fill a whole block.
            fill_bytes: self.geometry.sector_bytes(),
            compressed: None,
            one_pass: false,
            cheap_zeroes: !self.fixed,
            host_aligned: true,
        }
    }

    fn guest_bytes(&self) -> u64 {
        self.guest_len()
    }

    vdkit_block::accessors!(backing, warnings, storage, in_flight);

    fn gate(&self) -> Option<&Gate> {
        Some(&self.gate)
    }

    fn resolve(&self, at: GuestOffset, len: u64) -> Result<Extent> {
        self.in_range(at.0, len, IoAction::Map)?;
        let found = self.map(at.0, len, Lookup::Load)?;
        Ok(found.unwrap_or(Extent { len, place: Place::Hole }))
    }

    fn resolve_cached(&self, at: GuestOffset, len: u64) -> Option<Extent> {
        self.in_range(at.0, len, IoAction::Map).ok()?;
        self.map(at.0, len, Lookup::Cached).ok().flatten()
    }

    fn note_write(&self, _at: GuestOffset, _len: u64) -> Result<()> {
        self.begin_session()
    }

    fn reserve(&self, at: GuestOffset, len: u64) -> Result<Option<Reservation<'_>>> {
        self.need_writable()?;
        self.in_range(at.0, len, IoAction::Write)?;
        self.begin_session()?;
        self.reserve_range(at.0, len)
    }

    fn zero(&self, at: GuestOffset, len: u64, may_unmap: bool) -> Result<std::ops::Range<u64>> {
        self.need_writable()?;
        self.in_range(at.0, len, IoAction::WriteZeroes)?;
        if !may_unmap || self.fixed {
            return Ok(at.0..at.0);
        }
        self.zero_blocks(at.0, len)
    }

    fn discard(&self, at: GuestOffset, len: u64) -> Result<()> {
        self.need_writable()?;
        self.in_range(at.0, len, IoAction::Discard)?;
        self.discard_range(at.0, len)
    }

    fn flush(&self) -> Result<()> {
        if self.writable { self.meta.flush(self) } else { Ok(()) }
    }

    fn close(&self) -> Result<()> {
        if !self.writable {
            return Ok(());
        }
        // A request that changed the map between the last commit and the header without the log's GUID
        // would have its pages in place, but not durable.
        let _alone = self.gate.close();
        self.meta.close(self)
    }

    fn resize(&self, guest_bytes: u64) -> Result<()> {
        self.resize_over(guest_bytes, 0).map(drop)
    }

    vdkit_block::capabilities!(map_cache: MapCache, overlay: Overlay);
}

impl MapCache for Vhdx {
    fn stats(&self) -> MapCacheStats {
        self.pages.stats(self.geometry.bat_entries(self.guest_len()) * 8)
    }
}

impl Overlay for Vhdx {
    fn zero_persistent(&self, at: GuestOffset, len: u64) -> Result<std::ops::Range<u64>> {
        self.need_writable()?;
        self.in_range(at.0, len, IoAction::WriteZeroes)?;
        if self.fixed {
            return Ok(at.0..at.0);
        }
        self.zero_blocks(at.0, len)
    }

    fn empty(&self) -> Result<()> {
        self.need_writable()?;
        self.empty_all()
    }

    fn resize_over(&self, guest_bytes: u64, beneath: u64) -> Result<bool> {
        self.need_writable()?;
        self.resize_to(guest_bytes, beneath)?;
        Ok(true)
    }
}
