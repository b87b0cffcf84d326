//! Checks the directories and tables of one sparse extent.

use std::ops::Range;
use std::sync::Arc;

use vdkit_block::{Error, FileIndex, HostOffset, Repair, Result, Severity, Storage};

use super::Checking;
use crate::header::{SECTOR, SparseHeader, field};
use crate::on_disk;
use crate::source::ExtentHeader;
use crate::sparse::{Entry, Flavor, Sparse};
use crate::used::Used;

/// A directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    None,
    /// First sector.
    At(u64),
    Bad,
}

/// One directory, as read.
struct Directory {
    /// Host offset.
    at: u64,
    words: Vec<u64>,
    changed: bool,
}

/// A sparse extent under check.
pub(super) struct Extent<'a> {
    pub(super) storage: &'a Arc<dyn Storage>,
    pub(super) sparse: Sparse,
    /// Sectors of the disk in the extent.
    pub(super) sectors: u64,
    /// Bytes of the file.
    pub(super) len: u64,
    pub(super) used: Used,
    /// The metadata among the used sectors.
    pub(super) metadata: Used,
    /// Grains may be moved and tables written.
    pub(super) writable: bool,
    /// The extent's kind is written in place.
    pub(super) in_place: bool,
    /// Where new grains and tables go.
    pub(super) end: u64,
    /// The extent was not closed cleanly: copies may be out of date.
    pub(super) unclean: bool,
    /// Host offset of the previous grain.
    pub(super) previous: Option<u64>,
    /// Grains with a place of their own so far, and copies that were made for others.
    pub(super) single: u64,
    pub(super) copies: u64,
    primary: Directory,
    copy: Option<Directory>,
}

/// Checks a sparse extent that holds `sectors` sectors of the disk.
pub(super) fn check(
    checking: &mut Checking<'_, '_>,
    storage: &Arc<dyn Storage>,
    header: &ExtentHeader,
    sectors: u64,
) -> Result<()> {
    let mut extent = Extent::new(checking, storage, header, sectors)?;
    let tables = (sectors * SECTOR).div_ceil(extent.sparse.table_span());
    checking.total += tables;
    checking.report.total_clusters += (sectors * SECTOR).div_ceil(extent.sparse.grain_bytes);
    let mut sectors_of = Vec::with_capacity(tables as usize);
    for index in 0..tables {
        let (primary, copy) = extent.places(checking, index)?;
        sectors_of.push((primary.unwrap_or(0) as u32, copy.unwrap_or(0) as u32));
    }
    extent.write_directories()?;
    extent.metadata = extent.used.clone();
    let before = checking.report.corruptions_left();
    for (index, (primary, copy)) in (0..).zip(sectors_of) {
        checking.monitor.cancel.check()?;
        checking.done += 1;
        checking.monitor.progress.update(checking.done, checking.total);
        let table = |sector: u32| (sector != 0).then_some(u64::from(sector));
        extent.check_table(checking, index, table(primary), table(copy))?;
    }
    extent.check_leaks(checking)?;
    let settled = before == checking.report.corruptions_left();
    // The mark is meaningless in images that are not written in place.
    if extent.unclean && extent.in_place {
        let repaired = extent.writable && checking.repair != Repair::Nothing && settled;
        if repaired {
            storage.sync()?;
            storage.write_at(&[0], HostOffset(field::UNCLEAN))?;
        }
        let message = "the mark of an image that was not closed, expected 0".to_owned();
        checking.report.note(Severity::Leak, field::UNCLEAN, "uncleanShutdown", message, repaired);
    }
    if extent.writable && checking.repair != Repair::Nothing {
        storage.sync()?;
    }
    Ok(())
}

impl<'a> Extent<'a> {
    fn new(
        checking: &mut Checking<'_, '_>,
        storage: &'a Arc<dyn Storage>,
        header: &ExtentHeader,
        sectors: u64,
    ) -> Result<Self> {
        let len = storage.len()?;
        let hosted = header.hosted.as_ref();
        let sparse = header.sparse(FileIndex(0));
        let copy_at = sparse.redundant_at;
        let plain = matches!(sparse.flavor, Flavor::Hosted { .. });
        let in_place = plain && hosted.is_some_and(|h| h.version < 3);
        let writable = in_place && storage.caps().writable && storage.caps().growable;
        let mut extent = Self {
            storage,
            sectors,
            len,
            used: Used::default(),
            metadata: Used::default(),
            writable,
            in_place,
            end: len.next_multiple_of(sparse.grain_bytes),
            unclean: hosted.is_some_and(|h| h.unclean),
            previous: None,
            single: 0,
            copies: 0,
            primary: Directory { at: sparse.directory_at, words: Vec::new(), changed: false },
            copy: None,
            sparse,
        };
        extent.read_directories(checking, hosted, header.directory_entries, copy_at)?;
        Ok(extent)
    }

