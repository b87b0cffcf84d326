//! Resizing raw images.

use vdkit_raw::RawDriver;
use vdkit_testbase::FaultKind;
use vdkit_testbase::trials::{Resizes, Trial};
use vdkit_testbase::units::{KIB, MIB, TIB};

const TRIAL: Trial = Trial::new(&RawDriver, "", MIB);
const RAW: Resizes<'_> = Resizes::new(TRIAL, &[MIB + 512, 5 * MIB, 70 * KIB + 512, TIB, 3 * MIB]);

#[test]
fn other_sizes_equal_the_model_live_and_offline() {
    RAW.models();
}

#[test]
fn requests_beside_resizes_lose_nothing() {
    RAW.beside_requests(8, 1);
}

#[test]
fn a_file_is_cut_when_requests_beyond_have_ended() {
    Resizes { sizes: &[70 * KIB], ..RAW }.waits_for_a_write();
}

#[test]
fn a_resize_may_fail_at_any_call() {
    RAW.all_faults(&[FaultKind::SetLen, FaultKind::Allocate]);
}

#[test]
fn a_power_cut_in_a_resize_leaves_one_of_both_sizes() {
    RAW.power_cut(3);
}
