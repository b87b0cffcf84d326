//! Builds fio's command line from a load, and parses fio's JSON.

use std::collections::BTreeMap;
use std::path::Path;

use crate::error::{Context, Result, bail};
use serde_json::Value;
use vdkit_block::CacheMode;

use crate::front::{Guest, Target};
use crate::model::{Histogram, Series};
use crate::plan::Effort;
use crate::profile::{Load, Pattern, Sync};
use crate::stats::merged;

/// Names of the two jobs: the load, and a second job that only syncs. The second one measures how
/// long it takes to make the load's writes durable, because fio does not sync after its last write.
const LOAD: &str = "load";
const FLUSH: &str = "flush";
/// File name prefix of the logs.
pub const LOG: &str = "series";

/// The disk that fio opens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disk {
    /// A file or device.
    File {
        path: String,
        /// Whether fio uses O_DIRECT and O_DSYNC, and leaves out fsync.
        cache: CacheMode,
    },
    /// The URI of an NBD export.
    Nbd(String),
}

impl Disk {
    /// The disk that fio opens for a target; none if fio cannot open it.
    pub fn of(target: &Target) -> Option<Self> {
        match target {
            Target::Disk(disk) => Some(disk.clone()),
            Target::Guest(guest) => Some(Self::of_guest(guest)),
            Target::InProcess { .. } => None,
        }
    }

    /// The disk that fio opens in a guest.
    pub fn of_guest(guest: &Guest) -> Self {
        Self::File { path: guest.disk.to_owned(), cache: CacheMode::None }
    }

    /// Arguments that open the disk; `engine` is fio's I/O engine for files.
    pub fn arguments(&self, engine: &str) -> Vec<String> {
        match self {
            Self::File { path, cache } => {
                let mut all = vec![
                    // fio separates file names by colons.
                    format!("--filename={}", path.replace(':', "\\:")),
                    format!("--ioengine={engine}"),
                    format!("--direct={}", u8::from(cache.direct())),
                ];
                if cache.write_durable() {
                    all.push("--sync=dsync".to_owned());
                }
                all
            }
            Self::Nbd(uri) => vec!["--ioengine=nbd".to_owned(), format!("--uri={uri}")],
        }
    }

    fn flushes(&self) -> bool {
        !matches!(self, Self::File { cache: CacheMode::Unsafe, .. })
    }
}

/// A call of fio on one disk.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    pub disk: &'a Disk,
    /// Size of the part of the disk that loads use.
    pub disk_bytes: u64,
    /// Amount of work.
    pub effort: Effort,
    /// Seed of random offsets.
    pub seed: u64,
    /// Where fio writes results. Logs go into the same folder.
    pub output: &'a Path,
}

