//! The set of referenced units of a file: sectors or grains.

use std::ops::Range;

use rustc_hash::FxHashMap;
use vdkit_block::{Result, require_within};

const PAGE_UNITS: u64 = 32768;
const PAGE_WORDS: usize = (PAGE_UNITS / 64) as usize;

/// A set of units; its memory is proportional to the used parts of the file.
#[derive(Clone, Debug, Default)]
pub(crate) struct Used {
    pages: FxHashMap<u64, Box<[u64; PAGE_WORDS]>>,
}

impl Used {
    /// Adds units. Returns whether some of them were already in the set.
    ///
    /// # Errors
    /// [`vdkit_block::Error::Limit`] above `bytes_max` of memory.
    pub(crate) fn add(&mut self, units: Range<u64>, bytes_max: u64, file: &str) -> Result<bool> {
        let mut twice = false;
        let mut at = units.start;
        while at < units.end {
            let number = at / PAGE_UNITS;
            if !self.pages.contains_key(&number) {
                let held = (self.pages.len() as u64 + 1) * (PAGE_UNITS / 8);
                require_within(file, "memory of a check", held, bytes_max)?;
            }
            let page = self.pages.entry(number).or_insert_with(|| Box::new([0; PAGE_WORDS]));
            let end = units.end.min((number + 1) * PAGE_UNITS);
            while at < end {
                let bit = at % PAGE_UNITS;
                let count = (64 - bit % 64).min(end - at);
                let mask = (u64::MAX >> (64 - count)) << (bit % 64);
                let word = &mut page[(bit / 64) as usize];
                twice |= *word & mask != 0;
                *word |= mask;
                at += count;
            }
        }
        Ok(twice)
    }

    /// Whether any of these units is in the set.
    pub(crate) fn any(&self, units: Range<u64>) -> bool {
        self.next(units.start, units.end, true) < units.end
    }

    /// The first unit from `at` on that is used, or unused; `end` if there is none.
    fn next(&self, mut at: u64, end: u64, used: bool) -> u64 {
        while at < end {
            let page_end = (at / PAGE_UNITS + 1) * PAGE_UNITS;
            let Some(page) = self.pages.get(&(at / PAGE_UNITS)) else {
                if !used {
                    return at;
                }
                at = page_end;
                continue;
            };
            let bit = at % PAGE_UNITS;
            let word = page[(bit / 64) as usize];
            let word = if used { word } else { !word } >> (bit % 64);
            if word != 0 {
                return (at + u64::from(word.trailing_zeros())).min(end);
            }
            at += 64 - bit % 64;
        }
        end
    }

    /// Runs of unused units within a range.
    pub(crate) fn gaps(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let mut at = range.start;
        std::iter::from_fn(move || {
            let start = self.next(at, range.end, false);
            if start >= range.end {
                return None;
            }
            at = self.next(start, range.end, true);
            Some(start..at)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_counted_once() {
        let mut used = Used::default();
        let mut add = |range| used.add(range, 1 << 20, "x").unwrap();
        assert!(!add(10..20) && !add(100..200) && !add(32760..32900) && !add(20..21));
        assert!(add(19..22) && add(32767..32768));
        let gaps: Vec<_> = used.gaps(0..70000).collect();
        assert_eq!(gaps, [0..10, 22..100, 200..32760, 32900..70000]);
        assert!(used.any(0..11) && !used.any(0..10) && used.any(32899..40000));
        assert!(used.add(0..1 << 32, 1 << 10, "x").is_err());
        assert_eq!(Used::default().gaps(5..5).count(), 0);
    }
}
