//! A client that knows what it must read.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vdkit_testkit::Rng;
use vdkit_testkit::nbd::client::*;

use crate::service::Service;
use crate::{CLIENTS, DISK_BYTES, PATIENCE};

/// What is written and read is a number of these.
const UNIT: u64 = 4096;
/// Units side by side that belong to one client; the next ones belong to the next client.
const STRIPE: u64 = 32;
/// Requests under way. QEMU's server takes as many before it has to send, so a client may send all
/// of them before it reads.
const DEPTH: usize = 16;

/// What happened.
#[derive(Debug, Default)]
pub struct Tally {
    pub requests: u64,
    pub reconnects: u64,
    pub overlays: u64,
    pub commits: u64,
    pub cancelled: u64,
    pub refused: u64,
    /// Requests that waited for space.
    pub kept: u64,
    /// The longest that a request took.
    pub longest: Duration,
}

impl Tally {
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.reconnects += other.reconnects;
        self.overlays += other.overlays;
        self.commits += other.commits;
        self.cancelled += other.cancelled;
        self.refused += other.refused;
        self.kept += other.kept;
        self.longest = self.longest.max(other.longest);
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { requests, reconnects, overlays, commits, cancelled, refused, kept, longest } =
            self;
        write!(
            f,
            "{requests} requests, {kept} of them kept, {reconnects} reconnects, {overlays} \
             overlays, {commits} commits, {cancelled} cancelled, {refused} commands refused, \
             longest {:.1} s",
            longest.as_secs_f64()
        )
    }
}

/// A request under way.
struct Open {
    command: u16,
    /// The stripe, and the units within it.
    stripe: u64,
    units: std::ops::Range<u64>,
    byte: u8,
    began: Instant,
}

/// A connection and what its stripes hold: the byte of each unit, where that is known.
pub struct Client<'a> {
    service: &'a Service,
    connection: vdkit_testkit::nbd::client::Client,
    number: u64,
    rng: Rng,
    known: Vec<Option<u8>>,
    open: HashMap<u64, Open>,
    tally: Tally,
}

fn stripes() -> u64 {
    DISK_BYTES / UNIT / STRIPE / CLIENTS
}

impl<'a> Client<'a> {
    pub fn new(service: &'a Service, number: u64, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let connection = connect(service, &mut rng);
        let known = vec![Some(0); (stripes() * STRIPE) as usize];
        let (open, tally) = (HashMap::new(), Tally::default());
        Self { service, connection, number, rng, known, open, tally }
    }

    /// Works until it is over, and then holds all against what it knows.
    pub fn work(mut self, over: &AtomicBool) -> Tally {
        while !over.load(Ordering::SeqCst) {
            match self.rng.below(400) {
                0 => self.reconnect(),
                1 => std::thread::sleep(Duration::from_millis(self.rng.below(500))),
                _ => {}
            }
            for _ in 0..self.rng.below(DEPTH as u64 + 1) {
                if self.open.len() < DEPTH {
                    self.ask();
                }
            }
            let left = self.rng.below(self.open.len() as u64 + 1) as usize;
            while self.open.len() > left {
                self.hear();
            }
        }
        while !self.open.is_empty() {
            self.hear();
        }
        for stripe in 0..stripes() {
            self.send(READ, 0, stripe, 0..STRIPE, 0);
            self.hear_all();
        }
        self.send(FLUSH, 0, 0, 0..0, 0);
        self.hear_all();
        self.tally
    }

    fn hear_all(&mut self) {
        while !self.open.is_empty() {
            self.hear();
        }
    }

    /// Leaves with requests under way, and comes again.
    fn reconnect(&mut self) {
        for (_, open) in self.open.drain() {
            if open.command != READ {
                let first = open.stripe * STRIPE;
                let units = first + open.units.start..first + open.units.end;
                units.for_each(|unit| self.known[unit as usize] = None);
            }
        }
        self.connection.socket.shutdown(std::net::Shutdown::Both).unwrap();
        // What the service is writing at this moment, it may write.
        std::thread::sleep(Duration::from_millis(500));
        self.connection = connect(self.service, &mut self.rng);
        self.tally.reconnects += 1;
        // What waited must not come over this any more.
        for unit in 0..self.known.len() as u64 {
            if self.known[unit as usize].is_none() {
                let (stripe, unit) = (unit / STRIPE, unit % STRIPE);
                self.send(WRITE, 0, stripe, unit..unit + 1, 0xff);
                if self.open.len() == DEPTH {
                    self.hear_all();
                }
            }
        }
        self.hear_all();
    }

