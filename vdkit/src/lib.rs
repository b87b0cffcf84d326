//! vdkit, a virtual-disk engine: reads, writes, converts, checks and compares disk images.
//!
//! Programs import this crate. It re-exports what they need of vdkit's other crates, and semantic
//! versioning covers these names alone. A program that implements a format of its own imports
//! `vdkit-block` too.
//!
//! | what | where |
//! |---|---|
//! | one flat disk over a chain of images | [`Disk`], [`OpenOptions`]; as a file: [`Disk::stream`]; in the background: [`Queue`] |
//! | an image's metadata | [`describe_chain`], [`ImageInfo`] |
//! | jobs: convert, compare, check, create, resize, measure | [`jobs`] |
//! | a disk for a running guest: the common part of all servers, NBD, and vhost-user | `serve`, `nbd`, `vhost_user` (features) |
//! | the formats and their options | [`FORMATS`], [`registry`], [`FormatDriver`] |
//! | storages of images: files, devices and memory | [`storage`], [`Storage`] |
//! | exports of NBD servers, as images and as storages | `nbd_client` (feature) |
//! | appliances (OVA): disks in one tar file | [`ova`], [`jobs::extract`], [`jobs::pack`] |
//! | errors, and their classes, from which exit codes derive | [`Error`], [`ErrorKind`] |
//!
//! # Creating, writing and reading an image
//! ```
//! use vdkit::jobs::{CreateOptions, create};
//! use vdkit::{Disk, GuestOffset, Monitor, OpenOptions};
//!
//! # fn main() -> vdkit::Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let path = folder.path().join("disk.qcow2");
//! let registry = vdkit::registry();
//! let new = CreateOptions::new(&path, vdkit::format("qcow2")?).guest_bytes(64 << 20);
//! create(&registry, &new, &Monitor::default())?;
//!
//! let disk = Disk::open(&registry, &path, &OpenOptions::read_write())?;
//! disk.write_at(b"hello", GuestOffset(1 << 20))?;
//! disk.flush()?;
//!
//! let mut bytes = [0; 7];
//! disk.read_at(&mut bytes, GuestOffset((1 << 20) - 1))?;
//! assert_eq!(&bytes, b"\0hello\0");
//! # Ok(())
//! # }
//! ```
//! More of this kind is in `docs/library.md`, and each job has a program in `examples/`.
//!
//! # Images are untrusted
//! Opening an image reads only its header and top table, follows references only as far as
//! [`OpenOptions::refs`] allows, and locks files as QEMU does. A damaged or hostile image causes an
//! error with the location of the damage.
//!
//! # Describing, without opening other files
//! ```
//! use vdkit::{BackingChoice, OpenOptions};
//!
//! # fn main() -> vdkit::Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let path = folder.path().join("disk.img");
//! # std::fs::write(&path, [0; 1024]).unwrap();
//! let options = OpenOptions::read_only().backing(BackingChoice::Ignore);
//! let report = vdkit::describe_chain(&vdkit::registry(), &path, &options)?;
//! assert_eq!(report.links[0].info.format, "raw");
//! assert_eq!(report.links[0].info.virtual_size, 1024);
//! # Ok(())
//! # }
//! ```
//!
//! # Converting
//! ```
//! use vdkit::jobs::{CompareOptions, ConvertOptions, Destination, NewImage, Source, compare, convert};
//! use vdkit::{Disk, Monitor, OpenOptions};
//!
//! # fn main() -> vdkit::Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let (from, to) = (folder.path().join("disk.raw"), folder.path().join("disk.qcow2"));
//! # std::fs::write(&from, vec![7; 1 << 20]).unwrap();
//! let registry = vdkit::registry();
//! let source = Source::new(vec![Disk::open(&registry, &from, &OpenOptions::read_only())?]);
//! let options = ConvertOptions::new(Destination::New(NewImage::new(&to, "qcow2")));
//! convert(&registry, &source, &options, &Monitor::default())?;
//!
//! let made = Disk::open(&registry, &to, &OpenOptions::read_only())?;
//! let options = CompareOptions::default();
//! assert!(compare(&source.disks()[0], &made, &options, &Monitor::default())?.identical);
//! # Ok(())
//! # }
//! ```
//!
//! A [`Monitor`] holds a job's progress sink and cancel token.
//!
//! # Features
//! None is on by default: disks and jobs need none. vdkit runs on Linux; a C compiler builds three of its
//! compression libraries.
//!
//! | feature | what it adds |
//! |---|---|
//! | `serve` | `nbd`, `serve`, `live`: NBD servers, and images exchanged under a served disk |
//! | `fuse` | `fuse`: a disk as a file |
//! | `vhost` | `vhost_user`: virtio disks over shared memory |
//! | `nbd-client` | `nbd_client`, and NBD URIs as names of images |
//! | `http` | images at HTTP and HTTPS addresses, in [`stream`] |
//! | `tls` | NBD over TLS with certificates, in servers and clients that are on |
//! | `tls-psk` | the same with pre-shared keys, by a second TLS library |

