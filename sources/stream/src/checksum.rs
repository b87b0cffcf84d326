//! Verification of bytes against a known hash.

use std::fmt;
use std::io::{self, Read};
use std::str::FromStr;

use sha1::Sha1;
use sha2::{Digest, Sha256, Sha512};
use vdkit_block::bytes::hex;
use vdkit_block::{Error, Result};

/// An expected hash, written `sha256:HEX`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checksum {
    method: HashMethod,
    digest: Vec<u8>,
}

/// Hash methods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HashMethod {
    /// FIPS 180: 160 bits. Detects accidental damage, not tampering.
    Sha1,
    /// FIPS 180: 256 bits.
    Sha256,
    /// FIPS 180: 512 bits.
    Sha512,
}

impl HashMethod {
    /// The name that users type.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sha1 => "sha1",
            Self::Sha256 => "sha256",
            Self::Sha512 => "sha512",
        }
    }

    /// Finds a method by name, case-insensitively.
    pub fn of_name(name: &str) -> Option<Self> {
        let known = [Self::Sha1, Self::Sha256, Self::Sha512];
        known.into_iter().find(|method| method.name().eq_ignore_ascii_case(name))
    }

    /// Bytes of a hash.
    pub fn digest_bytes(self) -> usize {
        match self {
            Self::Sha1 => 20,
            Self::Sha256 => 32,
            Self::Sha512 => 64,
        }
    }

    /// Parses a hexadecimal hash; `None` for other characters or a wrong length.
    pub fn parse_digest(self, hex: &str) -> Option<Vec<u8>> {
        let digit = |byte: u8| (byte as char).to_digit(16).map(|digit| digit as u8);
        let pairs = hex.as_bytes().chunks_exact(2);
        if hex.len() != 2 * self.digest_bytes() {
            return None;
        }
        pairs.map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?)).collect()
    }
}

impl fmt::Display for HashMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Checksum {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |why: &str| Error::invalid(format!("checksum '{text}': {why}"));
        let (name, hex) = text
            .split_once(':')
            .ok_or_else(|| bad("is not of the form METHOD:HEX, as in sha256:0123…"))?;
        let method =
            HashMethod::of_name(name).ok_or_else(|| bad("methods are sha256, sha512 and sha1"))?;
        let wanted = 2 * method.digest_bytes();
        let digest = method
            .parse_digest(hex)
            .ok_or_else(|| bad(&format!("{} has {wanted} hexadecimal digits", method.name())))?;
        Ok(Self { method, digest })
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.method.name(), hex(&self.digest))
    }
}

/// An incremental hash.
#[derive(Clone, Debug)]
pub struct Hasher(State);

#[derive(Clone, Debug)]
enum State {
    Sha1(Sha1),
    Sha256(Sha256),
    Sha512(Sha512),
}

impl Hasher {
    /// A hash of no bytes yet.
    pub fn new(method: HashMethod) -> Self {
        Self(match method {
            HashMethod::Sha1 => State::Sha1(Sha1::new()),
            HashMethod::Sha256 => State::Sha256(Sha256::new()),
            HashMethod::Sha512 => State::Sha512(Sha512::new()),
        })
    }

    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        match &mut self.0 {
            State::Sha1(hasher) => hasher.update(bytes),
            State::Sha256(hasher) => hasher.update(bytes),
            State::Sha512(hasher) => hasher.update(bytes),
        }
    }

    /// Returns the hash.
    pub fn finish(self) -> Vec<u8> {
        match self.0 {
            State::Sha1(hasher) => hasher.finalize().to_vec(),
            State::Sha256(hasher) => hasher.finalize().to_vec(),
            State::Sha512(hasher) => hasher.finalize().to_vec(),
        }
    }
}

/// Passes bytes through. Reading the end fails if their hash is not the expected one.
pub struct Checked<R> {
    inner: R,
    expected: Checksum,
    hasher: Option<Hasher>,
}

impl<R> Checked<R> {
    /// Checks `inner` against a hash.
    pub fn new(inner: R, expected: Checksum) -> Self {
        let hasher = Some(Hasher::new(expected.method));
        Self { inner, expected, hasher }
    }
}

impl<R: Read> Read for Checked<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let got = self.inner.read(buf)?;
        if got > 0 || buf.is_empty() {
            if let Some(hasher) = &mut self.hasher {
                hasher.update(&buf[..got]);
            }
            return Ok(got);
        }
        let Some(hasher) = self.hasher.take() else { return Ok(0) };
        let found = hasher.finish();
        if found == self.expected.digest {
            return Ok(0);
        }
        let method = self.expected.method.name();
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("the checksum is {method}:{}, expected {}", hex(&found), self.expected),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABC: &str = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn the_end_is_reached_only_with_the_right_hash() {
        let read = |text: &str, bytes: &[u8]| {
            let mut out = Vec::new();
            Checked::new(bytes, text.parse().unwrap()).read_to_end(&mut out).map(|_| out)
        };
        assert_eq!(read(ABC, b"abc").unwrap(), b"abc");
        assert_eq!(read("SHA1:a9993e364706816aba3e25717850c26c9cd0d89d", b"abc").unwrap(), b"abc");
        let error = read(ABC, b"abd").unwrap_err().to_string();
        assert!(error.contains("sha256:a52d") && error.contains(ABC), "{error}");
    }

    #[test]
    fn what_is_no_checksum_is_said() {
        for text in ["abc", "md5:00", "sha256:00", &ABC.replace('b', "g"), "sha1:"] {
            assert!(text.parse::<Checksum>().is_err(), "{text}");
        }
        assert_eq!(ABC.parse::<Checksum>().unwrap().to_string(), ABC);
    }
}