    fn ask(&mut self) {
        let stripe = self.rng.below(stripes());
        if self.open.values().any(|open| open.stripe == stripe && open.command != FLUSH) {
            return;
        }
        let first = self.rng.below(STRIPE);
        let units = first..first + 1 + self.rng.below(STRIPE - first);
        let byte = self.rng.next_u64() as u8;
        let fua = if self.rng.chance(1, 10) { FUA } else { 0 };
        match self.rng.below(20) {
            0..9 => self.send(WRITE, fua, stripe, units, byte),
            9 => self.send(WRITE_ZEROES, fua, stripe, units, 0),
            10 => self.send(TRIM, fua, stripe, units, 0),
            11 => self.send(CACHE, 0, stripe, units, 0),
            12 => self.send(FLUSH, 0, 0, 0..0, 0),
            _ => self.send(READ, 0, stripe, units, 0),
        }
    }

    fn send(
        &mut self,
        command: u16,
        flags: u16,
        stripe: u64,
        units: std::ops::Range<u64>,
        byte: u8,
    ) {
        let at = ((stripe * CLIENTS + self.number) * STRIPE + units.start) * UNIT;
        let len = (units.end - units.start) * UNIT;
        let at = if command == FLUSH { 0 } else { at };
        let payload = if command == WRITE { vec![byte; len as usize] } else { Vec::new() };
        let extended = command == WRITE && self.connection.style == Style::Extended;
        let flags = if extended { flags | PAYLOAD_LEN } else { flags };
        let began = Instant::now();
        let cookie = self.connection.request(command, flags, at, len, &payload);
        self.open.insert(cookie, Open { command, stripe, units, byte, began });
    }

    /// Takes one chunk of a reply.
    fn hear(&mut self) {
        let Self { connection, open, .. } = &mut *self;
        let len = |cookie| {
            let open: &Open = &open[&cookie];
            let units = open.units.end - open.units.start;
            if open.command == READ { (units * UNIT) as usize } else { 0 }
        };
        let chunk = connection.chunk(len);
        let known = &self.open[&chunk.cookie];
        assert!(
            chunk.kind < 1 << 15,
            "request {} was answered with an error: {:?}",
            known.command,
            String::from_utf8_lossy(&chunk.payload)
        );
        let first = known.stripe * STRIPE + known.units.start;
        let start = ((known.stripe * CLIENTS + self.number) * STRIPE + known.units.start) * UNIT;
        match (known.command, chunk.kind) {
            (READ, 0) if self.connection.style == Style::Simple => {
                self.compare(first, &chunk.payload)
            }
            (READ, 1) => {
                let at = u64::from_be_bytes(chunk.payload[..8].try_into().unwrap());
                self.compare(first + (at - start) / UNIT, &chunk.payload[8..]);
            }
            (READ, 2) => {
                let at = u64::from_be_bytes(chunk.payload[..8].try_into().unwrap());
                let len = u32::from_be_bytes(chunk.payload[8..12].try_into().unwrap());
                self.compare(first + (at - start) / UNIT, &vec![0; len as usize]);
            }
            _ => {}
        }
        if chunk.flags & 1 == 1 {
            self.end(chunk.cookie);
        }
    }

    fn compare(&self, first: u64, bytes: &[u8]) {
        for (unit, bytes) in bytes.chunks(UNIT as usize).enumerate() {
            let unit = first + unit as u64;
            if let Some(known) = self.known[unit as usize]
                && bytes.iter().any(|byte| *byte != known)
            {
                panic!("client {}, its unit {unit}: {} instead of {known}", self.number, bytes[0]);
            }
        }
    }

    fn end(&mut self, cookie: u64) {
        let Some(open) = self.open.remove(&cookie) else { return };
        let after = match open.command {
            WRITE => Some(Some(open.byte)),
            WRITE_ZEROES => Some(Some(0)),
            // It may read as before, or as zero.
            TRIM => Some(None),
            _ => None,
        };
        if let Some(after) = after {
            for unit in open.units {
                self.known[(open.stripe * STRIPE + unit) as usize] = after;
            }
        }
        self.tally.requests += 1;
        self.tally.longest = self.tally.longest.max(open.began.elapsed());
    }
}

fn connect(service: &Service, rng: &mut Rng) -> vdkit_testkit::nbd::client::Client {
    let style = STYLES[rng.below(3) as usize];
    let connection =
        vdkit_testkit::nbd::client::Client::open(&service.folder().join("n.sock"), "", style);
    connection.socket.set_read_timeout(Some(PATIENCE)).unwrap();
    connection.socket.set_write_timeout(Some(PATIENCE)).unwrap();
    connection
}
