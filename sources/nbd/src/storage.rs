//! An export as a storage.

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use vdkit_block::{
    CacheMode, Error, HostOffset, IoAction, Result, SpaceMap, Storage, StorageCaps, StorageExtent,
    ZeroMode, require_writable,
};

use crate::client::{self, Client, Limits};
use crate::connection::Request;
use crate::failure::Failure;
use crate::handshake::DescribedExport;
use crate::reply::{Expected, StatusRun};
use crate::uri::NbdUri;
use crate::wire::{command, flag, request_flag};

/// The metadata context of holes and zeroes.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// Flag of [`BASE_ALLOCATION`]: reads as zero.
const STATE_ZERO: u32 = 2;
/// Maximum bytes of one request without payload. Servers may take more, but some answer late.
const EFFECT_BYTES_MAX: u64 = 1 << 30;
/// Maximum bytes of one request of block status: what a length can say, in whole blocks.
const STATUS_BYTES_MAX: u64 = (1 << 32) - (64 << 10);
/// Disks consist of whole sectors.
const SECTOR_BYTES: u64 = 512;
/// Maximum bytes per write of zeroes as data.
const ZERO_BYTES: usize = 1 << 20;
/// Block status is asked for again after this time: others may write to the export.
const STATUS_FRESH: Duration = Duration::from_secs(1);

/// NBD for a [`vdkit_chain::Registry`]: names of exports are then opened as images are.
pub static NBD: &dyn vdkit_chain::Protocol = &Nbd;

#[derive(Debug)]
struct Nbd;

impl vdkit_chain::Protocol for Nbd {
    fn matches(&self, name: &str) -> bool {
        NbdUri::matches(name)
    }

    fn open(&self, name: &str, writable: bool, cache: CacheMode) -> Result<Arc<dyn Storage>> {
        let options = NbdOptions { writable, cache, ..NbdOptions::default() };
        Ok(Arc::new(NbdStorage::open(name, options)?))
    }
}

/// How an export is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct NbdOptions {
    /// Opens it for writing.
    pub writable: bool,
    /// Writethrough and directsync send each write with FUA; unsafe never flushes. The others are
    /// the same: there is no page cache on this side.
    pub cache: CacheMode,
    /// Metadata contexts beside [`BASE_ALLOCATION`] for [`NbdStorage::status`], such as
    /// `qemu:dirty-bitmap:NAME` and `qemu:allocation-depth`.
    pub contexts: Vec<String>,
}

/// Runs of [`BASE_ALLOCATION`] that the server sent.
#[derive(Debug)]
struct Known {
    start: u64,
    runs: Vec<StatusRun>,
    asked: Instant,
}

/// An export on an NBD server.
///
/// Its length is constant. All methods may be called from many threads; each thread's request waits
/// for its own reply only.
#[derive(Debug)]
pub struct NbdStorage {
    client: Client,
    options: NbdOptions,
    /// Id of [`BASE_ALLOCATION`], if the server has it.
    allocation: Option<u32>,
    known: Mutex<Option<Known>>,
    /// Taken for writing while a part of a block is changed. Only if blocks are larger than a byte.
    blocks: RwLock<()>,
}

fn open_error(name: &str, source: io::Error) -> Error {
    let source = match source.kind() {
        // Not the kind of a missing file: callers would take the name for a file's.
        io::ErrorKind::NotFound => io::Error::other(vdkit_block::plain(&source)),
        _ => source,
    };
    Error::File { file: name.to_owned(), action: IoAction::Open, source }
}

fn parsed(name: &str) -> Result<NbdUri> {
    NbdUri::parse(name).map_err(|why| Error::invalid_for(&name, why))
}

/// The exports that a server lists, with all that it reports about each without opening it. The export in
/// the name is ignored.
///
/// # Errors
/// [`Error::Invalid`] for a malformed name; [`Error::File`] if the server cannot be reached or does
/// not list its exports.
pub fn describe_exports(name: &str) -> Result<Vec<DescribedExport>> {
    client::described(&parsed(name)?).map_err(|error| open_error(name, error))
}

impl NbdStorage {
    /// Connects to an export.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a malformed name; [`Error::File`] if the server cannot be reached,
    /// refuses, or has no such export; [`Error::ReadOnly`] if it is to be written and the server
    /// forbids it; [`Error::Unsupported`] if the server lacks a metadata context of the options.
    pub fn open(name: &str, options: NbdOptions) -> Result<Self> {
        Self::open_within(name, options, Limits::default())
    }

