//! Updates the stored time stamp of the parent, with one write of a sector.

use vdkit_block::{
    AmendRequest, Amendment, BackingRef, Error, HostOffset, Monitor, Result, Storage,
};

use crate::create::identity;
use crate::driver::VhdDriver;
use crate::envelope::Parts;
use crate::footer::{DiskType, SECTOR};
use crate::header::DynamicHeader;
use crate::locate::Footers;
use crate::parent;

impl Amendment for VhdDriver {
    fn amends_backing(&self) -> bool {
        false
    }

    /// The parent must stay the same, by its unique ID and name: another one needs changes in two
    /// sectors, which a crash could separate.
    fn amend(&self, request: &AmendRequest, _monitor: &Monitor<'_>) -> Result<Vec<String>> {
        let storage = &*request.storage;
        request.refuse_options("vpc")?;
        let Some(backing) = &request.backing else { return Ok(Vec::new()) };
        let footers = Footers::read(storage)?;
        let footer = footers.best(storage.name())?;
        let refused = || {
            Error::unsupported(
                storage.name(),
                "not supported: putting a vpc image on another parent, or on none, in place",
                "convert it to a new image: that one stands alone",
            )
        };
        let over_parent = footer.disk_type == DiskType::Differencing;
        let backing = backing.as_ref().filter(|_| over_parent).ok_or_else(refused)?;
        let Parts { header, .. } = Parts::read(storage, &footers)?;
        if !is_parent(storage, &header, backing)? {
            return Err(refused());
        }
        let time = parent::stamp(backing.modified);
        if time == 0 || time == header.parent_time() {
            return Ok(Vec::new());
        }
        let header = header.with_parent_time(time);
        // The time stamp and the checksum are in the first sector.
        storage.write_at(&header.bytes()[..SECTOR as usize], HostOffset(header.at))?;
        storage.sync()?;
        Ok(vec!["backing".to_owned()])
    }
}

fn is_parent(storage: &dyn Storage, header: &DynamicHeader, backing: &BackingRef) -> Result<bool> {
    let name = parent::name(storage, header)?;
    let same_name = parent::stored(&name) == parent::stored(&backing.name);
    Ok(same_name && identity(storage.name(), backing)? == header.parent_uuid())
}
