//! Serving a disk over NBD: vdkit beside qemu-nbd and nbdkit, driven by fio's nbd engine.
//!
//! In a series of this group a run's figures are those of *one request* on average: the time
//! between two answers (whose reciprocal is IOPS), and the server's processor time.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::Save;
use super::nbd::{self, Requests, Running, answer_of, memory_peak, processor, quiet, wait_for};
use crate::options::{Group, Options};
use crate::pair::{Cell, CellName, Series};
use crate::process::{Program, Usage};
use crate::scratch::Scratch;

/// The image before a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    /// Every byte was written.
    Full,
    /// Nothing was written.
    Empty,
    /// Every byte was written through the server, in large requests.
    Filled,
    /// Every cluster is mapped, and all of them are holes of the file: of a disk so large that its
    /// map is what counts.
    Mapped,
}

impl Start {
    fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Empty => "empty",
            Self::Filled => "filled",
            Self::Mapped => "mapped",
        }
    }
}

/// What fio does.
struct Job {
    name: &'static str,
    start: Start,
    fio: &'static [&'static str],
    /// The servers' cache mode.
    cache: &'static str,
    /// Of the qcow2 image, such as `cluster_size=8k`.
    options: &'static str,
    /// Bytes of both servers' cache of L2 tables, where it is not their own choice.
    l2_cache: Option<u64>,
}

const JOBS: &[Job] = &[
    job("randread 4K QD32", Start::Full, &["--rw=randread", "--bs=4k", "--iodepth=32"]),
    job("randread 4K QD1", Start::Full, &["--rw=randread", "--bs=4k", "--iodepth=1"]),
    job("rewrite 4K QD32", Start::Full, &["--rw=randwrite", "--bs=4k", "--iodepth=32"]),
    job(
        "rewrite 4K QD32 of what it wrote by 1M",
        Start::Filled,
        &["--rw=randwrite", "--bs=4k", "--iodepth=32"],
    ),
    job("rewrite 4K QD1", Start::Full, &["--rw=randwrite", "--bs=4k", "--iodepth=1"]),
    job(
        "first write 4K QD32",
        Start::Empty,
        &["--rw=randwrite", "--bs=4k", "--iodepth=32", "--io_size=256M"],
    ),
    job(
        "write and fsync 4K QD1",
        Start::Full,
        &["--rw=randwrite", "--bs=4k", "--iodepth=1", "--fsync=1"],
    ),
    Job {
        cache: "writethrough",
        ..job("writethrough 4K QD1", Start::Full, &["--rw=randwrite", "--bs=4k", "--iodepth=1"])
    },
    job("read 1M QD8", Start::Full, &["--rw=read", "--bs=1M", "--iodepth=8"]),
    job("rewrite 1M QD8", Start::Full, &["--rw=write", "--bs=1M", "--iodepth=8"]),
    job(
        "first write 1M QD8",
        Start::Empty,
        &["--rw=write", "--bs=1M", "--iodepth=8", "--io_size=1G"],
    ),
    job("16 writers 4K, fsync at the end", Start::Empty, WRITERS),
    Job {
        options: "cluster_size=8k",
        ..job("16 writers 4K, fsync at the end; 8K clusters", Start::Empty, WRITERS)
    },
    Job {
        options: "cluster_size=8k",
        // A tenth of the L2 tables.
        l2_cache: Some(MAPPED_BYTES / 8192 * 8 / 10),
        ..job("randread 4K QD32 of 1 TiB; 8K clusters, 102 MiB of cache", Start::Mapped, FAR)
    },
    Job {
        options: "cluster_size=8k",
        l2_cache: Some(MAPPED_BYTES / 8192 * 8 / 10),
        ..job("randread 4K QD1 of 1 TiB; 8K clusters, 102 MiB of cache", Start::Mapped, FAR_ONE)
    },
];

const FAR: &[&str] = &["--rw=randread", "--bs=4k", "--iodepth=32", "--norandommap"];
const FAR_ONE: &[&str] = &["--rw=randread", "--bs=4k", "--iodepth=1", "--norandommap"];

const WRITERS: &[&str] = &[
    "--rw=randwrite",
    "--bs=4k",
    "--iodepth=1",
    "--numjobs=16",
    "--io_size=16M",
    "--size=64M",
    "--offset_increment=64M",
    "--end_fsync=1",
    "--group_reporting",
];

