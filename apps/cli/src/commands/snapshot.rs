//! `vdkit snapshot`: manages snapshots inside an image.

use std::path::PathBuf;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum, ValueHint};
use serde::Serialize;
use vdkit::jobs::{self, SnapshotAction};
use vdkit::{BackingChoice, Disk, SnapshotInfo};
use vdkit_qemu::dates;

use super::{Run, Subcommand, runs};
use crate::arguments::{Force, Json, ProgressOption, Reading};
use crate::failure::{Exit, Failure, Outcome};
use crate::guard;
use crate::output::{Output, Table, bytes_short};
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "snapshot",
    about: "List, create, apply, delete or rename snapshots inside an image",
    details: "\
A snapshot keeps the current state of the disk. It costs a little metadata, whatever the disk's \
size. 'apply' restores the state of a snapshot: later writes are lost, unless another snapshot has \
them. A power failure leaves the image before or after the change, never in between.

  list IMAGE                    list the snapshots
  create IMAGE NAME             keep the current state of the disk
  apply IMAGE SNAPSHOT          restore the state of a snapshot
  delete IMAGE SNAPSHOT         delete a snapshot, and free the space that only it used
  rename IMAGE SNAPSHOT NAME    rename a snapshot

SNAPSHOT is a name or an id. As in qemu-img, 'apply' tries ids first, 'delete' and 'rename' try \
names first, and the first of several equal names is used. 'convert', 'compare', 'map', 'read' and \
'dd' read a snapshot with --snapshot.",
    examples: "
vdkit snapshot create disk.qcow2 before-update
vdkit snapshot list disk.qcow2
vdkit snapshot apply disk.qcow2 before-update
vdkit snapshot rename disk.qcow2 before-update golden
vdkit snapshot delete disk.qcow2 golden
vdkit convert disk.qcow2 old.raw --snapshot golden  a snapshot as an image
",
    ..runs::<SnapshotArgs>()
};

#[derive(Args, Debug)]
#[command(
    override_usage = "vdkit snapshot list|create|apply|delete|rename [OPTIONS] IMAGE [SNAPSHOT] [NAME]"
)]
pub struct SnapshotArgs {
    /// Action: list, create, apply, delete or rename
    #[arg(value_name = "ACTION", hide_possible_values = true)]
    action: Action,
    /// The image
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// The snapshot, by name or id; for create, and last for rename, the new name
    #[arg(value_name = "SNAPSHOT", num_args = 0..=2, value_parser = NonEmptyStringValueParser::new())]
    names: Vec<String>,
    #[command(flatten)]
    force: Force,
    #[command(flatten)]
    opening: Reading,
    #[command(flatten)]
    progress: ProgressOption,
    #[command(flatten)]
    json: Json,
}

/// The value of ACTION.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Action {
    List,
    Create,
    Apply,
    Delete,
    Rename,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct SnapshotAnswer {
    filename: String,
    action: Action,
    /// Every snapshot for `list`, else the one that the action concerned.
    snapshots: Vec<SnapshotInfo>,
    virtual_size: u64,
}

impl SnapshotArgs {
    /// The requested change; none for `list`.
    fn asked(&self) -> Result<Option<SnapshotAction>, Failure> {
        let names: Vec<String> = self.names.clone();
        let count = names.len();
        let mut names = names.into_iter();
        let action = match (self.action, count, names.next(), names.next()) {
            (Action::List, 0, ..) => return Ok(None),
            (Action::Create, 1, Some(name), _) => SnapshotAction::Create(name),
            (Action::Apply, 1, Some(which), _) => SnapshotAction::Apply(which),
            (Action::Delete, 1, Some(which), _) => SnapshotAction::Delete(which),
            (Action::Rename, 2, Some(which), Some(name)) => SnapshotAction::Rename { which, name },
            _ => {
                let wanted = match self.action {
                    Action::List => "list IMAGE",
                    Action::Create => "create IMAGE NAME",
                    Action::Apply => "apply IMAGE SNAPSHOT",
                    Action::Delete => "delete IMAGE SNAPSHOT",
                    Action::Rename => "rename IMAGE SNAPSHOT NAME",
                };
                return Err(Failure::usage(format!(
                    "names are missing or too many; write 'vdkit snapshot {wanted}'"
                )));
            }
        };
        if self.opening.opening.force_share {
            return Err(Failure::usage("-U has no meaning here: only 'list' can share the image"));
        }
        Ok(Some(action))
    }

    fn change(
        &self,
        disk: &Disk,
        action: &SnapshotAction,
        session: &mut Session,
    ) -> Result<SnapshotInfo, Failure> {
        let done = self
            .progress
            .run("snapshot", session, |monitor| jobs::snapshot(disk, action, monitor))?;
        super::closed(disk, done)
    }
}

impl Run for SnapshotArgs {
    fn run(self, session: &mut Session) -> Outcome {
        let asked = self.asked()?;
        if self.action == Action::Apply {
            let cancel = session.cancel_on_signal()?;
            guard::refuse_dependents(
                &self.image,
                self.force.force,
                "applying a snapshot to it",
                &cancel,
            )?;
        }
        let mut options = self.opening.options();
        options.writable = asked.is_some();
        // Snapshots need only the image itself, not its backing chain.
        options.backing = BackingChoice::Ignore;
        let disk = session.open(&self.image, &options)?;
        let snapshots = match &asked {
            None => jobs::snapshots(&disk)?,
            Some(action) => vec![self.change(&disk, action, session)?],
        };
        if self.json.json {
            session.out.json(&SnapshotAnswer {
                filename: self.image.display().to_string(),
                action: self.action,
                snapshots,
                virtual_size: disk.guest_bytes(),
            });
        } else if asked.is_none() {
            print_list(&snapshots, &mut session.out, 0);
        } else {
            for snapshot in &snapshots {
                let image = self.image.display();
                session.out.line(summary(self.action, &image.to_string(), snapshot));
            }
        }
        Ok(Exit::Done)
    }
}

fn summary(action: Action, image: &str, snapshot: &SnapshotInfo) -> String {
    let SnapshotInfo { id, name, .. } = snapshot;
    match action {
        Action::Create => format!("{image}: snapshot {id} is '{name}'"),
        Action::Apply => format!("{image}: the disk is again as in snapshot {id}, '{name}'"),
        Action::Delete => format!("{image}: snapshot {id}, '{name}', is gone"),
        Action::List | Action::Rename => format!("{image}: snapshot {id} is called '{name}' now"),
    }
}

/// Prints snapshots as a table, indented by `indent` spaces.
pub(super) fn print_list(snapshots: &[SnapshotInfo], out: &mut Output, indent: usize) {
    let mut table = Table::new(&["id", "name", ">VM state", "taken (UTC)", ">VM clock", ">disk"]);
    for snapshot in snapshots {
        table.row([
            snapshot.id.clone(),
            snapshot.name.clone(),
            bytes_short(snapshot.vm_state_bytes),
            dates::utc(snapshot.date_seconds),
            dates::clock(snapshot.vm_clock_nanoseconds, 1),
            snapshot.disk_bytes.map_or_else(|| "-".to_owned(), bytes_short),
        ]);
    }
    table.print(out, indent)
}
