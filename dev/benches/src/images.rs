//! The images of the cells. Those in qcow2 are made by qemu-img, so that both programs read the
//! same stranger's work.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::options::{Content, Options};
use crate::process::Program;
use crate::scratch::Scratch;

const STEP: u64 = 32 << 20;
const PIECE: u64 = 64 << 10;
/// ext4's block.
const BLOCK: u64 = 4096;

/// An image to read.
#[derive(Clone, Debug)]
pub struct Image {
    /// How much of it holds data, or `real`.
    pub content: &'static str,
    /// Its format, as cells name it.
    pub shape: &'static str,
    /// Its format's name.
    pub format: &'static str,
    /// Where it is.
    pub path: PathBuf,
}

impl Image {
    /// The file with its data: that of a flat VMDK is not the image itself.
    pub fn data(&self) -> PathBuf {
        if self.shape != VMDK_FLAT {
            return self.path.clone();
        }
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let (stem, ending) = name.rsplit_once('.').unwrap_or((&name, ""));
        self.path.with_file_name(format!("{stem}-flat.{ending}"))
    }
}

const VMDK_FLAT: &str = "vmdk-flat";

/// A format with options, as cells name it.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// In the names of cells.
    pub name: &'static str,
    /// The format's name.
    pub format: &'static str,
    /// Its options, by names that both programs know.
    pub options: Option<&'static str>,
    /// Measured only where `--job` asks for it: there are many pairs.
    pub asked: bool,
}

const fn shape(name: &'static str, format: &'static str, options: Option<&'static str>) -> Shape {
    Shape { name, format, options, asked: options.is_some() }
}

/// What images are converted from and to.
pub const SHAPES: [Shape; 7] = [
    shape("raw", "raw", None),
    shape("qcow2", "qcow2", None),
    shape("vmdk", "vmdk", None),
    shape("vhdx", "vhdx", None),
    Shape { asked: true, ..shape("vdi", "vdi", None) },
    shape("vpc-fixed", "vpc", Some("subformat=fixed,force_size=on")),
    shape(VMDK_FLAT, "vmdk", Some("subformat=monolithicFlat")),
];

/// A raw image of data and holes.
pub fn raw(options: &Options, scratch: &Scratch, content: Content) -> Result<PathBuf> {
    let raw = scratch.file(&format!("{}.raw", content.name()));
    if !raw.exists() {
        write_raw(&raw, options.image_bytes, content == Content::Full)?;
    }
    Ok(raw)
}

/// The classic images that were asked for: each content in each shape.
pub fn classic(options: &Options, scratch: &Scratch) -> Result<Vec<Image>> {
    let mut images = Vec::new();
    for content in [Content::Sparse, Content::Full] {
        if !options.wants(content) {
            continue;
        }
        let name = content.name();
        let raw = raw(options, scratch, content)?;
        for Shape { name: shape, format, options: how, .. } in &SHAPES[1..] {
            if !options.wants_shape(shape) {
                continue;
            }
            let path = scratch.file(&format!("{name}.{shape}"));
            if !path.exists() {
                let mut program = Program::new(&options.qemu_img);
                program = program.args(["convert", "-f", "raw", "-O", format]);
                if let Some(how) = how {
                    program = program.args(["-o", how]);
                }
                program.args([&raw, &path]).run().context("qemu-img convert")?;
            }
            images.push(Image { content: name, shape, format, path });
        }
        images.push(Image { content: name, shape: "raw", format: "raw", path: raw });
    }
    if options.wants(Content::Metadata) {
        let path = scratch.file("metadata.qcow2");
        if !path.exists() {
            Program::new(&options.qemu_img)
                .args(["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata"])
                .arg(&path)
                .arg(options.image_bytes.to_string())
                .run()
                .context("qemu-img create")?;
        }
        let (content, format) = (Content::Metadata.name(), "qcow2");
        images.push(Image { content, shape: format, format, path });
    }
    rustix::fs::sync();
    Ok(images)
}

/// 64 KiB of data at the start of every 32 MiB, or everything but that.
fn write_raw(path: &Path, bytes: u64, full: bool) -> Result<()> {
    let file = File::create(path).with_context(|| format!("cannot make {}", path.display()))?;
    file.set_len(bytes)?;
    let mut random = Random::new();
    // Small: Linux counts the parent's peak memory as the child's that is about to become another
    // program, so what the harness uses would show in the tables.
    let mut buffer = vec![0; PIECE as usize];
    for at in (0..bytes).step_by(PIECE as usize) {
        if at.is_multiple_of(STEP) != full {
            random.fill(&mut buffer);
            file.write_all_at(&buffer, at)?;
        }
    }
    Ok(())
}

