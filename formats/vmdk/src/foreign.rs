//! Headers of ESX's sparse extents, which are read-only: COWD and seSparse.
//!
//! Sources: VMware, "Virtual Disk Format 5.0", "ESX Server Sparse Extents"; for seSparse, which has
//! no public specification, the common ground of QEMU's reader and libvmdk's notes.

use vdkit_block::bytes::{le32, le64};
use vdkit_block::{Error, Limits, Result, require_within};

use crate::header::{DIRECTORY_BYTES_MAX, SECTOR};

/// The first four bytes of a COWD extent.
pub(crate) const COWD_MAGIC: &[u8; 4] = b"COWD";
pub(crate) const COWD_TABLE_ENTRIES: u64 = 4096;
/// The first eight bytes of a seSparse extent, as a little-endian number.
pub(crate) const SE_MAGIC: u64 = 0xcafe_babe;
const SE_VOLATILE_MAGIC: u64 = 0xcafe_cafe;
const SE_VERSION: u64 = 0x2_0000_0001;
const COWD_GRAIN_SECTORS_MAX: u32 = 0x20_0000;

/// A COWD header's fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cowd {
    pub(crate) sectors: u64,
    pub(crate) grain_sectors: u64,
    /// First sector of the grain directory.
    pub(crate) directory: u64,
    pub(crate) directory_entries: u64,
}

impl Cowd {
    /// Reads the header's first sector.
    ///
    /// # Errors
    /// As [`crate::header::SparseHeader::parse`].
    pub(crate) fn parse(
        bytes: &[u8; SECTOR as usize],
        file: &str,
        limits: &Limits,
    ) -> Result<Self> {
        let fault = |at, what, found: String, expected: &str| {
            Err(Error::corrupt(file, at, what, found, expected))
        };
        if &bytes[..4] != COWD_MAGIC {
            return fault(0, "magic number", format!("{:02x?}", &bytes[..4]), "COWD");
        }
        let version = le32(bytes, 4);
        if version != 1 {
            let what = format!("version {version} of the COWD header");
            return Err(Error::unsupported(file, what, "version 1 is known"));
        }
        let (sectors, grain) = (le32(bytes, 12), le32(bytes, 16));
        if !grain.is_power_of_two() || grain > COWD_GRAIN_SECTORS_MAX {
            let found = format!("{grain} sectors");
            return fault(16, "grain size", found, "a power of two, at most 1 GiB");
        }
        let header = Self {
            sectors: sectors.into(),
            grain_sectors: grain.into(),
            directory: le32(bytes, 20).into(),
            directory_entries: le32(bytes, 24).into(),
        };
        let needed = header.sectors.div_ceil(header.grain_sectors * COWD_TABLE_ENTRIES);
        if header.directory_entries < needed {
            let found = format!("{} entries", header.directory_entries);
            return fault(24, "grain directory", found, &format!("at least {needed}"));
        }
        let limit = limits.table_bytes_max.min(DIRECTORY_BYTES_MAX);
        require_within(file, "size of the grain directory", needed * 4, limit)?;
        Ok(Self { directory_entries: needed, ..header })
    }
}

/// A seSparse extent's constant header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SeSparse {
    pub(crate) sectors: u64,
    pub(crate) grain_sectors: u64,
    pub(crate) table_sectors: u64,
    /// First sector of the volatile header.
    pub(crate) volatile: u64,
    pub(crate) directory: u64,
    pub(crate) directory_entries: u64,
    /// First sector of the grain tables.
    pub(crate) tables: u64,
    /// First sector of the grains.
    pub(crate) grains: u64,
}

impl SeSparse {
    /// Reads the constant header.
    ///
    /// # Errors
    /// As [`crate::header::SparseHeader::parse`].
    pub(crate) fn parse(
        bytes: &[u8; SECTOR as usize],
        file: &str,
        limits: &Limits,
    ) -> Result<Self> {
        let fault = |at, what, found: String, expected: &str| {
            Err(Error::corrupt(file, at, what, found, expected))
        };
        if le64(bytes, 0) != SE_MAGIC {
            return fault(0, "magic number", format!("{:#x}", le64(bytes, 0)), "0xcafebabe");
        }
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
        let sectors = le64(bytes, 16);
        let header = Self {
            sectors,
            grain_sectors,
            table_sectors,
            volatile: le64(bytes, 80),
            directory: le64(bytes, 128),
            directory_entries: sectors.div_ceil(grain_sectors * table_sectors * SECTOR / 8),
            tables: le64(bytes, 144),
            grains: le64(bytes, 192),
        };
        if sectors > i64::MAX as u64 / SECTOR {
            let found = format!("{sectors} sectors");
            return fault(16, "capacity", found, "less than 2^63 bytes");
        }
        let found = header.directory_entries * 8;
        let room = le64(bytes, 136).saturating_mul(SECTOR);
        if room < found {
            return fault(136, "grain directory", format!("{room} bytes"), &format!("{found}"));
        }
        // Table numbers have 32 bits: 64 TiB.
        let limit = limits.table_bytes_max.min(2 * DIRECTORY_BYTES_MAX);
        require_within(file, "size of the grain directory", found, limit)?;
        if header.tables > u64::from(u32::MAX) || header.grains > i64::MAX as u64 / SECTOR {
            return fault(144, "first grain table or grain", "far away".into(), "in the file");
        }
        Ok(header)
    }

    /// Checks the volatile header.
    ///
    /// # Errors
    /// [`Error::Corrupt`]; [`Error::Unsupported`] for a journal that needs a replay.
    pub(crate) fn check_volatile(&self, bytes: &[u8; SECTOR as usize], file: &str) -> Result<()> {
        let at = self.volatile.saturating_mul(SECTOR);
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
}
