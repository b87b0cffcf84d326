//! Which image stands on which.
//!
//! Only headers are read, and only of files that the caller's path names: an image, with those in
//! its folder, or a folder. What an image's metadata names is looked for by name and never opened,
//! so that a hostile header makes nothing happen.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use serde::Serialize;
use vdkit_block::{Error, IoAction, Monitor, RefPolicy, Result};
use vdkit_chain::{BackingChoice, ChainLink, OpenOptions, Registry, describe_chain};

/// Files looked at, at most; the tree of a folder with more is refused.
const FILES_MAX: usize = 100_000;
/// How deep folders are followed.
const FOLDERS_DEEP_MAX: usize = 16;

/// How a tree is made.
#[derive(Clone, Debug, Default)]
pub struct TreeOptions {
    /// What names in headers may refer to; others are marked, not followed.
    pub refs: RefPolicy,
    /// Look into folders within a folder.
    pub recursive: bool,
}

/// What became of an image's reference to the one beneath it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    /// It is one of the images listed.
    Listed,
    /// It is there, outside of what was looked at.
    Elsewhere,
    /// No file has that name.
    Missing,
    /// The policy forbids to follow it.
    Refused,
}

/// What an image stands on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct TreeBacking {
    /// The name as the image has it.
    pub name: String,
    /// The format as the image has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// The file, where it was found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// What became of it.
    pub standing: Standing,
}

/// One image of a tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct TreeImage {
    /// The file.
    pub path: PathBuf,
    /// Its format.
    pub format: &'static str,
    /// Bytes of the guest disk.
    pub virtual_size: u64,
    /// What it stands on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing: Option<TreeBacking>,
    /// Images that stand directly on it.
    pub overlays: Vec<PathBuf>,
    /// All images that could not be read any more without it: what stands on it, directly or not,
    /// and images whose data file it is.
    pub deleting_orphans: Vec<PathBuf>,
}

/// A file that looked like an image and could not be described.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct TreeFault {
    /// The file.
    pub path: PathBuf,
    /// What is wrong.
    pub error: String,
}

/// The images at a place, and how they stand on one another.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct TreeReport {
    /// The images, by path. Files without a header are listed only where another image stands on
    /// them, or where they were asked for.
    pub images: Vec<TreeImage>,
    /// Images whose backing image is missing.
    pub orphans: Vec<PathBuf>,
    /// Files that could not be described.
    pub faults: Vec<TreeFault>,
}

impl TreeReport {
    /// The image of a path.
    pub fn image(&self, path: &Path) -> Option<&TreeImage> {
        self.images.iter().find(|image| image.path == path)
    }

    /// Images that stand on none of those listed.
    pub fn roots(&self) -> impl Iterator<Item = &TreeImage> {
        self.images.iter().filter(|image| {
            image.backing.as_ref().is_none_or(|backing| backing.standing != Standing::Listed)
        })
    }
}

/// Makes the tree of a folder's images, or of an image and those in its folder.
///
/// # Errors
/// [`Error::File`] where the path or its folder cannot be read; [`Error::Limit`] for too many
/// files; [`Error::Interrupted`]; for a single image also what describing it returns.
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
        match describe(registry, file, options) {
            Ok(link) => {
                found.insert(file.clone(), link);
            }
            Err(error) if single && *file == asked => return Err(error),
            // Files of other kinds lie about in any folder.
            Err(Error::Unsupported { .. }) => {}
            Err(error) => {
                report.faults.push(TreeFault { path: file.clone(), error: error.to_string() });
            }
        }
    }
    report.images = images(&found, &asked, options);
    report.orphans = report
        .images
        .iter()
        .filter(|image| {
            image.backing.as_ref().is_some_and(|backing| backing.standing == Standing::Missing)
        })
        .map(|image| image.path.clone())
        .collect();
    if single {
        keep_related(&mut report, &asked);
    }
    Ok(report)
}

fn open_error(path: &Path, source: std::io::Error) -> Error {
    Error::File { file: path.display().to_string(), action: IoAction::Open, source }
}

/// Regular files, links and unfinished files left out: each file counts once, under its own name.
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
                return Err(Error::Limit {
                    file: folder.display().to_string(),
                    what: "number of files",
                    found: FILES_MAX as u64 + 1,
                    limit: FILES_MAX as u64,
                });
            }
            files.push(entry.path());
        } else if kind.is_dir() && deep > 0 {
            list_files(&entry.path(), deep - 1, files, monitor)?;
        }
    }
    Ok(())
}

fn describe(registry: &Registry, file: &Path, options: &TreeOptions) -> Result<ChainLink> {
    // A running guest holds its images locked, which does not matter for a look at a header.
    let options = OpenOptions { lock: false, refs: options.refs.clone(), ..OpenOptions::default() }
        .backing(BackingChoice::Ignore);
    let report = describe_chain(registry, file, &options)?;
    let link = report.links.into_iter().next();
    link.ok_or_else(|| Error::Invalid(format!("{}: is no image", file.display())))
}

