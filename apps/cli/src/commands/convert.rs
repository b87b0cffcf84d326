//! `vdkit convert`: copies a guest disk into an image of another format.

mod appliance;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueHint};
use serde::Serialize;
use vdkit::jobs::Backing;
use vdkit::jobs::{
    self, ApplianceReport, BrokenBitmaps, ConvertOptions, ConvertReport, CreateOptions,
    Destination, ExistingImage, FoundBacking, Incoming, LeftBehind, NewBacking, NewImage, Preset,
    Source, Use, convert_stream,
};
use vdkit::stream::{Checksum, OutPipe, Stdout};
use vdkit::{
    BackingChoice, CacheMode, CancelToken, Codec, CompressionSpec, FormatDriver, Monitor,
    OpenOptions, Options, Registry, Secret,
};

use super::{Run, Subcommand, runs};
use crate::arguments::{CopySource, FormatOptions, Json, ParentOption, ProgressOption, size};
use crate::failure::{Exit, Failure, Outcome};
use crate::guard;
use crate::incoming::{Opened, Opening, STANDARD, spool_folder};
use crate::keys::TargetKey;
use crate::protocols;
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "convert",
    about: "Convert an image to another format, or copy it",
    details: "\
Copies the guest disk of SOURCE (through its backing chain) into a new image TARGET, in the \
cheapest way: blocks are shared if the file system can share them, regions without data are \
skipped, and zeroes are not stored. Several sources are pieces of one disk, one after the other.

SOURCE may also be '-' (standard input), an http:// or https:// URL, or an NBD URI. Each source may be \
compressed by gzip, xz or zstd, which vdkit recognizes from the content; with -f raw the bytes are \
the disk's. A stream that must be read at random offsets is first written to a file without a name \
(in TMPDIR, or else next to the target); a raw disk never needs that.

TARGET is a new file (which gets its name only when it is complete), a block device or NBD export, an existing \
file with --into, '-' (standard output, for formats that can be written in order), or 'null:', \
which reads everything that is needed and writes nothing. Its format is given by -O, or by the \
ending of its name, or is raw.

If SOURCE is an appliance (OVA), its disks go into the folder TARGET, one file each, or one of \
them (--disk) into a file. The targets get their names after the appliance's manifest was \
verified. If TARGET ends in .ova, each SOURCE becomes a disk of a new appliance.",
    examples: "
vdkit convert disk.raw disk.qcow2
vdkit convert disk.qcow2 -O raw /dev/vg0/guest     onto a block device
vdkit convert --compress=zstd disk.qcow2 small.qcow2
vdkit convert disk.raw disk.qcow2 -o cluster_size=1M,preallocation=metadata
vdkit convert a.raw b.raw whole.qcow2              two pieces of one disk
vdkit convert top.qcow2 flat.qcow2 --backing base.qcow2
                                                   everything above base.qcow2
vdkit convert --snapshot golden disk.qcow2 old.raw  the disk of a snapshot
vdkit convert disk.qcow2 null:                     how fast can it be read?
vdkit convert https://example.com/cloud.img.xz disk.qcow2 --checksum sha256:…
ssh host cat /dev/vg0/guest | vdkit convert - disk.qcow2
vdkit convert nbd://host/export disk.qcow2         an export of an NBD server
vdkit convert disk.qcow2 -O raw - | zstd > disk.raw.zst
vdkit convert disk.qcow2 disk.vhd --for azure      format, options and size for Azure
vdkit convert appliance.ova disks/                 every disk of an appliance, as qcow2
vdkit convert appliance.ova --disk 2 data.raw      only one of the disks
vdkit convert root.qcow2 data.raw new.ova -o cpus=4,memory=8G
                                                   an appliance with two disks
",
    ..runs::<ConvertArgs>()
};

