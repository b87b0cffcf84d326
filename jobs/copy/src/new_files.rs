//! A new image and its other files, which are renamed into place together.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vdkit_block::{
    CancelToken, Error, FormatDriver, Limits, Monitor, Options, RefPolicy, Result, Storage,
};
use vdkit_chain::Registry;
use vdkit_storage::{CommitOptions, FileOptions, FileStorage, PendingFile, PendingRemoval};

use vdkit_tree::{dependents, describe};

/// Arguments for the other files of a new image.
pub(crate) struct WantedFiles<'a> {
    pub(crate) registry: &'a Registry,
    pub(crate) driver: &'a dyn FormatDriver,
    /// The image.
    pub(crate) path: &'a Path,
    pub(crate) guest_bytes: u64,
    /// The format's options.
    pub(crate) options: &'a Options,
    /// Options for opening the files.
    pub(crate) file: &'a FileOptions,
    /// Existing files may be replaced.
    pub(crate) replace: bool,
}

/// The other files of an image being created, under hidden names.
#[derive(Debug)]
pub(crate) struct NewFiles {
    files: Vec<PendingFile>,
    /// Files of the replaced image that the new one does not use.
    leftovers: Vec<PendingRemoval>,
}

impl NewFiles {
    /// Creates the files that the format needs beside the image, which may not be emptied before: its
    /// old bytes say which files are its own. An existing file is replaced only
    /// if that is allowed and either an option names it or the replaced image does: another file
    /// that happens to match the format's naming must stay.
    ///
    /// # Errors
    /// [`Error::Locked`] if a file to be replaced or removed is in use (as a source of this
    /// conversion is); [`Error::Invalid`] for unavailable names; errors of the storages.
    pub(crate) fn create(wanted: &WantedFiles<'_>, cancel: &CancelToken) -> Result<Self> {
        let WantedFiles { registry, driver, path, guest_bytes, options, replace, .. } = *wanted;
        let image = path.file_name().unwrap_or_default().to_string_lossy();
        let names = driver.require_creation(&path.display().to_string())?.new_files(
            &image,
            guest_bytes,
            options,
        )?;
        let limit = Limits::default().files_max;
        if names.len() > limit {
            return Err(Error::invalid_for(
                &path.display(),
                format!(
                    "would have its data in {} files, more than the limit of {limit}",
                    names.len()
                ),
            ));
        }
        let old = if replace { files_of(registry, path) } else { Vec::new() };
        let own: BTreeSet<_> = old.iter().map(|name| real_name(&beside(path, name))).collect();
        let named = |name: &str| options.text("data_file") == Some(name);
        let mut taken = BTreeSet::from([real_name(path)]);
        let mut files = Vec::with_capacity(names.len());
        for name in names {
            cancel.check()?;
            let target = beside(path, &name);
            refuse_protocol_name(path, &name)?;
            let may = replace && (named(&name) || own.contains(&real_name(&target)));
            if !may && target.metadata().is_ok_and(|found| found.len() > 0) {
                return Err(Error::invalid_for(
                    &target.display(),
                    "is there already, and the new image needs this name for its data; move \
                     it away, or choose another name for the image",
                ));
            }
            if !taken.insert(real_name(&target)) {
                return Err(Error::invalid_for(
                    &target.display(),
                    "the new image would need this name twice; choose another name for one",
                ));
            }
            files.push(PendingFile::prepare(&target, wanted.file)?);
        }
        let theirs = old.iter().filter(|name| named_after(path, name)).map(|n| beside(path, n));
        let leftovers: Vec<_> = theirs.filter(|path| !taken.contains(&real_name(path))).collect();
        let leftovers = removals(wanted, leftovers, cancel)?;
        files.iter_mut().try_for_each(PendingFile::make_empty)?;
        Ok(Self { files, leftovers })
    }

    /// Their storages, in the order of the image's metadata.
    pub(crate) fn storages(&self) -> impl Iterator<Item = &Arc<FileStorage>> {
        self.files.iter().map(PendingFile::storage)
    }

    /// Whether one of them replaces an existing file.
    pub(crate) fn replaces(&self) -> bool {
        self.files.iter().any(PendingFile::replaces)
    }

