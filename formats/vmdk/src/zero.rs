//! Zeroes and discards grains.

use std::ops::Range;

use vdkit_block::{HostOffset, Result, ZeroMode};
use vdkit_meta::MutexGuard;

use crate::image::{Flat, Grains, Kind, Meta, Piece, Vmdk};
use crate::sparse::Entry;

/// Target state of grains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Goal {
    /// They read as zero.
    Zero { may_unmap: bool },
    /// They read as zero independently of the backing file.
    ZeroForGood,
    /// They become holes.
    Hole,
}

impl Vmdk {
    /// As [`vdkit_block::Format::discard`].
    pub(crate) fn discard_range(&self, range: Range<u64>) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let (index, piece) = self.extent_of(at);
            let end = piece.end().min(range.end);
            match &piece.kind {
                Kind::Flat(flat) if piece.writable => {
                    self.cid.change_durably(&*self.storage)?;
                    self.touch(flat.file);
                    let host = HostOffset(flat.at + (at - piece.start));
                    self.file_of(flat.file).discard(host, end - at)?;
                    flat.runs.forget();
                }
                Kind::Sparse(sparse) if piece.writable => {
                    let of = Grains { index, piece, sparse };
                    self.zero_in_steps(of, at..end, Goal::Zero { may_unmap: true })?;
                }
                _ => {}
            }
            at = end;
        }
        Ok(())
    }

    /// As [`vdkit_block::Overlay::empty`].
    pub(crate) fn empty_map(&self) -> Result<()> {
        for (index, piece) in self.extents.iter().enumerate() {
            let Kind::Sparse(sparse) = &piece.kind else { return Err(self.refuse(piece)) };
            if !piece.writable {
                return Err(self.refuse(piece));
            }
            let all = piece.start..piece.end();
            let of = Grains { index: index as u32, piece, sparse };
            self.zero_in_steps(of, all, Goal::Hole)?;
        }
        self.meta.flush(self)
    }

    /// Changes a range; returns its first contiguous changed part.
    pub(crate) fn over_extents(&self, range: Range<u64>, goal: Goal) -> Result<Range<u64>> {
        let mut done: Option<Range<u64>> = None;
        let mut at = range.start;
        while at < range.end {
            let (index, piece) = self.extent_of(at);
            let end = piece.end().min(range.end);
            let part = match &piece.kind {
                Kind::Zero => at..end,
                _ if !piece.writable => at..at,
                Kind::Flat(flat) => self.zero_flat(piece, flat, at..end, goal)?,
                Kind::Sparse(sparse) => {
                    self.zero_in_steps(Grains { index, piece, sparse }, at..end, goal)?
                }
            };
            if !part.is_empty() {
                match &mut done {
                    None => done = Some(part.clone()),
                    Some(done) if done.end == part.start => done.end = part.end,
                    Some(_) => break,
                }
            }
            if part.end < end && done.is_some() {
                break;
            }
            at = end;
        }
        Ok(done.unwrap_or(range.start..range.start))
    }

    fn zero_flat(
        &self,
        piece: &Piece,
        flat: &Flat,
        part: Range<u64>,
        goal: Goal,
    ) -> Result<Range<u64>> {
        self.cid.change_durably(&*self.storage)?;
        self.touch(flat.file);
        let mode = match goal {
            Goal::Zero { may_unmap: false } => ZeroMode::KeepAllocated,
            _ => ZeroMode::MayUnmap,
        };
        let host = HostOffset(flat.at + (part.start - piece.start));
        self.file_of(flat.file).write_zeroes(host, part.end - part.start, mode)?;
        flat.runs.forget();
        Ok(part)
    }

    /// Changes the whole grains within a part of an extent, one chunk of tables at a time. Changed
    /// chunks stay in memory until a flush, which is issued whenever they fill half of the cache.
    /// Returns the first contiguous range of changed grains.
    fn zero_in_steps(&self, of: Grains<'_>, part: Range<u64>, goal: Goal) -> Result<Range<u64>> {
        let Grains { piece, sparse, .. } = of;
        let span = sparse.chunk_entries() * sparse.grain_bytes;
        let mut done = part.start..part.start;
        let mut at = part.start;
        while at < part.end {
            let chunk_end = piece.start + ((at - piece.start) / span + 1).saturating_mul(span);
            let next = chunk_end.min(part.end);
            self.relieve_cache()?;
            let step = self.zero_grains(of, at..next, goal)?;
            match done.is_empty() {
                true => done = step,
                false if step.start == done.end => done.end = step.end,
                false => break,
            }
            if !done.is_empty() && done.end < next {
                break;
            }
            at = next;
        }
        Ok(done)
    }

    /// Changes the whole grains within a part of an extent; returns them.
    fn zero_grains(&self, of: Grains<'_>, part: Range<u64>, goal: Goal) -> Result<Range<u64>> {
        let Grains { piece, sparse, .. } = of;
        let grain = sparse.grain_bytes;
        let start = piece.start + (part.start - piece.start).next_multiple_of(grain);
        // The extent's end counts as the end of a grain.
        let end = if part.end == piece.end() {
            part.end
        } else {
            piece.start + (part.end - piece.start) / grain * grain
        };
        let nothing = part.start..part.start;
        if start >= end {
            return Ok(nothing);
        }
        let based = self.backing.is_some();
        let marks = sparse.has_zero_grains();
        let possible = match goal {
            Goal::Hole => true,
            Goal::ZeroForGood => marks,
            Goal::Zero { .. } => marks || !based,
        };
        if !possible {
            return Ok(nothing);
        }
        let mut meta = self.meta.lock();
        self.meta.wait_until(&mut meta, |meta| !meta.tickets.overlap(&(start..end)));
        if goal == (Goal::Zero { may_unmap: false }) && self.has_grains(of, start, end)? {
            // No entry can mean "zero with space", so the caller writes zeroes.
            return Ok(nothing);
        }
        self.require_sound(&mut meta, of)?;
        let word = match goal {
            Goal::Hole => 0,
            Goal::ZeroForGood => 1,
            Goal::Zero { .. } => u64::from(marks && based),
        };
        self.set_words(&mut meta, of, start..end, word)?;
        Ok(start..end)
    }

    /// Whether any grain of a range has space.
    fn has_grains(&self, of: Grains<'_>, start: u64, end: u64) -> Result<bool> {
        let Grains { piece, sparse, .. } = of;
        let mut at = start;
        while at < end {
            let inside = at - piece.start;
            let step = if sparse.table(inside / sparse.table_span()).is_none() {
                sparse.table_span() - inside % sparse.table_span()
            } else if let Entry::At(_) = self.entry_at(of, at)? {
                return Ok(true);
            } else {
                sparse.grain_bytes
            };
            at += step;
        }
        Ok(false)
    }

    /// Sets the entries of grains to 0 or 1, table by table.
    fn set_words(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        of: Grains<'_>,
        grains: Range<u64>,
        word: u64,
    ) -> Result<()> {
        let Grains { piece, sparse, .. } = of;
        let span = sparse.table_span();
        let mut at = grains.start;
        while at < grains.end {
            let table = (at - piece.start) / span;
            let end = (piece.start + (table + 1) * span).min(grains.end);
            if sparse.table(table).is_none() {
                if word == 0 {
                    at = end;
                    continue;
                }
                self.make_tables(meta, of, table, table)?;
            }
            self.change_entries(meta, of, &(at..end), |_, old| match old {
                // Without a backing file, a hole equals zeroes.
                Entry::Zero if word == 0 && self.backing.is_none() => None,
                _ => Some(word),
            })?;
            at = end;
        }
        Ok(())
    }
}