#[derive(Args, Debug)]
#[command(override_usage = "vdkit convert [OPTIONS] SOURCE... TARGET")]
pub struct ConvertArgs {
    // One list for sources and target, because clap then accepts options between the names.
    /// The image to convert (a file, a URL or -; several are pieces of one disk, in order), then
    /// the target: a new file, a block device, - or null:
    #[arg(value_name = "SOURCE... TARGET", required = true, num_args = 1.., value_hint = ValueHint::FilePath)]
    images: Vec<PathBuf>,
    #[command(flatten)]
    source: CopySource,
    /// Format of the target (default: from the ending of its name, or raw)
    #[arg(short = 'O', long, value_name = "FORMAT")]
    target_format: Option<String>,
    #[command(flatten)]
    options: FormatOptions,
    /// Choose format, options and size for kvm, openstack, gcp, aws, azure, vmware, hyperv or
    /// virtualbox
    #[arg(long = "for", value_name = "TARGET", conflicts_with = "into")]
    made_for: Option<Preset>,
    /// Compress the data by zlib or zstd, optionally with a level, as in zstd:9
    #[arg(short = 'c', long, value_name = "METHOD[:LEVEL]", num_args = 0..=1, require_equals = true, default_missing_value = "", value_parser = compression)]
    compress: Option<Compress>,
    /// Make the target an overlay of this image, which must be in the source's backing chain, and
    /// copy only what is above it in the chain; a relative name starts at the target's folder
    #[arg(short = 'B', long, value_parser = NonEmptyStringValueParser::new(), value_name = "FILE", value_hint = ValueHint::FilePath)]
    backing: Option<String>,
    /// Format of the backing image (default: probed from its header)
    #[arg(short = 'F', long, value_name = "FORMAT", requires = "backing")]
    backing_format: Option<String>,
    /// Threads for copying and compressing (default: one per core)
    #[arg(short = 'm', long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: Option<u16>,
    /// Cache mode of the target: writeback, none, writethrough, directsync or unsafe
    #[arg(short = 't', long, value_name = "MODE")]
    cache: Option<CacheMode>,
    /// Cache mode of the sources: writeback or none
    #[arg(short = 'T', long, value_name = "MODE")]
    src_cache: Option<CacheMode>,
    /// Detect zeroes in units of SIZE, or not at all with 'off' (default: 4K)
    #[arg(short = 'S', long, value_name = "SIZE|off", value_parser = detect_zeros, default_value = "4K", hide_default_value = true)]
    detect_zeros: DetectZeros,
    #[command(flatten)]
    parent: ParentOption,
    /// Copy the source's dirty bitmaps too
    #[arg(long, conflicts_with = "snapshot")]
    bitmaps: bool,
    /// Leave out inconsistent bitmaps instead of failing
    #[arg(long, requires = "bitmaps")]
    skip_broken_bitmaps: bool,
    /// Required checksum of the source's file as it is stored, before it is decompressed:
    /// sha256:HEX, sha512:HEX or sha1:HEX
    #[arg(long, value_name = "METHOD:HEX")]
    checksum: Option<Checksum>,
    /// Convert only this disk of an appliance: its number (from 1), its id, or its file's name
    #[arg(long, value_name = "N|NAME")]
    disk: Option<String>,
    /// Read the target afterwards and compare it with the sources
    #[arg(long)]
    verify: bool,
    /// Write into the existing TARGET instead of creating a new one
    #[arg(short = 'n', long)]
    into: bool,
    /// Accept an empty source as a disk of zero bytes instead of failing
    #[arg(long)]
    allow_empty: bool,
    /// Write to the target even if other images depend on it, or if a block device already has content
    #[arg(long)]
    force: bool,
    /// Copy at most this many bytes per second
    #[arg(short = 'r', long, value_name = "SIZE", value_parser = size)]
    rate: Option<u64>,
    #[command(flatten)]
    target_key: TargetKey,
    #[command(flatten)]
    progress: ProgressOption,
    #[command(flatten)]
    json: Json,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compress {
    /// The method of the target's options.
    Default,
    /// The method named on the command line.
    Method(CompressionSpec),
}

/// The value of `--detect-zeros`: the unit; none if zeroes are not detected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DetectZeros(Option<u32>);

fn compression(text: &str) -> Result<Compress, String> {
    if text.is_empty() {
        return Ok(Compress::Default);
    }
    let (name, level) = match text.split_once(':') {
        Some((name, level)) => (name, Some(level)),
        None => (text, None),
    };
    let (codec, levels) = match name {
        "zlib" | "deflate" => (Codec::Deflate, 1..=9),
        "zstd" => (Codec::Zstd, 1..=22),
        _ => return Err("methods are zlib and zstd".to_owned()),
    };
    let level = match level {
        None => None,
        Some(level) => match level.parse::<i32>() {
            Ok(level) if levels.contains(&level) => Some(level),
            _ => {
                return Err(format!("levels of {name} are {} to {}", levels.start(), levels.end()));
            }
        },
    };
    Ok(Compress::Method(CompressionSpec { codec, level }))
}

fn detect_zeros(text: &str) -> Result<DetectZeros, String> {
    if text == "off" {
        return Ok(DetectZeros(None));
    }
    match u32::try_from(size(text)?) {
        Ok(unit) if unit.is_power_of_two() && (512..=1 << 21).contains(&unit) => {
            Ok(DetectZeros(Some(unit)))
        }
        _ => Err("units are powers of two from 512 to 2M, or 'off'".to_owned()),
    }
}

impl Run for ConvertArgs {
    fn run(self, session: &mut Session) -> Outcome {
        let registry = vdkit::registry();
        let images: Vec<_> = self.images.iter().map(|name| standard(name)).collect();
        let Some((target, sources)) =
            images.split_last().filter(|(_, sources)| !sources.is_empty())
        else {
            return Err(Failure::usage("the TARGET is missing")
                .hint("'vdkit convert SOURCE null:' reads without writing"));
        };
        sources.iter().try_for_each(|source| super::refuse_itself(source, target))?;
        protocols::refuse_target(target)?;
        if self.source.snapshot.is_some() && sources.len() > 1 {
            return Err(Failure::usage("--snapshot is for one source: convert each by itself"));
        }
        if !self.parent.parent.is_empty() && sources.len() > 1 {
            return Err(Failure::usage("--parent is for one source: convert each by itself"));
        }
        if self.checksum.is_some() && sources.len() > 1 {
            return Err(Failure::usage("--checksum is for one source: check each by itself"));
        }
        if target == Path::new(STANDARD) {
            self.refuse_options_of_files()?;
        }
        let cancel = session.cancel_on_signal()?;
        let progress = self.progress.reporter("convert");
        let monitor = Monitor::new(&progress).cancelled_by(cancel);
        let answer = if self.makes_appliance(target) {
            self.pack(&registry, sources, target, &monitor).map(Answer::Appliance)
        } else {
            self.convert(&registry, sources, target, &monitor)
        };
        progress.finish();
        let answer = answer.inspect_err(|_| {
            if self.into || super::is_device(target) {
                super::warn_half_written(target, &progress);
            }
        })?;
        if self.json.json {
            session.out.json(&answer);
        }
        Ok(Exit::Done)
    }
}

/// Names the options that copy what was left behind.
fn tell_how_to_keep(left: &LeftBehind, monitor: &Monitor<'_>) {
    if !left.snapshots.is_empty() {
        monitor.progress.message("'--snapshot NAME' converts one of the snapshots");
    }
    if !left.bitmaps.is_empty() {
        let text = "'--bitmaps' copies those dirty bitmaps that can be trusted into a qcow2 image";
        monitor.progress.message(text);
    }
}

/// Maps the device names of stdin and stdout to `-`.
fn standard(name: &Path) -> PathBuf {
    const NAMES: [&str; 4] = ["/dev/stdin", "/dev/stdout", "/dev/fd/0", "/dev/fd/1"];
    if NAMES.iter().any(|known| name == Path::new(known)) {
        STANDARD.into()
    } else {
        name.to_owned()
    }
}

#[derive(Serialize)]
#[serde(untagged)]
enum Answer {
    Disk(ConvertReport),
    Appliance(ApplianceReport),
}

impl ConvertArgs {
    fn convert(
        &self,
        registry: &Registry,
        sources: &[PathBuf],
        target: &Path,
        monitor: &Monitor<'_>,
    ) -> Result<Answer, Failure> {
        let spool = spool_folder(target);
        let opening = Opening {
            registry,
            options: &self.source_options(),
            checksum: self.checksum.as_ref(),
            spool: &spool,
            allow_empty: self.allow_empty,
        };
        let mut disks = Vec::with_capacity(sources.len());
        // On a block device, the driver needs the image's size before it creates the image.
        let sized = super::is_device(target)
            && !self.into
            && self.target_format.as_deref().is_some_and(|format| format != "raw");
        let alone = sources.len() == 1;
        for path in sources {
            match opening.open(path, monitor)? {
                Opened::Package(package) if alone => {
                    let report = self.extract(registry, &package, target, monitor)?;
                    return Ok(Answer::Appliance(report));
                }
                Opened::Package(_) => {
                    let text =
                        format!("{}: is an appliance, and no piece of a disk", path.display());
                    return Err(Failure::usage(text).hint("convert each by itself"));
                }
                Opened::Image(_) if self.disk.is_some() => return Err(Self::no_appliance(path)),
                Opened::Image(Incoming::Disk(disk)) => disks.push(*disk),
                Opened::Image(Incoming::Raw(raw)) if alone && !sized => {
                    let options = self.job(registry, target, 0, &monitor.cancel)?;
                    let report = convert_stream(registry, raw, &spool, &options, monitor)?;
                    return Ok(Answer::Disk(report));
                }
                Opened::Image(Incoming::Raw(raw)) => {
                    disks.push(raw.into_disk(registry, &spool, monitor)?);
                }
            }
        }
        let source = Source::new(disks);
        let options = self.job(registry, target, source.bytes(), &monitor.cancel)?;
        let report = jobs::convert(registry, &source, &options, monitor)?;
        tell_how_to_keep(&report.left_behind, monitor);
        Ok(Answer::Disk(report))
    }

