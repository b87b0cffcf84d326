//! TLS with certificates, by rustls, or with a pre-shared key.
//!
//! The files have QEMU's names: `ca-cert.pem`, and `client-cert.pem` with `client-key.pem` if the
//! server asks clients for a certificate.

use std::fmt;
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};

use crate::channel::Socket;
use crate::uri::{Place, TlsNames};

/// Ciphertext received at once: somewhat more than a record.
const RECEIVE_BYTES: usize = 32 << 10;
/// Maximum plaintext per encryption step, which bounds memory.
const SEND_BYTES: usize = 256 << 10;

const CA_CERTIFICATE: &str = "ca-cert.pem";
const CERTIFICATE: &str = "client-cert.pem";
const PRIVATE_KEY: &str = "client-key.pem";

/// The name of a client that gives none.
#[cfg(feature = "tls-psk")]
const USER: &str = "qemu";

/// TLS configuration of a client.
#[derive(Clone, Debug)]
pub(crate) enum Tls {
    /// With certificates.
    Certificates(Arc<ClientConfig>, ServerName<'static>),
    /// With a pre-shared key.
    #[cfg(feature = "tls-psk")]
    Key(Arc<vdkit_nbd_wire::psk::Keys>),
}

fn bad(path: &Path, why: impl fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("{}: {why}", path.display()))
}

fn invalid(error: impl fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("TLS: {error}"))
}

fn certificates(path: &Path) -> io::Result<Vec<CertificateDer<'static>>> {
    let found: Result<Vec<_>, _> =
        CertificateDer::pem_file_iter(path).map_err(|error| bad(path, error))?.collect();
    let found = found.map_err(|error| bad(path, error))?;
    if found.is_empty() { Err(bad(path, "holds no certificate")) } else { Ok(found) }
}

impl Tls {
    /// Reads certificates and key, or the pre-shared key.
    ///
    /// # Errors
    /// `InvalidInput` for missing or ill-formed files, naming the file.
    pub(crate) fn new(names: &TlsNames, place: &Place) -> io::Result<Self> {
        match &names.keys {
            Some(file) => Self::with_key(file, names.user.as_deref()),
            None => Self::with_certificates(names, place),
        }
    }

    #[cfg(feature = "tls-psk")]
    fn with_key(file: &Path, user: Option<&str>) -> io::Result<Self> {
        vdkit_nbd_wire::psk::load_one(file, user.unwrap_or(USER)).map(Self::Key)
    }

    #[cfg(not(feature = "tls-psk"))]
    fn with_key(file: &Path, _user: Option<&str>) -> io::Result<Self> {
        Err(bad(file, "this build has no pre-shared keys; build it with the feature tls-psk"))
    }

