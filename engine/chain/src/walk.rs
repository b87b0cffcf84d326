//! Walks down a chain, opening files but no formats.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::FileType;
use vdkit_block::{
    BackingRef, Error, FormatDriver, ImageInfo, IoAction, Limits, Monitor, NotedTime, OfflineImage,
    Remedy, Result, Secret, Storage, require_within,
};
use vdkit_storage::{FileOptions, FileStorage, LockMode};

use crate::options::{BackingChoice, BackingImage, OpenOptions};
use crate::reference::{self, Namer, Role};
use crate::registry::Registry;

/// One image of a chain, opened and described.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) path: PathBuf,
    pub(crate) storage: Arc<dyn Storage>,
    pub(crate) driver: &'static dyn FormatDriver,
    pub(crate) probed: bool,
    /// Its format was neither given nor detected.
    pub(crate) fallback: bool,
    pub(crate) info: ImageInfo,
    namer: Namer,
    /// The caller's choice of its data file.
    data_file: Option<PathBuf>,
    /// How its files are opened for reading.
    reading: FileOptions,
    /// Keys to try, its own first.
    pub(crate) keys: Vec<Secret>,
}

impl Found {
    /// Refuses to write an image whose format was neither given nor detected.
    pub(crate) fn check_written_as_probed(&self) -> Result<()> {
        if !self.fallback {
            return Ok(());
        }
        let format = self.driver.name().to_owned();
        Err(Error::Guessed { file: self.path.display().to_string(), format })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Identity {
    File { device: u64, inode: u64 },
    Device(u64),
}

impl Identity {
    fn of(storage: &FileStorage) -> Result<Self> {
        let fail = |errno| Error::file_io(storage.name(), IoAction::Open, errno);
        let fd = storage.as_fd().ok_or_else(|| fail(rustix::io::Errno::BADF))?;
        let stat = rustix::fs::fstat(fd).map_err(fail)?;
        Ok(match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => Self::Device(stat.st_rdev),
            _ => Self::File { device: stat.st_dev, inode: stat.st_ino },
        })
    }
}

/// Source of the next image.
#[derive(Debug)]
enum Next {
    /// A storage that the caller opened.
    Given {
        storage: Arc<dyn Storage>,
        format: Option<String>,
    },
    User {
        path: PathBuf,
        format: Option<String>,
        expected: Option<String>,
        /// The caller may describe one file twice: such a chain ends.
        repeatable: bool,
    },
    Metadata {
        namer: Namer,
        backing: BackingRef,
    },
    /// There is one, but its file name is unknown.
    Nameless(Error),
    End,
}

/// The next image, opened but not described.
#[derive(Debug)]
struct Source {
    path: PathBuf,
    storage: Arc<dyn Storage>,
    format: Option<String>,
    namer: Namer,
    /// The overlay, and its reference to this image.
    expected: Option<(Namer, BackingRef)>,
    /// The identity that an image of the user's must have.
    wanted: Option<String>,
}

/// A walk down from the top image.
#[derive(Debug)]
pub(crate) struct Walk<'a> {
    registry: &'a Registry,
    options: &'a OpenOptions,
    next: Next,
    /// The caller's choice for the image beneath the last one.
    choice: BackingChoice,
    /// The choices for the next image, if the caller described it.
    given: Option<Box<BackingImage>>,
    depth: usize,
    /// Depth of a further image that is opened for writing.
    also_written: Option<usize>,
    seen: Vec<Identity>,
    /// Those of them that are opened for writing.
    written: Vec<Identity>,
}

impl<'a> Walk<'a> {
    pub(crate) fn new(registry: &'a Registry, path: &Path, options: &'a OpenOptions) -> Self {
        let format = options.format.clone();
        let next = Next::User { path: path.to_owned(), format, expected: None, repeatable: false };
        Self::starting(registry, next, options)
    }

    fn starting(registry: &'a Registry, next: Next, options: &'a OpenOptions) -> Self {
        let choice = options.backing.clone();
        Self {
            registry,
            options,
            next,
            choice,
            given: None,
            depth: 0,
            also_written: None,
            seen: Vec::new(),
            written: Vec::new(),
        }
    }

