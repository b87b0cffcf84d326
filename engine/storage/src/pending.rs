//! A file that gets its name only when it is finished.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};
use vdkit_block::{CacheMode, Error, IoAction, OwnerProcess, Result, Storage};

use crate::access;
use crate::file::{FileStorage, is_at, open_current};
use crate::held::{Change, refuse_attached};
use crate::in_place;
use crate::links::{self, Followed};
use crate::lock::{ImageLock, LockMode};
use crate::open::{CreateMode, FileKind, FileOptions, kind_of_file};

/// The maximum file name on all file systems.
const NAME_BYTES_MAX: usize = 255;

/// Durability of [`PendingFile::commit`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommitOptions {
    /// Sync the file's bytes before the rename, also in cache mode unsafe. In other modes this is
    /// always done if another file is replaced: a crash must leave the old file or the new one,
    /// never an empty one.
    pub sync_file: bool,
    /// Make the name durable by syncing the folder after the rename.
    pub sync_folder: bool,
}

/// A new file under a hidden name beside its target. [`PendingFile::commit`] renames it into place.
/// Dropping it removes it and leaves an existing target unchanged.
///
/// A file to be replaced is locked meanwhile as by a writer, so that a running guest does not lose
/// its disk. The new file gets its owner, mode, access control list and extended attributes, and is
/// private until then.
///
/// A target that is an open descriptor (`/proc/self/fd/3`) is written in place: what its holder
/// reads is the open file, not its name. So are other targets where
/// [`FileOptions::in_place_if_needed`] says so. Such a file is emptied first, and again if this is
/// dropped without a commit: a half-made file must not be taken for a whole one.
#[derive(Debug)]
pub struct PendingFile {
    target: PathBuf,
    /// The target itself if it is written in place.
    temporary: PathBuf,
    in_place: bool,
    /// Its old bytes are gone.
    emptied: bool,
    /// If it cannot take the target's name, the target gets its bytes.
    may_write_back: bool,
    storage: Arc<FileStorage>,
    replaced: Option<Replaced>,
    committed: bool,
    owner: OwnerProcess,
}

/// The existing file.
#[derive(Debug)]
pub(crate) struct Replaced {
    pub(crate) file: File,
    /// Its name leads to it. Some network file systems have no stable inode numbers to tell that by.
    named: bool,
    lock: Option<ImageLock>,
}

impl Replaced {
    fn release(&mut self) {
        if let Some(lock) = self.lock.take() {
            lock.release(&self.file);
        }
    }
}

impl Drop for Replaced {
    fn drop(&mut self) {
        self.release();
    }
}

impl PendingFile {
    /// Creates the hidden file. `options` say how to open it; it is always new and writable. One that
    /// is written in place is empty then.
    ///
    /// # Errors
    /// As [`PendingFile::prepare`].
    pub fn create(target: impl AsRef<Path>, options: &FileOptions) -> Result<Self> {
        let mut pending = Self::prepare(target, options)?;
        pending.make_empty()?;
        Ok(pending)
    }

    /// As [`PendingFile::create`], but a file that is written in place keeps its bytes until
    /// [`PendingFile::make_empty`], for what can still fail without harm.
    ///
    /// # Errors
    /// [`Error::Locked`] if the file to be replaced is in use; [`Error::Unsupported`] if the target
    /// is no regular file; [`Error::File`] for system errors.
    pub fn prepare(target: impl AsRef<Path>, options: &FileOptions) -> Result<Self> {
        let Followed { path: target, descriptor } = real_target(target.as_ref(), options)?;
        let may = options.in_place_if_needed;
        let mut replaced = Replaced::open(&target, options.lock, descriptor)?;
        let at_once =
            replaced.take_if(|old| descriptor || may && in_place::is_needed(&old.file, &target));
        if let Some(old) = at_once {
            return Self::prepare_in_place(target, old, options);
        }
        // A descriptor opened once stays valid, so the replacement of a private file must be
        // private from the start.
        let create = if replaced.is_some() { CreateMode::Private } else { CreateMode::New };
        let beside = FileOptions { writable: true, create, ..*options };
        let (temporary, storage) = match (create_beside(&target, &beside), replaced.is_some()) {
            (Err(error), true) if may && in_place::is_barred(in_place::errno_of(&error)) => {
                let old = replaced.ok_or(error)?;
                return Self::prepare_in_place(target, old, options);
            }
            (created, _) => created?,
        };
        let pending = Self {
            target,
            temporary,
            in_place: false,
            emptied: false,
            may_write_back: may,
            storage: Arc::new(storage),
            replaced,
            committed: false,
            owner: OwnerProcess::current(),
        };
        if let Some(replaced) = &pending.replaced {
            let name = pending.target.display().to_string();
            access::pass_on(&replaced.file, pending.storage.file())
                .map_err(|errno| Error::file_io(&name, IoAction::Open, errno))?;
        }
        Ok(pending)
    }

