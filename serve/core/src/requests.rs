//! Requests that may block, for clients that may leave meanwhile.
//!
//! A request over a large range runs in steps. Between steps the disk can be locked exclusively,
//! and a request whose client has left ends.

use std::ops::Range;

use vdkit_block::{Error, GuestOffset, Result};
use vdkit_chain::DiskPlace;

use crate::client::{Client, STAYS};
use crate::export::{Export, Held};

/// Bytes zeroed or discarded per step, and bytes mapped per step.
const STEP_BYTES: u64 = 1 << 30;
/// Maximum bytes per prefetch request. Prefetching is a hint; more would evict what it has just
/// read.
const PREFETCH_BYTES_MAX: u64 = 1 << 30;
/// Bytes per prefetch read.
const PIECE_BYTES: u64 = 1 << 20;

/// The requests of one client; see [`Export::requests`]. They fail with [`Error::Interrupted`] if
/// the client leaves before they are done.
#[derive(Debug)]
pub struct Requests<'a> {
    export: &'a Export,
    client: &'a Client,
}

impl Export {
    /// Requests of a client.
    pub fn requests<'a>(&'a self, client: &'a Client) -> Requests<'a> {
        Requests { export: self, client }
    }

    /// As [`Requests::write`], for this process.
    ///
    /// # Errors
    /// As [`Requests::write`].
    pub fn write(&self, data: &[u8], at: u64, durable: bool) -> Result<()> {
        self.requests(&STAYS).write(data, at, durable)
    }

    /// As [`Requests::zero`], for this process.
    ///
    /// # Errors
    /// As [`Requests::zero`].
    pub fn zero(&self, at: u64, len: u64, may_unmap: bool, durable: bool) -> Result<()> {
        self.requests(&STAYS).zero(at, len, may_unmap, durable)
    }

    /// As [`Requests::discard`], for this process.
    ///
    /// # Errors
    /// As [`Requests::discard`].
    pub fn discard(&self, at: u64, len: u64, durable: bool) -> Result<()> {
        self.requests(&STAYS).discard(at, len, durable)
    }
}

impl<'a> Requests<'a> {
    /// Locks the disk for a request that changes nothing. Waits while the export is paused or the
    /// disk is locked exclusively. A closed export can still be read.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if the client leaves during a pause.
    pub fn hold(&self) -> Result<Held<'a>> {
        self.export.hold_to_read(self.client)
    }

    /// Reads.
    ///
    /// # Errors
    /// As [`vdkit_chain::Disk::read_at`].
    pub fn read(&self, buf: &mut [u8], at: u64) -> Result<()> {
        self.hold()?.read_at(buf, GuestOffset(at))
    }

    /// Writes. With `durable`, a power cut after the return loses nothing of it.
    ///
    /// # Errors
    /// As [`vdkit_chain::Disk::write_at`].
    pub fn write(&self, data: &[u8], at: u64, durable: bool) -> Result<()> {
        self.export.check_writable()?;
        let disk = self.export.hold_for(self.client)?;
        let done = disk.write_at(data, GuestOffset(at));
        disk.changed(at, data.len() as u64);
        done?;
        self.export.flush_if_write_durable(&disk, durable)
    }

    /// Writes zeroes. On an error a part of the range may be zeroed.
    ///
    /// # Errors
    /// As [`vdkit_chain::Disk::write_zeroes`].
    pub fn zero(&self, at: u64, len: u64, may_unmap: bool, durable: bool) -> Result<()> {
        self.in_steps(at, len, durable, |disk, at, len| disk.write_zeroes(at, len, may_unmap))
    }

    /// Discards bytes. This is a hint: if the image needs space for it and finds none, it does
    /// nothing. Only a `durable` discard can fail for lack of space.
    ///
    /// # Errors
    /// As [`vdkit_chain::Disk::discard`].
    pub fn discard(&self, at: u64, len: u64, durable: bool) -> Result<()> {
        self.in_steps(at, len, durable, |disk, at, len| match disk.discard(at, len) {
            Err(error) if Export::is_for_want_of_space(&error) => Ok(()),
            done => done,
        })
    }

    /// Makes everything durable whose request had ended before, from any client.
    ///
    /// # Errors
    /// As [`vdkit_chain::Disk::flush`].
    pub fn flush(&self) -> Result<()> {
        self.export.hold_for(self.client)?.flush()
    }

    fn in_steps(
        &self,
        at: u64,
        len: u64,
        durable: bool,
        change: impl Fn(&Held<'_>, GuestOffset, u64) -> Result<()>,
    ) -> Result<()> {
        self.export.check_writable()?;
        let mut done = 0;
        loop {
            let disk = self.export.hold_for(self.client)?;
            let (here, step) = (at.saturating_add(done), (len - done).min(STEP_BYTES));
            let changed = change(&disk, GuestOffset(here), step);
            disk.changed(here, step);
            changed?;
            done += step;
            if done == len {
                return self.export.flush_if_write_durable(&disk, durable);
            }
            drop(disk);
            self.check_client()?;
        }
    }

    fn check_client(&self) -> Result<()> {
        if self.client.has_left() { Err(Error::Interrupted) } else { Ok(()) }
    }

    /// Prefetches the stored bytes of a range into the host's cache, up to a limit.
    ///
    /// # Errors
    /// Errors of reading.
    pub fn prefetch(&self, at: u64, len: u64) -> Result<()> {
        let mut piece = Vec::new();
        let mut left = PREFETCH_BYTES_MAX;
        let (mut at, end) = (at, at.saturating_add(len));
        while at < end && left > 0 {
            let walked = (end - at).min(STEP_BYTES);
            let data = next_data(&self.export.hold_for(self.client)?, at, walked)?;
            let data_end = data.as_ref().map_or(at + walked, |data| data.end);
            at = data.map_or(data_end, |data| data.start);
            while at < data_end && left > 0 {
                let len = PIECE_BYTES.min(data_end - at).min(left);
                piece.resize(len as usize, 0);
                self.export.hold_for(self.client)?.read_at(&mut piece, GuestOffset(at))?;
                self.check_client()?;
                at += len;
                left -= len;
            }
            self.check_client()?;
        }
        Ok(())
    }
}

/// The next stored bytes of a range.
fn next_data(disk: &Held<'_>, at: u64, len: u64) -> Result<Option<Range<u64>>> {
    for extent in disk.extents(GuestOffset(at), len)? {
        let extent = extent?;
        if matches!(extent.place, DiskPlace::Data { .. } | DiskPlace::Compressed { .. }) {
            return Ok(Some(extent.at.0..extent.at.0 + extent.len));
        }
    }
    Ok(None)
}
