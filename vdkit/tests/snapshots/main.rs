//! Internal snapshots: against flat buffers, against QEMU, and under faults.

#[path = "../support/mod.rs"]
mod support;

mod costs;
mod faults;
mod interop;
mod machine;
mod many;
mod model;
mod one_handle;
mod power_cut;
mod threads;
mod world;
