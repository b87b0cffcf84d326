//! `qemu-img info`: describes an image, or each image of a backing chain.

use std::path::Path;

use serde_json::Value;
use vdkit::{BackingChoice, ChainLink, SnapshotInfo, describe_chain};

use super::{
    Command, FORCE_SHARE, FORMAT, IMAGE_OPTS, OBJECT, OUTPUT, Output, one_image, wants_json,
};
use crate::failure::{Failure, could_not_open};
use crate::getopt::{Parsed, flag};
use crate::human;
use crate::json::{Dict, in_order, pretty, quote};
use crate::names::{Flat, Image, Place};
use crate::open::{Access, Named, check_alone, failed_open, is_protocol, open_options, registry};
use crate::secrets::Objects;
use crate::specific::{self, ExtentFile};
use crate::storages;

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
    extents: Vec<ExtentFile>,
    /// The file itself is described, not its content.
    protocol: bool,
    place: Place,
    /// The image whose disk it is in.
    below: Option<Box<Described>>,
}

impl Described {
    /// Shows the part of the file that is the disk, and names an image as QEMU does that needs more
    /// than a path.
    fn show_options(&mut self, named: &Named<'_>, window: Option<(u64, Option<u64>)>) {
        let raw = self.link.info.format == "raw";
        if let (Some((offset, bytes)), Place::File(_), true) = (window, &self.place, raw) {
            let rest = self.link.info.virtual_size.saturating_sub(offset);
            self.link.info.virtual_size = bytes.unwrap_or(rest.next_multiple_of(512));
        }
        let mut flat = properties(named).unwrap_or_default();
        let shown = self.shown_options(&mut flat);
        if !shown.is_empty() || self.below.is_some() {
            self.name = format!("json:{}", inline(&self.node_options(&mut flat, shown).into()));
        }
    }

    /// The properties of a node that QEMU shows.
    fn shown_options(&self, flat: &mut Flat) -> Vec<(&'static str, String)> {
        const SHOWN: &[&str] = &["offset", "size", "key-secret", "encrypt.key-secret"];
        const OF_NULL: &[&str] = &["read-zeroes", "size"];
        let keys = if matches!(self.place, Place::Null(_)) { OF_NULL } else { SHOWN };
        keys.iter().filter_map(|key| Some((*key, flat.take(key)?))).collect()
    }

    /// The node with these properties of its own, and those beneath it.
    fn node_options(&self, flat: &mut Flat, shown: Vec<(&'static str, String)>) -> Dict {
        let null = matches!(self.place, Place::Null(_));
        let driver = if null { self.protocol_name() } else { self.link.info.format };
        let file = match &self.below {
            Some(below) => {
                let mut flat = flat.take_below("file");
                let shown = below.shown_options(&mut flat);
                below.node_options(&mut flat, shown)
            }
            None => Dict::default().with("driver", "file").with("filename", self.name.as_str()),
        };
        let dict =
            Dict::default().with("driver", driver).with_some("file", (!null).then_some(file));
        shown.into_iter().fold(dict, |dict, (key, value)| dict.with(key, value))
    }

    /// Bytes of a cluster; QEMU names none for parallels.
    fn cluster_size(&self) -> Option<u64> {
        let own = self.link.info.cluster_size.filter(|_| self.link.info.format != "parallels");
        own.or_else(|| self.below.as_ref()?.cluster_size())
    }

    /// Bytes that the image takes in all of its files; `None` if they are unknown.
    fn allocated(&self) -> Option<u64> {
        let extents = self.extents.iter().map(|extent| extent.allocated).sum::<u64>();
        match self.place {
            Place::File(_) => Some(self.link.host.allocated_bytes + extents),
            Place::Null(_) => Some(0),
            Place::Disk(_) => self.below.as_ref()?.allocated(),
            Place::Nbd(_) | Place::Debug(_) | Place::Reference => None,
        }
    }

    /// The driver of the file beneath, by QEMU's name.
    fn protocol_name(&self) -> &'static str {
        match &self.place {
            Place::Nbd(_) => "nbd",
            Place::Debug(debug) => debug.driver(),
            Place::Null(_) => "null-co",
            Place::File(_) | Place::Disk(_) | Place::Reference => "file",
        }
    }

