//! TLS 1.3 with pre-shared keys, by s2n-tls (RFC 8446 section 4.2.11, RFC 9257).
//!
//! The key file is in GnuTLS's format, which QEMU, nbdkit and libnbd use too: one line per client,
//! `NAME:HEXKEY`, as `psktool` writes it.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::task::Poll;

use s2n_tls::config::Config;
use s2n_tls::connection::Connection;
use s2n_tls::enums::{Blinding, PskHmac};
use s2n_tls::psk::Psk;
use s2n_tls::security;
use zeroize::Zeroizing;

use crate::tls::bad;
use crate::wires::Wired;

/// Maximum bytes of a key file.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Maximum keys in it: each handshake searches all of them.
const KEYS_MAX: usize = 256;
/// Minimum bytes of a key (RFC 9257 section 6).
const KEY_BYTES_MIN: usize = 16;
/// Maximum bytes of a client's name.
const NAME_BYTES_MAX: usize = 1024;

/// A line of a key file.
struct Line<'a> {
    name: &'a str,
    key: Zeroizing<Vec<u8>>,
}

/// The keys of a server, or the one key of a client.
pub struct Keys {
    config: Config,
    keys: Vec<Psk>,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys").field("clients", &self.keys.len()).finish_non_exhaustive()
    }
}

/// Reads a key file: all of its keys, for a server.
///
/// # Errors
/// `InvalidInput` for a missing or ill-formed file. The message names the file and the line, and
/// holds no key.
pub fn load(path: &Path) -> io::Result<Arc<Keys>> {
    load_where(path, |_| true)
}

/// Reads the key of one name from a key file, for a client.
///
/// # Errors
/// As [`load`], and if the file has no key for the name.
pub fn load_one(path: &Path, name: &str) -> io::Result<Arc<Keys>> {
    let keys = load_where(path, |line| line.name == name)?;
    if keys.keys.is_empty() {
        return Err(bad(path, format!("holds no key for '{name}'")));
    }
    Ok(keys)
}

fn load_where(path: &Path, wanted: impl Fn(&Line<'_>) -> bool) -> io::Result<Arc<Keys>> {
    let len = std::fs::metadata(path).map_err(|error| bad(path, error))?.len();
    if len > FILE_BYTES_MAX {
        return Err(bad(path, format!("is {len} bytes long, more than {FILE_BYTES_MAX}")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| bad(path, error))?;
    let text = Zeroizing::new(text);
    let keys = parse(path, &text)?
        .iter()
        .filter(|line| wanted(line))
        .map(|line| psk(line.name, &line.key).map_err(|error| bad(path, error)))
        .collect::<io::Result<Vec<_>>>()?;
    let mut config = Config::builder();
    config.set_security_policy(&security::DEFAULT_TLS13).map_err(|error| bad(path, error))?;
    let config = config.build().map_err(|error| bad(path, error))?;
    Ok(Arc::new(Keys { config, keys }))
}

/// Parses the names and keys of a file.
fn parse<'a>(path: &Path, text: &'a str) -> io::Result<Vec<Line<'a>>> {
    let mut found: Vec<Line<'_>> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        // Messages must not contain a key.
        let wrong = |why: &str| bad(path, format!("line {}: {why}", number + 1));
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let Some((name, hex)) = line.rsplit_once(':') else {
            return Err(wrong("expected NAME:KEY, the key in hexadecimal, as psktool writes it"));
        };
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            return Err(wrong("the name before the colon is empty or too long"));
        }
        if found.iter().any(|other| other.name == name) {
            return Err(wrong("this name was on a line before"));
        }
        let key = hexadecimal(hex).ok_or_else(|| wrong("the key is not in hexadecimal"))?;
        if key.len() < KEY_BYTES_MIN {
            return Err(wrong("the key is shorter than 16 bytes; psktool makes longer ones"));
        }
        if found.len() == KEYS_MAX {
            return Err(wrong("one server takes 256 keys at most"));
        }
        found.push(Line { name, key });
    }
    if found.is_empty() { Err(bad(path, "holds no key")) } else { Ok(found) }
}

fn hexadecimal(text: &str) -> Option<Zeroizing<Vec<u8>>> {
    let digits = text.as_bytes();
    let mut bytes = Zeroizing::new(Vec::with_capacity(digits.len() / 2));
    let digit = |byte: u8| char::from(byte).to_digit(16);
    for pair in digits.chunks(2) {
        let [high, low] = pair else { return None };
        bytes.push((digit(*high)? * 16 + digit(*low)?) as u8);
    }
    Some(bytes)
}

fn psk(name: &str, key: &[u8]) -> Result<Psk, s2n_tls::error::Error> {
    let mut psk = Psk::builder()?;
    // The hash that GnuTLS uses with its keys.
    psk.set_identity(name.as_bytes())?.set_secret(key)?.set_hmac(PskHmac::SHA256)?;
    psk.build()
}

