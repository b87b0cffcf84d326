//! What a server that died has left is done by the next one.

use vm_memory::{Bytes, GuestAddress};

use crate::guest::*;
use crate::rig::Rig;
use vdkit_testkit::disks::MIB;

/// The notes of queue 0, as a server that dies leaves them.
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

/// Requests that were taken and not answered are done in the order in which they were taken, and
/// those behind them that were not taken too.
#[test]
fn requests_in_flight_are_done_again() {
    let rig = Rig::new(64 * MIB);
    let mut guest = Guest::new(1);
    guest.connect(&rig.socket);
    guest.start();
    guest.write(0, 0, &[1; 512]);
    guest.disconnect();
    guest.connect(&rig.socket);
    // The server before took three and died.
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

/// It died after the answer, before its notes said so: the request is not done again.
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
    // The used index as it was before.
    notes.put(14, &0_u16.to_le_bytes());
    guest.start();
    // It would be answered a second time, which the driver would notice.
    guest.write(0, 8, &[2; 512]);
    assert_eq!(guest.collect(0), 0);
    rig.end();
}

/// Notes that say anything.
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
        // Where the notes say that all is taken, heads without requests are found.
        guest.mem.write_slice(&[0; 4096], GuestAddress(GUEST)).unwrap();
        guest.start();
        guest.kick(0);
        guest.stop_queue(0);
    }
    rig.boot(1).write(0, 0, &[1; 512]);
    rig.end();
}
