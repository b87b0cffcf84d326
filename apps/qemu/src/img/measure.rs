//! `qemu-img measure`: the bytes that a converted or new image needs.

use vdkit::{BitmapInfo, Disk, Error, Measured, Options};

use super::convert::snapshot_option;
use super::map::each_row;
use super::{
    Command, FORCE_SHARE, FORMAT, IMAGE_OPTS, OBJECT, OUTPUT, Output, opening, wants_json,
};
use crate::creation::{Asked, Wanted, asked, table};
use crate::failure::Failure;
use crate::getopt::{Parsed, long, valued};
use crate::json::{Dict, pretty};
use crate::open::{open_options, open_with};
use crate::secrets::Objects;
use crate::sizes;

pub const COMMAND: Command = Command {
    name: "measure",
    about: "Compute the size of a new image",
    operands: "(--size SIZE | FILE)",
    options: &[
        valued('O', "target-format", "FMT", "format of the new image (raw)"),
        valued('o', "options", "OPTIONS", "options of the new image"),
        FORMAT,
        IMAGE_OPTS,
        valued('l', "snapshot", "SNAPSHOT", "the new image holds this snapshot of FILE"),
        OBJECT,
        OUTPUT,
        // QEMU's help shows `-s` too, which its program does not take.
        long("size", Some("SIZE"), "the new image is an empty disk of this size"),
        FORCE_SHARE,
    ],
    run,
};

fn run(parsed: &Parsed, out: &mut Output) -> Result<u8, Failure> {
    let json = wants_json(parsed)?;
    let size = parsed.last("size").map(|text| sizes::size("image size", text)).transpose()?;
    let of_file = ["image-opts", "format", "snapshot"].iter().any(|option| parsed.has(option));
    let file = match &parsed.operands[..] {
        [] if of_file => {
            return Err(Failure::new("--image-opts, -f, and -l require a filename argument."));
        }
        [] => None,
        [name] => Some(name.as_str()),
        [_, ..] => return Err(Failure::new("At most one filename argument is allowed.")),
    };
    match (file, size) {
        (None, None) => {
            return Err(Failure::new("Either --size N or one filename must be specified."));
        }
        (Some(_), Some(_)) => {
            return Err(Failure::new("--size N cannot be used together with a filename."));
        }
        _ => {}
    }
    let objects = Objects::of(parsed)?;
    let (disk, bitmaps) = match file {
        Some(file) => source(parsed, file).map(|(disk, bitmaps)| (Some(disk), bitmaps))?,
        None => (None, Vec::new()),
    };
    let wanted = wanted(parsed)?;
    let (format, bytes) = (wanted.table.format, size.unwrap_or_else(|| guest_bytes(&disk)));
    if !matches!(format, "raw" | "qcow2" | "luks") {
        return Err(Failure::new(format!(
            "Block driver '{format}' does not support size measurement"
        )));
    }
    let options = wanted.options(&objects, bytes)?;
    let is_version_2 = matches!(wanted.get("compat"), Some("0.10" | "v2"));
    let (measured, cluster_bytes) = measure(disk.as_ref(), &wanted, bytes, &options)?;
    let bitmaps = disk
        .as_ref()
        .filter(|disk| format == "qcow2" && keeps_bitmaps(disk) && !is_version_2)
        .map(|_| bitmap_bytes(&bitmaps, bytes, cluster_bytes));
    if json {
        let dict = Dict::default()
            .with("required", measured.required)
            .with("fully-allocated", measured.fully_allocated)
            .with_some("bitmaps", bitmaps);
        out.line(pretty(&dict.into()));
        return Ok(0);
    }
    out.line(format!("required size: {}", measured.required));
    out.line(format!("fully allocated size: {}", measured.fully_allocated));
    if let Some(bytes) = bitmaps {
        out.line(format!("bitmaps size: {bytes}"));
    }
    Ok(0)
}

/// The options of the new image. Sizes and backing images among them change nothing.
fn wanted(parsed: &Parsed) -> Result<Wanted, Failure> {
    let format = parsed.last("target-format").unwrap_or("raw");
    if crate::open::driver(format).is_none() && !crate::open::is_protocol(format) {
        return Err(Failure::new(format!("Unknown file format '{format}'")));
    }
    let values = match asked(parsed.all("options"))? {
        Asked::Values(values) => values,
        Asked::Help => vec![("help".to_owned(), "on".to_owned())],
    };
    Wanted::new(table(format)?, values).map_err(|failure| {
        Failure::new(format!(
            "{}\nqemu-img: Invalid options for file format '{format}'",
            failure.text
        ))
    })
}

