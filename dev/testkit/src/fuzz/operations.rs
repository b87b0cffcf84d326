//! Operations on a new image, compared with a flat model.

use std::collections::BTreeSet;
use std::io::Write;
use std::sync::Arc;

use vdkit_block::{
    BackingRef, CheckReport, Codec, CompactOptions, Compaction, CreateRequest, Creation, Error,
    GuestOffset, HostOffset, ImageInfo, Monitor, NewBitmap, NewSnapshot, OfflineImage, Options,
    Repair, Storage,
};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_qcow2::Qcow2Driver;
use vdkit_qcow2::header::{Encryption, Header};
use vdkit_qcow2::layout::{Geometry, autoclear, compatible, incompatible};
use vdkit_raw::RawFormat;
use vdkit_storage::MemoryStorage;
use vdkit_testbase::first_difference;

use super::{LIMITS, key, open, run_check};

const SECTOR: u64 = 512;
/// Sectors of the largest disk.
const SECTORS_MAX: u64 = 512;
/// Tags from here on are operations on snapshots, bitmaps and the file as a whole.
const MANAGEMENT: u8 = 228;
/// Snapshots and bitmaps at a time.
const KEPT_MAX: usize = 6;
/// Operations of one run.
const OPERATIONS_MAX: u64 = 100;

/// Takes the first bytes for the image's options and the others for operations: writes, zeroes,
/// discards, compressed writes, flushes, resizes, snapshots, bitmaps, compaction, and openings
/// anew, with and without a close.
///
/// # Panics
/// If the disk does not hold what the model holds, a check finds damage, a closed image has
/// leaks, or an operation fails on a storage that never does.
pub fn qcow2_ops(input: &[u8]) {
    qcow2_life(input);
}

/// As [`qcow2_ops`]; returns how many operations there were.
///
/// # Panics
/// As [`qcow2_ops`].
pub fn qcow2_life(input: &[u8]) -> u64 {
    let mut input = Input(input);
    let mut world = World::new(&mut input);
    let mut operations = 0;
    while operations < OPERATIONS_MAX {
        let Some(tag) = input.byte() else { break };
        world.step(tag, &mut input);
        operations += 1;
    }
    world.reopen(true);
    world.compare(0, world.model.len() as u64);
    world.look_at_what_is_kept();
    operations
}

/// The fuzzer's bytes; zeroes behind their end, except for the next operation's tag.
pub(super) struct Input<'a>(pub(super) &'a [u8]);

