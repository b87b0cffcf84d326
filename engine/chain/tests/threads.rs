//! Many threads on one disk.

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use support::map::CLUSTER;
use support::{MapFormat, Memory, Random, map_disk, pack, raw_disk};
use vdkit_block::{Format, GuestOffset};
use vdkit_chain::{Disk, OpenOptions};

const THREADS: u64 = 8;
const CLUSTERS: u64 = 64;
const SECTOR: u64 = 512;

fn disk() -> (Disk, Arc<MapFormat>) {
    let base: Vec<u8> = vec![0xBA; (CLUSTERS * CLUSTER / 2) as usize];
    let base = raw_disk(Arc::new(Memory::new("base.raw", base)), false);
    let storage = Arc::new(Memory::new("top", Vec::new()).slow());
    let top = Arc::new(MapFormat::new(storage, CLUSTERS * CLUSTER, true));
    (map_disk(&top, &OpenOptions::read_write()).over(base), top)
}

/// Each thread has every eighth sector, so that all share every cluster. Copies, reuse of freed
/// clusters and compressed clusters happen all the time; no thread may ever see another's bytes.
#[test]
fn threads_that_share_clusters_keep_their_own_sectors() {
    let (disk, top) = disk();
    let sectors = CLUSTERS * CLUSTER / SECTOR;
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (disk, top) = (&disk, &top);
            scope.spawn(move || {
                let mut random = Random(thread);
                let mut mine: Vec<Option<u8>> = vec![None; sectors as usize];
                for round in 0..3000 {
                    let sector = random.below(sectors / THREADS) * THREADS + thread;
                    let at = GuestOffset(sector * SECTOR);
                    let known = &mut mine[sector as usize];
                    match random.below(8) {
                        0..4 => {
                            let byte = (random.below(254) + 1) as u8;
                            disk.write_at(&[byte; SECTOR as usize], at).unwrap();
                            *known = Some(byte);
                        }
                        4 => {
                            disk.write_zeroes(at, SECTOR, true).unwrap();
                            *known = Some(0);
                        }
                        _ => {
                            let mut buf = [0; SECTOR as usize];
                            disk.read_at(&mut buf, at).unwrap();
                            let half = CLUSTERS * CLUSTER / 2;
                            let base = if at.0 < half { 0xBA } else { 0 };
                            assert!(buf == [known.unwrap_or(base); SECTOR as usize]);
                        }
                    }
                    if round % 97 == 0 {
                        top.share_all();
                    }
                }
                for (sector, byte) in mine.iter().enumerate() {
                    let Some(byte) = byte else { continue };
                    let mut buf = [0; SECTOR as usize];
                    disk.read_at(&mut buf, GuestOffset(sector as u64 * SECTOR)).unwrap();
                    assert!(buf == [*byte; SECTOR as usize], "sector {sector}");
                }
            });
        }
    });
    assert_eq!(top.reserved(), 0);
}

/// All threads write, zero, discard and write compressed whole clusters everywhere. A cluster
/// always holds one value: each operation is one cluster, in one piece.
#[test]
fn overlapping_operations_leave_whole_clusters() {
    let (disk, top) = disk();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let disk = &disk;
            scope.spawn(move || {
                let mut random = Random(1000 + thread);
                for _ in 0..3000 {
                    let at = GuestOffset(random.below(CLUSTERS) * CLUSTER);
                    let byte = (random.below(0xA0) + 1) as u8;
                    let cluster = [byte; CLUSTER as usize];
                    match random.below(10) {
                        0..3 => disk.write_at(&cluster, at).unwrap(),
                        3..5 => disk.write_compressed(at, &[pack(&cluster)]).unwrap(),
                        5 => disk.write_zeroes(at, CLUSTER, true).unwrap(),
                        6 => disk.discard(at, CLUSTER).unwrap(),
                        _ => {
                            // A partial read, so that the unit cache is used.
                            let from = random.below(7) * SECTOR;
                            let mut buf = [0; 2 * SECTOR as usize];
                            disk.read_at(&mut buf, at + from).unwrap();
                            let valid = buf[0] <= 0xA0 || buf[0] == 0xBA;
                            assert!(valid, "{:#x} is freed space", buf[0]);
                            assert!(buf.iter().all(|byte| *byte == buf[0]), "a torn cluster");
                        }
                    }
                }
            });
        }
    });
    assert_eq!(top.reserved(), 0);
    assert_eq!(top.leaked_clusters(), 0);
    assert!(top.reused_compressed.load(Ordering::SeqCst) > 0, "compressed space was never reused");
    assert_eq!(top.guest_bytes(), CLUSTERS * CLUSTER);
}
