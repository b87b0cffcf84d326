//! What a client was told is durable, is: seen from outside the server, over NBD.
//!
//! The server's changes of its image are recorded, and each of its syncs takes 3 ms
//! ([`vdkit_testkit::Recorded`]). A client keeps 32 requests in flight and notes at each answer how
//! far the record is. Then the power fails at some of these moments, and what is left of the image
//! must hold every block that was promised by then. So an answer that comes before its sync has
//! ended is seen, whichever thread sent it.

mod common;

use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use common::Scratch;
use vdkit::{CheckReport, Disk, GuestOffset, Repair, Storage};
use vdkit_testkit::nbd::client::{Client, DISC, FLUSH, FUA, Style, WRITE};
use vdkit_testkit::trials::Trial;
use vdkit_testkit::{CrashStorage, Recorded, Rng, require_peer};

const IMAGE: &str = "image";
const SYNC_TAKES: Duration = Duration::from_millis(3);
const DISK_BYTES: u64 = 128 << 20;
const BLOCK_BYTES: u64 = 4096;
const WRITES: u64 = 400;
/// From one strided write to the next: 256 KiB, eight writes to a block of 2 MiB.
const STRIDE_BLOCKS: u64 = 64;
const IN_FLIGHT: usize = 32;
/// Moments at which the power fails.
const MOMENTS: usize = 40;
/// Random survivors of each, beside the one that holds only what was durable.
const SURVIVORS: usize = 2;

/// What the client does, and what it may rely on.
#[derive(Clone, Copy, Debug)]
enum Load {
    /// Each write is durable when it is answered, and the next one lies behind it.
    WritethroughInOrder,
    /// The same with gaps, so that large blocks are allocated again and again, and several writes
    /// go to each.
    WritethroughStrided,
    /// The same, here and there.
    WritethroughRandom,
    /// Each fourth write has FUA, and a flush follows each sixteenth: what was answered before the
    /// flush was sent is durable when the flush is answered. Here and there.
    FuaAndFlushes,
}

const LOADS: [Load; 4] = [
    Load::WritethroughInOrder,
    Load::WritethroughStrided,
    Load::WritethroughRandom,
    Load::FuaAndFlushes,
];

impl Load {
    fn cache(self) -> &'static str {
        match self {
            Self::FuaAndFlushes => "writeback",
            _ => "writethrough",
        }
    }

    /// The blocks to write, each of them once.
    fn blocks(self, rng: &mut Rng) -> Vec<u64> {
        match self {
            Self::WritethroughInOrder => return (0..WRITES).collect(),
            Self::WritethroughStrided => return (0..WRITES).map(|n| n * STRIDE_BLOCKS).collect(),
            Self::WritethroughRandom | Self::FuaAndFlushes => {}
        }
        let mut blocks = Vec::new();
        while blocks.len() < WRITES as usize {
            let block = rng.below(DISK_BYTES / BLOCK_BYTES);
            if !blocks.contains(&block) {
                blocks.push(block);
            }
        }
        blocks
    }

    /// The requests, in the order of their sending.
    fn requests(self, rng: &mut Rng) -> Vec<Request> {
        let mut requests = Vec::new();
        for (n, block) in self.blocks(rng).into_iter().enumerate() {
            let mixed = matches!(self, Self::FuaAndFlushes);
            let promised = !mixed || n % 4 == 3;
            requests.push(Request::Write { block, fua: mixed && promised, promised });
            if mixed && n % 16 == 15 {
                requests.push(Request::Flush);
            }
        }
        requests
    }
}

#[derive(Clone, Copy, Debug)]
enum Request {
    Write { block: u64, fua: bool, promised: bool },
    Flush,
}

/// What an answer promised.
struct Promise {
    /// When it came, on the record.
    moment: usize,
    blocks: Vec<u64>,
}

