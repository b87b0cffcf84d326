//! L2 tables that lost the entry which named them.
//!
//! Where an L1 entry is garbage or wiped, or a snapshot's L1 table cannot be where its entry says,
//! the tables that they once named look like leaks, as does all the data that these map. To mend
//! the leaks would give that free, while a human could still put the entry right.
//!
//! Two answers, neither of which loses anything:
//!
//! - An entry is damaged: to mend it would forget what is left of it. The repair is refused.
//! - An entry is zero: there is nothing to mend in it, so the repair goes on, and the tables and what
//!   they map are *kept*: they count as leaks, with a refcount of at least 1.
//!
//! Looking for them reads clusters that nothing refers to. So nobody looks where no table can have
//! been lost: each L1 entry names one.

use vdkit_block::{CheckReport, Error, Finding, Monitor, NoProgress, Result, Severity};

use super::search::{Flagless, Scope, Search};
use crate::check::image::Image;
use crate::check::reader;
use crate::check::survey::Survey;
use crate::layout::extension;

/// So many are named in a refusal.
const NAMED_MAX: usize = 8;

/// What looks like lost tables, and must not be given free.
#[derive(Clone, Debug, Default)]
pub(in crate::check) struct Kept {
    /// Host offset of each table, and how many clusters it alone maps.
    pub(in crate::check) tables: Vec<(u64, u64)>,
    /// The tables and what they map: clusters that nothing refers to, in order.
    pub(in crate::check) clusters: Vec<std::ops::Range<u64>>,
}

impl Kept {
    /// Whether there is none.
    pub(in crate::check) fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// Whether a cluster is one of them.
    pub(super) fn contains(&self, cluster: u64) -> bool {
        let behind = self.clusters.partition_point(|run| run.end <= cluster);
        self.clusters.get(behind).is_some_and(|run| run.contains(&cluster))
    }

    /// How many clusters.
    pub(in crate::check) fn len(&self) -> u64 {
        self.clusters.iter().map(|run| run.end - run.start).sum()
    }
}

/// What looks like lost tables, where any can have been lost; nothing else is looked at.
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
    let quiet = Monitor { cancel: monitor.cancel.clone(), progress: &NoProgress };
    let search = Search::new(image, survey, scope, &quiet)?;
    // Tables without any COPIED flag belong to snapshots alone. Others that look like them are those of
    // bitmaps, and of refcounts.
    let flagless = match snapshots && !had_bitmaps(image) {
        _ if damaged && search.trusts_everything() => Flagless::Yes,
        true => Flagless::Sharing,
        false => Flagless::No,
    };
    search.run(flagless, monitor)
}

/// [`Error::Corrupt`] where mending damaged references would forget the way to lost tables.
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
        format!(
            "tables that something names: a repair would free them and the data that they map. Put \
             the references right by hand; or, to do without that data, run: vdkit check --repair \
             all --force {}",
            image.name()
        ),
    ))
}

/// Lists the tables that were kept, before other findings, and counts their clusters.
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
             that it maps: kept, as an L1 table may have lost its entries. Put those right by hand; \
             or, to do without that data, run: vdkit check --repair all --force {}",
            image.name()
        ),
        repaired: false,
    });
    let rest = std::mem::take(&mut report.findings);
    report.findings = findings.chain(rest).take(CheckReport::FINDINGS_MAX).collect();
}

/// Whether a reference that may have led to an L2 table is damaged.
fn references_damaged(image: &Image, survey: &Survey) -> bool {
    survey.l1_faulty
        || !survey.snapshot_l1_faulty.is_empty()
        || survey.snapshots.cut_short
        || survey.snapshots.snapshots.iter().any(|snapshot| snapshot.lost)
        // An entry that names something else instead.
        || survey.tables.iter().any(|table| table.is_garbage() || survey.in_conflict(image, table))
}

/// Whether the active L1 table has an entry for a part of the disk that names no table: it may have
/// been wiped.
fn has_gap(image: &Image, survey: &Survey) -> bool {
    let entries = image.geometry().l1_entries_for(image.header.guest_bytes);
    let used = usize::try_from(entries).unwrap_or(usize::MAX).saturating_mul(8);
    survey.l1.len() < used || is_gappy(&survey.l1[..used])
}

fn is_gappy(l1: &[u8]) -> bool {
    l1.chunks_exact(8).any(|entry| entry == [0; 8])
}

/// Whether the way to a table of a snapshot may have been lost.
fn snapshots_lost(image: &Image, survey: &Survey) -> Result<bool> {
    if survey.snapshots.cut_short || !survey.snapshot_l1_faulty.is_empty() {
        return Ok(true);
    }
    for snapshot in &survey.snapshots.snapshots {
        if snapshot.lost {
            return Ok(true);
        }
        let (offset, bytes) = (snapshot.l1_offset, snapshot.l1_bytes());
        if is_gappy(&reader::read_table(&*image.storage, offset, bytes)?) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether tables of bitmaps may lie about that nothing names any more: of one that was damaged, or
/// that was changed before a crash.
fn had_bitmaps(image: &Image) -> bool {
    let header = &image.header;
    [extension::BITMAPS, extension::PADDING]
        .into_iter()
        .any(|kind| header.extension(kind).is_some())
}
