//! Helpers for the tests of any crate; a dev-dependency only. This crate knows no format.
//! `vdkit-testkit` has the helpers that know formats, and re-exports this crate.
//!
//! - [`CountingStorage`] counts calls and bytes, so that a test can bound them.
//! - [`FaultyStorage`] fails the n-th call of chosen kinds.
//! - [`GatedStorage`] lets calls wait, so that a test can act between two steps of another
//!   thread.
//! - [`SharingStorage`] shares blocks, as on a file system with reflinks, or refuses to.
//! - [`CrashStorage`] records every change, and makes what a disk may hold after a crash.
//! - [`trials`] are tests that every writable format runs.
//! - [`qemu`] asks QEMU's programs, and [`Machine`] its emulator.
//! - [`fs`] mounts scratch file systems and attaches loop devices.
//! - [`appliance`] makes OVAs by hand.
//! - [`http`] serves bytes, with faults.
//! - [`disk_of`] and [`disk_on`] open a disk in memory; [`create_image`], [`read_all`],
//!   [`assert_sound`] and others are steps of most tests of a format.
//! - [`units`] are the sizes that tests name.
//! - `loom_sync` (a feature, `model`) runs a protocol of threads in every order of their steps.
//! - [`Killed`] is a process that does not outlive its test; [`in_child`] runs a step in a child of `fork`.
//! - [`for_seeds`] runs a random test many times, and says how to repeat a case; [`explained`] says
//!   more about a failure.
//! - [`pairwise`] makes few cases that hold every pair of options.
//! - [`require_peer`] and [`missing`] say what happens where a program is missing.
//! - [`run_threadless`] runs a test where no thread can be started.
//! - [`Watched`] is a thread that is seen to wait; [`eventually`] waits for anything.
//! - [`processor_time`] bounds work also on a busy machine.

pub mod appliance;
mod child;
mod counting;
pub mod crash;
mod crash_image;
mod crash_steps;
mod disks;
mod faulty;
pub mod fs;
mod gated;
pub mod http;
mod killed;
#[cfg(feature = "model")]
pub mod loom_sync;
mod machine;
mod meter;
mod pairs;
mod peers;
pub mod qemu;
mod rng;
mod seeds;
mod sharing;
mod threadless;
pub mod trials;
pub mod units;
mod watched;

pub use child::in_child;
pub use counting::{CountingStorage, Counts, LoggedOp};
pub use crash::{CrashClock, CrashImage, CrashStorage};
pub use disks::{
    assert_sound, backing_image, content_over, copy_of, create_image, disk_of, disk_on,
    first_difference, noise, open_image, read_all, save_sparse,
};
pub use faulty::{FaultKind, FaultPlan, FaultyStorage};
pub use gated::{GatedCall, GatedStorage};
pub use killed::Killed;
pub use machine::Machine;
pub use meter::processor_time;
pub use pairs::{Choice, pairwise};
pub use peers::{
    impossible_here, libvhdi_reads, missing, python, require_fuse, require_peer, require_root,
};
pub use rng::Rng;
pub use seeds::{cases, explained, for_seeds, seed};
pub use sharing::{NoShare, SharingStorage};
pub use threadless::{run_threadless, threadless_argument};
pub use watched::{Watched, eventually};
