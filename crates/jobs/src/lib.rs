//! Long jobs on virtual disks.

mod compress;
mod deflate;

pub use compress::Compressor;
