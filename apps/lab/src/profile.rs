//! The loads: what a guest does with its disk.

use crate::plan::Effort;

/// A load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Profile {
    /// Its name in plans.
    pub name: &'static str,
    pub about: &'static str,
    pub kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Requests, made by fio if it can use the front.
    Load(Load),
    /// Several loads that together give one score each for reads, writes and both.
    Scores,
    /// The whole disk is converted to nothing.
    Convert,
    /// The image is opened and a few bytes are read.
    Open,
    /// A tree of files is copied into a file system on the disk, twice.
    Install,
    /// Many images are opened and read at once, as when guests boot after a power failure.
    Boot,
    /// The file system below the image fills while a client writes.
    NoSpace,
}

/// Requests of one size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// fio's `rw`.
    pub rw: Pattern,
    /// Size of a request.
    pub block: u64,
    /// Requests in flight per job.
    pub depth: u32,
    /// Number of concurrent jobs, each with its own part of the disk.
    pub jobs: u32,
    /// fio's I/O engine for files; NBD has an engine of its own.
    pub engine: &'static str,
    /// How often the load syncs.
    pub sync: Sync,
    /// Whether the load writes a fixed number of bytes and syncs at the end, instead of running for
    /// a time.
    pub to_the_end: bool,
    /// Whether each block is written only once.
    pub once: bool,
    /// Whether the whole disk is written beforehand.
    pub rewrites: bool,
}

/// Order and direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Sequential.
    Read,
    /// Sequential.
    Write,
    RandomRead,
    RandomWrite,
    /// Random; the number is the percentage of reads.
    RandomMix(u8),
}

impl Pattern {
    /// fio's word for the pattern.
    pub fn word(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::RandomRead => "randread",
            Self::RandomWrite => "randwrite",
            Self::RandomMix(_) => "randrw",
        }
    }

    /// Whether the disk must have content beforehand.
    pub fn reads(self) -> bool {
        matches!(self, Self::Read | Self::RandomRead | Self::RandomMix(_))
    }
}

/// How often writes are made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sync {
    /// Only at the end.
    Never,
    /// `fsync` after this number of writes.
    Fsync(u32),
    /// `fdatasync` after this number of writes.
    Fdatasync(u32),
}

const BASE: Load = Load {
    rw: Pattern::Read,
    block: 4 << 10,
    depth: 1,
    jobs: 1,
    engine: "libaio",
    sync: Sync::Never,
    to_the_end: false,
    once: false,
    rewrites: false,
};

/// Sequential requests of 1 MiB.
const SEQ: Load = Load { block: 1 << 20, ..BASE };
const SEQ_Q8: Load = Load { depth: 8, ..SEQ };

const RND: Load = Load { rw: Pattern::RandomRead, ..BASE };
const RND_Q32: Load = Load { depth: 32, ..RND };
const RND_64K: Load = Load { block: 64 << 10, depth: 4, ..RND };
const RND_1M: Load = Load { block: 1 << 20, ..RND };

/// The load with writes in place of its reads.
const fn writes(load: Load) -> Load {
    let rw = if matches!(load.rw, Pattern::Read) { Pattern::Write } else { Pattern::RandomWrite };
    Load { rw, ..load }
}

/// The whole part of the disk in random order, each block once, and a sync.
const ALL: Load = Load { to_the_end: true, once: true, ..writes(RND_64K) };

/// Sixteen writers, each of which waits for every write and every sync.
const SIXTEEN: Load = Load { jobs: 16, engine: "sync", ..writes(RND) };

const fn profile(name: &'static str, about: &'static str, kind: Kind) -> Profile {
    Profile { name, about, kind }
}

const fn load(name: &'static str, about: &'static str, load: Load) -> Profile {
    profile(name, about, Kind::Load(load))
}

