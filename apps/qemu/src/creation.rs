//! Options of new images: QEMU's names, types, order and defaults, and what they are called in the
//! engine.
//!
//! `create`, `convert`, `dd`, `measure` and `amend` read `-o` through [`Wanted`].

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use vdkit::{Error, FileHints, FormatDriver, OptionKind, Options, Secret};

use crate::failure::{Failure, system_words, words};
use crate::names::{split_commas, switch_of};
use crate::secrets::Objects;
use crate::sizes;

/// Type of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A byte count.
    Size,
    /// `on` or `off`.
    Switch,
    /// A whole number.
    Number,
    Text,
}

/// One option of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// Its name after `-o`.
    pub name: &'static str,
    pub kind: Kind,
    /// The value that `create` reports if none is given; `None` reports nothing.
    pub default: Option<&'static str>,
    /// One line of help.
    pub help: &'static str,
}

impl Key {
    /// The option's line of what `-o help` prints.
    pub fn help_line(&self) -> String {
        let kind = match self.kind {
            Kind::Size => "size",
            Kind::Switch => "bool (on/off)",
            Kind::Number => "num",
            Kind::Text => "str",
        };
        format!("  {:<22} - {}\n", format!("{}=<{kind}>", self.name), self.help)
    }

    /// A value in QEMU's own notation, checked against the option's type.
    pub fn checked(&self, value: &str) -> Result<String, Failure> {
        let name = self.name;
        match self.kind {
            Kind::Text => Ok(value.to_owned()),
            Kind::Switch => match switch_of(name, value) {
                Ok(on) => Ok(if on { "on" } else { "off" }.to_owned()),
                Err(why) => Err(Failure::new(why)),
            },
            Kind::Size => {
                sizes::parse(value).map(|bytes| bytes.to_string()).map_err(|_| bad_size(name))
            }
            Kind::Number => sizes::integer(value)
                .map(|number| number.to_string())
                .ok_or_else(|| Failure::new(format!("Parameter '{name}' expects a number"))),
        }
    }
}

/// A format that images can be created in, by QEMU's name.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// QEMU's name of the format.
    pub format: &'static str,
    /// Its options, in the order in which `create` reports them. Those of the file are not listed.
    pub keys: &'static [Key],
}

/// An option that is a byte count.
pub const fn size(name: &'static str, default: Option<&'static str>, help: &'static str) -> Key {
    Key { name, kind: Kind::Size, default, help }
}

pub const fn switch(name: &'static str, default: Option<&'static str>, help: &'static str) -> Key {
    Key { name, kind: Kind::Switch, default, help }
}

/// An option that is a whole number.
pub const fn number(name: &'static str, default: Option<&'static str>, help: &'static str) -> Key {
    Key { name, kind: Kind::Number, default, help }
}

pub const fn text(name: &'static str, default: Option<&'static str>, help: &'static str) -> Key {
    Key { name, kind: Kind::Text, default, help }
}

const SIZE: Key = size("size", None, "size of the guest disk");
const BACKING_FILE: Key = text("backing_file", None, "name of the backing image");
const BACKING_FMT: Key = text("backing_fmt", None, "format of the backing image");
const ENCRYPTION: Key = switch("encryption", None, "AES encryption (use encrypt.format instead)");

/// Options of the file beneath an image. They follow the format's own, which hide those of the same
/// name.
const FILE_KEYS: &[Key] = &[
    switch("nocow", None, "no copy-on-write (btrfs only)"),
    text("preallocation", None, "allocation of the file: off, falloc or full"),
    size("extent_size_hint", None, "extent size hint of the file; 0 is none"),
];

/// The extent size hint of a new file if none is given, as with QEMU.
const EXTENT_HINT_BYTES: u64 = 1 << 20;

