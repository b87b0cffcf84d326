//! Writes the commands and libvirt's element that set up the advised way.

use std::path::{Path, PathBuf};

use serde::Serialize;
use vdkit_libvirt::{CachePlace, DiskSource, LibvirtDisk, cache_for};

use crate::front::Cache;
use crate::layout::{self, More};
use crate::lists::{distinct, grouped};
use crate::model::{Axes, Cell, PlaceInfo, PlaceKind, Run, value_of};
use crate::words::{listed, quoted};

/// The cache mode if a run does not name one: QEMU's default.
const CACHE: &str = "writeback";

/// Commands to type, and the disk's element in a guest's definition.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Setup {
    /// Commands in order. The user replaces the words in capitals.
    pub commands: Vec<String>,
    /// libvirt's `<disk>` element.
    #[serde(rename = "libvirt-xml", skip_serializing_if = "String::is_empty")]
    pub xml: String,
    /// Why this cache mode was chosen, if the run did not compare cache modes.
    #[serde(rename = "cache-mode", skip_serializing_if = "Option::is_none")]
    pub cache: Option<String>,
}

/// The format and options of a new image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Image {
    format: String,
    options: Vec<String>,
    /// Whether the image is an overlay. The user supplies the backing image's name.
    overlay: bool,
}

/// Options of `create` and `convert` whose value is a format or a list of options.
const FORMAT_WORDS: [&str; 4] = ["-f", "-O", "--format", "--target-format"];

impl Image {
    /// Derives the image from the run's commands: the last command that creates an image.
    fn made_by(commands: &[String]) -> Option<Self> {
        commands.iter().rev().find_map(|line| Self::of_command(line))
    }

    fn of_command(line: &str) -> Option<Self> {
        let words = split(line);
        let program = Path::new(words.first()?).file_name()?.to_str()?;
        if !["vdkit", "qemu-img"].contains(&program)
            || !["create", "convert"].contains(&words.get(1)?.as_str())
        {
            return None;
        }
        let mut image = Self::default();
        let after = |i: usize| words.get(i + 1).cloned();
        for (i, word) in words.iter().enumerate() {
            // In `convert`, -f is the source's format and comes first; -O is the target's.
            if FORMAT_WORDS.contains(&word.as_str()) {
                image.format = after(i)?;
            } else if word == "-o" {
                image.options.push(after(i)?);
            } else if ["-b", "--backing"].contains(&word.as_str()) {
                image.overlay = true;
            }
        }
        (!image.format.is_empty()).then_some(image)
    }

    /// The command that creates such an image at `name`, which is already quoted.
    fn create_command(&self, name: &str) -> String {
        let options: String =
            self.options.iter().map(|option| format!(" -o {}", quoted(option))).collect();
        let (base, size) = if self.overlay { (" -b BASE -F qcow2", "") } else { ("", " SIZE") };
        format!("vdkit create -f {}{options}{base} {name}{size}", quoted(&self.format))
    }

    /// The image of a layout, for a run without a command that creates it. A layout of a later
    /// version is taken for raw.
    fn of_layout(name: &str) -> Self {
        let Some(layout) = layout::find(name) else {
            return Self { format: "raw".to_owned(), ..Self::default() };
        };
        let options = (!layout.options.is_empty()).then(|| layout.options.to_owned());
        Self {
            format: layout.format.to_owned(),
            options: options.into_iter().collect(),
            overlay: layout.more == More::Backing,
        }
    }

    fn allocated(&self) -> bool {
        let ready = ["preallocation=falloc", "preallocation=full"];
        self.options.iter().any(|option| ready.iter().any(|ready| option.contains(ready)))
    }
}

/// Splits a command line into words like a shell. Blanks separate words; quotation marks and
/// backslashes keep them together.
fn split(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let (mut word, mut open, mut quote) = (String::new(), false, None);
    let mut letters = line.chars();
    while let Some(c) = letters.next() {
        match (c, quote) {
            ('\'' | '"', None) => (quote, open) = (Some(c), true),
            (c, Some(mark)) if c == mark => quote = None,
            ('\\', None) => word.extend(letters.next()),
            (c, None) if c.is_whitespace() => {
                if open || !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                open = false;
            }
            (c, _) => word.push(c),
        }
    }
    if open || !word.is_empty() {
        words.push(word);
    }
    words
}

