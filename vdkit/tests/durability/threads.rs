//! Many threads on one disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vdkit_block::StorageExt;

use vdkit::storage::MemoryStorage;
use vdkit::{Disk, GuestOffset, HostOffset, Place, Storage};
use vdkit_testkit::Rng;

use super::{SHAPES, audit};

const SECTOR: u64 = 512;
const WRITERS: u64 = 4;
/// A small area, so that writers share clusters.
const AREA_SECTORS: u64 = 1024;

/// A sector's content: its writer and write number, repeated.
fn stamp(sector: u64, version: u64) -> [u8; SECTOR as usize] {
    let mut bytes = [0; SECTOR as usize];
    for chunk in bytes.chunks_exact_mut(16) {
        chunk[..8].copy_from_slice(&sector.to_le_bytes());
        chunk[8..].copy_from_slice(&version.to_le_bytes());
    }
    bytes
}

/// Each writer owns the sectors equal to its number modulo the writers, so it knows their content,
/// while clusters are shared.
fn write(disk: &Disk, me: u64, seed: u64, rounds: u64, stop: &AtomicBool) {
    let mut rng = Rng::new(seed + me);
    let mut mine = vec![None::<u64>; AREA_SECTORS as usize];
    for version in 1..rounds {
        let sector = rng.below(AREA_SECTORS / WRITERS) * WRITERS + me;
        let at = GuestOffset(sector * SECTOR);
        match rng.below(8) {
            0 => {
                disk.write_zeroes(at, SECTOR, true).unwrap();
                mine[sector as usize] = Some(0);
            }
            1 if me == 0 => disk.flush().unwrap(),
            _ => {
                disk.write_at(&stamp(sector, version), at).unwrap();
                mine[sector as usize] = Some(version);
            }
        }
        let look = rng.below(AREA_SECTORS / WRITERS) * WRITERS + me;
        if let Some(version) = mine[look as usize] {
            let mut found = [0; SECTOR as usize];
            disk.read_at(&mut found, GuestOffset(look * SECTOR)).unwrap();
            let want = if version == 0 { [0; SECTOR as usize] } else { stamp(look, version) };
            assert!(found == want, "VDKIT_SEED={seed}: writer {me}, sector {look}");
        }
    }
    stop.store(true, Ordering::Relaxed);
}

#[test]
fn writers_of_neighboring_sectors_never_lose_a_byte() {
    let seed = Rng::from_env(1).seed();
    for shape in SHAPES {
        let memory = shape.image();
        let disk = shape.open(memory.clone() as Arc<dyn Storage>).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for me in 0..WRITERS {
                let (disk, stop) = (&disk, &stop);
                scope.spawn(move || write(disk, me, seed, 1500, stop));
            }
            // Meanwhile distant space is allocated, freed and reused.
            scope.spawn(|| {
                let mut rng = Rng::new(seed + 99);
                while !stop.load(Ordering::Relaxed) {
                    let at = GuestOffset((1 << 20) + rng.below(16) * 65_536);
                    if rng.chance(1, 2) {
                        disk.write_at(&[0xcc; 65_536], at).unwrap();
                    } else {
                        disk.discard(at, 65_536).unwrap();
                    }
                }
            });
        });
        disk.close().unwrap();
        audit(&(memory as Arc<dyn Storage>), true, &format!("VDKIT_SEED={seed} {shape:?}"));
    }
}

#[test]
fn a_freed_cluster_is_not_used_again_under_a_reader() {
    let shape = &SHAPES[0];
    let memory: Arc<MemoryStorage> = shape.image();
    let disk = shape.open(memory.clone() as Arc<dyn Storage>).unwrap();
    disk.write_at(&[0x11; 65_536], GuestOffset(0)).unwrap();
    disk.flush().unwrap();
    let guard = disk.enter();
    let extent = disk.top().resolve(GuestOffset(0), 65_536).unwrap();
    let Place::Data { offset, .. } = extent.place else { panic!("{extent:?}") };
    disk.discard(GuestOffset(0), 65_536).unwrap();
    // Everything that could reuse the cluster: flushes, and more writes than are reserved.
    for i in 1..47u64 {
        disk.write_at(&[0x22; 65_536], GuestOffset(i << 16)).unwrap();
        disk.flush().unwrap();
    }
    let mut found = [0; 65_536];
    memory.read_at(&mut found, HostOffset(offset.0)).unwrap();
    assert!(found == [0x11; 65_536], "the reader's cluster changed under it");
    drop(guard);
}
