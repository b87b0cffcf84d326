//! The two headers [2.2.2]: which one is current, and how it is updated.
//!
//! An update goes to the header that is not current, with a higher sequence number; once durable,
//! that header is current. The other one then gets the same content, so that damage to one header
//! loses nothing.

use std::mem::offset_of;

use uuid::Uuid;
use vdkit_block::{Error, HostOffset, Limits, Result, Storage, require_within};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::layout::{FILE_BYTES_MAX, FILE_SIGNATURE, HEADER_OFFSETS, MIB, PAGE_BYTES};
use crate::on_disk::{RawHeader, checksum, is_sealed};

const SIGNATURE: &[u8; 4] = b"head";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) sequence: u64,
    /// Replaced before the first change of the file.
    pub(crate) file_write: Uuid,
    /// Replaced before the first change of guest data; children record it.
    pub(crate) data_write: Uuid,
    /// GUID of valid log entries; zero for none.
    pub(crate) log: Uuid,
    pub(crate) log_version: u16,
    pub(crate) version: u16,
    pub(crate) log_bytes: u64,
    pub(crate) log_offset: u64,
}

impl Header {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let raw = RawHeader::ref_from_bytes(bytes).ok().filter(|_| is_sealed(bytes, SIGNATURE))?;
        Some(Self {
            sequence: raw.sequence_number.get(),
            file_write: Uuid::from_bytes_le(raw.file_write_guid),
            data_write: Uuid::from_bytes_le(raw.data_write_guid),
            log: Uuid::from_bytes_le(raw.log_guid),
            log_version: raw.log_version.get(),
            version: raw.version.get(),
            log_bytes: raw.log_length.into(),
            log_offset: raw.log_offset.get(),
        })
    }

    /// The 4 KiB of the header.
    pub(crate) fn encode(&self) -> RawHeader {
        let mut raw = RawHeader {
            signature: *SIGNATURE,
            sequence_number: self.sequence.into(),
            file_write_guid: self.file_write.to_bytes_le(),
            data_write_guid: self.data_write.to_bytes_le(),
            log_guid: self.log.to_bytes_le(),
            log_version: self.log_version.into(),
            version: self.version.into(),
            log_length: (self.log_bytes as u32).into(),
            log_offset: self.log_offset.into(),
            ..FromZeros::new_zeroed()
        };
        raw.checksum = checksum(raw.as_bytes()).into();
        raw
    }

    fn validate(&self, storage: &dyn Storage, at: u64, limits: &Limits) -> Result<()> {
        let file = storage.name();
        if self.version != 1 {
            return Err(Error::unsupported(
                file,
                format!("not supported: VHDX version {} [2.2.2]", self.version),
                "only version 1 is known",
            ));
        }
        if self.log_version != 0 && self.log != Uuid::nil() {
            return Err(Error::unsupported(
                file,
                format!(
                    "not supported: a log of version {} that must be replayed [2.2.2]",
                    self.log_version
                ),
                "only version 0 is known; open the image once with the program that wrote it",
            ));
        }
        let what = "length of the log in bytes";
        require_within(file, what, self.log_bytes, limits.table_bytes_max)?;
        let aligned = self.log_bytes.is_multiple_of(MIB) && self.log_offset.is_multiple_of(MIB);
        if !aligned || self.log_offset < MIB || self.log_offset > FILE_BYTES_MAX {
            return Err(Error::corrupt(
                file,
                at + offset_of!(RawHeader, log_length) as u64,
                "header",
                format!("a log of {:#x} bytes at {:#x}", self.log_bytes, self.log_offset),
                "multiples of 1 MiB behind the first one [2.2.2]",
            ));
        }
        Ok(())
    }
}

/// Both headers, and which one is current.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Headers {
    pub(crate) current: Header,
    slot: usize,
    /// The other header is sound, but may be older after a crash between two writes.
    pub(crate) spare_sound: bool,
    /// Both are durable. Otherwise the older one must not be overwritten yet.
    settled: bool,
}

