//! I/O counts and results of single requests, and races in a fixed order.

mod support;

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use support::map::CLUSTER;
use support::{MapFormat, Memory, map_disk, pack, raw_disk};
use vdkit_block::{CacheMode, Error, ErrorKind, GuestOffset};
use vdkit_chain::{Disk, DiskPlace, OpenOptions};

fn top(clusters: u64) -> (Disk, Arc<MapFormat>, Arc<Memory>) {
    top_with(clusters, &OpenOptions::read_write())
}

fn top_with(clusters: u64, options: &OpenOptions) -> (Disk, Arc<MapFormat>, Arc<Memory>) {
    let storage = Arc::new(Memory::new("top", Vec::new()));
    let format = Arc::new(MapFormat::new(storage.clone(), clusters * CLUSTER, options.writable));
    (map_disk(&format, options), format, storage)
}

fn at(cluster: u64) -> GuestOffset {
    GuestOffset(cluster * CLUSTER)
}

fn read(disk: &Disk, at: GuestOffset, len: usize) -> Vec<u8> {
    let mut buf = vec![0xEE; len];
    disk.read_at(&mut buf, at).unwrap();
    buf
}

#[test]
fn a_small_allocating_write_is_one_write() {
    let (disk, _format, storage) = top(4);
    let base: Vec<u8> = (0..4 * CLUSTER).map(|i| (i / 512) as u8 + 1).collect();
    let disk = disk.over(raw_disk(Arc::new(Memory::new("base", base.clone())), false));
    storage.reset_counts();
    disk.write_at(&[0xAA; 512], at(1) + 1024).unwrap();
    // Head, data and tail together.
    assert_eq!(storage.writes.load(SeqCst), 1);
    let mut wanted = base;
    wanted[CLUSTER as usize + 1024..][..512].fill(0xAA);
    assert!(read(&disk, at(0), wanted.len()) == wanted);

    // In place: one write, no read.
    storage.reset_counts();
    disk.write_at(&[0xAB; 100], at(1) + 1).unwrap();
    assert_eq!((storage.writes.load(SeqCst), storage.reads.load(SeqCst)), (1, 0));
}

#[test]
fn several_buffers_are_one_range() {
    let (disk, _format, _storage) = top(2);
    let (a, b) = ([1_u8; 100], [2_u8; CLUSTER as usize]);
    let written = [IoSlice::new(&a), IoSlice::new(&[]), IoSlice::new(&b)];
    disk.write_vectored_at(&written, at(0) + 7).unwrap();
    let (mut c, mut d) = ([0_u8; 8], [0_u8; CLUSTER as usize]);
    let mut pieces = [IoSliceMut::new(&mut c), IoSliceMut::new(&mut d)];
    disk.read_vectored_at(&mut pieces, at(0) + 100).unwrap();
    // If they do not fit, nothing is moved.
    assert!(disk.read_vectored_at(&mut pieces, at(1)).is_err());
    assert!(disk.write_vectored_at(&written, at(1)).is_err());
    assert_eq!(c, [1, 1, 1, 1, 1, 1, 1, 2]);
    assert!(d[..CLUSTER as usize - 1] == b[1..] && d[CLUSTER as usize - 1] == 0);
    assert!(read(&disk, at(1), 100) == [2; 100]);
}

#[test]
fn a_plain_read_is_one_read_and_a_scattered_one_is_a_batch() {
    let (disk, _format, storage) = top(8);
    for cluster in [3, 2, 1, 0] {
        disk.write_at(&[cluster as u8 + 1; CLUSTER as usize], at(cluster)).unwrap();
    }
    storage.reset_counts();
    assert!(read(&disk, at(1), CLUSTER as usize) == [2; CLUSTER as usize]);
    assert_eq!((storage.reads.load(SeqCst), storage.batches.load(SeqCst)), (1, 0));
    storage.reset_counts();
    let bytes = read(&disk, at(0), 8 * CLUSTER as usize);
    assert!(bytes.iter().enumerate().all(|(i, byte)| {
        *byte == if i < 4 * CLUSTER as usize { (i / CLUSTER as usize) as u8 + 1 } else { 0 }
    }));
    assert_eq!((storage.reads.load(SeqCst), storage.batches.load(SeqCst)), (4, 1));
}

