//! Changes of refcounts per host cluster.

use std::collections::BTreeMap;

/// Clusters of one group: shared clusters are mostly adjacent.
const GROUP: u64 = 64;

/// A number per host cluster, mostly 0.
#[derive(Debug, Default)]
pub(super) struct Deltas {
    groups: BTreeMap<u64, Box<[i32; GROUP as usize]>>,
}

impl Deltas {
    /// Adds to a cluster's number. `None` on overflow of 31 bits, which no sound image causes.
    pub(super) fn add(&mut self, cluster: u64, by: i32) -> Option<()> {
        let group = self.groups.entry(cluster / GROUP);
        let slot =
            &mut group.or_insert_with(|| Box::new([0; GROUP as usize]))[(cluster % GROUP) as usize];
        *slot = slot.checked_add(by)?;
        Some(())
    }

    /// Bytes of memory, about.
    pub(super) fn bytes(&self) -> u64 {
        self.groups.len() as u64 * (GROUP * 4 + 32)
    }

    /// A cluster's number.
    pub(super) fn get(&self, cluster: u64) -> i32 {
        self.groups.get(&(cluster / GROUP)).map_or(0, |g| g[(cluster % GROUP) as usize])
    }

    /// Clusters in `range` with their nonzero numbers, in order.
    pub(super) fn within(&self, range: std::ops::Range<u64>) -> impl Iterator<Item = (u64, i32)> {
        self.groups
            .range(range.start / GROUP..range.end.div_ceil(GROUP))
            .flat_map(|(group, numbers)| (group * GROUP..).zip(numbers.iter().copied()))
            .filter(move |(cluster, by)| *by != 0 && range.contains(cluster))
    }

    /// All clusters with their nonzero numbers, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, i32)> {
        self.within(0..u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_add_up_and_zeroes_are_left_out() {
        let mut deltas = Deltas::default();
        for (cluster, by) in [(5, 1), (64, 2), (5, 1), (63, -1), (200, 1), (200, -1)] {
            deltas.add(cluster, by).unwrap();
        }
        assert_eq!(deltas.iter().collect::<Vec<_>>(), [(5, 2), (63, -1), (64, 2)]);
        assert_eq!(deltas.within(6..64).collect::<Vec<_>>(), [(63, -1)]);
        assert_eq!(deltas.within(64..65).collect::<Vec<_>>(), [(64, 2)]);
        assert_eq!((deltas.get(5), deltas.get(200), deltas.get(1 << 40)), (2, 0, 0));
        assert!(deltas.add(5, i32::MAX).is_none());
    }
}
