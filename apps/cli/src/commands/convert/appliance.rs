//! Conversion from and to appliances (OVA).

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use vdkit::jobs::{
    self, ApplianceReport, Extraction, Incoming, NewAppliance, Preset, Source, open_packaged,
};
use vdkit::ova::{Machine, OPTIONS, Package};
use vdkit::{Codec, CompressionSpec, Disk, Monitor, OpenOptions, Options, Registry};

use super::{Compress, ConvertArgs};
use crate::failure::Failure;
use crate::incoming::{OVA, Opened, Opening, STANDARD, names_package, spool_folder};

/// Default format of the disks extracted from an appliance.
const FORMAT: &str = "qcow2";

impl ConvertArgs {
    /// Whether the target is a new appliance.
    pub(super) fn makes_appliance(&self, target: &Path) -> bool {
        match self.target_format.as_deref() {
            Some(format) => format == OVA,
            None => !self.into && names_package(target) && !super::super::is_device(target),
        }
    }

    /// Options for opening the disks of an appliance. The format given by the user is that of the
    /// appliance, so it is left out.
    fn options_within(&self) -> OpenOptions {
        let options = self.source_options();
        let format = options.format.clone().filter(|format| format != OVA);
        options.maybe_format(format)
    }

    /// Converts the selected disks of an appliance.
    pub(super) fn extract(
        &self,
        registry: &Registry,
        package: &Package,
        target: &Path,
        monitor: &Monitor<'_>,
    ) -> Result<ApplianceReport, Failure> {
        if !self.parent.parent.is_empty() || self.backing.is_some() {
            let text = "--parent and --backing have no meaning for the disks of an appliance";
            return Err(Failure::usage(text));
        }
        warn_unverified(package, monitor);
        let wanted = self.wanted(package, monitor)?;
        let folder = target.is_dir();
        let null = target.as_os_str() == "null:";
        if wanted.len() != 1 && !folder && !null {
            let text = format!("{}: has {} disks, and one target", package.name(), wanted.len());
            let hint = format!("choose one with --disk, or name a folder: {}", package.listed());
            return Err(Failure::usage(text).hint(hint));
        }
        if !folder && target.as_os_str().as_encoded_bytes().ends_with(b"/") {
            return Err(Failure::usage(format!("{}: there is no such folder", target.display())));
        }
        let targets = match folder {
            true => self.targets_in(target, package, &wanted)?,
            false => vec![target.to_owned(); wanted.len()],
        };
        let (spool, options) = (spool_folder(target), self.options_within());
        let mut parts = Vec::with_capacity(wanted.len());
        for (&disk, target) in wanted.iter().zip(&targets) {
            let opened = open_packaged(registry, package, disk, &options, &spool, monitor)?;
            let source = Source::new(vec![opened]);
            let options = self.job(registry, target, source.bytes(), &monitor.cancel)?;
            parts.push(Extraction::new(disk, source, options));
        }
        let threads = self.threads.map(usize::from);
        Ok(jobs::extract(registry, package, parts, threads, monitor)?)
    }

    /// The disk that the user named, or else every disk that is stored in a file.
    fn wanted(&self, package: &Package, monitor: &Monitor<'_>) -> Result<Vec<usize>, Failure> {
        if let Some(which) = &self.disk {
            return Ok(vec![package.find(which)?]);
        }
        let (full, empty): (Vec<_>, Vec<_>) =
            (0..package.disks().len()).partition(|&index| package.disks()[index].file.is_some());
        for index in empty {
            let disk = &package.disks()[index].disk;
            let size = disk.capacity.map_or("SIZE".to_owned(), |bytes| bytes.to_string());
            monitor.progress.message(&format!(
                "{}: its disk '{}' is empty and left out; 'vdkit create FILE {size}' makes one",
                package.name(),
                disk.id
            ));
        }
        Ok(full)
    }

