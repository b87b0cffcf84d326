//! Convert: copies a disk to another place and format.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use serde::Serialize;
use vdkit_block::{
    BitmapInfo, CancelToken, Codec, CompressionSpec, Error, Monitor, Result, Secret,
};
use vdkit_chain::{Disk, OpenOptions, Registry, same_file};

use crate::bitmap::{BrokenBitmaps, bitmaps_to_copy, copy_bitmaps};
use crate::crew::default_threads;
use crate::mover::{MoveOptions, MovedBytes, Mover, zero_max};
use crate::plan::{PlanOptions, Planner};
use crate::source::Source;
use crate::target::{Destination, Target};
use crate::verify::{Phase, verify};

/// Bytes per read of a thread: they stay in its cache until they are written.
pub(crate) const CHUNK_BYTES: u64 = 512 << 10;
/// Bytes per piece that is read and discarded.
const READ_DISCARD_BYTES: u64 = 8 << 20;
/// Minimum threads by default if a side is remote.
const REMOTE_THREADS: usize = 8;
/// Maximum bytes per reflink, which bounds the delay of a cancellation.
pub(crate) const SHARE_BYTES_MAX: u64 = 256 << 20;
/// Cell size of the plan for a target without clusters: a file system block.
const BLOCK_BYTES: u64 = 4096;

/// Options of a conversion.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ConvertOptions {
    /// The target.
    pub destination: Destination,
    /// Store clusters compressed.
    pub compress: Option<CompressionSpec>,
    /// Threads; `None` for one per core.
    pub threads: Option<usize>,
    /// Granularity in bytes of zero detection; `None` disables it.
    pub detect_zeroes: Option<u32>,
    /// Write zeroes like data: the target allocates space for the whole disk. Zeroes are not
    /// detected then.
    pub fill: bool,
    /// A sector that cannot be read becomes zeroes ([`vdkit_block::Progress::unreadable`]), instead
    /// of ending the job.
    pub salvage: bool,
    /// An existing target reads as zeroes wherever the source does: nothing is written there.
    pub target_is_zero: bool,
    /// Read everything back and compare. Progress then counts the bytes of the disk twice.
    pub verify: bool,
    /// Maximum bytes per second.
    pub rate: Option<u64>,
    /// Backing image of the target: only differences to it are written. An existing target must
    /// stand on it already.
    pub backing: Option<Backing>,
    /// Copy the source's dirty bitmaps, with this treatment of inconsistent ones.
    pub bitmaps: Option<BrokenBitmaps>,
    /// A new target's disk size is rounded up to a multiple of this.
    pub size_unit: u64,
    /// Keys of an existing encrypted target, and of the new image's backing image. (The key of a
    /// new target is [`vdkit_block::Options::key`].)
    pub keys: Vec<Secret>,
}

/// The backing image of a converted image.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Backing {
    /// The path to open.
    pub path: PathBuf,
    /// How to open it. [`ConvertOptions::keys`] are tried too.
    pub opening: OpenOptions,
    /// The caller states that it has the content of the source's chain beneath the first image.
    /// Without this, an image that is not in the source's chain is refused.
    pub trusted: bool,
}

impl Backing {
    /// A backing image that the source's chain must have.
    pub fn new(path: impl Into<PathBuf>, opening: OpenOptions) -> Self {
        Self { path: path.into(), opening, trusted: false }
    }

    vdkit_block::setters! {
        /// Sets [`Self::trusted`].
        trusted: bool,
    }

    fn open(&self, registry: &Registry, keys: &[Secret]) -> Result<Disk> {
        let mut options = self.opening.clone();
        options.keys.extend_from_slice(keys);
        Disk::open(registry, &self.path, &options)
    }
}

impl ConvertOptions {
    /// The defaults for a destination.
    pub fn new(destination: Destination) -> Self {
        Self {
            destination,
            compress: None,
            threads: None,
            detect_zeroes: Some(4096),
            fill: false,
            salvage: false,
            target_is_zero: false,
            verify: false,
            rate: None,
            backing: None,
            bitmaps: None,
            size_unit: 1,
            keys: Vec::new(),
        }
    }

    /// Disk size of a new target for a source of `bytes`.
    pub(crate) fn size_of_new(&self, bytes: u64) -> u64 {
        match self.destination {
            Destination::New(_) | Destination::Pipe { .. } => {
                bytes.checked_next_multiple_of(self.size_unit.max(1)).unwrap_or(bytes)
            }
            Destination::Null | Destination::Into(_) => bytes,
        }
    }
}

/// Result of a conversion.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct ConvertReport {
    /// Bytes of the guest disk.
    pub virtual_size: u64,
    /// The target's format; `None` for `null:`.
    pub format: Option<String>,
    /// Bytes by method.
    pub moved: MovedBytes,
    /// Guest bytes read back and compared.
    pub verified: Option<u64>,
    /// Threads used.
    pub threads: usize,
    /// Wall time.
    pub seconds: f64,
    /// Contents of the source images that were not converted.
    pub left_behind: LeftBehind,
}

