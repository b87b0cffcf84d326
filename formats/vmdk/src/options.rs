//! Options of new images, by qemu-img's names.

use vdkit_block::{Error, Limits, OptionKind, OptionSpec, Options, Result, require_within};

/// Bytes of each extent of a split disk, except the last one.
pub(crate) const SPLIT_BYTES: u64 = 2 << 30;
/// Largest disk for which grain directories are accepted.
pub(crate) const GUEST_BYTES_MAX: u64 = 64 << 40;
/// Tools version for "unknown, managed by the guest", as QEMU writes it.
const TOOLS_VERSION: &str = "2147483647";

pub(crate) const SUBFORMAT: &str = "subformat";
pub(crate) const ADAPTER_TYPE: &str = "adapter_type";
pub(crate) const HWVERSION: &str = "hwversion";
pub(crate) const TOOLSVERSION: &str = "toolsversion";

pub(crate) const SPECS: &[OptionSpec] = &[
    OptionSpec {
        key: SUBFORMAT,
        kind: OptionKind::Word(&[
            "monolithicSparse",
            "monolithicFlat",
            "twoGbMaxExtentSparse",
            "twoGbMaxExtentFlat",
            "streamOptimized",
        ]),
        default: "monolithicSparse",
        help: "one sparse or plain file, files of 2 GiB, or a compressed stream for import",
    },
    OptionSpec {
        key: ADAPTER_TYPE,
        kind: OptionKind::Word(&["ide", "buslogic", "lsilogic", "legacyESX"]),
        default: "ide",
        help: "the virtual adapter that the descriptor names",
    },
    OptionSpec {
        key: HWVERSION,
        kind: OptionKind::Number,
        default: "4",
        help: "virtual hardware version in the descriptor",
    },
    OptionSpec {
        key: TOOLSVERSION,
        kind: OptionKind::Number,
        default: TOOLS_VERSION,
        help: "version of the guest's tools in the descriptor",
    },
    OptionSpec {
        key: "compat6",
        kind: OptionKind::Switch,
        default: "off",
        help: "virtual hardware version 6",
    },
    OptionSpec {
        key: "zeroed_grain",
        kind: OptionKind::Switch,
        default: "off",
        help: "mark grains of zeroes in the grain tables (header version 2)",
    },
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Subformat {
    MonolithicSparse,
    MonolithicFlat,
    SplitSparse,
    SplitFlat,
    Stream,
}

impl Subformat {
    pub(crate) fn create_type(self) -> &'static str {
        match self {
            Self::MonolithicSparse => "monolithicSparse",
            Self::MonolithicFlat => "monolithicFlat",
            Self::SplitSparse => "twoGbMaxExtentSparse",
            Self::SplitFlat => "twoGbMaxExtentFlat",
            Self::Stream => "streamOptimized",
        }
    }

    pub(crate) fn is_flat(self) -> bool {
        matches!(self, Self::MonolithicFlat | Self::SplitFlat)
    }

    /// Whether the image's own file is the single extent.
    pub(crate) fn is_one_file(self) -> bool {
        matches!(self, Self::MonolithicSparse | Self::Stream)
    }

    fn split(self) -> bool {
        matches!(self, Self::SplitSparse | Self::SplitFlat)
    }
}

/// Validated options of a new image.
#[derive(Clone, Debug)]
pub(crate) struct NewVmdk {
    pub(crate) subformat: Subformat,
    pub(crate) adapter: String,
    pub(crate) hardware: String,
    pub(crate) tools: String,
    pub(crate) zeroed_grain: bool,
}

impl NewVmdk {
    /// # Errors
    /// [`Error::Invalid`] for invalid combinations.
    pub(crate) fn new(options: &Options) -> Result<Self> {
        let subformat = match options.text(SUBFORMAT) {
            Some("monolithicFlat") => Subformat::MonolithicFlat,
            Some("twoGbMaxExtentSparse") => Subformat::SplitSparse,
            Some("twoGbMaxExtentFlat") => Subformat::SplitFlat,
            Some("streamOptimized") => Subformat::Stream,
            _ => Subformat::MonolithicSparse,
        };
        let compat6 = options.switch("compat6") == Some(true);
        let hardware = options.text(HWVERSION);
        if compat6 && hardware.is_some() {
            return Err(Error::invalid("compat6 and hwversion say different things"));
        }
        let zeroed_grain = options.switch("zeroed_grain") == Some(true);
        if zeroed_grain && (subformat.is_flat() || subformat == Subformat::Stream) {
            return Err(Error::invalid(format!(
                "zeroed_grain is for plain sparse images, not for {}",
                subformat.create_type()
            )));
        }
        Ok(Self {
            subformat,
            adapter: options.text(ADAPTER_TYPE).unwrap_or("ide").to_owned(),
            hardware: hardware.unwrap_or(if compat6 { "6" } else { "4" }).to_owned(),
            tools: options.text(TOOLSVERSION).unwrap_or(TOOLS_VERSION).to_owned(),
            zeroed_grain,
        })
    }

