//! Live commit: moves the top image's data into its backing image while the guest writes, and
//! continues with the backing image.
//!
//! ```text
//!   clients are served │ the base is opened for writing and locked exclusively; reads and writes
//!                      │ share one map from then on
//!                      │ the overlay's data is copied, and changed data again,
//!                      │ until little is left
//!   clients wait       │ the rest is copied ─► the base is made durable ─► the overlay is emptied
//!                      │ and closed ─► the base takes its place
//!   clients are served │ from the base
//! ```
//!
//! The disk may grow meanwhile. The base grows before the first byte beyond its end is copied. It
//! is shorter until then, so new bytes that the overlay does not hold read as zero.
//!
//! # Why nothing is lost
//! The base changes only where the overlay holds data, and the overlay keeps its data until it is
//! emptied. So the copied data is invisible meanwhile, and an interrupted or killed commit leaves
//! the disk unchanged. The overlay is emptied when the base is durable and equal, before the first
//! write that only the base gets: opening the overlay later, also after a crash, shows the base's
//! data.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use vdkit_block::{Error, GuestOffset, Monitor, Remedy, Result, is_zero};
use vdkit_chain::{Disk, DiskPlace, Layer, TruncationCheck};
use vdkit_serve::{ChangeMap, Committed, Export, Job};
use vdkit_tree::refuse_dependents;

use super::{LiveImages, check_writable, is_encrypted};

/// Bytes copied per lock of the disk.
const PIECE_BYTES: u64 = 1 << 20;
/// Bytes of the disk per map scan.
const MAP_BYTES: u64 = 1 << 30;
/// Maximum bytes left to copy while clients wait.
const REST_BYTES: u64 = 8 << 20;
/// Maximum rounds of copying while clients write. If clients still write faster, each piece is then
/// copied with the disk locked, which slows them down.
const ROUNDS_MAX: u32 = 8;

/// See [`vdkit_serve::Images::commit`].
pub(super) fn commit(images: &LiveImages, export: &Export, force: bool) -> Result<Committed> {
    let began = Instant::now();
    let job = export.begin_job("commit")?;
    job.follows_growth();
    check_writable(export)?;
    let overlay = judge(images, export, &job, force)?;
    let base = export.disk().open_beneath(&images.registry)?;
    let mut commit = match Commit::begin(export, &job, &base) {
        Ok(commit) => commit,
        Err(error) => return Err(give_up(export, &base, error)),
    };
    if let Err(error) = commit.run(&base) {
        return Err(give_up(export, &base, error));
    }
    let mut base = Some(base);
    match (commit.finish(&mut base), base) {
        (Ok((pause_seconds, moved_bytes)), _) => {
            job.completed();
            Ok(Committed {
                now: export.chain(),
                overlay: overlay.display().to_string(),
                moved_bytes,
                seconds: began.elapsed().as_secs_f64(),
                pause_seconds,
            })
        }
        (Err(error), Some(base)) => Err(give_up(export, &base, error)),
        (Err(error), None) => Err(error),
    }
}

/// Fails if the commit would damage other images or could not finish. Returns the image to commit.
fn judge(images: &LiveImages, export: &Export, job: &Job<'_>, force: bool) -> Result<PathBuf> {
    let disk = export.disk();
    let [top, base, ..] = disk.layers() else { return Err(Error::no_backing(disk.name())) };
    if let Some(layer) = [top, base].into_iter().find(|layer| is_encrypted(layer)) {
        return Err(Error::unsupported(
            &layer.path().display().to_string(),
            "is encrypted, which is committed only while nobody uses it",
            "end the service, and commit it then",
        ));
    }
    // Opened later, the overlay would refuse a base that was written to.
    if top.info().backing().is_some_and(|backing| backing.identity.is_some()) {
        return Err(Error::unsupported(
            &top.path().display().to_string(),
            "records the state of its backing image, and is committed only while nobody uses it",
            "end the service, and commit it then",
        ));
    }
    let (size, beneath) = (disk.guest_bytes(), base.format().guest_bytes());
    if beneath > size {
        return Err(Error::invalid_for(
            &base.path().display(),
            format!(
                "has {beneath} bytes, more than the {size} of the disk, which would become larger; \
             if it may, grow it to {beneath} bytes first"
            ),
        ));
    }
    let (overlay, base) = (top.path().to_owned(), base.path().to_owned());
    if !force {
        refuse_losses(top)?;
        drop(disk);
        let monitor = Monitor::default().cancelled_by(job.cancel().clone());
        let own = [overlay.clone()];
        refuse_dependents(&images.registry, &[base], &own, "committing to it", &monitor)?;
    }
    Ok(overlay)
}