/// All formats that QEMU creates.
pub const TABLES: &[Table] = &[
    Table { format: "raw", keys: &[SIZE] },
    Table { format: "file", keys: &[SIZE] },
    Table { format: "host_device", keys: &[SIZE] },
    Table {
        format: "qcow2",
        keys: &[
            ENCRYPTION,
            text("encrypt.format", None, "encryption of the data: aes or luks"),
            text("encrypt.key-secret", None, "id of the secret with the passphrase"),
            text("encrypt.cipher-alg", None, "cipher of the data"),
            text("encrypt.cipher-mode", None, "mode of the cipher"),
            text("encrypt.ivgen-alg", None, "how a sector's number enters the cipher"),
            text("encrypt.ivgen-hash-alg", None, "hash that ivgen-alg uses"),
            text("encrypt.hash-alg", None, "hash of the key derivation"),
            number("encrypt.iter-time", None, "milliseconds of the key derivation"),
            size("cluster_size", Some("65536"), "bytes of a cluster"),
            switch("extended_l2", Some("off"), "L2 entries with subclusters"),
            text("preallocation", None, "what is allocated: off, metadata, falloc or full"),
            text("compression_type", Some("zlib"), "method of compressed clusters: zlib or zstd"),
            SIZE,
            text("compat", None, "version of the format: v2 (0.10) or v3 (1.1)"),
            BACKING_FILE,
            BACKING_FMT,
            text("data_file", None, "name of the file for guest data"),
            switch("data_file_raw", None, "the data file stays readable as a raw image"),
            switch("lazy_refcounts", Some("off"), "refcounts are updated late"),
            number("refcount_bits", Some("16"), "bits of a refcount"),
        ],
    },
    Table {
        format: "vdi",
        keys: &[SIZE, switch("static", Some("off"), "all blocks are allocated at once")],
    },
    Table {
        format: "vpc",
        keys: &[
            SIZE,
            text("subformat", None, "dynamic or fixed"),
            switch("force_size", None, "exactly the size that is given, not that of a geometry"),
        ],
    },
    Table {
        format: "vhdx",
        keys: &[
            SIZE,
            size("log_size", Some("1048576"), "bytes of the log, at least 1 MiB"),
            size("block_size", Some("0"), "bytes of a block, 1 to 256 MiB; 0 chooses"),
            text("subformat", None, "dynamic or fixed"),
            switch("block_state_zero", None, "blocks that are not written are marked as zero"),
        ],
    },
    Table {
        format: "vmdk",
        keys: &[
            SIZE,
            text("adapter_type", None, "ide, lsilogic, buslogic or legacyESX"),
            BACKING_FILE,
            BACKING_FMT,
            switch("compat6", Some("off"), "version 6 of the format"),
            text("hwversion", Some("undefined"), "version of the virtual hardware"),
            text("toolsversion", None, "version of the guest tools"),
            text(
                "subformat",
                None,
                "monolithicSparse, monolithicFlat, twoGbMaxExtentSparse, twoGbMaxExtentFlat or \
                 streamOptimized",
            ),
            switch("zeroed_grain", None, "grains can be marked as zero"),
        ],
    },
    Table {
        format: "luks",
        keys: &[
            SIZE,
            text("key-secret", None, "id of the secret with the passphrase"),
            text("cipher-alg", None, "cipher of the data"),
            text("cipher-mode", None, "mode of the cipher"),
            text("ivgen-alg", None, "how a sector's number enters the cipher"),
            text("ivgen-hash-alg", None, "hash that ivgen-alg uses"),
            text("hash-alg", None, "hash of the key derivation"),
            number("iter-time", None, "milliseconds of the key derivation"),
            switch("detached-header", None, "the header is a file of its own"),
        ],
    },
    Table {
        format: "qed",
        keys: &[
            SIZE,
            BACKING_FILE,
            BACKING_FMT,
            size("cluster_size", Some("65536"), "bytes of a cluster"),
            size("table_size", None, "clusters of a table"),
        ],
    },
    Table {
        format: "qcow",
        keys: &[
            SIZE,
            BACKING_FILE,
            BACKING_FMT,
            ENCRYPTION,
            text("encrypt.format", None, "encryption of the data: aes"),
            text("encrypt.key-secret", None, "id of the secret with the key"),
        ],
    },
    Table {
        format: "parallels",
        keys: &[SIZE, size("cluster_size", Some("1048576"), "bytes of a cluster")],
    },
];

/// Formats that QEMU reads and does not create.
const READ_ONLY: &[&str] = &["bochs", "cloop", "dmg", "vvfat"];

/// The options of a format.
///
/// # Errors
/// An unknown format, or one that is only read.
pub fn table(format: &str) -> Result<&'static Table, Failure> {
    if let Some(found) = TABLES.iter().find(|table| table.format == format) {
        return Ok(found);
    }
    Err(Failure::new(if READ_ONLY.contains(&format) {
        format!("Format driver '{format}' does not support image creation")
    } else {
        format!("Unknown file format '{format}'")
    }))
}

