//! Arguments that several subcommands share: one definition each.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueHint};
use serde::Serialize;
use vdkit::{
    BackingChoice, CacheMode, FormatDriver, Monitor, OpenOptions, Options, RefPolicy, Secret,
    parse_size,
};

use crate::failure::{Failure, Tone, print_line};
use crate::keys::Keys;
use crate::output::{Output, bytes_long};
use crate::progress::{ProgressMode, Reporter};
use crate::session::Session;

/// Parses a size with a binary unit. Records a note where other programs use powers of 1000 for the
/// unit; [`print_notes`] prints it.
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

/// Parses one of these words; each stands for a value.
pub fn one_of<T>(words: &'static [(&'static str, T)]) -> impl TypedValueParser<Value = T>
where
    T: Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(words.iter().map(|(word, _)| *word)).try_map(move |given| {
        let found = words.iter().find(|(word, _)| *word == given);
        found.map(|(_, value)| value.clone()).ok_or("not one of the words")
    })
}

/// Notes about the arguments, each recorded once.
static NOTES: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn note(text: String) {
    let mut notes = NOTES.lock().unwrap_or_else(PoisonError::into_inner);
    if !notes.contains(&text) {
        notes.push(text);
    }
}

/// Prints the notes that were recorded while the arguments were parsed, each once.
pub fn print_notes() {
    let notes = std::mem::take(&mut *NOTES.lock().unwrap_or_else(PoisonError::into_inner));
    notes.iter().for_each(|text| print_line(Tone::Note, text));
}

/// Options that decide which other files an image may make vdkit open.
#[derive(Args, Clone, Debug, Default)]
pub struct References {
    /// Allow images to refer to files below DIR (repeatable)
    ///
    /// An image's metadata may name other files (a backing file, a data file). vdkit opens them
    /// only if they are below the image's own folder or below a DIR given here.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub allow_ref: Vec<PathBuf>,
    /// Open no file that an image's metadata names
    #[arg(long, conflicts_with = "allow_ref")]
    pub no_refs: bool,
}

impl References {
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

/// Options for opening an existing image.
#[derive(Args, Clone, Debug, Default)]
pub struct Opening {
    /// Format of the image (default: probed from its header)
    #[arg(short = 'f', long, value_name = "FORMAT")]
    pub format: Option<String>,
    /// Read the image even while another process writes it
    ///
    /// The result may mix old and new data.
    #[arg(short = 'U', long)]
    pub force_share: bool,
    /// Which other files may be opened.
    #[command(flatten)]
    pub references: References,
}

impl Opening {
    pub fn options(&self) -> OpenOptions {
        OpenOptions::read_only()
            .maybe_format(self.format.clone())
            .refs(self.references.policy())
            .lock(!self.force_share)
    }
}

/// Options for opening an image for writing: as [`Opening`], but without `--force-share`.
#[derive(Args, Clone, Debug, Default)]
pub struct OpeningForWriting {
    /// Format of the image (default: probed from its header)
    ///
    /// An image that is recognized only as raw is not written to without `-f raw`, because its
    /// guest could have written another format's header into it.
    #[arg(short = 'f', long, value_name = "FORMAT")]
    pub format: Option<String>,
    /// Which other files may be opened.
    #[command(flatten)]
    pub references: References,
}

impl OpeningForWriting {
    pub fn options(&self) -> OpenOptions {
        OpenOptions::read_write().maybe_format(self.format.clone()).refs(self.references.policy())
    }
}

/// Options for opening an image whose data is read.
#[derive(Args, Clone, Debug, Default)]
pub struct Reading {
    #[command(flatten)]
    pub(crate) opening: Opening,
    #[command(flatten)]
    keys: Keys,
}

impl Reading {
    pub fn options(&self) -> OpenOptions {
        self.keys.apply(self.opening.options())
    }
}

/// Options for opening an image whose data is written.
#[derive(Args, Clone, Debug, Default)]
pub struct Writing {
    #[command(flatten)]
    opening: OpeningForWriting,
    #[command(flatten)]
    keys: Keys,
}

impl Writing {
    pub fn options(&self) -> OpenOptions {
        self.keys.apply(self.opening.options())
    }
}

/// Options for opening the source of a copy.
#[derive(Args, Clone, Debug, Default)]
pub struct CopySource {
    /// Format of the source (default: probed from its header)
    #[arg(short = 'f', long, value_name = "FORMAT")]
    pub format: Option<String>,
    /// Copy this snapshot of the source (an id or a name)
    #[arg(short = 'l', long, value_name = "SNAPSHOT")]
    pub snapshot: Option<String>,
    /// Read the source even while another process writes it
    #[arg(short = 'U', long)]
    pub force_share: bool,
    #[command(flatten)]
    pub references: References,
    #[command(flatten)]
    pub keys: Keys,
}

impl CopySource {
    pub fn options(&self) -> OpenOptions {
        self.keys.apply(
            OpenOptions::read_only()
                .maybe_format(self.format.clone())
                .refs(self.references.policy())
                .lock(!self.force_share)
                .snapshot(self.snapshot.clone()),
        )
    }
}

/// Option that selects a snapshot to read.
#[derive(Args, Clone, Debug, Default)]
pub struct SnapshotOption {
    /// Read this snapshot of the image (an id or a name)
    #[arg(long, value_name = "SNAPSHOT")]
    pub snapshot: Option<String>,
}

/// Option that overrides an image's parent.
#[derive(Args, Clone, Debug, Default)]
pub struct ParentOption {
    /// Use FILE as the parent instead of the one that the image names (repeatable)
    ///
    /// For images that name no parent file (VDI), or a wrong one. Each further --parent replaces
    /// the parent of the one before; otherwise FILE's own parent is used.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub parent: Vec<PathBuf>,
}

impl ParentOption {
    /// Whether the parent named in the image's metadata is used or replaced.
    pub fn choice(&self) -> BackingChoice {
        BackingChoice::Parents(self.parent.clone())
    }
}

/// Option that selects a cache mode.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct CacheOption {
    /// Cache mode: writeback, none (bypasses the page cache), writethrough, directsync or unsafe
    #[arg(long, value_name = "MODE", default_value_t = CacheMode::Writeback, hide_default_value = true)]
    pub cache: CacheMode,
}

