//! Options of qemu-img and qemu-nbd that vdkit does not have, with the vdkit option that does the same.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// One option that vdkit does not have, or a value that its option of that name does not take.
struct Habit {
    /// The subcommand; none if the entry applies to every subcommand.
    command: Option<&'static str>,
    /// The options, in each spelling.
    options: &'static [&'static str],
    /// The option exists in vdkit too; the entry only applies to this value.
    value: Option<&'static str>,
    instead: &'static str,
}

const fn of(
    command: &'static str,
    options: &'static [&'static str],
    instead: &'static str,
) -> Habit {
    Habit { command: Some(command), options, value: None, instead }
}

const fn value(
    command: &'static str,
    options: &'static [&'static str],
    value: &'static str,
    instead: &'static str,
) -> Habit {
    Habit { command: Some(command), options, value: Some(value), instead }
}

const fn any(options: &'static [&'static str], instead: &'static str) -> Habit {
    Habit { command: None, options, value: None, instead }
}

/// Answer to options that choose a cache mode, for commands without one.
const CACHE_READING: &str = "this command reads through the page cache, and changes nothing there";
const CACHE_WRITING: &str =
    "what this command writes is durable when it is done; there is no cache mode to choose";

/// Answer to an empty name of a backing image.
const NO_BACKING: &str = "leave the option out for an image without a backing image";

/// Answer to options that QEMU itself gave up.
const OLD: &str =
    "'-o encrypt.format=luks' with --key-file encrypts; '-o compat=1.1' is the default";

