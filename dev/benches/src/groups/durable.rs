//! Durable writes over NBD, `--cache writethrough`: vdkit beside qemu-nbd, where a sync takes longer
//! and longer.
//!
//! Both programs serve the same image on the same file system in alternating rounds. On tmpfs their
//! syncs take nothing, or run under [`vdkit_supervisor::SlowSyncs`], which makes each take a given
//! time; syncs wait side by side, as on a device with a queue, or one after the other. On other file
//! systems syncs are the device's own. As in the group serve, a run's figures are those of *one request* on average.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use vdkit_supervisor::{SlowSyncs, Supervised};

use super::Save;
use super::nbd::{
    self, Requests, Running, answer_of, memory_peak, processor_exact, quiet, wait_for,
};
use crate::options::{FileSystem, Group, Options};
use crate::pair::{Cell, CellName, Series};
use crate::process::{Program, Usage};
use crate::scratch::Scratch;

/// Microseconds that a sync takes, on tmpfs.
const SYNC_MICROS: [u64; 4] = [0, 100, 1000, 5000];
/// The same where one sync waits for the other.
const LONE_SYNC_MICROS: u64 = 1000;
const FORMATS: [&str; 2] = ["qcow2", "raw"];
/// Requests in flight, on all connections together.
const DEPTH: u64 = 32;
const CONNECTIONS: [u64; 2] = [1, 8];

/// The time of a run, as fio takes it.
const TIME: &str = "700ms";
const TIME_QUICK: &str = "300ms";
/// Bytes of a disk that is empty at the start: no run comes to its end.
const EMPTY_BYTES: u64 = 16 << 30;
/// Bytes of a full disk; quick: a quarter.
const FULL_BYTES: u64 = 256 << 20;

const SERVERS: [Server; 2] = [Server::Vdkit, Server::QemuNbd];

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writes {
    /// One block after the other, of a disk that holds nothing yet.
    InOrder,
    /// Blocks here and there, of a disk that holds nothing yet.
    RandomNew,
    /// Blocks here and there, of a disk that is full.
    RandomRewrite,
}

const WRITES: [Writes; 3] = [Writes::InOrder, Writes::RandomNew, Writes::RandomRewrite];

/// What a cell is about.
#[derive(Clone, Copy, Debug)]
struct Job {
    format: &'static str,
    writes: Writes,
    connections: u64,
    disk_bytes: u64,
}

impl Job {
    fn name(self) -> String {
        let writes = match self.writes {
            Writes::InOrder => "first write in order",
            Writes::RandomNew => "random first write",
            Writes::RandomRewrite => "random rewrite",
        };
        let depth = match self.connections {
            1 => format!("QD{DEPTH}"),
            many => format!("{many} × QD{}", DEPTH / many),
        };
        format!("{} {writes} 4K {depth}", self.format)
    }

    /// Its image. A full one is kept from run to run: rewrites change nothing but the bytes.
    fn image(self, scratch: &Scratch) -> PathBuf {
        let start = if self.writes == Writes::RandomRewrite { "full" } else { "new" };
        scratch.file(&format!("{start}.{}", self.format))
    }

    /// Makes the image, by qemu-img for both.
    fn prepare(self, options: &Options, scratch: &Scratch) -> Result<PathBuf> {
        let (image, bytes) = (self.image(scratch), self.disk_bytes);
        let full = self.writes == Writes::RandomRewrite;
        if full && image.exists() {
            return Ok(image);
        }
        let _ = fs::remove_file(&image);
        let create = Program::new(&options.qemu_img).args(["create", "-q", "-f", self.format]);
        create.arg(&image).arg(bytes.to_string()).run()?;
        if full {
            let write = format!("write -q -P 0x5a 0 {bytes}");
            Program::new("qemu-io").args(["-f", self.format, "-c", &write]).arg(&image).run()?;
        }
        Ok(image)
    }

