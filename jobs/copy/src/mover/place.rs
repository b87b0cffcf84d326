//! Reserves target space for a chunk, compressed or not, and writes it.

use std::ops::Range;

use vdkit_block::{
    CompressedReservation, CompressionSpec, Fill, GuestOffset, Reservation, Result, is_zero,
};
use vdkit_chain::Disk;

use super::{Buffers, Mover, add};
use crate::units::append_unit;
use vdkit_deflate::Compressor;

/// Marks a zero cluster in the list of compressed lengths.
const ZERO_CLUSTER: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PlaceKind {
    Zero,
    Plain,
    Compressed,
}

/// Target space for a part of a chunk.
pub(super) enum Placed<'a> {
    Plain {
        space: Reservation<'a>,
        from: usize,
    },
    Compressed {
        space: CompressedReservation<'a>,
        bytes: Range<usize>,
    },
    /// Already allocated.
    Mapped {
        from: usize,
        to: usize,
    },
}

impl Mover<'_> {
    /// Writes compressed data over the target's content. One reservation at a time: other threads
    /// may be writing zeroes, which waits for reservations.
    pub(super) fn write_compressed(
        &self,
        target: &Disk,
        buffers: &mut Buffers,
        spec: CompressionSpec,
        at: u64,
    ) -> Result<()> {
        let cluster = target.top().caps().cluster_bytes as usize;
        let len = buffers.bytes.len();
        self.pack(target, buffers, spec, at)?;
        // The target keeps its content after the source's end, which a compressed unit cannot
        // include.
        let keeps = target.guest_bytes() > at + len as u64;
        let kind = |index: usize| match buffers.lens[index] {
            ZERO_CLUSTER => PlaceKind::Zero,
            0 => PlaceKind::Plain,
            _ if keeps && (index + 1) * cluster > len => PlaceKind::Plain,
            _ => PlaceKind::Compressed,
        };
        let (mut index, mut payload) = (0, 0);
        while index < buffers.lens.len() {
            let this = kind(index);
            let same = (index..buffers.lens.len()).take_while(|next| kind(*next) == this);
            let end = index + same.count();
            let range = index * cluster..(end * cluster).min(len);
            match this {
                PlaceKind::Zero => self.write_zero_gap(target, at, range)?,
                PlaceKind::Plain => {
                    let from = GuestOffset(at + range.start as u64);
                    add(&self.moved.written, range.len() as u64);
                    self.write_run(target, &buffers.bytes[range], from)?;
                }
                PlaceKind::Compressed => {
                    let mut placed = Vec::new();
                    while index < end {
                        let first = GuestOffset(at + (index * cluster) as u64);
                        let lens = &buffers.lens[index..end];
                        index += self.place_some(target, first, lens, &mut payload, &mut placed)?;
                        for part in placed.drain(..) {
                            self.write_placed(target, buffers, at, part)?;
                        }
                    }
                }
            }
            index = end;
        }
        Ok(())
    }

    /// Compresses and frames each cluster of the chunk at `at`. In `lens`, 0 marks an uncompressed
    /// cluster and [`ZERO_CLUSTER`] a zero one.
    pub(super) fn pack(
        &self,
        target: &Disk,
        buffers: &mut Buffers,
        spec: CompressionSpec,
        at: u64,
    ) -> Result<()> {
        let Buffers { bytes, compressed, lens, compressor, .. } = buffers;
        let cluster = target.top().caps().cluster_bytes as usize;
        compressed.clear();
        lens.clear();
        let compressor = match compressor {
            Some(compressor) => compressor,
            None => compressor.insert(Compressor::new(spec)?),
        };
        // A short last cluster is padded with zeroes and compressed whole.
        bytes.resize(bytes.len().next_multiple_of(cluster));
        for (index, unit) in bytes.chunks_exact(cluster).enumerate() {
            if is_zero(unit) {
                lens.push(ZERO_CLUSTER);
                continue;
            }
            let at = GuestOffset(at + (index * cluster) as u64);
            lens.push(append_unit(target, compressor, unit, at, compressed)?);
        }
        Ok(())
    }

    /// Reserves target space for a chunk, in guest order. A chunk to be compressed was packed.
    pub(super) fn place<'t>(
        &self,
        target: &'t Disk,
        buffers: &Buffers,
        at: u64,
    ) -> Result<Vec<Placed<'t>>> {
        let cluster = target.top().caps().cluster_bytes as usize;
        let clusters = buffers.bytes.len().div_ceil(cluster);
        let kind = |index: usize| match self.options.compress {
            Some(_) => match buffers.lens[index] {
                ZERO_CLUSTER => PlaceKind::Zero,
                0 => PlaceKind::Plain,
                _ => PlaceKind::Compressed,
            },
            None => {
                let (from, to) = (index * cluster, (index + 1) * cluster);
                // Runs are sorted: the first that ends after the cluster's start decides.
                let run = buffers.runs.partition_point(|r| r.end <= from);
                match buffers.runs.get(run) {
                    Some(run) if run.start < to => PlaceKind::Plain,
                    _ => PlaceKind::Zero,
                }
            }
        };
        let mut placed = Vec::new();
        let (mut index, mut compressed_at) = (0, 0);
        while index < clusters {
            let this = kind(index);
            let end = index + (index..clusters).take_while(|next| kind(*next) == this).count();
            match this {
                PlaceKind::Zero => add(&self.moved.zero_found, ((end - index) * cluster) as u64),
                PlaceKind::Plain => {
                    let to = (end * cluster).min(self.chunk_end(at, buffers.bytes.len()));
                    self.place_plain(target, at, index * cluster, to, &mut placed)?;
                }
                PlaceKind::Compressed => {
                    while index < end {
                        let first = GuestOffset(at + (index * cluster) as u64);
                        let lens = &buffers.lens[index..end];
                        index +=
                            self.place_some(target, first, lens, &mut compressed_at, &mut placed)?;
                    }
                }
            }
            index = end;
        }
        Ok(placed)
    }

    /// The chunk's length without the zero padding of the last cluster.
    fn chunk_end(&self, at: u64, len: usize) -> usize {
        len.min((self.source.bytes() - at) as usize)
    }

    pub(super) fn place_plain<'t>(
        &self,
        target: &'t Disk,
        at: u64,
        mut from: usize,
        to: usize,
        placed: &mut Vec<Placed<'t>>,
    ) -> Result<()> {
        while from < to {
            let space = target.top().reserve(GuestOffset(at + from as u64), (to - from) as u64)?;
            match space {
                Some(space) if space.head == Fill::Ready && space.tail == Fill::Ready => {
                    let next = (space.write.end - at) as usize;
                    placed.push(Placed::Plain { space, from });
                    from = next;
                }
                // Preallocated, or needs a fill: use the ordinary write path.
                _ => {
                    placed.push(Placed::Mapped { from, to });
                    from = to;
                }
            }
        }
        Ok(())
    }

    /// Reserves space for the first units of `lens`, as many as fit at once, and returns their
    /// number. `payload` is their start in the compressed data, and is advanced.
    fn place_some<'t>(
        &self,
        target: &'t Disk,
        at: GuestOffset,
        lens: &[u32],
        payload: &mut usize,
        placed: &mut Vec<Placed<'t>>,
    ) -> Result<usize> {
        let space = target.top().writes_compressed()?.reserve_compressed(at, lens)?;
        let units = space.units;
        let bytes: usize = lens[..units].iter().map(|&l| l as usize).sum();
        placed.push(Placed::Compressed { space, bytes: *payload..*payload + bytes });
        add(&self.moved.clusters_compressed, units as u64);
        add(&self.moved.compressed_bytes, bytes as u64);
        *payload += bytes;
        Ok(units)
    }

    pub(super) fn write_placed(
        &self,
        target: &Disk,
        buffers: &Buffers,
        at: u64,
        part: Placed<'_>,
    ) -> Result<()> {
        match part {
            Placed::Plain { space, from } => {
                let to = (space.write.end - at) as usize;
                let put = |run: Range<usize>| {
                    add(&self.moved.written, run.len() as u64);
                    let from = at + run.start as u64;
                    target.write_reserved(&space, &buffers.bytes[run], from)
                };
                let moved = if space.zeroed && self.options.compress.is_none() {
                    let first = buffers.runs.partition_point(|r| r.end <= from);
                    let mut runs = buffers.runs[first..].iter().take_while(|r| r.start < to);
                    runs.try_for_each(|run| put(run.start.max(from)..run.end.min(to)))
                } else {
                    put(from..to)
                };
                moved.inspect_err(|error| target.empty_reserved(&space, error))?;
                space.publish()
            }
            Placed::Compressed { space, bytes } => {
                add(&self.moved.written, bytes.len() as u64);
                let (storage, len) = (target.top().file(space.file), bytes.len() as u64);
                storage
                    .write_at(&buffers.compressed[bytes], space.host)
                    .inspect_err(|error| target.empty_compressed(&space, len, error))?;
                target.publish_compressed(space)
            }
            Placed::Mapped { from, to } => {
                add(&self.moved.written, (to - from) as u64);
                let bytes = &buffers.bytes[from..to];
                self.write_run(target, bytes, GuestOffset(at + from as u64))
            }
        }
    }
}
