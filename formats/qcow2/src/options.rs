//! Options of a new image, and which combinations are valid.

use vdkit_block::{BackingRef, Codec, Error, OptionKind, OptionSpec, Options, Result};
use vdkit_luks::{INNER_OPTIONS, NewHeader};

use crate::layout::{CLUSTER_BITS, EXTENDED_CLUSTER_BITS_MIN, Geometry};

/// Options that users may give, with qemu-img's names.
pub(crate) const SPECS: &[OptionSpec] = &[
    OptionSpec {
        key: "compat",
        kind: OptionKind::Word(&["1.1", "0.10", "v3", "v2"]),
        default: "1.1",
        help: "version: 1.1 (or v3), or 0.10 (or v2) for QEMU before 1.1 of 2012",
    },
    OptionSpec {
        key: "cluster_size",
        kind: OptionKind::Size,
        default: "64K",
        help: "unit of allocation: a power of two from 512 to 2M",
    },
    OptionSpec {
        key: "preallocation",
        kind: OptionKind::Word(&["off", "metadata", "falloc", "full"]),
        default: "off",
        help: "metadata: all tables are made; falloc: space is reserved too; full: and zeroed",
    },
    OptionSpec {
        key: "extended_l2",
        kind: OptionKind::Switch,
        default: "off",
        help: "subclusters of 1/32 cluster: less copying on overlays; needs cluster_size >= 16K",
    },
    OptionSpec {
        key: "compression_type",
        kind: OptionKind::Word(&["zlib", "zstd"]),
        default: "zlib",
        help: "how compressed clusters are compressed; zstd needs QEMU 5.1",
    },
    OptionSpec {
        key: "lazy_refcounts",
        kind: OptionKind::Switch,
        default: "off",
        help: "refcounts may lag behind; after a crash they are counted anew",
    },
    OptionSpec {
        key: "refcount_bits",
        kind: OptionKind::Number,
        default: "16",
        help: "width of a refcount: 1, 2, 4, 8, 16, 32 or 64",
    },
    OptionSpec {
        key: "data_file",
        kind: OptionKind::Text,
        default: "",
        help: "name of another file that holds the guest's data",
    },
    OptionSpec {
        key: "data_file_raw",
        kind: OptionKind::Switch,
        default: "off",
        help: "the data file stays readable as a raw image",
    },
    OptionSpec {
        key: "backing_file",
        kind: OptionKind::Text,
        default: "",
        help: "name of the backing image",
    },
    OptionSpec {
        key: "backing_fmt",
        kind: OptionKind::Text,
        default: "",
        help: "format of the backing image",
    },
    OptionSpec {
        key: ENCRYPT_FORMAT,
        kind: OptionKind::Word(&["luks"]),
        default: "",
        help: "luks: the data is encrypted; needs a key",
    },
    INNER_OPTIONS[0],
    INNER_OPTIONS[1],
    INNER_OPTIONS[2],
    INNER_OPTIONS[3],
    INNER_OPTIONS[4],
    INNER_OPTIONS[5],
];

/// The option that asks for encryption.
pub(crate) const ENCRYPT_FORMAT: &str = "encrypt.format";

/// How much of a new image is allocated before the guest writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Preallocation {
    Off,
    /// All tables; the data is a hole in the file.
    Metadata,
    /// All tables, and the file system reserves the space.
    Falloc,
    /// All tables, and zeroes are written.
    Full,
}

/// The validated options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CreateOptions {
    pub(crate) version: u32,
    pub(crate) geometry: Geometry,
    pub(crate) preallocation: Preallocation,
    pub(crate) lazy_refcounts: bool,
    pub(crate) codec: Codec,
    pub(crate) data_file: Option<String>,
    pub(crate) data_file_raw: bool,
    pub(crate) backing: Option<BackingRef>,
    pub(crate) encryption: Option<NewHeader>,
}

fn invalid<T>(message: impl Into<String>) -> Result<T> {
    Err(Error::invalid(message))
}

impl CreateOptions {
    /// `backing` is the backing file that the caller names separately from the options.
    ///
    /// # Errors
    /// [`Error::Invalid`] for invalid values or combinations; the message says how to correct them.
    pub(crate) fn new(options: &Options, backing: Option<&BackingRef>) -> Result<Self> {
        let new = Self {
            version: version(options).unwrap_or(3),
            geometry: Geometry {
                cluster_bits: cluster_bits(options.size("cluster_size").unwrap_or(64 << 10))?,
                extended: options.switch("extended_l2").unwrap_or(false),
                refcount_order: refcount_order(options)?.unwrap_or(4),
            },
            preallocation: match options.text("preallocation") {
                Some("metadata") => Preallocation::Metadata,
                Some("falloc") => Preallocation::Falloc,
                Some("full") => Preallocation::Full,
                _ => Preallocation::Off,
            },
            lazy_refcounts: options.switch("lazy_refcounts").unwrap_or(false),
            codec: codec(options).unwrap_or(Codec::Deflate),
            data_file: text(options, "data_file"),
            data_file_raw: options.switch("data_file_raw").unwrap_or(false),
            backing: backing_of(options, backing)?,
            encryption: encryption_of(options)?,
        };
        new.check_version()?;
        new.check_together()?;
        Ok(new.with_implied())
    }

