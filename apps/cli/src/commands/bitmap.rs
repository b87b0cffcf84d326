//! `vdkit bitmap`: persistent dirty bitmaps.

use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};
use serde::Serialize;
use vdkit::jobs::{bitmaps, merge_bitmap};
use vdkit::{BackingChoice, BitmapInfo, BitmapStatus, Bitmaps, Disk, NewBitmap, OpenOptions};

use super::{Run, Subcommand, runs};
use crate::arguments::{Json, References, size};
use crate::failure::{Exit, Failure, Outcome};
use crate::keys::Keys;
use crate::output::{Table, bytes_short};
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "bitmap",
    about: "Record which parts of a disk were written, for incremental backups",
    details: "\
A dirty bitmap is stored in the image and marks what was written since the bitmap was added or \
cleared. Enabled bitmaps record while vdkit or QEMU has the image open for writing. They survive a \
power failure: the marks of flushed writes are kept.

  list      list the bitmaps, and how much is dirty
  add       add a bitmap without marks
  remove    remove a bitmap
  clear     clear a bitmap's marks
  enable    start recording
  disable   stop recording
  merge     add the marks of a bitmap to another: IMAGE SOURCE --into NAME
  dirty     list the extents that a bitmap marks",
    examples: "
vdkit bitmap add disk.qcow2 monday              records from now on, per cluster
vdkit bitmap add -g 4K --disabled disk.qcow2 all
vdkit bitmap list disk.qcow2
vdkit bitmap dirty --json disk.qcow2 monday     what to back up
vdkit bitmap merge disk.qcow2 monday --into all
vdkit bitmap merge -b old.qcow2 disk.qcow2 tuesday --into all
vdkit bitmap clear disk.qcow2 monday
",
    ..runs::<BitmapArgs>()
};

#[derive(Args, Debug)]
pub struct BitmapArgs {
    /// Action: list, add, remove, clear, enable, disable, merge or dirty
    #[arg(value_name = "ACTION", hide_possible_values = true)]
    action: Action,
    /// The image
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// Name of the bitmap (every action but list; for merge with --into, of the SOURCE)
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// For merge without --into: the bitmap whose marks are added to NAME
    #[arg(value_name = "SOURCE")]
    source: Option<String>,
    /// For merge: the bitmap that gets the marks
    #[arg(long, value_name = "NAME")]
    into: Option<String>,
    /// For add: bytes per mark, a power of two from 512 to 2G
    ///
    /// The default is the cluster size, between 4K and 64K.
    #[arg(short = 'g', long, value_name = "SIZE", value_parser = size)]
    granularity: Option<u64>,
    /// For add: create the bitmap disabled
    #[arg(long)]
    disabled: bool,
    /// For merge: the image with SOURCE, if it is another image
    #[arg(short = 'b', long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    source_file: Option<PathBuf>,
    /// Format of that image (default: probed from its header)
    #[arg(short = 'F', long, value_name = "FORMAT", requires = "source_file")]
    source_format: Option<String>,
    /// Format of the image (default: probed from its header)
    #[arg(short = 'f', long, value_name = "FORMAT")]
    format: Option<String>,
    /// Read the image even while another process writes it (list and dirty)
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    references: References,
    #[command(flatten)]
    keys: Keys,
    #[command(flatten)]
    json: Json,
}

/// The first argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Action {
    List,
    Add,
    Remove,
    Clear,
    Enable,
    Disable,
    Merge,
    Dirty,
}

impl Action {
    fn changes(self) -> bool {
        !matches!(self, Self::List | Self::Dirty)
    }
}

/// The JSON answer of every action but `dirty`.
#[derive(Serialize)]
struct BitmapAnswer {
    filename: String,
    bitmaps: Vec<BitmapStatus>,
}

/// One dirty run in the JSON answer of `dirty`.
#[derive(Serialize)]
struct DirtyRun {
    start: u64,
    length: u64,
}

impl BitmapArgs {
    /// Checks that the action's required arguments are there and no others.
    fn check(&self) -> Result<(), Failure> {
        let action = self.action;
        let wanted = match action {
            Action::List => 0,
            Action::Merge if self.into.is_none() => 2,
            _ => 1,
        };
        let given = usize::from(self.name.is_some()) + usize::from(self.source.is_some());
        if given < wanted {
            let what = if given == 0 { "the NAME of a bitmap" } else { "the SOURCE bitmap too" };
            return Err(Failure::usage(format!("{what} is missing")));
        }
        if given > wanted {
            return Err(Failure::usage("too many names are given"));
        }
        if action != Action::Add && (self.granularity.is_some() || self.disabled) {
            return Err(Failure::usage("--granularity and --disabled are for add"));
        }
        if action != Action::Merge && (self.source_file.is_some() || self.into.is_some()) {
            return Err(Failure::usage("--source-file and --into are for merge"));
        }
        if action.changes() && self.force_share {
            return Err(Failure::usage("--force-share is for list and dirty"));
        }
        Ok(())
    }