/// The table. Entries of one subcommand come before those of every subcommand.
const HABITS: &[Habit] = &[
    of("amend", &["-t", "--cache"], CACHE_WRITING),
    of(
        "amend",
        &["--force"],
        "keys of an encrypted image: 'vdkit key remove' and 'vdkit key change', which have --force",
    ),
    of("bitmap", &["--add"], "'vdkit bitmap add IMAGE NAME'"),
    of("bitmap", &["--remove"], "'vdkit bitmap remove IMAGE NAME'"),
    of("bitmap", &["--clear"], "'vdkit bitmap clear IMAGE NAME'"),
    of("bitmap", &["--enable"], "'vdkit bitmap enable IMAGE NAME'"),
    of("bitmap", &["--disable"], "'vdkit bitmap disable IMAGE NAME'"),
    of("bitmap", &["--merge"], "'vdkit bitmap merge IMAGE SOURCE --into NAME'"),
    of("check", &["-T", "--cache"], CACHE_READING),
    of("commit", &["-d", "--drop"], "'--keep' leaves the overlay's content where it is"),
    of("commit", &["-b", "--base"], "'--to BASE' commits to an image further down"),
    of("commit", &["-t", "--cache"], CACHE_WRITING),
    of("commit", &["-r", "--rate"], "'vdkit qemu-img commit -r LIMIT' has a limit"),
    of("compare", &["-T", "--cache"], CACHE_READING),
    of("compare", &["--a-format"], "-f names the first image's format"),
    of("compare", &["--b-format"], "-F names the second image's format"),
    of("convert", &["--source-format"], "-f names the sources' format"),
    of("convert", &["--source-snapshot"], "'--snapshot NAME' (-l NAME) reads a snapshot"),
    of("convert", &["--source-cache"], "'--src-cache MODE' (-T MODE)"),
    of("convert", &["--target-options"], "'-o KEY=VALUE'"),
    of("convert", &["--target-cache"], "'--cache MODE' (-t MODE)"),
    of("convert", &["--no-create"], "'--into' (-n) writes into a target that exists"),
    of("convert", &["--sparse-size"], "'--detect-zeros SIZE' (-S SIZE)"),
    of("convert", &["--parallel"], "'--threads N' (-m N)"),
    of(
        "convert",
        &["-W", "--oob-writes"],
        "vdkit writes out of order, with several threads, by itself; -m N says how many",
    ),
    of(
        "convert",
        &["-C", "--copy-range-offloading"],
        "vdkit shares or copies within the file system by itself; '--detect-zeros off' lets the kernel copy what would be searched for zeroes",
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
        "'vdkit qemu-img convert --salvage' goes on at a read error, with zeroes; 'ddrescue' tries again to read \
         a failing device",
    ),
    of("convert", &["-e", "-6"], OLD),
    of("convert", &["-D"], "all data files of the target are made anew"),
    of(
        "convert",
        &["--source-image-opts"],
        "name the file itself; -f names its format, --key-file its key",
    ),
    value("convert", &["-B", "--backing"], "", NO_BACKING),
    value(
        "convert",
        &["-S", "--detect-zeros"],
        "0",
        "'-o preallocation=full' allocates the whole target, as qemu-img's '-S 0' does; '-S off' only skips the \
         search for zeroes",
    ),
    of("create", &["-e", "-6"], OLD),
    of("create", &["--backing-unsafe"], "'-u' does not open the backing image"),
    value("create", &["-b", "--backing"], "", NO_BACKING),
    of("dd", &["-n", "--no-create"], "'conv=nocreat' writes only into a target that exists"),
    of("dd", &["--output-format"], "'--target-format FORMAT' (-O FORMAT)"),
    of(
        "info",
        &["-b", "--backing-chain"],
        "'vdkit info --chain' describes each image of the chain; 'vdkit tree' draws it",
    ),
    of(
        "info",
        &["--limits"],
        "'vdkit doctor IMAGE' says whether direct I/O works where the image is",
    ),
    of("map", &["--start-offset"], "'--start OFFSET'"),
    of("map", &["--max-length"], "'--length SIZE'"),
    of(
        "rebase",
        &["-c", "--compress"],
        "'vdkit qemu-img rebase -c' compresses what it copies; 'vdkit convert --compress' makes a compressed image",
    ),
    of("rebase", &["-t", "--cache", "-T", "--backing-cache"], CACHE_WRITING),
    of("rebase", &["--backing-unsafe"], "'--unsafe' (-u) changes the name only"),
    value(
        "rebase",
        &["-b", "--backing"],
        "",
        "'--no-backing' makes it independent of a backing image",
    ),
    of("serve", &["-A", "--allocation-depth"], "clients can always query qemu:allocation-depth"),
    of("serve", &["--aio"], "vdkit itself chooses how it reads and writes"),
    of("serve", &["-b", "--bind", "-p", "--port"], "'--nbd tcp:HOST:PORT'"),
    of("serve", &["-B"], "'--bitmap NAME'"),
    of(
        "serve",
        &["-c", "--connect"],
        "'vdkit qemu-nbd -c /dev/nbd0 IMAGE' makes it a device of the kernel, 'vdkit mount IMAGE FILE' a plain \
         file",
    ),
    of(
        "serve",
        &["-d", "--disconnect"],
        "'vdkit qemu-nbd -d /dev/nbd0' detaches a device of the kernel",
    ),
    of("serve", &["-D"], "'--description TEXT'"),
    of(
        "serve",
        &["--detect-zeroes"],
        "written zeroes are stored; 'vdkit compact IMAGE' frees them later",
    ),
    of("serve", &["--discard"], "vdkit always frees what clients discard"),
    of("serve", &["-e", "--shared"], "'--connections N'; without it 1024 at a time"),
    of(
        "serve",
        &["--fork", "--pid-file"],
        "it stays in the foreground; the unit vdkit-serve@NAME.socket runs it in the background, or 'vdkit \
         qemu-nbd --fork'",
    ),
    of(
        "serve",
        &["--handshake-limit"],
        "a negotiation ends after 15 seconds; 'vdkit qemu-nbd' has the option",
    ),
    of("serve", &["-k", "--socket"], "'--nbd unix:PATH'"),
    of("serve", &["-l", "--load-snapshot"], "'--snapshot NAME' serves a snapshot inside the image"),
    of(
        "serve",
        &["-L", "--list", "--tls-hostname"],
        "'vdkit qemu-nbd --list' lists the exports of a server",
    ),
    of("serve", &["-n", "--nocache"], "'--cache none'"),
    of("serve", &["-o", "--offset"], "'vdkit qemu-nbd --offset N' serves from an offset on"),
    of("serve", &["-r"], "'--read-only'"),
    of("serve", &["-s"], "serve an overlay: 'vdkit create OVERLAY --backing IMAGE'"),
    of(
        "serve",
        &["-t", "--persistent"],
        "without '--once' it continues when the last client has left",
    ),
    of(
        "serve",
        &["--tls-authz"],
        "'--tls DIR' with ca-cert.pem admits the clients of an authority; 'vdkit qemu-nbd' has the option",
    ),
    of(
        "serve",
        &["--tls-creds"],
        "'--tls DIR', with server-cert.pem and server-key.pem, or with keys.psk",
    ),
    of(
        "serve",
        &["-v", "--verbose"],
        "'vdkit top SOCKET' shows the requests, with '--control SOCKET' here",
    ),
    of("serve", &["-x", "--export-name"], "'--name NAME'"),
    of("snapshot", &["-l", "--list"], "'vdkit snapshot list IMAGE'"),
    of("snapshot", &["-c", "--create"], "'vdkit snapshot create IMAGE NAME'"),
    of("snapshot", &["-a", "--apply"], "'vdkit snapshot apply IMAGE NAME'"),
    of("snapshot", &["-d", "--delete"], "'vdkit snapshot delete IMAGE NAME'"),
    any(
        &["-p", "--progres"],
        "progress shows by itself on a terminal; '--progress bar' shows it from the first moment, '--progress json' anywhere, for programs",
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

/// Subcommands of qemu-img and other tools that have another name in vdkit.
const WORDS: &[(&str, &str)] = &[
    ("bench", "'vdkit lab' measures this host, 'vdkit serve' beside fio an image"),
    ("nbd", "'vdkit serve IMAGE --nbd unix:SOCKET'"),
    ("export", "'vdkit serve IMAGE --nbd unix:SOCKET', or 'vdkit mount IMAGE FILE'"),
    ("copy", "'vdkit convert SOURCE TARGET'"),
    ("cp", "'vdkit convert SOURCE TARGET'"),
    (
        "clone",
        "'vdkit create NEW --backing IMAGE' makes an overlay, 'vdkit convert IMAGE NEW' a copy",
    ),
    ("repair", "'vdkit check --repair all IMAGE'"),
    ("sparsify", "'vdkit compact IMAGE'"),
    (
        "shrink",
        "'vdkit resize --shrink IMAGE SIZE' makes the disk smaller, 'vdkit compact IMAGE' the file",
    ),
    ("ls", "'vdkit tree DIR' shows the images of a folder, 'vdkit info IMAGE' describes one"),
    ("list", "'vdkit tree DIR' shows the images of a folder, 'vdkit info IMAGE' describes one"),
];

/// Values of options that mean something to qemu-img alone.
const VALUES: &[(&str, &str)] = &[
    (
        "nocow=",
        "on btrfs, 'chattr +C DIR' makes new files in DIR without copy-on-write; 'vdkit qemu-img create' has the \
         option",
    ),
    (
        "extent_size_hint=",
        "on XFS, \"xfs_io -c 'extsize 1m' DIR\" sets it for new files in DIR; 'vdkit qemu-img create' has the option",
    ),
    ("snapshot.name=", "give the name alone: '--snapshot NAME'"),
    ("snapshot.id=", "give the id alone: '--snapshot ID'"),
];

/// What to use instead of a value in the arguments of a command that was refused.
pub(crate) fn instead_of_value(arguments: &[OsString]) -> Option<&'static str> {
    let mut given = arguments.iter().filter_map(|argument| argument.to_str());
    given.find_map(|argument| {
        let value = VALUES.iter().find(|(value, _)| argument.contains(value));
        value.map(|(_, instead)| *instead)
    })
}

/// What to use instead of the argument that `error` reports.
pub(crate) fn instead_of(error: &clap::Error, arguments: &[OsString]) -> Option<&'static str> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let command = arguments.get(1).and_then(|first| first.to_str());
    match error.kind() {
        ErrorKind::UnknownArgument => {
            let given = text(ContextKind::InvalidArg)?.split('=').next()?;
            instead(command?, given, None)
        }
        // clap reports the option with its value's name: `--backing <NEW>`.
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => {
            let given = text(ContextKind::InvalidArg)?.split(' ').next()?;
            instead(command?, given, Some(text(ContextKind::InvalidValue)?))
        }
        ErrorKind::MissingRequiredArgument => asks_for_options(arguments).then_some(OPTIONS),
        ErrorKind::InvalidSubcommand => {
            let word = text(ContextKind::InvalidSubcommand)?;
            WORDS.iter().find(|(known, _)| *known == word).map(|(_, instead)| *instead)
        }
        _ => None,
    }
}

