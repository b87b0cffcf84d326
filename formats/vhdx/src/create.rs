//! Creates new images.

use vdkit_block::random_uuid;
use vdkit_block::{CreateRequest, Error, HostOffset, Result, Storage, ZeroMode};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

use crate::header::Header;
use crate::layout::{
    BAT_REGION, BatEntry, FILE_SIGNATURE, HEADER_OFFSETS, METADATA_REGION, MIB, REGION_OFFSETS,
    TABLE_BYTES,
};
use crate::metadata::NewMetadata;
use crate::on_disk::put;
use crate::options::NewImage;
use crate::parent::ParentLocator;
use crate::regions::{self, Region};
use uuid::Uuid;

/// Bytes of one write of the block allocation table.
const STEP_BYTES: u64 = MIB;

/// As [`vdkit_block::Creation::create`].
pub(crate) fn create(request: &CreateRequest) -> Result<()> {
    let storage = &*request.storage;
    let new = NewImage::new(&request.options, request.guest_bytes, request.backing.is_some())?;
    let parent = match &request.backing {
        None => None,
        Some(backing) if backing.format.as_deref().is_some_and(|format| format != "vhdx") => {
            return Err(Error::unsupported(
                storage.name(),
                format!(
                    "not supported: a vhdx image on a {} image",
                    backing.format.as_deref().unwrap_or("")
                ),
                "its parent must be a vhdx image; create a qcow2 image instead",
            ));
        }
        Some(backing) => Some(ParentLocator::new(storage.name(), backing)?),
    };
    let end = new.data_offset() + if new.fixed { new.all_blocks_bytes() } else { 0 };
    make_room(storage, &new, end)?;
    write_file_id(storage)?;
    write_headers(storage, &new)?;
    let metadata = NewMetadata {
        geometry: new.geometry,
        fixed: new.fixed,
        guest_bytes: new.guest_bytes,
        parent,
    };
    storage.write_at(&metadata.encode()?, HostOffset(new.metadata_offset()))?;
    let region = |guid, offset, bytes| Region { guid, offset, bytes, required: true };
    let table = regions::encode(&[
        region(BAT_REGION, new.bat_offset(), new.data_offset() - new.bat_offset()),
        region(METADATA_REGION, new.metadata_offset(), MIB),
    ]);
    for offset in REGION_OFFSETS {
        storage.write_at(&table, HostOffset(offset))?;
    }
    write_table(storage, &new)
}

fn make_room(storage: &dyn Storage, new: &NewImage, end: u64) -> Result<()> {
    if storage.caps().growable {
        return storage.set_len(end);
    }
    let len = storage.len()?;
    if end > len {
        return Err(Error::NoSpace {
            file: storage.name().to_owned(),
            what: format!("a vhdx image of {end} bytes on a device of {len}"),
        });
    }
    // Old content of the device must not be visible.
    let zeroed = if new.fixed { end } else { new.data_offset() };
    storage.write_zeroes(HostOffset(0), zeroed, ZeroMode::MayUnmap)
}

fn write_file_id(storage: &dyn Storage) -> Result<()> {
    let mut bytes = vec![0; TABLE_BYTES as usize];
    put(&mut bytes, 0, FILE_SIGNATURE);
    let creator: Vec<u8> = "vdkit".encode_utf16().flat_map(u16::to_le_bytes).collect();
    put(&mut bytes, 8, &creator);
    storage.write_at(&bytes, HostOffset(0))
}

fn write_headers(storage: &dyn Storage, new: &NewImage) -> Result<()> {
    let header = Header {
        sequence: 0,
        file_write: random_uuid()?,
        data_write: random_uuid()?,
        log: Uuid::nil(),
        log_version: 0,
        version: 1,
        log_bytes: new.log_bytes,
        log_offset: MIB,
    };
    for (sequence, offset) in [1, 2].into_iter().zip(HEADER_OFFSETS) {
        storage.write_at(Header { sequence, ..header }.encode().as_bytes(), HostOffset(offset))?;
    }
    Ok(())
}

/// Writes the nonzero entries, in pieces of the table.
fn write_table(storage: &dyn Storage, new: &NewImage) -> Result<()> {
    if !new.fixed && !new.zero_blocks {
        return Ok(());
    }
    let geometry = &new.geometry;
    let chunk = (1 << geometry.chunk_bits()) + 1;
    let entries = geometry.bat_entries(new.guest_bytes);
    let mut first = 0;
    while first < entries {
        let last = (first + STEP_BYTES / 8).min(entries);
        let mut table = Vec::with_capacity((last - first) as usize);
        for index in first..last {
            let entry = if (index + 1) % chunk == 0 {
                BatEntry::NOT_PRESENT
            } else if new.fixed {
                let block = index - index / chunk;
                BatEntry::present(new.data_offset() + (block << geometry.block_bits))
            } else {
                BatEntry::ZERO
            };
            table.push(U64::new(entry.0));
        }
        storage.write_at(table.as_bytes(), HostOffset(new.bat_offset() + first * 8))?;
        first = last;
    }
    Ok(())
}
