//! Which clients a server admits by their certificates.

use std::fmt;
use std::sync::Arc;

/// Decides by the subject of a client's certificate whether the client may connect. The text is as
/// GnuTLS writes it: `C=GB,O=Example,CN=client`.
#[derive(Clone)]
pub struct Admission(Arc<dyn Fn(&str) -> bool + Send + Sync>);

impl Admission {
    /// A client may connect if this returns true.
    pub fn new(admits: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(admits))
    }

    #[cfg_attr(not(feature = "tls"), allow(dead_code, reason = "no client has a certificate then"))]
    pub(crate) fn admits(&self, subject: &str) -> bool {
        (self.0)(subject)
    }
}

impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admission").finish_non_exhaustive()
    }
}
