//! Resolves guest offsets to host offsets.

use std::sync::atomic::Ordering;

use vdkit_block::{
    Codec, Compressed, Error, Extent, GuestOffset, HostOffset, Place, Remedy, Result,
};

use crate::header::SECTOR;
use crate::image::{Flat, Grains, Kind, Piece, Vmdk};
use crate::sparse::{Entry, Flavor, Sparse};

/// Bytes of a *chunk*, the unit in which tables are read and cached: several tables, or one larger
/// one. Tables are usually adjacent, so one read serves 512 MiB of the disk.
const CHUNK_BYTES: u64 = 32 << 10;
/// Least capacity of the cache in chunks, however small the budget.
pub(crate) const CHUNKS_MIN: usize = 16;
/// Most chunks that one lookup reads: otherwise it would walk a full disk to its end.
const LOADS_MAX: u32 = 16;
const CHUNK_TABLES_MAX: u64 = 16;

/// Key of a chunk: the extent and the chunk within it.
pub(crate) type Key = (u32, u64);

/// The entries of a chunk's tables, concatenated.
pub(crate) type Chunk = Box<[u64]>;

/// Result of decoding entries of one chunk.
enum Lookup {
    /// The run from the requested offset; if `open`, it may continue after the chunk.
    Run { extent: Extent, open: bool },
    /// The entry is invalid.
    Fault(u64),
}

impl Sparse {
    pub(crate) fn chunk_tables(&self) -> u64 {
        (CHUNK_BYTES / self.table_bytes()).clamp(1, CHUNK_TABLES_MAX)
    }

    pub(crate) fn chunk_entries(&self) -> u64 {
        self.chunk_tables() * self.table_entries
    }
}

impl Vmdk {
    /// As [`vdkit_block::Format::resolve`]; with `holes`, asks the file system for holes of flat
    /// extents.
    pub(crate) fn map(&self, at: GuestOffset, len: u64, holes: bool) -> Result<Extent> {
        let mut found: Option<Extent> = None;
        let (mut done, mut loads) = (0, 0);
        while done < len {
            let here = at.0 + done;
            let (index, piece) = self.extent_of(here);
            let rest = (piece.end() - here).min(len - done);
            let (next, open) = match &piece.kind {
                Kind::Zero => (Extent { len: rest, place: Place::Zero { allocated: false } }, true),
                Kind::Flat(flat) if holes => (self.flat_run(piece, flat, here, rest)?, true),
                Kind::Flat(flat) => (flat_extent(piece, flat, here, rest), true),
                Kind::Sparse(sparse) => {
                    let of = Grains { index, piece, sparse };
                    match self.sparse_run(of, here, rest, &mut loads) {
                        Ok(run) => run,
                        // The run found so far is still valid.
                        Err(_) if found.is_some() => break,
                        Err(error) => return Err(error),
                    }
                }
            };
            found = match found {
                None => Some(next),
                Some(sofar) => match sofar.merge(next) {
                    Some(joined) => Some(joined),
                    None => break,
                },
            };
            done = found.map_or(0, |f| f.len);
            if !open || loads >= LOADS_MAX {
                break;
            }
        }
        Ok(found.unwrap_or(Extent { len, place: Place::Hole }))
    }

    /// As [`vdkit_block::Format::resolve_cached`]: one extent, one chunk.
    pub(crate) fn map_cached(&self, at: GuestOffset, len: u64) -> Option<Extent> {
        let (index, piece) = self.extent_of(at.0);
        let rest = (piece.end() - at.0).min(len);
        match &piece.kind {
            Kind::Zero => Some(Extent { len: rest, place: Place::Zero { allocated: false } }),
            Kind::Flat(flat) => Some(flat_extent(piece, flat, at.0, rest)),
            Kind::Sparse(sparse) => {
                let inside = at.0 - piece.start;
                if let Some(run) = self.absent_run(sparse, inside, rest) {
                    return Some(Extent { len: run, place: Place::Hole });
                }
                let key = (index, inside / sparse.table_span() / sparse.chunk_tables());
                let of = Grains { index, piece, sparse };
                match self.tables.with(key, |words| of.lookup(words, inside, rest))? {
                    Lookup::Run { extent, .. } => self.guard(of, extent).ok(),
                    Lookup::Fault(_) => None,
                }
            }
        }
    }

