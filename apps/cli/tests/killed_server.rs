//! A server in writethrough mode is killed at random moments; nothing that it acknowledged is lost.
//!
//! fio writes over eight connections, four requests on each, and logs each write that was
//! acknowledged. SIGKILL ends the server; another one serves the image again, and each acknowledged
//! block must hold what fio wrote there, by fio's own header and checksum. (fio's own way, a
//! verification from a saved state, counts writes that were only sent when the server died: it
//! reports those as lost with qemu-nbd too.)
//!
//! The page cache survives a SIGKILL. So this finds what a server keeps in its own memory only, such
//! as map entries; whether an answer waits for its sync is the matter of `durable.rs`.
//!
//! `VDKIT_KILLS=200 cargo test -p vdkit-cli --test killed_server` kills so many times, the formats
//! in turn, instead of once a format. `VDKIT_KILLED=qemu-nbd` kills qemu-nbd instead: whether the
//! test asks for more than a server can keep.

mod common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::Scratch;
use vdkit_testkit::nbd::client::{Client, Style};
use vdkit_testkit::{Killed, Rng, require_peer};

const FORMATS: [&str; 6] = ["qcow2", "raw", "vmdk", "vdi", "vpc", "vhdx"];
const CONNECTIONS: u64 = 8;
/// What one connection writes to in one round; each round has an area of its own.
const AREA_BYTES: u64 = 8 << 20;
const ROUND_BYTES: u64 = CONNECTIONS * AREA_BYTES;
const BLOCK_BYTES: usize = 4096;
/// The kill comes at most so long after the first write has shown, in one half of the rounds and in
/// the other: among the first answers, and anywhere.
const KILLED_WITHIN_US: [u64; 2] = [2_000, 100_000];

/// Whether the control is killed.
fn is_control() -> bool {
    std::env::var("VDKIT_KILLED").is_ok_and(|program| program == "qemu-nbd")
}

/// Starts a server of an image.
fn serve(scratch: &Scratch, format: &str) -> Killed {
    let mut command;
    if is_control() {
        command = Command::new("qemu-nbd");
        command.args(["--cache=writethrough", "--persistent", "--shared=16", "-f", format, "-k"]);
        command.arg(scratch.path("s.sock")).arg(format).current_dir(scratch.path(""));
    } else {
        let to = ["--nbd", "unix:s.sock", "--cache", "writethrough"];
        command = scratch.command(&["serve", format, "-f", format]);
        command.args(to).stdout(Stdio::null());
    }
    let mut child = Killed(command.spawn().unwrap());
    // The socket of the server before is still there, and nobody listens.
    while UnixStream::connect(scratch.path("s.sock")).is_err() {
        assert!(child.try_wait().unwrap().is_none(), "the server ended");
        std::thread::sleep(Duration::from_millis(2));
    }
    child
}

/// Starts fio in an area of its own. It writes each block at most once.
fn fio(scratch: &Scratch, round: u64, seed: u64) -> Killed {
    let mut command = Command::new("fio");
    command
        .args(["--name=w", "--ioengine=nbd", "--uri=nbd+unix:///?socket=s.sock", "--thread"])
        .args(["--rw=randwrite", "--bs=4k", "--iodepth=4", "--verify=crc32c", "--do_verify=0"])
        .args(["--verify_state_save=0", "--write_lat_log=w", "--log_offset=1"])
        .args(["--disable_slat=1", "--disable_clat=1", "--output=fio.log"])
        .arg(format!("--numjobs={CONNECTIONS}"))
        .arg(format!("--size={AREA_BYTES}"))
        .arg(format!("--offset={}", round * ROUND_BYTES))
        .arg(format!("--offset_increment={AREA_BYTES}"))
        .arg(format!("--randseed={}", seed % 1_000_000))
        .current_dir(scratch.path(""))
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    Killed(command.spawn().unwrap())
}

/// Where the blocks are that fio's logs name as written.
fn acknowledged(scratch: &Scratch) -> Vec<u64> {
    let mut offsets = Vec::new();
    for connection in 1..=CONNECTIONS {
        let path = scratch.path(&format!("w_lat.{connection}.log"));
        // There is none where no write was acknowledged.
        let Ok(text) = fs::read_to_string(&path) else { continue };
        offsets.extend(text.lines().map(|line| {
            // Milliseconds, latency, direction (1 is a write), bytes, offset, priority.
            let fields: Vec<u64> = line.split(", ").map(|n| n.parse().unwrap()).collect();
            assert_eq!((fields[2], fields[3]), (1, BLOCK_BYTES as u64), "{line}");
            fields[4]
        }));
        fs::remove_file(path).unwrap();
    }
    offsets
}

/// Whether a block is one that fio wrote for this place, whole: `struct verify_header` in fio's
/// verify.h, then the checksum of the rest, which fio leaves without its last inversion.
fn is_fios(block: &[u8], offset: u64) -> bool {
    let magic = u16::from_le_bytes(block[0..2].try_into().unwrap());
    let place = u64::from_le_bytes(block[16..24].try_into().unwrap());
    let checksum = u32::from_le_bytes(block[40..44].try_into().unwrap());
    (magic, place, checksum) == (0xacca, offset, !crc32c::crc32c(&block[44..]))
}

