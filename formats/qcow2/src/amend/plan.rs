//! Validates a requested amendment against the image.

use vdkit_block::{AmendRequest, BackingRef, Codec, Error, Monitor, Options, Remedy, Result};

use crate::check;
use crate::header::{Encryption, Extension, FEATURE_NAMES_CLUSTER_MIN, Header};
use crate::layout::{autoclear, compatible, extension, incompatible};
use crate::options::{self, ENCRYPT_FORMAT, SPECS};
use crate::snapshots::Snapshot;

/// Target properties of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) version: u32,
    pub(super) refcount_order: u32,
    codec: Codec,
    lazy_refcounts: bool,
    backing: Option<BackingRef>,
    data_file: Option<String>,
    data_file_raw: bool,
}

/// Options that [`Plan::new`] handles itself.
const CHANGEABLE: &[&str] = &[
    "compat",
    "lazy_refcounts",
    "refcount_bits",
    "compression_type",
    "backing_file",
    "backing_fmt",
    "data_file",
    "data_file_raw",
];

fn invalid<T>(file: &str, what: impl std::fmt::Display) -> Result<T> {
    Err(Error::invalid_for(&file, what.to_string()))
}

impl Plan {
    /// # Errors
    /// [`Error::Unsupported`] for what cannot be changed in place, with a workaround;
    /// [`Error::Invalid`] for invalid combinations.
    pub(super) fn new(request: &AmendRequest, header: &Header) -> Result<Self> {
        let (file, asked) = (request.storage.name(), &request.options);
        refuse_fixed(file, asked, header)?;
        let version = options::version(asked).unwrap_or(header.version);
        let refcount_order =
            options::refcount_order(asked)?.unwrap_or(header.geometry.refcount_order);
        let codec = options::codec(asked).unwrap_or(header.codec);
        // Version 2 has no lazy refcounts, so a downgrade turns them off unless the options request
        // them.
        let lazy = asked.switch("lazy_refcounts");
        let lazy_refcounts = lazy.unwrap_or(version >= 3 && header.lazy_refcounts());
        let data_file = match asked.text("data_file") {
            Some(name) => Some(name.to_owned()),
            None => header.data_file_name().filter(|_| header.has_data_file()),
        };
        let data_file_raw = asked.switch("data_file_raw").unwrap_or(header.data_file_raw());
        let backing = backing(request, header)?;
        let plan = Self {
            version,
            refcount_order,
            codec,
            lazy_refcounts,
            backing,
            data_file,
            data_file_raw,
        };
        plan.check_data_file(file, header)?;
        plan.check_version(file, header)?;
        Ok(plan)
    }

    fn check_data_file(&self, file: &str, header: &Header) -> Result<()> {
        if !header.has_data_file() && (self.data_file.is_some() || self.data_file_raw) {
            return Err(Error::unsupported(
                file,
                "a data file cannot be given to an image that has none",
                Remedy::Convert {
                    file: file.to_owned(),
                    target: Some(("qcow2", "data_file=FILE".to_owned())),
                    new_key: false,
                },
            ));
        }
        if self.data_file.as_ref().is_some_and(String::is_empty) {
            return invalid(file, "the name of a data file is empty");
        }
        if self.makes_raw(header) {
            if self.data_file != header.data_file_name() {
                return invalid(
                    file,
                    "data_file_raw=on changes the data file, and data_file=NAME names another one; \
                     do one after the other",
                );
            }
            if header.encryption != Encryption::None {
                return invalid(file, "the data file of an encrypted image is no raw disk");
            }
        }
        if self.backing.is_some() && self.data_file_raw {
            return invalid(
                file,
                "a raw data file is the whole disk and cannot show what a backing file holds",
            );
        }
        match &self.backing {
            Some(backing) if backing.name.is_empty() => {
                invalid(file, "the name of a backing file is empty")
            }
            _ => Ok(()),
        }
    }

