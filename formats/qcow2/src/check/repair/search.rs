//! Searches for unreferenced clusters that can only be L2 tables.
//!
//! A walk over all reachable metadata yields the references to a cluster. Its refcount shows
//! whether it was in use, but only if the refcount can be trusted. A refcount block that is missing
//! or all zero may have been wiped. If one zero sector of a block declares a used cluster as free,
//! all zero sectors of that block may have been wiped. The clusters that these describe may be in
//! use.

use std::ops::Range;

use rustc_hash::FxHashSet;
use vdkit_block::{HostOffset, Monitor, Result, is_zero, require_within};

use super::orphans::Kept;
use crate::check::balance::{Balance, METADATA, SINGLE};
use crate::check::image::{Image, add_to_runs};
use crate::check::reader::{self, Meter};
use crate::check::survey::{Mode, Owner, Survey};
use crate::entry::L2Entry;
use crate::layout::SECTOR;
use crate::refcounts::get_refcount;
use crate::structures::words;

/// Candidates per batch of reads.
const PART: usize = 4096;
/// If no refcount confirms a table, at most one in this many clusters that it claims as its own may
/// be referenced by something else.
const OTHERS_MAX: u64 = 8;

/// Clusters to search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// Clusters with a refcount.
    Leaks,
    /// Also clusters without a refcount, if that cannot be trusted.
    Everything,
}

/// Whether to accept tables without any COPIED flag and compressed cluster. Only snapshots have
/// such tables, but other clusters look like them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flagless {
    No,
    /// If they share data with an existing table.
    Sharing,
    Yes,
}

/// See the module documentation.
pub(super) struct Search<'a> {
    image: &'a Image,
    survey: &'a Survey,
    scope: Scope,
    /// References only, including those of the refcount structures.
    references: Balance,
    /// No refcount can be trusted.
    unsound: bool,
    /// Refcount blocks that cannot be trusted.
    untrusted_blocks: FxHashSet<u64>,
    /// Sectors of other blocks that cannot be trusted, by the first cluster that each describes.
    untrusted_sectors: FxHashSet<u64>,
    /// Index after the last existing block.
    behind: u64,
    flagless: Flagless,
    /// Offsets of candidates that are still to be read.
    part: Vec<u64>,
    kept: Kept,
    /// Clusters that only one table maps; a reused buffer.
    mapped: Vec<Range<u64>>,
}

impl<'a> Search<'a> {
    /// Collects all references, and determines which refcounts to trust.
    pub(super) fn new(
        image: &'a Image,
        survey: &'a Survey,
        scope: Scope,
        monitor: &Monitor<'_>,
    ) -> Result<Self> {
        let unsound = !survey.refcounts.sound || survey.owner_in_conflict(Owner::Refcounts);
        let mut references = Survey::take(image, Mode::References, monitor)?;
        if !unsound {
            references.count_refcount_structures(image);
        }
        let mut search = Self {
            image,
            survey,
            scope,
            references: references.balance,
            unsound,
            untrusted_blocks: FxHashSet::default(),
            untrusted_sectors: FxHashSet::default(),
            behind: 0,
            flagless: Flagless::No,
            part: Vec::new(),
            kept: Kept::default(),
            mapped: Vec::new(),
        };
        search.references.check_limit(image.name())?;
        search.find_untrusted(monitor)?;
        Ok(search)
    }

    /// Whether all refcounts can be trusted.
    pub(super) fn trusts_all(&self) -> bool {
        !self.unsound && self.untrusted_blocks.is_empty() && self.untrusted_sectors.is_empty()
    }

    /// Finds blocks and sectors that cannot be trusted.
    fn find_untrusted(&mut self, monitor: &Monitor<'_>) -> Result<()> {
        if self.unsound {
            return Ok(());
        }
        let image = self.image;
        let bits = image.geometry().refcount_block_bits();
        let sector = self.sector_clusters();
        let low = self.survey.balance.unbalanced().filter(|&(_, balance)| balance < 0);
        let low: FxHashSet<u64> = low.map(|(cluster, _)| cluster / sector * sector).collect();
        let blocks = &self.survey.refcounts.blocks;
        let last = blocks.iter().rposition(|&block| block != 0);
        self.behind = last.map_or(0, |last| last as u64 + 1);
        let mut present = Vec::new();
        let all = image.file_clusters().div_ceil(1 << bits);
        for (block, index) in blocks.iter().zip(0..self.behind.min(all)) {
            if *block == 0 {
                self.untrusted_blocks.insert(index);
            } else {
                present.push((*block, index));
            }
        }
        // On a device, clusters after the last described one were never in use.
        if self.behind < all && (image.storage.caps().growable || last.is_none()) {
            self.untrusted_blocks.insert(self.behind);
        }
        present.sort_unstable();
        let offsets: Vec<u64> = present.iter().map(|&(offset, _)| offset).collect();
        let mut meter = Meter::new(monitor);
        let bytes = image.cluster_bytes();
        reader::for_each_cluster(&*image.storage, &offsets, bytes, &mut meter, |i, block| {
            let index = present[i].1;
            if is_zero(block) {
                self.untrusted_blocks.insert(index);
                return Ok(());
            }
            let first = index << bits;
            let sectors = block.chunks(SECTOR).zip((first..).step_by(sector as usize));
            let wiped: Vec<u64> =
                sectors.filter(|(bytes, _)| is_zero(bytes)).map(|(_, first)| first).collect();
            if wiped.iter().any(|first| low.contains(first)) {
                self.untrusted_sectors.extend(wiped);
                self.check_limit(self.untrusted_sectors.len() as u64)?;
            }
            Ok(())
        })
    }

