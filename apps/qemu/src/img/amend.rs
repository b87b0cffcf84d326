//! `qemu-img amend`: changes options of an image, and the keys of an encrypted one.

use std::path::PathBuf;

use vdkit::jobs::{self, ResizeOptions};
use vdkit::{Error, ImageInfo, Monitor, OpenOptions, Progress as Sink};

use super::{CACHE, Command, FORMAT, IMAGE_OPTS, OBJECT, Output, PROGRESS, QUIET, opening};
use crate::creation::{self, Asked, Key, asked, meant, number, size, switch, text};
use crate::failure::{Failure, could_not_open, words};
use crate::getopt::{Parsed, long, valued};
use crate::names::{Image, Place};
use crate::open::{Access, open, open_options, registry};
use crate::output::{Progress, cancel_on_signal};
use crate::secrets::Objects;

pub const COMMAND: Command = Command {
    name: "amend",
    about: "Change options of an image",
    operands: "FILE",
    options: &[
        QUIET,
        PROGRESS,
        FORMAT,
        IMAGE_OPTS,
        CACHE,
        OBJECT,
        long("force", None, "also changes that may make all data unreadable"),
        valued('o', "options", "OPTIONS", "the options with their new values"),
    ],
    run,
};

const LUKS: &[Key] = &[
    number("iter-time", None, "milliseconds of the key derivation"),
    number("keyslot", None, "the one key slot that is changed"),
    text("new-secret", None, "id of the secret that a key slot gets"),
    text("old-secret", None, "id of the secret whose key slots are changed"),
    text("state", None, "new state of the key slots: active or inactive"),
];

const QCOW2: &[Key] = &[
    text("backing_file", None, "name of the backing image"),
    text("backing_fmt", None, "format of the backing image"),
    text("compat", None, "version of the format: v2 (0.10) or v3 (1.1)"),
    text("data_file", None, "name of the file for guest data"),
    switch("data_file_raw", None, "the data file stays readable as a raw image"),
    number("encrypt.iter-time", None, "milliseconds of the key derivation"),
    number("encrypt.keyslot", None, "the one key slot that is changed"),
    text("encrypt.new-secret", None, "id of the secret that a key slot gets"),
    text("encrypt.old-secret", None, "id of the secret whose key slots are changed"),
    text("encrypt.state", None, "new state of the key slots: active or inactive"),
    switch("lazy_refcounts", None, "refcounts are updated late"),
    number("refcount_bits", None, "bits of a refcount"),
    size("size", None, "size of the guest disk"),
];

/// The options of a format that can be changed.
fn keys(format: &str) -> Result<&'static [Key], Failure> {
    match format {
        "qcow2" => Ok(QCOW2),
        "luks" => Ok(LUKS),
        _ => {
            Err(Failure::new(format!("Format driver '{format}' does not support option amendment")))
        }
    }
}

fn help(format: &str) -> Result<String, Failure> {
    let mut text = format!("Amend options for '{format}':\n");
    text.extend(keys(format)?.iter().map(Key::help_line));
    Ok(text)
}

fn run(parsed: &Parsed, out: &mut Output) -> Result<u8, Failure> {
    if !parsed.has("options") {
        return Err(Failure::usage("Must specify options (-o)"));
    }
    let asked = asked(parsed.all("options"))?;
    if let (Asked::Help, Some(format)) = (&asked, parsed.last("format")) {
        if crate::open::driver(format).is_none() {
            return Err(Failure::new(format!("Unknown file format '{format}'")));
        }
        out.text(help(format)?);
        return Ok(0);
    }
    let [file] = &parsed.operands[..] else {
        return Err(Failure::new("Expecting one image file name"));
    };
    let cache = opening::cache(parsed, "cache", "cache")?.unwrap_or_default();
    let (objects, image) = opening::image(parsed, file)?;
    let access = Access { cache, ..Access::write() };
    let options = open_options(&image, access, &objects)?;
    // Closed again before the image is changed.
    let info = {
        let disk = open(&image, Access { writable: false, share: true, ..access }, &objects)?;
        disk.layers()[0].info().clone()
    };
    let format = info.format;
    let known = keys(format)?;
    let values = match asked {
        Asked::Values(values) => values,
        Asked::Help => {
            out.text(help(format)?);
            return Ok(0);
        }
    };
    let values = checked(format, known, values)?;
    let amending =
        Amending { objects: &objects, image: &image, options: &options, info: &info, values };
    let progress = Progress::of(parsed)?;
    let monitor = Monitor::new(&progress).cancelled_by(cancel_on_signal()?);
    let amended = amending.amend(&monitor, parsed.has("force"));
    if amended.is_ok() {
        progress.update(1, 1);
    }
    progress.finish(false);
    amended.map(|()| 0)
}

