//! Checks a table of blocks, and repairs it.

use vdkit_block::{CheckReport, Limits, Monitor, Repair, Result, Severity, Storage};

use crate::compact::{Mover, Placed, close_gaps, placed};
use crate::geometry::{Geometry, HOLE, Slot};
use crate::table::walk;

/// The structure that findings name.
const ENTRY: &str = "block table entry";

/// Result of a survey, for the envelope's own check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Surveyed {
    /// End of the blocks.
    pub end: u64,
    /// A repair changed something that the envelope must record.
    pub changed: bool,
}

/// Parameters of a survey.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// The file; writable unless `repair` is `Nothing`.
    pub storage: &'a dyn Storage,
    /// The table and blocks, validated.
    pub geometry: &'a Geometry,
    /// Bytes after the last block.
    pub tail_bytes: u64,
    /// Allowed repairs.
    pub repair: Repair,
    /// Resource limits.
    pub limits: &'a Limits,
    /// Cancellation and progress.
    pub monitor: &'a Monitor<'a>,
}

/// Checks the table against the file, and repairs it as `repair` allows: clears entries that point
/// outside of the file or into metadata, copies the block for the second of two entries that name
/// it, and closes gaps. Durable on return.
///
/// # Errors
/// [`vdkit_block::Error::Limit`] for more blocks than the memory limit allows; those of the
/// storage.
pub fn survey(job: &Job<'_>, report: &mut CheckReport) -> Result<Surveyed> {
    let Job { storage, geometry, tail_bytes, repair, monitor, .. } = *job;
    let repairing = matches!(repair, Repair::All | Repair::AllForced);
    report.total_clusters = geometry.entries;
    let mut surveyed = Surveyed { end: geometry.first_block, ..Surveyed::default() };
    monitor.cancel.check()?;
    surveyed.changed |= judge_entries(job, repairing, report)?;
    let blocks = sound(job)?;
    count(geometry, &blocks, report);
    monitor.cancel.check()?;
    let overlaps = overlaps(geometry, &blocks);
    let mut end = blocks.last().map_or(geometry.first_block, |last| last.start + geometry.stride());
    let host_bytes = storage.len()?;
    if end > host_bytes {
        let repaired = repairing && storage.caps().growable;
        if repaired {
            storage.set_len(end + tail_bytes)?;
            surveyed.changed = true;
        }
        let message = format!("ends at {host_bytes:#x}, within the last block, not at {end:#x}");
        report.note(Severity::Corruption, host_bytes, "file", message, repaired);
    }
    // A hostile table must not fill the disk with copies, so the number of blocks at most doubles.
    let copies = repairing && (overlaps.len() * 2 <= blocks.len() || repair == Repair::AllForced);
    for (a, b) in overlaps.iter() {
        let at = geometry.entry_at(b.index);
        report.note_with(Severity::Corruption, at, ENTRY, copies, || {
            format!(
                "entry {} names the block at {:#x}, which overlaps that of entry {} at {:#x}; \
                 each block belongs to one entry",
                b.index, b.start, a.index, a.start
            )
        });
    }
    if copies && !overlaps.is_empty() {
        let mut mover = Mover::new(storage, geometry);
        for (_, b) in &overlaps {
            end = geometry.place(end);
            mover.copy(*b, end)?;
            end += geometry.stride();
        }
        mover.show()?;
        surveyed.changed = true;
    }
    surveyed.end = end;
    report.image_end_offset = end;
    if overlaps.is_empty() || copies {
        gaps(job, report, &mut surveyed)?;
    }
    if surveyed.changed {
        storage.sync()?;
    }
    Ok(surveyed)
}

/// The blocks of valid entries.
fn sound(job: &Job<'_>) -> Result<Vec<Placed>> {
    let host_bytes = job.storage.len()?;
    let mut blocks = placed(job.storage, job.geometry, job.limits.check_bytes_max)?;
    blocks.retain(|block| job.geometry.fault(block.start, host_bytes).is_none());
    Ok(blocks)
}

