//! Tracks free and used clusters, and changes refcounts on disk.

use std::collections::BTreeSet;
use std::sync::Arc;

use vdkit_block::{HostOffset, Limits, Monitor, Result, SparseReader, Storage};

use crate::check::balance::METADATA;
use crate::check::image::{Image, add_to_runs};
use crate::check::survey::{Mode, Survey};

/// Most clusters without a reference before they are freed.
const GONE_MAX: usize = 1 << 16;

/// A sound image that nothing else changes, with the reference count of each cluster.
pub(in crate::check) struct Space<'a> {
    pub(in crate::check) image: Image,
    pub(in crate::check) survey: Survey,
    pub(in crate::check) monitor: &'a Monitor<'a>,
    /// No cluster below is free.
    low: u64,
    /// Clusters whose refcount on disk differs from memory.
    changed: BTreeSet<u64>,
}

impl<'a> Space<'a> {
    pub(in crate::check) fn load(
        storage: &Arc<dyn Storage>,
        limits: &Limits,
        monitor: &'a Monitor<'a>,
    ) -> Result<Self> {
        let image = Image::open(storage, limits)?;
        // Progress covers the work, not this survey.
        let quiet = monitor.quiet();
        let mut survey = Survey::take(&image, Mode::References, &quiet)?;
        survey.count_refcount_structures(&image);
        survey.balance.check_limit(image.name())?;
        Ok(Self { image, survey, monitor, low: 0, changed: BTreeSet::new() })
    }

    pub(in crate::check) fn offset(&self, cluster: u64) -> u64 {
        cluster << self.image.geometry().cluster_bits
    }

    pub(in crate::check) fn references(&self, cluster: u64) -> u64 {
        (-self.survey.balance.balance(cluster)).clamp(0, i128::from(u64::MAX)) as u64
    }

    pub(in crate::check) fn is_metadata(&self, cluster: u64) -> bool {
        self.survey.balance.word(cluster) & METADATA != 0
    }

    /// Clusters in use from `from` on, with their references.
    pub(in crate::check) fn used_from(&self, from: u64) -> impl Iterator<Item = (u64, u64)> {
        let used = self.survey.balance.unbalanced().filter(move |&(cluster, _)| cluster >= from);
        used.map(|(cluster, balance)| (cluster, (-balance).max(0) as u64))
    }

    /// One more than the highest cluster in use.
    pub(in crate::check) fn used_end(&self) -> u64 {
        self.used_from(0).last().map_or(1, |(cluster, _)| cluster + 1)
    }

    /// The smallest possible number of clusters of the file: all used clusters without gaps, except
    /// ranges without a refcount block, and without the blocks that would describe nothing.
    pub(in crate::check) fn ideal_end(&self) -> u64 {
        let bits = self.image.geometry().refcount_block_bits();
        let blocks = &self.survey.refcounts.blocks;
        let present = blocks.iter().filter(|&&block| block != 0).count() as u64;
        let others = (self.used_from(0).count() as u64).saturating_sub(present);
        let (mut room, mut needed) = (0, 0);
        for (index, _) in blocks.iter().enumerate().filter(|&(_, &block)| block != 0) {
            needed += 1;
            let before = room;
            room += 1 << bits;
            if room >= others + needed {
                return ((index as u64) << bits) + others + needed - before;
            }
        }
        self.used_end()
    }

    /// Takes the lowest free run of `count` clusters with refcounts that ends at or below `end`.
    pub(in crate::check) fn take_run(&mut self, count: u64, end: u64) -> Option<u64> {
        let bits = self.image.geometry().refcount_block_bits();
        let mut start = self.low;
        let mut at = start;
        while at < end {
            if self.survey.refcounts.block_of(&self.image, at).is_none() {
                at = ((at >> bits) + 1) << bits;
                start = at;
                continue;
            }
            let free = self.references(at) == 0;
            at += 1;
            if !free {
                start = at;
            } else if at - start == count {
                if count == 1 {
                    // All clusters below are in use.
                    self.low = at;
                }
                return Some(start);
            }
        }
        if count == 1 {
            self.low = end;
        }
        None
    }

    /// Adds `times` references to a cluster; see [`Space::write_refcounts`].
    pub(in crate::check) fn refer(&mut self, cluster: u64, times: i64) {
        let times = times.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32;
        self.survey.balance.refer(cluster, times);
        self.changed.insert(cluster);
    }

    /// Writes changed refcounts, not yet durably.
    pub(in crate::check) fn write_refcounts(&mut self) -> Result<()> {
        self.survey.balance.check_limit(self.image.name())?;
        let changed = std::mem::take(&mut self.changed).into_iter();
        let references = |cluster: u64, _: u64| self.references(cluster);
        self.survey.refcounts.change(&self.image, changed, references).map(drop)
    }

    /// Copies clusters. Holes stay holes.
    pub(in crate::check) fn copy(&self, from: u64, to: u64, clusters: u64) -> Result<()> {
        let at = |cluster| HostOffset(self.offset(cluster));
        let mut reader = SparseReader::new(&*self.image.storage)?;
        reader.copy(at(from), at(to), self.offset(clusters), false)
    }

    /// Drops references that entries no longer make: each cluster with their number. Once that is
    /// durable, discards the clusters that have none left.
    pub(in crate::check) fn release(
        &mut self,
        gone: impl IntoIterator<Item = (u64, u64)>,
    ) -> Result<()> {
        // The entries must be durably removed first.
        self.sync()?;
        let mut clusters = Vec::new();
        for (cluster, references) in gone {
            self.refer(cluster, -(references as i64));
            clusters.push(cluster);
        }
        self.write_refcounts()?;
        self.sync()?;
        clusters.sort_unstable();
        let mut runs = Vec::new();
        for cluster in clusters {
            if self.references(cluster) == 0 {
                add_to_runs(&mut runs, cluster);
            }
        }
        runs.into_iter().for_each(|run| self.image.punch(run));
        Ok(())
    }

    /// [`Space::release`] of all in the list, if there are many.
    pub(in crate::check) fn release_many(&mut self, gone: &mut Vec<(u64, u64)>) -> Result<()> {
        if gone.len() < GONE_MAX { Ok(()) } else { self.release(gone.drain(..)) }
    }

    /// Makes all writes durable.
    pub(in crate::check) fn sync(&self) -> Result<()> {
        self.monitor.cancel.check()?;
        self.image.storage.sync()
    }

    pub(in crate::check) fn batch_clusters(&self) -> u64 {
        (super::BATCH_BYTES / self.image.cluster_bytes()).clamp(1, super::BATCH_CLUSTERS_MAX)
    }
}
