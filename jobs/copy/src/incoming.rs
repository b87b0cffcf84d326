//! Converts streams: a pipe, a compressed file, a server without ranges.
//!
//! ```text
//!   stream ─► first bytes: which format?
//!      raw: read once, in order                      any other: spooled to a file
//!        length unknown: the target grows in steps ──► at the end it gets the stream's length
//! ```
//!
//! A stream is also spooled if it must be read twice (to verify the target), or its target's size cannot
//! change.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use vdkit_block::{CancelToken, Error, Monitor, Options, Progress, Remedy, Result};
use vdkit_chain::{Disk, OpenOptions, Registry};
use vdkit_stream::{ByteStream, InPipe, spool};

use crate::convert::{ConvertOptions, ConvertReport, LeftBehind, Moving, convert};
use crate::mover::MovedBytes;
use crate::source::Source;
use crate::target::{Destination, Target};

/// Bytes of a stream for format probing.
const HEAD_BYTES: usize = 64 << 10;
/// The fallback format, which needs no spooling.
const RAW: &str = "raw";
/// Initial size of a target of unknown length; it doubles as needed, by at most the largest step.
const STEP_FIRST: u64 = 64 << 20;
const STEP_MAX: u64 = 1 << 30;
/// A disk's length is a multiple of this.
const SECTOR: u64 = 512;

/// A probed stream.
#[derive(Debug)]
pub enum Incoming {
    /// A spooled image.
    Disk(Box<Disk>),
    /// A raw disk, to be read sequentially.
    Raw(RawStream),
}

/// A raw disk as a stream.
#[derive(Debug)]
pub struct RawStream {
    stream: ByteStream,
    /// Its first bytes, unless the format was given as raw.
    head: Option<Vec<u8>>,
}

/// Probes a stream's format by its first bytes, unless `options` name it. Unless it is raw, spools
/// it to an unnamed file in `folder`.
///
/// # Errors
/// Errors of reading, spooling and opening.
pub fn receive(
    registry: &Registry,
    mut stream: ByteStream,
    folder: &Path,
    options: &OpenOptions,
    monitor: &Monitor<'_>,
) -> Result<Incoming> {
    let raw = match options.format.as_deref() {
        Some(name) => (name == RAW).then_some(None),
        None => {
            let head = stream.peek(HEAD_BYTES)?;
            let len = if head.len() < HEAD_BYTES { head.len() as u64 } else { u64::MAX };
            let tail = if len == u64::MAX { &[] } else { &head[head.len().saturating_sub(512)..] };
            let probed = registry.probe_bytes(stream.name(), &head, tail, len)?;
            (probed.fallback && probed.driver.name() == RAW).then_some(Some(head))
        }
    };
    match raw {
        Some(head) => Ok(Incoming::Raw(RawStream { stream, head })),
        None => {
            let storage = spool(stream, folder, monitor)?;
            let options = options.clone().writable(false);
            Ok(Incoming::Disk(Box::new(Disk::open_storage(registry, storage, &options)?)))
        }
    }
}

impl RawStream {
    /// Spools the stream after all.
    ///
    /// # Errors
    /// Errors of spooling and opening.
    pub fn into_disk(
        self,
        registry: &Registry,
        folder: &Path,
        monitor: &Monitor<'_>,
    ) -> Result<Disk> {
        let storage = spool(self.stream, folder, monitor)?;
        // Unless the format was given as raw, its end is probed too.
        let format = self.head.is_none().then(|| RAW.to_owned());
        let options = OpenOptions::read_only().maybe_format(format);
        Disk::open_storage(registry, storage, &options)
    }
}

/// Converts a raw disk sequentially, or spools it to `folder` if that is not possible.
///
/// # Errors
/// As [`convert`]; [`Error::Unsupported`] if the stream's end shows that it is not raw.
pub fn convert_stream(
    registry: &Registry,
    raw: RawStream,
    folder: &Path,
    options: &ConvertOptions,
    monitor: &Monitor<'_>,
) -> Result<ConvertReport> {
    let started = Instant::now();
    let len = raw.stream.known_len().map(|len| len.next_multiple_of(SECTOR));
    let Some(target) = Receiver::open(registry, len, options, &monitor.cancel)? else {
        let source = Source::new(vec![raw.into_disk(registry, folder, monitor)?]);
        return convert(registry, &source, options, monitor);
    };
    let RawStream { stream, head } = raw;
    let name = stream.name().to_owned();
    let pipe = Arc::new(InPipe::new(stream));
    let disk = target.disk();
    let moving = Moving::new(options, disk, usize::MAX)?.of_stream();
    let mut moved = MovedBytes::default();
    let mut from = 0;
    let bytes = loop {
        monitor.cancel.check()?;
        let end = target.end_of_step(from)?;
        let source = window(registry, &pipe, end)?;
        let shifted = Shifted { inner: monitor.progress, by: from };
        let part = Monitor::new(&shifted).cancelled_by(monitor.cancel.clone());
        moved = moved.plus(moving.run(&source, disk, from, &part)?);
        if let Some(bytes) = pipe.end() {
            break bytes;
        }
        from = end;
        if target.fixed.is_some() {
            if pipe.at_end()? {
                break from;
            }
            return Err(Error::invalid_for(
                &name,
                format!(
                    "goes on after the {end} bytes of {}",
                    disk.map_or("its announced length", Disk::name)
                ),
            ));
        }
    };
    check_end(registry, &name, head, &pipe, bytes)?;
    if !bytes.is_multiple_of(SECTOR) {
        monitor.progress.message(&format!(
            "{name}: ends within a sector, after {bytes} bytes: was all of it sent? The last sector \
             is filled up with zeroes"
        ));
    }
    // The last step reaches past the stream's end.
    moved.read = moved.read.min(bytes);
    moved.zero_found = moved.zero_found.min(bytes.next_multiple_of(SECTOR));
    let bytes = options.size_of_new(bytes.next_multiple_of(SECTOR));
    let format = disk.map(|disk| disk.top().name().to_owned());
    let made = target.finish(bytes, &monitor.cancel)?;
    let virtual_size = match &options.destination {
        // Some formats round the size.
        Destination::New(_) | Destination::Pipe { .. } => made.unwrap_or(bytes),
        _ => bytes,
    };
    let seconds = started.elapsed().as_secs_f64();
    let (threads, verified) = (moving.worked(), None);
    let left_behind = LeftBehind::default();
    Ok(ConvertReport { virtual_size, format, moved, verified, threads, seconds, left_behind })
}

