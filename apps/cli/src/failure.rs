//! Failures of the command: one line, an optional hint, and the exit code.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use vdkit::{Error, ErrorKind, IoAction, Remedy, plain};

use crate::{commands, locks, protocols, remedies};

/// The exit code. The numbers are a contract with scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// The command succeeded.
    Done = 0,
    Failed = 1,
    /// The command line is wrong.
    Usage = 2,
    /// A negative answer: images differ, only leaks or warnings were found, an image is not accepted.
    Differs = 3,
    Corrupt = 4,
    /// Refused by policy.
    Refused = 5,
    /// Another process uses the image.
    Locked = 6,
    NoSpace = 7,
    /// The image, or one that may need it, cannot be checked.
    Unchecked = 8,
    Interrupted = 130,
}

impl From<ErrorKind> for Exit {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::Usage => Self::Usage,
            ErrorKind::Corrupt | ErrorKind::Limit => Self::Corrupt,
            ErrorKind::Refused => Self::Refused,
            ErrorKind::Locked => Self::Locked,
            ErrorKind::NoSpace => Self::NoSpace,
            ErrorKind::Interrupted => Self::Interrupted,
            _ => Self::Failed,
        }
    }
}

pub type Outcome = Result<Exit, Failure>;

/// What failed, for choosing a hint.
#[derive(Clone, Copy, Debug, Default)]
pub struct Context<'a> {
    pub command: &'a str,
    /// Whether the subcommand has an option to read an image that another process is writing.
    pub force_share: bool,
    /// The format that the user named for the image.
    pub format: Option<&'a str>,
}

/// Why a subcommand failed.
#[derive(Debug)]
pub enum Failure {
    Engine(Error),
    /// An error of the command: exit code, message and optional hint.
    Told(Exit, String, Option<String>),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Engine(error)
    }
}

impl From<io::Error> for Failure {
    /// Only for errors of writing to stdout; other I/O errors carry a file name.
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::StorageFull => {
                Self::Told(Exit::NoSpace, format!("stdout: {error}"), None)
            }
            _ => Self::Told(Exit::Failed, format!("stdout: {error}"), None),
        }
    }
}

impl Failure {
    /// The command line asks for something impossible.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::Told(Exit::Usage, message.into(), None)
    }

    /// A failure with the general exit code.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::Told(Exit::Failed, message.into(), None)
    }

    pub(crate) fn no_thread(error: io::Error) -> Self {
        Self::failed(format!("cannot start a thread: {error}"))
    }

    pub fn hint(self, hint: impl Into<String>) -> Self {
        match self {
            Self::Engine(error) => {
                let exit = Exit::from(error.kind());
                Self::Told(exit, message_of(&error), Some(hint.into()))
            }
            Self::Told(exit, message, _) => Self::Told(exit, message, Some(hint.into())),
        }
    }

    /// Sets another exit code, and appends `word` to the message.
    pub fn exiting(self, exit: Exit, word: &str) -> Self {
        match self {
            Self::Engine(error) => {
                let hint = hint_for(&error, &Context::default());
                Self::Told(exit, format!("{}{word}", message_of(&error)), hint)
            }
            Self::Told(_, message, hint) => Self::Told(exit, format!("{message}{word}"), hint),
        }
    }

    pub fn exit(&self) -> Exit {
        match self {
            Self::Engine(error) => Exit::from(error.kind()),
            Self::Told(exit, ..) => *exit,
        }
    }

    pub fn print(&self, context: &Context<'_>) {
        let (message, hint) = match self {
            Self::Engine(error) => (message_of(error), hint_for(error, context)),
            Self::Told(_, message, hint) => (message.clone(), hint.clone()),
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
        }
    }
}

/// The label of a line on stderr.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    Error,
    Warning,
    Note,
    Hint,
}

/// The failure of serving an image, or of closing it. Closing is about data: if both fail, it is said
/// too.
pub fn of_both(served: Result<(), Failure>, closed: vdkit::Result<()>) -> Result<(), Failure> {
    if let (Err(_), Err(error)) = (&served, &closed) {
        print_line(Tone::Warning, &error.to_string());
    }
    served?;
    Ok(closed?)
}

/// Prints one labeled line to stderr, in color on a terminal.
pub fn print_line(tone: Tone, text: &str) {
    let (label, color) = match tone {
        Tone::Error => ("error", "\x1b[1;31m"),
        Tone::Warning => ("warning", "\x1b[1;33m"),
        Tone::Note => ("note", "\x1b[1m"),
        Tone::Hint => ("hint", "\x1b[1;36m"),
    };
    let stderr = io::stderr();
    let text = printable(text);
    // Ignore errors: there is nowhere else to report one.
    let _ = if stderr.is_terminal() && colors_wanted() {
        writeln!(stderr.lock(), "{color}{label}:\x1b[0m {text}")
    } else {
        writeln!(stderr.lock(), "{label}: {text}")
    };
}

