//! A disk for NBD clients, or for a virtual machine.

use std::ffi::{CString, c_char, c_int};
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::Duration;

use vdkit::nbd::{Address, Exports, Listener, Server, ServerOptions, Tls};
use vdkit::serve::{Export, ExportOptions, OnNoSpace};
use vdkit::{Disk, Error, IoAction, vhost_user};

use crate::border::{self, Result, call, misuse};
use crate::disk::vdkit_disk;
use crate::error;

/// A running server. May be asked from many threads at once; vdkit_server_stop() must be the last call.
pub struct vdkit_server {
    export: Arc<Export>,
    running: Option<Running>,
    uri: CString,
}

enum Running {
    Nbd(Server),
    Vhost(vhost_user::Server),
}

/// For vdkit_serve_nbd() and its kin: clients may not write.
pub const VDKIT_SERVE_READ_ONLY: u32 = 1;
/// For vdkit_serve_nbd() and its kin: a request for which no space is left fails. Without it, the request
/// waits until there is space.
pub const VDKIT_SERVE_REPORT_NO_SPACE: u32 = 2;

/// Serves a disk to NBD clients, on threads of its own, at "unix:PATH" or "tcp:HOST:PORT" (port 0: any
/// free one). `name` is the export's; NULL is the empty one. The server takes the disk over, and closes it
/// also if it cannot be started: do not use or close it any more. (Only if a queue of it is not freed does
/// it stay the caller's.) Ended by vdkit_server_stop().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_serve_nbd(
    disk: *mut vdkit_disk,
    address: *const c_char,
    name: *const c_char,
    flags: u32,
    server: Option<&mut MaybeUninit<*mut vdkit_server>>,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let (disk, place) = unsafe { taken(disk, server) }?;
        // SAFETY: as above.
        let listening = unsafe { listen(address, name, flags) };
        place.write(serve_nbd(disk, listening, None)?);
        Ok(())
    })
}

/// As vdkit_serve_nbd(), for clients with TLS alone. `credentials`: a folder with server-cert.pem and
/// server-key.pem, as libvirt and QEMU name them; with ca-cert.pem too, clients must present a certificate of
/// that authority.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_serve_nbd_tls(
    disk: *mut vdkit_disk,
    address: *const c_char,
    name: *const c_char,
    credentials: *const c_char,
    flags: u32,
    server: Option<&mut MaybeUninit<*mut vdkit_server>>,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let (disk, place) = unsafe { taken(disk, server) }?;
        // SAFETY: as above.
        let tls = unsafe { border::path(credentials, "credentials") }.and_then(|folder| {
            Tls::from_folder(folder)
                .map_err(|source| failed_to_open(&folder.display().to_string(), source))
        });
        let (tls, listening) = match tls {
            // SAFETY: as above.
            Ok(tls) => (Some(tls), unsafe { listen(address, name, flags) }),
            Err(error) => (None, Err(error)),
        };
        place.write(serve_nbd(disk, listening, tls)?);
        Ok(())
    })
}

/// The disk that a server takes over, closed if there is no place for the server.
///
/// # Safety
/// As [`vdkit_disk::take`].
unsafe fn taken(
    disk: *mut vdkit_disk,
    server: Option<&mut MaybeUninit<*mut vdkit_server>>,
) -> Result<(Disk, &mut MaybeUninit<*mut vdkit_server>)> {
    // Holds NULL after any error.
    let place = border::place_of(server);
    // SAFETY: the caller's promise.
    let disk = unsafe { vdkit_disk::take(disk) }?;
    let allowed = if disk.writable() { disk.refuse_in_child("serve") } else { Ok(()) };
    match place.and_then(|place| allowed.map(|()| place)) {
        Ok(place) => Ok((disk, place)),
        Err(error) => disk.close().and(Err(error)),
    }
}

/// Starts an NBD server, with TLS if there is any.
fn serve_nbd(
    disk: Disk,
    listening: Result<((Listener, Address), ExportOptions)>,
    tls: Option<Tls>,
) -> Result<*mut vdkit_server> {
    serve(disk, listening, |export, (listener, address)| {
        let uri = listener.uri(&export.options().name, tls.is_some());
        let exports = Exports::new(vec![export.clone()]);
        let mut options = ServerOptions::default();
        options.tls = tls;
        let running = Server::start(exports, vec![listener], options);
        let failed = |source| failed_to_open(&address.to_string(), source);
        Ok((Running::Nbd(running.map_err(failed)?), uri))
    })
}

