//! Layouts of an image on its place. Each layout is created with the command that a user would
//! type.

use std::path::{Path, PathBuf};

use crate::error::{Context, Result};
use vdkit_block::{GuestOffset, HostOffset, RefPolicy, Storage};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_storage::FileStorage;

use crate::cells::{Rng, shuffled};
use crate::engine::Bench;
use crate::peers;
use crate::place::{device, zfs};
use crate::process::Line;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Its name in plans.
    pub name: &'static str,
    pub about: &'static str,
    /// The image's format, as both vdkit and qemu-img call it.
    pub format: &'static str,
    /// Format options (`-o`); may be empty.
    pub options: &'static str,
    /// What is done besides creating the image.
    pub more: More,
}

/// What is done besides creating the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum More {
    Nothing,
    /// The image is an overlay. Its backing image holds the disk's content.
    Backing,
    /// The whole disk is written in random order, in pieces of 64 KiB.
    Fragmented,
    /// As `Fragmented`; then a third of the pieces is discarded and written again in another order.
    Aged,
    /// A volume of the place's file system, not a file.
    Volume,
}

/// Content of a disk before the load begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Nothing was ever written.
    Nothing,
    /// One piece in each `STRIDE` is written.
    Sparse,
    /// All but one piece in each `STRIDE` is written: the inverse of `Sparse`.
    Full,
    /// The whole disk is written.
    All,
}

/// Size of a piece. In the published conversions, one such piece in each [`STRIDE`] was written, or
/// left out.
const PIECE: u64 = 64 << 10;
/// Distance between two pieces.
const STRIDE: u64 = 32 << 20;

impl Layout {
    const fn with(self, more: More) -> Self {
        Self { more, ..self }
    }

    /// Whether the file system reserves the image's space in advance.
    pub fn is_reserved(&self) -> bool {
        self.options.contains("=falloc") || self.options.contains("=full")
    }
}

impl Content {
    /// The written ranges of a disk in order, as start and length; a range is at most 1 MiB.
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

    fn described(self) -> &'static str {
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
    layout("raw-falloc", "raw, preallocated by fallocate", "raw", "preallocation=falloc"),
    layout("raw-full", "raw, preallocated by writing zeroes", "raw", "preallocation=full"),
    layout("qcow2", "qcow2 with default options: clusters of 64 KiB", "qcow2", ""),
    layout("qcow2-8k", "qcow2 with clusters of 8 KiB", "qcow2", "cluster_size=8K"),
    layout("qcow2-2m", "qcow2 with clusters of 2 MiB", "qcow2", "cluster_size=2M"),
    layout(
        "qcow2-ext",
        "qcow2 with extended L2 entries: clusters of 128 KiB, subclusters of 4 KiB",
        "qcow2",
        "extended_l2=on,cluster_size=128K",
    ),
    layout("qcow2-metadata", "qcow2, tables preallocated", "qcow2", "preallocation=metadata"),
    layout("qcow2-falloc", "qcow2, preallocated by fallocate", "qcow2", "preallocation=falloc"),
    layout("qcow2-full", "qcow2, preallocated by writing zeroes", "qcow2", "preallocation=full"),
    layout("qcow2-overlay", "qcow2 with a backing image", "qcow2", "").with(More::Backing),
    layout("qcow2-fragmented", "qcow2, fully written in random order", "qcow2", "")
        .with(More::Fragmented),
    layout(
        "qcow2-aged",
        "qcow2, fully written in random order, a third discarded and rewritten",
        "qcow2",
        "",
    )
    .with(More::Aged),
    layout("vmdk", "VMware's sparse format, grains of 64 KiB", "vmdk", ""),
    layout("zvol", "raw, on a ZFS volume below the data set of the place", "raw", "")
        .with(More::Volume),
];

/// The layout of this name.
pub fn find(name: &str) -> Option<&'static Layout> {
    LAYOUTS.iter().find(|layout| layout.name == name)
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Path of the file or the device.
    pub path: PathBuf,
    pub format: &'static str,
    /// Size of the disk that is used.
    pub bytes: u64,
    /// Size of the disk that servers show. Larger than `bytes` for a raw image on a larger device.
    pub shown_bytes: u64,
    /// Every file of the image.
    pub files: Vec<PathBuf>,
    /// Whether the image is on a device.
    pub device: bool,
}

impl Image {
    pub fn file(path: PathBuf, format: &'static str, bytes: u64) -> Self {
        let files = vec![path.clone()];
        Self { path, format, bytes, shown_bytes: bytes, files, device: false }
    }
}