/// Prints one line without a label to stderr.
pub fn say(text: &str) {
    // Ignore errors: there is nowhere else to report one.
    let _ = writeln!(io::stderr().lock(), "{}", printable(text));
}

/// Escapes control characters, because names come from untrusted images and are printed to a
/// terminal. Removes the numbers of system errors, which repeat the message.
pub fn printable(text: &str) -> std::borrow::Cow<'_, str> {
    const NUMBER: &str = " (os error ";
    if text.contains(NUMBER) {
        let mut parts = text.split(NUMBER);
        let mut plain = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let digits = part.trim_start_matches(|c: char| c.is_ascii_digit());
            match digits.strip_prefix(')') {
                Some(rest) if digits.len() < part.len() => plain.push_str(rest),
                _ => plain.extend([NUMBER, part]),
            }
        }
        return escaped(&plain).into_owned().into();
    }
    escaped(text)
}

fn escaped(text: &str) -> std::borrow::Cow<'_, str> {
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

/// Whether the user allows colors.
pub fn colors_wanted() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// The message without the advice that [`hint_for`] prints on its own line.
fn message_of(error: &Error) -> String {
    match error {
        Error::Unsupported { file, what, .. } | Error::Key { file, what, .. } => {
            format!("{file}: {what}")
        }
        Error::Reference { file, namer, role, source, .. } => {
            format!("{}; '{namer}' names it as its {role}", not_opened(file, source))
        }
        Error::Refused(refusal) => {
            format!("refused: {}: names '{}': {}", refusal.file, refusal.target, refusal.reason)
        }
        Error::Locked { file, holder: Some(holder), .. } if holder.pid == std::process::id() => {
            format!("{file}: this command uses it already, for something else")
        }
        Error::File { file, action: IoAction::Open, source } => not_opened(file, source),
        Error::File { file, action: IoAction::Create, source }
            if source.kind() == io::ErrorKind::NotFound =>
        {
            missing(file)
        }
        Error::Guessed { file, format } => format!(
            "{file}: its format was not detected, and a guest that writes to it as {format} could make it \
             look like another format"
        ),
        other => other.to_string(),
    }
}

/// Why a file cannot be opened.
fn not_opened(file: &str, source: &io::Error) -> String {
    if source.kind() != io::ErrorKind::NotFound {
        return format!("{file}: cannot open: {}", plain(source));
    }
    if let Some((message, _)) = protocols::unread(file) {
        return message;
    }
    missing(file)
}

/// What of a path is missing: the file, or its folder.
pub fn missing(file: &str) -> String {
    match missing_folder(file) {
        Some(folder) => format!("{file}: the folder {} is not there", quoted(&folder)),
        None => format!("{file}: there is no such file"),
    }
}

/// Why a socket or a mount point cannot be made at `path`; `place` names it in the message.
pub fn not_made(place: &str, path: &Path, error: &io::Error) -> Failure {
    let path = path.display().to_string();
    match missing_folder(&path).filter(|_| error.kind() == io::ErrorKind::NotFound) {
        Some(folder) => {
            Failure::failed(format!("{place}: the folder {} is not there", quoted(&folder)))
                .hint(mkdir(&path).unwrap_or_default())
        }
        None => Failure::failed(format!("{place}: {}", plain(error))),
    }
}

/// Why nobody answers at a control socket.
pub fn not_answered(socket: &Path, error: &io::Error) -> Failure {
    let is_socket = || socket.metadata().is_ok_and(|found| found.file_type().is_socket());
    let (why, hint) = match error.kind() {
        io::ErrorKind::NotFound => ("there is no such socket".to_owned(), true),
        io::ErrorKind::ConnectionRefused if !is_socket() => ("it is no socket".to_owned(), true),
        io::ErrorKind::ConnectionRefused => ("it has ended".to_owned(), false),
        _ => (error.to_string(), false),
    };
    let failure = Failure::failed(format!("{}: no service answers: {why}", socket.display()));
    match hint {
        true => failure.hint("'vdkit serve' makes its socket with '--control SOCKET'"),
        false => failure,
    }
}