const fn job(name: &'static str, start: Start, fio: &'static [&'static str]) -> Job {
    Job { name, start, fio, cache: "writeback", options: "", l2_cache: None }
}

/// Seconds of a job that has no end of its own.
const SECONDS: u64 = 4;
const SECONDS_QUICK: u64 = 1;

/// Bytes of the disk; quick: a quarter.
const DISK_BYTES: u64 = 1 << 30;

/// Bytes of a disk whose map is what counts; always.
const MAPPED_BYTES: u64 = 1 << 40;

/// Who serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Server {
    Vdkit,
    QemuNbd,
    /// nbdkit's file plugin on a raw image: what a server without a format costs.
    Nbdkit,
}

impl Server {
    fn name(self) -> &'static str {
        match self {
            Self::Vdkit => "vdkit",
            Self::QemuNbd => "qemu-nbd",
            Self::Nbdkit => "nbdkit raw",
        }
    }

    fn command(self, options: &Options, job: &Job, image: &Path, socket: &Path) -> Command {
        let mut command;
        match self {
            Self::Vdkit => {
                command = Command::new(&options.vdkit);
                command.arg("serve").arg(image).args(["--cache", job.cache, "--nbd"]);
                command.arg(format!("unix:{}", socket.display()));
                if let Some(bytes) = job.l2_cache {
                    command.arg(format!("--l2-cache={bytes}"));
                }
            }
            Self::QemuNbd => {
                command = Command::new("qemu-nbd");
                command.args(["-t", "-e", "64", "--discard=unmap"]);
                command.arg(format!("--cache={}", job.cache)).arg("-k").arg(socket);
                match job.l2_cache {
                    None => command.args(["-f", "qcow2"]).arg(image),
                    Some(bytes) => command.arg("--image-opts").arg(format!(
                        "driver=qcow2,l2-cache-size={bytes},file.driver=file,file.filename={}",
                        image.display()
                    )),
                };
            }
            Self::Nbdkit => {
                command = Command::new("nbdkit");
                command.args(["-f", "-U"]).arg(socket).arg("file").arg(image);
            }
        }
        command
    }
}

/// All jobs on each server.
pub fn measure(options: &Options, scratch: &Scratch, save: &mut Save<'_>) -> Result<()> {
    let bytes = if options.quick { DISK_BYTES / 4 } else { DISK_BYTES };
    for job in JOBS.iter().filter(|job| options.wants_job(job.name)) {
        let name = CellName::new(Group::Serve, job.name, job.start.name(), scratch.file_system);
        eprint!("serve    {:6} {:40}", scratch.file_system.name(), job.name);
        let bytes = if job.start == Start::Mapped { MAPPED_BYTES } else { bytes };
        save(cell(name, options, scratch, job, bytes)?)?;
    }
    for file in ["serve.qcow2", "serve.raw", "mapped.qcow2"] {
        let _ = fs::remove_file(scratch.file(file));
    }
    Ok(())
}

fn cell(
    name: CellName,
    options: &Options,
    scratch: &Scratch,
    job: &Job,
    bytes: u64,
) -> Result<Cell> {
    let servers: &[Server] = match (job.cache, job.start) {
        // nbdkit has no such mode, and a raw image no map.
        ("writethrough", _) | (_, Start::Mapped) => &[Server::Vdkit, Server::QemuNbd],
        _ => &[Server::Vdkit, Server::QemuNbd, Server::Nbdkit],
    };
    let empty = |server: &Server| Series::new(server.name(), typed(*server, options, scratch, job));
    let series = servers.iter().map(empty).collect();
    let run = |index: usize| run(servers[index], options, scratch, job, bytes);
    nbd::measure(name, bytes, series, options.runs(Group::Serve), run)
}

fn typed(server: Server, options: &Options, scratch: &Scratch, job: &Job) -> String {
    let (image, socket) = (image_of(server, scratch, job), scratch.file("nbd.sock"));
    let command = server.command(options, job, &image, &socket);
    let program = Program::new(command.get_program()).args(command.get_args());
    format!("{} & fio --ioengine=nbd {}", program.typed(&scratch.folder), job.fio.join(" "))
}

fn image_of(server: Server, scratch: &Scratch, job: &Job) -> PathBuf {
    scratch.file(match (server, job.start) {
        (_, Start::Mapped) => "mapped.qcow2",
        (Server::Nbdkit, _) => "serve.raw",
        _ => "serve.qcow2",
    })
}