#![cfg_attr(docsrs, feature(doc_cfg))]

// Lists and no globs: what an inner crate shows to its neighbors is not promised to programs. A test
// compares the names with `tests/public-names.txt`.

// Disks.
pub use vdkit_block::{
    CacheMode, FileHints, GuestOffset, HostOffset, Limits, MapCacheStats, RefJudge, RefPolicy,
    Secret, parse_size,
};
pub use vdkit_chain::{
    BackingChoice, BackingImage, ChainLink, ChainReport, ChangedParent, Completion, Disk,
    DiskExtent, DiskPlace, DiskStream, Extents, HostInfo, Layer, NewPart, OpenOptions, Queue,
    Ready, Request, RequestGuard, TruncationCheck, changed_parent, describe_chain, same_file,
};

// Errors, cancellation and progress.
pub use vdkit_block::{
    CancelToken, Error, ErrorKind, Fault, IoAction, LockHolder, Monitor, NoProgress, Progress,
    Refusal, Remedy, Result, plain,
};

// Formats, by name, and what their images say.
pub use registry::{FORMATS, format, format_of_name, registry};
pub use vdkit_block::{
    AmendRequest, Amendment, BackingRef, BitmapInfo, CheckReport, Codec, CompactOptions,
    CompactReport, Compaction, CompressionSpec, CreateRequest, Creation, DriverInfo, ExtentInfo,
    Finding, FormatDriver, ImageInfo, KeyHeader, KeySlot, KeySlotInfo, KeyedImages, LeftAlone,
    Measured, NotedTime, OfflineImage, OpenRequest, OptionKind, OptionSpec, Options, Probe, Repair,
    Severity, SnapshotInfo,
};
pub use vdkit_chain::{Probed, Protocol, Registry, RejectedKind};
pub use vdkit_luks::decrypt_cbc_padded;
pub use vdkit_vhd::azure_faults;

// An open image of a disk: its map, snapshots and dirty bitmaps.
pub use vdkit_block::{
    BitmapStatus, Bitmaps, Compressed, Extent, FileIndex, Format, FormatCaps, MapCache, NewBitmap,
    NewSnapshot, Overlay, Place, Snapshots,
};

// What a storage of the program's own implements, and what it may offer.
pub use vdkit_block::{
    AccessExchange, CopyMethod, CopyOp, GuestDiscard, InitialWrites, KernelCopy, ReadOp, ReadPaths,
    SpaceMap, Storage, StorageCaps, StorageExt, StorageExtent, StorageLayer, ZeroMode,
    capabilities,
};

/// Storages of images: files, devices and memory.
pub mod storage {
    pub use vdkit_storage::{
        AlignedBuf, CacheShare, CommitOptions, CreateMode, FileKind, FileOptions, FileStorage,
        LockMode, MemoryStorage, PendingFile, classify,
    };
}

/// Bytes that come or go in order: pipes, compressed files, HTTP.
pub mod stream {
    pub use vdkit_stream::{
        ByteStream, Checked, Checksum, HashMethod, Hasher, OutPipe, Packing, Stdin, Stdout,
        StorageReader, spool,
    };
    #[cfg(feature = "http")]
    pub use vdkit_stream::{HttpStorage, Remote, is_url, open_url};
}

/// Appliances (OVA): the disks and the virtual machine of a tar file.
pub mod ova {
    pub use vdkit_ova::{
        Controller, Descriptor, FileReference, Firmware, Machine, Manifest, ManifestEntry, Member,
        OPTIONS, Package, PackageLimits, PackagedDisk, VirtualDisk,
    };
}

