//! A job's input: one disk, or several concatenated.

use std::sync::Arc;

use vdkit_block::{Error, GuestOffset, Result};
use vdkit_chain::Disk;
use vdkit_stream::InPipe;

/// The unit in which bytes are lost where a read fails.
const SECTOR_BYTES: usize = 512;

/// Concatenated disks.
#[derive(Debug)]
pub struct Source {
    disks: Vec<Disk>,
    /// Start of each disk, and the end of the last.
    starts: Vec<u64>,
    /// The stream that provides the bytes; it may end early.
    pipe: Option<Arc<InPipe>>,
}

impl Source {
    /// Concatenates disks in this order.
    pub fn new(disks: Vec<Disk>) -> Self {
        let mut starts = vec![0];
        let mut end = 0u64;
        for disk in &disks {
            end = end.saturating_add(disk.guest_bytes());
            starts.push(end);
        }
        Self { disks, starts, pipe: None }
    }

    /// A disk read from a stream.
    pub(crate) fn of_stream(disk: Disk, pipe: Arc<InPipe>) -> Self {
        Self { pipe: Some(pipe), ..Self::new(vec![disk]) }
    }

    /// The end of a stream, if it has ended.
    pub(crate) fn end_of_stream(&self) -> Option<u64> {
        self.pipe.as_ref().and_then(|pipe| pipe.end())
    }

    /// Total bytes.
    pub fn bytes(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// The disks.
    pub fn disks(&self) -> &[Disk] {
        &self.disks
    }

    /// Each disk with its start offset.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (u64, &Disk)> {
        self.starts.iter().copied().zip(&self.disks)
    }

    /// As [`Source::read_at`], but a sector that cannot be read becomes zeroes, and `lost` gets its
    /// offset in its disk and the error.
    ///
    /// # Errors
    /// The read was interrupted.
    pub(crate) fn salvage_at(
        &self,
        buf: &mut [u8],
        at: u64,
        mut lost: impl FnMut(u64, &Error),
    ) -> Result<()> {
        match self.read_at(buf, at) {
            Err(Error::Interrupted) => return Err(Error::Interrupted),
            Err(_) => {}
            Ok(()) => return Ok(()),
        }
        let sectors = (at..).step_by(SECTOR_BYTES).zip(buf.chunks_mut(SECTOR_BYTES));
        for (at, sector) in sectors {
            match self.read_at(sector, at) {
                Err(Error::Interrupted) => return Err(Error::Interrupted),
                Err(error) => {
                    sector.fill(0);
                    let start = self.starts.iter().rev().find(|start| **start <= at);
                    lost(at - start.copied().unwrap_or(0), &error);
                }
                Ok(()) => {}
            }
        }
        Ok(())
    }

    /// Reads across disks; bytes past the end are zero.
    pub fn read_at(&self, buf: &mut [u8], at: u64) -> Result<()> {
        let mut done = 0;
        for (start, disk) in self.pieces() {
            let here = at + done as u64;
            let end = start + disk.guest_bytes();
            if done == buf.len() || here >= end {
                continue;
            }
            let len = (buf.len() - done).min((end - here) as usize);
            disk.read_at(&mut buf[done..done + len], GuestOffset(here - start))?;
            done += len;
        }
        buf[done..].fill(0);
        Ok(())
    }
}
