//! How an image is named: a path, a protocol, `json:{…}`, or `--image-opts key=value,…`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::Value;
use vdkit::nbd_client::percent;

use crate::debug::{self, Debug};
use crate::open::is_protocol;
use crate::{sizes, storages};

/// Properties by dotted keys: `file.filename` is the member `filename` of the member `file`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flat(BTreeMap<String, String>);

impl Flat {
    /// Reads `key=value,key=value`; a doubled comma is a comma of a value. The first part may be
    /// the value of `implied` without its key.
    pub fn from_keys(text: &str, implied: Option<&str>) -> Result<Self, String> {
        let mut flat = Self::default();
        for (i, part) in split_commas(text).into_iter().enumerate() {
            match (part.split_once('='), implied) {
                (Some((key, value)), _) => flat.put(key, value),
                (None, Some(implied)) if i == 0 => flat.put(implied, &part),
                (None, _) if part.is_empty() => {}
                // A key alone is a switch that is on.
                (None, _) => match part.strip_prefix("no") {
                    Some(key) if !key.is_empty() => flat.put(key, "off"),
                    _ => flat.put(&part, "on"),
                },
            }
        }
        Ok(flat)
    }

    /// Reads a JSON object.
    pub fn from_json(text: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(text)
            .map_err(|_| "Could not parse the JSON options".to_owned())?;
        if !value.is_object() {
            return Err("Invalid JSON object given".to_owned());
        }
        let mut flat = Self::default();
        flat.put_json("", &value);
        Ok(flat)
    }

    fn put_json(&mut self, key: &str, value: &Value) {
        let below = |name: &str| match key {
            "" => name.to_owned(),
            _ => format!("{key}.{name}"),
        };
        match value {
            Value::Object(members) => {
                members.iter().for_each(|(name, value)| self.put_json(&below(name), value));
            }
            Value::Array(items) => {
                let items = items.iter().enumerate();
                items.for_each(|(i, value)| self.put_json(&below(&i.to_string()), value));
            }
            Value::String(text) => self.put(key, text),
            Value::Bool(on) => self.put(key, if *on { "on" } else { "off" }),
            Value::Null => self.put(key, ""),
            Value::Number(number) => self.put(key, &number.to_string()),
        }
    }

    /// Sets a property.
    pub fn put(&mut self, key: &str, value: &str) {
        self.0.insert(key.to_owned(), value.to_owned());
    }

    /// Removes a property and returns it.
    pub fn take(&mut self, key: &str) -> Option<String> {
        self.0.remove(key)
    }

    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// Removes the properties beneath a key, and returns them without it.
    pub fn take_below(&mut self, key: &str) -> Self {
        let prefix = format!("{key}.");
        let (below, rest) = std::mem::take(&mut self.0)
            .into_iter()
            .partition(|(name, _)| name.starts_with(&prefix));
        self.0 = rest;
        let below: BTreeMap<String, String> = below;
        Self(
            below
                .into_iter()
                .map(|(name, value)| (name[prefix.len()..].to_owned(), value))
                .collect(),
        )
    }

    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// The first key, if any property is left.
    pub fn first_key(&self) -> Option<&str> {
        self.keys().next()
    }

    /// Whether no property is left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Splits at single commas; a doubled comma stands for one.
pub fn split_commas(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            ',' if letters.peek() == Some(&',') => {
                letters.next();
                parts.last_mut().expect("never empty").push(',');
            }
            ',' => parts.push(String::new()),
            _ => parts.last_mut().expect("never empty").push(letter),
        }
    }
    parts
}

/// Where an image's bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A file or device.
    File(PathBuf),
    /// No file: reads return zeroes, writes are dropped. Bytes of the disk.
    Null(u64),
    /// An NBD export, as a URI.
    Nbd(String),
    /// An image behind a storage that fails by rules, or that compares.
    Debug(Box<Debug>),
}

