//! Names of exports: NBD URIs, and the names that QEMU used before.
//!
//! Source: the NBD project's `doc/uri.md`; `tls-certificates` and `tls-hostname` are libnbd's;
//! `nbd:HOST:PORT:exportname=NAME` and `nbd:unix:PATH:exportname=NAME` are QEMU's.

use std::path::PathBuf;
use std::time::Duration;

use crate::wire::{PORT, STRING_MAX};

/// The schemes of NBD URIs.
pub const SCHEMES: [&str; 4] = ["nbd", "nbds", "nbd+unix", "nbds+unix"];
/// Default time limit of a reconnection.
const RECONNECT: Duration = Duration::from_secs(15);
/// Maximum time limit of a reconnection: a day.
const RECONNECT_SECONDS_MAX: u64 = 86_400;
/// Default of the maximum number of connections.
const CONNECTIONS: usize = 4;
/// Upper limit for the maximum number of connections.
const CONNECTIONS_MAX: usize = 16;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A TCP port.
    Tcp {
        /// Host name or address, without brackets.
        host: String,
        /// Port.
        port: u16,
    },
    /// A Unix socket.
    Unix(PathBuf),
}

/// TLS of a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsNames {
    /// Folder with `ca-cert.pem`, and with `client-cert.pem` and `client-key.pem` if the server
    /// asks for a certificate. `None`: the authorities that the system trusts.
    pub certificates: Option<PathBuf>,
    /// The name that the server's certificate must have; `None` for the host's.
    pub hostname: Option<String>,
    /// File with pre-shared keys, one `NAME:HEXKEY` a line; no certificates are used then.
    pub keys: Option<PathBuf>,
    /// The name whose key is used; `None` for `qemu`.
    pub user: Option<String>,
}

/// A parsed name of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdUri {
    /// The name as the user gave it, for messages.
    pub name: String,
    /// Where the server listens.
    pub place: Place,
    /// TLS; `None` for plain connections.
    pub tls: Option<TlsNames>,
    /// The export's name; empty for the server's default export.
    pub export: String,
    /// How long to try to connect again after a connection was lost.
    pub reconnect: Duration,
    /// Maximum number of connections.
    pub connections: usize,
}

impl NbdUri {
    /// Whether a name is of an export, well-formed or not.
    pub fn matches(name: &str) -> bool {
        let Some((scheme, rest)) = name.split_once(':') else { return false };
        let known = SCHEMES.iter().any(|known| known.eq_ignore_ascii_case(scheme));
        known && (rest.starts_with("//") || scheme.eq_ignore_ascii_case("nbd"))
    }

    /// Parses a name.
    ///
    /// # Errors
    /// What is wrong with it, to follow the name in a message.
    pub fn parse(name: &str) -> Result<Self, String> {
        let (scheme, rest) = name.split_once(':').ok_or("is no NBD URI")?;
        let scheme = scheme.to_ascii_lowercase();
        if !SCHEMES.contains(&&*scheme) {
            return Err("is no NBD URI".to_owned());
        }
        match rest.strip_prefix("//") {
            Some(rest) => Self::parse_uri(name, &scheme, rest),
            None if scheme == "nbd" => Self::parse_old(name, rest),
            None => Err(format!("'{scheme}:' is followed by '//'")),
        }
    }

    fn plain(name: &str, place: Place, export: String) -> Result<Self, String> {
        if export.len() > STRING_MAX {
            return Err(format!("the export's name is longer than {STRING_MAX} bytes"));
        }
        let (reconnect, connections) = (RECONNECT, CONNECTIONS);
        Ok(Self { name: name.to_owned(), place, tls: None, export, reconnect, connections })
    }

