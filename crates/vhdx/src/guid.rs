//! GUIDs as they stand in the file: three little-endian numbers and eight bytes.

use std::fmt;

use vdkit_block::{Error, Result};

/// A GUID in the order of its bytes in the file.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Guid(pub [u8; 16]);

impl Guid {
    /// All zero: no log, no entry.
    pub const ZERO: Self = Self([0; 16]);

    /// From its four parts, as specifications write it.
    pub(crate) const fn new(a: u32, b: u16, c: u16, d: [u8; 8]) -> Self {
        let (a, b, c) = (a.to_le_bytes(), b.to_le_bytes(), c.to_le_bytes());
        Self([
            a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], d[0], d[1], d[2], d[3], d[4], d[5],
            d[6], d[7],
        ])
    }

    /// One that nobody else has (version 4).
    ///
    /// # Errors
    /// [`Error::Invalid`] where the system has no random numbers.
    pub(crate) fn random() -> Result<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)
            .map_err(|error| Error::Invalid(format!("no random numbers: {error}")))?;
        bytes[7] = bytes[7] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Ok(Self(bytes))
    }

    /// From text: 32 hexadecimal digits, with hyphens or without, in braces or not.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let text = text.strip_prefix('{').and_then(|t| t.strip_suffix('}')).unwrap_or(text);
        let mut digits = text.chars().filter(|c| *c != '-');
        let mut bytes = [0; 16];
        for byte in &mut bytes {
            let (high, low) = (digits.next()?.to_digit(16)?, digits.next()?.to_digit(16)?);
            *byte = (high << 4 | low) as u8;
        }
        if digits.next().is_some() {
            return None;
        }
        bytes[..4].reverse();
        bytes[4..6].reverse();
        bytes[6..8].reverse();
        Some(Self(bytes))
    }

    /// The GUID at a place that lies within `bytes`.
    pub(crate) fn at(bytes: &[u8], at: usize) -> Self {
        let mut guid = [0; 16];
        guid.copy_from_slice(&bytes[at..at + 16]);
        Self(guid)
    }
}

impl fmt::Display for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for index in [3, 2, 1, 0, 16, 5, 4, 16, 7, 6, 16, 8, 9, 16, 10, 11, 12, 13, 14, 15] {
            match self.0.get(index) {
                Some(byte) => write!(f, "{byte:02x}")?,
                None => f.write_str("-")?,
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_bytes_agree() {
        let guid = Guid::new(0x2dc2_7766, 0xf623, 0x4200, *b"\x9d\x64\x11\x5e\x9b\xfd\x4a\x08");
        let text = "2dc27766-f623-4200-9d64-115e9bfd4a08";
        assert_eq!(guid.to_string(), text);
        assert_eq!(Guid::parse(text), Some(guid));
        assert_eq!(Guid::parse(&format!("{{{}}}", text.to_uppercase())), Some(guid));
        assert_eq!(Guid::parse("2dc27766-f623-4200-9d64-115e9bfd4a0"), None);
        assert_eq!(Guid::parse(&format!("{text}00")), None);
        assert_ne!(Guid::random().unwrap(), Guid::random().unwrap());
    }
}
