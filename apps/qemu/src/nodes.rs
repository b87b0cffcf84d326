//! Images whose names are properties: nodes of drivers, each on its children.
//!
//! | node | what is on it sees |
//! |---|---|
//! | of a protocol (`file`, `nbd`, `null-co`, `blkdebug`, …) | the bytes of its place |
//! | of a format (`qcow2`, `raw`, …) | the disk |
//! | of a filter (`throttle`, …) | what its child shows |
//!
//! A node of a format on another node of a format becomes an image in [`Place::Disk`]. A property
//! that cannot be carried is refused: an image is never opened in another way than the name says.

use vdkit::nbd_client::percent;

use crate::debug::{self, Debug};
use crate::names::{
    Flat, Image, NULL_BYTES, OTHER_PROTOCOLS, Place, TlsClient, bracketed, switch_of,
};
use crate::open::is_protocol;
use crate::sizes;

/// The sizes of disks are multiples of this.
const SECTOR_BYTES: u64 = 512;

/// Filters that change nothing of what is read or written, and their own properties.
const FILTERS: &[(&str, &[&str])] = &[
    ("copy-on-read", &[]),
    ("throttle", &[]),
    ("compress", &[]),
    ("preallocate", &["prealloc-align", "prealloc-size"]),
];

/// What the node above, or the command, takes a node for. It decides what a node without a driver is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// The image itself: its content tells its format.
    Image,
    /// The file beneath a format: plain bytes.
    File,
    /// A backing image: its overlay may record its format.
    Backing,
}

/// Reads the value of an image argument with `--image-opts`.
pub fn parse_options(text: &str) -> Result<Image, String> {
    from_properties(text, Flat::from_keys(text, Some("file"))?)
}

/// The image that these properties describe.
///
/// # Errors
/// QEMU's words after `Could not open 'NAME': `.
pub fn from_properties(typed: &str, flat: Flat) -> Result<Image, String> {
    node(typed, flat, Role::Image)
}

fn node(typed: &str, mut flat: Flat, role: Role) -> Result<Image, String> {
    let Some(driver) = flat.take("driver") else {
        return without_driver(typed, flat, role);
    };
    if let Some((_, own)) = FILTERS.iter().find(|(name, _)| *name == driver) {
        return filter(typed, &driver, own, flat);
    }
    match driver.as_str() {
        "file" | "host_device" | "host_cdrom" => {
            let name = flat
                .take("filename")
                .ok_or_else(|| format!("The '{driver}' block driver requires a file name"))?;
            let image = Image::at(typed, Place::File(name.into())).with_format("raw");
            finish(&driver, flat, image)
        }
        "null-co" | "null-aio" => {
            let bytes = flat.take("size").map_or(Ok(NULL_BYTES), |size| size_of("size", &size))?;
            let mut image = Image::at(typed, Place::Null(bytes)).with_format("raw");
            flat.take("latency-ns");
            image.reads_zeroes = flat.take("read-zeroes").is_some_and(|value| value == "on");
            finish(&driver, flat, image)
        }
        "nbd" => {
            let uri = nbd_uri(&mut flat)?;
            let mut image = Image::at(typed, Place::Nbd(uri)).with_format("raw");
            image.tls = tls_of(&mut flat);
            finish(&driver, flat, image)
        }
        "blkdebug" => {
            let image = stacked(needed_child(&mut flat, "image", typed, Role::File)?, typed, false);
            let debug = debug::faulty_properties(&mut flat, image)?;
            finish(&driver, flat, debugged(typed, &driver, debug))
        }
        "blkverify" => {
            let raw = needed_child(&mut flat, "raw", typed, Role::File)?;
            let raw = Box::new(stacked(raw, typed, false));
            let test = Box::new(needed_child(&mut flat, "test", typed, Role::Image)?);
            finish(&driver, flat, debugged(typed, &driver, Debug::Verify { raw, test }))
        }
        known if OTHER_PROTOCOLS.contains(&known) => {
            Err(format!("vdkit does not have the driver '{known}'"))
        }
        format if crate::open::driver(format).is_some() => {
            let file = match role {
                Role::Backing => file_of_backing(&mut flat, typed)?,
                _ => needed_child(&mut flat, "file", typed, Role::File)?,
            };
            of_format(typed, Some(format), file, flat)
        }
        unknown => Err(format!("Unknown driver '{unknown}'")),
    }
}

/// A node of a debugging driver. Alone it is a disk of plain bytes.
fn debugged(typed: &str, driver: &str, debug: Debug) -> Image {
    Image::at(typed, Place::Debug(Box::new(debug))).with_format(driver)
}

