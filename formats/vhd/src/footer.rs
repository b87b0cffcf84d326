//! The footer: 512 bytes at the end of every image, and also at the start of images with a table.

use std::mem::{self, offset_of};

use uuid::Uuid;
use vdkit_block::{Error, Result, random_uuid};
use zerocopy::big_endian::{U32, U64};
use zerocopy::{FromZeros, IntoBytes, transmute_ref};

use crate::on_disk::{RawFooter, checksum};

pub(crate) const FOOTER_BYTES: usize = mem::size_of::<RawFooter>();
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
const BY_GEOMETRY: [[u8; 4]; 2] = [*b"vpc ", *b"qemu"];

/// What kind of image it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DiskType {
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
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::Dynamic => "dynamic",
            Self::Differencing => "differencing",
        }
    }
}

/// Cylinders, heads, and sectors per track.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DiskGeometry {
    pub(crate) cylinders: u16,
    pub(crate) heads: u8,
    pub(crate) sectors: u8,
}

impl DiskGeometry {
    /// The geometry that does not define the size: all programs then use the size field.
    pub(crate) const MAX: Self = Self { cylinders: 65535, heads: 16, sectors: 255 };

    pub(crate) fn count(self) -> u64 {
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

/// A footer with a valid cookie and checksum. Unknown fields are preserved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Footer {
    raw: RawFooter,
    pub(crate) disk_type: DiskType,
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
        let mut raw = RawFooter::new_zeroed();
        let len = found.len().min(FOOTER_BYTES);
        raw.as_mut_bytes()[..len].copy_from_slice(&found[..len]);
        let no = |at, found: String, expected| Err(NoFooter { at, found, expected });
        if raw.cookie != *COOKIE {
            return no(0, "other bytes".to_owned(), "a footer, which begins with 'conectix'");
        }
        if raw.checksum != checksum(raw.as_bytes(), raw.checksum) {
            let found = format!("the checksum {:#x}", raw.checksum);
            return no(offset_of!(RawFooter, checksum), found, "that of the footer");
        }
        let Some(disk_type) = DiskType::of(raw.disk_type.get()) else {
            let found = format!("disk type {}", raw.disk_type);
            let expected = "2 (fixed), 3 (dynamic) or 4 (differencing)";
            return no(offset_of!(RawFooter, disk_type), found, expected);
        };
        Ok(Self { raw, disk_type })
    }

    /// The footer of a new image.
    pub(crate) fn new(
        disk_type: DiskType,
        guest_bytes: u64,
        geometry: DiskGeometry,
    ) -> Result<Self> {
        let raw = RawFooter {
            cookie: *COOKIE,
            // A reserved bit that must be set.
            features: U32::new(2),
            file_format_version: U32::new(0x0001_0000),
            data_offset: U64::new(if disk_type == DiskType::Fixed { NO_OFFSET } else { 512 }),
            time_stamp: now().into(),
            creator_application: *CREATOR,
            creator_version: U32::new(0x0001_0000),
            creator_host_os: *b"Wi2k",
            original_size: guest_bytes.into(),
            disk_type: disk_type.number().into(),
            unique_id: random_uuid()?.into_bytes(),
            ..FromZeros::new_zeroed()
        };
        Ok(Self { raw, disk_type }.sized(guest_bytes, geometry))
    }

    /// The same footer with another size.
    pub(crate) fn sized(mut self, guest_bytes: u64, geometry: DiskGeometry) -> Self {
        self.raw.current_size = guest_bytes.into();
        self.raw.cylinders = geometry.cylinders.into();
        (self.raw.heads, self.raw.sectors_per_track) = (geometry.heads, geometry.sectors);
        self.raw.checksum = checksum(self.raw.as_bytes(), self.raw.checksum).into();
        self
    }

    pub(crate) fn bytes(&self) -> &[u8; FOOTER_BYTES] {
        transmute_ref!(&self.raw)
    }

    pub(crate) fn data_offset(&self) -> u64 {
        self.raw.data_offset.get()
    }

    /// Creation time in seconds since 2000.
    pub(crate) fn time(&self) -> u32 {
        self.raw.time_stamp.get()
    }

    /// The application that created the image, as text.
    pub(crate) fn creator(&self) -> String {
        let bytes = self.raw.creator_application.iter();
        bytes.map(|b| if b.is_ascii_graphic() { char::from(*b) } else { ' ' }).collect()
    }

    /// The size field, in bytes.
    pub(crate) fn current_size(&self) -> u64 {
        self.raw.current_size.get()
    }

    pub(crate) fn geometry(&self) -> DiskGeometry {
        DiskGeometry {
            cylinders: self.raw.cylinders.get(),
            heads: self.raw.heads,
            sectors: self.raw.sectors_per_track,
        }
    }

    pub(crate) fn version(&self) -> u32 {
        self.raw.file_format_version.get()
    }

    pub(crate) fn uuid(&self) -> Uuid {
        Uuid::from_bytes(self.raw.unique_id)
    }

    /// Whether the geometry is the size of the disk: the creator uses it so, and it defines a size.
    pub(crate) fn sized_by_geometry(&self) -> bool {
        BY_GEOMETRY.contains(&self.raw.creator_application)
            && self.geometry().count() != DiskGeometry::MAX.count()
    }

    /// Bytes of the guest disk, as the creator of the image computes them.
    pub(crate) fn disk_bytes(&self) -> u64 {
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
    let too_large = || Error::limit(file, "size", guest_bytes, SECTORS_MAX * SECTOR);
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
