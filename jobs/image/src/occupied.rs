//! Detects existing content of a block device: file systems, partition tables, volumes.
//!
//! Sources: util-linux' libblkid and file(1), for the signatures; the on-disk formats of Linux'
//! file systems, md(4) and LVM.

use std::fmt;
use std::path::Path;

use vdkit_block::{HostOffset, Result, Storage};
use vdkit_chain::Registry;
use vdkit_storage::{FileOptions, FileStorage, LockMode};

/// Bytes at the start with signatures; ZFS's are the last ones.
const HEAD_BYTES: usize = 256 << 10;
/// Bytes at the end: md's oldest superblock begins up to 128 KiB before it.
const TAIL_BYTES: usize = 128 << 10;

/// Signatures: bytes at an offset from the start.
const SIGNATURES: &[(&str, usize, &[u8])] = &[
    ("an encrypted volume (LUKS)", 0, b"LUKS\xba\xbe"),
    ("an encrypted volume (BitLocker)", 3, b"-FVE-FS-"),
    ("an XFS file system", 0, b"XFSB"),
    ("a squashfs file system", 0, b"hsqs"),
    ("a Ceph OSD (BlueStore)", 0, b"bluestore block device"),
    ("an NTFS file system", 3, b"NTFS    "),
    ("an exFAT file system", 3, b"EXFAT   "),
    ("a GUID partition table (GPT)", 512, b"EFI PART"),
    ("a GUID partition table (GPT)", 4096, b"EFI PART"),
    ("an f2fs file system", 0x400, b"\x10\x20\xf5\xf2"),
    ("an EROFS file system", 0x400, b"\xe2\xe1\xf5\xe0"),
    ("an HFS+ file system", 0x400, b"H+\0\x04"),
    ("an HFS+ file system", 0x400, b"HX\0\x05"),
    ("an APFS container", 32, b"NXSB"),
    ("an ext2, ext3 or ext4 file system", 0x438, b"\x53\xef"),
    ("swap space", 4096 - 10, b"SWAPSPACE2"),
    ("swap space", 65536 - 10, b"SWAPSPACE2"),
    ("a part of an md array (RAID)", 0, b"\xfc\x4e\x2b\xa9"),
    ("a part of an md array (RAID)", 4096, b"\xfc\x4e\x2b\xa9"),
    (
        "a bcache device",
        4096 + 24,
        b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81",
    ),
    (
        "a bcachefs file system",
        4096 + 24,
        b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef",
    ),
    ("a JFS file system", 0x8000, b"JFS1"),
    ("an ISO 9660 file system", 0x8001, b"CD001"),
    ("a UDF file system", 0x8001, b"BEA01"),
    ("a GFS2 file system", 0x10000, b"\x01\x16\x19\x70"),
    ("a ReiserFS file system", 0x10034, b"ReIsEr"),
    ("a btrfs file system", 0x10040, b"_BHRfS_M"),
];

/// LVM's label is in one of the first four sectors.
const LVM_LABEL: &[u8] = b"LABELONE";
/// The magic number of ZFS uberblocks, from 128 KiB on, one per KiB or more.
const UBERBLOCK: u64 = 0x00ba_b10c;

fn at(bytes: &[u8], offset: usize, len: usize) -> &[u8] {
    bytes.get(offset..offset.saturating_add(len)).unwrap_or_default()
}

/// The content of a device of `len` bytes.
fn recognize(head: &[u8], tail: &[u8], len: u64) -> Option<&'static str> {
    let known =
        SIGNATURES.iter().find(|(_, offset, magic)| at(head, *offset, magic.len()) == *magic);
    if let Some((what, ..)) = known {
        return Some(what);
    }
    if (0..4).any(|sector| at(head, sector * 512, LVM_LABEL.len()) == LVM_LABEL) {
        return Some("a physical volume of LVM");
    }
    let slots = (128 << 10..HEAD_BYTES).step_by(1 << 10);
    if slots.clone().any(|slot| {
        let word = at(head, slot, 8);
        word == UBERBLOCK.to_le_bytes() || word == UBERBLOCK.to_be_bytes()
    }) {
        return Some("a part of a ZFS pool");
    }
    at_the_end(tail, len).or_else(|| boot_sector(head))
}

