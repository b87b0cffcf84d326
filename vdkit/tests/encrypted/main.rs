//! Encrypted images: against a flat buffer, against QEMU in both directions, and through power
//! cuts.

mod container;
mod crash;
mod kinds;
mod qemu;

use kinds::{Image, KINDS};
use vdkit::{Disk, GuestOffset};
use vdkit_testkit::Rng;
use vdkit_testkit::read_all;

/// Random operations on a disk and on a flat buffer.
struct Model {
    bytes: Vec<u8>,
    rng: Rng,
}

impl Model {
    fn range(&mut self) -> (usize, usize) {
        let at = self.rng.below(self.bytes.len() as u64 - 1);
        let most = [40, 700, 5000, 150_000][self.rng.below(4) as usize];
        let len = self.rng.within(1..most).min(self.bytes.len() as u64 - at);
        // Often whole sectors, as guests write.
        if self.rng.chance(1, 2) {
            let at = at / 512 * 512;
            let len = len.next_multiple_of(512).min(self.bytes.len() as u64 / 512 * 512 - at);
            return (at as usize, len as usize);
        }
        (at as usize, len as usize)
    }

    fn step(&mut self, disk: &Disk) {
        let (at, len) = self.range();
        let here = GuestOffset(at as u64);
        match self.rng.below(20) {
            0..=9 => {
                self.rng.fill(&mut self.bytes[at..at + len]);
                disk.write_at(&self.bytes[at..at + len], here).unwrap();
            }
            10..=12 => {
                let may_unmap = self.rng.chance(1, 2);
                disk.write_zeroes(here, len as u64, may_unmap).unwrap();
                self.bytes[at..at + len].fill(0);
            }
            13 => {
                disk.discard(here, len as u64).unwrap();
                let mut found = vec![0; len];
                disk.read_at(&mut found, here).unwrap();
                for (found, wanted) in found.iter().zip(&mut self.bytes[at..at + len]) {
                    assert!(*found == 0 || found == wanted, "noise after a discard");
                    *wanted = *found;
                }
            }
            14 => {
                let sectors = self.rng.within(300..4000);
                disk.resize(sectors * 512).unwrap();
                self.bytes.resize(sectors as usize * 512, 0);
                // Data cut off by a shrink does not come back.
            }
            15 => disk.flush().unwrap(),
            _ => {
                let mut found = vec![0; len];
                disk.read_at(&mut found, here).unwrap();
                assert!(found == self.bytes[at..at + len], "{len} bytes at {at}");
            }
        }
    }

    fn compare(&self, disk: &Disk, what: &str) {
        assert_eq!(disk.guest_bytes(), self.bytes.len() as u64, "{what}");
        let mut found = vec![0; self.bytes.len()];
        disk.read_at(&mut found, GuestOffset(0)).unwrap();
        let differs = found.iter().zip(&self.bytes).position(|(a, b)| a != b);
        assert_eq!(differs, None, "{what}");
    }
}

#[test]
fn every_kind_equals_a_flat_buffer_and_what_qemu_reads() {
    let peers = vdkit_testkit::require_peer("qemu-img");
    for (number, kind) in KINDS.iter().enumerate() {
        let mut rng = Rng::from_env(77 + number as u64);
        rng.next_u64();
        let image = Image::make(kind);
        let bytes = read_all(&image.open(false));
        if kind.format == "qcow2" && kind.base.is_none() {
            assert!(bytes.iter().all(|b| *b == 0), "{}: a new disk is zero", kind.name);
        }
        let mut model = Model { bytes, rng };
        for round in 0..4 {
            let disk = image.open(true);
            for _ in 0..40 {
                model.step(&disk);
            }
            disk.close().unwrap();
            drop(disk);
            model.compare(&image.open(false), &format!("{} in round {round}", kind.name));
        }
        image.check();
        if peers {
            assert!(
                image.read_by_qemu() == model.bytes,
                "{}: QEMU reads something else",
                kind.name
            );
        }
    }
}

#[test]
fn threads_share_sectors() {
    let kind = KINDS.iter().find(|kind| kind.name == "luks").unwrap();
    let image = Image::make(kind);
    let disk = image.open(true);
    let len = 64 * 1024;
    disk.write_zeroes(GuestOffset(0), len, false).unwrap();
    // Each thread has every fourth piece of 100 bytes, so all sectors are shared.
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let disk = &disk;
            scope.spawn(move || {
                for round in 1..=3u8 {
                    for piece in (thread..len / 100).step_by(4) {
                        let bytes = [round * 10 + thread as u8; 100];
                        disk.write_at(&bytes, GuestOffset(piece * 100)).unwrap();
                        let mut found = [0; 100];
                        disk.read_at(&mut found, GuestOffset(piece * 100)).unwrap();
                        assert_eq!(found, bytes);
                    }
                }
            });
        }
    });
    let mut found = vec![0; len as usize / 100 * 100];
    disk.read_at(&mut found, GuestOffset(0)).unwrap();
    for (piece, bytes) in found.chunks(100).enumerate() {
        assert!(bytes.iter().all(|b| *b == 30 + (piece % 4) as u8), "piece {piece}");
    }
}
