//! The list of all formats.

use vdkit_block::{FormatDriver, Remedy, Result};
use vdkit_chain::{Registry, RejectedKind};
use vdkit_legacy::{BOCHS, CLOOP, DMG, PARALLELS, QCOW, QED};
use vdkit_luks::LuksDriver;
#[cfg(feature = "nbd-client")]
use vdkit_nbd_client::NBD;
use vdkit_ova::Package;
use vdkit_qcow2::Qcow2Driver;
use vdkit_raw::RawDriver;
use vdkit_vdi::VdiDriver;
use vdkit_vhd::VhdDriver;
use vdkit_vhdx::VhdxDriver;
use vdkit_vmdk::VmdkDriver;

/// All supported formats.
pub static FORMATS: &[&dyn FormatDriver] = &[
    &RawDriver,
    &Qcow2Driver,
    &LuksDriver,
    &VdiDriver,
    &VhdDriver,
    &VhdxDriver,
    &VmdkDriver,
    QCOW,
    QED,
    PARALLELS,
    DMG,
    CLOOP,
    BOCHS,
];

/// An appliance: a guest that got it as a raw disk would see a tar file.
const APPLIANCE: RejectedKind = RejectedKind {
    matches: Package::looks_like,
    what: "is an appliance (OVA), a tar file with disk images in it, and no disk itself",
    remedy: Remedy::ExtractDisks,
};

/// The format that a file's extension names, if images of it can be written. Raw disks have no
/// extension of their own.
pub fn format_of_name(name: &str) -> Option<&'static str> {
    let driver = registry().find_by_file_name(name)?;
    (driver.creation().is_some() && driver.name() != "raw").then(|| driver.name())
}

/// A registry of all formats; with the feature `nbd-client` it opens NBD URIs too. Without an explicit format it rejects appliances
/// (OVA), and files whose content does not match their extension.
pub fn registry() -> Registry {
    let registry = Registry::new(FORMATS.iter().copied()).rejecting([APPLIANCE]);
    #[cfg(feature = "nbd-client")]
    let registry = registry.with_protocols([NBD]);
    registry
}

/// The driver of a user-supplied format name.
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
    fn a_name_says_a_format_but_for_extents_of_a_vmdk() {
        let of = |name| registry().find_by_file_name(name).map(|driver| driver.name());
        assert_eq!(of("dir.d/a.QCOW2"), Some("qcow2"));
        assert_eq!(of("a.b.vpc"), Some("vpc"));
        for name in ["qcow2", "a.qcow2.bak", "a.qcow2/b", "a-flat.vmdk", "a-f001.vmdk"] {
            assert_eq!(of(name), None, "{name}");
        }
        assert_eq!((format_of_name("a.raw"), format_of_name("a.qed")), (None, None));
        assert_eq!(format_of_name("a.vmdk"), Some("vmdk"));
        let promised = |name| registry().format_in_name(name);
        for (name, format) in
            [("a.VHD", "vhd"), ("a.avhd", "vhd"), ("a.avhdx", "vhdx"), ("a.qed", "qed")]
        {
            assert_eq!(promised(name).as_deref(), Some(format), "{name}");
        }
        for name in ["a.hdd", "a.raw", "a-flat.vmdk", "a", "a.bak"] {
            assert_eq!(promised(name), None, "{name}");
        }
    }

    #[test]
    fn what_a_name_says_and_the_content_does_not_is_rejected() {
        let probe = |name: &str| registry().probe_bytes(name, &[0; 512], &[0; 512], 512);
        for name in ["a.qcow2", "b.VHD", "c.vpc", "d.vmdk", "e.luks", "f.dmg"] {
            let error = probe(name).unwrap_err().to_string();
            assert!(error.contains("its content is not"), "{error}");
        }
        for name in ["a.raw", "b.img", "c.hdd", "d", "e-flat.vmdk", "f.qcow2.bak"] {
            assert!(probe(name).unwrap().fallback, "{name}");
        }
    }

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
