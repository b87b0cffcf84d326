//! How an image is laid out on its place: made with the command that a user would type.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use vdkit_block::{GuestOffset, RefPolicy};
use vdkit_chain::{Disk, OpenOptions};

use crate::cells::{Rng, shuffled};
use crate::engine::Bench;
use crate::peers::{self, skip};
use crate::process::Line;

/// A way to lay out an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Its name in plans.
    pub name: &'static str,
    /// What it is.
    pub about: &'static str,
    /// The image's format, as both vdkit and qemu-img call it.
    pub format: &'static str,
    /// Options of the format (`-o`), or nothing.
    pub options: &'static str,
    /// What is done beside.
    pub more: More,
}

/// What is done beside creating an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum More {
    /// Nothing.
    Nothing,
    /// It stands on another image, which holds what the disk holds.
    Backing,
    /// All of the disk is written in pieces of 64 KiB in random order.
    Fragmented,
    /// The same; then a third of the pieces is discarded, and written again in another order.
    Aged,
}

const fn layout(
    name: &'static str,
    about: &'static str,
    format: &'static str,
    options: &'static str,
) -> Layout {
    Layout { name, about, format, options, more: More::Nothing }
}

/// Every layout that plans may name.
pub static LAYOUTS: &[Layout] = &[
    layout("raw", "raw, with holes", "raw", ""),
    layout("raw-falloc", "raw, its space reserved beforehand", "raw", "preallocation=falloc"),
    layout("raw-full", "raw, written with zeroes beforehand", "raw", "preallocation=full"),
    layout("qcow2", "qcow2 as it is made without options: clusters of 64 KiB", "qcow2", ""),
    layout("qcow2-8k", "qcow2 with clusters of 8 KiB", "qcow2", "cluster_size=8K"),
    layout("qcow2-2m", "qcow2 with clusters of 2 MiB", "qcow2", "cluster_size=2M"),
    layout(
        "qcow2-ext",
        "qcow2 with extended L2 entries: clusters of 128 KiB, allocated by 4 KiB",
        "qcow2",
        "extended_l2=on,cluster_size=128K",
    ),
    layout(
        "qcow2-metadata",
        "qcow2, its tables made beforehand",
        "qcow2",
        "preallocation=metadata",
    ),
    layout("qcow2-falloc", "qcow2, its space reserved beforehand", "qcow2", "preallocation=falloc"),
    layout("qcow2-full", "qcow2, written with zeroes beforehand", "qcow2", "preallocation=full"),
    Layout {
        more: More::Backing,
        ..layout("qcow2-overlay", "qcow2 that stands on another", "qcow2", "")
    },
    Layout {
        more: More::Fragmented,
        ..layout("qcow2-fragmented", "qcow2, all written in random order", "qcow2", "")
    },
    Layout {
        more: More::Aged,
        ..layout("qcow2-aged", "qcow2, all written in random order, a third again", "qcow2", "")
    },
    layout("vmdk", "VMware's sparse format, grains of 64 KiB", "vmdk", ""),
];

/// The layout of this name.
pub fn find(name: &str) -> Option<&'static Layout> {
    LAYOUTS.iter().find(|layout| layout.name == name)
}

/// An image that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Its file, or the device.
    pub path: PathBuf,
    /// Its format.
    pub format: &'static str,
    /// Size of the disk.
    pub bytes: u64,
    /// All files of it.
    pub files: Vec<PathBuf>,
    /// It is on a device.
    pub device: bool,
}

/// Pieces that are written in random order.
const PIECE: u64 = 64 << 10;

/// Makes the image of a cell: of `bytes` bytes, and all of them written where `full` says so.
///
/// # Errors
/// [`crate::peers::Skip`] where it cannot be here; the command's failure.
pub fn make(bench: &mut Bench<'_>, layout: &Layout, bytes: u64, full: bool) -> Result<Image> {
    make_named(bench, layout, bytes, full, "disk")
}

/// As [`make`], of another name: beside other images.
///
/// # Errors
/// As [`make`].
pub fn make_named(
    bench: &mut Bench<'_>,
    layout: &Layout,
    bytes: u64,
    full: bool,
    name: &str,
) -> Result<Image> {
    let file = bench.folder.join(format!("{name}.{}", layout.format));
    let device = bench.place.device().map(Path::to_owned);
    let image = Image {
        path: device.clone().unwrap_or_else(|| file.clone()),
        format: layout.format,
        bytes,
        files: vec![device.clone().unwrap_or(file)],
        device: device.is_some(),
    };
    if let Some(device) = &device {
        on_device(bench, layout, device, bytes)?;
        empty(bench, device)?;
    }
    if layout.more == More::Backing {
        return over_another(bench, layout, image, full);
    }
    if !(image.device && layout.format == "raw") {
        let line = create(bench, layout, &image, None)?;
        bench.run(&line)?;
    }
    let pieces = match layout.more {
        More::Nothing | More::Backing => None,
        More::Fragmented => Some(false),
        More::Aged => Some(true),
    };
    match pieces {
        Some(again) => scatter(bench, &image, again)?,
        None if full => fill(bench, &image)?,
        None => {}
    }
    Ok(image)
}

