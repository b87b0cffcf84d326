//! Allocates host space for grains: freed ones first, then by growing the file.
//!
//! The file grows in batches, before anything refers to the new space. The length must be durable
//! before a table entry: an entry beyond the end would be allocated again after the next open. One
//! durable batch serves many flushes. After a crash, the file may be too long, with holes at its
//! end.

use std::sync::atomic::Ordering;

use vdkit_block::{Error, Fault, Result, Storage};
use vdkit_meta::Freed;

use crate::header::SECTOR;
use crate::image::{Grains, Meta, Vmdk};

/// Bytes of the first batch, and of the largest.
const BATCH_BYTES: u64 = 1 << 20;
const BATCH_BYTES_MAX: u64 = 64 << 20;
/// Sector numbers have 32 bits.
pub(crate) const HOST_BYTES_MAX: u64 = (u32::MAX as u64) * SECTOR;

/// The free space of one extent's file.
#[derive(Debug, Default)]
pub(crate) struct Space {
    /// No grain from here on is in use; a multiple of the grain size.
    pub(crate) frontier: u64,
    /// Bytes of the file, including reserved ones.
    pub(crate) end: u64,
    /// File length that is known to be durable.
    pub(crate) durable: u64,
    /// Bytes of the next batch.
    pub(crate) batch: u64,
    /// Free grains below the frontier: host offset and bytes, sorted, adjacent runs merged.
    pub(crate) free: Vec<(u64, u64)>,
    /// The unclean mark was there when the image was opened.
    pub(crate) unclean_before: bool,
    /// The unclean mark is in the header now.
    pub(crate) unclean: bool,
    /// The file's length must be set on close.
    pub(crate) grown: bool,
    /// Whether each grain has a place of its own within the file, once that is known.
    pub(crate) sound: Option<std::result::Result<(), Box<Fault>>>,
}

/// Grains for a write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) host: u64,
    pub(crate) bytes: u64,
    /// The grains were beyond the former end of the file, so they read as zero.
    pub(crate) fresh: bool,
}

impl Space {
    pub(crate) fn new(len: u64, grain: u64, unclean: bool) -> Self {
        let frontier = len.next_multiple_of(grain);
        Self {
            frontier,
            end: len,
            durable: len,
            batch: BATCH_BYTES,
            unclean_before: unclean,
            unclean,
            ..Self::default()
        }
    }

    /// Frees grains. Frees none if some are free already: in a damaged image, two entries may have
    /// named one grain.
    pub(crate) fn give_back(&mut self, host: u64, bytes: u64) {
        let at = self.free.partition_point(|&(start, _)| start < host);
        let before = at.checked_sub(1).map(|before| self.free[before]);
        if before.is_some_and(|(start, len)| start + len > host)
            || self.free.get(at).is_some_and(|&(start, _)| start < host + bytes)
        {
            return;
        }
        self.free.insert(at, (host, bytes));
        if at + 1 < self.free.len() && host + bytes == self.free[at + 1].0 {
            self.free[at].1 += self.free[at + 1].1;
            self.free.remove(at + 1);
        }
        if at > 0 && self.free[at - 1].0 + self.free[at - 1].1 == host {
            self.free[at - 1].1 += self.free[at].1;
            self.free.remove(at);
        }
    }

    /// Takes `bytes` contiguous free bytes; with `less`, the longest run if none is long enough.
    fn take_free(&mut self, bytes: u64, less: bool) -> Option<Run> {
        let whole = self.free.iter().position(|&(_, has)| has >= bytes);
        let longest = || (0..self.free.len()).max_by_key(|&i| self.free[i].1);
        let at = whole.or_else(|| if less { longest() } else { None })?;
        let (host, has) = self.free[at];
        let taken = bytes.min(has);
        if taken == has {
            self.free.remove(at);
        } else {
            self.free[at] = (host + taken, has - taken);
        }
        Some(Run { host, bytes: taken, fresh: false })
    }

    /// Smallest end of the file: before the free grains at its end.
    pub(crate) fn needed_end(&self) -> u64 {
        let last = |end, &(host, bytes): &(u64, u64)| if host + bytes == end { host } else { end };
        self.free.iter().rev().fold(self.frontier, last)
    }

    /// Must be called once the file has been truncated to [`Space::needed_end`].
    pub(crate) fn cut(&mut self) {
        self.frontier = self.needed_end();
        self.free.retain(|run| run.0 < self.frontier);
    }
}

impl Vmdk {
    /// Takes up to `count` contiguous grains of an extent.
    pub(crate) fn allocate(&self, meta: &mut Meta, of: Grains<'_>, count: u64) -> Result<Run> {
        let bytes = count * of.sparse.grain_bytes;
        self.reclaim(meta);
        let space = &mut meta.space[of.index as usize];
        if let Some(run) = space.take_free(bytes, false) {
            return Ok(run);
        }
        let storage = self.file_of(of.sparse.file);
        match grow(space, of, &**storage, bytes) {
            Ok(run) => Ok(run),
            // A shorter run rather than none.
            Err(error) => space.take_free(bytes, true).ok_or(error),
        }
    }

