//! Images whose bytes the program itself reads and writes.

use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::sync::Arc;

use vdkit::{Disk, Error, HostOffset, IoAction, Result, Storage, StorageCaps, ZeroMode};

use crate::border::{self, User, call, given, misuse};
use crate::disk::vdkit_disk;
use crate::options::{opening, vdkit_open_options};

/// How an image's bytes are read and written. Functions return 0 for success (`size` and `pread` a
/// count), and the negative number of an error (-EIO, -ENOSPC, ...) otherwise; anything else is EIO. They
/// are called from any thread, and from several at once, and must not use the disk that stands on them.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vdkit_storage_ops {
    /// sizeof(vdkit_storage_ops), so that later versions can add functions.
    pub struct_size: usize,
    /// The length in bytes.
    pub size: Option<unsafe extern "C" fn(user: *mut c_void) -> i64>,
    /// Reads up to `len` bytes at `offset` and returns how many; fewer only at the end.
    pub pread: Option<
        unsafe extern "C" fn(user: *mut c_void, buf: *mut c_void, len: usize, offset: u64) -> i64,
    >,
    /// Writes all of `buf`, making the storage longer if needed. NULL if it cannot be written.
    pub pwrite: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            buf: *const c_void,
            len: usize,
            offset: u64,
        ) -> c_int,
    >,
    /// Makes bytes read as zero, also beyond the end, which moves. NULL writes zeroes instead.
    pub zero: Option<unsafe extern "C" fn(user: *mut c_void, len: u64, offset: u64) -> c_int>,
    /// Frees space; the bytes then read as zero or as before. NULL does nothing.
    pub discard: Option<unsafe extern "C" fn(user: *mut c_void, len: u64, offset: u64) -> c_int>,
    /// Makes all writes that have returned durable. NULL if they always are.
    pub sync: Option<unsafe extern "C" fn(user: *mut c_void) -> c_int>,
    /// Sets the length; new bytes read as zero. NULL if the length is fixed.
    pub set_size: Option<unsafe extern "C" fn(user: *mut c_void, size: u64) -> c_int>,
    /// Called once when the storage is not used any more. NULL does nothing.
    pub free: Option<unsafe extern "C" fn(user: *mut c_void)>,
}

/// Bytes written at a time where zeroes are written.
const ZEROES: usize = 64 << 10;

struct Callbacks {
    ops: vdkit_storage_ops,
    user: User,
    name: String,
    writable: bool,
}

impl fmt::Debug for Callbacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Callbacks").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Drop for Callbacks {
    fn drop(&mut self) {
        if let Some(free) = self.ops.free {
            // SAFETY: the program's own function with its own pointer, once.
            unsafe { free(self.user.0) };
        }
    }
}

impl Callbacks {
    fn judge(&self, action: IoAction, offset: u64, len: u64, answer: i64) -> Result<u64> {
        u64::try_from(answer).map_err(|_| {
            let code = i32::try_from(answer.unsigned_abs()).unwrap_or(libc::EIO);
            let source = io::Error::from_raw_os_error(code);
            Error::io(&self.name, action, offset, len, source)
        })
    }

    fn done(&self, action: IoAction, offset: u64, len: u64, answer: c_int) -> Result<()> {
        // A count, as pwrite() returns it, would hide a short write.
        let answer = if answer > 0 { -libc::EIO } else { answer };
        self.judge(action, offset, len, answer.into()).map(|_| ())
    }
}

impl Storage for Callbacks {
    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> StorageCaps {
        StorageCaps {
            writable: self.writable,
            growable: self.writable && self.ops.set_size.is_some(),
            remote: true,
            ..StorageCaps::default()
        }
    }

    fn len(&self) -> Result<u64> {
        let Some(size) = self.ops.size else { return Ok(0) };
        // SAFETY: the program's own function with its own pointer.
        self.judge(IoAction::Resize, 0, 0, unsafe { size(self.user.0) })
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        let Some(pread) = self.ops.pread else { return Ok(0) };
        let mut done = 0;
        while done < buf.len() {
            let (at, part) = (offset.0 + done as u64, &mut buf[done..]);
            let (to, len) = (part.as_mut_ptr().cast(), part.len());
            // SAFETY: the program's own function; the buffer is ours until it returns.
            let got = self.judge(IoAction::Read, at, len as u64, unsafe {
                pread(self.user.0, to, len, at)
            })?;
            // A count beyond the buffer, or an end before the end, is a fault of the program.
            match usize::try_from(got) {
                Ok(0) if at >= self.len()? => break,
                Ok(got @ 1..) if got <= len => done += got,
                _ => {
                    return self
                        .judge(IoAction::Read, at, len as u64, -i64::from(libc::EIO))
                        .map(|_| 0);
                }
            }
        }
        Ok(done)
    }

