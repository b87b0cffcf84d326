//! The lab measures which way to store a guest's disk is best on this host.
//!
//! ```text
//!   plan ──► cells ──► run ──► store ──► export
//!                       │         └────► matrix ──► verdict ──► report
//!                       │                  choices and loads; stats compares the samples
//!                       ├ environment   describes the machine, and detects disturbances
//!                       ├ place, fit    where images can be; the lab destroys nothing
//!                       └ engine        one round of one cell:
//!                           layout        creates an image, with vdkit or qemu-img
//!                           front         serves it, as a user would
//!                           profile, fio  loads it; the engine itself does what fio cannot
//! ```
//!
//! A plan names values on some axes. The cells are the product of the axes without the combinations
//! that the plan excludes. Each cell is measured once per round, in random order. The lab measures
//! what a user types: [`process`] runs the command `vdkit` and its [`peers`], and the results
//! contain the exact command lines. [`compare`] compares one run with another, and [`calibrate`]
//! counts how often equal runs are called different.

pub mod axes;
pub mod calibrate;
pub mod cells;
pub mod compare;
pub mod engine;
pub mod environment;
mod error;
pub mod export;
pub mod fio;
pub mod fit;
pub mod front;
pub mod layout;
mod lists;
pub mod matrix;
pub mod metrics;
pub mod model;
pub mod peers;
pub mod place;
pub mod plan;
pub mod process;
pub mod profile;
pub mod report;
pub mod run;
pub mod stats;
pub mod store;
pub mod verdict;
pub mod words;

pub use error::{Error, Result};
