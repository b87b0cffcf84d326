//! Arguments that several subcommands share: one definition each.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use clap::{Args, ValueHint};
use vdkit::{BackingChoice, CacheMode, OpenOptions, RefPolicy, parse_size};

use crate::failure::{Tone, print_line};
use crate::output::bytes_long;
use crate::progress::{ProgressMode, Reporter};

/// Reads a size with a binary unit. What other programs count in thousands is told of: see [`print_notes`].
///
/// # Errors
/// The text is not a size.
pub fn size(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text).map_err(|error| error.to_string())?;
    let unit = text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
    if let [power, b'B'] = unit.as_bytes() {
        let power = power.to_ascii_uppercase() as char;
        let number = text.strip_suffix(unit).unwrap_or(text);
        note(format!(
            "'{text}' is {}: units are powers of 1024 ({number}{power}iB)",
            bytes_long(bytes)
        ));
    }
    Ok(bytes)
}

/// What is worth saying of the arguments, once.
static NOTES: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn note(text: String) {
    let mut notes = NOTES.lock().unwrap_or_else(PoisonError::into_inner);
    if !notes.contains(&text) {
        notes.push(text);
    }
}

/// Prints what was noted while arguments were read, once.
pub fn print_notes() {
    let notes = std::mem::take(&mut *NOTES.lock().unwrap_or_else(PoisonError::into_inner));
    notes.iter().for_each(|text| print_line(Tone::Note, text));
}

/// Which other files an image may make us open.
#[derive(Args, Clone, Debug, Default)]
pub struct References {
    /// Let images name other files beneath DIR (repeatable)
    ///
    /// What an image's metadata names (a backing file, a data file) is opened only beneath the
    /// image's own folder, and beneath each DIR given here.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub allow_ref: Vec<PathBuf>,
    /// Open nothing that an image's metadata names
    #[arg(long, conflicts_with = "allow_ref")]
    pub no_refs: bool,
}

impl References {
    /// The policy that these arguments make.
    pub fn policy(&self) -> RefPolicy {
        if self.no_refs {
            RefPolicy::Nothing
        } else if self.allow_ref.is_empty() {
            RefPolicy::OwnFolder
        } else {
            RefPolicy::Folders(self.allow_ref.clone())
        }
    }
}

/// How an existing image is opened.
#[derive(Args, Clone, Debug, Default)]
pub struct Opening {
    /// The image's format; without it the header is probed
    #[arg(short = 'f', long, value_name = "FORMAT")]
    pub format: Option<String>,
    /// Read it even while another process writes it
    ///
    /// What is read may then be a mixture of old and new.
    #[arg(short = 'U', long)]
    pub force_share: bool,
    /// Which other files may be opened.
    #[command(flatten)]
    pub references: References,
}

impl Opening {
    /// The options that these arguments make.
    pub fn options(&self) -> OpenOptions {
        OpenOptions {
            format: self.format.clone(),
            refs: self.references.policy(),
            lock: !self.force_share,
            ..OpenOptions::read_only()
        }
    }
}

/// How an image is opened for writing: as [`Opening`], without sharing.
#[derive(Args, Clone, Debug, Default)]
pub struct OpeningForWriting {
    /// The image's format; without it the header is probed
    ///
    /// An image that is recognised only as raw is not written to without `-f raw`: the guest could
    /// have written another format's header into it.
    #[arg(short = 'f', long, value_name = "FORMAT")]
    pub format: Option<String>,
    /// Which other files may be opened.
    #[command(flatten)]
    pub references: References,
}

impl OpeningForWriting {
    /// The options that these arguments make.
    pub fn options(&self) -> OpenOptions {
        OpenOptions {
            format: self.format.clone(),
            refs: self.references.policy(),
            ..OpenOptions::read_write()
        }
    }
}

/// Which state of an image is read.
#[derive(Args, Clone, Debug, Default)]
pub struct SnapshotOption {
    /// Read what this snapshot inside the image holds (an id or a name)
    #[arg(long, value_name = "SNAPSHOT")]
    pub snapshot: Option<String>,
}

/// What an image stands on.
#[derive(Args, Clone, Debug, Default)]
pub struct ParentOption {
    /// Take FILE for what the image stands on, instead of what it names
    ///
    /// For images that name no file (VDI), or the wrong one. FILE's own parent is what it names,
    /// or what the next --parent says.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub parent: Vec<PathBuf>,
}

impl ParentOption {
    /// What is done about the image's own word on it.
    pub fn choice(&self) -> BackingChoice {
        BackingChoice::Parents(self.parent.clone())
    }
}

/// What is promised about bytes.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct CacheOption {
    /// Cache mode: writeback, none (past the page cache), writethrough, directsync or unsafe
    #[arg(long, value_name = "MODE", default_value_t = CacheMode::Writeback, hide_default_value = true, value_parser = cache_mode)]
    pub cache: CacheMode,
}

impl CacheOption {
    /// The mode.
    pub fn mode(self) -> CacheMode {
        self.cache
    }
}

/// Reads a cache mode.
///
/// # Errors
/// The text is not one.
pub fn cache_mode(text: &str) -> Result<CacheMode, String> {
    text.parse().map_err(|error: vdkit::Error| error.to_string())
}

/// Whether others may be damaged.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct Force {
    /// Also where images in the same folder stand on it, and would be damaged
    #[arg(long)]
    pub force: bool,
}

/// Whether the answer is JSON.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct Json {
    /// Answer as JSON
    #[arg(long)]
    pub json: bool,
}

/// How progress is shown.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct ProgressOption {
    /// How progress is shown on stderr
    #[arg(long, value_name = "HOW", value_enum, default_value_t = ProgressMode::Auto, hide_possible_values = true)]
    #[arg(help = "How progress is shown on stderr: auto, bar, json or none")]
    pub progress: ProgressMode,
}

impl ProgressOption {
    /// Shows the progress of the job of this name.
    pub fn reporter(self, job: &'static str) -> Reporter {
        Reporter::new(self.progress, job)
    }
}

/// Options of a format that is written.
#[derive(Args, Clone, Debug, Default)]
pub struct FormatOptions {
    /// Format options, as KEY=VALUE[,KEY=VALUE] (repeatable)
    ///
    /// `vdkit formats FORMAT` lists them. A doubled comma is a literal one.
    #[arg(short = 'o', long = "options", value_name = "KEY=VALUE")]
    pub options: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_make_a_policy() {
        let none = References { no_refs: true, ..References::default() };
        assert_eq!(none.policy(), RefPolicy::Nothing);
        assert_eq!(References::default().policy(), RefPolicy::OwnFolder);
        let folder = References { allow_ref: vec!["/srv".into()], no_refs: false };
        assert_eq!(folder.policy(), RefPolicy::Folders(vec!["/srv".into()]));
    }
}
