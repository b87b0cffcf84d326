//! The one list of formats.

use vdkit_block::{Error, FormatDriver, Result};

/// Every format that this build knows, in the order in which headers are probed.
pub static FORMATS: &[&dyn FormatDriver] = &[];

/// The driver of this name.
///
/// # Errors
/// [`Error::Invalid`] for an unknown name, listing the known ones.
pub fn format(name: &str) -> Result<&'static dyn FormatDriver> {
    FORMATS.iter().copied().find(|driver| driver.name() == name).ok_or_else(|| {
        let known: Vec<&str> = FORMATS.iter().map(|driver| driver.name()).collect();
        Error::Invalid(format!("unknown format '{name}'; the known ones are {}", known.join(", ")))
    })
}
