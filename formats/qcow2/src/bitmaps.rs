//! Persistent dirty bitmaps.
//!
//! ```text
//!   directory (this file) ── state     decoded directory; bitmap tables of an open image
//!                              │
//!   edit ── commit ── switch           adding, removing, clearing: a new directory, one switch
//!                              │
//!   record ── bits                     written ranges are marked; each flush writes them
//! ```
//!
//! Source: qcow2 specification, sections "Bitmaps extension" and "Bitmaps".

pub(crate) mod bits;
#[cfg(test)]
mod bits_tests;
mod commit;
mod edit;

pub(crate) mod record;
mod resize;
pub(crate) mod state;
mod switch;

use vdkit_block::{BitmapInfo, Error, HostOffset, Limits, Result, Storage, is_aligned};
use zerocopy::{FromBytes, IntoBytes};

use crate::header::{BitmapsExtension, Header};
use crate::layout::{Geometry, OFFSET_MASK, autoclear, extension};
use crate::structures::BitmapDirectoryEntry;

/// Most bitmaps (QEMU's bound).
pub(crate) const BITMAPS_MAX: u32 = 65535;
const FIXED_BYTES: usize = size_of::<BitmapDirectoryEntry>();
pub(crate) const NAME_BYTES_MAX: usize = 1023;
/// Largest directory (QEMU's bound).
pub(crate) const DIRECTORY_BYTES_MAX: u64 = 1024 * BITMAPS_MAX as u64;
/// The only type: a dirty tracking bitmap.
pub(crate) const TYPE_DIRTY: u8 = 1;
/// log2 of the bytes that one bit covers (QEMU's bounds).
pub(crate) const GRANULARITY_BITS: std::ops::RangeInclusive<u8> = 9..=31;
/// Most bytes of all clusters of a bitmap (QEMU's bound).
pub(crate) const BITMAP_BYTES_MAX: u64 = 0x2000_0000;
/// Table entry without a cluster: all bits are set.
pub(crate) const ALL_ONES: u64 = 1;

/// Flags of a directory entry.
pub mod flag {
    /// The bitmap was not saved properly and cannot be trusted.
    pub const IN_USE: u32 = 1 << 0;
    /// The bitmap records writes.
    pub const AUTO: u32 = 1 << 1;
    /// Unknown extra data may be ignored.
    pub const EXTRA_DATA_COMPATIBLE: u32 = 1 << 2;
}

/// All flags.
const FLAGS_KNOWN: u32 = flag::IN_USE | flag::AUTO | flag::EXTRA_DATA_COMPATIBLE;

/// One persistent bitmap, as its directory entry says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    /// Host offset of its table; not validated.
    pub table_offset: HostOffset,
    /// Entries of its table; not validated.
    pub table_entries: u32,
    /// See [`flag`].
    pub flags: u32,
    /// log2 of the bytes that one bit covers.
    pub granularity_bits: u8,
    /// Name.
    pub name: Vec<u8>,
    /// Extra data, not interpreted.
    pub extra: Vec<u8>,
}

impl Bitmap {
    /// Whether it is marked as inconsistent.
    pub(crate) fn in_use(&self) -> bool {
        self.flags & flag::IN_USE != 0
    }

    /// Bits for a disk of this size.
    pub(crate) fn bits(&self, guest_bytes: u64) -> u64 {
        guest_bytes.div_ceil(1 << self.granularity_bits)
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let entry = self.entry();
        let end = out.len() + entry.bytes();
        out.extend_from_slice(entry.as_bytes());
        out.extend_from_slice(&self.extra);
        out.extend_from_slice(&self.name);
        out.resize(end, 0);
    }

    /// The fixed part of its directory entry.
    fn entry(&self) -> BitmapDirectoryEntry {
        BitmapDirectoryEntry {
            bitmap_table_offset: self.table_offset.0.into(),
            bitmap_table_size: self.table_entries.into(),
            flags: self.flags.into(),
            kind: TYPE_DIRTY,
            granularity_bits: self.granularity_bits,
            name_size: (self.name.len() as u16).into(),
            extra_data_size: (self.extra.len() as u32).into(),
        }
    }

    /// Description for users.
    pub fn info(&self) -> BitmapInfo {
        BitmapInfo {
            name: String::from_utf8_lossy(&self.name).into_owned(),
            granularity: 1 << self.granularity_bits,
            in_use: self.in_use(),
            enabled: self.flags & flag::AUTO != 0,
        }
    }
}

/// Table entries of a bitmap of `bits` bits. The data consists of whole 64-bit words; QEMU accepts
/// no other size. Without bits, as for an empty disk, there is still one entry: each bitmap has a
/// table.
pub(crate) fn table_entries_for(bits: u64, cluster_bytes: u64) -> u64 {
    (bits.div_ceil(64) * 8).div_ceil(cluster_bytes).max(1)
}

