//! The metadata region [2.6]: a table and its items.

use std::mem::offset_of;

use uuid::Uuid;
use vdkit_block::{Error, HostOffset, Result, Storage, random_uuid};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use crate::layout::{
    BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, GUEST_BYTES_MAX, Geometry, MIB, PAGE_BYTES, TABLE_BYTES,
};
use crate::on_disk::{MetadataEntry, MetadataTable};
use crate::parent::ParentLocator;
use crate::regions::Region;

const SIGNATURE: &[u8; 8] = b"metadata";
/// Most entries of the table [2.6.1.1].
const ENTRIES_MAX: u16 = 2047;
/// Longest item [2.6.1.2].
const ITEM_BYTES_MAX: u64 = MIB;

/// Known items [2.6.2].
const FILE_PARAMETERS: Uuid = Uuid::from_u128(0xcaa16737_fa36_4d43_b3b6_33f0aa44e76b);
const DISK_SIZE: Uuid = Uuid::from_u128(0x2fa54224_cd1b_4876_b211_5dbed83bf4b8);
const DISK_ID: Uuid = Uuid::from_u128(0xbeca12ab_b2e6_4523_93ef_c309e000c746);
const LOGICAL_SECTOR: Uuid = Uuid::from_u128(0x8141bf1d_a96f_4709_ba47_f233a8faab5f);
const PHYSICAL_SECTOR: Uuid = Uuid::from_u128(0xcda348c7_445d_4471_9cc9_e9885251c556);
const PARENT_LOCATOR: Uuid = Uuid::from_u128(0xa8d35f2d_b30b_454d_abf7_d3d84834ab0c);
const KNOWN: [(Uuid, &str); 6] = [
    (FILE_PARAMETERS, "file parameters [2.6.2.1]"),
    (DISK_SIZE, "virtual disk size [2.6.2.2]"),
    (DISK_ID, "virtual disk ID [2.6.2.3]"),
    (LOGICAL_SECTOR, "logical sector size [2.6.2.4]"),
    (PHYSICAL_SECTOR, "physical sector size [2.6.2.5]"),
    (PARENT_LOCATOR, "parent locator [2.6.2.6]"),
];

/// Flags of an entry: user metadata, describes the disk rather than the file, required.
const IS_USER: u32 = 1;
const IS_DISK: u32 = 2;
const IS_REQUIRED: u32 = 4;
/// Flags of the file parameters.
const LEAVE_ALLOCATED: u32 = 1;
pub(crate) const HAS_PARENT: u32 = 2;

/// One entry of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    pub(crate) id: Uuid,
    /// Offset of the item in the file.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) flags: u32,
    /// Offset of the entry in the file.
    pub(crate) entry: u64,
}

/// Decoded items.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Metadata {
    pub(crate) geometry: Geometry,
    /// A fixed image: all blocks are allocated and stay so.
    pub(crate) fixed: bool,
    pub(crate) guest_bytes: u64,
    /// Offsets in the file of the disk size and of the flags of the file parameters.
    pub(crate) size_at: u64,
    pub(crate) flags_at: u64,
    pub(crate) disk_id: Uuid,
    pub(crate) physical_sector_bytes: u32,
    pub(crate) parent: Option<ParentLocator>,
    pub(crate) items: Vec<Item>,
    /// Reserved bits of the file parameters that are set.
    pub(crate) reserved_parameters: u32,
}

