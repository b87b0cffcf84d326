//! Judges whether an untrusted image is safe to accept.
//!
//! ```text
//!   head, tail ─► signature   all matching formats (two reads)
//!                    │
//!        ┌───────────┼──────────────┬──────────────┐
//!      qcow2        vmdk         foreign        partitions      header facts
//!        │       (descriptor)  (vdi vhd vhdx)   (raw disks)
//!     mapping ─► the format's own check ─► start of the guest's disk
//! ```
//!
//! Only the image itself is opened; every read is limited by a budget (number, bytes, deadline).
//! This module does no sandboxing: the command runs it in a sandbox, and programs may call it
//! directly.
//!
//! It covers what OpenStack's format inspector (oslo.utils, `imageutils.format_inspector`) refuses,
//! and gives each reason a stable [`Code`].

pub(crate) mod budget;
mod code;
mod foreign;
mod mapping;
mod partitions;
mod qcow2;
mod reference;
mod signature;
mod vmdk;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use vdkit_block::{Error, HostOffset, Result, Storage};

use budget::{BudgetStorage, Exceeded};
use signature::{Kind, Signature};

pub use code::{Code, InspectFinding, Weight};
pub use signature::FORMAT_NAMES;

/// Exceptions of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Allow {
    /// A backing file with a plain name.
    Backing,
    /// A data file with a plain name.
    DataFile,
    /// Encrypted contents.
    Encryption,
    /// Extended L2 entries.
    ExtendedL2,
    /// A disk that begins with a disk image.
    Nested,
    /// Internal snapshots: only a note.
    Snapshots,
}

/// Policy and limits of an inspection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[non_exhaustive]
pub struct InspectOptions {
    /// Exceptions.
    pub allow: Vec<Allow>,
    /// The required format; see [`FORMAT_NAMES`]. Also a format that is always refused, to say that a file
    /// is not even that.
    pub format: Option<String>,
    /// Maximum bytes of the guest disk.
    pub size_max: u64,
    /// Maximum ratio of guest data to file length, above [`InspectOptions::EXPANSION_FREE`] bytes.
    pub ratio_max: u64,
    /// Warnings refuse the image.
    pub strict: bool,
    /// Maximum reads.
    pub reads_max: u64,
    /// Maximum bytes read.
    pub read_bytes_max: u64,
    /// Maximum bytes of memory for tables.
    pub memory_max: u64,
    /// Maximum time.
    pub time_max: Duration,
}

impl InspectOptions {
    /// Guest data up to this size is never a decompression bomb.
    pub const EXPANSION_FREE: u64 = 64 << 20;
}

impl Default for InspectOptions {
    /// No exceptions; disks up to 64 TiB, data up to 100 times the file; 100,000 reads, 512 MiB in
    /// all, 256 MiB of memory, 10 seconds.
    fn default() -> Self {
        Self {
            allow: Vec::new(),
            format: None,
            size_max: 64 << 40,
            ratio_max: 100,
            strict: false,
            reads_max: 100_000,
            read_bytes_max: 512 << 20,
            memory_max: 256 << 20,
            time_max: Duration::from_secs(10),
        }
    }
}

impl InspectOptions {
    fn allows(&self, what: Allow) -> bool {
        self.allow.contains(&what)
    }
}

/// The verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Acceptable under this policy.
    Accept,
    /// Refused by at least one finding.
    Refuse,
    /// It could not be judged, so do not accept it.
    Unknown,
}

/// Depth of the inspection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Depth {
    /// Only its first and last bytes.
    Signature,
    /// Its header.
    Header,
    /// All of its metadata.
    Metadata,
}

/// Result of an inspection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[non_exhaustive]
pub struct InspectReport {
    /// The format to open it as.
    pub format: String,
    /// All formats that it matches; `raw` if none.
    pub formats: Vec<String>,
    /// The verdict.
    pub verdict: Verdict,
    /// Depth of the inspection.
    pub depth: Depth,
    /// Bytes of the guest disk, if known from the header.
    pub virtual_size: Option<u64>,
    /// Bytes of the file.
    pub file_length: u64,
    /// Guest bytes with data, if the metadata was read.
    pub data_bytes: Option<u64>,
    /// The first findings.
    pub findings: Vec<InspectFinding>,
    /// Number of findings not listed.
    pub findings_omitted: u64,
    /// Reads done.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
}

