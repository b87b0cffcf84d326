//! Other sizes of the plainest image.

use vdkit_raw::RawDriver;
use vdkit_testkit::FaultKind;
use vdkit_testkit::trials::{Resizes, Trial};

const MIB: u64 = 1 << 20;

const RAW: Resizes<'_> = Resizes {
    trial: Trial {
        driver: &RawDriver,
        options: "",
        guest_bytes: MIB,
        write_bytes_max: MIB,
        resizes: true,
    },
    sizes: &[MIB + 512, 5 * MIB, 70 * 1024 + 512, 1 << 40, 3 * MIB],
    ordered: false,
};

#[test]
fn other_sizes_equal_the_model_live_and_offline() {
    RAW.model(true);
    RAW.model(false);
}

#[test]
fn a_resize_may_fail_at_any_call() {
    RAW.faults(&FaultKind::CHANGES, false, false);
    RAW.faults(&[FaultKind::SetLen, FaultKind::Allocate], true, true);
}