    /// A walk that starts at a storage of the caller.
    pub(crate) fn of_storage(
        registry: &'a Registry,
        storage: Arc<dyn Storage>,
        options: &'a OpenOptions,
    ) -> Self {
        let next = Next::Given { storage, format: options.format.clone() };
        Self::starting(registry, next, options)
    }

    /// Opens the image at this depth for writing too.
    pub(crate) fn also_writing(self, depth: usize) -> Self {
        Self { also_written: Some(depth), ..self }
    }

    /// The next image; `None` at the end of the chain.
    pub(crate) fn step(&mut self) -> Result<Option<Found>> {
        let top = self.depth == 0;
        let given = self.given.take();
        let file_options = self.file_options(given.as_deref());
        let Some(source) = self.open_next(&file_options)? else { return Ok(None) };
        let Source { path, storage, format, namer, expected, wanted } = source;
        let probed = format.is_none();
        let (driver, fallback) = match format {
            Some(name) if top => (self.registry.driver(&name)?, false),
            Some(name) => (self.backing_driver(&path, &name)?, false),
            None => {
                let probed = self.registry.probe(&*storage)?;
                (probed.driver, probed.fallback)
            }
        };
        let described = driver.describe(&storage, &self.options.limits);
        let info = match described {
            Err(error) if !probed => {
                let overlay = expected.as_ref().map(|(overlay, _)| overlay.name());
                return Err(self.other_format(&*storage, driver, overlay, error));
            }
            described => described?,
        };
        check_given(&path, wanted, &info)?;
        if let Some((overlay, backing)) = expected {
            check_identity(&overlay, backing, &path, &info)?;
        }
        self.next = self.after(&info, &namer)?;
        self.depth += 1;
        let (data_file, mut keys) = match given {
            Some(image) => (image.data_file, image.keys),
            None => (self.options.data_file.clone().filter(|_| top), Vec::new()),
        };
        keys.extend_from_slice(&self.options.keys);
        let reading = file_options;
        Ok(Some(Found {
            path,
            storage,
            driver,
            probed,
            fallback,
            info,
            namer,
            data_file,
            reading,
            keys,
        }))
    }

    /// Opens the storage of the next image, with these options for reading.
    fn open_next(&mut self, reading: &FileOptions) -> Result<Option<Source>> {
        let writable =
            (self.depth == 0 && self.options.writable) || self.also_written == Some(self.depth);
        let options = reading.writable(writable);
        let (mut expected, mut wanted) = (None, None);
        let (path, storage, format, namer) = match std::mem::replace(&mut self.next, Next::End) {
            Next::End => return Ok(None),
            Next::Nameless(error) => return Err(error),
            Next::Given { storage, format } => {
                let path = PathBuf::from(storage.name());
                let namer = Namer::nowhere(storage.name());
                (path, storage, format, namer)
            }
            Next::User { path, format, expected, repeatable } => {
                wanted = expected;
                self.check_depth(&path.display().to_string())?;
                let (storage, namer) = match self.registry.protocol_of(&path) {
                    Some((protocol, name)) => {
                        let storage = protocol.open(&name, writable, options.cache)?;
                        (storage, Namer::nowhere(&name))
                    }
                    None => {
                        let storage = FileStorage::open(&path, &options)?;
                        self.note_image(&storage, &path, writable, repeatable)?;
                        (Arc::new(storage) as Arc<dyn Storage>, Namer::of_user_path(&path))
                    }
                };
                (path, storage, format, namer)
            }
            Next::Metadata { namer, backing } => {
                self.check_depth(namer.name())?;
                let (refs, name) = (&self.options.refs, &backing.name);
                let found = reference::open(&namer, Role::Backing, name, refs, &options)?;
                let format = backing.format.clone();
                expected = Some((namer, backing));
                self.note_image(&found.storage, &found.path, writable, false)?;
                (found.path, Arc::new(found.storage) as Arc<dyn Storage>, format, found.namer)
            }
        };
        Ok(Some(Source { path, storage, format, namer, expected, wanted }))
    }