    /// Renames them into place, and then the image: an image without its files would be broken. If
    /// one fails, renamed files that replaced nothing are removed again. Cancellation is possible
    /// until the first rename. Files used only by the replaced image are removed at the end.
    /// Returns the files that did not exist before.
    pub(crate) fn commit(
        self,
        image: Option<PendingFile>,
        options: CommitOptions,
        cancel: &CancelToken,
    ) -> Result<Vec<PathBuf>> {
        cancel.check()?;
        // The slow step comes first.
        for file in self.files.iter().filter(|_| options.sync_file) {
            cancel.check()?;
            file.storage().sync_always()?;
        }
        let folder = image.as_ref().and_then(|image| image.target().parent().map(Path::to_owned));
        let mut placed: Vec<PathBuf> = Vec::new();
        let files = self.files.into_iter().map(|file| (file, false));
        for (file, is_image) in files.chain(image.map(|image| (image, true))) {
            let (target, replaces) = (file.target().to_owned(), file.replaces());
            // The image comes last, and makes all names in its folder durable.
            let later = !is_image && folder.as_deref() == file.target().parent();
            let options = CommitOptions { sync_folder: options.sync_folder && !later, ..options };
            let storage = file.storage().clone();
            let committed = file.commit(options);
            // If only its folder could not be synced, the file has its name.
            let named = committed.is_ok() || same_file(&storage, &target);
            placed.extend(Some(target).filter(|_| named && !replaces));
            if let Err(error) = committed {
                // An image that has replaced another one needs its files.
                let needed = is_image && named && replaces;
                for path in placed.iter().filter(|_| !needed) {
                    // Report the first error.
                    let _ = std::fs::remove_file(path);
                }
                return Err(error);
            }
        }
        for file in self.leftovers {
            // The new image is complete; a left-over file is no failure.
            let _ = file.remove();
        }
        Ok(placed)
    }
}

/// Locks the files used only by the replaced image. None is removed if another image depends on
/// one.
fn removals(
    wanted: &WantedFiles<'_>,
    leftovers: Vec<PathBuf>,
    cancel: &CancelToken,
) -> Result<Vec<PendingRemoval>> {
    if leftovers.is_empty() {
        return Ok(Vec::new());
    }
    let monitor = Monitor::default().cancelled_by(cancel.clone());
    let image = [wanted.path.to_owned()];
    let standing = dependents(wanted.registry, &leftovers, &image, &monitor)?;
    let lock = wanted.file.lock;
    let locked =
        leftovers.iter().filter_map(|path| PendingRemoval::prepare(path, lock).transpose());
    let locked = locked.collect::<Result<Vec<_>>>()?;
    // Not all were looked at if there are very many.
    let unneeded = standing.overlays.is_empty() && !standing.incomplete;
    Ok(if unneeded { locked } else { Vec::new() })
}

/// The image at a path, last, preceded by the files removed when it is replaced: those that it
/// refers to and that are named after it.
pub fn replaced_files(registry: &Registry, image: &Path) -> Vec<PathBuf> {
    let names = files_of(registry, image);
    let named = names.iter().filter(|name| named_after(image, name)).map(|n| beside(image, n));
    named.chain([image.to_owned()]).collect()
}

/// Whether a referenced file is named after the image, in the same folder, as formats name the
/// files that they create: `disk-s001.vmdk` of `disk.vmdk`. An untrusted image may refer to any
/// file, which must not be removed with it.
fn named_after(image: &Path, name: &str) -> bool {
    let text = |part: Option<&OsStr>| part.and_then(OsStr::to_str).unwrap_or_default().to_owned();
    let (stem, ending) = (text(image.file_stem()), text(image.extension()));
    let ending = if ending.is_empty() { String::new() } else { format!(".{ending}") };
    let middle = name.strip_prefix(&stem).and_then(|rest| rest.strip_suffix(&ending));
    let digits = |text: &str| text.len() >= 3 && text.bytes().all(|byte| byte.is_ascii_digit());
    match middle.and_then(|middle| middle.strip_prefix('-')) {
        Some("flat") => !stem.is_empty(),
        Some(part) => !stem.is_empty() && (part.strip_prefix(['s', 'f']).is_some_and(digits)),
        None => false,
    }
}

