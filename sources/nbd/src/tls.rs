//! TLS with certificates, by rustls, or with a pre-shared key.
//!
//! The files have QEMU's names: `ca-cert.pem`, and `client-cert.pem` with `client-key.pem` if the
//! server asks clients for a certificate.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection};

use crate::channel::Socket;
use crate::uri::{Place, TlsNames};
use crate::wire;
use crate::wire::tls::{CA_CERTIFICATE, Session, authorities, bad, invalid, objects};

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
        let builder = builder.with_root_certificates(authorities(&folder.join(CA_CERTIFICATE))?);
        let (own, key) = (folder.join(CERTIFICATE), folder.join(PRIVATE_KEY));
        // A dangling link counts as existing: reading the file reports it.
        let config = if own.symlink_metadata().is_err() && key.symlink_metadata().is_err() {
            builder.with_no_client_auth()
        } else {
            let chain = objects(&own, "certificate")?;
            let private = PrivateKeyDer::from_pem_file(&key).map_err(|error| bad(&key, error))?;
            builder.with_client_auth_cert(chain, private).map_err(|error| bad(&key, error))?
        };
        Ok(Self::Certificates(Arc::new(config), server))
    }

    fn session(&self) -> io::Result<Session> {
        match self {
            Self::Certificates(config, server) => {
                let connection = ClientConnection::new(config.clone(), server.clone());
                connection.map(Session::with_certificates).map_err(invalid)
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
        TlsStream::start(Arc::new(socket), self.session()?, until)
    }
}

/// A socket within TLS.
pub(crate) type TlsStream = wire::tls::TlsStream<Socket>;
