//! A format's front door: recognising, describing, opening, creating and checking images.

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

/// How sure a driver is that an image is its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Probe {
    /// Not its own.
    No,
    /// Anything can be this (raw).
    Fallback,
    /// The magic number is there.
    Yes,
}

/// What an option's value looks like.
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
    /// What a value looks like.
    pub kind: OptionKind,
    /// What holds where the option is not given.
    pub default: &'static str,
    /// One line of help.
    pub help: &'static str,
}

/// Options as the user gave them, checked against a format's [`OptionSpec`]s.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    values: BTreeMap<String, String>,
    key: Option<Secret>,
}

impl Options {
    /// Parses `key=value[,key=value]` texts. A later value wins. A doubled comma is a literal one.
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
                    Error::Invalid(format!("'{pair}' is not of the form KEY=VALUE: 'vdkit formats {format}' lists the options"))
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
            let mut known = String::new();
            for spec in specs {
                known.push_str(&format!("\n  {:<18} {}", spec.key, spec.help));
            }
            if specs.is_empty() {
                known.push_str(" none");
            }
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

    /// The key of a new image that is encrypted. It never comes from a text.
    pub fn key(&self) -> Option<&Secret> {
        self.key.as_ref()
    }

    /// Sets [`Options::key`].
    pub fn set_key(&mut self, key: Option<Secret>) {
        self.key = key;
    }

    /// Whether nothing was given.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }
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
/// [`Error::Invalid`] where the text is not a size or passes 2^63.
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
    // More digits than fit are a number all the same.
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

/// An image's own description of itself; no other file was opened for it.
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
    /// Some of the data is or may be compressed, by this method.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compression: Option<&'static str>,
    /// The image is encrypted, by this method.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encryption: Option<String>,
    /// The image was not closed cleanly.
    pub dirty: bool,
    /// The image is marked corrupt.
    pub corrupt: bool,
    /// What it stands on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_file: Option<String>,
    /// The format of what it stands on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_format: Option<String>,
    /// What tells this image from others, and from itself after its data changed, in the format's
    /// own notation (VMDK: content ID; VHD: unique ID; VHDX: data write GUID; VDI: UUIDs).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
    /// The [`ImageInfo::identity`] of what it stands on, as it was when this image was put on it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_identity: Option<String>,
    /// When the file of what it stands on was last changed before this image was put on it.
    #[serde(skip)]
    pub backing_time: Option<NotedTime>,
    /// The other files that hold its guest data, as its metadata names them: relative to the
    /// image's folder or absolute. The order is the format's own; each file is named once.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<String>,
    /// The one file of [`ImageInfo::files`] can be read as a raw image.
    pub data_file_raw: bool,
    /// Internal snapshots.
    pub snapshots: Vec<SnapshotInfo>,
    /// Persistent dirty bitmaps.
    pub bitmaps: Vec<BitmapInfo>,
    /// Format-specific properties, in a fixed order, as (key, value) texts.
    pub properties: Vec<(String, String)>,
}

impl ImageInfo {
    /// An image of `virtual_size` bytes of which there is no more to say.
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

    /// The backing reference, if there is one.
    pub fn backing(&self) -> Option<BackingRef> {
        Some(BackingRef {
            name: self.backing_file.clone()?,
            format: self.backing_format.clone(),
            identity: self.backing_identity.clone(),
            modified: self.backing_time.map(|noted| noted.seconds),
        })
    }
}

/// A time that an image notes, and where.
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
    /// Nanoseconds beyond them.
    pub date_nanoseconds: u32,
    /// Guest clock in nanoseconds.
    pub vm_clock_nanoseconds: u64,
    /// Bytes of the guest disk when it was taken.
    pub disk_bytes: Option<u64>,
    /// Instructions that the guest had executed, where they were counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub icount: Option<u64>,
}

