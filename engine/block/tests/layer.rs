//! A wrapper passes on what it leaves out, and nothing passes by a wrapper that must see all bytes.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use vdkit_block::{
    AccessExchange, CopyMethod, CopyOp, GuestDiscard, HostOffset, InitialWrites, KernelCopy,
    ReadOp, ReadPaths, Result, SpaceMap, Storage, StorageCaps, StorageExtent, ZeroMode,
};

/// Notes the name of each method that is called.
#[derive(Debug, Default)]
struct Recorder(Mutex<Vec<&'static str>>);

impl Recorder {
    fn note<T>(&self, method: &'static str, answer: T) -> T {
        self.0.lock().unwrap().push(method);
        answer
    }
}

#[deny(clippy::missing_trait_methods)]
impl Storage for Recorder {
    fn name(&self) -> &str {
        self.note("name", "recorder")
    }
    fn caps(&self) -> StorageCaps {
        self.note("caps", StorageCaps { volatile: true, ..StorageCaps::default() })
    }
    fn len(&self) -> Result<u64> {
        self.note("len", Ok(7))
    }
    fn read_up_to(&self, buf: &mut [u8], _: HostOffset) -> Result<usize> {
        self.note("read_up_to", Ok(buf.len()))
    }
    fn write_at(&self, _: &[u8], _: HostOffset) -> Result<()> {
        self.note("write_at", Ok(()))
    }
    fn write_zeroes(&self, _: HostOffset, _: u64, _: ZeroMode) -> Result<()> {
        self.note("write_zeroes", Ok(()))
    }
    fn discard(&self, _: HostOffset, _: u64) -> Result<()> {
        self.note("discard", Ok(()))
    }
    fn allocate(&self, _: HostOffset, _: u64) -> Result<()> {
        self.note("allocate", Ok(()))
    }
    fn set_len(&self, _: u64) -> Result<()> {
        self.note("set_len", Ok(()))
    }
    fn sync(&self) -> Result<()> {
        self.note("sync", Ok(()))
    }
    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.note("as_fd", None)
    }
    vdkit_block::capabilities! {
        space_map: SpaceMap, read_paths: ReadPaths, initial_writes: InitialWrites,
        guest_discard: GuestDiscard, kernel_copy: KernelCopy, access_exchange: AccessExchange
    }
}

impl SpaceMap for Recorder {
    fn may_have_holes(&self) -> Result<bool> {
        self.note("may_have_holes", Ok(true))
    }
    fn extent_at(&self, _: HostOffset, len: u64) -> Result<StorageExtent> {
        self.note("extent_at", Ok(StorageExtent { data: false, len }))
    }
    fn allocated_bytes(&self) -> Result<u64> {
        self.note("allocated_bytes", Ok(3))
    }
}

#[deny(clippy::missing_trait_methods)]
impl ReadPaths for Recorder {
    fn read_ready(&self, _: &mut [u8], _: HostOffset) -> Result<bool> {
        self.note("read_ready", Ok(true))
    }
    fn read_batch(&self, _: &mut [ReadOp<'_>]) -> Result<()> {
        self.note("read_batch", Ok(()))
    }
    fn read_discard(&self, _: HostOffset, _: u64) -> Result<()> {
        self.note("read_discard", Ok(()))
    }
}

impl InitialWrites for Recorder {
    fn write_new(&self, _: &[u8], _: HostOffset) -> Result<()> {
        self.note("write_new", Ok(()))
    }
}

impl GuestDiscard for Recorder {
    fn forget(&self, _: HostOffset, _: u64) -> Result<()> {
        self.note("forget", Ok(()))
    }
}

impl KernelCopy for Recorder {
    fn copy_from(&self, op: &CopyOp<'_>) -> Result<u64> {
        self.note("copy_from", Ok(op.len))
    }
}

#[deny(clippy::missing_trait_methods)]
impl AccessExchange for Recorder {
    fn downgrade_lock(&self) -> Result<()> {
        self.note("downgrade_lock", Ok(()))
    }
    fn reopen_for_writing(&self) -> Result<Arc<dyn Storage>> {
        self.note("reopen_for_writing", Ok(Arc::new(Self::default())))
    }
}

/// Overrides nothing.
#[derive(Debug, Default)]
struct Layer<const INTERCEPTS: bool>(Recorder);

impl<const INTERCEPTS: bool> vdkit_block::StorageLayer for Layer<INTERCEPTS> {
    const INTERCEPTS: bool = INTERCEPTS;

