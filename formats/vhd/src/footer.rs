//! The footer: 512 bytes at the end of every image, and also at the start of images with a table.
//! Offsets: `docs/formats/vpc.md`.

use uuid::Uuid;
use vdkit_block::bytes::{array, be32, be64};
use vdkit_block::random_uuid;

use vdkit_block::{Error, Result};

pub(crate) const FOOTER_BYTES: usize = 512;
pub(crate) const COOKIE: &[u8; 8] = b"conectix";
/// No further structure follows.
pub(crate) const NO_OFFSET: u64 = u64::MAX;
/// The largest disk, in sectors: 2040 GiB.
pub(crate) const SECTORS_MAX: u64 = 0xff00_0000;
pub(crate) const SECTOR: u64 = 512;
/// Seconds from 1970 to 2000, the epoch of time stamps.
pub(crate) const EPOCH: u64 = 946_684_800;
/// vdkit's application code.
const CREATOR: &[u8; 4] = b"vdk ";
/// Applications that use the geometry as the size of the disk.
const BY_GEOMETRY: [&[u8; 4]; 2] = [b"vpc ", b"qemu"];

/// Offsets of fields.
pub(crate) mod field {
    pub const FEATURES: usize = 8;
    pub const VERSION: usize = 12;
    pub const DATA_OFFSET: usize = 16;
    pub const TIME: usize = 24;
    pub const CREATOR: usize = 28;
    pub const CREATOR_VERSION: usize = 32;
    pub const CREATOR_OS: usize = 36;
    pub const ORIGINAL_SIZE: usize = 40;
    pub const CURRENT_SIZE: usize = 48;
    pub const GEOMETRY: usize = 56;
    pub const TYPE: usize = 60;
    pub const CHECKSUM: usize = 64;
    pub const UUID: usize = 68;
}

/// What kind of image it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskType {
    /// The plain bytes of the disk, and a footer.
    Fixed,
    /// A table of blocks.
    Dynamic,
    /// As dynamic, with a parent.
    Differencing,
}

impl DiskType {
    fn of(number: u32) -> Option<Self> {
        match number {
            2 => Some(Self::Fixed),
            3 => Some(Self::Dynamic),
            4 => Some(Self::Differencing),
            _ => None,
        }
    }

    fn number(self) -> u32 {
        match self {
            Self::Fixed => 2,
            Self::Dynamic => 3,
            Self::Differencing => 4,
        }
    }

    /// The name for users, equal to that of the subformat.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::Dynamic => "dynamic",
            Self::Differencing => "differencing",
        }
    }
}

/// Cylinders, heads, and sectors per track.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskGeometry {
    /// Cylinders.
    pub cylinders: u16,
    /// Heads.
    pub heads: u8,
    /// Sectors of a track.
    pub sectors: u8,
}

impl DiskGeometry {
    /// The geometry that does not define the size: all programs then use the size field.
    pub(crate) const MAX: Self = Self { cylinders: 65535, heads: 16, sectors: 255 };

    /// Sectors of the disk.
    pub fn count(self) -> u64 {
        u64::from(self.cylinders) * u64::from(self.heads) * u64::from(self.sectors)
    }

    /// The geometry of the specification's appendix for `sectors` sectors; it may have fewer.
    pub(crate) fn of(sectors: u64) -> Self {
        let total = sectors.min(Self::MAX.count());
        let (mut per_track, mut heads, mut tracks);
        if total > 65535 * 16 * 63 {
            (per_track, heads) = (255, 16);
            tracks = total / per_track;
        } else {
            per_track = 17;
            tracks = total / per_track;
            heads = tracks.div_ceil(1024).max(4);
            if tracks >= heads * 1024 || heads > 16 {
                (per_track, heads) = (31, 16);
                tracks = total / per_track;
            }
            if tracks >= heads * 1024 {
                (per_track, heads) = (63, 16);
                tracks = total / per_track;
            }
        }
        // At most 65535, 16 and 255.
        Self { cylinders: (tracks / heads) as u16, heads: heads as u8, sectors: per_track as u8 }
    }

    /// The smallest geometry of the appendix with at least `sectors` sectors, if there is one.
    pub(crate) fn at_least(sectors: u64) -> Option<Self> {
        // A geometry lacks less than a cylinder.
        let most = sectors + 16 * 255 + 1;
        (sectors..most).map(Self::of).find(|geometry| geometry.count() >= sectors)
    }
}