    /// Clusters that one sector of a refcount block describes: a sector is the smallest range that
    /// can be wiped.
    fn sector_clusters(&self) -> u64 {
        (SECTOR as u64 * 8) >> self.image.geometry().refcount_order
    }

    /// Whether the refcount of a cluster cannot be trusted.
    fn is_untrusted(&self, cluster: u64) -> bool {
        if self.unsound {
            return true;
        }
        let block = cluster >> self.image.geometry().refcount_block_bits();
        let sector = self.sector_clusters();
        // All blocks after the last one are treated like the first of them.
        self.untrusted_blocks.contains(&block.min(self.behind))
            || self.untrusted_sectors.contains(&(cluster / sector * sector))
    }

    fn refcount(&self, cluster: u64) -> i128 {
        self.survey.balance.balance(cluster) + self.references(cluster)
    }

    fn references(&self, cluster: u64) -> i128 {
        -self.references.balance(cluster)
    }

    /// Whether a cluster may be in use.
    fn is_used(&self, cluster: u64) -> bool {
        self.survey.balance.word(cluster) & SINGLE != 0
            || self.refcount(cluster) > 0
            || self.is_untrusted(cluster)
    }

    /// Whether nothing refers to a cluster.
    fn is_orphan(&self, cluster: u64) -> bool {
        self.references(cluster) == 0
    }

    /// Examines all candidates.
    pub(super) fn run(mut self, flagless: Flagless, monitor: &Monitor<'_>) -> Result<Kept> {
        self.flagless = flagless;
        let survey = self.survey;
        let leaked = survey.balance.unbalanced().filter(|&(_, balance)| balance > 0);
        let mut meter = Meter::new(monitor);
        for (cluster, balance) in leaked {
            let lost = self.is_orphan(cluster) && cluster < self.image.file_clusters();
            if lost && self.refcount(cluster) == balance {
                self.add(cluster, &mut meter)?;
            }
        }
        if self.scope == Scope::Everything && !self.trusts_all() {
            self.add_untrusted(&mut meter)?;
        }
        self.look(&mut meter)?;
        let mut kept = self.kept;
        kept.tables.sort_unstable();
        merge(&mut kept.clusters);
        Ok(kept)
    }

    /// Adds unreferenced clusters whose refcount is 0 but not trusted.
    fn add_untrusted(&mut self, meter: &mut Meter<'_, '_>) -> Result<()> {
        let image = self.image;
        let bits = image.geometry().cluster_bits;
        let sector = self.sector_clusters();
        let holes = image.storage.may_have_holes()?;
        let mut at = 1;
        while at < image.file_clusters() {
            if !self.is_untrusted(at) {
                at = (at / sector + 1) * sector;
                continue;
            }
            let mut end = image.file_clusters().min((at / sector + 1) * sector);
            if holes {
                let len = image.file_len - (at << bits);
                let extent = image.storage.extent_at(HostOffset(at << bits), len)?;
                if !extent.data && extent.len >> bits > 0 {
                    at += extent.len >> bits;
                    continue;
                }
                end = end.min(at + extent.len.div_ceil(1 << bits).max(1));
            }
            for cluster in at..end {
                if self.is_orphan(cluster) && self.survey.balance.balance(cluster) == 0 {
                    self.add(cluster, meter)?;
                }
            }
            meter.monitor.cancel.check()?;
            at = end;
        }
        Ok(())
    }

    fn add(&mut self, cluster: u64, meter: &mut Meter<'_, '_>) -> Result<()> {
        self.part.push(cluster << self.image.geometry().cluster_bits);
        if self.part.len() < PART { Ok(()) } else { self.look(meter) }
    }

    /// Reads the candidates of a batch.
    fn look(&mut self, meter: &mut Meter<'_, '_>) -> Result<()> {
        let image = self.image;
        let bytes = image.cluster_bytes();
        let part = std::mem::take(&mut self.part);
        reader::for_each_cluster(&*image.storage, &part, bytes, meter, |i, bytes| {
            if is_zero(bytes) {
                return Ok(());
            }
            if let Some(mapped) = self.judge(part[i], bytes)? {
                self.kept.tables.push((part[i], mapped));
                let own = part[i] >> image.geometry().cluster_bits;
                self.kept.clusters.push(own..own + 1);
                self.kept.clusters.append(&mut self.mapped);
                self.stay_within_limit()?;
            }
            Ok(())
        })
    }