/// One persistent dirty bitmap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct BitmapInfo {
    /// The name.
    pub name: String,
    /// Bytes that one bit stands for.
    pub granularity: u64,
    /// It was in use when the image was last closed, so it cannot be trusted.
    pub in_use: bool,
    /// It records writes.
    pub enabled: bool,
}

/// What opening needs; other files are opened by the caller, under its policy.
#[derive(Clone, Debug)]
pub struct OpenRequest {
    /// The image.
    pub storage: Arc<dyn Storage>,
    /// The files that [`ImageInfo::files`] names, in that order. (A user may name another file
    /// than the image does, also where it has lost the name of its only one.)
    pub files: Vec<Arc<dyn Storage>>,
    /// For writing.
    pub writable: bool,
    /// What it may cost.
    pub limits: Limits,
}

/// What a new image shall be.
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
    /// What it stands on, as it shall be stored.
    pub backing: Option<BackingRef>,
    /// Bytes of the disk that it stands on, where that one was opened.
    pub backing_bytes: Option<u64>,
}

/// What of an image shall change in place.
#[derive(Clone, Debug)]
pub struct AmendRequest {
    /// The image, writable; nobody has it open.
    pub storage: Arc<dyn Storage>,
    /// The files that [`ImageInfo::files`] names, in that order.
    pub files: Vec<Arc<dyn Storage>>,
    /// What it shall stand on, as it shall be stored, or nothing; none leaves that as it is. Only
    /// the name changes: the caller sees to it that the disk stays the same.
    pub backing: Option<Option<BackingRef>>,
    /// The options that shall have another value.
    pub options: Options,
    /// What it may cost.
    pub limits: Limits,
}

/// How much a repair may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair {
    /// Report only.
    Nothing,
    /// Give leaked space back.
    Leaks,
    /// Mend all that can be mended, but for what may lose guest data that is still there.
    All,
    /// Also that.
    AllForced,
}

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Space that nothing refers to.
    Leak,
    /// Data is or may be damaged.
    Corruption,
    /// Nothing is damaged or lost, and other programs may take offence.
    Warning,
}

/// One thing that is wrong with an image.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// Byte offset in the image of what is wrong.
    pub offset: u64,
    /// The structure in the format's words.
    pub structure: &'static str,
    /// What was found and expected.
    pub message: String,
    /// It was mended.
    pub repaired: bool,
}

/// What a check found. Counts are complete; `findings` holds the first ones only.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct CheckReport {
    /// The first findings (at most [`CheckReport::FINDINGS_MAX`]).
    pub findings: Vec<Finding>,
    /// Leaked clusters.
    pub leaks: u64,
    /// Damaged entries.
    pub corruptions: u64,
    /// Leaks mended.
    pub leaks_fixed: u64,
    /// Leaks that were left although they can be mended: they may hold guest data that something
    /// named once.
    pub leaks_kept: u64,
    /// Corruptions mended.
    pub corruptions_fixed: u64,
    /// What is neither.
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
    /// How many findings are listed one by one.
    pub const FINDINGS_MAX: usize = 1000;

    /// Notes a finding.
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

    /// Corruptions that remain.
    pub fn corruptions_left(&self) -> u64 {
        self.corruptions - self.corruptions_fixed
    }

    /// Leaks that remain.
    pub fn leaks_left(&self) -> u64 {
        self.leaks - self.leaks_fixed
    }
}

/// Host bytes that an image will need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Measured {
    /// With the data at hand.
    pub required: u64,
    /// When every guest byte is written.
    pub fully_allocated: u64,
}

/// A format's front door. One static value a format, listed in the facade's registry.
pub trait FormatDriver: Send + Sync + fmt::Debug {
    /// The name that users type, such as `qcow2`.
    fn name(&self) -> &'static str;

