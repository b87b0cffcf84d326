//! The header of a hosted sparse extent: decoding, validation and encoding.
//!
//! Source: VMware, "Virtual Disk Format 5.0", "Hosted Sparse Extent Header";
//! `docs/formats/vmdk.md`.

use vdkit_block::bytes::{le32, le64};
use vdkit_block::{Error, Limits, Result};

/// Bytes of a sector, the unit of all sizes here.
pub const SECTOR: u64 = 512;
/// The first four bytes.
pub const MAGIC: &[u8; 4] = b"KDMV";
/// `gdOffset` of a stream: the footer names the grain directory.
pub const DIRECTORY_AT_END: u64 = u64::MAX;
/// Entries of a grain table, always.
pub const TABLE_ENTRIES: u32 = 512;
/// Largest accepted grain, as in QEMU: 1 GiB.
const GRAIN_SECTORS_MAX: u64 = 0x20_0000;
/// Largest accepted grain directory: 64 TiB in grains of 64 KiB. Grain tables are always in the
/// first 2 TiB of their file.
pub(crate) const DIRECTORY_BYTES_MAX: u64 = 8 << 20;
/// Bytes that a transfer in text mode would change: LF, space, CR LF.
const LINE_ENDS: [u8; 4] = [b'\n', b' ', b'\r', b'\n'];

/// Byte offsets of the fields.
pub mod field {
    /// Version, 4 bytes.
    pub const VERSION: u64 = 4;
    /// Flags, 4 bytes.
    pub const FLAGS: u64 = 8;
    /// Sectors of the extent, 8 bytes.
    pub const CAPACITY: u64 = 12;
    /// Sectors of a grain, 8 bytes.
    pub const GRAIN: u64 = 20;
    /// First sector of the embedded descriptor, 8 bytes.
    pub const DESCRIPTOR: u64 = 28;
    /// Its sectors, 8 bytes.
    pub const DESCRIPTOR_SECTORS: u64 = 36;
    /// Entries of a grain table, 4 bytes.
    pub const TABLE_ENTRIES: u64 = 44;
    /// First sector of the redundant grain directory, 8 bytes.
    pub const REDUNDANT_DIRECTORY: u64 = 48;
    /// First sector of the grain directory, 8 bytes.
    pub const DIRECTORY: u64 = 56;
    /// Sectors of metadata before the first grain, 8 bytes.
    pub const OVERHEAD: u64 = 64;
    /// Not closed cleanly, 1 byte.
    pub const UNCLEAN: u64 = 72;
    /// See [`super::flag::LINE_ENDS`].
    pub const LINE_ENDS: u64 = 73;
    /// Compression method, 2 bytes.
    pub const COMPRESSION: u64 = 77;
}

/// Bits of the flags.
pub mod flag {
    /// The header has line ends to check.
    pub const LINE_ENDS: u32 = 1;
    /// There is a redundant grain directory.
    pub const REDUNDANT: u32 = 1 << 1;
    /// A table entry of 1 is a grain of zeroes.
    pub const ZERO_GRAIN: u32 = 1 << 2;
    /// Grains are compressed.
    pub const COMPRESSED: u32 = 1 << 16;
    /// Markers precede grains and metadata.
    pub const MARKERS: u32 = 1 << 17;
}

/// A checked header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SparseHeader {
    /// 1, 2 or 3.
    pub version: u32,
    /// See [`flag`].
    pub flags: u32,
    /// Sectors of the extent.
    pub capacity: u64,
    /// Sectors of a grain, a power of two.
    pub grain_sectors: u64,
    /// First sector of the embedded descriptor, or 0.
    pub descriptor: u64,
    /// Its sectors.
    pub descriptor_sectors: u64,
    /// Entries of a grain table, 1 to 512.
    pub table_entries: u32,
    /// First sector of the redundant grain directory, if [`flag::REDUNDANT`] is set.
    pub redundant_directory: u64,
    /// First sector of the grain directory, or [`DIRECTORY_AT_END`].
    pub directory: u64,
    /// Sectors of metadata before the first grain.
    pub overhead: u64,
    /// It was not closed cleanly.
    pub unclean: bool,
    /// Compression method: 0 for none, 1 for deflate.
    pub compression: u16,
}

