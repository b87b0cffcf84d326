//! Detects other activity on the machine while a cell is measured.

use std::fs;
use std::time::{Duration, Instant};

/// System counters at one moment.
#[derive(Clone, Debug)]
pub struct Moment {
    at: Instant,
    /// Time during which a task waited for processor, memory or storage, in microseconds.
    pressure_us: [Option<u64>; 3],
    /// How often a processor was throttled because of heat.
    throttled: u64,
    /// Processor time that the hypervisor gave to others, and all processor time.
    steal: Option<(u64, u64)>,
}

/// Files in `/proc/pressure` (the kernel's Documentation/accounting/psi.rst).
const PRESSURES: [&str; 3] = ["cpu", "memory", "io"];

/// Shortest processor time over which steal is reported, in ticks of 1/100 s: two seconds of one
/// processor.
const STEAL_TICKS: u64 = 200;

fn pressure(name: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/pressure/{name}")).ok()?;
    let some = text.lines().find(|line| line.starts_with("some"))?;
    some.rsplit_once("total=")?.1.trim().parse().ok()
}

fn throttled() -> u64 {
    let folders = fs::read_dir("/sys/devices/system/cpu").into_iter().flatten().flatten();
    let count = |file: std::path::PathBuf| {
        fs::read_to_string(file).ok().and_then(|text| text.trim().parse::<u64>().ok())
    };
    let files = folders.map(|entry| entry.path().join("thermal_throttle/core_throttle_count"));
    files.filter_map(count).sum()
}

/// The first eight numbers of the line for all processors: user, nice, system, idle, iowait, irq,
/// softirq and steal, in ticks (proc_stat(5)).
fn ticks(text: &str) -> Option<[u64; 8]> {
    let line = text.lines().find(|line| line.starts_with("cpu "))?;
    let ticks: Vec<u64> = line.split_whitespace().skip(1).filter_map(|n| n.parse().ok()).collect();
    ticks.first_chunk().copied()
}

fn steal(text: &str) -> Option<(u64, u64)> {
    let ticks = ticks(text)?;
    Some((ticks[7], ticks.iter().sum()))
}

/// The part of the time between two states of `/proc/stat` in which processors worked, or would have
/// but for storage.
fn used(before: &str, after: &str) -> Option<f64> {
    let ([before, after], idle) = ([ticks(before)?, ticks(after)?], 3);
    let passed = |at: usize| after[at].saturating_sub(before[at]);
    let all: u64 = (0..8).map(passed).sum();
    (all > 0).then(|| 1.0 - passed(idle) as f64 / all as f64)
}

impl Moment {
    /// Reads the counters.
    pub fn now() -> Self {
        Self {
            at: Instant::now(),
            pressure_us: PRESSURES.map(pressure),
            throttled: throttled(),
            steal: steal(&fs::read_to_string("/proc/stat").unwrap_or_default()),
        }
    }

    /// Disturbances between two moments: a kind and a sentence each.
    pub fn until(&self, later: &Self) -> Vec<(&'static str, String)> {
        let mut all = Vec::new();
        if later.throttled > self.throttled {
            let text = "the processor was throttled because of its temperature".to_owned();
            all.push(("throttled", text));
        }
        let seconds = later.at.duration_since(self.at).as_secs_f64();
        if let (Some(before), Some(after)) = (self.pressure_us[1], later.pressure_us[1]) {
            let part = after.saturating_sub(before) as f64 / 1e6 / seconds.max(1e-3);
            // No load here needs much memory, so waiting for memory is a disturbance.
            if part > 0.05 {
                let text = format!("programs waited for memory {:.0} % of the time", part * 100.0);
                all.push(("pressure", text));
            }
        }
        if let (Some(before), Some(after)) = (self.steal, later.steal) {
            let (stolen, ticks) =
                (after.0.saturating_sub(before.0), after.1.saturating_sub(before.1));
            // Over a short time the kernel's ticks are too coarse.
            if stolen * 20 > ticks && ticks >= STEAL_TICKS {
                let part = stolen as f64 / ticks as f64;
                let text = format!(
                    "the hypervisor gave {:.0} % of this machine's processor time to others (steal)",
                    part * 100.0
                );
                all.push(("pressure", text));
            }
        }
        all
    }
}

/// Part of all processors above which the machine is busy.
const BUSY: f64 = 0.5;
/// How long their use is watched.
const WATCHED: Duration = Duration::from_millis(500);

/// A sentence, if the machine is busy before the run starts anything.
pub fn busy(cores: u32) -> Option<String> {
    let text = fs::read_to_string("/proc/loadavg").ok()?;
    let load = text.split_whitespace().next()?.parse().ok()?;
    is_busy(load, cores, || {
        let stat = || fs::read_to_string("/proc/stat").unwrap_or_default();
        let before = stat();
        std::thread::sleep(WATCHED);
        used(&before, &stat()).unwrap_or(1.0)
    })
}

/// As [`busy`], by the load average of a minute and, if that is high, by the part of all processors
/// that is used now: what raised the average may have ended, as another run of the lab.
fn is_busy(load: f64, cores: u32, used_now: impl FnOnce() -> f64) -> Option<String> {
    if load <= f64::from(cores) * BUSY {
        return None;
    }
    let used = used_now();
    (used > BUSY).then(|| {
        format!(
            "the machine was busy at the start: load average {load:.1} on {cores} processors, {:.0} % of \
             their time used",
            used * 100.0
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disturbances_are_told_and_quiet_is_quiet() {
        let quiet = Moment {
            at: Instant::now(),
            pressure_us: [Some(0); 3],
            throttled: 3,
            steal: Some((10, 1000)),
        };
        let later = |change: fn(&mut Moment)| {
            let mut moment = quiet.clone();
            moment.at += Duration::from_secs(10);
            change(&mut moment);
            quiet.until(&moment).into_iter().map(|(kind, _)| kind).collect::<Vec<_>>()
        };
        assert_eq!(later(|_| {}), [""; 0]);
        assert_eq!(later(|m| m.throttled = 4), ["throttled"]);
        // Waiting for storage is part of a load.
        assert_eq!(later(|m| m.pressure_us = [Some(0), Some(0), Some(9_000_000)]), [""; 0]);
        assert_eq!(later(|m| m.pressure_us[1] = Some(1_000_000)), ["pressure"]);
        assert_eq!(later(|m| m.steal = Some((110, 2000))), ["pressure"]);
        assert_eq!(later(|m| m.steal = Some((11, 2000))), [""; 0]);
    }

    #[test]
    fn the_kernels_words_are_read() {
        let text = "cpu  1 2 3 4 5 6 7 8 9 10\ncpu0 1 1 1 1\n";
        assert_eq!(steal(text), Some((8, 36)));
        let later = "cpu  1 2 3 34 15 6 7 8 9 10\n";
        assert_eq!(used(text, later), Some(0.25));
        assert_eq!((used(text, text), used(text, "")), (None, None));
    }

    #[test]
    fn what_has_ended_keeps_no_machine_busy() {
        assert_eq!(is_busy(1.0, 2, || unreachable!("a low average suffices")), None);
        assert_eq!(is_busy(1.9, 2, || 0.1), None);
        let told = is_busy(1.9, 2, || 0.8).unwrap();
        assert!(
            told.ends_with("load average 1.9 on 2 processors, 80 % of their time used"),
            "{told}"
        );
    }
}
