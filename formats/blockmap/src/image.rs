//! An open image.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};
use vdkit_block::{
    Error, Extent, FileIndex, Format, FormatCaps, Gate, GuestOffset, HostOffset, InFlight,
    IoAction, Limits, MapCache, MapCacheStats, Place, Remedy, Reservation, Result, Storage,
    ZeroMode, is_aligned, require_writable,
};
use vdkit_meta::{Engine, MutexGuard, Reclaim, Tickets};

use crate::geometry::{Geometry, Slot};
use crate::sectors::{self, SectorMaps, run_of};
use crate::table::{PAGE_BYTES, PAGE_ENTRIES, PAGES_MIN, Page, Table, read_page, walk};

/// Most entries that one map lookup reads.
const RUN_ENTRIES_MAX: usize = 1 << 16;

/// Structures around the blocks and their table, which must be updated as blocks change. It holds the
/// image's storage.
pub trait Envelope: Send + Sync + fmt::Debug + 'static {
    /// The format's name.
    fn name(&self) -> &'static str;

    /// Bytes after the last block: VHD's footer.
    fn tail_bytes(&self) -> u64 {
        0
    }

    /// Called after the file has grown for blocks up to `end`: writes the structures after them.
    fn grown(&self, _end: u64) -> Result<()> {
        Ok(())
    }

    /// Called before a new host block at `start` is linked: writes the structures before its data.
    fn new_block(&self, _start: u64) -> Result<()> {
        Ok(())
    }

    /// Called before data of the host block at `start` is overwritten, if the block existed when
    /// the image was opened.
    fn before_write(&self, _start: u64) -> Result<()> {
        Ok(())
    }

    /// Called before entries of blocks up to `end` are written: writes what must be durable before
    /// them.
    fn before_map(&self, _geometry: &Geometry, _end: u64) -> Result<()> {
        Ok(())
    }

    /// Called on close, with blocks that end at `end`: updates the structures and truncates the
    /// file.
    fn finish(&self, geometry: &Geometry, end: u64) -> Result<()>;

    /// The actual size of a disk of `guest_bytes`: formats may round up.
    ///
    /// # Errors
    /// The format's limits.
    fn judge_size(&self, geometry: &Geometry, guest_bytes: u64) -> Result<u64>;

    /// Whether all blocks are allocated (VDI's static images).
    fn all_allocated(&self) -> bool {
        false
    }

    /// Whether the image has a parent, which missing blocks expose.
    fn over_parent(&self) -> bool {
        false
    }

    /// Makes room for a table of `entries` in the file, whose blocks end at `end`, and copies the
    /// table if it moves; nothing refers to the copy yet. The caller writes the new entries
    /// afterwards. Returns the new geometry, and the new end of the blocks.
    ///
    /// # Errors
    /// If there is no room; those of the storage.
    fn room_for(&self, geometry: &Geometry, entries: u64, end: u64) -> Result<(Geometry, u64)>;

    /// Durably writes the header for this table and size, with blocks that end at `end`, if
    /// possible in one sector.
    fn resized(&self, geometry: &Geometry, guest_bytes: u64, end: u64) -> Result<()>;

    /// Rereads the header after a failed change that may have reached the file, and uses it from
    /// now on. Returns the geometry and the size of the disk.
    ///
    /// # Errors
    /// Those of the storage; faults of the header.
    fn stored(&self) -> Result<(Geometry, u64)>;

    /// Called before the first change of guest data since opening.
    fn modified(&self) -> Result<()> {
        Ok(())
    }
}

/// Consecutive host blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewBlocks {
    /// Offset of the first one.
    pub(crate) start: u64,
    /// Number of blocks.
    pub(crate) count: u64,
    /// Their data was never written, so it reads as zero.
    pub(crate) fresh: bool,
}

