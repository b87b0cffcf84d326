//! What a disk must hold after a power cut, and the power cut in each step of a run.

use std::collections::HashMap;
use std::sync::Arc;

use vdkit_block::GuestOffset;
use vdkit_chain::Disk;
use vdkit_storage::MemoryStorage;

use crate::{CrashStorage, Rng};

const SECTOR: usize = super::SECTOR as usize;

/// The contents that each sector may have: what was flushed, or what was written since.
#[derive(Clone, Debug)]
pub struct Promised {
    flushed: Vec<u8>,
    now: Vec<u8>,
    since: HashMap<usize, Vec<Vec<u8>>>,
}

impl Promised {
    /// What the disk shows without a power cut.
    pub fn now(&self) -> &[u8] {
        &self.now
    }

    /// A write of whole sectors, acknowledged or not.
    pub fn write(&mut self, at: usize, bytes: &[u8]) {
        self.now[at..at + bytes.len()].copy_from_slice(bytes);
        for (n, content) in bytes.chunks(SECTOR).enumerate() {
            self.since.entry(at / SECTOR + n).or_default().push(content.to_vec());
        }
    }

    /// Whatever makes this of the disk.
    pub fn become_this(&mut self, after: &[u8]) {
        for at in (0..after.len()).step_by(SECTOR) {
            let range = at..(at + SECTOR).min(after.len());
            if self.now[range.clone()] != after[range.clone()] {
                self.write(at, &after[range]);
            }
        }
    }

    /// A flush has returned.
    pub fn flush(&mut self) {
        self.flushed.clone_from(&self.now);
        self.since.clear();
    }

    /// Within the step that led from `self` to `after`: an unfinished flush promises nothing.
    fn during(mut self, after: &Self) -> Self {
        for (sector, contents) in &after.since {
            self.since.entry(*sector).or_default().extend(contents.iter().cloned());
        }
        self.now.clone_from(&after.now);
        self
    }

    /// Compares a disk with it.
    ///
    /// # Panics
    /// If a sector has another content.
    pub fn holds(&self, found: &[u8], what: &str) {
        for (sector, content) in found.chunks(SECTOR).enumerate() {
            let flushed = &self.flushed[sector * SECTOR..][..content.len()];
            let since = self.since.get(&sector).map_or(&[][..], Vec::as_slice);
            assert!(
                content == flushed || since.iter().any(|written| written == content),
                "{what}: guest sector {sector} begins with {:02x?}, flushed were {:02x?}, and {} \
                 contents written since",
                &content[..4],
                &flushed[..4],
                since.len()
            );
        }
    }
}

/// Runs `steps` steps on a disk over a recording storage, and closes it. `examine` sees what a power
/// cut may leave: within each step, after it, and at each moment of closing.
///
/// # Panics
/// If `examine` does, or the disk shows something else than the steps made.
pub fn cut_in_each_step(
    disk: &Disk,
    storage: &Arc<CrashStorage>,
    steps: usize,
    rng: &mut Rng,
    first: Vec<u8>,
    mut step: impl FnMut(&mut Promised, &mut Rng),
    examine: impl Fn(&Promised, MemoryStorage, &str),
) {
    let mut guest = Promised { flushed: first.clone(), now: first, since: HashMap::new() };
    let mut replay = storage.replay();
    for _ in 0..steps {
        let (before, earlier) = (storage.ops(), guest.clone());
        step(&mut guest, rng);
        let ops = storage.ops();
        if ops > before {
            let point = before + 1 + rng.below((ops - before) as u64) as usize;
            let survivor = replay.at(point).survivor(rng);
            examine(&earlier.during(&guest), survivor, &format!("cut at {point}, random"));
        }
        let crash = replay.at(ops);
        examine(&guest, crash.survivor(rng), &format!("cut at {ops}, random, step done"));
        if rng.chance(1, 8) {
            for (which, survivor) in crash.extremes() {
                examine(&guest, survivor, &format!("cut at {ops}, {which}"));
            }
        }
    }
    let mut found = vec![0; guest.now.len()];
    disk.read_at(&mut found, GuestOffset(0)).expect("reading");
    assert!(found == guest.now, "after all steps");
    let before = storage.ops();
    disk.close().expect("closing");
    for point in before..storage.ops() {
        let survivor = replay.at(point + 1).survivor(rng);
        examine(&guest, survivor, &format!("cut at {}, while closing", point + 1));
    }
}
