//! A storage whose calls wait at a gate.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use vdkit_block::{HostOffset, ReadPaths, Result, Storage, ZeroMode};

use crate::faulty::FaultKind;

/// Nothing that a test waits for takes so long.
const HANG: Duration = Duration::from_secs(120);

/// A call at the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatedCall {
    /// What it is.
    pub kind: FaultKind,
    /// Where it reads or writes; 0 for `sync`, the new length for `set_len`.
    pub offset: u64,
    /// The storage beneath has done it, and the call has not returned yet.
    pub done: bool,
}

type Which = Box<dyn Fn(GatedCall) -> bool + Send>;

#[derive(Default)]
struct Gate {
    held: Option<Which>,
    waiting: u32,
    /// How often the gate was opened.
    opened: u64,
}

/// Passes all calls on to another storage. Those that a test holds wait until the test releases them,
/// so that the test can order the steps of several threads without sleeping.
pub struct GatedStorage {
    inner: Arc<dyn Storage>,
    gate: Mutex<Gate>,
    changed: Condvar,
}

impl fmt::Debug for GatedStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatedStorage").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl GatedStorage {
    /// A storage that holds nothing yet.
    pub fn new(inner: Arc<dyn Storage>) -> Arc<Self> {
        Arc::new(Self { inner, gate: Mutex::default(), changed: Condvar::new() })
    }

    /// Holds each call for which `which` returns true, from now on. It is asked twice for each call:
    /// before the storage beneath does it, and afterwards.
    pub fn hold(&self, which: impl Fn(GatedCall) -> bool + Send + 'static) {
        self.gate.lock().held = Some(Box::new(which));
    }

    /// Whether a call is held now.
    pub fn is_held(&self) -> bool {
        self.gate.lock().waiting > 0
    }

    /// Waits until a call is held.
    ///
    /// # Panics
    /// If none comes.
    pub fn reached(&self) {
        let mut gate = self.gate.lock();
        let nobody = |gate: &mut Gate| gate.waiting == 0;
        let waited = self.changed.wait_while_for(&mut gate, nobody, HANG);
        assert!(!waited.timed_out(), "nobody came to the gate");
    }

    /// Releases the waiting calls, and holds no others.
    pub fn release(&self) {
        let mut gate = self.gate.lock();
        gate.held = None;
        gate.opened += 1;
        self.changed.notify_all();
    }

    fn stop(&self, call: GatedCall) {
        let mut gate = self.gate.lock();
        if !gate.held.as_ref().is_some_and(|which| which(call)) {
            return;
        }
        let opened = gate.opened;
        gate.waiting += 1;
        self.changed.notify_all();
        self.changed.wait_while(&mut gate, |gate| gate.opened == opened);
        gate.waiting -= 1;
    }

    fn pass<R>(
        &self,
        kind: FaultKind,
        offset: u64,
        act: impl FnOnce(&dyn Storage) -> Result<R>,
    ) -> Result<R> {
        self.stop(GatedCall { kind, offset, done: false });
        let result = act(&*self.inner);
        self.stop(GatedCall { kind, offset, done: true });
        result
    }
}

impl vdkit_block::StorageLayer for GatedStorage {
    const INTERCEPTS: bool = true;

    fn inner(&self) -> &dyn Storage {
        &*self.inner
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        self.pass(FaultKind::Read, offset.0, |inner| inner.read_up_to(buf, offset))
    }

    fn write_at(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        self.pass(FaultKind::Write, offset.0, |inner| inner.write_at(buf, offset))
    }

    fn write_zeroes(&self, offset: HostOffset, len: u64, mode: ZeroMode) -> Result<()> {
        self.pass(FaultKind::Zero, offset.0, |inner| inner.write_zeroes(offset, len, mode))
    }

    fn discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.pass(FaultKind::Discard, offset.0, |inner| inner.discard(offset, len))
    }

    fn allocate(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.pass(FaultKind::Allocate, offset.0, |inner| inner.allocate(offset, len))
    }

    fn sync(&self) -> Result<()> {
        self.pass(FaultKind::Sync, 0, |inner| inner.sync())
    }

    fn set_len(&self, len: u64) -> Result<()> {
        self.pass(FaultKind::SetLen, len, |inner| inner.set_len(len))
    }

    vdkit_block::capabilities!(read_paths: ReadPaths);
}

/// A read that does not wait passes no gate; reads of a batch pass it one by one.
impl ReadPaths for GatedStorage {
    fn read_ready(&self, buf: &mut [u8], offset: HostOffset) -> Result<bool> {
        self.inner.read_ready(buf, offset)
    }
}