/// An image as the user named it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// The user's own words, for messages.
    pub typed: String,
    /// The format, if it is named.
    pub format: Option<String>,
    pub place: Place,
    /// The part of the file that is the disk (raw): bytes before it, and its length.
    pub window: Option<(u64, Option<u64>)>,
    /// The backing image to open instead of the one that the image names; `Some(None)` is none.
    pub backing: Option<Option<Box<Image>>>,
    /// The data file to open instead of the one that the image names.
    pub data_file: Option<PathBuf>,
    /// Ids of the secrets that open it.
    pub secrets: Vec<String>,
    /// Ids of the throttle groups that it is in.
    pub throttle_groups: Vec<String>,
    /// A null disk promises to read as zeroes (`read-zeroes=on`).
    pub reads_zeroes: bool,
    /// Its storage takes no lock.
    pub unlocked: bool,
}

impl Image {
    fn at(typed: &str, place: Place) -> Self {
        Self {
            typed: typed.to_owned(),
            format: None,
            place,
            window: None,
            backing: None,
            data_file: None,
            secrets: Vec::new(),
            throttle_groups: Vec::new(),
            reads_zeroes: false,
            unlocked: false,
        }
    }

    fn with_format(self, format: &str) -> Self {
        Self { format: Some(format.to_owned()), ..self }
    }

    /// The path, if it is a whole file.
    pub fn path(&self) -> Option<&std::path::Path> {
        match &self.place {
            Place::File(path) if self.window.is_none() => Some(path),
            _ => None,
        }
    }

    /// The name under which the engine opens it. A storage of this program then takes its lock if
    /// `lock`; of a file, the engine's options decide.
    pub fn opened(&self, lock: bool) -> PathBuf {
        match (&self.place, self.window) {
            (Place::File(path), None) => path.clone(),
            (Place::Nbd(uri), _) => uri.into(),
            _ if lock => storages::path(self),
            _ => storages::path(&self.clone().unlocked()),
        }
    }

    fn unlocked(mut self) -> Self {
        self.unlocked = true;
        if let Place::Debug(debug) = &mut self.place {
            for image in debug.images() {
                *image = image.clone().unlocked();
            }
        }
        self
    }

    /// The name that answers show: that of the file, whatever options named it.
    pub fn shown(&self) -> String {
        match &self.place {
            Place::File(path) => path.display().to_string(),
            Place::Null(_) => "null-co://".to_owned(),
            Place::Nbd(uri) => shown_uri(uri),
            Place::Debug(_) => self.typed.clone(),
        }
    }
}

/// The sizes of disks are multiples of this.
const SECTOR_BYTES: u64 = 512;

/// Bytes of a null disk if no size is given.
const NULL_BYTES: u64 = 1 << 30;

/// Protocols of QEMU that vdkit does not have.
const OTHER_PROTOCOLS: &[&str] = &[
    "blklogwrites",
    "fat",
    "ftp",
    "ftps",
    "gluster",
    "gluster+rdma",
    "gluster+tcp",
    "gluster+unix",
    "host_cdrom",
    "http",
    "https",
    "iscsi",
    "iser",
    "nfs",
    "nvme",
    "rbd",
    "ssh",
    "vvfat",
];

/// Filters that change nothing of what is read or written, and are passed through.
const FILTERS: &[&str] = &["copy-on-read", "throttle", "compress", "preallocate"];

/// Reads a name as `qemu-img` takes it on the command line.
///
/// # Errors
/// QEMU's words after `Could not open 'NAME': `.
pub fn parse(text: &str) -> Result<Image, String> {
    if let Some(json) = text.strip_prefix("json:") {
        return from_properties(text, Flat::from_json(json)?);
    }
    let end = text.find([':', '/']).unwrap_or(text.len());
    if !text[end..].starts_with(':') {
        return Ok(Image::at(text, Place::File(text.into())));
    }
    let rest = &text[end + 1..];
    match &text[..end] {
        "file" | "host_device" => Ok(Image::at(text, Place::File(rest.into()))),
        "null-co" | "null-aio" => Ok(Image::at(text, Place::Null(NULL_BYTES)).with_format("raw")),
        "nbd" | "nbd+unix" | "nbd+tcp" | "nbds" | "nbds+unix" => {
            Ok(Image::at(text, Place::Nbd(text.to_owned())))
        }
        "blkdebug" => Ok(Image::at(text, Place::Debug(Box::new(debug::parse_faulty(rest)?)))),
        "blkverify" => Ok(Image::at(text, Place::Debug(Box::new(debug::parse_verify(rest)?)))),
        known if OTHER_PROTOCOLS.contains(&known) => {
            Err(format!("vdkit does not have the protocol '{known}'"))
        }
        unknown => Err(format!("Unknown protocol '{unknown}'")),
    }
}

