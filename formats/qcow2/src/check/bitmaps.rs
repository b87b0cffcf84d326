//! Persistent bitmaps: locates their directory, tables and clusters.
//!
//! A broken bitmap loses no guest data, only the record of changes. So a repair drops a bitmap
//! whose table is damaged. If the directory itself is damaged, or bitmaps share clusters with
//! something else, it clears the autoclear bit, which invalidates all bitmaps.
//!
//! Source: qcow2 specification, sections "Bitmaps extension" and "Bitmaps".

use vdkit_block::Result;
use zerocopy::FromBytes;

use super::image::Image;
use crate::bitmaps::{
    DIRECTORY_BYTES_MAX, GRANULARITY_BITS, NAME_BYTES_MAX, TYPE_DIRTY, entry_fault,
    extension_fault, is_table_entry,
};
use crate::header::BitmapsExtension;
use crate::layout::{OFFSET_MASK, autoclear, extension};
use crate::structures::{BitmapDirectoryEntry, BitmapsExtensionData, words};

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
    if data.reserved.get() != 0 {
        return broken("found bits in the reserved field, expected zero".to_owned());
    }
    let (cluster, len) = (image.cluster_bytes(), image.file_len);
    match extension_fault(&bitmaps, cluster, len, DIRECTORY_BYTES_MAX) {
        Some((found, expected)) => broken(format!("found {found}, expected {expected}")),
        None => Presence::Valid(bitmaps),
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
    let directory = image.read_table(offset, bitmaps.directory_bytes)?;
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
        match fault_of(image, entry) {
            Some(message) => found.broken.push((at, fault(&message))),
            None => match walk_table(image, entry, &mut take)? {
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

/// The damage of an entry by itself.
fn fault_of(image: &Image, entry: &BitmapDirectoryEntry) -> Option<String> {
    let name_bytes = usize::from(entry.name_size);
    if entry.kind != TYPE_DIRTY || !GRANULARITY_BITS.contains(&entry.granularity_bits) {
        return Some("found an unknown type or granularity".to_owned());
    }
    if name_bytes == 0 || name_bytes > NAME_BYTES_MAX {
        return Some("found a name that is empty or too long".to_owned());
    }
    let end = image.file_clusters() * image.cluster_bytes();
    let fault = entry_fault(entry, image.geometry(), image.header.guest_bytes, end)?;
    Some(format!("found {fault}"))
}

enum Walked {
    On,
    Stopped,
    Fault(BitmapFault),
}

fn walk_table(
    image: &Image,
    entry: &BitmapDirectoryEntry,
    take: &mut impl FnMut(Taken) -> bool,
) -> Result<Walked> {
    let offset = entry.bitmap_table_offset.get();
    let bytes = u64::from(entry.bitmap_table_size) * 8;
    if !take(("bitmap table", offset, bytes)) {
        return Ok(Walked::Stopped);
    }
    let cluster = image.cluster_bytes();
    for (i, word) in words(&image.read_table(offset, bytes)?).iter().enumerate() {
        let entry = word.get();
        let host = entry & OFFSET_MASK;
        if !is_table_entry(entry, cluster, image.file_len) {
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
