//! The driver interface of a format: probe, describe, open, create and check images.

use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use crate::compact::{CompactOptions, CompactReport};
use crate::encryption::{KeySlots, Secret};
use crate::error::{Error, Result};
use crate::format::{BackingRef, Format};
use crate::limits::Limits;
use crate::monitor::Monitor;
use crate::options::{OptionSpec, Options};
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

/// Image metadata, read without opening any other file.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
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
    /// The guest data is in another file that the metadata does not name (qcow2).
    #[serde(skip)]
    pub data_file_unnamed: bool,
    /// The only file of [`ImageInfo::files`] is readable as a raw image.
    pub data_file_raw: bool,
    /// Internal snapshots.
    pub snapshots: Vec<SnapshotInfo>,
    /// Persistent dirty bitmaps.
    pub bitmaps: Vec<BitmapInfo>,
    /// The header with the key slots, if the image is encrypted with one that is readable.
    #[serde(skip)]
    pub key_header: Option<KeyHeader>,
    /// The pieces of a disk that a list in the metadata names, in the disk's order (VMDK).
    #[serde(skip)]
    pub extents: Vec<ExtentInfo>,
    /// Format-specific properties, in a fixed order, as (key, value) texts.
    pub properties: Vec<(String, String)>,
}

impl ImageInfo {
    /// A description with only the size set.
    pub fn new(format: &'static str, virtual_size: u64) -> Self {
        Self { format, virtual_size, ..Self::default() }
    }

    /// The value of a format-specific property.
    pub fn property(&self, key: &str) -> Option<&str> {
        self.properties.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
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
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
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

/// The header of an encrypted image (LUKS).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyHeader {
    /// The cipher, such as `aes`.
    pub cipher: String,
    /// Mode of the cipher and how a sector's number enters it, such as `xts-plain64`.
    pub mode: String,
    /// Bits of the image's key.
    pub key_bits: u64,
    /// Hash of the key derivation.
    pub hash: String,
    /// The image's id.
    pub uuid: String,
    /// Bytes from the start of the header to the encrypted data.
    pub payload_offset: u64,
    /// Rounds of the derivation of the image key's digest.
    pub digest_iterations: u64,
    /// All key slots.
    pub slots: Vec<KeySlotInfo>,
}

/// A key slot, as the header describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeySlotInfo {
    /// It holds a key.
    pub active: bool,
    /// Rounds of the key derivation, if active.
    pub iterations: u64,
    /// Bytes from the start of the header to the key material.
    pub material_offset: u64,
    /// Number of stripes of the key material.
    pub stripes: u64,
}

/// A piece of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtentInfo {
    /// Bytes of the disk.
    pub guest_bytes: u64,
    /// The file, as the metadata names it; `None` is the image itself.
    pub file: Option<String>,
    /// How its bytes are stored, in the format's own word.
    pub kind: &'static str,
    /// Its bytes are compressed, as far as the image's own file says.
    pub compressed: bool,
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

/// Arguments of [`Creation::create`].
#[derive(Clone, Debug)]
pub struct CreateRequest {
    /// The empty file (or device) that becomes the image.
    pub storage: Arc<dyn Storage>,
    /// Empty files for guest data, in the order of [`Creation::new_files`].
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

impl CreateRequest {
    /// An image in one file, without a backing reference.
    pub fn new(storage: Arc<dyn Storage>, guest_bytes: u64, options: Options) -> Self {
        let files = Vec::new();
        Self { storage, files, guest_bytes, options, backing: None, backing_bytes: None }
    }

    /// For kinds of images without a place for a backing reference: fails if there is one. `kind`
    /// is such as `a raw image`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with this remedy.
    pub fn refuse_backing(&self, kind: &str, remedy: &str) -> Result<()> {
        if self.backing.is_none() {
            return Ok(());
        }
        let what = format!("not supported: {kind} with a backing file");
        Err(Error::unsupported(self.storage.name(), what, remedy))
    }
}

/// Arguments of [`Amendment::amend`].
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

impl AmendRequest {
    /// For formats that can change only the backing reference: fails if there are options.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn refuse_options(&self, format: &str) -> Result<()> {
        if self.options.is_empty() {
            return Ok(());
        }
        let what = format!("not supported: changing options of a {format} image in place");
        let remedy = "convert it to a new image that has them";
        Err(Error::unsupported(self.storage.name(), what, remedy))
    }
}

