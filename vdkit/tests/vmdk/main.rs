//! VMDK by jobs and beside other formats: what QEMU and libvmdk make of it, backing chains, streams.
//! What the format does alone is in `formats/vmdk/tests`.
//!
//! Each run prints its seed on failure; `VDKIT_SEED` replays it and `VDKIT_CASES` multiplies
//! the number of cases.

mod foreign;
mod oracle;
mod parents;
mod stream;

use std::sync::Arc;

use vdkit::{CheckReport, OfflineImage, Repair, Storage};

/// Checks an image.
fn check(storage: &Arc<dyn Storage>) -> CheckReport {
    let driver = vdkit::format("vmdk").unwrap();
    driver.check(&OfflineImage::new(storage), Repair::Nothing).unwrap()
}

/// Checks an image: it must be sound.
fn audit(storage: &Arc<dyn Storage>, what: &str) {
    let report = check(storage);
    assert_eq!((report.corruptions, report.leaks), (0, 0), "{what}: {:#?}", report.findings);
}
