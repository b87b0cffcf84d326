//! `vdkit serve`: serves an image to clients.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueHint};
use serde::Serialize;
use vdkit::live::LiveImages;
use vdkit::nbd::{Address, Exports, Listener, Server, ServerOptions, Tls};
use vdkit::serve::{Control, Controller, Export, ExportOptions, Scrape, raise_descriptor_limit};
use vdkit::{CancelToken, Disk, vhost_user};
use vdkit_qemu::sockets;

use super::{Run, Subcommand, runs};
use crate::arguments::Json;
use crate::failure::{Exit, Failure, Outcome, not_made, of_both, quoted};
use crate::fuse::{self, FuseOptions};
use crate::notify;
use crate::serving::{DRAIN, ServedDisk, wait};
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "serve",
    about: "Serve an image as a disk: over NBD, over vhost-user, as a file",
    details: "\
The image stays open and locked until SIGINT, SIGTERM or `vdkit ctl SOCKET quit`. Then vdkit \
completes the requests in progress, flushes everything and closes the image. SIGKILL loses nothing \
that was flushed.

Clients connect to nbd+unix:///NAME?socket=PATH or nbd://HOST:PORT/NAME (nbds with --tls). Without \
--tls there is no authentication: everyone who can connect can read and write the disk. A Unix \
socket is as safe as its folder; use TCP without TLS only on a trusted network.

If the file system is full, writes wait until there is space again, so that the guest does not \
fail (--on-nospace report makes writes fail instead).",
    examples: "
vdkit serve disk.qcow2 --nbd unix:/run/disk.sock
vdkit serve disk.qcow2 --nbd tcp:127.0.0.1:10809 --read-only
vdkit serve disk.qcow2 --nbd tcp:0.0.0.0:10809 --tls /etc/pki/vdkit
vdkit serve disk.qcow2 --vhost-user /run/disk.sock
vdkit serve disk.qcow2 --nbd unix:/run/old.sock --snapshot before-update
vdkit serve disk.qcow2 --nbd unix:/run/disk.sock --metrics 127.0.0.1:9101
vdkit serve disk.qcow2 --nbd unix:/run/disk.sock --fuse /run/disk.raw
",
    ..runs::<ServeArgs>()
};

#[derive(Args, Debug)]
pub struct ServeArgs {
    /// The image
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// Serve over NBD at unix:PATH or tcp:HOST:PORT (repeatable)
    ///
    /// With port 0 the system chooses a free port, which is printed. Sockets passed by systemd
    /// (LISTEN_FDS) are served without this option. When clients can connect, systemd is notified
    /// (NOTIFY_SOCKET).
    #[arg(long, value_name = "ADDRESS")]
    nbd: Vec<Address>,
    /// Serve as a virtio disk (vhost-user-blk) at this Unix socket, for one virtual machine
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    vhost_user: Option<PathBuf>,
    /// Also mount the disk as one plain file, as `vdkit mount` does
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    fuse: Option<PathBuf>,
    #[command(flatten)]
    fuse_options: FuseOptions,
    /// Name of the export; clients that give no name get it too
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    name: String,
    /// Description for clients that list exports
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    description: String,
    /// Let clients query this dirty bitmap (repeatable)
    #[arg(long, value_name = "NAME")]
    bitmap: Vec<String>,
    /// Require TLS, with server-cert.pem and server-key.pem in DIR, or keys.psk
    ///
    /// If DIR has ca-cert.pem, clients must show a certificate of that authority. If DIR has
    /// ca-crl.pem too, the list must not revoke the certificate. keys.psk holds pre-shared keys,
    /// one line per client, as psktool writes them.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    tls: Option<PathBuf>,
    /// Listen for `vdkit ctl` at this Unix socket
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    control: Option<PathBuf>,
    /// End when the last client disconnects
    #[arg(long)]
    once: bool,
    /// Largest number of connections; a further one replaces a peer that is still negotiating
    #[arg(long, value_name = "N", default_value_t = 1024)]
    connections: usize,
    /// Poll a busy NBD connection for up to N microseconds (at most 100000) before its thread sleeps; 0 for never
    ///
    /// Polling answers single requests sooner, and costs processor time.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(..=100_000))]
    poll_us: u32,
    #[command(flatten)]
    disk: ServedDisk,
    #[command(flatten)]
    json: Json,
}

