//! Runs a plan: measures every cell once per round in random order, and stores each sample
//! immediately.

mod cost;
mod estimate;
mod resume;
mod rounds;
mod speed;
mod trial;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::error::{Context, Error, Result, bail};
use serde::{Deserialize, Serialize};
use vdkit_block::Monitor;
use vdkit_chain::Registry;

use crate::axes;
use crate::cells::{self, Rng};
use crate::engine::{self, Bench};
use crate::environment::{self, block, load};
use crate::fit;
use crate::front;
use crate::model::{
    Cell, Environment, Outcome, PlaceInfo, PlaceKind, PlanSummary, Run, Sample, Warning,
};
use crate::peers::Skip;
use crate::place::{self, Place, device};
use crate::plan::{Effort, Plan};
use crate::stats::steady;
use crate::store::Store;
use crate::words::label;

pub use estimate::Estimate;
use rounds::Rounds;
use speed::Speed;

/// The user's request, stored with the results so that an interrupted run can be resumed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// The plan's source text.
    pub plan: String,
    /// Where the source text came from.
    pub origin: String,
    /// Whether this is a quick run.
    pub quick: bool,
    /// Seed of the order of the cells and of random bytes.
    pub seed: u64,
    /// A fixed number of rounds.
    pub rounds: Option<u32>,
    /// Time limit in seconds for additional rounds while comparisons are undecided.
    #[serde(default)]
    pub seconds: Option<u64>,
    /// Folders for images.
    pub folders: Vec<PathBuf>,
    /// Devices for images.
    pub devices: Vec<PathBuf>,
    /// What identifies the devices of the places, by the places' paths. The run records it.
    #[serde(default)]
    pub identities: BTreeMap<String, String>,
}

/// What a run needs from its caller.
pub struct Tools<'a> {
    /// Path of the command `vdkit`.
    pub command: PathBuf,
    /// Version of the command.
    pub version: String,
    /// The library's formats.
    pub registry: &'a Registry,
    /// Devices that the user named for overwriting.
    pub erase: Vec<PathBuf>,
    /// Asks the user to confirm another device; none without a terminal.
    pub ask: Option<device::Ask<'a>>,
}

/// A validated run that has not written anything yet.
#[derive(Debug)]
pub struct Prepared {
    request: Request,
    plan: Plan,
    places: Vec<Place>,
    /// The cells to measure.
    pub cells: Vec<Cell>,
    /// The estimate of the run.
    pub estimate: Estimate,
    /// Whether the user has confirmed every device.
    confirmed: bool,
}

/// Duration of a run below which its cells are not tried beforehand: the trials would be a good part
/// of it.
const TRIED_SECONDS: f64 = 60.0;

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A random seed.
pub fn random_seed() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Rng::new(since.as_nanos() as u64 ^ u64::from(std::process::id()) << 40).next_u64()
}

impl Request {
    fn plan(&self) -> Result<Plan> {
        Plan::parse(&self.plan, &self.origin)
    }

    fn effort(&self, plan: &Plan) -> Effort {
        let effort = plan.effort(self.quick);
        Effort { rounds: Rounds::of(self, plan).least, ..effort }
    }

    fn places(&self, plan: &Plan) -> Result<Vec<Place>> {
        let mut places = Vec::new();
        for path in &self.folders {
            places.push(Place::directory(path)?);
        }
        for path in &self.devices {
            places.push(Place::on_device(path)?);
            device::check_unused(path)?;
        }
        for place in &places {
            if !plan.places.contains(&place.info.kind) {
                let (is, takes) = match place.info.kind {
                    PlaceKind::Device => ("a device", "folders: --on DIR"),
                    PlaceKind::Directory => ("a folder", "devices: --device DEV"),
                };
                bail!("{}: is {is}, and the plan '{}' takes {takes}", place.info.path, plan.name);
            }
        }
        if places.is_empty() {
            bail!("no place for images: name one with --on DIR or --device DEV");
        }
        place::name_all(&mut places)?;
        Ok(places)
    }
}