impl Headers {
    /// Reads both headers.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if neither is sound, or both differ with the same sequence number;
    /// [`Error::Unsupported`] for an unknown version; [`Error::Limit`] for a log that is too long;
    /// I/O.
    pub(crate) fn read(storage: &dyn Storage, limits: &Limits) -> Result<Self> {
        // One read instead of three, although little of it is used.
        let mut bytes = vec![0; (HEADER_OFFSETS[1] + PAGE_BYTES) as usize];
        storage.read_padded(&mut bytes, HostOffset(0))?;
        if !bytes.starts_with(FILE_SIGNATURE) {
            return Err(Error::corrupt(
                storage.name(),
                0,
                "file type identifier",
                format!("{:02x?}", &bytes[..8]),
                "\"vhdxfile\" [2.2.1]",
            ));
        }
        let at = |offset: u64| &bytes[offset as usize..(offset + PAGE_BYTES) as usize];
        let found = HEADER_OFFSETS.map(|offset| Header::parse(at(offset)));
        let slot = match found {
            [Some(first), Some(second)] if first.sequence == second.sequence => {
                // Some writers leave two identical headers, which is valid.
                if first != second {
                    return Err(Error::corrupt(
                        storage.name(),
                        HEADER_OFFSETS[1],
                        "header",
                        format!("sequence number {} in two that differ", first.sequence),
                        "one header with the highest sequence number [2.2.2]",
                    ));
                }
                0
            }
            [Some(first), Some(second)] => usize::from(second.sequence > first.sequence),
            [Some(_), None] => 0,
            [None, Some(_)] => 1,
            [None, None] => {
                return Err(Error::corrupt(
                    storage.name(),
                    HEADER_OFFSETS[0],
                    "header",
                    "no sound one, here or at 0x20000",
                    "a signature and a CRC-32C [2.2.2]",
                ));
            }
        };
        let current = found[slot].expect("chosen because it is there");
        current.validate(storage, HEADER_OFFSETS[slot], limits)?;
        let spare_sound = found[1 - slot].is_some();
        Ok(Self { current, slot, spare_sound, settled: true })
    }

    /// Offset of the header that is not current.
    pub(crate) fn spare_offset(&self) -> u64 {
        HEADER_OFFSETS[1 - self.slot]
    }

    /// Must be called after a sync that follows [`Headers::update`].
    pub(crate) fn synced(&mut self) {
        self.settled = true;
    }

    /// Makes `next` current, regardless of its sequence number; takes one sync, or two if there was
    /// none since the last update. The other header is written too, and the next sync makes it
    /// durable. After an error it is unknown which one is current.
    ///
    /// # Errors
    /// [`Error::Invalid`] if sequence numbers are exhausted; I/O.
    pub(crate) fn update(&mut self, storage: &dyn Storage, next: Header) -> Result<()> {
        let first = self.current.sequence.checked_add(1).filter(|n| *n < u64::MAX);
        let Some(sequence) = first else {
            return Err(Error::invalid_for(
                &storage.name(),
                "sequence numbers of its headers are used up; convert it to a new image",
            ));
        };
        if !self.settled {
            storage.sync()?;
        }
        let next = Header { sequence, ..next };
        storage.write_at(next.encode().as_bytes(), HostOffset(self.spare_offset()))?;
        storage.sync()?;
        self.slot = 1 - self.slot;
        self.current = next;
        self.spare_sound = false;
        self.settled = false;
        let again = Header { sequence: sequence + 1, ..next };
        storage.write_at(again.encode().as_bytes(), HostOffset(self.spare_offset()))?;
        // A crash may lose this write; the first header then stays current, with the same content.
        self.slot = 1 - self.slot;
        self.current = again;
        self.spare_sound = true;
        Ok(())
    }
}
