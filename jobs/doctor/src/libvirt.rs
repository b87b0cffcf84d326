//! The libvirt `<disk>` element of an image.

use std::path::{Path, PathBuf};

use vdkit_chain::ChainLink;

use crate::Examination;
use crate::evidence::Allocation;
use vdkit_libvirt::{self as libvirt, DiskBacking, DiskSource, LibvirtDisk};

/// QEMU's default size of the L2 cache. Source: QEMU, docs/qcow2-cache.txt.
const QEMU_MAP_CACHE: u64 = 32 << 20;

/// Assumed socket of `vdkit serve`.
const SOCKET: &str = "/run/vdkit-disk.sock";

impl Examination<'_> {
    /// For the whole chain, as far as it can be followed. A format that libvirt does not support
    /// becomes a disk served by `vdkit serve`.
    pub(super) fn libvirt(&self) -> String {
        let link = self.link();
        let cache = self.evidence.cache.to_owned();
        if !libvirt::is_known(link.info.format) {
            let source = DiskSource::Nbd(SOCKET.into(), String::new());
            return LibvirtDisk { cache, ..LibvirtDisk::new(source, "raw") }.xml();
        }
        let path = absolute(self.path);
        let source =
            if link.host.device { DiskSource::Device(path) } else { DiskSource::File(path) };
        let mut disk = LibvirtDisk::new(source, link.info.format);
        disk.cache = cache;
        disk.allocated = self.evidence.allocation == Allocation::Full;
        disk.encrypted = link.info.encryption.as_deref() == Some("luks");
        disk.map_cache_bytes = self.evidence.map_bytes.filter(|bytes| *bytes > QEMU_MAP_CACHE);
        // A list of backing images ends the chain. If it goes on out of reach, libvirt has to find the
        // images itself: the guest would read zeroes in place of the missing ones.
        if self.links.last().is_some_and(|last| last.info.backing().is_none()) {
            disk.backing = self.links.iter().skip(1).map(backing).collect();
        }
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
