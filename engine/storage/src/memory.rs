//! A storage in sparse memory.

use std::collections::BTreeMap;

use parking_lot::RwLock;
use vdkit_block::{
    Error, HostOffset, IoAction, ReadPaths, Result, SpaceMap, Storage, StorageCaps, StorageExt,
    StorageExtent, ZeroMode, require_writable,
};

/// Bytes of a page.
const PAGE: u64 = 4096;

/// The maximum length, as for files.
const LEN_MAX: u64 = i64::MAX as u64;

#[derive(Clone, Debug, Default)]
struct Inner {
    len: u64,
    /// Written pages, by index. Bytes past `len` in the last page are zero.
    pages: BTreeMap<u64, Box<[u8; PAGE as usize]>>,
}

/// Growable memory. Only written pages use memory, so a length of 2^60 bytes is free.
#[derive(Debug)]
pub struct MemoryStorage {
    name: String,
    writable: bool,
    growable: bool,
    inner: RwLock<Inner>,
}

impl Clone for MemoryStorage {
    /// An independent copy.
    fn clone(&self) -> Self {
        Self {
            name: self.name.clone(),
            writable: self.writable,
            growable: self.growable,
            inner: RwLock::new(self.inner.read().clone()),
        }
    }
}

impl MemoryStorage {
    /// An empty, writable and growable storage.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            writable: true,
            growable: true,
            inner: RwLock::new(Inner::default()),
        }
    }

    /// As [`MemoryStorage::new`], with `len` zero bytes (at most 2^63 - 1).
    pub fn with_len(name: impl Into<String>, len: u64) -> Self {
        let storage = Self::new(name);
        storage.inner.write().len = len.min(LEN_MAX);
        storage
    }

    /// As [`MemoryStorage::new`], with these bytes.
    pub fn from_bytes(name: impl Into<String>, bytes: &[u8]) -> Self {
        let storage = Self::new(name);
        storage.inner.write().write(bytes, 0);
        storage
    }

    /// Makes it read-only.
    pub fn read_only(mut self) -> Self {
        self.writable = false;
        self
    }

    /// Fixes the length, as on a device.
    pub fn fixed_len(mut self) -> Self {
        self.growable = false;
        self
    }

    /// A copy of all bytes. For small storages.
    pub fn to_vec(&self) -> Vec<u8> {
        let inner = self.inner.read();
        let mut bytes = vec![0; inner.len as usize];
        inner.read(&mut bytes, 0);
        bytes
    }

    /// Checks a change of `len` bytes at `offset` and returns its end.
    fn check(&self, action: IoAction, offset: HostOffset, len: u64, inner: &Inner) -> Result<u64> {
        require_writable(self.writable, &self.name)?;
        let kind = match offset.checked_add(len) {
            Some(end) if end.0 <= inner.len || (self.growable && end.0 <= LEN_MAX) => {
                return Ok(end.0);
            }
            Some(_) if !self.growable => std::io::ErrorKind::StorageFull,
            _ => std::io::ErrorKind::FileTooLarge,
        };
        Err(Error::io(&self.name, action, offset.0, len, kind.into()))
    }
}

impl Inner {
    /// Copies bytes up to the end and returns their number.
    fn read(&self, buf: &mut [u8], offset: u64) -> usize {
        let there = self.len.saturating_sub(offset).min(buf.len() as u64) as usize;
        let buf = &mut buf[..there];
        let mut done = 0;
        while done < there {
            let at = offset + done as u64;
            let skip = (at % PAGE) as usize;
            let n = (PAGE as usize - skip).min(there - done);
            match self.pages.get(&(at / PAGE)) {
                Some(page) => buf[done..done + n].copy_from_slice(&page[skip..skip + n]),
                None => buf[done..done + n].fill(0),
            }
            done += n;
        }
        there
    }

    /// Copies `buf` in; the range was checked.
    fn write(&mut self, buf: &[u8], offset: u64) {
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let skip = (at % PAGE) as usize;
            let n = (PAGE as usize - skip).min(buf.len() - done);
            let page = self.pages.entry(at / PAGE).or_insert_with(|| Box::new([0; PAGE as usize]));
            page[skip..skip + n].copy_from_slice(&buf[done..done + n]);
            done += n;
        }
        if !buf.is_empty() {
            self.len = self.len.max(offset + buf.len() as u64);
        }
    }

    /// Drops whole pages within `start..end` and clears the partial pages.
    fn clear(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        let last = (end - 1) / PAGE;
        let indexes: Vec<u64> =
            self.pages.range(start / PAGE..=last).map(|(index, _)| *index).collect();
        for index in indexes {
            let from = start.max(index * PAGE) - index * PAGE;
            let to = end.min(index * PAGE + PAGE) - index * PAGE;
            if from == 0 && to == PAGE {
                self.pages.remove(&index);
            } else if let Some(page) = self.pages.get_mut(&index) {
                page[from as usize..to as usize].fill(0);
            }
        }
    }

    fn set_len(&mut self, len: u64) {
        if len < self.len {
            // Clear bytes past the end, in case it grows again.
            let end = self.len;
            self.clear(len, end.next_multiple_of(PAGE));
        }
        self.len = len;
    }
}