    /// The run from `here` in a sparse extent, within one chunk or over absent tables.
    fn sparse_run(
        &self,
        of: Grains<'_>,
        here: u64,
        rest: u64,
        loads: &mut u32,
    ) -> Result<(Extent, bool)> {
        let Grains { index, piece, sparse } = of;
        let inside = here - piece.start;
        if let Some(run) = self.absent_run(sparse, inside, rest) {
            return Ok((Extent { len: run, place: Place::Hole }, true));
        }
        let key = (index, inside / sparse.table_span() / sparse.chunk_tables());
        let lookup = loop {
            match self.tables.with(key, |words| of.lookup(words, inside, rest)) {
                Some(lookup) => break lookup,
                None => {
                    *loads += 1;
                    self.load(key)?;
                }
            }
        };
        match lookup {
            Lookup::Run { extent, open } => Ok((self.guard(of, extent)?, open)),
            Lookup::Fault(word) => Err(self.entry_fault(of, inside, word)),
        }
    }

    /// Bytes from `inside` without a table; `None` if there is one.
    fn absent_run(&self, sparse: &Sparse, inside: u64, rest: u64) -> Option<u64> {
        let span = sparse.table_span();
        let directory = sparse.directory.read();
        let (first, last) = (inside / span, (inside + rest - 1) / span);
        let absent = |index: &u64| directory.get(*index as usize).is_none_or(|&sector| sector == 0);
        if !absent(&first) {
            return None;
        }
        let end = (first + 1..=last).find(|index| !absent(index)).unwrap_or(last + 1);
        Some((end * span - inside).min(rest))
    }

    /// Fails if a writable image maps guest bytes to its own metadata, which a write would destroy.
    fn guard(&self, of: Grains<'_>, extent: Extent) -> Result<Extent> {
        let Grains { piece, sparse, .. } = of;
        let Place::Data { offset, exclusive: true, .. } = extent.place else { return Ok(extent) };
        let bytes = offset.0..offset.0 + extent.len;
        if !self.writable || !sparse.overlaps_metadata(&bytes) {
            return Ok(extent);
        }
        Err(Error::corrupt(
            self.file_of(sparse.file).name(),
            offset.0,
            "grain",
            format!("metadata that a grain of the extent at {:#x} overlaps", piece.start),
            "grains in places of their own",
        )
        .with_remedy(Remedy::REPAIR))
    }

    pub(crate) fn entry_fault(&self, of: Grains<'_>, inside: u64, word: u64) -> Error {
        let Grains { piece, sparse, .. } = of;
        let at = of.entry_offset(inside);
        let expected = "0 or the sector of a grain within the file";
        let file = self.file_of(sparse.file).name();
        let error = Error::corrupt(file, at, "grain table entry", format!("{word:#x}"), expected);
        if piece.writable { error.with_remedy(Remedy::REPAIR) } else { error }
    }

    /// Loads a chunk into the cache.
    pub(crate) fn load(&self, key: Key) -> Result<()> {
        self.tables.load(key, || self.read_chunk(key))
    }

    pub(crate) fn read_chunk(&self, key: Key) -> Result<Chunk> {
        let Grains { piece, sparse, .. } = self.grains(key.0);
        let count = sparse.chunk_tables();
        let sectors: Vec<u64> =
            (0..count).map(|i| sparse.table(key.1 * count + i).unwrap_or(0)).collect();
        let mut words = vec![0; sparse.chunk_entries() as usize];
        self.read_tables(sparse, &sectors, &mut words)?;
        if self.writable || sparse.redundant.read().is_empty() {
            return Ok(words.into_boxed_slice());
        }
        // If a table is damaged, its copy is used.
        let limit = piece.limit.load(Ordering::Acquire);
        let entries = sparse.table_entries as usize;
        let sound = |words: &[u64]| words.iter().all(|&word| sparse.entry(word, limit).is_some());
        for (i, table) in words.chunks_exact_mut(entries).enumerate() {
            if sound(table) {
                continue;
            }
            if let Some(copy) = sparse.redundant_table(key.1 * count + i as u64) {
                let mut other = vec![0; entries];
                self.read_tables(sparse, &[copy], &mut other)?;
                if sound(&other) {
                    table.copy_from_slice(&other);
                }
            }
        }
        Ok(words.into_boxed_slice())
    }

    /// Reads tables, adjacent ones with one request; absent ones stay zero.
    pub(crate) fn read_tables(
        &self,
        sparse: &Sparse,
        sectors: &[u64],
        words: &mut [u64],
    ) -> Result<()> {
        let storage = self.file_of(sparse.file);
        let (bytes, entries) = (sparse.table_bytes(), sparse.table_entries as usize);
        let step = if bytes.is_multiple_of(SECTOR) { bytes / SECTOR } else { u64::MAX };
        let mut first = 0;
        while first < sectors.len() {
            if sectors[first] == 0 {
                first += 1;
                continue;
            }
            let mut end = first + 1;
            while end < sectors.len() && Some(sectors[end]) == sectors[end - 1].checked_add(step) {
                end += 1;
            }
            let mut raw = vec![0; (end - first) * bytes as usize];
            storage.read_padded(&mut raw, HostOffset(sectors[first] * SECTOR))?;
            let target = &mut words[first * entries..end * entries];
            if sparse.entry_bytes == 8 {
                for (word, raw) in target.iter_mut().zip(raw.as_chunks::<8>().0) {
                    *word = u64::from_le_bytes(*raw);
                }
            } else {
                for (word, raw) in target.iter_mut().zip(raw.as_chunks::<4>().0) {
                    *word = u32::from_le_bytes(*raw).into();
                }
            }
            first = end;
        }
        Ok(())
    }