/// What is wrong with a bitmaps extension in a file of `len` bytes, and what was expected. The
/// directory may have at most `most` bytes.
pub(crate) fn extension_fault(
    bitmaps: &BitmapsExtension,
    cluster_bytes: u64,
    len: u64,
    most: u64,
) -> Option<(String, String)> {
    if bitmaps.count == 0 || bitmaps.count > BITMAPS_MAX {
        return Some((format!("{} bitmaps", bitmaps.count), format!("1 to {BITMAPS_MAX}")));
    }
    let (offset, bytes) = (bitmaps.directory_offset.0, bitmaps.directory_bytes);
    if bytes < u64::from(bitmaps.count) * FIXED_BYTES as u64
        || bytes > most
        || offset == 0
        || !is_aligned(offset, cluster_bytes)
        || offset.checked_add(bytes).is_none_or(|end| end > len)
    {
        return Some((
            format!("a directory of {bytes} bytes at {offset:#x}"),
            format!("one of at most {most} bytes at a cluster boundary within the file"),
        ));
    }
    None
}

/// What is wrong with the table, the flags or the extra data that a directory entry names, for a
/// disk of `guest_bytes` bytes in a file that ends at `end`, the end of a cluster.
pub(crate) fn entry_fault(
    entry: &BitmapDirectoryEntry,
    geometry: &Geometry,
    guest_bytes: u64,
    end: u64,
) -> Option<String> {
    let cluster = geometry.cluster_bytes();
    let (offset, flags) = (entry.bitmap_table_offset.get(), entry.flags.get());
    let entries = u64::from(entry.bitmap_table_size);
    if entries == 0 || entries * cluster > BITMAP_BYTES_MAX {
        return Some(format!("a table of {entries} entries"));
    }
    if offset == 0
        || !is_aligned(offset, cluster)
        || offset.checked_add(entries * 8).is_none_or(|table_end| table_end > end)
    {
        return Some(format!("a table at {offset:#x}"));
    }
    if flags & !FLAGS_KNOWN != 0 {
        return Some(format!("flags {flags:#x}"));
    }
    if entry.extra_data_size.get() != 0 && flags & flag::EXTRA_DATA_COMPATIBLE == 0 {
        return Some("extra data that only newer software knows".to_owned());
    }
    let needed = table_entries_for(guest_bytes.div_ceil(1 << entry.granularity_bits), cluster);
    if flags & flag::IN_USE == 0 && entries != needed {
        return Some(format!("a table of {entries} entries where the disk needs {needed}"));
    }
    None
}

/// Whether a bitmap table may have this entry: none, all bits set, or a cluster before `end`.
pub(crate) fn is_table_entry(word: u64, cluster_bytes: u64, end: u64) -> bool {
    let host = word & OFFSET_MASK;
    word == ALL_ONES || (word == host && is_aligned(host, cluster_bytes) && host < end)
}

/// The on-disk directory of these bitmaps.
pub(crate) fn encode<'a>(bitmaps: impl Iterator<Item = &'a Bitmap>) -> Vec<u8> {
    let mut out = Vec::new();
    bitmaps.for_each(|bitmap| bitmap.encode(&mut out));
    out
}

/// Bitmaps of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bitmaps {
    /// The image has none.
    None,
    /// Software without bitmap support wrote to the image: it has this many, all out of date.
    Stale(u32),
    /// They agree with the data.
    Valid(Vec<Bitmap>),
}

impl Bitmaps {
    /// Reads the directory in one read, or not at all if there are no valid bitmaps.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the extension or an entry violates the specification.
    pub fn read(storage: &dyn Storage, header: &Header, limits: &Limits) -> Result<Self> {
        let Some(raw) = header.extension(extension::BITMAPS) else { return Ok(Self::None) };
        let Some(bitmaps) = header.bitmaps() else {
            return Err(Error::corrupt(
                storage.name(),
                raw.offset,
                "bitmaps header extension",
                format!("{} bytes", raw.data.len()),
                "24",
            ));
        };
        if header.autoclear & autoclear::BITMAPS == 0 {
            return Ok(Self::Stale(bitmaps.count));
        }
        let most = DIRECTORY_BYTES_MAX.min(limits.table_bytes_max);
        let cluster = header.geometry.cluster_bytes();
        if let Some((found, expected)) = extension_fault(&bitmaps, cluster, storage.len()?, most) {
            let (file, structure) = (storage.name(), "bitmaps header extension");
            return Err(Error::corrupt(file, raw.offset, structure, found, expected));
        }
        let mut directory = vec![0; bitmaps.directory_bytes as usize];
        storage.read_at(&mut directory, bitmaps.directory_offset)?;
        parse(&directory, bitmaps.count).map(Self::Valid).map_err(|(at, found, expected)| {
            Error::corrupt(
                storage.name(),
                bitmaps.directory_offset.0 + at as u64,
                "bitmap directory entry",
                found,
                expected,
            )
        })
    }
}

