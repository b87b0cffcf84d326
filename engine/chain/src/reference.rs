//! Opens references in image metadata, within the policy and race-free.
//!
//! A reference is first opened with `O_PATH`, which follows links but has no side effects (it does
//! not block on a pipe or rewind a tape). `/proc/self/fd` then gives the real path, which is
//! checked. The same descriptor is reopened for use, so swapping a link in between changes nothing.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
use vdkit_block::{Error, IoAction, RefPolicy, Refusal, Remedy, Result};
use vdkit_storage::{FileOptions, FileStorage, LockMode, open_current};

/// Role of a reference, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Backing,
    Data,
}

impl Role {
    fn noun(self) -> &'static str {
        match self {
            Self::Backing => "backing file",
            Self::Data => "data file",
        }
    }

    /// Hint for a missing file.
    fn remedy(self, namer: &str) -> Remedy {
        match self {
            Self::Backing => {
                Remedy::StoreReference { overlay: namer.to_owned(), backing: None, format: None }
            }
            Self::Data => "put it back, or name the right one".into(),
        }
    }
}

/// An image that may hold references.
#[derive(Clone, Debug)]
pub(crate) struct Namer {
    /// Its name, for messages.
    name: String,
    /// Base of relative names; empty for the current folder.
    folder: PathBuf,
    /// Its own folder, resolved: by its name and by its real location.
    own: Vec<PathBuf>,
}

impl Namer {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// An image without a folder: a stream, or a member of an archive. Its references must be in
    /// folders that the user allows; relative names start in the current folder.
    pub(crate) fn nowhere(name: &str) -> Self {
        Self { name: name.to_owned(), folder: PathBuf::new(), own: Vec::new() }
    }

    /// An image that the user named.
    pub(crate) fn of_user_path(path: &Path) -> Self {
        let folder = folder_of(path);
        let mut own: Vec<_> = without_links(&folder).into_iter().collect();
        let real = std::fs::canonicalize(path).ok();
        own.extend(real.as_deref().and_then(Path::parent).map(Path::to_owned));
        Self { name: path.display().to_string(), folder, own }
    }

    fn refusal(&self, target: &str, reason: &str, remedy: Remedy) -> Error {
        Error::Refused(Box::new(Refusal {
            file: self.name.clone(),
            target: target.to_owned(),
            reason: reason.to_owned(),
            remedy,
        }))
    }
}

/// The folder of a path; empty for the current one.
fn folder_of(path: &Path) -> PathBuf {
    path.parent().map(Path::to_owned).unwrap_or_default()
}

/// A folder's real path.
fn without_links(folder: &Path) -> io::Result<PathBuf> {
    if folder.as_os_str().is_empty() { std::env::current_dir() } else { folder.canonicalize() }
}

/// An opened reference.
#[derive(Debug)]
pub(crate) struct Referred {
    pub(crate) path: PathBuf,
    pub(crate) storage: FileStorage,
    pub(crate) namer: Namer,
}

/// Opens `target`, a reference in `namer`'s metadata.
///
/// # Errors
/// [`Error::Refused`] if the policy forbids it; [`Error::File`] if it cannot be opened.
pub(crate) fn open(
    namer: &Namer,
    role: Role,
    target: &str,
    policy: &RefPolicy,
    options: &FileOptions,
) -> Result<Referred> {
    let refuse = |reason: &str, remedy| Err(namer.refusal(target, reason, remedy));
    if let Some(prefix) = protocol_of(target) {
        return refuse(
            &format!("a {} is only ever a plain file name, not '{prefix}:'", role.noun()),
            "rebase the image onto a file name (a name with a colon is written './a:b')".into(),
        );
    }
    if *policy == RefPolicy::Nothing {
        return refuse("references are switched off", Remedy::FollowReferences);
    }
    if let RefPolicy::Ask(judge) = policy
        && !judge.allows(&namer.name, target)
    {
        return refuse("the program does not allow it", "name the file itself".into());
    }
    let path = namer.folder.join(target);
    open_current(
        || open_allowed(namer, role, target, policy, options, &path),
        |found| options.lock == LockMode::Off || found.storage.is_at(&path),
    )
}

/// Opens the file of a reference, if it is where the policy allows it.
fn open_allowed(
    namer: &Namer,
    role: Role,
    target: &str,
    policy: &RefPolicy,
    options: &FileOptions,
    path: &Path,
) -> Result<Referred> {
    let refuse = |reason: &str, remedy| Err(namer.refusal(target, reason, remedy));
    let checked = match open_path(path) {
        Ok(fd) => fd,
        Err(error) => {
            // Do not reveal whether a file exists elsewhere.
            if !may_be_beneath(path, namer, policy)? {
                return refuse(OUTSIDE, Remedy::AllowFolder(folder_of(path)));
            }
            return Err(unreachable_error(namer, role, path, error));
        }
    };
    let name = path.display().to_string();
    let fail = |source: io::Error| Error::file_io(&name, IoAction::Open, source);
    let real = std::fs::read_link(proc_path(&checked)).map_err(fail)?;
    let stat = rustix::fs::fstat(&checked).map_err(|errno| fail(errno.into()))?;
    let device = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => false,
        FileType::BlockDevice => true,
        _ => {
            return refuse(
                "it is neither a regular file nor a block device",
                "rebase the image onto an image file".into(),
            );
        }
    };
    // Devices never count as "own folder": an image in /dev would otherwise reach all of them.
    let own = !device && namer.own.iter().any(|root| is_in_own_folder(&real, root));
    if !own && !is_beneath_any(&real, &folders(policy)?) {
        let reason = if device { "it is a device" } else { OUTSIDE };
        return refuse(reason, Remedy::AllowFolder(folder_of(&real)));
    }
    let file = open_again(&checked, device, options).map_err(fail)?;
    let mut storage = FileStorage::from_file(file, name, options)?;
    if device && options.writable && options.lock == LockMode::Auto {
        storage = storage.claiming();
    }
    let namer = namer_at(path, &real, namer, policy)?;
    Ok(Referred { path: path.to_owned(), storage, namer })
}