    /// Bytes of each extent of a disk.
    pub(crate) fn extents(&self, guest_bytes: u64) -> Vec<u64> {
        let step = if self.subformat.split() { SPLIT_BYTES } else { u64::MAX };
        let mut rest = guest_bytes;
        let mut extents = Vec::new();
        while rest > 0 {
            extents.push(rest.min(step));
            rest -= rest.min(step);
        }
        extents
    }

    /// The other files of a disk, as VMware and QEMU name them.
    ///
    /// # Errors
    /// [`Error::Invalid`] for too many files, or a name that a descriptor cannot hold.
    pub(crate) fn files(&self, image: &str, guest_bytes: u64) -> Result<Vec<String>> {
        check_name(image)?;
        if self.subformat.is_one_file() {
            return Ok(Vec::new());
        }
        let (prefix, suffix) = match image.rfind('.') {
            Some(dot) if dot > 0 => image.split_at(dot),
            _ => (image, ""),
        };
        let count = if self.subformat.split() {
            guest_bytes.div_ceil(SPLIT_BYTES)
        } else {
            u64::from(guest_bytes > 0)
        };
        let limit = Limits::default().files_max as u64;
        if count > limit {
            return Err(Error::invalid_for(
                &image,
                format!(
                    "{guest_bytes} bytes in pieces of 2 GiB are {count} files, more than the \
                 limit of {limit}; choose another subformat"
                ),
            ));
        }
        Ok((1..=count)
            .map(|number| match self.subformat {
                Subformat::SplitSparse => format!("{prefix}-s{number:03}{suffix}"),
                Subformat::SplitFlat => format!("{prefix}-f{number:03}{suffix}"),
                _ => format!("{prefix}-flat{suffix}"),
            })
            .collect())
    }
}

/// Rejects a name that cannot be quoted in a descriptor.
pub(crate) fn check_name(name: &str) -> Result<()> {
    if name.contains(['"', '\n', '\r', '\0']) {
        return Err(Error::invalid(format!(
            "'{}' cannot be named in a VMDK descriptor: no quotes and no line ends",
            name.escape_debug()
        )));
    }
    Ok(())
}

/// The size of a new disk in whole sectors.
///
/// # Errors
/// [`Error::Limit`] above [`GUEST_BYTES_MAX`].
pub(crate) fn whole_sectors(guest_bytes: u64, file: &str) -> Result<u64> {
    require_within(file, "size", guest_bytes, GUEST_BYTES_MAX)?;
    Ok(guest_bytes.next_multiple_of(512))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(text: &str) -> Result<NewVmdk> {
        NewVmdk::new(&Options::parse("vmdk", SPECS, [text]).unwrap())
    }

    #[test]
    fn files_are_named_as_vmware_does() {
        let names = |text, image: &str, bytes| new(text).unwrap().files(image, bytes).unwrap();
        assert!(names("", "a.vmdk", 1 << 40).is_empty());
        assert_eq!(names("subformat=monolithicFlat", "a.b.vmdk", 1 << 40), ["a.b-flat.vmdk"]);
        let split = "subformat=twoGbMaxExtentSparse";
        assert_eq!(names(split, "a", (4 << 30) + 512), ["a-s001", "a-s002", "a-s003"]);
        assert_eq!(new(split).unwrap().extents((4 << 30) + 512), [2 << 30, 2 << 30, 512]);
        assert!(new(split).unwrap().files("a", 9 << 40).is_err());
        assert!(new("").unwrap().files("a\"b", 1).is_err());
    }

    #[test]
    fn options_must_go_together() {
        for text in [
            "compat6=on,hwversion=7",
            "zeroed_grain=on,subformat=monolithicFlat",
            "zeroed_grain=on,subformat=streamOptimized",
        ] {
            assert!(new(text).is_err(), "{text}");
        }
        assert_eq!(new("compat6=on").unwrap().hardware, "6");
    }
}
