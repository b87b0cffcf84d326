//! TLS around a connection: with certificates, or with keys that both sides know already.
//!
//! The files are named as QEMU names them, in one folder: `server-cert.pem`, `server-key.pem`, and
//! `ca-cert.pem`, whose presence means that clients must show a certificate of that authority, with
//! `ca-crl.pem`, the certificates that it has revoked; or `keys.psk` alone.

mod certificates;
mod psk;
mod wires;

use std::fmt;
use std::io;
use std::net::Shutdown;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustls::ServerConfig;

use crate::channel::Channel;

/// Ciphertext received at once: a record and a bit.
const RECEIVE_BYTES: usize = 32 << 10;
/// Plaintext that is encrypted in one go, so that sending takes bounded memory.
const SEND_BYTES: usize = 256 << 10;

const CERTIFICATE: &str = "server-cert.pem";
const PRIVATE_KEY: &str = "server-key.pem";
const CA_CERTIFICATE: &str = "ca-cert.pem";
const REVOKED: &str = "ca-crl.pem";
const KEYS: &str = "keys.psk";

/// What a server needs to speak TLS.
#[derive(Clone, Debug)]
pub struct Tls(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Certificates(Arc<ServerConfig>),
    Keys(Arc<psk::Keys>),
}

fn bad(path: &Path, why: impl fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("{}: {why}", path.display()))
}

/// Whether a file has this name. A name that leads nowhere (a link to a file that was moved, say) is a
/// mistake and never a file that nobody wanted: whoever reads the file finds out.
fn is_named(path: &Path) -> io::Result<bool> {
    match std::fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(io::Error::new(error.kind(), format!("{}: {error}", path.display()))),
    }
}

impl Tls {
    /// Reads the folder's certificates and key, or its keys.
    ///
    /// # Errors
    /// `InvalidInput` for what is missing or ill-formed, naming the file, and for a folder with
    /// both.
    pub fn from_folder(folder: &Path) -> io::Result<Self> {
        let keys = folder.join(KEYS);
        if !is_named(&keys)? {
            return Ok(Self(Kind::Certificates(certificates::load(folder)?)));
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
        Ok(Self(Kind::Keys(psk::load(&keys)?)))
    }

    fn session(&self) -> io::Result<Box<dyn Session>> {
        Ok(match &self.0 {
            Kind::Certificates(config) => Box::new(certificates::session(config)?),
            Kind::Keys(keys) => Box::new(psk::PskSession::new(keys)?),
        })
    }

    /// Speaks TLS on a connection from now on; the peer has until `until`.
    ///
    /// # Errors
    /// What the socket says; `InvalidData` where the peer's TLS is not acceptable; `TimedOut`.
    pub fn accept(&self, socket: Arc<dyn Channel>, until: Instant) -> io::Result<TlsChannel> {
        let channel = TlsChannel {
            socket,
            session: Mutex::new(self.session()?),
            received: Mutex::new(Received { buf: vec![0; RECEIVE_BYTES], start: 0, end: 0 }),
            sending: Mutex::default(),
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

/// The state of one side of a connection, between plaintext and ciphertext. No method waits.
trait Session: Send {
    /// Nothing can be read or written yet.
    fn is_handshaking(&self) -> bool;

    /// Takes ciphertext of the peer; returns how much of it, which may be none while there is
    /// plaintext to be read.
    ///
    /// # Errors
    /// `InvalidData` where it is not acceptable.
    fn take_in(&mut self, ciphertext: &[u8]) -> io::Result<usize>;

    /// Whether there is ciphertext for the peer.
    fn has_output(&self) -> bool;

    /// Adds that to `out`.
    ///
    /// # Errors
    /// None that is known.
    fn give_out(&mut self, out: &mut Vec<u8>) -> io::Result<()>;

    /// Plaintext; none at its end.
    ///
    /// # Errors
    /// `WouldBlock` where there is none yet; `UnexpectedEof` where the peer ended without a word.
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize>;

    /// Encrypts all of the bytes.
    ///
    /// # Errors
    /// A session that has failed.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Encrypts the word that nothing more will be sent.
    fn say_goodbye(&mut self);
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
    session: Mutex<Box<dyn Session>>,
    /// Ciphertext, of whoever receives.
    received: Mutex<Received>,
    /// Ciphertext, of whoever sends: records go out in the order in which they were made.
    sending: Mutex<Sending>,
}

/// Ciphertext that is on its way out: `buf[sent..]` has not been sent.
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
        *start += self.session.lock().take_in(&buf[*start..*end])?;
        Ok(true)
    }

    /// Sends what the session has to say.
    fn push(&self) -> io::Result<()> {
        let mut out = self.sending.lock();
        self.push_held(&mut out)
    }

    /// Adds what the session has to say to what is on its way out.
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

    /// As [`TlsChannel::push`], without waiting for long; says whether all has gone out.
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
                    // The peer closed without saying so: no request was cut, as requests have
                    // lengths.
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
            // Without waiting for whoever is sending, or for the peer: the socket ends all the same.
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
