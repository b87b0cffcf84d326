//! Measures the speed of this host at the parts of a run, in a second or two before the run begins.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use crate::error::{Context, Result};
use rustix::fs::{Mode, OFlags};
use vdkit_block::{CancelToken, HostOffset, Storage};

use super::cost::{TURNS, requests};
use super::trial::{Tried, front_and_load};
use crate::cells::Rng;
use crate::fit::Fit;
use crate::front::{FIO_OF_NOTHING, GuestSpeed};
use crate::layout::noise;
use crate::model::Axes;
use crate::peers::find;
use crate::place::{Place, device};
use crate::plan::Effort;
use crate::process::Line;
use crate::profile::Sync;

/// Durations on a host and a place, in seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Speed {
    /// A short command.
    pub command: f64,
    /// A run of fio whose load takes no time.
    pub fio: f64,
    /// A byte that is written in order and made durable.
    pub byte: f64,
    /// A turn: two threads wake each other once. A request through a server consists of turns.
    pub turn: f64,
    pub guest: GuestSpeed,
    /// Results of the trials on this place.
    pub tried: Tried,
}

/// Typical durations of a host that was not measured.
impl Default for Speed {
    fn default() -> Self {
        Self {
            command: 0.02,
            fio: 0.5,
            byte: 1.0 / 400e6,
            turn: 10e-6,
            guest: GuestSpeed::default(),
            tried: Tried::default(),
        }
    }
}

/// Bytes written to measure a place. They cover only a small part of a device's cache, but so do
/// the writes of a cell.
const WRITE_BYTES: usize = 32 << 20;

impl Speed {
    /// Measures a host and a place. `writes` allows writing to a device. Keeps the typical duration
    /// of what cannot be measured.
    ///
    /// # Errors
    /// The user interrupts.
    pub fn of(command: &Path, place: &Place, writes: bool, cancel: &CancelToken) -> Result<Self> {
        let mut speed = Self::default();
        let version = Line::new(command).arg("--version");
        // The first call loads the program into memory.
        version.run_any(cancel)?;
        speed.command = version.run_any(cancel)?.elapsed.as_secs_f64();
        if let Some(fio) = find("fio") {
            // As in a load: one job, and one after it.
            let line = Line::new(fio).args(FIO_OF_NOTHING);
            speed.fio = line.run_any(cancel)?.elapsed.as_secs_f64();
        }
        speed.turn = turn().unwrap_or(speed.turn);
        if place.device().is_none() || writes {
            // If the place is not writable, each cell reports that later.
            speed.byte = byte(place).unwrap_or(speed.byte);
        }
        Ok(speed)
    }

    /// Duration of a round of a cell. Uses trial results where they apply.
    pub fn of_cell(&self, axes: &Axes, effort: &Effort, fit: &Fit) -> f64 {
        let seconds = self.of_round(axes, effort, fit);
        let Some((front, load)) = front_and_load(axes) else { return seconds };
        if load.to_the_end {
            let tried = self.tried.requests.get(&(front.to_owned(), load.block));
            let each = tried.copied().unwrap_or_else(|| {
                let synced = if load.rw.reads() { 0.0 } else { load.block as f64 };
                TURNS * self.turn + synced * self.byte
            });
            return seconds + (requests(&load, effort, fit) * each).min(effort.seconds);
        }
        let late = self.tried.late.get(front).filter(|_| load.sync != Sync::Never);
        seconds + late.copied().unwrap_or(0.0)
    }
}

/// Number of turns measured.
const TURNS_MEASURED: u32 = 500;

fn turn() -> Result<f64> {
    let (mut near, mut far) = UnixStream::pair()?;
    std::thread::scope(|scope| {
        let answers = scope.spawn(move || -> std::io::Result<()> {
            let mut byte = [0];
            for _ in 0..TURNS_MEASURED {
                far.read_exact(&mut byte)?;
                far.write_all(&byte)?;
            }
            Ok(())
        });
        let began = Instant::now();
        let mut byte = [0];
        for _ in 0..TURNS_MEASURED {
            near.write_all(&byte)?;
            near.read_exact(&mut byte)?;
        }
        let seconds = began.elapsed().as_secs_f64();
        answers.join().ok().context("the other thread")??;
        Ok(seconds / f64::from(TURNS_MEASURED))
    })
}

/// Duration until a byte is durable: the mean over [`WRITE_BYTES`], or over a smaller device.
fn byte(place: &Place) -> Result<f64> {
    let mut buffer = vec![0; 1 << 20];
    noise(&mut buffer, &mut Rng::new(1));
    let began = Instant::now();
    let bytes = match place.device() {
        Some(device) => {
            let claimed = device::claim(device)?;
            let bytes = WRITE_BYTES.min(place.info.total_bytes as usize);
            for at in (0..bytes).step_by(buffer.len()) {
                let len = buffer.len().min(bytes - at);
                claimed.write_at(&buffer[..len], HostOffset(at as u64))?;
            }
            claimed.sync()?;
            bytes
        }
        None => {
            // The file has no name, so nothing is left behind.
            let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
            let file = rustix::fs::open(place.path(), flags, Mode::RUSR | Mode::WUSR)
                .context("a file without a name")?;
            let mut file = File::from(file);
            for _ in 0..WRITE_BYTES / buffer.len() {
                file.write_all(&buffer)?;
            }
            file.sync_data()?;
            WRITE_BYTES
        }
    };
    Ok(began.elapsed().as_secs_f64() / bytes.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_tried_counts_for_cells_like_it() {
        let effort = Effort { rounds: 3, seconds: 10.0, disk: 64 << 20, bytes: 2 << 20 };
        let fit = Fit { disk: 64 << 20, wanted: 64 << 20, bytes: 0 };
        let mut speed = Speed::default();
        let of = |speed: &Speed, front: &str, profile: &str| {
            let axes = [("layout", "qcow2"), ("front", front), ("profile", profile)];
            speed.of_cell(&crate::model::axes_of(&axes), &effort, &fit)
        };
        let before = |front, profile| of(&Speed::default(), front, profile);
        speed.tried.requests.insert(("fuse".to_owned(), 4096), 1e-3);
        speed.tried.late.insert("fuse".to_owned(), 5.0);
        // 8192 requests of a millisecond each, plus start and end.
        let found = of(&speed, "fuse", "libaio16");
        assert!((8.2..9.2).contains(&found), "{found}");
        // A load with a time limit ends when its time is over.
        speed.tried.requests.insert(("fuse".to_owned(), 4096), 1.0);
        let found = of(&speed, "fuse", "libaio16");
        assert!((10.0..11.0).contains(&found), "{found}");
        let found = of(&speed, "fuse", "batch16") - before("fuse", "batch16");
        assert!((found - 5.0).abs() < 1e-9, "{found}");
        // A trial does not apply to another front, another block size, or a load with syncs.
        for (front, profile) in [
            ("nbd", "libaio16"),
            ("nbd", "batch16"),
            ("fuse", "first-write"),
            ("fuse", "rnd1m-write"),
        ] {
            assert_eq!(of(&speed, front, profile), before(front, profile), "{front} {profile}");
        }
    }

    #[test]
    fn a_place_is_measured_and_left_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let place = Place::directory(folder.path()).unwrap();
        let speed = Speed::of(Path::new("true"), &place, false, &CancelToken::default());
        let speed = speed.unwrap_or_default();
        assert!(speed.byte > 0.0 && speed.byte.is_finite() && speed.turn > 0.0, "{speed:?}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
