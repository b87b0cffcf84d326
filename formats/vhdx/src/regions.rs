//! The region tables [2.2.3], which name the block allocation table and the metadata region.

use vdkit_block::bytes::{le32, le64};
use vdkit_block::{Error, HostOffset, Result, Storage};

use crate::fields::{guid_at, is_sealed, put, seal};
use crate::header::Header;
use crate::layout::{
    BAT_REGION, FILE_BYTES_MAX, METADATA_REGION, MIB, REGION_OFFSETS, TABLE_BYTES,
};
use uuid::Uuid;

const SIGNATURE: &[u8; 4] = b"regi";
/// Most entries of a table.
const ENTRIES_MAX: u32 = 2047;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) guid: Uuid,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) required: bool,
}

impl Region {
    pub(crate) fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

/// A validated table.
#[derive(Clone, Debug)]
pub(crate) struct Regions {
    /// All regions, including unknown ones.
    pub(crate) all: Vec<Region>,
    pub(crate) bat: Region,
    pub(crate) metadata: Region,
    /// Index of the table that is damaged or differs from the one in use.
    pub(crate) damaged: Option<usize>,
}

/// The 64 KiB of a table.
pub(crate) fn encode(regions: &[Region]) -> Vec<u8> {
    let mut bytes = vec![0; TABLE_BYTES as usize];
    put(&mut bytes, 0, SIGNATURE);
    put(&mut bytes, 8, &(regions.len() as u32).to_le_bytes());
    for (index, region) in regions.iter().enumerate() {
        let at = 16 + 32 * index;
        put(&mut bytes, at, &region.guid.to_bytes_le());
        put(&mut bytes, at + 16, &region.offset.to_le_bytes());
        put(&mut bytes, at + 24, &(region.bytes as u32).to_le_bytes());
        put(&mut bytes, at + 28, &u32::from(region.required).to_le_bytes());
    }
    seal(&mut bytes);
    bytes
}

fn parse(bytes: &[u8]) -> Option<Vec<Region>> {
    if !is_sealed(bytes, SIGNATURE) || le32(bytes, 8) > ENTRIES_MAX {
        return None;
    }
    let entry = |index: u32| {
        let at = 16 + 32 * index as usize;
        Region {
            guid: guid_at(bytes, at),
            offset: le64(bytes, at + 16),
            bytes: le32(bytes, at + 24).into(),
            required: le32(bytes, at + 28) & 1 != 0,
        }
    };
    Some((0..le32(bytes, 8)).map(entry).collect())
}

impl Regions {
    /// Reads the first table, or the second if the first is damaged.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if neither is sound, or a region is at an invalid place;
    /// [`Error::Unsupported`] for an unknown required region; I/O.
    pub(crate) fn read(storage: &dyn Storage, header: &Header) -> Result<Self> {
        let mut tables = [None, None];
        for (table, offset) in tables.iter_mut().zip(REGION_OFFSETS) {
            let mut bytes = vec![0; TABLE_BYTES as usize];
            storage.read_padded(&mut bytes, HostOffset(offset))?;
            *table = parse(&bytes);
        }
        let same = tables[0] == tables[1];
        let (slot, all, damaged) = match tables {
            [Some(first), _] => (0, first, (!same).then_some(1)),
            [None, Some(second)] => (1, second, Some(0)),
            [None, None] => {
                return Err(Error::corrupt(
                    storage.name(),
                    REGION_OFFSETS[0],
                    "region table",
                    "no sound one, here or at 0x40000",
                    "a signature, at most 2047 entries and a CRC-32C [2.2.3]",
                ));
            }
        };
        let table = REGION_OFFSETS[slot];
        Self::check_places(storage, header, &all, table)?;
        let find = |guid: Uuid, name: &str| -> Result<Region> {
            let mut found = all.iter().filter(|region| region.guid == guid);
            match (found.next(), found.next()) {
                (Some(region), None) => Ok(*region),
                (found, _) => {
                    let count = if found.is_none() { "no" } else { "more than one" };
                    let found = format!("{count} region of the {name}");
                    Err(Error::corrupt(
                        storage.name(),
                        table,
                        "region table",
                        found,
                        "one [2.2.3.2]",
                    ))
                }
            }
        };
        let bat = find(BAT_REGION, "block allocation table")?;
        let metadata = find(METADATA_REGION, "metadata")?;
        let unknown = |r: &&Region| r.required && r.guid != BAT_REGION && r.guid != METADATA_REGION;
        if let Some(region) = all.iter().find(unknown) {
            return Err(Error::unsupported(
                storage.name(),
                format!(
                    "not supported: a required region that is not known: {} [2.2.3.2]",
                    region.guid
                ),
                "convert the image with the program that wrote it",
            ));
        }
        Ok(Self { all, bat, metadata, damaged })
    }

    fn check_places(
        storage: &dyn Storage,
        header: &Header,
        all: &[Region],
        table: u64,
    ) -> Result<()> {
        let fault = |index: usize, found: String, expected: &str| {
            let at = table + 16 + 32 * index as u64;
            Err(Error::corrupt(storage.name(), at, "region table entry", found, expected))
        };
        let mut taken = vec![(header.log_offset, header.log_offset + header.log_bytes)];
        for (index, region) in all.iter().enumerate() {
            let place = format!("{:#x} bytes at {:#x}", region.bytes, region.offset);
            let aligned = region.offset.is_multiple_of(MIB) && region.bytes.is_multiple_of(MIB);
            if !aligned || region.offset < MIB || region.offset > FILE_BYTES_MAX {
                let expected = "multiples of 1 MiB behind the first one [2.2.3.2]";
                return fault(index, place, expected);
            }
            taken.push((region.offset, region.end()));
        }
        let mut sorted: Vec<_> = taken.iter().enumerate().collect();
        sorted.sort_by_key(|(_, range)| **range);
        for pair in sorted.windows(2) {
            let ((_, before), (index, after)) = (pair[0], pair[1]);
            if before.1 > after.0 {
                let found = format!("{:#x}..{:#x} over {:#x}", after.0, after.1, before.1);
                return fault(index.saturating_sub(1), found, "no overlap [2.2.3.2]");
            }
        }
        Ok(())
    }
}
