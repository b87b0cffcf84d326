//! The disk load of an operating system's installation: makes a new file system, and copies a tree
//! of files into it. The second pass repeats this on the same image, whose space is allocated by
//! then.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::error::{Context, Result};
use vdkit_block::CancelToken;

use super::{Bench, values};
use crate::fio::Disk;
use crate::front::{self, Target};
use crate::layout;
use crate::model::Sample;
use crate::peers::{find, need, need_root, skip};
use crate::place::attach::{Attached, Mounted};
use crate::process::Line;

/// Trees that most systems have, in the order in which they are used.
const TREES: &[&str] = &["/usr/share", "/usr/lib", "/usr/bin", "/etc"];

pub(super) fn sample(bench: &mut Bench<'_>) -> Result<Sample> {
    need_root("a file system on a guest's disk")?;
    need("mkfs.ext4")?;
    let files = choose(bench.effort.bytes, &bench.cancel)?;
    let (layout, front, cache) = (bench.layout()?, bench.front()?, bench.cache()?);
    let bytes = bench.disk_bytes()?;
    let image = layout::make(bench, layout, bytes, bench.content(false))?;
    let served = front::start(bench, front, &image, cache)?;
    let Target::Disk(Disk::File { path, .. }) = &served.target else {
        return skip("a file system is made on a file or a device: front file, fuse or fuse-qsd");
    };
    let disk = PathBuf::from(path);
    // Read the files into memory first, or the first pass would wait for them.
    read_all(&files, &bench.cancel)?;
    let first = pass(bench, &disk, bytes, &files)?;
    let second = pass(bench, &disk, bytes, &files)?;
    let mut all = values([("elapsed_seconds", first), ("second_pass_seconds", second)]);
    all.extend(layout::host_bytes(&image));
    all.extend(served.server_cpu_seconds().map(|cpu| ("server_cpu_seconds".to_owned(), cpu)));
    served.end();
    bench.note(&format!(
        "{} files of {} with {} bytes",
        files.len(),
        TREES.join(", "),
        files.iter().map(|file| file.bytes).sum::<u64>()
    ));
    Ok(Sample { values: all, ..Sample::default() })
}

struct Source {
    path: PathBuf,
    bytes: u64,
}

/// Chooses files of up to `most` bytes, in a fixed order.
fn choose(most: u64, cancel: &CancelToken) -> Result<Vec<Source>> {
    let mut found = Vec::new();
    let mut left = most;
    let mut folders: Vec<PathBuf> = TREES.iter().rev().map(PathBuf::from).collect();
    while let Some(folder) = folders.pop() {
        cancel.check()?;
        let Ok(entries) = std::fs::read_dir(&folder) else { continue };
        let mut paths: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
        paths.sort();
        for path in paths {
            let Ok(metadata) = path.symlink_metadata() else { continue };
            if metadata.is_dir() {
                folders.push(path);
            } else if metadata.is_file() && metadata.len() <= left {
                // A file takes at least a block and an inode.
                left = left.saturating_sub(metadata.len().max(4096));
                found.push(Source { path, bytes: metadata.len() });
            }
        }
        if left < 1 << 20 {
            break;
        }
    }
    if found.is_empty() {
        return skip(format!("no files to copy in {}", TREES.join(", ")));
    }
    Ok(found)
}

fn read_all(files: &[Source], cancel: &CancelToken) -> Result<()> {
    for file in files {
        cancel.check()?;
        std::fs::read(&file.path).with_context(|| file.path.display().to_string())?;
    }
    Ok(())
}

/// Makes the file system, copies, syncs and unmounts. Returns the seconds of all steps together.
fn pass(bench: &mut Bench<'_>, disk: &Path, bytes: u64, files: &[Source]) -> Result<f64> {
    let kind = disk.metadata().with_context(|| disk.display().to_string())?.file_type();
    // A server shows a file, even if the image is on a device.
    let loop_device = if kind.is_block_device() { None } else { Some(Attached::new(bench, disk)?) };
    let block = loop_device.as_ref().map_or(disk, Attached::path).to_owned();
    let at = bench.folder.join("mounted");
    std::fs::create_dir_all(&at)?;
    let began = Instant::now();
    let line = Line::new(find("mkfs.ext4").context("mkfs.ext4")?).args(["-q", "-F"]);
    // A discard would take away what the layout allocated, or what a pass before wrote.
    let line = line.args(["-E", "nodiscard"]).arg(&block);
    // The file system has the size of the plan's disk, even on a larger device.
    bench.run(&line.arg(format!("{}k", bytes >> 10)))?;
    let mounted = Mounted::new(bench, &block, &at)?;
    copy(files, &at, &bench.cancel)?;
    bench.commands.push(format!("# {} files are copied into it, and synced", files.len()));
    mounted.end(bench)?;
    let seconds = began.elapsed().as_secs_f64();
    if let Some(attached) = loop_device {
        attached.end(bench)?;
    }
    Ok(seconds)
}

fn copy(files: &[Source], at: &Path, cancel: &CancelToken) -> Result<()> {
    for file in files {
        cancel.check()?;
        let to = at.join(file.path.strip_prefix("/").unwrap_or(&file.path));
        if let Some(folder) = to.parent() {
            std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        }
        std::fs::copy(&file.path, &to).with_context(|| to.display().to_string())?;
    }
    let root = std::fs::File::open(at)?;
    rustix::fs::syncfs(&root).context("syncfs")?;
    Ok(())
}