/// The target of a sequential conversion.
struct Receiver {
    /// `None` for `null:`.
    target: Option<Target>,
    /// The target's size, if it cannot change.
    fixed: Option<u64>,
}

impl Receiver {
    /// Opens the target for a stream of `len` bytes, if known; `None` if the stream must be
    /// spooled.
    fn open(
        registry: &Registry,
        len: Option<u64>,
        options: &ConvertOptions,
        cancel: &CancelToken,
    ) -> Result<Option<Self>> {
        let random = options.verify
            || options.backing.is_some()
            || options.bitmaps.is_some()
            || options.salvage;
        if random {
            return Ok(None);
        }
        let given = match &options.destination {
            Destination::Null | Destination::Into(_) => None,
            Destination::New(new) => Some((&new.format, &new.options)),
            Destination::Pipe { format, options, .. } => Some((format, options)),
        };
        // Such an image starts with the disk size, which cannot be changed later.
        if let Destination::Pipe { format, .. } = &options.destination
            && len.is_none()
            && format != RAW
        {
            return Ok(None);
        }
        let preallocated = |(_, options): (&String, &Options)| {
            options.text("preallocation").is_some_and(|mode| mode != "off")
        };
        if len.is_none() && given.is_some_and(preallocated) {
            return Ok(None);
        }
        let first = match given {
            Some(_) => len.map_or(STEP_FIRST, |len| options.size_of_new(len)),
            None => len.unwrap_or(0),
        };
        let target = Target::of(registry, options, first, None, cancel)?;
        let fixed = match (&options.destination, &target) {
            (Destination::Into(_), Some(target)) => len.or(Some(target.disk.guest_bytes())),
            _ => len,
        };
        if let (Some(target), None) = (&target, fixed)
            && !grows(&target.disk)?
        {
            return Ok(None);
        }
        Ok(Some(Self { target, fixed }))
    }

    fn disk(&self) -> Option<&Disk> {
        self.target.as_ref().map(|target| &target.disk)
    }

    /// End of the next step; grows the target to it.
    fn end_of_step(&self, from: u64) -> Result<u64> {
        let Some(fixed) = self.fixed else {
            let end = from + from.clamp(STEP_FIRST, STEP_MAX);
            if let Some(disk) = self.disk().filter(|disk| disk.guest_bytes() < end) {
                disk.resize(end)?;
            }
            return Ok(end);
        };
        Ok(fixed)
    }

    /// Sets the target's final length and renames it into place. Returns the size of its disk.
    fn finish(mut self, bytes: u64, cancel: &CancelToken) -> Result<Option<u64>> {
        let Some(target) = self.target.take() else { return Ok(None) };
        if self.fixed.is_none() {
            target.disk.resize(bytes)?;
        }
        let made = target.disk.guest_bytes();
        target.close()?;
        target.commit(cancel)?;
        Ok(Some(made))
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.target.iter().for_each(Target::give_up);
    }
}

/// Whether a new target's size can change cheaply; tries it.
fn grows(disk: &Disk) -> Result<bool> {
    if disk.top().caps().one_pass || !disk.top().new_reads_zero() {
        return Ok(false);
    }
    match disk.resize(2 * STEP_FIRST) {
        Ok(()) => Ok(true),
        Err(Error::Unsupported { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The stream as a disk of `len` bytes.
fn window(registry: &Registry, pipe: &Arc<InPipe>, len: u64) -> Result<Source> {
    let options = OpenOptions::read_only().format(RAW);
    let disk = Disk::open_storage(registry, pipe.window(len), &options)?;
    Ok(Source::of_stream(disk, pipe.clone()))
}

/// Fails if the stream's end shows that it was not raw.
fn check_end(
    registry: &Registry,
    name: &str,
    head: Option<Vec<u8>>,
    pipe: &InPipe,
    bytes: u64,
) -> Result<()> {
    let Some(head) = head else { return Ok(()) };
    let probed = registry.probe_bytes(name, &head, &pipe.tail(), bytes)?;
    if probed.fallback {
        return Ok(());
    }
    let format = probed.driver.name();
    Err(Error::unsupported(
        name,
        format!("its end says that it is a {format} image, which was not known before it was read"),
        Remedy::NameFormat { format },
    ))
}

/// Progress of a part of a job.
struct Shifted<'a> {
    inner: &'a dyn Progress,
    by: u64,
}

impl Progress for Shifted<'_> {
    fn update(&self, done: u64, total: u64) {
        self.inner.update(self.by + done, total);
    }

    fn message(&self, text: &str) {
        self.inner.message(text);
    }
}