    fn prepare_in_place(target: PathBuf, mut old: Replaced, options: &FileOptions) -> Result<Self> {
        // The storage takes the lock, which this one would be in the way of.
        old.release();
        let storage = Arc::new(in_place::open_found(&target, &old.file, options)?);
        Ok(Self {
            temporary: target.clone(),
            target,
            in_place: true,
            emptied: false,
            may_write_back: false,
            storage,
            replaced: Some(old),
            committed: false,
            owner: OwnerProcess::current(),
        })
    }

    /// Empties a file that is written in place. From now on it is emptied again if this is dropped.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn make_empty(&mut self) -> Result<()> {
        if self.in_place && !self.emptied {
            self.emptied = true;
            self.storage.set_len(0)?;
        }
        Ok(())
    }

    /// The storage. Clones may outlive the commit and then write to the finished file.
    pub fn storage(&self) -> &Arc<FileStorage> {
        &self.storage
    }

    /// The final path.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// The current path.
    pub fn temporary(&self) -> &Path {
        &self.temporary
    }

    /// Whether the target exists already.
    pub fn replaces(&self) -> bool {
        self.replaced.is_some()
    }

    /// Renames the file to its target, replacing an existing file. One that is written in place is
    /// finished already.
    ///
    /// # Errors
    /// [`Error::Busy`] if another file has taken the place of the one to be replaced;
    /// [`Error::File`]. The target is then unchanged, or empty if it is written in place, and the new
    /// file is removed. If only syncing the folder fails, the rename is done but a crash may undo it.
    pub fn commit(mut self, options: CommitOptions) -> Result<()> {
        let replaces = self.replaced.is_some() && self.storage.cache() != CacheMode::Unsafe;
        if options.sync_file || replaces {
            self.storage.sync_always()?;
        }
        if self.in_place {
            self.committed = true;
            return Ok(());
        }
        let fail =
            |errno| Error::file_io(&self.target.display().to_string(), IoAction::Rename, errno);
        match &self.replaced {
            Some(old) => match rustix::fs::lstat(&self.target) {
                // Not a file that took the place of the locked one: somebody may use it.
                found if !old.named || is_at(&old.file, found) => {
                    match rustix::fs::rename(&self.temporary, &self.target) {
                        Err(errno) if self.may_write_back && in_place::is_barred(Some(errno)) => {
                            // The hidden file is removed when this is dropped.
                            return in_place::write_back(&self.temporary, &self.target, &old.file);
                        }
                        renamed => renamed.map_err(fail)?,
                    }
                }
                Err(Errno::NOENT) => rename_new(&self.temporary, &self.target).map_err(fail)?,
                Err(errno) => return Err(fail(errno)),
                Ok(_) => return Err(in_place::taken(&self.target)),
            },
            None => rename_new(&self.temporary, &self.target).map_err(fail)?,
        }
        self.committed = true;
        if options.sync_folder {
            sync_folder(&self.target).map_err(fail)?;
        }
        Ok(())
    }
}

impl Drop for PendingFile {
    fn drop(&mut self) {
        if self.committed || !self.owner.is_current() {
            return;
        }
        let _ = match self.in_place {
            true if self.emptied => self.storage.set_len(0).map_err(drop),
            true => Ok(()),
            false => std::fs::remove_file(&self.temporary).map_err(drop),
        };
    }
}

impl Replaced {
    /// Locks a file as a writer does; `None` if there is no file. `descriptor`: the target is a link
    /// to an open file.
    pub(crate) fn open(target: &Path, lock: LockMode, descriptor: bool) -> Result<Option<Self>> {
        let current = |found: &Option<Self>| found.as_ref().is_none_or(|old| old.named);
        open_current(|| Self::open_once(target, lock, descriptor), current)
    }

