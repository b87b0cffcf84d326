//! From a name to an open image, with QEMU's defaults: formats are probed by content alone, a raw
//! image that was probed is written with a warning, and backing files are opened wherever they are.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use vdkit::Storage;
use vdkit::storage::{FileOptions, FileStorage, LockMode};
use vdkit::{
    BackingChoice, BackingImage, CacheMode, Disk, Error, ErrorKind, FORMATS, FormatDriver,
    OpenOptions, RefPolicy, Registry, Secret, describe_chain,
};

use crate::failure::{Failure, could_not_open, system_words, without_name, words};
use crate::getopt::Parsed;
use crate::names::{self, Image, Place};
use crate::nodes;
use crate::output::say;
use crate::secrets::Objects;
use crate::storages::{self, Places};

/// The formats, probed by content alone.
pub fn registry() -> Registry {
    Registry::new(FORMATS.iter().copied())
        .probing_content_only()
        .with_protocols([vdkit::nbd_client::NBD, &Places])
        .reading_reference_names(reference_name)
}

/// The image that a name with a protocol in an image's metadata means: a file, or nodes on one. With
/// a policy for such names, and of other protocols, it is none.
fn reference_name(name: &str) -> vdkit::Result<Option<BackingImage>> {
    if !matches!(references(), RefPolicy::Folders(_)) {
        return Ok(None);
    }
    let image = names::parse(name)
        .map_err(|why| Error::invalid(format!("Could not open backing file: {why}")))?;
    if !image.is_in_files() {
        return Ok(None);
    }
    let failed = |failure| Error::invalid(without_name(&image.typed, &failure));
    let objects = storages::objects();
    backing_image(&image, false, &objects).map(Some).map_err(failed)
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
/// `VDKIT_REFS=strict`, and with a value that [`check_references`] refuses.
pub fn references() -> RefPolicy {
    policy(std::env::var_os("VDKIT_REFS").as_deref()).unwrap_or_else(|why| {
        // Where no image was named before, such as by create.
        say(format_args!("{why}"));
        RefPolicy::OwnFolder
    })
}

/// Refuses an unknown value of `VDKIT_REFS`: whoever mistyped it wants a policy.
fn check_references() -> Result<(), Failure> {
    policy(std::env::var_os("VDKIT_REFS").as_deref()).map(drop).map_err(Failure::new)
}

/// The policy that a value of `VDKIT_REFS` asks for, or why it asks for none.
fn policy(value: Option<&OsStr>) -> Result<RefPolicy, String> {
    match value.map(OsStr::to_string_lossy).as_deref() {
        None | Some("") => Ok(RefPolicy::Folders(vec![PathBuf::from("/")])),
        Some("strict") => Ok(RefPolicy::OwnFolder),
        Some(other) => Err(format!(
            "VDKIT_REFS is '{other}', which is unknown: set it to 'strict', or leave it unset"
        )),
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
        check_references()?;
        let failed = |why| could_not_open(self.text, why);
        if let Some(format) = self.format {
            if driver(format).is_none() && !is_protocol(format) {
                return Err(failed(format!("Unknown driver '{format}'")));
            }
            if self.options {
                return Err(Failure::new("--image-opts and --format are mutually exclusive"));
            }
        }
        let parsed = match self.options {
            true => nodes::parse_options(self.text),
            false => names::parse_as(self.text, self.format),
        };
        parsed.map_err(failed)
    }
}

/// Whether a driver is one of QEMU's for plain bytes, so that its content is raw.
pub fn is_protocol(driver: &str) -> bool {
    matches!(
        driver,
        "file" | "host_device" | "null-co" | "null-aio" | "nbd" | "blkdebug" | "blkverify"
    )
}

/// The format of what a driver shows: of a protocol, plain bytes.
fn content_format(driver: &str) -> &str {
    if is_protocol(driver) { "raw" } else { driver }
}

/// The format of an image, and whether it was probed.
pub fn format_of(
    image: &Image,
    access: Access,
) -> Result<(&'static dyn FormatDriver, bool), Failure> {
    if let Some(name) = &image.format {
        let name = content_format(name);
        let found = driver(name)
            .ok_or_else(|| could_not_open(&image.typed, format!("Unknown driver '{name}'")))?;
        return Ok((found, false));
    }
    // A writer's lock is taken when the image is opened, which also reports a conflict.
    probe(image, !access.writable && image.locks(access.share))
}

/// The format that the content of an image tells; of a part of QEMU's names, before it is opened.
///
/// # Errors
/// QEMU's words after `Could not open 'NAME': `.
pub fn probed_format(image: &Image) -> Result<&'static str, String> {
    let found = probe(image, false).map_err(|failure| without_name(&image.typed, &failure))?;
    Ok(found.0.name())
}

