//! EIO and ENOSPC at each storage operation in turn: the snapshot operation is done or not, and
//! works later.

use std::sync::Arc;

use vdkit_block::{
    Format, GuestOffset, Limits, Monitor, NewSnapshot, OpenRequest, Result, Storage,
};
use vdkit_chain::Disk;
use vdkit_qcow2::Qcow2;
use vdkit_storage::MemoryStorage;
use vdkit_testkit::{FaultKind, FaultPlan, FaultyStorage, assert_sound, create_image};

use super::support::rig;
use super::world::snapshots;

const GUEST_BYTES: u64 = 1 << 20;

fn image(options: &str) -> Arc<MemoryStorage> {
    let memory = Arc::new(MemoryStorage::new("image"));
    create_image(vdkit::format("qcow2").unwrap(), memory.clone(), GUEST_BYTES, options);
    memory
}

fn open(storage: Arc<dyn Storage>) -> Result<Disk> {
    let limits = Limits::default();
    let format: Arc<dyn Format> =
        Qcow2::open(OpenRequest { storage, files: Vec::new(), writable: true, limits })?;
    Ok(rig::disk(format, true))
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Write(u64, u64, u8),
    Create(&'static str),
    Apply(&'static str),
    Delete(&'static str),
    Rename(&'static str, &'static str),
}

const SCRIPT: &[Step] = &[
    Step::Write(0, 300_000, 1),
    Step::Create("a"),
    Step::Write(100_000, 50_000, 2),
    Step::Create("b"),
    Step::Write(600_000, 50_000, 3),
    Step::Rename("a", "c"),
    Step::Apply("c"),
    Step::Write(10_000, 5_000, 4),
    Step::Delete("b"),
    Step::Delete("c"),
];

/// The names of all snapshots, and the disk.
#[derive(Clone, Debug, PartialEq)]
struct State {
    names: Vec<String>,
    bytes: Vec<u8>,
}

fn try_state(disk: &Disk) -> Result<State> {
    let names = snapshots(disk).list()?.into_iter().map(|s| s.name).collect();
    let mut bytes = vec![0; disk.guest_bytes() as usize];
    disk.read_at(&mut bytes, GuestOffset(0))?;
    Ok(State { names, bytes })
}

fn state(disk: &Disk) -> State {
    try_state(disk).unwrap()
}

fn perform(disk: &Disk, step: Step) -> Result<()> {
    let (all, monitor) = (snapshots(disk), Monitor::default());
    match step {
        Step::Write(at, len, byte) => disk.write_at(&vec![byte; len as usize], GuestOffset(at)),
        Step::Create(name) => {
            let new = NewSnapshot { name: name.into(), ..NewSnapshot::default() };
            all.create(&new, &monitor).map(|_| ())
        }
        Step::Apply(name) => all.apply(name, &monitor).map(|_| ()),
        Step::Delete(name) => all.delete(name, &monitor).map(|_| ()),
        Step::Rename(name, new) => all.rename(name, new).map(|_| ()),
    }
}

/// The state before each step and after the last, without faults.
fn states(options: &str) -> Vec<State> {
    let disk = open(image(options)).unwrap();
    let mut states = vec![state(&disk)];
    for &step in SCRIPT {
        perform(&disk, step).unwrap();
        states.push(state(&disk));
    }
    states
}

fn audit(storage: &Arc<dyn Storage>, what: &str) {
    assert_sound(vdkit::format("qcow2").unwrap(), storage, true, what);
}

/// Runs the script with a fault at the `nth` operation of these kinds. Returns whether it fired.
fn run(options: &str, states: &[State], plan: FaultPlan, what: &str) -> bool {
    let memory = image(options);
    let storage: Arc<dyn Storage> = memory.clone();
    let faulty = FaultyStorage::new(memory);
    let mut disk = open(faulty.clone() as Arc<dyn Storage>).unwrap();
    faulty.arm(plan);
    for (index, &step) in SCRIPT.iter().enumerate() {
        let what = format!("{what}: {step:?}");
        if let Err(error) = perform(&disk, step) {
            assert!(faulty.fired() > 0, "{what}: {error}");
            faulty.heal();
            audit(&storage, &format!("{what}, failed"));
            if error.to_string().contains("taking it back") || perform(&disk, step).is_err() {
                // Both the header's write and its revert failed: the image refuses requests until
                // it is reopened, and then shows the old or the new state.
                drop(disk);
                disk = open(faulty.clone() as Arc<dyn Storage>).unwrap();
                let now = state(&disk);
                if now != states[index + 1] {
                    assert!(now.names == states[index].names, "{what}: {:?}", now.names);
                    perform(&disk, step).unwrap_or_else(|e| panic!("{what}, opened again: {e}"));
                }
            }
        }
        let now = try_state(&disk).unwrap_or_else(|_| {
            // This read hit the fault.
            faulty.heal();
            state(&disk)
        });
        assert!(now == states[index + 1], "{what}: state");
    }
    let fired = faulty.fired() > 0;
    faulty.heal();
    disk.close().unwrap();
    drop(disk);
    audit(&storage, what);
    assert!(state(&open(storage).unwrap()) == *states.last().unwrap(), "{what}: opened again");
    fired
}

#[test]
fn each_operation_may_fail_and_work_later() {
    for options in ["cluster_size=4K", "cluster_size=512", "cluster_size=16K,extended_l2=on"] {
        let states = states(options);
        for (kinds, no_space, lasting) in [
            (&[FaultKind::Write][..], false, false),
            (&[FaultKind::Write][..], false, true),
            (&[FaultKind::Write, FaultKind::SetLen, FaultKind::Zero][..], true, true),
            (&[FaultKind::Read][..], false, true),
            (&[FaultKind::Sync][..], false, false),
            (&[FaultKind::Sync][..], false, true),
            (&[FaultKind::Discard, FaultKind::Zero][..], false, true),
        ] {
            let mut nth = 0;
            loop {
                let mut plan = FaultPlan::nth(kinds, nth).torn(1);
                plan = if lasting { plan.lasting() } else { plan };
                plan = if no_space { plan.no_space() } else { plan };
                let what = format!("{options}: {kinds:?} {nth}, lasting: {lasting}");
                if !run(options, &states, plan, &what) {
                    break;
                }
                // Small clusters cause thousands of operations: test all of the first, then
                // samples.
                nth += 1 + nth / 24;
            }
        }
    }
}
