//! A job's output.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vdkit_block::{
    BackingRef, CacheMode, CancelToken, CreateRequest, Error, FormatDriver, ImageInfo, Limits,
    OpenRequest, Options, RefPolicy, Remedy, Result, Secret, Storage,
};
use vdkit_chain::{Disk, OpenOptions, Registry};
use vdkit_storage::{CacheShare, CommitOptions, FileOptions, FileStorage, LockMode, PendingFile};
use vdkit_stream::OutPipe;

use crate::convert::ConvertOptions;
use crate::create::{inherit, limit_of_new};
use crate::new_files::{NewFiles, WantedFiles};

/// Destination of a job.
#[derive(Clone, Debug)]
pub enum Destination {
    /// None: data is only read.
    Null,
    /// A new image, renamed into place when it is finished.
    New(NewImage),
    /// A new image that is written to a pipe.
    Pipe {
        /// The pipe.
        pipe: Arc<OutPipe>,
        /// The format's name.
        format: String,
        /// The format's options.
        options: Options,
    },
    /// An existing image, raw file or device, which is written in place.
    Into(ExistingImage),
}

/// An existing image, raw file or device.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ExistingImage {
    /// The file.
    pub path: PathBuf,
    /// Its format; `None` probes.
    pub format: Option<String>,
    /// Its cache mode; `None` means writeback, but direct I/O for a device, whose pages would not be
    /// read again.
    pub cache: Option<CacheMode>,
    /// Policy for references in its metadata.
    pub refs: RefPolicy,
}

impl ExistingImage {
    /// An image whose format is probed, with references within its own folder.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), format: None, cache: None, refs: RefPolicy::default() }
    }

    vdkit_block::setters! {
        /// Sets [`Self::format`].
        format: Option<String>,
        /// Sets [`Self::cache`].
        cache: Option<CacheMode>,
        /// Sets [`Self::refs`].
        refs: RefPolicy,
    }
}

/// A new image.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NewImage {
    /// The path; an existing file is replaced when the new one is finished.
    pub path: PathBuf,
    /// The format's name.
    pub format: String,
    /// The format's options.
    pub options: Options,
    /// The backing reference to store, and the backing disk, opened read-only.
    pub backing: Option<BackingRef>,
    /// Its cache mode; `None` is as fast as copying a file: nothing is synced, unless it replaces
    /// another file.
    pub cache: Option<CacheMode>,
    /// See [`FileOptions::in_place_if_needed`].
    pub in_place_if_needed: bool,
}

impl NewImage {
    /// An image of this format, without options of the format and without a backing image.
    pub fn new(path: impl Into<PathBuf>, format: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            format: format.into(),
            options: Options::default(),
            backing: None,
            cache: None,
            in_place_if_needed: false,
        }
    }

    vdkit_block::setters! {
        /// Sets [`Self::options`].
        options: Options,
        /// Sets [`Self::backing`].
        backing: Option<BackingRef>,
        /// Sets [`Self::cache`].
        cache: Option<CacheMode>,
    }

    /// Sets [`Self::in_place_if_needed`].
    #[must_use]
    pub fn in_place_if_needed(self, in_place_if_needed: bool) -> Self {
        Self { in_place_if_needed, ..self }
    }
}

/// The cache mode of a new file until it is renamed. It is not visible before, so one sync at the
/// end replaces all syncs that keep an image in use consistent.
fn cache_until_named(wanted: Option<CacheMode>) -> CacheMode {
    wanted.unwrap_or(CacheMode::Unsafe)
}

/// Options for a new file. By default, bytes beyond a share of the page cache are written directly.
pub fn new_file_options(wanted: Option<CacheMode>) -> FileOptions {
    let share = if wanted.is_none() { CacheShare::FILLED_ONCE } else { CacheShare::All };
    FileOptions::read_write().cache(cache_until_named(wanted)).share(share)
}

/// Durability of the rename of a new file. Syncs the new file before the rename if it replaces
/// another one, so that a crash leaves the old or the new file.
pub fn commit_options(wanted: Option<CacheMode>, replaces: bool) -> CommitOptions {
    match wanted {
        Some(CacheMode::Unsafe) => CommitOptions::default(),
        Some(_) => CommitOptions { sync_file: true, sync_folder: true },
        None => CommitOptions { sync_file: replaces, sync_folder: false },
    }
}

/// An open target.
pub(crate) struct Target {
    pub(crate) disk: Disk,
    pending: Option<PendingFile>,
    pipe: Option<Arc<OutPipe>>,
    files: Option<NewFiles>,
    commit: CommitOptions,
    /// Keys, if it is encrypted.
    keys: Vec<Secret>,
}

