//! Compression of image units: deflate with a window of 4 KiB, zlib and zstd.

mod compressor;
mod deflate;

pub use compressor::Compressor;
