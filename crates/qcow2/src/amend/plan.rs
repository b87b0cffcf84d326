//! What an amendment asks for, held against what the image is.

use vdkit_block::{AmendRequest, BackingRef, Codec, Error, Options, Result};

use crate::header::{Extension, Header};
use crate::layout::{autoclear, compatible, extension};
use crate::options::SPECS;

/// What an image shall be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) backing: Option<BackingRef>,
}

impl Plan {
    /// # Errors
    /// [`Error::Unsupported`] for what cannot be changed in place, with the way round;
    /// [`Error::Invalid`] for what does not go together.
    pub(super) fn new(request: &AmendRequest, header: &Header) -> Result<Self> {
        let file = request.storage.name();
        refuse_fixed(file, &request.options, header)?;
        let backing = match &request.backing {
            Some(backing) => backing.clone(),
            None => header
                .backing_name
                .clone()
                .map(|name| BackingRef { name, format: header.backing_format() }),
        };
        let plan = Self { backing };
        plan.check(file, header)?;
        Ok(plan)
    }

    fn check(&self, file: &str, header: &Header) -> Result<()> {
        if self.backing.is_some() && header.data_file_raw() {
            return Err(Error::Invalid(format!(
                "{file}: a raw data file is the whole disk and cannot show what a backing file \
                 holds"
            )));
        }
        match &self.backing {
            Some(backing) if backing.name.is_empty() => {
                Err(Error::Invalid("the name of a backing file is empty".to_owned()))
            }
            _ => Ok(()),
        }
    }

    /// Whether the image is all this.
    pub(super) fn is_done(&self, header: &Header) -> bool {
        self.header(header) == *header
    }

    /// The header that says so.
    pub(super) fn header(&self, old: &Header) -> Header {
        let mut new = old.clone();
        // A writer clears what it does not know.
        new.autoclear &= autoclear::BITMAPS | autoclear::DATA_FILE_RAW;
        new.backing_name = self.backing.as_ref().map(|backing| backing.name.clone());
        let format = self.backing.as_ref().and_then(|backing| backing.format.as_deref());
        set_text(&mut new.extensions, extension::BACKING_FORMAT, format);
        new
    }
}

/// Sets or removes an extension with a text. A new one comes first: the names of features, which
/// are long and may be cut off for a moment, come last.
fn set_text(extensions: &mut Vec<Extension>, kind: u32, text: Option<&str>) {
    let at = extensions.iter().position(|e| e.kind == kind);
    match (at, text) {
        (Some(at), Some(text)) if extensions[at].data == text.as_bytes() => {}
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

/// The keys of what differs.
pub(super) fn changes(old: &Header, new: &Header) -> Vec<String> {
    let lazy = |h: &Header| h.compatible & compatible::LAZY_REFCOUNTS;
    [
        ("compat", old.version != new.version),
        ("refcount_bits", old.geometry.refcount_order != new.geometry.refcount_order),
        ("lazy_refcounts", lazy(old) != lazy(new)),
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

/// Refuses another value for what is as it was made.
fn refuse_fixed(file: &str, options: &Options, header: &Header) -> Result<()> {
    for spec in SPECS {
        let Some(value) = options.text(spec.key) else { continue };
        let same = match spec.key {
            "cluster_size" => options.size(spec.key) == Some(header.geometry.cluster_bytes()),
            "extended_l2" => options.switch(spec.key) == Some(header.geometry.extended),
            "compression_type" => (value == "zstd") == (header.codec == Codec::Zstd),
            _ => false,
        };
        if !same {
            return Err(Error::unsupported(
                file,
                format!("{} cannot be changed in place", spec.key),
                format!(
                    "a new image can have it: 'vdkit convert -O qcow2 -o {}={value} {file} NEW'",
                    spec.key
                ),
            ));
        }
    }
    Ok(())
}
