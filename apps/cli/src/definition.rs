//! The one definition of the command line, from which parsing, help, completions and man pages are
//! made.

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::path::Path;

use clap::Command;
use clap::error::{ContextKind, ErrorKind};

use crate::commands::{GROUPS, Subcommand, all, find};
use crate::failure::{Exit, Tone, print_line};
use crate::habits;

/// The whole command. Subcommands are built only when they are needed, because building all of them
/// takes longer than converting a small image.
pub fn command() -> Command {
    all().map(subcommand).fold(root().after_help(overview_help()), Command::subcommand)
}

/// The part of the command that one command line needs. If the command line begins with a
/// subcommand's name, the others are left out.
pub fn command_for(first: Option<&OsStr>) -> Command {
    match first.and_then(OsStr::to_str).and_then(find) {
        Some(entry) => root().subcommand(subcommand(entry)),
        None => command(),
    }
}

fn root() -> Command {
    Command::new("vdkit")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Virtual-disk images: describe, make, convert, check, compare, read and write them")
        .override_usage("vdkit COMMAND [ARGUMENTS]")
        .help_template("{about-with-newline}\n{usage-heading} {usage}{after-help}")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .max_term_width(100)
}

fn subcommand(entry: &'static Subcommand) -> Command {
    Command::new(entry.name).about(entry.about).defer(|command| match find(command.get_name()) {
        Some(entry) => with_texts((entry.augment)(command), entry),
        None => command,
    })
}

/// Whether a subcommand can read an image that another process is writing.
pub fn reads_shared(entry: &Subcommand) -> bool {
    let command = (entry.augment)(Command::new(entry.name));
    command.get_arguments().any(|argument| argument.get_long() == Some("force-share"))
}

/// Adds the texts that only help needs.
fn with_texts(command: Command, entry: &Subcommand) -> Command {
    let mut long = entry.about.to_owned();
    if !entry.details.is_empty() {
        long.push_str("\n\n");
        long.push_str(entry.details.trim());
    }
    let mut after = String::from("Examples:\n");
    for line in entry.examples.trim().lines() {
        after.push_str("  ");
        after.push_str(line);
        after.push('\n');
    }
    command.about(entry.about).long_about(long).after_help(after)
}

/// What the exit codes mean.
pub const EXIT_CODES: &str = "\
0 done, 1 failed, 2 wrong usage, 3 a negative answer (images differ, only leaks,
only warnings, not accepted), 4 corrupt, 5 refused, 6 in use by another process,
7 no space left, 8 cannot be checked, 130 interrupted";

/// First command lines for a new user.
const START: &str = "\
vdkit info disk.qcow2                what is this image?
vdkit create disk.qcow2 20G          a new image of 20 GiB
vdkit convert disk.raw disk.qcow2    the source's format is recognized by its
                                     header, the target's by its name
vdkit check disk.qcow2               is it sound?
vdkit help COMMAND                   all about a command, with examples
vdkit formats qcow2                  the options of a format";

/// The subcommands by group, and the first command lines.
pub fn overview() -> String {
    let mut text = String::with_capacity(4096);
    for (title, group) in GROUPS {
        text.push_str(title);
        text.push_str(":\n");
        for entry in *group {
            text.push_str(&format!("  {:<12} {}\n", entry.name, entry.about));
        }
        text.push('\n');
    }
    text.push_str("Start here:\n");
    for line in START.lines() {
        text.push_str(&format!("  {line}\n"));
    }
    text
}

/// The main help without its head.
fn overview_help() -> String {
    format!(
        "{}\nSizes take binary units: 512, 64K, 10G, 1.5T. '--json' makes answers for programs.\n\
         By the names qemu-img and qemu-nbd (links to it; or 'vdkit qemu-img ...') vdkit takes\n\
         QEMU's options and gives QEMU's answers.\n\
         Exit codes: {EXIT_CODES}.",
        overview()
    )
}

/// Prints clap's message: help and version on stdout, errors on stderr.
pub fn report(mut error: clap::Error, arguments: &[OsString]) -> Exit {
    let exit = match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Exit::Done,
        _ => Exit::Usage,
    };
    let instead = habits::instead_of(&error, arguments);
    // Keep clap's suggestion to pass an unknown option as a file name only where there is such a file.
    let is_file = |argument: &OsString| {
        argument.as_encoded_bytes().starts_with(b"-") && Path::new(argument).exists()
    };
    if instead.is_some() || !arguments.iter().any(is_file) {
        error.remove(ContextKind::Suggested);
    }
    if instead.is_some() {
        error.remove(ContextKind::SuggestedArg);
        error.remove(ContextKind::SuggestedSubcommand);
    }
    // Ignore errors: the reader may have closed the pipe, and there is nowhere else to report one.
    let _ = error.print();
    let _ = std::io::stdout().flush();
    if let Some(instead) = instead {
        print_line(Tone::Hint, instead);
    }
    exit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_sound() {
        command().debug_assert();
    }

    #[test]
    fn one_subcommand_says_the_same_alone() {
        for entry in all() {
            for line in [[entry.name, "--help"], [entry.name, "-h"], [entry.name, "--bogus"]] {
                let line = ["vdkit"].into_iter().chain(line);
                let said = |command: Command| {
                    let error = command.try_get_matches_from(line.clone()).unwrap_err();
                    (error.kind(), error.render().ansi().to_string())
                };
                assert_eq!(said(command_for(Some(OsStr::new(entry.name)))), said(command()));
            }
        }
        for other in [None, Some("--help"), Some("help"), Some("konvert"), Some("")] {
            assert_eq!(command_for(other.map(OsStr::new)).get_subcommands().count(), all().count());
        }
    }

    #[test]
    fn the_overview_names_every_subcommand() {
        let text = overview();
        for entry in all() {
            assert!(text.contains(&format!("\n  {} ", entry.name)), "{}", entry.name);
        }
    }
}
