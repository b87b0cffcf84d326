//! A disk for NBD clients.

use std::ffi::{CString, c_char, c_int};
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::Duration;

use vdkit::nbd::{Address, Exports, Listener, Server, ServerOptions};
use vdkit::serve::{Export, ExportOptions};
use vdkit::{Error, IoAction};

use crate::border::{self, Result, call, misuse};
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
        let place = border::place_of(server)?;
        // SAFETY: the header's promise.
        let disk = unsafe { vdkit_disk::take(disk) }?;
        // SAFETY: as above.
        let listening = unsafe { listen(address, name, flags) };
        let (listener, options, address) = match listening {
            Ok(listening) => listening,
            Err(error) => {
                // The first error is reported.
                let _ = disk.close();
                return Err(error);
            }
        };
        let uri = CString::new(listener.uri(&options.name, false)).unwrap_or_default();
        let export = Export::new(disk, options);
        let exports = Exports::new(vec![export.clone()]);
        match Server::start(exports, vec![listener], ServerOptions::default()) {
            Ok(running) => {
                let new = vdkit_server { export, server: Some(running), uri };
                place.write(Box::into_raw(Box::new(new)));
                Ok(())
            }
            Err(source) => {
                let _ = export.close();
                Err(Error::File { file: address.to_string(), action: IoAction::Open, source })
            }
        }
    })
}

/// The socket and the export's options.
///
/// # Safety
/// As [`border::maybe_text`].
unsafe fn listen(
    address: *const c_char,
    name: *const c_char,
    flags: u32,
) -> Result<(Listener, ExportOptions, Address)> {
    border::known(flags, VDKIT_SERVE_READ_ONLY)?;
    // SAFETY: the caller's promise.
    let (address, name) = unsafe { (border::text(address, "address")?, border::maybe_text(name)?) };
    let address: Address = address.parse().map_err(misuse)?;
    let options = ExportOptions {
        name: name.unwrap_or_default().to_owned(),
        read_only: flags & VDKIT_SERVE_READ_ONLY != 0,
        ..ExportOptions::default()
    };
    let failed = |source| Error::File { file: address.to_string(), action: IoAction::Open, source };
    let listener = Listener::bind(&address).map_err(failed)?;
    Ok((listener, options, address))
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
