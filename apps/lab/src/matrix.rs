//! Groups a run's cells by the role of their axes: choices, conditions and tools.

use std::collections::BTreeSet;

use crate::axes::ALLOCATED;
pub use crate::axes::{Role, role};
use crate::lists::{distinct, grouped, numbered};
use crate::model::{Axes, Cell, Metric, Run, SURVIVED, metric, value_of};
use crate::stats::{Comparator, Gain, Rounds, Side, Summary, geometric_mean, summary};
use crate::words::label;

/// The program that the advice concerns, if there are several.
pub const OWN_TOOL: &str = "vdkit";

/// Fronts that do the same with another program: the front, the front that it corresponds to, and
/// the program's name.
const PEERS: &[(&str, &str, &str)] = &[
    ("nbd", "nbd", OWN_TOOL),
    ("nbd-qemu-nbd", "nbd", "qemu-nbd"),
    ("nbd-qsd", "nbd", "qemu-storage-daemon"),
    ("nbd-qsd-native", "nbd", "qemu-storage-daemon (aio=native)"),
    ("nbd-qsd-uring", "nbd", "qemu-storage-daemon (aio=io_uring)"),
    ("nbd-nbdkit", "nbd", "nbdkit"),
    ("fuse", "fuse", OWN_TOOL),
    ("fuse-qsd", "fuse", "qemu-storage-daemon"),
    ("guest-nbd", "guest-nbd", OWN_TOOL),
    ("guest-qemu-nbd", "guest-nbd", "qemu-nbd"),
];

/// Splits a cell's axes into what it does and which program does it. The program is named by the
/// axis `tool`, or by a front that corresponds to one of vdkit. None if all cells use the same
/// program.
pub fn program(axes: &Axes) -> (Axes, Option<String>) {
    let mut program = None;
    let mut rest = Axes::new();
    for (axis, value) in axes {
        if role(axis) == Role::Tool {
            program = Some(value.clone());
            continue;
        }
        let peer = PEERS.iter().find(|(front, ..)| axis == "front" && front == value);
        match peer {
            Some((_, front, name)) => {
                program = program.or_else(|| Some((*name).to_owned()));
                rest.push((axis.clone(), (*front).to_owned()));
            }
            None => rest.push((axis.clone(), value.clone())),
        }
    }
    (rest, program)
}

/// Whether a value is vdkit among programs. Names leave it out.
pub fn is_own_tool((axis, value): &(String, String)) -> bool {
    role(axis) == Role::Tool && value == OWN_TOOL
}

/// Whether the load ran within a guest.
pub fn in_guest(axes: &Axes) -> bool {
    value_of(axes, "front").is_some_and(|front| front.starts_with("guest-"))
}

/// The condition of [`Matrix::condition`] that says where the load ran.
pub const SEEN: &str = "seen";

/// Where the load ran, in words.
pub fn seen(axes: &Axes) -> &'static str {
    if in_guest(axes) { "in a guest" } else { "from the host" }
}

/// A run with its axes grouped by role.
#[derive(Debug)]
pub struct Matrix<'a> {
    pub run: &'a Run,
    /// The metric that decides.
    pub metric: &'a Metric,
    /// Names of axes with more than one value, in the plan's order.
    pub varying: Vec<&'a str>,
    /// Whether guests are only compared with guests: some cells ran in guests and others did not,
    /// the front is a choice, and the metric is a speed.
    pub apart: bool,
    /// Decides whether the difference between a way and its default is larger than noise.
    with_default: Comparator,
    /// The same for all other differences.
    among_others: Comparator,
}

/// One way to store a disk, with its samples over all conditions.
#[derive(Clone, Debug)]
pub struct Pick {
    /// Its values of all axes that are choices.
    pub axes: Axes,
    /// Indices of its cells in the run.
    pub cells: Vec<usize>,
    /// By round: the metric, or its geometric mean over the conditions.
    pub samples: Rounds,
    pub summary: Summary,
}

impl Pick {
    fn side(&self) -> Side<'_> {
        Side { rounds: &self.samples, cells: &self.cells }
    }
}