    /// Records the file of an image. If it is `repeatable`, it may be there already, unless one of
    /// the two is written.
    fn note_image(
        &mut self,
        storage: &FileStorage,
        path: &Path,
        writable: bool,
        repeatable: bool,
    ) -> Result<()> {
        let identity = Identity::of(storage)?;
        let again = repeatable && !writable && self.seen.contains(&identity);
        if !again || self.written.contains(&identity) {
            self.note(storage, path)?;
        }
        if writable {
            self.written.push(identity);
        }
        Ok(())
    }

    /// The error for an image that does not match its given format. If the image has another
    /// format, the error says so, since the image is not damaged.
    fn other_format(
        &self,
        storage: &dyn Storage,
        named: &dyn FormatDriver,
        overlay: Option<&str>,
        error: Error,
    ) -> Error {
        let found = match self.registry.probe(storage) {
            Ok(probed) if !probed.fallback && probed.driver.name() != named.name() => probed.driver,
            _ => return error,
        };
        let hint = if self.depth == 0 {
            Remedy::from("leave the format out: it is recognized by its header")
        } else {
            Remedy::StoreReference {
                overlay: overlay.unwrap_or("OVERLAY").to_owned(),
                backing: Some(storage.name().to_owned()),
                format: Some(found.name().to_owned()),
            }
        };
        let what = format!("is a {} image, and was to be opened as {}", found.name(), named.name());
        Error::unsupported(storage.name(), what, hint)
    }

    /// The source of the image that the metadata names, if it names one. `given`: the caller's
    /// choices for it.
    fn referred(
        &mut self,
        info: &ImageInfo,
        namer: &Namer,
        given: Option<Box<BackingImage>>,
    ) -> Result<Next> {
        let Some(mut backing) = info.backing() else {
            return Ok(match &info.backing_identity {
                // Unallocated bytes must not read as zero.
                Some(identity) => Next::Nameless(Error::unsupported(
                    namer.name(),
                    format!("stands on the disk {identity} and names no file for it"),
                    Remedy::GiveParent,
                )),
                None if given.is_some() => Next::Nameless(Error::invalid_for(
                    &namer.name(),
                    "has no backing file, but it was said how to open one",
                )),
                None => Next::End,
            });
        };
        if let Some(format) = given.as_ref().and_then(|image| image.format.clone()) {
            backing.format = Some(format);
        }
        let Some(mut image) = self.registry.reference_name(&backing.name)? else {
            self.given = given;
            return Ok(Next::Metadata { namer: namer.clone(), backing });
        };
        let Some(path) = image.path.clone() else {
            return Err(Error::invalid_for(&namer.name(), "its backing file has no name"));
        };
        if self.choice == BackingChoice::Follow {
            self.choice = std::mem::take(&mut image.backing);
        }
        let format = backing.format.or(image.format.take());
        let expected = backing.identity;
        if let Some(given) = given {
            image.lock = given.lock.or(image.lock);
            image.data_file = given.data_file.or(image.data_file);
            image.keys.splice(..0, given.keys);
        }
        self.given = Some(Box::new(image));
        Ok(Next::User { path, format, expected, repeatable: false })
    }