impl Call<'_> {
    /// The arguments for one load. For [`parse`].
    pub fn of(&self, load: &Load) -> Vec<String> {
        let mut all = self.global("json+");
        // From the request to its completion. fio's default begins when the kernel has the request,
        // and with a page cache a write is over by then.
        all.extend(["--lat_percentiles=1", "--clat_percentiles=0"].map(str::to_owned));
        all.push(format!("--name={LOAD}"));
        all.extend(self.job(load));
        let log = self.output.with_file_name(LOG);
        all.push(format!("--write_iops_log={}", log.display()));
        let interval = interval_ms(&self.effort);
        all.extend([format!("--log_avg_msec={interval}"), "--per_job_logs=0".to_owned()]);
        all.extend(flush(load, self.disk, FLUSH));
        all
    }

    /// The arguments for several loads, one after the other. fio takes longer to start than a short
    /// load does. For [`rates`].
    pub fn in_turn(&self, loads: &[Load]) -> Vec<String> {
        let mut all = self.global("json");
        for (i, load) in loads.iter().enumerate() {
            all.extend([format!("--name={LOAD}{i}"), "--stonewall".into(), "--new_group".into()]);
            all.extend(self.job(load));
            all.extend(flush(load, self.disk, &format!("{FLUSH}{i}")));
        }
        all
    }

    fn global(&self, format: &str) -> Vec<String> {
        vec![
            format!("--output-format={format}"),
            format!("--output={}", self.output.display()),
            format!("--randseed={}", self.seed >> 1),
            "--group_reporting".to_owned(),
            "--thread".to_owned(),
            // A guest's console is a terminal, on which fio would print its progress.
            "--eta=never".to_owned(),
        ]
    }

    /// The options of a load.
    fn job(&self, load: &Load) -> Vec<String> {
        let Self { disk, disk_bytes, effort, .. } = *self;
        let mut all = Vec::new();
        if !load.once {
            all.push("--norandommap".to_owned());
        }
        all.extend(disk.arguments(load.engine));
        all.push(format!("--rw={}", load.rw.word()));
        if let Pattern::RandomMix(reads) = load.rw {
            all.push(format!("--rwmixread={reads}"));
        }
        all.push(format!("--bs={}", load.block));
        all.push(format!("--iodepth={}", load.depth));
        if load.jobs > 1 {
            all.push(format!("--numjobs={}", load.jobs));
        }
        let each = match load.to_the_end {
            true => effort.bytes.min(disk_bytes / u64::from(load.jobs)),
            false => disk_bytes / u64::from(load.jobs),
        };
        let each = each / load.block * load.block;
        all.push(format!("--size={each}"));
        if load.jobs > 1 {
            all.push(format!("--offset_increment={each}"));
        }
        // Without `--time_based`, fio ends when either the size or the time is reached.
        all.push(format!("--runtime={}ms", (effort.seconds * 1e3) as u64));
        if !load.to_the_end {
            all.push("--time_based".to_owned());
        }
        if disk.flushes() {
            match load.sync {
                Sync::Never => {}
                Sync::Fsync(count) => all.push(format!("--fsync={count}")),
                // NBD has only one kind of flush, and fio's nbd engine fails on fdatasync.
                Sync::Fdatasync(count) if matches!(disk, Disk::Nbd(_)) => {
                    all.push(format!("--fsync={count}"));
                }
                Sync::Fdatasync(count) => all.push(format!("--fdatasync={count}")),
            }
        }
        all
    }
}

/// The job that syncs what a load wrote; none for a load that only reads.
fn flush(load: &Load, disk: &Disk, name: &str) -> Vec<String> {
    let mut all = Vec::new();
    if load.rw != Pattern::Read && load.rw != Pattern::RandomRead && disk.flushes() {
        all.extend([format!("--name={name}"), "--stonewall".to_owned(), "--new_group".to_owned()]);
        all.extend(disk.arguments("sync"));
        all.extend(["--rw=write", "--bs=4096", "--size=8192", "--fsync=1"].map(str::to_owned));
    }
    all
}

/// Length of an interval of the time series: at least twenty intervals, at most five per second.
pub fn interval_ms(effort: &Effort) -> u64 {
    ((effort.seconds * 1000.0 / 20.0) as u64).clamp(100, 1000)
}

/// The parsed output of fio.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// Values by metric.
    pub values: BTreeMap<String, f64>,
    /// Latencies of all requests.
    pub latencies: Option<Histogram>,
    /// fio's JSON without the histograms.
    pub raw: Value,
}

/// The jobs of fio's JSON, none of which failed.
fn jobs(raw: &Value) -> Result<&Vec<Value>> {
    let jobs = raw["jobs"].as_array().context("fio's JSON has no jobs")?;
    for job in jobs {
        if let Some(error @ 1..) = job["error"].as_u64() {
            bail!(
                "fio's job '{}' failed with error {error}",
                job["jobname"].as_str().unwrap_or("")
            );
        }
    }
    Ok(jobs)
}

fn json(text: &str) -> Result<Value> {
    // fio may print warnings before the JSON.
    let from = text.find('{').context("fio has printed no JSON")?;
    serde_json::from_str(&text[from..]).context("fio's JSON")
}

/// Parses the JSON of `count` loads that ran [in turn](Call::in_turn): the bytes per second of each.
pub fn rates(text: &str, count: usize) -> Result<Vec<f64>> {
    let raw = json(text)?;
    let jobs = jobs(&raw)?;
    let rate = |i| {
        let name = format!("{LOAD}{i}");
        let job = jobs.iter().find(|job| job["jobname"] == name.as_str());
        let job = job.context("fio's JSON does not have the job")?;
        let side = |side: &str| job[side]["bw_bytes"].as_f64().unwrap_or(0.0);
        Ok(side("read") + side("write"))
    };
    (0..count).map(rate).collect()
}

