//! Compression of image units.

use vdkit_block::{Codec, CompressionSpec, Error, Result};

use crate::deflate::{self, Deflater};

/// The default zstd level. For 64 KiB units of known length, it compresses about as well as QEMU's
/// streams of level 3, in less time.
const ZSTD_DEFAULT_LEVEL: i32 = 2;

/// A compressor with reusable memory, for one thread.
pub struct Compressor {
    method: Method,
}

enum Method {
    Deflate(Box<Deflater>),
    /// Deflate within a zlib stream (RFC 1950).
    Zlib(Box<Deflater>),
    Zstd(zstd::bulk::Compressor<'static>),
}

impl std::fmt::Debug for Compressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.method {
            Method::Deflate(_) => "Compressor(deflate)",
            Method::Zlib(_) => "Compressor(zlib)",
            Method::Zstd(_) => "Compressor(zstd)",
        })
    }
}

impl Compressor {
    /// A compressor with this method and level.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an invalid level.
    pub fn new(spec: CompressionSpec) -> Result<Self> {
        let levels = levels(spec.codec)?;
        if let Some(level) = spec.level.filter(|level| !levels.contains(level)) {
            return Err(Error::invalid(format!(
                "{} has no level {level}: use {} to {}",
                spec.codec,
                levels.start(),
                levels.end()
            )));
        }
        let method = match spec.codec {
            Codec::Zstd => {
                let level = spec.level.unwrap_or(ZSTD_DEFAULT_LEVEL);
                let compressor = zstd::bulk::Compressor::new(level)
                    .map_err(|error| Error::invalid(format!("zstd level {level}: {error}")))?;
                Method::Zstd(compressor)
            }
            codec => {
                let level = spec.level.unwrap_or(deflate::DEFAULT_LEVEL);
                let deflater = Box::new(Deflater::new(level));
                let zlib = codec == Codec::Zlib;
                if zlib { Method::Zlib(deflater) } else { Method::Deflate(deflater) }
            }
        };
        Ok(Self { method })
    }

    /// Appends the compressed form of `unit` to `out`. If it would not be smaller than the unit,
    /// returns `false` and leaves `out` unchanged: the unit is stored uncompressed.
    ///
    /// The result depends only on the unit, the method and the level.
    pub fn compress(&mut self, unit: &[u8], out: &mut Vec<u8>) -> bool {
        match &mut self.method {
            Method::Deflate(deflater) => deflater.compress(unit, out).is_some(),
            Method::Zlib(deflater) => {
                let start = out.len();
                out.extend(ZLIB_HEADER);
                if deflater.compress(unit, out).is_none() {
                    out.truncate(start);
                    return false;
                }
                out.extend(adler32(unit).to_be_bytes());
                // The header and the checksum may outweigh the gain.
                let smaller = out.len() - start < unit.len();
                if !smaller {
                    out.truncate(start);
                }
                smaller
            }
            Method::Zstd(compressor) => {
                let start = out.len();
                out.resize(start + unit.len().saturating_sub(1), 0);
                // An error means that the buffer was too small.
                let written = compressor.compress_to_buffer(unit, &mut out[start..]).ok();
                out.truncate(start + written.unwrap_or(0));
                written.is_some()
            }
        }
    }

    /// Appends `unit` uncompressed in the method's own framing, slightly longer than itself: for
    /// formats in which every unit is compressed.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a method that no such format uses.
    pub fn store(&mut self, unit: &[u8], out: &mut Vec<u8>) -> Result<()> {
        match &self.method {
            Method::Deflate(_) => deflate::store(unit, out),
            Method::Zlib(_) => {
                out.extend(ZLIB_HEADER);
                deflate::store(unit, out);
                out.extend(adler32(unit).to_be_bytes());
            }
            Method::Zstd(_) => {
                return Err(Error::invalid("zstd units are not stored as they are"));
            }
        }
        Ok(())
    }
}

/// RFC 1950, 2.2: deflate with a window of 32 KiB, no preset dictionary, default level.
const ZLIB_HEADER: [u8; 2] = [0x78, 0x9c];

/// The checksum of RFC 1950, 8.2.
fn adler32(bytes: &[u8]) -> u32 {
    /// Sums of this many bytes fit in 32 bits.
    const RUN: usize = 5552;
    const MODULUS: u32 = 65521;
    let (mut a, mut b) = (1, 0);
    for run in bytes.chunks(RUN) {
        for &byte in run {
            a += u32::from(byte);
            b += a;
        }
        a %= MODULUS;
        b %= MODULUS;
    }
    b << 16 | a
}

/// The levels of a method.
///
/// # Errors
/// [`Error::Invalid`] for a read-only method.
fn levels(codec: Codec) -> Result<std::ops::RangeInclusive<i32>> {
    match codec {
        Codec::Deflate | Codec::Zlib => Ok(deflate::LEVELS),
        Codec::Zstd => Ok(-7..=22),
        other => Err(Error::invalid(format!("cannot compress by {other}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(codec: Codec, level: Option<i32>) -> CompressionSpec {
        CompressionSpec { codec, level }
    }

    #[test]
    fn zstd_comes_back_and_random_bytes_are_kept() {
        let mut compressor = Compressor::new(spec(Codec::Zstd, None)).unwrap();
        let unit: Vec<u8> = (0..65_536u32).map(|i| (i / 7 % 97) as u8).collect();
        let mut out = vec![1, 2, 3];
        assert!(compressor.compress(&unit, &mut out));
        assert!(out.len() < unit.len() / 4);
        assert_eq!(zstd::bulk::decompress(&out[3..], unit.len()).unwrap(), unit);

        let mut state = 1u64;
        let random: Vec<u8> = (0..4096)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        let before = out.clone();
        assert!(!compressor.compress(&random, &mut out));
        assert_eq!(out, before);
        assert!(!compressor.compress(&[], &mut out));
    }

    #[test]
    fn zlib_streams_are_read_by_zlib() {
        use std::io::Read;
        let inflate = |compressed: &[u8]| {
            let mut out = Vec::new();
            flate2::read::ZlibDecoder::new(compressed).read_to_end(&mut out).unwrap();
            out
        };
        let mut compressor = Compressor::new(spec(Codec::Zlib, None)).unwrap();
        for len in [1, 2, 65_535, 65_536, 70_000, 1 << 20] {
            let soft: Vec<u8> = (0..len as u32).map(|i| (i / 3 % 251) as u8).collect();
            let mut out = vec![9];
            if compressor.compress(&soft, &mut out) {
                assert!(out.len() - 1 < len);
                assert_eq!(inflate(&out[1..]), soft, "{len}");
            } else {
                assert!(len < 16 && out == [9], "{len}");
            }
            let mut stored = vec![7];
            compressor.store(&soft, &mut stored).unwrap();
            assert_eq!(inflate(&stored[1..]), soft, "{len}");
            // Five bytes per block of 65,535, and the frame.
            assert!(stored.len() - 1 <= len + 6 + 5 * len.div_ceil(65_535));
        }
        assert_eq!(adler32(b"Wikipedia"), 0x11e6_0398);
    }

    #[test]
    fn levels_are_checked() {
        for (codec, level) in
            [(Codec::Deflate, 0), (Codec::Deflate, 10), (Codec::Zstd, 23), (Codec::Zstd, -8)]
        {
            let error = Compressor::new(spec(codec, Some(level))).unwrap_err().to_string();
            assert!(error.contains(&level.to_string()), "{error}");
        }
        assert!(Compressor::new(spec(Codec::Zstd, Some(-7))).is_ok());
        assert!(Compressor::new(spec(Codec::Deflate, Some(9))).is_ok());
    }
}