/// Snapshots and bitmaps of images, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct LeftBehind {
    /// Internal snapshots.
    pub snapshots: Vec<String>,
    /// Persistent dirty bitmaps.
    pub bitmaps: Vec<String>,
}

impl LeftBehind {
    /// The snapshots, and the bitmaps that are not `copied`. A message names each image that has
    /// some.
    fn of(source: &Source, copied: &[BitmapInfo], monitor: &Monitor<'_>) -> Self {
        let mut all = Self::default();
        for disk in source.disks() {
            let info = disk.layers()[0].info();
            let snapshots: Vec<_> = info.snapshots.iter().map(|one| one.name.clone()).collect();
            if !snapshots.is_empty() {
                monitor.progress.message(&format!(
                    "{}: the snapshots in it are not converted ({}): the new image holds the disk as it \
                     is now",
                    disk.name(),
                    some_of(&snapshots)
                ));
            }
            let missing = |name: &str| copied.iter().all(|bitmap| bitmap.name != name);
            let bitmaps = info.bitmaps.iter().filter(|one| missing(&one.name));
            let bitmaps: Vec<_> = bitmaps.map(|one| one.name.clone()).collect();
            if !bitmaps.is_empty() {
                monitor.progress.message(&format!(
                    "{}: the dirty bitmaps in it are not copied ({})",
                    disk.name(),
                    some_of(&bitmaps)
                ));
            }
            all.snapshots.extend(snapshots);
            all.bitmaps.extend(bitmaps);
        }
        all
    }
}

/// The first names, for a message.
fn some_of(names: &[String]) -> String {
    const NAMES_MAX: usize = 8;
    let mut said = names.iter().take(NAMES_MAX).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > NAMES_MAX {
        said.push_str(&format!(" and {} more", names.len() - NAMES_MAX));
    }
    said
}

/// Converts a source.
///
/// # Errors
/// Errors of sources and targets. On an error no new image remains, and an existing file is
/// unchanged.
pub fn convert(
    registry: &Registry,
    source: &Source,
    options: &ConvertOptions,
    monitor: &Monitor<'_>,
) -> Result<ConvertReport> {
    convert_uncommitted(registry, source, options, monitor)?.commit(&monitor.cancel)
}

/// A conversion whose target is complete but not yet renamed into place. Dropping it removes a new
/// image.
pub struct Converted {
    target: Option<Target>,
    report: ConvertReport,
}

impl Converted {
    /// Renames the target into place.
    pub fn commit(self, cancel: &CancelToken) -> Result<ConvertReport> {
        self.commit_naming(cancel).map(|(report, _)| report)
    }

    /// As [`Converted::commit`]; also returns the files that it created.
    pub fn commit_naming(self, cancel: &CancelToken) -> Result<(ConvertReport, Vec<PathBuf>)> {
        let placed = self.target.map(|target| target.commit(cancel)).transpose()?;
        Ok((self.report, placed.unwrap_or_default()))
    }
}

/// [`convert`] without the last step.
pub fn convert_uncommitted(
    registry: &Registry,
    source: &Source,
    options: &ConvertOptions,
    monitor: &Monitor<'_>,
) -> Result<Converted> {
    let started = Instant::now();
    let bytes = source.bytes();
    source.disks().iter().for_each(Disk::expect_one_pass);
    let base = Base::open(registry, source, options)?;
    let (layers, base_disk) = match base {
        Some(base) => (base.layers, base.disk),
        None => (usize::MAX, None),
    };
    let size = options.size_of_new(bytes);
    let target = Target::of(registry, options, size, base_disk, &monitor.cancel)?;
    let disk = target.as_ref().map(|t| &t.disk);
    if let (Some(disk), Destination::Into(_)) = (disk, &options.destination) {
        disk.warnings().for_each(|warning| monitor.progress.message(warning));
        check_backing(disk, options)?;
    }
    let format = disk.map(|disk| disk.top().name().to_owned());
    let moving = Moving::new(options, disk, layers)?.for_remote(source, disk);
    let bitmaps = match options.bitmaps {
        Some(broken) => bitmaps_to_copy(source, disk, broken, monitor)?,
        None => Vec::new(),
    };
    let left_behind = match &target {
        Some(_) => LeftBehind::of(source, &bitmaps, monitor),
        None => LeftBehind::default(),
    };
    // Moving and verifying are one count, so that progress neither stops nor goes back.
    let after = if options.verify && disk.is_some() { bytes } else { 0 };
    let phase = Phase { inner: monitor.progress, before: 0, after };
    let moves = Monitor::new(&phase).cancelled_by(monitor.cancel.clone());
    let move_all = || {
        let moved = moving.run(source, disk, 0, &moves)?;
        if let (Some(target), [from]) = (disk, source.disks()) {
            copy_bitmaps(from, target, &bitmaps)?;
        }
        let finish = |target| finish(registry, source, target, options, monitor);
        Ok::<_, Error>((moved, target.as_ref().map(finish).transpose()?.flatten()))
    };
    let (moved, verified) = move_all().inspect_err(|_| target.iter().for_each(Target::give_up))?;
    let seconds = started.elapsed().as_secs_f64();
    let virtual_size = match (&options.destination, &target) {
        // Some formats round the size.
        (Destination::New(_) | Destination::Pipe { .. }, Some(target)) => target.disk.guest_bytes(),
        _ => size,
    };
    let threads = moving.worked();
    let report =
        ConvertReport { virtual_size, format, moved, verified, threads, seconds, left_behind };
    Ok(Converted { target, report })
}

