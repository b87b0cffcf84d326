//! Writes log entries.

use uuid::Uuid;
use vdkit_block::{HostOffset, Result, Storage, align_down, align_up, random_uuid};

use super::entry::{self, LoggedPage};
use crate::header::{Header, Headers};
use crate::layout::{MIB, PAGE_BYTES};

#[derive(Debug)]
pub(crate) struct LogWriter {
    /// The GUID in the current header; `None` if entries cannot be written: no header has the GUID
    /// yet, or that is uncertain after an error.
    guid: Option<Uuid>,
    /// A header may name a log.
    used: bool,
    next: u64,
    sequence: u64,
}

/// Bytes of the log for nonempty entries.
fn room(header: &Header) -> u64 {
    header.log_bytes.saturating_sub(PAGE_BYTES)
}

/// Most pages of one entry.
pub(crate) fn pages_max(header: &Header) -> u64 {
    entry::pages_max(room(header))
}

impl LogWriter {
    /// An unused log.
    pub(crate) fn closed() -> Self {
        Self { guid: None, used: false, next: 0, sequence: 1 }
    }

    /// Whether an entry of `pages` pages fits without [`LogWriter::restart`].
    pub(crate) fn has_room(&self, pages: usize, header: &Header) -> bool {
        self.guid.is_some() && self.next + entry::entry_bytes(pages as u64) <= room(header)
    }

    /// Empties the log with a new GUID. Takes two syncs; the first makes everything durable that
    /// was written in place before. `file_bytes` is the file's length before that sync.
    ///
    /// # Errors
    /// I/O; after an error, no entries can be written until this succeeds.
    pub(crate) fn restart(
        &mut self,
        headers: &mut Headers,
        storage: &dyn Storage,
        file_bytes: u64,
    ) -> Result<()> {
        self.guid = None;
        self.used = true;
        let log = random_uuid()?;
        let header = headers.current;
        let at = room(&header);
        // No entry of the current log can be here.
        self.write(storage, &header, log, at, at, file_bytes, &[])?;
        storage.sync()?;
        headers.synced();
        headers.update(storage, Header { log, log_version: 0, ..header })?;
        self.sequence += 1;
        self.guid = Some(log);
        self.next = 0;
        Ok(())
    }

    /// Closes the log if it was used. All pages of its entries must be durable in place.
    ///
    /// # Errors
    /// I/O.
    pub(crate) fn close(&mut self, headers: &mut Headers, storage: &dyn Storage) -> Result<()> {
        self.guid = None;
        if self.used {
            headers.update(storage, Header { log: Uuid::nil(), ..headers.current })?;
            self.used = false;
        }
        Ok(())
    }

    /// Writes an entry durably; the caller has checked for room. After an error the entry may or
    /// may not exist; the next one overwrites it. `file_bytes` is a durable length of the file.
    ///
    /// # Errors
    /// I/O.
    pub(crate) fn append(
        &mut self,
        storage: &dyn Storage,
        header: &Header,
        file_bytes: u64,
        pages: &[LoggedPage],
    ) -> Result<()> {
        let guid = self.guid.expect("room was asked for");
        // All entries from the first sector on belong to the sequence.
        self.write(storage, header, guid, self.next, 0, file_bytes, pages)?;
        storage.sync()?;
        self.next += entry::entry_bytes(pages.len() as u64);
        self.sequence += 1;
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    fn write(
        &self,
        storage: &dyn Storage,
        header: &Header,
        guid: Uuid,
        at: u64,
        tail: u64,
        file_bytes: u64,
        pages: &[LoggedPage],
    ) -> Result<()> {
        let flushed = align_down(file_bytes, MIB);
        let last = align_up(file_bytes, MIB).unwrap_or(flushed);
        let bytes = entry::encode(guid, self.sequence, tail, (flushed, last), pages);
        storage.write_at(&bytes, HostOffset(header.log_offset + at))
    }
}