/// Parses fio's JSON.
pub fn parse(text: &str, load: &Load) -> Result<Answer> {
    let mut raw = json(text)?;
    let jobs = jobs(&raw)?;
    let named = |name| jobs.iter().find(|job| job["jobname"] == name);
    let job = named(LOAD).context("fio's JSON does not have the job")?;
    let number = |side: &str, key: &str| job[side][key].as_f64().unwrap_or(0.0);
    let mut values = BTreeMap::new();
    let mut put = |key: &str, value: f64| {
        values.insert(key.to_owned(), value);
    };
    let flush = named(FLUSH).and_then(|job| job["sync"]["lat_ns"]["mean"].as_f64());
    let flush = flush.map(|ns| ns / 1e9);
    // Writes that were only in the server's memory count as done when they are durable.
    let longer = |side: &str| match (load.to_the_end, flush) {
        (true, Some(flush)) => {
            let seconds = number(side, "runtime") / 1e3;
            seconds / (seconds + flush).max(1e-9)
        }
        _ => 1.0,
    };
    let of =
        |key: &str| number("read", key) * longer("read") + number("write", key) * longer("write");
    put("iops", of("iops"));
    put("bytes_per_second", of("bw_bytes"));
    if let Pattern::RandomMix(_) = load.rw {
        for side in ["read", "write"] {
            put(&format!("{side}_iops"), number(side, "iops"));
            put(&format!("{side}_bytes_per_second"), number(side, "bw_bytes"));
        }
    }
    if let Some(flush) = flush {
        put("final_fsync_seconds", flush);
    }
    if let Some(sync) = job["sync"]["lat_ns"]["mean"].as_f64().filter(|_| load.sync != Sync::Never)
    {
        put("sync_mean_ns", sync);
    }
    let (histogram, mean) = latencies(job);
    if let Some(mean) = mean {
        put("latency_mean_ns", mean);
    }
    values.extend(percentiles(&histogram));
    let latencies = (histogram.count() > 0).then_some(histogram);
    remove_bins(&mut raw);
    Ok(Answer { values, latencies, raw })
}

/// Latencies of a job, reads and writes together: the histogram, and the mean in ns.
fn latencies(job: &Value) -> (Histogram, Option<f64>) {
    let sides = ["read", "write"].map(|side| {
        let side = &job[side];
        // Old versions of fio have only one histogram.
        if side["lat_ns"]["bins"].is_object() { &side["lat_ns"] } else { &side["clat_ns"] }
    });
    let (mut sum, mut count) = (0.0, 0.0);
    for latency in sides {
        let n = latency["N"].as_f64().unwrap_or(0.0);
        sum += latency["mean"].as_f64().unwrap_or(0.0) * n;
        count += n;
    }
    let histogram = merged(&sides.map(|latency| bins(&latency["bins"])));
    (histogram, (count > 0.0).then(|| sum / count))
}

/// Removes the histograms from fio's JSON: they are long and stored separately.
fn remove_bins(raw: &mut Value) {
    for job in raw["jobs"].as_array_mut().into_iter().flatten() {
        for side in ["read", "write", "trim"] {
            for kind in ["clat_ns", "slat_ns", "lat_ns"] {
                if let Some(latency) = job[side][kind].as_object_mut() {
                    latency.remove("bins");
                }
            }
        }
    }
}

/// The latency metrics of a distribution.
pub fn percentiles(latencies: &Histogram) -> impl Iterator<Item = (String, f64)> {
    let fractions = [("50", 0.5), ("90", 0.9), ("99", 0.99), ("999", 0.999), ("9999", 0.9999)];
    let value = move |(name, fraction): (&str, f64)| {
        Some((format!("latency_p{name}_ns"), latencies.quantile(fraction)? as f64))
    };
    fractions.into_iter().filter_map(value)
}

/// The buckets in fio's order, which is that of texts.
fn bins(bins: &Value) -> Histogram {
    let pairs = bins.as_object().into_iter().flatten();
    let buckets = pairs.filter_map(|(ns, count)| Some((ns.parse().ok()?, count.as_u64()?)));
    Histogram { buckets: buckets.collect() }
}

