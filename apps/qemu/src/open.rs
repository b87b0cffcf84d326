//! From a name to an open image, with QEMU's defaults: formats are probed by content alone, a raw
//! image that was probed is written with a warning, and backing files are opened wherever they are.

use std::path::{Path, PathBuf};

use vdkit::Storage;
use vdkit::storage::{FileOptions, FileStorage, LockMode};
use vdkit::{
    BackingChoice, CacheMode, Disk, Error, ErrorKind, FORMATS, FormatDriver, OpenOptions,
    RefPolicy, Registry,
};

use crate::failure::{Failure, could_not_open, system_words, words};
use crate::getopt::Parsed;
use crate::names::{self, Image, Place};
use crate::output::say;
use crate::secrets::Objects;
use crate::storages::Places;

/// The formats, probed by content alone.
pub fn registry() -> Registry {
    Registry::new(FORMATS.iter().copied())
        .probing_content_only()
        .with_protocols([vdkit::nbd_client::NBD, &Places])
}

/// The driver that QEMU calls by this name.
pub fn driver(name: &str) -> Option<&'static dyn FormatDriver> {
    // Not by vdkit's aliases, which QEMU does not have.
    FORMATS.iter().copied().find(|driver| driver.name() == name)
}

/// The cache mode that QEMU calls by this name.
pub fn cache_mode(name: &str) -> Option<CacheMode> {
    match name {
        "off" => Some(CacheMode::None),
        name => name.parse().ok(),
    }
}

/// The policy for files that an image names: any, as with QEMU, or vdkit's own with
/// `VDKIT_REFS=strict`.
pub fn references() -> RefPolicy {
    match std::env::var("VDKIT_REFS").as_deref() {
        Ok("strict") => RefPolicy::OwnFolder,
        _ => RefPolicy::Folders(vec![PathBuf::from("/")]),
    }
}

/// How an image is opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Access {
    pub writable: bool,
    /// `-U`: locks are ignored.
    pub share: bool,
    /// Through the page cache, or beside it.
    pub cache: CacheMode,
    /// The image alone, without its backing files.
    pub alone: bool,
}

impl Access {
    pub fn read() -> Self {
        Self::default()
    }

    pub fn write() -> Self {
        Self { writable: true, ..Self::default() }
    }
}

/// An image argument: its name, what `-f` and `--image-opts` say of it, and the objects that it
/// refers to.
#[derive(Clone, Copy, Debug)]
pub struct Named<'a> {
    /// The operand or option value.
    pub text: &'a str,
    /// The format that `-f` (or `-F`) names.
    pub format: Option<&'a str>,
    /// The name consists of options.
    pub options: bool,
}

impl<'a> Named<'a> {
    /// The name `text`, with what `-f` and `--image-opts` say of it.
    pub fn of(parsed: &'a Parsed, text: &'a str) -> Self {
        Self { text, format: parsed.last("format"), options: parsed.has("image-opts") }
    }

    /// Reads the name.
    pub fn parse(&self) -> Result<Image, Failure> {
        let parsed = match self.options {
            true => names::parse_options(self.text),
            false => names::parse(self.text),
        };
        let mut image = parsed.map_err(|why| could_not_open(self.text, why))?;
        if let Some(format) = self.format {
            if driver(format).is_none() && !is_protocol(format) {
                return Err(could_not_open(self.text, format!("Unknown driver '{format}'")));
            }
            if self.options {
                return Err(Failure::new("--image-opts and --format are mutually exclusive"));
            }
            // `-f file` is the file's bytes.
            let format = if is_protocol(format) { "raw" } else { format };
            image.format.get_or_insert_with(|| format.to_owned());
        }
        Ok(image)
    }
}

/// Whether a driver is one of QEMU's for plain bytes, so that its content is raw.
pub fn is_protocol(driver: &str) -> bool {
    matches!(
        driver,
        "file" | "host_device" | "null-co" | "null-aio" | "nbd" | "blkdebug" | "blkverify"
    )
}

/// The format of an image, and whether it was probed.
pub fn format_of(
    image: &Image,
    access: Access,
) -> Result<(&'static dyn FormatDriver, bool), Failure> {
    if let Some(name) = &image.format {
        // A debugging driver is a disk of plain bytes.
        let name = if is_protocol(name) { "raw" } else { name };
        let found = driver(name)
            .ok_or_else(|| could_not_open(&image.typed, format!("Unknown driver '{name}'")))?;
        return Ok((found, false));
    }
    // A writer's lock is taken when the image is opened, which also reports a conflict.
    let lock = if access.share || access.writable { LockMode::Off } else { LockMode::Auto };
    let options = FileOptions::read_only().lock(lock);
    if let Some(path) = image.path().filter(|path| path.is_dir()) {
        let why = format!("'file' driver requires '{}' to be a regular file", path.display());
        return Err(could_not_open(&image.typed, why));
    }
    let storage = registry()
        .open_storage(&image.opened(lock == LockMode::Auto), &options)
        .map_err(|error| failed_open(image, None, &error))?;
    match registry().probe(&*storage) {
        Ok(probed) => Ok((probed.driver, probed.fallback)),
        Err(error @ Error::Io { .. }) => {
            let why = format!("Could not read image for determining its format: {}", words(&error));
            Err(could_not_open(&image.typed, why))
        }
        Err(error) => Err(could_not_open(&image.typed, words(&error))),
    }
}

