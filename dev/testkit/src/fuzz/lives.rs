//! Operations on new images of VDI, VHD, VHDX and VMDK, compared with a flat model.

use std::sync::Arc;

use vdkit_block::{
    BackingRef, CheckReport, CompactOptions, CreateRequest, FormatDriver, GuestOffset, ImageInfo,
    OfflineImage, OpenRequest, Options, Repair, Storage,
};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::first_difference;
use vdkit_vdi::VdiDriver;
use vdkit_vhd::VhdDriver;
use vdkit_vhdx::VhdxDriver;
use vdkit_vmdk::VmdkDriver;

use super::LIMITS;
use super::operations::{Input, pattern};

const SECTOR: u64 = 512;
/// Disks have up to so many units.
const UNITS_MAX: u64 = 512;
/// Operations of one run.
const OPERATIONS_MAX: u64 = 100;

/// Images of one kind.
#[derive(Clone, Copy, Debug)]
struct Kind {
    driver: &'static dyn FormatDriver,
    /// As for `-o`.
    options: &'static str,
    /// Sizes are multiples of so many bytes: whole sectors.
    unit: u64,
    /// On another image of the same format and size.
    over: bool,
    resizes: bool,
    compacts: bool,
    /// A VMDK whose descriptor names extents of several kinds.
    pieces: bool,
}

/// Blocks of 1 MiB, disks up to 8 MiB.
const VDI: Kind = Kind {
    driver: &VdiDriver,
    options: "",
    unit: 16 << 10,
    over: false,
    resizes: true,
    compacts: true,
    pieces: false,
};
const VDIS: [Kind; 2] = [VDI, Kind { options: "static=on", ..VDI }];

/// Blocks of 2 MiB, disks up to 12 MiB.
const VHD: Kind = Kind { driver: &VhdDriver, options: "force_size=on", unit: 24 << 10, ..VDI };
const VHDS: [Kind; 3] = [
    VHD,
    Kind { options: "force_size=on,subformat=fixed", unit: 4 << 10, ..VHD },
    Kind { over: true, resizes: false, ..VHD },
];

/// Blocks of 1 MiB, disks up to 8 MiB.
const VHDX: Kind = Kind { driver: &VhdxDriver, options: "block_size=1M", ..VDI };
const VHDXS: [Kind; 4] = [
    VHDX,
    Kind { options: "block_size=1M,subformat=fixed", ..VHDX },
    Kind { options: "block_size=1M,logical_sector_size=4096,block_state_zero=off", ..VHDX },
    Kind { over: true, resizes: false, ..VHDX },
];

/// Grains of 64 KiB, disks up to 34 MiB: two tables.
const VMDK: Kind = Kind {
    driver: &VmdkDriver,
    options: "",
    unit: 68 << 10,
    over: false,
    resizes: false,
    compacts: false,
    pieces: false,
};
const VMDKS: [Kind; 6] = [
    VMDK,
    Kind { options: "zeroed_grain=on", ..VMDK },
    Kind { options: "zeroed_grain=on", over: true, unit: 4 << 10, ..VMDK },
    Kind { options: "subformat=monolithicFlat", unit: 4 << 10, ..VMDK },
    Kind { options: "subformat=twoGbMaxExtentSparse", ..VMDK },
    Kind { options: "subformat=twoGbMaxExtentSparse", pieces: true, unit: 12 << 10, ..VMDK },
];

/// Takes the first bytes for a kind of VDI image and its size, the others for operations: writes,
/// zeroes, discards, flushes, resizes, compaction, and openings anew, with and without a close.
///
/// # Panics
/// If the disk does not hold what the model holds, a check finds damage, a closed image has
/// leaks that no end without a close left, or an operation fails on a storage that never does.
pub fn vdi_ops(input: &[u8]) {
    life(&VDIS, input);
}

/// As [`vdi_ops`], of VHD: dynamic, fixed and differencing images.
///
/// # Panics
/// As [`vdi_ops`].
pub fn vhd_ops(input: &[u8]) {
    life(&VHDS, input);
}