/// Long work on images: each job reports to a [`Monitor`] and returns a report that serializes to JSON.
pub mod jobs {
    pub use vdkit_appliance::{
        ApplianceDisk, ApplianceReport, Extraction, NewAppliance, describe_packaged, extract,
        open_packaged, pack,
    };
    pub use vdkit_copy::{
        Backing, BrokenBitmaps, CommitOptions, CommitReport, CompareOptions, CompareReport,
        ConvertOptions, ConvertReport, CreateOptions, Created, DdOptions, DdPlan, DdReport,
        Destination, ExistingImage, FoundBacking, Incoming, LeftBehind, MovedBytes, NewBacking,
        NewImage, RawStream, RebaseOptions, RebaseReport, Source, bitmaps, commit, commit_disks,
        compare, convert, convert_stream, create, dd_new, default_threads, merge_bitmap, rebase,
        receive, replaced_files, take_over, verify,
    };
    pub use vdkit_doctor::{
        Allocation, DoctorCode, DoctorEvidence, DoctorFinding, DoctorImage, DoctorOptions,
        DoctorReport, DoctorSeverity, doctor,
    };
    pub use vdkit_image::{
        AmendReport, Checked, Compacted, Described, DiskImage, KeysAfter, ListedKeys, Map, MapRow,
        MeasureReport, Occupied, Preallocation, ResizeOptions, SizeChange, SnapshotAction, add_key,
        amend, change_key, check, compact, describe_disk, list_keys, map, measure, measure_empty,
        occupied, remove_key, resize, snapshot, snapshots,
    };
    pub use vdkit_inspect::{Objection, Preset, Rule, Use, ValidateReport, validate};
    pub use vdkit_tree::{
        Dependents, ReferenceStatus, TreeBacking, TreeFault, TreeImage, TreeOptions, TreeReport,
        dependents, refuse_dependents, tree,
    };

    /// Whether an untrusted image is safe to use.
    pub mod inspect {
        pub use vdkit_inspect::{
            Allow, Code, Depth, FORMAT_NAMES, InspectFinding, InspectOptions, InspectReport,
            Verdict, Weight, inspect,
        };
    }

    /// The disk element of a libvirt domain.
    pub mod libvirt {
        pub use vdkit_libvirt::{
            CachePlace, DiskBacking, DiskSource, LibvirtDisk, cache_for, is_known,
        };
    }
}

/// What all servers share: the served disk, its counters, and the control socket.
#[cfg(feature = "serve")]
pub mod serve {
    pub use vdkit_serve::{
        Access, Answer, BitmapList, Change, Client, Command, Committed, Control, Controller, Done,
        Export, ExportOptions, Held, ImageChain, Images, JobStatus, LatencyBucket, OnNoSpace,
        OpKind, OpStats, ParkedInfo, Requests, Scrape, ScrapeAddress, Stats, Status, UnixSocket,
        Written, ask, quantile, raise_descriptor_limit,
    };
}
#[cfg(feature = "serve")]
pub mod live;
mod registry;

/// Disks for NBD clients.
#[cfg(feature = "serve")]
pub mod nbd {
    pub use vdkit_nbd::{Address, Admission, Exports, Listener, Server, ServerOptions, Tls};
}

/// A disk as a virtio disk of a virtual machine, over shared memory (vhost-user-blk).
#[cfg(feature = "vhost")]
pub mod vhost_user {
    pub use vdkit_vhost::{Listener, Server, ServerOptions};
}

/// A disk as a plain file.
#[cfg(feature = "fuse")]
pub mod fuse {
    pub use vdkit_fuse::{Ending, MountError, Server, ServerOptions};
}

/// Exports of NBD servers, as images and as storages.
#[cfg(feature = "nbd-client")]
pub mod nbd_client {
    pub use vdkit_nbd_client::{
        BASE_ALLOCATION, DescribedExport, ExportInfo, ListedExport, NBD, NbdOptions, NbdStorage,
        NbdUri, Place, SCHEMES, StatusRun, TlsNames, describe_exports, flag, open_simple, percent,
    };
}
