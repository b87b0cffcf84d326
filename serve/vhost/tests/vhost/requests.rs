//! Every request, valid and invalid.

use vdkit_testkit::Rng;

use crate::guest::*;
use crate::rig::Rig;
use vdkit_testkit::disks::MIB;

#[test]
fn requests_do_what_they_say() {
    for (without, indirect) in [(0, false), (0, true), (F_EVENT_IDX, false), (F_PROTOCOL, false)] {
        let rig = Rig::new(64 * MIB);
        let mut guest = Guest::new(1).without(without);
        guest.indirect = indirect;
        guest.connect(&rig.socket);
        guest.start();
        assert_eq!(guest.read(0, 0, 4096), [0; 4096]);
        guest.write(0, 3, &[7; 512]);
        assert_eq!(guest.read(0, 2, 1536), [[0; 512], [7; 512], [0; 512]].concat());
        // Longer than the limit of the non-blocking path, and than one piece.
        let long: Vec<u8> = (0..DATA).map(|i| (i % 251) as u8).collect();
        guest.write(0, 2048, &long);
        guest.flush(0);
        assert_eq!(guest.read(0, 2048, DATA as u32), long);
        let zero = [range(2048, 8, 0), range(2064, 8, 1)].concat();
        assert_eq!(guest.run(0, WRITE_ZEROES, 0, Data::Out(&zero)).0, 0);
        let got = guest.read(0, 2048, 16384);
        assert_eq!(got[..4096], [0; 4096]);
        assert_eq!(got[4096..8192], long[4096..8192]);
        assert_eq!(got[8192..12288], [0; 4096]);
        assert_eq!(guest.run(0, DISCARD, 0, Data::Out(&range(2048, 512, 0))).0, 0);
        assert_eq!(guest.read(0, 2048, 65536), [0; 65536]);
        let (status, id) = guest.run(0, GET_ID, 0, Data::In(20));
        assert_eq!((status, &id[..5]), (0, &b"disk\0"[..]));
        rig.end();
    }
}

#[test]
fn what_the_guest_is_told_of_the_disk() {
    let rig = Rig::new(64 * MIB);
    let guest = rig.boot(1);
    assert_eq!(guest.config_u64(0), 64 * MIB / 512);
    assert_eq!(guest.config_u32(12), 126);
    assert_eq!(guest.config_u32(20), 512);
    // The image's unit of allocation.
    assert_eq!(guest.config_u32(44), 128);
    assert_eq!(guest.config_u32(36), 1 << 21);
    assert_eq!(guest.get(17), 64, "queues");
    assert_eq!(guest.features & F_RO, 0);
    // Zeroes for fields of later devices, and nothing beyond.
    assert_eq!(guest.config(60, 100), [0; 100]);
    assert_eq!(guest.config(200, 100), [0; 0]);
    rig.end();
    let storage = std::sync::Arc::new(vdkit_storage::MemoryStorage::new("image"));
    let rig = Rig::with(storage, MIB, |export| export.read_only = true);
    let mut guest = rig.boot(1);
    assert_eq!(guest.features & F_RO, F_RO);
    assert_eq!(guest.features & (1 << 13 | 1 << 14), 0, "discard and zeroes");
    assert_eq!(guest.read(0, 0, 512), [0; 512]);
    for (kind, bytes) in
        [(WRITE, vec![1; 512]), (WRITE_ZEROES, range(0, 1, 0)), (DISCARD, range(0, 1, 0))]
    {
        assert_eq!(guest.run(0, kind, 0, Data::Out(&bytes)).0, 1);
    }
    guest.flush(0);
    assert_eq!(guest.read(0, 0, 512), [0; 512]);
    rig.end();
}

