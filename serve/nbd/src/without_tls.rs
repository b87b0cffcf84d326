//! What stands for TLS in builds without the feature `tls`: nothing can be loaded.

use std::convert::Infallible;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use crate::admission::Admission;
use crate::channel::Channel;

/// TLS configuration of a server. There is none in this build: it lacks the feature `tls`.
#[derive(Clone, Debug)]
pub struct Tls(Infallible);

fn absent<T>(path: &Path) -> io::Result<T> {
    let why = "this build has no TLS; build it with the feature tls";
    Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{}: {why}", path.display())))
}

impl Tls {
    /// # Errors
    /// Always `InvalidInput`.
    pub fn from_folder(folder: &Path) -> io::Result<Self> {
        absent(folder)
    }

    /// # Errors
    /// Always `InvalidInput`.
    pub fn from_certificates(folder: &Path, _clients: bool) -> io::Result<Self> {
        absent(folder)
    }

    /// # Errors
    /// Always `InvalidInput`.
    pub fn from_keys(keys: &Path) -> io::Result<Self> {
        absent(keys)
    }

    /// Cannot be called: there is no value of this type.
    #[must_use]
    pub fn with_admission(self, _admission: Admission) -> Self {
        match self.0 {}
    }

    pub(crate) fn accept(
        &self,
        _socket: Arc<dyn Channel>,
        _until: Instant,
    ) -> io::Result<Arc<dyn Channel>> {
        match self.0 {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_without_tls_says_so() {
        let error = Tls::from_folder(Path::new("pki")).unwrap_err().to_string();
        assert!(error.contains("pki: this build") && error.contains("feature tls"), "{error}");
    }
}
