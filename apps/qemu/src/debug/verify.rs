//! The storage that compares (`blkverify`): each read of an image's disk with the same read of a raw
//! copy.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vdkit::{CacheMode, Error, HostOffset, Result, SpaceMap, Storage, StorageCaps, ZeroMode};

use crate::names::Image;
use crate::output::say;
use crate::storages::{DiskStorage, open_disk};

/// A read has found a difference. QEMU's program exits there and then; this one fails the request, so
/// that half-made files are removed, and then exits with QEMU's code and no further message.
static MISMATCHED: AtomicBool = AtomicBool::new(false);

/// Whether a read has found a difference in this process.
pub fn mismatched() -> bool {
    MISMATCHED.load(Ordering::SeqCst)
}

/// Reads from both, writes to both.
#[derive(Debug)]
pub struct Verify {
    name: String,
    raw: Arc<dyn Storage>,
    test: DiskStorage,
}

impl Verify {
    /// The disk of `test`, compared with `raw`.
    pub fn open(
        name: &str,
        raw: Arc<dyn Storage>,
        test: &Image,
        writable: bool,
        cache: CacheMode,
    ) -> Result<Self> {
        let disk = open_disk(test, writable, cache)?;
        Ok(Self { name: name.to_owned(), raw, test: DiskStorage::new(disk) })
    }

    /// Reports a difference, once, and fails the request: nothing that follows could be trusted.
    fn differs(&self, offset: u64, bytes: usize, at: usize) -> Error {
        if !MISMATCHED.swap(true, Ordering::SeqCst) {
            say(format_args!(
                "blkverify: read offset={offset} bytes={bytes} contents mismatch at offset {}",
                offset + at as u64
            ));
        }
        let source = io::Error::other("the image differs from its raw copy");
        Error::io(&self.name, vdkit::IoAction::Read, offset, bytes as u64, source)
    }
}

impl Storage for Verify {
    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> StorageCaps {
        StorageCaps { growable: false, ..self.test.caps() }
    }

    fn len(&self) -> Result<u64> {
        self.test.len()
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        let read = self.test.read_up_to(buf, offset)?;
        let mut copy = vec![0; read];
        let copied = self.raw.read_up_to(&mut copy, offset)?;
        if copied < read {
            let source = io::Error::from(io::ErrorKind::UnexpectedEof);
            let action = vdkit::IoAction::Read;
            return Err(Error::io(self.raw.name(), action, offset.0, read as u64, source));
        }
        if let Some(at) = (0..read).find(|at| buf[*at] != copy[*at]) {
            return Err(self.differs(offset.0, read, at));
        }
        Ok(read)
    }

    fn write_at(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        self.raw.write_at(buf, offset)?;
        self.test.write_at(buf, offset)
    }

    fn write_zeroes(&self, offset: HostOffset, len: u64, mode: ZeroMode) -> Result<()> {
        self.raw.write_zeroes(offset, len, mode)?;
        self.test.write_zeroes(offset, len, mode)
    }

    fn discard(&self, _offset: HostOffset, _len: u64) -> Result<()> {
        // What reads after a discard is up to each of the two: they would differ.
        Ok(())
    }

    fn allocate(&self, _offset: HostOffset, _len: u64) -> Result<()> {
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        self.raw.sync()?;
        self.test.sync()
    }

    fn space_map(&self) -> Option<&dyn SpaceMap> {
        self.test.space_map()
    }
}
