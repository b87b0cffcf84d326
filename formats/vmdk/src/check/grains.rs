//! Checks the entries of a table, and the grains that they name.

use vdkit_block::{HostOffset, Repair, Result, Severity, ZeroMode, is_zero};
use zerocopy::{FromZeros, IntoBytes};

use super::Checking;
use super::sparse::Extent;
use crate::header::SECTOR;
use crate::on_disk::{GrainMarker, entries};
use crate::sparse::{Entry, Flavor};
use crate::unpack::MARKER_BYTES;

/// Bytes of one step of the search for leaks.
const STEP_BYTES: u64 = 1 << 20;

impl Extent<'_> {
    fn read_table(&self, sector: u64) -> Result<Vec<u64>> {
        let mut raw = vec![0; self.sparse.table_bytes() as usize];
        self.storage.read_padded(&mut raw, HostOffset(sector * SECTOR))?;
        Ok(entries(&raw, self.sparse.entry_bytes))
    }

    fn write_table(&self, sector: u64, words: &[u64]) -> Result<()> {
        let raw: Vec<u8> = words.iter().flat_map(|&word| (word as u32).to_le_bytes()).collect();
        self.storage.write_at(&raw, HostOffset(sector * SECTOR))
    }

    /// Checks a table against its copy and the file, and repairs both.
    pub(super) fn check_table(
        &mut self,
        checking: &mut Checking<'_, '_>,
        index: u64,
        primary: Option<u64>,
        copy: Option<u64>,
    ) -> Result<()> {
        let Some(primary) = primary else { return Ok(()) };
        let mut words = self.read_table(primary)?;
        let copy = copy.filter(|&copy| copy != primary);
        let second = match copy {
            Some(copy) => Some(self.read_table(copy)?),
            None => None,
        };
        let grain = self.sparse.grain_bytes / SECTOR;
        let first = index * self.sparse.table_entries;
        let mut moved = false;
        let before = words.clone();
        for slot in 0..words.len() {
            // Entries beyond the end of the extent are meaningless.
            if (first + slot as u64) * grain >= self.sectors {
                break;
            }
            let at = primary * SECTOR + slot as u64 * self.sparse.entry_bytes;
            let other = second.as_ref().map(|second| second[slot]);
            let guest = first + slot as u64;
            moved |= self.check_entry(checking, at, guest, &mut words[slot], other)?;
        }
        if moved {
            // Copied bytes must be durable before an entry exposes them.
            self.storage.sync()?;
        }
        if words != before {
            self.write_table(primary, &words)?;
        }
        let (Some(copy), Some(second)) = (copy, second) else { return Ok(()) };
        self.check_copy(checking, copy, &words, &second, &before)
    }

    /// The copy must equal the table, except for repaired entries.
    fn check_copy(
        &self,
        checking: &mut Checking<'_, '_>,
        copy: u64,
        words: &[u64],
        second: &[u64],
        before: &[u64],
    ) -> Result<()> {
        let differs = |i: &usize| second[*i] != words[*i];
        let count = (0..words.len()).filter(differs).count();
        let Some(slot) = (0..words.len()).find(differs) else { return Ok(()) };
        let severity = if self.unclean { Severity::Leak } else { Severity::Corruption };
        let repairs = self.writable
            && (checking.repairs() || (self.unclean && checking.repair == Repair::Leaks));
        if repairs {
            self.write_table(copy, words)?;
        }
        // A difference that only follows from a repaired entry is not a finding.
        if (0..words.len()).any(|i| second[i] != before[i] && second[i] != words[i]) {
            let at = copy * SECTOR + slot as u64 * self.sparse.entry_bytes;
            let message = format!(
                "{count} entries differ from the grain table's: found {:#x}, expected {:#x}",
                second[slot], words[slot]
            );
            checking.report.note(severity, at, "redundant grain table", message, repairs);
        }
        Ok(())
    }

    /// Checks one entry. Returns whether a grain was copied.
    fn check_entry(
        &mut self,
        checking: &mut Checking<'_, '_>,
        at: u64,
        guest: u64,
        word: &mut u64,
        other: Option<u64>,
    ) -> Result<bool> {
        let repairs = checking.repairs() && self.writable;
        let found = *word;
        match self.named(found) {
            Some(Entry::At(host)) => return self.check_grain(checking, at, guest, word, host),
            Some(_) => return Ok(false),
            None => {}
        }
        let sound = other.filter(|&other| self.named(other).is_some());
        let expected =
            if sound.is_some() { "what its copy says" } else { "0, or a grain's sector" };
        let message = format!("{found:#x}, expected {expected}");
        checking.damage(at, "grain table entry", message, repairs);
        if repairs {
            // A bad entry points to no valid bytes, so a hole loses nothing.
            *word = sound.unwrap_or(0);
        }
        match self.named(*word) {
            Some(Entry::At(host)) if repairs => self.check_grain(checking, at, guest, word, host),
            _ => Ok(false),
        }
    }

    /// Decodes a word; `None` if no grain can be at its offset.
    fn named(&self, word: u64) -> Option<Entry> {
        match self.entry(word)? {
            Entry::At(host) if self.is_metadata(host) => None,
            entry => Some(entry),
        }
    }

    /// Whether a grain there would overlap metadata.
    fn is_metadata(&self, host: u64) -> bool {
        let bytes = if self.sparse.is_compressed() { SECTOR } else { self.sparse.grain_bytes };
        self.metadata.any(host / SECTOR..(host + bytes) / SECTOR)
    }

    fn check_grain(
        &mut self,
        checking: &mut Checking<'_, '_>,
        at: u64,
        guest: u64,
        word: &mut u64,
        host: u64,
    ) -> Result<bool> {
        checking.report.allocated_clusters += 1;
        let bytes = match self.sparse.flavor {
            Flavor::Stream { markers: true, .. } => self.check_marker(checking, host, guest)?,
            Flavor::Stream { .. } => SECTOR,
            _ => self.sparse.grain_bytes,
        };
        checking.report.compressed_clusters += u64::from(self.sparse.is_compressed());
        let follows = self.previous.is_none_or(|previous| previous == host);
        checking.report.fragmented_clusters += u64::from(!follows);
        self.previous = Some(host + bytes);
        let end = host + bytes;
        checking.report.image_end_offset = checking.report.image_end_offset.max(end);
        let sectors = host / SECTOR..end.div_ceil(SECTOR);
        let limit = checking.limits.check_bytes_max;
        if !self.used.any(sectors.clone()) {
            self.used.add(sectors, limit, self.storage.name())?;
            self.single += 1;
            return Ok(false);
        }
        // A hostile table must not fill the disk with copies, so the number of grains at most
        // doubles.
        let few = self.copies < self.single || checking.repair == Repair::AllForced;
        let repairs = checking.repairs() && self.writable && few;
        let message = format!("{:#x}, a grain that overlaps something else", *word);
        checking.damage(at, "grain table entry", message, repairs);
        if !repairs {
            return Ok(false);
        }
        let mut raw = vec![0; bytes as usize];
        self.storage.read_padded(&mut raw, HostOffset(host))?;
        let new = self.take_grains(checking, bytes)?;
        self.storage.write_at(&raw, HostOffset(new))?;
        self.copies += 1;
        *word = new / SECTOR;
        self.previous = Some(new + bytes);
        Ok(true)
    }

    /// A compressed grain's marker must name its place on the disk. Returns the grain's bytes.
    fn check_marker(&self, checking: &mut Checking<'_, '_>, host: u64, guest: u64) -> Result<u64> {
        let mut marker = GrainMarker::new_zeroed();
        self.storage.read_padded(marker.as_mut_bytes(), HostOffset(host))?;
        let (lba, size) = (marker.lba.get(), u64::from(marker.size));
        let expected = guest * (self.sparse.grain_bytes / SECTOR);
        if lba != expected {
            let message = format!("disk address {lba}, expected {expected}");
            checking.damage(host, "grain marker", message, false);
        }
        let end = host + MARKER_BYTES as u64 + size;
        if size == 0 || size > 2 * self.sparse.grain_bytes || end > self.len {
            let message = format!("{size} compressed bytes, expected a grain within the file");
            checking.damage(host, "grain marker", message, false);
            return Ok(SECTOR);
        }
        Ok((MARKER_BYTES as u64 + size).next_multiple_of(SECTOR))
    }

    /// Finds unreferenced bytes: freed since the file was last truncated, or written before a crash
    /// and never linked. Zeroes are not leaks, since a hole uses no space.
    pub(super) fn check_leaks(&mut self, checking: &mut Checking<'_, '_>) -> Result<()> {
        let plain = matches!(self.sparse.flavor, Flavor::Hosted { .. });
        if !plain {
            return Ok(());
        }
        let grain = self.sparse.grain_bytes;
        // Nothing is freed while entries are wrong: an apparent leak may still be in use.
        let repairs = self.writable
            && checking.repair != Repair::Nothing
            && checking.report.corruptions_left() == 0;
        let end = self.len / SECTOR;
        let gaps: Vec<_> = self.used.gaps(0..end).collect();
        for gap in gaps {
            let (mut at, to) = (gap.start * SECTOR, gap.end * SECTOR);
            while at < to {
                checking.monitor.cancel.check()?;
                let run = self.storage.extent_at(HostOffset(at), to - at)?;
                let len = run.len.min(STEP_BYTES).min(to - at);
                if run.data && len > 0 {
                    let mut bytes = vec![0; len as usize];
                    self.storage.read_padded(&mut bytes, HostOffset(at))?;
                    for (n, piece) in (0..).zip(bytes.chunks(grain as usize)) {
                        if !is_zero(piece) {
                            let place = at + n * grain;
                            if repairs {
                                let len = piece.len() as u64;
                                self.storage.write_zeroes(
                                    HostOffset(place),
                                    len,
                                    ZeroMode::MayUnmap,
                                )?;
                            }
                            let message = "bytes that no table refers to".to_owned();
                            checking.report.note(Severity::Leak, place, "grain", message, repairs);
                        }
                    }
                }
                at += if run.data { len.max(SECTOR) } else { run.len.max(SECTOR) };
            }
        }
        Ok(())
    }
}
