//! Resizes that require another cluster for the L1 table.

use std::sync::Arc;

use vdkit_block::{
    BackingRef, CreateRequest, Creation, FormatDriver, GuestOffset, HostOffset, ImageInfo, Limits,
    OpenRequest, Options, Storage,
};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_qcow2::Qcow2Driver;
use vdkit_storage::MemoryStorage;
use vdkit_testbase::trials::{Resizes, Trial};
use vdkit_testbase::units::{GIB, KIB, MIB, TIB};
use vdkit_testbase::{FaultKind, FaultPlan, FaultyStorage, GatedStorage, assert_sound};

const fn trial(options: &'static str, guest_bytes: u64) -> Trial {
    Trial::new(&Qcow2Driver, options, guest_bytes)
}

/// An L1 table cluster has 64 entries of 32 KiB each.
const SMALL: Resizes<'_> = Resizes::new(
    trial("cluster_size=512", MIB),
    &[2 * MIB, 2 * MIB + 512, 5 * MIB, 600 * KIB + 512, 9 * MIB],
);
/// An L1 table cluster has 8192 entries of 512 MiB each.
const LARGE: Resizes<'_> =
    Resizes::new(trial("", TIB), &[4 * TIB, 4 * TIB + 1024, 3 * GIB + 512, 9 * TIB]);
const EXTENDED: Resizes<'_> = Resizes::new(
    trial("extended_l2=on,cluster_size=16K", MIB),
    &[300 * MIB, 33 * GIB, 700 * KIB + 512, 70 * GIB],
);
/// In a partly written cluster, unwritten bytes decrypt to noise.
const ENCRYPTED: Resizes<'_> = Resizes::new(
    trial("encrypt.format=luks,encrypt.iter-time=0,cluster_size=4K", MIB),
    &[300 * MIB, 33 * GIB, 700 * KIB + 512, 70 * GIB],
);
const ALL: [Resizes<'_>; 4] = [SMALL, LARGE, EXTENDED, ENCRYPTED];

#[test]
fn other_sizes_equal_the_model_live_and_offline() {
    ALL.iter().for_each(Resizes::models);
}

#[test]
fn a_size_that_no_disk_has_is_refused_with_the_file_and_the_limit() {
    let storage: Arc<dyn Storage> = Arc::new(SMALL.trial.image());
    let disk = SMALL.trial.open(&storage, true).unwrap();
    for size in [i64::MAX as u64 - 511, i64::MAX as u64, u64::MAX] {
        let text = disk.resize(size).unwrap_err().to_string();
        for part in [storage.name(), &size.to_string(), "limit of 9223372036854775295"] {
            assert!(text.contains(part), "{text}: {part}");
        }
    }
    assert_eq!(disk.guest_bytes(), MIB);
}

#[test]
fn requests_beside_resizes_lose_nothing() {
    (1..).zip(&ALL).for_each(|(seed, images)| images.beside_requests(2, seed));
}

#[test]
fn a_resize_may_fail_at_any_call() {
    ALL.iter().for_each(|images| images.all_faults(&FaultKind::SPACE));
}

#[test]
fn a_power_cut_in_a_resize_leaves_one_of_both_sizes() {
    (3..).zip(&ALL).for_each(|(seed, images)| images.power_cut(seed));
}

/// Unallocated clusters of a data file hold any bytes, such as those of a disk that was larger once. A
/// write that allocates the last cluster while the disk grows must fill it up to the new end, also
/// when it ends after the resize.
#[test]
fn a_write_beside_a_growth_shows_no_old_bytes_of_the_data_file() {
    const LAST: u64 = 128 * KIB;
    const OLD: u64 = 132 * KIB;
    const NEW: u64 = 192 * KIB;
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("a.qcow2"));
    // It is shorter than the new size, so that growing the disk changes its length.
    let data: Arc<dyn Storage> = Arc::new(MemoryStorage::from_bytes("a.data", &[0xee; 160 << 10]));
    let options = ["cluster_size=64K,data_file=a.data"];
    let options = Options::parse("qcow2", Qcow2Driver.options(), options).unwrap();
    let made: Arc<dyn Storage> = Arc::new(MemoryStorage::new("made.data"));
    let request = CreateRequest {
        storage: storage.clone(),
        files: vec![made],
        guest_bytes: OLD,
        options,
        backing: None,
        backing_bytes: None,
    };
    Qcow2Driver.creation().unwrap().create(&request).unwrap();
    // One gate for the growth, one for the data of the write.
    let writes = GatedStorage::new(data);
    let growth = GatedStorage::new(writes.clone());
    let files: Vec<Arc<dyn Storage>> = vec![growth.clone()];
    let limits = Limits::default();
    let image = Qcow2Driver.open(OpenRequest { storage, files, writable: true, limits }).unwrap();
    let disk = Disk::from_format(image, ImageInfo::new("qcow2", OLD), &OpenOptions::read_write());
    growth.hold(|call| call.kind == FaultKind::SetLen && !call.done);
    writes.hold(|call| call.kind == FaultKind::Write && call.offset == LAST && !call.done);
    std::thread::scope(|scope| {
        let grown = scope.spawn(|| disk.resize(NEW));
        growth.reached();
        let written = scope.spawn(|| disk.write_at(&[7; 512], GuestOffset(LAST)));
        writes.reached();
        growth.release();
        grown.join().unwrap().unwrap();
        writes.release();
        written.join().unwrap().unwrap();
    });
    let mut bytes = vec![0xff; (NEW - LAST) as usize];
    disk.read_at(&mut bytes, GuestOffset(LAST)).unwrap();
    assert!(bytes[..512].iter().all(|&byte| byte == 7));
    assert!(bytes[512..].iter().all(|&byte| byte == 0), "old bytes of the data file are shown");
    disk.close().unwrap();
}