#[test]
fn small_reads_in_order_unpack_each_unit_once() {
    let (disk, format, _) = top(64);
    let units: Vec<_> = (0..64u8).map(|i| pack(&[i; CLUSTER as usize])).collect();
    disk.write_compressed(at(0), &units).unwrap();
    for sector in 0..64 * CLUSTER / 512 {
        let wanted = (sector * 512 / CLUSTER) as u8;
        assert!(read(&disk, GuestOffset(sector * 512), 512) == [wanted; 512]);
    }
    assert_eq!(format.unpacked.load(SeqCst), 64);
    // Whole units are decompressed directly into the buffer; cached units are not decompressed
    // again.
    let bytes = read(&disk, at(0), 64 * CLUSTER as usize);
    assert!(bytes.iter().enumerate().all(|(i, byte)| u64::from(*byte) == i as u64 / CLUSTER));
    assert_eq!(format.unpacked.load(SeqCst), 64);
}

#[test]
fn readers_of_one_unit_wait_for_the_first_to_unpack_it() {
    let (disk, format, _) = top(1);
    disk.write_compressed(at(0), &[pack(&[7; CLUSTER as usize])]).unwrap();
    let start = std::sync::Barrier::new(8);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (disk, start) = (&disk, &start);
            scope.spawn(move || {
                start.wait();
                assert!(read(disk, GuestOffset(thread * 512), 512) == [7; 512]);
            });
        }
    });
    assert_eq!(format.unpacked.load(SeqCst), 1);
}

#[test]
fn a_damaged_unit_is_an_error_each_time_and_leaves_no_trace() {
    let (disk, format, storage) = top(2);
    disk.write_compressed(at(0), &[pack(&[7; CLUSTER as usize])]).unwrap();
    let place = disk.extent_at(at(0), 1).unwrap().place;
    let DiskPlace::Compressed { compressed, .. } = place else { panic!("{place:?}") };
    let good = storage.bytes()[compressed.offset.0 as usize];
    let tag = |byte| vdkit_block::Storage::write_at(&*storage, &[byte], compressed.offset).unwrap();
    tag(0);
    for _ in 0..2 {
        let error = disk.read_at(&mut [0; 512], at(0)).unwrap_err();
        assert!(matches!(error, Error::Corrupt(_)), "{error}");
    }
    assert_eq!(format.unpacked.swap(0, SeqCst), 2);
    tag(good);
    for _ in 0..3 {
        assert!(read(&disk, at(0), 512) == [7; 512]);
    }
    assert_eq!(format.unpacked.load(SeqCst), 1);
}

/// A reader takes the generation; then space that held a unit in that generation gets another unit;
/// then the reader resolves. See `unit_cache`.
#[test]
fn a_reused_packed_place_is_not_served_from_the_cache() {
    let (disk, format, _) = top(16);
    let disk = Arc::new(disk);
    let unit = |byte: u8| [pack(&[byte; CLUSTER as usize])];
    let place = |cluster| match disk.extent_at(at(cluster), 1).unwrap().place {
        DiskPlace::Compressed { compressed, .. } => compressed.offset,
        other => panic!("{other:?}"),
    };
    disk.write_compressed(at(0), &unit(1)).unwrap();
    let first = place(0);
    // Another thread reads the old unit just before it is replaced.
    let reader = disk.clone();
    format.before_publish.set(move || assert!(read(&reader, at(0), 512) == [1; 512]));
    disk.write_compressed(at(0), &unit(2)).unwrap();
    // Plain writes free its space.
    for cluster in 8..12 {
        disk.write_at(&[9], at(cluster)).unwrap();
    }
    // The space becomes the unit of cluster 1 while cluster 1 is being read.
    let writer = disk.clone();
    let replacement = unit(3);
    format.before_resolve.set(move || writer.write_compressed(at(1), &replacement).unwrap());
    let got = read(&disk, at(1), 512);
    assert_eq!(place(1), first, "the test needs the space to be reused");
    assert!(got == [3; 512], "{:?} is the replaced unit", got[0]);
}

