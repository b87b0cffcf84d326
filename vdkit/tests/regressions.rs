//! One test per fault that other programs have shipped, or that vdkit had.

mod support;

use std::path::Path;

use support::guest::{Guest, pattern, soft_pattern};
use support::ops::pack;
use support::qemu;
use support::rig::{IntoGuest, Rig};
use support::shape::{Base, Content, Shape};
use vdkit_block::{Codec, ErrorKind, HostOffset, Limits};
use vdkit_chain::Disk;
use vdkit_storage::MemoryStorage;
use vdkit_testkit::{FaultKind, FaultPlan, Watched, save_sparse};

/// A snapshot of an image, as QEMU reads it.
fn snapshot(rig: &Rig, name: &str) -> Vec<u8> {
    let scratch = qemu::scratch();
    let dir = scratch.path();
    rig.save(dir);
    let option = format!("snapshot.name={name}");
    let args = ["convert", "-f", "qcow2", "-O", "raw", "-l", &option, "image.qcow2", "view.raw"];
    qemu::img(dir, &args);
    std::fs::read(dir.join("view.raw")).expect("what was converted")
}

#[test]
fn a_write_copies_what_a_snapshot_shares() {
    for cluster in [512, 65536] {
        let shape = Shape { cluster, content: Content::Snapshots, ..Shape::default() };
        let (rig, mut guest) = Rig::new(&shape);
        let (first, second) = (snapshot(&rig, "first"), snapshot(&rig, "second"));
        let disk = rig.open(true).expect("opening");
        for at in (0..guest.len() - 700).step_by(3 * cluster as usize / 2) {
            let bytes = pattern(1, at, 700);
            disk.write_at(&bytes, at.into_guest()).expect("writing");
            guest.write(at, &bytes);
        }
        disk.close().expect("closing");
        assert!(snapshot(&rig, "first") == first && snapshot(&rig, "second") == second);
        rig.ask_qemu(Some(&guest), false, "beside snapshots");
    }
}

#[test]
fn zeroes_never_show_the_backing_image() {
    for version in [2, 3] {
        for extended in [false, version == 3] {
            let shape = Shape { version, extended, base: Base::Equal, ..Shape::default() };
            let (rig, mut guest) = Rig::new(&shape);
            let disk = rig.open(true).expect("opening");
            for (at, len) in [(0, 65536), (100_000, 300_000), (500_001, 17)] {
                disk.write_zeroes(at.into_guest(), len, true).expect("zeroing");
                guest.zero(at, len);
            }
            rig.compare(&disk, &guest, "zeroed");
            disk.close().expect("closing");
            rig.ask_qemu(Some(&guest), false, "zeroed");
        }
    }
}

#[test]
fn a_refcount_table_that_moves_takes_its_spare_blocks_along() {
    // A table of one cluster covers 2 MiB here.
    let shape = Shape { cluster: 512, refcount_bits: 64, wide: true, ..Shape::default() };
    let (rig, _) = Rig::new(&shape);
    let disk = rig.open(true).expect("opening");
    disk.resize(12 << 20).expect("enlarging");
    let mut guest = Guest(MemoryStorage::with_len("guest", 12 << 20));
    for (i, at) in (0..10 << 20).step_by(20_000).enumerate() {
        let bytes = pattern(1, at, 20_000);
        disk.write_at(&bytes, at.into_guest()).expect("writing");
        guest.write(at, &bytes);
        if i % 5 == 0 {
            disk.flush().expect("flushing");
        }
        if i % 40 == 0 {
            disk.flush().expect("flushing");
            rig.audit(true, &format!("after {at} bytes"));
        }
    }
    disk.close().expect("closing");
    rig.ask_qemu(Some(&guest), false, "large for its clusters");
}