    /// Creates missing tables `first..=last` of an extent, so that they can be changed.
    pub(crate) fn make_tables(
        &self,
        meta: &mut Meta,
        of: Grains<'_>,
        first: u64,
        last: u64,
    ) -> Result<()> {
        let Grains { index, sparse, .. } = of;
        let copies = if sparse.redundant_at.is_some() { 2 } else { 1 };
        let absent = |table| {
            sparse.table(table).is_none()
                || (copies == 2 && sparse.redundant_table(table).is_none())
        };
        let mut table = first;
        while table <= last {
            if !absent(table) {
                table += 1;
                continue;
            }
            // The rest of the grain is used for following tables that are missing too.
            let bytes = sparse.table_bytes().next_multiple_of(SECTOR);
            let grains = (copies * bytes).div_ceil(sparse.grain_bytes);
            let storage = self.file_of(sparse.file);
            let space = &mut meta.space[index as usize];
            let run = grow(space, of, &**storage, grains * sparse.grain_bytes)?;
            let room = run.bytes / (copies * bytes);
            if room == 0 {
                let what = "a grain table must begin within the first 2 TiB of its file";
                return Err(Error::no_space(storage.name(), what));
            }
            let tables = sparse.directory.read().len() as u64;
            let mut at = run.host;
            let end = tables.min(table + room);
            for table in (table..end).take_while(|&t| absent(t)) {
                self.link_table(meta, of, table, at, (copies == 2).then_some(at + bytes));
                at += copies * bytes;
            }
            let space = &meta.space[index as usize];
            meta.dirty.length_first |= run.host + run.bytes > space.durable;
            table += 1;
        }
        Ok(())
    }

    fn link_table(&self, meta: &mut Meta, of: Grains<'_>, table: u64, at: u64, copy: Option<u64>) {
        let Grains { index, sparse, .. } = of;
        let mut metadata = sparse.metadata.write();
        let mut link = |directory: &mut Vec<u32>, at: u64| {
            // An image of another program may lack only one of the two.
            if directory[table as usize] == 0 {
                directory[table as usize] = (at / SECTOR) as u32;
                let sector = (at / SECTOR) as u32;
                let place = metadata.partition_point(|&s| s < sector);
                metadata.insert(place, sector);
            }
        };
        // The copy first: a reader that sees the table must find it.
        if let Some(copy) = copy {
            link(&mut sparse.redundant.write(), copy);
        }
        link(&mut sparse.directory.write(), at);
        meta.dirty.directories.insert((index, (table * 4 / SECTOR) as u32));
        // The new copy of an existing table has no content yet.
        self.mark_table(meta, of, table);
        self.touch(sparse.file);
    }

    /// Frees grains once no in-flight request can read them.
    pub(crate) fn reclaim(&self, meta: &mut Meta) {
        for freed in meta.reclaim.take_expired(&self.in_flight) {
            let Freed { file, first, count, .. } = freed.run;
            meta.space[file as usize].give_back(first, count);
        }
    }
}

/// Takes bytes after the frontier, growing the file if they are not reserved yet.
fn grow(space: &mut Space, of: Grains<'_>, storage: &dyn Storage, bytes: u64) -> Result<Run> {
    let Grains { piece, sparse, .. } = of;
    let host = space.frontier;
    let full = |what: &str| Err(Error::no_space(storage.name(), what));
    let grain = sparse.grain_bytes;
    let bytes = bytes.min(HOST_BYTES_MAX.saturating_sub(host) / grain * grain);
    if bytes == 0 {
        return full("a grain must begin within the first 2 TiB of its file");
    }
    let needed = host + bytes;
    if needed > space.end {
        if !storage.caps().growable {
            return full("the device is too small for more grains");
        }
        let batch = space.batch.max(bytes).next_multiple_of(grain);
        let end = (host + batch).min(HOST_BYTES_MAX / grain * grain).max(needed);
        if !storage.caps().volatile {
            storage.set_len(end)?;
        }
        (space.end, space.grown) = (end, true);
        space.batch = (space.batch * 2).min(BATCH_BYTES_MAX);
    }
    space.frontier = needed;
    piece.limit.fetch_max(needed, Ordering::AcqRel);
    // Fresh: a partial grain at an earlier end of the file is below the frontier.
    Ok(Run { host, bytes, fresh: true })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_runs_join_and_the_frontier_falls_over_them() {
        let mut space = Space::new(1000, 512, false);
        assert_eq!(space.frontier, 1024);
        space.frontier = 8192;
        for (host, bytes) in [(1024, 512), (2048, 512), (1536, 512), (7168, 512), (7680, 512)] {
            space.give_back(host, bytes);
        }
        assert_eq!(space.free, [(1024, 1536), (7168, 1024)]);
        let run = space.take_free(1024, false).unwrap();
        assert_eq!((run.host, run.bytes, run.fresh), (1024, 1024, false));
        assert!(space.take_free(4096, false).is_none());
        assert_eq!(space.needed_end(), 7168);
        space.cut();
        assert_eq!((space.frontier, space.free.len()), (7168, 1));
        assert_eq!(space.take_free(4096, true).unwrap().bytes, 512);
    }

    #[test]
    fn a_grain_that_is_freed_twice_is_handed_out_once() {
        let mut space = Space::new(8192, 512, false);
        space.give_back(1024, 1024);
        for (host, bytes) in [(1024, 512), (1536, 512), (512, 1024), (1792, 512), (512, 2048)] {
            space.give_back(host, bytes);
            assert_eq!(space.free, [(1024, 1024)], "{host} {bytes}");
        }
    }
}