    fn fio(self, options: &Options, socket: &Path, answer: &Path) -> Program {
        let time = if options.quick { TIME_QUICK } else { TIME };
        let rw = if self.writes == Writes::InOrder { "write" } else { "randwrite" };
        let share = self.disk_bytes / self.connections;
        Program::new("fio")
            .args(["--name=bench", "--ioengine=nbd", "--output-format=json", "--randrepeat=1"])
            .args(["--thread", "--group_reporting", "--time_based", "--bs=4k", "--norandommap"])
            .arg(format!("--runtime={time}"))
            .arg(format!("--rw={rw}"))
            .arg(format!("--iodepth={}", DEPTH / self.connections))
            .arg(format!("--numjobs={}", self.connections))
            .arg(format!("--size={share}"))
            .arg(format!("--offset_increment={share}"))
            .arg(format!("--uri=nbd+unix:///?socket={}", socket.display()))
            .arg(format!("--output={}", answer.display()))
    }
}

/// Who serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Server {
    Vdkit,
    QemuNbd,
}

impl Server {
    fn name(self) -> &'static str {
        match self {
            Self::Vdkit => "vdkit",
            Self::QemuNbd => "qemu-nbd",
        }
    }

    fn command(self, options: &Options, job: Job, image: &Path, socket: &Path) -> Command {
        let mut command;
        match self {
            Self::Vdkit => {
                command = Command::new(&options.vdkit);
                command.arg("serve").arg(image).args(["-f", job.format, "--nbd"]);
                command.arg(format!("unix:{}", socket.display()));
                command.args(["--cache", "writethrough"]);
            }
            Self::QemuNbd => {
                command = Command::new("qemu-nbd");
                command.args(["--cache=writethrough", "--persistent", "--shared=16"]);
                command.args(["-f", job.format, "-k"]).arg(socket).arg(image);
            }
        }
        command
    }
}

/// What syncs cost.
#[derive(Clone, Copy, Debug)]
enum Syncs {
    /// What the file system takes for them.
    Own,
    /// So many microseconds.
    Take(u64, SlowSyncs),
    /// So many microseconds, one after the other.
    TakeAlone(u64, SlowSyncs),
}

impl Syncs {
    /// The kinds that there are on a file system.
    fn on(file_system: FileSystem) -> Result<Vec<Self>> {
        if file_system != FileSystem::Tmpfs {
            return Ok(vec![Self::Own]);
        }
        let slow = |micros| SlowSyncs::new(Duration::from_micros(micros));
        let mut kinds = Vec::new();
        for micros in SYNC_MICROS {
            kinds.push(if micros == 0 { Self::Own } else { Self::Take(micros, slow(micros)?) });
        }
        let alone = slow(LONE_SYNC_MICROS)?.one_at_a_time();
        kinds.push(Self::TakeAlone(LONE_SYNC_MICROS, alone));
        Ok(kinds)
    }

    fn name(self, file_system: FileSystem) -> String {
        match (self, file_system) {
            (Self::Own, FileSystem::Tmpfs) => "nothing".to_owned(),
            (Self::Own, _) => "its own time".to_owned(),
            (Self::Take(micros, _), _) => format!("{} ms", micros as f64 / 1e3),
            (Self::TakeAlone(micros, _), _) => {
                format!("{} ms, one at a time", micros as f64 / 1e3)
            }
        }
    }
}

/// A server, supervised or not.
enum Serving {
    Plain(Running),
    Slow(Supervised),
}

impl Serving {
    fn pid(&self) -> u32 {
        match self {
            Self::Plain(running) => running.0.id(),
            Self::Slow(supervised) => supervised.child.id(),
        }
    }

    /// Syncs so far, where they are counted.
    fn syncs(&self) -> Option<u64> {
        match self {
            Self::Plain(_) => None,
            Self::Slow(supervised) => Some(supervised.syncs()),
        }
    }
}

