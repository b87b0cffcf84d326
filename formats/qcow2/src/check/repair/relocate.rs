//! Writes a new set of refcounts, and moves metadata that shares its clusters with something else.
//!
//! Everything new goes beyond the end of the file (on a device: after the last used cluster).
//! Nothing in use is overwritten until all of it is durable; then one header write switches the
//! active L1 table, the refcount table and the snapshot table at once.

use rustc_hash::FxHashMap;
use vdkit_block::{Error, HostOffset, Monitor, Result, require_within};
use zerocopy::IntoBytes;

use super::{dangling, entries};
use crate::check::image::Image;
use crate::check::mapping;
use crate::check::snapshots::Snapshot;
use crate::check::survey::{Mode, Owner, Survey};
use crate::check::writer::Joined;
use crate::layout::{
    HOST_OFFSET_END, REFCOUNT_TABLE_BYTES_MAX, V2_HEADER_BYTES, V3_HEADER_BYTES_MIN,
};
use crate::refcounts::set_refcount;
use crate::snapshots;
use crate::structures::{FixedHeader, header_offset, words_mut};

/// The new layout.
struct Plan<'a> {
    image: &'a Image,
    /// References without those of the old refcounts; new clusters are added as they are allocated.
    target: Survey,
    /// The next free cluster.
    next: u64,
    /// New host offsets of L2 tables by their old ones.
    tables: FxHashMap<u64, u64>,
    /// New host offset of the active L1 table.
    l1: Option<u64>,
    /// The remaining snapshots with their changes; `None` if the table stays unchanged.
    snapshots: Option<Vec<Snapshot>>,
    /// Bytes of the tables that moved.
    moved: u64,
}

/// Writes new refcounts, moves metadata that must move, and switches.
pub(super) fn apply(image: &Image, survey: &Survey, monitor: &Monitor<'_>) -> Result<()> {
    let before = image.storage.len()?;
    let (plan, header) = prepare(image, survey, monitor).inspect_err(|_| cut(image, before))?;
    let tables = header_offset!(l1_size);
    let bytes = &header.as_bytes()[tables as usize..V2_HEADER_BYTES as usize];
    image.storage.write_at(bytes, HostOffset(tables))?;
    image.storage.sync()?;
    plan.point_l1s_to_moved_tables()?;
    image.storage.sync()
}

fn prepare<'a>(
    image: &'a Image,
    survey: &Survey,
    monitor: &Monitor<'_>,
) -> Result<(Plan<'a>, FixedHeader)> {
    let target = Survey::take(image, Mode::References, monitor)?;
    let next = dangling::first_free(image, survey, &target)?;
    let mut plan = Plan::new(image, target, next);
    plan.move_tables()?;
    plan.move_l1()?;
    let snapshot_table = plan.move_snapshots()?;
    let (table, clusters) = plan.write_refcounts()?;
    image.storage.sync()?;
    let snapshots = plan.snapshots.as_ref().map_or(image.header.snapshot_count, |s| s.len() as u32);
    let header = FixedHeader {
        l1_size: image.header.l1_entries.into(),
        l1_table_offset: plan.l1.unwrap_or(image.header.l1_offset.0).into(),
        refcount_table_offset: table.into(),
        refcount_table_clusters: clusters.into(),
        nb_snapshots: snapshots.into(),
        snapshots_offset: snapshot_table.into(),
        ..FixedHeader::default()
    };
    Ok((plan, header))
}

