//! `vdkit info` of an appliance.

use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use vdkit::ImageInfo;
use vdkit::jobs::describe_packaged;
use vdkit::ova::{Package, PackageLimits};
use vdkit::storage::{FileOptions, FileStorage, LockMode};

use crate::arguments::{Json, Opening};
use crate::failure::Failure;
use crate::incoming::{OVA, head_of, is_package};
use crate::output::{Fields, Output, Table, bytes_long, bytes_short};

/// Whether a file is an appliance.
pub(super) fn is_one(path: &Path) -> bool {
    is_package(None, path, &head_of(path))
}

pub(super) fn open(path: &Path, opening: &Opening) -> Result<Package, Failure> {
    let lock = if opening.force_share { LockMode::Off } else { LockMode::Auto };
    let storage = FileStorage::open(path, &FileOptions::read_only().lock(lock))?;
    Ok(Package::open(Arc::new(storage), &PackageLimits::default())?)
}

/// An appliance in the JSON answer.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct ApplianceAnswer<'a> {
    filename: String,
    format: &'a str,
    name: Option<&'a str>,
    descriptor: &'a str,
    manifest: Option<&'a str>,
    certificate: Option<&'a str>,
    disks: Vec<DiskAnswer<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct DiskAnswer<'a> {
    number: usize,
    id: &'a str,
    file: Option<&'a str>,
    file_bytes: u64,
    pieces: usize,
    compression: Option<&'a str>,
    capacity: Option<u64>,
    format: Option<&'static str>,
    virtual_size: Option<u64>,
}

fn answer<'a>(package: &'a Package, path: &Path) -> Result<ApplianceAnswer<'a>, Failure> {
    let registry = vdkit::registry();
    let disk = |index: usize| -> Result<DiskAnswer<'a>, Failure> {
        let found = &package.disks()[index];
        let image: Option<ImageInfo> = describe_packaged(&registry, package, index)?;
        let file = found.file.as_ref();
        Ok(DiskAnswer {
            number: index + 1,
            id: &found.disk.id,
            file: file.map(|file| file.href.as_str()),
            file_bytes: found.file_bytes(),
            pieces: found.members.len(),
            compression: file.and_then(|file| file.compression.as_deref()),
            capacity: found.disk.capacity,
            format: image.as_ref().map(|image| image.format),
            virtual_size: image.as_ref().map(|image| image.virtual_size),
        })
    };
    let disks = (0..package.disks().len()).map(disk).collect::<Result<_, _>>()?;
    Ok(ApplianceAnswer {
        filename: path.display().to_string(),
        format: OVA,
        name: package.descriptor().system.as_deref(),
        descriptor: package.descriptor_name(),
        manifest: package.manifest().map(|(name, _)| name),
        certificate: package.certificate(),
        disks,
    })
}

pub(super) fn print(
    package: &Package,
    path: &Path,
    json: Json,
    out: &mut Output,
) -> Result<(), Failure> {
    let answer = answer(package, path)?;
    if json.json {
        out.json(&answer);
        return Ok(());
    }
    let mut fields = Fields::default();
    fields.add("appliance", &answer.filename);
    fields.add("format", answer.format);
    if let Some(name) = answer.name {
        fields.add("machine", name);
    }
    fields.add("descriptor", answer.descriptor);
    let manifest = match answer.manifest {
        Some(name) => format!("{name} (holds of the descriptor; convert verifies the disks)"),
        None => "none".to_owned(),
    };
    fields.add("manifest", manifest);
    if let Some(name) = answer.certificate {
        fields.add("certificate", format!("{name} (not verified)"));
    }
    fields.print(out, 0);
    out.line("disks:");
    let mut table = Table::new(&[">no", "id", "file", ">file size", ">disk size", "format"]);
    for disk in &answer.disks {
        let size = disk.virtual_size.or(disk.capacity);
        let packed = disk.compression.map(|how| format!(" ({how})")).unwrap_or_default();
        table.row([
            disk.number.to_string(),
            disk.id.to_owned(),
            format!("{}{packed}", disk.file.unwrap_or("-")),
            disk.file.map_or("-".to_owned(), |_| bytes_short(disk.file_bytes)),
            size.map_or("-".to_owned(), bytes_short),
            disk.format.unwrap_or("-").to_owned(),
        ]);
    }
    table.print(out, 2);
    let sizes = answer.disks.iter().filter_map(|disk| Some((disk.capacity?, disk.virtual_size?)));
    for (told, found) in sizes.filter(|(told, found)| told != found) {
        out.line(format!(
            "a disk of {} is described as one of {}",
            bytes_long(found),
            bytes_long(told)
        ));
    }
    Ok(())
}