    pub(crate) fn open_within(name: &str, options: NbdOptions, limits: Limits) -> Result<Self> {
        let mut contexts = vec![BASE_ALLOCATION.to_owned()];
        contexts.extend(options.contexts.iter().cloned());
        contexts.dedup();
        let client = Client::connect(parsed(name)?, contexts, limits)
            .map_err(|error| open_error(name, error))?;
        let agreed = client.agreed();
        require_writable(!options.writable || !agreed.has(flag::READ_ONLY), name)?;
        let id =
            |name: &str| agreed.contexts.iter().find(|(known, _)| known == name).map(|(_, id)| *id);
        if let Some(lacking) = options.contexts.iter().find(|context| id(context).is_none()) {
            let what = format!("the server has no metadata context '{lacking}' for this export");
            return Err(Error::unsupported(name, what, "'nbdinfo --list' shows what it has"));
        }
        let allocation = id(BASE_ALLOCATION);
        Ok(Self { client, options, allocation, known: Mutex::default(), blocks: RwLock::default() })
    }

    /// Number of connections.
    #[cfg(test)]
    pub(crate) fn client_connections(&self) -> usize {
        self.client.connections()
    }

    fn bytes(&self) -> u64 {
        self.client.agreed().bytes
    }

    fn minimum(&self) -> u64 {
        self.client.agreed().minimum.into()
    }

    fn fail(&self, failure: Failure, action: IoAction, offset: u64, len: u64) -> Error {
        failure.into_error(self.name(), action, offset, len)
    }

    /// Flags of a request that changes bytes.
    fn fua(&self) -> u16 {
        let fua = self.options.cache.write_durable() && self.client.agreed().has(flag::SEND_FUA);
        if fua { request_flag::FUA } else { 0 }
    }

    fn check_writable(&self) -> Result<()> {
        require_writable(self.options.writable, self.name())
    }

    fn check_range(&self, action: IoAction, offset: u64, len: u64) -> Result<()> {
        if offset.checked_add(len).is_some_and(|end| end <= self.bytes()) {
            return Ok(());
        }
        let text = format!("the export ends at {:#x}", self.bytes());
        // No space that is found later makes room for the rest of an export's last sector.
        let last =
            offset < self.bytes() && offset + len <= self.bytes().next_multiple_of(SECTOR_BYTES);
        let kind = if last { ErrorKind::InvalidInput } else { ErrorKind::StorageFull };
        let source = io::Error::new(kind, text);
        Err(Error::io(self.name(), action, offset, len, source))
    }

    /// Reads whole blocks within the export.
    fn read_blocks(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        let most = self.client.agreed().maximum as usize;
        let mut at = offset;
        for piece in buf.chunks_mut(most) {
            let len = piece.len() as u32;
            let request =
                Request { command: command::READ, flags: 0, offset: at, len, payload: &[] };
            self.client
                .run(&request, Expected::Bytes(piece))
                .map_err(|failure| self.fail(failure, IoAction::Read, at, len.into()))?;
            at += u64::from(len);
        }
        Ok(())
    }

    /// Writes whole blocks within the export.
    fn write_blocks(&self, bytes: &[u8], offset: u64) -> Result<()> {
        let most = self.client.agreed().maximum as usize;
        let mut at = offset;
        for payload in bytes.chunks(most) {
            let (len, flags) = (payload.len() as u32, self.fua());
            let request = Request { command: command::WRITE, flags, offset: at, len, payload };
            self.client
                .run(&request, Expected::Nothing)
                .map_err(|failure| self.fail(failure, IoAction::Write, at, len.into()))?;
            at += u64::from(len);
        }
        Ok(())
    }

    /// The range of whole blocks around a range, within the export.
    fn blocks_around(&self, offset: u64, len: u64) -> (u64, u64) {
        let minimum = self.minimum();
        let start = offset & !(minimum - 1);
        let end = (offset + len).next_multiple_of(minimum).min(self.bytes());
        (start, end)
    }

    fn is_aligned(&self, offset: u64, len: u64) -> bool {
        (offset, offset + len) == self.blocks_around(offset, len)
    }

    /// Changes parts of blocks: reads the blocks, replaces the bytes, and writes the blocks.
    fn write_parts(&self, bytes: &[u8], offset: u64) -> Result<()> {
        let (start, end) = self.blocks_around(offset, bytes.len() as u64);
        let mut blocks = vec![0; (end - start) as usize];
        let _alone = self.blocks.write();
        self.read_blocks(&mut blocks, start)?;
        blocks[(offset - start) as usize..][..bytes.len()].copy_from_slice(bytes);
        self.write_blocks(&blocks, start)
    }

    /// Writes zeroes as data.
    fn write_zero_bytes(&self, offset: u64, len: u64) -> Result<()> {
        let zeroes = vec![0; len.min(ZERO_BYTES as u64) as usize];
        let mut done = 0;
        while done < len {
            let step = (len - done).min(zeroes.len() as u64);
            self.write_at(&zeroes[..step as usize], HostOffset(offset + done))?;
            done += step;
        }
        Ok(())
    }

