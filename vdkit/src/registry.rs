//! The list of all formats.

use vdkit_block::{FormatDriver, Result};
use vdkit_chain::{Registry, RejectedKind};
use vdkit_legacy::{BOCHS, CLOOP, DMG, PARALLELS, QCOW, QED};
use vdkit_luks::LuksDriver;
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
    is_one: Package::looks_like,
    what: "is an appliance (OVA), a tar file with disk images in it, and no disk itself",
    hint: "'vdkit info FILE' lists its disks, 'vdkit convert FILE FOLDER/' takes them out (one of \
           them: --disk N); '-f raw' takes the tar file itself for a disk",
};

/// A file with a format's extension but no known content: more often a damaged or empty image than
/// a raw disk.
macro_rules! misnamed {
    ($format:literal: $($ending:literal)|+) => {
        RejectedKind {
            is_one: |name, _| named(name, &[$($ending),+]),
            what: concat!(
                "its name says that it is a ", $format,
                " image, and its content is none: it is damaged, empty, or something else"
            ),
            hint: concat!(
                "'vdkit check -f ", $format, " FILE' says what is wrong with it; if every byte of it \
                 belongs to the disk, say so with '-f raw'"
            ),
        }
    };
}

const MISNAMED: [RejectedKind; 8] = [
    misnamed!("qcow2": "qcow2"),
    misnamed!("qcow": "qcow"),
    misnamed!("vmdk": "vmdk"),
    misnamed!("vdi": "vdi"),
    misnamed!("vhd": "vhd" | "vpc"),
    misnamed!("vhdx": "vhdx"),
    misnamed!("qed": "qed"),
    misnamed!("dmg": "dmg"),
];

/// The format for a file extension. Raw disks have no fixed extension.
pub fn format_of_name(name: &str) -> Option<&'static str> {
    const ENDINGS: [(&str, &str); 7] = [
        ("qcow2", "qcow2"),
        ("vmdk", "vmdk"),
        ("vdi", "vdi"),
        ("vhd", "vhd"),
        ("vpc", "vhd"),
        ("vhdx", "vhdx"),
        ("luks", "luks"),
    ];
    ENDINGS.iter().find(|(ending, _)| named(name, &[ending])).map(|(_, format)| *format)
}

/// Whether a file has one of these extensions. Extents of a flat VMDK are excluded: they have its
/// extension and are raw.
fn named(name: &str, endings: &[&str]) -> bool {
    let path = std::path::Path::new(name);
    let stem = path.file_stem().and_then(|part| part.to_str()).unwrap_or_default();
    let ending = path.extension().and_then(|part| part.to_str()).unwrap_or_default();
    let extent = stem.rsplit_once('-').is_some_and(|(_, last)| {
        let number = last.strip_prefix('f').unwrap_or_default();
        last == "flat" || (number.len() >= 3 && number.bytes().all(|b| b.is_ascii_digit()))
    });
    endings.iter().any(|known| known.eq_ignore_ascii_case(ending)) && !extent
}

/// A registry of all formats. Without an explicit format it rejects appliances (OVA), and files
/// whose content does not match their extension.
pub fn registry() -> Registry {
    Registry::new(FORMATS.iter().copied()).refusing([APPLIANCE]).refusing(MISNAMED)
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
        assert!(named("dir.d/a.QCOW2", &["qcow2"]) && named("a.b.vpc", &["vhd", "vpc"]));
        for name in ["qcow2", "a.qcow2.bak", "a.raw", "a.qcow2/b", "a-flat.vmdk", "a-f001.vmdk"] {
            assert!(!named(name, &["qcow2", "vmdk"]), "{name}");
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
