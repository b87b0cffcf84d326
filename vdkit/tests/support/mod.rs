//! Common code of the proof tests. See DESIGN.md, "Proof".
#![allow(dead_code, unused_imports, reason = "each test file uses its part")]

pub mod disks;
pub mod guest;
pub mod ops;
pub mod qemu;
pub mod rig;
pub mod shape;

pub use vdkit_testkit::{cases, for_seeds, seed};
