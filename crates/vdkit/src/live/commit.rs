//! Commit under a guest: the top image's content goes into the one beneath it while the guest
//! writes, and the service goes on with that one.
//!
//! ```text
//!   clients are served │ the base is opened for writing, locked against everyone, read and written
//!                      │ through one map from then on
//!                      │ what the overlay holds is copied, and what changes meanwhile again,
//!                      │ until little is left
//!   clients wait       │ the rest is copied ─► the base is made durable ─► the overlay is emptied
//!                      │ and closed ─► the base takes its place
//!   clients are served │ from the base
//! ```
//!
//! The disk may grow meanwhile. The base follows before the first byte that lies past its end is copied:
//! as it is shorter until then, what is new reads as zero where the overlay holds nothing.
//!
//! # Why nothing is lost
//! The base changes only where the overlay holds something, and what the overlay once holds it keeps
//! until it is emptied: so nobody sees what was copied so far, and a commit that stops half-way, or
//! is killed, leaves the disk that it found. The overlay is emptied when the base is durable and
//! equal, before the first write that only the base gets: whoever opens the overlay later, after a
//! crash too, reads what the base holds.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use vdkit_block::{Error, GuestOffset, Monitor, NoProgress, Result, is_zero};
use vdkit_chain::{Disk, DiskPlace, Layer, Missing};
use vdkit_export::{ChangeMap, Committed, Export, Job};
use vdkit_jobs::refuse_dependents;

use super::{LiveImages, check_writable, is_encrypted};

/// Bytes that are copied while an exchange of images is kept waiting.
const PIECE_BYTES: u64 = 1 << 20;
/// Bytes of the disk whose map is walked at a time.
const MAP_BYTES: u64 = 1 << 30;
/// Bytes that may be left to be copied while clients wait.
const REST_BYTES: u64 = 8 << 20;
/// So many times all that changed is copied beside clients that write. Who still writes faster than
/// that gets less of the disk: from then on each piece is copied while clients wait.
const ROUNDS_MAX: u32 = 8;

/// See [`vdkit_export::Images::commit`].
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
        (Ok((pause_seconds, moved_bytes)), _) => Ok(Committed {
            now: export.chain(),
            overlay: overlay.display().to_string(),
            moved_bytes,
            seconds: began.elapsed().as_secs_f64(),
            pause_seconds,
        }),
        (Err(error), Some(base)) => Err(give_up(export, &base, error)),
        (Err(error), None) => Err(error),
    }
}

/// Refuses what would damage something, or could not be ended. Says which image is committed.
fn judge(images: &LiveImages, export: &Export, job: &Job<'_>, force: bool) -> Result<PathBuf> {
    let disk = export.disk();
    let [top, base, ..] = disk.layers() else {
        return Err(Error::Invalid(format!(
            "{}: stands on no other image, so there is nothing to commit to",
            disk.name()
        )));
    };
    if let Some(layer) = [top, base].into_iter().find(|layer| is_encrypted(layer)) {
        return Err(Error::unsupported(
            &layer.path().display().to_string(),
            "is encrypted, which is committed only while nobody uses it",
            "end the service: then 'vdkit commit'",
        ));
    }
    let (size, beneath) = (disk.guest_bytes(), base.format().guest_bytes());
    if beneath > size {
        return Err(Error::Invalid(format!(
            "{}: has {beneath} bytes, more than the {size} of the disk, which would become larger; \
             if it may: 'vdkit ctl SOCKET resize {beneath}'",
            base.path().display()
        )));
    }
    let (overlay, base) = (top.path().to_owned(), base.path().to_owned());
    if !force {
        refuse_losses(top)?;
        drop(disk);
        let monitor = Monitor { cancel: job.cancel().clone(), progress: &NoProgress };
        let own = [overlay.clone()];
        refuse_dependents(&images.registry, &[base], &own, "committing to it", &monitor)?;
    }
    Ok(overlay)
}

/// Refuses to leave behind what is in the overlay alone.
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
        hint: "remove them first; if they do not matter, repeat with --force".to_owned(),
    })
}

/// A commit under way.
struct Commit<'a> {
    export: &'a Export,
    job: &'a Job<'a>,
    changes: Arc<ChangeMap>,
    guest_bytes: u64,
    moved: u64,
    buffer: Vec<u8>,
}

impl<'a> Commit<'a> {
    /// Lets clients read the base through the map by which it is written, and watches them.
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
        // Most of the base's bytes become durable before anybody has to wait for them.
        base.flush()
    }

    /// Marks what the overlay holds.
    fn mark_what_is_there(&self) -> Result<()> {
        let mut at = 0;
        let mut missing = Missing::default();
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
    /// Copies what is marked, once from the beginning to the end of the disk; `alone` keeps clients
    /// waiting while a piece is copied.
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
                // While it is held the disk does not grow.
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

    /// Copies the next marked piece from `from` on; says where it ends.
    fn piece(&mut self, disk: &Disk, base: &Disk, from: u64) -> Result<Option<u64>> {
        // The marks are taken off before anything is read.
        let Some(run) = self.changes.take(from, PIECE_BYTES) else { return Ok(None) };
        let end = run.end;
        self.moved += copy(disk, base, run, &mut self.buffer)?;
        Ok(Some(end))
    }

    /// Copies the rest while clients wait, and goes on with the base, which is taken then. Says for
    /// how many seconds they waited, and how many bytes were moved in all.
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
            // The base is durable and equal: from here on both ways lead to the same bytes, and
            // no client writes before the overlay is empty for good.
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

/// Makes the base as large as the disk. New bytes read as zero, as they did behind the end of a shorter
/// image.
fn follow(disk: &Disk, base: &Disk) -> Result<()> {
    let bytes = disk.guest_bytes();
    if base.guest_bytes() < bytes { base.resize(bytes) } else { Ok(()) }
}

/// Copies what the top image holds of a range into the base. Says how many bytes.
fn copy(disk: &Disk, base: &Disk, range: Range<u64>, buffer: &mut Vec<u8>) -> Result<u64> {
    let mut moved = 0;
    for extent in disk.extents_of(1, GuestOffset(range.start), range.end - range.start)? {
        let extent = extent?;
        match extent.place {
            DiskPlace::Hole => continue,
            DiskPlace::Zero { .. } => base.write_zeroes(extent.at, extent.len, true)?,
            DiskPlace::Data { .. } | DiskPlace::Packed { .. } => {
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

/// Goes on with the overlay over the base, which is closed and only read again.
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
