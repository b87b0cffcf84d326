//! Validate: checks an image against the requirements of a hypervisor or a cloud.

use std::path::{Path, PathBuf};

use serde::Serialize;
use vdkit_block::{ImageInfo, Result};
use vdkit_chain::{BackingChoice, OpenOptions, Registry, describe_chain};
use vdkit_storage::{FileOptions, LockMode};
use vdkit_vhd::azure_faults;

use crate::preset::Preset;

/// A violated requirement.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct Objection {
    /// The rule, for programs.
    pub rule: Rule,
    /// Actual and required value.
    pub message: String,
    /// The command that fixes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mend: Option<String>,
}

/// The rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Rule {
    /// The platform reads the format.
    Format,
    /// The platform reads the subformat.
    Subformat,
    /// It has no backing image.
    Backing,
    /// All data is in one file.
    OtherFiles,
    /// It is not encrypted.
    Encrypted,
    /// It is consistent.
    Sound,
    /// The disk size is a multiple of the platform's unit.
    SizeUnit,
    /// The disk is not too large.
    SizeMax,
    /// The file has the extension that the platform expects.
    Name,
    /// The VHD footer meets Azure's requirements.
    Footer,
}

/// Result of a validation.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct ValidateReport {
    /// The image.
    #[serde(serialize_with = "vdkit_block::lossy::path")]
    pub image: PathBuf,
    /// The platform.
    #[serde(rename = "for")]
    pub target: &'static str,
    /// Its format.
    pub format: &'static str,
    /// Bytes of the guest disk.
    pub virtual_size: u64,
    /// All requirements are met.
    pub accepted: bool,
    /// Violated requirements.
    pub objections: Vec<Objection>,
    /// Remaining steps before the platform can use it.
    pub notes: Vec<String>,
}

/// Checks the requirements of a platform. Reads only the headers of one image.
///
/// # Errors
/// Errors of opening and describing the image.
pub fn validate(
    registry: &Registry,
    image: &Path,
    preset: Preset,
    options: &OpenOptions,
) -> Result<ValidateReport> {
    let alone = options.clone().backing(BackingChoice::Ignore);
    let mut chain = describe_chain(registry, image, &alone)?;
    let info = chain.links.swap_remove(0).info;
    let mut judge = Judge { image, preset, info: &info, objections: Vec::new() };
    judge.format();
    judge.parts();
    judge.size();
    judge.name();
    if (preset, info.format) == (Preset::Azure, "vpc") {
        let lock = if options.lock { LockMode::Auto } else { LockMode::Off };
        let storage = registry.open_storage(image, &FileOptions::read_only().lock(lock))?;
        for fault in azure_faults(&*storage)? {
            let message = format!("{} at {:#x}: {}", fault.structure, fault.offset, fault.message);
            // Sizes have their own rule.
            if fault.structure != "current size" {
                judge.add(Rule::Footer, message, Some(judge.convert()));
            }
        }
    }
    let objections = judge.objections;
    Ok(ValidateReport {
        image: image.to_owned(),
        target: preset.name(),
        format: info.format,
        virtual_size: info.virtual_size,
        accepted: objections.is_empty(),
        objections,
        notes: notes(image, preset),
    })
}

/// Steps outside the image.
fn notes(image: &Path, preset: Preset) -> Vec<String> {
    let name = word(image);
    match preset {
        Preset::Gcp => vec![format!(
            "the upload is a gzip-compressed GNU tar with one file, disk.raw: 'tar --format=oldgnu -Sczf \
             disk.tar.gz disk.raw'{}",
            if image.file_name().is_some_and(|name| name == "disk.raw") {
                String::new()
            } else {
                format!(" after renaming {name}")
            }
        )],
        Preset::Azure => vec![format!(
            "uploads keep holes out with 'azcopy copy {name} URL --blob-type PageBlob'"
        )],
        _ => Vec::new(),
    }
}

/// A path as a word for a shell, which no program takes for an option.
fn word(path: &Path) -> String {
    let name = path.display().to_string();
    let name = if name.starts_with('-') { format!("./{name}") } else { name };
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:@%".contains(c);
    if name.chars().all(plain) { name } else { format!("'{}'", name.replace('\'', r"'\''")) }
}

struct Judge<'a> {
    image: &'a Path,
    preset: Preset,
    info: &'a ImageInfo,
    objections: Vec<Objection>,
}

