//! Mounting, serving, and unmounting.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fuser::{Config, MountOption, Session, SessionACL, SessionUnmounter};
use parking_lot::Mutex;
use rustix::event::PollFlags;
use vdkit_block::OwnerProcess;
use vdkit_serve::{Client, Export, peer_has_left};

use crate::attributes::Attributes;
use crate::disk_file::DiskFile;
use crate::dispatcher::Dispatcher;
use crate::mount_point::{MountError, MountPoint, Unmounted};

/// Threads that read requests. One per processor runs non-blocking requests in parallel; more only
/// wake each other up.
const READERS_MAX: usize = 8;
const READERS_MIN: usize = 2;
/// Minimum time for started requests at the end, even if `patience` is over.
const LAST_WORK: Duration = Duration::from_secs(1);

/// Options of a mount.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ServerOptions {
    /// Other users may access the file, as its permissions allow.
    pub allow_other: bool,
    /// Writing past the end, and setting a larger size, grows the disk.
    pub growable: bool,
}

/// How the end of a mount affected its users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The file was not open any more, and all requests were done.
    Clean,
    /// The file was still open at the timeout, or requests went on; further access fails.
    InUse,
}

/// A mounted disk. Dropping it without [`Server::stop`] unmounts it without waiting; in a child of `fork`,
/// it leaves the parent's mount alone.
#[derive(Debug)]
pub struct Server {
    dispatcher: Arc<Dispatcher>,
    point: MountPoint,
    unmounter: SessionUnmounter,
    /// `None` after it was joined.
    session: Option<JoinHandle<io::Result<()>>>,
    ended: mpsc::Receiver<()>,
    /// The kernel's file that aborts the connection.
    abort: Option<PathBuf>,
    owner: OwnerProcess,
}

impl Server {
    /// Mounts an export over a regular file. A missing file is created, and removed at the end. On
    /// return the disk is usable.
    ///
    /// # Errors
    /// See [`MountError`].
    pub fn start(
        export: Arc<Export>,
        file: &Path,
        options: &ServerOptions,
    ) -> Result<Self, MountError> {
        if let Err(source) = std::fs::metadata("/dev/fuse") {
            return Err(MountError::NoFuse { source });
        }
        let point = MountPoint::prepare(file)?;
        let config = config_of(&export, options);
        let mut owner = point.owner();
        if export.read_only() {
            owner.permissions &= !0o222;
        }
        let attributes = Attributes::new(owner);
        let device = Arc::new(Mutex::new(None));
        let watched = Arc::clone(&device);
        let client = Arc::new(Client::new(move || watched.lock().as_ref().is_some_and(is_cut_off)));
        let dispatcher =
            Arc::new(Dispatcher::new(export, Arc::clone(&client), attributes, options.growable));
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => MountError::NoHelper { file: file.to_owned() },
            _ => MountError::Mount { file: file.to_owned(), source },
        };
        let disk_file = DiskFile(Arc::clone(&dispatcher));
        let mut session = Session::new(disk_file, point.path(), &config).map_err(failed)?;
        *device.lock() = Some(session.as_fd().try_clone_to_owned().map_err(failed)?);
        let unmounter = session.unmount_callable();
        let (tell, ended) = mpsc::channel();
        let served = Arc::clone(&dispatcher);
        let session = std::thread::Builder::new()
            .name("fuse".to_owned())
            .spawn(move || {
                let done = session.run();
                // Changes still kept for the mount must not overwrite later writes.
                served.export.forget(&client);
                // The kernel would wait for answers while a descriptor is open.
                device.lock().take();
                // After a timeout there is no receiver.
                let _ = tell.send(());
                done
            })
            .map_err(failed)?;
        let abort = rustix::fs::stat(point.path()).ok().map(|stat| {
            let number = rustix::fs::minor(stat.st_dev);
            PathBuf::from(format!("/sys/fs/fuse/connections/{number}/abort"))
        });
        let (session, owner) = (Some(session), OwnerProcess::current());
        Ok(Self { dispatcher, point, unmounter, session, ended, abort, owner })
    }

    /// The file's absolute path.
    pub fn file(&self) -> &Path {
        self.point.path()
    }

    /// Whether another process has unmounted it.
    pub fn finished(&self) -> bool {
        self.session.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Ends the service. Unmounts the file, waits until it is closed (at most `patience`), and then
    /// for requests that have begun: until `patience` is over, but at least a second. The export is
    /// neither flushed nor closed.
    ///
    /// # Errors
    /// The system refuses to unmount; the mount ended by an error of its own; in a child of `fork`.
    pub fn stop(mut self, patience: Duration) -> io::Result<Ending> {
        if !self.owner.is_current() {
            let what = "the parent of this process mounted it, and only the parent can unmount it";
            return Err(io::Error::other(what));
        }
        let began = Instant::now();
        self.unmount()?;
        let session = self.session.take();
        let clean = match self.ended.recv_timeout(patience) {
            Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => true,
            Err(mpsc::RecvTimeoutError::Timeout) => false,
        };
        self.dispatcher.ended.store(true, Ordering::Relaxed);
        let mut failed = Ok(());
        if clean {
            let panicked = |_| Err(io::Error::other("its thread panicked"));
            failed = session.map_or(Ok(()), |session| session.join().unwrap_or_else(panicked));
        } else if let Some(abort) = &self.abort {
            // Waiting processes get an error at once. If this fails, the end of this process has
            // the same effect.
            let _ = std::fs::write(abort, "1");
        }
        let rest = patience.saturating_sub(began.elapsed()).max(LAST_WORK);
        let drained = self.dispatcher.pool.close(rest);
        failed?;
        Ok(if clean && drained { Ending::Clean } else { Ending::InUse })
    }

    fn unmount(&mut self) -> io::Result<()> {
        if !self.finished() && self.point.unmount()? == Unmounted::NotAllowed {
            self.unmounter.unmount()?;
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.owner.is_current() {
            // A thread of the parent can be neither joined nor detached here.
            return std::mem::forget(self.session.take());
        }
        if let Err(error) = self.unmount() {
            tracing::warn!("{}: cannot be unmounted: {error}", self.point.path().display());
        }
    }
}

/// Whether the kernel has closed the connection: a forced unmount, or an abort. POLLERR shows it
/// even if no thread reads from the device.
fn is_cut_off(device: &OwnedFd) -> bool {
    peer_has_left(device, PollFlags::empty())
}

fn config_of(export: &Export, options: &ServerOptions) -> Config {
    let mut config = Config::default();
    // A comma would begin another option.
    let name = export.filename().replace([',', '\\'], "_");
    config.mount_options = vec![
        MountOption::FSName(format!("vdkit:{name}")),
        MountOption::Subtype("vdkit".to_owned()),
        MountOption::DefaultPermissions,
        MountOption::NoSuid,
        MountOption::NoDev,
        MountOption::NoExec,
    ];
    if export.read_only() {
        config.mount_options.push(MountOption::RO);
    }
    if options.allow_other {
        config.acl = SessionACL::All;
    }
    let processors = std::thread::available_parallelism().map_or(READERS_MIN, usize::from);
    config.n_threads = Some(processors.clamp(READERS_MIN, READERS_MAX));
    // Each thread gets its own descriptor, if this user may open the device. (The first one may
    // come from fusermount.)
    let open = std::fs::OpenOptions::new().read(true).write(true).open("/dev/fuse");
    config.clone_fd = open.is_ok();
    config
}
