//! The crash storage must be able to show each fault that it guards against, and must not show
//! any that a real disk cannot have.

use std::collections::BTreeSet;
use vdkit_block::StorageExt;

use super::*;

const SEED: u64 = 0x5eed;

fn byte(storage: &dyn Storage, offset: u64) -> u8 {
    let mut buf = [0];
    storage.read_padded(&mut buf, HostOffset(offset)).unwrap();
    buf[0]
}

fn write(storage: &CrashStorage, offset: u64, byte: u8, len: usize) {
    storage.write_at(&vec![byte; len], HostOffset(offset)).unwrap();
}

/// Everything that `look` sees in any survivor of a crash at any point.
fn outcomes<T: Ord>(
    storage: &Arc<CrashStorage>,
    mut look: impl FnMut(usize, &MemoryStorage) -> T,
) -> BTreeSet<T> {
    let mut rng = Rng::from_env(SEED);
    let mut seen = BTreeSet::new();
    storage.for_each_crash(|ops, image| {
        for (_, survivor) in image.extremes() {
            seen.insert(look(ops, &survivor));
        }
        for _ in 0..20 {
            seen.insert(look(ops, &image.survivor(&mut rng)));
        }
    });
    seen
}

/// A program that publishes a record: the data, and a pointer to it in the first sector.
fn publish(storage: &CrashStorage, barrier: bool) {
    write(storage, 4096, 0xaa, 1024);
    if barrier {
        storage.sync().unwrap();
    }
    write(storage, 0, 1, 1);
    storage.sync().unwrap();
}

/// Whether some crash leaves a pointer to data that is not there.
fn dangles(storage: &Arc<CrashStorage>) -> bool {
    outcomes(storage, |_, survivor| {
        let whole = byte(survivor, 4096) == 0xaa && byte(survivor, 4096 + 1023) == 0xaa;
        byte(survivor, 0) == 1 && !whole
    })
    .contains(&true)
}

#[test]
fn a_pointer_published_before_its_data_is_caught() {
    let wrong = CrashStorage::holding(&MemoryStorage::with_len("m", 8192));
    publish(&wrong, false);
    assert!(dangles(&wrong));
    let right = CrashStorage::holding(&MemoryStorage::with_len("m", 8192));
    publish(&right, true);
    assert!(!dangles(&right));
}

#[test]
fn a_write_may_be_torn_between_sectors_but_not_within_one() {
    let storage = CrashStorage::holding(&MemoryStorage::with_len("m", 4096));
    write(&storage, 0, 1, 1024);
    let seen = outcomes(&storage, |_, s| [0, 511, 512, 1023].map(|at| byte(s, at)));
    let expected = [[0; 4], [1; 4], [1, 1, 0, 0], [0, 0, 1, 1]];
    assert_eq!(seen, BTreeSet::from(expected));
}

#[test]
fn each_version_since_the_sync_may_survive_and_none_from_before() {
    let storage = CrashStorage::holding(&MemoryStorage::with_len("m", 512));
    write(&storage, 0, 1, 512);
    write(&storage, 0, 2, 512);
    storage.sync().unwrap();
    write(&storage, 0, 3, 512);
    write(&storage, 0, 4, 512);
    let mut rng = Rng::from_env(SEED);
    let image = storage.crash_now();
    let seen: BTreeSet<u8> = (0..100).map(|_| byte(&image.survivor(&mut rng), 0)).collect();
    assert_eq!(seen, BTreeSet::from([2, 3, 4]));
    assert_eq!(image.unsynced(), 2);
    // And at each earlier moment what could survive then.
    let at = |ops| byte(&storage.crash_at(ops).only_durable(), 0);
    assert_eq!([0, 1, 2, 3, 4, 5].map(at), [0, 0, 0, 2, 2, 2]);
    assert_eq!(byte(&storage.crash_at(1).everything(), 0), 1);
}

#[test]
fn a_length_may_survive_without_its_bytes_and_bytes_without_their_length() {
    let storage = CrashStorage::holding(&MemoryStorage::from_bytes("m", &[9; 100]));
    write(&storage, 100, 1, 50);
    write(&storage, 1000, 2, 24);
    let seen = outcomes(&storage, |_, s| (s.len().unwrap(), byte(s, 120), byte(s, 1000)));
    assert_eq!(
        seen,
        BTreeSet::from([
            (100, 0, 0),
            (150, 0, 0),
            (150, 1, 0),
            (1024, 0, 0),
            (1024, 1, 0),
            (1024, 0, 2),
            (1024, 1, 2),
        ])
    );
    storage.sync().unwrap();
    let durable = storage.crash_now().only_durable();
    assert_eq!((durable.len().unwrap(), byte(&durable, 99), byte(&durable, 149)), (1024, 9, 1));
}

