//! `qemu-img create`: makes an image, empty or on a backing image.

use std::path::{Path, PathBuf};

use vdkit::jobs::{self, CreateOptions, NewBacking};
use vdkit::{FormatDriver, Monitor, OpenOptions, Options, same_file, storage};

use super::{Command, OBJECT, Output, QUIET};
use crate::creation::{Asked, Table, Wanted, asked, failed_creation, table};
use crate::failure::{Failure, system_words, words};
use crate::getopt::{Parsed, flag, valued};
use crate::names::{self, Place};
use crate::open::{Access, Named, open, references, registry};
use crate::output::cancel_on_signal;
use crate::secrets::Objects;
use crate::sizes;

pub const COMMAND: Command = Command {
    name: "create",
    about: "Create a new image",
    operands: "FILENAME [SIZE[bkKMGTPE]]",
    options: &[
        OBJECT,
        QUIET,
        valued('f', "format", "FMT", "format of the new image (raw)"),
        valued('o', "options", "FMT_OPTS", "options of the format; '-o help' lists them"),
        valued('b', "backing", "BACKING_FILENAME", "the backing image"),
        valued('F', "backing-format", "BACKING_FMT", "format of the backing image"),
        flag('u', "backing-unsafe", "do not open the backing image"),
    ],
    run,
};

fn run(parsed: &Parsed, out: &mut Output) -> Result<u8, Failure> {
    let format = parsed.last("format").unwrap_or("raw");
    let values = match asked(parsed.all("options"))? {
        Asked::Values(values) => values,
        Asked::Help => {
            out.text(table(format)?.help(!parsed.operands.is_empty()));
            return Ok(0);
        }
    };
    let (name, size) = match &parsed.operands[..] {
        [] => return Err(Failure::usage("Expecting image file name")),
        [name] => (name, None),
        [name, size] => (name, Some(sizes::size("image size", size)?)),
        [_, _, extra, ..] => return Err(Failure::usage(format!("Unexpected argument: {extra}"))),
    };
    let objects = Objects::of(parsed)?;
    let named = |failure: Failure| failure.within(name);
    let mut wanted = Wanted::new(table(format).map_err(named)?, values).map_err(named)?;
    wanted.set_backing(parsed.last("backing"), parsed.last("backing-format")).map_err(named)?;
    let path = target_path(name).map_err(named)?;
    let check = !parsed.has("backing-unsafe");
    let backing = new_backing(name, &path, &wanted, &objects, check).map_err(named)?;
    let (backing, backing_bytes) = backing.unzip();
    let bytes = match (size, wanted.bytes("size"), backing_bytes.flatten()) {
        (Some(_), Some(_), _) => Err(Failure::new("The image size must be specified only once")),
        (Some(bytes), None, _) | (None, Some(bytes), _) => Ok(bytes),
        (None, None, Some(bytes)) => Ok(whole_sectors(bytes)),
        (None, None, None) => Err(Failure::new("Image creation needs a size parameter")),
    };
    let bytes = bytes.map_err(named)?;
    wanted.set("size", &bytes.to_string());
    out.said(wanted.formatting(name));
    out.flush();
    let options = wanted.options(&objects, bytes).map_err(named)?;
    let driver = wanted.table.driver().map_err(named)?;
    check_host_device(wanted.table, &path).map_err(named)?;
    create_at(&path, driver, whole_sectors(bytes), options, backing).map_err(named)?;
    Ok(0)
}

/// The file, device or NBD export (its URI) that a name of a new image means.
///
/// # Errors
/// An unknown protocol, or one that takes no new images.
pub fn target_path(name: &str) -> Result<PathBuf, Failure> {
    if name.starts_with("json:") {
        return Err(Failure::new("Unknown protocol 'json'"));
    }
    match names::parse(name).map_err(Failure::new)?.place {
        Place::File(path) if path.as_os_str().is_empty() => {
            Err(Failure::new("Could not create '': No such file or directory"))
        }
        Place::File(path) => Ok(path),
        Place::Nbd(uri) => Ok(uri.into()),
        _ => {
            let why = "vdkit makes new images in files, on devices and in NBD exports only";
            Err(Failure::new(why))
        }
    }
}

/// Refuses a target of the driver `host_device` that is no device: a file in its place would not be
/// what the caller reads from.
pub fn check_host_device(table: &Table, path: &Path) -> Result<(), Failure> {
    use std::os::unix::fs::FileTypeExt;
    if table.format != "host_device" {
        return Ok(());
    }
    let name = path.display();
    let why = match path.metadata().map(|found| found.file_type()) {
        Ok(kind) if kind.is_block_device() || kind.is_char_device() => return Ok(()),
        Ok(_) => format!(
            "'host_device' driver requires '{name}' to be either a character or block device"
        ),
        Err(error) => format!("Could not open '{name}': {}", system_words(&error)),
    };
    Err(Failure::new(format!(
        "Protocol driver 'host_device' does not support creating new images, so an existing image \
         must be selected as the target; however, opening the given target as an existing image \
         failed: {why}"
    )))
}

