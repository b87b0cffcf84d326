//! `vdkit serve`: an image as a disk that others use.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum, ValueHint};
use listenfd::ListenFd;
use serde::Serialize;
use vdkit::export::{Control, Controller, Export, ExportOptions, OnNoSpace};
use vdkit::nbd::{Address, Exports, Listener, Server, ServerOptions, Tls};
use vdkit::{Disk, OpenOptions, vhost_user};

use super::{Group, Run, Subcommand, augment, run};
use crate::arguments::{CacheOption, Json, References, size};
use crate::failure::{Exit, Failure, Outcome};
use crate::keys::Keys;
use crate::session::Session;

/// The row of the table.
pub const COMMAND: Subcommand = Subcommand {
    name: "serve",
    about: "Serve an image as a disk, over NBD or vhost-user",
    group: Group::Serve,
    details: "\
The image stays open and locked until SIGINT or SIGTERM (or `vdkit ctl SOCKET quit`); then what \
clients have begun is done, everything is flushed, and the image is closed. SIGKILL loses nothing \
that was flushed.

Clients find it as nbd+unix:///NAME?socket=PATH or nbd://HOST:PORT/NAME. There is no \
authentication without --tls: whoever reaches the socket reads and writes the disk. A Unix socket \
is as safe as its folder; TCP without TLS belongs on a trusted network.

A full file system does not break the guest: writes that find no space wait until there is some \
(--on-nospace report passes the error on instead).",
    examples: "
vdkit serve disk.qcow2 --nbd unix:/run/disk.sock
vdkit serve disk.qcow2 --nbd tcp:127.0.0.1:10809 --read-only
vdkit serve disk.qcow2 --nbd tcp:0.0.0.0:10809 --tls /etc/pki/vdkit
vdkit serve disk.qcow2 --vhost-user /run/disk.sock
vdkit serve disk.qcow2 --nbd unix:/run/old.sock --snapshot before-update
",
    augment: augment::<ServeArgs>,
    run: run::<ServeArgs>,
};

/// How long clients' last requests may take at the end.
const DRAIN: Duration = Duration::from_secs(30);

/// How often the end is looked for.
const POLL: Duration = Duration::from_millis(50);

/// Arguments of `vdkit serve`.
#[derive(Args, Debug)]
pub struct ServeArgs {
    /// The image
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// Serve over NBD at unix:PATH or tcp:HOST:PORT (repeatable)
    ///
    /// Port 0 takes a free one, which is printed. Sockets that systemd hands over (LISTEN_FDS) are
    /// served without this.
    #[arg(long, value_name = "ADDRESS")]
    nbd: Vec<Address>,
    /// Serve as a virtio disk (vhost-user-blk) at this Unix socket, for one virtual machine
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    vhost_user: Option<PathBuf>,
    /// The export's name; clients that name none get it too
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    name: String,
    /// A word on it for clients that list exports
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    description: String,
    /// Let nobody write
    #[arg(long)]
    read_only: bool,
    /// Serve what this snapshot inside the image holds (an id or a name), for reading
    #[arg(long, value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Let clients ask what this dirty bitmap has marked (repeatable)
    #[arg(long, value_name = "NAME")]
    bitmap: Vec<String>,
    /// What a write does that finds no space: pause or report
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = NoSpace::Pause, hide_default_value = true, hide_possible_values = true)]
    on_nospace: NoSpace,
    /// Memory for the image's map; 32 MiB without it
    #[arg(long, value_name = "SIZE", value_parser = size)]
    l2_cache: Option<u64>,
    /// Clients must use TLS, with server-cert.pem and server-key.pem of DIR
    ///
    /// Where DIR holds ca-cert.pem too, clients must show a certificate of that authority.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    tls: Option<PathBuf>,
    /// Listen for `vdkit ctl` at this Unix socket
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    control: Option<PathBuf>,
    /// End when the last client has left
    #[arg(long)]
    once: bool,
    /// Connections at a time
    #[arg(long, value_name = "N", default_value_t = 1024)]
    connections: usize,
    #[command(flatten)]
    cache: CacheOption,
    /// The image's format; without it the header is probed
    #[arg(short = 'f', long, value_name = "FORMAT")]
    format: Option<String>,
    #[command(flatten)]
    references: References,
    #[command(flatten)]
    keys: Keys,
    #[command(flatten)]
    json: Json,
}

/// The value of --on-nospace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum NoSpace {
    Pause,
    Report,
}

/// What is said once clients can come, in JSON.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Serving {
    filename: String,
    virtual_size: u64,
    read_only: bool,
    /// Where clients find it.
    uris: Vec<String>,
}

impl ServeArgs {
    fn open(&self) -> Result<Disk, Failure> {
        let read_only = self.read_only || self.snapshot.is_some();
        let mut options = OpenOptions {
            format: self.format.clone(),
            writable: !read_only,
            cache: self.cache.mode(),
            refs: self.references.policy(),
            snapshot: self.snapshot.clone(),
            ..OpenOptions::default()
        };
        if let Some(bytes) = self.l2_cache {
            options.limits.cache_bytes = bytes;
        }
        Ok(Disk::open(&vdkit::registry(), &self.image, &self.keys.apply(options))?)
    }

