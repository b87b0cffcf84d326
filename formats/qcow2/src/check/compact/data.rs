//! Moves guest data to the front.
//!
//! The references to a cluster are only found by reading all L2 tables. To bound the list of
//! references, this is done for one window of the file at a time, the last window first.

use std::ops::Range;

use rustc_hash::FxHashSet;
use vdkit_block::{CompactReport, LeftAlone, Result};

use super::space::Space;
use super::tables::release;
use crate::check::reader::{self, Meter};
use crate::check::writer::Joined;
use crate::entry::L2Entry;
use crate::header::Encryption;
use crate::layout::{COPIED, OFFSET_MASK, ZERO};

/// Most references in memory: 32 MiB. Few in tests, for many windows. A cluster that has more by
/// itself stays where it is.
const RECORDS_MAX: u64 = if cfg!(test) { 100 } else { 2 << 20 };

/// One reference to a cluster.
#[derive(Clone, Copy, Debug)]
struct Record {
    cluster: u64,
    /// Index among the L2 tables.
    table: u32,
    /// Index of the entry, and its flags in the uppermost two bits.
    entry: u32,
}

impl Record {
    fn new(cluster: u64, table: usize, index: usize, word: u64) -> Self {
        let flags = (word & COPIED) >> 32 | (word & ZERO) << 30;
        Self { cluster, table: table as u32, entry: index as u32 | flags as u32 }
    }

    fn index(self) -> u32 {
        self.entry & !(0b11 << 30)
    }

    /// The entry's bits besides the host offset, which a move keeps.
    fn flags(self) -> u64 {
        let entry = u64::from(self.entry);
        entry << 32 & COPIED | entry >> 30 & ZERO
    }
}

/// Moves data clusters at or beyond `end` to free clusters before it.
pub(super) fn move_data(space: &mut Space<'_>, end: u64, report: &mut CompactReport) -> Result<()> {
    if space.image.header.encryption == Encryption::Luks {
        // The host offset determines each sector's IV: moved data would decrypt to noise.
        let clusters = data_from(space, end, u64::MAX).count() as u64;
        if clusters > 0 {
            let what = "encrypted data: its host offset is a part of its encryption";
            report.left_alone.push(LeftAlone { what, clusters });
        }
        return Ok(());
    }
    let mut upto = u64::MAX;
    let mut compressed_clusters = 0;
    let mut done = 0;
    let total: u64 = data_from(space, end, upto).map(|(_, references)| references).sum();
    while upto > end {
        let all: u64 = data_from(space, end, upto).map(|(_, references)| references).sum();
        if all == 0 {
            break;
        }
        let mut beyond = all;
        let from = data_from(space, end, upto)
            .find(|&(_, references)| {
                let fits = beyond <= RECORDS_MAX;
                beyond -= references;
                fits
            })
            .map_or(end, |(cluster, _)| cluster);
        let window = from..upto;
        let (mut records, compressed) = references(space, &window)?;
        compressed_clusters += compressed.len();
        records.retain(|record| !compressed.contains(&record.cluster));
        // The last clusters of the file first.
        records.sort_unstable_by_key(|r| (std::cmp::Reverse(r.cluster), r.table, r.entry));
        let mut rest = &records[..];
        while !rest.is_empty() {
            let (batch, later) = split(space, rest);
            space.monitor.progress.update(done, total);
            done += batch.len() as u64;
            if !move_batch(space, batch, end, report)? {
                break;
            }
            rest = later;
        }
        upto = from;
    }
    let shared = space
        .used_from(end)
        .filter(|&(cluster, references)| references > RECORDS_MAX && !space.is_metadata(cluster));
    for (what, clusters) in [
        ("compressed data: its clusters are shared by several pieces", compressed_clusters),
        ("data that too many entries refer to", shared.count()),
    ] {
        if clusters > 0 {
            report.left_alone.push(LeftAlone { what, clusters: clusters as u64 });
        }
    }
    Ok(())
}

/// Clusters of guest data in a range that can move, with their references.
fn data_from(space: &Space<'_>, from: u64, upto: u64) -> impl Iterator<Item = (u64, u64)> {
    space
        .used_from(from)
        .take_while(move |&(cluster, _)| cluster < upto)
        .filter(|&(cluster, references)| references <= RECORDS_MAX && !space.is_metadata(cluster))
}

