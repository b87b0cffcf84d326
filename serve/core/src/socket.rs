//! Listening Unix sockets, and waking threads that wait for connections.

use std::fs;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use rustix::io::retry_on_intr;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use vdkit_block::OwnerProcess;

/// Maximum pending connections.
const BACKLOG: i32 = 128;

/// Pause after a failed accept (such as too many open files).
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Access to a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// As the umask and the folder allow.
    Usual,
    /// Mode 0600 from the start.
    Owner,
}

/// A listening Unix socket. Dropping it removes its name, unless the name belongs to another socket
/// by then, or this is a child of `fork`, whose parent still listens.
#[derive(Debug)]
pub struct UnixSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the name.
    inode: (u64, u64),
    owner: OwnerProcess,
}

impl UnixSocket {
    /// Listens at a path. Replaces a socket without a listener; any other file stays.
    ///
    /// # Errors
    /// `AlreadyExists` if another kind of file is there; `AddrInUse` if another process listens;
    /// errors of the system.
    pub fn bind(path: &Path, access: Access) -> io::Result<Self> {
        remove_stale(path)?;
        let flags = SocketFlags::CLOEXEC;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        if access == Access::Owner {
            // Before bind: Linux creates the name with the socket's own mode.
            rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
        }
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        let metadata = fs::symlink_metadata(path)?;
        let inode = (metadata.dev(), metadata.ino());
        // Before listen: an error removes the name.
        let (listener, path) = (UnixListener::from(socket), path.to_owned());
        let bound = Self { listener, path, inode, owner: OwnerProcess::current() };
        rustix::net::listen(&bound.listener, BACKLOG)?;
        Ok(bound)
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Deref for UnixSocket {
    type Target = UnixListener;
    fn deref(&self) -> &UnixListener {
        &self.listener
    }
}

impl AsFd for UnixSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for UnixSocket {
    fn drop(&mut self) {
        let ours = || {
            fs::symlink_metadata(&self.path)
                .is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == self.inode)
        };
        if self.owner.is_current() && ours() {
            // A name without a listener may be replaced.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Wakes threads that wait at sockets. It does not shut the sockets down: a socket handed over by
/// systemd is passed on to the service's next process, and a shut-down socket accepts no
/// connection, whichever process holds it. Nor is the end the closing of a descriptor: a child of `fork`
/// may have that too.
#[derive(Debug)]
pub struct Wake(OwnedFd);

impl Wake {
    /// A new, unset waker.
    ///
    /// # Errors
    /// Too many open files.
    pub fn new() -> io::Result<Self> {
        Ok(Self(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Wakes all current and future waiters.
    pub fn wake(&self) {
        // Fails only on counter overflow, which is unreachable.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Waits for a connection, or for what else can be read; `false` at the end. The descriptor must be
    /// non-blocking: the connection may close before it is accepted.
    ///
    /// # Errors
    /// Errors of poll(2).
    pub fn wait_at(&self, at: impl AsFd) -> io::Result<bool> {
        Ok(self.wait(Some(at.as_fd()), None)?.is_some())
    }

    /// Waits for a connection and accepts it; `None` at the end. `who` is for messages. The socket must
    /// be non-blocking.
    pub fn accept<S>(
        &self,
        who: &str,
        at: impl AsFd,
        accept: impl Fn() -> io::Result<S>,
    ) -> Option<S> {
        loop {
            let came = match self.wait_at(&at) {
                Ok(true) => accept(),
                Ok(false) => return None,
                Err(error) => Err(error),
            };
            match came {
                Ok(socket) => return Some(socket),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    tracing::warn!("{who}: a connection was not accepted: {error}");
                    // It is still pending: without a pause this would spin.
                    if !self.pause(ACCEPT_PAUSE) {
                        return None;
                    }
                }
            }
        }
    }

    /// Waits at most `time` for something to read: whether there is; `None` at the end.
    ///
    /// # Errors
    /// Errors of poll(2).
    pub fn wait_within(&self, at: impl AsFd, time: Duration) -> io::Result<Option<bool>> {
        self.wait(Some(at.as_fd()), Some(time))
    }

    /// Sleeps; `false` at the end.
    pub fn pause(&self, time: Duration) -> bool {
        let Ok(left) = self.wait(None, Some(time)) else {
            std::thread::sleep(time);
            return true;
        };
        left.is_some()
    }

    fn wait(&self, at: Option<BorrowedFd<'_>>, time: Option<Duration>) -> io::Result<Option<bool>> {
        let time = time.and_then(|time| Timespec::try_from(time).ok());
        let own = self.0.as_fd();
        let mut fds =
            [own, at.unwrap_or(own)].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        retry_on_intr(|| poll(&mut fds, time.as_ref()))?;
        let [woken, came] = fds.map(|fd| !fd.revents().is_empty());
        Ok((!woken).then_some(came))
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A thread that works until it is woken. Dropping this wakes it and waits for its end; in a child
/// of `fork`, whose parent has the thread, that does nothing.
#[derive(Debug)]
#[must_use = "dropping it ends the thread"]
pub struct Worker {
    wake: Arc<Wake>,
    /// `None` once it was joined or given up.
    thread: Option<JoinHandle<()>>,
    owner: OwnerProcess,
}

impl Worker {
    /// Starts a thread. Its work ends soon after the [`Wake`] that it gets was woken.
    ///
    /// # Errors
    /// Too many open files; no thread can be created.
    pub fn start(name: &str, work: impl FnOnce(&Wake) + Send + 'static) -> io::Result<Self> {
        let wake = Arc::new(Wake::new()?);
        let woken = wake.clone();
        let named = std::thread::Builder::new().name(name.to_owned());
        let thread = named.spawn(move || work(&woken))?;
        Ok(Self { wake, thread: Some(thread), owner: OwnerProcess::current() })
    }

    /// Wakes the thread, and joins it if `ended` says that its work has ended; otherwise it goes on
    /// alone. Returns whether it was joined, without a panic. In a child of `fork`, does nothing
    /// and returns `false`.
    pub fn stop(mut self, ended: impl FnOnce() -> bool) -> bool {
        if !self.owner.is_current() {
            return false;
        }
        self.wake.wake();
        // Taken in any case, so that dropping this waits for nothing.
        let thread = self.thread.take();
        ended() && thread.is_some_and(|own| own.join().is_ok())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if !self.owner.is_current() {
            // A thread of the parent cannot be joined here.
            return std::mem::forget(thread);
        }
        self.wake.wake();
        let _ = thread.join();
    }
}

/// Whether the peer of a descriptor has left: it hung up, or there is an error, or one of `events`.
/// Does not wait.
pub fn peer_has_left(at: impl AsFd, events: PollFlags) -> bool {
    let mut fds = [PollFd::new(&at, events)];
    // If poll fails, assume that the peer is there: receiving reports errors.
    let asked = poll(&mut fds, Some(&Timespec::default())).is_ok();
    asked && fds[0].revents().intersects(events | PollFlags::HUP | PollFlags::ERR)
}

/// Removes a socket left by a dead service. A refused connection alone proves nothing: plain files
/// refuse connections too.
fn remove_stale(path: &Path) -> io::Result<()> {
    let Ok(metadata) = fs::symlink_metadata(path) else { return Ok(()) };
    if !metadata.file_type().is_socket() {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            format!("{} exists and is no socket", path.display()),
        ));
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        _ => Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            format!("somebody listens on {} already", path.display()),
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn only_a_dead_socket_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let first = UnixSocket::bind(&path, Access::Usual).unwrap();
        let taken = UnixSocket::bind(&path, Access::Usual).unwrap_err();
        assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
        // As a killed service leaves it.
        let left = folder.path().join("left");
        fs::hard_link(&path, &left).unwrap();
        drop(first);
        assert!(!path.exists() && left.exists());
        drop(UnixSocket::bind(&left, Access::Usual).unwrap());

        for kind in ["file", "folder", "link"] {
            let path = folder.path().join(kind);
            match kind {
                "file" => fs::write(&path, b"precious").unwrap(),
                "folder" => fs::create_dir(&path).unwrap(),
                _ => std::os::unix::fs::symlink(folder.path().join("file"), &path).unwrap(),
            }
            let error = UnixSocket::bind(&path, Access::Owner).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists, "{kind}");
        }
        assert_eq!(fs::read(folder.path().join("link")).unwrap(), b"precious");
    }

    #[test]
    fn a_socket_outlives_the_waiting_at_it() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let wake = Wake::new().unwrap();
        let bound = listener.local_addr().unwrap();
        let first = std::net::TcpStream::connect(bound).unwrap();
        assert!(wake.wait_at(&listener).unwrap());
        listener.accept().unwrap();
        drop(first);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| wake.wait_at(&listener).unwrap());
            wake.wake();
            assert!(!waits.join().unwrap(), "nobody came");
        });
        assert!(!wake.wait_at(&listener).unwrap() && !wake.pause(Duration::from_secs(600)));
        // The next waiter is woken.
        let next = Wake::new().unwrap();
        let _second = std::net::TcpStream::connect(bound).unwrap();
        assert!(next.wait_at(&listener).unwrap() && listener.accept().is_ok());
        assert!(next.pause(Duration::ZERO));
    }

    #[test]
    fn anothers_name_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let first = UnixSocket::bind(&path, Access::Usual).unwrap();
        fs::remove_file(&path).unwrap();
        let second = UnixSocket::bind(&path, Access::Usual).unwrap();
        drop(first);
        assert!(UnixStream::connect(second.path()).is_ok());
    }

    #[test]
    fn a_child_of_fork_removes_no_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let mut socket = Some(UnixSocket::bind(&path, Access::Usual).unwrap());
        assert!(vdkit_testkit::in_child(|| (), || socket.take().is_some()));
        assert!(socket.is_some() && UnixStream::connect(&path).is_ok());
    }

    #[test]
    fn an_owners_socket_is_the_owners() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let _socket = UnixSocket::bind(&path, Access::Owner).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
