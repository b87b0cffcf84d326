//! Fills the file system below the image while a client writes, and frees space again later.
//!
//! A small ext4 file system holds the image and a ballast file. When it is full, the lab waits and
//! then removes the ballast. A server that makes its clients wait survives: all writes complete and
//! the image is sound. A server that reports errors does not survive, because a guest would have
//! remounted its disk read-only. With the fronts `guest-…` a real guest writes, and the lab counts
//! the errors in its kernel log. QEMU may stop the whole guest instead of reporting an error to it;
//! the lab then resumes the guest once there is space.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::error::{Context, Result, bail};
use serde_json::Value;

use super::{Bench, values};
use crate::fio::Disk;
use crate::front::qmp::{self, Machine};
use crate::front::{self, Booted, Target};
use crate::layout::{self, Content, Image};
use crate::model::Sample;
use crate::peers::{find, need, need_root, skip};
use crate::place::attach::{Attached, Mounted};
use crate::place::{Place, free_bytes};
use crate::process::{Line, Running};

/// Size of the small file system.
pub const POOL_BYTES: u64 = 128 << 20;
/// Bytes that the client writes.
const WRITE_BYTES: u64 = 64 << 20;
/// Space for the image before the ballast is removed.
const ROOM_BYTES: u64 = 24 << 20;
/// How long the file system stays full.
const FULL: Duration = Duration::from_secs(3);
/// If free space does not shrink for this long, the server cannot use the rest.
const STANDS: Duration = Duration::from_secs(2);
/// So much new data must come from the client, not from a file system's metadata.
const WRITTEN_BYTES_MIN: u64 = 4 << 20;
/// Longest time for the client.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest additional time for a guest: an emulated processor boots slowly.
const BOOT: Duration = Duration::from_secs(180);
/// Interval between two queries whether QEMU has stopped the guest.
const ASK: Duration = Duration::from_millis(500);

/// Approximate duration of a round besides its commands, for a client that waits: until the pool is
/// found full, until it has space again, and for the rest of the writes.
pub const SECONDS: f64 = 4.0;

pub(super) fn sample(bench: &mut Bench<'_>) -> Result<Sample> {
    need_root("a small file system that fills")?;
    let fio = need("fio")?;
    let pool = bench.folder.join("pool.img");
    std::fs::File::create(&pool)?.set_len(POOL_BYTES)?;
    let line =
        Line::new(find("mkfs.ext4").context("mkfs.ext4")?).args(["-q", "-F", "-m", "0"]).arg(&pool);
    bench.run(&line)?;
    let attached = Attached::new(bench, &pool)?;
    let at = bench.folder.join("pool");
    std::fs::create_dir_all(&at)?;
    let device = attached.path().to_owned();
    let mounted = Mounted::new(bench, &device, &at)?;
    let outcome = within(bench, &fio, &at);
    mounted.end(bench)?;
    attached.end(bench)?;
    outcome
}

fn within(bench: &mut Bench<'_>, fio: &Path, pool: &std::path::Path) -> Result<Sample> {
    let (layout, front, cache) = (bench.layout()?, bench.front()?, bench.cache()?);
    // The image shares the file system with the ballast; sockets and results do not.
    let inner = Place::scratch(pool, &bench.place.info);
    let place = std::mem::replace(&mut bench.place, inner);
    let folder = std::mem::replace(&mut bench.folder, pool.to_owned());
    let image = layout::make(bench, layout, 2 * WRITE_BYTES, Content::Nothing);
    (bench.place, bench.folder) = (place, folder);
    let image = image?;
    let ballast = pool.join("ballast");
    let file = std::fs::File::create(&ballast)?;
    let fill = free_bytes(pool)?.saturating_sub(ROOM_BYTES);
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, fill)
        .context("ballast")?;
    drop(file);
    let served = front::start(bench, front, &image, cache)?;
    let began = Instant::now();
    let mut writer = Writer::start(bench, fio, &served.target)?;
    let (completed, waited) = watch(bench, &mut writer, pool, &ballast)?;
    let results = match completed {
        true => writer.results(bench)?,
        false => {
            // A guest that goes on would hold the image.
            drop(writer);
            Results { failed: true, elapsed: began.elapsed(), ..Results::default() }
        }
    };
    let _ = std::fs::remove_file(&ballast);
    served.end();
    let sound = sound(bench, &image)?;
    Ok(conclude(bench, results, waited, sound, front.daemons()))
}

