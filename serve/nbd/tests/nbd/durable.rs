//! Power cuts in each cache mode: answered FUA writes and flushed writes survive, and in modes with
//! durable writes each answered write.

use std::sync::Arc;

use vdkit_block::{CacheMode, GuestOffset, Storage};
use vdkit_testkit::{CrashStorage, Rng};

use vdkit_testkit::disks::{MIB, qcow2, reopen, reopen_in};
use vdkit_testkit::nbd::Rig;
use vdkit_testkit::nbd::client::{Client, FLUSH, FUA, Style, TRIM, WRITE, WRITE_ZEROES};

/// An image of 4 MiB whose first half is allocated.
fn rig(cache: CacheMode) -> (Arc<CrashStorage>, Rig) {
    let crash = CrashStorage::in_mode(cache);
    let storage: Arc<dyn Storage> = crash.clone();
    let disk = qcow2(storage.clone(), 4 * MIB, "");
    disk.write_at(&vec![0xee; 2 * MIB as usize], GuestOffset(0)).unwrap();
    disk.close().unwrap();
    let disk = reopen_in(cache, storage.clone(), true);
    (crash, Rig::over(storage, disk, |_| {}, |_| {}))
}

/// Checks one byte after a power cut now, in the worst case and some others.
fn expect(crash: &CrashStorage, rng: &mut Rng, at: u64, byte: u8, what: &str) {
    let image = crash.crash_now();
    let survivors = std::iter::once(image.only_durable())
        .chain((0..4).map(|_| image.survivor(rng)).collect::<Vec<_>>());
    for survivor in survivors {
        let disk = reopen(Arc::new(survivor), false);
        let mut found = [0];
        disk.read_at(&mut found, GuestOffset(at)).unwrap();
        assert_eq!(found, [byte], "{what}: {at:#x}");
    }
}

/// Offsets of round `round`: one in place, one with an allocation.
fn places(round: u8) -> [u64; 2] {
    [u64::from(round) * 4096, 2 * MIB + u64::from(round) * 65536]
}

fn write(client: &mut Client, flags: u16, at: u64, round: u8) {
    client.run(WRITE, flags, at, 4096, &[round; 4096]).unwrap();
}

#[test]
fn what_was_answered_with_fua_or_a_flush_survives() {
    let modes = [CacheMode::Writeback, CacheMode::None];
    for cache in modes.into_iter().chain([CacheMode::Writethrough, CacheMode::DirectSync]) {
        let (crash, rig) = rig(cache);
        let (mut rng, what) = (Rng::new(7), cache.to_string());
        let mut client = rig.client(Style::Structured);
        for round in 1..16 {
            for at in places(round) {
                write(&mut client, 0, at + 8192 * 8, round ^ 0x80);
                write(&mut client, FUA, at, round);
                expect(&crash, &mut rng, at + 4095, round, &what);
                client.run(WRITE_ZEROES, FUA, at, 512, b"").unwrap();
                expect(&crash, &mut rng, at + 511, 0, &what);
            }
        }
        client.run(TRIM, FUA, MIB, 65536, b"").unwrap();
        expect(&crash, &mut rng, MIB + 65535, 0, &what);
        // A flush covers answered writes of other connections.
        let mut other = rig.client(Style::Simple);
        for at in places(20) {
            write(&mut other, 0, at, 9);
        }
        client.run(FLUSH, 0, 0, 0, b"").unwrap();
        for at in places(20) {
            expect(&crash, &mut rng, at, 9, &what);
        }
        rig.end();
    }
}

#[test]
fn each_write_survives_where_the_mode_says_so() {
    for cache in [CacheMode::Writethrough, CacheMode::DirectSync] {
        let (crash, rig) = rig(cache);
        let mut rng = Rng::new(8);
        let mut client = rig.client(Style::Extended);
        for round in 1..24 {
            for at in places(round) {
                write(&mut client, 0, at, round);
                expect(&crash, &mut rng, at, round, &cache.to_string());
            }
        }
        client.run(WRITE_ZEROES, 0, MIB, 65536, b"").unwrap();
        expect(&crash, &mut rng, MIB, 0, "zeroes");
        rig.end();
    }
}

/// Shows that the tests above can fail: an unflushed write may be lost.
#[test]
fn without_fua_and_flush_a_write_may_be_lost() {
    for cache in [CacheMode::Writeback, CacheMode::Unsafe] {
        let (crash, rig) = rig(cache);
        let mut client = rig.client(Style::Structured);
        write(&mut client, 0, 0, 1);
        let flags = if cache == CacheMode::Unsafe { FUA } else { 0 };
        write(&mut client, flags, 4096, 1);
        let durable = crash.crash_now().only_durable();
        let mut found = [0xff; 8192];
        let read = (durable.len().unwrap() > 0)
            .then(|| reopen(Arc::new(durable), false).read_at(&mut found, GuestOffset(0)));
        assert!(!found.contains(&1), "{cache}: {read:?}");
        rig.end();
    }
}
