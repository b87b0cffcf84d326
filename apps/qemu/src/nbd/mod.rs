//! `qemu-nbd`: serves one image over NBD until the last client leaves.

mod background;
mod kernel;
mod list;
mod pid_file;
pub mod tls;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use vdkit::jobs::{CreateOptions, NewBacking, create};
use vdkit::nbd::{Address, Exports, Listener, Server, ServerOptions, Tls};
use vdkit::serve::{Export, ExportOptions, OnNoSpace};
use vdkit::{CacheMode, CancelToken, Disk, Monitor, OpenOptions};

use crate::failure::{Failure, system_words, words};
use crate::getopt::{self, Opt, Parsed, flag, long, valued};
use crate::open::{self, Access, Named, format_of, open_options};
use crate::output::{Output, end_on_signal, say};
use crate::secrets::Objects;
use crate::snapshots::SnapshotChoice;
use crate::storages::{DiskStorage, PartOf};
use crate::{sizes, sockets};

const PROGRAM: &str = "qemu-nbd";

const PORT: &str = "10809";

/// Interval between two checks for the end.
const POLL: Duration = Duration::from_millis(20);

/// The time limit of a negotiation that has none.
const NO_LIMIT: Duration = Duration::from_secs(365 * 24 * 3600);

/// How long the last requests may take at the end.
const DRAIN: Duration = Duration::from_secs(30);

const OPTIONS: &[Opt] = &[
    flag('h', "help", "print this help"),
    flag('V', "version", "print the version"),
    valued('p', "port", "PORT", "TCP port (default 10809)"),
    valued('b', "bind", "ADDRESS", "address to listen at (default 0.0.0.0)"),
    valued('k', "socket", "PATH", "listen at this Unix socket"),
    valued('e', "shared", "N", "clients at once, others wait; 0 for any number (default 1)"),
    flag('t', "persistent", "go on when the last client has left"),
    flag('v', "verbose", "with -c: stay in the foreground, and report when it is attached"),
    valued('x', "export-name", "NAME", "name of the export (default: empty)"),
    valued('D', "description", "TEXT", "description of the export"),
    long("handshake-limit", Some("SECONDS"), "time limit of the negotiation; 0 for none"),
    valued('o', "offset", "OFFSET", "serve from this offset on"),
    flag('A', "allocation-depth", "accepted: the allocation depth is always there"),
    valued('B', "bitmap", "NAME", "let clients query this dirty bitmap (repeatable)"),
    flag('L', "list", "list the exports of a server"),
    long("object", Some("OBJDEF"), "a secret or credentials (repeatable)"),
    long("tls-creds", Some("ID"), "require TLS with these credentials"),
    long("tls-authz", Some("ID"), "clients whose certificate this object admits may connect"),
    long("tls-hostname", Some("NAME"), "--list: the name in the server's certificate"),
    valued('T', "trace", "TRACE", "accepted; vdkit has no trace events of QEMU"),
    long("fork", None, "serve in the background; return when clients can connect"),
    long("pid-file", Some("PATH"), "write the server's process id to this file"),
    long("selinux-label", Some("LABEL"), "not supported"),
    valued('c', "connect", "DEV", "make it a device of the kernel (/dev/nbd0 …)"),
    flag('d', "disconnect", "detach the device that is named"),
    valued('f', "format", "FORMAT", "format of the image"),
    flag('r', "read-only", "refuse writes"),
    flag('s', "snapshot", "writes go to a temporary overlay"),
    valued('l', "load-snapshot", "SNAPSHOT", "serve this internal snapshot, read-only"),
    flag('n', "nocache", "as --cache=none"),
    long("cache", Some("MODE"), "cache mode"),
    long("aio", Some("MODE"), "accepted: native, io_uring or threads"),
    long("discard", Some("MODE"), "ignore or unmap; vdkit always frees what clients trim"),
    long("detect-zeroes", Some("MODE"), "off, on or unmap"),
    long("image-opts", None, "FILE is options: driver=…,file.filename=…"),
];