/// Waits for the client's end. Removes the ballast once the file system has been full for a while,
/// and resumes a stopped guest. Returns whether the client completed, and for how long there was no
/// space.
fn watch(
    bench: &mut Bench<'_>,
    writer: &mut Writer,
    pool: &Path,
    ballast: &Path,
) -> Result<(bool, Duration)> {
    let (began, room) = (Instant::now(), free_bytes(pool)?);
    let patience = PATIENCE + writer.boots();
    let (mut full_since, mut freed): (Option<Instant>, Option<Instant>) = (None, None);
    let mut last = (room, began);
    let over = |since: Option<Instant>, freed: Option<Instant>| {
        since.map(|since| freed.unwrap_or_else(Instant::now) - since).unwrap_or_default()
    };
    while !writer.wait(Duration::from_millis(20))? {
        bench.cancel.check()?;
        if began.elapsed() > patience {
            bench.note("the client did not finish in time");
            return Ok((false, over(full_since, freed)));
        }
        let free = free_bytes(pool)?;
        if free != last.0 {
            last = (free, Instant::now());
        }
        // The free blocks may be fewer than the server wants at once. A guest writes nothing until
        // it has booted.
        let stands = free + WRITTEN_BYTES_MIN < room && last.1.elapsed() > STANDS;
        if full_since.is_none() && (free < 1 << 20 || stands) {
            full_since = Some(last.1);
        }
        if freed.is_none() && full_since.is_some_and(|since| since.elapsed() > FULL) {
            std::fs::remove_file(ballast)?;
            freed = Some(Instant::now());
            bench.commands.push("# the ballast is removed: there is room again".to_owned());
        }
        if freed.is_some() {
            writer.resume(bench)?;
        }
    }
    Ok((true, over(full_since, freed)))
}

/// The program that writes.
enum Writer {
    /// fio on this host.
    Host(Running),
    /// fio in a guest.
    Guest { booted: Box<Booted>, stops: u32, asked: Instant },
}

#[derive(Debug, Default)]
struct Results {
    /// fio's JSON output.
    fio: Value,
    /// Whether fio failed.
    failed: bool,
    /// Number of errors: a guest's kernel logs each failed request.
    errors: u64,
    /// How often QEMU stopped the whole guest.
    stops: u32,
    elapsed: Duration,
}

/// Separates fio's answer from the kernel log on the guest's second serial port.
const MARK: &str = "=== kernel ===";

impl Writer {
    fn start(bench: &mut Bench<'_>, fio: &Path, target: &Target) -> Result<Self> {
        let Some(disk) = Disk::of(target) else {
            return skip("fio cannot open this: fronts nbd…, fuse…, file or guest…");
        };
        let Target::Guest(guest) = target else {
            let line = arguments(Line::new(fio), &disk).within(&bench.folder);
            return Ok(Self::Host(bench.start(&line)?));
        };
        let line = arguments(Line::new("fio"), &disk).text();
        // The kernel logs a failed request as "I/O error, dev vda" or similar.
        let script = format!(
            "{line} > /tmp/out.json 2>/tmp/errors; code=$?\n\
             (cat /tmp/out.json; echo; echo '{MARK}'; echo $code; \
             dmesg | grep -c ' error, dev ') > $OUT\nexit 0"
        );
        let booted = guest.boot(bench, &script)?;
        Ok(Self::Guest { booted: Box::new(booted), stops: 0, asked: Instant::now() })
    }

    fn wait(&mut self, most: Duration) -> Result<bool> {
        match self {
            Self::Host(running) => running.wait(most),
            Self::Guest { booted, .. } => booted.wait(most),
        }
    }

    /// Longest time besides its writes.
    fn boots(&self) -> Duration {
        match self {
            Self::Host(_) => Duration::ZERO,
            Self::Guest { .. } => BOOT,
        }
    }

    /// Resumes a guest that QEMU has stopped, as an administrator or libvirt would.
    fn resume(&mut self, bench: &mut Bench<'_>) -> Result<()> {
        let Self::Guest { booted, stops, asked } = self else { return Ok(()) };
        if asked.elapsed() < ASK {
            return Ok(());
        }
        *asked = Instant::now();
        // QEMU may end at any moment.
        let Ok(mut machine) = Machine::connect(&booted.monitor) else { return Ok(()) };
        if machine.status().is_ok_and(|status| status == qmp::STOPPED) {
            *stops += 1;
            bench.commands.push("# to QEMU: {\"execute\": \"cont\"}".to_owned());
            machine.resume()?;
        }
        Ok(())
    }

    /// Collects the results of a writer that has ended.
    fn results(self, bench: &mut Bench<'_>) -> Result<Results> {
        let (booted, stops) = match self {
            Self::Host(mut running) => {
                let ended = running.ended()?;
                let fio = parsed(&ended.stdout);
                let failed = !ended.status.success() || has_error(&fio);
                let errors = u64::from(failed);
                return Ok(Results { fio, failed, errors, stops: 0, elapsed: ended.elapsed });
            }
            Self::Guest { booted, stops, .. } => (booted, stops),
        };
        let output = booted.output()?;
        if output.emulated {
            bench.note("the guest's processor was emulated (TCG): no KVM here");
        }
        let (json, rest) =
            output.results.split_once(MARK).context("the guest printed no results")?;
        let mut numbers = rest.split_whitespace().map(str::parse::<u64>);
        let (Some(Ok(code)), Some(Ok(errors))) = (numbers.next(), numbers.next()) else {
            bail!("the guest printed no results: {rest}");
        };
        let fio = parsed(json);
        let seconds = fio["jobs"][0]["elapsed"].as_u64().unwrap_or(0);
        let failed = code != 0 || has_error(&fio);
        Ok(Results { fio, failed, errors, stops, elapsed: Duration::from_secs(seconds) })
    }
}

