//! `qemu-img bench`: measures requests to an image.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use vdkit::{Disk, GuestOffset};

use super::{Command, FORCE_SHARE, FORMAT, IMAGE_OPTS, OBJECT, Output, QUIET, one_image, opening};
use crate::failure::{Failure, could_not_open};
use crate::getopt::{Opt, Parsed, flag, long, valued};
use crate::open::{Access, cache_mode, open};
use crate::sizes;

/// Threads that send requests; a larger depth is not reached.
const THREADS_MAX: u64 = 16;

const OPTIONS: &[Opt] = &[
    QUIET.short_only(),
    FORMAT,
    IMAGE_OPTS,
    valued('t', "cache", "CACHE", "cache mode of the image (writeback)"),
    valued('c', "count", "COUNT", "number of requests (75000)"),
    valued('s', "buffer-size", "BUFFER_SIZE", "bytes of a request (4096)"),
    valued('d', "depth", "DEPTH", "requests at a time (64); vdkit sends at most 16"),
    valued('o', "offset", "OFFSET", "offset of the first request"),
    valued('S', "step-size", "STEP_SIZE", "bytes from one request to the next"),
    valued('i', "aio", "AIO", "threads, native or io_uring; accepted"),
    flag('n', "native", "as --aio=native"),
    flag('w', "write", "write instead of reading"),
    long("pattern", Some("PATTERN"), "the byte that is written (0)"),
    long("flush-interval", Some("FLUSH_INTERVAL"), "flush after this number of requests"),
    long("no-drain", None, "accepted"),
    FORCE_SHARE,
    OBJECT.whole_name_only(),
];

pub const COMMAND: Command = Command {
    name: "bench",
    about: "Measure requests to an image",
    operands: "FILENAME",
    options: OPTIONS,
    run,
};

#[derive(Clone, Copy, Debug)]
struct Load {
    count: u64,
    depth: u64,
    request_bytes: u64,
    offset: u64,
    step: u64,
    write: bool,
    pattern: u8,
    flush_interval: u64,
}

impl Load {
    fn parse(parsed: &Parsed) -> Result<Self, Failure> {
        const INT_MAX: u64 = i32::MAX as u64;
        let number = |option: &str, what: &str, default, least, most| match parsed.last(option) {
            Some(text) => sizes::number(what, text, least, most),
            None => Ok(default),
        };
        let size = |option: &str, what: &str, default, least, most| match parsed.last(option) {
            Some(text) => sizes::within(what, text, least, most),
            None => Ok(default),
        };
        let request_bytes = size("buffer-size", "buffer size", 4096, 1, INT_MAX)?;
        let load = Self {
            count: number("count", "request count", 75_000, 1, INT_MAX)?,
            depth: number("depth", "queue depth", 64, 1, INT_MAX)?,
            request_bytes,
            offset: size("offset", "offset", 0, 0, i64::MAX as u64)?,
            step: size("step-size", "step size", 0, 0, INT_MAX)?,
            write: parsed.has("write"),
            pattern: number("pattern", "pattern byte", 0, 0, 255)? as u8,
            flush_interval: number("flush-interval", "flush interval", 0, 0, INT_MAX)?,
        };
        if load.flush_interval > 0 && !load.write {
            return Err(Failure::new("--flush-interval is only available in write tests"));
        }
        if load.flush_interval > 0 && load.flush_interval < load.depth {
            return Err(Failure::new("Flush interval can't be smaller than depth"));
        }
        let step = if load.step == 0 { request_bytes } else { load.step };
        Ok(Self { step, ..load })
    }

    /// Sends the requests `first..first + count`.
    fn send(&self, disk: &Disk, first: u64, count: u64) -> vdkit::Result<()> {
        let next = AtomicU64::new(first);
        let work = || -> vdkit::Result<()> {
            let mut buffer = vec![self.pattern; self.request_bytes as usize];
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= first + count {
                    return Ok(());
                }
                let at = GuestOffset(self.at(number, disk.guest_bytes()));
                match self.write {
                    true => disk.write_at(&buffer, at)?,
                    false => disk.read_at(&mut buffer, at)?,
                }
            }
        };
        let threads = self.depth.min(count).min(THREADS_MAX);
        std::thread::scope(|scope| {
            let start = |_| std::thread::Builder::new().spawn_scoped(scope, work);
            let started = (1..threads).map(start).collect::<std::io::Result<Vec<_>>>();
            let threads = started.map_err(|source| {
                // Those that were started find nothing to do any more.
                next.store(first + count, Ordering::Relaxed);
                let file = disk.name().to_owned();
                vdkit::Error::File { file, action: vdkit::IoAction::Start, source }
            })?;
            let own = work();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("a thread of requests does not panic"))
                .fold(own, Result::and)
        })
    }

    /// The offset of a request; behind the end of the disk the offsets begin again.
    fn at(&self, number: u64, bytes: u64) -> u64 {
        let at = u128::from(self.offset) + u128::from(number) * u128::from(self.step);
        if number == 0 || bytes == 0 {
            return self.offset;
        }
        (at % u128::from(bytes)) as u64
    }

    fn run(&self, disk: &Disk) -> vdkit::Result<()> {
        let batch = if self.flush_interval > 0 { self.flush_interval } else { self.count };
        let mut sent = 0;
        while sent < self.count {
            let count = batch.min(self.count - sent);
            self.send(disk, sent, count)?;
            sent += count;
            if self.flush_interval > 0 && count == self.flush_interval {
                disk.flush()?;
            }
        }
        Ok(())
    }
}

fn run(parsed: &Parsed, out: &mut Output) -> Result<u8, Failure> {
    let load = Load::parse(parsed)?;
    let cache = match parsed.last("cache") {
        None => vdkit::CacheMode::default(),
        Some(name) => cache_mode(name).ok_or_else(|| Failure::new("Invalid cache mode"))?,
    };
    let aio = parsed.last("aio");
    if let Some(aio) = aio.filter(|aio| !matches!(*aio, "threads" | "native" | "io_uring")) {
        return Err(Failure::new(format!("Invalid aio option: {aio}")));
    }
    let file = one_image(parsed)?;
    let (objects, image) = opening::image(parsed, file)?;
    if (parsed.has("native") || aio == Some("native")) && !cache.direct() {
        return Err(could_not_open(
            &image.typed,
            "aio=native was specified, but it requires cache.direct=on, which was not specified.",
        ));
    }
    let access = Access { cache, ..opening::access(parsed, file, load.write)? };
    let disk = open(&image, access, &objects)?;
    out.line(format!(
        "Sending {} {} requests, {} bytes each, {} in parallel (starting at offset {}, step size {})",
        load.count,
        if load.write { "write" } else { "read" },
        load.request_bytes,
        load.depth,
        load.offset,
        load.step
    ));
    if load.flush_interval > 0 {
        out.line(format!("Sending flush every {} requests", load.flush_interval));
    }
    out.flush();
    let started = Instant::now();
    let ran = load.run(&disk);
    let seconds = started.elapsed().as_secs_f64();
    let ran = ran.map_err(|error| match error {
        vdkit::Error::Invalid { .. } => Failure::new("Failed request: Input/output error"),
        other => Failure::from(other).within("Failed request"),
    });
    opening::close(&disk, ran)?;
    out.line(format!("Run completed in {seconds:.3} seconds."));
    Ok(0)
}
