//! Long work: it runs on a thread of its own, while the calling thread looks for signals.

use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pyo3::exceptions::{PyKeyboardInterrupt, PyTypeError};
use pyo3::prelude::*;
use vdkit::jobs::inspect::{InspectOptions, inspect as judge};
use vdkit::jobs::{
    self, CommitOptions, CompareOptions, ConvertOptions, Destination, ExistingImage, NewBacking,
    NewImage, RebaseOptions, Source,
};
use vdkit::storage::FileOptions;
use vdkit::{
    CancelToken, Codec, CompactOptions, CompressionSpec, Error, Monitor, OpenOptions, Progress,
    Repair, Result,
};

use crate::creation::{Wanted, format_options};
use crate::disk::{Disk, Opening};
use crate::errors::{misuse, no_thread, raise};

/// How often the calling thread looks for signals such as Ctrl-C, and tells of progress.
const LOOK: Duration = Duration::from_millis(50);

/// How long a cancelled job may take to end before another Ctrl-C ends the process.
const PATIENCE: Duration = Duration::from_secs(2);

/// A report as JSON.
pub(crate) fn json_of(report: &impl serde::Serialize) -> String {
    serde_json::to_string(report).unwrap_or_default()
}

/// What a job says, for the thread that waits for it.
#[derive(Default)]
struct Board {
    done: u64,
    total: u64,
    notes: Vec<String>,
}

/// The larger of two figures with the same total: threads report out of order, and a bar must not go back.
fn most(done: u64, total: u64, before: (u64, u64)) -> u64 {
    if total == before.1 { done.max(before.0) } else { done }
}

struct Teller(Mutex<Board>);

impl Progress for Teller {
    fn update(&self, done: u64, total: u64) {
        let mut board = self.0.lock();
        (board.done, board.total) = (most(done, total, (board.done, board.total)), total);
    }

    fn message(&self, text: &str) {
        self.0.lock().notes.push(text.to_owned());
    }
}

/// Runs a job on another thread. `progress` is called as `progress(done, total)` from this one, or is a bar; its
/// exceptions, and those of signal handlers, cancel the job and are raised when it has ended (a further
/// Ctrl-C ends the process, see [`PATIENCE`]). Notes become warnings.
pub(crate) fn run<T: Send>(
    py: Python<'_>,
    progress: Option<&Bound<'_, PyAny>>,
    job: impl FnOnce(&Monitor<'_>) -> Result<T> + Send,
) -> PyResult<T> {
    check_told(progress)?;
    let teller = Teller(Mutex::default());
    let cancel = CancelToken::default();
    let (ended, end) = channel();
    let (end, teller) = (Mutex::new(end), &teller);
    std::thread::scope(|scope| {
        let monitor = Monitor::new(teller).cancelled_by(cancel.clone());
        let thread = std::thread::Builder::new().spawn_scoped(scope, move || {
            // Tells also if the job panics.
            let _ended = ended;
            job(&monitor)
        });
        let work = thread.map_err(|error| no_thread(py, &error))?;
        let mut raised: Option<(PyErr, Instant)> = None;
        let mut told = (0, 0);
        loop {
            let waited = py.detach(|| end.lock().recv_timeout(LOOK));
            let over = !matches!(waited, Err(RecvTimeoutError::Timeout) | Ok(()));
            let board = std::mem::take(&mut *teller.0.lock());
            let signals = py.check_signals();
            if let (Err(again), Some((_, since))) = (&signals, &raised)
                && since.elapsed() > PATIENCE
            {
                // Where it cannot, the job goes on to its end.
                let _ = end_process(py, again);
            }
            let looked = signals.and_then(|()| tell(py, progress, board, &mut told));
            if let (Err(found), None) = (looked, &raised) {
                cancel.cancel();
                raised = Some((found, Instant::now()));
            }
            if over {
                break;
            }
        }
        let result = py.detach(|| work.join());
        match (raised, result) {
            (Some((found, _)), _) => Err(found),
            (None, Ok(result)) => result.map_err(|error| raise(py, &error)),
            (None, Err(_)) => Err(bug(py)),
        }
    })
}

/// Ends the process as SIGINT does by default, if that is what was raised: a job that waits for a server
/// which says nothing looks at no signal for minutes.
fn end_process(py: Python<'_>, raised: &PyErr) -> PyResult<()> {
    if raised.is_instance_of::<PyKeyboardInterrupt>(py) {
        let signals = py.import("signal")?;
        let interrupt = signals.getattr("SIGINT")?;
        signals.call_method1("signal", (&interrupt, signals.getattr("SIG_DFL")?))?;
        signals.call_method1("raise_signal", (interrupt,))?;
    }
    Ok(())
}

/// Refuses what is neither a function nor a bar. Otherwise the job would have begun, or even ended, when
/// it is first told of.
fn check_told(progress: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
    let Some(progress) = progress else { return Ok(()) };
    if progress.is_callable() || (progress.hasattr("n")? && progress.hasattr("update")?) {
        return Ok(());
    }
    let class = progress.get_type().name()?.to_string();
    Err(PyTypeError::new_err(format!("progress is a function or a bar, not {class}")))
}

/// Runs what cannot be cancelled, such as a connection to a server that does not answer. If a signal
/// handler raises, that is raised at once, and the work goes on until it ends; its result is dropped.
pub(crate) fn abandonable<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> PyResult<T> {
    let (ended, end) = channel();
    let end = Mutex::new(end);
    let thread = std::thread::Builder::new().spawn(move || {
        // Nobody waits if a signal came before.
        let _ = ended.send(work());
    });
    thread.map_err(|error| no_thread(py, &error))?;
    loop {
        let waited = py.detach(|| end.lock().recv_timeout(LOOK));
        match waited {
            Ok(result) => return result.map_err(|error| raise(py, &error)),
            Err(RecvTimeoutError::Disconnected) => return Err(bug(py)),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
        }
    }
}

fn bug(py: Python<'_>) -> PyErr {
    misuse(py, "vdkit has a bug: the job panicked")
}

fn tell(
    py: Python<'_>,
    progress: Option<&Bound<'_, PyAny>>,
    board: Board,
    told: &mut (u64, u64),
) -> PyResult<()> {
    for note in board.notes {
        py.import("warnings")?.call_method1("warn", (note,))?;
    }
    let now = (most(board.done, board.total, *told), board.total);
    if let Some(progress) = progress
        && board.total > 0
        && now != *told
    {
        match progress.is_callable() {
            true => progress.call1(now)?,
            false => advance(progress, now)?,
        };
        *told = now;
    }
    Ok(())
}

/// Moves a progress bar that counts as tqdm's do: `update` takes what is added to `n`.
fn advance<'py>(bar: &Bound<'py, PyAny>, (done, total): (u64, u64)) -> PyResult<Bound<'py, PyAny>> {
    bar.setattr("total", total)?;
    let step = bar.getattr("n")?.neg()?.add(done)?;
    bar.call_method1("update", (step,))
}