/// Reads the value of an image argument with `--image-opts`.
pub fn parse_options(text: &str) -> Result<Image, String> {
    let flat = Flat::from_keys(text, Some("file"))?;
    from_properties(text, flat)
}

fn from_properties(typed: &str, mut flat: Flat) -> Result<Image, String> {
    let driver = flat.take("driver");
    let Some(driver) = driver else {
        return without_driver(typed, flat);
    };
    if FILTERS.contains(&driver.as_str()) {
        let mut file = needed_child(&mut flat, "file", typed)?;
        typed.clone_into(&mut file.typed);
        if driver == "throttle" {
            let group = flat.take("throttle-group");
            file.throttle_groups.push(group.ok_or("Please specify a throttle group")?);
        }
        return Ok(file);
    }
    match driver.as_str() {
        "file" | "host_device" | "host_cdrom" => {
            let name = flat
                .take("filename")
                .ok_or_else(|| format!("The '{driver}' block driver requires a file name"))?;
            finish(&driver, flat, Image::at(typed, Place::File(name.into())).with_format("raw"))
        }
        "null-co" | "null-aio" => {
            let bytes = flat.take("size").map_or(Ok(NULL_BYTES), |size| size_of("size", &size))?;
            let mut image = Image::at(typed, Place::Null(bytes)).with_format("raw");
            flat.take("latency-ns");
            image.reads_zeroes = flat.take("read-zeroes").is_some_and(|value| value == "on");
            finish(&driver, flat, image)
        }
        "nbd" => {
            let uri = nbd_uri(&mut flat)?;
            finish(&driver, flat, Image::at(typed, Place::Nbd(uri)).with_format("raw"))
        }
        "blkdebug" => {
            let image = needed_child(&mut flat, "image", typed)?;
            let debug = debug::faulty_properties(&mut flat, image)?;
            finish(&driver, flat, debugged(typed, &driver, debug))
        }
        "blkverify" => {
            let raw = Box::new(needed_child(&mut flat, "raw", typed)?);
            let test = Box::new(needed_child(&mut flat, "test", typed)?);
            let debug = Debug::Verify { raw, test };
            finish(&driver, flat, debugged(typed, &driver, debug))
        }
        known if OTHER_PROTOCOLS.contains(&known) => {
            Err(format!("vdkit does not have the driver '{known}'"))
        }
        format if crate::open::driver(format).is_some() => of_format(typed, format, flat),
        unknown => Err(format!("Unknown driver '{unknown}'")),
    }
}

/// A node of a debugging driver. Alone it is a disk of plain bytes.
fn debugged(typed: &str, driver: &str, debug: Debug) -> Image {
    Image::at(typed, Place::Debug(Box::new(debug))).with_format(driver)
}

fn needed_child(flat: &mut Flat, name: &str, typed: &str) -> Result<Image, String> {
    child(flat, name, typed)?
        .ok_or_else(|| format!("A block device must be specified for \"{name}\""))
}

/// Properties that name a file or a child and leave the format to be probed.
fn without_driver(typed: &str, mut flat: Flat) -> Result<Image, String> {
    if let Some(name) = flat.take("filename") {
        let mut image = parse(&name)?;
        typed.clone_into(&mut image.typed);
        return finish("raw", flat, image);
    }
    let mut file = child(&mut flat, "file", typed)?
        .ok_or_else(|| "Must specify either driver or file".to_owned())?;
    typed.clone_into(&mut file.typed);
    file.format = None;
    finish("raw", flat, file)
}

/// No node has a name here: images are opened by the command alone.
fn no_node(name: &str) -> String {
    format!("Cannot find device='{name}' nor node-name='{name}'")
}

