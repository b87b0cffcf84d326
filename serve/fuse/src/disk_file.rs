//! The file's request handlers.

use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileHandle, Filesystem, FopenFlags, INodeNo, InitFlags, KernelConfig,
    LockOwner, OpenAccMode, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyLseek, ReplyOpen,
    ReplyStatfs, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use rustix::fs::{FallocateFlags, OFlags};

use crate::attributes::{NewAttributes, allocated_bytes};
use crate::dispatcher::{ChangeReply, Dispatcher};
use crate::holes;

/// Maximum request: the kernel's limit unless `fs.fuse.max_pages_limit` is raised.
const REQUEST_BYTES_MAX: u32 = 1 << 20;
/// Maximum asynchronous requests in flight.
const BACKGROUND_MAX: u16 = 256;
/// How long the kernel may cache attributes. It knows its own changes.
const ATTRIBUTES_HOLD: Duration = Duration::from_secs(1);
/// Block size of `statfs`.
const BLOCK_BYTES: u64 = 4096;

/// The disk as a file.
#[derive(Debug)]
pub struct DiskFile(pub Arc<Dispatcher>);

impl DiskFile {
    fn attributes(&self, reply: ReplyAttr) {
        // Also during a pause: a thread that waits here reads no other request.
        let attributes = self.0.attributes.of(&self.0.export.disk());
        reply.attr(&ATTRIBUTES_HOLD, &attributes);
    }
}

/// Reply to a request that grew the file.
struct Grown {
    file: DiskFile,
    new: NewAttributes,
    reply: ReplyAttr,
}

impl ChangeReply for Grown {
    fn done(self, _len: u64) {
        self.file.0.attributes.set(&self.new);
        self.file.attributes(self.reply);
    }
    fn failed(self, errno: Errno) {
        self.reply.error(errno);
    }
}

impl Filesystem for DiskFile {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        for wanted in [
            // Requests of libaio and io_uring run concurrently.
            InitFlags::FUSE_ASYNC_DIO,
            // Files with direct I/O may still be mapped.
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
        ] {
            // An older kernel lacks it.
            let _ = config.add_capabilities(wanted);
        }
        // The nearest accepted value is fine.
        let _ = config.set_max_write(REQUEST_BYTES_MAX);
        let _ = config.set_max_background(BACKGROUND_MAX);
        let _ = config.set_congestion_threshold(BACKGROUND_MAX);
        Ok(())
    }

    fn getattr(&self, _req: &Request, _ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        self.attributes(reply);
    }

    fn setattr(
        &self,
        _req: &Request,
        _ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        if self.0.has_ended() {
            return reply.error(Errno::EIO);
        }
        let new = NewAttributes { mode, uid, gid, atime, mtime };
        let Some(size) = size.filter(|size| *size != self.0.export.size()) else {
            self.0.attributes.set(&new);
            return self.attributes(reply);
        };
        // Shrinking would lose data, which a program that opens a file with O_TRUNC does not
        // expect; see `vdkit resize --shrink`.
        if self.0.export.read_only() {
            return reply.error(Errno::EROFS);
        }
        if !self.0.growable || size < self.0.export.size() {
            return reply.error(Errno::EPERM);
        }
        self.0.grow(size, Grown { file: Self(Arc::clone(&self.0)), new, reply });
    }

    fn open(&self, _req: &Request, _ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if flags.acc_mode() != OpenAccMode::O_RDONLY && self.0.export.read_only() {
            return reply.error(Errno::EROFS);
        }
        // Bypass the mount's page cache: the image files' page cache has the bytes already, and
        // writes of other clients are visible at once.
        let how = FopenFlags::FOPEN_DIRECT_IO
            | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
            | FopenFlags::FOPEN_NOFLUSH;
        reply.opened(FileHandle(0), how);
    }

    fn read(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if self.0.has_ended() {
            return reply.error(Errno::EIO);
        }
        // The kernel never exceeds the agreed size; otherwise the answer would be short.
        self.0.read(offset, u64::from(size.min(REQUEST_BYTES_MAX)), reply);
    }

    fn write(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if self.0.has_ended() {
            return reply.error(Errno::EIO);
        }
        // O_SYNC includes this bit, and the kernel sets it for RWF_DSYNC.
        let durable = flags.0 & OFlags::DSYNC.bits() as i32 != 0;
        self.0.write(offset, data, durable, reply);
    }

    fn fsync(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        if self.0.has_ended() {
            return reply.error(Errno::EIO);
        }
        self.0.flush(reply);
    }

    fn fallocate(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        if self.0.has_ended() {
            return reply.error(Errno::EIO);
        }
        if self.0.export.read_only() {
            return reply.error(Errno::EROFS);
        }
        let mode = FallocateFlags::from_bits_retain(mode as u32);
        let within = FallocateFlags::KEEP_SIZE;
        let past_end = offset.saturating_add(length) > self.0.export.size();
        if mode == FallocateFlags::PUNCH_HOLE | within {
            self.0.zero(offset, length, true, reply);
        } else if mode == FallocateFlags::ZERO_RANGE | within
            || (mode == FallocateFlags::ZERO_RANGE && !past_end)
        {
            self.0.zero(offset, length, false, reply);
        } else {
            // Images do not support preallocation for later writes.
            reply.error(Errno::EOPNOTSUPP);
        }
    }

    fn lseek(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        if self.0.has_ended() {
            return reply.error(Errno::EIO);
        }
        if whence != holes::SEEK_DATA && whence != holes::SEEK_HOLE {
            return reply.error(Errno::EINVAL);
        }
        let Ok(at) = u64::try_from(offset) else { return reply.error(Errno::ENXIO) };
        let dispatcher = Arc::clone(&self.0);
        self.0.pool.run(0, move || {
            match dispatcher.seek(at, whence == holes::SEEK_HOLE) {
                // A disk is always shorter than i64::MAX.
                Ok(at) => reply.offset(at as i64),
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let disk = self.0.export.disk();
        let (size, used) = (disk.guest_bytes(), allocated_bytes(&disk));
        drop(disk);
        let free = (size - used) / BLOCK_BYTES;
        let block = BLOCK_BYTES as u32;
        reply.statfs(size.div_ceil(BLOCK_BYTES), free, free, 1, 0, block, 255, block);
    }
}
