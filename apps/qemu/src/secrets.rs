//! `--object`: secrets and credentials that options refer to by id.

use std::collections::BTreeMap;
use std::fs::File;

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use vdkit::{Secret, decrypt_cbc_padded};

use crate::failure::Failure;
use crate::getopt::Parsed;
use crate::names::Flat;
use crate::storages;

/// The objects of one command line.
#[derive(Clone, Debug, Default)]
pub struct Objects {
    secrets: BTreeMap<String, Secret>,
    /// Objects of other kinds, with their properties.
    others: BTreeMap<String, Flat>,
}

impl Objects {
    /// No objects.
    pub const fn new() -> Self {
        Self { secrets: BTreeMap::new(), others: BTreeMap::new() }
    }

    /// The objects of a command line, noted for images that are probed while their names are read.
    ///
    /// # Errors
    /// As [`Objects::parse`].
    pub fn of(parsed: &Parsed) -> Result<Self, Failure> {
        let objects = Self::parse(parsed.all("object"))?;
        storages::note_objects(&objects);
        Ok(objects)
    }

    /// Reads the values of all `--object` options.
    ///
    /// # Errors
    /// An unknown kind, a missing or contradicting property, a file that cannot be read.
    pub fn parse<'a>(texts: impl Iterator<Item = &'a str>) -> Result<Self, Failure> {
        let mut objects = Self::default();
        for text in texts {
            let mut properties = match text.starts_with('{') {
                true => Flat::from_json(text).map_err(Failure::new)?,
                false => Flat::from_keys(text, Some("qom-type")).map_err(Failure::new)?,
            };
            let missing = |name: &str| Failure::new(format!("Parameter '{name}' is missing"));
            let kind = properties.take("qom-type").ok_or_else(|| missing("qom-type"))?;
            let id = properties.take("id").ok_or_else(|| missing("id"))?;
            if !is_identifier(&id) {
                return Err(Failure::new(
                    "Parameter 'id' expects an identifier\nIdentifiers consist of letters, digits, '-', \
                     '.', '_', starting with a letter.",
                ));
            }
            if objects.secrets.contains_key(&id) || objects.others.contains_key(&id) {
                return Err(Failure::new(format!(
                    "attempt to add duplicate property '{id}' to object (type 'container')"
                )));
            }
            match kind.as_str() {
                "secret" => {
                    let secret = objects.read_secret(&mut properties)?;
                    objects.secrets.insert(id, secret);
                    continue;
                }
                "throttle-group" => check_limits(&properties)?,
                "tls-creds-x509" | "tls-creds-psk" | "authz-simple" | "authz-list"
                | "authz-list-file" | "authz-listfile" | "authz-pam" => {}
                _ => return Err(Failure::new(format!("Invalid parameter '{kind}'"))),
            }
            properties.put("qom-type", &kind);
            objects.others.insert(id, properties);
        }
        Ok(objects)
    }

    /// The secret with this id.
    pub fn secret(&self, id: &str) -> Result<Secret, Failure> {
        let found = self.secrets.get(id).cloned();
        found.ok_or_else(|| Failure::new(format!("No secret with id '{id}'")))
    }

    /// Whether there is a secret with this id.
    pub fn has_secret(&self, id: &str) -> bool {
        self.secrets.contains_key(id)
    }

    /// Whether there is a throttle group with this id. Its limits are not kept: requests are as fast
    /// as they can be.
    pub fn has_throttle_group(&self, id: &str) -> bool {
        self.others.get(id).is_some_and(|found| found.get("qom-type") == Some("throttle-group"))
    }

    /// A new secret, which may be encrypted with one that was read before.
    fn read_secret(&self, properties: &mut Flat) -> Result<Secret, Failure> {
        let (key, vector) = (properties.take("keyid"), properties.take("iv"));
        let (bytes, encoded) = secret(properties)?;
        let Some(key) = key else {
            return if encoded { decode_base64(bytes.bytes()) } else { Ok(bytes) };
        };
        let master = self.secret(&key)?;
        if master.bytes().len() != KEY_BYTES {
            return Err(Failure::new(format!("Key should be {KEY_BYTES} bytes in length")));
        }
        let vector = vector.ok_or_else(|| Failure::new("IV is required to decrypt secret"))?;
        let vector = decode_base64(vector.as_bytes())?;
        let vector = <[u8; VECTOR_BYTES]>::try_from(vector.bytes()).map_err(|_| {
            let found = vector.bytes().len();
            Failure::new(format!("IV should be {VECTOR_BYTES} bytes in length not {found}"))
        })?;
        let bytes = if encoded { decode_base64(bytes.bytes())? } else { bytes };
        let found = bytes.bytes().len();
        if !found.is_multiple_of(VECTOR_BYTES) {
            let why = format!("Length {found} must be a multiple of block size {VECTOR_BYTES}");
            return Err(Failure::new(why));
        }
        if found == 0 {
            return Ok(bytes);
        }
        Ok(decrypt_cbc_padded(master.bytes(), &vector, bytes.bytes())?)
    }

    /// The properties of another object; `qom-type` is its kind.
    pub fn other(&self, id: &str) -> Option<&Flat> {
        self.others.get(id)
    }
}