/// The checksum of headers and footers: the complement of the sum of all bytes except its own.
pub(crate) fn checksum(bytes: &[u8], own: usize) -> u32 {
    let sum = bytes.iter().enumerate().fold(0_u32, |sum, (n, byte)| {
        if (own..own + 4).contains(&n) { sum } else { sum.wrapping_add(u32::from(*byte)) }
    });
    !sum
}

/// A footer with a valid cookie and checksum. Keeps the raw bytes, so unknown fields are preserved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footer {
    bytes: [u8; FOOTER_BYTES],
    /// What kind of image it is.
    pub disk_type: DiskType,
}

/// Why bytes are not a footer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NoFooter {
    pub(crate) at: usize,
    pub(crate) found: String,
    pub(crate) expected: &'static str,
}

impl Footer {
    /// Parses a footer; missing bytes count as zeroes, since Virtual PC before 2004 wrote 511
    /// bytes.
    pub(crate) fn parse(found: &[u8]) -> std::result::Result<Self, NoFooter> {
        let mut bytes = [0; FOOTER_BYTES];
        let len = found.len().min(FOOTER_BYTES);
        bytes[..len].copy_from_slice(&found[..len]);
        let no = |at, found: String, expected| Err(NoFooter { at, found, expected });
        if !bytes.starts_with(COOKIE) {
            return no(0, "other bytes".to_owned(), "a footer, which begins with 'conectix'");
        }
        let (stored, sum) = (be32(&bytes, field::CHECKSUM), checksum(&bytes, field::CHECKSUM));
        if stored != sum {
            return no(field::CHECKSUM, format!("the checksum {stored:#x}"), "that of the footer");
        }
        let number = be32(&bytes, field::TYPE);
        let Some(disk_type) = DiskType::of(number) else {
            let expected = "2 (fixed), 3 (dynamic) or 4 (differencing)";
            return no(field::TYPE, format!("disk type {number}"), expected);
        };
        Ok(Self { bytes, disk_type })
    }

    /// The footer of a new image.
    pub(crate) fn new(
        disk_type: DiskType,
        guest_bytes: u64,
        geometry: DiskGeometry,
    ) -> Result<Self> {
        let mut footer = Self { bytes: [0; FOOTER_BYTES], disk_type };
        footer.put(0, COOKIE);
        // A reserved bit that must be set.
        footer.put(field::FEATURES, &2_u32.to_be_bytes());
        footer.put(field::VERSION, &0x0001_0000_u32.to_be_bytes());
        let data_offset = if disk_type == DiskType::Fixed { NO_OFFSET } else { 512 };
        footer.put(field::DATA_OFFSET, &data_offset.to_be_bytes());
        footer.put(field::TIME, &now().to_be_bytes());
        footer.put(field::CREATOR, CREATOR);
        footer.put(field::CREATOR_VERSION, &0x0001_0000_u32.to_be_bytes());
        footer.put(field::CREATOR_OS, b"Wi2k");
        footer.put(field::ORIGINAL_SIZE, &guest_bytes.to_be_bytes());
        footer.put(field::TYPE, &disk_type.number().to_be_bytes());
        footer.put(field::UUID, random_uuid()?.as_bytes());
        Ok(footer.sized(guest_bytes, geometry))
    }