/// Serves a disk as a virtio disk of one virtual machine: its monitor (QEMU, Cloud Hypervisor, crosvm, ...)
/// connects by vhost-user-blk to the Unix socket `path`. Otherwise as vdkit_serve_nbd().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_serve_vhost_user(
    disk: *mut vdkit_disk,
    path: *const c_char,
    flags: u32,
    server: Option<&mut MaybeUninit<*mut vdkit_server>>,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let (disk, place) = unsafe { taken(disk, server) }?;
        // SAFETY: as above.
        let listening = unsafe { border::path(path, "path") }.and_then(|path| {
            let options = export_options("", flags)?;
            let listener = vhost_user::Listener::bind(path)
                .map_err(|source| failed_to_open(&path.display().to_string(), source))?;
            Ok(((listener, path), options))
        });
        let new = serve(disk, listening, |export, (listener, path)| {
            let uri = listener.uri();
            let options = vhost_user::ServerOptions::default();
            let running = vhost_user::Server::start(export.clone(), listener, options);
            let failed = |source| failed_to_open(&path.display().to_string(), source);
            Ok((Running::Vhost(running.map_err(failed)?), uri))
        })?;
        place.write(new);
        Ok(())
    })
}

/// Starts a server for a disk, which is closed if that fails. `listening`: what it listens at.
fn serve<L>(
    disk: Disk,
    listening: Result<(L, ExportOptions)>,
    start: impl FnOnce(&Arc<Export>, L) -> Result<(Running, String)>,
) -> Result<*mut vdkit_server> {
    let (listener, options) = match listening {
        Ok(listening) => listening,
        Err(error) => {
            // The first error is reported.
            let _ = disk.close();
            return Err(error);
        }
    };
    let export = Export::new(disk, options);
    match start(&export, listener) {
        Ok((running, uri)) => {
            let uri = error::c_text(&uri);
            Ok(Box::into_raw(Box::new(vdkit_server { export, running: Some(running), uri })))
        }
        Err(error) => {
            let _ = export.close();
            Err(error)
        }
    }
}

fn failed_to_open(file: &str, source: std::io::Error) -> Error {
    Error::File { file: file.to_owned(), action: IoAction::Open, source }
}

fn export_options(name: &str, flags: u32) -> Result<ExportOptions> {
    border::known(flags, VDKIT_SERVE_READ_ONLY | VDKIT_SERVE_REPORT_NO_SPACE)?;
    let mut options = ExportOptions::default();
    options.name = name.to_owned();
    options.read_only = flags & VDKIT_SERVE_READ_ONLY != 0;
    if flags & VDKIT_SERVE_REPORT_NO_SPACE != 0 {
        options.on_nospace = OnNoSpace::Report;
    }
    Ok(options)
}

/// The socket and the export's options.
///
/// # Safety
/// As [`border::maybe_text`].
unsafe fn listen(
    address: *const c_char,
    name: *const c_char,
    flags: u32,
) -> Result<((Listener, Address), ExportOptions)> {
    // SAFETY: the caller's promise.
    let (address, name) = unsafe { (border::text(address, "address")?, border::maybe_text(name)?) };
    let options = export_options(name.unwrap_or_default(), flags)?;
    let address: Address = address.parse().map_err(misuse)?;
    let failed = |source| failed_to_open(&address.to_string(), source);
    let listener = Listener::bind(&address).map_err(failed)?;
    Ok(((listener, address), options))
}

/// The URI of the export, for clients ("vhost-user:PATH" for a monitor); it lives as long as the server.
/// NULL for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_server_uri(server: Option<&vdkit_server>) -> *const c_char {
    server.map_or(std::ptr::null(), |server| server.uri.as_ptr())
}

/// The number of clients that are connected; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_server_clients(server: Option<&vdkit_server>) -> c_int {
    match server.and_then(|server| server.running.as_ref()) {
        Some(Running::Nbd(server)) => c_int::try_from(server.connections()).unwrap_or(c_int::MAX),
        Some(Running::Vhost(server)) => server.connected().into(),
        None => 0,
    }
}

/// Ends a server: no new requests are taken, those that have begun are answered, then the disk is flushed and
/// closed. NBD clients are cut off after `drain_ms` milliseconds; a virtual machine's requests are waited for.
/// Requests that wait for space fail, or stay with the virtual machine for its next server. Everything is freed
/// also after an error. NULL is allowed. In a child of fork() it fails, and the parent's server goes on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_server_stop(server: *mut vdkit_server, drain_ms: u32) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let Some(mut server) = (unsafe { border::take(server) }) else { return Ok(()) };
        if server.export.is_inherited() {
            // No lock is taken to drop it: a thread that the child does not have may hold that.
            std::mem::forget(server);
            return Err(misuse(
                "the parent of this process started the server, and only the parent can stop it",
            ));
        }
        let drain = Duration::from_millis(drain_ms.into());
        match server.running.take() {
            Some(Running::Nbd(running)) => {
                server.export.end_waiting();
                running.stop(drain);
            }
            Some(Running::Vhost(running)) => {
                server.export.resume();
                // A request that is answered after the flush would be lost with the process.
                running.stop(Duration::MAX);
            }
            None => {}
        }
        server.export.close()
    })
}