    fn no_appliance(path: &Path) -> Failure {
        Failure::usage(format!("--disk is for appliances, and {} is none", path.display()))
    }

    fn job(
        &self,
        registry: &Registry,
        target: &Path,
        source_bytes: u64,
        cancel: &CancelToken,
    ) -> Result<ConvertOptions, Failure> {
        let Goal { destination, compress, backing } =
            self.goal(registry, target, source_bytes, cancel)?;
        let mut options = ConvertOptions::new(destination);
        options.compress = compress;
        options.threads = self.threads.map(usize::from);
        options.detect_zeroes = self.detect_zeros.0;
        options.verify = self.verify;
        options.rate = self.rate;
        options.backing = backing;
        options.bitmaps = match (self.bitmaps, self.skip_broken_bitmaps) {
            (false, _) => None,
            (true, false) => Some(BrokenBitmaps::Refuse),
            (true, true) => Some(BrokenBitmaps::Skip),
        };
        options.size_unit = self.made_for.map_or(1, Preset::unit);
        options.keys = self.target_keys();
        Ok(options)
    }

    /// Refuses options that need a target file, because stdout only takes bytes in order.
    fn refuse_options_of_files(&self) -> Result<(), Failure> {
        let given = [
            ("--json", self.json.json),
            ("--into", self.into),
            ("--backing", self.backing.is_some()),
            ("--verify", self.verify),
            ("--cache", self.cache.is_some()),
            ("--bitmaps", self.bitmaps),
        ];
        super::refuse_given(&given, "here: standard output is a stream of the image's bytes")?;
        if std::io::stdout().is_terminal() {
            return Err(Failure::usage(
                "standard output is a terminal, which is no place for a disk",
            ));
        }
        Ok(())
    }
}

/// The target of a conversion, from the arguments.
struct Goal {
    destination: Destination,
    compress: Option<CompressionSpec>,
    backing: Option<Backing>,
}

impl ConvertArgs {
    fn source_options(&self) -> OpenOptions {
        let options = self.source.options().backing(self.parent.choice());
        options.cache(self.src_cache.unwrap_or_default())
    }

