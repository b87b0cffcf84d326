//! The descriptor: the text that lists the parts of a disk.
//!
//! vdkit changes single fields in place, and keeps unknown text. Source: VMware, "Virtual Disk
//! Format 5.0", "The Descriptor File".

use vdkit_block::{Error, Result, random_uuid, require_within};

/// `parentCID` of a disk without a parent.
pub(crate) const NO_PARENT: u32 = 0xffff_ffff;
/// Longest accepted descriptor, as in QEMU.
pub(crate) const DESCRIPTOR_BYTES_MAX: u64 = (1 << 20) - 1;
/// Most extents of one disk: 8 TiB in pieces of 2 GiB.
pub(crate) const EXTENTS_MAX: usize = 4096;

/// How an extent's bytes are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExtentType {
    /// Plain bytes in a file (`FLAT`, `VMFS`).
    Flat,
    /// A sparse extent: hosted or COWD, according to its header (`SPARSE`, `VMFSSPARSE`).
    Sparse,
    /// A space-efficient sparse extent (`SESPARSE`).
    SeSparse,
    /// No stored bytes: reads as zeroes (`ZERO`).
    Zero,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    ReadWrite,
    ReadOnly,
    None,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ExtentLine {
    pub(crate) access: Access,
    pub(crate) sectors: u64,
    pub(crate) kind: ExtentType,
    /// The file; empty for [`ExtentType::Zero`].
    pub(crate) name: String,
    /// First sector within the file.
    pub(crate) offset: u64,
}

/// A parsed descriptor, with its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    text: String,
    /// Content id.
    pub(crate) cid: u32,
    /// Content id that the parent must have, or [`NO_PARENT`].
    pub(crate) parent_cid: u32,
    pub(crate) create_type: String,
    pub(crate) parent_hint: Option<String>,
    /// The extents, in the disk's order.
    pub(crate) extents: Vec<ExtentLine>,
}

/// The text up to the first zero byte.
fn text_of(bytes: &[u8], file: &str) -> Result<String> {
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    // No file here has a name in another encoding; everything else is ASCII.
    std::str::from_utf8(&bytes[..end]).map(str::to_owned).map_err(|_| {
        let hint = "write its file names in UTF-8";
        Error::unsupported(file, "not supported: a descriptor that is not UTF-8", hint)
    })
}

