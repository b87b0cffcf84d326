//! `qemu-img map`: where the bytes of the disk are.

use vdkit::jobs::{self, MapRow};
use vdkit::{Disk, GuestOffset, Layer, Place};

use super::{
    Call, Command, FORCE_SHARE, FORMAT, IMAGE_OPTS, OBJECT, OUTPUT, one_image, opening, wants_json,
};
use crate::failure::Failure;
use crate::getopt::{Parsed, valued};
use crate::names;
use crate::open::open;
use crate::sizes;

/// Entry in the table of subcommands.
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

/// A run of bytes of the disk, as it is printed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// Offset of the first byte in the disk.
    pub start: u64,
    /// Bytes.
    pub length: u64,
    /// The image of the chain that holds them; 0 is the top.
    pub depth: usize,
    /// The image holds them, perhaps as zeroes.
    pub present: bool,
    /// They are known to be zero.
    pub zero: bool,
    /// They are stored.
    pub data: bool,
    /// They are compressed.
    pub compressed: bool,
    /// Offset of the first byte in the file.
    pub offset: Option<u64>,
    /// The file; empty if it is not known.
    pub file: String,
}

impl Row {
    /// Offset of the end in the disk.
    pub fn end(&self) -> u64 {
        self.start + self.length
    }

    /// Takes `next` in, if it continues this row.
    fn absorb(&mut self, next: &Self) -> bool {
        let follows = match (self.offset, next.offset) {
            (Some(offset), Some(next)) => offset + self.length == next,
            (None, None) => true,
            _ => false,
        };
        let as_this =
            Self { start: self.start, length: self.length, offset: self.offset, ..next.clone() };
        let same = follows && as_this == *self;
        if same {
            self.length += next.length;
        }
        same
    }

    fn json(&self) -> String {
        let offset = self.offset.map_or_else(String::new, |at| format!(", \"offset\": {at}"));
        format!(
            "{{ \"start\": {}, \"length\": {}, \"depth\": {}, \"present\": {}, \"zero\": {}, \"data\": {}, \
             \"compressed\": {}{offset}}}",
            self.start,
            self.length,
            self.depth,
            self.present,
            self.zero,
            self.data,
            self.compressed
        )
    }

    fn text(&self) -> String {
        let [start, length, offset] =
            [self.start, self.length, self.offset.unwrap_or(0)].map(hexadecimal);
        format!("{start:<16}{length:<16}{offset:<16}{}\n", self.file)
    }
}

/// A number as C's `%#x` prints it: zero has no prefix.
fn hexadecimal(value: u64) -> String {
    if value == 0 { "0".to_owned() } else { format!("{value:#x}") }
}

fn run(parsed: &Parsed, call: &mut Call) -> Result<u8, Failure> {
    let json = wants_json(parsed)?;
    let size =
        |key: &str, what: &str| parsed.last(key).map(|text| sizes::option(what, text)).transpose();
    let (start, length) =
        (size("start-offset", "start offset")?, size("max-length", "max length")?);
    let file = one_image(parsed)?;
    let (objects, image) = opening::image(parsed, file)?;
    let disk = open(&image, opening::access(parsed, file, false)?, &objects)?;
    if !json {
        call.out.line("Offset          Length          Mapped to       File")?;
    }
    let start = start.unwrap_or(0);
    let end = length.map_or(u64::MAX, |length| start.saturating_add(length));
    let end = end.min(disk.guest_bytes());
    let mut begun = false;
    let mut print = |row: &Row| -> Result<(), Failure> {
        if json {
            call.out.text(if begun { ",\n" } else { "[" })?;
            call.out.text(row.json())?;
        } else if row.data && (row.offset.is_none() || row.file.is_empty()) {
            return Err(Failure::new("File contains external, encrypted or compressed clusters."));
        } else if row.data && !row.zero {
            call.out.text(row.text())?;
        }
        begun = true;
        Ok(())
    };
    if start >= end {
        print(&Row { start, ..Row::default() })?;
    } else if let names::Place::Null(_) = image.place {
        let zero = image.reads_zeroes;
        let (length, offset) = (end - start, zero.then_some(start));
        print(&Row { start, length, present: zero, zero, offset, ..Row::default() })?;
    } else {
        let window = image.window.map_or(0, |(offset, _)| offset);
        each_row(&disk, start, end - start, &mut |mut row| {
            if row.depth == 0 {
                row.offset = row.offset.map(|offset| offset + window);
            }
            print(&row)
        })?;
    }
    if json {
        call.out.line("]")?;
    }
    Ok(0)
}

