//! Internal snapshots: against flat buffers, against QEMU, and whatever may go wrong.

#[path = "../support/mod.rs"]
mod support;

mod costs;
mod faults;
mod interop;
mod model;
mod power_cut;
mod threads;
mod world;
