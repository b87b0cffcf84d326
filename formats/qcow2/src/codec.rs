//! Decompression of compressed clusters.
//!
//! Accepts what QEMU accepts, since existing images rely on it:
//!
//! - The length of the compressed data is known only in sectors, so arbitrary bytes may follow the
//!   stream.
//! - A deflate stream is complete once it has filled the cluster, even without its end mark.
//! - Several zstd frames may follow each other until the cluster is full; the last one must end
//!   there.
//!
//! The output buffer bounds all work: no stream can expand to more than one cluster, and no decoder
//! allocates memory of a size that the stream specifies.

use std::cell::RefCell;

use flate2::{Decompress, FlushDecompress, Status};
use libdeflater::{DecompressionError, Decompressor};
use vdkit_block::Codec;
use zstd::zstd_safe;

/// Why a cluster could not be decompressed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnpackFault {
    /// The stream is invalid.
    #[error("a damaged stream after {unpacked} unpacked bytes ({what})")]
    Damaged {
        /// Bytes decompressed before the damage, as far as the decoder reports.
        unpacked: usize,
        /// The decoder's message.
        what: String,
    },
    /// The stream ends too early.
    #[error("a stream of {unpacked} unpacked bytes")]
    Short {
        /// Decompressed bytes.
        unpacked: usize,
    },
    /// The stream continues after the cluster is full.
    #[error("a stream that goes on after {unpacked} unpacked bytes")]
    Long {
        /// Bytes of a cluster.
        unpacked: usize,
    },
    /// The method is not supported.
    #[error("data compressed by an unknown method")]
    Unknown,
}

thread_local! {
    static DEFLATE: RefCell<Option<Decompressor>> = const { RefCell::new(None) };
    static INFLATE: RefCell<Option<Decompress>> = const { RefCell::new(None) };
    static ZSTD: RefCell<Option<zstd_safe::DCtx<'static>>> = const { RefCell::new(None) };
}

/// Decompresses one cluster: fills all of `out` from the front of `compressed`, or fails. After an
/// error the content of `out` is undefined.
///
/// Each thread keeps its decoders (about 60 KiB for deflate, 160 KiB for zstd).
pub fn unpack(codec: Codec, compressed: &[u8], out: &mut [u8]) -> Result<(), UnpackFault> {
    match codec {
        Codec::Deflate => deflate(compressed, out),
        Codec::Zstd => zstd_frames(compressed, out),
        _ => Err(UnpackFault::Unknown),
    }
}

/// Tries the fast decoder, which accepts only complete streams, then the tolerant one.
fn deflate(compressed: &[u8], out: &mut [u8]) -> Result<(), UnpackFault> {
    let fast = DEFLATE.with_borrow_mut(|decoder| {
        decoder.get_or_insert_with(Decompressor::new).deflate_decompress(compressed, out)
    });
    match fast {
        Ok(bytes) if bytes == out.len() => Ok(()),
        Ok(bytes) => Err(UnpackFault::Short { unpacked: bytes }),
        // The fast decoder reports a missing end mark as bad data, and a longer stream as lack of
        // space.
        Err(DecompressionError::BadData | DecompressionError::InsufficientSpace) => {
            inflate(compressed, out)
        }
    }
}

fn inflate(compressed: &[u8], out: &mut [u8]) -> Result<(), UnpackFault> {
    INFLATE.with_borrow_mut(|decoder| {
        let decoder = decoder.get_or_insert_with(|| Decompress::new(false));
        decoder.reset(false);
        loop {
            let (taken, given) = (decoder.total_in() as usize, decoder.total_out() as usize);
            let status = decoder.decompress(
                &compressed[taken..],
                &mut out[given..],
                FlushDecompress::Finish,
            );
            let unpacked = decoder.total_out() as usize;
            match status {
                Err(error) => {
                    return Err(UnpackFault::Damaged { unpacked, what: error.to_string() });
                }
                // The cluster is full, whether or not the stream continues.
                Ok(_) if unpacked == out.len() => return Ok(()),
                Ok(Status::StreamEnd) => return Err(UnpackFault::Short { unpacked }),
                Ok(Status::Ok | Status::BufError) => {
                    if unpacked == given && decoder.total_in() as usize == taken {
                        return Err(UnpackFault::Short { unpacked });
                    }
                }
            }
        }
    })
}