    fn write_at(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        let Some(pwrite) = self.ops.pwrite else {
            return Err(Error::ReadOnly { file: self.name.clone() });
        };
        // SAFETY: the program's own function; the buffer is not changed until it returns.
        let answer = unsafe { pwrite(self.user.0, buf.as_ptr().cast(), buf.len(), offset.0) };
        self.done(IoAction::Write, offset.0, buf.len() as u64, answer)
    }

    fn write_zeroes(&self, offset: HostOffset, len: u64, _mode: ZeroMode) -> Result<()> {
        if let Some(zero) = self.ops.zero {
            // SAFETY: the program's own function with its own pointer.
            let answer = unsafe { zero(self.user.0, len, offset.0) };
            return self.done(IoAction::WriteZeroes, offset.0, len, answer);
        }
        let zeroes = vec![0; ZEROES.min(usize::try_from(len).unwrap_or(ZEROES))];
        let mut at = 0;
        while at < len {
            let part =
                usize::try_from(len - at).map_or(zeroes.len(), |left| left.min(zeroes.len()));
            self.write_at(&zeroes[..part], offset + at)?;
            at += part as u64;
        }
        Ok(())
    }

    fn discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        let Some(discard) = self.ops.discard else { return Ok(()) };
        // SAFETY: the program's own function with its own pointer.
        let answer = unsafe { discard(self.user.0, len, offset.0) };
        self.done(IoAction::Discard, offset.0, len, answer)
    }

    fn allocate(&self, offset: HostOffset, len: u64) -> Result<()> {
        let end = offset.0.saturating_add(len);
        if end > self.len()? { self.set_len(end) } else { Ok(()) }
    }

    fn set_len(&self, len: u64) -> Result<()> {
        let Some(set_size) = self.ops.set_size else {
            return Err(Error::unsupported(
                &self.name,
                "the length of this storage is fixed",
                "give it a function set_size",
            ));
        };
        // SAFETY: the program's own function with its own pointer.
        let answer = unsafe { set_size(self.user.0, len) };
        self.done(IoAction::Resize, len, 0, answer)
    }

    fn sync(&self) -> Result<()> {
        let Some(sync) = self.ops.sync else { return Ok(()) };
        // SAFETY: the program's own function with its own pointer.
        let answer = unsafe { sync(self.user.0) };
        self.done(IoAction::Sync, 0, 0, answer)
    }
}

/// Opens an image whose bytes the program reads and writes. `ops` is copied; `user` is passed to its
/// functions, and must live until `free` is called, which happens also if this function fails (but not
/// where `ops`, `name` or `disk` is wrong). `name` is for messages. References within the image reach only folders that the options allow.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_open_storage(
    ops: *const vdkit_storage_ops,
    user: *mut c_void,
    name: *const c_char,
    options: Option<&vdkit_open_options>,
    disk: Option<&mut MaybeUninit<*mut vdkit_disk>>,
) -> c_int {
    call(|| {
        let place = border::place_of(disk)?;
        let user = User(user);
        // SAFETY: the header's promise: `struct_size` bytes are there.
        let ops = unsafe { read_ops(ops) }?;
        let options = opening(options);
        let writable = options.writable;
        // SAFETY: the header's promise.
        let name = unsafe { border::text(name, "name") }?.to_owned();
        if ops.size.is_none() || ops.pread.is_none() || (writable && ops.pwrite.is_none()) {
            return Err(misuse(
                "a storage needs the functions size and pread, and pwrite for writing",
            ));
        }
        let storage = Arc::new(Callbacks { ops, user, name, writable });
        let opened = Disk::open_storage(&vdkit::registry(), storage, &options)?;
        place.write(vdkit_disk::new(opened));
        Ok(())
    })
}

/// The functions of a program that may have been compiled against a shorter struct.
///
/// # Safety
/// `ops` is NULL or points to as many bytes as its first member says.
unsafe fn read_ops(ops: *const vdkit_storage_ops) -> Result<vdkit_storage_ops> {
    let first = given((!ops.is_null()).then_some(ops), "ops")?;
    // SAFETY: the first member is there in every version.
    let bytes = unsafe { first.cast::<usize>().read() };
    if bytes < size_of::<usize>() || !bytes.is_multiple_of(size_of::<usize>()) {
        return Err(misuse("struct_size of the functions is not set"));
    }
    if bytes > size_of::<vdkit_storage_ops>() {
        return Err(misuse(
            "the program knows more functions than this libvdkit, which is too old",
        ));
    }
    let mut known = vdkit_storage_ops {
        struct_size: size_of::<vdkit_storage_ops>(),
        size: None,
        pread: None,
        pwrite: None,
        zero: None,
        discard: None,
        sync: None,
        set_size: None,
        free: None,
    };
    // SAFETY: both have that many bytes, and a function pointer of zero bytes is `None`.
    unsafe {
        std::ptr::copy_nonoverlapping(first.cast::<u8>(), (&raw mut known).cast::<u8>(), bytes);
    }
    Ok(known)
}