/// An image that is open nowhere, for [`FormatDriver::check`] and [`Compaction::compact`].
#[derive(Clone, Debug)]
pub struct OfflineImage<'a> {
    /// The image.
    pub storage: &'a Arc<dyn Storage>,
    /// The files of [`ImageInfo::files`], in that order.
    pub files: &'a [Arc<dyn Storage>],
    /// Resource limits.
    pub limits: Limits,
    /// Cancellation and progress.
    pub monitor: Monitor<'a>,
}

impl<'a> OfflineImage<'a> {
    /// An image of one file, with the default limits and no progress.
    pub fn new(storage: &'a Arc<dyn Storage>) -> Self {
        Self { storage, files: &[], limits: Limits::default(), monitor: Monitor::default() }
    }
}

/// Extent of a repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair {
    /// Report only.
    Nothing,
    /// Free leaked space.
    Leaks,
    /// Repair all damage. Invalid entries are cleared, unless there are unreferenced tables from
    /// which a human could still recover data.
    All,
    /// Repair all damage, and free such tables and their data.
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

    /// Whether further findings are only counted.
    pub fn is_full(&self) -> bool {
        self.findings.len() >= Self::FINDINGS_MAX
    }

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
        if !self.is_full() {
            self.findings.push(finding);
        }
    }

    /// [`CheckReport::add`] of a finding with these fields.
    pub fn note(
        &mut self,
        severity: Severity,
        offset: u64,
        structure: &'static str,
        message: impl Into<String>,
        repaired: bool,
    ) {
        self.add(Finding { severity, offset, structure, message: message.into(), repaired });
    }

    /// [`CheckReport::note`] of a finding of which there may be millions: its message is formatted
    /// only if it is listed.
    pub fn note_with(
        &mut self,
        severity: Severity,
        offset: u64,
        structure: &'static str,
        repaired: bool,
        message: impl FnOnce() -> String,
    ) {
        let message = if self.is_full() { String::new() } else { message() };
        self.add(Finding { severity, offset, structure, message, repaired });
    }

    /// [`CheckReport::note_with`] of an unrepaired corruption.
    pub fn corruption(
        &mut self,
        offset: u64,
        structure: &'static str,
        message: impl FnOnce() -> String,
    ) {
        self.note_with(Severity::Corruption, offset, structure, false, message);
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

/// Names of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverInfo {
    /// The name, such as `qcow2`.
    pub name: &'static str,
    /// Other accepted names.
    pub aliases: &'static [&'static str],
    /// File name extensions, without the dot.
    pub extensions: &'static [&'static str],
    /// One-line description.
    pub description: &'static str,
}

/// The driver of a format. One static value per format, listed in the facade's registry.
///
/// These methods suffice for a format that is only read. What some formats can do besides is in
/// traits of their own, each reached by a query; [`capabilities!`](crate::capabilities!) answers
/// them.
///
/// # Errors
/// Unless a method says more: those of the storages; [`Error::Corrupt`] for damage; [`Error::Limit`] for an
/// image that exceeds [`Limits`]; [`Error::Unsupported`] for a feature that is not supported.
pub trait FormatDriver: Send + Sync + fmt::Debug {
    /// The format's names.
    fn info(&self) -> DriverInfo;

    /// Probes an image of `len` bytes by its first bytes (`head`, up to 64 KiB) and its last bytes
    /// (`tail`, up to 512). All drivers are first asked with an empty `tail`. Only if none says
    /// [`Probe::Yes`] are they asked again with `tail` read from the file. Drivers that decide by
    /// `head` ignore `tail`.
    fn probe(&self, head: &[u8], tail: &[u8], len: u64) -> Probe;

    /// Describes an image in a bounded number of reads, independent of its size.
    fn describe(&self, storage: &Arc<dyn Storage>, limits: &Limits) -> Result<ImageInfo>;

