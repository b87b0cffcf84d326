//! Encrypted guest data: what a format says of it, and what moves the bytes does about it.
//!
//! A format stays a map: it says that its data extents are encrypted, by which cipher, and which
//! offset a sector's number is counted from. Whoever reads a data extent decrypts it, whoever
//! writes one encrypts it. Holes, zeroes and compressed units are never encrypted.

use std::fmt;
use std::io;
use std::sync::Arc;

use zeroize::Zeroizing;

use crate::error::Result;
use crate::units::{GuestOffset, HostOffset};

/// Bytes that are encrypted as one piece. Reads and writes of encrypted data are made of them.
pub const CIPHER_SECTOR_BYTES: u64 = 512;

/// Encrypts and decrypts whole sectors of [`CIPHER_SECTOR_BYTES`], in place.
pub trait SectorCipher: Send + Sync + fmt::Debug {
    /// Encrypts `sectors` (a multiple of the sector's size), of which the first has this number.
    fn encrypt(&self, sectors: &mut [u8], first: u64);

    /// The reverse of [`SectorCipher::encrypt`].
    fn decrypt(&self, sectors: &mut [u8], first: u64);
}

/// Where sector numbers are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SectorNumbering {
    /// On the guest disk.
    Guest,
    /// In the host file: what is moved there must be encrypted anew.
    Host,
}

/// How the data extents of an image are encrypted.
#[derive(Clone, Debug)]
pub struct Encryption {
    /// The cipher, with its key.
    pub cipher: Arc<dyn SectorCipher>,
    /// Which offset makes a sector's number.
    pub numbering: SectorNumbering,
}

impl Encryption {
    fn number(&self, guest: GuestOffset, host: HostOffset) -> u64 {
        match self.numbering {
            SectorNumbering::Guest => guest.0 / CIPHER_SECTOR_BYTES,
            SectorNumbering::Host => host.0 / CIPHER_SECTOR_BYTES,
        }
    }

    /// Encrypts whole sectors that shall lie at `host` and are the guest's at `guest`.
    pub fn encrypt(&self, sectors: &mut [u8], guest: GuestOffset, host: HostOffset) {
        self.cipher.encrypt(sectors, self.number(guest, host));
    }

    /// Decrypts whole sectors that were read from `host` and are the guest's at `guest`.
    pub fn decrypt(&self, sectors: &mut [u8], guest: GuestOffset, host: HostOffset) {
        self.cipher.decrypt(sectors, self.number(guest, host));
    }
}

/// A passphrase or the like: wiped from memory when the last copy of it goes, never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<Zeroizing<Vec<u8>>>);

impl Secret {
    /// Takes the bytes over.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Zeroizing::new(bytes)))
    }

    /// Reads all of it, at most so many bytes.
    ///
    /// # Errors
    /// What the reader returns; [`io::ErrorKind::FileTooLarge`].
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
                // A new buffer, and the old one wiped: a vector that grows leaves copies behind.
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

/// What is known of a key slot without a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeySlot {
    /// Its number, from 0.
    pub number: u32,
    /// A key fits it.
    pub active: bool,
    /// Rounds of the key derivation, where it is active.
    pub iterations: u64,
}

/// The key slots of an image: each active one holds the image's own key, locked by another
/// passphrase. Changes are durable when a method returns, and after a crash in the middle each
/// key that was there before and was not to go still opens the image.
pub trait KeySlots: fmt::Debug {
    /// All slots.
    fn slots(&self) -> Vec<KeySlot>;

    /// Which slots a passphrase opens.
    ///
    /// # Errors
    /// I/O; a slot that costs more than the limits allow.
    fn opened_by(&self, key: &Secret) -> Result<Vec<u32>>;

    /// Locks the image's key with one more passphrase; returns the slot. `key` is one that opens
    /// the image; `milliseconds` is the time that trying a passphrase shall take.
    ///
    /// # Errors
    /// [`crate::Error::Key`] where `key` opens no slot; [`crate::Error::Invalid`] where no slot
    /// is free.
    fn add(&mut self, key: &Secret, new: &Secret, milliseconds: u64) -> Result<u32>;

    /// Wipes a slot, whatever is in it.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] for a number that no slot has; I/O.
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
