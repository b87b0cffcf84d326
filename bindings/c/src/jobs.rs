//! Long work on images. Reports are the JSON that the command `vdkit` prints with --json.

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::path::PathBuf;

use parking_lot::Mutex;
use vdkit::jobs::{
    self, CommitOptions, CompareOptions, ConvertOptions, Destination, ExistingImage, NewBacking,
    NewImage, RebaseOptions, SnapshotAction, Source,
};
use vdkit::{
    CancelToken, Codec, CompactOptions, CompressionSpec, Disk, Error, Monitor, NewBitmap,
    OpenOptions, Options, Progress, Registry, Repair,
};

use crate::border::{self, Result, User, call, given, misuse};
use crate::creation::vdkit_create_options;
use crate::disk::vdkit_disk;
use crate::error;
use crate::options::{opening, vdkit_open_options};

/// How a program watches a job, and ends it. The functions are called from any thread, `progress` from
/// one at a time, and must be quick. They must not use the disk on which the job works: it may wait for
/// them. NULL may be given for the whole and for each function.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vdkit_monitor {
    /// sizeof(vdkit_monitor), so that later versions can add members.
    pub struct_size: usize,
    /// `done` of `total` bytes are finished; `total` may grow. Anything but 0 ends the job with
    /// VDKIT_E_INTERRUPTED.
    pub progress: Option<unsafe extern "C" fn(user: *mut c_void, done: u64, total: u64) -> c_int>,
    /// A note for the user.
    pub message: Option<unsafe extern "C" fn(user: *mut c_void, text: *const c_char)>,
    /// Passed to both.
    pub user: *mut c_void,
}

/// A program's monitor, and the token that its function cancels.
#[derive(Debug)]
pub(crate) struct Watch {
    progress: Option<unsafe extern "C" fn(*mut c_void, u64, u64) -> c_int>,
    message: Option<unsafe extern "C" fn(*mut c_void, *const c_char)>,
    user: User,
    cancel: CancelToken,
    /// What was told last; held while the program is told.
    told: Mutex<(u64, u64)>,
}

impl Watch {
    pub(crate) fn new(monitor: Option<&vdkit_monitor>) -> Result<Self> {
        if monitor.is_some_and(|one| one.struct_size != size_of::<vdkit_monitor>()) {
            return Err(misuse("struct_size of the monitor is not set"));
        }
        let (progress, message, user) = monitor.map_or((None, None, std::ptr::null_mut()), |one| {
            (one.progress, one.message, one.user)
        });
        let told = Mutex::default();
        Ok(Self { progress, message, user: User(user), cancel: CancelToken::default(), told })
    }

    pub(crate) fn monitor(&self) -> Monitor<'_> {
        Monitor::new(self).cancelled_by(self.cancel.clone())
    }

    /// Tells the program how far the job is; an error if the program then ends it.
    pub(crate) fn reached(&self, done: u64, total: u64) -> Result<()> {
        self.update(done, total);
        self.cancel.check()
    }
}

impl Progress for Watch {
    fn update(&self, done: u64, total: u64) {
        // While one thread tells the program, others go on. Their figures come with later ones.
        let (Some(progress), Some(mut told)) = (self.progress, self.told.try_lock()) else {
            return;
        };
        // Threads report out of order. The program is called for each report, since it may want to
        // end the job, but never with less than before.
        let most = if total == told.1 { done.max(told.0) } else { done };
        *told = (most, total);
        // SAFETY: the program's own function with its own pointer.
        if unsafe { progress(self.user.0, most, total) } != 0 {
            self.cancel.cancel();
        }
    }

    fn message(&self, text: &str) {
        if let Some(message) = self.message {
            let text = error::c_text(text);
            // SAFETY: as above; the string lives until it returns.
            unsafe { message(self.user.0, text.as_ptr()) };
        }
    }
}

/// A report as JSON.
pub(crate) fn json_of(report: &impl serde::Serialize) -> String {
    // Only maps with keys that are no strings cannot be written, and no report has one.
    serde_json::to_string(report).unwrap_or_default()
}

/// The place for a report, if the program wants one.
pub(crate) type ReportPlace<'a> = Option<&'a mut MaybeUninit<*mut c_char>>;

pub(crate) fn put_report(place: ReportPlace<'_>, report: &impl serde::Serialize) {
    border::put_if_asked(place, || border::new_text(&json_of(report)));
}

