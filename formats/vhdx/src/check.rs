//! Consistency check and repair.
//!
//! A check reads the file as it is after a replay of its log, and validates every structure and
//! entry; each finding names the section of [MS-VHDX] that is violated. Used space is recorded per
//! MiB, to find overlapping blocks.
//!
//! Leaks are unreferenced ranges that use space on the host. If one of two copies of a structure is
//! damaged, it is reported as a leak too, since no data is lost.

use std::sync::Arc;

use vdkit_block::{
    CheckReport, Error, HostOffset, Limits, Monitor, OfflineImage, Repair, Result, Severity,
    Storage, ZeroMode, require_within,
};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

use crate::header::Header;
use crate::image::{Parts, Vhdx};
use crate::layout::{BITMAP_BYTES, BatEntry, MIB, PRESENT, REGION_OFFSETS, State, TABLE_BYTES};
use crate::used::Used;

/// Bytes of one read of the table.
const STEP_BYTES: u64 = MIB;

/// Checks an image, and repairs it as far as `repair` allows.
///
/// A repair replays the log, rewrites the damaged one of two headers or region tables, clears
/// reserved fields, frees leaked space, and zeroes blocks whose space is outside of the file. Only
/// [`Repair::AllForced`] zeroes blocks whose space belongs to another structure, since they may
/// still hold their data.
///
/// # Errors
/// Errors of opening an image whose damage prevents a check; [`Error::Limit`]; I/O.
pub(crate) fn check(image: &OfflineImage<'_>, repair: Repair) -> Result<CheckReport> {
    let (storage, limits, monitor) = (image.storage, &image.limits, &image.monitor);
    if repair == Repair::Nothing {
        let parts = Parts::read(storage, false, limits)?;
        if parts.log_entries > 0 {
            monitor.progress.message(&format!(
                "the image was not closed cleanly: {} entries of its log are taken as replayed",
                parts.log_entries
            ));
        }
        return Ok(Survey::take(&parts, limits, monitor)?.report);
    }
    let parts = Parts::read(storage, true, limits)?;
    let found = Survey::take(&parts, limits, monitor)?;
    repair_copies(storage, &parts)?;
    if repair != Repair::Leaks && !found.bad.is_empty() {
        repair_entries(storage, &found, repair, limits)?;
    }
    let mut report = found.report;
    // Rereads the image, so that reported repairs are verified.
    let survey = |parts: &Parts| {
        let Survey { report, leaked, .. } = Survey::take(parts, limits, monitor)?;
        Ok::<_, Error>((report, leaked))
    };
    let mut parts = Parts::read(storage, false, limits)?;
    let (mut left, leaked) = survey(&parts)?;
    // An apparent leak may be what a damaged entry pointed to.
    if left.corruptions == 0 {
        for (from, to) in leaked {
            storage.write_zeroes(HostOffset(from), to - from, ZeroMode::MayUnmap)?;
        }
        cut(storage, left.image_end_offset, parts.metadata.fixed)?;
        parts = Parts::read(storage, false, limits)?;
        left = survey(&parts)?.0;
    }
    storage.sync()?;
    for finding in &mut report.findings {
        finding.repaired = !left.findings.iter().any(|other| other.offset == finding.offset);
    }
    report.corruptions_fixed = report.corruptions.saturating_sub(left.corruptions);
    report.leaks_fixed = report.leaks.saturating_sub(left.leaks);
    report.image_end_offset = left.image_end_offset;
    Ok(report)
}

#[derive(Clone, Copy, Debug)]
struct BadEntry {
    index: u64,
    new: BatEntry,
    forced: bool,
}

/// One walk over an image.
struct Survey<'a> {
    parts: &'a Parts,
    report: CheckReport,
    used: Used,
    bad: Vec<BadEntry>,
    /// Unreferenced ranges of the file that hold data.
    leaked: Vec<(u64, u64)>,
    file_bytes: u64,
}

impl<'a> Survey<'a> {
    fn take(parts: &'a Parts, limits: &Limits, monitor: &Monitor<'_>) -> Result<Self> {
        let file_bytes = parts.storage.len()?;
        let (what, bytes) = ("memory for the check in bytes", Used::words(file_bytes) * 8);
        require_within(parts.storage.name(), what, bytes, limits.check_bytes_max)?;
        let mut new = Self {
            parts,
            report: CheckReport::default(),
            used: Used::new(file_bytes),
            bad: Vec::new(),
            leaked: Vec::new(),
            file_bytes,
        };
        new.structures();
        new.items();
        new.table(monitor)?;
        new.gaps(monitor)?;
        Ok(new)
    }