impl Descriptor {
    /// Parses a descriptor: text up to the first zero byte. Its first byte is at `base` in `file`. Of
    /// several lines for one field, the first one counts.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for invalid lines; [`Error::Unsupported`] for unsupported extent types.
    pub(crate) fn parse(bytes: &[u8], base: u64, file: &str) -> Result<Self> {
        let (text, mut extents) = (text_of(bytes, file)?, Vec::new());
        let mut at = base;
        for line in text.split_inclusive('\n') {
            if let Some(extent) = extent_line(line.trim(), at, file)? {
                extents.push(extent);
                let found = extents.len() as u64;
                require_within(file, "number of extents", found, EXTENTS_MAX as u64)?;
            }
            at += line.len() as u64;
        }
        let (create_type, parent_hint) = (String::new(), None);
        let mut parsed = Self { text, cid: 0, parent_cid: 0, create_type, parent_hint, extents };
        if let Some((start, version)) = parsed.find("version")
            && !["1", "2", "3"].contains(&unquoted(version))
        {
            let (at, found) = (base + start as u64, unquoted(version));
            return Err(Error::corrupt(file, at, "descriptor version", found, "1, 2 or 3"));
        }
        let id = |key: &str| {
            let Some((start, value)) = parsed.find(key) else { return Ok(None) };
            u32::from_str_radix(unquoted(value), 16).map(Some).map_err(|_| {
                let line = parsed.text[start..].lines().next().unwrap_or_default();
                let (at, found) = (base + start as u64, clip(line.trim()));
                Error::corrupt(file, at, "descriptor", found, "a content id of hex digits")
            })
        };
        let (cid, parent_cid) = (id("CID")?, id("parentCID")?);
        let missing = |what: &str| {
            Error::corrupt(file, base, "descriptor", format!("no {what}"), format!("a {what}"))
        };
        parsed.cid = cid.ok_or_else(|| missing("CID"))?;
        parsed.parent_cid = parent_cid.unwrap_or(NO_PARENT);
        parsed.parent_hint = parsed.field("parentFileNameHint").map(str::to_owned);
        let create_type = parsed.field("createType").filter(|name| !name.is_empty());
        parsed.create_type = create_type.ok_or_else(|| missing("createType"))?.to_owned();
        Ok(parsed)
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    pub(crate) fn parent(&self) -> Option<&str> {
        self.parent_hint.as_deref().filter(|name| !name.is_empty())
    }

    /// The value of a field, without its quotes.
    pub(crate) fn field(&self, key: &str) -> Option<&str> {
        let (_, value) = self.find(key)?;
        Some(unquoted(value))
    }

    /// Offset of a field's line in the text, and the rest of the line after the `=`.
    fn find(&self, key: &str) -> Option<(usize, &str)> {
        let mut at = 0;
        for line in self.text.split_inclusive('\n') {
            if let Some((name, value)) = line.split_once('=')
                && name.trim().eq_ignore_ascii_case(key)
            {
                return Some((at, value));
            }
            at += line.len();
        }
        None
    }

    /// The text with another value of a field, in quotes if it had them or is new; `None` removes
    /// the line. New disk database fields are added at the end, others after the line of
    /// `createType`.
    pub(crate) fn with_field(&self, key: &str, value: Option<&str>) -> String {
        let text = &self.text;
        if let Some((start, rest)) = self.find(key) {
            let end = text[start..].find('\n').map_or(text.len(), |n| start + n + 1);
            let Some(value) = value else { return format!("{}{}", &text[..start], &text[end..]) };
            let head = &text[start..start + text[start..].find('=').unwrap_or(0) + 1];
            let space = &rest[..rest.len() - rest.trim_start_matches([' ', '\t']).len()];
            let line_end = &text[start..end];
            let line_end = &line_end[line_end.trim_end_matches(['\r', '\n']).len()..];
            let quoted = rest.trim_start().starts_with('"');
            let value = if quoted { format!("\"{value}\"") } else { value.to_owned() };
            return format!("{}{head}{space}{value}{line_end}{}", &text[..start], &text[end..]);
        }
        let Some(value) = value else { return text.clone() };
        if key.to_ascii_lowercase().starts_with("ddb.") {
            let gap = if text.ends_with('\n') || text.is_empty() { "" } else { "\n" };
            return format!("{text}{gap}{key} = \"{value}\"\n");
        }
        let after = self
            .find("createType")
            .map_or(0, |(start, _)| text[start..].find('\n').map_or(text.len(), |n| start + n + 1));
        format!("{}{key}=\"{value}\"\n{}", &text[..after], &text[after..])
    }

    /// Byte range of the content id's digits in the text. A new id with the same number of digits
    /// changes no other byte, and usually one sector.
    pub(crate) fn cid_digits(&self) -> Option<std::ops::Range<usize>> {
        let (start, rest) = self.find("CID")?;
        let value = start + self.text[start..].find('=')? + 1;
        let skipped = rest.len() - rest.trim_start().len();
        let digits = rest.trim_start().bytes().take_while(u8::is_ascii_hexdigit).count();
        (digits > 0).then(|| value + skipped..value + skipped + digits)
    }
}

/// A new content id of `digits` hex digits other than `old`, without reserved values.
///
/// # Errors
/// Those of [`random_uuid`].
pub(crate) fn new_cid(digits: usize, old: u32) -> Result<u32> {
    let digits = digits.clamp(1, 8) as u32;
    loop {
        let random = u64::from(random_uuid()?.as_fields().0);
        let cid = (random & ((1 << (4 * digits)) - 1)) as u32;
        // No leading zeroes, since some writers omit them.
        let short = digits < 8 && digits > 1 && cid >> (4 * (digits - 1)) == 0;
        if !short && cid < 0xffff_fffe && cid != 0 && cid != old {
            return Ok(cid);
        }
    }
}

fn unquoted(value: &str) -> &str {
    let value = value.trim();
    value.strip_prefix('"').map_or(value, |inner| inner.split('"').next().unwrap_or(inner))
}

fn clip(line: &str) -> String {
    line.chars().take(80).collect()
}

/// Parses an extent line, if the line begins with an access mode.
fn extent_line(line: &str, at: u64, file: &str) -> Result<Option<ExtentLine>> {
    let (words, rest) = line.split_once('"').map_or((line, None), |(w, r)| (w, Some(r)));
    let mut words = words.split_ascii_whitespace();
    let access = match words.next() {
        Some("RW") => Access::ReadWrite,
        Some("RDONLY") => Access::ReadOnly,
        Some("NOACCESS") => Access::None,
        _ => return Ok(None),
    };
    let fault = |expected: &str| Error::corrupt(file, at, "extent line", clip(line), expected);
    let sectors = words.next().and_then(|word| word.parse::<u64>().ok());
    let sectors = sectors.filter(|&n| n <= i64::MAX as u64 / 512);
    let sectors = sectors.ok_or_else(|| fault("a number of sectors behind the access mode"))?;
    let word = words.next().ok_or_else(|| fault("a type behind the number of sectors"))?;
    let kind = match word {
        "FLAT" | "VMFS" => ExtentType::Flat,
        "SPARSE" | "VMFSSPARSE" => ExtentType::Sparse,
        "SESPARSE" => ExtentType::SeSparse,
        "ZERO" => ExtentType::Zero,
        other => {
            return Err(Error::unsupported(
                file,
                format!("not supported: an extent of type {}", clip(other)),
                "extents of types FLAT, SPARSE, ZERO, VMFS, VMFSSPARSE and SESPARSE are read",
            ));
        }
    };
    let (name, offset) = match (kind, rest) {
        (ExtentType::Zero, _) => (String::new(), 0),
        (_, None) => return Err(fault("a file name in quotes")),
        (_, Some(rest)) => {
            let (name, behind) =
                rest.split_once('"').ok_or_else(|| fault("a file name in quotes"))?;
            let number = behind.split_ascii_whitespace().next();
            let offset = number.map(|word| word.parse::<u64>().ok());
            let offset = offset.unwrap_or(Some(0)).filter(|&n| n <= i64::MAX as u64 / 512);
            let offset = offset.ok_or_else(|| fault("a first sector behind the file name"))?;
            (name.to_owned(), offset)
        }
    };
    if kind != ExtentType::Zero && (name.is_empty() || name.contains('\0')) {
        return Err(fault("a file name in quotes"));
    }
    Ok(Some(ExtentLine { access, sectors, kind, name, offset }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Disk DescriptorFile\nversion=1\nCID=7b2f3c1\nparentCID=ffffffff\n\
        createType=\"twoGbMaxExtentSparse\"\n\n# Extent description\nRW 4194304 SPARSE \"a b-s001.vmdk\"\n\
        RDONLY 63 FLAT \"b.vmdk\" 17\r\nNOACCESS 8 ZERO\n\n#DDB\nddb.adapterType = \"ide\"\n";

    fn parse(text: &str) -> Result<Descriptor> {
        Descriptor::parse(text.as_bytes(), 0, "x")
    }

    #[test]
    fn lines_become_fields_and_extents() {
        let d = parse(TEXT).unwrap();
        assert_eq!((d.cid, d.parent_cid, d.parent()), (0x7b2_f3c1, NO_PARENT, None));
        assert_eq!(d.extents.len(), 3);
        assert_eq!(d.extents[0].name, "a b-s001.vmdk");
        assert_eq!((d.extents[1].offset, d.extents[1].access), (17, Access::ReadOnly));
        assert_eq!((d.extents[2].kind, d.extents[2].sectors), (ExtentType::Zero, 8));
        assert_eq!(d.field("ddb.adaptertype"), Some("ide"));
        // Bytes after a zero byte are not text.
        assert_eq!(parse(&format!("{TEXT}\0RW x")).unwrap(), d);
    }

    #[test]
    fn changes_leave_all_else() {
        let d = parse(TEXT).unwrap();
        let changed = d.with_field("ddb.adapterType", Some("lsilogic"));
        assert_eq!(changed, TEXT.replace("\"ide\"", "\"lsilogic\""));
        let added = d.with_field("ddb.virtualHWVersion", Some("7"));
        assert_eq!(added, format!("{TEXT}ddb.virtualHWVersion = \"7\"\n"));
        let parent = d.with_field("parentFileNameHint", Some("p.vmdk"));
        assert_eq!(parse(&parent).unwrap().parent(), Some("p.vmdk"));
        assert_eq!(parse(&parent).unwrap().with_field("parentFileNameHint", None), TEXT);
        assert_eq!(d.with_field("CID", Some("1")), TEXT.replace("7b2f3c1", "1"));
        assert_eq!(&TEXT[d.cid_digits().unwrap()], "7b2f3c1");
    }

    #[test]
    fn broken_lines_are_named() {
        for (from, to) in [
            ("CID=7b2f3c1\n", ""),
            ("CID=7b", "CID=xy"),
            ("createType", "created"),
            ("RW 4194304", "RW many"),
            ("4194304 SPARSE", "99999999999999999999 SPARSE"),
            ("\"b.vmdk\" 17", "b.vmdk"),
            ("\"b.vmdk\" 17", "\"b.vmdk\" x"),
            ("version=1", "version=9"),
        ] {
            let text = TEXT.replace(from, to);
            assert!(matches!(parse(&text), Err(Error::Corrupt(_))), "{to}");
        }
        let strange = TEXT.replace("SPARSE", "VMFSRDM");
        assert!(matches!(parse(&strange), Err(Error::Unsupported { .. })));
    }

    #[test]
    fn new_ids_have_as_many_digits() {
        for digits in 1..=8 {
            for _ in 0..100 {
                let cid = new_cid(digits, 7).unwrap();
                assert!(cid != 0 && cid < 0xffff_fffe && cid != 7, "{cid:x}");
                assert!(format!("{cid:x}").len() == digits || digits == 8, "{cid:x}");
            }
        }
    }

    /// Of two lines, a change rewrites the first one, so that one must also be what is read.
    #[test]
    fn the_first_line_of_a_field_counts() {
        let d = parse(&format!("{TEXT}CID=1\nparentCID=2\ncreateType=\"x\"\n")).unwrap();
        assert_eq!((d.cid, d.parent_cid), (0x7b2_f3c1, NO_PARENT));
        assert_eq!(d.create_type, "twoGbMaxExtentSparse");
        assert_eq!(parse(&d.with_field("CID", Some("9"))).unwrap().cid, 9);
    }
}
