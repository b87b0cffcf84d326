//! `qemu-img info`: describes an image, or each image of a backing chain.

use std::path::Path;

use vdkit::{BackingChoice, ChainLink, SnapshotInfo, describe_chain};

use super::{
    Call, Command, FORCE_SHARE, FORMAT, IMAGE_OPTS, OBJECT, OUTPUT, one_image, wants_json,
};
use crate::failure::Failure;
use crate::getopt::{Parsed, long, valued};
use crate::human;
use crate::json::{Dict, Value, pretty};
use crate::names::Image;
use crate::open::{Access, Named, failed_open, open_options, qemu_name, registry};
use crate::secrets::Objects;
use crate::specific;

/// Entry in the table of subcommands.
pub const COMMAND: Command = Command {
    name: "info",
    about: "Display information about image",
    operands: "FILE",
    options: &[
        FORMAT,
        IMAGE_OPTS,
        long("backing-chain", None, "describe each image of the backing chain"),
        FORCE_SHARE,
        valued('t', "cache", "CACHE", "cache mode"),
        OUTPUT,
        OBJECT,
    ],
    run,
};

/// What is known of one image of the chain.
struct Described {
    link: ChainLink,
    /// The name as it is shown.
    name: String,
    /// The path of the backing file, if the image names one.
    backing: Option<String>,
}

fn run(parsed: &Parsed, call: &mut Call) -> Result<u8, Failure> {
    let json = wants_json(parsed)?;
    let named = Named {
        text: one_image(parsed)?,
        format: parsed.last("format"),
        options: parsed.has("image-opts"),
    };
    let objects = Objects::parse(parsed.all("object"))?;
    let image = named.parse()?;
    let chain = parsed.has("backing-chain");
    let access = Access { share: parsed.has("force-share"), ..Access::read() };
    let (images, broken) = describe(&image, chain, access, &objects)?;
    if json {
        let mut values: Vec<Value> = images.iter().map(|image| value(image).into()).collect();
        let whole = match (chain, values.pop()) {
            (false, Some(only)) => only,
            (_, last) => {
                values.extend(last);
                values.into()
            }
        };
        call.out.line(pretty(&whole))?;
    } else {
        let texts: Vec<_> = images.iter().map(text).collect();
        call.out.text(texts.join("\n"))?;
    }
    match broken {
        Some(failure) => Err(failure),
        None => Ok(0),
    }
}

fn describe(
    image: &Image,
    chain: bool,
    access: Access,
    objects: &Objects,
) -> Result<(Vec<Described>, Option<Failure>), Failure> {
    let mut options = open_options(image, access, objects)?;
    if !chain {
        options.backing = BackingChoice::Ignore;
    }
    let Some(path) = image.path() else {
        return Err(crate::failure::could_not_open(
            &image.typed,
            "this place cannot be described yet",
        ));
    };
    let report = describe_chain(&registry(), path, &options)
        .map_err(|error| failed_open(image, options.format.as_deref(), &error))?;
    let described = report
        .links
        .into_iter()
        .map(|link| Described {
            name: link.path.display().to_string(),
            backing: link.info.backing_file.as_deref().map(|name| beside(&link.path, name)),
            link,
        })
        .collect();
    let broken = report.broken.map(|error| Failure::new(crate::failure::words(&error)));
    Ok((described, broken))
}

/// The path that a relative name in an image means.
fn beside(image: &Path, name: &str) -> String {
    let name = name.strip_prefix("file:").unwrap_or(name);
    match image.parent() {
        Some(folder) if !folder.as_os_str().is_empty() && !name.starts_with('/') => {
            folder.join(name).display().to_string()
        }
        _ => name.to_owned(),
    }
}

/// Bytes of a file in whole sectors, as QEMU counts them.
fn whole_sectors(bytes: u64) -> u64 {
    bytes.next_multiple_of(512)
}

/// Members that the answer for an image and for its file share.
fn file_value(name: &str, bytes: u64, allocated: u64) -> Dict {
    let data = Dict::default().with("type", "file").with("data", Dict::default());
    Dict::default()
        .with("filename", name)
        .with("format", "file")
        .with("dirty-flag", false)
        .with("actual-size", allocated)
        .with("virtual-size", whole_sectors(bytes))
        .with("format-specific", data)
        .with("children", Vec::new())
}