    /// Reads both directories, and records the metadata at the front of the file.
    fn read_directories(
        &mut self,
        checking: &mut Checking<'_, '_>,
        header: Option<&SparseHeader>,
        entries: u64,
        copy_at: Option<u64>,
    ) -> Result<()> {
        self.note(checking, 0..SECTOR, "header")?;
        if let Some(header) = header
            && header.descriptor != 0
        {
            let at = header.descriptor.saturating_mul(SECTOR).min(self.len);
            let end = at.saturating_add(header.descriptor_sectors.saturating_mul(SECTOR));
            self.note(checking, at..end.min(self.len), "descriptor")?;
        }
        self.primary = self.read_directory(checking, self.sparse.directory_at, entries)?;
        if let Some(at) = copy_at {
            self.copy = Some(self.read_directory(checking, at, entries)?);
        }
        Ok(())
    }

    fn read_directory(
        &mut self,
        checking: &mut Checking<'_, '_>,
        at: u64,
        entries: u64,
    ) -> Result<Directory> {
        let bytes = entries * self.sparse.entry_bytes;
        let inside = at != 0 && at.checked_add(bytes).is_some_and(|end| end <= self.len);
        if !inside {
            let message = format!("{bytes} bytes at {at:#x}, expected a place within the file");
            checking.damage(at, "grain directory", message, false);
            // All of its entries are bad, so nothing may be written.
            self.writable = false;
            return Ok(Directory { at, words: vec![u64::MAX; entries as usize], changed: false });
        }
        self.note(checking, at..at + bytes, "grain directory")?;
        let mut raw = vec![0; bytes as usize];
        self.storage.read_at(&mut raw, HostOffset(at))?;
        let words = on_disk::entries(&raw, self.sparse.entry_bytes);
        Ok(Directory { at, words, changed: false })
    }

    /// Records the place of a metadata structure; an overlap is damage.
    fn note(
        &mut self,
        checking: &mut Checking<'_, '_>,
        bytes: Range<u64>,
        what: &'static str,
    ) -> Result<()> {
        // An empty range must not claim a sector.
        let sectors = bytes.start / SECTOR..bytes.end.div_ceil(SECTOR);
        let limit = checking.limits.check_bytes_max;
        if !bytes.is_empty() && self.used.add(sectors, limit, self.storage.name())? {
            let message = "a place that another structure has too, expected one of its own";
            checking.damage(bytes.start, what, message.to_owned(), false);
        }
        Ok(())
    }

    /// Decodes and validates a directory entry.
    fn place(&self, word: u64) -> Place {
        if word == 0 {
            return Place::None;
        }
        let table = self.sparse.table_bytes().div_ceil(SECTOR);
        match self.sparse.table_sector(word, self.len) {
            Some(sector) if sector > 0 && !self.used.any(sector..sector + table) => {
                Place::At(sector)
            }
            _ => Place::Bad,
        }
    }

    /// The places of a table and its copy, repaired if requested.
    fn places(
        &mut self,
        checking: &mut Checking<'_, '_>,
        index: u64,
    ) -> Result<(Option<u64>, Option<u64>)> {
        let primary = self.place(self.primary.words[index as usize]);
        self.take(checking, primary)?;
        let Some(copy) = &self.copy else {
            if primary == Place::Bad {
                self.bad_entry(checking, index, false);
            }
            return Ok((at(primary), None));
        };
        let copy = self.place(copy.words[index as usize]);
        self.take(checking, copy)?;
        let (mut primary_at, mut copy_at) = (at(primary), at(copy));
        // After a crash only one of the two may exist; that one is valid.
        let behind = self.unclean && (primary == Place::None || copy == Place::None);
        let repairs =
            self.writable && (checking.repairs() || (behind && checking.repair == Repair::Leaks));
        match (primary_at, copy_at) {
            (Some(_), Some(_)) => {}
            (None, None) if (primary, copy) == (Place::None, Place::None) => {}
            (None, None) => self.bad_entry(checking, index, false),
            (None, Some(from)) if behind => {
                if repairs {
                    let zeroes = vec![0; self.sparse.table_bytes() as usize];
                    self.storage.write_at(&zeroes, HostOffset(from * SECTOR))?;
                    self.set_copy(index, 0);
                    copy_at = None;
                }
                self.lacking(checking, index, "a table that the grain directory has not", repairs);
            }
            (None, Some(from)) => {
                if repairs {
                    let new = self.new_table(checking, from)?;
                    primary_at = Some(new);
                    self.primary.words[index as usize] = new;
                    self.primary.changed = true;
                }
                self.bad_entry(checking, index, repairs);
            }
            (Some(from), None) => {
                if repairs {
                    let new = self.new_table(checking, from)?;
                    copy_at = Some(new);
                    self.set_copy(index, new);
                }
                let what = "no table within the file, where the grain directory has one";
                if behind {
                    self.lacking(checking, index, what, repairs);
                } else {
                    let at = self.copy_entry(index);
                    let structure = "redundant grain directory entry";
                    checking.damage(at, structure, what.to_owned(), repairs);
                }
            }
        }
        if behind && primary_at.is_none() {
            return Ok((None, None));
        }
        // Without the table, a reader uses the copy.
        Ok((primary_at.or(copy_at), copy_at))
    }

