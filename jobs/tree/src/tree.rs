//! The tree of images by backing reference.
//!
//! Only headers are read, and only of files at the caller's path: an image with those in its
//! folder, or a folder. References in metadata are resolved by name and never opened, so a hostile
//! header has no effect.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use serde::Serialize;
use vdkit_block::{Error, IoAction, Monitor, RefPolicy, Result, require_within};
use vdkit_chain::{BackingChoice, ChainLink, OpenOptions, Registry, describe_chain};

/// Maximum files examined; a folder with more is refused.
const FILES_MAX: usize = 100_000;
/// Maximum sum of the images that would lose their backing chain with each image.
const ORPHANS_MAX: u64 = 1_000_000;
/// Maximum folder depth.
const FOLDERS_DEEP_MAX: usize = 16;

/// Options of a tree.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct TreeOptions {
    /// Policy for references; refused ones are marked, not followed.
    pub refs: RefPolicy,
    /// Examine subfolders too.
    pub recursive: bool,
}

/// Result of resolving a backing reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReferenceStatus {
    /// One of the listed images.
    Listed,
    /// It exists outside the examined folders.
    Elsewhere,
    /// The file does not exist.
    Missing,
    /// The policy forbids it.
    Refused,
}

/// A backing reference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct TreeBacking {
    /// The stored name.
    pub name: String,
    /// The stored format.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// The file, if found.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(serialize_with = "vdkit_block::lossy::optional")]
    pub path: Option<PathBuf>,
    /// Result of resolving it.
    pub standing: ReferenceStatus,
}

/// One image of a tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct TreeImage {
    /// The file.
    #[serde(serialize_with = "vdkit_block::lossy::path")]
    pub path: PathBuf,
    /// Its format.
    pub format: &'static str,
    /// Bytes of the guest disk.
    pub virtual_size: u64,
    /// Its backing image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing: Option<TreeBacking>,
    /// Direct overlays.
    #[serde(serialize_with = "vdkit_block::lossy::paths")]
    pub overlays: Vec<PathBuf>,
    /// All images that would become unreadable without it: direct and indirect overlays, and images
    /// whose data file it is.
    #[serde(serialize_with = "vdkit_block::lossy::paths")]
    pub deleting_orphans: Vec<PathBuf>,
}

/// A file that looked like an image but could not be described.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct TreeFault {
    /// The file.
    #[serde(serialize_with = "vdkit_block::lossy::path")]
    pub path: PathBuf,
    /// The error.
    pub error: String,
}

/// The images at a location, and their backing references.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct TreeReport {
    /// The images, by path. Files without a header are listed only if another image refers to them,
    /// or if requested.
    pub images: Vec<TreeImage>,
    /// Images whose backing image is missing.
    #[serde(serialize_with = "vdkit_block::lossy::paths")]
    pub orphans: Vec<PathBuf>,
    /// Files that could not be described.
    pub faults: Vec<TreeFault>,
}

impl TreeReport {
    /// The image at a path.
    pub fn image(&self, path: &Path) -> Option<&TreeImage> {
        self.images.iter().find(|image| image.path == path)
    }

    /// Images without a listed backing image.
    pub fn roots(&self) -> impl Iterator<Item = &TreeImage> {
        self.images.iter().filter(|image| {
            image.backing.as_ref().is_none_or(|backing| backing.standing != ReferenceStatus::Listed)
        })
    }
}

