//! What a disk may hold after a crash.

use std::collections::BTreeMap;
use std::sync::Arc;

use vdkit_block::{HostOffset, Storage};
use vdkit_storage::MemoryStorage;

use crate::rng::Rng;

/// Bytes that a disk writes whole or not at all.
pub(crate) const SECTOR: u64 = 512;

/// The bytes of a sector; nothing where all are zero.
pub(crate) type Sector = Option<Arc<[u8; SECTOR as usize]>>;

/// Sectors by number. Absent ones were never touched and are zero.
pub(crate) type Sectors = BTreeMap<u64, Sector>;

/// One change as it was applied. Changes are numbered in the order of their application.
#[derive(Debug)]
pub(crate) struct Change {
    pub id: u64,
    /// The sectors that it touched, as they were right after it.
    pub sectors: Vec<(u64, Sector)>,
    /// The length after it, where it changed that.
    pub new_len: Option<u64>,
    /// It made the storage shorter; `sectors` are those that were cut off.
    pub cut: bool,
}

/// What happened to the storage, in order.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// A change reached the storage; its caller still waits.
    Changed(Arc<Change>),
    /// The caller of a change was answered.
    Returned(u64),
    /// A sync began. Changes whose callers still wait are not covered.
    SyncBegan(u64),
    /// A sync was answered.
    SyncReturned(u64),
    /// A change is durable by itself, without a sync.
    Durable(u64),
}

#[derive(Clone, Debug)]
struct Pending {
    returned: bool,
    change: Arc<Change>,
}

/// A moment of a [`crate::CrashStorage`]'s life: what was durable then, and every change since,
/// from which the possible survivors of a crash at that moment are made.
#[derive(Clone, Debug)]
pub struct CrashImage {
    /// Durable content with the number of the change that it came from (0: from the beginning).
    durable: BTreeMap<u64, (u64, Sector)>,
    durable_len: (u64, u64),
    pending: Vec<Pending>,
    /// Syncs under way, with the changes that each covers.
    syncs: BTreeMap<u64, Vec<u64>>,
}

/// One content that a sector may have after a crash.
struct Version<'a> {
    id: u64,
    sector: &'a Sector,
    cut: bool,
}

impl CrashImage {
    pub(crate) fn new(sectors: &Sectors, len: u64) -> Self {
        Self {
            durable: sectors.iter().map(|(n, sector)| (*n, (0, sector.clone()))).collect(),
            durable_len: (0, len),
            pending: Vec::new(),
            syncs: BTreeMap::new(),
        }
    }

    pub(crate) fn apply(&mut self, event: &Event) {
        match event {
            Event::Changed(change) => {
                self.pending.push(Pending { returned: false, change: change.clone() });
            }
            Event::Returned(id) => {
                for pending in self.pending.iter_mut().filter(|p| p.change.id == *id) {
                    pending.returned = true;
                }
            }
            Event::SyncBegan(sync) => {
                let covered = self.pending.iter().filter(|p| p.returned).map(|p| p.change.id);
                self.syncs.insert(*sync, covered.collect());
            }
            Event::SyncReturned(sync) => {
                let covered = self.syncs.remove(sync).unwrap_or_default();
                self.make_durable(&covered);
            }
            Event::Durable(id) => self.make_durable(&[*id]),
        }
    }

    fn make_durable(&mut self, covered: &[u64]) {
        for pending in &self.pending {
            let change = &pending.change;
            if covered.binary_search(&change.id).is_err() {
                continue;
            }
            for (number, sector) in &change.sectors {
                let durable = self.durable.entry(*number).or_insert((0, None));
                // Another sync may have settled a later change already.
                if durable.0 < change.id {
                    *durable = (change.id, sector.clone());
                }
            }
            if let Some(len) = change.new_len
                && self.durable_len.0 < change.id
            {
                self.durable_len = (change.id, len);
            }
        }
        self.pending.retain(|p| covered.binary_search(&p.change.id).is_err());
    }

    /// Changes that a crash may undo.
    pub fn unsynced(&self) -> usize {
        self.pending.len()
    }

    /// The length that is durable.
    pub(crate) fn durable_len(&self) -> u64 {
        self.durable_len.1
    }

    /// Whether a length of at least `end` hangs on a change whose caller still waits, so that a
    /// sync that begins now does not cover it.
    pub(crate) fn may_lose_len(&self, end: u64) -> bool {
        self.durable_len.1 < end
            && self.pending.iter().any(|p| !p.returned && p.change.new_len.is_some())
    }

    /// Nothing survives that was not made durable.
    pub fn only_durable(&self) -> MemoryStorage {
        self.build(self.durable_len.0, |_| 0)
    }

    /// Everything survives, as if there had been a sync right before the crash.
    pub fn everything(&self) -> MemoryStorage {
        self.build(u64::MAX, |versions| versions.len() - 1)
    }

    /// One of the possible survivors: each sector on its own holds its durable content or that
    /// after any change since; the length is the durable one or any since.
    pub fn survivor(&self, rng: &mut Rng) -> MemoryStorage {
        let lens = self.len_changes();
        let len_id = match rng.below(lens.len() as u64 + 1) as usize {
            0 => self.durable_len.0,
            n => lens[n - 1],
        };
        // From "nearly all lost" to "nearly all there": the middle alone would hide faults that
        // need one lost sector among many, or one that survived.
        let newest = [1, 8, 16, 24, 31][rng.below(5) as usize];
        self.build(len_id, |versions| {
            if rng.chance(newest, 32) {
                versions.len() - 1
            } else {
                rng.below(versions.len() as u64) as usize
            }
        })
    }

