//! Creates new images.

use uuid::Uuid;
use vdkit_block::{
    CreateRequest, Creation, HostOffset, Measured, OptionSpec, Options, Result, Storage,
    random_uuid,
};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

use crate::driver::VhdxDriver;
use crate::header::Header;
use crate::layout::{
    BAT_REGION, BatEntry, FILE_SIGNATURE, HEADER_OFFSETS, METADATA_REGION, MIB, REGION_OFFSETS,
    TABLE_BYTES,
};
use crate::metadata::NewMetadata;
use crate::on_disk::put;
use crate::options::{NewImage, SPECS};
use crate::parent::ParentLocator;
use crate::regions::{self, Region};

/// Bytes of one write of the block allocation table.
const STEP_BYTES: u64 = MIB;

impl Creation for VhdxDriver {
    fn options(&self) -> &'static [OptionSpec] {
        SPECS
    }

    fn create(&self, request: &CreateRequest) -> Result<()> {
        let storage = &*request.storage;
        let new = NewImage::new(&request.options, request.guest_bytes, request.backing.is_some())?;
        let locator = |backing| ParentLocator::new(storage.name(), backing);
        let parent = request.backing.as_ref().map(locator).transpose()?;
        let end = new.data_offset() + if new.fixed { new.all_blocks_bytes() } else { 0 };
        storage.make_room(end, if new.fixed { end } else { new.data_offset() })?;
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

    fn cluster_bytes(&self, options: &Options) -> Result<u64> {
        Ok(NewImage::new(options, 0, false)?.geometry.block_bytes())
    }

    fn measure(&self, guest_bytes: u64, options: &Options, data_clusters: u64) -> Result<Measured> {
        let new = NewImage::new(options, guest_bytes, false)?;
        let all = new.all_blocks_bytes();
        let fully_allocated = new.data_offset() + all;
        let blocks = data_clusters.saturating_mul(new.geometry.block_bytes()).min(all);
        let required = if new.fixed { fully_allocated } else { new.data_offset() + blocks };
        Ok(Measured { required, fully_allocated })
    }
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
