//! Other sizes, where the L1 table needs another cluster.

use vdkit_qcow2::Qcow2Driver;
use vdkit_testkit::FaultKind;
use vdkit_testkit::trials::{Resizes, Trial};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;
const SPACE: [FaultKind; 4] =
    [FaultKind::Write, FaultKind::Zero, FaultKind::Allocate, FaultKind::SetLen];

/// A cluster of the L1 table has 64 entries for 32 KiB each.
const SMALL: Resizes<'_> = Resizes {
    trial: Trial {
        driver: &Qcow2Driver,
        options: "cluster_size=512",
        guest_bytes: MIB,
        write_bytes_max: MIB,
        resizes: true,
    },
    sizes: &[2 * MIB, 2 * MIB + 512, 5 * MIB, 600 * KIB + 512, 9 * MIB],
    ordered: false,
};
/// A cluster of the L1 table has 8192 entries for 512 MiB each.
const LARGE: Resizes<'_> = Resizes {
    trial: Trial { options: "", guest_bytes: TIB, ..SMALL.trial },
    sizes: &[4 * TIB, 4 * TIB + 1024, 3 * GIB + 512, 9 * TIB],
    ordered: false,
};
const EXTENDED: Resizes<'_> = Resizes {
    trial: Trial { options: "extended_l2=on,cluster_size=16K", ..SMALL.trial },
    sizes: &[300 * MIB, 33 * GIB, 700 * KIB + 512, 70 * GIB],
    ordered: false,
};

#[test]
fn other_sizes_equal_the_model_live_and_offline() {
    for images in [SMALL, LARGE, EXTENDED] {
        images.model(true);
        images.model(false);
    }
}

#[test]
fn a_resize_may_fail_at_any_call() {
    for images in [SMALL, LARGE, EXTENDED] {
        images.faults(&FaultKind::CHANGES, false, false);
        images.faults(&SPACE, true, true);
        images.faults(&[FaultKind::Read], false, false);
    }
}

#[test]
fn a_power_cut_in_a_resize_leaves_one_of_both_sizes() {
    SMALL.power_cut(3);
    LARGE.power_cut(4);
    EXTENDED.power_cut(5);
}
