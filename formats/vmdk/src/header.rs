//! The header of a hosted sparse extent: decoding, validation and encoding.

use std::mem::offset_of;

use vdkit_block::{Error, Limits, Result, require_within};
use zerocopy::{transmute, transmute_ref};

use crate::on_disk::RawHeader;
use crate::sparse::Flavor;

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

/// Byte offsets of fields that change in place.
pub mod field {
    /// Not closed cleanly, 1 byte.
    pub const UNCLEAN: u64 = std::mem::offset_of!(super::RawHeader, unclean_shutdown) as u64;
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
        let raw: &RawHeader = transmute_ref!(bytes);
        if raw.magic != *MAGIC {
            let found = format!("{:02x?}", raw.magic);
            return Err(Error::corrupt(file, base, "magic number", found, "KDMV"));
        }
        let header = Self::decode(raw);
        if !(1..=3).contains(&header.version) {
            return Err(Error::unsupported(
                file,
                format!("not supported: version {} of the sparse extent header", header.version),
                "versions 1 to 3 are known",
            ));
        }
        if header.has(flag::LINE_ENDS) && raw.line_ends != LINE_ENDS {
            let at = base + offset_of!(RawHeader, line_ends) as u64;
            let found = format!("{:02x?}", raw.line_ends);
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
    fn decode(raw: &RawHeader) -> Self {
        Self {
            version: raw.version.get(),
            flags: raw.flags.get(),
            capacity: raw.capacity.get(),
            grain_sectors: raw.grain_size.get(),
            descriptor: raw.descriptor_offset.get(),
            descriptor_sectors: raw.descriptor_size.get(),
            table_entries: raw.num_gtes_per_gt.get(),
            redundant_directory: raw.rgd_offset.get(),
            directory: raw.gd_offset.get(),
            overhead: raw.overhead.get(),
            unclean: raw.unclean_shutdown != 0,
            compression: raw.compress_algorithm.get(),
        }
    }

    /// Checks the sizes of grains, grain tables and the extent against the specification.
    fn check_sizes(&self, base: u64, file: &str) -> Result<()> {
        let fault = |at: usize, what, found: String, expected: &str| {
            Err(Error::corrupt(file, base + at as u64, what, found, expected))
        };
        if !self.grain_sectors.is_power_of_two() || self.grain_sectors > GRAIN_SECTORS_MAX {
            let found = format!("{} sectors", self.grain_sectors);
            let at = offset_of!(RawHeader, grain_size);
            return fault(at, "grain size", found, "a power of two, at most 1 GiB");
        }
        if !(1..=TABLE_ENTRIES).contains(&self.table_entries) {
            let found = self.table_entries.to_string();
            let at = offset_of!(RawHeader, num_gtes_per_gt);
            return fault(at, "entries of a grain table", found, "512");
        }
        if self.capacity > (i64::MAX as u64) / SECTOR {
            let found = format!("{} sectors", self.capacity);
            let at = offset_of!(RawHeader, capacity);
            return fault(at, "capacity", found, "less than 2^63 bytes");
        }
        Ok(())
    }

    /// Checks that compressed grains and the grain directory are within `limits`.
    fn check_limits(&self, file: &str, limits: &Limits) -> Result<()> {
        if self.is_compressed() {
            let (what, limit) = ("size of a compressed grain", limits.compressed_bytes_max);
            require_within(file, what, self.grain_bytes(), limit)?;
        }
        let limit = limits.table_bytes_max.min(DIRECTORY_BYTES_MAX);
        require_within(file, "size of the grain directory", self.directory_bytes(), limit)
    }

    /// The sector that [`SparseHeader::parse`] reads.
    pub fn encode(&self) -> [u8; SECTOR as usize] {
        transmute!(RawHeader {
            magic: *MAGIC,
            version: self.version.into(),
            flags: self.flags.into(),
            capacity: self.capacity.into(),
            grain_size: self.grain_sectors.into(),
            descriptor_offset: self.descriptor.into(),
            descriptor_size: self.descriptor_sectors.into(),
            num_gtes_per_gt: self.table_entries.into(),
            rgd_offset: self.redundant_directory.into(),
            gd_offset: self.directory.into(),
            overhead: self.overhead.into(),
            unclean_shutdown: self.unclean.into(),
            line_ends: LINE_ENDS,
            compress_algorithm: self.compression.into(),
            pad: [0; 433],
        })
    }

    /// Whether a bit of [`flag`] is set.
    pub fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// Whether grains are compressed. As in QEMU, the method decides, not the flag.
    pub fn is_compressed(&self) -> bool {
        self.compression == 1
    }

    /// How tables and grains are encoded.
    pub(crate) fn flavor(&self) -> Flavor {
        let zero_grain = self.has(flag::ZERO_GRAIN);
        if self.is_compressed() {
            Flavor::Stream { zero_grain, markers: self.has(flag::MARKERS) }
        } else {
            Flavor::Hosted { zero_grain }
        }
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