/// Reads the table and the known items.
///
/// # Errors
/// [`Error::Corrupt`] for violations of the specification; [`Error::Unsupported`] for an unknown
/// required item; I/O.
pub(crate) fn read(storage: &dyn Storage, region: &Region) -> Result<Metadata> {
    // Includes the items, which most writers put directly after the table.
    let mut head = vec![0; (TABLE_BYTES + PAGE_BYTES) as usize];
    storage.read_padded(&mut head, HostOffset(region.offset))?;
    let items = read_table(storage, region, &head)?;
    let reader = Reader { storage, region, items: &items, head: &head };
    let [block, flags] = reader.item::<[U32; 2]>(FILE_PARAMETERS)?.map(U32::get);
    let blocks = BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX;
    if !block.is_power_of_two() || !blocks.contains(&u64::from(block)) {
        let expected = "a power of two from 1 MiB to 256 MiB [2.6.2.1]";
        return Err(reader.fault(FILE_PARAMETERS, format!("blocks of {block} bytes"), expected));
    }
    let logical = reader.item::<U32>(LOGICAL_SECTOR)?.get();
    let physical = reader.item::<U32>(PHYSICAL_SECTOR)?.get();
    for (id, bytes, section) in
        [(LOGICAL_SECTOR, logical, "[2.6.2.4]"), (PHYSICAL_SECTOR, physical, "[2.6.2.5]")]
    {
        if bytes != 512 && bytes != 4096 {
            let expected = format!("512 or 4096 {section}");
            return Err(reader.fault(id, format!("sectors of {bytes} bytes"), &expected));
        }
    }
    let guest_bytes = reader.item::<U64>(DISK_SIZE)?.get();
    if guest_bytes > GUEST_BYTES_MAX || !guest_bytes.is_multiple_of(logical.into()) {
        let expected = "a multiple of the logical sector size, 64 TiB at most [2.6.2.2]";
        return Err(reader.fault(DISK_SIZE, format!("{guest_bytes} bytes"), expected));
    }
    let disk_id = Uuid::from_bytes_le(reader.item(DISK_ID)?);
    let has_parent = flags & HAS_PARENT != 0;
    let parent = match has_parent {
        false => None,
        true => {
            let item = reader.find(PARENT_LOCATOR)?;
            let bytes = reader.content(&item)?;
            Some(ParentLocator::parse(&bytes).map_err(|(found, expected)| {
                Error::corrupt(storage.name(), item.offset, "parent locator", found, expected)
            })?)
        }
    };
    let geometry = Geometry {
        block_bits: block.trailing_zeros(),
        sector_bits: logical.trailing_zeros(),
        has_parent,
    };
    Ok(Metadata {
        geometry,
        fixed: flags & LEAVE_ALLOCATED != 0 && !has_parent,
        guest_bytes,
        size_at: reader.find(DISK_SIZE)?.offset,
        flags_at: reader.find(FILE_PARAMETERS)?.offset + 4,
        disk_id,
        physical_sector_bytes: physical,
        parent,
        reserved_parameters: flags & !(LEAVE_ALLOCATED | HAS_PARENT),
        items,
    })
}

fn read_table(storage: &dyn Storage, region: &Region, head: &[u8]) -> Result<Vec<Item>> {
    let file = storage.name();
    let (table, _) = MetadataTable::ref_from_prefix(head).expect("the head has the whole table");
    let count = table.entry_count.get();
    if table.signature != *SIGNATURE || count > ENTRIES_MAX || region.bytes < MIB {
        return Err(Error::corrupt(
            file,
            region.offset,
            "metadata table",
            format!("{:02x?}, {count} entries, {:#x} bytes", table.signature, region.bytes),
            "its signature, 2047 entries at most, 1 MiB at least [2.6.1.1]",
        ));
    }
    let mut items: Vec<Item> = Vec::with_capacity(count.into());
    for (index, raw) in table.entries[..usize::from(count)].iter().enumerate() {
        let entry = entry_at(region, index);
        let (offset, bytes) = (u64::from(raw.offset), u64::from(raw.length));
        let (id, flags) = (Uuid::from_bytes_le(raw.item_id), raw.flags.get());
        let within = bytes == 0 && offset == 0
            || offset >= TABLE_BYTES && bytes <= ITEM_BYTES_MAX && offset + bytes <= region.bytes;
        if !within {
            return Err(Error::corrupt(
                file,
                entry,
                "metadata table entry",
                format!("{bytes:#x} bytes at {offset:#x} in the region"),
                "1 MiB at most, behind the table and within the region [2.6.1.2]",
            ));
        }
        let known = KNOWN.iter().any(|(known, _)| *known == id) && flags & IS_USER == 0;
        if !known && flags & IS_REQUIRED != 0 {
            return Err(Error::unsupported(
                file,
                format!(
                    "not supported: a required metadata item that is not known: {id} [2.6.1.2]"
                ),
                "convert the image with the program that wrote it",
            ));
        }
        let item = Item { id, offset: region.offset + offset, bytes, flags, entry };
        if known && system_item(&items, id).is_some() {
            return Err(Error::corrupt(
                file,
                entry,
                "metadata table entry",
                format!("a second {}", name_of(id)),
                "each item once [2.6.1.2]",
            ));
        }
        items.push(item);
    }
    Ok(items)
}