impl Table {
    /// The options, with those of the file if `file`.
    pub fn all(&self, file: bool) -> impl Iterator<Item = &'static Key> {
        let own = self.keys;
        let beneath = FILE_KEYS
            .iter()
            .filter(move |key| file && own.iter().all(|other| other.name != key.name));
        own.iter().chain(beneath)
    }

    pub fn key(&self, name: &str) -> Option<&'static Key> {
        self.all(true).find(|key| key.name == name)
    }

    /// What `-o help` prints. Without a file name (`named`), the file's options are unknown.
    pub fn help(&self, named: bool) -> String {
        let mut keys: Vec<_> = self.all(named).collect();
        keys.sort_by_key(|key| key.name);
        let mut help = match named {
            true => "Supported options:\n".to_owned(),
            false => format!("Supported {} options:\n", self.format),
        };
        help.extend(keys.into_iter().map(Key::help_line));
        if !named {
            help += "\nThe protocol level may support further options.\nSpecify the target filename to \
                     include those options.\n";
        }
        help
    }

    pub fn driver(&self) -> Result<&'static dyn FormatDriver, Failure> {
        let name = match self.format {
            "file" | "host_device" => "raw",
            other => other,
        };
        crate::open::driver(name)
            .filter(|driver| driver.creation().is_some())
            .ok_or_else(|| Failure::new(format!("vdkit does not write {} images", self.format)))
    }
}

/// The values of all `-o` options, or a request for help.
#[derive(Debug, PartialEq, Eq)]
pub enum Asked {
    /// `-o help` or `-o ?`.
    Help,
    /// Options in order, with their values; the last of a name counts.
    Values(Vec<(String, String)>),
}

/// Reads the values of all `-o` options.
///
/// # Errors
/// An empty list, or one with an empty element at an end.
pub fn asked<'a>(texts: impl Iterator<Item = &'a str>) -> Result<Asked, Failure> {
    let mut values = Vec::new();
    let mut help = false;
    for text in texts {
        let commas = text.len() - text.trim_end_matches(',').len();
        if text.is_empty() || text.starts_with(',') || commas % 2 == 1 {
            return Err(Failure::new(format!("Invalid option list: {text}")));
        }
        for part in split_commas(text) {
            match part.split_once('=') {
                Some((key, value)) => values.push((key.to_owned(), value.to_owned())),
                None if part == "help" || part == "?" => help = true,
                None => values.push((part.clone(), String::from("\0"))),
            }
        }
    }
    Ok(if help { Asked::Help } else { Asked::Values(values) })
}

/// The name and value that are meant: a key without a value is a switch that is on, or off with
/// `no` before it.
pub fn meant<'a>(
    name: &'a str,
    value: &'a str,
    is_known: impl Fn(&str) -> bool,
) -> (&'a str, &'a str) {
    match (value, name.strip_prefix("no")) {
        ("\0", Some(rest)) if !is_known(name) => (rest, "off"),
        ("\0", _) => (name, "on"),
        _ => (name, value),
    }
}

/// The options of one new image.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub table: &'static Table,
    values: BTreeMap<&'static str, String>,
}

impl Wanted {
    /// Checks names and types.
    pub fn new(table: &'static Table, values: Vec<(String, String)>) -> Result<Self, Failure> {
        let mut wanted = Self { table, values: BTreeMap::new() };
        for (name, value) in &values {
            let (name, value) = meant(name, value, |name| table.key(name).is_some());
            let Some(key) = table.key(name) else {
                return Err(Failure::new(format!("Invalid parameter '{name}'")));
            };
            wanted.values.insert(key.name, key.checked(value)?);
        }
        Ok(wanted)
    }

