//! What a dirty bitmap marked at one moment, in no more memory than its bits take.

use std::ops::Range;

const PAGE_BITS: u64 = 4096;

/// The bits of a bitmap. Pages without marks take no memory.
#[derive(Debug)]
pub struct DirtyBits {
    granularity: u64,
    pages: Vec<Option<Box<[u64; PAGE_BITS as usize / 64]>>>,
    /// Where the last marked run ends: a disk may end within a granule.
    end: u64,
}

impl DirtyBits {
    /// No marks; `granularity` in bytes per bit.
    pub fn new(granularity: u64) -> Self {
        Self { granularity: granularity.max(1), pages: Vec::new(), end: 0 }
    }

    /// Marks what a run of bytes touches.
    pub fn mark(&mut self, run: Range<u64>) {
        if run.is_empty() {
            return;
        }
        self.end = self.end.max(run.end);
        let bits = run.start / self.granularity..run.end.div_ceil(self.granularity);
        let pages = bits.end.div_ceil(PAGE_BITS) as usize;
        if self.pages.len() < pages {
            self.pages.resize_with(pages, || None);
        }
        let mut at = bits.start;
        while at < bits.end {
            let end = bits.end.min((at / 64 + 1) * 64);
            let page = &mut self.pages[(at / PAGE_BITS) as usize];
            let words = page.get_or_insert_with(|| Box::new([0; PAGE_BITS as usize / 64]));
            words[(at % PAGE_BITS / 64) as usize] |= (u64::MAX >> (64 - (end - at))) << (at % 64);
            at = end;
        }
    }

    /// The first marked run in a range of bytes, as far as it lies within.
    pub fn first_in(&self, range: Range<u64>) -> Option<Range<u64>> {
        let end = range.end.min(self.end);
        let bits = end.div_ceil(self.granularity);
        let first = self.next(true, range.start / self.granularity, bits);
        let after = self.next(false, first, bits);
        let run = (first * self.granularity).max(range.start)..(after * self.granularity).min(end);
        (first < bits && !run.is_empty()).then_some(run)
    }

    /// The first bit of this value from `from` on; `end` if there is none before.
    fn next(&self, value: bool, from: u64, end: u64) -> u64 {
        let mut at = from;
        while at < end {
            let page = self.pages.get((at / PAGE_BITS) as usize).and_then(Option::as_deref);
            let Some(words) = page else {
                if !value {
                    return at;
                }
                at = (at / PAGE_BITS + 1) * PAGE_BITS;
                continue;
            };
            let word = words[(at % PAGE_BITS / 64) as usize];
            let found = (if value { word } else { !word }) & (u64::MAX << (at % 64));
            if found != 0 {
                return (at / 64 * 64 + u64::from(found.trailing_zeros())).min(end);
            }
            at = (at / 64 + 1) * 64;
        }
        end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(bits: &DirtyBits, range: Range<u64>) -> Vec<Range<u64>> {
        let mut found = Vec::new();
        let mut at = range.start;
        while let Some(run) = bits.first_in(at..range.end) {
            at = run.end;
            found.push(run);
        }
        found
    }

    #[test]
    fn runs_are_found_as_they_were_marked() {
        for granularity in [512, 4096, 65536] {
            let unit = |units: Range<u64>| units.start * granularity..units.end * granularity;
            let odd = unit(20_000..20_001).start..20_000 * granularity + 100;
            let marked = [unit(3..4), unit(60..70), unit(128..9000), unit(12_288..12_289), odd];
            let mut bits = DirtyBits::new(granularity);
            assert_eq!(bits.first_in(0..u64::MAX), None);
            marked.iter().for_each(|run| bits.mark(run.clone()));
            assert_eq!(runs(&bits, 0..u64::MAX), marked);
            assert_eq!(runs(&bits, 0..marked[0].start), []);
            let (from, to) = (unit(65..66).start + 1, unit(130..131).start + 5);
            let cut = [from..unit(60..70).end, unit(128..9000).start..to];
            assert_eq!(runs(&bits, from..to), cut);
        }
    }

    #[test]
    fn memory_is_bounded_by_the_bits() {
        // Every second granule of 16 Mi.
        let mut bits = DirtyBits::new(65536);
        (0..8 << 20).for_each(|pair| bits.mark(pair * 131_072..pair * 131_072 + 65536));
        let pages = bits.pages.iter().flatten().count();
        assert_eq!(pages as u64 * PAGE_BITS, 16 << 20);
        assert_eq!(bits.first_in(70_000..1 << 30), Some(131_072..196_608));
    }
}