/// A raw data file is the disk for programs that do not know qcow2. What it has behind the disk's end,
/// on a device or since a cut shrink, is not a part of the disk when that grows.
#[test]
fn a_raw_data_file_stays_the_disk_when_the_disk_grows() {
    for fixed in [true, false] {
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("a.qcow2"));
        let memory = MemoryStorage::with_len("a.data", MIB);
        let data = Arc::new(if fixed { memory.fixed_len() } else { memory });
        let faulty = FaultyStorage::new(data.clone());
        let options = ["cluster_size=64K,data_file=a.data,data_file_raw=on"];
        let request = CreateRequest {
            storage: storage.clone(),
            files: vec![data.clone()],
            guest_bytes: MIB,
            options: Options::parse("qcow2", Qcow2Driver.options(), options).unwrap(),
            backing: None,
            backing_bytes: None,
        };
        Qcow2Driver.creation().unwrap().create(&request).unwrap();
        let files: Vec<Arc<dyn Storage>> = vec![faulty.clone()];
        let limits = Limits::default();
        let request = OpenRequest { storage, files, writable: true, limits };
        let image = Qcow2Driver.open(request).unwrap();
        let info = ImageInfo::new("qcow2", MIB);
        let disk = Disk::from_format(image, info, &OpenOptions::read_write());
        let agree = |size: u64, what: &str| {
            let mut bytes = vec![0xff; size as usize];
            disk.read_at(&mut bytes, GuestOffset(0)).unwrap();
            assert!(data.to_vec()[..size as usize] == bytes, "fixed: {fixed}, {what}");
        };
        disk.write_at(&[0xbb; MIB as usize], GuestOffset(0)).unwrap();
        disk.resize(200 * KIB).unwrap();
        agree(200 * KIB, "smaller");
        if !fixed {
            // As after a power cut in the shrink, before the file is cut.
            data.write_at(&[0xcc; 300 << 10], HostOffset(200 * KIB)).unwrap();
        }
        // On a full disk it does not grow, and shows nothing of the old bytes.
        faulty.arm(FaultPlan::nth(&[FaultKind::Zero], 0).no_space());
        assert!(disk.resize(400 * KIB).is_err());
        assert_eq!((disk.guest_bytes(), faulty.fired()), (200 * KIB, 1));
        agree(200 * KIB, "not grown");
        faulty.heal();
        disk.resize(400 * KIB).unwrap();
        agree(400 * KIB, "grown");
        disk.resize(MIB).unwrap();
        agree(MIB, "as large as before");
        disk.close().unwrap();
    }
}

/// Version 2 has no zero flags: a growth over a larger backing image writes clusters of zeroes. If
/// that fails, the clusters written so far and the next one are free again.
#[test]
fn zero_clusters_of_a_growth_that_failed_are_no_leak() {
    const NEW: u64 = MIB;
    let mut failed = 0;
    for nth in 0.. {
        let faulty = FaultyStorage::new(Arc::new(MemoryStorage::new("a.qcow2")));
        let storage: Arc<dyn Storage> = faulty.clone();
        let text = ["cluster_size=512,compat=0.10"];
        let request = CreateRequest {
            storage: storage.clone(),
            files: Vec::new(),
            guest_bytes: 64 * KIB,
            options: Options::parse("qcow2", Qcow2Driver.options(), text).unwrap(),
            backing: Some(BackingRef::new("base.raw", Some("raw".into()))),
            backing_bytes: Some(NEW),
        };
        Qcow2Driver.create(&request).unwrap();
        let (files, limits) = (Vec::new(), Limits::default());
        let request = OpenRequest { storage: storage.clone(), files, writable: true, limits };
        let image = Qcow2Driver.open(request).unwrap();
        faulty.arm(FaultPlan::nth(&FaultKind::ALL, nth));
        let grown = image.resize_over(NEW, NEW);
        faulty.heal();
        if grown.is_ok() && faulty.fired() == 0 {
            break;
        }
        failed += u64::from(grown.is_err());
        image.close().unwrap_or_else(|error| panic!("fault {nth}: {error}"));
        assert_sound(&Qcow2Driver, &storage, false, &format!("fault {nth}: {grown:?}"));
    }
    assert!(failed > 10, "{failed}");
}
