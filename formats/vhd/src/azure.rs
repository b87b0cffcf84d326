//! Requirements of Azure. Source: "Prepare a Windows VHD or VHDX to upload to Azure" and
//! "Information for community supported and non-endorsed distributions" in Microsoft's
//! documentation.

use std::mem::offset_of;

use vdkit_block::{Finding, Result, Severity, Storage};

use crate::footer::{DiskType, FOOTER_BYTES, SECTOR, SECTORS_MAX};
use crate::locate::Footers;
use crate::on_disk::RawFooter;

/// Azure disks are a multiple of this size.
pub const AZURE_UNIT: u64 = 1 << 20;

/// Why Azure would reject an image; empty if it accepts it: a fixed VHD whose disk is a multiple of
/// 1 MiB and directly followed by the footer.
///
/// # Errors
/// Those of the storage.
pub fn azure_faults(storage: &dyn Storage) -> Result<Vec<Finding>> {
    let mut faults = Vec::new();
    let mut add = |at: u64, field: usize, structure: &'static str, message: String| {
        let (severity, offset) = (Severity::Corruption, at + field as u64);
        faults.push(Finding { severity, offset, structure, message, repaired: false });
    };
    let len = storage.len()?;
    let footers = Footers::read(storage)?;
    let footer = match &footers.back {
        Ok(footer) => footer,
        Err(no) => {
            let message = format!("found {}, expected {}", no.found, no.expected);
            add(footers.back_at, no.at, "footer", message);
            return Ok(faults);
        }
    };
    let at = footers.back_at;
    if footer.disk_type != DiskType::Fixed {
        let message = format!(
            "the image is {}; Azure takes fixed ones (subformat=fixed,force_size=on)",
            footer.disk_type.name()
        );
        add(at, offset_of!(RawFooter, disk_type), "disk type", message);
        return Ok(faults);
    }
    let size = footer.current_size();
    if size > SECTORS_MAX * SECTOR {
        let message = format!("{size} bytes are more than 2040 GiB");
        add(at, offset_of!(RawFooter, current_size), "current size", message);
    } else if !size.is_multiple_of(AZURE_UNIT) || size == 0 {
        // At most 2040 GiB, which are whole MiB.
        let whole = size.next_multiple_of(AZURE_UNIT).max(AZURE_UNIT);
        let message = format!("the disk has {size} bytes, not whole MiB; {whole} would be");
        add(at, offset_of!(RawFooter, current_size), "current size", message);
    }
    if footer.disk_bytes() != size {
        let message = format!(
            "its creator '{}' means {} bytes by the geometry, and Azure takes the {size} of the \
             size field",
            footer.creator(),
            footer.disk_bytes()
        );
        add(at, offset_of!(RawFooter, cylinders), "disk geometry", message);
    }
    if size.checked_add(FOOTER_BYTES as u64) != Some(len) {
        let message = format!("the file has {len} bytes, not those of the disk ({size}) and 512");
        add(at, offset_of!(RawFooter, current_size), "file", message);
    }
    if footer.version() != 0x0001_0000 {
        let message = format!("{:#x}, not 1.0", footer.version());
        add(at, offset_of!(RawFooter, file_format_version), "file format version", message);
    }
    if footer.data_offset() != u64::MAX {
        let message = format!("{:#x}, not none", footer.data_offset());
        add(at, offset_of!(RawFooter, data_offset), "data offset", message);
    }
    Ok(faults)
}