    /// The value of an option, if it was given.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.values.get(name).map(String::as_str)
    }

    /// Sets an option; returns whether the format has it.
    pub fn set(&mut self, name: &str, value: &str) -> bool {
        match self.table.key(name) {
            Some(key) => {
                self.values.insert(key.name, value.to_owned());
                true
            }
            None => false,
        }
    }

    /// A byte count, if it was given.
    pub fn bytes(&self, name: &str) -> Option<u64> {
        self.get(name)?.parse().ok()
    }

    /// Sets the backing image and its format, as `-b` and `-F` do.
    pub fn set_backing(&mut self, name: Option<&str>, format: Option<&str>) -> Result<(), Failure> {
        let pairs = [
            ("backing_file", name, "Backing file"),
            ("backing_fmt", format, "Backing file format"),
        ];
        for (key, value, what) in pairs {
            if let Some(value) = value
                && !self.set(key, value)
            {
                return Err(Failure::new(format!(
                    "{what} not supported for file format '{}'",
                    self.table.format
                )));
            }
        }
        Ok(())
    }

    /// The line that `create` prints before it creates `name`.
    pub fn formatting(&self, name: &str) -> String {
        let mut line = format!("Formatting '{name}', fmt={}", self.table.format);
        for key in self.table.all(true) {
            if let Some(value) = self.get(key.name).or(key.default) {
                let _ = write!(line, " {}={}", key.name, value.replace(',', ",,"));
            }
        }
        line
    }

    /// The engine's options for an image of `guest_bytes`.
    ///
    /// # Errors
    /// A value that the format does not take, a combination that makes no sense, a missing secret.
    pub fn options(&self, objects: &Objects, guest_bytes: u64) -> Result<Options, Failure> {
        let driver = self.table.driver()?;
        let specs = driver.options();
        let mut options = Options::default();
        for (&name, value) in &self.values {
            let Some(spec) = specs.iter().find(|spec| spec.key == name) else {
                self.check_word_of_file(name, value)?;
                continue;
            };
            if self.has_no_effect(name, value) {
                continue;
            }
            if let OptionKind::Word(known) = spec.kind
                && !known.contains(&value.as_str())
            {
                return Err(Failure::new(match (name, value.as_str()) {
                    ("encrypt.format", "aes") => {
                        "vdkit does not write images with AES encryption (use encrypt.format=luks)"
                            .to_owned()
                    }
                    ("preallocation", "metadata") if self.table.format == "raw" => {
                        "Unsupported preallocation mode: metadata".to_owned()
                    }
                    ("compat", _) => format!("Parameter 'version' does not accept value '{value}'"),
                    _ => format!("Parameter '{name}' does not accept value '{value}'"),
                }));
            }
            options.set(driver.name(), specs, name, value)?;
        }
        if self.table.format == "vhdx" && options.text("block_size").is_none() {
            let bytes = vhdx_block_bytes(guest_bytes).to_string();
            options.set(driver.name(), specs, "block_size", &bytes)?;
        }
        self.check_combinations()?;
        options.set_key(self.key(objects)?);
        options.set_hints(self.hints()?);
        Ok(options)
    }

    /// Hints for the file system.
    fn hints(&self) -> Result<FileHints, Failure> {
        let bytes = self.bytes("extent_size_hint").unwrap_or(EXTENT_HINT_BYTES);
        let bytes =
            u32::try_from(bytes).map_err(|_| Failure::new("Extent size hint is too large"))?;
        let no_cow = self.get("nocow") == Some("on");
        Ok(FileHints { no_cow, extent_bytes: (bytes > 0).then_some(bytes) })
    }

    /// Whether an option says what is so without it.
    fn has_no_effect(&self, name: &str, value: &str) -> bool {
        match name {
            "backing_file" | "backing_fmt" => true,
            "block_size" => value == "0",
            // The container has no metadata that could be allocated.
            "preallocation" => self.table.format == "luks" && value == "metadata",
            "hwversion" => value == "undefined",
            "ivgen-hash-alg" => self.get("ivgen-alg") != Some("essiv"),
            "encrypt.ivgen-hash-alg" => self.get("encrypt.ivgen-alg") != Some("essiv"),
            _ => false,
        }
    }

    /// Checks options of the file, which the engine has no use for.
    fn check_word_of_file(&self, name: &str, value: &str) -> Result<(), Failure> {
        match name {
            "preallocation" => match value {
                "off" | "falloc" | "full" => Ok(()),
                "metadata" => {
                    Err(Failure::new("Unsupported preallocation mode: metadata".to_owned()))
                }
                _ => Err(Failure::new(format!("invalid parameter value: {value}"))),
            },
            "detached-header" => Err(Failure::new("Parameter 'detached-header' is unexpected")),
            _ => Ok(()),
        }
    }

    fn check_combinations(&self) -> Result<(), Failure> {
        if self.get("compat6") == Some("on")
            && self.get("hwversion").is_some_and(|v| v != "undefined")
        {
            return Err(Failure::new("compat6 cannot be enabled with hwversion set"));
        }
        if self.get("backing_fmt").is_some() && self.get("backing_file").is_none() {
            return Err(Failure::new("Backing format cannot be used without backing file"));
        }
        if self.get("encrypt.format").is_none()
            && self.values.keys().any(|key| key.starts_with("encrypt."))
        {
            return Err(Failure::new("Parameter 'encrypt.format' is missing"));
        }
        if self.get("encryption") == Some("on") {
            return Err(Failure::new(match self.get("encrypt.key-secret") {
                None => "Parameter 'encrypt.key-secret' is required for cipher",
                Some(_) => {
                    "vdkit does not write images with AES encryption (use encrypt.format=luks)"
                }
            }));
        }
        Ok(())
    }

    /// The key of an encrypted image.
    fn key(&self, objects: &Objects) -> Result<Option<Secret>, Failure> {
        let name = match (self.table.format, self.get("encrypt.format")) {
            ("luks", _) => "key-secret",
            (_, Some(_)) => "encrypt.key-secret",
            _ => return Ok(None),
        };
        match self.get(name) {
            Some(id) => objects.secret(id).map(Some),
            None => Err(Failure::new(format!("Parameter '{name}' is required for cipher"))),
        }
    }
}

