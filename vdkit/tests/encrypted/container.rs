//! Raw LUKS containers under power cuts, with faults at each I/O, and growing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vdkit::{
    CancelToken, CreateRequest, Disk, Error, GuestOffset, ImageInfo, Limits, Monitor, OpenOptions,
    OpenRequest, Options, Progress, Result, Storage, jobs,
};
use vdkit_testkit::{CrashStorage, FaultKind, FaultPlan, FaultyStorage, Rng};

use crate::kinds::key;

const BYTES: u64 = 96 << 10;
const SECTOR: usize = 512;

fn made(cipher: &str) -> Arc<dyn Storage> {
    let driver = vdkit::format("luks").unwrap();
    let storage: Arc<dyn Storage> = Arc::new(vdkit::storage::MemoryStorage::with_len("image", 0));
    let text = format!("iter-time=0,preallocation=full,{cipher}");
    let mut options = Options::parse("luks", driver.options(), [text.as_str()]).unwrap();
    options.set_key(Some(key()));
    let request = CreateRequest {
        storage: storage.clone(),
        files: Vec::new(),
        guest_bytes: BYTES,
        options,
        backing: None,
        backing_bytes: None,
    };
    driver.create(&request).unwrap();
    storage
}

fn open(storage: Arc<dyn Storage>, writable: bool) -> Result<Disk> {
    let driver = vdkit::format("luks").unwrap();
    let request = OpenRequest { storage, files: Vec::new(), writable, limits: Limits::default() };
    let format = driver.open_with_keys(request, &[key()])?;
    let info = ImageInfo::new(format.name(), format.guest_bytes());
    Ok(Disk::from_format(format, info, &OpenOptions::default().writable(writable)))
}

fn read(disk: &Disk) -> Vec<u8> {
    let mut bytes = vec![0; disk.guest_bytes() as usize];
    disk.read_at(&mut bytes, GuestOffset(0)).unwrap();
    bytes
}

const CIPHERS: [&str; 2] =
    ["cipher-alg=aes-128", "cipher-alg=aes-256,cipher-mode=cbc,ivgen-alg=essiv"];

/// A random write or zeroing, applied to disk and model.
fn change(disk: &Disk, model: &mut [u8], rng: &mut Rng) -> Result<()> {
    let at = rng.below(BYTES - 1) as usize;
    let most = [30, 700, 20_000][rng.below(3) as usize];
    let mut range = at..(at + 1 + rng.below(most) as usize).min(BYTES as usize);
    if rng.chance(1, 3) {
        range = at / SECTOR * SECTOR..range.end.next_multiple_of(SECTOR);
    }
    let here = GuestOffset(range.start as u64);
    if rng.chance(1, 4) {
        model[range.clone()].fill(0);
        return disk.write_zeroes(here, range.len() as u64, rng.chance(1, 2));
    }
    rng.fill(&mut model[range.clone()]);
    disk.write_at(&model[range], here)
}

#[test]
fn after_a_power_cut_each_sector_is_old_or_new() {
    for (number, cipher) in CIPHERS.into_iter().enumerate() {
        let mut rng = Rng::from_env(91 + number as u64);
        let crash = CrashStorage::holding(&*made(cipher));
        let disk = open(crash.clone(), true).unwrap();
        let mut model = read(&disk);
        assert!(model.iter().all(|b| *b == 0));
        // The guest's content after each change: start, end, whether it is durable from then on.
        let mut done = vec![(0, 0, true, model.clone())];
        for _ in 0..40 {
            let begin = crash.ops();
            let flush = rng.chance(1, 5);
            if flush {
                disk.flush().unwrap();
            } else {
                change(&disk, &mut model, &mut rng).unwrap();
            }
            done.push((begin, crash.ops(), flush, model.clone()));
        }
        disk.close().unwrap();
        let last = done.last().unwrap().1;
        crash.for_each_crash(|ops, image| {
            if ops > last {
                return;
            }
            let durable = done.iter().rposition(|(_, end, flush, _)| *flush && *end <= ops);
            let may: Vec<_> =
                done[durable.unwrap_or(0)..].iter().filter(|(begin, ..)| *begin <= ops).collect();
            for survivor in [image.only_durable(), image.everything(), image.survivor(&mut rng)] {
                let disk = open(Arc::new(survivor.read_only()), false).unwrap();
                for (sector, found) in read(&disk).chunks(SECTOR).enumerate() {
                    let range = sector * SECTOR..(sector + 1) * SECTOR;
                    let known = may.iter().any(|(.., guest)| guest[range.clone()] == *found);
                    assert!(known, "{cipher}: sector {sector} after {ops} steps is noise");
                }
            }
        });
    }
}

