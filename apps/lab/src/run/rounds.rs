//! Decides how many rounds a run measures: until comparisons are decided, within its limits.

use super::Request;
use crate::model::{Run, SURVIVED};
use crate::plan::Plan;
use crate::stats::ROUNDS_MIN;
use crate::verdict::is_settled;

/// Without a time limit, a run measures at most this many times its plan's rounds.
const MORE: u32 = 2;
/// Largest number of rounds with a time limit.
const ROUNDS_MAX: u32 = 1000;

/// The limits on the number of rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rounds {
    /// Rounds that are measured in any case.
    pub(super) least: u32,
    /// Largest number of rounds.
    pub(super) most: u32,
    /// The user's time limit in seconds.
    seconds: Option<u64>,
}

impl Rounds {
    /// The limits for a request. A plan with one or two rounds gets no additional ones, because
    /// it asks for no decision. Neither does a plan that measures survival, which does not depend on
    /// noise.
    pub(super) fn of(request: &Request, plan: &Plan) -> Self {
        let planned = plan.effort(request.quick).rounds;
        let fixed = |rounds| Self { least: rounds, most: rounds, seconds: None };
        match (request.rounds, request.seconds) {
            (Some(rounds), _) => fixed(rounds),
            _ if plan.metric == SURVIVED => fixed(planned),
            (None, None) if (planned as usize) < ROUNDS_MIN => fixed(planned),
            (None, None) => Self { least: planned, most: planned * MORE, seconds: None },
            (None, seconds) => Self { least: planned, most: ROUNDS_MAX, seconds },
        }
    }

    /// Whether round `round` (from 0) is measured, given the rounds before it. A resumed run gets
    /// the same answer.
    pub(super) fn wants(&self, round: u32, run: &Run) -> bool {
        // A round that was begun was wanted. Its samples, which decided nothing then, must not change
        // that when the run is resumed.
        let begun = run.cells.iter().flat_map(|cell| &cell.samples).any(|s| s.round >= round);
        if round < self.least || begun {
            return true;
        }
        if round >= self.most || is_settled(run) {
            return false;
        }
        let samples = run.cells.iter().flat_map(|cell| &cell.samples);
        let so_far: f64 = samples.map(|sample| sample.seconds).sum();
        // One more round takes the mean time of those before it.
        let after = so_far * (1.0 + 1.0 / f64::from(round.max(1)));
        self.seconds.is_none_or(|given| after <= given as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tests::{measured, run_of};

    fn rounds(change: impl FnOnce(&mut Request)) -> Rounds {
        let mut request = Request { quick: true, ..Request::default() };
        change(&mut request);
        Rounds::of(&request, &Plan::named("install").unwrap())
    }

    /// Two layouts. A round of both takes ten seconds.
    fn run(raw: &[f64], qcow2: &[f64]) -> Run {
        let cells = [("raw", raw), ("qcow2", qcow2)].map(|(layout, values)| {
            let mut cell = measured(&[("layout", layout)], "iops", values);
            cell.samples.iter_mut().for_each(|sample| sample.seconds = 5.0);
            cell
        });
        run_of("iops", &["layout"], Some(&[("layout", "qcow2")]), cells.into())
    }

    #[test]
    fn a_run_measures_three_rounds_and_more_where_they_do_not_tell() {
        let all = rounds(|_| {});
        assert_eq!((all.least, all.most), (3, 6));
        let noisy = run(&[100.0, 150.0, 90.0], &[120.0, 80.0, 130.0]);
        let clear = run(&[100.0, 101.0, 99.0], &[200.0, 202.0, 198.0]);
        assert!(all.wants(2, &clear) && !all.wants(3, &clear), "it is told");
        assert!(all.wants(3, &noisy) && all.wants(5, &noisy) && !all.wants(6, &noisy));
    }

    #[test]
    fn a_time_that_was_given_is_used_and_no_more() {
        let noisy = run(&[100.0, 150.0, 90.0], &[120.0, 80.0, 130.0]);
        let given = |seconds| rounds(|request| request.seconds = Some(seconds));
        // Three rounds took 30 s; a fourth takes 10 s more.
        assert!(given(41).wants(3, &noisy) && !given(39).wants(3, &noisy));
        assert_eq!(given(41).most, ROUNDS_MAX);
        // A resumed run gets the same answer, although it knows later rounds.
        let later = run(&[100.0, 150.0, 90.0, 95.0, 99.0], &[120.0, 80.0, 130.0, 90.0, 95.0]);
        assert!(given(41).wants(3, &later));
    }

    /// A resumed run once decided by the samples of the interrupted round too, and ended within it.
    #[test]
    fn a_round_that_was_begun_is_measured_to_its_end() {
        let all = rounds(|_| {});
        // Three rounds left it open, and the fourth one settles it.
        let (raw, qcow2) = ([100.0, 101.0, 99.0, 100.0], [200.0, 202.0, 198.0, 200.0]);
        assert!(!all.wants(3, &run(&raw[..3], &qcow2[..3])));
        assert!(all.wants(3, &run(&raw[..3], &qcow2)));
    }

    #[test]
    fn as_many_as_the_user_says_and_survival_once() {
        let one = rounds(|request| request.rounds = Some(1));
        assert_eq!((one.least, one.most), (1, 1));
        let plan = Plan::named("nospace").unwrap();
        let survival = Rounds::of(&Request { quick: true, ..Request::default() }, &plan);
        assert_eq!((survival.least, survival.most), (plan.quick.rounds, plan.quick.rounds));
        let full = Rounds::of(&Request::default(), &plan);
        assert_eq!((full.least, full.most), (3, 3), "survival is no matter of noise");
        // Two rounds decide nothing, so a plan of two asks for no decision.
        let mut two = Plan::named("install").unwrap();
        two.quick.rounds = 2;
        let two = Rounds::of(&Request { quick: true, ..Request::default() }, &two);
        assert_eq!((two.least, two.most), (2, 2));
    }
}
