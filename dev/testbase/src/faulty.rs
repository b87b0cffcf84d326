//! A storage whose calls fail as planned.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::io::Errno;
use vdkit_block::{Error, HostOffset, IoAction, ReadPaths, Result, Storage, ZeroMode};

/// Which calls a fault hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// Reads; each of a batch counts.
    Read,
    /// Writes.
    Write,
    /// `write_zeroes`.
    Zero,
    /// `discard`.
    Discard,
    /// `allocate`.
    Allocate,
    /// `sync`.
    Sync,
    /// `set_len`.
    SetLen,
}

impl FaultKind {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Read,
        Self::Write,
        Self::Zero,
        Self::Discard,
        Self::Allocate,
        Self::Sync,
        Self::SetLen,
    ];

    /// Those that need space, where a disk may be full. ([`FaultKind::SetLen`] is the last one: a full disk
    /// does not keep a file from being cut.)
    pub const SPACE: [Self; 4] = [Self::Write, Self::Zero, Self::Allocate, Self::SetLen];

    /// Those that change the storage or make changes durable.
    pub const CHANGES: [Self; 6] =
        [Self::Write, Self::Zero, Self::Discard, Self::Allocate, Self::Sync, Self::SetLen];
}

/// What fails, and how; see [`FaultyStorage::arm`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultPlan {
    kinds: Vec<FaultKind>,
    nth: u64,
    errno: Errno,
    lasting: bool,
    torn_sectors: Option<u64>,
}

impl FaultPlan {
    /// The `nth` call (from 0, counted from arming) of any of `kinds` fails once with EIO.
    pub fn nth(kinds: &[FaultKind], nth: u64) -> Self {
        Self { kinds: kinds.to_vec(), nth, errno: Errno::IO, lasting: false, torn_sectors: None }
    }

    /// With "no space left" instead.
    pub fn no_space(self) -> Self {
        Self { errno: Errno::NOSPC, ..self }
    }

    /// All later calls of the kinds fail too, until [`FaultyStorage::heal`].
    pub fn lasting(self) -> Self {
        Self { lasting: true, ..self }
    }

    /// A write or zeroing that fails has done its first 512-byte sectors: up to this many, and
    /// never all of them.
    pub fn torn(self, sectors: u64) -> Self {
        Self { torn_sectors: Some(sectors), ..self }
    }
}

#[derive(Debug, Default)]
struct State {
    plan: Option<FaultPlan>,
    matched: u64,
    fired: u64,
    /// A sync has failed, and failed syncs are final.
    lost: bool,
}

/// Passes all calls on to another storage, except those that fail as planned. It has no descriptor and
/// copies nothing inside the kernel, so that no byte passes it by.
///
/// A failed `sync` is final, as that of a file is, where a test says so
/// ([`FaultyStorage::final_syncs`]); else the next one may work.
#[derive(Debug)]
pub struct FaultyStorage {
    inner: Arc<dyn Storage>,
    state: Mutex<State>,
    final_syncs: AtomicBool,
}

/// How a call that is hit fails.
struct Hit {
    errno: Errno,
    torn_sectors: Option<u64>,
}

const SECTOR: u64 = 512;

impl FaultyStorage {
    /// A storage that works until it is armed.
    pub fn new(inner: Arc<dyn Storage>) -> Arc<Self> {
        let (state, final_syncs) = (Mutex::default(), AtomicBool::new(false));
        Arc::new(Self { inner, state, final_syncs })
    }

    /// Sets the plan, in place of an earlier one, and begins to count.
    pub fn arm(&self, plan: FaultPlan) {
        let mut state = self.state.lock();
        *state = State { plan: Some(plan), lost: state.lost, ..State::default() };
    }

    /// From now on no call finds space, until [`FaultyStorage::heal`].
    pub fn fill(&self) {
        self.arm(FaultPlan::nth(&FaultKind::SPACE, 0).no_space().lasting());
    }

    /// From now on a failed sync is final: all later ones fail too, also after
    /// [`FaultyStorage::heal`].
    pub fn final_syncs(&self) {
        self.final_syncs.store(true, Ordering::SeqCst);
    }

    /// Whether a sync has failed for good.
    pub fn lost(&self) -> bool {
        self.state.lock().lost
    }

