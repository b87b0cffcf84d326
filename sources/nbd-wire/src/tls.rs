//! TLS on both sides: the session between plaintext and ciphertext, a connection within it, and
//! files of certificates.

use std::fmt;
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{Connection, RootCertStore};

#[cfg(feature = "tls-psk")]
use crate::psk::PskSession;
use crate::{Transport, time_left};

/// Ciphertext received at once: somewhat more than a record.
const RECEIVE_BYTES: usize = 32 << 10;
/// Maximum plaintext per encryption step, which bounds memory.
const SEND_BYTES: usize = 256 << 10;
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
    fn is_handshaking(&self) -> bool {
        match self {
            Self::Certificates(connection) => connection.is_handshaking(),
            #[cfg(feature = "tls-psk")]
            Self::Key(session) => session.is_handshaking(),
        }
    }

    /// Takes ciphertext from the peer and returns how many bytes were taken; possibly 0 while there
    /// is unread plaintext.
    fn take_in(&mut self, ciphertext: &[u8]) -> io::Result<usize> {
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
    fn has_output(&self) -> bool {
        match self {
            Self::Certificates(connection) => connection.wants_write(),
            #[cfg(feature = "tls-psk")]
            Self::Key(session) => session.has_output(),
        }
    }

    /// Appends that ciphertext to `out`.
    fn give_out(&mut self, out: &mut Vec<u8>) -> io::Result<()> {
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

    /// Reads plaintext; 0 at its end, `WouldBlock` if there is none yet, `UnexpectedEof` if the peer
    /// ended without close_notify.
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Certificates(connection) => connection.reader().read(buf),
            #[cfg(feature = "tls-psk")]
            Self::Key(session) => session.read(buf),
        }
    }

    /// Encrypts all bytes.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Certificates(connection) => connection.writer().write_all(bytes),
            #[cfg(feature = "tls-psk")]
            Self::Key(session) => session.write(bytes),
        }
    }

    /// Encrypts a close_notify.
    fn say_goodbye(&mut self) {
        match self {
            Self::Certificates(connection) => connection.send_close_notify(),
            #[cfg(feature = "tls-psk")]
            Self::Key(session) => session.say_goodbye(),
        }
    }

    fn certificate(&self) -> Option<Vec<u8>> {
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
struct Received {
    buf: Vec<u8>,
    start: usize,
    end: usize,
}

/// Ciphertext to send: `buf[sent..]` is unsent.
#[derive(Default)]
struct Sending {
    buf: Vec<u8>,
    sent: usize,
}

/// A connection within TLS.
pub struct TlsStream<T: ?Sized> {
    socket: Arc<T>,
    /// Never locked while waiting to receive from the socket.
    session: Mutex<Session>,
    /// Received ciphertext, for the receiving thread.
    received: Mutex<Received>,
    /// Ciphertext to send; records must be sent in the order of their encryption.
    sending: Mutex<Sending>,
}

impl<T: fmt::Debug + ?Sized> fmt::Debug for TlsStream<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsStream").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl<T: Transport + ?Sized> TlsStream<T> {
    /// Starts TLS on a connection; the peer has until `until`.
    ///
    /// # Errors
    /// Errors of the socket; `InvalidData` if the peer's TLS is not acceptable; `TimedOut`.
    pub fn start(socket: Arc<T>, session: Session, until: Instant) -> io::Result<Self> {
        let received = Received { buf: vec![0; RECEIVE_BYTES], start: 0, end: 0 };
        let stream = Self {
            socket,
            session: Mutex::new(session),
            received: Mutex::new(received),
            sending: Mutex::default(),
        };
        loop {
            stream.socket.set_timeout(Some(time_left(until)?))?;
            stream.push()?;
            if !stream.session.lock().is_handshaking() {
                return Ok(stream);
            }
            match stream.pull() {
                Ok(true) => {}
                Ok(false) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    // The alert with the reason, if the peer still listens.
                    let _ = stream.push();
                    return Err(error);
                }
            }
        }
    }

    /// The connection beneath.
    pub fn socket(&self) -> &T {
        &self.socket
    }

    /// The certificate (DER) that the peer presented and that was verified.
    pub fn certificate(&self) -> Option<Vec<u8>> {
        self.session.lock().certificate()
    }

    /// Feeds ciphertext to the session, receiving more only if none is left; `false` at the end.
    /// (The session takes nothing while it holds unread plaintext.)
    fn pull(&self) -> io::Result<bool> {
        let mut received = self.received.lock();
        let Received { buf, start, end } = &mut *received;
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
        self.push_held(&mut self.sending.lock())
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

    /// As [`TlsStream::push`], without waiting for long; returns whether everything was sent.
    fn push_ready(&self, out: &mut Sending) -> io::Result<bool> {
        self.gather(out)?;
        out.sent += self.socket.send_ready(&out.buf[out.sent..])?.0;
        Ok(out.sent == out.buf.len())
    }

    /// Sends all bytes of a header, which is short, and of a payload.
    ///
    /// # Errors
    /// As [`Transport::recv`].
    pub fn send_both(&self, head: &[u8], payload: &[u8]) -> io::Result<()> {
        let mut out = self.sending.lock();
        self.push_held(&mut out)?;
        self.session.lock().write(head)?;
        for piece in payload.chunks(SEND_BYTES) {
            self.session.lock().write(piece)?;
            self.push_held(&mut out)?;
        }
        self.push_held(&mut out)
    }

    /// Sends a close_notify, without waiting for a sending thread or for the peer: the socket closes
    /// anyway.
    pub fn say_goodbye(&self) {
        self.session.lock().say_goodbye();
        if let Some(mut out) = self.sending.try_lock() {
            let _ = self.push_ready(&mut out);
        }
    }
}

