//! Requests left by a dead server are done by the next one.

use std::time::Duration;

use vm_memory::{Bytes, GuestAddress};

use crate::guest::*;
use crate::rig::Rig;
use vdkit_testkit::disks::MIB;

/// The records of queue 0 as left by a dead server.
struct Notes {
    file: std::fs::File,
}

impl Notes {
    fn of(guest: &Guest) -> Self {
        let (_, file) = guest.inflight.as_ref().unwrap();
        Self { file: file.try_clone().unwrap().into() }
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        std::os::unix::fs::FileExt::write_all_at(&self.file, bytes, at).unwrap();
    }

    fn take(&self, head: u16, counter: u64) {
        let at = 16 + 16 * u64::from(head);
        self.put(at + 8, &counter.to_le_bytes());
        self.put(at, &[1]);
    }
}

/// A guest that wrote, and whose server has died.
fn after_a_death() -> (Rig, Guest) {
    let rig = Rig::new(64 * MIB);
    let mut guest = Guest::new(1);
    guest.connect(&rig.socket);
    guest.start();
    guest.write(0, 0, &[1; 512]);
    guest.disconnect();
    (rig, guest)
}

/// Taken but unanswered requests are repeated in the order of taking, followed by those not taken.
#[test]
fn requests_in_flight_are_done_again() {
    let (rig, mut guest) = after_a_death();
    guest.connect(&rig.socket);
    // The previous server took three and died.
    let slots: Vec<u16> =
        (0..5).map(|i| guest.submit(0, WRITE, 8 * i, Data::Out(&[i as u8 + 10; 512]))).collect();
    let notes = Notes::of(&guest);
    for (counter, slot) in [(9, slots[0]), (7, slots[1]), (8, slots[2])] {
        notes.take(slot * 4, counter);
    }
    guest.start();
    for slot in slots {
        assert_eq!(guest.finish(0, slot).0, 0);
    }
    for i in 0..5 {
        assert_eq!(guest.read(0, 8 * i, 512), [i as u8 + 10; 512]);
    }
    rig.end();
}

/// It died after the answer, before updating its records: the request is not repeated.
#[test]
fn answered_requests_are_not_done_again() {
    let rig = Rig::new(64 * MIB);
    let mut guest = Guest::new(1);
    guest.connect(&rig.socket);
    guest.start();
    let slot = guest.submit(0, WRITE, 0, Data::Out(&[1; 512]));
    assert_eq!(guest.finish(0, slot).0, 0);
    guest.disconnect();
    guest.connect(&rig.socket);
    let notes = Notes::of(&guest);
    notes.take(slot * 4, 0);
    // The old used index.
    notes.put(14, &0_u16.to_le_bytes());
    guest.start();
    // The driver would notice a second answer.
    guest.write(0, 8, &[2; 512]);
    assert_eq!(guest.collect(0), 0);
    rig.end();
}

/// It died after the answer, before it could notify the guest.
#[test]
fn a_guest_is_notified_when_its_queue_starts_again() {
    let (rig, mut guest) = after_a_death();
    while guest.wait_call(0, Duration::ZERO) {}
    guest.connect(&rig.socket);
    guest.start();
    assert!(guest.wait_call(0, PATIENCE));
    rig.end();
}

/// Arbitrary records.
#[test]
fn notes_from_a_hostile_monitor() {
    let rig = Rig::new(MIB);
    let mut rng = vdkit_testkit::Rng::new(3);
    for _ in 0..50 {
        let mut guest = Guest::new(1);
        guest.connect(&rig.socket);
        let notes = Notes::of(&guest);
        let mut bytes: Vec<u8> = (0..16 + 16 * 256).map(|_| rng.below(3) as u8).collect();
        if rng.below(2) == 0 {
            bytes[8..12].copy_from_slice(&[1, 0, 0, 1]);
        }
        notes.put(0, &bytes);
        // If all heads are recorded as taken, heads without requests are found.
        guest.mem.write_slice(&[0; 4096], GuestAddress(GUEST)).unwrap();
        guest.start();
        guest.kick(0);
        guest.stop_queue(0);
    }
    rig.boot(1).write(0, 0, &[1; 512]);
    rig.end();
}
