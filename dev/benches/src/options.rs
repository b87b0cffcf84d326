//! What to measure.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::groups::file::pairs;
use crate::images::{SHAPES, Shape};

/// A set of cells, in the order of the document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Group {
    /// Conversion to nothing: what reading and deciding cost.
    Null,
    /// Conversion to a real file, against qemu-img's flags and cp.
    File,
    /// Checking an image with much metadata.
    Check,
    /// Compression of a real file system's image, and reading it back.
    Compress,
    /// Encrypted images: read, written over and made.
    Encryption,
    /// Serving a disk over NBD, beside qemu-nbd and nbdkit, driven by fio.
    Serve,
    /// Writes over NBD that are durable when they are answered, where syncs take longer and longer.
    Durable,
}

impl Group {
    /// As typed and as stored.
    pub fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::File => "file",
            Self::Check => "check",
            Self::Compress => "compress",
            Self::Encryption => "encryption",
            Self::Serve => "serve",
            Self::Durable => "durable",
        }
    }
}

/// Where the images are, in the order of the runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FileSystem {
    /// Memory.
    Tmpfs,
    /// A loop device with xfs (reflinks).
    Xfs,
    /// A loop device with ext4.
    Ext4,
    /// A loop device with btrfs (reflinks).
    Btrfs,
    /// The work directory itself, whatever it is on; needs no root.
    Host,
}

impl FileSystem {
    /// As typed and as stored.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tmpfs => "tmpfs",
            Self::Xfs => "xfs",
            Self::Ext4 => "ext4",
            Self::Btrfs => "btrfs",
            Self::Host => "host",
        }
    }

    /// Whether files can share blocks there.
    pub fn reflinks(self) -> bool {
        matches!(self, Self::Xfs | Self::Btrfs)
    }
}

/// How much of the classic images holds data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Content {
    /// 64 KiB of data every 32 MiB.
    Sparse,
    /// All but 64 KiB every 32 MiB.
    Full,
    /// A qcow2 with every cluster mapped and none written (preallocation=metadata).
    Metadata,
}

impl Content {
    /// As typed and as stored.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sparse => "sparse",
            Self::Full => "full",
            Self::Metadata => "metadata",
        }
    }
}

/// The command line.
#[derive(Debug, Parser)]
#[command(name = "vdkit-bench", about = "Times vdkit beside qemu-img and cp, run by run in turn")]
pub struct Arguments {
    /// Groups of cells
    #[arg(long = "group", value_enum, value_delimiter = ',')]
    groups: Vec<Group>,
    /// File systems (mounted for the run: needs root, except `host`); each group has its own default
    #[arg(long = "fs", value_enum, value_delimiter = ',')]
    file_systems: Vec<FileSystem>,
    /// Images of the groups null and file
    #[arg(long = "image", value_enum, value_delimiter = ',')]
    contents: Vec<Content>,
    /// Only jobs whose name has this in it, such as `raw→qcow2`, `zstd` or `QD32`
    #[arg(long)]
    job: Option<String>,
    /// Timed rounds after the one to warm up [default: 7; compress: 3; durable: 5]
    #[arg(long)]
    runs: Option<usize>,
    /// Small images and few rounds: does everything work? The numbers mean little
    #[arg(long)]
    quick: bool,
    /// MiB of the classic images [default: 2048; quick: 256]
    #[arg(long)]
    image_mib: Option<u64>,
    /// MiB of program files in the real image [default: 7168; quick: 256]
    #[arg(long)]
    real_mib: Option<u64>,
    /// Folders whose files fill the real image, again and again until it is full
    #[arg(long, value_delimiter = ',', default_values = ["/usr", "/opt"])]
    real_from: Vec<PathBuf>,
    /// The command to measure [default: target/release/vdkit]
    #[arg(long)]
    vdkit: Option<PathBuf>,
    /// The command to measure it beside
    #[arg(long, default_value = "qemu-img")]
    qemu_img: PathBuf,
    /// Scratch folder; several times the images' size is needed [default: target/bench-work]
    #[arg(long)]
    work: Option<PathBuf>,
    /// Where the raw samples go [default: target/bench/TIME.json]
    #[arg(long)]
    json: Option<PathBuf>,
    /// Rewrites the tables between the markers of this document
    #[arg(long)]
    update: Option<PathBuf>,
    /// Measures nothing; renders these files of samples, later ones replacing cells of earlier ones
    #[arg(long, num_args = 1.., value_name = "JSON")]
    render: Vec<PathBuf>,
}

/// The command line, with defaults filled in.
#[derive(Debug)]
pub struct Options {
    groups: Vec<Group>,
    chosen_file_systems: Vec<FileSystem>,
    /// File systems in the order of their turn.
    pub file_systems: Vec<FileSystem>,
    contents: Vec<Content>,
    job: Option<String>,
    runs: Option<usize>,
    /// A trial of the harness rather than a measurement.
    pub quick: bool,
    /// Bytes of the classic images.
    pub image_bytes: u64,
    /// Bytes of files in the real image.
    pub real_bytes: u64,
    /// Where those files come from.
    pub real_from: Vec<PathBuf>,
    /// The program under test.
    pub vdkit: PathBuf,
    /// Its peer.
    pub qemu_img: PathBuf,
    /// Scratch folder.
    pub work: PathBuf,
    /// Raw samples.
    pub json: PathBuf,
    /// The document to update.
    pub update: Option<PathBuf>,
    /// Samples to render instead of measuring.
    pub render: Vec<PathBuf>,
}

