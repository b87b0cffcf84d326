//! Helpers of this crate's tests: images over any storage, and the guest content that they must
//! equal.
#![allow(dead_code, unused_imports, reason = "each test file uses its part")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use vdkit_block::{
    AmendRequest, Amendment, BackingRef, CheckReport, CreateRequest, Creation, Format,
    FormatDriver, GuestOffset, Limits, Monitor, OfflineImage, OpenRequest, Options, Repair, Result,
    Storage,
};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_storage::MemoryStorage;
pub use vdkit_testbase::for_seeds;
use vdkit_testbase::{Rng, assert_sound};
use vdkit_vhdx::VhdxDriver;

pub const MIB: u64 = 1 << 20;
pub const SECTOR: usize = 512;

/// One kind of image.
#[derive(Clone, Debug)]
pub struct Kind {
    pub options: &'static str,
    /// Bytes of the parent, which is full of data.
    pub parent: Option<u64>,
    pub size: u64,
}

impl Kind {
    /// Each subformat, block size and sector size, and the parents that a child may have.
    pub fn all() -> Vec<Self> {
        let size = 4 * MIB + 300 * 1024;
        let kind = |options, parent, size| Self { options, parent, size };
        vec![
            kind("block_size=1M", None, size),
            kind("block_size=1M,block_state_zero=off", None, size),
            kind("block_size=2M,logical_sector_size=4096", None, size),
            kind("block_size=1M,subformat=fixed", None, size),
            kind("block_size=2M,log_size=2M", None, 5 * MIB),
            kind("block_size=1M", Some(size), size),
            kind("block_size=2M", Some(2 * MIB + 4096), size),
            kind("block_size=1M,logical_sector_size=4096", Some(size), size),
        ]
    }

    /// A new image of this kind.
    pub fn create(&self, storage: &Arc<dyn Storage>) {
        create(storage, self.size, self.options, self.parent.map(|_| parent_ref()));
    }

    /// The parent disk, whose bytes are made once.
    pub fn parent_disk(&self) -> Option<Disk> {
        static PARENTS: Mutex<BTreeMap<u64, Arc<dyn Storage>>> = Mutex::new(BTreeMap::new());
        let len = self.parent?;
        let make = || -> Arc<dyn Storage> {
            Arc::new(MemoryStorage::from_bytes("parent", &parent_bytes(len)).read_only())
        };
        let storage = PARENTS.lock().unwrap().entry(len).or_insert_with(make).clone();
        let format: Arc<dyn Format> =
            Arc::new(vdkit_raw::RawFormat::new(storage, false).expect("a raw parent"));
        Some(disk_of(format, false))
    }

    /// Guest content of a new image of this kind.
    pub fn guest(&self) -> Vec<u8> {
        let mut bytes = self.parent.map_or(Vec::new(), parent_bytes);
        bytes.resize(self.size as usize, 0);
        bytes
    }

    pub fn open(&self, storage: &Arc<dyn Storage>, writable: bool) -> Result<Disk> {
        let top = disk_of(open_format(storage, writable)?, writable);
        Ok(match self.parent_disk() {
            None => top,
            Some(parent) => top.over(parent),
        })
    }
}

fn parent_bytes(len: u64) -> Vec<u8> {
    pattern(77, 0, len as usize)
}

pub fn parent_ref() -> BackingRef {
    BackingRef {
        identity: Some("01234567-89ab-cdef-0123-456789abcdef".to_owned()),
        ..BackingRef::new("parent.vhdx", Some("vhdx".to_owned()))
    }
}

/// Bytes that depend on their offset and on the write.
pub fn pattern(id: u64, at: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|i| ((at + i) / 512).wrapping_mul(31).wrapping_add((at + i) % 251 + id * 7) as u8 | 1)
        .collect()
}

pub fn create(storage: &Arc<dyn Storage>, size: u64, options: &str, backing: Option<BackingRef>) {
    let options = Options::parse("vhdx", VhdxDriver.options(), [options]).expect("options");
    let new = CreateRequest::new(storage.clone(), size, options);
    VhdxDriver.create(&CreateRequest { backing, ..new }).expect("a new image");
}

/// Gives an image this parent, or none. Returns the keys that changed.
pub fn amend(storage: &Arc<dyn Storage>, backing: Option<BackingRef>) -> Vec<String> {
    try_amend(storage, backing).expect("amending")
}

pub fn try_amend(storage: &Arc<dyn Storage>, backing: Option<BackingRef>) -> Result<Vec<String>> {
    let request = AmendRequest {
        storage: storage.clone(),
        files: Vec::new(),
        backing: Some(backing),
        options: Options::default(),
        limits: Limits::default(),
    };
    VhdxDriver.amend(&request, &Monitor::default())
}

