//! Failures at the edge: one line, a hint where there is one, and the exit code.

use std::fmt;
use std::io::{self, IsTerminal, Write};

use vdkit::{Error, ErrorKind};

/// How the command ends; the numbers are a contract with scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Done.
    Done = 0,
    /// Failed.
    Failed = 1,
    /// The command line is wrong.
    Usage = 2,
    /// The images differ, or only leaks were found.
    Differs = 3,
    /// The image is corrupt.
    Corrupt = 4,
    /// Refused by policy.
    Refused = 5,
    /// Another process uses the image.
    Locked = 6,
    /// No space left.
    NoSpace = 7,
    /// Interrupted.
    Interrupted = 130,
}

impl From<ErrorKind> for Exit {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::Failed => Self::Failed,
            ErrorKind::Usage => Self::Usage,
            ErrorKind::Corrupt => Self::Corrupt,
            ErrorKind::Refused => Self::Refused,
            ErrorKind::Locked => Self::Locked,
            ErrorKind::NoSpace => Self::NoSpace,
            ErrorKind::Interrupted => Self::Interrupted,
        }
    }
}

/// What a subcommand answers.
pub type Outcome = Result<Exit, Failure>;

/// Why a subcommand failed.
#[derive(Debug)]
pub enum Failure {
    /// The engine says so.
    Engine(Error),
    /// The command says so: an exit code, a message and perhaps a hint.
    Told(Exit, String, Option<String>),
    /// The reader of stdout wanted no more, which is its right.
    ClosedPipe,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Engine(error)
    }
}

impl From<io::Error> for Failure {
    /// From writing to stdout; everything else has its own place and name.
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::ClosedPipe,
            io::ErrorKind::StorageFull => {
                Self::Told(Exit::NoSpace, format!("stdout: {error}"), None)
            }
            _ => Self::Told(Exit::Failed, format!("stdout: {error}"), None),
        }
    }
}

impl Failure {
    /// The command line asks for something that cannot be.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::Told(Exit::Usage, message.into(), None)
    }

    /// A failure without a class of its own.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::Told(Exit::Failed, message.into(), None)
    }

    /// The same with a hint.
    pub fn hint(self, hint: impl Into<String>) -> Self {
        match self {
            Self::Engine(error) => {
                let exit = Exit::from(error.kind());
                Self::Told(exit, message_of(&error), Some(hint.into()))
            }
            Self::Told(exit, message, _) => Self::Told(exit, message, Some(hint.into())),
            Self::ClosedPipe => Self::ClosedPipe,
        }
    }

    /// The exit code.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Engine(error) => Exit::from(error.kind()),
            Self::Told(exit, ..) => *exit,
            Self::ClosedPipe => Exit::Done,
        }
    }

    /// Prints the message and the hint to stderr.
    pub fn print(&self) {
        let (message, hint) = match self {
            Self::Engine(error) => (message_of(error), hint_for(error)),
            Self::Told(_, message, hint) => (message.clone(), hint.clone()),
            Self::ClosedPipe => return,
        };
        print_line(Tone::Error, &message);
        if let Some(hint) = hint {
            print_line(Tone::Hint, &hint);
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Engine(error) => f.write_str(&message_of(error)),
            Self::Told(_, message, _) => f.write_str(message),
            Self::ClosedPipe => f.write_str("stdout was closed"),
        }
    }
}

/// The label before a line on stderr.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// `error:`
    Error,
    /// `warning:`
    Warning,
    /// `hint:`
    Hint,
}

/// Prints one labelled line to stderr, in colour where a person looks.
pub fn print_line(tone: Tone, text: &str) {
    let (label, colour) = match tone {
        Tone::Error => ("error", "\x1b[1;31m"),
        Tone::Warning => ("warning", "\x1b[1;33m"),
        Tone::Hint => ("hint", "\x1b[1;36m"),
    };
    let stderr = io::stderr();
    let text = printable(text);
    // Nobody can be told of a failure to write to stderr.
    let _ = if stderr.is_terminal() && colours_wanted() {
        writeln!(stderr.lock(), "{colour}{label}:\x1b[0m {text}")
    } else {
        writeln!(stderr.lock(), "{label}: {text}")
    };
}

/// Names come from strangers' images: control characters must not reach a terminal.
pub fn printable(text: &str) -> std::borrow::Cow<'_, str> {
    if !text.chars().any(|c| c.is_control() && c != '\n') {
        return text.into();
    }
    let mut clean = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if c.is_control() && c != '\n' {
            clean.extend(c.escape_default());
        } else {
            clean.push(c);
        }
    }
    clean.into()
}

/// Whether the user allows colours.
pub fn colours_wanted() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// The message without the advice that [`hint_for`] prints on its own line.
fn message_of(error: &Error) -> String {
    match error {
        Error::Unsupported { file, what, .. } | Error::Key { file, what, .. } => {
            format!("{file}: {what}")
        }
        Error::Refused(refusal) => {
            format!("refused: {}: names '{}': {}", refusal.file, refusal.target, refusal.reason)
        }
        other => other.to_string(),
    }
}

/// What the user may do about it.
fn hint_for(error: &Error) -> Option<String> {
    let hint = match error {
        Error::Unsupported { hint, .. }
        | Error::Key { hint, .. }
        | Error::Dependents { hint, .. } => hint.clone(),
        Error::Refused(refusal) => refusal.hint.clone(),
        Error::Corrupt(fault) => {
            format!("'vdkit check {}' lists what is damaged", quoted(&fault.file))
        }
        Error::Locked { holder: Some(holder), .. } if holder.is_this_process() => {
            "choose another target: one of the two is read, or is a part of what would be replaced"
                .to_owned()
        }
        Error::Locked { .. } => {
            "stop that process first; to look at the image all the same, read with --force-share"
                .to_owned()
        }
        Error::NoSpace { .. } => "make room on that file system or choose another one".to_owned(),
        Error::Io { .. } | Error::File { .. } if error.kind() == ErrorKind::NoSpace => {
            "make room on that file system or choose another one".to_owned()
        }
        _ => return None,
    };
    (!hint.is_empty()).then_some(hint)
}

/// A file name as a shell takes it.
pub fn quoted(name: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:@%".contains(c);
    if !name.is_empty() && name.chars().all(plain) {
        name.to_owned()
    } else {
        format!("'{}'", name.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_the_exit_code_of_the_contract() {
        for (kind, code) in [
            (ErrorKind::Failed, 1),
            (ErrorKind::Usage, 2),
            (ErrorKind::Corrupt, 4),
            (ErrorKind::Refused, 5),
            (ErrorKind::Locked, 6),
            (ErrorKind::NoSpace, 7),
            (ErrorKind::Interrupted, 130),
        ] {
            assert_eq!(Exit::from(kind) as u8, code, "{kind:?}");
        }
        assert_eq!(Exit::Done as u8, 0);
        assert_eq!(Exit::Differs as u8, 3);
    }

    #[test]
    fn advice_is_said_once() {
        let failure = Failure::from(Error::unsupported("a.img", "LUKS", "decrypt it first"));
        assert_eq!(failure.to_string(), "a.img: LUKS");
        let Failure::Engine(error) = &failure else { panic!() };
        assert_eq!(hint_for(error).as_deref(), Some("decrypt it first"));
    }

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        assert_eq!(printable("a\x1b[2Jb"), "a\\u{1b}[2Jb");
        assert_eq!(printable("plain"), "plain");
    }

    #[test]
    fn names_are_quoted_for_the_shell() {
        assert_eq!(quoted("/a/b-1.qcow2"), "/a/b-1.qcow2");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }
}
