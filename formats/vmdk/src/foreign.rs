//! Headers of ESX's sparse extents, which are read-only: COWD and seSparse.
//!
//! Sources: VMware, "Virtual Disk Format 5.0", "ESX Server Sparse Extents"; for seSparse, which has
//! no public specification, the common ground of QEMU's reader and libvmdk's notes.

use vdkit_block::bytes::{le32, le64};
use vdkit_block::{Error, Limits, Result, require_within};

use crate::header::{DIRECTORY_BYTES_MAX, SECTOR};
use crate::source::ExtentHeader;
use crate::sparse::Flavor;

/// The first four bytes of a COWD extent.
pub(crate) const COWD_MAGIC: &[u8; 4] = b"COWD";
const COWD_TABLE_ENTRIES: u64 = 4096;
/// The first eight bytes of a seSparse extent, as a little-endian number.
pub(crate) const SE_MAGIC: u64 = 0xcafe_babe;
const SE_VOLATILE_MAGIC: u64 = 0xcafe_cafe;
const SE_VERSION: u64 = 0x2_0000_0001;
const COWD_GRAIN_SECTORS_MAX: u32 = 0x20_0000;

/// The header of a COWD extent, from its first sector.
///
/// # Errors
/// As [`crate::header::SparseHeader::parse`].
pub(crate) fn cowd(
    bytes: &[u8; SECTOR as usize],
    file: &str,
    limits: &Limits,
) -> Result<ExtentHeader> {
    let fault = |at, what, found: String, expected: &str| {
        Err(Error::corrupt(file, at, what, found, expected))
    };
    let version = le32(bytes, 4);
    if version != 1 {
        let what = format!("version {version} of the COWD header");
        return Err(Error::unsupported(file, what, "version 1 is known"));
    }
    let grain = le32(bytes, 16);
    if !grain.is_power_of_two() || grain > COWD_GRAIN_SECTORS_MAX {
        let found = format!("{grain} sectors");
        return fault(16, "grain size", found, "a power of two, at most 1 GiB");
    }
    let (sectors, grain_sectors) = (u64::from(le32(bytes, 12)), u64::from(grain));
    let needed = sectors.div_ceil(grain_sectors * COWD_TABLE_ENTRIES);
    let entries = le32(bytes, 24);
    if u64::from(entries) < needed {
        let found = format!("{entries} entries");
        return fault(24, "grain directory", found, &format!("at least {needed}"));
    }
    let limit = limits.table_bytes_max.min(DIRECTORY_BYTES_MAX);
    require_within(file, "size of the grain directory", needed * 4, limit)?;
    Ok(ExtentHeader {
        sectors,
        grain_sectors,
        directory: le32(bytes, 20).into(),
        directory_entries: needed,
        table_entries: COWD_TABLE_ENTRIES,
        flavor: Flavor::Cowd,
        hosted: None,
    })
}

/// The header of a seSparse extent, from its constant header.
///
/// # Errors
/// As [`crate::header::SparseHeader::parse`].
pub(crate) fn se_sparse(
    bytes: &[u8; SECTOR as usize],
    file: &str,
    limits: &Limits,
) -> Result<ExtentHeader> {
    let fault = |at, what, found: String, expected: &str| {
        Err(Error::corrupt(file, at, what, found, expected))
    };
    let strange = |what: String| {
        Err(Error::unsupported(file, what, "only what ESXi 6.5 and later write is known"))
    };
    if le64(bytes, 8) != SE_VERSION {
        return strange(format!("not supported: seSparse version {:#x}", le64(bytes, 8)));
    }
    let (grain_sectors, table_sectors) = (le64(bytes, 24), le64(bytes, 32));
    if (grain_sectors, table_sectors) != (8, 64) || le64(bytes, 40) != 0 {
        return strange(format!(
            "not supported: seSparse grains of {grain_sectors} sectors, tables of {table_sectors}, flags {:#x}",
            le64(bytes, 40)
        ));
    }
    let (sectors, table_entries) = (le64(bytes, 16), table_sectors * SECTOR / 8);
    let directory_entries = sectors.div_ceil(grain_sectors * table_entries);
    if sectors > i64::MAX as u64 / SECTOR {
        let found = format!("{sectors} sectors");
        return fault(16, "capacity", found, "less than 2^63 bytes");
    }
    let found = directory_entries * 8;
    let room = le64(bytes, 136).saturating_mul(SECTOR);
    if room < found {
        return fault(136, "grain directory", format!("{room} bytes"), &format!("{found}"));
    }
    // Table numbers have 32 bits: 64 TiB.
    let limit = limits.table_bytes_max.min(2 * DIRECTORY_BYTES_MAX);
    require_within(file, "size of the grain directory", found, limit)?;
    let (tables, grains) = (le64(bytes, 144), le64(bytes, 192));
    if tables > u64::from(u32::MAX) || grains > i64::MAX as u64 / SECTOR {
        return fault(144, "first grain table or grain", "far away".into(), "in the file");
    }
    Ok(ExtentHeader {
        sectors,
        grain_sectors,
        directory: le64(bytes, 128),
        directory_entries,
        table_entries,
        flavor: Flavor::Se { tables, grains },
        hosted: None,
    })
}

/// Host offset of a seSparse extent's volatile header.
pub(crate) fn se_volatile_at(bytes: &[u8; SECTOR as usize]) -> u64 {
    le64(bytes, 80).saturating_mul(SECTOR)
}

/// Checks the volatile header, which is at `at`.
///
/// # Errors
/// [`Error::Corrupt`]; [`Error::Unsupported`] for a journal that needs a replay.
pub(crate) fn check_volatile(bytes: &[u8; SECTOR as usize], at: u64, file: &str) -> Result<()> {
    if le64(bytes, 0) != SE_VOLATILE_MAGIC {
        let found = format!("{:#x}", le64(bytes, 0));
        return Err(Error::corrupt(file, at, "volatile header", found, "0xcafecafe"));
    }
    if le64(bytes, 24) != 0 {
        return Err(Error::unsupported(
            file,
            "not supported: a journal that must be replayed",
            "let ESXi open and close the disk once",
        ));
    }
    Ok(())
}
