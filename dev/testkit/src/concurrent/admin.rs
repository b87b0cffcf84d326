//! What an administrator does beside the clients: snapshots, bitmaps, other sizes.

use std::collections::HashSet;

use vdkit_block::{Monitor, NewBitmap, NewSnapshot, Result};

use super::clients::{Alone, Span, Stage};
use super::history::{Answer, History, Log, Moment, SECTOR, Seen, What, find_content};
use super::shape::Shape;
use crate::Rng;

/// What is done beside the clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chores {
    /// Snapshots are taken and deleted.
    pub snapshots: bool,
    /// Bitmaps are added, cleared and removed.
    pub bitmaps: bool,
    /// The disk gets other sizes.
    pub sizes: bool,
}

/// The bitmap that is there from the beginning.
pub const STEADY: &str = "steady";
/// The bitmap that comes and goes.
const BRIEF: &str = "brief";
/// Snapshots that are kept at most.
const SNAPSHOTS_MAX: usize = 3;

/// A snapshot.
#[derive(Clone, Debug)]
struct Taken {
    name: String,
    span: Span,
    /// It was certainly taken.
    done: bool,
    /// When it was deleted, and whether for sure.
    deleted: Option<(Span, bool)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    Added,
    Cleared,
    Removed,
}

/// What an administrator did.
#[derive(Clone, Debug, Default)]
pub struct Deeds {
    /// Changes of the disk and of its size.
    pub log: Log,
    taken: Vec<Taken>,
    /// What was done with the bitmap that comes and goes, and whether for sure.
    marks: Vec<(Mark, Span, bool)>,
}

/// An administrator at work.
pub struct Admin<'a> {
    /// Where the clients are.
    pub stage: &'a Stage<'a>,
    /// The disk that they use.
    pub front: &'a Alone,
    /// What it is made of.
    pub shape: &'a Shape,
}

impl Admin<'_> {
    /// Does so many chores of these kinds.
    pub fn work(&self, chores: Chores, calls: u64, rng: &mut Rng) -> Deeds {
        let mut deeds = Deeds::default();
        let mut all: Vec<fn(&Self, &mut Deeds, u64, &mut Rng)> = Vec::new();
        if chores.snapshots {
            all.push(Self::snapshot);
        }
        if chores.bitmaps {
            all.push(Self::bitmap);
        }
        if chores.sizes {
            all.push(Self::resize);
        }
        for call in 0..calls {
            if all.is_empty() {
                break;
            }
            let chore = all[rng.below(all.len() as u64) as usize];
            chore(self, &mut deeds, call, rng);
            std::thread::yield_now();
        }
        deeds
    }

    /// Whether a call was answered well; only where faults are about may it not be.
    fn done<T>(&self, what: &str, answer: Result<T>) -> bool {
        match answer {
            Ok(_) => true,
            Err(error) => {
                assert!(self.stage.faults, "{what}: {error}");
                false
            }
        }
    }

    fn snapshot(&self, deeds: &mut Deeds, call: u64, rng: &mut Rng) {
        let disk = &self.front.disk;
        let all = disk.top().snapshots().expect("a format with snapshots");
        let there: Vec<usize> =
            (0..deeds.taken.len()).filter(|n| deeds.taken[*n].deleted.is_none()).collect();
        if there.len() >= SNAPSHOTS_MAX || (!there.is_empty() && rng.chance(1, 3)) {
            let taken = &mut deeds.taken[there[rng.below(there.len() as u64) as usize]];
            let delete = || all.delete(&taken.name, &Monitor::default());
            let (answer, span) = self.stage.time(delete);
            // One that was not taken cannot be deleted.
            let done = !taken.done || self.done("deleting a snapshot", answer);
            taken.deleted = Some((span, done && taken.done));
        } else {
            let name = format!("s{call}");
            let new = NewSnapshot { name: name.clone(), ..NewSnapshot::default() };
            let (answer, span) = self.stage.time(|| all.create(&new, &Monitor::default()));
            let done = self.done("taking a snapshot", answer);
            deeds.taken.push(Taken { name, span, done, deleted: None });
        }
    }

    fn bitmap(&self, deeds: &mut Deeds, _call: u64, rng: &mut Rng) {
        let disk = &self.front.disk;
        let all = disk.top().bitmaps().expect("a format with bitmaps");
        let there = deeds.marks.last().is_some_and(|(mark, _, _)| *mark != Mark::Removed);
        let (mark, (answer, span)) = if !there {
            let new = NewBitmap { name: BRIEF, granularity: Some(512), enabled: true };
            (Mark::Added, self.stage.time(|| all.add(&new)))
        } else if rng.chance(1, 3) {
            (Mark::Removed, self.stage.time(|| all.remove(BRIEF)))
        } else {
            (Mark::Cleared, self.stage.time(|| all.clear(BRIEF)))
        };
        let done = self.done(&format!("a bitmap {mark:?}"), answer);
        if done || !self.stage.faults {
            deeds.marks.push((mark, span, done));
        }
    }

    /// Smaller or larger, mostly so that the end lies within the window.
    fn resize(&self, deeds: &mut Deeds, _call: u64, rng: &mut Rng) {
        let disk = &self.front.disk;
        let (old, windows) = (disk.guest_bytes(), self.shape.windows());
        let last = &windows[windows.len() - 1];
        let (middle, end) = ((windows[0].start + last.end) / 2, last.end);
        let new = match rng.below(3) {
            0 => self.shape.guest_bytes,
            _ => rng.within(middle..end + 16) / 8 * 8 * SECTOR,
        };
        let resize = || self.front.alone(|disk| disk.resize(new));
        let (answer, span) = self.stage.time(resize);
        let answer = match self.done("another size", answer) {
            true if self.stage.cache.write_durable() => Answer::Durable,
            true => Answer::Done,
            false => Answer::Failed,
        };
        // What was cut off is gone, and what is new is zero.
        let range = old.min(new) / SECTOR..old.max(new).div_ceil(SECTOR);
        let log = &mut deeds.log;
        log.changes.push(span.change(What::Size(new), 0, 1, answer));
        for window in windows {
            let (first, last) = (range.start.max(window.start), range.end.min(window.end));
            if first < last {
                log.changes.push(span.change(What::Passed, first, last - first, answer));
            }
        }
        if rng.chance(1, 3) {
            self.stage.flush(log);
        }
    }
}