    /// The node of what the image is in.
    fn node(&self) -> Node {
        let host = &self.link.host;
        let path = match &self.place {
            Place::File(path) => path,
            _ => &self.link.path,
        };
        let mut node = Node::file(path, host.file_bytes, host.allocated_bytes);
        if !matches!(self.place, Place::File(_)) {
            node.name.clone_from(&self.name);
            node.driver = self.protocol_name();
            node.allocated = self.allocated();
        }
        if let Place::Debug(debug) = &self.place {
            let files = debug.files().into_iter().map(|(name, path)| {
                let (bytes, allocated) = sizes_of(&path);
                (name.to_owned(), Node::file(&path, bytes, allocated))
            });
            node.children = files.collect();
        }
        node
    }

    /// The nodes of files beneath the image, by QEMU's names, in the order in which QEMU lists them.
    fn beneath(&self) -> Vec<(String, Node)> {
        let own = self.node();
        if self.protocol {
            return own.children;
        }
        // The newest child comes first.
        let extents = self.extents.iter().enumerate().rev().filter_map(|(i, extent)| {
            let path = extent.path.as_ref()?;
            Some((format!("extents.{i}"), Node::file(path, extent.bytes, extent.allocated)))
        });
        let file = self.below.is_none().then(|| ("file".to_owned(), own));
        extents.chain(file).collect()
    }
}

/// What an image is in: a file, or what stands for one.
struct Node {
    /// QEMU's name of its driver.
    driver: &'static str,
    name: String,
    bytes: u64,
    /// Bytes that it takes; `None` if they are unknown.
    allocated: Option<u64>,
    children: Vec<(String, Node)>,
}

impl Node {
    /// A file. QEMU counts its bytes in whole sectors.
    fn file(path: &Path, bytes: u64, allocated: u64) -> Self {
        Self {
            driver: "file",
            name: path.display().to_string(),
            bytes: bytes.next_multiple_of(512),
            allocated: Some(allocated),
            children: Vec::new(),
        }
    }

    /// Whether it passes on what an image beneath it holds.
    fn is_filter(&self) -> bool {
        matches!(self.driver, "blkdebug" | "blkverify")
    }

    fn value(&self) -> Dict {
        let is_file = self.driver == "file";
        let data = Dict::default().with("type", "file").with("data", Dict::default());
        Dict::default()
            .with("filename", self.name.as_str())
            .with("format", self.driver)
            .with_some("dirty-flag", (is_file || self.is_filter()).then_some(false))
            .with_some("actual-size", self.allocated)
            .with("virtual-size", self.bytes)
            .with_some("format-specific", is_file.then_some(data))
            .with("children", values(&self.children))
    }

    /// As the child at `path`, `depth` nodes beneath an image's child.
    fn text(&self, path: &str, depth: usize) -> String {
        let [name, driver, bytes] = match self.is_filter() {
            true => ["image", "file format", "virtual size"],
            false => ["filename", "protocol type", "file length"],
        };
        let indent = "    ".repeat(depth);
        let mut text = format!(
            "{indent}Child node '/{path}':\n{indent}    {name}: {}\n{indent}    {driver}: {}\n{indent}    \
             {bytes}: {} ({} bytes)\n{indent}    disk size: {}\n",
            self.name,
            self.driver,
            human::size(self.bytes),
            self.bytes,
            taken(self.allocated),
        );
        for (name, child) in &self.children {
            text += &child.text(&format!("{path}/{name}"), depth + 1);
        }
        text
    }
}

fn values(nodes: &[(String, Node)]) -> Vec<Value> {
    nodes.iter().map(|(name, node)| named_child(name, node.value())).collect()
}

fn named_child(name: &str, info: Dict) -> Value {
    Dict::default().with("name", name).with("info", info).into()
}

/// The bytes that an image or a node takes, in words.
fn taken(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "unavailable".to_owned(), human::size)
}

