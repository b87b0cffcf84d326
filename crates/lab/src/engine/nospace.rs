//! The file system beneath the image fills while a client writes, and has room again later.
//!
//! A small ext4 file system holds the image and a ballast file. Once it is full, the lab waits, then
//! removes the ballast. A server that lets its clients wait comes through: all writes are done and the
//! image is sound. One that reports errors does not; a guest would have remounted its disk read-only.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::{Bench, values};
use crate::fio::Disk;
use crate::front::{self, Target};
use crate::layout::{self, Image};
use crate::model::Sample;
use crate::peers::{find, need, need_root, skip};
use crate::place::attach::{Attached, Mounted};
use crate::place::{Place, free_bytes};
use crate::process::{Ended, Line};

/// Size of the small file system.
pub const POOL_BYTES: u64 = 128 << 20;
/// What the client writes.
const WRITE_BYTES: u64 = 64 << 20;
/// Room that is left for the image before the ballast goes.
const ROOM_BYTES: u64 = 24 << 20;
/// How long the file system stays full.
const FULL: Duration = Duration::from_secs(3);
/// Space that does not become less for so long is what the server can make no use of.
const STANDS: Duration = Duration::from_secs(2);
/// How long the client may take.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) fn sample(bench: &mut Bench<'_>) -> Result<Sample> {
    need_root("a small file system that fills")?;
    if bench.place.device().is_some() {
        return skip("a device does not fill: this is about folders");
    }
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

fn within(bench: &mut Bench<'_>, fio: &std::path::Path, pool: &std::path::Path) -> Result<Sample> {
    let (layout, front, cache) = (bench.layout()?, bench.front()?, bench.cache()?);
    // The image is beside the ballast, sockets and results are not.
    let place = Place::scratch(pool, &bench.place.info);
    let folder = bench.folder.clone();
    let image = {
        let mut inner = Bench {
            command: bench.command.clone(),
            registry: bench.registry,
            cancel: bench.cancel.clone(),
            effort: bench.effort,
            seed: bench.seed,
            place: &place,
            folder: pool.to_owned(),
            axes: bench.axes,
            commands: Vec::new(),
            notes: Vec::new(),
            references: &mut *bench.references,
        };
        let image = layout::make(&mut inner, layout, 2 * WRITE_BYTES, false)?;
        let commands = std::mem::take(&mut inner.commands);
        bench.commands.extend(commands);
        image
    };
    let ballast = pool.join("ballast");
    let file = std::fs::File::create(&ballast)?;
    let fill = free_bytes(pool)?.saturating_sub(ROOM_BYTES);
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, fill)
        .context("ballast")?;
    drop(file);
    let served = front::start(bench, front, &image, cache)?;
    if let Target::Guest(_) | Target::InProcess { .. } = served.target {
        return skip("the client is fio on this host: fronts nbd…, fuse… or file");
    }
    let disk = Disk::of(&served.target).context("fio cannot open this")?;
    let line = client(fio, &disk, &folder);
    let mut running = bench.start(&line)?;
    let began = Instant::now();
    let mut full_since: Option<Instant> = None;
    let mut freed = None;
    let mut last = (u64::MAX, began);
    while !running.wait(Duration::from_millis(20))? {
        bench.cancel.check()?;
        if began.elapsed() > PATIENCE {
            running.end();
            break;
        }
        let free = free_bytes(pool)?;
        if free != last.0 {
            last = (free, Instant::now());
        }
        // The last blocks may not be enough for what the server wants at once.
        let stands = free < ROOM_BYTES && last.1.elapsed() > STANDS;
        if full_since.is_none() && (free < 1 << 20 || stands) {
            full_since = Some(last.1);
        }
        if freed.is_none() && full_since.is_some_and(|since| since.elapsed() > FULL) {
            std::fs::remove_file(&ballast)?;
            freed = Some(Instant::now());
            bench.commands.push("# the ballast is removed: there is room again".to_owned());
        }
    }
    let waited = full_since.map(|since| freed.unwrap_or_else(Instant::now) - since);
    let ended = running.ended()?;
    let _ = std::fs::remove_file(&ballast);
    served.end();
    let sound = sound(bench, &image)?;
    told(bench, &ended, waited.unwrap_or_default(), sound)
}

/// Writes in order, with a sync at the end.
fn client(fio: &std::path::Path, disk: &Disk, folder: &std::path::Path) -> Line {
    let line = Line::new(fio).args(["--output-format=json", "--name=client"]);
    let line = match disk {
        Disk::Nbd(uri) => line.args(["--ioengine=nbd", &format!("--uri={uri}")]),
        Disk::File { path, direct, .. } => line
            .arg(format!("--filename={}", path.replace(':', "\\:")))
            .args(["--ioengine=libaio", &format!("--direct={}", u8::from(*direct))]),
    };
    line.args(["--rw=write", "--bs=64k", "--iodepth=4", "--end_fsync=1"])
        .arg(format!("--size={WRITE_BYTES}"))
        .within(folder)
}

/// Whether a check finds the image undamaged: leaks are no damage.
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

fn told(bench: &mut Bench<'_>, ended: &Ended, waited: Duration, sound: bool) -> Result<Sample> {
    let text = ended.stdout.find('{').map_or("null", |from| &ended.stdout[from..]);
    let raw: serde_json::Value = serde_json::from_str(text).unwrap_or_default();
    let written = raw["jobs"][0]["write"]["io_bytes"].as_u64().unwrap_or(0);
    let failed = !ended.status.success() || raw["jobs"][0]["error"].as_u64() != Some(0);
    let complete = !failed && written == WRITE_BYTES;
    if waited.is_zero() {
        bench.note(if failed {
            "the client was told of an error before the file system was seen to be full"
        } else {
            "the file system was never seen to be full"
        });
    }
    let told = match (failed, sound) {
        (false, true) => "paused, and went on when there was room",
        (true, true) => "broke: the client got an error; the image is sound",
        (_, false) => "broke: the image is damaged",
    };
    bench.note(told);
    let all = values([
        ("survived", f64::from(u8::from(complete && sound))),
        ("io_errors", f64::from(u8::from(failed))),
        ("stalled_seconds", waited.as_secs_f64()),
        ("elapsed_seconds", ended.elapsed.as_secs_f64()),
    ]);
    let raw = (!raw.is_null()).then_some(raw);
    Ok(Sample { values: all, raw, ..Sample::default() })
}