    fn check_version(&self) -> Result<()> {
        if self.version >= 3 {
            return Ok(());
        }
        let needs = [
            (self.lazy_refcounts, "lazy_refcounts=on"),
            (self.geometry.refcount_order != 4, "refcount_bits other than 16"),
            (self.geometry.extended, "extended_l2=on"),
            (self.codec == Codec::Zstd, "compression_type=zstd"),
            (self.data_file.is_some(), "data_file"),
        ];
        match needs.iter().find(|(asked, _)| *asked) {
            Some((_, what)) => {
                invalid(format!("{what} needs version 3; use compat=1.1 or leave it out"))
            }
            None => Ok(()),
        }
    }

    fn check_together(&self) -> Result<()> {
        if self.geometry.extended && self.geometry.cluster_bits < EXTENDED_CLUSTER_BITS_MIN {
            return invalid(format!(
                "extended_l2=on needs clusters of 16K at least, not {}; use cluster_size=64K or \
                 larger",
                self.geometry.cluster_bytes()
            ));
        }
        if self.data_file_raw && self.data_file.is_none() {
            return invalid(
                "data_file_raw=on needs a data file; name one with data_file=NAME or leave \
                 data_file_raw out",
            );
        }
        if self.encryption.is_some() && self.data_file_raw {
            return invalid(
                "an encrypted data file cannot be read as a raw image; use data_file_raw=off or no \
                 encryption",
            );
        }
        if self.encryption.is_some() && self.version < 3 && self.preallocation != Preallocation::Off
        {
            return invalid(
                "preallocated clusters of an encrypted image need zero flags, which version 2 has \
                 not; use compat=1.1 or preallocation=off",
            );
        }
        if self.backing.is_none() {
            return Ok(());
        }
        if self.data_file_raw {
            return invalid(
                "a raw data file cannot show what a backing file holds; use data_file_raw=off or \
                 no backing file",
            );
        }
        if self.preallocation != Preallocation::Off && !self.geometry.extended {
            return invalid(
                "preallocated clusters would hide the backing file; use extended_l2=on (subclusters \
                 can have space and still show it) or preallocation=off",
            );
        }
        Ok(())
    }

    /// A raw data file is the disk itself, so all clusters are mapped from the start.
    fn with_implied(mut self) -> Self {
        if self.data_file_raw && self.preallocation == Preallocation::Off {
            self.preallocation = Preallocation::Metadata;
        }
        self
    }
}

/// The text of an option; an empty one counts as none.
pub(crate) fn text(options: &Options, key: &str) -> Option<String> {
    options.text(key).filter(|t| !t.is_empty()).map(str::to_owned)
}

fn cluster_bits(bytes: u64) -> Result<u32> {
    let bits = bytes.trailing_zeros();
    if !bytes.is_power_of_two() || !CLUSTER_BITS.contains(&bits) {
        return invalid(format!("cluster_size is {bytes}, expected a power of two from 512 to 2M"));
    }
    Ok(bits)
}

/// The version that the options name.
pub(crate) fn version(options: &Options) -> Option<u32> {
    options.text("compat").map(|version| if matches!(version, "0.10" | "v2") { 2 } else { 3 })
}

/// The compression that the options name.
pub(crate) fn codec(options: &Options) -> Option<Codec> {
    let zstd = options.text("compression_type")? == "zstd";
    Some(if zstd { Codec::Zstd } else { Codec::Deflate })
}

/// log2 of the width of refcounts that the options name.
pub(crate) fn refcount_order(options: &Options) -> Result<Option<u32>> {
    match options.number("refcount_bits") {
        Some(bits) if !bits.is_power_of_two() || bits > 64 => {
            invalid(format!("refcount_bits is {bits}, expected 1, 2, 4, 8, 16, 32 or 64"))
        }
        bits => Ok(bits.map(u64::trailing_zeros)),
    }
}

/// The requested encryption; its detail options are invalid without the format.
fn encryption_of(options: &Options) -> Result<Option<NewHeader>> {
    if options.text(ENCRYPT_FORMAT).is_some() {
        return Ok(Some(NewHeader::from_options(options, "encrypt.")?));
    }
    match INNER_OPTIONS.iter().find(|spec| options.text(spec.key).is_some()) {
        Some(spec) => invalid(format!("{} has no meaning without encrypt.format=luks", spec.key)),
        None => Ok(None),
    }
}

