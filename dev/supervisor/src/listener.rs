//! The supervisor's end: receives calls and answers them.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use libc::{Ioctl, c_long};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// A system call waiting for an answer.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// The kernel's id of this call.
    pub id: u64,
    /// The calling thread.
    pub thread: u32,
    /// The system call number, such as `SYS_fdatasync`.
    pub number: c_long,
    /// Its arguments.
    pub arguments: [u64; 6],
}

/// Result of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// A call is waiting.
    Call,
    /// No call came in time.
    TimedOut,
    /// No supervised thread is left.
    Ended,
}

/// Receives calls.
#[derive(Debug)]
pub struct Listener(pub(crate) OwnedFd);

impl Listener {
    /// Waits for a call or for the end of the program; `None` waits indefinitely.
    ///
    /// # Errors
    /// Errors of poll(2).
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<Ready> {
        let timeout = timeout.map(|time| Timespec {
            tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: time.subsec_nanos().into(),
        });
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(0) | Err(Errno::INTR) => Ok(Ready::TimedOut),
            Ok(_) if fds[0].revents().contains(PollFlags::IN) => Ok(Ready::Call),
            Ok(_) => Ok(Ready::Ended),
            Err(errno) => Err(errno.into()),
        }
    }

    /// The next call; `None` if its thread was killed meanwhile.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn receive(&self) -> io::Result<Option<Call>> {
        // SAFETY: plain old data, for which all zeroes is a valid value, and which the kernel wants
        // to be zero.
        let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        match self.control(libc::SECCOMP_IOCTL_NOTIF_RECV, &mut call) {
            Ok(()) => Ok(Some(Call {
                id: call.id,
                thread: call.pid,
                number: call.data.nr.into(),
                arguments: call.data.args,
            })),
            Err(Errno::NOENT | Errno::INTR) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Lets the kernel execute the call.
    ///
    /// # Errors
    /// Errors of the system, except that the caller was killed meanwhile.
    pub fn proceed(&self, id: u64) -> io::Result<()> {
        self.send(id, 0, 0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32)
    }

    /// Returns `result` from the call without executing it.
    ///
    /// # Errors
    /// As [`Listener::proceed`].
    pub fn answer(&self, id: u64, result: Result<i64, Errno>) -> io::Result<()> {
        match result {
            Ok(value) => self.send(id, value, 0, 0),
            Err(errno) => self.send(id, 0, -errno.raw_os_error(), 0),
        }
    }

    fn send(&self, id: u64, val: i64, error: i32, flags: u32) -> io::Result<()> {
        let mut answer = libc::seccomp_notif_resp { id, val, error, flags };
        match self.control(libc::SECCOMP_IOCTL_NOTIF_SEND, &mut answer) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn control<T>(&self, request: Ioctl, data: &mut T) -> Result<(), Errno> {
        // SAFETY: the descriptor is open, and each request is made with the structure that
        // `seccomp_unotify(2)` names for it, alive for the time of the call.
        let done = unsafe { libc::ioctl(self.0.as_raw_fd(), request, std::ptr::from_mut(data)) };
        if done == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        Err(Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }
}
