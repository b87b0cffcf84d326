//! Looks for damage before the space of an extent changes.
//!
//! A grain that a table names beyond the end of a truncated file becomes valid once the file grows,
//! over another grain's data. If two entries name one grain, freeing it for one of them destroys
//! the other. So no grain is handed out or freed before each was seen to have a place of its own.

use std::sync::atomic::Ordering;

use vdkit_block::{Error, Limits, Remedy, Result, require_within};

use crate::header::SECTOR;
use crate::image::{Grains, Meta, Vmdk};
use crate::map::Chunk;
use crate::sparse::Entry;
use crate::used::Used;

/// The grains that tables name.
#[derive(Default)]
struct Named {
    /// Numbers of the grains that are aligned to their size.
    aligned: Used,
    /// Host offset and table entry of the others: none, if common programs wrote the image.
    others: Vec<(u64, u64)>,
}

impl Vmdk {
    /// Fails unless each entry of an extent's tables names a grain of its own within the file. The
    /// result is kept while the image is open.
    ///
    /// # Errors
    /// [`Error::Corrupt`]; [`Error::Limit`]; I/O.
    pub(crate) fn require_sound(&self, meta: &mut Meta, of: Grains<'_>) -> Result<()> {
        let sound = &mut meta.space[of.index as usize].sound;
        if let Some(known) = sound {
            return known.clone().map_err(Error::Corrupt);
        }
        let found = self.survey(of);
        *sound = match &found {
            Ok(()) => Some(Ok(())),
            Err(Error::Corrupt(fault)) => Some(Err(fault.clone())),
            // It may succeed another time.
            Err(_) => None,
        };
        found
    }

    /// Reads all tables of an extent. `meta` must be locked.
    fn survey(&self, of: Grains<'_>) -> Result<()> {
        let Grains { index, piece, sparse } = of;
        let mut named = Named::default();
        let entries = sparse.chunk_entries();
        for chunk in 0..piece.len.div_ceil(sparse.grain_bytes).div_ceil(entries) {
            let tables = sparse.chunk_tables();
            if (0..tables).all(|table| sparse.table(chunk * tables + table).is_none()) {
                continue;
            }
            let first = chunk * entries;
            let judge = |words: &Chunk| self.judge(of, &mut named, first, words);
            // A changed chunk stays cached while `meta` is locked, so the file is not older.
            match self.tables.with((index, chunk), judge) {
                Some(judged) => judged?,
                None => {
                    let words = self.read_chunk((index, chunk))?;
                    self.judge(of, &mut named, first, &words)?;
                }
            }
        }
        self.require_others_apart(of, &mut named)
    }

    /// Judges the entries of a chunk, whose first one is for the grain `first` of the disk.
    fn judge(&self, of: Grains<'_>, named: &mut Named, first: u64, words: &[u64]) -> Result<()> {
        let Grains { piece, sparse, .. } = of;
        let (grain, limit) = (sparse.grain_bytes, piece.limit.load(Ordering::Acquire));
        let bytes_max = Limits::default().check_bytes_max;
        // Entries beyond the end of the extent are meaningless.
        for (number, &word) in (first..piece.len.div_ceil(grain)).zip(words) {
            let Some(entry) = sparse.entry(word, limit) else {
                return Err(self.entry_fault(of, number * grain, word));
            };
            let Entry::At(host) = entry else { continue };
            let (unit, file) = (host / grain, self.file_of(sparse.file).name());
            let again = if host.is_multiple_of(grain) {
                named.aligned.add(unit..unit + 1, bytes_max, file)?
            } else {
                let bytes = (named.others.len() + 1) * size_of::<(u64, u64)>();
                require_within(file, "memory of a check", bytes as u64, bytes_max)?;
                named.others.push((host, number));
                false
            };
            if again || sparse.overlaps_metadata(&(host..host + grain)) {
                return Err(self.overlap(of, number, word));
            }
        }
        Ok(())
    }

    fn require_others_apart(&self, of: Grains<'_>, named: &mut Named) -> Result<()> {
        let grain = of.sparse.grain_bytes;
        named.others.sort_unstable();
        let mut end = 0;
        for &(host, number) in &named.others {
            let unit = host / grain;
            if host < end || named.aligned.any(unit..unit + 2) {
                return Err(self.overlap(of, number, host / SECTOR));
            }
            end = host + grain;
        }
        Ok(())
    }

    /// The error for an entry whose grain is not its own.
    fn overlap(&self, of: Grains<'_>, number: u64, word: u64) -> Error {
        let Grains { sparse, .. } = of;
        Error::corrupt(
            self.file_of(sparse.file).name(),
            of.entry_offset(number * sparse.grain_bytes),
            "grain table entry",
            format!("{word:#x}, in use otherwise"),
            "a grain of its own",
        )
        .with_remedy(Remedy::REPAIR)
    }
}