/// Creates the image of a cell, with `bytes` bytes and this content.
///
/// # Errors
/// [`crate::peers::Skip`] if the layout is not possible here; the failure of a command.
pub fn make(bench: &mut Bench<'_>, layout: &Layout, bytes: u64, content: Content) -> Result<Image> {
    make_named(bench, layout, bytes, content, "disk")
}

/// As [`make`], but with another name, for a place with several images.
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
    // A raw image on a device needs no creation.
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

/// Chooses where the image will be: on the emptied device, on a volume, or in a file of the lab's
/// folder.
fn locate(bench: &mut Bench<'_>, layout: &Layout, bytes: u64, name: &str) -> Result<Image> {
    let image = |path| Image::file(path, layout.format, bytes);
    if let Some(device) = bench.place.device().map(Path::to_owned) {
        empty(bench, &device)?;
        let total = bench.place.info.total_bytes;
        let shown_bytes = if layout.format == "raw" { total } else { bytes };
        return Ok(Image { device: true, shown_bytes, ..image(device) });
    }
    if layout.more == More::Volume {
        return Ok(Image { device: true, ..image(zfs::volume(bench, bytes)?) });
    }
    let folder = zfs::folder(bench)?;
    Ok(image(folder.join(format!("{name}.{}", layout.format))))
}

/// Bytes at either end of a device that may hold signatures and headers.
const ENDS: u64 = 1 << 20;

/// Discards what earlier images left on a device, if the device supports that, because a volume
/// that was written to performs differently from a new one. Otherwise only removes signatures.
fn empty(bench: &mut Bench<'_>, path: &Path) -> Result<()> {
    let claimed = device::claim(path)?;
    if let Some(blkdiscard) = peers::find("blkdiscard") {
        // Without --force, which would also overwrite a device that another program has claimed. It
        // asks about signatures only on a terminal, and its input is none.
        let line = Line::new(blkdiscard).arg(path);
        bench.commands.push(line.text());
        if !line.run_any(&bench.cancel)?.status.success() {
            device::check_exclusive(path)?;
            bench.note(
                "the device does not support discards: data of earlier images stays allocated",
            );
        }
    }
    clear_ends(&claimed, bench.place.info.total_bytes)
}

/// Writes zeroes to both ends of a device that was [claimed](device::claim).
pub fn clear_ends(claimed: &FileStorage, total: u64) -> Result<()> {
    let zeroes = vec![0; ENDS.min(total) as usize];
    for at in [0, total.saturating_sub(ENDS)] {
        claimed.write_at(&zeroes, HostOffset(at))?;
    }
    Ok(claimed.sync()?)
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
        let base = Image::file(path.clone(), layout.format, image.bytes);
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
    let options = OpenOptions::read_write().format(image.format).refs(RefPolicy::OwnFolder);
    Ok(Disk::open(bench.registry, &image.path, &options)?)
}

/// Fills a buffer with bytes that no file system or device can compress or deduplicate.
pub fn noise(buffer: &mut [u8], rng: &mut Rng) {
    for piece in buffer.chunks_mut(8) {
        let bytes = rng.next_u64().to_le_bytes();
        piece.copy_from_slice(&bytes[..piece.len()]);
    }
}

/// Writes the content from start to end. The lab writes it itself, because a file system may share
/// the blocks of random bytes that are copied from a file.
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
    bench.commands.push(format!("# {}: {}", image.path.display(), content.described()));
    Ok(())
}

/// Writes the whole disk in random order. With `again`, discards a third and writes it again.
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
    let mut how = "all of it written with random bytes, 64 KiB at a time in random order";
    if again {
        let order = shuffled(count, &mut rng);
        let third = &order[..count / 3];
        for piece in third {
            disk.discard(GuestOffset(*piece as u64 * PIECE), PIECE)?;
        }
        disk.flush()?;
        let order: Vec<usize> = shuffled(third.len(), &mut rng).iter().map(|i| third[*i]).collect();
        write(&order, &mut rng)?;
        how = "all of it written with random bytes, 64 KiB at a time in random order; a third \
                discarded, and written again";
    }
    disk.close()?;
    bench.commands.push(format!("# {}: {how}", image.path.display()));
    Ok(())
}

/// The metric of the space that an image takes on the host. None for a device, where the image takes
/// all space.
pub fn host_bytes(image: &Image) -> Option<(String, f64)> {
    use std::os::unix::fs::MetadataExt;
    if image.device {
        return None;
    }
    let blocks = image.files.iter().filter_map(|path| Some(path.metadata().ok()?.blocks()));
    // st_blocks counts units of 512 bytes on every file system (stat(2)).
    Some(("host_bytes".to_owned(), (blocks.sum::<u64>() * 512) as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of written bytes within the first `bytes` of a disk.
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
