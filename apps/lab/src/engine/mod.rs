//! Runs one round of one cell: prepares a disk, loads it and measures.

mod boot;
mod convert;
mod inside;
mod install;
mod load;
pub mod nospace;
mod open;
mod scores;

pub use scores::references;

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::error::{Context, Result, bail};
use vdkit_block::{CacheMode, CancelToken};
use vdkit_chain::Registry;

use crate::fit;
use crate::front::{self, Front};
use crate::layout::{Content, Layout};
use crate::model::{Axes, Sample, value_of};
use crate::peers::skip;
use crate::place::Place;
use crate::plan::Effort;
use crate::process::{Ended, Line, Running};
use crate::profile::{self, Kind, Profile};

/// The context of one round of a cell.
pub struct Bench<'a> {
    /// Path of the command `vdkit`.
    pub command: PathBuf,
    /// The library's formats.
    pub registry: &'a Registry,
    /// Set when the user interrupts the run.
    pub cancel: CancelToken,
    /// Amount of work per round.
    pub effort: Effort,
    /// Seed of random bytes and random offsets.
    pub seed: u64,
    /// Where the image is created.
    pub place: Place,
    /// An empty folder, on the place if the place is a folder. Removed after the round.
    pub folder: PathBuf,
    /// The cell.
    pub axes: &'a Axes,
    /// Commands in the order in which they were run.
    pub commands: Vec<String>,
    /// Notes for the reader of the results.
    pub notes: Vec<String>,
    /// Scores of the place itself without an image format or server, measured once per run.
    pub references: &'a mut BTreeMap<String, BTreeMap<String, f64>>,
}

impl Bench<'_> {
    pub fn axis(&self, name: &str) -> Option<&str> {
        value_of(self.axes, name)
    }

    /// A command line of `vdkit`.
    pub fn vdkit(&self, arguments: &[&str]) -> Line {
        Line::new(&self.command).args(arguments)
    }

    /// Runs a command and records its command line.
    pub fn run(&mut self, line: &Line) -> Result<Ended> {
        self.commands.push(line.text());
        line.run(&self.cancel)
    }

    /// Starts a server and records its command line.
    pub fn start(&mut self, line: &Line) -> Result<Running> {
        self.commands.push(format!("{} &", line.text()));
        line.start()
    }

    /// Adds a note, unless it is there already.
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

    fn cache(&self) -> Result<CacheMode> {
        let front = self.front()?;
        Ok(self.axis("cache").unwrap_or_else(|| front.default_cache()).parse()?)
    }

    /// The load of the cell.
    pub fn profile(&self) -> Result<&'static Profile> {
        let Some(name) = self.axis("profile") else { bail!("the cell has no profile") };
        profile::find(name).with_context(|| format!("unknown profile '{name}'"))
    }

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

    /// The disk's content before the load. The whole disk is written if the load reads.
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

/// Runs one round of the cell.
///
/// # Errors
/// [`crate::peers::Skip`] if the cell cannot be measured here; the failure of a step;
/// [`vdkit_block::Error::Interrupted`] if the user interrupts.
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

/// Syncs these files, so that no writeback disturbs the measurement.
fn sync(files: &[PathBuf]) -> Result<()> {
    for path in files {
        let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
        file.sync_all().with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// Drops these files from the host's page cache, or, with sufficient rights, drops all caches.
fn drop_caches(files: &[PathBuf]) -> Result<()> {
    // Dirty pages are not dropped.
    sync(files)?;
    for path in files {
        let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)
            .with_context(|| path.display().to_string())?;
    }
    // With sufficient rights, also drop directories and inodes. The image's pages are already
    // dropped.
    let _ = std::fs::write("/proc/sys/vm/drop_caches", "3");
    Ok(())
}

fn values<const N: usize>(values: [(&str, f64); N]) -> BTreeMap<String, f64> {
    values.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}
