//! Appliances: converts the disks of an OVA in place, and makes an OVA of disks.
//!
//! ```text
//!   for each disk, several at once:   window ─► conversion ─► unnamed target ───────┐ all valid:
//!                                     window ─► hash ─► equal to manifest? ─────────┘ rename
//! ```
//!
//! Targets get their names when every disk is complete and every hash matched. A target that cannot
//! wait for that (a device, an existing image, a pipe) is written after its hash was checked.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use serde::Serialize;
use vdkit_block::{
    CacheMode, CancelToken, CompressionSpec, Error, ErrorKind, ImageInfo, Limits, Monitor, Options,
    Progress, Remedy, Result, Storage,
};
use vdkit_chain::{Disk, OpenOptions, Registry};
use vdkit_ova::{Machine, NewDisk, Package, PackageLimits, PackageWriter};
use vdkit_storage::PendingFile;
use vdkit_stream::{ByteStream, OutPipe, Packing, StorageReader, spool};

use vdkit_copy::{
    ConvertOptions, ConvertReport, Converted, Destination, Source, commit_options, convert,
    convert_uncommitted, default_threads, new_file_options, verify,
};

/// Maximum concurrent conversions: more would only scatter the reads.
const AT_ONCE_MAX: usize = 4;
/// Bytes per grain of written disks.
const GRAIN_BYTES: u64 = 64 << 10;
/// Bytes that a gzipped image may have beyond its disk's size: tables, and incompressible data.
const SLACK_BYTES: u64 = 64 << 20;

/// Result of a job on an appliance.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct ApplianceReport {
    /// The disks.
    pub disks: Vec<ApplianceDisk>,
    /// State of the manifest: `verified`, `missing` or `written`.
    pub manifest: &'static str,
    /// An unverified certificate in the appliance.
    pub certificate: Option<String>,
    /// Wall time.
    pub seconds: f64,
}

/// A converted disk of an appliance.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct ApplianceDisk {
    /// Its file in the appliance.
    pub file: String,
    /// The target; `None` for `null:` and for a new appliance.
    pub target: Option<String>,
    /// The conversion's report.
    #[serde(flatten)]
    pub report: ConvertReport,
}

/// A disk to convert.
#[derive(Debug)]
#[non_exhaustive]
pub struct Extraction {
    /// Its index in [`Package::disks`].
    pub disk: usize,
    /// The disk, from [`open_packaged`].
    pub source: Source,
    /// Its target and options. The threads are divided among the disks.
    pub options: ConvertOptions,
}

impl Extraction {
    /// The disk with this index, to be converted so.
    pub fn new(disk: usize, source: Source, options: ConvertOptions) -> Self {
        Self { disk, source, options }
    }
}

/// Opens a disk of an appliance in place. A disk that is compressed as a whole is spooled to an
/// unnamed file in `folder`.
///
/// # Errors
/// [`Error::Unsupported`] for a disk without a file; errors of opening an image.
pub fn open_packaged(
    registry: &Registry,
    package: &Package,
    index: usize,
    options: &OpenOptions,
    folder: &Path,
    monitor: &Monitor<'_>,
) -> Result<Disk> {
    let storage = match package.disks().get(index) {
        Some(disk) if disk.gzipped() => {
            let stream = unzipped(package, index, monitor.cancel.clone())?;
            spool(stream, folder, monitor)?
        }
        _ => storage_of(package, index)?,
    };
    let disk = Disk::open_storage(registry, storage, &as_described(package, index, options))?;
    let capacity = package.disks()[index].disk.capacity;
    if let Some(capacity) = capacity.filter(|&capacity| capacity != disk.guest_bytes()) {
        monitor.progress.message(&format!(
            "{}: has {} bytes, and the appliance's descriptor says {capacity}",
            disk.name(),
            disk.guest_bytes()
        ));
    }
    Ok(disk)
}

