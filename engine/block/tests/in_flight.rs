//! Grace periods, step by step. `tests/models` of `vdkit-meta` covers every interleaving.

use vdkit_block::InFlight;

#[test]
fn a_request_that_was_in_flight_holds_back_the_grace_period() {
    let flights = InFlight::default();
    let guard = flights.enter();
    let stamp = flights.stamp();
    for _ in 0..10 {
        assert!(!flights.passed(stamp));
    }
    // Later requests do not end it.
    drop(flights.enter());
    assert!(!flights.passed(stamp));
    drop(guard);
    assert!(flights.passed(stamp));
}

#[test]
fn later_requests_do_not_hold_it_back_forever() {
    let flights = InFlight::default();
    let old = flights.enter();
    let stamp = flights.stamp();
    assert!(!flights.passed(stamp));
    let newer = flights.enter();
    drop(old);
    // `newer` entered after the stamp; at worst it delays the grace period.
    let _ = flights.passed(stamp);
    drop(newer);
    assert!(flights.passed(stamp));
}

#[test]
fn nothing_in_flight_passes_at_once() {
    let flights = InFlight::default();
    let stamp = flights.stamp();
    assert!(flights.passed(stamp));
}
