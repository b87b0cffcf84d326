//! Loom models of the durability protocols, and of changes that must be alone, over all
//! interleavings of their steps.
//!
//! Each model includes the source of the protocol itself, over loom's locks and atomics. Each has a
//! mutation, a plausible mistake, which the model must detect: those tests expect a panic.

#![allow(dead_code, reason = "a model uses a part of each protocol")]

mod sync {
    pub use crate::in_flight::{InFlight, Stamp};
    pub use vdkit_testbase::loom_sync::*;
}

#[path = "../../src/commit.rs"]
mod commit;
#[path = "../../src/engine.rs"]
mod engine;
#[path = "../../../block/src/gate.rs"]
mod gate;
#[path = "../../../block/src/in_flight.rs"]
mod in_flight;
#[path = "../../src/reclaim.rs"]
mod reclaim;
#[path = "../../src/syncs.rs"]
mod syncs;
#[path = "../../src/tickets.rs"]
mod tickets;

mod alone;
mod cluster;
mod group;
