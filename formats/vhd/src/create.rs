//! Creates images.

use uuid::Uuid;
use vdkit_block::{
    BackingRef, CreateRequest, Creation, Error, HostOffset, Measured, OptionKind, OptionSpec,
    Options, Result, Storage,
};
use vdkit_blockmap::write_holes;
use zerocopy::big_endian::U32;

use crate::driver::VhdDriver;
use crate::footer::{DiskGeometry, DiskType, FOOTER_BYTES, Footer, SECTOR, size_of};
use crate::header::{DynamicHeader, HEADER_BYTES};
use crate::locate::footer_at;
use crate::on_disk::ParentLocator;
use crate::parent;

/// Bytes of a block, as in all other programs.
const BLOCK_BYTES: u64 = 2 << 20;
const TABLE_AT: u64 = (FOOTER_BYTES + HEADER_BYTES) as u64;

const OPTIONS: &[OptionSpec] = &[
    OptionSpec {
        key: "subformat",
        kind: OptionKind::Word(&["dynamic", "fixed"]),
        default: "dynamic",
        help: "dynamic: blocks come into the file as they are written; fixed: the disk and a footer",
    },
    OptionSpec {
        key: "force_size",
        kind: OptionKind::Switch,
        default: "off",
        help: "on: the size as asked for; off: rounded up to whole cylinders, as Virtual PC wants it",
    },
];

/// Whether these options create a fixed image.
fn fixed(options: &Options) -> bool {
    options.text("subformat") == Some("fixed")
}

fn size(file: &str, guest_bytes: u64, options: &Options) -> Result<(u64, DiskGeometry)> {
    size_of(file, guest_bytes, options.switch("force_size") == Some(true))
}

impl Creation for VhdDriver {
    fn options(&self) -> &'static [OptionSpec] {
        OPTIONS
    }

    fn create(&self, request: &CreateRequest) -> Result<()> {
        let storage = &*request.storage;
        let (guest_bytes, geometry) = match (&request.backing, request.backing_bytes) {
            // A child has its parent's size, which is already rounded.
            (Some(_), Some(bytes)) if bytes == request.guest_bytes => {
                size_of(storage.name(), bytes, true)?
            }
            _ => size(storage.name(), request.guest_bytes, &request.options)?,
        };
        match (&request.backing, fixed(&request.options)) {
            (Some(_), true) => Err(Error::invalid(
                "a fixed VHD cannot stand on another image: leave out subformat=fixed".to_owned(),
            )),
            (None, true) => create_fixed(storage, guest_bytes, geometry),
            (backing, false) => create_dynamic(storage, guest_bytes, geometry, backing.as_ref()),
        }
    }

    fn cluster_bytes(&self, options: &Options) -> Result<u64> {
        Ok(if fixed(options) { SECTOR } else { BLOCK_BYTES })
    }

    fn measure(&self, guest_bytes: u64, options: &Options, data_blocks: u64) -> Result<Measured> {
        let (guest_bytes, _) = size("vpc", guest_bytes, options)?;
        if fixed(options) {
            let bytes = guest_bytes + FOOTER_BYTES as u64;
            return Ok(Measured { required: bytes, fully_allocated: bytes });
        }
        let blocks = guest_bytes.div_ceil(BLOCK_BYTES);
        let around = (TABLE_AT + blocks * 4).next_multiple_of(SECTOR) + FOOTER_BYTES as u64;
        let with = |blocks: u64| around + blocks * (BLOCK_BYTES + SECTOR);
        Ok(Measured { required: with(data_blocks.min(blocks)), fully_allocated: with(blocks) })
    }
}

fn create_fixed(storage: &dyn Storage, guest_bytes: u64, geometry: DiskGeometry) -> Result<()> {
    let footer = Footer::new(DiskType::Fixed, guest_bytes, geometry)?;
    storage.make_room(guest_bytes + FOOTER_BYTES as u64, guest_bytes)?;
    storage.write_at(footer.bytes(), footer_at(storage, guest_bytes)?)
}

fn create_dynamic(
    storage: &dyn Storage,
    guest_bytes: u64,
    geometry: DiskGeometry,
    backing: Option<&BackingRef>,
) -> Result<()> {
    let disk_type = if backing.is_some() { DiskType::Differencing } else { DiskType::Dynamic };
    let footer = Footer::new(disk_type, guest_bytes, geometry)?;
    // At most 2^21, since the size is limited.
    let entries = guest_bytes.div_ceil(BLOCK_BYTES) as u32;
    let mut header = DynamicHeader::new(TABLE_AT, entries, BLOCK_BYTES as u32);
    let table_end = (TABLE_AT + u64::from(entries) * 4).next_multiple_of(SECTOR);
    let mut stored_name = Vec::new();
    if let Some(backing) = backing {
        let (parent, name) = (identity(storage.name(), backing)?, &backing.name);
        let (platform, bytes) = parent::stored(name);
        let len = bytes.len() as u32;
        let locator = ParentLocator {
            platform_code: platform,
            platform_data_space: len.next_multiple_of(512).into(),
            platform_data_length: len.into(),
            reserved: U32::ZERO,
            platform_data_offset: table_end.into(),
        };
        let time = parent::stamp(backing.modified);
        header = header.over(parent, time, &parent::last(name), locator);
        stored_name = bytes;
    }
    let end = table_end + (stored_name.len() as u64).next_multiple_of(SECTOR);
    storage.make_room(end + FOOTER_BYTES as u64, 0)?;
    if !stored_name.is_empty() {
        storage.write_at(&stored_name, HostOffset(table_end))?;
    }
    let table = header.geometry();
    // Whole sectors, as other programs read them.
    let padded = (table_end - TABLE_AT) / 4;
    write_holes(storage, &table, 0, padded)?;
    storage.write_at(header.bytes(), HostOffset(header.at))?;
    storage.write_at(footer.bytes(), footer_at(storage, end)?)?;
    storage.write_at(footer.bytes(), HostOffset(0))
}

pub(crate) fn identity(file: &str, backing: &BackingRef) -> Result<Uuid> {
    let found = backing.identity.as_deref().and_then(|id| Uuid::try_parse(id).ok());
    let vhd = backing.format.as_deref().is_none_or(|format| matches!(format, "vpc" | "vhd"));
    found.filter(|_| vhd).ok_or_else(|| {
        Error::unsupported(
            file,
            format!("not supported: a VHD on '{}', which is not known to be a VHD", backing.name),
            "a VHD knows its parent by that one's unique ID; create a qcow2 image, or convert the \
             parent first",
        )
    })
}