    /// The systematic survivors, each with its description; see [`CrashImage::extreme`].
    pub fn extremes(&self) -> impl Iterator<Item = (String, MemoryStorage)> + '_ {
        (0..self.extremes_count()).map(|number| self.extreme(number))
    }

    /// The number of systematic survivors.
    pub fn extremes_count(&self) -> usize {
        2 + 2 * self.pending.len()
    }

    /// A systematic survivor and its description: only what was durable; everything; and for each
    /// change since the last sync, it alone, and all but it.
    pub fn extreme(&self, number: usize) -> (String, MemoryStorage) {
        let Some(change) = number.checked_sub(2) else {
            return match number {
                0 => ("only what was durable".to_owned(), self.only_durable()),
                _ => ("everything".to_owned(), self.everything()),
            };
        };
        let id = self.pending[change / 2].change.id;
        match change % 2 {
            0 => (format!("change {id} alone"), self.only(id)),
            _ => (format!("all but change {id}"), self.without(id)),
        }
    }

    /// One change survives; with its bytes the length that they had then.
    fn only(&self, id: u64) -> MemoryStorage {
        self.build(id, |versions| versions.iter().position(|v| v.id == id).unwrap_or(0))
    }

    /// One change is lost, except where a later one wrote the same sector.
    fn without(&self, id: u64) -> MemoryStorage {
        let last_len = self.len_changes().into_iter().rfind(|change| *change != id);
        self.build(last_len.unwrap_or(self.durable_len.0), |versions| {
            versions.iter().rposition(|v| v.id != id).unwrap_or(0)
        })
    }

    /// Changes since the last sync that changed the length.
    fn len_changes(&self) -> Vec<u64> {
        let changes = self.pending.iter().map(|p| &p.change);
        changes.filter(|c| c.new_len.is_some() && c.id > self.durable_len.0).map(|c| c.id).collect()
    }

    /// Makes a survivor: `len_id` is the last change of the length that survives, and `pick`
    /// chooses for each sector among its versions, of which the first is the durable one.
    fn build(&self, len_id: u64, mut pick: impl FnMut(&[Version<'_>]) -> usize) -> MemoryStorage {
        let mut len = self.durable_len.1;
        // (change, length): what was older than the cut reads zero past it.
        let mut cuts = Vec::new();
        let mut changed: BTreeMap<u64, Vec<Version<'_>>> = BTreeMap::new();
        for change in self.pending.iter().map(|p| &p.change) {
            if let Some(new_len) = change.new_len
                && change.id > self.durable_len.0
                && change.id <= len_id
            {
                len = new_len;
                if change.cut {
                    cuts.push((change.id, new_len));
                }
            }
            for (number, sector) in &change.sectors {
                changed.entry(*number).or_default().push(Version {
                    id: change.id,
                    sector,
                    cut: change.cut,
                });
            }
        }
        let mut survivor = Survivor::new(len, cuts);
        let mut next = 0;
        for (number, since) in &changed {
            survivor.put_all(self.durable.range(next..*number));
            next = number + 1;
            let durable = self.durable.get(number);
            let (id, sector) = durable.map_or((0, &None), |(id, sector)| (*id, sector));
            let mut versions = vec![Version { id, sector, cut: false }];
            // A cut that did not survive has not emptied its sectors, and what is older than the
            // durable content is gone.
            versions.extend(
                since
                    .iter()
                    .filter(|v| v.id > id && !(v.cut && v.id > len_id))
                    .map(|v| Version { ..*v }),
            );
            let version = &versions[pick(&versions)];
            survivor.put(*number, version.id, version.sector);
        }
        survivor.put_all(self.durable.range(next..));
        survivor.end()
    }
}

/// A survivor in the making. Sectors side by side are written at once.
struct Survivor {
    memory: MemoryStorage,
    len: u64,
    /// Changes that cut the storage off, and its length then.
    cuts: Vec<(u64, u64)>,
    /// Bytes that are not written yet, and where they begin.
    run: Vec<u8>,
    start: u64,
}

impl Survivor {
    fn new(len: u64, cuts: Vec<(u64, u64)>) -> Self {
        let memory = MemoryStorage::with_len("survivor", len);
        Self { memory, len, cuts, run: Vec::new(), start: 0 }
    }

    fn put_all<'a>(&mut self, sectors: impl Iterator<Item = (&'a u64, &'a (u64, Sector))>) {
        for (number, (id, sector)) in sectors {
            self.put(*number, *id, sector);
        }
    }

    /// Puts the sector of change `id`, without what lies past the end or was cut off later.
    fn put(&mut self, number: u64, id: u64, sector: &Sector) {
        let Some(bytes) = sector else { return };
        let later_cuts = self.cuts.iter().filter(|(cut, _)| *cut > id).map(|(_, at)| *at);
        let end = later_cuts.min().unwrap_or(self.len).min(self.len);
        let start = number * SECTOR;
        let n = end.saturating_sub(start).min(SECTOR) as usize;
        if self.start + self.run.len() as u64 != start {
            self.write();
            self.start = start;
        }
        self.run.extend_from_slice(&bytes[..n]);
    }

    fn write(&mut self) {
        let written = self.memory.write_at(&self.run, HostOffset(self.start));
        written.expect("memory takes what lies within its length");
        self.run.clear();
    }

    fn end(mut self) -> MemoryStorage {
        self.write();
        self.memory
    }
}
