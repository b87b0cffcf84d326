//! The header: parsed from untrusted bytes, and validated into a trusted type.
//!
//! Source: LUKS1 on-disk format specification, section 3 "The partition header". All numbers are
//! big-endian.

use std::ops::Range;
use vdkit_block::bytes::{array, be16, be32};

use vdkit_block::{Error, HostOffset, KeyHeader, KeySlotInfo, Result, Storage};

use crate::cipher::{CipherSpec, KNOWN};
use crate::hash::{HASH_NAMES, Hash};

/// Bytes of the header itself; key material follows.
pub const HEADER_BYTES: usize = 592;
/// The first six bytes.
pub const MAGIC: [u8; 6] = *b"LUKS\xba\xbe";
/// Number of key slots.
pub const SLOTS: usize = 8;
/// Number of stripes of each key.
pub(crate) const STRIPES: usize = 4000;
/// Unit of offsets.
pub(crate) const SECTOR_BYTES: u64 = 512;
/// Maximum accepted key length of the image; the supported ciphers use at most 64 bytes.
const KEY_BYTES_MAX: u32 = 512;

/// Offsets of the fields.
pub(crate) mod field {
    pub(crate) const VERSION: usize = 6;
    pub(crate) const CIPHER_NAME: usize = 8;
    pub(crate) const CIPHER_MODE: usize = 40;
    pub(crate) const HASH: usize = 72;
    pub(crate) const PAYLOAD: usize = 104;
    pub(crate) const KEY_BYTES: usize = 108;
    pub(crate) const DIGEST: usize = 112;
    pub(crate) const DIGEST_SALT: usize = 132;
    pub(crate) const DIGEST_ITERATIONS: usize = 164;
    pub(crate) const UUID: usize = 168;
    pub(crate) const SLOTS: usize = 208;
    /// Bytes of a slot: state, iterations, salt, sector of the material, stripes.
    pub(crate) const SLOT_BYTES: usize = 48;
    pub(crate) const SLOT_ITERATIONS: usize = 4;
    pub(crate) const SLOT_SALT: usize = 8;
    pub(crate) const SLOT_MATERIAL: usize = 40;
    pub(crate) const SLOT_STRIPES: usize = 44;
}

/// The state of a key slot.
pub(crate) const ACTIVE: u32 = 0x00ac_71f3;
pub(crate) const INACTIVE: u32 = 0x0000_dead;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) active: bool,
    pub(crate) iterations: u32,
    pub(crate) salt: [u8; 32],
    /// Sectors from the start of the header to the key material.
    pub(crate) material: u32,
}

/// A validated header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    pub(crate) cipher_name: String,
    pub(crate) cipher_mode: String,
    pub(crate) hash_name: String,
    /// Sectors from the start of the header to the encrypted disk.
    pub(crate) payload: u32,
    pub(crate) key_bytes: u32,
    pub(crate) digest: [u8; 20],
    pub(crate) digest_salt: [u8; 32],
    pub(crate) digest_iterations: u32,
    pub(crate) uuid: String,
    pub(crate) slots: [Slot; SLOTS],
}

/// Location of a header in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeaderPlace {
    /// Its start.
    pub offset: HostOffset,
    /// Maximum bytes of it and its key material.
    pub room: u64,
}

/// Builds errors with the field's offset in the file.
struct Faults<'a> {
    file: &'a str,
    base: u64,
}

impl Faults<'_> {
    fn of<T>(
        &self,
        field: usize,
        what: &'static str,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> Result<T> {
        Err(Error::corrupt(self.file, self.base + field as u64, what, found, expected))
    }

    /// A NUL-terminated name within its field.
    fn text(&self, bytes: &[u8], field: usize, len: usize, what: &'static str) -> Result<String> {
        let bytes = &bytes[field..field + len];
        let end = bytes.iter().position(|&b| b == 0).unwrap_or(len);
        match std::str::from_utf8(&bytes[..end]) {
            Ok(text) if end < len && text.bytes().all(|b| b.is_ascii_graphic()) => {
                Ok(text.to_owned())
            }
            _ => self.of(field, what, format!("{:02x?}", &bytes[..end.min(8)]), "a short name"),
        }
    }
}

impl Header {
    /// Reads and validates a header, with one read.
    ///
    /// # Errors
    /// [`Error::Corrupt`] with offset, found and expected if a field violates the specification;
    /// [`Error::Unsupported`] for another version.
    pub fn read(storage: &dyn Storage, place: HeaderPlace) -> Result<Self> {
        let mut bytes = [0; HEADER_BYTES];
        let got = storage.read_up_to(&mut bytes, place.offset)?;
        let got = got.min(usize::try_from(place.room).unwrap_or(usize::MAX));
        Self::parse(storage.name(), &bytes[..got], place)
    }