/// The names of all formats.
#[pyfunction]
pub(crate) fn formats() -> Vec<&'static str> {
    vdkit::FORMATS.iter().map(|driver| driver.name()).collect()
}

#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "the Python side has them by name")]
pub(crate) fn convert(
    py: Python<'_>,
    source: &Bound<'_, Disk>,
    target: PathBuf,
    format: Option<String>,
    wanted: Wanted,
    compress: bool,
    verify: bool,
    into: bool,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<String> {
    // A call that is wrong does not close the disk.
    check_told(progress)?;
    let source = Source::new(vec![source.get().take(py)?]);
    let converted = run(py, progress, |monitor| {
        convert_to(&source, target, format, &wanted, [compress, verify, into], monitor)
    });
    // What was written to it before may not be durable yet.
    let closed = py.detach(move || source.disks().iter().try_for_each(vdkit::Disk::close));
    let report = converted?;
    closed.map_err(|error| raise(py, &error))?;
    Ok(json_of(&report))
}

fn convert_to(
    source: &Source,
    target: PathBuf,
    format: Option<String>,
    wanted: &Wanted,
    [compress, verify, into]: [bool; 3],
    monitor: &Monitor<'_>,
) -> Result<jobs::ConvertReport> {
    let mut codec = Codec::Deflate;
    let mut how = if into {
        let key = wanted.only_key()?;
        if key.is_some() {
            let opening = OpenOptions::read_only().maybe_format(format.clone());
            vdkit::describe_chain(&vdkit::registry(), &target, &opening)?.expect_encrypted()?;
        }
        let existing = ExistingImage::new(target).format(format);
        let mut how = ConvertOptions::new(Destination::Into(existing));
        how.keys.extend(key);
        how
    } else {
        let format = format.ok_or_else(|| Error::invalid("a new image needs a format"))?;
        let driver = vdkit::format(&format)?;
        let options = wanted.of_format(driver)?;
        if options.text("compression_type") == Some("zstd") {
            codec = Codec::Zstd;
        }
        let (reference, backing) = wanted.backing_of(&target)?.unzip();
        let new = NewImage::new(target, format).options(options).backing(reference);
        let mut how = ConvertOptions::new(Destination::New(new));
        how.backing = backing;
        how
    };
    how.compress = compress.then_some(CompressionSpec { codec, level: None });
    how.verify = verify;
    jobs::convert(&vdkit::registry(), source, &how, monitor)
}

#[pyfunction]
pub(crate) fn check(
    py: Python<'_>,
    path: PathBuf,
    opening: Opening,
    repair: &str,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<String> {
    let repair = match repair {
        "" => Repair::Nothing,
        "leaks" => Repair::Leaks,
        "all" => Repair::All,
        other => return Err(misuse(py, format!("unknown repair '{other}': use leaks or all"))),
    };
    let report = run(py, progress, |monitor| {
        jobs::check(&vdkit::registry(), &path, &opening.options()?, repair, monitor)
    })?;
    Ok(json_of(&report.report))
}

#[pyfunction]
pub(crate) fn compare(
    py: Python<'_>,
    a: &Bound<'_, Disk>,
    b: &Bound<'_, Disk>,
    strict: bool,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<String> {
    let (a, b) = (a.get(), b.get());
    let mut options = CompareOptions::default();
    options.strict = strict;
    let report = run(py, progress, |monitor| {
        a.call(|a| b.call(|b| jobs::compare(a, b, &options, monitor)))
    })?;
    Ok(json_of(&report))
}

#[pyfunction]
pub(crate) fn measure(
    py: Python<'_>,
    source: &Bound<'_, Disk>,
    format: &str,
    options: Vec<String>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<String> {
    let source = source.get();
    let report = run(py, progress, |monitor| {
        let driver = vdkit::format(format)?;
        let options = format_options(driver, &options)?;
        source.call(|disk| jobs::measure(std::slice::from_ref(disk), driver, &options, monitor))
    })?;
    Ok(json_of(&report))
}

#[pyfunction]
pub(crate) fn commit(
    py: Python<'_>,
    overlay: PathBuf,
    opening: Opening,
    to: Option<PathBuf>,
    force: bool,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<String> {
    let report = run(py, progress, |monitor| {
        let opening = opening.options()?.writable(true);
        let mut options = CommitOptions::default();
        options.to = to;
        options.force = force;
        jobs::commit(&vdkit::registry(), &overlay, &opening, &options, monitor)
    })?;
    Ok(json_of(&report))
}

#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "the Python side has them by name")]
pub(crate) fn rebase(
    py: Python<'_>,
    overlay: PathBuf,
    opening: Opening,
    backing: Option<String>,
    backing_format: Option<String>,
    header_only: bool,
    force: bool,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<String> {
    let report = run(py, progress, |monitor| {
        let opening = opening.options()?.writable(true);
        let backing = backing.map(|name| NewBacking::new(name, backing_format).open(!header_only));
        let mut options = RebaseOptions::default();
        options.backing = backing;
        options.header_only = header_only;
        options.force = force;
        jobs::rebase(&vdkit::registry(), &overlay, &opening, &options, monitor)
    })?;
    Ok(json_of(&report))
}

#[pyfunction]
pub(crate) fn compact(
    py: Python<'_>,
    path: PathBuf,
    opening: Opening,
    zero_scan: bool,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<String> {
    let done = run(py, progress, |monitor| {
        let how = CompactOptions::default().zero_scan(zero_scan);
        jobs::compact(&vdkit::registry(), &path, &opening.options()?, how, monitor)
    })?;
    Ok(json_of(&done.report))
}

#[pyfunction]
pub(crate) fn describe(py: Python<'_>, path: PathBuf, opening: Opening) -> PyResult<String> {
    abandonable(py, move || {
        let report = vdkit::describe_chain(&vdkit::registry(), &path, &opening.options()?)?;
        match report.broken {
            Some(broken) => Err(broken),
            None => {
                Ok(json_of(&report.links.iter().map(jobs::Described::from).collect::<Vec<_>>()))
            }
        }
    })
}

#[pyfunction]
pub(crate) fn inspect(
    py: Python<'_>,
    path: PathBuf,
    format: Option<String>,
    strict: bool,
) -> PyResult<String> {
    // It only reads, and ends by itself.
    abandonable(py, move || {
        let storage = vdkit::registry().open_storage(&path, &FileOptions::read_only())?;
        let mut options = InspectOptions::default();
        options.format = format;
        options.strict = strict;
        Ok(json_of(&judge(storage, &options)?))
    })
}
