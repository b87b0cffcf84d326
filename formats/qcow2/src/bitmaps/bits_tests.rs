//! Tests of [`super::bits`], apart from it, since its model includes that file.

use std::sync::Arc;

use vdkit_block::Result;

use super::bits::{Page, Tracker, Words};

fn tracker(bits: u64) -> Tracker {
    Tracker::new(1, true, 9, bits, 512)
}

fn empty(_: usize) -> Result<Page> {
    Ok(Page::Bits(Arc::new(Words::from_disk(&[0; 512]))))
}

fn words(tracker: &Tracker, page: usize) -> Vec<u64> {
    match tracker.loaded(page) {
        Some(Page::Bits(words)) => words.copy(),
        _ => panic!("not loaded"),
    }
}

#[test]
fn ranges_set_each_bit_that_they_touch() {
    let bitmap = tracker(10_000);
    assert!(bitmap.mark(511..513, empty).unwrap());
    assert_eq!(words(&bitmap, 0)[..2], [0b11, 0]);
    assert!(bitmap.mark(512 * 60..512 * 130, empty).unwrap());
    assert_eq!(words(&bitmap, 0)[..3], [0b11 | 0xf << 60, u64::MAX, 0b11]);
    // Across the end of a page of 4096 bits.
    assert!(bitmap.mark(512 * 4095..512 * 4097, empty).unwrap());
    assert_eq!((words(&bitmap, 0)[63], words(&bitmap, 1)[0]), (1 << 63, 1));
    assert_eq!(bitmap.take_dirty(), [0, 1]);
    assert!(bitmap.dirty_pages().is_empty());
    // Bits beyond the end do not exist.
    assert!(bitmap.mark(512 * 9_999..512 * 20_000, empty).unwrap());
    assert!(!bitmap.mark(512 * 10_000..512 * 20_000, empty).unwrap());
    assert_eq!(bitmap.take_dirty(), [2]);
}

#[test]
fn a_bit_is_written_until_it_is_settled_and_not_again() {
    let bitmap = tracker(100);
    assert!(bitmap.mark(0..1, empty).unwrap());
    assert_eq!(bitmap.take_dirty(), [0]);
    let copied = words(&bitmap, 0);
    // Not durable yet: a second mark must not rely on it.
    assert!(bitmap.mark(0..1, empty).unwrap());
    assert_eq!(bitmap.take_dirty(), [0]);
    bitmap.settle(0, &copied);
    assert!(!bitmap.mark(0..1, empty).unwrap());
    assert!(bitmap.take_dirty().is_empty());
    assert!(bitmap.mark(512..513, empty).unwrap());
}

#[test]
fn pages_of_ones_stay_as_they_are_and_resizing_keeps_what_is_marked() {
    let bitmap = tracker(5000);
    assert!(!bitmap.mark(0..512, |_| Ok(Page::Ones)).unwrap());
    assert!(bitmap.mark(512 * 4500..512 * 4501, empty).unwrap());
    let larger = bitmap.resized(9000);
    assert_eq!(larger.dirty_pages(), [1]);
    assert_eq!(words(&larger, 1)[404 / 64], 1 << (404 % 64));
    assert!(larger.loaded(0).is_none());
    assert!(larger.mark(512 * 8999..512 * 9000, empty).unwrap());
    assert!(bitmap.resized(100).dirty_pages().is_empty());
}
