//! Helpers of tests that know formats, and the bodies of fuzz targets. A dev-dependency only; the tests
//! of a single crate use `vdkit-testbase`, which this crate re-exports.
//!
//! - [`Recorded`] is a program whose changes of a file are recorded as by [`CrashStorage`], with syncs
//!   that take a while.
//! - [`fuzz`] is what the fuzz targets run.
//! - [`guest`] boots a small Linux with given disks.
//! - [`concurrent`] lets several clients use a disk while the power fails or calls do.
//! - [`disks`] makes a disk over such a storage.
//! - `Exported` (a feature, `serve`) is an export of one, for a test's server.
//! - `nbd` (a feature) is a server of one, and a client that may break the protocol.

pub mod concurrent;
pub mod disks;
#[cfg(feature = "serve")]
mod exported;
pub mod fuzz;
pub mod guest;
#[cfg(feature = "nbd")]
pub mod nbd;
mod recorded;

#[cfg(feature = "serve")]
pub use exported::Exported;
pub use recorded::Recorded;
pub use vdkit_testbase::*;