    /// The same footer with another size.
    pub(crate) fn sized(mut self, guest_bytes: u64, geometry: DiskGeometry) -> Self {
        self.put(field::CURRENT_SIZE, &guest_bytes.to_be_bytes());
        self.put(field::GEOMETRY, &geometry.cylinders.to_be_bytes());
        self.put(field::GEOMETRY + 2, &[geometry.heads, geometry.sectors]);
        let sum = checksum(&self.bytes, field::CHECKSUM);
        self.put(field::CHECKSUM, &sum.to_be_bytes());
        self
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// The raw bytes.
    pub(crate) fn bytes(&self) -> &[u8; FOOTER_BYTES] {
        &self.bytes
    }

    /// Offset of the dynamic header.
    pub(crate) fn data_offset(&self) -> u64 {
        be64(&self.bytes, field::DATA_OFFSET)
    }

    /// Creation time in seconds since 2000.
    pub fn time(&self) -> u32 {
        be32(&self.bytes, field::TIME)
    }

    /// The application that created the image, as text.
    pub fn creator(&self) -> String {
        self.text(field::CREATOR)
    }

    fn text(&self, at: usize) -> String {
        let bytes = &self.bytes[at..at + 4];
        bytes.iter().map(|b| if b.is_ascii_graphic() { char::from(*b) } else { ' ' }).collect()
    }

    /// The size field, in bytes.
    pub fn current_size(&self) -> u64 {
        be64(&self.bytes, field::CURRENT_SIZE)
    }

    /// The CHS geometry.
    pub fn geometry(&self) -> DiskGeometry {
        DiskGeometry {
            cylinders: u16::from_be_bytes([self.bytes[56], self.bytes[57]]),
            heads: self.bytes[58],
            sectors: self.bytes[59],
        }
    }

    /// The format's version.
    pub(crate) fn version(&self) -> u32 {
        be32(&self.bytes, field::VERSION)
    }

    /// The image's unique ID.
    pub fn uuid(&self) -> Uuid {
        Uuid::from_bytes(array(&self.bytes, field::UUID))
    }

    /// Whether the geometry is the size of the disk: the creator uses it so, and it defines a size.
    pub fn sized_by_geometry(&self) -> bool {
        let creator = &self.bytes[field::CREATOR..field::CREATOR + 4];
        BY_GEOMETRY.iter().any(|app| creator == *app)
            && self.geometry().count() != DiskGeometry::MAX.count()
    }

    /// Bytes of the guest disk, as the creator of the image computes them.
    pub fn disk_bytes(&self) -> u64 {
        if self.sized_by_geometry() {
            self.geometry().count() * SECTOR
        } else {
            self.current_size() / SECTOR * SECTOR
        }
    }
}

/// Seconds since 2000.
fn now() -> u32 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    // Until 2136.
    since.map_or(0, |since| since.as_secs().saturating_sub(EPOCH) as u32)
}

/// The size and geometry of a new disk of at least `guest_bytes` bytes.
///
/// # Errors
/// [`Error::Limit`] above 2040 GiB.
pub(crate) fn size_of(file: &str, guest_bytes: u64, exact: bool) -> Result<(u64, DiskGeometry)> {
    let too_large = || Error::Limit {
        file: file.to_owned(),
        what: "size",
        found: guest_bytes,
        limit: SECTORS_MAX * SECTOR,
    };
    let sectors = guest_bytes.div_ceil(SECTOR);
    if sectors > SECTORS_MAX {
        return Err(too_large());
    }
    if exact || sectors >= DiskGeometry::MAX.count() {
        return Ok((sectors * SECTOR, DiskGeometry::MAX));
    }
    let geometry = DiskGeometry::at_least(sectors).ok_or_else(too_large)?;
    // As in QEMU: if the geometry does not define a size, the size is exact.
    let count = geometry.count();
    let sectors = if count == DiskGeometry::MAX.count() { sectors } else { count };
    Ok((sectors * SECTOR, geometry))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn geometries_of_the_appendix() {
        let of = |sectors| {
            let g = DiskGeometry::of(sectors);
            (g.cylinders, g.heads, g.sectors)
        };
        assert_eq!(of(20480), (301, 4, 17));
        assert_eq!(of(2 << 20), (2080, 16, 63));
        assert_eq!(of(u64::MAX >> 12), (65535, 16, 255));
        for sectors in [1, 67, 68, 69, 1000, 1 << 20, 65535 * 16 * 63 + 1, 1 << 27] {
            let g = DiskGeometry::at_least(sectors).unwrap();
            assert!(g.count() >= sectors && g.count() < sectors + 16 * 255, "{sectors}: {g:?}");
        }
    }

    #[test]
    fn a_footer_reads_back_and_one_bit_is_seen() {
        let footer = Footer::new(DiskType::Fixed, 1 << 20, DiskGeometry::MAX).unwrap();
        assert_eq!(Footer::parse(footer.bytes()).unwrap(), footer);
        assert_eq!(footer.disk_bytes(), 1 << 20);
        for at in 0..FOOTER_BYTES {
            let mut bytes = *footer.bytes();
            bytes[at] ^= 1;
            assert!(Footer::parse(&bytes).is_err(), "{at}");
        }
        assert_eq!(Uuid::try_parse(&footer.uuid().to_string()), Ok(footer.uuid()));
    }
}
