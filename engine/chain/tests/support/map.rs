//! A format whose map lives in memory. It uses the freedoms of the contract in the most awkward
//! way: short extents, short reservations, reuse of space as soon as the grace period ends, and
//! overwriting freed space with garbage at that moment.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use vdkit_block::{
    BackingRef, CheckReport, Codec, Compressed, CompressedReservation, CompressedUnits,
    CompressedWriter, CreateRequest, Creation, DriverInfo, Error, Extent, FileIndex, Fill, Format,
    FormatCaps, FormatDriver, GuestOffset, HostOffset, ImageInfo, InFlight, Limits, Measured,
    OfflineImage, OpenRequest, OptionSpec, Options, Place, Probe, Repair, Reservation, Reserver,
    Result, Storage, Ticket, ZeroMode,
};

use super::memory::STEP;

pub const CLUSTER: u64 = 4096;
/// Host space of a compressed unit.
const PACKED_SLOT: u64 = 2 * CLUSTER;
/// Area of compressed units, apart from plain clusters.
const PACKED_AREA: u64 = 1 << 24;
const HEADER: u64 = CLUSTER;
const MAGIC: &[u8; 8] = b"TESTMAP1";

#[derive(Clone, Copy, Debug, PartialEq)]
enum Cell {
    Zero { host: Option<u64> },
    Data { host: u64, shared: bool },
    Compressed { host: u64, len: u32 },
}

#[derive(Debug, Default)]
struct State {
    cells: BTreeMap<u64, Cell>,
    fresh: u64,
    fresh_compressed: u64,
    free: Vec<u64>,
    free_compressed: Vec<u64>,
    pending: Vec<(vdkit_block::Stamp, u64, bool)>,
    reserved: BTreeMap<u64, Held>,
    tickets: u64,
    /// Snapshots being made.
    sharing: usize,
}

#[derive(Debug, Clone)]
struct Held {
    clusters: Range<u64>,
    host: u64,
    compressed: Option<Vec<u32>>,
}

type HookFn = Box<dyn FnOnce() + Send>;

/// A callback that runs once, at a certain point within the format.
#[derive(Default)]
pub struct Hook(Mutex<Option<HookFn>>);

impl Hook {
    pub fn set(&self, hook: impl FnOnce() + Send + 'static) {
        *self.0.lock().unwrap() = Some(Box::new(hook));
    }

    fn run(&self) {
        let hook = self.0.lock().unwrap().take();
        if let Some(hook) = hook {
            hook();
        }
    }
}

impl std::fmt::Debug for Hook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hook")
    }
}

#[derive(Debug)]
pub struct MapFormat {
    pub before_resolve: Hook,
    pub before_publish: Hook,
    storage: Arc<dyn Storage>,
    data: Arc<dyn Storage>,
    backing: Option<BackingRef>,
    guest_bytes: AtomicU64,
    writable: bool,
    in_flight: InFlight,
    state: Mutex<State>,
    changed: Condvar,
    pub resolved: AtomicUsize,
    pub unpacked: AtomicUsize,
    pub flushes: AtomicUsize,
    pub released: AtomicUsize,
    pub reused_compressed: AtomicUsize,
}

/// The payload of a compressed unit.
pub fn pack(cluster: &[u8]) -> Vec<u8> {
    let mut payload = vec![0xC5];
    payload.extend(cluster.iter().map(|byte| byte ^ 0x5A));
    payload
}

impl MapFormat {
    pub fn new(storage: Arc<dyn Storage>, guest_bytes: u64, writable: bool) -> Self {
        let state = State { fresh: HEADER, fresh_compressed: PACKED_AREA, ..State::default() };
        Self {
            before_resolve: Hook::default(),
            before_publish: Hook::default(),
            data: storage.clone(),
            storage,
            backing: None,
            guest_bytes: AtomicU64::new(guest_bytes),
            writable,
            in_flight: InFlight::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            resolved: AtomicUsize::new(0),
            unpacked: AtomicUsize::new(0),
            flushes: AtomicUsize::new(0),
            released: AtomicUsize::new(0),
            reused_compressed: AtomicUsize::new(0),
        }
    }

