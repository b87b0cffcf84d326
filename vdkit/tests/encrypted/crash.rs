//! Power cuts while an encrypted image is written: each guest sector is old or new, never noise,
//! and flushed data survives.

use std::sync::Arc;

use vdkit::{
    CreateRequest, Disk, Format, FormatDriver, GuestOffset, ImageInfo, Limits, OpenOptions,
    OpenRequest, Options, Storage,
};
use vdkit_testkit::{CrashStorage, Rng};

use crate::kinds::key;

const BYTES: usize = 192 << 10;
const STEPS: usize = 24;

fn open(storage: Arc<dyn Storage>, writable: bool) -> Disk {
    let driver = vdkit::format("qcow2").unwrap();
    let request = OpenRequest { storage, files: Vec::new(), writable, limits: Limits::default() };
    let format: Arc<dyn Format> = driver.open_with_keys(request, &[key()]).unwrap();
    let info = ImageInfo::new(format.name(), format.guest_bytes());
    Disk::from_format(format, info, &OpenOptions::default().writable(writable))
}

fn made(driver: &dyn FormatDriver, options: &str) -> Arc<dyn Storage> {
    let storage: Arc<dyn Storage> = Arc::new(vdkit::storage::MemoryStorage::with_len("image", 0));
    let all =
        format!("encrypt.format=luks,encrypt.cipher-alg=aes-128,encrypt.iter-time=0,{options}");
    let mut options = Options::parse("qcow2", driver.options(), [&all[..]]).unwrap();
    options.set_key(Some(key()));
    let request = CreateRequest {
        storage: storage.clone(),
        files: Vec::new(),
        guest_bytes: BYTES as u64,
        options,
        backing: None,
        backing_bytes: None,
    };
    driver.create(&request).unwrap();
    storage
}

/// The guest's content after an operation, and the storage steps of its begin and end.
struct Done {
    begin: usize,
    end: usize,
    flushed: bool,
    guest: Vec<u8>,
}

fn record(disk: &Disk, crash: &CrashStorage, rng: &mut Rng) -> Vec<Done> {
    let mut guest = vec![0; BYTES];
    let mut done = vec![Done { begin: 0, end: 0, flushed: true, guest: guest.clone() }];
    for _ in 0..STEPS {
        let begin = crash.ops();
        let at = rng.below(BYTES as u64 / 512) as usize * 512;
        let len = (rng.within(1..60) as usize * 512).min(BYTES - at);
        let mut flushed = false;
        match rng.below(8) {
            0..=4 => {
                rng.fill(&mut guest[at..at + len]);
                disk.write_at(&guest[at..at + len], GuestOffset(at as u64)).unwrap();
            }
            5 => {
                guest[at..at + len].fill(0);
                disk.write_zeroes(GuestOffset(at as u64), len as u64, true).unwrap();
            }
            _ => {
                disk.flush().unwrap();
                flushed = true;
            }
        }
        done.push(Done { begin, end: crash.ops(), flushed, guest: guest.clone() });
    }
    disk.close().unwrap();
    done
}

#[test]
fn a_power_cut_shows_no_noise() {
    let driver = vdkit::format("qcow2").unwrap();
    for (number, options) in
        ["cluster_size=4K", "cluster_size=64K", "extended_l2=on,cluster_size=16K"]
            .into_iter()
            .enumerate()
    {
        let mut rng = Rng::new(31 + number as u64);
        let crash = CrashStorage::holding(&*made(driver, options));
        let done = record(&open(crash.clone(), true), &crash, &mut rng);
        let last = done.last().unwrap().end;
        crash.for_each_crash(|ops, image| {
            if ops > last || ops % 3 != 0 {
                return;
            }
            let durable = done.iter().rposition(|d| d.flushed && d.end <= ops).unwrap_or(0);
            let may: Vec<&Done> = done[durable..].iter().filter(|d| d.begin <= ops).collect();
            for survivor in [image.only_durable(), image.everything(), image.survivor(&mut rng)] {
                let disk = open(Arc::new(survivor.read_only()), false);
                let mut found = vec![0; BYTES];
                disk.read_at(&mut found, GuestOffset(0)).unwrap();
                for (sector, found) in found.chunks(512).enumerate() {
                    let range = sector * 512..sector * 512 + 512;
                    assert!(
                        may.iter().any(|d| d.guest[range.clone()] == *found),
                        "{options}: sector {sector} after {ops} steps is none of the {} it may be",
                        may.len()
                    );
                }
            }
        });
    }
}
