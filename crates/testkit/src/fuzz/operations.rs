//! Operations on a new image, held against a flat model.

use std::io::Write;
use std::sync::Arc;

use vdkit_block::{Codec, GuestOffset, HostOffset, ImageInfo, Repair, Storage};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_qcow2::header::{Encryption, Header};
use vdkit_qcow2::layout::{Geometry, autoclear, compatible, incompatible};
use vdkit_raw::RawFormat;
use vdkit_storage::MemoryStorage;

use super::{LIMITS, open, run_check};

const SECTOR: u64 = 512;
/// Sectors of the largest disk.
const SECTORS_MAX: u64 = 512;
/// Operations of one run.
const OPERATIONS_MAX: usize = 100;

/// Takes the first bytes for the image's options and the others for operations: writes, zeroes,
/// discards, compressed writes, flushes, resizes, and openings anew, with and without a close.
///
/// # Panics
/// Where the disk does not hold what the model holds, a check finds damage, a closed image has
/// leaks, or an operation fails on a storage that never does.
pub fn qcow2_ops(input: &[u8]) {
    let mut input = Input(input);
    let mut world = World::new(&mut input);
    for _ in 0..OPERATIONS_MAX {
        let Some(tag) = input.byte() else { break };
        world.step(tag, &mut input);
    }
    world.reopen(true);
    world.compare(0, world.model.len() as u64);
}

/// The fuzzer's bytes; zeroes behind their end, except for the next operation's tag.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    fn small(&mut self) -> u64 {
        u64::from(self.byte().unwrap_or(0))
    }

    fn number(&mut self) -> u64 {
        self.small() << 8 | self.small()
    }
}

/// The options of an image.
#[derive(Clone, Copy, Debug)]
struct Shape {
    version: u32,
    geometry: Geometry,
    guest_bytes: u64,
    lazy: bool,
    zstd: bool,
    backing: bool,
    data_file: bool,
    data_file_raw: bool,
}

impl Shape {
    fn new(input: &mut Input<'_>) -> Self {
        let (widths, flags) = (input.small(), input.small());
        let on = |bit: u32| flags >> bit & 1 != 0;
        let version = if on(0) { 2 } else { 3 };
        let v3 = version == 3;
        let extended = v3 && on(1);
        let cluster_bits =
            if extended { 14 + (widths & 3) as u32 } else { 9 + (widths & 7) as u32 };
        let refcount_order = if v3 { ((widths >> 3) % 7) as u32 } else { 4 };
        let data_file = v3 && on(2);
        let data_file_raw = data_file && on(3);
        Self {
            version,
            geometry: Geometry { cluster_bits, extended, refcount_order },
            guest_bytes: SECTOR * (1 + input.number() % SECTORS_MAX),
            lazy: v3 && on(4),
            zstd: v3 && on(5),
            backing: on(6) && !data_file_raw,
            data_file,
            data_file_raw,
        }
    }

    /// The smallest image of this shape: header, refcount table, one refcount block, L1 table.
    fn image(&self) -> MemoryStorage {
        let cluster = self.geometry.cluster_bytes();
        let bit = |on: bool, bit: u64| if on { bit } else { 0 };
        let header = Header {
            version: self.version,
            geometry: self.geometry,
            guest_bytes: self.guest_bytes,
            encryption: Encryption::None,
            l1_offset: HostOffset(3 * cluster),
            l1_entries: self.geometry.l1_entries_for(self.guest_bytes) as u32,
            refcount_table_offset: HostOffset(cluster),
            refcount_table_clusters: 1,
            snapshot_count: 0,
            snapshots_offset: HostOffset(0),
            incompatible: bit(self.data_file, incompatible::DATA_FILE)
                | bit(self.zstd, incompatible::COMPRESSION_TYPE)
                | bit(self.geometry.extended, incompatible::EXTENDED_L2),
            compatible: bit(self.lazy, compatible::LAZY_REFCOUNTS),
            autoclear: bit(self.data_file_raw, autoclear::DATA_FILE_RAW),
            codec: if self.zstd { Codec::Zstd } else { Codec::Deflate },
            header_bytes: 0,
            backing_name: self.backing.then(|| "base".to_owned()),
            extensions: Vec::new(),
        };
        let mut image = header.encode().expect("no extensions and a short name fit in 512 bytes");
        image.resize(4 * cluster as usize, 0);
        let at = cluster as usize;
        image[at..at + 8].copy_from_slice(&(2 * cluster).to_be_bytes());
        let bits = 1usize << self.geometry.refcount_order;
        for index in 0..4 {
            // The lowest bit of each refcount: in bytes from the right, in words at their end.
            let position = index * bits;
            let byte = if bits < 8 { position / 8 } else { (position + bits) / 8 - 1 };
            image[2 * at + byte] |= 1 << if bits < 8 { position % 8 } else { 0 };
        }
        MemoryStorage::from_bytes("image", &image)
    }
}

