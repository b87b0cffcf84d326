//! `qemu-img convert`: copies disks into a new image, or into an existing one.

use std::path::{Path, PathBuf};

use vdkit::jobs::{
    self, Backing, BrokenBitmaps, ConvertOptions, Destination, ExistingImage, NewBacking, NewImage,
    Source,
};
use vdkit::{CacheMode, Codec, CompressionSpec, Disk, Error, OpenOptions, same_file};

use super::create::{check_host_device, create_at, refuse_own_source, target_path, whole_sectors};
use super::{Command, FORCE_SHARE, OBJECT, Output, PROGRESS, QUIET, SRC_CACHE, opening};
use crate::creation::{Asked, Wanted, asked, failed_creation, table};
use crate::failure::{Failure, could_not_open, words};
use crate::getopt::{Opt, Parsed, alias, flag, long, valued};
use crate::names::{Image, Place};
use crate::open::{
    Access, Named, check_writable, is_protocol, open_options, open_with, references, registry,
};
use crate::output::copying;
use crate::secrets::Objects;
use crate::sizes;
use crate::snapshots::SnapshotChoice;

/// Bytes of the smallest run of zeroes that is not written.
const SPARSE_BYTES: u32 = 4096;

/// In the order in which QEMU names those that a beginning may mean.
const OPTIONS: &[Opt] = &[
    QUIET,
    PROGRESS.whole_name_only(),
    OBJECT,
    long("image-opts", None, ""),
    long("source-image-opts", None, "sources are options: driver=…,file.filename=…"),
    valued('f', "source-format", "SRC_FMT", "format of the sources"),
    SRC_CACHE,
    valued('l', "source-snapshot", "SNAPSHOT_PARAMS", "the snapshot of the source to copy")
        .whole_name_only(),
    alias("snapshot", "source-snapshot"),
    long("target-image-opts", None, "the target is options; needs -n"),
    valued('O', "target-format", "TGT_FMT", "format of the target (raw)").whole_name_only(),
    alias("output-format", "target-format"),
    valued('o', "target-options", "TGT_OPTS", "options of the target's format").whole_name_only(),
    alias("options", "target-options"),
    valued('t', "target-cache", "TGT_CACHE", "cache mode of the target (unsafe)").whole_name_only(),
    alias("output-cache", "target-cache"),
    valued('B', "backing", "BACKING_FILENAME", "the target's backing image"),
    valued('F', "backing-format", "BACKING_FMT", "format of the backing image"),
    flag('c', "compress", "compress the target's data (qcow2 only)").whole_name_only(),
    flag('n', "no-create", "write into an existing target").whole_name_only(),
    valued('S', "sparse-size", "SPARSE_SIZE", "bytes of zeroes that are left out; 0 fills"),
    long("target-is-zero", None, "the existing target reads as zeroes"),
    long("salvage", None, "what cannot be read becomes zeroes, with a warning"),
    flag('W', "oob-writes", "accepted; writes are not ordered"),
    long("bitmaps", None, "copy the dirty bitmaps"),
    long("skip-broken-bitmaps", None, "leave out bitmaps that are inconsistent"),
    FORCE_SHARE,
    valued('r', "rate", "RATE", "bytes per second at most"),
    valued('m', "parallel", "NUM_COROUTINES", "accepted; a thread runs on each core"),
    flag('C', "copy-range-offloading", "accepted; blocks are shared where that is possible"),
];

pub const COMMAND: Command = Command {
    name: "convert",
    about: "Copy one image to another, and convert its format",
    operands: "SRC_FILENAME [SRC_FILENAME2 [...]] TGT_FILENAME",
    options: OPTIONS,
    run,
};

/// The rate that `-r` gives; 0 is none.
pub fn rate_option(parsed: &Parsed) -> Result<Option<u64>, Failure> {
    let Some(text) = parsed.last("rate") else { return Ok(None) };
    Ok(Some(sizes::size("rate limit", text)?).filter(|&rate| rate > 0))
}

/// What the numbers and flags say, checked.
struct Settings<'a> {
    parsed: &'a Parsed,
    objects: Objects,
    values: Vec<(String, String)>,
    format: Option<&'a str>,
    into: bool,
    compress: bool,
    detect: Option<u32>,
    snapshot: Option<SnapshotChoice>,
    rate: Option<u64>,
    cache: Option<CacheMode>,
    source_cache: Option<CacheMode>,
}

