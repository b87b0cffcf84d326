//! TLS with certificates, by rustls.

use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection};

use super::{CA_CERTIFICATE, CERTIFICATE, PRIVATE_KEY, REVOKED, Session, bad, is_named};

/// Reads the folder's certificates and key. `asks`: clients must present a certificate if the folder
/// has an authority's.
pub(super) fn load(folder: &Path, asks: bool) -> io::Result<Arc<ServerConfig>> {
    let certificates = |name: &str| -> io::Result<Vec<CertificateDer<'static>>> {
        let path = folder.join(name);
        let found: Result<Vec<_>, _> =
            CertificateDer::pem_file_iter(&path).map_err(|error| bad(&path, error))?.collect();
        let found = found.map_err(|error| bad(&path, error))?;
        if found.is_empty() { Err(bad(&path, "holds no certificate")) } else { Ok(found) }
    };
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let chain = certificates(CERTIFICATE)?;
    let key_path = folder.join(PRIVATE_KEY);
    let key = PrivateKeyDer::from_pem_file(&key_path).map_err(|error| bad(&key_path, error))?;
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| bad(folder, error))?;
    let verifier = if asks { clients(folder, &certificates, provider)? } else { None };
    let builder = match verifier {
        Some(verifier) => builder.with_client_cert_verifier(verifier),
        None => builder.with_no_client_auth(),
    };
    let config = builder.with_single_cert(chain, key).map_err(|error| bad(&key_path, error))?;
    Ok(Arc::new(config))
}

/// The verifier of client certificates, if clients must present one: signed by the folder's
/// authority, and not revoked.
fn clients(
    folder: &Path,
    certificates: &dyn Fn(&str) -> io::Result<Vec<CertificateDer<'static>>>,
    provider: Arc<CryptoProvider>,
) -> io::Result<Option<Arc<dyn ClientCertVerifier>>> {
    let (ca, crl) = (folder.join(CA_CERTIFICATE), folder.join(REVOKED));
    let revokes = is_named(&crl)?;
    if !is_named(&ca)? {
        if revokes {
            let why = format!(
                "without {CA_CERTIFICATE} beside it clients show no certificate that could be revoked; \
                 add the authority's certificate, or move this file away"
            );
            return Err(bad(&crl, why));
        }
        return Ok(None);
    }
    let mut roots = RootCertStore::empty();
    for certificate in certificates(CA_CERTIFICATE)? {
        roots.add(certificate).map_err(|error| bad(&ca, error))?;
    }
    let mut builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
    if revokes {
        // As in GnuTLS: an expired list rejects all clients, and authorities without a list are
        // trusted.
        builder = builder
            .with_crls(revoked(&crl)?)
            .allow_unknown_revocation_status()
            .enforce_revocation_expiration();
    }
    let file = if revokes { &crl } else { &ca };
    builder.build().map(Some).map_err(|error| bad(file, error))
}

/// The revocation lists in a file.
fn revoked(path: &Path) -> io::Result<Vec<CertificateRevocationListDer<'static>>> {
    let lists: Result<Vec<_>, _> = CertificateRevocationListDer::pem_file_iter(path)
        .map_err(|error| bad(path, error))?
        .collect();
    let lists = lists.map_err(|error| bad(path, error))?;
    if lists.is_empty() {
        Err(bad(path, "holds no list of revoked certificates"))
    } else {
        Ok(lists)
    }
}

/// A new connection.
pub(super) fn session(config: &Arc<ServerConfig>) -> io::Result<ServerConnection> {
    let mut session = ServerConnection::new(config.clone()).map_err(invalid)?;
    session.set_buffer_limit(None);
    Ok(session)
}

fn invalid(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl Session for ServerConnection {
    fn is_handshaking(&self) -> bool {
        (**self).is_handshaking()
    }

    /// Takes nothing more while there is unread plaintext.
    fn take_in(&mut self, ciphertext: &[u8]) -> io::Result<usize> {
        let mut rest = ciphertext;
        self.read_tls(&mut rest)?;
        self.process_new_packets().map_err(invalid)?;
        Ok(ciphertext.len() - rest.len())
    }

    fn has_output(&self) -> bool {
        self.wants_write()
    }

    fn give_out(&mut self, out: &mut Vec<u8>) -> io::Result<()> {
        while self.wants_write() {
            self.write_tls(out)?;
        }
        Ok(())
    }

    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.reader().read(buf)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.writer().write_all(bytes)
    }

    fn say_goodbye(&mut self) {
        self.send_close_notify();
    }

    fn certificate(&self) -> Option<Vec<u8>> {
        self.peer_certificates()?.first().map(|first| first.to_vec())
    }
}
