//! Repairs entries of L1 and L2 tables in place.

use vdkit_block::{HostOffset, Result};
use zerocopy::IntoBytes;

use super::write_autoclear;
use crate::check::balance::SINGLE;
use crate::check::bitmaps;
use crate::check::image::Image;
use crate::check::mapping;
use crate::check::survey::{Owner, Survey};
use crate::layout::{COPIED, OFFSET_MASK, autoclear, extension};
use crate::structures::{BitmapsExtensionData, words_mut};

/// Repairs entries of all tables that do not share their cluster, and unlinks clusters that are not
/// tables. Returns whether anything changed.
pub(super) fn apply(image: &Image, survey: &Survey) -> Result<bool> {
    let mut changed = forget_bitmaps(image, survey)?;
    if !survey.owner_in_conflict(Owner::ActiveL1) {
        let offset = image.header.l1_offset.0;
        changed |= repair_l1(image, survey, offset, &survey.l1)?;
    }
    for (i, snapshot) in survey.snapshots.snapshots.iter().enumerate() {
        let suspect = survey.snapshot_l1_faulty.contains(&i) || !survey.conflicts.is_empty();
        if snapshot.lost || !suspect || survey.owner_in_conflict(Owner::SnapshotL1(i)) {
            continue;
        }
        let (offset, bytes) = snapshot.l1();
        changed |= repair_l1(image, survey, offset, &image.read_table(offset, bytes)?)?;
    }
    for found in &survey.tables {
        if found.faulty == 0 || survey.in_conflict(image, found) {
            continue;
        }
        if image.header.has_data_file() && found.is_mostly_invalid() {
            // Most entries are at the wrong offset: a repair would be a guess.
            continue;
        }
        changed |= image
            .change_cluster(found.offset, |table| mapping::repair_table(image, found, table))?;
    }
    if changed {
        image.storage.sync()?;
    }
    Ok(changed)
}

/// Drops damaged bitmaps. Clears the autoclear bit of all of them if their directory is damaged, if
/// they share clusters with something else, or if the repair loses guest data, which they would not
/// record.
fn forget_bitmaps(image: &Image, survey: &Survey) -> Result<bool> {
    if image.header.autoclear & autoclear::BITMAPS == 0 {
        return Ok(false);
    }
    let lossy = survey.l1_lossy || survey.tables.iter().any(|table| table.lossy);
    if survey.bitmaps_broken || lossy || survey.owner_in_conflict(Owner::Bitmap) {
        write_autoclear(image, image.header.autoclear & !autoclear::BITMAPS)?;
        return Ok(true);
    }
    if survey.broken_bitmaps.is_empty() {
        return Ok(false);
    }
    drop_bitmaps(image, &survey.broken_bitmaps)?;
    Ok(true)
}

/// Removes damaged bitmaps from the directory. All bitmaps are invalid while it is written, so a
/// crash loses all of them.
fn drop_bitmaps(image: &Image, broken: &[usize]) -> Result<()> {
    let storage = &*image.storage;
    write_autoclear(image, image.header.autoclear & !autoclear::BITMAPS)?;
    let extension = image.header.extension(extension::BITMAPS);
    let (Some(extension), Some(bitmaps)) = (extension, image.header.bitmaps()) else {
        return Ok(());
    };
    let (offset, bytes) = (bitmaps.directory_offset, bitmaps.directory_bytes);
    let old = image.read_table(offset.0, bytes)?;
    let (directory, count) = bitmaps::without(&old, broken);
    if count == 0 {
        return Ok(());
    }
    storage.write_at(&directory, offset)?;
    let data = BitmapsExtensionData::new(count, offset, directory.len() as u64);
    storage.write_at(data.as_bytes(), HostOffset(extension.offset))?;
    storage.sync()?;
    write_autoclear(image, image.header.autoclear)
}

fn repair_l1(image: &Image, survey: &Survey, offset: u64, old: &[u8]) -> Result<bool> {
    image.write_changed(offset, old, &corrected_l1(image, survey, old, |offset| offset))
}

/// The L1 table with corrected entries, without clusters that map nothing, and with each L2 table
/// at its new `place`.
pub(super) fn corrected_l1(
    image: &Image,
    survey: &Survey,
    l1: &[u8],
    place: impl Fn(u64) -> u64,
) -> Vec<u8> {
    let mut new = l1.to_vec();
    for (word, index) in words_mut(&mut new).iter_mut().zip(0..) {
        let entry = word.get();
        if entry == 0 {
            continue;
        }
        let (mut corrected, _) = image.judge_l1(entry);
        let offset = corrected & OFFSET_MASK;
        let goes = survey.table_at(offset).is_some_and(|table| {
            survey.is_garbage(image, table)
                || image.header.has_data_file() && table.l1_index != index
        });
        if goes {
            corrected = 0;
        } else if corrected != 0 {
            corrected = corrected & !OFFSET_MASK | place(offset);
        }
        word.set(corrected);
    }
    new
}

/// Sets the COPIED flags of the active tables according to the refcounts.
pub(super) fn set_copied(image: &Image, survey: &Survey) -> Result<bool> {
    let mut changed = false;
    if survey.l1_copied_wrong > 0 {
        let mut new = survey.l1.clone();
        for word in words_mut(&mut new) {
            let entry = word.get();
            let cluster = (entry & OFFSET_MASK) >> image.geometry().cluster_bits;
            if entry & OFFSET_MASK != 0 {
                let single = survey.balance.word(cluster) & SINGLE != 0;
                word.set(entry & !COPIED | u64::from(single) << 63);
            }
        }
        changed |= image.write_changed(image.header.l1_offset.0, &survey.l1, &new)?;
    }
    for table in survey.tables.iter().filter(|table| table.copied_wrong > 0) {
        changed |= image.change_cluster(table.offset, |table| {
            mapping::set_copied(image, &survey.balance, table);
        })?;
    }
    if changed {
        image.storage.sync()?;
    }
    Ok(changed)
}
