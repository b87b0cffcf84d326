//! One walk over all metadata of an image: collects references and faults.
//!
//! First the refcounts of the image are loaded into the [`Balance`]. Then each structure subtracts
//! its references and marks its clusters as metadata, and finally the L2 tables subtract those of
//! guest data. Any remaining difference is an error.

use std::ops::Range;

use rustc_hash::{FxHashMap, FxHashSet};
use vdkit_block::{CheckReport, Monitor, Result, Severity, require_within};

use super::balance::{Balance, CHECK_MEMORY, METADATA, SINGLE};
use super::bitmaps::{self, Presence};
use super::image::{Image, L1Fault};
use super::mapping::{L2Table, Scan, wrong_copied};
use super::reader::{self, Meter};
use super::refcounts::{Lookup, Refcounts};
use super::snapshots::SnapshotTable;
use crate::layout::{COPIED, OFFSET_MASK, autoclear, extension, incompatible};
use crate::structures::{header_offset, words};

/// Purpose of the walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Refcounts against references, with findings.
    Compare,
    /// References only, without those of the refcount structures: the basis of a new set of
    /// refcounts.
    References,
}

/// Owner of a range of clusters other than L2 tables and data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Owner {
    Header,
    /// The refcount table or one of its blocks.
    Refcounts,
    Encryption,
    ActiveL1,
    SnapshotTable,
    /// The L1 table of the snapshot with this index.
    SnapshotL1(usize),
    /// Directory, table or data of a bitmap.
    Bitmap,
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Header => "the header",
            Self::Refcounts => "the refcount table or a refcount block",
            Self::Encryption => "the encryption header",
            Self::ActiveL1 => "the active L1 table",
            Self::SnapshotTable => "the snapshot table",
            Self::SnapshotL1(_) => "a snapshot's L1 table",
            Self::Bitmap => "a bitmap",
        })
    }
}

/// Result of the walk.
#[derive(Debug, Default)]
pub(super) struct Survey {
    pub(super) report: CheckReport,
    pub(super) balance: Balance,
    pub(super) refcounts: Refcounts,
    /// The active L1 table, uncorrected.
    pub(super) l1: Vec<u8>,
    /// Some active L1 entry is damaged.
    pub(super) l1_faulty: bool,
    /// Some L1 entry must be cleared, which loses the mapping of its range.
    pub(super) l1_lossy: bool,
    /// COPIED flags of active L1 entries that disagree with the refcount.
    pub(super) l1_copied_wrong: u64,
    /// Each L2 table once, in the order of host offsets.
    pub(super) tables: Vec<L2Table>,
    pub(super) snapshots: SnapshotTable,
    pub(super) snapshot_l1_faulty: FxHashSet<usize>,
    /// The bitmaps are damaged although their autoclear bit is set.
    pub(super) bitmaps_broken: bool,
    /// Clusters of the directory of bitmaps that a program without bitmap support, or a repair that
    /// was interrupted, has made inconsistent.
    stale_directory: Range<u64>,
    /// Single damaged bitmaps: offsets of their entries in the directory.
    pub(super) broken_bitmaps: Vec<usize>,
    /// Metadata clusters that something else uses too.
    pub(super) conflicts: FxHashSet<u64>,
    /// Clusters whose refcount is too low.
    pub(super) low: u64,
    /// Some of these have no refcount block.
    pub(super) low_without_block: bool,
    /// Some of these have more references than a refcount can count.
    pub(super) overfull: bool,
    /// Unreferenced clusters beyond the end of the file that have a refcount.
    pub(super) ahead: u64,
    owners: Vec<(Range<u64>, Owner)>,
    owners_in_conflict: FxHashSet<Owner>,
}

