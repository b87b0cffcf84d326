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
//! what a user types: it runs the command `vdkit` and other programs, and the results contain the
//! exact command lines. [`compare`] compares one run with another, and [`calibrate`] counts how often
//! equal runs are called different.

pub mod axes;
pub mod calibrate;
mod cells;
pub mod compare;
mod engine;
mod environment;
mod error;
pub mod export;
mod fio;
mod fit;
pub mod front;
mod layout;
mod lists;
mod matrix;
mod metrics;
pub mod model;
mod peers;
mod place;
pub mod plan;
mod process;
mod profile;
pub mod report;
pub mod run;
pub mod stats;
pub mod store;
pub mod verdict;
pub mod words;

pub use error::{Error, Result};