/// The command that creates a ZFS volume, or a data set with a chosen record size, mounted at `at`.
fn zfs_command(volume: bool, record: Option<&str>, at: &Path) -> Option<String> {
    match (volume, record) {
        (true, None) => Some("zfs create -V SIZE POOL/DISK".to_owned()),
        (true, Some(record)) => Some(format!("zfs create -V SIZE -b {record} POOL/DISK")),
        (false, Some(record)) => {
            let at = quoted(&format!("mountpoint={}", at.display()));
            Some(format!("zfs create -o recordsize={record} -o {at} POOL/DATASET"))
        }
        (false, None) => None,
    }
}

/// The folder of the disk, or its device. A record size needs a data set of its own, as in the run:
/// it does not apply to the files that a data set has already.
fn folder_of(place: Option<&PlaceInfo>, record: Option<&str>) -> PathBuf {
    let own = Path::new(place.map_or("DIR", |place| place.path.as_str()));
    if record.is_some() { own.join("DATASET") } else { own.to_owned() }
}

/// The setup for these choices; `cells` are the cells that measured them.
pub(super) fn setup(run: &Run, axes: &Axes, cells: &[usize]) -> Setup {
    let value = |name: &str| value_of(axes, name);
    let layout = value("layout").unwrap_or("qcow2");
    let commands = cells.first().map_or(&[][..], |cell| &run.cells[*cell].commands);
    let image = Image::made_by(commands).unwrap_or_else(|| Image::of_layout(layout));
    let place = value("backend")
        .and_then(|name| run.environment.places.iter().find(|place| place.name == name));
    let volume = layout == "zvol";
    let device = volume || place.is_some_and(|place| place.kind == PlaceKind::Device);
    let record = value("record").filter(|record| *record != "inherited");
    let folder = folder_of(place, record);
    let ending = if image.format == "raw" { "raw" } else { image.format.as_str() };
    let disk: PathBuf = match (volume, device) {
        (true, _) => "/dev/zvol/POOL/DISK".into(),
        (false, true) => folder.clone(),
        (false, false) => folder.join(format!("disk.{ending}")),
    };
    // The cache mode of a vdkit server: the one that was compared, or else the one that was used.
    let served = cells.iter().find_map(|cell| mode_of(&run.cells[*cell])).unwrap_or(CACHE);
    let cache = value("cache").unwrap_or(served);
    let front = value("front").unwrap_or("");
    let bus = ["ide", "scsi"].into_iter().find(|bus| front.contains(bus));

    let mut typed: Vec<String> = zfs_command(volume, record, &folder).into_iter().collect();
    let name = quoted(&disk.to_string_lossy());
    // A raw disk on a device is the device.
    if !(device && image.format == "raw") {
        typed.push(image.create_command(&name));
    }
    let socket = PathBuf::from("/run/vdkit-disk.sock");
    let (source, format) = if front.contains("vhost") {
        typed.push(format!("vdkit serve {name} --vhost-user {} --cache {cache}", socket.display()));
        (DiskSource::VhostUser(socket), "raw")
    } else if front.contains("nbd") {
        typed.push(format!("vdkit serve {name} --nbd unix:{} --cache {cache}", socket.display()));
        (DiskSource::Nbd(socket, String::new()), "raw")
    } else if front.contains("fuse") {
        // libvirt only accepts absolute paths.
        let file = PathBuf::from("/run/vdkit-disk.raw");
        typed.push(format!("vdkit mount {name} {} --cache {cache}", file.display()));
        (DiskSource::File(file), "raw")
    } else if device {
        (DiskSource::Device(disk.clone()), image.format.as_str())
    } else {
        (DiskSource::File(disk.clone()), image.format.as_str())
    };
    // If the run did not compare cache modes, an image that QEMU opens itself gets the mode that
    // `doctor` advises.
    let opened =
        matches!(&source, DiskSource::File(path) | DiskSource::Device(path) if *path == disk);
    let (suited, because) = cache_for(cache_place(place));
    let compared = value("cache").is_some();
    let mode = if compared || !opened { cache } else { suited };
    let mut element = LibvirtDisk::new(source, format);
    element.cache = mode.to_owned();
    element.allocated = image.allocated();
    if let Some(bus) = bus {
        element.bus = bus.to_owned();
    }
    let because = if opened { because } else { "the mode of this measurement" };
    let used = used(run);
    let cache = (!compared).then(|| {
        format!(
            "Cache mode {mode}: {because}. {used}. The plan cache-modes measures which mode is \
             fastest here."
        )
    });
    Setup { commands: typed, xml: element.xml(), cache }
}

