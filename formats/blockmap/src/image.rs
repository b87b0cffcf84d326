//! An open image.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};
use vdkit_block::{
    Error, Extent, FileIndex, Format, FormatCaps, GuestOffset, HostOffset, InFlight, IoAction,
    Limits, MapCacheStats, Place, Reservation, Reserver, Result, Storage, Ticket, ZeroMode,
    is_aligned,
};
use vdkit_meta::{Engine, MutexGuard, Reclaim, Tickets};

use crate::geometry::{Geometry, Slot};
use crate::sectors::{self, SectorMaps, run_of};
use crate::table::{PAGE_BYTES, PAGE_ENTRIES, PAGES_MIN, Page, Table, read_page, walk};

/// How many entries one answer of the map looks at.
const RUN_ENTRIES_MAX: usize = 1 << 16;

/// What stands around the blocks and their table, and has to be kept right as blocks come and go.
pub trait Envelope: Send + Sync + fmt::Debug + 'static {
    /// The format's name.
    fn name(&self) -> &'static str;

    /// Bytes that stand behind the last block: VHD's footer.
    fn tail_bytes(&self) -> u64 {
        0
    }

    /// The file was made longer, so that blocks may reach to `end`: writes what stands behind them.
    fn grown(&self, storage: &dyn Storage, end: u64) -> Result<()> {
        let _ = (storage, end);
        Ok(())
    }

    /// A new host block at `start` is about to be shown: writes what stands before its data.
    fn new_block(&self, storage: &dyn Storage, start: u64) -> Result<()> {
        let _ = (storage, start);
        Ok(())
    }

    /// Data of the host block at `start`, which was there when the image was opened, are about to be
    /// overwritten.
    fn before_write(&self, storage: &dyn Storage, start: u64) -> Result<()> {
        let _ = (storage, start);
        Ok(())
    }

    /// Entries of blocks that end at `end` at the latest are about to be written: writes what must
    /// be durable before them.
    fn before_map(&self, storage: &dyn Storage, geometry: &Geometry, end: u64) -> Result<()> {
        let _ = (storage, geometry, end);
        Ok(())
    }

    /// The image is closed: blocks end at `end`. Writes what tells so and cuts the file there.
    fn finish(&self, storage: &dyn Storage, geometry: &Geometry, end: u64) -> Result<()>;

    /// The bytes that the disk has when it shall have `guest_bytes`: formats may round up.
    ///
    /// # Errors
    /// What the format's limits are.
    fn judge_size(&self, file: &str, guest_bytes: u64) -> Result<u64>;

    /// Whether all blocks have their place in the file (VDI's static images).
    fn all_allocated(&self) -> bool {
        false
    }

    /// Whether something lies beneath that a block which is not here shows.
    fn over_parent(&self) -> bool {
        false
    }

    /// Makes room for a table of `entries` in the file, `end` being where blocks end, and copies the
    /// table there if it moves; nothing refers to it yet. The new entries are made afterwards.
    /// Answers what the image will be, and where its blocks end.
    ///
    /// # Errors
    /// Where there is no room; those of the storage.
    fn room_for(
        &self,
        storage: &dyn Storage,
        geometry: &Geometry,
        entries: u64,
        end: u64,
    ) -> Result<(Geometry, u64)>;

    /// Writes the header for this table and size, with blocks that end at `end`, in one sector where
    /// it can be, and makes it durable.
    fn resized(
        &self,
        storage: &dyn Storage,
        geometry: &Geometry,
        guest_bytes: u64,
        end: u64,
    ) -> Result<()>;

    /// Reads the header again, after a change of it that failed and may have reached the file, and goes by
    /// it from now on. Answers the table and the bytes of the disk.
    ///
    /// # Errors
    /// Those of the storage; what the header is refused for.
    fn stored(&self, storage: &dyn Storage) -> Result<(Geometry, u64)>;

    /// The guest's bytes are about to change for the first time since the image was opened.
    fn modified(&self, storage: &dyn Storage) -> Result<()> {
        let _ = storage;
        Ok(())
    }
}

/// Host blocks that follow each other.
#[derive(Clone, Copy, Debug)]
pub struct NewBlocks {
    /// Offset of the first one.
    pub start: u64,
    /// How many.
    pub count: u64,
    /// Nothing was written to their data yet: it reads as zero.
    pub fresh: bool,
}