    /// Opens an image. The amount read does not grow with the image's data.
    ///
    /// # Errors
    /// [`Error::Key`] for an encrypted image, which [`KeyedImages::open_with_keys`] opens;
    /// [`Error::ReadOnly`] if it is to be written and its storage cannot be; [`Error::Unsupported`] if its
    /// format is only read.
    fn open(&self, request: OpenRequest) -> Result<Arc<dyn Format>>;

    /// Checks an image and repairs it as `repair` allows (its files must then be writable). Damage is
    /// a [`Finding`] of the report.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the header is damaged so that nothing can be checked;
    /// [`Error::Interrupted`].
    fn check(&self, image: &OfflineImage<'_>, repair: Repair) -> Result<CheckReport>;

    crate::capabilities::queries! {
        /// Creating and writing images.
        creation: Creation,
        /// Images with encryption keys.
        keyed_images: KeyedImages,
        /// Compacting images in place.
        compaction: Compaction,
        /// Changing properties of images in place.
        amendment: Amendment,
    }
}

/// Creating images; see [`FormatDriver::creation`].
pub trait Creation: FormatDriver {
    /// Options of [`Creation::create`].
    fn options(&self) -> &'static [OptionSpec];

    /// Creates an image.
    ///
    /// # Errors
    /// [`Error::Key`] if encryption is requested and [`Options::key`] is not set; [`Error::Invalid`] for
    /// conflicting options; [`Error::Limit`] for a size beyond the format's limit.
    fn create(&self, request: &CreateRequest) -> Result<()>;

    /// Unit of allocation in bytes with these options.
    fn cluster_bytes(&self, options: &Options) -> Result<u64>;

    /// Host bytes for an image with `data_clusters` allocated guest clusters (of
    /// [`Creation::cluster_bytes`]), uncompressed.
    fn measure(&self, guest_bytes: u64, options: &Options, data_clusters: u64) -> Result<Measured>;

    /// Names of the other files of a new image: relative to its folder or absolute. `image` is the
    /// image's own file name, without folders. The caller creates them empty for
    /// [`Creation::create`] and renames them into place together with the image.
    ///
    /// # Errors
    /// [`Error::Invalid`] for conflicting options, and for more than [`Limits::files_max`].
    fn new_files(&self, image: &str, guest_bytes: u64, options: &Options) -> Result<Vec<String>> {
        let _ = (image, guest_bytes, options);
        Ok(Vec::new())
    }

    /// Whether these options request encryption, which needs [`Options::key`].
    fn encrypts(&self, options: &Options) -> bool {
        let _ = options;
        false
    }

    /// Whether an image with these options can be written to a pipe: in ascending order, without
    /// seeking back.
    fn writes_in_order(&self, options: &Options) -> bool {
        let _ = options;
        false
    }

    /// [`Creation::create`], and opens the image for writing. Formats that are written in one pass
    /// ([`FormatCaps::one_pass`](crate::FormatCaps::one_pass)) must not read anything back here,
    /// since the storage may be a pipe.
    fn create_open(&self, request: &CreateRequest, limits: &Limits) -> Result<Arc<dyn Format>> {
        self.create(request)?;
        let open = OpenRequest {
            storage: request.storage.clone(),
            files: request.files.clone(),
            writable: true,
            limits: *limits,
        };
        match (self.keyed_images(), request.options.key()) {
            (Some(keyed), Some(key)) => keyed.open_with_keys(open, std::slice::from_ref(key)),
            _ => self.open(open),
        }
    }
}

/// Images with encryption keys; see [`FormatDriver::keyed_images`].
pub trait KeyedImages {
    /// As [`FormatDriver::open`], trying `keys` in order on an encrypted image.
    ///
    /// # Errors
    /// [`Error::Key`] if the image is encrypted and no key fits.
    fn open_with_keys(&self, request: OpenRequest, keys: &[Secret]) -> Result<Arc<dyn Format>>;