/// Runs a job that the program may watch, and stores its report.
pub(crate) fn run<R: serde::Serialize>(
    monitor: Option<&vdkit_monitor>,
    report: ReportPlace<'_>,
    job: impl FnOnce(&Registry, &Monitor<'_>) -> Result<R>,
) -> Result<()> {
    let watch = Watch::new(monitor)?;
    let done = job(&vdkit::registry(), &watch.monitor())?;
    put_report(report, &done);
    Ok(())
}

/// For vdkit_convert(): compress the new image's clusters.
pub const VDKIT_CONVERT_COMPRESS: u32 = 1;
/// For vdkit_convert(): read everything back and compare. The bytes of the disk are then counted twice in
/// `total`.
pub const VDKIT_CONVERT_VERIFY: u32 = 2;
/// For vdkit_convert(): write into an existing image, file or device, which keeps its format.
pub const VDKIT_CONVERT_INTO: u32 = 4;

/// Copies a disk into a new image of another format. The new image gets its name when it is complete;
/// nothing is left behind after an error, but with VDKIT_CONVERT_INTO what was written so far. `opening` is
/// for the source. `target_format` may be NULL with VDKIT_CONVERT_INTO (it is found) and is required
/// otherwise. `options` may be NULL: what the new image shall be; with a backing image, which must be one of
/// the source's chain, only the differences to it are written. With VDKIT_CONVERT_INTO they may only have
/// the target's key. `report` may be NULL; its string is for vdkit_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_convert(
    source: *const c_char,
    opening: Option<&vdkit_open_options>,
    target: *const c_char,
    target_format: *const c_char,
    options: Option<&vdkit_create_options>,
    flags: u32,
    monitor: Option<&vdkit_monitor>,
    report: Option<&mut MaybeUninit<*mut c_char>>,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let source = unsafe { border::path(source, "source") }?;
        // SAFETY: as above.
        let wanted = unsafe { conversion(target, target_format, options, flags) }?;
        let disk = Disk::open(&vdkit::registry(), source, &self::opening(opening))?;
        copy(disk, Ok(wanted), monitor, report)
    })
}

/// As vdkit_convert(), from a disk that is open, whose bytes may be the program's own. It is taken
/// over, and closed also after an error: do not use or close it any more. (Only if a queue of it is not
/// freed does it stay the caller's.)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_convert_disk(
    source: *mut vdkit_disk,
    target: *const c_char,
    target_format: *const c_char,
    options: Option<&vdkit_create_options>,
    flags: u32,
    monitor: Option<&vdkit_monitor>,
    report: Option<&mut MaybeUninit<*mut c_char>>,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let disk = unsafe { vdkit_disk::take(source) }?;
        // SAFETY: as above.
        let wanted = unsafe { conversion(target, target_format, options, flags) };
        copy(disk, wanted, monitor, report)
    })
}

/// Where a conversion goes, and how.
///
/// # Safety
/// As [`border::maybe_text`], for each string.
unsafe fn conversion(
    target: *const c_char,
    format: *const c_char,
    options: Option<&vdkit_create_options>,
    flags: u32,
) -> Result<ConvertOptions> {
    // SAFETY: the caller's promise.
    let (path, format) = unsafe { (border::path(target, "target")?, border::maybe_text(format)?) };
    border::known(flags, VDKIT_CONVERT_COMPRESS | VDKIT_CONVERT_VERIFY | VDKIT_CONVERT_INTO)?;
    let none = vdkit_create_options::default();
    let (options, mut codec) = (options.unwrap_or(&none), Codec::Deflate);
    let mut wanted = if flags & VDKIT_CONVERT_INTO != 0 {
        let (key, format) = (options.only_key()?, format.map(str::to_owned));
        if key.is_some() {
            let opening = OpenOptions::read_only().maybe_format(format.clone());
            vdkit::describe_chain(&vdkit::registry(), path, &opening)?.expect_encrypted()?;
        }
        let existing = ExistingImage::new(path).format(format);
        let mut wanted = ConvertOptions::new(Destination::Into(existing));
        wanted.keys.extend(key);
        wanted
    } else {
        let driver = vdkit::format(given(format, "target_format")?)?;
        let of_format = options.of_format(driver)?;
        if of_format.text("compression_type") == Some("zstd") {
            codec = Codec::Zstd;
        }
        let (reference, backing) = options.backing_of(path)?.unzip();
        let new = NewImage::new(path, driver.name()).options(of_format).backing(reference);
        let mut wanted = ConvertOptions::new(Destination::New(new));
        wanted.backing = backing;
        wanted
    };
    if flags & VDKIT_CONVERT_COMPRESS != 0 {
        wanted.compress = Some(CompressionSpec { codec, level: None });
    }
    wanted.verify = flags & VDKIT_CONVERT_VERIFY != 0;
    Ok(wanted)
}

