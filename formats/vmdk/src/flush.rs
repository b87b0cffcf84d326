//! Writes metadata in an order that keeps the disk consistent at each moment.
//!
//! | first group | second group, after a barrier | after another barrier |
//! |---|---|---|
//! | guest data, the files' lengths, the unclean mark, the content id | grain tables, their copies, grain directories | grains that lost their entry may be reallocated |
//!
//! The barrier is omitted if nothing in the second group depends on the first: the grains are
//! within a durable file length and read as zero until their data is written, and an earlier flush
//! has made the marks and the id durable.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vdkit_block::{HostOffset, Result, Storage};
use vdkit_meta::{Metadata, MutexGuard};

use crate::header::{SECTOR, field};
use crate::image::{Meta, Vmdk};
use crate::map::{Chunk, Key};
use crate::space::Space;
use crate::write::SECTOR_ENTRIES;

/// Changed tables, and what must be durable before they may be written.
#[derive(Debug, Default)]
pub(crate) struct Dirty {
    /// Changed sectors of each chunk of tables, one bit each.
    pub(crate) tables: BTreeMap<Key, u64>,
    /// Changed sectors of directories: extent and sector within the directory.
    pub(crate) directories: BTreeSet<(u32, u32)>,
    /// Guest data must be durable before the tables that expose it.
    pub(crate) data_first: bool,
    /// The longer file lengths must be durable before the tables.
    pub(crate) length_first: bool,
}

/// Copies of changed metadata at one moment.
pub struct Copies {
    /// File, host offset and bytes, adjacent ones merged.
    writes: Vec<(u16, u64, Vec<u8>)>,
    dirty: Dirty,
    /// Extents whose header is to be marked as unclean.
    marks: Vec<u32>,
    /// By extent: the file length that the first barrier makes durable.
    lengths: Vec<u64>,
    /// A new content id was written before this moment.
    id: bool,
    barrier: bool,
}

impl Metadata for Vmdk {
    type State = Meta;
    type LeaderState = ();
    type Dirty = Copies;

    fn take(&self, meta: &mut MutexGuard<'_, Meta>, _alone: bool) -> Result<Copies> {
        self.copy_dirty(meta)
    }

    fn write(&self, copies: &Copies, _order: &mut ()) -> Result<()> {
        for &index in &copies.marks {
            self.write_mark(index, true)?;
        }
        if copies.barrier && !copies.writes.is_empty() {
            self.sync_all()?;
        }
        for (file, at, bytes) in &copies.writes {
            self.files[usize::from(*file)].write_at(bytes, HostOffset(*at))?;
        }
        self.sync_all()
    }

    fn end_write(&self, meta: &mut Meta, copies: Copies, durable: bool) {
        self.tables.end_write(durable);
        if !durable {
            for (key, bits) in copies.dirty.tables {
                *meta.dirty.tables.entry(key).or_default() |= bits;
            }
            meta.dirty.directories.extend(copies.dirty.directories);
            (meta.dirty.data_first, meta.dirty.length_first) = (true, true);
            return;
        }
        for index in copies.marks {
            meta.space[index as usize].unclean = true;
        }
        for (space, length) in meta.space.iter_mut().zip(copies.lengths) {
            space.durable = space.durable.max(length);
        }
        if copies.id {
            self.cid.settled();
        }
    }

    /// Discards unreferenced grains in the file system, and then frees them. In this order: a late
    /// hole would erase a new owner's data.
    fn recycle(&self) -> Result<()> {
        let ready = self.meta.lock().reclaim.take_expired(&self.in_flight);
        for freed in ready.iter().map(|freed| freed.run) {
            if let Some(sparse) = self.piece(freed.file).sparse() {
                // Errors are ignored: the image owns the space either way.
                let _ = self.file_of(sparse.file).discard(HostOffset(freed.first), freed.count);
            }
        }
        let mut meta = self.meta.lock();
        for freed in ready.iter().map(|freed| freed.run) {
            meta.space[freed.file as usize].give_back(freed.first, freed.count);
        }
        Ok(())
    }

