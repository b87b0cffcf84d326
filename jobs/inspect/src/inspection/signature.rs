//! Signatures in the first and last bytes of a file.
//!
//! Sources: the formats' specifications, QEMU's probes and file(1).

use std::collections::BTreeSet;

/// Bytes of the first read: includes ISO 9660's first descriptors (at 32 KiB).
pub(super) const HEAD_BYTES: usize = 64 << 10;
/// Bytes of the last read: VHD's footer, VMDK's footer with its end marker, a zip's directory.
pub(super) const TAIL_BYTES: usize = 1536;

/// Category of a signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// A format of disk images.
    Disk,
    /// Start of a raw disk: a partition table, a file system.
    Contents,
    /// An archive, a compressed file, a program.
    Other,
}

/// A matching signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Signature {
    /// Name of the format.
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    /// Byte offset in the file.
    pub(super) offset: u64,
}

/// Disk image formats without a safe or maintained reader.
pub(super) const BANNED: &[&str] =
    &["qcow", "qed", "parallels", "bochs", "cloop", "dmg", "vmdk-cowd"];

/// Format names that users may require.
pub const FORMAT_NAMES: &[&str] =
    &["raw", "qcow2", "vmdk", "vdi", "vhd", "vhdx", "luks", "iso", "gpt", "mbr"];

const STARTS: &[(&str, Kind, &[u8])] = &[
    ("qed", Kind::Disk, b"QED\0"),
    ("vmdk", Kind::Disk, b"KDMV"),
    ("vmdk-cowd", Kind::Disk, b"COWD"),
    ("vhd", Kind::Disk, b"conectix"),
    ("vhdx", Kind::Disk, b"vhdxfile"),
    ("luks", Kind::Disk, b"LUKS\xba\xbe"),
    ("parallels", Kind::Disk, b"WithoutFreeSpace"),
    ("parallels", Kind::Disk, b"WithouFreSpacExt"),
    ("bochs", Kind::Disk, b"Bochs Virtual HD Image"),
    ("cloop", Kind::Disk, b"#!/bin/sh\n#V2.0 Format"),
    ("gzip", Kind::Other, b"\x1f\x8b\x08"),
    ("xz", Kind::Other, b"\xfd7zXZ\0"),
    ("bzip2", Kind::Other, b"BZh"),
    ("zstd", Kind::Other, b"\x28\xb5\x2f\xfd"),
    ("lz4", Kind::Other, b"\x04\x22\x4d\x18"),
    ("zip", Kind::Other, b"PK\x03\x04"),
    ("7z", Kind::Other, b"7z\xbc\xaf\x27\x1c"),
    ("rar", Kind::Other, b"Rar!\x1a\x07"),
    ("elf", Kind::Other, b"\x7fELF"),
    ("pdf", Kind::Other, b"%PDF-"),
];

/// VDI's magic number, little-endian, at byte 64.
const VDI_MAGIC: [u8; 4] = 0xbeda_107f_u32.to_le_bytes();
/// The first line of a VMDK descriptor.
const DESCRIPTOR: &[u8] = b"# Disk DescriptorFile";

fn at(bytes: &[u8], offset: usize, len: usize) -> &[u8] {
    bytes.get(offset..offset.saturating_add(len)).unwrap_or_default()
}

fn find(bytes: &[u8], needle: &[u8]) -> Option<usize> {
    bytes.windows(needle.len()).position(|window| window == needle)
}

/// All signatures of a file of `len` bytes. `head` are its first bytes, `tail` its last; they may
/// overlap.
pub(super) fn recognize(head: &[u8], tail: &[u8], len: u64) -> Vec<Signature> {
    let mut found = Vec::new();
    let mut add = |name, kind, offset: u64| found.push(Signature { name, kind, offset });
    if head.starts_with(b"QFI\xfb") {
        add(if at(head, 4, 4) == [0, 0, 0, 1] { "qcow" } else { "qcow2" }, Kind::Disk, 0);
    }
    for (name, kind, magic) in STARTS {
        if head.starts_with(magic) {
            add(name, *kind, 0);
        }
    }
    if at(head, 64, 4) == VDI_MAGIC {
        add("vdi", Kind::Disk, 64);
    }
    if let Some(offset) = vmdk_descriptor(head) {
        add("vmdk", Kind::Disk, offset);
    }
    if at(head, 257, 5) == b"ustar" {
        add("tar", Kind::Other, 257);
    }
    let tail_start = len - tail.len() as u64;
    let footer = tail.len().checked_sub(512);
    if let Some(footer) = footer {
        // Old versions of Virtual PC wrote a footer of 511 bytes.
        for start in [footer, footer + 1] {
            if at(tail, start, 8) == b"conectix" && tail_start + start as u64 != 0 {
                add("vhd", Kind::Disk, tail_start + start as u64);
            }
        }
        if at(tail, footer, 4) == b"koly" {
            add("dmg", Kind::Disk, tail_start + footer as u64);
        }
    }
    if let Some(offset) = zip_directory(tail) {
        add("zip", Kind::Other, tail_start + offset as u64);
    }
    contents(head, &mut add);
    found
}