/// The hint to make the missing folder of a file.
fn mkdir(file: &str) -> Option<String> {
    let parent = Path::new(file).parent()?.display().to_string();
    missing_folder(file).map(|_| format!("'mkdir -p {}' makes it", quoted(&parent)))
}

/// The first folder of a path that does not exist.
fn missing_folder(file: &str) -> Option<String> {
    let folders = Path::new(file).ancestors().skip(1).filter(|path| !path.as_os_str().is_empty());
    let missing = folders.take_while(|folder| folder.symlink_metadata().is_err()).last();
    missing.map(|folder| folder.display().to_string())
}

/// What the user may do about the error.
fn hint_for(error: &Error, context: &Context<'_>) -> Option<String> {
    if let Some(remedy) = error.remedy() {
        return remedies::worded(&remedy, error, context);
    }
    let hint = match error {
        Error::Corrupt(_) => return remedies::worded(&Remedy::Check, error, context),
        Error::Limit { what, .. } if what.contains("trying a key") => {
            "--key-rounds N raises the limit".to_owned()
        }
        Error::File { action: IoAction::Lock, .. } if context.force_share => {
            "--force-share reads without locks".to_owned()
        }
        Error::Locked { holder, writing, .. } => {
            locks::hint(holder.as_ref(), context.force_share && !writing, context.command)
        }
        Error::Busy { .. } => "release it first, by what holds it: umount, losetup -d, swapoff, vgchange -an, \
                               mdadm --stop"
            .to_owned(),
        Error::Guessed { format, .. } => {
            // `convert` and `dd` take the target's format with `-O`, commands that change an image
            // with `-f`.
            let letter = if matches!(context.command, "convert" | "dd") { 'O' } else { 'f' };
            format!("if every byte of it belongs to the disk, say so with '-{letter} {format}'")
        }
        Error::File { file, action: IoAction::Open, source }
            if source.kind() == io::ErrorKind::NotFound =>
        {
            return protocols::unread(file).map(|(_, hint)| hint);
        }
        Error::File { file, action: IoAction::Create, source }
            if source.kind() == io::ErrorKind::NotFound =>
        {
            return mkdir(file);
        }
        Error::NoSpace { file, .. } | Error::Io { file, .. } | Error::File { file, .. }
            if error.kind() == ErrorKind::NoSpace =>
        {
            match commands::is_device(Path::new(file)) {
                true => "a device has the size that it has: make it larger (LVM: lvextend) or choose another one",
                false => "make room on that file system or choose another one",
            }
            .to_owned()
        }
        _ => return None,
    };
    Some(hint)
}

/// A file name as a word for a shell, which no program takes for an option.
pub fn quoted(name: &str) -> String {
    let option = name.len() > 1 && name.starts_with('-');
    if option { quoted_word(&format!("./{name}")) } else { quoted_word(name) }
}

/// Quotes a word for a shell.
pub fn quoted_word(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_the_exit_code_of_the_contract() {
        for (kind, code) in [
            (ErrorKind::Failed, 1),
            (ErrorKind::NotFound, 1),
            (ErrorKind::ReadOnly, 1),
            (ErrorKind::Unsupported, 1),
            (ErrorKind::Key, 1),
            (ErrorKind::Usage, 2),
            (ErrorKind::Corrupt, 4),
            (ErrorKind::Limit, 4),
            (ErrorKind::Refused, 5),
            (ErrorKind::Locked, 6),
            (ErrorKind::NoSpace, 7),
            (ErrorKind::Interrupted, 130),
        ] {
            assert_eq!(Exit::from(kind) as u8, code, "{kind:?}");
        }
        assert_eq!(Exit::Done as u8, 0);
        assert_eq!((Exit::Differs as u8, Exit::Unchecked as u8), (3, 8));
    }

    #[test]
    fn advice_is_said_once() {
        let failure = Failure::from(Error::unsupported("a.img", "LUKS", "decrypt it first"));
        assert_eq!(failure.to_string(), "a.img: LUKS");
        let Failure::Engine(error) = &failure else { panic!() };
        assert_eq!(hint_for(error, &Context::default()).as_deref(), Some("decrypt it first"));
    }

    #[test]
    fn numbers_of_errors_are_not_printed() {
        let error = io::Error::from_raw_os_error(2);
        assert_eq!(printable(&format!("a: {error}; b")), "a: No such file or directory; b");
        assert_eq!(printable("x (os error y) (os error 3)"), "x (os error y)");
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
        assert_eq!((quoted("-"), quoted("-a b")), ("-".to_owned(), "'./-a b'".to_owned()));
        assert_eq!(quoted_word("--repair"), "--repair");
    }
}