/// The JSON line printed once clients can connect.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Serving {
    filename: String,
    virtual_size: u64,
    read_only: bool,
    /// The NBD URIs.
    uris: Vec<String>,
    /// The mounted file.
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    /// Address of the metrics.
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<String>,
}

impl ServeArgs {
    fn nbd_listeners(&self) -> Result<Vec<Listener>, Failure> {
        let mut listeners = sockets::handed_over().map_err(Failure::failed)?;
        for address in &self.nbd {
            let listener = Listener::bind(address).map_err(|error| match address {
                Address::Unix(path) => not_made(&address.to_string(), path, &error),
                _ => Failure::failed(format!("{address}: {error}")),
            })?;
            listeners.push(listener);
        }
        if listeners.is_empty() && self.vhost_user.is_none() && self.fuse.is_none() {
            return Err(Failure::usage(
                "nowhere to serve: give --nbd unix:PATH or tcp:HOST:PORT, --vhost-user PATH, or \
                 --fuse FILE",
            ));
        }
        Ok(listeners)
    }

    /// Listens at the socket of `--vhost-user`.
    fn vhost_listener(&self) -> Result<Option<vhost_user::Listener>, Failure> {
        let Some(path) = &self.vhost_user else { return Ok(None) };
        let bound = vhost_user::Listener::bind(path);
        bound.map(Some).map_err(|error| not_made(&path.display().to_string(), path, &error))
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
                    quoted(disk.name())
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

/// Listening sockets, bound before anything accepts connections.
struct Listeners {
    nbd: Vec<Listener>,
    vhost: Option<vhost_user::Listener>,
    uris: Vec<String>,
    tls: Option<Tls>,
}

/// The servers of one export.
struct Service {
    control: Option<Control>,
    metrics: Option<Scrape>,
    file: Option<fuse::Server>,
    vhost: Option<vhost_user::Server>,
    nbd: Server,
    /// Whether the file is the only way to reach the export.
    only_file: bool,
}

impl ServeArgs {
    fn listeners(&self) -> Result<Listeners, Failure> {
        let tls = self.tls.as_deref().map(Tls::from_folder).transpose();
        let tls = tls.map_err(|error| Failure::failed(format!("--tls: {error}")))?;
        let nbd = self.nbd_listeners()?;
        let vhost = self.vhost_listener()?;
        let uris = nbd.iter().map(|listener| listener.uri(&self.name, tls.is_some()));
        let uris = uris.chain(vhost.as_ref().map(vhost_user::Listener::uri)).collect();
        Ok(Listeners { nbd, vhost, uris, tls })
    }

    /// Starts to accept clients.
    fn start(
        &self,
        export: &Arc<Export>,
        listeners: Listeners,
        quit: &CancelToken,
    ) -> Result<Service, Failure> {
        let only_file = listeners.nbd.is_empty() && listeners.vhost.is_none();
        let start_control = |path: &PathBuf| {
            let images = LiveImages::new(vdkit::registry(), self.disk.options());
            let controller = Controller::new(Arc::clone(export), quit.clone());
            Control::start(path, controller.with_images(Arc::new(images)))
                .map_err(|error| not_made(&format!("--control {}", path.display()), path, &error))
        };
        let control = self.control.as_ref().map(start_control).transpose()?;
        let metrics = self.disk.start_metrics(export)?;
        let mount = |file: &Path| fuse::mount(export, file, self.fuse_options);
        let file = self.fuse.as_deref().map(mount).transpose()?;
        let start_vhost = |listener| {
            let options = vhost_user::ServerOptions::default();
            vhost_user::Server::start(Arc::clone(export), listener, options)
        };
        let vhost = listeners.vhost.map(start_vhost).transpose().map_err(Failure::no_thread)?;
        let mut options = ServerOptions::default();
        options.connections_max = self.connections;
        options.tls = listeners.tls;
        options.poll_max = Duration::from_micros(self.poll_us.into());
        let exports = Exports::new(vec![Arc::clone(export)]);
        let nbd = Server::start(exports, listeners.nbd, options).map_err(Failure::no_thread)?;
        Ok(Service { control, metrics, file, vhost, nbd, only_file })
    }

    fn announce(&self, session: &mut Session, serving: &Serving) -> Result<(), Failure> {
        if self.json.json {
            session.out.json_line(serving);
        } else {
            for uri in serving.uris.iter().chain(&serving.file) {
                session.out.line(format!("serving {} at {uri}", serving.filename));
            }
            if let Some(place) = &serving.metrics {
                session.out.line(format!("metrics at {place}"));
            }
        }
        Ok(session.out.finish()?)
    }
}

impl Service {
    /// With `once`, the service is over when the last client leaves.
    fn is_over(&self, once: bool) -> bool {
        let vhost = self.vhost.as_ref();
        let came = self.nbd.served() + vhost.map_or(0, vhost_user::Server::served);
        let there = self.nbd.connections() > 0 || vhost.is_some_and(vhost_user::Server::connected);
        let unmounted = self.file.as_ref().is_some_and(fuse::Server::finished);
        (once && came > 0 && !there) || (unmounted && self.only_file)
    }

    /// Stops all servers. The caller still has to close the export.
    fn end(self, export: &Export) -> Result<(), Failure> {
        drop(self.control);
        drop(self.metrics);
        if let Some(vhost) = self.vhost {
            // Resume before stopping vhost-user: its requests that wait for space stay with the
            // guest, and requests that wait to be resumed would delay the end.
            export.resume();
            vhost.stop(DRAIN);
        }
        // Fail the requests that still wait for space or to be resumed: they would delay the end.
        export.end_waiting();
        let unmounted = self.file.map_or(Ok(()), |mounted| fuse::unmount(mounted, DRAIN));
        self.nbd.stop(DRAIN);
        unmounted
    }
}

impl Run for ServeArgs {
    fn run(self, session: &mut Session) -> Outcome {
        if self.fuse.is_none() && (self.fuse_options.growable || self.fuse_options.allow_other) {
            return Err(Failure::usage("--growable and --allow-other need --fuse FILE"));
        }
        raise_descriptor_limit();
        // Set up before anything that a signal would have to undo.
        let stop = session.cancel_on_signal()?;
        let disk = self.disk.open(session, &self.image, &stop)?;
        self.check_bitmaps(&disk)?;
        let listeners = self.listeners()?;
        let filename = disk.name().to_owned();
        let mut options = ExportOptions::default();
        options.name = self.name.clone();
        options.description = self.description.clone();
        options.read_only = self.disk.read_only;
        options.on_nospace = self.disk.on_nospace;
        options.bitmaps = self.bitmap.clone();
        let export = Export::new(disk, options);
        let uris = listeners.uris.clone();
        let done = self.start(&export, listeners, &stop).and_then(|service| {
            let file = service.file.as_ref().map(|mounted| mounted.file().display().to_string());
            let serving = Serving {
                filename,
                virtual_size: export.size(),
                read_only: export.read_only(),
                uris,
                file,
                metrics: service.metrics.as_ref().map(Scrape::place),
            };
            let announced = self.announce(session, &serving);
            if announced.is_ok() {
                notify::ready(&format!("serving {}", serving.filename));
                wait(&export, &stop, || service.is_over(self.once));
                notify::stopping();
            }
            announced.and(service.end(&export))
        });
        // Close the export after a failure too, so that the image is marked clean.
        of_both(done, export.close())?;
        Ok(Exit::Done)
    }
}