/// Refuses a part of a file that reaches past the file's last sector.
fn check_window(image: &Image) -> Result<(), Failure> {
    let (Some((offset, size)), Place::File(path)) = (image.window, &image.place) else {
        return match image.window {
            None => Ok(()),
            Some(_) => {
                Err(could_not_open(&image.typed, "vdkit takes offset and size of files only"))
            }
        };
    };
    let options = FileOptions::read_only().lock(LockMode::Off);
    let file = FileStorage::open(path, &options)
        .and_then(|file| file.len())
        .map_err(|error| failed_open(image, None, &error))?;
    let file = file.next_multiple_of(512);
    let why = match size {
        _ if offset > file => {
            format!("Offset ({offset}) cannot be greater than size of the containing file ({file})")
        }
        Some(size) if offset.checked_add(size).is_none_or(|end| end > file) => format!(
            "The sum of offset ({offset}) and size ({size}) has to be smaller or equal to the  actual \
             size of the containing file ({file})"
        ),
        _ => return Ok(()),
    };
    Err(could_not_open(&image.typed, why))
}

/// Warns of writing to an image that was probed as raw.
pub fn warn_probed_raw(image: &Image) {
    say(format_args!(
        "WARNING: Image format was not specified for '{}' and probing guessed raw.\n         \
         Automatically detecting the format is dangerous for raw images, write operations on block 0 \
         will be restricted.\n         Specify the 'raw' format explicitly to remove the restrictions.",
        image.shown()
    ));
}

/// The engine's options for an image.
pub fn open_options(
    image: &Image,
    access: Access,
    objects: &Objects,
) -> Result<OpenOptions, Failure> {
    check_window(image)?;
    if let Some(group) = image.throttle_groups.iter().find(|id| !objects.has_throttle_group(id)) {
        return Err(could_not_open(
            &image.typed,
            format!("Throttle group '{group}' does not exist"),
        ));
    }
    let (driver, probed) = format_of(image, access)?;
    if access.writable && probed {
        warn_probed_raw(image);
    }
    let mut options = OpenOptions::read_only().format(driver.name()).cache(access.cache);
    options.writable = access.writable;
    options.lock = !access.share;
    options.refs = references();
    options.data_file.clone_from(&image.data_file);
    options.keys =
        image.secrets.iter().map(|id| objects.secret(id)).collect::<Result<_, Failure>>()?;
    options.backing = match &image.backing {
        _ if access.alone => BackingChoice::Ignore,
        None => BackingChoice::Follow,
        Some(None) => BackingChoice::Ignore,
        Some(Some(backing)) => match backing.path() {
            Some(path) => {
                BackingChoice::Override { path: path.into(), format: backing.format.clone() }
            }
            None => {
                return Err(could_not_open(&image.typed, "the backing image must be a file"));
            }
        },
    };
    Ok(options)
}

/// Opens an image with its backing chain.
pub fn open(image: &Image, access: Access, objects: &Objects) -> Result<Disk, Failure> {
    let options = open_options(image, access, objects)?;
    open_with(image, &options)
}

/// Opens an image with the engine's own options.
pub fn open_with(image: &Image, options: &OpenOptions) -> Result<Disk, Failure> {
    let opened = Disk::open(&registry(), image.opened(options.lock), options);
    opened.map_err(|error| failed_open(image, options.format.as_deref(), &error))
}

/// The failure to open an image, in QEMU's words.
pub fn failed_open(image: &Image, format: Option<&str>, error: &Error) -> Failure {
    let typed = &image.typed;
    if let (Place::Nbd(uri), Error::File { source, .. }) = (&image.place, error) {
        use vdkit::nbd_client::{NbdUri, Place};
        let socket = match NbdUri::parse(uri).map(|parsed| parsed.place) {
            Ok(Place::Unix(path)) => path.display().to_string(),
            Ok(Place::Tcp { host, port }) => format!("{host}:{port}"),
            Err(_) => uri.clone(),
        };
        return could_not_open(
            typed,
            format!("Failed to connect to '{socket}': {}", system_words(source)),
        );
    }
    match (error, image.path(), format.and_then(|name| vdkit::format(name).ok())) {
        (Error::Locked { file, writing: false, .. }, Some(path), _) if Path::new(file) != path => {
            could_not_open(typed, format!("Could not open backing file: {}", words(error)))
        }
        (
            Error::Corrupt(_) | Error::Unsupported { .. } | Error::Limit { .. },
            Some(path),
            Some(driver),
        ) if is_another_format(path, driver) => could_not_open(typed, not_in(driver.name(), path)),
        _ => could_not_open(typed, words(error)),
    }
}

/// The failure of a job that opens images and then works on them. `writing` begins QEMU's message
/// about a failed write.
pub fn failed_job(image: &Image, writing: &str, error: &Error) -> Failure {
    match error {
        error if error.kind() == ErrorKind::NoSpace => Failure::new(words(error)).within(writing),
        Error::Io { .. } => Failure::new(words(error)),
        other => failed_open(image, None, other),
    }
}

/// Whether the content of a file is not of the format that the user named.
fn is_another_format(path: &Path, driver: &dyn FormatDriver) -> bool {
    let options = FileOptions::read_only().lock(LockMode::Off);
    let probed = FileStorage::open(path, &options).and_then(|file| registry().probe(&file));
    probed.is_ok_and(|probed| probed.driver.name() != driver.name())
}

/// QEMU's words for a file that has not the format that was named.
fn not_in(format: &str, path: &Path) -> String {
    match format {
        "qcow2" => "Image is not in qcow2 format".to_owned(),
        "vmdk" => "invalid VMDK image descriptor".to_owned(),
        "vdi" => "Image not in VDI format (bad signature 00000000)".to_owned(),
        "vpc" => "invalid VPC image".to_owned(),
        "luks" => "Volume is not in LUKS format".to_owned(),
        "qcow" => "Image not in qcow format".to_owned(),
        "qed" => "Image not in QED format".to_owned(),
        "parallels" => "Image not in Parallels format".to_owned(),
        _ => format!("Could not open '{}': Invalid argument", path.display()),
    }
}
