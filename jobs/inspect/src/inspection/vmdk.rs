//! VMDK: checks of the header, and of every line of the descriptor.
//!
//! Source: VMware, "Virtual Disk Format 1.1"; QEMU's driver for the use of each field.

use vdkit_block::Result;

use super::code::{Code, InspectFinding, clip};
use super::{Depth, Inspection, reference};
use vdkit_block::bytes::{le32, le64};

const SECTOR: u64 = 512;
/// Maximum descriptor examined; QEMU's limit is 1 MiB.
const DESCRIPTOR_BYTES_MAX: u64 = 64 << 10;
/// Create types with all data in one file.
const CREATE_TYPES: [&str; 2] = ["monolithicsparse", "streamoptimized"];
/// The grain directory is at the end; the footer holds its offset.
const AT_END: u64 = u64::MAX;
/// The content id of a disk without a parent.
const NO_PARENT: &str = "ffffffff";

impl Inspection<'_> {
    pub(super) fn vmdk(&mut self, head: &[u8], tail: &[u8]) -> Result<()> {
        self.depth = Depth::Header;
        if !head.starts_with(b"KDMV") {
            // A text descriptor: all data is in other files.
            let text = &head[..head.len().min(DESCRIPTOR_BYTES_MAX as usize)];
            self.descriptor(text, 0);
            if !self.findings.list.iter().any(|f| f.code == Code::VmdkCreateType) {
                self.vmdk_create_type("a descriptor without data", 0);
            }
            return Ok(());
        }
        if (self.len as usize) < 512 {
            self.header_truncated(self.len, 512);
            return Ok(());
        }
        let version = le32(head, 4);
        if !(1..=3).contains(&version) {
            InspectFinding::new(Code::UnknownVersion)
                .at(4)
                .found(version.to_string())
                .expected("1 to 3")
                .mend("ask for a monolithicSparse or streamOptimized image")
                .add_to(&mut self.findings);
        }
        let capacity = le64(head, 12);
        self.judge_size(capacity.saturating_mul(SECTOR), 12);
        if capacity == 0 {
            // Readers then use the descriptor's extents.
            self.vmdk_descriptor(12, "a capacity of 0", "the disk's sectors");
        }
        if le64(head, 56) == AT_END {
            self.vmdk_footer(head, tail);
        }
        let (start, sectors) = (le64(head, 28), le64(head, 36));
        if start != 1 || sectors == 0 {
            self.vmdk_descriptor(28, &format!("{sectors} sectors at {start}"), "some at sector 1");
            return Ok(());
        }
        let bytes = sectors.saturating_mul(SECTOR);
        self.judge_table("descriptor", 28, SECTOR, bytes, DESCRIPTOR_BYTES_MAX);
        let bytes = bytes.min(DESCRIPTOR_BYTES_MAX) as usize;
        let text = self.read(SECTOR, bytes)?;
        self.descriptor(&text, SECTOR);
        self.contents_not_checked("vmdk");
        Ok(())
    }

    /// The effective header of a stream is at its end, before an end marker; it must match the
    /// first header.
    fn vmdk_footer(&mut self, head: &[u8], tail: &[u8]) {
        let footer = tail.len().checked_sub(1024).and_then(|at| tail.get(at..at + 512));
        // Magic, version, flags, capacity, grain, descriptor: bytes 0 to 44.
        let same = footer.is_some_and(|footer| footer[..44] == head[..44]);
        let placed = footer.is_some_and(|footer| le64(footer, 56) != AT_END);
        if !same || !placed {
            self.find(
                Code::VmdkFooter,
                self.len.saturating_sub(1024),
                if footer.is_none() { "no footer" } else { "another header" },
                "the header once more, with the grain directory's place",
            );
        }
    }

    fn vmdk_descriptor(&mut self, at: u64, found: &str, expected: &str) {
        self.find(Code::VmdkDescriptor, at, found, expected);
    }

    fn vmdk_create_type(&mut self, found: &str, at: u64) {
        self.find(Code::VmdkCreateType, at, found, "monolithicSparse or streamOptimized");
    }

    /// Every line must be known.
    fn descriptor(&mut self, text: &[u8], base: u64) {
        let end = text.iter().position(|&b| b == 0).unwrap_or(text.len());
        if let Some(hidden) = text[end..].iter().position(|&b| b != 0) {
            let at = base + (end + hidden) as u64;
            self.vmdk_descriptor(at, "bytes behind the text's end", "zeroes");
        }
        let Some(text) = std::str::from_utf8(&text[..end]).ok().filter(|text| text.is_ascii())
        else {
            return self.vmdk_descriptor(base, "bytes that are not ASCII", "text");
        };
        let (mut kinds, mut extents) = (Vec::new(), Vec::new());
        for line in text.split('\n') {
            let at = base + (line.as_ptr() as usize - text.as_ptr() as usize) as u64;
            let line = line.trim();
            let lower = line.to_ascii_lowercase();
            let word = lower.split_ascii_whitespace().next().unwrap_or_default();
            if line.is_empty() || line.starts_with('#') || lower.starts_with("ddb.") {
                continue;
            }
            if ["rw", "rdonly", "noaccess"].contains(&word) {
                extents.push((line, at));
                continue;
            }
            match lower.split_once('=') {
                Some((key, value)) if !key.contains(' ') => {
                    self.descriptor_field(key.trim(), value, line, at, &mut kinds);
                }
                _ => self.vmdk_descriptor(at, &clip(line), "a comment, a field or an extent"),
            }
        }
        match kinds.as_slice() {
            [(kind, at)] if !CREATE_TYPES.contains(&kind.as_str()) => {
                self.vmdk_create_type(kind, *at);
            }
            [_] => {}
            [] => self.vmdk_create_type("none", base),
            [_, (second, at), ..] => {
                self.vmdk_create_type(&format!("a second createType '{second}'"), *at);
            }
        }
        self.extents(&extents, base);
    }

    fn descriptor_field(
        &mut self,
        key: &str,
        value: &str,
        line: &str,
        at: u64,
        kinds: &mut Vec<(String, u64)>,
    ) {
        let value = value.trim().trim_matches('"');
        match key {
            "createtype" => kinds.push((clip(value), at)),
            "parentcid" if value != NO_PARENT => self.parent_image(at, line),
            "parentfilenamehint" => self.parent_image(at, line),
            _ => {}
        }
    }

    fn extents(&mut self, extents: &[(&str, u64)], base: u64) {
        if extents.is_empty() {
            self.vmdk_descriptor(base, "no extent", "one extent");
        }
        for (index, (line, at)) in extents.iter().enumerate() {
            let name = line.split('"').nth(1).unwrap_or_default();
            reference::judge(&mut self.findings, "extent", name, *at);
            let kind = line.split_ascii_whitespace().nth(2).unwrap_or_default();
            // In an embedded descriptor, one sparse extent without a folder is the file itself,
            // under its original name.
            let itself = index == 0
                && base != 0
                && kind.eq_ignore_ascii_case("sparse")
                && !name.is_empty()
                && !name.contains(['/', '\\']);
            if !itself {
                self.find(Code::ReferenceExtent, *at, *line, "one SPARSE extent, the file itself");
            }
        }
    }
}