/// Writes a whole new set of refcounts of another width, and switches to it with one header write.
/// `image` must be sound; on return its header has the new width.
pub(super) fn change_width(image: &mut Image, order: u32, monitor: &Monitor<'_>) -> Result<()> {
    let survey = Survey::take(image, Mode::Compare, monitor)?;
    let target = Survey::take(image, Mode::References, monitor)?;
    let next = dangling::first_free(image, &survey, &target)?;
    let bits = 1u32 << order;
    let max = if bits == 64 { i128::from(u64::MAX) } else { (1 << bits) - 1 };
    if let Some((cluster, balance)) =
        target.balance.unbalanced().find(|(_, balance)| -balance > max)
    {
        return Err(Error::invalid_for(
            &image.name(),
            format!(
                "refcount_bits={bits} is not possible: the cluster at {:#x} is referred to {} times, \
             as by snapshots or compressed clusters, and {bits} bits count up to {max}",
                cluster << image.geometry().cluster_bits,
                -balance
            ),
        ));
    }
    let before = image.storage.len()?;
    image.header.geometry.refcount_order = order;
    let image = &*image;
    let mut plan = Plan::new(image, target, next);
    let written = plan.write_refcounts().and_then(|place| image.storage.sync().map(|()| place));
    let (table, clusters) = written.inspect_err(|_| cut(image, before))?;
    // All fields are in the first sector, so the switch is atomic.
    let mut header = FixedHeader::read(&*image.storage)?;
    header.refcount_table_offset.set(table);
    header.refcount_table_clusters.set(clusters);
    header.refcount_order.set(order);
    let bytes = &header.as_bytes()[..V3_HEADER_BYTES_MIN as usize];
    image.storage.write_at(bytes, HostOffset(0))?;
    image.storage.sync()
}

/// Restores the file's old length if possible. Nothing refers to the new clusters.
fn cut(image: &Image, len: u64) {
    if image.storage.caps().growable {
        let _ = image.storage.set_len(len);
    }
}

impl<'a> Plan<'a> {
    fn new(image: &'a Image, target: Survey, next: u64) -> Self {
        Self {
            image,
            target,
            next,
            tables: FxHashMap::default(),
            l1: None,
            snapshots: None,
            moved: 0,
        }
    }

    /// Writes a table to new clusters, with `references` references each, not yet durably. Returns
    /// its offset. Tables in holes of a small file could have any size in total.
    fn place(&mut self, table: &[u8], references: i32) -> Result<u64> {
        let image = self.image;
        self.moved += table.len() as u64;
        let what = "the tables that a repair moves in bytes";
        require_within(image.name(), what, self.moved, image.limits.check_bytes_max)?;
        let offset = self.allocate(table.len() as u64, references)?;
        image.storage.write_at(table, HostOffset(offset))?;
        Ok(offset)
    }

    /// Allocates clusters for `bytes` bytes, with `references` references each.
    fn allocate(&mut self, bytes: u64, references: i32) -> Result<u64> {
        let image = self.image;
        let offset = self.next << image.geometry().cluster_bits;
        let clusters = image.clusters_of(offset, bytes);
        let end = clusters.end << image.geometry().cluster_bits;
        if end >= HOST_OFFSET_END {
            let what = "new metadata would be beyond the largest host offset, 2^56";
            return Err(Error::no_space(image.name(), what));
        }
        if !image.storage.caps().growable && end > image.file_len {
            let what = format!("{end} bytes of device for new metadata");
            return Err(Error::no_space(image.name(), what));
        }
        for cluster in clusters.clone() {
            self.target.balance.refer(cluster, references);
        }
        self.target.balance.check_limit(image.name())?;
        self.next = clusters.end;
        Ok(offset)
    }

    /// Moves L2 tables that share their cluster, with corrected entries. Those that map nothing
    /// are not moved; the new L1 tables do not name them.
    fn move_tables(&mut self) -> Result<()> {
        let image = self.image;
        for i in 0..self.target.tables.len() {
            let table = self.target.tables[i];
            if !self.target.in_conflict(image, &table) || table.maps_nothing() {
                continue;
            }
            let mut bytes = image.read_cluster(table.offset)?;
            mapping::repair_table(image, &table, &mut bytes);
            let offset = self.place(&bytes, table.weight())?;
            self.tables.insert(table.offset, offset);
        }
        Ok(())
    }

    fn new_l1(&self, l1: &[u8]) -> Vec<u8> {
        entries::corrected_l1(self.image, &self.target, l1, |offset| {
            self.tables.get(&offset).copied().unwrap_or(offset)
        })
    }

    fn move_l1(&mut self) -> Result<()> {
        if self.target.owner_in_conflict(Owner::ActiveL1) {
            let bytes = self.new_l1(&self.target.l1);
            self.l1 = Some(self.place(&bytes, 1)?);
        }
        Ok(())
    }

