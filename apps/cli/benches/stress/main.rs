//! Whether a request can hang: clients, live overlays, commits and cancels, pauses, and a file system
//! that fills and empties, all at the same time.
//!
//! ```text
//! cargo bench -p vdkit-cli --bench stress                             10 minutes
//! cargo bench -p vdkit-cli --bench stress -- --minutes 60 --seed 7 --file-system ext4
//! cargo bench -p vdkit-cli --bench stress -- --program /usr/bin/vdkit    another build of it
//! ```
//!
//! A *life* is a file system of its own, a service on it, and half a minute of all that. At its end
//! there is space, every client has its answers, every byte is what its client knows, the service
//! ends and the image is sound. Fails where a request, a command or the end takes longer than a
//! minute (and tells then what each thread of the service waits for), and where a byte or an answer
//! is wrong. Needs root, for the file systems.

mod client;
mod service;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use client::{Client, Tally};
use service::{Service, administer, fill_and_empty};
use vdkit_testkit::{Rng, fs};

/// Whatever takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(60);
const CLIENTS: u64 = 4;
/// The disk; all images of a chain and a snapshot's copies fit into the file system.
const DISK_BYTES: u64 = 16 << 20;
const FILE_SYSTEM_BYTES: u64 = 320 << 20;

struct Wanted {
    length: Duration,
    life: Duration,
    seed: u64,
    file_system: Option<String>,
    program: PathBuf,
}

impl Wanted {
    fn from_arguments() -> Self {
        let mut wanted = Self {
            length: Duration::from_secs(600),
            life: Duration::from_secs(30),
            seed: 1,
            file_system: None,
            program: env!("CARGO_BIN_EXE_vdkit").into(),
        };
        let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
        while let Some(name) = arguments.next() {
            let value = arguments.next().unwrap_or_else(|| panic!("{name} needs a value"));
            let number =
                || value.parse::<f64>().unwrap_or_else(|_| panic!("{name} needs a number"));
            match name.as_str() {
                "--minutes" => wanted.length = Duration::from_secs_f64(number() * 60.0),
                "--life" => wanted.life = Duration::from_secs_f64(number()),
                "--seed" => wanted.seed = number() as u64,
                "--file-system" => wanted.file_system = Some(value),
                "--program" => wanted.program = value.into(),
                _ => panic!(
                    "{name}: known are --minutes, --life (seconds), --seed, --file-system, --program"
                ),
            }
        }
        wanted
    }
}

fn main() {
    let wanted = Wanted::from_arguments();
    let (began, mut seed, mut all) = (Instant::now(), wanted.seed, Tally::default());
    let mut lives = 0;
    while began.elapsed() < wanted.length {
        let kind = match &wanted.file_system {
            Some(kind) => kind,
            None if seed.is_multiple_of(2) => "tmpfs",
            None => "ext4",
        };
        let tally = live(&wanted, kind, seed);
        println!("seed {seed} on {kind}: {tally}");
        all.add(&tally);
        (seed, lives) = (seed + 1, lives + 1);
    }
    println!("{lives} lives in {} s: {all}", began.elapsed().as_secs());
}

/// One life. Ends the process where anything is wrong.
fn live(wanted: &Wanted, kind: &str, seed: u64) -> Tally {
    let Some(mounted) = fs::mounted(kind, FILE_SYSTEM_BYTES) else {
        panic!("no {kind} can be mounted here");
    };
    let mut rng = Rng::new(seed);
    let service = Arc::new(Service::start(&wanted.program, mounted.path(), &mut rng));
    explain_faults(&service, seed);
    let (over, empty) = (AtomicBool::new(false), AtomicBool::new(false));
    let tally = std::thread::scope(|scope| {
        let (service, over, empty) = (&*service, &over, &empty);
        let clients: Vec<_> = (0..CLIENTS)
            .map(|number| {
                let seed = rng.next_u64();
                scope.spawn(move || Client::new(service, number, seed).work(over))
            })
            .collect();
        let seeds = [rng.next_u64(), rng.next_u64()];
        let filler = scope.spawn(move || fill_and_empty(service.folder(), seeds[0], empty));
        let admin = scope.spawn(move || administer(service, seeds[1], over));
        std::thread::sleep(wanted.life);
        // From here on there is space, and nobody pauses: all must come to an end.
        empty.store(true, Ordering::SeqCst);
        filler.join().expect("a fault ends the process");
        over.store(true, Ordering::SeqCst);
        let mut tally = admin.join().expect("a fault ends the process");
        service.ctl(&["resume"]);
        for client in clients {
            tally.add(&client.join().expect("a fault ends the process"));
        }
        tally
    });
    service.end();
    // The next life explains its own.
    let _ = std::panic::take_hook();
    tally
}

/// Where a thread finds a fault, all that can be said of the service is said at that moment, while
/// the thread's connection is still there, and the process ends: other threads may wait for ever.
fn explain_faults(service: &Arc<Service>, seed: u64) {
    let (service, usual) = (Arc::clone(service), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |fault| {
        usual(fault);
        eprintln!("seed {seed}");
        service.explain();
        service.kill();
        std::process::exit(1)
    }));
}
