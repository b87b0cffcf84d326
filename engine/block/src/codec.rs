//! Names of compression methods; the format crates implement them.

use std::fmt;

/// How a compressed unit is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Codec {
    /// Raw deflate without zlib header (qcow2 "zlib").
    Deflate,
    /// A zlib stream: deflate with a header and a checksum (VMDK).
    Zlib,
    /// A zstd frame.
    Zstd,
    /// A bzip2 stream (DMG).
    Bzip2,
    /// Apple Data Compression (DMG).
    Adc,
    /// An xz stream (DMG calls it LZMA).
    Xz,
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Deflate | Self::Zlib => "zlib",
            Self::Zstd => "zstd",
            Self::Bzip2 => "bzip2",
            Self::Adc => "adc",
            Self::Xz => "xz",
        })
    }
}

/// Requested compression: a method and a level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressionSpec {
    /// The method.
    pub codec: Codec,
    /// The method's own level; `None` for vdkit's default.
    pub level: Option<i32>,
}
