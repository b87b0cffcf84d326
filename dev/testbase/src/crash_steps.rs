//! A [`CrashStorage`] that records, step by step, what a program does to a file.
//!
//! A step is a change or a sync with a beginning and an end, so that the syncs of several threads
//! overlap with changes as they do in the program.

use crate::crash::{CrashStorage, State};
use crate::crash_image::{Change, CrashImage, Event};

/// What a change does.
#[derive(Clone, Copy, Debug)]
pub enum Step<'a> {
    /// Bytes are written; the file grows where they reach past its end.
    Write {
        /// The first byte.
        at: u64,
        /// What is written.
        bytes: &'a [u8],
    },
    /// A write that is durable, with the length that it needs, when it returns (RWF_DSYNC). It says
    /// nothing about other changes.
    WriteDurably {
        /// The first byte.
        at: u64,
        /// What is written.
        bytes: &'a [u8],
    },
    /// Bytes within the file become zero.
    Zero {
        /// The first byte.
        at: u64,
        /// How many.
        len: u64,
    },
    /// The file has at least this length.
    Grow(u64),
    /// The file has exactly this length.
    SetLen(u64),
}

impl CrashStorage {
    /// A change reaches the storage. Returns its number, for its end.
    pub fn begin(&self, step: Step<'_>) -> u64 {
        let mut state = self.state.lock();
        let change = state.change_of(step);
        self.begin_change(&mut state, change)
    }

    /// A change returns to the program.
    pub fn end(&self, change: u64) {
        self.state.lock().record(Event::Returned(change));
    }

    /// The same, of a [`Step::WriteDurably`].
    pub fn end_durably(&self, change: u64) {
        let mut state = self.state.lock();
        state.record(Event::Returned(change));
        self.record(&mut state, Event::Durable(change));
    }

    /// A sync begins. It covers the changes that have ended.
    pub fn begin_sync(&self) -> u64 {
        let mut state = self.state.lock();
        let sync = state.next;
        state.next += 1;
        state.record(Event::SyncBegan(sync));
        sync
    }

    /// A sync returns to the program.
    pub fn end_sync(&self, sync: u64) {
        self.record(&mut self.state.lock(), Event::SyncReturned(sync));
    }

    /// This moment, finer than [`CrashStorage::ops`]: beginnings and ends so far.
    pub fn moment(&self) -> usize {
        self.state.lock().events.len()
    }

    /// A crash at a moment.
    ///
    /// # Panics
    /// If the moment has not come yet.
    pub fn crash_at_moment(&self, moment: usize) -> CrashImage {
        let state = self.state.lock();
        let mut image = self.initial.clone();
        for event in &state.events[..moment] {
            image.apply(event);
        }
        image
    }
}

impl State {
    /// A change that still lacks its number.
    pub(crate) fn change_of(&mut self, step: Step<'_>) -> Change {
        let plain = |sectors, new_len| Change { id: 0, sectors, new_len, cut: false };
        match step {
            Step::Write { at, bytes } => {
                let end = at + bytes.len() as u64;
                let sectors = self.write(at, end, bytes);
                plain(sectors, self.grow(end))
            }
            Step::WriteDurably { at, bytes } => {
                let end = at + bytes.len() as u64;
                let sectors = self.write(at, end, bytes);
                let grown = self.grow(end);
                // Whoever made the file longer, this write is readable afterwards.
                plain(sectors, grown.or_else(|| (self.now.durable_len() < end).then_some(self.len)))
            }
            Step::Zero { at, len } => {
                let end = at.saturating_add(len).min(self.len);
                plain(self.clear(at, end), None)
            }
            Step::Grow(end) => plain(Vec::new(), self.grow(end)),
            Step::SetLen(len) => {
                let before = self.len;
                let sectors = self.clear(len, before);
                self.len = len;
                Change { id: 0, sectors, new_len: Some(len), cut: len < before }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use vdkit_block::{HostOffset, Storage, StorageExt};

    use super::*;

    fn byte_at(image: &CrashImage, at: u64) -> u8 {
        let mut byte = [0];
        image.only_durable().read_padded(&mut byte, HostOffset(at)).unwrap();
        byte[0]
    }

    #[test]
    fn a_sync_covers_what_ended_before_it_began() {
        let crash = CrashStorage::new();
        let write = |at, byte: &'static [u8]| crash.begin(Step::Write { at, bytes: byte });
        let (first, second) = (write(0, b"1"), write(512, b"2"));
        crash.end(first);
        let sync = crash.begin_sync();
        crash.end(second);
        let before = crash.moment();
        crash.end_sync(sync);
        let image = crash.crash_at_moment(crash.moment());
        assert_eq!((byte_at(&image, 0), byte_at(&image, 512)), (b'1', 0));
        assert_eq!(byte_at(&crash.crash_at_moment(before), 0), 0);
    }

    #[test]
    fn a_durable_write_needs_no_sync_and_covers_nothing_else() {
        let crash = CrashStorage::new();
        let other = crash.begin(Step::Write { at: 0, bytes: b"1" });
        crash.end(other);
        let longer = crash.begin(Step::SetLen(8192));
        crash.end(longer);
        let write = crash.begin(Step::WriteDurably { at: 4096, bytes: b"2" });
        assert_eq!(crash.crash_now().only_durable().len().unwrap(), 0);
        crash.end_durably(write);
        let image = crash.crash_now();
        assert_eq!((byte_at(&image, 0), byte_at(&image, 4096)), (0, b'2'));
        assert_eq!(image.only_durable().len().unwrap(), 8192);
    }
}
