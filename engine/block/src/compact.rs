//! Compacting an image in place: options, report, and the parts that formats share (punching holes
//! over zeroes, and reading and copying what may have holes).

use serde::Serialize;

use crate::capabilities::StorageExtent;
use crate::error::Result;
use crate::monitor::Monitor;
use crate::storage::{Storage, ZeroMode};
use crate::units::HostOffset;
use crate::zero::is_zero;

/// Bytes per read.
const STEP_BYTES: u64 = 1 << 20;
/// Shorter runs of zeroes are kept: 4 KiB is the block size of most file systems.
const BLOCK_BYTES_MIN: usize = 4096;

/// Options of a compaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CompactOptions {
    /// Read guest data and drop clusters of zeroes.
    pub zero_scan: bool,
}

impl CompactOptions {
    /// Sets whether guest data is read and clusters of zeroes are dropped.
    #[must_use]
    pub fn zero_scan(self, zero_scan: bool) -> Self {
        Self { zero_scan, ..self }
    }
}

/// Clusters that could not be moved and keep the file from shrinking.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct LeftAlone {
    /// What they hold, and why they stay.
    pub what: &'static str,
    /// Their number.
    pub clusters: u64,
}

/// Result of a compaction. Byte counts cover the image file and, if separate, its data file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct CompactReport {
    /// Length of the files before.
    pub length_before: u64,
    /// Length of the files after.
    pub length_after: u64,
    /// Allocated host bytes before.
    pub allocated_before: u64,
    /// Allocated host bytes now.
    pub allocated_after: u64,
    /// Unreferenced clusters (left by a crash or an interrupted run).
    pub leaked_clusters: u64,
    /// Freed clusters of zeroes.
    pub zero_clusters: u64,
    /// Freed mapping tables without entries.
    pub empty_tables: u64,
    /// Clusters freed by shortening tables.
    pub table_clusters: u64,
    /// Clusters that were moved towards the front.
    pub moved_clusters: u64,
    /// Bytes of zeroes that became holes in place.
    pub punched_bytes: u64,
    /// Clusters that could not be moved.
    pub left_alone: Vec<LeftAlone>,
}

/// Compacts an image whose length is the disk's: only its blocks of zeroes become holes.
///
/// # Errors
/// Those of [`punch_zeroes`].
pub fn compact_flat(
    storage: &dyn Storage,
    options: CompactOptions,
    monitor: &Monitor<'_>,
) -> Result<CompactReport> {
    let length = storage.len()?;
    let allocated_before = storage.allocated_bytes()?;
    let punched_bytes = if options.zero_scan { punch_zeroes(storage, monitor)? } else { 0 };
    Ok(CompactReport {
        length_before: length,
        length_after: length,
        allocated_before,
        allocated_after: storage.allocated_bytes()?,
        punched_bytes,
        ..CompactReport::default()
    })
}

/// Punches holes over blocks of zeroes, anywhere in the storage. The blocks read as zero before and
/// after, so an interruption is harmless. Returns the bytes punched.
///
/// # Errors
/// Those of the storage, and [`crate::Error::Interrupted`].
pub fn punch_zeroes(storage: &dyn Storage, monitor: &Monitor<'_>) -> Result<u64> {
    let len = storage.len()?;
    let block = (storage.caps().block_bytes as usize).clamp(BLOCK_BYTES_MIN, STEP_BYTES as usize);
    let holes = storage.may_have_holes()?;
    let mut bytes = Vec::new();
    let (mut at, mut punched) = (0, 0);
    while at < len {
        monitor.cancel.check()?;
        monitor.progress.update(at, len);
        if holes {
            let extent = storage.extent_at(HostOffset(at), len - at)?;
            if !extent.data {
                // Start at a block boundary, so that all blocks are aligned.
                at = (at + extent.len) / block as u64 * block as u64;
                if extent.len < block as u64 {
                    at += block as u64;
                }
                continue;
            }
        }
        bytes.resize(STEP_BYTES.min(len - at) as usize, 0);
        storage.read_padded(&mut bytes, HostOffset(at))?;
        punched += punch_in(storage, at, &bytes, block)?;
        at += bytes.len() as u64;
    }
    monitor.progress.update(len, len);
    Ok(punched)
}

/// Reads and copies ranges of a storage without reading their holes, with one buffer.
#[derive(Debug)]
pub struct SparseReader<'a> {
    storage: &'a dyn Storage,
    holes: bool,
    buf: Vec<u8>,
}

impl<'a> SparseReader<'a> {
    /// A reader of `storage`.
    ///
    /// # Errors
    /// Those of the storage.
    pub fn new(storage: &'a dyn Storage) -> Result<Self> {
        Ok(Self { storage, holes: storage.may_have_holes()?, buf: Vec::new() })
    }

    /// Whether a range is zero. Unless `scan`, data is not read and counts as nonzero.
    ///
    /// # Errors
    /// Those of the storage.
    pub fn is_zero(&mut self, from: HostOffset, len: u64, scan: bool) -> Result<bool> {
        let mut done = 0;
        while done < len {
            let piece = self.piece(from + done, len - done)?;
            if piece.data && !(scan && is_zero(self.read(from + done, piece.len)?)) {
                return Ok(false);
            }
            done += piece.len;
        }
        Ok(true)
    }

    /// Copies a range within the storage. Holes stay holes; nothing is written for them if the
    /// target reads as zero (`fresh`).
    ///
    /// # Errors
    /// Those of the storage.
    pub fn copy(&mut self, from: HostOffset, to: HostOffset, len: u64, fresh: bool) -> Result<()> {
        let mut done = 0;
        while done < len {
            let piece = self.piece(from + done, len - done)?;
            if piece.data {
                let storage = self.storage;
                storage.write_at(self.read(from + done, piece.len)?, to + done)?;
            } else if !fresh {
                self.storage.write_zeroes(to + done, piece.len, ZeroMode::MayUnmap)?;
            }
            done += piece.len;
        }
        Ok(())
    }

    /// The hole at `at`, or data for one read.
    fn piece(&self, at: HostOffset, len: u64) -> Result<StorageExtent> {
        let data = StorageExtent { data: true, len };
        let found = if self.holes { self.storage.extent_at(at, len)? } else { data };
        Ok(if found.data {
            StorageExtent { len: found.len.min(STEP_BYTES), ..found }
        } else {
            found
        })
    }

    fn read(&mut self, at: HostOffset, len: u64) -> Result<&[u8]> {
        self.buf.resize(self.buf.len().max(len as usize), 0);
        let piece = &mut self.buf[..len as usize];
        self.storage.read_padded(piece, at)?;
        Ok(piece)
    }
}

fn punch_in(storage: &dyn Storage, offset: u64, bytes: &[u8], block: usize) -> Result<u64> {
    let (mut at, mut punched) = (0, 0);
    let mut start = None;
    // One more pass behind the last block ends an open run.
    while at < bytes.len() + block {
        let piece = &bytes[at.min(bytes.len())..(at + block).min(bytes.len())];
        let zero = piece.len() == block && is_zero(piece);
        match (zero, start) {
            (true, None) => start = Some(at),
            (false, Some(from)) => {
                storage.discard(HostOffset(offset + from as u64), (at - from) as u64)?;
                punched += (at - from) as u64;
                start = None;
            }
            _ => {}
        }
        at += block;
    }
    Ok(punched)
}