    /// The key slots of an encrypted image; `None` if it has none.
    ///
    /// # Errors
    /// A damaged header; I/O.
    fn key_slots(
        &self,
        storage: &Arc<dyn Storage>,
        limits: &Limits,
    ) -> Result<Option<Box<dyn KeySlots>>>;
}

/// Compacting in place; see [`FormatDriver::compaction`].
pub trait Compaction {
    /// Compacts an image in place; its files must be writable. Guest data stays the same, also
    /// after an interruption at any point; run it again to finish.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for a damaged image, which must be repaired first; [`Error::Interrupted`].
    fn compact(&self, image: &OfflineImage<'_>, options: CompactOptions) -> Result<CompactReport>;
}

/// Changing properties in place; see [`FormatDriver::amendment`].
pub trait Amendment {
    /// Whether [`Amendment::amend`] can change the backing reference.
    fn amends_backing(&self) -> bool;

    /// Changes properties of an image in place. Guest data stays the same. A crash leaves the old
    /// or the new properties, or some of each; repeat the call to finish. Returns the keys that
    /// changed.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an option that cannot be changed in place; [`Error::Invalid`] for
    /// conflicting options; [`Error::Interrupted`].
    fn amend(&self, request: &AmendRequest, monitor: &Monitor<'_>) -> Result<Vec<String>>;
}

/// What callers need beyond the contract: each capability with its fallback or its error.
impl dyn FormatDriver + '_ {
    /// See [`DriverInfo::name`].
    pub fn name(&self) -> &'static str {
        self.info().name
    }

    /// See [`Creation::options`]; empty for a format that is only read.
    pub fn options(&self) -> &'static [OptionSpec] {
        self.creation().map_or(&[], Creation::options)
    }

    /// The driver's [`Creation`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] about `file` for a format that is only read.
    pub fn require_creation(&self, file: &str) -> Result<&dyn Creation> {
        self.creation().ok_or_else(|| {
            Error::unsupported(
                file,
                format!("not supported: writing a {} image", self.name()),
                "this format is only read: choose qcow2 or another one for what is written",
            )
        })
    }

    /// See [`Creation::create`].
    ///
    /// # Errors
    /// As [`Creation::create`]; [`Error::Unsupported`] for a format that is only read.
    pub fn create(&self, request: &CreateRequest) -> Result<()> {
        self.require_creation(request.storage.name())?.create(request)
    }

    /// See [`Creation::encrypts`].
    pub fn encrypts(&self, options: &Options) -> bool {
        self.creation().is_some_and(|creation| creation.encrypts(options))
    }

    /// See [`KeyedImages::open_with_keys`]; other formats need no keys.
    pub fn open_with_keys(&self, request: OpenRequest, keys: &[Secret]) -> Result<Arc<dyn Format>> {
        match self.keyed_images() {
            Some(keyed) => keyed.open_with_keys(request, keys),
            None => self.open(request),
        }
    }

    /// See [`Compaction::compact`].
    ///
    /// # Errors
    /// As [`Compaction::compact`]; [`Error::Unsupported`] for other formats.
    pub fn compact(
        &self,
        image: &OfflineImage<'_>,
        options: CompactOptions,
    ) -> Result<CompactReport> {
        match self.compaction() {
            Some(compaction) => compaction.compact(image, options),
            None => Err(Error::unsupported(
                image.storage.name(),
                format!("not supported: compacting a {} image in place", self.name()),
                "convert it to a new image, which has no free space in it",
            )),
        }
    }

    /// Whether [`Amendment::amend`] can change the backing reference.
    pub fn amends_backing(&self) -> bool {
        self.amendment().is_some_and(Amendment::amends_backing)
    }

    /// See [`Amendment::amend`].
    ///
    /// # Errors
    /// As [`Amendment::amend`]; [`Error::Unsupported`] for other formats.
    pub fn amend(&self, request: &AmendRequest, monitor: &Monitor<'_>) -> Result<Vec<String>> {
        match self.amendment() {
            Some(amendment) => amendment.amend(request, monitor),
            None => Err(Error::unsupported(
                request.storage.name(),
                format!("not supported: changing properties of a {} image in place", self.name()),
                "convert it to a new image that has them",
            )),
        }
    }
}