    /// The keys to try on an existing target; the key given for the target comes first.
    fn target_keys(&self) -> Vec<Secret> {
        self.target_key.key().into_iter().cloned().chain(self.source.keys.all()).collect()
    }

    fn goal(
        &self,
        registry: &Registry,
        target: &Path,
        source_bytes: u64,
        cancel: &CancelToken,
    ) -> Result<Goal, Failure> {
        if target.as_os_str() == "null:" {
            self.refuse_options_of_new_images("here: null: writes nothing", true)?;
            return Ok(Goal { destination: Destination::Null, compress: None, backing: None });
        }
        let device = super::is_device(target);
        if self.into || (device && self.target_format.is_none()) {
            return self.goal_in_existing(registry, target, device, cancel);
        }
        let format = self.target_format.as_deref();
        let driver = super::target_driver(self.made_for, format, target)?;
        let preset = self.made_for.map(|preset| preset.options(Use::Delivery));
        let mut options = self.options.parse(driver, preset, self.target_key.key())?;
        let compress = self.compress.map(|wanted| compression_of(wanted, driver, &mut options));
        let compress = compress.transpose()?;
        if target == Path::new(STANDARD) {
            let output = Stdout::open(cancel.clone()).map_err(|error| {
                Failure::failed(format!("standard output cannot be written: {error}"))
            })?;
            let pipe = Arc::new(OutPipe::new("standard output", output));
            let format = driver.name().to_owned();
            let destination = Destination::Pipe { pipe, format, options };
            return Ok(Goal { destination, compress, backing: None });
        }
        if device {
            guard::refuse_occupied(target, self.force, None)?;
            self.create_on_device(registry, target, driver, options, source_bytes, cancel)?;
            let destination = self.existing(target, Some(driver.name().to_owned()));
            return Ok(Goal { destination, compress, backing: None });
        }
        if !self.force {
            guard::refuse_replacing(target, cancel)?;
        }
        let found = self.found_backing(registry, target)?;
        let destination = Destination::New(
            NewImage::new(target, driver.name())
                .options(options)
                .backing(found.as_ref().map(|found| found.reference.clone()))
                .cache(self.cache),
        );
        let backing = found.map(|found| {
            Backing::new(found.path, self.source_options().of_other(found.reference.format))
        });
        Ok(Goal { destination, compress, backing })
    }

