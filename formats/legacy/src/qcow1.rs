//! qcow version 1: `docs/formats/qcow.md`.

use vdkit_block::bytes::{be32, be64};
use vdkit_block::{
    Codec, Compressed, DriverInfo, Error, Extent, FileIndex, HostOffset, ImageInfo, Limits, Place,
    Result, Storage, require_within,
};

use crate::read_only::{self, Map};
use crate::tables::Tables;

const HEADER_BYTES: usize = 48;
const COMPRESSED: u64 = 1 << 63;
const L1_ENTRY: &str = "L1 entry";

/// A validated header.
#[derive(Clone, Debug)]
pub(crate) struct Qcow {
    guest_bytes: u64,
    cluster_bits: u32,
    l2_bits: u32,
    l1_at: u64,
    encrypted: bool,
    backing: Option<String>,
}

impl Map for Qcow {
    const INFO: DriverInfo = DriverInfo {
        name: "qcow",
        aliases: &[],
        extensions: &["qcow"],
        description: "QEMU's first copy-on-write format, for reading",
    };

    const MAGICS: &'static [&'static [u8]] = &[b"QFI\xfb\0\0\0\x01"];

    fn describe(&self, info: &mut ImageInfo) {
        info.cluster_size = Some(self.cluster_bytes());
        info.compression = Some("zlib");
        info.encryption = self.encrypted.then(|| "aes".to_owned());
        info.backing_file = self.backing.clone();
    }

    fn read(storage: &dyn Storage, limits: &Limits) -> Result<Self> {
        let file = storage.name();
        let bytes = Self::header::<HEADER_BYTES>(storage, "'QFI' 0xfb and version 1")?;
        let corrupt = |at: u64, what, found: String, expected: &str| {
            Err(Error::corrupt(file, at, what, found, expected))
        };
        let (cluster_bits, l2_bits) = (u32::from(bytes[32]), u32::from(bytes[33]));
        if !(9..=16).contains(&cluster_bits) {
            return corrupt(32, "cluster bits", cluster_bits.to_string(), "9 to 16");
        }
        if !(6..=13).contains(&l2_bits) {
            return corrupt(33, "bits of an L2 table", l2_bits.to_string(), "6 to 13");
        }
        let guest_bytes = be64(&bytes, 24);
        if guest_bytes > i64::MAX as u64 {
            return corrupt(24, "disk size", format!("{guest_bytes:#x}"), "less than 2^63 bytes");
        }
        let l1_at = be64(&bytes, 40);
        let l1_bytes = guest_bytes.div_ceil(1 << (cluster_bits + l2_bits)) * 8;
        require_within(file, "size of the L1 table", l1_bytes, limits.table_bytes_max)?;
        if l1_at.checked_add(l1_bytes).is_none_or(|end| end > i64::MAX as u64) {
            return corrupt(40, "L1 table", format!("an offset of {l1_at:#x}"), "one in the file");
        }
        let method = be32(&bytes, 36);
        if method > 1 {
            return corrupt(36, "encryption", method.to_string(), "0 (none) or 1 (AES)");
        }
        let backing = match (be64(&bytes, 8), be32(&bytes, 16)) {
            (0, _) | (_, 0) => None,
            (at, len) => Some(read_only::name(storage, at, len, 16)?),
        };
        Ok(Self { guest_bytes, cluster_bits, l2_bits, l1_at, encrypted: method == 1, backing })
    }

    fn guest_bytes(&self) -> u64 {
        self.guest_bytes
    }

    fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    fn table_bytes(&self) -> u64 {
        self.guest_bytes.div_ceil(self.cluster_bytes()) * 8
    }

    fn spoiled(&self, at: u64, structure: &str) -> u64 {
        let bits = self.cluster_bits + if structure == L1_ENTRY { self.l2_bits } else { 0 };
        ((at >> bits) + 1) << bits
    }

    fn one(&self, storage: &dyn Storage, tables: &Tables, at: u64, len: u64) -> Result<Extent> {
        let cluster = self.cluster_bytes();
        let span = cluster << self.l2_bits;
        let l1_entry = self.l1_at + at / span * 8;
        let l2_at = u64::from_be_bytes(tables.bytes(storage, l1_entry)?);
        if l2_at == 0 {
            return Ok(Extent { len: (span - at % span).min(len), place: Place::Hole });
        }
        let (within, index) = (at % cluster, at % span / cluster);
        let len = (cluster - within).min(len);
        let entry_at = l2_at.checked_add(index * 8).filter(|at| *at <= i64::MAX as u64);
        let Some(entry_at) = entry_at else {
            let (what, found) = (L1_ENTRY, format!("{l2_at:#x}"));
            return Err(Error::corrupt(
                storage.name(),
                l1_entry,
                what,
                found,
                "a table in the file",
            ));
        };
        let entry = u64::from_be_bytes(tables.bytes(storage, entry_at)?);
        if entry == 0 {
            return Ok(Extent { len, place: Place::Hole });
        }
        if entry & COMPRESSED == 0 {
            let offset = entry.saturating_add(within);
            return read_only::data(storage, entry_at, offset, len, HEADER_BYTES as u64);
        }
        let shift = 63 - self.cluster_bits;
        let (offset, compressed_len) = (entry & ((1 << shift) - 1), entry >> shift & (cluster - 1));
        read_only::data(storage, entry_at, offset, 1, HEADER_BYTES as u64)?;
        if compressed_len == 0 {
            let (what, found) = ("L2 entry", "a compressed cluster of 0 bytes");
            return Err(Error::corrupt(storage.name(), entry_at, what, found, "its bytes"));
        }
        let compressed = Compressed {
            file: FileIndex(0),
            offset: HostOffset(offset),
            // Less than a cluster, which is at most 64 KiB.
            len: compressed_len as u32,
            codec: Codec::Deflate,
            unpacked_len: cluster as u32,
            skip: within as u32,
        };
        Ok(Extent { len, place: Place::Compressed(compressed) })
    }
}