#[test]
fn what_was_cut_off_does_not_come_back_when_the_file_grows() {
    let storage = CrashStorage::holding(&MemoryStorage::from_bytes("m", &[7; 2048]));
    storage.set_len(700).unwrap();
    storage.set_len(4096).unwrap();
    let seen = outcomes(&storage, |_, s| (s.len().unwrap(), byte(s, 600), byte(s, 800)));
    assert_eq!(seen, BTreeSet::from([(700, 7, 0), (2048, 7, 7), (4096, 7, 0)]));
    // Nor does the emptiness come without the cut, or the tail of the last sector with it.
    let tails = outcomes(&storage, |_, s| (s.len().unwrap(), byte(s, 699), byte(s, 1000)));
    assert_eq!(tails, BTreeSet::from([(700, 7, 0), (2048, 7, 7), (4096, 7, 0)]));
}

#[test]
fn zeroes_and_discards_are_lost_like_writes() {
    for discard in [false, true] {
        let storage = CrashStorage::holding(&MemoryStorage::from_bytes("m", &[7; 2048]));
        if discard {
            // Only the whole sector in the middle.
            storage.discard(HostOffset(100), 1000).unwrap();
        } else {
            storage.write_zeroes(HostOffset(512), 512, ZeroMode::MayUnmap).unwrap();
        }
        let seen = outcomes(&storage, |_, s| [500, 512, 1023, 1024].map(|at| byte(s, at)));
        assert_eq!(seen, BTreeSet::from([[7, 7, 7, 7], [7, 0, 0, 7]]));
    }
}

#[test]
fn zeroing_a_huge_range_costs_nothing() {
    let storage = CrashStorage::new();
    storage.write_zeroes(HostOffset(0), 1 << 60, ZeroMode::MayUnmap).unwrap();
    write(&storage, 1 << 50, 1, 1);
    storage.write_zeroes(HostOffset(0), 1 << 60, ZeroMode::MayUnmap).unwrap();
    assert_eq!(storage.crash_now().everything().len().unwrap(), 1 << 60);
    assert_eq!(byte(&*storage, 1 << 50), 0);
    assert!(storage.write_zeroes(HostOffset(1), u64::MAX, ZeroMode::MayUnmap).is_err());
}

#[test]
fn a_sync_covers_only_what_returned_before_it_began() {
    let storage = CrashStorage::holding(&MemoryStorage::with_len("m", 1024));
    let state = &storage.state;
    // A write that has reached the storage but whose caller still waits …
    let sectors = state.lock().write(0, 512, &[1; 512]);
    let change = Arc::new(Change { id: 1, sectors, new_len: None, cut: false });
    state.lock().next = 2;
    storage.record(&mut state.lock(), Event::Changed(change));
    // … while one that returned is synced.
    write(&storage, 512, 2, 512);
    storage.sync().unwrap();
    state.lock().record(Event::Returned(1));
    let durable = storage.crash_now().only_durable();
    assert_eq!((byte(&durable, 0), byte(&durable, 512)), (0, 2));
    storage.sync().unwrap();
    assert_eq!(byte(&storage.crash_now().only_durable(), 0), 1);
}

#[test]
fn a_synced_change_is_not_lost_to_an_older_one_that_was_still_under_way() {
    let storage = CrashStorage::holding(&MemoryStorage::with_len("m", 512));
    let state = &storage.state;
    let sectors = state.lock().write(0, 100, &[1; 100]);
    let change = Arc::new(Change { id: 1, sectors, new_len: None, cut: false });
    state.lock().next = 2;
    storage.record(&mut state.lock(), Event::Changed(change));
    write(&storage, 100, 2, 100);
    storage.sync().unwrap();
    let seen = outcomes(&storage, |ops, s| (ops == 3, byte(s, 0), byte(s, 100)));
    let after: Vec<_> = seen.iter().filter(|(done, ..)| *done).collect();
    assert_eq!(after, [&(true, 1, 2)]);
}