#[test]
fn wrong_requests_are_answered_with_an_error() {
    let rig = Rig::new(MIB);
    let mut guest = rig.boot(1);
    let mut run = |kind, sector, data: Data<'_>| guest.run(0, kind, sector, data).0;
    for sector in [2048, 2047, 1 << 40, u64::MAX / 512, u64::MAX] {
        assert_eq!(run(READ, sector, Data::In(1024)), 1, "{sector}");
        assert_eq!(run(WRITE, sector, Data::Out(&[1; 1024])), 1, "{sector}");
        assert_eq!(run(DISCARD, 0, Data::Out(&range(sector, 2, 0))), 1);
        assert_eq!(run(WRITE_ZEROES, 0, Data::Out(&range(sector, 2, 0))), 1);
    }
    assert_eq!(run(READ, 0, Data::In(513)), 1);
    assert_eq!(run(WRITE, 0, Data::Out(&[1; 100])), 1);
    assert_eq!(run(WRITE_ZEROES, 0, Data::Out(&range(0, 8, 2))), 2, "an unknown flag");
    assert_eq!(run(DISCARD, 0, Data::Out(&range(0, 8, 1))), 2, "a flag that discards do not have");
    assert_eq!(run(DISCARD, 0, Data::Out(&[0; 15])), 1);
    assert_eq!(run(DISCARD, 0, Data::None), 1);
    assert_eq!(run(DISCARD, 0, Data::Out(&range(0, 1, 0).repeat(33))), 1, "too many ranges");
    assert_eq!(run(DISCARD, 0, Data::Out(&range(0, u32::MAX, 0))), 1);
    for kind in [2, 3, 5, 10, 12, 14, u32::MAX] {
        assert_eq!(run(kind, 0, Data::None), 2, "{kind}");
    }
    assert_eq!(run(READ, 0, Data::In(512)), 0);
    assert_eq!(run(READ, 5000, Data::None), 1);
    assert_eq!(run(READ, 0, Data::None), 0, "nothing at all can be read");
    assert_eq!(guest.read(0, 0, 65536), [0; 65536]);
    rig.end();
}

/// Each queue writes its own part of the disk, and reads everywhere.
#[test]
fn several_queues_and_a_model() {
    const QUEUES: usize = 4;
    const SECTORS: u64 = 2048;
    let rig = Rig::new(QUEUES as u64 * MIB);
    let mut guest = rig.boot(QUEUES as u16);
    let mut model = vec![0_u8; QUEUES * MIB as usize];
    let mut rng = Rng::new(11);
    for round in 0..60_u64 {
        let mut slots = Vec::new();
        for queue in 0..QUEUES {
            // Within a round the ranges of one queue do not overlap.
            for part in 0..8 {
                let sector = queue as u64 * SECTORS + part * 256 + rng.below(128);
                let sectors = 1 + rng.below(128);
                let at = (sector * 512) as usize..((sector + sectors) * 512) as usize;
                let byte = 1 + rng.below(255) as u8;
                let data = vec![byte; at.len()];
                let zeroes = range(sector, sectors as u32, rng.below(2) as u32);
                let slot = match rng.below(4) {
                    0 => {
                        let slot = guest.submit(queue, READ, sector, Data::In(at.len() as u32));
                        slots.push((queue, slot, Some(at)));
                        continue;
                    }
                    1 => {
                        model[at].fill(0);
                        guest.submit(queue, WRITE_ZEROES, 0, Data::Out(&zeroes))
                    }
                    _ => {
                        model[at].fill(byte);
                        guest.submit(queue, WRITE, sector, Data::Out(&data))
                    }
                };
                slots.push((queue, slot, None));
            }
        }
        for (queue, slot, read) in slots {
            let (status, data) = guest.finish(queue, slot);
            assert_eq!(status, 0);
            if let Some(at) = read {
                assert_eq!(data, model[at], "round {round}");
            }
        }
        if round % 16 == 0 {
            guest.flush(round as usize % QUEUES);
        }
    }
    let mut all = vec![0; model.len()];
    rig.export.read(&mut all, 0).unwrap();
    assert!(all == model);
    let stats = rig.export.counters().stats();
    assert!(stats.fast_lane > 0 && stats.slow_lane > 0, "{stats:?}");
    rig.end();
}

#[test]
fn a_driver_without_flush_gets_durable_writes() {
    use std::sync::Arc;
    use vdkit_testkit::CountingStorage;
    // Without flush; with flush; with flush, and the cache disabled.
    for (without, switch, durable) in [
        (F_FLUSH | F_CONFIG_WCE, None, true),
        (0, None, false),
        (0, Some(0_u8), true),
        (0, Some(1), false),
    ] {
        let counting = CountingStorage::new(Arc::new(vdkit_storage::MemoryStorage::new("image")));
        let rig = Rig::with(counting.clone(), MIB, |_| {});
        let mut guest = Guest::new(1).without(without);
        guest.connect(&rig.socket);
        guest.start();
        guest.write(0, 0, &[1; 4096]);
        guest.flush(0);
        if let Some(value) = switch {
            assert!(guest.set_config(32, &[value]));
            assert_eq!(guest.config(32, 1), [value]);
            assert!(!guest.set_config(0, &[1; 8]), "the size is not the guest's to set");
        }
        let before = counting.counts().syncs;
        guest.write(0, 0, &[2; 4096]);
        assert_eq!(counting.counts().syncs > before, durable, "{without:x} {switch:?}");
        rig.end();
    }
}

