//! Persistent bitmaps: locates their directory, tables and clusters.
//!
//! A broken bitmap loses no guest data, only the record of changes. So a repair drops a bitmap
//! whose table is damaged. If the directory itself is damaged, or bitmaps share clusters with
//! something else, it clears the autoclear bit, which invalidates all bitmaps.
//!
//! Source: qcow2 specification, sections "Bitmaps extension" and "Bitmaps".

use vdkit_block::{HostOffset, Result};
use zerocopy::FromBytes;

use super::image::Image;
use crate::bitmaps::{
    ALL_ONES, BITMAP_BYTES_MAX, BITMAPS_MAX, DIRECTORY_BYTES_MAX, GRANULARITY_BITS, NAME_BYTES_MAX,
    TABLE_ENTRIES_MAX, TYPE_DIRTY, flag, table_entries_for,
};
use crate::header::BitmapsExtension;
use crate::layout::{OFFSET_MASK, autoclear, extension};
use crate::structures::{BitmapDirectoryEntry, BitmapsExtensionData, words};

/// Flags of a directory entry that must be zero.
const RESERVED_FLAGS: u32 = !(flag::IN_USE | flag::AUTO);
/// Bits of a table entry that must be zero.
const TABLE_RESERVED: u64 = !(OFFSET_MASK | ALL_ONES);

