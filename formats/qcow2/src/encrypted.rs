//! Encryption: LUKS inside the image, and QEMU's legacy AES encryption, which is read-only.
//!
//! Source: qcow2 specification, sections "Header" (`crypt_method`), "Full disk encryption header
//! pointer" and "Data encryption". Sectors are numbered on the host with LUKS, on the guest disk
//! with AES. Compressed clusters are never encrypted; vdkit writes none to encrypted images.

use std::sync::Arc;

use vdkit_block::{
    CIPHER_SECTOR_BYTES, Encryption, Error, GuestOffset, HostOffset, Limits, Remedy, Result,
    Secret, SectorNumbering, Storage, in_steps,
};
use vdkit_luks::{HeaderPlace, LuksSlots, legacy_qcow2};

use crate::header::{self, Header};
use crate::image::Qcow2;
use crate::layout::extension;
use crate::structures::header_offset;

/// Bytes of one write of encrypted zeroes.
const STEP: u64 = 1 << 20;

/// Largest accepted encryption header; LUKS with eight key slots takes 2 MiB.
pub(crate) const HEADER_BYTES_MAX: u64 = 64 << 20;

/// The place of an image's LUKS header.
///
/// # Errors
/// [`Error::Corrupt`] if the image does not name it or names an impossible place.
pub(crate) fn luks_place(header: &Header, storage: &dyn Storage) -> Result<HeaderPlace> {
    let fault = |found: String, expected: &str| {
        let at = header.extension_offset(extension::ENCRYPTION);
        Err(Error::corrupt(storage.name(), at, "encryption header pointer", found, expected))
    };
    let Some((offset, room)) = header.encryption_header() else {
        return fault("none".to_owned(), "one in a LUKS image");
    };
    let cluster = header.geometry.cluster_bytes();
    let fits = offset.0 >= cluster
        && offset.0.is_multiple_of(cluster)
        && room <= HEADER_BYTES_MAX
        && offset.checked_add(room).is_some();
    let end = offset.0.saturating_add(room);
    if !fits || end > storage.len()?.next_multiple_of(cluster) {
        let expected = "whole clusters behind the header and within the file";
        return fault(format!("{room} bytes at {offset}"), expected);
    }
    Ok(HeaderPlace { offset, room })
}

/// The cipher of an image that is being opened, unlocked with the first key that fits.
///
/// # Errors
/// [`Error::Key`] if no key fits; [`Error::Unsupported`] for writing with AES; damage.
pub(crate) fn unlock(
    header: &Header,
    storage: &Arc<dyn Storage>,
    writable: bool,
    limits: &Limits,
    keys: &[Secret],
) -> Result<Option<Encryption>> {
    let file = storage.name();
    if header.encryption == header::Encryption::None {
        return Ok(None);
    }
    check_sectors(file, header.guest_bytes)?;
    if header.data_file_raw() {
        return Err(Error::unsupported(
            file,
            "not supported: an encrypted image with a raw data file",
            "no encrypted file can be read as the disk; use the program that made it",
        ));
    }
    if header.encryption == header::Encryption::Luks {
        let place = luks_place(header, &**storage)?;
        let cipher = LuksSlots::read(storage.clone(), place, limits)?.unlock(keys)?;
        return Ok(Some(Encryption { cipher, numbering: SectorNumbering::Host }));
    }
    if writable {
        return Err(Error::unsupported(
            file,
            "not supported: writing with the legacy AES encryption, which protects nothing",
            Remedy::Convert {
                file: file.to_owned(),
                target: Some(("qcow2", "encrypt.format=luks".to_owned())),
                new_key: true,
            },
        ));
    }
    let Some(key) = keys.first() else { return Err(Error::no_key(file, "aes")) };
    let cipher = legacy_qcow2(key.bytes()).map(Arc::new);
    Ok(cipher.map(|cipher| Encryption { cipher, numbering: SectorNumbering::Guest }))
}

/// Fails unless the size of an encrypted disk is a multiple of its sectors.
pub(crate) fn check_sectors(file: &str, guest_bytes: u64) -> Result<()> {
    if guest_bytes.is_multiple_of(CIPHER_SECTOR_BYTES) {
        return Ok(());
    }
    let expected = format!("a multiple of {CIPHER_SECTOR_BYTES} in an encrypted image");
    Err(Error::corrupt(file, header_offset!(size), "size", guest_bytes.to_string(), expected))
}

impl Qcow2 {
    /// Writes guest zeroes directly to host space, without the map. In an encrypted image both ends
    /// must be sector-aligned.
    pub(crate) fn write_data_zeroes(
        &self,
        guest: GuestOffset,
        host: HostOffset,
        len: u64,
    ) -> Result<()> {
        let Some(encryption) = &self.encryption else {
            return self.data.write_zeroes(host, len, vdkit_block::ZeroMode::KeepAllocated);
        };
        let mut buffer = vec![0; STEP.min(len) as usize];
        in_steps(host, host + len, STEP, |at, len| {
            let step = &mut buffer[..len as usize];
            step.fill(0);
            encryption.encrypt(step, guest + (at - host), at);
            self.data.write_at(step, at)
        })
    }

    /// Reads and decrypts a whole cluster.
    pub(crate) fn read_data(
        &self,
        guest: GuestOffset,
        host: HostOffset,
        out: &mut [u8],
    ) -> Result<()> {
        self.data.read_padded(out, host)?;
        if let Some(encryption) = &self.encryption {
            encryption.decrypt(out, guest, host);
        }
        Ok(())
    }

    /// Encrypts and writes a whole cluster.
    pub(crate) fn write_data(
        &self,
        guest: GuestOffset,
        host: HostOffset,
        mut bytes: Vec<u8>,
    ) -> Result<()> {
        if let Some(encryption) = &self.encryption {
            encryption.encrypt(&mut bytes, guest, host);
        }
        self.data.write_at(&bytes, host)
    }
}