impl Prepared {
    /// Validates the plan and the places without writing anything.
    ///
    /// # Errors
    /// The plan is invalid, or a place is too small for it; [`Error::Refused`] for a device that
    /// is in use.
    pub fn new(request: Request) -> Result<Self> {
        let plan = request.plan()?;
        let places = request.places(&plan)?;
        let infos: Vec<&PlaceInfo> = places.iter().map(|place| &place.info).collect();
        let mut cells = cells::cells(&plan, &infos, request.quick);
        for cell in &mut cells {
            let place = infos.iter().find(|place| cell.axis(axes::BACKEND) == Some(&place.name));
            let fit = place.map(|place| fit::fit(&cell.axes, &request.effort(&plan), place));
            let front = cell.axis("front").and_then(front::find);
            let missing = front.and_then(|front| front.available().err());
            if let Some(Err(unfit)) = fit {
                cell.outcome = Outcome::Skipped(unfit.to_string());
            } else if let Some(Skip(reason)) = missing.as_ref().and_then(Error::skipped) {
                cell.outcome = Outcome::Skipped(reason.clone());
            }
        }
        let estimate = Estimate::of(&cells, &infos, &request.effort(&plan), &BTreeMap::new());
        // An error for a place that is too small gives the space that the plan needs.
        estimate.check()?;
        if cells.iter().all(|cell| cell.outcome != Outcome::Pending) {
            let why = estimate.told.first().map_or("", String::as_str);
            bail!("the plan '{}' has no cell for these places; {why}", plan.name);
        }
        let confirmed = request.devices.is_empty();
        Ok(Self { request, plan, places, cells, estimate, confirmed })
    }

    /// Largest number of rounds if comparisons stay undecided.
    pub fn rounds_most(&self) -> u32 {
        Rounds::of(&self.request, &self.plan).most
    }

    /// Requires the user's consent for every device.
    ///
    /// # Errors
    /// [`Error::Refused`] for a device without consent.
    pub fn confirm(&mut self, tools: &Tools<'_>, monitor: &Monitor<'_>) -> Result<()> {
        for path in &self.request.devices {
            device::confirm(path, &tools.erase, tools.ask, &monitor.cancel)?;
        }
        self.confirmed = true;
        Ok(())
    }

    /// Improves the time estimate by measuring the host and the places. A run of a minute or more also
    /// sends a few requests through each server of the plan, and boots a guest if the plan has one. It
    /// leaves nothing in folders, and writes to devices only after they were confirmed.
    ///
    /// # Errors
    /// The user interrupts.
    pub fn calibrate(&mut self, tools: &Tools<'_>, monitor: &Monitor<'_>) -> Result<()> {
        let effort = self.request.effort(&self.plan);
        let cancel = &monitor.cancel;
        let mut speeds = BTreeMap::new();
        for place in &self.places {
            let speed = Speed::of(&tools.command, place, self.confirmed, cancel)?;
            speeds.insert(place.info.name.clone(), speed);
        }
        let infos: Vec<&PlaceInfo> = self.places.iter().map(|place| &place.info).collect();
        self.estimate = Estimate::of(&self.cells, &infos, &effort, &speeds);
        if self.estimate.seconds < TRIED_SECONDS {
            return Ok(());
        }
        let guest = trial::guest(&self.cells, &self.places, &effort, tools, cancel)?;
        for place in &self.places {
            let Some(speed) = speeds.get_mut(&place.info.name) else { continue };
            speed.guest = guest.unwrap_or_default();
            if place.device().is_none() || self.confirmed {
                speed.tried = trial::tried(&self.cells, place, &effort, speed, (tools, cancel))?;
            }
        }
        self.estimate = Estimate::of(&self.cells, &infos, &effort, &speeds);
        Ok(())
    }