    fn is_dirty(&self, meta: &Meta) -> bool {
        !meta.dirty.tables.is_empty() || !meta.dirty.directories.is_empty()
    }

    fn trim(&self, meta: &mut MutexGuard<'_, Meta>, _order: &mut ()) -> Result<()> {
        (0..).zip(&mut meta.space).try_for_each(|(index, space)| self.trim_extent(index, space))
    }

    /// Clears the unclean marks. A mark that was set when the image was opened stays, since the
    /// copies are unchecked.
    fn finish(&self, _order: &mut ()) -> Result<()> {
        let mut meta = self.meta.lock();
        let mut any = false;
        for (index, space) in (0..).zip(&mut meta.space) {
            if space.unclean && !space.unclean_before {
                self.write_mark(index, false)?;
                (space.unclean, any) = (false, true);
            }
        }
        drop(meta);
        if any { self.sync_all() } else { Ok(()) }
    }
}

impl Vmdk {
    /// Flushes if changed chunks fill half of the cache, since they cannot be evicted.
    pub(crate) fn relieve_cache(&self) -> Result<()> {
        if self.meta.lock().dirty.tables.len() > self.tables.capacity() / 2 {
            self.meta.flush(self)?;
        }
        Ok(())
    }

    fn copy_dirty(&self, meta: &mut Meta) -> Result<Copies> {
        let mut writes = Vec::new();
        for (&key, &bits) in &meta.dirty.tables {
            self.copy_tables(key, bits, &mut writes)?;
        }
        for &(index, sector) in &meta.dirty.directories {
            self.copy_directory(index, sector, &mut writes);
        }
        let id = match writes.is_empty() {
            true => self.cid.is_written(),
            false => self.cid.change(&*self.storage)?,
        };
        // Nothing can fail from here on: this flush now owns the dirty state.
        let dirty = std::mem::take(&mut meta.dirty);
        self.tables.begin_write(|_| ());
        let tables = dirty.tables.keys().map(|key| key.0);
        let changed: BTreeSet<u32> =
            tables.chain(dirty.directories.iter().map(|place| place.0)).collect();
        let unmarked = |index: &u32| !meta.space[*index as usize].unclean;
        let marks: Vec<u32> = changed.into_iter().filter(unmarked).collect();
        Ok(Copies {
            writes: joined(writes),
            barrier: dirty.data_first || dirty.length_first || !marks.is_empty() || id,
            dirty,
            marks,
            lengths: meta.space.iter().map(|space| space.end).collect(),
            id,
        })
    }

    /// Copies the changed sectors of a chunk's tables and of their copies.
    fn copy_tables(
        &self,
        key: Key,
        bits: u64,
        writes: &mut Vec<(u16, u64, Vec<u8>)>,
    ) -> Result<()> {
        let Some(sparse) = self.piece(key.0).sparse() else { return Ok(()) };
        let pieces = sparse.table_entries.div_ceil(SECTOR_ENTRIES);
        let tables = sparse.chunk_tables();
        let copy = |words: &Chunk| {
            for bit in (0..64).filter(|bit| bits >> bit & 1 != 0) {
                let (table, piece) = (bit / pieces, bit % pieces);
                let first = piece * SECTOR_ENTRIES;
                let last = (first + SECTOR_ENTRIES).min(sparse.table_entries);
                let start = (table * sparse.table_entries) as usize;
                let words = &words[start + first as usize..start + last as usize];
                let bytes: Vec<u8> =
                    words.iter().flat_map(|&word| (word as u32).to_le_bytes()).collect();
                let number = key.1 * tables + table;
                let places = [sparse.table(number), sparse.redundant_table(number)];
                for sector in places.into_iter().flatten() {
                    let at = (sector + piece) * SECTOR;
                    writes.push((sparse.file.0, at, bytes.clone()));
                }
            }
        };
        self.tables.with_loaded(key, || self.read_chunk(key), copy)
    }