fn guest_bytes(disk: &Option<Disk>) -> u64 {
    disk.as_ref().map_or(0, Disk::guest_bytes)
}

/// The sizes, and the bytes of a cluster.
fn measure(
    disk: Option<&Disk>,
    wanted: &Wanted,
    bytes: u64,
    options: &Options,
) -> Result<(Measured, u64), Failure> {
    let whole = bytes.next_multiple_of(512);
    if wanted.table.format == "raw" {
        return Ok((Measured { required: whole, fully_allocated: whole }, 1));
    }
    let creation = wanted.table.driver()?.require_creation("a new image")?;
    let too_large = |error: Error| match error {
        Error::Invalid { .. } | Error::Limit { .. } => {
            Failure::new("The image size is too large (try using a larger cluster size)")
        }
        other => other.into(),
    };
    let cluster_bytes = creation.cluster_bytes(options).map_err(too_large)?.max(1);
    let data_clusters = match disk {
        None => 0,
        Some(_) if wanted.get("backing_file").is_some() => whole.div_ceil(cluster_bytes),
        Some(disk) => data_clusters(disk, cluster_bytes)?,
    };
    let measured = creation.measure(whole, options, data_clusters).map_err(too_large)?;
    Ok((measured, cluster_bytes))
}

/// Clusters of the new image with bytes that are not known to be zero.
fn data_clusters(disk: &Disk, cluster_bytes: u64) -> Result<u64, Failure> {
    // The first cluster that is not counted yet.
    let (mut clusters, mut uncounted) = (0, 0);
    each_row(disk, 0, disk.guest_bytes(), &mut |row| {
        if row.data && !row.zero {
            let end = row.end().div_ceil(cluster_bytes);
            clusters += end.saturating_sub((row.start / cluster_bytes).max(uncounted));
            uncounted = uncounted.max(end);
        }
        Ok(())
    })?;
    Ok(clusters)
}

/// The image that would be converted, or its snapshot, and the bitmaps of the image.
fn source(parsed: &Parsed, file: &str) -> Result<(Disk, Vec<BitmapInfo>), Failure> {
    let snapshot = snapshot_option(parsed, "snapshot")?;
    let (objects, image) = opening::image(parsed, file)?;
    let access = opening::access(parsed, file, false)?;
    let mut options = open_options(&image, access, &objects)?;
    let disk = open_with(&image, &options)?;
    let info = disk.layers()[0].info().clone();
    let Some(snapshot) = snapshot else { return Ok((disk, info.bitmaps)) };
    let id = snapshot.find(&info.snapshots)?;
    drop(disk);
    options.snapshot = Some(id);
    Ok((open_with(&image, &options)?, info.bitmaps))
}

/// Whether the format of the image keeps bitmaps.
fn keeps_bitmaps(disk: &Disk) -> bool {
    disk.layers()[0].info().property("compat") == Some("1.1")
}

/// Bytes that bitmaps take in an image with clusters of this size.
fn bitmap_bytes(bitmaps: &[BitmapInfo], guest_bytes: u64, cluster: u64) -> u64 {
    /// Bytes of a directory entry without its name.
    const ENTRY_BYTES: u64 = 24;
    let (mut total, mut directory) = (0, 0);
    for bitmap in bitmaps.iter().filter(|bitmap| !bitmap.in_use) {
        let bits = guest_bytes.div_ceil(bitmap.granularity);
        let clusters = bits.div_ceil(8).div_ceil(cluster);
        let table = (clusters * 8).next_multiple_of(cluster);
        total += clusters * cluster + table;
        directory += (ENTRY_BYTES + bitmap.name.len() as u64).next_multiple_of(8);
    }
    total + directory.next_multiple_of(cluster)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bitmaps_take_whole_clusters_for_bits_table_and_directory() {
        let bitmap =
            |in_use| BitmapInfo { name: "b0".into(), granularity: 65536, in_use, enabled: true };
        assert_eq!(bitmap_bytes(&[], 10 << 20, 65536), 0);
        assert_eq!(bitmap_bytes(&[bitmap(false)], 10 << 20, 65536), 196_608);
        assert_eq!(bitmap_bytes(&[bitmap(true)], 10 << 20, 65536), 0);
        assert_eq!(bitmap_bytes(&[bitmap(false), bitmap(false)], 10 << 20, 65536), 327_680);
    }
}
