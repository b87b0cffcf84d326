//! What the bytes of an image hold. QEMU's formats name an event at each access; a storage beneath a
//! format knows only offsets. For qcow2 it follows the header to the tables (docs/formats/qcow2.md),
//! so that it can name the events of table accesses. In a raw image all bytes are the guest's. Other
//! formats have no events in QEMU either.

use std::collections::BTreeSet;
use std::ops::Range;

use vdkit::{HostOffset, Storage};

/// A magic number of qcow2 files ("QFI\xfb").
const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Bytes of the header up to the incompatible features, with the places of the tables.
const HEADER_BYTES: usize = 80;
/// The incompatible feature of L2 entries of 16 bytes.
const EXTENDED_L2: u64 = 1 << 4;
/// The mark of a compressed cluster in an L2 entry.
const COMPRESSED: u64 = 1 << 62;
/// Bits of an entry that are an offset.
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
/// Maximum bytes of a table that is followed.
const TABLE_BYTES_MAX: u64 = 32 << 20;

/// What a range of bytes holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Area {
    /// The header, other metadata, space that nothing refers to, or a format that is not followed.
    Other,
    L1,
    L2,
    RefcountTable,
    RefcountBlock,
    /// The guest's bytes.
    Data,
}

#[derive(Clone, Debug)]
pub enum Areas {
    /// All bytes are the guest's.
    Raw,
    /// Nothing is known.
    Unknown,
    Qcow2(Tables),
}

/// Where the tables of a qcow2 image are.
#[derive(Clone, Debug, Default)]
pub struct Tables {
    cluster_bytes: u64,
    l1: Range<u64>,
    refcount_table: Range<u64>,
    /// Offsets of clusters.
    l2: BTreeSet<u64>,
    refcount_blocks: BTreeSet<u64>,
    /// Bytes of an L2 entry.
    entry_bytes: usize,
    /// Clusters of the guest's bytes; `None` before they are first read, and after an L2 table was written.
    data: Option<BTreeSet<u64>>,
}

impl Areas {
    /// The areas of what a storage holds. `format` is the user's; without it the content decides.
    pub fn of(storage: &dyn Storage, format: Option<&str>) -> Self {
        match format {
            Some("raw") => Self::Raw,
            Some("qcow2") => Self::qcow2(storage),
            Some(_) => Self::Unknown,
            None => match crate::open::registry().probe(storage) {
                Ok(probed) if probed.driver.name() == "raw" => Self::Raw,
                Ok(probed) if probed.driver.name() == "qcow2" => Self::qcow2(storage),
                _ => Self::Unknown,
            },
        }
    }

    fn qcow2(storage: &dyn Storage) -> Self {
        Tables::read(storage).map_or(Self::Unknown, Self::Qcow2)
    }

    /// What a range holds, by its first byte.
    pub fn at(&mut self, storage: &dyn Storage, offset: u64) -> Area {
        match self {
            Self::Raw => Area::Data,
            Self::Unknown => Area::Other,
            Self::Qcow2(tables) => tables.at(storage, offset),
        }
    }

    /// As [`Areas::at`], for a write. A new cluster has no reference yet; it is taken for the
    /// guest's.
    pub fn at_write(&mut self, storage: &dyn Storage, offset: u64) -> Area {
        match (self.at(storage, offset), self) {
            (Area::Other, Self::Qcow2(tables)) if offset >= tables.cluster_bytes => Area::Data,
            (area, _) => area,
        }
    }

    /// Reads the areas again if a write to this range may have changed them.
    pub fn written(&mut self, storage: &dyn Storage, offset: u64) {
        let Self::Qcow2(tables) = self else { return };
        if offset < tables.cluster_bytes
            || tables.l1.contains(&offset)
            || tables.refcount_table.contains(&offset)
        {
            *self = Self::qcow2(storage);
        } else if tables.l2.contains(&tables.cluster(offset)) {
            tables.data = None;
        }
    }
}

impl Tables {
    fn read(storage: &dyn Storage) -> Option<Self> {
        let mut header = [0; HEADER_BYTES];
        if storage.read_up_to(&mut header, HostOffset(0)).ok()? < HEADER_BYTES
            || header[..4] != MAGIC
        {
            return None;
        }
        let be32 = |at: usize| {
            u64::from(u32::from_be_bytes(header[at..at + 4].try_into().unwrap_or_default()))
        };
        let be64 = |at: usize| be32(at) << 32 | be32(at + 4);
        let cluster_bits = u32::try_from(be32(20)).ok().filter(|bits| (9..=21).contains(bits))?;
        let cluster_bytes = 1 << cluster_bits;
        let range = |at: u64, bytes: u64| at..at.saturating_add(bytes.min(TABLE_BYTES_MAX));
        let l1 = range(be64(40), be32(36) * 8);
        let refcount_table = range(be64(48), be32(56) * cluster_bytes);
        let (l2, refcount_blocks) = (entries(storage, &l1)?, entries(storage, &refcount_table)?);
        let extended = be32(4) >= 3 && be64(72) & EXTENDED_L2 != 0;
        let entry_bytes = if extended { 16 } else { 8 };
        let data = None;
        Some(Self { cluster_bytes, l1, refcount_table, l2, refcount_blocks, entry_bytes, data })
    }

    fn cluster(&self, offset: u64) -> u64 {
        offset & !(self.cluster_bytes - 1)
    }

    /// The clusters of the guest's bytes.
    fn data(&mut self, storage: &dyn Storage) -> &BTreeSet<u64> {
        let (cluster_bytes, entry_bytes) = (self.cluster_bytes, self.entry_bytes);
        let l2 = &self.l2;
        self.data.get_or_insert_with(|| {
            let mut data = BTreeSet::new();
            let mut table = vec![0; cluster_bytes as usize];
            for offset in l2 {
                let read = storage.read_up_to(&mut table, HostOffset(*offset)).unwrap_or(0);
                for entry in table[..read].chunks_exact(entry_bytes) {
                    let (words, _) = entry.as_chunks::<8>();
                    let entry = u64::from_be_bytes(words[0]);
                    if entry & COMPRESSED == 0 && entry & OFFSET_MASK != 0 {
                        data.insert(entry & OFFSET_MASK);
                    }
                }
            }
            data
        })
    }

    fn at(&mut self, storage: &dyn Storage, offset: u64) -> Area {
        let cluster = self.cluster(offset);
        match offset {
            _ if self.l1.contains(&offset) => Area::L1,
            _ if self.refcount_table.contains(&offset) => Area::RefcountTable,
            _ if cluster == 0 => Area::Other,
            _ if self.l2.contains(&cluster) => Area::L2,
            _ if self.refcount_blocks.contains(&cluster) => Area::RefcountBlock,
            _ if self.data(storage).contains(&cluster) => Area::Data,
            _ => Area::Other,
        }
    }
}

/// The clusters that a table refers to.
fn entries(storage: &dyn Storage, table: &Range<u64>) -> Option<BTreeSet<u64>> {
    let mut bytes = vec![0; (table.end - table.start) as usize];
    let read = storage.read_up_to(&mut bytes, HostOffset(table.start)).ok()?;
    let (entries, _) = bytes[..read].as_chunks::<8>();
    let offsets = entries.iter().map(|entry| u64::from_be_bytes(*entry) & OFFSET_MASK);
    Some(offsets.filter(|offset| *offset != 0).collect())
}
