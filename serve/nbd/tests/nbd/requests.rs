//! Each request in each style of reply.

use vdkit_testkit::disks::MIB;
use vdkit_testkit::nbd::Rig;
use vdkit_testkit::nbd::client::*;

#[test]
fn what_is_written_is_read() {
    for style in STYLES {
        let rig = Rig::new(64 * MIB);
        let mut client = rig.client(style);
        assert_eq!(client.size, 64 * MIB);
        client.write(1000, &[7; 5000]).unwrap();
        assert_eq!(client.read(999, 2).unwrap(), [0, 7]);
        assert_eq!(client.read(5999, 2).unwrap(), [7, 0]);
        // Larger than an in-buffer payload, and than one piece.
        let large: Vec<u8> = (0..3_000_000u32).map(|i| (i / 1000) as u8 | 1).collect();
        client.write(10 * MIB + 77, &large).unwrap();
        assert_eq!(client.read(10 * MIB + 77, large.len()).unwrap(), large);
        client.run(FLUSH, 0, 0, 0, b"").unwrap();
        client.run(CACHE, 0, 10 * MIB, 4 * MIB, b"").unwrap();
        // Zeroes with and without a hole, and trim.
        client.run(WRITE_ZEROES, 0, 2000, 1000, b"").unwrap();
        client.run(WRITE_ZEROES, NO_HOLE, 11 * MIB, MIB, b"").unwrap();
        client.run(TRIM, 0, 12 * MIB, MIB / 2, b"").unwrap();
        assert_eq!(client.read(1999, 3).unwrap(), [7, 0, 0]);
        assert_eq!(client.read(11 * MIB, MIB as usize).unwrap(), vec![0; MIB as usize]);
        assert_eq!(client.read(12 * MIB, 512).unwrap(), [0; 512]);
        client.request(DISC, 0, 0, 0, b"");
        assert!(client.is_ended());
        rig.end();
    }
}

#[test]
fn requests_past_the_end_are_refused_and_the_connection_lives() {
    for style in STYLES {
        let rig = Rig::new(MIB);
        let mut client = rig.client(style);
        assert_eq!(client.read(MIB - 1, 2), Err(22));
        assert_eq!(client.read(u64::MAX, 1), Err(22));
        assert_eq!(client.write(MIB, &[1]), Err(28));
        assert_eq!(client.write(MIB - 100, &[1; 70_000]), Err(28));
        assert_eq!(client.run(WRITE_ZEROES, 0, MIB - 1, 2, b""), Err(28));
        assert_eq!(client.run(TRIM, 0, MIB, 1, b""), Err(22));
        assert_eq!(client.run(CACHE, 0, MIB, 1, b""), Err(22));
        assert_eq!(client.run(77, 0, 0, 0, b""), Err(22));
        assert_eq!(client.run(READ, 1 << 9, 0, 1, b""), Err(22));
        assert_eq!(client.read(MIB - 1, 1).unwrap(), [0]);
        assert_eq!(client.read(0, 0).map(|bytes| bytes.len()), Ok(0));
        assert_eq!(client.write(0, &[]), Ok(()));
        rig.end();
    }
}

#[test]
fn a_payload_beyond_all_bounds_ends_the_connection() {
    let rig = Rig::new(MIB);
    let mut client = rig.client(Style::Structured);
    client.request(WRITE, 0, 0, (32 << 20) + 1, b"");
    assert!(client.is_ended());
    let mut client = rig.client(Style::Extended);
    client.request(BLOCK_STATUS, PAYLOAD_LEN, 0, u64::MAX, b"");
    assert!(client.is_ended());
    // The server still serves others.
    assert_eq!(rig.client(Style::Simple).read(0, 1).unwrap(), [0]);
    rig.end();
}