/// Writes to a disk of 16 MiB while a flush has copied dirty entries but not written them yet:
/// first `before` bytes and then, during the flush, what `write` does.
fn beside_a_flush(shape: &Shape, before: usize, write: impl Fn(&Disk, &[u8]) + Sync) {
    let (mut rig, mut guest) = Rig::new(shape);
    // No flush because of a full cache.
    rig.limits = Limits::default();
    let disk = rig.open(true).expect("opening");
    disk.resize(16 << 20).expect("enlarging");
    guest.resize(16 << 20);
    let bytes = pattern(1, 0, 12 << 20);
    // More than is reserved for the larger disk: refcounts that are not durable yet.
    disk.write_at(&bytes[..before], 0.into_guest()).expect("writing");
    let writer = Watched::default();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let me = std::thread::current().id();
            rig.image().gated().hold(move |call| {
                call.kind != FaultKind::Read && !call.done && std::thread::current().id() == me
            });
            disk.flush().expect("flushing");
        });
        rig.image().gated().reached();
        scope.spawn(|| {
            writer.is_me();
            write(&disk, &bytes);
        });
        // It may wait for the flush, or not.
        writer.until_it_waits();
        rig.image().gated().release();
    });
    guest.write(0, &bytes);
    disk.flush().expect("flushing");
    rig.audit(true, "flushed");
    rig.compare(&disk, &guest, "flushed");
    disk.close().expect("closing");
    rig.ask_qemu(Some(&guest), false, "closed");
}

#[test]
fn a_flush_on_its_way_does_not_undo_the_refcounts_of_a_growing_file() {
    for refcount_bits in [16, 64] {
        let shape = Shape { cluster: 512, refcount_bits, ..Shape::default() };
        // More than is reserved again: new refcount blocks, and a larger refcount table.
        beside_a_flush(&shape, 1_500_000, |disk, bytes| {
            disk.write_at(bytes, 0.into_guest()).expect("writing");
        });
    }
}

#[test]
fn writers_that_waited_for_a_flush_look_again_whose_cluster_it_is() {
    let shape = Shape { cluster: 4096, refcount_bits: 64, ..Shape::default() };
    beside_a_flush(&shape, 1_500_000, |disk, bytes| {
        // Each writes one sector in four of every cluster.
        std::thread::scope(|scope| {
            for writer in 0..4 {
                scope.spawn(move || {
                    for (at, sector) in (0u64..).step_by(512).zip(bytes.chunks(512)) {
                        if at / 512 % 4 == writer {
                            disk.write_at(sector, at.into_guest()).expect("writing");
                        }
                    }
                });
            }
        });
    });
}

#[test]
fn a_disk_that_was_smaller_shows_nothing_old() {
    for extended in [false, true] {
        for content in [Content::Filled, Content::Snapshots] {
            let shape = Shape { extended, content, ..Shape::default() };
            let (rig, mut guest) = Rig::new(&shape);
            let disk = rig.open(true).expect("opening");
            // In the middle of each kind of cluster in turn.
            for cluster in (0..guest.len() / 65536).rev() {
                for to in [cluster * 65536 + 3072, shape.guest_bytes()] {
                    disk.resize(to).expect("resizing");
                    guest.resize(to);
                }
                rig.compare(&disk, &guest, "smaller and larger again");
            }
            disk.close().expect("closing");
            rig.ask_qemu(Some(&guest), false, "smaller and larger again");
        }
    }
}

#[test]
fn qemu_enlarges_a_disk_that_ends_in_reused_space() {
    let (rig, mut guest) = Rig::new(&Shape::default());
    let disk = rig.open(true).expect("opening");
    let last = guest.len() / 65536 * 65536;
    // Space with old data, freed without a hole (compressed data replaces it), and reused for the
    // last cluster.
    for at in (0..8 << 16).step_by(65536) {
        let bytes = pattern(1, at, 65536);
        disk.write_at(&bytes, at.into_guest()).expect("writing");
    }
    disk.flush().expect("flushing");
    let compressed = soft_pattern(3, 0, 8 << 16, 65536);
    let units = pack(Codec::Deflate, 65536, &compressed).expect("soft bytes");
    disk.write_compressed(0.into_guest(), &units).expect("writing");
    guest.write(0, &compressed);
    disk.flush().expect("flushing");
    let bytes = pattern(2, last, 512);
    disk.write_at(&bytes, last.into_guest()).expect("writing");
    guest.write(last, &bytes);
    disk.close().expect("closing");
    let scratch = qemu::scratch();
    let dir: &Path = scratch.path();
    rig.save(dir);
    qemu::img(dir, &["resize", "-q", "-f", "qcow2", "image.qcow2", "8M"]);
    guest.resize(8 << 20);
    save_sparse(&guest.0, &dir.join("guest.raw"));
    qemu::img(dir, &["compare", "-f", "qcow2", "-F", "raw", "image.qcow2", "guest.raw"]);
}

