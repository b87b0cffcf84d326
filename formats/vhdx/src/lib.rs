//! The VHDX format: Microsoft's, of Hyper-V and Azure Stack, as [MS-VHDX] describes it.
//!
//! ```text
//!   headers (2) ── log ── region tables (2) ─┬─ metadata: sizes, flags, parent
//!                                            └─ block allocation table
//!                                                 ├─ payload blocks, 1 to 256 MiB
//!                                                 └─ sector bitmaps, with a parent
//! ```
//!
//! # The life of an allocating write
//! [`reserve`](vdkit_block::Format::reserve) takes space at the file's end, or what was given up
//! (`space`); it reads as zero. The caller writes its bytes. Publishing changes an entry of the
//! table in memory (`map`), and bits of a sector bitmap where there is a parent (`write`). A flush
//! puts all changed pages into one entry of the log, makes that durable, and then writes the pages
//! where they belong (`flush`). When the log is full, it is emptied by a header with another GUID
//! for it (`log`).
//!
//! # Opening
//! An image whose log has entries was not closed cleanly. Opened for writing it is replayed, before
//! anything else is read; opened read-only, it is read through the log, and the file stays as it
//! is.
//!
//! The bytes, and what else must hold, are in `docs/formats/vhdx.md`.

mod amend;
mod check;
mod compact;
mod create;
mod describe;
mod driver;
mod fields;
mod flush;
mod header;
mod image;
mod layout;
mod log;
mod map;
mod metadata;
mod options;
mod parent;
mod regions;
mod resize;
mod space;
mod write;
mod zero;

pub use driver::VhdxDriver;
pub use image::Vhdx;