/// Content with a signature at the end.
fn at_the_end(tail: &[u8], len: u64) -> Option<&'static str> {
    let start = len - tail.len() as u64;
    let read = |offset: u64, len| {
        let within = offset.checked_sub(start).and_then(|offset| usize::try_from(offset).ok());
        within.map(|offset| at(tail, offset, len)).unwrap_or_default()
    };
    const MD: &[u8] = b"\xfc\x4e\x2b\xa9";
    const MD_SWAPPED: &[u8] = b"\xa9\x2b\x4e\xfc";
    // Version 1.0: 8 KiB before the end, aligned to 4 KiB. Version 0.90: the last but one whole 64
    // KiB.
    let newer = (len / 512).checked_sub(16).map(|sector| (sector & !7) * 512);
    let older = (len & !0xffff).checked_sub(0x1_0000);
    let md = newer.is_some_and(|offset| read(offset, 4) == MD)
        || older.is_some_and(|offset| matches!(read(offset, 4), MD | MD_SWAPPED));
    if md {
        return Some("a part of an md array (RAID)");
    }
    let sector = |before: u64, len_of: usize| len.checked_sub(before).map(|o| read(o, len_of));
    if sector(1024, 24).is_some_and(|bytes| bytes.starts_with(b"Intel Raid ISM Cfg Sig.")) {
        return Some("a part of a RAID array (Intel)");
    }
    if sector(512, 4)
        .is_some_and(|bytes| matches!(bytes, b"\xde\x11\xde\x11" | b"\x11\xde\x11\xde"))
    {
        return Some("a part of a RAID array (DDF)");
    }
    if [512, 4096].iter().any(|block| sector(*block, 8).is_some_and(|bytes| bytes == b"EFI PART")) {
        return Some("the second copy of a GUID partition table (GPT)");
    }
    None
}

/// A FAT file system, or an MBR with a partition.
fn boot_sector(head: &[u8]) -> Option<&'static str> {
    if at(head, 510, 2) != [0x55, 0xaa] {
        return None;
    }
    let fat = matches!(at(head, 16, 1), [1 | 2]) && matches!(at(head, 21, 1), [0xf0 | 0xf8..=0xff]);
    let mut entries = (0..4).map(|index| at(head, 446 + index * 16, 16));
    let partition = |entry: &[u8]| matches!(entry, [0 | 0x80, _, _, _, kind, ..] if *kind != 0);
    match (fat, entries.any(partition)) {
        (true, _) => Some("a FAT file system"),
        (false, true) => Some("a partition table (MBR)"),
        (false, false) => Some("a boot sector"),
    }
}

/// Content of a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occupied {
    /// A disk image of this format.
    Image(&'static str),
    /// Other content, described as in "a btrfs file system".
    Other(&'static str),
}

impl fmt::Display for Occupied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Image("luks") => f.write_str("an encrypted volume (LUKS)"),
            Self::Image(format) => write!(f, "a {format} image"),
            Self::Other(what) => f.write_str(what),
        }
    }
}

/// The content of a block device; `None` if it is blank. Reads a few hundred KiB.
///
/// # Errors
/// Errors of opening and reading it.
pub fn occupied(registry: &Registry, device: &Path) -> Result<Option<Occupied>> {
    let options = FileOptions::read_only().lock(LockMode::Off);
    let storage = FileStorage::open(device, &options)?;
    let image = registry.probe_content(&storage)?.driver.name();
    if image != "raw" {
        return Ok(Some(Occupied::Image(image)));
    }
    let len = storage.len()?;
    let read = |offset: u64, len: usize| {
        let mut bytes = vec![0; len];
        let got = storage.read_up_to(&mut bytes, HostOffset(offset))?;
        bytes.truncate(got);
        Ok::<_, vdkit_block::Error>(bytes)
    };
    let head = read(0, HEAD_BYTES)?;
    let tail_bytes = len.min(TAIL_BYTES as u64);
    let tail = read(len - tail_bytes, tail_bytes as usize)?;
    Ok(recognize(&head, &tail, len).map(Occupied::Other))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(len: usize, offset: usize, magic: &[u8]) -> Option<&'static str> {
        let mut bytes = vec![0; len];
        bytes[offset..offset + magic.len()].copy_from_slice(magic);
        let head = &bytes[..len.min(HEAD_BYTES)];
        recognize(head, &bytes[len.saturating_sub(TAIL_BYTES)..], len as u64)
    }

    #[test]
    fn each_signature_is_known_where_it_belongs() {
        const LEN: usize = 1 << 20;
        for (what, offset, magic) in SIGNATURES {
            assert_eq!(of(LEN, *offset, magic), Some(*what));
            assert_eq!(of(LEN, offset + 1, magic), None, "{what}");
        }
        assert_eq!(of(LEN, 512, LVM_LABEL), Some("a physical volume of LVM"));
        assert_eq!(of(LEN, 129 << 10, &UBERBLOCK.to_be_bytes()), Some("a part of a ZFS pool"));
        let md = b"\xfc\x4e\x2b\xa9";
        for offset in [LEN - 8192, LEN - (64 << 10)] {
            assert_eq!(of(LEN, offset, md), Some("a part of an md array (RAID)"));
        }
        assert_eq!(of(LEN, LEN - 512, b"EFI PART").map(|what| what.contains("GPT")), Some(true));
        assert_eq!(of(LEN, 510, b"\x55\xaa"), Some("a boot sector"));
    }

    #[test]
    fn blank_and_short_devices_have_nothing() {
        for len in [0, 1, 511, 512, 4096, 65536, 1 << 20] {
            let bytes = vec![0; len];
            assert_eq!(
                recognize(
                    &bytes[..len.min(HEAD_BYTES)],
                    &bytes[len.saturating_sub(TAIL_BYTES)..],
                    len as u64
                ),
                None
            );
        }
    }
}