    /// Creates the results file and begins the run.
    ///
    /// # Errors
    /// The file cannot be created; as [`Prepared::confirm`], if it was not called before.
    pub fn begin(
        mut self,
        out: &Path,
        tools: &Tools<'_>,
        monitor: &Monitor<'_>,
    ) -> Result<ActiveRun> {
        if !self.confirmed {
            self.confirm(tools, monitor)?;
        }
        let started = now();
        let environment = self.environment(monitor);
        let id = format!("{}-{started}-{:08x}", self.plan.name, random_seed() as u32);
        let run = Run {
            id,
            plan: self.summary(),
            published: self.plan.published.clone(),
            quick: self.request.quick,
            seed: self.request.seed,
            started,
            vdkit_version: tools.version.clone(),
            cells: self.cells.clone(),
            warnings: busy(&environment),
            environment,
            ..Run::default()
        };
        self.request.identities = resume::identities(&self.places);
        let store = Store::create(out, &run, &self.request)?;
        Ok(self.start(store, run.cells))
    }

    fn summary(&self) -> PlanSummary {
        PlanSummary { effort: Some(self.request.effort(&self.plan)), ..self.plan.summary() }
    }

    fn environment(&self, monitor: &Monitor<'_>) -> Environment {
        let infos: Vec<PlaceInfo> = self.places.iter().map(|place| place.info.clone()).collect();
        environment::describe(&infos, &monitor.cancel)
    }

    fn start(self, store: Store, cells: Vec<Cell>) -> ActiveRun {
        let places = self.places.iter().map(|place| place.info.clone()).collect();
        ActiveRun {
            rounds: Rounds::of(&self.request, &self.plan),
            facts: Run {
                plan: self.summary(),
                published: self.plan.published.clone(),
                environment: Environment { places, ..Environment::default() },
                ..Run::default()
            },
            effort: self.request.effort(&self.plan),
            rng: Rng::new(random_seed()),
            references: engine::references(&cells),
            request: self.request,
            places: self.places,
            cells,
            store,
            estimate: self.estimate,
        }
    }
}

fn busy(environment: &Environment) -> Vec<Warning> {
    let text = load::busy(environment.cores);
    text.map(|text| Warning { kind: "load".to_owned(), text, cells: vec![] }).into_iter().collect()
}

/// A run in progress.
pub struct ActiveRun {
    request: Request,
    places: Vec<Place>,
    effort: Effort,
    rounds: Rounds,
    /// What a verdict depends on besides the cells.
    facts: Run,
    cells: Vec<Cell>,
    store: Store,
    rng: Rng,
    references: BTreeMap<String, BTreeMap<String, f64>>,
    estimate: Estimate,
}

impl ActiveRun {
    /// The estimate of the whole run, including what is already measured.
    pub fn estimate(&self) -> &Estimate {
        &self.estimate
    }

    /// Resumes an interrupted run, after removing what it left behind.
    ///
    /// # Errors
    /// The file is no run, or another process measures into it; the places no longer exist; or as
    /// [`Prepared::new`] and [`Prepared::begin`].
    pub fn resume(file: &Path, tools: &Tools<'_>, monitor: &Monitor<'_>) -> Result<Self> {
        let mut store = Store::open(file)?;
        let (run, request) = (store.run()?, store.request::<Request>()?);
        let require_same = |place: &Place| {
            let identity = block::identity(&place.info);
            resume::require_same_place(&run.environment, &request, &place.info, identity)
        };
        // Before the cleanup: while a file system is not mounted, the folders that the run left on it
        // seem to be gone.
        for path in &request.folders {
            require_same(&Place::directory(path)?)?;
        }
        for folder in store.scratch()? {
            place::remove_folder(&folder)?;
            store.forget_scratch(&folder)?;
        }
        let mut prepared = Prepared::new(request.clone())?;
        let keys = |cells: &[Cell]| cells.iter().map(|cell| cell.key.clone()).collect::<Vec<_>>();
        if keys(&run.cells) != keys(&prepared.cells) {
            bail!(
                "{}: the places have changed, so the plan now has other cells; start a new run",
                file.display()
            );
        }
        prepared.places.iter().try_for_each(require_same)?;
        prepared.confirm(tools, monitor)?;
        let environment = prepared.environment(monitor);
        for warning in resume::warnings(&run, &environment, &tools.version) {
            store.add_warning(&warning)?;
        }
        store.set_environment(&environment)?;
        Ok(prepared.start(store, run.cells))
    }