impl Survey {
    /// Walks over all metadata.
    pub(super) fn take(image: &Image, mode: Mode, monitor: &Monitor<'_>) -> Result<Self> {
        let balance = Balance::new(image.file_clusters(), image.limits.check_bytes_max);
        let mut survey = Self { balance, ..Self::default() };
        let mut meter = Meter::new(monitor);
        survey.refcounts = Refcounts::read(image, &mut survey.report)?;
        if mode == Mode::Compare {
            survey.header_faults(image);
            survey.refcounts.load(image, &mut survey.balance, &mut meter)?;
        }
        survey.fixed_places(image, mode)?;
        let mut uses = L2Uses::default();
        survey.active_l1(image, &mut uses)?;
        survey.snapshot_l1s(image, &mut uses, monitor)?;
        survey.bitmaps(image, monitor, mode)?;
        survey.balance.check_limit(image.name())?;
        survey.l2_tables(image, uses, &mut meter)?;
        survey.keep(image)?;
        survey.find_owners_in_conflict();
        if mode == Mode::Compare {
            survey.compare(image)?;
        }
        let report = &mut survey.report;
        report.total_clusters = (image.header.guest_bytes & !511).div_ceil(image.cluster_bytes());
        report.image_end_offset = survey.balance.end().max(1).saturating_mul(image.cluster_bytes());
        Ok(survey)
    }

    fn header_faults(&mut self, image: &Image) {
        for fault in &image.header_faults {
            self.report.corruption(fault.offset, fault.structure, || {
                format!("found {}, expected {}", fault.found, fault.expected)
            });
        }
        if image.header.autoclear & autoclear::DATA_FILE_RAW != 0 && !image.header.has_data_file() {
            self.report.corruption(header_offset!(autoclear_features), "header", || {
                "found the raw data file bit without a data file".to_owned()
            });
        }
        if !image.header.has_data_file() && image.header.data_file_name().is_some() {
            self.report.corruption(header_offset!(incompatible_features), "header", || {
                "found the name of a data file without the bit that says there is one".to_owned()
            });
        }
        if image.header.has(incompatible::CORRUPT) {
            self.report.corruption(header_offset!(incompatible_features), "corrupt bit", || {
                "the image is marked corrupt: some program found it damaged while using it"
                    .to_owned()
            });
        }
    }

    /// Counts one reference to each cluster of a range. Returns whether nothing else uses the
    /// range.
    fn take_range(
        &mut self,
        image: &Image,
        structure: &'static str,
        offset: u64,
        bytes: u64,
        owner: Owner,
    ) -> bool {
        let range = image.clusters_of(offset, bytes);
        let mut free = true;
        for cluster in range.clone() {
            free &= self.take_cluster(image, structure, cluster, 1);
        }
        match self.owners.last_mut() {
            // Merged, since there are thousands of refcount blocks and bitmap clusters.
            Some((last, same)) if *same == owner && last.end == range.start => {
                last.end = range.end;
            }
            _ => self.owners.push((range, owner)),
        }
        free
    }

    /// Counts references to a cluster of metadata. Returns whether nothing else uses it.
    fn take_cluster(
        &mut self,
        image: &Image,
        structure: &'static str,
        cluster: u64,
        references: i32,
    ) -> bool {
        self.balance.refer(cluster, references);
        if self.balance.mark_metadata(cluster) & METADATA == 0 {
            return true;
        }
        self.conflicts.insert(cluster);
        let (owners, offset) = (&self.owners, cluster << image.geometry().cluster_bits);
        // Searched only for a finding that is listed: a hostile image has a million of both.
        self.report.corruption(offset, structure, || {
            match owners.iter().find(|(range, _)| range.contains(&cluster)) {
                Some((_, other)) => format!("this cluster belongs to {other} too"),
                None => "this cluster belongs to other metadata too".to_owned(),
            }
        });
        false
    }

    fn fixed_places(&mut self, image: &Image, mode: Mode) -> Result<()> {
        let cluster = image.cluster_bytes();
        self.take_range(image, "header", 0, cluster, Owner::Header);
        if mode == Mode::Compare {
            let bytes = u64::from(image.header.refcount_table_clusters) * cluster;
            let offset = image.header.refcount_table_offset.0;
            self.take_range(image, "refcount table", offset, bytes, Owner::Refcounts);
            for i in 0..self.refcounts.blocks.len() {
                let offset = self.refcounts.blocks[i];
                if offset != 0 {
                    self.take_range(image, "refcount block", offset, cluster, Owner::Refcounts);
                }
            }
        }
        match image.encryption_header() {
            None => {}
            Some(Ok((offset, bytes))) => {
                self.take_range(image, "encryption header", offset, bytes, Owner::Encryption);
            }
            Some(Err((offset, bytes))) => {
                let at = image.header.extension_offset(extension::ENCRYPTION);
                self.report.corruption(at, "encryption header", || {
                    format!(
                        "found {bytes} bytes at {offset:#x}, expected them at a cluster boundary \
                         within the file (cannot be repaired: all data is lost without it)"
                    )
                });
            }
        }
        Ok(())
    }

