//! Resizing a container, whose disk size is given only by the file's length.

use vdkit_luks::LuksDriver;
use vdkit_testbase::FaultKind;
use vdkit_testbase::trials::{Cut, Resizes, Trial};
use vdkit_testbase::units::{KIB, MIB};

const TRIAL: Trial = Trial::new(&LuksDriver, "iter-time=0,preallocation=full", MIB);
/// Unwritten space is noise, so growing writes zeroes, in steps of 8 MiB.
const CONTAINER: Resizes<'_> =
    Resizes { cut: Cut::All, ..Resizes::new(TRIAL, &[9 * MIB + 512, 70 * KIB + 512, 3 * MIB]) };

#[test]
fn other_sizes_equal_the_model_live_and_offline() {
    CONTAINER.models();
}

#[test]
fn requests_beside_resizes_lose_nothing() {
    CONTAINER.beside_requests(4, 1);
}

#[test]
fn a_file_is_cut_when_requests_beyond_have_ended() {
    Resizes { sizes: &[70 * KIB], ..CONTAINER }.waits_for_a_write();
}

#[test]
fn a_resize_may_fail_at_any_call() {
    CONTAINER.all_faults(&FaultKind::SPACE[..3]);
}

#[test]
fn a_power_cut_in_a_resize_leaves_one_of_both_sizes() {
    CONTAINER.power_cut(3);
}