/// Every load that plans may name.
pub static PROFILES: &[Profile] = &[
    load("seq1m-q8-read", "1 MiB sequential, 8 in flight", SEQ_Q8),
    load("seq1m-q8-write", "1 MiB sequential, 8 in flight", writes(SEQ_Q8)),
    load("seq1m-q1-read", "1 MiB sequential, 1 in flight", SEQ),
    load("seq1m-q1-write", "1 MiB sequential, 1 in flight", writes(SEQ)),
    load("rnd4k-q32-read", "4 KiB random, 32 in flight", RND_Q32),
    load("rnd4k-q32-write", "4 KiB random, 32 in flight", writes(RND_Q32)),
    load("rnd4k-q1-read", "4 KiB random, 1 in flight", RND),
    load("rnd4k-q1-write", "4 KiB random, 1 in flight", writes(RND)),
    load("rnd64k-read", "64 KiB random, 4 in flight", RND_64K),
    load("rnd64k-write", "64 KiB random, 4 in flight", writes(RND_64K)),
    load("rnd1m-read", "1 MiB random, 1 in flight", RND_1M),
    load("rnd1m-write", "1 MiB random, 1 in flight", writes(RND_1M)),
    load(
        "mixed-fsync",
        "4 KiB random, 70 % reads, 8 in flight, an fsync after every 32 writes",
        Load { rw: Pattern::RandomMix(70), depth: 8, sync: Sync::Fsync(32), ..BASE },
    ),
    load(
        "sync16",
        "4 KiB random by 16 writers with 1 in flight each, an fsync at the end",
        Load { to_the_end: true, ..SIXTEEN },
    ),
    load(
        "libaio16",
        "4 KiB random by 16 writers with 16 in flight each, an fsync at the end",
        Load { jobs: 16, depth: 16, to_the_end: true, ..writes(RND) },
    ),
    load(
        "durable16",
        "4 KiB random by 16 writers, an fsync after each write",
        Load { sync: Sync::Fsync(1), ..SIXTEEN },
    ),
    load(
        "batch16",
        "4 KiB random by 16 writers, an fsync after every 32 writes of a writer",
        Load { sync: Sync::Fsync(32), ..SIXTEEN },
    ),
    load("first-write", "64 KiB random, 4 in flight, each block once, on an empty disk", ALL),
    load(
        "rewrite",
        "64 KiB random, 4 in flight, each block once, on a full disk",
        Load { rewrites: true, ..ALL },
    ),
    load(
        "first-write-4k",
        "4 KiB random, 4 in flight, each block once, on an empty disk",
        Load { block: 4 << 10, ..ALL },
    ),
    load(
        "rewrite-4k",
        "4 KiB random, 4 in flight, each block once, on a full disk",
        Load { block: 4 << 10, rewrites: true, ..ALL },
    ),
    load(
        "database",
        "8 KiB random, 1 in flight, an fdatasync after each write",
        Load { block: 8 << 10, engine: "sync", sync: Sync::Fdatasync(1), ..writes(RND) },
    ),
    profile(
        "scores",
        "sequential 1 MiB and random 4 KiB, 64 KiB and 1 MiB, reads and writes, as scores",
        Kind::Scores,
    ),
    profile("convert", "the whole disk is converted, and the output is discarded", Kind::Convert),
    profile("open", "the image is opened and 4 KiB are read, with cold caches", Kind::Open),
    profile(
        "install",
        "a tree of files is copied into a file system on the disk, twice",
        Kind::Install,
    ),
    profile(
        "boot",
        "several overlays of one image are opened and read at once, with cold caches",
        Kind::Boot,
    ),
    profile(
        "nospace",
        "the file system below the image fills while a client writes, and has free space again later",
        Kind::NoSpace,
    ),
];

/// The load of this name.
pub fn find(name: &str) -> Option<&'static Profile> {
    PROFILES.iter().find(|profile| profile.name == name)
}

/// The parts of [`Kind::Scores`]: key and load.
pub const SCORE_LOADS: &[(&str, Load)] = &[
    ("seq-read", SEQ_Q8),
    ("seq-write", writes(SEQ_Q8)),
    ("rnd4k-read", RND_Q32),
    ("rnd4k-write", writes(RND_Q32)),
    ("rnd64k-read", RND_64K),
    ("rnd64k-write", writes(RND_64K)),
    ("rnd1m-read", RND_1M),
    ("rnd1m-write", writes(RND_1M)),
];

impl Profile {
    /// Upper bound of the bytes that one round needs, without the format's tables.
    pub fn bytes(&self, effort: &Effort) -> u64 {
        match self.kind {
            Kind::Load(Load { to_the_end: true, rewrites: false, jobs, .. }) => {
                effort.disk.min(u64::from(jobs).saturating_mul(effort.bytes))
            }
            // The tree twice, and the file system's metadata.
            Kind::Install => effort.disk.min(effort.bytes.saturating_mul(3)),
            Kind::NoSpace => crate::engine::nospace::POOL_BYTES,
            _ => effort.disk,
        }
    }
}
