//! TLS around a connection.
//!
//! The files are named as QEMU and nbdkit name them, in one folder: `server-cert.pem`,
//! `server-key.pem`, and `ca-cert.pem`, whose presence means that clients must show a certificate
//! of that authority.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};

use crate::channel::Channel;

/// Ciphertext received at once: a record and a bit.
const RECEIVE_BYTES: usize = 32 << 10;
/// Plaintext that is encrypted in one go, so that sending takes bounded memory.
const SEND_BYTES: usize = 256 << 10;

/// What a server needs to speak TLS.
#[derive(Clone, Debug)]
pub struct Tls(Arc<ServerConfig>);

fn bad(path: &Path, why: impl fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("{}: {why}", path.display()))
}

impl Tls {
    /// Reads the folder's certificates and key.
    ///
    /// # Errors
    /// `InvalidInput` for what is missing or is no PEM, naming the file.
    pub fn from_folder(folder: &Path) -> io::Result<Self> {
        let certificates = |name: &str| -> io::Result<Vec<CertificateDer<'static>>> {
            let path = folder.join(name);
            let found: Result<Vec<_>, _> =
                CertificateDer::pem_file_iter(&path).map_err(|error| bad(&path, error))?.collect();
            let found = found.map_err(|error| bad(&path, error))?;
            if found.is_empty() { Err(bad(&path, "holds no certificate")) } else { Ok(found) }
        };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let chain = certificates("server-cert.pem")?;
        let key_path = folder.join("server-key.pem");
        let key = PrivateKeyDer::from_pem_file(&key_path).map_err(|error| bad(&key_path, error))?;
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| bad(folder, error))?;
        let ca = folder.join("ca-cert.pem");
        let builder = if ca.try_exists()? {
            let mut roots = RootCertStore::empty();
            for certificate in certificates("ca-cert.pem")? {
                roots.add(certificate).map_err(|error| bad(&ca, error))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .map_err(|error| bad(&ca, error))?;
            builder.with_client_cert_verifier(verifier)
        } else {
            builder.with_no_client_auth()
        };
        let config = builder.with_single_cert(chain, key).map_err(|error| bad(&key_path, error))?;
        Ok(Self(Arc::new(config)))
    }

    /// Speaks TLS on a connection from now on; the peer has until `until`.
    ///
    /// # Errors
    /// What the socket says; `InvalidData` where the peer's TLS is not acceptable; `TimedOut`.
    pub fn accept(&self, socket: Arc<dyn Channel>, until: Instant) -> io::Result<TlsChannel> {
        let mut session = ServerConnection::new(self.0.clone()).map_err(invalid)?;
        session.set_buffer_limit(None);
        let channel = TlsChannel {
            socket,
            session: Mutex::new(session),
            received: Mutex::new(Received { buf: vec![0; RECEIVE_BYTES], start: 0, end: 0 }),
            sending: Mutex::new(Vec::new()),
        };
        while channel.session.lock().is_handshaking() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            channel.socket.set_timeout(Some(left))?;
            channel.push()?;
            if !channel.session.lock().is_handshaking() {
                break;
            }
            match channel.pull() {
                Ok(true) => {}
                Ok(false) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    // The peer is told why.
                    let _ = channel.push();
                    return Err(error);
                }
            }
        }
        channel.push()?;
        Ok(channel)
    }
}

fn invalid(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// Ciphertext that the session has not taken yet: `buf[start..end]`.
struct Received {
    buf: Vec<u8>,
    start: usize,
    end: usize,
}

/// A connection inside TLS.
pub struct TlsChannel {
    socket: Arc<dyn Channel>,
    /// Never held while waiting for the socket to give.
    session: Mutex<ServerConnection>,
    /// Ciphertext, of whoever receives.
    received: Mutex<Received>,
    /// Ciphertext, of whoever sends: records go out in the order in which they were made.
    sending: Mutex<Vec<u8>>,
}

impl fmt::Debug for TlsChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsChannel").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl TlsChannel {
    /// Takes in some ciphertext, a new lot only where none is left; `false` at the end. (The session
    /// takes no more while it holds plaintext that nobody has read.)
    fn pull(&self) -> io::Result<bool> {
        let mut received = self.received.lock();
        let Received { buf, start, end } = &mut *received;
        if start == end {
            (*start, *end) = (0, self.socket.recv(buf)?);
            if *end == 0 {
                return Ok(false);
            }
        }
        let mut rest = &buf[*start..*end];
        let before = rest.len();
        let mut session = self.session.lock();
        session.read_tls(&mut rest)?;
        *start += before - rest.len();
        session.process_new_packets().map_err(invalid)?;
        Ok(true)
    }

    /// Sends what the session has to say.
    fn push(&self) -> io::Result<()> {
        let mut out = self.sending.lock();
        self.push_held(&mut out)
    }

    fn push_held(&self, out: &mut Vec<u8>) -> io::Result<()> {
        out.clear();
        {
            let mut session = self.session.lock();
            while session.wants_write() {
                session.write_tls(out)?;
            }
        }
        if out.is_empty() { Ok(()) } else { self.socket.send(out) }
    }
}

impl Channel for TlsChannel {
    fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            let wants_write = {
                let mut session = self.session.lock();
                match session.reader().read(buf) {
                    Ok(got) => return Ok(got),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    // The peer closed without saying so: no request was cut, as requests have
                    // lengths.
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                    Err(error) => return Err(error),
                }
                session.wants_write()
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
        for piece in bytes.chunks(SEND_BYTES) {
            self.session.lock().writer().write_all(piece)?;
            self.push_held(&mut out)?;
        }
        Ok(())
    }

    fn set_timeout(&self, most: Option<Duration>) -> io::Result<()> {
        self.socket.set_timeout(most)
    }

    fn shutdown(&self, how: Shutdown) {
        if how != Shutdown::Read {
            self.session.lock().send_close_notify();
            // Without waiting for whoever is sending: the socket ends all the same.
            if let Some(mut out) = self.sending.try_lock() {
                let _ = self.push_held(&mut out);
            }
        }
        self.socket.shutdown(how);
    }
}