fn run(parsed: &Parsed, out: &mut Output) -> Result<u8, Failure> {
    let format = parsed.last("target-format");
    let values = match asked(parsed.all("target-options"))? {
        Asked::Values(values) => values,
        Asked::Help => {
            let named = parsed.operands.len() > 1;
            out.text(table(format.unwrap_or("raw"))?.help(named));
            return Ok(0);
        }
    };
    if let Some(count) = parsed.last("parallel") {
        sizes::number("number of coroutines", count, 1, 16)?;
    }
    let settings = Settings {
        parsed,
        values,
        format,
        into: parsed.has("no-create"),
        compress: parsed.has("compress"),
        detect: sparse_size(parsed)?,
        snapshot: snapshot_option(parsed, "source-snapshot")?,
        rate: rate_option(parsed)?,
        cache: opening::cache(parsed, "target-cache", "cache")?,
        source_cache: opening::cache(parsed, "source-cache", "source cache")?,
        objects: Objects::of(parsed)?,
    };
    settings.refuse_contradictions()?;
    let [sources @ .., target] = &parsed.operands[..] else {
        return Err(Failure::new("Must specify image file name"));
    };
    if sources.is_empty() {
        return Err(Failure::new("Must specify image file name"));
    }
    settings.convert(sources, target)
}

/// The unit of zero detection; `None` fills the target.
fn sparse_size(parsed: &Parsed) -> Result<Option<u32>, Failure> {
    const MOST: u64 = 16 << 20;
    /// The engine's largest unit.
    const ENGINE_MOST: u64 = 1 << 20;
    let Some(text) = parsed.last("sparse-size") else { return Ok(Some(SPARSE_BYTES)) };
    let bytes = sizes::size("buffer size for sparse output", text)?;
    if !bytes.is_multiple_of(512) || bytes > MOST {
        return Err(Failure::new(format!(
            "Invalid buffer size for sparse output specified. Valid sizes are multiples of 512 up to \
             {MOST}. Select 0 to disable sparse detection (fully allocates output)."
        )));
    }
    Ok((bytes > 0).then(|| 1 << bytes.min(ENGINE_MOST).ilog2()))
}

/// The snapshot that an option names.
pub fn snapshot_option(parsed: &Parsed, option: &str) -> Result<Option<SnapshotChoice>, Failure> {
    parsed.last(option).map(|text| SnapshotChoice::parse(text, "qemu-img")).transpose()
}

