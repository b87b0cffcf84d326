//! Checking an image with much metadata: 100 GiB of allocated clusters whose data no program reads, so
//! that their places in the file are holes.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::Save;
use crate::images::Random;
use crate::options::{Group, Options};
use crate::pair::{self, Candidate, CellName};
use crate::process::Program;
use crate::scratch::Scratch;

/// Bytes of the guest disk, and of the one for a trial.
const DISK_BYTES: u64 = 100 << 30;
const DISK_BYTES_QUICK: u64 = 4 << 30;

const CLUSTER: u64 = 64 << 10;
const COPIED: u64 = 1 << 63;

/// Where the clusters of an image are in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// As `qemu-img create -o preallocation=metadata` makes it: an L2 table, its 512 MiB of data, the
    /// next table.
    Sequential,
    /// L2 tables anywhere, data in order around them.
    Tables,
}

impl Order {
    fn name(self) -> &'static str {
        match self {
            Self::Sequential => "in order",
            Self::Tables => "tables scattered",
        }
    }
}

/// Both programs on each image, with its metadata in the page cache and without.
pub fn measure(options: &Options, scratch: &Scratch, save: &mut Save<'_>) -> Result<()> {
    let bytes = if options.quick { DISK_BYTES_QUICK } else { DISK_BYTES };
    for order in [Order::Sequential, Order::Tables] {
        let image = image(options, scratch, order, bytes)?;
        for (job, cold) in [("warm", false), ("cold", true)] {
            if !options.wants_job(job) {
                continue;
            }
            let name = CellName::new(Group::Check, job, order.name(), scratch.file_system);
            let candidate = |name, program: &Path| Candidate {
                cold,
                ..Candidate::new(name, Program::new(program).arg("check").arg(&image))
            };
            let candidates = vec![
                candidate("vdkit", &options.vdkit),
                candidate("qemu-img", options.qemu_img.as_ref()),
            ];
            save(pair::measure(name, bytes, scratch, options.runs(Group::Check), candidates)?)?;
        }
        std::fs::remove_file(&image)?;
    }
    Ok(())
}

fn image(options: &Options, scratch: &Scratch, order: Order, bytes: u64) -> Result<PathBuf> {
    let path = scratch.file("check.qcow2");
    if order == Order::Sequential {
        Program::new(&options.qemu_img)
            .args(["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata"])
            .arg(&path)
            .arg(bytes.to_string())
            .run()
            .context("qemu-img create")?;
    } else {
        write_scattered(&path, bytes).with_context(|| format!("cannot make {}", path.display()))?;
    }
    rustix::fs::sync();
    Ok(path)
}

/// A version 2 image: header, refcount table, refcount blocks, L1 table, then data with the L2 tables
/// anywhere in it.
fn write_scattered(path: &Path, bytes: u64) -> Result<()> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(path)?;
    let (data, tables) = (bytes / CLUSTER, bytes / CLUSTER / (CLUSTER / 8));
    let per_block = CLUSTER / 2;
    let blocks = (data + tables + 64).div_ceil(per_block);
    let l1 = 2 + blocks;
    let first = l1 + 1;
    let clusters = first + tables + data;
    let mut header = Vec::new();
    for word in [0x5146_49fb_0000_0002, 0, 16, bytes, tables, l1 * CLUSTER, CLUSTER, 1 << 32, 0] {
        header.extend_from_slice(&u64::to_be_bytes(word));
    }
    file.write_all_at(&header, 0)?;
    let words = |numbers: &mut dyn Iterator<Item = u64>| -> Vec<u8> {
        numbers.flat_map(u64::to_be_bytes).collect()
    };
    file.write_all_at(&words(&mut (0..blocks).map(|i| (2 + i) * CLUSTER)), CLUSTER)?;
    for block in 0..blocks {
        let used = clusters.saturating_sub(block * per_block).min(per_block);
        file.write_all_at(&[0, 1].repeat(used as usize), (2 + block) * CLUSTER)?;
    }
    let mut places: Vec<u32> = (first as u32..clusters as u32).collect();
    let mut random = Random::new();
    for i in 0..tables as usize {
        let other = i + (random.next() % (places.len() - i) as u64) as usize;
        places.swap(i, other);
    }
    let (tables, data) = places.split_at_mut(tables as usize);
    data.sort_unstable();
    let entry = |place: &u32| (u64::from(*place) * CLUSTER) | COPIED;
    file.write_all_at(&words(&mut tables.iter().map(entry)), l1 * CLUSTER)?;
    for (table, data) in tables.iter().zip(data.chunks((CLUSTER / 8) as usize)) {
        file.write_all_at(&words(&mut data.iter().map(entry)), u64::from(*table) * CLUSTER)?;
    }
    file.set_len(clusters * CLUSTER)?;
    Ok(())
}
