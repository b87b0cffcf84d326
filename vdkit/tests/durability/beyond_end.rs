//! Refcounts of clusters beyond the end of an empty image: they are not read, and stale values from
//! a crash are harmless.

use std::sync::Arc;
use vdkit_block::StorageExt;

use vdkit::storage::MemoryStorage;
use vdkit::{Disk, GuestOffset, HostOffset, Storage};
use vdkit_testkit::{CountingStorage, Rng, cases};

use super::{Shape, audit, read_all};

/// Small clusters, so that the refcounts of a disk take more slices than the cache holds.
const SMALL: &str = "cluster_size=512,refcount_bits=64";

/// A new image with stale refcounts. They are those of a partly written disk, kept by a crash, in
/// blocks that the new image has.
fn leaking(shape: &Shape, guest_bytes: u64, written: u64) -> Arc<MemoryStorage> {
    let new = || {
        let memory = Arc::new(MemoryStorage::new("image"));
        shape.create_of(&(memory.clone() as Arc<dyn Storage>), guest_bytes);
        memory
    };
    let (image, full) = (new(), new());
    let disk = shape.open(full.clone()).unwrap();
    disk.write_at(&vec![1; written as usize], GuestOffset(0)).unwrap();
    disk.close().unwrap();
    let word = |storage: &MemoryStorage, at: u64| {
        let mut bytes = [0; 8];
        storage.read_padded(&mut bytes, HostOffset(at)).unwrap();
        u64::from_be_bytes(bytes)
    };
    // The specification's header: cluster_bits at 20, refcount_table_offset at 48.
    let cluster = 1 << (word(&image, 16) & 0xffff_ffff);
    let mut kept = 0;
    for entry in (0..cluster).step_by(8) {
        let block = word(&image, word(&image, 48) + entry);
        if block != 0 {
            assert_eq!(block, word(&full, word(&full, 48) + entry), "the block did not move");
            for at in (block..block + cluster).step_by(8) {
                // The full image may have freed clusters that the new one uses, such as its
                // refcount table.
                let (own, leaked) = (word(&image, at), word(&full, at));
                image.write_at(&(own | leaked).to_be_bytes(), HostOffset(at)).unwrap();
                kept += (leaked & !own).count_ones();
            }
        }
    }
    assert!(kept > 0);
    image
}

/// Random writes and discards of all lengths.
fn exercise(disk: &Disk, want: &mut [u8], rng: &mut Rng, steps: usize) {
    for step in 0..steps {
        let end = want.len() as u64;
        let most = 1 << rng.below(17);
        let len = rng.within(1..most + 1) * 512;
        let at = rng.below(end / 512) * 512;
        let range = at as usize..(at + len).min(end) as usize;
        if rng.below(3) == 0 {
            disk.discard(GuestOffset(at), range.len() as u64).unwrap();
            disk.read_at(&mut want[range], GuestOffset(at)).unwrap();
        } else {
            want[range.clone()].fill(step as u8 | 1);
            disk.write_at(&want[range], GuestOffset(at)).unwrap();
        }
        if rng.below(40) == 0 {
            disk.flush().unwrap();
        }
    }
}

#[test]
fn leaks_behind_the_end_of_an_empty_image_harm_nothing() {
    for options in [SMALL, "cluster_size=512,refcount_bits=1", "cluster_size=4K", "", "compat=0.10"]
    {
        for written in [1 << 20, 24 << 20] {
            for case in 0..cases(2) {
                let mut rng = Rng::from_env(case);
                let what = format!("'{options}', {written} bytes leaked, seed {}", rng.seed());
                let shape = Shape { options, backing: None };
                let image = leaking(&shape, 48 << 20, written);
                let storage: Arc<dyn Storage> = image.clone();
                let mut want = vec![0; 48 << 20];
                for _ in 0..2 {
                    let disk = shape.open(storage.clone()).unwrap();
                    exercise(&disk, &mut want, &mut rng, 60);
                    disk.flush().unwrap();
                    assert!(read_all(&disk) == want, "{what}");
                    disk.close().unwrap();
                    audit(&storage, false, &what);
                }
                let disk = shape.open(storage.clone()).unwrap();
                assert!(read_all(&disk) == want, "{what}, opened again");
            }
        }
    }
}

/// More slices change than the cache holds: evicted ones keep their counts.
#[test]
fn a_new_image_forgets_no_refcount_of_many() {
    let shape = Shape { options: SMALL, backing: None };
    let guest: u64 = 48 << 20;
    let image = Arc::new(MemoryStorage::new("image"));
    let storage: Arc<dyn Storage> = image.clone();
    shape.create_of(&storage, guest);
    let disk = shape.open(storage.clone()).unwrap();
    let mut want = vec![0; guest as usize];
    for (piece, at) in want.chunks_mut(1 << 20).zip((0..).step_by(1 << 20)) {
        piece.fill((at >> 20) as u8 + 1);
        disk.write_at(piece, GuestOffset(at)).unwrap();
        disk.flush().unwrap();
    }
    let mut rng = Rng::from_env(1);
    exercise(&disk, &mut want, &mut rng, 200);
    assert!(read_all(&disk) == want);
    disk.close().unwrap();
    audit(&storage, true, "many slices");
}

/// The refcounts of the image's own clusters are read once, and no others.
#[test]
fn a_new_image_is_written_without_reading_its_refcounts() {
    for (options, guest) in [
        ("", 4 << 30),
        ("cluster_size=4K", 256 << 20),
        ("cluster_size=8K,refcount_bits=1", 1 << 30),
        ("refcount_bits=64", 1 << 30),
        ("cluster_size=16K,extended_l2=on", 1 << 30),
        ("lazy_refcounts=on", 1 << 30),
    ] {
        let shape = Shape { options, backing: None };
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
        shape.create_of(&storage, guest);
        let counting = CountingStorage::new(storage.clone());
        let disk = shape.open(counting.clone()).unwrap();
        counting.reset();
        for at in (0..guest).step_by(1 << 16) {
            disk.write_at(&[1; 512], GuestOffset(at)).unwrap();
        }
        disk.flush().unwrap();
        disk.close().unwrap();
        let counts = counting.counts();
        assert!(counts.reads <= 1 && counts.bytes_read <= 4096, "'{options}': {counts:?}");
        audit(&storage, true, options);
    }
}