impl<'a> Matrix<'a> {
    /// A run with its plan's metric. None if the metric is unknown.
    pub fn new(run: &'a Run) -> Option<Self> {
        Self::of(run, metric(&run.plan.metric)?)
    }

    /// A run with another metric.
    pub fn of(run: &'a Run, metric: &'a Metric) -> Option<Self> {
        let varying = run.plan.axes.iter().map(String::as_str);
        let varying = varying.filter(|axis| values(run, axis).len() > 1).collect();
        let (with_default, among_others) = Default::default();
        let mut matrix = Self { run, metric, varying, apart: false, with_default, among_others };
        let guests = run.cells.iter().filter(|cell| in_guest(&cell.axes)).count();
        matrix.apart = guests > 0
            && guests < run.cells.len()
            && matrix.role("front") == Role::Choice
            && !matrix.is_survival();
        matrix.share_the_error();
        Some(matrix)
    }

    /// Makes the comparators. All comparisons of a page share one error probability. Half of it
    /// belongs to the comparisons with the default, on which the advice depends: they are few, and
    /// known before the run. The other half belongs to all others.
    fn share_the_error(&mut self) {
        let all = &self.run.cells;
        let loads = numbered(all.iter().map(|cell| self.condition(cell)));
        let rounds = all.iter().map(|cell| cell.rounds(self.metric.key));
        let cells: Vec<(usize, Rounds)> = loads.into_iter().zip(rounds).collect();
        let (with_default, others) = self.comparisons();
        let parts = if with_default > 0 { 2 } else { 1 };
        let tests = interim_tests(self.run);
        self.with_default = Comparator::new(&cells, parts * with_default, tests);
        self.among_others = Comparator::new(&cells, parts * others, tests);
    }

    /// Numbers of comparisons that a page can make: those with a default, and all others. The best
    /// of a group is only known afterwards, so a comparison with the best may be that of any pair.
    /// The numbers depend on what was measured, and not on the results.
    fn comparisons(&self) -> (usize, usize) {
        let cells = self.run.cells.iter().filter(|cell| !cell.values(self.metric.key).is_empty());
        let cells: Vec<&Cell> = cells.collect();
        let advised = || cells.iter().filter(|cell| self.advises(cell));
        let ways = distinct(advised().map(|cell| self.part(&cell.axes, Role::Choice)));
        // Cells under one load, and ways over all loads. Guests are compared with guests.
        let loads = grouped(advised().map(|cell| (self.condition(cell), cell.axes.clone())));
        let seen = grouped(ways.iter().map(|way| (self.apart && in_guest(way), way.clone())));
        let groups = loads.iter().map(|(_, group)| group).chain(seen.iter().map(|(_, ways)| ways));
        let others = groups.map(|group| pairs(group.len()) - self.with_defaults(group));
        let choices = self.varying.iter().filter(|axis| self.role(axis) == Role::Choice);
        let values = choices.map(|axis| pairs(self.values(axis).len()));
        // Programs are compared with vdkit.
        let peers = cells.iter().filter(|cell| !self.counts(cell)).count();
        // Disks that are empty, disks that are full, and others.
        let allocated =
            ALLOCATED.iter().filter(|(axis, value, _)| self.values(axis).contains(value));
        let prepared = 3 * allocated.count() * self.values("layout").len();
        let numbers = self.run.published.iter().filter(|number| number.metric == self.metric.key);
        let cells: Vec<Axes> = cells.iter().map(|cell| cell.axes.clone()).collect();
        (
            self.with_defaults(&cells) + self.with_defaults(&ways),
            others.chain(values).sum::<usize>() + peers + prepared + pairs(numbers.count()),
        )
    }

    /// How many of these cells or ways have their default among them, and are not the default.
    fn with_defaults(&self, all: &[Axes]) -> usize {
        let has = |axes: &&Axes| {
            let wanted = with_baseline(axes, self.run).filter(|wanted| !same(wanted, axes));
            wanted.is_some_and(|wanted| all.iter().any(|other| same(other, &wanted)))
        };
        all.iter().filter(has).count()
    }

    /// Whether the ways are compared by survival, which has no ratio and no noise.
    pub fn is_survival(&self) -> bool {
        self.metric.key == SURVIVED
    }