/// The child of that name: an object of properties.
fn child(flat: &mut Flat, name: &str, typed: &str) -> Result<Option<Image>, String> {
    if let Some(node) = flat.take(name) {
        return Err(no_node(&node));
    }
    let below = flat.take_below(name);
    if below.is_empty() {
        return Ok(None);
    }
    from_properties(typed, below).map(Some)
}

fn of_format(typed: &str, format: &str, mut flat: Flat) -> Result<Image, String> {
    let mut image = match flat.take("filename") {
        Some(name) => parse(&name)?,
        None => needed_child(&mut flat, "file", typed)?,
    };
    typed.clone_into(&mut image.typed);
    image.format = Some(format.to_owned());
    if format == "raw" {
        let offset = flat.take("offset").map(|text| size_of("offset", &text)).transpose()?;
        let size = flat.take("size").map(|text| size_of("size", &text)).transpose()?;
        if size.is_some_and(|bytes| !bytes.is_multiple_of(SECTOR_BYTES)) {
            return Err("Specified size is not multiple of 512".to_owned());
        }
        if offset.is_some() || size.is_some() {
            image.window = Some((offset.unwrap_or(0), size));
        }
    }
    image.backing = match flat.take("backing") {
        Some(name) if name.is_empty() => Some(None),
        Some(node) => return Err(no_node(&node)),
        None => child(&mut flat, "backing", typed)?.map(|backing| Some(Box::new(backing))),
    };
    if let Some(data) = child(&mut flat, "data-file", typed)? {
        image.data_file = data.path().map(Into::into);
    }
    for key in ["key-secret", "encrypt.key-secret"] {
        image.secrets.extend(flat.take(key));
    }
    flat.take("encrypt.format");
    finish(format, flat, image)
}

/// Properties that every node takes, and that change nothing of what a command of ours does.
const COMMON: &[&str] = &[
    "read-only",
    "auto-read-only",
    "discard",
    "detect-zeroes",
    "cache.direct",
    "cache.no-flush",
    "force-share",
    "node-name",
];
const OF_FILES: &[&str] =
    &["aio", "aio-max-batch", "locking", "pr-manager", "drop-cache", "x-check-cache-dropped"];
const OF_QCOW2: &[&str] = &[
    "lazy-refcounts",
    "pass-discard-request",
    "pass-discard-snapshot",
    "pass-discard-other",
    "discard-no-unref",
    "overlap-check",
    "cache-size",
    "l2-cache-size",
    "l2-cache-entry-size",
    "refcount-cache-size",
    "cache-clean-interval",
];

/// Refuses properties that nothing takes.
fn finish(driver: &str, mut flat: Flat, image: Image) -> Result<Image, String> {
    let known = COMMON.iter().chain(match driver {
        "file" | "host_device" | "host_cdrom" => OF_FILES,
        "qcow2" => OF_QCOW2,
        _ => &[],
    });
    for key in known {
        flat.take(key);
    }
    if driver == "qcow2" {
        flat.take_below("overlap-check");
    }
    match flat.first_key() {
        None => Ok(image),
        Some(key) if driver == "host_cdrom" || is_protocol(driver) => {
            Err(format!("Block protocol '{driver}' doesn't support the option '{key}'"))
        }
        Some(key) => Err(format!("Block format '{driver}' does not support the option '{key}'")),
    }
}

/// The name of an export as QEMU shows it, whatever form named it. Names with TLS stay as they are.
fn shown_uri(uri: &str) -> String {
    use vdkit::nbd_client::{NbdUri, Place};
    let Ok(parsed) = NbdUri::parse(uri) else { return uri.to_owned() };
    let export = &parsed.export;
    match &parsed.place {
        _ if parsed.tls.is_some() => uri.to_owned(),
        Place::Unix(path) if export.is_empty() => format!("nbd+unix://?socket={}", path.display()),
        Place::Unix(path) => format!("nbd+unix:///{export}?socket={}", path.display()),
        Place::Tcp { host, port } => {
            let host = bracketed(host);
            let slash = if export.is_empty() { "" } else { "/" };
            format!("nbd://{host}:{port}{slash}{export}")
        }
    }
}