impl SparseHeader {
    /// Parses the header from its sector, which is at `base` in `file`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for a field that violates the specification, [`Error::Unsupported`] for
    /// an unknown version or method, [`Error::Limit`] for a grain directory beyond `limits`.
    pub fn parse(
        bytes: &[u8; SECTOR as usize],
        base: u64,
        file: &str,
        limits: &Limits,
    ) -> Result<Self> {
        if &bytes[..4] != MAGIC {
            let found = format!("{:02x?}", &bytes[..4]);
            return Err(Error::corrupt(file, base, "magic number", found, "KDMV"));
        }
        let header = Self::decode(bytes);
        if !(1..=3).contains(&header.version) {
            return Err(Error::unsupported(
                file,
                format!("not supported: version {} of the sparse extent header", header.version),
                "versions 1 to 3 are known",
            ));
        }
        let ends = &bytes[field::LINE_ENDS as usize..][..4];
        if header.has(flag::LINE_ENDS) && ends != LINE_ENDS {
            let (at, found) = (base + field::LINE_ENDS, format!("{ends:02x?}"));
            let expected = "LF, space, CR, LF: the file was changed by a transfer as text";
            return Err(Error::corrupt(file, at, "line end detection", found, expected));
        }
        header.check_sizes(base, file)?;
        if header.compression > 1 {
            return Err(Error::unsupported(
                file,
                format!("not supported: compression method {}", header.compression),
                "only deflate (1) is known",
            ));
        }
        header.check_limits(file, limits)?;
        Ok(header)
    }

    /// The fields of a header, unchecked.
    fn decode(bytes: &[u8; SECTOR as usize]) -> Self {
        Self {
            version: le32(bytes, field::VERSION as usize),
            flags: le32(bytes, field::FLAGS as usize),
            capacity: le64(bytes, field::CAPACITY as usize),
            grain_sectors: le64(bytes, field::GRAIN as usize),
            descriptor: le64(bytes, field::DESCRIPTOR as usize),
            descriptor_sectors: le64(bytes, field::DESCRIPTOR_SECTORS as usize),
            table_entries: le32(bytes, field::TABLE_ENTRIES as usize),
            redundant_directory: le64(bytes, field::REDUNDANT_DIRECTORY as usize),
            directory: le64(bytes, field::DIRECTORY as usize),
            overhead: le64(bytes, field::OVERHEAD as usize),
            unclean: bytes[field::UNCLEAN as usize] != 0,
            compression: le32(bytes, field::COMPRESSION as usize) as u16,
        }
    }

    /// Checks the sizes of grains, grain tables and the extent against the specification.
    fn check_sizes(&self, base: u64, file: &str) -> Result<()> {
        let fault = |at: u64, what, found: String, expected: &str| {
            Err(Error::corrupt(file, base + at, what, found, expected))
        };
        if !self.grain_sectors.is_power_of_two() || self.grain_sectors > GRAIN_SECTORS_MAX {
            let found = format!("{} sectors", self.grain_sectors);
            return fault(field::GRAIN, "grain size", found, "a power of two, at most 1 GiB");
        }
        if !(1..=TABLE_ENTRIES).contains(&self.table_entries) {
            let found = self.table_entries.to_string();
            return fault(field::TABLE_ENTRIES, "entries of a grain table", found, "512");
        }
        if self.capacity > (i64::MAX as u64) / SECTOR {
            let found = format!("{} sectors", self.capacity);
            return fault(field::CAPACITY, "capacity", found, "less than 2^63 bytes");
        }
        Ok(())
    }

