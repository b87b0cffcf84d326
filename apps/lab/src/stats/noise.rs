//! Estimates how much one round of a cell deviates, from all cells of a run together.
//!
//! Three rounds of one cell say little about how much that cell varies: if they agree by luck, any
//! difference looks certain. All cells of a run together say it well. The method is that of Smyth,
//! *Linear models and empirical Bayes methods for assessing differential expression* (2004), which
//! is made for many groups of few samples:
//!
//! - All values are logarithms, so that a factor of two and a factor of one half weigh the same.
//! - What a round has in common for all cells of a load is removed, because a slow minute slows all
//!   of them.
//! - The variances of the cells have a common distribution, whose parameters are fitted. Each
//!   cell's own variance is raised towards it, the more the more similar the variances are. If the
//!   variances differ widely (heavy tails, individual noisy cells), a cell keeps the variance of
//!   its own few samples, and its intervals become wide. Unlike in Smyth's method, a variance is
//!   not lowered if the variances differ, because noisy cells among calm ones would then look calm.

use super::special::{digamma, trigamma, trigamma_inverse};

/// Round numbers and the values measured in them.
pub type Rounds = Vec<(u32, f64)>;

/// Smallest standard deviation (of logarithms). Clocks and schedulers alone cause as much.
const FLOOR: f64 = 0.005;

/// The noise of all cells of a run.
#[derive(Clone, Debug, Default)]
pub struct Noise {
    /// By cell; none for a cell with fewer than two rounds, or with a value that is not above 0.
    cells: Vec<Option<Own>>,
    /// Degrees of freedom that each cell gains from the others.
    prior: f64,
    /// Degrees of freedom of all cells together.
    total: f64,
}

/// The noise of one cell.
#[derive(Clone, Copy, Debug)]
struct Own {
    /// Variance of one round's logarithm, moderated by the other cells.
    variance: f64,
    /// Degrees of freedom of the cell's own samples.
    freedom: f64,
    rounds: f64,
}

/// The variance of a mean, and its degrees of freedom.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Variance of the logarithm.
    pub variance: f64,
    /// At most 0 if nothing is known.
    pub freedom: f64,
}

impl Noise {
    /// Estimates the noise of cells. Each cell has the number of its load.
    pub fn of(cells: &[(usize, Rounds)]) -> Self {
        let centred: Vec<(usize, Option<Rounds>)> = cells
            .iter()
            .map(|(load, rounds)| (*load, logarithms(rounds).map(|logs| centred(&logs))))
            .collect();
        Self::of_centred(&centred, 1)
    }

    /// Estimates the noise of cells whose logarithms have their means subtracted already; `means`
    /// is the number of these means.
    pub(super) fn of_centred(cells: &[(usize, Option<Rounds>)], means: usize) -> Self {
        let mut own: Vec<Option<(f64, f64)>> = vec![None; cells.len()];
        let loads: std::collections::BTreeSet<usize> =
            cells.iter().map(|(load, _)| *load).collect();
        for load in loads {
            let here = |i: &usize| cells[*i].0 == load && cells[*i].1.is_some();
            let members: Vec<usize> = (0..cells.len()).filter(here).collect();
            let rows: Vec<&Rounds> = members.iter().filter_map(|i| cells[*i].1.as_ref()).collect();
            for (i, found) in members.iter().zip(residuals(&rows, means)) {
                own[*i] = Some(found);
            }
        }
        let known: Vec<(f64, f64)> = own.iter().flatten().copied().collect();
        let total = known.iter().map(|(_, freedom)| freedom).sum();
        let (prior, common) = fitted(&known);
        let drawn = |(variance, freedom): (f64, f64), rounds: usize| Own {
            // A cell noisier than the others must not appear less noisy because of them.
            variance: if prior.is_finite() {
                ((prior * common + freedom * variance) / (prior + freedom)).max(variance)
            } else {
                common
            },
            freedom,
            rounds: rounds as f64,
        };
        let each = own.into_iter().zip(cells);
        let cells = each
            .map(|(own, (_, rounds))| Some(drawn(own?, rounds.as_ref().map_or(0, Vec::len))))
            .collect();
        Self { cells, prior, total }
    }

    /// Variance of the mean over some cells, as a part of the difference between two such means.
    fn of_mean(&self, cells: &[usize]) -> Option<(f64, f64, f64)> {
        let (mut variance, mut squares, mut freedom) = (0.0, 0.0, 0.0);
        for i in cells {
            let own = self.cells.get(*i).copied().flatten()?;
            let part = own.variance / own.rounds / (cells.len() as f64).powi(2);
            variance += part;
            squares += part * part / (self.prior + own.freedom).max(f64::MIN_POSITIVE);
            freedom += own.freedom;
        }
        Some((variance, squares, freedom))
    }

    /// Spread of one round of a cell.
    pub(super) fn of_one(&self, cell: usize) -> Option<Spread> {
        let own = self.cells.get(cell).copied().flatten()?;
        let freedom = (self.prior + own.freedom).min(self.total);
        Some(Spread { variance: own.variance, freedom })
    }