    fn check_version(&self, file: &str, header: &Header) -> Result<()> {
        if self.version >= 3 {
            return Ok(());
        }
        let unknown = header.compatible & !compatible::LAZY_REFCOUNTS;
        let has = |kind| header.extension(kind).is_some();
        let longer = header.header_bytes > crate::layout::V3_HEADER_BYTES;
        let obstacles = [
            (self.lazy_refcounts, "lazy_refcounts=on", "turn that off"),
            (self.refcount_order != 4, "refcounts of another width", "add refcount_bits=16"),
            (header.geometry.extended, "extended L2 entries", "convert instead"),
            (header.has_data_file(), "a data file", "convert instead"),
            (self.codec == Codec::Zstd, "zstd compression", "convert instead"),
            (has(extension::BITMAPS), "bitmaps", "remove them first"),
            (
                header.encryption == Encryption::Luks && header.version >= 3,
                "zero flags, and encrypted clusters cannot be zeroed without a key",
                "convert instead",
            ),
            (unknown != 0 || longer, "unknown features", "convert instead"),
        ];
        match obstacles.iter().find(|(there, ..)| *there) {
            Some((_, what, remedy)) => invalid(
                file,
                format!("compat=0.10 is not possible: version 2 has no {what}; {remedy}"),
            ),
            None => Ok(()),
        }
    }

    /// Checks what the target requires of the tables.
    pub(super) fn check_tables(
        &self,
        request: &AmendRequest,
        header: &Header,
        snapshots: &[Snapshot],
        monitor: &Monitor<'_>,
    ) -> Result<()> {
        let (storage, limits) = (&request.storage, &request.limits);
        let file = storage.name();
        if self.codec != header.codec && check::any_compressed(storage, limits, monitor)? {
            return Err(Error::unsupported(
                file,
                format!("there are clusters compressed with {} already", header.codec),
                Remedy::Convert {
                    file: file.to_owned(),
                    target: Some(("qcow2", format!("compression_type={}", self.codec))),
                    new_key: false,
                },
            ));
        }
        if self.version < 3 && header.version >= 3 {
            for snapshot in snapshots {
                check_sizes(file, snapshot, header.guest_bytes)?;
            }
        }
        Ok(())
    }

    /// Whether the data file becomes raw and was not before.
    pub(super) fn makes_raw(&self, header: &Header) -> bool {
        self.data_file_raw && !header.data_file_raw()
    }

    /// Whether snapshots lack fields that version 3 requires: the sizes of their disk and VM state.
    pub(super) fn needs_sizes(&self, header: &Header, snapshots: &[Snapshot]) -> bool {
        self.version >= 3 && header.version < 3 && snapshots.iter().any(|s| !s.has_sizes())
    }

    pub(super) fn is_done(&self, header: &Header) -> bool {
        self.header(header) == *header && header.geometry.refcount_order == self.refcount_order
    }

    /// The target header. Keeps the refcount width, which changes with the refcounts.
    pub(super) fn header(&self, old: &Header) -> Header {
        let mut new = old.clone();
        new.version = self.version;
        new.codec = self.codec;
        // A writer must clear unknown autoclear bits.
        new.autoclear &= autoclear::KNOWN;
        set_bit(&mut new.incompatible, incompatible::COMPRESSION_TYPE, self.codec == Codec::Zstd);
        set_bit(&mut new.compatible, compatible::LAZY_REFCOUNTS, self.lazy_refcounts);
        set_bit(&mut new.autoclear, autoclear::DATA_FILE_RAW, self.data_file_raw);
        if self.version < 3 {
            (new.incompatible, new.compatible, new.autoclear) = (0, 0, 0);
            new.extensions.retain(|e| e.kind != extension::FEATURE_NAMES);
        } else if old.version < 3 && old.geometry.cluster_bytes() >= FEATURE_NAMES_CLUSTER_MIN {
            new.extensions.push(Header::feature_name_table());
        }
        new.backing_name = self.backing.as_ref().map(|backing| backing.name.clone());
        let format = self.backing.as_ref().and_then(|backing| backing.format.as_deref());
        set_text(&mut new.extensions, extension::BACKING_FORMAT, format);
        if old.has_data_file() {
            set_text(&mut new.extensions, extension::DATA_FILE, self.data_file.as_deref());
        }
        new
    }
}

fn set_bit(bits: &mut u64, bit: u64, on: bool) {
    *bits = if on { *bits | bit } else { *bits & !bit };
}

