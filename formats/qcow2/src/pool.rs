//! Pool of preallocated host clusters: their refcount is 1 and nothing refers to them yet.
//!
//! After a crash they are only leaks. Each run records whether its bytes still read as zero (it is
//! beyond the former end of the file) and which flush makes its refcounts durable. These two facts
//! decide whether a write into it needs a barrier of its own.

use std::collections::BTreeMap;

/// A run of reserved clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Space {
    pub(crate) first: u64,
    pub(crate) count: u64,
    /// The clusters read as zero and were never written.
    pub(crate) fresh: bool,
    /// The flush that makes their refcounts durable.
    pub(crate) sequence: u64,
}

/// Runs of reserved clusters by first cluster.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    runs: BTreeMap<u64, Space>,
    clusters: u64,
}

/// Most runs that a search visits before the file grows instead.
const SEARCH_MAX: usize = 64;

impl Pool {
    /// Clusters in all runs.
    pub(crate) fn clusters(&self) -> u64 {
        self.clusters
    }

    /// Adds clusters, merging them with adjacent runs of the same kind. Adds none if some are in
    /// the pool: in a damaged image, a cluster may lose its only counted reference twice.
    pub(crate) fn add(&mut self, mut space: Space) {
        let before = self.runs.range(..space.first + space.count).next_back();
        if before.is_some_and(|(_, run)| run.first + run.count > space.first) {
            return;
        }
        self.clusters += space.count;
        let joins = |a: &Space, b: &Space| {
            a.first + a.count == b.first && a.fresh == b.fresh && a.sequence == b.sequence
        };
        if let Some((&key, before)) = before
            && joins(before, &space)
        {
            space.first = key;
            space.count += before.count;
        }
        if let Some((&key, after)) = self.runs.range(space.first + 1..).next()
            && joins(&space, after)
        {
            space.count += after.count;
            self.runs.remove(&key);
        }
        self.runs.insert(space.first, space);
    }

    /// Takes up to `max` clusters that begin at `cluster`.
    pub(crate) fn take_at(&mut self, cluster: u64, max: u64) -> Option<Space> {
        if max == 0 {
            return None;
        }
        let (&key, run) = self.runs.range(..=cluster).next_back()?;
        let (skip, run) = (cluster - key, *run);
        if skip >= run.count {
            return None;
        }
        self.runs.remove(&key);
        self.clusters -= run.count;
        if skip > 0 {
            self.add(Space { count: skip, ..run });
        }
        let count = max.min(run.count - skip);
        let rest = run.count - skip - count;
        if rest > 0 {
            self.add(Space { first: cluster + count, count: rest, ..run });
        }
        Some(Space { first: cluster, count, ..run })
    }

    /// Takes `count` clusters from the first run that is long enough.
    pub(crate) fn take(&mut self, count: u64) -> Option<Space> {
        let first = self.runs.values().take(SEARCH_MAX).find(|r| r.count >= count)?.first;
        self.take_at(first, count)
    }

    /// Takes `count` clusters that still read as zero.
    pub(crate) fn take_fresh(&mut self, count: u64) -> Option<Space> {
        // Fresh space is at the end of the file.
        let mut runs = self.runs.values().rev().take(SEARCH_MAX);
        let first = runs.find(|r| r.fresh && r.count >= count)?.first;
        self.take_at(first, count)
    }

    /// Takes up to `max` clusters from the longest run.
    pub(crate) fn take_longest(&mut self, max: u64) -> Option<Space> {
        let first = self.runs.values().max_by_key(|r| r.count)?.first;
        self.take_at(first, max)
    }

    pub(crate) fn drain(&mut self) -> Vec<Space> {
        self.clusters = 0;
        std::mem::take(&mut self.runs).into_values().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(first: u64, count: u64) -> Space {
        Space { first, count, fresh: true, sequence: 0 }
    }

    #[test]
    fn runs_split_and_join() {
        let mut pool = Pool::default();
        pool.add(space(10, 10));
        pool.add(space(30, 5));
        assert_eq!(pool.take_at(12, 3), Some(space(12, 3)));
        assert_eq!(pool.clusters(), 12);
        assert_eq!(pool.take(6), None);
        assert_eq!(pool.take(5), Some(space(15, 5)));
        pool.add(space(12, 3));
        assert_eq!(pool.take(5), Some(space(10, 5)));
        assert_eq!(pool.take_longest(100), Some(space(30, 5)));
        assert_eq!(pool.clusters(), 0);
        assert!(pool.drain().is_empty());
    }

    #[test]
    fn no_cluster_is_in_the_pool_twice() {
        let mut pool = Pool::default();
        pool.add(space(10, 10));
        for (first, count) in [(10, 1), (12, 3), (19, 5), (5, 6), (5, 30)] {
            pool.add(space(first, count));
            assert_eq!(pool.clusters(), 10, "{first}, {count}");
        }
        assert_eq!(pool.take(10), Some(space(10, 10)));
        assert_eq!(pool.take_longest(1), None);
    }

    #[test]
    fn runs_of_different_kinds_stay_apart() {
        let mut pool = Pool::default();
        pool.add(space(0, 4));
        pool.add(Space { first: 4, count: 4, fresh: false, sequence: 0 });
        assert_eq!(pool.take(5), None);
        assert_eq!(pool.take_fresh(4), Some(space(0, 4)));
        assert_eq!(pool.take_fresh(1), None);
    }
}