/// Parameters for opening an image.
#[derive(Debug)]
pub struct Opening {
    /// The file.
    pub storage: Arc<dyn Storage>,
    /// Whether to open for writing.
    pub writable: bool,
    /// Resource limits.
    pub limits: Limits,
    /// Table and blocks, validated.
    pub geometry: Geometry,
    /// Bytes of the guest disk.
    pub guest_bytes: u64,
    /// The image has a parent.
    pub has_parent: bool,
    /// Each block has a bitmap of its present sectors; the parent provides the others
    /// ([`Geometry::skip`]). Without such bitmaps, an image with a parent is read-only.
    pub sector_maps: bool,
    /// Warnings for the user.
    pub warnings: Vec<String>,
}

/// An image: the map, the allocator and the order of its metadata writes.
///
/// Lock order: `gate`, the lead of flushes, `state`, then the table's locks. Resizing and closing
/// move blocks with all but the last one held, so no request is under way.
#[derive(Debug)]
pub struct BlockImage<E> {
    pub(crate) envelope: E,
    pub(crate) storage: Arc<dyn Storage>,
    pub(crate) writable: bool,
    /// Changed only by a resize, with `gate` closed.
    pub(crate) geometry: RwLock<Geometry>,
    pub(crate) guest_bytes: AtomicU64,
    /// Bytes of the file, for validating entries.
    pub(crate) host_bytes: AtomicU64,
    pub(crate) table: Table,
    in_flight: InFlight,
    pub(crate) gate: Gate,
    warnings: Vec<String>,
    /// Sector bitmaps of the blocks; `None` if all sectors are present.
    pub(crate) sectors: Option<SectorMaps>,
    pub(crate) state: Engine<State, ()>,
    /// Held while the envelope is notified of the first change of guest data.
    noting_change: Mutex<()>,
    /// The envelope has handled that notification.
    change_noted: AtomicBool,
    /// A resize failed, and then the header could not be read: the valid table is unknown.
    pub(crate) lost: AtomicBool,
}

/// State that writers change, under one lock.
#[derive(Debug, Default)]
pub struct State {
    /// Reservations, by guest block numbers.
    pub(crate) tickets: Tickets<Pending>,
    /// Always empty: no block is freed while an image is open.
    reclaim: Reclaim,
    /// New blocks begin here.
    pub(crate) frontier: u64,
    /// End of published blocks.
    pub(crate) used_end: u64,
    /// Blocks may extend to here without growing the file.
    pub(crate) room_end: u64,
    /// From here on the file was never written.
    pub(crate) fresh_from: u64,
    /// Offsets beyond `fresh_from` at which the envelope wrote its tail in advance.
    pub(crate) tails: Vec<u64>,
    /// Bytes of the next growth of the file.
    pub(crate) batch: u64,
    /// Blocks below the frontier that were reserved and released.
    pub(crate) given_back: Vec<u64>,
    /// The file's length or structures must be corrected on close.
    pub(crate) unfinished: bool,
}

impl vdkit_meta::State for State {
    fn reclaim(&mut self) -> &mut Reclaim {
        &mut self.reclaim
    }

    fn idle(&self) -> bool {
        self.tickets.is_empty()
    }
}

/// A reservation that is neither published nor released.
#[derive(Clone, Debug)]
pub(crate) struct Pending {
    pub(crate) space: NewBlocks,
    /// Bytes within a single, already allocated block that become present.
    pub(crate) patch: Option<Range<u64>>,
}

impl<E: Envelope> BlockImage<E> {
    /// Opens a validated image. For writing, reads the whole table once.
    ///
    /// # Errors
    /// [`Error::ReadOnly`]; for writing also [`Error::Corrupt`] for an entry that points outside of
    /// the file, and [`Error::Unsupported`] for an image with a parent.
    pub fn open(envelope: E, opening: Opening) -> Result<Self> {
        let Opening { storage, writable, limits, geometry, guest_bytes, .. } = opening;
        require_writable(!writable || storage.caps().writable, storage.name())?;
        let host_bytes = storage.len()?;
        let mut used_end = geometry.first_block;
        if writable {
            if opening.has_parent && !opening.sector_maps {
                return Err(Error::unsupported(
                    storage.name(),
                    format!(
                        "not supported: writing to a {} image that stands on another one",
                        envelope.name()
                    ),
                    Remedy::Overlay,
                ));
            }
            used_end = end_of_blocks(&*storage, &geometry, host_bytes)?;
        }
        let room = host_bytes.saturating_sub(envelope.tail_bytes());
        let state = State {
            frontier: used_end,
            used_end,
            room_end: if storage.caps().growable { used_end } else { room },
            fresh_from: if storage.caps().growable { host_bytes } else { u64::MAX },
            ..State::default()
        };
        Ok(Self {
            envelope,
            writable,
            geometry: RwLock::new(geometry),
            guest_bytes: AtomicU64::new(guest_bytes),
            host_bytes: AtomicU64::new(host_bytes),
            table: Table::new(limits.cache_bytes, PAGE_BYTES, PAGES_MIN),
            in_flight: InFlight::default(),
            gate: Gate::default(),
            warnings: opening.warnings,
            sectors: (opening.has_parent && opening.sector_maps)
                .then(|| sectors::cache(geometry.skip)),
            state: Engine::new(state, ()),
            noting_change: Mutex::new(()),
            change_noted: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            storage,
        })
    }

