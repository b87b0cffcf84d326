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

    Unreadable "unreadable" Error "The image cannot be described: its header is damaged, or needs an unsupported feature.";
    MarkedCorrupt "marked-corrupt" Error "A program found the image damaged and marked it. The image is read-only until it is repaired.";
    Corrupt "corrupt" Error "The check found damaged metadata.";
    BackingMissing "backing-missing" Error "The backing image is not where the header says.";
    BackingBroken "backing-broken" Error "An image of the backing chain cannot be described, or the chain has a loop or is too long.";
    DataFileMissing "data-file-missing" Error "The file with the guest's data cannot be opened.";
    NotClosed "not-closed-cleanly" Warning "The image's dirty bit is set and no process has the image open: refcounts may be out of date.";
    Leaks "leaks" Warning "Clusters are marked as used but nothing refers to them: they waste space and harm no data.";
    BackingFormat "backing-format-missing" Warning "The header does not name the backing image's format, so programs guess it; the guest of a raw image can imitate any format.";
    BackingRefused "backing-refused" Warning "The header names a file outside the image's folder (or a URL or json: name), which vdkit opens only if you allow it.";
    BitmapStale "bitmap-not-saved" Warning "A dirty bitmap was not stored when the image was last used, so its marks are not reliable.";
    LegacyAes "legacy-encryption" Warning "The image is encrypted with QEMU's first method (AES), which its manual calls flawed.";
    OddSize "size-not-in-sectors" Warning "The size of the disk is not a multiple of 512 bytes, but a guest sees only whole sectors.";
    Unflushed "flushes-ignored" Warning "A process that uses the image ignores the guest's flushes (cache=unsafe), so a power failure may damage the guest's file system.";
    NoBarriers "no-barriers" Warning "The file system is mounted so that flushes do not reach its device.";
    Abandoned "abandoned-file" Warning "A command was killed while it wrote a new file. The incomplete file takes space under a hidden name (.partial).";
    InUse "in-use" Advice "Another process has the image open for writing, so findings that change meanwhile were left out.";
    NotChecked "not-checked" Advice "The metadata was not checked, because reading all of it would take too long here.";
    NotSearched "not-searched" Advice "The folder has so many files that not all were looked at for files of killed commands.";
    VersionTwo "version-2" Advice "The image has version 2 (compat 0.10), which has no zero clusters, feature bits or dirty bitmaps.";
    MapCache "l2-cache" Advice "The L2 tables of the whole disk are larger than the default cache of 32 MiB.";
    SmallClusters "small-clusters" Advice "With larger clusters, the L2 tables of the whole disk would fit into the default cache.";
    NarrowRefcounts "narrow-refcounts" Advice "Refcounts are so narrow that only a few snapshots, or none, can share a cluster.";
    Compressed "compressed" Advice "Some of the data is compressed: a read of any part of a cluster decompresses all of it.";
    UnusedSpace "unused-space" Advice "The file takes more space on the host than its used clusters need.";
    DeepChain "deep-chain" Advice "The backing chain is long: a read of data in its last image searches all others first.";
    BackingAbsolute "backing-absolute" Advice "The header names the backing image by an absolute path, so the two images cannot be moved together.";
    BackingWritable "backing-writable" Advice "The backing image is writable; writing to it damages this image.";
    BackingNewer "backing-newer" Advice "The backing image was written after this image was created; if its guest data changed, this image is damaged.";
    ManySnapshots "many-snapshots" Advice "The image has many internal snapshots: they take space, and the first write to a shared cluster copies it.";
    FragmentedMap "fragmented-map" Advice "The guest's bytes are out of order in the file, so sequential reads of the disk become random reads of the file.";
    FragmentedFile "fragmented-file" Advice "The file is stored in many small extents on its device.";
    ClusterBelowBlock "cluster-below-block" Advice "A cluster is smaller than a block of the file system (or device), so writing a new cluster first reads the rest of the block.";
    InMemory "in-memory" Advice "The file system is in memory: the image is lost when the machine stops.";
    Overcommitted "overcommitted" Advice "The possible growth of several images together exceeds the free space of their file system.";
    LittleSpace "little-space" Advice "The possible growth of the image exceeds the free space of its file system.";
    CopyOnWrite "copy-on-write" Advice "The file is on btrfs, which writes each changed block to a new location.";
    Network "network-file-system" Advice "The file is on a network file system: the server decides whether locks hold between machines.";
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