/// A host's name, or its address in the brackets that one with colons needs before a port.
pub fn bracketed(host: &str) -> String {
    if host.contains(':') { format!("[{host}]") } else { host.to_owned() }
}

pub fn switch_of(name: &str, text: &str) -> Result<bool, String> {
    match text {
        "on" | "yes" | "true" | "y" => Ok(true),
        "off" | "no" | "false" | "n" => Ok(false),
        _ => Err(format!("Parameter '{name}' expects 'on' or 'off'")),
    }
}

fn size_of(name: &str, text: &str) -> Result<u64, String> {
    sizes::parse(text)
        .map_err(|_| format!("Parameter '{name}' expects a non-negative number below 2^64"))
}

/// The URI of an NBD export from its properties.
fn nbd_uri(flat: &mut Flat) -> Result<String, String> {
    let export = percent(flat.take("export").unwrap_or_default());
    let mut take = |key: &str| flat.take(&format!("server.{key}")).or_else(|| flat.take(key));
    let (host, path) = (take("host"), take("path"));
    let (port, _kind) = (take("port"), take("type"));
    match (host, path) {
        (None, Some(path)) => Ok(format!("nbd+unix:///{export}?socket={}", percent(path))),
        (Some(host), None) => {
            let port = port.unwrap_or_else(|| "10809".to_owned());
            Ok(format!("nbd://{}:{port}/{export}", bracketed(&host)))
        }
        (Some(_), Some(_)) => Err("path and host may not be used at the same time".to_owned()),
        (None, None) => Err("NBD server address missing".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_name_a_file_gives_its_path() {
        for (text, format) in [
            ("a b.qcow2", None),
            ("./x:y", None),
            ("file:x", None),
            (
                "json:{\"driver\":\"qcow2\",\"file\":{\"driver\":\"file\",\"filename\":\"x\"}}",
                Some("qcow2"),
            ),
            (
                "json:{\"driver\":\"qcow2\",\"file.filename\":\"x\",\"file.driver\":\"file\"}",
                Some("qcow2"),
            ),
        ] {
            let image = parse(text).unwrap();
            assert_eq!(image.format.as_deref(), format, "{text}");
            assert!(image.path().is_some(), "{text}");
        }
        let image =
            parse_options("driver=raw,offset=1k,size=512,file.driver=file,file.filename=a,,b")
                .unwrap();
        assert_eq!(image.window, Some((1024, Some(512))));
        assert_eq!(image.place, Place::File("a,b".into()));
        assert!(image.path().is_none(), "it is not the whole file");
    }

    #[test]
    fn properties_of_an_export_become_a_uri() {
        for (text, uri) in [
            (
                "driver=nbd,export=a?b%41,server.type=unix,server.path=/run/x y",
                "nbd+unix:///a%3Fb%2541?socket=/run/x%20y",
            ),
            ("driver=nbd,host=::1,export=a/b", "nbd://[::1]:10809/a/b"),
            ("driver=nbd,host=h,port=7", "nbd://h:7/"),
        ] {
            let image = parse_options(text).unwrap();
            assert_eq!(image.place, Place::Nbd(uri.to_owned()), "{text}");
        }
    }

    #[test]
    fn wrong_names_are_told_in_qemus_words() {
        for (text, words) in [
            ("foo:bar", "Unknown protocol 'foo'"),
            ("json:{}", "Must specify either driver or file"),
            ("json:{\"driver\":\"foo\"}", "Unknown driver 'foo'"),
            (
                "json:{\"driver\":\"throttle\",\"file.driver\":\"file\",\"file.filename\":\"x\"}",
                "Please specify a throttle group",
            ),
            (
                "json:{\"driver\":\"raw\",\"size\":1000,\"file.filename\":\"x\"}",
                "Specified size is not multiple of 512",
            ),
            (
                "json:{\"driver\":\"file\",\"filename\":\"x\",\"foo\":1}",
                "Block protocol 'file' doesn't support the option 'foo'",
            ),
        ] {
            assert_eq!(parse(text).unwrap_err(), words, "{text}");
        }
        assert_eq!(
            parse_options("foo").unwrap_err(),
            "Cannot find device='foo' nor node-name='foo'"
        );
    }
}
