//! Counts what one round of a cell costs: programs started, bytes written, requests made, time
//! waited. [`super::speed`] knows how long each of these takes on this host.

use crate::fit::{Fit, fit, images_of, layout_of};
use crate::layout::More;
use crate::model::{Axes, Effort, PlaceInfo, axes_of, value_of};
use crate::profile::{self, Kind, Load, SCORE_LOADS};

/// The counted costs of one round.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Short commands, such as `vdkit create`.
    pub commands: f64,
    /// Servers, including their start and their end.
    pub servers: f64,
    /// Runs of fio, without their loads.
    pub fios: f64,
    /// Runs of fio within a guest, without their loads.
    pub guest_fios: f64,
    /// Guests, from boot to end, without their loads.
    pub guests: f64,
    /// Seconds of waiting that do not depend on the host.
    pub fixed: f64,
    /// Bytes that are written in order and made durable.
    pub written: f64,
    /// Requests of a client through a server, one or a few at a time.
    pub requests: f64,
    /// Bytes of files that are copied into a file system.
    pub copied: f64,
    /// File systems that are made, mounted and unmounted.
    pub file_systems: f64,
    /// How often all caches are dropped, which makes the next programs start slowly.
    pub cold: f64,
    /// Bytes that a conversion reads.
    pub read: f64,
}

/// Approximate mean size of a file in a tree: [`Kind::Install`].
const FILE_BYTES: f64 = 16e3;
/// Requests per new file: the kernel merges writes of neighboring files and of their tables.
const FILE_REQUESTS: f64 = 1.0;

/// Number of jobs in a run of fio that [`Cost::fios`] counts.
const JOBS_COUNTED: usize = 2;
/// Duration of a further job of fio without its load, on any host: fio sleeps until it notices that
/// the job before has ended.
const JOB_SECONDS: f64 = 0.25;

/// The cost of one round of a cell.
pub fn cost(axes: &Axes, effort: &Effort, fit: &Fit) -> Cost {
    let profile = value_of(axes, "profile").and_then(profile::find);
    let Some(profile) = profile else { return Cost::default() };
    let front = value_of(axes, "front").unwrap_or("nbd");
    let disk = fit.disk as f64;
    let mut cost = made(axes, disk);
    let filled = |cost: &mut Cost| cost.written += disk;
    match profile.kind {
        Kind::Load(load) => {
            if load.rw.reads() || load.rewrites {
                filled(&mut cost);
            }
            served(&mut cost, front);
            loaded(&mut cost, &load, effort, front);
        }
        Kind::Scores => {
            filled(&mut cost);
            served(&mut cost, front);
            cost.fixed += SCORE_LOADS.len() as f64 * effort.seconds;
            fios(&mut cost, front, 1.0);
            // A load that writes is followed by a job that syncs.
            let writes = SCORE_LOADS.iter().filter(|(_, load)| !load.rw.reads()).count();
            let more = SCORE_LOADS.len() + writes - JOBS_COUNTED;
            cost.fixed += more as f64 * JOB_SECONDS;
        }
        Kind::Convert => {
            cost.commands += 1.0;
            cost.read += if is_full(axes) { disk } else { 0.0 };
        }
        Kind::Open => {
            cost.commands += 1.0 + images_of(axes) as f64;
            cost.cold += 1.0;
        }
        Kind::Boot => {
            // All overlays have one base image.
            cost.written += disk;
            cost.commands += 1.0 + 2.0 * images_of(axes) as f64;
            cost.cold += 1.0;
        }
        Kind::Install => {
            served(&mut cost, front);
            cost.copied += 2.0 * effort.bytes as f64;
            cost.requests += 2.0 * FILE_REQUESTS * effort.bytes as f64 / FILE_BYTES;
            cost.file_systems += 2.0;
        }
        Kind::NoSpace => {
            served(&mut cost, front);
            cost.file_systems += 1.0;
            fios(&mut cost, front, 1.0);
            cost.fixed +=
                if waits_for_space(front) { crate::engine::nospace::SECONDS } else { 0.0 };
        }
    }
    cost
}

/// The one-time costs of cells on a place: scores are relative to the throughput of the bare place.
pub fn once<'a>(cells: impl Iterator<Item = &'a Axes>, effort: &Effort, place: &PlaceInfo) -> Cost {
    let scores = ("profile".to_owned(), "scores".to_owned());
    let wanted = cells.filter(|axes| axes.contains(&scores)).count() > 0;
    let bare = axes_of(&[("layout", "raw"), ("front", "file"), ("profile", "scores")]);
    match fit(&bare, effort, place) {
        Ok(fit) if wanted => cost(&bare, effort, &fit),
        _ => Cost::default(),
    }
}

/// Whether clients of a front wait while there is no space. Other programs' servers, and a QEMU that
/// reports errors, end the load at once.
fn waits_for_space(front: &str) -> bool {
    ["nbd", "fuse"].contains(&front)
        || (front.starts_with("guest-") && front != "guest-virtio-report")
}

/// Whether the disk is filled before the load.
fn is_full(axes: &Axes) -> bool {
    value_of(axes, "content") == Some("full")
}