/// Resolves references among the files found.
fn images(
    found: &BTreeMap<PathBuf, ChainLink>,
    asked: &Path,
    options: &TreeOptions,
) -> Vec<TreeImage> {
    let mut overlays: BTreeMap<&Path, Vec<PathBuf>> = BTreeMap::new();
    // Overlays, and images whose guest data is in a file.
    let mut needed: BTreeMap<&Path, Vec<PathBuf>> = BTreeMap::new();
    let mut backings: BTreeMap<&Path, TreeBacking> = BTreeMap::new();
    for (path, link) in found {
        for name in &link.info.files {
            if let (Standing::Listed, Some(target)) = look_up(found, path, name, &options.refs)
                && let Some((listed, _)) = found.get_key_value(&target)
            {
                needed.entry(listed).or_default().push(path.clone());
            }
        }
        let Some(reference) = link.info.backing() else { continue };
        let (standing, target) = look_up(found, path, &reference.name, &options.refs);
        if let (Standing::Listed, Some(target)) = (standing, &target)
            && let Some((listed, _)) = found.get_key_value(target)
        {
            overlays.entry(listed).or_default().push(path.clone());
            needed.entry(listed).or_default().push(path.clone());
        }
        let (name, format) = (reference.name, reference.format);
        backings.insert(path, TreeBacking { name, format, path: target, standing });
    }
    let mut images = Vec::new();
    for (path, link) in found {
        let direct = overlays.get(path.as_path()).cloned().unwrap_or_default();
        // What has no header may be anything.
        let used = needed.contains_key(path.as_path());
        if link.probed && link.info.format == "raw" && !used && path != asked {
            continue;
        }
        images.push(TreeImage {
            path: path.clone(),
            format: link.info.format,
            virtual_size: link.info.virtual_size,
            backing: backings.get(path.as_path()).cloned(),
            deleting_orphans: above(path, &needed),
            overlays: direct,
        });
    }
    images
}

/// Everything that needs an image, directly or not.
fn above(path: &Path, needed: &BTreeMap<&Path, Vec<PathBuf>>) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = needed.get(path).cloned().unwrap_or_default();
    let mut next = 0;
    while let Some(image) = all.get(next).cloned() {
        for overlay in needed.get(image.as_path()).into_iter().flatten() {
            // Headers may name one another in a circle.
            if overlay != path && !all.contains(overlay) {
                all.push(overlay.clone());
            }
        }
        next += 1;
    }
    all.sort();
    all
}

/// Finds what a name in a header refers to.
fn look_up(
    found: &BTreeMap<PathBuf, ChainLink>,
    image: &Path,
    name: &str,
    refs: &RefPolicy,
) -> (Standing, Option<PathBuf>) {
    let Some(target) = target_of(image, name) else { return (Standing::Refused, None) };
    if !allowed(image, &target, refs) {
        return (Standing::Refused, None);
    }
    // Where it really is, links followed; by name alone where it is not there.
    match target.canonicalize() {
        Ok(real) if !allowed(image, &real, refs) => (Standing::Refused, None),
        Ok(real) if found.contains_key(&real) => (Standing::Listed, Some(real)),
        Ok(real) => (Standing::Elsewhere, Some(real)),
        Err(_) => (Standing::Missing, Some(target)),
    }
}

/// A name in an image's header as a path; nothing for URLs and `json:`.
pub(crate) fn target_of(image: &Path, name: &str) -> Option<PathBuf> {
    let name = name.strip_prefix("file:").unwrap_or(name);
    let scheme = name.split_once(':').map(|(scheme, _)| scheme);
    // A colon behind the first slash belongs to a file's name.
    if scheme.is_some_and(|scheme| !scheme.contains('/')) || name.is_empty() {
        return None;
    }
    Some(plain(&image.parent()?.join(name)))
}

/// A path without `.` and `..`, by its text alone.
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
        RefPolicy::Nothing => false,
    }
}

/// Leaves only what stands on the image that was asked for, and what it stands on.
fn keep_related(report: &mut TreeReport, asked: &Path) {
    let mut related = vec![asked.to_owned()];
    let mut at = asked.to_owned();
    while let Some(next) = report.image(&at).and_then(|i| i.backing.as_ref()?.path.clone()) {
        if related.contains(&next) {
            break;
        }
        related.push(next.clone());
        at = next;
    }
    related.extend(report.image(asked).into_iter().flat_map(|i| i.deleting_orphans.clone()));
    report.images.retain(|image| related.contains(&image.path));
    report.orphans.retain(|path| related.contains(path));
    report.faults.retain(|fault| related.contains(&fault.path));
}