#[test]
fn synced_bytes_lie_within_the_length_even_where_another_thread_made_it() {
    for how in 0..3 {
        let storage = CrashStorage::new();
        let state = &storage.state;
        // Another thread has made the storage longer, and its caller still waits.
        state.lock().len = 4096;
        let change = Arc::new(Change { id: 1, sectors: vec![], new_len: Some(4096), cut: false });
        state.lock().next = 2;
        storage.record(&mut state.lock(), Event::Changed(change));
        match how {
            0 => write(&storage, 512, 2, 512),
            1 => storage.allocate(HostOffset(0), 4096).unwrap(),
            _ => storage.set_len(4096).unwrap(),
        }
        assert_eq!(storage.crash_now().only_durable().len().unwrap(), 0);
        storage.sync().unwrap();
        let durable = storage.crash_now().only_durable();
        assert_eq!(durable.len().unwrap(), 4096);
        assert_eq!(byte(&durable, 512), if how == 0 { 2 } else { 0 });
    }
}

#[test]
fn many_threads_lose_nothing_that_they_synced() {
    let storage = CrashStorage::new();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let storage = &storage;
            scope.spawn(move || {
                for round in 1..50u8 {
                    write(storage, thread * 512, round, 512);
                    storage.sync().unwrap();
                    let durable = storage.crash_now().only_durable();
                    assert_eq!(byte(&durable, thread * 512), round);
                }
            });
        }
        scope.spawn(|| {
            // A crash can be looked at while others write.
            let mut rng = Rng::from_env(SEED);
            for _ in 0..50 {
                storage.survivor(&mut rng);
                std::thread::yield_now();
            }
        });
    });
    assert_eq!(storage.ops(), 4 * 49 * 2);
    let replayed = storage.crash_at(storage.ops()).everything();
    let mut live = vec![0; 2048];
    storage.read_at(&mut live, HostOffset(0)).unwrap();
    assert_eq!(replayed.to_vec(), live);
}

#[test]
fn it_reads_back_like_memory() {
    let mut rng = Rng::from_env(SEED);
    let storage = CrashStorage::new();
    let memory = MemoryStorage::new("m");
    for _ in 0..2000 {
        let (offset, len) = (HostOffset(rng.below(9000)), rng.below(3000));
        let both: [&dyn Storage; 2] = [&*storage, &memory];
        let (what, fill) = (rng.below(6), rng.next_u64() as u8);
        for each in both {
            match what {
                0 | 1 => each.write_at(&vec![fill; len as usize], offset).unwrap(),
                2 => each.write_zeroes(offset, len, ZeroMode::MayUnmap).unwrap(),
                3 => each.set_len(offset.0).unwrap(),
                4 => each.allocate(offset, len.max(1)).unwrap(),
                _ => each.sync().unwrap(),
            }
        }
        assert_eq!(storage.len().unwrap(), memory.len().unwrap(), "seed {:#x}", rng.seed());
        let mut bytes = vec![1; storage.len().unwrap() as usize];
        storage.read_at(&mut bytes, HostOffset(0)).unwrap();
        assert_eq!(bytes, memory.to_vec(), "seed {:#x}", rng.seed());
    }
    assert_eq!(storage.crash_now().everything().to_vec(), memory.to_vec());
    // Its extents cover it, and holes are zero.
    let (mut at, len) = (0, storage.len().unwrap());
    while at < len {
        let extent = storage.extent_at(HostOffset(at), len - at).unwrap();
        assert!(extent.data || (at..at + extent.len).all(|o| byte(&*storage, o) == 0));
        at += extent.len;
    }
    assert_eq!(at, len);
}

#[test]
fn storages_on_one_clock_lose_their_power_together() {
    let clock = CrashClock::new();
    let (a, b) = (CrashStorage::on(&clock), CrashStorage::on(&clock));
    write(&a, 0, 1, 512);
    write(&b, 0, 2, 512);
    b.sync().unwrap();
    write(&a, 0, 3, 512);
    assert_eq!(clock.now(), 4);
    let held = |storage: &CrashStorage, at| byte(&storage.crash_at_tick(at).everything(), 0);
    assert_eq!([0, 1, 2, 3, 4].map(|at| held(&a, at)), [0, 1, 1, 1, 3]);
    assert_eq!([0, 1, 2, 3, 4].map(|at| held(&b, at)), [0, 0, 2, 2, 2]);
    let durable = |at| byte(&b.crash_at_tick(at).only_durable(), 0);
    assert_eq!((durable(2), durable(3)), (0, 2));
}