impl Target {
    /// Creates or opens the target of a conversion, for a disk of `bytes` bytes; `None` for
    /// `null:`.
    pub(crate) fn of(
        registry: &Registry,
        options: &ConvertOptions,
        bytes: u64,
        base: Option<Disk>,
        cancel: &CancelToken,
    ) -> Result<Option<Self>> {
        match &options.destination {
            Destination::Null => Ok(None),
            Destination::New(new) => Self::create(registry, new, bytes, base, cancel).map(Some),
            Destination::Pipe { pipe, format, options } => {
                Self::create_on_pipe(registry, pipe, format, options, bytes).map(Some)
            }
            Destination::Into(existing) => {
                let ExistingImage { path, format, cache, refs } = existing;
                let open = OpenOptions::read_write()
                    .maybe_format(format.clone())
                    .refs(refs.clone())
                    .keys(options.keys.clone());
                Self::open(registry, path, open, *cache, bytes).map(Some)
            }
        }
    }

    fn create_on_pipe(
        registry: &Registry,
        pipe: &Arc<OutPipe>,
        format: &str,
        options: &Options,
        guest_bytes: u64,
    ) -> Result<Self> {
        let driver = registry.driver(format)?;
        let in_order = |driver: &dyn FormatDriver| {
            driver.creation().is_some_and(|creation| creation.writes_in_order(options))
        };
        if !in_order(driver) {
            let able = registry.drivers().filter(|driver| in_order(*driver));
            let able: Vec<_> = able.map(|driver| driver.name()).collect();
            return Err(Error::unsupported(
                pipe.name(),
                format!(
                    "a {format} image with these options cannot be written to a pipe, since its \
                         metadata change while it grows"
                ),
                format!("name a file instead; to a pipe go: {}", able.join(", ")),
            ));
        }
        let request = CreateRequest {
            storage: pipe.clone(),
            files: Vec::new(),
            guest_bytes,
            options: options.clone(),
            backing: None,
            backing_bytes: None,
        };
        let format = driver
            .require_creation(pipe.name())?
            .create_open(&request, &Limits::default())
            .map_err(|error| limit_of_new(pipe.name(), driver.name(), error))?;
        let info = ImageInfo::new(driver.name(), guest_bytes);
        let disk = Disk::from_format(format, info, &OpenOptions::read_write());
        let (pipe, keys) = (Some(pipe.clone()), Vec::new());
        Ok(Self { disk, pending: None, pipe, files: None, commit: CommitOptions::default(), keys })
    }

    /// Creates an image of `bytes` bytes, open for writing.
    pub(crate) fn create(
        registry: &Registry,
        new: &NewImage,
        bytes: u64,
        base: Option<Disk>,
        cancel: &CancelToken,
    ) -> Result<Self> {
        let driver = registry.driver(&new.format)?;
        let mut options = new.options.clone();
        if let Some(base) = &base {
            inherit(driver, &new.path, &mut options, &base.layers()[0].info().properties)?;
        }
        let new = &NewImage { options, ..new.clone() };
        let cache = cache_until_named(new.cache);
        let file = new_file_options(new.cache)
            .hints(new.options.hints())
            .in_place_if_needed(new.in_place_if_needed);
        let mut pending = PendingFile::prepare(&new.path, &file)?;
        let wanted = WantedFiles {
            registry,
            driver,
            path: &new.path,
            guest_bytes: bytes,
            options: &new.options,
            file: &file,
            replace: true,
        };
        let name = new.path.display().to_string();
        let too_large = |error| limit_of_new(&name, driver.name(), error);
        let files = NewFiles::create(&wanted, cancel).map_err(too_large)?;
        pending.make_empty()?;
        let request = CreateRequest {
            storage: pending.storage().clone(),
            files: files.storages().map(|file| file.clone() as Arc<dyn Storage>).collect(),
            guest_bytes: bytes,
            options: new.options.clone(),
            backing: new.backing.clone(),
            backing_bytes: base.as_ref().map(Disk::guest_bytes),
        };
        let format = driver
            .require_creation(&name)
            .and_then(|new| new.create_open(&request, &Limits::default()))
            .map_err(too_large)?;
        let options = OpenOptions::read_write().cache(cache);
        let info = if format.caps().one_pass {
            ImageInfo::new(driver.name(), bytes)
        } else {
            driver.describe(format.storage(), &Limits::default())?
        };
        let mut disk = Disk::from_format(format, info, &options);
        if let Some(base) = base {
            disk = disk.over(base);
        }
        let keys = new.options.key().into_iter().cloned().collect();
        let commit = commit_options(new.cache, pending.replaces() || files.replaces());
        Ok(Self { disk, pending: Some(pending), pipe: None, files: Some(files), commit, keys })
    }

