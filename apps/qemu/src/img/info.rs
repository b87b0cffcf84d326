//! `qemu-img info`: describes an image, or each image of a backing chain.

use std::path::Path;

use vdkit::{BackingChoice, ChainLink, SnapshotInfo, describe_chain};

use super::{
    Call, Command, FORCE_SHARE, FORMAT, IMAGE_OPTS, OBJECT, OUTPUT, one_image, wants_json,
};
use crate::failure::{Failure, could_not_open};
use crate::getopt::{Parsed, flag};
use crate::human;
use crate::json::{Dict, Value, pretty, quote};
use crate::names::{Flat, Image, Place};
use crate::open::{Access, Named, failed_open, is_protocol, open_options, qemu_name, registry};
use crate::secrets::Objects;
use crate::specific::{self, ExtentFile};

/// Entry in the table of subcommands.
pub const COMMAND: Command = Command {
    name: "info",
    about: "Display information about image",
    operands: "FILE",
    options: &[
        FORMAT,
        IMAGE_OPTS,
        flag('b', "backing-chain", "describe each image of the backing chain"),
        FORCE_SHARE,
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
    /// The files of its extents.
    extents: Vec<ExtentFile>,
    /// The file itself is described, not its content.
    protocol: bool,
    /// What the image is in.
    place: Place,
}

impl Described {
    /// Shows the part of the file that is the disk, and names an image as QEMU does that needs more
    /// than a path.
    fn show_options(&mut self, named: &Named<'_>, window: Option<(u64, Option<u64>)>) {
        const SHOWN: &[&str] = &["offset", "size", "key-secret", "encrypt.key-secret"];
        if let Some((offset, bytes)) = window {
            let rest = self.link.info.virtual_size.saturating_sub(offset);
            self.link.info.virtual_size = bytes.unwrap_or(rest.next_multiple_of(512));
        }
        let mut flat = properties(named).unwrap_or_default();
        let shown: Vec<_> = SHOWN.iter().filter_map(|key| Some((*key, flat.take(key)?))).collect();
        if shown.is_empty() {
            return;
        }
        let file = Dict::default().with("driver", "file").with("filename", self.name.as_str());
        let dict =
            Dict::default().with("driver", qemu_name(self.link.info.format)).with("file", file);
        let dict = shown.into_iter().fold(dict, |dict, (key, value)| dict.with(key, value));
        self.name = format!("json:{}", inline(&dict.into()));
    }

    /// Bytes of a cluster; QEMU names none for parallels.
    fn cluster_size(&self) -> Option<u64> {
        self.link.info.cluster_size.filter(|_| self.link.info.format != "parallels")
    }

    /// Bytes that the image takes in all of its files; `None` if nothing tells them.
    fn allocated(&self) -> Option<u64> {
        let extents = self.extents.iter().map(|extent| extent.allocated).sum::<u64>();
        matches!(self.place, Place::File(_)).then(|| self.link.host.allocated_bytes + extents)
    }

    /// The driver of the file beneath, by QEMU's name.
    fn protocol_name(&self) -> &'static str {
        match &self.place {
            Place::Nbd(_) => "nbd",
            Place::Debug(debug) => debug.driver(),
            Place::File(_) | Place::Null(_) => "file",
        }
    }
}

fn run(parsed: &Parsed, call: &mut Call) -> Result<u8, Failure> {
    let json = wants_json(parsed)?;
    let named = Named::of(parsed, one_image(parsed)?);
    let objects = Objects::parse(parsed.all("object"))?;
    let image = named.parse()?;
    let chain = parsed.has("backing-chain");
    let access = Access { share: parsed.has("force-share"), ..Access::read() };
    if let Place::Null(bytes) = image.place {
        null(&named, bytes, json, call)?;
        return Ok(0);
    }
    let mut images = describe(&image, chain, access, &objects)?;
    if let Some(top) = images.first_mut() {
        top.protocol = driver(&named).is_some_and(|driver| is_protocol(&driver));
        top.show_options(&named, image.window);
    }
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
    Ok(0)
}

/// The driver that the name or `-f` asks for.
fn driver(named: &Named<'_>) -> Option<String> {
    if let Some(format) = named.format {
        return Some(format.to_owned());
    }
    properties(named)?.take("driver")
}

/// The properties that make up a name.
fn properties(named: &Named<'_>) -> Option<Flat> {
    match named.text.strip_prefix("json:") {
        Some(json) => Flat::from_json(json).ok(),
        None if named.options => Flat::from_keys(named.text, Some("file")).ok(),
        None => None,
    }
}

