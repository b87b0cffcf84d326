//! A storage with a read budget.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use vdkit_block::{Error, HostOffset, Result, Storage, StorageCaps, require_writable};

/// Reads and bytes used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    pub reads: u64,
    pub bytes: u64,
}

/// The first limit that was exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exceeded {
    /// The number of reads, or their bytes.
    Reads,
    Time,
}

/// Limits reads of another storage by number, bytes and a deadline; never writes.
#[derive(Debug)]
pub struct BudgetStorage {
    inner: Arc<dyn Storage>,
    budget: Arc<Budget>,
}

/// The limits, and what was used.
#[derive(Debug)]
struct Budget {
    reads_max: u64,
    bytes_max: u64,
    deadline: Option<Instant>,
    reads: AtomicU64,
    bytes: AtomicU64,
    out_of_time: AtomicBool,
}

impl BudgetStorage {
    /// Limits `inner` to `reads_max` reads of `bytes_max` bytes in all, until `deadline`.
    pub fn new(
        inner: Arc<dyn Storage>,
        reads_max: u64,
        bytes_max: u64,
        deadline: Option<Instant>,
    ) -> Arc<Self> {
        let budget = Budget {
            reads_max,
            bytes_max,
            deadline,
            reads: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            out_of_time: AtomicBool::new(false),
        };
        Arc::new(Self { inner, budget: Arc::new(budget) })
    }

    /// Limits `other` by what is left for this storage: both use up the same budget.
    pub fn share_with(&self, other: Arc<dyn Storage>) -> Arc<Self> {
        Arc::new(Self { inner: other, budget: Arc::clone(&self.budget) })
    }

    /// What has been read so far.
    pub fn spent(&self) -> Spent {
        let Budget { reads, bytes, .. } = &*self.budget;
        Spent { reads: reads.load(Ordering::Relaxed), bytes: bytes.load(Ordering::Relaxed) }
    }

    /// The limit that ended the reads, if one did.
    pub fn exceeded(&self) -> Option<Exceeded> {
        let (budget, spent) = (&*self.budget, self.spent());
        if budget.out_of_time.load(Ordering::Relaxed) {
            Some(Exceeded::Time)
        } else if spent.reads > budget.reads_max || spent.bytes > budget.bytes_max {
            Some(Exceeded::Reads)
        } else {
            None
        }
    }

    fn spend(&self, bytes: u64) -> Result<()> {
        let limit = |what, found, limit| Err(Error::limit(self.name(), what, found, limit));
        let budget = &*self.budget;
        if budget.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            budget.out_of_time.store(true, Ordering::Relaxed);
            return limit("the time of an inspection", 1, 0);
        }
        let reads = budget.reads.fetch_add(1, Ordering::Relaxed) + 1;
        let bytes = budget.bytes.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        if reads > budget.reads_max || bytes > budget.bytes_max {
            return limit("the bytes read by an inspection", bytes, budget.bytes_max);
        }
        Ok(())
    }
}

/// Holes are not queried, since the sandbox would have to allow another system call.
impl Storage for BudgetStorage {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn caps(&self) -> StorageCaps {
        StorageCaps { writable: false, growable: false, ..self.inner.caps() }
    }

    fn len(&self) -> Result<u64> {
        self.inner.len()
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        self.spend(buf.len() as u64)?;
        self.inner.read_up_to(buf, offset)
    }

    fn sync(&self) -> Result<()> {
        require_writable(false, self.name())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use vdkit_block::{StorageExt, ZeroMode};
    use vdkit_storage::MemoryStorage;

    use super::*;

    fn budget(reads: u64, bytes: u64, deadline: Option<Instant>) -> Arc<BudgetStorage> {
        BudgetStorage::new(Arc::new(MemoryStorage::with_len("m", 1 << 20)), reads, bytes, deadline)
    }

    #[test]
    fn reads_and_bytes_are_counted_and_bounded() {
        let storage = budget(3, 1000, None);
        let mut buf = [0; 400];
        storage.read_at(&mut buf, HostOffset(0)).unwrap();
        storage.read_at(&mut buf, HostOffset(0)).unwrap();
        assert_eq!((storage.spent(), storage.exceeded()), (Spent { reads: 2, bytes: 800 }, None));
        assert!(matches!(storage.read_at(&mut buf, HostOffset(0)), Err(Error::Limit { .. })));
        assert_eq!(storage.exceeded(), Some(Exceeded::Reads));
        let storage = budget(1, 1000, None);
        storage.read_at(&mut buf, HostOffset(0)).unwrap();
        assert!(storage.read_at(&mut buf, HostOffset(0)).is_err());
    }

    #[test]
    fn a_deadline_that_has_passed_ends_it() {
        let storage = budget(9, 1000, Some(Instant::now() - Duration::from_millis(1)));
        assert!(storage.read_at(&mut [0], HostOffset(0)).is_err());
        assert_eq!(storage.exceeded(), Some(Exceeded::Time));
    }

    #[test]
    fn nothing_is_ever_written() {
        let storage = budget(9, 1000, None);
        assert!(!storage.caps().writable);
        assert!(storage.write_at(&[1], HostOffset(0)).is_err());
        assert!(storage.write_zeroes(HostOffset(0), 1, ZeroMode::MayUnmap).is_err());
        assert!(storage.discard(HostOffset(0), 1).is_err());
        assert!(storage.allocate(HostOffset(0), 1).is_err());
        assert!(storage.set_len(0).is_err());
    }
}
