//! The header: parsed from untrusted bytes, and validated into a trusted type.

use std::mem::offset_of;
use std::ops::Range;

use vdkit_block::{Error, HostOffset, KeyHeader, KeySlotInfo, Result, Storage};
use zerocopy::FromBytes;
use zerocopy::big_endian::U32;

use crate::cipher::{CipherSpec, KNOWN};
use crate::hash::{HASH_NAMES, Hash};
use crate::on_disk::{ACTIVE, INACTIVE, RawHeader, Slot, slot_at};

/// Bytes of the header itself; key material follows.
pub const HEADER_BYTES: usize = size_of::<RawHeader>();
/// The first six bytes.
pub(crate) const MAGIC: [u8; 6] = *b"LUKS\xba\xbe";
/// Number of key slots.
pub const SLOTS: usize = 8;
/// Number of stripes of each key.
pub(crate) const STRIPES: usize = 4000;
/// Unit of offsets.
pub(crate) const SECTOR_BYTES: u64 = 512;
/// Maximum accepted key length of the image; the supported ciphers use at most 64 bytes.
const KEY_BYTES_MAX: u32 = 512;

/// A validated header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    pub(crate) raw: RawHeader,
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
}

/// The NUL-terminated name in a field, if it is one.
fn name(field: &[u8]) -> Option<&str> {
    let end = field.iter().position(|&b| b == 0)?;
    let text = std::str::from_utf8(&field[..end]).ok()?;
    text.bytes().all(|b| b.is_ascii_graphic()).then_some(text)
}