    /// As [`Header::read`], from bytes in memory.
    ///
    /// # Errors
    /// As [`Header::read`].
    pub fn parse(file: &str, bytes: &[u8], place: HeaderPlace) -> Result<Self> {
        let faults = Faults { file, base: place.offset.0 };
        if bytes.len() < HEADER_BYTES {
            let found = format!("{} bytes", bytes.len());
            return faults.of(0, "LUKS header", found, format!("{HEADER_BYTES} bytes"));
        }
        if bytes[..6] != MAGIC {
            let found = format!("{:02x?}", &bytes[..6]);
            return faults.of(0, "LUKS magic", found, format!("{MAGIC:02x?}"));
        }
        let version = be16(bytes, field::VERSION);
        if version != 1 {
            return Err(Error::unsupported(
                file,
                format!("not supported: LUKS version {version}"),
                "version 1 is known; where its cipher and key derivation allow, 'cryptsetup convert \
                 --type luks1' makes one, else open it with cryptsetup and copy the device",
            ));
        }
        let header = Self {
            cipher_name: faults.text(bytes, field::CIPHER_NAME, 32, "cipher-name")?,
            cipher_mode: faults.text(bytes, field::CIPHER_MODE, 32, "cipher-mode")?,
            hash_name: faults.text(bytes, field::HASH, 32, "hash-spec")?,
            payload: be32(bytes, field::PAYLOAD),
            key_bytes: be32(bytes, field::KEY_BYTES),
            digest: array(bytes, field::DIGEST),
            digest_salt: array(bytes, field::DIGEST_SALT),
            digest_iterations: be32(bytes, field::DIGEST_ITERATIONS),
            uuid: faults.text(bytes, field::UUID, 40, "uuid")?,
            slots: Self::parse_slots(&faults, bytes)?,
        };
        header.check(&faults, place.room)?;
        Ok(header)
    }

    fn parse_slots(faults: &Faults<'_>, bytes: &[u8]) -> Result<[Slot; SLOTS]> {
        let mut slots = std::array::from_fn(|_| Slot {
            active: false,
            iterations: 0,
            salt: [0; 32],
            material: 0,
        });
        for (number, slot) in slots.iter_mut().enumerate() {
            let at = field::SLOTS + number * field::SLOT_BYTES;
            slot.active = match be32(bytes, at) {
                ACTIVE => true,
                INACTIVE => false,
                other => {
                    let expected = format!("{ACTIVE:#x} or {INACTIVE:#x}");
                    return faults.of(at, "state of a key slot", format!("{other:#x}"), expected);
                }
            };
            slot.iterations = be32(bytes, at + field::SLOT_ITERATIONS);
            slot.salt = array(bytes, at + field::SLOT_SALT);
            slot.material = be32(bytes, at + field::SLOT_MATERIAL);
            let stripes = be32(bytes, at + field::SLOT_STRIPES);
            if stripes as usize != STRIPES {
                let (field, expected) = (at + field::SLOT_STRIPES, STRIPES.to_string());
                return faults.of(field, "stripes of a key slot", stripes.to_string(), expected);
            }
            if slot.active && slot.iterations == 0 {
                let field = at + field::SLOT_ITERATIONS;
                return faults.of(field, "iterations of a key slot", "0", "at least 1");
            }
        }
        Ok(slots)
    }

    fn check(&self, faults: &Faults<'_>, room: u64) -> Result<()> {
        if self.key_bytes == 0 || self.key_bytes > KEY_BYTES_MAX {
            let expected = format!("1 to {KEY_BYTES_MAX}");
            return faults.of(field::KEY_BYTES, "key-bytes", self.key_bytes.to_string(), expected);
        }
        if self.digest_iterations == 0 {
            return faults.of(field::DIGEST_ITERATIONS, "mk-digest-iter", "0", "at least 1");
        }
        // A detached header has no payload after it.
        let end = match self.payload {
            0 => room,
            payload => room.min(u64::from(payload) * SECTOR_BYTES),
        };
        for number in 0..SLOTS {
            let at = field::SLOTS + number * field::SLOT_BYTES + field::SLOT_MATERIAL;
            let area = self.material_area(number);
            if area.start < HEADER_BYTES as u64 || area.end > end {
                return faults.of(
                    at,
                    "key material of a slot",
                    format!("bytes {:#x} to {:#x}", area.start, area.end),
                    format!("bytes behind the header, up to {end:#x}"),
                );
            }
            for other in 0..number {
                let before = self.material_area(other);
                if area.start < before.end && before.start < area.end {
                    return faults.of(
                        at,
                        "key material of a slot",
                        format!("bytes that slot {other} has as well"),
                        "bytes of its own",
                    );
                }
            }
        }
        Ok(())
    }

