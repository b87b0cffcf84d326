//! `vdkit map`: prints where the guest's bytes are stored.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use vdkit::jobs::{self, MapRow};

use super::{Run, Subcommand, runs};
use crate::arguments::{Json, ParentOption, Reading, SnapshotOption, size};
use crate::failure::{Exit, Outcome};
use crate::output::Output;
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "map",
    about: "Show where the guest's bytes are stored",
    details: "\
Prints one line per extent: a range of bytes that are stored in one place, through the whole \
backing chain. Shows extents with data, or with --all every extent.",
    examples: "
vdkit map disk.qcow2                    extents with data
vdkit map --all disk.qcow2              zeroes and holes too
vdkit map --json overlay.qcow2          JSON with qemu-img's keys
vdkit map --start 1G --length 64M disk.qcow2
vdkit map --snapshot golden disk.qcow2  where a snapshot's bytes are stored
",
    ..runs::<MapArgs>()
};

#[derive(Args, Debug)]
pub struct MapArgs {
    /// The image
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// Show extents without data too
    #[arg(long)]
    all: bool,
    /// Begin at this guest offset
    #[arg(short = 's', long, value_name = "OFFSET", value_parser = size)]
    start: Option<u64>,
    /// Show only this many bytes
    #[arg(short = 'l', long, value_name = "SIZE", value_parser = size)]
    length: Option<u64>,
    #[command(flatten)]
    snapshot: SnapshotOption,
    #[command(flatten)]
    parent: ParentOption,
    #[command(flatten)]
    opening: Reading,
    #[command(flatten)]
    json: Json,
}

impl Run for MapArgs {
    fn run(self, session: &mut Session) -> Outcome {
        let options = self
            .opening
            .options()
            .snapshot(self.snapshot.snapshot.clone())
            .backing(self.parent.choice());
        let disk = session.open(&self.image, &options)?;
        let start = self.start.unwrap_or(0);
        let range = super::guest_range(&disk, start, self.length)?;
        let rows = jobs::map(&disk, range.start, range.end - range.start)?;
        if self.json.json {
            let mut array = session.out.json_array();
            for row in rows {
                if !array.push(&row?) {
                    break;
                }
            }
            array.end();
        } else {
            session.out.line(HEADER);
            for row in rows {
                let row = row?;
                if self.all || row.data {
                    print(&row, &mut session.out);
                }
                if session.out.unread() {
                    break;
                }
            }
        }
        Ok(Exit::Done)
    }
}

const HEADER: &str = "offset            length            mapped to         file";

fn print(row: &MapRow<'_>, out: &mut Output) {
    let place = match (row.offset, row.compressed, row.present) {
        (Some(offset), ..) => format!("{offset:#x}"),
        (None, true, _) => "compressed".to_owned(),
        (None, false, true) => "zero".to_owned(),
        (None, false, false) => "nowhere".to_owned(),
    };
    let [start, length] = [row.start, row.length].map(|bytes| format!("{bytes:#x}"));
    let file = row.filename.unwrap_or("-");
    out.line(format!("{start:<16}  {length:<16}  {place:<16}  {file}"))
}
