//! Findings on the image's file system.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{IFlags, OFlags};
use vdkit_libvirt::{CachePlace, cache_for};
use vdkit_storage::Placement;
use vdkit_storage::mounts::{self, Mount};

use crate::evidence::{Allocation, allocation, growth, scattered};
use crate::unflushed::unflushed;
use crate::{DoctorCode, Examination, command};

/// Maximum extents examined.
const EXTENTS_MAX: u64 = 200_000;

/// `f_type` of file systems. Source: statfs(2).
mod magic {
    pub(super) const BTRFS: u64 = 0x9123_683e;
    pub(super) const NFS: u64 = 0x6969;
    pub(super) const SMB: u64 = 0x517b;
    pub(super) const CIFS: u64 = 0xff53_4d42;
    pub(super) const SMB2: u64 = 0xfe53_4d42;
    pub(super) const CEPH: u64 = 0x00c3_6400;
    pub(super) const NINE_P: u64 = 0x0102_1997;
}

/// The name of a network file system.
fn network(kind: u64) -> Option<&'static str> {
    match kind {
        magic::NFS => Some("NFS"),
        magic::SMB | magic::CIFS | magic::SMB2 => Some("SMB"),
        magic::CEPH => Some("CephFS"),
        magic::NINE_P => Some("9p"),
        _ => None,
    }
}

impl Examination<'_> {
    pub(super) fn examine_host(&mut self) {
        self.note_sizes();
        if self.in_use {
            self.examine_flushes();
        }
        if self.link().host.device {
            self.evidence.block_bytes = device_block(self.path);
            self.examine_blocks();
            return self.suggest(CachePlace::Device);
        }
        let Ok(file) = File::open(self.path) else { return };
        let Ok(system) = rustix::fs::fstatfs(&file) else { return };
        // (The field's type differs between machines.)
        let kind = system.f_type as u64 & 0xffff_ffff;
        let free = system.f_bavail.saturating_mul(u64::try_from(system.f_bsize).unwrap_or(0));
        let all = mounts::all();
        let path = self.path.canonicalize().ok();
        let mounted = path.and_then(|path| mounts::of(&all, &path));
        self.evidence.free_bytes = Some(free);
        self.evidence.file_system = mounted.map(|mounted| mounted.kind.clone());
        if let Ok(found) = file.metadata() {
            self.evidence.space = Some(found.dev());
            // (On a network file system this is a transfer size, not a block size.)
            self.evidence.block_bytes = network(kind).is_none().then_some(found.blksize());
        }
        self.examine_space(free);
        self.examine_blocks();
        if let Some(name) = network(kind) {
            let message = format!("the file is on {name}");
            self.add(DoctorCode::Network, message, None);
        }
        let cow = kind == magic::BTRFS && copies_on_write(&file);
        if cow {
            let message = "the file is on btrfs without NOCOW: rewriting spreads it over the disk. \
                           With NOCOW btrfs keeps no checksums of it; only an empty file can get \
                           it, so make one, set it, and convert into it";
            self.add(DoctorCode::CopyOnWrite, message, command(&["chattr", "+C", "NEW"]));
        }
        let direct = OFlags::DIRECT.bits() as i32;
        let opened = File::options().read(true).custom_flags(direct).open(self.path);
        let refused = opened.is_err_and(|error| error.kind() == std::io::ErrorKind::InvalidInput);
        if refused {
            self.add(DoctorCode::NoDirect, "O_DIRECT is refused", None);
        }
        if let Some(mounted) = mounted {
            self.examine_mount(mounted);
        }
        self.examine_placement(&file, mounted);
        match (refused, cow, mounted.is_some_and(volatile)) {
            (_, _, true) => self.suggest(CachePlace::Memory),
            (true, ..) => self.suggest(CachePlace::Buffered),
            (_, true, _) => self.suggest(CachePlace::Checksums),
            _ => self.suggest(CachePlace::Direct),
        }
    }

    fn suggest(&mut self, place: CachePlace) {
        (self.evidence.cache, self.evidence.cache_reason) = cache_for(place);
    }

    /// Records the sizes in the header.
    fn note_sizes(&mut self) {
        let link = self.link().clone();
        let evidence = &mut self.evidence;
        evidence.cluster_bytes = link.info.cluster_size.filter(|bytes| *bytes > 0);
        evidence.allocated_bytes = link.host.allocated_bytes;
        evidence.snapshots = link.info.snapshots.len() as u64;
        evidence.growth_bytes = if link.host.device || !link.info.files.is_empty() {
            0
        } else {
            let map = evidence.map_bytes.unwrap_or(0);
            let (size, allocated) = (link.info.virtual_size, link.host.allocated_bytes);
            growth(size, map, allocated, evidence.snapshots)
        };
        evidence.allocation = if link.host.device {
            Allocation::Full
        } else {
            allocation(link.info.virtual_size, link.host.allocated_bytes, false)
        };
        evidence.chain_images = self.links.len() as u64;
    }

    /// Compares the possible growth with the free space.
    fn examine_space(&mut self, free: u64) {
        let growth = self.evidence.growth_bytes;
        if free >= growth {
            return;
        }
        let message = format!(
            "the file may grow by {} MiB, its file system has {} MiB left; when it is full, 'vdkit \
             serve' makes the guest wait until there is space",
            growth >> 20,
            free >> 20
        );
        // No header tells that a disk is raw, and only a named format is written to.
        let raw = self.link().info.format == "raw";
        let named = if raw { &["-f", "raw"][..] } else { &[] };
        let options = [named, &["--nbd", "unix:SOCKET", "--on-nospace", "pause"]].concat();
        let mend = self.vdkit(&["serve"], &options);
        self.add(DoctorCode::LittleSpace, message, mend);
    }

    /// Reports clusters smaller than a file system block: writing one first reads the rest of the
    /// block.
    fn examine_blocks(&mut self) {
        let (Some(cluster), Some(block)) = (self.evidence.cluster_bytes, self.evidence.block_bytes)
        else {
            return;
        };
        if cluster >= block || self.link().info.format != "qcow2" {
            return;
        }
        let where_it_is = self.evidence.file_system.as_deref().unwrap_or("the device");
        let message = format!(
            "clusters of {cluster} bytes, where {where_it_is} writes blocks of {block}: a new cluster \
             changes a part of a block, which has to be read first"
        );
        let option = format!("cluster_size={}", block.clamp(64 << 10, 2 << 20));
        let mend = self.vdkit(&["convert", "-O", "qcow2", "-o", &option], &["NEW"]);
        self.add(DoctorCode::ClusterBelowBlock, message, mend);
    }

    fn examine_mount(&mut self, mounted: &Mount) {
        let point = mounted.point.display().to_string();
        if volatile(mounted) {
            let message =
                format!("'{point}' is {}: the image is gone with the power", mounted.kind);
            let mend = self.vdkit(&["convert", "-O", self.link().info.format], &["NEW"]);
            self.add(DoctorCode::InMemory, message, mend);
        }
        if let Some(option) = without_flushes(mounted) {
            let message = format!(
                "'{point}' ({}) is mounted with {option}: no cache mode makes a guest's flush safe \
                 here",
                mounted.kind
            );
            let mend = command(&["mount", "-o", "remount,barrier", &point]);
            self.add(DoctorCode::NoBarriers, message, mend);
        }
    }

    /// Examines the file's placement on its device.
    fn examine_placement(&mut self, file: &File, mounted: Option<&Mount>) {
        let Ok(Some(placement)) = Placement::of(file, EXTENTS_MAX) else { return };
        self.evidence.extents = Some(placement.extents);
        self.evidence.jumps = Some(placement.jumps);
        if !scattered(&placement) {
            return;
        }
        let more = if placement.partial { " or more" } else { "" };
        let message = format!(
            "reading the file in order jumps {}{more} times on the device, every {} KiB on average",
            placement.jumps,
            (placement.bytes / placement.jumps) >> 10
        );
        let kind = mounted.map_or("", |mounted| mounted.kind.as_str());
        let format = self.link().info.format;
        // (btrfs's own tool would unshare snapshots.)
        let mend = match kind {
            "ext4" => command(&["e4defrag", &self.word]),
            "xfs" => command(&["xfs_fsr", &self.word]),
            _ => self.vdkit(&["convert", "-f", format, "-O", format], &["NEW"]),
        };
        self.add(DoctorCode::FragmentedFile, message, mend);
    }

    fn examine_flushes(&mut self) {
        let Some(found) = unflushed(self.path) else { return };
        let message = format!(
            "process {} ({}) has it open with '{}': a power cut may leave the guest's file system \
             damaged; none and writeback are as fast between flushes, and safe",
            found.pid, found.program, found.word
        );
        self.add(DoctorCode::Unflushed, message, None);
    }
}