#[test]
fn a_read_only_export_takes_no_changes() {
    let rig = Rig::with(
        std::sync::Arc::new(vdkit_storage::MemoryStorage::new("image")),
        MIB,
        |export| export.read_only = true,
        |_| {},
    );
    for style in STYLES {
        let mut client = rig.client(style);
        assert_eq!(client.flags & 2, 2);
        assert_eq!(client.write(0, &[1]), Err(1));
        assert_eq!(client.run(WRITE_ZEROES, 0, 0, 512, b""), Err(1));
        assert_eq!(client.run(TRIM, 0, 0, 512, b""), Err(1));
        assert_eq!(client.run(FLUSH, 0, 0, 0, b""), Ok(()));
        assert_eq!(client.read(0, 1).unwrap(), [0]);
    }
    rig.end();
}

#[test]
fn fast_zeroes_are_refused_where_bytes_would_be_written() {
    let rig = Rig::new(MIB);
    let mut client = rig.client(Style::Structured);
    client.write(0, &[1; 4096]).unwrap();
    assert_eq!(client.run(WRITE_ZEROES, FAST_ZERO, 100, 200, b""), Err(95));
    assert_eq!(client.read(100, 1).unwrap(), [1]);
    assert_eq!(client.run(WRITE_ZEROES, FAST_ZERO, 0, 65536, b""), Ok(()));
    assert_eq!(client.read(100, 1).unwrap(), [0]);
    rig.end();
}

/// Merges neighboring runs; a reply may end before the range does.
fn statuses(client: &mut Client, len: u64) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    let mut at = 0;
    while at < len {
        let some = client.status(0, at, len - at).unwrap().remove(0);
        assert!(!some.is_empty());
        for (bytes, flags) in some {
            at += bytes;
            match runs.last_mut() {
                Some((sum, same)) if *same == flags => *sum += bytes,
                _ => runs.push((bytes, flags)),
            }
        }
    }
    runs
}

#[test]
fn block_status_tells_allocation_and_depth() {
    for style in [Style::Structured, Style::Extended] {
        let rig = Rig::new(64 * MIB);
        let mut client = rig.client_with(style, &["base:allocation", "qemu:allocation-depth"]);
        client.write(MIB, &vec![1; MIB as usize]).unwrap();
        client.run(WRITE_ZEROES, 0, MIB + 65536, 65536, b"").unwrap();
        let both = client.status(0, 0, 64 * MIB).unwrap();
        assert_eq!(both.len(), 2);
        let rest = 62 * MIB;
        // The zeroed cluster may keep its space (2) or free it (3).
        let zero = both[0][2].1;
        assert!([2, 3].contains(&zero));
        assert_eq!(both[0], [(MIB, 3), (65536, 0), (65536, zero), (MIB - 131_072, 0), (rest, 3)]);
        assert_eq!(both[1].first(), Some(&(MIB, 0)));
        assert_eq!(both[1][1].1, 1);
        let one = client.status(REQ_ONE, MIB, 2 * MIB).unwrap();
        assert_eq!(one[0], [(65536, 0)]);
        assert_eq!(client.status(0, 64 * MIB, 1), Err(EINVAL));
        assert_eq!(client.status(0, 0, 0), Err(EINVAL));
        if style == Style::Extended {
            // A single context, over an effect of more than 4 GiB.
            let mut wanted = (64 * MIB).to_be_bytes().to_vec();
            wanted.extend(1u32.to_be_bytes());
            let len = wanted.len() as u64;
            let cookie = client.request(BLOCK_STATUS, PAYLOAD_LEN, 0, len, &wanted);
            let depth = client.status_answer(cookie).unwrap();
            assert_eq!(depth, [both[1].clone()]);
            wanted.extend([0, 0]);
            let len = wanted.len() as u64;
            let cookie = client.request(BLOCK_STATUS, PAYLOAD_LEN, 0, len, &wanted);
            assert_eq!(client.status_answer(cookie), Err(EINVAL));
            // One twice, and one that was not chosen.
            for ids in [[0u32, 0], [0, 7]] {
                let mut wanted = MIB.to_be_bytes().to_vec();
                ids.iter().for_each(|id| wanted.extend(id.to_be_bytes()));
                let cookie = client.request(BLOCK_STATUS, PAYLOAD_LEN, 0, 16, &wanted);
                let chunk = client.chunk(|_| 0);
                assert_eq!(
                    (chunk.cookie, chunk.flags, chunk.kind >> 15),
                    (cookie, 1, 1),
                    "{ids:?}"
                );
            }
        }
        let mut plain = rig.client(style);
        assert_eq!(plain.status(0, 0, 512), Err(EINVAL), "no context was chosen");
        rig.end();
    }
}