impl InspectReport {
    /// A report with a single finding on an otherwise unknown image.
    pub fn of_nothing(file_length: u64, finding: InspectFinding) -> Self {
        Self {
            format: "unknown".to_owned(),
            formats: Vec::new(),
            verdict: if finding.code == Code::NotJudged {
                Verdict::Unknown
            } else {
                Verdict::Refuse
            },
            depth: Depth::Signature,
            virtual_size: None,
            file_length,
            data_bytes: None,
            findings: vec![finding],
            findings_omitted: 0,
            reads: 0,
            read_bytes: 0,
        }
    }

    /// The verdict of findings under a policy.
    pub fn verdict_of(findings: &[InspectFinding], strict: bool) -> Verdict {
        let least = if strict { Weight::Warn } else { Weight::Refuse };
        match findings {
            all if all.iter().any(|f| f.code == Code::NotJudged) => Verdict::Unknown,
            all if all.iter().any(|f| f.severity >= least) => Verdict::Refuse,
            _ => Verdict::Accept,
        }
    }
}

/// The findings; the heaviest are kept.
#[derive(Debug, Default)]
struct Findings {
    list: Vec<InspectFinding>,
    omitted: u64,
}

impl InspectFinding {
    /// Adds the finding. If there are too many, drops one of less weight.
    fn add_to(self, findings: &mut Findings) {
        if findings.list.len() < code::FINDINGS_MAX {
            return findings.list.push(self);
        }
        findings.omitted += 1;
        if let Some(lighter) = findings.list.iter_mut().find(|f| f.severity < self.severity) {
            *lighter = self;
        }
    }
}

impl Findings {
    fn refused(&self) -> bool {
        self.list.iter().any(|finding| finding.severity == Weight::Refuse)
    }
}

struct Inspection<'a> {
    storage: Arc<dyn Storage>,
    options: &'a InspectOptions,
    len: u64,
    findings: Findings,
    depth: Depth,
    virtual_size: Option<u64>,
    data_bytes: Option<u64>,
}

/// Judges an image. Makes two small reads of any file, and reads all metadata of a qcow2 image.
///
/// # Errors
/// Errors of reading; [`Error::Invalid`] for an unknown expected format. Defects of the image,
/// including exceeded limits, are a result.
pub fn inspect(storage: Arc<dyn Storage>, options: &InspectOptions) -> Result<InspectReport> {
    if let Some(format) = &options.format
        && !FORMAT_NAMES.contains(&format.as_str())
        && !signature::BANNED.contains(&format.as_str())
    {
        let known = FORMAT_NAMES.join(", ");
        return Err(Error::invalid(format!("unknown format '{format}'; known: {known}")));
    }
    let deadline = std::time::Instant::now().checked_add(options.time_max);
    let budget = BudgetStorage::new(storage, options.reads_max, options.read_bytes_max, deadline);
    let len = budget.len()?;
    let mut inspection = Inspection {
        storage: budget.clone(),
        options,
        len,
        findings: Findings::default(),
        depth: Depth::Signature,
        virtual_size: None,
        data_bytes: None,
    };
    let mut found = Vec::new();
    if let Err(error) = inspection.run(&mut found) {
        inspection.note_end(error, budget.exceeded())?;
    }
    let format = inspection.format(&found);
    let mut formats: Vec<String> = Vec::new();
    for name in found.iter().map(|signature| signature.name) {
        if !formats.iter().any(|known| known == name) {
            formats.push(name.to_owned());
        }
    }
    if formats.is_empty() {
        formats.push("raw".to_owned());
    }
    let Findings { mut list, omitted } = inspection.findings;
    list.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    Ok(InspectReport {
        format: format.to_owned(),
        formats,
        verdict: InspectReport::verdict_of(&list, options.strict),
        depth: inspection.depth,
        virtual_size: inspection.virtual_size,
        file_length: len,
        data_bytes: inspection.data_bytes,
        findings: list,
        findings_omitted: omitted,
        reads: budget.spent().reads,
        read_bytes: budget.spent().bytes,
    })
}

