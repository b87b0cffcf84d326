//! VDI, VHD and VHDX: checks of sizes, tables and parents by the headers alone.
//!
//! Sources: VirtualBox's VDI header as QEMU reads it; Microsoft, "Virtual Hard Disk Image Format
//! Specification"; Microsoft, [MS-VHDX].

use vdkit_block::Result;

use super::code::{Code, InspectFinding};
use super::{Depth, Inspection};
use vdkit_block::bytes::{be32, be64, le16, le32, le64};

/// Maximum accepted size of a block map.
const TABLE_BYTES_MAX: u64 = 1 << 30;

mod vhd_type {
    pub(super) const FIXED: u32 = 2;
    pub(super) const DYNAMIC: u32 = 3;
    pub(super) const DIFFERENCING: u32 = 4;
}

/// Fields of a VHD footer that determine the disk: offset of the dynamic header, size, type.
const VHD_DECISIVE: [std::ops::Range<usize>; 3] = [16..24, 48..56, 60..64];

/// The checksum at offset 64 of a VHD footer: the complement of the sum of all other bytes.
fn vhd_checksum(footer: &[u8]) -> u32 {
    let others = footer.iter().enumerate().filter(|(at, _)| !(64..68).contains(at));
    !others.fold(0u32, |sum, (_, byte)| sum.wrapping_add((*byte).into()))
}

/// VHDX: GUIDs of the metadata region and of two items in it, in file byte order.
const METADATA_REGION: [u8; 16] = [
    0x06, 0xa2, 0x7c, 0x8b, 0x90, 0x47, 0x9a, 0x4b, 0xb8, 0xfe, 0x57, 0x5f, 0x05, 0x0f, 0x88, 0x6e,
];
const FILE_PARAMETERS: [u8; 16] = [
    0x37, 0x67, 0xa1, 0xca, 0x36, 0xfa, 0x43, 0x4d, 0xb3, 0xb6, 0x33, 0xf0, 0xaa, 0x44, 0xe7, 0x6b,
];
const VIRTUAL_DISK_SIZE: [u8; 16] = [
    0x24, 0x42, 0xa5, 0x2f, 0x1b, 0xcd, 0x76, 0x48, 0xb2, 0x11, 0x5d, 0xbe, 0xd8, 0x3b, 0xf4, 0xb8,
];
const REGION_TABLE: u64 = 192 << 10;
const REGION_BYTES: usize = 64 << 10;
/// Maximum entries of a region or metadata table.
const VHDX_ENTRIES_MAX: usize = 2047;