/// A mount option that disables flushes to the device.
///
/// Sources: ext4(5) `barrier`, `nobarrier`; xfs(5) `nobarrier` (until Linux 4.18); btrfs(5)
/// `nobarrier`.
fn without_flushes(mount: &Mount) -> Option<&str> {
    let known = ["nobarrier", "barrier=0", "barrier=none"];
    mount.options.iter().map(String::as_str).find(|option| known.contains(option))
}

/// Whether its content is lost on power loss.
fn volatile(mount: &Mount) -> bool {
    ["tmpfs", "ramfs"].contains(&mount.kind.as_str())
}

/// Whether btrfs writes changed blocks of this file to new locations.
fn copies_on_write(file: &File) -> bool {
    rustix::fs::ioctl_getflags(file.as_fd()).is_ok_and(|flags| !flags.contains(IFlags::NOCOW))
}

/// The physical block size of a device, or of its partition's disk. Source: the kernel's
/// Documentation/ABI, `/sys/block/<disk>/queue/physical_block_size`.
fn device_block(path: &Path) -> Option<u64> {
    let number = std::fs::metadata(path).ok()?.rdev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let folder = Path::new("/sys/dev/block").join(format!("{major}:{minor}"));
    ["queue", "../queue"].iter().find_map(|queue| {
        let text = std::fs::read_to_string(folder.join(queue).join("physical_block_size")).ok()?;
        text.trim().parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_file_systems_are_told_from_local_ones() {
        assert_eq!(network(magic::NFS), Some("NFS"));
        assert_eq!(network(magic::SMB2), Some("SMB"));
        for local in [magic::BTRFS, 0xef53, 0x0102_1994, 0x5846_5342] {
            assert_eq!(network(local), None);
        }
    }
}