#[test]
fn sixteen_tebibytes_of_hole_fit_in_short_runs_too() {
    let rig = Rig::new(16 << 40);
    let mut short = rig.client_with(Style::Structured, &["base:allocation"]);
    let runs = short.status(0, 0, u32::MAX.into()).unwrap();
    assert!(runs[0][0].0 <= u32::MAX.into());
    let mut long = rig.client_with(Style::Extended, &["base:allocation"]);
    assert_eq!(long.status(0, 0, 16 << 40).unwrap(), [[(16 << 40, 3)]]);
    rig.end();
}

#[test]
fn a_dirty_bitmap_is_told() {
    let storage = std::sync::Arc::new(vdkit_storage::MemoryStorage::new("image"));
    let disk = vdkit_testkit::disks::qcow2(storage.clone(), 64 * MIB, "");
    let bitmaps = disk.top().bitmaps().unwrap();
    let new = vdkit_block::NewBitmap { name: "b0", granularity: Some(65536), enabled: true };
    bitmaps.add(&new).unwrap();
    disk.write_at(&[1; 100], vdkit_block::GuestOffset(3 * MIB)).unwrap();
    bitmaps.set_enabled("b0", false).unwrap();
    disk.close().unwrap();
    drop(disk);
    let disk = vdkit_testkit::disks::reopen(storage.clone(), true);
    let rig = Rig::over(storage, disk, |export| export.bitmaps = vec!["b0".to_owned()], |_| {});
    for style in [Style::Structured, Style::Extended] {
        let mut client = rig.client_with(style, &["qemu:dirty-bitmap:b0"]);
        assert_eq!(
            statuses(&mut client, 64 * MIB),
            [(3 * MIB, 0), (65536, 1), (61 * MIB - 65536, 0)]
        );
        let mut far = client.status(0, 3 * MIB + 100, 200).unwrap();
        assert_eq!(far.remove(0), [(200, 1)]);
    }
    rig.end();
}

/// After a commit or a snapshot another image is served. It has no such bitmap, or another of the
/// same name. Reporting it as clean would leave changes out of the backup.
#[test]
fn a_bitmap_of_an_image_that_is_not_served_any_more_is_not_told_as_clean() {
    let with_bitmap = |name: &str| {
        let storage = std::sync::Arc::new(vdkit_storage::MemoryStorage::new(name));
        let disk = vdkit_testkit::disks::qcow2(storage.clone(), 64 * MIB, "");
        let new = vdkit_block::NewBitmap { name: "b0", granularity: Some(65536), enabled: true };
        disk.top().bitmaps().unwrap().add(&new).unwrap();
        (storage, disk)
    };
    let (storage, disk) = with_bitmap("overlay");
    let (_, mut other) = with_bitmap("base");
    let rig = Rig::over(storage, disk, |export| export.bitmaps = vec!["b0".to_owned()], |_| {});
    let mut early = rig.client_with(Style::Extended, &["qemu:dirty-bitmap:b0"]);
    let mut client = rig.client_with(Style::Extended, &["qemu:dirty-bitmap:b0"]);
    early.write(3 * MIB, &[1; 100]).unwrap();
    assert_eq!(statuses(&mut early, 64 * MIB)[1], (65536, 1));
    let mut exchange = || {
        let swap = |served: &mut vdkit_serve::Served| {
            std::mem::swap(&mut served.disk, &mut other);
            Ok(())
        };
        rig.export.exchange(swap).unwrap();
    };
    exchange();
    assert!(client.status(0, 0, 64 * MIB).is_err());
    // A client that has queried it keeps its state of then.
    assert_eq!(statuses(&mut early, 64 * MIB)[1], (65536, 1));
    exchange();
    assert_eq!(statuses(&mut client, 64 * MIB)[1], (65536, 1));
    drop((client, early));
    rig.end();
}