/// Reads all these blocks over NBD; those that are not there, and how that shows.
fn lost(scratch: &Scratch, offsets: &[u64]) -> Vec<(u64, &'static str)> {
    let mut client = Client::open(&scratch.path("s.sock"), "", Style::Simple);
    let fault = |offset: &u64| match client.read(*offset, BLOCK_BYTES) {
        Ok(block) if is_fios(&block, *offset) => None,
        Ok(block) if block.iter().all(|byte| *byte == 0) => Some((*offset, "reads as zero")),
        Ok(_) => Some((*offset, "reads as something else")),
        Err(_) => Some((*offset, "cannot be read")),
    };
    offsets.iter().filter_map(fault).collect()
}

/// One image and its rounds.
struct Victim {
    format: &'static str,
    scratch: Scratch,
    rounds: u64,
    acknowledged: Vec<u64>,
    faults: Vec<String>,
}

impl Victim {
    fn new(format: &'static str, rounds: u64) -> Self {
        let scratch = Scratch::new();
        let size = (rounds * ROUND_BYTES).to_string();
        scratch.ok(&["create", "-f", format, format, &size]);
        Self { format, scratch, rounds: 0, acknowledged: Vec::new(), faults: Vec::new() }
    }

    fn modified(&self) -> (i64, i64) {
        let metadata = fs::metadata(self.scratch.path(self.format)).unwrap();
        (metadata.mtime(), metadata.mtime_nsec())
    }

    /// One kill, and what is there afterwards. Returns how many writes were acknowledged.
    fn round(&mut self, rng: &mut Rng) -> usize {
        let mut server = serve(&self.scratch, self.format);
        let before = self.modified();
        let mut writer = fio(&self.scratch, self.rounds, rng.next_u64());
        while self.modified() == before && writer.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let within = KILLED_WITHIN_US[rng.below(2) as usize];
        std::thread::sleep(Duration::from_micros(rng.below(within)));
        server.kill().unwrap();
        server.wait().unwrap();
        writer.wait().unwrap();

        let mut new = acknowledged(&self.scratch);
        let count = new.len();
        self.judge(&format!("round {}", self.rounds), &mut new);
        self.acknowledged.extend(new);
        self.rounds += 1;
        count
    }

    /// Takes out what is not there, and notes it.
    fn judge(&mut self, when: &str, offsets: &mut Vec<u64>) {
        let _server = serve(&self.scratch, self.format);
        let lost = lost(&self.scratch, offsets);
        if !lost.is_empty() {
            let (all, format) = (offsets.len(), self.format);
            self.faults.push(format!("{format}, {when}: lost {} of {all}: {lost:?}", lost.len()));
        }
        offsets.retain(|offset| !lost.iter().any(|(gone, _)| gone == offset));
    }

    /// What all rounds wrote is there, and the image is sound but for leaks; what is wrong, by
    /// round.
    fn end(mut self) -> Vec<String> {
        let mut all = std::mem::take(&mut self.acknowledged);
        self.judge("at the end", &mut all);
        if self.format != "raw" && !is_control() {
            let checked = self.scratch.run(&["check", "-f", self.format, self.format]);
            if !matches!(checked.code, Some(0 | 3)) {
                self.faults.push(format!("{}, at the end: {checked:?}", self.format));
            }
        }
        self.faults
    }
}

#[test]
fn a_killed_server_loses_nothing_that_it_acknowledged() {
    if !require_peer("fio") {
        return;
    }
    let kills = std::env::var("VDKIT_KILLS").ok().and_then(|text| text.parse().ok());
    let kills = kills.unwrap_or(FORMATS.len());
    let mut rng = Rng::from_env(0x6b11);
    let rounds = kills.div_ceil(FORMATS.len() - 1) as u64;
    // QEMU's own VHDX driver loses acknowledged writes to a kill.
    let known = if is_control() { FORMATS.len() - 1 } else { FORMATS.len() };
    let formats = &FORMATS[..known.min(kills)];
    let mut victims: Vec<Victim> = formats.iter().map(|f| Victim::new(f, rounds)).collect();
    let mut acknowledged = 0;
    for kill in 0..kills {
        let victim = &mut victims[kill % formats.len()];
        acknowledged += victim.round(&mut rng);
    }
    let faults: Vec<String> = victims.into_iter().flat_map(Victim::end).collect();
    let what = format!("{kills} kills, {acknowledged} writes acknowledged, seed {:#x}", rng.seed());
    eprintln!("{what}");
    assert!(faults.is_empty(), "{what}:\n{}", faults.join("\n"));
    // Some kills come before the first answer.
    assert!(acknowledged >= kills, "fio wrote next to nothing: {acknowledged} in {kills} rounds");
}