/// A filter is its child, with the filter's own properties.
fn filter(typed: &str, driver: &str, own: &[&str], mut flat: Flat) -> Result<Image, String> {
    let mut image = needed_child(&mut flat, "file", typed, Role::File)?;
    typed.clone_into(&mut image.typed);
    if driver == "throttle" {
        let group = flat.take("throttle-group");
        image.throttle_groups.push(group.ok_or("Please specify a throttle group")?);
    }
    for key in own {
        flat.take(key);
    }
    finish(driver, flat, image)
}

/// Properties without a driver. What the node is for decides its format.
fn without_driver(typed: &str, mut flat: Flat, role: Role) -> Result<Image, String> {
    if role == Role::File {
        // A file of that name, whatever the name looks like.
        let name = flat.take("filename").ok_or("Must specify either driver or file")?;
        let image = Image::at(typed, Place::File(name.into())).with_format("raw");
        return finish("file", flat, image);
    }
    let file = match role {
        Role::Backing => file_of_backing(&mut flat, typed)?,
        _ => child(&mut flat, "file", typed, Role::File)?
            .ok_or("Must specify either driver or file")?,
    };
    let mut own = flat.clone();
    COMMON.iter().chain(SHARING).for_each(|key| drop(own.take(key)));
    if own.is_empty() || role == Role::Backing {
        return of_format(typed, None, file, flat);
    }
    // Which properties there may be depends on the format.
    let stands = stacked(file.clone(), typed, false);
    let format = crate::open::probed_format(&stands)?;
    of_format(typed, Some(format), file, flat)
}

/// No node has a name here: images are opened by the command alone.
fn no_node(name: &str) -> String {
    format!("Cannot find device='{name}' nor node-name='{name}'")
}

/// The child of that name: an object of properties.
fn child(flat: &mut Flat, name: &str, typed: &str, role: Role) -> Result<Option<Image>, String> {
    if let Some(node) = flat.take(name) {
        return Err(no_node(&node));
    }
    let below = flat.take_below(name);
    if below.is_empty() {
        return Ok(None);
    }
    node(typed, below, role).map(Some)
}

fn needed_child(flat: &mut Flat, name: &str, typed: &str, role: Role) -> Result<Image, String> {
    child(flat, name, typed, role)?
        .ok_or_else(|| format!("A block device must be specified for \"{name}\""))
}

/// The file of a backing image; without a name the one that the overlay names.
fn file_of_backing(flat: &mut Flat, typed: &str) -> Result<Image, String> {
    let named = |key: &str| flat.get(&format!("file.{key}")).is_some();
    if named("filename") || flat.get("file").is_some() {
        return needed_child(flat, "file", typed, Role::File);
    }
    let mut below = flat.take_below("file");
    match below.get("driver") {
        None | Some("file") => {
            below.take("driver");
            finish("file", below, Image::at(typed, Place::Reference))
        }
        Some(_) => node(typed, below, Role::File),
    }
}

/// The place of an image that stands on `child`: the bytes of a protocol, or the disk of a format.
/// `windowed`: only a part of it will be used.
fn stacked(child: Image, typed: &str, windowed: bool) -> Image {
    // A raw disk is the bytes of its place, or a part of them.
    let raw = child.format.as_deref() == Some("raw");
    let same = !child.formatted || raw && !(windowed && child.window.is_some());
    let mut image = match same {
        true => Image { format: None, formatted: false, ..child },
        false => Image::at(typed, Place::Disk(Box::new(child))),
    };
    typed.clone_into(&mut image.typed);
    image
}

/// A node of a format; `None` is a format that the content, or an overlay, tells.
fn of_format(
    typed: &str,
    format: Option<&str>,
    file: Image,
    mut flat: Flat,
) -> Result<Image, String> {
    let window = if format == Some("raw") { window(&mut flat)? } else { None };
    let mut image = stacked(file, typed, window.is_some());
    image.formatted = true;
    image.format = format.map(str::to_owned);
    image.window = window.or(image.window);
    if format != Some("raw") {
        image.backing = match flat.take("backing") {
            Some(name) if name.is_empty() => Some(None),
            Some(node) => return Err(no_node(&node)),
            None => {
                let backing = child(&mut flat, "backing", typed, Role::Backing)?;
                backing.map(|backing| Some(Box::new(backing)))
            }
        };
        if let Some(data) = child(&mut flat, "data-file", typed, Role::File)? {
            image.read_only |= data.read_only;
            image.data_file = Some(plain_file(data)?);
        }
        if matches!(format, None | Some("luks")) {
            image.secrets.extend(flat.take("key-secret"));
        }
        if matches!(format, None | Some("qcow2" | "qcow")) {
            image.secrets.extend(flat.take("encrypt.key-secret"));
            image.encryption = flat.take("encrypt.format");
        }
    }
    finish(format.unwrap_or("qcow2"), flat, image)
}