    fn inner(&self) -> &dyn Storage {
        &self.0
    }
}

const CORE: [&str; 10] = [
    "name",
    "caps",
    "len",
    "read_up_to",
    "write_at",
    "write_zeroes",
    "discard",
    "allocate",
    "set_len",
    "sync",
];
const SPACE: [&str; 3] = ["may_have_holes", "extent_at", "allocated_bytes"];

/// Calls each method of the core.
fn call_core(storage: &dyn Storage) {
    let at = HostOffset(0);
    assert_eq!((storage.name(), storage.caps().volatile), ("recorder", true));
    assert_eq!(storage.len().unwrap(), 7);
    assert_eq!(storage.read_up_to(&mut [0; 2], at).unwrap(), 2);
    storage.write_at(&[1], at).unwrap();
    storage.write_zeroes(at, 1, ZeroMode::MayUnmap).unwrap();
    storage.discard(at, 1).unwrap();
    storage.allocate(at, 1).unwrap();
    storage.set_len(1).unwrap();
    storage.sync().unwrap();
}

/// Calls each method of the space map.
fn call_space(storage: &dyn Storage) {
    assert!(storage.may_have_holes().unwrap());
    assert!(!storage.extent_at(HostOffset(0), 1).unwrap().data);
    assert_eq!(storage.allocated_bytes().unwrap(), 3);
}

/// Calls each method of the other capabilities, and says what the answers were.
fn call_capabilities(storage: &dyn Storage) -> (bool, u64, bool) {
    let at = HostOffset(0);
    assert!(storage.as_fd().is_none());
    let ready = storage.read_ready(&mut [0], at).unwrap();
    storage.read_batch(&mut [ReadOp { offset: at, buf: &mut [0] }]).unwrap();
    storage.read_discard(at, 1).unwrap();
    storage.write_new(&[1], at).unwrap();
    storage.forget(at, 1).unwrap();
    let source = Recorder::default();
    let method = CopyMethod::Reflink;
    let copied =
        storage.copy_from(&CopyOp { to: at, source: &source, from: at, len: 5, method }).unwrap();
    storage.downgrade_lock().unwrap();
    (ready, copied, storage.reopen_for_writing().is_ok())
}

#[test]
fn a_wrapper_passes_on_what_it_leaves_out() {
    let layer = Layer::<false>::default();
    call_core(&layer);
    call_space(&layer);
    assert_eq!(call_capabilities(&layer), (true, 5, true));
    let capabilities = [
        "as_fd",
        "read_ready",
        "read_batch",
        "read_discard",
        "write_new",
        "forget",
        "copy_from",
        "downgrade_lock",
        "reopen_for_writing",
    ];
    let all = [&CORE[..], &SPACE, &capabilities].concat();
    assert_eq!(*layer.0.0.lock().unwrap(), all);
}

#[test]
fn nothing_passes_by_a_wrapper_that_intercepts() {
    let layer = Layer::<true>::default();
    call_core(&layer);
    call_space(&layer);
    assert_eq!(call_capabilities(&layer), (false, 0, false));
    // The batch, the discarded read, the new write and the guest's discard; then the name in an
    // error.
    let instead = ["read_up_to", "read_up_to", "write_at", "discard", "name"];
    assert_eq!(*layer.0.0.lock().unwrap(), [&CORE[..], &SPACE, &instead].concat());
}