    /// As an internal snapshot does: no cluster is exclusive any more. Earlier requests that found
    /// a cluster exclusive may still write to it, so it must not be copied until they have ended.
    pub fn share_all(&self) {
        let mut state = self.state.lock().unwrap();
        state.sharing += 1;
        for cell in state.cells.values_mut() {
            if let Cell::Data { shared, .. } = cell {
                *shared = true;
            }
        }
        drop(state);
        let stamp = self.in_flight.stamp();
        while !self.in_flight.passed(stamp) {
            std::thread::sleep(STEP);
        }
        self.state.lock().unwrap().sharing -= 1;
        self.changed.notify_all();
    }

    pub fn reserved(&self) -> usize {
        self.state.lock().unwrap().reserved.len()
    }

    /// Leaked clusters, from those in use and free.
    pub fn leaked_clusters(&self) -> u64 {
        let state = self.state.lock().unwrap();
        let all = (state.fresh - HEADER) / CLUSTER;
        let used = state
            .cells
            .values()
            .filter(|cell| matches!(cell, Cell::Data { .. } | Cell::Zero { host: Some(_) }))
            .count();
        let free = state.free.len() + state.pending.iter().filter(|p| !p.2).count();
        all - (used + free) as u64
    }

    fn wait_clear<'s>(
        &'s self,
        mut state: MutexGuard<'s, State>,
        clusters: &Range<u64>,
    ) -> MutexGuard<'s, State> {
        let overlaps = |state: &State| {
            state.reserved.values().any(|held| {
                held.clusters.start < clusters.end && clusters.start < held.clusters.end
            })
        };
        while state.sharing > 0 || overlaps(&state) {
            state = self.changed.wait(state).unwrap();
        }
        state
    }

    fn free_cell(&self, state: &mut State, cell: Option<Cell>) {
        let stamp = self.in_flight.stamp();
        match cell {
            // The snapshot still uses a shared cluster.
            Some(Cell::Data { host, shared: false }) | Some(Cell::Zero { host: Some(host) }) => {
                state.pending.push((stamp, host, false));
            }
            Some(Cell::Compressed { host, .. }) => state.pending.push((stamp, host, true)),
            _ => {}
        }
    }

    /// Moves clusters that no request can see any more to the free lists, and overwrites them.
    fn reclaim(&self, state: &mut State) {
        let (over, still): (Vec<_>, Vec<_>) = std::mem::take(&mut state.pending)
            .into_iter()
            .partition(|(stamp, ..)| self.in_flight.passed(*stamp));
        state.pending = still;
        for (_, host, compressed) in over {
            let rubbish = vec![0xDB; CLUSTER as usize];
            let _ = self.data.write_at(&rubbish, HostOffset(host));
            if compressed { &mut state.free_compressed } else { &mut state.free }.push(host);
        }
    }

    fn clusters(at: u64, len: u64) -> Range<u64> {
        at / CLUSTER..(at + len).div_ceil(CLUSTER)
    }

    /// Whole clusters in a range, including the partial one at the end of the disk.
    fn whole(&self, at: u64, len: u64) -> Range<u64> {
        let end = at + len;
        let last = if end == self.guest_bytes() { end.div_ceil(CLUSTER) } else { end / CLUSTER };
        at.div_ceil(CLUSTER)..last.max(at.div_ceil(CLUSTER))
    }

    fn fill_of(cell: Option<Cell>) -> Fill {
        match cell {
            Some(Cell::Zero { .. }) => Fill::Zero,
            _ => Fill::Copy,
        }
    }
}

impl Reserver for MapFormat {
    fn publish(&self, ticket: Ticket) -> Result<()> {
        self.before_publish.run();
        let mut guard = self.state.lock().unwrap();
        let state = &mut *guard;
        let held = state.reserved.remove(&ticket.0).unwrap();
        let mut host = held.host;
        for (index, cluster) in held.clusters.clone().enumerate() {
            let cell = match &held.compressed {
                Some(lens) => Cell::Compressed { host, len: lens[index] },
                None => Cell::Data { host, shared: false },
            };
            host += if held.compressed.is_some() { PACKED_SLOT } else { CLUSTER };
            let old = state.cells.insert(cluster, cell);
            self.free_cell(state, old);
        }
        self.changed.notify_all();
        Ok(())
    }