    /// Measures what is missing, and returns the whole run.
    ///
    /// # Errors
    /// [`vdkit_block::Error::Interrupted`] if the user interrupts; samples are kept. Otherwise only
    /// a failure of the run itself, such as a full disk for the results. A failure within a cell
    /// becomes the cell's outcome.
    pub fn run(mut self, tools: &Tools<'_>, monitor: &Monitor<'_>) -> Result<Run> {
        let order = cells::order(self.cells.len(), self.rounds.most, self.request.seed);
        let total = (self.cells.len() as u64) * u64::from(self.rounds.least);
        let mut pace = Pace::default();
        for (done, (round, cell)) in order.into_iter().enumerate() {
            let first = done % self.cells.len() == 0;
            if first && !self.rounds.wants(round, &self.so_far()) {
                break;
            }
            monitor.cancel.check()?;
            if !is_open(&self.cells[cell], round) {
                continue;
            }
            // What was measured before is no progress of this run.
            monitor.progress.update(done as u64, total.max(done as u64 + 1));
            let began = Instant::now();
            self.step(round, cell, tools, monitor)?;
            let guessed = self.estimate.each.get(cell).copied().unwrap_or(0.0);
            let ahead = ahead(&self.cells, &self.estimate);
            if let Some(told) = pace.after(guessed, began.elapsed(), ahead) {
                monitor.progress.message(&told);
            }
        }
        monitor.progress.update(total, total);
        self.leave_devices_empty();
        self.store.end(now())?;
        self.store.run()
    }

    /// The run so far, with the parts that a verdict needs.
    fn so_far(&self) -> Run {
        Run { cells: self.cells.clone(), ..self.facts.clone() }
    }

    /// Measures one round of one cell. A cell that was measured before, and now fails, gets a second
    /// attempt, because one guest that does not shut down is no property of the cell. The results
    /// say so.
    fn step(
        &mut self,
        round: u32,
        index: usize,
        tools: &Tools<'_>,
        monitor: &Monitor<'_>,
    ) -> Result<()> {
        let mut cell = self.cells[index].clone();
        let mut found = self.attempt(round, &mut cell, tools, monitor)?;
        if let Err(Outcome::Failed(text)) = &found
            && !cell.samples.is_empty()
        {
            monitor.progress.message(&format!("{}: measured again: {text}", cell.key));
            let (name, why) = (label(&cell.axes), text.lines().next().unwrap_or_default());
            let text =
                format!("round {}: {name} was measured again, because it failed: {why}", round + 1);
            let cells = vec![cell.key.clone()];
            self.store.add_warning(&Warning { kind: "retry".to_owned(), text, cells })?;
            found = self.attempt(round, &mut cell, tools, monitor)?;
        }
        match found {
            Ok(sample) => self.keep(&mut cell, sample)?,
            Err(outcome) => {
                if let Outcome::Failed(text) = &outcome {
                    monitor.progress.message(&format!("{}: {text}", cell.key));
                }
                cell.outcome = outcome;
                self.store.set_outcome(&cell)?;
            }
        }
        self.cells[index] = cell;
        Ok(())
    }