impl Inspection<'_> {
    pub(super) fn vdi(&mut self, head: &[u8]) -> Result<()> {
        self.depth = Depth::Header;
        if head.len() < 512 {
            self.header_truncated(head.len() as u64, 512);
            return Ok(());
        }
        let version = le32(head, 0x44);
        if version != 0x0001_0001 {
            InspectFinding::new(Code::UnknownVersion)
                .at(0x44)
                .found(format!("{}.{}", version >> 16, version & 0xffff))
                .expected("1.1")
                .mend("have it converted by VirtualBox")
                .add_to(&mut self.findings);
        }
        self.judge_size(le64(head, 0x170), 0x170);
        let kind = le32(head, 0x4c);
        if !matches!(kind, 1 | 2) {
            self.parent_image(0x4c, format!("image type {kind}, neither dynamic nor static"));
        } else if head[0x1a8..0x1b8].iter().any(|&b| b != 0) {
            self.parent_image(0x1a8, "a link to a parent");
        }
        let (blocks, map) = (le32(head, 0x180), le32(head, 0x154));
        let bytes = u64::from(blocks) * 4;
        self.judge_table("block map", 0x154, map.into(), bytes, TABLE_BYTES_MAX);
        self.contents_not_checked("vdi");
        Ok(())
    }

    pub(super) fn vhd(&mut self, head: &[u8], tail: &[u8]) -> Result<()> {
        self.depth = Depth::Header;
        let trailing = tail.windows(8).rposition(|part| part == b"conectix").unwrap_or(0);
        let trailing = &tail[trailing..];
        let copy_first = head.starts_with(b"conectix");
        let (footer, base) =
            if copy_first { (head, 0) } else { (trailing, self.len - trailing.len() as u64) };
        if footer.len() < 85 {
            self.header_truncated(footer.len() as u64, 512);
            return Ok(());
        }
        if !trailing.starts_with(b"conectix") {
            self.header_truncated(self.len, self.len + 512);
        } else if self.len > 512 {
            self.vhd_footer_copy(head, trailing);
        }
        self.judge_size(be64(footer, 48), base + 48);
        match be32(footer, 60) {
            vhd_type::FIXED => {}
            vhd_type::DYNAMIC => self.vhd_dynamic(footer, base)?,
            vhd_type::DIFFERENCING => {
                self.parent_image(base + 60, "a differencing disk");
                self.vhd_dynamic(footer, base)?;
            }
            other => self.header_invalid(
                base + 60,
                format!("disk type {other}"),
                "2 (fixed) or 3 (dynamic)",
            ),
        }
        self.contents_not_checked("vhd");
        Ok(())
    }

    /// A dynamic image begins with a copy of its footer, by which many programs recognize it; a
    /// fixed one begins with the guest's disk.
    fn vhd_footer_copy(&mut self, head: &[u8], footer: &[u8]) {
        let copy = head.get(..512).unwrap_or(head);
        let is_footer = copy.starts_with(b"conectix");
        let (found, expected) = if be32(footer, 60) == vhd_type::FIXED {
            if !is_footer {
                return;
            }
            ("a footer", "the disk of a fixed image")
        } else if !is_footer {
            ("other bytes", "a copy of the footer")
        } else if be32(copy, 64) != vhd_checksum(copy) {
            ("a footer whose checksum is wrong", "a copy of the footer")
        } else if VHD_DECISIVE
            .iter()
            .any(|field| copy.get(field.clone()) != footer.get(field.clone()))
        {
            (
                "a footer with another type, size or dynamic header",
                "a copy of the footer at the end",
            )
        } else {
            return;
        };
        self.find(Code::VhdFooterCopy, 0, found, expected);
    }

    fn vhd_dynamic(&mut self, footer: &[u8], base: u64) -> Result<()> {
        let at = be64(footer, 16);
        if at.checked_add(1024).is_none_or(|end| end > self.len) {
            self.judge_table("dynamic header", base + 16, at, 1024, 1024);
            return Ok(());
        }
        let header = self.read(at, 1024)?;
        if !header.starts_with(b"cxsparse") {
            self.header_invalid(at, "another signature", "cxsparse");
            return Ok(());
        }
        let bytes = u64::from(be32(&header, 28)) * 4;
        self.judge_table(
            "block allocation table",
            at + 16,
            be64(&header, 16),
            bytes,
            TABLE_BYTES_MAX,
        );
        Ok(())
    }

    pub(super) fn vhdx(&mut self) -> Result<()> {
        self.depth = Depth::Header;
        let regions = self.read(REGION_TABLE, REGION_BYTES)?;
        if regions.len() < REGION_BYTES {
            self.header_truncated(self.len, REGION_TABLE + REGION_BYTES as u64);
            return Ok(());
        }
        let count = le32(&regions, 8) as usize;
        if !regions.starts_with(b"regi") || count > VHDX_ENTRIES_MAX {
            let found = format!("another signature, or {count} entries");
            self.header_invalid(REGION_TABLE, found, "a region table");
            return Ok(());
        }
        let entries = regions[16..].chunks_exact(32).take(count);
        let Some(region) = entries.clone().find(|entry| entry[..16] == METADATA_REGION) else {
            self.header_invalid(REGION_TABLE, "no metadata region", "one");
            return Ok(());
        };
        for (index, entry) in entries.enumerate() {
            let at = REGION_TABLE + 16 + 32 * index as u64;
            let (start, bytes) = (le64(entry, 16), u64::from(le32(entry, 24)));
            self.judge_table("region", at, start, bytes, TABLE_BYTES_MAX);
        }
        let start = le64(region, 16);
        if !self.findings.refused() {
            self.vhdx_metadata(start)?;
        }
        self.contents_not_checked("vhdx");
        Ok(())
    }

    fn vhdx_metadata(&mut self, start: u64) -> Result<()> {
        let table = self.read(start, REGION_BYTES)?;
        let count = usize::from(le16(&table, 10));
        if !table.starts_with(b"metadata") || count > VHDX_ENTRIES_MAX || table.len() < 32 {
            self.header_invalid(start, "another signature, or too many entries", "metadata");
            return Ok(());
        }
        let mut sized = false;
        for entry in table[32..].chunks_exact(32).take(count) {
            let Some(at) = start.checked_add(le32(entry, 16).into()) else { continue };
            if entry[..16] == VIRTUAL_DISK_SIZE {
                sized = true;
                let size = self.read(at, 8)?;
                self.judge_size(le64(&size, 0), at);
            } else if entry[..16] == FILE_PARAMETERS {
                let parameters = self.read(at, 8)?;
                if le32(&parameters, 4) & 2 != 0 {
                    self.parent_image(at + 4, "the flag HasParent");
                }
            }
        }
        if !sized {
            self.header_invalid(start, "no virtual disk size", "one");
        }
        Ok(())
    }
}