/// Runs `qemu-nbd` with these arguments.
pub fn main(args: &[OsString]) -> ExitCode {
    let mut out = Output::default();
    match background::take_sockets(args).and_then(|()| run(args, &mut out)).and(out.finish()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.print(PROGRAM, PROGRAM, None);
            ExitCode::from(failure.code)
        }
    }
}

/// A wrong command line, with where to find help.
fn usage(text: impl std::fmt::Display) -> Failure {
    Failure::new(format!("{text}\nTry `qemu-nbd --help' for more information."))
}

fn run(args: &[OsString], out: &mut Output) -> Result<(), Failure> {
    let parsed = getopt::parse(args, OPTIONS, false).map_err(|text| {
        Failure::new(format!("{text}\n{PROGRAM}: Try `qemu-nbd --help' for more information."))
    })?;
    if parsed.has("help") {
        out.text(help());
        return Ok(());
    }
    if parsed.has("version") {
        out.line(format!("qemu-nbd {} (vdkit {})", crate::QEMU_VERSION, env!("CARGO_PKG_VERSION")));
        return Ok(());
    }
    if parsed.has("list") {
        return list::run(&parsed, out);
    }
    if parsed.has("disconnect") {
        let [device] = &parsed.operands[..] else {
            return Err(usage("Invalid number of arguments"));
        };
        kernel::detach(device.as_ref())?;
        out.line(format!("{device} disconnected"));
        return Ok(());
    }
    if parsed.has("selinux-label") {
        return Err(Failure::new("--selinux-label is not supported"));
    }
    let request = Request::parse(&parsed)?;
    let attached_aside = request.device.is_some() && !parsed.has("verbose");
    if !background::is_second() && (parsed.has("fork") || attached_aside) {
        return background::start(args);
    }
    serve(&request)
}

fn help() -> String {
    let mut text =
        "Serves an image over NBD.\n\nUsage: qemu-nbd [OPTIONS] FILE\n  or:  qemu-nbd -L \
                    [OPTIONS]\n\n"
            .to_owned();
    for option in OPTIONS {
        let short = option.short.map_or("    ".to_owned(), |letter| format!("-{letter}, "));
        let value = option.value.map(|value| format!("={value}")).unwrap_or_default();
        let names = format!("{short}--{}{value}", option.long);
        text += &format!("  {names:<30} {}\n", option.help);
    }
    text
}

/// The command line, checked.
struct Request {
    image: crate::names::Image,
    /// Bytes of the disk before the part that is served.
    offset: u64,
    objects: Objects,
    access: Access,
    export: ExportOptions,
    snapshot: Option<SnapshotChoice>,
    temporary: bool,
    persistent: bool,
    clients: usize,
    handshake: Duration,
    tls: Option<Tls>,
    address: Address,
    /// The kernel's device that it becomes.
    device: Option<PathBuf>,
    verbose: bool,
    pid_file: Option<PathBuf>,
}

