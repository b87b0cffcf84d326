//! Derives the cells from a plan and places, and the order in which they run.

use crate::axes::BACKEND;
use crate::fit;
use crate::layout::More;
use crate::model::{Axes, Cell, PlaceInfo};
use crate::place::zfs::is_data_set;
use crate::plan::Plan;

/// Every cell of a plan on these places, in the order of the plan.
pub fn cells(plan: &Plan, places: &[&PlaceInfo], quick: bool) -> Vec<Cell> {
    let mut all = Vec::new();
    for place in places {
        for product in products(plan, place, quick) {
            let mut axes = vec![(BACKEND.to_owned(), place.name.clone())];
            axes.extend(product);
            if !excluded(plan, &axes) && has_meaning(&axes, place) {
                all.push(Cell { key: key(&axes), axes, ..Cell::default() });
            }
        }
    }
    all
}

/// The product of the axes' values that apply to a place, and the plan's extra cells.
fn products(plan: &Plan, place: &PlaceInfo, quick: bool) -> Vec<Axes> {
    let kind = place.file_system.as_deref().unwrap_or("");
    let kind = kind.strip_prefix("fuse.").unwrap_or(kind);
    let mut products: Vec<Axes> = vec![Vec::new()];
    for axis in &plan.axes {
        let values = if quick { &axis.quick } else { &axis.values };
        let varied = axis.on.is_empty() || axis.on.iter().any(|on| on == kind);
        let values = if varied { &values[..] } else { &values[..1] };
        products = product(&products, &axis.name, values);
    }
    for more in if quick { &plan.quick_include } else { &plan.include } {
        if !products.contains(more) {
            products.push(more.clone());
        }
    }
    products
}

/// Each of these cells with each value of one more axis.
pub(crate) fn product(cells: &[Axes], axis: &str, values: &[String]) -> Vec<Axes> {
    let with = |cell: &Axes, value: &String| {
        let mut cell = cell.clone();
        cell.push((axis.to_owned(), value.clone()));
        cell
    };
    cells.iter().flat_map(|cell| values.iter().map(|value| with(cell, value))).collect()
}

/// Whether a cell is meaningful on a place: ZFS volumes are only measured on a data set.
fn has_meaning(axes: &Axes, place: &PlaceInfo) -> bool {
    let volume = fit::layout_of(axes).is_ok_and(|layout| layout.more == More::Volume);
    !volume || is_data_set(place)
}

/// A cell's name, the same in every run.
pub fn key(axes: &Axes) -> String {
    let parts: Vec<String> = axes.iter().map(|(name, value)| format!("{name}={value}")).collect();
    parts.join("/")
}

fn excluded(plan: &Plan, axes: &Axes) -> bool {
    plan.exclude.iter().any(|rule| {
        rule.iter().all(|(name, values)| {
            axes.iter().any(|(axis, value)| axis == name && values.contains(value))
        })
    })
}

/// SplitMix64: a small, repeatable random number generator.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator with this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `n`, or 0 if `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(n)) >> 64) as u64
    }
}

/// Returns the numbers below `count` in random order.
pub fn shuffled(count: usize, rng: &mut Rng) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    for i in (1..count).rev() {
        order.swap(i, rng.below(i as u64 + 1) as usize);
    }
    order
}

