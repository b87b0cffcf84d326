//! `qemu-img map`: where the bytes of the disk are.

use vdkit::jobs::{self, MapRow};
use vdkit::{Disk, GuestOffset, Layer, Place};

use super::{
    Command, FORCE_SHARE, FORMAT, IMAGE_OPTS, OBJECT, OUTPUT, Output, one_image, opening,
    wants_json,
};
use crate::failure::{Failure, could_not_open};
use crate::getopt::{Parsed, valued};
use crate::names::{self, Image};
use crate::open::open;
use crate::{sizes, storages};

pub const COMMAND: Command = Command {
    name: "map",
    about: "Show where the bytes of the disk are",
    operands: "FILE",
    options: &[
        FORMAT,
        IMAGE_OPTS,
        valued('s', "start-offset", "OFFSET", "begin at this byte of the disk"),
        valued('l', "max-length", "LENGTH", "show this many bytes"),
        OUTPUT,
        FORCE_SHARE,
        OBJECT,
    ],
    run,
};

/// Formats of which `qemu-img` says only that all is data at a place that it does not know.
const WITHOUT_MAP: &[&str] = &["vhdx", "luks", "dmg", "bochs", "cloop"];

fn as_json(row: &MapRow<'_>) -> String {
    let offset = row.offset.map_or_else(String::new, |at| format!(", \"offset\": {at}"));
    format!(
        "{{ \"start\": {}, \"length\": {}, \"depth\": {}, \"present\": {}, \"zero\": {}, \"data\": {}, \
         \"compressed\": {}{offset}}}",
        row.start, row.length, row.depth, row.present, row.zero, row.data, row.compressed
    )
}

fn as_text(row: &MapRow<'_>) -> String {
    let [start, length, offset] = [row.start, row.length, row.offset.unwrap_or(0)].map(hexadecimal);
    format!("{start:<16}{length:<16}{offset:<16}{}\n", row.filename.unwrap_or_default())
}

/// A number as C's `%#x` prints it: zero has no prefix.
fn hexadecimal(value: u64) -> String {
    if value == 0 { "0".to_owned() } else { format!("{value:#x}") }
}

fn run(parsed: &Parsed, out: &mut Output) -> Result<u8, Failure> {
    let json = wants_json(parsed)?;
    let size =
        |key: &str, what: &str| parsed.last(key).map(|text| sizes::size(what, text)).transpose();
    let (start, length) =
        (size("start-offset", "start offset")?, size("max-length", "max length")?);
    let file = one_image(parsed)?;
    let (objects, image) = opening::image(parsed, file)?;
    let disk = open(&image, opening::access(parsed, file, false)?, &objects)?;
    if !json {
        out.line("Offset          Length          Mapped to       File");
    }
    let start = start.unwrap_or(0);
    let end = length.map_or(u64::MAX, |length| start.saturating_add(length));
    let end = end.min(disk.guest_bytes());
    let mut begun = false;
    let mut print = |row: &MapRow<'_>| -> Result<(), Failure> {
        if json {
            out.text(if begun { ",\n" } else { "[" });
            out.text(as_json(row));
        } else if row.data && (row.offset.is_none() || row.filename.is_none()) {
            return Err(Failure::new("File contains external, encrypted or compressed clusters."));
        } else if row.data && !row.zero {
            out.text(as_text(row));
        }
        begun = true;
        Ok(())
    };
    if start >= end || matches!(image.place, names::Place::Null(_)) {
        let mut row = MapRow::default();
        (row.start, row.length) = (start, end.saturating_sub(start));
        if start < end && image.reads_zeroes {
            (row.present, row.zero, row.offset) = (true, true, Some(start));
        }
        print(&row)?;
    } else {
        let starts = starts_in_files(&disk)?;
        each_row(&disk, start, end - start, &mut |mut row| {
            let layer = &disk.layers()[row.depth];
            // A data file has no such part.
            if row.filename.is_none_or(|file| file == layer.format().storage().name()) {
                row.offset = row.offset.map(|offset| offset + starts[row.depth]);
            }
            print(&row)
        })?;
    }
    if json {
        out.line("]");
    }
    Ok(0)
}

/// Where each image begins in its file: after the offset of the part of the file that it is.
fn starts_in_files(disk: &Disk) -> Result<Vec<u64>, Failure> {
    let start = |layer: &Layer| match layer.path().to_str().and_then(storages::noted) {
        // Offsets would be those of the disk beneath, not of its file.
        Some(Image { place: names::Place::Disk(_), typed, .. }) => {
            Err(could_not_open(&typed, "vdkit maps no disk of a format on another format"))
        }
        named => Ok(named.and_then(|image| image.window).map_or(0, |(offset, _)| offset)),
    };
    disk.layers().iter().map(start).collect()
}

