//! `qemu-img`: the table of subcommands, the options before the subcommand, and help.

mod amend;
mod bench;
mod bitmap;
mod check;
mod commit;
mod compare;
mod convert;
mod create;
mod dd;
mod info;
mod map;
mod measure;
mod opening;
mod rebase;
mod resize;
mod snapshot;

use std::ffi::OsString;
use std::process::ExitCode;

use crate::failure::{Failure, Origin};
use crate::getopt::{self, Opt, Parsed, flag, long, valued};
use crate::output::Output;

#[derive(Clone, Copy, Debug)]
pub struct Command {
    pub name: &'static str,
    /// One line of help.
    pub about: &'static str,
    /// Its operands, as the help shows them.
    pub operands: &'static str,
    /// Its options. `-h` and `--help` are added.
    pub options: &'static [Opt],
    /// Runs it, with its results to print; returns the exit code.
    pub run: fn(&Parsed, &mut Output) -> Result<u8, Failure>,
}

pub const COMMANDS: &[Command] = &[
    amend::COMMAND,
    bench::COMMAND,
    bitmap::COMMAND,
    check::COMMAND,
    commit::COMMAND,
    compare::COMMAND,
    convert::COMMAND,
    create::COMMAND,
    dd::COMMAND,
    info::COMMAND,
    map::COMMAND,
    measure::COMMAND,
    rebase::COMMAND,
    resize::COMMAND,
    snapshot::COMMAND,
];

const PROGRAM: &str = "qemu-img";

/// The options before the subcommand.
const STANDARD: &[Opt] = &[
    flag('h', "help", "print this help"),
    flag('V', "version", "print the version"),
    valued('T', "trace", "TRACE", "accepted; vdkit has no trace events of QEMU"),
];

/// The options that most subcommands share.
pub const FORMAT: Opt = valued('f', "format", "FMT", "format of the image");
pub const IMAGE_OPTS: Opt =
    long("image-opts", None, "image names are options: driver=…,file.filename=…");
pub const OBJECT: Opt = long("object", Some("OBJDEF"), "a secret or credentials (repeatable)");
pub const OUTPUT: Opt = long("output", Some("human|json"), "for people or for programs");
pub const FORCE_SHARE: Opt =
    flag('U', "force-share", "open the image even if another program writes to it");
pub const QUIET: Opt = flag('q', "quiet", "print no messages");
pub const PROGRESS: Opt = flag('p', "progress", "show progress");
pub const CACHE: Opt = valued('t', "cache", "CACHE", "cache mode of the image that is written");
pub const SRC_CACHE: Opt =
    valued('T', "source-cache", "CACHE", "cache mode of the images that are read");

/// Runs `qemu-img`, which was called by `name`, with these arguments.
pub fn main(name: &str, args: &[OsString]) -> ExitCode {
    let mut out = Output::default();
    let ended = standard(args, &mut out);
    let printed = out.finish();
    if crate::debug::mismatched() {
        return ExitCode::FAILURE;
    }
    let (failure, command) = match (ended, printed) {
        (Ok(code), Ok(())) => return ExitCode::from(code),
        (Ok(_), Err(failure)) => (failure, None),
        (Err(ended), _) => ended,
    };
    failure.print(PROGRAM, name, command);
    ExitCode::from(failure.code)
}

