//! The driver interface of a format: probe, describe, open, create and check images.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use crate::compact::{CompactOptions, CompactReport};
use crate::encryption::{KeySlots, Secret};
use crate::error::{Error, Result};
use crate::format::{BackingRef, Format};
use crate::limits::Limits;
use crate::monitor::Monitor;
use crate::storage::Storage;

/// Confidence of a driver that an image has its format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Probe {
    /// Another format.
    No,
    /// Any file matches (raw).
    Fallback,
    /// The magic number matches.
    Yes,
}

/// Type of an option's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OptionKind {
    /// A byte count with an optional binary suffix (`64K`).
    Size,
    /// `on` or `off`.
    Switch,
    /// A whole number.
    Number,
    /// One of these words.
    Word(&'static [&'static str]),
    /// A file name or other text.
    Text,
}

/// One option of a format: the single definition behind parsing, help and documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct OptionSpec {
    /// The key, as in `-o key=value`.
    pub key: &'static str,
    /// Type of its value.
    pub kind: OptionKind,
    /// The value if the option is not given.
    pub default: &'static str,
    /// One line of help.
    pub help: &'static str,
}

/// User-supplied options, checked against a format's [`OptionSpec`]s.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    values: BTreeMap<String, String>,
    key: Option<Secret>,
}

impl Options {
    /// Parses `key=value[,key=value]` texts. A later value wins. A doubled comma is a literal
    /// comma.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown key (listing the known ones) or an ill-formed value.
    pub fn parse<'a>(
        format: &str,
        specs: &[OptionSpec],
        texts: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self> {
        let mut options = Self::default();
        for text in texts {
            for pair in split_commas(text) {
                if pair.is_empty() {
                    continue;
                }
                let (key, value) = pair.split_once('=').ok_or_else(|| {
                    Error::Invalid(format!(
                        "'{pair}' is not of the form KEY=VALUE; {format} has these options:{}",
                        known(specs)
                    ))
                })?;
                options.set(format, specs, key.trim(), value)?;
            }
        }
        Ok(options)
    }

    /// Sets one option.
    ///
    /// # Errors
    /// As [`Options::parse`].
    pub fn set(
        &mut self,
        format: &str,
        specs: &[OptionSpec],
        key: &str,
        value: &str,
    ) -> Result<()> {
        let Some(spec) = specs.iter().find(|s| s.key == key) else {
            let known = known(specs);
            return Err(Error::Invalid(format!(
                "unknown option '{key}' for {format}; the known ones are:{known}"
            )));
        };
        let fits = match spec.kind {
            OptionKind::Size => parse_size(value).is_ok(),
            OptionKind::Switch => parse_switch(value).is_some(),
            OptionKind::Number => value.parse::<u64>().is_ok(),
            OptionKind::Word(words) => words.contains(&value),
            OptionKind::Text => true,
        };
        if !fits {
            let wanted = match spec.kind {
                OptionKind::Size => "a size such as 64K".to_owned(),
                OptionKind::Switch => "on or off".to_owned(),
                OptionKind::Number => "a whole number".to_owned(),
                OptionKind::Word(words) => format!("one of {}", words.join(", ")),
                OptionKind::Text => "text".to_owned(),
            };
            return Err(Error::Invalid(format!(
                "option {key} of {format} is '{value}', expected {wanted}"
            )));
        }
        self.values.insert(key.to_owned(), value.to_owned());
        Ok(())
    }

    /// The value as given.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.values.get(key).map(String::as_str)
    }

    /// The value as a byte count.
    pub fn size(&self, key: &str) -> Option<u64> {
        self.text(key).and_then(|v| parse_size(v).ok())
    }

    /// The value as a switch.
    pub fn switch(&self, key: &str) -> Option<bool> {
        self.text(key).and_then(parse_switch)
    }

    /// The value as a number.
    pub fn number(&self, key: &str) -> Option<u64> {
        self.text(key).and_then(|v| v.parse().ok())
    }

    /// The encryption key of a new image. It is never parsed from text.
    pub fn key(&self) -> Option<&Secret> {
        self.key.as_ref()
    }

    /// Sets [`Options::key`].
    pub fn set_key(&mut self, key: Option<Secret>) {
        self.key = key;
    }

    /// Whether no option was given.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }
}

