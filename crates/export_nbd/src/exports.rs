//! The exports of a server, by name.

use std::sync::Arc;

use vdkit_export::Export;

/// Exports by name. The first one answers to the empty name too, which clients ask for when their
/// user named none.
#[derive(Clone, Debug, Default)]
pub struct Exports(Vec<Arc<Export>>);

impl Exports {
    /// These.
    pub fn new(exports: Vec<Arc<Export>>) -> Self {
        Self(exports)
    }

    /// All of them, in the order given.
    pub fn all(&self) -> &[Arc<Export>] {
        &self.0
    }

    /// The one of a name.
    pub fn find(&self, name: &str) -> Option<Arc<Export>> {
        let named = self.0.iter().find(|export| export.name() == name);
        named.or_else(|| self.0.first().filter(|_| name.is_empty())).cloned()
    }
}