impl Settings<'_> {
    fn refuse_contradictions(&self) -> Result<(), Failure> {
        let has = |name: &str| self.parsed.has(name);
        let target_options = has("target-image-opts");
        let said = match () {
            () if has("copy-range-offloading") && self.compress => {
                "Cannot enable copy offloading when -c is used"
            }
            () if has("copy-range-offloading") && has("sparse-size") => {
                "Cannot enable copy offloading when -S is used"
            }
            () if has("copy-range-offloading") && has("salvage") => {
                "Cannot use copy offloading in salvaging mode"
            }
            () if has("target-is-zero") && !self.into => "--target-is-zero requires use of -n flag",
            () if has("target-is-zero") && has("backing") => {
                "Cannot use --target-is-zero when the destination image has a backing file"
            }
            () if target_options && !self.into => "--target-image-opts requires use of -n flag",
            () if target_options && self.format.is_some() => {
                "--image-opts and --format are mutually exclusive"
            }
            () if self.image_opts() && has("source-format") => {
                "--image-opts and --format are mutually exclusive"
            }
            () if has("skip-broken-bitmaps") && !has("bitmaps") => {
                "Use of --skip-broken-bitmaps requires --bitmaps"
            }
            () if self.into && !self.values.is_empty() => {
                "-o has no effect when skipping image creation"
            }
            () => return Ok(()),
        };
        Err(Failure::new(said))
    }

    fn image_opts(&self) -> bool {
        self.parsed.has("source-image-opts") || self.parsed.has("image-opts")
    }

    fn convert(&self, sources: &[String], target: &str) -> Result<u8, Failure> {
        if self.snapshot.is_some() && sources.len() > 1 {
            return Err(Failure::new("No support for concatenating multiple snapshot"));
        }
        let disks = sources.iter().map(|name| self.source(name)).collect::<Result<Vec<_>, _>>()?;
        self.refuse_bitmaps(&disks)?;
        let source = Source::new(disks);
        let mut options = self.goal(&source, target)?;
        options.detect_zeroes = self.detect;
        options.fill = self.detect.is_none();
        options.salvage = self.parsed.has("salvage");
        options.target_is_zero = self.parsed.has("target-is-zero");
        options.rate = self.rate;
        options.bitmaps = match (self.parsed.has("bitmaps"), self.parsed.has("skip-broken-bitmaps"))
        {
            (false, _) => None,
            (true, false) => Some(BrokenBitmaps::Refuse),
            (true, true) => Some(BrokenBitmaps::Skip),
        };
        options.size_unit = 512;
        let done =
            copying(self.parsed, |monitor| jobs::convert(&registry(), &source, &options, monitor))?;
        done.map(|_| 0).map_err(|error| self.failed(target, &error))
    }

    /// The failure of the whole job; an error of the new file is reported as a failed creation.
    fn failed(&self, target: &str, error: &Error) -> Failure {
        let format = self.format.unwrap_or("raw");
        match error {
            Error::File { .. } | Error::Locked { .. } | Error::Invalid { .. } if !self.into => {
                failed_creation(Path::new(target), error).within(&converting(target, format))
            }
            Error::Locked { .. } | Error::File { .. } => could_not_open(target, words(error)),
            other => Failure::new(words(other)),
        }
    }

    fn source(&self, name: &str) -> Result<Disk, Failure> {
        let format = self.parsed.last("source-format");
        let image = Named { text: name, format, options: self.image_opts() }.parse()?;
        let access = Access {
            share: self.parsed.has("force-share"),
            cache: self.source_cache.unwrap_or_default(),
            ..Access::read()
        };
        let mut options = open_options(&image, access, &self.objects)?;
        if let Some(snapshot) = &self.snapshot {
            options.snapshot = Some(snapshot.find_in(image.path(), &options)?);
        }
        open_with(&image, &options)
    }

    fn refuse_bitmaps(&self, disks: &[Disk]) -> Result<(), Failure> {
        let able = |disk: &Disk| disk.layers()[0].info().format == "qcow2";
        if !self.parsed.has("bitmaps") {
            return Ok(());
        }
        match disks {
            [one] if able(one) => Ok(()),
            [_] => Err(Failure::new("Source lacks bitmap support")),
            _ => Err(Failure::new("Copying bitmaps only possible with single source")),
        }
    }
}

fn concatenated() -> Failure {
    Failure::new(
        "Having a backing file for the target makes no sense when concatenating multiple input images",
    )
}

fn converting(target: &str, format: &str) -> String {
    format!("{target}: error while converting {format}")
}

