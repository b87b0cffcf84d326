//! Parallels' disk images: `docs/formats/parallels.md`.

use vdkit_block::bytes::{le32, le64};
use vdkit_block::{DriverInfo, Error, Extent, ImageInfo, Limits, Place, Result, Storage};

use crate::read_only::{self, Map};
use crate::tables::Tables;

/// Entries count sectors, and the size has 32 bits.
const OLD: &[u8] = b"WithoutFreeSpace";
/// Entries count clusters.
const NEW: &[u8] = b"WithouFreSpacExt";
const HEADER_BYTES: usize = 64;
const VERSION: u32 = 2;
/// Set while the image is open for writing.
const IN_USE: u32 = 0x746f_6e59;
const SECTOR: u64 = 512;
/// Maximum cluster size in bytes.
const CLUSTER_BYTES_MAX: u64 = 1 << 40;

/// A validated header.
#[derive(Clone, Debug)]
pub(crate) struct Parallels {
    guest_bytes: u64,
    cluster_bytes: u64,
    /// Unit of an entry in bytes.
    step: u64,
    entries: u64,
    dirty: bool,
    old: bool,
}

impl Map for Parallels {
    const INFO: DriverInfo = DriverInfo {
        name: "parallels",
        aliases: &[],
        extensions: &["hdd", "hds"],
        description: "Parallels' disk images (.hdd, .hds), for reading",
    };

    const MAGICS: &'static [&'static [u8]] = &[OLD, NEW];

    fn describe(&self, info: &mut ImageInfo) {
        info.cluster_size = Some(self.cluster_bytes);
        let kind = if self.old { "WithoutFreeSpace" } else { "WithouFreSpacExt" };
        info.properties.push(("magic".to_owned(), kind.to_owned()));
    }

    fn read(storage: &dyn Storage, _limits: &Limits) -> Result<Self> {
        let file = storage.name();
        let bytes = Self::header::<HEADER_BYTES>(storage, "a magic number of Parallels")?;
        let corrupt = |at: u64, what, found: String, expected: &str| {
            Err(Error::corrupt(file, at, what, found, expected))
        };
        let old = bytes.starts_with(OLD);
        let version = le32(&bytes, 16);
        if version != VERSION {
            let what = format!("version {version} of Parallels' format");
            return Err(Error::unsupported(file, what, "version 2 is known"));
        }
        let cluster_sectors = le32(&bytes, 28);
        let cluster_bytes = u64::from(cluster_sectors) * SECTOR;
        if cluster_bytes == 0 || cluster_bytes > CLUSTER_BYTES_MAX {
            let found = cluster_sectors.to_string();
            return corrupt(28, "sectors of a cluster", found, "1 to 2^31");
        }
        let sectors = le64(&bytes, 36) & if old { 0xffff_ffff } else { u64::MAX };
        let guest_bytes = sectors.checked_mul(SECTOR).filter(|bytes| *bytes <= i64::MAX as u64);
        let Some(guest_bytes) = guest_bytes else {
            return corrupt(36, "disk size", format!("{sectors} sectors"), "less than 2^63 bytes");
        };
        let entries = u64::from(le32(&bytes, 32));
        if HEADER_BYTES as u64 + entries * 4 > storage.len()? {
            return corrupt(32, "block table", format!("{entries} entries"), "a table in the file");
        }
        let step = if old { SECTOR } else { cluster_bytes };
        let dirty = le32(&bytes, 44) == IN_USE;
        Ok(Self { guest_bytes, cluster_bytes, step, entries, dirty, old })
    }

    fn unclean(&self) -> Option<(u64, &'static str)> {
        self.dirty.then_some((44, "header"))
    }

    fn guest_bytes(&self) -> u64 {
        self.guest_bytes
    }

    fn cluster_bytes(&self) -> u64 {
        self.cluster_bytes
    }

    fn table_bytes(&self) -> u64 {
        self.entries * 4
    }

    fn one(&self, storage: &dyn Storage, tables: &Tables, at: u64, len: u64) -> Result<Extent> {
        let (index, within) = (at / self.cluster_bytes, at % self.cluster_bytes);
        if index >= self.entries {
            // QEMU reads zeroes beyond the end of the table.
            return Ok(Extent { len, place: Place::Hole });
        }
        let len = (self.cluster_bytes - within).min(len);
        let entry_at = HEADER_BYTES as u64 + index * 4;
        let entry = u64::from(u32::from_le_bytes(tables.bytes(storage, entry_at)?));
        if entry == 0 {
            return Ok(Extent { len, place: Place::Hole });
        }
        // Less than 2^32 steps of at most 2^40 bytes: compute in 128 bits, then check.
        let offset = u128::from(entry) * u128::from(self.step) + u128::from(within);
        let offset = u64::try_from(offset).unwrap_or(u64::MAX);
        let first = HEADER_BYTES as u64 + self.entries * 4;
        read_only::data(storage, entry_at, offset, len, first)
    }
}