    /// The values of an axis, in the order of the cells.
    pub fn values(&self, axis: &str) -> Vec<&'a str> {
        values(self.run, axis)
    }

    /// The role of an axis in this run's plan.
    pub fn role(&self, axis: &str) -> Role {
        match role(axis) {
            Role::Choice if self.run.plan.conditions.iter().any(|name| name == axis) => {
                Role::Condition
            }
            role => role,
        }
    }

    /// The axes that have this role.
    pub fn part(&self, axes: &Axes, wanted: Role) -> Axes {
        axes.iter().filter(|(axis, _)| self.role(axis) == wanted).cloned().collect()
    }

    /// Axes without those that are the same in all cells.
    pub fn short(&self, axes: &Axes) -> Axes {
        let short: Axes = axes
            .iter()
            .filter(|(axis, _)| self.varying.contains(&axis.as_str()))
            .cloned()
            .collect();
        if short.is_empty() { axes.clone() } else { short }
    }

    /// A way's or a cell's name for people.
    pub fn name(&self, axes: &Axes) -> String {
        label(&self.short(axes))
    }

    /// The axes of a cell that vary, without its load.
    pub fn way(&self, cell: &Cell) -> Axes {
        let (short, load) = (self.short(&cell.axes), self.load(cell));
        let way: Axes = short.into_iter().filter(|entry| !load.contains(entry)).collect();
        if way.is_empty() { cell.axes.clone() } else { way }
    }

    /// Summary of a cell's samples, if it has any.
    pub fn summary(&self, cell: &Cell) -> Option<Summary> {
        summary(&cell.values(self.metric.key))
    }

    /// The cell that has the plan's baseline values and otherwise the same axes.
    pub fn base_of(&self, cell: &Cell) -> Option<&'a Cell> {
        let wanted = with_baseline(&cell.axes, self.run)?;
        self.run.cells.iter().find(|other| same(&other.axes, &wanted))
    }

    /// Whether a cell has the plan's baseline values.
    pub fn is_default(&self, cell: &Cell) -> bool {
        self.base_of(cell).is_some_and(|base| base.key == cell.key)
    }

    /// Compares a cell with its baseline. None for the baseline itself.
    pub fn gain(&self, cell: &Cell) -> Option<Gain> {
        let base = self.base_of(cell).filter(|base| base.key != cell.key)?;
        self.between(cell, base)
    }

    /// Compares one cell with another.
    pub fn between(&self, cell: &Cell, base: &Cell) -> Option<Gain> {
        let place = |wanted: &Cell| self.run.cells.iter().position(|cell| cell.key == wanted.key);
        let (own, other) = (cell.rounds(self.metric.key), base.rounds(self.metric.key));
        let (at, base_at) = (place(cell)?, place(base)?);
        let own = (&cell.axes, Side { rounds: &own, cells: &[at] });
        self.compare(own, (&base.axes, Side { rounds: &other, cells: &[base_at] }))
    }

    /// Compares two cells or ways. None for survival, which has no ratio.
    fn compare(&self, own: (&Axes, Side<'_>), base: (&Axes, Side<'_>)) -> Option<Gain> {
        let defaults = |one: &Axes, other: &Axes| {
            with_baseline(one, self.run).is_some_and(|wanted| same(&wanted, other))
        };
        let comparator = match defaults(own.0, base.0) || defaults(base.0, own.0) {
            true => &self.with_default,
            false => &self.among_others,
        };
        let gain = comparator.gain(own.1, base.1, self.metric.better);
        gain.filter(|_| !self.is_survival())
    }

    /// Whether the advice concerns the cell. If several programs did the same, the advice only
    /// concerns vdkit.
    pub fn counts(&self, cell: &Cell) -> bool {
        let (same, name) = program(&cell.axes);
        if name.is_none_or(|name| name == OWN_TOOL) {
            return true;
        }
        !self.run.cells.iter().any(|other| {
            let (thing, name) = program(&other.axes);
            name.as_deref() == Some(OWN_TOOL) && thing == same
        })
    }

    /// Whether a cell contributes to the advice: cells that [`Matrix::counts`], and, if the front
    /// is not a choice, cells of other programs' fronts. An advised layout must be good whichever
    /// program serves the disk, above all with QEMU.
    pub fn advises(&self, cell: &Cell) -> bool {
        let by_front = self.role("front") == Role::Condition;
        self.counts(cell) || (by_front && self.part(&cell.axes, Role::Tool).is_empty())
    }

    /// Every way that was measured under all conditions, best first.
    pub fn picks(&self) -> Vec<Pick> {
        self.picks_where(|_| true)
    }

    /// As [`Matrix::picks`], for the cells that `wanted` accepts. Some ways are impossible under
    /// some conditions: a program that reads files cannot use a qcow2 image as a disk. Such ways
    /// are compared under the conditions that they share with others. A way that failed under a
    /// shared condition is left out.
    pub fn picks_where(&self, wanted: impl Fn(&Cell) -> bool) -> Vec<Pick> {
        let cells = self.run.cells.iter().enumerate();
        // Survival has no ratio to a default. So the default takes part, whatever its program.
        let default = |cell: &Cell| self.is_survival() && self.is_default(cell);
        let cells = cells.filter(|(_, cell)| (self.advises(cell) || default(cell)) && wanted(cell));
        let groups = grouped(cells.map(|(i, cell)| (self.part(&cell.axes, Role::Choice), i)));
        let shared = self.shared_conditions(&groups);
        let measured = |i: &usize| self.summary(&self.run.cells[*i]).is_some();
        let condition = |i: &usize| self.condition(&self.run.cells[*i]);
        let mut picks = Vec::new();
        for (axes, mut cells) in groups {
            cells.retain(|i| measured(i) && shared.contains(&condition(i)));
            if shared.iter().all(|wanted| cells.iter().any(|i| condition(i) == *wanted)) {
                picks.extend(self.pick(axes, cells));
            }
        }
        picks.sort_by(|a, b| {
            let order = self.metric.best_first(a.summary.median, b.summary.median);
            // Among equals (such as survivors), the way with fewer programs comes first.
            order.then(self.daemons(a).total_cmp(&self.daemons(b)))
        });
        picks
    }

    /// Number of programs that a way needs besides the guest, if it was recorded.
    fn daemons(&self, pick: &Pick) -> f64 {
        let cells = pick.cells.iter().map(|i| &self.run.cells[*i]);
        cells.flat_map(|cell| cell.values("daemons")).fold(0.0, f64::max)
    }

    /// The conditions of a cell. Whether its load ran in a guest is one of them: the guest's kernel
    /// and processor slow down every disk, so guests are compared with guests.
    pub fn condition(&self, cell: &Cell) -> Axes {
        let mut condition = self.part(&cell.axes, Role::Condition);
        if self.apart {
            condition.push((SEEN.to_owned(), seen(&cell.axes).to_owned()));
        }
        condition
    }

    /// The conditions without axes that are the same in all cells.
    pub fn load(&self, cell: &Cell) -> Axes {
        let told = |axis: &str| axis == SEEN || self.varying.contains(&axis);
        self.condition(cell).into_iter().filter(|(axis, _)| told(axis)).collect()
    }

    /// The set of conditions that allows most comparisons: the number of conditions times the
    /// number of ways that have all of them is largest.
    fn shared_conditions(&self, groups: &[(Axes, Vec<usize>)]) -> Vec<Axes> {
        let condition = |i: &usize| self.condition(&self.run.cells[*i]);
        let sets: Vec<Vec<Axes>> =
            groups.iter().map(|(_, cells)| distinct(cells.iter().map(condition))).collect();
        let has = |all: &[Axes], part: &[Axes]| part.iter().all(|one| all.contains(one));
        let worth = |set: &Vec<Axes>| sets.iter().filter(|all| has(all, set)).count() * set.len();
        // Among equals, prefer the larger set: more conditions and fewer ways. Then prefer
        // conditions without a guest, which show more of the disk.
        let in_host = |set: &Vec<Axes>| {
            let host = (SEEN.to_owned(), seen(&Axes::new()).to_owned());
            set.iter().all(|condition| condition.contains(&host))
        };
        let best = sets.iter().max_by_key(|set| (worth(set), set.len(), in_host(set)));
        best.cloned().unwrap_or_default()
    }

    /// Combines the samples of several cells, round by round.
    pub fn pick(&self, axes: Axes, cells: Vec<usize>) -> Option<Pick> {
        let samples = self.together(&cells);
        let values: Vec<f64> = samples.iter().map(|(_, value)| *value).collect();
        Some(Pick { axes, summary: summary(&values)?, samples, cells })
    }

    /// By round: the value of one cell, or the geometric mean of several cells that all have the
    /// round. The mean is 0 if a value is 0, as for a load that did nothing: it has no ratio to
    /// another mean, and other loads do not make up for it.
    fn together(&self, cells: &[usize]) -> Rounds {
        let of = |i: &usize| &self.run.cells[*i];
        let rounds: BTreeSet<u32> =
            cells.iter().flat_map(|i| &of(i).samples).map(|sample| sample.round).collect();
        let value = |i: &usize, round: u32| {
            let sample = of(i).samples.iter().find(|sample| sample.round == round)?;
            sample.values.get(self.metric.key).copied()
        };
        let mean = |round: u32| {
            let values: Option<Vec<f64>> = cells.iter().map(|i| value(i, round)).collect();
            Some(match values?.as_slice() {
                [one] => *one,
                more => geometric_mean(more).unwrap_or(0.0),
            })
        };
        rounds.into_iter().filter_map(|round| Some((round, mean(round)?))).collect()
    }

    /// Compares one way with another.
    pub fn against(&self, pick: &Pick, base: &Pick) -> Option<Gain> {
        self.compare((&pick.axes, pick.side()), (&base.axes, base.side()))
    }

    /// How many of the plan's baseline values a way has.
    pub fn defaults(&self, axes: &Axes) -> usize {
        self.run.plan.baseline.iter().flatten().filter(|entry| axes.contains(entry)).count()
    }

    /// The way among `picks` that has the plan's baseline values and otherwise the same axes.
    pub fn base<'p>(&self, pick: &Pick, picks: &'p [Pick]) -> Option<&'p Pick> {
        let wanted = with_baseline(&pick.axes, self.run)?;
        picks.iter().find(|other| same(&other.axes, &wanted))
    }
}