    fn active_l1(&mut self, image: &Image, uses: &mut L2Uses) -> Result<()> {
        let offset = image.header.l1_offset.0;
        let bytes = u64::from(image.header.l1_entries) * 8;
        self.take_range(image, "active L1 table", offset, bytes, Owner::ActiveL1);
        let l1 = image.read_table(offset, bytes)?;
        self.l1_faulty = self.l1_entries(image, offset, &l1, uses, true);
        self.l1 = l1;
        uses.check_limit(image)
    }

    /// Collects the L2 tables of an L1 table at `offset`: the active one or that of a snapshot.
    /// Returns whether some entry is damaged.
    fn l1_entries(
        &mut self,
        image: &Image,
        offset: u64,
        l1: &[u8],
        uses: &mut L2Uses,
        active: bool,
    ) -> bool {
        let structure = if active { "active L1 entry" } else { "snapshot L1 entry" };
        let mut faulty = false;
        for (index, word) in words(l1).iter().enumerate() {
            let raw = word.get();
            let (mut corrected, mut fault) = image.judge_l1(raw);
            let at = offset + index as u64 * 8;
            if image.header.has_data_file() && uses.elsewhere(corrected & OFFSET_MASK, index as u32)
            {
                // Its entries' places in the data file fit one guest range only.
                fault = Some(("a table that no entry of another index names", true));
                corrected = 0;
            }
            if let Some(fault) = fault {
                faulty = true;
                self.l1_fault(image, at, structure, index, raw, fault);
            }
            if corrected != 0 {
                uses.add(corrected & OFFSET_MASK, index as u32, active);
                if active {
                    self.l1_copied(image, at, index, corrected);
                }
            }
        }
        faulty
    }

    fn l1_fault(
        &mut self,
        image: &Image,
        at: u64,
        structure: &'static str,
        index: usize,
        raw: u64,
        (expected, lossy): L1Fault,
    ) {
        self.l1_lossy |= lossy;
        let span = image.geometry().l2_span();
        let guest = (index as u64).saturating_mul(span);
        self.report.corruption(at, structure, || {
            let lost = if lossy {
                format!("; the mapping of {span} guest bytes is lost")
            } else {
                String::new()
            };
            format!("guest offset {guest:#x}: found {raw:#x}, expected {expected}{lost}")
        });
    }

    fn l1_copied(&mut self, image: &Image, at: u64, index: usize, entry: u64) {
        let cluster = (entry & OFFSET_MASK) >> image.geometry().cluster_bits;
        let single = self.balance.word(cluster) & SINGLE != 0;
        if single != (entry & COPIED != 0) {
            self.l1_copied_wrong += 1;
            self.report.corruption(at, "active L1 entry", || {
                wrong_copied(format_args!("index {index}"), entry, single)
            });
        }
    }

    fn snapshot_l1s(
        &mut self,
        image: &Image,
        uses: &mut L2Uses,
        monitor: &Monitor<'_>,
    ) -> Result<()> {
        self.snapshots = SnapshotTable::read(image, &mut self.report)?;
        let offset = image.header.snapshots_offset.0;
        let bytes = self.snapshots.bytes;
        self.take_range(image, "snapshot table", offset, bytes, Owner::SnapshotTable);
        let total: u64 = self
            .snapshots
            .snapshots
            .iter()
            .filter(|snapshot| !snapshot.lost)
            .map(|snapshot| snapshot.l1().1)
            .sum();
        // Only overlapping tables can exceed the file in total. A repair separates a few of them;
        // walking this many would not end.
        let what = "the L1 tables of all snapshots in bytes";
        require_within(image.name(), what, total, image.file_len)?;
        for i in 0..self.snapshots.snapshots.len() {
            monitor.cancel.check()?;
            let snapshot = &self.snapshots.snapshots[i];
            let (offset, bytes) = snapshot.l1();
            if snapshot.lost || bytes == 0 {
                continue;
            }
            self.take_range(image, "snapshot L1 table", offset, bytes, Owner::SnapshotL1(i));
            let l1 = image.read_table(offset, bytes)?;
            if self.l1_entries(image, offset, &l1, uses, false) {
                self.snapshot_l1_faulty.insert(i);
            }
            uses.check_limit(image)?;
            self.balance.check_limit(image.name())?;
        }
        Ok(())
    }