/// Describes a disk's image; `None` if it is compressed as a whole, or empty.
///
/// # Errors
/// Errors of describing an image.
pub fn describe_packaged(
    registry: &Registry,
    package: &Package,
    index: usize,
) -> Result<Option<ImageInfo>> {
    let gzipped = package.disks().get(index).is_some_and(|disk| disk.gzipped());
    let Some(storage) = package.storage_of(index).filter(|_| !gzipped) else { return Ok(None) };
    let options = as_described(package, index, &OpenOptions::read_only());
    let driver = match &options.format {
        Some(format) => registry.driver(format)?,
        None => registry.probe(&*storage)?.driver,
    };
    driver.describe(&storage, &Limits::default()).map(Some)
}

/// Adds the descriptor's format to the options, unless a guest could have forged it.
fn as_described(package: &Package, index: usize, options: &OpenOptions) -> OpenOptions {
    let uri = package.disks().get(index).and_then(|disk| disk.disk.format.as_deref());
    let vmdk = uri.is_some_and(|uri| uri.to_ascii_lowercase().contains("vmdk"));
    let format = options.format.clone().or(vmdk.then(|| "vmdk".to_owned()));
    options.clone().maybe_format(format).writable(false)
}

fn storage_of(package: &Package, index: usize) -> Result<Arc<dyn Storage>> {
    package.storage_of(index).ok_or_else(|| {
        let disk = package.disks().get(index).map(|disk| &disk.disk);
        let (id, bytes) = disk.map_or(("", None), |disk| (&disk.id, disk.capacity));
        let what = format!("its disk '{id}' is empty, in no file");
        Error::unsupported(package.name(), what, Remedy::Create { bytes })
    })
}

/// Decompresses a disk's file, up to a length that its disk allows.
fn unzipped(package: &Package, index: usize, cancel: CancelToken) -> Result<ByteStream> {
    let storage = storage_of(package, index)?;
    let name = storage.name().to_owned();
    let packed = Cancelled { inner: StorageReader::new(storage), cancel };
    let (stream, packing) = ByteStream::new(&name, packed).unpack()?;
    if packing != Some(Packing::Gzip) {
        let found = packing.map_or("no packed file".to_owned(), |packing| packing.to_string());
        return Err(Error::corrupt(&name, 0, "file", found, "gzip, as the descriptor says"));
    }
    let Some(capacity) = package.disks()[index].disk.capacity else {
        // A few bytes may expand to a thousand times as many.
        return Err(Error::unsupported(
            &name,
            "a packed disk whose descriptor says no capacity: nothing bounds what it unpacks to",
            "take it out with tar and unpack it with gzip, if you trust it",
        ));
    };
    let left = capacity.saturating_add(capacity / 8).saturating_add(SLACK_BYTES);
    Ok(ByteStream::new(name, Bounded { inner: stream, left }))
}

/// A cancellable reader.
struct Cancelled<R> {
    inner: R,
    cancel: CancelToken,
}

impl<R: Read> Read for Cancelled<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.cancel.check().map_err(io::Error::other)?;
        self.inner.read(buf)
    }
}

/// A stream with a length limit.
struct Bounded {
    inner: ByteStream,
    left: u64,
}

impl Read for Bounded {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let got = self.inner.read_full(buf).map_err(io::Error::other)?;
        self.left = self.left.checked_sub(got as u64).ok_or_else(|| {
            io::Error::other("unpacks to far more than the capacity that the descriptor says")
        })?;
        Ok(got)
    }
}

