//! A script of changes, run once with a fault at each storage operation in turn.

use std::sync::Arc;

use vdkit_block::{FormatDriver, GuestOffset, Result, Storage};
use vdkit_chain::Disk;
use vdkit_storage::MemoryStorage;

use crate::{FaultKind, FaultPlan, FaultyStorage, assert_sound, read_all};

/// An image on which the script runs.
#[derive(Clone, Copy)]
pub struct FaultScript<'a> {
    /// Name of the image's shape, for messages.
    pub name: &'a str,
    /// The format.
    pub driver: &'a dyn FormatDriver,
    /// Makes the image. Its storage is called `image`.
    pub image: &'a dyn Fn() -> Arc<MemoryStorage>,
    /// Opens it for writing.
    pub open: &'a dyn Fn(Arc<dyn Storage>) -> Result<Disk>,
    /// Its guest content, of at least 3 MiB.
    pub content: &'a [u8],
}

enum Step {
    Write(Vec<u8>),
    Zero(u64),
    Flush,
}

fn steps() -> Vec<(u64, Step)> {
    let mut steps = Vec::new();
    for i in 0..6u64 {
        steps.push((i * 300_032, Step::Write(vec![i as u8 + 1; 100_000])));
    }
    steps.push((0, Step::Flush));
    steps.push((65_536, Step::Zero(200_000)));
    steps.push((2 << 20, Step::Write(vec![9; 4096])));
    steps.push((600_000, Step::Zero(65_536)));
    steps.push((0, Step::Flush));
    steps.push((40_000, Step::Write(vec![10; 300_000])));
    steps
}

fn perform(disk: &Disk, at: u64, step: &Step) -> Result<()> {
    match step {
        Step::Write(bytes) => disk.write_at(bytes, GuestOffset(at)),
        Step::Zero(len) => disk.write_zeroes(GuestOffset(at), *len, true),
        Step::Flush => disk.flush(),
    }
}

fn apply(model: &mut [u8], at: u64, step: &Step) {
    let at = at as usize;
    match step {
        Step::Write(bytes) => model[at..at + bytes.len()].copy_from_slice(bytes),
        Step::Zero(len) => model[at..at + *len as usize].fill(0),
        Step::Flush => {}
    }
}

impl FaultScript<'_> {
    /// EIO and ENOSPC at each operation. Each failed step is repeated without the fault; the image
    /// is never corrupt, and no content is lost.
    pub fn each_operation_may_fail_and_work_later(&self) {
        for (kinds, no_space) in [
            (&[FaultKind::Write][..], false),
            (&[FaultKind::Write, FaultKind::SetLen, FaultKind::Zero][..], true),
            (&[FaultKind::Read][..], false),
            (&[FaultKind::Sync][..], false),
            (&[FaultKind::Discard, FaultKind::Zero][..], false),
        ] {
            let mut nth = 0;
            while self.run(kinds, nth, no_space) {
                // Small clusters cause thousands of operations: all of the first, then samples.
                nth += 1 + nth / 24;
            }
        }
    }

    /// Runs the script with a fault at the `nth` operation. Returns whether the fault fired.
    fn run(&self, kinds: &[FaultKind], nth: u64, no_space: bool) -> bool {
        let what = format!("{}: {kinds:?} {nth}, no space: {no_space}", self.name);
        let memory = (self.image)();
        let image: Arc<dyn Storage> = memory.clone();
        let faulty = FaultyStorage::new(memory);
        let disk = (self.open)(faulty.clone()).unwrap();
        let mut model = self.content.to_vec();
        let plan = FaultPlan::nth(kinds, nth).lasting().torn(1);
        faulty.arm(if no_space { plan.no_space() } else { plan });
        for (at, step) in steps() {
            if let Err(error) = perform(&disk, at, &step) {
                assert!(faulty.fired() > 0, "{what}: {error}");
                assert!(error.to_string().contains("image"), "{what}: {error} names no file");
                // A crash now must leave a consistent image.
                assert_sound(self.driver, &image, true, &format!("{what}, failed"));
                faulty.heal();
                perform(&disk, at, &step).unwrap_or_else(|error| panic!("{what}, healed: {error}"));
            }
            apply(&mut model, at, &step);
        }
        let fired = faulty.fired() > 0;
        faulty.heal();
        assert!(read_all(&disk) == model, "{what}: content");
        disk.close().unwrap();
        drop(disk);
        assert_sound(self.driver, &image, true, &what);
        let again = (self.open)(image).unwrap();
        assert!(read_all(&again) == model, "{what}: content when opened again");
        fired
    }
}