    /// Works again. The counts stay.
    pub fn heal(&self) {
        self.state.lock().plan = None;
    }

    /// Calls of the plan's kinds since it was armed. A test that fails each call in turn ends
    /// when this does not pass its `nth` any more.
    pub fn matched(&self) -> u64 {
        self.state.lock().matched
    }

    /// Calls that were failed since the plan was armed.
    pub fn fired(&self) -> u64 {
        self.state.lock().fired
    }

    /// The storage beneath.
    pub fn inner(&self) -> &Arc<dyn Storage> {
        &self.inner
    }

    fn hit(&self, kind: FaultKind) -> Option<Hit> {
        let mut state = self.state.lock();
        let plan = state.plan.as_ref().filter(|plan| plan.kinds.contains(&kind))?;
        let (nth, lasting) = (plan.nth, plan.lasting);
        let hit = Hit { errno: plan.errno, torn_sectors: plan.torn_sectors };
        let index = state.matched;
        state.matched += 1;
        if index == nth || (lasting && index > nth) {
            state.fired += 1;
            return Some(hit);
        }
        None
    }

    fn fail(&self, kind: FaultKind, action: IoAction, offset: u64, len: u64) -> Result<()> {
        match self.hit(kind) {
            None => Ok(()),
            Some(hit) => Err(Error::io(self.inner.name(), action, offset, len, hit.errno.into())),
        }
    }

    fn fail_file(&self, kind: FaultKind, action: IoAction) -> Result<()> {
        let Some(hit) = self.hit(kind) else { return Ok(()) };
        Err(Error::file_io(self.inner.name(), action, hit.errno))
    }
}

/// Bytes of a torn request that reach the storage: whole sectors of the disk, but not the last.
fn torn_bytes(offset: HostOffset, len: u64, sectors: u64) -> u64 {
    let mut bytes = 0;
    for _ in 0..sectors {
        let next = bytes + SECTOR - (offset.0 + bytes) % SECTOR;
        if next >= len {
            break;
        }
        bytes = next;
    }
    bytes
}

impl vdkit_block::StorageLayer for FaultyStorage {
    const INTERCEPTS: bool = true;

    fn inner(&self) -> &dyn Storage {
        &*self.inner
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        self.fail(FaultKind::Read, IoAction::Read, offset.0, buf.len() as u64)?;
        self.inner.read_up_to(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        let Some(hit) = self.hit(FaultKind::Write) else {
            return self.inner.write_at(buf, offset);
        };
        let len = buf.len() as u64;
        if let Some(sectors) = hit.torn_sectors {
            let done = torn_bytes(offset, len, sectors) as usize;
            self.inner.write_at(&buf[..done], offset)?;
        }
        Err(Error::io(self.inner.name(), IoAction::Write, offset.0, len, hit.errno.into()))
    }

    fn write_zeroes(&self, offset: HostOffset, len: u64, mode: ZeroMode) -> Result<()> {
        let Some(hit) = self.hit(FaultKind::Zero) else {
            return self.inner.write_zeroes(offset, len, mode);
        };
        if let Some(sectors) = hit.torn_sectors {
            self.inner.write_zeroes(offset, torn_bytes(offset, len, sectors), mode)?;
        }
        Err(Error::io(self.inner.name(), IoAction::WriteZeroes, offset.0, len, hit.errno.into()))
    }

    fn discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.fail(FaultKind::Discard, IoAction::Discard, offset.0, len)?;
        self.inner.discard(offset, len)
    }

    fn allocate(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.fail(FaultKind::Allocate, IoAction::Allocate, offset.0, len)?;
        self.inner.allocate(offset, len)
    }

    fn sync(&self) -> Result<()> {
        if self.lost() {
            return Err(Error::file_io(self.inner.name(), IoAction::Sync, Errno::IO));
        }
        let failed = self.fail_file(FaultKind::Sync, IoAction::Sync);
        if failed.is_err() && self.final_syncs.load(Ordering::SeqCst) {
            self.state.lock().lost = true;
        }
        failed?;
        self.inner.sync()
    }

    fn set_len(&self, len: u64) -> Result<()> {
        self.fail_file(FaultKind::SetLen, IoAction::Resize)?;
        self.inner.set_len(len)
    }