    /// Checks that compressed grains and the grain directory are within `limits`.
    fn check_limits(&self, file: &str, limits: &Limits) -> Result<()> {
        let unit = self.grain_bytes();
        if self.is_compressed() && unit > limits.compressed_bytes_max {
            let (file, what) = (file.to_owned(), "size of a compressed grain");
            return Err(Error::Limit {
                file,
                what,
                found: unit,
                limit: limits.compressed_bytes_max,
            });
        }
        let (found, limit) =
            (self.directory_bytes(), limits.table_bytes_max.min(DIRECTORY_BYTES_MAX));
        if found > limit {
            let (file, what) = (file.to_owned(), "size of the grain directory");
            return Err(Error::Limit { file, what, found, limit });
        }
        Ok(())
    }

    /// The sector that [`SparseHeader::parse`] reads.
    pub fn encode(&self) -> [u8; SECTOR as usize] {
        let mut bytes = [0; SECTOR as usize];
        let mut put = |at: u64, value: &[u8]| {
            bytes[at as usize..at as usize + value.len()].copy_from_slice(value);
        };
        put(0, MAGIC);
        put(field::VERSION, &self.version.to_le_bytes());
        put(field::FLAGS, &self.flags.to_le_bytes());
        put(field::CAPACITY, &self.capacity.to_le_bytes());
        put(field::GRAIN, &self.grain_sectors.to_le_bytes());
        put(field::DESCRIPTOR, &self.descriptor.to_le_bytes());
        put(field::DESCRIPTOR_SECTORS, &self.descriptor_sectors.to_le_bytes());
        put(field::TABLE_ENTRIES, &self.table_entries.to_le_bytes());
        put(field::REDUNDANT_DIRECTORY, &self.redundant_directory.to_le_bytes());
        put(field::DIRECTORY, &self.directory.to_le_bytes());
        put(field::OVERHEAD, &self.overhead.to_le_bytes());
        put(field::UNCLEAN, &[u8::from(self.unclean)]);
        put(field::LINE_ENDS, &LINE_ENDS);
        put(field::COMPRESSION, &self.compression.to_le_bytes());
        bytes
    }

    /// Whether a bit of [`flag`] is set.
    pub fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// Whether grains are compressed. As in QEMU, the method decides, not the flag.
    pub fn is_compressed(&self) -> bool {
        self.compression == 1
    }

    /// Bytes of a grain.
    pub fn grain_bytes(&self) -> u64 {
        self.grain_sectors * SECTOR
    }

    /// Entries of the grain directory: one per grain table of the whole extent.
    pub fn directory_entries(&self) -> u64 {
        self.capacity.div_ceil(self.grain_sectors * u64::from(self.table_entries))
    }

    /// Bytes of the grain directory.
    pub fn directory_bytes(&self) -> u64 {
        self.directory_entries() * 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> SparseHeader {
        SparseHeader {
            version: 1,
            flags: flag::LINE_ENDS | flag::REDUNDANT,
            capacity: 1 << 22,
            grain_sectors: 128,
            descriptor: 1,
            descriptor_sectors: 20,
            table_entries: 512,
            redundant_directory: 21,
            directory: 300,
            overhead: 640,
            unclean: false,
            compression: 0,
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let bytes = header().encode();
        assert_eq!(SparseHeader::parse(&bytes, 0, "x", &Limits::default()).unwrap(), header());
        assert_eq!(header().directory_entries(), 64);
    }

    #[test]
    fn faults_name_their_field() {
        for (at, value) in [(0, 1), (73, b'\r'), (20, 3), (45, 0), (45, 3), (12 + 7, 0x80)] {
            let mut bytes = header().encode();
            bytes[at] = value;
            let error = SparseHeader::parse(&bytes, 512, "x", &Limits::default()).unwrap_err();
            let Error::Corrupt(fault) = error else { panic!("{error}") };
            assert!((512..512 + 80).contains(&fault.offset), "{fault}");
        }
        for (at, value) in [(4, 4), (77, 2), (12 + 6, 1)] {
            let mut bytes = header().encode();
            bytes[at] = value;
            let error = SparseHeader::parse(&bytes, 0, "x", &Limits::default()).unwrap_err();
            assert!(!matches!(error, Error::Corrupt(_)), "{error}");
        }
    }
}