    /// The target of a conversion into an existing image (`--into`).
    fn goal_in_existing(
        &self,
        registry: &Registry,
        target: &Path,
        device: bool,
        cancel: &CancelToken,
    ) -> Result<Goal, Failure> {
        guard::refuse_dependents(target, self.force, "writing into it", cancel)?;
        self.refuse_options_of_new_images(
            "here: the target exists and keeps its own options",
            false,
        )?;
        // A device has no file name to derive the format from, and its old content is no image
        // header to trust.
        let format = self.target_format.clone().or(device.then(|| "raw".to_owned()));
        guard::refuse_occupied(target, self.force, format.as_deref())?;
        self.target_key.refuse_for_plain(target, format.as_deref())?;
        let compress = self.compress.map(|wanted| self.compress_into(registry, target, wanted));
        let destination = self.existing(target, format);
        Ok(Goal { destination, compress: compress.transpose()?, backing: None })
    }

    fn existing(&self, target: &Path, format: Option<String>) -> Destination {
        let existing = ExistingImage::new(target).format(format).cache(self.cache);
        Destination::Into(existing.refs(self.source.references.policy()))
    }

    /// Refuses options that would have no effect.
    fn refuse_options_of_new_images(&self, why: &str, null: bool) -> Result<(), Failure> {
        let given = [
            ("-o", !self.options.options.is_empty()),
            ("--backing", self.backing.is_some()),
            ("--compress", self.compress.is_some() && null),
            ("-O", self.target_format.is_some() && null),
            ("--for", self.made_for.is_some()),
            ("--verify", self.verify && null),
            ("--target-key-…", self.target_key.key().is_some() && null),
        ];
        super::refuse_given(&given, why)
    }