/// As [`vdi_ops`], of VHDX: dynamic, fixed and differencing images, and one with sectors of 4 KiB.
///
/// # Panics
/// As [`vdi_ops`].
pub fn vhdx_ops(input: &[u8]) {
    life(&VHDXS, input);
}

/// As [`vdi_ops`], of VMDK: sparse and flat images, of one file, of two and of four, and one on a parent.
/// These are not resized and not compacted.
///
/// # Panics
/// As [`vdi_ops`].
pub fn vmdk_ops(input: &[u8]) {
    life(&VMDKS, input);
}

fn life(kinds: &[Kind], input: &[u8]) {
    let mut input = Input(input);
    let kind = kinds[input.small() as usize % kinds.len()];
    let mut world = World::new(kind, &mut input);
    for _ in 0..OPERATIONS_MAX {
        let Some(tag) = input.byte() else { break };
        world.step(tag, &mut input);
    }
    world.reopen(true);
    world.compare(0, world.size());
}

/// An image's files.
#[derive(Clone, Debug)]
struct Files {
    storage: Arc<dyn Storage>,
    others: Vec<Arc<dyn Storage>>,
}

impl Files {
    fn offline(&self) -> OfflineImage<'_> {
        OfflineImage { files: &self.others, limits: LIMITS, ..OfflineImage::new(&self.storage) }
    }

    fn create(kind: &Kind, name: &str, guest_bytes: u64, base: Option<&Self>) -> Self {
        if kind.pieces {
            return Self::pieces(kind, guest_bytes);
        }
        let driver = kind.driver;
        let options = Options::parse(driver.name(), driver.options(), [kind.options]);
        let options = options.expect("options of this format");
        let new = |name: &str| -> Arc<dyn Storage> { Arc::new(MemoryStorage::new(name)) };
        let others = driver
            .require_creation(name)
            .expect("writable")
            .new_files(name, guest_bytes, &options)
            .expect("a size that it can have");
        let files =
            Self { storage: new(name), others: others.iter().map(|name| new(name)).collect() };
        let backing = base.map(|base| {
            let info = driver.describe(&base.storage, &LIMITS).expect("a closed image");
            assert_eq!(info.virtual_size, guest_bytes, "{kind:?}: size");
            let identity = info.identity;
            BackingRef { identity, ..BackingRef::new("base", Some(driver.name().to_owned())) }
        });
        let request = CreateRequest {
            storage: files.storage.clone(),
            files: files.others.clone(),
            guest_bytes,
            options,
            backing_bytes: backing.is_some().then_some(guest_bytes),
            backing,
        };
        driver.create(&request).expect("memory suffices");
        files
    }

    /// A third in a sparse extent, a third plain, the rest in another sparse one; sizes are not those
    /// of grains.
    fn pieces(kind: &Kind, guest_bytes: u64) -> Self {
        let third = guest_bytes / SECTOR / 3 * SECTOR;
        let sparse = |len: u64| {
            let made = Self::create(&Kind { pieces: false, ..*kind }, "part", len, None);
            made.others.into_iter().next().expect("an extent of its own")
        };
        let flat: Arc<dyn Storage> = Arc::new(MemoryStorage::with_len("b", third));
        let last = guest_bytes - 2 * third;
        let text = format!(
            "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=ffffffff\n\
             createType=\"custom\"\nRW {first} SPARSE \"a\"\nRW {first} FLAT \"b\" 0\n\
             RW {} SPARSE \"c\"\n",
            last / SECTOR,
            first = third / SECTOR,
        );
        let storage = Arc::new(MemoryStorage::from_bytes("image", text.as_bytes()));
        Self { storage, others: vec![sparse(third), flat, sparse(last)] }
    }

    fn open(&self, kind: &Kind, writable: bool) -> Disk {
        let request = OpenRequest {
            storage: self.storage.clone(),
            files: self.others.clone(),
            writable,
            limits: LIMITS,
        };
        let format = kind.driver.open(request);
        let format = format.unwrap_or_else(|error| panic!("{kind:?}: cannot be opened: {error}"));
        let options = OpenOptions::default().writable(writable).limits(LIMITS);
        Disk::from_format(format, ImageInfo::new(kind.driver.name(), 0), &options)
    }
}

