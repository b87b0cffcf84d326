//! What the tests of vdkit stand on: storages that count, fail and crash, other programs as
//! oracles, and scratch file systems. A dev-dependency only.

mod counting;

pub use counting::{CountingStorage, Counts, LoggedOp};