/// The entries, or a fault: its offset, what was found and what was expected.
fn parse(directory: &[u8], count: u32) -> Result<Vec<Bitmap>, (usize, String, String)> {
    let mut bitmaps = Vec::with_capacity((directory.len() / FIXED_BYTES).min(count as usize));
    let mut at = 0;
    for index in 0..count {
        let fault = |found: String, expected: &str| Err((at, found, expected.to_owned()));
        let ended = "an end within the directory";
        let entry = directory.get(at..).map(BitmapDirectoryEntry::ref_from_prefix);
        let Some(Ok((entry, rest))) = entry else {
            return fault(format!("entry {index} of {count} passing the end"), ended);
        };
        let name_bytes = usize::from(entry.name_size);
        let extra_bytes = entry.extra_data_size.get() as usize;
        if entry.kind != TYPE_DIRTY {
            return fault(format!("bitmap type {}", entry.kind), "type 1 (dirty tracking)");
        }
        if !GRANULARITY_BITS.contains(&entry.granularity_bits) {
            return fault(format!("granularity_bits {}", entry.granularity_bits), "9 to 31");
        }
        if name_bytes == 0 || name_bytes > NAME_BYTES_MAX {
            return fault(format!("a name of {name_bytes} bytes"), "1 to 1023");
        }
        let Some(rest) = rest.get(..entry.variable_bytes()) else {
            return fault(
                format!("{extra_bytes} bytes of extra data and a name of {name_bytes}"),
                ended,
            );
        };
        let (extra, name) = rest.split_at(extra_bytes);
        bitmaps.push(Bitmap {
            table_offset: HostOffset(entry.bitmap_table_offset.get()),
            table_entries: entry.bitmap_table_size.get(),
            flags: entry.flags.get(),
            granularity_bits: entry.granularity_bits,
            name: name.to_vec(),
            extra: extra.to_vec(),
        });
        at += entry.bytes();
    }
    if at < directory.len() {
        return Err((
            at,
            format!("{} bytes behind the last entry", directory.len() - at),
            "nothing".to_owned(),
        ));
    }
    Ok(bitmaps)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &[u8], extra: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; FIXED_BYTES];
        bytes[5] = 1; // table offset 0x10000
        bytes[11] = 2; // table entries
        bytes[15] = 2; // auto
        bytes[16] = TYPE_DIRTY;
        bytes[17] = 16;
        bytes[18..20].copy_from_slice(&(name.len() as u16).to_be_bytes());
        bytes[20..24].copy_from_slice(&(extra.len() as u32).to_be_bytes());
        bytes.extend_from_slice(extra);
        bytes.extend_from_slice(name);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }

    #[test]
    fn entries_follow_each_other_at_multiples_of_eight() {
        let mut directory = entry(b"first", b"extra");
        directory.extend(entry(b"b", b""));
        let bitmaps = parse(&directory, 2).unwrap();
        assert_eq!(bitmaps[0].name, b"first");
        assert_eq!(bitmaps[0].extra, b"extra");
        assert_eq!(bitmaps[0].table_offset, HostOffset(0x10000));
        assert_eq!(bitmaps[0].table_entries, 2);
        assert_eq!(bitmaps[1].name, b"b");
        assert_eq!(encode(bitmaps.iter()), directory);
        let info = bitmaps[1].info();
        assert_eq!((info.granularity, info.enabled, info.in_use), (65536, true, false));
        // One too few, one too many.
        assert_eq!(parse(&directory, 1).unwrap_err().0, 40);
        assert_eq!(parse(&directory, 3).unwrap_err().0, directory.len());
    }

    #[test]
    fn damaged_entries_say_what_is_wrong() {
        for (at, value, wanted) in [
            (16, 0, "type 0"),
            (16, 2, "type 2"),
            (17, 8, "granularity_bits 8"),
            (17, 32, "granularity_bits 32"),
            (18, 4, "a name of 1025"),
            (19, 0, "a name of 0"),
            (19, 9, "a name of 9"),
            (20, 0xff, "bytes of extra data"),
        ] {
            let mut directory = entry(b"n", b"");
            directory[at] = value;
            let (offset, found, _) = parse(&directory, 1).unwrap_err();
            assert_eq!(offset, 0);
            assert!(found.contains(wanted), "{found}");
        }
    }
}