    /// Opens an existing target, which must hold `bytes` bytes.
    pub(crate) fn open(
        registry: &Registry,
        path: &Path,
        mut options: OpenOptions,
        cache: Option<CacheMode>,
        bytes: u64,
    ) -> Result<Self> {
        // The user named it as the target.
        let file = FileOptions::read_only().lock(LockMode::Off);
        // Some servers end after their first connection, so an export is opened once.
        let remote = registry.protocol_of(path).is_some();
        let (device, empty) = match remote {
            true => (true, false),
            false => {
                let storage = FileStorage::open(path, &file)?;
                (storage.caps().device, storage.len()? == 0)
            }
        };
        if options.format.is_none() && (device || empty) {
            options.format = Some("raw".into());
        }
        let open = |cache| Disk::open(registry, path, &options.clone().cache(cache));
        let disk = match cache {
            Some(cache) => open(cache)?,
            None if device && !remote => match open(CacheMode::None) {
                // A file of its chain has no direct I/O.
                Err(Error::Unsupported { .. }) => open(CacheMode::Writeback)?,
                opened => opened?,
            },
            None => open(CacheMode::Writeback)?,
        };
        if disk.guest_bytes() < bytes {
            let name = path.display();
            let larger: Remedy = match device {
                true if remote => "choose a larger export, or make it larger on its server".into(),
                true => {
                    "it is a device: make it larger (LVM: lvextend), or choose another one".into()
                }
                false => Remedy::Resize { file: name.to_string(), bytes, shrink: false },
            };
            let why = format!("has {} bytes, the source has {bytes}", disk.guest_bytes());
            return Err(Error::invalid_for(&name, why).with_remedy(larger));
        }
        let (commit, keys) = (CommitOptions::default(), options.keys);
        Ok(Self { disk, pending: None, pipe: None, files: None, commit, keys })
    }

    /// Reopens the image for reading, from the open files.
    pub(crate) fn reopen(&self, registry: &Registry) -> Result<Disk> {
        let top = &self.disk.layers()[0];
        let driver = registry.driver(top.format().name())?;
        let storage = top.format().storage().clone();
        let files = top.format().other_files();
        let info = driver.describe(&storage, &Limits::default())?;
        let limits = Limits::default();
        let request = OpenRequest { storage, files, writable: false, limits };
        let format = driver.open_with_keys(request, &self.keys)?;
        Ok(Disk::from_format(format, info, &OpenOptions::default()))
    }

    /// Makes a new image and its name durable at the commit, whatever its cache mode.
    pub(crate) fn make_durable(&mut self) {
        self.commit = CommitOptions { sync_file: true, sync_folder: true };
    }

    pub(crate) fn close(&self) -> Result<()> {
        self.disk.close()
    }

    /// Closes a target that existed before, after a failure: the image gives back the space that was
    /// reserved in it, and is marked clean. A new image is removed instead.
    pub(crate) fn give_up(&self) {
        if self.pending.is_none() && self.pipe.is_none() {
            let _ = self.disk.close();
        }
    }

    /// Renames the files into place, and returns those that did not exist before. Cancellation is
    /// possible until the first rename.
    pub(crate) fn commit(self, cancel: &CancelToken) -> Result<Vec<PathBuf>> {
        drop(self.disk);
        if let Some(pipe) = self.pipe {
            pipe.finish()?;
            return Ok(Vec::new());
        }
        match self.files {
            Some(files) => files.commit(self.pending, self.commit, cancel),
            None => Ok(Vec::new()),
        }
    }
}

#[cfg(test)]
mod tests {
    use vdkit_raw::RawDriver;

    use super::*;

    #[test]
    fn a_device_is_written_past_the_page_cache() {
        let registry = Registry::new([&RawDriver as &'static dyn FormatDriver]);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
        let Some(device) = vdkit_testbase::fs::loop_device(1 << 20, 512) else { return };
        let alignment = |path: &Path, cache| {
            let mut options = OpenOptions::read_write();
            options.format = Some("raw".into());
            let target = Target::open(&registry, path, options, cache, 1 << 20).unwrap();
            target.disk.top().storage().caps().alignment
        };
        assert!(alignment(device.path(), None) >= 512);
        assert_eq!(alignment(device.path(), Some(CacheMode::Writeback)), 1);
        assert_eq!(alignment(&file, None), 1);
    }

    #[test]
    fn a_cache_mode_that_is_named_holds_for_every_byte() {
        let options = new_file_options(None);
        assert_eq!((options.cache, options.share), (CacheMode::Unsafe, CacheShare::FILLED_ONCE));
        for named in [CacheMode::Unsafe, CacheMode::Writeback, CacheMode::None] {
            let options = new_file_options(Some(named));
            assert_eq!((options.cache, options.share), (named, CacheShare::All));
        }
    }
}
