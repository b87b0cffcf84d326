use vdkit_block::Error;

use super::*;
use vdkit_raw::RawDriver;
use vdkit_testbase::{disk_of, noise};

const MIB: u64 = 1 << 20;

fn run(a: &Disk, b: &Disk, strict: bool) -> CompareReport {
    let threads = [1, 2, 5].map(|threads| {
        let options = CompareOptions { strict, threads: Some(threads) };
        compare(a, b, &options, &Monitor::default()).unwrap()
    });
    let answer = |r: &CompareReport| (r.identical, r.first_difference, r.sizes_differ);
    assert!(threads.iter().all(|r| answer(r) == answer(&threads[0])));
    threads[0].clone()
}

#[test]
fn equal_disks_are_equal_and_holes_are_not_read() {
    let data = noise(1, 300_000);
    let a = disk_of(&RawDriver, 40 * MIB, &[(MIB, &data), (30 * MIB, &data)]);
    // The same bytes, with some zeroes written.
    let b =
        disk_of(&RawDriver, 40 * MIB, &[(MIB, &data), (30 * MIB, &data), (5 * MIB, &[0; 8192])]);
    let report = run(&a, &b, true);
    assert!(report.identical && report.first_difference.is_none());
    assert!(report.read_bytes < MIB, "{report:?}");
    assert_eq!(report.read_bytes + report.skipped_bytes, 40 * MIB);
}

#[test]
fn the_first_difference_is_found_wherever_it_is() {
    let data = noise(2, 9 * MIB as usize);
    let a = disk_of(&RawDriver, 10 * MIB, &[(0, &data)]);
    for at in [0, 1, 4095, 4096, 262_143, 262_144, 5 * MIB + 77, 9 * MIB - 1, 9 * MIB, 10 * MIB - 1]
    {
        let mut other = data.clone();
        other.resize(10 * MIB as usize, 0);
        // A second difference after it changes nothing.
        for byte in [at, at + 3 * MIB] {
            if let Some(byte) = other.get_mut(byte as usize) {
                *byte ^= 0x40;
            }
        }
        let b = disk_of(&RawDriver, 10 * MIB, &[(0, &other)]);
        for report in [run(&a, &b, false), run(&b, &a, false)] {
            assert_eq!((report.identical, report.first_difference), (false, Some(at)));
        }
    }
}

#[test]
fn a_longer_disk_is_equal_where_its_tail_is_zero() {
    let data = noise(3, 5000);
    let short = disk_of(&RawDriver, MIB, &[(100, &data)]);
    let zero_tail = disk_of(&RawDriver, 3 * MIB, &[(100, &data), (2 * MIB, &[0; 4096])]);
    let other_tail = disk_of(&RawDriver, 3 * MIB, &[(100, &data), (2 * MIB + 9, &[1])]);
    let report = run(&short, &zero_tail, false);
    assert!(report.identical && report.sizes_differ);
    assert!(!run(&zero_tail, &short, true).identical);
    assert_eq!(run(&short, &other_tail, false).first_difference, Some(2 * MIB + 9));
    assert_eq!(run(&other_tail, &short, false).first_difference, Some(2 * MIB + 9));
    assert_eq!(run(&other_tail, &short, true).first_difference, None);
}

#[test]
fn the_same_file_is_not_read() {
    let a = disk_of(&RawDriver, 4 * MIB, &[(0, &noise(4, 4 * MIB as usize))]);
    let report = run(&a, &a, false);
    assert!(report.identical);
    assert_eq!((report.read_bytes, report.skipped_bytes), (0, 4 * MIB));
}

#[test]
fn empty_disks_are_equal() {
    assert!(run(&disk_of(&RawDriver, 0, &[]), &disk_of(&RawDriver, 0, &[]), true).identical);
    assert!(run(&disk_of(&RawDriver, 0, &[]), &disk_of(&RawDriver, 512, &[]), false).identical);
}

#[test]
fn a_cancelled_comparison_ends() {
    let a = disk_of(&RawDriver, MIB, &[(0, &noise(5, 5000))]);
    let b = disk_of(&RawDriver, MIB, &[]);
    let monitor = Monitor::default();
    monitor.cancel.cancel();
    let result = compare(&a, &b, &CompareOptions::default(), &monitor);
    assert!(matches!(result, Err(Error::Interrupted)));
}
