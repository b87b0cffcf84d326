//! A disk for NBD clients.

use std::ffi::{CString, c_char, c_int};
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::Duration;

use vdkit::nbd::{Address, Exports, Listener, Server, ServerOptions};
use vdkit::serve::{Export, ExportOptions};
use vdkit::{Error, IoAction};

use crate::border::{self, call, given, misuse};
use crate::disk::vdkit_disk;

/// A running NBD server.
pub struct vdkit_server {
    export: Arc<Export>,
    server: Option<Server>,
    uri: CString,
}

/// For vdkit_serve_nbd(): clients may not write.
pub const VDKIT_SERVE_READ_ONLY: u32 = 1;

/// Serves a disk to NBD clients, on threads of its own, at "unix:PATH" or "tcp:HOST:PORT" (port 0: any
/// free one). `name` is the export's; NULL is the empty one. The server takes the disk over, also if it
/// cannot be started: do not use or close it any more. Ended by vdkit_server_stop().
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
        let (disk, address, name) = unsafe {
            let disk = border::take(disk);
            (given(disk, "disk")?, border::text(address, "address")?, border::maybe_text(name)?)
        };
        let disk = Arc::into_inner(disk.0).ok_or_else(|| {
            misuse("a queue of this disk is not freed: the server needs the disk for itself")
        })?;
        let address: Address = address.parse().map_err(misuse)?;
        let failed =
            |source| Error::File { file: address.to_string(), action: IoAction::Open, source };
        let options = ExportOptions {
            name: name.unwrap_or_default().to_owned(),
            read_only: flags & VDKIT_SERVE_READ_ONLY != 0,
            ..ExportOptions::default()
        };
        let listener = Listener::bind(&address).map_err(failed)?;
        let uri = CString::new(listener.uri(&options.name, false)).unwrap_or_default();
        let export = Export::new(disk, options);
        let exports = Exports::new(vec![export.clone()]);
        let started = Server::start(exports, vec![listener], ServerOptions::default());
        let new = vdkit_server { export, server: Some(started.map_err(failed)?), uri };
        border::put(server, Box::into_raw(Box::new(new)))
    })
}

/// The URI of the export, for clients; it lives as long as the server. NULL for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_server_uri(server: Option<&vdkit_server>) -> *const c_char {
    server.map_or(std::ptr::null(), |server| server.uri.as_ptr())
}

/// The number of clients that are connected; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_server_clients(server: Option<&vdkit_server>) -> c_int {
    let server = server.and_then(|server| server.server.as_ref());
    server.map_or(0, |server| c_int::try_from(server.connections()).unwrap_or(c_int::MAX))
}

/// Ends a server: no new requests are taken, those that have begun are answered within `drain_ms`
/// milliseconds, then the disk is flushed and closed. Everything is freed also after an error. NULL is
/// allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_server_stop(server: *mut vdkit_server, drain_ms: u32) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let Some(mut server) = (unsafe { border::take(server) }) else { return Ok(()) };
        if let Some(running) = server.server.take() {
            running.stop(Duration::from_millis(drain_ms.into()));
        }
        server.export.close()
    })
}