/// A raw disk's partition table or optical file system.
fn contents(head: &[u8], add: &mut impl FnMut(&'static str, Kind, u64)) {
    if at(head, 510, 2) == [0x55, 0xaa] {
        add(if is_fat(head) { "fat" } else { "mbr" }, Kind::Contents, 510);
    }
    for sector in [512, 4096] {
        if at(head, sector, 8) == b"EFI PART" {
            add("gpt", Kind::Contents, sector as u64);
        }
    }
    // Volume descriptors are in consecutive sectors of 2 KiB, from 32 KiB on.
    for sector in 16..24usize {
        let offset = sector * 2048;
        if matches!(at(head, offset + 1, 5), b"CD001" | b"NSR02" | b"NSR03" | b"BEA01") {
            add("iso", Kind::Contents, offset as u64);
            break;
        }
    }
}

/// A FAT file system in the first sector: two FATs and a media descriptor of a disk.
fn is_fat(head: &[u8]) -> bool {
    matches!(at(head, 16, 1), [1 | 2]) && matches!(at(head, 21, 1), [0xf0 | 0xf8..=0xff])
}

/// Offset of a VMDK descriptor: at the start, after comments, as in QEMU; or its usual first line
/// anywhere in the head.
fn vmdk_descriptor(head: &[u8]) -> Option<u64> {
    if let Some(offset) = find(head, DESCRIPTOR) {
        return Some(offset as u64);
    }
    if head.first() != Some(&b'#') {
        return None;
    }
    let text = &head[..head.len().min(20 << 10)];
    for line in text.split(|&b| b == b'\n') {
        let line = line.trim_ascii();
        if line.is_empty() || line.starts_with(b"#") {
            continue;
        }
        let lower = line.to_ascii_lowercase();
        return lower.starts_with(b"version").then_some(0);
    }
    None
}

/// The end record of a zip's central directory, with a comment up to the end of the file.
fn zip_directory(tail: &[u8]) -> Option<usize> {
    (0..tail.len().saturating_sub(21)).rev().find(|&start| {
        at(tail, start, 4) == b"PK\x05\x06"
            && start + 22 + usize::from(u16::from_le_bytes([tail[start + 20], tail[start + 21]]))
                == tail.len()
    })
}

/// The distinct names of a category.
pub(super) fn names(found: &[Signature], kind: Kind) -> BTreeSet<&'static str> {
    found.iter().filter(|s| s.kind == kind).map(|s| s.name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(head: &[u8]) -> Vec<&'static str> {
        let tail = &head[head.len().saturating_sub(TAIL_BYTES)..];
        recognize(head, tail, head.len() as u64).iter().map(|s| s.name).collect()
    }

    fn with(offset: usize, bytes: &[u8], len: usize) -> Vec<u8> {
        let mut image = vec![0; len];
        image[offset..offset + bytes.len()].copy_from_slice(bytes);
        image
    }

    #[test]
    fn each_signature_is_seen_where_it_belongs_and_not_a_byte_beside() {
        for (name, _, magic) in STARTS {
            assert_eq!(of(&with(0, magic, 4096)), [*name]);
            assert!(of(&with(1, magic, 4096)).is_empty(), "{name}");
        }
        assert_eq!(of(&with(0, b"QFI\xfb\0\0\0\x01", 4096)), ["qcow"]);
        assert_eq!(of(&with(0, b"QFI\xfb\0\0\0\x03", 4096)), ["qcow2"]);
        assert_eq!(of(&with(64, &VDI_MAGIC, 4096)), ["vdi"]);
        assert_eq!(of(&with(257, b"ustar", 4096)), ["tar"]);
        assert_eq!(of(&with(4096 - 512, b"conectix", 4096)), ["vhd"]);
        assert_eq!(of(&with(4096 - 511, b"conectix", 4096)), ["vhd"]);
        assert!(of(&with(4096 - 513, b"conectix", 4096)).is_empty());
        assert_eq!(of(&with(4096 - 512, b"koly", 4096)), ["dmg"]);
        assert_eq!(of(&with(4096 - 22, b"PK\x05\x06", 4096)), ["zip"]);
        assert!(of(&with(4096 - 23, b"PK\x05\x06", 4096)).is_empty());
        assert_eq!(of(&with(510, b"\x55\xaa", 4096)), ["mbr"]);
        assert_eq!(of(&with(512, b"EFI PART", 4096)), ["gpt"]);
        assert_eq!(of(&with(4096, b"EFI PART", 8192)), ["gpt"]);
        for name in [b"CD001", b"NSR02", b"NSR03"] {
            assert_eq!(of(&with(32769, name, 40000)), ["iso"]);
        }
    }

    #[test]
    fn a_fat_boot_sector_is_no_partition_table() {
        let mut fat = with(510, b"\x55\xaa", 4096);
        (fat[16], fat[21]) = (2, 0xf8);
        assert_eq!(of(&fat), ["fat"]);
    }

    #[test]
    fn descriptors_are_found_as_qemu_finds_them_and_hidden_ones_too() {
        assert_eq!(of(b"# a comment\n\n# more\nversion=1\n"), ["vmdk"]);
        assert_eq!(of(b"# a comment\nVersion=3\n"), ["vmdk"]);
        assert!(of(b"# a comment\nother=1\n").is_empty());
        assert_eq!(of(&with(1000, DESCRIPTOR, 4096)), ["vmdk"]);
    }

    #[test]
    fn short_files_are_looked_at_without_a_slip() {
        for len in 0..600 {
            of(&vec![b'#'; len]);
            of(&vec![0x55; len]);
        }
    }
}