/// How many times a run has tested whether it may stop: once after its plan's rounds, and once
/// after each further round.
fn interim_tests(run: &Run) -> usize {
    let rounds = run.cells.iter().map(|cell| cell.samples.len()).max().unwrap_or(0);
    let planned = run.plan.effort.map_or(rounds, |effort| effort.rounds as usize);
    rounds.saturating_sub(planned) + 1
}

/// The axes with the plan's baseline values in place of their own, if the baseline names any of
/// them. The program stays the same, because another program's default is no measure of a layout.
fn with_baseline(axes: &Axes, run: &Run) -> Option<Axes> {
    let baseline = run.plan.baseline.as_ref()?;
    let mut named = false;
    let changed = axes
        .iter()
        .map(|(axis, value)| match baseline.iter().find(|(name, _)| name == axis) {
            Some((_, base)) if role(axis) != Role::Tool => {
                named = true;
                (axis.clone(), base.clone())
            }
            _ => (axis.clone(), value.clone()),
        })
        .collect();
    named.then_some(changed)
}

/// Number of pairs of so many things.
fn pairs(count: usize) -> usize {
    count * count.saturating_sub(1) / 2
}

/// Whether two sets of axes are equal in any order.
fn same(a: &Axes, b: &Axes) -> bool {
    a.len() == b.len() && a.iter().all(|entry| b.contains(entry))
}

