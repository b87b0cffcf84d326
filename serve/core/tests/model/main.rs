//! Models of an export's kept changes, of its pause, and of the marks of changes: loom runs their own
//! source files in every order of their steps, within a bound on preemptions. See
//! `vdkit_testkit::loom_sync`.

#![allow(dead_code, reason = "a model uses a part of each protocol")]

mod sync {
    pub use vdkit_testkit::loom_sync::*;
}

#[path = "../../src/change.rs"]
mod change;
#[path = "../../src/changes.rs"]
mod changes;
#[path = "../../src/client.rs"]
mod client;
#[path = "../../src/parking.rs"]
mod parking;
#[path = "../../src/pause.rs"]
mod pause;

mod export;
mod keeping;
mod marking;
mod pausing;