/// Checks for invalid entries.
fn judge_entries(job: &Job<'_>, repairing: bool, report: &mut CheckReport) -> Result<bool> {
    let Job { storage, geometry, monitor, .. } = *job;
    let host_bytes = storage.len()?;
    let mut changed = false;
    let mut bad = Vec::new();
    walk(storage, geometry, |first, words| {
        monitor.cancel.check()?;
        // Skips a run of equal entries at once: a table may hold billions of them.
        if let [one, rest @ ..] = &*words
            && rest == &words[..rest.len()]
            && match geometry.slot(*one) {
                Slot::At(start) => geometry.fault(start, host_bytes).is_none(),
                _ => true,
            }
        {
            return Ok(false);
        }
        for (n, word) in words.iter().enumerate() {
            let Slot::At(start) = geometry.slot(*word) else { continue };
            let index = first + n as u64;
            let Some(expected) = geometry.fault(start, host_bytes) else { continue };
            let at = geometry.entry_at(index);
            report.note_with(Severity::Corruption, at, ENTRY, repairing, || {
                format!(
                    "entry {index} names a block at {start:#x} of a file of {host_bytes:#x} bytes; \
                     expected {expected}"
                )
            });
            bad.push(index);
        }
        let clear = repairing && !bad.is_empty();
        if clear {
            bad.iter().for_each(|index| words[(index - first) as usize] = HOLE);
            changed = true;
        }
        bad.clear();
        Ok(clear)
    })?;
    Ok(changed)
}

fn count(geometry: &Geometry, blocks: &[Placed], report: &mut CheckReport) {
    report.allocated_clusters = blocks.len() as u64;
    let follows =
        |[a, b]: &[Placed; 2]| b.index == a.index + 1 && b.start == a.start + geometry.stride();
    let runs = blocks.array_windows().filter(|pair| !follows(pair)).count() as u64;
    report.fragmented_clusters = runs;
}

/// Pairs of overlapping blocks: the first, and the one that begins within it.
fn overlaps(geometry: &Geometry, blocks: &[Placed]) -> Vec<(Placed, Placed)> {
    let mut found = Vec::new();
    let mut owner: Option<Placed> = None;
    for block in blocks {
        match owner {
            Some(a) if block.start - a.start < geometry.stride() => found.push((a, *block)),
            _ => owner = Some(*block),
        }
    }
    found
}

/// The parts of a gap before and after the table.
fn without_table(geometry: &Geometry, from: u64, to: u64) -> [(u64, u64); 2] {
    if geometry.table_end() <= from || to <= geometry.table_at {
        return [(from, to), (to, to)];
    }
    [(from, geometry.table_at), (geometry.place(geometry.table_at), to)]
}

/// Finds unreferenced space between and after blocks.
fn gaps(job: &Job<'_>, report: &mut CheckReport, surveyed: &mut Surveyed) -> Result<()> {
    let Job { storage, geometry, tail_bytes, repair, .. } = *job;
    let stride = geometry.stride();
    let blocks = sound(job)?;
    let mut at = geometry.first_block;
    let mut leaks: Vec<(u64, u64)> = Vec::new();
    for block in &blocks {
        for (from, to) in without_table(geometry, at, block.start) {
            let free = to.saturating_sub(from) / stride;
            if free > 0 {
                leaks.push((from, free));
            }
        }
        at = (block.start + stride).max(geometry.kept_end);
    }
    // No block is moved in an image with remaining damage.
    let repairing = repair != Repair::Nothing && report.corruptions_left() == 0;
    if repairing && !leaks.is_empty() {
        surveyed.end = close_gaps(storage, geometry, &Monitor::default())?.end;
        surveyed.changed = true;
        report.image_end_offset = surveyed.end;
    }
    at = geometry.file_end(at);
    let behind = storage.len()?.saturating_sub(tail_bytes).saturating_sub(at) / stride;
    if behind > 0 && storage.caps().growable {
        leaks.push((at, behind));
        // The envelope truncates the file.
        surveyed.changed |= repairing;
    }
    for (offset, count) in leaks {
        for n in 0..count {
            if report.is_full() {
                report.leaks += count - n;
                report.leaks_fixed += if repairing { count - n } else { 0 };
                break;
            }
            let (at, message) = (offset + n * stride, "no entry names this block");
            report.note(Severity::Leak, at, "block", message, repairing);
        }
    }
    Ok(())
}
