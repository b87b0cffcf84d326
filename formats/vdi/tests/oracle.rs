//! QEMU as a second reader and writer.

use vdkit_testbase::trials::{Oracle, Trial};
use vdkit_testbase::{qemu, require_peer};
use vdkit_vdi::VdiDriver;

const DYNAMIC: Oracle = Oracle {
    trial: Trial::new(&VdiDriver, "", (23 << 20) + 512 * 3),
    format: "vdi",
    options: &[],
    checks: true,
};
const STATIC: Oracle = Oracle {
    trial: Trial { options: "static=on", ..DYNAMIC.trial },
    options: &["static=on"],
    ..DYNAMIC
};

#[test]
fn qemu_and_we_write_to_the_same_images_in_turn() {
    if !require_peer("qemu-img") || !require_peer("qemu-io") {
        return;
    }
    DYNAMIC.by_turns(3);
    STATIC.by_turns(2);
}

/// QEMU's tables end directly before the blocks, so growing moves blocks.
#[test]
fn qemu_reads_what_was_resized_here() {
    if !require_peer("qemu-img") || !require_peer("qemu-io") {
        return;
    }
    DYNAMIC.resized(&[150 << 20, 20 << 20, 400 << 20, 1 << 20, 3 << 20]);
    STATIC.resized(&[30 << 20, 200 << 20, 5 << 20, 6 << 20]);
}

#[test]
fn qemu_sees_the_sizes_that_were_asked_for() {
    if !require_peer("qemu-img") {
        return;
    }
    for bytes in [0, 512, 1 << 20, (1 << 20) + 512, 1 << 40, 200 << 40] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let file = vdkit_storage::FileStorage::open(
            &path,
            &vdkit_storage::FileOptions::read_write().create(vdkit_storage::CreateMode::New),
        )
        .unwrap();
        Trial { guest_bytes: bytes, ..DYNAMIC.trial }.create(&(std::sync::Arc::new(file) as _));
        assert_eq!(qemu::info(&path, "vdi")["virtual-size"], bytes, "{bytes}");
        assert!(qemu::check(&path, "vdi", None).clean(), "{bytes}");
    }
}