    /// Other names that users may type for it.
    fn aliases(&self) -> &'static [&'static str] {
        &[]
    }

    /// One line for lists.
    fn description(&self) -> &'static str;

    /// Options of `create`.
    fn options(&self) -> &'static [OptionSpec];

    /// Whether this driver can create and write images.
    fn writes(&self) -> bool;

    /// Judges an image by its first bytes (`head`, up to 64 KiB), its last bytes (`tail`, up to
    /// 512) and its length in bytes. All drivers are asked with an empty `tail` first; where none
    /// says [`Probe::Yes`], the end of the file is read too and they are asked again. So whoever
    /// knows its images by the head leaves `tail` alone.
    fn probe(&self, head: &[u8], tail: &[u8], len: u64) -> Probe;

    /// Describes an image in a bounded number of reads, whatever its size.
    fn describe(&self, storage: &Arc<dyn Storage>, limits: &Limits) -> Result<ImageInfo>;

    /// Opens an image. Reads nothing that grows with its data.
    fn open(&self, request: OpenRequest) -> Result<Arc<dyn Format>>;

    /// As [`FormatDriver::open`], with keys for an image that may be encrypted: they are tried in
    /// their order.
    ///
    /// # Errors
    /// [`Error::Key`] where the image is encrypted and none of the keys fits.
    fn open_with_keys(&self, request: OpenRequest, keys: &[Secret]) -> Result<Arc<dyn Format>> {
        let _ = keys;
        self.open(request)
    }

    /// The other files that a new image shall have, as it will name them: relative to its folder
    /// or absolute. `image` is the image's own file name, without folders. The caller makes them
    /// empty for [`FormatDriver::create`]; they take their names together with the image.
    ///
    /// # Errors
    /// [`Error::Invalid`] for options that do not fit, and for more than [`Limits::files_max`].
    fn new_files(&self, image: &str, guest_bytes: u64, options: &Options) -> Result<Vec<String>> {
        let _ = (image, guest_bytes, options);
        Ok(Vec::new())
    }

    /// Makes a new image.
    ///
    /// # Errors
    /// [`Error::Key`] where the image shall be encrypted and [`Options::key`] is not set.
    fn create(&self, request: &CreateRequest) -> Result<()>;

    /// Whether a new image with these options can be written to a pipe: from its first byte to its
    /// last, without ever going back.
    fn writes_in_order(&self, options: &Options) -> bool {
        let _ = options;
        false
    }

    /// [`FormatDriver::create`], and the new image open for writing. A format that is written from
    /// its start to its end in one pass ([`FormatCaps::one_pass`](crate::FormatCaps::one_pass))
    /// does both here without reading anything back, since the storage may be a pipe.
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

    /// Whether an image with these options is encrypted: it needs [`Options::key`] then.
    fn encrypts(&self, options: &Options) -> bool {
        let _ = options;
        false
    }

    /// The key slots of an encrypted image, or nothing where it has none.
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

    /// Checks an image, and mends it as far as `repair` says (the storage must be writable then).
    fn check(
        &self,
        storage: &Arc<dyn Storage>,
        files: &[Arc<dyn Storage>],
        repair: Repair,
        limits: &Limits,
        monitor: &Monitor<'_>,
    ) -> Result<CheckReport>;

    /// Makes an image smaller where it lies; the storages must be writable. What the guest reads
    /// stays the same, also where this is cut short at any moment: run it again.
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

    /// Whether [`FormatDriver::amend`] can change what an image stands on.
    fn amends_backing(&self) -> bool {
        false
    }

    /// Changes properties of an image where it lies. The guest's disk stays the same, and a crash
    /// leaves the old or the new properties, or some of each; done again, it comes to its end.
    /// Returns the keys of what changed.
    fn amend(&self, request: &AmendRequest, monitor: &Monitor<'_>) -> Result<Vec<String>> {
        let _ = monitor;
        Err(Error::unsupported(
            request.storage.name(),
            format!("not supported: changing properties of a {} image in place", self.name()),
            "convert it to a new image that has them",
        ))
    }

    /// Unit of allocation in bytes that these options make.
    fn cluster_bytes(&self, options: &Options) -> Result<u64>;

    /// Host bytes for an image with so many allocated guest clusters (of
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