/// The name in a field of a validated header.
fn text(field: &[u8]) -> &str {
    name(field).unwrap_or_default()
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
        let Ok((raw, _)) = RawHeader::read_from_prefix(bytes) else {
            let found = format!("{} bytes", bytes.len());
            return faults.of(0, "LUKS header", found, format!("{HEADER_BYTES} bytes"));
        };
        if raw.magic != MAGIC {
            let found = format!("{:02x?}", raw.magic);
            return faults.of(0, "LUKS magic", found, format!("{MAGIC:02x?}"));
        }
        if raw.version.get() != 1 {
            return Err(Error::unsupported(
                file,
                format!("not supported: LUKS version {}", raw.version),
                "version 1 is known; where its cipher and key derivation allow, 'cryptsetup convert \
                 --type luks1' makes one, else open it with cryptsetup and copy the device",
            ));
        }
        for (field, at, what) in [
            (&raw.cipher_name[..], offset_of!(RawHeader, cipher_name), "cipher-name"),
            (&raw.cipher_mode[..], offset_of!(RawHeader, cipher_mode), "cipher-mode"),
            (&raw.hash_spec[..], offset_of!(RawHeader, hash_spec), "hash-spec"),
            (&raw.uuid[..], offset_of!(RawHeader, uuid), "uuid"),
        ] {
            if name(field).is_none() {
                let end = field.iter().position(|&b| b == 0).unwrap_or(field.len());
                let found = format!("{:02x?}", &field[..end.min(8)]);
                return faults.of(at, what, found, "a short name");
            }
        }
        let header = Self { raw };
        header.check_slots(&faults)?;
        header.check(&faults, place.room)?;
        Ok(header)
    }

    fn check_slots(&self, faults: &Faults<'_>) -> Result<()> {
        for (number, slot) in self.raw.key_slots.iter().enumerate() {
            let at = slot_at(number);
            if !slot.is_active() && slot.active != INACTIVE {
                let found = format!("{:#x}", slot.active);
                let expected = format!("{ACTIVE:#x} or {INACTIVE:#x}");
                return faults.of(at, "state of a key slot", found, expected);
            }
            if slot.stripes != STRIPES as u32 {
                let field = at + offset_of!(Slot, stripes);
                let (found, expected) = (slot.stripes.to_string(), STRIPES.to_string());
                return faults.of(field, "stripes of a key slot", found, expected);
            }
            if slot.is_active() && slot.iterations.get() == 0 {
                let field = at + offset_of!(Slot, iterations);
                return faults.of(field, "iterations of a key slot", "0", "at least 1");
            }
        }
        Ok(())
    }

    fn check(&self, faults: &Faults<'_>, room: u64) -> Result<()> {
        let key_bytes = self.key_bytes();
        if key_bytes == 0 || key_bytes > KEY_BYTES_MAX {
            let field = offset_of!(RawHeader, key_bytes);
            let expected = format!("1 to {KEY_BYTES_MAX}");
            return faults.of(field, "key-bytes", key_bytes.to_string(), expected);
        }
        if self.raw.mk_digest_iterations.get() == 0 {
            let field = offset_of!(RawHeader, mk_digest_iterations);
            return faults.of(field, "mk-digest-iter", "0", "at least 1");
        }
        // A detached header has no payload after it.
        let end = match self.payload_offset() {
            0 => room,
            payload => room.min(payload),
        };
        for number in 0..SLOTS {
            let at = slot_at(number) + offset_of!(Slot, key_material_offset);
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

    fn key_bytes(&self) -> u32 {
        self.raw.key_bytes.get()
    }

    /// The range of a slot's key material, in whole sectors, from the start of the header.
    pub(crate) fn material_area(&self, slot: usize) -> Range<u64> {
        let start = self.raw.key_slots[slot].material_offset();
        start..start + self.material_bytes().next_multiple_of(SECTOR_BYTES)
    }

    pub(crate) fn material_bytes(&self) -> u64 {
        u64::from(self.key_bytes()) * STRIPES as u64
    }

    /// Bytes from the start of the header to the encrypted disk; 0 for a detached header.
    pub fn payload_offset(&self) -> u64 {
        u64::from(self.raw.payload_offset) * SECTOR_BYTES
    }

    /// Fails for an unknown cipher.
    pub(crate) fn cipher(&self, file: &str) -> Result<CipherSpec> {
        let (name, mode) = (text(&self.raw.cipher_name), text(&self.raw.cipher_mode));
        CipherSpec::find(name, mode, self.key_bytes() as usize).ok_or_else(|| {
            Error::unsupported(
                file,
                format!(
                    "not supported: the cipher {name}-{mode} with keys of {} bytes",
                    self.key_bytes()
                ),
                format!("known are {KNOWN}; open it with cryptsetup and copy the device"),
            )
        })
    }

    /// Fails for an unknown hash.
    pub(crate) fn hash(&self, file: &str) -> Result<Hash> {
        Hash::find(text(&self.raw.hash_spec)).ok_or_else(|| {
            Error::unsupported(
                file,
                format!("not supported: the hash {}", text(&self.raw.hash_spec)),
                format!(
                    "known are {}; open it with cryptsetup and copy the device",
                    HASH_NAMES.join(", ")
                ),
            )
        })
    }

    /// The cost of trying a key on a slot, in rounds of its key derivation.
    pub(crate) fn rounds(&self, slot: usize, hash: Hash) -> u64 {
        let raw = &self.raw;
        let of = |iterations: U32, bytes: usize| u64::from(iterations) * hash.rounds(bytes);
        of(raw.key_slots[slot].iterations, self.key_bytes() as usize)
            + of(raw.mk_digest_iterations, raw.mk_digest.len())
    }

    /// The header as [`vdkit_block::ImageInfo`] describes it.
    pub fn describe(&self) -> KeyHeader {
        let slot = |slot: &Slot| KeySlotInfo {
            active: slot.is_active(),
            iterations: slot.iterations.into(),
            material_offset: slot.material_offset(),
            stripes: STRIPES as u64,
        };
        KeyHeader {
            cipher: text(&self.raw.cipher_name).to_owned(),
            mode: text(&self.raw.cipher_mode).to_owned(),
            key_bits: u64::from(self.key_bytes()) * 8,
            hash: text(&self.raw.hash_spec).to_owned(),
            uuid: text(&self.raw.uuid).to_owned(),
            payload_offset: self.payload_offset(),
            digest_iterations: self.raw.mk_digest_iterations.into(),
            slots: self.raw.key_slots.iter().map(slot).collect(),
        }
    }

    /// The encryption properties of an image, as (key, value) texts.
    pub fn properties(&self) -> Vec<(String, String)> {
        let active = self.raw.key_slots.iter().filter(|slot| slot.is_active()).count();
        let text = |key: &str, value: String| (format!("encryption-{key}"), value);
        let KeyHeader { cipher, mode, key_bits, hash, uuid, .. } = self.describe();
        vec![
            text("cipher", format!("{cipher}-{mode}")),
            text("key-bits", key_bits.to_string()),
            text("hash", hash),
            text("uuid", uuid),
            text("slots", format!("{active} of {SLOTS} active")),
        ]
    }
}