/// The TLS state of one connection, between plaintext and ciphertext. No method blocks.
#[derive(Debug)]
pub struct PskSession {
    wired: Wired,
    handshaking: bool,
}

impl PskSession {
    /// The server's side of a connection.
    ///
    /// # Errors
    /// Errors of the TLS library, which are not expected.
    pub fn server(keys: &Keys) -> io::Result<Self> {
        Self::new(keys, Connection::new_server())
    }

    /// The client's side of a connection. Its first message is ready to be sent.
    ///
    /// # Errors
    /// As [`PskSession::server`].
    pub fn client(keys: &Keys) -> io::Result<Self> {
        let mut this = Self::new(keys, Connection::new_client())?;
        this.negotiate()?;
        Ok(this)
    }

    fn new(keys: &Keys, mut connection: Connection) -> io::Result<Self> {
        // A failed connection is closed at once, so its timing reveals nothing; a sleep here would
        // block a thread.
        connection.set_blinding(Blinding::SelfService).map_err(invalid)?;
        connection.set_config(keys.config.clone()).map_err(invalid)?;
        for key in &keys.keys {
            connection.append_psk(key).map_err(invalid)?;
        }
        Ok(Self { wired: Wired::new(connection).map_err(invalid)?, handshaking: true })
    }

    fn negotiate(&mut self) -> io::Result<()> {
        if self.handshaking {
            match self.wired.negotiate() {
                Poll::Ready(Ok(())) => self.handshaking = false,
                Poll::Ready(Err(error)) => return Err(invalid(error)),
                Poll::Pending => {}
            }
        }
        Ok(())
    }

    // The methods that follow are described at `crate::tls::Session`.

    pub(crate) fn is_handshaking(&self) -> bool {
        self.handshaking
    }

    pub(crate) fn take_in(&mut self, ciphertext: &[u8]) -> io::Result<usize> {
        let taken = self.wired.take_in(ciphertext);
        self.negotiate()?;
        Ok(taken)
    }

    pub(crate) fn has_output(&self) -> bool {
        self.wired.has_output()
    }

    pub(crate) fn give_out(&mut self, out: &mut Vec<u8>) {
        self.wired.give_out(out);
    }

    pub(crate) fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if buf.is_empty() {
            return Ok(0);
        }
        match self.wired.recv(buf) {
            Poll::Ready(got) => got.map_err(invalid),
            Poll::Pending => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    pub(crate) fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.wired.send(bytes) {
                Poll::Ready(Ok(sent)) if sent > 0 => bytes = &bytes[sent..],
                Poll::Ready(Err(error)) => return Err(invalid(error)),
                // The in-memory transport takes everything.
                Poll::Ready(Ok(_)) | Poll::Pending => {
                    return Err(io::Error::other("TLS took none of the bytes to send"));
                }
            }
        }
        Ok(())
    }

    pub(crate) fn say_goodbye(&mut self) {
        // The alert was queued or cannot be sent any more: the socket closes either way.
        let _ = self.wired.shutdown_send();
    }
}

fn invalid(error: s2n_tls::error::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Vec<(String, Vec<u8>)>, String> {
        let keys = parse(Path::new("keys.psk"), text).map_err(|error| error.to_string())?;
        Ok(keys.iter().map(|line| (line.name.to_owned(), line.key.to_vec())).collect())
    }

    #[test]
    fn keys_are_read_as_psktool_writes_them() {
        let text = "# made today\n\nalice:000102030405060708090a0b0c0d0e0f\nb:ob:FFFFffffFFFFffffFFFFffffFFFFffff\n";
        let keys = parsed(text).unwrap();
        assert_eq!(keys[0], ("alice".to_owned(), (0..16).collect()));
        assert_eq!(keys[1], ("b:ob".to_owned(), vec![0xff; 16]));
    }

    #[test]
    fn errors_name_the_line_and_hold_no_key() {
        let key = "0123456789abcdef0123456789abcdef";
        for (text, why) in [
            (String::new(), "no key"),
            (format!("alice {key}"), "line 1: expected NAME:KEY"),
            (format!("\n:{key}"), "line 2: the name"),
            (format!("a:{key}x"), "not in hexadecimal"),
            (format!("a:{}", &key[..31]), "not in hexadecimal"),
            (format!("a:{}é{}", &key[..10], &key[..20]), "not in hexadecimal"),
            (format!("a:{}", &key[..30]), "shorter than 16"),
            (format!("a:{key}\na:{key}"), "line 2: this name"),
            ((0..=KEYS_MAX).map(|i| format!("a{i}:{key}\n")).collect(), "256 keys"),
        ] {
            let error = parsed(&text).unwrap_err();
            assert!(error.contains(why), "{text:?}: {error}");
            assert!(error.contains("keys.psk") && !error.contains(&key[..8]), "{error}");
        }
    }
}