/// `offset` and `size` of a raw node.
fn window(flat: &mut Flat) -> Result<Option<(u64, Option<u64>)>, String> {
    let offset = flat.take("offset").map(|text| size_of("offset", &text)).transpose()?;
    let size = flat.take("size").map(|text| size_of("size", &text)).transpose()?;
    if size.is_some_and(|bytes| !bytes.is_multiple_of(SECTOR_BYTES)) {
        return Err("Specified size is not multiple of 512".to_owned());
    }
    Ok((offset.is_some() || size.is_some()).then(|| (offset.unwrap_or(0), size)))
}

/// The path of a data file, which the engine opens as it opens the image.
fn plain_file(data: Image) -> Result<std::path::PathBuf, String> {
    let raw = !data.formatted || data.format.as_deref() == Some("raw");
    match data.path() {
        Some(path) if raw && !data.locking_off && data.force_share.is_none() => Ok(path.to_owned()),
        _ => Err("vdkit takes a data-file that is a whole file, locked as its image".to_owned()),
    }
}

/// Properties that every node takes, and that change nothing of what a command of ours does.
const COMMON: &[&str] =
    &["auto-read-only", "discard", "detect-zeroes", "cache.direct", "cache.no-flush", "node-name"];
/// Properties of every node that say how it is opened.
const SHARING: &[&str] = &["read-only", "force-share"];
const OF_FILES: &[&str] =
    &["aio", "aio-max-batch", "pr-manager", "drop-cache", "x-check-cache-dropped"];
const OF_NBD: &[&str] = &["reconnect-delay", "open-timeout"];
const OF_QCOW2: &[&str] = &[
    "lazy-refcounts",
    "pass-discard-request",
    "pass-discard-snapshot",
    "pass-discard-other",
    "discard-no-unref",
    "overlap-check",
    "cache-size",
    "l2-cache-size",
    "l2-cache-entry-size",
    "refcount-cache-size",
    "cache-clean-interval",
];

/// Takes the properties that any node of this driver has, and refuses those that nothing takes.
fn finish(driver: &str, mut flat: Flat, mut image: Image) -> Result<Image, String> {
    let files = matches!(driver, "file" | "host_device" | "host_cdrom");
    let switch =
        |flat: &mut Flat, key: &str| flat.take(key).map(|value| switch_of(key, &value)).transpose();
    image.read_only |= switch(&mut flat, "read-only")?.unwrap_or(false);
    // What a file shares, the format on it shares.
    let shares = (switch(&mut flat, "force-share")?, image.force_share);
    image.force_share = match shares {
        (Some(true), _) | (_, Some(true)) => Some(true),
        (own, beneath) => own.or(beneath),
    };
    if files && let Some(locking) = flat.take("locking") {
        image.locking_off |= match locking.as_str() {
            "off" => true,
            "on" | "auto" => false,
            other => return Err(format!("invalid parameter value: {other}")),
        };
    }
    let known = COMMON.iter().chain(match driver {
        _ if files => OF_FILES,
        "nbd" => OF_NBD,
        "qcow2" => OF_QCOW2,
        _ => &[],
    });
    for key in known {
        flat.take(key);
    }
    if driver == "qcow2" {
        flat.take_below("overlap-check");
    }
    match flat.first_key() {
        None => Ok(image),
        Some(key) if driver == "host_cdrom" || is_protocol(driver) => {
            Err(format!("Block protocol '{driver}' doesn't support the option '{key}'"))
        }
        Some(key) => Err(format!("Block format '{driver}' does not support the option '{key}'")),
    }
}

fn size_of(name: &str, text: &str) -> Result<u64, String> {
    sizes::parse(text)
        .map_err(|_| format!("Parameter '{name}' expects a non-negative number below 2^64"))
}

/// The URI of an NBD export from its properties.
fn nbd_uri(flat: &mut Flat) -> Result<String, String> {
    let export = percent(flat.take("export").unwrap_or_default());
    let mut take = |key: &str| flat.take(&format!("server.{key}")).or_else(|| flat.take(key));
    let (host, path) = (take("host"), take("path"));
    let (port, _kind) = (take("port"), take("type"));
    match (host, path) {
        (None, Some(path)) => Ok(format!("nbd+unix:///{export}?socket={}", percent(path))),
        (Some(host), None) => {
            let port = port.unwrap_or_else(|| "10809".to_owned());
            Ok(format!("nbd://{}:{port}/{export}", bracketed(&host)))
        }
        (Some(_), Some(_)) => Err("path and host may not be used at the same time".to_owned()),
        (None, None) => Err("NBD server address missing".to_owned()),
    }
}