/// Values by the names of their options, in order.
type Values = Vec<(&'static str, String)>;

/// Checks names and types.
fn checked(
    format: &str,
    known: &'static [Key],
    values: Vec<(String, String)>,
) -> Result<Values, Failure> {
    let find = |name: &str| known.iter().find(|key| key.name == name);
    let mut out: Values = Vec::new();
    for (name, value) in &values {
        let (name, value) = meant(name, value, |name| find(name).is_some());
        let Some(key) = find(name) else {
            let creates = creation::table(format)
                .is_ok_and(|table| table.all(false).any(|key| key.name == name));
            let hint =
                if creates { "\nThis option is only supported for image creation" } else { "" };
            return Err(Failure::new(format!("Invalid parameter '{name}'{hint}")));
        };
        let value = key.checked(value)?;
        out.retain(|(other, _)| *other != key.name);
        out.push((key.name, value));
    }
    Ok(out)
}

/// The image, and what is asked of it.
struct Amending<'a> {
    objects: &'a Objects,
    image: &'a Image,
    options: &'a OpenOptions,
    info: &'a ImageInfo,
    values: Values,
}

impl Amending<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.values.iter().find(|(name, _)| *name == key).map(|(_, value)| value.as_str())
    }

    fn amend(&self, monitor: &Monitor<'_>, force: bool) -> Result<(), Failure> {
        if self.info.format == "luks" {
            return self.change_keys("", force);
        }
        let texts = self.texts()?;
        if self.values.iter().any(|(key, _)| key.starts_with("encrypt.")) {
            if self.info.encryption.as_deref() != Some("luks") {
                return Err(Failure::new(
                    "Can't amend encryption options - encryption not present",
                ));
            }
            self.change_keys("encrypt.", force)?;
        }
        let path = self.path()?;
        if !texts.is_empty() {
            let texts = texts.iter().map(String::as_str);
            jobs::amend(&registry(), &path, self.options, texts, monitor)
                .map_err(|error| failed(self.image, error))?;
        }
        let Some(bytes) = self.get("size").and_then(|size| size.parse::<u64>().ok()) else {
            return Ok(());
        };
        if bytes == self.info.virtual_size {
            return Ok(());
        }
        let disk = crate::open::open_with(self.image, self.options)?;
        let mut how = ResizeOptions::default();
        how.shrink = true;
        let resized = jobs::resize(&disk, bytes, &how, monitor);
        opening::close(&disk, resized.map_err(|error| failed(self.image, error)))
    }

    /// The options of the format for the engine, without the size.
    fn texts(&self) -> Result<Vec<String>, Failure> {
        let info = self.info;
        let mut texts = Vec::new();
        for (key, value) in &self.values {
            match *key {
                "backing_file"
                    if info.backing_file.as_ref() != Some(value)
                        || self.get("backing_fmt") != info.backing_format.as_deref() =>
                {
                    return Err(Failure::new(
                        "Cannot amend the backing file\nYou can use 'qemu-img rebase' instead.",
                    ));
                }
                "backing_fmt" if info.backing_format.as_ref() != Some(value) => {
                    return Err(Failure::new(
                        "Cannot amend the backing format\nYou can use 'qemu-img rebase' instead.",
                    ));
                }
                "data_file" if info.files.is_empty() => {
                    return Err(Failure::new(
                        "data-file can only be set for images that use an external data file",
                    ));
                }
                "data_file_raw" if value == "on" && !info.data_file_raw => {
                    return Err(Failure::new("data-file-raw cannot be set on existing images"));
                }
                "backing_file" | "backing_fmt" | "size" => {}
                "data_file_raw" if value == "on" => {}
                "refcount_bits"
                    if !matches!(value.as_str(), "1" | "2" | "4" | "8" | "16" | "32" | "64") =>
                {
                    return Err(Failure::new(
                        "Refcount width must be a power of two and may not exceed 64 bits",
                    ));
                }
                "compat" => texts.push(format!("compat={}", compat(value)?)),
                key if key.starts_with("encrypt.") => {}
                key => texts.push(format!("{key}={}", value.replace(',', ",,"))),
            }
        }
        self.check_version(&texts)?;
        Ok(texts)
    }

    /// What version 2 of the format cannot have.
    fn check_version(&self, texts: &[String]) -> Result<(), Failure> {
        let now = |key: &str| self.info.property(key);
        let then = texts.iter().find_map(|text| text.strip_prefix("compat="));
        if then.or_else(|| now("compat")) != Some("0.10") {
            return Ok(());
        }
        let bits = self.get("refcount_bits").or_else(|| now("refcount-bits"));
        if bits.is_some_and(|bits| bits != "16") {
            return Err(Failure::new("compat=0.10 requires refcount_bits=16"));
        }
        if self.get("lazy_refcounts") == Some("on") {
            return Err(Failure::new(
                "Lazy refcounts only supported with compatibility level 1.1 and above (use compat=1.1 or \
                 greater)",
            ));
        }
        Ok(())
    }

    /// The name under which the engine opens the image.
    fn path(&self) -> Result<PathBuf, Failure> {
        match (&self.image.place, self.image.path()) {
            (Place::Nbd(_), _) => Ok(self.image.opened(true)),
            (_, Some(path)) => Ok(path.to_owned()),
            (_, None) => Err(Failure::new("only files and NBD exports can be amended")),
        }
    }

    /// Fills or wipes key slots. The options' names begin with `prefix`.
    fn change_keys(&self, prefix: &str, force: bool) -> Result<(), Failure> {
        let get = |key: &str| self.get(&format!("{prefix}{key}"));
        let path = &self.path()?;
        let slot = get("keyslot").map(|slot| slot.parse::<u32>().unwrap_or(u32::MAX));
        let listed = jobs::list_keys(&registry(), path, &self.reading(), &Monitor::default())?;
        let is_active =
            |number: u32| listed.slots.iter().any(|slot| slot.number == number && slot.active);
        let Some(state) = get("state") else {
            return Err(Failure::new(format!("Parameter '{prefix}state' is missing")));
        };
        if let Some(number) = slot.filter(|number| *number as usize >= listed.slots.len()) {
            return Err(Failure::new(format!(
                "Invalid keyslot {number} specified, must be between 0 and {}",
                listed.slots.len() - 1
            )));
        }
        match state {
            "active" => {
                let Some(new) = get("new-secret") else {
                    return Err(Failure::new("'new-secret' is required to activate a keyslot"));
                };
                if get("old-secret").is_some() {
                    return Err(Failure::new(
                        "'old-secret' must not be given when activating keyslots",
                    ));
                }
                if let Some(number) = slot.filter(|number| is_active(*number) && !force) {
                    return Err(Failure::new(format!(
                        "Refusing to overwrite active keyslot {number} - please erase it first"
                    )));
                }
                let new = self.objects.secret(new)?;
                let free = listed.slots.iter().find(|slot| !slot.active).map(|slot| slot.number);
                if free.is_none() && slot.is_none() {
                    return Err(Failure::new("Can't add a keyslot - all keyslots are in use"));
                }
                let time = get("iter-time").and_then(|time| time.parse().ok()).unwrap_or(2000);
                let monitor = Monitor::default();
                if let Some(number) = slot.filter(|number| is_active(*number)) {
                    // Another slot must open the image, or a crash would leave none that does.
                    jobs::remove_key(&registry(), path, self.options, number, false, &monitor)?;
                }
                jobs::add_key(&registry(), path, self.options, &new, slot, time, &monitor)?;
                Ok(())
            }
            "inactive" => self.wipe_keys(path, &listed, slot, get("old-secret"), force),
            other => Err(Failure::new(format!(
                "Parameter '{prefix}state' does not accept value '{other}'"
            ))),
        }
    }

    fn reading(&self) -> OpenOptions {
        self.options.clone().writable(false).lock(false)
    }

    fn wipe_keys(
        &self,
        path: &std::path::Path,
        listed: &jobs::ListedKeys,
        slot: Option<u32>,
        old: Option<&str>,
        force: bool,
    ) -> Result<(), Failure> {
        let active: Vec<u32> =
            listed.slots.iter().filter(|slot| slot.active).map(|slot| slot.number).collect();
        let wiped = match (slot, old) {
            (None, None) => {
                return Err(Failure::new(
                    "To erase keyslot(s), either explicit keyslot index or the password currently \
                     contained in them must be given",
                ));
            }
            (Some(number), None) if !active.contains(&number) => {
                if force {
                    return Ok(());
                }
                return Err(Failure::new(format!(
                    "Given keyslot {number} is already erased (inactive) "
                )));
            }
            (Some(number), None) => vec![number],
            (slot, Some(old)) => {
                let options = self.reading().keys(vec![self.objects.secret(old)?]);
                let opened =
                    jobs::list_keys(&registry(), path, &options, &Monitor::default())?.opened;
                match slot {
                    Some(number) if !opened.contains(&number) => {
                        return Err(Failure::new(format!(
                            "Given keyslot {number} doesn't contain the given old password / all keyslots \
                             are already erased"
                        )));
                    }
                    Some(number) => vec![number],
                    None if opened.is_empty() => {
                        return Err(Failure::new(
                            "No keyslots match given (old) password for erase operation",
                        ));
                    }
                    None => opened,
                }
            }
        };
        if !force && active.iter().all(|number| wiped.contains(number)) {
            return Err(Failure::new(match wiped[..] {
                [number] if old.is_none() => format!(
                    "Attempt to erase the only active keyslot {number} which will erase all the data in \
                     the image irreversibly - refusing operation"
                ),
                _ => "All the active keyslots match the (old) password that was given and erasing them \
                      will erase all the data in the image irreversibly - refusing operation"
                    .to_owned(),
            }));
        }
        for number in wiped {
            let monitor = Monitor::default();
            jobs::remove_key(&registry(), path, self.options, number, true, &monitor)?;
        }
        Ok(())
    }
}

