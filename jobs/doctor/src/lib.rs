//! Reports what is wrong or slow about an image, and the command that fixes it.
//!
//! ```text
//!   header ─► image     flags, version, sizes, the map against its cache
//!          ─► chain     backing chain: headers, names, times
//!          ─► host      the file system: space, blocks, mount options, placement of the file
//!          ─► check     the format's own check, within a budget
//!          ─► evidence  the measurements behind the findings
//! ```
//!
//! Everything is opened read-only, and only metadata is read, at most [`METADATA_BYTES_MAX`] per
//! image. Nothing is locked, and an image that another process writes is checked only in part.

mod chain;
mod code;
mod evidence;
mod host;
mod image;
mod leftovers;
mod libvirt;
mod unflushed;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;
use vdkit_block::{Error, Monitor, RefPolicy, Remedy, Result};
use vdkit_chain::{ChainLink, OpenOptions, Registry, describe_chain};
use vdkit_storage::{FileOptions, FileStorage, LockMode};
use vdkit_tree::{TreeOptions, tree};

pub use code::{Code as DoctorCode, Severity as DoctorSeverity};
pub use evidence::{Allocation, DoctorEvidence};

/// Maximum metadata bytes read for the check of one image: in 64 KiB clusters, the metadata of
/// about 400 GiB of data.
pub const METADATA_BYTES_MAX: u64 = 64 << 20;

/// Options of doctor.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct DoctorOptions {
    /// The image's format; `None` probes. Not for folders.
    pub format: Option<String>,
    /// Policy for references in metadata.
    pub refs: RefPolicy,
    /// Examine subfolders too.
    pub recursive: bool,
    /// Also produce the libvirt element of each image.
    pub libvirt: bool,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct DoctorFinding {
    /// Its code.
    pub code: DoctorCode,
    /// Its severity.
    pub severity: DoctorSeverity,
    /// Description with figures.
    pub message: String,
    /// The command that fixes it, as words. The user replaces words in capitals.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mend: Option<Vec<String>>,
}

impl DoctorFinding {
    fn new(code: DoctorCode, message: impl Into<String>, mend: Option<Vec<String>>) -> Self {
        Self { code, severity: code.severity(), message: message.into(), mend }
    }
}

/// Findings on one image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct DoctorImage {
    /// The file.
    #[serde(serialize_with = "vdkit_block::lossy::path")]
    pub path: PathBuf,
    /// Its format, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<&'static str>,
    /// Bytes of the guest disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_size: Option<u64>,
    /// All metadata was checked.
    pub checked: bool,
    /// The measurements; `None` if the image cannot be described.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence: Option<DoctorEvidence>,
    /// The findings, most severe first.
    pub findings: Vec<DoctorFinding>,
    /// The libvirt `<disk>` element, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub libvirt: Option<String>,
}

/// Result of doctor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct DoctorReport {
    /// The images, by path.
    pub images: Vec<DoctorImage>,
    /// Images whose backing image is missing.
    #[serde(serialize_with = "vdkit_block::lossy::paths")]
    pub orphans: Vec<PathBuf>,
    /// Findings on several images together, and unfinished files of killed commands.
    pub findings: Vec<DoctorFinding>,
    /// Number of findings per severity, over all images.
    pub errors: u64,
    /// See `errors`.
    pub warnings: u64,
    /// See `errors`.
    pub advice: u64,
}

impl DoctorReport {
    fn count(&mut self) {
        let all = self.images.iter().flat_map(|image| &image.findings);
        for finding in all.chain(&self.findings) {
            match finding.severity {
                DoctorSeverity::Error => self.errors += 1,
                DoctorSeverity::Warning => self.warnings += 1,
                DoctorSeverity::Advice => self.advice += 1,
            }
        }
    }
}

