//! The bitmaps header extension, and the autoclear bit that declares it valid.
//!
//! The header must be valid at each moment, so it is never rewritten as a whole. vdkit places the
//! extension's 24 bytes within one sector, so that one write switches directories. A new extension
//! replaces the mark that ends the list: everything after that mark is ignored until its eight
//! bytes, which are within one sector, are overwritten.

use vdkit_block::{Error, HostOffset, Remedy, Result};
use zerocopy::IntoBytes;

use crate::header::Header;
use crate::image::{Meta, Qcow2};
use crate::layout::{SECTOR, autoclear, extension};
use crate::structures::{BitmapsExtensionData, ExtensionHead, FixedHeader, header_offset};
use crate::switch::within_sector;

const DATA_BYTES: u64 = size_of::<BitmapsExtensionData>() as u64;
/// Bytes of an extension's type and length.
const HEAD_BYTES: u64 = size_of::<ExtensionHead>() as u64;

/// Bytes of padding, including its head, to insert before a new extension at `at`, so that the
/// extension's data is within one sector.
fn padding(at: u64) -> u64 {
    if within_sector(at + HEAD_BYTES, DATA_BYTES) {
        return 0;
    }
    let boundary = (at + HEAD_BYTES).next_multiple_of(SECTOR as u64);
    boundary - HEAD_BYTES - at
}

impl Qcow2 {
    /// Durably marks the bitmaps as valid or invalid in the header.
    pub(super) fn set_bitmaps_valid(&self, meta: &mut Meta, valid: bool) -> Result<()> {
        let bits = self.header.autoclear() | if valid { autoclear::BITMAPS } else { 0 };
        self.switch_header(meta, header_offset!(autoclear_features), &bits.to_be_bytes())
    }

    /// Durably writes bytes that nothing refers to yet.
    fn put(&self, at: u64, bytes: &[u8]) -> Result<()> {
        self.storage.write_at(bytes, HostOffset(at))?;
        self.storage.sync()
    }

    /// Points the header at a durable directory of `count` bitmaps, or at none, and marks it valid
    /// if `valid`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the header cluster has no room, with nothing changed; I/O.
    pub(super) fn switch_directory(
        &self,
        meta: &mut Meta,
        count: u32,
        place: Option<(HostOffset, u64)>,
        valid: bool,
    ) -> Result<()> {
        let header = Header::read(&*self.storage, &self.bitmaps.limits)?;
        let found = header.extension(extension::BITMAPS);
        let was_valid = header.autoclear & autoclear::BITMAPS != 0;
        let Some((directory, bytes)) = place else {
            if was_valid {
                self.set_bitmaps_valid(meta, false)?;
            }
            return self.drop_extension(meta, &header);
        };
        let data = BitmapsExtensionData::new(count, directory, bytes);
        let data = data.as_bytes();
        if let Some(found) = found
            && found.data.len() as u64 == DATA_BYTES
            && within_sector(found.offset, DATA_BYTES)
            && was_valid
            && valid
        {
            return self.switch_header(meta, found.offset, data);
        }
        if was_valid {
            self.set_bitmaps_valid(meta, false)?;
        }
        match found {
            Some(found) if found.data.len() as u64 == DATA_BYTES => self.put(found.offset, data)?,
            Some(found) => {
                return Err(Error::corrupt(
                    self.storage.name(),
                    found.offset,
                    "bitmaps header extension",
                    format!("{} bytes", found.data.len()),
                    "24 bytes",
                )
                .with_remedy(Remedy::REPAIR));
            }
            None => self.insert_extension(meta, &header, data)?,
        }
        if valid { self.set_bitmaps_valid(meta, true) } else { Ok(()) }
    }

    /// Offset at which the mark that ends the extension list is or belongs.
    fn list_end(header: &Header) -> u64 {
        header.extensions.last().map_or(u64::from(header.header_bytes), |last| {
            last.offset + (last.data.len() as u64).next_multiple_of(8)
        })
    }