    /// Moves L1 tables of snapshots that share their clusters, and the snapshot table itself if it
    /// must change. Returns the offset of the snapshot table.
    fn move_snapshots(&mut self) -> Result<u64> {
        let image = self.image;
        let old = &self.target.snapshots;
        let moved: Vec<usize> = (0..old.snapshots.len())
            .filter(|&i| self.target.owner_in_conflict(Owner::SnapshotL1(i)))
            .collect();
        if moved.is_empty() && !old.rewrite && !self.target.owner_in_conflict(Owner::SnapshotTable)
        {
            return Ok(image.header.snapshots_offset.0);
        }
        let mut snapshots = old.snapshots.clone();
        for i in moved {
            let (offset, bytes) = snapshots[i].l1();
            let bytes = self.new_l1(&image.read_table(offset, bytes)?);
            snapshots[i].entry.l1_offset = HostOffset(self.place(&bytes, 1)?);
        }
        snapshots.retain(|snapshot| !snapshot.lost);
        let table = snapshots::encode(snapshots.iter().map(|snapshot| &snapshot.entry));
        self.snapshots = Some(snapshots);
        if table.is_empty() {
            return Ok(0);
        }
        self.place(&table, 1)
    }

    /// Writes blocks and table for all references. Returns the table's offset and clusters.
    fn write_refcounts(&mut self) -> Result<(u64, u32)> {
        let image = self.image;
        let cluster = image.cluster_bytes();
        let bits = image.geometry().refcount_block_bits();
        let mut blocks = self.target.balance.unbalanced_blocks(bits);
        // Blocks and table need refcounts too, which may need further blocks.
        let table_bytes = loop {
            let count = blocks.len() as u64;
            let table_bytes =
                (blocks.last().map_or(1, |last| last + 1) * 8).next_multiple_of(cluster);
            let what = "the new refcount table in bytes";
            require_within(image.name(), what, table_bytes, REFCOUNT_TABLE_BYTES_MAX)?;
            let end = self.next + count + table_bytes / cluster;
            for block in self.next >> bits..=(end - 1) >> bits {
                if blocks.last().is_none_or(|&last| last < block) {
                    blocks.push(block);
                }
            }
            if blocks.len() as u64 == count {
                break table_bytes;
            }
        };
        let first = self.allocate(blocks.len() as u64 * cluster, 1)?;
        let table = self.allocate(table_bytes, 1)?;
        self.write_blocks(&blocks, first)?;
        let mut bytes = vec![0; table_bytes as usize];
        for (i, &block) in blocks.iter().enumerate() {
            words_mut(&mut bytes)[block as usize].set(first + i as u64 * cluster);
        }
        image.storage.write_at(&bytes, HostOffset(table))?;
        Ok((table, (table_bytes / cluster) as u32))
    }

    fn write_blocks(&self, blocks: &[u64], first: u64) -> Result<()> {
        let geometry = self.image.geometry();
        let max = i128::from(geometry.refcount_max());
        let mut counts = self.target.balance.unbalanced().peekable();
        let mut out = Joined::new(&*self.image.storage);
        let mut bytes = vec![0; geometry.cluster_bytes() as usize];
        for (&block, at) in blocks.iter().zip((first..).step_by(bytes.len())) {
            bytes.fill(0);
            let end = (block + 1) << geometry.refcount_block_bits();
            while let Some((cluster, balance)) = counts.next_if(|&(cluster, _)| cluster < end) {
                let index = cluster & (geometry.refcount_block_entries() - 1);
                let references = (-balance).clamp(0, max) as u64;
                set_refcount(&mut bytes, index, geometry.refcount_order, references);
            }
            out.write(at, &bytes)?;
        }
        out.finish()
    }

    /// The last step, once the new refcounts are in effect: points L1 tables that did not move to
    /// the L2 tables that did.
    fn point_l1s_to_moved_tables(&self) -> Result<()> {
        if self.tables.is_empty() {
            return Ok(());
        }
        let image = self.image;
        if self.l1.is_none() {
            let new = self.new_l1(&self.target.l1);
            image.write_changed(image.header.l1_offset.0, &self.target.l1, &new)?;
        }
        for (i, snapshot) in self.target.snapshots.snapshots.iter().enumerate() {
            if snapshot.lost || self.target.owner_in_conflict(Owner::SnapshotL1(i)) {
                continue;
            }
            let (offset, bytes) = snapshot.l1();
            let l1 = image.read_table(offset, bytes)?;
            image.write_changed(offset, &l1, &self.new_l1(&l1))?;
        }
        Ok(())
    }
}