/// The options, a line each.
fn known(specs: &[OptionSpec]) -> String {
    if specs.is_empty() {
        return " none".to_owned();
    }
    specs.iter().map(|spec| format!("\n  {:<18} {}", spec.key, spec.help)).collect()
}

fn split_commas(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let last = parts.len() - 1;
        if c == ',' {
            if chars.peek() == Some(&',') {
                chars.next();
                parts[last].push(',');
            } else {
                parts.push(String::new());
            }
        } else {
            parts[last].push(c);
        }
    }
    parts
}

fn parse_switch(text: &str) -> Option<bool> {
    match text {
        "on" | "true" | "yes" => Some(true),
        "off" | "false" | "no" => Some(false),
        _ => None,
    }
}

/// Parses `512`, `64K`, `10G`, `1.5T`: binary units, also with a trailing `iB` or `B`.
///
/// # Errors
/// [`Error::Invalid`] if the text is not a size or exceeds 2^63.
pub fn parse_size(text: &str) -> Result<u64> {
    let bad = || Error::Invalid(format!("'{text}' is not a size; write 512, 64K, 10G or 1.5T"));
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits);
    let shift = match suffix.trim_end_matches("iB").trim_end_matches('B') {
        "" => 0,
        "k" | "K" => 10,
        "m" | "M" => 20,
        "g" | "G" => 30,
        "t" | "T" => 40,
        "p" | "P" => 50,
        "e" | "E" => 60,
        _ => return Err(bad()),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() {
        return Err(bad());
    }
    // Too many digits are still a number; the range check below rejects it.
    let whole: u128 = if whole.is_empty() { 0 } else { whole.parse().unwrap_or(u128::MAX) };
    if fraction.len() > 18 {
        return Err(bad());
    }
    let too_large = || {
        Error::Invalid(format!(
            "'{text}' is too large: the largest size is 8E less one byte (2^63 - 1)"
        ))
    };
    if whole > u128::from(u64::MAX) {
        return Err(too_large());
    }
    let fraction_value: u128 =
        if fraction.is_empty() { 0 } else { fraction.parse().map_err(|_| bad())? };
    let part = (fraction_value << shift) / 10u128.pow(fraction.len() as u32);
    let bytes = (whole << shift) + part;
    if bytes > i64::MAX as u128 {
        return Err(too_large());
    }
    Ok(bytes as u64)
}

/// Image metadata, read without opening any other file.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ImageInfo {
    /// The format's name.
    pub format: &'static str,
    /// Bytes of the guest disk.
    pub virtual_size: u64,
    /// Unit of allocation in bytes, where the format has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_size: Option<u64>,
    /// Compression method, if data is or may be compressed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compression: Option<&'static str>,
    /// Encryption method, if encrypted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encryption: Option<String>,
    /// The image was not closed cleanly.
    pub dirty: bool,
    /// The image is marked corrupt.
    pub corrupt: bool,
    /// Name of the backing file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_file: Option<String>,
    /// Format of the backing file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_format: Option<String>,
    /// Identity of this image and of its data, in the format's own notation. It changes with the
    /// data (VMDK: content ID; VHD: unique ID; VHDX: data write GUID; VDI: UUIDs).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
    /// The backing image's [`ImageInfo::identity`] when this overlay was created.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_identity: Option<String>,
    /// Modification time of the backing file when this overlay was created.
    #[serde(skip)]
    pub backing_time: Option<NotedTime>,
    /// Other files with guest data, as the metadata names them: relative to the image's folder or
    /// absolute. The order is the format's own; each file is listed once.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<String>,
    /// The only file of [`ImageInfo::files`] is readable as a raw image.
    pub data_file_raw: bool,
    /// Internal snapshots.
    pub snapshots: Vec<SnapshotInfo>,
    /// Persistent dirty bitmaps.
    pub bitmaps: Vec<BitmapInfo>,
    /// Format-specific properties, in a fixed order, as (key, value) texts.
    pub properties: Vec<(String, String)>,
}

impl ImageInfo {
    /// A description with only the size set.
    pub fn new(format: &'static str, virtual_size: u64) -> Self {
        Self {
            format,
            virtual_size,
            cluster_size: None,
            compression: None,
            encryption: None,
            dirty: false,
            corrupt: false,
            backing_file: None,
            backing_format: None,
            identity: None,
            backing_identity: None,
            backing_time: None,
            files: Vec::new(),
            data_file_raw: false,
            snapshots: Vec::new(),
            bitmaps: Vec::new(),
            properties: Vec::new(),
        }
    }

