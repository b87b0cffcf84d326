//! Measurements of an image and its location, on which the findings are based.

use serde::Serialize;
use vdkit_storage::Placement;

/// Allocation state of the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Allocation {
    /// Space is allocated on write.
    #[default]
    Sparse,
    /// The map is complete, the data is not allocated yet.
    Metadata,
    /// Fully allocated.
    Full,
}

/// The measurements.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct DoctorEvidence {
    /// File system type; `None` for a device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_system: Option<String>,
    /// Block size of the file system or the device in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_bytes: Option<u64>,
    /// Free bytes on the file's file system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
    /// Cluster (grain, block) size of the image in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_bytes: Option<u64>,
    /// Allocated bytes of the file.
    pub allocated_bytes: u64,
    /// Bytes by which it may still grow, keeping snapshots.
    pub growth_bytes: u64,
    /// Allocation state.
    pub allocation: Allocation,
    /// Extents of the file, if the file system reports them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extents: Option<u64>,
    /// Seeks of a sequential read on the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub jumps: Option<u64>,
    /// Clusters that do not follow their predecessor in the file, if the map was read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fragmented_clusters: Option<u64>,
    /// Allocated clusters of the disk, if the map was read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocated_clusters: Option<u64>,
    /// Bytes of the map (L2 tables) of the whole disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub map_bytes: Option<u64>,
    /// Internal snapshots.
    pub snapshots: u64,
    /// Images of the chain, including this one.
    pub chain_images: u64,
    /// The recommended cache mode here.
    pub cache: &'static str,
    /// The reason for it.
    pub cache_reason: &'static str,
    /// The file system's device number, to add up images that share its space.
    #[serde(skip)]
    pub(super) space: Option<u64>,
}

/// An unallocated part of 1/N still counts as fully allocated: partitions end before the disk, and
/// files are rounded.
const UNALLOCATED_PART: u64 = 50;

/// The allocation state: `mapped` means that every cluster is mapped.
pub(super) fn allocation(virtual_size: u64, allocated: u64, mapped: bool) -> Allocation {
    if allocated >= virtual_size - virtual_size / UNALLOCATED_PART {
        Allocation::Full
    } else if mapped {
        Allocation::Metadata
    } else {
        Allocation::Sparse
    }
}

/// Remaining growth of an image. Snapshots keep their data, so the whole disk may be written again
/// beside them.
pub(super) fn growth(virtual_size: u64, map: u64, allocated: u64, snapshots: u64) -> u64 {
    let whole = virtual_size.saturating_add(map);
    if snapshots > 0 { whole } else { whole.saturating_sub(allocated) }
}

/// A file counts as fragmented from this many jumps, if they are this dense.
const JUMPS_MIN: u64 = 256;
const BYTES_BETWEEN_JUMPS: u64 = 1 << 20;

/// Whether a sequential read jumps more often than once per MiB. (A seek of a hard disk takes as
/// long as reading 1 to 2 MiB; on flash it means more and shorter requests.)
pub(super) fn scattered(placement: &Placement) -> bool {
    placement.jumps >= JUMPS_MIN && placement.bytes / placement.jumps.max(1) < BYTES_BETWEEN_JUMPS
}

/// Minimum clusters for a finding, and the fraction out of order.
const CLUSTERS_MIN: u64 = 1024;
const OUT_OF_ORDER_PART: u64 = 4;

/// Whether the clusters are out of guest order in the file.
pub(super) fn shuffled(fragmented: u64, allocated: u64) -> bool {
    allocated >= CLUSTERS_MIN && fragmented >= allocated / OUT_OF_ORDER_PART
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocation_is_told_by_space_and_map() {
        assert_eq!(allocation(1000, 1000, true), Allocation::Full);
        assert_eq!(allocation(1000, 980, false), Allocation::Full);
        assert_eq!(allocation(1000, 979, false), Allocation::Sparse);
        assert_eq!(allocation(1000, 10, true), Allocation::Metadata);
        assert_eq!(allocation(0, 0, false), Allocation::Full);
        assert_eq!(allocation(u64::MAX, u64::MAX, false), Allocation::Full);
    }

    #[test]
    fn snapshots_double_what_may_come() {
        assert_eq!(growth(1000, 10, 400, 0), 610);
        assert_eq!(growth(1000, 10, 400, 1), 1010);
        assert_eq!(growth(1000, 10, 2000, 0), 0);
        assert_eq!(growth(u64::MAX, 10, 0, 0), u64::MAX);
    }

    #[test]
    fn fragments_count_by_their_size() {
        let lies = |jumps, bytes| Placement { jumps, bytes, ..Placement::default() };
        assert!(scattered(&lies(256, 64 << 20)));
        assert!(!scattered(&lies(255, 1 << 20)));
        assert!(!scattered(&lies(256, 256 << 20)));
        assert!(!scattered(&lies(0, 1 << 40)));
        assert!(shuffled(256, 1024));
        assert!(!shuffled(255, 1024) && !shuffled(1000, 1000));
    }
}
