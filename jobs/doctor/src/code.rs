//! Finding codes of doctor, with stable names.

use serde::Serialize;

use vdkit_inspect::codes;

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// A possible improvement.
    Advice,
    /// A defect that loses no data today.
    Warning,
    /// The image is damaged or unreadable.
    Error,
}

codes! {
    /// Code of a finding. Scripts rely on the names.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
    Code;
    /// Its severity.
    severity: Severity;

    Unreadable "unreadable" Error "The image cannot be described: its header is damaged, or asks for what is not supported.";
    MarkedCorrupt "marked-corrupt" Error "A writer has found the image damaged and marked it; nothing writes to it before it is repaired.";
    Corrupt "corrupt" Error "The check found damaged metadata.";
    BackingMissing "backing-missing" Error "The image that it stands on is not where its header says.";
    BackingBroken "backing-broken" Error "An image beneath it cannot be described, or the chain has a loop or is too long.";
    DataFileMissing "data-file-missing" Error "The file with the guest's data cannot be opened.";
    NotClosed "not-closed-cleanly" Warning "The image has its dirty bit set and nobody has it open: refcounts may be behind.";
    Leaks "leaks" Warning "Clusters are marked as used that nothing refers to: space is lost, no data is harmed.";
    BackingFormat "backing-format-missing" Warning "The header does not name the backing image's format, so it is guessed; the guest of a raw image can make it look like any.";
    BackingRefused "backing-refused" Warning "The header names a file outside of the image's folder (or a URL or json: name), which is not opened unless that is allowed.";
    BitmapStale "bitmap-not-saved" Warning "A dirty bitmap was in use when the image was last closed, so nobody may trust it.";
    LegacyAes "legacy-encryption" Warning "The image is encrypted with QEMU's first method (AES), which its manual calls flawed.";
    OddSize "size-not-in-sectors" Warning "The size of the disk is not a multiple of 512 bytes, while a guest sees whole sectors.";
    Unflushed "flushes-ignored" Warning "A process that uses the image ignores the guest's flushes (cache=unsafe), so a power cut may damage the guest's file system.";
    NoBarriers "no-barriers" Warning "The file system is mounted so that flushes do not reach its device.";
    Abandoned "abandoned-file" Warning "A command was killed while it made a new file, and what it had written takes space under a hidden name (.partial).";
    InUse "in-use" Advice "Another process has the image open for writing: what changes while it runs was not looked at.";
    NotChecked "not-checked" Advice "The metadata was not checked, as reading it all would have taken too long here.";
    VersionTwo "version-2" Advice "The image has version 2 (compat 0.10), which has no zero clusters, feature bits or dirty bitmaps.";
    MapCache "l2-cache" Advice "The map (L2 tables) of the whole disk is larger than the default cache of 32 MiB.";
    SmallClusters "small-clusters" Advice "Larger clusters would bring the map of the whole disk within the default cache.";
    NarrowRefcounts "narrow-refcounts" Advice "Refcounts are so narrow that a cluster can be shared by few snapshots, or by none.";
    Compressed "compressed" Advice "Some of the data is compressed: a read of any part of a cluster unpacks all of it.";
    UnusedSpace "unused-space" Advice "The file takes more space on the host than its clusters in use can account for.";
    DeepChain "deep-chain" Advice "The image stands on many others: a read of what none of the upper ones holds asks all of them.";
    BackingAbsolute "backing-absolute" Advice "The header names the backing image by an absolute path, so the two cannot be moved together.";
    BackingWritable "backing-writable" Advice "The image beneath may be written by its owner; whoever does so damages this one.";
    BackingNewer "backing-newer" Advice "The image beneath was written after this one was made; if the guest's data in it changed, this one is damaged.";
    ManySnapshots "many-snapshots" Advice "The image holds many internal snapshots: they keep space, and the first write to a cluster of theirs copies it.";
    FragmentedMap "fragmented-map" Advice "The guest's bytes lie out of order in the file, so that reading the disk in order is reading the file here and there.";
    FragmentedFile "fragmented-file" Advice "The file lies in many small pieces on its device.";
    ClusterBelowBlock "cluster-below-block" Advice "A cluster is smaller than a block of the file system (or device), so that writing a new one reads the rest of the block first.";
    InMemory "in-memory" Advice "The file system is in memory: the image is gone with the power.";
    Overcommitted "overcommitted" Advice "Several images may together grow by more than their file system has left.";
    LittleSpace "little-space" Advice "The file system has less space left than the image may still grow by.";
    CopyOnWrite "copy-on-write" Advice "The file is on btrfs, which writes every changed block to a new place.";
    Network "network-file-system" Advice "The file is on a network file system: whether locks hold between machines is the server's matter.";
    NoDirect "no-direct-io" Advice "The file system does not let the file be opened with O_DIRECT, so --cache none and directsync fail.";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_and_the_worst_come_first() {
        let names: std::collections::HashSet<_> = Code::ALL.iter().map(|c| c.name()).collect();
        assert_eq!(names.len(), Code::ALL.len());
        assert!(Code::ALL.is_sorted_by(|a, b| a.severity() >= b.severity()));
        assert!(Code::ALL.iter().all(|code| code.meaning().ends_with('.')));
    }
}