impl Input<'_> {
    pub(super) fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    pub(super) fn small(&mut self) -> u64 {
        u64::from(self.byte().unwrap_or(0))
    }

    pub(super) fn number(&mut self) -> u64 {
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
    encrypted: bool,
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
            encrypted: on(7) && !data_file_raw,
        }
    }

    /// The image, new.
    fn image(&self) -> MemoryStorage {
        if self.encrypted { self.encrypted_image() } else { self.smallest_image() }
    }

    /// An image as the driver makes it.
    fn encrypted_image(&self) -> MemoryStorage {
        let switch = |on: bool| if on { "on" } else { "off" };
        let mut text = format!(
            "encrypt.format=luks,encrypt.cipher-alg=aes-128,encrypt.iter-time=0,cluster_size={}",
            self.geometry.cluster_bytes()
        );
        if self.version == 2 {
            text += ",compat=0.10";
        } else {
            text += &format!(
                ",refcount_bits={},extended_l2={},lazy_refcounts={},compression_type={}",
                1 << self.geometry.refcount_order,
                switch(self.geometry.extended),
                switch(self.lazy),
                if self.zstd { "zstd" } else { "zlib" }
            );
        }
        if self.data_file {
            text += ",data_file=data";
        }
        let options = Options::parse("qcow2", Qcow2Driver.options(), [text.as_str()]);
        let mut options = options.expect("options that go together");
        options.set_key(Some(key()));
        let storage = Arc::new(MemoryStorage::with_len("image", 0));
        let data_file = || -> Arc<dyn Storage> { Arc::new(MemoryStorage::new("data")) };
        let request = CreateRequest {
            storage: storage.clone(),
            files: self.data_file.then(data_file).into_iter().collect(),
            guest_bytes: self.guest_bytes,
            options,
            backing: self.backing.then(|| BackingRef::new("base", Some("raw".to_owned()))),
            backing_bytes: None,
        };
        Qcow2Driver.create(&request).expect("memory suffices");
        MemoryStorage::clone(&storage)
    }

    /// The smallest image of this shape: header, refcount table, one refcount block, L1 table.
    fn smallest_image(&self) -> MemoryStorage {
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

/// The image, its backing image, and what it must hold.
struct World {
    shape: Shape,
    storage: Arc<dyn Storage>,
    data_file: Option<Arc<dyn Storage>>,
    base: Option<Arc<dyn Storage>>,
    disk: Option<Disk>,
    model: Vec<u8>,
    /// Name and content of each snapshot.
    snapshots: Vec<(String, Vec<u8>)>,
    /// Name and the sectors that each bitmap must show as dirty.
    bitmaps: Vec<(String, BTreeSet<u64>)>,
    /// It was ended without a close, and its leaks were not repaired since.
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
        let mut world = Self {
            shape,
            storage,
            data_file,
            base,
            disk: None,
            model,
            snapshots: Vec::new(),
            bitmaps: Vec::new(),
            leaky: false,
            writes: 0,
        };
        world.open();
        world
    }

    fn open(&mut self) {
        let disk = match open(&self.storage, self.data_file.as_ref(), true) {
            Ok(disk) => disk,
            Err(error) => panic!("{:?}: cannot be opened: {error}", self.shape),
        };
        self.disk = Some(self.over_base(disk));
    }

    fn over_base(&self, disk: Disk) -> Disk {
        let Some(base) = &self.base else { return disk };
        let format = RawFormat::new(base.clone(), false).expect("memory has a length");
        let options = OpenOptions::read_only().limits(LIMITS);
        let info = ImageInfo::new("raw", 0);
        disk.over(Disk::from_format(Arc::new(format), info, &options))
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
        if let Some(tag) = tag.checked_sub(MANAGEMENT) {
            return self.manage(tag, input);
        }
        match tag % 12 {
            0..=2 => {
                let (at, len) = self.bytes(input);
                self.write(at, len);
            }
            3 => {
                let (at, len) = self.sectors(input);
                self.write(at, len);
            }
            4 => self.write_compressed(input),
            5 => {
                let (at, len) = self.bytes(input);
                let may_unmap = (tag / 12).is_multiple_of(2);
                let done = self.disk().write_zeroes(GuestOffset(at), len, may_unmap);
                self.must(done, "zero");
                self.model[at as usize..(at + len) as usize].fill(0);
                self.mark(at, len);
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
        self.mark(at, len);
    }

    /// Compresses a few whole clusters. What does not become smaller is left out.
    fn write_compressed(&mut self, input: &mut Input<'_>) {
        let cluster = self.shape.geometry.cluster_bytes();
        let count = self.size().div_ceil(cluster);
        let first = input.number() % count;
        let wanted = (1 + input.small() % 8).min(count - first);
        if self.shape.data_file || self.shape.encrypted {
            return;
        }
        let mut units = Vec::new();
        let mut plain = Vec::new();
        for number in 0..wanted {
            let seed = self.writes.wrapping_add(number as u8);
            let bytes = pattern(cluster, |number| seed.wrapping_mul(number));
            let compressed = compress(&bytes, self.shape.zstd);
            if compressed.len() as u64 >= cluster {
                break;
            }
            units.push(compressed);
            plain.extend_from_slice(&bytes);
        }
        if units.is_empty() {
            return;
        }
        let at = first * cluster;
        self.must(self.disk().write_compressed(GuestOffset(at), &units), "write compressed");
        let end = (at + plain.len() as u64).min(self.size()) as usize;
        self.model[at as usize..end].copy_from_slice(&plain[..end - at as usize]);
        self.mark(at, end as u64 - at);
    }

    /// Afterwards each byte is zero or what it was; from then on it stays so.
    fn discard(&mut self, at: u64, len: u64) {
        self.must(self.disk().discard(GuestOffset(at), len), "discard");
        let mut now = vec![1; len as usize];
        self.must(self.disk().read_at(&mut now, GuestOffset(at)), "read after a discard");
        let old = &mut self.model[at as usize..(at + len) as usize];
        let mut changed = BTreeSet::new();
        for (offset, (old, now)) in old.iter_mut().zip(now).enumerate() {
            assert!(now == 0 || now == *old, "byte {} after a discard", at + offset as u64);
            if *old != now {
                changed.insert((at + offset as u64) / SECTOR);
            }
            *old = now;
        }
        for (_, dirty) in &mut self.bitmaps {
            dirty.extend(&changed);
        }
    }

    fn resize(&mut self, input: &mut Input<'_>) {
        let sectors = 1 + input.number() % SECTORS_MAX;
        if self.shape.version == 2 && !self.snapshots.is_empty() {
            let refused = self.disk().resize(sectors * SECTOR);
            let same = sectors * SECTOR == self.size();
            assert!(same || matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
            return;
        }
        self.must(self.disk().resize(sectors * SECTOR), "resize");
        self.model.resize((sectors * SECTOR) as usize, 0);
        for (_, dirty) in &mut self.bitmaps {
            dirty.retain(|&sector| sector < sectors);
        }
        assert_eq!(self.disk().guest_bytes(), self.size());
    }

    /// Ends with a close, or as a crash ends right behind a flush; checks; opens again.
    fn reopen(&mut self, close: bool) {
        let ended = if close { self.disk().close() } else { self.disk().flush() };
        self.must(ended, "close or flush");
        self.disk = None;
        // With lazy refcounts and no close, refcounts may be behind: opening repairs them.
        let behind = self.shape.lazy && !close;
        // (Space that only bitmaps took before the end is not behind, and may leak.)
        self.leaky |= !close;
        if !behind {
            let repair = if self.leaky && self.writes.is_multiple_of(2) {
                Repair::Leaks
            } else {
                Repair::Nothing
            };
            let report = self.check(repair);
            if repair == Repair::Leaks {
                // Without a close, a freed table may not be punched yet. What looks like a
                // lost one is kept, with what it names, and nothing else is.
                let kept = report.leaks_kept;
                assert_eq!(report.leaks_left(), kept, "{:?}: {:?}", self.shape, report.findings);
                self.leaky = kept > 0;
                self.check(Repair::Nothing);
            }
        }
        self.open();
    }

    fn check(&self, repair: Repair) -> CheckReport {
        let report = match run_check(&self.storage, self.data_file.as_ref(), repair) {
            Ok(report) => report,
            Err(error) => panic!("{:?}: cannot be checked: {error}", self.shape),
        };
        let bad = report.corruptions + if self.leaky { 0 } else { report.leaks };
        let first = report.findings.first();
        assert_eq!(bad, 0, "{:?}: {} leaks, {first:?}", self.shape, report.leaks);
        report
    }

    /// All recording bitmaps must show these bytes.
    fn mark(&mut self, at: u64, len: u64) {
        if len == 0 {
            return;
        }
        for (_, dirty) in &mut self.bitmaps {
            dirty.extend(at / SECTOR..=(at + len - 1) / SECTOR);
        }
    }

    fn manage(&mut self, tag: u8, input: &mut Input<'_>) {
        match tag % 7 {
            0 => self.create_snapshot(),
            1 => self.apply_snapshot(input),
            2 => self.delete_snapshot(input),
            3 => self.add_bitmap(input),
            4 => self.clear_or_remove_bitmap(input),
            5 => self.compact(),
            _ => self.look_at_what_is_kept(),
        }
    }

    fn create_snapshot(&mut self) {
        if self.snapshots.len() >= KEPT_MAX {
            return;
        }
        let Some(snapshots) = self.disk().top().snapshots() else { return };
        let name = format!("s{}", self.writes);
        let new = NewSnapshot { name: name.clone(), ..NewSnapshot::default() };
        match snapshots.create(&new, &monitor()) {
            Ok(_) => self.snapshots.push((name, self.model.clone())),
            // Narrow refcounts cannot count so many users; a data file cannot have snapshots.
            Err(Error::Unsupported { .. }) => {
                let bits = 1u32 << self.shape.geometry.refcount_order;
                assert!(self.shape.data_file || bits < 16, "{:?}: no snapshot", self.shape);
            }
            Err(error) => panic!("{:?}: snapshot: {error}", self.shape),
        }
    }

    fn apply_snapshot(&mut self, input: &mut Input<'_>) {
        let Some((name, content)) = chosen(&self.snapshots, input) else { return };
        let snapshots = self.disk().top().snapshots().expect("one was created");
        match snapshots.apply(&name, &monitor()) {
            Ok(_) => {
                self.model = content;
                let sectors = self.size() / SECTOR;
                // Anything may have changed.
                for (_, dirty) in &mut self.bitmaps {
                    *dirty = (0..sectors).collect();
                }
            }
            Err(Error::Unsupported { .. }) => {
                let other_size = content.len() != self.model.len();
                let narrow = self.shape.geometry.refcount_order < 4;
                let old = self.shape.version == 2 && other_size;
                assert!(old || narrow, "{:?}: cannot apply", self.shape);
            }
            Err(error) => panic!("{:?}: apply: {error}", self.shape),
        }
    }

    fn delete_snapshot(&mut self, input: &mut Input<'_>) {
        let Some((name, _)) = chosen(&self.snapshots, input) else { return };
        let snapshots = self.disk().top().snapshots().expect("one was created");
        let deleted = snapshots.delete(&name, &monitor());
        self.must(deleted.map(|_| ()), "delete a snapshot");
        self.snapshots.retain(|(other, _)| *other != name);
    }

    fn add_bitmap(&mut self, input: &mut Input<'_>) {
        if self.bitmaps.len() >= KEPT_MAX {
            return;
        }
        let Some(bitmaps) = self.disk().top().bitmaps() else { return };
        let name = format!("b{}", self.writes);
        let granularity = Some(512 << (input.small() % 8));
        match bitmaps.add(&NewBitmap { name: &name, granularity, enabled: true }) {
            Ok(()) => self.bitmaps.push((name, BTreeSet::new())),
            Err(Error::Unsupported { .. }) => {
                assert!(self.shape.version == 2, "{:?}: no bitmap", self.shape);
            }
            Err(error) => panic!("{:?}: add a bitmap: {error}", self.shape),
        }
    }

    fn clear_or_remove_bitmap(&mut self, input: &mut Input<'_>) {
        let Some((name, _)) = chosen(&self.bitmaps, input) else { return };
        let bitmaps = self.disk().top().bitmaps().expect("one was added");
        if self.writes.is_multiple_of(2) {
            self.must(bitmaps.remove(&name), "remove a bitmap");
            self.bitmaps.retain(|(other, _)| *other != name);
            return;
        }
        self.must(bitmaps.clear(&name), "clear a bitmap");
        for (other, dirty) in &mut self.bitmaps {
            if *other == name {
                dirty.clear();
            }
        }
    }

    /// Closes, compacts, and opens again.
    fn compact(&mut self) {
        self.must(self.disk().close(), "close");
        self.disk = None;
        let options = CompactOptions::default().zero_scan(self.writes.is_multiple_of(2));
        let (files, limits) = (self.data_file.as_slice(), LIMITS);
        let image = OfflineImage { files, limits, ..OfflineImage::new(&self.storage) };
        let done = Qcow2Driver.compact(&image, options);
        self.must(done.map(|_| ()), "compact");
        self.leaky = false;
        self.check(Repair::Nothing);
        self.open();
    }

    /// What snapshots hold and bitmaps show.
    fn look_at_what_is_kept(&self) {
        let top = self.disk().top();
        for (name, content) in &self.snapshots {
            let view = top.snapshots().expect("one was created").view(name);
            let view = view.unwrap_or_else(|e| panic!("{:?}: snapshot {name}: {e}", self.shape));
            let options = OpenOptions::read_only().limits(LIMITS);
            let disk = Disk::from_format(view, ImageInfo::new("qcow2", 0), &options);
            let got = self.over_base(disk);
            assert_eq!(got.guest_bytes(), content.len() as u64, "{:?}: {name}", self.shape);
            self.compare_with(&got, 0, content, name);
        }
        for (name, want) in &self.bitmaps {
            let mut dirty = BTreeSet::new();
            let shown = top.bitmaps().expect("one was added").for_each_dirty(name, &mut |run| {
                dirty.extend(run.start / SECTOR..run.end.div_ceil(SECTOR));
                Ok(())
            });
            self.must(shown, "look at a bitmap");
            let lost = want.difference(&dirty).next();
            assert_eq!(lost, None, "{:?}: {name} does not show that sector", self.shape);
        }
    }

    fn compare(&self, start: u64, end: u64) {
        let want = &self.model[start as usize..end as usize];
        self.compare_with(self.disk(), start, want, "the disk");
    }

    fn compare_with(&self, disk: &Disk, start: u64, want: &[u8], what: &str) {
        let mut got = vec![1; want.len()];
        self.must(disk.read_at(&mut got, GuestOffset(start)), "read");
        if let Some(at) = first_difference(&got, want) {
            panic!(
                "{:?}: {what}: byte {} is {:#x}, expected {:#x}",
                self.shape,
                start + at as u64,
                got[at],
                want[at]
            );
        }
    }
}

fn monitor() -> Monitor<'static> {
    Monitor::default()
}

/// One of those that there are.
fn chosen<T: Clone>(kept: &[(String, T)], input: &mut Input<'_>) -> Option<(String, T)> {
    let index = input.small().checked_rem(kept.len() as u64)?;
    kept.get(index as usize).cloned()
}

/// Bytes that change every 64.
pub(super) fn pattern(len: u64, byte: impl Fn(u8) -> u8) -> Vec<u8> {
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
