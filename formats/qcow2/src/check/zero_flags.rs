//! Removes zero flags from all L2 tables, including those of snapshots: version 2 has none.
//!
//! Without a backing file, an entry without a cluster reads as zero too. With one, the entries name
//! shared clusters of zeroes instead. This takes little space, and a write copies the cluster
//! first, as with any shared cluster.
//!
//! | step | state after a crash |
//! |---|---|
//! | the clusters of zeroes get their refcounts; barrier | leaks |
//! | entries name them, or nothing; barrier | the same disk, partly converted; leaks |
//! | clusters of former zero entries lose their refcounts; barrier | leaks |

use std::sync::Arc;

use vdkit_block::{Error, Limits, Monitor, Result, Storage};

use super::compact::space::Space;
use super::image::Image;
use super::repair::make_sound;
use crate::entry::L2Entry;
use crate::header::Encryption;
use crate::layout::{COPIED, OFFSET_MASK, ZERO};
use crate::structures::words_mut;

/// Most references to one cluster of zeroes. Each snapshot adds as many, and version 2 refcounts
/// count to 65535.
const SHARED_MAX: u64 = 256;

/// Repairs leaks, as an interrupted run may leave, and returns how many clusters of zeroes
/// [`remove`] needs.
///
/// # Errors
/// [`Error::Corrupt`] for an image that is not sound; [`Error::Unsupported`] if zeroes in the file
/// are not zeroes to the guest.
pub(crate) fn prepare(
    storage: &Arc<dyn Storage>,
    limits: &Limits,
    monitor: &Monitor<'_>,
) -> Result<u64> {
    make_sound(storage, false, limits, monitor)?;
    let space = Space::load(storage, limits, monitor)?;
    if !hides(&space.image) {
        return Ok(0);
    }
    let needed = shares(&space)?.len() as u64;
    if needed > 0 && space.image.header.encryption != Encryption::None {
        return Err(Error::unsupported(
            storage.name(),
            "not supported: zero clusters that hide a backing file, in an encrypted image, for version 2",
            "convert to a new image",
        ));
    }
    Ok(needed)
}

/// Removes all zero flags. `zeroes` are unreferenced clusters of zeroes, as many as [`prepare`]
/// returned. Durable on return.
///
/// # Errors
/// Those of the storage. After an error or a crash, another run completes the removal.
pub(crate) fn remove(
    storage: &Arc<dyn Storage>,
    zeroes: &[u64],
    limits: &Limits,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let mut space = Space::load(storage, limits, monitor)?;
    let shared = if hides(&space.image) { shares(&space)? } else { Vec::new() };
    assert!(shared.len() <= zeroes.len(), "as many as were asked for");
    for (&cluster, &references) in zeroes.iter().zip(&shared) {
        space.refer(cluster, references as i64);
    }
    // Durable before any entry names these clusters: after a crash they are leaks.
    space.write_refcounts()?;
    space.sync()?;
    let tables = space.survey.tables.clone();
    let mut places = Vec::new();
    let mut freed = Vec::new();
    for (done, table) in tables.iter().enumerate() {
        monitor.progress.update(done as u64, tables.len() as u64);
        monitor.cancel.check()?;
        let old = space.image.read_cluster(table.offset)?;
        let mut new = old.clone();
        for (index, word) in flagged(&space.image, &old) {
            if word & OFFSET_MASK != 0 {
                let cluster = (word & OFFSET_MASK) >> space.image.geometry().cluster_bits;
                freed.push((cluster, table.references()));
            }
            let word = if hides(&space.image) {
                let place = share(&mut places, table.references());
                let single = shared[place] == 1 && table.active > 0;
                space.offset(zeroes[place]) | if single { COPIED } else { 0 }
            } else {
                0
            };
            words_mut(&mut new)[index].set(word);
        }
        space.image.write_changed(table.offset, &old, &new)?;
        space.release_many(&mut freed)?;
    }
    space.release(freed)?;
    drop(space);
    // Sets the COPIED flag of clusters that now have one reference, and frees unused clusters of
    // zeroes.
    make_sound(storage, false, limits, monitor)?;
    Ok(())
}

/// Whether an empty entry would expose data other than zeroes.
fn hides(image: &Image) -> bool {
    image.header.backing_name.is_some()
}

/// Index and word of the entries of a table that have a zero flag.
fn flagged(image: &Image, table: &[u8]) -> impl Iterator<Item = (usize, u64)> {
    L2Entry::all(table, image.geometry())
        .enumerate()
        .filter(|(_, entry)| !entry.is_compressed() && entry.word & ZERO != 0)
        .map(|(index, entry)| (index, entry.word))
}

/// Adds an entry of a table with `weight` references to the last cluster of zeroes, or to a new one.
/// Returns its index in `references`, the numbers of references to each cluster.
fn share(references: &mut Vec<u64>, weight: u64) -> usize {
    match references.last_mut() {
        Some(last) if *last + weight <= SHARED_MAX => *last += weight,
        _ => references.push(weight),
    }
    references.len() - 1
}

/// The references to each cluster of zeroes, for all flagged entries in table order.
fn shares(space: &Space<'_>) -> Result<Vec<u64>> {
    let mut shares = Vec::new();
    for table in &space.survey.tables {
        space.monitor.cancel.check()?;
        for _ in flagged(&space.image, &space.image.read_cluster(table.offset)?) {
            share(&mut shares, table.references());
        }
    }
    Ok(shares)
}