    fn release(&self, ticket: Ticket) {
        let mut state = self.state.lock().unwrap();
        let held = state.reserved.remove(&ticket.0).unwrap();
        for index in 0..held.clusters.end - held.clusters.start {
            match held.compressed {
                Some(_) => state.free_compressed.push(held.host + index * PACKED_SLOT),
                None => state.free.push(held.host + index * CLUSTER),
            }
        }
        self.released.fetch_add(1, Ordering::SeqCst);
        self.changed.notify_all();
    }
}

impl Format for MapFormat {
    fn name(&self) -> &'static str {
        "testmap"
    }
    fn caps(&self) -> FormatCaps {
        FormatCaps {
            writable: self.writable,
            cluster_bytes: CLUSTER,
            fill_bytes: CLUSTER,
            compressed: Some(Codec::Deflate),
            one_pass: false,
            cheap_zeroes: true,
            host_aligned: true,
        }
    }
    fn guest_bytes(&self) -> u64 {
        self.guest_bytes.load(Ordering::SeqCst)
    }
    vdkit_block::accessors!(backing, storage, in_flight);

    fn file(&self, _index: FileIndex) -> &Arc<dyn Storage> {
        &self.data
    }
    fn resolve(&self, at: GuestOffset, len: u64) -> Result<Extent> {
        self.before_resolve.run();
        self.resolved.fetch_add(1, Ordering::SeqCst);
        let state = self.state.lock().unwrap();
        let within = at.0 % CLUSTER;
        let one = |cluster: u64, within: u64| {
            let place = match state.cells.get(&cluster) {
                None => Place::Hole,
                Some(Cell::Zero { host }) => Place::Zero { allocated: host.is_some() },
                Some(Cell::Data { host, shared }) => Place::Data {
                    file: FileIndex(0),
                    offset: HostOffset(host + within),
                    exclusive: !shared,
                },
                Some(Cell::Compressed { host, len }) => Place::Compressed(Compressed {
                    file: FileIndex(0),
                    offset: HostOffset(*host),
                    len: *len,
                    codec: Codec::Deflate,
                    unpacked_len: CLUSTER as u32,
                    skip: within as u32,
                }),
            };
            Extent { len: CLUSTER - within, place }
        };
        let mut cluster = at.0 / CLUSTER;
        let mut run = one(cluster, within);
        // At most 5 clusters at once, so that the disk has to merge runs.
        for _ in 0..4 {
            cluster += 1;
            match run.merge(one(cluster, 0)) {
                Some(joined) if run.len < len => run = joined,
                _ => break,
            }
        }
        Ok(Extent { len: run.len.min(len), place: run.place })
    }

    fn resolve_cached(&self, _at: GuestOffset, _len: u64) -> Option<Extent> {
        None
    }

    fn reserve(&self, at: GuestOffset, len: u64) -> Result<Option<Reservation<'_>>> {
        let mut clusters = Self::clusters(at.0, len);
        clusters.end = clusters.end.min(clusters.start + 3);
        let mut state = self.wait_clear(self.state.lock().unwrap(), &clusters);
        let exclusive = |state: &State, cluster: &u64| {
            matches!(state.cells.get(cluster), Some(Cell::Data { shared: false, .. }))
        };
        if exclusive(&state, &clusters.start) {
            return Ok(None);
        }
        if let Some(end) = clusters.clone().find(|cluster| exclusive(&state, cluster)) {
            clusters.end = end;
        }
        self.reclaim(&mut state);
        let (host, fresh) = match state.free.pop() {
            Some(host) => {
                clusters.end = clusters.start + 1;
                (host, false)
            }
            None => {
                let host = state.fresh;
                state.fresh += (clusters.end - clusters.start) * CLUSTER;
                (host, true)
            }
        };
        let side = |cell: Option<Cell>| match Self::fill_of(cell) {
            // Fresh host space reads as zero.
            Fill::Zero if fresh => Fill::Ready,
            fill => fill,
        };
        let head = side(state.cells.get(&clusters.start).copied());
        let tail = side(state.cells.get(&(clusters.end - 1)).copied());
        let ticket = state.tickets;
        state.tickets += 1;
        state.reserved.insert(ticket, Held { clusters: clusters.clone(), host, compressed: None });
        let guest = clusters.start * CLUSTER..clusters.end * CLUSTER;
        let write = at.0..(at.0 + len).min(guest.end);
        let place = (FileIndex(0), HostOffset(host));
        Ok(Some(Reservation::new(self, Ticket(ticket), guest, write, place.0, place.1, head, tail)))
    }

    fn zero(&self, at: GuestOffset, len: u64, may_unmap: bool) -> Result<Range<u64>> {
        let clusters = self.whole(at.0, len);
        let mut guard = self.wait_clear(self.state.lock().unwrap(), &clusters);
        let state = &mut *guard;
        for cluster in clusters.clone() {
            let old = state.cells.get(&cluster).copied();
            let host = match old {
                Some(Cell::Data { host, shared: false }) if !may_unmap => Some(host),
                Some(Cell::Zero { host }) if !may_unmap => host,
                _ => {
                    self.free_cell(state, old);
                    None
                }
            };
            state.cells.insert(cluster, Cell::Zero { host });
        }
        Ok(clusters.start * CLUSTER..(clusters.end * CLUSTER).min(self.guest_bytes()))
    }

    fn discard(&self, at: GuestOffset, len: u64) -> Result<()> {
        if !self.whole(at.0, len).is_empty() {
            self.zero(at, len, true)?;
        }
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        self.flushes.fetch_add(1, Ordering::SeqCst);
        self.storage.sync()
    }
    fn close(&self) -> Result<()> {
        self.flush()
    }
    fn resize(&self, guest_bytes: u64) -> Result<()> {
        let mut guard = self.state.lock().unwrap();
        let gone: Vec<u64> = guard
            .cells
            .range(guest_bytes.div_ceil(CLUSTER)..)
            .map(|(cluster, _)| *cluster)
            .collect();
        for cluster in gone {
            let old = guard.cells.remove(&cluster);
            self.free_cell(&mut guard, old);
        }
        // Bytes cut off within the last cluster must not come back.
        let tail = guest_bytes % CLUSTER;
        if let Some(Cell::Data { host, .. }) = guard.cells.get(&(guest_bytes / CLUSTER))
            && tail != 0
        {
            self.data.write_zeroes(HostOffset(host + tail), CLUSTER - tail, ZeroMode::MayUnmap)?;
        }
        self.guest_bytes.store(guest_bytes, Ordering::SeqCst);
        Ok(())
    }

    vdkit_block::capabilities! {
        compressed_units: CompressedUnits, compressed_writer: CompressedWriter
    }
}

