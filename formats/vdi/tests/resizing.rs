//! Resizes for which the table needs the places of the first blocks.

mod support;

use support::DYNAMIC;
use vdkit_testbase::FaultKind;
use vdkit_testbase::trials::{Resizes, Trial};
use vdkit_testbase::units::{GIB, MIB};

/// Entries that fit between the header and the first block.
const ROOM: u64 = (MIB - 512) / 4;

const TABLES: Resizes<'_> = Resizes::new(
    Trial { guest_bytes: 200 * GIB, ..DYNAMIC },
    &[ROOM * MIB, ROOM * MIB + 512, 600 * GIB, 3 * GIB + 1024, 520 * GIB],
);
const SMALL: Resizes<'_> =
    Resizes::new(DYNAMIC, &[12 * MIB + 512, 3 * MIB, 3 * MIB + 512, 20 * MIB, MIB]);
const STATIC: Resizes<'_> = Resizes { trial: Trial { options: "static=on", ..DYNAMIC }, ..SMALL };

#[test]
fn other_sizes_equal_the_model_live_and_offline() {
    [TABLES, SMALL, STATIC].iter().for_each(Resizes::models);
}

#[test]
fn requests_beside_resizes_lose_nothing() {
    SMALL.beside_requests(8, 1);
    STATIC.beside_requests(4, 2);
    TABLES.beside_requests(1, 3);
}

#[test]
fn a_resize_and_requests_wait_for_each_other() {
    let moved = Resizes { sizes: &[600 * GIB], ..TABLES };
    [SMALL, STATIC, moved].iter().for_each(Resizes::waits_for_a_write);
    Resizes { sizes: &[3 * MIB], ..SMALL }.waits_for_a_write();
    [SMALL, moved].iter().for_each(Resizes::waits_for_a_guard);
    SMALL.a_close_waits_for_a_write();
}

#[test]
fn a_resize_may_fail_at_any_call() {
    let large = Resizes { sizes: &[ROOM * MIB + 512, 3 * GIB], ..TABLES };
    [SMALL, STATIC, large].iter().for_each(|images| images.all_faults(&FaultKind::SPACE));
}

#[test]
fn a_power_cut_in_a_resize_leaves_one_of_both_sizes() {
    SMALL.power_cut(3);
    STATIC.power_cut(4);
    Resizes { sizes: &[ROOM * MIB + 512, 3 * GIB], ..TABLES }.power_cut(5);
}

/// The host disk becomes full after the first blocks have moved and the new table is in their
/// places: the cached table must not name these places.
#[test]
fn a_live_growth_without_space_leaves_no_table_bytes_to_the_guest() {
    TABLES.trial.growth_without_space(700 * GIB, &[3 * MIB + 1024]);
}
