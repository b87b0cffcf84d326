//! `vdkit mount`: every byte is where it belongs, whatever happens.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crate::common::mounted::{MIB, Mount, holds, run, unmount};
use crate::common::{self, Loop, Scratch, peer, signal};
use rustix::fs::{FallocateFlags, OFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;
use vdkit_testkit::{Rng, fs, require_fuse, require_peer};

/// Random writes, zeroes, holes and reads through the file, held against a flat buffer.
fn follow_model(scratch: &Scratch, image: &str, format: &str, more: &[&str], rng: &mut Rng) {
    const SIZE: u64 = 24 * MIB;
    let raw = scratch.path("before.raw");
    let convert = ["convert", "-f", format, "-O", "raw", image, "before.raw"];
    peer(&scratch.path(""), "qemu-img", &convert);
    let mut model = std::fs::read(&raw).unwrap();
    assert_eq!(model.len() as u64, SIZE);
    for round in 0..3 {
        let mut arguments = vec!["-f", format];
        arguments.extend_from_slice(more);
        arguments.extend([image, "mounted"]);
        let mount = Mount::start(scratch, &arguments);
        let file = mount.open();
        for step in 0..150 {
            let at = rng.below(SIZE);
            let longest = if rng.below(8) == 0 { 3 * MIB } else { 100_000 };
            let len = (1 + rng.below(longest)).min(SIZE - at);
            let range = at as usize..(at + len) as usize;
            match rng.below(6) {
                0 | 1 => {
                    let mut data = vec![0; len as usize];
                    rng.fill(&mut data);
                    file.write_all_at(&data, at).unwrap();
                    model[range.clone()].copy_from_slice(&data);
                }
                2 => {
                    let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                    fallocate(&file, how, at, len).unwrap();
                    model[range.clone()].fill(0);
                }
                3 => {
                    let how = match rng.below(2) {
                        0 => FallocateFlags::ZERO_RANGE,
                        _ => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
                    };
                    fallocate(&file, how, at, len).unwrap();
                    model[range.clone()].fill(0);
                }
                _ => {}
            }
            if rng.below(20) == 0 {
                file.sync_data().unwrap();
            }
            let mut found = vec![0; len as usize];
            file.read_exact_at(&mut found, at).unwrap();
            assert!(found == model[range], "{image}: round {round}, step {step}: {at} {len}");
        }
        drop(file);
        mount.stop();
        holds(scratch, image, format, &model);
    }
}

#[test]
fn random_changes_follow_a_model() {
    if !require_fuse() {
        return;
    }
    let mut rng = Rng::new(11);
    for (options, more) in [
        ("compat=1.1", &[][..]),
        ("cluster_size=4096", &["--cache", "none"]),
        ("cluster_size=2M", &["--cache", "directsync"]),
        ("compat=0.10", &["--l2-cache", "64K"]),
    ] {
        let scratch = Scratch::new();
        peer(
            &scratch.path(""),
            "qemu-img",
            &["create", "-q", "-f", "qcow2", "-o", options, "d.qcow2", "24M"],
        );
        follow_model(&scratch, "d.qcow2", "qcow2", more, &mut rng);
    }
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.raw", "24M"]);
    follow_model(&scratch, "disk.raw", "raw", &[], &mut rng);
}

#[test]
fn random_changes_to_an_overlay_follow_a_model() {
    if !require_fuse() {
        return;
    }
    let mut rng = Rng::new(12);
    let scratch = Scratch::new();
    let chain = [
        common::chains::Link::qcow2("base.qcow2", "", 24 * MIB).compressed(64 << 10),
        common::chains::Link::qcow2("top.qcow2", "", 24 * MIB),
    ];
    common::chains::make(&scratch, &chain, &mut rng);
    follow_model(&scratch, "top.qcow2", "qcow2", &[], &mut rng);
}

#[test]
fn many_at_once_keep_to_their_parts() {
    if !require_fuse() {
        return;
    }
    const PARTS: u64 = 6;
    const PART: u64 = 3 * MIB + 512;
    let scratch = Scratch::new();
    let size = (PARTS * PART).to_string();
    scratch.ok(&["create", "disk.qcow2", &size]);
    let mount = Mount::start(&scratch, &["disk.qcow2", "mounted"]);
    let parts: Vec<Vec<u8>> = thread::scope(|scope| {
        let workers: Vec<_> = (0..PARTS)
            .map(|part| {
                let file = mount.open();
                scope.spawn(move || {
                    let mut rng = Rng::new(part);
                    let mut model = vec![0; PART as usize];
                    for _ in 0..300 {
                        let at = rng.below(PART);
                        let len = (1 + rng.below(40_000)).min(PART - at);
                        let range = at as usize..(at + len) as usize;
                        match rng.below(3) {
                            0 => {
                                let data = vec![1 + rng.below(255) as u8; len as usize];
                                file.write_all_at(&data, part * PART + at).unwrap();
                                model[range].copy_from_slice(&data);
                            }
                            1 => {
                                let mut found = vec![0; len as usize];
                                file.read_exact_at(&mut found, part * PART + at).unwrap();
                                assert!(found == model[range]);
                            }
                            _ if rng.below(4) == 0 => file.sync_all().unwrap(),
                            _ => {
                                let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                                fallocate(&file, how, part * PART + at, len).unwrap();
                                model[range].fill(0);
                            }
                        }
                    }
                    model
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    mount.stop();
    holds(&scratch, "disk.qcow2", "qcow2", &parts.concat());
}

#[test]
fn a_file_system_lives_on_it() {
    if !require_fuse() || !require_peer("mkfs.ext4") || !require_peer("losetup") {
        return;
    }
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "128M"]);
    let at = scratch.path("tree");
    std::fs::create_dir(&at).unwrap();
    let mut rng = Rng::new(13);
    let content: Vec<Vec<u8>> = (0..20)
        .map(|_| {
            let mut bytes = vec![0; 1 + rng.below(900_000) as usize];
            rng.fill(&mut bytes);
            bytes
        })
        .collect();
    for (round, how) in [&["--direct-io=off"][..], &["--direct-io=on"]].into_iter().enumerate() {
        let mount = Mount::start(&scratch, &["disk.qcow2", "mounted"]);
        let device = Loop::over(&mount.file, how);
        if round == 0 {
            run("mkfs.ext4", &["-q", &device.0]);
        }
        run("mount", &[&device.0, at.to_str().unwrap()]);
        for (i, bytes) in content.iter().enumerate() {
            let name = at.join(format!("{i}"));
            if round == 0 {
                std::fs::write(&name, bytes).unwrap();
            } else {
                assert!(&std::fs::read(&name).unwrap() == bytes, "{i}");
                std::fs::write(at.join(format!("again-{i}")), bytes).unwrap();
            }
        }
        run("fstrim", &[at.to_str().unwrap()]);
        unmount(&at, &[]);
        drop(device);
        // The file system that was unmounted is sound, through the file too.
        run("e2fsck", &["-fn", mount.file.to_str().unwrap()]);
        mount.stop();
        common::chains::sound(&scratch, "disk.qcow2", false);
    }
    scratch.ok(&["convert", "disk.qcow2", "flat.raw"]);
    run("e2fsck", &["-fn", scratch.path("flat.raw").to_str().unwrap()]);
}

#[test]
fn fio_reads_back_what_it_wrote() {
    if !require_fuse() || !require_peer("fio") {
        return;
    }
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "64M"]);
    let mount = Mount::start(&scratch, &["disk.qcow2", "mounted"]);
    let file = format!("--filename={}", mount.file.display());
    for engine in [
        &["--ioengine=libaio", "--direct=1", "--iodepth=32"][..],
        &["--ioengine=psync", "--fsync=16"],
        &["--ioengine=mmap"],
    ] {
        let mut arguments = vec![
            "--name=verify",
            &file,
            "--rw=randwrite",
            "--bsrange=512-128k",
            "--bs_unaligned=0",
            "--blockalign=512",
            "--size=64m",
            "--io_size=48m",
            "--verify=crc32c",
            "--do_verify=1",
            "--verify_fatal=1",
            "--verify_state_save=0",
            "--randrepeat=1",
            "--output-format=terse",
        ];
        arguments.extend_from_slice(engine);
        run("fio", &arguments);
    }
    mount.stop();
    common::chains::sound(&scratch, "disk.qcow2", false);
}

/// The file's runs of data, by asking for the next hole and the next data in turn.
fn runs(file: &File) -> Vec<(u64, u64)> {
    let mut runs = Vec::new();
    let mut at = 0;
    loop {
        match seek(file, SeekFrom::Data(at)) {
            Err(Errno::NXIO) => return runs,
            Err(error) => panic!("{error}"),
            Ok(start) => {
                let end = seek(file, SeekFrom::Hole(start)).unwrap();
                assert!(end > start);
                runs.push((start, end));
                at = end;
            }
        }
    }
}

#[test]
fn holes_are_those_of_the_map() {
    if !require_fuse() {
        return;
    }
    let mut rng = Rng::new(14);
    let scratch = Scratch::new();
    let chain = [
        common::chains::Link::raw("base.raw", 20 * MIB),
        common::chains::Link::qcow2("middle.qcow2", "", 16 * MIB).compressed(64 << 10),
        common::chains::Link::qcow2("top.qcow2", ",cluster_size=4096", 24 * MIB),
    ];
    common::chains::make(&scratch, &chain, &mut rng);
    let mut wanted: Vec<(u64, u64)> = Vec::new();
    for row in scratch.json_of("map", 0, &["top.qcow2"]).as_array().unwrap() {
        let number = |key: &str| row[key].as_u64().unwrap();
        let (start, end) = (number("start"), number("start") + number("length"));
        if row["zero"] == true {
            continue;
        }
        match wanted.last_mut() {
            Some(last) if last.1 == start => last.1 = end,
            _ => wanted.push((start, end)),
        }
    }
    assert!(wanted.len() > 3, "{wanted:?}");
    let mount = Mount::start(&scratch, &["top.qcow2", "mounted"]);
    let file = mount.open();
    assert_eq!(runs(&file), wanted);
    // From within a run too.
    let (start, end) = wanted[1];
    assert_eq!(seek(&file, SeekFrom::Data(start + 1)), Ok(start + 1));
    assert_eq!(seek(&file, SeekFrom::Hole(start + 1)), Ok(end));
    assert_eq!(seek(&file, SeekFrom::Hole(24 * MIB)), Err(Errno::NXIO));
    // What is written and punched shows at once.
    let hole = end;
    file.write_all_at(&[1; 4096], hole).unwrap();
    assert_eq!(seek(&file, SeekFrom::Data(hole)), Ok(hole));
    let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&file, how, 0, 24 * MIB).unwrap();
    assert_eq!(runs(&file), []);
    drop(file);
    mount.stop();
}

#[test]
fn a_killed_server_loses_nothing_that_was_synced() {
    if !require_fuse() {
        return;
    }
    const SIZE: u64 = 64 * MIB;
    const BLOCK: u64 = 4096;
    for (seed, cache) in [(1, "writeback"), (2, "writeback"), (3, "none")] {
        let scratch = Scratch::new();
        scratch.ok(&["create", "disk.qcow2", &SIZE.to_string()]);
        let mount = Mount::start(&scratch, &["--cache", cache, "disk.qcow2", "mounted"]);
        let (file, direct) = (mount.open(), mount.open());
        let written = AtomicU64::new(0);
        // Each block is written once in a round, in an order of its own, with the round's number.
        let (synced, begun) = thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut rng = Rng::new(seed);
                let blocks = SIZE / BLOCK;
                // What each block holds for good, and what it may hold: the last value begun.
                let mut synced = vec![0u8; blocks as usize];
                let mut begun = vec![Vec::new(); blocks as usize];
                let mut unsynced = Vec::new();
                loop {
                    let block = rng.below(blocks) as usize;
                    let value = 1 + rng.below(255) as u8;
                    begun[block].push(value);
                    let data = [value; BLOCK as usize];
                    if file.write_all_at(&data, block as u64 * BLOCK).is_err() {
                        return (synced, begun);
                    }
                    unsynced.push((block, value));
                    written.fetch_add(1, Ordering::Relaxed);
                    if rng.below(20) == 0 {
                        if direct.sync_data().is_err() {
                            return (synced, begun);
                        }
                        for (block, value) in unsynced.drain(..) {
                            synced[block] = value;
                            begun[block].clear();
                        }
                    }
                }
            });
            common::wait_until(|| written.load(Ordering::Relaxed) > 2000 || writer.is_finished());
            // (SIGKILL; the mount stays, and what the writer does fails.)
            signal(mount.child.id(), "KILL");
            writer.join().unwrap()
        });
        mount.kill();
        let check = scratch.run(&["check", "disk.qcow2"]);
        assert!(matches!(check.code, Some(0 | 3)), "{check:?}");
        scratch.ok(&["convert", "disk.qcow2", "after.raw"]);
        let after = std::fs::read(scratch.path("after.raw")).unwrap();
        assert!(synced.iter().filter(|value| **value != 0).count() > 500);
        for (block, value) in synced.iter().enumerate() {
            let found = &after[block * BLOCK as usize..][..BLOCK as usize];
            for byte in found {
                assert!(byte == value || begun[block].contains(byte), "{cache}: block {block}");
            }
        }
    }
}

