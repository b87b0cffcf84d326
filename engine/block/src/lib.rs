//! The contract that every other crate of vdkit is written against.
//!
//! Two traits carry the engine:
//!
//! - [`Storage`]: where host bytes live (a file, memory, a block device). It moves bytes and
//!   knows nothing of disks.
//! - [`Format`]: a *map*. It says where guest bytes live on its storages ([`Format::resolve`])
//!   and hands out space for new ones ([`Format::reserve`]). It never moves guest data.
//!
//! # The life of a read
//!
//! ```text
//!   caller                      format                     storage
//!     │ in_flight.enter() ────────┤                           │
//!     │ resolve(at, len) ────────►│ (map cache, maybe I/O)    │
//!     │◄──────────── Extent::Data │                           │
//!     │ read_at(buf, host) ───────┼──────────────────────────►│
//!     │ drop(guard) ──────────────┤ (freed clusters may now   │
//!     │                           │  be reused)               │
//! ```
//!
//! # The life of an allocating write
//!
//! ```text
//!     │ reserve(at, len) ────────►│ allocates host space
//!     │◄────────────  Reservation │ { host offset, fill for head and tail }
//!     │ write fill and data ──────┼──────────────────────────►│
//!     │ reservation.publish() ───►│ map entry changes in the cache
//!     │ flush() ─────────────────►│ refcounts before entries, with barriers ► sync
//! ```
//!
//! Dropping a [`Reservation`] that was not published gives the space back. No lock of the format
//! is held while the caller moves data.

mod bitmaps;
pub mod bytes;
mod capabilities;
mod codec;
mod compact;
mod driver;
mod encryption;
mod error;
mod extent;
mod flat;
mod format;
mod gate;
mod in_flight;
mod layer;
mod limits;
pub mod lossy;
mod monitor;
mod options;
mod policy;
mod process;
mod remedy;
mod reservation;
mod snapshots;
mod storage;
mod sync;
mod units;
mod uuids;
mod zero;

pub use bitmaps::{BitmapStatus, Bitmaps, NewBitmap};
pub use capabilities::{
    AccessExchange, CopyMethod, CopyOp, GuestDiscard, InitialWrites, KernelCopy, ReadOp, ReadPaths,
    SpaceMap, StorageExt, StorageExtent, in_steps, read_and_discard,
};
pub use codec::{Codec, CompressionSpec};
pub use compact::{
    CompactOptions, CompactReport, LeftAlone, SparseReader, compact_flat, punch_zeroes,
};
pub use driver::{
    AmendRequest, Amendment, BitmapInfo, CheckReport, Compaction, CreateRequest, Creation,
    DriverInfo, ExtentInfo, Finding, FormatDriver, ImageInfo, KeyHeader, KeySlotInfo, KeyedImages,
    Measured, NotedTime, OfflineImage, OpenRequest, Probe, Repair, Severity, SnapshotInfo,
};
pub use encryption::{
    CIPHER_SECTOR_BYTES, Encryption, KeySlot, KeySlots, Secret, SectorCipher, SectorNumbering,
};
pub use error::{
    Error, ErrorKind, Fault, IoAction, LockHolder, Refusal, Result, plain, require_within,
    require_writable,
};
pub use extent::{Compressed, Extent, FileIndex, Place};
pub use flat::{DataRuns, Flat, FlatFormat};
pub use format::{
    BackingRef, CompressedUnits, CompressedWriter, Format, FormatCaps, MapCache, MapCacheStats,
    Overlay,
};
pub use gate::{Alone, Gate, Inside};
pub use in_flight::{InFlight, InFlightGuard, Stamp};
pub use layer::StorageLayer;
pub use limits::Limits;
pub use monitor::{CancelToken, Monitor, NoProgress, Progress};
pub use options::{FileHints, OptionKind, OptionSpec, Options, parse_size};
pub use policy::{RefJudge, RefPolicy};
pub use process::OwnerProcess;
pub use remedy::Remedy;
pub use reservation::{
    CompressedFrame, CompressedReservation, Fill, Reservation, Reserver, Ticket,
};
pub use snapshots::{NewSnapshot, Snapshots};
pub use storage::{CacheMode, Storage, StorageCaps, ZeroMode};
pub use units::{GuestOffset, HostOffset, align_down, align_up, is_aligned};
pub use uuids::random_uuid;
pub use zero::is_zero;
