//! A disk with snapshots, and their expected content.

use std::rc::Rc;

use proptest::prelude::*;
use vdkit_block::{Format, GuestOffset, Monitor, NewSnapshot, Result, Snapshots};
use vdkit_chain::Disk;

use super::support::guest::Guest;
use super::support::ops::{self, Op, Step};
use super::support::rig::Rig;
use super::support::shape::{DataFile, Shape};

/// Snapshot operations, with numbers that fit any list.
#[derive(Clone, Copy, Debug)]
pub enum SnapshotOp {
    Create(u8),
    Apply(u8),
    Delete(u8),
    Rename(u8),
}

/// A step on the disk or its snapshots.
#[derive(Clone, Copy, Debug)]
pub enum Move {
    Disk(Step),
    SnapshotOp(SnapshotOp),
}

pub fn deeds() -> impl Strategy<Value = SnapshotOp> {
    prop_oneof![
        4 => any::<u8>().prop_map(SnapshotOp::Create),
        3 => any::<u8>().prop_map(SnapshotOp::Apply),
        3 => any::<u8>().prop_map(SnapshotOp::Delete),
        1 => any::<u8>().prop_map(SnapshotOp::Rename),
    ]
}

/// One snapshot.
#[derive(Clone, Debug)]
pub struct Taken {
    pub id: String,
    pub name: String,
    pub guest: Rc<Guest>,
}

/// Expected content of an image.
#[derive(Clone, Debug)]
pub struct World {
    pub guest: Guest,
    pub taken: Vec<Taken>,
}

pub fn snapshots(disk: &Disk) -> &dyn Snapshots {
    disk.top().snapshots().expect("qcow2 has snapshots")
}

/// Whether such an image supports snapshots.
pub fn fits(shape: &Shape) -> bool {
    shape.data_file == DataFile::Inside && !shape.wide
}

impl World {
    /// Initial state of a fresh rig; QEMU's snapshots are read once.
    pub fn of(rig: &Rig, guest: Guest) -> Self {
        let format = rig.format(false).expect("opening a good image");
        let list = Snapshots::list(&*format).expect("a list");
        let taken = list.iter().map(|info| {
            let view = rig.over_base(format.view(&info.id).expect("a view"), false);
            let mut buf = vec![0; view.guest_bytes() as usize];
            view.read_at(&mut buf, GuestOffset(0)).expect("reading a snapshot");
            let memory = vdkit_storage::MemoryStorage::from_bytes("taken", &buf);
            Taken { id: info.id.clone(), name: info.name.clone(), guest: Rc::new(Guest(memory)) }
        });
        Self { taken: taken.collect(), guest }
    }

    /// Runs an operation; `false` if refcounts are too narrow, which must change nothing.
    pub fn perform(&mut self, shape: &Shape, disk: &Disk, deed: SnapshotOp) -> Result<bool> {
        let before = self.clone();
        match self.try_deed(disk, deed) {
            Err(error)
                // Each snapshot counts a cluster once per compressed unit in it.
                if error.to_string().contains("refcounts of") && shape.refcount_bits <= 8 =>
            {
                *self = before;
                Ok(false)
            }
            result => result.map(|()| true),
        }
    }

    fn try_deed(&mut self, disk: &Disk, deed: SnapshotOp) -> Result<()> {
        let (all, monitor) = (snapshots(disk), Monitor::default());
        let pick = |n: u8| n as usize % self.taken.len();
        match deed {
            SnapshotOp::Create(n) => {
                let new = NewSnapshot {
                    name: format!("name {n}"),
                    date_seconds: 7,
                    ..NewSnapshot::default()
                };
                let largest = self.taken.iter().filter_map(|t| t.id.parse::<u64>().ok()).max();
                let info = all.create(&new, &monitor)?;
                assert_eq!(info.id, (largest.unwrap_or(0) + 1).to_string());
                let guest = Rc::new(self.guest.clone());
                self.taken.push(Taken { id: info.id, name: info.name, guest });
            }
            _ if self.taken.is_empty() => {}
            SnapshotOp::Apply(n) => {
                let taken = &self.taken[pick(n)];
                let guest = Guest::clone(&taken.guest);
                all.apply(&taken.id, &monitor)?;
                self.guest = guest;
            }
            SnapshotOp::Delete(n) => {
                let index = pick(n);
                // By name, the first snapshot with that name is deleted.
                let name = self.taken[index].name.clone();
                let first = self.taken.iter().position(|t| t.name == name).unwrap_or(index);
                let info = all.delete(&name, &monitor)?;
                assert_eq!(info.id, self.taken[first].id);
                self.taken.remove(first);
            }
            SnapshotOp::Rename(n) => {
                let index = pick(n);
                let name = format!("renamed {n}");
                all.rename(&self.taken[index].id, &name)?;
                self.taken[index].name = name;
            }
        }
        Ok(())
    }

    /// The list must match.
    pub fn listed(&self, format: &dyn Format) -> bool {
        let list = format.snapshots().and_then(|all| all.list().ok()).expect("a list");
        list.len() == self.taken.len()
            && list.iter().zip(&self.taken).all(|(a, b)| a.id == b.id && a.name == b.name)
    }

    /// The disk and each snapshot must have the expected content.
    pub fn compare(&self, rig: &Rig, disk: &Disk, what: &str) {
        rig.compare(disk, &self.guest, what);
        self.compare_snapshots(rig, &**disk.top(), what);
    }

    pub fn compare_snapshots(&self, rig: &Rig, format: &dyn Format, what: &str) {
        assert!(self.listed(format), "{what}: the list of snapshots");
        let all = format.snapshots().expect("qcow2 has snapshots");
        for taken in &self.taken {
            let view = rig.over_base(all.view(&taken.id).expect("a view"), false);
            rig.compare(
                &view,
                &taken.guest,
                &format!("{what}: snapshot {} ({})", taken.id, taken.name),
            );
        }
    }
}

/// Whether a disk has the expected content.
pub fn reads_as(disk: &Disk, guest: &Guest) -> bool {
    if disk.guest_bytes() != guest.len() {
        return false;
    }
    let mut buf = vec![0xee; guest.len() as usize];
    disk.read_at(&mut buf, GuestOffset(0)).expect("reading back");
    buf == guest.read(0, guest.len())
}

/// The disk operation of a step, in the presence of snapshots.
pub fn on_disk(step: Step, shape: &Shape, guest_bytes: u64) -> Op {
    match step.on(shape, guest_bytes) {
        // Refused: version 2 need not record a snapshot's size.
        Op::Resize { .. } if shape.version == 2 => Op::Flush,
        op => op,
    }
}

/// Runs a step other than reopening.
pub fn step_on(shape: &Shape, disk: &Disk, world: &mut World, op: Op, id: u64) -> Result<()> {
    ops::apply(shape, disk, &mut world.guest, op, id)
}
