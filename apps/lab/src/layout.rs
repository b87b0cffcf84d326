//! How an image is laid out on its place: made with the command that a user would type.

use std::path::{Path, PathBuf};

use crate::error::{Context, Result};
use vdkit_block::{GuestOffset, RefPolicy};
use vdkit_chain::{Disk, OpenOptions};

use crate::cells::{Rng, shuffled};
use crate::engine::Bench;
use crate::peers;
use crate::place::zfs;
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
    /// It is no file: a volume of the file system that the place is on.
    Volume,
}

/// What a disk holds before the load begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Nothing was ever written.
    Nothing,
    /// A piece in each `STRIDE` is written.
    Sparse,
    /// All is written but a piece in each `STRIDE`: the opposite.
    Full,
    /// All is written.
    All,
}

/// The published conversions were of disks that had, or lacked, so much in each [`STRIDE`].
const PIECE: u64 = 64 << 10;
/// From one such piece to the next.
const STRIDE: u64 = 32 << 20;

impl Content {
    /// The parts of a disk that are written, in order: start and length, a MiB at most.
    fn parts(self, bytes: u64) -> impl Iterator<Item = (u64, u64)> {
        const STEP: u64 = 1 << 20;
        (0..bytes).step_by(STEP as usize).filter_map(move |at| {
            let len = (bytes - at).min(STEP);
            let first = at % STRIDE == 0;
            match self {
                Self::Nothing => None,
                Self::Sparse => first.then(|| (at, len.min(PIECE))),
                Self::Full if first => (len > PIECE).then(|| (at + PIECE, len - PIECE)),
                Self::Full | Self::All => Some((at, len)),
            }
        })
    }

    fn told(self) -> &'static str {
        match self {
            Self::Nothing => "nothing is written",
            Self::Sparse => "64 KiB of random bytes are written every 32 MiB",
            Self::Full => "all of it but 64 KiB every 32 MiB is written with random bytes",
            Self::All => "all of it written with random bytes",
        }
    }
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
    Layout {
        more: More::Volume,
        ..layout("zvol", "raw, on a ZFS volume beside the data set that the place is", "raw", "")
    },
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
    /// Size of the disk that is used.
    pub bytes: u64,
    /// Size of the disk that servers show: more, where a raw image is a larger device.
    pub shown_bytes: u64,
    /// All files of it.
    pub files: Vec<PathBuf>,
    /// It is on a device.
    pub device: bool,
}

/// Makes the image of a cell: of `bytes` bytes, with that content.
///
/// # Errors
/// [`crate::peers::Skip`] where it cannot be here; the command's failure.
pub fn make(bench: &mut Bench<'_>, layout: &Layout, bytes: u64, content: Content) -> Result<Image> {
    make_named(bench, layout, bytes, content, "disk")
}

/// As [`make`], of another name: beside other images.
///
/// # Errors
/// As [`make`].
pub fn make_named(
    bench: &mut Bench<'_>,
    layout: &Layout,
    bytes: u64,
    content: Content,
    name: &str,
) -> Result<Image> {
    let image = locate(bench, layout, bytes, name)?;
    if layout.more == More::Backing {
        return over_another(bench, layout, image, content);
    }
    // A device is there, and holds what it holds.
    if !(image.device && layout.format == "raw" && layout.options.is_empty()) {
        let line = create(bench, layout, &image, None)?;
        bench.run(&line)?;
    }
    let pieces = match layout.more {
        More::Nothing | More::Backing | More::Volume => None,
        More::Fragmented => Some(false),
        More::Aged => Some(true),
    };
    match pieces {
        Some(again) => scatter(bench, &image, again)?,
        None => fill(bench, &image, content)?,
    }
    Ok(image)
}

/// Where an image will be: the place's device, emptied; a volume; a file in our folder.
fn locate(bench: &mut Bench<'_>, layout: &Layout, bytes: u64, name: &str) -> Result<Image> {
    let image = |path: PathBuf, device: bool, shown_bytes| Image {
        files: vec![path.clone()],
        path,
        format: layout.format,
        bytes,
        shown_bytes,
        device,
    };
    if let Some(device) = bench.place.device().map(Path::to_owned) {
        empty(bench, &device)?;
        let total = bench.place.info.total_bytes;
        let shown = if layout.format == "raw" { total } else { bytes };
        return Ok(image(device, true, shown));
    }
    if layout.more == More::Volume {
        let volume = zfs::volume(bench, bytes)?;
        return Ok(image(volume, true, bytes));
    }
    let folder = zfs::folder(bench)?;
    Ok(image(folder.join(format!("{name}.{}", layout.format)), false, bytes))
}