    /// Measures one round of one cell once. The inner error says why it could not be measured.
    fn attempt(
        &mut self,
        round: u32,
        cell: &mut Cell,
        tools: &Tools<'_>,
        monitor: &Monitor<'_>,
    ) -> Result<Result<Sample, Outcome>> {
        let backend = cell.axis(axes::BACKEND).unwrap_or_default().to_owned();
        let place = self.places.iter().find(|place| place.info.name == backend);
        let place = place.context("a cell of an unknown place")?.clone();
        let folder = place::new_folder(&place, &mut self.rng)?;
        let added = self.store.add_scratch(&folder);
        let before = load::Moment::now();
        let (started, began) = (now(), Instant::now());
        let mut bench = Bench {
            command: tools.command.clone(),
            registry: tools.registry,
            cancel: monitor.cancel.clone(),
            effort: self.effort,
            seed: self.request.seed ^ u64::from(round),
            place,
            folder: folder.clone(),
            axes: &cell.axes,
            commands: Vec::new(),
            notes: Vec::new(),
            references: &mut self.references,
        };
        let measured = added.and_then(|()| engine::sample(&mut bench));
        let (commands, notes) = (bench.commands, bench.notes);
        let disturbed = before.until(&load::Moment::now());
        place::remove_folder(&folder)?;
        self.store.forget_scratch(&folder)?;
        let seconds = began.elapsed().as_secs_f64();
        // Each round has a folder with a random name. Replace the name, so that equal commands
        // and errors have equal texts.
        let name = folder.display().to_string();
        let shown = folder.with_file_name("vdkit-lab").display().to_string();
        let plain = |text: String| text.replace(&name, &shown);
        cell.commands = commands.into_iter().map(plain).collect();
        for note in notes.into_iter().map(plain) {
            if !cell.notes.contains(&note) {
                cell.notes.push(note);
            }
        }
        for (kind, text) in disturbed {
            let text = format!("round {}: {text}", round + 1);
            let cells = vec![cell.key.clone()];
            self.store.add_warning(&Warning { kind: kind.to_owned(), text, cells })?;
        }
        match measured {
            Ok(sample) => {
                let steady = steady(&sample.series);
                Ok(Ok(Sample { round, started, seconds, steady, ..sample }))
            }
            Err(error) if monitor.cancel.is_cancelled() => Err(error),
            Err(error) => Ok(Err(match error.skipped() {
                Some(Skip(reason)) => Outcome::Skipped(reason.clone()),
                None => Outcome::Failed(plain(format!("{error:#}"))),
            })),
        }
    }

    fn keep(&mut self, cell: &mut Cell, sample: Sample) -> Result<()> {
        self.store.add_sample(cell, &sample)?;
        cell.samples.push(sample);
        if cell.samples.len() as u64 >= u64::from(self.effort.rounds) {
            cell.outcome = Outcome::Measured;
        }
        self.store.set_outcome(cell)
    }

    /// Zeroes the ends of devices, so that they look empty. The user has released their content.
    fn leave_devices_empty(&self) {
        for place in &self.places {
            if let Some(path) = place.device() {
                // If this fails, the next run refuses the device and explains how to go on.
                let cleared = |device| crate::layout::clear_ends(&device, place.info.total_bytes);
                let _ = device::claim(path).and_then(cleared);
            }
        }
    }
}

/// Whether a round of a cell is still to be measured.
fn is_open(cell: &Cell, round: u32) -> bool {
    let over = matches!(cell.outcome, Outcome::Skipped(_) | Outcome::Failed(_));
    !over && cell.samples.iter().all(|sample| sample.round != round)
}

/// Estimated seconds of the plan's rounds that are still to be measured.
fn ahead(cells: &[Cell], estimate: &Estimate) -> f64 {
    let open = |cell| (0..estimate.rounds).filter(|round| is_open(cell, *round)).count();
    cells.iter().zip(&estimate.each).map(|(cell, seconds)| open(cell) as f64 * seconds).sum()
}

/// Compares the estimated time with the real one, of what this process measures: a resumed run has
/// measured other rounds before.
#[derive(Debug, Default)]
struct Pace {
    guessed: f64,
    took: f64,
    told: bool,
}

impl Pace {
    /// After a sample: returns a message, at most once, if the estimate was far off. `ahead` is the
    /// estimate of what is still to be measured.
    fn after(&mut self, guessed: f64, took: Duration, ahead: f64) -> Option<String> {
        self.guessed += guessed;
        self.took += took.as_secs_f64();
        // The first few samples predict the rest badly; a fifth of the run suffices.
        if self.told || self.guessed < (self.guessed + ahead) / 5.0 {
            return None;
        }
        self.told = true;
        let factor = self.took / self.guessed.max(1e-9);
        let left = ahead * factor;
        let off = !(0.67..=1.5).contains(&factor) && (left - ahead).abs() > 30.0;
        off.then(|| {
            let minutes = (left / 60.0).ceil();
            format!("about {minutes} min left, estimated from the samples so far")
        })
    }
}

#[cfg(test)]
mod tests;