/// Examines an image, or every image of a folder.
///
/// # Errors
/// [`Error::File`] if the path is unreadable; [`Error::Limit`] for a folder with too many files;
/// [`Error::Interrupted`]. Defects of an image are a result.
pub fn doctor(
    registry: &Registry,
    path: &Path,
    options: &DoctorOptions,
    monitor: &Monitor<'_>,
) -> Result<DoctorReport> {
    let mut report = DoctorReport::default();
    if path.is_dir() {
        folder(registry, path, options, monitor, &mut report)?;
    } else {
        let image = examine(registry, path, options, monitor)?;
        if image.findings.iter().any(|finding| finding.code == DoctorCode::BackingMissing) {
            report.orphans.push(path.to_owned());
        }
        report.images.push(image);
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        report.findings = leftovers::leftovers(folder, Some(path), false, &monitor.cancel)?;
    }
    report.count();
    Ok(report)
}

fn folder(
    registry: &Registry,
    path: &Path,
    options: &DoctorOptions,
    monitor: &Monitor<'_>,
    report: &mut DoctorReport,
) -> Result<()> {
    let mut tree_options = TreeOptions::default();
    tree_options.refs = options.refs.clone();
    tree_options.recursive = options.recursive;
    // (Its progress has other units.)
    let quiet = monitor.quiet();
    let found = tree(registry, path, &tree_options, &quiet)?;
    for (number, image) in found.images.iter().enumerate() {
        monitor.cancel.check()?;
        monitor.progress.update(number as u64, found.images.len() as u64);
        // A file without a header is listed here because it is a backing image.
        let format = (image.format == "raw").then(|| image.format.to_owned());
        let options = DoctorOptions { format, ..options.clone() };
        report.images.push(examine(registry, &image.path, &options, monitor)?);
    }
    for fault in found.faults {
        report.images.push(unreadable(&fault.path, fault.error, None));
    }
    report.images.sort_by(|a, b| a.path.cmp(&b.path));
    report.orphans = found.orphans;
    report.findings = leftovers::leftovers(path, None, options.recursive, &monitor.cancel)?;
    report.findings.extend(overcommitted(registry, &report.images));
    Ok(())
}

/// Reports file systems with less free space than several images may grow by together.
fn overcommitted(registry: &Registry, images: &[DoctorImage]) -> Vec<DoctorFinding> {
    /// Per file system: possible growth, free bytes, growable images.
    type Pool<'a> = (u64, u64, Vec<&'a DoctorImage>);
    let mut pools: BTreeMap<u64, Pool<'_>> = BTreeMap::new();
    for image in images {
        let Some(evidence) = &image.evidence else { continue };
        let (Some(space), Some(free)) = (evidence.space, evidence.free_bytes) else { continue };
        let pool = pools.entry(space).or_insert((0, free, Vec::new()));
        pool.0 = pool.0.saturating_add(evidence.growth_bytes);
        pool.1 = pool.1.min(free);
        if evidence.growth_bytes > 0 {
            pool.2.push(image);
        }
    }
    let mut findings = Vec::new();
    for (growth, free, images) in pools.into_values() {
        // A single image has its own finding.
        if growth <= free || images.len() < 2 {
            continue;
        }
        let Some(most) = images.iter().max_by_key(|image| {
            image.evidence.as_ref().map_or(0, |evidence| evidence.allocated_bytes)
        }) else {
            continue;
        };
        let message = format!(
            "{} images may together grow by {} MiB, their file system has {} MiB left; '{}' takes \
             the most",
            images.len(),
            growth >> 20,
            free >> 20,
            most.path.display()
        );
        let format = most.format.filter(|format| {
            registry.driver(format).is_ok_and(|driver| driver.compaction().is_some())
        });
        let mend = format
            .and_then(|format| command(&["vdkit", "compact", "-f", format, &word_of(&most.path)]));
        findings.push(DoctorFinding::new(DoctorCode::Overcommitted, message, mend));
    }
    findings
}

