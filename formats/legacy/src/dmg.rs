//! Apple's disk images (UDIF): `docs/formats/dmg.md`.

use vdkit_block::bytes::{be32, be64};
use vdkit_block::{
    Codec, Compressed, DriverInfo, Error, Extent, FileIndex, HostOffset, ImageInfo, Limits, Place,
    Result, Storage, require_within,
};

use crate::property_list::block_tables;
use crate::read_only::{self, Map};
use crate::tables::Tables;

const TRAILER_BYTES: usize = 512;
const MAGIC: &[u8] = b"koly";
const SECTOR: u64 = 512;
/// QEMU's limit for the tables and the text around them.
const TABLES_BYTES_MAX: u64 = 16 << 20;
/// Offset of a table's chunks, and their size.
const CHUNKS_AT: usize = 204;
const CHUNK_BYTES: usize = 40;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Zero,
    Raw,
    Compressed(Codec),
    /// Unsupported method.
    Unknown(u32),
}

/// A run of the disk.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    /// Guest offset.
    at: u64,
    len: u64,
    /// File offset.
    offset: u64,
    compressed_len: u64,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
struct Trailer {
    at: u64,
    data_fork: u64,
    resources: (u64, u64),
    property_list: (u64, u64),
    sectors: u64,
}

impl Trailer {
    fn read(storage: &dyn Storage) -> Result<Self> {
        let file = storage.name();
        let at = storage.len()?.saturating_sub(TRAILER_BYTES as u64);
        let mut bytes = [0; TRAILER_BYTES];
        let got = storage.read_up_to(&mut bytes, HostOffset(at))?;
        if got < TRAILER_BYTES || !bytes.starts_with(MAGIC) {
            let (what, found) = ("trailer", "other bytes");
            return Err(Error::corrupt(file, at, what, found, "'koly', 512 bytes before the end"));
        }
        let trailer = Self {
            at,
            data_fork: be64(&bytes, 24),
            resources: (be64(&bytes, 40), be64(&bytes, 48)),
            property_list: (be64(&bytes, 216), be64(&bytes, 224)),
            sectors: be64(&bytes, 492),
        };
        if trailer.sectors > i64::MAX as u64 / SECTOR {
            let (what, found) = ("sector count", trailer.sectors.to_string());
            return Err(Error::corrupt(file, at + 492, what, found, "less than 2^63 bytes"));
        }
        Ok(trailer)
    }

    fn guest_bytes(&self) -> u64 {
        self.sectors * SECTOR
    }
}

/// A validated image: its chunks in guest order.
#[derive(Clone, Debug)]
pub(crate) struct Dmg {
    guest_bytes: u64,
    chunks: Vec<Chunk>,
    compressed_bytes_max: u64,
    tables_at: u64,
}

impl Dmg {
    /// Parses resources (each a length and its bytes), and takes those that are tables.
    fn take_resources(&mut self, file: &str, bytes: &[u8], data_fork: u64) -> Result<()> {
        let corrupt = |at: u64, found: String, expected: &str| {
            Err(Error::corrupt(file, self.tables_at + at, "resource fork", found, expected))
        };
        let (start, len) = (be32(bytes, 0) as usize, be32(bytes, 8) as usize);
        let Some(mut rest) = start.checked_add(len).and_then(|end| bytes.get(start..end)) else {
            return corrupt(0, format!("{len} bytes at {start:#x}"), "data within the fork");
        };
        let mut tables = Vec::new();
        while let Some((head, behind)) = rest.split_first_chunk::<4>() {
            let len = u32::from_be_bytes(*head) as usize;
            let Some(table) = behind.get(..len) else {
                return corrupt(start as u64, format!("{len} bytes"), "a resource within the fork");
            };
            tables.push(table);
            rest = &behind[len..];
        }
        tables.into_iter().try_for_each(|table| self.take_table(file, table, data_fork))
    }

