//! TLS around a connection: with certificates, or with pre-shared keys.
//!
//! The files have QEMU's names, in one folder: `server-cert.pem` and `server-key.pem`; or
//! `keys.psk` alone. If `ca-cert.pem` exists, clients must present a certificate of that authority;
//! `ca-crl.pem` lists the ones that it has revoked.
//!
//! Pre-shared keys are the feature `tls-psk`: rustls lacks them, so they need a second TLS stack.

mod certificates;
mod subject;

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::net::Shutdown;
use rustls::{ServerConfig, ServerConnection};

use crate::admission::Admission;
use crate::channel::Channel;
use crate::wire::time_left;
use crate::wire::tls::{Received, SEND_BYTES, Session, bad, invalid};

const CERTIFICATE: &str = "server-cert.pem";
const PRIVATE_KEY: &str = "server-key.pem";
const REVOKED: &str = "ca-crl.pem";
const KEYS: &str = "keys.psk";

/// TLS configuration of a server.
#[derive(Clone, Debug)]
pub struct Tls {
    kind: Kind,
    admission: Option<Admission>,
}

#[derive(Clone, Debug)]
enum Kind {
    Certificates(Arc<ServerConfig>),
    #[cfg(feature = "tls-psk")]
    Keys(Arc<vdkit_nbd_wire::psk::Keys>),
}

/// Whether a file exists. A dangling link counts as existing: it is a mistake, and reading the file
/// reports it.
fn is_named(path: &Path) -> io::Result<bool> {
    match std::fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(io::Error::new(error.kind(), format!("{}: {error}", path.display()))),
    }
}

impl Tls {
    /// Reads the folder's certificates and key, or its pre-shared keys.
    ///
    /// # Errors
    /// `InvalidInput` for missing or ill-formed files, naming the file, and for a folder with both.
    pub fn from_folder(folder: &Path) -> io::Result<Self> {
        let keys = folder.join(KEYS);
        if !is_named(&keys)? {
            return Self::from_certificates(folder, true);
        }
        for other in [CERTIFICATE, REVOKED] {
            if is_named(&folder.join(other))? {
                let why = format!(
                    "there is {other} beside it, and a server asks for keys or for certificates; \
                     move one of them to another folder"
                );
                return Err(bad(&keys, why));
            }
        }
        Self::from_keys(&keys)
    }

    /// Reads the folder's certificates and key. `clients`: if there is an authority's certificate,
    /// clients must present a certificate of that authority.
    ///
    /// # Errors
    /// `InvalidInput` for missing or ill-formed files, naming the file.
    pub fn from_certificates(folder: &Path, clients: bool) -> io::Result<Self> {
        Ok(Self::of(Kind::Certificates(certificates::load(folder, clients)?)))
    }

    fn of(kind: Kind) -> Self {
        Self { kind, admission: None }
    }

    /// Asks this about each client that presents a certificate. Clients without one are not asked
    /// about.
    #[must_use]
    pub fn with_admission(self, admission: Admission) -> Self {
        Self { admission: Some(admission), ..self }
    }

    /// Reads a file of pre-shared keys.
    ///
    /// # Errors
    /// `InvalidInput` for a missing or ill-formed file, and in builds without the feature `tls-psk`.
    #[cfg(feature = "tls-psk")]
    pub fn from_keys(keys: &Path) -> io::Result<Self> {
        Ok(Self::of(Kind::Keys(vdkit_nbd_wire::psk::load(keys)?)))
    }

    /// Pre-shared keys are not in this build.
    ///
    /// # Errors
    /// Always `InvalidInput`.
    #[cfg(not(feature = "tls-psk"))]
    pub fn from_keys(keys: &Path) -> io::Result<Self> {
        Err(bad(keys, "this build has no pre-shared keys; build it with the feature tls-psk"))
    }

    fn session(&self) -> io::Result<Session> {
        match &self.kind {
            Kind::Certificates(config) => {
                let connection = ServerConnection::new(config.clone());
                connection.map(Session::with_certificates).map_err(invalid)
            }
            #[cfg(feature = "tls-psk")]
            Kind::Keys(keys) => vdkit_nbd_wire::psk::PskSession::server(keys).map(Session::Key),
        }
    }

