//! Which host clusters hold metadata.

use std::collections::BTreeMap;
use std::ops::Range;

use rustc_hash::FxHashSet;

/// Host clusters of an image's metadata, which guest data must not overwrite. Empty when read-only.
/// L2 tables that only snapshots use are not among them: to find these, all of the snapshots would
/// have to be read.
#[derive(Clone, Debug, Default)]
pub(crate) struct Metadata {
    live: FxHashSet<u64>,
    /// First cluster and end of the L1 tables of snapshots, without overlaps. Ranges, since damaged
    /// snapshots may name far more clusters than a table needs.
    snapshots: BTreeMap<u64, u64>,
}

impl Metadata {
    /// `live` is what the header, the active disk and the snapshot table use.
    pub(crate) fn new(live: FxHashSet<u64>) -> Self {
        Self { live, snapshots: BTreeMap::new() }
    }

    pub(crate) fn contains(&self, cluster: u64) -> bool {
        self.live.contains(&cluster) || self.snapshot_l1(cluster).is_some()
    }

    /// All but the L1 tables of snapshots.
    pub(crate) fn live(&self) -> &FxHashSet<u64> {
        &self.live
    }

    /// The range of snapshots' L1 tables around a cluster.
    fn snapshot_l1(&self, cluster: u64) -> Option<Range<u64>> {
        let (&first, &end) = self.snapshots.range(..=cluster).next_back()?;
        (cluster < end).then_some(first..end)
    }

    /// Returns whether the cluster held no metadata before.
    pub(crate) fn insert(&mut self, cluster: u64) -> bool {
        self.snapshot_l1(cluster).is_none() & self.live.insert(cluster)
    }

    pub(crate) fn extend(&mut self, clusters: impl IntoIterator<Item = u64>) {
        self.live.extend(clusters);
    }

    pub(crate) fn insert_snapshot_l1(&mut self, mut clusters: Range<u64>) {
        if clusters.is_empty() {
            return;
        }
        while let Some((&first, &end)) = self.snapshots.range(..clusters.end).next_back()
            && end > clusters.start
        {
            self.snapshots.remove(&first);
            clusters = clusters.start.min(first)..clusters.end.max(end);
        }
        self.snapshots.insert(clusters.start, clusters.end);
    }

    pub(crate) fn remove(&mut self, cluster: u64) {
        if self.live.remove(&cluster) {
            return;
        }
        if let Some(Range { start, end }) = self.snapshot_l1(cluster) {
            self.snapshots.remove(&start);
            self.insert_snapshot_l1(start..cluster);
            self.insert_snapshot_l1(cluster + 1..end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_snapshots_join_and_shrink() {
        let mut metadata = Metadata::default();
        assert!(metadata.insert(7) && !metadata.insert(7));
        for range in [10..14, 20..22, 12..20, 30..30, 40..41] {
            metadata.insert_snapshot_l1(range);
        }
        let all = |metadata: &Metadata| {
            (0..50).filter(|&cluster| metadata.contains(cluster)).collect::<Vec<u64>>()
        };
        let expected: Vec<u64> = [7].into_iter().chain(10..22).chain([40]).collect();
        assert_eq!(all(&metadata), expected);
        assert!(!metadata.insert(11), "a snapshot's");
        for cluster in (0..50).filter(|cluster| ![7, 13].contains(cluster)) {
            metadata.remove(cluster);
            metadata.remove(cluster);
        }
        assert_eq!(all(&metadata), [7, 13]);
        assert!(metadata.live().contains(&7) && metadata.live().len() == 1);
    }
}