fn parsed(text: &str) -> Value {
    let text = text.find('{').map_or("null", |from| &text[from..]);
    serde_json::from_str(text).unwrap_or_default()
}

fn has_error(fio: &Value) -> bool {
    fio["jobs"][0]["error"].as_u64() != Some(0)
}

/// Writes in order with a sync at the end.
fn arguments(fio: Line, disk: &Disk) -> Line {
    fio.args(["--output-format=json", "--name=client"])
        .args(disk.arguments("libaio"))
        .args(["--rw=write", "--bs=64k", "--iodepth=4", "--end_fsync=1"])
        .arg(format!("--size={WRITE_BYTES}"))
}

/// Whether a check finds the image undamaged. Leaks are no damage.
fn sound(bench: &mut Bench<'_>, image: &Image) -> Result<bool> {
    if image.format == "raw" {
        return Ok(true);
    }
    let line = bench.vdkit(&["check", "-f", image.format]).arg(&image.path);
    bench.commands.push(line.text());
    let ended = line.run_any(&bench.cancel)?;
    match ended.status.code() {
        Some(0 | 3) => Ok(true),
        Some(4) => Ok(false),
        _ => bail!("{}: {}{}", line.text(), ended.status, ended.complaint()),
    }
}

/// What happened. `waited` is how long there was no space.
fn described(results: &Results, waited: Duration, sound: bool) -> String {
    let text = match (results.failed, sound, results.stops) {
        (_, false, _) => "failed: the image is damaged",
        _ if results.errors > 0 => {
            return format!(
                "failed: the client got errors ({}); the image is sound",
                results.errors
            );
        }
        (true, ..) => "failed: the client did not complete its writes; the image is sound",
        _ if waited.is_zero() => "completed, but the file system was never full",
        (.., 0) => "paused, and continued when there was space again",
        _ => {
            "QEMU stopped the whole guest, which saw no error and continued when there was space \
             again and the lab resumed it (cont)"
        }
    };
    text.to_owned()
}

fn conclude(
    bench: &mut Bench<'_>,
    results: Results,
    waited: Duration,
    sound: bool,
    daemons: u32,
) -> Sample {
    let written = results.fio["jobs"][0]["write"]["io_bytes"].as_u64().unwrap_or(0);
    // A guest's kernel may retry a failed request, but the guest has seen an error.
    let complete = !results.failed && results.errors == 0 && written == WRITE_BYTES;
    if results.failed && waited.is_zero() {
        bench.note("the client got an error before the file system was full");
    }
    bench.note(&described(&results, waited, sound));
    let all = values([
        ("survived", f64::from(u8::from(complete && sound))),
        ("io_errors", results.errors as f64),
        ("machine_stops", f64::from(results.stops)),
        ("daemons", f64::from(daemons)),
        ("stalled_seconds", waited.as_secs_f64()),
        ("elapsed_seconds", results.elapsed.as_secs_f64()),
    ]);
    let raw = (!results.fio.is_null()).then_some(results.fio);
    Sample { values: all, raw, ..Sample::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client that never met a full file system was once said to have paused, and one that did
    /// not end in time to have got 0 errors.
    #[test]
    fn no_pause_and_no_error_is_made_up() {
        let full = Duration::from_secs(3);
        let results =
            |failed, errors, stops| Results { failed, errors, stops, ..Results::default() };
        assert!(described(&results(false, 0, 0), full, true).starts_with("paused"));
        assert!(described(&results(false, 0, 1), full, true).starts_with("QEMU stopped"));
        assert!(described(&results(false, 0, 0), Duration::ZERO, true).contains("never full"));
        assert!(described(&results(true, 2, 0), full, true).contains("got errors (2)"));
        assert!(described(&results(true, 0, 0), full, true).contains("did not complete"));
        // All was written in the end, but the guest's kernel had logged errors.
        assert!(
            described(&results(false, 1, 0), full, true)
                .starts_with("failed: the client got errors")
        );
        assert!(described(&results(false, 0, 0), full, false).contains("damaged"));
    }

    #[test]
    fn an_answer_without_an_end_is_an_error() {
        let ok = parsed("fio: hint\n{\"jobs\": [{\"error\": 0}]}");
        assert!(!has_error(&ok));
        for text in ["", "{\"jobs\": [{\"error\": 28}]}", "{\"jobs\": ["] {
            assert!(has_error(&parsed(text)), "{text}");
        }
    }
}
