//! Raw disks: checks of the first sectors.
//!
//! Sources: the UEFI specification, section "GUID Partition Table (GPT) Disk Layout".

use super::code::{Code, InspectFinding};
use super::signature::{Kind, Signature, names};
use super::{Depth, Inspection};
use vdkit_block::bytes::{le32, le64};

/// Offset of the four MBR entries, and their size.
const ENTRIES: usize = 446;
const ENTRY_BYTES: usize = 16;
/// The partition type of a protective entry.
const PROTECTIVE: u8 = 0xee;
const SECTOR: u64 = 512;

impl Inspection<'_> {
    pub(super) fn raw(&mut self, head: &[u8], found: &[Signature]) {
        // There is no further metadata.
        self.depth = Depth::Metadata;
        self.judge_size(self.len, 0);
        let contents = names(found, Kind::Contents);
        let partitioned = contents.contains("mbr") || contents.contains("gpt");
        if contents.contains("iso") && partitioned {
            InspectFinding::new(Code::HybridIso).at(0).found("iso, mbr").add_to(&mut self.findings);
        }
        if contents.is_empty() && found.is_empty() {
            self.find(
                Code::RawByElimination,
                0,
                "no signature",
                "a partition table or a file system",
            );
        }
        if contents.contains("mbr") {
            self.mbr(head, contents.contains("gpt"), contents.contains("iso"));
        } else if contents.contains("gpt") {
            self.protective("a GPT without an MBR");
        }
    }

    fn mbr(&mut self, head: &[u8], gpt: bool, iso: bool) {
        let mut used = 0;
        let mut protective = Vec::new();
        for index in 0..4 {
            let at = ENTRIES + index * ENTRY_BYTES;
            let Some(entry) = head.get(at..at + ENTRY_BYTES) else { return };
            let (flag, kind) = (entry[0], entry[4]);
            if !matches!(flag, 0 | 0x80) {
                self.find(
                    Code::MbrBootFlag,
                    at as u64,
                    format!("{flag:#04x} in entry {index}"),
                    "0x00 or 0x80",
                );
            }
            if kind == 0 {
                continue;
            }
            used += 1;
            if kind == PROTECTIVE {
                protective.push(index);
                if le32(entry, 8) != 1 {
                    self.protective(&format!("entry {index} begins at {}", le32(entry, 8)));
                }
                continue;
            }
            let end = (u64::from(le32(entry, 8)) + u64::from(le32(entry, 12))) * SECTOR;
            if end > self.len && !iso {
                self.beyond_end(at as u64, &format!("entry {index} ends at {end:#x}"));
            }
        }
        if used == 0 {
            self.find(Code::MbrNoPartition, ENTRIES as u64, "four empty entries", "a partition");
        }
        // Hybrid MBRs beside a GPT exist, but there the protective entry is the first.
        if protective.len() > 1 || protective.first().is_some_and(|&first| first != 0) {
            self.protective(&format!("protective entries {protective:?}"));
        }
        if !protective.is_empty() && !gpt {
            self.protective("a protective MBR without a GPT");
        }
        if gpt && protective.is_empty() && !iso {
            self.protective("a GPT beside an MBR that does not protect it");
        }
        if gpt {
            let at = if head.get(512..520) == Some(b"EFI PART") { 512 } else { 4096 };
            let last = le64(head, at + 48).saturating_mul(at as u64);
            if last > self.len {
                self.beyond_end(at as u64 + 48, &format!("the GPT's last usable byte {last:#x}"));
            }
        }
    }

    fn protective(&mut self, found: &str) {
        self.find(
            Code::MbrProtective,
            ENTRIES as u64,
            found,
            "one entry of type 0xee from sector 1 on, and a GPT",
        );
    }

    fn beyond_end(&mut self, at: u64, found: &str) {
        self.find(
            Code::PartitionBeyondEnd,
            at,
            found,
            format!("an end within the disk of {} bytes", self.len),
        );
    }
}
