//! Many clients on one disk, with power cuts and failing storage calls.
//!
//! Each run prints its seed on failure; `VDKIT_SEED` replays it and `VDKIT_CASES` multiplies
//! the number of cases. Thread timing varies, so a failing seed may need several attempts.

mod commit;
mod endurance;
mod faults;
mod power_cut;
mod volatile;

use vdkit_testkit::concurrent::clients::Mix;
use vdkit_testkit::concurrent::history::WRITES;
use vdkit_testkit::concurrent::shape::{SHAPES, Shape};
use vdkit_testkit::concurrent::{CACHES, Plan};

/// A plan with `calls` calls of all clients together; clients, cache mode and mix follow from the
/// seed and the shape.
fn plan(shape: Shape, calls: u64, seed: u64) -> Plan {
    let place = SHAPES.iter().position(|other| other.name == shape.name).unwrap_or(0);
    let lot = seed as usize + place;
    let clients = [2, 8, 4, 16][lot / 4 % 4];
    Plan {
        shape,
        cache: CACHES[lot % 4],
        clients,
        calls: calls.div_ceil(clients),
        mix: if lot / 16 % 4 == 3 { Mix::WRITES } else { Mix::ALL },
        chores: Default::default(),
        faults: false,
        first_write: WRITES,
        seed,
    }
}
