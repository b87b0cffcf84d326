//! The VHDX format of Microsoft Hyper-V and Azure Stack, according to [MS-VHDX].
//!
//! ```text
//!   headers (2) ── log ── region tables (2) ─┬─ metadata: sizes, flags, parent
//!                                            └─ block allocation table
//!                                                 ├─ payload blocks, 1 to 256 MiB
//!                                                 └─ sector bitmaps, with a parent
//! ```
//!
//! # The life of an allocating write
//! [`reserve`](vdkit_block::Format::reserve) allocates space at the file's end or freed space
//! (`space`); it reads as zero. The caller writes its bytes. Publishing changes an entry of the
//! table in memory (`map`), and with a parent, bits of a sector bitmap (`write`). A flush logs all
//! changed pages in one entry, makes that durable, and then writes the pages in place (`flush`).
//! When the log is full, a header with another GUID empties it (`log`).
//!
//! # Opening
//! An image whose log has entries was not closed cleanly. Opening it for writing replays the log
//! before anything else is read. Opening it read-only reads through the log, and does not change
//! the file.
//!
//! Byte layouts and invariants: `docs/formats/vhdx.md`.

mod amend;
mod check;
mod compact;
mod create;
mod driver;
mod flush;
mod header;
mod image;
mod layout;
mod log;
mod map;
mod metadata;
mod on_disk;
mod options;
mod parent;
mod regions;
mod resize;
mod space;
mod used;
mod write;
mod zero;

pub use driver::VhdxDriver;
pub use image::Vhdx;
