//! Making an image smaller in place: what may be done, what came of it, and the part that every
//! format shares, giving back blocks that hold zeroes.

use serde::Serialize;

use crate::error::Result;
use crate::monitor::Monitor;
use crate::storage::Storage;
use crate::units::HostOffset;
use crate::zero::is_zero;

/// Bytes of one read in search of zeroes.
const STEP_BYTES: u64 = 1 << 20;
/// Smaller runs of zeroes are left alone: a block of most file systems.
const BLOCK_BYTES_MIN: usize = 4096;

/// How an image is to be compacted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompactOptions {
    /// Read guest data, and drop what is zero.
    pub zero_scan: bool,
}

/// What was left where it is though it stands in the way of a shorter file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct LeftAlone {
    /// What it is, and why it stays.
    pub what: &'static str,
    /// How many clusters.
    pub clusters: u64,
}

/// What a compaction did. Bytes are those of the image's own file and, where guest data is in
/// another file, of that one too.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct CompactReport {
    /// Length of the files before.
    pub length_before: u64,
    /// Length of the files after.
    pub length_after: u64,
    /// Bytes of host space that they took before.
    pub allocated_before: u64,
    /// Bytes of host space that they take now.
    pub allocated_after: u64,
    /// Clusters that nothing referred to (of an earlier run that was cut short, or a crash).
    pub leaked_clusters: u64,
    /// Clusters of zeroes that were given up.
    pub zero_clusters: u64,
    /// Mapping tables that mapped nothing any more.
    pub empty_tables: u64,
    /// Clusters of tables that were longer than what is in them.
    pub table_clusters: u64,
    /// Clusters that were moved towards the front.
    pub moved_clusters: u64,
    /// Bytes of zeroes that became holes where they were.
    pub punched_bytes: u64,
    /// What stayed behind.
    pub left_alone: Vec<LeftAlone>,
}

/// Gives the space of blocks of zeroes back, wherever they are in the storage. They read as zero
/// before and after, so an interruption at any moment does no harm. Returns their bytes.
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
                // From the start of a block, so that all blocks are at their own boundaries.
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

fn punch_in(storage: &dyn Storage, offset: u64, bytes: &[u8], block: usize) -> Result<u64> {
    let (mut at, mut punched) = (0, 0);
    let mut start = None;
    // Once more behind the last block, where a run ends at the latest.
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
