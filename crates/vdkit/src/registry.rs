//! The one list of formats.

use vdkit_block::{FormatDriver, Result};
use vdkit_chain::Registry;
use vdkit_qcow2::Qcow2Driver;
use vdkit_raw::RawDriver;

/// Every format that this build knows.
pub static FORMATS: &[&dyn FormatDriver] = &[&RawDriver, &Qcow2Driver];

/// A registry of every format.
pub fn registry() -> Registry {
    Registry::new(FORMATS.iter().copied())
}

/// The driver of a format that a user named.
///
/// # Errors
/// [`vdkit_block::Error::Invalid`] for an unknown name, listing the known ones.
pub fn format(name: &str) -> Result<&'static dyn FormatDriver> {
    registry().driver(name)
}
