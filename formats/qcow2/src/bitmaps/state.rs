//! The bitmaps of an open image: the directory with all tables.

use std::collections::BTreeSet;
use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, RwLock};
use rustc_hash::FxHashSet;
use vdkit_block::{Error, HostOffset, Limits, Result, Storage, require_within};

use super::bits::Tracker;
use super::{Bitmap, Bitmaps, entry_fault, flag, is_table_entry};
use crate::header::{Header, write_features};
use crate::layout::{Geometry, OFFSET_MASK, autoclear, extension};
use crate::metadata::Metadata;
use crate::structures::{BitmapDirectoryEntry, decode_words, header_offset};

/// All recording bitmaps together may have this many times [`Limits::table_bytes_max`] bytes.
const RECORDED_MAX: u64 = 64;

/// Bitmap state of an open image.
///
/// Lock order: `admin` before all other locks of the image; `trackers`, then `directory`, after all
/// others. Neither of these two is held during I/O.
#[derive(Debug)]
pub(crate) struct State {
    /// Some bitmap is in `trackers`.
    pub(super) active: AtomicBool,
    pub(super) trackers: RwLock<Vec<Arc<Tracker>>>,
    pub(super) directory: Mutex<Directory>,
    /// Held while bitmaps are added, removed or changed, and while the disk is resized.
    pub(crate) admin: Mutex<()>,
    pub(super) limits: Limits,
}

/// The directory as in the file, except for unwritten table entries.
#[derive(Debug, Default)]
pub(super) struct Directory {
    pub(super) entries: Vec<Entry>,
    /// Host offset and bytes of the directory; `None` without a valid one.
    pub(super) place: Option<(HostOffset, u64)>,
    pub(super) next_id: u64,
}

/// One bitmap.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// Unchanged while the bitmap keeps its table, also one of another length.
    pub(super) id: u64,
    pub(super) bitmap: Bitmap,
    /// Its table; `None` if invalid.
    pub(super) table: Option<Vec<u64>>,
    /// Indexes of table entries to write.
    pub(super) unwritten: BTreeSet<usize>,
}

impl Entry {
    /// Whether it records guest writes.
    pub(super) fn records(&self) -> bool {
        self.usable() && self.bitmap.flags & flag::AUTO != 0
    }

    /// Whether its bits can be trusted.
    pub(super) fn usable(&self) -> bool {
        !self.bitmap.in_use() && self.table.is_some()
    }

    /// A tracker for it, with nothing in memory.
    pub(super) fn tracker(
        &self,
        recording: bool,
        guest_bytes: u64,
        geometry: &Geometry,
    ) -> Arc<Tracker> {
        let bits = self.bitmap.bits(guest_bytes);
        let granularity_bits = self.bitmap.granularity_bits.into();
        let cluster = geometry.cluster_bytes();
        Arc::new(Tracker::new(self.id, recording, granularity_bits, bits, cluster))
    }

    /// Host clusters of its table and its bits.
    pub(super) fn clusters(&self, geometry: &Geometry) -> Vec<u64> {
        let Some(table) = &self.table else { return Vec::new() };
        let bits = geometry.cluster_bits;
        let offset = self.bitmap.table_offset.0;
        let mut clusters: Vec<u64> =
            (offset >> bits..=(offset + table.len() as u64 * 8 - 1) >> bits).collect();
        clusters
            .extend(table.iter().map(|w| w & OFFSET_MASK).filter(|&w| w != 0).map(|w| w >> bits));
        clusters
    }
}

impl Directory {
    pub(super) fn by_id(&mut self, id: u64) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.id == id)
    }

    /// Host clusters of the directory itself.
    pub(super) fn clusters(&self, geometry: &Geometry) -> std::ops::Range<u64> {
        match self.place {
            None => 0..0,
            Some((offset, bytes)) => {
                let bits = geometry.cluster_bits;
                offset.0 >> bits..((offset.0 + bytes - 1) >> bits) + 1
            }
        }
    }

    /// Reads the directory and all tables; adds faults of bitmaps to `faults`.
    pub(super) fn read(
        header: &Header,
        guest_bytes: u64,
        storage: &dyn Storage,
        limits: &Limits,
        faults: &mut Vec<(usize, String)>,
    ) -> Result<Self> {
        let Bitmaps::Valid(bitmaps) = Bitmaps::read(storage, header, limits)? else {
            return Ok(Self::default());
        };
        let place = header.bitmaps().map(|b| (b.directory_offset, b.directory_bytes));
        let total: u64 = bitmaps.iter().map(|b| u64::from(b.table_entries) * 8).sum();
        let what = "the tables of all bitmaps in bytes";
        require_within(storage.name(), what, total, limits.table_bytes_max)?;
        let end = storage.len()?.next_multiple_of(header.geometry.cluster_bytes());
        let mut entries = Vec::with_capacity(bitmaps.len());
        for (index, bitmap) in bitmaps.into_iter().enumerate() {
            let table = match entry_fault(&bitmap.entry(), &header.geometry, guest_bytes, end) {
                None => read_table(&bitmap, &header.geometry, end, storage)?,
                Some(fault) => Err(fault),
            };
            let table = table.map_err(|fault| faults.push((index, fault))).ok();
            let id = index as u64;
            entries.push(Entry { id, bitmap, table, unwritten: BTreeSet::new() });
        }
        Ok(Self { next_id: entries.len() as u64, entries, place })
    }
}