/// The [`Namer`] for a file that `namer` referred to. `real` is the file's real path.
fn namer_at(path: &Path, real: &Path, namer: &Namer, policy: &RefPolicy) -> Result<Namer> {
    let mut own: Vec<_> = real.parent().map(Path::to_owned).into_iter().collect();
    // The folder of the name counts only if the namer could have reached it anyway. Otherwise a
    // link elsewhere that leads back here would widen what is allowed.
    let folder = folder_of(path);
    if let Ok(named) = without_links(&folder)
        && (namer.own.iter().any(|root| named.starts_with(root) && root != Path::new("/"))
            || is_beneath_any(&named, &folders(policy)?))
    {
        own.push(named);
    }
    Ok(Namer { name: path.display().to_string(), folder, own })
}

const OUTSIDE: &str = "it lies outside the image's own folder";

/// The prefix that QEMU takes for a protocol: before a colon that precedes any slash.
pub(crate) fn protocol_of(name: &str) -> Option<&str> {
    let end = name.find([':', '/'])?;
    name[end..].starts_with(':').then(|| &name[..end])
}

fn open_path(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

fn proc_path(fd: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// Reopens the checked descriptor, independent of its name.
fn open_again(fd: &OwnedFd, device: bool, options: &FileOptions) -> io::Result<File> {
    let mut flags = OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    flags |= if options.writable { OFlags::RDWR } else { OFlags::RDONLY };
    if device && options.writable && options.lock == LockMode::Auto {
        // Fails while the device is mounted or part of a volume.
        flags |= OFlags::EXCL;
    }
    Ok(File::from(rustix::fs::open(proc_path(fd), flags, Mode::empty())?))
}

/// The allowed folders, resolved.
fn folders(policy: &RefPolicy) -> Result<Vec<PathBuf>> {
    let folders = match policy {
        RefPolicy::Folders(folders) => folders.as_slice(),
        // The program was asked about the name itself.
        RefPolicy::Ask(_) => return Ok(vec![PathBuf::from("/")]),
        _ => &[],
    };
    folders
        .iter()
        .map(|folder| {
            std::fs::canonicalize(folder).map_err(|source| {
                Error::file_io(&folder.display().to_string(), IoAction::Open, source)
            })
        })
        .collect()
}

fn is_beneath_any(real: &Path, folders: &[PathBuf]) -> bool {
    folders.iter().any(|folder| real.starts_with(folder))
}

/// For an image in `/`, only files directly in `/` count as its own folder.
fn is_in_own_folder(real: &Path, root: &Path) -> bool {
    if root == Path::new("/") { real.parent() == Some(root) } else { real.starts_with(root) }
}

/// Whether an unopenable path would be allowed, judging by its folder.
fn may_be_beneath(path: &Path, namer: &Namer, policy: &RefPolicy) -> Result<bool> {
    // The nearest existing ancestor.
    let existing = path.ancestors().skip(1).find_map(|folder| without_links(folder).ok());
    let Some(real) = existing else { return Ok(false) };
    let own = namer.own.iter().any(|root| is_in_own_folder(&real.join("x"), root));
    Ok(own || is_beneath_any(&real, &folders(policy)?))
}

fn unreachable_error(namer: &Namer, role: Role, path: &Path, error: io::Error) -> Error {
    Error::Reference {
        file: path.display().to_string(),
        namer: namer.name.clone(),
        role: role.noun(),
        source: error,
        remedy: Box::new(role.remedy(&namer.name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_colon_before_any_slash_is_a_protocol() {
        for name in ["json:{\"driver\":\"null-co\"}", "nbd://host/x", "http://h/x", "nbd:unix:/s"] {
            assert!(protocol_of(name).is_some(), "{name}");
        }
        assert_eq!(protocol_of("file:x"), Some("file"));
        assert_eq!(protocol_of(":x"), Some(""));
        for name in ["base.qcow2", "./a:b", "/images/a:b.qcow2", "..", ""] {
            assert!(protocol_of(name).is_none(), "{name}");
        }
    }

    #[test]
    fn the_root_folder_holds_only_its_own_files() {
        assert!(is_in_own_folder(Path::new("/base.raw"), Path::new("/")));
        assert!(!is_in_own_folder(Path::new("/etc/shadow"), Path::new("/")));
        assert!(is_in_own_folder(Path::new("/a/b/c"), Path::new("/a")));
        assert!(!is_in_own_folder(Path::new("/ab/c"), Path::new("/a")));
    }
}