    /// Options for opening the image without its backing chain: bitmaps belong to the image alone.
    fn options(&self) -> OpenOptions {
        let options = if self.action.changes() {
            OpenOptions::read_write()
        } else {
            OpenOptions::read_only().lock(!self.force_share)
        };
        let options = options.maybe_format(self.format.clone()).refs(self.references.policy());
        self.keys.apply(options).backing(BackingChoice::Ignore)
    }

    fn change(&self, disk: &Disk, name: &str, session: &Session) -> Result<(), Failure> {
        let all = bitmaps(disk)?;
        match self.action {
            Action::List | Action::Dirty => {}
            Action::Add => all.add(&NewBitmap {
                name,
                granularity: self.granularity,
                enabled: !self.disabled,
            })?,
            Action::Remove => all.remove(name)?,
            Action::Clear => all.clear(name)?,
            Action::Enable => all.set_enabled(name, true)?,
            Action::Disable => all.set_enabled(name, false)?,
            Action::Merge => self.merge(disk, name, session)?,
        }
        Ok(())
    }

    fn merge(&self, disk: &Disk, first: &str, session: &Session) -> Result<(), Failure> {
        let (name, source_name) = match &self.into {
            Some(into) => (into.as_str(), first),
            None => (first, self.source.as_deref().unwrap_or_default()),
        };
        let Some(path) = &self.source_file else {
            return Ok(merge_bitmap(disk, name, disk, source_name)?);
        };
        let options = OpenOptions::read_only()
            .maybe_format(self.source_format.clone())
            .refs(self.references.policy());
        let options = self.keys.apply(options).backing(BackingChoice::Ignore);
        let source = session.open(path, &options)?;
        Ok(merge_bitmap(disk, name, &source, source_name)?)
    }

    fn print_list(&self, list: Vec<BitmapStatus>, session: &mut Session) -> Outcome {
        if self.json.json {
            let filename = self.image.display().to_string();
            session.out.json(&BitmapAnswer { filename, bitmaps: list });
            return Ok(Exit::Done);
        }
        let mut table = Table::new(&["name", ">granularity", "state", ">dirty"]);
        for BitmapStatus { info, dirty_bytes } in list {
            let state = state(&info).to_owned();
            let dirty = dirty_bytes.map_or_else(|| "-".to_owned(), bytes_short);
            table.row([info.name, bytes_short(info.granularity), state, dirty]);
        }
        table.print(&mut session.out, 0);
        Ok(Exit::Done)
    }
}

/// The state of a bitmap in a table.
pub(super) fn state(bitmap: &BitmapInfo) -> &'static str {
    match (bitmap.in_use, bitmap.enabled) {
        (true, _) => "not to be trusted",
        (false, true) => "enabled",
        (false, false) => "disabled",
    }
}

/// Calls `print` for each dirty run, until it returns false.
fn each_dirty(
    all: &dyn Bitmaps,
    name: &str,
    mut print: impl FnMut(u64, u64) -> bool,
) -> Result<(), Failure> {
    let mut read = true;
    let visited = all.for_each_dirty(name, &mut |run| {
        read = print(run.start, run.end - run.start);
        if read { Ok(()) } else { Err(vdkit::Error::Interrupted) }
    });
    if read { Ok(visited?) } else { Ok(()) }
}

fn dirty_json(all: &dyn Bitmaps, name: &str, session: &mut Session) -> Outcome {
    let mut array = session.out.json_array();
    each_dirty(all, name, |start, length| array.push(&DirtyRun { start, length }))?;
    array.end();
    Ok(Exit::Done)
}

fn dirty_text(all: &dyn Bitmaps, name: &str, session: &mut Session) -> Outcome {
    let header = "offset            length";
    // Nothing may be printed if there is no such bitmap.
    let mut begun = false;
    each_dirty(all, name, |start, length| {
        if !std::mem::replace(&mut begun, true) {
            session.out.line(header);
        }
        let [start, length] = [start, length].map(|bytes| format!("{bytes:#x}"));
        session.out.line(format!("{start:<16}  {length}"));
        !session.out.unread()
    })?;
    if !begun {
        session.out.line(header);
    }
    Ok(Exit::Done)
}

impl Run for BitmapArgs {
    fn run(self, session: &mut Session) -> Outcome {
        self.check()?;
        let disk = session.open(&self.image, &self.options())?;
        let name = self.name.as_deref().unwrap_or_default();
        if !self.action.changes() {
            let all = bitmaps(&disk)?;
            return match self.action {
                Action::Dirty if self.json.json => dirty_json(all, name, session),
                Action::Dirty => dirty_text(all, name, session),
                _ => self.print_list(all.list()?, session),
            };
        }
        let changed = self.change(&disk, name, session);
        let list = changed.and_then(|()| Ok(bitmaps(&disk)?.list()?));
        let list = super::closed(&disk, list)?;
        if self.json.json { self.print_list(list, session) } else { Ok(Exit::Done) }
    }
}
