//! Commit: moves an overlay's data into an image beneath it.
//!
//! ```text
//!   overlay ─┐                                        1  the base grows to the overlay's size
//!   between ─┼─► runs held above the base ──────────► 2  they are copied into the base
//!            │                                        3  the base is made durable
//!   base ◄───┘                                        4  the overlay is emptied, and records
//!                                                        the base's new identity
//! ```
//!
//! If the base's new space would not read as zero, the overlay first copies what lies beyond the
//! old end of the base. Each step can be interrupted and repeated. Until step 4 the overlay hides
//! changes of the base. From then on the base durably holds the data that the overlay drops.

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;
use vdkit_block::{
    AmendRequest, BackingRef, Error, GuestOffset, Monitor, Options, Remedy, Result, align_down,
};
use vdkit_chain::{
    BackingChoice, ChainLink, Disk, DiskPlace, OpenOptions, Registry, Split, links_down_to,
    open_image, open_split,
};

use crate::convert::{CHUNK_BYTES, SHARE_BYTES_MAX};
use crate::create::modified;
use crate::mover::{MoveOptions, MovedBytes, Mover, zero_max};
use crate::plan::{PlanOptions, Planner};
use crate::source::Source;
use vdkit_tree::refuse_dependents;

/// Granularity of zero detection.
const DETECT_BYTES: usize = 4096;

/// Options of a commit.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct CommitOptions {
    /// The target in its chain; `None` for its backing image.
    pub to: Option<PathBuf>,
    /// Whether to empty the overlay. Default: if the target is its backing image.
    pub empty: Option<bool>,
    /// Allow damage to dependent images or snapshots.
    pub force: bool,
    /// Threads; `None` for one per core.
    pub threads: Option<usize>,
    /// Maximum bytes per second.
    pub rate: Option<u64>,
}

/// Result of a commit.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct CommitReport {
    /// The overlay.
    #[serde(serialize_with = "vdkit_block::lossy::path")]
    pub overlay: PathBuf,
    /// The target.
    #[serde(serialize_with = "vdkit_block::lossy::path")]
    pub base: PathBuf,
    /// Bytes of the overlay's disk.
    pub virtual_size: u64,
    /// Bytes of the base's disk before and after.
    pub old_base_size: u64,
    /// See [`CommitReport::old_base_size`].
    pub base_size: u64,
    /// Bytes by method.
    pub moved: MovedBytes,
    /// The overlay is empty now.
    pub emptied: bool,
    /// Images between the two; they show a mixture now and should be deleted.
    #[serde(serialize_with = "vdkit_block::lossy::paths")]
    pub invalidated: Vec<PathBuf>,
    /// Wall time.
    pub seconds: f64,
}

/// Commits an overlay. After an interruption or a crash it can be repeated with the same result.
///
/// # Errors
/// [`Error::Dependents`] if other overlays or snapshots depend on the changed images, without
/// [`CommitOptions::force`]; [`Error::Invalid`] for an image without a backing image, or for
/// emptying an overlay above images that hide the base; errors of the formats and storages.
pub fn commit(
    registry: &Registry,
    overlay: &Path,
    opening: &OpenOptions,
    options: &CommitOptions,
    monitor: &Monitor<'_>,
) -> Result<CommitReport> {
    let started = Instant::now();
    let links = links_down_to(registry, overlay, options.to.as_deref(), opening)?;
    let empty = wants_emptying(&links, options)?;
    if !options.force {
        refuse_damage(registry, &links, monitor)?;
    }
    let opening = opening.clone().writable(empty);
    let Split { above, base } = open_split(registry, overlay, &links, &opening)?;
    above.warnings().chain(base.warnings()).for_each(|warning| monitor.progress.message(warning));
    let (virtual_size, old_base_size) = (above.guest_bytes(), base.guest_bytes());
    let moved = commit_disks(above, &base, empty, options, monitor)?;
    let base_size = base.guest_bytes();
    drop(base);
    if let [top, direct] = &links[..] {
        note_identity(registry, top, direct, &opening, monitor)?;
    }
    let (between, path) = (&links[1..links.len() - 1], &links[links.len() - 1].path);
    Ok(CommitReport {
        overlay: overlay.to_owned(),
        base: path.clone(),
        virtual_size,
        old_base_size,
        base_size,
        moved,
        emptied: empty,
        invalidated: between.iter().map(|link| link.path.clone()).collect(),
        seconds: started.elapsed().as_secs_f64(),
    })
}

