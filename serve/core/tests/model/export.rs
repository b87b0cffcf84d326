//! What kept changes need of an export.

use std::sync::Arc;

use vdkit_block::{Error, Result};

use crate::change::Change;
use crate::client::Client;
use crate::parking::Parking;
use crate::sync::{AtomicBool, AtomicUsize, Ordering};

#[derive(Default)]
pub struct Export {
    pub parking: Parking,
    /// No change finds space.
    pub full: AtomicBool,
    /// Attempts that run now.
    running: AtomicUsize,
    made: AtomicUsize,
}

pub fn no_space() -> Error {
    Error::NoSpace { file: "image".to_owned(), what: "for a model".to_owned() }
}

impl Export {
    pub fn new(full: bool) -> Arc<Self> {
        Arc::new(Self { full: AtomicBool::new(full), ..Self::default() })
    }

    pub fn running(&self) -> usize {
        self.running.load(Ordering::Relaxed)
    }

    /// Changes that were made.
    pub fn made(&self) -> usize {
        self.made.load(Ordering::Relaxed)
    }

    pub fn apply(&self, client: &Client, _: &Change, _: u64, _: bool) -> Result<()> {
        if client.has_left() {
            return Err(Error::Interrupted);
        }
        self.running.fetch_add(1, Ordering::Relaxed);
        let full = self.full.load(Ordering::Relaxed);
        if !full {
            self.made.fetch_add(1, Ordering::Relaxed);
        }
        self.running.fetch_sub(1, Ordering::Relaxed);
        if full { Err(no_space()) } else { Ok(()) }
    }

    pub fn keeps(&self, error: &Error) -> bool {
        matches!(error, Error::NoSpace { .. })
    }

    pub fn is_for_a_moment(_: &Change, _: &Error) -> bool {
        false
    }

    pub fn name(&self) -> &str {
        "model"
    }

    pub fn filename(&self) -> String {
        "image".to_owned()
    }
}