/// Calls `take` with the rows that QEMU makes of `length` bytes of a disk.
///
/// # Errors
/// Errors of the maps, and those of `take`.
pub fn each_row(
    disk: &Disk,
    start: u64,
    length: u64,
    take: &mut dyn FnMut(Row) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let recursing: Vec<bool> = disk.layers().iter().map(looks_for_holes).collect();
    let mut last: Option<Row> = None;
    let mut join = |row: Row| {
        if last.as_mut().is_some_and(|before| before.absorb(&row)) {
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
fn each_part(
    disk: &Disk,
    recursing: &[bool],
    row: MapRow<'_>,
    take: &mut dyn FnMut(Row) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let format = disk.layers()[row.depth].format();
    let mut part = Row {
        start: row.start,
        length: row.length,
        depth: row.depth,
        present: row.present,
        zero: row.zero,
        data: row.data,
        compressed: row.compressed,
        offset: row.offset,
        file: row.filename.unwrap_or_default().to_owned(),
    };
    let beneath = format.guest_bytes();
    if row.depth > 0 && part.end() > beneath {
        // Beyond the end of a short backing image, the overlay reads as zero.
        let start = part.start.max(beneath);
        let beyond = Row {
            start,
            length: part.end() - start,
            depth: row.depth - 1,
            zero: true,
            ..Row::default()
        };
        if start > part.start {
            let length = start - part.start;
            within_layer(disk, recursing, Row { length, ..part }, take)?;
        }
        return take(beyond);
    }
    if format.encryption().is_some() && part.data {
        part.offset = None;
    }
    within_layer(disk, recursing, part, take)
}

/// Calls `take` with the rows that QEMU makes of a row that lies within its layer.
fn within_layer(
    disk: &Disk,
    recursing: &[bool],
    mut part: Row,
    take: &mut dyn FnMut(Row) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let format = disk.layers()[part.depth].format();
    match format.name() {
        name if WITHOUT_MAP.contains(&name) => {
            part = Row {
                present: true,
                data: true,
                start: part.start,
                length: part.length,
                depth: part.depth,
                ..Row::default()
            };
            return take(part);
        }
        "raw" => part.offset = Some(part.start),
        // Blocks that are not allocated are zeroes of the image itself.
        "vdi" | "vpc" | "vhd" => part.present = true,
        _ => {}
    }
    if !recursing[part.depth] || part.compressed || (!part.data && !part.present) {
        return take(part);
    }
    split(disk, part, take)
}

/// Whether QEMU asks the file beneath for holes where this image says that there is data: if all of
/// its clusters are allocated from the start.
fn looks_for_holes(layer: &Layer) -> bool {
    let info = layer.info();
    let property = |key: &str| {
        info.properties.iter().find(|(name, _)| name == key).map_or("", |(_, value)| value.as_str())
    };
    match layer.format().name() {
        "vdi" => property("image-type") == "static",
        "vpc" | "vhd" => property("subformat") == "fixed",
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
fn split(
    disk: &Disk,
    part: Row,
    take: &mut dyn FnMut(Row) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let format = disk.layers()[part.depth].format();
    let mut at = part.start;
    while at < part.end() {
        let found = format.resolve_for_io(GuestOffset(at), part.end() - at)?;
        let length = found.len.clamp(1, part.end() - at);
        let Place::Data { file, offset, .. } = found.place else {
            take(Row { start: at, length, ..part.clone() })?;
            at += length;
            continue;
        };
        let storage = format.file(file);
        let extent = storage.extent_at(offset, length)?;
        let length = extent.len.clamp(1, length);
        take(Row {
            start: at,
            length,
            offset: Some(offset.0),
            zero: !extent.data,
            data: true,
            file: storage.name().to_owned(),
            ..part.clone()
        })?;
        at += length;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_printed_in_both_forms() {
        let row = Row {
            length: 0x20000,
            present: true,
            data: true,
            offset: Some(0x50000),
            file: "a.qcow2".into(),
            ..Row::default()
        };
        assert_eq!(row.text(), "0               0x20000         0x50000         a.qcow2\n");
        assert_eq!(
            row.json(),
            "{ \"start\": 0, \"length\": 131072, \"depth\": 0, \"present\": true, \"zero\": false, \"data\": \
             true, \"compressed\": false, \"offset\": 327680}"
        );
    }

    #[test]
    fn rows_join_where_they_continue() {
        let row = |start, offset| Row { start, length: 10, offset, ..Row::default() };
        let joins = |mut a: Row, b: Row| a.absorb(&b);
        assert!(joins(row(0, Some(5)), row(10, Some(15))));
        assert!(!joins(row(0, Some(5)), row(10, Some(16))));
        assert!(joins(row(0, None), row(10, None)));
        assert!(!joins(row(0, None), Row { zero: true, ..row(10, None) }));
    }
}
