//! Judges images: whether one from a stranger is safe to accept ([`inspect`]), and whether one fits a platform
//! ([`validate`]).
//!
//! These rules are about formats, so this crate is the only job that knows formats by name.

mod codes;
mod inspection;
mod preset;
mod validate;

pub use inspection::budget::BudgetStorage;
pub use inspection::{
    Allow, Code, Depth, FORMAT_NAMES, InspectFinding, InspectOptions, InspectReport, Verdict,
    Weight, inspect,
};
pub use preset::{Preset, Use};
pub use validate::{Objection, Rule, ValidateReport, validate};
