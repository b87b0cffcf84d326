//! Changes the parent of an image in place: rewrites, adds or removes the parent locator. All
//! changes go through the log, so a crash leaves the old or the new state.

use std::mem::offset_of;

use uuid::Uuid;
use vdkit_block::{
    AmendRequest, Amendment, BackingRef, Error, HostOffset, Monitor, Place, Result, ZeroMode,
};
use zerocopy::{FromZeros, IntoBytes};

use crate::driver::VhdxDriver;
use crate::image::Vhdx;
use crate::layout::{BAT_REGION, BatEntry, Geometry, METADATA_REGION, State};
use crate::map::Lookup;
use crate::metadata::{self, LocatorPlace};
use crate::on_disk::{MetadataEntry, MetadataTable};
use crate::parent::ParentLocator;
use crate::regions::Region;

/// Offset of the number of entries in the metadata region.
const COUNT_AT: u64 = offset_of!(MetadataTable, entry_count) as u64;

impl Amendment for VhdxDriver {
    fn amends_backing(&self) -> bool {
        true
    }

    fn amend(&self, request: &AmendRequest, monitor: &Monitor<'_>) -> Result<Vec<String>> {
        let storage = &request.storage;
        request.refuse_options("vhdx")?;
        let Some(backing) = &request.backing else { return Ok(Vec::new()) };
        let image = Vhdx::open_writable(storage, &request.limits)?;
        let changed = match backing {
            Some(backing) => image.set_parent(backing)?,
            None if image.geometry.has_parent => {
                image.stand_alone(monitor)?;
                true
            }
            None => false,
        };
        image.meta.close(&*image)?;
        Ok(if changed { vec!["backing".to_owned()] } else { Vec::new() })
    }
}

impl Vhdx {
    fn set_parent(&self, backing: &BackingRef) -> Result<bool> {
        let file = self.storage.name();
        if self.fixed {
            return Err(Error::unsupported(
                file,
                "not supported: a fixed vhdx image on another one",
                "convert it to a dynamic one first",
            ));
        }
        let locator = ParentLocator::new(file, backing)?;
        if self.metadata.parent.as_ref() == Some(&locator) {
            return Ok(false);
        }
        let region = self.region(METADATA_REGION)?;
        let table = self.region(BAT_REGION)?;
        let geometry = Geometry { has_parent: true, ..self.geometry };
        if geometry.bat_region_bytes(self.guest_len()) > table.bytes {
            return Err(Error::unsupported(
                file,
                "not supported: sector bitmaps in a block allocation table without room for them",
                "convert it to a new image that stands on the other one",
            ));
        }
        let bytes = locator.encode();
        let place = self.metadata.place_locator(&region, bytes.len() as u64);
        let Some(LocatorPlace { offset, entry, count }) = place else {
            return Err(Error::unsupported(
                file,
                "not supported: another parent locator in a metadata region without room for it",
                "convert it to a new image",
            ));
        };
        self.begin_metadata_session()?;
        let blocks = self.geometry.blocks(self.guest_len());
        if !self.geometry.has_parent && blocks > 0 {
            // The table ended with the last block's entry; later bytes of the region are undefined.
            self.set_entry(geometry.bitmap_index(blocks - 1), BatEntry::NOT_PRESENT)?;
        }
        self.put_metadata(offset, &bytes)?;
        let item = metadata::locator_entry(offset - region.offset, bytes.len() as u64);
        self.put_metadata(entry, item.as_bytes())?;
        self.put_metadata(region.offset + COUNT_AT, &count.to_le_bytes())?;
        self.put_metadata(self.metadata.flags_at, &metadata::HAS_PARENT.to_le_bytes())?;
        self.meta.flush(self)?;
        Ok(true)
    }

    fn region(&self, guid: Uuid) -> Result<Region> {
        let mut lead = self.meta.lead();
        let found = lead.leader_state().regions.iter().find(|region| region.guid == guid).copied();
        found.ok_or_else(|| Error::invalid_for(&self.storage.name(), format!("has no {guid}")))
    }

    /// Turns a differencing image into a dynamic one. The caller ensures that the parent reads as
    /// zero where this image has no data.
    fn stand_alone(&self, monitor: &Monitor<'_>) -> Result<()> {
        self.begin_metadata_session()?;
        // Of a damaged image, no space is zeroed or freed.
        self.space(&mut self.meta.lock())?;
        let blocks = self.geometry.blocks(self.guest_len());
        for block in 0..blocks {
            monitor.cancel.check()?;
            self.relieve()?;
            let entry = self.payload(block)?;
            let index = self.geometry.payload_index(block);
            match self.state_of(block, entry)? {
                State::NotPresent => self.set_entry(index, BatEntry::ZERO)?,
                State::PartiallyPresent => {
                    self.complete(block)?;
                    self.meta.lock().data_first = true;
                    self.set_entry(index, BatEntry::present(entry.host()))?;
                }
                _ => {}
            }
        }
        // No block on disk may be partial when its bitmap is freed.
        self.meta.flush(self)?;
        self.free_bitmaps(&(0..blocks))?;
        self.meta.flush(self)?;
        let region = self.region(METADATA_REGION)?;
        if let Some((entry, last, count)) = self.metadata.without_locator(&region) {
            let mut moved = MetadataEntry::new_zeroed();
            self.storage.read_at(moved.as_mut_bytes(), HostOffset(last))?;
            self.put_metadata(entry, moved.as_bytes())?;
            self.put_metadata(last, MetadataEntry::new_zeroed().as_bytes())?;
            self.put_metadata(region.offset + COUNT_AT, &count.to_le_bytes())?;
        }
        self.put_metadata(self.metadata.flags_at, &0_u32.to_le_bytes())?;
        self.meta.flush(self)
    }

    /// Zeroes the sectors of a partial block that are not present.
    fn complete(&self, block: u64) -> Result<()> {
        let start = block << self.geometry.block_bits;
        let end = (start + self.geometry.block_bytes()).min(self.guest_len());
        let host = self.payload(block)?.host();
        let mut at = start;
        while at < end {
            let Some(extent) = self.extent_in_block(at, end - at, Lookup::Load)? else { break };
            if extent.place == Place::Hole {
                let offset = HostOffset(host + (at - start));
                self.storage.write_zeroes(offset, extent.len, ZeroMode::MayUnmap)?;
            }
            at += extent.len;
        }
        Ok(())
    }
}
