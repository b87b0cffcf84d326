//! The subcommands, a file each.

use clap::{ArgMatches, Args, Command, FromArgMatches};

use vdkit::Disk;

use crate::definition;
use crate::failure::{Failure, Outcome};
use crate::session::Session;

pub mod completions;
pub mod formats;
pub mod info;
pub mod man;
pub mod read;
pub mod write;

/// Every subcommand, in the order of the overview.
pub static ALL: &[Subcommand] = &[
    info::COMMAND,
    read::COMMAND,
    write::COMMAND,
    formats::COMMAND,
    completions::COMMAND,
    man::COMMAND,
];

/// What a subcommand is for; the overview is ordered by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// Looking, changing nothing.
    Look,
    /// Making images.
    Make,
    /// Changing images.
    Change,
    /// Guest bytes at an offset.
    Bytes,
    /// Help for people and shells.
    Help,
}

impl Group {
    /// All of them, in order.
    pub const ALL: &'static [Self] =
        &[Self::Make, Self::Look, Self::Change, Self::Bytes, Self::Help];

    /// The heading in the overview.
    pub fn title(self) -> &'static str {
        match self {
            Self::Look => "Look at images",
            Self::Make => "Make images",
            Self::Change => "Check and change images",
            Self::Bytes => "Read and write guest bytes",
            Self::Help => "Find your way",
        }
    }
}

/// One row of the table of subcommands.
#[derive(Debug)]
pub struct Subcommand {
    /// What users type.
    pub name: &'static str,
    /// One line.
    pub about: &'static str,
    /// Its place in the overview.
    pub group: Group,
    /// What more there is to know, for `--help`; may be empty.
    pub details: &'static str,
    /// Command lines with a word on each, for the end of the help.
    pub examples: &'static str,
    /// Adds the arguments and the long texts; called only for the subcommand that is used.
    pub augment: fn(Command) -> Command,
    /// Runs it.
    pub run: fn(&ArgMatches, &mut Session) -> Outcome,
}

/// The arguments of a subcommand, which know how to run it.
pub trait Run: Args + FromArgMatches {
    /// The row that describes it.
    const ROW: &'static Subcommand;

    /// Does it.
    ///
    /// # Errors
    /// Whatever went wrong, with its exit code.
    fn run(self, session: &mut Session) -> Outcome;
}

/// [`Subcommand::augment`] of a [`Run`].
pub fn augment<R: Run>(command: Command) -> Command {
    definition::with_texts(R::augment_args(command), R::ROW)
}

/// [`Subcommand::run`] of a [`Run`].
///
/// # Errors
/// As [`Run::run`].
pub fn run<R: Run>(matches: &ArgMatches, session: &mut Session) -> Outcome {
    // Parsing has checked everything that the definition asks for.
    let arguments = R::from_arg_matches(matches)
        .map_err(|error| Failure::usage(error.to_string().trim_end().to_owned()))?;
    arguments.run(session)
}

/// The subcommand of this name.
pub fn find(name: &str) -> Option<&'static Subcommand> {
    ALL.iter().find(|entry| entry.name == name)
}

/// The bytes of a disk that an offset and perhaps a length mean.
pub(crate) fn guest_range(
    disk: &Disk,
    offset: u64,
    length: Option<u64>,
) -> Result<std::ops::Range<u64>, Failure> {
    let size = disk.guest_bytes();
    let end = length.map_or(Some(size), |length| offset.checked_add(length));
    match end {
        Some(end) if offset <= end && end <= size => Ok(offset..end),
        _ => Err(Failure::usage(format!(
            "{}: the range reaches past the end of the disk at {}",
            disk.name(),
            crate::output::bytes_long(size)
        ))),
    }
}
