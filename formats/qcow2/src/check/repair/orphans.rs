//! L2 tables whose L1 entry is lost.
//!
//! If an L1 entry is damaged or wiped, or a snapshot's L1 table cannot be where its entry says, the
//! tables that they named look like leaks, as does all the data that these tables map. Repairing
//! the leaks would free that data, although a human could still restore the entry.
//!
//! In both cases, a repair loses nothing:
//!
//! - An entry is damaged: correcting it would erase its remains. The repair is refused.
//! - An entry is zero, so it needs no correction: the repair continues and *keeps* the tables and
//!   what they map. They count as leaks, with a refcount of at least 1.
//!
//! The search reads unreferenced clusters. It is skipped if no table can be lost: if each L1 entry
//! names one.

use vdkit_block::{CheckReport, Error, Finding, Monitor, Remedy, Repair, Result, Severity};

use super::search::{Flagless, Scope, Search};
use crate::check::image::Image;
use crate::check::survey::Survey;
use crate::layout::extension;

/// Most tables that a refusal names.
const NAMED_MAX: usize = 8;

/// Clusters that look like lost tables, and what they map; they must not be freed.
#[derive(Clone, Debug, Default)]
pub(in crate::check) struct Kept {
    /// Host offset of each table, and the number of clusters that only it maps.
    pub(in crate::check) tables: Vec<(u64, u64)>,
    /// The tables and what they map: sorted, unreferenced clusters.
    pub(in crate::check) clusters: Vec<std::ops::Range<u64>>,
}

impl Kept {
    pub(in crate::check) fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    pub(super) fn contains(&self, cluster: u64) -> bool {
        let behind = self.clusters.partition_point(|run| run.end <= cluster);
        self.clusters.get(behind).is_some_and(|run| run.contains(&cluster))
    }

    pub(in crate::check) fn len(&self) -> u64 {
        self.clusters.iter().map(|run| run.end - run.start).sum()
    }
}

/// Searches for lost tables, if any can have been lost.
pub(super) fn find(
    image: &Image,
    survey: &Survey,
    scope: Scope,
    monitor: &Monitor<'_>,
) -> Result<Kept> {
    let damaged = references_damaged(image, survey);
    let snapshots = snapshots_lost(image, survey)?;
    if !damaged && !snapshots && !has_gap(image, survey) {
        return Ok(Kept::default());
    }
    let quiet = monitor.quiet();
    let search = Search::new(image, survey, scope, &quiet)?;
    // Only snapshots have tables without any COPIED flag. Bitmap and refcount tables look similar.
    let flagless = match snapshots && !had_bitmaps(image) {
        _ if damaged && search.trusts_all() => Flagless::Yes,
        true => Flagless::Sharing,
        false => Flagless::No,
    };
    search.run(flagless, monitor)
}

/// [`Error::Corrupt`] if the repair would clear damaged L1 entries that may have referred to these
/// tables.
pub(super) fn refuse_to_forget(image: &Image, survey: &Survey, kept: &Kept) -> Result<()> {
    if kept.is_empty() || !references_damaged(image, survey) {
        return Ok(());
    }
    let places: Vec<String> =
        kept.tables.iter().take(NAMED_MAX).map(|(at, _)| format!("{at:#x}")).collect();
    let more = match kept.tables.len() - places.len() {
        0 => String::new(),
        others => format!(" and {others} others"),
    };
    Err(Error::corrupt(
        image.name(),
        kept.tables[0].0,
        "leaked clusters",
        format!(
            "what looks like L2 tables at {}{more}, to which references are damaged (nothing was \
             changed)",
            places.join(", ")
        ),
        "L2 tables with a reference. A repair would free these tables and their data. Restore \
             the L1 entries by hand, or discard the data",
    )
    .with_remedy(Remedy::Repair { repair: Repair::All, force: true }))
}

/// Reports the kept tables before other findings, and counts their clusters.
pub(super) fn report(image: &Image, report: &mut CheckReport) {
    let kept = &image.kept;
    if kept.is_empty() {
        return;
    }
    report.leaks += kept.len();
    report.leaks_kept = kept.len();
    let findings = kept.tables.iter().map(|&(offset, mapped)| Finding {
        severity: Severity::Leak,
        offset,
        structure: "L2 table",
        message: format!(
            "nothing refers to this cluster, which looks like an L2 table, nor to {mapped} clusters \
             that it maps. They are kept, since an L1 table may have lost its entries. Restore those \
             by hand; or, to discard the data, repair by force"
        ),
        repaired: false,
    });
    let rest = std::mem::take(&mut report.findings);
    report.findings = findings.chain(rest).take(CheckReport::FINDINGS_MAX).collect();
}

/// Whether a reference that may have named an L2 table is damaged.
fn references_damaged(image: &Image, survey: &Survey) -> bool {
    survey.l1_faulty
        || !survey.snapshot_l1_faulty.is_empty()
        || survey.snapshots.cut_short
        || survey.snapshots.snapshots.iter().any(|snapshot| snapshot.lost)
        // The entry names something else instead.
        || survey.tables.iter().any(|table| table.is_mostly_invalid() || survey.in_conflict(image, table))
}

/// Whether the active L1 table lacks a table for some part of the disk: that entry may have been
/// wiped.
fn has_gap(image: &Image, survey: &Survey) -> bool {
    let entries = image.geometry().l1_entries_for(image.header.guest_bytes);
    let used = usize::try_from(entries).unwrap_or(usize::MAX).saturating_mul(8);
    survey.l1.len() < used || is_gappy(&survey.l1[..used])
}

fn is_gappy(l1: &[u8]) -> bool {
    l1.chunks_exact(8).any(|entry| entry == [0; 8])
}

/// Whether the reference to a table of a snapshot may have been lost.
fn snapshots_lost(image: &Image, survey: &Survey) -> Result<bool> {
    if survey.snapshots.cut_short || !survey.snapshot_l1_faulty.is_empty() {
        return Ok(true);
    }
    for snapshot in &survey.snapshots.snapshots {
        if snapshot.lost {
            return Ok(true);
        }
        let (offset, bytes) = snapshot.l1();
        if is_gappy(&image.read_table(offset, bytes)?) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether unreferenced bitmap tables may exist: of a damaged bitmap, or of one that was changed
/// before a crash.
fn had_bitmaps(image: &Image) -> bool {
    let header = &image.header;
    [extension::BITMAPS, extension::PADDING]
        .into_iter()
        .any(|kind| header.extension(kind).is_some())
}