/// What an image is opened with.
#[derive(Debug)]
pub struct Opening {
    /// The file.
    pub storage: Arc<dyn Storage>,
    /// For writing.
    pub writable: bool,
    /// What it may cost.
    pub limits: Limits,
    /// Table and blocks, judged.
    pub geometry: Geometry,
    /// Bytes of the guest disk.
    pub guest_bytes: u64,
    /// It stands on another image.
    pub has_parent: bool,
    /// Each block has a bitmap of the sectors that are in it, which says where the parent shows
    /// ([`Geometry::skip`]). An image over a parent without that can only be read.
    pub sector_maps: bool,
    /// What the user should know.
    pub warnings: Vec<String>,
}

/// An image: the map, the allocator and the order of its metadata writes.
///
/// Locks, in the order in which they are taken: the lead of flushes, `state`, then the table's own.
/// Resizing moves blocks under both, when no request is in flight.
#[derive(Debug)]
pub struct BlockImage<E> {
    pub(crate) envelope: E,
    pub(crate) storage: Arc<dyn Storage>,
    pub(crate) writable: bool,
    /// Changed by resizing only, when no request is in flight.
    pub(crate) geometry: RwLock<Geometry>,
    pub(crate) guest_bytes: AtomicU64,
    /// Where the file ends, for judging entries.
    pub(crate) host_bytes: AtomicU64,
    pub(crate) table: Table,
    in_flight: InFlight,
    warnings: Vec<String>,
    /// Which sectors are in the blocks; nothing where all are.
    pub(crate) sectors: Option<SectorMaps>,
    pub(crate) state: Engine<State, ()>,
    /// The envelope was told that the guest's bytes change: held while it is told.
    telling: Mutex<()>,
    /// It has written what it had to.
    told: AtomicBool,
    /// A resize failed, and then the header could not be read: which table the file goes by is unknown.
    pub(crate) lost: AtomicBool,
}

/// What writers change, under one lock.
#[derive(Debug)]
pub struct State {
    /// By numbers of guest blocks.
    pub(crate) tickets: Tickets<Pending>,
    /// Nothing is given up while an image is open.
    reclaim: Reclaim,
    /// New blocks begin here.
    pub(crate) frontier: u64,
    /// Where published blocks end.
    pub(crate) used_end: u64,
    /// Blocks may reach to here without the file being made longer.
    pub(crate) room_end: u64,
    /// From here on the file was never written.
    pub(crate) fresh_from: u64,
    /// Behind that, where the envelope wrote what stands behind the blocks, ahead of need.
    pub(crate) tails: Vec<u64>,
    /// Bytes by which the file grows next time.
    pub(crate) batch: u64,
    /// Blocks below the frontier that were reserved and given back.
    pub(crate) given_back: Vec<u64>,
    /// The file's length or what stands in it has to be put right when it is closed.
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
    /// Bytes within the one block, which has its place already, that will be in the image.
    pub(crate) patch: Option<Range<u64>>,
}

impl<E: Envelope> BlockImage<E> {
    /// Takes a judged image. For writing it reads the whole table once.
    ///
    /// # Errors
    /// [`Error::ReadOnly`]; for writing also [`Error::Corrupt`] for an entry that points outside
    /// of the file, and [`Error::Unsupported`] for an image that stands on another one.
    pub fn open(envelope: E, opening: Opening) -> Result<Self> {
        let Opening { storage, writable, limits, geometry, guest_bytes, .. } = opening;
        if writable && !storage.caps().writable {
            return Err(Error::ReadOnly { file: storage.name().to_owned() });
        }
        let host_bytes = storage.len()?;
        let mut used_end = geometry.first_block;
        if writable {
            if opening.has_parent && !opening.sector_maps {
                return Err(Error::unsupported(
                    storage.name(),
                    format!("writing to a {} image that stands on another one", envelope.name()),
                    "make a qcow2 overlay over it: vdkit create --backing",
                ));
            }
            used_end = end_of_blocks(&*storage, &geometry, host_bytes)?;
        }
        let room = host_bytes.saturating_sub(envelope.tail_bytes());
        let state = State {
            tickets: Tickets::default(),
            reclaim: Reclaim::default(),
            frontier: used_end,
            used_end,
            room_end: if storage.caps().growable { used_end } else { room },
            fresh_from: if storage.caps().growable { host_bytes } else { u64::MAX },
            tails: Vec::new(),
            batch: 0,
            given_back: Vec::new(),
            unfinished: false,
        };
        Ok(Self {
            envelope,
            writable,
            geometry: RwLock::new(geometry),
            guest_bytes: AtomicU64::new(guest_bytes),
            host_bytes: AtomicU64::new(host_bytes),
            table: Table::new(limits.cache_bytes, PAGE_BYTES, PAGES_MIN),
            in_flight: InFlight::default(),
            warnings: opening.warnings,
            sectors: (opening.has_parent && opening.sector_maps)
                .then(|| sectors::cache(geometry.skip)),
            state: Engine::new(state, ()),
            telling: Mutex::new(()),
            told: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            storage,
        })
    }