    /// Parses a `mish` table; others are skipped.
    fn take_table(&mut self, file: &str, table: &[u8], data_fork: u64) -> Result<()> {
        if !table.starts_with(b"mish") || table.len() < CHUNKS_AT {
            return Ok(());
        }
        let (first, data_at) = (be64(table, 8), be64(table, 24));
        for entry in table[CHUNKS_AT..].chunks_exact(CHUNK_BYTES) {
            let kind = match be32(entry, 0) {
                0 | 2 => Kind::Zero,
                1 => Kind::Raw,
                0x8000_0004 => Kind::Compressed(Codec::Adc),
                0x8000_0005 => Kind::Compressed(Codec::Zlib),
                0x8000_0006 => Kind::Compressed(Codec::Bzip2),
                0x8000_0008 => Kind::Compressed(Codec::Xz),
                // A comment, and the end marker.
                0x7fff_fffe => continue,
                u32::MAX => break,
                other => Kind::Unknown(other),
            };
            self.take_chunk(file, entry, kind, first, data_at, data_fork)?;
        }
        Ok(())
    }

    fn take_chunk(
        &mut self,
        file: &str,
        entry: &[u8],
        kind: Kind,
        first: u64,
        data_at: u64,
        data_fork: u64,
    ) -> Result<()> {
        let sectors = be64(entry, 16);
        if sectors == 0 {
            return Ok(());
        }
        let at = be64(entry, 8).checked_add(first).and_then(|sector| sector.checked_mul(SECTOR));
        let len = sectors.checked_mul(SECTOR);
        let end = at.and_then(|at| at.checked_add(len?));
        let offset = be64(entry, 24).checked_add(data_at).and_then(|at| at.checked_add(data_fork));
        let (Some(at), Some(len), Some(offset), true) =
            (at, len, offset, end.is_some_and(|end| end <= i64::MAX as u64))
        else {
            let found = format!("{sectors} sectors at {} + {first}", be64(entry, 8));
            let (what, expected) = ("chunk", "a run below 2^63 bytes");
            return Err(Error::corrupt(file, self.tables_at, what, found, expected));
        };
        let compressed_len = be64(entry, 32);
        if matches!(kind, Kind::Compressed(_)) {
            let found = compressed_len.max(len);
            require_within(file, "compressed chunk", found, self.compressed_bytes_max)?;
        }
        self.chunks.push(Chunk { at, len, offset, compressed_len, kind });
        Ok(())
    }

    /// The compression method of the first compressed chunk.
    fn compression(&self) -> Option<&'static str> {
        self.chunks.iter().find_map(|chunk| match chunk.kind {
            Kind::Compressed(Codec::Zlib) => Some("zlib"),
            Kind::Compressed(Codec::Bzip2) => Some("bzip2"),
            Kind::Compressed(Codec::Adc) => Some("adc"),
            Kind::Unknown(0x8000_0007) => Some("lzfse"),
            Kind::Compressed(Codec::Xz) => Some("lzma"),
            _ => None,
        })
    }
}

impl Map for Dmg {
    const INFO: DriverInfo = DriverInfo {
        name: "dmg",
        aliases: &[],
        extensions: &["dmg"],
        description: "Apple's disk images (UDIF): raw, zlib, bzip2, LZMA and ADC chunks, for reading",
    };

