//! New headers, and their options.

use vdkit_block::{Error, Limits, OptionKind, OptionSpec, Options, Result, Secret, random_uuid};
use zerocopy::IntoBytes;
use zerocopy::big_endian::{U16, U32};
use zeroize::Zeroizing;

use crate::cipher::{CipherSpec, Mode, Vector};
use crate::hash::Hash;
use crate::header::{HEADER_BYTES, MAGIC, SECTOR_BYTES, SLOTS, STRIPES};
use crate::on_disk::{ACTIVE, INACTIVE, RawHeader, Slot};
use crate::slots::{Method, digest_iterations, random, wipe_stack};

/// Start and alignment of key material areas, as in QEMU and cryptsetup.
const MATERIAL_ALIGN: u64 = 4096;

/// Default target time of trying a passphrase, in milliseconds.
pub(crate) const ITER_TIME_DEFAULT: u64 = 2000;

macro_rules! options {
    ($prefix:literal, $alg:literal, $mode:literal, $ivgen:literal, $hash:literal, $time:literal) => {
        [
            OptionSpec {
                key: concat!($prefix, "cipher-alg"),
                kind: OptionKind::Word(&["aes-128", "aes-192", "aes-256"]),
                default: $alg,
                help: "cipher of the data (aes-256)",
            },
            OptionSpec {
                key: concat!($prefix, "cipher-mode"),
                kind: OptionKind::Word(&["xts", "cbc"]),
                default: $mode,
                help: "mode of the cipher (xts)",
            },
            OptionSpec {
                key: concat!($prefix, "ivgen-alg"),
                kind: OptionKind::Word(&["plain", "plain64", "essiv"]),
                default: $ivgen,
                help: "how a sector's number goes into the cipher (plain64)",
            },
            OptionSpec {
                key: concat!($prefix, "ivgen-hash-alg"),
                kind: OptionKind::Word(&["sha256"]),
                default: "",
                help: "hash of ivgen-alg=essiv (sha256)",
            },
            OptionSpec {
                key: concat!($prefix, "hash-alg"),
                kind: OptionKind::Word(crate::hash::HASH_NAMES),
                default: $hash,
                help: "hash of the key derivation (sha256)",
            },
            OptionSpec {
                key: concat!($prefix, "iter-time"),
                kind: OptionKind::Number,
                default: $time,
                help: "milliseconds that trying a key shall take here (2000)",
            },
        ]
    };
}

/// Options of raw LUKS containers.
pub(crate) const OPTIONS: [OptionSpec; 6] =
    options!("", "aes-256", "xts", "plain64", "sha256", "2000");

/// Options of a format with LUKS inside, valid only with `encrypt.format=luks`.
pub const INNER_OPTIONS: [OptionSpec; 6] = options!("encrypt.", "", "", "", "", "");

/// Parameters of a new header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewHeader {
    method: Method,
    milliseconds: u64,
}

impl NewHeader {
    /// Parses the options whose names begin with `prefix`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for conflicting options.
    pub fn from_options(options: &Options, prefix: &str) -> Result<Self> {
        let text = |key: &str| options.text(&format!("{prefix}{key}"));
        let aes_bytes = match text("cipher-alg") {
            Some("aes-128") => 16,
            Some("aes-192") => 24,
            _ => 32,
        };
        let mode = if text("cipher-mode") == Some("cbc") { Mode::Cbc } else { Mode::Xts };
        let vector = match text("ivgen-alg") {
            Some("plain") => Vector::Plain,
            Some("essiv") => Vector::Essiv(Hash::Sha256),
            _ => Vector::Plain64,
        };
        if text("ivgen-hash-alg").is_some() && !matches!(vector, Vector::Essiv(_)) {
            return Err(Error::invalid(format!(
                "{prefix}ivgen-hash-alg has no meaning without {prefix}ivgen-alg=essiv"
            )));
        }
        Ok(Self {
            method: Method {
                spec: CipherSpec { aes_bytes, mode, vector },
                hash: text("hash-alg").and_then(Hash::find).unwrap_or(Hash::Sha256),
            },
            milliseconds: options
                .number(&format!("{prefix}iter-time"))
                .unwrap_or(ITER_TIME_DEFAULT),
        })
    }

    /// Bytes of a slot's key material area.
    fn area_bytes(&self) -> u64 {
        let bytes = (self.method.spec.key_bytes() * STRIPES) as u64;
        bytes.next_multiple_of(MATERIAL_ALIGN)
    }

    /// Bytes of the header with all key material: the start of the encrypted disk.
    pub fn payload_offset(&self) -> u64 {
        MATERIAL_ALIGN + SLOTS as u64 * self.area_bytes()
    }

    /// A new header with a new random key for the image; slot 0 holds it for the passphrase. The
    /// bytes after it up to [`NewHeader::payload_offset`] are arbitrary.
    ///
    /// # Errors
    /// [`Error::Key`] if the system has no random numbers.
    pub fn make(&self, file: &str, passphrase: &Secret, limits: &Limits) -> Result<MadeHeader> {
        let method = &self.method;
        let sector = |bytes: u64| U32::new((bytes / SECTOR_BYTES) as u32);
        let mut key = Zeroizing::new(vec![0; method.spec.key_bytes()]);
        random(file, &mut key)?;
        let iterations = method.iterations(self.milliseconds, limits, None);
        let slots = std::array::from_fn(|number| Slot {
            active: U32::new(if number == 0 { ACTIVE } else { INACTIVE }),
            iterations: U32::new(if number == 0 { iterations } else { 0 }),
            salt: [0; 32],
            key_material_offset: sector(MATERIAL_ALIGN + number as u64 * self.area_bytes()),
            stripes: U32::new(STRIPES as u32),
        });
        let mut header = RawHeader {
            magic: MAGIC,
            version: U16::new(1),
            cipher_name: padded("aes"),
            cipher_mode: padded(&method.spec.mode_name()),
            hash_spec: padded(method.hash.name()),
            payload_offset: sector(self.payload_offset()),
            key_bytes: U32::new(key.len() as u32),
            mk_digest: [0; 20],
            mk_digest_salt: [0; 32],
            mk_digest_iterations: U32::new(digest_iterations(iterations)),
            uuid: padded(&random_uuid()?.to_string()),
            key_slots: slots,
        };
        random(file, &mut header.mk_digest_salt)?;
        random(file, &mut header.key_slots[0].salt)?;
        let iterations = header.mk_digest_iterations.get();
        header.mk_digest = method.digest(&key, &header.mk_digest_salt, iterations);
        let material = method.lock(file, &key, passphrase, &header.key_slots[0])?;
        wipe_stack();
        let mut bytes = vec![0; MATERIAL_ALIGN as usize];
        bytes[..HEADER_BYTES].copy_from_slice(header.as_bytes());
        bytes.extend_from_slice(&material);
        Ok(MadeHeader { bytes, method: *method, key })
    }
}

/// A name in its field.
fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut field = [0; N];
    field[..text.len()].copy_from_slice(text.as_bytes());
    field
}

/// A new header.
pub struct MadeHeader {
    /// Bytes to write at the header's start.
    pub bytes: Vec<u8>,
    method: Method,
    key: Zeroizing<Vec<u8>>,
}

impl MadeHeader {
    /// The image's cipher.
    pub fn cipher(&self) -> Option<crate::AesSectors> {
        let cipher = self.method.spec.with_key(&self.key);
        wipe_stack();
        cipher
    }
}