/// The tree of a folder's images, or of an image and those in its folder.
///
/// # Errors
/// [`Error::File`] if the path or its folder is unreadable; [`Error::Limit`] for too many files;
/// [`Error::Interrupted`]; for a single image also errors of describing it.
pub fn tree(
    registry: &Registry,
    path: &Path,
    options: &TreeOptions,
    monitor: &Monitor<'_>,
) -> Result<TreeReport> {
    let asked = path.canonicalize().map_err(|error| open_error(path, error))?;
    let single = !asked.is_dir();
    let folder = if single { asked.parent().unwrap_or(Path::new("/")) } else { &asked };
    let mut files = Vec::new();
    let deep = if options.recursive && !single { FOLDERS_DEEP_MAX } else { 0 };
    list_files(folder, deep, &mut files, monitor)?;
    files.sort();

    let mut found = BTreeMap::new();
    let mut report = TreeReport::default();
    for (number, file) in files.iter().enumerate() {
        monitor.cancel.check()?;
        monitor.progress.update(number as u64, files.len() as u64);
        match describe(registry, file, &options.refs) {
            Ok(mut link) => {
                // Of all images together, these could take any amount of memory.
                let info = &mut link.info;
                (info.snapshots, info.bitmaps, info.properties) = Default::default();
                found.insert(file.clone(), link);
            }
            Err(error) if single && *file == asked => return Err(error),
            // Any folder may contain files of other types, but not under the name of a format.
            Err(Error::Unsupported { .. })
                if registry.format_in_name(&file.to_string_lossy()).is_none() => {}
            Err(error) => {
                report.faults.push(TreeFault { path: file.clone(), error: error.to_string() });
            }
        }
    }
    report.images = images(&found, &asked, options, monitor)?;
    let missing = |backing: &TreeBacking| backing.standing == ReferenceStatus::Missing;
    let orphans = report.images.iter().filter(|image| image.backing.as_ref().is_some_and(missing));
    report.orphans = orphans.map(|image| image.path.clone()).collect();
    if single {
        keep_related(&mut report, &asked);
    }
    Ok(report)
}

fn open_error(path: &Path, source: std::io::Error) -> Error {
    Error::File { file: path.display().to_string(), action: IoAction::Open, source }
}

/// Regular files, without links and unfinished files: each file counts once, under its own name.
fn list_files(
    folder: &Path,
    deep: usize,
    files: &mut Vec<PathBuf>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    monitor.cancel.check()?;
    let fail = |error| open_error(folder, error);
    for entry in std::fs::read_dir(folder).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        let kind = entry.file_type().map_err(fail)?;
        if kind.is_file() {
            if vdkit_storage::unfinished_name(&entry.path()).is_some() {
                continue; // no image yet
            }
            if files.len() >= FILES_MAX {
                let (file, limit) = (folder.display().to_string(), FILES_MAX as u64);
                return Err(Error::limit(&file, "number of files", limit + 1, limit));
            }
            files.push(entry.path());
        } else if kind.is_dir() && deep > 0 {
            list_files(&entry.path(), deep - 1, files, monitor)?;
        }
    }
    Ok(())
}

/// What an image's own header says. No other file is opened, and no lock is needed, even if a
/// running guest holds one.
///
/// # Errors
/// Errors of opening and describing the image.
pub fn describe(registry: &Registry, file: &Path, refs: &RefPolicy) -> Result<ChainLink> {
    let options =
        OpenOptions::default().lock(false).refs(refs.clone()).backing(BackingChoice::Ignore);
    let report = describe_chain(registry, file, &options)?;
    let link = report.links.into_iter().next();
    link.ok_or_else(|| Error::invalid_for(&file.display(), "is no image"))
}

/// Resolves references among the files found.
fn images(
    found: &BTreeMap<PathBuf, ChainLink>,
    asked: &Path,
    options: &TreeOptions,
    monitor: &Monitor<'_>,
) -> Result<Vec<TreeImage>> {
    let mut overlays: BTreeMap<&Path, Vec<PathBuf>> = BTreeMap::new();
    // Overlays, and images with a separate data file.
    let mut needed: BTreeMap<&Path, Vec<PathBuf>> = BTreeMap::new();
    let mut backings: BTreeMap<&Path, TreeBacking> = BTreeMap::new();
    for (path, link) in found {
        for name in &link.info.files {
            if let (ReferenceStatus::Listed, Some(target)) =
                look_up(found, path, name, &options.refs)
                && let Some((listed, _)) = found.get_key_value(&target)
            {
                needed.entry(listed).or_default().push(path.clone());
            }
        }
        let Some(reference) = link.info.backing() else { continue };
        let (standing, target) = look_up(found, path, &reference.name, &options.refs);
        if let (ReferenceStatus::Listed, Some(target)) = (standing, &target)
            && let Some((listed, _)) = found.get_key_value(target)
        {
            overlays.entry(listed).or_default().push(path.clone());
            needed.entry(listed).or_default().push(path.clone());
        }
        let (name, format) = (reference.name, reference.format);
        backings.insert(path, TreeBacking { name, format, path: target, standing });
    }
    let mut images = Vec::new();
    let mut orphans = 0;
    for (path, link) in found {
        monitor.cancel.check()?;
        let direct = overlays.get(path.as_path()).cloned().unwrap_or_default();
        // A file without a header may be anything.
        let used = needed.contains_key(path.as_path());
        if link.probed && link.info.format == "raw" && !used && path != asked {
            continue;
        }
        let deleting_orphans = above(path, &needed);
        orphans += deleting_orphans.len() as u64;
        let (folder, what) = (asked.display().to_string(), "number of images above images");
        require_within(&folder, what, orphans, ORPHANS_MAX)?;
        images.push(TreeImage {
            path: path.clone(),
            format: link.info.format,
            virtual_size: link.info.virtual_size,
            backing: backings.get(path.as_path()).cloned(),
            deleting_orphans,
            overlays: direct,
        });
    }
    Ok(images)
}

