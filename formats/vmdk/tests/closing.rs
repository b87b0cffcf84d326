//! Closing an image, and its state after a failed close.

use std::sync::Arc;

use vdkit_block::{FormatDriver, GuestOffset, Limits, OpenRequest, Storage};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{FaultKind, FaultPlan, FaultyStorage, create_image};
use vdkit_vmdk::VmdkDriver;

/// The file could not be truncated, so the bytes of an abandoned write remain after its last grain.
#[test]
fn space_behind_the_end_is_not_taken_for_fresh_after_a_close_that_failed() {
    let faulty = FaultyStorage::new(Arc::new(MemoryStorage::new("image")));
    let storage: Arc<dyn Storage> = faulty.clone();
    let (files, limits) = (Vec::new(), Limits::default());
    create_image(&VmdkDriver, storage.clone(), 16 << 20, "");
    let request = OpenRequest { storage: storage.clone(), files, writable: true, limits };
    let format = VmdkDriver.open(request).unwrap();
    let reservation = format.reserve(GuestOffset(0), 65536).unwrap().unwrap();
    storage.write_at(&[7; 65536], reservation.host).unwrap();
    drop(reservation);
    faulty.arm(FaultPlan::nth(&[FaultKind::SetLen], 0));
    format.close().unwrap_err();
    assert_eq!(faulty.fired(), 1);
    faulty.heal();
    let again = format.reserve(GuestOffset(0), 65536).unwrap().unwrap();
    let mut bytes = vec![9; 65536];
    storage.read_padded(&mut bytes, again.host).unwrap();
    assert!(!again.zeroed || bytes.iter().all(|byte| *byte == 0), "zeroes were promised");
    again.publish().unwrap();
    format.close().unwrap();
}