    fn add(&mut self, severity: Severity, offset: u64, structure: &'static str, message: String) {
        self.report.note(severity, offset, structure, message, false);
    }

    /// Checks headers, region tables, and the places of regions.
    fn structures(&mut self) {
        let header: Header = self.parts.headers.current;
        if !self.parts.headers.spare_sound {
            let at = self.parts.headers.spare_offset();
            let text = "is damaged: no signature or a wrong CRC-32C; the other header holds \
                        [2.2.2]";
            self.add(Severity::Leak, at, "header", text.to_owned());
        }
        if let Some(slot) = self.parts.regions.damaged {
            let text = "is damaged or says something else than the other one [2.2.3]";
            self.add(Severity::Leak, REGION_OFFSETS[slot], "region table", text.to_owned());
        }
        let mut places = vec![(0, MIB), (header.log_offset, header.log_offset + header.log_bytes)];
        places.extend(self.parts.regions.all.iter().map(|r| (r.offset, r.end())));
        for (from, to) in places {
            self.used.take(from, to);
            if to > self.file_bytes && from != to {
                let text = format!(
                    "ends at {to:#x}, behind the file's end at {:#x} [2.1]",
                    self.file_bytes
                );
                self.add(Severity::Corruption, from, "region", text);
            }
            self.report.image_end_offset = self.report.image_end_offset.max(to);
        }
    }

    /// Checks items of the metadata region.
    fn items(&mut self) {
        let parts = self.parts;
        let metadata = &parts.metadata;
        let mut sorted: Vec<_> = metadata.items.iter().filter(|item| item.bytes > 0).collect();
        sorted.sort_by_key(|item| item.offset);
        for pair in sorted.windows(2) {
            if pair[0].offset + pair[0].bytes > pair[1].offset {
                let text = format!("{} overlaps {} [2.6.1.2]", pair[1].id, pair[0].id);
                self.add(Severity::Corruption, pair[1].entry, "metadata table entry", text);
            }
        }
        for item in metadata.items.iter().filter(|item| item.flags & !7 != 0) {
            let text = format!("reserved flags {:#x} are set [2.6.1.2]", item.flags & !7);
            self.add(Severity::Corruption, item.entry + 24, "metadata table entry", text);
        }
        if metadata.reserved_parameters != 0 {
            let text =
                format!("reserved flags {:#x} are set [2.6.2.1]", metadata.reserved_parameters);
            self.add(Severity::Corruption, metadata.flags_at, "file parameters", text);
        }
    }

    /// Checks the block allocation table, and the blocks that it names.
    fn table(&mut self, monitor: &Monitor<'_>) -> Result<()> {
        let parts = self.parts;
        let geometry = parts.metadata.geometry;
        let entries = geometry.bat_entries(parts.metadata.guest_bytes);
        let chunk = (1 << geometry.chunk_bits()) + 1;
        self.report.total_clusters = geometry.blocks(parts.metadata.guest_bytes);
        let mut walk = Walk::default();
        each_entry(parts, monitor, |index, entry| {
            if (index + 1).is_multiple_of(chunk) {
                self.bitmap_entry(index, entry, &mut walk);
            } else {
                self.payload_entry(index, index - index / chunk, entry, &mut walk);
            }
        })?;
        if walk.kept {
            // Last: if other data is in the space, the entry without data is wrong.
            each_entry(parts, monitor, |index, entry| {
                if !(index + 1).is_multiple_of(chunk) {
                    self.kept_space(index, index - index / chunk, entry);
                }
            })?;
        }
        monitor.progress.update(entries, entries);
        Ok(())
    }

    /// Checks the space that a block without data keeps.
    fn kept_space(&mut self, index: u64, block: u64, entry: BatEntry) {
        let geometry = self.parts.metadata.geometry;
        let rest = self.parts.metadata.guest_bytes.saturating_sub(block << geometry.block_bits);
        if rest == 0 || entry.host() == 0 || !entry.state().is_some_and(State::keeps_space) {
            return;
        }
        let bytes = geometry.block_bytes();
        let end = entry.host().saturating_add(bytes);
        let new = BatEntry(entry.state_bits());
        if entry.host().saturating_add(bytes.min(rest)) > self.file_bytes {
            self.bad(index, entry, new, false, "space behind the file's end [2.5.1]");
        } else if self.used.take(entry.host(), end) {
            self.bad(index, entry, new, false, "space that another block uses [2.5.1.1]");
        } else {
            let seen = self.report.image_end_offset;
            self.report.image_end_offset = seen.max(end.min(self.file_bytes));
        }
    }

