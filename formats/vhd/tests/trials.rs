//! The common trials of writable formats.

use vdkit_testbase::FaultKind;
use vdkit_testbase::trials::Trial;
use vdkit_vhd::VhdDriver;

const DYNAMIC: Trial =
    Trial { write_bytes_max: 3 << 20, ..Trial::new(&VhdDriver, "", (15 << 20) + 512 * 9) };
const FIXED: Trial = Trial { options: "subformat=fixed", guest_bytes: 3 << 20, ..DYNAMIC };

#[test]
fn random_operations_equal_the_model() {
    for seed in 1..=12 {
        DYNAMIC.model(seed, 60);
        FIXED.model(seed, 60);
    }
}

#[test]
fn a_power_cut_leaves_a_sound_image_and_what_was_flushed() {
    for seed in 1..=8 {
        Trial { write_bytes_max: 64 << 10, ..DYNAMIC }.power_cut(seed, 25);
        Trial { write_bytes_max: 64 << 10, ..FIXED }.power_cut(seed, 25);
    }
}

#[test]
fn any_call_may_fail() {
    let small = Trial { guest_bytes: 8 << 20, write_bytes_max: 1 << 20, ..DYNAMIC };
    small.faults(&FaultKind::CHANGES, 25);
    small.faults(&[FaultKind::Read], 25);
    FIXED.faults(&FaultKind::CHANGES, 25);
}

#[test]
fn threads_write_to_the_same_blocks() {
    DYNAMIC.threads(4, 300);
    FIXED.threads(4, 300);
}

#[test]
fn a_flush_after_many_allocations_costs_two_syncs() {
    let large = Trial { guest_bytes: 800 << 20, ..DYNAMIC };
    assert!(large.syncs_of_a_flush(300) <= 2);
    assert_eq!(FIXED.syncs_of_a_flush(5), 1);
}