/// Updates the base's identity and time that the overlay records, if any: the commit changed the
/// base but not the overlay's content. After a crash before this step, opening the overlay reports
/// how to fix it.
fn note_identity(
    registry: &Registry,
    overlay: &ChainLink,
    base: &ChainLink,
    opening: &OpenOptions,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let Some(backing) = overlay.info.backing().filter(|backing| backing.identity.is_some()) else {
        return Ok(());
    };
    let alone = |link: &ChainLink, writable| {
        opening.clone().format(link.info.format).backing(BackingChoice::Ignore).writable(writable)
    };
    let identity = open_image(registry, &base.path, &alone(base, false))?.info.identity;
    let modified = backing.modified.and_then(|_| modified(&base.path));
    let same = identity == backing.identity && modified == backing.modified;
    if identity.is_none() || same {
        return Ok(());
    }
    let opened = open_image(registry, &overlay.path, &alone(overlay, true))?;
    let request = AmendRequest {
        storage: opened.storage,
        files: opened.files,
        backing: Some(Some(BackingRef { identity, modified, ..backing })),
        options: Options::default(),
        limits: opening.limits,
    };
    opened.driver.amend(&request, monitor).map(drop)
}

fn wants_emptying(links: &[ChainLink], options: &CommitOptions) -> Result<bool> {
    let direct = links.len() == 2;
    match options.empty {
        Some(true) if !direct => Err(Error::invalid_for(
            &links[0].path.display(),
            format!(
                "emptied, it would show {} instead of what is committed; commit to that one, or \
             keep the overlay's content",
                links[1].path.display()
            ),
        )),
        Some(empty) => Ok(empty),
        None => Ok(direct),
    }
}

/// Fails if other images depend on the base or on images in between.
fn refuse_damage(registry: &Registry, links: &[ChainLink], monitor: &Monitor<'_>) -> Result<()> {
    let changed: Vec<PathBuf> = links[1..].iter().map(|link| link.path.clone()).collect();
    let own = [links[0].path.clone()];
    refuse_dependents(registry, &changed, &own, "committing to it", monitor)?;
    let above = &links[..links.len() - 1];
    let Some(link) = above.iter().find(|link| !link.info.snapshots.is_empty()) else {
        return Ok(());
    };
    Err(Error::Dependents {
        file: link.path.display().to_string(),
        what: "its snapshots read the base where they hold nothing themselves, and would show \
               what is committed"
            .to_owned(),
        dependents: link.info.snapshots.iter().take(8).map(|s| s.name.clone()).collect(),
        remedy: Remedy::forced("what they show does not matter", "delete the snapshots first"),
    })
}

/// Commits open disks: moves the data of `above` to `base` and closes `base`; empties `above`, if
/// requested, and closes it too. Of `options`, threads and rate are used.
///
/// # Errors
/// Errors of the formats and storages; [`Error::Interrupted`]. Both disks are closed nevertheless
/// if possible, and can be committed again.
pub fn commit_disks(
    above: Disk,
    base: &Disk,
    empty: bool,
    options: &CommitOptions,
    monitor: &Monitor<'_>,
) -> Result<MovedBytes> {
    let source = Source::new(vec![above]);
    let above = &source.disks()[0];
    let moved = move_all(&source, base, options, monitor);
    // The base must be durable before the overlay drops anything.
    let durable = base.flush().and_then(|()| base.close());
    let done = moved.and_then(|moved| durable.map(|()| moved)).and_then(|moved| {
        monitor.cancel.check()?;
        if empty {
            above.empty()?;
        }
        Ok(moved)
    });
    let closed = above.close();
    let moved = done?;
    closed?;
    Ok(moved)
}

