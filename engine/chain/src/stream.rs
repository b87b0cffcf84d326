//! A disk as a file: for code that reads and writes by [`std::io`]'s traits.

use std::io::{self, Read, Seek, SeekFrom, Write};

use vdkit_block::{Error, GuestOffset};

use crate::disk::Disk;

/// A position on a disk. Several may be used at once, on one or on many threads.
///
/// Reading ends at the end of the disk; a write beyond it is short, and then fails. Dropping it does not
/// flush: [`Write::flush`] makes writes durable, as [`Disk::flush`] does.
#[derive(Clone, Debug)]
pub struct DiskStream<'a> {
    disk: &'a Disk,
    at: u64,
}

impl Disk {
    /// The disk as a file, at its beginning.
    pub fn stream(&self) -> DiskStream<'_> {
        DiskStream { disk: self, at: 0 }
    }
}

impl DiskStream<'_> {
    /// How much of `len` bytes lies on the disk from here on.
    fn left(&self, len: usize) -> usize {
        let left = self.disk.guest_bytes().saturating_sub(self.at);
        usize::try_from(left).map_or(len, |left| left.min(len))
    }
}

/// The error with the kind that users of [`std::io`] expect.
fn io_error(error: Error) -> io::Error {
    let kind = match &error {
        Error::Io { source, .. } | Error::File { source, .. } => source.kind(),
        Error::NoSpace { .. } => io::ErrorKind::StorageFull,
        Error::ReadOnly { .. } => io::ErrorKind::PermissionDenied,
        Error::Corrupt(_) => io::ErrorKind::InvalidData,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}

impl Read for DiskStream<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = self.left(buf.len());
        if len == 0 {
            return Ok(0);
        }
        self.disk.read_at(&mut buf[..len], GuestOffset(self.at)).map_err(io_error)?;
        self.at += len as u64;
        Ok(len)
    }
}

impl Write for DiskStream<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let len = self.left(buf.len());
        if buf.is_empty() {
            return Ok(0);
        }
        if len == 0 {
            let why = format!("{}: the disk ends at {}", self.disk.name(), self.disk.guest_bytes());
            return Err(io::Error::new(io::ErrorKind::StorageFull, why));
        }
        self.disk.write_at(&buf[..len], GuestOffset(self.at)).map_err(io_error)?;
        self.at += len as u64;
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.disk.flush().map_err(io_error)
    }
}

impl Seek for DiskStream<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.disk.guest_bytes().checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at = at.ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, "a position before the beginning")
        })?;
        Ok(self.at)
    }
}
