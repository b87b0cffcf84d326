//! Notifications for a service manager: clients can connect; the service is ending.
//!
//! systemd (`Type=notify`), podman and others name a datagram socket in `NOTIFY_SOCKET`; without it, nothing is sent.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use crate::failure::{Tone, print_line};

/// Reports that clients can connect; `status` says what is served.
pub fn ready(status: &str) {
    let line = status.replace(['\n', '\r'], " ");
    send(&format!("READY=1\nSTATUS={line}"));
}

/// Reports that the service completes its last requests.
pub fn stopping() {
    send("STOPPING=1\nSTATUS=completing requests, closing the image");
}

/// Sends a state. A failure is only a warning: clients are served without the manager too.
fn send(state: &str) {
    let Some(place) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let sent = address(&place).and_then(|address| {
        UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(drop)
    });
    if let Err(error) = sent {
        print_line(Tone::Warning, &format!("NOTIFY_SOCKET {}: {error}", place.display()));
    }
}

/// `@` begins a name in the abstract namespace, `/` a path.
fn address(place: &OsStr) -> io::Result<SocketAddr> {
    match place.as_bytes().split_first() {
        Some((b'@', name)) => SocketAddr::from_abstract_name(name),
        Some((b'/', _)) => SocketAddr::from_pathname(place),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "neither an absolute path nor an abstract name (@NAME)",
        )),
    }
}