/// The monitor reports the switch once. It persists when features are renegotiated, when the
/// monitor reconnects, and when another server takes over the monitor's records.
#[test]
fn a_write_cache_that_was_switched_off_stays_off() {
    use std::sync::Arc;
    use vdkit_testkit::CountingStorage;
    let counting = CountingStorage::new(Arc::new(vdkit_storage::MemoryStorage::new("image")));
    let rig = Rig::with(counting.clone(), MIB, |_| {});
    let mut guest = Guest::new(1);
    guest.connect(&rig.socket);
    guest.start();
    guest.write(0, 0, &[1; 4096]);
    guest.flush(0);
    let is_durable = |guest: &mut Guest, value: u8| {
        let before = counting.counts().syncs;
        guest.write(0, 0, &[value; 4096]);
        counting.counts().syncs > before
    };
    assert!(!is_durable(&mut guest, 2));
    assert!(guest.set_config(32, &[0]));
    assert!(is_durable(&mut guest, 3));
    guest.agree_again();
    assert!(is_durable(&mut guest, 4), "after features were agreed on again");
    guest.disconnect();
    guest.connect(&rig.socket);
    guest.start();
    assert_eq!(guest.config(32, 1), [0]);
    assert!(is_durable(&mut guest, 5), "after the monitor came back");
    guest.disconnect();
    let rig = rig.restart();
    guest.connect(&rig.socket);
    guest.start();
    assert_eq!(guest.config(32, 1), [0]);
    assert!(is_durable(&mut guest, 6), "of another server");
    // It is enabled again in the same way.
    assert!(guest.set_config(32, &[1]));
    assert!(!is_durable(&mut guest, 7));
    guest.disconnect();
    let rig = rig.restart();
    guest.connect(&rig.socket);
    guest.start();
    assert_eq!(guest.config(32, 1), [1]);
    assert!(!is_durable(&mut guest, 8));
    // Switched while the monitor has no records: those it brings later are older.
    guest.disconnect();
    let kept = guest.inflight.take();
    guest.connect(&rig.socket);
    assert!(guest.set_config(32, &[0]));
    let (body, file) = kept.unwrap();
    assert!(guest.try_set(32, &body, &[std::os::fd::AsFd::as_fd(&file)]));
    guest.start();
    assert!(is_durable(&mut guest, 9), "what was said last holds");
    rig.end();
}

/// It cannot flush, whatever its cache setting.
#[test]
fn a_driver_that_switches_a_cache_and_cannot_flush_gets_durable_writes() {
    use std::sync::Arc;
    use vdkit_testkit::CountingStorage;
    let counting = CountingStorage::new(Arc::new(vdkit_storage::MemoryStorage::new("image")));
    let rig = Rig::with(counting.clone(), MIB, |_| {});
    let mut guest = Guest::new(1).without(F_FLUSH);
    guest.connect(&rig.socket);
    guest.start();
    for round in 1..3 {
        let before = counting.counts().syncs;
        guest.write(0, 0, &[round; 4096]);
        assert!(counting.counts().syncs > before, "{round}");
        assert!(guest.set_config(32, &[1]));
    }
    rig.end();
}

/// On the queue's thread, and on one that may block.
#[test]
fn a_panic_is_an_error_of_its_request_and_nobody_waits_for_ever() {
    use std::sync::Arc;
    use vdkit_testkit::{FaultKind, GatedStorage};
    let gate = GatedStorage::new(Arc::new(vdkit_storage::MemoryStorage::new("image")));
    let rig = Rig::with(gate.clone(), MIB, |_| {});
    let mut guest = rig.boot(1);
    guest.write(0, 0, &[1; 4096]);
    gate.hold(|call| {
        assert!(![FaultKind::Write, FaultKind::Zero].contains(&call.kind), "for a test");
        false
    });
    assert_eq!(guest.run(0, WRITE, 0, Data::Out(&[2; 4096])).0, 1);
    assert_eq!(guest.run(0, WRITE_ZEROES, 0, Data::Out(&range(0, 8, 0))).0, 1);
    gate.release();
    guest.write(0, 0, &[3; 4096]);
    assert_eq!(guest.read(0, 0, 512), [3; 512]);
    rig.end();
}