    /// The target file of each disk, in a folder.
    fn targets_in(
        &self,
        folder: &Path,
        package: &Package,
        wanted: &[usize],
    ) -> Result<Vec<PathBuf>, Failure> {
        let preset = self.made_for.map(Preset::format);
        let format = self.target_format.as_deref().or(preset).unwrap_or(FORMAT);
        let ending = match vdkit::format(format)?.name() {
            "vpc" => "vhd",
            other => other,
        };
        let stems = wanted.iter().map(|&index| {
            let stem = package.disks()[index].safe_stem();
            stem.unwrap_or_else(|| format!("disk{}", index + 1))
        });
        Ok(distinct(stems, ending).into_iter().map(|name| folder.join(name)).collect())
    }

    /// Creates an appliance from the sources.
    pub(super) fn pack(
        &self,
        registry: &Registry,
        sources: &[PathBuf],
        target: &Path,
        monitor: &Monitor<'_>,
    ) -> Result<ApplianceReport, Failure> {
        self.refuse_for_appliances(target)?;
        let stem = target.file_stem().and_then(|stem| stem.to_str()).unwrap_or(OVA);
        let machine = self.machine(stem)?;
        let compress = self.compress.map(method).transpose()?;
        let disks = self.disks_to_pack(registry, sources, target, monitor)?;
        let mut new = NewAppliance::new(target, plain(stem), machine);
        new.modified = newest(sources);
        new.compress = compress.flatten();
        new.threads = self.threads.map(usize::from);
        new.detect_zeroes = self.detect_zeros.0;
        new.verify = self.verify;
        new.rate = self.rate;
        new.cache = self.cache;
        Ok(jobs::pack(registry, &disks, &new, monitor)?)
    }

    fn machine(&self, name: &str) -> Result<Machine, Failure> {
        let texts = self.options.options.iter().map(String::as_str);
        let options = Options::parse(OVA, OPTIONS, texts)?;
        Ok(Machine::new(&options, name)?)
    }

    /// Opens each source as a disk. A source that is an appliance contributes each of its disks.
    fn disks_to_pack(
        &self,
        registry: &Registry,
        sources: &[PathBuf],
        target: &Path,
        monitor: &Monitor<'_>,
    ) -> Result<Vec<Source>, Failure> {
        let (spool, options) = (spool_folder(target), self.source_options());
        let checksum = self.checksum.as_ref();
        let opening =
            Opening { registry, options: &options, checksum, spool: &spool, allow_empty: false };
        let mut disks: Vec<Disk> = Vec::with_capacity(sources.len());
        for path in sources {
            match opening.open(path, monitor)? {
                Opened::Image(_) if self.disk.is_some() => return Err(Self::no_appliance(path)),
                Opened::Image(Incoming::Disk(disk)) => disks.push(*disk),
                Opened::Image(Incoming::Raw(raw)) => {
                    disks.push(raw.into_disk(registry, &spool, monitor)?);
                }
                Opened::Package(package) => {
                    warn_unverified(&package, monitor);
                    let within = self.options_within();
                    for index in self.wanted(&package, monitor)? {
                        package.verify(index, &monitor.cancel, &mut |_| {})?;
                        let disk =
                            open_packaged(registry, &package, index, &within, &spool, monitor)?;
                        disks.push(disk);
                    }
                }
            }
        }
        Ok(disks.into_iter().map(|disk| Source::new(vec![disk])).collect())
    }

    /// Refuses options that would have no effect.
    fn refuse_for_appliances(&self, target: &Path) -> Result<(), Failure> {
        if target == Path::new(STANDARD) || target.as_os_str() == "null:" {
            let why = "sizes and hashes of the disks stand before them";
            return Err(Failure::usage(format!("an appliance goes into a file: {why}")));
        }
        let given = [
            ("--into", self.into),
            ("--backing", self.backing.is_some()),
            ("--bitmaps", self.bitmaps),
            ("--target-key-…", self.target_key.key().is_some()),
        ];
        super::super::refuse_given(&given, "for an appliance")?;
        match self.made_for {
            None | Some(Preset::Vmware | Preset::Virtualbox | Preset::Aws) => Ok(()),
            Some(other) => Err(Failure::usage(format!(
                "{other} takes no appliances; vmware, virtualbox and aws do"
            ))),
        }
    }
}