    /// The backing image's source.
    fn after(&mut self, info: &ImageInfo, namer: &Namer) -> Result<Next> {
        let moved = matches!(self.choice, BackingChoice::Parents(_)) && self.depth > 0;
        let (path, format) = match std::mem::take(&mut self.choice) {
            BackingChoice::Ignore => return Ok(Next::End),
            BackingChoice::Override { path, format } => (path, format),
            BackingChoice::Image(mut image) => {
                self.choice = std::mem::take(&mut image.backing);
                let Some(path) = image.path.clone() else {
                    return self.referred(info, namer, Some(image));
                };
                let format = image.format.clone().or_else(|| info.backing_format.clone());
                self.given = Some(image);
                (path, format)
            }
            BackingChoice::Parents(paths) if self.depth < paths.len() => {
                // The file was moved, so its overlay still knows its format.
                let format = info.backing_format.clone().filter(|_| moved);
                let path = paths[self.depth].clone();
                self.choice = BackingChoice::Parents(paths);
                (path, format)
            }
            BackingChoice::Follow | BackingChoice::Parents(_) => {
                return self.referred(info, namer, None);
            }
        };
        let (backing, identity) = (info.backing(), info.backing_identity.clone());
        // A format fills the rest of a new cluster from the backing image only if its own metadata
        // says that there is one.
        let needed = moved || self.options.writable || self.also_written.is_some();
        if needed && backing.is_none() && identity.is_none() {
            return Err(Error::invalid_for(
                &namer.name(),
                format!(
                    "has no backing file, but '{}' was given as its parent: leave it out",
                    path.display()
                ),
            ));
        }
        // The user may give another backing file for an image that names one. If the image has only
        // an identity, the file must match it. Further down, only the location may differ.
        let expected = identity.filter(|_| moved || backing.is_none());
        let repeatable = self.given.is_some();
        Ok(Next::User { path, format, expected, repeatable })
    }

    /// Opens the other files with an image's guest data, in the order of its metadata.
    pub(crate) fn open_files(
        &mut self,
        found: &Found,
        writable: bool,
    ) -> Result<Vec<Arc<dyn Storage>>> {
        let file_options = found.reading.writable(writable);
        let (refs, names) = (&self.options.refs, &found.info.files);
        self.check_files(found)?;
        let mut files: Vec<FileStorage> = Vec::with_capacity(names.len());
        match &found.data_file {
            Some(path) => files.push(FileStorage::open(path, &file_options)?),
            None => {
                for name in names {
                    let referred =
                        reference::open(&found.namer, Role::Data, name, refs, &file_options)?;
                    files.push(referred.storage);
                }
            }
        }
        files
            .into_iter()
            .map(|file| {
                self.note(&file, &found.path)?;
                Ok(Arc::new(file) as Arc<dyn Storage>)
            })
            .collect()
    }

    fn check_files(&self, found: &Found) -> Result<()> {
        let (named, limit) = (found.info.files.len(), self.options.limits.files_max);
        if named > limit {
            let (file, what) = (found.path.display().to_string(), "number of files with its data");
            return Err(Error::limit(&file, what, named as u64, limit as u64));
        }
        let Some(given) = &found.data_file else { return Ok(()) };
        let fault = match named {
            0 if !found.info.data_file_unnamed => format!(
                "holds its own data, but '{}' was given as its data file: leave it out",
                given.display()
            ),
            0 | 1 => return Ok(()),
            _ => format!("has its data in {named} files, and only one file can be named instead"),
        };
        Err(Error::invalid_for(&found.path.display(), fault))
    }

    /// How the files of the next image are opened for reading.
    fn file_options(&self, given: Option<&BackingImage>) -> FileOptions {
        let OpenOptions { cache, lock, backing_cache, backing_lock, .. } = *self.options;
        let beneath = self.depth > 0;
        let cache = backing_cache.filter(|_| beneath).unwrap_or(cache);
        let lock = backing_lock.filter(|_| beneath).unwrap_or(lock);
        let lock = given.and_then(|image| image.lock).unwrap_or(lock);
        let lock = if lock { LockMode::Auto } else { LockMode::Off };
        FileOptions::default().cache(cache).lock(lock)
    }

    fn check_depth(&self, file: &str) -> Result<()> {
        let (found, limit) = (self.depth as u64 + 1, self.options.limits.chain_depth_max as u64);
        require_within(file, "length of the backing chain", found, limit)
    }

    /// Records a file of the chain; each may occur once.
    fn note(&mut self, storage: &FileStorage, path: &Path) -> Result<()> {
        let identity = Identity::of(storage)?;
        if self.seen.contains(&identity) {
            return Err(Error::corrupt(
                &path.display().to_string(),
                0,
                "backing chain",
                format!("'{}', which is in the chain already", storage.name()),
                "each file once",
            ));
        }
        self.seen.push(identity);
        Ok(())
    }

