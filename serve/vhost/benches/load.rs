//! Compares `vdkit serve --vhost-user` with `qemu-storage-daemon`, run by run in turn. The driver
//! is not a guest, so that the servers are measured and not an emulator.
//!
//! ```text
//! cargo build --release
//! cargo bench -p vdkit-vhost --bench load -- target/release/vdkit FOLDER [SECONDS [ROUNDS]]
//! ```
//! FOLDER holds the images (1 GiB each): tmpfs or a file system. For each workload it prints the
//! median requests per second, and requests per second of the server's processor time.
#![allow(missing_docs)]

#[path = "../tests/vhost/guest.rs"]
mod guest;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use guest::{Data, FLUSH, Guest, READ, WRITE};
use vdkit_testkit::Rng;

const IMAGE_BYTES: u64 = 1 << 30;
/// Clock ticks per second of processor times in /proc.
const TICKS: f64 = 100.0;

#[derive(Clone, Copy, PartialEq)]
enum Server {
    Vdkit,
    Qemu,
}

#[derive(Clone, Copy)]
struct Workload {
    name: &'static str,
    kind: u32,
    bytes: u32,
    depth: usize,
    /// The image is filled first.
    filled: bool,
    sequential: bool,
}

const WORKLOADS: [Workload; 8] = [
    load("randread 4K QD32", READ, 4096, 32, true, false),
    load("randread 4K QD1", READ, 4096, 1, true, false),
    load("rewrite 4K QD32", WRITE, 4096, 32, true, false),
    load("rewrite 4K QD1", WRITE, 4096, 1, true, false),
    load("first writes 4K QD32", WRITE, 4096, 32, false, false),
    load("read 256K QD8", READ, 256 << 10, 8, true, true),
    load("rewrite 256K QD8", WRITE, 256 << 10, 8, true, true),
    load("first writes 256K QD8", WRITE, 256 << 10, 8, false, true),
];

const fn load(
    name: &'static str,
    kind: u32,
    bytes: u32,
    depth: usize,
    filled: bool,
    sequential: bool,
) -> Workload {
    Workload { name, kind, bytes, depth, filled, sequential }
}

struct Served {
    child: Child,
    socket: PathBuf,
}

impl Served {
    fn start(which: Server, vdkit: &Path, image: &Path) -> Self {
        let socket = image.with_extension("sock");
        // The file may not exist.
        let _ = std::fs::remove_file(&socket);
        let mut command = match which {
            Server::Vdkit => {
                let mut command = Command::new(vdkit);
                command.arg("serve").arg(image).arg("--vhost-user").arg(&socket);
                command
            }
            Server::Qemu => {
                let (image, socket) = (image.display(), socket.display());
                let mut command = Command::new("qemu-storage-daemon");
                command.arg("--blockdev").arg(format!(
                    "driver=qcow2,node-name=d,discard=unmap,file.driver=file,file.filename={image}"
                ));
                command.arg("--export").arg(format!(
                    "type=vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path={socket},\
                     writable=on"
                ));
                command
            }
        };
        let child = command.stdout(Stdio::null()).spawn().expect("a server");
        Self { child, socket }
    }

    /// Processor time so far, in seconds.
    fn cpu(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
        let ticks = |at: usize| fields[at].parse::<f64>().unwrap();
        (ticks(11) + ticks(12)) / TICKS
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        // It may have ended by itself.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.child.wait();
    }
}

/// Requests per second, and per second of the server's processor time.
fn run(served: &Served, work: Workload, most: Duration) -> (f64, f64) {
    let mut guest = Guest::boot(&served.socket, 1);
    let mut rng = Rng::new(7);
    let data = vec![0xa5; work.bytes as usize];
    let places = IMAGE_BYTES / u64::from(work.bytes);
    let sectors = u64::from(work.bytes) / 512;
    let (mut begun, mut ended) = (0, 0_u64);
    // Each location once, in an irregular order.
    let step = if work.sequential { 1 } else { (places / 2 + 1 + rng.below(places / 4) * 2) | 1 };
    let (cpu, began) = (served.cpu(), Instant::now());
    let mut under_way = 0;
    while under_way > 0 || began.elapsed() < most {
        let more = began.elapsed() < most && (work.filled || begun < places);
        while more && under_way < work.depth {
            let place = (begun * step) % places;
            let data = match work.kind {
                READ => Data::In(work.bytes),
                _ => Data::Out(&data),
            };
            guest.submit(0, work.kind, place * sectors, data);
            begun += 1;
            under_way += 1;
        }
        if under_way == 0 {
            break;
        }
        if guest.collect(0) == 0 {
            guest.wait_call(0, Duration::from_secs(10));
        }
        for slot in guest.returned(0) {
            assert_eq!(guest.release(0, slot).0, 0);
            ended += 1;
            under_way -= 1;
        }
    }
    let (took, cpu) = (began.elapsed().as_secs_f64(), served.cpu() - cpu);
    guest.run(0, FLUSH, 0, Data::None);
    (ended as f64 / took, ended as f64 / cpu.max(1.0 / TICKS))
}

fn create(image: &Path, filled: bool) {
    let name = image.to_str().unwrap();
    vdkit_testkit::qemu::img(["create", "-q", "-f", "qcow2", name, "1G"]).ok();
    if filled {
        vdkit_testkit::qemu::io(image, "qcow2", &["write -q -P 90 0 1G"]);
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let [vdkit, folder, rest @ ..] = &arguments[..] else {
        eprintln!("usage: load VDKIT FOLDER [SECONDS [ROUNDS]]: nothing was measured");
        return;
    };
    let number = |at: usize, other: u64| rest.get(at).map_or(other, |text| text.parse().unwrap());
    let (most, rounds) = (Duration::from_secs(number(0, 3)), number(1, 5));
    let image = Path::new(folder).join("load.qcow2");
    println!("{:24} {:>30} {:>36}", "", "requests a second", "a second of processor time");
    for work in WORKLOADS {
        let mut found = [[Vec::new(), Vec::new()], [Vec::new(), Vec::new()]];
        for _ in 0..rounds {
            for (index, which) in [Server::Vdkit, Server::Qemu].into_iter().enumerate() {
                create(&image, work.filled);
                let served = Served::start(which, Path::new(vdkit), &image);
                let (rate, per_cpu) = run(&served, work, most);
                found[index][0].push(rate);
                found[index][1].push(per_cpu);
            }
        }
        let [ours, theirs] = found.map(|both| both.map(|mut values| median(&mut values)));
        println!(
            "{:24} {:9.0} {:9.0}  x {:5.2}     {:9.0} {:9.0}  x {:5.2}",
            work.name,
            ours[0],
            theirs[0],
            ours[0] / theirs[0],
            ours[1],
            theirs[1],
            ours[1] / theirs[1]
        );
    }
    std::fs::remove_file(&image).unwrap();
}
