//! Expected guest content.

use std::ops::Range;

use vdkit_block::{HostOffset, Storage, StorageExt, ZeroMode};
use vdkit_storage::MemoryStorage;

pub const SECTOR: u64 = 512;

/// Bytes that identify their operation and offset, never zero.
pub fn pattern(op: u64, at: u64, len: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(len as usize + 8);
    let mut word_at = at & !7;
    while word_at < at + len {
        let mut z = (op << 40) ^ word_at ^ 0x5bd1_e995_0000_0000;
        z = (z ^ (z >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 32)) | 0x0101_0101_0101_0101;
        out.extend_from_slice(&z.to_le_bytes());
        word_at += 8;
    }
    let skip = (at & 7) as usize;
    out[skip..skip + len as usize].to_vec()
}

/// As [`pattern`], but compressible: each block of `unit` bytes repeats 32 of them.
pub fn soft_pattern(op: u64, at: u64, len: u64, unit: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(len as usize);
    while (out.len() as u64) < len {
        let from = at + out.len() as u64;
        let word = pattern(op | 1 << 22, from / unit * unit, 32);
        let here = (unit - from % unit).min(len - out.len() as u64);
        out.extend(word.iter().cycle().take(here as usize));
    }
    out
}

/// The flat disk that an image must equal.
#[derive(Clone, Debug)]
pub struct Guest(pub MemoryStorage);

impl Guest {
    pub fn len(&self) -> u64 {
        self.0.len().expect("memory")
    }

    pub fn read(&self, at: u64, len: u64) -> Vec<u8> {
        let mut buf = vec![0; len as usize];
        self.0.read_padded(&mut buf, HostOffset(at)).expect("memory");
        buf
    }

    pub fn reads_zero(&self, at: u64, len: u64) -> bool {
        self.read(at, len).iter().all(|b| *b == 0)
    }

    pub fn write(&mut self, at: u64, bytes: &[u8]) {
        assert!(at + bytes.len() as u64 <= self.len());
        self.0.write_at(bytes, HostOffset(at)).expect("memory");
    }

    pub fn zero(&mut self, at: u64, len: u64) {
        self.0.write_zeroes(HostOffset(at), len, ZeroMode::MayUnmap).expect("memory");
    }

    pub fn resize(&mut self, len: u64) {
        self.0.set_len(len).expect("memory");
    }
}

/// Reports the first difference of two buffers.
pub fn assert_same(what: &str, at: u64, found: &[u8], wanted: &[u8]) {
    assert_eq!(found.len(), wanted.len(), "{what}: lengths");
    if found == wanted {
        return;
    }
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for (i, (a, b)) in found.iter().zip(wanted).enumerate() {
        let i = at + i as u64;
        if a != b {
            match ranges.last_mut() {
                Some(last) if last.end + 16 >= i => last.end = i + 1,
                _ => ranges.push(i..i + 1),
            }
        }
    }
    let first = (ranges[0].start - at) as usize;
    let show = |bytes: &[u8]| format!("{:02x?}", &bytes[first..bytes.len().min(first + 16)]);
    ranges.truncate(8);
    panic!(
        "{what}: differs at {ranges:x?}; from {:#x} found {}, wanted {}",
        at + first as u64,
        show(found),
        show(wanted)
    );
}