impl<T: Transport + ?Sized> Transport for TlsStream<T> {
    /// The end may come with close_notify or without: what is received has lengths of its own, so
    /// nothing is cut unnoticed.
    fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        if buf.is_empty() {
            return Ok(0);
        }
        loop {
            let wants_write = {
                let mut session = self.session.lock();
                match session.read(buf) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                    read => return read,
                }
                session.has_output()
            };
            // This thread must not wait for the lock. A sending thread holds it until the peer reads,
            // and the peer may wait for this thread. Whoever sends next also sends this output.
            if wants_write && let Some(mut out) = self.sending.try_lock() {
                self.push_ready(&mut out)?;
            }
            if !self.pull()? {
                return Ok(0);
            }
        }
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.send_both(&[], bytes)
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
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use rustls::{ClientConfig, ClientConnection};

    use super::*;

    /// A peer that sends what is no TLS.
    struct Noise;

    impl Transport for Noise {
        fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
            buf.fill(0xff);
            Ok(buf.len())
        }

        fn send(&self, _bytes: &[u8]) -> io::Result<()> {
            Ok(())
        }

        fn set_timeout(&self, _most: Option<Duration>) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_receiving_thread_does_not_wait_for_a_sending_one() {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        let name = "localhost".try_into().unwrap();
        let connection = ClientConnection::new(Arc::new(config), name).unwrap();
        let stream = TlsStream {
            socket: Arc::new(Noise),
            session: Mutex::new(Session::with_certificates(connection)),
            received: Mutex::new(Received { buf: vec![0; RECEIVE_BYTES], start: 0, end: 0 }),
            sending: Mutex::default(),
        };
        assert!(stream.session.lock().has_output());
        let (sender, receiver) = channel();
        std::thread::scope(|scope| {
            // As a thread that sends to a peer that does not read.
            let sending = stream.sending.lock();
            scope.spawn(|| sender.send(stream.recv(&mut [0; 8]).map_err(|e| e.kind())).unwrap());
            let got = receiver.recv_timeout(Duration::from_secs(60));
            drop(sending);
            assert_eq!(got, Ok(Err(io::ErrorKind::InvalidData)));
        });
    }
}