    /// Copies a changed sector of a directory and of its copy.
    fn copy_directory(&self, index: u32, sector: u32, writes: &mut Vec<(u16, u64, Vec<u8>)>) {
        let Some(sparse) = self.piece(index).sparse() else { return };
        let mut copy = |directory: &[u32], at: u64| {
            let first = sector as usize * 128;
            let last = (first + 128).min(directory.len());
            let bytes = directory[first..last].iter().flat_map(|s| s.to_le_bytes()).collect();
            writes.push((sparse.file.0, at + u64::from(sector) * SECTOR, bytes));
        };
        copy(&sparse.directory.read(), sparse.directory_at);
        if let Some(at) = sparse.redundant_at {
            copy(&sparse.redundant.read(), at);
        }
    }

    /// Makes everything durable that was written since opening.
    fn sync_all(&self) -> Result<()> {
        let own = self.files.iter().any(|file| Arc::ptr_eq(file, &self.storage));
        if !own {
            self.storage.sync()?;
        }
        for (file, touched) in self.files.iter().zip(&self.touched) {
            if touched.load(Ordering::Acquire) || Arc::ptr_eq(file, &self.storage) {
                file.sync()?;
            }
        }
        Ok(())
    }

    /// Writes the unclean mark of an extent's header.
    fn write_mark(&self, index: u32, unclean: bool) -> Result<()> {
        let Some(sparse) = self.piece(index).sparse() else { return Ok(()) };
        self.touch(sparse.file);
        let storage: &dyn Storage = &**self.file_of(sparse.file);
        storage.write_at(&[u8::from(unclean)], HostOffset(field::UNCLEAN))
    }

    /// Truncates preallocated space from an extent's file, and discards unused grains.
    fn trim_extent(&self, index: u32, space: &mut Space) -> Result<()> {
        let piece = self.piece(index);
        let Some(sparse) = piece.sparse().filter(|_| piece.writable) else { return Ok(()) };
        let storage = self.file_of(sparse.file);
        for &(host, bytes) in &space.free {
            // A dropped reservation may have left bytes there.
            let _ = storage.discard(HostOffset(host), bytes);
        }
        if !storage.caps().growable {
            return Ok(());
        }
        let (end, len) = (space.needed_end(), storage.len()?);
        if len > end || (space.grown && len < end) {
            storage.set_len(end)?;
            self.touch(sparse.file);
            (space.end, space.durable) = (end, space.durable.min(end));
        }
        // Only after the truncation: space beyond the frontier is assumed to read as zero.
        space.cut();
        Ok(())
    }
}

/// Sorts writes by file and offset, and merges adjacent ones.
fn joined(mut writes: Vec<(u16, u64, Vec<u8>)>) -> Vec<(u16, u64, Vec<u8>)> {
    writes.sort_by_key(|(file, at, _)| (*file, *at));
    let mut out: Vec<(u16, u64, Vec<u8>)> = Vec::with_capacity(writes.len());
    for (file, at, bytes) in writes {
        match out.last_mut() {
            Some((f, a, sofar)) if *f == file && *a + sofar.len() as u64 == at => {
                sofar.extend_from_slice(&bytes);
            }
            _ => out.push((file, at, bytes)),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbors_become_one_write() {
        let write = |file, at, len: usize| (file, at, vec![at as u8; len]);
        let out = joined(vec![write(0, 8, 4), write(1, 4, 4), write(0, 0, 4), write(0, 4, 4)]);
        let shape: Vec<_> = out.iter().map(|(f, a, b)| (*f, *a, b.len())).collect();
        assert_eq!(shape, [(0, 0, 12), (1, 4, 4)]);
    }
}