    /// What stands around the blocks.
    pub fn envelope(&self) -> &E {
        &self.envelope
    }

    /// The table and blocks as they are now.
    pub fn geometry(&self) -> Geometry {
        *self.geometry.read()
    }

    pub(crate) fn guest_len(&self) -> u64 {
        self.guest_bytes.load(Ordering::Acquire)
    }

    pub(crate) fn need_writable(&self) -> Result<()> {
        if !self.writable {
            return Err(Error::ReadOnly { file: self.storage.name().to_owned() });
        }
        self.check_lost()
    }

    /// Nothing may be written to an image whose table is not known: a resize failed, and so did
    /// reading the header, which is tried again here.
    pub(crate) fn check_lost(&self) -> Result<()> {
        if !self.lost.load(Ordering::Acquire) {
            return Ok(());
        }
        self.find_again(&mut self.state.lock())
    }

    /// The same for who holds the state.
    pub(crate) fn find_again(&self, state: &mut MutexGuard<'_, State>) -> Result<()> {
        // Space that somebody has reserved is in no table, and would be taken for free.
        if self.lost.load(Ordering::Acquire) && state.tickets.is_empty() {
            self.follow_file(state, None);
        }
        self.refuse_lost()
    }

    /// The same for who holds the state.
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

    /// Tells the envelope once that the guest's bytes change. Nobody changes them before it has
    /// written what it has to.
    fn note_change(&self) -> Result<()> {
        if self.told.load(Ordering::Acquire) {
            return Ok(());
        }
        let _telling = self.telling.lock();
        if !self.told.load(Ordering::Acquire) {
            self.envelope.modified(&*self.storage)?;
            self.told.store(true, Ordering::Release);
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

    /// The answer of the map from what is kept of the table.
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
                    // A header before each block's data parts them.
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
                    // All between are within what both are within.
                    geometry.judge(file, index, last, host_bytes)?;
                    let offset = HostOffset(start + geometry.skip + within);
                    Place::Data { file: FileIndex(0), offset, exclusive: true }
                }
            };
            Ok(Extent { len, place })
        })
    }

    /// A run as far as all of its sectors are in the image, or none; nothing where the block's bitmap is
    /// not kept.
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

    /// Reads the bitmap of the block of a guest offset, where there are such.
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

/// Where the blocks that a table names end.
pub(crate) fn end_of_blocks(
    storage: &dyn Storage,
    geometry: &Geometry,
    host_bytes: u64,
) -> Result<u64> {
    // A table that has moved may lie behind blocks, with room for more before it.
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
        // A boundary of a block for the guest must be one in the file, at least of the file
        // system's blocks.
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

    fn warnings(&self) -> &[String] {
        &self.warnings
    }

    fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    fn file(&self, _index: FileIndex) -> &Arc<dyn Storage> {
        &self.storage
    }

    fn in_flight(&self) -> &InFlight {
        &self.in_flight
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
        // Damage is told by `resolve`.
        self.by_sectors(at, self.run(at, len)?.ok()?)
    }

    fn map_cache(&self) -> Option<MapCacheStats> {
        Some(self.table.stats(self.geometry().table_bytes()))
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
                self.envelope.before_write(&*self.storage, start)?;
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

    /// What has no block reads as zero already; what has one keeps it, and becomes zero there. Over a
    /// parent that is no help: the caller writes the zeroes.
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

    /// The file system gets the space back; the blocks keep their places in the file.
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
        if self.writable { self.state.close(self) } else { Ok(()) }
    }

    fn resize(&self, guest_bytes: u64) -> Result<()> {
        self.need_writable()?;
        self.resize_to(guest_bytes)
    }
}

impl<E: Envelope> Reserver for BlockImage<E> {
    fn publish(&self, ticket: Ticket) -> Result<()> {
        self.publish_ticket(ticket)
    }

    fn release(&self, ticket: Ticket) {
        self.release_ticket(ticket);
    }
}