    /// Starts TLS on a connection; the peer has until `until`.
    ///
    /// # Errors
    /// Errors of the socket; `InvalidData` if the peer's TLS is not acceptable; `TimedOut`.
    pub fn accept(&self, socket: Arc<dyn Channel>, until: Instant) -> io::Result<Arc<dyn Channel>> {
        let channel = TlsChannel {
            socket,
            session: Mutex::new(self.session()?),
            received: Mutex::default(),
            sending: Mutex::default(),
        };
        while channel.session.lock().is_handshaking() {
            channel.socket.set_timeout(Some(time_left(until)?))?;
            channel.push()?;
            if !channel.session.lock().is_handshaking() {
                break;
            }
            match channel.pull() {
                Ok(true) => {}
                Ok(false) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    // Send the peer a TLS alert.
                    let _ = channel.push();
                    return Err(error);
                }
            }
        }
        channel.push()?;
        self.admit(&channel)?;
        Ok(Arc::new(channel))
    }

    fn admit(&self, channel: &TlsChannel) -> io::Result<()> {
        let Some(admission) = &self.admission else { return Ok(()) };
        let Some(certificate) = channel.session.lock().certificate() else { return Ok(()) };
        match subject::of(&certificate) {
            Some(subject) if admission.admits(&subject) => Ok(()),
            _ => {
                let why = "the client's certificate is not among those that may connect";
                Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
            }
        }
    }
}

/// A connection inside TLS.
pub struct TlsChannel {
    socket: Arc<dyn Channel>,
    /// Never locked while waiting to receive from the socket.
    session: Mutex<Session>,
    /// Received ciphertext, for the receiving thread.
    received: Mutex<Received>,
    /// Ciphertext to send; records must be sent in the order of their encryption.
    sending: Mutex<Sending>,
}

/// Ciphertext to send: `buf[sent..]` is unsent.
#[derive(Default)]
struct Sending {
    buf: Vec<u8>,
    sent: usize,
}

impl fmt::Debug for TlsChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsChannel").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl TlsChannel {
    /// Passes ciphertext to the session; `false` at the end.
    fn pull(&self) -> io::Result<bool> {
        let take_in = |ciphertext: &[u8]| self.session.lock().take_in(ciphertext);
        self.received.lock().pass(|buf| self.socket.recv(buf), take_in)
    }

    /// Sends the session's output.
    fn push(&self) -> io::Result<()> {
        let mut out = self.sending.lock();
        self.push_held(&mut out)
    }

    /// Appends the session's output to the ciphertext to send.
    fn gather(&self, out: &mut Sending) -> io::Result<()> {
        if out.sent == out.buf.len() {
            out.buf.clear();
            out.sent = 0;
        }
        self.session.lock().give_out(&mut out.buf)
    }

    fn push_held(&self, out: &mut Sending) -> io::Result<()> {
        self.gather(out)?;
        let rest = &out.buf[std::mem::replace(&mut out.sent, out.buf.len())..];
        if rest.is_empty() { Ok(()) } else { self.socket.send(rest) }
    }

    /// As [`TlsChannel::push`], without waiting for long; returns whether everything was sent.
    fn push_ready(&self, out: &mut Sending) -> io::Result<bool> {
        self.gather(out)?;
        let (sent, _) = self.socket.send_ready(&out.buf[out.sent..])?;
        out.sent += sent;
        Ok(out.sent == out.buf.len())
    }
}

impl Channel for TlsChannel {
    fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            let wants_write = {
                let mut session = self.session.lock();
                match session.read(buf) {
                    Ok(got) => return Ok(got),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    // The peer closed without close_notify. Requests have lengths, so none was
                    // truncated unnoticed.
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                    Err(error) => return Err(error),
                }
                session.has_output()
            };
            if wants_write {
                self.push()?;
            }
            if !self.pull()? {
                return Ok(0);
            }
        }
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let mut out = self.sending.lock();
        self.push_held(&mut out)?;
        for piece in bytes.chunks(SEND_BYTES) {
            self.session.lock().write(piece)?;
            self.push_held(&mut out)?;
        }
        Ok(())
    }

    fn send_ready(&self, bytes: &[u8]) -> io::Result<(usize, bool)> {
        let mut out = self.sending.lock();
        let mut taken = 0;
        for piece in bytes.chunks(SEND_BYTES) {
            if !self.push_ready(&mut out)? {
                break;
            }
            self.session.lock().write(piece)?;
            taken += piece.len();
        }
        let all = self.push_ready(&mut out)?;
        Ok((taken, all))
    }

    fn set_timeout(&self, most: Option<Duration>) -> io::Result<()> {
        self.socket.set_timeout(most)
    }

    fn shutdown(&self, how: Shutdown) {
        if how != Shutdown::Read {
            self.session.lock().say_goodbye();
            // Without waiting for a sending thread or the peer: the socket closes anyway.
            if let Some(mut out) = self.sending.try_lock() {
                let _ = self.push_ready(&mut out);
            }
        }
        self.socket.shutdown(how);
    }

    fn has_left(&self) -> bool {
        self.socket.has_left()
    }
}

#[cfg(all(test, not(feature = "tls-psk")))]
mod tests {
    use super::*;

    #[test]
    fn a_build_without_pre_shared_keys_says_so() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(KEYS), "bob:00").unwrap();
        let error = Tls::from_folder(folder.path()).unwrap_err().to_string();
        assert!(error.contains("keys.psk: this build") && error.contains("tls-psk"), "{error}");
    }
}
