//! Compressed loopback images, version 2: `docs/formats/cloop.md`.

use vdkit_block::bytes::be32;
use vdkit_block::{
    Codec, Compressed, DriverInfo, Error, Extent, FileIndex, HostOffset, ImageInfo, Limits, Place,
    Result, Storage, require_within,
};

use crate::read_only::{self, Map};
use crate::tables::Tables;

const HEADER_BYTES: u64 = 136;
const SECTOR: u32 = 512;

/// A validated header.
#[derive(Clone, Debug)]
pub(crate) struct Cloop {
    block_bytes: u32,
    blocks: u32,
    compressed_bytes_max: u64,
}

impl Map for Cloop {
    const INFO: DriverInfo = DriverInfo {
        name: "cloop",
        aliases: &[],
        extensions: &["cloop"],
        description: "compressed loopback images (Knoppix), for reading",
    };

    /// Start of the shell script at the head of each image.
    const MAGICS: &'static [&'static [u8]] = &[b"#!/bin/sh\n#V2.0 Format\n"];

    fn describe(&self, info: &mut ImageInfo) {
        info.cluster_size = Some(self.cluster_bytes());
        info.compression = Some("zlib");
    }

    fn read(storage: &dyn Storage, limits: &Limits) -> Result<Self> {
        let file = storage.name();
        let bytes = Self::header::<{ HEADER_BYTES as usize }>(storage, "a script '#V2.0 Format'")?;
        let corrupt = |at: u64, what, found: String, expected: &str| {
            Err(Error::corrupt(file, at, what, found, expected))
        };
        let (block_bytes, blocks) = (be32(&bytes, 128), be32(&bytes, 132));
        if block_bytes == 0 || !block_bytes.is_multiple_of(SECTOR) {
            return corrupt(128, "block size", block_bytes.to_string(), "a multiple of 512");
        }
        let compressed_bytes_max = limits.compressed_bytes_max;
        require_within(file, "block size", block_bytes.into(), compressed_bytes_max)?;
        if HEADER_BYTES + (u64::from(blocks) + 1) * 8 > storage.len()? {
            return corrupt(132, "table", format!("{blocks} blocks"), "a table in the file");
        }
        Ok(Self { block_bytes, blocks, compressed_bytes_max })
    }

    fn guest_bytes(&self) -> u64 {
        u64::from(self.blocks) * u64::from(self.block_bytes)
    }

    fn cluster_bytes(&self) -> u64 {
        self.block_bytes.into()
    }

    fn table_bytes(&self) -> u64 {
        (u64::from(self.blocks) + 1) * 8
    }

    fn one(&self, storage: &dyn Storage, tables: &Tables, at: u64, len: u64) -> Result<Extent> {
        let block_bytes = self.cluster_bytes();
        let (index, skip) = (at / block_bytes, at % block_bytes);
        let entry_at = HEADER_BYTES + index * 8;
        let start = u64::from_be_bytes(tables.bytes(storage, entry_at)?);
        let end = u64::from_be_bytes(tables.bytes(storage, entry_at + 8)?);
        read_only::data(storage, entry_at, start, 1, HEADER_BYTES + self.table_bytes())?;
        let compressed_len =
            end.checked_sub(start).filter(|len| (1..=self.compressed_bytes_max).contains(len));
        let Some(compressed_len) = compressed_len else {
            let found = format!("a block from {start:#x} to {end:#x}");
            let expected = "one of at least a byte that memory can hold";
            return Err(Error::corrupt(storage.name(), entry_at, "offset", found, expected));
        };
        let compressed = Compressed {
            file: FileIndex(0),
            offset: HostOffset(start),
            // Below the unit limit.
            len: u32::try_from(compressed_len).unwrap_or(u32::MAX),
            codec: Codec::Zlib,
            unpacked_len: self.block_bytes,
            skip: skip as u32,
        };
        Ok(Extent { len: (block_bytes - skip).min(len), place: Place::Compressed(compressed) })
    }
}
