//! The file system that the image's file is on.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::{IFlags, OFlags};

use super::{DoctorCode, Patient, command};

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

impl Patient<'_> {
    pub(super) fn look_at_host(&mut self) {
        if self.link().host.device {
            return;
        }
        let Ok(file) = File::open(self.path) else { return };
        let Ok(system) = rustix::fs::fstatfs(&file) else { return };
        // (The field's type differs between machines.)
        let kind = system.f_type as u64 & 0xffff_ffff;
        let free = system.f_bavail.saturating_mul(u64::try_from(system.f_bsize).unwrap_or(0));
        self.look_at_space(free);
        if let Some(name) = network(kind) {
            let message = format!("the file is on {name}");
            self.add(DoctorCode::Network, message, None);
        }
        if kind == magic::BTRFS && copies_on_write(&file) {
            let message = "the file is on btrfs without NOCOW: rewriting spreads it over the disk. \
                           With NOCOW btrfs keeps no checksums of it; only an empty file can get \
                           it, so make one, set it, and convert into it";
            self.add(DoctorCode::CopyOnWrite, message, command(&["chattr", "+C", "NEW"]));
        }
        let direct = OFlags::DIRECT.bits() as i32;
        let opened = File::options().read(true).custom_flags(direct).open(self.path);
        if opened.is_err_and(|error| error.kind() == std::io::ErrorKind::InvalidInput) {
            self.add(DoctorCode::NoDirect, "O_DIRECT is refused", None);
        }
    }

    /// What the image may still grow by, beside what is free.
    fn look_at_space(&mut self, free: u64) {
        let link = self.link();
        if !link.info.files.is_empty() {
            return;
        }
        let growth = link.info.virtual_size.saturating_sub(link.host.allocated_bytes);
        if free >= growth {
            return;
        }
        let message = format!(
            "the file may grow by {} MiB, its file system has {} MiB left; when it is full, 'vdkit \
             serve' makes the guest wait until there is space",
            growth >> 20,
            free >> 20
        );
        self.add(DoctorCode::LittleSpace, message, None);
    }
}

/// Whether btrfs writes changed blocks of this file to a new place.
fn copies_on_write(file: &File) -> bool {
    rustix::fs::ioctl_getflags(file.as_fd()).is_ok_and(|flags| !flags.contains(IFlags::NOCOW))
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