    fn backing_driver(&self, path: &Path, format: &str) -> Result<&'static dyn FormatDriver> {
        self.registry.find(format).ok_or_else(|| {
            Error::unsupported(
                &path.display().to_string(),
                format!("its overlay says that its format is '{format}', which is not known"),
                format!("known: {}", self.registry.names()),
            )
        })
    }
}

/// Rejects a user-supplied image with an unexpected identity.
fn check_given(path: &Path, expected: Option<String>, found: &ImageInfo) -> Result<()> {
    match (expected, &found.identity) {
        (Some(expected), Some(found)) if !is_one_of(found, &expected) => Err(Error::invalid_for(
            &path.display(),
            format!(
                "is the disk {found}, and {expected} is wanted: it was changed since, or another \
             file is the right one"
            ),
        )),
        _ => Ok(()),
    }
}

/// Whether an identity is the expected one, or one of several (a VHDX may record two).
fn is_one_of(found: &str, expected: &str) -> bool {
    expected.split(" or ").any(|one| one == found)
}

/// Rejects a backing image whose identity is not the one that `overlay` records.
fn check_identity(
    overlay: &Namer,
    backing: BackingRef,
    path: &Path,
    found: &ImageInfo,
) -> Result<()> {
    match (backing.identity, &found.identity) {
        (Some(expected), Some(found)) if !is_one_of(found, &expected) => Err(Error::Parent {
            file: overlay.name().to_owned(),
            parent: path.display().to_string(),
            name: backing.name,
            expected,
            found: found.clone(),
        }),
        _ => Ok(()),
    }
}

/// One image with its files open but not its map, for checks and repairs.
#[derive(Debug)]
pub struct OpenedImage {
    /// The file with the metadata.
    pub storage: Arc<dyn Storage>,
    /// The other files with its guest data, in the order of [`ImageInfo::files`].
    pub files: Vec<Arc<dyn Storage>>,
    /// The format's driver.
    pub driver: &'static dyn FormatDriver,
    /// The image's metadata.
    pub info: ImageInfo,
}

impl OpenedImage {
    /// The image for its driver's check or compaction.
    pub fn offline<'a>(&'a self, limits: Limits, monitor: &Monitor<'a>) -> OfflineImage<'a> {
        let (storage, files, monitor) = (&self.storage, &*self.files, monitor.clone());
        OfflineImage { storage, files, limits, monitor }
    }
}

/// Opens an image's own files, without its backing chain.
///
/// # Errors
/// As [`crate::Disk::open`].
pub fn open_image(
    registry: &Registry,
    path: impl AsRef<Path>,
    options: &OpenOptions,
) -> Result<OpenedImage> {
    let mut walk = Walk::new(registry, path.as_ref(), options);
    let Some(found) = walk.step()? else {
        return Err(Error::invalid_for(&path.as_ref().display(), "is no image"));
    };
    if options.writable {
        found.check_written_as_probed()?;
    }
    let files = walk.open_files(&found, options.writable)?;
    Ok(OpenedImage { storage: found.storage, files, driver: found.driver, info: found.info })
}

/// Host attributes of an image's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostInfo {
    /// Length in bytes.
    pub file_bytes: u64,
    /// Allocated bytes of host space.
    pub allocated_bytes: u64,
    /// A block device.
    pub device: bool,
    /// Modification time in seconds since 1970; `None` for a device.
    pub modified: Option<u64>,
}

impl HostInfo {
    fn of(storage: &dyn Storage) -> Result<Self> {
        let (caps, fd) = (storage.caps(), storage.as_fd());
        let stat = fd.filter(|_| !caps.device).and_then(|fd| rustix::fs::fstat(fd).ok());
        Ok(Self {
            file_bytes: storage.len()?,
            allocated_bytes: storage.allocated_bytes()?,
            device: caps.device,
            modified: stat.and_then(|stat| u64::try_from(stat.st_mtime).ok()),
        })
    }
}