    fn parse_uri(name: &str, scheme: &str, rest: &str) -> Result<Self, String> {
        let rest = rest.split_once('#').map_or(rest, |(before, _)| before);
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = match rest.find('/') {
            Some(at) => rest.split_at(at),
            None => (rest, ""),
        };
        let export = decoded(path.strip_prefix('/').unwrap_or(path))?;
        let (user, authority) = match authority.rsplit_once('@') {
            Some((user, authority)) => (Some(decoded(user)?), authority),
            None => (None, authority),
        };
        if user.is_some() && !scheme.starts_with("nbds") {
            return Err("a user's name is for TLS: the name begins with 'nbds'".to_owned());
        }
        let mut tls = scheme.starts_with("nbds").then(|| TlsNames { user, ..TlsNames::default() });
        let mut socket = None;
        let (mut reconnect, mut connections) = (RECONNECT, CONNECTIONS);
        for pair in query.split(['&', ';']).filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = decoded(value)?;
            match (key, &mut tls) {
                ("socket", _) => socket = Some(value),
                ("tls-certificates", Some(tls)) => tls.certificates = Some(value.into()),
                ("tls-hostname", Some(tls)) => tls.hostname = Some(value),
                ("tls-psk-file", Some(tls)) => tls.keys = Some(value.into()),
                ("tls-certificates" | "tls-hostname" | "tls-psk-file", None) => {
                    return Err(format!("'{key}' is for TLS: the name begins with 'nbds'"));
                }
                // A misspelled option must not weaken TLS.
                (key, _) if key.starts_with("tls-") => {
                    return Err(format!("the option '{key}' is not supported"));
                }
                ("reconnect", _) => {
                    reconnect = Duration::from_secs(number(key, &value, RECONNECT_SECONDS_MAX)?);
                }
                ("connections", _) => {
                    connections = number(key, &value, CONNECTIONS_MAX as u64)?.max(1) as usize;
                }
                _ => {}
            }
        }
        let place = match (scheme.ends_with("+unix"), socket) {
            (true, None) => return Err("the option 'socket=PATH' is missing".to_owned()),
            (true, Some(_)) if !authority.is_empty() => {
                return Err("a Unix socket has no host: three slashes follow the colon".to_owned());
            }
            (true, Some(path)) => Place::Unix(path.into()),
            (false, Some(_)) => {
                return Err("the option 'socket' is for names with '+unix'".to_owned());
            }
            (false, None) => host_and_port(authority)?,
        };
        if let Some(TlsNames { certificates, keys, user, .. }) = &tls {
            if keys.is_some() && certificates.is_some() {
                return Err("'tls-psk-file' and 'tls-certificates' exclude one another".to_owned());
            }
            if user.is_some() && keys.is_none() {
                return Err("a user's name belongs to a pre-shared key: name its file by \
                            'tls-psk-file'"
                    .to_owned());
            }
        }
        Ok(Self { tls, reconnect, connections, ..Self::plain(name, place, export)? })
    }

    fn parse_old(name: &str, rest: &str) -> Result<Self, String> {
        let (place, export) = rest.split_once(":exportname=").unwrap_or((rest, ""));
        let place = match place.strip_prefix("unix:") {
            Some("") => return Err("the socket's path is missing".to_owned()),
            Some(path) => Place::Unix(path.into()),
            None if place.contains(':') => host_and_port(place)?,
            None => return Err("expected nbd:HOST:PORT or nbd:unix:PATH".to_owned()),
        };
        Self::plain(name, place, export.to_owned())
    }
}

fn number(key: &str, text: &str, max: u64) -> Result<u64, String> {
    let parsed = text.parse().ok().filter(|number| *number <= max);
    parsed.ok_or_else(|| format!("'{key}' takes a number up to {max}, not '{text}'"))
}

fn host_and_port(authority: &str) -> Result<Place, String> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or("']' is missing after the address")?;
            (host.to_owned(), rest)
        }
        None => match authority.find(':') {
            Some(at) => (decoded(&authority[..at])?, &authority[at..]),
            None => (decoded(authority)?, ""),
        },
    };
    let port = match port.strip_prefix(':') {
        None if port.is_empty() => PORT,
        Some("") => PORT,
        Some(text) if text.bytes().all(|b| b.is_ascii_digit()) => {
            let port = text.parse::<u16>().ok().filter(|port| *port > 0);
            port.ok_or_else(|| format!("'{text}' is no port"))?
        }
        _ => return Err(format!("'{port}' is no port")),
    };
    let host = if host.is_empty() { "localhost".to_owned() } else { host };
    Ok(Place::Tcp { host, port })
}