/// xorshift64: bytes that no program can skip or compress.
pub struct Random(u64);

impl Random {
    /// From a fixed start, so that each run makes the same image.
    pub fn new() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }

    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn fill(&mut self, buffer: &mut [u8]) {
        for piece in buffer.chunks_mut(8) {
            piece.copy_from_slice(&self.next().to_le_bytes()[..piece.len()]);
        }
    }
}

/// A raw image with ext4 full of this machine's program files, from the folders of
/// `--real-from`, copied again and again until it is full enough.
pub fn real(options: &Options, scratch: &Scratch) -> Result<Image> {
    let path = scratch.file("real.raw");
    let stage = scratch.file("stage");
    let mut stage_use = Use::default();
    for round in 0.. {
        let before = stage_use.bytes;
        for folder in &options.real_from {
            let to = stage.join(round.to_string()).join(folder.strip_prefix("/").unwrap_or(folder));
            if folder.is_dir() {
                copy_tree(folder, &to, options.real_bytes, &mut stage_use)?;
            }
        }
        if stage_use.full(options.real_bytes) {
            break;
        }
        if stage_use.bytes == before {
            bail!("--real-from: no readable files in {:?}", options.real_from);
        }
    }
    // Room for what the file system itself needs.
    let inodes = stage_use.inodes + stage_use.inodes / 16 + 1024;
    let bytes = options.real_bytes + options.real_bytes / 32 + inodes * 256 + (128 << 20);
    Program::new("mke2fs")
        .args(["-q", "-t", "ext4", "-m", "0", "-N", &inodes.to_string(), "-d"])
        .args([&stage, &path])
        .arg(format!("{}M", bytes >> 20))
        .run()
        .context("mke2fs")?;
    fs::remove_dir_all(&stage)?;
    rustix::fs::sync();
    Ok(Image { content: "real", shape: "raw", format: "raw", path })
}

/// What a copied tree takes on a file system.
#[derive(Debug, Default)]
struct Use {
    bytes: u64,
    inodes: u64,
}

impl Use {
    /// Whether hardly anything more fits.
    fn full(&self, room: u64) -> bool {
        room.saturating_sub(self.bytes) < 64 << 10
    }
}

/// Copies the regular files of a tree (on one file system) until `room` bytes are used in all.
/// What cannot be read is left out.
fn copy_tree(from: &Path, to: &Path, room: u64, used: &mut Use) -> Result<()> {
    let mut folders = vec![OsString::new()];
    let device = fs::metadata(from)?.dev();
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(from.join(&folder)) else { continue };
        fs::create_dir_all(to.join(&folder))?;
        used.bytes += BLOCK;
        used.inodes += 1;
        let mut entries: Vec<_> = entries.flatten().collect();
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            if used.full(room) {
                return Ok(());
            }
            let Ok(metadata) = entry.metadata() else { continue };
            let name: OsString = Path::new(&folder).join(entry.file_name()).into();
            let bytes = metadata.len().next_multiple_of(BLOCK);
            if metadata.is_dir() && metadata.dev() == device {
                folders.push(name);
            } else if metadata.is_file()
                && used.bytes + bytes <= room
                && fs::copy(entry.path(), to.join(&name)).is_ok()
            {
                used.bytes += bytes;
                used.inodes += 1;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_classic_images_hold_what_they_say() {
        let folder = std::env::temp_dir().join(format!("vdkit-bench-test-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let zero = |file: &File, offset: u64| {
            let mut byte = [0; 64];
            file.read_exact_at(&mut byte, offset).unwrap();
            byte == [0; 64]
        };
        for full in [false, true] {
            let path = folder.join("x.raw");
            write_raw(&path, 2 * STEP, full).unwrap();
            let file = File::open(&path).unwrap();
            assert_eq!(file.metadata().unwrap().len(), 2 * STEP);
            for start in [0, STEP] {
                assert_eq!(zero(&file, start), full);
                assert_eq!(zero(&file, start + PIECE - 64), full);
                assert_eq!(zero(&file, start + PIECE), !full);
                assert_eq!(zero(&file, start + STEP - 64), !full);
            }
            fs::remove_file(path).unwrap();
        }
        fs::remove_dir_all(folder).unwrap();
    }
}