    /// Sends requests without payload for whole blocks. Stops at the first failure, and returns it
    /// with the offset at which it happened.
    fn each_piece(
        &self,
        command: u16,
        flags: u16,
        offset: u64,
        len: u64,
    ) -> std::result::Result<(), (u64, Failure)> {
        let mut done = 0;
        while done < len {
            let step = (len - done).min(EFFECT_BYTES_MAX);
            let at = offset + done;
            let request = Request { command, flags, offset: at, len: step as u32, payload: &[] };
            self.client.run(&request, Expected::Nothing).map_err(|failure| (at, failure))?;
            done += step;
        }
        Ok(())
    }

    /// Runs of a metadata context from `offset`, for at most `len` bytes: at least one, in order.
    /// The last one may be cut. Bytes after the last one have to be asked for again.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a context that was not among the options; errors of the server.
    pub fn status(&self, context: &str, offset: u64, len: u64) -> Result<Vec<StatusRun>> {
        let contexts = &self.client.agreed().contexts;
        let Some((_, id)) = contexts.iter().find(|(known, _)| known == context) else {
            let what = format!("the metadata context '{context}' was not negotiated");
            return Err(Error::unsupported(self.name(), what, "name it when opening"));
        };
        self.status_of(*id, offset, len)
    }

    fn status_of(&self, id: u32, offset: u64, len: u64) -> Result<Vec<StatusRun>> {
        self.check_range(IoAction::Map, offset, len)?;
        let (start, end) = self.blocks_around(offset, len.clamp(1, STATUS_BYTES_MAX));
        let wanted = (end - start).min(STATUS_BYTES_MAX);
        let request = Request {
            command: command::BLOCK_STATUS,
            flags: 0,
            offset: start,
            len: wanted as u32,
            payload: &[],
        };
        let mut runs = Vec::new();
        self.client
            .run(&request, Expected::Status(id, &mut runs))
            .map_err(|failure| self.fail(failure, IoAction::Map, start, wanted))?;
        // From the block's start to the requested byte, and from the last run to the end.
        let (mut skip, mut left) = (offset - start, len.min(self.bytes() - offset));
        runs.retain_mut(|run| {
            let skipped = skip.min(run.bytes);
            skip -= skipped;
            run.bytes = (run.bytes - skipped).min(left);
            left -= run.bytes;
            run.bytes > 0
        });
        if runs.is_empty() {
            let failure = Failure::protocol("block status of other bytes");
            return Err(self.fail(failure, IoAction::Map, start, wanted));
        }
        Ok(runs)
    }
}

impl Known {
    /// The zeroes or data at an offset; adjacent runs of one kind count as one.
    fn at(&self, offset: u64) -> Option<StorageExtent> {
        let mut start = self.start;
        let mut found: Option<StorageExtent> = None;
        for run in &self.runs {
            let end = start + run.bytes;
            let data = run.flags & STATE_ZERO == 0;
            match &mut found {
                None if end > offset => found = Some(StorageExtent { data, len: end - offset }),
                None => {}
                Some(extent) if extent.data == data => extent.len = end - offset,
                Some(_) => break,
            }
            start = end;
        }
        found.filter(|_| offset >= self.start)
    }
}

impl SpaceMap for NbdStorage {
    fn may_have_holes(&self) -> Result<bool> {
        Ok(self.allocation.is_some())
    }

    fn extent_at(&self, offset: HostOffset, len: u64) -> Result<StorageExtent> {
        let (offset, len) = (offset.0, len.max(1));
        let Some(there) = self.bytes().checked_sub(offset).filter(|there| *there > 0) else {
            return Ok(StorageExtent { data: false, len });
        };
        let len = len.min(there);
        let Some(id) = self.allocation else { return Ok(StorageExtent { data: true, len }) };
        let cut = |extent: StorageExtent| StorageExtent { len: extent.len.min(len), ..extent };
        {
            let known = self.known.lock();
            let fresh = known.as_ref().filter(|known| known.asked.elapsed() < STATUS_FRESH);
            if let Some(extent) = fresh.and_then(|known| known.at(offset)) {
                return Ok(cut(extent));
            }
        }
        let asked = Instant::now();
        let runs = self.status_of(id, offset, len)?;
        let known = Known { start: offset, runs, asked };
        let extent = known.at(offset).unwrap_or(StorageExtent { data: true, len });
        // A writer may have forgotten the status since it was asked for.
        if !self.options.writable {
            *self.known.lock() = Some(known);
        }
        Ok(cut(extent))
    }

    fn allocated_bytes(&self) -> Result<u64> {
        // Known to the server alone.
        Ok(self.bytes())
    }
}

