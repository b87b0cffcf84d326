//! Requests that cover most of a large disk.

use std::sync::Arc;

use vdkit_block::{
    BackingRef, CreateRequest, Creation, Format, FormatDriver, GuestOffset, Limits, OpenRequest,
    Options, Place, Storage,
};
use vdkit_storage::MemoryStorage;
use vdkit_vmdk::VmdkDriver;

const GIB: u64 = 1 << 30;

/// An image with a parent, in which a grain of zeroes has its own entry value.
fn image(guest_bytes: u64) -> Arc<dyn Format> {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    let options = Options::parse("vmdk", VmdkDriver.options(), ["zeroed_grain=on"]).unwrap();
    let backing = BackingRef {
        identity: Some("12345678".to_owned()),
        ..BackingRef::new("base.vmdk", Some("vmdk".to_owned()))
    };
    let new = CreateRequest::new(storage.clone(), guest_bytes, options);
    VmdkDriver.create(&CreateRequest { backing: Some(backing), ..new }).unwrap();
    let mut limits = Limits::default();
    limits.cache_bytes = 64 << 10;
    VmdkDriver.open(OpenRequest { storage, files: Vec::new(), writable: true, limits }).unwrap()
}

/// Every table entry changes. Without a flush during the request, that takes 8 bytes of memory per
/// 64 KiB of disk.
#[test]
fn a_huge_discard_keeps_no_more_tables_in_memory_than_the_cache_holds() {
    let bytes = 40 * GIB;
    for discard in [true, false] {
        let format = image(bytes);
        if discard {
            format.discard(GuestOffset(4096), bytes - 8192).unwrap();
        } else {
            let done = format.zero_persistent(GuestOffset(4096), bytes - 8192).unwrap();
            assert_eq!(done, 65536..bytes - 65536);
        }
        let cache = format.map_cache().unwrap().stats();
        assert!(cache.used_bytes <= cache.capacity_bytes, "{cache:?}");
        let extent = format.resolve(GuestOffset(65536), bytes - 2 * 65536).unwrap();
        assert_eq!(extent.place, Place::Zero { allocated: false });
        for hole in [0, bytes - 65536] {
            let extent = format.resolve(GuestOffset(hole), 65536).unwrap();
            assert_eq!((extent.place, extent.len), (Place::Hole, 65536));
        }
        format.close().unwrap();
    }
}
