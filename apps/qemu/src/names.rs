//! How an image is named: a path, a protocol, `json:{…}`, or `--image-opts key=value,…`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::Value;
use vdkit::nbd_client::NBD;

use crate::debug::{self, Debug};
use crate::open::is_protocol;
use crate::{nodes, storages};

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

/// TLS of an NBD export that is named by properties.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsClient {
    /// Id of the credentials.
    pub id: String,
    /// The name that the server's certificate must have.
    pub hostname: Option<String>,
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
    /// The disk of another image: a format stands on a format.
    Disk(Box<Image>),
    /// A backing image that is where its overlay says.
    Reference,
}

/// An image as the user named it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// The user's own words, for messages.
    pub typed: String,
    /// The format, if it is named.
    pub format: Option<String>,
    /// It is a node of a format, not only of a protocol: what stands on it sees its disk.
    pub formatted: bool,
    pub place: Place,
    /// The part of the file that is the disk (raw): bytes before it, and its length.
    pub window: Option<(u64, Option<u64>)>,
    /// The backing image to open instead of the one that the image names; `Some(None)` is none.
    pub backing: Option<Option<Box<Image>>>,
    /// The data file to open instead of the one that the image names.
    pub data_file: Option<PathBuf>,
    /// The encryption that its header must have (`encrypt.format`).
    pub encryption: Option<String>,
    /// Ids of the secrets that open it.
    pub secrets: Vec<String>,
    /// Ids of the throttle groups that it is in.
    pub throttle_groups: Vec<String>,
    /// TLS, if it is an NBD export whose URI does not tell.
    pub tls: Option<TlsClient>,
    /// A null disk promises to read as zeroes (`read-zeroes=on`).
    pub reads_zeroes: bool,
    /// Its storage takes no lock, because of the command or of the image above it.
    pub unlocked: bool,
    /// `force-share`; an image without it follows the one above it.
    pub force_share: Option<bool>,
    /// `locking=off` of its file.
    pub locking_off: bool,
    /// `read-only=on`.
    pub read_only: bool,
}

impl Image {
    pub fn at(typed: &str, place: Place) -> Self {
        Self {
            typed: typed.to_owned(),
            format: None,
            formatted: false,
            place,
            window: None,
            backing: None,
            data_file: None,
            encryption: None,
            secrets: Vec::new(),
            throttle_groups: Vec::new(),
            tls: None,
            reads_zeroes: false,
            unlocked: false,
            force_share: None,
            locking_off: false,
            read_only: false,
        }
    }

    pub fn with_format(self, format: &str) -> Self {
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
            // To the engine, a name like an export's is one.
            (Place::File(path), None) if !path.to_str().is_some_and(|name| NBD.matches(name)) => {
                path.clone()
            }
            (Place::Nbd(uri), None) if self.tls.is_none() => uri.into(),
            _ if lock => storages::path(self),
            _ => storages::path(&self.clone().unlocked()),
        }
    }

    /// The same image without locks, for a name of this program.
    pub fn unlocked(mut self) -> Self {
        self.unlocked = true;
        for image in self.beneath_mut() {
            *image = image.clone().unlocked();
        }
        self
    }

    /// Whether its file is locked, if the image above it or the command `shares` it or not.
    pub fn locks(&self, shares: bool) -> bool {
        !(self.unlocked || self.locking_off || self.shares(shares))
    }

    /// `force-share`, by its own option or by what stands above it.
    pub fn shares(&self, above: bool) -> bool {
        self.force_share.unwrap_or(above)
    }

    /// The images that its storage reads and writes, if that is no file.
    fn beneath(&self) -> Vec<&Self> {
        match &self.place {
            Place::Disk(image) => vec![&**image],
            Place::Debug(debug) => debug.images(),
            _ => Vec::new(),
        }
    }

    fn beneath_mut(&mut self) -> Vec<&mut Self> {
        match &mut self.place {
            Place::Disk(image) => vec![&mut **image],
            Place::Debug(debug) => debug.images_mut(),
            _ => Vec::new(),
        }
    }

    /// Whether all its bytes, and those of backing images that it describes, are in files.
    pub fn is_in_files(&self) -> bool {
        let place = match &self.place {
            Place::File(_) | Place::Reference => true,
            Place::Disk(image) => image.is_in_files(),
            Place::Null(_) | Place::Nbd(_) | Place::Debug(_) => false,
        };
        let backing = self.backing.iter().flatten().all(|backing| backing.is_in_files());
        place && backing
    }

    /// Why it may not be opened for writing, in QEMU's words.
    pub fn refuses_writing(&self) -> Option<&'static str> {
        match self {
            _ if self.shares(false) => {
                Some("force-share=on can only be used with read-only images")
            }
            _ if self.read_only => Some("Block node is read-only"),
            _ => self.beneath().into_iter().find_map(Self::refuses_writing),
        }
    }

    /// The name that answers show: that of the file, whatever options named it.
    pub fn shown(&self) -> String {
        match &self.place {
            Place::File(path) => path.display().to_string(),
            Place::Null(_) => "null-co://".to_owned(),
            Place::Nbd(uri) => shown_uri(uri),
            Place::Disk(image) => image.shown(),
            Place::Debug(_) | Place::Reference => self.typed.clone(),
        }
    }
}

/// Bytes of a null disk if no size is given.
pub const NULL_BYTES: u64 = 1 << 30;

/// Protocols of QEMU that vdkit does not have.
pub const OTHER_PROTOCOLS: &[&str] = &[
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

/// Reads a name as `qemu-img` takes it on the command line.
///
/// # Errors
/// QEMU's words after `Could not open 'NAME': `.
pub fn parse(text: &str) -> Result<Image, String> {
    parse_as(text, None)
}

/// As [`parse`], with the format that `-f` names. It replaces a driver of `json:`.
pub fn parse_as(text: &str, format: Option<&str>) -> Result<Image, String> {
    if let Some(json) = text.strip_prefix("json:") {
        let mut flat = Flat::from_json(json)?;
        if let Some(format) = format {
            flat.put("driver", format);
        }
        return nodes::from_properties(text, flat);
    }
    let mut image = parse_place(text)?;
    // `-f file` is the file's bytes.
    let format = format.map(|format| if is_protocol(format) { "raw" } else { format });
    if image.format.is_none() {
        image.format = format.map(str::to_owned);
    }
    Ok(image)
}

/// A name that is no `json:`.
fn parse_place(text: &str) -> Result<Image, String> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::parse_options;

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
