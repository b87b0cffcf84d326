//! `vdkit map`: where the guest's bytes are.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use serde::Serialize;
use vdkit::{Disk, DiskExtent, DiskPlace, GuestOffset};

use super::{Group, Run, Subcommand, augment, run};
use crate::arguments::{Json, Opening, size};
use crate::failure::{Exit, Failure, Outcome};
use crate::output::Output;
use crate::session::Session;

/// The row of the table.
pub const COMMAND: Subcommand = Subcommand {
    name: "map",
    about: "Show where the guest's bytes are",
    group: Group::Look,
    details: "\
One line a run of bytes that live in one place, through the whole backing chain: runs with data, or \
all of them with --all.",
    examples: "
vdkit map disk.qcow2                    runs that hold data
vdkit map --all disk.qcow2              zeroes and holes as well
vdkit map --json overlay.qcow2          for programs, with the keys of qemu-img
vdkit map --start 1G --length 64M disk.qcow2
",
    augment: augment::<MapArgs>,
    run: run::<MapArgs>,
};

/// Arguments of `vdkit map`.
#[derive(Args, Debug)]
pub struct MapArgs {
    /// The image
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// Show runs without data too
    #[arg(long)]
    all: bool,
    /// Begin at this guest offset
    #[arg(short = 's', long, value_name = "OFFSET", value_parser = size)]
    start: Option<u64>,
    /// Show so many bytes only
    #[arg(short = 'l', long, value_name = "SIZE", value_parser = size)]
    length: Option<u64>,
    #[command(flatten)]
    opening: Opening,
    #[command(flatten)]
    json: Json,
}

/// A run, in JSON, with qemu-img's keys.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row<'a> {
    start: u64,
    length: u64,
    depth: usize,
    present: bool,
    zero: bool,
    data: bool,
    compressed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    filename: Option<&'a str>,
}

impl<'a> Row<'a> {
    /// Whether the next row says the same of the bytes that follow.
    fn continued_by(&self, next: &Self) -> bool {
        self.offset.is_none()
            && next.offset.is_none()
            && (self.depth, self.present, self.zero, self.data, self.compressed, self.filename)
                == (next.depth, next.present, next.zero, next.data, next.compressed, next.filename)
    }

    fn new(run: &DiskExtent<'a>, layers: usize) -> Self {
        let mut answer = Self {
            start: run.at.0,
            length: run.len,
            depth: run.depth.min(layers - 1),
            present: true,
            zero: false,
            data: false,
            compressed: false,
            offset: None,
            filename: None,
        };
        match &run.place {
            DiskPlace::Data { storage, offset } => {
                answer.data = true;
                answer.offset = Some(offset.0);
                answer.filename = Some(storage.name());
            }
            DiskPlace::Packed { storage, .. } => {
                answer.data = true;
                answer.compressed = true;
                answer.filename = Some(storage.name());
            }
            DiskPlace::Zero { .. } => answer.zero = true,
            DiskPlace::Hole => {
                answer.zero = true;
                answer.present = false;
            }
        }
        answer
    }
}

impl Run for MapArgs {
    const ROW: &'static Subcommand = &COMMAND;

    fn run(self, session: &mut Session) -> Outcome {
        let disk = Disk::open(&vdkit::registry(), &self.image, &self.opening.options())?;
        let start = self.start.unwrap_or(0);
        let range = super::guest_range(&disk, start, self.length)?;
        let layers = disk.layers().len();
        let runs = disk.extents(GuestOffset(range.start), range.end - range.start)?;
        let mut rows =
            Rows { rows: runs.map(|run| run.map(|run| Row::new(&run, layers))), ahead: None };
        if self.json.json {
            let mut array = session.out.json_array()?;
            while let Some(row) = rows.next()? {
                array.push(&row)?;
            }
            array.end()?;
        } else {
            session
                .out
                .line(format!("{:<16}  {:<16}  {:<16}  file", "offset", "length", "mapped to"))?;
            while let Some(row) = rows.next()? {
                if self.all || row.data {
                    print(&row, &mut session.out)?;
                }
            }
        }
        Ok(Exit::Done)
    }
}

fn print(row: &Row<'_>, out: &mut Output) -> std::io::Result<()> {
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

/// The rows of a map: neighbours that differ in nothing that is shown are one (compressed clusters
/// each have a place of their own, which is not).
struct Rows<'a, I> {
    rows: I,
    ahead: Option<Row<'a>>,
}

impl<'a, I: Iterator<Item = vdkit::Result<Row<'a>>>> Rows<'a, I> {
    fn next(&mut self) -> Result<Option<Row<'a>>, Failure> {
        let mut row = match self.ahead.take() {
            Some(row) => row,
            None => match self.rows.next().transpose()? {
                Some(row) => row,
                None => return Ok(None),
            },
        };
        while let Some(next) = self.rows.next().transpose()? {
            if !row.continued_by(&next) {
                self.ahead = Some(next);
                break;
            }
            row.length += next.length;
        }
        Ok(Some(row))
    }
}