/// Calls `take` with the rows that QEMU makes of `length` bytes of a disk.
pub fn each_row<'d>(
    disk: &'d Disk,
    start: u64,
    length: u64,
    take: &mut dyn FnMut(MapRow<'d>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let recursing: Vec<bool> = disk.layers().iter().map(looks_for_holes).collect();
    let mut last: Option<MapRow<'d>> = None;
    let mut join = |row: MapRow<'d>| {
        if let Some(joined) = last.as_ref().and_then(|before| before.joined(&row)) {
            last = Some(joined);
            return Ok(());
        }
        last.replace(row).map_or(Ok(()), &mut *take)
    };
    for row in jobs::map(disk, start, length)? {
        each_part(disk, &recursing, row?, &mut join)?;
    }
    last.map_or(Ok(()), take)
}

/// Calls `take` with the rows that QEMU makes of a row of the engine.
fn each_part<'d>(
    disk: &'d Disk,
    recursing: &[bool],
    mut row: MapRow<'d>,
    take: &mut dyn FnMut(MapRow<'d>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let format = disk.layers()[row.depth].format();
    let (beneath, end) = (format.guest_bytes(), row.end());
    if row.depth > 0 && end > beneath {
        // Beyond the end of a short backing image, the overlay reads as zero.
        let mut beyond = MapRow::default();
        beyond.start = row.start.max(beneath);
        beyond.length = end - beyond.start;
        beyond.depth = row.depth - 1;
        beyond.zero = true;
        row.length -= beyond.length;
        if row.length > 0 {
            within_layer(disk, recursing, row, take)?;
        }
        return take(beyond);
    }
    if format.encryption().is_some() && row.data {
        row.offset = None;
    }
    within_layer(disk, recursing, row, take)
}

/// Calls `take` with the rows that QEMU makes of a row that lies within its layer.
fn within_layer<'d>(
    disk: &'d Disk,
    recursing: &[bool],
    mut row: MapRow<'d>,
    take: &mut dyn FnMut(MapRow<'d>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    match disk.layers()[row.depth].format().name() {
        name if WITHOUT_MAP.contains(&name) => {
            (row.present, row.data) = (true, true);
            (row.zero, row.compressed) = (false, false);
            (row.offset, row.filename) = (None, None);
            return take(row);
        }
        "raw" => row.offset = Some(row.start),
        // Blocks that are not allocated are zeroes of the image itself.
        "vdi" | "vpc" => row.present = true,
        _ => {}
    }
    if !recursing[row.depth] || row.compressed || (!row.data && !row.present) {
        return take(row);
    }
    split(disk, &row, take)
}

/// Whether QEMU asks the file beneath for holes where this image says that there is data: if all of
/// its clusters are allocated from the start.
fn looks_for_holes(layer: &Layer) -> bool {
    let info = layer.info();
    match layer.format().name() {
        "vdi" => info.property("image-type") == Some("static"),
        "vpc" => info.property("subformat") == Some("fixed"),
        "vmdk" => info.extents.iter().any(|extent| extent.kind == "FLAT"),
        "qcow2" => !info.files.is_empty() || preallocated(layer).unwrap_or(false),
        _ => false,
    }
}

/// Whether a qcow2 image has far fewer bytes in its file than clusters.
fn preallocated(layer: &Layer) -> vdkit::Result<bool> {
    let (storage, cluster) = (layer.format().storage(), layer.format().caps().cluster_bytes);
    let there = storage.allocated_bytes()? / cluster;
    let needed = (there * 10 / 9).max(there + 2);
    Ok(storage.len()? / cluster >= needed)
}

/// Splits data at the holes of its file.
fn split<'d>(
    disk: &'d Disk,
    whole: &MapRow<'d>,
    take: &mut dyn FnMut(MapRow<'d>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let format = disk.layers()[whole.depth].format();
    let (mut at, end) = (whole.start, whole.end());
    while at < end {
        let found = format.resolve_for_io(GuestOffset(at), end - at)?;
        let mut row = whole.clone();
        (row.start, row.length) = (at, found.len.clamp(1, end - at));
        if let Place::Data { file, offset, .. } = found.place {
            let storage = format.file(file);
            let extent = storage.extent_at(offset, row.length)?;
            row.length = extent.len.clamp(1, row.length);
            (row.zero, row.data, row.offset) = (!extent.data, true, Some(offset.0));
            row.filename = Some(storage.name());
        }
        at = row.end();
        take(row)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_printed_in_both_forms() {
        let mut row = MapRow::default();
        (row.length, row.offset) = (0x20000, Some(0x50000));
        (row.present, row.data) = (true, true);
        row.filename = Some("a.qcow2");
        assert_eq!(as_text(&row), "0               0x20000         0x50000         a.qcow2\n");
        assert_eq!(
            as_json(&row),
            "{ \"start\": 0, \"length\": 131072, \"depth\": 0, \"present\": true, \"zero\": false, \"data\": \
             true, \"compressed\": false, \"offset\": 327680}"
        );
    }
}
