//! The lab: which way to store a guest's disk is best on this host, measured.
//!
//! [`model`] says what a run is, and [`store`] keeps it in a file. What is measured is what a user
//! types: [`process`] runs the command `vdkit` and its [`peers`], and the exact command lines are
//! kept beside the numbers.

pub mod metrics;
pub mod model;
pub mod peers;
pub mod process;
pub mod store;
