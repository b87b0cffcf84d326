//! The pieces that an image's description lists.

use std::sync::Arc;

use vdkit_block::{ExtentInfo, FormatDriver, Limits, Storage};
use vdkit_storage::MemoryStorage;
use vdkit_vmdk::VmdkDriver;

#[test]
fn a_descriptors_extents_are_described_in_order() {
    let text = "# Disk DescriptorFile\nversion=1\nCID=0000002a\nparentCID=ffffffff\n\
                createType=\"custom\"\nRW 8 FLAT \"a.vmdk\" 0\nRW 16 SPARSE \"b.vmdk\"\nRW 4 ZERO\n";
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::from_bytes("d.vmdk", text.as_bytes()));
    let info = VmdkDriver.describe(&storage, &Limits::default()).unwrap();
    let extent = |sectors: u64, file: Option<&str>, kind| ExtentInfo {
        guest_bytes: sectors * 512,
        file: file.map(str::to_owned),
        kind,
        compressed: false,
    };
    assert_eq!(
        info.extents,
        [
            extent(8, Some("a.vmdk"), "FLAT"),
            extent(16, Some("b.vmdk"), "SPARSE"),
            extent(4, None, "ZERO")
        ]
    );
}
