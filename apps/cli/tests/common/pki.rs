//! Certificates for tests.

use super::{Scratch, peer};

/// Certificates of an authority of our own, made with openssl, in the folder `pki`: `ca-cert.pem`, and
/// `server` and `client` for localhost and 127.0.0.1. Whether openssl is there.
pub fn certificates(scratch: &Scratch) -> bool {
    let dir = scratch.path("");
    if !vdkit_testkit::require_peer("openssl") {
        return false;
    }
    std::fs::create_dir(scratch.path("pki")).unwrap();
    let script = r#"
        set -e
        cd pki
        openssl req -x509 -newkey rsa:2048 -nodes -keyout ca-key.pem -out ca-cert.pem -days 2 -subj /CN=ca \
            -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign
        for who in server client; do
            openssl req -newkey rsa:2048 -nodes -keyout $who-key.pem -out $who.csr -subj /CN=localhost
            printf 'subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\nkeyUsage=digitalSignature,keyEncipherment\n' > $who.ext
            openssl x509 -req -in $who.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -out $who-cert.pem -days 2 -extfile $who.ext
        done
    "#;
    peer(&dir, "bash", &["-c", script]);
    true
}
