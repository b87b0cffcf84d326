//! Compressing the units of an image.

use vdkit_block::{Codec, CompressionSpec, Error, Result};

use crate::deflate::{self, Deflater};

/// The level of zstd where none is given. In units of 64 KiB with their length known, 2 gives what
/// QEMU's streams of level 3 give, in four fifths of level 3's time.
const ZSTD_DEFAULT_LEVEL: i32 = 2;

/// A compressor with its memory, to be used for many units by one thread.
pub struct Compressor {
    method: Method,
}

enum Method {
    Deflate(Box<Deflater>),
    Zstd(zstd::bulk::Compressor<'static>),
}

impl std::fmt::Debug for Compressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.method {
            Method::Deflate(_) => "Compressor(zlib)",
            Method::Zstd(_) => "Compressor(zstd)",
        })
    }
}

impl Compressor {
    /// A compressor by this method and level.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a level that the method does not have.
    pub fn new(spec: CompressionSpec) -> Result<Self> {
        let levels = levels(spec.codec)?;
        if let Some(level) = spec.level.filter(|level| !levels.contains(level)) {
            return Err(Error::Invalid(format!(
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
                    .map_err(|error| Error::Invalid(format!("zstd level {level}: {error}")))?;
                Method::Zstd(compressor)
            }
            _ => {
                let level = spec.level.unwrap_or(deflate::DEFAULT_LEVEL);
                Method::Deflate(Box::new(Deflater::new(level)))
            }
        };
        Ok(Self { method })
    }

    /// Appends the compressed form of `unit` to `out`. Where that would not be smaller than the
    /// unit, `out` stays as it was and the answer is `false`: the unit is kept as it is.
    ///
    /// The result depends on the unit, the method and the level alone.
    pub fn compress(&mut self, unit: &[u8], out: &mut Vec<u8>) -> bool {
        match &mut self.method {
            Method::Deflate(deflater) => deflater.compress(unit, out).is_some(),
            Method::Zstd(compressor) => {
                let start = out.len();
                out.resize(start + unit.len().saturating_sub(1), 0);
                // An error says that the room did not suffice.
                let written = compressor.compress_to_buffer(unit, &mut out[start..]).ok();
                out.truncate(start + written.unwrap_or(0));
                written.is_some()
            }
        }
    }
}

/// The levels of a method.
///
/// # Errors
/// [`Error::Invalid`] for a method that is only read.
fn levels(codec: Codec) -> Result<std::ops::RangeInclusive<i32>> {
    match codec {
        Codec::Deflate => Ok(deflate::LEVELS),
        Codec::Zstd => Ok(-7..=22),
        other => Err(Error::Invalid(format!("cannot compress by {other}"))),
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
