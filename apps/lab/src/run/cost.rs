//! Estimates how long one round of a cell takes on this host: programs that start, bytes that are
//! written, requests, waiting. [`super::speed`] measures how long each of these takes.

use super::speed::Speed;
use crate::engine::nospace;
use crate::fit::{Fit, fit, images_of, layout_of};
use crate::layout::More;
use crate::model::{Axes, Effort, PlaceInfo, axes_of, value_of};
use crate::profile::{self, Kind, Load, SCORE_LOADS};

/// Turns per request through a server.
pub const TURNS: f64 = 4.0;

// Durations that are not measured, in seconds, as on current machines.
/// Start and end of a server, in addition to a command.
const SERVER: f64 = 0.1;
/// A byte that is copied into a file system on a served disk.
const COPIED: f64 = 1.0 / 150e6;
/// A file system that is made, mounted and unmounted; mostly waiting for loop devices.
const FILE_SYSTEM: f64 = 0.3;
/// Programs and libraries that are read again after caches were dropped.
const COLD: f64 = 0.15;
/// A byte that a conversion reads.
const READ: f64 = 1.0 / 1.5e9;

/// Approximate mean size of a file in a tree: [`Kind::Install`].
const FILE_BYTES: f64 = 16e3;
/// Number of jobs in the run of fio that was measured.
const JOBS_MEASURED: usize = 2;
/// Duration of a further job of fio without its load, on any host: fio sleeps until it notices that
/// the job before has ended.
const JOB_SECONDS: f64 = 0.25;

impl Speed {
    /// Duration of a round of a cell, without the requests of a load that ends after a number of
    /// them.
    pub fn of_round(&self, axes: &Axes, effort: &Effort, fit: &Fit) -> f64 {
        let profile = value_of(axes, "profile").and_then(profile::find);
        let Some(profile) = profile else { return 0.0 };
        let front = value_of(axes, "front").unwrap_or("nbd");
        let (disk, images) = (fit.disk as f64, images_of(axes) as f64);
        let filled = disk * self.byte;
        let loaded = match profile.kind {
            Kind::Load(load) => {
                let filled = if load.rw.reads() || load.rewrites { filled } else { 0.0 };
                let fio = if front == "in-process" { 0.0 } else { self.fio_at(front) };
                let time = if load.to_the_end { 0.0 } else { effort.seconds };
                filled + self.served(front) + fio + time
            }
            Kind::Scores => {
                // A load that writes is followed by a job that syncs.
                let writes = SCORE_LOADS.iter().filter(|(_, load)| !load.rw.reads()).count();
                let jobs = (SCORE_LOADS.len() + writes - JOBS_MEASURED) as f64 * JOB_SECONDS;
                let time = SCORE_LOADS.len() as f64 * effort.seconds;
                filled + self.served(front) + self.fio_at(front) + jobs + time
            }
            Kind::Convert => self.command + if is_full(axes) { disk * READ } else { 0.0 },
            Kind::Open => (1.0 + images) * self.command + COLD,
            // All overlays have one base image.
            Kind::Boot => filled + (1.0 + 2.0 * images) * self.command + COLD,
            Kind::Install => {
                let bytes = 2.0 * effort.bytes as f64;
                // One per new file: the kernel merges writes of neighboring files and of their tables.
                let requests = bytes / FILE_BYTES * TURNS * self.turn;
                let copied = bytes * (COPIED + self.byte);
                self.served(front) + copied + requests + 2.0 * FILE_SYSTEM
            }
            Kind::NoSpace => {
                let waits = if waits_for_space(front) { nospace::SECONDS } else { 0.0 };
                self.served(front) + FILE_SYSTEM + self.fio_at(front) + waits
            }
        };
        self.made(axes, disk) + loaded
    }