/// Converts disks of an appliance, several at once, with `threads` threads in all (`None`: one per
/// core). Targets get their names when all disks are complete and the manifest matched.
///
/// # Errors
/// Errors of [`convert`] and [`Package::verify`], for the first disk that failed. No new file
/// remains then.
pub fn extract(
    registry: &Registry,
    package: &Package,
    parts: Vec<Extraction>,
    threads: Option<usize>,
    monitor: &Monitor<'_>,
) -> Result<ApplianceReport> {
    let started = Instant::now();
    let threads = threads.unwrap_or_else(default_threads).max(1);
    let at_once = parts.len().min(threads).clamp(1, AT_ONCE_MAX);
    let totals = parts.iter().map(|part| (0, part.source.bytes())).collect();
    let sum = Sum { inner: monitor.progress, parts: Mutex::new(totals) };
    let names: Vec<_> = parts.iter().map(|part| names_of(package, part)).collect();
    let count = parts.len();
    let queue: Mutex<VecDeque<_>> = Mutex::new(parts.into_iter().enumerate().collect());
    let done = Mutex::new(Vec::with_capacity(count));
    let cancel = monitor.cancel.part();
    let worker = || {
        loop {
            // A separate statement, so that the lock is not held during the conversion.
            let next = queue.lock().pop_front();
            let Some((number, mut part)) = next else { break };
            part.options.threads = Some(threads.div_ceil(at_once));
            let progress = Part { sum: &sum, number };
            let monitor = Monitor::new(&progress).cancelled_by(cancel.clone());
            let converted = extract_one(registry, package, &part, &monitor);
            if converted.is_err() {
                cancel.cancel();
            }
            done.lock().push((number, converted));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..at_once {
            if std::thread::Builder::new().spawn_scoped(scope, worker).is_err() {
                // The threads there are do all disks.
                break;
            }
        }
        worker();
    });
    let mut done = done.into_inner();
    // Prefer the error that caused the others to be interrupted.
    done.sort_by_key(|(number, result)| (matches!(result, Err(Error::Interrupted)), *number));
    let mut converted = Vec::with_capacity(count);
    for (number, result) in done {
        converted.push((number, result?));
    }
    converted.sort_by_key(|(number, _)| *number);
    monitor.cancel.check()?;
    let disks = commit_all(converted.into_iter().map(|(_, disk)| disk).zip(names), monitor)?;
    Ok(ApplianceReport {
        disks,
        manifest: if package.manifest().is_some() { "verified" } else { "missing" },
        certificate: package.certificate().map(str::to_owned),
        seconds: started.elapsed().as_secs_f64(),
    })
}

/// Renames all targets into place. If one fails, renamed files that replaced nothing are removed
/// again; those that replaced a file are complete and stay.
fn commit_all(
    converted: impl Iterator<Item = (Converted, (String, Option<String>))>,
    monitor: &Monitor<'_>,
) -> Result<Vec<ApplianceDisk>> {
    // Cancellation is not possible from here on.
    let sure = CancelToken::default();
    let mut placed: Vec<PathBuf> = Vec::new();
    let mut disks: Vec<ApplianceDisk> = Vec::new();
    for (converted, (file, target)) in converted {
        match converted.commit_naming(&sure) {
            Ok((report, fresh)) => {
                placed.extend(fresh);
                disks.push(ApplianceDisk { file, target, report });
            }
            Err(error) => {
                for path in &placed {
                    // Report the first error.
                    let _ = std::fs::remove_file(path);
                }
                let targets = disks.into_iter().filter_map(|disk| disk.target);
                for target in targets.filter(|target| Path::new(target).exists()) {
                    monitor.progress.message(&format!(
                        "{target}: is the new disk, complete, though another disk of the appliance \
                         failed: what had the name before is gone"
                    ));
                }
                return Err(error);
            }
        }
    }
    Ok(disks)
}

/// A disk's file in the appliance, and its target.
fn names_of(package: &Package, part: &Extraction) -> (String, Option<String>) {
    let file = package.disks().get(part.disk).and_then(|disk| disk.file.as_ref());
    let target = match &part.options.destination {
        Destination::Null => None,
        Destination::New(new) => Some(new.path.display().to_string()),
        Destination::Pipe { pipe, .. } => Some(pipe.name().to_owned()),
        Destination::Into(existing) => Some(existing.path.display().to_string()),
    };
    (file.map(|file| file.href.clone()).unwrap_or_default(), target)
}