impl CompressedUnits for MapFormat {
    fn unpack(&self, compressed: &Compressed, bytes: &[u8], out: &mut [u8]) -> Result<()> {
        self.unpacked.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(STEP);
        if bytes.first() != Some(&0xC5) || bytes.len() != out.len() + 1 {
            let name = self.storage.name();
            return Err(Error::corrupt(name, compressed.offset.0, "unit", "rubbish", "a unit"));
        }
        out.iter_mut().zip(&bytes[1..]).for_each(|(out, byte)| *out = byte ^ 0x5A);
        Ok(())
    }
}

impl CompressedWriter for MapFormat {
    fn reserve_compressed(
        &self,
        at: GuestOffset,
        lens: &[u32],
    ) -> Result<CompressedReservation<'_>> {
        let first = at.0 / CLUSTER;
        let clusters = first..first + 1;
        let mut state = self.wait_clear(self.state.lock().unwrap(), &clusters);
        self.reclaim(&mut state);
        let host = state.free_compressed.pop();
        self.reused_compressed.fetch_add(usize::from(host.is_some()), Ordering::SeqCst);
        let host = host.unwrap_or_else(|| {
            state.fresh_compressed += PACKED_SLOT;
            state.fresh_compressed - PACKED_SLOT
        });
        let ticket = state.tickets;
        state.tickets += 1;
        let compressed = Some(vec![lens[0]]);
        state.reserved.insert(ticket, Held { clusters, host, compressed });
        Ok(CompressedReservation::new(self, Ticket(ticket), FileIndex(0), HostOffset(host), 1))
    }
}

