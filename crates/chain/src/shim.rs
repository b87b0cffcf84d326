//! Until the file storage lands.
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::Path;
use vdkit_block::*;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LockMode {
    #[default]
    Auto,
    Off,
}
#[derive(Clone, Copy, Debug, Default)]
pub struct FileOptions {
    pub writable: bool,
    pub cache: CacheMode,
    pub lock: LockMode,
}
impl FileOptions {
    pub fn cache(self, cache: CacheMode) -> Self {
        Self { cache, ..self }
    }
    pub fn lock(self, lock: LockMode) -> Self {
        Self { lock, ..self }
    }
}
#[derive(Debug)]
pub struct AlignedBuf(Vec<u8>);
impl AlignedBuf {
    pub fn new(len: usize, _align: usize) -> Self {
        Self(vec![0; len])
    }
}
impl std::ops::Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}
impl std::ops::DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}
#[derive(Debug)]
pub enum FileStorage {}
impl FileStorage {
    pub fn open(path: impl AsRef<Path>, _: &FileOptions) -> Result<Self> {
        Err(Error::unsupported(&path.as_ref().display().to_string(), "files", "soon"))
    }
    pub fn from_file(_: File, name: impl Into<String>, _: &FileOptions) -> Result<Self> {
        Err(Error::unsupported(&name.into(), "files", "soon"))
    }
}
impl Storage for FileStorage {
    fn name(&self) -> &str {
        match *self {}
    }
    fn caps(&self) -> StorageCaps {
        match *self {}
    }
    fn len(&self) -> Result<u64> {
        match *self {}
    }
    fn read_up_to(&self, _: &mut [u8], _: HostOffset) -> Result<usize> {
        match *self {}
    }
    fn write_at(&self, _: &[u8], _: HostOffset) -> Result<()> {
        match *self {}
    }
    fn write_zeroes(&self, _: HostOffset, _: u64, _: ZeroMode) -> Result<()> {
        match *self {}
    }
    fn discard(&self, _: HostOffset, _: u64) -> Result<()> {
        match *self {}
    }
    fn allocate(&self, _: HostOffset, _: u64) -> Result<()> {
        match *self {}
    }
    fn sync(&self) -> Result<()> {
        match *self {}
    }
    fn set_len(&self, _: u64) -> Result<()> {
        match *self {}
    }
    fn may_have_holes(&self) -> Result<bool> {
        match *self {}
    }
    fn extent_at(&self, _: HostOffset, _: u64) -> Result<StorageExtent> {
        match *self {}
    }
    fn allocated_bytes(&self) -> Result<u64> {
        match *self {}
    }
    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        match *self {}
    }
}
