//! What is between the load and the image: nothing, a server, or a guest.

mod guest;
pub mod qmp;
mod serve;

use std::path::Path;
use std::time::Duration;

use crate::error::{Context, Result};
use rustix::fs::{Mode, OFlags};
use vdkit_block::CacheMode;

pub use guest::{Booted, Bus, FIO_OF_NOTHING, Guest, GuestSpeed, Output, Source, guest_speed};

use crate::engine::Bench;
use crate::fio::Disk;
use crate::layout::Image;
use crate::peers::{need, need_fuse, skip};
use crate::process::{Running, cpu_seconds};

/// A path from the load to the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Front {
    /// Its name in plans.
    pub name: &'static str,
    /// What it is.
    pub about: &'static str,
    /// What serves the image.
    pub kind: Kind,
}

/// What serves an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Nothing: the load opens the file or the device.
    File,
    /// vdkit's library in the process that makes the load.
    InProcess,
    /// An NBD server at a Unix socket.
    Nbd(Server),
    /// The disk as one plain file, over FUSE.
    Fuse(Server),
    /// A guest under QEMU.
    Guest(Bus, Source),
}

/// A program that serves images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    /// `vdkit serve`, `vdkit mount`.
    Vdkit,
    /// `qemu-nbd`.
    QemuNbd,
    /// `qemu-storage-daemon`.
    StorageDaemon(Aio),
    /// `nbdkit`, which serves raw images.
    Nbdkit,
}

/// How QEMU reads and writes the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aio {
    /// Threads, QEMU's default.
    Threads,
    /// Linux AIO, which is only asynchronous with O_DIRECT.
    Native,
    /// io_uring.
    Uring,
}

impl Aio {
    /// Options of QEMU's file node.
    fn option(self) -> &'static str {
        match self {
            Self::Threads => "",
            Self::Native => ",aio=native",
            Self::Uring => ",aio=io_uring",
        }
    }
}

const fn front(name: &'static str, about: &'static str, kind: Kind) -> Front {
    Front { name, about, kind }
}

/// Every front that plans may name.
pub static FRONTS: &[Front] = &[
    front("file", "the load opens the file or device itself (raw images)", Kind::File),
    front("in-process", "vdkit's library, in the process of the load", Kind::InProcess),
    front("nbd", "vdkit serve over NBD", Kind::Nbd(Server::Vdkit)),
    front("nbd-qemu-nbd", "qemu-nbd", Kind::Nbd(Server::QemuNbd)),
    front(
        "nbd-qsd",
        "qemu-storage-daemon over NBD",
        Kind::Nbd(Server::StorageDaemon(Aio::Threads)),
    ),
    front(
        "nbd-qsd-native",
        "qemu-storage-daemon over NBD; the image has cache none, aio=native, as for many guests",
        Kind::Nbd(Server::StorageDaemon(Aio::Native)),
    ),
    front(
        "nbd-qsd-uring",
        "qemu-storage-daemon over NBD; the image has cache none, aio=io_uring",
        Kind::Nbd(Server::StorageDaemon(Aio::Uring)),
    ),
    front("nbd-nbdkit", "nbdkit (raw images)", Kind::Nbd(Server::Nbdkit)),
    front("fuse", "vdkit mount: the disk as a file", Kind::Fuse(Server::Vdkit)),
    front(
        "fuse-qsd",
        "qemu-storage-daemon: the disk as a file",
        Kind::Fuse(Server::StorageDaemon(Aio::Threads)),
    ),
    front(
        "guest-virtio",
        "a guest's virtio disk; QEMU opens the image",
        Kind::Guest(Bus::Virtio, Source::Qemu),
    ),
    front(
        "guest-scsi",
        "a guest's SCSI disk (virtio-scsi); QEMU opens the image",
        Kind::Guest(Bus::Scsi, Source::Qemu),
    ),
    front(
        "guest-ide",
        "a guest's IDE disk; QEMU opens the image",
        Kind::Guest(Bus::Ide, Source::Qemu),
    ),
    front(
        "guest-vhost-user",
        "a guest's virtio disk, served by vdkit (vhost-user)",
        Kind::Guest(Bus::Virtio, Source::VhostUser),
    ),
    front(
        "guest-nbd",
        "a guest's virtio disk, served by vdkit over NBD",
        Kind::Guest(Bus::Virtio, Source::Nbd(Server::Vdkit)),
    ),
    front(
        "guest-qemu-nbd",
        "a guest's virtio disk, served by qemu-nbd",
        Kind::Guest(Bus::Virtio, Source::Nbd(Server::QemuNbd)),
    ),
    front(
        "guest-virtio-report",
        "a guest's virtio disk, QEMU opens the image and reports errors to the guest (werror=report)",
        Kind::Guest(Bus::Virtio, Source::QemuReporting),
    ),
];

/// The front of this name.
pub fn find(name: &str) -> Option<&'static Front> {
    FRONTS.iter().find(|front| front.name == name)
}

impl Server {
    /// Whether its program is installed.
    fn available(self) -> Result<()> {
        let program = match self {
            Self::Vdkit => return Ok(()),
            Self::QemuNbd => "qemu-nbd",
            Self::StorageDaemon(_) => "qemu-storage-daemon",
            Self::Nbdkit => "nbdkit",
        };
        need(program).map(drop)
    }
}

