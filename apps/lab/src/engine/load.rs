//! Runs a load of requests, with fio on the served disk or with the library itself.

use crate::error::{Context, Result};

use super::{Bench, inside};
use crate::environment::block::Counts;
use crate::fio::{self, Answer};
use crate::front::{self, Cache, Front, Guest, Served, Target};
use crate::layout::{self, Layout};
use crate::model::{Sample, Series};
use crate::peers::need;
use crate::process::Line;
use crate::profile::Load;

/// Separates two files on the guest's second serial port.
const MARK: &str = "=== series ===";
/// Ends the output of each load on the guest's second serial port.
const END: &str = "=== end ===";

pub(super) fn sample(bench: &mut Bench<'_>, load: &Load) -> Result<Sample> {
    let (layout, front, cache) = (bench.layout()?, bench.front()?, bench.cache()?);
    on(bench, load, layout, front, cache)
}

/// Creates an image, serves it and runs the load.
pub(super) fn on(
    bench: &mut Bench<'_>,
    load: &Load,
    layout: &Layout,
    front: &Front,
    cache: Cache,
) -> Result<Sample> {
    let bytes = bench.disk_bytes()?;
    let content = bench.content(load.rw.reads() || load.rewrites);
    let image = layout::make(bench, layout, bytes, content)?;
    let served = front::start(bench, front, &image, cache)?;
    let mut sample = run(bench, load, &served, bytes)?;
    if let Some(ended) = served.end() {
        bench.note(&format!("the server took {:.2} s to shut down", ended.as_secs_f64()));
    }
    if let Some(bytes) = layout::host_bytes(&image) {
        sample.values.insert("host_bytes".to_owned(), bytes as f64);
    }
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
    if let (Some(before), Some(after)) = (before, Counts::of(&bench.place.info)) {
        values.insert("flushes".to_owned(), after.flushes.saturating_sub(before.flushes) as f64);
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
    let disk = fio::Disk::of(target).context("fio cannot open this")?;
    if let Target::Guest(guest) = target {
        let mut all = in_guest(bench, &[*load], guest, bytes)?;
        return all.pop().context("the guest printed no results");
    }
    let output = bench.folder.join("fio.json");
    let arguments = fio::arguments(load, &disk, &bench.effort, bytes, bench.seed, &output);
    let line = Line::new(fio).args(&arguments).within(&bench.folder);
    bench.run(&line)?;
    let log = bench.folder.join(format!("{}_iops.log", fio::LOG));
    let text = std::fs::read_to_string(&output).context("fio's output")?;
    let log = std::fs::read_to_string(log).unwrap_or_default();
    Ok((fio::parse(&text, load)?, fio::series(&log, load, &bench.effort)))
}

/// Runs loads one after the other in a guest that boots once. Returns one answer per load.
pub(super) fn in_guest(
    bench: &mut Bench<'_>,
    loads: &[Load],
    guest: &Guest,
    bytes: u64,
) -> Result<Vec<(Answer, Vec<Series>)>> {
    let disk = fio::Disk::of_guest(guest);
    let output = std::path::Path::new("/tmp/out.json");
    let log = format!("/tmp/{}_iops.log", fio::LOG);
    let mut script = String::new();
    for load in loads {
        let arguments = fio::arguments(load, &disk, &bench.effort, bytes, bench.seed, output);
        let line = Line::new("fio").args(&arguments).text();
        script.push_str(&format!(
            "rm -f {log}\n{line} || exit 1\n\
             (cat {}; echo; echo '{MARK}'; cat {log}; echo '{END}') > $OUT\n",
            output.display()
        ));
    }
    let said = guest.run(bench, &script, bench.effort.seconds * loads.len() as f64)?;
    if said.emulated {
        bench.note("the guest's processor was emulated (TCG): no KVM here");
    }
    let mut parts = said.results.split(END);
    let mut all = Vec::new();
    for load in loads {
        let part = parts.next().and_then(|part| part.split_once(MARK));
        let (json, log) = part.context("the guest printed no results")?;
        all.push((fio::parse(json, load)?, fio::series(log, load, &bench.effort)));
    }
    Ok(all)
}