/// The format of an image, and whether no magic number told it.
fn probe(image: &Image, lock: bool) -> Result<(&'static dyn FormatDriver, bool), Failure> {
    let options = FileOptions::read_only().lock(if lock { LockMode::Auto } else { LockMode::Off });
    if let Some(path) = image.path().filter(|path| path.is_dir()) {
        let why = format!("'file' driver requires '{}' to be a regular file", path.display());
        return Err(could_not_open(&image.typed, why));
    }
    let storage = registry()
        .open_storage(&image.opened(lock), &options)
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

/// Refuses a part of a file that reaches past the file's last sector. (Of other storages, opening
/// the part tells.)
fn check_window(image: &Image) -> Result<(), Failure> {
    let (Some((offset, size)), Place::File(path)) = (image.window, &image.place) else {
        return Ok(());
    };
    let options = FileOptions::read_only().lock(LockMode::Off);
    let file = FileStorage::open(path, &options)
        .and_then(|file| file.len())
        .map_err(|error| failed_open(image, None, &error))?;
    match storages::beyond(offset, size, file) {
        Some(why) => Err(could_not_open(&image.typed, why)),
        None => Ok(()),
    }
}

/// Refuses an image that the command would change, and that its name opens for reading only.
pub fn check_writable(image: &Image) -> Result<(), Failure> {
    match image.refuses_writing() {
        Some(why) => Err(could_not_open(&image.typed, why)),
        None => Ok(()),
    }
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
    if access.writable {
        check_writable(image)?;
    }
    check(image, objects)?;
    let mut options = OpenOptions::read_only().cache(access.cache);
    // An export is probed when it is opened: some servers end after their first connection.
    if image.format.is_some() || !matches!(image.place, Place::Nbd(_)) {
        let (driver, probed) = format_of(image, access)?;
        if access.writable && probed {
            warn_probed_raw(image);
        }
        options.format = Some(driver.name().to_owned());
    }
    options.writable = access.writable;
    options.lock = image.locks(access.share);
    let shares = image.unlocked || image.shares(access.share);
    // `locking=off` is of one file.
    options.backing_lock = (options.lock == shares).then_some(!shares);
    options.refs = references();
    options.data_file.clone_from(&image.data_file);
    options.keys = keys(image, objects)?;
    options.backing = match access.alone {
        true => BackingChoice::Ignore,
        false => backing(image, shares, objects)?,
    };
    Ok(options)
}

/// Refuses choices for a backing image that the command does not open.
pub fn check_alone(image: &Image) -> Result<(), Failure> {
    match &image.backing {
        Some(Some(_)) => {
            let format = image.format.as_deref().unwrap_or("qcow2");
            let why = format!("Block format '{format}' does not support the option 'backing'");
            Err(could_not_open(&image.typed, why))
        }
        _ => Ok(()),
    }
}

/// Refuses a wrong part of a file, and a throttle group that does not exist.
fn check(image: &Image, objects: &Objects) -> Result<(), Failure> {
    check_window(image)?;
    check_encryption(image)?;
    match image.throttle_groups.iter().find(|id| !objects.has_throttle_group(id)) {
        None => Ok(()),
        Some(group) => {
            let why = format!("Throttle group '{group}' does not exist");
            Err(could_not_open(&image.typed, why))
        }
    }
}

/// Refuses an image whose header names another encryption than `encrypt.format`, or none. Data would
/// be written as it is.
fn check_encryption(image: &Image) -> Result<(), Failure> {
    let Some(named) = image.encryption.as_deref().filter(|_| image.place != Place::Reference)
    else {
        return Ok(());
    };
    let options = OpenOptions::read_only().lock(false).backing(BackingChoice::Ignore);
    let format = image.format.as_deref().map(|name| content_format(name).to_owned());
    let options = options.maybe_format(format).refs(references());
    let described = describe_chain(&registry(), image.opened(false), &options)
        .map_err(|error| failed_open(image, None, &error))?;
    let found = described.links.first().and_then(|link| link.info.encryption.as_deref());
    let why = match found {
        Some(found) if found == named => return Ok(()),
        Some(found) => {
            format!("Header reported '{found}' encryption format but options specify '{named}'")
        }
        None => format!("No encryption in image header, but options specified format '{named}'"),
    };
    Err(could_not_open(&image.typed, why))
}

/// The secrets that an image names.
fn keys(image: &Image, objects: &Objects) -> Result<Vec<Secret>, Failure> {
    image.secrets.iter().map(|id| objects.secret(id)).collect()
}

/// The choice of an image's backing image, and of what is beneath that one. `shares`: the image is
/// opened without locks, which backing images follow.
fn backing(image: &Image, shares: bool, objects: &Objects) -> Result<BackingChoice, Failure> {
    let beneath = match &image.backing {
        None => return Ok(BackingChoice::Follow),
        Some(None) => return Ok(BackingChoice::Ignore),
        Some(Some(beneath)) => beneath,
    };
    Ok(BackingChoice::Image(Box::new(backing_image(beneath, shares, objects)?)))
}

/// A backing image as the engine opens it, with the choices for those beneath it.
fn backing_image(
    beneath: &Image,
    shares: bool,
    objects: &Objects,
) -> Result<BackingImage, Failure> {
    check(beneath, objects)?;
    let lock = beneath.locks(shares);
    let mut choice = BackingImage::new();
    choice.path = match beneath.place {
        Place::Reference => None,
        _ => Some(beneath.opened(lock)),
    };
    choice.format = beneath.format.as_deref().map(|name| content_format(name).to_owned());
    choice.data_file.clone_from(&beneath.data_file);
    choice.lock = (!lock).then_some(false);
    choice.keys = keys(beneath, objects)?;
    choice.backing = backing(beneath, beneath.shares(shares), objects)?;
    Ok(choice)
}

/// Opens an image with its backing chain.
pub fn open(image: &Image, access: Access, objects: &Objects) -> Result<Disk, Failure> {
    let options = open_options(image, access, objects)?;
    open_with(image, &options)
}

/// Opens an image with the engine's own options.
pub fn open_with(image: &Image, options: &OpenOptions) -> Result<Disk, Failure> {
    let opened = Disk::open(&registry(), image.opened(options.lock), options);
    let disk = opened.map_err(|error| failed_open(image, options.format.as_deref(), &error))?;
    if options.writable && options.format.is_none() && disk.top().name() == "raw" {
        warn_probed_raw(image);
    }
    Ok(disk)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_policy_for_references_is_an_error() {
        let anywhere = RefPolicy::Folders(vec![PathBuf::from("/")]);
        for unset in [None, Some(OsStr::new(""))] {
            assert_eq!(policy(unset), Ok(anywhere.clone()));
        }
        assert_eq!(policy(Some(OsStr::new("strict"))), Ok(RefPolicy::OwnFolder));
        for wrong in ["Strict", "strict ", "1", "off"] {
            let why = policy(Some(OsStr::new(wrong))).unwrap_err();
            assert!(why.contains(&format!("VDKIT_REFS is '{wrong}'")), "{why}");
        }
    }
}