/// Converts a disk while its file is hashed, if its target can wait for the hash.
fn extract_one(
    registry: &Registry,
    package: &Package,
    part: &Extraction,
    monitor: &Monitor<'_>,
) -> Result<Converted> {
    let convert =
        |monitor: &Monitor<'_>| convert_uncommitted(registry, &part.source, &part.options, monitor);
    let waits = matches!(part.options.destination, Destination::New(_) | Destination::Null);
    if !waits || package.manifest().is_none() {
        package.verify(part.disk, &monitor.cancel, &mut |_| {})?;
        return convert(monitor);
    }
    let cancel = monitor.cancel.part();
    let verify = || {
        let verified = package.verify(part.disk, &cancel, &mut |_| {});
        if verified.is_err() {
            cancel.cancel();
        }
        verified
    };
    let (hashed, converted) = std::thread::scope(|scope| {
        let monitor = Monitor::new(monitor.progress).cancelled_by(cancel.clone());
        let Ok(hashing) = std::thread::Builder::new().spawn_scoped(scope, verify) else {
            // One after the other; a wrong hash cancels the conversion.
            return (verify(), convert(&monitor));
        };
        let converted = convert(&monitor);
        let failed = converted.as_ref().err().map(Error::kind);
        if matches!(failed, Some(ErrorKind::NoSpace | ErrorKind::Interrupted)) {
            // Other errors may be damage, which the hash reports.
            cancel.cancel();
        }
        (hashing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), converted)
    });
    match (hashed, converted) {
        (Ok(()), converted) => converted,
        (Err(Error::Interrupted), Err(error)) => Err(error),
        (Err(error), _) => Err(error),
    }
}

/// Combined progress of several jobs.
struct Sum<'a> {
    inner: &'a dyn Progress,
    /// Done and total of each job.
    parts: Mutex<Vec<(u64, u64)>>,
}

struct Part<'a> {
    sum: &'a Sum<'a>,
    number: usize,
}

impl Progress for Part<'_> {
    fn update(&self, done: u64, total: u64) {
        let mut parts = self.sum.parts.lock();
        if let Some(part) = parts.get_mut(self.number) {
            *part = (done, total);
        }
        let (done, total) = parts.iter().fold((0u64, 0u64), |(done, total), part| {
            (done.saturating_add(part.0), total.saturating_add(part.1))
        });
        drop(parts);
        self.sum.inner.update(done, total);
    }

    fn message(&self, text: &str) {
        self.sum.inner.message(text);
    }
}

/// A new appliance.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NewAppliance {
    /// Its path; an existing file is replaced when the new one is finished.
    pub path: PathBuf,
    /// Base name of the files in it.
    pub stem: String,
    /// The virtual machine of the disks.
    pub machine: Machine,
    /// Modification time of the files in it, in seconds since 1970.
    pub modified: u64,
    /// Compression; `None` for the format's default.
    pub compress: Option<CompressionSpec>,
    /// Threads; `None` for one per core.
    pub threads: Option<usize>,
    /// As in [`ConvertOptions`].
    pub detect_zeroes: Option<u32>,
    /// Read everything back and compare.
    pub verify: bool,
    /// Maximum bytes per second.
    pub rate: Option<u64>,
    /// Cache mode of the file; `None` is as fast as copying a file.
    pub cache: Option<CacheMode>,
}

impl NewAppliance {
    /// An appliance with the defaults of a conversion. Its files are named after `stem` and dated 1970.
    pub fn new(path: impl Into<PathBuf>, stem: impl Into<String>, machine: Machine) -> Self {
        Self {
            path: path.into(),
            stem: stem.into(),
            machine,
            modified: 0,
            compress: None,
            threads: None,
            detect_zeroes: Some(4096),
            verify: false,
            rate: None,
            cache: None,
        }
    }
}