    /// The range of a slot's key material, in whole sectors, from the start of the header.
    pub(crate) fn material_area(&self, slot: usize) -> Range<u64> {
        let start = u64::from(self.slots[slot].material) * SECTOR_BYTES;
        start..start + self.material_bytes().next_multiple_of(SECTOR_BYTES)
    }

    pub(crate) fn material_bytes(&self) -> u64 {
        u64::from(self.key_bytes) * STRIPES as u64
    }

    /// Bytes from the start of the header to the encrypted disk; 0 for a detached header.
    pub fn payload_offset(&self) -> u64 {
        u64::from(self.payload) * SECTOR_BYTES
    }

    /// The cipher.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an unknown one.
    pub fn cipher(&self, file: &str) -> Result<CipherSpec> {
        let (name, mode) = (&self.cipher_name, &self.cipher_mode);
        CipherSpec::find(name, mode, self.key_bytes as usize).ok_or_else(|| {
            Error::unsupported(
                file,
                format!(
                    "not supported: the cipher {name}-{mode} with keys of {} bytes",
                    self.key_bytes
                ),
                format!("known are {KNOWN}; open it with cryptsetup and copy the device"),
            )
        })
    }

    /// The hash.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an unknown one.
    pub fn hash(&self, file: &str) -> Result<Hash> {
        Hash::find(&self.hash_name).ok_or_else(|| {
            Error::unsupported(
                file,
                format!("not supported: the hash {}", self.hash_name),
                format!(
                    "known are {}; open it with cryptsetup and copy the device",
                    HASH_NAMES.join(", ")
                ),
            )
        })
    }

    /// The cost of trying a key on a slot, in rounds of its key derivation.
    pub(crate) fn rounds(&self, slot: usize, hash: Hash) -> u64 {
        let of = |iterations: u32, bytes: usize| u64::from(iterations) * hash.rounds(bytes);
        of(self.slots[slot].iterations, self.key_bytes as usize)
            + of(self.digest_iterations, self.digest.len())
    }

    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(field::VERSION, &1u16.to_be_bytes());
        put(field::CIPHER_NAME, self.cipher_name.as_bytes());
        put(field::CIPHER_MODE, self.cipher_mode.as_bytes());
        put(field::HASH, self.hash_name.as_bytes());
        put(field::PAYLOAD, &self.payload.to_be_bytes());
        put(field::KEY_BYTES, &self.key_bytes.to_be_bytes());
        put(field::DIGEST, &self.digest);
        put(field::DIGEST_SALT, &self.digest_salt);
        put(field::DIGEST_ITERATIONS, &self.digest_iterations.to_be_bytes());
        put(field::UUID, self.uuid.as_bytes());
        for (number, slot) in self.slots.iter().enumerate() {
            put(field::SLOTS + number * field::SLOT_BYTES, &slot.encode());
        }
        out
    }

    /// The header as [`vdkit_block::ImageInfo`] describes it.
    pub fn describe(&self) -> KeyHeader {
        let slot = |slot: &Slot| KeySlotInfo {
            active: slot.active,
            iterations: u64::from(slot.iterations),
            material_offset: u64::from(slot.material) * SECTOR_BYTES,
            stripes: STRIPES as u64,
        };
        KeyHeader {
            cipher: self.cipher_name.clone(),
            mode: self.cipher_mode.clone(),
            key_bits: u64::from(self.key_bytes) * 8,
            hash: self.hash_name.clone(),
            uuid: self.uuid.clone(),
            payload_offset: self.payload_offset(),
            digest_iterations: u64::from(self.digest_iterations),
            slots: self.slots.iter().map(slot).collect(),
        }
    }

    /// The encryption properties of an image, as (key, value) texts.
    pub fn properties(&self) -> Vec<(String, String)> {
        let active = self.slots.iter().filter(|slot| slot.active).count();
        let text = |key: &str, value: String| (format!("encryption-{key}"), value);
        vec![
            text("cipher", format!("{}-{}", self.cipher_name, self.cipher_mode)),
            text("key-bits", (self.key_bytes * 8).to_string()),
            text("hash", self.hash_name.clone()),
            text("uuid", self.uuid.clone()),
            text("slots", format!("{active} of {SLOTS} active")),
        ]
    }
}

impl Slot {
    pub(crate) fn encode(&self) -> [u8; field::SLOT_BYTES] {
        let mut out = [0; field::SLOT_BYTES];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        let state = if self.active { ACTIVE } else { INACTIVE };
        put(0, &state.to_be_bytes());
        put(field::SLOT_ITERATIONS, &self.iterations.to_be_bytes());
        put(field::SLOT_SALT, &self.salt);
        put(field::SLOT_MATERIAL, &self.material.to_be_bytes());
        put(field::SLOT_STRIPES, &(STRIPES as u32).to_be_bytes());
        out
    }
}