/// The image, what it stands on, and what it must hold.
struct World {
    shape: Shape,
    storage: Arc<dyn Storage>,
    data_file: Option<Arc<dyn Storage>>,
    base: Option<Arc<dyn Storage>>,
    disk: Option<Disk>,
    model: Vec<u8>,
    /// It was ended without a close, and its leaks were not mended since.
    leaky: bool,
    /// Distinguishes what the writes write.
    writes: u8,
}

impl World {
    fn new(input: &mut Input<'_>) -> Self {
        let shape = Shape::new(input);
        let mut model = vec![0; shape.guest_bytes as usize];
        let base = shape.backing.then(|| -> Arc<dyn Storage> {
            // Shorter than the disk, as long, or longer.
            let len = SECTOR * (1 + input.number() % SECTORS_MAX);
            let bytes: Vec<u8> = (0..len).map(|i| (i / SECTOR) as u8 | 1).collect();
            let shared = bytes.len().min(model.len());
            model[..shared].copy_from_slice(&bytes[..shared]);
            Arc::new(MemoryStorage::from_bytes("base", &bytes).read_only())
        });
        let data_file = shape.data_file.then(|| -> Arc<dyn Storage> {
            Arc::new(MemoryStorage::with_len("data", shape.guest_bytes))
        });
        let storage: Arc<dyn Storage> = Arc::new(shape.image());
        let mut world =
            Self { shape, storage, data_file, base, disk: None, model, leaky: false, writes: 0 };
        world.open();
        world
    }

    fn open(&mut self) {
        let disk = match open(&self.storage, self.data_file.as_ref(), true) {
            Ok(disk) => disk,
            Err(error) => panic!("{:?}: cannot be opened: {error}", self.shape),
        };
        self.disk = Some(match &self.base {
            None => disk,
            Some(base) => {
                let format = RawFormat::new(base.clone(), false).expect("memory has a length");
                let options = OpenOptions { limits: LIMITS, ..OpenOptions::read_only() };
                let info = ImageInfo::new("raw", 0);
                disk.over(Disk::from_format(Arc::new(format), info, &options))
            }
        });
    }

    fn disk(&self) -> &Disk {
        self.disk.as_ref().expect("open between operations")
    }

    fn size(&self) -> u64 {
        self.model.len() as u64
    }

    /// A range of sectors within the disk, at least one.
    fn sectors(&self, input: &mut Input<'_>) -> (u64, u64) {
        let count = self.size() / SECTOR;
        let first = input.number() % count;
        let len = 1 + input.small() % (count - first).min(256);
        (first * SECTOR, len * SECTOR)
    }

    /// A range of bytes within the disk, at least one.
    fn bytes(&self, input: &mut Input<'_>) -> (u64, u64) {
        let (start, len) = self.sectors(input);
        let (skip, cut) = (input.small() % SECTOR, input.small() % SECTOR);
        (start + skip, (len - skip).saturating_sub(cut).max(1))
    }

    fn step(&mut self, tag: u8, input: &mut Input<'_>) {
        self.writes = self.writes.wrapping_add(1);
        match tag % 12 {
            0..=2 => {
                let (at, len) = self.bytes(input);
                self.write(at, len);
            }
            3 => {
                let (at, len) = self.sectors(input);
                self.write(at, len);
            }
            4 => self.write_packed(input),
            5 => {
                let (at, len) = self.bytes(input);
                let may_unmap = (tag / 12).is_multiple_of(2);
                let done = self.disk().write_zeroes(GuestOffset(at), len, may_unmap);
                self.must(done, "zero");
                self.model[at as usize..(at + len) as usize].fill(0);
            }
            6 => {
                let (at, len) = self.bytes(input);
                self.discard(at, len);
            }
            7 => self.must(self.disk().flush(), "flush"),
            8 => self.reopen(true),
            9 => self.reopen(false),
            10 => self.resize(input),
            _ => {
                let (at, len) = self.bytes(input);
                self.compare(at, at + len);
            }
        }
    }

    fn must(&self, result: vdkit_block::Result<()>, what: &str) {
        if let Err(error) = result {
            panic!("{:?}: {what}: {error}", self.shape);
        }
    }