/// The image, its backing image, and what it must hold.
struct World {
    kind: Kind,
    files: Files,
    base: Option<Files>,
    disk: Option<Disk>,
    model: Vec<u8>,
    /// It was ended without a close, and its leaks were not repaired since.
    leaky: bool,
    /// Distinguishes what the writes write.
    writes: u8,
}

impl World {
    fn new(kind: Kind, input: &mut Input<'_>) -> Self {
        let guest_bytes = kind.unit * (1 + input.number() % UNITS_MAX);
        let mut model = vec![0; guest_bytes as usize];
        let base = kind.over.then(|| {
            let base = Files::create(&kind, "base", guest_bytes, None);
            let disk = base.open(&kind, true);
            // Two pieces of three, so that the image's and the base's borders differ.
            for piece in (0..guest_bytes).step_by(100 << 10).filter(|at| at / (100 << 10) % 3 < 2) {
                let len = (100 << 10).min(guest_bytes - piece);
                let bytes = pattern(len, |number| number | 0x80);
                disk.write_at(&bytes, GuestOffset(piece)).expect("writing to the base");
                model[piece as usize..(piece + len) as usize].copy_from_slice(&bytes);
            }
            disk.close().expect("closing the base");
            base
        });
        let files = Files::create(&kind, "image", guest_bytes, base.as_ref());
        let mut world = Self { kind, files, base, disk: None, model, leaky: false, writes: 0 };
        world.open();
        world
    }

    fn open(&mut self) {
        let disk = self.files.open(&self.kind, true);
        self.disk = Some(match &self.base {
            Some(base) => disk.over(base.open(&self.kind, false)),
            None => disk,
        });
        assert_eq!(self.disk().guest_bytes(), self.size(), "{:?}: size", self.kind);
    }

    fn disk(&self) -> &Disk {
        self.disk.as_ref().expect("open between operations")
    }

    fn size(&self) -> u64 {
        self.model.len() as u64
    }

    /// A range of sectors within the disk, at least one: 128 KiB at most, or 2 MiB.
    fn sectors(&self, input: &mut Input<'_>) -> (u64, u64) {
        let unit = self.kind.unit;
        let first = input.number() % (self.size() / unit) * unit;
        let at = first + input.small() % (unit / SECTOR) * SECTOR;
        let wide = if input.small() < 64 { 16 } else { 1 };
        let len = (1 + input.small()) * wide * SECTOR;
        (at, len.min(self.size() - at))
    }

    /// A range of bytes within the disk, at least one.
    fn bytes(&self, input: &mut Input<'_>) -> (u64, u64) {
        let (start, len) = self.sectors(input);
        let (skip, cut) = (input.small(), input.small());
        (start + skip, (len - skip).saturating_sub(cut).max(1))
    }

    fn must(&self, result: vdkit_block::Result<()>, what: &str) {
        if let Err(error) = result {
            panic!("{:?}: {what}: {error}", self.kind);
        }
    }

    fn step(&mut self, tag: u8, input: &mut Input<'_>) {
        self.writes = self.writes.wrapping_add(1);
        match tag % 16 {
            0..=3 => {
                let (at, len) = self.bytes(input);
                self.write(at, len);
            }
            4 | 5 => {
                let (at, len) = self.sectors(input);
                self.write(at, len);
            }
            6 => {
                let (at, len) = self.bytes(input);
                let may_unmap = (tag / 16).is_multiple_of(2);
                let done = self.disk().write_zeroes(GuestOffset(at), len, may_unmap);
                self.zeroed(done, at, len);
            }
            7 => {
                let (at, len) = self.sectors(input);
                let done = self.disk().write_zeroes_persistent(GuestOffset(at), len);
                self.zeroed(done, at, len);
            }
            8 | 9 => {
                let (at, len) = self.bytes(input);
                self.discard(at, len);
            }
            10 => self.must(self.disk().flush(), "flush"),
            11 => self.reopen(true),
            12 => self.reopen(false),
            13 => self.resize(input),
            14 => self.compact(),
            _ => {
                let (at, len) = self.bytes(input);
                self.compare(at, at + len);
            }
        }
    }