impl Storage for MemoryStorage {
    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> StorageCaps {
        StorageCaps {
            writable: self.writable,
            growable: self.growable,
            block_bytes: PAGE as u32,
            prompt_writes: true,
            ..StorageCaps::default()
        }
    }

    fn len(&self) -> Result<u64> {
        Ok(self.inner.read().len)
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        Ok(self.inner.read().read(buf, offset.0))
    }

    fn write_at(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        let mut inner = self.inner.write();
        self.check(IoAction::Write, offset, buf.len() as u64, &inner)?;
        inner.write(buf, offset.0);
        Ok(())
    }

    fn write_zeroes(&self, offset: HostOffset, len: u64, mode: ZeroMode) -> Result<()> {
        let mut inner = self.inner.write();
        let end = self.check(IoAction::WriteZeroes, offset, len, &inner)?;
        if len == 0 {
            return Ok(());
        }
        match mode {
            ZeroMode::MayUnmap => inner.clear(offset.0, end),
            // Existing pages stay; memory has no reservation for others.
            ZeroMode::KeepAllocated => {
                for (index, page) in inner.pages.range_mut(offset.0 / PAGE..=(end - 1) / PAGE) {
                    let from = offset.0.max(index * PAGE) - index * PAGE;
                    let to = end.min(index * PAGE + PAGE) - index * PAGE;
                    page[from as usize..to as usize].fill(0);
                }
            }
        }
        inner.len = inner.len.max(end);
        Ok(())
    }

    fn discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        let mut inner = self.inner.write();
        require_writable(self.writable, &self.name)?;
        let end = offset.0.saturating_add(len).min(inner.len);
        inner.clear(offset.0, end);
        Ok(())
    }

    fn allocate(&self, offset: HostOffset, len: u64) -> Result<()> {
        let mut inner = self.inner.write();
        let end = self.check(IoAction::Allocate, offset, len, &inner)?;
        if len > 0 {
            inner.len = inner.len.max(end);
        }
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn set_len(&self, len: u64) -> Result<()> {
        let mut inner = self.inner.write();
        self.check(IoAction::Resize, HostOffset(len), 0, &inner)?;
        if !self.growable && len != inner.len {
            return Err(Error::unsupported(
                &self.name,
                format!("its length is fixed at {} bytes, {len} were asked for", inner.len),
                "use a storage that can grow",
            ));
        }
        inner.set_len(len);
        Ok(())
    }

    vdkit_block::capabilities!(space_map: SpaceMap, read_paths: ReadPaths);
}

impl SpaceMap for MemoryStorage {
    fn may_have_holes(&self) -> Result<bool> {
        let inner = self.inner.read();
        Ok((inner.pages.len() as u64) < inner.len.div_ceil(PAGE))
    }

    fn extent_at(&self, offset: HostOffset, len: u64) -> Result<StorageExtent> {
        let inner = self.inner.read();
        let len = len.max(1);
        let first = offset.0 / PAGE;
        if offset.0 >= inner.len {
            return Ok(StorageExtent { data: false, len });
        }
        let end = offset.0.saturating_add(len).min(inner.len);
        let last = (end - 1) / PAGE;
        let mut run = first;
        let mut data = false;
        for (index, _) in inner.pages.range(first..=last) {
            if *index == run {
                data = true;
                run += 1;
                continue;
            }
            if !data {
                run = *index;
            }
            break;
        }
        if !data && run == first {
            run = last + 1;
        }
        Ok(StorageExtent { data, len: (run * PAGE).min(end) - offset.0 })
    }

    fn allocated_bytes(&self) -> Result<u64> {
        Ok(self.inner.read().pages.len() as u64 * PAGE)
    }
}

