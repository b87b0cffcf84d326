//! The log [2.3]: changes several pages of metadata atomically.
//!
//! An entry holds whole pages of 4 KiB and their offsets, under one checksum. It is valid if its
//! GUID is the one in the header, so a new GUID empties the log. This writer fills the log from its
//! start and gives a full log a new GUID instead of wrapping around. So no reader, however lenient,
//! can mistake an older entry for a part of the sequence. A log whose GUID is set must have an
//! entry [2.3.3], so the last sector is reserved for an empty entry that is written before the
//! header names its GUID.

pub(crate) mod entry;
mod overlay;
mod search;
mod writer;

pub(crate) use overlay::Replayed;
pub(crate) use search::find;
pub(crate) use writer::{LogWriter, pages_max};