    fn bad(&mut self, index: u64, entry: BatEntry, new: BatEntry, forced: bool, rule: &str) {
        let at = self.parts.regions.bat.offset + index * 8;
        let text = format!("{:#018x}: {rule}", entry.0);
        self.add(Severity::Corruption, at, "block allocation table entry", text);
        self.bad.push(BadEntry { index, new, forced });
    }

    fn payload_entry(&mut self, index: u64, block: u64, entry: BatEntry, walk: &mut Walk) {
        let geometry = self.parts.metadata.geometry;
        let start = block << geometry.block_bits;
        if start >= self.parts.metadata.guest_bytes {
            return; // entries of a partial last chunk are undefined
        }
        let zero = BatEntry::ZERO;
        let host = BatEntry(entry.host());
        let Some(state) = entry.state() else {
            // If the entry names free space, that is most likely the block's own.
            let end = entry.host().saturating_add(geometry.block_bytes());
            let there = entry.host() > 0 && end <= self.file_bytes;
            let there = there && !self.used.take(entry.host(), end);
            let new = if there { BatEntry::present(entry.host()) } else { zero };
            return self.bad(index, entry, new, false, "a reserved state [2.5.1.1]");
        };
        if state == State::PartiallyPresent && !geometry.has_parent {
            let full = BatEntry(host.0 | PRESENT);
            let rule = "partially present without a parent [2.5.1.1]";
            self.bad(index, entry, full, false, rule);
        } else if entry.reserved() != 0 {
            let new = BatEntry(host.0 | entry.state_bits());
            self.bad(index, entry, new, false, "reserved bits are set [2.5.1]");
        } else if matches!(state, State::NotPresent | State::Zero) && entry.host() != 0 {
            let new = BatEntry(entry.state_bits());
            let rule = "an offset where the state has none [2.5.1.1]";
            self.bad(index, entry, new, false, rule);
        }
        walk.partial |= state == State::PartiallyPresent;
        if !entry.has_data() {
            walk.kept |= state.keeps_space() && entry.host() != 0;
            return;
        }
        let bytes = geometry.block_bytes();
        let needed = bytes.min(self.parts.metadata.guest_bytes - start);
        let (host, end) = (entry.host(), entry.host().saturating_add(bytes));
        if host.saturating_add(needed) > self.file_bytes {
            let rule = "a block behind the file's end [2.5.1]";
            return self.bad(index, entry, zero, false, rule);
        }
        if self.used.take(host, end) {
            let rule = "a block over another one, or over headers, log or regions [2.5.1]";
            return self.bad(index, entry, zero, true, rule);
        }
        self.report.allocated_clusters += 1;
        self.report.fragmented_clusters += u64::from(walk.next.is_some_and(|next| next != host));
        walk.next = Some(end);
        self.report.image_end_offset = self.report.image_end_offset.max(end.min(self.file_bytes));
    }

    fn bitmap_entry(&mut self, index: u64, entry: BatEntry, walk: &mut Walk) {
        let partial = std::mem::take(&mut walk.partial);
        let has_parent = self.parts.metadata.geometry.has_parent;
        let none = BatEntry::NOT_PRESENT;
        match entry.state_bits() {
            PRESENT if has_parent => {
                let (host, end) = (entry.host(), entry.host().saturating_add(BITMAP_BYTES));
                if entry.reserved() != 0 {
                    let new = BatEntry(entry.0 & !entry.reserved());
                    self.bad(index, entry, new, false, "reserved bits are set [2.5.1]");
                }
                if end > self.file_bytes {
                    let rule = "a sector bitmap behind the file's end [2.5.1]";
                    self.bad(index, entry, none, partial, rule);
                } else if self.used.take(host, end) {
                    let rule = "a sector bitmap over another block or structure [2.5.1]";
                    self.bad(index, entry, none, true, rule);
                } else {
                    let end_offset = self.report.image_end_offset;
                    self.report.image_end_offset = end_offset.max(end);
                }
            }
            PRESENT => {
                let rule = "a sector bitmap in an image without a parent [2.5.1.2]";
                self.bad(index, entry, none, false, rule);
            }
            0 if partial => {
                let at = self.parts.regions.bat.offset + index * 8;
                let text = "no sector bitmap for partial blocks [2.5.1.2]".to_owned();
                self.add(Severity::Corruption, at, "block allocation table entry", text);
            }
            0 if entry.0 == 0 => {}
            0 => self.bad(index, entry, none, false, "bits in an absent sector bitmap [2.5.1.2]"),
            _ => self.bad(index, entry, none, partial, "a reserved state [2.5.1.2]"),
        }
    }