/// Fails if the overlay has contents that would be lost.
fn refuse_losses(top: &Layer) -> Result<()> {
    let mut losses: Vec<String> = Vec::new();
    if let Some(side) = top.format().snapshots() {
        losses.extend(side.list()?.into_iter().map(|snapshot| snapshot.name));
    }
    if let Some(side) = top.format().bitmaps() {
        losses.extend(side.list()?.into_iter().map(|bitmap| bitmap.info.name));
    }
    if losses.is_empty() {
        return Ok(());
    }
    losses.truncate(8);
    Err(Error::Dependents {
        file: top.path().display().to_string(),
        what: "its snapshots and dirty bitmaps would be left behind in it, and mean nothing any \
               more"
            .to_owned(),
        dependents: losses,
        remedy: Remedy::forced("they do not matter", "remove them first"),
    })
}

/// A running commit.
struct Commit<'a> {
    export: &'a Export,
    job: &'a Job<'a>,
    changes: Arc<ChangeMap>,
    guest_bytes: u64,
    moved: u64,
    buffer: Vec<u8>,
}

impl<'a> Commit<'a> {
    /// Lets clients read the base through the map by which it is written, and tracks changes.
    fn begin(export: &'a Export, job: &'a Job<'a>, base: &Disk) -> Result<Self> {
        let changes = export.exchange(|served| {
            served.disk.share_beneath(base);
            follow(&served.disk, base)?;
            let bytes = served.disk.guest_bytes();
            let changes = Arc::new(ChangeMap::new(bytes));
            served.changes = Some(Arc::clone(&changes));
            Ok(changes)
        })?;
        let guest_bytes = export.size();
        Ok(Self { export, job, changes, guest_bytes, moved: 0, buffer: Vec::new() })
    }

    /// Copies until little is left.
    fn run(&mut self, base: &Disk) -> Result<()> {
        self.mark_what_is_there()?;
        let mut rounds = 0;
        while rounds == 0 || self.changes.marked_bytes() > REST_BYTES {
            self.round(base, rounds >= ROUNDS_MAX)?;
            rounds += 1;
        }
        // Makes most of the base durable before clients wait for it.
        base.flush()
    }

    /// Marks the overlay's data.
    fn mark_what_is_there(&self) -> Result<()> {
        let mut at = 0;
        let mut missing = TruncationCheck::default();
        while at < self.guest_bytes {
            self.job.cancel().check()?;
            let len = MAP_BYTES.min(self.guest_bytes - at);
            let disk = self.export.disk();
            for extent in disk.extents_of(1, GuestOffset(at), len)? {
                let extent = extent?;
                missing.refuse(&disk, &extent)?;
                if !matches!(extent.place, DiskPlace::Hole) {
                    self.changes.mark(extent.at.0, extent.len);
                }
            }
            at += len;
        }
        Ok(())
    }
}

