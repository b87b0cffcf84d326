//! Appliances: a tar file as it comes, or a sound one around a descriptor and a manifest.

use std::sync::Arc;

use vdkit_block::{CancelToken, HostOffset};
use vdkit_ova::{Package, PackageLimits, members};
use vdkit_storage::MemoryStorage;

use crate::appliance::tar;

/// Takes the input for: what it is (a tar file; a tar file whose headers get right checksums; a
/// descriptor; a manifest beside a sound descriptor), and its bytes.
///
/// # Panics
/// If a member reaches past the end of the file, where a disk cannot be read whole, and where a name
/// for a file is none.
pub fn ova_open(input: &[u8]) {
    let Some((&kind, rest)) = input.split_first() else { return };
    let sound = crate::appliance::ovf(&[("ovf:href=\"d\"", "ovf:capacity=\"512\"")]);
    let bytes = match kind % 4 {
        0 => rest.to_vec(),
        1 => sealed(rest.to_vec()),
        2 => tar(&[("a.ovf", rest), ("d", b"disk"), ("d.000000000", b"di"), ("../x", b"sk")]),
        _ => tar(&[("a.ovf", sound.as_bytes()), ("a.mf", rest), ("d", b"disk")]),
    };
    let len = bytes.len() as u64;
    let storage = Arc::new(MemoryStorage::from_bytes("a.ova", &bytes));
    let _ = Package::is_one(&bytes[..bytes.len().min(64 << 10)]);
    if let Ok(found) = members(&*storage) {
        for member in found {
            let end = member.offset.checked_add(member.len);
            assert!(end.is_some_and(|end| end <= len), "{member:?} of {len} bytes");
        }
    }
    let limits = PackageLimits { descriptor_bytes_max: 1 << 20, manifest_bytes_max: 1 << 20 };
    let Ok(package) = Package::open(storage, &limits) else { return };
    for (index, disk) in package.disks().iter().enumerate() {
        if let Some(stem) = disk.safe_stem() {
            let harmless = |c: char| c != '/' && c != '\\' && !c.is_control();
            assert!(!stem.is_empty() && !stem.starts_with('.') && stem.chars().all(harmless));
        }
        let Some(window) = package.storage_of(index) else { continue };
        let size = window.len().expect("a length");
        assert!(size == disk.file_bytes());
        // Pieces may be many and lie in each other's bytes; a file is no longer than the archive.
        let mut all = vec![0; size.min(1 << 20) as usize];
        window.read_at(&mut all, HostOffset(0)).expect("all bytes of a disk's file");
        let _ = package.verify(index, &CancelToken::default(), &mut |_| {});
    }
}

/// Puts the checksum of each header right, walking as a plain reader would.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let mut at = 0;
    while let Some(header) = bytes.get_mut(at..at + 512) {
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        let digits = std::str::from_utf8(&header[124..135]).unwrap_or_default();
        let size = usize::from_str_radix(digits, 8).unwrap_or(0);
        at = at.saturating_add(512).saturating_add(size.next_multiple_of(512));
    }
    bytes
}
