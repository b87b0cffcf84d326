//! vdkit, a virtual-disk engine.

pub use vdkit_block::*;
pub use vdkit_chain::*;
pub use vdkit_jobs as jobs;
pub use vdkit_storage as storage;

mod registry;

pub use registry::{FORMATS, format, registry};
