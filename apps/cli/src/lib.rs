//! The command `vdkit`: what users type.
//!
//! One table, [`commands::GROUPS`], names every subcommand; each is a file in `commands/` that parses
//! its arguments, calls a job of the library and prints the answer. The life of a call:
//!
//! ```text
//!   main ─► definition   a clap tree whose subcommands are built only when asked for
//!        ─► Subcommand::run         the subcommand's own arguments, then the job
//!        ─► output                  results on stdout (text or JSON)
//!        ─► failure                 messages and hints on stderr, and the exit code
//! ```
//!
//! A call on a small image is over in about a millisecond: nothing is set up (threads, progress
//! bars, help texts) before it is needed.

// These macros panic when the reader went away.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod arguments;
pub mod commands;
pub mod definition;
mod failure;
mod fuse;
mod guard;
mod habits;
mod hex;
mod incoming;
mod keys;
mod locks;
mod notify;
mod output;
mod progress;
mod protocols;
mod remedies;
mod runs;
pub mod sandbox;
mod serving;
mod session;

use std::process::ExitCode;

use failure::{Context, Exit};
use session::Session;
use vdkit_qemu::Program;

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    if let [first, rest @ ..] = arguments.get(1..).unwrap_or_default()
        && first == commands::inspect::child::CHILD
    {
        return commands::inspect::child::main(rest);
    }
    // By its own name, or as `vdkit qemu-img …`.
    for (i, name) in arguments.iter().enumerate().take(2) {
        if let Some(program) = Program::named(name) {
            return program.run(name, &arguments[i + 1..]);
        }
    }
    ExitCode::from(run(arguments) as u8)
}

/// Runs one command line, which begins with the program's name.
pub fn run(arguments: impl IntoIterator<Item = std::ffi::OsString>) -> Exit {
    let arguments: Vec<_> = arguments.into_iter().collect();
    let command = definition::command_for(arguments.get(1).map(|first| first.as_os_str()));
    let matches = match command.try_get_matches_from(&arguments) {
        Ok(matches) => matches,
        Err(error) => return definition::report(error, &arguments),
    };
    let Some((name, matches)) = matches.subcommand() else {
        return Exit::Usage;
    };
    let Some(command) = commands::find(name) else {
        return Exit::Usage;
    };
    arguments::print_notes();
    let mut session = Session::default();
    let answer = (command.run)(matches, &mut session).and_then(|exit| {
        session.out.finish()?;
        Ok(exit)
    });
    match answer {
        Ok(exit) => exit,
        Err(failure) => {
            // Write the results that were printed before the failure, so that they come before its
            // message.
            let _ = session.out.finish();
            let failure = match habits::instead_of_value(&arguments) {
                Some(instead) if failure.exit() == Exit::Usage => failure.hint(instead),
                _ => failure,
            };
            let force_share = definition::reads_shared(command);
            let format = matches.try_get_one::<String>("format").ok().flatten();
            let format = format.map(String::as_str);
            failure.print(&Context { command: command.name, force_share, format });
            failure.exit()
        }
    }
}
