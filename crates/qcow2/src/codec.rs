//! Unpacking compressed clusters (interim).

use vdkit_block::Codec;

pub(crate) fn unpack(codec: Codec, packed: &[u8], out: &mut [u8]) -> Result<(), String> {
    match codec {
        Codec::Deflate => {
            let mut d = flate2::Decompress::new(false);
            d.decompress(packed, out, flate2::FlushDecompress::Finish)
                .map_err(|e| e.to_string())?;
            if d.total_out() as usize == out.len() { Ok(()) } else { Err("short".into()) }
        }
        _ => zstd::bulk::Decompressor::new()
            .and_then(|mut d| d.decompress_to_buffer(packed, out))
            .map(|_| ())
            .map_err(|e| e.to_string()),
    }
}
