//! Creates images.

use vdkit_block::{
    CreateRequest, Creation, Error, HostOffset, Measured, OptionKind, OptionSpec, Options, Result,
    align_up, random_uuid,
};
use vdkit_blockmap::{ByteOrder, Geometry, write_blocks, write_holes};
use zerocopy::little_endian::U32;
use zerocopy::{FromZeros, IntoBytes};

use crate::driver::VdiDriver;
use crate::envelope::ENTRIES_MAX;
use crate::header::{HEADER_BYTES, MAGIC, VERSION, ZERO};
use crate::on_disk::RawHeader;

/// Bytes of a block, as in all other programs; QEMU reads no other size.
const BLOCK_BYTES: u64 = 1 << 20;
/// The table follows the header's sector.
const TABLE_AT: u64 = HEADER_BYTES as u64;
/// Bytes of the header from its size field on, in version 1.1.
const HEADER_SIZE: u32 = 400;
/// At most 64 bytes.
const TEXT: &[u8] = b"<<< vdkit Virtual Disk Image >>>\n";

const OPTIONS: &[OptionSpec] = &[OptionSpec {
    key: "static",
    kind: OptionKind::Switch,
    default: "off",
    help: "on: every block has its place in the file from the start",
}];

/// Layout of a new image of `guest_bytes` bytes. Blocks are aligned to their size, so that file
/// system blocks can be shared (reflinks).
fn layout(file: &str, guest_bytes: u64) -> Result<Geometry> {
    let entries = guest_bytes.div_ceil(BLOCK_BYTES);
    let too_large = || Error::limit(file, "size", guest_bytes, ENTRIES_MAX * BLOCK_BYTES);
    if entries > ENTRIES_MAX {
        return Err(too_large());
    }
    let base = align_up(TABLE_AT + entries * 4, BLOCK_BYTES).ok_or_else(too_large)?;
    // The header's offset field has 32 bits.
    u32::try_from(base).map_err(|_| too_large())?;
    Ok(Geometry {
        order: ByteOrder::Little,
        table_at: TABLE_AT,
        entries,
        base,
        unit: BLOCK_BYTES,
        skip: 0,
        block_bytes: BLOCK_BYTES,
        floor: base,
        first_block: base,
        kept_end: base,
        zero: Some(ZERO),
    })
}

impl Creation for VdiDriver {
    fn options(&self) -> &'static [OptionSpec] {
        OPTIONS
    }

    fn create(&self, request: &CreateRequest) -> Result<()> {
        let storage = &*request.storage;
        let remedy = "VDI has no place for its name; create a qcow2 image";
        request.refuse_backing("a VDI image", remedy)?;
        let guest_bytes = align_up(request.guest_bytes, 512).unwrap_or(u64::MAX);
        let geometry = layout(storage.name(), guest_bytes)?;
        let fixed = request.options.switch("static") == Some(true);
        let end = geometry.base + if fixed { geometry.entries * BLOCK_BYTES } else { 0 };
        storage.make_room(end, if fixed { end } else { 0 })?;
        if fixed {
            write_blocks(storage, &geometry, 0..geometry.entries, geometry.base)?;
        } else {
            write_holes(storage, &geometry, 0, geometry.entries)?;
        }
        storage.write_at(header(&geometry, guest_bytes, fixed)?.as_bytes(), HostOffset(0))
    }

    fn cluster_bytes(&self, _options: &Options) -> Result<u64> {
        Ok(BLOCK_BYTES)
    }

    fn measure(&self, guest_bytes: u64, options: &Options, data_blocks: u64) -> Result<Measured> {
        let geometry = layout("vdi", guest_bytes)?;
        let fully_allocated = geometry.base + geometry.entries * BLOCK_BYTES;
        let required = match options.switch("static") {
            Some(true) => fully_allocated,
            _ => geometry.base + data_blocks.min(geometry.entries) * BLOCK_BYTES,
        };
        Ok(Measured { required, fully_allocated })
    }
}

fn header(geometry: &Geometry, guest_bytes: u64, fixed: bool) -> Result<RawHeader> {
    let mut header = RawHeader {
        magic: MAGIC.into(),
        version: VERSION.into(),
        header_bytes: HEADER_SIZE.into(),
        image_type: U32::new(if fixed { 2 } else { 1 }),
        table_offset: (geometry.table_at as u32).into(),
        data_offset: (geometry.base as u32).into(),
        sector_bytes: U32::new(512),
        disk_bytes: guest_bytes.into(),
        block_bytes: (geometry.block_bytes as u32).into(),
        blocks: (geometry.entries as u32).into(),
        blocks_allocated: U32::new(if fixed { geometry.entries as u32 } else { 0 }),
        uuid: random_uuid()?.to_bytes_le(),
        uuid_modify: random_uuid()?.to_bytes_le(),
        ..FromZeros::new_zeroed()
    };
    header.text[..TEXT.len()].copy_from_slice(TEXT);
    Ok(header)
}