/// "A delayed hole punch that erases a reused cluster", seen from a reader.
#[test]
fn space_is_not_reused_under_a_reader() {
    let (disk, format, _) = top(8);
    let disk = Arc::new(disk);
    disk.write_at(&[1; CLUSTER as usize], at(0)).unwrap();
    let guard = disk.enter();
    let extent = disk.extent_at(at(0), CLUSTER).unwrap();
    let DiskPlace::Data { storage, offset } = extent.place else { panic!("{extent:?}") };
    disk.discard(at(0), CLUSTER).unwrap();
    for cluster in 1..8 {
        disk.write_at(&[2; CLUSTER as usize], at(cluster)).unwrap();
    }
    let mut bytes = [0; CLUSTER as usize];
    storage.read_at(&mut bytes, offset).unwrap();
    assert!(bytes == [1; CLUSTER as usize]);
    drop(guard);
    // And it is reused afterwards.
    disk.write_at(&[3; 1], at(0)).unwrap();
    disk.write_zeroes(at(1), CLUSTER, true).unwrap();
    for _ in 0..4 {
        disk.write_zeroes(at(0), CLUSTER, true).unwrap();
        disk.write_at(&[3; 1], at(0)).unwrap();
    }
    storage.read_at(&mut bytes, offset).unwrap();
    assert!(bytes != [1; CLUSTER as usize]);
    assert_eq!(format.leaked_clusters(), 0);
}

#[test]
fn a_failed_write_changes_nothing_and_works_once_there_is_space() {
    for writes in 0..3 {
        let (disk, format, storage) = top(8);
        let base = vec![5; 8 * CLUSTER as usize];
        let disk = disk.over(raw_disk(Arc::new(Memory::new("base", base.clone())), false));
        let data = vec![6; 6 * CLUSTER as usize];
        storage.fail_in(writes);
        // 6 clusters and ragged ends: 3 reservations.
        let error = disk.write_at(&data, at(1) + 100).unwrap_err();
        assert_eq!(error.kind(), vdkit_block::ErrorKind::NoSpace, "{error}");
        assert_eq!(format.released.load(SeqCst), 1);
        assert_eq!((format.reserved(), format.leaked_clusters()), (0, 0));
        // Each byte is old or new, and the failed reservation is entirely old.
        let bytes = read(&disk, at(0), base.len());
        let done = bytes.iter().filter(|byte| **byte == 6).count() as u64;
        assert_eq!(done, (3 * writes as u64 * CLUSTER).saturating_sub(100));
        assert!(bytes.iter().all(|byte| [5, 6].contains(byte)));

        disk.write_at(&data, at(1) + 100).unwrap();
        let mut wanted = base.clone();
        wanted[CLUSTER as usize + 100..][..data.len()].fill(6);
        assert!(read(&disk, at(0), base.len()) == wanted);
        assert_eq!(format.leaked_clusters(), 0);
    }
}

#[test]
fn zeroes_leave_alone_what_reads_as_zero() {
    let (disk, _format, storage) = top(8);
    disk.write_at(&[1; 512], at(3)).unwrap();
    storage.reset_counts();
    disk.write_zeroes(at(0) + 512, CLUSTER - 1024, true).unwrap();
    assert_eq!(storage.writes.load(SeqCst), 0);
    disk.write_zeroes(at(2) + 512, CLUSTER, true).unwrap();
    assert_eq!(storage.writes.load(SeqCst), 1);
    assert!(read(&disk, at(0), 8 * CLUSTER as usize).iter().all(|byte| *byte == 0));
}

