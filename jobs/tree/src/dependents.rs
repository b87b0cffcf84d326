//! Dependents of an image: overlays that a change of it would damage, and images whose data it holds.
//!
//! An image does not record its dependents. They are mostly in the same folder, so that folder is
//! searched: headers only, a bounded number of files, no other file opened.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use vdkit_block::{Error, Monitor, RefPolicy, Remedy, Result};
use vdkit_chain::Registry;

use crate::tree::{describe, target_of};

/// Maximum files examined per folder.
const FILES_MAX: usize = 4096;
/// Maximum overlays named in a message.
const NAMED_MAX: usize = 8;

/// File identity.
type Identity = (u64, u64);

/// How an image depends on a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// The file is its backing image.
    Backing,
    /// The file holds its data: a data file, an extent.
    Data,
}

/// Direct overlays of some images, and images whose data they hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dependents {
    /// The dependent images, by path.
    pub overlays: Vec<PathBuf>,
    /// A folder had too many files: there may be other dependents.
    pub incomplete: bool,
}

fn identity(path: &Path) -> Option<Identity> {
    path.metadata().ok().filter(|found| found.is_file()).map(|found| (found.dev(), found.ino()))
}

/// Searches the folders of `images` for images that depend on them, except those in `images` and in
/// `known`. Only regular files are searched and have dependents.
///
/// # Errors
/// [`Error::Interrupted`]. Unreadable folders and files are skipped.
pub fn dependents(
    registry: &Registry,
    images: &[PathBuf],
    known: &[PathBuf],
    monitor: &Monitor<'_>,
) -> Result<Dependents> {
    let targets: Vec<Identity> = images.iter().filter_map(|image| identity(image)).collect();
    let mut left_out = targets.clone();
    left_out.extend(known.iter().filter_map(|image| identity(image)));
    let mut found = Dependents::default();
    let mut seen = BTreeSet::new();
    for folder in folders_of(images) {
        let Ok(entries) = folder.read_dir() else { continue };
        let files = entries.flatten().filter(|e| e.file_type().is_ok_and(|kind| kind.is_file()));
        for (number, entry) in files.enumerate() {
            monitor.cancel.check()?;
            if number == FILES_MAX {
                found.incomplete = true;
                break;
            }
            let path = entry.path();
            let Some(own) = identity(&path) else { continue };
            if !left_out.contains(&own)
                && use_of(registry, &path, &targets).is_some()
                && seen.insert(own)
            {
                found.overlays.push(path);
            }
        }
    }
    found.overlays.sort();
    Ok(found)
}

/// The folders of images, by name and by real path.
fn folders_of(images: &[PathBuf]) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = Vec::new();
    let mut real: Vec<PathBuf> = Vec::new();
    for image in images {
        let named = match image.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
            _ => PathBuf::from("."),
        };
        let followed = image.canonicalize().ok().and_then(|i| i.parent().map(Path::to_owned));
        for folder in std::iter::once(named).chain(followed) {
            let Ok(canonical) = folder.canonicalize() else { continue };
            if !real.contains(&canonical) {
                real.push(canonical);
                folders.push(folder);
            }
        }
    }
    folders
}

/// How an image depends on one of `targets`, by the names in its header. The files are never opened.
fn use_of(registry: &Registry, image: &Path, targets: &[Identity]) -> Option<Use> {
    let info = describe(registry, image, &RefPolicy::default()).ok()?.info;
    let refers = |name: &str| {
        let found = target_of(image, name).and_then(|path| identity(&path));
        found.is_some_and(|found| targets.contains(&found))
    };
    if info.backing().is_some_and(|backing| refers(&backing.name)) {
        return Some(Use::Backing);
    }
    info.files.iter().any(|name| refers(name)).then_some(Use::Data)
}

/// Fails if other images depend on `images`.
///
/// # Errors
/// [`Error::Dependents`], naming them; as [`dependents`].
pub fn refuse_dependents(
    registry: &Registry,
    images: &[PathBuf],
    known: &[PathBuf],
    doing: &str,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let found = dependents(registry, images, known, monitor)?;
    let Some(image) = images.last() else { return Ok(()) };
    let Some(first) = found.overlays.first() else {
        if found.incomplete {
            monitor.progress.message(&format!(
                "the folder of {} has more than {FILES_MAX} files: not all were examined for \
                 images that are based on it",
                image.display()
            ));
        }
        return Ok(());
    };
    let show = |path: &Path| path.strip_prefix("./").unwrap_or(path).display().to_string();
    let mut names: Vec<_> = found.overlays.iter().take(NAMED_MAX).map(|p| show(p)).collect();
    if found.overlays.len() > NAMED_MAX {
        names.push(format!("and {} more", found.overlays.len() - NAMED_MAX));
    }
    let targets: Vec<Identity> = images.iter().filter_map(|image| identity(image)).collect();
    let first_use = use_of(registry, first, &targets);
    let (which, instead) = if first_use == Some(Use::Data) {
        ("whose data it holds", format!("change them by their own names: {}", show(first)).into())
    } else {
        ("that are based on it", Remedy::StandAlone { overlay: show(first) })
    };
    Err(Error::Dependents {
        file: show(image),
        what: format!("{doing} would damage the images {which}"),
        dependents: names,
        remedy: Remedy::forced("they are not needed any more", instead),
    })
}
