//! What each request to the file means.

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
use crate::holes::{self, Sought};
use crate::lanes::{ChangeReply, Lanes};

/// Bytes of the largest request: what the kernel makes of it without `fs.fuse.max_pages_limit`
/// being raised.
const REQUEST_BYTES_MAX: u32 = 1 << 20;
/// Asynchronous requests that may be under way at a time.
const BACKGROUND_MAX: u16 = 256;
/// For so long the kernel need not ask for the attributes again. Its own changes it knows.
const ATTRIBUTES_HOLD: Duration = Duration::from_secs(1);
/// Blocks of `statfs`.
const BLOCK_BYTES: u64 = 4096;

/// The file that is the disk.
#[derive(Debug)]
pub struct DiskFile(pub Arc<Lanes>);

impl DiskFile {
    fn attributes(&self, reply: ReplyAttr) {
        let disk = self.0.export.hold();
        let attributes = self.0.attributes.of(&disk);
        drop(disk);
        reply.attr(&ATTRIBUTES_HOLD, &attributes);
    }
}

/// Answers who has made the file longer.
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
            // libaio's and io_uring's requests run beside each other.
            InitFlags::FUSE_ASYNC_DIO,
            // Files past the page cache may be mapped all the same.
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
        ] {
            // An older kernel goes without.
            let _ = config.add_capabilities(wanted);
        }
        // The nearest value that the other side takes is as good.
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
        // A smaller disk loses what lies beyond, which no program means that merely opens a file
        // with O_TRUNC; see `vdkit resize --shrink`.
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
        // Past the page cache of the mount: the bytes are in that of the image's files already,
        // and what other clients of the export write is seen at once.
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
        // More than was agreed on never comes; were it otherwise, the answer would be short.
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
        // O_SYNC holds this bit too, and the kernel sets it for RWF_DSYNC.
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
            // Space that is set aside for later writes is no part of the contract of images.
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
        let Some(sought) = Sought::of(whence) else { return reply.error(Errno::EINVAL) };
        let Ok(at) = u64::try_from(offset) else { return reply.error(Errno::ENXIO) };
        let lanes = Arc::clone(&self.0);
        self.0.pool.run(0, move || {
            let disk = lanes.export.hold();
            let found = holes::seek(&disk, at, sought);
            drop(disk);
            match found {
                // A disk is never as long as i64 reaches.
                Ok(at) => reply.offset(at as i64),
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let disk = self.0.export.hold();
        let (size, used) = (disk.guest_bytes(), allocated_bytes(&disk));
        drop(disk);
        let free = (size - used) / BLOCK_BYTES;
        let block = BLOCK_BYTES as u32;
        reply.statfs(size.div_ceil(BLOCK_BYTES), free, free, 1, 0, block, 255, block);
    }
}