/// The result for an unreadable image.
fn unreadable(path: &Path, message: String, remedy: Option<Remedy>) -> DoctorImage {
    let mend = match remedy {
        Some(Remedy::CheckAs { format }) => {
            command(&["vdkit", "check", "-f", &format, &word_of(path)])
        }
        _ => None,
    };
    DoctorImage {
        path: path.to_owned(),
        format: None,
        virtual_size: None,
        checked: false,
        evidence: None,
        findings: vec![DoctorFinding::new(DoctorCode::Unreadable, message, mend)],
        libvirt: None,
    }
}

fn command(words: &[&str]) -> Option<Vec<String>> {
    Some(words.iter().map(|word| (*word).to_owned()).collect())
}

/// A path as a command word that is never parsed as an option.
fn word_of(path: &Path) -> String {
    let word = path.display().to_string();
    if word.starts_with('-') { format!("./{word}") } else { word }
}

/// The image being examined.
struct Examination<'a> {
    registry: &'a Registry,
    path: &'a Path,
    /// The path as a command word.
    word: String,
    /// Descriptions of the image and its backing chain, the image first.
    links: Vec<ChainLink>,
    /// Why the chain ends early.
    broken: Option<Error>,
    in_use: bool,
    checked: bool,
    evidence: DoctorEvidence,
    findings: Vec<DoctorFinding>,
}

fn examine(
    registry: &Registry,
    path: &Path,
    options: &DoctorOptions,
    monitor: &Monitor<'_>,
) -> Result<DoctorImage> {
    let open = OpenOptions::read_only()
        .maybe_format(options.format.clone())
        .refs(options.refs.clone())
        .lock(false);
    let described = describe_chain(registry, path, &open);
    let chain = match described {
        Ok(chain) => chain,
        // Missing or unreadable: not a defect of an image.
        Err(
            error @ (Error::File { .. }
            | Error::Reference { .. }
            | Error::Interrupted
            | Error::Invalid { .. }),
        ) => {
            return Err(error);
        }
        Err(error) => return Ok(unreadable(path, error.to_string(), error.remedy())),
    };
    let mut examination = Examination {
        registry,
        path,
        word: word_of(path),
        links: chain.links,
        broken: chain.broken,
        in_use: false,
        checked: false,
        evidence: DoctorEvidence { cache: "writeback", ..DoctorEvidence::default() },
        findings: Vec::new(),
    };
    examination.examine_use();
    examination.examine_header();
    examination.examine_chain();
    examination.examine_host();
    examination.check(&open, monitor)?;
    let libvirt = options.libvirt.then(|| examination.libvirt());
    let mut findings = examination.findings;
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    let info = examination.links.first().map(|link| &link.info);
    Ok(DoctorImage {
        path: path.to_owned(),
        format: info.map(|info| info.format),
        virtual_size: info.map(|info| info.virtual_size),
        checked: examination.checked,
        evidence: Some(examination.evidence),
        findings,
        libvirt,
    })
}

impl Examination<'_> {
    /// The image itself. (A described chain is never empty.)
    fn link(&self) -> &ChainLink {
        &self.links[0]
    }

    /// A command of vdkit on the image, by the words before and after the image's name.
    fn vdkit(&self, before: &[&str], after: &[&str]) -> Option<Vec<String>> {
        command(&[&["vdkit"][..], before, &[self.word.as_str()], after].concat())
    }

    fn add(&mut self, code: DoctorCode, message: impl Into<String>, mend: Option<Vec<String>>) {
        self.findings.push(DoctorFinding::new(code, message, mend));
    }

    /// Asks whether another process writes to the image. A lock, even for a moment, could keep a
    /// guest from starting.
    fn examine_use(&mut self) {
        let file = FileStorage::open(self.path, &FileOptions::read_only().lock(LockMode::Off));
        if let Err(error @ Error::Locked { .. }) = file.and_then(|file| file.ask_for_writers()) {
            self.in_use = true;
            self.add(DoctorCode::InUse, error.to_string(), None);
        }
    }
}
