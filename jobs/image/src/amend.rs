//! Amend: changes properties of an image in place.

use std::path::{Path, PathBuf};

use serde::Serialize;
use vdkit_block::{AmendRequest, Error, Monitor, OptionKind, OptionSpec, Options, Remedy, Result};
use vdkit_chain::{BackingChoice, Disk, OpenOptions, Registry, open_image};

use crate::resize::{ResizeOptions, resize};
use vdkit_copy::{NewBacking, find_backing, refuse_protocol_name};

/// An option of amend too, as in qemu-img.
const SIZE: OptionSpec = OptionSpec {
    key: "size",
    kind: OptionKind::Size,
    default: "",
    help: "bytes of the guest disk, not fewer than now",
};

/// Result of an amend.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct AmendReport {
    /// The image.
    #[serde(serialize_with = "vdkit_block::lossy::path")]
    pub image: PathBuf,
    /// Keys of the changed options.
    pub changed: Vec<String>,
}

/// Changes options of an image, given as `key=value[,key=value]` texts. After an interruption or a
/// crash it can be repeated with the same result.
///
/// # Errors
/// [`Error::Invalid`] for an unknown key and for conflicting values, [`Error::Unsupported`] for
/// options of new images only; errors of the format and storages.
pub fn amend<'a>(
    registry: &Registry,
    image: &Path,
    opening: &OpenOptions,
    texts: impl IntoIterator<Item = &'a str>,
    monitor: &Monitor<'_>,
) -> Result<AmendReport> {
    let alone = opening.clone().backing(BackingChoice::Ignore);
    let opened = open_image(registry, image, &alone)?;
    let mut specs = opened.driver.options().to_vec();
    specs.push(SIZE);
    let mut options = Options::parse(opened.driver.name(), &specs, texts)?;
    if let Some(name) = options.text("backing_file").filter(|name| !name.is_empty()) {
        let backing = NewBacking::new(name, options.text("backing_fmt").map(str::to_owned));
        let found = find_backing(registry, image, &backing, opening, true)?;
        let format = found.reference.format.unwrap_or_default();
        options.set(opened.driver.name(), &specs, "backing_fmt", &format)?;
    }
    if let Some(name) = options.text("data_file") {
        refuse_protocol_name(image, name)?;
    }
    let size = options.size("size");
    let grows = size.filter(|size| *size != opened.info.virtual_size);
    if let Some(bytes) = grows.filter(|size| *size < opened.info.virtual_size) {
        let file = image.display().to_string();
        let why = "a smaller size loses what lies beyond it; amend only enlarges a disk";
        let error = Error::invalid_for(&file, why);
        return Err(error.with_remedy(Remedy::Resize { file, bytes, shrink: true }));
    }
    let mut changed = opened.driver.amend(
        &AmendRequest {
            storage: opened.storage,
            files: opened.files,
            backing: None,
            options,
            limits: opening.limits,
        },
        monitor,
    )?;
    if let Some(size) = grows {
        let disk = Disk::open(registry, image, opening)?;
        disk.warnings().for_each(|warning| monitor.progress.message(warning));
        let resized = resize(&disk, size, &ResizeOptions::default(), monitor);
        let closed = disk.close();
        resized.and(closed)?;
        changed.push("size".to_owned());
    }
    Ok(AmendReport { image: image.to_owned(), changed })
}
