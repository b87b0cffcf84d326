//! How a command fails: a message on stderr after the program's name, and an exit code.

use std::io;

pub use vdkit::plain as system_words;
use vdkit::{Error, ErrorKind};

use crate::output::say;

/// Why a command ended, and how.
#[derive(Debug)]
pub struct Failure {
    /// What is printed after `qemu-img: `; nothing is printed if it is empty.
    pub text: String,
    pub code: u8,
    /// Whether the message comes from parsing options: the command's name is printed too, and where
    /// to find help.
    pub from: Origin,
}

/// Where a message comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The options, as the C library reads them.
    Getopt,
    /// The options and operands, as the command reads them.
    Usage,
    Work,
}

impl Failure {
    /// A failure of the work itself, with exit code 1.
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), code: 1, from: Origin::Work }
    }

    /// A wrong command line, with exit code 1 and where to find help.
    pub fn usage(text: impl Into<String>) -> Self {
        Self { text: text.into(), code: 1, from: Origin::Usage }
    }

    /// With another exit code.
    #[must_use]
    pub fn code(self, code: u8) -> Self {
        Self { code, ..self }
    }

    /// With words before its own.
    #[must_use]
    pub fn within(self, what: &str) -> Self {
        Self { text: format!("{what}: {}", self.text), ..self }
    }

    /// Prints it on stderr. `called` is the name by which the program was called: the C library
    /// prints that one, with the command's name after it.
    pub fn print(&self, program: &str, called: &str, command: Option<&str>) {
        if self.text.is_empty() {
            return;
        }
        let with_command = |name: &str| match command {
            Some(command) => format!("{name} {command}"),
            None => name.to_owned(),
        };
        match self.from {
            Origin::Getopt => say(format_args!("{}: {}", with_command(called), self.text)),
            Origin::Usage | Origin::Work => say(format_args!("{program}: {}", self.text)),
        }
        if self.from != Origin::Work {
            say(format_args!("Try '{} --help' for more info", with_command(program)));
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::new(system_words(&error))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::new(words(&error))
    }
}

/// An error of the engine in QEMU's words, where programs match these; else in the engine's own.
pub fn words(error: &Error) -> String {
    match error {
        Error::File { file, source, .. } => {
            format!("Could not open '{file}': {}", system_words(source))
        }
        Error::Reference { file, role, source, .. } => {
            format!("Could not open {role}: Could not open '{file}': {}", system_words(source))
        }
        Error::Io { source, .. } => system_words(source),
        Error::Locked { file, writing, .. } => {
            let lock = match writing {
                true => "\"write\" lock",
                false => "shared \"write\" lock",
            };
            format!("Failed to get {lock}\nIs another process using the image [{file}]?")
        }
        _ if error.kind() == ErrorKind::NoSpace => "No space left on device".to_owned(),
        _ => error.to_string(),
    }
}

/// The failure to open an image that the user named.
pub fn could_not_open(name: &str, why: impl std::fmt::Display) -> Failure {
    Failure::new(format!("Could not open '{name}': {why}"))
}

/// Why an image could not be opened, for a message that names it already.
pub fn without_name(name: &str, failure: &Failure) -> String {
    let prefix = format!("Could not open '{name}': ");
    failure.text.strip_prefix(&prefix).unwrap_or(&failure.text).to_owned()
}