/// The bytes of a block.
fn bytes_of(block: u64) -> Vec<u8> {
    let words = (0..BLOCK_BYTES / 8).map(|n| block * 8191 + n + 1);
    words.flat_map(u64::to_le_bytes).collect()
}

/// Sends all requests, so many in flight, and notes what was promised when.
fn drive(client: &mut Client, requests: &[Request], record: &CrashStorage) -> Vec<Promise> {
    let mut promises = Vec::new();
    let mut answered: Vec<u64> = Vec::new();
    // What each request promises when it is answered, and the block that it writes.
    let mut under_way: HashMap<u64, (Vec<u64>, Option<u64>)> = HashMap::new();
    let mut rest = requests.iter();
    loop {
        while under_way.len() < IN_FLIGHT
            && let Some(request) = rest.next()
        {
            let (cookie, state) = match *request {
                Request::Write { block, fua, promised } => {
                    let (at, flags) = (block * BLOCK_BYTES, if fua { FUA } else { 0 });
                    let cookie = client.request(WRITE, flags, at, BLOCK_BYTES, &bytes_of(block));
                    (cookie, (if promised { vec![block] } else { Vec::new() }, Some(block)))
                }
                Request::Flush => (client.request(FLUSH, 0, 0, 0, b""), (answered.clone(), None)),
            };
            under_way.insert(cookie, state);
        }
        if under_way.is_empty() {
            return promises;
        }
        let answer = client.chunk(|_| 0);
        let moment = record.moment();
        assert_eq!(answer.kind, 0, "an error: {answer:?}");
        let (blocks, block) = under_way.remove(&answer.cookie).expect("a request of ours");
        answered.extend(block);
        if !blocks.is_empty() {
            promises.push(Promise { moment, blocks });
        }
    }
}

/// Who serves.
#[derive(Clone, Copy, Debug)]
enum Server {
    Vdkit,
    QemuNbd,
}

impl Server {
    fn command(self, scratch: &Scratch, format: &str, load: Load) -> Command {
        let mut command;
        match self {
            Self::Vdkit => {
                command = scratch.command(&["serve", IMAGE, "-f", format, "--nbd", "unix:s.sock"]);
                command.args(["--cache", load.cache()]).stdout(Stdio::null());
            }
            Self::QemuNbd => {
                command = Command::new("qemu-nbd");
                command.args(["-f", format, "--cache", load.cache(), "--persistent", "-k"]);
                command.arg(scratch.path("s.sock")).arg(IMAGE).current_dir(scratch.path(""));
            }
        }
        command
    }
}

/// Serves an image while the load runs.
fn serve(server: Server, scratch: &Scratch, format: &str, load: Load, rng: &mut Rng) -> Run {
    let size = DISK_BYTES.to_string();
    scratch.ok(&["create", "-f", format, IMAGE, &size]);
    let command = server.command(scratch, format, load);
    let mut served = Recorded::spawn(command, &scratch.path(IMAGE), SYNC_TAKES).unwrap();
    let socket = scratch.path("s.sock");
    while UnixStream::connect(&socket).is_err() {
        assert!(served.child.try_wait().unwrap().is_none(), "{server:?} ended");
        std::thread::sleep(Duration::from_millis(5));
    }
    let promises = talk(&socket, &load.requests(rng), &served.record);
    common::signal(served.child.id(), "TERM");
    let (record, code) = served.end();
    assert_eq!(code, Some(0));
    Run { record, promises }
}

fn talk(socket: &Path, requests: &[Request], record: &CrashStorage) -> Vec<Promise> {
    let mut client = Client::open(socket, "", Style::Simple);
    let promises = drive(&mut client, requests, record);
    client.request(DISC, 0, 0, 0, b"");
    promises
}

struct Run {
    record: Arc<CrashStorage>,
    promises: Vec<Promise>,
}