/// Decodes each frame in one call: unlike the streaming decoder, this needs no window buffer, so a
/// frame header with a window of 2 GiB costs nothing.
fn zstd_frames(compressed: &[u8], out: &mut [u8]) -> Result<(), UnpackFault> {
    ZSTD.with_borrow_mut(|decoder| {
        let decoder = match decoder {
            Some(decoder) => decoder,
            None => match zstd_safe::DCtx::try_create() {
                Some(new) => decoder.insert(new),
                None => {
                    let what = "no memory for a zstd decoder".to_owned();
                    return Err(UnpackFault::Damaged { unpacked: 0, what });
                }
            },
        };
        let (mut taken, mut unpacked) = (0, 0);
        while unpacked < out.len() {
            let rest = &compressed[taken..];
            if rest.is_empty() {
                return Err(UnpackFault::Short { unpacked });
            }
            let damaged = |code| UnpackFault::Damaged {
                unpacked,
                what: zstd_safe::get_error_name(code).to_owned(),
            };
            // A frame has at least its header, so each iteration makes progress.
            let frame = zstd_safe::find_frame_compressed_size(rest).map_err(damaged)?;
            match decoder.decompress(&mut out[unpacked..], &rest[..frame]) {
                Ok(bytes) => unpacked += bytes,
                Err(code) if is_no_space(code) => {
                    return Err(UnpackFault::Long { unpacked: out.len() });
                }
                Err(code) => return Err(damaged(code)),
            }
            taken += frame;
        }
        Ok(())
    })
}