/// Bytes of the key of an encrypted secret (AES-256).
const KEY_BYTES: usize = 32;
/// Bytes of the initialization vector of an encrypted secret, and of a block of the cipher.
const VECTOR_BYTES: usize = 16;

/// Whether a text may be an object's id.
fn is_identifier(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphabetic())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_'))
}

/// Refuses properties that no throttle group has.
fn check_limits(properties: &Flat) -> Result<(), Failure> {
    let known = |key: &str| ["limits.", "x-bps-", "x-iops-"].iter().any(|of| key.starts_with(of));
    match properties.keys().find(|key| !known(key)) {
        Some(key) => Err(Failure::new(format!("Parameter '{key}' is unexpected"))),
        None => Ok(()),
    }
}

/// The bytes of a secret as they are given, and whether they are base64.
fn secret(properties: &mut Flat) -> Result<(Secret, bool), Failure> {
    let (data, file) = (properties.take("data"), properties.take("file"));
    let format = properties.take("format");
    if let Some(key) = properties.first_key() {
        return Err(Failure::new(format!("Parameter '{key}' is unexpected")));
    }
    let encoded = match format.as_deref() {
        None | Some("raw") => false,
        Some("base64") => true,
        Some(other) => {
            return Err(Failure::new(format!(
                "Parameter 'format' does not accept value '{other}'"
            )));
        }
    };
    let bytes = match (data, file) {
        (Some(_), Some(_)) => {
            return Err(Failure::new("'file' and 'data' are mutually exclusive"));
        }
        (None, None) => return Err(Failure::new("Either 'file' or 'data' must be provided")),
        (Some(data), None) => Secret::new(data.into_bytes()),
        // Of any length, as in QEMU.
        (None, Some(path)) => {
            File::open(&path).and_then(|file| Secret::read(file, usize::MAX)).map_err(|error| {
                Failure::new(format!(
                    "Unable to read {path}: Failed to open file “{path}”: {}",
                    crate::failure::system_words(&error)
                ))
            })?
        }
    };
    Ok((bytes, encoded))
}