    /// The current geometry of table and blocks.
    pub fn geometry(&self) -> Geometry {
        *self.geometry.read()
    }

    pub(crate) fn guest_len(&self) -> u64 {
        self.guest_bytes.load(Ordering::Acquire)
    }

    pub(crate) fn need_writable(&self) -> Result<()> {
        require_writable(self.writable, self.storage.name())?;
        self.check_lost()
    }

    /// Fails while the valid table is unknown, since nothing may be written then. Retries reading
    /// the header first.
    pub(crate) fn check_lost(&self) -> Result<()> {
        if !self.lost.load(Ordering::Acquire) {
            return Ok(());
        }
        self.find_again(&mut self.state.lock())
    }

    /// As [`BlockImage::check_lost`], for callers that hold the state.
    pub(crate) fn find_again(&self, state: &mut MutexGuard<'_, State>) -> Result<()> {
        // Only without open reservations, whose space is in no table and would count as free.
        if self.lost.load(Ordering::Acquire) && state.tickets.is_empty() {
            self.follow_file(state, None);
        }
        self.refuse_lost()
    }

    /// As [`BlockImage::check_lost`], without a retry.
    pub(crate) fn refuse_lost(&self) -> Result<()> {
        if !self.lost.load(Ordering::Acquire) {
            return Ok(());
        }
        let source = std::io::Error::other("a resize failed, and the header cannot be read since");
        Err(Error::io(self.storage.name(), IoAction::Write, 0, 0, source))
    }

    pub(crate) fn in_range(&self, at: GuestOffset, len: u64, action: IoAction) -> Result<()> {
        match at.0.checked_add(len) {
            Some(end) if end <= self.guest_len() && len > 0 => Ok(()),
            _ => Err(Error::io(
                self.storage.name(),
                action,
                at.0,
                len,
                std::io::Error::other("the range is not on the disk"),
            )),
        }
    }