    fn with_certificates(names: &TlsNames, place: &Place) -> io::Result<Self> {
        let host = match (&names.hostname, place) {
            (Some(name), _) => name.as_str(),
            (None, Place::Tcp { host, .. }) => host.as_str(),
            (None, Place::Unix(_)) => "localhost",
        };
        let server = ServerName::try_from(host.to_owned()).map_err(|_| {
            let why = format!(
                "'{host}' is no name that a certificate could have: name it by 'tls-hostname'"
            );
            io::Error::new(io::ErrorKind::InvalidInput, why)
        })?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(invalid)?;
        let Some(folder) = &names.certificates else {
            let verifier = rustls_platform_verifier::Verifier::new(provider).map_err(invalid)?;
            let config = builder
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(verifier))
                .with_no_client_auth();
            return Ok(Self::Certificates(Arc::new(config), server));
        };
        let ca = folder.join(CA_CERTIFICATE);
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&ca)? {
            roots.add(certificate).map_err(|error| bad(&ca, error))?;
        }
        let builder = builder.with_root_certificates(roots);
        let (own, key) = (folder.join(CERTIFICATE), folder.join(PRIVATE_KEY));
        // A dangling link counts as existing: reading the file reports it.
        let config = if own.symlink_metadata().is_err() && key.symlink_metadata().is_err() {
            builder.with_no_client_auth()
        } else {
            let chain = certificates(&own)?;
            let private = PrivateKeyDer::from_pem_file(&key).map_err(|error| bad(&key, error))?;
            builder.with_client_auth_cert(chain, private).map_err(|error| bad(&key, error))?
        };
        Ok(Self::Certificates(Arc::new(config), server))
    }

    fn session(&self) -> io::Result<Session> {
        match self {
            Self::Certificates(config, server) => {
                let mut session =
                    ClientConnection::new(config.clone(), server.clone()).map_err(invalid)?;
                session.set_buffer_limit(None);
                Ok(Session::Certificates(Box::new(session)))
            }
            #[cfg(feature = "tls-psk")]
            Self::Key(key) => vdkit_nbd_wire::psk::PskSession::client(key).map(Session::Key),
        }
    }

    /// Starts TLS on a connection.
    ///
    /// # Errors
    /// Errors of the socket; `InvalidData` if the server's certificate is not accepted;
    /// `TimedOut` after `until`.
    pub(crate) fn start(&self, socket: Socket, until: Instant) -> io::Result<TlsStream> {
        let session = self.session()?;
        let stream = TlsStream {
            socket,
            session: Mutex::new(session),
            incoming: Mutex::new(Incoming { buf: vec![0; RECEIVE_BYTES], start: 0, end: 0 }),
            outgoing: Mutex::default(),
        };
        loop {
            stream.push()?;
            if !stream.session.lock().is_handshaking() {
                return Ok(stream);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            stream.socket.set_timeout(Some(left))?;
            match stream.pull() {
                Ok(true) => {}
                Ok(false) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    // Tells the server why, if it still listens.
                    let _ = stream.push();
                    return Err(error);
                }
            }
        }
    }
}

/// The TLS state of a connection, between plaintext and ciphertext. No method blocks.
enum Session {
    Certificates(Box<ClientConnection>),
    #[cfg(feature = "tls-psk")]
    Key(vdkit_nbd_wire::psk::PskSession),
}

impl Session {
    fn is_handshaking(&self) -> bool {
        match self {
            Self::Certificates(session) => session.is_handshaking(),
            #[cfg(feature = "tls-psk")]
            Self::Key(session) => session.is_handshaking(),
        }
    }

    fn has_output(&self) -> bool {
        match self {
            Self::Certificates(session) => session.wants_write(),
            #[cfg(feature = "tls-psk")]
            Self::Key(session) => session.has_output(),
        }
    }

    /// Takes ciphertext from the server, and returns how many bytes were taken.
    fn take_in(&mut self, ciphertext: &[u8]) -> io::Result<usize> {
        match self {
            Self::Certificates(session) => {
                let taken = session.read_tls(&mut &*ciphertext)?;
                session.process_new_packets().map_err(invalid)?;
                Ok(taken)
            }
            #[cfg(feature = "tls-psk")]
            Self::Key(session) => session.take_in(ciphertext),
        }
    }

    /// Appends the ciphertext to send to `out`.
    fn give_out(&mut self, out: &mut Vec<u8>) -> io::Result<()> {
        match self {
            Self::Certificates(session) => {
                while session.wants_write() {
                    session.write_tls(out)?;
                }
            }
            #[cfg(feature = "tls-psk")]
            Self::Key(session) => session.give_out(out),
        }
        Ok(())
    }

    /// Reads plaintext; `WouldBlock` if there is none yet.
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Certificates(session) => session.reader().read(buf),
            #[cfg(feature = "tls-psk")]
            Self::Key(session) => session.read(buf),
        }
    }

    /// Encrypts all bytes.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Certificates(session) => session.writer().write_all(bytes),
            #[cfg(feature = "tls-psk")]
            Self::Key(session) => session.write(bytes),
        }
    }
}