    fn open_once(target: &Path, lock: LockMode, descriptor: bool) -> Result<Option<Self>> {
        let name = target.display().to_string();
        let mut flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        // Links were resolved before: refuse one that appeared since.
        flags.set(OFlags::NOFOLLOW, !descriptor);
        let file = match retry_on_intr(|| rustix::fs::open(target, flags, Mode::empty())) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(Error::file_io(&name, IoAction::Open, errno)),
        };
        if kind_of_file(&name, &file)? == FileKind::BlockDevice {
            return Err(Error::unsupported(
                &name,
                "a block device cannot be replaced by a file",
                "write into it instead",
            ));
        }
        let stat = rustix::fs::fstat(&file)
            .map_err(|errno| Error::file_io(&name, IoAction::Open, errno))?;
        links::check_owner(target, &stat)?;
        if lock == LockMode::Auto {
            refuse_attached(&name, &file, Change::Replace)?;
        }
        let lock = match lock {
            LockMode::Auto => Some(ImageLock::take(&name, &file, true)?),
            LockMode::Off => None,
        };
        let named = descriptor || is_at(&file, rustix::fs::lstat(target));
        Ok(Some(Self { file, named, lock }))
    }
}

/// The file that a name leads to: a symbolic link stays, and its target is replaced.
fn real_target(target: &Path, options: &FileOptions) -> Result<Followed> {
    if target.file_name().is_none() {
        return Err(Error::invalid(format!("'{}' does not name a file", target.display())));
    }
    let real = links::follow(target)?;
    if real.path != target && !options.in_place_if_needed && !real.path.exists() {
        return Err(Error::invalid(format!(
            "'{}' is a symbolic link to a file that is not there",
            target.display()
        )));
    }
    Ok(real)
}

/// Creates a file with an unused hidden name in the target's folder.
fn create_beside(target: &Path, options: &FileOptions) -> Result<(PathBuf, FileStorage)> {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let base = target.file_name().unwrap_or_default().as_bytes();
    loop {
        let count = COUNTER.fetch_add(1, Ordering::Relaxed);
        let suffix = format!(".{}-{count}.partial", std::process::id());
        let mut name = b".".to_vec();
        name.extend(&base[..base.len().min(NAME_BYTES_MAX - 1 - suffix.len())]);
        name.extend(suffix.as_bytes());
        let path = target.with_file_name(OsString::from_vec(name));
        match FileStorage::open(&path, options) {
            // Left behind by a killed process with our process id.
            Err(Error::File { source, .. })
                if source.kind() == std::io::ErrorKind::AlreadyExists => {}
            // The user knows the target's name, not this one.
            Err(Error::File { action, source, .. }) => {
                let action = if action == IoAction::Open { IoAction::Create } else { action };
                return Err(Error::file_io(&target.display().to_string(), action, source));
            }
            Err(other) => return Err(other),
            Ok(storage) => return Ok((path, storage.named(target.display().to_string()))),
        }
    }
}

/// The target name of an unfinished file, from its hidden name (shortened if very long); `None` for
/// other files.
pub fn unfinished_name(path: &Path) -> Option<OsString> {
    let name = path.file_name()?.as_bytes();
    let stem = name.strip_prefix(b".")?.strip_suffix(b".partial")?;
    let at = stem.iter().rposition(|byte| *byte == b'.').filter(|at| *at > 0)?;
    let maker = std::str::from_utf8(&stem[at + 1..]).ok()?;
    let (process, count) = maker.split_once('-')?;
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (number(process) && number(count)).then(|| OsString::from_vec(stem[..at].to_vec()))
}

/// Whether an unfinished file is abandoned: its creator holds it locked while alive, on whatever
/// machine.
pub fn is_abandoned(path: &Path) -> bool {
    unfinished_name(path).is_some() && FileStorage::open(path, &FileOptions::read_only()).is_ok()
}

/// Renames without replacing a file that appeared meanwhile.
fn rename_new(from: &Path, to: &Path) -> Result<(), Errno> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // Some file systems (NFS, older FUSE) do not support that.
        Err(Errno::INVAL | Errno::NOSYS) if !to.exists() => rustix::fs::rename(from, to),
        other => other,
    }
}

fn sync_folder(file: &Path) -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = retry_on_intr(|| rustix::fs::open(links::folder_of(file), flags, Mode::empty()))?;
    retry_on_intr(|| rustix::fs::fsync(&folder))
}
