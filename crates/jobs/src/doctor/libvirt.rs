//! The element by which libvirt gives the image to a guest.

use std::path::{Path, PathBuf};

use vdkit_chain::ChainLink;

use super::Patient;
use super::evidence::Allocation;
use crate::libvirt::{DiskBacking, DiskSource, LibvirtDisk};

/// Bytes of the map that QEMU keeps unless it is told otherwise. Source: QEMU, docs/qcow2-cache.txt.
const QEMU_MAP_CACHE: u64 = 32 << 20;

impl Patient<'_> {
    /// For the whole chain, as far as it could be followed.
    pub(super) fn libvirt(&self) -> String {
        let link = self.link();
        let path = absolute(self.path);
        let source =
            if link.host.device { DiskSource::Device(path) } else { DiskSource::File(path) };
        let mut disk = LibvirtDisk::new(source, link.info.format);
        disk.cache = self.evidence.cache.to_owned();
        disk.allocated = self.evidence.allocation == Allocation::Full;
        disk.encrypted = link.info.encryption.as_deref() == Some("luks");
        disk.map_cache_bytes = self.evidence.map_bytes.filter(|bytes| *bytes > QEMU_MAP_CACHE);
        disk.backing = self.links.iter().skip(1).map(backing).collect();
        disk.xml()
    }
}

fn backing(link: &ChainLink) -> DiskBacking {
    DiskBacking {
        path: absolute(&link.path),
        device: link.host.device,
        format: link.info.format.to_owned(),
    }
}

fn absolute(path: &Path) -> PathBuf {
    path.canonicalize().or_else(|_| std::path::absolute(path)).unwrap_or_else(|_| path.to_owned())
}