fn copy(
    disk: Disk,
    wanted: Result<ConvertOptions>,
    monitor: Option<&vdkit_monitor>,
    report: Option<&mut MaybeUninit<*mut c_char>>,
) -> Result<()> {
    let source = Source::new(vec![disk]);
    let done = wanted.and_then(|wanted| {
        let watch = Watch::new(monitor)?;
        jobs::convert(&vdkit::registry(), &source, &wanted, &watch.monitor())
    });
    // What was written to the source before may not be durable yet. If closing it fails, the complete
    // target stays, but a report beside an error would be lost.
    let closed = source.disks().iter().try_for_each(Disk::close);
    let done = done?;
    closed?;
    put_report(report, &done);
    Ok(())
}

/// For vdkit_check(): only reports.
pub const VDKIT_REPAIR_NOTHING: u32 = 0;
/// For vdkit_check(): frees leaked space.
pub const VDKIT_REPAIR_LEAKS: u32 = 1;
/// For vdkit_check(): repairs all damage that can be repaired.
pub const VDKIT_REPAIR_ALL: u32 = 2;

/// Checks an image's metadata, and repairs it. `errors` gets the number of damages and of leaks that
/// are left. A damaged image is a result and no error. `errors` and `report` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_check(
    path: *const c_char,
    opening: Option<&vdkit_open_options>,
    repair: u32,
    monitor: Option<&vdkit_monitor>,
    errors: Option<&mut MaybeUninit<u64>>,
    report: Option<&mut MaybeUninit<*mut c_char>>,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let path = unsafe { border::path(path, "path") }?;
        let repair = match repair {
            VDKIT_REPAIR_NOTHING => Repair::Nothing,
            VDKIT_REPAIR_LEAKS => Repair::Leaks,
            VDKIT_REPAIR_ALL => Repair::All,
            other => return Err(misuse(format!("unknown repair {other}"))),
        };
        run(monitor, report, |registry, monitor| {
            let found = jobs::check(registry, path, &self::opening(opening), repair, monitor)?;
            border::put_if_asked(errors, || {
                found.report.corruptions_left() + found.report.leaks_left()
            });
            Ok(found.report)
        })
    })
}

/// For vdkit_compare(): disks of different sizes differ, also if the rest of the longer one is zero.
pub const VDKIT_COMPARE_STRICT: u32 = 1;

/// Compares what two disks hold. `equal` gets 1 or 0; `report` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_compare(
    a: Option<&vdkit_disk>,
    b: Option<&vdkit_disk>,
    flags: u32,
    monitor: Option<&vdkit_monitor>,
    equal: Option<&mut MaybeUninit<c_int>>,
    report: Option<&mut MaybeUninit<*mut c_char>>,
) -> c_int {
    call(|| {
        let place = border::place(equal, 0)?;
        border::known(flags, VDKIT_COMPARE_STRICT)?;
        let (a, b) = (&given(a, "a")?.0, &given(b, "b")?.0);
        let mut options = CompareOptions::default();
        options.strict = flags & VDKIT_COMPARE_STRICT != 0;
        run(monitor, report, |_, monitor| {
            let compared = jobs::compare(a, b, &options, monitor)?;
            place.write(compared.identical.into());
            Ok(compared)
        })
    })
}

/// Tells how many bytes an image of a format would have with the data of this one: `required` now,
/// `full` with every byte of the disk allocated. Both, `options` and `monitor` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_measure(
    path: *const c_char,
    opening: Option<&vdkit_open_options>,
    format: *const c_char,
    options: *const c_char,
    monitor: Option<&vdkit_monitor>,
    required: Option<&mut MaybeUninit<u64>>,
    full: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let (path, format, options) = unsafe {
            (
                border::path(path, "path")?,
                border::text(format, "format")?,
                border::maybe_text(options)?,
            )
        };
        let disk = Disk::open(&vdkit::registry(), path, &self::opening(opening))?;
        let driver = vdkit::format(format)?;
        let options = Options::parse(driver.name(), driver.options(), options)?;
        let watch = Watch::new(monitor)?;
        let found = jobs::measure(&[disk], driver, &options, &watch.monitor())?;
        border::put_if_asked(required, || found.required);
        border::put_if_asked(full, || found.fully_allocated);
        Ok(())
    })
}