/// Describes a disk that is in no file.
fn null(named: &Named<'_>, bytes: u64, json: bool, call: &mut Call) -> Result<(), Failure> {
    let direct = driver(named).is_some_and(|driver| driver.starts_with("null-"));
    let mut name = "null-co://".to_owned();
    let given = properties(named).unwrap_or_default();
    let (size, zeroes) = (given.get("size"), given.get("read-zeroes"));
    if size.is_some() || zeroes.is_some() {
        let dict = Dict::default()
            .with_some("read-zeroes", zeroes)
            .with("driver", "null-co")
            .with_some("size", size);
        name = format!("json:{}", inline(&dict.into()));
    }
    if !json {
        let size = human::size(bytes);
        let format = if direct { "null-co" } else { "raw" };
        call.out.text(format!(
            "image: {name}\nfile format: {format}\nvirtual size: {size} ({bytes} bytes)\ndisk size: 0 B\n"
        ))?;
        if !direct {
            call.out.text(format!(
                "Child node '/file':\n    filename: {name}\n    protocol type: null-co\n    file length: \
                 {size} ({bytes} bytes)\n    disk size: 0 B\n"
            ))?;
        }
        return Ok(());
    }
    let of = |format: &str| {
        Dict::default()
            .with("filename", name.as_str())
            .with("format", format)
            .with("actual-size", 0_u64)
            .with("virtual-size", bytes)
    };
    let below = of("null-co").with("children", Vec::new());
    let whole = match direct {
        true => below,
        false => {
            let child = Dict::default().with("name", "file").with("info", below);
            of("raw").with("children", vec![child.into()])
        }
    };
    call.out.line(pretty(&whole.into()))?;
    Ok(())
}

/// A value on one line, as it stands in a name.
fn inline(value: &Value) -> String {
    match value {
        Value::Dict(dict) => {
            let members = dict.in_order().into_iter().map(|(key, value)| {
                let mut text = String::new();
                quote(&mut text, key);
                text + ": " + &inline(value)
            });
            format!("{{{}}}", members.collect::<Vec<_>>().join(", "))
        }
        other => pretty(other),
    }
}

fn describe(
    image: &Image,
    chain: bool,
    access: Access,
    objects: &Objects,
) -> Result<Vec<Described>, Failure> {
    let mut options = open_options(image, access, objects)?;
    if !chain {
        options.backing = BackingChoice::Ignore;
    }
    // A part of a file is described as its file; `show_options` then says which part it is.
    let path = match &image.place {
        Place::File(path) => path.clone(),
        _ => image.opened(),
    };
    let report = describe_chain(&registry(), path, &options)
        .map_err(|error| failed_open(image, options.format.as_deref(), &error))?;
    if let Some(error) = report.broken {
        let why = crate::failure::words(&error);
        let why = why.strip_prefix("Could not open backing file: ").unwrap_or(&why);
        let name = why.split('\'').nth(1).unwrap_or(&image.typed);
        return Err(could_not_open(name, why));
    }
    let mut images = Vec::new();
    for mut link in report.links {
        let extents = specific::extent_files(&link)
            .map_err(|error| could_not_open(&image.typed, crate::failure::words(&error)))?;
        if link.info.format == "vmdk" && link.info.cluster_size.is_none() {
            link.info.cluster_size = extents.iter().find_map(|extent| extent.cluster);
        }
        let top = images.is_empty();
        images.push(Described {
            name: if top { image.shown() } else { link.path.display().to_string() },
            place: if top { image.place.clone() } else { Place::File(link.path.clone()) },
            backing: link.info.backing_file.as_deref().map(|name| beside(&link.path, name)),
            extents,
            protocol: false,
            link,
        });
    }
    Ok(images)
}