/// QEMU's words for an option that is no size.
pub fn bad_size(name: &str) -> Failure {
    Failure::new(format!(
        "Parameter '{name}' expects a non-negative number below 2^64\nOptional suffix k, M, G, T, P or \
         E means kilo-, mega-, giga-, tera-, peta-\nand exabytes, respectively."
    ))
}

/// Bytes of a block of a VHDX image, if none are given.
fn vhdx_block_bytes(guest_bytes: u64) -> u64 {
    const MIB: u64 = 1 << 20;
    match guest_bytes {
        bytes if bytes > 32 << 40 => 64 * MIB,
        bytes if bytes > 100 << 30 => 32 * MIB,
        bytes if bytes > 1 << 30 => 16 * MIB,
        _ => 8 * MIB,
    }
}

/// The failure to create an image, in QEMU's words.
pub fn failed_creation(path: &Path, error: &Error) -> Failure {
    Failure::new(match error {
        Error::File { source, .. } => {
            format!("Could not create '{}': {}", path.display(), system_words(source))
        }
        other => words(other),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(format: &str, text: &str) -> Result<Wanted, Failure> {
        let Asked::Values(values) = asked([text].into_iter())? else { panic!("help") };
        Wanted::new(table(format)?, values)
    }

    #[test]
    fn the_line_has_the_options_in_qemus_order() {
        let wanted = wanted("qcow2", "size=1M,compat=v3,cluster_size=128k,lazy_refcounts").unwrap();
        assert_eq!(
            wanted.formatting("a"),
            "Formatting 'a', fmt=qcow2 cluster_size=131072 extended_l2=off compression_type=zlib \
             size=1048576 compat=v3 lazy_refcounts=on refcount_bits=16"
        );
    }

    #[test]
    fn mistakes_are_told_in_qemus_words() {
        for (format, text, words) in [
            ("qcow2", "foo=1", "Invalid parameter 'foo'"),
            ("qcow2", "list", "Invalid parameter 'list'"),
            ("qcow2", "lazy_refcounts=maybe", "Parameter 'lazy_refcounts' expects 'on' or 'off'"),
            ("qcow2", "", "Invalid option list: "),
            ("qcow2", "cluster_size=64k,", "Invalid option list: cluster_size=64k,"),
            ("nofmt", "size=1", "Unknown file format 'nofmt'"),
            ("bochs", "size=1", "Format driver 'bochs' does not support image creation"),
        ] {
            assert_eq!(wanted(format, text).unwrap_err().text, words, "{text}");
        }
    }

    #[test]
    fn help_is_sorted_and_aligned() {
        assert_eq!(
            table("raw").unwrap().help(true),
            "Supported options:\n\
             \x20 extent_size_hint=<size> - extent size hint of the file; 0 is none\n\
             \x20 nocow=<bool (on/off)>  - no copy-on-write (btrfs only)\n\
             \x20 preallocation=<str>    - allocation of the file: off, falloc or full\n\
             \x20 size=<size>            - size of the guest disk\n"
        );
        assert_eq!(asked(["a=b,help"].into_iter()).unwrap(), Asked::Help);
    }

    #[test]
    fn options_that_vdkit_lacks_are_refused_or_dropped() {
        let objects = Objects::default();
        let made = wanted("vdi", "preallocation=falloc,nocow=on").unwrap();
        assert!(made.options(&objects, 1 << 20).unwrap().is_empty());
        let refused = wanted("qcow2", "compat=0.9").unwrap().options(&objects, 1 << 20);
        assert_eq!(refused.unwrap_err().text, "Parameter 'version' does not accept value '0.9'");
        let refused = wanted("qed", "size=1M").unwrap().options(&objects, 1 << 20);
        assert_eq!(refused.unwrap_err().text, "vdkit does not write qed images");
    }
}