/// All jobs with all kinds of syncs, on both servers.
pub fn measure(options: &Options, scratch: &Scratch, save: &mut Save<'_>) -> Result<()> {
    let full = if options.quick { FULL_BYTES / 4 } else { FULL_BYTES };
    for syncs in Syncs::on(scratch.file_system)? {
        for job in jobs(full) {
            let content = syncs.name(scratch.file_system);
            let name = CellName::new(Group::Durable, job.name(), content, scratch.file_system);
            if options.wants_job(&format!("{}, {}", name.job, name.content)) {
                save(cell(name, options, scratch, job, syncs)?)?;
            }
        }
    }
    for job in jobs(full) {
        let _ = fs::remove_file(job.image(scratch));
    }
    Ok(())
}

fn jobs(full_bytes: u64) -> Vec<Job> {
    let mut jobs = Vec::new();
    for format in FORMATS {
        for writes in WRITES {
            let full = writes == Writes::RandomRewrite;
            let disk_bytes = if full { full_bytes } else { EMPTY_BYTES };
            jobs.extend(CONNECTIONS.map(|connections| Job {
                format,
                writes,
                connections,
                disk_bytes,
            }));
        }
    }
    jobs
}

fn cell(
    name: CellName,
    options: &Options,
    scratch: &Scratch,
    job: Job,
    syncs: Syncs,
) -> Result<Cell> {
    eprint!("durable  {:6} {:20} {:42}", scratch.file_system.name(), name.content, name.job);
    let series = SERVERS.iter().map(|server| empty(*server, options, scratch, job)).collect();
    let run = |index: usize| run(SERVERS[index], options, scratch, job, syncs);
    nbd::measure(name, job.disk_bytes, series, options.runs(Group::Durable), run)
}

fn empty(server: Server, options: &Options, scratch: &Scratch, job: Job) -> Series {
    let socket = scratch.file("nbd.sock");
    let command = server.command(options, job, &job.image(scratch), &socket);
    let program = Program::new(command.get_program()).args(command.get_args());
    let fio = job.fio(options, &socket, &scratch.file("fio.json"));
    let typed = format!("{} & {}", program.typed(&scratch.folder), fio.typed(&scratch.folder));
    Series::new(server.name(), typed)
}

fn run(
    server: Server,
    options: &Options,
    scratch: &Scratch,
    job: Job,
    syncs: Syncs,
) -> Result<Usage> {
    let image = job.prepare(options, scratch)?;
    if scratch.file_system != FileSystem::Tmpfs {
        rustix::fs::sync();
    }
    let (socket, answer) = (scratch.file("nbd.sock"), scratch.file("fio.json"));
    let _ = fs::remove_file(&socket);
    let mut command = server.command(options, job, &image, &socket);
    quiet(&mut command);
    let serving = match syncs {
        Syncs::Own => Serving::Plain(Running(command.spawn().with_context(|| server.name())?)),
        Syncs::Take(_, slow) | Syncs::TakeAlone(_, slow) => {
            Serving::Slow(slow.spawn(command).with_context(|| server.name())?)
        }
    };
    wait_for(&socket).with_context(|| server.name())?;
    let before = (processor_exact(serving.pid())?, serving.syncs());
    job.fio(options, &socket, &answer).run()?;
    let after = (processor_exact(serving.pid())?, serving.syncs());
    let (Requests { count, seconds }, _) = answer_of(&answer)?;
    let memory = memory_peak(serving.pid())?;
    drop(serving);
    if job.writes != Writes::RandomRewrite {
        fs::remove_file(&image)?;
    }
    let synced = after.1.zip(before.1).map(|(after, before)| (after - before) as f64 / count);
    Ok(Usage {
        wall_seconds: seconds / count,
        sync_seconds: 0.0,
        // Both together: the clock that is exact does not tell them apart.
        user_seconds: (after.0 - before.0) / count,
        system_seconds: 0.0,
        memory_bytes_max: memory,
        syncs: synced,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_job_has_a_name_of_its_own_and_the_same_depth() {
        let jobs = jobs(FULL_BYTES);
        let names: BTreeSet<String> = jobs.iter().map(|job| job.name()).collect();
        assert_eq!(names.len(), jobs.len());
        assert!(names.contains("qcow2 random rewrite 4K 8 × QD4"), "{names:?}");
        assert!(jobs.iter().all(|job| DEPTH.is_multiple_of(job.connections)));
    }
}
