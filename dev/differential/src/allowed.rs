//! The one table of differences that may stay.

use std::fmt;

use crate::cases::Case;
use crate::twins::{Difference, What};

/// A difference that may stay.
pub struct Allowed {
    /// Its name.
    pub id: &'static str,
    /// Why it may stay, for users.
    pub reason: &'static str,
    /// Whether it explains a difference.
    pub applies: fn(&Case, &Difference) -> bool,
}

impl fmt::Debug for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id)
    }
}

/// All of them.
pub const ALL: &[Allowed] = &[Allowed {
    id: "message-only",
    reason: "A message on stderr that programs do not match is in vdkit's own words, or QEMU prints a \
             warning where vdkit has nothing to warn of.",
    applies: |_, difference| {
        difference.what == What::Stderr
            && [&difference.theirs, &difference.ours]
                .iter()
                .all(|text| text.is_empty() || *text == "a message")
    },
}];