    fn bitmaps(&mut self, image: &Image, monitor: &Monitor<'_>, mode: Mode) -> Result<()> {
        let fault = match bitmaps::presence(image) {
            Presence::None => None,
            Presence::Stale => {
                if let Some(bitmaps) = image.header.bitmaps() {
                    let at = bitmaps.directory_offset.0;
                    self.stale_directory = image.clusters_of(at, bitmaps.directory_bytes);
                }
                if mode == Mode::Compare {
                    monitor.progress.message(
                        "a program without bitmap support wrote to this image: its bitmaps are \
                         inconsistent, and their clusters count as leaked",
                    );
                }
                None
            }
            Presence::Missing => Some((
                header_offset!(autoclear_features),
                "header",
                "found the bitmaps bit without a bitmaps extension".to_owned(),
            )),
            Presence::Broken(fault) => Some(fault),
            Presence::Valid(extension) => {
                let mut overlap = false;
                let walked = bitmaps::walk(image, &extension, |(structure, offset, bytes)| {
                    let free = self.take_range(image, structure, offset, bytes, Owner::Bitmap);
                    overlap |= !free;
                    free && self.balance.check_limit(image.name()).is_ok()
                })?;
                self.bitmaps_broken |= overlap;
                for (at, (offset, structure, message)) in walked.broken {
                    self.broken_bitmaps.push(at);
                    self.report.corruption(offset, structure, || {
                        format!("{message}; this bitmap cannot be trusted, a repair drops it")
                    });
                }
                walked.directory
            }
        };
        if let Some((offset, structure, message)) = fault {
            self.bitmaps_broken = true;
            self.report.corruption(offset, structure, || {
                format!("{message}; the bitmaps cannot be trusted")
            });
        }
        Ok(())
    }

    fn l2_tables(&mut self, image: &Image, uses: L2Uses, meter: &mut Meter<'_, '_>) -> Result<()> {
        self.tables = uses.into_tables();
        for i in 0..self.tables.len() {
            let (offset, references) = (self.tables[i].offset, self.tables[i].weight());
            let cluster = offset >> image.geometry().cluster_bits;
            self.take_cluster(image, "L2 table", cluster, references);
        }
        let offsets: Vec<u64> = self.tables.iter().map(|table| table.offset).collect();
        let tables = &mut self.tables;
        let mut scan = Scan {
            image,
            balance: &mut self.balance,
            report: &mut self.report,
            conflicts: &mut self.conflicts,
        };
        reader::for_each_cluster(
            &*image.storage,
            &offsets,
            image.cluster_bytes(),
            meter,
            |i, bytes| {
                scan.table(&mut tables[i], bytes);
                scan.balance.check_limit(image.name())
            },
        )
    }

    /// Counts clusters that a repair keeps as referenced: as often as their refcount, and at least
    /// once.
    fn keep(&mut self, image: &Image) -> Result<()> {
        for cluster in image.kept.clusters.iter().cloned().flatten() {
            let refcount = self.balance.balance(cluster).clamp(1, i32::MAX.into());
            self.balance.refer(cluster, refcount as i32);
        }
        self.balance.check_limit(image.name())
    }

    /// Counts the references to the refcount table and its blocks, which are not among
    /// [`Mode::References`].
    pub(super) fn count_refcount_structures(&mut self, image: &Image) {
        let header = &image.header;
        let bytes = u64::from(header.refcount_table_clusters) * image.cluster_bytes();
        let table = image.clusters_of(header.refcount_table_offset.0, bytes);
        // A damaged header may place the table far beyond the end of the file.
        let table = table.take_while(|&cluster| cluster < image.file_clusters());
        let blocks = self.refcounts.blocks.iter().filter(|&&block| block != 0);
        let blocks = blocks.map(|&block| block >> image.geometry().cluster_bits);
        for cluster in table.chain(blocks) {
            self.balance.refer(cluster, 1);
            self.balance.mark_metadata(cluster);
        }
    }