    fn listeners(&self) -> Result<(Vec<Listener>, Vec<String>), Failure> {
        let mut listeners = Vec::new();
        let mut uris = Vec::new();
        let mut handed = ListenFd::from_env();
        for index in 0..handed.len() {
            let failed = |error| Failure::failed(format!("socket {index} of systemd: {error}"));
            let listener = match handed.take_unix_listener(index) {
                Ok(Some(socket)) => Listener::Unix(socket, None),
                _ => match handed.take_tcp_listener(index).map_err(failed)? {
                    Some(socket) => Listener::Tcp(socket),
                    None => continue,
                },
            };
            uris.push(listener.uri(&self.name));
            listeners.push(listener);
        }
        for address in &self.nbd {
            let listener = Listener::bind(address)
                .map_err(|error| Failure::failed(format!("{address}: {error}")))?;
            uris.push(listener.uri(&self.name));
            listeners.push(listener);
        }
        if listeners.is_empty() && self.vhost_user.is_none() {
            return Err(Failure::usage(
                "nowhere to serve: give --nbd unix:PATH or tcp:HOST:PORT, or --vhost-user PATH",
            ));
        }
        Ok((listeners, uris))
    }

    /// The socket of --vhost-user.
    fn vhost_listener(&self) -> Result<Option<vhost_user::Listener>, Failure> {
        let Some(path) = &self.vhost_user else { return Ok(None) };
        let listener = vhost_user::Listener::bind(path)
            .map_err(|error| Failure::failed(format!("{}: {error}", path.display())))?;
        Ok(Some(listener))
    }

    fn check_bitmaps(&self, disk: &Disk) -> Result<(), Failure> {
        if self.bitmap.is_empty() {
            return Ok(());
        }
        let there = match disk.top().bitmaps() {
            Some(bitmaps) => bitmaps.list()?,
            None => Vec::new(),
        };
        for name in &self.bitmap {
            let Some(bitmap) = there.iter().find(|bitmap| bitmap.info.name == *name) else {
                return Err(Failure::failed(format!(
                    "{}: has no bitmap '{name}'; see: vdkit bitmap list {}",
                    disk.name(),
                    disk.name()
                )));
            };
            if bitmap.info.in_use && bitmap.dirty_bytes.is_none() {
                return Err(Failure::failed(format!(
                    "{}: bitmap '{name}' cannot be trusted: it was not saved",
                    disk.name()
                )));
            }
        }
        Ok(())
    }
}

impl Run for ServeArgs {
    const ROW: &'static Subcommand = &COMMAND;

    fn run(self, session: &mut Session) -> Outcome {
        // Before anything that has to be undone.
        let stop = session.cancel_on_signal()?;
        let disk = self.open()?;
        session.warn(&disk);
        self.check_bitmaps(&disk)?;
        let tls = match &self.tls {
            Some(folder) => Some(
                Tls::from_folder(folder)
                    .map_err(|error| Failure::failed(format!("--tls: {error}")))?,
            ),
            None => None,
        };
        let (listeners, mut uris) = self.listeners()?;
        let vhost_listener = self.vhost_listener()?;
        let filename = disk.name().to_owned();
        let export = Export::new(
            disk,
            ExportOptions {
                name: self.name.clone(),
                description: self.description.clone(),
                read_only: self.read_only,
                on_nospace: match self.on_nospace {
                    NoSpace::Pause => OnNoSpace::Pause,
                    NoSpace::Report => OnNoSpace::Report,
                },
                bitmaps: self.bitmap.clone(),
            },
        );
        let options =
            ServerOptions { connections_max: self.connections, tls, ..ServerOptions::default() };
        let exports = Exports::new(vec![Arc::clone(&export)]);
        let server = Server::start(exports, listeners, options)
            .map_err(|error| Failure::failed(format!("no thread to serve with: {error}")))?;
        let no_thread = |error| Failure::failed(format!("no thread to serve with: {error}"));
        let vhost = match vhost_listener {
            Some(listener) => {
                uris.push(listener.uri());
                let server = vhost_user::Server::start(Arc::clone(&export), listener);
                Some(server.map_err(no_thread)?)
            }
            None => None,
        };
        let control = match &self.control {
            Some(path) => {
                let controller = Controller::new(Arc::clone(&export), stop.clone());
                Some(Control::start(path, controller).map_err(|error| {
                    Failure::failed(format!("--control {}: {error}", path.display()))
                })?)
            }
            None => None,
        };
        let serving =
            Serving { filename, virtual_size: export.size(), read_only: export.read_only(), uris };
        if self.json.json {
            session.out.json(&serving)?;
        } else {
            for uri in &serving.uris {
                session.out.line(format!("serving {} at {uri}", serving.filename))?;
            }
        }
        session.out.finish()?;
        let is_over = || {
            let came = server.served() + vhost.as_ref().map_or(0, vhost_user::Server::served);
            let there = server.connections() > 0
                || vhost.as_ref().is_some_and(vhost_user::Server::connected);
            self.once && came > 0 && !there
        };
        let mut full = false;
        while !stop.is_cancelled() && !is_over() {
            std::thread::sleep(POLL);
            let parked = export.parked();
            if full != (parked.requests > 0) {
                full = !full;
                match full {
                    true => eprintln!("warning: writes wait for space: {}", parked.reason),
                    false => eprintln!("there is space again: writes go on"),
                }
            }
        }
        drop(control);
        if let Some(vhost) = vhost {
            // First, as what waits for space stays with the guest. Who waits to be resumed would
            // keep the end waiting.
            export.resume();
            vhost.stop(DRAIN);
        }
        // Who waits for space, or for somebody to resume, would keep the end waiting.
        export.end_waiting();
        server.stop(DRAIN);
        export.close()?;
        Ok(Exit::Done)
    }
}
