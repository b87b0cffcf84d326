//! Loom model of what a flush promises, over all interleavings of a writer, a flush and a server that
//! crashes. The server keeps writes in a cache until a flush, and a crash loses the cache.

#[path = "../../src/durability.rs"]
mod durability;

use std::sync::Arc;

use durability::Durability;
use vdkit_testbase::loom_sync::{Mutex, check, thread};

/// The current server. Requests name the server that they were sent to.
#[derive(Debug, Default)]
struct Server {
    /// Counts the servers.
    number: u64,
    cached: u64,
    durable: u64,
}

/// The state under the client's lock.
#[derive(Debug, Default)]
struct Shared {
    durability: Durability,
    /// The server of the connection.
    server: Option<u64>,
}

#[derive(Debug, Default)]
struct Model {
    server: Mutex<Server>,
    client: Mutex<Shared>,
    /// Writes that returned to their caller, and the generation that answered the last one.
    acknowledged: Mutex<(u64, u64)>,
    replies_are_lost: bool,
}

#[derive(Clone, Copy)]
enum Request {
    Write(u64),
    Flush,
}

impl Model {
    /// What the server does with a request, in one step; `false`: it is gone.
    fn perform(&self, to: u64, request: Request) -> bool {
        let mut server = self.server.lock();
        if server.number != to {
            return false;
        }
        match request {
            Request::Write(write) => server.cached |= write,
            Request::Flush => server.durable |= server.cached,
        }
        true
    }

    /// As `Client::run`: sends a request, up to `tries` times. `None`: the connection was lost each
    /// time. Otherwise the generation that answered.
    fn run(&self, request: Request, tries: usize) -> Option<u64> {
        for _ in 0..tries {
            let (generation, to) = {
                let mut client = self.client.lock();
                let to = *client.server.get_or_insert_with(|| self.server.lock().number);
                (client.durability.generation(), to)
            };
            let covers = self.client.lock().durability.written();
            let mut answered = self.perform(to, request);
            if answered && self.replies_are_lost {
                answered = self.server.lock().number == to;
            }
            let mut client = self.client.lock();
            if answered {
                let counts = match request {
                    Request::Write(_) => client.durability.count_write(generation, false),
                    Request::Flush => client.durability.count_flush(generation, covers),
                };
                if counts {
                    return Some(generation);
                }
            } else if client.durability.end_generation(generation, "lost") {
                client.server = None;
            }
        }
        None
    }

    fn write(&self, write: u64) {
        if let Some(generation) = self.run(Request::Write(write), 3) {
            let mut acknowledged = self.acknowledged.lock();
            *acknowledged = (acknowledged.0 | write, generation);
        }
    }

    /// As `Client::flush`. Claims nothing that is not so.
    fn flush(&self, tries: usize) -> bool {
        let before = self.acknowledged.lock().0;
        let answered = self.run(Request::Flush, tries).is_some();
        let succeeds = answered && self.client.lock().durability.doubtful().is_none();
        if succeeds {
            assert_eq!(before & !self.server.lock().durable, 0, "a flush claims a lost write");
        }
        succeeds
    }

    /// The server crashes, and another one follows.
    fn crash(&self) {
        let mut server = self.server.lock();
        server.number += 1;
        server.cached = 0;
    }
}

/// A flush and a crash beside `writes` writes, after a write that was flushed.
fn model(preemptions: usize, replies_are_lost: bool, writes: u64, tries: usize) {
    check(preemptions, move || {
        let model = Arc::new(Model { replies_are_lost, ..Model::default() });
        model.write(1);
        assert!(model.flush(1));
        let (writer, crashing) = (model.clone(), model.clone());
        let writer = thread::spawn(move || (1..=writes).for_each(|n| writer.write(1 << n)));
        let crashing = thread::spawn(move || crashing.crash());
        model.flush(tries);
        writer.join().unwrap();
        crashing.join().unwrap();
        // The end of the old server may not have been seen yet.
        let last = model.flush(3);
        let (acknowledged, answered_by) = *model.acknowledged.lock();
        let now = model.client.lock().durability.generation();
        if last {
            assert_eq!(acknowledged & !model.server.lock().durable, 0);
        } else {
            assert!(writes > 0, "a flush fails though nothing was unflushed");
        }
        if writes == 1 && answered_by == now {
            assert!(last, "a flush fails though no generation ended with unflushed writes");
        }
    });
}

#[test]
fn a_flush_that_fails_without_a_server_puts_nothing_in_doubt() {
    for replies_are_lost in [false, true] {
        for tries in [1, 3] {
            model(3, replies_are_lost, 0, tries);
        }
    }
}

#[test]
fn a_write_that_is_answered_beside_a_flush_is_durable_or_in_doubt() {
    for replies_are_lost in [false, true] {
        for tries in [1, 3] {
            model(3, replies_are_lost, 1, tries);
        }
        model(2, replies_are_lost, 2, 3);
    }
}