#[test]
fn data_on_the_images_own_metadata_is_not_written() {
    let (rig, _) = Rig::new(&Shape { content: Content::Filled, ..Shape::default() });
    let storage = rig.image().storage();
    let word = |at: u64| {
        let mut bytes = [0; 8];
        storage.read_at(&mut bytes, HostOffset(at)).expect("memory");
        u64::from_be_bytes(bytes)
    };
    let l1 = word(40);
    let l2 = word(l1) & 0x00ff_ffff_ffff_fe00;
    for target in [0, l1, l2, word(48)] {
        // The guest's first cluster points at the image's metadata.
        let entry = (target | 1 << 63).to_be_bytes();
        storage.write_at(&entry, HostOffset(l2)).expect("memory");
        let before = rig.image().content().to_vec();
        let disk = rig.open(true).expect("opening");
        if target != 0 {
            let error = disk.write_at(&[1; 512], 0.into_guest()).expect_err("a dangerous write");
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        }
        // Nor is it freed.
        disk.discard(0.into_guest(), 65536).expect("discarding");
        disk.flush().expect("flushing");
        let mut kept = vec![0; 512];
        storage.read_at(&mut kept, HostOffset(target)).expect("memory");
        if target != l2 {
            assert!(kept == before[target as usize..][..512], "{target:#x} was changed");
        }
    }
}

#[test]
fn reads_past_a_short_backing_image_are_zero() {
    for base_qcow2 in [false, true] {
        let shape = Shape { base: Base::Shorter, base_qcow2, ..Shape::default() };
        let (rig, guest) = Rig::new(&shape);
        let disk = rig.open(false).expect("opening");
        rig.compare(&disk, &guest, "over a short one");
        let tail = guest.read(shape.base_bytes(), guest.len() - shape.base_bytes());
        assert!(tail.iter().all(|b| *b == 0));
    }
}

#[test]
fn a_larger_disk_keeps_its_compression_type() {
    let shape = Shape { zstd: true, content: Content::Filled, ..Shape::default() };
    let (rig, mut guest) = Rig::new(&shape);
    let disk = rig.open(true).expect("opening");
    disk.resize(1 << 30).expect("enlarging");
    guest.resize(1 << 30);
    disk.close().expect("closing");
    rig.ask_qemu(Some(&guest), false, "enlarged");
}

#[test]
fn a_resize_that_failed_changes_no_size_on_disk() {
    for to in [1 << 20, 5 << 20] {
        // Which sync fails, and all later ones with it.
        for nth in 0.. {
            let (rig, mut guest) =
                Rig::new(&Shape { content: Content::Filled, ..Shape::default() });
            let disk = rig.open(true).expect("opening");
            rig.image().faulty().arm(FaultPlan::nth(&[FaultKind::Sync], nth).lasting());
            let resized = disk.resize(to);
            rig.image().faulty().heal();
            if resized.is_ok() {
                assert!(nth > 1, "a resize without barriers");
                break;
            }
            if disk.guest_bytes() != guest.len() {
                continue; // the header is durable, but bytes beyond the end were not cleared
            }
            let at = guest.len() - 3000;
            let bytes = pattern(1, at, 3000);
            disk.write_at(&bytes, at.into_guest()).expect("writing once the fault is gone");
            guest.write(at, &bytes);
            disk.close().expect("closing");
            let again = rig.open(false).expect("opening");
            rig.compare(&again, &guest, &format!("resize to {to}, sync {nth} failed"));
            rig.audit(true, "a failed resize");
        }
    }
}

#[test]
fn refcount_blocks_made_before_a_fault_stay_in_the_file() {
    let shape = Shape { cluster: 512, refcount_bits: 64, ..Shape::default() };
    for kind in FaultKind::ALL {
        for nth in 0.. {
            let (rig, mut guest) = Rig::new(&shape);
            let disk = rig.open(true).expect("opening");
            rig.image().faulty().arm(FaultPlan::nth(&[kind], nth).lasting());
            let bytes = pattern(1, 0, 30_000);
            let written = disk.write_at(&bytes, 0.into_guest());
            rig.image().faulty().heal();
            // It is not repeated: the close sees only what the failed attempt left.
            disk.close().expect("closing once the fault is gone");
            rig.audit(true, &format!("{kind:?} {nth} failed"));
            if written.is_ok() {
                guest.write(0, &bytes);
                rig.compare(&rig.open(false).expect("opening"), &guest, "no fault");
                break;
            }
        }
    }
}