    /// The start has no signature; the trailer has.
    const MAGICS: &'static [&'static [u8]] = &[];

    fn matches(_head: &[u8], tail: &[u8], len: u64) -> bool {
        tail.len() == TRAILER_BYTES
            && be32(tail, 8) as usize == TRAILER_BYTES
            && tail.starts_with(MAGIC)
            && len > TRAILER_BYTES as u64
    }

    fn describe(&self, info: &mut ImageInfo) {
        info.compression = self.compression();
        info.properties.push(("chunks".to_owned(), self.chunks.len().to_string()));
    }

    fn read(storage: &dyn Storage, limits: &Limits) -> Result<Self> {
        let file = storage.name();
        let trailer = Trailer::read(storage)?;
        let (in_resources, (at, len)) = match (trailer.resources, trailer.property_list) {
            (resources, _) if resources.1 != 0 => (true, resources),
            (_, list) => (false, list),
        };
        if len == 0 {
            let (what, found) = ("tables", "neither resources nor a property list");
            return Err(Error::corrupt(file, trailer.at + 40, what, found, "one of them"));
        }
        require_within(file, "size of the tables", len, TABLES_BYTES_MAX)?;
        if at.checked_add(len).is_none_or(|end| end > trailer.at) {
            let (what, found) = ("tables", format!("{len} bytes at {at:#x}"));
            return Err(Error::corrupt(file, trailer.at + 40, what, found, "bytes before the end"));
        }
        let mut bytes = vec![0; len as usize];
        storage.read_at(&mut bytes, HostOffset(at))?;
        let mut dmg = Self {
            guest_bytes: trailer.guest_bytes(),
            chunks: Vec::new(),
            compressed_bytes_max: limits.compressed_bytes_max,
            tables_at: at,
        };
        if in_resources {
            dmg.take_resources(file, &bytes, trailer.data_fork)?;
        } else {
            let tables = block_tables(&String::from_utf8_lossy(&bytes)).map_err(|error| {
                let (what, found) = ("property list", error.to_string());
                Error::corrupt(file, at, what, found, "tables in base64")
            })?;
            for table in tables {
                dmg.take_table(file, &table, trailer.data_fork)?;
            }
        }
        dmg.chunks.sort_by_key(|chunk| chunk.at);
        Ok(dmg)
    }

    fn guest_bytes(&self) -> u64 {
        self.guest_bytes
    }

    fn cluster_bytes(&self) -> u64 {
        SECTOR
    }

    fn table_bytes(&self) -> u64 {
        (self.chunks.len() * CHUNK_BYTES) as u64
    }

    /// All faults of a chunk have one place: that of the tables.
    fn spoiled(&self, at: u64, _structure: &str) -> u64 {
        let after = self.chunks.partition_point(|chunk| chunk.at <= at);
        self.chunks.get(after).map_or(self.guest_bytes, |next| next.at)
    }

    fn one(&self, storage: &dyn Storage, _tables: &Tables, at: u64, len: u64) -> Result<Extent> {
        let after = self.chunks.partition_point(|chunk| chunk.at <= at);
        let next = self.chunks.get(after).map_or(u64::MAX, |chunk| chunk.at);
        let len = len.min(next - at);
        let chunk = after.checked_sub(1).and_then(|n| self.chunks.get(n));
        let Some(chunk) = chunk.filter(|chunk| at - chunk.at < chunk.len) else {
            return Ok(Extent { len, place: Place::Hole });
        };
        let skip = at - chunk.at;
        let len = len.min(chunk.len - skip);
        match chunk.kind {
            Kind::Zero => Ok(Extent { len, place: Place::Zero { allocated: false } }),
            Kind::Raw => {
                let offset = chunk.offset.saturating_add(skip);
                read_only::data(storage, self.tables_at, offset, len, 0)
            }
            Kind::Compressed(codec) => {
                read_only::data(storage, self.tables_at, chunk.offset, 1, 0)?;
                let compressed = Compressed {
                    file: FileIndex(0),
                    offset: HostOffset(chunk.offset),
                    // Both are below the unit limit, and so is the skip.
                    len: chunk.compressed_len as u32,
                    codec,
                    unpacked_len: chunk.len as u32,
                    skip: skip as u32,
                };
                Ok(Extent { len, place: Place::Compressed(compressed) })
            }
            Kind::Unknown(number) => {
                let name = match number {
                    0x8000_0007 => "lzfse",
                    _ => "an unknown method",
                };
                Err(Error::unsupported(
                    storage.name(),
                    format!("a chunk compressed by {name} ({number:#x})"),
                    "on a Mac, 'hdiutil convert -format UDZO' makes an image with zlib of it",
                ))
            }
        }
    }
}
