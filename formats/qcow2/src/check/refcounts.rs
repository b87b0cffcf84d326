//! The refcount table and its blocks in the file.

use vdkit_block::{CheckReport, HostOffset, Result};

use super::balance::Balance;
use super::image::Image;
use super::reader::{self, Meter};
use crate::layout::OFFSET_MASK;
use crate::refcounts::{get_refcount, set_refcount};
use crate::structures::words;

/// Bits of a refcount table entry that must be zero; the offset may use all others.
const TABLE_RESERVED: u64 = 0x1ff;

/// The refcount blocks of an image.
#[derive(Debug, Default)]
pub(super) struct Refcounts {
    /// Host offset of each block; 0 if there is no usable one.
    pub(super) blocks: Vec<u64>,
    /// No entry is damaged, and the table is where the header says.
    pub(super) sound: bool,
}

impl Refcounts {
    pub(super) fn read(image: &Image, report: &mut CheckReport) -> Result<Self> {
        let header = &image.header;
        let bytes = u64::from(header.refcount_table_clusters) * image.cluster_bytes();
        let at = header.refcount_table_offset.0;
        let raw = image.read_table(at, bytes)?;
        let mut table =
            Self { blocks: vec![0; raw.len() / 8], sound: header.refcount_table_clusters > 0 };
        for (i, (block, raw)) in table.blocks.iter_mut().zip(words(&raw)).enumerate() {
            let entry = raw.get();
            if entry == 0 {
                continue;
            }
            let expected = if entry & TABLE_RESERVED != 0 {
                "zero in the reserved bits"
            } else if entry & (image.cluster_bytes() - 1) != 0 {
                "a host offset at a cluster boundary"
            } else if entry & !OFFSET_MASK != 0 || entry >= image.file_len {
                "a host offset within the file"
            } else {
                *block = entry;
                continue;
            };
            table.sound = false;
            report.corruption(at + i as u64 * 8, "refcount table entry", || {
                format!("found {entry:#x}, expected {expected}")
            });
        }
        table.drop_repeated(at, report);
        Ok(table)
    }

    /// Keeps only the first entry of a block that is named twice.
    fn drop_repeated(&mut self, table_offset: u64, report: &mut CheckReport) {
        let mut places: Vec<(u64, usize)> =
            self.blocks.iter().copied().zip(0..).filter(|&(offset, _)| offset != 0).collect();
        places.sort_unstable();
        for pair in places.windows(2).filter(|pair| pair[0].0 == pair[1].0) {
            let (offset, index) = pair[1];
            self.blocks[index] = 0;
            self.sound = false;
            report.corruption(table_offset + index as u64 * 8, "refcount table entry", || {
                format!("found {offset:#x}, expected a block that no earlier entry names")
            });
        }
    }

    /// Loads all refcounts into `balance`.
    pub(super) fn load(
        &self,
        image: &Image,
        balance: &mut Balance,
        meter: &mut Meter<'_, '_>,
    ) -> Result<()> {
        let bits = image.geometry().refcount_block_bits();
        let mut blocks: Vec<(u64, u64)> = (0u64..)
            .zip(&self.blocks)
            .filter(|&(_, &offset)| offset != 0)
            .map(|(index, &offset)| (offset, index))
            .collect();
        blocks.sort_unstable();
        let offsets: Vec<u64> = blocks.iter().map(|(offset, _)| *offset).collect();
        let order = image.geometry().refcount_order;
        reader::for_each_cluster(
            &*image.storage,
            &offsets,
            image.cluster_bytes(),
            meter,
            |i, block| {
                balance.add_refcounts(blocks[i].1 << bits, block, order);
                balance.check_limit(image.name())
            },
        )
    }

    /// Changes the refcounts of clusters, in ascending order; clusters without a block are passed
    /// over. `change` gets a cluster and its refcount. Not yet durable. Returns whether any changed.
    pub(super) fn change(
        &self,
        image: &Image,
        clusters: impl Iterator<Item = u64>,
        mut change: impl FnMut(u64, u64) -> u64,
    ) -> Result<bool> {
        let geometry = image.geometry();
        let (bits, order) = (geometry.refcount_block_bits(), geometry.refcount_order);
        let mut clusters = clusters.peekable();
        let mut changed = false;
        while let Some(&first) = clusters.peek() {
            let of_block = |cluster: &u64| cluster >> bits == first >> bits;
            let Some(at) = self.block_of(image, first) else {
                while clusters.next_if(of_block).is_some() {}
                continue;
            };
            changed |= image.change_cluster(at, |block| {
                while let Some(cluster) = clusters.next_if(of_block) {
                    let index = cluster & (geometry.refcount_block_entries() - 1);
                    let refcount = change(cluster, get_refcount(block, index, order));
                    set_refcount(block, index, order, refcount);
                }
            })?;
        }
        Ok(changed)
    }

    /// Host offset of the block that has this cluster's refcount.
    pub(super) fn block_of(&self, image: &Image, cluster: u64) -> Option<u64> {
        let index = cluster >> image.geometry().refcount_block_bits();
        self.blocks.get(usize::try_from(index).ok()?).copied().filter(|&offset| offset != 0)
    }
}

/// Looks up single refcounts in the file, with one block in memory.
#[derive(Debug)]
pub(super) struct Lookup<'a> {
    image: &'a Image,
    refcounts: &'a Refcounts,
    block: Vec<u8>,
    at: u64,
}

impl<'a> Lookup<'a> {
    pub(super) fn new(image: &'a Image, refcounts: &'a Refcounts) -> Self {
        Self { image, refcounts, block: Vec::new(), at: 0 }
    }

    pub(super) fn get(&mut self, cluster: u64) -> Result<u64> {
        let Some(at) = self.refcounts.block_of(self.image, cluster) else { return Ok(0) };
        if self.at != at {
            self.block.resize(self.image.cluster_bytes() as usize, 0);
            self.image.storage.read_padded(&mut self.block, HostOffset(at))?;
            self.at = at;
        }
        let geometry = self.image.geometry();
        let index = cluster & (geometry.refcount_block_entries() - 1);
        Ok(get_refcount(&self.block, index, geometry.refcount_order))
    }
}
