//! Resizes that require another cluster for the L1 table.

use vdkit_qcow2::Qcow2Driver;
use vdkit_testbase::FaultKind;
use vdkit_testbase::trials::{Resizes, Trial};
use vdkit_testbase::units::{GIB, KIB, MIB, TIB};

const fn trial(options: &'static str, guest_bytes: u64) -> Trial {
    Trial { driver: &Qcow2Driver, options, guest_bytes, write_bytes_max: MIB, resizes: true }
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
fn a_resize_may_fail_at_any_call() {
    ALL.iter().for_each(|images| images.all_faults(&FaultKind::SPACE));
}

#[test]
fn a_power_cut_in_a_resize_leaves_one_of_both_sizes() {
    (3..).zip(&ALL).for_each(|(seed, images)| images.power_cut(seed));
}