/// "Write-zeroes that exposes the backing data", and its unaligned edges.
#[test]
fn zeroes_and_discards_hide_the_backing_image() {
    for may_unmap in [false, true] {
        for (from, len) in [(0, 1), (1, 4095), (100, 4096), (4096, 4096), (10, 20_000)] {
            let (disk, ..) = top(8);
            let base = vec![5; 8 * CLUSTER as usize];
            let disk = disk.over(raw_disk(Arc::new(Memory::new("base", base.clone())), false));
            disk.write_zeroes(GuestOffset(from), len, may_unmap).unwrap();
            let mut wanted = base.clone();
            wanted[from as usize..(from + len) as usize].fill(0);
            assert!(read(&disk, at(0), base.len()) == wanted, "{from} {len}");
            disk.write_at(&[6; 3 * CLUSTER as usize], at(4)).unwrap();
            wanted[4 * CLUSTER as usize..7 * CLUSTER as usize].fill(6);
            disk.discard(at(5), CLUSTER).unwrap();
            wanted[5 * CLUSTER as usize..6 * CLUSTER as usize].fill(0);
            assert!(read(&disk, at(0), base.len()) == wanted, "{from} {len}");
        }
    }
}

#[test]
fn large_writes_with_large_fills_are_right_too() {
    // The reservation's sides are small, since clusters are; the data is not copied.
    let (disk, _format, storage) = top(200);
    let base = vec![5; 200 * CLUSTER as usize];
    let disk = disk.over(raw_disk(Arc::new(Memory::new("base", base.clone())), false));
    let data: Vec<u8> = (0..150 * CLUSTER as usize).map(|i| (i / 77) as u8).collect();
    disk.write_at(&data, at(7) + 77).unwrap();
    let mut wanted = base;
    wanted[7 * CLUSTER as usize + 77..][..data.len()].copy_from_slice(&data);
    assert!(read(&disk, at(0), wanted.len()) == wanted);
    assert!(storage.writes.load(SeqCst) < 60);
}

#[test]
fn durable_modes_flush_after_each_change_and_others_do_not() {
    for (cache, flushes) in [
        (CacheMode::Writeback, 0),
        (CacheMode::None, 0),
        (CacheMode::Unsafe, 0),
        (CacheMode::Writethrough, 4),
        (CacheMode::DirectSync, 4),
    ] {
        let (disk, format, _) = top_with(8, &OpenOptions::read_write().cache(cache));
        disk.write_at(&[1; 10], at(0)).unwrap();
        disk.write_at(&[2; 10], at(0)).unwrap(); // in place: the bytes must be durable too
        disk.write_zeroes(at(2), CLUSTER, true).unwrap();
        disk.discard(at(0), CLUSTER).unwrap();
        assert_eq!(format.flushes.load(SeqCst), flushes, "{cache}");
    }
}

#[test]
fn read_only_and_the_end_of_the_disk_are_kept() {
    let (disk, _format, _) = top_with(2, &OpenOptions::read_only());
    let read_only = |result: vdkit_block::Result<()>| {
        assert!(matches!(result, Err(Error::ReadOnly { .. })));
    };
    read_only(disk.write_at(&[0], at(0)));
    read_only(disk.write_zeroes(at(0), 1, true));
    read_only(disk.discard(at(0), 1));
    read_only(disk.resize(1 << 20));
    read_only(disk.write_compressed(at(0), &[[0]]));
    disk.flush().unwrap();
    disk.close().unwrap();

    let (disk, ..) = top(2);
    for (from, len) in [(2 * CLUSTER, 1), (2 * CLUSTER - 1, 2), (u64::MAX, 2), (u64::MAX, 0)] {
        let mut buf = vec![0; len as usize];
        let from = GuestOffset(from);
        for result in [
            disk.read_at(&mut buf, from),
            disk.write_at(&buf, from),
            disk.write_zeroes(from, len, true),
            disk.discard(from, len),
            disk.extent_at(from, len).map(|_| ()),
            disk.extents(from, len).map(|_| ()),
        ] {
            let error = result.unwrap_err();
            assert_eq!((error.kind(), error.file()), (ErrorKind::Usage, Some(disk.name())));
        }
    }
    disk.read_at(&mut [], at(2)).unwrap();
    disk.write_at(&[], at(2)).unwrap();
    disk.write_zeroes(at(2), 0, true).unwrap();
    disk.discard(at(2), 0).unwrap();
}