impl Commit<'_> {
    /// Copies all marked ranges, once from start to end of the disk. `alone` locks the disk
    /// exclusively for each piece.
    fn round(&mut self, base: &Disk, alone: bool) -> Result<()> {
        let export = self.export;
        let mut at = Some(0);
        while let Some(from) = at {
            self.job.cancel().check()?;
            at = if alone {
                export.exchange(|served| {
                    follow(&served.disk, base)?;
                    self.piece(&served.disk, base, from)
                })?
            } else {
                // The disk cannot grow while it is locked.
                let disk = export.disk();
                if base.guest_bytes() < disk.guest_bytes() {
                    drop(disk);
                    export.exchange(|served| follow(&served.disk, base))?;
                    continue;
                }
                self.piece(&disk, base, from)?
            };
            self.job.moved(self.moved, self.changes.marked_bytes());
        }
        Ok(())
    }

    /// Copies the next marked piece at or after `from`; returns its end.
    fn piece(&mut self, disk: &Disk, base: &Disk, from: u64) -> Result<Option<u64>> {
        // Clear the marks before reading.
        let Some(run) = self.changes.take(from, PIECE_BYTES) else { return Ok(None) };
        let end = run.end;
        self.moved += copy(disk, base, run, &mut self.buffer)?;
        Ok(Some(end))
    }

    /// Copies the rest while clients wait, and continues with the base. Returns how many seconds
    /// they waited, and the total bytes moved.
    fn finish(mut self, base: &mut Option<Disk>) -> Result<(f64, u64)> {
        let export = self.export;
        let pause_seconds = export.exchange(|served| {
            let began = Instant::now();
            let Some(lower) = &*base else { return Err(Error::Interrupted) };
            self.job.cancel().check()?;
            follow(&served.disk, lower)?;
            let mut at = Some(0);
            while let Some(from) = at {
                at = self.piece(&served.disk, lower, from)?;
            }
            lower.flush()?;
            // The base is durable and equal: both images now show the same data, and no client
            // writes before the overlay is durably empty.
            served.disk.empty()?;
            served.changes = None;
            if let Some(lower) = base.take() {
                let overlay = served.disk.take_off_top(lower);
                if let Err(error) = overlay.close() {
                    tracing::warn!(
                        export = export.name(),
                        "the emptied overlay could not be closed: {error}"
                    );
                }
            }
            Ok(began.elapsed().as_secs_f64())
        })?;
        Ok((pause_seconds, self.moved))
    }
}

/// Grows the base to the disk's size. New bytes read as zero, as before beyond the end of the
/// shorter image.
fn follow(disk: &Disk, base: &Disk) -> Result<()> {
    let bytes = disk.guest_bytes();
    if base.guest_bytes() < bytes { base.resize(bytes) } else { Ok(()) }
}

/// Copies the top image's data of a range into the base. Returns the bytes copied.
fn copy(disk: &Disk, base: &Disk, range: Range<u64>, buffer: &mut Vec<u8>) -> Result<u64> {
    let mut moved = 0;
    for extent in disk.extents_of(1, GuestOffset(range.start), range.end - range.start)? {
        let extent = extent?;
        match extent.place {
            DiskPlace::Hole => continue,
            DiskPlace::Zero { .. } => base.write_zeroes(extent.at, extent.len, true)?,
            DiskPlace::Data { .. } | DiskPlace::Compressed { .. } => {
                let end = extent.at.0 + extent.len;
                let mut at = extent.at.0;
                while at < end {
                    let len = PIECE_BYTES.min(end - at);
                    buffer.resize(len as usize, 0);
                    disk.read_at(buffer, GuestOffset(at))?;
                    if is_zero(buffer) {
                        base.write_zeroes(GuestOffset(at), len, true)?;
                    } else {
                        base.write_at(buffer, GuestOffset(at))?;
                    }
                    at += len;
                }
            }
        }
        moved += extent.len;
    }
    Ok(moved)
}

/// Continues with the overlay over the base, which is closed and read-only again.
fn give_up(export: &Export, base: &Disk, error: Error) -> Error {
    let closed = export.exchange(|served| {
        served.changes = None;
        let closed = base.close();
        served.disk.end_sharing_beneath().and(closed)
    });
    if let Err(second) = closed {
        tracing::warn!(export = export.name(), "after a commit that failed: {second}");
    }
    error
}