impl Storage for NbdStorage {
    fn name(&self) -> &str {
        &self.client.uri().name
    }

    fn caps(&self) -> StorageCaps {
        let agreed = self.client.agreed();
        StorageCaps {
            writable: self.options.writable,
            device: true,
            alignment: agreed.minimum,
            block_bytes: agreed.preferred.clamp(4096, 64 << 10),
            volatile: self.options.cache == CacheMode::Unsafe,
            remote: true,
            ..StorageCaps::default()
        }
    }

    fn len(&self) -> Result<u64> {
        Ok(self.bytes())
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        let there = self.bytes().saturating_sub(offset.0).min(buf.len() as u64);
        let buf = &mut buf[..there as usize];
        if self.is_aligned(offset.0, there) {
            self.read_blocks(buf, offset.0)?;
        } else if there > 0 {
            let (start, end) = self.blocks_around(offset.0, there);
            let mut blocks = vec![0; (end - start) as usize];
            self.read_blocks(&mut blocks, start)?;
            buf.copy_from_slice(&blocks[(offset.0 - start) as usize..][..buf.len()]);
        }
        Ok(buf.len())
    }

    fn write_at(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        self.check_writable()?;
        self.check_range(IoAction::Write, offset.0, buf.len() as u64)?;
        if self.is_aligned(offset.0, buf.len() as u64) {
            let _shared = (self.minimum() > 1).then(|| self.blocks.read());
            self.write_blocks(buf, offset.0)
        } else if buf.is_empty() {
            Ok(())
        } else {
            self.write_parts(buf, offset.0)
        }
    }

    fn write_zeroes(&self, offset: HostOffset, len: u64, mode: ZeroMode) -> Result<()> {
        self.check_writable()?;
        self.check_range(IoAction::WriteZeroes, offset.0, len)?;
        let minimum = self.minimum();
        let end = offset.0 + len;
        // Whole blocks; the edges are written as data.
        let first = offset.0.next_multiple_of(minimum).min(end);
        let last = if end == self.bytes() { end } else { (end & !(minimum - 1)).max(first) };
        self.write_zero_bytes(offset.0, first - offset.0)?;
        self.write_zero_bytes(last, end - last)?;
        if !self.client.agreed().has(flag::SEND_WRITE_ZEROES) {
            return self.write_zero_bytes(first, last - first);
        }
        let hole = match mode {
            ZeroMode::MayUnmap => 0,
            ZeroMode::KeepAllocated => request_flag::NO_HOLE,
        };
        let _shared = (minimum > 1).then(|| self.blocks.read());
        let zeroed = self.each_piece(command::WRITE_ZEROES, self.fua() | hole, first, last - first);
        match zeroed {
            Ok(()) => Ok(()),
            Err((at, failure)) if failure.is_unsupported() => {
                drop(_shared);
                self.write_zero_bytes(at, last - at)
            }
            Err((at, failure)) => Err(self.fail(failure, IoAction::WriteZeroes, at, last - at)),
        }
    }

    fn discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.check_writable()?;
        let minimum = self.minimum();
        let end = offset.0.saturating_add(len).min(self.bytes());
        let first = offset.0.next_multiple_of(minimum).min(end);
        let last = if end == self.bytes() { end } else { (end & !(minimum - 1)).max(first) };
        if !self.client.agreed().has(flag::SEND_TRIM) {
            return Ok(());
        }
        match self.each_piece(command::TRIM, self.fua(), first, last - first) {
            Err((at, failure)) if !failure.is_unsupported() => {
                Err(self.fail(failure, IoAction::Discard, at, last - at))
            }
            // A hint that the server cannot follow.
            _ => Ok(()),
        }
    }

    fn allocate(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.check_writable()?;
        // Whether an export has space for its length is known to the server alone.
        self.check_range(IoAction::Allocate, offset.0, len)
    }

    fn set_len(&self, len: u64) -> Result<()> {
        self.check_writable()?;
        if len == self.bytes() {
            return Ok(());
        }
        let what = "an NBD client cannot change the length of an export";
        Err(Error::unsupported(self.name(), what, "resize it on the server"))
    }

    fn sync(&self) -> Result<()> {
        if !self.options.writable || self.options.cache == CacheMode::Unsafe {
            return Ok(());
        }
        self.client.flush().map_err(|failure| {
            let Error::Io { source, .. } = self.fail(failure, IoAction::Sync, 0, 0) else {
                return Error::invalid(self.name().to_owned());
            };
            Error::File { file: self.name().to_owned(), action: IoAction::Sync, source }
        })
    }

    fn space_map(&self) -> Option<&dyn SpaceMap> {
        self.allocation.map(|_| self as &dyn SpaceMap)
    }
}
