//! Tests of [`crate::changes`], apart from it, since its model includes that file.

use std::ops::Range;

use crate::changes::{ChangeMap, REGION_BYTES_MIN};

const REGION: u64 = REGION_BYTES_MIN;

fn all(map: &ChangeMap, len: u64) -> Vec<Range<u64>> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(run) = map.take(at, len) {
        at = run.end;
        found.push(run);
    }
    found
}

#[test]
fn what_was_marked_is_taken_once() {
    let map = ChangeMap::new(200 * REGION + 5);
    map.mark(3, 1);
    map.mark(REGION - 1, 2);
    map.mark(60 * REGION, 70 * REGION);
    map.mark(200 * REGION, u64::MAX);
    assert_eq!(map.marked_bytes(), 73 * REGION);
    let expected = [
        0..2 * REGION,
        60 * REGION..100 * REGION,
        100 * REGION..130 * REGION,
        200 * REGION..200 * REGION + 5,
    ];
    assert_eq!(all(&map, 40 * REGION), expected);
    assert_eq!(map.marked_bytes(), 0);
    assert_eq!(all(&map, 40 * REGION), []);
}

#[test]
fn nothing_past_the_end_is_marked() {
    let map = ChangeMap::new(REGION);
    map.mark(REGION, 1);
    map.mark(u64::MAX, u64::MAX);
    map.mark(0, 0);
    assert_eq!(all(&map, REGION), []);
    assert_eq!(all(&ChangeMap::new(0), 1), []);
}

#[test]
fn a_huge_disk_has_coarser_marks() {
    let map = ChangeMap::new(1 << 60);
    map.mark((1 << 60) - 1, 1);
    // 16 MiB of marks.
    assert_eq!(map.marked_bytes(), (1 << 60) / (16 << 20) / 8);
    assert_eq!(all(&map, u64::MAX).len(), 1);
}

#[test]
fn a_disk_that_grows_keeps_its_marks_and_gets_room_for_more() {
    let map = ChangeMap::new(3 * REGION + 5);
    map.mark(REGION, 1);
    map.mark(3 * REGION, 5);
    map.grow(200 * REGION);
    map.mark(199 * REGION, 7);
    assert_eq!(map.marked_bytes(), 3 * REGION);
    let expected = [REGION..2 * REGION, 3 * REGION..4 * REGION, 199 * REGION..200 * REGION];
    assert_eq!(all(&map, REGION), expected);
    // Regions are larger now.
    map.mark(70 * REGION, 1);
    map.grow(1 << 60);
    let found = all(&map, REGION);
    assert!(found.len() == 1 && found[0].contains(&(70 * REGION)), "{found:?}");
    assert_eq!(map.marked_bytes(), 0);
}

#[test]
fn the_count_is_right_when_threads_meet() {
    let map = ChangeMap::new(64 * REGION);
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let map = &map;
            scope.spawn(move || {
                for round in 0..20_000_u64 {
                    match thread {
                        0 => drop(map.take(round % 64 * REGION, 5 * REGION)),
                        _ => map.mark(round * 7 % 64 * REGION, 9 * REGION),
                    }
                }
            });
        }
    });
    let marked = map.marked_bytes();
    assert_eq!(all(&map, REGION).len() as u64 * REGION, marked);
    assert_eq!(map.marked_bytes(), 0);
}