/// How much at either end of a device may make it look like something: signatures and headers.
const ENDS: u64 = 1 << 20;

/// Gives back what earlier images have left on a device, where it can do that: a volume that was
/// written to is another than a new one. Where it cannot, nothing is recognised on it at least.
fn empty(bench: &mut Bench<'_>, device: &Path) -> Result<()> {
    if let Some(blkdiscard) = peers::find("blkdiscard") {
        let line = Line::new(blkdiscard).arg("--force").arg(device);
        bench.commands.push(line.text());
        if !line.run_any(&bench.cancel)?.status.success() {
            bench.note(
                "the device takes no discards: what earlier images have written stays allocated",
            );
        }
    }
    clear_ends(device, bench.place.info.total_bytes)
}

/// Writes zeroes to both ends of a device.
///
/// # Errors
/// The device refuses.
pub fn clear_ends(device: &Path, total: u64) -> Result<()> {
    use std::os::unix::fs::FileExt;
    let zeroes = vec![0; ENDS.min(total) as usize];
    let name = || device.display().to_string();
    let file = std::fs::File::options().write(true).open(device).with_context(name)?;
    for at in [0, total.saturating_sub(ENDS)] {
        file.write_all_at(&zeroes, at).with_context(name)?;
    }
    file.sync_all().with_context(name)
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
    content: Content,
) -> Result<Image> {
    let path = image.path.with_file_name(format!("base.{}", layout.format));
    if !path.exists() {
        let base = Image { path: path.clone(), files: vec![path.clone()], ..image.clone() };
        let line = create(bench, layout, &base, None)?;
        bench.run(&line)?;
        fill(bench, &base, content)?;
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

/// Writes the content, from start to end. The lab does this itself: what writes it does not matter,
/// and random bytes from a file would be shared blocks on some file systems.
fn fill(bench: &mut Bench<'_>, image: &Image, content: Content) -> Result<()> {
    if content == Content::Nothing {
        return Ok(());
    }
    let disk = open(bench, image)?;
    let mut rng = Rng::new(bench.seed);
    let mut buffer = vec![0; 1 << 20];
    for (at, len) in content.parts(image.bytes) {
        bench.cancel.check()?;
        let part = &mut buffer[..len as usize];
        noise(part, &mut rng);
        disk.write_at(part, GuestOffset(at))?;
    }
    disk.flush()?;
    disk.close().with_context(|| image.path.display().to_string())?;
    bench.commands.push(format!("# {}: {}", image.path.display(), content.told()));
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

/// Space that an image takes on the host. Nothing where it is on a device: that is all taken.
pub fn host_bytes(image: &Image) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    if image.device {
        return None;
    }
    let blocks = image.files.iter().filter_map(|path| Some(path.metadata().ok()?.blocks()));
    // st_blocks counts 512 bytes, whatever the file system (stat(2)).
    Some(blocks.sum::<u64>() * 512)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that are written within the first `bytes` of a disk.
    fn written(content: Content, bytes: u64) -> u64 {
        content.parts(bytes).map(|(_, len)| len).sum()
    }

    #[test]
    fn sparse_and_full_are_opposites_as_published() {
        let disk = 2 << 30;
        assert_eq!(written(Content::Nothing, disk), 0);
        assert_eq!(written(Content::Sparse, disk), 64 * PIECE);
        assert_eq!(written(Content::Full, disk), disk - 64 * PIECE);
        assert_eq!(written(Content::All, disk), disk);
        assert_eq!(Content::Sparse.parts(disk).nth(1), Some((32 << 20, PIECE)));
        assert_eq!(Content::Full.parts(disk).next(), Some((PIECE, (1 << 20) - PIECE)));
        // A disk may end within a piece.
        assert_eq!(written(Content::Sparse, STRIDE + 4096), PIECE + 4096);
        assert_eq!(written(Content::Full, STRIDE + 4096), STRIDE - PIECE);
        assert_eq!(written(Content::All, 3 << 19), 3 << 19);
    }
}
