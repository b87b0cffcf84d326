//! Finds where new metadata may begin.
//!
//! Entries that name clusters beyond the end of the file read as zeroes or fail. Most of them are
//! repaired before anything new is written. Those in tables that share their cluster with something
//! else can only be repaired after a move. The file must not grow over the clusters that they name:
//! these entries would then expose new metadata as guest data.

use std::ops::Range;

use vdkit_block::Result;

use crate::check::image::Image;
use crate::check::survey::{Owner, Survey};
use crate::entry::L2Entry;
use crate::layout::{L1_BYTES_MAX, OFFSET_MASK};
use crate::structures::words;

/// Range beyond the end of the file in which new metadata avoids such entries. New metadata is
/// rarely that large.
const SKIP_BYTES_MAX: u64 = 2 * L1_BYTES_MAX;

/// The first cluster after all used clusters and after those that dangling entries name.
pub(super) fn first_free(image: &Image, survey: &Survey, target: &Survey) -> Result<u64> {
    let used = survey.balance.end().max(target.balance.end());
    if !image.storage.caps().growable {
        return Ok(used);
    }
    let behind = used.max(image.file_clusters());
    let window = behind..behind + SKIP_BYTES_MAX / image.cluster_bytes();
    let mut dangling = Dangling { image, window, end: behind };
    dangling.tables(survey)?;
    dangling.l1s(survey)?;
    Ok(dangling.end)
}

struct Dangling<'a> {
    image: &'a Image,
    window: Range<u64>,
    /// End of the last named cluster in the window.
    end: u64,
}

impl Dangling<'_> {
    fn add(&mut self, offset: u64, bytes: u64) {
        let clusters = self.image.clusters_of(offset, bytes);
        if self.window.contains(&clusters.start) && clusters.end <= self.window.end {
            self.end = self.end.max(clusters.end);
        }
    }

    fn tables(&mut self, survey: &Survey) -> Result<()> {
        let image = self.image;
        for table in survey.tables.iter().filter(|table| table.lossy) {
            if !survey.in_conflict(image, table) {
                continue;
            }
            for entry in L2Entry::all(&image.read_cluster(table.offset)?, image.geometry()) {
                let (offset, bytes) = entry.named_bytes(image.geometry());
                self.add(offset.0, bytes);
            }
        }
        Ok(())
    }

    fn l1s(&mut self, survey: &Survey) -> Result<()> {
        if survey.owner_in_conflict(Owner::ActiveL1) {
            self.l1(&survey.l1);
        }
        for (i, snapshot) in survey.snapshots.snapshots.iter().enumerate() {
            let (offset, bytes) = snapshot.l1();
            if snapshot.lost {
                // A larger table cannot be recovered.
                if bytes <= L1_BYTES_MAX {
                    self.add(offset, bytes);
                }
            } else if survey.owner_in_conflict(Owner::SnapshotL1(i)) {
                self.l1(&self.image.read_table(offset, bytes)?);
            }
        }
        Ok(())
    }

    fn l1(&mut self, l1: &[u8]) {
        for entry in words(l1) {
            self.add(entry.get() & OFFSET_MASK, self.image.cluster_bytes());
        }
    }
}
