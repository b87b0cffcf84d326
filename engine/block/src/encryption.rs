//! Encryption of guest data: how formats declare it and how data movers apply it.
//!
//! A format declares that its data extents are encrypted, the cipher, and how sectors are numbered.
//! Readers of a data extent decrypt it; writers encrypt it. Holes, zeroes and compressed units are
//! never encrypted.

use std::fmt;
use std::io;
use std::sync::Arc;

use serde::Serialize;
use zeroize::Zeroizing;

use crate::error::Result;
use crate::monitor::Monitor;
use crate::units::{GuestOffset, HostOffset};

/// Unit of encryption in bytes. Reads and writes of encrypted data are multiples of it.
pub const CIPHER_SECTOR_BYTES: u64 = 512;

/// Encrypts and decrypts whole sectors of [`CIPHER_SECTOR_BYTES`], in place.
pub trait SectorCipher: Send + Sync + fmt::Debug {
    /// Encrypts `sectors` (whole sectors); the first has number `first`.
    fn encrypt(&self, sectors: &mut [u8], first: u64);

    /// Inverse of [`SectorCipher::encrypt`].
    fn decrypt(&self, sectors: &mut [u8], first: u64);
}

/// Origin of sector numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SectorNumbering {
    /// Offset on the guest disk.
    Guest,
    /// Offset in the host file: moved data must be re-encrypted.
    Host,
}

/// How the data extents of an image are encrypted.
#[derive(Clone, Debug)]
pub struct Encryption {
    /// The cipher, with its key.
    pub cipher: Arc<dyn SectorCipher>,
    /// Origin of sector numbers.
    pub numbering: SectorNumbering,
}

impl Encryption {
    fn number(&self, guest: GuestOffset, host: HostOffset) -> u64 {
        match self.numbering {
            SectorNumbering::Guest => guest.0 / CIPHER_SECTOR_BYTES,
            SectorNumbering::Host => host.0 / CIPHER_SECTOR_BYTES,
        }
    }

    /// Encrypts whole sectors for guest offset `guest` before they are written to `host`.
    pub fn encrypt(&self, sectors: &mut [u8], guest: GuestOffset, host: HostOffset) {
        self.cipher.encrypt(sectors, self.number(guest, host));
    }

    /// Decrypts whole sectors of guest offset `guest` that were read from `host`.
    pub fn decrypt(&self, sectors: &mut [u8], guest: GuestOffset, host: HostOffset) {
        self.cipher.decrypt(sectors, self.number(guest, host));
    }
}

/// A passphrase or key. Wiped from memory when the last clone is dropped; never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<Zeroizing<Vec<u8>>>);

impl Secret {
    /// Takes ownership of the bytes.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Zeroizing::new(bytes)))
    }

    /// Reads to the end, at most `bytes_max` bytes.
    ///
    /// # Errors
    /// Errors of the reader; [`io::ErrorKind::FileTooLarge`].
    pub fn read(mut from: impl io::Read, bytes_max: usize) -> io::Result<Self> {
        let mut buffer = Zeroizing::new(vec![0; 4096]);
        let mut len = 0;
        loop {
            match from.read(&mut buffer[len..]) {
                Ok(0) => return Ok(Self::new(buffer[..len].to_vec())),
                Ok(got) => len += got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if len > bytes_max {
                return Err(io::ErrorKind::FileTooLarge.into());
            }
            if len == buffer.len() {
                // Allocate a new buffer and wipe the old one: a growing `Vec` leaves copies behind.
                let mut larger = Zeroizing::new(vec![0; 2 * len]);
                larger[..len].copy_from_slice(&buffer);
                buffer = larger;
            }
        }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Facts about a key slot that need no key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct KeySlot {
    /// Its number, from 0.
    #[serde(rename = "slot")]
    pub number: u32,
    /// It holds a key.
    pub active: bool,
    /// Rounds of the key derivation, if active.
    pub iterations: u64,
}

/// The key slots of an image. Each active slot holds the image's key, encrypted with another
/// passphrase. Changes are durable when a method returns. After a crash, each passphrase that was
/// valid before and was not being removed still opens the image.
pub trait KeySlots: fmt::Debug {
    /// All slots.
    fn slots(&self) -> Vec<KeySlot>;

    /// Slots that a passphrase opens. Like the other methods that derive keys, it reports each slot that it
    /// tried, and `monitor` cancels it before the next derivation.
    ///
    /// # Errors
    /// I/O; if it opens no slot: one whose key derivation exceeds the limits;
    /// [`crate::Error::Interrupted`].
    fn opened_by(&self, key: &Secret, monitor: &Monitor<'_>) -> Result<Vec<u32>>;

    /// The error for an active slot whose key derivation exceeds the limits, so that nobody knows which
    /// keys open it.
    fn untried(&self) -> Option<crate::Error>;

    /// Adds a passphrase `new` and returns its slot. `key` must open the image. `milliseconds` is
    /// the target time of one key derivation.
    ///
    /// # Errors
    /// [`crate::Error::Key`] if `key` opens no slot; [`crate::Error::Invalid`] if no slot is free;
    /// [`crate::Error::Interrupted`], and then no slot has the new key.
    fn add(
        &mut self,
        key: &Secret,
        new: &Secret,
        milliseconds: u64,
        monitor: &Monitor<'_>,
    ) -> Result<u32> {
        self.add_in(None, key, new, milliseconds, monitor)
    }

    /// As [`KeySlots::add`], in this slot, which must be free; `None` is the first free one.
    ///
    /// # Errors
    /// As [`KeySlots::add`]; [`crate::Error::Invalid`] if the slot is in use, or there is no such
    /// slot.
    fn add_in(
        &mut self,
        slot: Option<u32>,
        key: &Secret,
        new: &Secret,
        milliseconds: u64,
        monitor: &Monitor<'_>,
    ) -> Result<u32>;

    /// Wipes a slot, whatever its content.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] for an invalid slot number; I/O.
    fn wipe(&mut self, number: u32) -> Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_read_whole_or_not_at_all() {
        for len in [0, 1, 4095, 4096, 4097, 100_000] {
            let bytes: Vec<u8> = (0..len).map(|i| i as u8).collect();
            assert_eq!(Secret::read(&bytes[..], 100_000).unwrap().bytes(), bytes);
        }
        assert!(Secret::read(&[0; 101][..], 100).is_err());
    }

    #[test]
    fn a_secret_is_never_printed() {
        assert_eq!(format!("{:?}", Secret::new(b"hunter2".to_vec())), "Secret(..)");
    }
}