/// Properties of a place that decide the cache mode.
fn cache_place(place: Option<&PlaceInfo>) -> CachePlace {
    match place.map(|place| (place.kind, place.file_system.as_deref().unwrap_or_default())) {
        Some((PlaceKind::Device, _)) => CachePlace::Device,
        Some((_, "tmpfs" | "ramfs")) => CachePlace::Memory,
        Some((_, "btrfs")) => CachePlace::Checksums,
        _ => CachePlace::Direct,
    }
}

/// The cache modes that the run used without comparing them, from its commands.
fn used(run: &Run) -> String {
    let front = |cell: &Cell| cell.axis("front").unwrap_or_default().to_owned();
    let found = grouped(run.cells.iter().filter_map(|cell| Some((mode_of(cell)?, front(cell)))));
    let mut modes: Vec<(&str, Vec<String>)> =
        found.into_iter().map(|(mode, fronts)| (mode, distinct(fronts))).collect();
    // The mode of most fronts comes first. Among equals, QEMU's default comes first.
    modes.sort_by_key(|(mode, fronts)| (std::cmp::Reverse(fronts.len()), *mode != CACHE));
    match &modes[..] {
        [] => "No command of this run sets a cache mode".to_owned(),
        [(mode, _)] => format!("The whole run was measured with {mode}"),
        [(most, _), others @ ..] => {
            let other =
                |(mode, fronts): &(&str, Vec<String>)| format!("{mode} for {}", listed(fronts));
            let others: Vec<String> = others.iter().map(other).collect();
            format!("This run was measured with {most}, but with {}", others.join(", "))
        }
    }
}

/// The cache mode of the program that opened the image in this cell, from its commands.
fn mode_of(cell: &Cell) -> Option<&'static str> {
    cell.commands.iter().find_map(|line| mode(line))
}