/// Answer to `-o help` without an image.
const OPTIONS: &str = "'vdkit formats qcow2' lists the options of a format";

/// Whether `-o help` or `-o ?` is among the arguments.
fn asks_for_options(arguments: &[OsString]) -> bool {
    let texts: Vec<_> = arguments.iter().filter_map(|argument| argument.to_str()).collect();
    let asks = |value: &str| matches!(value, "help" | "?");
    texts.windows(2).any(|pair| matches!(pair, ["-o" | "--options", value] if asks(value)))
        || texts.iter().any(|text| {
            let value = text.strip_prefix("--options=").or_else(|| text.strip_prefix("-o"));
            value.is_some_and(|value| asks(value.trim_start_matches('=')))
        })
}

fn instead(command: &str, option: &str, value: Option<&str>) -> Option<&'static str> {
    let habit = HABITS.iter().find(|habit| {
        habit.value == value
            && habit.command.is_none_or(|of| of == command)
            && habit.options.contains(&option)
    });
    habit.map(|habit| habit.instead)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::all;
    use crate::definition::command;

    fn said(line: &[&str]) -> Option<&'static str> {
        let line: Vec<OsString> = ["vdkit"].iter().chain(line).map(OsString::from).collect();
        let error = command().try_get_matches_from(line.clone()).err()?;
        instead_of(&error, &line)
    }

    /// The table has no option that its subcommand knows, and no unknown subcommand.
    #[test]
    fn each_habit_is_answered() {
        for habit in HABITS {
            for option in habit.options {
                let commands = all().map(|entry| entry.name);
                let line = |name| match habit.value {
                    Some(value) => [name, "x", *option, value],
                    None => [name, option, "a", "b"],
                };
                let answered = commands
                    .filter(|name| habit.command.is_none_or(|of| of == *name))
                    .filter(|name| said(&line(name)) == Some(habit.instead));
                assert!(answered.count() > 0, "{:?} {option}", habit.command);
            }
        }
        for (word, instead) in WORDS {
            assert_eq!(said(&[word, "x"]), Some(*instead), "{word}");
        }
        assert_eq!(said(&["info", "--output=json", "x"]), Some("'--json' answers as JSON"));
        assert_eq!(said(&["info", "--bogus", "x"]), None);
        for line in [
            &["create", "-f", "qcow2", "-o", "help"][..],
            &["create", "-o?"],
            &["amend", "--options=help"],
            &["convert", "-O", "qcow2", "-o", "?"],
        ] {
            assert_eq!(said(line), Some(OPTIONS), "{line:?}");
        }
        assert_eq!(said(&["create", "-f", "qcow2"]), None);
    }

    /// The options of the subcommands of qemu-img 10.0, from its manual page and its `--help`, and those of
    /// qemu-nbd (without `--selinux-label`, which vdkit has nothing for) at the subcommand that serves.
    const QEMU: &[(&str, &str)] = &[
        (
            "amend",
            "-q --quiet -p --progress -f --format --image-opts -t --cache --force -o --object",
        ),
        (
            "bitmap",
            "-f --format --image-opts --add --remove --clear --enable --disable --merge -b --source-file \
             -F --source-format -g --granularity --object",
        ),
        (
            "check",
            "-q --quiet -f --format --image-opts -T --cache -U --force-share --output -r --repair --object",
        ),
        (
            "commit",
            "-q --quiet -p --progress -f --format --image-opts -t --cache -d --drop -b --base -r --rate --object",
        ),
        (
            "compare",
            "-q --quiet -p --progress -f --a-format -F --b-format --image-opts -s --strict -T --cache -U \
             --force-share --object",
        ),
        (
            "convert",
            "-q --quiet -p --progress -f --source-format --image-opts --source-image-opts -l \
             --source-snapshot -T --source-cache -O --target-format --target-image-opts -o \
             --target-options -c --compress -t --target-cache -B --backing -F --backing-format -n \
             --no-create --target-is-zero -S --sparse-size --bitmaps --skip-broken-bitmaps -U \
             --force-share -r --rate -m --parallel -C --copy-range-offloading --salvage -W \
             --oob-writes --object -s -D",
        ),
        (
            "create",
            "-q --quiet -f --format -o --options -b --backing -F --backing-format -u --backing-unsafe --object",
        ),
        ("dd", "-f --format --image-opts -O --output-format -U --force-share"),
        ("info", "-f --format --image-opts -b --backing-chain -U --force-share --object --output"),
        (
            "map",
            "-f --format --image-opts -s --start-offset -l --max-length --output -U --force-share --object",
        ),
        (
            "measure",
            "-O --target-format -s --size -f --format --image-opts -l --snapshot -o --output -U \
             --force-share --object",
        ),
        (
            "rebase",
            "-q --quiet -p --progress -f --format --image-opts -t --cache -b --backing -F \
             --backing-format -T --backing-cache -u --backing-unsafe -c --compress -U --force-share \
             --object",
        ),
        ("resize", "-q --quiet -f --format --image-opts --shrink --preallocation --object"),
        (
            "serve",
            "-p --port -b --bind -k --socket -e --shared -t --persistent -v --verbose -x --export-name -D \
             --description --handshake-limit -o --offset -A --allocation-depth -B --bitmap -L --list --object \
             --tls-creds --tls-authz --tls-hostname -T --trace --fork --pid-file -c --connect -d --disconnect \
             -f --format -r --read-only -s --snapshot -l --load-snapshot -n --nocache --cache --aio --discard \
             --detect-zeroes --image-opts",
        ),
        (
            "snapshot",
            "-q --quiet -f --format --image-opts -U --force-share --object -l --list -c --create -a \
             --apply -d --delete",
        ),
    ];

    #[test]
    fn each_option_of_qemus_programs_is_there_or_answered() {
        let mut all = command();
        all.build();
        for (name, options) in QEMU {
            let subcommand = all.find_subcommand(name).unwrap();
            for option in options.split_whitespace() {
                let known =
                    subcommand.get_arguments().any(|argument| match option.strip_prefix("--") {
                        Some(long) => argument.get_long() == Some(long),
                        None => argument.get_short() == option.chars().nth(1),
                    });
                let answer = said(&[name, option, "a", "b"]);
                assert_ne!(known, answer.is_some(), "{name} {option}: {answer:?}");
            }
        }
        for name in
            ["amend", "bench", "bitmap", "check", "commit", "compare", "convert", "create", "dd"]
                .into_iter()
                .chain(["info", "map", "measure", "rebase", "resize", "snapshot"])
        {
            assert!(all.find_subcommand(name).is_some() || said(&[name, "x"]).is_some(), "{name}");
        }
    }
}