/// The path that a relative name in an image means. A name with a protocol stays as it is.
fn beside(image: &Path, name: &str) -> String {
    let protocol = name.find([':', '/']).is_some_and(|at| name[at..].starts_with(':'));
    match image.parent() {
        Some(folder) if !folder.as_os_str().is_empty() && !name.starts_with('/') && !protocol => {
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

/// A child by its name.
fn child_value(name: &str, info: Dict) -> Value {
    Dict::default().with("name", name).with("info", info).into()
}

/// The members of what an image is in, if that is no file.
fn below_value(image: &Described) -> Dict {
    let dict = Dict::default()
        .with("filename", image.name.as_str())
        .with("format", image.protocol_name())
        .with("virtual-size", whole_sectors(image.link.host.file_bytes));
    match &image.place {
        Place::Debug(debug) => {
            let files = debug.files().into_iter().map(|(name, path)| {
                let (bytes, allocated) = sizes_of(&path);
                child_value(name, file_value(&path.display().to_string(), bytes, allocated))
            });
            dict.with("dirty-flag", false).with("children", files.collect::<Vec<_>>())
        }
        _ => dict.with("children", Vec::new()),
    }
}

/// Length and allocated bytes of a file; zeroes if it is gone meanwhile.
fn sizes_of(path: &Path) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).map_or((0, 0), |file| (file.len(), file.blocks() * 512))
}

fn value(image: &Described) -> Dict {
    let info = &image.link.info;
    if image.protocol {
        let host = &image.link.host;
        return match image.place {
            Place::File(_) => file_value(&image.name, host.file_bytes, host.allocated_bytes),
            _ => below_value(image),
        };
    }
    let snapshots: Vec<Value> = info.snapshots.iter().map(|one| snapshot(one).into()).collect();
    let format = qemu_name(info.format);
    let children: Vec<Value> = match image.place {
        Place::File(_) => children(image)
            .into_iter()
            .map(|(name, file, bytes, allocated)| {
                child_value(&name, file_value(&file, bytes, allocated))
            })
            .collect(),
        _ => vec![child_value("file", below_value(image))],
    };
    let backing_format = info.backing_format.as_deref().map(qemu_name);
    let mut dict = Dict::default()
        .with("filename", image.name.as_str())
        .with("format", format)
        .with_some("actual-size", image.allocated())
        .with("virtual-size", info.virtual_size)
        .with_some("cluster-size", image.cluster_size())
        .with_some("encrypted", info.encryption.is_some().then_some(true))
        .with_some("backing-filename", info.backing_file.as_deref())
        .with_some("full-backing-filename", image.backing.as_deref())
        .with_some("backing-filename-format", backing_format);
    // QEMU's driver for parallels describes nothing but the size.
    let bare = format == "raw" && matches!(image.place, Place::Nbd(_));
    if format != "parallels" && !bare {
        dict.put("dirty-flag", info.dirty && format == "qcow2");
    }
    if !snapshots.is_empty() {
        dict.put("snapshots", snapshots);
    }
    if let Some(data) = specific::of(&image.link, &image.extents) {
        dict.put("format-specific", Dict::default().with("type", format).with("data", data));
    }
    dict.with("children", children)
}

/// The files beneath an image, by QEMU's names: (name, file, bytes, allocated bytes), in the order
/// in which QEMU lists them.
fn children(image: &Described) -> Vec<(String, String, u64, u64)> {
    let host = &image.link.host;
    if image.protocol {
        return Vec::new();
    }
    // The newest child comes first.
    let extents = image.extents.iter().enumerate().rev();
    let mut files: Vec<_> = extents
        .filter_map(|(i, extent)| {
            let path = extent.path.as_ref()?.display().to_string();
            Some((format!("extents.{i}"), path, extent.bytes, extent.allocated))
        })
        .collect();
    files.push((
        "file".to_owned(),
        image.link.path.display().to_string(),
        host.file_bytes,
        host.allocated_bytes,
    ));
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
    let info = &image.link.info;
    let mut text = format!(
        "image: {}\nfile format: {}\nvirtual size: {} ({} bytes)\ndisk size: {}\n",
        image.name,
        if image.protocol { image.protocol_name() } else { qemu_name(info.format) },
        human::size(info.virtual_size),
        info.virtual_size,
        image.allocated().map_or_else(|| "unavailable".to_owned(), human::size),
    );
    if info.encryption.is_some() {
        text += "encrypted: yes\n";
    }
    if let Some(bytes) = image.cluster_size() {
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
    text += &super::snapshot::list(&info.snapshots);
    if let Some(data) = specific::of(&image.link, &image.extents).filter(|data| !data.is_empty()) {
        text += "Format specific information:\n";
        human::dump(&mut text, &data.into(), 1);
    }
    match image.place {
        Place::File(_) => {
            for (name, file, bytes, allocated) in children(image) {
                text += &file_text(0, &name, &file, bytes, allocated);
            }
        }
        _ => text += &below_text(image),
    }
    text
}

/// A file as the child of that name, `depth` nodes beneath an image's child.
fn file_text(depth: usize, name: &str, file: &str, bytes: u64, allocated: u64) -> String {
    let (indent, bytes) = ("    ".repeat(depth), whole_sectors(bytes));
    format!(
        "{indent}Child node '/{name}':\n{indent}    filename: {file}\n{indent}    protocol type: \
         file\n{indent}    file length: {} ({bytes} bytes)\n{indent}    disk size: {}\n",
        human::size(bytes),
        human::size(allocated),
    )
}

/// What an image is in, if that is no file.
fn below_text(image: &Described) -> String {
    let (driver, bytes) = (image.protocol_name(), whole_sectors(image.link.host.file_bytes));
    let size = human::size(bytes);
    let files = match &image.place {
        Place::Debug(debug) => debug.files(),
        _ => Vec::new(),
    };
    let depth = usize::from(!image.protocol);
    let prefix = if image.protocol { "" } else { "file/" };
    let files = files.into_iter().map(|(name, path)| {
        let (bytes, allocated) = sizes_of(&path);
        file_text(depth, &format!("{prefix}{name}"), &path.display().to_string(), bytes, allocated)
    });
    let files: String = files.collect();
    match (image.protocol, &image.place) {
        (true, _) => files,
        (false, Place::Debug(_)) => format!(
            "Child node '/file':\n    image: {}\n    file format: {driver}\n    virtual size: {size} \
             ({bytes} bytes)\n    disk size: unavailable\n{files}",
            image.name
        ),
        (false, _) => format!(
            "Child node '/file':\n    filename: {}\n    protocol type: {driver}\n    file length: \
             {size} ({bytes} bytes)\n    disk size: unavailable\n",
            image.name
        ),
    }
}
