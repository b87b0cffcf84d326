//! `qemu-img snapshot`: lists, makes, applies and deletes the snapshots within an image.

use vdkit::jobs::{self, SnapshotAction};
use vdkit::{Disk, Error, Monitor, SnapshotInfo};

use super::{Command, FORCE_SHARE, FORMAT, IMAGE_OPTS, OBJECT, Output, QUIET, one_image, opening};
use crate::dates;
use crate::failure::{Failure, words};
use crate::getopt::{Parsed, flag, valued};
use crate::human;

pub const COMMAND: Command = Command {
    name: "snapshot",
    about: "List or change the snapshots within an image",
    operands: "FILE",
    options: &[
        QUIET,
        FORMAT,
        IMAGE_OPTS,
        FORCE_SHARE,
        OBJECT,
        flag('l', "list", "list the snapshots (the default)"),
        valued('c', "create", "SNAPSHOT", "take a snapshot with this name"),
        valued('a', "apply", "SNAPSHOT", "return to the state of this snapshot"),
        valued('d', "delete", "SNAPSHOT", "delete this snapshot"),
    ],
    run,
};

fn run(parsed: &Parsed, out: &mut Output) -> Result<u8, Failure> {
    let mut actions = parsed
        .in_order()
        .filter(|(name, _)| matches!(*name, "list" | "create" | "apply" | "delete"));
    let action = actions.next();
    if actions.next().is_some() {
        return Err(Failure::usage("Cannot mix '-l', '-a', '-c', '-d'"));
    }
    let file = one_image(parsed)?;
    let action = match action {
        Some(("create", name)) => SnapshotAction::Create(name.to_owned()),
        Some(("apply", name)) => SnapshotAction::Apply(name.to_owned()),
        Some(("delete", name)) => SnapshotAction::Delete(name.to_owned()),
        _ => {
            let disk = opening::disk(parsed, file, false)?;
            out.text(list(&disk.layers()[0].info().snapshots));
            return Ok(0);
        }
    };
    let disk = opening::disk(parsed, file, true)?;
    opening::close(&disk, change(&disk, &action))?;
    Ok(0)
}

fn change(disk: &Disk, action: &SnapshotAction) -> Result<(), Failure> {
    let known = match disk.top().snapshots() {
        Some(snapshots) => Some(snapshots.list()?),
        None => None,
    };
    let has = |which: &str| {
        known.as_ref().is_some_and(|all| all.iter().any(|s| s.id == which || s.name == which))
    };
    // QEMU deletes by name alone, and applies by id or name.
    let named = |which: &str| known.as_ref().is_some_and(|all| all.iter().any(|s| s.name == which));
    let why = match action {
        SnapshotAction::Create(_) if known.is_none() => Some("Operation not supported"),
        SnapshotAction::Apply(_) if known.is_none() => {
            Some("Block driver does not support snapshots")
        }
        SnapshotAction::Apply(which) if !has(which) => {
            Some("Failed to load snapshot: No such file or directory")
        }
        SnapshotAction::Apply(_) if !disk.layers()[0].info().bitmaps.is_empty() => {
            Some("Device has active dirty bitmaps")
        }
        SnapshotAction::Delete(which) if !named(which) => Some("snapshot not found"),
        _ => None,
    };
    if let Some(why) = why {
        return Err(failed(action, why));
    }
    match jobs::snapshot(disk, action, &Monitor::default()) {
        Ok(_) => Ok(()),
        Err(Error::ReadOnly { .. }) => Err(failed(action, "Read-only file system")),
        Err(error) => Err(failed(action, &words(&error))),
    }
}

fn failed(action: &SnapshotAction, why: &str) -> Failure {
    let (verb, name) = match action {
        SnapshotAction::Create(name) => ("create", name),
        SnapshotAction::Apply(name) => ("apply", name),
        SnapshotAction::Delete(name) => ("delete", name),
        SnapshotAction::Rename { which, .. } => ("rename", which),
    };
    Failure::new(format!("Could not {verb} snapshot '{name}': {why}"))
}

/// The list of snapshots with its headings; empty if there are none.
pub fn list(snapshots: &[SnapshotInfo]) -> String {
    match snapshots {
        [] => String::new(),
        _ => format!("Snapshot list:\n{}", table(snapshots)),
    }
}

/// The table of snapshots, with its heading.
pub fn table(snapshots: &[SnapshotInfo]) -> String {
    let mut text = row("ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT");
    for one in snapshots {
        text += &row(
            &one.id,
            &one.name,
            &human::size(one.vm_state_bytes),
            &dates::local(one.date_seconds),
            &dates::clock(one.vm_clock_nanoseconds, 4),
            &one.icount.map_or_else(String::new, |count| count.to_string()),
        );
    }
    text
}

fn row(id: &str, tag: &str, bytes: &str, date: &str, clock: &str, icount: &str) -> String {
    format!("{id:<7} {tag:<16} {bytes:>8} {date:>19} {clock:>15} {icount:>10}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_where_qemu_puts_them() {
        let one = SnapshotInfo {
            id: "1".into(),
            name: "a name that is longer than its column".into(),
            vm_state_bytes: 3 << 20,
            date_seconds: 0,
            date_nanoseconds: 0,
            vm_clock_nanoseconds: 3_723_004_000_000,
            disk_bytes: None,
            icount: None,
        };
        let text =
            table(&[SnapshotInfo { name: "s1".into(), icount: Some(7), ..one.clone() }, one]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(
            lines[0],
            "ID      TAG               VM_SIZE                DATE        VM_CLOCK     ICOUNT"
        );
        assert!(lines[1].starts_with("1       s1                  3 MiB 19"), "{}", lines[1]);
        assert!(lines[1].ends_with("  0001:02:03.004          7"), "{}", lines[1]);
        assert!(lines[2].ends_with("  0001:02:03.004           "), "{}", lines[2]);
    }
}
