//! TLS on both sides: the session between plaintext and ciphertext, and files of certificates.

use std::fmt;
use std::io::{self, Read, Write};
use std::path::Path;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{Connection, RootCertStore};

#[cfg(feature = "tls-psk")]
use crate::psk::PskSession;

/// Ciphertext received at once: somewhat more than a record.
const RECEIVE_BYTES: usize = 32 << 10;
/// Maximum plaintext per encryption step, which bounds memory.
pub const SEND_BYTES: usize = 256 << 10;
/// The file with the certificate of the authority that signed those of the peers.
pub const CA_CERTIFICATE: &str = "ca-cert.pem";

/// The error of a file that cannot be used.
pub fn bad(path: &Path, why: impl fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("{}: {why}", path.display()))
}

/// The error of what is not acceptable as TLS.
pub fn invalid(error: impl fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("TLS: {error}"))
}

/// All objects of one kind in a file; `what` is the kind in words.
///
/// # Errors
/// `InvalidInput` for a missing or ill-formed file, and for one without such an object.
pub fn objects<T: PemObject>(path: &Path, what: &str) -> io::Result<Vec<T>> {
    let found: Result<Vec<T>, _> =
        T::pem_file_iter(path).map_err(|error| bad(path, error))?.collect();
    let found = found.map_err(|error| bad(path, error))?;
    if found.is_empty() { Err(bad(path, format!("holds no {what}"))) } else { Ok(found) }
}

/// The authorities in a file.
///
/// # Errors
/// As [`objects`].
pub fn authorities(path: &Path) -> io::Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in objects::<CertificateDer<'static>>(path, "certificate")? {
        roots.add(certificate).map_err(|error| bad(path, error))?;
    }
    Ok(roots)
}

/// The TLS state of a connection, between plaintext and ciphertext. No method blocks.
pub enum Session {
    /// With certificates.
    Certificates(Box<Connection>),
    /// With a pre-shared key.
    #[cfg(feature = "tls-psk")]
    Key(PskSession),
}

impl Session {
    /// With certificates.
    pub fn with_certificates(connection: impl Into<Connection>) -> Self {
        let mut connection = connection.into();
        connection.set_buffer_limit(None);
        Self::Certificates(Box::new(connection))
    }

    /// Still in the handshake: no data can be read or written.
    pub fn is_handshaking(&self) -> bool {
        match self {
            Self::Certificates(connection) => connection.is_handshaking(),
            #[cfg(feature = "tls-psk")]
            Self::Key(session) => session.is_handshaking(),
        }
    }

    /// Takes ciphertext from the peer and returns how many bytes were taken; possibly 0 while there
    /// is unread plaintext.
    ///
    /// # Errors
    /// `InvalidData` if it is not acceptable.
    pub fn take_in(&mut self, ciphertext: &[u8]) -> io::Result<usize> {
        match self {
            Self::Certificates(connection) => {
                let taken = connection.read_tls(&mut &*ciphertext)?;
                connection.process_new_packets().map_err(invalid)?;
                Ok(taken)
            }
            #[cfg(feature = "tls-psk")]
            Self::Key(session) => session.take_in(ciphertext),
        }
    }

    /// Whether there is ciphertext to send.
    pub fn has_output(&self) -> bool {
        match self {
            Self::Certificates(connection) => connection.wants_write(),
            #[cfg(feature = "tls-psk")]
            Self::Key(session) => session.has_output(),
        }
    }

    /// Appends that ciphertext to `out`.
    ///
    /// # Errors
    /// None known.
    pub fn give_out(&mut self, out: &mut Vec<u8>) -> io::Result<()> {
        match self {
            Self::Certificates(connection) => {
                while connection.wants_write() {
                    connection.write_tls(out)?;
                }
            }
            #[cfg(feature = "tls-psk")]
            Self::Key(session) => session.give_out(out),
        }
        Ok(())
    }

    /// Reads plaintext; 0 at its end.
    ///
    /// # Errors
    /// `WouldBlock` if there is none yet; `UnexpectedEof` if the peer ended without close_notify.
    pub fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Certificates(connection) => connection.reader().read(buf),
            #[cfg(feature = "tls-psk")]
            Self::Key(session) => session.read(buf),
        }
    }

    /// Encrypts all bytes.
    ///
    /// # Errors
    /// If the session has failed.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Certificates(connection) => connection.writer().write_all(bytes),
            #[cfg(feature = "tls-psk")]
            Self::Key(session) => session.write(bytes),
        }
    }

    /// Encrypts a close_notify.
    pub fn say_goodbye(&mut self) {
        match self {
            Self::Certificates(connection) => connection.send_close_notify(),
            #[cfg(feature = "tls-psk")]
            Self::Key(session) => session.say_goodbye(),
        }
    }

    /// The certificate (DER) that the peer presented and that was verified.
    pub fn certificate(&self) -> Option<Vec<u8>> {
        match self {
            Self::Certificates(connection) => {
                connection.peer_certificates()?.first().map(|first| first.to_vec())
            }
            #[cfg(feature = "tls-psk")]
            Self::Key(_) => None,
        }
    }
}

/// Ciphertext not yet taken by the session: `buf[start..end]`.
pub struct Received {
    buf: Vec<u8>,
    start: usize,
    end: usize,
}

impl Default for Received {
    fn default() -> Self {
        Self { buf: vec![0; RECEIVE_BYTES], start: 0, end: 0 }
    }
}

impl Received {
    /// Passes ciphertext to the session, receiving more only if none is left; `false` at the end.
    /// (The session takes nothing while it holds unread plaintext.)
    ///
    /// # Errors
    /// Those of `recv` and of `take_in`.
    pub fn pass(
        &mut self,
        recv: impl FnOnce(&mut [u8]) -> io::Result<usize>,
        take_in: impl FnOnce(&[u8]) -> io::Result<usize>,
    ) -> io::Result<bool> {
        if self.start == self.end {
            (self.start, self.end) = (0, recv(&mut self.buf)?);
            if self.end == 0 {
                return Ok(false);
            }
        }
        self.start += take_in(&self.buf[self.start..self.end])?;
        Ok(true)
    }
}