fn chosen_or_all<T: ValueEnum>(chosen: Vec<T>) -> Vec<T> {
    if chosen.is_empty() { T::value_variants().to_vec() } else { chosen }
}

impl Options {
    /// Fills in defaults and checks that the programs are there.
    pub fn new(arguments: Arguments) -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize()?;
        let target =
            std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
        let quick = arguments.quick;
        let mib = |given: Option<u64>, full: u64, small: u64| {
            given.unwrap_or(if quick { small } else { full }) << 20
        };
        let options = Self {
            groups: chosen_or_all(arguments.groups),
            file_systems: chosen_or_all(arguments.file_systems.clone()),
            chosen_file_systems: arguments.file_systems,
            contents: chosen_or_all(arguments.contents),
            job: arguments.job,
            runs: arguments.runs,
            quick,
            image_bytes: mib(arguments.image_mib, 2048, 256),
            real_bytes: mib(arguments.real_mib, 7168, 256),
            real_from: arguments.real_from,
            vdkit: arguments.vdkit.unwrap_or_else(|| target.join("release/vdkit")),
            qemu_img: arguments.qemu_img,
            work: arguments.work.unwrap_or_else(|| target.join("bench-work")),
            json: arguments.json.unwrap_or_else(|| {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                target.join(format!("bench/{}.json", now.as_secs()))
            }),
            update: arguments.update,
            render: arguments.render,
        };
        if options.image_bytes < 64 << 20 || !options.image_bytes.is_multiple_of(32 << 20) {
            bail!("--image-mib must be a multiple of 32, at least 64");
        }
        if options.runs == Some(0) {
            bail!("--runs must be at least 1");
        }
        if options.render.is_empty() && !options.vdkit.is_file() {
            bail!("{} is not there: run `make build` first", options.vdkit.display());
        }
        Ok(options)
    }

    /// The chosen groups that have cells on this file system.
    pub fn groups_on(&self, file_system: FileSystem) -> Vec<Group> {
        let default_on = |group| match group {
            Group::Null => {
                matches!(file_system, FileSystem::Tmpfs | FileSystem::Xfs | FileSystem::Ext4)
            }
            Group::File => file_system != FileSystem::Host,
            Group::Check => matches!(file_system, FileSystem::Tmpfs | FileSystem::Ext4),
            Group::Compress => file_system == FileSystem::Host,
            Group::Encryption => file_system == FileSystem::Tmpfs,
            Group::Serve | Group::Durable => {
                matches!(file_system, FileSystem::Tmpfs | FileSystem::Ext4)
            }
        };
        self.groups
            .iter()
            .copied()
            .filter(
                |&group| {
                    if self.chosen_file_systems.is_empty() { default_on(group) } else { true }
                },
            )
            .collect()
    }

    /// Whether cells of this content are wanted.
    pub fn wants(&self, content: Content) -> bool {
        self.contents.contains(&content)
    }

    /// Whether this job is wanted.
    pub fn wants_job(&self, job: &str) -> bool {
        self.job.as_ref().is_none_or(|wanted| job.contains(wanted.as_str()))
    }

    /// Whether cells from or to a shape are wanted at all: some only where a job is named.
    pub fn wants_some_of(&self, shape: &Shape) -> bool {
        !shape.asked || self.job.is_some()
    }

    /// Whether some wanted job may read images of this shape.
    pub fn wants_shape(&self, name: &str) -> bool {
        let known = SHAPES.iter().find(|shape| shape.name == name);
        let pairs = SHAPES.iter().map(|shape| shape.name).filter(|target| pairs(name, target));
        let mut targets = pairs.chain(["null"]);
        known.is_none_or(|shape| self.wants_some_of(shape))
            && targets.any(|target| self.wants_job(&format!("{name}→{target}")))
    }

    /// Timed rounds of a cell in this group.
    pub fn runs(&self, group: Group) -> usize {
        self.runs.unwrap_or(match (self.quick, group) {
            (true, _) => 2,
            (false, Group::Compress) => 3,
            (false, Group::Durable) => 5,
            (false, _) => 7,
        })
    }

    /// Room that the largest group needs on a mounted scratch file system.
    pub fn scratch_bytes(&self) -> u64 {
        let classic = |g: &Group| matches!(g, Group::Null | Group::File | Group::Encryption);
        let classic = if self.groups.iter().any(classic) { self.image_bytes * 5 } else { 0 };
        let real = if self.groups.contains(&Group::Compress) { self.real_bytes * 4 } else { 0 };
        // File systems want some room of their own; the files behind them are sparse.
        let serves = |g: &Group| matches!(g, Group::Serve | Group::Durable);
        let served = if self.groups.iter().any(serves) { 4 << 30 } else { 0 };
        classic.max(real).max(served) + (1 << 30)
    }
}