/// Whether zstd reports that the output buffer is too small.
fn is_no_space(code: zstd_safe::ErrorCode) -> bool {
    // ZSTD_error_dstSize_tooSmall, stable since zstd 1.3.1; codes are returned negated.
    code.wrapping_neg() == 70
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    const CLUSTER: usize = 65536;

    /// Bytes that compress to about half.
    fn sample(len: usize) -> Vec<u8> {
        let mut state = 0x9e37_79b9_u32;
        (0..len)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                b"vdkit and its qcow2 clusters"[(state >> 27) as usize % 28]
            })
            .collect()
    }

    fn deflated(plain: &[u8]) -> Vec<u8> {
        let mut encoder =
            flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(plain).unwrap();
        encoder.finish().unwrap()
    }

    fn zstded(plain: &[u8], checksum: bool) -> Vec<u8> {
        let mut encoder = zstd::Encoder::new(Vec::new(), 3).unwrap();
        encoder.include_checksum(checksum).unwrap();
        encoder.write_all(plain).unwrap();
        encoder.finish().unwrap()
    }

    fn both(plain: &[u8]) -> [(Codec, Vec<u8>); 3] {
        [
            (Codec::Deflate, deflated(plain)),
            (Codec::Zstd, zstded(plain, false)),
            (Codec::Zstd, zstded(plain, true)),
        ]
    }

    #[test]
    fn whole_streams_with_garbage_behind_them() {
        let plain = sample(CLUSTER);
        for (codec, compressed) in both(&plain) {
            for garbage in [0, 1, 7, 511] {
                for fill in [0u8, 0xff, 0x28] {
                    let mut bytes = compressed.clone();
                    bytes.resize(compressed.len() + garbage, fill);
                    let mut out = vec![0; CLUSTER];
                    assert_eq!(unpack(codec, &bytes, &mut out), Ok(()), "{codec} {garbage}");
                    assert!(out == plain, "{codec} {garbage}");
                }
            }
        }
    }

    #[test]
    fn a_deflate_stream_need_not_end() {
        let plain = sample(CLUSTER);
        let mut compressed = Vec::with_capacity(2 * CLUSTER);
        let mut encoder = flate2::Compress::new(flate2::Compression::default(), false);
        // All data, but no end mark.
        encoder.compress_vec(&plain, &mut compressed, flate2::FlushCompress::Sync).unwrap();
        assert_eq!(encoder.total_in(), CLUSTER as u64);
        let mut out = vec![0; CLUSTER];
        assert_eq!(unpack(Codec::Deflate, &compressed, &mut out), Ok(()));
        assert!(out == plain);
        // A longer stream is cut at the end of the cluster.
        let mut out = vec![0; 512];
        assert_eq!(unpack(Codec::Deflate, &deflated(&plain), &mut out), Ok(()));
        assert!(out == plain[..512]);
    }

    #[test]
    fn short_and_long_streams_say_so() {
        for (codec, compressed) in both(&sample(1000)) {
            let fault = unpack(codec, &compressed, &mut [0; 1001]).unwrap_err();
            assert_eq!(fault, UnpackFault::Short { unpacked: 1000 }, "{codec}");
        }
        for checksum in [false, true] {
            let fault =
                unpack(Codec::Zstd, &zstded(&sample(1000), checksum), &mut [0; 999]).unwrap_err();
            assert_eq!(fault, UnpackFault::Long { unpacked: 999 });
        }
        for codec in [Codec::Deflate, Codec::Zstd] {
            let fault = unpack(codec, &[], &mut [0; 512]).unwrap_err();
            assert_eq!(fault, UnpackFault::Short { unpacked: 0 }, "{codec}");
        }
    }

    #[test]
    fn zstd_frames_may_follow_each_other() {
        let plain = sample(3000);
        let mut compressed = zstded(&plain[..1000], true);
        // A skippable frame holds nothing.
        compressed.extend_from_slice(&[0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3]);
        compressed.extend_from_slice(&zstded(&[], false));
        compressed.extend_from_slice(&zstded(&plain[1000..], false));
        compressed.push(0x77);
        let mut out = vec![0; 3000];
        assert_eq!(unpack(Codec::Zstd, &compressed, &mut out), Ok(()));
        assert!(out == plain);
        // The second frame does not end where the cluster is full.
        assert!(unpack(Codec::Zstd, &compressed, &mut [0; 2999]).is_err());
    }

    #[test]
    fn damage_is_found() {
        for (codec, mut compressed) in both(&sample(CLUSTER)) {
            for byte in &mut compressed[20..40] {
                *byte ^= 0x55;
            }
            let fault = unpack(codec, &compressed, &mut vec![0; CLUSTER]).unwrap_err();
            let said = fault.to_string();
            assert!(said.contains("unpacked bytes"), "{said}");
        }
        // The frame's checksum is verified.
        let mut compressed = zstded(&sample(CLUSTER), true);
        *compressed.last_mut().unwrap() ^= 1;
        assert!(matches!(
            unpack(Codec::Zstd, &compressed, &mut vec![0; CLUSTER]),
            Err(UnpackFault::Damaged { .. })
        ));
    }

    #[test]
    fn a_huge_window_costs_nothing() {
        // Frame header: magic, descriptor (no size, no checksum), window descriptor of 2^41
        // bytes; then one last RLE block of 512 bytes of 'x'.
        let block = (512u32 << 3) | (1 << 1) | 1;
        let mut compressed = vec![0x28, 0xb5, 0x2f, 0xfd, 0x00, 31 << 3];
        compressed.extend_from_slice(&block.to_le_bytes()[..3]);
        compressed.push(b'x');
        let before = ZSTD.with_borrow(|d| d.as_ref().map_or(0, |d| d.sizeof()));
        let result = unpack(Codec::Zstd, &compressed, &mut [0; 512]);
        let after = ZSTD.with_borrow(|d| d.as_ref().map_or(0, |d| d.sizeof()));
        assert!(after < before + (1 << 20), "{before} {after}");
        // zstd itself rejects windows above 2^31; either result is correct.
        assert!(matches!(result, Ok(()) | Err(UnpackFault::Damaged { .. })), "{result:?}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        #[test]
        fn random_bytes_never_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..2000),
            len in 0usize..5000,
            magic in any::<bool>(),
        ) {
            let mut bytes = bytes;
            if magic && bytes.len() >= 4 {
                bytes[..4].copy_from_slice(&[0x28, 0xb5, 0x2f, 0xfd]);
            }
            for codec in [Codec::Deflate, Codec::Zstd] {
                let _ = unpack(codec, &bytes, &mut vec![0; len]);
            }
        }

        #[test]
        fn damaged_streams_never_panic(at in 0usize..5000, with in any::<u8>(), cut in 0usize..5000) {
            for (codec, mut compressed) in both(&sample(8192)) {
                let at = at % compressed.len();
                compressed[at] ^= with;
                compressed.truncate(compressed.len() - cut % 7);
                let _ = unpack(codec, &compressed, &mut vec![0; 8192]);
            }
        }
    }
}
