//! What the tests of vdkit stand on. A dev-dependency only.
//!
//! - [`CountingStorage`] counts calls and bytes, so that a test can bound them.
//! - [`FaultyStorage`] fails the n-th call of chosen kinds.
//! - [`GatedStorage`] lets calls wait, so that a test can put a step of its own between two of another
//!   thread's.
//! - [`SharingStorage`] shares blocks, as on a file system with reflinks, or refuses to.
//! - [`CrashStorage`] records every change, and makes what a disk may hold after a crash.
//! - [`Recorded`] is a program whose changes of a file are recorded so, with syncs that take a while.
//! - [`qemu`] asks QEMU's programs, and [`Machine`] its emulator.
//! - [`fuzz`] is what the fuzz targets run.
//! - [`fs`] mounts scratch file systems and attaches loop devices.
//! - [`guest`] boots a small Linux with given disks.
//! - [`appliance`] makes OVAs by hand.
//! - [`concurrent`] lets several clients use a disk while the power fails or calls do.
//! - [`trials`] are what every writable format must stand.
//! - [`units`] are the sizes that tests name.
//! - [`disks`] makes a disk over such a storage.
//! - `nbd` (a feature) serves one, and is a client that says what no other would.
//! - `loom_sync` (a feature, `model`) runs a protocol of threads in every order of their steps.
//! - [`Killed`] is a process that does not outlive its test.
//! - [`pairwise`] makes few cases that hold every pair of options.
//! - [`require_peer`] and [`missing`] say what happens where a program is missing.
//! - [`processor_time`] bounds work on a machine that has other things to do as well.

pub mod appliance;
pub mod concurrent;
mod counting;
pub mod crash;
mod crash_image;
mod crash_steps;
pub mod disks;
mod faulty;
pub mod fs;
pub mod fuzz;
mod gated;
pub mod guest;
pub mod http;
mod killed;
#[cfg(feature = "model")]
pub mod loom_sync;
mod machine;
mod meter;
#[cfg(feature = "nbd")]
pub mod nbd;
mod pairs;
mod peers;
pub mod qemu;
mod recorded;
mod rng;
mod sharing;
pub mod trials;
pub mod units;

pub use counting::{CountingStorage, Counts, LoggedOp};
pub use crash::{CrashClock, CrashImage, CrashStorage};
pub use faulty::{FaultKind, FaultPlan, FaultyStorage};
pub use gated::{GatedCall, GatedStorage};
pub use killed::Killed;
pub use machine::Machine;
pub use meter::processor_time;
pub use pairs::{Choice, pairwise};
pub use peers::{impossible_here, missing, python, require_fuse, require_peer, require_root};
pub use recorded::Recorded;
pub use rng::Rng;
pub use sharing::{NoShare, SharingStorage};
