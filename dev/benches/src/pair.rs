//! Candidates in turn, round by round.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::memory;
use crate::options::{FileSystem, Group};
use crate::process::{Program, Usage};
use crate::scratch::Scratch;

/// Where less is written, it matters little what a page costs.
const AT_HAND_BYTES_MIN: u64 = 64 << 20;

/// Memory at hand beyond what is written.
const AT_HAND_BYTES_MORE: u64 = 1 << 30;

/// A program that takes less runs once more, untimed, just before: reading its own pages and the file system's
/// metadata again, where the kernel dropped them, would take longer than its work.
const REHEARSED_SECONDS_MAX: f64 = 0.25;
/// XFS gives the blocks of a removed file back in the background, and no sync waits for that. Who shares blocks
/// meanwhile waits for it, the longer the more extents the file had: up to a millisecond of four.
const SETTLED_AFTER: Duration = Duration::from_millis(100);

/// One way to do a cell's job.
#[derive(Debug)]
pub struct Candidate {
    /// Its name in tables.
    pub name: &'static str,
    /// What is timed.
    pub program: Program,
    /// It finds nothing of its input in the page cache.
    pub cold: bool,
    /// The file that it makes.
    pub target: Option<PathBuf>,
    /// Run once, untimed, after the warm-up: fails where the result is wrong.
    pub proof: Vec<Program>,
    /// Where the warm-up's target goes instead of being removed, for a later cell to read.
    pub keep: Option<PathBuf>,
}

impl Candidate {
    /// A program that makes no file, and finds its input in the page cache.
    pub fn new(name: &'static str, program: Program) -> Self {
        Self { name, program, cold: false, target: None, proof: Vec::new(), keep: None }
    }
}

/// What a cell is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct CellName {
    /// The set it belongs to.
    pub group: Group,
    /// The job, such as `raw→qcow2`.
    pub job: String,
    /// The image's content.
    pub content: String,
    /// Where.
    pub file_system: FileSystem,
}

impl CellName {
    /// A job on an image of this content.
    pub fn new(
        group: Group,
        job: impl Into<String>,
        content: impl Into<String>,
        file_system: FileSystem,
    ) -> Self {
        Self { group, job: job.into(), content: content.into(), file_system }
    }
}

/// A cell's samples.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Cell {
    /// What it is about.
    #[serde(flatten)]
    pub name: CellName,
    /// Bytes of the guest disk.
    pub guest_bytes: u64,
    /// Each candidate's samples, vdkit's first.
    pub series: Vec<Series>,
}

/// One candidate's samples; the n-th of each candidate were taken in one round.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Series {
    /// The candidate.
    pub name: String,
    /// What was run.
    pub command: String,
    /// One a round, without the warm-up.
    pub runs: Vec<Usage>,
    /// Length in bytes of the file that it made.
    pub target_bytes: Option<u64>,
    /// It could not do this here (a file system without O_DIRECT, say), with what it said.
    pub cannot: Option<String>,
    /// Its result was wrong: what the proof said.
    pub wrong: Option<String>,
}

impl Series {
    /// A candidate without samples yet.
    pub fn new(name: &str, command: String) -> Self {
        Self {
            name: name.to_owned(),
            command,
            runs: Vec::new(),
            target_bytes: None,
            cannot: None,
            wrong: None,
        }
    }
}

/// Measures a cell.
///
/// # Errors
/// If the harness itself fails or is interrupted. A candidate's failure is noted instead.
pub fn measure(
    name: CellName,
    guest_bytes: u64,
    scratch: &Scratch,
    runs: usize,
    candidates: Vec<Candidate>,
) -> Result<Cell> {
    eprint!(
        "{:8} {:6} {:9} {:24}",
        name.group.name(),
        name.file_system.name(),
        name.content,
        name.job
    );
    let mut series = Vec::new();
    let mut written = 0;
    let mut rehearsed = Vec::new();
    for candidate in &candidates {
        let warm = warm_up(candidate, scratch)?;
        series.push(warm.series);
        written = warm.target_bytes.max(written);
        rehearsed.push(warm.seconds < REHEARSED_SECONDS_MAX);
    }
    // Programs that share blocks need no memory for them.
    let at_hand = match written >= AT_HAND_BYTES_MIN && !scratch.file_system.reflinks() {
        true => written + AT_HAND_BYTES_MORE,
        false => 0,
    };
    for round in 0..runs {
        for index in order_of(round, candidates.len()) {
            let (candidate, series) = (&candidates[index], &mut series[index]);
            if series.cannot.is_none() {
                match run(candidate, scratch, at_hand, rehearsed[index]) {
                    Ok(usage) => series.runs.push(usage),
                    Err(error) if is_interrupt(&error) => return Err(error),
                    Err(error) => series.cannot = Some(error.to_string()),
                }
                remove(candidate)?;
            }
        }
    }
    let cell = Cell { name, guest_bytes, series };
    eprintln!("{}", cell.short());
    Ok(cell)
}

