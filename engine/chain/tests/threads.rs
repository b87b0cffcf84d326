//! Many threads on one disk.

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use support::map::CLUSTER;
use support::{MapFormat, Memory, map_disk, pack, raw_disk};
use vdkit_block::{Error, Format, GuestOffset, Monitor};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_testbase::{Rng, Watched};

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
                let mut random = Rng::new(thread);
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
                let mut random = Rng::new(1000 + thread);
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

/// A write to a new part, as soon as the disk is that large, stays although the new part is zeroed: the
/// backing image is longer, and a shrink left data there.
#[test]
fn what_is_written_to_a_new_part_stays() {
    let (small, large) = (5 * CLUSTER - SECTOR, 8 * CLUSTER);
    for _ in 0..20 {
        let (disk, _) = disk();
        disk.write_at(&[1; CLUSTER as usize], GuestOffset(4 * CLUSTER)).unwrap();
        disk.resize(small).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while disk.guest_bytes() == small {
                    std::thread::yield_now();
                }
                disk.write_at(&[7; SECTOR as usize], GuestOffset(small)).unwrap();
            });
            disk.resize(large).unwrap();
        });
        let mut found = vec![0; (large - small) as usize];
        disk.read_at(&mut found, GuestOffset(small)).unwrap();
        let (written, zero) = found.split_at(SECTOR as usize);
        assert!(written.iter().all(|&byte| byte == 7), "{written:?}");
        assert!(zero.iter().all(|&byte| byte == 0));
    }
}

#[test]
fn a_new_part_is_nobodys_before_it_is_ready() {
    let (disk, _) = disk();
    let small = 5 * CLUSTER - SECTOR;
    disk.resize(small).unwrap();
    let grown = |fails: bool| {
        let monitor = Monitor::default();
        disk.resize_with(
            8 * CLUSTER,
            &monitor,
            |_| Ok(()),
            |part| {
                assert_eq!((part.start().0, part.len()), (small, 3 * CLUSTER + SECTOR));
                assert_eq!(disk.guest_bytes(), small);
                assert!(disk.write_at(&[1], part.start()).is_err());
                assert!(disk.read_at(&mut [0], part.start()).is_err());
                assert!(part.write_at(&[1], GuestOffset(small - 1)).is_err());
                part.write_at(&[2], part.start())?;
                if fails { Err(Error::Interrupted) } else { Ok(()) }
            },
        )
    };
    assert!(matches!(grown(true), Err(Error::Interrupted)));
    assert_eq!(disk.guest_bytes(), small);
    grown(false).unwrap();
    assert_eq!(disk.guest_bytes(), 8 * CLUSTER);
    let mut found = [0; 2];
    disk.read_at(&mut found, GuestOffset(small)).unwrap();
    assert_eq!(found, [2, 0]);
}

/// Whether a disk may shrink is asked of the size that the resize before it made.
#[test]
fn a_resize_that_waited_is_asked_about_the_size_that_it_finds() {
    let (disk, _) = disk();
    let (small, middle, large) = (4 * CLUSTER, 6 * CLUSTER, 8 * CLUSTER);
    disk.resize(small).unwrap();
    let monitor = Monitor::default();
    std::thread::scope(|scope| {
        let grows = |_: u64| Ok(());
        let mut second = None;
        let waits = |before: u64| {
            if before > middle { Err(Error::invalid("it would shrink")) } else { Ok(()) }
        };
        disk.resize_with(large, &monitor, grows, |_| {
            // It sees the small disk now, and waits.
            let (disk, monitor) = (&disk, &monitor);
            assert_eq!(disk.guest_bytes(), small);
            second =
                Some(scope.spawn(move || disk.resize_with(middle, monitor, waits, |_| Ok(()))));
            Ok(())
        })
        .unwrap();
        assert!(second.unwrap().join().unwrap().is_err());
    });
    assert_eq!(disk.guest_bytes(), large);
}

#[test]
fn a_close_waits_for_a_resize_and_takes_nothing_of_it_back() {
    let (disk, _) = disk();
    let (small, large) = (4 * CLUSTER, 8 * CLUSTER);
    disk.resize(small).unwrap();
    let watched = Watched::default();
    std::thread::scope(|scope| {
        let (disk, watched) = (&disk, &watched);
        let mut closing = None;
        let grown = |_: u64| Ok(());
        disk.resize_with(large, &Monitor::default(), grown, |_| {
            // The image is large now, and the disk still shows the small size.
            let close = scope.spawn(move || {
                watched.is_me();
                disk.close()
            });
            watched.until_it_waits();
            assert!(!close.is_finished(), "closed in the middle of a resize");
            closing = Some(close);
            Ok(())
        })
        .unwrap();
        closing.unwrap().join().unwrap().unwrap();
    });
    assert_eq!((disk.guest_bytes(), disk.top().guest_bytes()), (large, large));
}