impl Request {
    fn parse(parsed: &Parsed) -> Result<Self, Failure> {
        let [file] = &parsed.operands[..] else {
            return Err(usage("Invalid number of arguments"));
        };
        check_modes(parsed)?;
        if parsed.last("socket").is_some_and(|path| !path.starts_with('/')) {
            return Err(Failure::new("socket path must be absolute"));
        }
        check_activation(parsed)?;
        let cache = cache_mode(parsed)?;
        let snapshot = parsed.last("load-snapshot");
        let snapshot = snapshot.map(|text| SnapshotChoice::parse(text, "qemu-nbd")).transpose()?;
        if snapshot.is_some() && parsed.has("snapshot") {
            // The overlay has none.
            return Err(Failure::new("Failed to load snapshot: Can't find snapshot"));
        }
        let read_only = parsed.has("read-only") || snapshot.is_some();
        let objects = Objects::of(parsed)?;
        let named = Named::of(parsed, file);
        let image = named.parse().map_err(|failure| opening(file, &failure.text))?;
        let offset = parsed.last("offset").map_or(Ok(0), |text| number("offset", text))?;
        let clients = match number("shared device number", parsed.last("shared").unwrap_or("1"))? {
            0 => usize::MAX,
            clients => clients as usize,
        };
        let handshake =
            match number("handshake limit", parsed.last("handshake-limit").unwrap_or("10"))? {
                0 => NO_LIMIT,
                seconds => Duration::from_secs(seconds),
            };
        let device = parsed.last("connect").map(PathBuf::from);
        if let Some(device) = &device {
            if parsed.last("tls-creds").is_some() {
                return Err(Failure::new("TLS is not supported with a host device"));
            }
            kernel::index(device, "Failed to open")?;
        }
        let mut export = ExportOptions::default();
        export.name = parsed.last("export-name").unwrap_or_default().to_owned();
        export.description = parsed.last("description").unwrap_or_default().to_owned();
        export.read_only = read_only;
        export.on_nospace = OnNoSpace::Report;
        export.bitmaps = parsed.all("bitmap").map(str::to_owned).collect();
        Ok(Self {
            image,
            offset,
            device,
            verbose: parsed.has("verbose"),
            access: Access { writable: !read_only, cache, ..Access::default() },
            export,
            snapshot,
            temporary: parsed.has("snapshot"),
            persistent: parsed.has("persistent"),
            clients,
            handshake,
            tls: tls::server(parsed, &objects)?,
            address: address(parsed),
            pid_file: parsed.last("pid-file").map(PathBuf::from),
            objects,
        })
    }
}

fn number(what: &str, text: &str) -> Result<u64, Failure> {
    // virtnbdbackup passes `-e " 2"`, with the space.
    sizes::integer(text).ok_or_else(|| Failure::new(format!("Invalid {what} '{text}'")))
}

fn check_modes(parsed: &Parsed) -> Result<(), Failure> {
    if let Some(mode) = parsed.last("aio")
        && !["native", "io_uring", "threads"].contains(&mode)
    {
        return Err(Failure::new(format!("Invalid aio mode '{mode}'")));
    }
    if let Some(mode) = parsed.last("discard")
        && !["ignore", "off", "unmap", "on"].contains(&mode)
    {
        return Err(Failure::new(format!("Invalid discard mode `{mode}'")));
    }
    match parsed.last("detect-zeroes") {
        Some(mode) if !["off", "on", "unmap"].contains(&mode) => Err(Failure::new(format!(
            "Failed to parse detect_zeroes mode: invalid parameter value: {mode}"
        ))),
        Some("unmap") if !matches!(parsed.last("discard"), Some("unmap" | "on")) => {
            Err(Failure::new(
                "setting detect-zeroes to unmap is not allowed without setting discard operation to \
                 unmap",
            ))
        }
        _ => Ok(()),
    }
}

/// Refuses options that name another place than the socket that a service manager handed over.
fn check_activation(parsed: &Parsed) -> Result<(), Failure> {
    let refuse =
        |what: &str| Err(Failure::new(format!("{what} can't be set when using socket activation")));
    match sockets::count() {
        0 => Ok(()),
        _ if parsed.has("connect") => refuse("NBD device"),
        _ if parsed.has("socket") => refuse("Unix socket"),
        _ if parsed.has("bind") => refuse("The interface"),
        _ if parsed.has("port") => refuse("TCP port number"),
        1 => Ok(()),
        _ => Err(Failure::new("qemu-nbd does not support socket activation with LISTEN_FDS > 1")),
    }
}

fn cache_mode(parsed: &Parsed) -> Result<CacheMode, Failure> {
    let mode = match (parsed.has("nocache"), parsed.last("cache")) {
        (true, Some(_)) => return Err(Failure::new("-n and --cache can only be specified once")),
        (true, None) => "none",
        (false, mode) => mode.unwrap_or("writeback"),
    };
    open::cache_mode(mode).ok_or_else(|| Failure::new(format!("Invalid cache mode `{mode}'")))
}

fn address(parsed: &Parsed) -> Address {
    if let Some(path) = parsed.last("socket") {
        return Address::Unix(path.into());
    }
    let host = parsed.last("bind").unwrap_or("0.0.0.0");
    let host = crate::names::bracketed(host);
    Address::Tcp(format!("{host}:{}", parsed.last("port").unwrap_or(PORT).trim_start()))
}

