//! Creating an image.

use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, UNIX_EPOCH};

use vdkit_block::{
    BackingRef, CreateRequest, Error, FormatDriver, ImageInfo, Limits, Monitor, Options, Remedy,
    Result, Storage,
};
use vdkit_chain::{Disk, OpenOptions, Registry, describe_chain};
use vdkit_storage::{CommitOptions, FileKind, FileOptions, PendingFile, classify};

use crate::cancellable::CancellableStorage;
use crate::new_files::{NewFiles, WantedFiles, beside};

/// Interval between progress updates.
const TICK: Duration = Duration::from_millis(50);
/// A new image and its name are durable.
const DURABLE: CommitOptions = CommitOptions { sync_file: true, sync_folder: true };

/// The backing image of a new image.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NewBacking {
    /// Its name to store: relative to the new image's folder, or absolute.
    pub name: String,
    /// Its format; `None` probes, and refuses an image without a known header.
    pub format: Option<String>,
    /// Open it, with its backing chain, to check that it is readable. Otherwise size and format
    /// must be given.
    pub open: bool,
}

impl NewBacking {
    /// A backing image that is opened, to check that it is readable.
    pub fn new(name: impl Into<String>, format: Option<String>) -> Self {
        Self { name: name.into(), format, open: true }
    }

    vdkit_block::setters! {
        /// Sets [`Self::open`].
        open: bool,
    }
}

/// Options of a new image.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CreateOptions<'a> {
    /// Path of a new file or a block device.
    pub path: &'a Path,
    /// Its format.
    pub driver: &'static dyn FormatDriver,
    /// Bytes of the guest disk; `None` for the size of the backing image or the device.
    pub guest_bytes: Option<u64>,
    /// The format's options, checked against [`vdkit_block::Creation::options`].
    pub options: Options,
    /// Its backing image.
    pub backing: Option<NewBacking>,
    /// Allow replacing an existing file.
    pub replace: bool,
    /// How the backing image is opened: its references, limits, locks and keys.
    pub opening: OpenOptions,
    /// See [`FileOptions::in_place_if_needed`].
    pub in_place_if_needed: bool,
}

impl<'a> CreateOptions<'a> {
    /// An image as large as its backing image or device, without options of the format; an existing
    /// file is refused.
    pub fn new(path: &'a Path, driver: &'static dyn FormatDriver) -> Self {
        Self {
            path,
            driver,
            guest_bytes: None,
            options: Options::default(),
            backing: None,
            replace: false,
            opening: OpenOptions::read_only(),
            in_place_if_needed: false,
        }
    }

    /// Sets [`Self::guest_bytes`].
    #[must_use]
    pub fn guest_bytes(self, guest_bytes: impl Into<Option<u64>>) -> Self {
        Self { guest_bytes: guest_bytes.into(), ..self }
    }

    /// Sets [`Self::backing`].
    #[must_use]
    pub fn backing(self, backing: impl Into<Option<NewBacking>>) -> Self {
        Self { backing: backing.into(), ..self }
    }

    vdkit_block::setters! {
        /// Sets [`Self::options`].
        options: Options,
        /// Sets [`Self::replace`].
        replace: bool,
        /// Sets [`Self::opening`].
        opening: OpenOptions,
    }

    /// Sets [`Self::in_place_if_needed`].
    #[must_use]
    pub fn in_place_if_needed(self, in_place_if_needed: bool) -> Self {
        Self { in_place_if_needed, ..self }
    }

    fn file(&self) -> FileOptions {
        FileOptions::read_write()
            .hints(self.options.hints())
            .in_place_if_needed(self.in_place_if_needed)
    }
}

/// A created image.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Created {
    /// Bytes of the guest disk, as requested or rounded by the format.
    pub guest_bytes: u64,
    /// The stored backing reference.
    pub backing: Option<BackingRef>,
}

