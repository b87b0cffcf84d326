//! L2 tables that lost the entry which named them.
//!
//! Where an L1 entry is garbage, or a snapshot's L1 table cannot be where its entry says, the tables
//! that they once named look like leaks, as does all the data that these map. To mend the leaks
//! would give that free, while a human could still put the entry right.

use vdkit_block::{Error, Monitor, Result};

use crate::check::image::Image;
use crate::check::mapping::entry_at;
use crate::check::reader::{self, Meter};
use crate::check::refcounts::Lookup;
use crate::check::survey::{Owner, Survey};
use crate::entry::L2Entry;

/// So many are named, and not more looked for.
const NAMED_MAX: usize = 8;
/// Clusters that are looked at before it is asked whether that is enough.
const PART: usize = 4096;

/// [`Error::Corrupt`] where mending would give free what looks like lost tables.
pub(super) fn refuse_to_free(image: &Image, survey: &Survey, monitor: &Monitor<'_>) -> Result<()> {
    if !loses_tables(image, survey) {
        return Ok(());
    }
    let found = find(image, survey, monitor)?;
    if found.is_empty() {
        return Ok(());
    }
    let places: Vec<String> = found.iter().map(|at| format!("{at:#x}")).collect();
    let more = if found.len() < NAMED_MAX { "" } else { " and perhaps others" };
    Err(Error::corrupt(
        image.name(),
        found[0],
        "leaked clusters",
        format!(
            "what looks like L2 tables at {}{more}, to which references are damaged (nothing was \
             changed)",
            places.join(", ")
        ),
        format!(
            "tables that something names: a repair would free them and the data that they map. Put \
             the references right by hand; or, to do without that data, run: vdkit check --repair \
             all --force {}",
            image.name()
        ),
    ))
}

/// Whether the way to an L2 table may have been lost. Where the refcounts themselves are damaged,
/// what they call leaked says nothing.
fn loses_tables(image: &Image, survey: &Survey) -> bool {
    if !survey.refcounts.sound || survey.owner_in_conflict(Owner::Refcounts) {
        return false;
    }
    survey.l1_faulty
        || !survey.snapshot_l1_faulty.is_empty()
        || survey.snapshots.snapshots.iter().any(|snapshot| snapshot.lost)
        // An entry that names something else instead.
        || survey.tables.iter().any(|t| t.is_garbage() || survey.in_conflict(image, t))
}

/// Host offsets of clusters that nothing refers to and that look like L2 tables.
fn find(image: &Image, survey: &Survey, monitor: &Monitor<'_>) -> Result<Vec<u64>> {
    let bits = image.geometry().cluster_bits;
    let mut use_of = Use { image, survey, lookup: Lookup::new(image, &survey.refcounts) };
    let mut unused = Vec::new();
    let mut found = Vec::new();
    let mut meter = Meter::new(monitor);
    for cluster in 1..image.file_clusters() {
        if use_of.is_lost(cluster)? {
            unused.push(cluster << bits);
        }
        // In parts, so that a large leak is not read to its end once enough is known.
        if unused.len() == PART || cluster + 1 == image.file_clusters() {
            let offsets = std::mem::take(&mut unused);
            let bytes = image.cluster_bytes();
            reader::for_each_cluster(&*image.storage, &offsets, bytes, &mut meter, |i, bytes| {
                if found.len() < NAMED_MAX && use_of.is_table(offsets[i], bytes)? {
                    found.push(offsets[i]);
                }
                Ok(())
            })?;
            if found.len() == NAMED_MAX {
                break;
            }
        }
    }
    Ok(found)
}

/// Which clusters are in use, as refcounts and references say.
struct Use<'a> {
    image: &'a Image,
    survey: &'a Survey,
    lookup: Lookup<'a>,
}

impl Use<'_> {
    /// Whether the refcounts say that a cluster is in use.
    fn is_used(&mut self, cluster: u64) -> Result<bool> {
        Ok(self.lookup.get(cluster)? > 0)
    }

    /// Whether a cluster is in use and nothing refers to it.
    fn is_lost(&mut self, cluster: u64) -> Result<bool> {
        let balance = self.survey.balance.balance(cluster);
        Ok(balance > 0 && i128::from(self.lookup.get(cluster)?) == balance)
    }

    /// Whether all entries of a cluster can be those of an L2 table, and some of them name clusters
    /// that are in use and that nothing else names. (A copy of a table that is still there, as an
    /// interrupted repair leaves it, names what that one does.)
    fn is_table(&mut self, own: u64, bytes: &[u8]) -> Result<bool> {
        let image = self.image;
        let geometry = image.geometry();
        let data_file = image.header.has_data_file();
        let mut lost = false;
        for index in 0..geometry.l2_entries() as usize {
            let entry = entry_at(bytes, index, geometry.extended);
            if entry == L2Entry::default() {
                continue;
            }
            // In a data file, data is at its guest offset; which one that is here, nobody knows.
            let guest = entry.host().0;
            if !image.judge_l2(entry, guest).1.is_empty() {
                return Ok(false);
            }
            let (offset, bytes) = if entry.is_compressed() {
                let place = entry.compressed_place(geometry);
                (place.offset.0, place.bytes)
            } else if entry.has_space(data_file) {
                (entry.host().0, image.cluster_bytes())
            } else {
                continue;
            };
            if data_file {
                lost = true;
                continue;
            }
            for cluster in image.clusters_of(offset, bytes) {
                if cluster == own >> geometry.cluster_bits || !self.is_used(cluster)? {
                    return Ok(false);
                }
                lost = lost || self.is_lost(cluster)?;
            }
        }
        Ok(lost)
    }
}
