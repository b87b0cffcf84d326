//! The VMDK format driver.

use std::sync::Arc;

use vdkit_block::{
    CheckReport, DriverInfo, Format, FormatDriver, ImageInfo, Limits, OfflineImage, OpenRequest,
    Probe, Repair, Result, Storage,
};

use crate::foreign::{COWD_MAGIC, SE_MAGIC};
use crate::header::MAGIC;
use crate::{Vmdk, check, describe};

/// The usual first line of a descriptor.
const DESCRIPTOR: &[u8] = b"# Disk DescriptorFile";

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
        check::check(image, repair)
    }

    vdkit_block::capabilities!(creation: Creation, amendment: Amendment);
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