    fn drop_extension(&self, meta: &mut Meta, header: &Header) -> Result<()> {
        let Some(found) = header.extension(extension::BITMAPS) else { return Ok(()) };
        let last = header.extensions.last().is_some_and(|e| e.offset == found.offset);
        let head = if last {
            ExtensionHead::new(extension::END, 0)
        } else {
            ExtensionHead::new(extension::PADDING, found.data.len() as u64)
        };
        self.switch_header(meta, found.offset - HEAD_BYTES, head.as_bytes())
    }

    fn insert_extension(&self, meta: &mut Meta, header: &Header, data: &[u8]) -> Result<()> {
        let head = ExtensionHead::new(extension::BITMAPS, DATA_BYTES);
        let reuse = header
            .extensions
            .iter()
            .find(|e| e.kind == extension::PADDING && e.data.len() as u64 == DATA_BYTES)
            .filter(|e| within_sector(e.offset, DATA_BYTES));
        if let Some(old) = reuse {
            self.put(old.offset, data)?;
            return self.switch_header(meta, old.offset - HEAD_BYTES, head.as_bytes());
        }
        let at = Self::list_end(header);
        let pad = padding(at);
        let mut bytes = Vec::new();
        if pad > 0 {
            bytes.extend_from_slice(
                ExtensionHead::new(extension::PADDING, pad - HEAD_BYTES).as_bytes(),
            );
            bytes.resize(pad as usize, 0);
        }
        bytes.extend_from_slice(head.as_bytes());
        bytes.extend_from_slice(data);
        bytes.extend_from_slice(ExtensionHead::new(extension::END, 0).as_bytes());
        self.make_room(meta, header, at, bytes.len() as u64)?;
        let (first, behind) = bytes.split_at(HEAD_BYTES as usize);
        self.put(at + HEAD_BYTES, behind)?;
        self.switch_header(meta, at, first)
    }

    /// Moves the backing file name to make room for `bytes` bytes at `at`.
    fn make_room(&self, meta: &mut Meta, header: &Header, at: u64, bytes: u64) -> Result<()> {
        let cluster = self.geometry.cluster_bytes();
        let refused = |why: &str, remedy: &str| {
            let what = format!("not supported: one more header extension: {why}");
            Err(Error::unsupported(self.storage.name(), what, remedy))
        };
        let no_room = || {
            let remedy = "convert to an image with a larger cluster_size";
            refused("the header cluster is full", remedy)
        };
        let fixed = FixedHeader::read(&*self.storage)?;
        let (offset, len) = (fixed.backing_file_offset.get(), u64::from(fixed.backing_file_size));
        let end = at + bytes;
        if header.backing_name.is_none() || offset == 0 || offset >= end {
            return if end <= cluster { Ok(()) } else { no_room() };
        }
        if offset < at + HEAD_BYTES {
            // Once the name has moved, its old bytes would continue the list.
            return refused(
                "the backing file name is in place of the end mark",
                "convert the image",
            );
        }
        // The new place must overlap neither the room nor the old name.
        let new = end.max(offset + len).next_multiple_of(8);
        if new + len > cluster {
            return no_room();
        }
        let mut name = vec![0; len as usize];
        self.storage.read_at(&mut name, HostOffset(offset))?;
        self.put(new, &name)?;
        self.switch_header(meta, header_offset!(backing_file_offset), &new.to_be_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_keeps_the_data_within_one_sector() {
        for at in (104..2048).step_by(8) {
            let pad = padding(at);
            assert!(pad == 0 || pad >= HEAD_BYTES, "{at}: {pad}");
            assert!(within_sector(at + pad + HEAD_BYTES, DATA_BYTES), "{at}: {pad}");
        }
        assert_eq!(padding(504), 0);
        assert_eq!(padding(496), 8);
    }
}
