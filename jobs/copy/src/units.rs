//! Compressed units: one cluster each, in the format's frame.

use vdkit_block::{CompressionSpec, GuestOffset, Result};
use vdkit_chain::Disk;
use vdkit_deflate::Compressor;

use crate::convert::image_codec;

/// Appends the compressed form of the cluster at `at` to `out`, in the target's frame, and returns
/// its bytes; 0 if it would not be smaller, unless the format stores no other clusters.
///
/// # Errors
/// [`vdkit_block::Error::Unsupported`] if the format has no compressed units.
pub(crate) fn append_unit(
    target: &Disk,
    compressor: &mut Compressor,
    unit: &[u8],
    at: GuestOffset,
    out: &mut Vec<u8>,
) -> Result<u32> {
    let writer = target.top().writes_compressed()?;
    let frame = writer.compressed_frame();
    let start = out.len();
    let payload = start + frame.head_bytes as usize;
    out.resize(payload, 0);
    if !compressor.compress(unit, out) {
        if !target.top().caps().one_pass {
            out.truncate(start);
            return Ok(0);
        }
        compressor.store(unit, out)?;
    }
    let payload_bytes = (out.len() - payload) as u32;
    let framed = (out.len() - start).next_multiple_of(frame.align.max(1) as usize);
    out.resize(start + framed, 0);
    writer.frame_compressed(at, &mut out[start..], payload_bytes);
    Ok(framed as u32)
}

/// Writes single clusters compressed, with the method of the image.
#[derive(Default)]
pub(crate) struct UnitWriter {
    compressor: Option<Compressor>,
    /// The cluster, if the disk ends within it.
    padded: Vec<u8>,
    framed: Vec<u8>,
}

impl UnitWriter {
    /// Writes one cluster, or what the disk has of its last one. Returns whether it was smaller
    /// compressed; else nothing was written.
    pub(crate) fn write(&mut self, target: &Disk, at: GuestOffset, bytes: &[u8]) -> Result<bool> {
        let cluster = target.top().caps().cluster_bytes as usize;
        let compressor = match &mut self.compressor {
            Some(compressor) => compressor,
            none => {
                let spec = CompressionSpec { codec: image_codec(target)?, level: None };
                none.insert(Compressor::new(spec)?)
            }
        };
        let unit = match bytes.len() < cluster {
            true => {
                self.padded.clear();
                self.padded.extend_from_slice(bytes);
                self.padded.resize(cluster, 0);
                &self.padded
            }
            false => bytes,
        };
        self.framed.clear();
        if append_unit(target, compressor, unit, at, &mut self.framed)? == 0 {
            return Ok(false);
        }
        target.write_compressed(at, &[&self.framed])?;
        Ok(true)
    }
}