/// Refuses the name of a data file that looks like a protocol: it could never be opened again.
///
/// # Errors
/// [`Error::Invalid`], with the image.
pub fn refuse_protocol_name(image: &Path, name: &str) -> Result<()> {
    match name.split_once(':') {
        Some((before, _)) if !before.contains('/') => Err(Error::invalid_for(
            &image.display(),
            format!(
                "its data would be in '{name}', and what stands before a colon in an image's \
             metadata is taken for a protocol; choose a name without a colon"
            ),
        )),
        _ => Ok(()),
    }
}

/// The files that an existing image refers to; empty if it cannot be read.
fn files_of(registry: &Registry, image: &Path) -> Vec<String> {
    let described = describe(registry, image, &RefPolicy::default());
    described.map(|link| link.info.files).unwrap_or_default()
}

/// The path of a name in an image's metadata, relative to the image's folder.
pub(crate) fn beside(image: &Path, name: &str) -> PathBuf {
    match image.parent() {
        Some(folder) => folder.join(name),
        None => PathBuf::from(name),
    }
}

/// Whether a path leads to this file.
fn same_file(file: &FileStorage, path: &Path) -> bool {
    let own = file.as_fd().and_then(|fd| rustix::fs::fstat(fd).ok());
    let named = rustix::fs::lstat(path).ok();
    own.zip(named).is_some_and(|(a, b)| (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino))
}

/// A canonical path for comparing names; the file need not exist.
fn real_name(path: &Path) -> PathBuf {
    if let Ok(real) = path.canonicalize() {
        return real;
    }
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    folder.join(path.file_name().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use vdkit_qcow2::Qcow2Driver;

    use vdkit_block::Creation;

    use super::*;

    fn options(text: &str) -> Options {
        Options::parse("qcow2", Qcow2Driver.options(), [text]).unwrap()
    }

    fn make(image: &Path, text: &str, replace: bool) -> Result<NewFiles> {
        let wanted = WantedFiles {
            registry: &Registry::new([&Qcow2Driver as &'static dyn FormatDriver]),
            driver: &Qcow2Driver,
            path: image,
            guest_bytes: 1 << 20,
            options: &options(text),
            file: &FileOptions::read_write(),
            replace,
        };
        NewFiles::create(&wanted, &CancelToken::default())
    }

    #[test]
    fn files_that_are_called_after_an_image() {
        let image = Path::new("sub/disk.vmdk");
        for name in ["disk-s001.vmdk", "disk-f1234.vmdk", "disk-flat.vmdk"] {
            assert!(named_after(image, name), "{name}");
        }
        for name in [
            "disk.vmdk",
            "disk-s01.vmdk",
            "disk-x001.vmdk",
            "disk-s001.raw",
            "../disk-s001.vmdk",
            "sub/disk-s001.vmdk",
            "/etc/passwd",
            "other-s001.vmdk",
            "disk-s00a.vmdk",
            "disk-backup-flat.vmdk",
        ] {
            assert!(!named_after(image, name), "{name}");
        }
        assert!(!named_after(Path::new(".vmdk"), "-flat"));
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        let mut names: Vec<_> =
            entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn files_that_got_their_names_are_removed_where_the_image_cannot_get_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        let files = make(&image, "data_file=data", false).unwrap();
        let pending = PendingFile::create(&image, &FileOptions::read_write()).unwrap();
        // Another program takes the name meanwhile.
        std::fs::write(&image, b"theirs").unwrap();
        files.commit(Some(pending), CommitOptions::default(), &CancelToken::default()).unwrap_err();
        assert_eq!(names(folder.path()), ["image"]);
        assert_eq!(std::fs::read(&image).unwrap(), b"theirs");
    }

    #[test]
    fn a_name_is_needed_once_and_replaced_only_where_that_was_said() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        let error = make(&image, "data_file=./image", true).unwrap_err().to_string();
        assert!(error.contains("twice"), "{error}");
        std::fs::write(folder.path().join("data"), b"x").unwrap();
        let error = make(&image, "data_file=data", false).unwrap_err().to_string();
        assert!(error.contains("there already"), "{error}");
        make(&image, "data_file=data", true).unwrap();
        let error = make(&image, "data_file=nbd:x", true).unwrap_err().to_string();
        assert!(error.contains("colon"), "{error}");
        assert_eq!(names(folder.path()), ["data"]);
    }
}