    /// Reports that the redundant directory is out of date.
    fn lacking(&self, checking: &mut Checking<'_, '_>, index: u64, what: &str, repaired: bool) {
        let at = self.copy_entry(index);
        let structure = "redundant grain directory entry";
        checking.report.note(Severity::Leak, at, structure, what.to_owned(), repaired);
    }

    fn copy_entry(&self, index: u64) -> u64 {
        let start = self.copy.as_ref().map_or(0, |directory| directory.at);
        start.saturating_add(index * self.sparse.entry_bytes)
    }

    fn set_copy(&mut self, index: u64, sector: u64) {
        if let Some(directory) = &mut self.copy {
            directory.words[index as usize] = sector;
            directory.changed = true;
        }
    }

    fn take(&mut self, checking: &mut Checking<'_, '_>, place: Place) -> Result<()> {
        match place {
            Place::At(sector) => {
                let start = sector * SECTOR;
                self.note(checking, start..start + self.sparse.table_bytes(), "grain table")
            }
            _ => Ok(()),
        }
    }

    fn bad_entry(&self, checking: &mut Checking<'_, '_>, index: u64, repaired: bool) {
        let at = self.primary.at.saturating_add(index * self.sparse.entry_bytes);
        let word = self.primary.words[index as usize];
        let found = if repaired { "an entry".to_owned() } else { format!("{word:#x}") };
        let message = format!("{found} that names no place for a grain table of its own");
        checking.damage(at, "grain directory entry", message, repaired);
    }

    /// Writes a copy of a table at the end of the file.
    fn new_table(&mut self, checking: &mut Checking<'_, '_>, from: u64) -> Result<u64> {
        let bytes = self.sparse.table_bytes();
        let mut raw = vec![0; bytes as usize];
        self.storage.read_at(&mut raw, HostOffset(from * SECTOR))?;
        let at = self.take_grains(checking, bytes)?;
        self.storage.write_at(&raw, HostOffset(at))?;
        Ok(at / SECTOR)
    }

    /// Allocates whole grains at the end of the file.
    pub(super) fn take_grains(
        &mut self,
        checking: &mut Checking<'_, '_>,
        bytes: u64,
    ) -> Result<u64> {
        let at = self.end;
        let bytes = bytes.next_multiple_of(self.sparse.grain_bytes);
        if at + bytes > crate::space::HOST_BYTES_MAX {
            let what = "an extent's file ends within 2 TiB";
            return Err(Error::no_space(self.storage.name(), what));
        }
        self.end += bytes;
        self.storage.set_len(self.end)?;
        self.len = self.end;
        self.note(checking, at..at + bytes, "grain")?;
        Ok(at)
    }

    /// Writes repaired directories, after the tables that they name are durable.
    fn write_directories(&mut self) -> Result<()> {
        let directories = std::iter::once(&self.primary).chain(&self.copy);
        for directory in directories.filter(|d| d.changed) {
            self.storage.sync()?;
            let raw: Vec<u8> =
                directory.words.iter().flat_map(|&w| (w as u32).to_le_bytes()).collect();
            self.storage.write_at(&raw, HostOffset(directory.at))?;
        }
        Ok(())
    }

    /// Decodes a table entry; `None` if it is invalid.
    pub(super) fn entry(&self, word: u64) -> Option<Entry> {
        self.sparse.entry(word, self.len)
    }
}

fn at(place: Place) -> Option<u64> {
    match place {
        Place::At(sector) => Some(sector),
        _ => None,
    }
}