/// Creates an image. A file gets its name only when it is complete; on failure an existing file is
/// unchanged.
///
/// # Errors
/// [`Error::Invalid`] if the size is unknown, a file exists that may not be replaced, or the
/// backing image's format would have to be guessed; errors of the format and storages;
/// [`Error::Interrupted`].
pub fn create(
    registry: &Registry,
    image: &CreateOptions<'_>,
    monitor: &Monitor<'_>,
) -> Result<Created> {
    let device = match classify(image.path) {
        _ if registry.protocol_of(image.path).is_some() => true,
        Ok(kind) => kind == FileKind::BlockDevice,
        Err(Error::File { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => false,
        Err(error) => return Err(error),
    };
    if !device && !image.replace && image.path.metadata().is_ok_and(|found| found.len() > 0) {
        return Err(Error::invalid_for(&image.path.display(), "is there already"));
    }
    let base = match &image.backing {
        Some(backing) => Some(backing.find(registry, image.path, &image.opening)?),
        None => None,
    };
    let mut image = image.clone();
    if let Some(base) = &base {
        inherit(image.driver, image.path, &mut image.options, &base.properties)?;
    }
    let image = &image;
    let guest_bytes = image.guest_bytes.or(base.as_ref().and_then(|base| base.guest_bytes));
    let guest_bytes = if device {
        create_on_device(registry, image, guest_bytes, base.as_ref(), monitor)?
    } else {
        let guest_bytes = guest_bytes
            .ok_or_else(|| Error::invalid_for(&image.path.display(), "a size is needed"))?;
        create_file(registry, image, guest_bytes, base.as_ref(), monitor)?
    };
    Ok(Created { guest_bytes, backing: base.map(|base| base.reference) })
}

/// An examined backing image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundBacking {
    /// Its path.
    pub path: PathBuf,
    /// The reference to store.
    pub reference: BackingRef,
    /// Bytes of its disk, if it was opened.
    pub guest_bytes: Option<u64>,
    /// Its format's properties, if it was opened.
    properties: Vec<(String, String)>,
}

/// Options that a new image inherits from its backing image: the option, and the backing image's
/// property. (A guest sees one sector size for the whole chain.)
const INHERITED: [(&str, &str); 1] = [("logical_sector_size", "logical-sector-size")];

/// Sets the options inherited from the backing image.
///
/// # Errors
/// [`Error::Invalid`] if the user gave another value.
pub(crate) fn inherit(
    driver: &dyn FormatDriver,
    image: &Path,
    options: &mut Options,
    properties: &[(String, String)],
) -> Result<()> {
    let specs = driver.options();
    for (key, property) in INHERITED {
        let of_parent = properties.iter().find(|(name, _)| name == property);
        let Some((_, value)) = of_parent.filter(|_| specs.iter().any(|spec| spec.key == key))
        else {
            continue;
        };
        match options.text(key) {
            None => options.set(driver.name(), specs, key, value)?,
            Some(given) if given != value => {
                return Err(Error::invalid_for(
                    &image.display(),
                    format!(
                        "{key}={given} was asked for, and the image that it shall stand on has \
                     {value}; leave the option out"
                    ),
                ));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

impl NewBacking {
    /// Examines the backing image of a new image at `image`, with the references, limits, locks and
    /// keys of `opening`.
    ///
    /// # Errors
    /// Errors of opening it; [`Error::Invalid`] if its format would have to be guessed.
    pub fn find(
        &self,
        registry: &Registry,
        image: &Path,
        opening: &OpenOptions,
    ) -> Result<FoundBacking> {
        let protocol = self.name.split_once(':').filter(|(before, _)| !before.contains('/'));
        if let Some((before, _)) = protocol.filter(|_| self.open) {
            return Err(Error::invalid(format!(
                "'{}': in an image's header, '{before}:' at the beginning of a name says a protocol, \
                 and nobody could open what the image stands on; write './{}'",
                self.name, self.name
            )));
        }
        let (path, name) = (beside(image, &self.name), self.name.clone());
        if !self.open {
            let Some(format) = self.format.clone() else {
                let why = format!("the format of '{name}' must be named where it is not opened");
                let remedy = Remedy::NameBackingFormat { format: None };
                return Err(Error::invalid(why).with_remedy(remedy));
            };
            let reference = BackingRef::new(name, Some(format));
            return Ok(FoundBacking { path, reference, guest_bytes: None, properties: Vec::new() });
        }
        let options = opening.of_other(self.format.clone());
        let (info, probed, guest_bytes) = examine(registry, &path, &options)?;
        if probed && info.format == "raw" {
            return Err(Error::invalid_for(
                &path.display(),
                "its format was not detected, and its guest could make it look like any",
            )
            .with_remedy(Remedy::NameBackingFormat { format: Some("raw") }));
        }
        let (format, identity) = (Some(info.format.to_owned()), info.identity);
        let reference = BackingRef { name, format, identity, modified: modified(&path) };
        let (guest_bytes, properties) = (Some(guest_bytes), info.properties);
        Ok(FoundBacking { path, reference, guest_bytes, properties })
    }
}

/// Modification time in seconds since 1970; `None` for a device.
pub(crate) fn modified(path: &Path) -> Option<u64> {
    let found = path.metadata().ok().filter(Metadata::is_file)?.modified().ok()?;
    Some(found.duration_since(UNIX_EPOCH).ok()?.as_secs())
}

/// Opens an image to check that it is readable. If the chain is encrypted, only headers are read.
/// Also returns whether its format was probed, and the bytes of its disk.
fn examine(
    registry: &Registry,
    path: &Path,
    options: &OpenOptions,
) -> Result<(ImageInfo, bool, u64)> {
    match Disk::open(registry, path, options) {
        Ok(disk) => {
            let top = &disk.layers()[0];
            Ok((top.info().clone(), top.probed(), disk.guest_bytes()))
        }
        Err(Error::Key { .. }) => {
            let report = describe_chain(registry, path, options)?;
            match (report.links.first(), report.broken) {
                (_, Some(error)) => Err(error),
                (Some(top), None) => Ok((top.info.clone(), top.probed, top.info.virtual_size)),
                (None, None) => Err(Error::invalid_for(&path.display(), "is no image")),
            }
        }
        Err(error) => Err(error),
    }
}

fn create_file(
    registry: &Registry,
    image: &CreateOptions<'_>,
    guest_bytes: u64,
    base: Option<&FoundBacking>,
    monitor: &Monitor<'_>,
) -> Result<u64> {
    let mut pending = PendingFile::prepare(image.path, &image.file())?;
    let files = new_files(registry, image, guest_bytes, monitor)?;
    pending.make_empty()?;
    let storage: Arc<dyn Storage> = pending.storage().clone();
    write(image, storage.clone(), &files, guest_bytes, base, monitor)?;
    // Some formats round the size.
    let made = image.driver.describe(&storage, &Limits::default())?.virtual_size;
    drop(storage);
    files.commit(Some(pending), DURABLE, &monitor.cancel)?;
    Ok(made)
}

/// Writes to a device in place; a failure leaves it incomplete.
fn create_on_device(
    registry: &Registry,
    image: &CreateOptions<'_>,
    guest_bytes: Option<u64>,
    base: Option<&FoundBacking>,
    monitor: &Monitor<'_>,
) -> Result<u64> {
    let device = registry.open_storage(image.path, &FileOptions::read_write())?;
    let guest_bytes = match guest_bytes {
        Some(bytes) => bytes,
        None if image.driver.name() == "raw" => device.len()?,
        None => {
            return Err(Error::invalid_for(&image.path.display(), "a size is needed"));
        }
    };
    let files = new_files(registry, image, guest_bytes, monitor)?;
    write(image, device.clone(), &files, guest_bytes, base, monitor)?;
    files.commit(None, DURABLE, &monitor.cancel)?;
    device.sync()?;
    if image.driver.name() == "raw" {
        return Ok(guest_bytes);
    }
    Ok(image.driver.describe(&device, &Limits::default())?.virtual_size)
}

/// The other files that the options require.
fn new_files(
    registry: &Registry,
    image: &CreateOptions<'_>,
    guest_bytes: u64,
    monitor: &Monitor<'_>,
) -> Result<NewFiles> {
    let wanted = WantedFiles {
        registry,
        driver: image.driver,
        path: image.path,
        guest_bytes,
        options: &image.options,
        file: &image.file(),
        replace: image.replace,
    };
    NewFiles::create(&wanted, &monitor.cancel).map_err(|error| error_of(image, error))
}

/// Writes the image and its other files.
fn write(
    image: &CreateOptions<'_>,
    storage: Arc<dyn Storage>,
    files: &NewFiles,
    guest_bytes: u64,
    base: Option<&FoundBacking>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let written: Arc<AtomicU64> = Arc::default();
    let watched = |storage: Arc<dyn Storage>| -> Arc<dyn Storage> {
        Arc::new(CancellableStorage::new(storage, monitor.cancel.clone(), Arc::clone(&written)))
    };
    let request = CreateRequest {
        storage: watched(storage),
        files: files.storages().map(|file| watched(file.clone())).collect(),
        guest_bytes,
        options: image.options.clone(),
        backing: base.map(|base| base.reference.clone()),
        backing_bytes: base.and_then(|base| base.guest_bytes),
    };
    make(image, &request, &written, monitor)
}

/// Creates the image, and reports progress from `written` if that takes long.
fn make(
    image: &CreateOptions<'_>,
    request: &CreateRequest,
    written: &AtomicU64,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let creation = image.driver.require_creation(request.storage.name())?;
    let create = || creation.create(request).map_err(|error| error_of(image, error));
    if image.options.text("preallocation") != Some("full") {
        return create();
    }
    let clusters = request.guest_bytes.div_ceil(creation.cluster_bytes(&image.options)?);
    let measured = creation.measure(request.guest_bytes, &image.options, clusters);
    let total = measured.map_err(|error| error_of(image, error))?.fully_allocated;
    let total = total.max(request.guest_bytes);
    std::thread::scope(|scope| {
        let (working, ended) = channel::<()>();
        let report = move || {
            while ended.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                monitor.progress.update(written.load(Ordering::Relaxed).min(total), total);
            }
        };
        // Without a thread the image is created without progress.
        let _ = std::thread::Builder::new().spawn_scoped(scope, report);
        let made = create();
        drop(working);
        made
    })?;
    monitor.progress.update(total, total);
    Ok(())
}

/// The user gave the size, so exceeding a limit is a usage error.
fn error_of(image: &CreateOptions<'_>, error: Error) -> Error {
    limit_of_new(&image.path.display().to_string(), image.driver.name(), error)
}

/// Maps a limit error of a new image to a usage error.
pub(crate) fn limit_of_new(name: &str, format: &str, error: Error) -> Error {
    match error {
        Error::Limit { what, found, limit, .. } => Error::invalid_for(
            &name,
            format!("{what} is {found}, more than the limit of {limit} of {format}"),
        ),
        other => other,
    }
}
