//! Opens an image that is in no cache, and reads a little from its middle.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::error::Result;
use vdkit_block::GuestOffset;
use vdkit_chain::{Disk, OpenOptions};

use super::{Bench, drop_caches, values};
use crate::environment::block::Counts;
use crate::layout::{self, Content, Image};
use crate::model::Sample;
use crate::peers::need;
use crate::process::{IoCounts, Line};

/// Bytes of the first read.
const FIRST: u64 = 4 << 10;

pub(super) fn sample(bench: &mut Bench<'_>) -> Result<Sample> {
    let (bytes, content) = (bench.disk_bytes()?, bench.content(false));
    let images = cold_images(bench, content, "disk")?;
    measure(bench, &images, bytes / 2 / FIRST * FIRST, FIRST)
}

/// Makes the images of the cell, which are in no cache afterwards.
pub(super) fn cold_images(
    bench: &mut Bench<'_>,
    content: Content,
    name: &str,
) -> Result<Vec<Image>> {
    let (layout, bytes, count) = (bench.layout()?, bench.disk_bytes()?, bench.images());
    let images = (0..count)
        .map(|i| layout::make_named(bench, layout, bytes, content, &format!("{name}{i}")))
        .collect::<Result<Vec<_>>>()?;
    let files: Vec<PathBuf> = images.iter().flat_map(|image| image.files.clone()).collect();
    drop_caches(&files)?;
    Ok(images)
}

/// Opens all images at once and reads from each.
pub(super) fn measure(
    bench: &mut Bench<'_>,
    images: &[Image],
    at: u64,
    len: u64,
) -> Result<Sample> {
    let before = Counts::of(&bench.place.info);
    let (elapsed, io) = match bench.axis("tool") {
        Some("library") => in_process(bench, images, at, len)?,
        tool => commands(bench, images, at, len, tool == Some("qemu-img"))?,
    };
    let mut all = values([
        ("elapsed_seconds", elapsed.as_secs_f64()),
        ("reads", io.read_calls as f64),
        ("read_bytes", io.read_call_bytes as f64),
    ]);
    if let (Some(before), Some(after)) = (before, Counts::of(&bench.place.info)) {
        all.insert("device_reads".to_owned(), after.reads.saturating_sub(before.reads) as f64);
    }
    Ok(Sample { values: all, ..Sample::default() })
}

fn commands(
    bench: &mut Bench<'_>,
    images: &[Image],
    at: u64,
    len: u64,
    qemu: bool,
) -> Result<(Duration, IoCounts)> {
    let program = if qemu { need("qemu-io")? } else { bench.command.clone() };
    // Load the program and its libraries into memory again: only the image must be cold. The bytes
    // read to start the program are subtracted from those that it reads of the image.
    let start = Line::new(&program).arg("--version").timed().run(&bench.cancel)?.io;
    let mut lines = Vec::new();
    for image in images {
        lines.push(if qemu {
            let command = format!("read {at} {len}");
            Line::new(&program).args(["-r", "-f", image.format, "-c", &command]).arg(&image.path)
        } else {
            bench
                .vdkit(&["read", "-f", image.format])
                .arg(&image.path)
                .args([at.to_string(), len.to_string()])
        });
    }
    let began = Instant::now();
    let lines = lines.into_iter().map(|line| line.timed().muted());
    let mut running = lines.map(|line| bench.start(&line)).collect::<Result<Vec<_>>>()?;
    let mut io = IoCounts::default();
    for one in &mut running {
        let own = one.succeed(&bench.cancel)?.io.since(start);
        io.read_calls += own.read_calls;
        io.read_call_bytes += own.read_call_bytes;
    }
    bench.note("the time includes the command's start; the reads exclude those of '--version'");
    Ok((began.elapsed(), io))
}

fn in_process(
    bench: &mut Bench<'_>,
    images: &[Image],
    at: u64,
    len: u64,
) -> Result<(Duration, IoCounts)> {
    let me = std::process::id();
    let before = IoCounts::of(me).unwrap_or_default();
    let began = Instant::now();
    let one = |image: &Image| -> vdkit_block::Result<()> {
        let options = OpenOptions::read_only().format(image.format);
        let disk = Disk::open(bench.registry, &image.path, &options)?;
        let mut buffer = vec![0; len as usize];
        disk.read_at(&mut buffer, GuestOffset(at))
    };
    let results: Vec<vdkit_block::Result<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = images.iter().map(|image| scope.spawn(|| one(image))).collect();
        let failed = || vdkit_block::Error::invalid("a thread has failed");
        threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err(failed()))).collect()
    });
    let elapsed = began.elapsed();
    let after = IoCounts::of(me).unwrap_or_default();
    for result in results {
        result?;
    }
    bench.commands.push(format!("# in the lab's process: Disk::open, then {len} bytes at {at}"));
    Ok((elapsed, after.since(before)))
}
