//! A service under load for half an hour: what it holds must not grow, and nothing may be lost.
//!
//! ```text
//! cargo bench -p vdkit-cli --bench load                      30 minutes
//! cargo bench -p vdkit-cli --bench load -- --minutes 2 --folder /mnt/xfs
//! ```
//!
//! fio reads, writes, trims and verifies over NBD on four connections; meanwhile others connect and
//! leave, snapshots come and go, and flushes are asked for. Each ten seconds the server's memory,
//! open files and threads are looked at. Fails where they grow after the first quarter, where fio
//! finds a wrong byte, and where the image is not clean afterwards. Needs fio, qemu-img and nbdinfo.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use vdkit_testkit::Killed;

const VDKIT: &str = env!("CARGO_BIN_EXE_vdkit");
const EVERY: Duration = Duration::from_secs(10);
/// Bytes by which an allocator's mood may differ.
const SLACK_BYTES: u64 = 4 << 20;

/// What the server holds.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    memory_bytes: u64,
    files: usize,
    threads: usize,
}

impl Held {
    fn of(pid: u32) -> Self {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the server lives");
        let number = |key: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(key)).expect(key);
            line.split_whitespace().next().and_then(|n| n.parse().ok()).expect(key)
        };
        let entries =
            |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).into_iter().flatten();
        // A thread makes its ring when it first needs one, and keeps it: those are as many as
        // threads at most, and grow as slowly as threads come to their first batch.
        let ring = |file: &fs::DirEntry| {
            fs::read_link(file.path()).is_ok_and(|to| to.to_string_lossy().contains("io_uring"))
        };
        Self {
            memory_bytes: number("VmRSS:") * 1024,
            files: entries("fd").flatten().filter(|file| !ring(file)).count(),
            threads: entries("task").count(),
        }
    }

    fn most(all: &[Self]) -> Self {
        all.iter().fold(Self::default(), |most, one| Self {
            memory_bytes: most.memory_bytes.max(one.memory_bytes),
            files: most.files.max(one.files),
            threads: most.threads.max(one.threads),
        })
    }
}

fn run(folder: &Path, program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).current_dir(folder).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {text}{output:?}");
    text
}

fn main() {
    let (mut minutes, mut folder) = (30.0, None);
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    while let Some(name) = arguments.next() {
        let value = arguments.next().unwrap_or_else(|| panic!("{name} needs a value"));
        match name.as_str() {
            "--minutes" => minutes = value.parse().expect("a number of minutes"),
            "--folder" => folder = Some(PathBuf::from(value)),
            _ => panic!("{name}: known are --minutes and --folder"),
        }
    }
    let scratch = folder.map_or_else(tempfile::tempdir, tempfile::tempdir_in).expect("a folder");
    load(scratch.path(), Duration::from_secs_f64(minutes * 60.0));
}

fn load(folder: &Path, length: Duration) {
    run(folder, VDKIT, &["create", "disk.qcow2", "2G"]);
    let server = Command::new(VDKIT)
        .args(["serve", "disk.qcow2", "--nbd", "unix:n.sock", "--control", "c.sock"])
        .current_dir(folder)
        .stdout(Stdio::null())
        .spawn();
    let mut server = Killed(server.expect("the server starts"));
    while !folder.join("c.sock").exists() || !folder.join("n.sock").exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let fio = Command::new("fio").args(fio_arguments(length)).current_dir(folder).spawn();
    let mut fio = Killed(fio.expect("fio starts; `make peers` installs it"));

    let began = Instant::now();
    let (mut seen, mut round) = (Vec::new(), 0_u64);
    println!("{:>8}  {:>10}  {:>6}  {:>7}", "seconds", "memory", "files", "threads");
    let status = loop {
        std::thread::sleep(EVERY);
        if let Some(status) = fio.0.try_wait().expect("fio") {
            break status;
        }
        disturb(folder, round);
        round += 1;
        let held = Held::of(server.0.id());
        let Held { memory_bytes, files, threads } = held;
        let (seconds, kib) = (began.elapsed().as_secs(), memory_bytes >> 10);
        println!("{seconds:8}  {kib:6} KiB  {files:6}  {threads:7}");
        seen.push(held);
    };
    assert!(status.success(), "fio found a fault");
    let stats = run(folder, VDKIT, &["ctl", "c.sock", "stats"]);
    run(folder, VDKIT, &["ctl", "c.sock", "quit"]);
    assert!(server.0.wait().expect("the server ends").success());
    run(folder, VDKIT, &["check", "disk.qcow2"]);
    run(folder, "qemu-img", &["check", "-q", "disk.qcow2"]);
    println!("{stats}");
    judge(&seen);
}

/// Each of four jobs has a quarter of the disk to itself, so that it knows what it must find.
fn fio_arguments(length: Duration) -> Vec<String> {
    let seconds = length.as_secs().max(1);
    let mut arguments: Vec<String> = [
        "--ioengine=nbd",
        "--uri=nbd+unix:///?socket=n.sock",
        "--rw=randrw",
        "--bsrange=4k-64k",
        "--iodepth=16",
        "--size=512M",
        "--offset_increment=512M",
        "--numjobs=4",
        "--fsync=256",
        "--verify=crc32c",
        "--verify_backlog=1024",
        "--verify_fatal=1",
        "--time_based",
        "--group_reporting",
        "--name=load",
        "--output=fio.log",
    ]
    .map(str::to_owned)
    .into();
    arguments.push(format!("--runtime={seconds}"));
    arguments
}

/// What happens beside the load.
fn disturb(folder: &Path, round: u64) {
    for _ in 0..20 {
        // Some say nothing at all, some leave in the middle of the handshake.
        drop(std::os::unix::net::UnixStream::connect(folder.join("n.sock")));
    }
    run(folder, "nbdinfo", &["nbd+unix:///?socket=n.sock"]);
    run(folder, VDKIT, &["ctl", "c.sock", "metrics"]);
    let name = format!("s{}", round / 3);
    match round % 3 {
        0 => run(folder, VDKIT, &["ctl", "c.sock", "snapshot", &name]),
        1 => run(folder, VDKIT, &["ctl", "c.sock", "flush"]),
        _ => run(folder, VDKIT, &["ctl", "c.sock", "snapshot-delete", &name]),
    };
}

fn judge(seen: &[Held]) {
    assert!(seen.len() >= 8, "too short to tell: {} looks", seen.len());
    let (first, rest) = seen.split_at(seen.len() / 4);
    let (first, rest) = (Held::most(first), Held::most(rest));
    println!("at most: {first:?} in the first quarter, {rest:?} later");
    let bound = first.memory_bytes + first.memory_bytes / 10 + SLACK_BYTES;
    assert!(rest.memory_bytes <= bound, "memory grew");
    assert!(rest.files <= first.files + 2 && rest.threads <= first.threads + 16, "files, threads");
}
