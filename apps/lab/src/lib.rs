//! The lab: which way to store a guest's disk is best on this host, measured.
//!
//! ```text
//!   plan ──► cells ──► run ──► store ──► export
//!                       │         └────► matrix ──► verdict ──► report
//!                       │                  choices and loads; stats says what samples are worth
//!                       ├ environment   on what machine, and what disturbs it
//!                       ├ place, fit    where images may lie, and which can; nothing is destroyed
//!                       └ engine        one round of one cell:
//!                           layout        makes an image, with vdkit or qemu-img
//!                           front         serves it, as a user would
//!                           profile, fio  loads it; the engine itself does what fio cannot
//! ```
//!
//! A plan names values on some axes. Their product, less what the plan excludes, are the cells; each
//! is measured once a round, in random order. What is measured is what a user types: [`process`] runs
//! the command `vdkit` and its [`peers`], and the exact command lines are kept beside the numbers.
//! [`compare`] holds one run against another, and [`calibrate`] counts how often equals are called different.

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