    /// The backing reference, if any.
    pub fn backing(&self) -> Option<BackingRef> {
        Some(BackingRef {
            name: self.backing_file.clone()?,
            format: self.backing_format.clone(),
            identity: self.backing_identity.clone(),
            modified: self.backing_time.map(|noted| noted.seconds),
        })
    }
}

/// A timestamp stored in an image, and its location.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotedTime {
    /// Seconds since 1970.
    pub seconds: u64,
    /// Byte offset in the image.
    pub offset: u64,
    /// The structure in the format's words.
    pub structure: &'static str,
    /// The field in the specification's words.
    pub field: &'static str,
}

/// One internal snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct SnapshotInfo {
    /// The unique id.
    pub id: String,
    /// The name.
    pub name: String,
    /// Bytes of saved VM state.
    pub vm_state_bytes: u64,
    /// Seconds since 1970.
    pub date_seconds: u32,
    /// Nanoseconds part.
    pub date_nanoseconds: u32,
    /// Guest clock in nanoseconds.
    pub vm_clock_nanoseconds: u64,
    /// Bytes of the guest disk at that time.
    pub disk_bytes: Option<u64>,
    /// Executed guest instructions, if counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub icount: Option<u64>,
}

/// One persistent dirty bitmap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct BitmapInfo {
    /// The name.
    pub name: String,
    /// Bytes per bit.
    pub granularity: u64,
    /// In use when the image was last closed, so its bits are inconsistent.
    pub in_use: bool,
    /// Records writes.
    pub enabled: bool,
}

/// Arguments of [`FormatDriver::open`]. The caller opens other files, under its policy.
#[derive(Clone, Debug)]
pub struct OpenRequest {
    /// The image.
    pub storage: Arc<dyn Storage>,
    /// The files of [`ImageInfo::files`], in that order. The user may replace a file that the image
    /// names, or supply the only file if the image lost its name.
    pub files: Vec<Arc<dyn Storage>>,
    /// Open for writing.
    pub writable: bool,
    /// Resource limits.
    pub limits: Limits,
}

/// Arguments of [`FormatDriver::create`].
#[derive(Clone, Debug)]
pub struct CreateRequest {
    /// The empty file (or device) that becomes the image.
    pub storage: Arc<dyn Storage>,
    /// Empty files for guest data, in the order of [`FormatDriver::new_files`].
    pub files: Vec<Arc<dyn Storage>>,
    /// Bytes of the guest disk.
    pub guest_bytes: u64,
    /// The format's options.
    pub options: Options,
    /// The backing reference to store.
    pub backing: Option<BackingRef>,
    /// Bytes of the backing disk, if it was opened.
    pub backing_bytes: Option<u64>,
}

/// Arguments of [`FormatDriver::amend`].
#[derive(Clone, Debug)]
pub struct AmendRequest {
    /// The image, writable and not open elsewhere.
    pub storage: Arc<dyn Storage>,
    /// The files that [`ImageInfo::files`] names, in that order.
    pub files: Vec<Arc<dyn Storage>>,
    /// The backing reference to store. `None` keeps the current one; `Some(None)` removes it. Only
    /// the name changes: the caller must keep the guest-visible data the same.
    pub backing: Option<Option<BackingRef>>,
    /// Options with new values.
    pub options: Options,
    /// Resource limits.
    pub limits: Limits,
}

/// Extent of a repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair {
    /// Report only.
    Nothing,
    /// Free leaked space.
    Leaks,
    /// Repair everything that cannot lose guest data.
    All,
    /// Also repairs that may lose guest data.
    AllForced,
}

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Unreferenced space.
    Leak,
    /// Data is or may be damaged.
    Corruption,
    /// No damage, but other programs may reject it.
    Warning,
}

/// One defect of an image.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Finding {
    /// Its severity.
    pub severity: Severity,
    /// Byte offset of the defect in the image.
    pub offset: u64,
    /// The structure in the format's words.
    pub structure: &'static str,
    /// Value found and value expected.
    pub message: String,
    /// It was repaired.
    pub repaired: bool,
}

