//! The exports of a server, by name.

use std::sync::Arc;

use vdkit_serve::Export;

/// Exports by name. The first one also answers to the empty name, which clients request by default.
#[derive(Clone, Debug, Default)]
pub struct Exports(Vec<Arc<Export>>);

impl Exports {
    /// A server's exports; the first is the default.
    pub fn new(exports: Vec<Arc<Export>>) -> Self {
        Self(exports)
    }

    /// All exports, in the order given.
    pub fn all(&self) -> &[Arc<Export>] {
        &self.0
    }

    /// The export with a name.
    pub fn find(&self, name: &str) -> Option<Arc<Export>> {
        let named = self.0.iter().find(|export| export.name() == name);
        named.or_else(|| self.0.first().filter(|_| name.is_empty())).cloned()
    }
}