/// The cache mode in a command line: `--cache MODE` of vdkit and qemu-nbd, or options of QEMU's
/// nodes, exports and disks.
fn mode(line: &str) -> Option<&'static str> {
    let words = split(line);
    let word = |i: usize, word: &String| match word.strip_prefix("--cache") {
        Some("") => words.get(i + 1).cloned(),
        Some(mode) => mode.strip_prefix('=').map(str::to_owned),
        None => None,
    };
    if let Some(mode) = words.iter().enumerate().find_map(|(i, text)| word(i, text)) {
        return Cache::named(&mode).ok().map(|cache| cache.name);
    }
    let says = |switch: &str| words.iter().any(|word| word.split(',').any(|part| part == switch));
    if !says("cache.direct=on") && !says("cache.direct=off") {
        return None;
    }
    let through = says("writethrough=on") || says("write-cache=off");
    Some(match (says("cache.no-flush=on"), says("cache.direct=on"), through) {
        (true, _, _) => "unsafe",
        (false, true, true) => "directsync",
        (false, true, false) => "none",
        (false, false, true) => "writethrough",
        (false, false, false) => "writeback",
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::axes_of as axes;

    #[test]
    fn an_image_is_made_as_it_was_in_the_run() {
        let commands = [
            "vdkit create -f raw /x/source 1G",
            "/usr/bin/vdkit create -f qcow2 -o 'cluster_size=8K,lazy_refcounts=on' '/x y/a' 1G",
            "fio --name=load -f x",
        ];
        let commands = commands.map(str::to_owned);
        let cells = vec![Cell { commands: commands.to_vec(), ..Cell::default() }];
        let mut run = Run { cells, ..Run::default() };
        let place =
            PlaceInfo { name: "ext4".into(), path: "/srv/a b".into(), ..PlaceInfo::default() };
        run.environment.places.push(place);
        let found = setup(&run, &axes(&[("backend", "ext4"), ("cache", "none")]), &[0]);
        assert_eq!(
            found.commands,
            [
                "vdkit create -f qcow2 -o cluster_size=8K,lazy_refcounts=on '/srv/a b/disk.qcow2' SIZE"
            ]
        );
        assert!(found.xml.contains("cache='none' io='threads' discard='unmap'"), "{}", found.xml);
        assert!(found.xml.contains("file='/srv/a b/disk.qcow2'"));
    }

    #[test]
    fn a_layout_has_its_own_options() {
        let options = |layout: &str| {
            let image = Image::of_layout(layout);
            (image.format.clone(), image.options.join(","), image.allocated())
        };
        assert_eq!(options("qcow2-8k"), ("qcow2".into(), "cluster_size=8K".into(), false));
        assert_eq!(options("raw-falloc"), ("raw".into(), "preallocation=falloc".into(), true));
        // The size of the clusters too, which was once left out.
        let extended = "extended_l2=on,cluster_size=128K";
        assert_eq!(options("qcow2-ext"), ("qcow2".into(), extended.into(), false));
        assert_eq!(options("raw-sparse"), ("raw".into(), String::new(), false));
    }

    #[test]
    fn servers_and_devices() {
        let mut run = Run::default();
        run.environment.places.push(PlaceInfo {
            name: "zvol".into(),
            path: "/dev/zvol/p/v".into(),
            kind: PlaceKind::Device,
            ..PlaceInfo::default()
        });
        let choose = |values: &[(&str, &str)]| setup(&run, &axes(values), &[]);
        let raw = choose(&[("backend", "zvol"), ("layout", "raw-sparse"), ("cache", "none")]);
        assert_eq!(raw.commands, [""; 0]);
        assert!(raw.xml.contains("type='block'") && raw.xml.contains("io='native'"));
        let nbd = choose(&[("layout", "qcow2"), ("front", "nbd"), ("cache", "writeback")]);
        assert!(nbd.commands[1].contains("--nbd unix:/run/vdkit-disk.sock --cache writeback"));
        assert!(nbd.xml.contains("protocol='nbd'"));
        let fuse = choose(&[("layout", "qcow2"), ("front", "fuse")]);
        assert!(fuse.commands[1].ends_with("/run/vdkit-disk.raw --cache writeback"), "{fuse:?}");
        assert!(fuse.xml.contains("<source file='/run/vdkit-disk.raw'/>"), "{}", fuse.xml);
        let guest = choose(&[("layout", "qcow2"), ("front", "guest-ide")]);
        assert!(guest.xml.contains("bus='ide'") && guest.commands[0].contains("DIR/disk.qcow2"));
    }

    #[test]
    fn volumes_and_record_sizes_of_zfs_are_made_by_zfs() {
        let choose = |values: &[(&str, &str)]| setup(&Run::default(), &axes(values), &[]);
        let volume = choose(&[("layout", "zvol"), ("record", "8K")]);
        assert_eq!(volume.commands, ["zfs create -V SIZE -b 8K POOL/DISK"]);
        assert!(volume.xml.contains("dev='/dev/zvol/POOL/DISK'"), "{}", volume.xml);
        let file = choose(&[("layout", "qcow2-8k"), ("record", "8K")]);
        assert_eq!(
            file.commands[0],
            "zfs create -o recordsize=8K -o mountpoint=DIR/DATASET POOL/DATASET"
        );
        assert!(file.commands[1].contains("cluster_size=8K"), "{file:?}");
        // The disk was once created in the old data set, which has another record size.
        assert!(file.commands[1].ends_with("DIR/DATASET/disk.qcow2 SIZE"), "{file:?}");
        assert!(file.xml.contains("file='DIR/DATASET/disk.qcow2'"), "{}", file.xml);
        let plain = choose(&[("layout", "qcow2"), ("record", "inherited")]);
        assert!(plain.commands[0].starts_with("vdkit create"), "{plain:?}");
    }

    #[test]
    fn the_cache_mode_is_the_one_that_doctor_advises() {
        let mut run = Run::default();
        for (name, file_system) in [("ext4", "ext4"), ("memory", "tmpfs")] {
            run.environment.places.push(PlaceInfo {
                name: name.into(),
                file_system: Some(file_system.into()),
                ..PlaceInfo::default()
            });
        }
        let mut choose = |commands: &[&str], values: &[(&str, &str)]| {
            let commands = commands.iter().map(|line| (*line).to_owned()).collect();
            run.cells = vec![Cell { commands, ..Cell::default() }];
            setup(&run, &axes(values), &[0])
        };
        let (advised, because) = cache_for(CachePlace::Direct);
        let served = choose(
            &["vdkit mount --cache writeback a b"],
            &[("backend", "ext4"), ("layout", "qcow2")],
        );
        assert!(served.xml.contains(&format!("cache='{advised}'")), "{}", served.xml);
        let told = served.cache.unwrap();
        assert!(told.contains(because) && told.contains("measured with writeback"), "{told}");
        let memory = choose(&["vdkit convert a b"], &[("backend", "memory"), ("layout", "qcow2")]);
        assert!(memory.xml.contains("cache='writeback'"));
        assert!(memory.cache.unwrap().contains("No command of this run sets a cache mode"));
        // A served disk gets the mode that was measured.
        let nbd = choose(&[], &[("layout", "qcow2"), ("front", "nbd")]);
        assert!(nbd.xml.contains("cache='writeback'"), "{}", nbd.xml);
        let compared = choose(&[], &[("cache", "directsync")]);
        assert!(compared.xml.contains("cache='directsync'") && compared.cache.is_none());
    }

    /// The report once said that everything was measured with writeback, although QEMU's daemon had
    /// cache.direct.
    #[test]
    fn the_cache_modes_that_a_run_used_are_those_of_its_commands() {
        let direct = "qemu-storage-daemon --blockdev driver=file,filename=/a,cache.direct=on,\
                      cache.no-flush=off,aio=native --export type=nbd,writable=on &";
        let fuse = "qemu-storage-daemon --blockdev driver=file,filename=/a,cache.direct=off,\
                    cache.no-flush=off --export type=fuse,writable=on &";
        let cell = |front: &str, command: &str| Cell {
            axes: axes(&[("layout", "qcow2"), ("front", front)]),
            commands: vec!["vdkit create -f qcow2 /a 1G".to_owned(), command.to_owned()],
            ..Cell::default()
        };
        let mut cells = vec![
            cell("nbd-qsd-native", direct),
            cell("nbd-qsd-uring", &direct.replace("native", "io_uring")),
            cell("fuse", "vdkit mount -f qcow2 --cache writeback /a /b &"),
            cell("fuse-qsd", fuse),
            cell("nbd-qemu-nbd", "qemu-nbd --cache=writeback /a &"),
            // It failed before it began.
            Cell::default(),
        ];
        let told = |cells: &[Cell], advised: &[(&str, &str)], at: usize| {
            let run = Run { cells: cells.to_vec(), ..Run::default() };
            setup(&run, &axes(advised), &[at])
        };
        let advised = told(&cells, &[("layout", "qcow2")], 0).cache.unwrap();
        assert!(
            advised.contains(
                "This run was measured with writeback, but with none for nbd-qsd-native and \
                 nbd-qsd-uring."
            ),
            "{advised}"
        );
        // A server gets the mode with which it was measured.
        let native = told(&cells, &[("layout", "qcow2"), ("front", "nbd-qsd-native")], 0);
        assert!(native.commands[1].ends_with("--cache none"), "{native:?}");
        assert!(
            native.cache.unwrap().starts_with("Cache mode none: the mode of this measurement.")
        );
        cells.drain(..2);
        let advised = told(&cells, &[("layout", "qcow2")], 0).cache.unwrap();
        assert!(advised.contains("The whole run was measured with writeback."), "{advised}");
    }

    #[test]
    fn a_command_says_its_cache_mode() {
        let node = "qemu-system-x86_64 -blockdev driver=file,cache.direct=D,cache.no-flush=F \
                    -device ide-hd,drive=disk,write-cache=W &";
        let of = |direct: &str, no_flush: &str, write_cache: &str| {
            let direct = node.replace("direct=D", &format!("direct={direct}"));
            let line = direct.replace("flush=F", &format!("flush={no_flush}"));
            mode(&line.replace("cache=W", &format!("cache={write_cache}")))
        };
        assert_eq!(of("off", "off", "on"), Some("writeback"));
        assert_eq!(of("on", "off", "on"), Some("none"));
        assert_eq!(of("off", "off", "off"), Some("writethrough"));
        assert_eq!(of("on", "off", "off"), Some("directsync"));
        assert_eq!(of("off", "on", "on"), Some("unsafe"));
        assert_eq!(mode("vdkit serve --cache unsafe a"), Some("unsafe"));
        assert_eq!(mode("vdkit convert a /cache/b"), None);
    }

    #[test]
    fn overlays_name_what_they_stand_on() {
        let made = "vdkit create -f qcow2 -b /x/base.qcow2 -F qcow2 /x/disk.qcow2 1G";
        let image = Image::of_command(made).unwrap();
        assert_eq!((image.overlay, image.format.as_str()), (true, "qcow2"));
        let found = setup(&Run::default(), &axes(&[("layout", "qcow2-overlay")]), &[]);
        assert_eq!(found.commands, ["vdkit create -f qcow2 -b BASE -F qcow2 DIR/disk.qcow2"]);
    }

    #[test]
    fn lines_are_split_as_a_shell_does() {
        assert_eq!(split(r#"a 'b c' "d e"f g\ h '' "#), ["a", "b c", "d ef", "g h", ""]);
        assert_eq!(split(""), [""; 0]);
    }
}