/// Ciphertext not yet taken by the session: `buf[start..end]`.
struct Incoming {
    buf: Vec<u8>,
    start: usize,
    end: usize,
}

/// A socket within TLS.
pub(crate) struct TlsStream {
    socket: Socket,
    /// Never locked while waiting for the socket.
    session: Mutex<Session>,
    /// Received ciphertext; locked by the receiving thread.
    incoming: Mutex<Incoming>,
    /// Ciphertext to send, in the order of its encryption.
    outgoing: Mutex<Vec<u8>>,
}

impl fmt::Debug for TlsStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsStream").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl TlsStream {
    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Passes ciphertext to the session, receiving more only if none is left; `false` at the end.
    /// (The session takes nothing while it holds unread plaintext.)
    fn pull(&self) -> io::Result<bool> {
        let mut incoming = self.incoming.lock();
        let Incoming { buf, start, end } = &mut *incoming;
        if start == end {
            (*start, *end) = (0, self.socket.recv(buf)?);
            if *end == 0 {
                return Ok(false);
            }
        }
        *start += self.session.lock().take_in(&buf[*start..*end])?;
        Ok(true)
    }

    /// Sends the session's output.
    fn push(&self) -> io::Result<()> {
        let mut outgoing = self.outgoing.lock();
        self.push_held(&mut outgoing)
    }

    fn push_held(&self, outgoing: &mut Vec<u8>) -> io::Result<()> {
        outgoing.clear();
        self.session.lock().give_out(outgoing)?;
        if outgoing.is_empty() { Ok(()) } else { self.socket.send(outgoing, &[]) }
    }

    /// As [`crate::channel::Channel::recv`].
    pub(crate) fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        if buf.is_empty() {
            return Ok(0);
        }
        loop {
            let wants_write = {
                let mut session = self.session.lock();
                match session.read(buf) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    read => return read,
                }
                session.has_output()
            };
            // A thread that sends may wait for a server that waits for this thread. It sends this too, or
            // the next one does.
            if wants_write && let Some(mut outgoing) = self.outgoing.try_lock() {
                self.push_held(&mut outgoing)?;
            }
            if !self.pull()? {
                return Ok(0);
            }
        }
    }

    /// As [`crate::channel::Channel::send`].
    pub(crate) fn send(&self, head: &[u8], payload: &[u8]) -> io::Result<()> {
        let mut outgoing = self.outgoing.lock();
        self.session.lock().write(head)?;
        for piece in payload.chunks(SEND_BYTES) {
            self.session.lock().write(piece)?;
            self.push_held(&mut outgoing)?;
        }
        self.push_held(&mut outgoing)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn who_receives_does_not_wait_for_who_sends() {
        let folder = tempfile::tempdir().unwrap();
        let place = Place::Unix(folder.path().join("s"));
        let listener = UnixListener::bind(folder.path().join("s")).unwrap();
        let socket = Socket::connect(&place, Instant::now() + Duration::from_secs(60)).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(
            rustls::crypto::aws_lc_rs::default_provider(),
        ))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
        let tls = Tls::Certificates(Arc::new(config), ServerName::try_from("localhost").unwrap());
        let stream = TlsStream {
            socket,
            session: Mutex::new(tls.session().unwrap()),
            incoming: Mutex::new(Incoming { buf: vec![0; RECEIVE_BYTES], start: 0, end: 0 }),
            outgoing: Mutex::default(),
        };
        assert!(stream.session.lock().has_output());
        server.write_all(&[0xff; 64]).unwrap();
        let (tell, told) = channel();
        std::thread::scope(|scope| {
            // As a thread that sends to a server that does not read.
            let sending = stream.outgoing.lock();
            scope.spawn(|| tell.send(stream.recv(&mut [0; 8]).map_err(|e| e.kind())).unwrap());
            let got = told.recv_timeout(Duration::from_secs(60));
            drop(sending);
            assert_eq!(got, Ok(Err(io::ErrorKind::InvalidData)), "that is no TLS");
        });
    }
}