/// Makes an appliance of disks, each in one pass.
///
/// # Errors
/// Errors of the sources, the target and [`PackageWriter`]. On an error no file remains, and an
/// existing file is unchanged.
pub fn pack(
    registry: &Registry,
    sources: &[Source],
    new: &NewAppliance,
    monitor: &Monitor<'_>,
) -> Result<ApplianceReport> {
    let started = Instant::now();
    let file = new_file_options(new.cache);
    let pending = PendingFile::create(&new.path, &file)?;
    let name = |number: usize| format!("{}-disk{number}.vmdk", new.stem);
    let disks: Vec<_> = (1..)
        .zip(sources)
        .map(|(n, source)| NewDisk {
            file: name(n),
            capacity: source.bytes().next_multiple_of(512),
        })
        .collect();
    let storage: Arc<dyn Storage> = pending.storage().clone();
    let machine = new.machine.clone();
    let mut writer = PackageWriter::new(storage, machine, disks.clone(), &new.stem, new.modified)?;
    let totals = sources.iter().map(|source| (0, source.bytes())).collect();
    let sum = Sum { inner: monitor.progress, parts: Mutex::new(totals) };
    let mut reports = Vec::with_capacity(sources.len());
    for (number, source) in sources.iter().enumerate() {
        let progress = Part { sum: &sum, number };
        let part = Monitor::new(&progress).cancelled_by(monitor.cancel.clone());
        reports.push(pack_one(registry, source, new, &mut writer, &disks[number].file, &part)?);
    }
    writer.finish()?;
    if new.verify {
        read_back(registry, &pending, sources, &mut reports, monitor)?;
    }
    let commit = commit_options(new.cache, pending.replaces());
    pending.commit(commit)?;
    let disks = disks.into_iter().zip(reports);
    Ok(ApplianceReport {
        disks: disks
            .map(|(disk, report)| ApplianceDisk { file: disk.file, target: None, report })
            .collect(),
        manifest: "written",
        certificate: None,
        seconds: started.elapsed().as_secs_f64(),
    })
}

fn pack_one(
    registry: &Registry,
    source: &Source,
    new: &NewAppliance,
    writer: &mut PackageWriter,
    file: &str,
    monitor: &Monitor<'_>,
) -> Result<ConvertReport> {
    let missing = || Error::invalid("more disks than the appliance has");
    let sink = writer.next_sink().ok_or_else(missing)?;
    let specs = registry.driver("vmdk")?.options();
    let adapter = new.machine.controller.vmdk_adapter();
    let version = new.machine.hardware_version;
    let text = format!("subformat=streamOptimized,adapter_type={adapter},hwversion={version}");
    let name = format!("{}:{file}", new.path.display());
    let destination = Destination::Pipe {
        pipe: Arc::new(OutPipe::new(name, sink.clone())),
        format: "vmdk".to_owned(),
        options: Options::parse("vmdk", specs, [text.as_str()])?,
    };
    let mut options = ConvertOptions::new(destination);
    options.compress = new.compress;
    options.threads = new.threads;
    options.detect_zeroes = new.detect_zeroes;
    options.rate = new.rate;
    let report = convert(registry, source, &options, monitor)?;
    let populated = report.moved.clusters_compressed.saturating_mul(GRAIN_BYTES);
    writer.end_disk(&sink, populated.min(report.virtual_size))?;
    Ok(report)
}

/// Verifies a new appliance: its hashes, and each disk against its source.
fn read_back(
    registry: &Registry,
    pending: &PendingFile,
    sources: &[Source],
    reports: &mut [ConvertReport],
    monitor: &Monitor<'_>,
) -> Result<()> {
    let package = Package::open(pending.storage().clone(), &PackageLimits::default())?;
    for (index, (source, report)) in sources.iter().zip(reports).enumerate() {
        package.verify(index, &monitor.cancel, &mut |_| {})?;
        let options = OpenOptions::read_only();
        let disk = open_packaged(registry, &package, index, &options, Path::new("."), monitor)?;
        report.verified = Some(verify(source, &disk, report.threads, monitor)?);
    }
    Ok(())
}
