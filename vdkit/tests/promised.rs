//! What programs of version 0.1 call, so that a change which breaks them does not compile here. Lines are added; none
//! changes or goes before the version's middle number rises. Nothing is run: the recipes and examples are.

#![allow(dead_code, clippy::let_unit_value)]

use std::io::{IoSlice, IoSliceMut, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use vdkit::jobs::{
    self, Backing, CommitOptions, CompareOptions, ConvertOptions, CreateOptions, DdOptions,
    Destination, DoctorOptions, ExistingImage, NewBacking, NewImage, Preset, RebaseOptions,
    ResizeOptions, SnapshotAction, Source, TreeOptions,
};
use vdkit::{
    BackingChoice, CacheMode, CancelToken, Codec, CompactOptions, Completion, CompressionSpec,
    Disk, DiskPlace, Error, ErrorKind, FormatDriver, GuestOffset, Monitor, NewBitmap, OpenOptions,
    Options, Progress, Queue, RefPolicy, Registry, Repair, Request, Result, Secret, Storage,
};

fn opening(path: PathBuf) -> OpenOptions {
    OpenOptions::read_write()
        .format("qcow2")
        .maybe_format(None)
        .writable(true)
        .cache(CacheMode::Writeback)
        .lock(true)
        .data_file(None)
        .snapshot(Some(String::new()))
        .refs(RefPolicy::OwnFolder)
        .refs(RefPolicy::Nothing)
        .refs(RefPolicy::Folders(vec![path.clone()]))
        .keys(vec![Secret::new(b"key".to_vec())])
        .backing(BackingChoice::Follow)
        .backing(BackingChoice::Ignore)
        .backing(BackingChoice::Override { path, format: None })
}

fn disk(registry: &Registry, path: &Path, storage: Arc<dyn Storage>) -> Result<()> {
    let options = OpenOptions::read_only();
    let other: Disk = Disk::open_storage(registry, storage, &options)?;
    let disk: Disk = Disk::open(registry, path, &options)?;
    let at = GuestOffset(0);
    let (mut a, mut b) = ([0; 1], [0; 1]);
    let (_, _, _): (u64, bool, String) =
        (disk.guest_bytes(), disk.writable(), disk.name().to_owned());
    let (): () = disk.read_at(&mut a, at)?;
    let (): () =
        disk.read_vectored_at(&mut [IoSliceMut::new(&mut a), IoSliceMut::new(&mut b)], at)?;
    let (): () = disk.write_at(&a, at)?;
    let (): () = disk.write_vectored_at(&[IoSlice::new(&a), IoSlice::new(&b)], at)?;
    let (): () = disk.write_zeroes(at, 1, true)?;
    let (): () = disk.discard(at, 1)?;
    let (): () = disk.flush()?;
    for extent in disk.extents(at, 1)? {
        let extent = extent?;
        let (_, _, _): (GuestOffset, u64, usize) = (extent.at, extent.len, extent.depth);
        let _: Option<(&str, u64)> = match extent.place {
            DiskPlace::Data { storage, offset } => Some((storage.name(), offset.0)),
            DiskPlace::Compressed { storage, compressed } => {
                Some((storage.name(), compressed.offset.0))
            }
            DiskPlace::Zero { allocated: true | false } | DiskPlace::Hole => None,
        };
    }
    let mut stream = disk.stream();
    stream.read_exact(&mut a).and(stream.rewind()).and(stream.write_all(&a)).unwrap_or_default();
    drop(disk.enter());
    drop(other);
    disk.close()
}

fn queue(disk: Arc<Disk>) -> Result<()> {
    let queue: Queue = Queue::new(disk, 1)?;
    let at = GuestOffset(0);
    queue.submit(0, Request::Read { at, buffer: vec![0] });
    queue.submit(1, Request::Write { at, buffer: vec![0] });
    queue.submit(2, Request::WriteZeroes { at, len: 1, may_unmap: true });
    queue.submit(3, Request::Discard { at, len: 1 });
    queue.submit(4, Request::Flush);
    let _: usize = queue.outstanding();
    let done: Vec<Completion> = queue.reap(1, Some(Duration::ZERO));
    done.into_iter().try_for_each(|mut done| {
        let (_, _): (u64, Option<Vec<u8>>) = (done.cookie, done.buffer.take());
        done.result()
    })
}

struct Told;

impl Progress for Told {
    fn update(&self, _done: u64, _total: u64) {}
    fn message(&self, _text: &str) {}
}

fn new_images(registry: &Registry, path: &Path, disk: Disk, monitor: &Monitor<'_>) -> Result<()> {
    let driver: &'static dyn FormatDriver = vdkit::format("qcow2")?;
    let mut options: Options = Options::parse("qcow2", driver.options(), ["cluster_size=4K"])?;
    options.set_key(Some(Secret::new(Vec::new())));
    let backing = NewBacking::new("base", Some("qcow2".to_owned())).open(true);
    let found = backing.find(registry, path, &OpenOptions::read_only())?;
    let new = CreateOptions::new(path, driver)
        .guest_bytes(1 << 20)
        .options(options.clone())
        .backing(Some(backing))
        .opening(OpenOptions::read_only())
        .replace(true);
    let _: u64 = jobs::create(registry, &new, monitor)?.guest_bytes;

    let image = NewImage::new(path, "qcow2").options(options).backing(Some(found.reference));
    let mut how = ConvertOptions::new(Destination::New(image.clone()));
    how.compress = Some(CompressionSpec { codec: Codec::Zstd, level: None });
    (how.verify, how.salvage, how.threads, how.rate) = (true, true, Some(1), Some(1 << 20));
    how.keys = vec![Secret::new(Vec::new())];
    how.backing = Some(Backing::new(found.path, OpenOptions::read_only()));
    let source = Source::new(vec![disk]);
    let done = jobs::convert(registry, &source, &how, monitor)?;
    let (_, _): (u64, f64) = (done.virtual_size, done.seconds);
    let existing = ExistingImage::new(path).format(Some("raw".to_owned()));
    jobs::convert(registry, &source, &ConvertOptions::new(Destination::Into(existing)), monitor)?;
    jobs::convert(registry, &source, &ConvertOptions::new(Destination::Null), monitor)?;
    let disk: &Disk = &source.disks()[0];
    let _: u64 = jobs::dd_new(registry, disk, &image, &DdOptions::default(), monitor)?.copied_bytes;
    let _: u64 = jobs::verify(&source, disk, jobs::default_threads(), monitor)?;
    Ok(())
}

fn images(registry: &Registry, path: &Path, monitor: &Monitor<'_>) -> Result<()> {
    let opening = OpenOptions::read_only();
    let report = jobs::check(registry, path, &opening, Repair::All, monitor)?.report;
    let (_, _): (u64, u64) = (report.corruptions_left(), report.leaks_left());
    let (_, _) = (Repair::Nothing, Repair::Leaks);
    let how = CompactOptions::default().zero_scan(true);
    let _: u64 = jobs::compact(registry, path, &opening, how, monitor)?.report.length_after;
    let _: Vec<String> = jobs::amend(registry, path, &opening, ["compat=1.1"], monitor)?.changed;
    let mut options = CommitOptions::default();
    (options.to, options.force, options.threads) = (Some(path.to_owned()), true, None);
    let _: PathBuf = jobs::commit(registry, path, &opening, &options, monitor)?.base;
    let mut options = RebaseOptions::default();
    (options.backing, options.header_only, options.force) = (None, true, true);
    let _: Option<String> = jobs::rebase(registry, path, &opening, &options, monitor)?.backing;

    let _: Vec<u32> = jobs::list_keys(registry, path, &opening, monitor)?.opened;
    let key = Secret::new(Vec::new());
    let _: Option<u32> = jobs::add_key(registry, path, &opening, &key, None, 1, monitor)?.added;
    let _: Vec<u32> = jobs::change_key(registry, path, &opening, &key, None, 1, monitor)?.removed;
    let _: Vec<u32> = jobs::remove_key(registry, path, &opening, 0, true, monitor)?.removed;

    let chain = vdkit::describe_chain(registry, path, &opening)?;
    let (_, _): (Option<Error>, u64) = (chain.broken, chain.links[0].info.virtual_size);
    jobs::tree(registry, path, &TreeOptions::default(), monitor)?;
    jobs::doctor(registry, path, &DoctorOptions::default(), monitor)?;
    jobs::validate(registry, path, Preset::Azure, &opening)?;
    let storage = registry.open_storage(path, &vdkit::storage::FileOptions::read_only())?;
    let mut options = jobs::inspect::InspectOptions::default();
    (options.format, options.strict) = (Some("qcow2".to_owned()), true);
    match jobs::inspect::inspect(storage, &options)?.verdict {
        jobs::inspect::Verdict::Accept
        | jobs::inspect::Verdict::Refuse
        | jobs::inspect::Verdict::Unknown => Ok(()),
    }
}

fn disks(registry: &Registry, a: &Disk, b: &Disk, monitor: &Monitor<'_>) -> Result<()> {
    let mut options = CompareOptions::default();
    (options.strict, options.threads) = (true, None);
    let compared = jobs::compare(a, b, &options, monitor)?;
    let (_, _): (bool, Option<u64>) = (compared.identical, compared.first_difference);
    let mut options = ResizeOptions::default();
    options.shrink = true;
    let (): () = jobs::resize(a, 1 << 20, &options, monitor)?;
    for action in [
        SnapshotAction::Create(String::new()),
        SnapshotAction::Apply(String::new()),
        SnapshotAction::Delete(String::new()),
        SnapshotAction::Rename { which: String::new(), name: String::new() },
    ] {
        let _: String = jobs::snapshot(a, &action, monitor)?.id;
    }
    let _: Option<String> = jobs::snapshots(a)?.pop().map(|one| one.name);
    let bitmaps = jobs::bitmaps(a)?;
    bitmaps.add(&NewBitmap { name: "b", granularity: None, enabled: true })?;
    bitmaps.clear("b").and(bitmaps.set_enabled("b", false)).and(bitmaps.remove("b"))?;
    bitmaps.for_each_dirty("b", &mut |range| {
        let _: u64 = range.end - range.start;
        Ok(())
    })?;
    let (): () = jobs::merge_bitmap(a, "b", b, "b")?;
    let driver = registry.driver("qcow2")?;
    let measured = jobs::measure_empty(1 << 20, driver, &Options::default())?;
    let (_, _): (u64, u64) = (measured.required, measured.fully_allocated);
    drop(jobs::map(a, 0, 1)?);
    Ok(())
}

fn errors(error: &Error) -> (ErrorKind, Option<&str>, Option<u64>, Option<i32>, Option<String>) {
    let remedy = error.remedy().map(|remedy| remedy.to_string());
    (error.kind(), error.file(), error.offset(), error.errno(), remedy)
}

#[cfg(feature = "serve")]
fn serving(disk: Disk) -> std::result::Result<(), Box<dyn std::error::Error>> {
    use vdkit::nbd::{Address, Exports, Listener, Server, ServerOptions};
    use vdkit::serve::{Export, ExportOptions, OnNoSpace};

    let mut options = ExportOptions::default();
    (options.name, options.read_only) = (String::new(), true);
    options.on_nospace = OnNoSpace::Report;
    let export: Arc<Export> = Export::new(disk, options);
    let address: Address = "unix:socket".parse()?;
    let listener = Listener::bind(&address)?;
    let _: String = listener.uri("", false);
    let exports = Exports::new(vec![export.clone()]);
    let server = Server::start(exports, vec![listener], ServerOptions::default())?;
    let _: usize = server.connections();
    export.end_waiting();
    server.stop(Duration::ZERO);
    Ok(export.close()?)
}

#[test]
fn a_job_is_watched_and_ended() {
    let cancel = CancelToken::default();
    let monitor = Monitor::new(&Told).cancelled_by(cancel.clone());
    cancel.cancel();
    assert!(monitor.cancel.is_cancelled());
    assert!(matches!(cancel.check(), Err(Error::Interrupted)));
    assert_eq!(errors(&Error::invalid("no")).0, ErrorKind::Usage);
    assert!(opening(PathBuf::new()).writable);
}