/// Refuses a new image in a file that it is to be read from. A file with several names is written in
/// place, so the image would be made of its own ruins.
pub fn refuse_own_source<'a>(
    target: &Path,
    sources: impl IntoIterator<Item = &'a Path>,
) -> Result<(), Failure> {
    match sources.into_iter().find(|source| same_file(source, target)) {
        Some(source) => {
            let (source, target) = (source.display(), target.display());
            Err(Failure::new(format!("'{target}' is the file that '{source}' is read from")))
        }
        None => Ok(()),
    }
}

/// A new image is rounded to whole sectors, since QEMU counts in these.
pub fn whole_sectors(bytes: u64) -> u64 {
    bytes.next_multiple_of(512).min(i64::MAX as u64)
}

/// The backing image of the new image `own`, and the bytes of its disk if it is opened (`check`).
fn new_backing(
    own: &str,
    path: &Path,
    wanted: &Wanted,
    objects: &Objects,
    check: bool,
) -> Result<Option<(NewBacking, Option<u64>)>, Failure> {
    let Some(name) = wanted.get("backing_file") else { return Ok(None) };
    if name.is_empty() {
        return Err(Failure::new("Expected backing file name, got empty string"));
    }
    if name == own {
        return Err(Failure::new(
            "Error: Trying to create an image with the same filename as the backing file",
        ));
    }
    let format = wanted.get("backing_fmt");
    let opened = |failure: Failure| Failure {
        text: format!("{}\nCould not open backing image.", failure.text),
        ..failure
    };
    if let Some(format) = format.filter(|format| crate::open::driver(format).is_none()) {
        return Err(opened(Failure::new(format!("Unknown driver '{format}'"))));
    }
    let engine = format.and_then(crate::open::driver).map(|driver| driver.name().to_owned());
    let mut new = NewBacking::new(name, engine);
    // A name with a protocol is stored as it is.
    let protocol = name.split_once(':').is_some_and(|(before, _)| !before.contains('/'));
    let bytes = match (check, protocol) {
        (false, _) => None,
        (true, true) => {
            let named = Named { text: name, format, options: false };
            let access = Access { share: true, ..Access::read() };
            let disk = open(&named.parse()?, access, objects).map_err(opened)?;
            Some(disk.guest_bytes())
        }
        (true, false) => {
            let opening = OpenOptions::read_only().refs(references()).lock(false);
            let guessed = NewBacking::new(name, new.format.clone().or(probed(path, name)));
            let found = guessed
                .find(&registry(), path, &opening)
                .map_err(|error| opened(Failure::new(words(&error))))?;
            if format.is_none() {
                let found = found.reference.format.unwrap_or_default();
                return Err(Failure::new(format!(
                    "Backing file specified without backing format\nDetected format of {found}."
                )));
            }
            refuse_own_source(path, [found.path.as_path()])?;
            found.guest_bytes
        }
    };
    if format.is_none() {
        return Err(Failure::new("Backing file specified without backing format"));
    }
    new.open = check && !protocol;
    Ok(Some((new, bytes)))
}

/// The probed format of a backing image whose format was not named.
fn probed(image: &Path, backing: &str) -> Option<String> {
    let path = image.parent().unwrap_or(Path::new("")).join(backing);
    let options = storage::FileOptions::read_only().lock(storage::LockMode::Off);
    let file = storage::FileStorage::open(&path, &options).ok()?;
    Some(registry().probe(&file).ok()?.driver.name().to_owned())
}

/// Creates an image in a file, whatever it holds, or on a device.
pub fn create_at(
    path: &Path,
    driver: &'static dyn FormatDriver,
    guest_bytes: u64,
    options: Options,
    backing: Option<NewBacking>,
) -> Result<(), Failure> {
    let create = CreateOptions::new(path, driver)
        .guest_bytes(guest_bytes)
        .options(options)
        .backing(backing)
        .replace(true)
        .in_place_if_needed(true)
        // A guest may be writing to the backing image: its overlay is made for that.
        .opening(OpenOptions::read_only().refs(references()).lock(false));
    let monitor = Monitor::default().cancelled_by(cancel_on_signal()?);
    jobs::create(&registry(), &create, &monitor)
        .map(drop)
        .map_err(|error| failed_creation(path, &error))
}