impl Deeds {
    /// The snapshots of a survivor are those that were acknowledged, and each holds what the disk
    /// held when it was taken.
    ///
    /// # Errors
    /// What is wrong.
    pub fn judge_snapshots(
        &self,
        shape: &Shape,
        disk: &vdkit_chain::Disk,
        history: &History,
        moment: &Moment<'_>,
    ) -> std::result::Result<(), String> {
        if self.taken.is_empty() {
            return Ok(());
        }
        let text = |error: vdkit_block::Error| error.to_string();
        let all = disk.top().snapshots().ok_or("no snapshots")?;
        let names: HashSet<String> =
            all.list().map_err(text)?.into_iter().map(|snapshot| snapshot.name).collect();
        let ticks = moment.ticks();
        for taken in &self.taken {
            let Taken { name, span, done, deleted } = taken;
            let there = names.contains(name);
            let must = *done
                && span.ticks_after <= ticks
                && deleted.is_none_or(|(span, _)| span.ticks_before > ticks);
            let must_not = span.ticks_before > ticks
                || deleted.is_some_and(|(span, done)| done && span.ticks_after <= ticks);
            if (must && !there) || (must_not && there) {
                return Err(format!("snapshot {name} is there: {there}, after {taken:?}"));
            }
            if there {
                let view = shape.view(all.view(name).map_err(text)?);
                for (sector, bytes) in shape.read_windows(&view).map_err(text)? {
                    let content = find_content(sector, &bytes, &history.first(sector));
                    let content = content.ok_or(format!("snapshot {name}: noise at {sector}"))?;
                    let Span { begin, end, .. } = *span;
                    let end = if *done { end } else { u64::MAX };
                    let seen = Seen { sector, content, begin, end };
                    history.try_judge(&seen).map_err(|e| format!("snapshot {name}: {e}"))?;
                }
            }
        }
        Ok(())
    }

    /// The bitmaps of a survivor are those that were acknowledged, and mark every durable change
    /// since they were added or cleared.
    ///
    /// # Errors
    /// What is wrong.
    pub fn judge_bitmaps(
        &self,
        disk: &vdkit_chain::Disk,
        history: &History,
        moment: &Moment<'_>,
    ) -> std::result::Result<(), String> {
        let text = |error: vdkit_block::Error| error.to_string();
        let all = disk.top().bitmaps().ok_or("no bitmaps")?;
        let list = all.list().map_err(text)?;
        let ticks = moment.ticks();
        let last = self.marks.iter().rev().find(|(_, span, _)| span.ticks_after <= ticks);
        let under_way = self
            .marks
            .iter()
            .any(|(_, span, _)| span.ticks_before <= ticks && span.ticks_after > ticks);
        let mut since = vec![(STEADY, 0)];
        if !under_way {
            let there = list.iter().any(|status| status.info.name == BRIEF);
            match last {
                Some((Mark::Added | Mark::Cleared, span, _)) => since.push((BRIEF, span.end)),
                _ if there => return Err(format!("{BRIEF} is there")),
                _ => {}
            }
        }
        for (name, since) in since {
            let status = list.iter().find(|status| status.info.name == name);
            let status = status.ok_or(format!("bitmap {name} is not there"))?;
            if status.info.in_use || !status.info.enabled {
                return Err(format!("bitmap {name} is {status:?}"));
            }
            let mut runs = Vec::new();
            let mut add = |run| {
                runs.push(run);
                Ok(())
            };
            all.for_each_dirty(name, &mut add).map_err(text)?;
            let marks = |at: u64| runs.iter().any(|run| run.start <= at && at + SECTOR <= run.end);
            let unmarked = history.changes().find(|change| {
                change.begin > since
                    && change.what != What::Discard
                    && moment.durable(change)
                    && !(change.first..change.first + change.count)
                        .all(|sector| marks(sector * SECTOR))
            });
            if let Some(change) = unmarked {
                return Err(format!("bitmap {name}, since {since}, does not mark {change:?}"));
            }
        }
        Ok(())
    }
}