/// Merges the caller's backing file with that of the options.
fn backing_of(options: &Options, given: Option<&BackingRef>) -> Result<Option<BackingRef>> {
    let (name, format) = (text(options, "backing_file"), text(options, "backing_fmt"));
    let (name, format) = match given {
        None => (name, format),
        Some(given) => {
            if name.as_ref().is_some_and(|name| *name != given.name) {
                return invalid(format!(
                    "backing_file is '{}', but '{}' is named as the backing file as well; name one",
                    name.unwrap_or_default(),
                    given.name
                ));
            }
            if let (Some(a), Some(b)) = (&format, &given.format)
                && a != b
            {
                return invalid(format!(
                    "backing_fmt is '{a}', but the backing file's format is given as '{b}'; give \
                     one"
                ));
            }
            (Some(given.name.clone()), given.format.clone().or(format))
        }
    };
    match (name, format) {
        (Some(name), format) => Ok(Some(BackingRef::new(name, format))),
        (None, Some(format)) => invalid(format!(
            "backing_fmt={format} without a backing file; name it with backing_file=NAME"
        )),
        (None, None) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<CreateOptions> {
        CreateOptions::new(&Options::parse("qcow2", SPECS, [text])?, None)
    }

    fn refusal(text: &str) -> String {
        match parse(text) {
            Err(Error::Invalid { what, .. }) => what,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn defaults_are_those_that_the_specs_name() {
        let bare = parse("").unwrap();
        let named: Vec<String> = SPECS
            .iter()
            .filter(|s| !s.default.is_empty())
            .map(|s| format!("{}={}", s.key, s.default))
            .collect();
        assert_eq!(parse(&named.join(",")).unwrap(), bare);
        assert_eq!(bare.version, 3);
        assert_eq!(bare.geometry.cluster_bytes(), 65536);
        assert_eq!(bare.geometry.refcount_bits(), 16);
    }

    #[test]
    fn what_does_not_go_together_is_refused_with_the_way_to_mend_it() {
        for (text, mend) in [
            ("compat=0.10,lazy_refcounts=on", "compat=1.1"),
            ("compat=v2,refcount_bits=8", "compat=1.1"),
            ("compat=0.10,extended_l2=on", "compat=1.1"),
            ("compat=0.10,compression_type=zstd", "compat=1.1"),
            ("compat=0.10,data_file=x", "compat=1.1"),
            ("extended_l2=on,cluster_size=8K", "cluster_size=64K"),
            ("cluster_size=256", "512 to 2M"),
            ("cluster_size=4M", "512 to 2M"),
            ("cluster_size=5000", "power of two"),
            ("cluster_size=0", "power of two"),
            ("refcount_bits=3", "1, 2, 4"),
            ("refcount_bits=0", "1, 2, 4"),
            ("refcount_bits=128", "1, 2, 4"),
            ("data_file_raw=on", "data_file=NAME"),
            ("data_file=x,data_file_raw=on,backing_file=y", "data_file_raw=off"),
            ("backing_file=y,preallocation=metadata", "extended_l2=on"),
            ("backing_file=y,preallocation=full", "extended_l2=on"),
            ("backing_fmt=raw", "backing_file=NAME"),
            ("encrypt.iter-time=10", "encrypt.format=luks"),
            ("encrypt.format=luks,encrypt.ivgen-hash-alg=sha256", "encrypt.ivgen-alg=essiv"),
            ("encrypt.format=luks,data_file=x,data_file_raw=on", "data_file_raw=off"),
            ("encrypt.format=luks,compat=0.10,preallocation=full", "compat=1.1"),
        ] {
            let message = refusal(text);
            assert!(message.contains(mend), "{text}: {message}");
        }
        for text in [
            "compat=0.10,lazy_refcounts=off,refcount_bits=16,compression_type=zlib",
            "extended_l2=on,cluster_size=16K",
            "backing_file=y,preallocation=falloc,extended_l2=on",
            "data_file=x,backing_file=y",
        ] {
            parse(text).unwrap();
        }
    }

    #[test]
    fn an_empty_name_of_a_data_file_is_none() {
        use vdkit_block::Creation;
        let options = Options::parse("qcow2", SPECS, ["data_file="]).unwrap();
        assert_eq!(CreateOptions::new(&options, None).unwrap().data_file, None);
        assert_eq!(crate::Qcow2Driver.new_files("a", 0, &options).unwrap(), [""; 0]);
    }

    #[test]
    fn a_raw_data_file_implies_preallocated_metadata() {
        let options = parse("data_file=x,data_file_raw=on").unwrap();
        assert_eq!(options.preallocation, Preallocation::Metadata);
        let options = parse("data_file=x,data_file_raw=on,preallocation=full").unwrap();
        assert_eq!(options.preallocation, Preallocation::Full);
    }

    #[test]
    fn the_backing_file_may_be_named_beside_the_options() {
        let given = BackingRef::new("base", None);
        let make = |text: &str| {
            let options = Options::parse("qcow2", SPECS, [text]).unwrap();
            CreateOptions::new(&options, Some(&given)).map(|o| o.backing.unwrap())
        };
        assert_eq!(make("").unwrap(), given);
        assert_eq!(make("backing_file=base,backing_fmt=raw").unwrap().format.unwrap(), "raw");
        assert!(make("backing_file=other").is_err());
    }
}
