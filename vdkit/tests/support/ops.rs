//! Operations on a disk and on the expected guest content.

use proptest::prelude::*;
use vdkit_block::{Codec, Result};
use vdkit_chain::Disk;
use vdkit_testkit::Rng;

use super::guest::{Guest, SECTOR, pattern, soft_pattern};
use super::rig::IntoGuest;
use super::shape::Shape;

/// An operation in numbers that fit any shape.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    Write(Span),
    Zero(Span, bool),
    Discard(Span),
    Compressed(Span),
    Read(Span),
    Flush,
    Reopen,
    Resize(u16),
}

/// An offset and a length, relative to disk and cluster.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    pub at: u16,
    pub inside: u16,
    pub len: u16,
    pub kind: u8,
}

/// An operation on one disk, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Write { at: u64, len: u64 },
    Zero { at: u64, len: u64, may_unmap: bool },
    Discard { at: u64, len: u64 },
    Compressed { at: u64, clusters: u64 },
    Read { at: u64, len: u64 },
    Flush,
    Reopen,
    Resize { to: u64 },
}

/// Spans that often overlap: few clusters, all alignments.
pub fn span() -> impl Strategy<Value = Span> {
    (any::<u16>(), any::<u16>(), any::<u16>(), any::<u8>())
        .prop_map(|(at, inside, len, kind)| Span { at, inside, len, kind })
}

/// Random steps.
pub fn steps(most: usize) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => span().prop_map(Step::Write),
        3 => (span(), any::<bool>()).prop_map(|(s, unmap)| Step::Zero(s, unmap)),
        2 => span().prop_map(Step::Discard),
        2 => span().prop_map(Step::Compressed),
        2 => span().prop_map(Step::Read),
        2 => Just(Step::Flush),
        1 => Just(Step::Reopen),
        1 => any::<u16>().prop_map(Step::Resize),
    ];
    prop::collection::vec(step, 1..most)
}

/// A random step without proptest.
pub fn random_step(rng: &mut Rng) -> Step {
    let bits = rng.next_u64();
    let span = Span {
        at: bits as u16,
        inside: (bits >> 16) as u16,
        len: (bits >> 32) as u16,
        kind: (bits >> 48) as u8,
    };
    match rng.below(20) {
        0..=8 => Step::Write(span),
        9 | 10 => Step::Zero(span, true),
        11 => Step::Zero(span, false),
        12 | 13 => Step::Discard(span),
        14 | 15 => Step::Compressed(span),
        16 | 17 => Step::Flush,
        18 => Step::Resize(bits as u16),
        _ => Step::Reopen,
    }
}

impl Step {
    /// The operation on a disk of this shape and current size.
    pub fn on(self, shape: &Shape, guest_bytes: u64) -> Op {
        let range = |span: Span| place(span, shape, guest_bytes);
        match self {
            Self::Write(s) => {
                let (at, len) = range(s);
                Op::Write { at, len }
            }
            Self::Zero(s, may_unmap) => {
                let (at, len) = range(s);
                Op::Zero { at, len, may_unmap }
            }
            Self::Discard(s) => {
                let (at, len) = range(s);
                Op::Discard { at, len }
            }
            Self::Compressed(s) if shape.packs() => {
                let (at, len) = range(s);
                let first = at / shape.cluster * shape.cluster;
                Op::Compressed { at: first, clusters: (at + len - first).div_ceil(shape.cluster) }
            }
            Self::Compressed(s) | Self::Read(s) => {
                let (at, len) = range(s);
                Op::Read { at, len }
            }
            Self::Flush => Op::Flush,
            Self::Reopen => Op::Reopen,
            Self::Resize(to) => {
                let to = resized(shape, to);
                if shape.version == 2 && shape.content == super::shape::Content::Snapshots {
                    return Op::Flush; // refused: a snapshot's size is not recorded in version 2
                }
                Op::Resize { to }
            }
        }
    }
}

/// New sizes are around the first one, in whole sectors.
fn resized(shape: &Shape, to: u16) -> u64 {
    let size = shape.guest_bytes();
    let least = if shape.wide { shape.span() } else { size / 2 / SECTOR * SECTOR };
    let most = if shape.wide { size + 8 * shape.cluster } else { size + size / 2 };
    let sectors = (most - least) / SECTOR;
    let at = least + u64::from(to) * sectors / (1 << 16) * SECTOR;
    // Often a whole number of clusters.
    if to.is_multiple_of(3) { at.next_multiple_of(shape.cluster) } else { at }
}

