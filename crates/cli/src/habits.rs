//! Options of qemu-img that fingers type, and what does the same here.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// One option or word of qemu-img that vdkit does not have.
struct Habit {
    /// The subcommand; none for any of them.
    command: Option<&'static str>,
    /// The options, in their spellings.
    options: &'static [&'static str],
    /// What to do instead.
    instead: &'static str,
}

const fn of(
    command: &'static str,
    options: &'static [&'static str],
    instead: &'static str,
) -> Habit {
    Habit { command: Some(command), options, instead }
}

const fn any(options: &'static [&'static str], instead: &'static str) -> Habit {
    Habit { command: None, options, instead }
}

/// The table. Those of one subcommand come before those of any.
const HABITS: &[Habit] = &[
    of(
        "convert",
        &["-W"],
        "vdkit writes out of order, with several threads, by itself; -m N says how many",
    ),
    of(
        "convert",
        &["-C"],
        "vdkit shares or copies within the file system by itself; '--detect-zeros off' lets the kernel copy what it would look at for zeroes",
    ),
    of("convert", &["-s"], "'--snapshot NAME' (-l NAME) reads a snapshot"),
    of(
        "convert",
        &["--target-is-zero"],
        "a new target is known to be zero; '--into' one that exists writes zeroes as holes",
    ),
    of(
        "convert",
        &["--salvage"],
        "vdkit stops at a read error; 'ddrescue' copies what can be read of a failing device",
    ),
    of("convert", &["-D"], "all data files of the target are made anew"),
    of("info", &["--backing-chain"], "'vdkit info' lists the whole chain; 'vdkit tree' draws it"),
    of("snapshot", &["-l"], "'vdkit snapshot list IMAGE'"),
    of("snapshot", &["-c"], "'vdkit snapshot create IMAGE NAME'"),
    of("snapshot", &["-a"], "'vdkit snapshot apply IMAGE NAME'"),
    of("snapshot", &["-d"], "'vdkit snapshot delete IMAGE NAME'"),
    of("commit", &["-d"], "'--keep' leaves the overlay's content where it is"),
    of("commit", &["-b"], "'--to BASE' commits to an image further down"),
    of("bitmap", &["--add"], "'vdkit bitmap add IMAGE NAME'"),
    of("bitmap", &["--remove"], "'vdkit bitmap remove IMAGE NAME'"),
    of("bitmap", &["--clear"], "'vdkit bitmap clear IMAGE NAME'"),
    of("bitmap", &["--enable"], "'vdkit bitmap enable IMAGE NAME'"),
    of("bitmap", &["--disable"], "'vdkit bitmap disable IMAGE NAME'"),
    of("bitmap", &["--merge"], "'vdkit bitmap merge IMAGE NAME SOURCE'"),
    any(
        &["-p"],
        "progress shows by itself on a terminal; '--progress bar' shows it anywhere, '--progress json' for programs",
    ),
    any(
        &["-q", "--quiet"],
        "nothing is printed that was not asked for; '--progress none' shows no bar",
    ),
    any(&["--output"], "'--json' answers as JSON"),
    any(
        &["--image-opts", "--target-image-opts"],
        "name the file itself; -f names its format, --key-file its key",
    ),
    any(&["--object"], "keys come from --key-file FILE, --key-fd N or --key-env NAME"),
    any(&["-T", "--trace"], "'strace vdkit …' shows what is done"),
    any(
        &["-U", "--force-share"],
        "this command needs the image for itself; where 'vdkit serve' holds it, 'vdkit ctl' asks the server",
    ),
];

/// Subcommands of qemu-img that vdkit has under another name.
const WORDS: &[(&str, &str)] = &[
    ("bench", "'vdkit lab' measures this host, 'vdkit serve' beside fio an image"),
    ("nbd", "'vdkit serve IMAGE --nbd unix:SOCKET'"),
];

/// What qemu-img's users do here instead of what `error` complains of.
pub(crate) fn instead_of(error: &clap::Error, arguments: &[OsString]) -> Option<&'static str> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    match error.kind() {
        ErrorKind::UnknownArgument => {
            let given = text(ContextKind::InvalidArg)?.split('=').next()?;
            let command = arguments.get(1).and_then(|first| first.to_str())?;
            instead(command, given)
        }
        ErrorKind::InvalidSubcommand => {
            let word = text(ContextKind::InvalidSubcommand)?;
            WORDS.iter().find(|(known, _)| *known == word).map(|(_, instead)| *instead)
        }
        _ => None,
    }
}

fn instead(command: &str, option: &str) -> Option<&'static str> {
    let habit = HABITS.iter().find(|habit| {
        habit.command.is_none_or(|of| of == command) && habit.options.contains(&option)
    });
    habit.map(|habit| habit.instead)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::ALL;
    use crate::definition::command;

    fn said(line: &[&str]) -> Option<&'static str> {
        let line: Vec<OsString> = ["vdkit"].iter().chain(line).map(OsString::from).collect();
        let error = command().try_get_matches_from(line.clone()).err()?;
        instead_of(&error, &line)
    }

    /// None of them is an option that the subcommand has, or a subcommand that there is not.
    #[test]
    fn each_habit_is_answered() {
        for habit in HABITS {
            for option in habit.options {
                let commands = ALL.iter().map(|entry| entry.name);
                let answered = commands
                    .filter(|name| habit.command.is_none_or(|of| of == *name))
                    .filter(|name| said(&[name, option, "a", "b"]) == Some(habit.instead));
                assert!(answered.count() > 0, "{:?} {option}", habit.command);
            }
        }
        for (word, instead) in WORDS {
            assert_eq!(said(&[word, "x"]), Some(*instead), "{word}");
        }
        assert_eq!(said(&["info", "--output=json", "x"]), Some("'--json' answers as JSON"));
        assert_eq!(said(&["info", "--bogus", "x"]), None);
    }
}