#[test]
fn a_failed_request_changes_nothing_but_its_range_and_works_later() {
    let kinds = [&[FaultKind::Read][..], &[FaultKind::Write], &[FaultKind::Sync]];
    for cipher in CIPHERS {
        for kinds in kinds {
            for nth in 0.. {
                let mut rng = Rng::new(5);
                let faulty = FaultyStorage::new(made(cipher));
                let disk = open(faulty.clone(), true).unwrap();
                let mut model = read(&disk);
                faulty.arm(FaultPlan::nth(kinds, nth).torn(3));
                for step in 0..12 {
                    let (before, again) = (model.clone(), rng.clone());
                    let result = match step % 4 {
                        3 => disk.flush(),
                        _ => change(&disk, &mut model, &mut rng),
                    };
                    if let Err(error) = result {
                        assert!(error.to_string().contains("image"), "{error}");
                        faulty.heal();
                        let found = read(&disk);
                        for (at, found) in found.iter().enumerate() {
                            let fine = *found == before[at] || *found == model[at];
                            assert!(fine, "{cipher}, {kinds:?} {nth}: byte {at} is noise");
                        }
                        (model, rng) = (before, again);
                        match step % 4 {
                            3 => disk.flush().unwrap(),
                            _ => change(&disk, &mut model, &mut rng).unwrap(),
                        }
                    }
                }
                let fired = faulty.fired() > 0;
                faulty.heal();
                disk.close().unwrap();
                assert!(read(&open(faulty.inner().clone(), false).unwrap()) == model);
                if !fired {
                    assert!(nth > 2, "{kinds:?} are {nth}");
                    break;
                }
            }
        }
    }
}

/// Cancels a job after this progress.
struct CancelAt {
    bytes: u64,
    cancel: CancelToken,
    most: AtomicU64,
}

impl Progress for CancelAt {
    fn update(&self, done: u64, total: u64) {
        assert!(done <= total);
        self.most.fetch_max(done, Ordering::Relaxed);
        if done >= self.bytes {
            self.cancel.cancel();
        }
    }

    fn message(&self, _text: &str) {}
}

#[test]
fn growing_tells_how_far_it_is_and_can_be_cancelled() {
    let storage = made(CIPHERS[0]);
    let disk = open(storage.clone(), true).unwrap();
    disk.write_at(&[7; BYTES as usize], GuestOffset(0)).unwrap();
    let len = storage.len().unwrap();
    let grow = |bytes: u64, cancel_at: u64| {
        let cancel = CancelToken::default();
        let progress =
            CancelAt { bytes: cancel_at, cancel: cancel.clone(), most: AtomicU64::new(0) };
        let monitor = Monitor::new(&progress).cancelled_by(cancel);
        let grown = jobs::resize(&disk, bytes, &jobs::ResizeOptions::default(), &monitor);
        (grown, progress.most.load(Ordering::Relaxed))
    };
    let (grown, most) = grow(64 << 20, 16 << 20);
    assert!(matches!(grown, Err(Error::Interrupted)), "{grown:?}");
    assert_eq!((most, disk.guest_bytes(), storage.len().unwrap()), (16 << 20, BYTES, len));
    assert!(read(&disk).iter().all(|b| *b == 7));
    let (grown, most) = grow(32 << 20, u64::MAX);
    grown.unwrap();
    assert_eq!((most, disk.guest_bytes()), ((32 << 20) - BYTES, 32 << 20));
    let found = read(&disk);
    assert!(found[..BYTES as usize].iter().all(|b| *b == 7));
    assert!(found[BYTES as usize..].iter().all(|b| *b == 0));
}

/// Existing data stays, whatever happens to the new part.
#[test]
fn a_failure_while_growing_leaves_the_old_size() {
    for nth in 0.. {
        let faulty = FaultyStorage::new(made(CIPHERS[1]));
        let disk = open(faulty.clone(), true).unwrap();
        disk.write_at(&[7; BYTES as usize], GuestOffset(0)).unwrap();
        let (kinds, len) = ([FaultKind::SetLen, FaultKind::Write], faulty.len().unwrap());
        faulty.arm(FaultPlan::nth(&kinds, nth).no_space());
        let grown = disk.resize(20 << 20);
        let fired = faulty.fired() > 0;
        faulty.heal();
        assert_eq!(grown.is_err(), fired, "{nth}");
        if !fired {
            assert!(nth > 3);
            break;
        }
        assert_eq!((disk.guest_bytes(), faulty.len().unwrap()), (BYTES, len), "{nth}");
        disk.close().unwrap();
        let disk = open(faulty.inner().clone(), false).unwrap();
        assert!(read(&disk).iter().all(|b| *b == 7), "{nth}");
    }
}
