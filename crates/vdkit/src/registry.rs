//! The one list of formats.

use vdkit_block::{FormatDriver, Result};
use vdkit_chain::{Registry, Stranger};
use vdkit_legacy::{BochsDriver, CloopDriver, DmgDriver, ParallelsDriver, QcowDriver, QedDriver};
use vdkit_luks::LuksDriver;
use vdkit_ova::Package;
use vdkit_qcow2::Qcow2Driver;
use vdkit_raw::RawDriver;
use vdkit_vdi::VdiDriver;
use vdkit_vhd::VhdDriver;
use vdkit_vhdx::VhdxDriver;
use vdkit_vmdk::VmdkDriver;

/// Every format that this build knows.
pub static FORMATS: &[&dyn FormatDriver] = &[
    &RawDriver,
    &Qcow2Driver,
    &LuksDriver,
    &VdiDriver,
    &VhdDriver,
    &VhdxDriver,
    &VmdkDriver,
    &QcowDriver,
    &QedDriver,
    &ParallelsDriver,
    &DmgDriver,
    &CloopDriver,
    &BochsDriver,
];

/// An appliance: a guest that had it for a raw disk would see a tar file.
const APPLIANCE: Stranger = Stranger {
    is_one: Package::looks_like,
    what: "is an appliance (OVA), a tar file with disk images in it, and no disk itself",
    hint: "'vdkit info FILE' lists its disks, 'vdkit convert FILE FOLDER/' takes them out (one of \
           them: --disk N); '-f raw' takes the tar file itself for a disk",
};

/// A registry of every format. Appliances (OVA) are refused, unless the format is named.
pub fn registry() -> Registry {
    Registry::new(FORMATS.iter().copied()).refusing([APPLIANCE])
}

/// The driver of a format that a user named.
///
/// # Errors
/// [`vdkit_block::Error::Invalid`] for an unknown name, listing the known ones.
pub fn format(name: &str) -> Result<&'static dyn FormatDriver> {
    registry().driver(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_format_is_found_by_its_name_and_named_once() {
        for driver in FORMATS {
            assert_eq!(format(driver.name()).unwrap().name(), driver.name());
            assert_eq!(FORMATS.iter().filter(|d| d.name() == driver.name()).count(), 1);
        }
        let error = format("qcow3").unwrap_err().to_string();
        assert!(FORMATS.iter().all(|driver| error.contains(driver.name())), "{error}");
    }
}