impl Front {
    /// Whether this host has what the front needs, as far as is known before a run.
    ///
    /// # Errors
    /// [`crate::Error::Skipped`] with what is missing.
    pub fn available(&self) -> Result<()> {
        match self.kind {
            Kind::File | Kind::InProcess => Ok(()),
            Kind::Nbd(server) => server.available(),
            Kind::Fuse(server) => need_fuse().and_then(|()| server.available()),
            Kind::Guest(_, source) => {
                guest::available()?;
                if let Source::Nbd(server) = source { server.available() } else { Ok(()) }
            }
        }
    }

    /// The cache mode for plans that do not vary it: QEMU's default, or `none` where asynchronous I/O
    /// needs it.
    pub fn default_cache(&self) -> &'static str {
        match self.kind {
            Kind::Nbd(Server::StorageDaemon(Aio::Native | Aio::Uring)) => "none",
            _ => "writeback",
        }
    }

    /// Number of programs that must run besides the guest's QEMU, or besides the program that opens
    /// the disk.
    pub fn daemons(&self) -> u32 {
        match self.kind {
            Kind::File | Kind::InProcess => 0,
            Kind::Guest(_, Source::Qemu | Source::QemuReporting) => 0,
            Kind::Nbd(_) | Kind::Fuse(_) | Kind::Guest(..) => 1,
        }
    }
}

/// The disk that the load uses.
#[derive(Debug)]
pub enum Target {
    /// A file, a device or an NBD export.
    Disk(Disk),
    /// An image that the library opens.
    InProcess {
        /// The image.
        image: Image,
        /// The cache mode.
        cache: CacheMode,
    },
    /// A guest with the disk.
    Guest(Box<Guest>),
}

/// A served image.
#[derive(Debug)]
pub struct Served {
    /// The disk for the load.
    pub target: Target,
    server: Option<Running>,
    cpu_before: f64,
}

impl Served {
    fn by(target: Target, server: Option<Running>) -> Self {
        let cpu_before = server.as_ref().and_then(|s| cpu_seconds(s.pid())).unwrap_or(0.0);
        Self { target, server, cpu_before }
    }

    /// Processor time of the server since it was ready, in seconds. None without a server.
    pub fn server_cpu_seconds(&self) -> Option<f64> {
        // With a guest, one process runs the guest's processor and serves its disk, so the server's
        // share is not known.
        let server = self.server.as_ref()?;
        Some((cpu_seconds(server.pid())? - self.cpu_before).max(0.0))
    }

    /// Stops the server. Returns how long that took, which includes writing out held-back data.
    pub fn end(mut self) -> Option<Duration> {
        self.server.as_mut().map(Running::end)
    }
}

/// Longest time until a server is ready.
const READY: Duration = Duration::from_secs(60);

/// Starts what serves the image.
///
/// # Errors
/// [`crate::Error::Skipped`] if the front is not possible here; the server's error message.
pub fn start(
    bench: &mut Bench<'_>,
    front: &Front,
    image: &Image,
    cache: CacheMode,
) -> Result<Served> {
    if cache.direct() {
        need_direct(&image.path)?;
    }
    match front.kind {
        Kind::File => file(image, cache),
        Kind::InProcess => Ok(Served::by(Target::InProcess { image: image.clone(), cache }, None)),
        Kind::Nbd(server) => {
            let socket = bench.folder.join("nbd.sock");
            let running = serve::nbd(bench, server, image, cache, &socket)?;
            let name = if matches!(server, Server::StorageDaemon(_)) { "disk" } else { "" };
            let uri = format!("nbd+unix:///{name}?socket={}", socket.display());
            Ok(Served::by(Target::Disk(Disk::Nbd(uri)), Some(running)))
        }
        Kind::Fuse(server) => {
            need_fuse()?;
            let path = bench.folder.join("fuse.raw");
            let running = serve::fuse(bench, server, image, cache, &path)?;
            // The server implements the cache mode; a second cache above it would hide the effect.
            let disk = Disk::File { path: name_of(&path)?.to_owned(), cache: CacheMode::None };
            Ok(Served::by(Target::Disk(disk), Some(running)))
        }
        Kind::Guest(bus, source) => {
            let (guest, server) = guest::prepare(bench, bus, source, image, cache)?;
            Ok(Served::by(Target::Guest(Box::new(guest)), server))
        }
    }
}

fn file(image: &Image, cache: CacheMode) -> Result<Served> {
    if image.format != "raw" {
        return skip(format!(
            "a program that opens the file sees the bytes of the {} image, not those of the disk",
            image.format
        ));
    }
    let disk = Disk::File { path: name_of(&image.path)?.to_owned(), cache };
    Ok(Served::by(Target::Disk(disk), None))
}

/// A path as text, for the command lines of programs that take it within an option.
fn name_of(path: &Path) -> Result<&str> {
    path.to_str().context("a name that is not UTF-8")
}

/// Whether the place supports O_DIRECT.
fn need_direct(path: &Path) -> Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(_) => Ok(()),
        Err(rustix::io::Errno::INVAL) => skip(
            "the file system does not let files be opened with O_DIRECT, so this cache mode fails",
        ),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}