    /// Returns the number of clusters that only this lost table maps, and leaves them in `mapped`.
    /// Returns `None` if this is not a lost table: if not all its entries are plausible, or if
    /// freeing it would lose nothing. For example, a copy of an existing table, as an interrupted
    /// repair leaves it, names the same clusters.
    fn judge(&mut self, own: u64, bytes: &[u8]) -> Result<Option<u64>> {
        let image = self.image;
        let geometry = image.geometry();
        let data_file = image.header.has_data_file();
        let mut mapped = std::mem::take(&mut self.mapped);
        mapped.clear();
        let (mut lost, mut others, mut flags, mut zeroes) = (0u64, 0u64, false, false);
        let mut shares = false;
        let mut possible = true;
        for entry in L2Entry::all(bytes, geometry) {
            if entry == L2Entry::default() {
                continue;
            }
            // In a data file, data is at its guest offset, which is unknown here: assumes the
            // entry's own.
            let guest = entry.host().0;
            possible &= image.judge_l2(entry, guest).1.is_empty();
            if !possible {
                break;
            }
            flags |= entry.is_compressed() || entry.is_copied();
            if !entry.is_compressed() && !entry.has_space(data_file) {
                zeroes = true;
                continue;
            }
            if data_file {
                // The data is in the data file, and stays there.
                lost += 1;
                continue;
            }
            let (offset, bytes) = entry.named_bytes(geometry);
            for cluster in image.clusters_of(offset.0, bytes) {
                possible &= cluster != own >> geometry.cluster_bits && self.is_used(cluster);
                if self.is_orphan(cluster) {
                    lost += 1;
                    add_to_runs(&mut mapped, cluster);
                } else {
                    others += u64::from(entry.is_copied() || self.is_metadata(cluster));
                    shares |= !self.is_metadata(cluster);
                }
            }
        }
        let has_refcount = self.refcount(own >> geometry.cluster_bits) > 0 && !self.unsound;
        // A table of only zero entries hides the backing file. Without a refcount, a block of
        // 64-bit refcounts looks the same.
        let hides = zeroes
            && lost + others == 0
            && image.header.backing_name.is_some()
            && (has_refcount || geometry.refcount_order < 6);
        let counts = match self.flagless {
            Flagless::No => false,
            Flagless::Sharing => shares,
            Flagless::Yes => true,
        };
        let is_table = possible
            && (lost > 0 || hides)
            && (flags || counts && !self.is_refcount_table(bytes)? || hides)
            && (has_refcount || others * OTHERS_MAX <= lost);
        let count = mapped.iter().map(|run| run.end - run.start).sum();
        self.mapped = mapped;
        Ok(is_table.then_some(count))
    }

    fn is_metadata(&self, cluster: u64) -> bool {
        self.references.word(cluster) & METADATA != 0
    }

    /// Whether a cluster holds the start of an unreferenced refcount table: its first block has
    /// refcounts of 1 for the header and for itself, and none beyond the end of the file.
    fn is_refcount_table(&self, table: &[u8]) -> Result<bool> {
        let image = self.image;
        let geometry = image.geometry();
        let entries = geometry.refcount_block_entries();
        let first = words(table)[0].get();
        if first == 0 || first & (image.cluster_bytes() - 1) != 0 || first >= image.file_len {
            return Ok(false);
        }
        let block = image.read_cluster(first)?;
        let own = first >> geometry.cluster_bits;
        let refcount = |cluster: u64| get_refcount(&block, cluster, geometry.refcount_order);
        let behind = |cluster: u64| cluster >= image.file_clusters() && refcount(cluster) > 0;
        let once = |cluster: u64| refcount(cluster) == 1;
        Ok(once(0) && (own >= entries || once(own)) && !(0..entries).any(behind))
    }

    /// Fails above the memory limit. Merges runs first, so that clusters of several tables count
    /// once.
    fn stay_within_limit(&mut self) -> Result<()> {
        let places = |kept: &Kept| (kept.tables.len() + kept.clusters.len()) as u64;
        if self.check_limit(places(&self.kept)).is_err() {
            merge(&mut self.kept.clusters);
        }
        self.check_limit(places(&self.kept))
    }

    /// Fails if `places` entries of 16 bytes exceed the memory limit.
    fn check_limit(&self, places: u64) -> Result<()> {
        let what = "the memory for what looks like lost tables in bytes";
        require_within(self.image.name(), what, places * 16, self.image.limits.check_bytes_max)
    }
}

fn merge(clusters: &mut Vec<Range<u64>>) {
    clusters.sort_unstable_by_key(|run| (run.start, run.end));
    let mut merged: Vec<Range<u64>> = Vec::new();
    for run in clusters.drain(..) {
        match merged.last_mut() {
            Some(last) if run.start <= last.end => last.end = last.end.max(run.end),
            _ => merged.push(run),
        }
    }
    *clusters = merged;
}
