//! Bochs growing images: `docs/formats/bochs.md`.

use vdkit_block::bytes::{le32, le64};
use vdkit_block::{DriverInfo, Error, Extent, ImageInfo, Limits, Place, Result, Storage};

use crate::read_only::{self, Map};
use crate::tables::Tables;

const HEADER_BYTES: usize = 96;
const SECTOR: u64 = 512;
/// QEMU's limits.
const CATALOG_ENTRIES_MAX: u32 = 0x10_0000;
const EXTENT_BYTES_MAX: u64 = 8 << 20;
/// Entry of an unallocated extent.
const NOTHING: u32 = u32::MAX;

/// A validated header.
#[derive(Clone, Debug)]
pub(crate) struct Bochs {
    catalog_at: u64,
    catalog_entries: u64,
    bitmap_bytes: u64,
    extent_bytes: u64,
    guest_bytes: u64,
}

/// Whether a NUL-terminated text of the header has this value.
fn says(bytes: &[u8], at: usize, text: &[u8]) -> bool {
    bytes[at..].starts_with(text) && bytes.get(at + text.len()) == Some(&0)
}

impl Map for Bochs {
    const INFO: DriverInfo = DriverInfo {
        name: "bochs",
        aliases: &[],
        extensions: &["bochs"],
        description: "Bochs' growing disk images, for reading",
    };

    const MAGICS: &'static [&'static [u8]] = &[b"Bochs Virtual HD Image\0"];

    fn describe(&self, info: &mut ImageInfo) {
        info.cluster_size = Some(self.extent_bytes);
    }

    fn read(storage: &dyn Storage, _limits: &Limits) -> Result<Self> {
        let file = storage.name();
        let bytes = Self::header::<HEADER_BYTES>(storage, "'Bochs Virtual HD Image'")?;
        let corrupt = |at: u64, what, found: String, expected: &str| {
            Err(Error::corrupt(file, at, what, found, expected))
        };
        let version = le32(&bytes, 64);
        if !says(&bytes, 32, b"Redolog")
            || !says(&bytes, 48, b"Growing")
            || !matches!(version, 0x1_0000 | 0x2_0000)
        {
            return Err(Error::unsupported(
                file,
                format!("a Bochs image of another kind (version {version:#x})"),
                "growing images of versions 1 and 2 are known; bximage converts others",
            ));
        }
        let guest_bytes = le64(&bytes, if version == 0x1_0000 { 80 + 4 } else { 80 + 8 });
        let (entries, bitmap) = (le32(&bytes, 72), le32(&bytes, 76));
        let extent = u64::from(le32(&bytes, 80));
        if !extent.is_power_of_two() || !(SECTOR..=EXTENT_BYTES_MAX).contains(&extent) {
            return corrupt(80, "extent size", extent.to_string(), "a power of two, 512 to 8 MiB");
        }
        let bitmap_bytes = u64::from(bitmap).max(1).next_multiple_of(SECTOR);
        if bitmap_bytes * 8 < extent / SECTOR || bitmap_bytes > EXTENT_BYTES_MAX {
            return corrupt(76, "bitmap size", bitmap.to_string(), "a bit for each sector");
        }
        if entries > CATALOG_ENTRIES_MAX || guest_bytes.div_ceil(extent) > entries.into() {
            let found = format!("{entries} entries for {guest_bytes} bytes");
            return corrupt(72, "catalog", found, "an entry for each extent, at most 2^20");
        }
        let catalog_at = u64::from(le32(&bytes, 68));
        Ok(Self {
            catalog_at,
            catalog_entries: entries.into(),
            bitmap_bytes,
            extent_bytes: extent,
            guest_bytes,
        })
    }

    fn guest_bytes(&self) -> u64 {
        self.guest_bytes
    }

    fn cluster_bytes(&self) -> u64 {
        SECTOR
    }

    fn table_bytes(&self) -> u64 {
        self.catalog_entries * (4 + self.bitmap_bytes)
    }

    fn spoiled(&self, at: u64, _structure: &str) -> u64 {
        (at / self.extent_bytes + 1) * self.extent_bytes
    }

    /// The run of equally allocated sectors within one extent.
    fn one(&self, storage: &dyn Storage, tables: &Tables, at: u64, len: u64) -> Result<Extent> {
        let (index, within) = (at / self.extent_bytes, at % self.extent_bytes);
        let len = (self.extent_bytes - within).min(len);
        let entry_at = self.catalog_at + index * 4;
        let entry = u32::from_le_bytes(tables.bytes(storage, entry_at)?);
        if entry == NOTHING {
            return Ok(Extent { len, place: Place::Hole });
        }
        let catalog_end = self.catalog_at + self.catalog_entries * 4;
        // Below 2^32 extents of at most 16 MiB.
        let bitmap_at = catalog_end + u64::from(entry) * (self.bitmap_bytes + self.extent_bytes);
        let bit = |sector: u64| -> Result<bool> {
            let [byte] = tables.bytes(storage, bitmap_at + sector / 8)?;
            Ok(byte >> (sector % 8) & 1 != 0)
        };
        read_only::data(storage, entry_at, bitmap_at, 1, catalog_end)?;
        let first = within / SECTOR;
        let present = bit(first)?;
        let mut end = first + 1;
        while end * SECTOR < within + len && bit(end)? == present {
            end += 1;
        }
        let len = len.min(end * SECTOR - within);
        if !present {
            return Ok(Extent { len, place: Place::Hole });
        }
        let offset = bitmap_at + self.bitmap_bytes + within;
        read_only::data(storage, entry_at, offset, len, catalog_end)
    }
}
