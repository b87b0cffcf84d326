//! Threads that share blocks.

use std::sync::Arc;

use vdkit_block::{GuestOffset, Storage};
use vdkit_chain::Disk;

use super::Trial;
use crate::{Rng, read_all};

/// Each of these threads writes, zeroes and reads units of its own, beside those of the others in
/// the same blocks, and flushes. It always reads what it has written.
#[derive(Clone, Copy, Debug)]
pub struct OwnUnits {
    /// Number of threads.
    pub threads: usize,
    /// Bytes of a unit.
    pub unit: usize,
    /// Steps of each thread.
    pub rounds: u64,
    /// Seed of the steps.
    pub seed: u64,
}

impl OwnUnits {
    /// Runs the threads in the first bytes of a disk, which hold `first`. Returns what they hold
    /// afterwards.
    ///
    /// # Panics
    /// Where the disk shows something else.
    pub fn run(&self, disk: &Disk, first: &[u8]) -> Vec<u8> {
        let run = |thread: usize| self.run_one(disk, first, thread);
        let contents: Vec<Vec<u8>> = std::thread::scope(|scope| {
            let threads = (0..self.threads).map(|thread| scope.spawn(move || run(thread)));
            let threads: Vec<_> = threads.collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        let mut after = first.to_vec();
        for (n, unit) in after.chunks_exact_mut(self.unit).enumerate() {
            unit.copy_from_slice(&contents[n % self.threads][n * self.unit..][..self.unit]);
        }
        let mut found = vec![0xee; after.len()];
        disk.read_at(&mut found, GuestOffset(0)).expect("reading");
        assert!(found == after, "after the threads");
        after
    }

    fn run_one(&self, disk: &Disk, first: &[u8], thread: usize) -> Vec<u8> {
        let mut rng = Rng::new(self.seed ^ (thread as u64) << 32);
        let mut mine = first.to_vec();
        let groups = (first.len() / self.unit / self.threads) as u64;
        for round in 0..self.rounds {
            let number = rng.below(groups) as usize * self.threads + thread;
            let at = GuestOffset((number * self.unit) as u64);
            let mine = &mut mine[number * self.unit..][..self.unit];
            match rng.below(10) {
                0 => {
                    disk.write_zeroes(at, self.unit as u64, true).expect("zeroing");
                    mine.fill(0);
                }
                1 => disk.flush().expect("flushing"),
                2..=6 => {
                    mine.fill((round % 250) as u8 + 1);
                    disk.write_at(mine, at).expect("writing");
                }
                _ => {
                    let mut found = vec![0xee; self.unit];
                    disk.read_at(&mut found, at).expect("reading");
                    assert!(found == mine, "thread {thread} at {at}");
                }
            }
        }
        mine
    }
}

impl Trial {
    /// Threads write to sectors of the same blocks at once; nothing is lost.
    pub fn threads(&self, threads: usize, rounds: u64) {
        let storage: Arc<dyn Storage> = Arc::new(self.image());
        let disk = self.open(&storage, true).expect("opening");
        let threads = OwnUnits { threads, unit: 512, rounds, seed: 1 };
        let content = threads.run(&disk, &read_all(&disk));
        disk.close().expect("closing");
        self.audit(&storage, true, "after the threads");
        assert!(self.content(&storage) == content, "opened again");
    }
}