    fn write(&mut self, at: u64, len: u64) {
        let bytes = pattern(len, |number| self.writes.wrapping_add(number));
        self.must(self.disk().write_at(&bytes, GuestOffset(at)), "write");
        self.model[at as usize..(at + len) as usize].copy_from_slice(&bytes);
    }

    fn zeroed(&mut self, done: vdkit_block::Result<()>, at: u64, len: u64) {
        self.must(done, "zero");
        self.model[at as usize..(at + len) as usize].fill(0);
    }

    /// Afterwards each byte is zero or what it was; from then on it stays so.
    fn discard(&mut self, at: u64, len: u64) {
        self.must(self.disk().discard(GuestOffset(at), len), "discard");
        let mut now = vec![1; len as usize];
        self.must(self.disk().read_at(&mut now, GuestOffset(at)), "read after a discard");
        let old = &mut self.model[at as usize..(at + len) as usize];
        // Byte by byte only where it must be: under a fuzzer's instruments each step of a loop costs.
        let zeroes = [0; SECTOR as usize];
        for (chunk, (old, now)) in
            old.chunks_mut(zeroes.len()).zip(now.chunks(zeroes.len())).enumerate()
        {
            let plain = now == old || now == &zeroes[..now.len()];
            let each = || old.iter().zip(now).position(|(old, now)| *now != 0 && now != old);
            if let Some(byte) = if plain { None } else { each() } {
                let byte = at + chunk as u64 * SECTOR + byte as u64;
                panic!("{:?}: byte {byte} after a discard", self.kind);
            }
            old.copy_from_slice(now);
        }
    }

    fn resize(&mut self, input: &mut Input<'_>) {
        let bytes = self.kind.unit * (1 + input.number() % UNITS_MAX);
        if !self.kind.resizes {
            return;
        }
        self.must(self.disk().resize(bytes), "resize");
        self.model.resize(bytes as usize, 0);
        assert_eq!(self.disk().guest_bytes(), bytes, "{:?}: size", self.kind);
    }

    /// Closes, compacts, and opens again.
    fn compact(&mut self) {
        if !self.kind.compacts {
            return;
        }
        self.must(self.disk().close(), "close");
        self.disk = None;
        let options = CompactOptions::default().zero_scan(self.writes.is_multiple_of(2));
        let done = self.kind.driver.compact(&self.files.offline(), options);
        self.must(done.map(drop), "compact");
        self.leaky = false;
        self.check(Repair::Nothing);
        self.open();
    }

    /// Ends with a close, or as a crash ends right behind a flush; checks; opens again.
    fn reopen(&mut self, close: bool) {
        let ended = if close { self.disk().close() } else { self.disk().flush() };
        self.must(ended, "close or flush");
        self.disk = None;
        self.leaky |= !close;
        if self.leaky && self.writes.is_multiple_of(2) {
            let report = self.check(Repair::Leaks);
            assert_eq!(report.leaks_left(), 0, "{:?}: {:?}", self.kind, report.findings);
            self.leaky = false;
        }
        self.check(Repair::Nothing);
        self.open();
    }

    fn check(&self, repair: Repair) -> CheckReport {
        let report = self.kind.driver.check(&self.files.offline(), repair);
        let report =
            report.unwrap_or_else(|error| panic!("{:?}: cannot be checked: {error}", self.kind));
        let bad = report.corruptions + if self.leaky { 0 } else { report.leaks };
        let first = report.findings.first();
        assert_eq!(bad, 0, "{:?}: {} leaks, {first:?}", self.kind, report.leaks);
        report
    }

    fn compare(&self, start: u64, end: u64) {
        let want = &self.model[start as usize..end as usize];
        let mut got = vec![1; want.len()];
        self.must(self.disk().read_at(&mut got, GuestOffset(start)), "read");
        if let Some(at) = first_difference(&got, want) {
            let (kind, found, wanted, at) = (&self.kind, got[at], want[at], start + at as u64);
            panic!("{kind:?}: byte {at} is {found:#x}, expected {wanted:#x}");
        }
    }
}