/// Offset of an entry in the file.
fn entry_at(region: &Region, index: usize) -> u64 {
    let at = offset_of!(MetadataTable, entries) + index * size_of::<MetadataEntry>();
    region.offset + at as u64
}

fn name_of(id: Uuid) -> &'static str {
    KNOWN.iter().find(|(known, _)| *known == id).map_or("item", |(_, name)| name)
}

struct Reader<'a> {
    storage: &'a dyn Storage,
    region: &'a Region,
    items: &'a [Item],
    /// The start of the region.
    head: &'a [u8],
}

impl Reader<'_> {
    fn content(&self, item: &Item) -> Result<Vec<u8>> {
        let from = (item.offset - self.region.offset) as usize;
        if let Some(bytes) = self.head.get(from..from + item.bytes as usize) {
            return Ok(bytes.to_vec());
        }
        let mut bytes = vec![0; item.bytes as usize];
        self.storage.read_padded(&mut bytes, HostOffset(item.offset))?;
        Ok(bytes)
    }

    fn find(&self, id: Uuid) -> Result<Item> {
        system_item(self.items, id).copied().ok_or_else(|| {
            Error::corrupt(
                self.storage.name(),
                self.region.offset,
                "metadata table",
                format!("no {}", name_of(id)),
                "all items that the specification requires [2.6.2]",
            )
        })
    }

    fn item<T: FromBytes>(&self, id: Uuid) -> Result<T> {
        let item = self.find(id)?;
        let fits = item.bytes == size_of::<T>() as u64;
        let content = if fits { self.content(&item)? } else { Vec::new() };
        T::read_from_bytes(&content).map_err(|_| {
            let found = format!("{} bytes of the {}", item.bytes, name_of(id));
            self.fault(id, found, &format!("{} bytes [2.6.2]", size_of::<T>()))
        })
    }

    fn fault(&self, id: Uuid, found: String, expected: &str) -> Error {
        let at = self.find(id).map_or(self.region.offset, |item| item.offset);
        Error::corrupt(self.storage.name(), at, "metadata item", found, expected)
    }
}

/// The known item with this ID; user items may have the same ones.
fn system_item(items: &[Item], id: Uuid) -> Option<&Item> {
    items.iter().find(|item| item.id == id && item.flags & IS_USER == 0)
}

impl Metadata {
    /// Offset of the parent locator, if there is one.
    pub(crate) fn locator_offset(&self) -> Option<u64> {
        Some(system_item(&self.items, PARENT_LOCATOR)?.offset)
    }

    /// A place for a parent locator of `bytes` bytes: after all other items, or its current one.
    pub(crate) fn place_locator(&self, region: &Region, bytes: u64) -> Option<LocatorPlace> {
        let old = system_item(&self.items, PARENT_LOCATOR);
        let count = self.items.len();
        let (entry, count) = match old {
            Some(item) => (item.entry, count as u16),
            None => (entry_at(region, count), count as u16 + 1),
        };
        let others = self.items.iter().filter(|item| Some(*item) != old);
        let end = others.map(|item| item.offset + item.bytes).max()?;
        let offset = end.max(region.offset + TABLE_BYTES).next_multiple_of(16);
        let fits =
            offset + bytes <= region.end() && bytes <= ITEM_BYTES_MAX && count <= ENTRIES_MAX;
        fits.then_some(LocatorPlace { offset, entry, count })
    }