/// The cost of creating the image with its content.
fn made(axes: &Axes, disk: f64) -> Cost {
    let mut cost = Cost { commands: images_of(axes) as f64, ..Cost::default() };
    let Ok(layout) = layout_of(axes) else { return cost };
    if is_full(axes) {
        cost.written += disk * images_of(axes) as f64;
    }
    if layout.options.contains("=full") {
        cost.written += disk;
    }
    match layout.more {
        More::Nothing => {}
        More::Backing | More::Volume => cost.commands += 1.0,
        More::Fragmented => cost.written += disk * images_of(axes) as f64,
        More::Aged => cost.written += 1.5 * disk,
    }
    cost
}

fn served(cost: &mut Cost, front: &str) {
    if front.starts_with("guest-") {
        cost.guests += 1.0;
    }
    if !["file", "in-process"].contains(&front) {
        cost.servers += 1.0;
    }
}

fn fios(cost: &mut Cost, front: &str, count: f64) {
    if front.starts_with("guest-") {
        cost.guest_fios += count;
    } else {
        cost.fios += count;
    }
}

/// Requests of a load that ends after a number of requests. [`cost`] does not include their
/// duration, because a time limit bounds the load.
pub fn requests(load: &Load, effort: &Effort, fit: &Fit) -> f64 {
    let jobs = f64::from(load.jobs);
    (effort.bytes as f64).min(fit.disk as f64 / jobs) * jobs / load.block as f64
}

/// Number of consecutive steps of a request through a server.
pub fn steps(front: &str) -> f64 {
    if front == "fuse-qsd" { 6.0 } else { 1.0 }
}

fn loaded(cost: &mut Cost, load: &Load, effort: &Effort, front: &str) {
    if front != "in-process" {
        fios(cost, front, 1.0);
    }
    if !load.to_the_end {
        cost.fixed += effort.seconds;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EFFORT: Effort = Effort { rounds: 3, seconds: 10.0, disk: 64 << 20, bytes: 2 << 20 };
    const MIB: f64 = (1 << 20) as f64;

    fn of(values: &[(&str, &str)]) -> Cost {
        let fit = Fit { disk: 64 << 20, wanted: 64 << 20, bytes: 0 };
        cost(&axes_of(values), &EFFORT, &fit)
    }

    #[test]
    fn a_load_of_a_time_takes_that_time() {
        let found = of(&[("layout", "qcow2"), ("front", "nbd"), ("profile", "database")]);
        let wanted =
            Cost { commands: 1.0, servers: 1.0, fios: 1.0, fixed: 10.0, ..Cost::default() };
        assert_eq!(found, wanted);
        // What is read was written before.
        let found = of(&[("layout", "raw"), ("front", "file"), ("profile", "rnd4k-q1-read")]);
        let wanted =
            Cost { commands: 1.0, fios: 1.0, fixed: 10.0, written: 64.0 * MIB, ..Cost::default() };
        assert_eq!(found, wanted);
    }

    #[test]
    fn a_load_of_a_size_takes_its_requests() {
        let found = of(&[("layout", "qcow2"), ("front", "in-process"), ("profile", "sync16")]);
        assert_eq!(found, Cost { commands: 1.0, ..Cost::default() });
        let found = of(&[("preallocation", "full"), ("layout", "raw"), ("profile", "rewrite")]);
        assert_eq!(found.written, 128.0 * MIB);
        let fit = Fit { disk: 64 << 20, wanted: 64 << 20, bytes: 0 };
        for (name, wanted) in [("sync16", 8192.0), ("rewrite", 32.0)] {
            let Kind::Load(load) = profile::find(name).unwrap().kind else { panic!("{name}") };
            assert_eq!(requests(&load, &EFFORT, &fit), wanted, "{name}");
        }
    }

    #[test]
    fn each_kind_is_counted() {
        let scores = of(&[("front", "guest-ide"), ("profile", "scores")]);
        // Eight loads of ten seconds, four jobs that sync, and the start of all jobs but two.
        assert_eq!((scores.guests, scores.guest_fios, scores.fixed), (1.0, 1.0, 82.5));
        let axes = axes_of(&[("profile", "scores")]);
        let place = PlaceInfo::default();
        assert_eq!(once([&axes, &axes].into_iter(), &EFFORT, &place).fios, 1.0);
        assert_eq!(once(std::iter::empty(), &EFFORT, &place), Cost::default());
        let open = of(&[("images", "8"), ("tool", "vdkit"), ("profile", "open")]);
        assert_eq!((open.commands, open.written, open.cold), (17.0, 0.0, 1.0));
        let boot = of(&[("layout", "qcow2-overlay"), ("images", "8"), ("profile", "boot")]);
        assert_eq!((boot.commands, boot.written), (26.0, 64.0 * MIB));
        for (content, read) in [("sparse", 0.0), ("full", 64.0 * MIB)] {
            let convert = of(&[("content", content), ("profile", "convert")]);
            assert_eq!((convert.commands, convert.read, convert.written), (2.0, read, read));
        }
        let install = of(&[("front", "fuse"), ("profile", "install")]);
        assert_eq!((install.copied, install.servers, install.file_systems), (4.0 * MIB, 1.0, 2.0));
        for (front, waits) in [("nbd", true), ("guest-qemu-nbd", true), ("nbd-qemu-nbd", false)] {
            let found = of(&[("front", front), ("profile", "nospace")]);
            assert_eq!(found.fixed > 3.0, waits, "{front}");
        }
        let aged = of(&[("layout", "qcow2-aged"), ("profile", "database")]);
        assert_eq!(aged.written, 96.0 * MIB);
    }
}