impl ReadPaths for MemoryStorage {
    fn read_ready(&self, buf: &mut [u8], offset: HostOffset) -> Result<bool> {
        self.read_padded(buf, offset).map(|()| true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vdkit_block::ErrorKind;

    #[test]
    fn a_huge_length_costs_nothing() {
        let memory = MemoryStorage::with_len("m", 1 << 60);
        memory.write_at(b"end", HostOffset((1 << 60) - 3)).unwrap();
        assert_eq!(memory.allocated_bytes().unwrap(), PAGE);
        let mut buf = [1; 8];
        assert_eq!(memory.read_up_to(&mut buf, HostOffset((1 << 60) - 5)).unwrap(), 5);
        assert_eq!(&buf[..5], b"\0\0end");
        assert!(memory.may_have_holes().unwrap());
        memory.set_len(0).unwrap();
        assert_eq!(memory.allocated_bytes().unwrap(), 0);
    }

    #[test]
    fn extents_follow_the_pages() {
        let memory = MemoryStorage::with_len("m", 10 * PAGE + 100);
        memory.write_at(&[1; 2 * PAGE as usize], HostOffset(3 * PAGE)).unwrap();
        memory.write_at(&[1; 1], HostOffset(6 * PAGE)).unwrap();
        let at = |offset: u64, len: u64| {
            let extent = memory.extent_at(HostOffset(offset), len).unwrap();
            (extent.data, extent.len)
        };
        assert_eq!(at(0, 1 << 40), (false, 3 * PAGE));
        assert_eq!(at(10, 100), (false, 100));
        assert_eq!(at(3 * PAGE + 5, 1 << 40), (true, 2 * PAGE - 5));
        assert_eq!(at(5 * PAGE, 1 << 40), (false, PAGE));
        assert_eq!(at(6 * PAGE, 1 << 40), (true, PAGE));
        assert_eq!(at(7 * PAGE, 1 << 40), (false, 3 * PAGE + 100));
        assert_eq!(at(100 * PAGE, 7), (false, 7));
        assert_eq!(at(u64::MAX, u64::MAX), (false, u64::MAX));
    }

    #[test]
    fn what_was_cut_off_reads_zero_when_it_grows_again() {
        let memory = MemoryStorage::from_bytes("m", &[7; 5000]);
        memory.set_len(4500).unwrap();
        memory.set_len(5000).unwrap();
        let bytes = memory.to_vec();
        assert!(bytes[..4500].iter().all(|b| *b == 7));
        assert!(bytes[4500..].iter().all(|b| *b == 0));
    }

    #[test]
    fn zeroes_and_discard() {
        let memory = MemoryStorage::from_bytes("m", &[7; 3 * PAGE as usize]);
        memory.write_zeroes(HostOffset(100), 2 * PAGE, ZeroMode::KeepAllocated).unwrap();
        assert_eq!(memory.allocated_bytes().unwrap(), 3 * PAGE);
        let bytes = memory.to_vec();
        assert!(bytes[..100].iter().all(|b| *b == 7));
        assert!(bytes[100..100 + 2 * PAGE as usize].iter().all(|b| *b == 0));
        assert!(bytes[100 + 2 * PAGE as usize..].iter().all(|b| *b == 7));
        memory.write_zeroes(HostOffset(0), 2 * PAGE, ZeroMode::MayUnmap).unwrap();
        assert_eq!(memory.allocated_bytes().unwrap(), PAGE);
        memory.discard(HostOffset(0), u64::MAX).unwrap();
        assert_eq!(memory.allocated_bytes().unwrap(), 0);
        assert_eq!(memory.len().unwrap(), 3 * PAGE);
        memory.write_zeroes(HostOffset(5 * PAGE), 1, ZeroMode::MayUnmap).unwrap();
        assert_eq!(memory.len().unwrap(), 5 * PAGE + 1);
    }

    #[test]
    fn limits_are_errors() {
        let memory = MemoryStorage::new("m");
        assert!(memory.write_at(&[1], HostOffset(i64::MAX as u64)).is_err());
        assert!(memory.write_at(&[1], HostOffset(u64::MAX)).is_err());
        assert!(memory.set_len(u64::MAX).is_err());
        assert!(memory.write_zeroes(HostOffset(1), u64::MAX, ZeroMode::MayUnmap).is_err());
        assert_eq!(memory.len().unwrap(), 0);
        let fixed = MemoryStorage::with_len("m", 10).fixed_len();
        assert_eq!(fixed.write_at(&[0; 11], HostOffset(0)).unwrap_err().kind(), ErrorKind::NoSpace);
        assert!(fixed.set_len(11).is_err());
        let read_only = MemoryStorage::with_len("m", 10).read_only();
        assert!(matches!(read_only.write_at(&[0], HostOffset(0)), Err(Error::ReadOnly { .. })));
    }
}