    /// What cells on a place take once in a run: scores are relative to the throughput of the bare
    /// place.
    pub fn once<'a>(
        &self,
        mut cells: impl Iterator<Item = &'a Axes>,
        effort: &Effort,
        place: &PlaceInfo,
    ) -> f64 {
        let wanted = cells.any(|axes| value_of(axes, "profile") == Some("scores"));
        let bare = axes_of(&[("layout", "raw"), ("front", "file"), ("profile", "scores")]);
        match fit(&bare, effort, place) {
            Ok(fit) if wanted => self.of_round(&bare, effort, &fit),
            _ => 0.0,
        }
    }

    /// Creating the image with its content.
    fn made(&self, axes: &Axes, disk: f64) -> f64 {
        let images = images_of(axes) as f64;
        let (mut commands, mut written) = (images, 0.0);
        if is_full(axes) {
            written += disk * images;
        }
        if let Ok(layout) = layout_of(axes) {
            if layout.options.contains("=full") {
                written += disk;
            }
            match layout.more {
                More::Nothing => {}
                More::Backing | More::Volume => commands += 1.0,
                More::Fragmented => written += disk * images,
                More::Aged => written += 1.5 * disk,
            }
        }
        commands * self.command + written * self.byte
    }

    /// Start and end of a guest and of a server.
    fn served(&self, front: &str) -> f64 {
        let guest = if front.starts_with("guest-") { self.guest.boot } else { 0.0 };
        let served = !["file", "in-process"].contains(&front);
        guest + if served { SERVER + self.command } else { 0.0 }
    }

    /// A run of fio without its load.
    fn fio_at(&self, front: &str) -> f64 {
        if front.starts_with("guest-") { self.guest.fio } else { self.fio }
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

/// Requests of a load that ends after a number of requests. [`Speed::of_round`] does not include their
/// duration, because a time limit bounds the load.
pub fn requests(load: &Load, effort: &Effort, fit: &Fit) -> f64 {
    let jobs = f64::from(load.jobs);
    (effort.bytes as f64).min(fit.disk as f64 / jobs) * jobs / load.block as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::front::GuestSpeed;

    const EFFORT: Effort = Effort { rounds: 3, seconds: 10.0, disk: 64 << 20, bytes: 2 << 20 };
    const FIT: Fit = Fit { disk: 64 << 20, wanted: 64 << 20, bytes: 0 };
    const MIB: f64 = (1 << 20) as f64;

    /// A host on which nothing takes time but what `change` sets.
    fn host(change: fn(&mut Speed)) -> Speed {
        let guest = GuestSpeed { boot: 0.0, fio: 0.0 };
        let mut speed =
            Speed { command: 0.0, fio: 0.0, byte: 0.0, turn: 0.0, guest, ..Speed::default() };
        change(&mut speed);
        speed
    }

    /// What a round takes on any host, and how often it does what takes a second.
    fn of<const N: usize>(
        values: &[(&str, &str)],
        counted: [fn(&mut Speed); N],
    ) -> (f64, [f64; N]) {
        let axes = axes_of(values);
        let fixed = host(|_| {}).of_round(&axes, &EFFORT, &FIT);
        let count = |change| (host(change).of_round(&axes, &EFFORT, &FIT) - fixed).round();
        ((fixed * 1e3).round() / 1e3, counted.map(count))
    }

    const COMMANDS: fn(&mut Speed) = |speed| speed.command = 1.0;
    const FIOS: fn(&mut Speed) = |speed| speed.fio = 1.0;
    const BYTES: fn(&mut Speed) = |speed| speed.byte = 1.0;
    const ALL: [fn(&mut Speed); 3] = [COMMANDS, FIOS, BYTES];

    #[test]
    fn a_load_of_a_time_takes_that_time() {
        let found = of(&[("layout", "qcow2"), ("front", "nbd"), ("profile", "database")], ALL);
        // A server is a command too.
        assert_eq!(found, (10.1, [2.0, 1.0, 0.0]));
        // What is read was written before.
        let found = of(&[("layout", "raw"), ("front", "file"), ("profile", "rnd4k-q1-read")], ALL);
        assert_eq!(found, (10.0, [1.0, 1.0, 64.0 * MIB]));
    }

    #[test]
    fn a_load_of_a_size_takes_its_requests() {
        let found = of(&[("front", "in-process"), ("profile", "sync16")], ALL);
        assert_eq!(found, (0.0, [1.0, 0.0, 0.0]));
        let full = [("preallocation", "full"), ("layout", "raw"), ("profile", "rewrite")];
        assert_eq!(of(&full, [BYTES]).1, [128.0 * MIB]);
        for (name, wanted) in [("sync16", 8192.0), ("rewrite", 32.0)] {
            let Kind::Load(load) = profile::find(name).unwrap().kind else { panic!("{name}") };
            assert_eq!(requests(&load, &EFFORT, &FIT), wanted, "{name}");
        }
    }

    #[test]
    fn each_kind_is_counted() {
        let scores = [("front", "guest-ide"), ("profile", "scores")];
        // Eight loads of ten seconds, four jobs that sync, and the start of all jobs but two.
        let found = of(&scores, [|speed| speed.guest.boot = 1.0, |speed| speed.guest.fio = 1.0]);
        assert_eq!(found, (82.6, [1.0, 1.0]));
        let (axes, place) = (axes_of(&scores[1..]), PlaceInfo::default());
        let fixed = host(|_| {});
        let once = |speed: &Speed| speed.once([&axes, &axes].into_iter(), &EFFORT, &place);
        assert!((once(&host(FIOS)) - once(&fixed) - 1.0).abs() < 1e-9);
        assert_eq!(host(FIOS).once(std::iter::empty(), &EFFORT, &place), 0.0);
        let open = [("images", "8"), ("tool", "vdkit"), ("profile", "open")];
        assert_eq!(of(&open, [COMMANDS, BYTES]), (0.15, [17.0, 0.0]));
        let boot = [("layout", "qcow2-overlay"), ("images", "8"), ("profile", "boot")];
        assert_eq!(of(&boot, [COMMANDS, BYTES]).1, [26.0, 64.0 * MIB]);
        for (content, fixed, bytes) in [("sparse", 0.0, 0.0), ("full", 0.045, 64.0 * MIB)] {
            let found = of(&[("content", content), ("profile", "convert")], [COMMANDS, BYTES]);
            assert_eq!(found, (fixed, [2.0, bytes]));
        }
        let install = of(&[("front", "fuse"), ("profile", "install")], [COMMANDS, BYTES]);
        assert_eq!(install, (0.728, [2.0, 4.0 * MIB]));
        for (front, waits) in [("nbd", true), ("guest-qemu-nbd", true), ("nbd-qemu-nbd", false)] {
            let found = of(&[("front", front), ("profile", "nospace")], []);
            assert_eq!(found.0 > 3.0, waits, "{front}");
        }
        let aged = of(&[("layout", "qcow2-aged"), ("profile", "database")], [BYTES]);
        assert_eq!(aged.1, [96.0 * MIB]);
    }
}