/// Metadata of an image of the test format.
pub fn info(
    virtual_size: u64,
    backing: Option<BackingRef>,
    data_file: Option<String>,
) -> ImageInfo {
    let mut info = ImageInfo::new("testmap", virtual_size);
    info.cluster_size = Some(CLUSTER);
    info.backing_file = backing.as_ref().map(|b| b.name.clone());
    info.backing_format = backing.and_then(|b| b.format);
    info.files = data_file.iter().flat_map(|names| names.split('\n')).map(str::to_owned).collect();
    info
}

/// A file of the test format: its header, without clusters. Line breaks separate several data
/// files.
pub fn header(guest_bytes: u64, backing: &str, backing_format: &str, data_file: &str) -> Vec<u8> {
    header_of([backing, backing_format, data_file, "", ""], guest_bytes)
}

/// As [`header`], with the image's identity and its backing image's identity as the last texts.
pub fn header_of(texts: [&str; 5], guest_bytes: u64) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(guest_bytes.to_le_bytes());
    for text in texts {
        bytes.extend((text.len() as u16).to_le_bytes());
        bytes.extend(text.as_bytes());
    }
    bytes.resize(HEADER as usize, 0);
    bytes
}

#[derive(Debug)]
pub struct MapDriver;

impl MapDriver {
    fn parse(storage: &dyn Storage) -> Result<ImageInfo> {
        let mut head = vec![0; HEADER as usize];
        storage.read_at(&mut head, HostOffset(0))?;
        if !head.starts_with(MAGIC) {
            return Err(Error::corrupt(storage.name(), 0, "magic", "another", "TESTMAP1"));
        }
        let size = u64::from_le_bytes(head[8..16].try_into().unwrap());
        let mut at = 16;
        let mut text = || {
            let len = usize::from(u16::from_le_bytes([head[at], head[at + 1]]));
            at += 2 + len;
            let text = String::from_utf8(head[at - len..at].to_vec()).unwrap();
            (!text.is_empty()).then_some(text)
        };
        let (name, format, data_file) = (text(), text(), text());
        let (identity, backing_identity) = (text(), text());
        let mut info = info(size, name.map(|name| BackingRef::new(name, format)), data_file);
        (info.identity, info.backing_identity) = (identity, backing_identity);
        Ok(info)
    }
}

impl FormatDriver for MapDriver {
    fn info(&self) -> DriverInfo {
        DriverInfo { name: "testmap", aliases: &[], extensions: &[], description: "for tests" }
    }

    fn probe(&self, head: &[u8], _tail: &[u8], _len: u64) -> Probe {
        if head.starts_with(MAGIC) { Probe::Yes } else { Probe::No }
    }
    fn describe(&self, storage: &Arc<dyn Storage>, _limits: &Limits) -> Result<ImageInfo> {
        Self::parse(&**storage)
    }
    fn open(&self, request: OpenRequest) -> Result<Arc<dyn Format>> {
        let info = Self::parse(&*request.storage)?;
        let mut format = MapFormat::new(request.storage, info.virtual_size, request.writable);
        format.backing = info.backing();
        if let Some(data) = request.files.into_iter().next() {
            format.data = data;
        }
        Ok(Arc::new(format))
    }
    fn check(&self, _: &OfflineImage<'_>, _: Repair) -> Result<CheckReport> {
        Ok(CheckReport::default())
    }

    vdkit_block::capabilities!(creation: Creation);
}

impl Creation for MapDriver {
    fn options(&self) -> &'static [OptionSpec] {
        &[]
    }

    fn create(&self, _request: &CreateRequest) -> Result<()> {
        Err(Error::invalid("written by hand"))
    }

    fn cluster_bytes(&self, _options: &Options) -> Result<u64> {
        Ok(CLUSTER)
    }

    fn measure(&self, guest_bytes: u64, _: &Options, _data_clusters: u64) -> Result<Measured> {
        Ok(Measured { required: guest_bytes, fully_allocated: guest_bytes })
    }
}
