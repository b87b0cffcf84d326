//! A new image and the other files that it names: they take their names together.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vdkit_block::{Error, FormatDriver, Limits, Options, Result, Storage};
use vdkit_chain::Registry;
use vdkit_storage::{CommitOptions, FileOptions, FileStorage, LockMode, PendingFile};

/// The other files of an image that is being made, under hidden names.
#[derive(Debug)]
pub(crate) struct NewFiles {
    files: Vec<PendingFile>,
}

impl NewFiles {
    /// Makes the files that the format wants beside the image at `path`. One that is there already
    /// is replaced where `replace` says so, and only if the user named it by an option, or the image
    /// that is replaced does: a file that a format's naming happens to meet is somebody else's.
    pub(crate) fn create(
        registry: &Registry,
        driver: &dyn FormatDriver,
        path: &Path,
        guest_bytes: u64,
        format_options: &Options,
        options: &FileOptions,
        replace: bool,
    ) -> Result<Self> {
        let image = path.file_name().unwrap_or_default().to_string_lossy();
        let names = driver.new_files(&image, guest_bytes, format_options)?;
        let limit = Limits::default().files_max;
        if names.len() > limit {
            return Err(Error::Invalid(format!(
                "{}: would have its data in {} files, more than the limit of {limit}",
                path.display(),
                names.len()
            )));
        }
        let own = if replace { files_of(registry, path) } else { Vec::new() };
        let named = |name: &str| format_options.text("data_file") == Some(name);
        let mut taken = BTreeSet::from([real_name(path)]);
        let mut files = Vec::with_capacity(names.len());
        for name in names {
            let target = beside(path, &name);
            check_name(path, &name)?;
            let may = replace && (named(&name) || own.contains(&real_name(&target)));
            if !may && target.metadata().is_ok_and(|found| found.len() > 0) {
                return Err(Error::Invalid(format!(
                    "{}: is there already, and the new image needs this name for its data; move \
                     it away, or choose another name for the image",
                    target.display()
                )));
            }
            if !taken.insert(real_name(&target)) {
                return Err(Error::Invalid(format!(
                    "{}: the new image would need this name twice; choose another name for one",
                    target.display()
                )));
            }
            files.push(PendingFile::create(&target, options)?);
        }
        Ok(Self { files })
    }

    /// Their bytes, in the order in which the image names them.
    pub(crate) fn storages(&self) -> impl Iterator<Item = &Arc<FileStorage>> {
        self.files.iter().map(PendingFile::storage)
    }

    /// Gives them their names, and then the image its own: an image without its files would be
    /// broken. Where one cannot get it, those that did and replaced nothing are removed again.
    pub(crate) fn commit(self, image: Option<PendingFile>, options: CommitOptions) -> Result<()> {
        let mut placed: Vec<PathBuf> = Vec::new();
        for file in self.files.into_iter().chain(image) {
            let fresh = (!file.replaces()).then(|| file.target().to_owned());
            if let Err(error) = file.commit(options) {
                for path in placed {
                    // The first error is the one that tells.
                    let _ = std::fs::remove_file(path);
                }
                return Err(error);
            }
            placed.extend(fresh);
        }
        Ok(())
    }
}

/// A name that is like a protocol's would never be opened again.
fn check_name(image: &Path, name: &str) -> Result<()> {
    match name.split_once(':') {
        Some((before, _)) if !before.contains('/') => Err(Error::Invalid(format!(
            "{}: its data would be in '{name}', and what stands before a colon in an image's \
             metadata is taken for a protocol; choose a name without a colon",
            image.display()
        ))),
        _ => Ok(()),
    }
}

/// The files that the image at a path names, as far as there is one that can be understood.
fn files_of(registry: &Registry, image: &Path) -> Vec<PathBuf> {
    let options = FileOptions::read_only().lock(LockMode::Off);
    let Ok(storage) = FileStorage::open(image, &options) else { return Vec::new() };
    let storage: Arc<dyn Storage> = Arc::new(storage);
    let described = registry
        .probe(&*storage)
        .and_then(|probed| probed.driver.describe(&storage, &Limits::default()));
    let names = described.map(|info| info.files).unwrap_or_default();
    names.iter().map(|name| real_name(&beside(image, name))).collect()
}

/// A name in an image's metadata as a path: relative ones count from the image's folder.
pub(crate) fn beside(image: &Path, name: &str) -> PathBuf {
    match image.parent() {
        Some(folder) => folder.join(name),
        None => PathBuf::from(name),
    }
}

/// What tells two names of files apart that need not be there yet.
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

    use super::*;

    fn options(text: &str) -> Options {
        Options::parse("qcow2", Qcow2Driver.options(), [text]).unwrap()
    }

    fn make(image: &Path, text: &str, replace: bool) -> Result<NewFiles> {
        NewFiles::create(
            &Registry::new([&Qcow2Driver as &'static dyn FormatDriver]),
            &Qcow2Driver,
            image,
            1 << 20,
            &options(text),
            &FileOptions::read_write(),
            replace,
        )
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
        // Somebody else takes the name meanwhile.
        std::fs::write(&image, b"theirs").unwrap();
        files.commit(Some(pending), CommitOptions::default()).unwrap_err();
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