impl Run {
    /// The power fails; what was promised and is not there, as text.
    fn judge(&self, trial: &Trial, rng: &mut Rng) -> Option<String> {
        let count = MOMENTS.min(self.promises.len());
        let mut lost = Vec::new();
        for n in 1..=count {
            let promises = &self.promises[..self.promises.len() * n / count];
            let moment = promises.last().expect("a promise").moment;
            let crash = self.record.crash_at_moment(moment);
            let mut left = vec![crash.only_durable()];
            left.extend((0..SURVIVORS).map(|_| crash.survivor(rng)));
            let blocks: Vec<u64> = promises.iter().flat_map(|p| p.blocks.clone()).collect();
            let faults = left.into_iter().filter_map(|left| fault(trial, Arc::new(left), &blocks));
            lost.extend(faults.max_by_key(|(blocks, _)| *blocks));
        }
        let (_, worst) = lost.iter().max_by_key(|(blocks, _)| *blocks)?;
        Some(format!("lost at {} of {count} moments; the worst: {worst}", lost.len()))
    }
}

/// What is wrong with one survivor: how many blocks are not there, and how it shows.
fn fault(trial: &Trial, left: Arc<dyn Storage>, blocks: &[u64]) -> Option<(usize, String)> {
    let all = blocks.len();
    if trial.driver.name() != "raw" {
        let CheckReport { corruptions, findings, .. } = trial.check(&left, Repair::Nothing);
        if corruptions > 0 {
            return Some((all, format!("{corruptions} corruptions: {findings:?}")));
        }
    }
    let disk = match trial.open(&left, false) {
        Ok(disk) => disk,
        Err(error) => return Some((all, format!("cannot be opened: {error}"))),
    };
    let gone = blocks.iter().filter(|block| !holds(&disk, **block)).count();
    (gone > 0).then(|| (gone, format!("{gone} of {all} blocks")))
}

fn holds(disk: &Disk, block: u64) -> bool {
    let mut bytes = vec![0; BLOCK_BYTES as usize];
    disk.read_at(&mut bytes, GuestOffset(block * BLOCK_BYTES)).is_ok() && bytes == bytes_of(block)
}

/// All loads on one format.
fn nothing_promised_is_lost(server: Server, format: &str) {
    let mut rng = Rng::from_env(0x7e57);
    let driver = vdkit::format(format).unwrap();
    let trial = Trial {
        driver,
        options: "",
        guest_bytes: DISK_BYTES,
        write_bytes_max: BLOCK_BYTES,
        resizes: false,
    };
    let mut faults = Vec::new();
    for load in LOADS {
        let scratch = Scratch::new();
        let run = serve(server, &scratch, format, load, &mut rng);
        assert!(run.promises.len() >= MOMENTS, "{load:?}: {} promises", run.promises.len());
        faults.extend(run.judge(&trial, &mut rng).map(|fault| format!("{load:?}: {fault}")));
    }
    assert!(
        faults.is_empty(),
        "{server:?}, {format}, seed {:#x}:\n{}",
        rng.seed(),
        faults.join("\n")
    );
}

#[test]
fn raw_holds_what_was_promised() {
    nothing_promised_is_lost(Server::Vdkit, "raw");
}

#[test]
fn qcow2_holds_what_was_promised() {
    nothing_promised_is_lost(Server::Vdkit, "qcow2");
}

#[test]
fn vdi_holds_what_was_promised() {
    nothing_promised_is_lost(Server::Vdkit, "vdi");
}

#[test]
fn vmdk_holds_what_was_promised() {
    nothing_promised_is_lost(Server::Vdkit, "vmdk");
}

#[test]
fn vhd_holds_what_was_promised() {
    nothing_promised_is_lost(Server::Vdkit, "vpc");
}

#[test]
fn vhdx_holds_what_was_promised() {
    nothing_promised_is_lost(Server::Vdkit, "vhdx");
}

/// The record and the judgement are not stricter than what a server can keep.
#[test]
fn qemu_nbd_holds_what_was_promised() {
    if require_peer("qemu-nbd") {
        nothing_promised_is_lost(Server::QemuNbd, "qcow2");
    }
}