/// The socket that systemd handed over, or the one that the command line names.
fn listeners(address: &Address) -> Result<Vec<Listener>, Failure> {
    if sockets::count() > 0 {
        return sockets::handed_over().map_err(Failure::new);
    }
    let bound = Listener::bind(address).map_err(|error| {
        let place = match address {
            Address::Unix(path) => format!("socket to {}", path.display()),
            Address::Tcp(place) => format!("to {place}"),
        };
        Failure::new(format!("Failed to bind {place}: {}", system_words(&error)))
    })?;
    Ok(vec![bound])
}

fn opening(name: &str, why: &str) -> Failure {
    // The engine's words name the image too.
    let why = why.strip_prefix(&format!("Could not open '{name}': ")).unwrap_or(why);
    Failure::new(format!("Failed to blk_new_open '{name}': {why}"))
}

/// Opens the disk; the folder holds the overlay of `--snapshot` for as long as it is served.
fn open_disk(request: &Request) -> Result<(Disk, Option<tempfile::TempDir>), Failure> {
    if !request.temporary {
        let mut options = open_options(&request.image, request.access, &request.objects)?;
        if let Some(snapshot) = &request.snapshot {
            options.snapshot = Some(snapshot.find_in(request.image.path(), &options)?);
        }
        return Ok((open::open_with(&request.image, &options)?, None));
    }
    let (driver, _) = format_of(&request.image, Access::read())?;
    let path = request.image.path().ok_or_else(|| Failure::new("--snapshot needs a file"))?;
    let backing = std::path::absolute(path)?;
    let folder = tempfile::Builder::new().prefix("vl.").tempdir_in("/var/tmp")?;
    let overlay = folder.path().join("overlay.qcow2");
    let format = vdkit::format("qcow2")?;
    let bytes = open::open(&request.image, Access::read(), &request.objects)?.guest_bytes();
    let name = backing.display().to_string();
    create(
        &open::registry(),
        &CreateOptions::new(&overlay, format)
            .guest_bytes(bytes)
            .backing(NewBacking::new(name, Some(driver.name().to_owned())).open(false)),
        &Monitor::default(),
    )?;
    let mut image = crate::names::parse(&overlay.display().to_string()).map_err(Failure::new)?;
    // With all that the user said of it.
    let mut served = request.image.clone();
    served.format = Some(driver.name().to_owned());
    image.backing = Some(Some(Box::new(served)));
    // The overlay is not needed after a crash.
    let access = Access { writable: true, cache: CacheMode::Unsafe, ..Access::default() };
    Ok((open::open(&image, access, &request.objects)?, Some(folder)))
}

/// `--offset`: the disk of any format from a byte on, as a disk of its own.
///
/// # Errors
/// The disk ends before that byte.
fn part_of(disk: Disk, offset: u64) -> Result<Disk, Failure> {
    let bytes = disk.guest_bytes();
    let past = || {
        let why = format!("Offset {offset} has to be smaller than the image size {bytes}");
        Failure::new(why)
    };
    if offset >= bytes {
        return Err(past());
    }
    let (writable, cache) = (disk.writable(), disk.cache());
    let part = PartOf::new(Arc::new(DiskStorage::new(disk)), offset, None)?.ok_or_else(past)?;
    let mut options = OpenOptions::read_only().format("raw").cache(cache);
    options.writable = writable;
    Ok(Disk::open_storage(&open::registry(), Arc::new(part), &options)?)
}

fn check_bitmaps(disk: &Disk, names: &[String]) -> Result<(), Failure> {
    let there = match disk.top().bitmaps() {
        Some(bitmaps) if !names.is_empty() => bitmaps.list()?,
        _ => Vec::new(),
    };
    for name in names {
        let Some(bitmap) = there.iter().find(|bitmap| bitmap.info.name == *name) else {
            return Err(Failure::new(format!("Bitmap '{name}' is not found")));
        };
        if bitmap.info.in_use && bitmap.dirty_bytes.is_none() {
            return Err(Failure::new(format!(
                "Bitmap '{name}' is inconsistent and cannot be used"
            )));
        }
    }
    Ok(())
}