/// The order in which the cells of each round run. Every cell has a round before any cell has the
/// next, so that a machine that slows down over time biases no cell.
pub fn order(cells: usize, rounds: u32, seed: u64) -> Vec<(u32, usize)> {
    let mut rng = Rng::new(seed);
    let rounds = (0..rounds).map(|round| (round, shuffled(cells, &mut rng)));
    rounds.flat_map(|(round, cells)| cells.into_iter().map(move |cell| (round, cell))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: &str = r#"
        name = "p"
        title = "t"
        question = "q?"
        metric = "iops"
        axis = [
          { name = "layout", values = ["raw", "qcow2"], quick = ["raw"] },
          { name = "cache", values = ["none", "unsafe"] },
          { name = "profile", values = ["database"] },
        ]
        include = [{ layout = "qcow2-2m", cache = "none", profile = "database" }]
        quick-include = [{ layout = ["raw", "qcow2-8k"], cache = "none", profile = "database" }]
        exclude = [{ backend = "b", layout = "raw", cache = ["unsafe"] }]
        full = { rounds = 1, seconds = 1, disk = "1M", bytes = "1M" }
        quick = { rounds = 1, seconds = 1, disk = "1M", bytes = "1M" }
    "#;

    #[test]
    fn cells_are_the_product_less_what_is_excluded() {
        let plan = Plan::parse(PLAN, "p.toml").unwrap();
        let keys = |backends: &[&str], quick| -> Vec<String> {
            let places: Vec<PlaceInfo> = backends.iter().map(|name| place(name, "ext4")).collect();
            let places: Vec<&PlaceInfo> = places.iter().collect();
            cells(&plan, &places, quick).into_iter().map(|cell| cell.key).collect()
        };
        let all = keys(&["a", "b"], false);
        assert_eq!(all[0], "backend=a/layout=raw/cache=none/profile=database");
        assert_eq!(all.len(), 5 + 4);
        assert!(all.contains(&"backend=b/layout=qcow2-2m/cache=none/profile=database".into()));
        assert!(!all.contains(&"backend=b/layout=raw/cache=unsafe/profile=database".into()));
        // A cell that the product already contains is added once.
        assert_eq!(
            keys(&["b"], true),
            [
                "backend=b/layout=raw/cache=none/profile=database",
                "backend=b/layout=qcow2-8k/cache=none/profile=database"
            ]
        );
    }

    fn place(name: &str, kind: &str) -> PlaceInfo {
        let file_system = Some(kind.to_owned());
        PlaceInfo { name: name.to_owned(), file_system, ..PlaceInfo::default() }
    }

    #[test]
    fn what_only_zfs_has_is_varied_on_zfs_only() {
        let plan = PLAN
            .replace(r#""raw", "qcow2"], quick"#, r#""raw", "qcow2", "zvol"], quick"#)
            .replace(
                r#"{ name = "profile""#,
                r#"{ name = "record", values = ["inherited", "8K"], on = ["zfs"] },
                   { name = "profile""#,
            )
            .replace(
                "cache = \"none\", profile",
                "cache = \"none\", record = \"inherited\", profile",
            );
        let plan = Plan::parse(&plan, "p.toml").unwrap();
        let count = |kind: &str, part: &str| {
            let place = place("a", kind);
            let all = cells(&plan, &[&place], false);
            all.iter().filter(|cell| cell.key.contains(part)).count()
        };
        for zfs in ["zfs", "fuse.zfs"] {
            let found = ["", "record=8K", "zvol"].map(|part| count(zfs, part));
            assert_eq!(found, [13, 6, 4], "{zfs}");
        }
        assert_eq!(["", "record=8K", "zvol"].map(|part| count("ext4", part)), [5, 0, 0]);
    }

    #[test]
    fn the_order_is_random_and_repeatable() {
        let one = order(20, 3, 7);
        assert_eq!(one, order(20, 3, 7));
        assert_ne!(one, order(20, 3, 8));
        for round in 0..3 {
            let mut cells: Vec<usize> =
                one.iter().filter(|step| step.0 == round).map(|step| step.1).collect();
            assert_ne!(cells, (0..20).collect::<Vec<_>>());
            cells.sort_unstable();
            assert_eq!(cells, (0..20).collect::<Vec<_>>());
        }
        // Rounds follow one another, each in its own order.
        assert!(one.windows(2).all(|pair| pair[0].0 <= pair[1].0));
        assert_ne!(
            one[..20].iter().map(|s| s.1).collect::<Vec<_>>(),
            one[20..40].iter().map(|s| s.1).collect::<Vec<_>>()
        );
    }
}