/// The plan and options for moving data to one target.
pub(crate) struct Moving {
    plan: PlanOptions,
    options: MoveOptions,
    /// The maximum threads of a run.
    worked: AtomicUsize,
}

impl Moving {
    /// For this target, from the first `layers` of the source.
    pub(crate) fn new(
        options: &ConvertOptions,
        target: Option<&Disk>,
        layers: usize,
    ) -> Result<Self> {
        let compress = compression(options, target)?;
        let mut plan = plan_options(compress.is_some(), target, layers);
        // Zero detection has to read the bytes.
        plan.in_kernel &= options.detect_zeroes.is_none();
        plan.fill = options.fill;
        if options.salvage {
            // Every byte must be seen, to find those that cannot be read.
            (plan.share, plan.in_kernel, plan.salvage) = (None, false, true);
        }
        let existing = matches!(options.destination, Destination::Into(_));
        // New space already reads as zero, except where zeroes must hide a backing image.
        let over = existing
            || layers != usize::MAX
            || target.is_some_and(|disk| !disk.top().new_reads_zero());
        let options = MoveOptions {
            threads: options.threads,
            detect_zeroes: options
                .detect_zeroes
                .filter(|_| !options.fill)
                .map(|step| step as usize),
            compress,
            in_order: target.is_some_and(|disk| disk.top().storage().caps().sequential),
            write_zeroes: over && !(existing && options.target_is_zero),
            over,
            salvage: options.salvage,
            new: matches!(options.destination, Destination::New(_) | Destination::Pipe { .. }),
            rate: options.rate,
        };
        Ok(Self { plan, options, worked: AtomicUsize::new(1) })
    }

    /// If a side is remote, more threads by default: some wait for the peer while others move bytes.
    fn for_remote(mut self, source: &Source, target: Option<&Disk>) -> Self {
        let remote = |disk: &Disk| disk.top().storage().caps().remote;
        if source.disks().iter().chain(target).any(remote) {
            let threads = || default_threads().max(REMOTE_THREADS);
            self.options.threads = Some(self.options.threads.unwrap_or_else(threads));
        }
        self
    }

    /// For a source that can only be read, each byte once.
    pub(crate) fn of_stream(mut self) -> Self {
        self.plan.share = None;
        self.plan.in_kernel = false;
        self
    }

    /// Threads used.
    pub(crate) fn worked(&self) -> usize {
        self.worked.load(Ordering::Relaxed)
    }

    /// Moves everything after the first `from` bytes of the source.
    pub(crate) fn run(
        &self,
        source: &Source,
        target: Option<&Disk>,
        from: u64,
        monitor: &Monitor<'_>,
    ) -> Result<MovedBytes> {
        let planner = Planner::from(source, self.plan, from)?;
        let mover = Mover::new(source, target, planner, self.options, monitor);
        mover.run()?;
        self.worked.fetch_max(mover.threads.load(Ordering::Relaxed), Ordering::Relaxed);
        Ok(mover.moved.report())
    }
}

/// Closes the target, and verifies it if requested.
fn finish(
    registry: &Registry,
    source: &Source,
    target: &Target,
    options: &ConvertOptions,
    monitor: &Monitor<'_>,
) -> Result<Option<u64>> {
    target.close()?;
    let mut verified = None;
    if options.verify {
        // Verify through freshly read maps.
        let mut again = target.reopen(registry)?;
        if let Some(backing) = &options.backing {
            again = again.over(backing.open(registry, &options.keys)?);
        }
        let threads = options.threads.unwrap_or_else(default_threads).max(1);
        let phase = Phase { inner: monitor.progress, before: source.bytes(), after: 0 };
        let verifies = Monitor::new(&phase).cancelled_by(monitor.cancel.clone());
        verified = Some(verify(source, &again, threads, &verifies)?);
    }
    Ok(verified)
}

