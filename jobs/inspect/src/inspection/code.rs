//! Finding codes of inspect, with stable names.

use serde::{Deserialize, Serialize};

use crate::codes::codes;

/// Weight of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Weight {
    /// Information.
    Note,
    /// Unusual; to be examined before the image is used.
    Warn,
    /// A reason to refuse the image.
    Refuse,
}

codes! {
    /// Code of a finding. Scripts rely on the names.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
    Code;
    /// Its default weight; the policy may change it.
    weight: Weight;

    BackingFile "backing-file" Refuse "The image has a backing file, whose bytes the guest could read." "let it pass with --allow backing, or have it converted to stand alone";
    BackingFormat "backing-format-missing" Warn "The image does not name the format of its backing file, so programs would guess it." "vdkit rebase, or qemu-img rebase -u -F FORMAT";
    DataFile "data-file" Refuse "The guest's data is in another file that the image names." "let it pass with --allow data-file, or have it converted";
    ReferenceJson "reference-json" Refuse "A reference is a `json:` name, which can name any file and any option." "ask for an image that stands alone: vdkit convert IMAGE NEW";
    ReferenceProtocol "reference-protocol" Refuse "A reference names a protocol or a URL." "ask for an image that stands alone: vdkit convert IMAGE NEW";
    ReferenceAbsolute "reference-absolute" Refuse "A reference is an absolute path." "ask for an image that stands alone: vdkit convert IMAGE NEW";
    ReferenceParent "reference-parent-folder" Refuse "A reference leaves the image's folder by `..`." "ask for an image that stands alone: vdkit convert IMAGE NEW";
    ReferenceExtent "extent-file" Refuse "A VMDK descriptor names other files as its extents." "ask for a monolithicSparse or streamOptimized image";
    ParentImage "parent-image" Refuse "The image is a difference to a parent image." "ask for an image that stands alone";
    SeveralFormats "several-formats" Refuse "The file is valid in more than one format, so two programs may see different disks." "refuse it: no honest tool makes such a file";
    FormatMismatch "format-mismatch" Refuse "The format is not the required one, or not the one of the file's name." "refuse it, or ask for what it is";
    FormatBanned "format-banned" Refuse "The format is obsolete or has no safe reader." "ask its sender for a qcow2 image";
    NotADisk "not-a-disk-image" Refuse "The file is an archive, a compressed file or a program." "unpack it in a safe place and inspect what was in it";
    NestedFormat "nested-format" Refuse "The guest disk itself begins like a disk image, and programs would open it as one after a conversion to raw." "let it pass with --allow nested, and name -f raw wherever it goes";
    Empty "empty-file" Refuse "The file has no bytes." "fetch it again";
    RawByElimination "raw-by-elimination" Note "No known format was recognized, so the image is raw; name the format wherever you use it." "name the format wherever the image is used: -f raw";
    HybridIso "hybrid-iso" Note "An ISO 9660 image with a partition table, for both optical media and USB sticks.";
    UnknownVersion "unknown-version" Refuse "The format's version is not known." "have it converted by the software that made it";
    UnknownIncompatible "unknown-incompatible-features" Refuse "Unknown feature bits are set that a reader must understand." "have it converted by the software that made it";
    UnknownCompatible "unknown-compatible-features" Note "Feature bits are set that a reader may ignore.";
    UnknownAutoclear "unknown-autoclear-features" Note "Feature bits are set that a writer would clear.";
    ExtendedL2 "extended-l2" Refuse "The image has extended L2 entries, which OpenStack's services refuse." "let it pass with --allow extended-l2, or convert it";
    UnknownExtension "unknown-extension" Warn "A header extension has an unknown type; it can hold anything." "vdkit convert IMAGE NEW drops it";
    DuplicateExtension "duplicate-extension" Warn "A header extension occurs twice, so two programs may read different values." "vdkit convert IMAGE NEW drops it";
    HeaderPadding "header-padding" Warn "Unused bytes of the header are not zero; they can hold anything." "vdkit convert IMAGE NEW drops them";
    HeaderTruncated "header-truncated" Refuse "The file ends within its header." "fetch it again: it was cut short";
    HeaderInvalid "header-invalid" Refuse "A field of the header breaks the format's specification." "refuse it, or ask for it again";
    VirtualSize "virtual-size" Refuse "The disk is larger than the limit." "raise --max-size where such a disk is wanted";
    TableTooLarge "table-too-large" Refuse "A table is larger than any reader should allocate." "refuse it: no honest tool makes such a table";
    Expansion "expansion" Refuse "The guest data is many times larger than the file." "raise --max-ratio where the image is known to compress so well";
    OutsideFile "outside-file" Refuse "A reference points beyond the end of the file." "fetch it again: it may have been cut short";
    MarkedCorrupt "marked-corrupt" Refuse "A program has marked the image as damaged." "vdkit check --repair all IMAGE, on a copy";
    NotClosed "not-closed-cleanly" Warn "The image was not closed cleanly; its refcounts may be wrong." "vdkit check --repair all IMAGE";
    MetadataCorrupt "metadata-corrupt" Refuse "The metadata is damaged: tables overlap, or refcounts and flags are wrong." "vdkit check --repair all IMAGE, on a copy";
    UnreferencedSpace "unreferenced-space" Warn "Space is marked as used but nothing refers to it; it can hold anything." "vdkit check --repair leaks IMAGE, or vdkit convert IMAGE NEW";
    Encrypted "encrypted" Refuse "The guest's data is encrypted and cannot be examined." "ask for it unencrypted, or let it pass with --allow encryption";
    InternalSnapshots "internal-snapshots" Warn "Internal snapshots hold data that the current disk does not show." "vdkit convert IMAGE NEW drops them";
    VmState "vm-state" Warn "A snapshot holds the memory and devices of a running machine." "vdkit convert IMAGE NEW drops it";
    Bitmaps "bitmaps" Note "There are persistent dirty bitmaps.";
    VmdkCreateType "vmdk-create-type" Refuse "The VMDK's createType does not keep all data in one file." "ask for a monolithicSparse or streamOptimized image";
    VmdkDescriptor "vmdk-descriptor" Refuse "The VMDK's descriptor is missing, or has unexpected content." "refuse it, or ask for a monolithicSparse image";
    VhdFooterCopy "vhd-footer-copy" Refuse "The copy of the VHD's footer at offset 0 is missing, damaged or different: programs that read it see a raw disk, or another disk." "refuse it, or ask its sender for another format";
    VmdkFooter "vmdk-footer" Refuse "The VMDK's footer is missing or contradicts its header." "refuse it, or ask for a monolithicSparse image";
    MbrBootFlag "mbr-boot-flag" Refuse "A partition's boot flag in the MBR is neither 0x00 nor 0x80." "refuse it, or name it raw and write a new partition table";
    MbrNoPartition "mbr-no-partition" Refuse "The first sector has an MBR's signature, but neither a partition nor a FAT file system." "refuse it, or clear the last two bytes of its first sector";
    MbrProtective "mbr-protective" Refuse "The protective MBR does not agree with the GPT." "refuse it, or have its partition table written anew";
    PartitionBeyondEnd "partition-beyond-end" Warn "A partition extends beyond the end of the disk." "fetch it again: it may have been cut short";
    ContentsNotChecked "contents-not-checked" Warn "The header was read, but the tables after it were not." "convert it in a safe place, and inspect the result";
    NotJudged "not-judged" Refuse "The image could not be judged; treat it as refused." "treat it as refused, and try again";
    LimitReads "limit-reads" Refuse "Judging the image needed more reads than the limit." "raise --max-read where the image may be that large";
    LimitTime "limit-time" Refuse "Judging the image took longer than the limit." "raise --timeout where the image may be that large";
    LimitMemory "limit-memory" Refuse "The image made the inspector exceed its memory limit." "raise --max-memory where the image may be that large";
    InspectorDied "inspector-died" Refuse "The image made the inspector fail." "refuse the image, and report this";
    InspectorForbidden "inspector-forbidden-call" Refuse "The image made the inspector attempt a system call that its sandbox forbids." "refuse the image, and report this";
    InspectorAnswer "inspector-answer" Refuse "The inspector's answer is not valid." "refuse the image, and report this";
    SandboxPartial "sandbox-partial" Warn "This system lacks a part of the sandbox in which images are examined." "use a kernel with both (Linux 5.13 or newer)";
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct InspectFinding {
    /// Its code.
    pub code: Code,
    /// Its weight under the policy.
    pub severity: Weight,
    /// The problem, as a sentence.
    pub what: String,
    /// Byte offset in the file, if any.
    #[serde(rename = "where", skip_serializing_if = "Option::is_none", default)]
    pub offset: Option<u64>,
    /// The value found.
    pub found: String,
    /// Acceptable values.
    pub expected: String,
    /// What the user can do about it.
    pub mend: String,
}

/// Maximum characters per text: names in an image may be arbitrarily long.
const TEXT_CHARS_MAX: usize = 400;
/// Maximum findings of a report.
pub(super) const FINDINGS_MAX: usize = 100;

/// Shortens an untrusted text.
pub(super) fn clip(text: impl Into<String>) -> String {
    let mut text = text.into();
    if let Some((at, _)) = text.char_indices().nth(TEXT_CHARS_MAX) {
        text.truncate(at);
        text.push('…');
    }
    text
}

impl InspectFinding {
    /// A finding with the weight and text of its code; the methods below add the rest.
    pub fn new(code: Code) -> Self {
        Self {
            code,
            severity: code.weight(),
            what: code.meaning().to_owned(),
            offset: None,
            found: String::new(),
            expected: String::new(),
            mend: code.mend().to_owned(),
        }
    }

    /// Sets the byte offset in the file.
    pub fn at(mut self, offset: u64) -> Self {
        self.offset = Some(offset);
        self
    }

    /// Sets the value found.
    pub fn found(mut self, found: impl Into<String>) -> Self {
        self.found = clip(found);
        self
    }

    /// Sets the acceptable values.
    pub fn expected(mut self, expected: impl Into<String>) -> Self {
        self.expected = clip(expected);
        self
    }

    /// Sets what the user can do about it.
    pub fn mend(mut self, mend: impl Into<String>) -> Self {
        self.mend = clip(mend);
        self
    }

    /// Reduces the weight to a note if the policy allows it.
    pub fn allowed(mut self, allowed: bool) -> Self {
        if allowed {
            self.severity = Weight::Note;
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_serialise_as_they_are_called() {
        for (i, code) in Code::ALL.iter().enumerate() {
            assert!(Code::ALL[..i].iter().all(|other| other.name() != code.name()));
            assert_eq!(serde_json::to_value(code).unwrap(), code.name());
            assert!(code.meaning().ends_with('.'), "{}", code.name());
        }
    }

    #[test]
    fn texts_of_strangers_are_shortened_between_characters() {
        let finding = InspectFinding::new(Code::BackingFile).found("ä".repeat(100_000));
        assert_eq!(finding.found.chars().count(), TEXT_CHARS_MAX + 1);
    }
}