/// For vdkit_commit() and vdkit_rebase(): also if images or snapshots that depend on it are damaged. For
/// vdkit_key_remove(): also if no given key opens another slot.
pub const VDKIT_FORCE: u32 = 1;
/// For vdkit_rebase(): changes only the name in the header, so that the disk may change.
pub const VDKIT_HEADER_ONLY: u32 = 2;

/// Writes an overlay's data into the image that it stands on, or into `to`, a deeper one of its chain
/// (NULL: the first). `flags`: VDKIT_FORCE, or 0. `report` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_commit(
    overlay: *const c_char,
    opening: Option<&vdkit_open_options>,
    to: *const c_char,
    flags: u32,
    monitor: Option<&vdkit_monitor>,
    report: Option<&mut MaybeUninit<*mut c_char>>,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let (overlay, to) = unsafe { (border::path(overlay, "overlay")?, border::maybe_text(to)?) };
        border::known(flags, VDKIT_FORCE)?;
        let mut options = CommitOptions::default();
        options.to = to.map(PathBuf::from);
        options.force = flags & VDKIT_FORCE != 0;
        let opening = self::opening(opening).writable(true);
        run(monitor, report, |registry, monitor| {
            jobs::commit(registry, overlay, &opening, &options, monitor)
        })
    })
}

/// Puts an overlay on another image, and keeps what its disk holds. `backing`: as a name from the
/// overlay's folder; NULL makes it stand alone. `flags`: VDKIT_FORCE, VDKIT_HEADER_ONLY. `report` may
/// be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_rebase(
    overlay: *const c_char,
    opening: Option<&vdkit_open_options>,
    backing: *const c_char,
    backing_format: *const c_char,
    flags: u32,
    monitor: Option<&vdkit_monitor>,
    report: Option<&mut MaybeUninit<*mut c_char>>,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let (overlay, backing, format) = unsafe {
            (
                border::path(overlay, "overlay")?,
                border::maybe_text(backing)?,
                border::maybe_text(backing_format)?,
            )
        };
        border::known(flags, VDKIT_FORCE | VDKIT_HEADER_ONLY)?;
        let mut options = RebaseOptions::default();
        options.backing = backing.map(|name| {
            NewBacking::new(name, format.map(str::to_owned)).open(flags & VDKIT_HEADER_ONLY == 0)
        });
        options.header_only = flags & VDKIT_HEADER_ONLY != 0;
        options.force = flags & VDKIT_FORCE != 0;
        let opening = self::opening(opening).writable(true);
        run(monitor, report, |registry, monitor| {
            jobs::rebase(registry, overlay, &opening, &options, monitor)
        })
    })
}

/// For vdkit_snapshot(): takes one.
pub const VDKIT_SNAPSHOT_CREATE: u32 = 0;
/// For vdkit_snapshot(): takes the disk back to it.
pub const VDKIT_SNAPSHOT_APPLY: u32 = 1;
/// For vdkit_snapshot(): deletes it.
pub const VDKIT_SNAPSHOT_DELETE: u32 = 2;

/// Takes, applies or deletes an internal snapshot of a disk that is open for writing; durable on
/// return. `name` is a name, or an id for the latter two. `monitor` may be NULL; a snapshot that it ends changes
/// nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_snapshot(
    disk: Option<&vdkit_disk>,
    action: u32,
    name: *const c_char,
    monitor: Option<&vdkit_monitor>,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let name = unsafe { border::text(name, "name") }?.to_owned();
        let action = match action {
            VDKIT_SNAPSHOT_CREATE => SnapshotAction::Create(name),
            VDKIT_SNAPSHOT_APPLY => SnapshotAction::Apply(name),
            VDKIT_SNAPSHOT_DELETE => SnapshotAction::Delete(name),
            other => return Err(misuse(format!("unknown action {other}"))),
        };
        let (disk, watch) = (&given(disk, "disk")?.0, Watch::new(monitor)?);
        jobs::snapshot(disk, &action, &watch.monitor()).map(|_| ())
    })
}

/// The internal snapshots of a disk as JSON, a string for vdkit_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_snapshots(
    disk: Option<&vdkit_disk>,
    json: Option<&mut MaybeUninit<*mut c_char>>,
) -> c_int {
    call(|| {
        let place = border::place_of(json)?;
        let all = jobs::snapshots(&given(disk, "disk")?.0)?;
        place.write(border::new_text(&json_of(&all)));
        Ok(())
    })
}