/// Copies everything beyond the end of the base into the overlay, if new space of the base is noise
/// until written (raw LUKS). Otherwise a power cut while the base grows would expose that noise.
fn own_what_lies_beyond(above: &Disk, base: &Disk, monitor: &Monitor<'_>) -> Result<()> {
    if base.top().new_reads_zero() {
        return Ok(());
    }
    let (from, to) = (base.guest_bytes(), above.guest_bytes());
    if !above.writable() {
        return Err(Error::unsupported(
            base.name(),
            format!(
                "not supported: growing to the {to} bytes of an overlay that is kept as it is (after a power cut \
                 the overlay could show noise)"
            ),
            Remedy::Resize { file: base.name().to_owned(), bytes: to, shrink: false },
        ));
    }
    let cluster = above.top().caps().cluster_bytes.max(1);
    let mut at = from.next_multiple_of(cluster).min(to);
    if from < at {
        own_cluster(above, base, align_down(from, cluster), at)?;
    }
    while at < to {
        monitor.cancel.check()?;
        let run = above.extent_at(GuestOffset(at), to - at)?;
        let (len, hole) = (run.len, matches!(run.place, DiskPlace::Hole));
        if hole {
            above.write_zeroes_persistent(GuestOffset(at), len)?;
        }
        at += len;
    }
    // Must be durable before the base grows.
    above.flush()
}

/// Copies the cluster in which the base ends to the overlay. (The overlay alone would fill it with
/// zeroes where the base has data.)
fn own_cluster(above: &Disk, base: &Disk, start: u64, end: u64) -> Result<()> {
    let mut bytes = vec![0; (end - start) as usize];
    above.read_at(&mut bytes, GuestOffset(start))?;
    let (mut at, base_end) = (start, base.guest_bytes());
    while at < base_end {
        let run = above.extent_at(GuestOffset(at), base_end - at)?;
        let (len, hole) = (run.len, matches!(run.place, DiskPlace::Hole));
        if hole {
            let part = (at - start) as usize..(at + len - start) as usize;
            base.read_at(&mut bytes[part], GuestOffset(at))?;
        }
        at += len;
    }
    above.write_at(&bytes, GuestOffset(start))
}

fn move_all(
    source: &Source,
    base: &Disk,
    options: &CommitOptions,
    monitor: &Monitor<'_>,
) -> Result<MovedBytes> {
    let bytes = source.bytes();
    if bytes > base.guest_bytes() {
        own_what_lies_beyond(&source.disks()[0], base, monitor)?;
        let quiet = monitor.quiet();
        base.resize_with(bytes, &quiet, |_| Ok(()), |_| Ok(()))?;
    }
    let caps = base.top().caps();
    let block = u64::from(base.top().storage().caps().block_bytes).max(512);
    let shares = caps.host_aligned && caps.cluster_bytes >= block || caps.cluster_bytes == 1;
    let plan = PlanOptions {
        // Per byte: parts of a base cluster that the overlay does not hold stay unchanged.
        grid: 1,
        chunk: CHUNK_BYTES,
        share: shares.then_some(block),
        share_max: SHARE_BYTES_MAX,
        zero_max: zero_max(base),
        layers: usize::MAX,
        skip_absent: true,
        ..PlanOptions::default()
    };
    let moving = MoveOptions {
        threads: options.threads,
        detect_zeroes: Some(DETECT_BYTES),
        over: true,
        write_zeroes: true,
        rate: options.rate,
        ..MoveOptions::default()
    };
    let mover = Mover::new(source, Some(base), Planner::new(source, plan), moving, monitor);
    mover.run()?;
    // Runs that the overlay does not hold needed no work.
    monitor.progress.update(bytes, bytes);
    Ok(mover.moved.report())
}