fn serve(request: &Request) -> Result<(), Failure> {
    let stop = end_on_signal()?;
    let (disk, overlay) =
        open_disk(request).map_err(|failure| opening(&request.image.typed, &failure.text))?;
    let disk = if request.offset > 0 { part_of(disk, request.offset)? } else { disk };
    check_bitmaps(&disk, &request.export.bitmaps)?;
    let socket = request.device.as_ref().map(|_| own_socket(&request.address)).transpose()?;
    let own = socket.as_ref().map(|(path, _)| Address::Unix(path.clone()));
    let listeners = listeners(own.as_ref().unwrap_or(&request.address))?;
    let export = Export::new(disk, request.export.clone());
    let mut options = ServerOptions::default();
    vdkit::serve::raise_descriptor_limit();
    options.connections_max = request.clients;
    options.wait_when_full = true;
    options.tls = request.tls.clone();
    options.handshake_time = request.handshake;
    let started = Server::start(Exports::new(vec![Arc::clone(&export)]), listeners, options)
        .map_err(Failure::from)
        .and_then(|server| {
            // Locked until the server has ended.
            let pid_file = request.pid_file.as_deref().map(pid_file::write).transpose();
            let (_locked, written) = match pid_file {
                Ok(file) => (file, Ok(())),
                Err(failure) => (None, Err(failure)),
            };
            let attached = written.and_then(|()| match (&request.device, &socket) {
                (Some(device), Some((path, _))) => {
                    let attached = kernel::attach(device, path, &request.export.name);
                    if attached.is_ok() && request.verbose {
                        let (device, image) = (device.display(), &request.image.typed);
                        say(format_args!("NBD device {device} is now connected to {image}"));
                    }
                    attached
                }
                _ => Ok(()),
            });
            let connected = request.device.as_deref().filter(|_| attached.is_ok());
            let ready = attached.and_then(|()| background::ready());
            if ready.is_ok() {
                // A device that was disconnected does not come back.
                wait(&server, request.persistent && connected.is_none(), &stop);
            }
            // A device whose server is gone would keep its place, and fail all requests.
            if let Some(device) = connected.filter(|_| server.connections() > 0) {
                let _ = kernel::detach(device);
            }
            export.end_waiting();
            server.stop(DRAIN);
            ready
        });
    // Close the image after a failure too, so that it is marked clean.
    let closed = export.close();
    drop(overlay);
    started?;
    closed.map_err(|error| Failure::new(words(&error)))
}

/// The socket at which the kernel's connection is made: the one that was named, or one of our own
/// with its folder.
fn own_socket(address: &Address) -> Result<(PathBuf, Option<tempfile::TempDir>), Failure> {
    if let Address::Unix(path) = address {
        return Ok((path.clone(), None));
    }
    let folder = tempfile::Builder::new().prefix("qemu-nbd.").tempdir()?;
    Ok((folder.path().join("socket"), Some(folder)))
}

fn wait(server: &Server, persistent: bool, stop: &CancelToken) {
    while !stop.is_cancelled() {
        if !persistent && server.served() > 0 && server.connections() == 0 {
            return;
        }
        std::thread::sleep(POLL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_name_of_a_cache_mode_is_known() {
        let parsed = getopt::parse(&["--cache=off".into()], OPTIONS, false).unwrap();
        assert_eq!(cache_mode(&parsed).unwrap(), CacheMode::None);
    }

    #[test]
    fn numbers_are_read_as_strtol_reads_them() {
        for (text, value) in [
            ("2", Some(2)),
            (" 2", Some(2)),
            ("+2", Some(2)),
            ("0x1F", Some(31)),
            ("010", Some(8)),
            ("0", Some(0)),
            ("2 ", None),
            ("", None),
            ("++2", None),
            ("-1", None),
            ("08", None),
            ("0x+1", None),
        ] {
            assert_eq!(sizes::integer(text), value, "{text}");
        }
    }
}