impl Inspection<'_> {
    fn run(&mut self, found: &mut Vec<Signature>) -> Result<()> {
        if self.len == 0 {
            self.virtual_size = Some(0);
            InspectFinding::new(Code::Empty).at(0).add_to(&mut self.findings);
            return Ok(());
        }
        let head = self.read(0, signature::HEAD_BYTES)?;
        let tail_bytes = self.len.min(signature::TAIL_BYTES as u64);
        let tail = self.read(self.len - tail_bytes, tail_bytes as usize)?;
        *found = signature::recognize(&head, &tail, self.len);
        self.judge_identity(found);
        match self.format(found) {
            "qcow2" => self.qcow2(&head),
            "vmdk" => self.vmdk(&head, &tail),
            "vdi" => self.vdi(&head),
            "vhd" => self.vhd(&head, &tail),
            "vhdx" => self.vhdx(),
            "luks" => {
                self.depth = Depth::Header;
                self.encrypted("LUKS", 0);
                Ok(())
            }
            "raw" => {
                self.raw(&head, found);
                Ok(())
            }
            _ => Ok(()), // banned: not read any further
        }
    }

    /// Adds a finding about the bytes at `offset`.
    fn find(
        &mut self,
        code: Code,
        offset: u64,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) {
        let finding = InspectFinding::new(code).at(offset).found(found).expected(expected);
        finding.add_to(&mut self.findings);
    }

    /// The format to open it as.
    fn format(&self, found: &[Signature]) -> &'static str {
        found.iter().find(|s| s.kind == Kind::Disk).map_or("raw", |s| s.name)
    }

    /// Up to `len` bytes; fewer at the end of the file.
    fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        let got = self.storage.read_up_to(&mut bytes, HostOffset(offset))?;
        bytes.truncate(got);
        Ok(bytes)
    }

    /// Checks that the file matches one format, the expected one.
    fn judge_identity(&mut self, found: &[Signature]) {
        let disks = signature::names(found, Kind::Disk);
        let contents = signature::names(found, Kind::Contents);
        let others = signature::names(found, Kind::Other);
        // A fixed VHD is a raw disk with a footer, so it has the contents of a raw disk.
        let fixed_vhd = disks.len() == 1 && found.iter().all(|s| s.name != "vhd" || s.offset != 0);
        let holds_contents = disks.is_empty() || (disks.contains("vhd") && fixed_vhd);
        let mut all: Vec<_> = disks.iter().chain(&others).copied().collect();
        if !holds_contents || !others.is_empty() {
            all.extend(&contents);
        }
        if all.len() > 1 {
            let at = found.iter().map(|s| s.offset).max().unwrap_or(0);
            let places: Vec<_> = found
                .iter()
                .map(|signature| format!("{} at {:#x}", signature.name, signature.offset))
                .collect();
            self.find(Code::SeveralFormats, at, places.join(", "), "the signature of one format");
        }
        for banned in disks.iter().filter(|name| signature::BANNED.contains(name)) {
            self.find(Code::FormatBanned, 0, *banned, "qcow2, raw, vmdk, vdi, vhd or vhdx");
        }
        if disks.is_empty() && !others.is_empty() {
            let names: Vec<_> = others.iter().copied().collect();
            self.find(Code::NotADisk, 0, names.join(", "), "a disk image");
        }
        self.judge_format(found, holds_contents.then_some(&contents));
    }

    /// Checks the expected format. `contents` describes a raw disk (or a fixed VHD).
    fn judge_format(&mut self, found: &[Signature], contents: Option<&BTreeSet<&'static str>>) {
        let Some(wanted) = &self.options.format else { return };
        let format = self.format(found);
        let holds = |name: &str| contents.is_some_and(|contents| contents.contains(name));
        // A request for a disk does not accept an ISO image: services attach it as an optical
        // medium, and OpenStack refuses one declared as raw.
        let optical = wanted == "raw" && format == "raw" && holds("iso");
        if !optical && (wanted == format || holds(wanted)) {
            return;
        }
        let iso = found.iter().find(|signature| optical && signature.name == "iso");
        let (at, found) = iso.map_or((0, format), |iso| (iso.offset, iso.name));
        self.find(Code::FormatMismatch, at, found, wanted.clone());
    }

    /// Checks the guest disk size, stored in the field at `offset`.
    fn judge_size(&mut self, bytes: u64, offset: u64) {
        self.virtual_size = Some(bytes);
        if bytes > self.options.size_max {
            self.find(
                Code::VirtualSize,
                offset,
                format!("{bytes} bytes in a file of {}", self.len),
                format!("at most {}", self.options.size_max),
            );
        }
    }

    /// Checks a table, referred to by the field at `offset`: within the file and at most `most`
    /// bytes.
    fn judge_table(&mut self, what: &str, offset: u64, start: u64, bytes: u64, most: u64) {
        if bytes > most {
            self.find(
                Code::TableTooLarge,
                offset,
                format!("{what} of {bytes} bytes"),
                format!("at most {most} bytes"),
            );
        }
        if bytes > 0 && start.checked_add(bytes).is_none_or(|end| end > self.len) {
            self.find(
                Code::OutsideFile,
                offset,
                format!("{what} of {bytes} bytes at {start:#x}"),
                format!("an end within the file of {} bytes", self.len),
            );
        }
    }

    fn encrypted(&mut self, method: &str, offset: u64) {
        InspectFinding::new(Code::Encrypted)
            .allowed(self.options.allows(Allow::Encryption))
            .at(offset)
            .found(method)
            .expected("no encryption")
            .add_to(&mut self.findings);
    }

    fn header_truncated(&mut self, bytes: u64, needed: u64) {
        self.find(
            Code::HeaderTruncated,
            bytes,
            format!("{bytes} bytes"),
            format!("at least {needed}"),
        );
    }

    fn header_invalid(&mut self, offset: u64, found: impl Into<String>, expected: &str) {
        self.find(Code::HeaderInvalid, offset, found, expected);
    }

    fn parent_image(&mut self, offset: u64, found: impl Into<String>) {
        self.find(Code::ParentImage, offset, found, "an image that stands alone");
    }

    /// Notes that only the header was examined.
    fn contents_not_checked(&mut self, format: &str) {
        self.depth = self.depth.max(Depth::Header);
        InspectFinding::new(Code::ContentsNotChecked)
            .found(format!("{format}: recognized, contents not checked"))
            .expected("a format whose tables are known: qcow2, raw")
            .add_to(&mut self.findings);
    }

    /// Handles an early end: caused by the image, or by an error of reading.
    fn note_end(&mut self, error: Error, exceeded: Option<Exceeded>) -> Result<()> {
        let limits = match exceeded {
            Some(Exceeded::Reads) => InspectFinding::new(Code::LimitReads).expected(format!(
                "at most {} reads of {} bytes together",
                self.options.reads_max, self.options.read_bytes_max
            )),
            Some(Exceeded::Time) => InspectFinding::new(Code::LimitTime)
                .expected(format!("at most {} ms", self.options.time_max.as_millis())),
            None => return self.note_error(error),
        };
        limits.found("more").add_to(&mut self.findings);
        Ok(())
    }

    /// Turns an error of the format into a finding; an error of reading stays an error.
    fn note_error(&mut self, error: Error) -> Result<()> {
        match error {
            Error::Corrupt(fault) => {
                let place = format!("{}: {}", fault.structure, fault.found);
                self.header_invalid(fault.offset, place, &fault.expected);
            }
            Error::Limit { what, found, limit, .. } => InspectFinding::new(Code::TableTooLarge)
                .found(format!("{what} is {found}"))
                .expected(format!("at most {limit}"))
                .mend("refuse it, or raise --max-memory where the image may be that large")
                .add_to(&mut self.findings),
            Error::Unsupported { what, .. } => {
                let found = what.strip_prefix("not supported: ").unwrap_or(&what);
                self.header_invalid(0, found, "what is known");
            }
            Error::Io { offset, len, source, .. }
                if source.kind() == std::io::ErrorKind::UnexpectedEof =>
            {
                self.find(
                    Code::OutsideFile,
                    offset,
                    format!("{len} bytes at {offset:#x}"),
                    format!("an end within the file of {} bytes", self.len),
                );
            }
            other => return Err(other),
        }
        Ok(())
    }
}