/// Compression of the target's clusters: as requested, or because the format requires it.
fn compression(options: &ConvertOptions, target: Option<&Disk>) -> Result<Option<CompressionSpec>> {
    let caps = target.map(|target| target.top().caps());
    let Some(mut spec) = options.compress else {
        let only = caps.filter(|caps| caps.one_pass).and_then(|caps| caps.compressed);
        return Ok(only.map(|codec| CompressionSpec { codec, level: None }));
    };
    let Some(target) = target else {
        return Err(Error::invalid("compression needs a target that is written"));
    };
    let codec = image_codec(target)?;
    if (spec.codec, codec) == (Codec::Deflate, Codec::Zlib) {
        // One name for users, two formats.
        spec.codec = Codec::Zlib;
    }
    if codec == spec.codec {
        return Ok(Some(spec));
    }
    Err(Error::invalid_for(
        &target.name(),
        format!("holds {codec} clusters, not {}; compress with {codec}", spec.codec),
    ))
}

/// The method of an image's compressed clusters.
///
/// # Errors
/// [`Error::Unsupported`] if it has none.
pub(crate) fn image_codec(target: &Disk) -> Result<Codec> {
    target.top().caps().compressed.ok_or_else(|| {
        Error::unsupported(
            target.name(),
            format!("not supported: compressed data in this {} image", target.top().name()),
            "choose qcow2 without a data file",
        )
    })
}

fn plan_options(compressed: bool, target: Option<&Disk>, layers: usize) -> PlanOptions {
    if target.is_none() {
        // Nothing is written: whole runs of host files, divided among the threads.
        return PlanOptions {
            grid: BLOCK_BYTES,
            chunk: CHUNK_BYTES,
            share: Some(1),
            share_max: READ_DISCARD_BYTES,
            zero_max: u64::MAX,
            layers,
            ..PlanOptions::default()
        };
    }
    let caps = target.map(|t| t.top().caps());
    let cluster = caps.map_or(1, |c| c.cluster_bytes);
    let grid = cluster.max(BLOCK_BYTES);
    let encrypted = target.is_some_and(|t| t.encryption(0).is_some());
    let shares = !encrypted && caps.is_some_and(|c| c.host_aligned || c.cluster_bytes == 1);
    let block = target
        .map_or(BLOCK_BYTES, |t| u64::from(t.top().storage().caps().block_bytes).max(BLOCK_BYTES));
    let shares = shares && !compressed && layers == usize::MAX && block <= grid;
    PlanOptions {
        grid,
        chunk: CHUNK_BYTES.max(cluster),
        share: shares.then_some(block),
        share_max: SHARE_BYTES_MAX.max(cluster),
        in_kernel: !compressed
            && !encrypted
            && target.is_some_and(|t| !t.top().storage().caps().sequential),
        zero_max: target.map_or(u64::MAX, zero_max),
        layers,
        skip_absent: layers != usize::MAX,
        ..PlanOptions::default()
    }
}

/// Checks that an existing target stands on the backing image whose content is not copied.
fn check_backing(target: &Disk, options: &ConvertOptions) -> Result<()> {
    let Some(backing) = &options.backing else { return Ok(()) };
    match target.layers().get(1) {
        Some(layer) if same_file(layer.path(), &backing.path) => Ok(()),
        _ => {
            let why = format!("does not stand on {}", backing.path.display());
            Err(Error::invalid_for(&target.name(), why))
        }
    }
}

/// The backing image of the target.
struct Base {
    /// Number of source layers above it.
    layers: usize,
    disk: Option<Disk>,
}

impl Base {
    fn open(
        registry: &Registry,
        source: &Source,
        options: &ConvertOptions,
    ) -> Result<Option<Self>> {
        let Some(backing) = &options.backing else { return Ok(None) };
        let existing = match &options.destination {
            Destination::New(_) => false,
            Destination::Into(_) => true,
            Destination::Null | Destination::Pipe { .. } => {
                let why =
                    "a backing image needs a target that is an image in a file or on a device";
                return Err(Error::invalid(why));
            }
        };
        let [disk] = source.disks() else {
            return Err(Error::invalid("a backing image needs one source, not several pieces"));
        };
        let same = |path: &Path| same_file(path, &backing.path);
        let found = disk.layers().iter().skip(1).position(|l| same(l.path()));
        let Some(layers) = found.or(backing.trusted.then_some(0)) else {
            return Err(Error::invalid_for(
                &disk.name(),
                format!(
                    "does not stand on {}; convert without a backing image, or rebase it first",
                    backing.path.display()
                ),
            ));
        };
        // An existing image is opened with its own chain.
        let disk = match existing {
            true => None,
            false => Some(backing.open(registry, &options.keys)?),
        };
        Ok(Some(Self { layers: layers + 1, disk }))
    }
}