/// The order of candidates in a round. What one leaves behind (freed memory that the host takes back, work
/// of the file system's threads) slows the next one, so in as many rounds as there are candidates, or
/// twice as many where that number is odd, each follows each other equally often: E. J. Williams,
/// "Experimental designs balanced for the estimation of residual effects of treatments", 1949.
pub fn order_of(round: usize, count: usize) -> Vec<usize> {
    // 0, 1, n-1, 2, n-2 and so on: neighbors differ by each number once.
    let zigzag =
        (0..count).map(|i| if i % 2 == 1 { i.div_ceil(2) } else { (count - i / 2) % count });
    let mut order: Vec<usize> = zigzag.map(|index| (index + round) % count).collect();
    if count % 2 == 1 && round / count % 2 == 1 {
        order.reverse();
    }
    order
}

fn is_interrupt(error: &anyhow::Error) -> bool {
    error.to_string() == "interrupted"
}

/// What the first run tells.
struct Warm {
    series: Series,
    /// What the target takes on the file system.
    target_bytes: u64,
    /// How long it took; infinity where it failed.
    seconds: f64,
}

/// The first run: fills caches, shows whether the candidate can, and is proven right.
fn warm_up(candidate: &Candidate, scratch: &Scratch) -> Result<Warm> {
    let mut written = 0;
    let mut series = Series::new(candidate.name, candidate.program.typed(&scratch.folder));
    let mut seconds = f64::INFINITY;
    match run(candidate, scratch, 0, false) {
        Ok(usage) => {
            seconds = usage.wall_seconds;
            if let Some(target) = &candidate.target {
                let target = fs::metadata(target)?;
                series.target_bytes = Some(target.len());
                written = target.blocks() * 512;
            }
            for proof in &candidate.proof {
                match proof.run() {
                    Ok(_) => {}
                    Err(error) if is_interrupt(&error) => return Err(error),
                    Err(error) => {
                        let typed = proof.typed(&scratch.folder);
                        series.wrong.get_or_insert(format!("{typed}: {error:#}"));
                    }
                }
            }
        }
        Err(error) if is_interrupt(&error) => return Err(error),
        Err(error) => series.cannot = Some(error.to_string()),
    }
    if let (Some(target), Some(keep), None) = (&candidate.target, &candidate.keep, &series.cannot) {
        fs::rename(target, keep)?;
    }
    remove(candidate)?;
    Ok(Warm { series, target_bytes: written, seconds })
}

/// One run from a quiet start, with so many bytes of memory at hand, and its input in the page cache; then what
/// it left there is written.
fn run(candidate: &Candidate, scratch: &Scratch, at_hand: u64, rehearsed: bool) -> Result<Usage> {
    rustix::fs::sync();
    if candidate.cold {
        fs::write("/proc/sys/vm/drop_caches", "3").context("cannot drop the page cache")?;
        // The program itself is not what is measured: it is in memory again.
        candidate.program.bare().arg("--version").run()?;
    }
    let held = memory::hold(at_hand)?;
    if !candidate.cold {
        warm(candidate)?;
        if rehearsed {
            candidate.program.run()?;
            remove(candidate)?;
            rustix::fs::syncfs(fs::File::open(&scratch.folder)?)?;
            thread::sleep(SETTLED_AFTER);
        }
    }
    drop(held);
    let usage = candidate.program.run()?;
    let start = Instant::now();
    rustix::fs::syncfs(fs::File::open(&scratch.folder)?)?;
    Ok(Usage { sync_seconds: start.elapsed().as_secs_f64(), ..usage })
}

/// What the program reads is in the page cache: also the files with a flat VMDK's data.
fn warm(candidate: &Candidate) -> Result<()> {
    for input in candidate.program.files().filter(|file| Some(*file) != candidate.target.as_deref())
    {
        memory::warm(input)?;
        for extent in extents(input)? {
            memory::warm(&extent)?;
        }
    }
    Ok(())
}

fn remove(candidate: &Candidate) -> Result<()> {
    let Some(target) = &candidate.target else { return Ok(()) };
    match fs::remove_file(target) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            bail!("cannot remove {}: {error}", target.display())
        }
        _ => remove_extents(target),
    }
}

fn remove_extents(image: &Path) -> Result<()> {
    extents(image)?.iter().try_for_each(|extent| Ok(fs::remove_file(extent)?))
}

/// The files with a flat VMDK's data, which are called after it.
fn extents(image: &Path) -> Result<Vec<PathBuf>> {
    let (Some(folder), Some(stem)) = (image.parent(), image.file_stem()) else {
        return Ok(Vec::new());
    };
    let stem = format!("{}-flat", stem.to_string_lossy());
    let mut extents = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(&stem) {
            extents.push(entry.path());
        }
    }
    Ok(extents)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::order_of;

    #[test]
    fn each_candidate_follows_each_other_equally_often() {
        assert_eq!(order_of(0, 1), [0]);
        assert_eq!((order_of(0, 2), order_of(1, 2)), (vec![0, 1], vec![1, 0]));
        for count in 2..=7 {
            let (rounds, times) = if count % 2 == 0 { (count, 1) } else { (2 * count, 2) };
            let mut follows = BTreeMap::new();
            for round in 0..rounds {
                let order = order_of(round, count);
                let mut all = order.clone();
                all.sort_unstable();
                assert!(all.into_iter().eq(0..count), "{order:?}");
                for pair in order.windows(2) {
                    *follows.entry((pair[0], pair[1])).or_insert(0) += 1;
                }
            }
            assert_eq!(follows.len(), count * (count - 1), "{count}");
            assert!(follows.values().all(|&n| n == times), "{count}: {follows:?}");
        }
    }
}