/// `tls-creds` and `tls-hostname` of an NBD node.
fn tls_of(flat: &mut Flat) -> Option<TlsClient> {
    let id = flat.take("tls-creds")?;
    Some(TlsClient { id, hostname: flat.take("tls-hostname") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_format_on_a_format_is_a_disk_on_a_disk() {
        let place = |text: &str| parse_options(text).unwrap().place;
        let file = Place::File("x".into());
        for text in [
            "driver=raw,file.filename=x",
            "driver=qcow2,file.driver=file,file.filename=x",
            "driver=qcow2,file.driver=raw,file.file.filename=x",
            "driver=raw,offset=1k,file.driver=raw,file.file.filename=x",
        ] {
            assert_eq!(place(text), file, "{text}");
        }
        for text in [
            "driver=raw,file.driver=qcow2,file.file.filename=x",
            "driver=luks,file.driver=qcow2,file.file.filename=x",
            "file.driver=qcow2,file.file.filename=x",
            "driver=raw,offset=1k,file.driver=raw,file.offset=1k,file.file.filename=x",
        ] {
            let Place::Disk(below) = place(text) else { panic!("{text}: {:?}", place(text)) };
            assert_eq!(below.place, file, "{text}");
        }
        assert!(parse_options("file.driver=qcow2,file.file.filename=x").unwrap().format.is_none());
    }

    #[test]
    fn a_file_without_a_driver_is_a_file_whatever_its_name_looks_like() {
        for name in ["file:x", "nbd:x", "null-co:x", "a:b"] {
            let image = parse_options(&format!("driver=raw,file.filename={name}")).unwrap();
            assert_eq!(image.place, Place::File(name.into()));
        }
        let image = parse_options("driver=throttle,throttle-group=g,file.filename=x").unwrap();
        assert_eq!((image.format.as_deref(), image.formatted), (Some("raw"), false));
    }

    #[test]
    fn a_node_is_opened_as_its_properties_say() {
        for (text, locks, refused) in [
            ("driver=qcow2,file.filename=x", true, None),
            ("driver=qcow2,file.locking=off,file.filename=x", false, None),
            ("driver=qcow2,file.locking=auto,file.filename=x", true, None),
            ("driver=qcow2,force-share=on,file.filename=x", false, Some("force-share")),
            ("driver=qcow2,file.force-share=on,file.filename=x", false, Some("force-share")),
            ("driver=qcow2,read-only=on,file.filename=x", true, Some("read-only")),
            ("driver=qcow2,file.read-only=on,file.filename=x", true, Some("read-only")),
            (
                "driver=raw,file.driver=qcow2,file.read-only=on,file.file.filename=x",
                true,
                Some("read"),
            ),
        ] {
            let image = parse_options(text).unwrap();
            assert_eq!(image.locks(false), locks, "{text}");
            let found = image.refuses_writing();
            let said = |words: &str| found.is_some_and(|found| found.contains(words));
            assert!(refused.map_or(found.is_none(), said), "{text}: {found:?}");
            assert!(!image.locks(true), "{text}");
        }
    }

    #[test]
    fn what_is_beneath_keeps_its_own_properties() {
        let text = "driver=qcow2,file.filename=x,backing.file.filename=y,backing.encrypt.key-secret=s,\
                    backing.backing=";
        let image = parse_options(text).unwrap();
        let beneath = image.backing.flatten().unwrap();
        assert_eq!((beneath.place, beneath.format), (Place::File("y".into()), None));
        assert_eq!((beneath.secrets, beneath.backing), (vec!["s".to_owned()], Some(None)));
        let image = parse_options("driver=qcow2,file.filename=x,backing.l2-cache-size=1M").unwrap();
        assert_eq!(image.backing.flatten().unwrap().place, Place::Reference);
        for (text, format, locks) in [
            ("backing.driver=raw", Some("raw"), true),
            ("backing.file.driver=file", None, true),
            ("backing.file.locking=off", None, false),
            ("backing.driver=qcow2,backing.file.force-share=on", Some("qcow2"), false),
        ] {
            let image = parse_options(&format!("driver=qcow2,file.filename=x,{text}")).unwrap();
            let beneath = image.backing.flatten().unwrap();
            assert_eq!(beneath.place, Place::Reference, "{text}");
            assert_eq!(
                (beneath.format.as_deref(), beneath.locks(false)),
                (format, locks),
                "{text}"
            );
        }
        for wrong in [
            "driver=qcow2,file.filename=x,backing.bad=1",
            "driver=qcow2,file.filename=x,key-secret=s",
            "driver=vmdk,file.filename=x,encrypt.format=luks",
            "driver=throttle,throttle-group=g,file.file.filename=x",
            "driver=qcow2,file.filename=x,data-file.driver=raw,data-file.offset=1k,data-file.file.filename=y",
            "driver=qcow2,file.filename=x,data-file.driver=qcow2,data-file.file.filename=y",
            "driver=compress,bad=1,file.driver=qcow2,file.file.filename=x",
        ] {
            assert!(parse_options(wrong).is_err(), "{wrong}");
        }
    }
}