impl Settings<'_> {
    /// Where the data goes, and how it is stored there.
    fn goal(&self, source: &Source, target: &str) -> Result<ConvertOptions, Failure> {
        if self.into {
            let options = self.parsed.has("target-image-opts");
            let format = (!options).then(|| self.format.unwrap_or("raw"));
            let image = Named { text: target, format, options }.parse()?;
            return self.existing(source, &image);
        }
        let format = self.format.unwrap_or("raw");
        let table = table(format)?;
        let path = target_path(target)?;
        let mut wanted = Wanted::new(table, self.values.clone())?;
        wanted.set_backing(self.parsed.last("backing"), self.parsed.last("backing-format"))?;
        let compress = self.compression(table.format, wanted.get("compression_type"))?;
        let backing = self.backing(source, &path, &wanted)?;
        let creating = |failure: Failure| failure.within(&converting(target, format));
        let driver = table.driver()?;
        let options = wanted.options(&self.objects, source.bytes()).map_err(creating)?;
        check_host_device(table, &path).map_err(creating)?;
        let (backing, reference) = backing.unzip();
        let mut goal = if is_device(&path) {
            let mut goal = self.write_to(path.clone(), driver.name());
            goal.keys.extend(options.key().cloned());
            if driver.name() != "raw" {
                let base =
                    reference.map(|reference| NewBacking::new(reference.name, reference.format));
                let bytes = whole_sectors(source.bytes());
                create_at(&path, driver, bytes, options, base).map_err(creating)?;
            }
            goal
        } else {
            // Sources are locked otherwise.
            if self.parsed.has("force-share") {
                let layers = source.disks().iter().flat_map(Disk::layers);
                refuse_own_source(&path, layers.map(|layer| layer.path())).map_err(creating)?;
            }
            ConvertOptions::new(Destination::New(
                NewImage::new(path, driver.name())
                    .options(options)
                    .backing(reference)
                    .cache(self.cache)
                    .in_place_if_needed(true),
            ))
        };
        (goal.compress, goal.backing) = (compress, backing);
        Ok(goal)
    }

    fn write_to(&self, path: PathBuf, format: &str) -> ConvertOptions {
        let existing = ExistingImage::new(path).format(Some(format.to_owned()));
        ConvertOptions::new(Destination::Into(existing.cache(self.cache).refs(references())))
    }

    /// `-n`: the target exists.
    fn existing(&self, source: &Source, image: &Image) -> Result<ConvertOptions, Failure> {
        check_writable(image)?;
        if image.backing.is_some() || image.data_file.is_some() {
            let why = "vdkit writes into an image with the files that it names itself";
            return Err(could_not_open(&image.typed, why));
        }
        if matches!(image.place, Place::Null(_)) {
            return Ok(ConvertOptions::new(Destination::Null));
        }
        let path = image.opened(true);
        let raw =
            image.format.as_deref().is_some_and(|format| format == "raw" || is_protocol(format));
        if raw && matches!(image.place, Place::Nbd(_)) && !self.parsed.has("backing") {
            // It is opened once: some servers end after their first connection.
            let mut goal = self.write_to(path, "raw");
            goal.compress = self.compression("raw", None)?;
            return Ok(goal);
        }
        // Read without a lock first: the writer's follows.
        let reading = Access { share: true, ..Access::read() };
        let options = open_options(image, reading, &self.objects)?;
        let disk = open_with(image, &options)?;
        if disk.guest_bytes() < source.bytes() {
            return Err(Failure::new("output file is smaller than input file"));
        }
        let info = disk.layers()[0].info();
        let mut goal = self.write_to(path, info.format);
        goal.backing = self.backing_of(&disk, source)?;
        goal.compress = self.compression(info.format, info.compression)?;
        goal.keys = options.keys;
        Ok(goal)
    }

    /// `-B` beside `-n`: the backing image of an existing target, if that is the one that is named and
    /// the source stands on an image. What the source does not hide of that is not copied then.
    /// Otherwise everything is copied, which is right whatever the target stands on.
    fn backing_of(&self, target: &Disk, source: &Source) -> Result<Option<Backing>, Failure> {
        let Some(name) = self.parsed.last("backing") else { return Ok(None) };
        let [from] = source.disks() else { return Err(concatenated()) };
        let (Some(own), true) = (target.layers().get(1), from.layers().len() > 1) else {
            return Ok(None);
        };
        let folder = target.layers()[0].path().parent().unwrap_or(Path::new(""));
        let named = folder.join(name);
        if !same_file(&named, own.path()) {
            return Ok(None);
        }
        Ok(Some(Backing::new(own.path(), OpenOptions::read_only()).trusted(true)))
    }

    /// How data is compressed in a format; `method` is the image's own.
    fn compression(
        &self,
        format: &str,
        method: Option<&str>,
    ) -> Result<Option<CompressionSpec>, Failure> {
        match format {
            _ if !self.compress => Ok(None),
            "qcow2" => {
                let codec = if method == Some("zstd") { Codec::Zstd } else { Codec::Deflate };
                Ok(Some(CompressionSpec { codec, level: None }))
            }
            // A stream is always compressed, and other subformats never.
            "vmdk" | "qcow" => Ok(None),
            _ => Err(Failure::new("Compression not supported for this file format")),
        }
    }

    fn backing(
        &self,
        source: &Source,
        target: &Path,
        wanted: &Wanted,
    ) -> Result<Option<(Backing, vdkit::BackingRef)>, Failure> {
        let Some(name) = wanted.get("backing_file") else { return Ok(None) };
        if source.disks().len() > 1 {
            return Err(concatenated());
        }
        let Some(format) = wanted.get("backing_fmt") else {
            return Err(Failure::new("Use of backing file requires explicit backing format"));
        };
        let driver = crate::open::driver(format)
            .ok_or_else(|| Failure::new(format!("Unknown driver '{format}'")))?;
        let new = NewBacking::new(name, Some(driver.name().into()));
        let opening = OpenOptions::read_only().refs(references()).lock(true);
        let found = new
            .find(&registry(), target, &opening)
            .map_err(|error| could_not_open(&target.display().to_string(), words(&error)))?;
        let opening = opening.of_other(found.reference.format.clone());
        Ok(Some((Backing::new(found.path, opening).trusted(true), found.reference)))
    }
}

/// Whether a target is a block device, or an NBD export, which is written like one.
pub fn is_device(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    registry().protocol_of(path).is_some()
        || path.metadata().is_ok_and(|found| found.file_type().is_block_device())
}
