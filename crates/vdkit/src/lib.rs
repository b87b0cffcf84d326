//! vdkit, a virtual-disk engine.

pub use vdkit_block::*;

mod registry;

pub use registry::{FORMATS, format};