/// A layer searches those beneath it for the whole hole, not run by run.
#[test]
fn a_hole_is_asked_for_once_whatever_lies_beneath() {
    let (base, base_map, _) = top(5);
    for cluster in [0, 2, 4] {
        base.write_at(&[cluster as u8 + 1; CLUSTER as usize], at(cluster)).unwrap();
    }
    let (disk, map, _) = top(5);
    let disk = disk.over(base);
    map.resolved.store(0, SeqCst);
    base_map.resolved.store(0, SeqCst);
    let runs: Vec<_> = disk.extents(at(0), 5 * CLUSTER).unwrap().map(|run| run.unwrap()).collect();
    assert_eq!(runs.iter().map(|run| run.depth).collect::<Vec<_>>(), [1, 2, 1, 2, 1]);
    assert_eq!((map.resolved.load(SeqCst), base_map.resolved.load(SeqCst)), (1, 5));
}

/// Each of many layers has one cluster, and every second layer is too short for the last clusters.
#[test]
fn a_deep_chain_shows_each_layer_where_it_has_something() {
    const DEPTH: u64 = 30;
    let mut below: Option<Disk> = None;
    for layer in 0..DEPTH {
        let clusters = if layer % 2 == 1 && layer + 1 < DEPTH { DEPTH } else { DEPTH + 2 };
        let (disk, ..) = top(clusters);
        disk.write_at(&[layer as u8 + 1; CLUSTER as usize], at(layer)).unwrap();
        if layer == 0 {
            // Hidden by the shorter layers above.
            disk.write_at(&[0xFF; CLUSTER as usize], at(DEPTH)).unwrap();
        }
        below = Some(match below {
            Some(below) => disk.over(below),
            None => disk,
        });
    }
    let disk = below.unwrap();
    let bytes = read(&disk, at(0), ((DEPTH + 2) * CLUSTER) as usize);
    for (cluster, bytes) in bytes.chunks(CLUSTER as usize).enumerate() {
        let wanted = if (cluster as u64) < DEPTH { cluster as u8 + 1 } else { 0 };
        assert!(bytes.iter().all(|byte| *byte == wanted), "cluster {cluster}");
    }
    for run in disk.extents(at(0), (DEPTH + 2) * CLUSTER).unwrap() {
        let run = run.unwrap();
        let cluster = run.at.0 / CLUSTER;
        if cluster < DEPTH {
            assert_eq!((run.depth as u64, run.len), (DEPTH - 1 - cluster, CLUSTER));
        } else {
            assert!(matches!(run.place, DiskPlace::Zero { .. }), "{run:?}");
            assert_eq!((run.depth, run.len), (2, 2 * CLUSTER));
        }
    }
    // The first layers alone: bytes that they do not hold are holes.
    let own: Vec<_> =
        disk.extents_of(2, at(0), DEPTH * CLUSTER).unwrap().map(|run| run.unwrap()).collect();
    assert_eq!(own.len(), 3, "{own:?}");
    assert!(matches!(own[0].place, DiskPlace::Hole));
    assert_eq!((own[0].depth, own[0].len), (2, (DEPTH - 2) * CLUSTER));
}

#[test]
fn one_question_about_a_huge_disk_is_answered_at_once() {
    let (disk, map, _) = top(4000);
    disk.write_at(&vec![1; 3000 * CLUSTER as usize], at(0)).unwrap();
    map.resolved.store(0, SeqCst);
    let run = disk.extent_at(at(0), 4000 * CLUSTER).unwrap();
    assert!(run.len >= 64 * CLUSTER && map.resolved.load(SeqCst) <= 64, "{run:?}");
    // The walk over a range merges everything.
    let runs: Vec<_> =
        disk.extents(at(0), 4000 * CLUSTER).unwrap().map(|run| run.unwrap().len).collect();
    assert_eq!(runs, [3000 * CLUSTER, 1000 * CLUSTER]);
}