/// Whether a layout can be on a device, and an empty start for it.
fn on_device(bench: &Bench<'_>, layout: &Layout, device: &Path, bytes: u64) -> Result<()> {
    if layout.more == More::Backing || layout.format == "vmdk" {
        return skip(format!("{} takes files, and this place is a device", layout.name));
    }
    if layout.options.contains("preallocation") {
        return skip("a device is all there beforehand: preallocation has no meaning on it");
    }
    let there = bench.place.info.total_bytes;
    // A format's own tables take less than a hundredth, and some MiB.
    if bytes + bytes / 64 + (4 << 20) > there && !(layout.format == "raw" && bytes <= there) {
        return skip(format!(
            "{}: {there} bytes are too few for a disk of {bytes}",
            device.display()
        ));
    }
    Ok(())
}

/// Gives back what earlier images have left on a device, where it can do that: a volume that was
/// written to is another than a new one.
fn empty(bench: &mut Bench<'_>, device: &Path) -> Result<()> {
    let Some(blkdiscard) = peers::find("blkdiscard") else { return Ok(()) };
    let line = Line::new(blkdiscard).arg("--force").arg(device);
    bench.commands.push(line.text());
    if !line.run_any(&bench.cancel)?.status.success() {
        bench
            .note("the device takes no discards: what earlier images have written stays allocated");
    }
    Ok(())
}

fn create(bench: &Bench<'_>, layout: &Layout, image: &Image, base: Option<&Path>) -> Result<Line> {
    let line = match bench.axis("tool") {
        Some("qemu-img") => Line::new(peers::need("qemu-img")?).args(["create", "-q"]),
        _ => bench.vdkit(&["create"]),
    };
    let mut line = line.args(["-f", layout.format]);
    if !layout.options.is_empty() {
        line = line.args(["-o", layout.options]);
    }
    if let Some(base) = base {
        line = line.arg("-b").arg(base).args(["-F", layout.format]);
    }
    Ok(line.arg(&image.path).arg(image.bytes.to_string()))
}

fn over_another(
    bench: &mut Bench<'_>,
    layout: &Layout,
    mut image: Image,
    full: bool,
) -> Result<Image> {
    let path = bench.folder.join(format!("base.{}", layout.format));
    if !path.exists() {
        let base = Image { path: path.clone(), files: vec![path.clone()], ..image.clone() };
        let line = create(bench, layout, &base, None)?;
        bench.run(&line)?;
        if full {
            fill(bench, &base)?;
        }
    }
    let line = create(bench, layout, &image, Some(&path))?;
    bench.run(&line)?;
    image.files.push(path);
    Ok(image)
}

fn open(bench: &Bench<'_>, image: &Image) -> Result<Disk> {
    let options = OpenOptions {
        format: Some(image.format.to_owned()),
        refs: RefPolicy::OwnFolder,
        ..OpenOptions::read_write()
    };
    Ok(Disk::open(bench.registry, &image.path, &options)?)
}

/// Bytes that no file system and no device can make smaller.
pub fn noise(buffer: &mut [u8], rng: &mut Rng) {
    for piece in buffer.chunks_mut(8) {
        let bytes = rng.next_u64().to_le_bytes();
        piece.copy_from_slice(&bytes[..piece.len()]);
    }
}

/// Writes the whole disk from start to end. The lab does this itself: what writes it does not
/// matter, and random bytes from a file would be shared blocks on some file systems.
fn fill(bench: &mut Bench<'_>, image: &Image) -> Result<()> {
    const STEP: usize = 1 << 20;
    let disk = open(bench, image)?;
    let mut rng = Rng::new(bench.seed);
    let mut buffer = vec![0; STEP];
    let mut at = 0;
    while at < image.bytes {
        bench.cancel.check()?;
        let len = (image.bytes - at).min(STEP as u64) as usize;
        noise(&mut buffer[..len], &mut rng);
        disk.write_at(&buffer[..len], GuestOffset(at))?;
        at += len as u64;
    }
    disk.flush()?;
    disk.close().with_context(|| image.path.display().to_string())?;
    bench.commands.push(format!("# {}: all of it written with random bytes", image.path.display()));
    Ok(())
}

/// Writes the whole disk in random order; `again` discards a third, and writes it anew.
fn scatter(bench: &mut Bench<'_>, image: &Image, again: bool) -> Result<()> {
    let disk = open(bench, image)?;
    let mut rng = Rng::new(bench.seed);
    let count = (image.bytes / PIECE) as usize;
    let mut buffer = vec![0; PIECE as usize];
    let mut write = |pieces: &[usize], rng: &mut Rng| -> Result<()> {
        for piece in pieces {
            bench.cancel.check()?;
            noise(&mut buffer, rng);
            disk.write_at(&buffer, GuestOffset(*piece as u64 * PIECE))?;
        }
        Ok(disk.flush()?)
    };
    write(&shuffled(count, &mut rng), &mut rng)?;
    let mut told = "all of it written with random bytes, 64 KiB at a time in random order";
    if again {
        let order = shuffled(count, &mut rng);
        let third = &order[..count / 3];
        for piece in third {
            disk.discard(GuestOffset(*piece as u64 * PIECE), PIECE)?;
        }
        disk.flush()?;
        let order: Vec<usize> = shuffled(third.len(), &mut rng).iter().map(|i| third[*i]).collect();
        write(&order, &mut rng)?;
        told = "all of it written with random bytes, 64 KiB at a time in random order; a third \
                discarded, and written again";
    }
    disk.close()?;
    bench.commands.push(format!("# {}: {told}", image.path.display()));
    Ok(())
}

/// Space that an image takes on the host.
pub fn host_bytes(image: &Image) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let blocks = image.files.iter().filter_map(|path| Some(path.metadata().ok()?.blocks()));
    // st_blocks counts 512 bytes, whatever the file system (stat(2)).
    blocks.sum::<u64>() * 512
}
