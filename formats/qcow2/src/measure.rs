//! How large an image becomes: the arithmetic behind measuring and creating.

use vdkit_block::{Error, Measured, Options, Result, align_up};

use crate::layout::{CLUSTER_BITS, Geometry, L1_BYTES_MAX};
use crate::options::{CreateOptions, Preallocation};

/// Guest disks are made of sectors.
const SECTOR_BYTES: u64 = 512;

/// Refcount blocks and refcount table for `others` clusters and for themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RefcountClusters {
    pub(crate) table: u64,
    pub(crate) blocks: u64,
}

impl RefcountClusters {
    /// The smallest that also cover their own clusters. `others` is below 2^53.
    pub(crate) fn covering(others: u64, geometry: &Geometry) -> Self {
        let mut found = Self { table: 0, blocks: 0 };
        loop {
            let clusters = others + found.table + found.blocks;
            let blocks = clusters.div_ceil(geometry.refcount_block_entries());
            let table = blocks.div_ceil(geometry.cluster_bytes() / 8);
            let next = Self { table, blocks };
            // Grows until it holds: each round adds what the last one's additions need, which
            // is a fraction of them.
            if next == found {
                return found;
            }
            found = next;
        }
    }
}

/// What the refcount blocks of a new image may take so that the file can grow, with the one that
/// each image has; and what its refcount table may take for the same reason.
const ROOM_BYTES: u64 = 64 << 10;

impl RefcountClusters {
    /// For a new image that has `others` clusters, and `full` when all of its disk is allocated:
    /// with blocks and a table for the growth to come. The smallest with clusters of 64 KiB and more,
    /// and never more than the wholly allocated disk needs.
    pub(crate) fn roomy(others: u64, full: u64, geometry: &Geometry) -> Self {
        let least = Self::covering(others, geometry);
        let full = Self::covering(full.max(others), geometry);
        let room = (ROOM_BYTES >> geometry.cluster_bits).saturating_sub(1);
        let mut found = Self {
            table: least.table.max(full.table_with_room(geometry)),
            blocks: (least.blocks + room).min(full.blocks),
        };
        // What the room itself takes is described too: less than the room, so this ends.
        loop {
            let clusters = others + found.table + found.blocks;
            let blocks = clusters.div_ceil(geometry.refcount_block_entries()).max(found.blocks);
            let table = blocks.div_ceil(geometry.cluster_bytes() / 8).max(found.table);
            let next = Self { table, blocks };
            if next == found {
                return found;
            }
            found = next;
        }
    }

    /// Clusters of a refcount table that need not become larger soon, where these refcounts are
    /// those of the wholly allocated disk.
    pub(crate) fn table_with_room(&self, geometry: &Geometry) -> u64 {
        self.table.min((ROOM_BYTES >> geometry.cluster_bits).max(1))
    }
}

/// What a guest disk of some size needs when all of it is mapped, in clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GuestSizes {
    /// Bytes of the disk: whole sectors.
    pub(crate) bytes: u64,
    /// Guest clusters; the last one may be cut short by the end of the disk.
    pub(crate) clusters: u64,
    /// L1 entries that are needed, and L2 tables when all is mapped.
    pub(crate) l2_tables: u64,
    /// Clusters of the L1 table.
    pub(crate) l1_clusters: u64,
}

impl GuestSizes {
    /// # Errors
    /// [`Error::Invalid`] where the L1 table would be too large, naming a cluster size that does.
    pub(crate) fn new(guest_bytes: u64, geometry: &Geometry) -> Result<Self> {
        let fits = |geometry: &Geometry| {
            align_up(guest_bytes, SECTOR_BYTES)
                .is_some_and(|bytes| geometry.l1_entries_for(bytes) <= L1_BYTES_MAX / 8)
        };
        if !fits(geometry) {
            let larger = (geometry.cluster_bits + 1..=*CLUSTER_BITS.end())
                .find(|&cluster_bits| fits(&Geometry { cluster_bits, ..*geometry }));
            let most = (L1_BYTES_MAX / 8) * geometry.l2_span();
            return Err(Error::Invalid(format!(
                "a disk of {guest_bytes} bytes is too large for clusters of {} bytes (at most \
                 {most}); {}",
                geometry.cluster_bytes(),
                match larger {
                    Some(bits) => format!("use cluster_size={} or larger", size_text(bits)),
                    None => "no cluster size is large enough".to_owned(),
                }
            )));
        }
        let bytes = guest_bytes.next_multiple_of(SECTOR_BYTES);
        let l2_tables = geometry.l1_entries_for(bytes);
        Ok(Self {
            bytes,
            clusters: bytes.div_ceil(geometry.cluster_bytes()),
            l2_tables,
            l1_clusters: (l2_tables * 8).div_ceil(geometry.cluster_bytes()),
        })
    }
}

/// A cluster size as users write it.
pub(crate) fn size_text(cluster_bits: u32) -> String {
    match cluster_bits {
        0..10 => (1u32 << cluster_bits).to_string(),
        10..20 => format!("{}K", 1u32 << (cluster_bits - 10)),
        _ => format!("{}M", 1u32 << (cluster_bits - 20)),
    }
}

/// See [`vdkit_block::FormatDriver::measure`]. Equal to `qemu-img measure`: metadata is counted
/// for the fully allocated disk in both numbers, so the required size is an upper bound; and data
/// is counted although an external data file may hold it.
///
/// # Errors
/// [`Error::Invalid`] for options or sizes that no image can have.
pub(crate) fn measure(guest_bytes: u64, options: &Options, data_clusters: u64) -> Result<Measured> {
    let options = CreateOptions::new(options, None)?;
    let geometry = &options.geometry;
    let guest = GuestSizes::new(guest_bytes, geometry)?;
    let luks_bytes = options.encryption.map_or(0, |luks| luks.payload_offset());
    let luks = luks_bytes.div_ceil(geometry.cluster_bytes());
    let others = 1 + guest.l1_clusters + luks + guest.l2_tables + guest.clusters;
    let refcounts = RefcountClusters::covering(others, geometry);
    let full = others + refcounts.table + refcounts.blocks;
    let data = match options.preallocation {
        Preallocation::Falloc | Preallocation::Full => guest.clusters,
        Preallocation::Off | Preallocation::Metadata => data_clusters.min(guest.clusters),
    };
    // The L1 limit keeps the disk below 2^62 bytes, and metadata is a fraction of it at most
    // where refcounts have 64 bits and clusters 512 bytes: 2^37 bytes of disk then.
    let bytes = |clusters: u64| clusters << geometry.cluster_bits;
    Ok(Measured { required: bytes(full - guest.clusters + data), fully_allocated: bytes(full) })
}
