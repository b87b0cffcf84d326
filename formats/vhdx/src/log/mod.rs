//! The log [2.3]: how several pages of metadata change at once, whatever happens.
//!
//! An entry holds whole pages of 4 KiB and where they belong, under one checksum. It counts where
//! its GUID is the one in the header, so a new GUID empties the log. This writer fills the log
//! from its start and, when it is full, gives it a new GUID rather than going round: then
//! no older entry can be taken for a part of the sequence, also not by readers that look less
//! closely than they should. A log whose GUID is set must have an entry [2.3.3], so the last sector
//! is kept for an entry without changes that is there before the header names its GUID.

pub(crate) mod entry;
mod overlay;
mod search;
mod writer;

pub(crate) use overlay::Replayed;
pub(crate) use search::find;
pub(crate) use writer::{LogWriter, pages_max};