/// Version 2 has 32 bits for the VM state size, and no field for the disk size.
fn check_sizes(file: &str, snapshot: &Snapshot, guest_bytes: u64) -> Result<()> {
    let name = String::from_utf8_lossy(&snapshot.name);
    let what = match snapshot.disk_bytes {
        Some(bytes) if bytes != guest_bytes => format!(
            "version 2 has one size for all snapshots: '{name}' is of a disk of {bytes} bytes, and \
             this one has {guest_bytes}"
        ),
        _ if snapshot.vm_state_bytes > u64::from(u32::MAX) => format!(
            "version 2 cannot hold a VM state of 4 GiB: that of snapshot '{name}' has {} bytes",
            snapshot.vm_state_bytes
        ),
        _ => return Ok(()),
    };
    Err(Error::unsupported(file, what, "delete the snapshot, or convert to a new image"))
}

/// The target backing file: from the request's own field, or from its options.
fn backing(request: &AmendRequest, header: &Header) -> Result<Option<BackingRef>> {
    let old =
        header.backing_name.clone().map(|name| BackingRef::new(name, header.backing_format()));
    let options = &request.options;
    let format = options.text("backing_fmt").map(str::to_owned);
    Ok(match (&request.backing, options.text("backing_file"), old) {
        (Some(backing), ..) => backing.clone(),
        (None, Some(""), _) => None,
        (None, Some(name), _) => Some(BackingRef::new(name, format)),
        (None, None, Some(old)) => Some(BackingRef::new(old.name, format.or(old.format))),
        (None, None, None) if format.is_some() => {
            return invalid(
                request.storage.name(),
                "backing_fmt without a backing file; name it with backing_file=NAME",
            );
        }
        (None, None, None) => None,
    })
}

/// Sets or removes a text extension. A new one is inserted first, so that the long feature names,
/// which may be temporarily cut off, stay last.
fn set_text(extensions: &mut Vec<Extension>, kind: u32, text: Option<&str>) {
    let at = extensions.iter().position(|e| e.kind == kind);
    match (at, text) {
        (Some(at), Some(text)) => extensions[at].data = text.as_bytes().to_vec(),
        (None, Some(text)) => {
            extensions.insert(0, Extension { kind, offset: 0, data: text.as_bytes().to_vec() });
        }
        (Some(at), None) => {
            extensions.remove(at);
        }
        (None, None) => {}
    }
}

/// The keys of the properties that differ.
pub(super) fn changes(old: &Header, new: &Header) -> Vec<String> {
    [
        ("compat", old.version != new.version),
        ("refcount_bits", old.geometry.refcount_order != new.geometry.refcount_order),
        ("lazy_refcounts", old.lazy_refcounts() != new.lazy_refcounts()),
        ("compression_type", old.codec != new.codec),
        ("backing_file", old.backing_name != new.backing_name),
        ("backing_fmt", old.backing_format() != new.backing_format()),
        ("data_file", old.data_file_name() != new.data_file_name()),
        ("data_file_raw", old.data_file_raw() != new.data_file_raw()),
    ]
    .into_iter()
    .filter(|(_, differs)| *differs)
    .map(|(key, _)| key.to_owned())
    .collect()
}

/// The workaround for changing a property that is fixed at creation.
fn way_round(file: &str, key: &str, value: &str, header: &Header) -> Remedy {
    let encrypted = header.encryption == Encryption::Luks;
    if key.ends_with("iter-time") && encrypted {
        let milliseconds = value.to_owned();
        return Remedy::ChangeKey { file: file.to_owned(), milliseconds };
    }
    let options = match key.starts_with("encrypt.") && key != ENCRYPT_FORMAT {
        true => format!("{ENCRYPT_FORMAT}=luks,{key}={value}"),
        false => format!("{key}={value}"),
    };
    let new_key = key.starts_with("encrypt.");
    Remedy::Convert { file: file.to_owned(), target: Some(("qcow2", options)), new_key }
}

/// Rejects another value for a property that is fixed at creation.
fn refuse_fixed(file: &str, options: &Options, header: &Header) -> Result<()> {
    for spec in SPECS.iter().filter(|spec| !CHANGEABLE.contains(&spec.key)) {
        let Some(value) = options.text(spec.key) else { continue };
        let same = match spec.key {
            "cluster_size" => options.size(spec.key) == Some(header.geometry.cluster_bytes()),
            "extended_l2" => options.switch(spec.key) == Some(header.geometry.extended),
            ENCRYPT_FORMAT => header.encryption == Encryption::Luks && value == "luks",
            _ => false,
        };
        if !same {
            let what = format!("{} cannot be changed in place", spec.key);
            return Err(Error::unsupported(file, what, way_round(file, spec.key, value, header)));
        }
    }
    Ok(())
}
