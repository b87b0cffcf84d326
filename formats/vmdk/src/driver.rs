//! The VMDK format driver.

use std::sync::Arc;

use vdkit_block::{
    AmendRequest, Amendment, CheckReport, CreateRequest, Creation, DriverInfo, Error, Format,
    FormatDriver, ImageInfo, Limits, Measured, Monitor, OfflineImage, OpenRequest, OptionSpec,
    Options, Probe, Repair, Result, Storage,
};

use crate::create::{GRAIN_SECTORS, descriptor_sectors, sparse_header};
use crate::foreign::{COWD_MAGIC, SE_MAGIC};
use crate::header::{MAGIC, SECTOR};
use crate::options::{NewVmdk, SPECS, Subformat, whole_sectors};
use crate::stream::StreamWriter;
use crate::{Vmdk, amend, check, create, describe};

/// The usual first line of a descriptor.
const DESCRIPTOR: &[u8] = b"# Disk DescriptorFile";
/// Most bytes of a descriptor without its extent lines, and of an extent line with a name of usual
/// length.
const DESCRIPTOR_BYTES: u64 = 512;
const EXTENT_LINE_BYTES: u64 = 128;

/// VMDK images: hosted ones of versions 1 to 3, streams, and, read-only, those of ESX.
#[derive(Clone, Copy, Debug, Default)]
pub struct VmdkDriver;

impl FormatDriver for VmdkDriver {
    fn info(&self) -> DriverInfo {
        DriverInfo {
            name: "vmdk",
            aliases: &[],
            extensions: &["vmdk"],
            description: "VMware's format: sparse or flat, in one file or several, on parents, as a stream",
        }
    }

    fn probe(&self, head: &[u8], _tail: &[u8], _len: u64) -> Probe {
        let magic = head.starts_with(MAGIC)
            || head.starts_with(COWD_MAGIC)
            || head.starts_with(&SE_MAGIC.to_le_bytes());
        if magic || is_descriptor(head) { Probe::Yes } else { Probe::No }
    }

    fn describe(&self, storage: &Arc<dyn Storage>, limits: &Limits) -> Result<ImageInfo> {
        describe::describe(storage, limits)
    }

    fn open(&self, request: OpenRequest) -> Result<Arc<dyn Format>> {
        Ok(Vmdk::open(request)?)
    }

    fn check(&self, image: &OfflineImage<'_>, repair: Repair) -> Result<CheckReport> {
        check::check(image.storage, image.files, repair, &image.limits, &image.monitor)
    }

    vdkit_block::capabilities!(creation: Creation, amendment: Amendment);
}

impl Creation for VmdkDriver {
    fn options(&self) -> &'static [OptionSpec] {
        SPECS
    }

    fn create(&self, request: &CreateRequest) -> Result<()> {
        create::create(request)
    }

    fn create_open(&self, request: &CreateRequest, limits: &Limits) -> Result<Arc<dyn Format>> {
        if NewVmdk::new(&request.options)?.subformat == Subformat::Stream {
            return Ok(StreamWriter::begin(request, limits)?);
        }
        self.create(request)?;
        self.open(OpenRequest {
            storage: request.storage.clone(),
            files: request.files.clone(),
            writable: true,
            limits: *limits,
        })
    }

    fn new_files(&self, image: &str, guest_bytes: u64, options: &Options) -> Result<Vec<String>> {
        NewVmdk::new(options)?.files(image, whole_sectors(guest_bytes, image)?)
    }

    fn writes_in_order(&self, options: &Options) -> bool {
        NewVmdk::new(options).is_ok_and(|new| new.subformat == Subformat::Stream)
    }

    fn cluster_bytes(&self, options: &Options) -> Result<u64> {
        let new = NewVmdk::new(options)?;
        Ok(if new.subformat.is_flat() { SECTOR } else { GRAIN_SECTORS * SECTOR })
    }

    /// All files together. A stream is counted as incompressible.
    fn measure(&self, guest_bytes: u64, options: &Options, data_clusters: u64) -> Result<Measured> {
        let new = NewVmdk::new(options)?;
        let bytes = whole_sectors(guest_bytes, "a VMDK image")?;
        if new.subformat.is_flat() {
            let all = bytes + 4096;
            return Ok(Measured { required: all, fully_allocated: all });
        }
        let grain = GRAIN_SECTORS * SECTOR;
        let sectors = descriptor_sectors(None);
        let extents = new.extents(bytes);
        // A separate file with a line for each extent, whose name is unknown here.
        let descriptor = if new.subformat.is_one_file() {
            0
        } else {
            DESCRIPTOR_BYTES + extents.len() as u64 * EXTENT_LINE_BYTES
        };
        let overhead: u64 = extents
            .iter()
            .map(|&size| sparse_header(size, new.zeroed_grain, sectors).overhead * SECTOR)
            .sum::<u64>()
            + descriptor;
        let grains = bytes.div_ceil(grain);
        // Each grain of a stream has a marker, and may not compress.
        let grain = if new.subformat == Subformat::Stream { grain + SECTOR } else { grain };
        let all = |count: u64| {
            count.min(grains).checked_mul(grain).and_then(|n| n.checked_add(overhead)).ok_or_else(
                || Error::Invalid(format!("a VMDK image of {guest_bytes} bytes is too large")),
            )
        };
        Ok(Measured { required: all(data_clusters)?, fully_allocated: all(grains)? })
    }
}

impl Amendment for VmdkDriver {
    fn amends_backing(&self) -> bool {
        true
    }

    fn amend(&self, request: &AmendRequest, _monitor: &Monitor<'_>) -> Result<Vec<String>> {
        amend::amend(request)
    }
}

/// Whether a file is a descriptor by the rules of VMware and QEMU: it has the usual first line, or
/// a version after only comments and empty lines.
fn is_descriptor(head: &[u8]) -> bool {
    let start = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head);
    if start.get(..DESCRIPTOR.len()).is_some_and(|line| line.eq_ignore_ascii_case(DESCRIPTOR)) {
        return true;
    }
    // Most images are not text: search for line ends only if the first byte can begin such a line.
    if !start.first().is_some_and(|byte| b"#v".contains(byte) || byte.is_ascii_whitespace()) {
        return false;
    }
    for line in head.split(|&b| b == b'\n') {
        let line = line.trim_ascii();
        if line.is_empty() || line.starts_with(b"#") {
            continue;
        }
        return matches!(line, b"version=1" | b"version=2" | b"version=3");
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_known_by_their_first_bytes() {
        let probe = |head: &[u8]| VmdkDriver.probe(head, &[], head.len() as u64);
        for head in [
            &b"KDMV"[..],
            b"COWD\x01",
            &0xcafe_babe_u64.to_le_bytes(),
            b"# Disk DescriptorFile\nversion=1\n",
            b"# disk descriptorfile\r\n",
            b"# x\n\n   \r\nversion=3\r\n",
        ] {
            assert_eq!(probe(head), Probe::Yes, "{head:?}");
        }
        for head in [&b""[..], b"KDM", b"version=4\n", b"#\n#\n", b"\0version=1\n", b"x\nversion=1"]
        {
            assert_eq!(probe(head), Probe::No, "{head:?}");
        }
    }
}
