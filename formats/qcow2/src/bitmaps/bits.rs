//! The bits of a recording bitmap in memory: pages of up to 4 KiB, allocated on first touch.
//!
//! Marking takes no lock. It is a load if the bit is on disk already, else an atomic OR and a check
//! whether the page is marked dirty. A bit is *settled* once a flush that included it is done.
//! Until then every write marks the page dirty again: a thread that finds the bit set by another
//! thread cannot know whether that thread has marked the page yet.
//!
//! `tests/model` runs this file in every order of its steps.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use vdkit_block::Result;

use crate::sync::{AtomicU64, Ordering::SeqCst};

/// Largest page in bytes; clusters may be smaller.
pub(crate) const PAGE_BYTES_MAX: u64 = 4096;

/// A bitmap in memory.
#[derive(Debug)]
pub(crate) struct Tracker {
    pub(crate) id: u64,
    /// It records guest writes; otherwise it is only the target of a merge.
    pub(crate) recording: bool,
    granularity_bits: u32,
    bits: u64,
    page_bytes: u64,
    pages: Box<[OnceLock<Page>]>,
    /// One bit per page that has unsettled bits.
    dirty: Box<[AtomicU64]>,
}

/// Content of a page.
#[derive(Clone, Debug)]
pub(crate) enum Page {
    /// All bits are set, on disk too.
    Ones,
    /// Bits as in the file: eight per byte, the lowest first.
    Bits(Arc<Words>),
}

/// The bits of one page.
#[derive(Debug)]
pub(crate) struct Words {
    bits: Box<[AtomicU64]>,
    settled: Box<[AtomicU64]>,
}

impl Words {
    pub(crate) fn from_disk(bytes: &[u8]) -> Self {
        let words =
            || bytes.as_chunks::<8>().0.iter().map(|b| AtomicU64::new(u64::from_le_bytes(*b)));
        Self { bits: words().collect(), settled: words().collect() }
    }

    /// Sets a range of bits; returns whether one of them is unsettled.
    fn set(&self, range: Range<u64>) -> bool {
        let mut unsettled = false;
        let mut at = range.start;
        while at < range.end {
            let word = (at / 64) as usize;
            let end = range.end.min((at / 64 + 1) * 64);
            let mask = (u64::MAX >> (64 - (end - at))) << (at % 64);
            if self.settled[word].load(SeqCst) & mask != mask {
                unsettled = true;
                if self.bits[word].load(SeqCst) & mask != mask {
                    self.bits[word].fetch_or(mask, SeqCst);
                }
            }
            at = end;
        }
        unsettled
    }

    pub(crate) fn copy(&self) -> Vec<u64> {
        self.bits.iter().map(|word| word.load(SeqCst)).collect()
    }

    fn settle(&self, copied: &[u64]) {
        for (settled, copied) in self.settled.iter().zip(copied) {
            settled.fetch_or(*copied, SeqCst);
        }
    }
}

impl Tracker {
    /// A bitmap of `bits` bits with nothing in memory yet.
    pub(crate) fn new(
        id: u64,
        recording: bool,
        granularity_bits: u32,
        bits: u64,
        cluster_bytes: u64,
    ) -> Self {
        let page_bytes = cluster_bytes.min(PAGE_BYTES_MAX);
        let pages = bits.div_ceil(page_bytes * 8) as usize;
        Self {
            id,
            recording,
            granularity_bits,
            bits,
            page_bytes,
            pages: (0..pages).map(|_| OnceLock::new()).collect(),
            dirty: (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// This bitmap for a disk of another size. No thread may be marking meanwhile.
    pub(crate) fn resized(&self, bits: u64) -> Self {
        let new = Self::new(self.id, self.recording, self.granularity_bits, bits, self.page_bytes);
        for (old, new) in self.pages.iter().zip(&new.pages) {
            // `Page::Ones` does not apply to bits beyond the old end.
            if let Some(page @ Page::Bits(_)) = old.get() {
                let _ = new.set(page.clone());
            }
        }
        for page in self.dirty_pages().into_iter().filter(|&page| page < new.pages.len()) {
            new.set_dirty(page);
        }
        new
    }

    pub(crate) fn bits(&self) -> u64 {
        self.bits
    }

    pub(crate) fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Sets the bits of a range of guest bytes. `load` returns a page that is not in memory yet.
    /// Returns whether some bits must be written.
    pub(crate) fn mark(
        &self,
        guest: Range<u64>,
        load: impl Fn(usize) -> Result<Page>,
    ) -> Result<bool> {
        let per_page = self.page_bytes * 8;
        let mut at = guest.start >> self.granularity_bits;
        // The disk may just have shrunk.
        let end = (((guest.end - 1) >> self.granularity_bits) + 1).min(self.bits);
        let mut unsettled = false;
        while at < end {
            let page = at / per_page;
            let next = end.min((page + 1) * per_page);
            if let Page::Bits(words) = self.page(page as usize, &load)?
                && words.set(at - page * per_page..next - page * per_page)
            {
                self.set_dirty(page as usize);
                unsettled = true;
            }
            at = next;
        }
        Ok(unsettled)
    }

    fn page(&self, index: usize, load: impl Fn(usize) -> Result<Page>) -> Result<&Page> {
        match self.pages[index].get() {
            Some(page) => Ok(page),
            None => {
                // If several threads load the page, the first one wins.
                let page = load(index)?;
                Ok(self.pages[index].get_or_init(|| page))
            }
        }
    }

    /// A page, if it is in memory.
    pub(crate) fn loaded(&self, index: usize) -> Option<&Page> {
        self.pages.get(index)?.get()
    }

    /// Marks a page as one that must be written.
    pub(crate) fn set_dirty(&self, page: usize) {
        let (word, bit) = (&self.dirty[page / 64], 1 << (page % 64));
        if word.load(SeqCst) & bit == 0 {
            word.fetch_or(bit, SeqCst);
        }
    }

    pub(crate) fn dirty_pages(&self) -> Vec<usize> {
        self.collect_dirty(|word| word.load(SeqCst))
    }

    /// Returns [`Tracker::dirty_pages`] and marks them clean. Must be called before they are
    /// copied.
    pub(crate) fn take_dirty(&self) -> Vec<usize> {
        self.collect_dirty(|word| if word.load(SeqCst) == 0 { 0 } else { word.swap(0, SeqCst) })
    }

    fn collect_dirty(&self, read: impl Fn(&AtomicU64) -> u64) -> Vec<usize> {
        let mut pages = Vec::new();
        for (index, word) in self.dirty.iter().enumerate() {
            let mut bits = read(word);
            while bits != 0 {
                pages.push(index * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
        pages
    }

    /// A copy of a page is durable.
    pub(crate) fn settle(&self, page: usize, copied: &[u64]) {
        if let Some(Page::Bits(words)) = self.loaded(page) {
            words.settle(copied);
        }
    }
}