#[test]
fn what_is_written_with_o_dsync_survives_without_a_sync() {
    if !require_fuse() {
        return;
    }
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "16M"]);
    let mount = Mount::start(&scratch, &["disk.qcow2", "mounted"]);
    let flags = OFlags::DSYNC.bits() as i32;
    let file = OpenOptions::new().write(true).custom_flags(flags).open(&mount.file).unwrap();
    file.write_all_at(&[7; 5000], 3 * MIB).unwrap();
    signal(mount.child.id(), "KILL");
    drop(file);
    mount.kill();
    let bytes = scratch.ok(&["read", "disk.qcow2", "3M", "5000"]).bytes;
    assert!(bytes == [7; 5000]);
}

#[test]
fn a_full_file_system_makes_a_write_wait() {
    if !require_fuse() {
        return;
    }
    for kind in ["tmpfs", "ext4"] {
        let Some(small) = fs::mounted(kind, 48 * MIB) else { return };
        let scratch = Scratch::new();
        let image = small.path().join("disk.qcow2");
        let image = image.to_str().unwrap();
        scratch.ok(&["create", image, "256M"]);
        let filler = small.path().join("filler");
        std::fs::write(&filler, vec![1; 30 << 20]).unwrap();
        let mut mount = Mount::start(&scratch, &[image, "mounted"]);
        let file = mount.open();
        let done = AtomicU64::new(0);
        let data: Vec<u8> = (0..24 * MIB).map(|i| (i / 4096 + 1) as u8).collect();
        thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for (i, piece) in data.chunks(MIB as usize).enumerate() {
                    file.write_all_at(piece, i as u64 * MIB).unwrap();
                    done.fetch_add(1, Ordering::SeqCst);
                }
            });
            // It comes to a stop, and does not fail.
            mount.says("warning: writes wait for space");
            assert!(!writer.is_finished() && done.load(Ordering::SeqCst) < 24, "{kind}");
            // Reads go on meanwhile.
            let mut bytes = [0; 4096];
            mount.open().read_exact_at(&mut bytes, 0).unwrap();
            assert_eq!(bytes[0], 1);
            std::fs::remove_file(&filler).unwrap();
            writer.join().unwrap();
        });
        let mut found = vec![0; data.len()];
        file.read_exact_at(&mut found, 0).unwrap();
        assert!(found == data, "{kind}");
        file.sync_all().unwrap();
        drop(file);
        mount.says("there is space again");
        mount.stop_saying("");
        let check = scratch.run(&["check", image]);
        assert_eq!(check.code, Some(0), "{check:?}");

        // And where errors are wanted there is one.
        std::fs::write(&filler, vec![1; 10 << 20]).unwrap();
        let mount = Mount::start(&scratch, &["--on-nospace", "report", image, "mounted"]);
        let file = mount.open();
        let piece = vec![1; MIB as usize];
        let error = (100..200).find_map(|i| file.write_all_at(&piece, i * MIB).err()).unwrap();
        assert_eq!(error.kind(), ErrorKind::StorageFull);
        drop(file);
        mount.kill();
    }
}