/// Reads a table; the inner error describes a fault in it.
fn read_table(
    bitmap: &Bitmap,
    geometry: &Geometry,
    end: u64,
    storage: &dyn Storage,
) -> Result<Result<Vec<u64>, String>> {
    let mut raw = vec![0; bitmap.table_entries as usize * 8];
    storage.read_padded(&mut raw, bitmap.table_offset)?;
    let table = decode_words(&raw);
    let cluster = geometry.cluster_bytes();
    let wrong = table.iter().position(|&word| !is_table_entry(word, cluster, end));
    Ok(match wrong {
        None => Ok(table),
        Some(index) => Err(format!("table entry {index} with {:#x}", table[index])),
    })
}

impl State {
    /// State of a read-only image: bitmaps are read on demand.
    pub(crate) fn unread(limits: &Limits) -> Self {
        Self {
            active: AtomicBool::new(false),
            trackers: RwLock::default(),
            directory: Mutex::default(),
            admin: Mutex::default(),
            limits: *limits,
        }
    }

    /// Reads the bitmaps of an image that is opened for writing, and adds their clusters to
    /// `metadata`. Marks a damaged bitmap as in use, so that no program trusts it. If the directory
    /// is damaged, clears the autoclear bit, which invalidates all bitmaps.
    pub(crate) fn open(
        header: &mut Header,
        storage: &dyn Storage,
        metadata: &mut Metadata,
        limits: &Limits,
        warnings: &mut Vec<String>,
    ) -> Result<Self> {
        let state = Self::unread(limits);
        if header.autoclear & autoclear::BITMAPS == 0 {
            return Ok(state);
        }
        let mut faults = Vec::new();
        let read = Directory::read(header, header.guest_bytes, storage, limits, &mut faults);
        let mut directory = match read {
            Ok(directory) => directory,
            Err(error @ Error::Corrupt(_)) => {
                warnings.push(format!("{error}; its dirty bitmaps are given up"));
                forget(header, storage)?;
                return Ok(state);
            }
            Err(error) => return Err(error),
        };
        if directory.place.is_none() && header.extension(extension::BITMAPS).is_none() {
            forget(header, storage)?;
            return Ok(state);
        }
        let geometry = header.geometry;
        if directory.clusters(&geometry).any(|cluster| !metadata.insert(cluster)) {
            warnings.push(format!(
                "{}: the bitmap directory overlaps other metadata; its dirty bitmaps are given up",
                storage.name()
            ));
            forget(header, storage)?;
            return Ok(state);
        }
        for (index, entry) in directory.entries.iter_mut().enumerate() {
            let mine = entry.clusters(&geometry);
            let mut seen = FxHashSet::default();
            if mine.iter().any(|c| metadata.contains(*c) || !seen.insert(*c)) {
                entry.table = None;
                faults.push((index, "clusters that other metadata uses too".to_owned()));
            } else {
                metadata.extend(mine);
            }
        }
        distrust(&mut directory, storage, &faults, warnings)?;
        let recorded = directory.entries.iter().filter(|entry| entry.records());
        let bytes: u64 =
            recorded.map(|e| u64::from(e.bitmap.table_entries) << geometry.cluster_bits).sum();
        let limit = limits.table_bytes_max.saturating_mul(RECORDED_MAX);
        require_within(storage.name(), "the bitmaps that record writes in bytes", bytes, limit)?;
        let trackers: Vec<_> = directory
            .entries
            .iter()
            .filter(|entry| entry.records())
            .map(|entry| entry.tracker(true, header.guest_bytes, &geometry))
            .collect();
        state.active.store(!trackers.is_empty(), Ordering::Release);
        *state.trackers.write() = trackers;
        *state.directory.lock() = directory;
        Ok(state)
    }
}

/// Durably clears the autoclear bit, which invalidates all bitmaps.
fn forget(header: &mut Header, storage: &dyn Storage) -> Result<()> {
    header.autoclear &= !autoclear::BITMAPS;
    write_features(storage, header_offset!(autoclear_features), header.autoclear)
}

/// Marks damaged bitmaps in the directory as in use, before any write that they do not record.
fn distrust(
    directory: &mut Directory,
    storage: &dyn Storage,
    faults: &[(usize, String)],
    warnings: &mut Vec<String>,
) -> Result<()> {
    let Some((place, _)) = directory.place else { return Ok(()) };
    let mut written = false;
    let mut at = place.0;
    for (index, entry) in directory.entries.iter_mut().enumerate() {
        let bitmap = &mut entry.bitmap;
        if let Some((_, fault)) = faults.iter().find(|(i, _)| *i == index)
            && !bitmap.in_use()
        {
            warnings.push(format!(
                "{}: bitmap '{}' is damaged ({fault}) and is not trusted from now on; a repair \
                 drops it",
                storage.name(),
                String::from_utf8_lossy(&bitmap.name)
            ));
            bitmap.flags |= flag::IN_USE;
            // Entries begin at multiples of eight, so the flags are within one sector.
            let flags = at + offset_of!(BitmapDirectoryEntry, flags) as u64;
            storage.write_at(&bitmap.flags.to_be_bytes(), HostOffset(flags))?;
            written = true;
        }
        at += bitmap.entry().bytes() as u64;
    }
    if written { storage.sync() } else { Ok(()) }
}