/// Decodes base64 as QEMU does: line ends are skipped, and a last group that is not complete and has
/// no padding is dropped.
fn decode_base64(text: &[u8]) -> Result<Secret, Failure> {
    const LENIENT: GeneralPurpose = GeneralPurpose::new(
        &alphabet::STANDARD,
        GeneralPurposeConfig::new()
            .with_decode_padding_mode(DecodePaddingMode::Indifferent)
            .with_decode_allow_trailing_bits(true),
    );
    let wrong = || Failure::new("Base64 data contains invalid characters");
    // With room for all: a growing `Vec` leaves copies behind.
    let mut joined = Vec::with_capacity(text.len());
    joined.extend(text.iter().filter(|byte| **byte != b'\n'));
    let joined = Secret::new(joined);
    let text = joined.bytes();
    if !text.iter().all(|byte| byte.is_ascii_alphanumeric() || b"+/=".contains(byte)) {
        return Err(wrong());
    }
    let padded = text.len().is_multiple_of(4);
    let digits = text.iter().rposition(|byte| *byte != b'=').map_or(0, |last| last + 1);
    let text = &text[..if padded { digits } else { digits / 4 * 4 }];
    let mut bytes = Vec::new();
    let decoded = LENIENT.decode_vec(text, &mut bytes);
    // Also what was decoded before an error is wiped.
    let bytes = Secret::new(bytes);
    decoded.map(|()| bytes).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::FileExt;

    use super::*;

    /// Whether these bytes, which are given inverted so that the search does not find itself, are
    /// anywhere in this process's memory.
    fn in_memory(inverted: &[u8]) -> bool {
        let memory = File::open("/proc/self/mem").unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let number = |text: &str| u64::from_str_radix(text, 16).unwrap();
        let same = |(byte, inverted): (&u8, &u8)| *byte == !*inverted;
        let (mut piece, mut found) = (vec![0; 1 << 20], false);
        for map in maps.lines().filter(|map| map.contains(" rw")) {
            let (start, end) = map.split(' ').next().unwrap().split_once('-').unwrap();
            // The pieces overlap, since the bytes may cross the border between two.
            for at in (number(start)..number(end)).step_by(piece.len() / 2) {
                // Some special mappings are unreadable and contain none of our data.
                let len = memory.read_at(&mut piece, at).unwrap_or(0);
                found |= piece[..len]
                    .windows(inverted.len())
                    .any(|bytes| bytes.iter().zip(inverted).all(same));
            }
        }
        // The next search must not find what this one read.
        piece.fill(0);
        std::hint::black_box(&mut piece);
        found
    }

    #[test]
    fn a_dropped_secret_leaves_no_copy_in_memory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        // A part that survives where the start of freed memory is reused.
        let inverted = |secret: &Secret| -> Vec<u8> {
            secret.bytes()[20 << 10..][..32].iter().map(|byte| !byte).collect()
        };
        let mut noise = vec![0; 32 << 10];
        File::open("/dev/urandom").unwrap().read_exact(&mut noise).unwrap();
        let written = Secret::new(noise.iter().map(|byte| b'a' + byte % 26).collect());
        std::fs::write(&path, written.bytes()).unwrap();
        let text = inverted(&written);
        drop(written);
        assert!(!in_memory(&text), "before it is read");

        let options = ["id=a", "id=b,format=base64"]
            .map(|option| format!("secret,{option},file={}", path.display()));
        let objects = Objects::parse(options.iter().map(String::as_str)).unwrap();
        let decoded = inverted(&objects.secret("b").unwrap());
        let taken = objects.secret("a").unwrap();
        assert!(in_memory(&text) && in_memory(&decoded), "the search finds them");
        drop((objects, taken));
        assert!(!in_memory(&text), "the file's bytes");
        assert!(!in_memory(&decoded), "the decoded bytes");
    }

    #[test]
    fn secrets_are_read_in_each_form() {
        let objects = Objects::parse(
            ["secret,id=a,data=abc", "secret,id=b,data=YWJjZA==,format=base64"].into_iter(),
        )
        .unwrap();
        assert_eq!(objects.secrets["a"].bytes(), b"abc");
        assert_eq!(objects.secrets["b"].bytes(), b"abcd");
        for (text, bytes) in [("YWJj\n", &b"abc"[..]), ("YWJ", b""), ("YWJj=", b"abc"), ("", b"")] {
            assert_eq!(decode_base64(text.as_bytes()).unwrap().bytes(), bytes, "{text}");
        }
        for (text, words) in [
            ("secret,id=a", "Either 'file' or 'data' must be provided"),
            ("secret,data=x", "Parameter 'id' is missing"),
            ("thing,id=a", "Invalid parameter 'thing'"),
            ("secret,id=a,data=###,format=base64", "Base64 data contains invalid characters"),
            ("secret,id=a,data=x,foo=y", "Parameter 'foo' is unexpected"),
            ("secret,id=a,data=x,keyid=m", "No secret with id 'm'"),
        ] {
            assert_eq!(Objects::parse([text].into_iter()).unwrap_err().text, words);
        }
    }
    #[test]
    fn ids_begin_with_a_letter() {
        for id in ["a.b", "a-b", "a_1"] {
            assert!(is_identifier(id), "{id}");
        }
        for id in ["1bad", "_a", "a b", "a/b", "é", ""] {
            assert!(!is_identifier(id), "{id}");
        }
    }

    #[test]
    fn a_secret_may_be_encrypted_with_another_one() {
        // Made by `openssl enc -aes-256-cbc`.
        const KEY: &str = "secret,id=m,data=kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk";
        const VECTOR: &str = "aXZpdml2aXZpdml2aXZpdg==";
        const DATA: &str = "PLB43kImNKYTVsvfebWI6A==";
        let text = format!("secret,id=s,keyid=m,iv={VECTOR},format=base64,data={DATA}");
        let objects = Objects::parse([KEY, &text].into_iter()).unwrap();
        assert_eq!(objects.secrets["s"].bytes(), b"abc");
        for (text, words) in [
            (
                format!("secret,id=s,keyid=m,format=base64,data={DATA}"),
                "IV is required to decrypt secret",
            ),
            (text.replace(VECTOR, "YWJj"), "IV should be 16 bytes in length not 3"),
            (text.replace(DATA, "YWJj"), "Length 3 must be a multiple of block size 16"),
        ] {
            let refused = Objects::parse([KEY, &text].into_iter()).unwrap_err();
            assert_eq!(refused.text, words);
        }
        let short = "secret,id=m,data=short";
        let refused = Objects::parse([short, &text].into_iter()).unwrap_err();
        assert_eq!(refused.text, "Key should be 32 bytes in length");
    }
}