    /// The compression method that an existing target uses for its compressed clusters.
    fn compress_into(
        &self,
        registry: &Registry,
        target: &Path,
        wanted: Compress,
    ) -> Result<CompressionSpec, Failure> {
        if let Compress::Method(spec) = wanted {
            return Ok(spec);
        }
        let options = OpenOptions::read_only()
            .maybe_format(self.target_format.clone())
            .backing(BackingChoice::Ignore);
        let report = vdkit::describe_chain(registry, target, &options)?;
        let zstd = report.links.iter().any(|link| link.info.compression == Some("zstd"));
        let codec = if zstd { Codec::Zstd } else { Codec::Deflate };
        Ok(CompressionSpec { codec, level: None })
    }

    fn create_on_device(
        &self,
        registry: &Registry,
        target: &Path,
        driver: &'static dyn FormatDriver,
        options: Options,
        guest_bytes: u64,
        cancel: &CancelToken,
    ) -> Result<(), Failure> {
        if self.backing.is_some() {
            return Err(Failure::usage("--backing needs a new file as the target"));
        }
        if driver.name() == "raw" {
            // A raw image on a device needs no creation.
            return Ok(());
        }
        let create = CreateOptions::new(target, driver).guest_bytes(guest_bytes).options(options);
        let monitor = Monitor::default().cancelled_by(cancel.clone());
        jobs::create(registry, &create, &monitor)?;
        Ok(())
    }

    fn found_backing(
        &self,
        registry: &Registry,
        target: &Path,
    ) -> Result<Option<FoundBacking>, Failure> {
        let Some(name) = &self.backing else { return Ok(None) };
        let backing = NewBacking::new(name.clone(), self.backing_format.clone());
        Ok(Some(backing.find(registry, target, &self.source_options())?))
    }
}

/// The compression method of a new image. `--compress` must agree with the image's options.
fn compression_of(
    wanted: Compress,
    driver: &dyn FormatDriver,
    options: &mut Options,
) -> Result<CompressionSpec, Failure> {
    const KEY: &str = "compression_type";
    if !driver.options().iter().any(|option| option.key == KEY) {
        return Err(Failure::usage(format!("{} images hold no compressed data", driver.name())));
    }
    let Compress::Method(spec) = wanted else {
        let codec = match options.text(KEY) {
            Some("zstd") => Codec::Zstd,
            _ => Codec::Deflate,
        };
        return Ok(CompressionSpec { codec, level: None });
    };
    let method = spec.codec.to_string();
    match options.text(KEY) {
        Some(other) if other != method => Err(Failure::usage(format!(
            "--compress={method} and -o {KEY}={other} contradict each other"
        ))),
        _ => {
            options.set(driver.name(), driver.options(), KEY, &method)?;
            Ok(spec)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_and_levels() {
        let spec = |codec, level| Ok(Compress::Method(CompressionSpec { codec, level }));
        assert_eq!(compression(""), Ok(Compress::Default));
        assert_eq!(compression("zlib"), spec(Codec::Deflate, None));
        assert_eq!(compression("zstd:9"), spec(Codec::Zstd, Some(9)));
        for text in ["lz4", "zlib:0", "zlib:10", "zstd:23", "zstd:", "zstd:x"] {
            assert!(compression(text).is_err(), "{text}");
        }
    }

    #[test]
    fn units_of_zero_detection() {
        assert_eq!(detect_zeros("off"), Ok(DetectZeros(None)));
        assert_eq!(detect_zeros("64K"), Ok(DetectZeros(Some(65536))));
        for text in ["0", "1", "3K", "4M", "on"] {
            assert!(detect_zeros(text).is_err(), "{text}");
        }
    }
}
