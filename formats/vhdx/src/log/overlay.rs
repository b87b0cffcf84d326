//! A storage as after a replay of its log, without changing it: for read-only images.

use std::collections::BTreeMap;
use std::sync::Arc;

use vdkit_block::{
    AccessExchange, HostOffset, Result, SpaceMap, Storage, StorageCaps, StorageExtent,
};

use super::entry::Change;
use super::search::ActiveSequence;
use crate::layout::{PAGE, PAGE_BYTES};

/// Logged pages and zeroes over another storage.
#[derive(Debug)]
pub(crate) struct Replayed {
    inner: Arc<dyn Storage>,
    pages: BTreeMap<u64, Box<[u8; PAGE]>>,
    /// Start and end of disjoint ranges that are zero, except for `pages`.
    zeroes: BTreeMap<u64, u64>,
    len: u64,
}

impl Replayed {
    /// `inner` with these entries replayed.
    pub(crate) fn new(inner: Arc<dyn Storage>, sequence: &ActiveSequence) -> Result<Self> {
        let len = sequence.file_bytes;
        let mut new = Self { inner, pages: BTreeMap::new(), zeroes: BTreeMap::new(), len };
        sequence.each_change(|change| {
            match change {
                Change::Page(at, page) => {
                    new.pages.insert(at, page);
                }
                Change::Zero(at, bytes) => new.zero(at, at + bytes),
            }
            Ok(())
        })?;
        Ok(new)
    }

    fn zero(&mut self, mut start: u64, mut end: u64) {
        if start >= end {
            return;
        }
        let covered: Vec<u64> = self.pages.range(start..end).map(|(at, _)| *at).collect();
        for at in covered {
            self.pages.remove(&at);
        }
        let touching: Vec<(u64, u64)> = self
            .zeroes
            .range(..=end)
            .rev()
            .take_while(|(_, to)| **to >= start)
            .map(|(from, to)| (*from, *to))
            .collect();
        for (from, to) in touching {
            self.zeroes.remove(&from);
            (start, end) = (start.min(from), end.max(to));
        }
        self.zeroes.insert(start, end);
    }

    fn lay_over(&self, buf: &mut [u8], offset: u64) {
        let end = offset + buf.len() as u64;
        let mut copy = |from: u64, to: u64, bytes: Option<&[u8; PAGE]>| {
            let (start, stop) = (from.max(offset), to.min(end));
            if start < stop {
                let part = &mut buf[(start - offset) as usize..(stop - offset) as usize];
                match bytes {
                    Some(page) => {
                        part.copy_from_slice(
                            &page[(start - from) as usize..(stop - from) as usize],
                        );
                    }
                    None => part.fill(0),
                }
            }
        };
        for (from, to) in self.zeroes.range(..end).rev().take_while(|(_, to)| **to > offset) {
            copy(*from, *to, None);
        }
        let first = offset.saturating_sub(PAGE_BYTES - 1);
        for (at, page) in self.pages.range(first..end) {
            copy(*at, at + PAGE_BYTES, Some(page));
        }
    }
}

impl Storage for Replayed {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn caps(&self) -> StorageCaps {
        StorageCaps { writable: false, ..self.inner.caps() }
    }

    fn len(&self) -> Result<u64> {
        Ok(self.len)
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        let there = self.len.saturating_sub(offset.0).min(buf.len() as u64) as usize;
        let buf = &mut buf[..there];
        self.inner.read_padded(buf, offset)?;
        self.lay_over(buf, offset.0);
        Ok(there)
    }

    fn sync(&self) -> Result<()> {
        self.inner.sync()
    }

    vdkit_block::capabilities!(space_map: SpaceMap, access_exchange: AccessExchange);
}

impl SpaceMap for Replayed {
    fn may_have_holes(&self) -> Result<bool> {
        self.inner.may_have_holes()
    }

    fn extent_at(&self, offset: HostOffset, len: u64) -> Result<StorageExtent> {
        if offset.0 >= self.len {
            return Ok(StorageExtent { data: false, len: len.max(1) });
        }
        // A logged page over a hole is data; up to the next page, the file decides.
        let first = offset.0.saturating_sub(PAGE_BYTES - 1);
        let mut pages = self.pages.range(first..);
        match pages.next() {
            Some((at, _)) if *at <= offset.0 => {
                Ok(StorageExtent { data: true, len: (at + PAGE_BYTES - offset.0).min(len.max(1)) })
            }
            Some((at, _)) => self.inner.extent_at(offset, len.min(at - offset.0)),
            None => self.inner.extent_at(offset, len),
        }
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.inner.allocated_bytes()
    }
}

impl AccessExchange for Replayed {
    fn downgrade_lock(&self) -> Result<()> {
        self.inner.downgrade_lock()
    }
}