/// The values of an axis, in the order of the cells.
pub fn values<'a>(run: &'a Run, axis: &str) -> Vec<&'a str> {
    distinct(run.cells.iter().filter_map(|cell| cell.axis(axis)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tests::{measured, run_of};

    /// Each cache mode at each front, with three rounds that vary by 1 %.
    fn modes(fronts: &[&str]) -> Run {
        let cell = |cache: &str, front: &str, at: usize| Cell {
            key: format!("{cache} {front}"),
            ..measured(
                &[("cache", cache), ("front", front)],
                "iops",
                &[0, 1, 2].map(|round| 100.0 + ((round + at) % 3) as f64),
            )
        };
        let caches = ["none", "writeback", "writethrough", "directsync"];
        let each = caches.iter().enumerate();
        let cells = each.flat_map(|(at, cache)| fronts.iter().map(move |f| cell(cache, f, at)));
        run_of("iops", &["cache", "front"], Some(&[("cache", "writeback")]), cells.collect())
    }

    /// Guests and the host, which are not compared, once had a share of the error for each pair.
    #[test]
    fn comparisons_that_no_page_makes_have_no_share() {
        let count = |fronts: &[&str]| Matrix::new(&modes(fronts)).unwrap().comparisons();
        // Three cells and three ways with their default. Others: three pairs of cells, of ways, and
        // six of cache modes.
        assert_eq!(count(&["nbd"]), (6, 12));
        // Fronts add their own pairs, and those between front and front; six of cache modes and one
        // of fronts.
        assert_eq!(count(&["nbd", "fuse"]), (12, 2 * (28 - 6) + 7));
        assert_eq!(count(&["nbd", "guest-virtio"]), (12, 4 * (6 - 3) + 7));
        // The other program's cells have their default, and are compared with vdkit's.
        assert_eq!(count(&["nbd", "nbd-qemu-nbd"]), (9, 6 + 7 + 4));
    }

    #[test]
    fn each_server_of_another_program_is_known_as_one() {
        use crate::front::{FRONTS, Kind, Server};
        for front in FRONTS {
            let axes = crate::model::axes_of(&[("front", front.name)]);
            let (Kind::Nbd(server) | Kind::Fuse(server)) = front.kind else { continue };
            let own = program(&axes).1.as_deref() == Some(OWN_TOOL);
            assert_eq!(own, server == Server::Vdkit, "{}", front.name);
            assert!(program(&axes).1.is_some(), "{}", front.name);
        }
    }

    #[test]
    fn a_comparison_with_the_default_is_sharper_than_others() {
        let run = modes(&["nbd", "fuse", "file", "in-process"]);
        let matrix = Matrix::new(&run).unwrap();
        let width = |one: &str, two: &str| {
            let cell = |key: &str| run.cells.iter().find(|cell| cell.key == key).unwrap();
            let gain = matrix.between(cell(one), cell(two)).unwrap();
            gain.interval.high / gain.interval.low
        };
        let default = width("none nbd", "writeback nbd");
        assert!((default / width("writeback nbd", "none nbd") - 1.0).abs() < 1e-9);
        assert!(default < width("none nbd", "none fuse"));
    }

    /// A run tests its results after its plan's rounds, and after each further one.
    #[test]
    fn each_look_at_the_results_counts() {
        let mut run = modes(&["nbd"]);
        assert_eq!(interim_tests(&run), 1);
        let effort = crate::plan::Effort { rounds: 3, seconds: 1.0, disk: 1, bytes: 1 };
        run.plan.effort = Some(effort);
        assert_eq!(interim_tests(&run), 1);
        run.plan.effort = Some(crate::plan::Effort { rounds: 1, ..effort });
        assert_eq!(interim_tests(&run), 3);
    }

    #[test]
    fn a_full_pool_advises_no_daemon_where_a_guest_came_through_without_one() {
        let cell = |front: &str, daemons: f64, survived: f64| {
            let mut cell = measured(&[("front", front)], SURVIVED, &[survived]);
            cell.samples[0].values.insert("daemons".to_owned(), daemons);
            cell
        };
        let cells = vec![
            cell("guest-vhost-user", 1.0, 1.0),
            cell("nbd", 1.0, 1.0),
            cell("guest-virtio-report", 0.0, 0.0),
            cell("guest-virtio", 0.0, 1.0),
        ];
        let run = run_of(SURVIVED, &["front"], None, cells);
        let picks = Matrix::new(&run).unwrap().picks();
        let order: Vec<&str> = picks.iter().map(|pick| pick.axes[0].1.as_str()).collect();
        assert_eq!(order, ["guest-virtio", "guest-vhost-user", "nbd", "guest-virtio-report"]);
    }
}