    /// Finds unreferenced space that holds data.
    fn gaps(&mut self, monitor: &Monitor<'_>) -> Result<()> {
        let storage = &self.parts.storage;
        if !storage.caps().growable {
            return Ok(()); // the rest of a device is not part of the image
        }
        let mut at = MIB;
        let mut found = Vec::new();
        while let Some((from, end)) = self.used.next_gap(at) {
            let to = end.min(self.file_bytes);
            monitor.cancel.check()?;
            let mut here = from;
            while here < to {
                let extent = storage.extent_at(HostOffset(here), to - here)?;
                let len = extent.len.min(to - here).max(1);
                if extent.data {
                    found.push((here, here + len));
                }
                here += len;
            }
            at = end;
        }
        for (from, to) in found {
            let text = format!("{} bytes that nothing refers to [2.5]", to - from);
            self.add(Severity::Leak, from, "space", text);
            self.leaked.push((from, to));
        }
        Ok(())
    }
}

/// State that later entries depend on.
#[derive(Debug, Default)]
struct Walk {
    /// A block of this chunk is partial.
    partial: bool,
    /// A block without data keeps its space.
    kept: bool,
    /// Host offset at which the next block would be contiguous.
    next: Option<u64>,
}

/// Calls `visit` with the index and the value of each entry of the block allocation table.
fn each_entry(
    parts: &Parts,
    monitor: &Monitor<'_>,
    mut visit: impl FnMut(u64, BatEntry),
) -> Result<()> {
    let entries = parts.metadata.geometry.bat_entries(parts.metadata.guest_bytes);
    for first in (0..entries).step_by((STEP_BYTES / 8) as usize) {
        monitor.cancel.check()?;
        monitor.progress.update(first, entries);
        let mut words = vec![U64::ZERO; (entries - first).min(STEP_BYTES / 8) as usize];
        let at = parts.regions.bat.offset + first * 8;
        parts.storage.read_padded(words.as_mut_bytes(), HostOffset(at))?;
        for (index, word) in (first..).zip(&words) {
            visit(index, BatEntry(word.get()));
        }
    }
    Ok(())
}

/// Rewrites the damaged one of two headers or region tables.
fn repair_copies(storage: &Arc<dyn Storage>, parts: &Parts) -> Result<()> {
    if !parts.headers.spare_sound {
        let mut headers = parts.headers;
        headers.update(&**storage, headers.current)?;
        storage.sync()?;
    }
    if let Some(slot) = parts.regions.damaged {
        let mut table = vec![0; TABLE_BYTES as usize];
        storage.read_padded(&mut table, HostOffset(REGION_OFFSETS[1 - slot]))?;
        storage.write_at(&table, HostOffset(REGION_OFFSETS[slot]))?;
        storage.sync()?;
    }
    Ok(())
}

/// Replaces invalid entries, through the log.
fn repair_entries(
    storage: &Arc<dyn Storage>,
    found: &Survey<'_>,
    repair: Repair,
    limits: &Limits,
) -> Result<()> {
    let image = Vhdx::open_writable(storage, limits)?;
    image.begin_session()?;
    for bad in found.bad.iter().filter(|bad| !bad.forced || repair == Repair::AllForced) {
        image.relieve()?;
        image.set_entry(bad.index, bad.new)?;
    }
    image.meta.close(&*image)
}

/// Truncates the file after the last structure.
fn cut(storage: &Arc<dyn Storage>, end: u64, fixed: bool) -> Result<()> {
    let end = end.next_multiple_of(MIB);
    if !fixed && storage.caps().growable && storage.len()? > end {
        storage.set_len(end)?;
    }
    Ok(())
}