/// All references to data in a window, and the window's clusters that hold compressed data.
fn references(space: &Space<'_>, window: &Range<u64>) -> Result<(Vec<Record>, FxHashSet<u64>)> {
    let image = &space.image;
    let geometry = image.geometry();
    let offsets: Vec<u64> = space.survey.tables.iter().map(|table| table.offset).collect();
    let (mut records, mut compressed) = (Vec::new(), FxHashSet::default());
    let quiet = space.monitor.quiet();
    let mut meter = Meter::new(&quiet);
    let cluster_bytes = image.cluster_bytes();
    reader::for_each_cluster(&*image.storage, &offsets, cluster_bytes, &mut meter, |i, bytes| {
        for (index, entry) in L2Entry::all(bytes, geometry).enumerate() {
            if entry.is_compressed() {
                let place = entry.compressed_place(geometry);
                let clusters = image.clusters_of(place.offset.0, place.bytes);
                compressed.extend(clusters.filter(|cluster| window.contains(cluster)));
            } else if entry.has_space(false) {
                let cluster = geometry.host_cluster(entry.host());
                let moves = |cluster| {
                    !space.is_metadata(cluster) && space.references(cluster) <= RECORDS_MAX
                };
                if window.contains(&cluster) && moves(cluster) {
                    records.push(Record::new(cluster, i, index, entry.word));
                }
            }
        }
        Ok(())
    })?;
    Ok((records, compressed))
}

/// The records of the next batch of clusters, and the rest.
fn split<'r>(space: &Space<'_>, records: &'r [Record]) -> (&'r [Record], &'r [Record]) {
    let groups = records.chunk_by(|a, b| a.cluster == b.cluster);
    let most = space.batch_clusters() as usize;
    records.split_at(groups.take(most).map(<[Record]>::len).sum())
}

/// Moves the clusters of a batch. Returns whether there was room for all.
fn move_batch(
    space: &mut Space<'_>,
    batch: &[Record],
    end: u64,
    report: &mut CompactReport,
) -> Result<bool> {
    let mut groups: Vec<&[Record]> = batch.chunk_by(|a, b| a.cluster == b.cluster).collect();
    // In guest order, if the references have one.
    groups.sort_unstable_by_key(|group| (group[0].table, group[0].index()));
    let mut moves: Vec<(&[Record], u64)> = Vec::with_capacity(groups.len());
    let mut room = true;
    for group in groups {
        let known: u64 = group.iter().map(|record| weight(space, record)).sum();
        let references = space.references(group[0].cluster);
        if known != references {
            continue;
        }
        let Some(to) = space.take_run(1, end) else {
            room = false;
            break;
        };
        space.refer(to, references as i64);
        moves.push((group, to));
    }
    if moves.is_empty() {
        return Ok(room);
    }
    for run in moves.chunk_by(|a, b| a.0[0].cluster + 1 == b.0[0].cluster && a.1 + 1 == b.1) {
        space.copy(run[0].0[0].cluster, run[0].1, run.len() as u64)?;
    }
    space.write_refcounts()?;
    space.sync()?;
    write_entries(space, &moves)?;
    release(space, moves.iter().map(|(group, _)| group[0].cluster), report)?;
    Ok(room)
}

/// References that an entry makes: one for each L1 entry that names its table.
fn weight(space: &Space<'_>, record: &Record) -> u64 {
    space.survey.tables[record.table as usize].references()
}

/// Points all entries to the new places; adjacent entries in one write.
fn write_entries(space: &Space<'_>, moves: &[(&[Record], u64)]) -> Result<()> {
    let geometry = space.image.geometry();
    let mut words: Vec<(u64, u64)> = Vec::new();
    for &(group, to) in moves {
        for record in group {
            let table = space.survey.tables[record.table as usize].offset;
            let at = table + u64::from(record.index()) * geometry.l2_entry_bytes();
            words.push((at, space.offset(to) & OFFSET_MASK | record.flags()));
        }
    }
    words.sort_unstable();
    let mut out = Joined::new(&*space.image.storage);
    words.into_iter().try_for_each(|(at, word)| out.write(at, &word.to_be_bytes()))?;
    out.finish()
}