/// All direct and indirect dependents of an image.
fn above(path: &Path, needed: &BTreeMap<&Path, Vec<PathBuf>>) -> Vec<PathBuf> {
    let mut all = BTreeSet::new();
    let mut next = vec![path];
    while let Some(image) = next.pop() {
        for dependent in needed.get(image).into_iter().flatten() {
            // Headers may form a loop.
            if dependent != path && all.insert(dependent.clone()) {
                next.push(dependent);
            }
        }
    }
    all.into_iter().collect()
}

/// Resolves a name in a header.
fn look_up(
    found: &BTreeMap<PathBuf, ChainLink>,
    image: &Path,
    name: &str,
    refs: &RefPolicy,
) -> (ReferenceStatus, Option<PathBuf>) {
    let Some(target) = target_of(image, name) else { return (ReferenceStatus::Refused, None) };
    if !allowed(image, &target, refs) {
        return (ReferenceStatus::Refused, None);
    }
    // The real path, or the name alone if the file does not exist.
    match target.canonicalize() {
        Ok(real) if !allowed(image, &real, refs) => (ReferenceStatus::Refused, None),
        Ok(real) if found.contains_key(&real) => (ReferenceStatus::Listed, Some(real)),
        Ok(real) => (ReferenceStatus::Elsewhere, Some(real)),
        Err(_) => (ReferenceStatus::Missing, Some(target)),
    }
}

/// The path of a name in an image's header; `None` for URLs and `json:`.
pub fn target_of(image: &Path, name: &str) -> Option<PathBuf> {
    let name = name.strip_prefix("file:").unwrap_or(name);
    let scheme = name.split_once(':').map(|(scheme, _)| scheme);
    // A colon after the first slash belongs to a file name.
    if scheme.is_some_and(|scheme| !scheme.contains('/')) || name.is_empty() {
        return None;
    }
    Some(plain(&image.parent()?.join(name)))
}

/// Removes `.` and `..` from a path, lexically.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                plain.pop();
            }
            part => plain.push(part),
        }
    }
    plain
}

fn allowed(image: &Path, target: &Path, refs: &RefPolicy) -> bool {
    let own = image.parent().is_some_and(|folder| target.starts_with(folder));
    match refs {
        RefPolicy::OwnFolder => own,
        RefPolicy::Folders(folders) => {
            own || folders
                .iter()
                .filter_map(|f| f.canonicalize().ok())
                .any(|f| target.starts_with(f))
        }
        RefPolicy::Ask(judge) => {
            judge.allows(&image.display().to_string(), &target.display().to_string())
        }
        _ => false,
    }
}

/// Keeps only the requested image, its backing chain and its dependents. A file that could not be
/// described may be one of these, so faults stay.
fn keep_related(report: &mut TreeReport, asked: &Path) {
    let mut related = BTreeSet::from([asked.to_owned()]);
    let mut at = asked.to_owned();
    while let Some(next) = report.image(&at).and_then(|i| i.backing.as_ref()?.path.clone()) {
        if !related.insert(next.clone()) {
            break;
        }
        at = next;
    }
    related.extend(report.image(asked).into_iter().flat_map(|i| i.deleting_orphans.clone()));
    report.images.retain(|image| related.contains(&image.path));
    report.orphans.retain(|path| related.contains(path));
}
