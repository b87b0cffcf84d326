//! Computes image sizes, for measuring and creating.

use vdkit_block::{Error, Measured, Options, Result, align_up};

use crate::layout::{CLUSTER_BITS, Geometry, L1_BYTES_MAX};
use crate::options::{CreateOptions, Preallocation};

/// Guest disks consist of whole sectors.
const SECTOR_BYTES: u64 = 512;

/// Most bytes of a new image's refcount blocks, prepared for its growth, including the block that
/// every image has; also the limit for its refcount table.
const ROOM_BYTES: u64 = 64 << 10;

/// Sizes of the refcount table and of the refcount blocks, in clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RefcountClusters {
    pub(crate) table: u64,
    pub(crate) blocks: u64,
}

impl RefcountClusters {
    /// The smallest sizes that also cover their own clusters. `others` is below 2^53.
    pub(crate) fn covering(others: u64, geometry: &Geometry) -> Self {
        Self { table: 0, blocks: 0 }.grown(others, geometry)
    }

    /// Sizes for a new image of `others` clusters (`full` when its disk is fully allocated), with
    /// blocks and a table for future growth. The smallest sizes with clusters of 64 KiB or more,
    /// and never more than the fully allocated disk needs.
    pub(crate) fn roomy(others: u64, full: u64, geometry: &Geometry) -> Self {
        let least = Self::covering(others, geometry);
        let full = Self::covering(full.max(others), geometry);
        let room = (ROOM_BYTES >> geometry.cluster_bits).saturating_sub(1);
        let table = least.table.max(full.table_with_room(geometry));
        Self { table, blocks: (least.blocks + room).min(full.blocks) }.grown(others, geometry)
    }

    /// At least these sizes, and enough for `others` clusters and for their own.
    fn grown(self, others: u64, geometry: &Geometry) -> Self {
        let mut found = self;
        loop {
            let clusters = others + found.table + found.blocks;
            let blocks = clusters.div_ceil(geometry.refcount_block_entries()).max(found.blocks);
            let table = blocks.div_ceil(geometry.cluster_bytes() / 8).max(found.table);
            let next = Self { table, blocks };
            // Terminates: each iteration adds refcounts for the last one's additions, a fraction of
            // them.
            if next == found {
                return found;
            }
            found = next;
        }
    }

    /// Clusters of a refcount table with room to grow; `self` is for the fully allocated disk.
    pub(crate) fn table_with_room(&self, geometry: &Geometry) -> u64 {
        self.table.min((ROOM_BYTES >> geometry.cluster_bits).max(1))
    }
}

/// Sizes of a fully mapped guest disk, in clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GuestSizes {
    /// Bytes of the disk: whole sectors.
    pub(crate) bytes: u64,
    /// Guest clusters; the last one may be partial.
    pub(crate) clusters: u64,
    /// L1 entries, and L2 tables of the fully mapped disk.
    pub(crate) l2_tables: u64,
    pub(crate) l1_clusters: u64,
}

impl GuestSizes {
    /// # Errors
    /// [`Error::Invalid`] if the L1 table would be too large; the message names a cluster size that
    /// fits.
    pub(crate) fn new(guest_bytes: u64, geometry: &Geometry) -> Result<Self> {
        let fits = |geometry: &Geometry| {
            align_up(guest_bytes, SECTOR_BYTES)
                .is_some_and(|bytes| geometry.l1_entries_for(bytes) <= L1_BYTES_MAX / 8)
        };
        if !fits(geometry) {
            let larger = (geometry.cluster_bits + 1..=*CLUSTER_BITS.end())
                .find(|&cluster_bits| fits(&Geometry { cluster_bits, ..*geometry }));
            let most = (L1_BYTES_MAX / 8) * geometry.l2_span();
            return Err(Error::invalid(format!(
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

/// Formats a cluster size as users write it.
pub(crate) fn size_text(cluster_bits: u32) -> String {
    match cluster_bits {
        0..10 => (1u32 << cluster_bits).to_string(),
        10..20 => format!("{}K", 1u32 << (cluster_bits - 10)),
        _ => format!("{}M", 1u32 << (cluster_bits - 20)),
    }
}

/// See [`vdkit_block::Creation::measure`]. Equal to `qemu-img measure`: both sizes include the
/// metadata of the fully allocated disk, so the required size is an upper bound; both include the
/// data even if an external data file holds it.
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
    // No overflow: the L1 limit keeps the disk below 2^62 bytes, and metadata is a fraction of
    // that. Its share is largest with 64-bit refcounts and clusters of 512 bytes, where the disk is
    // at most 2^37 bytes.
    let bytes = |clusters: u64| clusters << geometry.cluster_bits;
    Ok(Measured { required: bytes(full - guest.clusters + data), fully_allocated: bytes(full) })
}