    fn write(&mut self, at: u64, len: u64) {
        let piece = pattern(len, |number| self.writes.wrapping_add(number));
        self.must(self.disk().write_at(&piece, GuestOffset(at)), "write");
        self.model[at as usize..(at + len) as usize].copy_from_slice(&piece);
    }

    /// Compresses a few whole clusters. What does not become smaller is left out.
    fn write_packed(&mut self, input: &mut Input<'_>) {
        let cluster = self.shape.geometry.cluster_bytes();
        let count = self.size().div_ceil(cluster);
        let first = input.number() % count;
        let wanted = (1 + input.small() % 8).min(count - first);
        if self.shape.data_file {
            return;
        }
        let mut units = Vec::new();
        let mut plain = Vec::new();
        for number in 0..wanted {
            let seed = self.writes.wrapping_add(number as u8);
            let bytes = pattern(cluster, |number| seed.wrapping_mul(number));
            let packed = compress(&bytes, self.shape.zstd);
            if packed.len() as u64 >= cluster {
                break;
            }
            units.push(packed);
            plain.extend_from_slice(&bytes);
        }
        if units.is_empty() {
            return;
        }
        let at = first * cluster;
        self.must(self.disk().write_packed(GuestOffset(at), &units), "write compressed");
        let end = (at + plain.len() as u64).min(self.size()) as usize;
        self.model[at as usize..end].copy_from_slice(&plain[..end - at as usize]);
    }

    /// Afterwards each byte is zero or what it was; from then on it stays so.
    fn discard(&mut self, at: u64, len: u64) {
        self.must(self.disk().discard(GuestOffset(at), len), "discard");
        let mut now = vec![1; len as usize];
        self.must(self.disk().read_at(&mut now, GuestOffset(at)), "read after a discard");
        let old = &mut self.model[at as usize..(at + len) as usize];
        for (offset, (old, now)) in old.iter_mut().zip(now).enumerate() {
            assert!(now == 0 || now == *old, "byte {} after a discard", at + offset as u64);
            *old = now;
        }
    }

    fn resize(&mut self, input: &mut Input<'_>) {
        let sectors = 1 + input.number() % SECTORS_MAX;
        self.must(self.disk().resize(sectors * SECTOR), "resize");
        self.model.resize((sectors * SECTOR) as usize, 0);
        assert_eq!(self.disk().guest_bytes(), self.size());
    }

    /// Ends with a close, or as a crash ends right behind a flush; checks; opens again.
    fn reopen(&mut self, close: bool) {
        let ended = if close { self.disk().close() } else { self.disk().flush() };
        self.must(ended, "close or flush");
        self.disk = None;
        // With lazy refcounts and no close, refcounts may be behind: opening mends them.
        let behind = self.shape.lazy && !close;
        if !behind {
            self.leaky |= !close;
            let repair = if self.leaky && self.writes.is_multiple_of(2) {
                Repair::Leaks
            } else {
                Repair::Nothing
            };
            self.check(repair);
            if repair == Repair::Leaks {
                self.leaky = false;
                self.check(Repair::Nothing);
            }
        }
        self.open();
    }

    fn check(&self, repair: Repair) {
        let report = match run_check(&self.storage, self.data_file.as_ref(), repair) {
            Ok(report) => report,
            Err(error) => panic!("{:?}: cannot be checked: {error}", self.shape),
        };
        let bad = report.corruptions + if self.leaky { 0 } else { report.leaks };
        let first = report.findings.first();
        assert_eq!(bad, 0, "{:?}: {} leaks, {first:?}", self.shape, report.leaks);
    }

    fn compare(&self, start: u64, end: u64) {
        let mut got = vec![1; (end - start) as usize];
        self.must(self.disk().read_at(&mut got, GuestOffset(start)), "read");
        let want = &self.model[start as usize..end as usize];
        if got == want {
            return;
        }
        if let Some(at) = got.iter().zip(want).position(|(got, want)| got != want) {
            panic!(
                "{:?}: byte {} is {:#x}, expected {:#x}",
                self.shape,
                start + at as u64,
                got[at],
                want[at]
            );
        }
    }
}

/// Bytes that change every 64.
fn pattern(len: u64, byte: impl Fn(u8) -> u8) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    for (number, chunk) in bytes.chunks_mut(64).enumerate() {
        chunk.fill(byte(number as u8));
    }
    bytes
}

fn compress(bytes: &[u8], zstd: bool) -> Vec<u8> {
    if zstd {
        return zstd::bulk::compress(bytes, 1).expect("memory suffices");
    }
    let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).and_then(|()| encoder.finish()).expect("memory suffices")
}