    /// How to remove the parent locator from the table: its entry is replaced by the last one.
    /// Returns the offsets of both entries and the new number of entries.
    pub(crate) fn without_locator(&self, region: &Region) -> Option<(u64, u64, u16)> {
        let item = system_item(&self.items, PARENT_LOCATOR)?;
        let left = self.items.len() - 1;
        Some((item.entry, entry_at(region, left), left as u16))
    }
}

/// The place of a parent locator, as offsets in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LocatorPlace {
    /// Offset of the item.
    pub(crate) offset: u64,
    /// Offset of its table entry.
    pub(crate) entry: u64,
    /// New number of table entries.
    pub(crate) count: u16,
}

/// The entry of a parent locator at an offset in its region.
pub(crate) fn locator_entry(offset: u64, bytes: u64) -> MetadataEntry {
    new_entry(PARENT_LOCATOR, offset as usize, bytes as usize, IS_REQUIRED)
}

fn new_entry(id: Uuid, offset: usize, bytes: usize, flags: u32) -> MetadataEntry {
    MetadataEntry {
        item_id: id.to_bytes_le(),
        offset: (offset as u32).into(),
        length: (bytes as u32).into(),
        flags: flags.into(),
        reserved: U32::ZERO,
    }
}

/// Items of a new image.
#[derive(Clone, Debug)]
pub(crate) struct NewMetadata {
    pub(crate) geometry: Geometry,
    pub(crate) fixed: bool,
    pub(crate) guest_bytes: u64,
    pub(crate) parent: Option<ParentLocator>,
}

impl NewMetadata {
    /// The start of a metadata region: a 64 KiB table, followed by all items.
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        let flags = if self.fixed { LEAVE_ALLOCATED } else { 0 }
            | if self.parent.is_some() { HAS_PARENT } else { 0 };
        let parameters = [self.geometry.block_bytes() as u32, flags].map(U32::new);
        let sector = (self.geometry.sector_bytes() as u32).to_le_bytes().to_vec();
        let disk = IS_REQUIRED | IS_DISK;
        let mut items = vec![
            (FILE_PARAMETERS, IS_REQUIRED, parameters.as_bytes().to_vec()),
            (DISK_SIZE, disk, self.guest_bytes.to_le_bytes().to_vec()),
            (DISK_ID, disk, random_uuid()?.to_bytes_le().to_vec()),
            (LOGICAL_SECTOR, disk, sector),
            // Current disks have physical sectors of 4 KiB, and guests align to them.
            (PHYSICAL_SECTOR, disk, 4096u32.to_le_bytes().to_vec()),
        ];
        if let Some(parent) = &self.parent {
            items.push((PARENT_LOCATOR, IS_REQUIRED, parent.encode()));
        }
        let mut bytes = vec![0; TABLE_BYTES as usize];
        let mut table = vec![0; size_of::<MetadataTable>()];
        let head = MetadataTable::mut_from_bytes(&mut table).expect("it has this size");
        head.signature = *SIGNATURE;
        head.entry_count = (items.len() as u16).into();
        for (entry, (id, flags, content)) in head.entries.iter_mut().zip(&items) {
            *entry = new_entry(*id, bytes.len(), content.len(), *flags);
            bytes.extend_from_slice(content);
            // Aligned, so that no number crosses a page boundary.
            bytes.resize(bytes.len().next_multiple_of(16), 0);
        }
        bytes[..table.len()].copy_from_slice(&table);
        Ok(bytes)
    }
}
