//! What is done to a disk, and what is measured of it: one round of one cell.

mod boot;
mod convert;
mod inside;
mod install;
mod load;
pub mod nospace;
mod open;
mod scores;

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::error::{Context, Result, bail};
use vdkit_block::CancelToken;
use vdkit_chain::Registry;

use crate::fit;
use crate::front::{self, Cache, Front};
use crate::layout::{Content, Layout};
use crate::model::{Axes, Sample};
use crate::peers::skip;
use crate::place::Place;
use crate::plan::Effort;
use crate::process::{Ended, Line, Running};
use crate::profile::{self, Kind, Profile};

/// What one round of a cell works with.
pub struct Bench<'a> {
    /// The command `vdkit`.
    pub command: PathBuf,
    /// The library's formats.
    pub registry: &'a Registry,
    /// Where the user stops it.
    pub cancel: CancelToken,
    /// How much is done.
    pub effort: Effort,
    /// For random bytes and places.
    pub seed: u64,
    /// Where the image is put.
    pub place: &'a Place,
    /// An empty folder, beneath the place where that is a folder; removed after the round.
    pub folder: PathBuf,
    /// The cell.
    pub axes: &'a Axes,
    /// Commands as they are run.
    pub commands: Vec<String>,
    /// What a reader should know.
    pub notes: Vec<String>,
    /// What the bare place does, for scores: measured once.
    pub references: &'a mut BTreeMap<String, BTreeMap<String, f64>>,
}

impl Bench<'_> {
    /// The value of an axis.
    pub fn axis(&self, name: &str) -> Option<&str> {
        self.axes.iter().find(|(axis, _)| axis == name).map(|(_, value)| value.as_str())
    }

    /// The command `vdkit`.
    pub fn vdkit(&self, arguments: &[&str]) -> Line {
        Line::new(&self.command).args(arguments)
    }

    /// Runs a command, and keeps its line.
    ///
    /// # Errors
    /// As [`Line::run`].
    pub fn run(&mut self, line: &Line) -> Result<Ended> {
        self.commands.push(line.text());
        line.run(&self.cancel)
    }

    /// Starts a server, and keeps its line.
    ///
    /// # Errors
    /// As [`Line::start`].
    pub fn start(&mut self, line: &Line) -> Result<Running> {
        self.commands.push(format!("{} &", line.text()));
        line.start()
    }

    /// Adds a note once.
    pub fn note(&mut self, text: &str) {
        if !self.notes.iter().any(|note| note == text) {
            self.notes.push(text.to_owned());
        }
    }

    fn layout(&self) -> Result<&'static Layout> {
        fit::layout_of(self.axes).map_err(crate::Error::msg)
    }

    fn front(&self) -> Result<&'static Front> {
        let name = self.axis("front").unwrap_or("nbd");
        front::find(name).with_context(|| format!("unknown front '{name}'"))
    }

    fn cache(&self) -> Result<Cache> {
        let front = self.front()?;
        Cache::named(self.axis("cache").unwrap_or_else(|| front.default_cache()))
    }

    /// The load of the cell.
    ///
    /// # Errors
    /// The plan names none.
    pub fn profile(&self) -> Result<&'static Profile> {
        let Some(name) = self.axis("profile") else { bail!("the cell has no profile") };
        profile::find(name).with_context(|| format!("unknown profile '{name}'"))
    }

    /// Size of the disk.
    fn disk_bytes(&mut self) -> Result<u64> {
        let fit = match fit::fit(self.axes, &self.effort, &self.place.info) {
            Ok(fit) => fit,
            Err(unfit) => return skip(unfit.to_string()),
        };
        if fit.disk < fit.wanted {
            self.note(&format!(
                "the disk has {} MiB instead of {} MiB: a format's tables have to be on the device too",
                fit.disk >> 20,
                fit.wanted >> 20
            ));
        }
        Ok(fit.disk)
    }

    /// What the disk holds before the load; all of it is written where the load reads.
    fn content(&self, reads: bool) -> Content {
        match self.axis("content") {
            _ if reads => Content::All,
            Some("sparse") => Content::Sparse,
            Some("full") => Content::Full,
            _ => Content::Nothing,
        }
    }

    fn images(&self) -> usize {
        fit::images_of(self.axes) as usize
    }
}

/// Takes one round of the cell.
///
/// # Errors
/// [`crate::peers::Skip`] where the cell cannot be measured here; what has failed;
/// [`vdkit_block::Error::Interrupted`] where the user has had enough.
pub fn sample(bench: &mut Bench<'_>) -> Result<Sample> {
    match bench.profile()?.kind {
        Kind::Load(load) => load::sample(bench, &load),
        Kind::Scores => scores::sample(bench),
        Kind::Convert => convert::sample(bench),
        Kind::Open => open::sample(bench),
        Kind::Install => install::sample(bench),
        Kind::Boot => boot::sample(bench),
        Kind::NoSpace => nospace::sample(bench),
    }
}

/// Makes these files durable, so that nothing of them is written while something is measured.
fn sync(files: &[PathBuf]) -> Result<()> {
    for path in files {
        let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
        file.sync_all().with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// Forgets what the host keeps in memory of these files; all of it where we may.
fn drop_caches(files: &[PathBuf]) -> Result<()> {
    // Dirty pages would stay.
    sync(files)?;
    for path in files {
        let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)
            .with_context(|| path.display().to_string())?;
    }
    // Folders and inodes too, where we may; the bytes of the image are gone already.
    let _ = std::fs::write("/proc/sys/vm/drop_caches", "3");
    Ok(())
}

fn values<const N: usize>(values: [(&str, f64); N]) -> BTreeMap<String, f64> {
    values.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}