/// Parses a log of requests per second of all jobs: lines of time in ms, value, direction.
pub fn series(text: &str, load: &Load, effort: &Effort) -> Vec<Series> {
    let interval = interval_ms(effort);
    let mut sums: BTreeMap<u64, f64> = BTreeMap::new();
    for line in text.lines() {
        let mut fields = line.split(',').map(str::trim);
        let time = fields.next().and_then(|time| time.parse::<u64>().ok());
        let value = fields.next().and_then(|value| value.parse::<f64>().ok());
        if let (Some(time), Some(value)) = (time, value) {
            // The jobs' clocks differ by some milliseconds, so round to the nearest interval end.
            *sums.entry((time + interval / 2) / interval).or_default() += value;
        }
    }
    let (ends, iops) =
        sums.into_iter().map(|(n, iops)| ((n * interval) as f64 / 1e3, iops)).unzip();
    both_series(ends, iops, load.block)
}

/// Time series of requests per second and of bytes per second. `seconds` are the interval ends
/// since the start of the load, `block` is the size of a request. Empty for fewer than two
/// intervals.
pub fn both_series(seconds: Vec<f64>, iops: Vec<f64>, block: u64) -> Vec<Series> {
    if seconds.len() < 2 {
        return Vec::new();
    }
    let bytes = iops.iter().map(|iops| iops * block as f64).collect();
    vec![
        Series { metric: "bytes_per_second".to_owned(), seconds: seconds.clone(), values: bytes },
        Series { metric: "iops".to_owned(), seconds, values: iops },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Kind, find};

    fn load(name: &str) -> Load {
        let Kind::Load(load) = find(name).unwrap().kind else { panic!("{name}") };
        load
    }

    const EFFORT: Effort = Effort { rounds: 1, seconds: 2.0, disk: 1 << 30, bytes: 4 << 20 };

    fn call(disk: &Disk) -> Call<'_> {
        let output = Path::new("/s/out.json");
        Call { disk, disk_bytes: 1 << 30, effort: EFFORT, seed: 8, output }
    }

    fn text(name: &str, disk: &Disk) -> String {
        call(disk).of(&load(name)).join(" ")
    }

    #[test]
    fn the_command_line_says_what_the_load_is() {
        let disk = Disk::File { path: "/a:b".into(), cache: CacheMode::DirectSync };
        let line = text("libaio16", &disk);
        for word in [
            "--filename=/a\\:b --ioengine=libaio --direct=1 --sync=dsync",
            "--rw=randwrite --bs=4096 --iodepth=16 --numjobs=16",
            "--size=4194304 --offset_increment=4194304",
            "--name=flush --stonewall",
        ] {
            assert!(line.contains(word), "{word}: {line}");
        }
        assert!(!line.contains("time_based"), "{line}");
        let line = text("mixed-fsync", &Disk::Nbd("nbd+unix:///?socket=/s".into()));
        for word in ["--ioengine=nbd --uri=nbd+unix:///?socket=/s", "--rwmixread=70", "--fsync=32"]
        {
            assert!(line.contains(word), "{word}: {line}");
        }
        assert!(line.contains("--runtime=2000ms --time_based"), "{line}");
        let line = text("database", &Disk::Nbd("nbd+unix:///?socket=/s".into()));
        assert!(line.contains("--fsync=1") && !line.contains("fdatasync"), "{line}");
        let file = Disk::File { path: "/a".into(), cache: CacheMode::None };
        for (name, every) in [("durable16", "--fsync=1 "), ("batch16", "--fsync=32 ")] {
            let line = text(name, &file);
            assert!(line.contains(every) && line.contains("--numjobs=16"), "{name}: {line}");
            assert!(line.contains("--time_based") && line.contains("--norandommap"), "{line}");
        }
        // Each block once.
        for name in ["first-write", "rewrite-4k"] {
            let line = text(name, &file);
            assert!(!line.contains("--norandommap") && !line.contains("--time_based"), "{line}");
            assert!(line.contains("--size=4194304"), "{line}");
        }
        let unsafe_disk = Disk::File { path: "/a".into(), cache: CacheMode::Unsafe };
        let line = text("database", &unsafe_disk);
        assert!(!line.contains("sync=") && !line.contains("flush"), "{line}");
    }

    const JSON: &str = r#"fio: a warning
    {"jobs": [
      {"jobname": "load", "error": 0,
       "read": {"iops": 0, "bw_bytes": 0, "runtime": 0, "clat_ns": {"N": 0, "mean": 0}},
       "write": {"iops": 1000.0, "bw_bytes": 4096000, "runtime": 3000,
                 "clat_ns": {"N": 10, "mean": 150.0, "bins": {"200": 5, "100": 5, "900": 0}}},
       "sync": {"lat_ns": {"mean": 7.0}}},
      {"jobname": "flush", "error": 0, "read": {}, "write": {}, "sync": {"lat_ns": {"mean": 1e9}}}
    ]}"#;

    #[test]
    fn its_json_becomes_values() {
        let answer = parse(JSON, &load("sync16")).unwrap();
        // 3 s of writes and 1 s until they were durable.
        assert_eq!(answer.values["iops"], 750.0);
        assert_eq!(answer.values["bytes_per_second"], 3_072_000.0);
        assert_eq!(answer.values["final_fsync_seconds"], 1.0);
        assert_eq!(answer.values["latency_p50_ns"], 100.0);
        assert_eq!(answer.values["latency_p99_ns"], 200.0);
        assert_eq!(answer.values["latency_mean_ns"], 150.0);
        assert_eq!(answer.latencies.unwrap().buckets, [(100, 5), (200, 5)]);
        assert!(!answer.values.contains_key("sync_mean_ns"));
        assert!(!answer.raw.to_string().contains("bins"), "{}", answer.raw);
        // For a load with a time limit, fio's own rate is used.
        let answer = parse(JSON, &load("database")).unwrap();
        assert_eq!((answer.values["iops"], answer.values["sync_mean_ns"]), (1000.0, 7.0));
    }

    #[test]
    fn several_loads_run_in_turn_and_have_a_rate_each() {
        let disk = Disk::Nbd("nbd+unix:///?socket=/s".into());
        let loads = [load("seq1m-q8-read"), load("seq1m-q8-write")];
        let line = call(&disk).in_turn(&loads).join(" ");
        for word in ["--name=load0 --stonewall", "--name=load1 --stonewall", "--name=flush1"] {
            assert!(line.contains(word), "{word}: {line}");
        }
        assert!(!line.contains("flush0") && !line.contains("iops_log"), "{line}");
        let text = JSON.replace("\"load\"", "\"load1\"").replace("\"flush\"", "\"load0\"");
        assert_eq!(rates(&text, 2).unwrap(), [0.0, 4_096_000.0]);
        assert!(rates(&text, 3).is_err() && rates("{}", 1).is_err());
    }

    /// With a page cache, libaio's writes take their time while they are submitted. They once had
    /// latencies of a few nanoseconds.
    #[test]
    fn a_latency_begins_with_the_request() {
        let file = Disk::File { path: "/a".into(), cache: CacheMode::Writeback };
        assert!(text("libaio16", &file).contains("--lat_percentiles=1"));
        let both = r#""slat_ns": {"N": 10, "mean": 9000.0},
             "lat_ns": {"N": 10, "mean": 9100.0, "bins": {"9000": 9, "10000": 1}}, "clat_ns": {"#;
        let answer = parse(&JSON.replace("\"clat_ns\": {", both), &load("libaio16")).unwrap();
        assert_eq!(answer.values["latency_mean_ns"], 9100.0);
        assert_eq!(answer.values["latency_p50_ns"], 9000.0);
        assert_eq!(answer.latencies.unwrap().count(), 20);
    }

    #[test]
    fn errors_of_fio_are_errors() {
        let text = JSON.replacen("\"error\": 0", "\"error\": 5", 1);
        assert!(parse(&text, &load("database")).unwrap_err().to_string().contains("error 5"));
        assert!(parse("fio: no such file", &load("database")).is_err());
        assert!(parse("{}", &load("database")).is_err());
    }

    #[test]
    fn logs_of_several_jobs_are_added() {
        let log = "101, 10, 1, 0, 0\n200, 20, 1, 0, 0\n99, 1, 1, 0, 0\n201, 2, 0, 0, 0\nnonsense\n";
        let all = series(log, &load("sync16"), &EFFORT);
        assert_eq!(all[1].seconds, [0.1, 0.2]);
        assert_eq!(all[1].values, [11.0, 22.0]);
        assert_eq!(all[0].values, [11.0 * 4096.0, 22.0 * 4096.0]);
        assert_eq!(series("100, 5, 1\n", &load("sync16"), &EFFORT), []);
    }
}
