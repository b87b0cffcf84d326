//! TLS around a connection: with certificates, or with pre-shared keys.
//!
//! The files have QEMU's names, in one folder: `server-cert.pem` and `server-key.pem`; or
//! `keys.psk` alone. If `ca-cert.pem` exists, clients must present a certificate of that authority;
//! `ca-crl.pem` lists the ones that it has revoked.
//!
//! Pre-shared keys are the feature `tls-psk`: rustls lacks them, so they need a second TLS stack.

mod certificates;
mod subject;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use rustix::net::Shutdown;
use rustls::{ServerConfig, ServerConnection};

use crate::admission::Admission;
use crate::channel::Channel;
use crate::wire::tls::{Session, TlsStream, bad, invalid};

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
    /// `NotFound` for missing files and `InvalidInput` for ill-formed ones, naming the file;
    /// `InvalidInput` for a folder with both.
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
    /// `NotFound` for missing files and `InvalidInput` for ill-formed ones, naming the file.
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
        let stream = TlsStream::start(socket, self.session()?, until)?;
        self.admit(&stream)?;
        Ok(Arc::new(stream))
    }

    fn admit(&self, stream: &TlsStream<dyn Channel>) -> io::Result<()> {
        let Some(admission) = &self.admission else { return Ok(()) };
        let Some(certificate) = stream.certificate() else { return Ok(()) };
        match subject::of(&certificate) {
            Some(subject) if admission.admits(&subject) => Ok(()),
            _ => {
                let why = "the client's certificate is not among those that may connect";
                Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
            }
        }
    }
}

impl Channel for TlsStream<dyn Channel> {
    fn shutdown(&self, how: Shutdown) {
        if how != Shutdown::Read {
            self.say_goodbye();
        }
        self.socket().shutdown(how);
    }

    fn has_left(&self) -> bool {
        self.socket().has_left()
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