/// Warns of what cannot be verified: a missing manifest, or a certificate.
fn warn_unverified(package: &Package, monitor: &Monitor<'_>) {
    if package.manifest().is_none() {
        let text = "has no manifest, so nothing says whether its files are whole";
        monitor.progress.message(&format!("{}: {text}", package.name()));
    }
    if let Some(certificate) = package.certificate() {
        let text = format!("its certificate '{certificate}' is not verified");
        monitor.progress.message(&format!("{}: {text}", package.name()));
    }
}

/// The zlib level of an appliance's disks; none for the default. Refuses other methods.
fn method(wanted: Compress) -> Result<Option<CompressionSpec>, Failure> {
    match wanted {
        Compress::Default => Ok(None),
        Compress::Method(spec) if spec.codec == Codec::Deflate => Ok(Some(spec)),
        Compress::Method(spec) => {
            let text =
                format!("the disks of an appliance are compressed by zlib, not {}", spec.codec);
            Err(Failure::usage(text))
        }
    }
}

/// File names of these stems. Of stems that are equal, each after the first gets a number.
fn distinct(stems: impl Iterator<Item = String>, ending: &str) -> Vec<String> {
    let mut taken = HashSet::new();
    // The number that each stem got last: thousands of disks may have the same.
    let mut numbers: HashMap<String, u32> = HashMap::new();
    let name = |stem: String| {
        let last = numbers.entry(stem.clone()).or_insert(0);
        loop {
            *last += 1;
            let name = match *last {
                1 => format!("{stem}.{ending}"),
                number => format!("{stem}-{number}.{ending}"),
            };
            if taken.insert(name.clone()) {
                return name;
            }
        }
    };
    stems.map(name).collect()
}

/// Reduces a name to letters and digits that every unpacker accepts.
fn plain(stem: &str) -> String {
    let fine = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let name: String = stem.chars().map(|c| if fine(c) { c } else { '_' }).take(64).collect();
    let name = name.trim_start_matches(['.', '-']);
    if name.is_empty() { OVA.to_owned() } else { name.to_owned() }
}

/// The latest modification time of the sources, in seconds since 1970. Returns the current time if
/// a source is not a regular file.
fn newest(sources: &[PathBuf]) -> u64 {
    let seconds = |time: SystemTime| time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let of = |path: &PathBuf| path.metadata().and_then(|found| found.modified()).ok().map(seconds);
    let times: Option<Vec<u64>> = sources.iter().map(of).collect();
    times.and_then(|times| times.into_iter().max()).unwrap_or_else(|| seconds(SystemTime::now()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use vdkit_testkit::processor_time;

    use super::*;

    #[test]
    fn targets_of_equal_names_are_numbered_soon() {
        let names = |stems: &[&str]| distinct(stems.iter().map(|&stem| stem.to_owned()), "raw");
        let found = names(&["a", "a", "a-2", "b", "a"]);
        assert_eq!(found, ["a.raw", "a-2.raw", "a-2-2.raw", "b.raw", "a-3.raw"]);
        let start = processor_time();
        assert_eq!(names(&["a"; 4096])[4095], "a-4096.raw");
        let took = processor_time() - start;
        assert!(took < Duration::from_secs(3), "{took:?}");
    }

    #[test]
    fn names_within_an_appliance_are_plain() {
        for (stem, wanted) in [
            ("my-vm_1.2", "my-vm_1.2"),
            ("My machine", "My_machine"),
            ("..x", "x"),
            ("-rf", "rf"),
            ("", "ova"),
            ("...", "ova"),
            ("\u{e4}/b", "__b"),
        ] {
            assert_eq!(plain(stem), wanted, "{stem}");
        }
        assert_eq!(plain(&"x".repeat(300)).len(), 64);
    }
}
