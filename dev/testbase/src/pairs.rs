//! Few cases that hold every pair of values of any two axes.

use std::collections::BTreeSet;

use crate::Rng;

/// A value of an axis: the axis' number, and the value's.
pub type Choice = (usize, usize);

/// Cases, one value for each axis, such that any two values of two axes meet in some case, where
/// `allowed` lets them (asked with the lower axis first). Greedy and drawn by lot: another `rng`
/// makes other cases.
///
/// # Panics
/// If two values may meet, but no whole case can hold them both.
pub fn pairwise(
    sizes: &[usize],
    allowed: impl Fn(Choice, Choice) -> bool,
    rng: &mut Rng,
) -> Vec<Vec<usize>> {
    let mut missing = all_pairs(sizes, &allowed);
    let mut cases = Vec::new();
    while !missing.is_empty() {
        let start = rng.below(missing.len() as u64) as usize;
        let Some(&pair) = missing.iter().nth(start) else { unreachable!("below the length") };
        // A choice made too early may leave no value for another axis.
        let case = (0..100).find_map(|_| complete(pair, sizes, &allowed, &missing, rng));
        let case = case.unwrap_or_else(|| panic!("no case can hold {pair:?}"));
        missing.retain(|&((a, x), (b, y))| case[a] != x || case[b] != y);
        cases.push(case);
    }
    cases
}

fn all_pairs(
    sizes: &[usize],
    allowed: &impl Fn(Choice, Choice) -> bool,
) -> BTreeSet<(Choice, Choice)> {
    let choices: Vec<Choice> =
        sizes.iter().enumerate().flat_map(|(axis, &n)| (0..n).map(move |v| (axis, v))).collect();
    let pairs = choices.iter().flat_map(|a| choices.iter().map(move |b| (*a, *b)));
    pairs.filter(|(a, b)| a.0 < b.0 && allowed(*a, *b)).collect()
}

/// A case around a pair, with as many other missing pairs as can be had axis by axis.
fn complete(
    pair: (Choice, Choice),
    sizes: &[usize],
    allowed: &impl Fn(Choice, Choice) -> bool,
    missing: &BTreeSet<(Choice, Choice)>,
    rng: &mut Rng,
) -> Option<Vec<usize>> {
    let mut chosen = vec![pair.0, pair.1];
    let mut axes: Vec<usize> =
        (0..sizes.len()).filter(|&axis| axis != pair.0.0 && axis != pair.1.0).collect();
    while !axes.is_empty() {
        let axis = axes.swap_remove(rng.below(axes.len() as u64) as usize);
        let ordered = |a: Choice, b: Choice| if a.0 < b.0 { (a, b) } else { (b, a) };
        let fits = |value: &usize| {
            chosen.iter().all(|&other| {
                let (a, b) = ordered((axis, *value), other);
                allowed(a, b)
            })
        };
        let values: Vec<usize> = (0..sizes[axis]).filter(fits).collect();
        let gain = |value: usize| {
            chosen.iter().filter(|&&c| missing.contains(&ordered((axis, value), c))).count()
        };
        let best = values.into_iter().max_by_key(|&v| (gain(v), rng.next_u64()))?;
        chosen.push((axis, best));
    }
    chosen.sort_unstable();
    Some(chosen.into_iter().map(|(_, value)| value).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_allowed_pair_is_there_and_no_other() {
        let sizes = [3, 4, 2, 2, 3, 4];
        // Axis 1 can be other than 0 only where axis 0 is 2.
        let allowed = |a: Choice, b: Choice| !(a.0 == 0 && a.1 != 2 && b.0 == 1 && b.1 != 0);
        for seed in 0..20 {
            let cases = pairwise(&sizes, allowed, &mut Rng::new(seed));
            assert!(cases.len() < 40, "{} of 576 cases", cases.len());
            for pair in all_pairs(&sizes, &|_, _| true) {
                let ((a, x), (b, y)) = pair;
                let met = cases.iter().any(|case| case[a] == x && case[b] == y);
                assert_eq!(met, allowed(pair.0, pair.1), "{pair:?}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "no case can hold")]
    fn a_pair_without_a_case_is_told() {
        // Whatever axis 1 is, one of the others is refused.
        let allowed = |a: Choice, b: Choice| match (a, b) {
            ((0, 0), (1, v)) => v == 0,
            ((1, v), (2, 0)) => v == 1,
            _ => true,
        };
        pairwise(&[1, 2, 1], allowed, &mut Rng::new(1));
    }
}