impl Judge<'_> {
    fn add(&mut self, rule: Rule, message: impl Into<String>, mend: Option<String>) {
        self.objections.push(Objection { rule, message: message.into(), mend });
    }

    /// The command that makes a suitable image.
    fn convert(&self) -> String {
        format!("vdkit convert --for {} {} NEW", self.preset, word(self.image))
    }

    fn property(&self, key: &str) -> Option<&str> {
        let mut properties = self.info.properties.iter();
        properties.find(|(known, _)| known == key).map(|(_, value)| value.as_str())
    }

    fn format(&mut self) {
        let taken: &[&str] = match self.preset {
            Preset::Kvm => &["qcow2", "raw", "luks"],
            Preset::Openstack => &["qcow2", "raw", "vmdk", "vdi", "vpc", "vhdx"],
            Preset::Gcp => &["raw"],
            Preset::Aws => &["raw", "vmdk", "vpc", "vhdx"],
            Preset::Azure => &["vpc"],
            Preset::Vmware => &["vmdk"],
            Preset::Hyperv => &["vhdx", "vpc"],
            Preset::Virtualbox => &["vdi", "vmdk", "vpc"],
        };
        let format = self.info.format;
        if !taken.contains(&format) {
            let message = format!("{} takes {}, not {format}", self.preset, taken.join(", "));
            self.add(Rule::Format, message, Some(self.convert()));
            return;
        }
        let kinds: &[&str] = match (self.preset, format) {
            (Preset::Openstack, "vmdk") => &["monolithicSparse", "streamOptimized"],
            (Preset::Aws, "vmdk") => &["streamOptimized"],
            (Preset::Vmware, "vmdk") => {
                &["streamOptimized", "monolithicFlat", "vmfs", "vmfsSparse", "vmfsThin"]
            }
            _ => return,
        };
        let kind = self.property("create-type").unwrap_or("unknown").to_owned();
        if !kinds.contains(&kind.as_str()) {
            let message = format!("{} takes {}, not {kind}", self.preset, kinds.join(", "));
            self.add(Rule::Subformat, message, Some(self.convert()));
        }
    }

    /// Checks other parts of the image, and its state.
    fn parts(&mut self) {
        let local = matches!(self.preset, Preset::Kvm | Preset::Hyperv | Preset::Virtualbox);
        if let Some(name) = self.info.backing_file.as_ref().filter(|_| !local) {
            let message = format!("it stands on '{name}', which {} does not get", self.preset);
            self.add(Rule::Backing, message, Some(self.convert()));
        }
        let whole = !local && self.preset != Preset::Vmware;
        if whole && let Some(name) = self.info.files.first() {
            let message = format!("its data is in another file ('{name}')");
            self.add(Rule::OtherFiles, message, Some(self.convert()));
        }
        let decrypts = matches!(self.preset, Preset::Kvm | Preset::Openstack);
        if let Some(method) = self.info.encryption.as_ref().filter(|_| !decrypts) {
            let message = format!("it is encrypted ({method})");
            self.add(Rule::Encrypted, message, Some(self.convert()));
        }
        let check = format!("vdkit check --repair all {}", word(self.image));
        if self.info.corrupt {
            self.add(Rule::Sound, "it is marked corrupt", Some(check));
        } else if self.info.dirty && !local {
            self.add(Rule::Sound, "it was not closed cleanly", Some(check));
        }
    }

    fn size(&mut self) {
        let (bytes, unit) = (self.info.virtual_size, self.preset.unit());
        if !bytes.is_multiple_of(unit) || bytes == 0 {
            let whole = bytes.next_multiple_of(unit).max(unit);
            let message = format!("{bytes} bytes are not whole {}", self.preset.unit_name());
            // Writing a raw image needs an explicit format.
            let raw = if self.info.format == "raw" { "-f raw " } else { "" };
            let mend = format!("vdkit resize {raw}{} {whole}", word(self.image));
            self.add(Rule::SizeUnit, message, Some(mend));
        }
        if let Some(max) = self.preset.size_max(self.info.format).filter(|max| bytes > *max) {
            let message = format!("{bytes} bytes are more than {max}");
            self.add(Rule::SizeMax, message, None);
        }
    }

    fn name(&mut self) {
        let wanted = match (self.preset, self.info.format) {
            (Preset::Hyperv, "vpc") | (Preset::Azure, "vpc") => "vhd",
            (Preset::Hyperv, "vhdx") => "vhdx",
            _ => return,
        };
        let ending = self.image.extension().unwrap_or_default();
        if !ending.eq_ignore_ascii_case(wanted) {
            let renamed = self.image.with_extension(wanted);
            let mend = format!("mv {} {}", word(self.image), word(&renamed));
            self.add(Rule::Name, format!("its name does not end in .{wanted}"), Some(mend));
        }
    }
}