    /// Notifies the envelope once that guest data changes. No guest data changes before the
    /// envelope has finished its writes.
    fn note_change(&self) -> Result<()> {
        if self.change_noted.load(Ordering::Acquire) {
            return Ok(());
        }
        let _noting = self.noting_change.lock();
        if !self.change_noted.load(Ordering::Acquire) {
            self.envelope.modified()?;
            self.change_noted.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// The entry of a block.
    ///
    /// # Errors
    /// Those of the storage.
    pub(crate) fn word(&self, block: u64) -> Result<u32> {
        let (page, index) = (block / PAGE_ENTRIES as u64, block as usize % PAGE_ENTRIES);
        self.table.with_loaded(page, || self.read_page(page), |words| words[index])
    }

    pub(crate) fn read_page(&self, number: u64) -> Result<Page> {
        read_page(&*self.storage, &self.geometry(), number)
    }

    /// A map lookup in the cached table.
    fn run(&self, at: GuestOffset, len: u64) -> Option<Result<Extent>> {
        let geometry = self.geometry();
        let block_bytes = geometry.block_bytes;
        let (block, within) = (at.0 / block_bytes, at.0 % block_bytes);
        self.table.with(block / PAGE_ENTRIES as u64, |page| {
            let words = &page[block as usize % PAGE_ENTRIES..];
            let first = geometry.slot(words[0]);
            let mut run = block_bytes - within;
            for (n, word) in words.iter().enumerate().skip(1).take(RUN_ENTRIES_MAX) {
                let follows = match (first, geometry.slot(*word)) {
                    // Bytes before each block's data separate them.
                    (Slot::At(start), Slot::At(next)) => {
                        geometry.skip == 0 && next == start + n as u64 * geometry.stride()
                    }
                    (first, next) => first == next,
                };
                if !follows || run >= len {
                    break;
                }
                run += block_bytes;
            }
            let len = run.min(len);
            let place = match first {
                Slot::Hole => Place::Hole,
                Slot::Zero => Place::Zero { allocated: false },
                Slot::At(start) => {
                    let host_bytes = self.host_bytes.load(Ordering::Acquire);
                    let last = start + (within + len - 1) / block_bytes * geometry.stride();
                    let (file, index) = (self.storage.name(), block);
                    geometry.judge(file, index, start, host_bytes)?;
                    // The blocks in between are valid if the first and the last one are.
                    geometry.judge(file, index, last, host_bytes)?;
                    let offset = HostOffset(start + geometry.skip + within);
                    Place::Data { file: FileIndex(0), offset, exclusive: true }
                }
            };
            Ok(Extent { len, place })
        })
    }

    /// The first part of a run whose sectors are all present or all missing; `None` if the block's
    /// bitmap is not cached.
    fn by_sectors(&self, at: GuestOffset, run: Extent) -> Option<Extent> {
        let (Some(sectors), Place::Data { offset, .. }) = (&self.sectors, run.place) else {
            return Some(run);
        };
        let geometry = self.geometry();
        let within = at.0 % geometry.block_bytes;
        let start = offset.0 - within - geometry.skip;
        let (present, len) = sectors.with(start, |bitmap| run_of(bitmap, within, run.len))?;
        Some(Extent { len, place: if present { run.place } else { Place::Hole } })
    }

    /// Loads the bitmap of the block of a guest offset, if there are bitmaps.
    pub(crate) fn load_sectors(&self, at: GuestOffset) -> Result<()> {
        let geometry = self.geometry();
        let slot = geometry.slot(self.word(at.0 / geometry.block_bytes)?);
        match (&self.sectors, slot) {
            (Some(sectors), Slot::At(start)) => {
                sectors.load(start, || sectors::read(&*self.storage, start, geometry.skip))
            }
            _ => Ok(()),
        }
    }

    /// Calls `act` for each run of data in a range.
    fn each_data(
        &self,
        at: GuestOffset,
        len: u64,
        mut act: impl FnMut(HostOffset, u64) -> Result<()>,
    ) -> Result<()> {
        let _guard = self.in_flight.enter();
        let mut done = 0;
        while done < len {
            let extent = self.resolve(at + done, len - done)?;
            if let Place::Data { offset, .. } = extent.place {
                act(offset, extent.len)?;
            }
            done += extent.len;
        }
        Ok(())
    }
}

/// End of the blocks that a table names.
pub(crate) fn end_of_blocks(
    storage: &dyn Storage,
    geometry: &Geometry,
    host_bytes: u64,
) -> Result<u64> {
    // A moved table may be after blocks, with room for more blocks before it.
    let mut end = geometry.kept_end;
    walk(storage, geometry, |first, words| {
        for (n, word) in words.iter().enumerate() {
            if let Slot::At(start) = geometry.slot(*word) {
                geometry.judge(storage.name(), first + n as u64, start, host_bytes)?;
                end = end.max(start + geometry.stride());
            }
        }
        Ok(false)
    })?;
    Ok(end)
}

impl<E: Envelope> Format for BlockImage<E> {
    fn name(&self) -> &'static str {
        self.envelope.name()
    }

    fn caps(&self) -> FormatCaps {
        let geometry = self.geometry();
        // A guest block boundary must be a boundary in the file, at least of file system blocks.
        let host_block = u64::from(self.storage.caps().block_bytes).max(4096);
        let first = geometry.base % geometry.unit + geometry.skip;
        let aligned = is_aligned(first, host_block.next_power_of_two())
            && is_aligned(geometry.stride(), host_block.next_power_of_two());
        FormatCaps {
            writable: self.writable,
            cluster_bytes: geometry.block_bytes,
            fill_bytes: if self.sectors.is_some() { 512 } else { geometry.block_bytes },
            compressed: None,
            one_pass: false,
            cheap_zeroes: self.sectors.is_none(),
            host_aligned: aligned && geometry.unit == geometry.stride(),
        }
    }

    fn guest_bytes(&self) -> u64 {
        self.guest_len()
    }

    vdkit_block::accessors!(warnings, storage, in_flight);

    fn gate(&self) -> Option<&Gate> {
        Some(&self.gate)
    }

    fn resolve(&self, at: GuestOffset, len: u64) -> Result<Extent> {
        self.in_range(at, len, IoAction::Map)?;
        loop {
            if let Some(answer) = self.run(at, len) {
                match self.by_sectors(at, answer?) {
                    Some(run) => return Ok(run),
                    None => self.load_sectors(at)?,
                }
                continue;
            }
            let page = at.0 / self.geometry().block_bytes / PAGE_ENTRIES as u64;
            self.table.load(page, || self.read_page(page))?;
        }
    }

    fn resolve_cached(&self, at: GuestOffset, len: u64) -> Option<Extent> {
        self.in_range(at, len, IoAction::Map).ok()?;
        // `resolve` reports damage.
        self.by_sectors(at, self.run(at, len)?.ok()?)
    }

    fn note_write(&self, at: GuestOffset, len: u64) -> Result<()> {
        self.check_lost()?;
        self.note_change()?;
        let geometry = self.geometry();
        if geometry.skip == 0 || self.sectors.is_some() {
            return Ok(());
        }
        let last = (at.0 + len.max(1) - 1) / geometry.block_bytes;
        for block in at.0 / geometry.block_bytes..=last {
            if let Slot::At(start) = geometry.slot(self.word(block)?) {
                self.envelope.before_write(start)?;
            }
        }
        Ok(())
    }

    fn reserve(&self, at: GuestOffset, len: u64) -> Result<Option<Reservation<'_>>> {
        self.need_writable()?;
        self.in_range(at, len, IoAction::Write)?;
        self.note_change()?;
        self.reserve_blocks(at, len)
    }