/// Result of a check. Counts are complete; `findings` holds only the first ones.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct CheckReport {
    /// The first findings (at most [`CheckReport::FINDINGS_MAX`]).
    pub findings: Vec<Finding>,
    /// Leaked clusters.
    pub leaks: u64,
    /// Damaged entries.
    pub corruptions: u64,
    /// Leaks repaired.
    pub leaks_fixed: u64,
    /// Repairable leaks that were kept, because they may hold guest data that was once referenced.
    pub leaks_kept: u64,
    /// Corruptions repaired.
    pub corruptions_fixed: u64,
    /// Warnings.
    pub warnings: u64,
    /// Guest clusters of the disk.
    pub total_clusters: u64,
    /// Guest clusters with host space.
    pub allocated_clusters: u64,
    /// Allocated guest clusters whose host cluster does not follow the one before.
    pub fragmented_clusters: u64,
    /// Compressed guest clusters.
    pub compressed_clusters: u64,
    /// End of the highest host cluster in use, in bytes.
    pub image_end_offset: u64,
}

impl CheckReport {
    /// Maximum length of [`CheckReport::findings`].
    pub const FINDINGS_MAX: usize = 1000;

    /// Adds a finding.
    pub fn add(&mut self, finding: Finding) {
        match finding.severity {
            Severity::Leak => {
                self.leaks += 1;
                self.leaks_fixed += u64::from(finding.repaired);
            }
            Severity::Corruption => {
                self.corruptions += 1;
                self.corruptions_fixed += u64::from(finding.repaired);
            }
            Severity::Warning => self.warnings += 1,
        }
        if self.findings.len() < Self::FINDINGS_MAX {
            self.findings.push(finding);
        }
    }

    /// Unrepaired corruptions.
    pub fn corruptions_left(&self) -> u64 {
        self.corruptions - self.corruptions_fixed
    }

    /// Unrepaired leaks.
    pub fn leaks_left(&self) -> u64 {
        self.leaks - self.leaks_fixed
    }
}

/// Host bytes required by an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Measured {
    /// With the current data.
    pub required: u64,
    /// With every guest byte allocated.
    pub fully_allocated: u64,
}

/// The driver of a format. One static value per format, listed in the facade's registry.
pub trait FormatDriver: Send + Sync + fmt::Debug {
    /// The format's name, such as `qcow2`.
    fn name(&self) -> &'static str;