    /// Spread of the difference between the means of two sets of cells. None if a cell has too few
    /// rounds.
    pub fn between(&self, one: &[usize], other: &[usize]) -> Option<Spread> {
        let (a, b) = (self.of_mean(one)?, self.of_mean(other)?);
        let variance = a.0 + b.0;
        // Welch and Satterthwaite's approximation. The degrees of freedom that all cells gain from
        // one another count once.
        let welch = if a.1 + b.1 > 0.0 { variance * variance / (a.1 + b.1) } else { f64::INFINITY };
        let freedom = welch.min(self.prior + a.2 + b.2).min(self.total);
        Some(Spread { variance, freedom })
    }
}

/// The logarithms of the values. None for fewer than two values, or if one is not above 0.
fn logarithms(rounds: &Rounds) -> Option<Rounds> {
    let usable = |value: &f64| *value > 0.0 && value.is_finite();
    (rounds.len() > 1 && rounds.iter().all(|(_, value)| usable(value)))
        .then(|| rounds.iter().map(|(round, value)| (*round, value.ln())).collect())
}

/// Subtracts the mean.
fn centred(logs: &Rounds) -> Rounds {
    let mean = logs.iter().map(|(_, log)| log).sum::<f64>() / logs.len() as f64;
    logs.iter().map(|(round, log)| (*round, log - mean)).collect()
}

/// Variance and degrees of freedom of each row, after removing what a round has in common for all
/// rows.
fn residuals(rows: &[&Rounds], means: usize) -> Vec<(f64, f64)> {
    let shared = |round: u32| {
        let there = rows.iter().copied().flatten().filter(|(other, _)| *other == round);
        let (sum, count) = there.fold((0.0, 0.0), |(sum, n), (_, log)| (sum + log, n + 1.0));
        if count > 0.0 { sum / count } else { 0.0 }
    };
    // With two rows, half of the degrees of freedom goes into the common part; one row has no
    // common part.
    let count = rows.len() as f64;
    let part = if rows.len() > 1 { 1.0 - 1.0 / count } else { 1.0 };
    let squares = |row: &&Rounds| -> f64 {
        let rest = |round: u32, log: f64| if rows.len() > 1 { log - shared(round) } else { log };
        row.iter().map(|(round, log)| rest(*round, *log).powi(2)).sum()
    };
    let each: Vec<(f64, f64)> = rows
        .iter()
        .map(|row| (squares(row), row.len().saturating_sub(means) as f64))
        .filter(|(_, freedom)| *freedom > 0.0)
        .collect();
    let all: f64 = each.iter().map(|(squares, freedom)| squares / freedom).sum();
    let of = |row: &&Rounds| {
        let freedom = row.len().saturating_sub(means) as f64;
        let own = squares(row) / freedom;
        // A noisy row's deviations leak into the common part and so into the calm rows. Source:
        // Ehrenberg, *The unbiased estimation of heterogeneous error variances* (1950).
        let apart = count / (count - 2.0) * (own - all / (count * (count - 1.0)));
        let variance = if rows.len() > 2 { apart.max(own / part) } else { own / part };
        (variance.max(FLOOR * FLOOR), freedom * part)
    };
    rows.iter().map(of).collect()
}