pub fn open_format(storage: &Arc<dyn Storage>, writable: bool) -> Result<Arc<dyn Format>> {
    // A small cache, so that pages are evicted.
    let mut limits = Limits::default();
    limits.cache_bytes = 0;
    VhdxDriver.open(OpenRequest { storage: storage.clone(), files: Vec::new(), writable, limits })
}

pub fn disk_of(format: Arc<dyn Format>, writable: bool) -> Disk {
    let info = vdkit_block::ImageInfo::new(format.name(), format.guest_bytes());
    Disk::from_format(format, info, &OpenOptions::default().writable(writable))
}

pub fn check(storage: &Arc<dyn Storage>, repair: Repair) -> Result<CheckReport> {
    VhdxDriver.check(&OfflineImage::new(storage), repair)
}

/// Asserts that the image is sound.
#[track_caller]
pub fn sound(storage: &Arc<dyn Storage>, leaks_allowed: bool, what: &str) {
    assert_sound(&VhdxDriver, storage, leaks_allowed, what);
}

/// Asserts the content of the disk.
#[track_caller]
pub fn same(disk: &Disk, guest: &[u8], what: &str) {
    assert_eq!(disk.guest_bytes(), guest.len() as u64, "{what}: size");
    let mut bytes = vec![0xee; guest.len()];
    disk.read_at(&mut bytes, GuestOffset(0)).expect("reading");
    if bytes != guest {
        let at = bytes.iter().zip(guest).position(|(a, b)| a != b).expect("they differ");
        panic!("{what}: differs at {at:#x}: {:#x}, expected {:#x}", bytes[at], guest[at]);
    }
}

/// An operation on a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Write {
        at: u64,
        len: u64,
    },
    Zero {
        at: u64,
        len: u64,
        unmap: bool,
    },
    Discard {
        at: u64,
        len: u64,
    },
    Flush,
    Resize {
        to: u64,
    },
    /// Closes and reopens the image.
    Reopen,
    /// Reopens the image after a flush without closing it, as after a crash of the program.
    Abandon,
}

pub fn random_op(rng: &mut Rng, size: u64, resizes: bool) -> Op {
    let at = rng.below(size);
    let most = match rng.below(6) {
        0 => 600,
        1..=3 => 40_000,
        4 => MIB + 5000,
        _ => 3 * MIB,
    };
    let mut at = at;
    let mut len = (1 + rng.below(most)).min(size - at);
    if rng.chance(1, 3) {
        at = at / MIB * MIB;
        len = (len.div_ceil(MIB) * MIB).min(size - at);
    } else if rng.chance(1, 2) {
        at = at / 512 * 512;
    }
    match rng.below(20) {
        0..=9 => Op::Write { at, len },
        10 | 11 => Op::Zero { at, len, unmap: rng.chance(2, 3) },
        12 | 13 => Op::Discard { at, len },
        14..=16 => Op::Flush,
        17 if resizes => Op::Resize { to: (1 + rng.below(14)) * 512 * 1024 },
        18 => Op::Reopen,
        19 => Op::Abandon,
        _ => Op::Write { at, len },
    }
}

/// Applies an operation to the disk and to the guest's bytes; the caller handles `Reopen` and
/// `Abandon`.
pub fn apply(disk: &Disk, guest: &mut Vec<u8>, op: Op, id: u64) -> Result<()> {
    let range = |at: u64, len: u64| at as usize..(at + len) as usize;
    match op {
        Op::Write { at, len } => {
            let bytes = pattern(id, at, len as usize);
            disk.write_at(&bytes, GuestOffset(at))?;
            guest[range(at, len)].copy_from_slice(&bytes);
        }
        Op::Zero { at, len, unmap } => {
            disk.write_zeroes(GuestOffset(at), len, unmap)?;
            guest[range(at, len)].fill(0);
        }
        Op::Discard { at, len } => {
            disk.discard(GuestOffset(at), len)?;
            let mut bytes = vec![0; len as usize];
            disk.read_at(&mut bytes, GuestOffset(at))?;
            let before = &guest[range(at, len)];
            for (found, old) in bytes.chunks(64).zip(before.chunks(64)) {
                let fine = found.iter().zip(old).all(|(found, old)| found == old || *found == 0);
                assert!(fine, "what was discarded is neither zero nor as before");
            }
            guest[range(at, len)].copy_from_slice(&bytes);
        }
        Op::Flush => disk.flush()?,
        Op::Resize { to } => {
            disk.resize(to)?;
            guest.resize(disk.guest_bytes() as usize, 0);
        }
        Op::Reopen | Op::Abandon => unreachable!("the caller's"),
    }
    Ok(())
}
