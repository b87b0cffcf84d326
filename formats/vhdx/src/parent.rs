//! The parent locator [2.6.2.6]: pairs of UTF-16 texts that identify the parent of a differencing
//! image.

use std::collections::BTreeSet;

use uuid::Uuid;
use vdkit_block::{BackingRef, Error, Result};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, IntoBytes};

use crate::on_disk::{LocatorEntry, LocatorHeader};

/// The only defined locator type.
const VHDX_LOCATOR: Uuid = Uuid::from_u128(0xb04aefb7_d19e_4a81_b789_25b8e9445913);
const LINKAGE: &str = "parent_linkage";
const LINKAGE2: &str = "parent_linkage2";
const RELATIVE: &str = "relative_path";
const VOLUME: &str = "volume_path";
const ABSOLUTE: &str = "absolute_win32_path";

/// A decoded locator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ParentLocator {
    /// Keys and values, in file order.
    pub(crate) pairs: Vec<(String, String)>,
}

fn utf16(bytes: &[u8]) -> String {
    let (units, _) = bytes.as_chunks::<2>();
    let units: Vec<u16> = units.iter().map(|unit| u16::from_le_bytes(*unit)).collect();
    String::from_utf16_lossy(&units)
}

impl ParentLocator {
    /// Decodes an item.
    ///
    /// # Errors
    /// What was found and what was expected.
    pub(crate) fn parse(bytes: &[u8]) -> std::result::Result<Self, (String, String)> {
        let Ok((header, rest)) = LocatorHeader::ref_from_prefix(bytes) else {
            return Err((format!("{} bytes", bytes.len()), "20 at least [2.6.2.6.1]".into()));
        };
        let kind = Uuid::from_bytes_le(header.locator_type);
        if kind != VHDX_LOCATOR {
            return Err((format!("type {kind}"), format!("type {VHDX_LOCATOR} [2.6.2.6.1]")));
        }
        let count = usize::from(header.key_value_count.get());
        let Ok((entries, _)) = <[LocatorEntry]>::ref_from_prefix_with_elems(rest, count) else {
            let expected = "entries within the item [2.6.2.6.2]";
            return Err((format!("{count} entries in {} bytes", bytes.len()), expected.into()));
        };
        let text = |offset: U32, len: U16| {
            let (from, len) = (offset.get() as usize, usize::from(len.get()));
            bytes.get(from..from.saturating_add(len)).map(utf16).ok_or_else(|| {
                let expected = "texts within the item [2.6.2.6.2]";
                (format!("{len} bytes of text at {from:#x}"), expected.to_owned())
            })
        };
        let texts = entries.iter().map(|e| u64::from(e.key_length) + u64::from(e.value_length));
        let (texts, room) = (texts.sum::<u64>(), bytes.len() as u64);
        if texts > room {
            // Overlapping texts of an item of 1 MiB could take several GiB.
            let expected = "texts that do not overlap [2.6.2.6.2]";
            return Err((format!("{texts} bytes of texts in {room}"), expected.into()));
        }
        let (mut pairs, mut keys) = (Vec::with_capacity(count), BTreeSet::new());
        for entry in entries {
            let key = text(entry.key_offset, entry.key_length)?;
            let value = text(entry.value_offset, entry.value_length)?;
            if !keys.insert(key.clone()) {
                let expected = "each key once [2.6.2.6.2]";
                return Err((format!("a second '{}'", key.escape_debug()), expected.into()));
            }
            pairs.push((key, value));
        }
        let locator = Self { pairs };
        match locator.linkage() {
            Some(_) => Ok(locator),
            None => Err((format!("no {LINKAGE}"), "the parent's GUID [2.6.2.6.3]".into())),
        }
    }

    fn value(&self, key: &str) -> Option<&str> {
        self.pairs.iter().find(|(known, _)| known == key).map(|(_, value)| value.as_str())
    }

    /// The data-write GUID that the parent must have.
    pub(crate) fn linkage(&self) -> Option<Uuid> {
        parse_guid(self.value(LINKAGE)?)
    }

    /// An alternative data-write GUID of the parent.
    pub(crate) fn linkage2(&self) -> Option<Uuid> {
        parse_guid(self.value(LINKAGE2)?)
    }

    /// The identities of which the parent must have one, as text.
    pub(crate) fn identity(&self) -> Option<String> {
        let first = self.linkage()?.to_string();
        Some(match self.linkage2() {
            Some(second) => format!("{first} or {second}"),
            None => first,
        })
    }

    /// The parent's name, with slashes: the relative one if present, else an absolute one.
    pub(crate) fn name(&self) -> Option<String> {
        let (key, value) = [RELATIVE, ABSOLUTE, VOLUME]
            .iter()
            .find_map(|key| Some((*key, self.value(key).filter(|value| !value.is_empty())?)))?;
        let name = value.replace('\\', "/");
        if key == RELATIVE {
            return Some(name.strip_prefix("./").unwrap_or(&name).to_owned());
        }
        Some(name.strip_prefix("//?/").unwrap_or(&name).to_owned())
    }