/// Makes the image anew, by qemu-img for both, so that each run starts from the same.
fn prepare(
    server: Server,
    options: &Options,
    scratch: &Scratch,
    job: &Job,
    bytes: u64,
) -> Result<PathBuf> {
    let image = image_of(server, scratch, job);
    if job.start == Start::Mapped {
        // Only read, so one for all runs; by vdkit, as the other takes over a minute.
        if !image.exists() {
            let mapped = format!("preallocation=metadata,{}", job.options);
            let create =
                Program::new(&options.vdkit).args(["create", "-f", "qcow2", "-o", &mapped]);
            create.arg(&image).arg(bytes.to_string()).run()?;
        }
        return Ok(image);
    }
    let _ = fs::remove_file(&image);
    let format = if server == Server::Nbdkit { "raw" } else { "qcow2" };
    let mut create = Program::new(&options.qemu_img).args(["create", "-q", "-f", format]);
    if server != Server::Nbdkit && !job.options.is_empty() {
        create = create.args(["-o", job.options]);
    }
    create.arg(&image).arg(bytes.to_string()).run()?;
    if job.start == Start::Full {
        let write = format!("write -q -P 0x5a 0 {bytes}");
        Program::new("qemu-io").args(["-f", format, "-c", &write]).arg(&image).run()?;
    }
    Ok(image)
}

fn run(
    server: Server,
    options: &Options,
    scratch: &Scratch,
    job: &Job,
    bytes: u64,
) -> Result<Usage> {
    let image = prepare(server, options, scratch, job, bytes)?;
    rustix::fs::sync();
    let socket = scratch.file("nbd.sock");
    let _ = fs::remove_file(&socket);
    let mut command = server.command(options, job, &image, &socket);
    let running = Running(quiet(&mut command).spawn().with_context(|| server.name())?);
    wait_for(&socket).with_context(|| server.name())?;
    if job.start == Start::Filled {
        Program::new("fio")
            .args(["--name=fill", "--ioengine=nbd", "--rw=write", "--bs=1M", "--iodepth=8"])
            .args(["--end_fsync=1", "--output=/dev/null"])
            .arg(format!("--uri=nbd+unix:///?socket={}", socket.display()))
            .arg(format!("--size={bytes}"))
            .run()?;
    }
    let pid = running.0.id();
    let before = processor(pid)?;
    let requests = fio(options, scratch, job, bytes, &socket)?;
    let after = processor(pid)?;
    let memory = memory_peak(pid)?;
    drop(running);
    if job.start != Start::Mapped {
        let _ = fs::remove_file(&image);
    }
    Ok(Usage {
        wall_seconds: requests.seconds / requests.count,
        sync_seconds: 0.0,
        user_seconds: (after.0 - before.0) / requests.count,
        system_seconds: (after.1 - before.1) / requests.count,
        memory_bytes_max: memory,
        syncs: None,
    })
}

fn fio(
    options: &Options,
    scratch: &Scratch,
    job: &Job,
    bytes: u64,
    socket: &Path,
) -> Result<Requests> {
    let answer = scratch.file("fio.json");
    let mut program = Program::new("fio")
        .args(["--name=bench", "--ioengine=nbd", "--output-format=json", "--randrepeat=1"])
        .arg(format!("--uri=nbd+unix:///?socket={}", socket.display()))
        .arg(format!("--output={}", answer.display()))
        .args(job.fio);
    if !job.fio.iter().any(|word| word.starts_with("--size")) {
        program = program.arg(format!("--size={bytes}"));
    }
    if !job.fio.iter().any(|word| word.starts_with("--io_size")) {
        let seconds = if options.quick { SECONDS_QUICK } else { SECONDS };
        program = program.arg("--time_based").arg(format!("--runtime={seconds}"));
    }
    program.run()?;
    let (mut total, result) = answer_of(&answer)?;
    if job.fio.contains(&"--end_fsync=1") {
        // The last flush belongs to it.
        let millis = result["job_runtime"].as_f64().unwrap_or(0.0);
        let jobs = if job.fio.contains(&"--numjobs=16") { 16.0 } else { 1.0 };
        total.seconds = total.seconds.max(millis / 1e3 / jobs);
    }
    Ok(total)
}