    vdkit_block::capabilities!(read_paths: ReadPaths);
}

/// Reads of a batch fail one by one.
impl ReadPaths for FaultyStorage {
    fn read_ready(&self, buf: &mut [u8], offset: HostOffset) -> Result<bool> {
        self.fail(FaultKind::Read, IoAction::Read, offset.0, buf.len() as u64)?;
        self.inner.read_ready(buf, offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vdkit_block::{ErrorKind, ReadOp, StorageExt};
    use vdkit_storage::MemoryStorage;

    fn faulty() -> (Arc<FaultyStorage>, Arc<MemoryStorage>) {
        let memory = Arc::new(MemoryStorage::with_len("m", 8192));
        (FaultyStorage::new(memory.clone()), memory)
    }

    #[test]
    fn the_nth_call_of_a_kind_fails_once() {
        let (storage, _) = faulty();
        storage.arm(FaultPlan::nth(&[FaultKind::Write, FaultKind::Sync], 2));
        storage.write_at(&[1], HostOffset(0)).unwrap();
        storage.read_at(&mut [0; 4], HostOffset(0)).unwrap();
        storage.sync().unwrap();
        let error = storage.write_at(&[1], HostOffset(7)).unwrap_err();
        assert!(matches!(error, Error::Io { offset: 7, action: IoAction::Write, .. }));
        storage.write_at(&[1], HostOffset(7)).unwrap();
        assert_eq!((storage.matched(), storage.fired()), (4, 1));
    }

    #[test]
    fn a_lasting_fault_ends_with_healing() {
        let (storage, _) = faulty();
        storage.arm(FaultPlan::nth(&FaultKind::CHANGES, 1).no_space().lasting());
        storage.set_len(9000).unwrap();
        for _ in 0..2 {
            assert_eq!(storage.sync().unwrap_err().kind(), ErrorKind::NoSpace);
            assert_eq!(
                storage.write_zeroes(HostOffset(0), 1, ZeroMode::MayUnmap).unwrap_err().kind(),
                ErrorKind::NoSpace
            );
            assert!(storage.discard(HostOffset(0), 1).is_err());
            assert!(storage.allocate(HostOffset(0), 1).is_err());
            assert!(storage.set_len(0).is_err());
        }
        storage.heal();
        storage.sync().unwrap();
        assert_eq!(storage.fired(), 10);
    }

    #[test]
    fn a_failed_sync_is_final_where_it_shall_be() {
        let (storage, _) = faulty();
        storage.arm(FaultPlan::nth(&[FaultKind::Sync], 0));
        assert!(storage.sync().is_err() && storage.sync().is_ok());
        storage.final_syncs();
        storage.arm(FaultPlan::nth(&[FaultKind::Sync], 0));
        assert!(storage.sync().is_err() && storage.sync().is_err() && storage.lost());
        storage.heal();
        storage.arm(FaultPlan::nth(&[FaultKind::Sync], 9));
        assert!(storage.sync().is_err());
        storage.write_at(&[1], HostOffset(0)).unwrap();
    }

    #[test]
    fn reads_of_a_batch_count_each() {
        let (storage, _) = faulty();
        storage.arm(FaultPlan::nth(&[FaultKind::Read], 1));
        let (mut a, mut b) = ([0; 4], [0; 4]);
        let mut ops = [
            ReadOp { offset: HostOffset(0), buf: &mut a },
            ReadOp { offset: HostOffset(4), buf: &mut b },
        ];
        assert!(storage.read_batch(&mut ops).is_err());
    }

    #[test]
    fn a_torn_write_leaves_whole_sectors_and_never_all() {
        let (storage, memory) = faulty();
        storage.arm(FaultPlan::nth(&[FaultKind::Write], 0).torn(2));
        assert!(storage.write_at(&[7; 2048], HostOffset(100)).is_err());
        let bytes = memory.to_vec();
        assert!(bytes[100..1024].iter().all(|b| *b == 7));
        assert!(bytes[1024..].iter().all(|b| *b == 0));
        storage.arm(FaultPlan::nth(&[FaultKind::Write], 0).torn(99));
        assert!(storage.write_at(&[9; 512], HostOffset(4096)).is_err());
        assert_eq!(memory.to_vec()[4096], 0);
    }
}
