//! Runs a load of requests, with fio on the served disk or with the library itself.

use std::path::Path;

use crate::error::{Context, Result};

use super::{Bench, inside};
use crate::environment::block::Counts;
use crate::fio::{self, Answer};
use crate::front::{self, Guest, Served, Target};
use crate::layout;
use crate::model::{Sample, Series};
use crate::peers::need;
use crate::process::Line;
use crate::profile::Load;

/// Separates two files on the guest's second serial port.
const MARK: &str = "=== series ===";
/// Where fio writes its results in a guest.
const GUEST_OUTPUT: &str = "/tmp/out.json";

/// Creates an image, serves it and runs the load.
pub(super) fn sample(bench: &mut Bench<'_>, load: &Load) -> Result<Sample> {
    let (layout, front, cache) = (bench.layout()?, bench.front()?, bench.cache()?);
    let bytes = bench.disk_bytes()?;
    let content = bench.content(load.rw.reads() || load.rewrites);
    let image = layout::make(bench, layout, bytes, content)?;
    // Otherwise cache modes with a page cache would read what the lab has just put there.
    super::drop_caches(&image.files)?;
    let served = front::start(bench, front, &image, cache)?;
    let mut sample = run(bench, load, &served, bytes)?;
    if let Some(ended) = served.end() {
        bench.note(&format!("the server took {:.2} s to shut down", ended.as_secs_f64()));
    }
    sample.values.extend(layout::host_bytes(&image));
    Ok(sample)
}

/// Runs the load on a served disk of `bytes` bytes.
pub(super) fn run(
    bench: &mut Bench<'_>,
    load: &Load,
    served: &Served,
    bytes: u64,
) -> Result<Sample> {
    let before = Counts::of(&bench.place.info);
    let (answer, series) = match &served.target {
        Target::InProcess { image, cache } => inside::run(bench, load, image, *cache)?,
        target => with_fio(bench, load, target, bytes)?,
    };
    let mut values = answer.values;
    if let Some(cpu) = served.server_cpu_seconds() {
        values.insert("server_cpu_seconds".to_owned(), cpu);
        let requests = answer.latencies.as_ref().map_or(0, crate::model::Histogram::count);
        // The kernel counts in hundredths of a second; fewer than five of them are too inaccurate.
        if cpu >= 0.05 {
            values.insert("requests_per_cpu_second".to_owned(), requests as f64 / cpu);
        }
    }
    let flushes = |counts: Option<Counts>| counts?.flushes;
    if let (Some(before), Some(after)) = (flushes(before), flushes(Counts::of(&bench.place.info))) {
        values.insert("flushes".to_owned(), after.saturating_sub(before) as f64);
    }
    let raw = (!answer.raw.is_null()).then_some(answer.raw);
    Ok(Sample { values, latencies: answer.latencies, series, raw, ..Sample::default() })
}

fn with_fio(
    bench: &mut Bench<'_>,
    load: &Load,
    target: &Target,
    bytes: u64,
) -> Result<(Answer, Vec<Series>)> {
    let fio = need("fio")?;
    if let Target::Guest(guest) = target {
        return in_guest(bench, load, guest, bytes);
    }
    let disk = fio::Disk::of(target).context("fio cannot open this")?;
    let output = bench.folder.join("fio.json");
    let arguments = call(bench, &disk, bytes, &output).of(load);
    let line = Line::new(fio).args(&arguments).within(&bench.folder);
    bench.run(&line)?;
    let log = bench.folder.join(format!("{}_iops.log", fio::LOG));
    let text = std::fs::read_to_string(&output).context("fio's output")?;
    let log = std::fs::read_to_string(log).unwrap_or_default();
    Ok((fio::parse(&text, load)?, fio::series(&log, load, &bench.effort)))
}

fn in_guest(
    bench: &mut Bench<'_>,
    load: &Load,
    guest: &Guest,
    bytes: u64,
) -> Result<(Answer, Vec<Series>)> {
    let disk = fio::Disk::of_guest(guest);
    let arguments = call(bench, &disk, bytes, Path::new(GUEST_OUTPUT)).of(load);
    let script = format!(
        "{} || exit 1\n(cat {GUEST_OUTPUT}; echo; echo '{MARK}'; cat /tmp/{}_iops.log) > $OUT\n",
        Line::new("fio").args(&arguments).text(),
        fio::LOG
    );
    let output = output_of(bench, guest, &script, bench.effort.seconds)?;
    let (json, log) = output.split_once(MARK).context("the guest printed no results")?;
    Ok((fio::parse(json, load)?, fio::series(log, load, &bench.effort)))
}

fn call<'a>(
    bench: &Bench<'_>,
    disk: &'a fio::Disk,
    disk_bytes: u64,
    output: &'a Path,
) -> fio::Call<'a> {
    fio::Call { disk, disk_bytes, effort: bench.effort, seed: bench.seed, output }
}

/// What a guest's script printed.
fn output_of(bench: &mut Bench<'_>, guest: &Guest, script: &str, seconds: f64) -> Result<String> {
    let output = guest.run(bench, script, seconds)?;
    if output.emulated {
        bench.note("the guest's processor was emulated (TCG): no KVM here");
    }
    Ok(output.results)
}

/// Runs loads one after the other on a served disk of `bytes` bytes. Returns the bytes per second
/// of each.
pub(super) fn rates(
    bench: &mut Bench<'_>,
    loads: &[Load],
    served: &Served,
    bytes: u64,
) -> Result<Vec<f64>> {
    let fio = need("fio")?;
    let Some(disk) = fio::Disk::of(&served.target) else {
        let mut rates = Vec::new();
        for load in loads {
            rates.push(run(bench, load, served, bytes)?.values["bytes_per_second"]);
        }
        return Ok(rates);
    };
    let text = if let Target::Guest(guest) = &served.target {
        let arguments = call(bench, &disk, bytes, Path::new(GUEST_OUTPUT)).in_turn(loads);
        let line = Line::new("fio").args(arguments).text();
        let script = format!("{line} || exit 1\ncat {GUEST_OUTPUT} > $OUT\n");
        output_of(bench, guest, &script, bench.effort.seconds * loads.len() as f64)?
    } else {
        let output = bench.folder.join("fio.json");
        let arguments = call(bench, &disk, bytes, &output).in_turn(loads);
        let line = Line::new(fio).args(arguments).within(&bench.folder);
        bench.run(&line)?;
        std::fs::read_to_string(&output).context("fio's output")?
    };
    fio::rates(&text, loads.len())
}
