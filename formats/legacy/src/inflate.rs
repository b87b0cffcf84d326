//! Decompression. The output buffer bounds all work.

use std::cell::RefCell;

use flate2::{Decompress, FlushDecompress};
use libdeflater::Decompressor;
use liblzma::stream::{Action, Status, Stream};
use vdkit_block::{Codec, Compressed, Error, Result};

/// Memory limit of an xz stream; level 9 takes 65 MiB.
const XZ_MEMORY_MAX: u64 = 128 << 20;

thread_local! {
    static FAST: RefCell<Option<Decompressor>> = const { RefCell::new(None) };
}

/// Decompresses a unit to fill all of `out`.
///
/// # Errors
/// [`Error::Corrupt`] for a damaged stream, or one with too few bytes.
pub(crate) fn unpack(
    file: &str,
    compressed: &Compressed,
    bytes: &[u8],
    out: &mut [u8],
) -> Result<()> {
    let done = match compressed.codec {
        Codec::Deflate => deflate(bytes, out, false),
        Codec::Zlib => deflate(bytes, out, true),
        Codec::Bzip2 => bzip2(bytes, out),
        Codec::Adc => adc(bytes, out),
        Codec::Xz => xz(bytes, out),
        other => Err(format!("data compressed by {other}")),
    };
    done.map_err(|found| {
        let expected = format!("{} data of {} bytes", compressed.codec, out.len());
        Error::corrupt(file, compressed.offset.0, "compressed unit", found, expected)
    })
}

/// Tries the fast decoder, which needs complete streams, then the tolerant one, for streams without
/// an end.
fn deflate(bytes: &[u8], out: &mut [u8], zlib: bool) -> std::result::Result<(), String> {
    let fast = FAST.with_borrow_mut(|decoder| {
        let decoder = decoder.get_or_insert_with(Decompressor::new);
        if zlib {
            decoder.zlib_decompress(bytes, out)
        } else {
            decoder.deflate_decompress(bytes, out)
        }
    });
    if fast.is_ok_and(|len| len == out.len()) {
        return Ok(());
    }
    let mut patient = Decompress::new(zlib);
    match patient.decompress(bytes, out, FlushDecompress::Finish) {
        Ok(_) if patient.total_out() == out.len() as u64 => Ok(()),
        Ok(_) => Err(format!("a stream of {} bytes", patient.total_out())),
        Err(error) => Err(format!("a damaged stream after {} bytes: {error}", patient.total_out())),
    }
}

/// Fills `out` from a stream. `step` decodes from its first argument to its second one, and returns
/// the bytes taken and made so far, and whether the stream has ended.
fn decode(
    bytes: &[u8],
    out: &mut [u8],
    mut step: impl FnMut(&[u8], &mut [u8]) -> std::result::Result<(u64, u64, bool), String>,
) -> std::result::Result<(), String> {
    let (mut from, mut to) = (0, 0);
    while to < out.len() {
        let (taken, made, ended) = step(&bytes[from.min(bytes.len())..], &mut out[to..])
            .map_err(|error| format!("a damaged stream after {to} bytes: {error}"))?;
        let stuck = (from, to) == (taken as usize, made as usize);
        (from, to) = (taken as usize, made as usize);
        if ended || stuck {
            break;
        }
    }
    if to == out.len() { Ok(()) } else { Err(format!("a stream of {to} bytes")) }
}

fn bzip2(bytes: &[u8], out: &mut [u8]) -> std::result::Result<(), String> {
    let mut decoder = bzip2::Decompress::new(false);
    decode(bytes, out, |from, to| {
        let status = decoder.decompress(from, to).map_err(|error| error.to_string())?;
        Ok((decoder.total_in(), decoder.total_out(), status == bzip2::Status::StreamEnd))
    })
}

fn xz(bytes: &[u8], out: &mut [u8]) -> std::result::Result<(), String> {
    let decoder = Stream::new_stream_decoder(XZ_MEMORY_MAX, 0);
    let mut decoder = decoder.map_err(|error| format!("no decoder: {error}"))?;
    decode(bytes, out, |from, to| {
        let status = decoder.process(from, to, Action::Run).map_err(|error| error.to_string())?;
        Ok((decoder.total_in(), decoder.total_out(), status == Status::StreamEnd))
    })
}

/// Apple Data Compression: literal runs, and two- or three-byte back references.
fn adc(bytes: &[u8], out: &mut [u8]) -> std::result::Result<(), String> {
    let (mut from, mut to) = (0, 0);
    let short = |to: usize| format!("a stream of {to} bytes");
    while to < out.len() {
        let Some(&first) = bytes.get(from) else { return Err(short(to)) };
        let more = |n: usize| bytes.get(from + n).map(|b| usize::from(*b)).ok_or_else(|| short(to));
        let control = usize::from(first);
        if control & 0x80 != 0 {
            let len = (control & 0x7f) + 1;
            let (Some(plain), true) = (bytes.get(from + 1..from + 1 + len), to + len <= out.len())
            else {
                return Err(short(to));
            };
            out[to..to + len].copy_from_slice(plain);
            (from, to) = (from + 1 + len, to + len);
            continue;
        }
        let (len, back, used) = if control & 0x40 != 0 {
            ((control & 0x3f) + 4, more(1)? << 8 | more(2)?, 3)
        } else {
            ((control >> 2 & 0xf) + 3, (control & 3) << 8 | more(1)?, 2)
        };
        if back + 1 > to || to + len > out.len() {
            return Err(format!("a reference {} bytes back at byte {to}", back + 1));
        }
        for n in 0..len {
            out[to + n] = out[to + n - back - 1];
        }
        (from, to) = (from + used, to + len);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adc_copies_and_repeats() {
        // Three literals, then six bytes from distance three, then one byte four times.
        let compressed = [0x82, b'a', b'b', b'c', 0x0c, 0x02, 0x40, 0, 0];
        let mut out = [0; 13];
        adc(&compressed, &mut out).unwrap();
        assert_eq!(&out, b"abcabcabccccc"[..13].first_chunk::<13>().unwrap());
        assert!(adc(&compressed[..5], &mut out).is_err());
        assert!(adc(&[0x00, 0x05], &mut out).is_err());
        assert!(adc(&compressed, &mut [0; 14]).is_err());
    }
}