/// A version of the format in the engine's notation.
fn compat(value: &str) -> Result<&'static str, Failure> {
    match value {
        "0.10" | "v2" => Ok("0.10"),
        "1.1" | "v3" => Ok("1.1"),
        other => Err(Failure::new(format!("Unknown compatibility level {other}"))),
    }
}

fn failed(image: &Image, error: Error) -> Failure {
    match error {
        Error::Locked { .. } | Error::File { .. } => could_not_open(&image.typed, words(&error)),
        other => Failure::new(words(&other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_checked_in_qemus_words() {
        let check = |key: &str, value: &str| {
            checked("qcow2", QCOW2, vec![(key.to_owned(), value.to_owned())])
                .map_err(|failure| failure.text)
        };
        assert_eq!(check("size", "1k"), Ok(vec![("size", "1024".to_owned())]));
        assert_eq!(check("data_file", "\0"), Ok(vec![("data_file", "on".to_owned())]));
        assert_eq!(check("foo", "1"), Err("Invalid parameter 'foo'".to_owned()));
        assert_eq!(
            check("cluster_size", "4k"),
            Err("Invalid parameter 'cluster_size'\nThis option is only supported for image creation"
                .to_owned())
        );
        assert_eq!(compat("3").unwrap_err().text, "Unknown compatibility level 3");
    }
}