fn place(span: Span, shape: &Shape, guest_bytes: u64) -> (u64, u64) {
    let windows = shape.windows(guest_bytes);
    let window = &windows[span.kind as usize % windows.len()];
    let cluster = shape.cluster;
    let sub = if shape.extended { cluster / 32 } else { cluster };
    // The first 24 clusters of a window are hot.
    let clusters = (window.end - window.start).div_ceil(cluster);
    let hot = if span.kind & 0x10 != 0 { clusters } else { clusters.min(24) };
    let inside = u64::from(span.inside) % cluster;
    let inside = match span.kind >> 5 & 3 {
        0 => 0,
        1 => inside / SECTOR * SECTOR,
        2 => inside / sub * sub,
        _ => inside,
    };
    let at = (window.start + u64::from(span.at) % hot * cluster + inside).min(window.end - 1);
    let len = u64::from(span.len);
    let len = match len % 8 {
        0 => 1 + len / 8 % 600,
        1 => (1 + len / 8 % 4) * SECTOR,
        2 => (1 + len / 8 % 4) * sub,
        3 | 4 => cluster,
        5 => (1 + len / 8 % 6) * cluster,
        6 => 1 + len * 37 % (3 * cluster),
        _ => (1 + len / 8 % 3) * cluster - inside.min(cluster - 1),
    };
    (at, len.min(window.end - at).max(1))
}

/// Compresses whole clusters; `None` if one does not shrink.
pub fn pack(codec: Codec, cluster: u64, bytes: &[u8]) -> Option<Vec<Vec<u8>>> {
    bytes
        .chunks(cluster as usize)
        .map(|chunk| {
            let mut whole = chunk.to_vec();
            whole.resize(cluster as usize, 0);
            let compressed = match codec {
                Codec::Zstd => zstd::bulk::compress(&whole, 1).expect("compressing"),
                _ => deflate(&whole),
            };
            (compressed.len() < cluster as usize).then_some(compressed)
        })
        .collect()
}

fn deflate(bytes: &[u8]) -> Vec<u8> {
    let level = flate2::Compression::fast();
    let mut encoder = flate2::Compress::new_with_window_bits(level, false, 12);
    let mut out = Vec::with_capacity(bytes.len() + 1024);
    let status = encoder.compress_vec(bytes, &mut out, flate2::FlushCompress::Finish);
    assert_eq!(status.expect("compressing"), flate2::Status::StreamEnd);
    out
}

/// The data of write or compressed write number `id`.
pub fn payload(shape: &Shape, op: Op, id: u64, guest_bytes: u64) -> (u64, Vec<u8>) {
    match op {
        Op::Write { at, len } => (at, pattern(id, at, len)),
        Op::Compressed { at, clusters } => {
            let len = (clusters * shape.cluster).min(guest_bytes - at);
            (at, soft_pattern(id, at, len, shape.cluster))
        }
        _ => (0, Vec::new()),
    }
}

/// Runs operation number `id` on the disk and the guest. Not for [`Op::Reopen`].
pub fn apply(shape: &Shape, disk: &Disk, guest: &mut Guest, op: Op, id: u64) -> Result<()> {
    let (start, bytes) = payload(shape, op, id, guest.len());
    match op {
        Op::Write { at, .. } => {
            disk.write_at(&bytes, at.into_guest())?;
            guest.write(start, &bytes);
        }
        Op::Compressed { at, .. } => {
            let codec = disk.top().caps().compressed.expect("asked only where it works");
            if let Some(units) = pack(codec, shape.cluster, &bytes) {
                disk.write_compressed(at.into_guest(), &units)?;
                guest.write(start, &bytes);
            }
        }
        Op::Zero { at, len, may_unmap } => {
            disk.write_zeroes(at.into_guest(), len, may_unmap)?;
            guest.zero(at, len);
        }
        Op::Discard { at, len } => {
            disk.discard(at.into_guest(), len)?;
            settle_discard(disk, guest, at, len)?;
        }
        Op::Read { at, len } => {
            let mut buf = vec![0; len as usize];
            disk.read_at(&mut buf, at.into_guest())?;
            super::guest::assert_same("read", at, &buf, &guest.read(at, len));
        }
        Op::Flush => disk.flush()?,
        Op::Resize { to } => {
            disk.resize(to)?;
            guest.resize(to);
        }
        Op::Reopen => unreachable!("the caller re-opens"),
    }
    Ok(())
}

/// After a discard each sector reads as zero or as before; updates the guest to match.
pub fn settle_discard(disk: &Disk, guest: &mut Guest, at: u64, len: u64) -> Result<()> {
    let mut buf = vec![0; len as usize];
    disk.read_at(&mut buf, at.into_guest())?;
    let before = guest.read(at, len);
    let mut done = 0;
    while done < len {
        let next = ((at + done) / SECTOR + 1) * SECTOR - at;
        let part = done as usize..next.min(len) as usize;
        let (found, old) = (&buf[part.clone()], &before[part.clone()]);
        assert!(
            found == old || found.iter().all(|b| *b == 0),
            "discarded sector at {:#x} is neither zero nor as before",
            at + done
        );
        guest.write(at + done, found);
        done = part.end as u64;
    }
    Ok(())
}