type Ended = Result<u8, (Failure, Option<&'static str>)>;

fn standard(args: &[OsString], out: &mut Output) -> Ended {
    let top = |failure: Failure| (failure, None);
    let getopt = |text: String| Failure { text, code: 1, from: Origin::Getopt };
    let parsed = getopt::parse(args, STANDARD, true).map_err(|text| top(getopt(text)))?;
    if parsed.has("help") {
        out.text(help());
        return Ok(0);
    }
    if parsed.has("version") {
        out.text(version());
        return Ok(0);
    }
    let Some(name) = parsed.operands.first() else {
        return Err(top(Failure::usage("Not enough arguments")));
    };
    let Some(command) = COMMANDS.iter().find(|command| command.name == name) else {
        return Err(top(Failure::usage(format!("Command not found: {name}"))));
    };
    let own = |failure: Failure| (failure, Some(command.name));
    let rest = &args[args.len() + 1 - parsed.operands.len()..];
    let mut options = command.options.to_vec();
    options.push(flag('h', "help", "print this help"));
    let signed = command.name == "resize";
    let rest = if signed { &signed_operands_last(rest) } else { rest };
    let parsed = getopt::parse(rest, &options, false).map_err(|text| own(getopt(text)))?;
    if parsed.has("help") {
        out.text(help_of(command, &options));
        return Ok(0);
    }
    out.quiet(parsed.has("quiet"));
    (command.run)(&parsed, out).map_err(own)
}

/// Moves operands such as `-1M` behind `--`: no option of the command is a digit.
fn signed_operands_last(args: &[OsString]) -> Vec<OsString> {
    let end = args.iter().position(|arg| arg == "--").unwrap_or(args.len());
    let signed = |arg: &&OsString| matches!(arg.as_encoded_bytes(), [b'-', digit, ..] if digit.is_ascii_digit());
    let before = &args[..end];
    let kept = before.iter().filter(|arg| !signed(arg));
    let moved = before.iter().filter(signed);
    // Without a signed operand nothing moves: an option at the end then lacks its value.
    if moved.clone().next().is_none() {
        return args.to_vec();
    }
    let dashes = OsString::from("--");
    kept.chain([&dashes]).chain(moved).chain(args.iter().skip(end + 1)).cloned().collect()
}

fn version() -> String {
    format!(
        "qemu-img version {} (vdkit {})\n\
         vdkit's own engine, with the options and answers of this version of QEMU.\n",
        crate::QEMU_VERSION,
        env!("CARGO_PKG_VERSION")
    )
}

fn help() -> String {
    let commands: String = COMMANDS
        .iter()
        .map(|command| format!("  {} - {}\n", command.name, command.about))
        .collect();
    let mut formats: Vec<_> = vdkit::FORMATS.iter().map(|driver| driver.name()).collect();
    formats.extend(["file", "host_device", "nbd", "null-co"]);
    formats.sort_unstable();
    format!(
        "{}Disk images of QEMU's formats.  Usage:\n\n  qemu-img [standard options] COMMAND [--help | \
         command options]\n\nStandard options:\n{}\nRecognized commands (run qemu-img COMMAND --help \
         for command-specific help):\n\n{commands}\nSupported image formats:\n\n  {}\n",
        version(),
        options_help(STANDARD),
        formats.join(" "),
    )
}

fn help_of(command: &Command, options: &[Opt]) -> String {
    format!(
        "{}.  Usage:\n\n  qemu-img {} [OPTIONS] {}\n\nOptions:\n{}",
        command.about,
        command.name,
        command.operands,
        options_help(options)
    )
}

fn options_help(options: &[Opt]) -> String {
    let mut text = String::new();
    for option in options.iter().filter(|option| !option.help.is_empty()) {
        let names: Vec<_> = option
            .short
            .map(|letter| format!("-{letter}"))
            .into_iter()
            .chain((!option.long.is_empty()).then(|| format!("--{}", option.long)))
            .collect();
        let value = option.value.map(|value| format!(" {value}")).unwrap_or_default();
        text += &format!("  {}{value}\n     {}\n", names.join(", "), option.help);
    }
    text
}

/// Whether `--output` asks for JSON.
pub fn wants_json(parsed: &Parsed) -> Result<bool, Failure> {
    match parsed.last("output") {
        None | Some("human") => Ok(false),
        Some("json") => Ok(true),
        Some(other) => {
            Err(Failure::usage(format!("--output expects 'human' or 'json' not '{other}'")))
        }
    }
}

/// The one operand of a command that takes one image.
pub fn one_image(parsed: &Parsed) -> Result<&str, Failure> {
    match &parsed.operands[..] {
        [name] => Ok(name),
        _ => Err(Failure::usage("Expecting one image file name")),
    }
}
