//! Checking an image's metadata, and mending it.

use std::path::Path;

use vdkit_block::{CheckReport, Monitor, Repair, Result};
use vdkit_chain::{OpenOptions, Registry};

/// What a check says, and of what.
#[derive(Clone, Debug)]
pub struct Checked {
    /// The format's name.
    pub format: &'static str,
    /// The findings.
    pub report: CheckReport,
}