fn run(parsed: &Parsed, out: &mut Output) -> Result<u8, Failure> {
    let json = wants_json(parsed)?;
    let named = Named::of(parsed, one_image(parsed)?);
    let objects = Objects::of(parsed)?;
    let image = named.parse()?;
    let chain = parsed.has("backing-chain");
    let access = Access { share: parsed.has("force-share"), ..Access::read() };
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
        out.line(pretty(&whole));
    } else {
        let texts: Vec<_> = images.iter().map(|image| text(image, "")).collect();
        out.text(texts.join("\n"));
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

/// A value on one line, as it stands in a name.
fn inline(value: &Value) -> String {
    match value {
        Value::Object(members) => {
            let members = in_order(members).into_iter().map(|(key, value)| {
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
    if !chain {
        check_alone(image)?;
    }
    let mut options = open_options(image, access, objects)?;
    if !chain {
        options.backing = BackingChoice::Ignore;
    }
    // A raw part of a file is described as its file; `show_options` then says which part it is.
    let path = match (&image.place, options.format.as_deref()) {
        (Place::File(path), Some("raw")) => path.clone(),
        _ => image.opened(options.lock),
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
        // A backing image that the user described has a name of this program.
        let given = match top {
            true => Some(image.clone()),
            false => link.path.to_str().and_then(storages::noted),
        };
        let below = match given.as_ref().map(|given| &given.place) {
            Some(Place::Disk(inner)) => describe(inner, false, access, objects)?.pop(),
            _ => None,
        };
        let path = match given.as_ref().map(|given| &given.place) {
            Some(Place::File(path)) => path.clone(),
            _ => link.path.clone(),
        };
        images.push(Described {
            name: given.as_ref().map_or_else(|| link.path.display().to_string(), Image::shown),
            backing: link.info.backing_file.as_deref().map(|name| beside(&path, name)),
            place: given.map_or(Place::File(path), |given| given.place),
            below: below.map(Box::new),
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

/// Length and allocated bytes of a file; zeroes if it is gone meanwhile.
fn sizes_of(path: &Path) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).map_or((0, 0), |file| (file.len(), file.blocks() * 512))
}

fn value(image: &Described) -> Dict {
    let info = &image.link.info;
    if image.protocol {
        return image.node().value();
    }
    let snapshots: Vec<Value> = info.snapshots.iter().map(|one| snapshot(one).into()).collect();
    let format = info.format;
    let mut dict = Dict::default()
        .with("filename", image.name.as_str())
        .with("format", format)
        .with_some("actual-size", image.allocated())
        .with("virtual-size", info.virtual_size)
        .with_some("cluster-size", image.cluster_size())
        .with_some("encrypted", info.encryption.is_some().then_some(true))
        .with_some("backing-filename", info.backing_file.as_deref())
        .with_some("full-backing-filename", image.backing.as_deref())
        .with_some("backing-filename-format", info.backing_format.as_deref());
    // QEMU's driver for parallels describes nothing but the size.
    let bare = format == "raw" && matches!(image.place, Place::Nbd(_) | Place::Null(_));
    if format != "parallels" && !bare {
        dict.put("dirty-flag", info.dirty && format == "qcow2");
    }
    if !snapshots.is_empty() {
        dict.put("snapshots", snapshots);
    }
    if let Some(data) = specific::of(&image.link, &image.extents) {
        dict.put("format-specific", Dict::default().with("type", format).with("data", data));
    }
    let mut children = values(&image.beneath());
    children.extend(image.below.iter().map(|below| named_child("file", value(below))));
    dict.with("children", children)
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

/// The lines of an image; `prefix` begins the paths of its children.
fn text(image: &Described, prefix: &str) -> String {
    let info = &image.link.info;
    let mut text = format!(
        "image: {}\nfile format: {}\nvirtual size: {} ({} bytes)\ndisk size: {}\n",
        image.name,
        if image.protocol { image.protocol_name() } else { info.format },
        human::size(info.virtual_size),
        info.virtual_size,
        taken(image.allocated()),
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
            text += &format!("backing file format: {format}\n");
        }
    }
    text += &super::snapshot::list(&info.snapshots);
    if let Some(data) = specific::of(&image.link, &image.extents).filter(|data| !data.is_empty()) {
        text += "Format specific information:\n";
        human::dump(&mut text, &data.into(), 1);
    }
    for (name, node) in image.beneath() {
        text += &node.text(&format!("{prefix}{name}"), 0);
    }
    if let Some(below) = &image.below {
        let path = format!("{prefix}file");
        text += &format!("Child node '/{path}':\n");
        for line in self::text(below, &format!("{path}/")).lines() {
            text += &format!("    {line}\n");
        }
    }
    text
}