    /// Ranges without a block read as zero already; existing blocks are zeroed in place. With
    /// sector bitmaps this does not apply: the caller writes the zeroes.
    fn zero(&self, at: GuestOffset, len: u64, may_unmap: bool) -> Result<Range<u64>> {
        self.need_writable()?;
        self.in_range(at, len, IoAction::WriteZeroes)?;
        if self.sectors.is_some() {
            return Ok(at.0..at.0);
        }
        self.note_change()?;
        let mode = if may_unmap { ZeroMode::MayUnmap } else { ZeroMode::KeepAllocated };
        self.each_data(at, len, |offset, len| self.storage.write_zeroes(offset, len, mode))?;
        Ok(at.0..at.0 + len)
    }

    /// Discards the space in the file system; the blocks keep their places in the file.
    fn discard(&self, at: GuestOffset, len: u64) -> Result<()> {
        self.need_writable()?;
        self.in_range(at, len, IoAction::Discard)?;
        self.note_change()?;
        self.each_data(at, len, |offset, len| self.storage.discard(offset, len))
    }

    fn flush(&self) -> Result<()> {
        if self.writable { self.state.flush(self) } else { Ok(()) }
    }

    fn close(&self) -> Result<()> {
        if !self.writable {
            return Ok(());
        }
        // The gaps that failed writes left are closed.
        let _alone = self.gate.close();
        self.state.close(self)
    }

    fn resize(&self, guest_bytes: u64) -> Result<()> {
        self.need_writable()?;
        self.resize_to(guest_bytes)
    }

    vdkit_block::capabilities!(map_cache: MapCache);
}

impl<E: Envelope> MapCache for BlockImage<E> {
    fn stats(&self) -> MapCacheStats {
        self.table.stats(self.geometry().table_bytes())
    }
}
