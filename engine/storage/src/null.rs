//! A storage without content.

use std::sync::atomic::{AtomicU64, Ordering};

use vdkit_block::{
    Error, HostOffset, IoAction, Result, SpaceMap, Storage, StorageCaps, StorageExtent, ZeroMode,
};

/// Reads zeroes, discards writes and counts the bytes of both. Its length is fixed: requests past
/// the end fail as on a device.
#[derive(Debug)]
pub struct NullStorage {
    name: String,
    len: u64,
    read: AtomicU64,
    written: AtomicU64,
}

impl NullStorage {
    /// A storage of `len` bytes.
    pub fn new(name: impl Into<String>, len: u64) -> Self {
        Self { name: name.into(), len, read: AtomicU64::new(0), written: AtomicU64::new(0) }
    }

    /// Bytes read so far.
    pub fn bytes_read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Bytes written so far, without those of [`Storage::write_zeroes`].
    pub fn bytes_written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    fn check(&self, action: IoAction, offset: HostOffset, len: u64) -> Result<()> {
        match offset.checked_add(len) {
            Some(end) if end.0 <= self.len => Ok(()),
            _ => Err(Error::io(
                &self.name,
                action,
                offset.0,
                len,
                std::io::Error::from(std::io::ErrorKind::StorageFull),
            )),
        }
    }
}

impl Storage for NullStorage {
    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> StorageCaps {
        StorageCaps { writable: true, ..StorageCaps::default() }
    }

    fn len(&self) -> Result<u64> {
        Ok(self.len)
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        let there = self.len.saturating_sub(offset.0).min(buf.len() as u64) as usize;
        buf[..there].fill(0);
        self.read.fetch_add(there as u64, Ordering::Relaxed);
        Ok(there)
    }

    fn write_at(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        self.check(IoAction::Write, offset, buf.len() as u64)?;
        self.written.fetch_add(buf.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn write_zeroes(&self, offset: HostOffset, len: u64, _mode: ZeroMode) -> Result<()> {
        self.check(IoAction::WriteZeroes, offset, len)
    }

    fn discard(&self, _offset: HostOffset, _len: u64) -> Result<()> {
        Ok(())
    }

    fn allocate(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.check(IoAction::Allocate, offset, len)
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn set_len(&self, len: u64) -> Result<()> {
        if len == self.len {
            return Ok(());
        }
        Err(Error::unsupported(
            &self.name,
            format!("its length is fixed at {} bytes, {len} were asked for", self.len),
            "make it with the length that is needed",
        ))
    }

    vdkit_block::capabilities!(space_map: SpaceMap);
}

impl SpaceMap for NullStorage {
    fn may_have_holes(&self) -> Result<bool> {
        Ok(self.len > 0)
    }

    fn extent_at(&self, _offset: HostOffset, len: u64) -> Result<StorageExtent> {
        Ok(StorageExtent { data: false, len: len.max(1) })
    }

    fn allocated_bytes(&self) -> Result<u64> {
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vdkit_block::ErrorKind;

    #[test]
    fn it_reads_zeroes_and_counts() {
        let null = NullStorage::new("null:", 1000);
        let mut buf = [1; 600];
        assert_eq!(null.read_up_to(&mut buf, HostOffset(500)).unwrap(), 500);
        assert_eq!(buf[499], 0);
        assert_eq!(buf[500], 1);
        null.write_at(&buf, HostOffset(400)).unwrap();
        assert_eq!((null.bytes_read(), null.bytes_written()), (500, 600));
        let error = null.write_at(&buf, HostOffset(401)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert!(null.write_at(&buf, HostOffset(u64::MAX)).is_err());
        assert!(!null.extent_at(HostOffset(0), 10).unwrap().data);
        assert!(null.set_len(1000).is_ok());
        assert!(null.set_len(1001).is_err());
    }
}