/// A parent file was modified (or copied) after the child image recorded its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedParent {
    /// The recorded time, and its location.
    pub noted: NotedTime,
    /// The parent's modification time in seconds since 1970.
    pub modified: u64,
    /// The parent.
    pub parent: PathBuf,
}

impl fmt::Display for ChangedParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NotedTime { seconds, field, .. } = self.noted;
        write!(
            f,
            "{field} is {seconds} (in seconds since 1970), expected {}, when {} was last changed: other \
             programs may refuse the pair. If the parent was only copied or touched, storing the same \
             reference again records the new time",
            self.modified,
            self.parent.display()
        )
    }
}

impl ChangedParent {
    /// Whether the parent's modification time differs from the one that `image` records.
    pub fn between(image: &ChainLink, parent: &ChainLink) -> Option<Self> {
        let noted = image.info.backing_time?;
        let modified = parent.host.modified.filter(|modified| *modified != noted.seconds)?;
        Some(Self { noted, modified, parent: parent.path.clone() })
    }
}

/// Whether an image's parent was modified since, judging by the recorded time. `None` if not, if the
/// format records no time, or if the parent cannot be opened.
pub fn changed_parent(
    registry: &Registry,
    path: impl AsRef<Path>,
    options: &OpenOptions,
) -> Option<ChangedParent> {
    let options = OpenOptions { writable: false, lock: false, ..options.clone() };
    let mut walk = Walk::new(registry, path.as_ref(), &options);
    let image = describe(walk.step().ok()??).ok()?;
    image.info.backing_time?;
    ChangedParent::between(&image, &describe(walk.step().ok()??).ok()?)
}

/// Description of one image of a chain.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ChainLink {
    /// The path by which it was opened: the user's own, or the overlay's reference joined to the
    /// overlay's folder.
    pub path: PathBuf,
    /// The image's metadata.
    pub info: ImageInfo,
    /// Its format was probed.
    pub probed: bool,
    /// Host attributes of its file.
    pub host: HostInfo,
}

/// A chain, as far as it can be followed.
#[derive(Debug)]
#[non_exhaustive]
pub struct ChainReport {
    /// The images, top first; never empty.
    pub links: Vec<ChainLink>,
    /// Why the last image's backing image could not be described, if it has one.
    pub broken: Option<Error>,
}

impl ChainReport {
    /// Refuses a chain of which no image is encrypted, for callers that have a key: who gives one
    /// expects that what is written is encrypted.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the name of the top image.
    pub fn expect_encrypted(&self) -> Result<()> {
        let encrypted = |link: &ChainLink| link.info.encryption.is_some();
        if self.broken.is_some() || self.links.iter().any(encrypted) {
            return Ok(());
        }
        Err(Error::invalid_for(&self.links[0].path.display(), "is not encrypted, and has no key"))
    }
}

/// Describes an image and its backing chain, reading headers only. Data files are not opened. With
/// [`BackingChoice::Ignore`] it opens no other file at all.
///
/// # Errors
/// Errors of opening and describing the top image. A chain that breaks further down is a result,
/// see [`ChainReport::broken`].
pub fn describe_chain(
    registry: &Registry,
    path: impl AsRef<Path>,
    options: &OpenOptions,
) -> Result<ChainReport> {
    let mut walk = Walk::new(registry, path.as_ref(), options);
    let mut report = ChainReport { links: Vec::new(), broken: None };
    loop {
        match walk.step().and_then(|found| found.map(describe).transpose()) {
            Ok(Some(link)) => report.links.push(link),
            Ok(None) => return Ok(report),
            Err(error) if report.links.is_empty() => return Err(error),
            Err(error) => {
                report.broken = Some(error);
                return Ok(report);
            }
        }
    }
}

fn describe(found: Found) -> Result<ChainLink> {
    let host = HostInfo::of(&*found.storage)?;
    Ok(ChainLink { path: found.path, info: found.info, probed: found.probed, host })
}
