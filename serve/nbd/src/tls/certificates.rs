//! TLS with certificates, by rustls.

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;

use super::{CERTIFICATE, PRIVATE_KEY, REVOKED, is_named};
use crate::wire::tls::{CA_CERTIFICATE, authorities, bad, objects};

/// Reads the folder's certificates and key. `asks`: clients must present a certificate if the folder
/// has an authority's.
pub(super) fn load(folder: &Path, asks: bool) -> io::Result<Arc<ServerConfig>> {
    for path in [CERTIFICATE, PRIVATE_KEY].map(|name| folder.join(name)) {
        if !is_named(&path)? {
            let why = format!(
                "{}: there is no such file; a server with certificates needs {CERTIFICATE} and {PRIVATE_KEY}",
                path.display()
            );
            return Err(io::Error::new(io::ErrorKind::NotFound, why));
        }
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let chain = objects(&folder.join(CERTIFICATE), "certificate")?;
    let key_path = folder.join(PRIVATE_KEY);
    let key = PrivateKeyDer::from_pem_file(&key_path).map_err(|error| bad(&key_path, error))?;
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| bad(folder, error))?;
    let verifier = if asks { clients(folder, provider)? } else { None };
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
    let roots = Arc::new(authorities(&ca)?);
    let mut builder = WebPkiClientVerifier::builder_with_provider(roots, provider);
    if revokes {
        let lists: Vec<CertificateRevocationListDer<'static>> =
            objects(&crl, "list of revoked certificates")?;
        // As in GnuTLS: an expired list rejects all clients, and authorities without a list are
        // trusted.
        builder = builder
            .with_crls(lists)
            .allow_unknown_revocation_status()
            .enforce_revocation_expiration();
    }
    let file = if revokes { &crl } else { &ca };
    builder.build().map(Some).map_err(|error| bad(file, error))
}
