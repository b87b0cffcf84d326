//! Compacts an image in place: frees blocks of zeroes, moves blocks at the end into gaps, and
//! truncates the file.
//!
//! The copy of a block is durable before the entry that names it, and the old space is not reused
//! before that entry is durable. So a power cut leaves each block in one of the two places.

use vdkit_block::{
    CompactOptions, CompactReport, Compaction, CopyMethod, CopyOp, Error, HostOffset, LeftAlone,
    Monitor, OfflineImage, Remedy, Repair, Result, Severity, SparseReader, punch_zeroes,
};

use crate::check;
use crate::driver::VhdxDriver;
use crate::image::Vhdx;
use crate::layout::{BITMAP_BYTES, BatEntry, MIB, PRESENT, State};

/// Most bytes that are stored twice at a time, but at least one block.
const BATCH_BYTES: u64 = 16 * MIB;
/// Most table entries of an image whose blocks are moved: they are sorted in memory.
const ENTRIES_MAX: u64 = 128 << 10;

impl Compaction for VhdxDriver {
    fn compact(&self, image: &OfflineImage<'_>, options: CompactOptions) -> Result<CompactReport> {
        let (storage, limits, monitor) = (image.storage, &image.limits, &image.monitor);
        refuse_damage(image)?;
        let mut report = CompactReport {
            length_before: storage.len()?,
            allocated_before: storage.allocated_bytes()?,
            ..CompactReport::default()
        };
        let image = Vhdx::open_writable(storage, limits)?;
        let compacted = image.compact_blocks(options, monitor, &mut report);
        // Also after an error: other programs must replay the log of an image that is not closed.
        let closed = image.meta.close(&*image);
        compacted.and(closed)?;
        report.left_alone = image.bitmaps_at_end()?;
        if options.zero_scan {
            report.punched_bytes = punch_zeroes(&**storage, monitor)?;
        }
        report.length_after = storage.len()?;
        report.allocated_after = storage.allocated_bytes()?;
        Ok(report)
    }
}

/// Fails on damage: space that two entries name must not be freed for one of them.
fn refuse_damage(image: &OfflineImage<'_>) -> Result<()> {
    let report = check::check(image, Repair::Nothing)?;
    let damage = report.findings.iter().find(|found| found.severity == Severity::Corruption);
    match damage {
        None => Ok(()),
        Some(found) => Err(Error::corrupt(
            image.storage.name(),
            found.offset,
            found.structure,
            found.message.clone(),
            "a sound image",
        )
        .with_remedy(Remedy::REPAIR)),
    }
}

impl Vhdx {
    /// Frees blocks of zeroes and moves the others. Each step leaves a sound image.
    fn compact_blocks(
        &self,
        options: CompactOptions,
        monitor: &Monitor<'_>,
        report: &mut CompactReport,
    ) -> Result<()> {
        if self.fixed {
            return Ok(());
        }
        self.begin_metadata_session()?;
        if options.zero_scan {
            report.zero_clusters = self.drop_zero_blocks(monitor)?;
        }
        self.meta.flush(self)?;
        report.moved_clusters = self.move_blocks(monitor)?;
        Ok(())
    }

    /// Frees blocks that hold only zeroes. Returns their number.
    fn drop_zero_blocks(&self, monitor: &Monitor<'_>) -> Result<u64> {
        let blocks = self.geometry.blocks(self.guest_len());
        let mut reader = SparseReader::new(&*self.storage)?;
        let mut dropped = 0;
        self.for_blocks(&(0..blocks), |meta, block, old| {
            monitor.cancel.check()?;
            monitor.progress.update(block, blocks);
            let full = self.state_of(block, old)? == State::FullyPresent;
            let (host, len) = (HostOffset(old.host()), self.geometry.block_bytes());
            if full && reader.is_zero(host, len, true)? {
                self.replace(meta, block, old, BatEntry::ZERO)?;
                dropped += 1;
            }
            Ok(())
        })?;
        Ok(dropped)
    }

    /// Moves blocks from the end of the file into gaps before them. Returns their number.
    fn move_blocks(&self, monitor: &Monitor<'_>) -> Result<u64> {
        if self.geometry.bat_entries(self.guest_len()) > ENTRIES_MAX {
            return Ok(0);
        }
        let unit = self.geometry.block_bytes();
        let mut present = Vec::new();
        for block in 0..self.geometry.blocks(self.guest_len()) {
            let entry = self.payload(block)?;
            self.state_of(block, entry)?;
            if entry.has_data() {
                present.push((entry.host(), self.geometry.payload_index(block)));
            }
        }
        present.sort_unstable();
        let mut reader = SparseReader::new(&*self.storage)?;
        let (mut moved, mut waiting) = (0, 0);
        while let Some((host, index)) = present.pop() {
            monitor.cancel.check()?;
            let mut meta = self.meta.lock();
            let Some(to) = self.space(&mut meta)?.take_below(&*self.storage, unit, host)? else {
                break;
            };
            self.copy_block(&mut reader, HostOffset(host), HostOffset(to))?;
            let entry = self.entry(index)?;
            self.set_entry(index, BatEntry(to | entry.state_bits()))?;
            meta.data_first = true;
            self.unlink(&mut meta, host, unit);
            drop(meta);
            (moved, waiting) = (moved + 1, waiting + unit);
            if waiting >= BATCH_BYTES || self.pages.dirty() > 64 {
                self.meta.flush(self)?;
                waiting = 0;
            }
        }
        self.meta.flush(self)?;
        Ok(moved)
    }

    /// Copies a block to space that reads as zero.
    fn copy_block(
        &self,
        reader: &mut SparseReader<'_>,
        from: HostOffset,
        to: HostOffset,
    ) -> Result<()> {
        let (storage, len) = (&*self.storage, self.geometry.block_bytes());
        let op = CopyOp { to, source: storage, from, len, method: CopyMethod::Reflink };
        let shared = storage.copy_from(&op)?;
        reader.copy(from + shared, to + shared, len - shared, true)
    }

    /// Reports a sector bitmap at the end of the file, which cannot be moved.
    fn bitmaps_at_end(&self) -> Result<Vec<LeftAlone>> {
        if !self.geometry.has_parent {
            return Ok(Vec::new());
        }
        let (end, chunk) = (self.storage.len()?, 1 << self.geometry.chunk_bits());
        for block in (0..self.geometry.blocks(self.guest_len())).step_by(chunk) {
            let entry = self.entry(self.geometry.bitmap_index(block))?;
            if entry.state_bits() == PRESENT && entry.host() + BITMAP_BYTES == end {
                let what = "sector bitmaps, which stay where they are";
                return Ok(vec![LeftAlone { what, clusters: 1 }]);
            }
        }
        Ok(Vec::new())
    }
}