/// Percent-decodes a part of a URI.
fn decoded(text: &str) -> Result<String, String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|digit| char::from(digit).to_digit(16));
        match (digit(), digit()) {
            (Some(high), Some(low)) => bytes.push((high * 16 + low) as u8),
            _ => return Err("'%' is followed by two hexadecimal digits".to_owned()),
        }
    }
    String::from_utf8(bytes)
        .ok()
        .filter(|text| !text.contains('\0'))
        .ok_or_else(|| "a part of it is not UTF-8, or holds a zero byte".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16) -> Place {
        Place::Tcp { host: host.to_owned(), port }
    }

    #[test]
    fn names_are_parsed() {
        let unix = |path: &str| Place::Unix(path.into());
        for (name, place, export, tls) in [
            ("nbd://example.com", tcp("example.com", 10809), "", false),
            ("nbd://example.com/", tcp("example.com", 10809), "", false),
            ("NBD://example.com:1/a", tcp("example.com", 1), "a", false),
            ("nbd://h/a/b%20c%2fd", tcp("h", 10809), "a/b c/d", false),
            ("nbd://h//a", tcp("h", 10809), "/a", false),
            ("nbd:///e", tcp("localhost", 10809), "e", false),
            ("nbd://[::1]:99/e?x=y", tcp("::1", 99), "e", false),
            ("nbd://[fe80::1%25eth0]/", tcp("fe80::1%25eth0", 10809), "", false),
            ("nbds://h:7/e#part", tcp("h", 7), "e", true),
            ("nbd+unix:///e?socket=/run/a.sock", unix("/run/a.sock"), "e", false),
            ("nbd+unix://?socket=a%20b", unix("a b"), "", false),
            ("nbds+unix:///%C3%A9?socket=s&tls-hostname=x", unix("s"), "é", true),
            ("nbd:host:1234", tcp("host", 1234), "", false),
            ("nbd:host:1234:exportname=a:b%20", tcp("host", 1234), "a:b%20", false),
            ("nbd:[::1]:1234", tcp("::1", 1234), "", false),
            ("nbd:unix:/run/s", unix("/run/s"), "", false),
            ("nbd:unix:/run/s:exportname=e", unix("/run/s"), "e", false),
        ] {
            assert!(NbdUri::matches(name), "{name}");
            let uri = NbdUri::parse(name).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!((&uri.place, &*uri.export), (&place, export), "{name}");
            assert_eq!((uri.tls.is_some(), &*uri.name), (tls, name), "{name}");
        }
    }

    #[test]
    fn options_are_parsed() {
        let uri = NbdUri::parse("nbds://h/?tls-certificates=/pki%20x;tls-hostname=n").unwrap();
        let tls = uri.tls.unwrap();
        assert_eq!(tls.certificates, Some("/pki x".into()));
        assert_eq!(tls.hostname.as_deref(), Some("n"));
        let uri = NbdUri::parse("nbds+unix://al%69ce@/?socket=s&tls-psk-file=k").unwrap();
        let tls = uri.tls.unwrap();
        assert_eq!((tls.user.as_deref(), tls.keys), (Some("alice"), Some("k".into())));
        let uri = NbdUri::parse("nbd://h/?reconnect=3&connections=2").unwrap();
        assert_eq!((uri.reconnect, uri.connections), (Duration::from_secs(3), 2));
    }

    #[test]
    fn malformed_names_are_refused() {
        for (name, why) in [
            ("nbd+unix:///e", "socket=PATH"),
            ("nbd+unix://host/e?socket=s", "no host"),
            ("nbd://h/?socket=s", "+unix"),
            ("nbd://h:0/", "no port"),
            ("nbd://h:65536/", "no port"),
            ("nbd://h:+1/", "no port"),
            ("nbd://[::1/", "']'"),
            ("nbd://h/%", "hexadecimal"),
            ("nbd://h/%f", "hexadecimal"),
            ("nbd://h/%ff", "UTF-8"),
            ("nbd://h/%00", "zero byte"),
            ("nbd://h/?tls-certificates=x", "nbds"),
            ("nbds://h/?tls-certificats=x", "not supported"),
            ("nbds://h/?tls-verify-peer=false", "not supported"),
            ("nbds://alice@h/", "tls-psk-file"),
            ("nbd://h/?tls-psk-file=k", "nbds"),
            ("nbd://alice@h/", "nbds"),
            ("nbds://a@h/?tls-psk-file=k&tls-certificates=d", "exclude"),
            ("nbd://h/?connections=99", "up to 16"),
            ("nbd://h/?reconnect=soon", "number"),
            ("nbd:", "nbd:HOST:PORT"),
            ("nbd:unix:", "missing"),
            ("nbd:host", "nbd:HOST:PORT"),
        ] {
            let error = NbdUri::parse(name).unwrap_err();
            assert!(error.contains(why), "{name}: {error}");
        }
        let long = format!("nbd://h/{}", "x".repeat(STRING_MAX + 1));
        assert!(NbdUri::parse(&long).unwrap_err().contains("longer"));
    }

    #[test]
    fn files_are_no_exports() {
        for name in ["disk.nbd", "./nbd://h", "nbdx://h", "nbds:h", "nbd+unix:h", "http://nbd:1"] {
            assert!(!NbdUri::matches(name), "{name}");
        }
    }
}