/// Degrees of freedom and scale of the distribution of the cells' variances: Smyth, section 6.2.
/// Infinite degrees of freedom if the variances differ no more than by chance.
fn fitted(known: &[(f64, f64)]) -> (f64, f64) {
    let total: f64 = known.iter().map(|(_, freedom)| freedom).sum();
    let pooled = known.iter().map(|(variance, freedom)| variance * freedom).sum::<f64>() / total;
    if known.len() < 2 {
        return (0.0, if pooled.is_finite() { pooled } else { 0.0 });
    }
    let count = known.len() as f64;
    let scores: Vec<f64> = known
        .iter()
        .map(|(variance, freedom)| variance.ln() - digamma(freedom / 2.0) + (freedom / 2.0).ln())
        .collect();
    let mean = scores.iter().sum::<f64>() / count;
    let spread = scores.iter().map(|score| (score - mean).powi(2)).sum::<f64>() / (count - 1.0);
    let chance = known.iter().map(|(_, freedom)| trigamma(freedom / 2.0)).sum::<f64>() / count;
    if spread <= chance {
        return (f64::INFINITY, pooled);
    }
    let prior = 2.0 * trigamma_inverse(spread - chance);
    (prior, (mean + digamma(prior / 2.0) - (prior / 2.0).ln()).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(values: &[f64]) -> Rounds {
        (0u32..).zip(values.iter().copied()).collect()
    }

    #[test]
    fn a_slow_minute_is_not_a_cells_own_noise() {
        // All three cells run at half the speed in the second round, and otherwise repeat within 1
        // %.
        let cells = [
            (0, rounds(&[100.0, 50.0, 101.0])),
            (0, rounds(&[200.0, 101.0, 199.0])),
            (0, rounds(&[300.0, 149.0, 301.0])),
        ];
        let spread = Noise::of(&cells).between(&[0], &[1]).unwrap();
        assert!(spread.variance.sqrt() < 0.02, "{spread:?}");
        // Cells of different loads have no known common part.
        let apart = [(0, cells[0].1.clone()), (1, cells[1].1.clone()), (2, cells[2].1.clone())];
        let spread = Noise::of(&apart).between(&[0], &[1]).unwrap();
        assert!(spread.variance.sqrt() > 0.2, "{spread:?}");
    }

    #[test]
    fn quiet_cells_among_noisy_ones_are_not_believed() {
        let noisy = [1.0, 1.5, 0.7, 1.2, 0.8, 1.4];
        let turned = |by: usize| -> Vec<f64> { (0..3).map(|i| noisy[(i + by) % 6]).collect() };
        let mut cells: Vec<(usize, Rounds)> = (0..8).map(|i| (i, rounds(&turned(i)))).collect();
        let alone = (0, rounds(&[1.0, 1.0001, 0.9999]));
        cells.push((8, alone.1.clone()));
        cells.push((9, alone.1));
        let spread = Noise::of(&cells).between(&[8], &[9]).unwrap();
        assert!(spread.variance.sqrt() > 0.01, "{spread:?}");
    }

    /// Clocks alone differ by more than samples that are equal by luck.
    #[test]
    fn equal_samples_have_the_noise_of_clocks() {
        let same = [(0, rounds(&[7.0; 3])), (0, rounds(&[7.0; 3]))];
        let spread = Noise::of(&same).between(&[0], &[1]).unwrap();
        assert!((spread.variance - 2.0 / 3.0 * FLOOR * FLOOR).abs() < 1e-12, "{spread:?}");
        assert!(spread.freedom <= Noise::of(&same).total, "{spread:?}");
    }

    #[test]
    fn a_noisy_cell_among_calm_ones_stays_noisy() {
        let calm = [1.0, 1.01, 0.99, 1.005];
        let mut cells: Vec<(usize, Rounds)> = (0..9).map(|load| (load, rounds(&calm))).collect();
        let noisy = [1.0, 2.0, 0.5, 1.5];
        cells.push((9, rounds(&noisy)));
        let variance = |noise: &Noise, cell| noise.of_one(cell).unwrap().variance;
        let alone = Noise::of(&[(0, rounds(&noisy))]);
        let all = Noise::of(&cells);
        assert!(variance(&all, 9) > 0.999 * variance(&alone, 0), "{all:?}");
    }

    /// The common part of three cells has a third of the noise of the only noisy one.
    #[test]
    fn what_leaks_into_the_common_part_is_given_back() {
        let row = |logs: [f64; 3]| -> Rounds { (0u32..).zip(logs).collect() };
        let (noisy, calm) = (row([0.1, -0.1, 0.0]), row([0.0; 3]));
        let found = residuals(&[&noisy, &calm, &calm], 1);
        assert!((found[0].0 - 0.01).abs() < 1e-12, "{found:?}");
    }

    #[test]
    fn a_mean_varies_less_the_more_it_has() {
        let cell = |load, count: usize| (load, rounds(&[1.0, 1.1, 0.9, 1.05, 0.95, 1.0][..count]));
        let four = [cell(0, 6), cell(1, 6), cell(2, 6), cell(3, 6)];
        let noise = Noise::of(&four);
        let variance = |one: &[usize], two: &[usize]| noise.between(one, two).unwrap().variance;
        let (single, double) = (variance(&[0], &[1]), variance(&[0, 1], &[2, 3]));
        assert!((single / double - 2.0).abs() < 1e-9, "{single} {double}");
        assert!((single - 2.0 * noise.of_one(0).unwrap().variance / 6.0).abs() < 1e-12);
    }

    #[test]
    fn what_was_measured_once_says_nothing_of_noise() {
        let cells = [(0, rounds(&[1.0])), (0, rounds(&[2.0, 2.1])), (0, rounds(&[0.0, 1.0]))];
        let noise = Noise::of(&cells);
        assert_eq!(noise.between(&[0], &[1]), None);
        assert_eq!(noise.between(&[1], &[2]), None);
        assert!(noise.between(&[1], &[1]).is_some());
        assert_eq!(Noise::of(&[]).between(&[0], &[1]), None);
    }

    #[test]
    fn many_alike_cells_lend_one_another_their_freedom() {
        let mut rng = vdkit_testkit::Rng::new(5);
        let mut one = |load| {
            let even = |n: u64| (n >> 11) as f64 / (1u64 << 53) as f64;
            (load, rounds(&[0; 3].map(|_| 1.0 + 0.1 * even(rng.next_u64()))))
        };
        let many: Vec<(usize, Rounds)> = (0..30).map(|i| one(i / 3)).collect();
        let (few, all) = (Noise::of(&many[..3]), Noise::of(&many));
        let freedom = |noise: &Noise| noise.between(&[0], &[1]).unwrap().freedom;
        assert!(freedom(&all) > 2.0 * freedom(&few), "{} {}", freedom(&all), freedom(&few));
    }
}
