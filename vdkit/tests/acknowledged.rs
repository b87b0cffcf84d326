//! Fault A: a write was acknowledged as durable before its map entry was.
//!
//! Write 1 allocates and is inside its flush. Write 2 goes in place, to the space of write 1. A
//! power cut when write 2 is acknowledged must preserve both.

use std::sync::Arc;

use vdkit::{CacheMode, Disk, GuestOffset, Limits, OpenOptions, OpenRequest, Storage};
use vdkit_testkit::{CrashStorage, FaultKind, GatedStorage, Watched, create_image};

fn open(format: &str, storage: Arc<dyn Storage>, cache: CacheMode) -> Disk {
    let (driver, limits) = (vdkit::format(format).unwrap(), Limits::default());
    let info = driver.describe(&storage, &limits).unwrap();
    let request = OpenRequest { storage, files: Vec::new(), writable: true, limits };
    let options = OpenOptions::read_write().cache(cache);
    Disk::from_format(driver.open(request).unwrap(), info, &options)
}

fn write_beside_a_flush(format: &'static str, options: &str, cache: CacheMode) {
    let what = format!("{format} '{options}' {cache}");
    let crash = CrashStorage::new();
    create_image(vdkit::format(format).unwrap(), crash.clone(), 8 << 20, options);
    crash.sync().unwrap();
    let gated = GatedStorage::new(crash.clone());
    let disk = Arc::new(open(format, gated.clone(), cache));
    // The image is open for writing, and space is reserved.
    disk.write_at(&[7; 4096], GuestOffset(6 << 20)).unwrap();
    gated.hold(|call| call.kind == FaultKind::Sync && !call.done);
    let first = disk.clone();
    let first = std::thread::spawn(move || first.write_at(&[1; 512], GuestOffset(0)).unwrap());
    gated.reached();
    let watched = Arc::new(Watched::default());
    let (second, here, watcher) = (disk.clone(), crash.clone(), watched.clone());
    let second = std::thread::spawn(move || {
        watcher.is_me();
        second.write_at(&[2; 512], GuestOffset(512)).unwrap();
        // The power fails now.
        here.crash_now().only_durable()
    });
    // It is acknowledged too early, or waits for the flush.
    watched.until_it_waits();
    gated.release();
    let survivor = second.join().unwrap();
    let mut found = [0; 512];
    let after = open(format, Arc::new(survivor), CacheMode::Writeback);
    after.read_at(&mut found, GuestOffset(512)).unwrap();
    first.join().unwrap();
    assert_eq!(found, [2; 512], "{what}: an acknowledged write is lost");
}

#[test]
fn a_write_into_space_that_another_is_flushing_is_durable_when_it_is_acknowledged() {
    for cache in [CacheMode::Writethrough, CacheMode::DirectSync] {
        for (format, options) in [
            ("qcow2", ""),
            ("qcow2", "cluster_size=4K"),
            ("qcow2", "extended_l2=on"),
            ("vmdk", ""),
            ("vdi", ""),
            ("vpc", ""),
            ("vhdx", ""),
            ("raw", ""),
        ] {
            write_beside_a_flush(format, options, cache);
        }
    }
}