    fn compare(&mut self, image: &Image) -> Result<()> {
        let mut lookup = Lookup::new(image, &self.refcounts);
        let bits = image.geometry().cluster_bits;
        let max = image.geometry().refcount_max();
        for (cluster, balance) in self.balance.unbalanced() {
            let beyond = cluster >= image.file_clusters();
            let needed = beyond || balance < 0 || !self.report.is_full();
            let refcount = if needed { i128::from(lookup.get(cluster)?) } else { 0 };
            let references = refcount - balance;
            if beyond && references == 0 {
                // A writer may have preallocated it; no space is lost yet.
                self.ahead += 1;
                continue;
            }
            let offset = cluster.saturating_mul(1 << bits);
            if balance > 0 {
                self.report.note_with(Severity::Leak, offset, "refcount", false, || {
                    format!("found {refcount}, expected {references}: the cluster is leaked")
                });
                continue;
            }
            self.low += 1;
            self.low_without_block |= self.refcounts.block_of(image, cluster).is_none();
            let overfull = references > i128::from(max);
            self.overfull |= overfull;
            self.report.corruption(offset, "refcount", || {
                let wide = if overfull {
                    " (too many for the width of refcounts in this image: convert it)"
                } else {
                    ""
                };
                format!("found {refcount}, expected {references}{wide}")
            });
        }
        Ok(())
    }

    /// COPIED flags that disagree with the refcounts.
    pub(super) fn copied_wrong(&self) -> u64 {
        self.l1_copied_wrong + self.tables.iter().map(|t| u64::from(t.copied_wrong)).sum::<u64>()
    }

    /// Number of corruptions, except refcounts and COPIED flags, which follow from the rest, and
    /// the corrupt bit.
    pub(super) fn structural(&self, image: &Image) -> u64 {
        let derived =
            self.low + self.copied_wrong() + u64::from(image.header.has(incompatible::CORRUPT));
        self.report.corruptions.saturating_sub(derived)
    }

    /// Whether an L2 table shares its cluster with something else.
    pub(super) fn in_conflict(&self, image: &Image, table: &L2Table) -> bool {
        self.conflicts.contains(&(table.offset >> image.geometry().cluster_bits))
    }

    /// Whether an L2 table is none, but a cluster of something else.
    pub(super) fn is_garbage(&self, image: &Image, table: &L2Table) -> bool {
        let cluster = table.offset >> image.geometry().cluster_bits;
        let shared = self.conflicts.contains(&cluster) || self.stale_directory.contains(&cluster);
        shared && table.maps_nothing()
    }

    pub(super) fn table_at(&self, offset: u64) -> Option<&L2Table> {
        self.tables
            .binary_search_by_key(&offset, |table| table.offset)
            .ok()
            .map(|i| &self.tables[i])
    }

    /// Whether an owner shares one of its clusters with something else.
    pub(super) fn owner_in_conflict(&self, owner: Owner) -> bool {
        self.owners_in_conflict.contains(&owner)
    }

    fn find_owners_in_conflict(&mut self) {
        if !self.conflicts.is_empty() {
            self.owners_in_conflict = self
                .owners
                .iter()
                .filter(|(range, _)| range.clone().any(|cluster| self.conflicts.contains(&cluster)))
                .map(|&(_, owner)| owner)
                .collect();
        }
    }
}

/// L2 tables by host offset, collected while L1 tables are read.
#[derive(Debug, Default)]
struct L2Uses {
    tables: FxHashMap<u64, (u32, u32, u32)>,
}

impl L2Uses {
    fn add(&mut self, offset: u64, l1_index: u32, active: bool) {
        let uses = self.tables.entry(offset).or_insert((0, 0, l1_index));
        let count = if active { &mut uses.0 } else { &mut uses.1 };
        *count = count.saturating_add(1);
    }

    /// Whether an entry of another index names this table.
    fn elsewhere(&self, offset: u64, l1_index: u32) -> bool {
        self.tables.get(&offset).is_some_and(|uses| uses.2 != l1_index)
    }

    fn check_limit(&self, image: &Image) -> Result<()> {
        // For the hash map and the sorted list built from it.
        let bytes = (self.tables.capacity() * (24 + std::mem::size_of::<L2Table>())) as u64;
        require_within(image.name(), CHECK_MEMORY, bytes, image.limits.check_bytes_max)
    }

    fn into_tables(self) -> Vec<L2Table> {
        let mut tables: Vec<L2Table> = self
            .tables
            .into_iter()
            .map(|(offset, (active, inactive, l1_index))| L2Table {
                offset,
                active,
                inactive,
                l1_index,
                ..L2Table::default()
            })
            .collect();
        tables.sort_unstable_by_key(|table| table.offset);
        tables
    }
}