/// Option that allows an operation that may damage other images.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct Force {
    /// Change the image even if other images in the same folder would be damaged
    #[arg(long)]
    pub force: bool,
}

/// Option that selects JSON output.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct Json {
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

impl Json {
    /// Prints an answer as JSON, or by `text`.
    pub fn print<T: Serialize>(
        self,
        answer: &T,
        out: &mut Output,
        text: impl FnOnce(&T, &mut Output),
    ) {
        if self.json { out.json(answer) } else { text(answer, out) }
    }
}

/// Option that selects how progress is shown.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct ProgressOption {
    /// How to show progress on stderr
    #[arg(long, value_name = "HOW", value_enum, default_value_t = ProgressMode::Auto, hide_possible_values = true)]
    #[arg(help = "How progress is shown on stderr: auto, bar, json or none")]
    pub progress: ProgressMode,
}

impl ProgressOption {
    /// Creates a progress reporter for the job called `job`.
    pub fn reporter(self, job: &'static str) -> Reporter {
        Reporter::new(self.progress, job)
    }

    /// Runs a job and shows its progress. A signal cancels the job.
    pub fn run<T>(
        self,
        job: &'static str,
        session: &mut Session,
        work: impl FnOnce(&Monitor<'_>) -> T,
    ) -> Result<T, Failure> {
        let progress = self.reporter(job);
        let monitor = Monitor::new(&progress).cancelled_by(session.cancel_on_signal()?);
        let done = work(&monitor);
        progress.finish();
        Ok(done)
    }
}

/// Options of the target format.
#[derive(Args, Clone, Debug, Default)]
pub struct FormatOptions {
    /// Format options, as KEY=VALUE[,KEY=VALUE] (repeatable)
    ///
    /// `vdkit formats FORMAT` lists them. Double a comma that is part of a value.
    #[arg(short = 'o', long = "options", value_name = "KEY=VALUE")]
    pub options: Vec<String>,
}

impl FormatOptions {
    /// Parses the options of a new image: those of a preset, then the user's, and its key.
    ///
    /// # Errors
    /// The format has no such option, or the image is not encrypted and a key is given.
    pub fn parse(
        &self,
        driver: &dyn FormatDriver,
        preset: Option<&str>,
        key: Option<&Secret>,
    ) -> Result<Options, Failure> {
        let texts = preset.into_iter().chain(self.options.iter().map(String::as_str));
        let mut options = Options::parse(driver.name(), driver.options(), texts)?;
        if key.is_some() && !driver.encrypts(&options) {
            let name = driver.name();
            let text = format!("a key has no meaning here: the new {name} image is not encrypted");
            return Err(Failure::usage(text).hint(
                "'-O qcow2 -o encrypt.format=luks' or '-O luks' encrypts it ('-f' instead of '-O' \
                 for vdkit create)",
            ));
        }
        options.set_key(key.cloned());
        Ok(options)
    }
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
