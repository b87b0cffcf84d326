//! Which process made something.

/// The process that opened or started something. A child of `fork` has copies of its parent's handles,
/// while what they stand for stays the parent's: locks, connections, threads, names of files. Whatever ends
/// one of these when it is dropped asks here first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerProcess(u32);

impl OwnerProcess {
    /// This process.
    pub fn current() -> Self {
        Self(std::process::id())
    }

    /// Whether this is that process, and not a child of it.
    pub fn is_current(self) -> bool {
        self == Self::current()
    }
}