/// A structure of the bitmaps: name, host offset, bytes.
pub(super) type Taken = (&'static str, u64, u64);

/// Damage: host offset, structure, message.
pub(super) type BitmapFault = (u64, &'static str, String);

/// Bitmaps according to the header.
pub(super) enum Presence {
    None,
    /// A program without bitmap support has written to the image; the bitmaps are invalid.
    Stale,
    /// The bit is set without an extension.
    Missing,
    Valid(BitmapsExtension),
    /// The extension itself is damaged.
    Broken(BitmapFault),
}

/// Reads the state of bitmaps from the header.
pub(super) fn presence(image: &Image) -> Presence {
    let header = &image.header;
    let valid = header.autoclear & autoclear::BITMAPS != 0;
    let Some(raw) = header.extension(extension::BITMAPS) else {
        return if valid { Presence::Missing } else { Presence::None };
    };
    if !valid {
        return Presence::Stale;
    }
    let broken =
        |message: String| Presence::Broken((raw.offset, "bitmaps header extension", message));
    let (Some(bitmaps), Ok(data)) =
        (header.bitmaps(), BitmapsExtensionData::ref_from_bytes(&raw.data))
    else {
        return broken(format!("found {} bytes, expected 24", raw.data.len()));
    };
    let offset = bitmaps.directory_offset.0;
    if bitmaps.count == 0 || bitmaps.count > BITMAPS_MAX {
        broken(format!("found {} bitmaps, expected 1 to {BITMAPS_MAX}", bitmaps.count))
    } else if data.reserved.get() != 0 {
        broken("found bits in the reserved field, expected zero".to_owned())
    } else if bitmaps.directory_bytes == 0
        || bitmaps.directory_bytes > DIRECTORY_BYTES_MAX
        || offset == 0
        || offset & (image.cluster_bytes() - 1) != 0
        || !image.in_file(offset, bitmaps.directory_bytes)
    {
        broken(format!(
            "found a directory of {} bytes at {offset:#x}, expected one of at most \
             {DIRECTORY_BYTES_MAX} bytes at a cluster boundary within the file",
            bitmaps.directory_bytes
        ))
    } else {
        Presence::Valid(bitmaps)
    }
}

#[derive(Debug, Default)]
pub(super) struct WalkedBitmaps {
    /// Damage of the directory: its content is unknown.
    pub(super) directory: Option<BitmapFault>,
    /// Single damaged bitmaps: offsets of their entries in the directory.
    pub(super) broken: Vec<(usize, BitmapFault)>,
}

/// Calls `take` for everything that the bitmaps occupy, until it returns `false` (an overlap) or
/// the directory is damaged.
pub(super) fn walk(
    image: &Image,
    bitmaps: &BitmapsExtension,
    mut take: impl FnMut(Taken) -> bool,
) -> Result<WalkedBitmaps> {
    let mut found = WalkedBitmaps::default();
    let offset = bitmaps.directory_offset.0;
    if !take(("bitmap directory", offset, bitmaps.directory_bytes)) {
        return Ok(found);
    }
    let directory = super::reader::read_table(&*image.storage, offset, bitmaps.directory_bytes)?;
    let mut at = 0;
    let mut count = 0;
    while at < directory.len() {
        let fault = |message: &str| (offset + at as u64, "bitmap directory entry", message.into());
        let Ok((entry, _)) = BitmapDirectoryEntry::ref_from_prefix(&directory[at..]) else {
            found.directory = Some(fault("found the end of the directory within an entry"));
            return Ok(found);
        };
        count += 1;
        let bytes = entry.bytes();
        if count > bitmaps.count || bytes > directory.len() - at {
            let message = "found more entries or bytes than the header extension says";
            found.directory = Some(fault(message));
            return Ok(found);
        }
        match parse_entry(image, entry) {
            Err(message) => found.broken.push((at, fault(message))),
            Ok(table) => match walk_table(image, table, &mut take)? {
                Walked::On => {}
                Walked::Stopped => return Ok(found),
                Walked::Fault(fault) => found.broken.push((at, fault)),
            },
        }
        at += bytes;
    }
    if count != bitmaps.count {
        let message = format!("found {count} bitmaps, expected {}", bitmaps.count);
        found.directory = Some((offset, "bitmap directory", message));
    }
    Ok(found)
}

/// A directory without the entries that begin at `broken`, and how many entries are left.
pub(super) fn without(directory: &[u8], broken: &[usize]) -> (Vec<u8>, u32) {
    let (mut kept, mut count, mut at) = (Vec::new(), 0, 0);
    while let Ok((entry, _)) = BitmapDirectoryEntry::ref_from_prefix(&directory[at..]) {
        let end = (at + entry.bytes()).min(directory.len());
        if !broken.contains(&at) {
            kept.extend_from_slice(&directory[at..end]);
            count += 1;
        }
        at = end;
    }
    (kept, count)
}

/// The table of a bitmap: offset and number of entries.
fn parse_entry(image: &Image, entry: &BitmapDirectoryEntry) -> Result<(u64, u64), &'static str> {
    let (name_bytes, flags) = (usize::from(entry.name_size), entry.flags.get());
    let table_offset = entry.bitmap_table_offset.get();
    let table_entries = u64::from(entry.bitmap_table_size);
    let cluster = image.cluster_bytes();
    if table_entries == 0 || table_entries > TABLE_ENTRIES_MAX {
        return Err("found a bitmap table without or with too many entries");
    }
    if table_offset == 0
        || table_offset & (cluster - 1) != 0
        || !image.in_file(table_offset, table_entries * 8)
    {
        return Err("found a bitmap table that is not at a cluster boundary within the file");
    }
    if entry.kind != TYPE_DIRTY
        || !GRANULARITY_BITS.contains(&entry.granularity_bits)
        || flags & RESERVED_FLAGS != 0
    {
        return Err("found an unknown type, granularity or flag");
    }
    if entry.extra_data_size.get() != 0 || name_bytes == 0 || name_bytes > NAME_BYTES_MAX {
        return Err("found extra data or a name that is empty or too long");
    }
    let bits = image.header.guest_bytes.div_ceil(1 << entry.granularity_bits);
    let needed = table_entries_for(bits, cluster);
    if table_entries * cluster > BITMAP_BYTES_MAX
        || (flags & flag::IN_USE == 0 && needed != table_entries)
    {
        return Err("found a bitmap of another size than the disk needs");
    }
    Ok((table_offset, table_entries))
}

enum Walked {
    On,
    Stopped,
    Fault(BitmapFault),
}

fn walk_table(
    image: &Image,
    (offset, entries): (u64, u64),
    take: &mut impl FnMut(Taken) -> bool,
) -> Result<Walked> {
    if !take(("bitmap table", offset, entries * 8)) {
        return Ok(Walked::Stopped);
    }
    let mut table = vec![0; (entries * 8) as usize];
    image.storage.read_padded(&mut table, HostOffset(offset))?;
    let cluster = image.cluster_bytes();
    for (i, word) in words(&table).iter().enumerate() {
        let entry = word.get();
        let host = entry & OFFSET_MASK;
        if entry & TABLE_RESERVED != 0
            || host & (cluster - 1) != 0
            || (host != 0 && (entry & 1 != 0 || !image.in_file(host, cluster)))
        {
            return Ok(Walked::Fault((
                offset + i as u64 * 8,
                "bitmap table entry",
                format!("found {entry:#x}, expected a cluster within the file, 0 or 1"),
            )));
        }
        if host != 0 && !take(("bitmap data", host, cluster)) {
            return Ok(Walked::Stopped);
        }
    }
    Ok(Walked::On)
}