    /// Other accepted names.
    fn aliases(&self) -> &'static [&'static str] {
        &[]
    }

    /// One-line description.
    fn description(&self) -> &'static str;

    /// Options of `create`.
    fn options(&self) -> &'static [OptionSpec];

    /// Whether this driver can create and write images.
    fn writes(&self) -> bool;

    /// Probes an image of `len` bytes by its first bytes (`head`, up to 64 KiB) and its last bytes
    /// (`tail`, up to 512). All drivers are first asked with an empty `tail`. Only if none says
    /// [`Probe::Yes`] are they asked again with `tail` read from the file. Drivers that decide by
    /// `head` ignore `tail`.
    fn probe(&self, head: &[u8], tail: &[u8], len: u64) -> Probe;

    /// Describes an image in a bounded number of reads, independent of its size.
    fn describe(&self, storage: &Arc<dyn Storage>, limits: &Limits) -> Result<ImageInfo>;

    /// Opens an image. The amount read does not grow with the image's data.
    fn open(&self, request: OpenRequest) -> Result<Arc<dyn Format>>;

    /// As [`FormatDriver::open`], trying `keys` in order on an encrypted image.
    ///
    /// # Errors
    /// [`Error::Key`] if the image is encrypted and no key fits.
    fn open_with_keys(&self, request: OpenRequest, keys: &[Secret]) -> Result<Arc<dyn Format>> {
        let _ = keys;
        self.open(request)
    }

    /// Names of the other files of a new image: relative to its folder or absolute. `image` is the
    /// image's own file name, without folders. The caller creates them empty for
    /// [`FormatDriver::create`] and renames them into place together with the image.
    ///
    /// # Errors
    /// [`Error::Invalid`] for conflicting options, and for more than [`Limits::files_max`].
    fn new_files(&self, image: &str, guest_bytes: u64, options: &Options) -> Result<Vec<String>> {
        let _ = (image, guest_bytes, options);
        Ok(Vec::new())
    }

    /// Creates an image.
    ///
    /// # Errors
    /// [`Error::Key`] if encryption is requested and [`Options::key`] is not set.
    fn create(&self, request: &CreateRequest) -> Result<()>;

    /// Whether an image with these options can be written to a pipe: in ascending order, without
    /// seeking back.
    fn writes_in_order(&self, options: &Options) -> bool {
        let _ = options;
        false
    }

    /// [`FormatDriver::create`], and opens the image for writing. Formats that are written in one
    /// pass ([`FormatCaps::one_pass`](crate::FormatCaps::one_pass)) must not read anything back
    /// here, since the storage may be a pipe.
    fn create_open(&self, request: &CreateRequest, limits: &Limits) -> Result<Arc<dyn Format>> {
        self.create(request)?;
        let open = OpenRequest {
            storage: request.storage.clone(),
            files: request.files.clone(),
            writable: true,
            limits: *limits,
        };
        self.open_with_keys(open, &request.options.key().cloned().into_iter().collect::<Vec<_>>())
    }

    /// Whether these options request encryption, which needs [`Options::key`].
    fn encrypts(&self, options: &Options) -> bool {
        let _ = options;
        false
    }

    /// The key slots of an encrypted image; `None` if it has none.
    ///
    /// # Errors
    /// A damaged header; I/O.
    fn key_slots(
        &self,
        storage: &Arc<dyn Storage>,
        limits: &Limits,
    ) -> Result<Option<Box<dyn KeySlots>>> {
        let _ = (storage, limits);
        Ok(None)
    }

    /// Checks an image and repairs it as `repair` allows (the storage must then be writable).
    fn check(
        &self,
        storage: &Arc<dyn Storage>,
        files: &[Arc<dyn Storage>],
        repair: Repair,
        limits: &Limits,
        monitor: &Monitor<'_>,
    ) -> Result<CheckReport>;

    /// Compacts an image in place; the storages must be writable. Guest data stays the same, also
    /// after an interruption at any point; run it again to finish.
    fn compact(
        &self,
        storage: &Arc<dyn Storage>,
        files: &[Arc<dyn Storage>],
        options: CompactOptions,
        limits: &Limits,
        monitor: &Monitor<'_>,
    ) -> Result<CompactReport> {
        let _ = (files, options, limits, monitor);
        Err(Error::unsupported(
            storage.name(),
            format!("not supported: compacting a {} image in place", self.name()),
            "convert it to a new image, which has no free space in it",
        ))
    }

    /// Whether [`FormatDriver::amend`] can change the backing reference.
    fn amends_backing(&self) -> bool {
        false
    }

    /// Changes properties of an image in place. Guest data stays the same. A crash leaves the old
    /// or the new properties, or some of each; repeat the call to finish. Returns the keys that
    /// changed.
    fn amend(&self, request: &AmendRequest, monitor: &Monitor<'_>) -> Result<Vec<String>> {
        let _ = monitor;
        Err(Error::unsupported(
            request.storage.name(),
            format!("not supported: changing properties of a {} image in place", self.name()),
            "convert it to a new image that has them",
        ))
    }

    /// Unit of allocation in bytes with these options.
    fn cluster_bytes(&self, options: &Options) -> Result<u64>;

    /// Host bytes for an image with `data_clusters` allocated guest clusters (of
    /// [`FormatDriver::cluster_bytes`]), uncompressed.
    fn measure(&self, guest_bytes: u64, options: &Options, data_clusters: u64) -> Result<Measured>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("64K", 65536),
            ("10G", 10 << 30),
            ("1.5T", 3 << 39),
            ("1MiB", 1 << 20),
            (".5k", 512),
            ("7E", 7 << 60),
        ] {
            assert_eq!(parse_size(text).unwrap(), bytes, "{text}");
        }
        for text in ["", "K", "-1", "1X", "1.2.3", "8E", "99999999999999999999", "1 G", "0x10"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    const SPECS: &[OptionSpec] = &[
        OptionSpec { key: "size", kind: OptionKind::Size, default: "64K", help: "a size" },
        OptionSpec { key: "name", kind: OptionKind::Text, default: "", help: "a name" },
    ];

    #[test]
    fn options_name_the_known_keys_and_keep_doubled_commas() {
        let options = Options::parse("x", SPECS, ["size=1M,name=a,,b"]).unwrap();
        assert_eq!(options.size("size"), Some(1 << 20));
        assert_eq!(options.text("name"), Some("a,b"));
        let error = Options::parse("x", SPECS, ["sise=1M"]).unwrap_err().to_string();
        assert!(error.contains("'sise'") && error.contains("a size"), "{error}");
        assert!(Options::parse("x", SPECS, ["size=big"]).is_err());
    }
}
