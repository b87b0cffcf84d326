//! What tests of several crates at once stand on, and what fuzzers run: all that knows formats. A
//! dev-dependency only; the tests of one crate do with `vdkit-testbase`, which this re-exports.
//!
//! - [`Recorded`] is a program whose changes of a file are recorded as by [`CrashStorage`], with syncs
//!   that take a while.
//! - [`fuzz`] is what the fuzz targets run.
//! - [`guest`] boots a small Linux with given disks.
//! - [`concurrent`] lets several clients use a disk while the power fails or calls do.
//! - [`disks`] makes a disk over such a storage.
//! - `nbd` (a feature) serves one, and is a client that says what no other would.

pub mod concurrent;
pub mod disks;
pub mod fuzz;
pub mod guest;
#[cfg(feature = "nbd")]
pub mod nbd;
mod recorded;

pub use recorded::Recorded;
pub use vdkit_testbase::*;
