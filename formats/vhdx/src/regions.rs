//! The region tables [2.2.3], which name the block allocation table and the metadata region.

use std::mem::offset_of;

use uuid::Uuid;
use vdkit_block::{Error, HostOffset, Result, Storage};
use zerocopy::{FromBytes, IntoBytes};

use crate::header::Header;
use crate::layout::{
    BAT_REGION, FILE_BYTES_MAX, METADATA_REGION, MIB, REGION_OFFSETS, TABLE_BYTES,
};
use crate::on_disk::{RegionEntry, RegionTable, checksum, is_sealed};

const SIGNATURE: &[u8; 4] = b"regi";

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
    let mut bytes = vec![0; size_of::<RegionTable>()];
    let table = RegionTable::mut_from_bytes(&mut bytes).expect("it has this size");
    table.signature = *SIGNATURE;
    table.entry_count = (regions.len() as u32).into();
    for (entry, region) in table.entries.iter_mut().zip(regions) {
        *entry = RegionEntry {
            guid: region.guid.to_bytes_le(),
            file_offset: region.offset.into(),
            length: (region.bytes as u32).into(),
            required: u32::from(region.required).into(),
        };
    }
    table.checksum = checksum(table.as_bytes()).into();
    bytes
}

fn parse(bytes: &[u8]) -> Option<Vec<Region>> {
    let table = RegionTable::ref_from_bytes(bytes).ok().filter(|_| is_sealed(bytes, SIGNATURE))?;
    let entries = table.entries.get(..table.entry_count.get() as usize)?;
    let region = |entry: &RegionEntry| Region {
        guid: Uuid::from_bytes_le(entry.guid),
        offset: entry.file_offset.get(),
        bytes: entry.length.into(),
        required: entry.required.get() & 1 != 0,
    };
    Some(entries.iter().map(region).collect())
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
            let entry = offset_of!(RegionTable, entries) + index * size_of::<RegionEntry>();
            let at = table + entry as u64;
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
            let ((first, before), (second, after)) = (pair[0], pair[1]);
            if before.1 > after.0 {
                let found = format!("{:#x}..{:#x} over {:#x}", after.0, after.1, before.1);
                // The log comes before the regions, so one of the two is a region.
                return fault(first.max(second) - 1, found, "no overlap [2.2.3.2]");
            }
        }
        Ok(())
    }
}
