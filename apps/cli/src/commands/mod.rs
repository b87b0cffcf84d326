//! The subcommands, one file each.

use std::ffi::OsStr;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use clap::{ArgMatches, Args, Command, FromArgMatches};

use vdkit::jobs::Preset;
use vdkit::{Disk, FormatDriver, same_file};

use crate::failure::{Failure, Outcome, Tone, print_line, quoted};
use crate::progress::Reporter;
use crate::session::Session;

mod amend;
mod bitmap;
mod check;
mod commit;
mod compact;
mod compare;
mod completions;
mod convert;
mod create;
mod ctl;
mod dd;
mod doctor;
mod formats;
mod info;
pub(crate) mod inspect;
mod key;
mod lab;
mod man;
mod map;
mod measure;
mod mount;
mod read;
mod rebase;
mod resize;
mod serve;
mod snapshot;
mod top;
mod tree;
mod validate;
mod write;

/// Every subcommand, in the groups and the order of the overview.
pub static GROUPS: &[(&str, &[Subcommand])] = &[
    ("Create images", &[create::COMMAND, convert::COMMAND]),
    (
        "Examine images",
        &[
            info::COMMAND,
            inspect::COMMAND,
            validate::COMMAND,
            doctor::COMMAND,
            tree::COMMAND,
            map::COMMAND,
            compare::COMMAND,
            measure::COMMAND,
            lab::COMMAND,
        ],
    ),
    (
        "Check and change images",
        &[
            check::COMMAND,
            compact::COMMAND,
            snapshot::COMMAND,
            resize::COMMAND,
            commit::COMMAND,
            bitmap::COMMAND,
            rebase::COMMAND,
            amend::COMMAND,
            key::COMMAND,
        ],
    ),
    (
        "Serve disks to guests and tools",
        &[serve::COMMAND, ctl::COMMAND, top::COMMAND, mount::COMMAND],
    ),
    ("Read and write guest bytes", &[read::COMMAND, write::COMMAND, dd::COMMAND]),
    ("Help", &[formats::COMMAND, completions::COMMAND, man::COMMAND]),
];

/// Every subcommand.
pub fn all() -> impl Iterator<Item = &'static Subcommand> {
    GROUPS.iter().flat_map(|(_, group)| *group)
}

/// An entry in the table of subcommands.
#[derive(Debug)]
pub struct Subcommand {
    /// The name on the command line.
    pub name: &'static str,
    /// One-line description.
    pub about: &'static str,
    /// Further text for `--help`; may be empty.
    pub details: &'static str,
    /// Example command lines with a short comment each, printed at the end of the help.
    pub examples: &'static str,
    /// Adds the arguments. Called only for the subcommand that is used.
    pub augment: fn(Command) -> Command,
    /// Runs the subcommand.
    pub run: fn(&ArgMatches, &mut Session) -> Outcome,
}

/// The arguments of a subcommand, with the code that runs it.
pub trait Run: Args + FromArgMatches {
    /// Runs the subcommand.
    ///
    /// # Errors
    /// The failure, with its exit code.
    fn run(self, session: &mut Session) -> Outcome;
}

/// A subcommand without texts whose arguments are `R`.
const fn runs<R: Run>() -> Subcommand {
    Subcommand {
        name: "",
        about: "",
        details: "",
        examples: "",
        augment: R::augment_args,
        run: run::<R>,
    }
}

fn run<R: Run>(matches: &ArgMatches, session: &mut Session) -> Outcome {
    // Cannot fail: parsing has already checked the matches against the definition.
    let arguments = R::from_arg_matches(matches)
        .map_err(|error| Failure::usage(error.to_string().trim_end().to_owned()))?;
    arguments.run(session)
}

/// Finds the subcommand called `name`.
pub fn find(name: &str) -> Option<&'static Subcommand> {
    all().find(|entry| entry.name == name)
}

/// Closes a disk after a change, also after one that failed, so that the image is marked clean.
pub(crate) fn closed<T, E>(disk: &Disk, done: Result<T, E>) -> Result<T, Failure>
where
    Failure: From<E>,
{
    let closed = disk.close();
    let done = done?;
    closed?;
    Ok(done)
}

/// The byte range given by an offset and an optional length.
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

