//! Compressed grains: a marker with disk address and length, then a zlib stream.
//!
//! Source: VMware, "Virtual Disk Format 5.0", "Stream-Optimized Compressed Sparse Extents".

use std::cell::RefCell;

use libdeflater::Decompressor;
use vdkit_block::{Compressed, CompressedUnits, Error, Result};
use zerocopy::FromBytes;

use crate::header::SECTOR;
use crate::image::Vmdk;
use crate::on_disk::GrainMarker;
use crate::sparse::Flavor;

/// Bytes of a marker before a compressed grain.
pub const MARKER_BYTES: usize = size_of::<GrainMarker>();

thread_local! {
    static INFLATE: RefCell<Option<Decompressor>> = const { RefCell::new(None) };
}

/// Decompresses a grain: fills the front of `out`, and returns the grain's first sector and the
/// number of bytes. The rest of `out` is undefined.
///
/// # Errors
/// A description of what was found, and of what was expected.
pub(crate) fn unpack(
    markers: bool,
    bytes: &[u8],
    out: &mut [u8],
) -> std::result::Result<(u64, usize), (String, &'static str)> {
    let (lba, stream) = if markers {
        let Ok((marker, rest)) = GrainMarker::ref_from_prefix(bytes) else {
            return Err((format!("{} bytes", bytes.len()), "a grain marker of 12 bytes"));
        };
        let (lba, size) = (marker.lba.get(), marker.size.get() as usize);
        if size == 0 || size > rest.len() {
            return Err((format!("a length of {size} bytes"), "a length up to the next grain"));
        }
        (lba, &rest[..size])
    } else {
        (u64::MAX, bytes)
    };
    let unpacked = INFLATE.with_borrow_mut(|inflate| {
        inflate.get_or_insert_with(Decompressor::new).zlib_decompress(stream, out)
    });
    unpacked.map(|bytes| (lba, bytes)).map_err(|error| {
        (
            format!("{} bytes that cannot be unpacked ({error})", stream.len()),
            "a zlib stream of a grain",
        )
    })
}

impl CompressedUnits for Vmdk {
    fn unpack(&self, compressed: &Compressed, bytes: &[u8], out: &mut [u8]) -> Result<()> {
        let file = self.file_of(compressed.file).name();
        let found = self.extents.iter().find_map(|piece| {
            let sparse = piece.sparse().filter(|sparse| sparse.file == compressed.file)?;
            match sparse.flavor {
                Flavor::Stream { markers, .. } => Some((piece, markers)),
                _ => None,
            }
        });
        let Some((piece, markers)) = found else {
            let what = "a compressed grain in an extent that has none";
            return Err(Error::unsupported(file, what, "open the image anew"));
        };
        let fault = |found: String, expected: &str| {
            Err(Error::corrupt(file, compressed.offset.0, "compressed grain", found, expected))
        };
        let (lba, unpacked) = match unpack(markers, bytes, out) {
            Ok(unpacked) => unpacked,
            Err((found, expected)) => return fault(found, expected),
        };
        // The disk's last grain may be partial.
        let end = lba.saturating_mul(SECTOR).saturating_add(unpacked as u64);
        if unpacked < out.len() && (unpacked == 0 || end < piece.len) {
            return fault(format!("a grain of {unpacked} bytes"), "a whole grain");
        }
        out[unpacked..].fill(0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use libdeflater::{CompressionLvl, Compressor};

    use super::*;

    #[test]
    fn grains_are_unpacked_and_faults_named() {
        let plain = vec![7; 4096];
        let mut stream = vec![0; 8192];
        let mut packer = Compressor::new(CompressionLvl::default());
        let len = packer.zlib_compress(&plain, &mut stream).unwrap();
        let mut bytes = 128u64.to_le_bytes().to_vec();
        bytes.extend((len as u32).to_le_bytes());
        bytes.extend(&stream[..len]);
        bytes.extend([0xff; 100]);
        let mut out = vec![0; 4096];
        assert_eq!(unpack(true, &bytes, &mut out), Ok((128, 4096)));
        assert_eq!(out, plain);
        assert_eq!(unpack(false, &bytes[12..], &mut out), Ok((u64::MAX, 4096)));
        for (at, value) in [(8, 0), (10, 9), (12, 0), (16, 0xff)] {
            let mut bad = bytes.clone();
            bad[at] = value;
            if at == 8 {
                bad[8..12].fill(0);
            }
            assert!(unpack(true, &bad, &mut out).is_err(), "{at}");
        }
        assert!(unpack(true, &bytes[..11], &mut out).is_err());
        assert!(unpack(true, &bytes, &mut out[..100]).is_err());
    }
}