    /// A locator for a parent.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a parent of another format; [`Error::Invalid`] for a name that is
    /// too long or that a locator cannot hold, and without the parent's identity.
    pub(crate) fn new(file: &str, backing: &BackingRef) -> Result<Self> {
        if let Some(format) = backing.format.as_deref().filter(|format| *format != "vhdx") {
            return Err(Error::unsupported(
                file,
                format!("not supported: a vhdx image on a {format} image"),
                "its parent must be a vhdx image; use a qcow2 image instead",
            ));
        }
        let linkage = backing.identity.as_deref().and_then(parse_guid);
        let Some(linkage) = linkage else {
            return Err(Error::invalid_for(
                &file,
                format!(
                    "a differencing VHDX is tied to its parent by the parent's GUID, and '{}' \
                 has none or was not opened",
                    backing.name
                ),
            ));
        };
        if backing.name.contains('\\') {
            return Err(Error::invalid_for(
                &file,
                format!(
                    "the parent's name '{}' has a backslash, which separates folders in a \
                 VHDX",
                    backing.name
                ),
            ));
        }
        let mut name = backing.name.replace('/', "\\");
        // Also for an absolute name: an absolute Win32 path needs a drive, and there is none here.
        if !["\\", ".\\", "..\\"].iter().any(|start| name.starts_with(start)) {
            name.insert_str(0, ".\\");
        }
        if name.encode_utf16().count() > 0x7fff {
            return Err(Error::invalid_for(&file, "the parent's name is too long"));
        }
        let pairs =
            vec![(LINKAGE.to_owned(), format!("{{{linkage}}}")), (RELATIVE.to_owned(), name)];
        Ok(Self { pairs })
    }

    /// Encodes the item.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let header = LocatorHeader {
            locator_type: VHDX_LOCATOR.to_bytes_le(),
            reserved: U16::ZERO,
            key_value_count: (self.pairs.len() as u16).into(),
        };
        let texts_at = size_of::<LocatorHeader>() + self.pairs.len() * size_of::<LocatorEntry>();
        let mut texts = Vec::new();
        let mut add = |text: &str| {
            let from = texts.len();
            texts.extend(text.encode_utf16().flat_map(u16::to_le_bytes));
            (U32::new((texts_at + from) as u32), U16::new((texts.len() - from) as u16))
        };
        let entry = |(key, value): &(String, String)| {
            let (key_offset, key_length) = add(key);
            let (value_offset, value_length) = add(value);
            LocatorEntry { key_offset, value_offset, key_length, value_length }
        };
        let entries: Vec<LocatorEntry> = self.pairs.iter().map(entry).collect();
        [header.as_bytes(), entries.as_bytes(), &texts].concat()
    }
}

/// A GUID from text, with or without hyphens and braces.
fn parse_guid(text: &str) -> Option<Uuid> {
    Uuid::try_parse(text.trim()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backing(name: &str) -> BackingRef {
        let identity = Some("01234567-89ab-cdef-0123-456789abcdef".to_owned());
        BackingRef { identity, ..BackingRef::new(name, None) }
    }

    #[test]
    fn names_come_back() {
        for name in ["base.vhdx", "../disks/base.vhdx", "sub/bäse.vhdx", "/disks/base.vhdx"] {
            let locator = ParentLocator::new("child", &backing(name)).unwrap();
            let read = ParentLocator::parse(&locator.encode()).unwrap();
            assert_eq!(read, locator);
            assert_eq!(read.name().as_deref(), Some(name));
            assert_eq!(read.linkage().unwrap().to_string(), backing(name).identity.unwrap());
        }
        assert!(ParentLocator::new("child", &backing("a\\b")).is_err());
        assert!(ParentLocator::new("child", &BackingRef::new("base.vhdx", None)).is_err());
    }

    #[test]
    fn paths_of_windows_become_names() {
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let linkage = pair(LINKAGE, "{01234567-89ab-cdef-0123-456789abcdef}");
        let name = |pairs: Vec<_>| ParentLocator { pairs }.name();
        let absolute = pair(ABSOLUTE, "\\\\?\\C:\\disks\\base.vhdx");
        assert_eq!(name(vec![absolute.clone()]).as_deref(), Some("C:/disks/base.vhdx"));
        // An empty one hides no other.
        let pairs = vec![pair(RELATIVE, ""), absolute.clone()];
        assert_eq!(name(pairs).as_deref(), Some("C:/disks/base.vhdx"));
        let relative = pair(RELATIVE, ".\\base.vhdx");
        assert_eq!(name(vec![linkage.clone(), absolute, relative]).as_deref(), Some("base.vhdx"));
        assert_eq!(name(vec![linkage]), None);
    }

    #[test]
    fn overlapping_texts_are_refused_before_they_are_copied() {
        let good = ParentLocator::new("child", &backing("base.vhdx")).unwrap().encode();
        let (count, texts_at) = (u16::MAX, size_of::<LocatorHeader>() as u32);
        let mut bytes = good[..size_of::<LocatorHeader>()].to_vec();
        bytes[18..20].copy_from_slice(&count.to_le_bytes());
        let texts_at = texts_at + u32::from(count) * size_of::<LocatorEntry>() as u32;
        for index in 0..u32::from(count) {
            let entry = LocatorEntry {
                key_offset: (texts_at + 2 * index).into(),
                value_offset: texts_at.into(),
                key_length: U16::new(0xfffe),
                value_length: U16::new(0xfffe),
            };
            bytes.extend_from_slice(entry.as_bytes());
        }
        bytes.extend((0..100_000u32).flat_map(|n| (n as u16).to_le_bytes()));
        let (found, expected) = ParentLocator::parse(&bytes).unwrap_err();
        assert!(expected.contains("overlap"), "{found}, {expected}");
    }

    #[test]
    fn damage_is_told() {
        let good = ParentLocator::new("child", &backing("base.vhdx")).unwrap().encode();
        for len in 0..good.len() {
            assert!(ParentLocator::parse(&good[..len]).is_err(), "{len}");
        }
        for at in 0..20 + 24 {
            let mut bad = good.clone();
            bad[at] ^= 0xff;
            // Must be an error or a different text, not a panic.
            let _ = ParentLocator::parse(&bad);
        }
    }
}