/// The driver of a new image. Its format is the preset's, or the one named, or the one that the
/// file name's ending stands for, or raw.
pub(crate) fn target_driver(
    made_for: Option<Preset>,
    format: Option<&str>,
    path: &Path,
) -> Result<&'static dyn FormatDriver, Failure> {
    if let Some(preset) = made_for {
        return preset_driver(preset, format);
    }
    if let Some(name) = format {
        return Ok(vdkit::format(name)?);
    }
    let ending = path.extension().and_then(OsStr::to_str).unwrap_or_default();
    let name = path.display().to_string();
    if let Some((_, what, hint)) =
        NOT_WRITTEN.iter().find(|(known, ..)| known.eq_ignore_ascii_case(ending))
    {
        return Err(Failure::failed(format!("{name}: its name asks for {what}"))
            .hint(hint.replace("NAME", &quoted(&name))));
    }
    match vdkit::registry().find_by_extension(ending) {
        Some(driver) if driver.creation().is_some() => Ok(driver),
        Some(driver) => {
            let what = format!("the {} format, which vdkit does not write", driver.name());
            Err(Failure::failed(format!("{name}: its name asks for {what}")).hint(OTHER_NAME))
        }
        None => {
            if !ending.is_empty() && !RAW_ENDINGS.iter().any(|raw| raw.eq_ignore_ascii_case(ending))
            {
                let text = format!(
                    "{name}: '.{ending}' is the name of no format: this is a raw disk (another \
                     format: -f or -O)"
                );
                print_line(Tone::Warning, &text);
            }
            Ok(vdkit::format("raw")?)
        }
    }
}

/// What to do about a name whose format is not written.
const OTHER_NAME: &str = "choose another name, or the format with -f or -O";

/// How to compress a disk: as a whole, or within the image.
const COMPRESSED: &str = "'vdkit convert SOURCE -O raw - | gzip > NAME' (or xz, zstd) compresses a raw disk; '-O qcow2 \
                          --compress' makes a compressed image, which can be used as it is";

/// Endings of what is no format of a disk to write to: what it is, and what to do instead. `NAME`
/// stands for the target, quoted for a shell.
const NOT_WRITTEN: &[(&str, &str, &str)] = &[
    (
        "ova",
        "an appliance (OVA), a package of finished disks, not a disk to write to",
        "make the disk under another name, and pack it when it is finished: 'vdkit convert DISK… NAME'",
    ),
    (
        "ovf",
        "the description of an appliance, not a disk",
        "a name with '.ova' makes an appliance of disks: 'vdkit convert DISK… NEW.ova'",
    ),
    ("iso", "the ISO 9660 format, which vdkit does not write", OTHER_NAME),
    ("gz", "a file compressed with gzip, which vdkit only reads", COMPRESSED),
    ("xz", "a file compressed with xz, which vdkit only reads", COMPRESSED),
    ("zst", "a file compressed with zstd, which vdkit only reads", COMPRESSED),
    ("bz2", "a file compressed with bzip2, which vdkit does not write", OTHER_NAME),
    ("zip", "an archive, which vdkit does not write", OTHER_NAME),
    ("7z", "an archive, which vdkit does not write", OTHER_NAME),
    ("tar", "an archive, which vdkit does not write", OTHER_NAME),
    ("tgz", "an archive, which vdkit does not write", OTHER_NAME),
];

/// The driver of the format that a preset needs. `format` is the format that the user named as
/// well.
fn preset_driver(
    preset: Preset,
    format: Option<&str>,
) -> Result<&'static dyn FormatDriver, Failure> {
    let wanted = preset.format();
    let driver = vdkit::format(wanted)?;
    match format.map(vdkit::format).transpose()?.map(|driver| driver.name()) {
        Some(other) if other != driver.name() => {
            Err(Failure::usage(format!("{preset} takes {wanted} images, not {other}")))
        }
        _ => Ok(driver),
    }
}

/// Further endings that people use for raw disks.
const RAW_ENDINGS: &[&str] = &["bin", "dd", "disk", "ima", "image"];

/// Reports that a job failed after it began to write into a target that already existed, so that
/// the target holds a part of the new content.
pub(crate) fn warn_half_written(target: &Path, progress: &Reporter) {
    if progress.begun() {
        let name = target.display();
        let text = format!(
            "{name}: is written in part, and holds neither the old disk nor the new one; run the command \
             again to write all of it"
        );
        print_line(Tone::Warning, &text);
    }
}

/// Refuses the first option that was given and would have no effect; `why` ends the message.
pub(crate) fn refuse_given(options: &[(&str, bool)], why: &str) -> Result<(), Failure> {
    match options.iter().find(|(_, given)| *given) {
        Some((name, _)) => Err(Failure::usage(format!("{name} has no meaning {why}"))),
        None => Ok(()),
    }
}

/// Refuses a source that is the target too, by whatever name.
pub(crate) fn refuse_itself(source: &Path, target: &Path) -> Result<(), Failure> {
    if !same_file(source, target) && (source != target || !is_export(target)) {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "{} and {} are one file, which cannot be source and target at once",
        source.display(),
        target.display()
    ))
    .hint(
        "give the target another name; it can take the old one's place when it is finished ('mv')",
    ))
}

/// Whether a name is of a block device or of an NBD export: the target is there already, and has a
/// fixed length.
pub(crate) fn is_device(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| found.file_type().is_block_device()) || is_export(path)
}

/// Whether a name is of an NBD export.
pub(crate) fn is_export(path: &Path) -> bool {
    vdkit::registry().protocol_of(path).is_some()
}