/// For vdkit_bitmap(): adds one that records from now on.
pub const VDKIT_BITMAP_ADD: u32 = 0;
/// For vdkit_bitmap(): removes it.
pub const VDKIT_BITMAP_REMOVE: u32 = 1;
/// For vdkit_bitmap(): clears it.
pub const VDKIT_BITMAP_CLEAR: u32 = 2;
/// For vdkit_bitmap(): records from now on.
pub const VDKIT_BITMAP_ENABLE: u32 = 3;
/// For vdkit_bitmap(): records no more.
pub const VDKIT_BITMAP_DISABLE: u32 = 4;

/// Changes a dirty bitmap of a disk that is open for writing; durable on return. `granularity`: bytes
/// of the disk for each bit of a new one, a power of two; 0 takes the format's own. `monitor` is called
/// before the change, which it may end, and after it; it may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_bitmap(
    disk: Option<&vdkit_disk>,
    action: u32,
    name: *const c_char,
    granularity: u64,
    monitor: Option<&vdkit_monitor>,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let name = unsafe { border::text(name, "name") }?;
        let bitmaps = jobs::bitmaps(&given(disk, "disk")?.0)?;
        let granularity = (granularity > 0).then_some(granularity);
        let watch = Watch::new(monitor)?;
        watch.reached(0, 1)?;
        match action {
            VDKIT_BITMAP_ADD => bitmaps.add(&NewBitmap { name, granularity, enabled: true }),
            VDKIT_BITMAP_REMOVE => bitmaps.remove(name),
            VDKIT_BITMAP_CLEAR => bitmaps.clear(name),
            VDKIT_BITMAP_ENABLE => bitmaps.set_enabled(name, true),
            VDKIT_BITMAP_DISABLE => bitmaps.set_enabled(name, false),
            other => Err(misuse(format!("unknown action {other}"))),
        }?;
        watch.update(1, 1);
        Ok(())
    })
}

/// Called for each range of the disk, by the thread that walks; a result other than 0 ends the walk. It may
/// use the disk, but not close it.
pub type vdkit_range_fn =
    Option<unsafe extern "C" fn(user: *mut c_void, offset: u64, length: u64) -> c_int>;

/// Calls `each` for all ranges that a dirty bitmap marks when the call begins, in order. If `each` ends the
/// walk, the result is VDKIT_E_INTERRUPTED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_bitmap_ranges(
    disk: Option<&vdkit_disk>,
    name: *const c_char,
    each: vdkit_range_fn,
    user: *mut c_void,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let name = unsafe { border::text(name, "name") }?;
        let (disk, each) = (&given(disk, "disk")?.0, given(each, "the callback")?);
        let mut ranges = Vec::new();
        // The image's bitmaps are locked meanwhile, so the program is called afterwards.
        jobs::bitmaps(disk)?.for_each_dirty(name, &mut |range| {
            ranges.push(range);
            Ok(())
        })?;
        for range in ranges {
            // SAFETY: the program's own function with its own pointer.
            if unsafe { each(user, range.start, range.end - range.start) } != 0 {
                return Err(Error::Interrupted);
            }
        }
        Ok(())
    })
}

/// Makes an image smaller on the host, in place. `report` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_compact(
    path: *const c_char,
    opening: Option<&vdkit_open_options>,
    monitor: Option<&vdkit_monitor>,
    report: Option<&mut MaybeUninit<*mut c_char>>,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let path = unsafe { border::path(path, "path") }?;
        let (opening, how) = (self::opening(opening), CompactOptions::default().zero_scan(false));
        run(monitor, report, |registry, monitor| {
            Ok(jobs::compact(registry, path, &opening, how, monitor)?.report)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn ends_at_the_second(user: *mut c_void, done: u64, total: u64) -> c_int {
        // SAFETY: the test's own list, which outlives the watch.
        let told = unsafe { &mut *user.cast::<Vec<(u64, u64)>>() };
        told.push((done, total));
        c_int::from(told.len() == 2)
    }

    /// A job's second phase counted up to the same total again, and no call ended it.
    #[test]
    fn figures_that_are_not_larger_ask_the_program_too() {
        let mut told: Vec<(u64, u64)> = Vec::new();
        let monitor = vdkit_monitor {
            struct_size: size_of::<vdkit_monitor>(),
            progress: Some(ends_at_the_second),
            message: None,
            user: (&raw mut told).cast(),
        };
        let watch = Watch::new(Some(&monitor)).unwrap();
        watch.reached(5, 10).unwrap();
        assert!(matches!(watch.reached(3, 10), Err(Error::Interrupted)));
        assert_eq!(told, [(5, 10), (5, 10)]);
    }
}