    /// A flat extent's run, with holes as the file system reports them.
    fn flat_run(&self, piece: &Piece, flat: &Flat, here: u64, rest: u64) -> Result<Extent> {
        let host = flat.at + (here - piece.start);
        let run = flat.runs.run(&**self.file_of(flat.file), host, flat.at + piece.len)?;
        let len = rest.min(run.len);
        if run.data {
            return Ok(flat_extent(piece, flat, here, len));
        }
        Ok(Extent { len, place: Place::Zero { allocated: false } })
    }
}

impl Grains<'_> {
    /// Host offset of the table entry for a byte of the extent.
    pub(crate) fn entry_offset(&self, inside: u64) -> u64 {
        let sparse = self.sparse;
        let table = sparse.table(inside / sparse.table_span()).unwrap_or(0);
        let index = inside / sparse.grain_bytes % sparse.table_entries;
        table * SECTOR + index * sparse.entry_bytes
    }

    /// The longest run from `inside` within one chunk, at most `rest` bytes.
    fn lookup(&self, words: &[u64], inside: u64, rest: u64) -> Lookup {
        let Grains { piece, sparse, .. } = *self;
        let grain = sparse.grain_bytes;
        let limit = piece.limit.load(Ordering::Acquire);
        let first = ((inside / grain) % sparse.chunk_entries()) as usize;
        let skip = inside % grain;
        let Some(entry) = sparse.entry(words[first], limit) else {
            return Lookup::Fault(words[first]);
        };
        if let (Entry::At(host), true) = (entry, sparse.is_compressed()) {
            let len = (grain - skip).min(rest);
            let place =
                Place::Compressed(compressed_place(sparse, words, first, host, skip, limit));
            return Lookup::Run { extent: Extent { len, place }, open: false };
        }
        let most = (skip + rest).div_ceil(grain) as usize;
        let end = words.len().min(first + most);
        let step = grain / SECTOR;
        let flat = !matches!(sparse.flavor, Flavor::Se { .. });
        let mut at = first + 1;
        while at < end {
            let follows = match entry {
                Entry::Hole => words[at] == 0,
                Entry::Zero => sparse.entry(words[at], limit) == Some(Entry::Zero),
                // Plain sector numbers: compares with the next one without decoding.
                Entry::At(host) if flat => {
                    words[at] == words[at - 1] + step && host + (at - first) as u64 * grain < limit
                }
                Entry::At(host) => {
                    let next = host + (at - first) as u64 * grain;
                    sparse.entry(words[at], limit) == Some(Entry::At(next))
                }
            };
            if !follows {
                break;
            }
            at += 1;
        }
        let len = ((at - first) as u64 * grain - skip).min(rest);
        let place = match entry {
            Entry::Hole => Place::Hole,
            Entry::Zero => Place::Zero { allocated: false },
            Entry::At(host) => Place::Data {
                file: sparse.file,
                offset: HostOffset(host + skip),
                exclusive: piece.writable,
            },
        };
        Lookup::Run { extent: Extent { len, place }, open: at == words.len() }
    }
}

fn flat_extent(piece: &Piece, flat: &Flat, here: u64, len: u64) -> Extent {
    let offset = HostOffset(flat.at + (here - piece.start));
    Extent { len, place: Place::Data { file: flat.file, offset, exclusive: piece.writable } }
}

/// Place of a compressed grain. Its marker holds the length; here, the next grain in the file
/// usually bounds it.
fn compressed_place(
    sparse: &Sparse,
    words: &[u64],
    index: usize,
    host: u64,
    skip: u64,
    limit: u64,
) -> Compressed {
    // Incompressible data grows, but by less than this.
    let longest = 2 * sparse.grain_bytes;
    let next = words[index + 1..].iter().find(|&&word| word > 1).map_or(0, |&word| word * SECTOR);
    let bound = if next > host { next - host } else { longest };
    Compressed {
        file: sparse.file,
        offset: HostOffset(host),
        len: bound.min(longest).min(limit - host) as u32,
        codec: Codec::Zlib,
        unpacked_len: sparse.grain_bytes as u32,
        skip: skip as u32,
    }
}
