//! The common trials of writable formats.

use vdkit_testbase::FaultKind;
use vdkit_testbase::trials::Trial;
use vdkit_vdi::VdiDriver;

const DYNAMIC: Trial =
    Trial { write_bytes_max: 3 << 20, ..Trial::new(&VdiDriver, "", (7 << 20) + 512 * 9) };
const STATIC: Trial = Trial { options: "static=on", ..DYNAMIC };

#[test]
fn random_operations_equal_the_model() {
    for seed in 1..=12 {
        DYNAMIC.model(seed, 60);
        STATIC.model(seed, 60);
    }
}

#[test]
fn a_power_cut_leaves_a_sound_image_and_what_was_flushed() {
    for seed in 1..=8 {
        Trial { write_bytes_max: 64 << 10, ..DYNAMIC }.power_cut(seed, 25);
        Trial { write_bytes_max: 64 << 10, ..STATIC }.power_cut(seed, 25);
    }
}

#[test]
fn any_call_may_fail() {
    let small = Trial { guest_bytes: 4 << 20, write_bytes_max: 1 << 20, ..DYNAMIC };
    small.faults(&FaultKind::CHANGES, 25);
    small.faults(&[FaultKind::Read], 25);
}

#[test]
fn threads_write_to_the_same_blocks() {
    DYNAMIC.threads(4, 300);
}

#[test]
fn a_flush_after_many_allocations_costs_two_syncs() {
    let large = Trial { guest_bytes: 400 << 20, ..DYNAMIC };
    assert!(large.syncs_of_a_flush(300) <= 2);
    assert_eq!(STATIC.syncs_of_a_flush(5), 1);
}