fn value(image: &Described) -> Dict {
    let (info, host) = (&image.link.info, &image.link.host);
    let snapshots: Vec<Value> = info.snapshots.iter().map(|one| snapshot(one).into()).collect();
    let format = qemu_name(info.format);
    let children: Vec<Value> = children(image)
        .into_iter()
        .map(|(name, file, bytes, allocated)| {
            Dict::default()
                .with("name", name)
                .with("info", file_value(&file, bytes, allocated))
                .into()
        })
        .collect();
    let backing_format = info.backing_format.as_deref().map(qemu_name);
    let mut dict = Dict::default()
        .with("filename", image.name.as_str())
        .with("format", format)
        .with("dirty-flag", info.dirty && format != "qed")
        .with("actual-size", host.allocated_bytes)
        .with("virtual-size", info.virtual_size)
        .with_some("cluster-size", info.cluster_size)
        .with_some("encrypted", info.encryption.is_some().then_some(true))
        .with_some("backing-filename", info.backing_file.as_deref())
        .with_some("full-backing-filename", image.backing.as_deref())
        .with_some("backing-filename-format", backing_format);
    if !snapshots.is_empty() {
        dict.put("snapshots", snapshots);
    }
    if let Some(data) = specific::of(&image.link) {
        dict.put("format-specific", Dict::default().with("type", format).with("data", data));
    }
    dict.with("children", children)
}

/// The files beneath an image, by QEMU's names: (name, file, bytes, allocated bytes), in the order
/// in which QEMU lists them.
fn children(image: &Described) -> Vec<(String, String, u64, u64)> {
    let host = &image.link.host;
    let mut files = specific::extent_files(&image.link);
    files.push(("file".to_owned(), image.name.clone(), host.file_bytes, host.allocated_bytes));
    files
}

fn snapshot(one: &SnapshotInfo) -> Dict {
    const BILLION: u64 = 1_000_000_000;
    Dict::default()
        .with("id", one.id.as_str())
        .with("name", one.name.as_str())
        .with("vm-state-size", one.vm_state_bytes)
        .with("date-sec", u64::from(one.date_seconds))
        .with("date-nsec", u64::from(one.date_nanoseconds))
        .with("vm-clock-sec", one.vm_clock_nanoseconds / BILLION)
        .with("vm-clock-nsec", one.vm_clock_nanoseconds % BILLION)
        .with_some("icount", one.icount)
}

fn text(image: &Described) -> String {
    let (info, host) = (&image.link.info, &image.link.host);
    let mut text = format!(
        "image: {}\nfile format: {}\nvirtual size: {} ({} bytes)\ndisk size: {}\n",
        image.name,
        qemu_name(info.format),
        human::size(info.virtual_size),
        info.virtual_size,
        human::size(host.allocated_bytes),
    );
    if info.encryption.is_some() {
        text += "encrypted: yes\n";
    }
    if let Some(bytes) = info.cluster_size {
        text += &format!("cluster_size: {bytes}\n");
    }
    if info.dirty && info.format == "qcow2" {
        text += "cleanly shut down: no\n";
    }
    if let (Some(name), Some(full)) = (&info.backing_file, &image.backing) {
        text += &format!("backing file: {name}");
        if full != name {
            text += &format!(" (actual path: {full})");
        }
        text += "\n";
        if let Some(format) = info.backing_format.as_deref() {
            text += &format!("backing file format: {}\n", qemu_name(format));
        }
    }
    if !info.snapshots.is_empty() {
        text += "Snapshot list:\n";
        text += &super::snapshot::table(&info.snapshots);
    }
    if let Some(data) = specific::of(&image.link).filter(|data| !data.is_empty()) {
        text += "Format specific information:\n";
        human::dump(&mut text, &data.into(), 1);
    }
    for (name, file, bytes, allocated) in children(image) {
        let bytes = whole_sectors(bytes);
        text += &format!(
            "Child node '/{name}':\n    filename: {file}\n    protocol type: file\n    file length: \
             {} ({bytes} bytes)\n    disk size: {}\n",
            human::size(bytes),
            human::size(allocated),
        );
    }
    text
}
