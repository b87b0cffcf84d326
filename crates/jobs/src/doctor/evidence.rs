//! What was measured of an image and of where it lies: the figures behind the findings.

use serde::Serialize;
use vdkit_storage::Placement;

/// How much of the disk has space of its own on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Allocation {
    /// Space is found when it is written to.
    Sparse,
    /// The map is complete, the data's space is not there yet.
    Metadata,
    /// All of it is there.
    Full,
}

/// The figures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct DoctorEvidence {
    /// The kind of file system; none for a device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_system: Option<String>,
    /// Bytes in which the file system or the device would be written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_bytes: Option<u64>,
    /// Bytes that are free where the file is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
    /// Bytes of a cluster (grain, block) of the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_bytes: Option<u64>,
    /// Bytes that the file takes.
    pub allocated_bytes: u64,
    /// Bytes that it may yet grow by, snapshots kept.
    pub growth_bytes: u64,
    /// How much of the disk has its space.
    pub allocation: Allocation,
    /// Pieces of the file on its device, where the file system tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extents: Option<u64>,
    /// How often reading the file in order jumps on the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub jumps: Option<u64>,
    /// Clusters whose place in the file does not follow the one before, where the map was read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fragmented_clusters: Option<u64>,
    /// Clusters of the disk with space in the file, where the map was read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocated_clusters: Option<u64>,
    /// Bytes of the map (L2 tables) of the whole disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub map_bytes: Option<u64>,
    /// Internal snapshots.
    pub snapshots: u64,
    /// Images of the chain, this one included.
    pub chain_images: u64,
    /// The cache mode for a guest here.
    pub cache: &'static str,
    /// Why that one.
    pub cache_reason: &'static str,
    /// The file system's device number, to add up what shares its space.
    #[serde(skip)]
    pub(super) space: Option<u64>,
}

impl DoctorEvidence {
    pub(super) fn new() -> Self {
        Self {
            file_system: None,
            block_bytes: None,
            free_bytes: None,
            cluster_bytes: None,
            allocated_bytes: 0,
            growth_bytes: 0,
            allocation: Allocation::Sparse,
            extents: None,
            jumps: None,
            fragmented_clusters: None,
            allocated_clusters: None,
            map_bytes: None,
            snapshots: 0,
            chain_images: 1,
            cache: "writeback",
            cache_reason: "",
            space: None,
        }
    }
}

/// A part of the disk that may be without space for the disk to count as allocated: partitions end
/// before the disk, and files are rounded.
const UNALLOCATED_PART: u64 = 50;

/// How much of a disk has its space: `mapped` says that the map has a place for every cluster.
pub(super) fn allocation(virtual_size: u64, allocated: u64, mapped: bool) -> Allocation {
    if allocated >= virtual_size - virtual_size / UNALLOCATED_PART {
        Allocation::Full
    } else if mapped {
        Allocation::Metadata
    } else {
        Allocation::Sparse
    }
}

/// What an image may yet grow by. Snapshots keep what they hold, so that all of the disk may be
/// written anew beside them.
pub(super) fn growth(virtual_size: u64, map: u64, allocated: u64, snapshots: u64) -> u64 {
    let whole = virtual_size.saturating_add(map);
    if snapshots > 0 { whole } else { whole.saturating_sub(allocated) }
}

/// Jumps from which on a file counts as fragmented, and the bytes between two of them.
const JUMPS_MIN: u64 = 256;
const BYTES_BETWEEN_JUMPS: u64 = 1 << 20;

/// Whether reading the file in order jumps more often than once a MiB. (A disk with heads takes as
/// long for a jump as for reading 1 to 2 MiB; a flash drive takes more, shorter requests.)
pub(super) fn scattered(placement: &Placement) -> bool {
    placement.jumps >= JUMPS_MIN && placement.bytes / placement.jumps.max(1) < BYTES_BETWEEN_JUMPS
}

/// Clusters from which on their order matters, and the part of them out of order.
const CLUSTERS_MIN: u64 = 1024;
const OUT_OF_ORDER_PART: u64 = 4;

/// Whether the guest's bytes lie out of order in the file.
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
